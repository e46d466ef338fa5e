//! SpeCon's Algorithms 3, 4 and 5 through the interface of all drivers: views in, plans out. Every case
//! is worked out by hand.
//!
//! A run comes every 30 s; `G` is the change of a job's value since the last run, by its first
//! value, and α is 0.01. A job needs two falling `G` below α to be converged, and a third to ask
//! for a move.

use crate::world;
use gainshare_core::check::CheckedPlan;
use gainshare_core::decider::Decider;
use gainshare_core::model::{JobId, NodeId, OwnerId, PerResource, Span, Time};
use gainshare_core::plan::MoveReason;
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::signal::{Category, Sample, Tracker};
use gainshare_core::view::{JobView, NodeView, Phase, View};

/// What a job's value does.
#[derive(Clone, Copy, PartialEq)]
enum Course {
    /// Changes by a tenth of its first value each time: progressing for ever.
    Grows,
    /// Changes by less and less, from half of α on: watching after two runs with a change,
    /// converged after three, asking after four.
    Slackens,
    /// As before, but every change is larger than the one before from the second on: it stays
    /// watching.
    Lingers,
}

struct Cluster {
    decider: Decider,
    now: Time,
    nodes: Vec<NodeView>,
    jobs: Vec<(Course, u32, Tracker, f64)>,
    round: u32,
    /// Part of its node that every job uses.
    uses: Vec<f64>,
    owners: Vec<u32>,
    pinned: bool,
}

impl Cluster {
    fn new(nodes: u32) -> Cluster {
        let node = |id| NodeView {
            id: NodeId(id),
            cores: 16.0,
            speed: 1.0,
            memory_bytes: 64 << 30,
            slots: None,
            idle_node_s: None,
        };
        Cluster {
            decider: Decider::new(Policy::from(Preset::Specon)),
            now: Time::ZERO,
            nodes: (0..nodes).map(node).collect(),
            jobs: vec![],
            round: 0,
            uses: vec![],
            owners: vec![],
            pinned: false,
        }
    }

    fn job(&mut self, node: u32, course: Course) -> &mut Cluster {
        self.job_of(0, node, course)
    }

    fn job_of(&mut self, owner: u32, node: u32, course: Course) -> &mut Cluster {
        self.owners.push(owner);
        self.jobs.push((course, node, Tracker::default(), 1.0));
        self.uses.push(0.1);
        self
    }

    /// One run; carries out its moves.
    fn run(&mut self) -> CheckedPlan {
        self.now = self.now + Span::from_secs(30);
        self.round += 1;
        let (round, now) = (self.round, self.now);
        for (course, _, tracker, value) in &mut self.jobs {
            let change = match course {
                Course::Grows => 0.1,
                Course::Slackens => 0.005 / f64::from(round),
                Course::Lingers => 0.001 * f64::from(round),
            };
            if round > 1 {
                *value += change;
            }
            tracker.push(now, Sample { value: *value, step: Some(round.into()), total: None });
        }
        let jobs = self.jobs.iter().zip(&self.uses).enumerate().map(|(i, ((_, node, tracker, _), uses))| JobView {
            id: JobId(i as u64),
            owner: OwnerId(self.owners[i]),
            phase: Phase::Running { node: NodeId(*node), since: Time::ZERO, attempt: 1 },
            signal: tracker.signal(),
            pinned: self.pinned,
            consumed_node_s: PerResource { cpu: uses * self.now.as_secs_f64(), ..PerResource::default() },
            ..JobView::default()
        });
        let view = View { now, nodes: self.nodes.clone(), jobs: jobs.collect() };
        let plan = world::decide(&mut self.decider, view).expect("a run is due");
        for m in &plan.moves {
            self.jobs[m.job.0 as usize].1 = m.to.0;
        }
        plan
    }

    fn runs(&mut self, count: u32) -> Vec<(u32, u64, u32, MoveReason)> {
        let mut moves = vec![];
        for _ in 0..count {
            let plan = self.run();
            moves.extend(plan.moves.iter().map(|m| (self.round, m.job.0, m.to.0, m.why)));
        }
        moves
    }
}

#[test]
fn algorithm_3_goes_through_the_categories_and_asks_only_then() {
    let mut cluster = Cluster::new(1);
    cluster.job(0, Course::Grows).job(0, Course::Slackens).job(0, Course::Lingers);
    // One value is no change; then the first change counts as falling.
    let expected = [
        [Category::Growing, Category::Growing, Category::Growing],
        [Category::Growing, Category::Watching, Category::Watching],
        [Category::Growing, Category::Converged, Category::Watching],
        [Category::Growing, Category::Converged, Category::Watching],
    ];
    for (round, categories) in expected.into_iter().enumerate() {
        let plan = cluster.run();
        let found: Vec<Category> = plan.verdicts.values().map(|v| v.category).collect();
        assert_eq!(found, categories, "run {round}");
    }
}

#[test]
fn the_worked_example_goes_to_worker_2() {
    let mut cluster = Cluster::new(4);
    use Course::{Grows, Lingers, Slackens};
    // Scores 6, 3.5, 4 and 11: the one converged job of Worker-4 asks in the fourth run.
    for (node, courses) in
        [&[Grows, Grows, Grows][..], &[Grows, Lingers], &[Grows, Grows], &[Grows, Grows, Grows, Grows, Grows, Slackens]]
            .into_iter()
            .enumerate()
    {
        for course in courses {
            cluster.job(node as u32, *course);
        }
    }
    assert_eq!(cluster.runs(6), [(4, 12, 1, MoveReason::SlowGrowth)]);
}

#[test]
fn a_request_needs_more_than_one_neighbour_that_still_grows() {
    let mut cluster = Cluster::new(2);
    cluster.job(0, Course::Grows).job(0, Course::Slackens);
    assert_eq!(cluster.runs(8), []);
    let mut cluster = Cluster::new(2);
    cluster.job(0, Course::Grows).job(0, Course::Lingers).job(0, Course::Slackens);
    assert_eq!(cluster.runs(8), [(4, 2, 1, MoveReason::SlowGrowth)]);
}

#[test]
fn a_host_among_the_lowest_keeps_its_job_and_is_not_asked_again() {
    // Both nodes score 5: the job stays, is marked, and does not move when the other node empties.
    let mut cluster = Cluster::new(2);
    cluster.job(0, Course::Grows).job(0, Course::Grows).job(0, Course::Slackens);
    cluster.job(1, Course::Grows).job(1, Course::Grows).job(1, Course::Slackens);
    assert_eq!(cluster.runs(5), []);
    cluster.jobs.truncate(3);
    cluster.uses.truncate(3);
    assert_eq!(cluster.runs(5), []);
}

#[test]
fn ties_go_to_the_node_that_uses_least_and_full_nodes_take_no_job() {
    let crowded = |slots: Option<usize>| {
        let mut cluster = Cluster::new(3);
        cluster.job(0, Course::Grows).job(0, Course::Grows).job(0, Course::Slackens);
        cluster.job(1, Course::Grows).job(2, Course::Grows);
        cluster.uses[3] = 0.6;
        cluster.nodes[2].slots = slots;
        cluster.runs(4)
    };
    assert_eq!(crowded(None), [(4, 2, 2, MoveReason::SlowGrowth)]);
    assert_eq!(crowded(Some(1)), [(4, 2, 1, MoveReason::SlowGrowth)]);
}

#[test]
fn algorithm_5_fills_an_idle_node_up_to_the_mean_with_those_that_settled_last() {
    // Six converged jobs on two of three nodes: bf = 2, so the third takes two, of those that
    // settled last the first by number, and each node ends with two.
    let mut cluster = Cluster::new(3);
    for i in 0..6 {
        cluster.job(i % 2, Course::Slackens);
    }
    let moves = cluster.runs(6);
    assert!(moves.iter().all(|(run, _, to, why)| (*run, *to, *why) == (3, 2, MoveReason::Rebalance)), "{moves:?}");
    assert_eq!(moves.iter().map(|m| m.1).collect::<Vec<_>>(), [0, 1]);
    let mut held = [0; 3];
    cluster.jobs.iter().for_each(|(_, node, ..)| held[*node as usize] += 1);
    assert_eq!(held, [2, 2, 2]);
}

#[test]
fn a_job_that_could_not_be_restored_is_not_moved() {
    let mut cluster = Cluster::new(2);
    cluster.job(0, Course::Grows).job(0, Course::Grows).job(0, Course::Slackens);
    cluster.pinned = true;
    assert_eq!(cluster.runs(8), []);
    let mut cluster = Cluster::new(3);
    for i in 0..6 {
        cluster.job(i % 2, Course::Slackens);
    }
    cluster.pinned = true;
    assert_eq!(cluster.runs(8), []);
}

#[test]
fn a_report_moves_a_job_only_between_nodes_on_which_its_owner_has_jobs() {
    let moves = |owner_on_node_1: u32| {
        let mut cluster = Cluster::new(4);
        cluster.job_of(0, 0, Course::Slackens).job_of(0, 0, Course::Grows).job_of(0, 0, Course::Grows);
        // Every node has a job, so that Algorithm 5 moves none.
        cluster.job_of(owner_on_node_1, 1, Course::Grows);
        cluster.job_of(1, 2, Course::Grows).job_of(1, 3, Course::Grows);
        cluster.runs(8)
    };
    assert_eq!(moves(0), [(4, 0, 1, MoveReason::SlowGrowth)]);
    assert_eq!(moves(1), []);
}

#[test]
fn a_job_makes_room_for_jobs_of_its_own_owner_only() {
    let moves = |owner_of_neighbour: u32, course: Course| {
        let mut cluster = Cluster::new(2);
        cluster.job_of(0, 0, Course::Slackens).job_of(0, 0, Course::Grows).job_of(owner_of_neighbour, 0, course);
        cluster.job_of(0, 1, Course::Grows).job_of(1, 1, Course::Grows);
        cluster.runs(8)
    };
    assert_eq!(moves(0, Course::Grows), [(4, 0, 1, MoveReason::SlowGrowth)]);
    for course in [Course::Grows, Course::Slackens, Course::Lingers] {
        assert_eq!(moves(1, course), []);
    }
}

#[test]
fn an_idle_node_takes_the_newest_job_of_several_owners_without_a_report() {
    for course in [Course::Grows, Course::Slackens, Course::Lingers] {
        let mut cluster = Cluster::new(2);
        for owner in 0..3 {
            cluster.job_of(owner, 0, course);
        }
        assert_eq!(cluster.runs(8), [(1, 2, 1, MoveReason::Rebalance)]);
    }
}
