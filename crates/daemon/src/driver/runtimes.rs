//! The runtimes this daemon uses, by kind.
//!
//! The process runtime is called on the driver's thread: it reads and writes small kernel files.
//! The container engine may take seconds for any request, so its runtime lives on a thread of its
//! own ([`DockerLink`]).

use super::docker_link::DockerLink;
use crate::config::DaemonConfig;
use crate::error::DaemonError;
use crate::launch::program;
use crate::paths::Paths;
use gainshare_core::model::Time;
use gainshare_limits::cgroup::CpuList;
use gainshare_limits::process::{self, ProcessRuntime};
use gainshare_limits::{Capacity, LimitMode, Runtime, RuntimeError, RuntimeKind};
use std::path::Path;

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

    pub(super) fn docker(&mut self) -> Result<&mut DockerLink, RuntimeError> {
        let missing = "no Docker engine is connected: start the engine, and the daemon with --runtime process,docker";
        self.docker.as_mut().ok_or_else(|| RuntimeError::Unsupported(missing.into()))
    }

    pub(super) fn kinds(&self) -> Vec<RuntimeKind> {
        let process = self.process.iter().map(|r| r.kind());
        process.chain(self.docker.iter().map(|_| RuntimeKind::Docker)).collect()
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
    process.keeper = Some(vec![program(config).into(), "keep".into()]);
    process.max_tasks = crate::fail::max_tasks().or(process.max_tasks);
    process
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
