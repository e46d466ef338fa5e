//! What a job of tasks waits for.

use crate::state::workload::WorkloadKey;
use gainshare_kube_api::names::{JobUid, NodeName};
use gainshare_kube_api::node_rules::Devices;
use gainshare_kube_api::quantity::total;
use gainshare_kube_api::tasks::{Role, TaskId};
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A gang that has waited for this time is not overtaken any more.
const STARVES_AFTER: SignedDuration = SignedDuration::from_secs(300);

/// What a task requests: thousandths of a core, and bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TaskNeed {
    pub(crate) task: TaskId,
    pub(crate) requests: (u64, u64),
    /// GPUs and their like, if it requests any.
    pub(crate) devices: Option<Arc<Devices>>,
    /// Bytes per second that it sends and receives, as far as that was measured.
    pub(crate) traffic: Option<u64>,
}

/// The nodes that the tasks of each role may use, of a job whose templates demand something of their nodes.
pub(crate) type RoleNodes = BTreeMap<Role, Arc<BTreeSet<NodeName>>>;

/// What a job waits for, in the order of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Replacement,
    Gang,
    Growth,
}

/// A job that needs room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RoomRequest {
    pub(crate) key: WorkloadKey,
    pub(crate) uid: JobUid,
    pub(crate) class: Class,
    pub(crate) priority: i32,
    /// The queue that its author has named.
    pub(crate) queue: Option<String>,
    pub(crate) since: Timestamp,
    /// Tasks that start together or not at all.
    pub(crate) needs: Vec<TaskNeed>,
    /// Further tasks, which start as far as they fit.
    pub(crate) optional: Vec<TaskNeed>,
    /// Nodes that did not take a task of the job just now.
    pub(crate) avoid: Vec<NodeName>,
    /// `None`: all open nodes.
    pub(crate) nodes: Option<RoleNodes>,
}

impl RoomRequest {
    /// Whether the gang has waited so long that no other one overtakes it.
    pub(super) fn starves(&self, now: Timestamp) -> bool {
        self.class == Class::Gang && now.duration_since(self.since) >= STARVES_AFTER
    }

    /// What the tasks that it needs request together, in thousandths of a core.
    pub(super) fn milli(&self) -> u64 {
        total(self.needs.iter().map(|need| need.requests.0))
    }
}
