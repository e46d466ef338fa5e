//! Two pods that share the node `left` under a policy of equal shares, so that their sizes do not depend on time.

use super::TestBed;
use serde_json::{Value, json};

/// The pods, and the CPU that their author requests.
pub(crate) const SHARED: [(&str, &str); 2] = [("small", "60m"), ("large", "180m")];

pub(crate) fn shared_pod(name: &str, cpu: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": {"role": "training"}},
        "spec": {"nodeSelector": {"kubernetes.io/hostname": "left"}, "containers": [{
            "name": "main", "image": "busybox:local", "imagePullPolicy": "Never",
            "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.5; done"],
            "resources": {"requests": {"cpu": cpu, "memory": "16Mi"}},
        }]},
    })
}

/// The policy `training`, which selects the pods.
pub(crate) fn equal_shares() -> Value {
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
        "metadata": {"name": "training", "namespace": "team"},
        "spec": {"selector": {"matchLabels": {"role": "training"}}, "policy": "na"},
    })
}

impl TestBed {
    /// Makes the pods, and waits until they run.
    pub(crate) fn make_shared_pods(&self) {
        for (name, cpu) in SHARED {
            self.apply(shared_pod(name, cpu));
        }
        for (name, _) in SHARED {
            self.kubectl(&["wait", "--for=condition=Ready", &format!("pod/{name}"), "-n", "team", "--timeout=120s"]);
        }
    }
}
