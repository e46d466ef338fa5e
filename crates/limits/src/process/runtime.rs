//! The process runtime: one set of calls, carried out with cgroups or, where there are none, by the fallback.

use super::cgroup_jobs::{CgroupJobs, Enforce};
use super::config::{Config, JobGroup};
#[cfg(feature = "fallback")]
use super::fallback::FallbackJobs;
use super::identity::Identity;
use crate::cgroup::Hierarchy;
use crate::cgroup::limits::{enforce, enforce_changes};
use crate::{AppliedLimits, Capacity, Counters, JobHandle, LimitMode, Runtime, RuntimeError, RuntimeKind};
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::JobId;

/// The process runtime. See the module documentation.
#[derive(Debug)]
pub struct ProcessRuntime {
    jobs: Backend,
    /// Of the newest plan.
    generation: u64,
}

#[derive(Debug)]
enum Backend {
    Cgroups(Box<CgroupJobs>),
    #[cfg(feature = "fallback")]
    Fallback(Box<FallbackJobs>),
}

/// The same call on either backend.
macro_rules! either {
    ($backend:expr, $jobs:ident => $call:expr) => {
        match $backend {
            Backend::Cgroups($jobs) => $call,
            #[cfg(feature = "fallback")]
            Backend::Fallback($jobs) => $call,
        }
    };
}

impl ProcessRuntime {
    /// On the hierarchy of this machine. Where groups cannot be made, by the fallback if it is built in;
    /// [`Self::notes`] name it.
    pub fn detect(config: Config) -> Result<ProcessRuntime, RuntimeError> {
        let with_cgroups = Hierarchy::detect().and_then(|hierarchy| ProcessRuntime::on(hierarchy, config.clone()));
        #[cfg(feature = "fallback")]
        if let Err(error @ (RuntimeError::Unsupported(_) | RuntimeError::Io { .. })) = &with_cgroups {
            let jobs = FallbackJobs::open(config, &error.to_string());
            return Ok(ProcessRuntime { jobs: Backend::Fallback(Box::new(jobs)), generation: 0 });
        }
        with_cgroups
    }

    pub fn on(hierarchy: Hierarchy, config: Config) -> Result<ProcessRuntime, RuntimeError> {
        Ok(ProcessRuntime { jobs: Backend::Cgroups(Box::new(CgroupJobs::open(hierarchy, config)?)), generation: 0 })
    }

    /// Makes the group of a job about to start. `name` becomes the handle's key and must be new for each
    /// start of each job. For a job that was about to start when the daemon restarted, the existing group is
    /// taken as it is.
    pub fn prepare(&mut self, job: JobId, name: &str) -> Result<JobGroup, RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.prepare(job, name))
    }

    /// The job's leader runs (and is in its group: it joined before exec).
    pub fn started(&mut self, handle: &JobHandle, leader: Identity) -> Result<(), RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.started(handle, leader))
    }

    /// Takes over a job that was started before this runtime existed. `Gone` if its group is not the recorded
    /// one or none of its processes runs any more.
    pub fn adopt(&mut self, group: &JobGroup, leader: Identity) -> Result<(), RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.adopt(group, leader))
    }

    /// Sends SIGTERM to the job's process group. Returns at once.
    pub fn terminate(&mut self, handle: &JobHandle) -> Result<(), RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.terminate(handle))
    }

    /// Sends SIGKILL to every process the job has now, also to those that left its process group, and returns at
    /// once. `Ok(true)`: none was left. Call it again until then: processes may fork while they are killed.
    pub fn kill_once(&mut self, handle: &JobHandle) -> Result<bool, RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.kill_once(handle))
    }

    /// Removes groups below the base that hold no process and belong to no known job: leftovers of a crash.
    pub fn sweep(&mut self) {
        match &mut self.jobs {
            Backend::Cgroups(jobs) => jobs.sweep(),
            #[cfg(feature = "fallback")]
            Backend::Fallback(_) => {}
        }
    }

    /// Removes empty groups, the base group last. Groups of jobs that still run stay, with their limits as
    /// they are: release those jobs first.
    pub fn close(&mut self) {
        match &mut self.jobs {
            Backend::Cgroups(jobs) => jobs.close(),
            #[cfg(feature = "fallback")]
            Backend::Fallback(_) => {}
        }
    }

    /// As [`Runtime::read`], for a caller that needs the CPU time only: the other counters may be some seconds old.
    pub fn read_cpu(&mut self, job: &JobHandle) -> Result<Counters, RuntimeError> {
        match &mut self.jobs {
            Backend::Cgroups(jobs) => jobs.read_cpu(job),
            #[cfg(feature = "fallback")]
            Backend::Fallback(jobs) => jobs.read(job),
        }
    }

    /// As [`Runtime::apply`], but values that were in force when [`Runtime::apply`] was last called are not read again.
    /// Another program that writes them is noticed by the next [`Runtime::apply`] only.
    pub fn apply_changes(
        &mut self,
        generation: u64,
        wanted: &[(JobHandle, CheckedTarget)],
    ) -> Vec<Result<AppliedLimits, RuntimeError>> {
        self.apply_with(generation, wanted, enforce_changes)
    }

    fn apply_with(
        &mut self,
        generation: u64,
        wanted: &[(JobHandle, CheckedTarget)],
        enforce: Enforce,
    ) -> Vec<Result<AppliedLimits, RuntimeError>> {
        if generation < self.generation {
            let known = self.generation;
            let refuse = |h: &JobHandle| RuntimeError::OldGeneration { key: h.key.clone(), given: generation, known };
            return wanted.iter().map(|(handle, _)| Err(refuse(handle))).collect();
        }
        self.generation = generation;
        match &mut self.jobs {
            Backend::Cgroups(jobs) => jobs.apply(wanted, enforce),
            #[cfg(feature = "fallback")]
            Backend::Fallback(jobs) => jobs.apply(wanted),
        }
    }

    /// How shares become limits here: the chosen mode, or the one that fits the machine.
    pub fn mode(&self) -> LimitMode {
        either!(&self.jobs, jobs => jobs.mode())
    }

    /// Whether jobs are stopped and continued to share the CPU. Then the daemon must not do the same to them for
    /// another purpose.
    pub fn stops_jobs(&self) -> bool {
        match &self.jobs {
            Backend::Cgroups(_) => false,
            #[cfg(feature = "fallback")]
            Backend::Fallback(jobs) => jobs.stops_jobs(),
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

    fn apply(
        &mut self,
        generation: u64,
        wanted: &[(JobHandle, CheckedTarget)],
    ) -> Vec<Result<AppliedLimits, RuntimeError>> {
        self.apply_with(generation, wanted, enforce)
    }

    fn read(&mut self, job: &JobHandle) -> Result<Counters, RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.read(job))
    }

    fn is_alive(&mut self, job: &JobHandle) -> Result<bool, RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.is_alive(job))
    }

    fn release(&mut self, job: &JobHandle) -> Result<(), RuntimeError> {
        either!(&mut self.jobs, jobs => jobs.release(job))
    }
}
