//! The runtimes this daemon uses, by kind.

use crate::config::DaemonConfig;
use crate::error::DaemonError;
use crate::paths::Paths;
use gainshare_runtime::process::{self, ProcessRuntime};
use gainshare_runtime::{Capacity, Runtime, RuntimeError, RuntimeKind};

pub(crate) struct Runtimes {
    pub(super) process: Option<ProcessRuntime>,
    /// What could not be opened or cannot be done, by runtime.
    pub(super) notes: Vec<(RuntimeKind, String)>,
}

impl Runtimes {
    pub(crate) fn open(config: &DaemonConfig, paths: &Paths) -> Result<Runtimes, DaemonError> {
        let mut runtimes = Runtimes { process: None, notes: Vec::new() };
        let mut why = Vec::new();
        for kind in &config.runtime {
            match kind {
                RuntimeKind::Process => match ProcessRuntime::detect(process_config(config, paths)) {
                    Ok(runtime) => {
                        runtimes.notes.extend(runtime.notes().iter().map(|n| (RuntimeKind::Process, n.clone())));
                        runtimes.process = Some(runtime);
                    }
                    Err(e) => why.push(e.to_string()),
                },
                RuntimeKind::Docker => why.push("docker is not there yet".into()),
            }
        }
        if runtimes.process.is_none() {
            return Err(DaemonError::Runtime(why.join("; ")));
        }
        Ok(runtimes)
    }

    pub(super) fn of(&mut self, kind: RuntimeKind) -> Result<&mut dyn Runtime, RuntimeError> {
        let missing = || {
            RuntimeError::Unsupported(format!("the daemon runs without the runtime {kind:?}: start it with --runtime"))
        };
        match kind {
            RuntimeKind::Process => self.process.as_mut().map(|r| r as &mut dyn Runtime).ok_or_else(missing),
            RuntimeKind::Docker => Err(missing()),
        }
    }

    pub(super) fn kinds(&self) -> Vec<RuntimeKind> {
        self.process.iter().map(|r| r.kind()).collect()
    }

    pub(super) fn capacity(&self) -> Capacity {
        let all = self.process.iter().map(|r| r.capacity());
        all.reduce(|a, b| Capacity { cores: a.cores.max(b.cores), memory_bytes: a.memory_bytes.max(b.memory_bytes) })
            .unwrap_or(Capacity { cores: 1.0, memory_bytes: 1 })
    }
}

/// One base group for each state directory: two daemons never share one.
pub(crate) fn process_config(config: &DaemonConfig, paths: &Paths) -> process::Config {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in paths.state.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let mut process = process::Config::new(format!("gainshare-{:08x}", hash as u32 ^ (hash >> 32) as u32));
    process.mode = config.mode;
    process.keeper = Some(vec![super::lease::program(config).into_os_string(), "keep".into()]);
    process
}
