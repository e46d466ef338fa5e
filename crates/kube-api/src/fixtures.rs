//! Objects for tests, as the API server prints them. Compiled for tests only, and with the feature
//! `fixtures`.

use crate::facts::PodFacts;
use serde_json::{Value, json};

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
