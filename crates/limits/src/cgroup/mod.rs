//! Control groups, v1 and v2: a thin layer over the kernel's files.
//!
//! **Problem.** Give every job a group of its own below one *base* group, write limits, read back what the
//! kernel made of them, read what was used, and never touch a group that is not ours, even if another program
//! removed ours and made a group of the same name.
//!
//! **Approach.** A [`Hierarchy`] names the directories in which groups may be made: found by
//! [`Hierarchy::detect`], or given ([`Hierarchy::v1_at`], [`Hierarchy::v2_at`]) as in the unit tests on a
//! temporary tree (`tests/cgroup_tree.rs`). [`BaseGroup`] is our group in it, [`Group`] one job's group
//! below. On v1 a group is one directory in each controller's tree, on v2 a single directory. Files are named
//! as the kernel names them (`cpu.shares`, `memory.high`); the part before the dot names the controller and
//! so the directory. [`limits`] translates shares into values of these files.
//!
//! **Properties.** A [`Group`] keeps the inode of each of its directories, and every access goes through a
//! directory that was checked against it: a group that another program made again counts as gone. Making a
//! group twice, removing a removed group and killing an empty group do nothing.
//!
//! **Imports** go one way: `hierarchy`, `file` ← `detect`, `group` ← `limits` ← `base`, `tasks`.

mod base;
mod detect;
pub(crate) mod file;
mod group;
mod hierarchy;
pub mod limits;
mod tasks;

pub use crate::cpus::CpuList;
pub use base::BaseGroup;
#[cfg(feature = "docker")]
pub(crate) use detect::group_of;
#[cfg(feature = "fallback")]
pub(crate) use detect::in_topmost_cpu_group;
pub use group::{Group, GroupDir};
pub use hierarchy::{Controller, Hierarchy, Version};
pub use tasks::{TaskGroups, TaskWeights};
