//! Puts a job's limits back from the journal's row, without the runtime that changed them.

use crate::journal::LimitRow;
use gainshare_limits::docker::{DockerRuntime, OriginalLimits, default_socket};
use gainshare_limits::process::{self, JobGroup};
use gainshare_limits::{LimitMode, RuntimeError};
use std::path::PathBuf;

/// What is stored for a container: its original limits and the socket of its engine.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ContainerOriginal {
    pub(crate) original: OriginalLimits,
    pub(crate) socket: Option<PathBuf>,
}

/// Puts one job's limits back. Harmless if the job is gone.
pub(crate) fn restore(row: &LimitRow) -> Result<(), RuntimeError> {
    let unreadable = |e: serde_json::Error| RuntimeError::Unsupported(format!("{}: {e}", row.key));
    if row.runtime == "docker" {
        let kept: ContainerOriginal = serde_json::from_str(&row.original).map_err(unreadable)?;
        let socket = kept.socket.unwrap_or_else(default_socket);
        DockerRuntime::connect(&socket, LimitMode::Weight)?.restore(&kept.original)
    } else {
        let group: JobGroup = serde_json::from_str(&row.original).map_err(unreadable)?;
        process::restore(&group)
    }
}
