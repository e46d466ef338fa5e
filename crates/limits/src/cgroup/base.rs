//! The base group: ours, below which every job has a group.
//!
//! The base carries no limit of its own. From it come the CPUs and the memory that limits above leave for the
//! jobs, and the name of the block-I/O file this kernel has. It also keeps grouping itself from costing CPU
//! time: a group competes with a single task as an equal, so where the base's neighbours are tasks, the base
//! weighs as many tasks as it has jobs.

use super::group::{Group, copy_cpuset, remove_tree};
use super::hierarchy::{Controller, Hierarchy, Version, check_name};
use super::{file, limits};
use crate::cpus::CpuList;
use crate::{Capacity, RuntimeError, machine};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct BaseGroup {
    hierarchy: Hierarchy,
    name: String,
    dirs: BTreeMap<Controller, PathBuf>,
    /// In the order in which they are dealt out: by memory node, package, cache, core, then hardware thread.
    cpus: Vec<u32>,
    capacity: Capacity,
    block_weight: Option<&'static str>,
    block_note: Option<String>,
}

impl BaseGroup {
    /// Makes the base group, or takes an existing one of this name.
    pub fn open(hierarchy: Hierarchy, name: &str) -> Result<BaseGroup, RuntimeError> {
        check_name(name)?;
        let mut base = BaseGroup {
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

    /// Whether groups can yield to all others by `cpu.idle`.
    pub fn has_cpu_idle(&self) -> bool {
        self.dirs.get(&Controller::Cpu).is_some_and(|dir| dir.join("cpu.idle").exists())
    }

    /// The file that carries a group's block-I/O weight, if this kernel has one.
    pub fn block_weight_file(&self) -> Option<&'static str> {
        self.block_weight
    }

    /// Why block I/O cannot be shared by weight here, if so.
    pub fn block_note(&self) -> Option<&str> {
        self.block_note.as_deref()
    }

    /// Makes the group of a new job. The base itself is made again if another program removed it while it was empty.
    pub fn create(&mut self, name: &str) -> Result<Group, RuntimeError> {
        check_name(name)?;
        if !self.dirs.values().all(|dir| dir.is_dir()) {
            self.make()?;
        }
        Group::create(self.hierarchy.version, &self.dirs, name)
    }

    /// Reads again what limits above the base leave for the jobs: they may have changed.
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
        self.cpus = machine::by_topology(&self.hierarchy.root, &cpus);
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
        of_group.unwrap_or_else(machine::own_affinity)
    }

    fn usable_memory(&self) -> u64 {
        let mut bytes = machine::memory_bytes(&self.hierarchy.root);
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
            _ if machine::some_disk_uses_bfq(&self.hierarchy.root) => None,
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

    /// Gives the base the weight that its jobs would have as plain tasks, where plain tasks are its neighbours.
    pub fn set_weight_for(&self, jobs: usize) {
        let Some(dir) = self.dirs.get(&Controller::Cpu).filter(|_| self.hierarchy.among_tasks) else { return };
        let jobs = jobs.max(1) as u64;
        let (name, value) = match self.hierarchy.version {
            Version::V1 => ("cpu.shares", limits::DEFAULT_SHARES_V1.saturating_mul(jobs).min(limits::MAX_SHARES_V1)),
            Version::V2 => ("cpu.weight", limits::DEFAULT_WEIGHT_V2.saturating_mul(jobs).min(limits::MAX_WEIGHT_V2)),
        };
        let path = dir.join(name);
        let value = value.to_string();
        // Without it the jobs are only slower against the rest of the machine: not worth failing for.
        if file::read(&path).is_ok_and(|now| now != value) {
            let _ = file::write(&path, &value);
        }
    }

    /// Protects the jobs' memory from reclaim up to `bytes` (v2's protection counts only if every group above
    /// grants it too).
    pub fn protect_memory(&self, bytes: u64) {
        if let (Version::V2, Some(dir)) = (self.hierarchy.version, self.dirs.get(&Controller::Memory)) {
            let _ = file::write(&dir.join("memory.low"), &bytes.to_string());
        }
    }

    /// The names of all groups below the base, also of those that another program made.
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

/// Enables the controllers that are not enabled yet, each by itself: a missing one must not keep the others out.
fn enable_controllers(dir: &Path) {
    let path = dir.join("cgroup.subtree_control");
    let enabled = file::read(&path).unwrap_or_default();
    for name in Controller::ALL.iter().filter_map(|c| c.v2_name()) {
        if !enabled.split_ascii_whitespace().any(|e| e == name) {
            let _ = file::write(&path, &format!("+{name}"));
        }
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
