//! On a real API server: objects of one tenant that once stopped the operator for all, and an operator that dies after
//! each write about a Job of the cluster's own kind.
//!
//! A watcher reads from the kernel which attempts live: never two of one job.

#[path = "../../../xtask/tests/common/mod.rs"]
mod common;

use common::training::{COUNTS, Operator, batch_job, job};
use common::{Scenarios, TestBed, Watch, eventually};
use serde_json::{Value, json};
use std::time::Instant;

/// What is written about a Job that moves, in this order. The end of the stop and the start of the next attempt are one
/// write, `resume`.
const WRITES: [&str; 6] =
    ["after-stopping", "after-hold-pod", "after-suspend", "after-clear-start-time", "after-resume", "after-running"];

fn other(node: &str) -> &'static str {
    if node == "left" { "right" } else { "left" }
}

/// The operator dies after each write about an adopted Job. Returns how often it died, and the longest time from the
/// next operator's start until the Job ran on its target.
fn dies_after_each_write(bed: &TestBed) -> (u32, f64) {
    let operator = Operator::start(bed, None);
    bed.apply(batch_job("batch", COUNTS, "Failed"));
    let runs_on = |node: &str| {
        let journal = bed.adopted("batch");
        (journal["node"] == node && journal["migration"].is_null()).then_some(())
    };
    let mut node = eventually("the Job's first node", || bed.adopted("batch")["node"].as_str().map(str::to_owned));
    drop(operator);
    let (mut died, mut longest_s) = (0, 0.0f64);
    for point in WRITES {
        let mut operator = Operator::start(bed, Some(point));
        node = other(&node).to_owned();
        bed.send("job/batch", &node);
        println!("{point}: to {node}, from {}", bed.adopted("batch"));
        operator.died();
        died += 1;
        let began = Instant::now();
        let _operator = Operator::start(bed, None);
        eventually("the Job on its target", || runs_on(&node));
        longest_s = longest_s.max(began.elapsed().as_secs_f64());
    }
    let counts = bed.resumed_at("batch");
    assert!(counts.windows(2).all(|pair| pair[0] < pair[1]), "it did not resume: {counts:?}");
    (died, longest_s)
}

/// The objects of one tenant, each of which once stopped the operator for the whole cluster.
fn hostile_objects() -> Vec<Value> {
    let containers = |resources: Value| -> Vec<Value> {
        let container = |i| {
            json!({
                "name": format!("c{i}"), "image": "busybox:local", "imagePullPolicy": "Never",
                "command": ["sleep", "600"], "resources": resources,
            })
        };
        (0..19).map(container).collect()
    };
    let many = containers(json!({"requests": {"cpu": "999999999999999"}}));
    let limits = containers(json!({"requests": {"memory": "1Mi"}, "limits": {"memory": "999999999999999999"}}));
    let named = |kind: &str, version: &str, name: &str| json!({"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "team"}});
    let mut training = named("TrainingJob", "gainshare.dev/v1alpha1", "hostile-training");
    training["spec"] = json!({"template": {"spec": {"containers": many}}});
    let mut suspended = named("Job", "batch/v1", "hostile-suspended");
    suspended["spec"] = json!({"suspend": true, "template": {"spec": {"restartPolicy": "Never", "containers": many}}});
    let mut bound = named("Pod", "v1", "hostile-bound");
    bound["spec"] = json!({"nodeName": "left", "containers": many});
    let mut limited = named("Pod", "v1", "hostile-limits");
    limited["spec"] = json!({"nodeName": "left", "containers": limits});
    let mut endless = named("Pod", "v1", "hostile-grace");
    endless["metadata"]["labels"] = json!({"gainshare.dev/job": "hostile-grace", "gainshare.dev/epoch": "1"});
    endless["metadata"]["finalizers"] = json!(["gainshare.dev/attempt"]);
    endless["spec"] = json!({
        "nodeName": "left", "terminationGracePeriodSeconds": 9_000_000_000_000_000_000u64,
        "containers": &containers(json!({}))[..1],
    });
    let mut forged = batch_job("hostile-journal", "sleep 600", "Failed");
    forged["metadata"]["annotations"]["gainshare.dev/adopted"] = json!(r#"{"moves":4294967295}"#);
    vec![training, suspended, bound, limited, endless, forged]
}

/// The warning that the operator published about an invalid object.
fn warning_about(bed: &TestBed, kind: &str, name: &str) -> Option<Value> {
    let events: Value = serde_json::from_str(&bed.kubectl(&["get", "events", "-n", "team", "-o", "json"])).unwrap();
    let is_about = |event: &&Value| {
        let (object, reason) = (&event["involvedObject"], event["reason"].as_str().unwrap_or_default());
        object["kind"] == kind && object["name"] == name && event["type"] == "Warning" && reason.starts_with("Invalid")
    };
    events["items"].as_array()?.iter().find(is_about).cloned()
}

/// Another tenant's job runs beside the hostile objects. Returns how many there were, and the seconds until it ran.
fn serves_another_tenant(bed: &TestBed) -> (u32, f64) {
    let _operator = Operator::start(bed, None);
    let objects = hostile_objects();
    for object in &objects {
        bed.apply(object.clone());
    }
    // The grace period is read when the pod is deleted.
    bed.kubectl(&["delete", "pod", "hostile-grace", "-n", "team", "--wait=false"]);
    let began = Instant::now();
    bed.apply(job("sound", COUNTS, json!({})));
    bed.until("sound", "Running", Some("left"));
    let took_s = began.elapsed().as_secs_f64();
    bed.send_to("sound", "right");
    bed.until("sound", "Running", Some("right"));
    let message = bed.job("hostile-training")["status"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(!message.is_empty(), "the hostile job is reported on itself");
    println!("the job with huge requests: {message}");
    for object in &objects {
        let (kind, name) = (object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        let event = eventually(&format!("an event that names {kind} {name}"), || warning_about(bed, kind, name));
        println!("{kind} {name}: {}: {}", event["reason"], event["message"]);
    }
    (objects.len() as u32, took_s)
}

#[test]
#[ignore = "needs root and a test bed"]
fn the_operator_survives_its_death_and_hostile_objects() {
    let bed = TestBed::with_training("crashes", &["left", "right"]);
    let watch = Watch::begin(&bed);
    let (mut scenarios, mut injected, mut longest_s) = (Scenarios::default(), 0, 0.0f64);
    let mut add = |(count, took_s): (u32, f64)| {
        injected += count;
        longest_s = longest_s.max(took_s);
    };
    scenarios.run("the operator dies after each write about a Job", || add(dies_after_each_write(&bed)));
    scenarios.run("hostile objects stop no other tenant", || add(serves_another_tenant(&bed)));
    let watched = watch.end();
    scenarios.run("no job ever lived twice", || assert!(watched.twice.is_empty(), "{:?}", watched.twice));
    println!("fault: injected={injected} violations={} recovery_s={longest_s:.1}", watched.twice.len());
    scenarios.finish();
}
