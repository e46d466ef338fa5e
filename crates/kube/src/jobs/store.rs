//! What the controller has read: jobs, their pods, nodes; and which jobs have to be looked at, now or at some time.
//!
//! Copies may be old. An older version of an object never replaces a newer one, so that what our own writes return is not undone by the watch
//! that is still on its way.

use super::machine::Fault;
use super::seen::{JobSeen, NodeSeen, PodSeen};
use crate::training_job::{JOB_FINALIZER, NODE_ANNOTATION, STOPPED_ANNOTATION, TrainingJob};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use std::collections::{BTreeMap, BTreeSet};

/// Namespace and name of a job.
pub(super) type Key = (String, String);

/// The taint by which an administrator declares a node to be off.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

#[derive(Debug, Default)]
pub(super) struct Store {
    jobs: BTreeMap<Key, JobSeen>,
    /// By the job's name, then by their own.
    pods: BTreeMap<Key, BTreeMap<String, PodSeen>>,
    pub(super) nodes: BTreeMap<String, NodeSeen>,
    /// Pods that the API server refused, and until when there is no point in trying again.
    faults: BTreeMap<Key, (Fault, Timestamp)>,
    dirty: BTreeSet<Key>,
    wakes: BTreeMap<Key, Timestamp>,
    /// Of jobs, pods and nodes, how many lists have been seen as a whole.
    pub(super) lists_seen: usize,
}

impl JobSeen {
    pub(crate) fn of(job: &TrainingJob) -> Option<JobSeen> {
        let meta = &job.metadata;
        Some(JobSeen {
            namespace: meta.namespace.clone()?,
            name: meta.name.clone()?,
            uid: meta.uid.clone()?,
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0).unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            has_finalizer: meta.finalizers.iter().flatten().any(|one| one == JOB_FINALIZER),
            sworn_stopped: meta.annotations.as_ref().and_then(|notes| notes.get(STOPPED_ANNOTATION)).cloned(),
            wanted_node: meta.annotations.as_ref().and_then(|notes| notes.get(NODE_ANNOTATION)).cloned(),
            spec: job.spec.clone(),
            status: job.status.clone().unwrap_or_default(),
        })
    }

    pub(super) fn key(&self) -> Key {
        (self.namespace.clone(), self.name.clone())
    }
}

impl PodSeen {
    fn job_key(&self) -> Key {
        (self.namespace.clone(), self.job.clone())
    }
}

impl NodeSeen {
    pub(super) fn of(node: &Node) -> NodeSeen {
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
        if taints.into_iter().flatten().any(|taint| taint.key == OUT_OF_SERVICE) {
            return NodeSeen::Off;
        }
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        // A node without a word about it has just come; "False" is a kubelet that speaks, "Unknown" one that does not.
        let silent = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "Unknown");
        if silent { NodeSeen::Silent } else { NodeSeen::Ready }
    }
}

fn is_older(version: &str, than: &str) -> bool {
    matches!((version.parse::<u64>(), than.parse::<u64>()), (Ok(version), Ok(than)) if version < than)
}

impl Store {
    pub(super) fn put_job(&mut self, job: JobSeen) {
        let key = job.key();
        let known = self.jobs.get(&key);
        if known.is_some_and(|known| known.uid == job.uid && is_older(&job.resource_version, &known.resource_version)) {
            return;
        }
        if known != Some(&job) {
            self.jobs.insert(key.clone(), job);
            self.dirty.insert(key);
        }
    }

    pub(super) fn remove_job(&mut self, key: &Key) -> Option<JobSeen> {
        self.wakes.remove(key);
        self.faults.remove(key);
        // Its pods may still be held by our finalizer.
        self.dirty.insert(key.clone());
        self.jobs.remove(key)
    }

    pub(super) fn put_pod(&mut self, pod: PodSeen) {
        let key = pod.job_key();
        let pods = self.pods.entry(key.clone()).or_default();
        let known = pods.get(&pod.name);
        if known.is_some_and(|known| known.uid == pod.uid && is_older(&pod.resource_version, &known.resource_version)) {
            return;
        }
        if known != Some(&pod) {
            pods.insert(pod.name.clone(), pod);
            self.dirty.insert(key);
        }
    }

    /// The API server said that this very pod is gone.
    pub(super) fn remove_pod(&mut self, key: &Key, name: &str, uid: &str) {
        if let Some(pods) = self.pods.get_mut(key)
            && pods.get(name).is_some_and(|pod| pod.uid == uid)
        {
            pods.remove(name);
            self.dirty.insert(key.clone());
            if pods.is_empty() {
                self.pods.remove(key);
            }
        }
    }

    pub(super) fn gone_pod(&mut self, pod: &PodSeen) {
        self.remove_pod(&pod.job_key(), &pod.name, &pod.uid);
    }

    /// All jobs that exist, after a start of the watch.
    pub(super) fn all_jobs(&mut self, jobs: Vec<JobSeen>) -> Vec<JobSeen> {
        let alive: BTreeSet<Key> = jobs.iter().map(JobSeen::key).collect();
        let gone: Vec<Key> = self.jobs.keys().filter(|key| !alive.contains(*key)).cloned().collect();
        let gone = gone.iter().filter_map(|key| self.remove_job(key)).collect();
        jobs.into_iter().for_each(|job| self.put_job(job));
        gone
    }

    pub(super) fn all_pods(&mut self, pods: Vec<PodSeen>) {
        let alive: BTreeSet<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
        let known = self.pods.values().flat_map(BTreeMap::values);
        let gone: Vec<PodSeen> = known.filter(|pod| !alive.contains(pod.uid.as_str())).cloned().collect();
        gone.iter().for_each(|pod| self.gone_pod(pod));
        pods.into_iter().for_each(|pod| self.put_pod(pod));
    }

    /// `None`: the node is gone. Jobs with a pod there are looked at.
    pub(super) fn put_node(&mut self, name: &str, node: Option<NodeSeen>) {
        let known = match node {
            Some(node) => self.nodes.insert(name.to_owned(), node),
            None => self.nodes.remove(name),
        };
        if known != node {
            let there = |pods: &BTreeMap<String, PodSeen>| pods.values().any(|pod| pod.node.as_deref() == Some(name));
            let keys: Vec<Key> = self.pods.iter().filter(|(_, pods)| there(pods)).map(|(key, _)| key.clone()).collect();
            self.dirty.extend(keys);
            // Also those whose pods are away.
            let keys = self.jobs.iter().filter(|(_, job)| {
                job.status.attempt.as_ref().is_some_and(|attempt| attempt.node.as_deref() == Some(name))
            });
            let keys: Vec<Key> = keys.map(|(key, _)| key.clone()).collect();
            self.dirty.extend(keys);
        }
    }

    pub(super) fn job(&self, key: &Key) -> Option<&JobSeen> {
        self.jobs.get(key)
    }

    pub(super) fn pods(&self, key: &Key) -> Vec<PodSeen> {
        self.pods.get(key).into_iter().flat_map(BTreeMap::values).cloned().collect()
    }

    pub(super) fn key_of(&self, uid: &str) -> Option<Key> {
        self.jobs.iter().find(|(_, job)| job.uid == uid).map(|(key, _)| key.clone())
    }

    pub(super) fn fault(&mut self, key: &Key, now: Timestamp) -> Option<Fault> {
        if self.faults.get(key).is_some_and(|(_, until)| *until <= now) {
            self.faults.remove(key);
        }
        self.faults.get(key).map(|(fault, _)| fault.clone())
    }

    pub(super) fn put_fault(&mut self, key: &Key, fault: Fault, until: Timestamp) {
        self.faults.insert(key.clone(), (fault, until));
    }

    pub(super) fn mark(&mut self, key: Key) {
        self.dirty.insert(key);
    }

    /// Jobs whose progress may have to be written.
    pub(super) fn mark_running(&mut self) {
        let running = self.jobs.iter().filter(|(_, job)| job.status.state == crate::training_job::State::Running);
        let keys: Vec<Key> = running.map(|(key, _)| key.clone()).collect();
        self.dirty.extend(keys);
    }

    pub(super) fn wake_at(&mut self, key: &Key, at: Option<Timestamp>) {
        match at {
            Some(at) => self.wakes.insert(key.clone(), at),
            None => self.wakes.remove(key),
        };
    }

    /// What is due, and when the next one is.
    pub(super) fn due(&mut self, now: Timestamp) -> (Vec<Key>, Option<Timestamp>) {
        let woken: Vec<Key> = self.wakes.iter().filter(|(_, at)| **at <= now).map(|(key, _)| key.clone()).collect();
        self.wakes.retain(|_, at| *at > now);
        let mut due = std::mem::take(&mut self.dirty);
        due.extend(woken);
        (due.into_iter().collect(), self.wakes.values().min().copied())
    }
}
