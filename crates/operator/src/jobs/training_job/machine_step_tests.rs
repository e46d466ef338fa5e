//! Single steps of the machine, each with the border where another one begins.

use super::super::{requested_order, step};
use super::model::World;
use super::{running, work};
use crate::jobs::moves::{begin_move, exit_text, own_share_until, verdict};
use crate::jobs::training_job::action::{Action, Snapshot, Step};
use crate::jobs::workload::JournalStep;
use crate::state::orders::{Order, OrderKind};
use crate::state::snapshot::{Exit, JobSnapshot, NodeState, Nodes, Phase, PodSnapshot, Stop};
use gainshare_core::model::Time;
use gainshare_core::policy::Preset;
use gainshare_core::view::Marks;
use gainshare_kube_api::fixtures::job_policy;
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::run_policy::CleanPodPolicy;
use gainshare_kube_api::training_job::{State, StopReason, TrainingJobStatus, specon_marks};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

/// The job and its pods after some steps in the model.
fn snapshot_of(world: &World) -> (JobSnapshot, Vec<PodSnapshot>) {
    (world.job.clone().expect("the job is there"), world.pods.values().cloned().collect())
}

fn take(job: &JobSnapshot, pods: &[PodSnapshot], nodes: &Nodes, progress: Option<(&'static str, Option<u32>)>) -> Step {
    step(&Snapshot { progress, ..Snapshot::plain(now(), job, pods, nodes) })
}

fn ready() -> Nodes {
    ["a", "b"].map(|node| (node.into(), NodeState::Ready)).into()
}

#[test]
fn the_node_annotation_is_an_order_once_and_only_where_it_can_be_followed() {
    let (mut job, _) = snapshot_of(&running(143));
    let ordered = |job: &JobSnapshot| requested_order(job).map(|order| (order.kind, order.node));
    assert_eq!(ordered(&job), None);
    job.wanted_node = Some("a".into());
    assert_eq!(ordered(&job), None, "it runs there");
    job.wanted_node = Some("b".into());
    assert_eq!(ordered(&job), Some((OrderKind::Move, "b".into())));
    let mut followed = job.clone();
    followed.status.asked_node = Some("b".into());
    assert_eq!(ordered(&followed), None, "it was followed before");
    let mut fixed = job.clone();
    fixed.spec.policy = job_policy(Preset::Na);
    assert_eq!(ordered(&fixed), None, "it may not move");
    let mut stopping = job.clone();
    stopping.status.attempt.as_mut().unwrap().stopping = Some(StopReason::Suspend);
    assert_eq!(ordered(&stopping), None, "it is being stopped");
    let mut new = snapshot_of(&World::new(143)).0;
    new.wanted_node = Some("b".into());
    assert_eq!(ordered(&new), Some((OrderKind::Place, "b".into())));
    let mut tried = job;
    let attempt = tried.status.attempt.as_mut().unwrap();
    (attempt.start_time, attempt.uid, attempt.pinned, attempt.tried) = (None, None, false, vec!["b".into()]);
    assert_eq!(ordered(&tried), None, "that node had no room");
    tried.status.attempt.as_mut().unwrap().tried.clear();
    assert_eq!(ordered(&tried), Some((OrderKind::Place, "b".into())));
    tried.status.attempt.as_mut().unwrap().pinned = true;
    assert_eq!(ordered(&tried), None, "it has a place");
}

#[test]
fn a_deleted_job_goes_after_its_pods() {
    let mut world = running(143);
    world.change_job(|job| job.deleting = true);
    assert_eq!(work(&mut world), ["delete run-1"]);
    assert_eq!(work(&mut world), [] as [&str; 0], "the pod has not ended");
    world.now += SignedDuration::from_secs(2);
    world.kubelet("a");
    let (job, pods) = snapshot_of(&world);
    let go = take(&job, &pods, &ready(), None).actions;
    assert!(matches!(&go[..], [Action::LetGo { pod, .. }] if pod == "run-1"), "{go:?}");
    assert_eq!(take(&job, &[], &ready(), None).actions, [Action::Release]);
    // A pod that has ended and one that has not: the job waits for the second.
    let ends = PodSnapshot { name: "other".into(), uid: "other".into(), running: true, exit: None, ..pods[0].clone() };
    let ends = PodSnapshot { phase: Phase::Running, ..ends };
    let both = take(&job, &[pods[0].clone(), ends], &ready(), None).actions;
    assert!(!both.contains(&Action::Release), "{both:?}");
}

/// A job that has succeeded, and its pod.
fn finished() -> (JobSnapshot, PodSnapshot) {
    let (mut job, pods) = snapshot_of(&running(143));
    job.status.state = State::Succeeded;
    job.status.completion_time = Some(MicroTime(now()));
    job.status.attempt.as_mut().unwrap().ended = Some("it ended with code 0".into());
    let exit = Some(Exit { code: 0, finished: now(), ..Exit::default() });
    let pod = PodSnapshot { has_finalizer: false, running: false, phase: Phase::Succeeded, exit, ..pods[0].clone() };
    (job, pod)
}

#[test]
fn a_finished_job_lives_for_its_time() {
    let (mut job, pod) = finished();
    let at = |job: &JobSnapshot| take(job, std::slice::from_ref(&pod), &ready(), None);
    assert_eq!((at(&job).actions, at(&job).wake), (vec![], None));
    job.spec.run_policy.ttl_seconds_after_finished = Some(10);
    assert_eq!((at(&job).actions, at(&job).wake), (vec![], Some(now() + SignedDuration::from_secs(10))));
    job.status.completion_time = Some(MicroTime(now() - SignedDuration::from_secs(10)));
    assert_eq!(at(&job).actions, [Action::DeleteJob], "exactly its time");
}

#[test]
fn a_finished_job_follows_its_clean_up_policy() {
    let (mut job, stopped) = finished();
    let running = PodSnapshot { running: true, phase: Phase::Running, exit: None, ..stopped.clone() };
    let deleted = PodSnapshot { deleted: Some((now(), now())), ..running.clone() };
    let mut clean = |policy: CleanPodPolicy, pod: &PodSnapshot| {
        job.spec.run_policy.clean_pod_policy = policy;
        let actions = take(&job, std::slice::from_ref(pod), &ready(), None).actions;
        actions.iter().any(|action| matches!(action, Action::Delete { .. }))
    };
    assert!(clean(CleanPodPolicy::All, &stopped) && clean(CleanPodPolicy::Running, &running));
    assert!(!clean(CleanPodPolicy::Running, &stopped) && !clean(CleanPodPolicy::None, &running));
    assert!(!clean(CleanPodPolicy::All, &deleted), "it is being deleted");
}

#[test]
fn progress_is_published_when_it_has_changed() {
    let (mut job, pods) = snapshot_of(&running(143));
    let mut publish = |progress: (&'static str, Option<u32>)| {
        let actions = take(&job, &pods, &ready(), Some(progress)).actions;
        let Some(Action::Write(_, status)) = actions.into_iter().next() else { return None };
        job.status = *status;
        Some((job.status.category.clone().unwrap(), job.status.share_percent))
    };
    assert_eq!(publish(("growing", Some(40))), Some(("growing".to_owned(), Some(40))));
    assert_eq!(publish(("growing", Some(44))), None, "nearly the same");
    assert_eq!(publish(("growing", Some(45))), Some(("growing".to_owned(), Some(45))));
    assert_eq!(publish(("converged", Some(45))), Some(("converged".to_owned(), Some(45))));
}

#[test]
fn a_pod_that_does_not_begin_is_explained() {
    let (mut job, pods) = snapshot_of(&running(143));
    let attempt = job.status.attempt.as_mut().unwrap();
    (attempt.start_time, attempt.node) = (None, Some("a".into()));
    let pod = PodSnapshot { running: false, phase: Phase::Pending, ..pods[0].clone() };
    let said = |pod: &PodSnapshot, nodes: &Nodes| {
        let actions = take(&job, std::slice::from_ref(pod), nodes, None).actions;
        match actions.into_iter().next() {
            Some(Action::Write(_, status)) => status.message,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(said(&pod, &ready()), "the pod run-1 begins on a");
    let waits = PodSnapshot { waiting: Some("ImagePullBackOff".into()), ..pod.clone() };
    assert_eq!(said(&waits, &ready()), "the pod run-1 does not begin: ImagePullBackOff");
    let silent: Nodes = [("a".into(), NodeState::Silent)].into();
    assert!(said(&waits, &silent).starts_with("node a is silent"));
    let claim = PodSnapshot {
        node: None,
        unschedulable: Some((now() - SignedDuration::from_hours(1), "persistentvolumeclaim \"c\" not found".into())),
        ..pod
    };
    assert!(said(&claim, &ready()).starts_with("no node takes the pod run-1"), "every node lacks the claim");
}

#[test]
fn a_request_whose_node_had_no_room_does_not_stop_the_job_elsewhere() {
    let (mut job, pods) = snapshot_of(&running(143));
    job.wanted_node = Some("a".into());
    job.status.attempt.as_mut().unwrap().start_time = None;
    let since = now() - SignedDuration::from_hours(1);
    let roomless = PodSnapshot {
        node: None,
        running: false,
        phase: Phase::Pending,
        unschedulable: Some((since, "0/2 nodes are available".into())),
        ..pods[0].clone()
    };
    let replaced = take(&job, &[roomless], &ready(), None).actions;
    let Some(Action::Write(_, status)) = replaced.first() else { panic!("{replaced:?}") };
    assert_eq!(status.attempt.as_ref().and_then(|attempt| attempt.stopping), Some(StopReason::Replace));
    job.status = status.as_ref().clone();
    let attempt = job.status.attempt.as_mut().unwrap();
    (attempt.node, attempt.stopping, attempt.start_time) = (Some("b".into()), None, Some(MicroTime(now())));
    assert_eq!(requested_order(&job), None);
    job.wanted_node = Some("c".into());
    assert!(requested_order(&job).is_some(), "a new value is followed");
}

#[test]
fn the_status_says_that_the_node_that_was_asked_for_takes_no_pods() {
    let (job, pods) = snapshot_of(&running(143));
    let nodes = ready();
    let next = step(&Snapshot { closed: Some(&"b".into()), ..Snapshot::plain(now(), &job, &pods, &nodes) });
    let Some(Action::Write(_, status)) = next.actions.first() else { panic!("{next:?}") };
    assert_eq!(status.message, "runs on a as run-1; b, which was asked for, takes no pods now");
    assert!(status.migration.is_none());
}

#[test]
fn a_pod_that_finds_room_is_not_replaced() {
    let (mut job, pods) = snapshot_of(&running(143));
    let attempt = job.status.attempt.as_mut().unwrap();
    (attempt.stopping, attempt.stopping_since) = (Some(StopReason::Replace), Some(MicroTime(now())));
    let stays = take(&job, &pods, &ready(), None).actions;
    let Some(Action::Write(_, status)) = stays.first() else { panic!("{stays:?}") };
    let attempt = status.attempt.as_ref().unwrap();
    assert_eq!((attempt.stopping, attempt.stopping_since.is_none()), (None, true));
    let roomless = PodSnapshot { node: None, running: false, phase: Phase::Pending, ..pods[0].clone() };
    let deleted = take(&job, &[roomless], &ready(), None).actions;
    assert!(matches!(deleted[..], [Action::Delete { .. }]), "{deleted:?}");
}

#[test]
fn the_verdict_on_each_kind_of_stop() {
    let order = Order { uid: "job".into(), node: "b".into(), kind: OrderKind::Move, reason: PlacementReason::Gain };
    let migration = begin_move(&order, "a".into(), 1, now());
    let until = now() + SignedDuration::from_secs(30);
    let pod = PodSnapshot { deleted: Some((now(), until)), ..PodSnapshot::default() };
    let verdict_on = |code: i32, reason: &str, before_s: i64| {
        let finished = until - SignedDuration::from_secs(before_s);
        let exit = Exit { code, reason: reason.into(), finished, ..Exit::default() };
        verdict(&Stop::Exited(exit), &migration, Some(&pod), "30 s")
    };
    assert!(verdict_on(0, "", 0).0 && verdict_on(143, "", 0).0 && !verdict_on(1, "", 0).0);
    let (moves, sentence) = verdict_on(137, "Error", 2);
    assert!(moves && sentence.contains("was killed on a while it saved itself"), "the node failed: {sentence}");
    let (moves, sentence) = verdict_on(137, "Error", 1);
    assert!(!moves && sentence.contains("ignored SIGTERM"), "times are whole seconds: {sentence}");
    let (moves, sentence) = verdict_on(137, "OOMKilled", 20);
    assert!(!moves && sentence.contains("saving on SIGTERM failed"), "{sentence}");
    assert!(
        verdict(&Stop::NodeOff("a".into()), &migration, None, "").0 && verdict(&Stop::Declared, &migration, None, "").0
    );
    let exit = Exit { code: 3, reason: "Error".into(), message: "no space".into(), ..Exit::default() };
    assert_eq!(exit_text(&exit), "exit code 3: no space");
}

#[test]
fn the_own_share_is_waited_for_two_seconds() {
    let reshaped = PodSnapshot { reshaped: true, ..PodSnapshot::default() };
    let since = now();
    let after = |ms: i64| own_share_until(&reshaped, since, since + SignedDuration::from_millis(ms));
    assert!(after(0).is_some() && after(1999).is_some() && after(2000).is_none());
    assert!(own_share_until(&PodSnapshot::default(), since, since).is_none(), "it has its own share");
}

#[test]
fn marks_are_stored_with_the_move_and_when_the_job_stays() {
    let (job, pods) = snapshot_of(&running(143));
    let nodes = ready();
    let marks = Marks { settled: Some(Time(7_000_000)), ..Marks::default() };
    let take = |job: &JobSnapshot, order: Option<&Order>| {
        let next = step(&Snapshot { order, marks, ..Snapshot::plain(now(), job, &pods, &nodes) });
        next.actions.into_iter().find_map(|action| match action {
            Action::Write(step, status) => Some((step, status)),
            _ => None,
        })
    };
    let reason = PlacementReason::SlowGrowth;
    let order = Order { uid: job.uid.clone(), node: "b".into(), kind: OrderKind::Move, reason };
    let (kind, status) = take(&job, Some(&order)).expect("a move begins");
    assert_eq!((kind, status.migration.is_some()), (JournalStep::Stopping, true));
    let read = |status: &TrainingJobStatus| specon_marks(status.specon.as_ref(), &[], None);
    assert_eq!(read(&status), marks, "an operator that dies now leaves both or neither");
    let (kind, status) = take(&job, None).expect("a mark is new");
    assert_eq!((kind, read(&status)), (JournalStep::Noted, marks));
    let mut stored = job.clone();
    stored.status = *status;
    assert!(take(&stored, None).is_none(), "it is written once");
    let later = crate::jobs::training_job::facts(&stored, &pods, (0, 0)).expect("it is ours");
    assert_eq!(later.marks, marks, "the next operator reads it");
}

#[test]
fn a_move_for_a_deadline_begins_with_the_same_writes_as_one_by_specon() {
    let (mut job, pods) = snapshot_of(&running(143));
    job.spec.policy = job_policy(Preset::Gainshare);
    let nodes = ready();
    let begin = |reason, marks| {
        let order = Order { uid: job.uid.clone(), node: "b".into(), kind: OrderKind::Move, reason };
        step(&Snapshot { order: Some(&order), marks, ..Snapshot::plain(now(), &job, &pods, &nodes) }).actions
    };
    let at = Some(Time(7_000_000));
    let by_specon = begin(PlacementReason::SlowGrowth, Marks { settled: at, ..Marks::default() });
    let mut for_deadline = begin(PlacementReason::Deadline, Marks { for_deadline: at, ..Marks::default() });
    let mut written = 0;
    for (action, known) in for_deadline.iter_mut().zip(&by_specon) {
        let (Action::Write(_, status), Action::Write(_, known)) = (action, known) else { continue };
        written += 1;
        assert_eq!(specon_marks(status.specon.as_ref(), &[], None).for_deadline, at);
        let (migration, other) = (status.migration.as_mut().unwrap(), known.migration.as_ref().unwrap());
        assert_eq!(migration.reason, Some(PlacementReason::Deadline));
        assert!(migration.message.contains("would miss its deadline"), "{}", migration.message);
        // All but the words and the mark is the same.
        (migration.reason, migration.message) = (other.reason, other.message.clone());
        (status.specon, status.message) = (known.specon.clone(), known.message.clone());
        (status.conditions, status.last_decision) = (known.conditions.clone(), known.last_decision.clone());
    }
    assert_eq!((written, for_deadline), (1, by_specon));
}
