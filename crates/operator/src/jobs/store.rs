//! What the controller has read: jobs, their pods, nodes; and which jobs have to be looked at, now or at some time.
//!
//! Copies may be old. An older version of an object never replaces a newer one, so that what our own writes return is not undone by the watch
//! that is still on its way.
//!
//! **Whose turn it is.** Two rows. Jobs for which something has happened (an order, a change of their pod, their own time) come first, in the order in which it
//! happened; jobs that nobody has begun with, and those whose progress may have to be written, come when there is nothing else to do. So what was begun is
//! finished first, and ten thousand new jobs do not keep a move waiting. A job is worked on by one at a time: one that turns up meanwhile has
//! another turn afterwards.

use super::machine::PodFault;
use super::snapshot::{JobSnapshot, NodeState, PodSnapshot};
use gainshare_kube_api::training_job::{JOB_FINALIZER, NODE_ANNOTATION, STOPPED_ANNOTATION, TrainingJob};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Namespace and name of a job.
pub(super) type Key = (String, String);

/// The taint by which an administrator declares a node to be off.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

#[derive(Debug, Default)]
pub(super) struct Store {
    jobs: BTreeMap<Key, Arc<JobSnapshot>>,
    /// By the job's name, then by their own.
    pods: BTreeMap<Key, BTreeMap<String, PodSnapshot>>,
    pub(super) nodes: BTreeMap<String, NodeState>,
    /// Nodes that came, went or turned since jobs were last looked for there: thousands may do so at once.
    turned: BTreeSet<String>,
    /// Pods that the API server refused, and until when there is no point in trying again.
    faults: BTreeMap<Key, (PodFault, Timestamp)>,
    first: Queue,
    then: Queue,
    working: BTreeSet<Key>,
    /// Whose turn came while they were being worked on.
    once_more: BTreeSet<Key>,
    wakes: BTreeMap<Key, Timestamp>,
    alarms: BTreeSet<(Timestamp, Key)>,
    /// Of jobs, pods and nodes, how many lists have been snapshot as a whole.
    pub(super) lists_read: usize,
}

/// Jobs that wait for their turn, each once.
#[derive(Debug, Default)]
struct Queue {
    keys: VecDeque<Key>,
    within: BTreeSet<Key>,
    /// So many from the front on have been classify to the decision.
    announced: usize,
}

impl Queue {
    fn push(&mut self, key: Key) {
        if self.within.insert(key.clone()) {
            self.keys.push_back(key);
        }
    }

    fn pop(&mut self) -> Option<Key> {
        let key = self.keys.pop_front()?;
        self.within.remove(&key);
        self.announced = self.announced.saturating_sub(1);
        Some(key)
    }
}

impl JobSnapshot {
    pub(crate) fn of(job: &TrainingJob) -> Option<JobSnapshot> {
        let meta = &job.metadata;
        let mut spec = job.spec.clone();
        let template = std::mem::take(&mut spec.template).to_string();
        Some(JobSnapshot {
            namespace: meta.namespace.clone()?,
            name: meta.name.clone()?,
            uid: meta.uid.clone()?,
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0).unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            has_finalizer: meta.finalizers.iter().flatten().any(|one| one == JOB_FINALIZER),
            declared_stopped: meta.annotations.as_ref().and_then(|notes| notes.get(STOPPED_ANNOTATION)).cloned(),
            wanted_node: meta.annotations.as_ref().and_then(|notes| notes.get(NODE_ANNOTATION)).cloned(),
            spec,
            template,
            status: job.status.clone().unwrap_or_default(),
        })
    }

    pub(super) fn key(&self) -> Key {
        (self.namespace.clone(), self.name.clone())
    }
}

impl PodSnapshot {
    fn job_key(&self) -> Key {
        (self.namespace.clone(), self.job.clone())
    }
}

impl NodeState {
    pub(super) fn of(node: &Node) -> NodeState {
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
        if taints.into_iter().flatten().any(|taint| taint.key == OUT_OF_SERVICE) {
            return NodeState::Off;
        }
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        // A node without a word about it has just come; "False" is a kubelet that speaks, "Unknown" one that does not.
        let silent = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "Unknown");
        if silent { NodeState::Silent } else { NodeState::Ready }
    }
}

fn is_older(version: &str, than: &str) -> bool {
    matches!((version.parse::<u64>(), than.parse::<u64>()), (Ok(version), Ok(than)) if version < than)
}

impl Store {
    pub(super) fn put_job(&mut self, job: JobSnapshot) {
        let key = job.key();
        let known = self.jobs.get(&key);
        if known.is_some_and(|known| known.uid == job.uid && is_older(&job.resource_version, &known.resource_version)) {
            return;
        }
        if known.is_none_or(|known| **known != job) {
            // One that nobody has begun with begins when those before it are on their way.
            let is_new = known.is_none() && job.status.attempt.is_none();
            let row = if is_new { &mut self.then } else { &mut self.first };
            row.push(key.clone());
            self.jobs.insert(key, Arc::new(job));
        }
    }

    pub(super) fn remove_job(&mut self, key: &Key) -> Option<Arc<JobSnapshot>> {
        self.wake_at(key, None);
        self.faults.remove(key);
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

    /// The API server text that this very pod is gone.
    pub(super) fn remove_pod(&mut self, key: &Key, name: &str, uid: &str) {
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
        let alive: BTreeSet<Key> = jobs.iter().map(JobSnapshot::key).collect();
        let gone: Vec<Key> = self.jobs.keys().filter(|key| !alive.contains(*key)).cloned().collect();
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

    /// `None`: the node is gone. Jobs with a pod there are looked at.
    pub(super) fn put_node(&mut self, name: &str, node: Option<NodeState>) {
        let known = match node {
            Some(node) => self.nodes.insert(name.to_owned(), node),
            None => self.nodes.remove(name),
        };
        if known != node {
            self.turned.insert(name.to_owned());
        }
    }

    pub(super) fn all_nodes(&mut self, nodes: Vec<(String, NodeState)>) {
        let alive: BTreeSet<&String> = nodes.iter().map(|(name, _)| name).collect();
        let gone: Vec<String> = self.nodes.keys().filter(|name| !alive.contains(name)).cloned().collect();
        gone.iter().for_each(|name| self.put_node(name, None));
        nodes.into_iter().for_each(|(name, node)| self.put_node(&name, Some(node)));
    }

    /// Jobs with a pod on a node that has turned have their turn, also those whose pods are away.
    fn queue_jobs_of_changed_nodes(&mut self) {
        if self.turned.is_empty() {
            return;
        }
        let turned = std::mem::take(&mut self.turned);
        let is = |node: &Option<String>| node.as_ref().is_some_and(|node| turned.contains(node));
        let by_pod = self.pods.iter().filter(|(_, pods)| pods.values().any(|pod| is(&pod.node)));
        let by_journal =
            self.jobs.iter().filter(|(_, job)| job.status.attempt.as_ref().is_some_and(|attempt| is(&attempt.node)));
        let keys = by_pod.map(|(key, _)| key).chain(by_journal.map(|(key, _)| key));
        let keys: BTreeSet<Key> = keys.cloned().collect();
        keys.into_iter().for_each(|key| self.first.push(key));
    }

    pub(super) fn job(&self, key: &Key) -> Option<Arc<JobSnapshot>> {
        self.jobs.get(key).cloned()
    }

    /// All jobs with their pods.
    pub(super) fn all(&self) -> impl Iterator<Item = (&Arc<JobSnapshot>, Vec<PodSnapshot>)> {
        self.jobs.iter().map(|(key, job)| (job, self.pods(key)))
    }

    pub(super) fn pods(&self, key: &Key) -> Vec<PodSnapshot> {
        self.pods.get(key).into_iter().flat_map(BTreeMap::values).cloned().collect()
    }

    pub(super) fn fault(&mut self, key: &Key, now: Timestamp) -> Option<PodFault> {
        if self.faults.get(key).is_some_and(|(_, until)| *until <= now) {
            self.faults.remove(key);
        }
        self.faults.get(key).map(|(fault, _)| fault.clone())
    }

    pub(super) fn put_fault(&mut self, key: &Key, fault: PodFault, until: Timestamp) {
        self.faults.insert(key.clone(), (fault, until));
    }

    /// There is an order for this job. One that nobody has begun with keeps its place in the row.
    pub(super) fn mark(&mut self, key: Key) {
        let is_new = self.jobs.get(&key).is_some_and(|job| job.status.attempt.is_none());
        let row = if is_new { &mut self.then } else { &mut self.first };
        row.push(key);
    }

    /// Its progress may have to be written.
    pub(super) fn mark_later(&mut self, key: Key) {
        self.then.push(key);
    }

    /// The next new jobs whose turn is near, up to `most` of them, each named once.
    pub(super) fn coming(&mut self, most: usize) -> Vec<Arc<JobSnapshot>> {
        let row = &mut self.then;
        let upto = row.keys.len().min(most);
        let from = row.announced.min(upto);
        row.announced = row.announced.max(upto);
        let jobs = row.keys.range(from..upto).filter_map(|key| self.jobs.get(key));
        jobs.filter(|job| job.status.attempt.is_none()).cloned().collect()
    }

    pub(super) fn wake_at(&mut self, key: &Key, at: Option<Timestamp>) {
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

    /// Whose turn it is, if anybody's; [`Store::done`] ends it.
    pub(super) fn take(&mut self, now: Timestamp) -> Option<Key> {
        self.queue_jobs_of_changed_nodes();
        while let Some((_, key)) = self.alarms.first().filter(|(at, _)| *at <= now).cloned() {
            self.wake_at(&key, None);
            self.first.push(key);
        }
        while let Some(key) = self.first.pop().or_else(|| self.then.pop()) {
            if self.working.insert(key.clone()) {
                return Some(key);
            }
            self.once_more.insert(key);
        }
        None
    }

    pub(super) fn done(&mut self, key: &Key) {
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

    fn key(name: &str) -> Key {
        (String::new(), name.to_owned())
    }

    fn job(name: &str, version: u64) -> JobSnapshot {
        JobSnapshot {
            name: name.to_owned(),
            uid: name.to_owned(),
            resource_version: version.to_string(),
            ..JobSnapshot::default()
        }
    }

    /// One whose journal says that it lives on this node.
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

    /// Whose turns come now, one after the other, each done before the next.
    fn turns(store: &mut Store) -> Vec<String> {
        let mut names = Vec::new();
        while let Some(key) = store.take(Timestamp::UNIX_EPOCH) {
            store.done(&key);
            names.push(key.1);
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
        // As after a start of the manager: those that run already take no new one's place.
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
}
