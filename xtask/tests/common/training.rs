//! Training jobs for tests: the chart's rights, a volume that all nodes see, the real manager, and jobs that count.

use super::{Bed, SYSTEM, text, within_a_minute};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Counts ten times a second, and keeps the count. By the file that descriptor 9 has open its processes can be found.
pub(crate) const COUNTS: &str = r#"
cd "$GAINSHARE_CHECKPOINT_DIR" || exit 1
exec 9>held; mkdir alive || touch TWICE
i=$(cat step 2>/dev/null || echo 0)
echo "attempt $GAINSHARE_ATTEMPT resumed at $i" >> log
trap 'echo $i > step.new; mv step.new step; rmdir alive; exit 143' TERM
while :; do i=$((i+1)); sleep 0.1; done
"#;

impl Bed {
    /// A cluster with these nodes, of 0.6 cores each, and all that training jobs need.
    pub(crate) fn with_training(name: &'static str, nodes: &[&str]) -> Bed {
        let nodes: Vec<String> = nodes.iter().map(|node| format!("{node}=0.6")).collect();
        let args: Vec<&str> = nodes.iter().flat_map(|node| ["--node", node]).collect();
        let bed = Bed::up(name, &args);
        bed.prepare();
        bed
    }

    fn prepare(&self) {
        for namespace in [SYSTEM, "team"] {
            self.kubectl(&["create", "namespace", namespace]);
        }
        let chart = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart");
        let chart = chart.to_str().unwrap();
        self.kubectl(&["apply", "-f", &format!("{chart}/crds")]);
        let shown = ["accounts", "rbac", "admission"].map(|part| format!("templates/{part}.yaml"));
        let mut args = vec!["template", "gainshare", chart, "-n", SYSTEM, "--kube-version", "1.35.0"];
        shown.iter().for_each(|part| args.extend(["--show-only", part]));
        let rendered = self.output("helm", &args, "");
        assert!(rendered.status.success(), "{}", text(&rendered.stderr));
        self.apply(text(&rendered.stdout));
        self.kubectl(&["wait", "--for=condition=Established", "crd/trainingjobs.gainshare.dev", "--timeout=30s"]);

        // A folder of the machine, which all nodes of the test bed see.
        let claim = self.folder.path().join("claim");
        fs::create_dir(&claim).unwrap();
        let size = json!({"storage": "1Gi"});
        self.apply(json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "shared"},
            "spec": {"capacity": size, "accessModes": ["ReadWriteMany"], "hostPath": {"path": claim}, "storageClassName": "none"},
        }));
        self.apply(json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared", "namespace": "team"},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": size}, "storageClassName": "none", "volumeName": "shared"},
        }));
        self.kubectl(&["wait", "--for=jsonpath={.status.phase}=Bound", "pvc/shared", "-n", "team", "--timeout=60s"]);

        let token = self.kubectl(&["create", "token", "gainshare-manager", "-n", SYSTEM]);
        let mut config: Value =
            serde_json::from_str(&self.kubectl(&["config", "view", "--raw", "-o", "json"])).unwrap();
        config["users"][0]["user"] = json!({"token": token.trim()});
        fs::write(self.folder.path().join("manager.kubeconfig"), config.to_string()).unwrap();
    }

    pub(crate) fn job(&self, name: &str) -> Value {
        self.find("trainingjob", name).unwrap_or_default()
    }

    /// What `kubectl gainshare` says.
    pub(crate) fn plugin(&self, args: &[&str]) -> String {
        let mut command = Command::new(program());
        command.arg0("kubectl-gainshare").args(args).args(["-n", "team"]).env("KUBECONFIG", &self.kubeconfig);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// What the manager has noted on a Job of the cluster's own kind.
    pub(crate) fn adopted(&self, name: &str) -> Value {
        let job = self.get("job", name);
        let text = job["metadata"]["annotations"]["gainshare.dev/adopted"].as_str().unwrap_or("null");
        serde_json::from_str(text).unwrap()
    }

    /// The folder of a job on the shared volume.
    pub(crate) fn kept(&self, job: &str) -> PathBuf {
        self.folder.path().join("claim").join(job)
    }

    /// The counts at which the attempts of a job that runs [`COUNTS`] began.
    pub(crate) fn resumed_at(&self, job: &str) -> Vec<u64> {
        let log = fs::read_to_string(self.kept(job).join("log")).unwrap();
        log.lines().filter_map(|line| line.rsplit_once(' ')?.1.parse().ok()).collect()
    }

    /// Sends a job (`trainingjob/NAME` or `job/NAME`) to a node.
    pub(crate) fn send(&self, job: &str, node: &str) {
        let wish = format!("gainshare.dev/node={node}");
        self.kubectl(&["annotate", "--overwrite", job, "-n", "team", &wish]);
    }

    pub(crate) fn send_to(&self, job: &str, node: &str) {
        self.send(&format!("trainingjob/{job}"), node);
    }

    /// Waits until the job is in a state, perhaps on a node, and answers it.
    pub(crate) fn until(&self, name: &str, state: &str, node: Option<&str>) -> Value {
        let mut last = Value::Null;
        let looked = within_a_minute(|| {
            last = self.job(name);
            let there = node.is_none_or(|node| last["status"]["attempt"]["node"] == node);
            (last["status"]["state"] == state && there).then_some(())
        });
        assert!(looked.is_some(), "{name} is not {state} on {node:?} after a minute: {:#}", last["status"]);
        last
    }
}

/// The program that was built with the tests.
pub(crate) fn program() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("gainshare")
}

/// The real program, as the chart's account.
pub(crate) struct Manager(Child);

impl Manager {
    pub(crate) fn start(bed: &Bed, fail_at: Option<&str>) -> Manager {
        Manager::with(bed, fail_at, &[])
    }

    pub(crate) fn with(bed: &Bed, fail_at: Option<&str>, args: &[&str]) -> Manager {
        // A manager that died holds its lease for a quarter of a minute; nobody else is there to be careful about.
        bed.kubectl(&["delete", "lease", "gainshare-manager", "-n", SYSTEM, "--ignore-not-found"]);
        let log = fs::File::options().create(true).append(true).open(bed.folder.path().join("manager.log")).unwrap();
        let mut command = Command::new(program());
        command.args(["operator", "--namespace", SYSTEM, "--listen", &bed.listen, "--plain-listen", "127.0.0.1:0"]);
        command.arg("--authority").arg(bed.folder.path().join("authority")).args(args);
        command.env("KUBECONFIG", bed.folder.path().join("manager.kubeconfig")).stderr(log).stdin(Stdio::null());
        command.envs(fail_at.map(|point| ("GAINSHARE_FAIL_AT", point)));
        Manager(command.spawn().expect("the program was built with the tests"))
    }

    /// It ended at its fail point.
    pub(crate) fn died(&mut self) {
        let code = within_a_minute(|| self.0.try_wait().unwrap());
        assert_eq!(code.and_then(|code| code.code()), Some(86), "the manager did not reach its fail point");
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A container that runs this script, can be watched, and asks for little.
fn container(name: &str, script: &str) -> Value {
    json!({
        "name": "main", "image": "busybox:local", "imagePullPolicy": "Never", "command": ["sh", "-c", script],
        "env": [{"name": "WATCHED_JOB", "value": name}],
        "resources": {"requests": {"cpu": "50m", "memory": "16Mi"}},
    })
}

/// A TrainingJob that begins on the node `left`; `more` replaces fields of its spec, null takes them away.
pub(crate) fn job(name: &str, script: &str, more: Value) -> String {
    let mut spec = json!({
        "template": {"spec": {"containers": [container(name, script)]}},
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

/// A Job of the cluster's own kind that keeps its count on the same volume, and may be moved.
pub(crate) fn batch_job(name: &str, script: &str, replacement: &str) -> Value {
    let mut container = container(name, script);
    let folder = json!({"name": "GAINSHARE_CHECKPOINT_DIR", "value": "/keep"});
    container["env"].as_array_mut().unwrap().push(folder);
    container["volumeMounts"] = json!([{"name": "keep", "mountPath": "/keep", "subPath": name}]);
    json!({
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": name, "namespace": "team", "annotations": {"gainshare.dev/adopt": "true"}},
        "spec": {"podReplacementPolicy": replacement, "backoffLimit": 0, "template": {"spec": {
            "restartPolicy": "Never", "containers": [container],
            "volumes": [{"name": "keep", "persistentVolumeClaim": {"claimName": "shared"}}],
        }}},
    })
}
