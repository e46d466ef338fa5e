//! Jobs of several processes on one machine: `tasks`, `run --role` and job files with roles.

use crate::common::{Home, eventually, read_until, signal, wait};
use nix::sys::signal::Signal;
use std::time::Duration;

/// A command line of `tasks` whose tasks are this shell script. `role` and `index` are variables in it.
fn tasks<'a>(options: &[&'a str], script: &'a str) -> Vec<&'a str> {
    [&["tasks"], options, &["--", "sh", "-c", script]].concat()
}

/// Reads the task's place from TF_CONFIG.
macro_rules! script {
    ($text:literal) => {
        concat!(
            r#"role=$(echo "$TF_CONFIG" | sed 's/.*"type":"\([a-z]*\)".*/\1/'); "#,
            r#"index=$(echo "$TF_CONFIG" | sed 's/.*"index":\([0-9]*\).*/\1/'); "#,
            $text
        )
    };
}

#[test]
fn the_reporting_task_is_the_job_and_servers_end_with_it() {
    let home = Home::new();
    let logs = home.path().join("logs").display().to_string();
    let script = script!(
        r#"if [ $role = ps ]; then echo serves; exec sleep 600; fi; sleep 0.5; echo "$role $index $TF_CONFIG""#
    );
    let outcome = home.run(&tasks(&["--role", "ps=2", "--role", "worker=3", "--logs", &logs], script));
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.starts_with("worker 0 {"), "{}", outcome.stdout);
    assert_eq!(outcome.stdout.lines().count(), 1, "only one task reports: {}", outcome.stdout);
    let (_, config) = outcome.stdout.split_once("worker 0 ").unwrap();
    let config: serde_json::Value = serde_json::from_str(config).unwrap();
    assert_eq!(config["cluster"]["ps"].as_array().map(Vec::len), Some(2), "{config}");
    assert_eq!(config["cluster"]["worker"].as_array().map(Vec::len), Some(3), "{config}");
    assert_eq!(std::fs::read_to_string(home.path().join("logs/ps-1.log")).unwrap(), "serves\n");
}

#[test]
fn a_failed_worker_is_replaced_and_a_failed_server_restarts_all() {
    let home = Home::new();
    let marks = home.path().join("marks");
    std::fs::create_dir(&marks).unwrap();
    let marks = marks.display().to_string();
    let script = script!(
        r#"echo x >> "$1/$role-$index"; starts=$(wc -l < "$1/$role-$index")
        if [ $role-$index = worker-1 ] && [ $starts = 1 ]; then echo broken; exit 5; fi
        if [ $role = ps ] && [ $starts = 1 ]; then sleep 1; exit 139; fi
        if [ $role-$index = worker-0 ] && [ $starts = 2 ]; then sleep 1; exit 0; fi
        exec sleep 600"#
    );
    let arguments = ["tasks", "--role", "ps=1", "--role", "worker=2", "--", "sh", "-c", script, "sh", &marks];
    let outcome = home.run(&arguments);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    for words in ["worker 1 ended: exit status: 5", "worker 1: broken", "all tasks are started again"] {
        assert!(outcome.stderr.contains(words), "no `{words}` in: {}", outcome.stderr);
    }
    let starts = |name: &str| std::fs::read_to_string(format!("{marks}/{name}")).unwrap().lines().count();
    assert_eq!((starts("ps-0"), starts("worker-0"), starts("worker-1")), (2, 2, 3));
}

#[test]
fn failures_without_end_end_the_job() {
    let home = Home::new();
    let outcome = home.run(&tasks(
        &["--role", "worker=2", "--restarts", "2"],
        script!("if [ $index = 1 ]; then exit 9; fi; sleep 600"),
    ));
    assert_eq!(outcome.code, 9, "{}", outcome.stderr);
    assert_eq!(outcome.stderr.matches("worker 1 ended").count(), 3, "{}", outcome.stderr);
}

#[test]
fn a_signal_ends_all_tasks() {
    let home = Home::new();
    let marks = home.path().display().to_string();
    let script = script!(r#"echo $$ > "$1/$role"; echo begun; exec sleep 600"#);
    let arguments = ["tasks", "--role", "chief=1", "--role", "worker=1", "--", "sh", "-c", script, "sh", &marks];
    let mut child = home.spawn(&arguments);
    read_until(child.stdout.as_mut().unwrap(), "begun");
    let pid =
        |role: &str| std::fs::read_to_string(home.path().join(role)).ok().and_then(|text| text.trim().parse().ok());
    assert!(eventually(|| pid("worker").is_some_and(|_: i32| true)));
    signal(child.id() as i32, Signal::SIGTERM);
    assert_eq!(wait(child).code, 143);
    for role in ["chief", "worker"] {
        let id = pid(role).unwrap();
        let gone = nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), None);
        assert_eq!(gone, Err(nix::errno::Errno::ESRCH), "{role} outlived the others");
    }
}

/// The same TFJob as in a cluster: success, restarts and ignored workers follow its rules.
#[test]
fn a_tfjob_has_the_same_rules_as_in_a_cluster() {
    let home = Home::new();
    let folder = home.path().display().to_string();
    let submit = |name: &str, script: &str, workers: serde_json::Value, more: serde_json::Value| {
        let command = ["sh", "-c", script, "sh", &folder];
        let container = serde_json::json!({"name": "tensorflow", "image": "x", "command": command});
        let mut role = serde_json::json!({"replicas": 2, "template": {"spec": {"containers": [container]}}});
        role.as_object_mut().unwrap().extend(workers.as_object().unwrap().clone());
        let mut spec = serde_json::json!({"tfReplicaSpecs": {"Worker": role}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let metadata = serde_json::json!({"name": name});
        let manifest =
            serde_json::json!({"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": metadata, "spec": spec});
        let file = home.path().join(format!("{name}.yaml"));
        std::fs::write(&file, manifest.to_string()).unwrap();
        home.ok(&["submit", file.to_str().unwrap()]);
    };
    let none = || serde_json::json!({});
    let late = script!(r#"if [ $index = 1 ]; then sleep 2; echo late > "$1/late"; fi"#);
    submit("all", late, none(), serde_json::json!({"successPolicy": "AllWorkers"}));
    home.wait_for_state("all", "done");
    assert!(home.path().join("late").exists(), "the job waited for worker 1");

    let broken = script!("if [ $index = 1 ]; then exit 5; fi; sleep 600");
    submit("never", broken, none(), none());
    home.wait_for_state("never", "failed");
    submit("code", broken, serde_json::json!({"restartPolicy": "ExitCode"}), none());
    home.wait_for_state("code", "failed");

    let sparse = script!(
        r#"if [ $index = 1 ]; then exit 5; fi; sleep 1
        case "$TF_CONFIG" in *sparseCluster*) echo sparse > "$1/sparse";; esac"#
    );
    submit("dynamic", sparse, none(), serde_json::json!({"enableDynamicWorker": true}));
    home.wait_for_state("dynamic", "done");
    assert!(home.path().join("sparse").exists());
}

#[test]
fn roles_that_make_no_sense_are_refused() {
    let home = Home::new();
    for (roles, words) in [
        (&["--role", "boss=1"][..], "use chief, ps, worker or evaluator"),
        (&["--role", "ps=1"], "no chief and no worker"),
        (&["--role", "worker=many"], "`many` is not a number of tasks"),
        (&["--role", "worker=1", "--role", "Worker=2"], "given twice"),
        (&[], "give --role worker=2"),
    ] {
        let outcome = home.run(&tasks(roles, "true"));
        assert!(outcome.code != 0 && outcome.stderr.contains(words), "{roles:?}: {}", outcome.stderr);
    }
}

/// The bounds of a manifest's `runPolicy`: restarts, length of the run, and what remains of it.
#[test]
fn a_run_policy_bounds_restarts_length_and_memory_of_a_job() {
    let home = Home::new();
    let marks = home.path().join("starts").display().to_string();
    let submit = |name: &str, script: &str, policy: serde_json::Value| {
        let command = ["sh", "-c", script, "sh", &marks];
        let container = serde_json::json!({"name": "tensorflow", "image": "x", "command": command});
        let role = serde_json::json!({
            "replicas": 2, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}},
        });
        let manifest = serde_json::json!({
            "apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": name},
            "spec": {"runPolicy": policy, "tfReplicaSpecs": {"Worker": role}},
        });
        let file = home.path().join(format!("{name}.yaml"));
        std::fs::write(&file, manifest.to_string()).unwrap();
        home.ok(&["submit", file.to_str().unwrap()]);
    };
    let broken = script!(r#"if [ $index = 1 ]; then echo x >> "$1"; exit 5; fi; exec sleep 600"#);
    submit("limited", broken, serde_json::json!({"backoffLimit": 1}));
    let job = home.wait_for_state("limited", "failed");
    assert_eq!(job["exit_code"], 5, "{job:#}");
    assert_eq!(std::fs::read_to_string(&marks).unwrap().lines().count(), 2, "one start and one restart");
    let output = home.ok(&["logs", "limited"]);
    assert!(output.contains("failure 2: the limit of restarts is 1, so the job fails"), "{output}");

    submit("long", script!("exec sleep 600"), serde_json::json!({"activeDeadlineSeconds": 1}));
    let job = home.wait_for_state("long", "failed");
    assert!(job["reason"]["text"].as_str().is_some_and(|why| why.contains("time limit of 1s")), "{job:#}");

    submit("brief", script!("true"), serde_json::json!({"ttlSecondsAfterFinished": 1}));
    assert!(eventually(|| home.job("brief").is_none()), "{:?}", home.job("brief"));
    assert!(home.job("long").is_some(), "jobs without the field are remembered");
}

/// Real training with parameter servers as one job of the daemon, from the command line and from a TFJob.
#[test]
fn a_distributed_job_shares_the_machine_as_one_job() {
    let home = Home::new();
    let program = env!("CARGO_BIN_EXE_gainshare");
    let train = [program, "train-ps", "gru", "--hidden", "8", "--batch", "4", "--steps", "200", "--format", "csv"];
    let run = ["run", "--name", "direct", "--role", "ps=1", "--role", "worker=2", "--"];
    let outcome = home.run(&[&run[..], &train].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stdout.lines().last().unwrap().starts_with("200,"), "{}", outcome.stdout);
    assert_eq!(home.job("direct").unwrap()["state"], "done");

    let container = serde_json::json!({"containers": [{"name": "tensorflow", "image": "x", "command": train}]});
    let role = |replicas: u32| serde_json::json!({"replicas": replicas, "template": {"spec": container}});
    let manifest = serde_json::json!({
        "apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": "published"},
        "spec": {"tfReplicaSpecs": {"PS": role(1), "Worker": role(2)}},
    });
    let file = home.path().join("tfjob.yaml");
    std::fs::write(&file, manifest.to_string()).unwrap();
    home.ok(&["submit", file.to_str().unwrap()]);
    let job = home.wait_for_state("published", "done");
    assert_eq!(job["command"].as_array().map(Vec::len), Some(train.len()), "{job:#}");
}

/// One of two servers has other work to do, too, and holds up all workers. The daemon gives it more of the job's share
/// than the other one. Whether that is faster is judged by the daemon while the job trains.
#[test]
#[ignore = "needs root and cgroups"]
fn a_slow_server_gets_more_of_the_share_of_its_job() {
    let home = Home::new();
    let script = script!(
        r#"if [ $role-$index = ps-1 ]; then while :; do :; done & fi
        exec "$1" train-ps mlp --hidden 256 --batch 2 --steps 1000000 --report-every 5 --format kv"#
    );
    let command = ["sh", "-c", script, "sh", env!("CARGO_BIN_EXE_gainshare")];
    let job = serde_json::json!({"name": "slow", "command": command, "roles": {"ps": 2, "worker": 4}});
    let file = home.path().join("job.json");
    std::fs::write(&file, job.to_string()).unwrap();
    home.ok(&["submit", file.to_str().unwrap()]);
    home.wait_for_state("slow", "running");
    let mut explained = String::new();
    let is_decided = || {
        std::thread::sleep(Duration::from_millis(300));
        explained = home.ok(&["explain", "slow"]);
        explained.contains("server 1 is busy")
    };
    assert!(std::iter::repeat_with(is_decided).take(300).any(|decided| decided), "{explained}");
    // `its tasks divide its share: ps-0 11 %, ps-1 36 %, worker-0 13 %, …`
    let part = |task: &str| -> f64 {
        let text = explained.split_once(&format!("{task} ")).expect(task).1;
        text.split(' ').next().and_then(|number| number.parse().ok()).expect(text)
    };
    assert!(part("ps-1") > 1.5 * part("ps-0"), "{explained}");
    home.ok(&["stop", "slow"]);
    home.wait_for_state("slow", "stopped");
}
