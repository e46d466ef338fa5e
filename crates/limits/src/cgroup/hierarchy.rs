//! Where control groups can be made: version, controllers, directories; and which names a group may have.

use crate::RuntimeError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Version {
    V1,
    V2,
}

/// The controllers we use. On v2 `CpuAcct` is part of `Cpu`, and `Freezer` belongs to every group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Controller {
    Cpu,
    CpuAcct,
    CpuSet,
    Memory,
    BlockIo,
    Pids,
    Freezer,
}

impl Controller {
    pub const ALL: [Controller; 7] = [
        Controller::Cpu,
        Controller::CpuAcct,
        Controller::CpuSet,
        Controller::Memory,
        Controller::BlockIo,
        Controller::Pids,
        Controller::Freezer,
    ];

    /// The name of its tree on v1.
    pub fn v1_name(self) -> &'static str {
        match self {
            Controller::Cpu => "cpu",
            Controller::CpuAcct => "cpuacct",
            Controller::CpuSet => "cpuset",
            Controller::Memory => "memory",
            Controller::BlockIo => "blkio",
            Controller::Pids => "pids",
            Controller::Freezer => "freezer",
        }
    }

    /// The name in v2's `cgroup.controllers`, for the controllers that must be enabled there.
    pub(super) fn v2_name(self) -> Option<&'static str> {
        match self {
            Controller::BlockIo => Some("io"),
            Controller::CpuAcct | Controller::Freezer => None,
            other => Some(other.v1_name()),
        }
    }

    /// Which controller a file belongs to, by the part of its name before the dot.
    pub(super) fn of_file(file: &str) -> Controller {
        match file.split('.').next().unwrap_or_default() {
            "cpuacct" => Controller::CpuAcct,
            "cpuset" => Controller::CpuSet,
            "memory" => Controller::Memory,
            "blkio" | "io" => Controller::BlockIo,
            "pids" => Controller::Pids,
            "freezer" => Controller::Freezer,
            _ => Controller::Cpu,
        }
    }
}

/// The directories in which groups can be made. `Hierarchy::detect` finds those of a real machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Hierarchy {
    /// The directory below which this machine's `proc` and `sys` lie.
    pub(super) root: PathBuf,
    pub(super) version: Version,
    /// The directory below which our base group goes, for each controller there is.
    pub(super) parents: BTreeMap<Controller, PathBuf>,
    /// Whether this process runs in the parent itself: then the base group competes with single tasks, not
    /// with groups.
    pub(super) among_tasks: bool,
}

impl Hierarchy {
    /// A v1 tree with one directory for each controller below `root/sys/fs/cgroup`, without asking `/proc/self`.
    pub fn v1_at(root: &Path) -> Hierarchy {
        let tree = |c: Controller| root.join("sys/fs/cgroup").join(c.v1_name());
        let parents = Controller::ALL.iter().map(|&c| (c, tree(c))).filter(|(_, dir)| dir.is_dir()).collect();
        Hierarchy { root: root.to_owned(), version: Version::V1, parents, among_tasks: true }
    }

    /// A v2 tree at `root/sys/fs/cgroup`, without asking `/proc/self`.
    pub fn v2_at(root: &Path) -> Hierarchy {
        let parents = Controller::ALL.iter().map(|&c| (c, root.join("sys/fs/cgroup"))).collect();
        Hierarchy { root: root.to_owned(), version: Version::V2, parents, among_tasks: false }
    }

    pub fn version(&self) -> Version {
        self.version
    }

    /// The directory in which the base group of the cpu controller is made.
    pub fn parent(&self) -> &Path {
        self.parents.get(&Controller::Cpu).map_or(Path::new(""), PathBuf::as_path)
    }
}

/// Group names become paths: letters, digits, `.`, `_`, `-`, at most 200 of them, and nothing that the kernel
/// could name one of its own files. All of those are a word the kernel knows followed by a dot, so a name may
/// not begin like that.
pub(super) fn check_name(name: &str) -> Result<(), RuntimeError> {
    let known = [
        "cgroup", "cpu", "cpuacct", "cpuset", "memory", "blkio", "io", "pids", "freezer", "hugetlb", "misc", "rdma",
        "irq",
    ];
    let fine = !name.is_empty()
        && name.len() <= 200
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        && !name.starts_with('.')
        && !known.iter().any(|k| name.strip_prefix(k).is_some_and(|rest| rest.starts_with('.')))
        && !["tasks", "notify_on_release", "release_agent"].contains(&name);
    if fine {
        return Ok(());
    }
    Err(RuntimeError::Unsupported(format!(
        "{name:?} cannot name a cgroup; use letters, digits, `-`, `_` and `.`, at most 200, not starting with a dot"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_base_group_or_hide_a_kernel_file() {
        for good in ["job-1.2", "a", "vae_1", "cpu", "io-bound"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a b", "cpu.weight", "cgroup.procs", "tasks", "é", &"x".repeat(201)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn files_have_their_controller() {
        assert_eq!(Controller::of_file("cpu.weight"), Controller::Cpu);
        assert_eq!(Controller::of_file("cpuset.cpus"), Controller::CpuSet);
        assert_eq!(Controller::of_file("io.bfq.weight"), Controller::BlockIo);
        assert_eq!(Controller::of_file("blkio.bfq.weight"), Controller::BlockIo);
        assert_eq!(Controller::of_file("cgroup.procs"), Controller::Cpu);
    }
}
