//! The runtimes this daemon uses, by kind.

use super::lease::program;
use crate::config::DaemonConfig;
use crate::error::DaemonError;
use crate::paths::Paths;
use gainshare_limits::docker::{DockerRuntime, Engine, default_socket};
use gainshare_limits::process::{self, ProcessRuntime};
use gainshare_limits::{Capacity, Runtime, RuntimeError, RuntimeKind};
use std::path::Path;

pub(crate) struct Runtimes {
    pub(super) process: Option<ProcessRuntime>,
    pub(super) docker: Option<DockerRuntime>,
    /// What could not be opened or cannot be done, by runtime.
    pub(super) notes: Vec<(RuntimeKind, String)>,
}

impl Runtimes {
    pub(crate) fn open(config: &DaemonConfig, paths: &Paths) -> Result<Runtimes, DaemonError> {
        let mut runtimes = Runtimes { process: None, docker: None, notes: Vec::new() };
        if config.runtime.contains(&RuntimeKind::Process) {
            let runtime = ProcessRuntime::detect(process_config(config, paths))
                .map_err(|e| DaemonError::Runtime(e.to_string()))?;
            runtimes.notes.extend(runtime.notes().iter().map(|n| (RuntimeKind::Process, n.clone())));
            runtimes.process = Some(runtime);
        }
        Ok(runtimes)
    }

    /// An engine may come later than the daemon, so it is opened apart.
    pub(super) fn open_docker(&mut self, config: &DaemonConfig) -> Result<Engine, RuntimeError> {
        let socket = config.docker_socket.clone().unwrap_or_else(default_socket);
        let docker = DockerRuntime::connect(&socket, config.mode)?;
        let engine = docker.engine().clone();
        self.docker = Some(docker);
        Ok(engine)
    }

    pub(super) fn docker(&mut self) -> Result<&mut DockerRuntime, RuntimeError> {
        self.docker.as_mut().ok_or_else(|| missing(RuntimeKind::Docker))
    }

    pub(super) fn of(&mut self, kind: RuntimeKind) -> Result<&mut dyn Runtime, RuntimeError> {
        match kind {
            RuntimeKind::Process => self.process.as_mut().map(|r| r as &mut dyn Runtime).ok_or_else(|| missing(kind)),
            RuntimeKind::Docker => self.docker().map(|r| r as &mut dyn Runtime),
        }
    }

    pub(super) fn kinds(&self) -> Vec<RuntimeKind> {
        let process = self.process.iter().map(|r| r.kind());
        process.chain(self.docker.iter().map(|r| r.kind())).collect()
    }

    pub(super) fn capacity(&self) -> Capacity {
        let process = self.process.iter().map(|r| r.capacity());
        let all = process.chain(self.docker.iter().map(|r| r.capacity()));
        all.reduce(|a, b| Capacity { cores: a.cores.max(b.cores), memory_bytes: a.memory_bytes.max(b.memory_bytes) })
            .unwrap_or(Capacity { cores: 1.0, memory_bytes: 1 })
    }
}

fn missing(kind: RuntimeKind) -> RuntimeError {
    let what = match kind {
        RuntimeKind::Process => "the daemon runs without the process runtime: start it with --runtime process,docker",
        RuntimeKind::Docker => {
            "no Docker engine is connected: start the engine, and the daemon with --runtime process,docker"
        }
    };
    RuntimeError::Unsupported(what.into())
}

/// One base group for each state directory: two daemons never share one.
pub(crate) fn process_config(config: &DaemonConfig, paths: &Paths) -> process::Config {
    let mut process = process::Config::new(base_name(&paths.state));
    process.mode = config.mode;
    process.keeper = Some(vec![program(config).into(), "keep".into()]);
    process
}

/// What distinguishes the groups and containers of one daemon from those of others: a hash of its state directory.
pub(super) fn base_name(state_dir: &Path) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in state_dir.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("gainshare-{:08x}", (hash ^ (hash >> 32)) as u32)
}
