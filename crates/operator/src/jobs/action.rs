//! What a step of the state machine reads and answers: the snapshot, journal entries, and actions.

use super::Order;
use super::snapshot::{JobSnapshot, Nodes, PodSnapshot};
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
    /// Why there can be no pod: the template is wrong, or the API server refused it.
    pub(crate) fault: Option<&'a PodFault>,
    /// The node agent's last report: category and share in percent.
    pub(crate) progress: Option<(&'static str, Option<u32>)>,
}

impl<'a> Snapshot<'a> {
    /// The pods that this job owns, by uid.
    pub(super) fn own_pods(&self) -> impl Iterator<Item = &'a PodSnapshot> + use<'a> {
        let uid = self.job.uid.as_str();
        self.pods.iter().filter(move |pod| pod.owner.as_deref() == Some(uid))
    }

    /// The pod of this attempt: the one the journal names, or the one it may name.
    pub(super) fn pod_of(&self, attempt: &Attempt) -> Option<&'a PodSnapshot> {
        match &attempt.uid {
            Some(uid) => self.pods.iter().find(|pod| pod.uid == *uid),
            None => self.own_pods().find(|pod| pod.epoch == attempt.epoch),
        }
    }
}

/// Why a pod could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodFault {
    /// No retry helps, as the job is written.
    pub(crate) for_good: bool,
    pub(crate) message: String,
}

/// An entry of the journal. The name is for fail points, logs and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JournalStep {
    /// The next attempt is decided on.
    Planned,
    /// The attempt's pod and node are decided on.
    Placed,
    /// The attempt runs.
    Running,
    /// Only the message or the progress changes.
    Noted,
    /// The attempt is to be stopped.
    Stopping,
    /// The attempt's stop is proven.
    Stopped,
    /// The job has failed without an attempt.
    Failed,
    /// A move is given up.
    Cancelled,
}

impl JournalStep {
    pub(crate) fn name(self) -> &'static str {
        match self {
            JournalStep::Planned => "planned",
            JournalStep::Placed => "placed",
            JournalStep::Running => "running",
            JournalStep::Noted => "noted",
            JournalStep::Stopping => "stopping",
            JournalStep::Stopped => "stopped",
            JournalStep::Failed => "failed",
            JournalStep::Cancelled => "cancelled",
        }
    }
}

/// One action. All are harmless if repeated, or if the snapshot they were decided on is old.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Write the status, unless the job has changed.
    Write(JournalStep, Box<TrainingJobStatus>),
    /// Put our finalizer on the job, or take it off.
    Hold,
    Release,
    /// Its time to live after the end is over.
    DeleteJob,
    /// Make the pod of this epoch, gated.
    Create {
        epoch: u32,
    },
    /// Pin the pod to the node and open its gate.
    Open {
        pod: String,
        uid: String,
        node: Option<String>,
    },
    /// Ask the pod to end.
    Delete {
        pod: String,
        uid: String,
    },
    /// The pod's end is in the journal: its object may go.
    LetGo {
        pod: String,
        uid: String,
    },
    /// Remove the order: it is in the journal, or cannot be carried out.
    RemoveOrder,
}

/// What to do now, and when to run the next step if nothing happens before.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Step {
    pub(crate) actions: Vec<Action>,
    pub(crate) wake: Option<Timestamp>,
}

impl Step {
    pub(super) fn one(action: Action) -> Step {
        Step { actions: vec![action], wake: None }
    }

    pub(super) fn at(wake: Timestamp) -> Step {
        Step { actions: Vec::new(), wake: Some(wake) }
    }
}
