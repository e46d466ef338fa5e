//! On a real API server: objects of one tenant that once stopped the operator for all, and an operator that dies
//! before and after each write about a Job of the cluster's own kind.
//!
//! A watcher reads from the kernel which attempts live: never two of one job. No job is lost, and none starts before
//! its checkpoint.

use crate::common::training::{COUNTS, Operator, batch_job, dies_around, job};
use crate::common::{FaultTally, Scenarios, TestBed, eventually};
use crate::invariants::Watch;
use serde_json::{Value, json};
use std::time::Instant;

/// What is written about a Job that is adopted, in this order.
const ADOPTION: [&str; 2] = ["mark", "noted"];

/// What is written about a Job that moves, in this order. The end of the stop and the start of the next attempt are one
/// write, `resume`.
const MOVE: [&str; 8] = ["stopping", "hold-pod", "suspend", "clear-start-time", "resume", "let-go", "running", "mark"];

/// What is written about a Job that its author takes back before it has moved.
const RETURN: [&str; 2] = ["mark", "forget"];

/// Operators die before and after each write about adopted Jobs. Recovery is the time from the start of the last
/// operator until everything is as without a death.
fn dies_around_each_write(bed: &TestBed, tally: &mut FaultTally) {
    let runs_on = |name: &str, node: &str| {
        let journal = bed.adopted(name);
        (journal["node"] == node && journal["migration"].is_null()).then_some(())
    };
    let node_of =
        |name: &str| eventually("the Job's first node", || bed.adopted(name)["node"].as_str().map(str::to_owned));
    let (operator, began) = dies_around(bed, &ADOPTION, tally, || bed.apply(batch_job("batch", COUNTS, "Failed")));
    let node = node_of("batch");
    tally.recover(began.elapsed().as_secs_f64());
    drop(operator);

    let target = if node == "left" { "right" } else { "left" };
    let (operator, began) = dies_around(bed, &MOVE, tally, || bed.send("job/batch", target));
    eventually("the Job on its target", || runs_on("batch", target));
    tally.recover(began.elapsed().as_secs_f64());
    // The newest attempt may run before it has printed anything.
    let counts =
        eventually("a line of both attempts", || Some(bed.resumed_at("batch")).filter(|counts| counts.len() >= 2));
    tally.demand(counts.len() == 2 && counts[0] < counts[1], || format!("it did not resume: {counts:?}"));
    let moves = bed.adopted("batch")["moves"].clone();
    tally.demand(moves == 1, || format!("one order counts as {moves} moves"));

    bed.apply(batch_job("returned", COUNTS, "Failed"));
    let node = node_of("returned");
    drop(operator);
    let take_back = || drop(bed.kubectl(&["annotate", "job", "returned", "-n", "team", "gainshare.dev/adopt-"]));
    let (_operator, began) = dies_around(bed, &RETURN, tally, take_back);
    eventually("a Job without a note of ours", || bed.adopted("returned").is_null().then_some(()));
    tally.recover(began.elapsed().as_secs_f64());
    let starts = bed.resumed_at("returned").len();
    tally.demand(starts == 1, || format!("the Job on {node} was started {starts} times"));
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

/// The namespace of another tenant.
const OTHER: &str = "other";

/// A tenant's job is placed within this time, also beside hostile objects of another tenant.
const PLACED_WITHIN_S: i64 = 5;

fn moment(value: &Value) -> Option<jiff::Timestamp> {
    value.as_str()?.parse().ok()
}

/// Makes a job of the other tenant and waits until it runs. Recovery is the time from its creation until its pod has
/// its node, by the API server's clock. What the kubelet takes after that is not the operator's affair.
fn places_job_of_other_tenant(bed: &TestBed, name: &str, tally: &mut FaultTally) {
    let more = json!({"checkpoint": null, "runPolicy": {"terminationGracePeriodSeconds": 1}});
    let mut sound: Value = serde_json::from_str(&job(name, "while :; do sleep 1; done", more)).unwrap();
    sound["metadata"]["namespace"] = json!(OTHER);
    // The hostile pods are bound to the other node.
    sound["metadata"]["annotations"]["gainshare.dev/node"] = json!("right");
    let began = Instant::now();
    bed.apply(&sound);
    let get = |kind: &str, name: &str| -> Option<Value> {
        let output = bed.output("kubectl", &["get", kind, name, "-n", OTHER, "-o", "json"], "");
        serde_json::from_slice(&output.stdout).ok()
    };
    let runs = || get("trainingjob", name).filter(|job| job["status"]["state"] == "Running");
    let running = eventually("a job of the other tenant that runs", runs);
    let run_s = began.elapsed().as_secs_f64();
    let pod = get("pod", running["status"]["attempt"]["pod"].as_str().unwrap()).unwrap();
    let conditions = pod["status"]["conditions"].as_array().unwrap();
    let scheduled = conditions.iter().find(|one| one["type"] == "PodScheduled" && one["status"] == "True").unwrap();
    let placed = moment(&scheduled["lastTransitionTime"]).unwrap();
    let placed_s = placed.duration_since(moment(&running["metadata"]["creationTimestamp"]).unwrap()).as_secs();
    println!("{name} of the other tenant: placed after {placed_s} s, seen to run after {run_s:.1} s");
    tally.demand(placed_s <= PLACED_WITHIN_S, || format!("{name} was placed after {placed_s} s"));
    tally.recover(placed_s as f64);
}

/// Jobs of another tenant are placed beside the hostile objects: by an operator that saw them come, and by one that
/// finds them when it starts.
fn serves_another_tenant(bed: &TestBed, tally: &mut FaultTally) {
    let operator = Operator::start(bed, None);
    // With a policy the resources of all pods count, also those of the hostile ones.
    bed.apply(json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
        "metadata": {"name": "all", "namespace": "team"}, "spec": {"selector": {}},
    }));
    let objects = hostile_objects();
    for object in &objects {
        bed.apply(object.clone());
        tally.inject(1);
    }
    // The grace period is read when the pod is deleted.
    bed.kubectl(&["delete", "pod", "hostile-grace", "-n", "team", "--wait=false"]);
    // Once it has reported on this job, the operator leads and has read every list.
    let message = eventually("a report about the hostile job on itself", || {
        bed.job("hostile-training")["status"]["message"].as_str().filter(|text| !text.is_empty()).map(str::to_owned)
    });
    println!("the job with huge requests: {message}");
    places_job_of_other_tenant(bed, "sound-first", tally);
    bed.apply(job("sound", COUNTS, json!({})));
    bed.until("sound", "Running", Some("left"));
    bed.send_to("sound", "right");
    bed.until("sound", "Running", Some("right"));
    for object in &objects {
        let (kind, name) = (object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        let event = eventually(&format!("an event that names {kind} {name}"), || warning_about(bed, kind, name));
        println!("{kind} {name}: {}: {}", event["reason"], event["message"]);
    }
    let selected = || bed.get("sharepolicy", "all")["status"]["conditions"].as_array().map(|_| ());
    eventually("a policy that the operator has read", selected);
    println!("the pod with huge limits is {}", bed.get("pod", "hostile-limits")["status"]["phase"]);

    drop(operator);
    let _operator = Operator::start(bed, None);
    bed.send_to("sound", "left");
    bed.until("sound", "Running", Some("left"));
    places_job_of_other_tenant(bed, "sound-second", tally);
}

#[test]
#[ignore = "needs root and a test bed"]
fn the_operator_survives_its_death_and_hostile_objects() {
    let bed = TestBed::with_training("crashes", &["left", "right"]);
    let labels = json!({"gainshare.dev/jobs": "enabled"});
    bed.apply(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OTHER, "labels": labels}}));
    let watch = Watch::begin(&bed);
    let mut scenarios = Scenarios::default();
    let (mut deaths, mut hostile) = (FaultTally::of("operator-killed"), FaultTally::of("hostile-objects"));
    scenarios.run_counted("operators die around each write about a Job", &mut deaths, |tally| {
        dies_around_each_write(&bed, tally);
    });
    scenarios.run_counted("hostile objects stop no other tenant", &mut hostile, |tally| {
        serves_another_tenant(&bed, tally);
    });
    let watched = watch.end(&bed, &["batch", "returned", "sound"]);
    for tally in [&mut deaths, &mut hostile] {
        scenarios.run_counted("the invariants held all the time", tally, |tally| watched.report(tally));
        tally.print();
    }
    scenarios.finish();
}
