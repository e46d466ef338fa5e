//! The leader's state: the cluster's objects, the node agents' reports, and what has changed since a worker
//! last read it.
//!
//! It exists while this replica leads and is built anew by the next leader. Locks do not poison: a panic ends
//! the process anyway (see [`crate::tasks`]). Where two locks are held together, the world's is taken first.

use super::agents::Agents;
use super::metrics::Metrics;
use super::orders::Orders;
use super::world::{PolicyKey, World};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Notify, watch};

pub(crate) struct Leader {
    world: Mutex<World>,
    pub(crate) agents: Mutex<Agents>,
    /// Between the decision about jobs and their controller.
    pub(crate) orders: Arc<Orders>,
    pub(crate) metrics: Arc<Metrics>,
    /// One channel per node, to wake the agent's waiting request.
    bells: Mutex<BTreeMap<String, watch::Sender<u64>>>,
    /// One lock per node: its resizes are carried out one request after the other.
    turns: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
    lists: Lists,
    dirty: Mutex<Dirty>,
    /// Pods with a new report, for the controller of training jobs.
    progressed: Mutex<BTreeSet<String>>,
    /// Wakes the loop that writes policies' statuses.
    pub(crate) work: Notify,
}

/// The first lists of all watches: nothing may be decided before each of them is complete.
#[derive(Debug, Default)]
struct Lists {
    awaited: AtomicUsize,
    complete: AtomicUsize,
}

/// What the workers have not read yet.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    pub(crate) policies: BTreeSet<PolicyKey>,
    pub(crate) pods: BTreeSet<String>,
}

impl Leader {
    pub(crate) fn new(metrics: Arc<Metrics>, first_revision: u64) -> Leader {
        Leader {
            world: Mutex::new(World::new(first_revision)),
            agents: Mutex::default(),
            orders: Arc::default(),
            metrics,
            bells: Mutex::default(),
            turns: Mutex::default(),
            lists: Lists::default(),
            dirty: Mutex::default(),
            progressed: Mutex::default(),
            work: Notify::new(),
        }
    }

    /// Changes the world, and wakes the agents and workers that the change concerns.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut World) -> T) -> T {
        let (result, touched) = {
            let mut world = self.world.lock();
            let result = change(&mut world);
            (result, world.take_touched())
        };
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

    /// Changes when the node's list changes or [`Leader::ring`] is called for the node.
    pub(crate) fn bell(&self, node: &str) -> watch::Receiver<u64> {
        let mut bells = self.bells.lock();
        bells.entry(node.to_owned()).or_insert_with(|| watch::channel(0).0).subscribe()
    }

    pub(crate) fn ring(&self, node: &str) {
        if let Some(bell) = self.bells.lock().get(node) {
            bell.send_modify(|count| *count += 1);
        }
    }

    pub(crate) fn turn(&self, node: &str) -> Arc<tokio::sync::Mutex<()>> {
        self.turns.lock().entry(node.to_owned()).or_default().clone()
    }

    /// A watch starts: its first list must be complete before anything is decided.
    pub(crate) fn await_list(&self) {
        self.lists.awaited.fetch_add(1, Ordering::SeqCst);
    }

    /// A watch has read its first list.
    pub(crate) fn complete_list(&self) {
        self.lists.complete.fetch_add(1, Ordering::SeqCst);
        self.work.notify_one();
    }

    /// Whether the first list of every kind is complete. All watches are started before the first
    /// worker asks.
    pub(crate) fn is_synced(&self) -> bool {
        let awaited = self.lists.awaited.load(Ordering::SeqCst);
        awaited > 0 && self.lists.complete.load(Ordering::SeqCst) >= awaited
    }

    pub(crate) fn mark_pods(&self, uids: impl IntoIterator<Item = String>) {
        self.dirty.lock().pods.extend(uids);
        self.work.notify_one();
    }

    pub(crate) fn mark_progressed(&self, uids: impl IntoIterator<Item = String>) {
        self.progressed.lock().extend(uids);
    }

    /// Namespaces and names of the training jobs with new reports since the last call.
    pub(crate) fn take_progressed(&self) -> Vec<(String, String)> {
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
    pub(crate) fn take_pods(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.dirty.lock().pods)
    }

    pub(crate) fn take_policies(&self) -> BTreeSet<PolicyKey> {
        std::mem::take(&mut self.dirty.lock().policies)
    }
}
