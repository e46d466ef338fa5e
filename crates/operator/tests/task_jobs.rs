//! Distributed jobs on real kubelets: tasks that start together, find each other, die and are replaced; and TFJob
//! manifests as Kubeflow's users have them.
//!
//! The operator also ends before and after each of its writes about such a job, of either kind, one operator after the
//! other: the gang runs whole or not at all, no task runs twice, and the job completes, starts again after the loss of
//! its server, or goes, as it would without that.
//!
//! A watcher reads from the kernel which tasks live: never two pods of one task.
//!
//! The tasks are shell scripts. Servers never end by themselves, as real ones. The operator is the real program with
//! the rights that the chart gives it.

use crate::common::training::Operator;
use crate::common::{FaultTally, Scenarios, TestBed, eventually, text, within_a_minute};
use crate::invariants::Watch;
use gainshare_kube_api::names::JOB_LABEL;
use serde_json::{Value, json};
use std::fs;
use std::time::Instant;

/// Never ends by itself.
const SERVER: &str = r#"echo "serves as $HOSTNAME"; trap 'exit 143' TERM; while :; do sleep 0.2; done"#;

/// Saves what it learned about the other tasks, and ends.
const WORKER: &str = r#"echo "$TF_CONFIG" > "/keep/config-$HOSTNAME"; sleep 2"#;

/// Names itself at each start, and never ends by itself.
const COUNTED_SERVER: &str = r#"
echo "$HOSTNAME" >> /keep/starts; touch /keep/server
trap 'exit 143' TERM; while :; do sleep 0.2; done
"#;

/// Words in the command line of a counted server, and of no other task.
const SERVER_MARK: &str = "serves the pair";

/// Names itself at each start, waits for the server, and ends.
const COUNTED_WORKER: &str = r#"
echo "$HOSTNAME" >> /keep/starts; i=0
while [ ! -e /keep/server ]; do i=$((i+1)); [ $i -gt 600 ] && exit 1; sleep 0.2; done
sleep 20
"#;

/// The writes about a job of tasks until it has completed and nothing of it is left to clean, in their order.
const COMPLETION: &[&str] = &[
    "before-hold",
    "after-hold",
    "before-planned",
    "after-planned",
    "before-create",
    "before-service",
    "after-service",
    "after-create",
    "before-placed",
    "after-placed",
    "before-open",
    "after-open",
    "before-running",
    "after-running",
    "before-stopped",
    "after-stopped",
    "before-end",
    "after-end",
    "before-let-go",
    "after-let-go",
    "before-delete-services",
    "before-delete-service",
    "after-delete-service",
    "after-delete-services",
    "before-noted",
    "after-noted",
];

/// The writes about a job of tasks whose server was lost, until its tasks are made again.
const RESTART: &[&str] = &[
    "before-stopping",
    "after-stopping",
    "before-delete",
    "after-delete",
    "before-let-go",
    "after-let-go",
    "before-planned",
    "after-planned",
];

/// The writes about a job of tasks that is deleted while it runs.
const DELETION: &[&str] =
    &["before-delete", "after-delete", "before-let-go", "after-let-go", "before-release", "after-release"];

/// The writes about a job of tasks whose time to live is over.
const EXPIRY: &[&str] = &["before-delete-job", "after-delete-job", "before-release", "after-release"];

/// A kind of job of tasks.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    TrainingJob,
    TfJob,
}

impl Kind {
    /// As kubectl has it.
    fn name(self) -> &'static str {
        match self {
            Kind::TrainingJob => "trainingjob",
            Kind::TfJob => "tfjob",
        }
    }
}

/// What happens to a job while operators end.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Completes,
    Restarts,
    IsDeleted,
    Expires,
}

#[test]
#[ignore = "needs root and a test bed"]
fn distributed_jobs_in_a_real_cluster() {
    let bed = TestBed::with_training("tasktest", &["left", "right"]);
    bed.serve_tfjobs();
    let watch = Watch::begin(&bed);
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
    let mut tally = FaultTally::of("operator-killed");
    for kind in [Kind::TrainingJob, Kind::TfJob] {
        for (fate, points) in [
            (Fate::Completes, COMPLETION),
            (Fate::Restarts, RESTART),
            (Fate::IsDeleted, DELETION),
            (Fate::Expires, EXPIRY),
        ] {
            scenarios.run_counted(&format!("operators end at each write: {kind:?} {fate:?}"), &mut tally, |tally| {
                dies_at_each(&bed, (kind, fate), points, tally);
            });
        }
    }
    // The jobs are deleted on the way, so no job is on record at the end.
    let watched = watch.end(&bed, &[]);
    scenarios.run_counted("no task lived twice at any time", &mut tally, |tally| {
        watched.report(tally);
        assert!(watched.pods.len() > 10, "only these tasks were watched: {:?}", watched.pods);
    });
    tally.print();
    scenarios.finish();
}

/// A job of one server and one worker, which count their starts.
fn pair(kind: Kind, name: &str, worker: &str, run_policy: &Value) -> Value {
    let role = |script: &str| {
        let mut role = json!({"replicas": 1, "restartPolicy": "ExitCode", "template": template(name, script, 50)});
        let pod = &mut role["template"]["spec"];
        // A TFJob has no claim of its own for checkpoints.
        pod["volumes"] = json!([{"name": "starts", "persistentVolumeClaim": {"claimName": "shared"}}]);
        pod["containers"][0]["volumeMounts"] = json!([{"name": "starts", "mountPath": "/keep", "subPath": name}]);
        role
    };
    let roles = json!({"PS": role(&format!("{COUNTED_SERVER}# {SERVER_MARK}")), "Worker": role(worker)});
    let (version, spec) = match kind {
        Kind::TrainingJob => {
            ("gainshare.dev/v1alpha1", json!({"policy": "na", "runPolicy": run_policy, "replicaSpecs": roles}))
        }
        Kind::TfJob => ("kubeflow.org/v1", json!({"runPolicy": run_policy, "tfReplicaSpecs": roles})),
    };
    let kind = if kind == Kind::TfJob { "TFJob" } else { "TrainingJob" };
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "team"}, "spec": spec})
}

fn pods_of(bed: &TestBed, name: &str) -> Vec<Value> {
    let label = format!("{JOB_LABEL}={name}");
    let pods: Value =
        serde_json::from_str(&bed.kubectl(&["get", "pods", "-n", "team", "-l", &label, "-o", "json"])).unwrap();
    pods["items"].as_array().cloned().unwrap_or_default()
}

fn services_of(bed: &TestBed, name: &str) -> usize {
    let label = format!("{JOB_LABEL}={name}");
    bed.kubectl(&["get", "services", "-n", "team", "-l", &label, "-o", "name"]).lines().count()
}

/// The operator's journal on a job.
fn journal(bed: &TestBed, kind: Kind, name: &str) -> Value {
    bed.find(kind.name(), name).unwrap_or_default()["status"]["tasks"].clone()
}

/// Waits until the journal of a job is in a state of an attempt.
fn until_journal(bed: &TestBed, kind: Kind, name: &str, state: &str, epoch: u32) {
    let mut last = Value::Null;
    let found = within_a_minute(|| {
        last = journal(bed, kind, name);
        (last["state"] == state && last["epoch"] == epoch).then_some(())
    });
    assert!(found.is_some(), "{name} is not {state} in attempt {epoch}: {last:#}\n{}", bed.operator_log());
}

/// No gate is open unless every task of the gang has a node: written down, so that the next operator knows it.
fn check_gang(bed: &TestBed, kind: Kind, name: &str, point: &str, tally: &mut FaultTally) {
    // The pods are read first: a gate that is open now was opened after the nodes were written.
    let is_open = |pod: &&Value| pod["spec"]["schedulingGates"].as_array().is_none_or(Vec::is_empty);
    let open = pods_of(bed, name).iter().filter(is_open).count();
    let journal = journal(bed, kind, name);
    let is_whole = journal["admitted"] == true && journal["nodes"].as_object().is_some_and(|nodes| nodes.len() == 2);
    tally.demand(open == 0 || is_whole, || format!("{point}: {open} tasks are open without the gang: {journal:#}"));
}

/// Each task was started this often.
fn check_starts(bed: &TestBed, name: &str, count: usize, tally: &mut FaultTally) {
    let starts = fs::read_to_string(bed.kept(name).join("starts")).unwrap_or_default();
    let mut started: Vec<&str> = starts.lines().collect();
    started.sort_unstable();
    let tasks = [format!("{name}-ps-0"), format!("{name}-worker-0")];
    let expected: Vec<&str> = tasks.iter().flat_map(|task| std::iter::repeat_n(task.as_str(), count)).collect();
    tally.demand(started == expected, || format!("{name}: the tasks started as {started:?} instead of {expected:?}"));
}

/// An operator ends at the first of these points, the next one at the second, and so on; the last one completes what is
/// left. Recovery is the time from the start of the last operator until nothing is left to do.
fn dies_at_each(bed: &TestBed, (kind, fate): (Kind, Fate), points: &[&str], tally: &mut FaultTally) {
    let name = format!("{}-{}", kind.name(), format!("{fate:?}").to_lowercase());
    let name = name.as_str();
    let serve = |point: Option<&str>| Operator::with(bed, point, &["--tfjobs"]);
    // Writes about other jobs would end the operator too.
    let operator = serve(None);
    bed.kubectl(&["delete", "trainingjobs,tfjobs", "--all", "-n", "team", "--timeout=120s"]);
    let run_policy = if fate == Fate::Expires { json!({"ttlSecondsAfterFinished": 1}) } else { json!({}) };
    let worker = match fate {
        Fate::Completes => COUNTED_WORKER,
        Fate::Expires => "sleep 1",
        Fate::Restarts | Fate::IsDeleted => COUNTED_SERVER,
    };
    let create = || bed.apply(pair(kind, name, worker, &run_policy));
    if matches!(fate, Fate::Restarts | Fate::IsDeleted) {
        create();
        until_journal(bed, kind, name, "Running", 1);
    }
    drop(operator);
    for (number, point) in points.iter().enumerate() {
        let mut operator = serve(Some(point));
        match fate {
            _ if number > 0 => {}
            Fate::Completes | Fate::Expires => create(),
            Fate::Restarts => kill(bed, &format!("{name}-ps-0"), SERVER_MARK),
            Fate::IsDeleted => drop(bed.kubectl(&["delete", kind.name(), name, "-n", "team", "--wait=false"])),
        }
        let began = Instant::now();
        let code = operator.ended();
        assert_eq!(
            code,
            Some(86),
            "the operator did not reach {point}: {:#}\n{}",
            journal(bed, kind, name),
            bed.operator_log()
        );
        tally.inject(1);
        println!("{name}: {point} after {:.1} s", began.elapsed().as_secs_f64());
        if fate == Fate::Completes {
            check_gang(bed, kind, name, point, tally);
        }
    }
    let began = Instant::now();
    let _operator = serve(None);
    wait_until_complete(bed, (kind, fate), name, tally);
    tally.recover(began.elapsed().as_secs_f64());
    match fate {
        Fate::Completes | Fate::IsDeleted => check_starts(bed, name, 1, tally),
        Fate::Restarts => check_starts(bed, name, 2, tally),
        // The worker does not count.
        Fate::Expires => {}
    }
}

/// Waits until nothing is left to do about the job.
fn wait_until_complete(bed: &TestBed, (kind, fate): (Kind, Fate), name: &str, tally: &mut FaultTally) {
    match fate {
        Fate::IsDeleted | Fate::Expires => {
            let is_gone = || (bed.find(kind.name(), name).is_none() && pods_of(bed, name).is_empty()).then_some(());
            eventually("nothing left of the deleted job", is_gone);
        }
        Fate::Restarts => {
            until_journal(bed, kind, name, "Running", 2);
            let failures = journal(bed, kind, name)["failures"].clone();
            tally.demand(failures == 1, || format!("{name}: one loss counts as {failures} failures"));
        }
        Fate::Completes => {
            until_journal(bed, kind, name, "Succeeded", 1);
            let failures = journal(bed, kind, name)["failures"].as_u64().unwrap_or(0);
            tally.demand(failures == 0, || format!("{name}: {failures} failures"));
            let is_clean = || {
                let held = |pod: &Value| pod["metadata"]["finalizers"].as_array().is_some_and(|all| !all.is_empty());
                let is_clean = journal(bed, kind, name)["cleaned"] == true;
                (is_clean && services_of(bed, name) == 0 && !pods_of(bed, name).iter().any(held)).then_some(())
            };
            eventually("nothing left to clean", is_clean);
        }
    }
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
