//! The control plane fails while jobs move: the API server or etcd is away, the leader stands still while a second
//! operator waits.
//!
//! A watcher reads from the kernel which attempts live: never two of one job. Every move ends on its target.
//! An outage lasts 5 s, or the seconds in `GAINSHARE_OUTAGE_S` (360 is longer than the lease of any part).

#[path = "../../../xtask/tests/common/mod.rs"]
mod common;

use common::training::{COUNTS, Operator, job};
use common::{SYSTEM, Scenarios, TestBed, Watch, alive, eventually, text, within_a_minute};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A standby takes over this long after the leader's last sign of life.
const LEASE: Duration = Duration::from_secs(15);

fn outage() -> Duration {
    let seconds = std::env::var("GAINSHARE_OUTAGE_S").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(5))
}

/// What the scenarios injected.
#[derive(Default)]
struct Tally {
    injected: u32,
    longest_s: f64,
}

impl Tally {
    fn add(&mut self, recovery_s: f64) {
        self.injected += 1;
        self.longest_s = self.longest_s.max(recovery_s);
    }
}

fn other(node: &str) -> &'static str {
    if node == "left" { "right" } else { "left" }
}

fn node_of(bed: &TestBed, name: &str) -> String {
    bed.job(name)["status"]["attempt"]["node"].as_str().unwrap_or_default().to_owned()
}

/// What must not change about a job that stays: its pod, its container, and their resources.
fn pod_of(bed: &TestBed, name: &str) -> Value {
    let job = bed.job(name);
    let pod = bed.get("pod", job["status"]["attempt"]["pod"].as_str().unwrap_or_default());
    let container = &pod["status"]["containerStatuses"][0];
    json!({
        "pod": pod["metadata"]["name"], "uid": pod["metadata"]["uid"], "deleted": pod["metadata"]["deletionTimestamp"],
        "resources": pod["spec"]["containers"][0]["resources"], "container": container["containerID"],
        "restarts": container["restartCount"],
    })
}

/// A part of the control plane is killed in a move and comes back after the outage. Returns the seconds from its
/// return until the job runs on its target.
fn is_away(bed: &TestBed, part: &str) -> f64 {
    let _operator = Operator::start(bed, None);
    let from = bed.until("steady", "Running", None)["status"]["attempt"]["node"].as_str().unwrap().to_owned();
    let quiet = pod_of(bed, "quiet");
    assert!(quiet["container"].is_string(), "{quiet:#}");
    bed.send_to("steady", other(&from));
    std::thread::sleep(Duration::from_millis(500));
    let killed = bed.testbed(&["kill", part]);
    assert!(killed.status.success(), "{}", text(&killed.stderr));
    std::thread::sleep(outage());
    let living = alive(bed.name);
    assert!(living.get("quiet").is_some_and(|pods| pods.len() == 1), "a job that should stay has ended: {living:?}");
    let started = bed.testbed(&["start", part]);
    assert!(started.status.success(), "{}", text(&started.stderr));
    let began = Instant::now();
    let is_back = || {
        let answer = bed.output("kubectl", &["get", "trainingjob", "steady", "-n", "team", "-o", "name"], "");
        answer.status.success().then_some(())
    };
    assert!(within_a_minute(is_back).is_some(), "{part} did not come back");
    bed.until("steady", "Running", Some(other(&from)));
    let recovery_s = began.elapsed().as_secs_f64();
    let epoch = bed.kubectl(&["get", "trainingjob", "quiet", "-n", "team", "-o", "jsonpath={.status.attempt.epoch}"]);
    assert_eq!(epoch, "1", "a job that should stay was started again");
    assert_eq!(pod_of(bed, "quiet"), quiet, "a job that should stay has changed");
    recovery_s
}

/// The operator that leads; empty before the first operator has made the lease.
fn holder(bed: &TestBed) -> String {
    let lease = ["get", "lease", "gainshare-operator", "-n", SYSTEM, "--ignore-not-found"];
    bed.kubectl(&[&lease[..], &["-o", "jsonpath={.spec.holderIdentity}"]].concat())
}

/// The leader stands still in a move for three times its lease, the standby takes over and ends the move, and the
/// former leader runs again. Returns the seconds until the standby had ended the move.
fn stands_still(bed: &TestBed) -> f64 {
    let first = Operator::start(bed, None);
    let leads = eventually("a leader", || Some(holder(bed)).filter(|holder| !holder.is_empty()));
    let _standby = Operator::standby(bed);
    let from = bed.until("steady", "Running", None)["status"]["attempt"]["node"].as_str().unwrap().to_owned();
    bed.send_to("steady", other(&from));
    std::thread::sleep(Duration::from_millis(300));
    first.signal(nix::sys::signal::Signal::SIGSTOP);
    let began = Instant::now();
    eventually("another leader", || Some(holder(bed)).filter(|now| !now.is_empty() && *now != leads));
    bed.until("steady", "Running", Some(other(&from)));
    let took_s = began.elapsed().as_secs_f64();
    let before = bed.job("steady")["status"]["moves"].clone();
    std::thread::sleep((LEASE * 3).saturating_sub(began.elapsed()));
    first.signal(nix::sys::signal::Signal::SIGCONT);
    // The former leader has old orders and an old view; nothing of them may take effect.
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(250));
        assert_ne!(holder(bed), leads, "the former leader took the lease back");
    }
    assert_eq!((node_of(bed, "steady").as_str(), &bed.job("steady")["status"]["moves"]), (other(&from), &before));
    took_s
}

#[test]
#[ignore = "needs root and a test bed"]
fn the_control_plane_fails_while_jobs_move() {
    let bed = TestBed::with_training("outages", &["left", "right"]);
    let watch = Watch::begin(&bed);
    let (mut scenarios, mut tally) = (Scenarios::default(), Tally::default());
    let operator = Operator::start(&bed, None);
    for name in ["steady", "quiet"] {
        bed.apply(job(name, COUNTS, serde_json::json!({})));
        bed.until(name, "Running", Some("left"));
    }
    drop(operator);
    scenarios.run("the API server is away", || tally.add(is_away(&bed, "kube-apiserver")));
    scenarios.run("etcd is away", || tally.add(is_away(&bed, "etcd")));
    scenarios.run("the leader stands still", || tally.add(stands_still(&bed)));
    let watched = watch.end();
    scenarios.run("no job ever lived twice", || assert!(watched.twice.is_empty(), "{:?}", watched.twice));
    let violations = watched.twice.len();
    println!("fault: injected={} violations={violations} recovery_s={:.1}", tally.injected, tally.longest_s);
    scenarios.finish();
}
