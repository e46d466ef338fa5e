//! Jobs: they are started where the cluster gains, and moved there if they began elsewhere.
//!
//! **Problem.** A move is a stop, a proof of the stop, and a start. Programs die and messages get
//! lost between any two of these. Yet two attempts of a job must never run at the same time, and no
//! job may be lost.
//!
//! **How.** Decisions and actions are separate. The decision (`crate::placement`) reads
//! [`JobFacts`](crate::state::orders::JobFacts) and puts an order into
//! [`Orders`](crate::state::orders::Orders). The [`controller`] takes the order as a wish, and
//! carries it out if the job can still be moved. One controller with one [`queue`] runs all kinds of
//! workloads; each kind is an adapter ([`workload`]): [`training_job`] makes pods itself,
//! [`batch_job`] moves `batch/v1` Jobs, [`task_job`] starts the tasks of distributed jobs together.
//! What a move has in common for all kinds is in [`moves`]. An adapter reads facts from the caches of
//! `crate::state` (or from the API server, where a copy is not good enough), and its pure state machine
//! answers with actions.
//!
//! **One object cannot hurt others.** A reconcile that panics is caught ([`crate::isolate`]), reported
//! on its own object, and retried with a growing pause. All other jobs go on.
//!
//! **Terms.** *Attempt*: one start of the job, with its pods. *Epoch*: its number. *Proof of stop*:
//! what shows that a pod's containers have ended and never run again.

mod batch_job;
mod controller;
#[cfg(test)]
mod crash_stories;
mod deadline;
#[cfg(test)]
mod hostile_task_tests;
#[cfg(test)]
mod hostile_tests;
mod moves;
mod pods;
pub(crate) mod progress;
mod queue;
pub(crate) mod task_job;
mod training_job;
#[cfg(test)]
mod upgrade_tests;
mod waiting;
mod workload;

pub(crate) use batch_job::give_back;
pub(crate) use controller::start;
pub use task_job::QueueWeights;
