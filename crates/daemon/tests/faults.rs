//! Faults of others: a second daemon, a flood of reports, a failed restore, a supervisor killed at
//! the wrong moment, hostile files.

use crate::common::{self, Daemon, is_running, read, sh, wait_until};
use gainshare_core::model::JobId;
use gainshare_daemon::api::client::Client;
use gainshare_daemon::api::types::{JobInfo, JobState};
use gainshare_daemon::journal::{Batch, Journal, LimitRow};
use gainshare_daemon::paths::Paths;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

/// B2: with another runtime directory the same user finds the running daemon, and cannot start a second one.
#[test]
fn one_journal_has_one_daemon_whatever_the_runtime_directory() {
    let d = Daemon::start("");
    let other = Paths { state: d.state(), runtime: d.dir.path().join("elsewhere") };
    let health = d.call(Client::of(&other).health()).unwrap();
    assert_eq!(health.pid as i32, d.pid().as_raw());

    let config = d.dir.path().join("other.toml");
    std::fs::write(&config, format!("state_dir = {:?}\nruntime_dir = {:?}\n", other.state, other.runtime)).unwrap();
    let second = std::process::Command::new(common::program()).arg("up").arg(&config).output().unwrap();
    let error = String::from_utf8(second.stderr).unwrap();
    assert!(!second.status.success() && error.contains(&d.run_dir().join("api.sock").display().to_string()), "{error}");
    assert!(!error.contains("GAINSHARE_RUNTIME_DIR"), "{error}");
    assert_eq!(d.call(d.client.health()).unwrap().status, "ok");
    println!("fault: injected=1 violations=0");
}

fn push(address: &str, path: &str, token: &str, body: &str) -> bool {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {token}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.starts_with("HTTP/1.1 200")
}

/// B3: clients that push as fast as they are answered, on a slow disk, keep neither the lease nor
/// decisions from their turn; and pushes share commits.
#[test]
fn a_flood_of_pushes_starves_no_heartbeat_and_shares_commits() {
    const CLIENTS: usize = 8;
    const PUSHES: usize = 60;
    let mut d = Daemon::new("");
    d.up_with(&[("GAINSHARE_SLOW_COMMIT_MS", "50")]);
    d.wait_up();
    d.submit(vec![sh("pushes", "sleep 60")]).unwrap();
    let id = d.wait_state("pushes", JobState::Running).id;
    let address = read(&d.run_dir().join("address")).trim().to_owned();
    let token = read(&d.state().join("token")).trim().to_owned();
    let path = format!("/v1/jobs/{id}/push");
    let lease = d.run_dir().join("lease");
    let mut renewals = BTreeSet::new();
    let acknowledged: usize = std::thread::scope(|scope| {
        let body = r#"{"metric":"loss","value":0.5}"#;
        let client = || (0..PUSHES).filter(|_| push(&address, &path, &token, body)).count();
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        while clients.iter().any(|c| !c.is_finished()) {
            renewals.insert(read(&lease));
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        clients.into_iter().map(|c| c.join().unwrap()).sum()
    });
    assert_eq!(acknowledged, CLIENTS * PUSHES);
    // One commit takes 50 ms, so the flood takes at least 3 s however the pushes are grouped.
    assert!(renewals.len() >= 3, "the lease was renewed {} times", renewals.len());
    assert!(!d.run_dir().join("lapsed").exists(), "the guard had no reason to act");
    let samples = d.call(d.client.samples("pushes", 0.0)).unwrap().samples.len();
    assert_eq!(samples, acknowledged, "what was acknowledged is kept");
    let metrics = metrics(&address, &token);
    let commits = metrics.lines().find_map(|l| l.strip_prefix("gainshare_journal_commit_seconds_count "));
    let commits: usize = commits.unwrap().parse().unwrap();
    assert!(commits < acknowledged / 2, "{commits} commits for {acknowledged} pushes");
    println!("fault: injected={acknowledged} violations=0");
}

/// Pushes that were acknowledged since the position was last committed are there after a kill, each once.
#[test]
fn acknowledged_pushes_survive_the_death_of_the_daemon() {
    const PUSHES: u64 = 40;
    let mut d = Daemon::start("");
    d.submit(vec![sh("pushes", "sleep 60")]).unwrap();
    let id = d.wait_state("pushes", JobState::Running).id;
    let path = format!("/v1/jobs/{id}/push");
    for life in 0..3 {
        let address = read(&d.run_dir().join("address")).trim().to_owned();
        let token = read(&d.state().join("token")).trim().to_owned();
        for step in life * PUSHES + 1..=(life + 1) * PUSHES {
            let body = format!(r#"{{"metric":"loss","value":{},"step":{step}}}"#, 1.0 / step as f64);
            assert!(push(&address, &path, &token, &body));
        }
        d.kill9();
        d.up();
        let last = (life + 1) * PUSHES;
        let metric = d.job("pushes").metric.unwrap();
        assert_eq!((metric.value, metric.step), (1.0 / last as f64, Some(last)));
        let samples = d.call(d.client.samples("pushes", 0.0)).unwrap().samples;
        assert!(samples.iter().map(|sample| sample.step).eq((1..=last).map(Some)), "{samples:?}");
    }
}

fn metrics(address: &str, token: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Adds a row to the journal of a dead daemon, or removes it.
fn change_limits(d: &Daemon, change: impl FnOnce(&mut Batch)) {
    let mut batch = Batch::default();
    change(&mut batch);
    Journal::open(&d.state().join("journal.db")).unwrap().commit(&batch).unwrap();
}

/// B6: what cannot be restored is tried again until it can be; then the guard of a dead daemon ends.
#[test]
fn the_guard_tries_again_what_could_not_be_restored() {
    let mut d = Daemon::start("lease = \"3s\"");
    d.submit(vec![sh("job", "sleep 60")]).unwrap();
    d.wait_state("job", JobState::Running);
    d.kill9();
    let guard = d.guard_pid();
    // Its engine does not exist, so that it cannot be restored.
    let original = r#"{"original":{"id":"gone","values":{}},"socket":"/nonexistent/docker.sock"}"#.to_owned();
    let row = LimitRow { key: "stuck".into(), job: JobId(99), runtime: "docker".into(), original };
    change_limits(&d, |batch| batch.limits.push(row));
    wait_until("the guard begins", 20, || read(&d.run_dir().join("lapsed")).contains("restoring"));
    // Several rounds and a second attempt later the guard is still there and has not claimed success.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert!(is_running(guard));
    assert!(read(&d.run_dir().join("lapsed")).contains("restoring"));
    change_limits(&d, |batch| batch.released.push("stuck".into()));
    wait_until("the guard ends when all is restored", 30, || !is_running(guard));
    assert!(read(&d.run_dir().join("lapsed")).contains("restored"));
    println!("fault: injected=1 violations=0");
    d.up();
    d.call(d.client.stop("job", 0.0)).unwrap();
}

/// B6: a daemon that is stopped past its lease and then killed leaves no guard behind.
#[test]
fn the_guard_of_a_daemon_stopped_and_then_killed_ends() {
    let mut d = Daemon::start("lease = \"3s\"");
    let guard = d.wait_for_guard();
    d.signal(Signal::SIGSTOP);
    wait_until("the lease lapses", 20, || read(&d.run_dir().join("lapsed")).contains("restored"));
    assert!(is_running(guard), "the daemon may come back");
    d.kill9();
    wait_until("the guard ends", 20, || !is_running(guard));
}

/// B6: a new daemon uses the guard of the last one and starts no other.
#[test]
fn a_restarted_daemon_keeps_the_guard_it_finds() {
    let mut d = Daemon::start("lease = \"10s\"");
    let guard = d.wait_for_guard();
    d.kill9();
    d.up();
    let lease = d.run_dir().join("lease");
    let mut beats = BTreeSet::new();
    wait_until("five beats", 30, || {
        beats.insert(read(&lease));
        beats.len() > 5
    });
    assert_eq!((d.guard_pid(), is_running(guard)), (guard, true));
    assert_eq!(d.log().matches("started the guard").count(), 1, "one guard for two daemons; log:\n{}", d.log());
}

/// B8: a supervisor killed after the fork leaves a job that runs: it goes on, is not started again
/// and is not called failed.
#[test]
#[ignore = "needs root and cgroups"]
fn a_supervisor_killed_after_the_fork_leaves_one_running_job() {
    for restart in [false, true] {
        let mut d = Daemon::new("");
        let marks = d.dir.path().join("marks");
        d.up_with(&[("GAINSHARE_FAIL", "supervise-before-started")]);
        d.wait_up();
        d.submit(vec![sh("job", &format!("echo run >> {}; exec sleep 60", marks.display()))]).unwrap();
        wait_until("the job runs", 10, || read(&marks).contains("run"));
        if restart {
            d.kill9();
            d.up();
        }
        let job = d.wait_state("job", JobState::Running);
        assert!(job.notes.iter().any(|n| n.contains("supervisor died")), "{job:?}");
        assert_eq!((job.attempt, read(&marks).lines().count()), (1, 1), "restart: {restart}");
        kill(Pid::from_raw(job.pid.unwrap()), Signal::SIGKILL).unwrap();
        assert_eq!(d.wait_end("job").state, JobState::Lost, "how it ended is not known");
        assert_eq!(read(&marks).lines().count(), 1);
        println!("fault: injected=1 violations=0");
    }
}

/// B8: a supervisor killed before the fork, after its intent: the job did not run, and is not run
/// behind the user's back.
#[test]
fn a_supervisor_killed_before_the_fork_starts_nothing_twice() {
    let mut d = Daemon::new("");
    let marks = d.dir.path().join("marks");
    d.up_with(&[("GAINSHARE_FAIL", "supervise-before-fork")]);
    d.wait_up();
    d.submit(vec![sh("job", &format!("echo run >> {}", marks.display()))]).unwrap();
    let job = d.wait_end("job");
    assert_eq!(job.state, JobState::Lost, "{job:?}");
    assert_eq!(read(&marks), "");
}

/// B10: the time at which a stubborn job is killed survives the daemon.
#[test]
fn a_stop_that_was_asked_for_kills_after_a_restart() {
    let mut d = Daemon::start("");
    d.submit(vec![sh("deaf", "trap '' TERM; echo up; while :; do sleep 0.05; done")]).unwrap();
    let log = d.job_dir("deaf").join("output.log");
    wait_until("the trap is set", 10, || read(&log).contains("up"));
    d.call(d.client.stop("deaf", 2.0)).unwrap();
    d.kill9();
    d.up();
    let end = d.wait_end("deaf");
    assert_eq!((end.state, end.signal), (JobState::Stopped, Some(9)), "{end:?}");
}

fn contains(dir: &Path, needle: &[u8]) -> Option<String> {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(found) = contains(&path, needle) {
                return Some(found);
            }
        } else if path.is_file() && std::fs::read(&path).unwrap_or_default().windows(needle.len()).any(|w| w == needle)
        {
            return Some(path.display().to_string());
        }
    }
    None
}

/// B10: values of the environment reach the job, also after a crash before its start, and no file
/// keeps them once it has started.
#[test]
fn values_of_the_environment_are_gone_once_the_job_has_started() {
    let mut d = Daemon::new("");
    let seen = d.dir.path().join("seen");
    d.up_with(&[("GAINSHARE_FAIL", "admit-before-spawn")]);
    d.wait_up();
    let mut job = sh("job", &format!("echo $OWN $BASE > {}; sleep 60", seen.display()));
    job.env.insert("OWN".into(), "canary-own".into());
    let path = std::env::var("PATH").unwrap();
    let base = [("PATH".to_owned(), path), ("BASE".to_owned(), "canary-base".to_owned())];
    let _ = d.call(d.client.submit(vec![job], base.into_iter().collect()));
    d.wait_dead();
    assert!(read(&d.state().join("jobs/1/spec.json")).contains("canary-own"), "kept until the start");
    for name in ["journal.db", "journal.db-wal"] {
        let bytes = std::fs::read(d.state().join(name)).unwrap_or_default();
        assert!(!bytes.windows(6).any(|w| w == b"canary"), "{name} has a value");
    }
    d.up();
    wait_until("the job has its environment", 20, || read(&seen).trim() == "canary-own canary-base");
    d.wait_state("job", JobState::Running);
    wait_until("no file has a value", 10, || contains(&d.state(), b"canary").is_none());
    assert_eq!(d.job("job").env_names, ["OWN"]);
    println!("fault: injected=2 violations=0");
}

/// A part of the daemon that ends without having been asked to ends the daemon with an error. Its jobs go on, and the
/// next daemon finds them.
#[test]
fn a_daemon_whose_part_ended_ends_and_its_jobs_go_on() {
    let mut d = Daemon::start("");
    d.submit(vec![sh("job", "sleep 120")]).unwrap();
    let pid = d.wait_state("job", JobState::Running).pid;
    d.kill9();
    d.up_with(&[("GAINSHARE_END_PART", "signals")]);
    d.wait_dead();
    let log = d.log();
    assert!(log.contains("the handler of signals ended unexpectedly: ending the daemon"), "{log}");
    // The last word of a program that fails.
    assert!(log.lines().any(|line| line.starts_with("error: ") && line.contains("the handler of signals")), "{log}");
    assert!(is_running(pid.unwrap()), "the job goes on");
    d.up();
    let job = d.wait_state("job", JobState::Running);
    assert_eq!((job.pid, job.attempt), (pid, 1));
}

/// A panic in the collector of one job: the job gets a note and goes on, and the other jobs are read as before, also
/// after a restart.
#[test]
fn a_collector_that_panics_concerns_its_own_job_only() {
    let mut d = Daemon::new("");
    let variables = [("GAINSHARE_PANIC_ON", "a line that no parser survives")];
    d.up_with(&variables);
    d.wait_up();
    let poison = "echo loss=5; echo a line that no parser survives; while :; do echo loss=4; sleep 0.05; done";
    d.submit(vec![sh("poison", poison), common::trainer("sound", 100_000, "0.05")]).unwrap();
    let panicked = |d: &Daemon| {
        let notes = d.call(d.client.explain("poison")).unwrap().metric_notes;
        notes.iter().any(|note| note.starts_with("1 faults inside a collector"))
    };
    for restart in [false, true] {
        if restart {
            d.kill9();
            // Whether or not the fault was saved before the kill, the same text does no harm again.
            d.up_with(&variables);
            d.wait_up();
        }
        wait_until("the fault is counted", 30, || panicked(&d));
        let job = d.job("poison");
        assert_eq!((job.state, job.attempt), (JobState::Running, 1));
        assert!(job.notes.iter().any(|note| note.contains("goes on with an equal share")), "{job:?}");
        let before = d.wait("sound", "reporting", |j| j.metric.is_some()).metric.unwrap().step;
        let is_later = |j: &JobInfo| j.metric.as_ref().is_some_and(|m| m.step > before);
        assert_eq!(d.wait("sound", "reporting on", is_later).state, JobState::Running);
        assert_eq!(d.call(d.client.health()).unwrap().status, "ok");
    }
    println!("fault: injected=1 violations=0");
}

/// A job that forks until it may not any more: the daemon renews its lease, runs another job, and a stop ends all
/// processes of the bomb.
#[test]
#[ignore = "needs root and cgroups"]
fn a_fork_bomb_does_not_hold_up_the_daemon() {
    const MOST: usize = 60;
    let mut d = Daemon::new("");
    d.up_with(&[("GAINSHARE_MAX_TASKS", &MOST.to_string())]);
    d.wait_up();
    let mark = format!("{}.5", 7_000_000 + std::process::id());
    // A shell that cannot fork ends, so that each burst has one of its own. The number of forks is bounded: without a
    // limit of tasks the bomb would end this machine, not the test.
    let burst = format!("(i=0; while [ $i -lt {} ]; do i=$((i+1)); sleep {mark} & done)", 4 * MOST);
    d.submit(vec![sh("bomb", &format!("{burst}; {burst}; {burst}; exec sleep {mark}"))]).unwrap();
    let alive = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let lines = all.map(|entry| std::fs::read(entry.path().join("cmdline")).unwrap_or_default());
        lines.filter(|line| line.strip_suffix(b"\0").is_some_and(|rest| rest.ends_with(mark.as_bytes()))).count()
    };
    let log = d.job_dir("bomb").join("output.log");
    // "Cannot fork", or "fork: retry" of another shell.
    wait_until("the bomb reaches its limit", 60, || read(&log).contains("ork"));
    let processes = alive();
    assert!((MOST / 2..=MOST).contains(&processes), "{processes} processes at a limit of {MOST}: {}", read(&log));
    let lease = d.run_dir().join("lease");
    let mut renewals = BTreeSet::new();
    wait_until("the lease is renewed", 60, || {
        renewals.insert(read(&lease));
        renewals.len() > 3
    });
    d.submit(vec![sh("other", "true")]).unwrap();
    assert_eq!(d.wait_end("other").state, JobState::Done, "the limit is that of the bomb alone");
    assert!(alive() <= MOST, "{} processes", alive());
    d.call(d.client.stop("bomb", 0.0)).unwrap();
    assert_eq!(d.wait_end("bomb").state, JobState::Stopped);
    wait_until("no process of the bomb is left", 60, || alive() == 0);
    assert!(!d.run_dir().join("lapsed").exists(), "the guard had no reason to act");
    println!("fault: injected={processes} violations=0");
}

/// B10: FIFOs and links that a job puts in place of its files block neither the driver nor the API.
#[test]
fn hostile_files_in_the_jobs_directory_block_nothing() {
    let d = Daemon::start("");
    d.submit(vec![sh("job", "echo up; sleep 60")]).unwrap();
    d.wait_state("job", JobState::Running);
    let dir = d.job_dir("job");
    wait_until("its output is there", 10, || read(&dir.join("output.log")).contains("up"));
    let rights = nix::sys::stat::Mode::S_IRWXU;
    std::fs::remove_file(dir.join("output.log")).unwrap();
    nix::unistd::mkfifo(&dir.join("output.log"), rights).unwrap();
    nix::unistd::mkfifo(&dir.join("exit.json"), rights).unwrap();
    let log = d.call(async {
        let mut stream = d.client.logs("job", 0, false).await.unwrap();
        stream.next().await.unwrap()
    });
    assert_eq!(log, None, "a FIFO is no output");
    std::fs::remove_file(dir.join("exit.json")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", dir.join("exit.json")).unwrap();
    let lease = d.run_dir().join("lease");
    let before = read(&lease);
    wait_until("the driver goes on", 10, || read(&lease) != before);
    assert_eq!(d.job("job").state, JobState::Running);
    assert_eq!(d.call(d.client.health()).unwrap().status, "ok");
}

/// A descriptor was kept for each ended job that had had a page for the library inside it.
#[test]
fn ended_jobs_leave_no_descriptor_behind() {
    const JOBS: usize = 12;
    let folder = tempfile::tempdir().unwrap();
    // The library must lie beside the program. It changes nothing in these jobs.
    let program = folder.path().join("gainshare");
    std::os::unix::fs::symlink(common::program(), &program).unwrap();
    let library = common::build_library(folder.path(), "empty", "int gainshare_test_library;");
    std::fs::rename(library, folder.path().join("libgainshare_inside.so")).unwrap();
    let d = Daemon::start(&format!("program = {program:?}\nslots = 100"));
    let descriptors = || {
        let all = std::fs::read_dir(format!("/proc/{}/fd", d.pid())).unwrap().flatten();
        all.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect::<Vec<_>>()
    };
    let pages = || descriptors().iter().filter(|path| path.ends_with("inside.page")).count();
    let before = descriptors().len();
    let gate = folder.path().join("gate");
    let script = format!("while [ ! -e {} ]; do sleep 0.1; done", gate.display());
    let names: Vec<String> = (0..JOBS).map(|i| format!("job-{i}")).collect();
    d.submit(names.iter().map(|name| sh(name, &script)).collect()).unwrap();
    wait_until("the page of each job is open", 30, || pages() == JOBS);
    std::fs::write(gate, "").unwrap();
    for name in &names {
        assert_eq!(d.wait_end(name).state, JobState::Done);
    }
    wait_until("all pages are closed", 20, || pages() == 0);
    // Some descriptors are opened once, and a connection of a client may still be open.
    wait_until("nothing else is left of the jobs", 20, || descriptors().len() < before + JOBS);
    println!("fault: injected={JOBS} violations=0 before={before} after={}", descriptors().len());
}

/// A job can fill its folder with more files than can be removed between two renewals of the lease. The folder of a
/// forgotten job is gone at once; its files go on another thread, or when the next daemon starts.
#[test]
fn the_folder_of_a_forgotten_job_goes_in_the_background() {
    const FILES: usize = 50_000;
    let mut d = Daemon::start("");
    d.submit(vec![sh("fills", "true")]).unwrap();
    d.wait_end("fills");
    let (folder, removed) = (d.job_dir("fills"), d.state().join("removed"));
    for i in 0..FILES {
        std::fs::write(folder.join(i.to_string()), "").unwrap();
    }
    d.forget("fills");
    assert!(!folder.exists());
    let left = || std::fs::read_dir(&removed).unwrap().count();
    assert_eq!(left(), 1, "the answer does not wait for {FILES} files");
    wait_until("the files are removed", 60, || left() == 0);
    d.kill9();
    // As if the daemon had died while it removed a folder.
    std::fs::create_dir_all(removed.join("1-1/folder")).unwrap();
    std::fs::write(removed.join("1-1/folder/file"), "").unwrap();
    d.up();
    wait_until("the next daemon removes the rest", 60, || left() == 0);
    println!("fault: injected={FILES} violations=0");
}
