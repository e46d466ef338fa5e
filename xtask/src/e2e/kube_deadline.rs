//! `cargo xtask e2e kube-deadline`: real training pods with deadlines on a real cluster, once as Kubernetes itself
//! shares a node, and once under `qos`.
//!
//! In the first round no SharePolicy selects the pods: they compete with the requests that they have. Gainshare is
//! installed all the same, so that both rounds have the same programs beside them.
//!
//! The mix of [`super::deadline`] runs on one node with one core; the operator runs on another one. Deadlines are
//! annotations of plain pods. What Gainshare publishes is read from the pods' notes twice a second: predicted
//! ends, and how deadlines stand. Ends are those of the pods' logs.

use super::StoryArgs;
use super::deadline::{DeadlineFigures, JobResult, Machine, MixJob, Round, Sample, Use, mix};
use super::kube::{Kube, Pod, log_lines, unix_s, wait_for};
use super::kube_share::install;
use super::local_deadline::idle_of_core_s;
use super::train::IMAGE;
use crate::programs::Programs;
use crate::testbed::{Spec, Testbed, numbers};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The node where the pods train; the operator runs on the other one.
const NODE: &str = "train";
const OTHER: &str = "other";
/// What every training pod requests: together less than the node, so that every pod finds room when it comes.
const REQUEST: &str = "40m";
const LABEL: &str = "story=kube-deadline";
/// A progress bar has no line ends, so container runtimes keep it back. The total is in the command.
const FORMAT: &str = "kv";
/// About how long a round takes on an idle node. Pods start within seconds and resizes take effect within seconds, so
/// rounds are longer than those on one machine.
const HORIZON_S: f64 = 150.0;
const SHORT_HORIZON_S: f64 = 60.0;
/// The round without a SharePolicy.
const PLAIN: &str = "kubernetes";
/// Between two readings of the pods.
const PACE: Duration = Duration::from_millis(500);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rounds of about a minute. Deadlines met are printed, and not judged.
    #[arg(long)]
    short: bool,
    /// Leave the cluster up, to look around.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    story: StoryArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let programs = args.story.programs()?;
    let testbed = Testbed::up(&Spec::new("kube-deadline", &[(NODE, 1.0), (OTHER, 0.6)])?)?;
    let kube = Kube { testbed };
    let report = measure(&kube, args, &programs);
    kube.end(args.keep)?;
    let report = report?;
    args.story.print(&report, DeadlineFigures::print)?;
    report.check(args.short)
}

fn measure(kube: &Kube, args: &Args, programs: &Programs) -> Result<DeadlineFigures> {
    let began = Instant::now();
    kube.testbed.load_image(&programs.files(), IMAGE)?;
    let node = format!("operator.nodeSelector.kubernetes\\.io/hostname={OTHER}");
    install(kube, &["--set", &node])?;
    namespace(kube, "calibration")?;
    let machine = Machine::measure_together(&programs.gainshare(), |all| calibrate(kube, all))?;
    eprintln!("e2e: the node gives {:.2} of a core", machine.core);
    let jobs = mix(&machine, if args.short { SHORT_HORIZON_S } else { HORIZON_S });
    let default = play(kube, PLAIN, None, &jobs)?;
    let qos = play(kube, "qos", Some("qos"), &jobs)?;
    let impossible: Vec<&str> = jobs.iter().filter(|j| !j.feasible).map(|j| j.name).collect();
    warned_by_event(kube, &impossible)?;
    Ok(DeadlineFigures::new(machine, [default, qos], Vec::new(), began.elapsed().as_secs_f64()))
}

fn namespace(kube: &Kube, name: &str) -> Result<()> {
    kube.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }))
}

fn create(kube: &Kube, namespace: &str, name: &str, words: &[String], due: Option<String>) -> Result<()> {
    let (key, value) = LABEL.split_once('=').context("a label has a value")?;
    let notes = due.map_or(json!({}), |due| json!({ "gainshare.dev/deadline": due }));
    kube.create(&json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": namespace, "labels": { key: value }, "annotations": notes },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": { "kubernetes.io/hostname": NODE },
            "containers": [{
                "name": "train",
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "args": words,
                "resources": { "requests": { "cpu": REQUEST, "memory": "32Mi" } },
            }],
        },
    }))?;
    Ok(())
}

/// Runs pods beside each other on the node, and returns the last line of each.
fn calibrate(kube: &Kube, all: &[Vec<String>]) -> Result<Vec<String>> {
    let names: Vec<String> = (1..=all.len()).map(|number| format!("calibration-{number}")).collect();
    for (name, words) in names.iter().zip(all) {
        create(kube, "calibration", name, words, None)?;
    }
    wait_for("the end of the calibration", Duration::from_secs(300), || {
        let pods = kube.pods("calibration", LABEL)?;
        let last_line = |name: &String| {
            let pod = pods.iter().find(|pod| pod.name() == name).with_context(|| format!("{name} is gone"))?;
            ensure!(pod.phase() == "Succeeded", "{name} is {}", pod.phase());
            let lines = log_lines(&pod.log_file(kube))?;
            let line = lines.into_iter().rev().find(|(_, line)| line.contains(" steps in "));
            Ok(line.with_context(|| format!("{name} has no last line"))?.1)
        };
        names.iter().map(last_line).collect()
    })
}

/// What is known of one pod while the round is played.
#[derive(Default)]
struct Track {
    arrived_s: f64,
    due_s: Option<f64>,
    warned_s: Option<f64>,
    samples: Vec<Sample>,
}

impl Track {
    fn observe(&mut self, pod: &Pod) {
        let now_s = unix_s();
        let note = pod.annotation("gainshare.dev/status").unwrap_or_default();
        let Ok(note) = serde_json::from_str::<Value>(note) else { return };
        let seconds = |key: &str| note["forecast"][key].as_f64().map(|ms| ms / 1e3);
        if let [Some(done_s), Some(earliest_s), Some(latest_s)] =
            [seconds("done_ms"), seconds("earliest_ms"), seconds("latest_ms")]
        {
            self.samples.push(Sample { at_s: now_s, done_s, earliest_s, latest_s });
        }
        if self.warned_s.is_none() && (note["standing"] == "AtRisk" || note["standing"] == "Missed") {
            self.warned_s = Some(now_s - self.arrived_s);
        }
    }
}

/// Runs the mix in a namespace `round` of its own, under a SharePolicy with this policy, or without any.
fn play(kube: &Kube, round: &'static str, policy: Option<&str>, jobs: &[MixJob]) -> Result<Round> {
    namespace(kube, round)?;
    let (key, value) = LABEL.split_once('=').context("a label has a value")?;
    if let Some(policy) = policy {
        kube.apply(&json!({
            "apiVersion": "gainshare.dev/v1alpha1",
            "kind": "SharePolicy",
            "metadata": { "name": "train", "namespace": round },
            "spec": { "selector": { "matchLabels": { key: value } }, "policy": policy },
        }))?;
    }
    let began = Instant::now();
    let longest_s = jobs.iter().map(|j| j.arrives_s + j.deadline_s.unwrap_or(0.0)).fold(0.0, f64::max);
    let patience = Duration::from_secs_f64(3.0 * longest_s + 60.0);
    let mut tracks: BTreeMap<&str, Track> = BTreeMap::new();
    let mut waiting = jobs.iter().peekable();
    let mut cpu = Use::default();
    // Seconds in which pods ran, and the CPU seconds that they had.
    let (mut busy_s, mut had_s) = (0.0, 0.0);
    let mut before = (Instant::now(), idle_s(kube)?, NodeUse::read(kube)?);
    let pods = loop {
        while let Some(job) = waiting.next_if(|j| began.elapsed().as_secs_f64() >= j.arrives_s) {
            let arrived_s = unix_s();
            let due_s = job.deadline_s.map(|d| arrived_s + d);
            let due = due_s.map(|s| jiff::Timestamp::from_millisecond((s * 1e3) as i64)).transpose()?;
            create(kube, round, job.name, &job.words(FORMAT), due.map(|due| due.to_string()))?;
            tracks.insert(job.name, Track { arrived_s, due_s, ..Track::default() });
            eprintln!("e2e: {round}: {:5.1} s: {} arrives", began.elapsed().as_secs_f64(), job.name);
        }
        let pods = kube.pods(round, LABEL)?;
        let running: Vec<&Pod> = pods.iter().filter(|p| p.phase() == "Running").collect();
        for pod in &running {
            if let Some(track) = tracks.get_mut(pod.name()) {
                track.observe(pod);
            }
        }
        let now = (Instant::now(), idle_s(kube)?, NodeUse::read(kube)?);
        if !running.is_empty() {
            let allocatable_s = (now.0 - before.0).as_secs_f64() - (now.2.system_s - before.2.system_s);
            cpu.add(allocatable_s.max(0.0), now.2.pods_s - before.2.pods_s, now.1 - before.1);
            busy_s += (now.0 - before.0).as_secs_f64();
            had_s += now.2.pods_s - before.2.pods_s;
        }
        before = now;
        if let Some(failed) = pods.iter().find(|p| p.phase() == "Failed") {
            anyhow::bail!("{} failed: see {}", failed.name(), failed.log_file(kube).display());
        }
        if waiting.peek().is_none() && pods.len() == jobs.len() && pods.iter().all(|p| p.phase() == "Succeeded") {
            break pods;
        }
        ensure!(began.elapsed() < patience, "the pods did not end within {} s", patience.as_secs());
        std::thread::sleep(PACE);
    };
    // Less than the calibration measured means that the machine was busier: then deadlines may not be feasible at all.
    eprintln!("e2e: {round}: the pods of the node had {:.2} of a core", had_s / busy_s.max(1e-3));
    let mut results = Vec::new();
    for job in jobs {
        let pod = pods.iter().find(|p| p.name() == job.name).with_context(|| format!("{} has no pod", job.name))?;
        let track = &tracks[job.name];
        let lines = log_lines(&pod.log_file(kube))?;
        let moments = lines.first().zip(lines.last()).with_context(|| format!("{} printed nothing", job.name))?;
        let moments = [track.arrived_s, moments.0.0, moments.1.0];
        let result = JobResult::new(job, moments, track.due_s, &track.samples);
        results.push(JobResult { restarts: pod.restarts(), warned_s: track.warned_s, ..result });
    }
    Ok(Round::new(round, cpu.part(), results))
}

/// Seconds for which the processors of the training node were idle since the machine started. What the processors of
/// other nodes leave idle, no pod of this one could use.
fn idle_s(kube: &Kube) -> Result<f64> {
    let group = kube.testbed.node_cgroup(NODE, "cpuset")?.join("kubepods");
    let files = ["cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"].map(|file| group.join(file));
    let lists = files.iter().filter_map(|file| std::fs::read_to_string(file).ok());
    let cpus = lists.map(|list| numbers(&list)).find(|cpus| !cpus.is_empty());
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let idle = cpus
        .context("the node's pods have no processors")?
        .into_iter()
        .map(|cpu| idle_of_core_s(&stat, &cpu.to_string()).with_context(|| format!("/proc/stat has no core {cpu}")));
    idle.sum()
}

/// CPU seconds of the training node since its start. The node has one core for its pods and its own programs.
struct NodeUse {
    pods_s: f64,
    /// The kubelet and the container runtime.
    system_s: f64,
}

impl NodeUse {
    fn read(kube: &Kube) -> Result<NodeUse> {
        let group = kube.testbed.node_cgroup(NODE, "cpuacct")?;
        let seconds = |file: PathBuf| -> Result<f64> {
            let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            Ok(text.trim().parse::<f64>()? / 1e9)
        };
        let pods_s = seconds(group.join("kubepods/cpuacct.usage"))?;
        Ok(NodeUse { pods_s, system_s: (seconds(group.join("cpuacct.usage"))? - pods_s).max(0.0) })
    }
}

/// Every impossible deadline must have an event on its pod.
fn warned_by_event(kube: &Kube, names: &[&str]) -> Result<()> {
    let events = kube.get(&["events", "-n", "qos"])?;
    for name in names {
        let about = |event: &Value| event["reason"] == "DeadlineAtRisk" && event["involvedObject"]["name"] == **name;
        let found = events["items"].as_array().into_iter().flatten().any(about);
        ensure!(found, "no event DeadlineAtRisk was published about {name}");
    }
    Ok(())
}
