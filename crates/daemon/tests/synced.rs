//! The folders of new jobs are on the disk before the journal says that the jobs exist.
//!
//! A small library is loaded into the daemon. It writes down which files are synced, in their order. The daemon dies
//! just before it commits the jobs, so all that was written down came before the commit.

use crate::common::{Daemon, build_library, read, sh};
use std::path::Path;

/// Replaces the functions that sync: each writes the path of its file to SYNC_LOG and then does what it should.
const RECORDER: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
static void note(const char *what, int fd) {
    const char *log = getenv("SYNC_LOG");
    char name[64], path[4096], line[4200];
    ssize_t length;
    int out;
    if (!log) return;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    length = readlink(name, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    out = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (out < 0) return;
    snprintf(line, sizeof line, "%s %s\n", what, path);
    if (write(out, line, strlen(line)) < 0) abort();
    close(out);
}
int fsync(int fd) { int code = syscall(SYS_fsync, fd); note("fsync", fd); return code; }
int fdatasync(int fd) { int code = syscall(SYS_fdatasync, fd); note("fsync", fd); return code; }
int syncfs(int fd) { int code = syscall(SYS_syncfs, fd); note("syncfs", fd); return code; }
"#;

/// What a daemon syncs from its start until just before it commits `count` new jobs.
fn synced_before_the_commit(count: usize) -> (Daemon, Vec<String>) {
    let mut d = Daemon::new("");
    let log = d.dir.path().join("synced");
    let library = build_library(d.dir.path(), "recorder", RECORDER);
    d.up_with(&[
        ("LD_PRELOAD", &library),
        ("SYNC_LOG", log.to_str().unwrap()),
        ("GAINSHARE_FAIL", "submit-before-journal"),
    ]);
    d.wait_up();
    let before = read(&log).lines().count();
    let lost = d.submit((0..count).map(|i| sh(&format!("job-{i}"), "true")).collect());
    assert!(lost.is_err(), "the daemon died before it could answer: {lost:?}");
    d.wait_dead();
    let lines = read(&log).lines().skip(before).map(str::to_owned).collect();
    (d, lines)
}

fn fsync(path: &Path) -> String {
    format!("fsync {}", path.canonicalize().unwrap().display())
}

#[test]
fn folders_of_new_jobs_are_synced_before_the_commit() {
    let (d, synced) = synced_before_the_commit(2);
    let jobs = d.state().join("jobs");
    let at = |path: &Path| {
        let line = fsync(path);
        synced.iter().position(|other| *other == line).unwrap_or_else(|| panic!("{line} is not in {synced:#?}"))
    };
    for id in ["1", "2"] {
        let folder = jobs.join(id);
        assert!(at(&folder.join("spec.json")) < at(&folder) && at(&folder) < at(&jobs), "{synced:#?}");
    }
}

/// Many files are synced by one call for the whole file system.
#[test]
fn many_folders_are_synced_together_before_the_commit() {
    let (d, synced) = synced_before_the_commit(20);
    let jobs = d.state().join("jobs").canonicalize().unwrap();
    let line = format!("syncfs {}", jobs.display());
    assert!(synced.contains(&line), "{line} is not in {synced:#?}");
}
