//! Death at any moment: `kill -9`, every fail point, a daemon that stands still, a full disk.

use crate::common::{self, Daemon, read, sh, trainer, wait_until};
use gainshare_daemon::api::client::ClientError;
use gainshare_daemon::api::types::{ErrorCode, Explanation, JobState};
use gainshare_daemon::fail::{GUARD_POINTS, LIMIT_POINTS, POINTS};
use gainshare_daemon::journal::limits_in;
use gainshare_daemon::record::Change;
use gainshare_daemon::spec::JobSpec;
use gainshare_limits::process::ProcessStat;
use nix::sys::signal::Signal;
use std::time::{Duration, Instant};

#[test]
fn jobs_outlive_the_daemon_and_are_found_again() {
    let mut d = Daemon::start("slots = 8");
    let gate = d.dir.path().join("gate");
    let until_gate = format!("while [ ! -e {} ]; do sleep 0.02; done", gate.display());
    d.submit(vec![
        trainer("long", 60, "0.05"),
        sh("meanwhile", &format!("echo loss=3; {until_gate}; echo loss=1; exit 4")),
    ])
    .unwrap();
    let mut waits = sh("waits", "true");
    waits.after = vec!["long".into()];
    d.submit(vec![waits]).unwrap();
    let before = d.wait("long", "reporting", |j| j.metric.as_ref().is_some_and(|m| m.step > Some(5)));
    d.wait("meanwhile", "reporting", |j| j.metric.is_some());
    d.kill9();
    std::fs::write(&gate, "").unwrap();
    let exit = d.state().join("jobs").join(d_id(&d, "meanwhile")).join("exit.json");
    wait_until("the job ends without a daemon", 10, || exit.exists());

    d.up();
    let after = d.job("long");
    assert_eq!((after.state, after.pid, after.attempt), (JobState::Running, before.pid, 1), "untouched");
    let meanwhile = d.wait_end("meanwhile");
    assert_eq!((meanwhile.state, meanwhile.exit_code), (JobState::Failed, Some(4)));
    assert_eq!(meanwhile.metric.unwrap().value, 1.0, "what it said meanwhile was read");
    assert_eq!(d.wait_end("long").state, JobState::Done);
    let history = d.call(d.client.samples("long", 0.0)).unwrap();
    let steps: Vec<u64> = history.samples.iter().map(|s| s.step.unwrap()).collect();
    assert_eq!(steps, (1..=60).collect::<Vec<u64>>(), "no sample lost, none twice");
    assert_eq!(d.wait_end("waits").state, JobState::Done);
    let explained = d.call(d.client.explain("long")).unwrap();
    assert!(!explained.decisions.is_empty());
}

/// How such a job ended is not known: its supervisor, which would have recorded that, is gone.
#[test]
fn a_job_whose_supervisor_died_with_the_daemon_is_lost() {
    let mut d = Daemon::start("");
    d.submit(vec![sh("orphan", "exec sleep 60")]).unwrap();
    let pid = d.wait_state("orphan", JobState::Running).pid.unwrap();
    d.kill9();
    let parent = ProcessStat::of(pid).unwrap().parent;
    for pid in [parent, pid] {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
    d.up();
    assert_eq!(d.wait_end("orphan").state, JobState::Lost);
}

/// A journal that is damaged and moved away takes nothing with it but decisions and samples that were not printed.
#[test]
fn jobs_of_a_damaged_journal_are_found_again_and_their_numbers_are_not_given_again() {
    let mut d = Daemon::start("slots = 2");
    let gate = d.dir.path().join("gate");
    let until_gate = format!("while [ ! -e {} ]; do sleep 0.02; done", gate.display());
    d.submit(vec![sh("ended", "echo first; exit 3")]).unwrap();
    let ended = d.wait_end("ended");
    let names = ["running", "other", "waits"];
    d.submit(names.map(|name| sh(name, &format!("echo loss=3; {until_gate}; echo loss=1"))).to_vec()).unwrap();
    let mut dependant = sh("dependant", "true");
    dependant.after = vec!["waits".into()];
    d.submit(vec![dependant]).unwrap();
    let running = d.wait("running", "reporting", |j| j.metric.is_some());
    d.wait("other", "reporting", |j| j.metric.is_some());
    let (log_of_ended, log_of_running) =
        (d.job_dir("ended").join("output.log"), d.job_dir("running").join("output.log"));
    d.kill9();

    let journal = d.state().join("journal.db");
    let parts = ["journal.db-wal", "journal.db-shm"].map(|name| d.state().join(name));
    parts.iter().filter(|part| part.exists()).for_each(|part| std::fs::remove_file(part).unwrap());
    std::fs::write(&journal, [7_u8; 10_000]).unwrap();
    d.up_with(&[]);
    d.wait_dead();
    assert!(d.log().contains("is damaged") && d.log().contains("move it away"), "{}", d.log());
    std::fs::rename(&journal, d.state().join("damaged.db")).unwrap();

    d.up();
    let found = d.job("running");
    assert_eq!((found.id, found.state, found.pid, found.attempt), (running.id, JobState::Running, running.pid, 1));
    let found = d.job("ended");
    assert_eq!((found.id, found.state, found.exit_code), (ended.id, JobState::Failed, Some(3)));
    assert_eq!(d.job("waits").state, JobState::Queued);
    d.assert_answers_with_all_jobs();
    let new = d.submit(vec![sh("new", "echo new")]).unwrap();
    let largest = d.job("dependant").id;
    assert!(new[0].id > largest, "{} is not larger than {largest}", new[0].id);
    std::fs::write(&gate, "").unwrap();
    for name in ["running", "other", "waits", "dependant", "new"] {
        assert_eq!(d.wait_end(name).state, JobState::Done, "{name}");
    }
    assert_eq!(read(&log_of_running), "loss=3\nloss=1\n");
    assert_eq!(
        (read(&log_of_ended).as_str(), read(&d.job_dir("new").join("output.log")).as_str()),
        ("first\n", "new\n")
    );
    println!("fault: injected=1 violations=0");
}

/// What a daemon does at the end of a job is made up for: no job waits for ever for one of a lost journal.
#[test]
fn a_job_that_waits_for_one_that_failed_beside_a_lost_journal_fails() {
    let mut d = Daemon::start("");
    let gate = d.dir.path().join("gate");
    let script = format!("while [ ! -e {} ]; do sleep 0.02; done; exit 4", gate.display());
    let mut waits = sh("waits", "true");
    waits.after = vec!["fails".into()];
    d.submit(vec![sh("fails", &script), waits]).unwrap();
    d.wait_state("fails", JobState::Running);
    let exit = d.job_dir("fails").join("exit.json");
    d.kill9();
    std::fs::write(&gate, "").unwrap();
    wait_until("the job ends without a daemon", 10, || exit.exists());
    for name in ["journal.db", "journal.db-wal", "journal.db-shm"] {
        let _ = std::fs::remove_file(d.state().join(name));
    }
    d.up();
    let failed = d.wait_end("fails");
    assert_eq!((failed.state, failed.exit_code), (JobState::Failed, Some(4)));
    assert_eq!(d.wait_end("waits").state, JobState::Failed);
    println!("fault: injected=1 violations=0");
}

/// The id of a job, from the journal of a dead daemon.
fn d_id(d: &Daemon, name: &str) -> String {
    let (jobs, _) = d.journal();
    jobs.iter().find(|j| j.name == name).unwrap().id.0.to_string()
}

/// One life with a daemon that dies at `point`: whatever was acknowledged must be there afterwards
/// and happen exactly once. Returns how long the next daemon took until it answered, in seconds.
fn die_at(point: &str) -> f64 {
    let mut d = Daemon::new("policy = \"flowcon\"\nreact = \"sample\"\ninterval = \"1s\"");
    let marks = d.dir.path().join("marks");
    let script = |name: &str| {
        format!("echo {name} >> {}; for i in 1 2 3 4 5 6; do echo loss=$((60/i)); sleep 0.05; done", marks.display())
    };
    d.up_with(&[("GAINSHARE_FAIL", point)]);
    let begun = Instant::now();
    for name in ["a", "b", "c"] {
        // The daemon may be dying right now; what it does not answer is not acknowledged.
        while !d.is_dead() && d.call(d.client.health()).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = d.submit(vec![sh(name, &script(name))]);
    }
    while !d.is_dead() {
        assert!(begun.elapsed() < Duration::from_secs(15), "{point} was never reached; log:\n{}", d.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    d.wait_dead();
    let (jobs, _) = d.journal();
    d.assert_invariants();
    let restart = Instant::now();
    d.up();
    let restart_s = restart.elapsed().as_secs_f64();
    // All that was acknowledged is known before the first answer, not some time after it.
    d.assert_answers_with_all_jobs();
    for job in &jobs {
        let end = d.wait_end(&job.name);
        assert_eq!(end.state, JobState::Done, "{point}: {end:#?}");
        let history = d.call(d.client.samples(&job.name, 0.0)).unwrap();
        let values: Vec<f64> = history.samples.iter().map(|s| s.value).collect();
        assert_eq!(values, [60.0, 30.0, 20.0, 15.0, 12.0, 10.0], "{point}: samples of {}", job.name);
        let runs = read(&marks).lines().filter(|line| *line == job.name).count();
        assert_eq!(runs, 1, "{point}: {} ran {runs} times", job.name);
    }
    d.signal(Signal::SIGTERM);
    d.wait_dead();
    d.assert_invariants();
    let left = limits_in(&d.state().join("journal.db")).unwrap();
    assert!(left.is_empty(), "{point}: all limits were put back, not {left:?}");
    restart_s
}

#[test]
fn death_at_every_fail_point_loses_nothing_and_doubles_nothing() {
    let mut longest_s = 0.0_f64;
    // Mostly waiting: several at once cost little.
    for group in POINTS.chunks(5) {
        std::thread::scope(|scope| {
            let lives: Vec<_> = group.iter().map(|point| scope.spawn(move || die_at(point))).collect();
            for life in lives {
                longest_s = longest_s.max(life.join().unwrap());
            }
        });
    }
    println!("fault: injected={} violations=0 recovery_s={longest_s:.2}", POINTS.len());
}

/// After a death within the writing of limits: the limits are in force again, and a proper end puts all of them back.
fn limits_are_whole_again(mut d: Daemon, point: &str) {
    d.wait("small", "limited", |j| j.state == JobState::Running && j.share.is_some_and(|s| s < 0.3));
    let (file, _) = limit_of_small(&d);
    wait_until("the limit is in force", 20, || read(&file).trim() != default_weight(&file));
    d.call(d.client.shutdown(false)).unwrap();
    d.wait_dead();
    assert_eq!(read(&file).trim(), default_weight(&file), "{point}");
    let left = limits_in(&d.state().join("journal.db")).unwrap();
    assert!(left.is_empty(), "{point}: all limits were put back, not {left:?}");
    d.assert_invariants();
    // The jobs end with the test.
    d.up();
}

/// The daemon dies before and after the kernel takes a limit.
#[test]
#[ignore = "needs root and cgroups"]
fn death_within_the_writing_of_a_limit_leaves_none_behind() {
    for point in LIMIT_POINTS {
        let mut d = Daemon::new("");
        d.up_with(&[("GAINSHARE_FAIL", point)]);
        d.wait_up();
        // The answer may be lost; the jobs are in the journal before the first limit is written.
        let _ = d.submit(unequal_jobs());
        d.wait_dead();
        d.up();
        limits_are_whole_again(d, point);
    }
    println!("fault: injected={} violations=0", LIMIT_POINTS.len());
}

/// The daemon is dead and the guard dies while it puts limits back: the next daemon finds all of them in the journal.
#[test]
#[ignore = "needs root and cgroups"]
fn death_of_the_guard_while_it_restores_leaves_no_limit_behind() {
    for point in GUARD_POINTS {
        let mut d = Daemon::new("lease = \"3s\"");
        d.up_with(&[("GAINSHARE_FAIL", point)]);
        d.wait_up();
        wait_until("the guard runs", 20, || !read(&d.state().join("guard.lock")).trim().is_empty());
        let guard = d.guard_pid();
        unequal(&d);
        d.kill9();
        wait_until("the guard dies", 60, || !common::is_running(guard));
        let lapse = read(&d.run_dir().join("lapsed"));
        assert!(lapse.contains("restoring"), "{point}: the guard had ended its work: {lapse}");
        d.up();
        limits_are_whole_again(d, point);
    }
    println!("fault: injected={} violations=0", GUARD_POINTS.len());
}

fn weight(e: &Explanation) -> (String, String) {
    let cpu = e.in_force.iter().find(|s| ["cpu.shares", "cpu.weight"].contains(&s.name.as_str())).unwrap();
    (cpu.name.clone(), cpu.value.clone())
}

/// Two jobs with unequal floors, so that unequal weights are in force without any measuring; and
/// the files of the one that weighs less.
fn unequal(d: &Daemon) -> (std::path::PathBuf, String) {
    limited(d, unequal_jobs())
}

/// Submits jobs such as [`unequal_jobs`], and waits until they are limited.
fn limited(d: &Daemon, jobs: Vec<JobSpec>) -> (std::path::PathBuf, String) {
    d.submit(jobs).unwrap();
    d.wait("small", "limited", |j| j.state == JobState::Running && j.share.is_some_and(|s| s < 0.3));
    let (file, value) = limit_of_small(d);
    assert_eq!(read(&file).trim(), value, "{}", file.display());
    (file, value)
}

fn unequal_jobs() -> Vec<JobSpec> {
    let (mut large, small) = (sh("large", "sleep 60"), sh("small", "sleep 60"));
    large.floor = 0.8;
    vec![large, small]
}

/// The file of the job's CPU weight, and the weight that the daemon names.
fn limit_of_small(d: &Daemon) -> (std::path::PathBuf, String) {
    let (name, value) = weight(&d.call(d.client.explain("small")).unwrap());
    let groups = read(format!("/proc/{}/cgroup", d.job("small").pid.unwrap()).as_ref());
    let path = groups
        .lines()
        .find_map(|l| {
            let mut parts = l.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            let v2 = controllers.is_empty() && name == "cpu.weight";
            let v1 = controllers.split(',').any(|c| c == "cpu") && name == "cpu.shares";
            v2.then(|| format!("/sys/fs/cgroup{path}/{name}"))
                .or(v1.then(|| format!("/sys/fs/cgroup/cpu{path}/{name}")))
        })
        .unwrap();
    (path.into(), value)
}

fn default_weight(path: &std::path::Path) -> &'static str {
    if path.ends_with("cpu.shares") { "1024" } else { "100" }
}

#[test]
#[ignore = "needs root and cgroups"]
fn limits_go_back_when_the_daemon_dies_for_good() {
    let mut d = Daemon::start("lease = \"3s\"");
    let (file, _) = unequal(&d);
    let pid = d.job("small").pid.unwrap();
    d.kill9();
    wait_until("the guard puts the limit back", 10, || read(&file).trim() == default_weight(&file));
    assert!(std::path::Path::new(&format!("/proc/{pid}")).exists(), "the job goes on");
    let guard = d.guard_pid();
    wait_until("the guard ends", 10, || !common::is_running(guard));
    d.up();
    d.wait("small", "limited again", |j| j.share.is_some_and(|s| s < 0.3));
    wait_until("the limit is in force again", 5, || read(&file).trim() != default_weight(&file));
    println!("fault: injected=1 violations=0");
}

/// The daemon is stopped for three times its lease. The guard puts the limits back, and they stay so until the daemon
/// has begun a new epoch: nothing is written under the old one. The jobs do not notice.
#[test]
#[ignore = "needs root and cgroups"]
fn a_daemon_that_stood_still_begins_a_new_epoch() {
    const LEASE: Duration = Duration::from_secs(3);
    let mut d = Daemon::start("lease = \"3s\"");
    let marks = d.dir.path().join("marks");
    let mut jobs = unequal_jobs();
    jobs[1] = sh("small", &format!("while :; do echo x >> {}; sleep 0.1; done", marks.display()));
    let (file, before) = limited(&d, jobs);
    let (pid, epoch) = (d.job("small").pid, d.call(d.client.health()).unwrap().epoch);
    d.signal(Signal::SIGSTOP);
    let stopped = Instant::now();
    wait_until("the guard puts the limit back", 60, || read(&file).trim() == default_weight(&file));
    wait_until("all limits are back", 60, || read(&d.run_dir().join("lapsed")).contains("restored"));
    while stopped.elapsed() < 3 * LEASE {
        assert_eq!(read(&file).trim(), default_weight(&file), "nobody writes while the daemon is stopped");
        std::thread::sleep(Duration::from_millis(50));
    }
    let done = read(&marks).len();
    wait_until("the job works without the daemon", 60, || read(&marks).len() > done);
    d.signal(Signal::SIGCONT);
    let back = Instant::now();
    wait_until("the limit is in force again", 60, || {
        let value = read(&file).trim().to_owned();
        let is_default = value == default_weight(&file);
        // A limit that is in force again is that of a new plan, under a new epoch.
        assert!(is_default || d.call(d.client.health()).unwrap().epoch > epoch, "{value} under the old epoch");
        value == before
    });
    let recovery_s = back.elapsed().as_secs_f64();
    assert!(d.call(d.client.health()).unwrap().epoch > epoch);
    let small = d.job("small");
    assert_eq!((small.state, small.pid, small.attempt), (JobState::Running, pid, 1));
    assert_eq!(d.job("large").state, JobState::Running);
    let done = read(&marks).len();
    wait_until("the job works on", 60, || read(&marks).len() > done);
    d.call(d.client.shutdown(true)).unwrap();
    d.wait_dead();
    let (_, entries) = d.journal();
    let lapses: Vec<u64> = entries.iter().filter_map(|e| lapsed_epoch(&e.change)).collect();
    assert_eq!(lapses, [epoch], "the old epoch ended once");
    println!("fault: injected=1 violations=0 recovery_s={recovery_s:.2}");
}

fn lapsed_epoch(change: &Change) -> Option<u64> {
    match change {
        Change::Lapsed { epoch } => Some(*epoch),
        _ => None,
    }
}

#[test]
#[ignore = "needs root and cgroups"]
fn limits_go_back_when_the_daemon_ends_properly_and_jobs_go_on() {
    let mut d = Daemon::start("");
    let (file, before) = unequal(&d);
    d.call(d.client.shutdown(false)).unwrap();
    d.wait_dead();
    assert_eq!(read(&file).trim(), default_weight(&file));
    d.up();
    wait_until("the limit is in force again", 5, || read(&file).trim() == before);
}

#[test]
#[ignore = "needs root: it mounts a tmpfs"]
fn a_full_disk_refuses_new_work_and_passes() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    let mut d = Daemon::new("");
    std::fs::create_dir(d.state()).unwrap();
    mount(Some("tmpfs"), &d.state(), Some("tmpfs"), MsFlags::empty(), Some("size=1m,mode=0700"))
        .expect("the tests of a full disk mount a tmpfs and need root");
    d.up();
    d.submit(vec![sh("before", "sleep 0.5; exit 5")]).unwrap();
    d.wait_state("before", JobState::Running);
    let filler = d.state().join("filler");
    let error = (0..200).find_map(|n| {
        let mut spec = sh(&format!("j{n}"), "sleep 60");
        spec.env.insert("PADDING".into(), "x".repeat(20_000));
        spec.after = vec!["before".into()];
        d.submit(vec![spec]).err()
    });
    let _ = std::fs::write(&filler, vec![0; 2 << 20]);
    match error.expect("a megabyte fills up") {
        ClientError::Refused { status, code, message } => {
            assert_eq!((status, code), (507, Some(ErrorCode::DiskFull)), "{message}");
            assert!(message.contains("free some space") && !message.contains('\n'), "{message}");
        }
        other => panic!("{other}"),
    }
    let health = d.call(d.client.health()).unwrap();
    assert_eq!(health.status, "degraded", "{health:?}");
    // The job's end is a fact, whether or not the disk takes it.
    std::thread::sleep(Duration::from_millis(700));
    mount(None::<&str>, &d.state(), None::<&str>, MsFlags::MS_REMOUNT, Some("size=16m")).unwrap();
    let before = d.wait_end("before");
    assert!(matches!(before.state, JobState::Failed | JobState::Lost), "{before:?}");
    wait_until("health is good again", 5, || d.call(d.client.health()).unwrap().status == "ok");
    d.submit(vec![sh("later", "true")]).unwrap();
    assert_eq!(d.wait_end("later").state, JobState::Done);
    d.call(d.client.shutdown(true)).unwrap();
    d.wait_dead();
    d.assert_invariants();
    println!("fault: injected=1 violations=0");
    umount2(&d.state(), MntFlags::MNT_DETACH).unwrap();
}

/// The limits of running jobs stay in force for as long as the disk is full, and the lease is renewed.
#[test]
#[ignore = "needs root and cgroups: it mounts a tmpfs"]
fn limits_stay_in_force_while_the_disk_is_full() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    const LEASE: Duration = Duration::from_secs(3);
    let mut d = Daemon::new("lease = \"3s\"");
    std::fs::create_dir(d.state()).unwrap();
    mount(Some("tmpfs"), &d.state(), Some("tmpfs"), MsFlags::empty(), Some("size=1m,mode=0700"))
        .expect("the tests of a full disk mount a tmpfs and need root");
    d.up();
    let (file, value) = unequal(&d);
    let _ = std::fs::write(d.state().join("filler"), vec![0; 2 << 20]);
    let mut refused = sh("refused", "true");
    refused.env.insert("PADDING".into(), "x".repeat(20_000));
    let refused = d.submit(vec![refused]).unwrap_err().to_string();
    assert!(refused.contains("free some space"), "{refused}");
    assert_eq!(d.call(d.client.health()).unwrap().status, "degraded");
    let (full, lease) = (Instant::now(), d.run_dir().join("lease"));
    let mut renewals = std::collections::BTreeSet::new();
    // For longer than the guard would wait.
    while full.elapsed() < 2 * LEASE || renewals.len() < 4 {
        assert!(full.elapsed() < 20 * LEASE, "the lease was renewed {} times", renewals.len());
        renewals.insert(read(&lease));
        assert_eq!(read(&file).trim(), value, "after {:.1} s", full.elapsed().as_secs_f64());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(!d.run_dir().join("lapsed").exists(), "the guard had no reason to act");
    mount(None::<&str>, &d.state(), None::<&str>, MsFlags::MS_REMOUNT, Some("size=16m")).unwrap();
    let freed = Instant::now();
    wait_until("health is good again", 60, || d.call(d.client.health()).unwrap().status == "ok");
    let recovery_s = freed.elapsed().as_secs_f64();
    assert_eq!((read(&file).trim(), d.job("small").state), (value.as_str(), JobState::Running));
    d.submit(vec![sh("later", "true")]).unwrap();
    assert_eq!(d.wait_end("later").state, JobState::Done);
    d.call(d.client.shutdown(true)).unwrap();
    d.wait_dead();
    d.assert_invariants();
    println!("fault: injected=1 violations=0 recovery_s={recovery_s:.2}");
    umount2(&d.state(), MntFlags::MNT_DETACH).unwrap();
}

/// A daemon that was killed while it wrote to its journal: the next one reports what it dropped, once, and goes on with
/// all that was committed.
#[test]
fn a_dropped_tail_of_the_journal_is_reported() {
    let mut d = Daemon::start("");
    d.submit(vec![sh("job", "sleep 120")]).unwrap();
    let pid = d.wait_state("job", JobState::Running).pid;
    let log = d.state().join("journal.db-wal");
    d.kill9();
    // The beginning of a frame, as a commit leaves it that was not finished.
    let mut bytes = std::fs::read(&log).unwrap();
    let frame = bytes[32..32 + 1000].to_vec();
    bytes.extend(&frame);
    std::fs::write(&log, &bytes).unwrap();
    let report = format!("of {} bytes of {} are not a whole batch and were dropped", bytes.len(), log.display());
    for restart in 1..=2 {
        d.up();
        let job = d.wait_state("job", JobState::Running);
        assert_eq!((job.pid, job.attempt), (pid, 1));
        assert_eq!(d.log().matches(&report).count(), 1, "{report}, after {restart} restarts; log:\n{}", d.log());
        if restart == 1 {
            d.kill9();
        }
    }
    println!("fault: injected=1 violations=0");
}
