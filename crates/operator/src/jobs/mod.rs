//! Training jobs: pods that are started where the cluster gains, and moved there if they began elsewhere.
//!
//! **Problem.** A move is a stop, a proof of the stop, and a start; programs die and messages get lost between any two of these, and yet the job must
//! never run twice at the same time, and must not be lost.
//!
//! **How.** Decisions and deeds are apart. The decision (where a job should run) reads [`JobFacts`] and puts an [`Order`] on the [`Board`];
//! the controller takes it as a wish, and carries it out if the job can still be moved.
//!
//! **Terms.** *Attempt*: one pod of the job. *Epoch*: its number. *Proof of stop*: what shows that a pod's containers have ended and never run again.

mod adopt;
mod controller;
mod effects;
mod ending;
mod machine;
mod off;
mod pod;
mod seen;
mod status;
mod store;

pub use adopt::Adopted;
pub(crate) use adopt::give_back;
pub(crate) use controller::start;
pub use effects::{FAIL_POINT_EXIT, FailPoint};
use store::Key;

use gainshare_kube_api::training_job::{JobPolicy, NODE_ANNOTATION};
use gainshare_kube_api::wire::Category;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// A wish of the decision. The last one about a job stands, until the controller has taken it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The TrainingJob's.
    pub uid: String,
    /// Where it is to run.
    pub node: String,
    pub kind: OrderKind,
    /// For people: on the job's status and in its events.
    pub why: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderKind {
    /// A waiting job begins there.
    Place,
    /// A running job is saved and resumed there.
    Move,
}

/// What the decision needs to know of a job; its progress comes from the agents, by the pod's uid.
#[derive(Debug, Clone, PartialEq)]
pub struct JobFacts {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// Whose job it is: shares and gains are compared within an owner first. The namespace, until there is something better.
    pub owner: String,
    pub arrived: jiff::Timestamp,
    pub policy: JobPolicy,
    pub state: JobState,
    /// Why the job must stay where it is.
    pub movable: Result<(), String>,
    /// The pod that runs, or waits for its place.
    pub pod_uid: Option<String>,
    /// What the pod asks for, in thousandths of a core and in bytes.
    pub cpu_request_milli: u64,
    pub memory_request_bytes: u64,
    /// Nodes that had no room for it just now.
    pub tried: Vec<String>,
    /// Measured at its last move: from being asked to end until it ran again.
    pub move_cost_s: Option<f64>,
}

/// Whoever names a node for a job keeps it there.
fn unless_kept(node: Option<&str>) -> Result<(), String> {
    node.map_or(Ok(()), |node| Err(format!("the annotation {NODE_ANNOTATION} keeps it on {node}")))
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobState {
    /// Its pod waits for a place: an order [`OrderKind::Place`] is welcome.
    Waiting,
    Running {
        node: String,
        epoch: u32,
        since: jiff::Timestamp,
    },
    /// Between two nodes, between two attempts, suspended or about to be: leave it alone.
    Moving,
    Done,
}

/// Between the decision and the controller.
#[derive(Debug, Default)]
pub struct Board {
    orders: Mutex<BTreeMap<String, Order>>,
    /// Jobs about which the controller has not heard that there is an order.
    fresh: Mutex<Vec<String>>,
    /// Shared with whoever looks: what has not changed is still the same one.
    facts: Mutex<BTreeMap<String, Arc<JobFacts>>>,
    categories: Mutex<BTreeMap<String, Category>>,
    turned: Mutex<BTreeSet<String>>,
    /// Rings for the controller.
    pub(crate) ordered: Notify,
    /// Rings for the decision: a job came, went, or changed its state.
    pub changed: Notify,
}

impl Board {
    /// Puts an order; a former one about the same job that nobody has taken is forgotten.
    pub fn put(&self, order: Order) {
        self.fresh.lock().expect("never poisoned").push(order.uid.clone());
        self.orders.lock().expect("never poisoned").insert(order.uid.clone(), order);
        self.ordered.notify_one();
    }

    /// What the decision now makes of these jobs; their agents have no opinion.
    pub(crate) fn judge(&self, turned: Vec<(String, Category)>) {
        self.turned.lock().expect("never poisoned").extend(turned.iter().map(|(uid, _)| uid.clone()));
        self.categories.lock().expect("never poisoned").extend(turned);
    }

    /// Jobs whose category the decision has changed since the last call.
    pub(crate) fn take_turned(&self) -> Vec<Key> {
        let uids = std::mem::take(&mut *self.turned.lock().expect("never poisoned"));
        self.keys(uids)
    }

    pub(crate) fn category(&self, uid: &str) -> Option<Category> {
        self.categories.lock().expect("never poisoned").get(uid).copied()
    }

    /// All jobs that are ours to run.
    pub fn facts(&self) -> Vec<Arc<JobFacts>> {
        self.facts.lock().expect("never poisoned").values().cloned().collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.facts.lock().expect("never poisoned").is_empty()
    }

    /// Jobs about which orders were put since the last call.
    pub(crate) fn take_ordered(&self) -> Vec<Key> {
        let uids = std::mem::take(&mut *self.fresh.lock().expect("never poisoned"));
        self.keys(uids)
    }

    fn keys(&self, uids: impl IntoIterator<Item = String>) -> Vec<Key> {
        let facts = self.facts.lock().expect("never poisoned");
        let known = uids.into_iter().filter_map(|uid| facts.get(&uid));
        known.map(|facts| (facts.namespace.clone(), facts.name.clone())).collect()
    }

    /// What the job's pods ask for, if it is known already: a template does not change.
    pub(crate) fn asked(&self, uid: &str) -> Option<(u64, u64)> {
        let facts = self.facts.lock().expect("never poisoned");
        facts.get(uid).map(|facts| (facts.cpu_request_milli, facts.memory_request_bytes))
    }

    pub(crate) fn order(&self, uid: &str) -> Option<Order> {
        self.orders.lock().expect("never poisoned").get(uid).cloned()
    }

    /// The order was carried out, or cannot be.
    pub(crate) fn taken(&self, uid: &str) {
        self.orders.lock().expect("never poisoned").remove(uid);
    }

    pub(crate) fn publish(&self, facts: JobFacts) {
        self.publish_all(vec![facts]);
    }

    /// All in one moment: nobody sees a part of them.
    pub(crate) fn publish_all(&self, all: Vec<JobFacts>) {
        let mut known = self.facts.lock().expect("never poisoned");
        for facts in all {
            if known.get(&facts.uid).is_none_or(|before| **before != facts) {
                known.insert(facts.uid.clone(), Arc::new(facts));
                self.changed.notify_one();
            }
        }
    }

    pub(crate) fn forget(&self, uid: &str) {
        self.taken(uid);
        self.categories.lock().expect("never poisoned").remove(uid);
        if self.facts.lock().expect("never poisoned").remove(uid).is_some() {
            self.changed.notify_one();
        }
    }
}
