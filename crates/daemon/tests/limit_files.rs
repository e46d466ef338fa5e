//! Death between any two files of a limit, in every mode.
//!
//! A limit is several files of a control group. The daemon is killed after the first file that it writes, after the
//! second, and so on, until it lives long enough to write all of them. Between its death and its restart each file has
//! its old or its new value: the kernel's default, the value of a group that was just made, or the value of a plan in
//! the journal. The next daemon completes the change.

use crate::common::{Daemon, sh, wait_until};
use gainshare_core::plan::{Plan, Target};
use gainshare_daemon::api::types::JobState;
use gainshare_daemon::journal::limits_in;
use gainshare_daemon::record::Change;
use gainshare_daemon::spec::JobSpec;
use gainshare_limits::LimitMode;
use gainshare_limits::cgroup::limits::{self, GroupLimits, KernelFeatures};
use gainshare_limits::cgroup::{CpuList, Group, Version};
use gainshare_limits::process::JobGroup;
use std::time::{Duration, Instant};

/// More files than the daemon writes in one life of this test.
const MOST_WRITES: usize = 40;

/// Limits that were right for this time are taken for settled.
const SETTLED: Duration = Duration::from_secs(3);

const PATIENCE: Duration = Duration::from_secs(120);

/// Quota and period as another program might set them.
const FOREIGN: (&str, &str) = ("25000", "50000");

/// Unequal floors, so that the limits are unequal without any measuring.
fn jobs() -> Vec<JobSpec> {
    let (mut large, small) = (sh("large", "sleep 600"), sh("small", "sleep 600"));
    large.floor = 0.8;
    vec![large, small]
}

/// The control groups of the journal's jobs.
fn groups(d: &Daemon) -> Vec<Group> {
    let rows = limits_in(&d.state().join("journal.db")).unwrap();
    let records = rows.iter().map(|row| serde_json::from_str::<JobGroup>(&row.original).unwrap());
    records
        .map(|record| {
            let version = record.version.expect("this test needs control groups");
            Group::reopen(&record.handle.key, version, &record.dirs).unwrap()
        })
        .collect()
}

fn value(group: &Group, file: &str) -> String {
    group.get(file).unwrap().lines().next().unwrap_or_default().to_owned()
}

/// The controller that a file belongs to, as the kernel names it.
fn controller(file: &str) -> &str {
    file.split('.').next().unwrap_or_default()
}

fn features(group: &Group) -> KernelFeatures {
    let candidates = ["io.bfq.weight", "io.weight", "blkio.bfq.weight", "blkio.weight"];
    KernelFeatures {
        version: group.version(),
        // The CPUs and the memory of a group are not compared with these.
        all_cpus: CpuList::default(),
        has_cpu_idle: group.has("cpu.idle"),
        block_weight_file: candidates.into_iter().find(|file| group.has(file)),
        page_bytes: 4096,
    }
}

/// The limits that a group may have had: those of a new group, of a group that was just prepared, and of each plan.
fn candidates(mode: LimitMode, plans: &[Plan]) -> Vec<GroupLimits> {
    let cores = std::thread::available_parallelism().unwrap().get() as f64;
    let targets: Vec<Target> = plans.iter().flat_map(|p| p.verdicts.values().filter_map(|v| v.target)).collect();
    let weight = |share: f64| (mode != LimitMode::Quota).then_some(share);
    // A prepared group has the weight of the whole or that of the other job.
    let shares = std::iter::once(1.0).chain(targets.iter().map(|target| target.share.cpu.get()));
    let prepared = shares.map(|share| GroupLimits { cpu_share: weight(share), ..GroupLimits::default() });
    let planned = targets.iter().map(|target| GroupLimits {
        cpu_share: weight(target.share.cpu.get()),
        cpu_cap_cores: (mode == LimitMode::Quota)
            .then_some(target.limit.cpu.get())
            .filter(|cap| *cap < 1.0)
            .map(|cap| cap * cores),
        block_share: Some(target.share.block_io.get()),
        ..GroupLimits::default()
    });
    std::iter::once(GroupLimits::default()).chain(prepared).chain(planned).collect()
}

/// Each file has its old or its new value.
fn assert_old_or_new(group: &Group, mode: LimitMode, plans: &[Plan], foreign: &[&str], life: &str) {
    let features = features(group);
    let candidates: Vec<_> = candidates(mode, plans).iter().map(|l| limits::settings(&features, l)).collect();
    for file in candidates[0].iter().map(|setting| setting.file).filter(|file| group.has(file)) {
        let found = value(group, file);
        let mut planned = candidates.iter().flatten().filter(|s| s.file == file).map(|s| s.value.as_str());
        let is_weight = matches!(file, "cpu.shares" | "cpu.weight" | "cpu.idle");
        let is_expected = match controller(file) {
            // The weight follows from the cores that the job was dealt.
            "cpu" if is_weight && mode == LimitMode::Cores => {
                found.parse::<u64>().is_ok_and(|weight| weight <= limits::MAX_SHARES_V1)
            }
            "cpu" | "io" | "blkio" => planned.any(|value| value == found) || foreign.contains(&found.as_str()),
            "pids" => found == "max" || found.parse::<u32>().is_ok(),
            // On v2 an empty list means all CPUs.
            "cpuset" => {
                let is_empty = group.version() == Version::V2 && found.is_empty();
                is_empty || CpuList::parse(&found).is_some_and(|cpus| !cpus.is_empty())
            }
            _ => true,
        };
        assert!(is_expected, "{life}: {file} of {} is {found}; plans: {plans:#?}", group.key());
    }
}

/// Whether both jobs run, and all that the daemon names as in force is what their files hold.
fn is_in_force(d: &Daemon) -> bool {
    let explain = |name: &str| d.call(d.client.explain(name)).ok();
    let (Some(large), Some(small)) = (explain("large"), explain("small")) else { return false };
    let are_running = ["large", "small"]
        .into_iter()
        .all(|name| d.call(d.client.job(name)).is_ok_and(|job| job.state == JobState::Running && job.share.is_some()));
    let is_limited = d.call(d.client.job("small")).is_ok_and(|job| job.share.is_some_and(|share| share < 0.3));
    let groups = groups(d);
    are_running
        && is_limited
        && groups.len() == 2
        && [large, small].iter().zip(&groups).all(|(explained, group)| {
            let in_force = &explained.in_force;
            !in_force.is_empty() && in_force.iter().all(|setting| value(group, &setting.name) == setting.value)
        })
}

/// Waits until the daemon is dead (`false`) or its limits have not changed for a while (`true`).
fn outlives(d: &mut Daemon, life: &str) -> bool {
    let begun = Instant::now();
    let mut since = None;
    while !d.is_dead() {
        assert!(begun.elapsed() < PATIENCE, "{life}: neither dead nor limited; log:\n{}", d.log());
        since = is_in_force(d).then(|| since.unwrap_or_else(Instant::now));
        if since.is_some_and(|since: Instant| since.elapsed() >= SETTLED) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// Another program changes quota and period of the small job. Whether the daemon outlives the correction.
fn outlives_a_foreign_write(d: &mut Daemon, life: &str) -> bool {
    let small = groups(d).pop().unwrap();
    let ours = cap(&small);
    set_foreign_cap(&small);
    let begun = Instant::now();
    while !d.is_dead() {
        if cap(&small) == ours {
            return outlives(d, life);
        }
        assert!(begun.elapsed() < PATIENCE, "{life}: the cap is not corrected; log:\n{}", d.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// Quota and period.
fn cap(group: &Group) -> (String, String) {
    match group.version() {
        Version::V1 => (value(group, "cpu.cfs_quota_us"), value(group, "cpu.cfs_period_us")),
        Version::V2 => {
            let text = value(group, "cpu.max");
            let (quota, period) = text.split_once(' ').unwrap();
            (quota.to_owned(), period.to_owned())
        }
    }
}

fn set_foreign_cap(group: &Group) {
    let (quota, period) = FOREIGN;
    match group.version() {
        Version::V1 => {
            group.put("cpu.cfs_quota_us", quota).unwrap();
            group.put("cpu.cfs_period_us", period).unwrap();
        }
        Version::V2 => group.put("cpu.max", &format!("{quota} {period}")).unwrap(),
    }
}

/// What one life has shown.
struct Life {
    has_died: bool,
    /// The caps of the jobs between the death and the restart.
    caps: Vec<(String, String)>,
}

/// One life with a daemon that dies after this many files.
fn live(mode: LimitMode, writes: usize, is_disturbed: bool) -> Life {
    let life = format!("mode {}, death after file {writes}", mode.name());
    let mut d = Daemon::new(&format!("mode = \"{}\"", mode.name()));
    d.up_with(&[("GAINSHARE_FAIL", &format!("limit-after-write:{writes}"))]);
    d.wait_up();
    // The answer may be lost; the jobs are in the journal before the first limit is written.
    let _ = d.submit(jobs());
    let has_died = !(outlives(&mut d, &life) && (!is_disturbed || outlives_a_foreign_write(&mut d, &life)));
    let mut caps = Vec::new();
    if has_died {
        d.wait_dead();
        let (_, entries) = d.journal();
        let plans: Vec<Plan> = entries
            .iter()
            .filter_map(|entry| match &entry.change {
                Change::Plan { plan } => Some(plan.clone()),
                _ => None,
            })
            .collect();
        let foreign = if is_disturbed { vec![FOREIGN.0, FOREIGN.1, "25000 50000"] } else { Vec::new() };
        for group in groups(&d) {
            assert_old_or_new(&group, mode, &plans, &foreign, &life);
            caps.push(cap(&group));
        }
    } else {
        // It would count the files of a proper end, too.
        d.kill9();
    }
    d.up();
    let begun = Instant::now();
    while !is_in_force(&d) {
        assert!(begun.elapsed() < PATIENCE, "{life}: the next daemon sets no limits; log:\n{}", d.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    let groups = groups(&d);
    d.call(d.client.shutdown(false)).unwrap();
    d.wait_dead();
    for group in &groups {
        let features = features(group);
        for setting in limits::settings(&features, &GroupLimits::default()) {
            let is_compared = matches!(controller(setting.file), "cpu" | "pids");
            if is_compared && group.has(setting.file) {
                assert_eq!(value(group, setting.file), setting.value, "{life}: {} is put back", setting.file);
            }
        }
    }
    let left = limits_in(&d.state().join("journal.db")).unwrap();
    assert!(left.is_empty(), "{life}: all limits were put back, not {left:?}");
    // The jobs end with the test.
    d.up();
    wait_until("the jobs are found again", 60, || d.call(d.client.jobs(false)).is_ok_and(|jobs| jobs.len() == 2));
    Life { has_died, caps }
}

/// Lives until the daemon has written all files; the number of deaths.
fn die_at_each_file(mode: LimitMode) -> usize {
    let deaths = (1..=MOST_WRITES).take_while(|writes| live(mode, *writes, false).has_died).count();
    assert!(deaths >= 2, "mode {}: {deaths} files", mode.name());
    deaths
}

#[test]
#[ignore = "needs root and cgroups"]
fn death_after_any_file_of_a_limit_leaves_old_or_new_values() {
    let mut deaths = 0;
    // Mostly waiting: all at once cost little.
    std::thread::scope(|scope| {
        let modes = [LimitMode::Weight, LimitMode::Quota, LimitMode::Cores];
        let threads = modes.map(|mode| (mode, scope.spawn(move || die_at_each_file(mode))));
        for (mode, thread) in threads {
            let count = thread.join().unwrap();
            println!("mode {}: {count} deaths", mode.name());
            deaths += count;
        }
    });
    println!("fault: injected={deaths} violations=0");
}

/// The daemon corrects a quota and a period that another program has set, and dies between the two.
#[test]
#[ignore = "needs root and cgroups"]
fn death_between_quota_and_period_leaves_old_or_new_values() {
    let mut lives = Vec::new();
    for writes in 1..=MOST_WRITES {
        let life = live(LimitMode::Quota, writes, true);
        println!("after file {writes}: {:?}", life.caps);
        if !life.has_died {
            break;
        }
        lives.push(life);
    }
    let is_foreign = |(quota, period): &(String, String)| (quota == FOREIGN.0, period == FOREIGN.1);
    let seen: Vec<_> = lives.iter().flat_map(|life| life.caps.iter().map(is_foreign)).collect();
    // On v2 both are one file.
    let is_between = |(quota, period): &(bool, bool)| quota != period;
    let is_v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    assert!(is_v2 || seen.iter().any(is_between), "no death between quota and period: {seen:?}");
    println!("fault: injected={} violations=0", lives.len());
}
