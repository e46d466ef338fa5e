//! Names of workloads: the objects whose pods the operator starts or moves.

use gainshare_kube_api::names::NamespacedName;
use std::fmt;

/// The kinds of objects that run as jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WorkloadKind {
    /// Our own kind: the operator makes its pods.
    TrainingJob,
    /// A TrainingJob of several tasks.
    TaskJob,
    /// Kubeflow's kind, which is a job of several tasks, too.
    TfJob,
    /// A `batch/v1` Job that the operator may move.
    Job,
}

impl WorkloadKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            WorkloadKind::TrainingJob | WorkloadKind::TaskJob => "TrainingJob",
            WorkloadKind::TfJob => "TFJob",
            WorkloadKind::Job => "Job",
        }
    }
}

/// One workload of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WorkloadKey {
    pub(crate) kind: WorkloadKind,
    pub(crate) name: NamespacedName,
}

impl WorkloadKey {
    pub(crate) fn new(kind: WorkloadKind, name: NamespacedName) -> WorkloadKey {
        WorkloadKey { kind, name }
    }
}

impl fmt::Display for WorkloadKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.name)
    }
}
