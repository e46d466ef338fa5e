//! `cargo xtask e2e kube-ps`: distributed jobs whose tasks are resized and scaled while they run, on a real cluster
//! of two nodes.
//!
//! 1. *Rounds.* Several real `train-ps` jobs, synchronous and asynchronous, arrive over time. Each arrival is played
//!    twice: `stock` (the story makes one pod per task, the default scheduler places it, requests are fixed) and
//!    `operator` (TrainingJobs with that policy). Jobs, requests and moments are the same.
//! 2. *Hot server.* One of two servers gets a quarter of its CPU by hand, as if its node were slow. The policy finds
//!    it and resizes it in place. The throughput is read from the log of worker 0: from the moment when the kubelet has
//!    made the server slow to the first resize, and then while the server keeps its size.
//! 3. *Workers come and go.* The number of workers of a running job is raised and lowered.
//! 4. *Killed server.* A server of a job with checkpoints is killed. All tasks start again, continue after a
//!    checkpoint, and go beyond the step that was reached. The steps lost are read from the log and from the status.
//! 5. *Traffic.* The node agents measure what each task of a job sends and receives, and the status has it.
//!
//! `--part` plays some of these parts only. Three arrivals take about twenty minutes; `--arrivals 1 --first-arrival 2`
//! plays one of them alone.
//!
//! No task may restart, and no step may be lost, by resizes and by workers that join or leave (parts 1 to 3).
//!
//! **Fixed requests** are request and limit alike, so that a stock task cannot use what is idle. That is how shared
//! clusters keep jobs apart, and it is the case of the paper.

use super::StoryArgs;
use super::kube::{Kube, PAUSE, Pod, log_lines, unix_s, wait_every, wait_for};
use super::kube_share::install;
use super::ps_job::{self, JOB_LABEL, PsJob};
use super::train::{IMAGE, steps_per_second};
use crate::bench::median;
use crate::programs::Programs;
use crate::testbed::{Spec, Testbed};
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Together less than the machine has, so that each node really has what it names.
const NODES: [(&str, f64); 2] = [("one", 0.7), ("two", 0.7)];
const ROUNDS: [&str; 2] = ["stock", "operator"];
/// The least gain of resizing a hot server.
const LEAST_SPEEDUP: f64 = 1.5;
/// The CPU that the slow server gets, in thousandths of a core.
const HOT_MILLI: u64 = 40;
/// Gainshare's own pods.
const SYSTEM: &str = "gainshare-system";
/// A kubelet has carried out a resize within this time.
const RESIZE_S: f64 = 3.0;

/// A part of the story.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Rounds,
    HotServer,
    Workers,
    KilledServer,
    Traffic,
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// One arrival of few and short jobs: some minutes, or less with one --part.
    #[arg(long)]
    short: bool,
    /// How many arrivals are played, each with other moments [default: 3; with --short 1].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=20))]
    arrivals: Option<u64>,
    /// The number of the first arrival, so that arrivals can be played one by one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=20))]
    first_arrival: u64,
    /// Only this part of the story; may be given several times.
    #[arg(long, value_enum)]
    part: Vec<Part>,
    /// The work of one job, in seconds of one core.
    #[arg(long = "work", value_name = "SECONDS")]
    work_s: Option<f64>,
    /// Leave the cluster up, to look around.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    story: StoryArgs,
}

/// What was measured.
#[derive(Debug, Default, Serialize)]
struct TaskFigures {
    arrivals: Vec<Arrival>,
    /// Medians over arrivals of `operator` as a part of `stock`: below 1 is better for times, above 1 for CPU.
    mean_completion_to_stock: Option<Spread>,
    utilisation_to_stock: Option<Spread>,
    hot_server: Option<HotServer>,
    /// The numbers of workers that ran one after the other.
    workers: Vec<usize>,
    killed_server: Option<KilledServer>,
    /// Bytes per second of each task, by the status of the job.
    traffic: BTreeMap<String, u64>,
    restarts: u64,
    steps_lost: u64,
    took_s: f64,
}

/// A figure over all arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Spread {
    least: f64,
    median: f64,
    most: f64,
}

impl Spread {
    /// `None` if there is no value, or one that is no number.
    fn of(values: &[f64]) -> Option<Spread> {
        let (least, most) = (values.iter().copied().reduce(f64::min)?, values.iter().copied().reduce(f64::max)?);
        let all = Spread { least, median: median(values.to_vec()), most };
        values.iter().all(|value| value.is_finite()).then_some(all)
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} ({:.2} to {:.2})", self.median, self.least, self.most)
    }
}

#[derive(Debug, Default, Serialize)]
struct Arrival {
    /// By round.
    rounds: BTreeMap<&'static str, Round>,
}

#[derive(Debug, Default, Serialize)]
struct Round {
    mean_completion_s: f64,
    makespan_s: f64,
    /// CPU that the tasks used, as a part of what the nodes had from the first arrival to the last end.
    utilisation: f64,
    completion_s: BTreeMap<String, f64>,
    /// Decisions that changed a size.
    changes: usize,
}

#[derive(Debug, Default, Serialize)]
struct HotServer {
    steps_per_s_before: f64,
    steps_per_s_after: f64,
    speedup: f64,
    milli_before: u64,
    milli_after: u64,
    /// The reason that the job's status gave.
    why: String,
}

#[derive(Debug, Default, Serialize)]
struct KilledServer {
    /// Steps between two checkpoints.
    checkpoint_every: u64,
    /// The last step before the kill, and the first one after it.
    reached: u64,
    resumed_at: u64,
    /// By the log of worker 0, and by the status of the job.
    steps_lost: u64,
    steps_lost_in_status: u64,
    /// Until the job was beyond the step that it had reached.
    recovered_s: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let began = Instant::now();
    let programs = args.story.programs()?;
    let kube = Kube { testbed: Testbed::up(&Spec::new("kube-ps", &NODES)?)? };
    let played = play_story(&kube, args, &programs);
    kube.end(args.keep)?;
    let mut report = played?;
    report.took_s = began.elapsed().as_secs_f64();
    args.story.print(&report, print)?;
    check(&report, args.short)
}

fn play_story(kube: &Kube, args: &Args, programs: &Programs) -> Result<TaskFigures> {
    kube.testbed.load_image(&programs.files(), IMAGE)?;
    let interval_s = if args.short { 4 } else { 6 };
    let numbers = format!("operator.extraArgs={{--elastic-interval={interval_s}s}}");
    install(
        kube,
        &[
            ["--set", &numbers],
            ["--set", "operator.replicas=1"],
            ["--set", "operator.resources.requests.cpu=20m"],
            ["--set", "agent.traffic=true"],
        ]
        .concat(),
    )?;
    let work_s = args.work_s.unwrap_or(if args.short { 2.0 } else { 6.0 });
    let rate = steps_per_second(&programs.gainshare(), "gru")?;
    let mut report = TaskFigures::default();
    let arrivals = if args.plays(Part::Rounds) { args.arrivals.unwrap_or(if args.short { 1 } else { 3 }) } else { 0 };
    for number in (args.first_arrival - 1..).take(arrivals as usize) {
        let jobs = ps_job::schedule(number, rate, work_s, args.short);
        let mut arrival = Arrival::default();
        for round in ROUNDS {
            eprintln!("e2e: arrival {} under {round}", number + 1);
            arrival.rounds.insert(round, play_round(kube, round, number, &jobs, &mut report)?);
        }
        report.arrivals.push(arrival);
    }
    let parts = |of: fn(&Round) -> f64| {
        let part = |arrival: &Arrival| of(&arrival.rounds["operator"]) / of(&arrival.rounds["stock"]);
        Spread::of(&report.arrivals.iter().map(part).collect::<Vec<_>>())
    };
    (report.mean_completion_to_stock, report.utilisation_to_stock) =
        (parts(|round| round.mean_completion_s), parts(|round| round.utilisation));
    if args.plays(Part::HotServer) {
        hot_server(kube, f64::from(interval_s), &mut report)?;
    }
    if args.plays(Part::Workers) {
        breathe(kube, rate, &mut report)?;
    }
    if args.plays(Part::KilledServer) {
        report.killed_server = Some(killed_server(kube, rate)?);
    }
    if args.plays(Part::Traffic) {
        report.traffic = traffic(kube)?;
    }
    Ok(report)
}

impl Args {
    fn plays(&self, part: Part) -> bool {
        self.part.is_empty() || self.part.contains(&part)
    }
}

/// Seconds of CPU that the pods of all nodes have used, without the operator and the node agents.
fn jobs_cpu_s(kube: &Kube) -> Result<f64> {
    let read = |folder: PathBuf| -> Result<f64> {
        let file = folder.join("cpuacct.usage");
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(text.trim().parse::<f64>()? / 1e9)
    };
    let mut sum_s = 0.0;
    for (node, _) in NODES {
        sum_s += read(kube.testbed.node_cgroup(node, "cpuacct")?.join("kubepods"))?;
    }
    for pod in kube.get(&["pods", "-n", SYSTEM])?["items"].as_array().into_iter().flatten() {
        let pod = Pod(pod.clone());
        if pod.phase() == "Running" {
            sum_s -= read(kube.pod_group_of(pod.node(), pod.uid(), "cpuacct")?)?;
        }
    }
    Ok(sum_s)
}

fn namespace(kube: &Kube, name: &str) -> Result<()> {
    let labels = json!({ "gainshare.dev/jobs": "enabled" });
    kube.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } }))
}

/// One round: the jobs come, and all of them end.
fn play_round(
    kube: &Kube,
    round: &'static str,
    number: u64,
    jobs: &[PsJob],
    report: &mut TaskFigures,
) -> Result<Round> {
    let space = format!("{round}-{number}");
    namespace(kube, &space)?;
    let (cpu_before_s, began) = (jobs_cpu_s(kube)?, Instant::now());
    let mut created: BTreeMap<String, f64> = BTreeMap::new();
    for job in jobs {
        std::thread::sleep(Duration::from_secs_f64(job.arrives_s).saturating_sub(began.elapsed()));
        created.insert(job.name.clone(), unix_s());
        let object = if round == "stock" { job.stock_list(&space) } else { job.training_job(&space) };
        kube.create(&object)?;
        eprintln!("e2e: {:5.1} s: {} came", began.elapsed().as_secs_f64(), job.name);
    }
    wait_every(PAUSE, "the end of all jobs", Duration::from_secs(600), || finished(kube, &space, jobs))??;
    let used_s = jobs_cpu_s(kube)? - cpu_before_s;
    let mut result = Round::default();
    let mut last_end_s: f64 = 0.0;
    let mut seen = Vec::new();
    for job in jobs {
        let pods = kube.pods(&space, &format!("{JOB_LABEL}={}", job.name))?;
        let end_s = end_of(kube, &pods, job)?;
        last_end_s = last_end_s.max(end_s);
        result.completion_s.insert(job.name.clone(), end_s - created[&job.name]);
        seen.extend(pods);
    }
    count_losses(kube, &seen, report)?;
    if round == "operator" {
        for job in kube.get(&["trainingjobs", "-n", &space])?["items"].as_array().into_iter().flatten() {
            // A second attempt is a restart of all tasks.
            report.restarts += job["status"]["tasks"]["epoch"].as_u64().unwrap_or(1).saturating_sub(1);
        }
        result.changes = events(kube, &space)?;
    }
    let first_s = created.values().copied().fold(f64::INFINITY, f64::min);
    let cores: f64 = NODES.iter().map(|(_, cores)| cores).sum();
    result.makespan_s = last_end_s - first_s;
    result.mean_completion_s = result.completion_s.values().sum::<f64>() / jobs.len() as f64;
    result.utilisation = used_s / (cores * result.makespan_s);
    let (mean_s, makespan_s, part) = (result.mean_completion_s, result.makespan_s, result.utilisation * 100.0);
    eprintln!(
        "e2e: {round}: mean {mean_s:.1} s, makespan {makespan_s:.1} s, CPU {part:.0} %, {} changes",
        result.changes
    );
    remove(kube, &space)?;
    Ok(result)
}

/// Deletes a namespace and waits until it is gone: what still runs there would take CPU from what comes next.
fn remove(kube: &Kube, space: &str) -> Result<()> {
    kube.kubectl(&["delete", "namespace", space, "--wait=false"])?;
    let gone = wait_every(PAUSE, &format!("the end of the namespace {space}"), Duration::from_secs(120), || {
        let found = kube.kubectl(&["get", "namespace", space, "--ignore-not-found", "-o", "name"])?;
        ensure!(found.trim().is_empty(), "{space} is still there");
        Ok(())
    });
    // What was measured stays valid, and the next part says what was in its way.
    if let Err(error) = gone {
        eprintln!("e2e: {error:#}");
    }
    Ok(())
}

/// Whether worker 0 of every job has ended well. The inner error is final.
fn finished(kube: &Kube, space: &str, jobs: &[PsJob]) -> Result<Result<()>> {
    let pods = kube.pods(space, JOB_LABEL)?;
    for job in jobs {
        let name = format!("{}-worker-0", job.name);
        let pod = pods.iter().find(|pod| pod.name() == name).with_context(|| format!("{name} has no pod"))?;
        match pod.phase() {
            "Succeeded" => {}
            "Failed" => {
                let lines = log_lines(&pod.log_file(kube)).unwrap_or_default();
                let last: Vec<&str> = lines.iter().rev().take(3).map(|(_, line)| line.as_str()).collect();
                return Ok(Err(anyhow::anyhow!("{name} failed: {}", last.join(" / "))));
            }
            phase => bail!("{name} is {phase}"),
        }
    }
    Ok(Ok(()))
}

/// When worker 0 printed its last line.
fn end_of(kube: &Kube, pods: &[Pod], job: &PsJob) -> Result<f64> {
    let name = format!("{}-worker-0", job.name);
    let pod = pods.iter().find(|pod| pod.name() == name).with_context(|| format!("{name} is gone"))?;
    let lines = log_lines(&pod.log_file(kube))?;
    let steps = lines.iter().rev().find_map(|(_, line)| step_of(line));
    ensure!(steps >= Some(job.steps), "{name} ended at step {steps:?}, not {}", job.steps);
    lines.last().map(|(at, _)| *at).with_context(|| format!("{name} printed nothing"))
}

/// Adds restarts of containers, and steps that a task reported as lost.
fn count_losses(kube: &Kube, pods: &[Pod], report: &mut TaskFigures) -> Result<()> {
    for pod in pods {
        report.restarts += pod.restarts();
        for (_, line) in log_lines(&pod.log_file(kube)).unwrap_or_default() {
            if let Some(words) = line.strip_suffix(" steps lost") {
                let number = words.rsplit(' ').next().and_then(|word| word.parse::<u64>().ok());
                report.steps_lost += number.with_context(|| format!("cannot read: {line}"))?;
            }
        }
    }
    Ok(())
}

/// How many decisions have changed a size, by the events on jobs.
fn events(kube: &Kube, space: &str) -> Result<usize> {
    let list = kube.get(&["events", "-n", space, "--field-selector", "reason=Scaled"])?;
    let count = |event: &Value| event["series"]["count"].as_u64().unwrap_or(1) as usize;
    Ok(list["items"].as_array().into_iter().flatten().map(count).sum())
}

fn step_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?.get("step")?.as_u64()
}

/// Steps per second of worker 0 in the last seconds of its log.
fn throughput(kube: &Kube, space: &str, job: &PsJob, seconds: f64) -> Result<f64> {
    let now_s = unix_s();
    speed_between(&steps(kube, space, job)?, now_s - seconds, now_s)
}

/// The steps that worker 0 has printed, with their times.
fn steps(kube: &Kube, space: &str, job: &PsJob) -> Result<Vec<(f64, u64)>> {
    let pods = kube.pods(space, &format!("{JOB_LABEL}={}", job.name))?;
    let name = format!("{}-worker-0", job.name);
    let pod = pods.iter().find(|pod| pod.name() == name).with_context(|| format!("{name} has no pod"))?;
    let lines = log_lines(&pod.log_file(kube))?;
    Ok(lines.iter().filter_map(|(at, line)| Some((*at, step_of(line)?))).collect())
}

/// Steps per second between two moments. The steps must cover a third of that time.
fn speed_between(steps: &[(f64, u64)], from_s: f64, to_s: f64) -> Result<f64> {
    let window: Vec<&(f64, u64)> = steps.iter().filter(|(at, _)| (from_s..=to_s).contains(at)).collect();
    let (Some(first), Some(last)) = (window.first(), window.last()) else { bail!("no steps were printed") };
    ensure!(last.0 - first.0 > (to_s - from_s) / 3.0, "too few steps were printed in {:.1} s", to_s - from_s);
    Ok(last.1.saturating_sub(first.1) as f64 / (last.0 - first.0))
}

fn server(kube: &Kube, space: &str, name: &str) -> Result<Pod> {
    let pods = kube.pods(space, JOB_LABEL)?;
    pods.into_iter().find(|pod| pod.name() == name).with_context(|| format!("there is no {name}"))
}

/// A server that is much slower than the other one is found and resized in place.
fn hot_server(kube: &Kube, interval_s: f64, report: &mut TaskFigures) -> Result<()> {
    eprintln!("e2e: a hot server");
    let space = "hot";
    namespace(kube, space)?;
    let job = PsJob::hot();
    kube.create(&job.training_job(space))?;
    wait_for("the first steps", Duration::from_secs(60), || throughput(kube, space, &job, 1.0))?;
    let slow = format!("{HOT_MILLI}m");
    let resources = json!({ "requests": { "cpu": slow }, "limits": { "cpu": slow } });
    let patch = json!({ "spec": { "containers": [{ "name": "tensorflow", "resources": resources }] } }).to_string();
    let patched_s = unix_s();
    kube.kubectl(&["patch", "pod", "hot-ps-1", "-n", space, "--subresource", "resize", "-p", &patch])?;
    let milli = || -> Result<u64> { Ok(server(kube, space, "hot-ps-1")?.request_milli().unwrap_or_default()) };
    wait_for("the slow server", Duration::from_secs(30), || {
        let pod = kube.get(&["pod", "hot-ps-1", "-n", space])?;
        let in_force = &pod["status"]["containerStatuses"][0]["resources"]["limits"]["cpu"];
        ensure!(*in_force == slow || milli()? > HOT_MILLI, "its limit is {in_force}");
        Ok(())
    })?;
    let slow_s = unix_s();
    // An operator that had resized the server before leaves it alone for a minute after a change by hand.
    let mut grown = wait_every(PAUSE, "the resize of the hot server", Duration::from_secs(150), || {
        let milli = milli()?;
        ensure!(milli > HOT_MILLI, "hot-ps-1 has {milli}m");
        Ok(milli)
    })?;
    let (why, resized_s) = wait_for("the reason in the status", Duration::from_secs(20), || {
        let job = kube.get(&["trainingjob", "hot", "-n", space])?;
        let scale = &job["status"]["tasks"]["scale"];
        let change = scale["lastChange"].as_str().unwrap_or_default();
        let at: jiff::Timestamp = scale["changedAt"].as_str().unwrap_or_default().parse()?;
        let at_s = at.as_microsecond() as f64 / 1e6;
        ensure!(change.contains("ps-1") && at_s > patched_s, "the status names no change of ps-1 after the patch");
        Ok((change.to_owned(), at_s))
    })?;
    let before = speed_between(&steps(kube, space, &job)?, slow_s, resized_s)
        .context("the server was resized before its slowness could be measured")?;
    eprintln!("e2e: {before:.1} steps/s in {:.1} s; it has {grown}m now", resized_s - slow_s);
    // A change is measured for two intervals before the next one. A server that keeps its size for longer has settled.
    let (began, quiet_s) = (Instant::now(), 3.0 * interval_s + RESIZE_S);
    let mut since = Instant::now();
    while since.elapsed().as_secs_f64() < quiet_s && began.elapsed().as_secs_f64() < 10.0 * interval_s + quiet_s {
        std::thread::sleep(Duration::from_secs(1));
        let now = milli()?;
        if now != grown {
            eprintln!("e2e: hot-ps-1 has {now}m");
            (grown, since) = (now, Instant::now());
        }
    }
    let seconds = (since.elapsed().as_secs_f64() - RESIZE_S).max(RESIZE_S);
    let after = throughput(kube, space, &job, seconds)?;
    count_losses(kube, &kube.pods(space, JOB_LABEL)?, report)?;
    report.hot_server = Some(HotServer {
        steps_per_s_before: before,
        steps_per_s_after: after,
        speedup: after / before,
        milli_before: HOT_MILLI,
        milli_after: grown,
        why,
    });
    remove(kube, space)
}

/// Workers join and leave a running job by hand.
fn breathe(kube: &Kube, rate: f64, report: &mut TaskFigures) -> Result<()> {
    eprintln!("e2e: workers come and go");
    let space = "breathe";
    namespace(kube, space)?;
    let job = PsJob::breathing(rate);
    kube.create(&job.training_job(space))?;
    for wanted in [1, 3, 1] {
        let note = format!("gainshare.dev/replicas=Worker={wanted}");
        kube.kubectl(&["annotate", "--overwrite", "trainingjob", "breathe", "-n", space, &note])?;
        let running = wait_for("the number of workers", Duration::from_secs(60), || {
            let pods = kube.pods(space, &format!("{JOB_LABEL}=breathe"))?;
            let workers = pods.iter().filter(|pod| pod.name().contains("-worker-")).collect::<Vec<_>>();
            let running = workers.iter().filter(|pod| pod.phase() == "Running").count();
            ensure!(running == wanted && workers.len() == wanted, "{running} of {wanted} workers run");
            Ok(running)
        })?;
        report.workers.push(running);
        // Steps are taken with this number of workers.
        wait_for("further steps", Duration::from_secs(30), || throughput(kube, space, &job, 2.0))?;
    }
    count_losses(kube, &kube.pods(space, JOB_LABEL)?, report)?;
    let status = kube.get(&["trainingjob", "breathe", "-n", space])?;
    report.restarts += status["status"]["tasks"]["epoch"].as_u64().unwrap_or(1).saturating_sub(1);
    remove(kube, space)
}

/// A server is killed: the job starts again as a whole, from its checkpoint.
fn killed_server(kube: &Kube, rate: f64) -> Result<KilledServer> {
    eprintln!("e2e: a killed server");
    let space = "saving";
    super::kube_move::prepare(kube, space)?;
    let job = PsJob::saving(rate);
    kube.create(&job.training_job(space))?;
    let every = job.checkpoint_every.context("the job saves itself")?;
    let beyond = |step: u64| -> Result<Vec<(f64, u64)>> {
        let all = steps(kube, space, &job)?;
        let last = all.last().map_or(0, |(_, last)| *last);
        ensure!(last > step, "the last step is {last}, not beyond {step}");
        Ok(all)
    };
    let before = wait_for("two checkpoints", Duration::from_secs(180), || beyond(2 * every + every / 2))?;
    let reached = before.last().map_or(0, |(_, last)| *last);
    let pod = server(kube, space, "saving-ps-1")?;
    kube.kill_pod(pod.node(), pod.uid())?;
    let killed = Instant::now();
    let state = |job: &Value| job["status"]["message"].as_str().unwrap_or_default().to_owned();
    let status = || kube.get(&["trainingjob", "saving", "-n", space]);
    wait_for("the second attempt", Duration::from_secs(120), || {
        let job = status()?;
        let runs = job["status"]["tasks"]["epoch"] == 2 && job["status"]["state"] == "Running";
        ensure!(runs, "the job says: {}", state(&job));
        Ok(())
    })?;
    let after = wait_every(PAUSE, "the steps after the kill", Duration::from_secs(180), || beyond(reached))?;
    let recovered_s = killed.elapsed().as_secs_f64();
    let resumed_at = after.first().map_or(0, |(_, first)| *first);
    // The operator hears of steps some seconds later.
    let job = wait_for("the steps lost in the status", Duration::from_secs(60), || {
        let job = status()?;
        ensure!(job["status"]["tasks"]["reachedStep"].is_null(), "the job says: {}", state(&job));
        Ok(job)
    })?;
    eprintln!("e2e: {}", state(&job));
    remove(kube, space)?;
    Ok(KilledServer {
        checkpoint_every: every,
        reached,
        resumed_at,
        steps_lost: (reached + 1).saturating_sub(resumed_at),
        steps_lost_in_status: job["status"]["tasks"]["stepsLost"].as_u64().unwrap_or(0),
        recovered_s,
    })
}

/// What the tasks of a job of two servers and a worker exchange, as its status has it.
fn traffic(kube: &Kube) -> Result<BTreeMap<String, u64>> {
    eprintln!("e2e: the traffic of tasks");
    let space = "traffic";
    namespace(kube, space)?;
    let job = PsJob::hot();
    kube.create(&job.training_job(space))?;
    let traffic = wait_every(PAUSE, "the traffic in the status", Duration::from_secs(180), || {
        let status = kube.get(&["trainingjob", &job.name, "-n", space])?;
        let traffic: BTreeMap<String, u64> =
            serde_json::from_value(status["status"]["tasks"]["traffic"].clone()).context("there is none yet")?;
        ensure!(traffic.len() == 3, "the tasks with traffic: {traffic:?}");
        Ok(traffic)
    })?;
    eprintln!("e2e: {traffic:?}");
    remove(kube, space)?;
    Ok(traffic)
}

fn print(r: &TaskFigures) {
    println!("{:<8} {:<10} {:>10} {:>10} {:>6} {:>8}", "arrival", "round", "mean", "makespan", "CPU", "changes");
    for (number, arrival) in r.arrivals.iter().enumerate() {
        for (name, round) in &arrival.rounds {
            println!(
                "{:<8} {name:<10} {:>8.1} s {:>8.1} s {:>4.0} % {:>8}",
                number + 1,
                round.mean_completion_s,
                round.makespan_s,
                round.utilisation * 100.0,
                round.changes
            );
        }
    }
    if let (Some(mean), Some(used)) = (r.mean_completion_to_stock, r.utilisation_to_stock) {
        println!("operator to stock, median (least to most): mean completion {mean}, CPU {used}");
    }
    if let Some(hot) = &r.hot_server {
        println!(
            "hot server: {:.1} steps/s, then {:.1} ({:.2} times) after {}m became {}m: {}",
            hot.steps_per_s_before, hot.steps_per_s_after, hot.speedup, hot.milli_before, hot.milli_after, hot.why
        );
    }
    if !r.traffic.is_empty() {
        println!("traffic in bytes per second: {:?}", r.traffic);
    }
    if let Some(killed) = &r.killed_server {
        println!(
            "killed server: at step {}, then from step {}: {} steps lost ({} by the status), beyond it after {:.0} s",
            killed.reached, killed.resumed_at, killed.steps_lost, killed.steps_lost_in_status, killed.recovered_s
        );
    }
    println!("workers {:?}; {} restarts, {} steps lost; {:.0} s in all", r.workers, r.restarts, r.steps_lost, r.took_s);
}

/// Every promise that was broken, in one error.
fn check(r: &TaskFigures, short: bool) -> Result<()> {
    let mut broken = Vec::new();
    if r.restarts > 0 {
        broken.push(format!("{} restarts", r.restarts));
    }
    if r.steps_lost > 0 {
        broken.push(format!("{} steps lost", r.steps_lost));
    }
    // Two checkpoints were saved before the kill.
    if let Some(killed) = r.killed_server.as_ref().filter(|killed| killed.resumed_at <= killed.checkpoint_every) {
        broken.push(format!("the job of a killed server began again at step {}", killed.resumed_at));
    }
    let is_silent = |killed: &&KilledServer| killed.steps_lost > 0 && killed.steps_lost_in_status == 0;
    if let Some(killed) = r.killed_server.as_ref().filter(is_silent) {
        broken.push(format!("{} steps were lost by a killed server, and the status says none", killed.steps_lost));
    }
    // The worker talks to the two servers and to nobody else.
    let of_role = |role: &str| r.traffic.iter().filter(|(task, _)| task.starts_with(role)).map(|(_, rate)| rate).sum();
    let (servers, workers): (u64, u64) = (of_role("ps-"), of_role("worker-"));
    if !r.traffic.is_empty() && (servers.min(workers) == 0 || servers.abs_diff(workers) > servers.max(workers) / 4) {
        broken.push(format!("servers exchange {servers} bytes a second, and their worker {workers}"));
    }
    // Figures of speed are for a quiet machine: the short form prints them and judges only what must always hold.
    if !short {
        match (r.mean_completion_to_stock, r.utilisation_to_stock) {
            (Some(mean), Some(used)) if mean.median < 1.0 && used.median > 1.0 => {}
            (mean, used) if !r.arrivals.is_empty() => {
                let text = |part: Option<Spread>| part.map_or("no number".to_owned(), |part| part.to_string());
                let (mean, used) = (text(mean), text(used));
                broken.push(format!("operator is not better than stock: mean completion {mean}, CPU {used}"));
            }
            _ => {}
        }
        if let Some(hot) = r.hot_server.as_ref().filter(|hot| hot.speedup.is_nan() || hot.speedup < LEAST_SPEEDUP) {
            broken.push(format!("the resized server made the job {:.2} times as fast", hot.speedup));
        }
    }
    ensure!(broken.is_empty(), "promises were broken: {}", broken.join("; "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_read_from_the_steps_of_a_time() {
        let steps: Vec<(f64, u64)> = (0..100_u32).map(|at| (f64::from(at) / 10.0, u64::from(at) * 2)).collect();
        assert!((speed_between(&steps, 2.0, 8.0).unwrap() - 20.0).abs() < 1e-6);
        assert!(speed_between(&steps, 9.0, 19.0).is_err(), "a tenth of the time has steps");
        assert!(speed_between(&steps, 50.0, 60.0).is_err());
    }

    #[test]
    fn a_promise_is_judged_only_where_its_part_was_played() {
        let mut report = TaskFigures::default();
        assert!(check(&report, false).is_ok(), "nothing was played");
        let spread = |values: &[f64]| Spread::of(values);
        report.arrivals.push(Arrival::default());
        (report.mean_completion_to_stock, report.utilisation_to_stock) = (spread(&[0.5, 0.7, 1.1]), spread(&[1.5]));
        assert!(check(&report, false).is_ok(), "the median counts");
        report.utilisation_to_stock = spread(&[0.9]);
        assert!(check(&report, false).is_err() && check(&report, true).is_ok());
        report.utilisation_to_stock = spread(&[f64::NAN]);
        assert!(check(&report, false).is_err());
        let from_the_start =
            KilledServer { checkpoint_every: 20, reached: 90, resumed_at: 4, ..KilledServer::default() };
        let lost = TaskFigures { killed_server: Some(from_the_start), ..TaskFigures::default() };
        assert!(check(&lost, true).is_err(), "no checkpoint was used");
        let slow = HotServer { speedup: 1.2, ..HotServer::default() };
        let report = TaskFigures { hot_server: Some(slow), ..TaskFigures::default() };
        assert!(check(&report, false).is_err());
    }
}
