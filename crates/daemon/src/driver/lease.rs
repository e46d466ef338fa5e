//! The daemon's sign of life, and the guard that watches it.
//!
//! Once a second the driver writes its epoch and the boot clock into the lease file. The guard, a process of its own, puts all limits
//! back when the lease has grown too old, and writes the epoch it did so for into the `lapsed` file. A driver that finds its own epoch there
//! (it was stopped and goes on) knows that what it believes to be in force is not.

use crate::clock::boottime_ns;
use crate::config::DaemonConfig;
use crate::duration::format_duration;
use crate::paths::Paths;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// What the lease file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaseContent {
    pub(crate) epoch: u64,
    pub(crate) boottime_ns: u64,
}

impl LeaseContent {
    pub(crate) fn read(path: &Path) -> Option<LeaseContent> {
        let text = std::fs::read_to_string(path).ok()?;
        let mut words = text.split_ascii_whitespace();
        Some(LeaseContent { epoch: words.next()?.parse().ok()?, boottime_ns: words.next()?.parse().ok()? })
    }
}

pub(crate) fn lapsed_epoch(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

pub(super) struct Lease {
    file: PathBuf,
    lapsed: PathBuf,
    program: PathBuf,
    epoch: u64,
    guard: Option<Child>,
}

impl Lease {
    pub(super) fn new(paths: &Paths, epoch: u64, config: &DaemonConfig) -> Lease {
        Lease { file: paths.lease(), lapsed: paths.lapsed(), program: program(config), epoch, guard: None }
    }

    pub(super) fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// Written aside and renamed, so that the guard never reads half of it.
    pub(super) fn renew(&self) {
        let aside = self.file.with_extension("new");
        let text = format!("{} {}\n", self.epoch, boottime_ns());
        if let Err(e) = std::fs::write(&aside, text).and_then(|()| std::fs::rename(&aside, &self.file)) {
            tracing::warn!("cannot renew the lease {}: {e}", self.file.display());
        }
    }

    /// Whether the guard has put the limits of this epoch back.
    pub(super) fn has_lapsed(&self) -> bool {
        lapsed_epoch(&self.lapsed).is_some_and(|epoch| epoch >= self.epoch)
    }

    /// Starts the guard, and again if it died.
    pub(super) fn keep_guard(&mut self, paths: &Paths, config: &DaemonConfig) {
        if let Some(guard) = &mut self.guard
            && matches!(guard.try_wait(), Ok(None))
        {
            return;
        }
        let mut command = Command::new(&self.program);
        command.arg("guard").arg("--state-dir").arg(&paths.state).arg("--runtime-dir").arg(&paths.runtime);
        command.arg("--lease").arg(format_duration(config.lease));
        detach(&mut command);
        match command.spawn() {
            Ok(child) => self.guard = Some(child),
            Err(e) => tracing::warn!("cannot start the guard {}: {e}", self.program.display()),
        }
    }

    /// The daemon ends properly: nothing to watch any more.
    pub(super) fn give_up(&mut self) {
        let _ = std::fs::remove_file(&self.file);
        if let Some(mut guard) = self.guard.take() {
            // It ends by itself when it finds no lease; waiting for it would only make `down` slow.
            let _ = guard.try_wait();
        }
    }
}

/// What is run as supervisor and as guard.
pub(super) fn program(config: &DaemonConfig) -> PathBuf {
    config.program.clone().or_else(|| std::env::current_exe().ok()).unwrap_or_else(|| PathBuf::from("gainshare"))
}

/// Lets a process outlive the daemon: a session of its own and no terminal.
pub(super) fn detach(command: &mut Command) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
    // SAFETY: setsid is a plain system call, allowed between fork and exec.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(std::io::Error::from));
    }
}
