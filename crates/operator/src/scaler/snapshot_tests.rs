//! Which jobs count as late, on pods as the API server shows them and reports as node agents send them.

use super::*;
use crate::state::workload::WorkloadKind;
use gainshare_core::view::{Marks, WorkLeft};
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::deadline::{DeadlineState, Forecast};
use gainshare_kube_api::names::{DEADLINE_ANNOTATION, EPOCH_LABEL, JOB_LABEL, POLICY_ANNOTATION};
use gainshare_kube_api::training_job::JobPolicy;
use gainshare_kube_api::wire::{self, NodeTotals, SyncRequest};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::time::Instant;

const NOW_S: i64 = 1_800_000_000;

fn now() -> Timestamp {
    Timestamp::from_second(NOW_S).unwrap()
}

/// The pod of an attempt with a deadline in an hour; `change` changes its manifest.
fn pod(node: Option<&str>, change: impl FnOnce(&mut Value)) -> PodFacts {
    let due = Timestamp::from_second(NOW_S + 3600).unwrap().to_string();
    let started = Timestamp::from_second(NOW_S - 600).unwrap().to_string();
    let mut pod = json!({
        "metadata": {
            "name": "run-1", "namespace": "team", "uid": "pod", "creationTimestamp": started,
            "labels": {JOB_LABEL: "run", EPOCH_LABEL: "1"},
            "annotations": {DEADLINE_ANNOTATION: due, POLICY_ANNOTATION: "gainshare"},
            "ownerReferences": [{
                "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "name": "run", "uid": "job", "controller": true,
            }],
        },
        "spec": {"containers": [{"name": "main", "image": "i", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}]},
        "status": {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"},
        ]},
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = json!(node);
        pod["status"] = json!({"phase": "Running", "containerStatuses": [{
            "name": "main", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
            "state": {"running": {"startedAt": started}},
        }]});
    }
    change(&mut pod);
    PodFacts::of(&serde_json::from_value::<Pod>(pod).unwrap()).unwrap()
}

fn facts(state: JobState) -> JobFacts {
    JobFacts {
        uid: "job".into(),
        kind: WorkloadKind::TrainingJob,
        namespace: "team".to_owned(),
        name: "run".to_owned(),
        owner: "team".to_owned(),
        arrived: now(),
        policy: JobPolicy::default(),
        state,
        movable: Ok(()),
        pod_uid: Some("pod".into()),
        cpu_request_milli: 3000,
        memory_request_bytes: 1 << 30,
        tried: vec![],
        move_cost_s: Some(100.0),
        marks: Marks::default(),
    }
}

fn world(pod: PodFacts) -> World {
    let mut world = World::new(1);
    let (cpu_milli, memory_bytes) = (Some(4000), Some(16 << 30));
    let node = NodeFacts { cpu_milli, memory_bytes, open: true, speed_percent: 200, ..NodeFacts::default() };
    world.put_node(&"n".into(), node);
    world.put_pod(pod);
    world
}

fn read_one(world: &World, agents: &Agents, facts: JobFacts) -> Option<LateWorkload> {
    let needing = [facts.uid.clone()].into();
    snapshot(world, agents, (&[Arc::new(facts)], &needing), now()).late.pop()
}

fn waiting_with(change: impl FnOnce(&mut Value)) -> Option<LateWorkload> {
    read_one(&world(pod(None, change)), &Agents::default(), facts(JobState::Moving))
}

#[test]
fn a_job_that_finds_no_node_is_late() {
    let late = waiting_with(|_| {}).unwrap();
    assert_eq!((late.uid.as_str(), late.is_visible, late.job.left_s), ("job", true, 3600.0));
    assert_eq!((late.job.pods[0].cores, late.job.left), (3.0, None));
    let gated = waiting_with(|pod| pod["spec"]["schedulingGates"] = json!([{"name": "gainshare.dev/place"}]));
    assert!(!gated.unwrap().is_visible);
    // The scheduler has not refused it yet.
    assert_eq!(waiting_with(|pod| pod["status"]["conditions"] = json!([])), None);
    let done = read_one(&world(pod(None, |_| {})), &Agents::default(), facts(JobState::Done));
    assert_eq!(done, None);
}

#[test]
fn a_waiting_pod_of_an_adopted_job_is_found_by_its_owner() {
    let of_job = |pod: &mut Value| {
        pod["metadata"]["labels"] = json!({});
        pod["metadata"]["ownerReferences"][0]["kind"] = json!("Job");
    };
    let adopted = JobFacts { kind: WorkloadKind::Job, pod_uid: None, ..facts(JobState::Moving) };
    let late = read_one(&world(pod(None, of_job)), &Agents::default(), adopted.clone()).unwrap();
    assert_eq!((late.key.kind, late.is_visible), (WorkloadKind::Job, true));
    let other = JobFacts { uid: "other".into(), ..adopted };
    assert_eq!(read_one(&world(pod(None, of_job)), &Agents::default(), other), None);
}

#[test]
fn deadlines_that_are_over_need_no_nodes() {
    let with = |deadline: &str| {
        let deadline = json!(deadline);
        waiting_with(|pod| pod["metadata"]["annotations"][DEADLINE_ANNOTATION] = deadline)
    };
    assert!(with("2100-01-01T00:00:00Z").is_some());
    // The pod was made ten minutes ago.
    assert_eq!(with("2h").unwrap().job.left_s, 6600.0);
    for text in ["10m", "2020-01-01T00:00:00Z", "soon"] {
        assert_eq!(with(text), None, "{text}");
    }
}

#[test]
fn pods_that_select_nodes_are_left_out() {
    let term = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]});
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}});
    assert_eq!(waiting_with(|pod| pod["spec"]["affinity"] = json!({"nodeAffinity": required})), None);
    assert_eq!(waiting_with(|pod| pod["spec"]["nodeSelector"] = json!({"gpu": "yes"})), None);
    let gpu = json!({"requests": {"cpu": "3", "nvidia.com/gpu": "1"}});
    assert_eq!(waiting_with(|pod| pod["spec"]["containers"][0]["resources"] = gpu), None);
    // The node that the operator chose is no wish of the author.
    let own = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]});
    let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [own]}});
    assert!(waiting_with(|pod| pod["spec"]["affinity"] = json!({"nodeAffinity": required})).is_some());
}

/// A report of the agent of node `n` about the pod.
fn report(deadline_state: Option<DeadlineState>, left: Option<wire::WorkLeft>) -> Agents {
    report_with(deadline_state, left, None)
}

fn report_with(
    deadline_state: Option<DeadlineState>,
    left: Option<wire::WorkLeft>,
    forecast: Option<Forecast>,
) -> Agents {
    let job = wire::JobReport {
        uid: "pod".into(),
        container: "main".to_owned(),
        signal: Some(wire::ReportedSignal { left, ..wire::ReportedSignal::default() }),
        forecast,
        deadline_state,
        ..wire::JobReport::default()
    };
    let sync = SyncRequest {
        node: "n".into(),
        epoch: 1,
        seq: 1,
        beat: NodeTotals { cores: 4.0, ..NodeTotals::default() },
        jobs: Some(vec![job]),
        ..SyncRequest::default()
    };
    let mut agents = Agents::default();
    agents.receive(&sync, Instant::now(), |_| true);
    agents
}

#[test]
fn a_running_job_is_late_if_a_miss_is_predicted_and_no_node_helps_it() {
    let world = world(pod(Some("n"), |_| {}));
    let runs = || facts(JobState::Running { node: "n".into(), epoch: 1, since: now() });
    let left = wire::WorkLeft { parallel_node_s: 1000.0, serial_s: 10.0, usable: 0.5, spread: 0.2 };
    let late = read_one(&world, &report(Some(DeadlineState::AtRisk), Some(left)), runs()).unwrap();
    // The node has four cores, twice as fast as ordinary ones.
    let expected = WorkLeft { work_core_s: 8000.0, serial_s: 20.0, usable_cores: 2.0, spread: 0.2 };
    assert_eq!((late.job.left, late.job.runs, late.is_visible), (Some(expected), true, false));
    assert_eq!(late.job.left_s, 3500.0, "a move takes 100 s");
    assert_eq!(read_one(&world, &report(Some(DeadlineState::OnTime), Some(left)), runs()), None);
    assert_eq!(read_one(&world, &report(None, Some(left)), runs()), None);
    assert_eq!(read_one(&world, &report(Some(DeadlineState::AtRisk), None), runs()), None);
    // It may not move, or another node has room for it.
    let at_risk = report(Some(DeadlineState::AtRisk), Some(left));
    assert_eq!(snapshot(&world, &at_risk, (&[Arc::new(runs())], &BTreeSet::new()), now()).late, []);
}

#[test]
fn a_job_that_is_predicted_to_make_its_deadline_without_a_promise_needs_no_node() {
    let world = world(pod(Some("n"), |_| {}));
    let left = wire::WorkLeft { parallel_node_s: 1000.0, serial_s: 10.0, usable: 0.5, spread: 0.2 };
    let with_end = |after_now_s: u64| {
        let done_ms = (NOW_S.unsigned_abs() + after_now_s) * 1000;
        let forecast = Forecast { done_ms, earliest_ms: done_ms, latest_ms: done_ms };
        let agents = report_with(Some(DeadlineState::AtRisk), Some(left), Some(forecast));
        read_one(&world, &agents, facts(JobState::Running { node: "n".into(), epoch: 1, since: now() }))
    };
    assert_eq!((with_end(3599).is_some(), with_end(3601).is_some()), (false, true));
}

#[test]
fn a_running_pod_that_selects_nodes_needs_none() {
    let world = world(pod(Some("n"), |pod| pod["spec"]["nodeSelector"] = json!({"gpu": "yes"})));
    let left = wire::WorkLeft { parallel_node_s: 1000.0, serial_s: 10.0, usable: 0.5, spread: 0.2 };
    let runs = facts(JobState::Running { node: "n".into(), epoch: 1, since: now() });
    assert_eq!(read_one(&world, &report(Some(DeadlineState::AtRisk), Some(left)), runs), None);
}
