//! The runtimes this daemon uses, by kind.
//!
//! The process runtime is called on the driver's thread: it reads and writes small kernel files.
//! The container engine may take seconds for any request, so its runtime lives on a thread of its
//! own ([`DockerLink`]).

use super::docker_link::DockerLink;
use super::handle::DriverHandle;
use super::jobs::Job;
use crate::config::DaemonConfig;
use crate::error::DaemonError;
use crate::launch::program;
use crate::paths::Paths;
use crate::record::JobRecord;
use crate::types::JobState;
use gainshare_core::model::{Span, Time};
use gainshare_limits::cgroup::{CpuList, Group};
use gainshare_limits::process::{self, ProcessRuntime};
use gainshare_limits::usage::NodeResources;
use gainshare_limits::{Capacity, Counters, JobHandle, LimitMode, Runtime, RuntimeError, RuntimeKind};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

/// Time between two attempts to kill a control group whose processes survived SIGKILL (an uninterruptible wait in the
/// kernel).
const KILL_PACE: Span = Span::from_secs(5);

/// Without control groups each attempt sends the signals once and waits for nothing, so the attempts follow sooner.
const SIGNAL_PACE: Span = Span::from_secs(1);

/// After this many attempts without control groups, processes that are still there have survived SIGKILL.
const SIGNAL_TRIES: u32 = 3;

pub(crate) struct Runtimes {
    pub(super) process: Option<ProcessRuntime>,
    pub(super) docker: Option<DockerLink>,
    /// A connection to the engine is being made.
    pub(super) is_connecting: bool,
    /// When the engine is tried next.
    pub(super) next_connect: Time,
    /// What could not be opened or cannot be done, by runtime.
    pub(super) notes: Vec<(RuntimeKind, String)>,
}

impl Runtimes {
    pub(crate) fn open(config: &DaemonConfig, paths: &Paths) -> Result<Runtimes, DaemonError> {
        let mut runtimes =
            Runtimes { process: None, docker: None, is_connecting: false, next_connect: Time::ZERO, notes: Vec::new() };
        runtimes.open_process(config, paths)?;
        Ok(runtimes)
    }

    /// Opens the process runtime, again after a lapse.
    pub(super) fn open_process(&mut self, config: &DaemonConfig, paths: &Paths) -> Result<(), DaemonError> {
        if config.runtime.contains(&RuntimeKind::Process) {
            let runtime = ProcessRuntime::detect(process_config(config, paths))
                .map_err(|e| DaemonError::Runtime(e.to_string()))?;
            self.notes.retain(|(kind, _)| *kind != RuntimeKind::Process);
            self.notes.extend(runtime.notes().iter().map(|n| (RuntimeKind::Process, n.clone())));
            self.process = Some(runtime);
        }
        Ok(())
    }

    pub(super) fn process(&mut self) -> Result<&mut ProcessRuntime, RuntimeError> {
        let missing = "the daemon runs without the process runtime: start it with --runtime process,docker";
        self.process.as_mut().ok_or_else(|| RuntimeError::Unsupported(missing.into()))
    }

    /// How shares of processes become limits.
    pub(super) fn mode(&self, config: &DaemonConfig) -> LimitMode {
        let process = self.process.as_ref().map(ProcessRuntime::mode);
        process.unwrap_or(config.mode)
    }

    /// Whether process jobs are stopped and continued to share the CPU.
    pub(super) fn stops_jobs(&self) -> bool {
        self.process.as_ref().is_some_and(ProcessRuntime::stops_jobs)
    }

    pub(super) fn docker(&mut self) -> Result<&mut DockerLink, RuntimeError> {
        let missing = "no Docker engine is connected: start the engine, and the daemon with --runtime process,docker";
        self.docker.as_mut().ok_or_else(|| RuntimeError::Unsupported(missing.into()))
    }

    pub(super) fn kinds(&self) -> Vec<RuntimeKind> {
        let process = self.process.iter().map(|r| r.kind());
        process.chain(self.docker.iter().map(|_| RuntimeKind::Docker)).collect()
    }

    /// Whether a job that needs the engine should wait for it rather than fail.
    pub(super) fn is_connecting_docker(&self) -> bool {
        self.docker.is_none() && self.is_connecting
    }

    /// The cores that jobs may use.
    pub(super) fn cores(&self, config: &DaemonConfig) -> f64 {
        let all = self.capacity().cores;
        config.cores.map_or(all, |n| all.min(n as f64))
    }

    /// All that jobs may use.
    pub(super) fn whole(&self, config: &DaemonConfig) -> NodeResources {
        let capacity = Capacity { cores: self.cores(config), ..self.capacity() };
        NodeResources { capacity, block_bytes_s: config.block_bandwidth, net_bytes_s: config.net_bandwidth }
    }

    /// Reads what a process job used so far. Containers are read together by their runtime's thread.
    pub(super) fn read_usage(&mut self, config: &DaemonConfig, job: &mut Job, now: Time) {
        self.read_with(config, job, now, ProcessRuntime::read);
    }

    /// The same for a caller that needs the CPU time only: the other counters may be some seconds old.
    pub(super) fn read_cpu(&mut self, config: &DaemonConfig, job: &mut Job, now: Time) {
        self.read_with(config, job, now, ProcessRuntime::read_cpu);
    }

    fn read_with(
        &mut self,
        config: &DaemonConfig,
        job: &mut Job,
        now: Time,
        read: fn(&mut ProcessRuntime, &JobHandle) -> Result<Counters, RuntimeError>,
    ) {
        if job.record.state != JobState::Running || job.record.spec.runtime != RuntimeKind::Process {
            return;
        }
        let whole = self.whole(config);
        let (Some(group), Some(process)) = (&job.record.group, &mut self.process) else { return };
        if let Ok(counters) = read(process, &group.handle) {
            job.progress.meter.record(now, counters, &whole);
            job.usage_read = now;
        }
    }

    /// Asks a job to end: SIGTERM, or the container engine's stop.
    pub(super) fn signal_stop(&mut self, job: &Job, now: Time) {
        let Some(handle) = job.handle() else { return };
        let result = match job.record.spec.runtime {
            RuntimeKind::Process if job.record.leader.is_some() => match &mut self.process {
                Some(process) => process.terminate(&handle),
                None => Ok(()),
            },
            RuntimeKind::Process => Ok(()),
            RuntimeKind::Docker => {
                // After a first kill, `kill_at` of the job is that of the next one.
                let kill_at = job.record.kill_at.or(job.kill_at);
                let grace_s = kill_at.map_or(0.0, |at| at.since(now).as_secs_f64());
                let grace = Duration::from_secs_f64(grace_s);
                self.docker().map(|docker| docker.stop(job.record.id, handle.key, grace))
            }
        };
        if let Err(e) = result {
            tracing::warn!(job = %job.record.id, "{e}");
        }
    }

    /// Kills every process of a job without waiting for them to go. A container is killed by its engine, to which the
    /// stop named the moment. A control group is killed on another thread, which waits. Without control groups the
    /// signals are sent once, and again after a pause until the job has ended.
    pub(super) fn kill(&mut self, job: &mut Job, handle: &DriverHandle, now: Time) {
        let id = job.record.id;
        job.kills += 1;
        let (kills, leader) = (job.kills, job.record.leader);
        let group = job.record.group.clone();
        let has_groups = group.as_ref().is_none_or(|g| g.version.is_some());
        let pace = if has_groups || kills > SIGNAL_TRIES { KILL_PACE } else { SIGNAL_PACE };
        // Tried again, should it fail.
        job.kill_at = Some(now + pace);
        let (Some(group), RuntimeKind::Process) = (group, job.record.spec.runtime) else { return };
        let report = move |result: Result<bool, RuntimeError>| match result {
            Ok(true) | Err(RuntimeError::Gone { .. }) => {}
            Ok(false) => tracing::warn!(job = %id, "some of its processes survive SIGKILL"),
            Err(e) => tracing::warn!(job = %id, "cannot be killed: {e}"),
        };
        if let Some(version) = group.version {
            let kill = move || Group::reopen(&group.handle.key, version, &group.dirs).and_then(|g| g.kill());
            return handle.off_thread("kill", kill, move |_, result| report(result));
        }
        // The runtime finds descendants that left the process group, as long as their parents live. A signal to the
        // process group also reaches processes that are forked meanwhile.
        if let Some(process) = &mut self.process {
            // Processes that were there at the first attempts had no time to go.
            let result = process.kill_once(&group.handle);
            report(result.map(|is_empty| is_empty || kills <= SIGNAL_TRIES));
        }
        if let Some(leader) = leader.filter(|leader| leader.pid > 1 && leader.is_alive()) {
            let _ = killpg(Pid::from_raw(leader.pid), Signal::SIGKILL);
        }
    }

    /// Takes charge of a job's processes again.
    pub(super) fn adopt_process(&mut self, record: &JobRecord) {
        let (Some(group), Some(leader)) = (record.group.clone(), record.leader) else { return };
        let Some(process) = &mut self.process else { return };
        match process.adopt(&group, leader) {
            Ok(()) | Err(RuntimeError::Gone { .. }) => {}
            Err(e) => tracing::warn!(job = %record.id, "cannot be taken over: {e}"),
        }
    }

    pub(super) fn capacity(&self) -> Capacity {
        let process = self.process.iter().map(|r| r.capacity());
        let all = process.chain(self.docker.iter().map(|r| r.capacity()));
        all.reduce(|a, b| Capacity { cores: a.cores.max(b.cores), memory_bytes: a.memory_bytes.max(b.memory_bytes) })
            .unwrap_or(Capacity { cores: 1.0, memory_bytes: 1 })
    }
}

/// One base group for each state directory: two daemons never share one.
pub(crate) fn process_config(config: &DaemonConfig, paths: &Paths) -> process::Config {
    let mut process = process::Config::new(base_name(&paths.state));
    process.mode = config.mode;
    process.cpus = config.cores.and_then(first_cpus);
    process.keeper = Some(keeper_command(config));
    process.max_tasks = crate::fail::max_tasks().or(process.max_tasks);
    process
}

/// The program that stops and continues jobs.
pub(super) fn keeper_command(config: &DaemonConfig) -> Vec<OsString> {
    vec![program(config).into(), "keep".into()]
}

/// The cores that jobs may use, if not all.
pub(super) fn allowed_cpus(config: &DaemonConfig) -> Option<String> {
    let cpus = first_cpus(config.cores?)?;
    Some(cpus.iter().map(|cpu| cpu.to_string()).collect::<Vec<_>>().join(","))
}

/// The first `count` CPUs that this process may use; `None` if those are all.
pub(super) fn first_cpus(count: usize) -> Option<CpuList> {
    let set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).ok()?;
    let all = (0..nix::sched::CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false));
    let all: Vec<u32> = all.map(|cpu| cpu as u32).collect();
    (count < all.len()).then(|| all.into_iter().take(count).collect())
}

/// What distinguishes the groups and containers of one daemon from those of others: a hash of its state directory.
pub(super) fn base_name(state_dir: &Path) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in state_dir.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("gainshare-{:08x}", (hash ^ (hash >> 32)) as u32)
}

pub(super) fn kind_name(kind: RuntimeKind) -> &'static str {
    match kind {
        RuntimeKind::Process => "process",
        RuntimeKind::Docker => "docker",
    }
}
