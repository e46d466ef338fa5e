//! The labels of containers that Gainshare reads and writes, all in one place.
//!
//! `--label gainshare.enable=true` opts a container in; the other labels carry settings of the job.
//! Containers that Gainshare starts carry [`JOB`] and [`ATTEMPT`] as well, so that a restarted daemon finds
//! them again.

/// `true` opts a container in; `false` keeps it out even where every container is adopted.
pub const ENABLE: &str = "gainshare.enable";
/// The job's name; without it the container's name is used.
pub const NAME: &str = "gainshare.name";
/// The metric to follow, e.g. `loss` or `val_accuracy`.
pub const METRIC: &str = "gainshare.metric";
/// The owner of the job; jobs of one owner share that owner's part.
pub const OWNER: &str = "gainshare.owner";
/// The least share of the machine's CPU the job keeps, 0…1.
pub const FLOOR: &str = "gainshare.floor";
/// The most of the machine's CPU the job may have, 0…1.
pub const MAX: &str = "gainshare.max";
/// The daemon's number of the job, on containers that Gainshare started.
pub const JOB: &str = "gainshare.job";
/// Which start of the job this container is, on containers that Gainshare started.
pub const ATTEMPT: &str = "gainshare.attempt";
