//! Nodes for deadlines on a real API server and scheduler, first with make-believe nodes, then with a real kubelet that
//! joins on demand: a job that cannot keep its deadline asks for a node, a node joins, and the job runs there.
//!
//! The test itself is the program that adds nodes. The operator is the real program with the rights that the chart
//! gives it.

use crate::common::training::Operator;
use crate::common::{SYSTEM, Scenarios, TestBed, eventually, text, within_a_minute};
use serde_json::{Value, json};

const PLACEHOLDER: &str = "gainshare.dev/placeholder";
/// What marks a node as one of kwok's.
const MARK: &str = "kwok.x-k8s.io/node";

#[test]
#[ignore = "needs root and a test bed"]
fn deadlines_get_nodes() {
    let bed = TestBed::with_kwok_training("nodestest", 1);
    bed.serve_scaler();
    let operator = Operator::with(&bed, None, &["--scaler", "--scaler-image", "gainshare:local"]);
    let mut scenarios = Scenarios::default();
    scenarios.run("a job with a deadline gets a node", || job_gets_a_node(&bed));
    scenarios.run("nothing keeps a node that is not needed any more", || node_is_free_again(&bed));
    scenarios.run("a need that goes takes its placeholder along", || need_goes(&bed));
    scenarios.run("placeholders go with the ConfigMap", || uninstall(&bed, operator));
    scenarios.finish();
}

#[test]
#[ignore = "needs root and a test bed"]
fn real_nodes_join_on_demand() {
    let bed = TestBed::with_training("joinstest", &["first", "second"]);
    bed.load_programs();
    bed.serve_scaler();
    // As long as its kubelet does not run and its object is gone, the cluster has no second node.
    let leave = || {
        bed.kill_kubelet("second");
        bed.kubectl(&["delete", "node", "second", "--timeout=30s"]);
    };
    leave();
    let _operator = Operator::with(&bed, None, &["--scaler", "--scaler-image", "gainshare:local"]);
    let mut due = job("due", 2, 3600);
    let requests = json!({"cpu": "400m", "memory": "16Mi"});
    due["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["resources"]["requests"] = requests;
    bed.apply(due);
    wait_for_placeholders(&bed, 1);
    eventually("the need in the status", || {
        (bed.job("due")["status"]["finish"]["nodesNeeded"]["count"] == 1).then_some(())
    });
    let started = bed.testbed(&["start", "kubelet-second"]);
    assert!(started.status.success(), "{}", text(&started.stderr));
    bed.until("due", "Running", None);
    let node_of = |pod: &str| bed.get("pod", pod)["spec"]["nodeName"].clone();
    assert_ne!(node_of("due-worker-0"), node_of("due-worker-1"));
    wait_for_placeholders(&bed, 0);
    // Nothing keeps the node when the job has gone.
    bed.kubectl(&["delete", "trainingjob", "due", "-n", "team", "--timeout=60s"]);
    let all = ["get", "pods", "-A", "--field-selector=spec.nodeName=second", "-o", "name"];
    eventually("an empty node", || bed.kubectl(&all).trim().is_empty().then_some(()));
    leave();
}

/// A job of this number of workers, each of which takes most of a node of 32 cores.
fn job(name: &str, workers: u32, deadline_s: u32) -> Value {
    let container = json!({
        "name": "tensorflow", "image": "busybox:local", "command": ["sleep", "600"],
        "resources": {"requests": {"cpu": "20", "memory": "1Gi"}},
    });
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {
            "policy": "na", "deadlineSeconds": deadline_s,
            "runPolicy": {"terminationGracePeriodSeconds": 2},
            "replicaSpecs": {"Worker": {"replicas": workers, "template": {"spec": {"containers": [container]}}}},
        },
    })
}

/// A make-believe node like those of the test bed.
fn join_node(bed: &TestBed, name: &str) {
    let size = json!({"cpu": "32", "memory": "256Gi", "pods": "110"});
    bed.apply(json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name, "annotations": {MARK: "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "kwok"},
        },
        "status": {"allocatable": size, "capacity": size},
    }));
    bed.kubectl(&["wait", "--for=condition=Ready", &format!("node/{name}"), "--timeout=60s"]);
}

/// The placeholders that exist.
fn placeholders(bed: &TestBed) -> Vec<Value> {
    let list = bed.kubectl(&["get", "pods", "-n", SYSTEM, "-l", PLACEHOLDER, "-o", "json"]);
    let mut list: Value = serde_json::from_str(&list).unwrap();
    serde_json::from_value(list["items"].take()).unwrap()
}

fn wait_for_placeholders(bed: &TestBed, count: usize) -> Vec<Value> {
    eventually(&format!("{count} placeholders"), || Some(placeholders(bed)).filter(|found| found.len() == count))
}

fn job_gets_a_node(bed: &TestBed) {
    bed.apply(job("due", 2, 3600));
    // A job without a deadline waits like any other.
    let mut patient = job("patient", 2, 3600);
    patient["spec"].as_object_mut().unwrap().remove("deadlineSeconds");
    bed.apply(patient);
    wait_for_placeholders(bed, 1);
    let pending = eventually("a placeholder that the scheduler has refused", || {
        let found = placeholders(bed).pop()?;
        let conditions = found["status"]["conditions"].as_array()?.clone();
        conditions.iter().any(|one| one["reason"] == "Unschedulable").then_some(found)
    });
    assert_eq!(
        (&pending["status"]["phase"], &pending["spec"]["priority"]),
        (&json!("Pending"), &json!(-10)),
        "{pending:#}"
    );
    assert_eq!(pending["spec"]["containers"][0]["resources"]["requests"]["cpu"], "28800m");
    let finish = eventually("the need in the status", || {
        Some(bed.job("due")["status"]["finish"].clone()).filter(|finish| finish["nodesNeeded"].is_object())
    });
    assert_eq!(finish["nodesNeeded"], json!({"count": 1, "cpu": "32000m", "memory": "262144Mi"}));
    let events = bed.kubectl(&["get", "events", "-n", "team", "--field-selector=reason=NodesNeeded", "-o", "json"]);
    let events: Value = serde_json::from_str(&events).unwrap();
    let of = |name: &str| {
        let all = events["items"].as_array().unwrap();
        all.iter().filter(|event| event["involvedObject"]["name"] == name).cloned().collect::<Vec<Value>>()
    };
    assert_eq!((of("due").len(), of("patient").len()), (1, 0), "{events:#}");
    let note = of("due")[0]["message"].as_str().unwrap().to_owned();
    assert!(note.starts_with("needs 1 more node of 32 cores / 256 GiB to finish by 2"), "{note}");

    join_node(bed, "kwok-new");
    wait_for_placeholders(bed, 0);
    bed.until("due", "Running", None);
    let nodes = ["due-worker-0", "due-worker-1"].map(|pod| bed.get("pod", pod)["spec"]["nodeName"].clone());
    assert!(nodes.contains(&json!("kwok-new")) && nodes.contains(&json!("kwok-0")), "{nodes:?}");
    eventually("the end of the need", || bed.job("due")["status"]["finish"]["nodesNeeded"].is_null().then_some(()));
    assert_eq!(placeholders(bed), Vec::<Value>::new(), "no other node is asked for");
    bed.kubectl(&["delete", "trainingjob", "patient", "-n", "team", "--timeout=60s"]);
}

fn node_is_free_again(bed: &TestBed) {
    bed.kubectl(&["delete", "trainingjob", "due", "-n", "team", "--timeout=60s"]);
    let all = ["get", "pods", "-A", "--field-selector=spec.nodeName=kwok-new", "-o", "name"];
    eventually("an empty node", || bed.kubectl(&all).trim().is_empty().then_some(()));
    bed.kubectl(&["delete", "node", "kwok-new", "--timeout=30s"]);
}

fn need_goes(bed: &TestBed) {
    bed.apply(job("short", 2, 3600));
    wait_for_placeholders(bed, 1);
    bed.kubectl(&["delete", "trainingjob", "short", "-n", "team", "--timeout=60s"]);
    wait_for_placeholders(bed, 0);
}

fn uninstall(bed: &TestBed, operator: Operator) {
    bed.apply(job("last", 2, 3600));
    // When the last job went, its placeholder may have got the room that became free. Then no other one is made for a
    // minute.
    let _ = within_a_minute(|| (placeholders(bed).len() == 1).then_some(()));
    wait_for_placeholders(bed, 1);
    drop(operator);
    bed.kubectl(&["delete", "configmap", "gainshare-operator", "-n", SYSTEM]);
    wait_for_placeholders(bed, 0);
}
