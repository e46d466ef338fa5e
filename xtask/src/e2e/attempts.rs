//! Which attempts of jobs lived, and when: a thread reads the control groups of all nodes twenty times a second.
//!
//! Neither the API server nor a kubelet is asked: a process in a pod's group is alive. Its environment names
//! the job and the attempt. Its output is read at the end from the engine's log, which is opened early: the
//! file's name disappears with the pod, the open file stays.

use super::kube::{Kube, entries, unix_s};
use anyhow::{Result, anyhow};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const PACE: Duration = Duration::from_millis(50);

/// One attempt of a job, as the kernel saw it.
#[derive(Debug, Default)]
pub(super) struct ObservedAttempt {
    pub(super) job: String,
    /// The pod's uid.
    pub(super) pod: String,
    pub(super) attempt: u32,
    /// When a process of it was first and last seen, in seconds since 1970.
    pub(super) first_s: f64,
    pub(super) last_s: f64,
    /// What the attempt printed, once the watch has ended.
    lines: Vec<String>,
    /// Held open, because the kubelet removes the log together with the pod.
    log: Option<File>,
}

impl ObservedAttempt {
    pub(super) fn last_loss(&self) -> Option<f64> {
        self.lines.iter().rev().find_map(|line| word(line, "loss"))
    }

    /// The step that it said it saved when it was stopped.
    pub(super) fn saved_step(&self) -> Option<u64> {
        self.lines.iter().rev().find_map(|line| after(line, "stopped by SIGTERM after step "))
    }

    /// The step after which it said it goes on.
    pub(super) fn resumed_step(&self) -> Option<u64> {
        self.lines.iter().find_map(|line| after(line, "continues after step "))
    }

    fn read(&mut self) {
        let mut text = String::new();
        if let Some(log) = &mut self.log {
            // Output that cannot be read is reported as missing by the check that needs it.
            let _ = log.read_to_string(&mut text);
        }
        self.lines = entries(&text).map(|(_, line)| line).collect();
    }
}

/// The number after some words.
fn after(line: &str, words: &str) -> Option<u64> {
    let rest = line.split_once(words)?.1;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// The number of `name=1.5`, `name: 1.5` or `"name":1.5`.
fn word(line: &str, name: &str) -> Option<f64> {
    let rest = line.split_once(name)?.1.trim_start_matches(['"', '=', ':', ' ']);
    rest.split(|c: char| !(c.is_ascii_digit() || ".-+e".contains(c))).next()?.parse().ok()
}

/// Watches until it is ended.
pub(super) struct Attempts {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<ObservedAttempt>>,
}

impl Attempts {
    pub(super) fn watch(kube: &Kube, nodes: &[&str]) -> Result<Attempts> {
        let mut places = vec![];
        for node in nodes {
            let pods = kube.testbed.node_cgroup(node, "cpu")?.join("kubepods");
            places.push((pods, kube.testbed.node_path(node, "/var/log/pods")));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stop_there = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut ran: BTreeMap<String, ObservedAttempt> = BTreeMap::new();
            while !stop_there.load(Ordering::Relaxed) {
                places.iter().for_each(|(groups, logs)| read_processes(groups, logs, &mut ran));
                std::thread::sleep(PACE);
            }
            ran.values_mut().for_each(ObservedAttempt::read);
            ran.into_values().collect()
        });
        Ok(Attempts { stop, thread })
    }

    /// All attempts that were seen.
    pub(super) fn end(self) -> Result<Vec<ObservedAttempt>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the watch over the attempts has panicked"))
    }
}

/// The processes of all pods below a node's group.
fn read_processes(groups: &Path, logs: &Path, ran: &mut BTreeMap<String, ObservedAttempt>) {
    for class in ["burstable", "besteffort", ""] {
        for pod in std::fs::read_dir(groups.join(class)).into_iter().flatten().flatten() {
            let name = pod.file_name();
            let Some(uid) = name.to_str().and_then(|n| n.strip_prefix("pod")) else { continue };
            for group in std::fs::read_dir(pod.path()).into_iter().flatten().flatten() {
                let pids = std::fs::read_to_string(group.path().join("cgroup.procs")).unwrap_or_default();
                for pid in pids.lines() {
                    record_process(pid, uid, logs, ran);
                }
            }
        }
    }
}

fn record_process(pid: &str, uid: &str, logs: &Path, ran: &mut BTreeMap<String, ObservedAttempt>) {
    // A process that has ended shows no environment any more.
    let Ok(environment) = std::fs::read(format!("/proc/{pid}/environ")) else { return };
    let variable = |name: &str| {
        let mut entries = environment.split(|b| *b == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
        entries.find_map(|entry| entry.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
    };
    let (Some(job), Some(attempt)) = (variable("STORY_JOB"), variable("GAINSHARE_ATTEMPT")) else { return };
    let now = unix_s();
    let seen = ran.entry(uid.to_owned()).or_insert_with(|| {
        let attempt = attempt.parse().unwrap_or(0);
        ObservedAttempt {
            job,
            pod: uid.to_owned(),
            attempt,
            first_s: now,
            last_s: now,
            lines: vec![],
            log: log_of(logs, uid),
        }
    });
    seen.last_s = now;
    if seen.log.is_none() {
        seen.log = log_of(logs, uid);
    }
}

/// The log of a pod's container `train`.
fn log_of(logs: &Path, uid: &str) -> Option<File> {
    let mut folders = std::fs::read_dir(logs).ok()?.flatten().map(|e| e.path());
    let own = folders.find(|p| p.to_str().is_some_and(|p| p.ends_with(uid)))?;
    File::open(own.join("train/0.log")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_what_trainers_say() {
        assert_eq!(after("gainshare train: stopped by SIGTERM after step 41 of 90; the same", "after step "), Some(41));
        assert_eq!(after("gainshare train: continues after step 41 from /c/x.safetensors", "after step "), Some(41));
        assert_eq!(word("step=40/90 loss=0.5123 accuracy=0.9", "loss"), Some(0.5123));
        assert_eq!(word(r#"{"step":40,"loss":0.5123}"#, "loss"), Some(0.5123));
        assert_eq!(word("40/90 - accuracy: 0.9 - loss: 1.5e-3", "loss"), Some(0.0015));
        assert_eq!(word("nothing here", "loss"), None);
    }
}
