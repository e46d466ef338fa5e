//! Limits on running jobs: what a plan grants becomes what the kernel enforces.
//!
//! A [`Runtime`] writes the targets of a plan to real jobs (cgroups of processes, Docker containers), reads
//! back the values that took effect, reads what each job used, and restores the original values when a job is
//! released. A runtime decides nothing. All calls block and are meant for the driver's own thread; each
//! returns within milliseconds unless its documentation names a longer wait. One conformance suite
//! (`tests/suite`) runs against every runtime.
//!
//! # Map
//!
//! | module | content |
//! |---|---|
//! | [`cgroup`] | the kernel's control groups, v1 and v2: find, create, write, read back, count, kill, remove |
//! | [`cgroup::limits`] | shares as values of cgroup files. **A new limit of the kernel goes here** |
//! | [`process`] | jobs that are processes: one group, session and process group each; the environment they start with |
//! | `process::fallback` | sharing without cgroup rights (feature `fallback`) |
//! | `process::traffic` | network bytes of each job (feature `traffic`) |
//! | `docker` | jobs that are Docker containers (feature `docker`) |
//! | `cores`, `lending`, `cpus` | whole cores dealt out by share; cores lent while unused; lists of CPUs |
//! | [`net_dev`] | the counters of network interfaces that `/proc/PID/net/dev` shows |
//! | [`usage`] | a job's counters as node-seconds |
//! | [`gpu`] | shares of a GPU: what jobs use of it, the decision, what their pages must contain |
//! | [`machine`] | CPUs, memory, idle time and monotonic clock of this machine |
//! | `nvml` | memory and time of processes on NVIDIA GPUs (feature `gpu`) |
//! | `system` | system calls between fork and exec; all other `unsafe` code of the crate |
//! | [`fail`] | points at which a test of another crate ends the process |
//!
//! **To add a limit of the kernel:** a field in [`cgroup::limits::GroupLimits`], its files and values in
//! [`cgroup::limits::settings`] for v1 and v2, the translation from a target in `process::cgroup_jobs`, and
//! for containers a variant of `docker::EngineLimit`. Writing, reading back, restoring and the detection of
//! foreign writes then work without further code. **To add a runtime:** implement [`Runtime`] and run the
//! conformance suite on it.
//!
//! # Terms
//!
//! A [`JobHandle`] names one job to its runtime. *Original* values are those found before the first change;
//! `release` restores them. *Generation*: plans are numbered; an older plan is refused, and the same plan
//! again changes nothing. A *foreign write* is a change of a limit by another program.
//!
//! The files of the kernel are read below a root directory that the caller names: `/` in production, a
//! temporary directory in unit tests.

pub mod cgroup;
mod cores;
mod cpus;
#[cfg(feature = "docker")]
pub mod docker;
pub mod fail;
pub mod gpu;
mod lending;
pub mod machine;
pub mod net_dev;
#[cfg(feature = "gpu")]
pub mod nvml;
pub mod process;
mod system;
pub mod usage;

use gainshare_core::check::CheckedTarget;
use gainshare_core::model::JobId;
use serde::{Deserialize, Serialize};

/// Which adapter a job runs under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuntimeKind {
    #[default]
    Process,
    Docker,
}

/// How a share of the CPU becomes a limit of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimitMode {
    /// Relative weights: CPU time that one job leaves unused goes to the others.
    #[default]
    Weight,
    /// Hard caps, as `docker update --cpus` sets them.
    Quota,
    /// Whole cores for each job, as many as its share stands for; unused ones are lent.
    Cores,
}

impl LimitMode {
    /// The name in flags and settings.
    pub fn name(self) -> &'static str {
        match self {
            LimitMode::Weight => "weight",
            LimitMode::Quota => "quota",
            LimitMode::Cores => "cores",
        }
    }
}

/// The name of one job within its runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobHandle {
    pub job: JobId,
    /// A cgroup's name (process runtime) or a container's full id (Docker): never reused for another job.
    pub key: String,
}

/// What a job used since it started. Every field only grows, except `memory_bytes`, which is the working set now.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Counters {
    pub cpu_ns: u64,
    pub memory_bytes: u64,
    /// Read and written on block devices; `None` where the kernel does not count them.
    pub block_bytes: Option<u64>,
    /// Received and sent; `None` where the bytes of one job cannot be distinguished from those of others.
    pub net_bytes: Option<u64>,
}

/// The part of the machine that this runtime may use.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    pub cores: f64,
    pub memory_bytes: u64,
}

/// The limits of one job as read back from the kernel or the engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppliedLimits {
    /// In the kernel's or the engine's own words, e.g. `cpu.weight=42`, `cpu.max=50000 100000`; for `explain`
    /// and tests.
    pub settings: Vec<(String, String)>,
    /// What this runtime could not limit and why, in one sentence each.
    pub notes: Vec<String>,
    /// Threads that run at once without waiting for another job: the job's own and its borrowed cores. `None`
    /// where jobs have no cores of their own.
    #[serde(default)]
    pub team: Option<u32>,
}

/// Writes the targets of a plan to jobs. See the module documentation.
pub trait Runtime: Send {
    fn kind(&self) -> RuntimeKind;

    fn capacity(&self) -> Capacity;

    /// Applies the targets of all jobs of this runtime at once (whole cores can only be dealt out
    /// together). One result for each entry, in the same order. Values that are in force already are not
    /// written again.
    ///
    /// A target comes from a checked plan, and only from there:
    /// ```compile_fail
    /// # use gainshare_limits::{JobHandle, Runtime};
    /// fn unchecked(runtime: &mut dyn Runtime, job: JobHandle) {
    ///     runtime.apply(1, &[(job, gainshare_core::plan::Target::FREE)]);
    /// }
    /// ```
    /// ```
    /// # use gainshare_core::check::CheckedPlan;
    /// # use gainshare_limits::{JobHandle, Runtime};
    /// fn checked(runtime: &mut dyn Runtime, job: JobHandle, plan: &CheckedPlan) {
    ///     if let Some(target) = plan.target(job.job) {
    ///         runtime.apply(plan.generation, &[(job, target)]);
    ///     }
    /// }
    /// ```
    fn apply(
        &mut self,
        generation: u64,
        wanted: &[(JobHandle, CheckedTarget)],
    ) -> Vec<Result<AppliedLimits, RuntimeError>>;

    /// What the job used so far.
    fn read(&mut self, job: &JobHandle) -> Result<Counters, RuntimeError>;

    /// Whether the job still runs. `Gone` is final: no later job has the same handle.
    fn is_alive(&mut self, job: &JobHandle) -> Result<bool, RuntimeError>;

    /// Restores the original values and forgets the job. Does nothing for a job that is gone.
    fn release(&mut self, job: &JobHandle) -> Result<(), RuntimeError>;
}

/// Errors of the kernel and of the engine. Each names its object and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("{key} is gone: its cgroup or container no longer exists")]
    Gone { key: String },
    #[error("plan {given} is older than plan {known}, which is in force for {key}: refused")]
    OldGeneration { key: String, given: u64, known: u64 },
    #[error("cannot {action} {path}: {source}{hint}")]
    Io { action: &'static str, path: String, source: std::io::Error, hint: &'static str },
    #[error("{key}: {setting} was set to {wanted} but reads {found}: something else writes it too; backing off")]
    ForeignWrite { key: String, setting: String, wanted: String, found: String },
    #[error("Docker: {what}. {remedy}")]
    Docker { what: String, remedy: &'static str },
    #[error("{0}")]
    Unsupported(String),
}
