//! Why the daemon refuses a request, and why a daemon cannot start or ends with an error.

use crate::journal::JournalError;
use crate::spec::SpecError;
use crate::types::{ErrorBody, ErrorCode};
use gainshare_limits::RuntimeError;
use std::io;
use std::path::Path;

/// A refusal: one line that names the thing and the remedy, and a code for programs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub code: ErrorCode,
    pub message: String,
}

impl Refusal {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into() }
    }

    pub fn body(self) -> ErrorBody {
        ErrorBody { error: self.message.replace('\n', "; "), code: self.code }
    }
}

/// A file or folder that cannot be written or read.
pub(crate) fn disk_refusal(action: &str, path: &Path, e: io::Error) -> Refusal {
    let full = matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    let code = if full { ErrorCode::DiskFull } else { ErrorCode::Internal };
    let remedy = if full { ": free some space" } else { "" };
    Refusal::new(code, format!("cannot {action} {}: {e}{remedy}", path.display()))
}

impl From<JournalError> for Refusal {
    fn from(e: JournalError) -> Refusal {
        let code = if e.is_full() { ErrorCode::DiskFull } else { ErrorCode::Internal };
        Refusal::new(code, e.to_string())
    }
}

impl From<SpecError> for Refusal {
    fn from(e: SpecError) -> Refusal {
        Refusal::new(ErrorCode::InvalidSpec, e.to_string())
    }
}

impl From<RuntimeError> for Refusal {
    fn from(e: RuntimeError) -> Refusal {
        Refusal::new(ErrorCode::Internal, e.to_string())
    }
}

/// Why a daemon did not start, or ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    #[error(transparent)]
    Paths(#[from] crate::paths::PathError),
    #[error("a daemon is already running here (pid {pid}, socket {socket}): use it, or stop it with `gainshare down`")]
    AlreadyRunning { pid: String, socket: String },
    #[error(
        "the daemon of {state} runs on host {host} (pid {pid}): use it there, or set GAINSHARE_STATE_DIR to a directory on a disk of this host"
    )]
    RunsElsewhere { state: String, host: String, pid: u32 },
    #[error("the daemon ended because {part} ended: {why}; start it again with `gainshare up`")]
    PartEnded { part: &'static str, why: String },
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("no runtime can be used: {0}")]
    Runtime(String),
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: String, source: std::io::Error },
}
