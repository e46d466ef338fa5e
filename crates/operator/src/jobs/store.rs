//! What the controller has read (jobs, their pods, nodes), and which jobs are due now or later.
//!
//! Copies may be old. An older version of an object never replaces a newer one, so that the watch
//! does not undo the result of our own write while it lags behind.
//!
//! **Queues.** There are two. Jobs for which something has happened (an order, a change of their
//! pod, an alarm) are in `first`, in the order in which it happened. Jobs that have not begun, and
//! jobs whose progress may have to be published, are in `then`; they are taken when `first` is
//! empty. So ten thousand new jobs do not delay a move. One worker at a time takes a job; a job
//! that becomes due meanwhile is queued again afterwards. A job whose reconcile panicked rests
//! before its next turn.

use super::action::PodFault;
use super::snapshot::{JobSnapshot, NodeState, PodSnapshot};
use crate::isolate;
use crate::state::world::is_older;
use gainshare_kube_api::names::NamespacedName;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A missing Node object counts as a node that is off after this time. It is longer than Kubernetes
/// itself takes to give up a node and its pods: 40 s until the node's lease has expired, and 300 s
/// that pods tolerate an unreachable node by default.
pub(crate) const MISSING_NODE_IS_OFF_AFTER: Duration = Duration::from_secs(360);

#[derive(Debug, Default)]
pub(super) struct Store {
    jobs: BTreeMap<NamespacedName, Arc<JobSnapshot>>,
    /// By the job's name, then by their own.
    pods: BTreeMap<NamespacedName, BTreeMap<String, PodSnapshot>>,
    nodes: BTreeMap<String, NodeState>,
    /// Nodes whose object is missing, as far as jobs are concerned.
    missing: BTreeMap<String, MissingNode>,
    /// Nodes that came, went or changed since their jobs were last queued: thousands may do so at
    /// once.
    changed_nodes: BTreeSet<String>,
    /// Pods that the API server refused, and until when there is no point in trying again.
    faults: BTreeMap<NamespacedName, (PodFault, Timestamp)>,
    first: Queue,
    then: Queue,
    working: BTreeSet<NamespacedName>,
    /// Jobs that became due while a worker had them.
    once_more: BTreeSet<NamespacedName>,
    /// Jobs whose reconcile panicked: how often in a row, and until when they rest.
    resting: BTreeMap<NamespacedName, (u32, Timestamp)>,
    wakes: BTreeMap<NamespacedName, Timestamp>,
    alarms: BTreeSet<(Timestamp, NamespacedName)>,
    /// Of jobs, pods and nodes, how many lists have been read completely.
    pub(super) lists_read: usize,
}

/// A node whose object is missing.
#[derive(Debug, Clone, Copy)]
struct MissingNode {
    since: Instant,
    /// An administrator had declared it to be off before its object went.
    declared_off: bool,
}

/// Jobs that are due, each once.
#[derive(Debug, Default)]
struct Queue {
    keys: VecDeque<NamespacedName>,
    within: BTreeSet<NamespacedName>,
    /// So many from the front on have been published to the decision.
    announced: usize,
}

impl Queue {
    fn push(&mut self, key: NamespacedName) {
        if self.within.insert(key.clone()) {
            self.keys.push_back(key);
        }
    }

    fn pop(&mut self) -> Option<NamespacedName> {
        let key = self.keys.pop_front()?;
        self.within.remove(&key);
        self.announced = self.announced.saturating_sub(1);
        Some(key)
    }
}

impl Store {
    pub(super) fn put_job(&mut self, job: JobSnapshot) {
        let key = job.key();
        let known = self.jobs.get(&key);
        if known.is_some_and(|known| known.uid == job.uid && is_older(&job.resource_version, &known.resource_version)) {
            return;
        }
        if known.is_none_or(|known| **known != job) {
            // A job that has not begun waits for those before it.
            let is_new = known.is_none() && job.status.attempt.is_none();
            let row = if is_new { &mut self.then } else { &mut self.first };
            row.push(key.clone());
            self.jobs.insert(key, Arc::new(job));
        }
    }

    pub(super) fn remove_job(&mut self, key: &NamespacedName) -> Option<Arc<JobSnapshot>> {
        self.wake_at(key, None);
        self.faults.remove(key);
        self.resting.remove(key);
        // Its pods may still be held by our finalizer.
        self.first.push(key.clone());
        self.jobs.remove(key)
    }

    pub(super) fn put_pod(&mut self, pod: PodSnapshot) {
        let key = pod.job_key();
        let pods = self.pods.entry(key.clone()).or_default();
        let known = pods.get(&pod.name);
        if known.is_some_and(|known| known.uid == pod.uid && is_older(&pod.resource_version, &known.resource_version)) {
            return;
        }
        if known != Some(&pod) {
            pods.insert(pod.name.clone(), pod);
            self.first.push(key);
        }
    }

    /// The API server answered that this very pod is gone.
    pub(super) fn remove_pod(&mut self, key: &NamespacedName, name: &str, uid: &str) {
        if let Some(pods) = self.pods.get_mut(key)
            && pods.get(name).is_some_and(|pod| pod.uid == uid)
        {
            pods.remove(name);
            self.first.push(key.clone());
            if pods.is_empty() {
                self.pods.remove(key);
            }
        }
    }

    pub(super) fn gone_pod(&mut self, pod: &PodSnapshot) {
        self.remove_pod(&pod.job_key(), &pod.name, &pod.uid);
    }

    /// All jobs that exist, after a start of the watch.
    pub(super) fn all_jobs(&mut self, jobs: Vec<JobSnapshot>) -> Vec<Arc<JobSnapshot>> {
        let alive: BTreeSet<NamespacedName> = jobs.iter().map(JobSnapshot::key).collect();
        let gone: Vec<NamespacedName> = self.jobs.keys().filter(|key| !alive.contains(*key)).cloned().collect();
        let gone = gone.iter().filter_map(|key| self.remove_job(key)).collect();
        jobs.into_iter().for_each(|job| self.put_job(job));
        gone
    }

    pub(super) fn all_pods(&mut self, pods: Vec<PodSnapshot>) {
        let alive: BTreeSet<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
        let known = self.pods.values().flat_map(BTreeMap::values);
        let gone: Vec<PodSnapshot> = known.filter(|pod| !alive.contains(pod.uid.as_str())).cloned().collect();
        gone.iter().for_each(|pod| self.gone_pod(pod));
        pods.into_iter().for_each(|pod| self.put_pod(pod));
    }

    /// `None`: the node is gone. Jobs with a pod there become due.
    pub(super) fn put_node(&mut self, name: &str, node: Option<NodeState>) {
        let known = match node {
            Some(node) => {
                self.missing.remove(name);
                self.nodes.insert(name.to_owned(), node)
            }
            None => {
                let known = self.nodes.remove(name);
                if known.is_some() {
                    let declared_off = known == Some(NodeState::Off);
                    self.missing.insert(name.to_owned(), MissingNode { since: Instant::now(), declared_off });
                }
                known
            }
        };
        if known != node {
            self.changed_nodes.insert(name.to_owned());
        }
    }

    pub(super) fn all_nodes(&mut self, nodes: Vec<(String, NodeState)>) {
        let alive: BTreeSet<&String> = nodes.iter().map(|(name, _)| name).collect();
        let gone: Vec<String> = self.nodes.keys().filter(|name| !alive.contains(name)).cloned().collect();
        gone.iter().for_each(|name| self.put_node(name, None));
        nodes.into_iter().for_each(|(name, node)| self.put_node(&name, Some(node)));
    }

    /// The state of the node by our copy. `None`: the node is unknown, or declared off; the API
    /// server has to be asked.
    pub(super) fn node(&self, name: &str) -> Option<NodeState> {
        self.nodes.get(name).copied().filter(|node| matches!(node, NodeState::Ready | NodeState::Silent))
    }

    /// What it means that the API server has no such node now, and how long until it means that the
    /// node is off.
    pub(super) fn missing_node(&mut self, name: &str, now: Instant) -> (NodeState, Option<Duration>) {
        let new = MissingNode { since: now, declared_off: false };
        let missing = *self.missing.entry(name.to_owned()).or_insert(new);
        let left = MISSING_NODE_IS_OFF_AFTER.saturating_sub(now.saturating_duration_since(missing.since));
        if missing.declared_off || left.is_zero() { (NodeState::Off, None) } else { (NodeState::Missing, Some(left)) }
    }

    /// Queues the jobs with a pod on a node that has changed, also those whose pods are gone.
    fn queue_jobs_of_changed_nodes(&mut self) {
        if self.changed_nodes.is_empty() {
            return;
        }
        let changed_nodes = std::mem::take(&mut self.changed_nodes);
        let is = |node: &Option<String>| node.as_ref().is_some_and(|node| changed_nodes.contains(node));
        let by_pod = self.pods.iter().filter(|(_, pods)| pods.values().any(|pod| is(&pod.node)));
        let by_journal =
            self.jobs.iter().filter(|(_, job)| job.status.attempt.as_ref().is_some_and(|attempt| is(&attempt.node)));
        let keys = by_pod.map(|(key, _)| key).chain(by_journal.map(|(key, _)| key));
        let keys: BTreeSet<NamespacedName> = keys.cloned().collect();
        keys.into_iter().for_each(|key| self.first.push(key));
    }

    pub(super) fn job(&self, key: &NamespacedName) -> Option<Arc<JobSnapshot>> {
        self.jobs.get(key).cloned()
    }

    /// All jobs with their pods.
    pub(super) fn all(&self) -> impl Iterator<Item = (&Arc<JobSnapshot>, Vec<PodSnapshot>)> {
        self.jobs.iter().map(|(key, job)| (job, self.pods(key)))
    }

    pub(super) fn pods(&self, key: &NamespacedName) -> Vec<PodSnapshot> {
        self.pods.get(key).into_iter().flat_map(BTreeMap::values).cloned().collect()
    }

    pub(super) fn fault(&mut self, key: &NamespacedName, now: Timestamp) -> Option<PodFault> {
        if self.faults.get(key).is_some_and(|(_, until)| *until <= now) {
            self.faults.remove(key);
        }
        self.faults.get(key).map(|(fault, _)| fault.clone())
    }

    pub(super) fn put_fault(&mut self, key: &NamespacedName, fault: PodFault, until: Timestamp) {
        self.faults.insert(key.clone(), (fault, until));
    }

    /// There is an order for this job. A job that has not begun keeps its place in its queue.
    pub(super) fn mark(&mut self, key: NamespacedName) {
        let is_new = self.jobs.get(&key).is_some_and(|job| job.status.attempt.is_none());
        let row = if is_new { &mut self.then } else { &mut self.first };
        row.push(key);
    }

    /// Its progress may have to be written.
    pub(super) fn mark_later(&mut self, key: NamespacedName) {
        self.then.push(key);
    }

    /// The next new jobs in the queue, up to `most` of them. Each is returned once.
    pub(super) fn coming(&mut self, most: usize) -> Vec<Arc<JobSnapshot>> {
        let row = &mut self.then;
        let upto = row.keys.len().min(most);
        let from = row.announced.min(upto);
        row.announced = row.announced.max(upto);
        let jobs = row.keys.range(from..upto).filter_map(|key| self.jobs.get(key));
        jobs.filter(|job| job.status.attempt.is_none()).cloned().collect()
    }

    pub(super) fn wake_at(&mut self, key: &NamespacedName, at: Option<Timestamp>) {
        let before = match at {
            Some(at) => self.wakes.insert(key.clone(), at),
            None => self.wakes.remove(key),
        };
        if let Some(before) = before {
            self.alarms.remove(&(before, key.clone()));
        }
        if let Some(at) = at {
            self.alarms.insert((at, key.clone()));
        }
    }

    /// The next job that is due; [`Store::done`] or [`Store::panicked`] must follow.
    pub(super) fn take(&mut self, now: Timestamp) -> Option<NamespacedName> {
        self.queue_jobs_of_changed_nodes();
        while let Some((_, key)) = self.alarms.first().filter(|(at, _)| *at <= now).cloned() {
            self.wake_at(&key, None);
            self.first.push(key);
        }
        while let Some(key) = self.first.pop().or_else(|| self.then.pop()) {
            if let Some((_, until)) = self.resting.get(&key).filter(|(_, until)| *until > now) {
                self.wake_at(&key, Some(*until));
                continue;
            }
            if self.working.insert(key.clone()) {
                return Some(key);
            }
            self.once_more.insert(key);
        }
        None
    }

    /// The work on a job ended with a panic: the job rests for a while. Answers for how long.
    pub(super) fn panicked(&mut self, key: &NamespacedName, now: Timestamp) -> Duration {
        self.working.remove(key);
        self.once_more.remove(key);
        let times = self.resting.get(key).map_or(0, |(times, _)| *times).saturating_add(1);
        let rest = isolate::rest_after(times);
        let until = SignedDuration::try_from(rest).ok().and_then(|rest| now.saturating_add(rest).ok()).unwrap_or(now);
        self.resting.insert(key.clone(), (times, until));
        self.wake_at(key, Some(until));
        rest
    }

    /// The work on a job has ended.
    pub(super) fn done(&mut self, key: &NamespacedName) {
        self.resting.remove(key);
        self.working.remove(key);
        if let Some(key) = self.once_more.take(key) {
            self.first.push(key);
        }
    }

    /// When the next one is to be woken.
    pub(super) fn next_alarm(&self) -> Option<Timestamp> {
        self.alarms.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::training_job::{Attempt, TrainingJobStatus};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    fn key(name: &str) -> NamespacedName {
        NamespacedName::new("", name)
    }

    fn job(name: &str, version: u64) -> JobSnapshot {
        JobSnapshot {
            name: name.to_owned(),
            uid: name.to_owned(),
            resource_version: version.to_string(),
            ..JobSnapshot::default()
        }
    }

    /// A job that runs on this node by its journal.
    fn begun(name: &str, version: u64, node: &str) -> JobSnapshot {
        let attempt = Attempt {
            epoch: 1,
            pod: format!("{name}-1"),
            uid: Some(format!("{name}-1")),
            node: Some(node.to_owned()),
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
    fn turns(store: &mut Store) -> Vec<String> {
        let mut names = Vec::new();
        while let Some(key) = store.take(Timestamp::UNIX_EPOCH) {
            store.done(&key);
            names.push(key.name);
        }
        names
    }

    #[test]
    fn what_was_begun_goes_before_what_is_new() {
        let mut store = Store::default();
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
        let mut store = Store::default();
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
        let mut store = Store::default();
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
    fn jobs_of_a_node_that_turns_are_looked_at_and_no_others() {
        let mut store = Store::default();
        store.put_job(begun("a", 1, "n"));
        store.put_job(begun("b", 1, "m"));
        let ready = |name: &str| (name.to_owned(), NodeState::Ready);
        store.all_nodes(vec![ready("n"), ready("m")]);
        turns(&mut store);
        store.put_node("n", Some(NodeState::Ready));
        assert!(turns(&mut store).is_empty());
        store.put_node("n", Some(NodeState::Silent));
        assert_eq!(turns(&mut store), ["a"]);
        store.all_nodes(vec![("n".to_owned(), NodeState::Silent)]);
        assert_eq!(turns(&mut store), ["b"], "its node is gone");
    }

    #[test]
    fn new_jobs_are_announced_once_and_not_too_many() {
        let mut store = Store::default();
        // As after a start of the operator: running jobs take no new job's place.
        for name in ["running", "too"] {
            store.put_job(begun(name, 1, "n"));
        }
        for name in ["a", "b", "c", "d"] {
            store.put_job(job(name, 1));
        }
        let names = |jobs: Vec<Arc<JobSnapshot>>| jobs.iter().map(|job| job.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(store.coming(2)), ["a", "b"]);
        assert!(store.coming(2).is_empty());
        (0..3).for_each(|_| drop(store.take(Timestamp::UNIX_EPOCH)));
        assert_eq!(names(store.coming(2)), ["c"]);
    }

    #[test]
    fn a_job_whose_reconcile_panicked_rests_and_holds_up_no_other() {
        let mut store = Store::default();
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

    #[test]
    fn a_missing_node_is_off_only_after_a_while_unless_it_was_declared() {
        let mut store = Store::default();
        store.put_node("n", Some(NodeState::Ready));
        store.put_node("tainted", Some(NodeState::Off));
        store.put_node("n", None);
        store.put_node("tainted", None);
        let now = Instant::now();
        let (state, left) = store.missing_node("n", now);
        assert_eq!(state, NodeState::Missing);
        assert!(left.unwrap() <= MISSING_NODE_IS_OFF_AFTER);
        assert_eq!(store.missing_node("n", now + MISSING_NODE_IS_OFF_AFTER), (NodeState::Off, None));
        assert_eq!(store.missing_node("tainted", now), (NodeState::Off, None));
        assert_eq!(store.missing_node("never-seen", now).0, NodeState::Missing);
        store.put_node("n", Some(NodeState::Ready));
        assert_eq!(store.node("n"), Some(NodeState::Ready));
        store.put_node("n", None);
        assert_eq!(store.missing_node("n", Instant::now()).0, NodeState::Missing, "the time begins again");
    }
}
