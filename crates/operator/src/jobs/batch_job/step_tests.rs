//! Single steps of [`super`], each with the border where another one begins.

use super::*;
use crate::state::snapshot::{Exit, NodeState, Phase as PodPhase};

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn order(kind: OrderKind, node: &str) -> Order {
    Order { uid: "job".into(), node: node.into(), kind, reason: PlacementReason::Gain }
}

/// A Job that is followed and runs on node a.
fn job() -> BatchJobSnapshot {
    let journal = Journal {
        message: "runs on a as p".into(),
        node: Some("a".into()),
        began: Some(MicroTime(Timestamp::UNIX_EPOCH)),
        moves: 3,
        ..Journal::default()
    };
    let (name, uid) = ("run".into(), "job".into());
    BatchJobSnapshot { name, uid, asked: true, has_journal: true, grace_s: 30, journal, ..BatchJobSnapshot::default() }
}

fn pod(uid: &str) -> PodSnapshot {
    PodSnapshot {
        name: uid.into(),
        uid: uid.into(),
        job: "run".into(),
        owner: Some("job".into()),
        node: Some("a".into()),
        running: true,
        phase: PodPhase::Running,
        ..PodSnapshot::default()
    }
}

fn ended(uid: &str, code: i32) -> PodSnapshot {
    let exit = Some(Exit { code, finished: now(), ..Exit::default() });
    PodSnapshot { running: false, phase: PodPhase::Failed, exit, ..pod(uid) }
}

fn deleted(pod: PodSnapshot) -> PodSnapshot {
    PodSnapshot { deleted: Some((now(), now() + SignedDuration::from_secs(30))), ..pod }
}

/// A Job whose pod p is being stopped for a move from a to b.
fn moving(phase: Phase, suspended: bool) -> BatchJobSnapshot {
    let mut job = job();
    let since = now() - SignedDuration::from_secs(60);
    let mut migration = begin_move(&order(OrderKind::Move, "b"), "a".into(), 1, since);
    migration.phase = phase;
    job.journal.migration = Some(migration);
    job.journal.pod = Some(id(&pod("p")));
    job.suspended = suspended;
    job
}

/// Without an order, and with sharing switched on.
fn snapshot<'a>(job: &'a BatchJobSnapshot, pods: &'a [PodSnapshot], nodes: &'a Nodes) -> Snapshot<'a> {
    Snapshot { now: now(), job, pods, nodes, order: None, closed: None, off: false, marks: Marks::default() }
}

fn two_nodes() -> Nodes {
    ["a", "b"].map(|node| (node.into(), NodeState::Ready)).into()
}

fn take(job: &BatchJobSnapshot, pods: &[PodSnapshot], order: Option<&Order>) -> Step {
    step(&Snapshot { order, ..snapshot(job, pods, &two_nodes()) })
}

fn actions(job: &BatchJobSnapshot, pods: &[PodSnapshot]) -> Vec<Action> {
    take(job, pods, None).actions
}

/// The journal of the only write.
fn written(actions: &[Action]) -> (JournalStep, Journal) {
    let mut found = actions.iter().filter_map(|action| match action {
        Action::Write(step, journal) | Action::Resume(step, journal) => Some((*step, journal.as_ref().clone())),
        _ => None,
    });
    let first = found.next().unwrap_or_else(|| panic!("nothing is written: {actions:?}"));
    assert!(found.next().is_none(), "{actions:?}");
    first
}

#[test]
fn the_node_annotation_is_followed_once() {
    let mut job = job();
    assert_eq!(requested_order(&job), None);
    job.wanted_node = Some("b".into());
    assert_eq!(requested_order(&job).map(|order| order.node), Some("b".into()));
    job.journal.asked_node = Some("b".into());
    assert_eq!(requested_order(&job), None, "it was followed before");
}

#[test]
fn a_job_at_rest_writes_nothing_and_removes_orders_that_do_not_apply() {
    assert_eq!(actions(&job(), &[pod("p")]), []);
    let here = order(OrderKind::Move, "a");
    assert_eq!(take(&job(), &[pod("p")], Some(&here)).actions, [Action::RemoveOrder], "it is there already");
    let place = order(OrderKind::Place, "b");
    assert_eq!(take(&job(), &[pod("p")], Some(&place)).actions, [Action::RemoveOrder], "it has a place");
    // A step that does something else keeps the order for the next one.
    let unmarked = PodSnapshot { job: String::new(), ..pod("p") };
    assert_eq!(take(&job(), std::slice::from_ref(&unmarked), Some(&here)).actions, [Action::Mark(id(&unmarked), true)]);
    let elsewhere = order(OrderKind::Move, "b");
    let begun = take(&job(), &[pod("p")], Some(&elsewhere)).actions;
    assert_eq!((written(&begun).0, begun.last()), (JournalStep::Stopping, Some(&Action::RemoveOrder)));
    let mut changed = job();
    changed.journal.message = "waits".into();
    let noted = written(&actions(&changed, &[pod("p")]));
    assert_eq!((noted.0, noted.1.message.as_str()), (JournalStep::Noted, "runs on a as p"));
}

#[test]
fn only_a_pod_that_runs_and_stays_is_followed() {
    for other in [
        deleted(pod("p")),
        PodSnapshot { node: None, ..pod("p") },
        PodSnapshot { running: false, phase: PodPhase::Pending, ..pod("p") },
    ] {
        let pods = [other];
        let elsewhere = order(OrderKind::Move, "b");
        let taken = take(&job(), &pods, Some(&elsewhere)).actions;
        assert_eq!(taken, [Action::RemoveOrder], "{pods:?}");
    }
}

#[test]
fn a_job_that_ended_holds_no_pod_and_gives_up_its_move() {
    let held = PodSnapshot { has_finalizer: true, ..pod("p") };
    let mut over = moving(Phase::Stopping, true);
    over.ended = true;
    let all = actions(&over, std::slice::from_ref(&held));
    assert_eq!(all[0], Action::LetGo(id(&held)));
    let (step, journal) = written(&all);
    assert_eq!((step, journal.migration.is_none(), journal.pod.is_none()), (JournalStep::Cancelled, true, true));
    assert_eq!((journal.message.as_str(), journal.moves), ("it ended before it was moved", 3), "the rest is kept");
    over.deleting = true;
    assert_eq!(actions(&over, std::slice::from_ref(&held)), [Action::LetGo(id(&held))], "no write to a Job that goes");
    let deleting = BatchJobSnapshot { deleting: true, ..job() };
    assert_eq!(actions(&deleting, std::slice::from_ref(&held)), [Action::LetGo(id(&held))]);
    assert_eq!(actions(&BatchJobSnapshot { ended: true, ..job() }, &[pod("p")]), []);
}

#[test]
fn a_job_that_is_not_ours_any_more_loses_our_marks() {
    let free = BatchJobSnapshot { asked: false, has_journal: false, ..job() };
    assert_eq!(actions(&free, &[pod("p")]), [Action::Mark(id(&pod("p")), false)]);
    let unmarked = PodSnapshot { job: String::new(), ..pod("p") };
    assert_eq!(actions(&free, &[unmarked]), []);
    assert_eq!(actions(&free, &[ended("p", 0)]), [], "a pod that has ended keeps its labels");
    let mut preferred = BatchJobSnapshot { asked: false, suspended: true, ..job() };
    preferred.journal.prefers = Some("a".into());
    let unmarked = PodSnapshot { job: String::new(), ..pod("p") };
    assert_eq!(actions(&preferred, &[unmarked]), [], "its pod has not ended");
    assert_eq!(actions(&preferred, &[ended("p", 0)]), [Action::Forget]);
    preferred.suspended = false;
    assert_eq!(actions(&preferred, &[ended("p", 0)]), [], "it is not suspended");
}

#[test]
fn a_problem_is_noted_and_pods_lose_their_marks() {
    let broken = BatchJobSnapshot { problem: Some("no claim".into()), ..job() };
    let all = actions(&broken, &[pod("p"), ended("q", 0), PodSnapshot { job: String::new(), ..pod("r") }]);
    let marks: Vec<&Action> = all.iter().filter(|action| matches!(action, Action::Mark(..))).collect();
    assert_eq!(marks, [&Action::Mark(id(&pod("p")), false)]);
    assert_eq!(written(&all).1.message, "is not moved: no claim");
}

#[test]
fn a_pod_that_ends_before_the_suspension_ends_the_move() {
    let held = PodSnapshot { has_finalizer: true, ..pod("p") };
    let suspend = actions(&moving(Phase::Stopping, false), std::slice::from_ref(&held));
    assert_eq!(suspend, [Action::Suspend]);
    let gone = actions(&moving(Phase::Stopping, false), &[deleted(held.clone())]);
    assert_eq!(written(&gone).1.message, "its pod was deleted before it was moved");
    assert!(matches!(gone[..], [Action::Write(..)]), "a Job that runs is not resumed: {gone:?}");
    let by_itself = actions(&moving(Phase::Stopping, true), &[ended("p", 0)]);
    assert_eq!(written(&by_itself).1.message, "its pod ended by itself before it was moved");
    assert!(matches!(by_itself[..], [Action::Resume(..)]), "a Job that was suspended is resumed: {by_itself:?}");
    let ending = take(&moving(Phase::Stopping, true), &[deleted(held)], None);
    assert_eq!((ending.actions, ending.wake.is_some()), (vec![], true), "it saves itself");
}

#[test]
fn a_pod_gets_its_own_share_back_before_it_is_stopped() {
    let reshaped = PodSnapshot { has_finalizer: true, reshaped: true, ..pod("p") };
    let mut begun = moving(Phase::Stopping, false);
    let since = |job: &mut BatchJobSnapshot, ago_s: i64| {
        job.journal.migration.as_mut().unwrap().since = MicroTime(now() - SignedDuration::from_secs(ago_s));
    };
    since(&mut begun, 1);
    let waits = take(&begun, std::slice::from_ref(&reshaped), None);
    assert_eq!((waits.actions, waits.wake.is_some()), (vec![], true));
    since(&mut begun, 2);
    assert_eq!(actions(&begun, std::slice::from_ref(&reshaped)), [Action::Suspend], "not for ever");
    since(&mut begun, 1);
    begun.suspended = true;
    let saving = take(&begun, &[deleted(reshaped)], None);
    assert_eq!(saving.actions, [], "it is suspended already");
}

#[test]
fn the_next_attempt_waits_for_every_pod() {
    let stopped = deleted(PodSnapshot { has_finalizer: true, ..ended("p", 143) });
    let resumed = actions(&moving(Phase::Stopping, true), std::slice::from_ref(&stopped));
    let (step, journal) = written(&resumed);
    assert_eq!((step, journal.prefers.as_deref()), (JournalStep::Stopped, Some("b")));
    let waits = take(&moving(Phase::Stopping, true), &[stopped.clone(), pod("q")], None);
    assert_eq!((waits.actions, waits.wake.is_some()), (vec![], true), "another pod still runs");
    let all_ended = actions(&moving(Phase::Stopping, true), &[stopped, ended("q", 0)]);
    assert_eq!(written(&all_ended).0, JournalStep::Stopped);
}

#[test]
fn an_arrival_is_recorded_where_it_is() {
    let arrived = PodSnapshot { node: Some("b".into()), ..pod("q") };
    let (step, journal) = written(&actions(&moving(Phase::Starting, false), &[arrived]));
    assert_eq!((step, journal.moves, journal.node.as_deref()), (JournalStep::Running, 4, Some("b")));
    assert_eq!((journal.message.as_str(), journal.pod.is_none()), ("runs on b as q", true));
    let (_, journal) = written(&actions(&moving(Phase::Starting, false), &[pod("q")]));
    assert_eq!(journal.moves, 3, "it is where it was");
    assert!(journal.message.ends_with("the scheduler did not put it on b"), "{}", journal.message);
}

#[test]
fn the_decision_reads_what_the_job_does() {
    let read =
        |job: &BatchJobSnapshot, off: bool| facts(&Snapshot { off, ..snapshot(job, &[pod("p")], &Nodes::new()) });
    let state = |job: &BatchJobSnapshot| read(job, false).map(|facts| facts.state);
    assert!(matches!(state(&job()), Some(JobState::Running { node, epoch: 4, .. }) if node == "a"));
    assert_eq!(state(&BatchJobSnapshot { ended: true, ..job() }), Some(JobState::Done));
    assert_eq!(state(&BatchJobSnapshot { suspended: true, ..job() }), Some(JobState::Moving));
    assert_eq!(state(&moving(Phase::Stopping, false)), Some(JobState::Moving));
    assert_eq!(state(&BatchJobSnapshot { deleting: true, ..job() }), None);
    assert_eq!(state(&BatchJobSnapshot { asked: false, ..job() }), None);
    assert!(read(&job(), true).is_none(), "sharing is switched off");
    let mut moved = job();
    record(
        &mut moved.journal.last_moves,
        moving(Phase::Stopping, true).journal.migration.as_ref().unwrap(),
        &"b".into(),
        now(),
    );
    (moved.journal.last_moves[0].save_s, moved.journal.last_moves[0].restore_s) = (3.0, 4.0);
    assert_eq!(read(&moved, false).and_then(|facts| facts.move_cost_s), Some(7.0));
}

#[test]
fn marks_are_stored_with_the_move_and_when_the_job_stays() {
    let nodes = two_nodes();
    let marks = Marks { settled: Some(gainshare_core::model::Time(7_000_000)), ..Marks::default() };
    let take = |job: &BatchJobSnapshot, order: Option<&Order>| {
        let step = step(&Snapshot { order, marks, ..snapshot(job, &[pod("p")], &nodes) });
        step.actions.into_iter().find_map(|action| match action {
            Action::Write(step, journal) => Some((step, journal)),
            _ => None,
        })
    };
    let (kind, journal) = take(&job(), Some(&order(OrderKind::Move, "b"))).expect("a move begins");
    assert_eq!((kind, journal.migration.is_some(), journal.marks()), (JournalStep::Stopping, true, marks));
    let (kind, journal) = take(&job(), None).expect("a mark is new");
    assert_eq!((kind, journal.marks()), (JournalStep::Noted, marks));
    let stored = BatchJobSnapshot { journal: *journal, ..job() };
    assert!(take(&stored, None).is_none(), "it is written once");
    let read = facts(&snapshot(&stored, &[pod("p")], &nodes)).expect("it is followed");
    assert_eq!(read.marks, marks, "the next operator reads it");
}
