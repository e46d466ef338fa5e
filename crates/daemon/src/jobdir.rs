//! The files in a job's directory, JOBDIR, and how they are read and written.
//!
//! **Problem.** The supervisor and the daemon agree through files. The job runs as the same user,
//! so it can replace any of these files by a symbolic link, a FIFO or a device: following a link
//! could read a foreign file, opening a FIFO blocks, and reading `/dev/zero` never ends.
//!
//! **How.** [`open_regular`] follows no link, never waits and accepts only regular files.
//! [`read_json`] reads a bounded number of bytes. [`write_private`] writes a new file beside the
//! old one, syncs it, renames it and syncs the directory.
//!
//! **Terms.** *Attempt*: one start of a job, counted from 1. The supervisor writes `starting.json`
//! (the *intent*) before it forks the job's process, `started.json` after exec, and `exit.json` at
//! the end. An intent without `started.json` means: the process may or may not exist.
//!
//! **Properties.** No function here blocks on what a job put into its directory. A file that
//! [`write_private`] returned for is there after a power cut.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

pub const OUTPUT: &str = "output.log";
pub const OLDER_OUTPUT: &str = "output.log.1";
/// What a supervisor needs, with the values of the environment: it exists until the job has started.
pub const SPEC: &str = "spec.json";
/// What a daemon needs to find the job again without its journal. Holds names of variables, no values.
pub const RECORD: &str = "job.json";
/// The limits that a container had before the daemon changed them.
pub const LIMITS: &str = "limits.json";
pub const STARTING: &str = "starting.json";
pub const STARTED: &str = "started.json";
pub const EXIT: &str = "exit.json";
/// Locked by the supervisor while it lives.
pub const SUPERVISOR_LOCK: &str = "supervisor.lock";

/// A record of a supervisor larger than this is not one.
const MAX_RECORD_BYTES: u64 = 1 << 20;

/// `spec.json` holds the caller's whole environment; the kernel limits one variable to 128 KiB.
const MAX_SPEC_BYTES: u64 = 64 << 20;

/// Content of `starting.json`; the other two records have the field as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    pub attempt: u32,
}

/// Opens a regular file for reading; never follows a link and never waits.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    only_regular(OpenOptions::new().read(true).custom_flags(flags).open(path)?)
}

/// Opens or makes a regular file to append to; never follows a link and never waits.
pub fn append_regular(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    only_regular(OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path)?)
}

fn only_regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
}

/// Reads at most `most_bytes`; a longer file is an error.
fn read_bounded(path: &Path, most_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(most_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most_bytes {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("longer than {most_bytes} bytes")));
    }
    Ok(bytes)
}

/// A record of a supervisor; `None` if it is missing, damaged or no regular file.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&read_bounded(path, MAX_RECORD_BYTES).ok()?).ok()
}

/// `spec.json`, which may be much longer than the records.
pub fn read_spec<T: DeserializeOwned>(dir: &Path) -> io::Result<T> {
    serde_json::from_slice(&read_bounded(&dir.join(SPEC), MAX_SPEC_BYTES)?).map_err(io::Error::from)
}

/// Whether a supervisor of this attempt, or of a later one, may have forked the job's process.
pub fn may_have_begun(dir: &Path, attempt: u32) -> bool {
    let begun = |name: &str| read_json::<Intent>(&dir.join(name)).is_some_and(|record| record.attempt >= attempt);
    [STARTING, STARTED, EXIT].into_iter().any(begun)
}

/// Writes a file whole or not at all, readable by its owner only, and so that it is still there after a power cut.
pub fn write_private(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    write_unsynced(dir, name, bytes)?.sync_all()?;
    sync_dir(dir)
}

/// [`write_private`] without the two syncs, for a caller that syncs many files at once.
pub fn write_unsynced(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<File> {
    let aside = dir.join(format!(".{name}.{}", std::process::id()));
    let _ = std::fs::remove_file(&aside);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
    let written = file.write_all(bytes).and_then(|()| std::fs::rename(&aside, dir.join(name)));
    written.inspect_err(|_| drop(std::fs::remove_file(&aside)))?;
    Ok(file)
}

/// [`write_private`] for a value.
pub fn write_json(dir: &Path, name: &str, value: &impl Serialize) -> io::Result<()> {
    write_private(dir, name, &serde_json::to_vec(value)?)
}

/// Makes names that were added to a directory durable.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Makes new job directories and one file in each durable with `sync`: the file, the name of the file, and last the
/// names of the directories. After a power cut every directory that was acknowledged is there with its file.
pub fn sync_new<'a>(
    jobs: &Path,
    files: impl IntoIterator<Item = (&'a File, &'a Path)>,
    mut sync: impl FnMut(&File) -> io::Result<()>,
) -> io::Result<()> {
    for (file, dir) in files {
        sync(file)?;
        sync(&File::open(dir)?)?;
    }
    sync(&File::open(jobs)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use std::os::fd::AsRawFd;

    #[test]
    fn links_fifos_and_endless_files_are_refused_without_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("outside"), r#"{"attempt":1}"#).unwrap();
        std::os::unix::fs::symlink(at("outside"), at(EXIT)).unwrap();
        assert!(read_json::<Intent>(&at(EXIT)).is_none(), "a link is not followed");
        nix::unistd::mkfifo(&at(STARTED), Mode::S_IRWXU).unwrap();
        assert!(read_json::<Intent>(&at(STARTED)).is_none(), "a FIFO without a writer does not block");
        nix::unistd::mkfifo(&at(OUTPUT), Mode::S_IRWXU).unwrap();
        assert!(append_regular(&at(OUTPUT)).is_err(), "a FIFO without a reader does not block");
        assert!(read_bounded(Path::new("/dev/zero"), 10).is_err());
        std::fs::write(at("long"), vec![b' '; 2000]).unwrap();
        assert!(read_bounded(&at("long"), 1000).is_err());
        assert_eq!(read_bounded(&at("long"), 2000).unwrap().len(), 2000);
    }

    #[test]
    fn a_new_directory_is_durable_with_its_file_and_its_name() {
        let jobs = tempfile::tempdir().unwrap();
        let dir = jobs.path().join("7");
        std::fs::create_dir(&dir).unwrap();
        let file = write_unsynced(&dir, SPEC, b"{}").unwrap();
        let mut synced = Vec::new();
        let note = |file: &File| -> io::Result<()> {
            let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
            synced.push(path);
            Ok(())
        };
        sync_new(jobs.path(), [(&file, dir.as_path())], note).unwrap();
        let root = jobs.path().canonicalize().unwrap();
        assert_eq!(synced, [root.join("7").join(SPEC), root.join("7"), root]);
        let fails = |_: &File| Err(io::Error::from(io::ErrorKind::StorageFull));
        assert!(sync_new(jobs.path(), [(&file, dir.as_path())], fails).is_err(), "an error is not passed over");
    }

    #[test]
    fn an_intent_counts_as_begun_for_its_attempt_and_earlier_ones() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!may_have_begun(dir.path(), 1));
        write_json(dir.path(), STARTING, &Intent { attempt: 2 }).unwrap();
        assert!(may_have_begun(dir.path(), 1) && may_have_begun(dir.path(), 2));
        assert!(!may_have_begun(dir.path(), 3));
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, [STARTING], "nothing is left beside it");
    }
}
