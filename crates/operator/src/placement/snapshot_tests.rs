//! What a decision about moves for deadlines reads of a pod and of its node agent's report.

use super::*;
use crate::state::workload::WorkloadKind;
use gainshare_core::policy::Preset;
use gainshare_core::view::{Ends, Marks, WorkLeft};
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::deadline::DeadlineState;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::fixtures::job_policy;
use gainshare_kube_api::names::POLICY_ANNOTATION;
use gainshare_kube_api::names::{DEADLINE_ANNOTATION, DEADLINE_TOLERANCE_ANNOTATION, EPOCH_LABEL, JOB_LABEL};
use gainshare_kube_api::select::PolicyFacts;
use gainshare_kube_api::wire::{self, NodeTotals, SyncRequest};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

/// A pod of a TrainingJob that runs on `n`, a node of four cores of speed 2; it is due at the second 2,000,000,000.
fn world() -> World {
    let pod = json!({
        "metadata": {
            "name": "run-1", "namespace": "team", "uid": "pod", "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {JOB_LABEL: "run", EPOCH_LABEL: "1"},
            "annotations": {
                DEADLINE_ANNOTATION: "2033-05-18T03:33:20Z", DEADLINE_TOLERANCE_ANNOTATION: "5m", POLICY_ANNOTATION: "gainshare",
            },
            "ownerReferences": [{
                "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "name": "run", "uid": "job", "controller": true,
            }],
        },
        "spec": {"nodeName": "n", "containers": [{"name": "main", "image": "i", "resources": {"requests": {"cpu": "3"}}}]},
        "status": {"phase": "Running", "containerStatuses": [{
            "name": "main", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }]},
    });
    let mut world = World::new(1);
    let (cpu_milli, memory_bytes) = (Some(4000), Some(16 << 30));
    let node = NodeFacts { cpu_milli, memory_bytes, open: true, speed_percent: 200, ..NodeFacts::default() };
    world.put_node(&"n".into(), node);
    world.put_pod(PodFacts::of(&serde_json::from_value::<Pod>(pod).unwrap()).unwrap());
    world
}

fn agents(standing: DeadlineState, left: Option<wire::WorkLeft>) -> Agents {
    let job = wire::JobReport {
        uid: "pod".into(),
        container: "main".to_owned(),
        signal: Some(wire::ReportedSignal { left, ..wire::ReportedSignal::default() }),
        deadline_state: Some(standing),
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

fn facts(policy: Preset) -> JobFacts {
    let since = jiff::Timestamp::UNIX_EPOCH;
    JobFacts {
        uid: "job".into(),
        kind: WorkloadKind::TrainingJob,
        namespace: "team".to_owned(),
        name: "run".to_owned(),
        owner: "team".to_owned(),
        arrived: since,
        policy: job_policy(policy),
        state: JobState::Running { node: "n".into(), epoch: 1, since },
        movable: Ok(()),
        pod_uid: Some("pod".into()),
        cpu_request_milli: 3000,
        memory_request_bytes: 1 << 30,
        tried: vec![],
        move_cost_s: None,
        marks: Marks::default(),
    }
}

#[test]
fn what_moves_for_deadlines_is_read_under_policies_that_make_them() {
    let clock = Clock { origin: Instant::now(), unix_us: 1_900_000_000_000_000 };
    let left = wire::WorkLeft { parallel_node_s: 1000.0, serial_s: 10.0, usable: 0.5, spread: 0.2 };
    let read = |policy, standing, left| {
        let read = report(&world(), &agents(standing, left), &facts(policy), &clock).unwrap();
        (read.deadline, read.finish)
    };
    let due = Deadline { at: Time::from_secs_f64(2e9), tolerance: Span::from_secs(300) };
    let work = WorkLeft { work_core_s: 8000.0, serial_s: 20.0, usable_cores: 2.0, spread: 0.2 };
    for (standing, ends) in [
        (DeadlineState::AtRisk, Ends::Late),
        (DeadlineState::OnTime, Ends::InTime),
        (DeadlineState::Unknown, Ends::Open),
        (DeadlineState::Missed, Ends::Open),
    ] {
        let finish = FinishView { ends, left: work };
        assert_eq!(read(Preset::Gainshare, standing, Some(left)), (Some(due), Some(finish)), "{standing:?}");
    }
    assert_eq!(read(Preset::Gainshare, DeadlineState::AtRisk, None), (Some(due), None), "nothing is known of its end");
    assert_eq!(read(Preset::Specon, DeadlineState::AtRisk, Some(left)), (None, None));
}

#[test]
fn the_floor_of_a_pods_policy_is_read_under_policies_that_move_for_deadlines() {
    let clock = Clock { origin: Instant::now(), unix_us: 1_900_000_000_000_000 };
    let object = json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy", "metadata": {"namespace": "team", "name": "kept"},
        "spec": {"selector": {}, "policy": "qos", "floorPercent": 20},
    });
    let policy = PolicyFacts::of(&serde_json::from_value(object).unwrap()).unwrap();
    let mut selected = world();
    selected.put_policy(policy);
    let floor = |world: &World, preset| {
        let read = report(world, &agents(DeadlineState::OnTime, None), &facts(preset), &clock).unwrap();
        read.floor
    };
    assert_eq!(floor(&selected, Preset::Gainshare), Some(0.2));
    assert_eq!(floor(&world(), Preset::Gainshare), Some(0.0));
    assert_eq!(floor(&selected, Preset::Specon), None);
}
