//! Training jobs on real kubelets: moved, suspended, resumed, failed; with an operator that dies at every
//! step of a move, and with the input that people give by mistake.
//!
//! The jobs are shell scripts that count, save the count on a shared volume when they get SIGTERM, and own
//! a folder on that volume while they live: an attempt that finds the folder of another one records that
//! two lived at once. The operator is the real program with the rights that the chart gives it.

use crate::common::training::{COUNTS, Operator, batch_job, dies_around, job};
use crate::common::{FaultTally, SYSTEM, Scenarios, TestBed, eventually, text, within_a_minute};
use crate::invariants::{Watch, alive};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Ignores SIGTERM.
const DEAF: &str = r#"
trap '' TERM
while :; do sleep 0.1; done
"#;

/// Cannot write into its checkpoint folder.
const SHUT_OUT: &str = r#"
trap 'echo 1 > "$GAINSHARE_CHECKPOINT_DIR/step" || exit 5; exit 143' TERM
while :; do sleep 0.1; done
"#;

#[test]
#[ignore = "needs root and a test bed"]
fn training_jobs_in_a_real_cluster() {
    let bed = TestBed::with_training("jobstest", &["left", "right", "far"]);
    let watch = Watch::begin(&bed);
    let mut scenarios = Scenarios::default();
    scenarios.run("mistakes are answered with help", || mistakes_are_answered_with_help(&bed));
    let operator = Operator::start(&bed, None);
    submit_jobs(&bed);
    scenarios.run("jobs end well, badly, and before they begin", || ends(&bed));
    scenarios.run("jobs that cannot be moved stay and say why", || stays(&bed));
    scenarios.run("a node falls silent during a move", || vanishes(&bed));
    scenarios.run("a job is suspended and resumed", || suspends(&bed));
    scenarios.run("a Job of the cluster's own kind is adopted", || adopts(&bed, operator));
    let mut tally = FaultTally::of("operator-killed");
    scenarios.run_counted("the operator dies at every step of a move", &mut tally, |tally| {
        survives_its_operator(&bed, tally);
    });
    scenarios.run_counted("the operator dies around each write from creation to deletion", &mut tally, |tally| {
        survives_from_creation_to_deletion(&bed, tally);
    });
    scenarios.run("a deleted job saves itself and takes its pods along", || goes(&bed));
    scenarios.run("drains and deletions end while sharing is off", || switched_off(&bed));
    let watched = watch.end(&bed, &["drained", "gang", "latecomer"]);
    scenarios.run_counted("the invariants held all the time", &mut tally, |tally| {
        watched.report(tally);
        assert!(watched.pods["steady"].len() > 8 && watched.pods["batch"].len() == 3, "{:?}", watched.pods);
        for job in ["steady", "castaway", "batch"] {
            let twice = bed.kept(job).join("TWICE").exists();
            tally.demand(!twice, || format!("two attempts of {job} lived at once"));
        }
    });
    tally.print();
    scenarios.finish();
}

/// The jobs of the scenarios. All begin at once, so that no scenario waits for the pods of another one.
fn submit_jobs(bed: &TestBed) {
    for (name, script, more) in [
        ("steady", COUNTS, json!({})),
        (
            "naked",
            "while :; do sleep 1; done",
            json!({"checkpoint": null, "runPolicy": {"terminationGracePeriodSeconds": 1}}),
        ),
        ("deaf", DEAF, json!({"runPolicy": {"terminationGracePeriodSeconds": 2}})),
        ("castaway", COUNTS, json!({})),
        ("brief", "true", json!({"runPolicy": {"ttlSecondsAfterFinished": 3}, "policy": "na"})),
        ("hopeless", "exit 3", json!({"runPolicy": {"backoffLimit": 1, "cleanPodPolicy": "All"}})),
        ("foreign", COUNTS, json!({"managedBy": "example.com/other"})),
    ] {
        bed.apply(job(name, script, more));
    }
    let mut shut_out: Value = serde_json::from_str(&job("shutout", SHUT_OUT, json!({}))).unwrap();
    shut_out["spec"]["template"]["spec"]["securityContext"] = json!({"runAsUser": 65534, "runAsGroup": 65534});
    bed.apply(&shut_out);
    let mut reaching: Value = serde_json::from_str(&job("reaching", COUNTS, json!({}))).unwrap();
    reaching["spec"]["template"]["spec"]["volumes"] = json!([{"name": "root", "hostPath": {"path": "/"}}]);
    bed.apply(&reaching);
}

fn mistakes_are_answered_with_help(bed: &TestBed) {
    for (more, helps) in [
        (json!({"template": null}), "spec.template"),
        (json!({"checkpoint": {"claimName": "shared", "path": "keep"}}), "such as /checkpoints"),
        (json!({"checkpoint": {"claimName": "", "path": "/keep"}}), "names a PersistentVolumeClaim"),
        (json!({"checkpoint": {"claimName": "c", "path": "/k", "subPath": "../x"}}), "relative and without .."),
        (json!({"runPolicy": {"backoffLimit": -1}}), "between 0 (never try again)"),
        (json!({"runPolicy": {"terminationGracePeriodSeconds": 0}}), "enough to write a checkpoint"),
        (json!({"policy": "magic"}), "supported values: \"gainshare\", \"na\""),
        (json!({"suspended": true}), "unknown field \"spec.suspended\""),
    ] {
        let output = bed.output("kubectl", &["apply", "-f", "-"], &job("wrong", COUNTS, more.clone()));
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(helps), "{more}: {said}");
    }
}

/// Jobs that end: well, badly, and before they begin.
fn ends(bed: &TestBed) {
    let reaching = bed.until("reaching", "Failed", None);
    assert!(reaching["status"]["message"].as_str().unwrap().contains("use a claim"), "{reaching:#}");
    let hopeless = bed.until("hopeless", "Failed", None);
    assert!(hopeless["status"]["message"].as_str().unwrap().contains("exit code 3"), "{hopeless:#}");
    assert_eq!(hopeless["status"]["failures"], 2);
    assert!(within_a_minute(|| bed.find("trainingjob", "brief").is_none().then_some(())).is_some(), "its time is over");
    let foreign = bed.job("foreign");
    assert!(foreign["metadata"]["finalizers"].is_null() && foreign["status"].is_null(), "{foreign:#}");
    assert!(
        within_a_minute(|| bed.find("pod", "hopeless-2").is_none().then_some(())).is_some(),
        "cleanPodPolicy is All"
    );
}

/// Jobs that cannot be moved run on where they are, and their status says why.
fn stays(bed: &TestBed) {
    let jobs = [
        ("naked", "spec.checkpoint is missing", 1),
        ("deaf", "ignored SIGTERM", 2),
        ("shutout", "saving on SIGTERM failed (exit code 5)", 2),
    ];
    for (name, ..) in jobs {
        bed.until(name, "Running", Some("left"));
        bed.send_to(name, "right");
    }
    for (name, why, epoch) in jobs {
        let found = within_a_minute(|| {
            let job = bed.job(name);
            let said = job["status"]["message"].as_str().unwrap_or_default().contains(why);
            (said && job["status"]["state"] == "Running" && job["status"]["attempt"]["epoch"] == epoch).then_some(job)
        });
        let job = found.unwrap_or_else(|| panic!("{name}: {:#}", bed.job(name)["status"]));
        assert_eq!((&job["status"]["attempt"]["node"], &job["status"]["moves"]), (&json!("left"), &json!(0)), "{name}");
        assert_eq!(job["status"]["failures"], 0, "{name}: a move that was refused is no failure");
    }
}

/// A node falls silent in the middle of a move, and is then declared off and taken away.
fn vanishes(bed: &TestBed) {
    bed.until("castaway", "Running", Some("left"));
    bed.send_to("castaway", "far");
    bed.until("castaway", "Running", Some("far"));
    assert!(bed.testbed(&["kill", "kubelet-far"]).status.success());
    bed.send_to("castaway", "right");
    bed.until("castaway", "Migrating", Some("far"));
    std::thread::sleep(Duration::from_secs(3));
    assert!(bed.find("pod", "castaway-3").is_none(), "nothing is started while the stop is not proven");
    // Now the node is off: its processes end.
    kill_holders(&bed.kept("castaway").join("held"));
    fs::remove_dir(bed.kept("castaway").join("alive")).unwrap();
    bed.kubectl(&["taint", "node", "far", "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"]);
    bed.kubectl(&["delete", "node", "far"]);
    let job = bed.until("castaway", "Running", Some("right"));
    assert_eq!(job["status"]["attempt"]["epoch"], 3);
}

/// Ends the processes that have this file open: those of one job of ours.
fn kill_holders(file: &Path) {
    let file = fs::canonicalize(file).unwrap();
    let mut killed = 0_usize;
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let inode = |path: &Path| {
            use std::os::unix::fs::MetadataExt;
            fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok()
        };
        if inode(&entry.path().join("fd/9")).is_some_and(|found| Some(found) == inode(&file)) {
            // A process that ends by itself meanwhile (a sleep of the script) needs no signal.
            let done = Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status().unwrap();
            killed += usize::from(done.success());
        }
    }
    assert!(killed > 0, "no process has {} open", file.display());
}

fn suspends(bed: &TestBed) {
    bed.until("steady", "Running", Some("left"));
    let suspend = |on: bool| {
        let patch = json!({"spec": {"suspend": on}}).to_string();
        bed.kubectl(&["patch", "trainingjob", "steady", "-n", "team", "--type", "merge", "-p", &patch]);
    };
    let patch = json!({"spec": {"template": {"metadata": {"labels": {"other": "pod"}}}}}).to_string();
    let output =
        bed.output("kubectl", &["patch", "trainingjob", "steady", "-n", "team", "--type", "merge", "-p", &patch], "");
    assert!(text(&output.stderr).contains("template cannot change"), "{}", text(&output.stderr));
    suspend(true);
    let job = bed.until("steady", "Suspended", None);
    assert!(job["status"]["message"].as_str().unwrap().contains("it saved itself"), "{job:#}");
    suspend(false);
    bed.until("steady", "Running", None);
}

/// A Job of the cluster's own kind is moved twice, the second time by an operator that dies on the way, and
/// is released.
fn adopts(bed: &TestBed, operator: Operator) {
    bed.apply(batch_job("careless", COUNTS, "TerminatingOrFailed"));
    bed.apply(batch_job("batch", COUNTS, "Failed"));
    let says = |name: &str, words: &str| {
        let said = within_a_minute(|| bed.adopted(name)["message"].as_str().filter(|m| m.contains(words)).map(|_| ()));
        assert!(said.is_some(), "{name} does not say {words:?}: {:#}", bed.get("job", name));
    };
    says("careless", "is not moved: without podReplacementPolicy: Failed");
    let events = || {
        let events = bed.kubectl(&["get", "events", "-n", "team", "--field-selector", "involvedObject.name=careless"]);
        events.contains("NotMovable").then_some(())
    };
    eventually("an event for the Job that cannot be moved", events);
    bed.kubectl(&["delete", "job", "careless", "-n", "team", "--wait=false"]);

    says("batch", "runs on ");
    let goes = |node: &str, moves: u64| {
        let there = || {
            let journal = bed.adopted("batch");
            let settled = journal["moves"] == moves && journal["migration"].is_null();
            (settled && journal["message"].as_str()?.contains(&format!("runs on {node}"))).then_some(())
        };
        assert!(within_a_minute(there).is_some(), "{:#}", bed.get("job", "batch"));
    };
    let first = if bed.adopted("batch")["message"].as_str().unwrap().contains("on right") { "left" } else { "right" };
    let second = if first == "left" { "right" } else { "left" };
    bed.send("job/batch", first);
    goes(first, 1);
    drop(operator);
    let mut operator = Operator::start(bed, Some("after-suspend"));
    bed.send("job/batch", second);
    operator.died();
    let operator = Operator::start(bed, None);
    goes(second, 2);
    let counts = bed.resumed_at("batch");
    assert!(counts.len() == 3 && counts.windows(2).all(|pair| pair[0] < pair[1]), "it did not resume: {counts:?}");
    let status = bed.get("job", "batch")["status"].clone();
    assert!(status["failed"].is_null() && status["active"] == 1, "a move is no failure: {status:#}");

    // Released: the pod runs on. When the author suspends the Job, nothing of ours is left in it.
    let pod = alive(bed.name)["batch"].clone();
    bed.kubectl(&["annotate", "job", "batch", "-n", "team", "gainshare.dev/adopt-", "gainshare.dev/node-"]);
    let marked = || {
        let pods = bed.kubectl(&["get", "pods", "-n", "team", "-l", "gainshare.dev/job=batch", "-o", "name"]);
        pods.trim().is_empty().then_some(())
    };
    eventually("a pod without our mark", marked);
    assert_eq!(alive(bed.name)["batch"], pod);
    bed.kubectl(&["patch", "job", "batch", "-n", "team", "--type=merge", "-p", r#"{"spec":{"suspend":true}}"#]);
    let clean = || {
        let job = bed.get("job", "batch");
        let affinity = job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"].clone();
        let ours = job["metadata"]["annotations"]["gainshare.dev/adopted"].is_string();
        (!ours && affinity.as_object().is_none_or(|fields| fields.is_empty())).then_some(())
    };
    assert!(within_a_minute(clean).is_some(), "{:#}", bed.get("job", "batch"));
    bed.kubectl(&["delete", "job", "batch", "-n", "team"]);
    drop(operator);
}

/// The operator is killed at every step of a move, the last step first, so that each operator finishes what
/// the one before it began.
fn survives_its_operator(bed: &TestBed, tally: &mut FaultTally) {
    let writes = ["running", "open", "placed", "let-go", "create", "stopped", "delete", "stopping"];
    let points: Vec<String> =
        writes.iter().flat_map(|write| [format!("after-{write}"), format!("before-{write}")]).collect();
    let mut node = bed.job("steady")["status"]["attempt"]["node"].as_str().unwrap().to_owned();
    let before = bed.job("steady")["status"]["moves"].as_u64().unwrap();
    for point in &points {
        let mut operator = Operator::start(bed, Some(point));
        bed.until("steady", "Running", Some(&node));
        node = if node == "left" { "right".to_owned() } else { "left".to_owned() };
        bed.send_to("steady", &node);
        operator.died();
        tally.inject(1);
    }
    let began = Instant::now();
    let _operator = Operator::start(bed, None);
    let job = bed.until("steady", "Running", Some(&node));
    tally.recover(began.elapsed().as_secs_f64());
    assert_eq!(job["status"]["moves"].as_u64().unwrap() - before, points.len() as u64, "{:#}", job["status"]);
    assert_eq!(job["status"]["failures"], 0);
    // Its count never went back, and no attempt began from nothing.
    let epoch = job["status"]["attempt"]["epoch"].as_u64().unwrap();
    // The newest attempt may run before it has printed anything.
    let counts = eventually("a line of every attempt", || {
        Some(bed.resumed_at("steady")).filter(|counts| counts.len() as u64 >= epoch)
    });
    assert_eq!(counts.len() as u64, epoch, "{counts:?}");
    assert!(counts.windows(2).all(|pair| pair[0] < pair[1]), "{counts:?}");
}

/// The writes about a new job, about its deletion, and about a job whose time to live is over. Those in between are the
/// writes of a move.
fn survives_from_creation_to_deletion(bed: &TestBed, tally: &mut FaultTally) {
    let writes = ["hold", "planned", "create", "placed", "open", "running"];
    let (operator, began) = dies_around(bed, &writes, tally, || bed.apply(job("created", COUNTS, json!({}))));
    let status = bed.until("created", "Running", Some("left"))["status"].clone();
    tally.recover(began.elapsed().as_secs_f64());
    tally.demand(status["attempt"]["epoch"] == 1, || format!("it began twice: {status:#}"));
    drop(operator);

    let until_gone = |name: &str, began: Instant, tally: &mut FaultTally| {
        let label = format!("gainshare.dev/job={name}");
        let is_gone = || {
            let pods = bed.kubectl(&["get", "pods", "-n", "team", "-l", &label, "-o", "name"]);
            (bed.find("trainingjob", name).is_none() && pods.trim().is_empty()).then_some(())
        };
        eventually(&format!("the end of {name}"), is_gone);
        tally.recover(began.elapsed().as_secs_f64());
    };
    let delete = || drop(bed.kubectl(&["delete", "trainingjob", "created", "-n", "team", "--wait=false"]));
    let (operator, began) = dies_around(bed, &["delete", "let-go", "release"], tally, delete);
    until_gone("created", began, tally);
    drop(operator);

    let policy = json!({"runPolicy": {"ttlSecondsAfterFinished": 1}});
    let create = || bed.apply(job("expires", "sleep 1", policy.clone()));
    let (_operator, began) = dies_around(bed, &["stopped", "delete-job"], tally, create);
    until_gone("expires", began, tally);
}

/// A deleted job takes its pods along, and lets them save themselves.
fn goes(bed: &TestBed) {
    let _operator = Operator::start(bed, None);
    let step = || fs::read_to_string(bed.kept("steady").join("step")).unwrap().trim().parse::<u64>().unwrap();
    let before = step();
    bed.kubectl(&["delete", "trainingjob", "steady", "-n", "team", "--timeout=30s"]);
    assert!(step() > before, "it was not asked to save itself");
    let gone = || {
        let pods = bed.kubectl(&["get", "pods", "-n", "team", "-l", "gainshare.dev/job=steady", "-o", "name"]);
        pods.trim().is_empty().then_some(())
    };
    assert!(within_a_minute(gone).is_some(), "its pods are held");
}

/// A distributed job of one server and two workers, none of which ends by itself.
fn gang(name: &str) -> Value {
    let script = "trap 'exit 143' TERM; while :; do sleep 0.2; done";
    let template = json!({"spec": {"containers": [{
        "name": "main", "image": "busybox:local", "imagePullPolicy": "Never", "command": ["sh", "-c", script],
        "resources": {"requests": {"cpu": "20m", "memory": "8Mi"}},
    }]}});
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name, "namespace": "team"},
        "spec": {
            "policy": "na", "runPolicy": {"terminationGracePeriodSeconds": 5},
            "replicaSpecs": {"PS": {"template": template}, "Worker": {"replicas": 2, "template": template}},
        },
    })
}

/// While sharing is switched off, nothing is started, and nothing waits for the operator: a drain
/// ends, and a deletion does.
fn switched_off(bed: &TestBed) {
    let operator = Operator::start(bed, None);
    for name in ["drained", "removed"] {
        bed.apply(job(name, COUNTS, json!({})));
        bed.until(name, "Running", Some("left"));
    }
    bed.apply(gang("gang"));
    bed.until("gang", "Running", None);
    drop(operator);
    // The next operator finds the switch when it starts.
    bed.kubectl(&["create", "configmap", "gainshare-operator", "-n", SYSTEM, "--from-literal=sharing=off"]);
    let _operator = Operator::start(bed, None);
    bed.apply(job("latecomer", COUNTS, json!({})));
    let selector = "--pod-selector=gainshare.dev/job in (drained, gang)";
    bed.kubectl(&["drain", "left", "right", selector, "--timeout=90s"]);
    bed.kubectl(&["delete", "trainingjob", "removed", "-n", "team", "--timeout=90s"]);
    let pods_of = |name: &str, more: &[&str]| {
        let label = format!("gainshare.dev/job={name}");
        let mut args = vec!["get", "pods", "-n", "team", "-l", label.as_str(), "-o", "name"];
        args.extend(more);
        bed.kubectl(&args).lines().count()
    };
    for name in ["drained", "gang", "latecomer"] {
        assert_eq!(pods_of(name, &[]), 0, "{name}: a pod was made while sharing was off");
    }
    let latecomer = bed.job("latecomer");
    assert!(latecomer["metadata"]["finalizers"].is_null() && latecomer["status"].is_null(), "{latecomer:#}");

    bed.kubectl(&["uncordon", "left", "right"]);
    let on = r#"{"data":{"sharing":"on"}}"#;
    bed.kubectl(&["patch", "configmap", "gainshare-operator", "-n", SYSTEM, "--type=merge", "-p", on]);
    for (name, count) in [("drained", 1), ("gang", 3), ("latecomer", 1)] {
        let running = || pods_of(name, &["--field-selector=status.phase=Running"]) == count;
        eventually(&format!("{name} after the switch"), || running().then_some(()));
        let job = bed.until(name, "Running", None);
        assert!(job["status"]["failures"].as_u64().unwrap_or(0) == 0, "a drain is no failure: {:#}", job["status"]);
    }
}
