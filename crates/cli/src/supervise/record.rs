//! How a job ended, as its supervisor records it.

use nix::sys::wait::WaitStatus;
use std::time::{SystemTime, UNIX_EPOCH};

/// How the main process of a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitOutcome {
    Code(i32),
    Signal(i32),
}

impl ExitOutcome {
    pub fn from_wait(status: WaitStatus) -> Option<ExitOutcome> {
        match status {
            WaitStatus::Exited(_, code) => Some(ExitOutcome::Code(code)),
            WaitStatus::Signaled(_, signal, _) => Some(ExitOutcome::Signal(signal as i32)),
            _ => None,
        }
    }

    /// As shells give it: the code, or 128 and the signal's number.
    pub fn exit_code(self) -> u8 {
        match self {
            ExitOutcome::Code(code) => code as u8,
            ExitOutcome::Signal(signal) => 128u8.wrapping_add(signal as u8),
        }
    }
}

/// Seconds since 1970.
pub fn now_unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
