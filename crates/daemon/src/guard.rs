//! The guard: puts limits back when the daemon is dead or stands still.
//!
//! **Problem.** If the daemon dies for good, its last limits would stay for ever: jobs that are throttled with nobody to free them.
//!
//! **How.** A process of its own, one for each runtime directory, looks at the daemon's lease once in a while. When the lease has grown
//! older than allowed, it restores every job listed in the journal's `limits` table, notes the epoch in the `lapsed` file, and waits for
//! a new lease; if the daemon is dead (nobody holds its lock), there is nothing left to wait for. A daemon that only stood still finds its
//! epoch in `lapsed` and begins anew.
//!
//! **Properties.** It never touches a limit while the lease is fresh. It ends when the daemon ends properly (no lease) or is dead and
//! everything is restored.

use crate::clock::boottime_ns;
use crate::driver::{LeaseContent, is_locked};
use crate::journal::{self, LimitRow};
use crate::paths::Paths;
use gainshare_limits::LimitMode;
use gainshare_limits::RuntimeError;
use gainshare_limits::docker::{DockerRuntime, OriginalLimits, default_socket};
use gainshare_limits::process::{self, JobGroup};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

/// What is stored for a container: its original limits and where its engine is.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ContainerOriginal {
    pub(crate) original: OriginalLimits,
    pub(crate) socket: Option<PathBuf>,
}

/// A missing lease at the very beginning means that the daemon is only just starting.
const FIRST_LEASE_WITHIN: Duration = Duration::from_secs(10);

/// Watches until the daemon ends properly, or is dead and its limits are put back.
pub fn run(state_dir: PathBuf, runtime_dir: PathBuf, lease: Duration) -> std::io::Result<()> {
    let paths = Paths { state: state_dir, runtime: runtime_dir };
    let Some(_lock) = lock(&paths)? else { return Ok(()) };
    // Often enough that limits are back soon after the lease is over, seldom enough to cost nothing.
    let pace = (lease / 8).clamp(Duration::from_millis(100), Duration::from_secs(1));
    let begun = boottime_ns();
    loop {
        std::thread::sleep(pace);
        let now = boottime_ns();
        let Some(content) = LeaseContent::read(&paths.lease()) else {
            if now.saturating_sub(begun) > FIRST_LEASE_WITHIN.as_nanos() as u64 || !is_locked(&paths.lock()) {
                return Ok(());
            }
            continue;
        };
        let age = Duration::from_nanos(now.saturating_sub(content.boottime_ns));
        // A clock that is behind the lease belongs to another boot: that daemon is dead.
        let stale = age > lease || content.boottime_ns > now;
        if !stale || crate::driver::lapsed_epoch(&paths.lapsed()) == Some(content.epoch) {
            continue;
        }
        let whole = restore_all(&paths);
        note_lapse(&paths, content.epoch)?;
        if whole && !is_locked(&paths.lock()) {
            return Ok(());
        }
    }
}

/// Only one guard; a second one has nothing to do.
fn lock(paths: &Paths) -> std::io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    let mut file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(paths.guard_lock())?;
    match file.try_lock() {
        Ok(()) => {
            file.set_len(0)?;
            writeln!(file, "{}", std::process::id())?;
            Ok(Some(file))
        }
        Err(std::fs::TryLockError::WouldBlock) => Ok(None),
        Err(std::fs::TryLockError::Error(e)) => Err(e),
    }
}

fn note_lapse(paths: &Paths, epoch: u64) -> std::io::Result<()> {
    let path = paths.lapsed();
    let aside = path.with_extension("new");
    std::fs::write(&aside, format!("{epoch}\n"))?;
    std::fs::rename(aside, path)
}

/// Whether everything could be put back.
fn restore_all(paths: &Paths) -> bool {
    let rows = match journal::limits_in(&paths.journal()) {
        Ok(rows) => rows,
        Err(e) => {
            tracing::error!("the guard cannot read which limits to put back: {e}");
            return false;
        }
    };
    let mut whole = true;
    for row in rows {
        if let Err(e) = restore(&row) {
            tracing::error!(job = %row.job, "the guard cannot put limits back: {e}");
            whole = false;
        }
    }
    whole
}

/// Puts one job's limits back without its runtime knowing it. Harmless if the job is gone.
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
