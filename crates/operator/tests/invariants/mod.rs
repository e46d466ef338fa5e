//! The invariants of `docs/faults.md` on a test bed, by the same checker as in the simulations
//! ([`gainshare_core::invariants`]).
//!
//! A [`Watch`] reads twenty times a second from the kernel which attempts live (I1). At its end it reads which jobs the
//! API server has (I3), and the logs of jobs that count ([`COUNTS`]): where each attempt began, and what it saved (I4).
//! [`check_pool`] is for tests that share pods (I2).
//!
//! [`COUNTS`]: crate::common::training::COUNTS
#![allow(dead_code, reason = "every test binary has its own copy and uses a part of it")]

use crate::common::{FaultTally, TestBed, pids};
use gainshare_core::invariants::{BrokenInvariant, Guarantee, Invariants, Observation};
use gainshare_kube_api::resize::LEAST_CPU_MILLI;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A thread that reads all processes from the kernel and checks which jobs live. Neither the API server nor a kubelet
/// is asked: a process belongs to the job and pod that its environment names (`WATCHED_JOB`, and the pod's name as host
/// name). A task of a distributed job (`TASK_OF`) counts as a job of its own: its pods have one name, so they differ by
/// their uid, which is the name of their control group.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<WatchResult>,
}

/// What a [`Watch`] recorded.
#[derive(Debug, Default)]
pub(crate) struct WatchResult {
    /// The pods of each job that lived.
    pub(crate) pods: BTreeMap<String, BTreeSet<String>>,
    /// What did not hold.
    pub(crate) broken: Vec<BrokenInvariant>,
    invariants: Invariants,
}

impl Watch {
    pub(crate) fn begin(bed: &TestBed) -> Watch {
        let name = bed.name;
        let stop = Arc::new(AtomicBool::new(false));
        let stop_there = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut watched = WatchResult::default();
            while !stop_there.load(Ordering::Relaxed) {
                let mut observation = Observation::default();
                for LivePod { job, name, uid } in live_pods(name) {
                    observation.add_live(&job, &format!("{name} {uid}"), None);
                    watched.pods.entry(job).or_default().insert(name);
                }
                watched.check(&observation);
                std::thread::sleep(Duration::from_millis(50));
            }
            watched
        });
        Watch { stop, thread }
    }

    /// Ends the watch. The test has made the jobs `made`, and has not deleted them.
    pub(crate) fn end(self, bed: &TestBed, made: &[&str]) -> WatchResult {
        self.stop.store(true, Ordering::Relaxed);
        let mut watched = self.thread.join().unwrap();
        let watched_jobs: Vec<String> = watched.pods.keys().cloned().collect();
        for job in watched_jobs {
            for observation in observe_log(bed, &job) {
                watched.check(&observation);
            }
        }
        made.iter().for_each(|job| watched.invariants.acknowledge(job));
        let mut observation = Observation::default();
        observation.set_recorded(recorded_jobs(bed));
        watched.check(&observation);
        watched
    }
}

impl WatchResult {
    fn check(&mut self, observation: &Observation) {
        self.broken.extend(self.invariants.check(observation));
    }

    /// Counts what did not hold.
    pub(crate) fn report(&self, tally: &mut FaultTally) {
        for broken in &self.broken {
            tally.demand(false, || broken.to_string());
        }
    }
}

/// The attempts of a job that counts, in the order of its log.
fn observe_log(bed: &TestBed, job: &str) -> Vec<Observation> {
    let log = fs::read_to_string(bed.kept(job).join("log")).unwrap_or_default();
    let observe = |(number, line): (usize, &str)| {
        let step: u64 = line.rsplit_once(' ')?.1.parse().ok()?;
        let mut observation = Observation::default();
        if line.contains(" resumed at ") {
            observation.add_live(job, &format!("of line {} of its log: {line}", number + 1), Some(step));
        } else {
            observation.add_checkpoint(job, step);
        }
        Some(observation)
    };
    log.lines().enumerate().filter_map(observe).collect()
}

/// All jobs of the namespace `team` that the API server has.
fn recorded_jobs(bed: &TestBed) -> Vec<String> {
    let listed: Value =
        serde_json::from_str(&bed.kubectl(&["get", "trainingjobs,jobs", "-n", "team", "-o", "json"])).unwrap();
    let name = |job: &Value| job["metadata"]["name"].as_str().map(str::to_owned);
    listed["items"].as_array().into_iter().flatten().filter_map(name).collect()
}

/// The names of the pods of each watched job of this test bed that have a process now.
pub(crate) fn alive(name: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut alive: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for LivePod { job, name, .. } in live_pods(name) {
        alive.entry(job).or_default().insert(name);
    }
    alive
}

/// A pod of a watched job that has a process.
struct LivePod {
    job: String,
    name: String,
    uid: String,
}

fn live_pods(bed: &str) -> Vec<LivePod> {
    let place = format!("/gainshare-testbed-{bed}/");
    let read = |pid: String| {
        // A process that has ended shows no environment any more.
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let variable = |name: &str| {
            let mut entries = environment.split(|byte| *byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok());
            entries.find_map(|entry| entry.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
        };
        let name = variable("HOSTNAME")?;
        let job = variable("WATCHED_JOB").or_else(|| variable("TASK_OF").map(|_| name.clone()))?;
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        // Another test bed may stand beside this one, with jobs of the same names.
        let group = groups.lines().find(|line| line.contains(&place))?;
        let uid = group.split('/').find_map(|folder| folder.strip_prefix("pod")).unwrap_or_default().to_owned();
        Some(LivePod { job, name, uid })
    };
    pids().into_iter().filter_map(read).collect()
}

/// Thousandths of a core, as the API server writes them: `250m`, or `2` for whole cores.
fn milli(quantity: &str) -> Option<f64> {
    match quantity.strip_suffix('m') {
        Some(milli) => milli.parse().ok(),
        None => quantity.parse::<f64>().ok().map(|cores| cores * 1000.0),
    }
}

/// What does not hold of pods of one node that share what their authors requested: the requests sum to no more than
/// that. Each pod is its name, the CPU of its author and the CPU that it requests now.
pub(crate) fn check_pool<'a>(node: &str, pods: impl IntoIterator<Item = (&'a str, &'a str, &'a str)>) -> Vec<String> {
    let (mut observation, mut capacity, mut guarantees) = (Observation::default(), 0.0, Vec::new());
    for (pod, own, now) in pods {
        // A quantity that cannot be read breaks the invariant.
        let (own, now) = (milli(own).unwrap_or(f64::NAN), milli(now).unwrap_or(f64::NAN));
        // A share is at least this, also where rounding leaves less.
        capacity += own + LEAST_CPU_MILLI as f64;
        let job = pod.to_owned();
        guarantees.push(Guarantee { job, guaranteed: now, floor: 1.0, limit: now, max: f64::INFINITY });
    }
    observation.add_node(node, capacity, guarantees);
    Invariants::default().check(&observation).iter().map(ToString::to_string).collect()
}

/// The same for pods of the namespace `team`, by their names and the CPU of their authors. All pods come from one list:
/// readings one after the other could mix the time before a change with the time after it.
pub(crate) fn check_requests(bed: &TestBed, node: &str, pods: &[(&str, &str)]) -> Vec<String> {
    let output = bed.output("kubectl", &["get", "pods", "-n", "team", "-o", "json"], "");
    let Ok(listed) = serde_json::from_slice::<Value>(&output.stdout) else { return Vec::new() };
    let find = |name: &str| listed["items"].as_array()?.iter().find(|pod| pod["metadata"]["name"] == name);
    let request = |name: &str| find(name)?["spec"]["containers"][0]["resources"]["requests"]["cpu"].as_str();
    check_pool(node, pods.iter().filter_map(|(name, own)| Some((*name, *own, request(name)?))))
}
