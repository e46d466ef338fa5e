//! Moves for deadlines (`policies::deadline::moves`): two nodes are played as a cluster plays them. On each node `qos`
//! shares and judges deadlines; above them a second decider has what the nodes say, and moves jobs.

use gainshare_core::decider::{Decider, Outcome};
use gainshare_core::fixtures::{node, running};
use gainshare_core::model::{JobId, NodeId, Share, Span, Time};
use gainshare_core::plan::{MoveReason, Reason};
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::signal::speed::Pace;
use gainshare_core::signal::{Outlook, Signal, TimedValue};
use gainshare_core::view::{Deadline, Ends, FinishView, JobView, Marks, Phase, View, WorkLeft};

const NONE: [u64; 0] = [];

const CORES: f64 = 4.0;
const STEPS: u64 = 1000;

fn at(second: f64) -> Time {
    Time::from_secs_f64(second)
}

fn mover() -> Decider {
    Decider::new(Policy::from(Preset::Gainshare))
}

/// The moves of one decision: which job goes to which node.
fn moves(decider: &mut Decider, view: View) -> Vec<(u64, u32)> {
    match decider.decide(view) {
        Outcome::Rejected(rejection) => panic!("an unsound plan: {}", rejection.reasons()),
        Outcome::NotDue => vec![],
        Outcome::Decision(decision) => {
            let for_deadline = decision.plan.moves.iter().filter(|made| made.why == MoveReason::Deadline);
            for_deadline.map(|made| (made.job.0, made.to.0)).collect()
        }
    }
}

/// A job that is played.
struct Job {
    node: u32,
    work_core_s: f64,
    due_s: f64,
    done_core_s: f64,
    since_s: f64,
    /// The job is between two nodes until then.
    absent_until_s: f64,
    ended_s: Option<f64>,
    marks: Marks,
    ends: Ends,
}

fn job(node: u32, work_core_s: f64, due_s: f64) -> Job {
    Job {
        node,
        work_core_s,
        due_s,
        done_core_s: 0.0,
        since_s: 0.0,
        absent_until_s: 0.0,
        ended_s: None,
        marks: Marks::default(),
        ends: Ends::Open,
    }
}

struct Play {
    jobs: Vec<Job>,
    nodes: u32,
    cost_s: f64,
    now_s: f64,
    moves: Vec<(u64, u32)>,
}

impl Play {
    fn run(nodes: u32, cost_s: f64, jobs: Vec<Job>) -> Play {
        let mut play = Play { jobs, nodes, cost_s, now_s: 0.0, moves: vec![] };
        let mut sharers: Vec<Decider> = (0..nodes).map(|_| Decider::new(Policy::from(Preset::Qos))).collect();
        let mut mover = mover();
        mover.set_moving_cost(Span::from_secs_f64(cost_s));
        while play.now_s < 300.0 && play.jobs.iter().any(|job| job.ended_s.is_none()) {
            for (node, sharer) in sharers.iter_mut().enumerate() {
                play.share(node as u32, sharer);
            }
            play.place(&mut mover);
            play.now_s += 1.0;
        }
        play
    }

    /// The jobs that are on a node, or on their way to it.
    fn view(&self, is_shown: impl Fn(&Job) -> bool, change: impl Fn(&Job, &mut JobView)) -> View {
        let jobs = self.jobs.iter().enumerate().filter(|(_, job)| job.ended_s.is_none() && is_shown(job));
        let view = |(id, job): (usize, &Job)| {
            let report = TimedValue { value: 1.0, at: at(self.now_s) };
            let mut view = JobView {
                phase: Phase::Running { node: NodeId(job.node), since: at(job.since_s), attempt: 1 },
                signal: Signal { reports: 2, first: Some(report), last: Some(report), ..Signal::default() },
                deadline: Some(Deadline::strict(at(job.due_s))),
                marks: job.marks,
                ..running(id as u64, job.node)
            };
            change(job, &mut view);
            view
        };
        let jobs = jobs.map(view).collect();
        View { now: at(self.now_s), nodes: (0..self.nodes).map(node).collect(), jobs }
    }

    /// A second on one node: it decides, says how deadlines stand, and its jobs work.
    fn share(&mut self, on: u32, sharer: &mut Decider) {
        let now_s = self.now_s;
        let view = self.view(
            |job| job.node == on && job.absent_until_s <= now_s,
            |job, view| {
                view.signal.total = Some(STEPS);
                view.signal.step = Some((STEPS as f64 * job.done_core_s / job.work_core_s) as u64);
                view.signal.pace = Some(Pace::from_law(0.0, job.work_core_s / CORES / STEPS as f64, 1.0));
            },
        );
        let here: Vec<usize> = view.jobs.iter().map(|job| job.id.0 as usize).collect();
        match sharer.decide(view) {
            Outcome::Rejected(rejection) => panic!("an unsound plan: {}", rejection.reasons()),
            Outcome::NotDue => {}
            Outcome::Decision(decision) => {
                for &id in &here {
                    self.jobs[id].ends = match decision.plan.verdicts[&JobId(id as u64)].reason {
                        Reason::MeetsDeadline { .. } | Reason::Early { .. } => Ends::InTime,
                        Reason::CannotMeet { .. } => Ends::Late,
                        _ => Ends::Open,
                    };
                }
            }
        }
        for id in here {
            let share = sharer.target(JobId(id as u64)).map_or(0.0, |target| target.share.cpu.get());
            let job = &mut self.jobs[id];
            job.done_core_s += share * CORES;
            if job.done_core_s >= job.work_core_s {
                job.ended_s = Some(now_s + 1.0);
            }
        }
    }

    fn place(&mut self, mover: &mut Decider) {
        let now_s = self.now_s;
        let view = self.view(
            |_| true,
            |job, view| {
                let is_here = job.absent_until_s <= now_s;
                view.pinned = !is_here;
                let work_core_s = (job.work_core_s - job.done_core_s).max(0.0);
                let left = WorkLeft { work_core_s, serial_s: 0.0, usable_cores: CORES, spread: 0.05 };
                view.finish = is_here.then_some(FinishView { ends: job.ends, left });
            },
        );
        for (id, to) in moves(mover, view) {
            self.moves.push((id, to));
            let job = &mut self.jobs[id as usize];
            (job.node, job.absent_until_s) = (to, now_s + self.cost_s);
            (job.since_s, job.ends, job.marks) = (job.absent_until_s, Ends::Open, mover.marks(JobId(id)));
        }
    }

    fn missed(&self) -> Vec<usize> {
        let misses = |job: &Job| job.ended_s.is_none_or(|ended_s| ended_s > job.due_s);
        (0..self.jobs.len()).filter(|&id| misses(&self.jobs[id])).collect()
    }
}

/// On node 0 two jobs need more than its four cores until their deadlines; the larger one is not promised its own.
fn crowded() -> Vec<Job> {
    vec![job(0, 350.0, 120.0), job(0, 200.0, 120.0)]
}

#[test]
fn a_late_job_on_a_full_node_moves_once_to_the_free_node_and_makes_its_deadline() {
    assert_eq!(Play::run(1, 5.0, crowded()).missed(), [0]);
    let moves = Play::run(2, 5.0, crowded());
    assert_eq!((moves.missed(), &moves.moves[..]), (vec![], &[(0, 1)][..]));
}

#[test]
fn a_job_whose_gain_the_cost_of_the_move_eats_stays() {
    let costly = Play::run(2, 40.0, crowded());
    assert_eq!((costly.missed(), &costly.moves[..]), (vec![0], &[][..]));
}

#[test]
fn no_move_breaks_a_promise_of_the_other_node() {
    let with_resident = |due_s| {
        let mut jobs = crowded();
        jobs.push(job(1, 250.0, due_s));
        Play::run(2, 5.0, jobs)
    };
    let soon = with_resident(120.0);
    assert_eq!((soon.missed(), &soon.moves[..]), (vec![0], &[][..]));
    let later = with_resident(250.0);
    assert_eq!((later.missed(), &later.moves[..]), (vec![], &[(0, 1)][..]), "the resident can wait");
}

/// A job of a hand-made view: what it has left, and how its deadline stands, a hundred seconds from the beginning.
fn stands(id: u64, on: u32, ends: Ends, work_core_s: f64) -> JobView {
    let left = WorkLeft { work_core_s, serial_s: 0.0, usable_cores: CORES, spread: 0.1 };
    JobView { deadline: Some(Deadline::strict(at(200.0))), finish: Some(FinishView { ends, left }), ..running(id, on) }
}

/// One decision at each of these seconds about the same jobs, which report all the time.
fn decide(decider: &mut Decider, nodes: u32, seconds: std::ops::Range<u32>, jobs: &[JobView]) -> Vec<(u32, u64, u32)> {
    let mut made = vec![];
    for second in seconds {
        let now = at(f64::from(second));
        let mut jobs = jobs.to_vec();
        for job in &mut jobs {
            job.signal.reports = 2 + u64::from(second);
            job.signal.last = job.signal.last.or(Some(TimedValue { value: 1.0, at: now }));
        }
        let view = View { now, nodes: (0..nodes).map(node).collect(), jobs };
        made.extend(moves(decider, view).into_iter().map(|(job, to)| (second, job, to)));
    }
    made
}

#[test]
fn only_a_lasting_miss_moves_a_job() {
    let late = [stands(1, 0, Ends::Late, 100.0)];
    assert_eq!(decide(&mut mover(), 2, 100..130, &late), [(110, 1, 1)]);
    // It goes and comes again.
    let mut decider = mover();
    let open = [stands(1, 0, Ends::Open, 100.0)];
    for start in [100, 110, 120] {
        assert_eq!(decide(&mut decider, 2, start..start + 8, &late), []);
        assert_eq!(decide(&mut decider, 2, start + 8..start + 10, &open), []);
    }
    // Neither a job without a verdict nor one that is in time moves, however long that lasts.
    assert_eq!(decide(&mut mover(), 2, 100..160, &open), []);
    assert_eq!(decide(&mut mover(), 2, 100..160, &[stands(1, 0, Ends::InTime, 100.0)]), []);
}

#[test]
fn a_job_that_must_stay_or_is_silent_does_not_move() {
    let pinned = JobView { pinned: true, ..stands(1, 0, Ends::Late, 100.0) };
    let mut silent = stands(1, 0, Ends::Late, 10.0);
    silent.deadline = Some(Deadline::strict(at(1000.0)));
    silent.signal.last = Some(TimedValue { value: 1.0, at: at(100.0) });
    assert_eq!(decide(&mut mover(), 2, 100..160, &[pinned]), []);
    assert_eq!(decide(&mut mover(), 2, 300..360, std::slice::from_ref(&silent)), []);
    assert_eq!(decide(&mut mover(), 2, 150..200, &[silent]).len(), 1, "silent for less than two minutes");
}

#[test]
fn a_job_moves_for_its_deadline_once_also_after_a_restart() {
    let mut decider = mover();
    assert_eq!(decide(&mut decider, 3, 100..106, &[stands(1, 0, Ends::Late, 100.0)]), []);
    // What is remembered is written and read: the miss has lasted since the beginning.
    let text = serde_json::to_string(&decider).expect("a decider serialises");
    let mut decider: Decider = serde_json::from_str(&text).expect("it is read back");
    assert_eq!(decide(&mut decider, 3, 106..112, &[stands(1, 0, Ends::Late, 100.0)]), [(110, 1, 1)]);
    let marks = decider.marks(JobId(1));
    assert_eq!(marks, Marks { for_deadline: Some(at(110.0)), ..Marks::default() });
    // It is late there, too, or has not moved at all; the third node is free.
    for on in [0, 1] {
        let again = stands(1, on, Ends::Late, 60.0);
        assert_eq!(decide(&mut decider.clone(), 3, 120..160, std::slice::from_ref(&again)), []);
        let marked = JobView { marks, ..again.clone() };
        assert_eq!(decide(&mut mover(), 3, 120..160, &[marked]), [], "a driver that restarts gives the mark back");
        assert_eq!(decide(&mut mover(), 3, 120..160, &[again]).len(), 1, "the mark is what holds it");
    }
}

#[test]
fn late_jobs_do_not_take_the_same_room() {
    // Alone on node 2 each would make its deadline; together they need 5 of its 4 cores.
    let two = |work: f64| [stands(1, 0, Ends::Late, work), stands(2, 1, Ends::Late, work)];
    assert_eq!(decide(&mut mover(), 3, 100..111, &two(200.0)), [(110, 1, 2)]);
    assert_eq!(decide(&mut mover(), 3, 100..111, &two(100.0)), [(110, 1, 2), (110, 2, 2)]);
    // One that is there already, and in time, counts in the same way.
    let full = |ends| [stands(1, 0, Ends::Late, 100.0), stands(2, 1, ends, 200.0)];
    assert_eq!(decide(&mut mover(), 2, 100..160, &full(Ends::InTime)), []);
    assert_eq!(decide(&mut mover(), 2, 100..111, &full(Ends::Open)), [(110, 1, 1)], "it has no promise");
}

#[test]
fn what_floors_keep_is_not_given_to_a_late_job() {
    // On the other node the job needs 0.65 of it: 220 core-seconds in 85 s.
    let moves = |floor: f64, own_floor: f64| {
        let late = JobView { floor: Share::clamped(own_floor), ..stands(1, 0, Ends::Late, 200.0) };
        let resident = JobView { floor: Share::clamped(floor), ..running(2, 1) };
        decide(&mut mover(), 2, 100..120, &[late, resident])
    };
    assert_eq!(moves(0.3, 0.0), [(110, 1, 1)]);
    assert_eq!(moves(0.4, 0.0), []);
    assert_eq!(moves(0.2, 0.2), [], "the job brings its own floor");
}

#[test]
fn a_further_node_is_needed_only_where_no_node_that_exists_helps() {
    let needs = |nodes, seconds, jobs: &[JobView]| {
        let mut decider = mover();
        decide(&mut decider, nodes, seconds, jobs);
        (1..=2).filter(|id| decider.needs_node(JobId(*id))).collect::<Vec<u64>>()
    };
    let late = stands(1, 0, Ends::Late, 100.0);
    assert_eq!(needs(1, 100..109, std::slice::from_ref(&late)), NONE, "it has not lasted");
    assert_eq!(needs(1, 100..120, std::slice::from_ref(&late)), [1]);
    assert_eq!(needs(2, 100..120, std::slice::from_ref(&late)), NONE, "it was moved");
    // The second of two on a node waits until the first has gone, and then finds room.
    let both = [late.clone(), stands(2, 0, Ends::Late, 100.0)];
    assert_eq!(needs(2, 100..124, &both), NONE);
    assert_eq!(needs(1, 100..120, &both), [1, 2]);
    let pinned = JobView { pinned: true, ..late };
    assert_eq!(needs(1, 100..120, &[pinned]), NONE, "it would not move there");
}

#[test]
fn one_job_leaves_a_node_at_a_time_the_one_that_is_due_first() {
    let mut sooner = stands(2, 0, Ends::Late, 100.0);
    sooner.deadline = Some(Deadline::strict(at(190.0)));
    let jobs = [stands(1, 0, Ends::Late, 100.0), sooner];
    let made = decide(&mut mover(), 3, 100..140, &jobs);
    let order: Vec<(u32, u64)> = made.iter().map(|(second, job, _)| (*second, *job)).collect();
    // The other one has to be late for ten more seconds after the five that the move takes.
    assert_eq!(order, [(110, 2), (125, 1)]);
}

#[test]
fn a_node_on_which_a_job_has_just_begun_takes_no_other() {
    let due = Some(Deadline::strict(at(500.0)));
    let late = JobView { deadline: due, ..stands(1, 0, Ends::Late, 100.0) };
    let begun = |since_s: f64, deadline| {
        let phase = Phase::Running { node: NodeId(1), since: at(since_s), attempt: 1 };
        JobView { phase, deadline, ..running(2, 1) }
    };
    let moved_at = |other| decide(&mut mover(), 2, 300..321, &[late.clone(), other]).first().map(|made| made.0);
    assert_eq!(moved_at(begun(295.0, due)), None, "what it needs is not known for two minutes");
    assert_eq!(moved_at(begun(0.0, due)), Some(310), "nothing can be promised to it");
    assert_eq!(moved_at(begun(305.0, None)), Some(315), "a job without a deadline needs nothing for one");
    assert_eq!(moved_at(begun(0.0, None)), Some(310));
    let marks = Marks { for_deadline: Some(at(299.0)), ..Marks::default() };
    assert_eq!(moved_at(JobView { marks, ..begun(0.0, due) }), None, "it is on its way there");
}

#[test]
fn without_a_late_job_the_moves_are_those_by_gain() {
    let play = |change: fn(&mut JobView)| {
        let mut decider = mover();
        let mut made = vec![];
        for i in 1..=8u64 {
            let now = at(2.0 * i as f64);
            let report = TimedValue { value: 1.0 / (1.0 + i as f64), at: now };
            let outlook = Outlook { at: i as f64, flat_at: 100.0, gain_left: 0.5, scale: 0.0, scale_spread: 0.0 };
            let job = |id| {
                let mut job = running(id, 0);
                job.signal = Signal {
                    reports: i,
                    first: Some(TimedValue { value: 0.5, at: at(2.0) }),
                    last: Some(report),
                    longest_gap: Span::from_secs(2),
                    step: Some(i),
                    total: Some(100),
                    outlook: Some(outlook),
                    ..Signal::default()
                };
                job.consumed_node_s.cpu = i as f64;
                change(&mut job);
                job
            };
            let view = View { now, nodes: vec![node(0), node(1)], jobs: vec![job(1), job(2)] };
            let decision = decider.decide(view).decision();
            made.push(decision.map(|decision| (decision.plan.moves.clone(), decision.plan.verdicts.clone())));
        }
        made
    };
    let by_gain = play(|_| {});
    let moves = |made: &[Option<(Vec<_>, _)>]| made.iter().flatten().map(|(moves, _)| moves.len()).sum::<usize>();
    assert!(moves(&by_gain) > 0);
    let in_time = play(|job| {
        let left = WorkLeft { work_core_s: 9.0, serial_s: 0.0, usable_cores: 1.0, spread: 0.0 };
        job.deadline = Some(Deadline::strict(at(1000.0)));
        job.finish = Some(FinishView { ends: Ends::InTime, left });
    });
    assert_eq!(in_time, by_gain);
    let moved = play(|job| job.marks.for_deadline = Some(Time::ZERO));
    assert_eq!(moves(&moved), 0, "jobs that were moved for their deadlines stay where they make them");
}
