//! Why a job was placed on a node or moved there, as a value.
//!
//! The reason travels as this value from the decision to the job's status and to the kubectl
//! plugin. Its sentence is made in one place ([`PlacementReason::sentence`]), and no program reads
//! a sentence back.

use crate::names::{NODE_ANNOTATION, NodeName};
use gainshare_core::plan::{MoveReason, StartReason};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Why a node was chosen for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, JsonSchema)]
pub enum PlacementReason {
    /// Start: the node has the fewest jobs for its cores.
    FewestJobs,
    /// Start: the job and its neighbours would grow most there.
    MostGrowth,
    /// Start: the node has the fewest jobs for its cores, or none.
    HomeOrEmpty,
    /// Move: the job has converged and its neighbours still grow.
    SlowGrowth,
    /// Move: all jobs have converged and the node has less to do.
    Rebalance,
    /// Move: the node has run empty, and the move ends jobs sooner by far more than it costs.
    Gain,
    /// Move: the job would end later than with equal shares where it is.
    Owed,
    /// Move: the job would miss its deadline where it is, and makes it on the other node.
    Deadline,
    /// A person asked for the node by annotation.
    Requested,
    /// Written by a version that did not record the reason, or by a newer one that knows more
    /// reasons.
    #[default]
    #[serde(other)]
    Unknown,
}

impl From<MoveReason> for PlacementReason {
    fn from(reason: MoveReason) -> PlacementReason {
        match reason {
            MoveReason::SlowGrowth => PlacementReason::SlowGrowth,
            MoveReason::Rebalance => PlacementReason::Rebalance,
            MoveReason::Gain => PlacementReason::Gain,
            MoveReason::Owed => PlacementReason::Owed,
            MoveReason::Deadline => PlacementReason::Deadline,
        }
    }
}

impl From<StartReason> for PlacementReason {
    fn from(reason: StartReason) -> PlacementReason {
        match reason {
            StartReason::FewestJobs => PlacementReason::FewestJobs,
            StartReason::MostGrowth => PlacementReason::MostGrowth,
            StartReason::HomeOrEmpty => PlacementReason::HomeOrEmpty,
            // Only experiments place jobs by the scores of the default scheduler.
            StartReason::BestScore => PlacementReason::Unknown,
        }
    }
}

impl PlacementReason {
    /// The sentence for people about a job and this node.
    pub fn sentence(self, node: &NodeName) -> String {
        match self {
            PlacementReason::FewestJobs => format!("starts on {node}: it has the fewest jobs for its cores"),
            PlacementReason::MostGrowth => format!("starts on {node}: there it and its neighbours would grow most"),
            PlacementReason::HomeOrEmpty => {
                format!("starts on {node}: it has the fewest jobs for its cores, or none")
            }
            PlacementReason::SlowGrowth => {
                format!("has converged beside jobs that still grow, and {node} has the lowest score: moves there")
            }
            PlacementReason::Rebalance => {
                format!("every job has converged and {node} has less to do: moves there")
            }
            PlacementReason::Gain => {
                format!("{node} has run empty, and the move ends jobs sooner by far more than it costs: moves there")
            }
            PlacementReason::Owed => {
                format!("it, or a neighbour of it, would end later than with equal shares: moves home to {node}")
            }
            PlacementReason::Deadline => {
                format!("would miss its deadline where it is, and makes it on {node}: moves there")
            }
            PlacementReason::Requested => {
                format!("the annotation {} asks for {node}", NODE_ANNOTATION)
            }
            PlacementReason::Unknown => format!("goes to {node}"),
        }
    }

    /// How a picture marks a stay that began with this move, as the thesis's Figure 6.22 does: `-M`
    /// moved, `-R` moved to even things out, or home.
    pub fn mark(self) -> &'static str {
        match self {
            PlacementReason::Rebalance | PlacementReason::Owed => "-R",
            _ => "-M",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_of_other_versions_are_read() {
        let read = |text: &str| serde_json::from_str::<PlacementReason>(text).unwrap();
        assert_eq!((read("\"Gain\""), read("\"OfTheFuture\"")), (PlacementReason::Gain, PlacementReason::Unknown));
        assert_eq!(serde_json::to_string(&PlacementReason::Unknown).unwrap(), "\"Unknown\"");
    }

    #[test]
    fn marks_follow_the_value() {
        assert_eq!(PlacementReason::from(MoveReason::Owed).mark(), "-R");
        assert_eq!(PlacementReason::from(MoveReason::Rebalance).mark(), "-R");
        assert_eq!(PlacementReason::from(MoveReason::Gain).mark(), "-M");
        assert_eq!(PlacementReason::from(MoveReason::SlowGrowth).mark(), "-M");
        assert_eq!(PlacementReason::from(MoveReason::Deadline).mark(), "-M");
    }
}
