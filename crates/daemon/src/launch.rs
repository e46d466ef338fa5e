//! Starts the processes that outlive the daemon: supervisors and the guard.

use crate::config::DaemonConfig;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The program that is run as supervisor and as guard.
pub(crate) fn program(config: &DaemonConfig) -> PathBuf {
    config.program.clone().or_else(|| std::env::current_exe().ok()).unwrap_or_else(|| PathBuf::from("gainshare"))
}

/// Lets a process outlive the daemon: a session of its own and no terminal.
pub(crate) fn detach(command: &mut Command) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
    // SAFETY: setsid is a plain system call, allowed between fork and exec.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(std::io::Error::from));
    }
}
