//! Why a job must stay where it is. Statuses and messages contain the reason as a sentence.

use crate::names::{NODE_ANNOTATION, NodeName};
use crate::run_policy::JobPolicy;

/// Why a job is not moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImmovableReason {
    /// The job names no checkpoint.
    #[error("spec.checkpoint is missing, so it could not resume elsewhere")]
    NoCheckpoint,
    /// A Job of the cluster's own kind whose template or journal does not allow a move.
    #[error("{0}")]
    Unsuitable(String),
    /// A move came to nothing, and the status says why.
    #[error("{0}")]
    FailedMove(String),
    /// The policy places no pods.
    #[error("its policy is {}", .0.name())]
    Policy(JobPolicy),
    /// A person has named its node.
    #[error("the annotation {NODE_ANNOTATION} keeps it on {0}")]
    KeptOn(NodeName),
}
