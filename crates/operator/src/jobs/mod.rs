//! Training jobs: pods that are started where the cluster gains, and moved there if they began
//! elsewhere.
//!
//! **Problem.** A move is a stop, a proof of the stop, and a start. Programs die and messages get
//! lost between any two of these. Yet two attempts of a job must never run at the same time, and no
//! job may be lost.
//!
//! **How.** Decisions and actions are separate. The decision (`crate::placement`) reads
//! [`JobFacts`] and puts an [`Order`] into [`Orders`]. The controller of the job takes the order as
//! a wish, and carries it out if the job can still be moved. [`controller`] runs TrainingJobs,
//! [`adopt`] moves `batch/v1` Jobs. Both follow the same steps: read ([`store`], [`snapshot`]),
//! validate and build ([`pod`]), decide ([`machine`], pure), apply ([`apply`]), publish
//! ([`status`]).
//!
//! **One object cannot hurt others.** A reconcile that panics is caught ([`crate::isolate`]), reported on
//! its own object, and retried with a growing pause. All other jobs go on.
//!
//! **Terms.** *Attempt*: one pod of the job. *Epoch*: its number. *Proof of stop*: what shows that
//! a pod's containers have ended and never run again.

mod action;
mod adopt;
mod apply;
mod controller;
mod ending;
#[cfg(test)]
mod hostile_tests;
mod machine;
mod moves;
mod off;
mod pod;
mod snapshot;
mod status;
mod store;
mod waiting;

use crate::state::orders::{JobFacts, JobState, Order, OrderKind, Orders};
pub(crate) use adopt::give_back;
pub use apply::{FAIL_POINT_EXIT, FailPoint};
pub(crate) use controller::start;
use gainshare_kube_api::names::NODE_ANNOTATION;

/// An error if the node annotation of a job keeps it where it is.
fn check_not_kept(node: Option<&str>) -> Result<(), String> {
    node.map_or(Ok(()), |node| Err(format!("the annotation {NODE_ANNOTATION} keeps it on {node}")))
}
