//! What a step of the state machine reads and answers: the snapshot, and actions.

use super::gang::Placement;
use crate::jobs::moves::proof_of_stop;
use crate::jobs::pods::PodFault;
use crate::jobs::progress::TaskProgress;
use crate::jobs::workload::JournalStep;
use crate::state::snapshot::{Nodes, PodSnapshot};
use crate::state::task_job::{TaskJobSnapshot, TaskJobStatus};
use gainshare_kube_api::deadline::NodesNeeded;
use gainshare_kube_api::names::{NodeName, PodUid};
use gainshare_kube_api::tasks::{TaskId, TaskScale, TaskTraffic};
use gainshare_kube_api::training_job::State;
use jiff::Timestamp;
use std::collections::BTreeMap;

/// Everything that a step reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Snapshot<'a> {
    pub(crate) now: Timestamp,
    pub(crate) job: &'a TaskJobSnapshot,
    /// All pods with the job's label, also those of other owners.
    pub(crate) pods: &'a [PodSnapshot],
    pub(crate) nodes: &'a Nodes,
    /// The nodes that the line has chosen for tasks of this job.
    pub(crate) grant: Option<&'a Placement>,
    /// The gang would not even fit an empty cluster.
    pub(crate) never_fits: bool,
    /// What is decided about the sizes of its tasks.
    pub(crate) scale: Option<&'a TaskScale>,
    /// What its tasks send and receive.
    pub(crate) traffic: Option<&'a TaskTraffic>,
    /// The new nodes with which it could keep its deadline.
    pub(crate) nodes_needed: Option<&'a NodesNeeded>,
    /// What is reported about its tasks.
    pub(crate) progress: TaskProgress,
    /// Why there can be no pod.
    pub(crate) fault: Option<&'a PodFault>,
}

impl<'a> Snapshot<'a> {
    /// The job as it is, without anything that was decided for it.
    pub(super) fn without_orders(
        now: Timestamp,
        job: &'a TaskJobSnapshot,
        pods: &'a [PodSnapshot],
        nodes: &'a Nodes,
    ) -> Snapshot<'a> {
        let (grant, scale, traffic, nodes_needed, fault) = (None, None, None, None, None);
        let progress = TaskProgress::default();
        Snapshot { now, job, pods, nodes, grant, never_fits: false, scale, traffic, nodes_needed, progress, fault }
    }

    pub(super) fn own_pods(&self) -> impl Iterator<Item = &'a PodSnapshot> + use<'a> {
        let uid = &self.job.uid;
        self.pods.iter().filter(move |pod| pod.owner.as_ref() == Some(uid))
    }

    /// The pods of the present attempt that are not replaced, by task.
    pub(super) fn current_pods(&self) -> BTreeMap<TaskId, &'a PodSnapshot> {
        let journal = &self.job.status.journal;
        let current = self.own_pods().filter(|pod| pod.epoch == journal.epoch && !journal.replaced.contains(&pod.uid));
        current.filter_map(|pod| Some((pod.task?, pod))).collect()
    }

    pub(super) fn is_stopped(&self, pod: &PodSnapshot) -> bool {
        proof_of_stop(pod, self.job.declared_stopped.as_deref(), self.nodes).is_some()
    }

    /// Whether all tasks of the gang have run together in this attempt.
    pub(super) fn has_begun(&self) -> bool {
        self.job.status.journal.state == State::Running
    }
}

/// One action. All are harmless if repeated, or if the snapshot they were decided on is old.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Write the status, unless the job has changed.
    Write(JournalStep, Box<TaskJobStatus>),
    /// Put our finalizer on the job, or take it off.
    Hold,
    Release,
    /// The job's time to live after the end is over.
    DeleteJob,
    /// Make the Service and the pod of a task; the pod is gated.
    Create(TaskId),
    /// Pin the pod to the node and open its gate.
    Open {
        pod: String,
        uid: PodUid,
        node: NodeName,
    },
    Delete {
        pod: String,
        uid: PodUid,
    },
    /// Stop the pod's containers; its object stays, and with it the logs.
    End {
        pod: String,
        uid: PodUid,
    },
    /// The pod's end was read: its object may go.
    LetGo {
        pod: String,
        uid: PodUid,
    },
    DeleteServices,
}

pub(crate) type Step = crate::jobs::workload::Step<Action>;
