//! Distributed jobs on real kubelets: tasks that start together, find each other, die and are replaced; and TFJob
//! manifests as Kubeflow's users have them.
//!
//! The tasks are shell scripts. Servers never end by themselves, as real ones. The operator is the real program with
//! the rights that the chart gives it.

#[path = "../../../xtask/tests/common/mod.rs"]
mod common;

use common::training::Operator;
use common::{Scenarios, TestBed, eventually, text};
use serde_json::{Value, json};
use std::fs;

/// Never ends by itself.
const SERVER: &str = r#"echo "serves as $HOSTNAME"; trap 'exit 143' TERM; while :; do sleep 0.2; done"#;

/// Saves what it learned about the other tasks, and ends.
const WORKER: &str = r#"echo "$TF_CONFIG" > "/keep/config-$HOSTNAME"; sleep 2"#;

#[test]
#[ignore = "needs root and a test bed"]
fn distributed_jobs_in_a_real_cluster() {
    let bed = TestBed::with_training("tasktest", &["left", "right"]);
    bed.serve_tfjobs();
    let operator = Operator::with(&bed, None, &["--tfjobs"]);
    let mut scenarios = Scenarios::default();
    scenarios.run("mistakes are answered with help", || mistakes(&bed));
    scenarios.run("a job runs to completion and its servers' logs stay", || completes(&bed));
    scenarios.run("a TFJob runs as it is", || tfjob(&bed));
    scenarios.run("a worker that dies is replaced alone", || worker_dies(&bed));
    scenarios.run("a server that dies restarts the job", || server_dies(&bed));
    scenarios.run("no pod exists while a job is suspended", || suspends(&bed));
    scenarios.run("jobs that do not fit together all finish", || gangs(&bed));
    if std::thread::panicking() {
        eprintln!("{}", fs::read_to_string(bed.folder.path().join("operator.log")).unwrap_or_default());
    }
    drop(operator);
    scenarios.finish();
}

fn template(name: &str, script: &str, milli: u32) -> Value {
    json!({"spec": {"containers": [{
        "name": "tensorflow", "image": "busybox:local", "imagePullPolicy": "Never", "command": ["sh", "-c", script],
        "env": [{"name": "TASK_OF", "value": name}],
        "resources": {"requests": {"cpu": format!("{milli}m"), "memory": "8Mi"}},
    }]}})
}

/// A job of one server and two workers.
fn job(name: &str, worker: &str, milli: u32) -> Value {
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {
            "policy": "na", "checkpoint": {"claimName": "shared", "path": "/keep"},
            "runPolicy": {"terminationGracePeriodSeconds": 2},
            "replicaSpecs": {
                "PS": {"template": template(name, SERVER, milli)},
                "Worker": {"replicas": 2, "template": template(name, worker, milli)},
            },
        },
    })
}

fn mistakes(bed: &TestBed) {
    let mut both = job("both", WORKER, 50);
    both["spec"]["template"] = template("both", WORKER, 50);
    let refused = bed.output("kubectl", &["apply", "-f", "-"], &both.to_string());
    assert!(text(&refused.stderr).contains("exactly one of"), "{}", text(&refused.stderr));
    let mut wrong = job("wrong", WORKER, 50);
    wrong["spec"]["replicaSpecs"]["Worker"]["minReplicas"] = json!(3);
    wrong["spec"]["replicaSpecs"]["Worker"]["maxReplicas"] = json!(2);
    bed.apply(&wrong);
    let failed = bed.until("wrong", "Failed", None);
    assert!(failed["status"]["message"].as_str().unwrap().contains("exchange them"), "{failed:#}");
    let large = job("large", WORKER, 5000);
    bed.apply(&large);
    eventually("a report about the job that never fits", || {
        bed.job("large")["status"]["message"].as_str()?.contains("could ever hold").then_some(())
    });
    bed.kubectl(&["delete", "trainingjob", "large", "wrong", "-n", "team", "--timeout=60s"]);
}

fn completes(bed: &TestBed) {
    bed.apply(job("short", WORKER, 50));
    let done = bed.until("short", "Succeeded", None);
    let config = fs::read_to_string(bed.kept("short").join("config-short-worker-1")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["task"], json!({"type": "worker", "index": 1}));
    assert_eq!(config["cluster"]["ps"], json!(["short-ps-0.team.svc:2222"]));
    assert_eq!(done["status"]["tasks"]["epoch"], 1, "{done:#}");
    let server = eventually("the end of the server", || {
        let pod = bed.get("pod", "short-ps-0");
        (pod["status"]["phase"] == "Failed").then_some(pod)
    });
    assert_eq!(server["status"]["reason"], "DeadlineExceeded", "{server:#}");
    assert!(bed.kubectl(&["logs", "short-ps-0", "-n", "team"]).contains("serves as short-ps-0"));
    eventually("the end of the Services", || bed.find("service", "short-ps-0").is_none().then_some(()));
}

fn tfjob(bed: &TestBed) {
    bed.apply(json!({
        "apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": "mnist", "namespace": "team"},
        "spec": {"tfReplicaSpecs": {
            "Chief": {"replicas": 1, "restartPolicy": "ExitCode", "template": template("mnist", "sleep 3", 50)},
            "ps": {"replicas": 1, "restartPolicy": "Never", "template": template("mnist", SERVER, 50)},
            "Worker": {"replicas": 1, "restartPolicy": "ExitCode", "template": template("mnist", SERVER, 50)},
        }},
    }));
    bed.kubectl(&["wait", "--for=condition=Running", "tfjob/mnist", "-n", "team", "--timeout=60s"]);
    let labels = &bed.get("pod", "mnist-chief-0")["metadata"]["labels"];
    assert_eq!(labels["training.kubeflow.org/job-role"], "master", "{labels:#}");
    bed.kubectl(&["wait", "--for=condition=Succeeded", "tfjob/mnist", "-n", "team", "--timeout=60s"]);
    let shown = bed.kubectl(&["get", "tfjob", "mnist", "-n", "team"]);
    assert!(shown.contains("STATE") && shown.contains("AGE") && shown.contains("Succeeded"), "{shown}");
    let statuses = &bed.get("tfjob", "mnist")["status"]["replicaStatuses"];
    assert_eq!(statuses["Chief"]["succeeded"], 1, "{statuses:#}");
}

/// Kills the processes of a task on whatever node it runs.
fn kill(bed: &TestBed, pod: &str, words: &str) {
    let node = bed.get("pod", pod)["spec"]["nodeName"].as_str().unwrap().to_owned();
    assert!(bed.kill_processes(&node, words) > 0, "{pod} has no process on {node}");
}

fn worker_dies(bed: &TestBed) {
    bed.apply(job("hardy", "while :; do sleep 0.3; done # hardy", 50));
    bed.until("hardy", "Running", None);
    let before = [bed.get("pod", "hardy-ps-0"), bed.get("pod", "hardy-worker-0")];
    bed.kubectl(&["delete", "pod", "hardy-worker-0", "-n", "team", "--wait=false"]);
    eventually("a new worker", || {
        let pod = bed.find("pod", "hardy-worker-0")?;
        let is_new = pod["metadata"]["uid"] != before[1]["metadata"]["uid"];
        (is_new && pod["status"]["phase"] == "Running").then_some(())
    });
    assert_eq!(bed.get("pod", "hardy-ps-0")["metadata"]["uid"], before[0]["metadata"]["uid"]);
    let job = bed.until("hardy", "Running", None);
    assert_eq!((&job["status"]["tasks"]["epoch"], &job["status"]["failures"]), (&json!(1), &json!(0)));
}

fn server_dies(bed: &TestBed) {
    kill(bed, "hardy-ps-0", "serves as");
    eventually("the second attempt", || {
        let job = bed.job("hardy");
        let again = job["status"]["tasks"]["epoch"] == 2 && job["status"]["state"] == "Running";
        again.then_some(())
    });
    assert_eq!(bed.job("hardy")["status"]["failures"], 1);
}

fn suspends(bed: &TestBed) {
    bed.kubectl(&["patch", "trainingjob", "hardy", "-n", "team", "--type=merge", "-p", r#"{"spec":{"suspend":true}}"#]);
    bed.until("hardy", "Suspended", None);
    assert!(bed.find("pod", "hardy-ps-0").is_none() && bed.find("pod", "hardy-worker-1").is_none());
    bed.kubectl(&["delete", "trainingjob", "hardy", "-n", "team", "--timeout=60s"]);
}

fn gangs(bed: &TestBed) {
    let names: Vec<String> = (0..6).map(|number| format!("gang-{number}")).collect();
    // Two nodes of 0.6 cores hold two such jobs.
    names.iter().for_each(|name| bed.apply(job(name, WORKER, 150)));
    for name in &names {
        let done = bed.until(name, "Succeeded", None);
        assert_eq!(done["status"]["tasks"]["epoch"], 1, "no gang was taken back: {done:#}");
    }
}
