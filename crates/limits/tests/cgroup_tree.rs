//! The cgroup layer on a temporary tree of plain files: no privileges, no kernel, the same on every machine.
//!
//! A [`Tree`] holds the files a kernel shows in a new group. What the kernel itself does (creating files with
//! a directory, enforcing limits, killing) is left to `conformance.rs`.

use crate::suite::{cpu_target, target};
use gainshare_core::check::CheckedTarget;
use gainshare_core::fixtures::checked_target;
use gainshare_core::model::JobId;
use gainshare_core::plan::Target;
use gainshare_limits::cgroup::limits::{self, GroupLimits, KernelFeatures, WriteRecord};
use gainshare_limits::cgroup::{BaseGroup, Controller, Group, Hierarchy, Version};
use gainshare_limits::process::{Config, JobGroup, ProcessRuntime, restore};
use gainshare_limits::{Counters, JobHandle, LimitMode, Runtime, RuntimeError};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

const BOTH: [Version; 2] = [Version::V1, Version::V2];
const GIB: u64 = 1 << 30;
const UNLIMITED_V1: &str = "9223372036854771712";

/// The files of a new group, by controller on v1.
const V1_FILES: [(&str, &[(&str, &str)]); 7] = [
    ("cpu", &[("cpu.shares", "1024"), ("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "100000")]),
    ("cpuacct", &[("cpuacct.usage", "0")]),
    ("cpuset", &[("cpuset.cpus", ""), ("cpuset.mems", "")]),
    (
        "memory",
        &[
            ("memory.usage_in_bytes", "0"),
            ("memory.soft_limit_in_bytes", UNLIMITED_V1),
            ("memory.stat", "total_inactive_file 0\nhierarchical_memory_limit 9223372036854771712"),
        ],
    ),
    ("blkio", &[("blkio.bfq.weight", "100"), ("blkio.throttle.io_service_bytes", "Total 0")]),
    ("pids", &[("pids.max", "max")]),
    ("freezer", &[("freezer.state", "THAWED")]),
];

const V2_FILES: &[(&str, &str)] = &[
    ("cgroup.controllers", "cpuset cpu io memory pids"),
    ("cgroup.subtree_control", "cpuset cpu io memory pids"),
    ("cgroup.type", "domain"),
    ("cgroup.events", "populated 0\nfrozen 0"),
    ("cpu.weight", "100"),
    ("cpu.max", "max 100000"),
    ("cpu.stat", "usage_usec 0"),
    ("cpuset.cpus", ""),
    ("cpuset.cpus.effective", "0-3"),
    ("memory.current", "0"),
    ("memory.high", "max"),
    ("memory.low", "0"),
    ("memory.max", "max"),
    ("memory.stat", "inactive_file 0"),
    ("io.weight", "default 100"),
    ("io.stat", ""),
    ("pids.max", "max"),
];

/// A machine of four CPUs and 8 GiB.
struct Tree {
    dir: tempfile::TempDir,
    version: Version,
}

impl Tree {
    /// With a base group `base` and groups `base/a` and `base/b` in it, as a kernel would show them.
    fn new(version: Version) -> Tree {
        let tree = Tree { dir: tempfile::tempdir().unwrap(), version };
        tree.write("proc/meminfo", "MemTotal:        8388608 kB\n");
        for group in ["", "base", "base/a", "base/b"] {
            tree.add_group(group);
        }
        match version {
            Version::V1 => {
                tree.put("", "cpuset.cpus", "0-3");
                tree.put("", "cpuset.mems", "0");
            }
            // The topmost group has no type.
            Version::V2 => std::fs::remove_file(tree.file("", "cgroup.type")).unwrap(),
        }
        tree
    }

    fn root(&self) -> &Path {
        self.dir.path()
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn add_group(&self, group: &str) {
        let add = |dir: String, files: &[(&str, &str)]| {
            for (name, text) in files.iter().chain(&[("cgroup.procs", "")]) {
                self.write(&format!("{dir}/{name}"), text);
            }
        };
        match self.version {
            Version::V1 => {
                V1_FILES.iter().for_each(|(tree, files)| add(format!("sys/fs/cgroup/{tree}/{group}"), files))
            }
            Version::V2 => add(format!("sys/fs/cgroup/{group}"), V2_FILES),
        }
    }

    fn file(&self, group: &str, name: &str) -> PathBuf {
        let top = self.root().join("sys/fs/cgroup");
        match (self.version, name.split('.').next().unwrap()) {
            (Version::V2, _) => top.join(group).join(name),
            (Version::V1, "cgroup") => top.join("cpu").join(group).join(name),
            (Version::V1, controller) => top.join(controller).join(group).join(name),
        }
    }

    fn put(&self, group: &str, name: &str, value: &str) {
        std::fs::write(self.file(group, name), value).unwrap();
    }

    fn get(&self, group: &str, name: &str) -> String {
        let path = self.file(group, name);
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).trim_end().to_owned()
    }

    fn hierarchy(&self) -> Hierarchy {
        match self.version {
            Version::V1 => Hierarchy::v1_at(self.root()),
            Version::V2 => Hierarchy::v2_at(self.root()),
        }
    }

    fn base(&self) -> BaseGroup {
        BaseGroup::open(self.hierarchy(), "base").unwrap()
    }

    fn runtime(&self, mode: LimitMode) -> ProcessRuntime {
        let config = Config { mode, max_tasks: Some(99), ..Config::new("base") };
        ProcessRuntime::on(self.hierarchy(), config).unwrap()
    }

    /// The name of the file with the CPU weight, and the value of this share of the node in it.
    fn weight(&self, share: f64) -> (&'static str, String) {
        match self.version {
            Version::V1 => ("cpu.shares", format!("{}", share * 102_400.0)),
            Version::V2 => ("cpu.weight", format!("{}", share * 10_000.0)),
        }
    }
}

/// A group of its own, with the features of the tree.
fn group(tree: &Tree) -> (Group, KernelFeatures) {
    let mut base = tree.base();
    let features = KernelFeatures {
        version: tree.version,
        all_cpus: base.cpus().iter().copied().collect(),
        has_cpu_idle: base.has_cpu_idle(),
        block_weight_file: base.block_weight_file(),
        page_bytes: 4096,
    };
    (base.create("a").unwrap(), features)
}

fn start(runtime: &mut ProcessRuntime, names: &[&str]) -> (Vec<JobGroup>, Vec<JobHandle>) {
    let groups: Vec<JobGroup> =
        names.iter().enumerate().map(|(i, name)| runtime.prepare(JobId(i as u64), name).unwrap()).collect();
    let handles = groups.iter().map(|group| group.handle.clone()).collect();
    (groups, handles)
}

fn apply(
    runtime: &mut ProcessRuntime,
    generation: u64,
    plan: &[(&JobHandle, CheckedTarget)],
) -> Vec<Vec<(String, String)>> {
    let plan: Vec<(JobHandle, CheckedTarget)> = plan.iter().map(|(job, target)| ((*job).clone(), *target)).collect();
    runtime.apply(generation, &plan).into_iter().map(|result| result.unwrap().settings).collect()
}

#[test]
fn detection_finds_v2_where_it_has_the_cpu_controller() {
    let tree = Tree::new(Version::V2);
    tree.write("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    tree.write("proc/self/cgroup", "0::/base/a\n");
    let found = Hierarchy::detect_at(tree.root()).unwrap();
    assert_eq!((found.version(), found.parent()), (Version::V2, tree.root().join("sys/fs/cgroup").as_path()));

    // A container sees only a part of the hierarchy, which is not the topmost group and holds other processes.
    tree.put("", "cgroup.type", "domain");
    tree.put("", "cgroup.procs", "1\n2\n");
    let error = Hierarchy::detect_at(tree.root()).unwrap_err().to_string();
    assert!(error.contains("holds processes") && error.contains("in a container"), "{error}");
    tree.put("", "cgroup.procs", "");
    assert!(Hierarchy::detect_at(tree.root()).is_ok());
    tree.put("", "cgroup.subtree_control", "");
    assert!(Hierarchy::detect_at(tree.root()).is_ok());
    assert_eq!(tree.get("", "cgroup.subtree_control"), "+cpu", "the cpu controller is enabled for the groups below");
}

#[test]
fn detection_falls_back_to_v1_below_the_own_group() {
    let tree = Tree::new(Version::V1);
    let mut mountinfo = "31 23 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n".to_owned();
    for name in ["cpu", "cpuacct", "cpuset", "memory"] {
        mountinfo.push_str(&format!("32 23 0:29 / /sys/fs/cgroup/{name} rw shared:9 - cgroup cgroup rw,{name}\n"));
    }
    tree.write("proc/self/mountinfo", &mountinfo);
    tree.write("proc/self/cgroup", "3:memory:/base/a\n2:cpu:/base\n1:cpuset:/nowhere\n0::/\n");
    let found = Hierarchy::detect_at(tree.root()).unwrap();
    assert_eq!((found.version(), found.parent()), (Version::V1, tree.root().join("sys/fs/cgroup/cpu/base").as_path()));

    for (mountinfo, words) in [("1 1 0:1 / / rw - ext4 sda rw\n", "no cgroup hierarchy is mounted"), ("", "is mounted")]
    {
        tree.write("proc/self/mountinfo", mountinfo);
        let error = Hierarchy::detect_at(tree.root()).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("mount -t cgroup2"), "{error}");
    }
    std::fs::remove_file(tree.root().join("proc/self/mountinfo")).unwrap();
    let error = Hierarchy::detect_at(tree.root()).unwrap_err().to_string();
    assert!(error.contains("is /proc mounted?"), "{error}");
}

#[test]
fn capacity_is_what_limits_above_leave() {
    for version in BOTH {
        let tree = Tree::new(version);
        let capacity = tree.base().capacity();
        assert_eq!((capacity.cores, capacity.memory_bytes), (4.0, 8 * GIB), "{version:?}");
        assert_eq!(tree.base().cpus(), [0, 1, 2, 3]);
        match version {
            Version::V1 => {
                tree.put("", "cpu.cfs_quota_us", "150000");
                tree.put("base", "memory.stat", &format!("hierarchical_memory_limit {}", 3 * GIB));
            }
            Version::V2 => {
                tree.put("", "cpu.max", "150000 100000");
                tree.put("", "memory.max", &(3 * GIB).to_string());
            }
        }
        let capacity = tree.base().capacity();
        assert_eq!((capacity.cores, capacity.memory_bytes), (1.5, 3 * GIB), "{version:?}");
        tree.put("base", if version == Version::V1 { "cpuset.cpus" } else { "cpuset.cpus.effective" }, "2");
        assert_eq!((tree.base().capacity().cores, tree.base().cpus()), (1.0, [2].as_slice()), "{version:?}");
    }
}

#[test]
fn a_new_v1_cpuset_gets_the_cpus_of_its_parent() {
    let tree = Tree::new(Version::V1);
    tree.base().create("a").unwrap();
    assert_eq!((tree.get("base", "cpuset.cpus"), tree.get("base/a", "cpuset.cpus")), ("0-3".into(), "0-3".into()));
    assert_eq!(tree.get("base/a", "cpuset.mems"), "0");
}

#[test]
fn controllers_without_a_tree_are_missing_and_the_others_work() {
    let tree = Tree::new(Version::V1);
    std::fs::remove_dir_all(tree.root().join("sys/fs/cgroup/blkio")).unwrap();
    let base = tree.base();
    assert!(base.has(Controller::Cpu) && !base.has(Controller::BlockIo));
    assert!(base.block_note().is_some_and(|note| note.contains("no weight")), "{:?}", base.block_note());
    let mut runtime = tree.runtime(LimitMode::Weight);
    let (_, jobs) = start(&mut runtime, &["a"]);
    let settings = apply(&mut runtime, 1, &[(&jobs[0], target(1.0, 0.5))]).remove(0);
    assert!(settings.iter().all(|(name, _)| !name.starts_with("blkio")), "{settings:?}");
}

#[test]
fn weights_are_in_the_files_and_the_base_weighs_as_many_tasks_as_it_has_jobs() {
    for version in BOTH {
        let tree = Tree::new(version);
        let mut runtime = tree.runtime(LimitMode::Weight);
        let (_, jobs) = start(&mut runtime, &["a", "b"]);
        let settings = apply(&mut runtime, 1, &[(&jobs[0], cpu_target(1.0, 0.75)), (&jobs[1], cpu_target(1.0, 0.25))]);
        for (group, share, settings) in [("base/a", 0.75, &settings[0]), ("base/b", 0.25, &settings[1])] {
            let (file, value) = tree.weight(share);
            assert_eq!(tree.get(group, file), value, "{version:?}");
            assert_eq!(tree.get(group, "pids.max"), "99");
            for (name, value) in settings {
                assert_eq!(tree.get(group, name), *value, "{version:?}: {name} is not as it was read back");
            }
        }
        if version == Version::V1 {
            assert_eq!(tree.get("base", "cpu.shares"), "2048");
        }
    }
}

#[test]
fn quotas_are_parts_of_the_machine() {
    for (version, file, capped, free) in
        [(Version::V1, "cpu.cfs_quota_us", "200000", "-1"), (Version::V2, "cpu.max", "200000 100000", "max 100000")]
    {
        let tree = Tree::new(version);
        let mut runtime = tree.runtime(LimitMode::Quota);
        let (_, jobs) = start(&mut runtime, &["a"]);
        apply(&mut runtime, 1, &[(&jobs[0], cpu_target(0.5, 0.1))]);
        assert_eq!(tree.get("base/a", file), capped, "half of four cores");
        apply(&mut runtime, 2, &[(&jobs[0], checked_target(Target::FREE))]);
        assert_eq!(tree.get("base/a", file), free);
    }
}

#[test]
fn memory_limits_stay_above_the_working_set_and_follow_it() {
    for (version, usage, limit) in [
        (Version::V1, "memory.usage_in_bytes", "memory.soft_limit_in_bytes"),
        (Version::V2, "memory.current", "memory.high"),
    ] {
        let tree = Tree::new(version);
        let mut runtime = tree.runtime(LimitMode::Weight);
        let (_, jobs) = start(&mut runtime, &["a"]);
        let half = target(0.5, 0.5);
        apply(&mut runtime, 1, &[(&jobs[0], half)]);
        assert_eq!(tree.get("base/a", limit), (4 * GIB).to_string(), "{version:?}: half of the memory");
        // 6 GiB, an eighth of it and 64 MiB.
        tree.put("base/a", usage, &(6 * GIB).to_string());
        apply(&mut runtime, 2, &[(&jobs[0], half)]);
        assert_eq!(tree.get("base/a", limit), "7314866176", "{version:?}: not below use");
        // The job grows between two plans: reading its counters raises the limit.
        tree.put("base/a", usage, &(7 * GIB).to_string());
        assert_eq!(runtime.read(&jobs[0]).unwrap().memory_bytes, 7 * GIB);
        assert!(tree.get("base/a", limit).parse::<u64>().unwrap() > 7 * GIB, "{version:?}");
        println!("fault: injected=2 violations=0");
    }
}

#[test]
fn whole_cores_are_dealt_out_and_given_back() {
    for version in BOTH {
        let tree = Tree::new(version);
        let mut runtime = tree.runtime(LimitMode::Cores);
        let (_, jobs) = start(&mut runtime, &["a", "b"]);
        apply(&mut runtime, 1, &[(&jobs[0], cpu_target(1.0, 0.75)), (&jobs[1], cpu_target(1.0, 0.25))]);
        assert_eq!((tree.get("base/a", "cpuset.cpus"), tree.get("base/b", "cpuset.cpus")), ("0-2".into(), "3".into()));
        runtime.release(&jobs[0]).unwrap();
        let all = if version == Version::V1 { "0-3" } else { "" };
        assert_eq!(tree.get("base/a", "cpuset.cpus"), all, "{version:?}");
    }
}

#[test]
fn release_and_restore_leave_the_values_of_a_new_group() {
    for version in BOTH {
        let tree = Tree::new(version);
        let mut runtime = tree.runtime(LimitMode::Cores);
        let (groups, jobs) = start(&mut runtime, &["a", "b"]);
        let files: Vec<String> = apply(&mut runtime, 1, &[(&jobs[0], target(0.5, 0.5)), (&jobs[1], target(0.5, 0.5))])
            .remove(0)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let values = |group: &str| files.iter().map(|f| tree.get(group, f)).collect::<Vec<_>>();
        tree.add_group("base/new");
        if version == Version::V1 {
            tree.put("base/new", "cpuset.cpus", "0-3");
        }
        assert!(files.len() >= 6 && values("base/a") != values("base/new"), "{files:?}");
        runtime.release(&jobs[0]).unwrap();
        restore(&groups[1]).unwrap();
        assert_eq!((values("base/a"), values("base/b")), (values("base/new"), values("base/new")), "{version:?}");
    }
}

#[test]
fn values_in_force_are_not_written_again() {
    for version in BOTH {
        let tree = Tree::new(version);
        let (group, features) = group(&tree);
        let limits = GroupLimits { cpu_share: Some(0.5), cpu_cap_cores: Some(1.0), ..GroupLimits::default() };
        let settings = limits::settings(&features, &limits);
        let mut record = WriteRecord::default();
        let first = limits::enforce(&group, &settings, &mut record, Instant::now()).unwrap();
        let path = |name: &str| tree.file("base/a", name);
        for setting in &settings {
            std::fs::File::options()
                .write(true)
                .open(path(setting.file))
                .unwrap()
                .set_modified(SystemTime::UNIX_EPOCH)
                .unwrap();
        }
        let again = limits::enforce(&group, &settings, &mut record, Instant::now()).unwrap();
        assert_eq!(first.in_force, again.in_force);
        for setting in &settings {
            let modified = path(setting.file).metadata().unwrap().modified().unwrap();
            assert_eq!(modified, SystemTime::UNIX_EPOCH, "{version:?}: {} was written again", setting.file);
        }
    }
}

#[test]
fn foreign_writes_are_reported_and_overwritten_once_a_second() {
    for version in BOTH {
        let tree = Tree::new(version);
        let (group, features) = group(&tree);
        let (file, ours) = tree.weight(0.5);
        let settings = limits::settings(&features, &GroupLimits { cpu_share: Some(0.5), ..GroupLimits::default() });
        let mut record = WriteRecord::default();
        let begin = Instant::now();
        let mut enforce = |after_ms| {
            limits::enforce(&group, &settings, &mut record, begin + Duration::from_millis(after_ms)).map(drop)
        };
        enforce(0).unwrap();
        for (theirs, after_ms, is_overwritten) in
            [("77", 10, true), ("78", 20, false), ("78", 900, false), ("78", 1100, true)]
        {
            tree.put("base/a", file, theirs);
            match enforce(after_ms) {
                Err(RuntimeError::ForeignWrite { setting, wanted, found, .. }) => {
                    assert_eq!((setting.as_str(), &wanted, found.as_str()), (file, &ours, theirs));
                }
                other => panic!("{version:?} after {after_ms} ms: {other:?}"),
            }
            assert_eq!(tree.get("base/a", file) == ours, is_overwritten, "{version:?} after {after_ms} ms");
        }
        enforce(1110).expect("no other program writes any more");

        // After a restart the values found are taken as our own.
        tree.put("base/a", file, "79");
        let mut adopted = WriteRecord::adopt(&group, &features);
        limits::enforce(&group, &settings, &mut adopted, begin).expect("no foreign write");
        assert_eq!(tree.get("base/a", file), ours);
        println!("fault: injected=4 violations=0 overwrites=2");
    }
}

#[test]
fn a_change_reads_no_other_file_until_the_next_check() {
    for version in BOTH {
        let tree = Tree::new(version);
        let (group, features) = group(&tree);
        let settings = |share, tasks| {
            let limits = GroupLimits { cpu_share: Some(share), max_tasks: Some(tasks), ..GroupLimits::default() };
            limits::settings(&features, &limits)
        };
        let mut record = WriteRecord::default();
        let begin = Instant::now();
        let after = |ms| begin + Duration::from_millis(ms);
        // What was never checked is read as a whole.
        let first = limits::enforce_changes(&group, &settings(0.5, 100), &mut record, begin).unwrap();
        tree.put("base/a", "pids.max", "77");
        let (file, ours) = tree.weight(0.25);
        let changed = limits::enforce_changes(&group, &settings(0.25, 100), &mut record, after(10)).unwrap();
        assert_eq!((tree.get("base/a", file), tree.get("base/a", "pids.max")), (ours.clone(), "77".into()));
        let files = |report: &limits::EnforcementReport| -> Vec<String> {
            report.in_force.iter().map(|(file, _)| file.clone()).collect()
        };
        assert_eq!(files(&changed), files(&first), "{version:?}: the report is whole, in the same order");
        assert!(changed.in_force.contains(&(file.to_owned(), ours)), "{changed:?}");
        // The next check notices the other program. Then nothing is believed until a check finds no other value.
        for (ms, value) in [(20, "77"), (1100, "78")] {
            tree.put("base/a", "pids.max", value);
            let result = match ms {
                20 => limits::enforce(&group, &settings(0.25, 100), &mut record, after(ms)),
                _ => limits::enforce_changes(&group, &settings(0.25, 100), &mut record, after(ms)),
            };
            assert!(matches!(&result, Err(RuntimeError::ForeignWrite { found, .. }) if found == value), "{result:?}");
            assert_eq!(tree.get("base/a", "pids.max"), "100");
        }
        limits::enforce_changes(&group, &settings(0.25, 100), &mut record, after(1110)).expect("peace");
    }
}

thread_local! {
    /// Fail points that this thread passes before it stops at one; `None`: it stops at none.
    static POINTS_LEFT: std::cell::Cell<Option<u32>> = const { std::cell::Cell::new(None) };
}

/// Runs `work` and stops it at the fail point with this number. Whether it was stopped.
fn is_stopped_at(number: u32, work: impl FnOnce()) -> bool {
    gainshare_limits::fail::call_at_points(|_| match POINTS_LEFT.get() {
        Some(0) => std::panic::resume_unwind(Box::new("stopped by a test")),
        left => POINTS_LEFT.set(left.map(|n| n - 1)),
    });
    POINTS_LEFT.set(Some(number));
    let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err();
    POINTS_LEFT.set(None);
    stopped
}

/// The daemon dies before or after any single write. Each file then has its old or its new value, and the job may use
/// no more than the larger of both caps: on v1 a cap is in two files, quota and period, and both change here. The next
/// daemon completes the change.
#[test]
fn death_between_two_files_leaves_old_or_new_values() {
    let mut deaths = 0;
    // Quota and period as another program left them: with a shorter period and with a longer one than ours.
    for (version, before) in
        [(Version::V1, "25000 50000"), (Version::V1, "300000 200000"), (Version::V2, "25000 50000")]
    {
        let limits = GroupLimits { cpu_cap_cores: Some(1.0), block_share: Some(0.5), ..GroupLimits::default() };
        let points = (0..).take_while(|&point| {
            let tree = Tree::new(version);
            let (group, features) = group(&tree);
            match version {
                Version::V1 => {
                    let (quota, period) = before.split_once(' ').unwrap();
                    tree.put("base/a", "cpu.cfs_quota_us", quota);
                    tree.put("base/a", "cpu.cfs_period_us", period);
                }
                Version::V2 => tree.put("base/a", "cpu.max", before),
            }
            let settings = limits::settings(&features, &limits);
            let values = || settings.iter().map(|s| tree.get("base/a", s.file)).collect::<Vec<_>>();
            let (old, new) = (values(), settings.iter().map(|s| s.value.clone()).collect::<Vec<_>>());
            let enforce = |mut record| limits::enforce(&group, &settings, &mut record, Instant::now());
            let is_stopped = is_stopped_at(point, || drop(enforce(WriteRecord::default())));

            let found = values();
            for (i, setting) in settings.iter().enumerate() {
                assert!([&old[i], &new[i]].contains(&&found[i]), "{}: {} at point {point}", setting.file, found[i]);
            }
            let cap = match version {
                Version::V1 => ["cpu.cfs_quota_us", "cpu.cfs_period_us"].map(|f| tree.get("base/a", f)).join(" "),
                Version::V2 => tree.get("base/a", "cpu.max"),
            };
            println!("{version:?} from {before}: {cap} at point {point}");
            assert!(cores(&cap) <= cores(before).max(1.0), "{cap} at point {point}, from {before}");
            enforce(WriteRecord::adopt(&group, &features)).expect("the next daemon completes the change");
            assert_eq!(values(), new, "at point {point}");
            is_stopped
        });
        let points = points.count();
        assert!(points >= 4, "{version:?} from {before}: {points} points");
        deaths += points;
    }
    println!("fault: injected={deaths} violations=0");
}

/// The cap that quota and period stand for.
fn cores(quota_and_period: &str) -> f64 {
    let numbers: Vec<f64> = quota_and_period.split(' ').map(|number| number.parse().unwrap()).collect();
    numbers[0] / numbers[1]
}

#[test]
fn a_missing_file_is_a_note_unless_it_is_essential() {
    let tree = Tree::new(Version::V2);
    let (group, features) = group(&tree);
    // Only the cpu files are essential: a missing file of another controller is a note.
    std::fs::remove_file(tree.file("base/a", "memory.high")).unwrap();
    let limits = GroupLimits { memory_limit_bytes: Some(GIB + 1), ..GroupLimits::default() };
    let settings = limits::settings(&features, &limits);
    let report = limits::enforce(&group, &settings, &mut WriteRecord::default(), Instant::now()).unwrap();
    assert!(report.notes.iter().any(|n| n.contains("memory.high") && n.contains("not enforced")), "{:?}", report.notes);
    std::fs::remove_file(tree.file("base/a", "cpu.weight")).unwrap();
    let error = limits::enforce(&group, &settings, &mut WriteRecord::default(), Instant::now()).unwrap_err();
    assert!(error.to_string().contains("cpu.weight"), "{error}");
}

#[test]
fn a_directory_made_again_is_another_group() {
    for version in BOTH {
        let tree = Tree::new(version);
        let mut runtime = tree.runtime(LimitMode::Weight);
        let (groups, jobs) = start(&mut runtime, &["a"]);
        let opened = Group::reopen("a", version, &groups[0].dirs).unwrap();
        // Moved, not removed: a file system of plain files could give the same inode to the next directory.
        for dir in &groups[0].dirs {
            std::fs::rename(&dir.path, dir.path.with_file_name("moved")).unwrap();
        }
        tree.add_group("base/a");
        let is_gone = |result: Result<(), RuntimeError>| matches!(result, Err(RuntimeError::Gone { .. }));
        assert!(opened.is_gone() && is_gone(Group::reopen("a", version, &groups[0].dirs).map(drop)));
        let (file, _) = tree.weight(0.5);
        assert!(opened.put(file, "5").is_err() && opened.get(file).is_err() && opened.pids().is_empty());
        assert!(is_gone(runtime.apply(1, &[(jobs[0].clone(), target(0.5, 0.5))]).remove(0).map(drop)));
        assert!(is_gone(runtime.read(&jobs[0]).map(drop)) && is_gone(runtime.is_alive(&jobs[0]).map(drop)));
        runtime.release(&jobs[0]).unwrap();
        restore(&groups[0]).unwrap();
        let default = if version == Version::V1 { "1024" } else { "100" };
        assert_eq!(tree.get("base/a", file), default, "{version:?}: the group of another program was changed");
        println!("fault: injected=1 violations=0");
    }
}

#[test]
fn counters_are_read_from_the_files_of_each_version() {
    let expected = Counters { cpu_ns: 12_000, memory_bytes: 4000, block_bytes: Some(9), net_bytes: None };
    for version in BOTH {
        let tree = Tree::new(version);
        let files: &[(&str, &str)] = match version {
            Version::V1 => &[
                ("cpuacct.usage", "12000"),
                ("memory.usage_in_bytes", "5000"),
                ("memory.stat", "inactive_file 7\ntotal_inactive_file 1000"),
                ("blkio.throttle.io_service_bytes", "8:0 Read 4\nTotal 9"),
            ],
            Version::V2 => &[
                ("cpu.stat", "usage_usec 12\nuser_usec 5"),
                ("memory.current", "5000"),
                ("memory.stat", "inactive_file 1000"),
                ("io.stat", "8:0 rbytes=4 wbytes=5 rios=1"),
            ],
        };
        files.iter().for_each(|(name, text)| tree.put("base/a", name, text));
        let (mut group, _) = group(&tree);
        assert_eq!(group.usage(&mut [0; 16 * 1024]).unwrap(), expected, "{version:?}");
        // Garbage and missing files count as nothing.
        files.iter().for_each(|(name, _)| tree.put("base/a", name, "18446744073709551616 x"));
        let counters = group.usage(&mut [0; 16 * 1024]).unwrap();
        assert_eq!((counters.cpu_ns, counters.memory_bytes), (0, 0), "{version:?}");
        assert!(group.kill_once().unwrap(), "an empty group has nothing to kill");
    }
}

#[test]
fn older_plans_and_used_names_are_refused() {
    let tree = Tree::new(Version::V2);
    let mut runtime = tree.runtime(LimitMode::Weight);
    let (_, jobs) = start(&mut runtime, &["a"]);
    apply(&mut runtime, 7, &[(&jobs[0], target(1.0, 0.5))]);
    let older = runtime.apply(6, &[(jobs[0].clone(), checked_target(Target::FREE))]).remove(0);
    assert!(matches!(older, Err(RuntimeError::OldGeneration { given: 6, known: 7, .. })), "{older:?}");
    assert_eq!(tree.get("base/a", "cpu.weight"), "5000");
    assert!(runtime.prepare(JobId(9), "a").unwrap_err().to_string().contains("use another name"));
    for name in ["../a", "cpu.weight", ""] {
        assert!(runtime.prepare(JobId(9), name).is_err(), "{name}");
    }
}

/// Sixteen CPUs, and `cpu.idle` as kernels from 5.15 on have it.
fn sixteen_cores(version: Version) -> Tree {
    let tree = Tree::new(version);
    for group in ["", "base", "base/a", "base/b"] {
        tree.put(group, "cpu.idle", "0");
        match version {
            Version::V1 => tree.put(group, "cpuset.cpus", "0-15"),
            Version::V2 => tree.put(group, "cpuset.cpus.effective", "0-15"),
        }
    }
    tree
}

#[test]
fn unused_cores_are_lent_to_a_job_that_yields() {
    for version in BOTH {
        let tree = sixteen_cores(version);
        let mut runtime = tree.runtime(LimitMode::Cores);
        let (_, jobs) = start(&mut runtime, &["a", "b"]);
        let half = cpu_target(0.5, 0.5);
        let plan = [(&jobs[0], half), (&jobs[1], half)];
        let cpus = |settings: &[(String, String)]| {
            settings.iter().find(|(name, _)| name == "cpuset.cpus").map(|(_, value)| value.clone()).unwrap()
        };
        let first = apply(&mut runtime, 1, &plan);
        assert_eq!([cpus(&first[0]), cpus(&first[1])], ["0-7", "8-15"]);
        // In the next half second job a uses all of its cores and job b one.
        std::thread::sleep(Duration::from_millis(500));
        for (group, ns) in [("base/a", 8_000_000_000_u64), ("base/b", 500_000_000)] {
            match version {
                Version::V1 => tree.put(group, "cpuacct.usage", &ns.to_string()),
                Version::V2 => tree.put(group, "cpu.stat", &format!("usage_usec {}", ns / 1000)),
            }
        }
        let lent = apply(&mut runtime, 1, &plan);
        let borrowed = cpus(&lent[0]);
        assert!(borrowed.starts_with("0-7,") && borrowed.ends_with("-15"), "{borrowed}");
        assert_eq!(cpus(&lent[1]), "8-15", "the lender may use all of its cores");
        assert_eq!((tree.get("base/a", "cpu.idle"), tree.get("base/b", "cpu.idle")), ("1".into(), "0".into()));
        // The kernel has set the weight of a group that yields to its own value: that is no foreign write.
        let weight = tree.weight(0.5).0;
        tree.put("base/a", weight, "3");
        let alone = apply(&mut runtime, 2, &[(&jobs[0], cpu_target(1.0, 1.0))]);
        assert_eq!(cpus(&alone[0]), "0-15");
        assert_eq!((tree.get("base/a", "cpu.idle"), tree.get("base/a", weight)), ("0".into(), tree.weight(1.0).1));
    }
}
