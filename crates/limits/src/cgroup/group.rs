//! One job's group: its directories, its processes, its counters.
//!
//! A group is identified by the inodes of its directories, not by their names. Every file is opened through a
//! directory whose inode was compared first, so a directory that another program made under the same name is
//! never read or written.

use super::file::{self, BUFFER_BYTES, OpenFile};
use super::hierarchy::{Controller, Version};
use crate::cpus::CpuList;
use crate::{Counters, RuntimeError};
use gainshare_core::backoff::Backoff;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long [`Group::kill`] waits for killed processes to be gone. A process in an uninterruptible wait (a hung
/// network disk) can outlast any wait.
const KILL_PATIENCE: Duration = Duration::from_secs(2);

/// One directory of a group. The inode identifies it: the kernel does not give an inode number to a second group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupDir {
    pub path: PathBuf,
    pub inode: u64,
    pub controllers: Vec<Controller>,
}

#[derive(Debug)]
pub struct Group {
    key: String,
    version: Version,
    dirs: Vec<GroupDir>,
    cpu: Option<OpenFile>,
    memory_usage: Option<OpenFile>,
    memory_stat: Option<OpenFile>,
    block: Option<OpenFile>,
}

impl Group {
    /// Makes the group `name` below `parents`. An existing group of that name is taken as it is: an earlier
    /// daemon prepared it, and a child may be about to join it, or has just joined.
    pub(super) fn create(
        version: Version,
        parents: &BTreeMap<Controller, PathBuf>,
        name: &str,
    ) -> Result<Group, RuntimeError> {
        let mut dirs: Vec<GroupDir> = Vec::new();
        let undo = |dirs: &[GroupDir]| dirs.iter().for_each(|d| _ = std::fs::remove_dir(&d.path));
        for (&controller, parent) in parents {
            let path = parent.join(name);
            if let Some(known) = dirs.iter_mut().find(|d| d.path == path) {
                known.controllers.push(controller);
                continue;
            }
            let made = make_dir(&path).and_then(|()| match (version, controller) {
                (Version::V1, Controller::CpuSet) => copy_cpuset(parent, &path),
                _ => Ok(()),
            });
            match made.and_then(|()| file::inode(&path)) {
                Ok(inode) => dirs.push(GroupDir { path, inode, controllers: vec![controller] }),
                Err(source) => {
                    let path = path.display().to_string();
                    undo(&dirs);
                    return Err(RuntimeError::Io { action: "make the group", path, source, hint: "" });
                }
            }
        }
        Ok(Group::new(name, version, dirs))
    }

    /// Opens a group that was made earlier, perhaps by another process. `Gone` if any of its directories is
    /// no longer the same.
    pub fn reopen(key: &str, version: Version, dirs: &[GroupDir]) -> Result<Group, RuntimeError> {
        let same = !dirs.is_empty() && dirs.iter().all(|d| file::inode(&d.path).is_ok_and(|inode| inode == d.inode));
        if !same {
            return Err(RuntimeError::Gone { key: key.to_owned() });
        }
        Ok(Group::new(key, version, dirs.to_vec()))
    }

    fn new(key: &str, version: Version, dirs: Vec<GroupDir>) -> Group {
        Group { key: key.to_owned(), version, dirs, cpu: None, memory_usage: None, memory_stat: None, block: None }
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    pub fn version(&self) -> Version {
        self.version
    }

    pub fn dirs(&self) -> &[GroupDir] {
        &self.dirs
    }

    /// The files into which a process writes `0` to join the group.
    pub fn procs_files(&self) -> Vec<PathBuf> {
        self.dirs.iter().map(|d| d.path.join("cgroup.procs")).collect()
    }

    fn dir(&self, controller: Controller) -> io::Result<&GroupDir> {
        self.dirs
            .iter()
            .find(|d| d.controllers.contains(&controller))
            .ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "this controller is not available here"))
    }

    /// The directory whose list of processes is read: while the freezer holds it, the list cannot change.
    fn anchor(&self) -> io::Result<&GroupDir> {
        self.dir(Controller::Freezer).or_else(|_| self.dir(Controller::Cpu))
    }

    /// Opens a file in exactly the directory this group was made as.
    fn open(&self, name: &str, write: bool) -> io::Result<File> {
        use nix::fcntl::{OFlag, open, openat};
        let dir = self.dir(Controller::of_file(name))?;
        let none = nix::sys::stat::Mode::empty();
        let handle = open(&dir.path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, none)?;
        if nix::sys::stat::fstat(handle.as_fd())?.st_ino != dir.inode {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        // The kernel ignores O_TRUNC here; a plain file of a test's tree would keep the tail of a longer value.
        let access = if write { OFlag::O_WRONLY | OFlag::O_TRUNC } else { OFlag::O_RDONLY };
        Ok(openat(handle.as_fd(), name, access | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW, none)?.into())
    }

    /// The file's text without the line end.
    pub fn get(&self, name: &str) -> io::Result<String> {
        let mut buffer = [0; BUFFER_BYTES];
        Ok(OpenFile::new(self.open(name, false)?).read(&mut buffer)?.trim_end().to_owned())
    }

    pub fn put(&self, name: &str, value: &str) -> io::Result<()> {
        let written = self.open(name, true)?.write(value.as_bytes())?;
        if written == value.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    pub fn has(&self, name: &str) -> bool {
        self.dir(Controller::of_file(name)).is_ok_and(|d| d.path.join(name).exists())
    }

    /// The CPUs of the group above: all that this group can have.
    pub(crate) fn parent_cpus(&self) -> Option<CpuList> {
        let above = self.dir(Controller::CpuSet).ok()?.path.parent()?;
        let name = match self.version {
            Version::V1 => "cpuset.cpus",
            Version::V2 => "cpuset.cpus.effective",
        };
        CpuList::parse(&file::read(&above.join(name)).ok()?)
    }

    /// An error of one of the files as a [`RuntimeError`].
    pub fn error(&self, action: &'static str, name: &str, source: io::Error) -> RuntimeError {
        if file::means_gone(&source) && self.is_gone() {
            return RuntimeError::Gone { key: self.key.clone() };
        }
        let path = match self.dir(Controller::of_file(name)) {
            Ok(dir) => dir.path.join(name).display().to_string(),
            Err(_) => name.to_owned(),
        };
        RuntimeError::Io { action, path, source, hint: "" }
    }

    /// Whether any of the group's directories was removed (and perhaps made again by another program).
    pub fn is_gone(&self) -> bool {
        !self.dirs.iter().all(|d| file::inode(&d.path).is_ok_and(|inode| inode == d.inode))
    }

    /// What the group used so far. `scratch` is the caller's to reuse.
    pub fn usage(&mut self, scratch: &mut [u8; BUFFER_BYTES]) -> Result<Counters, RuntimeError> {
        let cpu_ns = self.cpu_ns(scratch)?;
        let (usage_file, inactive) = match self.version {
            Version::V2 => ("memory.current", "inactive_file"),
            Version::V1 => ("memory.usage_in_bytes", "total_inactive_file"),
        };
        let usage = self.hot(|g| &mut g.memory_usage, usage_file, scratch)?.and_then(|t| t.trim().parse::<u64>().ok());
        let stat = self.hot(|g| &mut g.memory_stat, "memory.stat", scratch)?;
        // Cached file pages that were not used for a while can be dropped at any time: the job does not need them.
        let idle_cache = stat.and_then(|t| file::keyed(t, inactive)).unwrap_or(0);
        let block_bytes = self.block_bytes(scratch)?;
        Ok(Counters {
            cpu_ns,
            memory_bytes: usage.unwrap_or(0).saturating_sub(idle_cache),
            block_bytes,
            net_bytes: None,
        })
    }

    /// The CPU time that the group used so far: one system call.
    pub fn cpu_ns(&mut self, scratch: &mut [u8; BUFFER_BYTES]) -> Result<u64, RuntimeError> {
        let is_v2 = self.version == Version::V2;
        let cpu = self.hot(|g| &mut g.cpu, if is_v2 { "cpu.stat" } else { "cpuacct.usage" }, scratch)?;
        Ok(match is_v2 {
            true => file::keyed(cpu.unwrap_or_default(), "usage_usec").unwrap_or(0).saturating_mul(1000),
            false => cpu.and_then(|t| t.trim().parse().ok()).unwrap_or(0),
        })
    }

    /// Reads a file that stays open. `None` if the kernel has no such file here; an error only if the group is gone.
    fn hot<'b>(
        &mut self,
        slot: impl Fn(&mut Group) -> &mut Option<OpenFile>,
        name: &str,
        scratch: &'b mut [u8; BUFFER_BYTES],
    ) -> Result<Option<&'b str>, RuntimeError> {
        if slot(self).is_none() {
            match self.open(name, false) {
                Ok(file) => *slot(self) = Some(OpenFile::new(file)),
                Err(_) if self.is_gone() => return Err(RuntimeError::Gone { key: self.key.clone() }),
                Err(_) => return Ok(None),
            }
        }
        let kept = slot(self).as_ref().expect("the file was opened above");
        match kept.read(scratch) {
            Ok(text) => Ok(Some(text)),
            Err(source) => Err(self.error("read", name, source)),
        }
    }

    fn block_bytes(&mut self, scratch: &mut [u8; BUFFER_BYTES]) -> Result<Option<u64>, RuntimeError> {
        let names: &[&str] = match self.version {
            Version::V2 => &["io.stat"],
            Version::V1 => &["blkio.throttle.io_service_bytes_recursive", "blkio.throttle.io_service_bytes"],
        };
        let version = self.version;
        let total = |text: &str| match version {
            Version::V2 => Some(file::io_stat_bytes(text)),
            Version::V1 => file::blkio_total_bytes(text),
        };
        for name in names {
            match self.hot(|g| &mut g.block, name, scratch) {
                Ok(text) if text.and_then(total).is_some() => return Ok(text.and_then(total)),
                Err(gone @ RuntimeError::Gone { .. }) => return Err(gone),
                // Block I/O is counted where the kernel counts it: the next file is tried.
                _ => self.block = None,
            }
        }
        Ok(None)
    }

    /// Whether any process is in the group or below it.
    pub fn is_populated(&self) -> Result<bool, RuntimeError> {
        if self.version == Version::V2 {
            let events = self.get("cgroup.events").map_err(|e| self.error("read", "cgroup.events", e))?;
            return Ok(file::keyed(&events, "populated") == Some(1));
        }
        if self.is_gone() {
            return Err(RuntimeError::Gone { key: self.key.clone() });
        }
        // Not `pids`: a process of another pid namespace counts although it has no number here.
        Ok(self.anchor().is_ok_and(|dir| has_processes(&dir.path)))
    }

    /// Every process in the group and below. Processes of another pid namespace (shown as 0) cannot be named and are
    /// left out.
    pub fn pids(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        if let Ok(dir) = self.anchor()
            && file::inode(&dir.path).is_ok_and(|inode| inode == dir.inode)
        {
            collect_pids(&dir.path, &mut pids);
        }
        pids
    }

    /// Kills every process in the group, also those that fork meanwhile, and waits up to [`KILL_PATIENCE`]
    /// until they are gone. `Ok(false)`: some are still there.
    pub fn kill(&self) -> Result<bool, RuntimeError> {
        let start = Instant::now();
        let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(50));
        while !self.kill_once()? {
            if start.elapsed() > KILL_PATIENCE {
                return Ok(false);
            }
            std::thread::sleep(pauses.next_pause());
        }
        Ok(true)
    }

    /// Sends SIGKILL to every process that is in the group now and returns at once. `Ok(true)`: the group was
    /// empty already.
    pub fn kill_once(&self) -> Result<bool, RuntimeError> {
        if self.is_gone() || !self.is_populated()? {
            return Ok(true);
        }
        self.signal_kill();
        Ok(false)
    }

    fn signal_kill(&self) {
        if self.put("cgroup.kill", "1").is_ok() {
            return;
        }
        // A frozen group cannot fork and its pids cannot be reused, so the list is complete.
        let freezer = match self.version {
            Version::V1 => ("freezer.state", "FROZEN", "THAWED"),
            Version::V2 => ("cgroup.freeze", "1", "0"),
        };
        let frozen = self.put(freezer.0, freezer.1).is_ok();
        for pid in self.pids() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
        if frozen {
            let _ = self.put(freezer.0, freezer.2);
        }
    }

    /// Removes the group if it is empty; `Ok(false)` if processes keep it. Groups the job made below go too.
    pub fn remove(&self) -> Result<bool, RuntimeError> {
        let mut removed = true;
        for dir in &self.dirs {
            if !file::inode(&dir.path).is_ok_and(|inode| inode == dir.inode) {
                continue;
            }
            match remove_tree(&dir.path) {
                Ok(()) => {}
                Err(e) if file::means_gone(&e) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EBUSY | libc::ENOTEMPTY)) => removed = false,
                Err(e) => return Err(self.error("remove", "cgroup.procs", e)),
            }
        }
        Ok(removed)
    }
}

fn make_dir(path: &Path) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => Ok(()),
    }
}

/// Gives the CPUs and memory nodes of one v1 cpuset to another: a v1 cpuset is born empty and then takes no task.
pub(super) fn copy_cpuset(from: &Path, to: &Path) -> io::Result<()> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let value = file::read(&from.join(name))?;
        if file::read(&to.join(name))?.is_empty() {
            file::write(&to.join(name), &value)?;
        }
    }
    Ok(())
}

/// Removes a group and the groups below it, deepest first. A cgroup's files go with it.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    std::fs::remove_dir(path)
}

fn has_processes(dir: &Path) -> bool {
    let here = file::read(&dir.join("cgroup.procs")).is_ok_and(|text| !text.is_empty());
    here || std::fs::read_dir(dir).is_ok_and(|entries| {
        entries.flatten().any(|e| e.file_type().is_ok_and(|t| t.is_dir()) && has_processes(&e.path()))
    })
}

fn collect_pids(dir: &Path, pids: &mut Vec<i32>) {
    let text = file::read(&dir.join("cgroup.procs")).unwrap_or_default();
    let own = std::process::id() as i32;
    // 0 would mean our own process group to kill(2), 1 is init: neither is ever a job's.
    pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|&pid| pid > 1 && pid != own));
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            collect_pids(&entry.path(), pids);
        }
    }
}
