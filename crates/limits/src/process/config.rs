//! What the process runtime is given, and what it hands out for the journal.

#[cfg(feature = "fallback")]
use std::ffi::OsString;

use crate::cgroup::{CpuList, GroupDir, Version};
use crate::{JobHandle, LimitMode, machine};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The settings of a `ProcessRuntime`.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name of the base group: one for each daemon, so that two of them never share a group.
    pub base: String,
    pub mode: LimitMode,
    /// The CPUs that jobs may use; `None`: all that the base group has.
    pub cpus: Option<CpuList>,
    /// The largest number of processes and threads of one job; contains a fork bomb. `None`: as many as the
    /// machine allows.
    pub max_tasks: Option<u32>,
    /// The command that runs `keeper::run` and nothing else. Only the fallback uses it; without it the
    /// fallback cannot share the CPU.
    #[cfg(feature = "fallback")]
    pub keeper: Option<Vec<OsString>>,
}

impl Config {
    pub fn new(base: impl Into<String>) -> Config {
        Config {
            base: base.into(),
            mode: LimitMode::default(),
            cpus: None,
            max_tasks: Some(machine::default_max_tasks()),
            #[cfg(feature = "fallback")]
            keeper: None,
        }
    }
}

/// All that is needed to find a job's group again; goes into the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGroup {
    pub handle: JobHandle,
    /// `None` on a machine without cgroup rights.
    pub version: Option<Version>,
    pub dirs: Vec<GroupDir>,
    /// The child writes `0` into each of these before exec. Empty without cgroup rights.
    pub procs_files: Vec<PathBuf>,
}
