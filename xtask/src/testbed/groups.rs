//! The control groups of a test bed: where its nodes get their cores, and how every process of it is found again.
//!
//! Each test bed owns one group, `gainshare-testbed-NAME`, directly below the root of every hierarchy.
//! Below it lies one group per node (the kubelet's cgroup root, whose quota is the node's size) and
//! `system`, which holds the programs of the cluster themselves. A child process never leaves that tree on
//! its own, so killing what is in the tree ends the whole test bed, and nothing but the test bed, whatever
//! became of the files that name its processes.
//!
//! A node of one core has one processor, not a part of the time of several: where its threads ran side by
//! side on two, each would have half of the quota whatever its weight.
//!
//! Version 1 (a hierarchy for each controller) and version 2 (one for all) are both served.

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The period of every quota, in microseconds: the kernel's default.
const PERIOD_US: f64 = 100_000.0;
/// The group of the cluster's own programs.
const SYSTEM: &str = "system";

struct Hierarchy {
    root: PathBuf,
    kind: Kind,
}

#[derive(PartialEq)]
enum Kind {
    /// With its controllers, such as `cpu` or `name=systemd`.
    V1(Vec<String>),
    /// The one hierarchy with every controller.
    V2,
    /// Version 2 beside version 1, without controllers: engines put containers there too, so it needs cleaning.
    Beside,
}

impl Hierarchy {
    fn has(&self, controller: &str) -> bool {
        match &self.kind {
            Kind::V1(controllers) => controllers.iter().any(|c| c == controller),
            Kind::V2 => true,
            Kind::Beside => false,
        }
    }
}

/// The groups of one test bed.
pub(crate) struct Groups {
    name: String,
    hierarchies: Vec<Hierarchy>,
}

impl Groups {
    /// Finds the machine's hierarchies; makes nothing. `testbed` tells test beds apart, also those of
    /// different folders.
    pub(crate) fn of(testbed: &str) -> Result<Groups> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
        let hierarchies = hierarchies(&mounts);
        if !hierarchies.iter().any(|h| h.has("cpu")) {
            bail!("no cgroup hierarchy with the cpu controller is mounted: a node's cores cannot be limited here");
        }
        Ok(Groups { name: format!("gainshare-testbed-{testbed}"), hierarchies })
    }

    /// The kubelet's cgroup root of a node, as a path below the hierarchies.
    pub(crate) fn node_root(&self, node: &str) -> String {
        format!("/{}/{node}", self.name)
    }

    /// The folder of a node's files of one controller.
    pub(crate) fn node_dir(&self, node: &str, controller: &str) -> Result<PathBuf> {
        let hierarchy = self.hierarchies.iter().find(|h| h.has(controller));
        let hierarchy = hierarchy.with_context(|| format!("the cgroup controller {controller} is not mounted"))?;
        Ok(hierarchy.root.join(&self.name).join(node))
    }

    /// The hierarchy in which processes are followed. The kubelet puts containers into all of them; our own
    /// programs go into this one only, so that their memory stays charged to the process that started them.
    fn tracking(&self) -> &Hierarchy {
        let pids = self.hierarchies.iter().find(|h| h.has("pids"));
        pids.unwrap_or(&self.hierarchies[0])
    }

    /// The file a program of the cluster writes itself into before it starts.
    pub(crate) fn system_procs(&self) -> PathBuf {
        self.tracking().root.join(&self.name).join(SYSTEM).join("cgroup.procs")
    }

    /// The hierarchies in which we make groups ourselves.
    fn used(&self) -> impl Iterator<Item = &Hierarchy> {
        self.hierarchies.iter().filter(|h| h.kind != Kind::Beside)
    }

    /// Makes the groups of the cluster's programs.
    pub(crate) fn create(&self) -> Result<()> {
        for hierarchy in self.used() {
            let ours = hierarchy.root.join(&self.name);
            make(&ours)?;
            if hierarchy.kind == Kind::V2 {
                delegate(&hierarchy.root)?;
                delegate(&ours)?;
            } else if hierarchy.has("cpuset") {
                inherit_cpuset(&ours)?;
            }
        }
        make(&self.tracking().root.join(&self.name).join(SYSTEM))
    }

    /// Gives the pods of each node, named with its cores, processors of their own: what its kubelet has
    /// made below its root by now hands them on to every pod. The root itself keeps all processors, because
    /// a kubelet claims all when it starts, also the second time.
    pub(crate) fn deal_processors(&self, nodes: &[(&str, f64)]) -> Result<()> {
        let Some(hierarchy) = self.used().find(|h| h.has("cpuset")) else { return Ok(()) };
        let files = ["cpuset.cpus.effective", "cpuset.effective_cpus"].map(|file| hierarchy.root.join(file));
        let list = files.iter().find_map(|file| fs::read_to_string(file).ok());
        let processors = numbers(&list.context("the cpuset controller does not say which processors there are")?);
        if processors.is_empty() {
            return Ok(());
        }
        let dealt = deal(&processors, nodes.iter().map(|(_, cores)| *cores));
        for ((node, _), processors) in nodes.iter().zip(dealt) {
            let root = hierarchy.root.join(&self.name).join(node);
            let list: Vec<String> = processors.iter().map(u32::to_string).collect();
            let mut groups = Vec::new();
            walk(&root, &mut |group| groups.push(group.to_path_buf()));
            groups
                .iter()
                .filter(|group| **group != root)
                .try_for_each(|g| write(&g.join("cpuset.cpus"), &list.join(",")))?;
        }
        Ok(())
    }

    /// Whether the node's kubelet has made the groups in which its pods will be.
    pub(crate) fn has_pod_groups(&self, node: &str) -> bool {
        let qos = |root: &Path| root.join(&self.name).join(node).join("kubepods/burstable").exists();
        self.used().filter(|h| h.has("cpuset")).all(|h| qos(&h.root))
    }

    /// Makes the groups of a node of `cores` cores.
    pub(crate) fn create_node(&self, node: &str, cores: f64) -> Result<()> {
        for hierarchy in self.used() {
            let group = hierarchy.root.join(&self.name).join(node);
            make(&group)?;
            let v2 = hierarchy.kind == Kind::V2;
            if hierarchy.has("cpuset") && !v2 {
                inherit_cpuset(&group)?;
            }
            if hierarchy.has("cpu") {
                let quota = (cores * PERIOD_US).round() as u64;
                if v2 {
                    write(&group.join("cpu.max"), &format!("{quota} {PERIOD_US}"))?;
                } else {
                    write(&group.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
                    write(&group.join("cpu.cfs_quota_us"), &quota.to_string())?;
                }
            }
        }
        Ok(())
    }

    /// Every process of the test bed.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let mut found = Vec::new();
        for hierarchy in &self.hierarchies {
            walk(&hierarchy.root.join(&self.name), &mut |group| {
                let procs = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
                found.extend(procs.lines().filter_map(|pid| pid.parse::<i32>().ok()));
            });
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The groups that exist, deepest first.
    pub(crate) fn existing(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for hierarchy in &self.hierarchies {
            walk(&hierarchy.root.join(&self.name), &mut |group| found.push(group.to_path_buf()));
        }
        found
    }

    /// Kills every process of the test bed and removes its groups. `reap` is called between rounds: a dead
    /// child of ours stays in its group until its parent has read its status.
    pub(crate) fn destroy(&self, mut reap: impl FnMut()) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let processes = self.processes();
            for &pid in &processes {
                // The process may have ended by itself at this moment.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            reap();
            if processes.is_empty() {
                break;
            }
            if Instant::now() > deadline {
                bail!("processes {processes:?} of the test bed do not end after SIGKILL");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        loop {
            // Deepest first: a group with groups in it cannot be removed.
            let mut busy = None;
            for group in self.existing() {
                if fs::remove_dir(&group).is_err() && group.exists() {
                    busy = Some(group);
                }
            }
            let Some(busy) = busy else { return Ok(()) };
            if Instant::now() > deadline {
                bail!("the group {} cannot be removed", busy.display());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Deals processors to nodes of these sizes: each gets as many as it has cores, and those of which the
/// nodes before it use least.
fn deal(processors: &[u32], sizes: impl Iterator<Item = f64>) -> Vec<Vec<u32>> {
    let mut used = vec![0.0; processors.len()];
    let one = |cores: f64| {
        let count = (cores.ceil() as usize).clamp(1, processors.len());
        let mut places: Vec<usize> = (0..processors.len()).collect();
        places.sort_by(|&a, &b| f64::total_cmp(&used[a], &used[b]));
        places.truncate(count);
        places.iter().for_each(|&place| used[place] += cores / count as f64);
        places.sort_unstable();
        places.iter().map(|&place| processors[place]).collect()
    };
    sizes.map(one).collect()
}

/// The kernel's lists: `0-3,8`.
pub(crate) fn numbers(list: &str) -> Vec<u32> {
    let parts = list.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
    });
    parts.flatten().collect()
}

fn hierarchies(mounts: &str) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    let mut unified = None;
    for line in mounts.lines() {
        let mut words = line.split(' ').skip(1);
        let (Some(root), Some(kind), Some(options)) = (words.next(), words.next(), words.next()) else { continue };
        let root = PathBuf::from(root);
        match kind {
            "cgroup" => {
                let flags = ["rw", "ro", "nosuid", "nodev", "noexec", "relatime", "xattr", "clone_children"];
                let controllers: Vec<String> = options
                    .split(',')
                    .filter(|o| !flags.contains(o) && !o.contains("_agent="))
                    .map(Into::into)
                    .collect();
                // A hierarchy mounted twice is one hierarchy.
                let kind = Kind::V1(controllers);
                if !found.iter().any(|h| h.kind == kind) {
                    found.push(Hierarchy { root, kind });
                }
            }
            "cgroup2" if unified.is_none() => unified = Some(root),
            _ => {}
        }
    }
    let v1 = found.iter().any(|h| h.has("cpu"));
    if !v1 {
        found.clear();
    }
    found.extend(unified.map(|root| Hierarchy { root, kind: if v1 { Kind::Beside } else { Kind::V2 } }));
    found
}

fn walk(group: &Path, visit: &mut dyn FnMut(&Path)) {
    let Ok(entries) = fs::read_dir(group) else { return };
    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        walk(&entry.path(), visit);
    }
    visit(group);
}

fn make(group: &Path) -> Result<()> {
    fs::create_dir_all(group).with_context(|| format!("cannot make the group {}: this needs root", group.display()))
}

fn write(file: &Path, value: &str) -> Result<()> {
    fs::write(file, value).with_context(|| format!("cannot write {value} to {}", file.display()))
}

/// A new group of version 1 has no processors and no memory nodes until they are set.
fn inherit_cpuset(group: &Path) -> Result<()> {
    let parent = group.parent().context("a group has a parent")?;
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let of_parent = fs::read_to_string(parent.join(file))
            .with_context(|| format!("cannot read {}", parent.join(file).display()))?;
        write(&group.join(file), of_parent.trim())?;
    }
    Ok(())
}

/// Hands every controller that a group of version 2 has to the groups below it.
fn delegate(group: &Path) -> Result<()> {
    let controllers = fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    for controller in controllers.split_whitespace() {
        // One that cannot be handed on (for example because a real-time process uses it) must not spoil the others.
        let _ = fs::write(group.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    let handed = fs::read_to_string(group.join("cgroup.subtree_control")).unwrap_or_default();
    if !handed.split_whitespace().any(|c| c == "cpu") {
        bail!("{} does not hand on the cpu controller: no node can be limited", group.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_get_whole_processors_and_those_least_used() {
        let sizes = |sizes: &[f64]| deal(&[0, 1, 4, 5], sizes.iter().copied());
        assert_eq!(sizes(&[1.0, 0.6, 0.5]), [vec![0], vec![1], vec![4]]);
        assert_eq!(sizes(&[1.5, 4.0, 9.0]), [vec![0, 1], vec![0, 1, 4, 5], vec![0, 1, 4, 5]]);
        assert_eq!(deal(&[0, 1], [0.5, 0.5, 0.5].into_iter()), [vec![0], vec![1], vec![0]]);
        assert_eq!(numbers("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(numbers("\n"), [0_u32; 0]);
    }

    #[test]
    fn version_1_beats_an_empty_unified_hierarchy() {
        let found = hierarchies(
            "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
             cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,relatime,cpu,cpuacct 0 0\n\
             cgroup /sys/fs/cgroup/systemd cgroup rw,xattr,release_agent=/x,name=systemd 0 0\n\
             cgroup /elsewhere cgroup rw,cpu,cpuacct 0 0\n\
             cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n",
        );
        let roots: Vec<_> = found.iter().map(|h| h.root.to_str().unwrap()).collect();
        assert_eq!(roots, ["/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"]);
        assert!(found[0].has("cpu") && found[0].has("cpuacct") && !found[1].has("cpu"));
        assert!(found[1].kind == Kind::V1(vec!["name=systemd".to_owned()]));
        assert!(found[2].kind == Kind::Beside && !found[2].has("cpu"));
    }

    #[test]
    fn version_2_alone() {
        let found = hierarchies("cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n");
        assert!(matches!(found.as_slice(), [h] if h.kind == Kind::V2 && h.has("cpu") && h.has("pids")));
    }
}
