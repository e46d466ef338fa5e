//! The base group: ours, below which every job has a group.
//!
//! It carries no limit of its own. It tells what the machine has for the jobs (CPUs and memory that limits above us
//! leave), which block-I/O file the kernel has, and it keeps the jobs from losing against the rest of the machine by
//! being in a group at all: a group competes with a single task as an equal, so where the neighbours are tasks the
//! base weighs as many tasks as it has jobs.

use super::group::remove_tree;
use super::{Controller, CpuList, Group, Hierarchy, Version, check_name, file, limits};
use crate::{Capacity, RuntimeError};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct Base {
    hierarchy: Hierarchy,
    name: String,
    dirs: BTreeMap<Controller, PathBuf>,
    /// In the order in which neighbours should be dealt out: packages, cores, then hardware threads.
    cpus: Vec<u32>,
    capacity: Capacity,
    block_weight: Option<&'static str>,
    block_note: Option<String>,
}

impl Base {
    /// Makes the base group, or takes the one of this name that is there.
    pub fn open(hierarchy: Hierarchy, name: &str) -> Result<Base, RuntimeError> {
        check_name(name)?;
        let mut base = Base {
            hierarchy,
            name: name.to_owned(),
            dirs: BTreeMap::new(),
            cpus: Vec::new(),
            capacity: Capacity { cores: 1.0, memory_bytes: 0 },
            block_weight: None,
            block_note: None,
        };
        base.make()?;
        base.refresh();
        Ok(base)
    }

    pub fn version(&self) -> Version {
        self.hierarchy.version
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The CPUs jobs may use, neighbours next to each other.
    pub fn cpus(&self) -> &[u32] {
        &self.cpus
    }

    pub fn has(&self, controller: Controller) -> bool {
        self.dirs.contains_key(&controller)
    }

    /// The file that carries a group's block-I/O weight, if this kernel has one.
    pub fn block_weight_file(&self) -> Option<&'static str> {
        self.block_weight
    }

    /// Why block I/O cannot be shared by weight here, if so.
    pub fn block_note(&self) -> Option<&str> {
        self.block_note.as_deref()
    }

    pub(super) fn dirs(&self) -> &BTreeMap<Controller, PathBuf> {
        &self.dirs
    }

    /// Makes the group of a new job. Somebody may have removed our empty base meanwhile, so it is made again if needed.
    pub fn create(&mut self, name: &str) -> Result<Group, RuntimeError> {
        check_name(name)?;
        if !self.dirs.values().all(|dir| dir.is_dir()) {
            self.make()?;
        }
        Group::create(self, name)
    }

    /// Asks anew what the machine has for us: somebody may have changed a limit above us.
    pub fn refresh(&mut self) {
        let cpus = self.usable_cpus();
        let mut cores = cpus.len().max(1) as f64;
        if let Some(dir) = self.hierarchy.parents.get(&Controller::Cpu) {
            for above in dir.ancestors() {
                match quota_cores(self.hierarchy.version, above) {
                    Some(limit) => cores = cores.min(limit),
                    None if !above.join("cgroup.procs").exists() => break,
                    None => {}
                }
            }
        }
        self.cpus = by_topology(&cpus);
        self.capacity = Capacity { cores, memory_bytes: self.usable_memory() };
    }

    fn usable_cpus(&self) -> CpuList {
        let files: &[&str] = match self.hierarchy.version {
            Version::V1 => &["cpuset.effective_cpus", "cpuset.cpus"],
            Version::V2 => &["cpuset.cpus.effective"],
        };
        let of_group = self.dirs.get(&Controller::CpuSet).and_then(|dir| {
            files.iter().find_map(|f| CpuList::parse(&file::read(&dir.join(f)).ok()?).filter(|l| !l.is_empty()))
        });
        of_group.unwrap_or_else(own_affinity)
    }

    fn usable_memory(&self) -> u64 {
        let mut bytes = machine_memory_bytes();
        let Some(dir) = self.dirs.get(&Controller::Memory) else { return bytes };
        match self.hierarchy.version {
            Version::V1 => {
                let stat = file::read(&dir.join("memory.stat")).unwrap_or_default();
                if let Some(limit) = file::keyed(&stat, "hierarchical_memory_limit") {
                    bytes = bytes.min(limit);
                }
            }
            Version::V2 => {
                for above in dir.ancestors().take_while(|d| d.join("cgroup.procs").exists()) {
                    let limit = file::read(&above.join("memory.max")).ok().and_then(|t| t.parse().ok());
                    bytes = bytes.min(limit.unwrap_or(u64::MAX));
                }
            }
        }
        bytes
    }

    fn make(&mut self) -> Result<(), RuntimeError> {
        self.dirs = match self.hierarchy.version {
            Version::V1 => self.make_v1()?,
            Version::V2 => self.make_v2()?,
        };
        (self.block_weight, self.block_note) = self.find_block_weight();
        Ok(())
    }

    fn make_v1(&self) -> Result<BTreeMap<Controller, PathBuf>, RuntimeError> {
        let mut dirs = BTreeMap::new();
        for (&controller, parent) in &self.hierarchy.parents {
            let dir = parent.join(&self.name);
            match make_dir(&dir) {
                Ok(()) => {}
                Err(error) if controller == Controller::Cpu => return Err(error),
                Err(_) => continue,
            }
            // A v1 cpuset is born empty and then takes no task.
            if controller == Controller::CpuSet && copy_cpuset(parent, &dir).is_err() {
                let _ = std::fs::remove_dir(&dir);
                continue;
            }
            dirs.insert(controller, dir);
        }
        Ok(dirs)
    }

    fn make_v2(&self) -> Result<BTreeMap<Controller, PathBuf>, RuntimeError> {
        let parent = self.hierarchy.parent();
        let dir = parent.join(&self.name);
        enable_controllers(parent);
        make_dir(&dir)?;
        enable_controllers(&dir);
        let enabled = file::read(&dir.join("cgroup.subtree_control")).unwrap_or_default();
        let dirs: BTreeMap<_, _> = Controller::ALL
            .iter()
            .filter(|c| c.v2_name().is_none_or(|name| enabled.split_ascii_whitespace().any(|e| e == name)))
            .map(|&c| (c, dir.clone()))
            .collect();
        if !dirs.contains_key(&Controller::Cpu) {
            return Err(RuntimeError::Unsupported(format!(
                "the cpu controller cannot be enabled in {}; run `echo +cpu > {}` \
                 or start in a delegated systemd scope",
                dir.display(),
                parent.join("cgroup.subtree_control").display()
            )));
        }
        Ok(dirs)
    }

    fn find_block_weight(&self) -> (Option<&'static str>, Option<String>) {
        let candidates: &[&'static str] = match self.hierarchy.version {
            Version::V1 => &["blkio.bfq.weight", "blkio.weight"],
            Version::V2 => &["io.bfq.weight", "io.weight"],
        };
        let dir = self.dirs.get(&Controller::BlockIo);
        let Some(found) = candidates.iter().find(|f| dir.is_some_and(|d| d.join(f).exists())) else {
            return (None, Some("block I/O has no weight here: the kernel offers none to this group".into()));
        };
        let idle = match *found {
            "io.weight" if !self.cost_controller_is_on() => {
                Some("the kernel's I/O cost controller is off (io.cost.qos)")
            }
            "io.weight" | "blkio.weight" => None,
            _ if some_disk_uses_bfq() => None,
            _ => Some("no disk uses the bfq scheduler"),
        };
        let note = idle.map(|why| format!("{found} is set but has no effect now: {why}"));
        (Some(found), note)
    }

    /// v2's `io.weight` works only where the cost controller was enabled for a disk, in the topmost group.
    fn cost_controller_is_on(&self) -> bool {
        let top = self.hierarchy.parent().ancestors().take_while(|d| d.join("cgroup.procs").exists()).last();
        top.is_some_and(|dir| file::read(&dir.join("io.cost.qos")).is_ok_and(|text| text.contains("enable=1")))
    }

    /// Lets the base weigh as much as its jobs would weigh as plain tasks, where plain tasks are its neighbours.
    pub fn weigh_for(&self, jobs: usize) {
        let Some(dir) = self.dirs.get(&Controller::Cpu).filter(|_| self.hierarchy.among_tasks) else { return };
        let jobs = jobs.max(1) as u64;
        let (name, value) = match self.hierarchy.version {
            Version::V1 => ("cpu.shares", (limits::DEFAULT_SHARES_V1 * jobs).min(limits::MOST_SHARES_V1)),
            Version::V2 => ("cpu.weight", (limits::DEFAULT_WEIGHT_V2 * jobs).min(10_000)),
        };
        let path = dir.join(name);
        let value = value.to_string();
        // Without it the jobs are only slower against the rest of the machine: not worth failing for.
        if file::read(&path).is_ok_and(|now| now != value) {
            let _ = file::write(&path, &value);
        }
    }

    /// Lets reclaim spare the jobs' memory up to `bytes` (v2's protection counts only if every group above grants it
    /// too).
    pub fn protect_memory(&self, bytes: u64) {
        if let (Version::V2, Some(dir)) = (self.hierarchy.version, self.dirs.get(&Controller::Memory)) {
            let _ = file::write(&dir.join("memory.low"), &bytes.to_string());
        }
    }

    /// The names of the groups below the base, whoever made them.
    pub fn group_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .dirs
            .values()
            .filter_map(|dir| std::fs::read_dir(dir).ok())
            .flatten()
            .filter_map(|entry| {
                let entry = entry.ok()?;
                entry.file_type().ok()?.is_dir().then(|| entry.file_name().into_string().ok())?
            })
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// Removes a group of this name below the base if no process is in it.
    pub fn remove_if_empty(&self, name: &str) {
        for dir in self.dirs.values() {
            let _ = remove_tree(&dir.join(name));
        }
    }

    /// Removes the base if it is empty; a base with jobs stays.
    pub fn remove(&self) {
        for dir in self.dirs.values() {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

fn make_dir(dir: &Path) -> Result<(), RuntimeError> {
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(RuntimeError::Io {
            action: "make the group",
            path: dir.display().to_string(),
            source: e,
            hint: "; run as root or in a delegated subtree",
        }),
        _ => Ok(()),
    }
}

/// Gives the CPUs and memory nodes of one v1 cpuset to another.
pub(super) fn copy_cpuset(from: &Path, to: &Path) -> std::io::Result<()> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let value = file::read(&from.join(name))?;
        if file::read(&to.join(name))?.is_empty() {
            file::write(&to.join(name), &value)?;
        }
    }
    Ok(())
}

/// Each controller by itself: one that is missing must not keep the others out.
fn enable_controllers(dir: &Path) {
    for name in Controller::ALL.iter().filter_map(|c| c.v2_name()) {
        let _ = file::write(&dir.join("cgroup.subtree_control"), &format!("+{name}"));
    }
}

fn quota_cores(version: Version, dir: &Path) -> Option<f64> {
    let (quota, period): (f64, f64) = match version {
        Version::V1 => (
            file::read(&dir.join("cpu.cfs_quota_us")).ok()?.parse().ok()?,
            file::read(&dir.join("cpu.cfs_period_us")).ok()?.parse().ok()?,
        ),
        Version::V2 => {
            let text = file::read(&dir.join("cpu.max")).ok()?;
            let (quota, period) = text.split_once(' ')?;
            (quota.parse().ok()?, period.parse().ok()?)
        }
    };
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

/// The CPUs this process may run on.
pub(crate) fn own_affinity() -> CpuList {
    let Ok(set) = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)) else { return CpuList::new(vec![0]) };
    (0..nix::sched::CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).map(|cpu| cpu as u32).collect()
}

pub fn machine_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        text.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Sorts so that hardware threads of one core, then cores of one package, are next to each other.
fn by_topology(cpus: &CpuList) -> Vec<u32> {
    let place = |cpu: u32, what: &str| -> i64 {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/{what}");
        std::fs::read_to_string(path).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(cpu.into())
    };
    let mut sorted: Vec<u32> = cpus.iter().collect();
    sorted.sort_by_cached_key(|&cpu| (place(cpu, "physical_package_id"), place(cpu, "core_id"), cpu));
    sorted
}

fn some_disk_uses_bfq() -> bool {
    let Ok(disks) = std::fs::read_dir("/sys/block") else { return false };
    disks
        .filter_map(|disk| std::fs::read_to_string(disk.ok()?.path().join("queue/scheduler")).ok())
        .any(|text| text.contains("[bfq]"))
}
