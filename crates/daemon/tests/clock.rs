//! The wall clock is set by an hour, forward and back, under a running daemon and its guard: nothing expires.
//!
//! A small library is loaded into the daemon, its guard and its supervisors. It adds to the wall clock what a
//! file says, so that the clock of the machine itself stays as it is.

use crate::common::{Daemon, build_library, is_running, read, sh, trainer, wait_until};
use gainshare_daemon::api::types::JobState;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

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

/// A daemon whose wall clock is `seconds` ahead, and the file that says so.
fn start_ahead(d: &mut Daemon, seconds: &str) -> PathBuf {
    let shift = d.dir.path().join("shift");
    set_shift(&shift, seconds);
    let library = build_library(d.dir.path(), "shift", SHIFT);
    d.up_with(&[("LD_PRELOAD", &library), ("CLOCK_SHIFT", shift.to_str().unwrap())]);
    d.wait_up();
    shift
}

/// Sets the clock. A reader never finds half of a number.
fn set_shift(shift: &Path, seconds: &str) {
    let new = shift.with_extension("new");
    std::fs::write(&new, seconds).unwrap();
    std::fs::rename(new, shift).unwrap();
}

#[test]
fn a_wall_clock_set_by_an_hour_expires_nothing() {
    let mut d = Daemon::new("lease = \"3s\"");
    let shift = start_ahead(&mut d, "0");
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
        set_shift(&shift, seconds);
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
    println!("fault: injected={} violations=0", steps.len());
}

/// The clock is set back by an hour while a job runs. The metrics file that the job makes afterwards seems older than
/// the job, and is found all the same; a file of an earlier run is not taken for it.
#[test]
fn a_metrics_file_made_after_the_clock_was_set_back_is_found() {
    let mut d = Daemon::new("");
    let shift = start_ahead(&mut d, "3600");
    let folder = d.dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("metrics.csv"), "step,loss\n1,77\n").unwrap();
    let gate = d.dir.path().join("gate");
    let script = format!(
        "while [ ! -e {} ]; do sleep 0.1; done; mkdir run; printf 'step,loss\\n1,5\\n2,4\\n' > run/metrics.csv; sleep 120",
        gate.display()
    );
    let mut job = sh("writes", &script);
    job.cwd = Some(folder);
    d.submit(vec![job]).unwrap();
    let started = d.wait_state("writes", JobState::Running).started_s.unwrap();
    assert!(started - gainshare_daemon::clock::unix_s() > 1800.0, "the daemon's clock is ahead");
    // Files of the job's folder are read once a second: the first scan was before the step.
    let lease = d.run_dir().join("lease");
    let mut beats = BTreeSet::new();
    wait_until("three renewals of the lease", 30, || {
        beats.insert(read(&lease));
        beats.len() > 3
    });
    set_shift(&shift, "0");
    std::fs::write(&gate, "").unwrap();
    // A metrics file that was found by itself waits for the job's output first, and scans are up to 16 s apart by then.
    wait_until("the file is found", 120, || d.job("writes").metric.is_some());
    let metric = d.wait("writes", "at the last row", |j| j.metric.as_ref().is_some_and(|m| m.value == 4.0)).metric;
    assert_eq!(metric.unwrap().source, "file");
    println!("fault: injected=1 violations=0");
}
