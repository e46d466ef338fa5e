//! What a step of the state machine reads and answers: the snapshot, journal entries, and actions.

use crate::jobs::pods::PodFault;
use crate::jobs::workload::JournalStep;
use crate::state::orders::Order;
use crate::state::snapshot::{JobSnapshot, Nodes, PodSnapshot};
use gainshare_core::view::Marks;
use gainshare_kube_api::deadline::{DeadlineState, Forecast, NodesNeeded};
use gainshare_kube_api::names::{NodeName, PodUid};
use gainshare_kube_api::training_job::{Attempt, TrainingJobStatus};
use jiff::Timestamp;

/// Everything that a step reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Snapshot<'a> {
    pub(crate) now: Timestamp,
    pub(crate) job: &'a JobSnapshot,
    /// All pods with the job's label, also those of other owners.
    pub(crate) pods: &'a [PodSnapshot],
    /// The API server itself answered that the pod of the attempt does not exist.
    pub(crate) pod_is_missing: bool,
    pub(crate) nodes: &'a Nodes,
    pub(crate) order: Option<&'a Order>,
    /// The node that was asked for, while it takes no pods.
    pub(crate) closed: Option<&'a NodeName>,
    /// Why there can be no pod: the template is wrong, or the API server refused it.
    pub(crate) fault: Option<&'a PodFault>,
    /// The node agent's last report: category and share in percent.
    pub(crate) progress: Option<(&'static str, Option<u32>)>,
    /// The node agent's last prediction.
    pub(crate) finish: Option<PodFinish>,
    /// The new nodes with which the job could keep its deadline.
    pub(crate) nodes_needed: Option<&'a NodesNeeded>,
    /// What SpeCon has done with the job.
    pub(crate) marks: Marks,
}

impl<'a> Snapshot<'a> {
    /// Pods and nodes only: without an order, a fault, a report or a prediction.
    #[cfg(test)]
    pub(crate) fn plain(now: Timestamp, job: &'a JobSnapshot, pods: &'a [PodSnapshot], nodes: &'a Nodes) -> Self {
        Snapshot {
            now,
            job,
            pods,
            pod_is_missing: false,
            nodes,
            order: None,
            closed: None,
            fault: None,
            progress: None,
            finish: None,
            nodes_needed: None,
            marks: Marks::default(),
        }
    }

    /// The pods that this job owns, by uid.
    pub(super) fn own_pods(&self) -> impl Iterator<Item = &'a PodSnapshot> + use<'a> {
        let uid = &self.job.uid;
        self.pods.iter().filter(move |pod| pod.owner.as_ref() == Some(uid))
    }

    /// The pod of this attempt: the one the journal names, or the one it may name.
    pub(super) fn pod_of(&self, attempt: &Attempt) -> Option<&'a PodSnapshot> {
        match &attempt.uid {
            Some(uid) => self.pods.iter().find(|pod| pod.uid == *uid),
            None => self.own_pods().find(|pod| pod.epoch == attempt.epoch),
        }
    }
}

/// The node agent's prediction for the pod of the attempt, and how much of the training is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PodFinish {
    pub(crate) forecast: Option<Forecast>,
    pub(crate) deadline_state: Option<DeadlineState>,
    pub(crate) percent: Option<u32>,
}

/// One action. All are harmless if repeated, or if the snapshot they were decided on is old.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Write the status, unless the job has changed.
    Write(JournalStep, Box<TrainingJobStatus>),
    /// Put our finalizer on the job, or take it off.
    Hold,
    Release,
    /// The job's time to live after the end is over.
    DeleteJob,
    /// Make the pod of this epoch, gated.
    Create {
        epoch: u32,
    },
    /// Pin the pod to the node and open its gate.
    Open {
        pod: String,
        uid: PodUid,
        node: Option<NodeName>,
    },
    /// Ask the pod to end.
    Delete {
        pod: String,
        uid: PodUid,
    },
    /// The pod's end is in the journal: its object may go.
    LetGo {
        pod: String,
        uid: PodUid,
    },
    /// Remove the order: it is in the journal, or cannot be carried out.
    RemoveOrder,
}

pub(crate) type Step = crate::jobs::workload::Step<Action>;
