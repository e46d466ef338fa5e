//! One daemon for each state directory, and how clients find it.
//!
//! **Problem.** The journal has one writer. The same user may reach the same state directory with
//! different runtime directories (a cron job, `sudo -u`, a service, a container) or from different
//! hosts (a home directory on NFS). Each of them would start a daemon of its own.
//!
//! **How.** The daemon holds an exclusive lock on `lock` in the state directory (for the journal)
//! and on `lock` in the runtime directory (for the socket). The file in the state directory also
//! records the daemon's [`Address`]: host, boot, pid and socket. A client that finds no socket of
//! its own asks the recorded one.
//!
//! **Properties.** The locks go with the process, however it ends. The record is only believed while the
//! lock is held.

use crate::error::DaemonError;
use crate::paths::Paths;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a killed daemon may take to be gone: the kernel releases its locks only when it has
/// taken the process apart.
const DYING: Duration = Duration::from_secs(2);

/// A record longer than this is not ours.
const MAX_RECORD_BYTES: u64 = 64 << 10;

/// Where a daemon runs and answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    pub host: String,
    /// The kernel's boot id: two hosts may have the same name.
    pub boot_id: String,
    pub pid: u32,
    pub socket: PathBuf,
}

impl Address {
    fn here(socket: PathBuf) -> Address {
        Address { host: host(), boot_id: boot_id(), pid: std::process::id(), socket }
    }

    fn is_on_this_host(&self) -> bool {
        self.boot_id == boot_id()
    }
}

/// What holds the lock of a state directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    None,
    /// A daemon; the address is missing for the moment between its lock and its record.
    Daemon(Option<Address>),
}

/// Reads which daemon has the state directory at this moment.
pub fn holder(paths: &Paths) -> Holder {
    let path = paths.state_lock();
    if is_locked(&path) { Holder::Daemon(read_address(&path)) } else { Holder::None }
}

/// Whether a process holds an exclusive lock on the file.
pub fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
}

/// The daemon's two locks, held until the process ends.
#[derive(Debug)]
pub struct Instance {
    _state: File,
    _runtime: File,
}

impl Instance {
    /// Takes both locks and records this daemon's address.
    pub fn acquire(paths: &Paths) -> Result<Instance, DaemonError> {
        let here = Address::here(paths.socket());
        let state = take(&paths.state_lock(), paths)?;
        write_record(&state, &paths.state_lock(), &serde_json::to_string(&here).unwrap_or_default())?;
        let runtime = take(&paths.lock(), paths)?;
        write_record(&runtime, &paths.lock(), &here.pid.to_string())?;
        Ok(Instance { _state: state, _runtime: runtime })
    }
}

fn take(path: &Path, paths: &Paths) -> Result<File, DaemonError> {
    let fail = |source| DaemonError::Io { action: "lock", path: path.display().to_string(), source };
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path).map_err(fail)?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(fail(e)),
            Err(TryLockError::WouldBlock) => {}
        }
        let address = read_address(&paths.state_lock());
        let socket = address.as_ref().map_or_else(|| paths.socket(), |a| a.socket.clone());
        // A dying daemon holds its lock but does not answer; a client that tests the lock holds it for a moment.
        if begun.elapsed() > DYING || UnixStream::connect(&socket).is_ok() {
            return Err(refusal(path, paths, address, socket));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn refusal(path: &Path, paths: &Paths, address: Option<Address>, socket: PathBuf) -> DaemonError {
    match address.filter(|_| path == paths.state_lock()) {
        Some(other) if !other.is_on_this_host() => {
            DaemonError::RunsElsewhere { state: paths.state.display().to_string(), host: other.host, pid: other.pid }
        }
        other => {
            let recorded = || std::fs::read_to_string(path).ok().and_then(|t| t.trim().parse().ok());
            let pid = other.map(|a| a.pid).or_else(recorded);
            let pid = pid.map_or_else(|| "unknown".to_owned(), |pid| pid.to_string());
            DaemonError::AlreadyRunning { pid, socket: socket.display().to_string() }
        }
    }
}

fn write_record(mut file: &File, path: &Path, text: &str) -> Result<(), DaemonError> {
    let written = file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).and_then(|_| writeln!(file, "{text}"));
    written.map_err(|source| DaemonError::Io { action: "write", path: path.display().to_string(), source })
}

fn read_address(path: &Path) -> Option<Address> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(MAX_RECORD_BYTES).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "an unnamed host".into() } else { name.trim().to_owned() }
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(dir: &Path, runtime: &str) -> Paths {
        let paths = Paths { state: dir.join("state"), runtime: dir.join(runtime) };
        paths.create().unwrap();
        paths
    }

    #[test]
    fn a_second_runtime_directory_gets_no_second_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (paths(dir.path(), "run"), paths(dir.path(), "other"));
        assert_eq!(holder(&first), Holder::None);
        let held = Instance::acquire(&first).unwrap();
        let Holder::Daemon(Some(address)) = holder(&second) else { panic!("the lock is held") };
        assert_eq!((address.pid, &address.socket), (std::process::id(), &first.socket()));
        let refused = Instance::acquire(&second).unwrap_err().to_string();
        assert!(refused.contains(&first.socket().display().to_string()), "{refused}");
        assert!(!refused.contains("GAINSHARE_RUNTIME_DIR"), "a second runtime directory is no remedy: {refused}");
        drop(held);
        Instance::acquire(&second).unwrap();
    }

    #[test]
    fn a_daemon_on_another_host_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let paths = paths(dir.path(), "run");
        let far = Address { host: "node-7".into(), boot_id: "another".into(), pid: 42, socket: paths.socket() };
        let file = File::create(paths.state_lock()).unwrap();
        file.lock().unwrap();
        write_record(&file, &paths.state_lock(), &serde_json::to_string(&far).unwrap()).unwrap();
        let refused = Instance::acquire(&paths).unwrap_err().to_string();
        assert!(refused.contains("node-7") && refused.contains("GAINSHARE_STATE_DIR"), "{refused}");
    }
}
