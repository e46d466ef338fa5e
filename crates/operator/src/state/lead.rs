//! The leader's state: the cluster's objects, the node agents' reports, and what has changed since a worker
//! last read it.
//!
//! It exists while this replica leads and is built again by the next leader. Locks do not poison: a panic ends
//! the process anyway (see [`crate::tasks`]). Where two locks are held together, the world's is taken first.

use super::agents::Agents;
use super::invalid_objects::InvalidObjects;
use super::jobs::JobChange;
use super::metrics::Metrics;
use super::orders::Orders;
use super::snapshot::NodeState;
use super::task_job::ScaleOrder;
use super::workload::WorkloadKey;
use super::world::{PolicyKey, World};
use gainshare_kube_api::deadline::{FinishStatus, NodesNeeded};
use gainshare_kube_api::names::{JobUid, NodeName, PodUid};
use gainshare_kube_api::tasks::TaskTraffic;
use gainshare_kube_api::wire::FinishedPod;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

pub(crate) struct Leader {
    world: Mutex<World>,
    pub(crate) agents: Mutex<Agents>,
    /// Between the decision about jobs and their controller.
    pub(crate) orders: Arc<Orders>,
    /// Between the decision about the sizes of tasks and the controller, by the uid of the job.
    pub(crate) scale_orders: Mutex<BTreeMap<JobUid, ScaleOrder>>,
    /// What the tasks of jobs send and receive, for the controller to write, by the uid of the job.
    pub(crate) traffic_orders: Mutex<BTreeMap<JobUid, TaskTraffic>>,
    /// The new nodes with which deadlines could be kept, by the uid of the job; absent until they are known.
    pub(crate) nodes_needed: Mutex<Option<BTreeMap<JobUid, NodesNeeded>>>,
    pub(crate) metrics: Arc<Metrics>,
    /// Objects with values that no cluster can have, for the task that publishes them.
    pub(crate) invalid: Arc<InvalidObjects>,
    /// One channel per node, to wake the agent's waiting request.
    bells: Mutex<BTreeMap<NodeName, watch::Sender<u64>>>,
    /// One lock per node: its resizes are carried out one request after the other.
    turns: Mutex<BTreeMap<NodeName, Arc<tokio::sync::Mutex<()>>>>,
    /// The lists that shares need.
    pub(crate) lists: Lists,
    /// The lists that only jobs need: shares do not wait for them.
    pub(crate) job_lists: Lists,
    dirty: Mutex<UnreadChanges>,
    /// Pods with a new report, for the controller of jobs.
    progressed: Mutex<BTreeSet<PodUid>>,
    /// Wakes the controller of jobs: a workload, one of its pods or a node has changed.
    pub(crate) jobs_changed: Notify,
    /// Wakes the loop that writes policies' statuses.
    pub(crate) work: Notify,
}

/// The first lists of some watches: nothing may be decided before each of them is complete.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    awaited: AtomicUsize,
    complete: AtomicUsize,
}

impl Lists {
    /// A watch starts, and its first list is awaited.
    pub(crate) fn await_one(&self) {
        self.awaited.fetch_add(1, Ordering::SeqCst);
    }

    /// A watch has read its first list.
    pub(crate) fn complete_one(&self) {
        self.complete.fetch_add(1, Ordering::SeqCst);
    }

    /// All watches are started before the first worker asks.
    fn are_complete(&self) -> bool {
        let awaited = self.awaited.load(Ordering::SeqCst);
        awaited > 0 && self.complete.load(Ordering::SeqCst) >= awaited
    }
}

/// What the workers have not read yet.
#[derive(Debug, Default)]
pub(crate) struct UnreadChanges {
    pub(crate) policies: BTreeSet<PolicyKey>,
    pub(crate) pods: BTreeSet<PodUid>,
}

impl Leader {
    pub(crate) fn new(metrics: Arc<Metrics>, first_revision: u64) -> Leader {
        Leader {
            world: Mutex::new(World::new(first_revision)),
            agents: Mutex::default(),
            orders: Arc::default(),
            scale_orders: Mutex::default(),
            traffic_orders: Mutex::default(),
            nodes_needed: Mutex::default(),
            metrics,
            invalid: Arc::default(),
            bells: Mutex::default(),
            turns: Mutex::default(),
            lists: Lists::default(),
            job_lists: Lists::default(),
            dirty: Mutex::default(),
            progressed: Mutex::default(),
            jobs_changed: Notify::new(),
            work: Notify::new(),
        }
    }

    /// Changes the world, and wakes the agents and workers that the change concerns.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut World) -> T) -> T {
        let (result, touched, gone_jobs, has_job_changes) = {
            let mut world = self.world.lock();
            let result = change(&mut world);
            (result, world.take_changed_objects(), world.jobs.take_gone(), world.has_job_changes())
        };
        gone_jobs.iter().for_each(|uid| self.orders.forget(uid));
        if has_job_changes {
            self.jobs_changed.notify_one();
        }
        if !touched.policies.is_empty() || !touched.pods.is_empty() {
            let mut dirty = self.dirty.lock();
            dirty.policies.extend(touched.policies);
            dirty.pods.extend(touched.pods);
        }
        if !touched.nodes.is_empty() {
            let bells = self.bells.lock();
            let rung = touched.nodes.iter().filter_map(|node| bells.get(node));
            rung.for_each(|bell| bell.send_modify(|count| *count += 1));
        }
        self.work.notify_one();
        result
    }

    pub(crate) fn read<T>(&self, read: impl FnOnce(&World) -> T) -> T {
        read(&self.world.lock())
    }

    /// Takes in how far pods had come that left the list of a node. No loop is woken for that.
    pub(crate) fn record_finished(&self, node: &NodeName, finished: &[FinishedPod]) {
        self.world.lock().record_finished(node, finished);
    }

    /// The new nodes with which a job could keep its deadline; `published` as long as that is not known.
    pub(crate) fn nodes_needed(&self, uid: &JobUid, published: Option<&FinishStatus>) -> Option<NodesNeeded> {
        match &*self.nodes_needed.lock() {
            Some(needed) => needed.get(uid).cloned(),
            None => published.and_then(|finish| finish.nodes_needed.clone()),
        }
    }

    /// Changes when the node's list changes or [`Leader::ring`] is called for the node.
    pub(crate) fn bell(&self, node: &NodeName) -> watch::Receiver<u64> {
        let mut bells = self.bells.lock();
        bells.entry(node.clone()).or_insert_with(|| watch::channel(0).0).subscribe()
    }

    pub(crate) fn ring(&self, node: &NodeName) {
        if let Some(bell) = self.bells.lock().get(node) {
            bell.send_modify(|count| *count += 1);
        }
    }

    pub(crate) fn turn(&self, node: &NodeName) -> Arc<tokio::sync::Mutex<()>> {
        self.turns.lock().entry(node.clone()).or_default().clone()
    }

    /// Whether everything that shares and the decision read has been read once: nothing may be decided before.
    pub(crate) fn is_synced(&self) -> bool {
        self.lists.are_complete()
    }

    /// The same for everything that the controller of jobs reads.
    pub(crate) fn jobs_are_synced(&self) -> bool {
        self.is_synced() && self.job_lists.are_complete()
    }

    pub(crate) fn mark_pods(&self, uids: impl IntoIterator<Item = PodUid>) {
        self.dirty.lock().pods.extend(uids);
        self.work.notify_one();
    }

    pub(crate) fn mark_progressed(&self, uids: impl IntoIterator<Item = PodUid>) {
        self.progressed.lock().extend(uids);
    }

    /// The workloads that have changed since the last call.
    pub(crate) fn take_job_changes(&self) -> Vec<(WorkloadKey, JobChange)> {
        self.world.lock().take_job_changes()
    }

    /// The state of a node that the API server does not have now, and how long until it counts as off.
    pub(crate) fn missing_node(&self, name: &NodeName, now: Instant) -> (NodeState, Option<Duration>) {
        self.world.lock().missing_node(name, now)
    }

    /// The workloads with new reports since the last call.
    pub(crate) fn take_progressed(&self) -> Vec<WorkloadKey> {
        let uids = std::mem::take(&mut *self.progressed.lock());
        if uids.is_empty() {
            return Vec::new();
        }
        self.read(|world| uids.iter().filter_map(|uid| world.job_of(uid)).collect())
    }

    pub(crate) fn mark_policies(&self, keys: impl IntoIterator<Item = PolicyKey>) {
        self.dirty.lock().policies.extend(keys);
        self.work.notify_one();
    }

    pub(crate) fn mark_all_policies(&self) {
        let keys: Vec<PolicyKey> = self.read(|world| world.policies.keys().cloned().collect());
        self.dirty.lock().policies.extend(keys);
    }

    /// Pods whose notes may have to be written.
    pub(crate) fn take_pods(&self) -> BTreeSet<PodUid> {
        std::mem::take(&mut self.dirty.lock().pods)
    }

    pub(crate) fn take_policies(&self) -> BTreeSet<PolicyKey> {
        std::mem::take(&mut self.dirty.lock().policies)
    }
}
