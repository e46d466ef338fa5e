//! The process runtime against the conformance suite and its own promises, on this machine's real kernel.

mod suite;

#[path = "suite/processes.rs"]
mod processes;

use gainshare_core::fixtures::checked_target;
use gainshare_core::plan::Target;
use gainshare_limits::process::{self, Identity, ProcessRuntime};
use gainshare_limits::{Mode, Runtime, RuntimeError};
use processes::{BUSY, Bench};
use std::time::{Duration, Instant};
use suite::{Subject, cpu_target, free, target, wait_until};

fn setting(applied: &[(String, String)], names: [&str; 2]) -> String {
    applied
        .iter()
        .find(|(n, _)| names.contains(&n.as_str()))
        .unwrap_or_else(|| panic!("{names:?} in {applied:?}"))
        .1
        .clone()
}

#[test]
fn process_runtime_conforms() {
    suite::run_all(&mut Bench::new(Mode::Weight));
}

#[test]
fn nothing_is_left_behind() {
    let dir = {
        let mut bench = Bench::new(Mode::Weight);
        let job = bench.start(BUSY, None);
        let dir = bench.record(&job).dirs[0].path.clone();
        assert!(dir.is_dir());
        dir
    };
    assert!(!dir.exists() && !dir.parent().unwrap().exists(), "{} is left behind", dir.display());
}

#[test]
fn quota_caps_and_lets_go() {
    let mut bench = Bench::new(Mode::Quota);
    let job = bench.start_busy();
    let cores = bench.runtime.capacity().cores;
    let quarter_core = 0.25 / cores;
    let done = bench.runtime.apply(1, &[(job.clone(), cpu_target(quarter_core, 0.1))]).remove(0).unwrap();
    assert!(setting(&done.settings, ["cpu.cfs_quota_us", "cpu.max"]).starts_with("25000"), "{:?}", done.settings);
    let rate = |bench: &mut Bench| {
        let (start, before) = (Instant::now(), bench.runtime.read(&job).unwrap().cpu_ns);
        std::thread::sleep(Duration::from_millis(1200));
        (bench.runtime.read(&job).unwrap().cpu_ns - before) as f64 / start.elapsed().as_nanos() as f64
    };
    let capped = rate(&mut bench);
    assert!(capped < 0.34, "a quarter of a core became {capped:.2}");
    let free = bench.runtime.apply(2, &[(job.clone(), free())]).remove(0).unwrap();
    let quota = setting(&free.settings, ["cpu.cfs_quota_us", "cpu.max"]);
    assert!(quota == "-1" || quota == "max 100000", "{quota}");
}

#[test]
fn cores_mode_gives_each_job_its_own() {
    let mut bench = Bench::new(Mode::Cores);
    if bench.runtime.capacity().cores < 2.0 {
        println!("SKIPPED: cores_mode_gives_each_job_its_own needs two cores");
        return;
    }
    let (a, b) = (bench.start(BUSY, None), bench.start(BUSY, None));
    let wanted = [(a.clone(), cpu_target(0.5, 0.5)), (b.clone(), cpu_target(0.5, 0.5))];
    let cpus: Vec<String> = bench
        .runtime
        .apply(1, &wanted)
        .into_iter()
        .map(|r| setting(&r.unwrap().settings, ["cpuset.cpus", ""]))
        .collect();
    assert!(cpus.iter().all(|c| !c.is_empty()) && cpus[0] != cpus[1], "{cpus:?}");
    let allowed = std::fs::read_to_string(format!("/proc/{}/status", bench.pid(&a))).unwrap();
    assert!(allowed.contains(&format!("Cpus_allowed_list:\t{}\n", cpus[0])), "{allowed}");
    bench.runtime.release(&a).unwrap();
    let allowed = std::fs::read_to_string(format!("/proc/{}/status", bench.pid(&a))).unwrap();
    assert!(
        !allowed.contains(&format!("Cpus_allowed_list:\t{}\n", cpus[0])),
        "release gives every core back: {allowed}"
    );
}

#[test]
fn a_child_of_the_job_cannot_leave_and_dies_with_it() {
    let mut bench = Bench::new(Mode::Weight);
    // The grandchild leaves session and process group, ignores SIGTERM and outlives its parent.
    let job = bench.start("setsid sh -c 'trap \"\" TERM; while :; do sleep 0.05; done' & exit 0", None);
    bench.jobs.get_mut(&job.key).unwrap().0.wait().unwrap();
    assert!(bench.runtime.is_alive(&job).unwrap(), "a process of the job still runs");
    let before = bench.group(&job).pids();
    assert!(!before.is_empty());
    assert!(bench.runtime.stop(&job, Duration::from_millis(300)).unwrap(), "stopped");
    assert!(!bench.runtime.is_alive(&job).unwrap());
    // A process leaves its group a moment before it is gone.
    let dead = || before.iter().all(|&pid| !Identity::of(pid).is_some_and(|id| id.is_alive()));
    assert!(wait_until(Duration::from_secs(5), dead), "{before:?}");
}

#[test]
fn a_polite_job_is_asked_first() {
    let mut bench = Bench::new(Mode::Weight);
    let dir = tempfile::tempdir().unwrap();
    let (ready, file) = (dir.path().join("ready"), dir.path().join("saved"));
    let script = format!(
        "trap 'echo yes > {}; exit 0' TERM; echo > {}; while :; do sleep 0.05; done",
        file.display(),
        ready.display()
    );
    let job = bench.start(&script, None);
    assert!(wait_until(Duration::from_secs(5), || ready.exists()));
    assert!(bench.runtime.stop(&job, Duration::from_secs(10)).unwrap());
    assert_eq!(std::fs::read_to_string(file).unwrap(), "yes\n");
}

#[test]
fn a_fork_bomb_is_contained_and_killed() {
    let mut bench = Bench::new(Mode::Weight);
    bench.runtime.close();
    let config = gainshare_limits::process::Config { most_tasks: Some(40), ..bench.config.clone() };
    bench.runtime = ProcessRuntime::detect(config).unwrap();
    // The shell forks until it may not any more, and then ends; what it started stays.
    let job = bench.start("while :; do sleep 60 & done 2>/dev/null", None);
    let group = bench.group(&job);
    assert!(wait_until(Duration::from_secs(10), || group.pids().len() >= 30), "the bomb does not go off");
    assert!(group.pids().len() <= 40);
    assert!(bench.runtime.kill(&job).unwrap());
    assert!(!bench.runtime.is_alive(&job).unwrap());
}

#[test]
fn limits_go_back_without_a_daemon() {
    let mut bench = Bench::new(Mode::Cores);
    let job = bench.start(BUSY, None);
    bench.runtime.release(&job).unwrap();
    let original = bench.limits_outside(&job);
    let (record, leader) = (bench.record(&job).clone(), bench.leader(&job));
    bench.runtime.adopt(&record, leader).unwrap();
    let other = bench.start(BUSY, None);
    let wanted = [(job.clone(), target(0.3, 0.2)), (other, target(0.7, 0.8))];
    bench.runtime.apply(1, &wanted).into_iter().for_each(|r| _ = r.unwrap());
    assert_ne!(original, bench.limits_outside(&job));
    process::restore(&record).unwrap();
    let mut restored = bench.limits_outside(&job);
    // Some kernels cannot empty the list of a group with processes; all CPUs are as good.
    let all = format!("0-{}", bench.runtime.capacity().cores as u32 - 1);
    restored.iter_mut().filter(|(name, value)| name == "cpuset.cpus" && *value == all).for_each(|(_, value)| {
        *value = original.iter().find(|(name, _)| name == "cpuset.cpus").unwrap().1.clone();
    });
    assert_eq!(original, restored);
    bench.end(&job);
    bench.runtime.release(&job).unwrap();
    process::restore(&record).expect("harmless for a job that is gone");
}

#[test]
fn a_group_removed_and_made_again_is_gone_and_not_touched() {
    let mut bench = Bench::new(Mode::Weight);
    let job = bench.start(BUSY, None);
    let record = bench.record(&job).clone();
    bench.end(&job);
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
    gone(bench.runtime.apply(1, &[(job.clone(), target(0.2, 0.1))]).remove(0).map(drop));
    gone(bench.runtime.read(&job).map(drop));
    gone(bench.runtime.is_alive(&job).map(drop));
    bench.runtime.release(&job).unwrap();
    assert_eq!(std::fs::read_to_string(&cpu_file).unwrap(), theirs, "somebody else's group was changed");
    assert!(record.dirs.iter().all(|d| d.path.is_dir()), "somebody else's group was removed");
    for dir in &record.dirs {
        let _ = std::fs::remove_dir(&dir.path);
    }
}

#[test]
fn somebody_else_writing_is_noticed_and_not_fought_over() {
    let mut bench = Bench::new(Mode::Weight);
    let job = bench.start(BUSY, None);
    let group = bench.group(&job);
    let file = if group.has("cpu.weight") { "cpu.weight" } else { "cpu.shares" };
    let wanted = [(job.clone(), cpu_target(0.5, 0.5))];
    bench.runtime.apply(1, &wanted).remove(0).unwrap();
    let (mut overwritten, mut noticed) = (0, 0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(2500) {
        group.put(file, "77").unwrap();
        if let Err(RuntimeError::Contested { what, found, .. }) = bench.runtime.apply(2, &wanted).remove(0) {
            noticed += 1;
            assert_eq!((what.as_str(), found.as_str()), (file, "77"));
        }
        overwritten += usize::from(group.get(file).unwrap() != "77");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(noticed > 10, "noticed {noticed} times");
    assert!((1..=4).contains(&overwritten), "wrote {overwritten} times in 2.5 s");
    std::thread::sleep(Duration::from_millis(1000));
    let _ = bench.runtime.apply(3, &wanted);
    bench.runtime.apply(3, &wanted).remove(0).expect("peace once the other stops");
}

#[test]
fn a_new_daemon_adopts_what_still_runs() {
    let mut bench = Bench::new(Mode::Weight);
    let (live, dead) = (bench.start(BUSY, None), bench.start(BUSY, None));
    bench.runtime.apply(5, &[(live.clone(), cpu_target(0.5, 0.4))]).remove(0).unwrap();
    let before = bench.limits_outside(&live);
    let (live_record, dead_record) = (bench.record(&live).clone(), bench.record(&dead).clone());
    let (live_leader, dead_leader) = (bench.leader(&live), bench.leader(&dead));
    bench.end(&dead);
    // The records go through the journal.
    let live_record = serde_json::from_str(&serde_json::to_string(&live_record).unwrap()).unwrap();

    let mut second = ProcessRuntime::detect(bench.config.clone()).unwrap();
    second.adopt(&live_record, live_leader).unwrap();
    assert_eq!(before, bench.limits_outside(&live), "adopting changes nothing");
    assert!(matches!(second.adopt(&dead_record, dead_leader), Err(RuntimeError::Gone { .. })));
    second.sweep();
    assert!(bench.record(&live).dirs[0].path.is_dir(), "a job that runs is never swept away");
    assert!(second.is_alive(&live).unwrap() && second.read(&live).unwrap().cpu_ns > 0);
    second.apply(6, &[(live.clone(), cpu_target(0.5, 0.3))]).remove(0).expect("the new daemon's limits are no contest");
}

#[test]
fn a_new_daemon_keeps_the_group_of_a_job_about_to_start() {
    let mut bench = Bench::new(Mode::Weight);
    let before = bench.runtime.prepare(gainshare_core::model::JobId(9), "soon").unwrap();
    // The supervisor has the files open already when the first daemon dies and the second asks for the group.
    let mut joins: Vec<_> =
        before.procs_files.iter().map(|path| std::fs::OpenOptions::new().write(true).open(path).unwrap()).collect();
    let mut second = ProcessRuntime::detect(bench.config.clone()).unwrap();
    let after = second.prepare(gainshare_core::model::JobId(9), "soon").unwrap();
    assert_eq!(before, after);
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    for file in &mut joins {
        std::io::Write::write_all(file, child.id().to_string().as_bytes()).expect("the group is the same");
    }
    // Even a third one, when the child is in: the job goes on as if nothing had happened.
    let mut third = ProcessRuntime::detect(bench.config.clone()).unwrap();
    let group = third.prepare(gainshare_core::model::JobId(9), "soon").unwrap();
    third.started(&group.handle, Identity::of(child.id() as i32).unwrap()).unwrap();
    assert!(third.is_alive(&group.handle).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!third.is_alive(&group.handle).unwrap());
    third.release(&group.handle).unwrap();
}

#[test]
fn a_job_that_grows_is_not_held_back_by_its_memory_limit() {
    let mut bench = Bench::new(Mode::Weight);
    let more = "dd if=/dev/zero bs=50000000 count=1 2>/dev/null | sleep 60";
    let grow = format!("sleep 1; for i in 1 2 3 4 5 6; do ({more}) & sleep 0.3; done; wait");
    let job = bench.start(&grow, None);
    let mut asked = Target::FREE;
    asked.limit.memory = gainshare_core::model::Share::clamped(0.001);
    asked.share.memory = asked.limit.memory;
    bench.runtime.apply(1, &[(job.clone(), checked_target(asked))]).remove(0).unwrap();
    // The daemon looks at its jobs once a second.
    let start = Instant::now();
    let mut used = 0;
    while used < 280_000_000 && start.elapsed() < Duration::from_secs(40) {
        std::thread::sleep(Duration::from_millis(500));
        used = bench.runtime.read(&job).unwrap().memory_bytes;
    }
    println!("300 MB after {:.1} s", start.elapsed().as_secs_f64());
    assert!(used >= 280_000_000, "stuck at {used} bytes");
    let group = bench.group(&job);
    let killed = group.get("memory.events").or_else(|_| group.get("memory.oom_control")).unwrap();
    assert!(killed.lines().any(|l| l == "oom_kill 0"), "{killed}");
}

#[test]
fn memory_is_never_limited_below_use() {
    let mut bench = Bench::new(Mode::Weight);
    // A block that was read and that nobody takes.
    let script = "dd if=/dev/zero bs=100000000 count=1 2>/dev/null | sleep 60";
    let job = bench.start(script, None);
    let grown = wait_until(Duration::from_secs(20), || bench.runtime.read(&job).unwrap().memory_bytes > 90_000_000);
    assert!(grown, "{:?}", bench.runtime.read(&job));
    let used = bench.runtime.read(&job).unwrap().memory_bytes;
    let half_of_use = used as f64 / 2.0 / bench.runtime.capacity().memory_bytes as f64;
    let mut asked = Target::FREE;
    asked.limit.memory = gainshare_core::model::Share::clamped(half_of_use);
    asked.share.memory = asked.limit.memory;
    let done = bench.runtime.apply(1, &[(job.clone(), checked_target(asked))]).remove(0).unwrap();
    let limit: u64 = setting(&done.settings, ["memory.soft_limit_in_bytes", "memory.high"]).parse().unwrap();
    assert!(limit > used, "limit {limit} for a job that uses {used}");
    std::thread::sleep(Duration::from_millis(300));
    assert!(bench.runtime.is_alive(&job).unwrap());
    let group = bench.group(&job);
    let killed = group.get("memory.events").or_else(|_| group.get("memory.oom_control")).unwrap();
    assert!(killed.lines().any(|l| l == "oom_kill 0"), "{killed}");
}

#[test]
fn a_pid_that_was_reused_is_not_touched() {
    let mut bench = Bench::new(Mode::Weight);
    let job = bench.start("exec sleep 60", None);
    let mut bystander = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let real = Identity::of(bystander.id() as i32).unwrap();
    // The runtime is told a leader whose pid now belongs to the bystander.
    bench.runtime.started(&job, Identity { start_ticks: real.start_ticks.wrapping_sub(7), ..real }).unwrap();
    bench.runtime.terminate(&job).unwrap();
    assert!(
        wait_until(Duration::from_secs(5), || !bench.runtime.is_alive(&job).unwrap()),
        "the job itself was not asked"
    );
    assert!(real.is_alive(), "a bystander was hit");
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[test]
fn reading_fifty_groups_is_cheap() {
    let mut bench = Bench::new(Mode::Weight);
    let jobs: Vec<_> = (0..50).map(|_| bench.start_program(&["sleep", "60"], None)).collect();
    let cpu_time = || {
        let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_THREAD).unwrap();
        let us = |t: nix::sys::time::TimeVal| t.tv_sec() * 1_000_000 + t.tv_usec();
        us(usage.user_time()) + us(usage.system_time())
    };
    jobs.iter().for_each(|job| _ = bench.runtime.read(job).unwrap());
    let before = cpu_time();
    for _ in 0..10 {
        for job in &jobs {
            bench.runtime.read(job).unwrap();
            assert!(bench.runtime.is_alive(job).unwrap());
        }
    }
    let us_each_round = (cpu_time() - before) / 10;
    println!("reading 50 groups: {us_each_round} µs of CPU");
    assert!(us_each_round < 15_000, "{us_each_round} µs for 50 groups is more than 1.5 % of a core each second");
}
