//! Control groups, v1 and v2: a thin layer over the kernel's files.
//!
//! **Problem.** Give every job a group of its own below one *base* group, write limits, read back what the kernel
//! made of them, read what was used, and never touch a group that is not ours, even if somebody removed ours and made
//! another one of the same name.
//!
//! **Approach.** A [`Hierarchy`] is the place where groups may be made: found by [`Hierarchy::detect`], or any
//! directory ([`Hierarchy::v1_at`], [`Hierarchy::v2_at`]) in tests. [`Base`] is our group in it, [`Group`] one job's
//! group below. On v1 a group is one directory in each controller's tree, on v2 a single directory. Files are named
//! as the kernel names them (`cpu.shares`, `memory.high`); the part before the dot says in which directory they are.
//! What a share means in these files is [`limits`]' business.
//!
//! **Properties.** A [`Group`] remembers the inode of each of its directories, and every access goes through a
//! directory that was checked against it: a group recreated by somebody else counts as gone. Making a group twice,
//! removing what is removed and killing an empty group are harmless.

mod base;
mod cpus;
mod detect;
pub(crate) mod file;
mod group;
pub mod limits;

pub use base::Base;
pub use base::machine_memory_bytes;
pub(crate) use base::own_affinity;
pub use cpus::CpuList;
#[cfg(feature = "docker")]
pub(crate) use detect::group_of;
pub(crate) use detect::in_topmost_cpu_group;
pub use group::{Group, GroupDir};

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

    /// The name in v2's `cgroup.controllers`, for those that must be enabled there.
    fn v2_name(self) -> Option<&'static str> {
        match self {
            Controller::BlockIo => Some("io"),
            Controller::CpuAcct | Controller::Freezer => None,
            other => Some(other.v1_name()),
        }
    }

    /// Which controller a file belongs to, by the part of its name before the dot.
    fn of_file(file: &str) -> Controller {
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

/// Where groups can be made. See the module documentation.
#[derive(Debug, Clone, PartialEq)]
pub struct Hierarchy {
    version: Version,
    /// The directory below which our base group goes, for each controller there is.
    parents: BTreeMap<Controller, PathBuf>,
    /// Whether we ourselves run in the parent: then our base group competes with single tasks, not with groups.
    among_tasks: bool,
}

impl Hierarchy {
    /// The hierarchy of this machine in which we may make groups.
    pub fn detect() -> Result<Hierarchy, RuntimeError> {
        detect::detect().map_err(RuntimeError::Unsupported)
    }

    /// A v1 tree with one directory for each controller below `root`.
    pub fn v1_at(root: &Path) -> Hierarchy {
        let parents =
            Controller::ALL.iter().map(|&c| (c, root.join(c.v1_name()))).filter(|(_, dir)| dir.is_dir()).collect();
        Hierarchy { version: Version::V1, parents, among_tasks: true }
    }

    /// A v2 tree, with our base group directly below `root`.
    pub fn v2_at(root: &Path) -> Hierarchy {
        let parents = Controller::ALL.iter().map(|&c| (c, root.to_owned())).collect();
        Hierarchy { version: Version::V2, parents, among_tasks: false }
    }

    pub fn version(&self) -> Version {
        self.version
    }

    /// The directory in which the base group of the cpu controller is made; for messages.
    pub fn parent(&self) -> &Path {
        &self.parents[&Controller::Cpu]
    }
}

/// Names go into paths: letters, digits, `.`, `_`, `-`, not more than a file name may have, and nothing the kernel
/// could take for one of its own files (they all have a dot after a word it knows, so a name may not start like
/// that).
fn check_name(name: &str) -> Result<(), RuntimeError> {
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
    fn files_know_their_controller() {
        assert_eq!(Controller::of_file("cpu.weight"), Controller::Cpu);
        assert_eq!(Controller::of_file("cpuset.cpus"), Controller::CpuSet);
        assert_eq!(Controller::of_file("io.bfq.weight"), Controller::BlockIo);
        assert_eq!(Controller::of_file("blkio.bfq.weight"), Controller::BlockIo);
        assert_eq!(Controller::of_file("cgroup.procs"), Controller::Cpu);
    }
}
