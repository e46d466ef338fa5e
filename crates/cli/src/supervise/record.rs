//! How a job ended, as its supervisor records it.

use nix::sys::wait::WaitStatus;
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
