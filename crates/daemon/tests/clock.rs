//! The wall clock is set by an hour, forward and back, under a running daemon and its guard: nothing expires.
//!
//! A small library is loaded into the daemon, its guard and its supervisors. It adds to the wall clock what a
//! file says, so that the clock of the machine itself stays as it is.

mod common;

use common::{Daemon, is_running, read, sh, trainer, wait_until};
use gainshare_daemon::api::types::JobState;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Replaces `clock_gettime`: CLOCK_REALTIME is shifted by the seconds in the file CLOCK_SHIFT.
const SHIFT: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    int code = syscall(SYS_clock_gettime, id, t);
    const char *path = getenv("CLOCK_SHIFT");
    FILE *file;
    long shift = 0;
    if (code == 0 && id == CLOCK_REALTIME && path && (file = fopen(path, "r"))) {
        if (fscanf(file, "%ld", &shift) == 1) t->tv_sec += shift;
        fclose(file);
    }
    return code;
}
"#;

fn build_shift(dir: &Path) -> String {
    let (source, library) = (dir.join("shift.c"), dir.join("shift.so"));
    std::fs::write(&source, SHIFT).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library.to_str().unwrap().to_owned()
}

#[test]
fn a_wall_clock_set_by_an_hour_expires_nothing() {
    let mut d = Daemon::new("lease = \"3s\"");
    let shift = d.dir.path().join("shift");
    std::fs::write(&shift, "0").unwrap();
    let library = build_shift(d.dir.path());
    d.up_with(&[("LD_PRELOAD", &library), ("CLOCK_SHIFT", shift.to_str().unwrap())]);
    d.wait_up();
    d.submit(vec![trainer("reports", 10_000, "0.1"), sh("waits", "sleep 120")]).unwrap();
    d.wait("reports", "reporting", |j| j.metric.is_some());
    let pid = d.wait_state("waits", JobState::Running).pid;
    wait_until("the guard runs", 10, || !read(&d.state().join("guard.lock")).trim().is_empty());
    let guard = d.guard_pid();
    let lease = d.run_dir().join("lease");
    let epoch = read(&lease).split(' ').next().unwrap().to_owned();
    let steps = ["3600", "-3600", "0", "3600", "0"];
    for (round, seconds) in steps.iter().enumerate() {
        let before = d.job("reports").metric.unwrap().step;
        // A reader never finds half of a number.
        std::fs::write(d.dir.path().join("shift.new"), seconds).unwrap();
        std::fs::rename(d.dir.path().join("shift.new"), &shift).unwrap();
        let mut beats = BTreeSet::new();
        wait_until("five renewals of the lease", 30, || {
            beats.insert(read(&lease));
            beats.len() > 5
        });
        d.wait("reports", "reporting on", |j| j.metric.as_ref().is_some_and(|m| m.step > before));
        let name = format!("new-{round}");
        d.submit(vec![sh(&name, "true")]).unwrap();
        let new = d.wait_end(&name);
        assert_eq!(new.state, JobState::Done, "after a step to {seconds} s");
        // The step has reached the daemon: half an hour tells it from a slow machine.
        let shift_s = new.submitted_s - gainshare_daemon::clock::unix_s();
        let wanted_s: f64 = seconds.parse().unwrap();
        assert!((shift_s - wanted_s).abs() < 1800.0, "the daemon's clock is {shift_s} s off, not {wanted_s} s");
        let waits = d.job("waits");
        assert_eq!((waits.state, waits.pid), (JobState::Running, pid), "after a step to {seconds} s");
        assert!(!d.run_dir().join("lapsed").exists(), "the guard acted after a step to {seconds} s");
        assert!(is_running(guard));
    }
    assert_eq!(read(&lease).split(' ').next(), Some(epoch.as_str()), "a new epoch began");
    println!("fault: injected={} violations=0 recovery_s=0", steps.len());
}
