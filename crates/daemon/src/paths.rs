//! Where the daemon keeps its files.
//!
//! The *state dir* survives reboots: journal.db, `jobs/<id>/`, `removed/`, token, daemon.log, lock, guard.lock.
//! The *runtime dir* belongs to the running daemon: api.sock, lock, lease, lapsed, address. Both
//! belong to the user: they are made with mode 0700, and refused if another user owns them or may
//! write there, because a user who can replace the socket can control the daemon.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    #[error("cannot make {path}: {source}")]
    Create { path: String, source: io::Error },
    #[error("{path} belongs to user {owner}, not to you: remove it or set {variable} to a directory of your own")]
    NotYours { path: String, owner: u32, variable: &'static str },
    #[error("others may write to {path}: run `chmod 700 {path}`")]
    Open { path: String },
    #[error("{path} is a symbolic link or no directory: remove it or set {variable} to a directory of your own")]
    NoDirectory { path: String, variable: &'static str },
}

/// The two directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    pub state: PathBuf,
    pub runtime: PathBuf,
}

impl Paths {
    /// From the environment, unless given.
    pub fn find(state: Option<PathBuf>, runtime: Option<PathBuf>) -> Paths {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = || var("HOME").unwrap_or_else(|| PathBuf::from("/"));
        let state = state
            .or_else(|| var("GAINSHARE_STATE_DIR"))
            .or_else(|| var("XDG_STATE_HOME").map(|d| d.join("gainshare")))
            .unwrap_or_else(|| home().join(".local/state/gainshare"));
        let runtime = runtime
            .or_else(|| var("GAINSHARE_RUNTIME_DIR"))
            .or_else(|| var("XDG_RUNTIME_DIR").map(|d| d.join("gainshare")))
            .unwrap_or_else(|| PathBuf::from(format!("/tmp/gainshare-{}", nix::unistd::getuid())));
        // Jobs run elsewhere, so every path we hand to them must be absolute.
        let absolute = |p: PathBuf| std::path::absolute(&p).unwrap_or(p);
        Paths { state: absolute(state), runtime: absolute(runtime) }
    }

    pub fn socket(&self) -> PathBuf {
        self.runtime.join("api.sock")
    }

    /// Locked by the daemon that owns the socket; holds its pid.
    pub fn lock(&self) -> PathBuf {
        self.runtime.join("lock")
    }

    /// Locked by the daemon that owns the journal; holds its address.
    pub fn state_lock(&self) -> PathBuf {
        self.state.join("lock")
    }

    /// Locked by the guard of this journal; holds its pid.
    pub fn guard_lock(&self) -> PathBuf {
        self.state.join("guard.lock")
    }

    pub fn lease(&self) -> PathBuf {
        self.runtime.join("lease")
    }

    pub fn lapsed(&self) -> PathBuf {
        self.runtime.join("lapsed")
    }

    /// The TCP listener's address, if there is one.
    pub fn address(&self) -> PathBuf {
        self.runtime.join("address")
    }

    pub fn journal(&self) -> PathBuf {
        self.state.join("journal.db")
    }

    pub fn token(&self) -> PathBuf {
        self.state.join("token")
    }

    pub fn daemon_log(&self) -> PathBuf {
        self.state.join("daemon.log")
    }

    /// The directory of all JOBDIRs.
    pub fn jobs(&self) -> PathBuf {
        self.state.join("jobs")
    }

    /// JOBDIR.
    pub fn job(&self, id: u64) -> PathBuf {
        self.jobs().join(id.to_string())
    }

    /// JOBDIRs of forgotten jobs until their files are removed.
    pub fn removed(&self) -> PathBuf {
        self.state.join("removed")
    }

    /// Makes both directories, or says why one cannot be trusted.
    pub fn create(&self) -> Result<(), PathError> {
        private_dir(&self.state, "GAINSHARE_STATE_DIR")?;
        private_dir(&self.jobs(), "GAINSHARE_STATE_DIR")?;
        private_dir(&self.removed(), "GAINSHARE_STATE_DIR")?;
        private_dir(&self.runtime, "GAINSHARE_RUNTIME_DIR")
    }
}

fn private_dir(path: &Path, variable: &'static str) -> Result<(), PathError> {
    let name = path.display().to_string();
    let create = |source| PathError::Create { path: name.clone(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(create)?;
    // Not followed: a link in /tmp could point anywhere.
    let meta = path.symlink_metadata().map_err(create)?;
    if !meta.is_dir() {
        return Err(PathError::NoDirectory { path: name, variable });
    }
    if meta.uid() != nix::unistd::geteuid().as_raw() {
        return Err(PathError::NotYours { path: name, owner: meta.uid(), variable });
    }
    if meta.permissions().mode() & 0o022 != 0 {
        return Err(PathError::Open { path: name });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_private_and_strange_ones_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::find(Some(dir.path().join("s")), Some(dir.path().join("r")));
        paths.create().unwrap();
        paths.create().unwrap();
        assert_eq!(paths.state.metadata().unwrap().mode() & 0o777, 0o700);

        std::fs::set_permissions(&paths.runtime, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(matches!(paths.create(), Err(PathError::Open { .. })));
        std::fs::remove_dir(&paths.runtime).unwrap();
        std::os::unix::fs::symlink(&paths.state, &paths.runtime).unwrap();
        assert!(matches!(paths.create(), Err(PathError::NoDirectory { .. })));
    }
}
