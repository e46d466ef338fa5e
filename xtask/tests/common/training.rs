//! Training jobs for tests: the chart's rights, a volume that all nodes see, the real operator, and jobs that count.

use super::{FaultTally, SYSTEM, TestBed, checkout, eventually, program, text, within_a_minute};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// A job that counts ten times a second and saves its count. Its processes are those that have the file
/// `held` open as descriptor 9. Its log has a line for each start and for each save.
pub(crate) const COUNTS: &str = r#"
cd "$GAINSHARE_CHECKPOINT_DIR" || exit 1
exec 9>held; mkdir alive || touch TWICE
i=$(cat step 2>/dev/null || echo 0)
echo "attempt $GAINSHARE_ATTEMPT resumed at $i" >> log
trap 'echo $i > step.new; mv step.new step; echo "attempt $GAINSHARE_ATTEMPT saved $i" >> log; rmdir alive; exit 143' TERM
while :; do i=$((i+1)); sleep 0.1; done
"#;

impl TestBed {
    /// A cluster with these nodes, of 0.6 cores each or as in `left=1.5`, and all that training jobs need.
    pub(crate) fn with_training(name: &'static str, nodes: &[&str]) -> TestBed {
        let sized = |node: &&str| if node.contains('=') { (*node).to_owned() } else { format!("{node}=0.6") };
        let nodes: Vec<String> = nodes.iter().map(sized).collect();
        let args: Vec<&str> = nodes.iter().flat_map(|node| ["--node", node]).collect();
        let bed = TestBed::up(name, &args);
        bed.prepare();
        bed
    }

    /// A cluster with this many make-believe nodes, and all that training jobs need.
    pub(crate) fn with_kwok_training(name: &'static str, nodes: u32) -> TestBed {
        let bed = TestBed::up(name, &["--nodes", "0", "--kwok", &nodes.to_string()]);
        bed.prepare();
        bed
    }

    fn prepare(&self) {
        for namespace in [SYSTEM, "team"] {
            self.kubectl(&["create", "namespace", namespace]);
        }
        self.kubectl(&["label", "namespace", "team", "gainshare.dev/jobs=enabled"]);
        let chart = checkout().join("deploy/chart");
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
        self.claim("shared", &claim);

        self.kubeconfig_of("operator");
    }

    /// Writes a kubeconfig with a token of the account `gainshare-PART`.
    pub(crate) fn kubeconfig_of(&self, part: &str) -> PathBuf {
        let token = self.kubectl(&["create", "token", &format!("gainshare-{part}"), "-n", SYSTEM]);
        let mut config: Value =
            serde_json::from_str(&self.kubectl(&["config", "view", "--raw", "-o", "json"])).unwrap();
        config["users"][0]["user"] = json!({"token": token.trim()});
        let path = self.folder.path().join(format!("{part}.kubeconfig"));
        fs::write(&path, config.to_string()).unwrap();
        path
    }

    /// Applies the chart's objects with its value for placeholders, and the ConfigMap that owns them. Placeholders run
    /// the image `gainshare:local`.
    pub(crate) fn serve_scaler(&self) {
        let chart = checkout().join("deploy/chart");
        let chart = chart.to_str().unwrap();
        let mut args = vec!["template", "gainshare", chart, "-n", SYSTEM, "--kube-version", "1.35.0"];
        args.extend(["--set", "scaler.enabled=true", "--set", "image.tag=local"]);
        let shown = ["rbac", "admission", "scaler"].map(|part| format!("templates/{part}.yaml"));
        shown.iter().for_each(|part| args.extend(["--show-only", part]));
        self.apply(self.run("helm", &args, ""));
        self.kubectl(&["create", "configmap", "gainshare-operator", "-n", SYSTEM]);
    }

    /// Applies the chart's objects with its value for TFJobs.
    pub(crate) fn serve_tfjobs(&self) {
        let chart = checkout().join("deploy/chart");
        let chart = chart.to_str().unwrap();
        let mut args = vec!["template", "gainshare", chart, "-n", SYSTEM, "--kube-version", "1.35.0"];
        args.extend(["--set", "tfjob.enabled=true"]);
        let shown = ["rbac", "admission", "tfjob"].map(|part| format!("templates/{part}.yaml"));
        shown.iter().for_each(|part| args.extend(["--show-only", part]));
        self.apply(self.run("helm", &args, ""));
        self.kubectl(&["wait", "--for=condition=Established", "crd/tfjobs.kubeflow.org", "--timeout=30s"]);
    }

    /// Gives every node the image `gainshare:local` with the programs of this build.
    pub(crate) fn load_programs(&self) {
        let programs = programs();
        let mut load = vec!["load-image", "--image", "gainshare:local"];
        load.extend(programs.iter().map(|program| program.to_str().unwrap()));
        let loaded = self.testbed(&load);
        assert!(loaded.status.success(), "{}", text(&loaded.stderr));
    }

    /// Starts node agents on all nodes from the chart. They reach the operators of this test by the name of the chart's
    /// Service. The operators keep their certificate authority, so that agents trust the next one at once.
    pub(crate) fn start_agents(&mut self) {
        self.load_programs();
        fs::create_dir_all(self.folder.path().join("authority")).unwrap();
        self.kubectl(&["create", "configmap", "gainshare-operator", "-n", SYSTEM]);
        self.listen = self.address(SYNC_PORT);
        let service = json!({"name": "gainshare-operator", "namespace": SYSTEM});
        let ports = json!([{"name": "sync", "port": SYNC_PORT, "protocol": "TCP"}]);
        self.apply(json!({"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": {"ports": ports}}));
        self.serve_at(SYNC_PORT);
        let _operator = Operator::start(self, None);
        let certificate = || {
            let map = self.kubectl(&["get", "configmap", "gainshare-operator", "-n", SYSTEM, "-o", "jsonpath={.data}"]);
            map.contains("ca.crt").then_some(())
        };
        eventually("the operator's certificate", certificate);
        self.apply_agents(&[]);
    }

    /// Applies the chart's node agents, with these values of the chart, and waits until they are ready.
    pub(crate) fn apply_agents(&self, values: &[&str]) {
        // Nodes of the test bed are smaller than the limit of the agents, and the kernel refuses that.
        let own = ["image.repository=gainshare", "image.tag=local", "agent.resources.limits.cpu=null"];
        self.apply(self.chart_part("agent", &[&own, values].concat()));
        self.wait_for_agents();
    }

    /// One template of the chart with these values.
    pub(crate) fn chart_part(&self, part: &str, values: &[&str]) -> String {
        let chart = checkout().join("deploy/chart");
        let (template, values) = (format!("templates/{part}.yaml"), values.join(","));
        let mut args = vec!["template", "gainshare", chart.to_str().unwrap(), "-n", SYSTEM];
        args.extend(["--kube-version", "1.35.0", "--show-only", &template, "--set", &values]);
        self.run("helm", &args, "")
    }

    /// Waits until all node agents are new and ready.
    pub(crate) fn wait_for_agents(&self) {
        self.kubectl(&["rollout", "status", "daemonset/gainshare-agent", "-n", SYSTEM, "--timeout=120s"]);
    }

    /// An address at which an operator of this machine can be reached from the cluster.
    pub(crate) fn address(&self, port: u16) -> String {
        format!("{}:{port}", self.machine())
    }

    /// Makes the Service lead to the operator at this port.
    pub(crate) fn serve_at(&self, port: u16) {
        let named = json!({
            "name": "gainshare-operator", "namespace": SYSTEM,
            "labels": {"kubernetes.io/service-name": "gainshare-operator"},
        });
        self.apply(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": named, "addressType": "IPv4",
            "ports": [{"name": "sync", "port": port, "protocol": "TCP"}],
            "endpoints": [{"addresses": [self.machine()], "conditions": {"ready": true}}],
        }));
    }

    /// The end of what the operators have logged, for the report of a failure.
    pub(crate) fn operator_log(&self) -> String {
        let log = fs::read_to_string(self.folder.path().join("operator.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// Makes a folder of the machine a volume of the namespace `team`.
    pub(crate) fn claim(&self, name: &str, folder: &Path) {
        let size = json!({"storage": "1Gi"});
        self.apply(json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {"capacity": size, "accessModes": ["ReadWriteMany"], "hostPath": {"path": folder}, "storageClassName": "none"},
        }));
        self.apply(json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "team"},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": size}, "storageClassName": "none", "volumeName": name},
        }));
        let claim = format!("pvc/{name}");
        self.kubectl(&["wait", "--for=jsonpath={.status.phase}=Bound", &claim, "-n", "team", "--timeout=60s"]);
    }

    pub(crate) fn job(&self, name: &str) -> Value {
        self.find("trainingjob", name).unwrap_or_default()
    }

    /// Runs `kubectl gainshare` and returns what it prints.
    pub(crate) fn plugin(&self, args: &[&str]) -> String {
        let mut command = Command::new(program("kubectl-gainshare"));
        command.args(args).args(["-n", "team"]).env("KUBECONFIG", &self.kubeconfig);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// What the operator has noted on a Job of the cluster's own kind.
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
        log.lines().filter_map(|line| line.split_once(" resumed at ")?.1.parse().ok()).collect()
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
        let found = within_a_minute(|| {
            last = self.job(name);
            let there = node.is_none_or(|node| last["status"]["attempt"]["node"] == node);
            (last["status"]["state"] == state && there).then_some(())
        });
        assert!(found.is_some(), "{name} is not {state} on {node:?} after a minute: {:#}", last["status"]);
        last
    }
}

/// All programs of an image, the entry point first, and the library that pods load.
pub(crate) fn programs() -> Vec<PathBuf> {
    let names = ["gainshare", "gainshare-operator", "gainshare-node-agent", "kubectl-gainshare"];
    names.into_iter().chain(["libgainshare_inside.so"]).map(program).collect()
}

/// The port of the Service at which node agents reach the operator.
pub(crate) const SYNC_PORT: u16 = 8443;

/// The real program with the rights of the chart's account.
pub(crate) struct Operator(Child);

impl Operator {
    pub(crate) fn start(bed: &TestBed, fail_at: Option<&str>) -> Operator {
        Operator::with(bed, fail_at, &[])
    }

    pub(crate) fn with(bed: &TestBed, fail_at: Option<&str>, args: &[&str]) -> Operator {
        // An operator that was killed holds its lease for 15 s, and no other operator runs here.
        bed.kubectl(&["delete", "lease", "gainshare-operator", "-n", SYSTEM, "--ignore-not-found"]);
        Operator::spawn(bed, &bed.listen, fail_at, args)
    }

    /// A second operator, which leads when the first one does not.
    pub(crate) fn standby(bed: &TestBed) -> Operator {
        Operator::standby_at(bed, &bed.listen)
    }

    /// The same, at an address of its own.
    pub(crate) fn standby_at(bed: &TestBed, listen: &str) -> Operator {
        Operator::spawn(bed, listen, None, &[])
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// Whether it stands still (SIGSTOP).
    pub(crate) fn is_stopped(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('T'))
    }

    fn spawn(bed: &TestBed, listen: &str, fail_at: Option<&str>, args: &[&str]) -> Operator {
        let log = fs::File::options().create(true).append(true).open(bed.folder.path().join("operator.log")).unwrap();
        let mut command = Command::new(program("gainshare-operator"));
        command.args(["--namespace", SYSTEM, "--listen", listen]);
        if !args.contains(&"--plain-listen") {
            command.args(["--plain-listen", "127.0.0.1:0"]);
        }
        command.arg("--authority").arg(bed.folder.path().join("authority")).args(args);
        command.env("KUBECONFIG", bed.folder.path().join("operator.kubeconfig")).stderr(log).stdin(Stdio::null());
        command.envs(fail_at.map(|point| ("GAINSHARE_FAIL_AT", point)));
        Operator(command.spawn().expect("the program was built with the tests"))
    }

    /// Waits until it has ended, and answers its exit code.
    pub(crate) fn ended(&mut self) -> Option<i32> {
        within_a_minute(|| self.0.try_wait().unwrap())?.code()
    }

    /// Asks it to end, as a cluster does when it replaces a pod, and waits for that.
    pub(crate) fn end(mut self) {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        assert_eq!(self.ended(), Some(0), "an operator that was asked to end did not");
    }

    /// Waits until it has ended at its fail point.
    pub(crate) fn died(&mut self) {
        assert_eq!(self.ended(), Some(86), "the operator did not reach its fail point");
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Operators die before and after each of these writes, one after the other. `begin` leads the first of them there.
/// Returns the last operator, which completes what the others began, and when it was started.
pub(crate) fn dies_around(
    bed: &TestBed,
    writes: &[&str],
    tally: &mut FaultTally,
    begin: impl Fn(),
) -> (Operator, Instant) {
    let points = writes.iter().flat_map(|write| [format!("before-{write}"), format!("after-{write}")]);
    for (number, point) in points.enumerate() {
        let mut operator = Operator::start(bed, Some(&point));
        if number == 0 {
            begin();
        }
        let code = operator.ended();
        assert_eq!(code, Some(86), "the operator did not reach {point}\n{}", bed.operator_log());
        tally.inject(1);
    }
    (Operator::start(bed, None), Instant::now())
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
