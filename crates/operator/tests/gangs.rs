//! A hundred distributed jobs that contend for a cluster with room for three, on a real API server and scheduler with
//! make-believe nodes: every job starts with all its tasks or with none, and all of them end.
//!
//! A task takes most of half a node, so no node holds a whole job: jobs that started in part could hold each other up
//! for ever. A watch of all pods is checked event by event. The operator is the real program with the rights that the
//! chart gives it.

use crate::common::training::Operator;
use crate::common::{TestBed, within_a_minute};
use gainshare_core::invariants::{Guarantee, Invariants, Observation};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const JOBS: usize = 100;
/// One server and three workers.
const TASKS: usize = 4;
/// Two tasks fit each of the nodes.
const NODES: u32 = 6;
const SLOTS: usize = 12;
/// All jobs end within this number of minutes, or they hang.
const PATIENCE_MIN: usize = 6;

#[test]
#[ignore = "needs root and a test bed"]
fn a_hundred_gangs_contend_for_room_for_three() {
    let bed = TestBed::with_kwok_training("gangtest", NODES);
    let watch = PodWatch::begin(&bed);
    let operator = Operator::start(&bed, None);
    let jobs: Vec<Value> = (0..JOBS).map(|number| job(&format!("gang-{number}"))).collect();
    bed.apply(json!({"apiVersion": "v1", "kind": "List", "items": jobs}));
    let mut ended = BTreeMap::new();
    let all = (0..PATIENCE_MIN).find_map(|_| {
        within_a_minute(|| {
            std::thread::sleep(Duration::from_secs(1));
            ended = states(&bed);
            (ended.get("Succeeded") == Some(&JOBS)).then_some(())
        })
    });
    let record = watch.end();
    drop(operator);
    let log = || std::fs::read_to_string(bed.folder.path().join("operator.log")).unwrap_or_default();
    assert!(all.is_some(), "after {PATIENCE_MIN} min the jobs are {ended:?}: {}", log());
    assert_eq!(record.faults, Vec::<String>::new());
    assert_eq!(record.complete.len(), JOBS, "the gangs that the watch has read whole");
    assert!(record.most_at_once >= 2, "jobs did not run beside each other");
    eprintln!(
        "{JOBS} jobs, at most {} at once, gates of a gang opened within {:?}",
        record.most_at_once, record.longest_opening
    );
}

/// How many jobs are in each state.
fn states(bed: &TestBed) -> BTreeMap<String, usize> {
    let listed = bed.kubectl(&["get", "trainingjobs", "-n", "team", "-o", "jsonpath={.items[*].status.state}"]);
    let mut counts = BTreeMap::new();
    for state in listed.split_whitespace() {
        *counts.entry(state.to_owned()).or_insert(0) += 1;
    }
    counts
}

/// One server that never ends by itself, and three workers that end after about a second.
fn job(name: &str) -> Value {
    let template = |notes: Value| {
        let container = json!({
            "name": "tensorflow", "image": "busybox:local", "command": ["sleep", "600"],
            "resources": {"requests": {"cpu": "14", "memory": "1Gi"}},
        });
        json!({"metadata": {"annotations": notes}, "spec": {"containers": [container]}})
    };
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {
            "policy": "na", "successPolicy": "AllWorkers", "runPolicy": {"terminationGracePeriodSeconds": 2},
            "replicaSpecs": {
                "PS": {"template": template(json!({}))},
                "Worker": {"replicas": 3, "template": template(json!({"example.com/completes": "true"}))},
            },
        },
    })
}

/// All events of all pods, checked as they come.
struct PodWatch {
    child: Child,
    thread: JoinHandle<Record>,
}

/// What the events of pods have shown.
#[derive(Debug, Default)]
struct Record {
    jobs: BTreeMap<String, Gang>,
    faults: Vec<String>,
    /// Jobs whose tasks all had a node in one attempt.
    complete: BTreeSet<String>,
    longest_opening: Duration,
    most_at_once: usize,
}

/// The pods of one job.
#[derive(Debug, Default)]
struct Gang {
    /// By name: whether the gate is open, the node, and whether the pod has ended.
    pods: BTreeMap<String, (bool, bool, bool)>,
    opened_at: Option<Instant>,
    is_open: bool,
}

impl PodWatch {
    fn begin(bed: &TestBed) -> PodWatch {
        let kubectl = ["get", "pods", "-n", "team", "--watch", "--output-watch-events", "-o", "json"];
        let mut child = Command::new(bed.program("kubectl"))
            .args(kubectl)
            .env("KUBECONFIG", &bed.kubeconfig)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let output = child.stdout.take().unwrap();
        let thread = std::thread::spawn(move || {
            let mut record = Record::default();
            for event in serde_json::Deserializer::from_reader(output).into_iter::<Value>() {
                // The last event is cut off when the watch is ended.
                let Ok(event) = event else { break };
                record.read(&event);
            }
            record
        });
        PodWatch { child, thread }
    }

    fn end(mut self) -> Record {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.thread.join().unwrap()
    }
}

impl Record {
    fn read(&mut self, event: &Value) {
        let pod = &event["object"];
        let (Some(name), Some(job)) =
            (pod["metadata"]["name"].as_str(), pod["metadata"]["labels"]["gainshare.dev/job"].as_str())
        else {
            return;
        };
        if pod["metadata"]["labels"]["gainshare.dev/epoch"] != "1" {
            self.faults.push(format!("{job} was taken back and has started again"));
        }
        let gang = self.jobs.entry(job.to_owned()).or_default();
        if event["type"] == "DELETED" {
            gang.pods.remove(name);
        } else {
            let is_open = pod["spec"]["schedulingGates"].as_array().is_none_or(Vec::is_empty);
            let has_ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
            gang.pods.insert(name.to_owned(), (is_open, pod["spec"]["nodeName"].is_string(), has_ended));
        }
        self.check(job);
    }

    /// A gang of which one gate is open has room for all its tasks that have not ended, also for those whose gates are
    /// opened next.
    fn check(&mut self, job: &str) {
        let now = Instant::now();
        if let Some(gang) = self.jobs.get_mut(job) {
            let open = gang.pods.values().filter(|(is_open, ..)| *is_open).count();
            let bound = gang.pods.values().filter(|(_, has_node, _)| *has_node).count();
            if open > 0 && gang.pods.len() < TASKS {
                self.faults.push(format!("{job} starts with {} pods", gang.pods.len()));
            }
            if open > 0 {
                let opened_at = *gang.opened_at.get_or_insert(now);
                if open == TASKS && !std::mem::replace(&mut gang.is_open, true) {
                    self.longest_opening = self.longest_opening.max(now.duration_since(opened_at));
                }
            }
            if bound == TASKS {
                self.complete.insert(job.to_owned());
            }
        }
        // A gang that has begun needs a place for each task that has not ended.
        let need = |(name, gang): (&String, &Gang)| {
            let has_begun = gang.pods.values().any(|(is_open, _, ended)| *is_open && !ended);
            let places = gang.pods.values().filter(|(_, _, has_ended)| !has_ended).count() as f64;
            let (job, max) = (name.clone(), TASKS as f64);
            has_begun.then_some(Guarantee { job, guaranteed: places, floor: 0.0, limit: places, max })
        };
        let guarantees: Vec<Guarantee> = self.jobs.iter().filter_map(need).collect();
        self.most_at_once = self.most_at_once.max(guarantees.len());
        let mut observation = Observation::default();
        observation.add_node("all nodes", SLOTS as f64, guarantees);
        let broken = Invariants::default().check(&observation);
        self.faults.extend(broken.iter().map(|broken| format!("{broken} ({job})")));
    }
}
