//! Finds the control group of a pod by its uid, and reads which CPU limits the kubelet has put in force there.
//!
//! **Problem.** The path of a pod's group depends on the kubelet's cgroup driver, on the pod's QoS class, on
//! the cgroup version and on the group in which the kubelet itself runs: `kubepods/burstable/podUID` (cgroupfs),
//! `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podUID.slice` with the dashes of the uid as
//! underscores (systemd), either of them below any other group (nodes in containers, our test bed).
//!
//! **How.** A uid is unique, so the tree is searched for a directory that is named after it. On v1 the
//! `cpu` tree is searched, and the path is the same in the trees of the other controllers. One walk searches for
//! all pods whose group is missing. A group is kept until it is gone.
//!
//! **Properties.** Nothing is written. A walk reads at most [`MAX_GROUPS`] directories and follows no link.

use gainshare_core::model::{Span, Time};
use gainshare_kube_api::names::PodUid;
use gainshare_limits::cgroup::{Controller, Group, GroupDir, Version};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A machine with a thousand pods has some ten thousand groups in one tree.
const MAX_GROUPS: usize = 100_000;

/// No kubelet nests its pods deeper, not even one in a container in a container.
const MAX_DEPTH: usize = 12;

/// The directories of the controllers, in which pods are searched.
#[derive(Debug)]
pub(crate) struct PodGroups {
    version: Version,
    /// One directory for each controller; on v2 all are the same.
    trees: BTreeMap<Controller, PathBuf>,
}

/// Why control groups cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("{path} has no cgroup hierarchy with a cpu controller: mount the host's /sys/fs/cgroup there, read-only")]
    NoHierarchy { path: String },
}

impl PodGroups {
    /// `root` is the place where the host's `/sys/fs/cgroup` is mounted.
    pub(crate) fn at(root: &Path) -> Result<PodGroups, CgroupError> {
        let controllers = std::fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        if controllers.split_ascii_whitespace().any(|c| c == "cpu") {
            let trees = Controller::ALL.iter().map(|c| (*c, root.to_owned())).collect();
            return Ok(PodGroups { version: Version::V2, trees });
        }
        let mut trees = BTreeMap::new();
        for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
            // `cpu` and `cpuacct` may be links to `cpu,cpuacct`.
            if !entry.file_type().is_ok_and(|t| t.is_dir()) {
                continue;
            }
            let name = entry.file_name();
            for word in name.to_str().unwrap_or_default().split(',') {
                let controller = Controller::ALL.iter().find(|c| c.v1_name() == word);
                trees.extend(controller.map(|c| (*c, entry.path())));
            }
        }
        if !trees.contains_key(&Controller::Cpu) {
            return Err(CgroupError::NoHierarchy { path: root.display().to_string() });
        }
        Ok(PodGroups { version: Version::V1, trees })
    }

    /// The groups of those of `uids` that have one.
    pub(crate) fn find(&self, uids: &BTreeSet<&str>) -> BTreeMap<PodUid, Group> {
        let mut found = BTreeMap::new();
        let top = &self.trees[&Controller::Cpu];
        let mut left = MAX_GROUPS;
        let mut level = vec![top.clone()];
        for _ in 0..MAX_DEPTH {
            let mut next = Vec::new();
            for dir in level {
                for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
                    if found.len() == uids.len() || left == 0 {
                        return found;
                    }
                    if !entry.file_type().is_ok_and(|t| t.is_dir()) {
                        continue;
                    }
                    left -= 1;
                    let path = entry.path();
                    let uid = entry.file_name().to_str().and_then(uid_of);
                    match uid.filter(|uid| uids.contains(uid.as_str())) {
                        Some(uid) => {
                            let relative = path.strip_prefix(top).expect("the walk began there");
                            found.extend(self.open(&uid, relative).map(|group| (uid, group)));
                        }
                        None => next.push(path),
                    }
                }
            }
            level = next;
        }
        found
    }

    /// How many cores the pods of the node can use: those of the machine, within the limits of the groups above
    /// the pod's.
    pub(crate) fn cores_above(&self, group: &Group, machine_cores: f64) -> f64 {
        let top = &self.trees[&Controller::Cpu];
        let above = cpu_dir(group).into_iter().flat_map(|pod| pod.ancestors().skip(1));
        above
            .take_while(|dir| dir.starts_with(top))
            .filter_map(|dir| cap_milli(dir, self.version))
            .fold(machine_cores, |cores, cap| cores.min(cap as f64 / 1000.0))
    }

    /// The lowest quota of the groups above the pod's: the node is then a part of its machine.
    pub(crate) fn quota_above(&self, group: &Group) -> Option<NodeQuota> {
        let top = &self.trees[&Controller::Cpu];
        let above = cpu_dir(group).into_iter().flat_map(|pod| pod.ancestors().skip(1));
        let capped = above
            .take_while(|dir| dir.starts_with(top))
            .filter_map(|dir| cap_milli(dir, self.version).map(|milli| (milli, dir)));
        let (_, dir) = capped.min_by_key(|(milli, _)| *milli)?;
        Some(NodeQuota { stat: dir.join("cpu.stat"), before: None, is_used_up: false })
    }

    fn open(&self, uid: &str, relative: &Path) -> Option<Group> {
        let mut dirs: Vec<GroupDir> = Vec::new();
        for (controller, tree) in &self.trees {
            let path = tree.join(relative);
            if let Some(dir) = dirs.iter_mut().find(|d| d.path == path) {
                dir.controllers.push(*controller);
            } else if let Ok(meta) = std::fs::symlink_metadata(&path) {
                dirs.push(GroupDir { path, inode: meta.ino(), controllers: vec![*controller] });
            }
        }
        Group::reopen(uid, self.version, &dirs).ok()
    }
}

/// The quota of a group that holds all programs of a node: pods, the kubelet, the container runtime.
#[derive(Debug)]
pub(crate) struct NodeQuota {
    stat: PathBuf,
    /// The last reading: its time, the periods of the quota, and how many of them ended with the quota used up.
    before: Option<(Time, u64, u64)>,
    is_used_up: bool,
}

/// A quota counts as used up if it was in this part of the periods.
const USED_UP: f64 = 0.25;

/// A quota has some ten periods in a second. Fewer than a few of them say little.
const SHORTEST_READING: Span = Span::from_millis(400);

impl NodeQuota {
    /// Whether the programs of the node had no CPU to spare lately, because they had used up the quota.
    pub(crate) fn is_used_up(&mut self, now: Time) -> bool {
        if self.before.is_some_and(|(at, ..)| now.since(at) < SHORTEST_READING) {
            return self.is_used_up;
        }
        let text = std::fs::read_to_string(&self.stat).unwrap_or_default();
        let number = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        let reading = number("nr_periods ").zip(number("nr_throttled ")).map(|(all, used_up)| (now, all, used_up));
        let before = std::mem::replace(&mut self.before, reading);
        self.is_used_up = before.zip(reading).is_some_and(|((_, all_before, used_up_before), (_, all, used_up))| {
            let (all, used_up) = (all.saturating_sub(all_before), used_up.saturating_sub(used_up_before));
            all > 0 && used_up as f64 >= USED_UP * all as f64
        });
        self.is_used_up
    }

    /// Whether it is the quota of the same group.
    pub(crate) fn is_of_same_group(&self, other: &NodeQuota) -> bool {
        self.stat == other.stat
    }
}

/// The uid in a group's name, if it is a pod's group.
pub(crate) fn uid_of(name: &str) -> Option<PodUid> {
    let name = name.strip_suffix(".slice").unwrap_or(name);
    // The systemd driver puts the names of the groups above in front.
    let uid = match name.strip_prefix("pod") {
        Some(uid) => uid.to_owned(),
        None => name.rsplit_once("-pod")?.1.replace('_', "-"),
    };
    (!uid.is_empty()).then(|| uid.into())
}

/// The CPU settings of one group in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CpuSettings {
    version: Version,
    /// `cpu.shares` (v1) or `cpu.weight` (v2).
    weight: u64,
    /// The cap in thousandths of a core, if there is one.
    cap_milli: Option<u64>,
}

impl CpuSettings {
    fn read(dir: &Path, version: Version) -> Option<CpuSettings> {
        let weight_file = match version {
            Version::V1 => "cpu.shares",
            Version::V2 => "cpu.weight",
        };
        let weight = std::fs::read_to_string(dir.join(weight_file)).ok()?.trim().parse().ok()?;
        Some(CpuSettings { version, weight, cap_milli: cap_milli(dir, version) })
    }

    /// Whether a kubelet writes these settings for a request and a limit.
    fn matches(&self, request_milli: u64, limit_milli: Option<u64>) -> bool {
        let shares = shares_of(request_milli);
        let weight_matches = match self.version {
            Version::V1 => self.weight == shares,
            Version::V2 => [linear_weight(shares), curved_weight(shares)].contains(&self.weight),
        };
        // The kubelet sets no cap below a hundredth of a core.
        weight_matches && self.cap_milli == limit_milli.map(|l| l.max(10))
    }
}

/// Whether the kubelet has put a request and a limit in force for a container of the pod that `group`
/// belongs to. The container's own group below the pod's is not known here; one group below the pod's, or the
/// pod's own, must have exactly these values.
pub(crate) fn is_in_force(group: &Group, request_milli: u64, limit_milli: Option<u64>) -> bool {
    let Some(pod) = cpu_dir(group) else { return false };
    let below = std::fs::read_dir(pod).into_iter().flatten().flatten();
    let below = below.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path());
    let mut all = std::iter::once(pod.to_owned()).chain(below);
    all.any(|dir| {
        CpuSettings::read(&dir, group.version()).is_some_and(|settings| settings.matches(request_milli, limit_milli))
    })
}

fn cpu_dir(group: &Group) -> Option<&Path> {
    group.dirs().iter().find(|d| d.controllers.contains(&Controller::Cpu)).map(|d| d.path.as_path())
}

/// The hard cap of a group.
fn cap_milli(dir: &Path, version: Version) -> Option<u64> {
    let text = |file: &str| std::fs::read_to_string(dir.join(file)).unwrap_or_default();
    let (quota, period) = match version {
        Version::V1 => (text("cpu.cfs_quota_us"), text("cpu.cfs_period_us")),
        Version::V2 => {
            let max = text("cpu.max");
            let (quota, period) = max.trim().split_once(' ')?;
            (quota.to_owned(), period.to_owned())
        }
    };
    // Without a cap, v1 has -1 and v2 has `max`: neither parses as a number here.
    let quota_us: u64 = quota.trim().parse().ok()?;
    let period_us: u64 = period.trim().parse().ok().filter(|p| *p > 0)?;
    Some(quota_us.saturating_mul(1000).div_ceil(period_us))
}

/// A kubelet's `cpu.shares` for a request.
fn shares_of(request_milli: u64) -> u64 {
    (request_milli.saturating_mul(1024) / 1000).clamp(2, 262_144)
}

/// The `cpu.weight` of container runtimes up to 2025: the range of shares is mapped linearly to that of weights.
fn linear_weight(shares: u64) -> u64 {
    1 + (shares - 2) * 9999 / 262_142
}

/// The `cpu.weight` of newer runtimes: a curve through (2, 1), (1024, 100) and (262144, 10000), so that a
/// request of one core has the default weight.
fn curved_weight(shares: u64) -> u64 {
    let l = (shares as f64).log2();
    let exponent = (l * l + 125.0 * l) / 612.0 - 7.0 / 34.0;
    (10f64.powf(exponent).ceil() as u64).clamp(1, 10_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "6a1f3e5c-0b0e-4f7e-9a58-2f3f6f1f0d11";
    const OTHER: &str = "11111111-2222-3333-4444-555555555555";

    fn make(root: &Path, dirs: &[&str]) {
        for dir in dirs {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
    }

    fn find(root: &Path) -> BTreeMap<PodUid, Group> {
        PodGroups::at(root).unwrap().find(&BTreeSet::from([UID, OTHER]))
    }

    #[test]
    fn v1_with_cgroupfs_below_any_group() {
        let root = tempfile::tempdir().unwrap();
        for tree in ["cpu,cpuacct", "memory", "blkio"] {
            make(root.path(), &[&format!("{tree}/testbed/node-a/kubepods/burstable/pod{UID}/0123abc")]);
            make(root.path(), &[&format!("{tree}/testbed/node-b/kubepods/pod{OTHER}"), &format!("{tree}/user")]);
        }
        std::os::unix::fs::symlink("cpu,cpuacct", root.path().join("cpu")).unwrap();
        let pod = root.path().join(format!("cpu,cpuacct/testbed/node-a/kubepods/burstable/pod{UID}"));
        for (file, value) in
            [("cpu.shares", "512\n"), ("cpu.cfs_quota_us", "75000\n"), ("cpu.cfs_period_us", "100000\n")]
        {
            std::fs::write(pod.join(file), value).unwrap();
        }
        std::fs::write(pod.join("cpuacct.usage"), "5000000000\n").unwrap();
        let mut found = find(root.path());
        assert_eq!(found.len(), 2);
        let mut group = found.remove(UID).unwrap();
        let group = &mut group;
        assert_eq!(group.version(), Version::V1);
        assert_eq!(group.usage(&mut [0; 16 * 1024]).unwrap().cpu_ns, 5_000_000_000);
        assert!(is_in_force(group, 500, Some(750)));
        assert!(!is_in_force(group, 500, None) && !is_in_force(group, 510, Some(750)));
        // One of two containers.
        std::fs::write(pod.join("0123abc/cpu.shares"), "204\n").unwrap();
        std::fs::write(pod.join("0123abc/cpu.cfs_quota_us"), "-1\n").unwrap();
        assert!(is_in_force(group, 200, None));
        // The node is capped far above its pods.
        let node = root.path().join("cpu,cpuacct/testbed/node-a");
        std::fs::write(node.join("cpu.cfs_quota_us"), "150000\n").unwrap();
        std::fs::write(node.join("cpu.cfs_period_us"), "100000\n").unwrap();
        let groups = PodGroups::at(root.path()).unwrap();
        assert_eq!(groups.cores_above(group, 8.0), 1.5);
        assert_eq!(groups.cores_above(&found[OTHER], 8.0), 8.0);
        assert!(groups.quota_above(&found[OTHER]).is_none());
        let mut quota = groups.quota_above(group).unwrap();
        // Time, periods, and those of them in which the quota was used up.
        let mut is_used_up = |s: f64, all: u64, used_up: u64| {
            let text = format!("nr_periods {all}\nnr_throttled {used_up}\nthrottled_time 5\n");
            std::fs::write(node.join("cpu.stat"), text).unwrap();
            quota.is_used_up(Time::from_secs_f64(s))
        };
        assert!(!is_used_up(10.0, 1000, 900), "one reading says nothing of now");
        assert!(is_used_up(10.5, 1005, 903));
        assert!(is_used_up(10.6, 1006, 903), "too soon for another answer");
        assert!(!is_used_up(11.0, 1010, 904));
        assert!(!is_used_up(12.0, 1010, 904), "no program has run");
    }

    #[test]
    fn v2_with_systemd_names_with_underscores() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
        let name = |uid: &str, class: &str| format!("kubepods-{class}pod{}.slice", uid.replace('-', "_"));
        let burstable = format!("kubepods.slice/kubepods-burstable.slice/{}", name(UID, "burstable-"));
        let guaranteed = format!("system.slice/kubelet.scope/kubepods.slice/{}", name(OTHER, ""));
        make(root.path(), &[&format!("{burstable}/cri-containerd-0123.scope"), &guaranteed]);
        std::fs::write(root.path().join(&burstable).join("cpu.weight"), "20\n").unwrap();
        std::fs::write(root.path().join(&burstable).join("cpu.max"), "max 100000\n").unwrap();
        std::fs::write(root.path().join(&burstable).join("cpu.stat"), "usage_usec 7\nuser_usec 5\n").unwrap();
        let mut found = find(root.path());
        assert_eq!(found.len(), 2);
        let group = found.get_mut(UID).unwrap();
        assert_eq!(group.usage(&mut [0; 16 * 1024]).unwrap().cpu_ns, 7_000);
        assert!(is_in_force(group, 500, None) && !is_in_force(group, 500, Some(1000)));
        assert!(PodGroups::at(root.path()).unwrap().quota_above(group).is_none());
    }

    #[test]
    fn a_group_that_is_gone_or_not_a_pods_is_not_read() {
        let root = tempfile::tempdir().unwrap();
        let dir = format!("cpu/kubepods/pod{UID}");
        make(root.path(), &[&dir, "cpu/kubepods/podium", "cpu/kubepods/pod"]);
        let mut found = find(root.path());
        let mut group = found.remove(UID).unwrap();
        assert!(found.is_empty());
        std::fs::remove_dir(root.path().join(&dir)).unwrap();
        assert!(!is_in_force(&group, 500, None));
        assert!(group.usage(&mut [0; 16 * 1024]).is_err());
    }

    #[test]
    fn no_hierarchy_is_an_error_that_says_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        make(root.path(), &["unified"]);
        let message = PodGroups::at(root.path()).unwrap_err().to_string();
        assert!(message.contains("mount the host's /sys/fs/cgroup"), "{message}");
    }

    #[test]
    fn uids_are_read_from_names_of_pods_only() {
        assert_eq!(uid_of(&format!("pod{UID}")).as_deref(), Some(UID));
        assert_eq!(uid_of(&format!("kubepods-besteffort-pod{}.slice", UID.replace('-', "_"))).as_deref(), Some(UID));
        assert_eq!(uid_of(&format!("kubelet-kubepods-pod{}.slice", UID.replace('-', "_"))).as_deref(), Some(UID));
        for other in ["kubepods", "kubepods.slice", "kubepods-burstable.slice", "burstable", "system.slice", "pod"] {
            assert!(uid_of(other).is_none_or(|uid| uid != UID), "{other}");
        }
    }

    #[test]
    fn weights_as_runtimes_compute_them() {
        assert_eq!((shares_of(1000), shares_of(250), shares_of(0), shares_of(u64::MAX)), (1024, 256, 2, 262_144));
        assert_eq!((linear_weight(2), linear_weight(1024), linear_weight(262_144)), (1, 39, 10_000));
        assert_eq!((curved_weight(2), curved_weight(1024), curved_weight(262_144)), (1, 100, 10_000));
    }
}
