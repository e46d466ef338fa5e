//! What the daemon tells a caller whose request it refuses, and why a daemon cannot start.

use crate::api::types::{ErrorBody, ErrorCode};
use crate::journal::JournalError;
use crate::spec::SpecError;
use gainshare_limits::RuntimeError;

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

/// Why a daemon did not start or could not go on.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    #[error(transparent)]
    Paths(#[from] crate::paths::PathError),
    #[error(
        "a daemon is already running here (pid {pid}, socket {socket}): use it, stop it with `gainshare down`, or set another GAINSHARE_RUNTIME_DIR"
    )]
    AlreadyRunning { pid: String, socket: String },
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("no runtime can be used: {0}")]
    Runtime(String),
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: String, source: std::io::Error },
}
