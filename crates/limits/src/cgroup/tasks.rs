//! Groups of the tasks of one job, below the job's own group.
//!
//! **Problem.** The tasks of a job share what the job has. The kernel divides it among threads, so a task with many
//! threads gets more than one with few.
//!
//! **How.** Each task has a group of its own below the job's, with the controller `cpu` only: limits of the job stay on
//! the job's group, and hold for all tasks together. The program that starts the tasks makes the groups
//! ([`TaskGroups`]); it is in the job's group and may write there. On v2 a group with controlled groups below it has no
//! processes of its own, so that program moves into a group of its own, too. The daemon reads and weighs the groups
//! ([`TaskWeights`]). Both find them by name.
//!
//! **Properties.** Code that kills or removes the job's group finds the groups below it ([`super::Group`]). A job whose
//! group does not allow groups below it runs without them.

use super::file;
use super::group::GroupDir;
use super::hierarchy::Version;
use super::limits::{DEFAULT_SHARES_V1, DEFAULT_WEIGHT_V2, MAX_SHARES_V1, MAX_WEIGHT_V2, MIN_SHARES_V1};
use std::io;
use std::path::{Path, PathBuf};

/// The group of the program that starts the tasks, on v2.
const STARTER: &str = "gainshare-tasks";

/// The groups that the starting program makes.
#[derive(Debug)]
pub struct TaskGroups {
    version: Version,
    /// The job's own directories in which tasks get groups.
    dirs: Vec<PathBuf>,
    made: Vec<String>,
}

impl TaskGroups {
    /// `procs_files` are those of the job's group, in which this process is.
    pub fn open(procs_files: &[PathBuf]) -> io::Result<TaskGroups> {
        let dirs = procs_files.iter().filter_map(|file| file.parent());
        let dirs: Vec<PathBuf> = dirs.filter(|dir| counts_cpu(dir)).map(Path::to_owned).collect();
        let Some(first) = dirs.first() else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the job has no group with the cpu controller"));
        };
        let version = if first.join("cgroup.subtree_control").exists() { Version::V2 } else { Version::V1 };
        let groups = TaskGroups { version, dirs, made: Vec::new() };
        if version == Version::V2 {
            groups.enter_starter().inspect_err(|_| groups.leave_starter())?;
        }
        Ok(groups)
    }

    fn enter_starter(&self) -> io::Result<()> {
        let starter = self.dirs[0].join(STARTER);
        make_dir(&starter)?;
        file::write(&starter.join("cgroup.procs"), "0")?;
        file::write(&self.dirs[0].join("cgroup.subtree_control"), "+cpu")
    }

    fn leave_starter(&self) {
        let _ = file::write(&self.dirs[0].join("cgroup.subtree_control"), "-cpu");
        let _ = file::write(&self.dirs[0].join("cgroup.procs"), "0");
        let _ = std::fs::remove_dir(self.dirs[0].join(STARTER));
    }

    /// Makes the group of a task, or takes an existing one. Returns the files by which a process joins it.
    pub fn make(&mut self, name: &str) -> io::Result<Vec<PathBuf>> {
        for dir in &self.dirs {
            make_dir(&dir.join(name))?;
        }
        if !self.made.iter().any(|made| made == name) {
            self.made.push(name.to_owned());
        }
        Ok(self.dirs.iter().map(|dir| dir.join(name).join("cgroup.procs")).collect())
    }

    /// Removes all groups of tasks that are empty. What is left goes with the job's group.
    pub fn remove(&mut self) {
        for (name, dir) in self.made.iter().flat_map(|name| self.dirs.iter().map(move |dir| (name, dir))) {
            let _ = std::fs::remove_dir(dir.join(name));
        }
        self.made.clear();
        if self.version == Version::V2 {
            self.leave_starter();
        }
    }
}

/// The groups of tasks as the daemon sees them.
#[derive(Debug)]
pub struct TaskWeights {
    version: Version,
    dirs: Vec<PathBuf>,
}

impl TaskWeights {
    /// The groups below the group with these directories. `None` if it is gone, or was made again by another program.
    pub fn of(version: Version, dirs: &[GroupDir]) -> Option<TaskWeights> {
        let is_same = |dir: &GroupDir| file::inode(&dir.path).is_ok_and(|inode| inode == dir.inode);
        if dirs.is_empty() || !dirs.iter().all(is_same) {
            return None;
        }
        let dirs = dirs.iter().map(|dir| dir.path.clone()).filter(|dir| counts_cpu(dir)).collect();
        Some(TaskWeights { version, dirs })
    }

    fn read(&self, name: &str, file_name: &str) -> Option<String> {
        self.dirs.iter().find_map(|dir| file::read(&dir.join(name).join(file_name)).ok())
    }

    /// The CPU time of a task; `None` if it has no group.
    pub fn cpu_s(&self, name: &str) -> Option<f64> {
        match self.version {
            Version::V1 => Some(self.read(name, "cpuacct.usage")?.parse::<u64>().ok()? as f64 / 1e9),
            Version::V2 => Some(file::keyed(&self.read(name, "cpu.stat")?, "usage_usec")? as f64 / 1e6),
        }
    }

    /// The weight of a task, in units of an equal part.
    pub fn weight(&self, name: &str) -> Option<f64> {
        let (file_name, default) = self.unit();
        Some(self.read(name, file_name)?.parse::<u64>().ok()? as f64 / default as f64)
    }

    /// Sets the weight of a task, in units of an equal part.
    pub fn set_weight(&self, name: &str, weight: f64) -> io::Result<()> {
        let (file_name, default) = self.unit();
        let (least, most) = match self.version {
            Version::V1 => (MIN_SHARES_V1, MAX_SHARES_V1),
            Version::V2 => (1, MAX_WEIGHT_V2),
        };
        let value = ((weight * default as f64).round() as u64).clamp(least, most).to_string();
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let path = self.dirs.iter().map(|dir| dir.join(name).join(file_name)).find(|path| path.exists());
        file::write(&path.ok_or_else(missing)?, &value)
    }

    fn unit(&self) -> (&'static str, u64) {
        match self.version {
            Version::V1 => ("cpu.shares", DEFAULT_SHARES_V1),
            Version::V2 => ("cpu.weight", DEFAULT_WEIGHT_V2),
        }
    }
}

/// Whether the directory weighs or counts CPU time. On v1 these may be two.
fn counts_cpu(dir: &Path) -> bool {
    ["cpu.weight", "cpu.shares", "cpuacct.usage"].iter().any(|file| dir.join(file).exists())
}

fn make_dir(dir: &Path) -> io::Result<()> {
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::hierarchy::Controller;
    use super::*;

    /// A tree of plain files: what is written can be read, nothing else happens.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn v1_has_groups_where_cpu_is_weighed_and_counted() {
        let root = tree(&[
            ("cpu/job/cpu.shares", "1024\n"),
            ("cpuacct/job/cpuacct.usage", "0\n"),
            ("memory/job/memory.usage_in_bytes", "0\n"),
        ]);
        let dirs = ["cpu", "cpuacct", "memory"].map(|tree| root.path().join(tree).join("job"));
        let mut groups = TaskGroups::open(&dirs.clone().map(|dir| dir.join("cgroup.procs"))).unwrap();
        assert_eq!(
            groups.make("ps-0").unwrap(),
            [dirs[0].join("ps-0/cgroup.procs"), dirs[1].join("ps-0/cgroup.procs")]
        );
        assert!(!dirs[2].join("ps-0").exists());
        std::fs::write(dirs[0].join("ps-0/cpu.shares"), "1024\n").unwrap();
        std::fs::write(dirs[1].join("ps-0/cpuacct.usage"), "2500000000\n").unwrap();
        let of_job: Vec<GroupDir> = dirs
            .iter()
            .map(|path| GroupDir {
                path: path.clone(),
                inode: file::inode(path).unwrap(),
                controllers: vec![Controller::Cpu],
            })
            .collect();
        let weights = TaskWeights::of(Version::V1, &of_job).unwrap();
        assert_eq!(
            (weights.cpu_s("ps-0"), weights.weight("ps-0"), weights.weight("ps-1")),
            (Some(2.5), Some(1.0), None)
        );
        weights.set_weight("ps-0", 2.5).unwrap();
        assert_eq!(weights.weight("ps-0"), Some(2.5));
        weights.set_weight("ps-0", -1.0).unwrap();
        assert_eq!(std::fs::read_to_string(dirs[0].join("ps-0/cpu.shares")).unwrap(), "2");
        assert!(weights.set_weight("ps-9", 1.0).is_err());
        let other: Vec<GroupDir> = of_job.iter().map(|dir| GroupDir { inode: dir.inode + 1, ..dir.clone() }).collect();
        assert!(TaskWeights::of(Version::V1, &other).is_none(), "made again by another program");
        for (dir, file_name) in [(&dirs[0], "cpu.shares"), (&dirs[1], "cpuacct.usage")] {
            std::fs::remove_file(dir.join("ps-0").join(file_name)).unwrap();
        }
        groups.remove();
        assert!(!dirs[0].join("ps-0").exists() && !dirs[1].join("ps-0").exists());
    }

    #[test]
    fn v2_moves_the_starting_program_out_of_the_way() {
        let root = tree(&[
            ("job/cpu.weight", "100\n"),
            ("job/cgroup.subtree_control", ""),
            ("job/cgroup.procs", ""),
            ("job/gainshare-tasks/cgroup.procs", ""),
        ]);
        let job = root.path().join("job");
        let mut groups = TaskGroups::open(&[job.join("cgroup.procs")]).unwrap();
        assert_eq!(std::fs::read_to_string(job.join("gainshare-tasks/cgroup.procs")).unwrap(), "0");
        assert_eq!(std::fs::read_to_string(job.join("cgroup.subtree_control")).unwrap(), "+cpu");
        groups.make("worker-0").unwrap();
        std::fs::write(job.join("worker-0/cpu.stat"), "usage_usec 1500000\nuser_usec 1\n").unwrap();
        let dir = GroupDir { inode: file::inode(&job).unwrap(), path: job.clone(), controllers: vec![Controller::Cpu] };
        assert_eq!(TaskWeights::of(Version::V2, &[dir]).unwrap().cpu_s("worker-0"), Some(1.5));
        std::fs::remove_file(job.join("worker-0/cpu.stat")).unwrap();
        groups.remove();
        assert!(!job.join("worker-0").exists());
        assert_eq!(std::fs::read_to_string(job.join("cgroup.subtree_control")).unwrap(), "-cpu");
        assert_eq!(std::fs::read_to_string(job.join("cgroup.procs")).unwrap(), "0", "it is back in the job's group");
    }

    #[test]
    fn a_job_without_a_group_has_no_groups_of_tasks() {
        assert!(TaskGroups::open(&[]).is_err());
        let root = tree(&[("memory/job/memory.usage_in_bytes", "0")]);
        assert!(TaskGroups::open(&[root.path().join("memory/job/cgroup.procs")]).is_err());
        assert!(TaskWeights::of(Version::V2, &[]).is_none());
    }
}
