//! Traces of real clusters: reading, writing, replaying and making up.
//!
//! **Formats.** The header tells which: Microsoft's Philly as reduced by AdaptDL
//! (`timestamp,duration,num_gpus,gpu_time,cluster`), Microsoft's ITP
//! (`job_id,submission_time,duration,num_gpu`), and our own (`job,submitted_s,duration_s,devices,owner`;
//! see `docs/traces.md`). Files that end in `.gz` are unpacked on the way.
//!
//! A trace job holds whole devices from start to end; it has no loss curve. Replaying therefore asks the
//! queue of [`gang`], not the sharing decisions.

pub mod gang;
mod generate;
mod read;
mod replay;

pub use generate::Shape;
pub use read::{TraceError, read, write};
pub use replay::{Replay, replay};

/// One job of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceJob {
    pub name: String,
    /// Seconds since the first job of the trace.
    pub submitted_s: f64,
    pub duration_s: f64,
    pub devices: u32,
    pub owner: String,
}

/// Device-seconds of all jobs over the time from the first submission to the last: how many devices the
/// trace keeps busy.
pub fn offered_load(jobs: &[TraceJob]) -> f64 {
    let work: f64 = jobs.iter().map(|j| j.duration_s * f64::from(j.devices)).sum();
    let span = jobs.last().map_or(0.0, |l| l.submitted_s) - jobs.first().map_or(0.0, |f| f.submitted_s);
    work / span.max(1.0)
}
