//! A TFJob with TensorFlow itself: the framework's own reader of `TF_CONFIG` trains with parameter servers on real
//! kubelets.
//!
//! The pods have no image of TensorFlow: the machine's `/usr` and the Python environment of the tests are volumes.
//! TensorFlow starts four times in this test, which takes a minute on two idle cores.

#[path = "../../../xtask/tests/common/mod.rs"]
mod common;

use common::training::Operator;
use common::{Bed, Scenarios, checkout, eventually, text};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
#[ignore = "needs root, a test bed and Python frameworks"]
fn tensorflow_trains_with_parameter_servers() {
    let venv = environment();
    let bed = Bed::with_training("tensortest", &["left=1", "right=1"]);
    bed.serve_tfjobs();
    bed.claim("usr", Path::new("/usr"));
    bed.claim("python", &venv);
    let script = fs::read_to_string(checkout().join("crates/operator/tests/tensorflow/train.py")).unwrap();
    bed.apply(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": "team"},
        "data": {"train.py": script},
    }));
    let operator = Operator::with(&bed, None, &["--tfjobs"]);
    let mut scenarios = Scenarios::default();
    scenarios.run("a TFJob trains to its end, and its logs stay", || trains(&bed, &venv));
    drop(operator);
    scenarios.finish();
}

/// The Python environment with TensorFlow. It is read-only in the pods, so TensorFlow is imported once here: Python
/// keeps what it has compiled, and the four tasks need not compile some thousand files each.
fn environment() -> PathBuf {
    let output = Command::new(checkout().join("crates/progress/tests/frameworks/make-venv")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let venv = PathBuf::from(text(&output.stdout).trim());
    let mut import = Command::new(venv.join("bin/python"));
    import.args(["-c", "import tensorflow; tensorflow.keras.Sequential"]).env("TF_USE_LEGACY_KERAS", "1");
    let output = import.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    venv
}

/// The template of every role, as users of Kubeflow have it.
fn template(venv: &Path) -> Value {
    let mounts = json!([
        {"name": "usr", "mountPath": "/usr", "readOnly": true},
        {"name": "usr", "mountPath": "/lib", "subPath": "lib", "readOnly": true},
        {"name": "usr", "mountPath": "/lib64", "subPath": "lib64", "readOnly": true},
        {"name": "python", "mountPath": venv, "readOnly": true},
        {"name": "code", "mountPath": "/code"},
    ]);
    json!({"spec": {
        "containers": [{
            "name": "tensorflow", "image": "busybox:local", "imagePullPolicy": "Never",
            "command": [venv.join("bin/python"), "/code/train.py", "--epochs", "4", "--steps", "50"],
            "env": [{"name": "TF_CPP_MIN_LOG_LEVEL", "value": "2"}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
            "volumeMounts": mounts,
        }],
        "volumes": [
            {"name": "usr", "persistentVolumeClaim": {"claimName": "usr"}},
            {"name": "python", "persistentVolumeClaim": {"claimName": "python"}},
            {"name": "code", "configMap": {"name": "code"}},
        ],
    }})
}

fn trains(bed: &Bed, venv: &Path) {
    bed.apply(json!({
        "apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": "points", "namespace": "team"},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running"},
            "tfReplicaSpecs": {
                "Chief": {"replicas": 1, "restartPolicy": "Never", "template": template(venv)},
                "PS": {"replicas": 1, "restartPolicy": "Never", "template": template(venv)},
                "Worker": {"replicas": 2, "restartPolicy": "ExitCode", "template": template(venv)},
            },
        },
    }));
    let ended = || {
        let job = bed.find("tfjob", "points")?;
        let conditions = job["status"]["conditions"].as_array()?.clone();
        let is_end = |c: &Value| c["status"] == "True" && (c["type"] == "Succeeded" || c["type"] == "Failed");
        conditions.into_iter().find(is_end)
    };
    // Each step of the wait is a minute.
    let Some(end) = (0..4).find_map(|_| common::within_a_minute(ended)) else {
        let pods = bed.kubectl(&["get", "pods", "-n", "team", "-o", "wide"]);
        let logs = bed.kubectl(&["logs", "-n", "team", "-l", "gainshare.dev/job=points", "--prefix", "--tail=20"]);
        panic!("the job does not end:\n{pods}\n{logs}");
    };
    let log = bed.kubectl(&["logs", "points-chief-0", "-n", "team"]);
    assert_eq!(end["type"], "Succeeded", "{end:#}\n{log}");
    assert!(log.contains("Epoch 4/4") && log.contains("the loss fell"), "{log}");

    // Servers and workers of TensorFlow never end by themselves.
    for (name, role) in [("points-ps-0", "ps 0 of"), ("points-worker-1", "worker 1 of")] {
        eventually("a task that served has ended", || {
            let pod = bed.find("pod", name)?;
            matches!(pod["status"]["phase"].as_str(), Some("Failed" | "Succeeded")).then_some(())
        });
        let log = bed.kubectl(&["logs", name, "-n", "team"]);
        assert!(log.contains(role) && log.contains("points-chief-0.team.svc"), "{log}");
    }
    let shown = bed.kubectl(&["get", "tfjob", "points", "-n", "team"]);
    assert!(shown.contains("STATE") && shown.contains("AGE") && shown.contains("Succeeded"), "{shown}");
}
