//! Tests of [`super`] together with the caches that fill the queue.

use super::*;
use crate::state::snapshot::{JobSnapshot, NodeState};
use crate::state::workload::WorkloadKind;
use crate::state::world::World;
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::names::{NamespacedName, NodeName};
use gainshare_kube_api::training_job::{Attempt, TrainingJobStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use std::time::Instant;

/// The caches and the queue, as the controller joins them.
#[derive(Default)]
struct Fixture {
    world: World,
    queue: Queue,
}

impl Fixture {
    fn drain(&mut self) {
        let changes = self.world.take_job_changes();
        changes.into_iter().for_each(|(key, change)| self.queue.put(key, change));
    }

    fn put_job(&mut self, job: JobSnapshot) {
        self.world.jobs.put_training_job(job);
        self.drain();
    }

    /// There is an order for this job.
    fn mark(&mut self, key: WorkloadKey) {
        let change = self.world.jobs.order_change(&key);
        self.queue.put(key, change);
    }

    fn put_node(&mut self, name: &str, state: Option<NodeState>) {
        match state {
            Some(state) => self.world.put_node(&name.into(), NodeFacts { state, ..NodeFacts::default() }),
            None => self.world.remove_node(&name.into(), Instant::now()),
        }
        self.drain();
    }

    fn all_nodes(&mut self, nodes: Vec<(NodeName, NodeState)>) {
        self.world.keep_nodes(&nodes.iter().map(|(name, _)| name.clone()).collect(), Instant::now());
        nodes.into_iter().for_each(|(name, state)| self.put_node(&name, Some(state)));
        self.drain();
    }

    fn coming(&mut self, most: usize) -> Vec<WorkloadKey> {
        self.queue.coming(most)
    }

    fn wake_at(&mut self, key: &WorkloadKey, at: Option<Timestamp>) {
        self.queue.wake_at(key, at);
    }

    fn take(&mut self, now: Timestamp) -> Option<WorkloadKey> {
        self.queue.take(now)
    }

    fn done(&mut self, key: &WorkloadKey) {
        self.queue.done(key);
    }

    fn panicked(&mut self, key: &WorkloadKey, now: Timestamp) -> Duration {
        self.queue.panicked(key, now)
    }

    fn next_alarm(&self) -> Option<Timestamp> {
        self.queue.next_alarm()
    }
}

fn key(name: &str) -> WorkloadKey {
    WorkloadKey::new(WorkloadKind::TrainingJob, NamespacedName::new("", name))
}

fn job(name: &str, version: u64) -> JobSnapshot {
    JobSnapshot {
        name: name.to_owned(),
        uid: name.into(),
        resource_version: version.to_string(),
        ..JobSnapshot::default()
    }
}

/// A job that runs on this node by its journal.
fn begun(name: &str, version: u64, node: &str) -> JobSnapshot {
    let attempt = Attempt {
        epoch: 1,
        pod: format!("{name}-1"),
        uid: Some(format!("{name}-1").into()),
        node: Some(node.into()),
        pinned: true,
        since: MicroTime(Timestamp::UNIX_EPOCH),
        not_before: None,
        start_time: None,
        stopping: None,
        stopping_since: None,
        ended: None,
        tried: Vec::new(),
    };
    let status = TrainingJobStatus { attempt: Some(attempt), ..TrainingJobStatus::default() };
    JobSnapshot { status, ..job(name, version) }
}

/// The jobs that are due now, one after the other, each done before the next.
fn turns(store: &mut Fixture) -> Vec<String> {
    let mut names = Vec::new();
    while let Some(key) = store.take(Timestamp::UNIX_EPOCH) {
        store.done(&key);
        names.push(key.name.name);
    }
    names
}

#[test]
fn what_was_begun_goes_before_what_is_new() {
    let mut store = Fixture::default();
    for name in ["c", "b", "a"] {
        store.put_job(job(name, 1));
    }
    store.mark(key("a"));
    store.put_job(begun("b", 2, "n"));
    assert_eq!(turns(&mut store), ["b", "c", "b", "a"], "an order does not bring a new job forward");
    store.put_job(begun("b", 2, "n"));
    store.put_job(begun("b", 1, "m"));
    assert!(turns(&mut store).is_empty(), "the same again, and an older version, are no news");
}

#[test]
fn a_job_has_one_turn_at_a_time() {
    let mut store = Fixture::default();
    store.put_job(job("a", 1));
    let at = Timestamp::UNIX_EPOCH;
    assert_eq!(store.take(at), Some(key("a")));
    store.put_job(begun("a", 2, "n"));
    assert_eq!(store.take(at), None, "it is being worked on");
    store.done(&key("a"));
    assert_eq!(turns(&mut store), ["a"], "what came meanwhile is not lost");
}

#[test]
fn alarms_ring_once_and_the_last_word_counts() {
    let mut store = Fixture::default();
    let at = |second| Timestamp::from_second(second).unwrap();
    store.wake_at(&key("a"), Some(at(5)));
    store.wake_at(&key("a"), Some(at(9)));
    store.wake_at(&key("b"), Some(at(7)));
    store.wake_at(&key("c"), Some(at(6)));
    store.wake_at(&key("c"), None);
    assert_eq!(store.next_alarm(), Some(at(7)));
    assert_eq!(store.take(at(6)), None);
    assert_eq!((store.take(at(9)), store.take(at(9)), store.take(at(9))), (Some(key("b")), Some(key("a")), None));
    assert_eq!(store.next_alarm(), None);
}

#[test]
fn jobs_of_a_node_that_turns_are_due_and_no_others() {
    let mut store = Fixture::default();
    store.put_job(begun("a", 1, "n"));
    store.put_job(begun("b", 1, "m"));
    let ready = |name: &str| (name.into(), NodeState::Ready);
    store.all_nodes(vec![ready("n"), ready("m")]);
    turns(&mut store);
    store.put_node("n", Some(NodeState::Ready));
    assert!(turns(&mut store).is_empty());
    store.put_node("n", Some(NodeState::Silent));
    assert_eq!(turns(&mut store), ["a"]);
    store.all_nodes(vec![("n".into(), NodeState::Silent)]);
    assert_eq!(turns(&mut store), ["b"], "its node is gone");
}

#[test]
fn new_jobs_are_announced_once_and_not_too_many() {
    let mut store = Fixture::default();
    // As after a start of the operator: running jobs take no new job's place.
    for name in ["running", "too"] {
        store.put_job(begun(name, 1, "n"));
    }
    for name in ["a", "b", "c", "d"] {
        store.put_job(job(name, 1));
    }
    let names = |jobs: Vec<WorkloadKey>| jobs.iter().map(|key| key.name.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(store.coming(2)), ["a", "b"]);
    assert!(store.coming(2).is_empty());
    (0..3).for_each(|_| drop(store.take(Timestamp::UNIX_EPOCH)));
    assert_eq!(names(store.coming(2)), ["c"]);
}

#[test]
fn a_job_whose_reconcile_panicked_rests_and_holds_up_no_other() {
    let mut store = Fixture::default();
    let at = |second| Timestamp::from_second(second).unwrap();
    store.put_job(begun("bad", 1, "n"));
    assert_eq!(store.take(at(0)), Some(key("bad")));
    let rest_s = store.panicked(&key("bad"), at(0)).as_secs() as i64;
    // Its watch brings it again, as after a write of its condition.
    store.put_job(begun("bad", 2, "n"));
    store.put_job(begun("good", 1, "n"));
    assert_eq!((store.take(at(1)), store.take(at(1))), (Some(key("good")), None));
    assert_eq!(store.next_alarm(), Some(at(rest_s)));
    assert_eq!(store.take(at(rest_s)), Some(key("bad")), "it is tried again");
    let longer = store.panicked(&key("bad"), at(rest_s)).as_secs() as i64;
    assert_eq!(longer, 2 * rest_s);
    assert_eq!(store.take(at(rest_s + longer)), Some(key("bad")));
    store.done(&key("bad"));
    assert_eq!(store.take(at(1000)), None);
}
