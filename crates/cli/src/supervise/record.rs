//! What a supervisor leaves in the job's directory, so that a daemon that was away learns everything when it is back.

use nix::sys::wait::WaitStatus;
use serde::Serialize;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// How the main process of a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Code(i32),
    Signal(i32),
}

impl Ending {
    pub fn from_wait(status: WaitStatus) -> Option<Ending> {
        match status {
            WaitStatus::Exited(_, code) => Some(Ending::Code(code)),
            WaitStatus::Signaled(_, signal, _) => Some(Ending::Signal(signal as i32)),
            _ => None,
        }
    }

    /// As shells give it: the code, or 128 and the signal's number.
    pub fn exit_code(self) -> u8 {
        match self {
            Ending::Code(code) => code as u8,
            Ending::Signal(signal) => 128u8.wrapping_add(signal as u8),
        }
    }
}

/// Seconds since 1970.
pub fn now_unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// Writes a file whole or not at all, and so that it is still there after a power cut.
pub fn write_json(dir: &Path, name: &str, value: &impl Serialize) -> io::Result<()> {
    let temporary = dir.join(format!(".{name}.{}", std::process::id()));
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(&serde_json::to_vec(value)?)?;
    file.sync_all()?;
    std::fs::rename(&temporary, dir.join(name)).inspect_err(|_| drop(std::fs::remove_file(&temporary)))?;
    std::fs::File::open(dir)?.sync_all()
}
