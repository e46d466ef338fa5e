//! Objects for tests, as the API server prints them. Compiled for tests only, and with the feature
//! `fixtures`.

use crate::facts::PodFacts;
use crate::resources::{Bounds, Resources};
use crate::run_policy::JobPolicy;
use crate::wire::{CollectorKind, Mode, PodOnNode, PolicyKind, QosClass, ResizeState, Settings};
use gainshare_core::policies::Preset;
use serde_json::{Value, json};

/// The policy of a SharePolicy.
///
/// # Panics
/// If no SharePolicy takes it.
pub fn share_policy(preset: Preset) -> PolicyKind {
    PolicyKind::try_from(preset).expect("a SharePolicy takes it")
}

/// The policy of a TrainingJob.
///
/// # Panics
/// If no TrainingJob takes it.
pub fn job_policy(preset: Preset) -> JobPolicy {
    JobPolicy::try_from(preset).expect("a TrainingJob takes it")
}

/// A running pod of one container, selected by nothing yet.
pub fn manifest() -> Value {
    json!({
        "metadata": {
            "uid": "u-1", "namespace": "team", "name": "train-0", "resourceVersion": "77", "generation": 4,
            "labels": {"app": "train"},
            "annotations": {"gainshare.dev/metric": "val_loss", "other.example/note": "x"},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "j", "controller": true}],
        },
        "spec": {
            "nodeName": "node-a",
            "containers": [{
                "name": "main",
                "resources": {
                    "requests": {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": "1"},
                    "limits": {"memory": "2Gi", "nvidia.com/gpu": "1"},
                },
            }],
        },
        "status": {
            "phase": "Running", "qosClass": "Burstable",
            "containerStatuses": [{
                "name": "main", "ready": true, "restartCount": 0, "image": "i", "imageID": "i",
                "state": {"running": {"startedAt": "2026-11-15T12:00:00Z"}},
            }],
        },
    })
}

/// The facts of such a pod.
pub fn facts(manifest: &Value) -> PodFacts {
    PodFacts::of(&serde_json::from_value(manifest.clone()).expect("a pod")).expect("facts")
}

/// A pod with these resources, as the operator describes it to its node agent: selected by the FlowCon policy `p`
/// with all defaults, never resized.
pub fn pod_on_node(name: &str, resources: Resources) -> PodOnNode {
    PodOnNode {
        uid: format!("uid-{name}").into(),
        namespace: "team".to_owned(),
        name: name.to_owned(),
        policy: "p".to_owned(),
        container: "main".to_owned(),
        owner: format!("Pod/{name}"),
        started_ms: None,
        settings: Settings {
            policy: share_policy(Preset::Flowcon),
            aim: None,
            alpha: None,
            beta: None,
            interval_ms: None,
            mode: Mode::Weight,
            memory: false,
            floor: 0.0,
            metric: None,
            maximize: None,
            target: None,
            collector: CollectorKind::Stdout,
            pattern: None,
            path: None,
        },
        original: resources,
        now: resources,
        class: QosClass::Burstable,
        blocked: None,
        allowed: Bounds::default(),
        noted: 0,
        follow: false,
        traffic: false,
        gpu: false,
        resize: ResizeState::Settled,
        deadline: None,
        command: Vec::new(),
        deadline_error: None,
        room_milli: 0,
        earlier_steps: Vec::new(),
    }
}
