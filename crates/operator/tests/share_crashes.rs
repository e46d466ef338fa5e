//! An operator that ends before or after any of its writes about shares changes nothing in the end.
//!
//! A SharePolicy shares a real node among real pods; a real node agent decides, and the real operator writes. In each
//! round the operator ends at a fail point after the policy was made, and another one takes over. Then the pods' sizes,
//! their annotations with their own resources and the status of the policy are those of a run without a fault. The
//! policy is deleted, the operator ends at a fail point of the restoration, and another one restores the pods' own
//! sizes. A second scenario does the same to an uninstall, and a third one completes it with the plain manifests. No
//! container is restarted by any of this.
//!
//! The policy gives equal shares, so the sizes do not depend on time. While the policy is put into force, the pods
//! never request more together than their authors did.

use crate::common::shared_pods::{SHARED, equal_shares, shared_pod};
use crate::common::training::{COUNTS, Operator, job, programs};
use crate::common::{FaultTally, SYSTEM, Scenarios, TestBed, checkout, eventually, text, within_a_minute};
use crate::invariants::check_requests;
use gainshare_kube_api::names::{ORIGINAL_ANNOTATION, STATUS_ANNOTATION};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The writes after a policy was made. A pod's own resources are written with its first note, or before its first
/// resize.
const SHARING: [&str; 8] = [
    "before-share-originals",
    "after-share-originals",
    "before-share-note",
    "after-share-note",
    "before-share-resize",
    "after-share-resize",
    "before-share-status",
    "after-share-status",
];

/// The writes after a policy was deleted.
const RESTORING: [&str; 4] =
    ["before-share-restore", "after-share-restore", "before-share-forget", "after-share-forget"];

/// The writes of an uninstall, in their order.
const RELEASING: [&str; 6] = [
    "after-release-switch",
    "before-share-restore",
    "after-share-restore",
    "after-share-forget",
    "before-release-finalizer",
    "after-release-finalizer",
];

/// A state that does not change for this time is taken as the last one.
const SETTLED: Duration = Duration::from_secs(5);

fn delete_policy(bed: &TestBed) {
    bed.kubectl(&["delete", "sharepolicy", "training", "-n", "team", "--wait=false"]);
}

fn requested_cpu(pod: &Value) -> &Value {
    &pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]
}

/// What must be the same with and without a fault.
fn pods(bed: &TestBed) -> Value {
    let one = |(name, _): &(&str, &str)| {
        let pod = bed.get("pod", name);
        let annotation = |key: &str| -> Value {
            let text = pod["metadata"]["annotations"][key].as_str().unwrap_or("null");
            serde_json::from_str(text).unwrap_or_else(|error| panic!("{key} of {name} is {text}: {error}"))
        };
        let (note, container) = (annotation(STATUS_ANNOTATION), &pod["status"]["containerStatuses"][0]);
        json!({
            "name": name, "uid": pod["metadata"]["uid"], "cpu": requested_cpu(&pod),
            // What the kubelet has put into force.
            "cpuInForce": container["resources"]["requests"]["cpu"],
            "original": annotation(ORIGINAL_ANNOTATION),
            "policy": note["policy"], "share": note["sharePercent"], "blocked": note["blocked"],
            "container": container["containerID"], "restarts": container["restartCount"],
        })
    };
    SHARED.iter().map(one).collect()
}

/// The same of the policy. Categories and times follow the clock.
fn status(bed: &TestBed) -> Value {
    let status = bed.get("sharepolicy", "training")["status"].clone();
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    let conditions: Vec<Value> =
        conditions.iter().map(|one| json!([one["type"], one["status"], one["reason"], one["message"]])).collect();
    json!({
        "conditions": conditions, "pods": status["pods"], "resizable": status["resizable"],
        "blocked": status["blocked"], "generation": status["observedGeneration"],
    })
}

fn shared(bed: &TestBed) -> Value {
    json!({"pods": pods(bed), "status": status(bed)})
}

/// Counts what came of the end of an operator: the seconds until all was as without a fault, or the difference.
fn count_recovery(tally: &mut FaultTally, result: Result<f64, String>) {
    match result {
        Ok(took_s) => tally.recover(took_s),
        Err(difference) => tally.demand(false, || difference),
    }
}

/// Waits until the state is the expected one. Returns how long that took, or the difference.
fn until_same(
    bed: &TestBed,
    what: &str,
    expected: &Value,
    mut read: impl FnMut(&TestBed) -> Value,
) -> Result<f64, String> {
    let (began, mut last) = (Instant::now(), Value::Null);
    let found = within_a_minute(|| {
        last = read(bed);
        (last == *expected).then_some(())
    });
    match found {
        Some(()) => Ok(began.elapsed().as_secs_f64()),
        None => Err(format!("{what}: {last:#}\ninstead of {expected:#}\n{}", bed.operator_log())),
    }
}

/// Starts an operator that ends at this point, makes the change that leads it there, and waits for its end.
fn dies_at(bed: &TestBed, point: &str, change: impl FnOnce()) {
    let mut operator = Operator::start(bed, Some(point));
    change();
    let code = operator.ended();
    assert_eq!(code, Some(86), "the operator did not reach {point}\n{}", bed.operator_log());
}

/// A run without a fault: the state while the policy shares the pods.
fn undisturbed(bed: &TestBed, own: &Value) -> Value {
    let _operator = Operator::start(bed, None);
    bed.apply(equal_shares());
    let is_shared = || {
        let now = shared(bed);
        let has_shares = SHARED.iter().enumerate().all(|(i, (_, cpu))| {
            let pod = &now["pods"][i];
            pod["cpu"] != *cpu && pod["cpuInForce"] == pod["cpu"] && pod["share"].is_u64() && !pod["original"].is_null()
        });
        let ready = json!(["Ready", "True"]);
        let is_ready = now["status"]["conditions"]
            .as_array()
            .is_some_and(|all| all.iter().any(|one| one[0] == ready[0] && one[1] == ready[1]));
        (has_shares && is_ready).then_some(now)
    };
    let shared_state = || {
        let first = is_shared()?;
        std::thread::sleep(SETTLED);
        (is_shared().as_ref() == Some(&first)).then_some(first)
    };
    let Some(expected) = within_a_minute(shared_state) else {
        panic!("the pods are not shared: {:#}\n{}", shared(bed), bed.operator_log());
    };
    println!("without a fault: {expected:#}");
    delete_policy(bed);
    if let Err(difference) = until_same(bed, "the pods' own sizes without a fault", own, pods) {
        panic!("{difference}");
    }
    expected
}

/// The operator ends at each point of sharing and restoring. A difference is counted, and the next round runs all the
/// same.
fn dies_around_each_write(bed: &TestBed, own: &Value, tally: &mut FaultTally) {
    let expected = undisturbed(bed, own);
    for (sharing, restoring) in SHARING.iter().zip(RESTORING.iter().cycle()) {
        dies_at(bed, sharing, || bed.apply(equal_shares()));
        tally.inject(1);
        let operator = Operator::start(bed, None);
        let mut broken = Vec::new();
        let shared = until_same(bed, &format!("shares after {sharing}"), &expected, |bed| {
            broken.extend(check_requests(bed, "left", &SHARED));
            shared(bed)
        });
        tally.demand(broken.is_empty(), || format!("after {sharing}: {broken:?}"));
        drop(operator);
        dies_at(bed, restoring, || delete_policy(bed));
        tally.inject(1);
        let operator = Operator::start(bed, None);
        let restored = until_same(bed, &format!("own sizes after {restoring}"), own, pods);
        drop(operator);
        if let (Ok(shared_s), Ok(restored_s)) = (&shared, &restored) {
            println!("{sharing}: shared after {shared_s:.1} s; {restoring}: restored after {restored_s:.1} s");
        }
        count_recovery(tally, shared);
        count_recovery(tally, restored);
    }
}

/// An uninstall that ends at each of its writes and is started again.
fn uninstall_dies(bed: &TestBed, own: &Value, tally: &mut FaultTally) {
    let operator = Operator::start(bed, None);
    bed.apply(equal_shares());
    bed.apply(job("held", COUNTS, json!({})));
    let held = bed.until("held", "Running", Some("left"));
    let is_shared = || (pods(bed)[0]["cpu"] != *SHARED[0].1 && pods(bed)[1]["cpu"] != *SHARED[1].1).then_some(());
    eventually("shared pods before the uninstall", is_shared);
    drop(operator);
    for point in RELEASING {
        let mut release = Operator::with(bed, Some(point), &["--release"]);
        let code = release.ended();
        assert_eq!(code, Some(86), "the uninstall did not reach {point}\n{}", bed.operator_log());
        tally.inject(1);
    }
    release_by_manifest(bed);
    count_recovery(tally, until_same(bed, "own sizes after the uninstall", own, pods));
    let name = held["status"]["attempt"]["pod"].as_str().unwrap();
    let pod = bed.find("pod", name).unwrap_or_default();
    for object in [bed.job("held"), pod.clone()] {
        let finalizers = object["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
        let is_ours = |one: &Value| one.as_str().unwrap_or_default().contains("gainshare");
        tally.demand(!finalizers.iter().any(is_ours), || format!("a finalizer is left: {finalizers:?}"));
    }
    let lives = pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null();
    tally.demand(lives, || format!("the pod of a job did not outlive the uninstall: {pod:#}"));
}

/// A manifest of the checkout.
fn manifest(name: &str) -> String {
    checkout().join("deploy").join(name).to_str().unwrap().to_owned()
}

/// The first step of an uninstall with plain YAML: `deploy/release.yaml`, as `docs/kubernetes.md` has it.
fn release_by_manifest(bed: &TestBed) {
    let release = manifest("release.yaml");
    let yaml = std::fs::read_to_string(&release).unwrap();
    let image = yaml.lines().find_map(|line| line.trim().strip_prefix("image: ")).expect("the Job has an image");
    let programs = programs();
    let mut load = vec!["load-image", "--image", image];
    load.extend(programs.iter().map(|program| program.to_str().unwrap()));
    let loaded = bed.testbed(&load);
    assert!(loaded.status.success(), "{}", text(&loaded.stderr));
    bed.kubectl(&["apply", "-f", &release]);
    let wait = ["wait", "--for=condition=Complete", "job/gainshare-release", "-n", SYSTEM, "--timeout=120s"];
    let waited = bed.output("kubectl", &wait, "");
    if !waited.status.success() {
        let describe = ["describe", "jobs,pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=release"];
        let said = bed.output("kubectl", &describe, "");
        let logs = bed.output("kubectl", &["logs", "job/gainshare-release", "-n", SYSTEM], "");
        panic!("{}\n{}\n{}", text(&waited.stderr), text(&said.stdout), text(&logs.stdout));
    }
}

/// The second step: `kubectl delete -f deploy/gainshare.yaml`. It ends by itself, although a TrainingJob and a policy
/// exist, and nothing of ours is left. The shared pods run on as they are. The bed has a part of these objects only.
fn plain_uninstall(bed: &TestBed, own: &Value, tally: &mut FaultTally) {
    let began = Instant::now();
    let plain = manifest("gainshare.yaml");
    tally.inject(1);
    let deleted = bed.output("kubectl", &["delete", "-f", &plain, "--ignore-not-found", "--timeout=120s"], "");
    tally.demand(deleted.status.success(), || {
        format!("the uninstall did not end: {}\n{}", text(&deleted.stdout), text(&deleted.stderr))
    });
    let took_s = began.elapsed().as_secs_f64();
    println!("the plain manifests were deleted in {took_s:.1} s");
    let kinds = "crds,namespaces,clusterroles,clusterrolebindings,validatingadmissionpolicies,\
                 validatingadmissionpolicybindings,mutatingwebhookconfigurations,validatingwebhookconfigurations";
    let listed = bed.kubectl(&["get", kinds, "-o", "name"]);
    let left: Vec<&str> = listed.lines().filter(|name| name.contains("gainshare")).collect();
    tally.demand(left.is_empty(), || format!("objects are left after the uninstall: {left:?}"));
    let now = pods(bed);
    tally.demand(now == *own, || format!("pods have changed in the uninstall: {now:#}\ninstead of {own:#}"));
    let created = bed.output("kubectl", &["create", "-f", "-"], &shared_pod("later", "50m").to_string());
    tally.demand(created.status.success(), || format!("no pod can be made: {}", text(&created.stderr)));
}

#[test]
#[ignore = "needs root and a test bed"]
fn an_operator_that_ends_at_any_write_about_shares_changes_nothing() {
    let mut bed = TestBed::with_training("sharecrash", &["left=1.0"]);
    bed.start_agents();
    let bed = bed;
    bed.make_shared_pods();
    let own = pods(&bed);
    let mut scenarios = Scenarios::default();
    let (mut deaths, mut uninstalls) = (FaultTally::of("operator-killed"), FaultTally::of("uninstall"));
    scenarios.run_counted("the operator ends around each write about shares", &mut deaths, |tally| {
        dies_around_each_write(&bed, &own, tally);
    });
    scenarios.run_counted("an uninstall ends at its writes", &mut uninstalls, |tally| {
        uninstall_dies(&bed, &own, tally);
    });
    scenarios.run_counted("the plain manifests are deleted", &mut uninstalls, |tally| {
        plain_uninstall(&bed, &own, tally);
    });
    deaths.print();
    uninstalls.print();
    scenarios.finish();
}
