//! Adapters to what runs the jobs, and to what the jobs report.
//!
//! A [`Runtime`] carries out the targets of a plan on real things (cgroups of processes, Docker containers), reads back what
//! took effect and what was used, and puts everything back when it lets go. It decides nothing. All calls block and are meant for the
//! driver's own thread; each finishes in milliseconds. The same conformance suite runs against every adapter.
//!
//! **Terms.** A [`Handle`] names one job to its runtime. *Original* values are those found before the first change; `release` puts
//! them back. *Generation*: plans are numbered; an older one is refused, the same one again is harmless.

pub mod cgroup;
#[cfg(feature = "docker")]
pub mod docker;
pub mod process;
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

/// How a share becomes a kernel limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Relative weights: what one job leaves, the others use. The default.
    #[default]
    Weight,
    /// Hard caps, as `docker update --cpus` sets them.
    Quota,
    /// Whole cores by largest remainder, weights for the rest.
    Cores,
}

/// One job as its runtime knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    pub job: JobId,
    /// A cgroup's name (process runtime) or a container's full id (Docker): never reused for another job.
    pub key: String,
}

/// What a job used since it started; every field only grows, except `memory_bytes`, which is the working set now.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Counters {
    pub cpu_ns: u64,
    pub memory_bytes: u64,
    /// Read and written on block devices; `None` where the kernel does not tell.
    pub block_bytes: Option<u64>,
    /// Received and sent; `None` where it cannot be told apart from other jobs'.
    pub net_bytes: Option<u64>,
    /// Stall times (PSI), where the kernel has them.
    pub pressure: Option<Pressure>,
}

/// Microseconds in which at least one task of the job waited for the resource.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Pressure {
    pub cpu_us: u64,
    pub memory_us: u64,
    pub io_us: u64,
}

/// What the machine has, as this runtime may use it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    pub cores: f64,
    pub memory_bytes: u64,
}

/// What took effect for one job, as read back from the kernel or the engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InForce {
    /// In words people know from the kernel, e.g. `cpu.weight=42`, `cpu.max=50000 100000`; for `explain` and tests.
    pub settings: Vec<(String, String)>,
    /// What this runtime could not limit and why, in one sentence each.
    pub notes: Vec<String>,
}

/// Carries out targets. See the module documentation.
pub trait Runtime: Send {
    fn kind(&self) -> RuntimeKind;

    fn capacity(&self) -> Capacity;

    /// Applies the targets of all jobs of this runtime at once (whole cores can only be dealt out together). One result for each
    /// entry, in the same order. Values that are in force already are not written again.
    ///
    /// A target comes from a checked plan, and only from there:
    /// ```compile_fail
    /// # use gainshare_limits::{Handle, Runtime};
    /// fn unchecked(runtime: &mut dyn Runtime, job: Handle) {
    ///     runtime.apply(1, &[(job, gainshare_core::plan::Target::FREE)]);
    /// }
    /// ```
    /// ```
    /// # use gainshare_core::check::CheckedPlan;
    /// # use gainshare_limits::{Handle, Runtime};
    /// fn checked(runtime: &mut dyn Runtime, job: Handle, plan: &CheckedPlan) {
    ///     if let Some(target) = plan.target(job.job) {
    ///         runtime.apply(plan.generation, &[(job, target)]);
    ///     }
    /// }
    /// ```
    fn apply(&mut self, generation: u64, wanted: &[(Handle, CheckedTarget)]) -> Vec<Result<InForce, RuntimeError>>;

    /// What the job used so far.
    fn read(&mut self, job: &Handle) -> Result<Counters, RuntimeError>;

    /// Whether the job still runs. `Gone` is final: the handle never comes back to life.
    fn is_alive(&mut self, job: &Handle) -> Result<bool, RuntimeError>;

    /// Puts the original values back and forgets the job. Harmless for a job that is gone.
    fn release(&mut self, job: &Handle) -> Result<(), RuntimeError>;
}

/// What can go wrong between us and the kernel or the engine. Each says what it is about and what to do.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("{key} is gone: its cgroup or container no longer exists")]
    Gone { key: String },
    #[error("plan {given} is older than plan {known}, which is in force for {key}: refused")]
    OldGeneration { key: String, given: u64, known: u64 },
    #[error("cannot {action} {path}: {source}{hint}")]
    Io { action: &'static str, path: String, source: std::io::Error, hint: &'static str },
    #[error("{key}: {what} was set to {wanted} but reads {found}: something else writes it too; backing off")]
    Contested { key: String, what: String, wanted: String, found: String },
    #[error("Docker: {what}. {remedy}")]
    Docker { what: String, remedy: &'static str },
    #[error("{0}")]
    Unsupported(String),
}
