//! What the leader knows: the cluster's objects, the node agents' reports, and the watches that keep both current.

pub(crate) mod agents;
pub(crate) mod api_error;
pub(crate) mod clock;
pub(crate) mod events;
pub(crate) mod finish;
mod growth;
pub(crate) mod invalid_objects;
mod job_dates;
pub(crate) mod jobs;
pub(crate) mod lead;
pub(crate) mod lease;
pub(crate) mod metrics;
pub(crate) mod nodes;
pub(crate) mod orders;
mod removed;
mod request_totals;
mod run_history;
pub(crate) mod snapshot;
pub(crate) mod task_job;
mod traffic_history;
pub(crate) mod watch;
pub(crate) mod workload;
pub(crate) mod world;
