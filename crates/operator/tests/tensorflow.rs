//! A TFJob with TensorFlow itself: the framework's own reader of `TF_CONFIG` trains with parameter servers on real
//! kubelets.
//!
//! The pods have no image of TensorFlow: the machine's `/usr` and the Python environment of the tests are volumes.
//! TensorFlow starts ten times in this test, which takes some minutes on two idle cores.

use crate::common::training::Operator;
use crate::common::{self, Scenarios, TestBed, checkout, eventually, text};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A job ends within this number of minutes, or it hangs.
const PATIENCE_MIN: usize = 4;

#[test]
#[ignore = "needs root, a test bed and Python frameworks"]
fn tensorflow_trains_with_parameter_servers() {
    let venv = environment();
    let bed = TestBed::with_training("tensortest", &["left=1", "right=1"]);
    bed.serve_tfjobs();
    bed.claim("usr", Path::new("/usr"));
    bed.claim("python", &venv);
    let folder = checkout().join("crates/operator/tests/tensorflow");
    let script = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    bed.apply(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": "team"},
        "data": {"train.py": script("train.py"), "dynamic.py": script("dynamic.py")},
    }));
    let operator = Operator::with(&bed, None, &["--tfjobs"]);
    let mut scenarios = Scenarios::default();
    scenarios.run("a chief trains with servers and workers, and the logs stay", || chief_trains(&bed, &venv));
    scenarios.run("dynamic workers train, and a failed one is ignored", || a_failed_worker_is_ignored(&bed, &venv));
    scenarios.run("all workers decide, and all pods go", || all_workers_decide(&bed, &venv));
    drop(operator);
    scenarios.finish();
}

/// The Python environment with TensorFlow. It is read-only in the pods, so TensorFlow is imported once here: Python
/// keeps what it has compiled, and the tasks need not compile some thousand files each.
fn environment() -> PathBuf {
    let output = Command::new(checkout().join("crates/progress/tests/frameworks/make-venv")).output().unwrap();
    assert!(output.status.success(), "the Python environment cannot be made:\n{}", text(&output.stderr));
    let venv = PathBuf::from(text(&output.stdout).trim());
    let mut import = Command::new(venv.join("bin/python"));
    import.args(["-c", "import tensorflow; tensorflow.keras.Sequential"]);
    import.env("TF_USE_LEGACY_KERAS", "1").env_remove("PYTHONDONTWRITEBYTECODE");
    let output = import.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    venv
}

/// The template of a role, as users of Kubeflow have it.
fn template(venv: &Path, arguments: &[&str]) -> Value {
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
            "command": [venv.join("bin/python")], "args": arguments,
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

/// Waits until the job has succeeded.
fn succeeds(bed: &TestBed, name: &str) {
    let ended = || {
        let job = bed.find("tfjob", name)?;
        let conditions = job["status"]["conditions"].as_array()?.clone();
        let is_end = |c: &Value| c["status"] == "True" && (c["type"] == "Succeeded" || c["type"] == "Failed");
        conditions.into_iter().find(is_end)
    };
    let end = (0..PATIENCE_MIN).find_map(|_| common::within_a_minute(ended));
    if end.as_ref().is_none_or(|end| end["type"] != "Succeeded") {
        let pods = bed.kubectl(&["get", "pods", "-n", "team", "-o", "wide"]);
        let selector = format!("gainshare.dev/job={name}");
        let logs = bed.kubectl(&["logs", "-n", "team", "-l", &selector, "--prefix", "--tail=20"]);
        panic!("{name} has not succeeded in {PATIENCE_MIN} min: {end:?}\n{pods}\n{logs}");
    }
    let shown = bed.kubectl(&["get", "tfjob", name, "-n", "team"]);
    assert!(shown.contains("STATE") && shown.contains("AGE") && shown.contains("Succeeded"), "{shown}");
}

/// Waits until a task that never ends by itself was stopped, and returns its log.
fn log_of_stopped(bed: &TestBed, pod: &str) -> String {
    eventually("the end of a task that served", || {
        let found = bed.find("pod", pod)?;
        matches!(found["status"]["phase"].as_str(), Some("Failed" | "Succeeded")).then_some(())
    });
    bed.kubectl(&["logs", pod, "-n", "team"])
}

/// TensorFlow's `ParameterServerStrategy`: the chief sends functions to the workers, and the server has the variables.
fn chief_trains(bed: &TestBed, venv: &Path) {
    let template = template(venv, &["/code/train.py", "--epochs", "4", "--steps", "50"]);
    bed.apply(json!({
        "apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": "points", "namespace": "team"},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running"},
            "tfReplicaSpecs": {
                "Chief": {"replicas": 1, "restartPolicy": "Never", "template": template},
                "PS": {"replicas": 1, "restartPolicy": "Never", "template": template},
                "Worker": {"replicas": 2, "restartPolicy": "ExitCode", "template": template},
            },
        },
    }));
    succeeds(bed, "points");
    let log = bed.kubectl(&["logs", "points-chief-0", "-n", "team"]);
    assert!(log.contains("Epoch 4/4") && log.contains("the loss fell"), "{log}");
    for (pod, task) in [("points-ps-0", "ps 0 of"), ("points-worker-1", "worker 1 of")] {
        let log = log_of_stopped(bed, pod);
        assert!(log.contains(task) && log.contains("points-chief-0.team.svc"), "{log}");
    }
}

/// A job whose tasks read the sparse `TF_CONFIG`.
fn dynamic_job(name: &str, template: &Value, workers: u32, more: &Value) -> Value {
    let mut spec = json!({
        "enableDynamicWorker": true,
        "tfReplicaSpecs": {
            "ps": {"template": template},
            "WORKER": {"replicas": workers, "template": template},
        },
    });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({
        "apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": name, "namespace": "team"}, "spec": spec,
    })
}

/// Worker 1 fails at once. Its policy is `Never`, which would fail any other job.
fn a_failed_worker_is_ignored(bed: &TestBed, venv: &Path) {
    let template = template(venv, &["/code/dynamic.py", "--fails", "1"]);
    bed.apply(dynamic_job("dynamic", &template, 2, &json!({})));
    succeeds(bed, "dynamic");
    let log = bed.kubectl(&["logs", "dynamic-worker-0", "-n", "team"]);
    assert!(log.contains("step 200/200") && log.contains("the line is"), "{log}");
    let counts = bed.get("tfjob", "dynamic")["status"]["replicaStatuses"]["Worker"].clone();
    assert_eq!((&counts["succeeded"], &counts["failed"]), (&json!(1), &json!(1)), "{counts}");
    assert!(log_of_stopped(bed, "dynamic-ps-0").contains("ps 0 of"), "the log of the server can still be read");
}

fn all_workers_decide(bed: &TestBed, venv: &Path) {
    let template = template(venv, &["/code/dynamic.py"]);
    let policies = json!({"successPolicy": "AllWorkers", "runPolicy": {"cleanPodPolicy": "All"}});
    bed.apply(dynamic_job("all", &template, 2, &policies));
    succeeds(bed, "all");
    let counts = bed.get("tfjob", "all")["status"]["replicaStatuses"]["Worker"].clone();
    assert_eq!((&counts["succeeded"], &counts["failed"]), (&json!(2), &json!(0)), "{counts}");
    eventually("the end of all pods", || bed.find("pod", "all-worker-0").is_none().then_some(()));
    eventually("the end of all pods", || bed.find("pod", "all-ps-0").is_none().then_some(()));
}
