//! One daemon for each journal, and one process for each attempt, with the real program.

use crate::common::{Home, Outcome, eventually};

/// B2: a command with another runtime directory, as cron or `sudo -u` has it, uses the running daemon.
#[test]
fn commands_with_another_runtime_directory_use_the_same_daemon() {
    let home = Home::new();
    home.ok(&["up", "--detach"]);
    home.ok(&["run", "--detach", "--name", "long", "--", "sleep", "60"]);
    let other = home.path().join("other");
    let elsewhere =
        |words: &[&str]| Outcome::from(home.command(words).env("GAINSHARE_RUNTIME_DIR", &other).output().unwrap());
    let listed = elsewhere(&["ps", "-o", "json"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    assert!(listed.stdout.contains("\"long\""), "{}", listed.stdout);
    let pid = home.daemon_pid().to_string();
    elsewhere(&["up"]).fails_with(1, &["already running", &pid]);
    let ran = elsewhere(&["run", "--", "sh", "-c", "exit 3"]);
    assert_eq!(ran.code, 3, "{ran:?}");
    assert!(home.job("sh-1").is_some_and(|job| job["state"] == "failed"), "{:?}", home.job("sh-1"));
}

/// A daemon whose supervisors die at `point`, and a job: it gets to `state`, and its program ran `runs` times.
fn kill_supervisor_at(point: &str, state: &str, runs: usize) {
    let home = Home::new();
    let up = home.command(&["up", "--detach"]).env("GAINSHARE_FAIL", point).output().unwrap();
    assert_eq!(Outcome::from(up).code, 0);
    let marks = home.path().join("marks");
    let script = format!("echo run >> {}; exec sleep 60", marks.display());
    let file = home.path().join("job.toml");
    std::fs::write(&file, format!("name = 'job'\ncommand = ['sh', '-c', '{script}']\n")).unwrap();
    home.ok(&["submit", file.to_str().unwrap()]);
    home.wait_for_state("job", state);
    let count = || std::fs::read_to_string(&marks).unwrap_or_default().lines().count();
    assert!(eventually(|| count() == runs), "{point}: it ran {} times", count());
}

/// B8: a supervisor killed before the fork leaves no process, and the job is not started again.
#[test]
fn a_supervisor_killed_before_it_starts_a_job_starts_nothing() {
    kill_supervisor_at("supervise-before-fork", "lost", 0);
}

/// B8: a supervisor killed between fork and its record leaves a job that runs once. The job is found by its control
/// group.
#[test]
#[ignore = "needs root and cgroups"]
fn a_supervisor_killed_while_it_starts_a_job_starts_it_once() {
    kill_supervisor_at("supervise-before-started", "running", 1);
}
