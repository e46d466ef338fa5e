//! Training jobs on real kubelets: moved, suspended, resumed, failed; with a manager that dies at every step of a move, and with the input people give by
//! mistake.
//!
//! The jobs are shell scripts that count, keep the count on a shared volume when they are asked to end, and own a folder on that volume while they live:
//! an attempt that finds the folder of another one tells that two lived at once. The manager is the real program, with the rights the chart gives it. Needs root.

use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const NAME: &str = "jobstest";
const SYSTEM: &str = "gainshare-system";
const NODES: [&str; 3] = ["left", "right", "far"];

/// Counts ten times a second. By the file that descriptor 9 has open its processes can be found.
const COUNTS: &str = r#"
cd "$GAINSHARE_CHECKPOINT_DIR" || exit 1
exec 9>held; mkdir alive || touch TWICE
i=$(cat step 2>/dev/null || echo 0)
echo "attempt $GAINSHARE_ATTEMPT resumed at $i" >> log
trap 'echo $i > step.new; mv step.new step; rmdir alive; exit 143' TERM
while :; do i=$((i+1)); sleep 0.1; done
"#;

/// Does not listen.
const DEAF: &str = r#"
trap '' TERM
while :; do sleep 0.1; done
"#;

/// Cannot write where it should.
const SHUT_OUT: &str = r#"
trap 'echo 1 > "$GAINSHARE_CHECKPOINT_DIR/step" || exit 5; exit 143' TERM
while :; do sleep 0.1; done
"#;

struct Bed {
    kubeconfig: String,
    bin: PathBuf,
    folder: tempfile::TempDir,
}

impl Drop for Bed {
    fn drop(&mut self) {
        testbed(&["down"]);
    }
}

fn testbed(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["testbed", "--name", NAME]).args(args).stdin(Stdio::null());
    command.output().expect("our own program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl Bed {
    fn up() -> Bed {
        let nodes = NODES.map(|node| format!("{node}=0.6"));
        let args: Vec<&str> = nodes.iter().flat_map(|node| ["--node", node]).collect();
        let output = testbed(&[&["up"], args.as_slice()].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let said = text(&output.stdout);
        let after = |prefix: &str| said.lines().find_map(|line| line.strip_prefix(prefix)).unwrap().to_owned();
        let bin = after("export PATH=").trim_end_matches(":$PATH").into();
        Bed { kubeconfig: after("export KUBECONFIG="), bin, folder: tempfile::tempdir().unwrap() }
    }

    fn output(&self, program: &str, args: &[&str], stdin: &str) -> Output {
        let mut command = Command::new(self.bin.join(program));
        command.args(args).env("KUBECONFIG", &self.kubeconfig);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    fn kubectl(&self, args: &[&str]) -> String {
        let output = self.output("kubectl", args, "");
        assert!(output.status.success(), "kubectl {args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn apply(&self, objects: &str) {
        let output = self.output("kubectl", &["apply", "-f", "-"], objects);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }

    fn get(&self, kind: &str, name: &str) -> Option<Value> {
        let output = self.output("kubectl", &["get", kind, name, "-n", "team", "-o", "json"], "");
        serde_json::from_slice(&output.stdout).ok()
    }

    fn job(&self, name: &str) -> Value {
        self.get("trainingjob", name).unwrap_or_default()
    }

    /// The folder of a job on the shared volume.
    fn kept(&self, job: &str) -> PathBuf {
        self.folder.path().join("claim").join(job)
    }

    fn send_to(&self, job: &str, node: &str) {
        let wish = format!("gainshare.dev/node={node}");
        self.kubectl(&["annotate", "--overwrite", "trainingjob", job, "-n", "team", &wish]);
    }

    /// Waits until the job is in a state, perhaps on a node, and answers it.
    fn until(&self, name: &str, state: &str, node: Option<&str>) -> Value {
        let mut last = Value::Null;
        let looked = eventually(|| {
            last = self.job(name);
            let there = node.is_none_or(|node| last["status"]["attempt"]["node"] == node);
            (last["status"]["state"] == state && there).then_some(())
        });
        assert!(looked.is_some(), "{name} is not {state} on {node:?} after a minute: {:#}", last["status"]);
        last
    }
}

fn eventually<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match look() {
            Some(found) => return Some(found),
            None if Instant::now() > deadline => return None,
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// The real program, as the chart's account.
struct Manager(Child);

impl Manager {
    fn start(bed: &Bed, fail_at: Option<&str>) -> Manager {
        // A manager that died holds its lease for a quarter of a minute; nobody else is there to be careful about.
        bed.kubectl(&["delete", "lease", "gainshare-manager", "-n", SYSTEM, "--ignore-not-found"]);
        let program = Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("gainshare");
        let log = fs::File::options().create(true).append(true).open(bed.folder.path().join("manager.log")).unwrap();
        let mut command = Command::new(program);
        command.args(["operator", "--namespace", SYSTEM, "--listen", "127.0.0.1:0", "--plain-listen", "127.0.0.1:0"]);
        command.env("KUBECONFIG", bed.folder.path().join("manager.kubeconfig")).stderr(log).stdin(Stdio::null());
        command.envs(fail_at.map(|point| ("GAINSHARE_FAIL_AT", point)));
        Manager(command.spawn().expect("the program was built with the tests"))
    }

    /// It ended at its fail point.
    fn died(&mut self) {
        let code = eventually(|| self.0.try_wait().unwrap());
        assert_eq!(code.and_then(|code| code.code()), Some(86), "the manager did not reach its fail point");
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn job(name: &str, script: &str, more: Value) -> String {
    let mut spec = json!({
        "template": {"spec": {"containers": [{
            "name": "main", "image": "busybox:local", "imagePullPolicy": "Never", "command": ["sh", "-c", script],
            "resources": {"requests": {"cpu": "50m", "memory": "16Mi"}},
        }]}},
        "checkpoint": {"claimName": "shared", "path": "/keep"},
        "runPolicy": {"terminationGracePeriodSeconds": 20},
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        spec[key] = value.clone();
    }
    let spec = spec.as_object().unwrap().iter().filter(|(_, value)| !value.is_null());
    let spec: serde_json::Map<String, Value> = spec.map(|(key, value)| (key.clone(), value.clone())).collect();
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team", "annotations": {"gainshare.dev/node": "left"}}, "spec": spec,
    })
    .to_string()
}

fn prepare(bed: &Bed) {
    for namespace in [SYSTEM, "team"] {
        bed.kubectl(&["create", "namespace", namespace]);
    }
    let chart = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart");
    let chart = chart.to_str().unwrap();
    bed.kubectl(&["apply", "-f", &format!("{chart}/crds")]);
    let shown = ["accounts", "rbac", "admission"].map(|part| format!("templates/{part}.yaml"));
    let mut args = vec!["template", "gainshare", chart, "-n", SYSTEM, "--kube-version", "1.35.0"];
    shown.iter().for_each(|part| args.extend(["--show-only", part]));
    let rendered = bed.output("helm", &args, "");
    assert!(rendered.status.success(), "{}", text(&rendered.stderr));
    bed.apply(&text(&rendered.stdout));
    bed.kubectl(&["wait", "--for=condition=Established", "crd/trainingjobs.gainshare.dev", "--timeout=30s"]);

    // A folder of the machine, which all nodes of the test bed see.
    let claim = bed.folder.path().join("claim");
    fs::create_dir(&claim).unwrap();
    let size = json!({"storage": "1Gi"});
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "shared"},
        "spec": {"capacity": size, "accessModes": ["ReadWriteMany"], "hostPath": {"path": claim}, "storageClassName": "none"},
    });
    let wish = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared", "namespace": "team"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": size}, "storageClassName": "none", "volumeName": "shared"},
    });
    bed.apply(&volume.to_string());
    bed.apply(&wish.to_string());
    // On a busy machine the claim is bound late, and a pod without its volume looks as if its node had no room.
    bed.kubectl(&["wait", "--for=jsonpath={.status.phase}=Bound", "pvc/shared", "-n", "team", "--timeout=60s"]);

    let token = bed.kubectl(&["create", "token", "gainshare-manager", "-n", SYSTEM]);
    let mut config: Value = serde_json::from_str(&bed.kubectl(&["config", "view", "--raw", "-o", "json"])).unwrap();
    config["users"][0]["user"] = json!({"token": token.trim()});
    fs::write(bed.folder.path().join("manager.kubeconfig"), config.to_string()).unwrap();
}

#[test]
fn training_jobs_in_a_real_cluster() {
    let bed = Bed::up();
    prepare(&bed);
    mistakes_are_answered_with_help(&bed);
    let manager = Manager::start(&bed, None);
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
        bed.apply(&job(name, script, more));
    }
    let mut shut_out: Value = serde_json::from_str(&job("shutout", SHUT_OUT, json!({}))).unwrap();
    shut_out["spec"]["template"]["spec"]["securityContext"] = json!({"runAsUser": 65534, "runAsGroup": 65534});
    bed.apply(&shut_out.to_string());
    let mut reaching: Value = serde_json::from_str(&job("reaching", COUNTS, json!({}))).unwrap();
    reaching["spec"]["template"]["spec"]["volumes"] = json!([{"name": "root", "hostPath": {"path": "/"}}]);
    bed.apply(&reaching.to_string());

    ends(&bed);
    stays(&bed);
    vanishes(&bed);
    suspends(&bed);
    drop(manager);
    survives_its_manager(&bed);
    goes(&bed);
    for job in ["steady", "castaway"] {
        assert!(!bed.kept(job).join("TWICE").exists(), "two attempts of {job} lived at once");
    }
}

fn mistakes_are_answered_with_help(bed: &Bed) {
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
fn ends(bed: &Bed) {
    let reaching = bed.until("reaching", "Failed", None);
    assert!(reaching["status"]["message"].as_str().unwrap().contains("use a claim"), "{reaching:#}");
    let hopeless = bed.until("hopeless", "Failed", None);
    assert!(hopeless["status"]["message"].as_str().unwrap().contains("exit code 3"), "{hopeless:#}");
    assert_eq!(hopeless["status"]["failures"], 2);
    assert!(eventually(|| bed.get("trainingjob", "brief").is_none().then_some(())).is_some(), "its time is over");
    let foreign = bed.job("foreign");
    assert!(foreign["metadata"]["finalizers"].is_null() && foreign["status"].is_null(), "{foreign:#}");
    assert!(eventually(|| bed.get("pod", "hopeless-2").is_none().then_some(())).is_some(), "cleanPodPolicy is All");
}

/// Jobs that cannot be moved run on where they are, and say why.
fn stays(bed: &Bed) {
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
        let looked = eventually(|| {
            let job = bed.job(name);
            let said = job["status"]["message"].as_str().unwrap_or_default().contains(why);
            (said && job["status"]["state"] == "Running" && job["status"]["attempt"]["epoch"] == epoch).then_some(job)
        });
        let job = looked.unwrap_or_else(|| panic!("{name}: {:#}", bed.job(name)["status"]));
        assert_eq!((&job["status"]["attempt"]["node"], &job["status"]["moves"]), (&json!("left"), &json!(0)), "{name}");
        assert_eq!(job["status"]["failures"], 0, "{name}: nobody failed");
    }
}

/// A node falls silent in the middle of a move, and is then taken away.
fn vanishes(bed: &Bed) {
    bed.until("castaway", "Running", Some("left"));
    bed.send_to("castaway", "far");
    bed.until("castaway", "Running", Some("far"));
    assert!(testbed(&["kill", "kubelet-far"]).status.success());
    bed.send_to("castaway", "right");
    bed.until("castaway", "Migrating", Some("far"));
    std::thread::sleep(Duration::from_secs(3));
    assert!(bed.get("pod", "castaway-3").is_none(), "nothing is started while the stop is not proven");
    // Now it is really off.
    kill_holders(&bed.kept("castaway").join("held"));
    fs::remove_dir(bed.kept("castaway").join("alive")).unwrap();
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
            // One that ends by itself meanwhile (a sleep of the script) is no loss.
            let done = Command::new("kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status().unwrap();
            killed += usize::from(done.success());
        }
    }
    assert!(killed > 0, "nobody holds {}", file.display());
}

fn suspends(bed: &Bed) {
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

/// The manager is killed at every step of a move, the last step first, so that each manager finishes what the one before it began.
fn survives_its_manager(bed: &Bed) {
    let points = [
        "before-running",
        "after-open",
        "after-placed",
        "after-create",
        "after-stopped",
        "after-delete",
        "after-stopping",
        "before-stopping",
    ];
    let mut node = bed.job("steady")["status"]["attempt"]["node"].as_str().unwrap().to_owned();
    let before = bed.job("steady")["status"]["moves"].as_u64().unwrap();
    for point in points {
        let mut manager = Manager::start(bed, Some(point));
        bed.until("steady", "Running", Some(&node));
        node = if node == "left" { "right".to_owned() } else { "left".to_owned() };
        bed.send_to("steady", &node);
        manager.died();
    }
    let _manager = Manager::start(bed, None);
    let job = bed.until("steady", "Running", Some(&node));
    assert_eq!(job["status"]["moves"].as_u64().unwrap() - before, points.len() as u64, "{:#}", job["status"]);
    assert_eq!(job["status"]["failures"], 0);
    // Its count never went back, and no attempt began from nothing.
    let log = fs::read_to_string(bed.kept("steady").join("log")).unwrap();
    let counts: Vec<u64> = log.lines().filter_map(|line| line.rsplit_once(' ')?.1.parse().ok()).collect();
    assert_eq!(counts.len() as u64, job["status"]["attempt"]["epoch"].as_u64().unwrap(), "{log}");
    assert!(counts.windows(2).all(|pair| pair[0] < pair[1]), "{log}");
}

/// A deleted job takes its pods along, and lets them save themselves.
fn goes(bed: &Bed) {
    let _manager = Manager::start(bed, None);
    let step = || fs::read_to_string(bed.kept("steady").join("step")).unwrap().trim().parse::<u64>().unwrap();
    let before = step();
    bed.kubectl(&["delete", "trainingjob", "steady", "-n", "team", "--timeout=30s"]);
    assert!(step() > before, "it was not asked to save itself");
    let gone = || {
        let pods = bed.kubectl(&["get", "pods", "-n", "team", "-l", "gainshare.dev/job=steady", "-o", "name"]);
        pods.trim().is_empty().then_some(())
    };
    assert!(eventually(gone).is_some(), "its pods are held");
}
