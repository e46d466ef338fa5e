//! What the decision and the controller of jobs exchange: facts about jobs in one direction, orders in
//! the other.
//!
//! **How.** The controller publishes [`JobFacts`]. The decision (`crate::placement`) reads them and
//! puts an [`Order`] for a job that should start or move. The controller of the job takes the order
//! as a wish: it carries the order out if the job can still be moved, and if the node still takes
//! pods. Otherwise the order is withdrawn and the decision is woken. One mutex guards everything, and
//! no caller holds it for long.

use super::workload::{WorkloadKey, WorkloadKind};
use gainshare_core::view::Marks;
use gainshare_kube_api::immovable::ImmovableReason;
use gainshare_kube_api::names::{JobUid, NamespacedName, NodeName, PodUid};
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::training_job::JobPolicy;
use gainshare_kube_api::wire::ReportedCategory;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::Notify;

/// Where a job should run. The newest order about a job replaces older ones, until the controller
/// has taken it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    /// The uid of the TrainingJob or Job.
    pub(crate) uid: JobUid,
    /// Where it is to run.
    pub(crate) node: NodeName,
    pub(crate) kind: OrderKind,
    pub(crate) reason: PlacementReason,
}

impl Order {
    /// Why, for people: on the job's status and in its events.
    pub(crate) fn sentence(&self) -> String {
        self.reason.sentence(&self.node)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OrderKind {
    /// A waiting job starts there.
    Place,
    /// A running job is saved and resumed there.
    Move,
}

/// What the decision needs to know of a job. Its progress comes from the node agents, by the pod's
/// uid.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JobFacts {
    pub(crate) uid: JobUid,
    pub(crate) kind: WorkloadKind,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The owner within which shares and gains are compared first: the namespace.
    pub(crate) owner: String,
    pub(crate) arrived: jiff::Timestamp,
    pub(crate) policy: JobPolicy,
    pub(crate) state: JobState,
    /// Why the job must stay where it is.
    pub(crate) movable: Result<(), ImmovableReason>,
    /// The pod that runs, or waits for its place.
    pub(crate) pod_uid: Option<PodUid>,
    /// What the pod requests, in thousandths of a core and in bytes.
    pub(crate) cpu_request_milli: u64,
    pub(crate) memory_request_bytes: u64,
    /// Nodes that had no room for it just now.
    pub(crate) tried: Vec<NodeName>,
    /// Measured at its last move: seconds from the request to end until it ran again.
    pub(crate) move_cost_s: Option<f64>,
    /// What move rules have done with it, as the job itself has it stored.
    pub(crate) marks: Marks,
}

/// What a move rule has found out about a job and done with it: the controller publishes it on the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Judgement {
    /// SpeCon's category: the node agents, which only measure such jobs, have none. Of other jobs they have.
    pub(crate) category: Option<ReportedCategory>,
    pub(crate) marks: Marks,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JobState {
    /// The job's pod waits for a place: an order [`OrderKind::Place`] is welcome.
    Waiting,
    Running {
        node: NodeName,
        epoch: u32,
        since: jiff::Timestamp,
    },
    /// Between two nodes, between two attempts, suspended or about to be: no order applies.
    Moving,
    Done,
}

/// The exchange between the decision and the controller.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    state: Mutex<OrdersState>,
    /// Wakes the controller: an order was put.
    pub(crate) ordered: Notify,
    /// Wakes the decision: a job came, went, or changed its state.
    pub(crate) changed: Notify,
}

#[derive(Debug, Default)]
struct OrdersState {
    orders: BTreeMap<JobUid, Order>,
    /// Jobs with an order that the controller has not read yet.
    fresh: Vec<JobUid>,
    /// Shared with readers: a pointer that is still the same means facts that did not change.
    facts: BTreeMap<JobUid, Arc<JobFacts>>,
    judgements: BTreeMap<JobUid, Judgement>,
    /// Jobs about which a judgement is to be published, since [`Orders::take_judged`].
    judged: BTreeSet<JobUid>,
    /// Jobs that will miss their deadlines on every node that there is.
    needing_nodes: BTreeSet<JobUid>,
}

impl OrdersState {
    fn keys(&self, uids: impl IntoIterator<Item = JobUid>) -> Vec<WorkloadKey> {
        let known = uids.into_iter().filter_map(|uid| self.facts.get(&uid));
        let key =
            |facts: &Arc<JobFacts>| WorkloadKey::new(facts.kind, NamespacedName::new(&facts.namespace, &facts.name));
        known.map(key).collect()
    }
}

impl Orders {
    /// Puts an order. An earlier order about the same job is dropped.
    pub(crate) fn put(&self, order: Order) {
        let mut state = self.state.lock();
        state.fresh.push(order.uid.clone());
        state.orders.insert(order.uid.clone(), order);
        drop(state);
        self.ordered.notify_one();
    }

    /// Sets the decision's judgements of these jobs. Orders that follow from them are put afterwards, so that a move
    /// and its mark are written together.
    pub(crate) fn set_judgements(&self, changed: Vec<(JobUid, Judgement)>) {
        let mut state = self.state.lock();
        for (uid, judgement) in changed {
            // A Job has no place for its category.
            let is_published = state
                .facts
                .get(&uid)
                .is_some_and(|facts| facts.kind == WorkloadKind::Job && facts.marks == judgement.marks);
            if !is_published {
                state.judged.insert(uid.clone());
            }
            state.judgements.insert(uid, judgement);
        }
    }

    /// Sets the jobs that only a further node would bring to their deadlines, by their uids.
    pub(crate) fn set_needing_nodes(&self, uids: BTreeSet<JobUid>) {
        self.state.lock().needing_nodes = uids;
    }

    pub(crate) fn needing_nodes(&self) -> BTreeSet<JobUid> {
        self.state.lock().needing_nodes.clone()
    }

    /// Jobs about which a changed judgement is to be published, since the last call.
    pub(crate) fn take_judged(&self) -> Vec<WorkloadKey> {
        let mut state = self.state.lock();
        let uids = std::mem::take(&mut state.judged);
        state.keys(uids)
    }

    pub(crate) fn judgement(&self, uid: &JobUid) -> Option<Judgement> {
        self.state.lock().judgements.get(uid).copied()
    }

    /// All jobs that the operator runs.
    pub(crate) fn facts(&self) -> Vec<Arc<JobFacts>> {
        self.state.lock().facts.values().cloned().collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().facts.is_empty()
    }

    /// Jobs about which orders were put since the last call.
    pub(crate) fn take_ordered(&self) -> Vec<WorkloadKey> {
        let mut state = self.state.lock();
        let uids = std::mem::take(&mut state.fresh);
        state.keys(uids)
    }

    /// What the job's pods request, if it is known already: a template does not change.
    pub(crate) fn requests(&self, uid: &JobUid) -> Option<(u64, u64)> {
        self.state.lock().facts.get(uid).map(|facts| (facts.cpu_request_milli, facts.memory_request_bytes))
    }

    pub(crate) fn order(&self, uid: &JobUid) -> Option<Order> {
        self.state.lock().orders.get(uid).cloned()
    }

    /// Removes the order: it was carried out, or cannot be. Answers whether there was one.
    pub(crate) fn remove_order(&self, uid: &JobUid) -> bool {
        self.state.lock().orders.remove(uid).is_some()
    }

    /// Removes this order, unless a newer one has replaced it, and wakes the decision: what the order was decided on is
    /// not true any more.
    pub(crate) fn withdraw(&self, order: &Order) {
        let mut state = self.state.lock();
        if state.orders.get(&order.uid) == Some(order) {
            state.orders.remove(&order.uid);
            self.changed.notify_one();
        }
    }

    pub(crate) fn publish(&self, facts: JobFacts) {
        self.publish_all(vec![facts]);
    }

    /// Publishes all at once: no reader gets a part of them.
    pub(crate) fn publish_all(&self, all: Vec<JobFacts>) {
        let mut state = self.state.lock();
        for facts in all {
            if state.facts.get(&facts.uid).is_none_or(|before| **before != facts) {
                state.facts.insert(facts.uid.clone(), Arc::new(facts));
                self.changed.notify_one();
            }
        }
    }

    pub(crate) fn forget(&self, uid: &JobUid) {
        let mut state = self.state.lock();
        state.orders.remove(uid);
        state.judgements.remove(uid);
        if state.facts.remove(uid).is_some() {
            self.changed.notify_one();
        }
    }
}
