//! Jobs as plain processes: each in a process group, a session and a cgroup of its own.
//!
//! **Problem.** Make the kernel give each job what the plan says, for jobs that are ordinary programs started by
//! somebody's shell; survive our own restart; never touch a process that is not the job's; say clearly what this
//! machine cannot do.
//!
//! **Approach.** [`ProcessRuntime::prepare`] makes the job's group before the job exists and tells the `cgroup.procs`
//! files into which the child writes itself between fork and exec ([`start::enter`] does it), so that not one
//! instruction of the job runs outside. Limits go through [`crate::cgroup`]. On a machine where we may not make
//! cgroups the runtime falls back to priorities and a stop/continue duty cycle (module `fallback`);
//! [`ProcessRuntime::notes`] say so. After a restart of the daemon [`ProcessRuntime::adopt`] takes over what
//! [`JobGroup`] and [`Identity`] recorded.
//!
//! **Terms.** A job's *leader* is the process that was started; its pid is also the number of its process group and
//! session.
//!
//! **Properties.** A group that is removed or recreated, and a pid that is reused, count as gone and are never
//! touched. The same plan twice writes nothing. A memory limit is never below the working set. `release` leaves the
//! kernel's defaults behind.

pub(crate) mod cores;
mod fallback;
mod grouped;
mod identity;
pub mod start;
mod traffic;

pub use fallback::keeper;
pub use identity::Identity;

use crate::cgroup::{GroupDir, Hierarchy, Version};
use crate::{Capacity, Counters, Handle, InForce, Mode, Runtime, RuntimeError, RuntimeKind};
use fallback::Fallback;
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::JobId;
use grouped::Grouped;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// How a [`ProcessRuntime`] should work.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name of the base group: one for each daemon, so that two of them never share a group.
    pub base: String,
    pub mode: Mode,
    /// How many processes and threads one job may have; contains a fork bomb. `None`: as many as the machine allows.
    pub most_tasks: Option<u32>,
    /// The command that runs [`keeper::run`] and nothing else. Only the fallback uses it; without it the fallback
    /// cannot share the CPU.
    pub keeper: Option<Vec<OsString>>,
}

impl Config {
    pub fn new(base: impl Into<String>) -> Config {
        Config { base: base.into(), mode: Mode::default(), most_tasks: Some(default_most_tasks()), keeper: None }
    }
}

/// Generous for any training job (data loaders times thread pools grow with the cores), small enough that the daemon
/// and a shell still work beside a fork bomb.
fn default_most_tasks() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let generous = cores.saturating_mul(256).clamp(4096, 32_768);
    let pid_max = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok().and_then(|t| t.trim().parse::<u32>().ok());
    generous.min(pid_max.map_or(u32::MAX, |most| most / 2))
}

fn page_bytes() -> u64 {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096) as u64
}

/// What must be remembered to find a job's group again; goes into the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGroup {
    pub handle: Handle,
    /// `None` on a machine without cgroup rights.
    pub version: Option<Version>,
    pub dirs: Vec<GroupDir>,
    /// The child writes `0` into each of these before exec. Empty without cgroup rights.
    pub procs_files: Vec<PathBuf>,
}

/// Puts a job's limits back to the kernel's defaults without a runtime: for whoever must clean up after a daemon that
/// is dead. Harmless if the job is gone.
pub fn restore(group: &JobGroup) -> Result<(), RuntimeError> {
    grouped::restore(group)
}

/// The process runtime. See the module documentation.
#[derive(Debug)]
pub struct ProcessRuntime {
    jobs: Jobs,
    /// Of the newest plan.
    generation: u64,
}

#[derive(Debug)]
enum Jobs {
    Grouped(Box<Grouped>),
    Fallback(Box<Fallback>),
}

/// The same call on whichever of the two is there.
macro_rules! either {
    ($runtime:expr, $jobs:ident => $call:expr) => {
        match $runtime {
            Jobs::Grouped($jobs) => $call,
            Jobs::Fallback($jobs) => $call,
        }
    };
}

impl ProcessRuntime {
    /// On the hierarchy of this machine; without one, on what is left. [`Self::has_cgroups`] and [`Self::notes`] tell
    /// which.
    pub fn detect(config: Config) -> Result<ProcessRuntime, RuntimeError> {
        match Hierarchy::detect().and_then(|hierarchy| Grouped::open(hierarchy, config.clone())) {
            Ok(jobs) => Ok(ProcessRuntime { jobs: Jobs::Grouped(Box::new(jobs)), generation: 0 }),
            Err(error @ (RuntimeError::Unsupported(_) | RuntimeError::Io { .. })) => {
                Ok(ProcessRuntime::without_cgroups(config, &error.to_string()))
            }
            Err(other) => Err(other),
        }
    }

    pub fn on(hierarchy: Hierarchy, config: Config) -> Result<ProcessRuntime, RuntimeError> {
        Ok(ProcessRuntime { jobs: Jobs::Grouped(Box::new(Grouped::open(hierarchy, config)?)), generation: 0 })
    }

    /// By priority, or by stopping and continuing. `why` is told to people.
    pub fn without_cgroups(config: Config, why: &str) -> ProcessRuntime {
        ProcessRuntime { jobs: Jobs::Fallback(Box::new(Fallback::open(config, why))), generation: 0 }
    }

    pub fn has_cgroups(&self) -> bool {
        matches!(self.jobs, Jobs::Grouped(_))
    }

    /// Makes the group of a job about to start. `name` becomes the handle's key and must be new for each start of
    /// each job; asked again after a restart of the daemon, for a job that was about to start, the group is taken as
    /// it is.
    pub fn prepare(&mut self, job: JobId, name: &str) -> Result<JobGroup, RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.prepare(job, name))
    }

    /// The job's leader runs (and is in its group: it joined before exec).
    pub fn started(&mut self, handle: &Handle, leader: Identity) -> Result<(), RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.started(handle, leader))
    }

    /// Takes over a job that was started before this runtime existed. `Gone` if its group is not the recorded one or
    /// nothing of it runs any more.
    pub fn adopt(&mut self, group: &JobGroup, leader: Identity) -> Result<(), RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.adopt(group, leader))
    }

    /// Asks the job to end: SIGTERM to its process group. Returns at once.
    pub fn terminate(&mut self, handle: &Handle) -> Result<(), RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.terminate(handle))
    }

    /// Kills every process of the job, also those that left its process group. `Ok(false)`: some did not go away
    /// within two seconds.
    pub fn kill(&mut self, handle: &Handle) -> Result<bool, RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.kill(handle))
    }

    /// Asks, waits up to `grace`, then kills. Blocks for as long; a driver that must not wait calls
    /// [`Self::terminate`] and later [`Self::kill`].
    pub fn stop(&mut self, handle: &Handle, grace: Duration) -> Result<bool, RuntimeError> {
        self.terminate(handle)?;
        let start = std::time::Instant::now();
        while start.elapsed() < grace {
            if !self.is_alive(handle)? {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.kill(handle)
    }

    /// Removes groups below our base that hold no process and belong to no job we know: leftovers of a crash.
    pub fn sweep(&mut self) {
        if let Jobs::Grouped(jobs) = &mut self.jobs {
            jobs.sweep();
        }
    }

    /// Removes what is empty, the base group last. Groups of jobs that still run stay, with their limits as they are:
    /// release those jobs first.
    pub fn close(&mut self) {
        if let Jobs::Grouped(jobs) = &mut self.jobs {
            jobs.close();
        }
    }

    /// What this runtime cannot do on this machine, in a sentence each.
    pub fn notes(&self) -> &[String] {
        either!(&self.jobs, jobs => jobs.notes())
    }
}

impl Runtime for ProcessRuntime {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Process
    }

    fn capacity(&self) -> Capacity {
        either!(&self.jobs, jobs => jobs.capacity())
    }

    fn apply(&mut self, generation: u64, wanted: &[(Handle, CheckedTarget)]) -> Vec<Result<InForce, RuntimeError>> {
        if generation < self.generation {
            let known = self.generation;
            let refuse = |h: &Handle| RuntimeError::OldGeneration { key: h.key.clone(), given: generation, known };
            return wanted.iter().map(|(handle, _)| Err(refuse(handle))).collect();
        }
        self.generation = generation;
        either!(&mut self.jobs, jobs => jobs.apply(wanted))
    }

    fn read(&mut self, job: &Handle) -> Result<Counters, RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.read(job))
    }

    fn is_alive(&mut self, job: &Handle) -> Result<bool, RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.is_alive(job))
    }

    fn release(&mut self, job: &Handle) -> Result<(), RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.release(job))
    }
}
