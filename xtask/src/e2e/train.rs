//! Training pods: sized for this machine, made the way people make them.

use super::kube::{Kube, PAUSE, Pod, log_lines, unix_s, wait_every};
use crate::sh;
use crate::testbed::BUSYBOX;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub(super) const IMAGE: &str = "gainshare:local";
/// What every training pod requests.
pub(super) const REQUEST_MILLI: u64 = 200;
/// The label that the policy selects.
pub(super) const LABEL: &str = "story=kube-share";

/// How a pod comes to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Maker {
    /// Created by hand.
    Plain,
    /// A Job of the batch API.
    Job,
    /// Created by a controller of a kind that Gainshare does not know.
    Unknown,
}

/// One training run.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) name: &'static str,
    pub(super) maker: Maker,
    pub(super) arrives_s: f64,
    pub(super) work: Work,
}

/// What a pod does.
#[derive(Debug, Clone)]
pub(super) enum Work {
    /// A built-in trainer with these words after `gainshare`.
    Train(Vec<String>),
    /// A shell script that burns and prints.
    Script(&'static str),
    /// A shell script that prints nothing, and writes its progress to `path` in a volume at `/out`.
    Writes { script: &'static str, path: &'static str },
}

/// How long a run took, and how often it was restarted.
#[derive(Debug, Clone)]
pub(super) struct RunResult {
    pub(super) name: &'static str,
    pub(super) seconds: f64,
    pub(super) restarts: u64,
}

/// What the last run has to do, in seconds of a whole core.
const LAST_WORK_S: f64 = 8.0;

/// The three runs: one early and long, two later and shorter. `work_s` is all their work, in seconds of a whole core.
pub(super) fn schedule(program: &Path, work_s: f64) -> Result<Vec<Run>> {
    // About the proportions of FlowCon's own experiment with three models. The last comes when the others
    // are flat, learns slowly and is short, so that it grows to its end.
    let last = LAST_WORK_S / work_s;
    let runs = [
        ("early", Maker::Plain, "vae", "0.001", 0.0, 0.7 * (1.0 - last)),
        ("second", Maker::Job, "mlp", "0.001", 0.08, 0.3 * (1.0 - last)),
        ("last", Maker::Unknown, "mlp", "0.00005", 0.35, last),
    ];
    runs.into_iter()
        .map(|(name, maker, model, rate_of_learning, arrives, part)| {
            let rate = steps_per_second(program, model)?;
            let steps = ((rate * work_s * part) as u64).max(50);
            // Five reports a second on an idle core.
            let every = ((rate / 5.0) as u64).max(1);
            let (steps, every) = (steps.to_string(), every.to_string());
            let words = ["train", model, "--lr", rate_of_learning, "--steps", &steps, "--report-every", &every];
            let work = Work::Train(words.map(str::to_owned).to_vec());
            Ok(Run { name, maker, arrives_s: arrives * work_s, work })
        })
        .collect()
}

/// Steps of a model in a second of CPU time, so that a busy machine does not make the runs small.
pub(super) fn steps_per_second(program: &Path, model: &str) -> Result<f64> {
    let cpu_s = |steps: u64| {
        let mut train = Command::new(program);
        train.args(["train", model, "--steps", &steps.to_string(), "--report-every", "1000000"]);
        sh::cpu_s(train.stdout(Stdio::null()).stderr(Stdio::null()))
    };
    let mut steps = 40;
    loop {
        // The difference leaves the start of the program out.
        let spent = cpu_s(steps)? - cpu_s(steps / 4)?;
        if spent > 0.3 || steps > 1_000_000 {
            return Ok((steps - steps / 4) as f64 / spent.max(1e-3));
        }
        steps *= 4;
    }
}

/// The kind of a third party: nothing but its definition exists, as far as we are concerned.
pub(super) fn unknown_kind() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": "trainruns.example.org" },
        "spec": {
            "group": "example.org",
            "scope": "Namespaced",
            "names": { "kind": "TrainRun", "plural": "trainruns", "singular": "trainrun" },
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": { "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } },
            }],
        },
    })
}

fn template(work: &Work, node: &str) -> Value {
    let (image, command, args) = match work {
        Work::Train(words) => (IMAGE, json!(null), json!(words)),
        Work::Script(script) | Work::Writes { script, .. } => (BUSYBOX, json!(["/bin/sh", "-c", script]), json!(null)),
    };
    let notes = match work {
        Work::Writes { path, .. } => json!({ "gainshare.dev/collector": "file", "gainshare.dev/path": path }),
        _ => json!({}),
    };
    json!({
        "metadata": { "labels": { "story": "kube-share" }, "annotations": notes },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": { "kubernetes.io/hostname": node },
            "containers": [{
                "name": "train",
                "image": image,
                "imagePullPolicy": "Never",
                "command": command,
                "args": args,
                "resources": { "requests": { "cpu": format!("{REQUEST_MILLI}m"), "memory": "64Mi" } },
                "volumeMounts": [{ "name": "out", "mountPath": "/out" }],
            }],
            "volumes": [{ "name": "out", "emptyDir": {} }],
        },
    })
}

/// Creates a run's pod in the way of its maker.
pub(super) fn start(kube: &Kube, namespace: &str, node: &str, run: &Run) -> Result<()> {
    let mut pod = template(&run.work, node);
    let name = json!(run.name);
    match run.maker {
        Maker::Plain | Maker::Unknown => {
            pod["apiVersion"] = json!("v1");
            pod["kind"] = json!("Pod");
            pod["metadata"]["name"] = name.clone();
            pod["metadata"]["namespace"] = json!(namespace);
            if run.maker == Maker::Unknown {
                let owner = json!({
                    "apiVersion": "example.org/v1", "kind": "TrainRun",
                    "metadata": { "name": name, "namespace": namespace },
                });
                let uid = kube.create(&owner)?["metadata"]["uid"].clone();
                pod["metadata"]["ownerReferences"] = json!([{
                    "apiVersion": "example.org/v1", "kind": "TrainRun", "name": name, "uid": uid, "controller": true,
                }]);
            }
            kube.create(&pod)?;
        }
        Maker::Job => {
            let job = json!({
                "apiVersion": "batch/v1", "kind": "Job",
                "metadata": { "name": name, "namespace": namespace },
                "spec": { "backoffLimit": 0, "template": pod },
            });
            kube.create(&job)?;
        }
    }
    Ok(())
}

/// The pod of a run: its own name, or the Job's with something behind it.
pub(super) fn pod_of<'p>(pods: &'p [Pod], run: &str) -> Option<&'p Pod> {
    pods.iter().find(|p| p.name() == run || p.name().strip_prefix(run).is_some_and(|rest| rest.starts_with('-')))
}

/// Plays the schedule in a namespace and waits for the end of the last run.
pub(super) fn play(
    kube: &Kube,
    namespace: &str,
    node: &str,
    runs: &[Run],
    patience: Duration,
) -> Result<Vec<RunResult>> {
    let began = Instant::now();
    let mut created = Vec::new();
    for run in runs {
        let due = Duration::from_secs_f64(run.arrives_s);
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        created.push(unix_s());
        start(kube, namespace, node, run)?;
        eprintln!("e2e: {:5.1} s: {} came", began.elapsed().as_secs_f64(), run.name);
    }
    let pods = wait_every(PAUSE, "the end of the runs", patience, || {
        let pods = kube.pods(namespace, LABEL)?;
        for run in runs {
            let pod = pod_of(&pods, run.name).with_context(|| format!("{} has no pod", run.name))?;
            match pod.phase() {
                "Succeeded" => {}
                "Failed" => bail!("{} failed: see {}", run.name, pod.log_file(kube).display()),
                phase => bail!("{} is {phase}", run.name),
            }
        }
        Ok(pods)
    })?;
    let mut took = Vec::new();
    for (run, created) in runs.iter().zip(created) {
        let pod = pod_of(&pods, run.name).context("it was there a moment ago")?;
        let lines = log_lines(&pod.log_file(kube))?;
        let (ended, _) = lines.last().with_context(|| format!("{} printed nothing", run.name))?;
        eprintln!("e2e: {} took {:.1} s", run.name, ended - created);
        took.push(RunResult { name: run.name, seconds: ended - created, restarts: pod.restarts() });
    }
    Ok(took)
}
