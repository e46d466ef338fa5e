//! `run` from pipes: output untouched, codes and signals passed on, whatever happens to the daemon.

use crate::common::{Home, eventually, read_until, signal, wait};
use nix::sys::signal::Signal;
use std::io::{Read, Write};
use std::process::{Child, Stdio};

fn shell<'a>(options: &[&'a str], script: &'a str) -> Vec<&'a str> {
    [&["run"], options, &["--", "sh", "-c", script]].concat()
}

fn pid(child: &Child) -> i32 {
    child.id() as i32
}

#[test]
fn streams_stay_apart_and_the_code_is_the_jobs() {
    let home = Home::new();
    let outcome = home.run(&shell(&["--name", "both"], "echo out; echo err >&2; exit 7"));
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (7, "out\n", "err\n"));
    assert_eq!(home.run(&shell(&[], "kill -KILL $$")).code, 137);
    assert_eq!(home.run(&shell(&[], "kill -TERM $$")).code, 143);
    let job = home.job("both").unwrap();
    assert_eq!((job["state"].as_str(), job["exit_code"].as_i64()), (Some("failed"), Some(7)));
    let log = home.ok(&["logs", "both"]);
    assert!(log.contains("out\n") && log.contains("err\n"), "{log}");
}

#[test]
fn every_byte_arrives_unchanged() {
    let home = Home::new();
    // All byte values, no line ends where a buffer might want them, more than any pipe holds.
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut command = home.command(&["run", "--name", "bytes", "--", "cat"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent).unwrap());
    let mut received = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut received).unwrap();
    writer.join().unwrap();
    assert!(child.wait().unwrap().success());
    assert!(received == bytes, "{} of {} bytes", received.len(), bytes.len());
    let log = home.command(&["logs", "bytes"]).output().unwrap().stdout;
    assert!(log == bytes, "the log has {} of {} bytes", log.len(), bytes.len());
}

#[test]
fn output_is_not_held_back() {
    let home = Home::new();
    home.ok(&["up", "--detach"]);
    let mut child = home.spawn(&shell(&[], "printf 'no line end'; sleep 60"));
    read_until(child.stdout.as_mut().unwrap(), "no line end");
    signal(pid(&child), Signal::SIGTERM);
    assert_eq!(wait(child).code, 143, "the job still ran when its output arrived");
}

#[test]
fn a_reader_that_goes_away_ends_the_job_as_it_would_without_us() {
    let home = Home::new();
    let mut child = home.spawn(&["run", "--name", "yes", "--", "yes"]);
    read_until(child.stdout.as_mut().unwrap(), "y\ny\n");
    drop(child.stdout.take());
    assert_eq!(wait(child).code, 141);
    assert_eq!(home.job("yes").unwrap()["signal"], 13);
}

#[test]
fn a_full_disk_behind_the_output_ends_no_job() {
    let home = Home::new();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let script = "echo first; sleep 0.3; echo second; exit 3";
    // Nothing that is said about the job fits either.
    let options = ["--name", "full", "--deadline", "1h"];
    let child = home.command(&shell(&options, script)).stdout(full()).stderr(full()).spawn().unwrap();
    assert_eq!(wait(child).code, 3);
    assert_eq!(home.ok(&["logs", "full"]), "first\nsecond\n");
    let child = home.command(&shell(&[], script)).stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
    let outcome = wait(child);
    assert_eq!(outcome.code, 3);
    assert!(outcome.stderr.contains("cannot write the job's output"), "{}", outcome.stderr);
}

#[test]
fn background_children_do_not_hold_the_job_open() {
    let home = Home::new();
    let outcome = home.run(&shell(&[], "(sleep 60; touch ended) & echo done; exit 4"));
    assert_eq!((outcome.code, outcome.stdout.as_str()), (4, "done\n"));
    assert!(!home.path().join("ended").exists(), "`run` waited for the child in the background");
}

#[test]
fn interrupts_grow_firmer() {
    let home = Home::new();
    let script = "trap 'echo int' INT; trap 'echo term' TERM; echo ready; while :; do sleep 0.05; done";
    let mut child = home.spawn(&shell(&[], script));
    let id = pid(&child);
    let stdout = child.stdout.as_mut().unwrap();
    read_until(stdout, "ready");
    signal(id, Signal::SIGINT);
    read_until(stdout, "int");
    signal(id, Signal::SIGINT);
    read_until(stdout, "term");
    signal(id, Signal::SIGINT);
    assert_eq!(wait(child).code, 137);
}

#[test]
fn other_signals_are_passed_on() {
    let home = Home::new();
    for (sent, name) in [(Signal::SIGTERM, "TERM"), (Signal::SIGHUP, "HUP"), (Signal::SIGUSR1, "USR1")] {
        let script = format!("trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done");
        let mut child = home.spawn(&shell(&[], &script));
        read_until(child.stdout.as_mut().unwrap(), "ready");
        signal(pid(&child), sent);
        let outcome = wait(child);
        assert_eq!((outcome.code, outcome.stdout.trim()), (9, format!("got {name}").as_str()));
    }
}

#[test]
fn environment_and_directory_are_the_callers() {
    let home = Home::new();
    let script = "echo $MINE $OMP_NUM_THREADS; pwd";
    let outcome = home.command(&shell(&[], script)).env("MINE", "kept").env("OMP_NUM_THREADS", "77").output().unwrap();
    let here = home.path().canonicalize().unwrap();
    assert_eq!(String::from_utf8(outcome.stdout).unwrap(), format!("kept 77\n{}\n", here.display()));
    let tuned = home.ok(&shell(&[], "echo $OMP_WAIT_POLICY"));
    assert_eq!(tuned, "PASSIVE\n", "unless the user says otherwise, waiting is passive");
    assert_eq!(home.ok(&shell(&["--plain"], "echo [$OMP_WAIT_POLICY]")), "[]\n");
}

#[test]
fn a_daemon_that_dies_takes_nothing_with_it() {
    let home = Home::new();
    let mut command = home.command(&shell(&["--name", "survivor"], "echo before; read line; echo after $line; exit 5"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    read_until(child.stdout.as_mut().unwrap(), "before");
    home.wait_for_state("survivor", "running");
    signal(home.daemon_pid(), Signal::SIGKILL);
    child.stdin.take().unwrap().write_all(b"all\n").unwrap();
    let outcome = wait(child);
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (5, "after all\n", ""));
    // The next daemon learns of the end from the job's directory.
    let job = home.wait_for_state("survivor", "failed");
    assert_eq!(job["exit_code"], 5);
}

#[test]
fn ten_at_once_share_one_daemon() {
    let home = Home::new();
    let children: Vec<Child> = (0..10).map(|i| home.spawn(&shell(&[], &format!("exit {i}")))).collect();
    for (i, child) in children.into_iter().enumerate() {
        let outcome = wait(child);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (i as i32, ""));
    }
    assert_eq!(home.json(&["ps", "-a"])["jobs"].as_array().unwrap().len(), 10);
    let log = std::fs::read_to_string(home.state().join("daemon.log")).unwrap();
    assert_eq!(log.matches("ready at").count(), 1, "{log}");
}

#[test]
fn a_job_waits_for_a_slot_and_can_be_withdrawn() {
    let home = Home::new();
    home.ok(&["up", "--detach", "--slots", "1"]);
    home.ok(&["run", "--detach", "--name", "first", "--", "sleep", "60"]);
    home.wait_for_state("first", "running");
    let mut second = home.spawn(&shell(&["--name", "second"], "echo ran"));
    let words = read_until(second.stderr.as_mut().unwrap(), "\n");
    assert!(words.contains("second is queued") && words.contains("slot"), "{words}");
    let mut third = home.spawn(&shell(&["--name", "third"], "echo never"));
    read_until(third.stderr.as_mut().unwrap(), "third is queued");
    signal(pid(&third), Signal::SIGINT);
    let outcome = wait(third);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (130, ""));
    home.wait_for_state("third", "stopped");

    // A crash of the daemon does not make it forget how many slots there are, nor who waits.
    signal(home.daemon_pid(), Signal::SIGKILL);
    assert!(eventually(|| home.job("second").is_some_and(|job| job["state"] == "queued")));
    home.ok(&["stop", "first"]);
    let outcome = wait(second);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "ran\n"));
}

#[test]
fn detached_jobs_outlive_the_command_and_keep_its_environment() {
    let home = Home::new();
    let script = "echo $MINE; read line || echo no input; while :; do sleep 0.05; done";
    let mut command = home.command(&shell(&["--detach", "--name", "bg"], script));
    let outcome = command.env("MINE", "kept").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&outcome.stdout), "bg\n");
    home.wait_for_state("bg", "running");
    assert!(eventually(|| home.ok(&["logs", "bg"]) == "kept\nno input\n"));
    let follower = home.spawn(&["logs", "-f", "bg"]);
    assert_eq!(home.ok(&["stop", "bg"]), "bg: stopped\n");
    let outcome = wait(follower);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "kept\nno input\n"), "following ends with the job");
    assert_eq!(home.ok(&["logs", "--tail", "1", "bg"]), "no input\n");
}

#[test]
fn a_supervisor_is_small() {
    let home = Home::new();
    let child = home.spawn(&["run", "--name", "idle", "--", "sleep", "60"]);
    home.wait_for_state("idle", "running");
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let value = |name: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    // What the kernel cannot share with other supervisors of the same program.
    assert!(value("RssAnon:") < 4096, "{} KiB", value("RssAnon:"));
    assert_eq!(value("Threads:"), 1);
    home.ok(&["stop", "idle"]);
    assert_eq!(wait(child).code, 143);
}

#[test]
fn a_job_with_a_deadline_learns_soon_whether_it_meets_it() {
    let home = Home::new();
    home.ok(&["up", "--detach", "--policy", "qos"]);
    let script = |steps: u32| {
        format!(
            "i=0; while [ $i -lt {steps} ]; do i=$((i+1)); echo \"step $i/{steps} loss=$((1000/i)).5\"; sleep 0.2; done"
        )
    };
    let (short, long) = (script(25), script(3000));
    let outcome = home.run(&shell(&["--name", "early", "--deadline", "1h"], &short));
    assert!(outcome.stderr.contains("gainshare: early: done at ") && outcome.stderr.contains("on time"), "{outcome:?}");
    assert!(outcome.stderr.contains("gainshare: early: it met its deadline, "), "{outcome:?}");
    let mut child = home.spawn(&shell(&["--name", "late", "--deadline", "9s"], &long));
    let said = read_until(child.stderr.as_mut().unwrap(), "best effort");
    assert!(said.contains("gainshare: late: its deadline will be missed: "), "{said}");
    signal(pid(&child), Signal::SIGTERM);
    wait(child);
}

/// Earlier runs of the program answer at submission, before the job's first report.
#[test]
fn a_deadline_that_earlier_runs_show_to_be_impossible_is_announced_at_submission() {
    let home = Home::new();
    home.ok(&["up", "--detach", "--policy", "qos"]);
    let script = "i=0; while [ $i -lt 25 ]; do i=$((i+1)); echo \"step $i/25 loss=$((1000/i)).5\"; sleep 0.2; done";
    let first = home.run(&shell(&["--name", "first", "--deadline", "1h"], script));
    let unknown = "gainshare: first: whether the deadline can be kept is known after the first reports";
    assert!(first.stderr.starts_with(unknown), "{first:?}");
    let second = home.run(&shell(&["--name", "second", "--deadline", "2s"], script));
    let line = second.stderr.lines().next().unwrap_or_default();
    assert!(line.starts_with("gainshare: second: its deadline will be missed: the earliest end is "), "{second:?}");
    assert!(line.ends_with(", by 1 earlier run of this command; the job goes on as best effort"), "{second:?}");
    assert!(second.code == 0 && second.stdout.contains("step 25/25"), "it runs all the same: {second:?}");
    let again = second.stderr.matches("its deadline will be missed").count();
    assert_eq!(again, 1, "the same is not printed again: {second:?}");
    // The same on the way of job files.
    let file = home.path().join("third.toml");
    let job = format!("name = \"third\"\ncommand = [\"sh\", \"-c\", '{script}']\ndeadline = \"2s\"\n");
    std::fs::write(&file, job).unwrap();
    let third = home.run(&["submit", file.to_str().unwrap()]);
    assert!(third.stderr.contains(", by 2 earlier runs of this command; the job goes on"), "{third:?}");
}

#[test]
fn a_changed_prediction_is_told_again() {
    let home = Home::new();
    home.ok(&["up", "--detach", "--policy", "qos"]);
    // It announces forty steps, and later that there are three thousand.
    let script = "i=0; total=40; while [ $i -lt $total ]; do i=$((i+1)); [ $i -lt 25 ] || total=3000; \
                  echo \"step $i/$total loss=$((1000/i)).5\"; sleep 0.2; done";
    let mut child = home.spawn(&shell(&["--name", "longer", "--deadline", "20s"], script));
    let stderr = child.stderr.as_mut().unwrap();
    let first = read_until(stderr, "on time");
    assert!(first.contains("gainshare: longer: done at "), "{first}");
    let second = read_until(stderr, "best effort");
    assert!(second.contains("gainshare: longer: its deadline will be missed: "), "{second}");
    signal(pid(&child), Signal::SIGTERM);
    wait(child);
}

/// A deadline that is near leaves no minute for an answer.
#[test]
fn a_job_of_unknown_length_is_told_so_before_half_of_its_time_is_over() {
    let home = Home::new();
    let script = "i=0; while [ $i -lt 600 ]; do i=$((i+1)); echo \"loss=$((1000/i)).5\"; sleep 0.2; done";
    let mut child = home.spawn(&shell(&["--name", "open", "--deadline", "30s"], script));
    // A first answer after a minute would come long after the deadline.
    let said = read_until(child.stderr.as_mut().unwrap(), "NAME=VALUE");
    assert!(said.contains("gainshare: open: whether it meets its deadline is not known yet"), "{said}");
    signal(pid(&child), Signal::SIGTERM);
    wait(child);
}

/// The daemon may have been started elsewhere, or by the system.
#[test]
fn times_are_those_of_the_zone_of_the_one_who_asks() {
    let home = Home::new();
    assert!(home.command(&["up", "--detach", "--policy", "qos"]).env("TZ", "UTC0").output().unwrap().status.success());
    let script = "i=0; while [ $i -lt 10 ]; do i=$((i+1)); echo \"step $i/10 loss=$((1000/i)).5\"; sleep 0.1; done";
    home.ok(&["run", "--name", "first", "--deadline", "1h", "--", "sh", "-c", script]);
    let job = format!("name = 'next'\ncommand = ['sh', '-c', '{script}']\n");
    std::fs::write(home.path().join("job.toml"), job).unwrap();
    let hour_in = |zone: &str| -> u32 {
        let output = home.command(&["plan", "job.toml", "--deadline", "2h"]).env("TZ", zone).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let after = said.split_once("done at ").unwrap_or_else(|| panic!("{said}")).1;
        // A day stands before the time if it is not that of today.
        let time = after.split(' ').find(|word| word.contains(':')).unwrap_or_else(|| panic!("{said}"));
        time.split(':').next().unwrap().parse().unwrap()
    };
    // A full hour may pass between the two.
    let (here, there) = (hour_in("UTC0"), hour_in("<+07>-7"));
    assert!([7, 8].contains(&((there + 24 - here) % 24)), "{here} and {there} o'clock");
}
