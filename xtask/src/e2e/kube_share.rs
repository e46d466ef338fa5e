//! `cargo xtask e2e kube-share`: what Gainshare does for pods that people already have, on a real cluster
//! of two nodes.
//!
//! 1. Three training pods run on one node without a policy: one early and two later, created by hand, by a
//!    Job and by a controller of an unknown kind.
//! 2. Gainshare is installed with a policy, and the same pods run again. The last pod must end a fifth
//!    sooner, nothing may restart, and the kernel must enforce each decision within a second.
//! 3. The recorded decision about a pod is fetched, and its plan is made again. Then the node agent is killed,
//!    the operator is killed, the API server is stopped: limits hold, nothing restarts, everything converges
//!    within half a minute of the return. A pod that was created meanwhile is shared like the others.
//! 4. Gainshare is uninstalled while pods run: all pods get their original values back.

use super::StoryArgs;
use super::kube::{Bystanders, Kube, Pod, wait_for};
use super::trace::{Level, Watch};
use super::train::{self, IMAGE, LABEL, Maker, REQUEST_MILLI, Run, RunResult, Work};
use crate::programs::Programs;
use crate::sh;
use crate::testbed::{Spec, Testbed};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

/// The node where the pods train; the operator runs on the other one.
const NODE: &str = "train";
const OTHER: &str = "other";
const SYSTEM: &str = "gainshare-system";
const CONVERGED_WITHIN: Duration = Duration::from_secs(30);
const LEAST_GAIN: f64 = 0.2;
const LONGEST_EFFECT_S: f64 = 1.0;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs of half a minute and a short stop of the API server, as `cargo xtask test` does it.
    #[arg(long)]
    short: bool,
    /// Leave the cluster up, to look around.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    story: StoryArgs,
}

impl Args {
    /// With the programs that were built for the tests.
    pub(super) fn short(programs: &Programs) -> Args {
        Args { short: true, keep: false, story: StoryArgs::with(programs) }
    }
}

/// What was measured.
#[derive(Debug, Default, Serialize)]
struct ShareFigures {
    /// Seconds from creation to the last word, by run.
    without_policy_s: BTreeMap<&'static str, f64>,
    with_policy_s: BTreeMap<&'static str, f64>,
    /// Cores that the machine used beside the two nodes, without and with the policy.
    bystanders_cores: [f64; 2],
    /// How much sooner the last to come ended, as a part of its time without a policy.
    last_sooner: f64,
    restarts: u64,
    decisions: usize,
    /// Decisions that stood and never reached the kernel.
    lost_decisions: usize,
    /// Seconds from a decision to the kernel's file of the container.
    effect_s: Effects,
    /// The same for the pod's file, which a kubelet lowers later than the container's.
    pod_effect_s: Effects,
    /// Seconds from the return of what was killed or stopped until everything agreed again, a new pod included.
    converged_s: BTreeMap<&'static str, f64>,
    /// Pods that had their original values back after the uninstall.
    restored: usize,
    took_s: f64,
}

#[derive(Debug, Default, Serialize)]
struct Effects {
    median: f64,
    /// Nine in ten were quicker.
    ninetieth: f64,
    largest: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let began = Instant::now();
    let programs = args.story.programs()?;
    run_on(up(&programs)?, began, args, &programs, || Ok(()))
}

/// The cluster of the story, with the image of the programs.
pub(super) fn up(programs: &Programs) -> Result<Kube> {
    let kube = Kube { testbed: Testbed::up(&Spec::new("kube-share", &[(NODE, 1.0), (OTHER, 0.6)])?)? };
    kube.testbed.load_image(&programs.files(), IMAGE)?;
    Ok(kube)
}

/// Tells the story on its cluster, and returns what `beside` makes, which runs while no speed is measured.
pub(super) fn run_on<T: Send>(
    kube: Kube,
    began: Instant,
    args: &Args,
    programs: &Programs,
    beside: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let told = measure(&kube, args, programs).and_then(|mut report| {
        let (made, told) = super::at_once(beside, || injure(&kube, args, programs, &mut report));
        told?;
        Ok((report, made?))
    });
    kube.end(args.keep)?;
    let (mut report, made) = told?;
    report.took_s = began.elapsed().as_secs_f64();
    args.story.print(&report, print)?;
    check(&report, args.short)?;
    Ok(made)
}

/// The same pods without and with a policy.
fn measure(kube: &Kube, args: &Args, programs: &Programs) -> Result<ShareFigures> {
    let program = &programs.gainshare();
    kube.apply(&train::unknown_kind())?;
    let work_s = if args.short { 30.0 } else { 80.0 };
    let runs = train::schedule(program, work_s)?;
    let patience = Duration::from_secs_f64(work_s * 6.0 + 60.0);
    let mut report = ShareFigures::default();

    eprintln!("e2e: without a policy");
    namespace(kube, "plain")?;
    let bystanders = Bystanders::watch(kube, &[NODE, OTHER])?;
    let plain = train::play(kube, "plain", NODE, &runs, patience)?;
    report.bystanders_cores[0] = bystanders.cores()?;
    kube.kubectl(&["delete", "namespace", "plain", "--wait=false"])?;

    eprintln!("e2e: with a policy");
    // The operator's own CPU use must not disturb the measured node.
    let node = format!("operator.nodeSelector.kubernetes\\.io/hostname={OTHER}");
    install(kube, &["--set", &node, "--set", "agent.podFiles=true"])?;
    namespace(kube, "shared")?;
    policy(kube, "shared", "4s")?;
    let watch = Watch::start(kube, NODE)?;
    let bystanders = Bystanders::watch(kube, &[NODE, OTHER])?;
    let shared = train::play(kube, "shared", NODE, &runs, patience)?;
    report.bystanders_cores[1] = bystanders.cores()?;
    let agent = agent_pod(kube)?;
    let effects = watch.effects(kube, &agent, Level::Container)?;
    report.pod_effect_s = summarise(&watch.effects(kube, &agent, Level::Pod)?)?;
    drop(watch);
    if args.keep {
        keep_logs(kube, &[agent, operator_pod(kube)?])?;
    }
    report.decisions = effects.len();
    report.lost_decisions = effects.iter().filter(|e| e.is_none()).count();
    report.effect_s = summarise(&effects)?;
    report.without_policy_s = seconds(&plain);
    report.with_policy_s = seconds(&shared);
    let (before, after) = (report.without_policy_s["last"], report.with_policy_s["last"]);
    report.last_sooner = 1.0 - after / before;
    report.restarts = plain.iter().chain(&shared).map(|t| t.restarts).sum();
    kube.kubectl(&["delete", "job,pod,trainrun", "--all", "-n", "shared"])?;
    Ok(report)
}

/// Everything is killed or stopped once, and at the end uninstalled.
fn injure(kube: &Kube, args: &Args, programs: &Programs, report: &mut ShareFigures) -> Result<()> {
    eprintln!("e2e: faults");
    for run in lasting_runs() {
        train::start(kube, "shared", NODE, &run)?;
    }
    wait_for("the first shares", Duration::from_secs(60), || converged(kube, 2, true))?;
    kube.replay(programs, "shared", "flat")?;
    faults(kube, args.short, report)?;

    eprintln!("e2e: uninstall");
    report.restored = uninstall(kube)?;
    let pods = kube.pods("shared", LABEL)?;
    report.restarts += pods.iter().map(Pod::restarts).sum::<u64>();
    Ok(())
}

/// Two pods that outlast the faults: one is flat from the start, the other gains the same for ever, which
/// no training does.
fn lasting_runs() -> [Run; 2] {
    let flat = "while :; do i=$((i+1)); [ $((i % 20000)) != 0 ] || echo loss: 1.5; done";
    // It prints nothing: its progress is in a file of a volume.
    let grows = "echo step,loss > /out/metrics.csv; l=1000; while :; do i=$((i+1)); \
        [ $((i % 20000)) != 0 ] || { l=$((l-20)); echo $i,$l >> /out/metrics.csv; }; done";
    let run = |name, maker, work| Run { name, maker, arrives_s: 0.0, work };
    let flat = run("flat", Maker::Plain, Work::Script(flat));
    [flat, run("grows", Maker::Job, Work::Writes { script: grows, path: "metrics.csv" })]
}

fn namespace(kube: &Kube, name: &str) -> Result<()> {
    kube.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }))
}

fn policy(kube: &Kube, namespace: &str, interval: &str) -> Result<()> {
    let (key, value) = LABEL.split_once('=').context("a label has a value")?;
    kube.apply(&json!({
        "apiVersion": "gainshare.dev/v1alpha1",
        "kind": "SharePolicy",
        "metadata": { "name": "train", "namespace": namespace },
        "spec": { "selector": { "matchLabels": { key: value } }, "policy": "flowcon", "interval": interval, "alpha": 0.015 },
    }))
}

fn helm(kube: &Kube) -> Command {
    let mut helm = Command::new(kube.testbed.bin().join("helm"));
    helm.arg("--kubeconfig").arg(kube.testbed.kubeconfig()).args(["--namespace", SYSTEM]).env_remove("KUBECONFIG");
    helm
}

/// Installs the chart, with further words for Helm.
pub(super) fn install(kube: &Kube, more: &[&str]) -> Result<()> {
    let (name, tag) = IMAGE.split_once(':').context("an image has a tag")?;
    let chart = sh::root().join("deploy/chart");
    sh::output(
        helm(kube)
            .args(["upgrade", "--install", "gainshare"])
            .arg(chart)
            .args(["--create-namespace", "--wait", "--timeout", "120s"])
            .args(["--set", &format!("image.repository={name},image.tag={tag},image.pullPolicy=Never")])
            // Nodes of the test bed are smaller than the limit of the agents, and the kernel refuses that.
            .args(["--set", "agent.resources.limits.cpu=null"])
            .args(more),
    )?;
    wait_for("an agent on every node", Duration::from_secs(60), || {
        for agent in kube.pods(SYSTEM, "app.kubernetes.io/component=agent")? {
            ensure!(agent.is_ready(), "the agent {} is not ready", agent.name());
        }
        Ok(())
    })
}

fn agent_pod(kube: &Kube) -> Result<Pod> {
    let pods = kube.pods(SYSTEM, "app.kubernetes.io/component=agent")?;
    pods.into_iter().find(|p| p.node() == NODE).context("no agent runs on the training node")
}

fn operator_pod(kube: &Kube) -> Result<Pod> {
    let pods = kube.pods(SYSTEM, "app.kubernetes.io/component=operator")?;
    pods.into_iter().find(|p| p.phase() == "Running").context("no operator runs")
}

/// Whether all parts agree: at least `count` pods are shared, each has a decision, the kernel enforces what
/// the spec says, and the requests together fit into the node.
fn converged(kube: &Kube, count: usize, reshaped: bool) -> Result<Vec<Pod>> {
    let pods: Vec<Pod> = kube.pods("shared", LABEL)?.into_iter().filter(|p| p.phase() == "Running").collect();
    ensure!(pods.len() >= count, "{} of {count} pods run", pods.len());
    let mut sum = 0;
    for pod in &pods {
        let note = pod.annotation("gainshare.dev/status").unwrap_or_default();
        ensure!(note.contains("sharePercent"), "{} has no share yet: {note}", pod.name());
        let milli = pod.request_milli().context("a training pod requests CPU")?;
        sum += milli;
        let shares = cpu_shares(kube, pod)?;
        ensure!(shares == (milli * 1024 / 1000).max(2), "{} has {shares} shares for {milli}m", pod.name());
    }
    ensure!(sum <= REQUEST_MILLI * pods.len() as u64, "{sum}m are promised");
    let moved = pods.iter().any(|p| p.request_milli() != Some(REQUEST_MILLI));
    ensure!(moved || !reshaped, "every pod has what it came with");
    Ok(pods)
}

fn cpu_shares(kube: &Kube, pod: &Pod) -> Result<u64> {
    let file = kube.pod_group(pod.node(), pod.uid())?.join("cpu.shares");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    text.trim().parse().with_context(|| format!("{} holds no number", file.display()))
}

/// What the kernel has in force for each pod.
fn in_force(kube: &Kube, pods: &[Pod]) -> Result<Vec<u64>> {
    pods.iter().map(|pod| cpu_shares(kube, pod)).collect()
}

fn faults(kube: &Kube, short: bool, report: &mut ShareFigures) -> Result<()> {
    let agent = agent_pod(kube)?;
    let pods = converged(kube, 2, true)?;
    let before = in_force(kube, &pods)?;
    kube.kill_pod(NODE, agent.uid())?;
    let killed = Instant::now();
    hold(kube, &pods, &before, Duration::from_secs(1), "the agent was killed")?;
    report.converged_s.insert("agent_killed", back_to_work(kube, killed, "after-agent")?);

    let operator = operator_pod(kube)?;
    let pods = converged(kube, 2, true)?;
    let before = in_force(kube, &pods)?;
    kube.kill_pod(operator.node(), operator.uid())?;
    let killed = Instant::now();
    hold(kube, &pods, &before, Duration::from_secs(1), "the operator was killed")?;
    report.converged_s.insert("operator_killed", back_to_work(kube, killed, "after-operator")?);

    let pods = converged(kube, 2, true)?;
    let before = in_force(kube, &pods)?;
    kube.testbed.signal("kube-apiserver", Signal::SIGSTOP)?;
    // The agent may have asked for something a moment before.
    std::thread::sleep(Duration::from_secs(2));
    let before = in_force(kube, &pods).unwrap_or(before);
    let held =
        hold(kube, &pods, &before, Duration::from_secs(if short { 10 } else { 60 }), "the API server was stopped");
    kube.testbed.signal("kube-apiserver", Signal::SIGCONT)?;
    held?;
    report.converged_s.insert("api_server_stopped", back_to_work(kube, Instant::now(), "after-api")?);
    Ok(())
}

/// How long limits stay as they are.
fn hold(kube: &Kube, pods: &[Pod], before: &[u64], time: Duration, why: &str) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < time {
        let now = in_force(kube, pods)?;
        ensure!(now == before, "limits changed from {before:?} to {now:?} after {why}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// A new pod comes; everything must agree again within the time. Returns the seconds since `since`.
fn back_to_work(kube: &Kube, since: Instant, name: &'static str) -> Result<f64> {
    let words = "train mlp --seed 7 --steps 100000000 --report-every 10".split(' ').map(str::to_owned).collect();
    let run = Run { name, maker: Maker::Unknown, arrives_s: 0.0, work: Work::Train(words) };
    wait_for("the new pod's creation", Duration::from_secs(20), || train::start(kube, "shared", NODE, &run))?;
    // Longer than allowed, so that a figure is reported; it is judged at the end.
    wait_for("agreement", CONVERGED_WITHIN * 2, || converged(kube, 3, true))?;
    let seconds = since.elapsed().as_secs_f64();
    eprintln!("e2e: converged {seconds:.1} s after {name}");
    kube.kubectl(&["delete", "pod", name, "-n", "shared"])?;
    wait_for("agreement without it", CONVERGED_WITHIN, || converged(kube, 2, true))?;
    Ok(seconds)
}

/// Uninstalls while pods run, and counts those that have their original values back.
fn uninstall(kube: &Kube) -> Result<usize> {
    converged(kube, 2, true)?;
    sh::output(helm(kube).args(["uninstall", "gainshare", "--wait", "--timeout", "120s"]))?;
    let pods = wait_for("the original values", Duration::from_secs(15), || {
        let pods = kube.pods("shared", LABEL)?;
        for pod in &pods {
            let milli = pod.request_milli();
            ensure!(milli == Some(REQUEST_MILLI), "{} still requests {milli:?}", pod.name());
            let left = ["gainshare.dev/status", "gainshare.dev/original-resources"];
            let left: Vec<_> = left.into_iter().filter(|key| pod.annotation(key).is_some()).collect();
            ensure!(left.is_empty(), "{} still has {}", pod.name(), left.join(", "));
            let shares = cpu_shares(kube, pod)?;
            ensure!(shares == REQUEST_MILLI * 1024 / 1000, "{} still has {shares} shares", pod.name());
        }
        Ok(pods)
    })?;
    Ok(pods.len())
}

/// Copies the logs of our own pods, which go with the uninstall.
fn keep_logs(kube: &Kube, pods: &[Pod]) -> Result<()> {
    for pod in pods {
        let to = kube.testbed.shared_folder("logs")?.join(format!("{}.log", pod.name()));
        std::fs::copy(pod.log_file(kube), &to).with_context(|| format!("cannot write {}", to.display()))?;
        eprintln!("e2e: the log of {} is in {}", pod.name(), to.display());
    }
    Ok(())
}

fn seconds(took: &[RunResult]) -> BTreeMap<&'static str, f64> {
    took.iter().map(|t| (t.name, (t.seconds * 10.0).round() / 10.0)).collect()
}

fn summarise(effects: &[Option<f64>]) -> Result<Effects> {
    let mut times: Vec<f64> = effects.iter().flatten().copied().collect();
    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).copied().context("the agent decided nothing")?;
    let ninetieth = times.get(times.len() * 9 / 10).copied().unwrap_or(median);
    Ok(Effects { median, ninetieth, largest: times.last().copied().unwrap_or(median) })
}

fn print(r: &ShareFigures) {
    println!("{:<10} {:>16} {:>14}", "run", "without policy", "with policy");
    for (name, before) in &r.without_policy_s {
        println!("{name:<10} {before:>14.1} s {:>12.1} s", r.with_policy_s[name]);
    }
    let [before, after] = r.bystanders_cores;
    println!("beside them the machine used {before:.2} and {after:.2} cores");
    println!("the last to come ended {:.0} % sooner; {} restarts", r.last_sooner * 100.0, r.restarts);
    println!(
        "{} decisions were in force after {:.2} s (median), {:.2} s at most",
        r.decisions, r.effect_s.median, r.effect_s.largest
    );
    for (what, seconds) in &r.converged_s {
        println!("{}: limits held, converged after {seconds:.1} s", what.replace('_', " "));
    }
    println!("uninstalled: {} pods have their own values back ({:.0} s in all)", r.restored, r.took_s);
}

/// Every promise that was broken, in one error.
fn check(r: &ShareFigures, short: bool) -> Result<()> {
    let mut broken = Vec::new();
    // Figures of speed are for a quiet machine: the short telling, which belongs to the tests, prints them
    // and judges only what must always hold.
    let fast = !short;
    if fast && r.last_sooner < LEAST_GAIN {
        broken.push(format!(
            "the last to come ended {:.0} % sooner, not {:.0} %",
            r.last_sooner * 100.0,
            LEAST_GAIN * 100.0
        ));
    }
    if r.restarts > 0 {
        broken.push(format!("{} restarts", r.restarts));
    }
    if fast && r.effect_s.largest > LONGEST_EFFECT_S {
        broken.push(format!("a decision took {:.2} s to be in force", r.effect_s.largest));
    }
    if r.lost_decisions > 0 {
        broken.push(format!("{} of {} decisions never reached the kernel", r.lost_decisions, r.decisions));
    }
    for (what, seconds) in &r.converged_s {
        if *seconds > CONVERGED_WITHIN.as_secs_f64() {
            broken.push(format!("{what}: converged after {seconds:.1} s"));
        }
    }
    if r.restored < 2 {
        broken.push("not every pod had its own values back".into());
    }
    ensure!(broken.is_empty(), "promises were broken: {}", broken.join("; "));
    Ok(())
}
