//! The process runtime against the conformance suite and its own properties, on this machine's real kernel.
//!
//! These tests need root (or a delegated subtree) and cgroups: `cargo test -p gainshare-limits --test
//! conformance -- --ignored`.

use crate::processes::{BUSY, Fixture};
use crate::suite::{self, Subject, cpu_target, stop, target, wait_until};
use gainshare_core::fixtures::checked_target;
use gainshare_core::plan::Target;
use gainshare_limits::process::{self, Identity, ProcessRuntime};
use gainshare_limits::{LimitMode, Runtime, RuntimeError};
use std::time::{Duration, Instant};

fn setting(applied: &[(String, String)], names: [&str; 2]) -> String {
    applied
        .iter()
        .find(|(n, _)| names.contains(&n.as_str()))
        .unwrap_or_else(|| panic!("{names:?} in {applied:?}"))
        .1
        .clone()
}

#[test]
#[ignore = "needs root and cgroups"]
fn process_runtime_conforms() {
    suite::run_all(&mut Fixture::new(LimitMode::Weight));
}

#[test]
#[ignore = "needs root and cgroups"]
fn nothing_is_left_behind() {
    let dir = {
        let mut fixture = Fixture::new(LimitMode::Weight);
        let job = fixture.start(BUSY, None);
        let dir = fixture.record(&job).dirs[0].path.clone();
        assert!(dir.is_dir());
        dir
    };
    assert!(!dir.exists() && !dir.parent().unwrap().exists(), "{} is left behind", dir.display());
}

/// The kernel counts in how many periods a job used up its quota. In each of these periods the job used its
/// whole quota, and in no period more: both bounds hold on a busy machine too.
#[test]
#[ignore = "needs root and cgroups"]
fn quota_caps_and_lets_go() {
    const QUOTA_NS: u64 = 25_000_000;
    let mut fixture = Fixture::new(LimitMode::Quota);
    let job = fixture.start_busy();
    let quarter_core = 0.25 / fixture.runtime.capacity().cores;
    let applied = fixture.runtime.apply(1, &[(job.clone(), cpu_target(quarter_core, 0.1))]).remove(0).unwrap();
    assert!(setting(&applied.settings, ["cpu.cfs_quota_us", "cpu.max"]).starts_with("25000"), "{:?}", applied.settings);
    let group = fixture.group(&job);
    let mut count = || {
        let stat = group.get("cpu.stat").unwrap();
        let number = |name: &str| stat.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok()).unwrap();
        (number("nr_periods "), number("nr_throttled "), fixture.runtime.read(&job).unwrap().cpu_ns)
    };
    let before = count();
    let mut now = before;
    let throttled = wait_until(Duration::from_secs(60), || {
        now = count();
        now.1 - before.1 >= 20
    });
    let (periods, throttled_periods, used_ns) = (now.0 - before.0, now.1 - before.1, now.2 - before.2);
    assert!(throttled, "the quota stopped the job in {throttled_periods} periods of {periods} only");
    // The kernel hands out quota in slices of 5 ms: a period may borrow one from the next.
    assert!(used_ns <= (periods + 2) * QUOTA_NS * 6 / 5, "{used_ns} ns in {periods} periods are more than the quota");
    assert!(used_ns >= throttled_periods * QUOTA_NS / 2, "{used_ns} ns in {throttled_periods} periods of full use");

    let free = fixture.runtime.apply(2, &[(job.clone(), checked_target(Target::FREE))]).remove(0).unwrap();
    let quota = setting(&free.settings, ["cpu.cfs_quota_us", "cpu.max"]);
    assert!(quota == "-1" || quota == "max 100000", "{quota}");
}

#[test]
#[ignore = "needs root, cgroups and two cores"]
fn cores_mode_gives_each_job_its_own() {
    let mut fixture = Fixture::new(LimitMode::Cores);
    assert!(fixture.runtime.capacity().cores >= 2.0, "this test needs two cores");
    let (a, b) = (fixture.start(BUSY, None), fixture.start(BUSY, None));
    let wanted = [(a.clone(), cpu_target(0.5, 0.5)), (b.clone(), cpu_target(0.5, 0.5))];
    let cpus: Vec<String> = fixture
        .runtime
        .apply(1, &wanted)
        .into_iter()
        .map(|r| setting(&r.unwrap().settings, ["cpuset.cpus", ""]))
        .collect();
    assert!(cpus.iter().all(|c| !c.is_empty()) && cpus[0] != cpus[1], "{cpus:?}");
    let allowed = std::fs::read_to_string(format!("/proc/{}/status", fixture.pid(&a))).unwrap();
    assert!(allowed.contains(&format!("Cpus_allowed_list:\t{}\n", cpus[0])), "{allowed}");
    fixture.runtime.release(&a).unwrap();
    let allowed = std::fs::read_to_string(format!("/proc/{}/status", fixture.pid(&a))).unwrap();
    assert!(
        !allowed.contains(&format!("Cpus_allowed_list:\t{}\n", cpus[0])),
        "release gives every core back: {allowed}"
    );
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_child_of_the_job_cannot_leave_and_dies_with_it() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    // The grandchild leaves session and process group, ignores SIGTERM and outlives its parent.
    let job = fixture.start("setsid sh -c 'trap \"\" TERM; while :; do sleep 0.05; done' & exit 0", None);
    fixture.jobs.get_mut(&job.key).unwrap().0.wait().unwrap();
    assert!(fixture.runtime.is_alive(&job).unwrap(), "a process of the job still runs");
    let before = fixture.group(&job).pids();
    assert!(!before.is_empty());
    assert!(stop(&mut fixture.runtime, &job, Duration::from_millis(300)), "stopped");
    assert!(!fixture.runtime.is_alive(&job).unwrap());
    // A process leaves its group a moment before it is gone.
    let dead = || before.iter().all(|&pid| !Identity::of(pid).is_some_and(|id| id.is_alive()));
    assert!(wait_until(Duration::from_secs(5), dead), "{before:?}");
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_polite_job_is_asked_first() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    let dir = tempfile::tempdir().unwrap();
    let (ready, file) = (dir.path().join("ready"), dir.path().join("saved"));
    let script = format!(
        "trap 'echo yes > {}; exit 0' TERM; echo > {}; while :; do sleep 0.05; done",
        file.display(),
        ready.display()
    );
    let job = fixture.start(&script, None);
    assert!(wait_until(Duration::from_secs(5), || ready.exists()));
    assert!(stop(&mut fixture.runtime, &job, Duration::from_secs(10)));
    assert_eq!(std::fs::read_to_string(file).unwrap(), "yes\n");
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_fork_bomb_is_contained_and_killed() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    fixture.runtime.close();
    let config = gainshare_limits::process::Config { max_tasks: Some(40), ..fixture.config.clone() };
    fixture.runtime = ProcessRuntime::detect(config).unwrap();
    // The shell forks until it may not any more, and then ends; what it started stays.
    let job = fixture.start("while :; do sleep 60 & done 2>/dev/null", None);
    let group = fixture.group(&job);
    assert!(wait_until(Duration::from_secs(10), || group.pids().len() >= 30), "the bomb does not go off");
    let processes = group.pids().len();
    assert!(processes <= 40);
    assert!(wait_until(Duration::from_secs(10), || fixture.runtime.kill_once(&job).unwrap()), "some are left");
    assert!(!fixture.runtime.is_alive(&job).unwrap());
    println!("fault: injected={processes} violations=0");
}

#[test]
#[ignore = "needs root and cgroups"]
fn limits_go_back_without_a_daemon() {
    let mut fixture = Fixture::new(LimitMode::Cores);
    let job = fixture.start(BUSY, None);
    fixture.runtime.release(&job).unwrap();
    let original = fixture.limits_outside(&job);
    let (record, leader) = (fixture.record(&job).clone(), fixture.leader(&job));
    fixture.runtime.adopt(&record, leader).unwrap();
    let other = fixture.start(BUSY, None);
    let wanted = [(job.clone(), target(0.3, 0.2)), (other, target(0.7, 0.8))];
    fixture.runtime.apply(1, &wanted).into_iter().for_each(|r| _ = r.unwrap());
    assert_ne!(original, fixture.limits_outside(&job));
    process::restore(&record).unwrap();
    let mut restored = fixture.limits_outside(&job);
    // Some kernels cannot empty the list of a group with processes; all CPUs are as good.
    let all = format!("0-{}", fixture.runtime.capacity().cores as u32 - 1);
    restored.iter_mut().filter(|(name, value)| name == "cpuset.cpus" && *value == all).for_each(|(_, value)| {
        *value = original.iter().find(|(name, _)| name == "cpuset.cpus").unwrap().1.clone();
    });
    assert_eq!(original, restored);
    fixture.end(&job);
    fixture.runtime.release(&job).unwrap();
    process::restore(&record).expect("does nothing for a job that is gone");
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_group_removed_and_made_again_is_gone_and_not_touched() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    let job = fixture.start(BUSY, None);
    let record = fixture.record(&job).clone();
    fixture.end(&job);
    for dir in &record.dirs {
        assert!(
            wait_until(Duration::from_secs(5), || std::fs::remove_dir(&dir.path).is_ok()),
            "{}",
            dir.path.display()
        );
        std::fs::create_dir(&dir.path).unwrap();
    }
    let cpu_file = record.dirs.iter().map(|d| d.path.join("cpu.shares")).find(|p| p.exists());
    let cpu_file = cpu_file.unwrap_or_else(|| record.dirs[0].path.join("cpu.weight"));
    let theirs = std::fs::read_to_string(&cpu_file).unwrap();
    let gone = |r: Result<(), RuntimeError>| assert!(matches!(r, Err(RuntimeError::Gone { .. })), "{r:?}");
    gone(fixture.runtime.apply(1, &[(job.clone(), target(0.2, 0.1))]).remove(0).map(drop));
    gone(fixture.runtime.read(&job).map(drop));
    gone(fixture.runtime.is_alive(&job).map(drop));
    fixture.runtime.release(&job).unwrap();
    assert_eq!(std::fs::read_to_string(&cpu_file).unwrap(), theirs, "the group of another program was changed");
    assert!(record.dirs.iter().all(|d| d.path.is_dir()), "the group of another program was removed");
    for dir in &record.dirs {
        let _ = std::fs::remove_dir(&dir.path);
    }
}

#[test]
#[ignore = "needs root and cgroups"]
fn foreign_writes_are_reported_and_not_fought_over() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    let job = fixture.start(BUSY, None);
    let group = fixture.group(&job);
    let file = if group.has("cpu.weight") { "cpu.weight" } else { "cpu.shares" };
    let wanted = [(job.clone(), cpu_target(0.5, 0.5))];
    fixture.runtime.apply(1, &wanted).remove(0).unwrap();
    let (mut overwritten, mut reported) = (0, 0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(2500) {
        group.put(file, "77").unwrap();
        if let Err(RuntimeError::ForeignWrite { setting, found, .. }) = fixture.runtime.apply(2, &wanted).remove(0) {
            reported += 1;
            assert_eq!((setting.as_str(), found.as_str()), (file, "77"));
        }
        overwritten += usize::from(group.get(file).unwrap() != "77");
        std::thread::sleep(Duration::from_millis(20));
    }
    // At most once a second, and once at the beginning.
    let allowed = start.elapsed().as_secs() as usize + 1;
    assert!(reported >= overwritten, "reported {reported} times");
    assert!((1..=allowed).contains(&overwritten), "overwrote {overwritten} times in {:?}", start.elapsed());
    let peace = wait_until(Duration::from_secs(10), || fixture.runtime.apply(3, &wanted).remove(0).is_ok());
    assert!(peace, "an error although no other program writes any more");
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_new_daemon_adopts_what_still_runs() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    let (live, dead) = (fixture.start(BUSY, None), fixture.start(BUSY, None));
    fixture.runtime.apply(5, &[(live.clone(), cpu_target(0.5, 0.4))]).remove(0).unwrap();
    let before = fixture.limits_outside(&live);
    let (live_record, dead_record) = (fixture.record(&live).clone(), fixture.record(&dead).clone());
    let (live_leader, dead_leader) = (fixture.leader(&live), fixture.leader(&dead));
    fixture.end(&dead);
    // The records go through the journal.
    let live_record = serde_json::from_str(&serde_json::to_string(&live_record).unwrap()).unwrap();

    let mut second = ProcessRuntime::detect(fixture.config.clone()).unwrap();
    second.adopt(&live_record, live_leader).unwrap();
    assert_eq!(before, fixture.limits_outside(&live), "adopting changes nothing");
    assert!(matches!(second.adopt(&dead_record, dead_leader), Err(RuntimeError::Gone { .. })));
    second.sweep();
    assert!(fixture.record(&live).dirs[0].path.is_dir(), "a job that runs is never swept away");
    assert!(second.is_alive(&live).unwrap() && second.read(&live).unwrap().cpu_ns > 0);
    second.apply(6, &[(live.clone(), cpu_target(0.5, 0.3))]).remove(0).expect("the new daemon's limits are no contest");
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_new_daemon_keeps_the_group_of_a_job_about_to_start() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    let before = fixture.runtime.prepare(gainshare_core::model::JobId(9), "soon").unwrap();
    // The supervisor has the files open already when the first daemon dies and the second asks for the group.
    let mut joins: Vec<_> =
        before.procs_files.iter().map(|path| std::fs::OpenOptions::new().write(true).open(path).unwrap()).collect();
    let mut second = ProcessRuntime::detect(fixture.config.clone()).unwrap();
    let after = second.prepare(gainshare_core::model::JobId(9), "soon").unwrap();
    assert_eq!(before, after);
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    for file in &mut joins {
        std::io::Write::write_all(file, child.id().to_string().as_bytes()).expect("the group is the same");
    }
    // Even a third one, when the child is in: the job goes on as if nothing had happened.
    let mut third = ProcessRuntime::detect(fixture.config.clone()).unwrap();
    let group = third.prepare(gainshare_core::model::JobId(9), "soon").unwrap();
    third.started(&group.handle, Identity::of(child.id() as i32).unwrap()).unwrap();
    assert!(third.is_alive(&group.handle).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!third.is_alive(&group.handle).unwrap());
    third.release(&group.handle).unwrap();
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_job_that_grows_is_not_held_back_by_its_memory_limit() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    let more = "dd if=/dev/zero bs=50000000 count=1 2>/dev/null | sleep 60";
    let grow = format!("sleep 1; for i in 1 2 3 4 5 6; do ({more}) & sleep 0.3; done; wait");
    let job = fixture.start(&grow, None);
    let mut asked = Target::FREE;
    asked.limit.memory = gainshare_core::model::Share::clamped(0.001);
    asked.share.memory = asked.limit.memory;
    fixture.runtime.apply(1, &[(job.clone(), checked_target(asked))]).remove(0).unwrap();
    // The daemon looks at its jobs once a second.
    let start = Instant::now();
    let mut used = 0;
    while used < 280_000_000 && start.elapsed() < Duration::from_secs(40) {
        std::thread::sleep(Duration::from_millis(500));
        used = fixture.runtime.read(&job).unwrap().memory_bytes;
    }
    println!("300 MB after {:.1} s", start.elapsed().as_secs_f64());
    assert!(used >= 280_000_000, "stuck at {used} bytes");
    let group = fixture.group(&job);
    let killed = group.get("memory.events").or_else(|_| group.get("memory.oom_control")).unwrap();
    assert!(killed.lines().any(|l| l == "oom_kill 0"), "{killed}");
}

#[test]
#[ignore = "needs root and cgroups"]
fn memory_is_never_limited_below_use() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    // A block that was read and that the other end never reads.
    let script = "dd if=/dev/zero bs=100000000 count=1 2>/dev/null | sleep 60";
    let job = fixture.start(script, None);
    let grown = wait_until(Duration::from_secs(20), || fixture.runtime.read(&job).unwrap().memory_bytes > 90_000_000);
    assert!(grown, "{:?}", fixture.runtime.read(&job));
    let used = fixture.runtime.read(&job).unwrap().memory_bytes;
    let half_of_use = used as f64 / 2.0 / fixture.runtime.capacity().memory_bytes as f64;
    let mut asked = Target::FREE;
    asked.limit.memory = gainshare_core::model::Share::clamped(half_of_use);
    asked.share.memory = asked.limit.memory;
    let done = fixture.runtime.apply(1, &[(job.clone(), checked_target(asked))]).remove(0).unwrap();
    let limit: u64 = setting(&done.settings, ["memory.soft_limit_in_bytes", "memory.high"]).parse().unwrap();
    assert!(limit > used, "limit {limit} for a job that uses {used}");
    std::thread::sleep(Duration::from_millis(300));
    assert!(fixture.runtime.is_alive(&job).unwrap());
    let group = fixture.group(&job);
    let killed = group.get("memory.events").or_else(|_| group.get("memory.oom_control")).unwrap();
    assert!(killed.lines().any(|l| l == "oom_kill 0"), "{killed}");
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_pid_that_was_reused_is_not_touched() {
    let mut fixture = Fixture::new(LimitMode::Weight);
    let job = fixture.start("exec sleep 60", None);
    let mut bystander = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let real = Identity::of(bystander.id() as i32).unwrap();
    // The recorded leader has a pid that now belongs to the bystander.
    fixture.runtime.started(&job, Identity { start_ticks: real.start_ticks.wrapping_sub(7), ..real }).unwrap();
    fixture.runtime.terminate(&job).unwrap();
    assert!(
        wait_until(Duration::from_secs(5), || !fixture.runtime.is_alive(&job).unwrap()),
        "the job itself was not asked"
    );
    assert!(real.is_alive(), "a bystander was hit");
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

/// Files that are read every second stay open, so that a reading is few system calls. Counted, not timed.
#[test]
#[ignore = "needs root and cgroups"]
fn reading_a_group_takes_few_system_calls() {
    const JOBS: u64 = 10;
    let mut fixture = Fixture::new(LimitMode::Weight);
    let jobs: Vec<_> = (0..JOBS).map(|_| fixture.start_program(&["sleep", "60"], None)).collect();
    let reads = || {
        let text = std::fs::read_to_string("/proc/thread-self/io").expect("a kernel that counts system calls");
        text.lines().find_map(|l| l.strip_prefix("syscr: ")?.parse::<u64>().ok()).expect("syscr")
    };
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut read_all = || {
        for job in &jobs {
            fixture.runtime.read(job).unwrap();
            assert!(fixture.runtime.is_alive(job).unwrap());
        }
    };
    read_all();
    let (before, files) = (reads(), open_files());
    read_all();
    let each = (reads() - before) / JOBS;
    // Two for each of the three open files, three or four for the disk's and the list of processes.
    assert!(each <= 20, "{each} reads for one group");
    assert!(open_files() <= files, "every reading opens another file");
}
