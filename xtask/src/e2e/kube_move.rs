//! `cargo xtask e2e kube-move`: jobs that move to where the cluster gains, on a real cluster of three nodes.
//!
//! The same training jobs arrive at the same random moments three times: left to the cluster's own
//! scheduler (`na`), under `specon` and under `gainshare`. All are TrainingJobs with a checkpoint on a
//! volume that every node sees. Half of the jobs say nowhere how many steps they will take. With `--seeds`
//! all of this is repeated with other arrivals and sizes, and medians are judged.
//!
//! Meanwhile a watcher reads the kernel's control groups of all nodes twenty times a second: two attempts of
//! one job must never live at once. Every job has a twin with the same seed in the round without moves: both
//! must end with the same loss.

use super::StoryArgs;
use super::attempts::{Attempts, ObservedAttempt};
use super::kube::{Bystanders, Kube, PAUSE, unix_s, wait_every, wait_for};
use super::kube_share::install;
use super::train::{IMAGE, steps_per_second};
use crate::bench::median;
use crate::programs::Programs;
use crate::sh;
use crate::testbed::{Spec, Testbed};
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Two of them share a processor, so that together they use less than it has, and each really has what it
/// is said to have.
const NODES: [(&str, f64); 3] = [("one", 0.4), ("two", 0.4), ("three", 0.4)];
const ALL: [&str; 3] = ["na", "specon", "gainshare"];
const COUNT: usize = 12;
/// `specon` may be worse by no more than two runs of the same differ.
const NOISE: f64 = 0.05;
/// `gainshare` must be better by this in the mean of one run.
const LEAST_GAIN: f64 = 0.10;
/// `gainshare` must be better by this in the median over several seeds, and worse with none of them.
const LEAST_MEDIAN_GAIN: f64 = 0.20;
const LONGEST_STEP_S: f64 = 5.0;
/// Losses of twins may differ by rounding in the printed number only: training resumes exactly.
const TOLERANCE: f64 = 1e-4;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Fewer and shorter jobs, once under `specon` only, as `cargo xtask test` does it.
    #[arg(long)]
    short: bool,
    /// Of the arrivals and sizes.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// How many seeds, beginning with `--seed`. With several, the medians over them are judged.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// All work of the jobs, in seconds of one core.
    #[arg(long = "work", value_name = "SECONDS")]
    work_s: Option<f64>,
    /// Only under these, for a closer look: what needs a comparison is then not judged.
    #[arg(long, value_name = "POLICIES", value_delimiter = ',', value_parser = ALL)]
    only: Vec<String>,
    /// Draw where each job ran, one picture a policy, into this folder.
    #[arg(long, value_name = "FOLDER")]
    figures: Option<PathBuf>,
    /// Leave the cluster up, to look around.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    story: StoryArgs,
}

impl Args {
    /// With the programs that were built for the tests.
    pub(super) fn short(programs: &Programs) -> Args {
        let (only, story) = (vec![], StoryArgs::with(programs));
        Args { short: true, seed: 0, seeds: 1, work_s: None, only, figures: None, keep: false, story }
    }
}

/// One job of the story.
struct StoryJob {
    name: String,
    model: &'static str,
    /// How it prints.
    format: &'static str,
    steps: u64,
    /// Whether its command and its lines say how many steps it will take.
    total: bool,
    report_every: u64,
    arrives_s: f64,
}

/// What was measured with several seeds.
#[derive(Debug, Serialize)]
struct SeedsFigures {
    /// By seed.
    seeds: BTreeMap<u64, MoveFigures>,
    /// Over the seeds, as parts of `na`'s: below 1 is better.
    mean_to_na: BTreeMap<&'static str, Spread>,
    makespan_to_na: BTreeMap<&'static str, Spread>,
    took_s: f64,
}

#[derive(Debug, Serialize)]
struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Spread {
        let fold = |start, pick: fn(f64, f64) -> f64| values.iter().copied().fold(start, pick);
        let (least, most) = (fold(f64::INFINITY, f64::min), fold(f64::NEG_INFINITY, f64::max));
        Spread { median: median(values.to_vec()), least, most }
    }
}

#[derive(Debug, Default, Serialize)]
struct MoveFigures {
    /// By policy.
    rounds: BTreeMap<&'static str, Round>,
    /// Parts of `na`'s: below 1 is better.
    mean_to_na: BTreeMap<&'static str, f64>,
    makespan_to_na: BTreeMap<&'static str, f64>,
    migrations: usize,
    /// Moments at which two attempts of a job were alive, over all rounds.
    two_alive: Vec<String>,
    /// Migrated jobs whose next attempt did not go on where the one before was saved.
    not_continued: Vec<String>,
    /// The largest difference between the last losses of twins, as a part of the loss.
    twins_differ: f64,
    longest_save_s: f64,
    longest_restore_s: f64,
    took_s: f64,
}

#[derive(Debug, Default, Serialize)]
struct Round {
    mean_s: f64,
    makespan_s: f64,
    completion_s: BTreeMap<String, f64>,
    last_loss: BTreeMap<String, f64>,
    moves: Vec<MoveRecord>,
    /// What the machine did beside the three nodes.
    bystanders_cores: f64,
    /// What the nodes had of the processors. The work is the same in every round: where this differs, the
    /// machine itself was slower or faster.
    nodes_cpu_s: f64,
}

#[derive(Debug, Clone, Serialize)]
struct MoveRecord {
    job: String,
    from: String,
    to: String,
    why: String,
    save_s: f64,
    restore_s: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let began = Instant::now();
    let programs = args.story.programs()?;
    run_on(up(args, &programs)?, began, args, &programs)
}

/// The cluster of the story, with Gainshare installed.
pub(super) fn up(args: &Args, programs: &Programs) -> Result<Kube> {
    let kube = Kube { testbed: Testbed::up(&Spec::new("kube-move", &NODES)?)? };
    kube.testbed.load_image(&programs.files(), IMAGE)?;
    // SpeCon looks every half minute at jobs of many minutes; these take less than two.
    let interval = if args.short { "2s" } else { "4s" };
    let numbers = format!("operator.extraArgs={{--specon-interval={interval},--specon-alpha=0.02}}");
    install(&kube, &["--set", &numbers])?;
    Ok(kube)
}

/// Tells the story on its cluster.
pub(super) fn run_on(kube: Kube, began: Instant, args: &Args, programs: &Programs) -> Result<()> {
    let seeds = args.seed..args.seed.saturating_add(args.seeds);
    let reports: Result<BTreeMap<u64, MoveFigures>> =
        seeds.map(|seed| Ok((seed, run_story(&kube, args, programs, seed)?))).collect();
    kube.end(args.keep)?;
    let mut reports = reports?;
    let took_s = began.elapsed().as_secs_f64();
    if args.seeds > 1 {
        let report = SeedsFigures::of(reports, took_s);
        args.story.print(&report, SeedsFigures::print)?;
        return report.check();
    }
    let (_, mut report) = reports.pop_first().context("one seed was run")?;
    report.took_s = took_s;
    args.story.print(&report, print)?;
    check(&report, args.short || !args.only.is_empty())
}

/// All rounds with the arrivals and sizes of one seed.
fn run_story(kube: &Kube, args: &Args, programs: &Programs, seed: u64) -> Result<MoveFigures> {
    let began = Instant::now();
    let program = &programs.gainshare();
    let jobs = if args.short {
        crowd(program, args.work_s.unwrap_or(56.0))?
    } else {
        schedule(program, seed, args.work_s.unwrap_or(120.0))?
    };
    let mut report = MoveFigures::default();
    let policies: Vec<&'static str> = match (args.only.is_empty(), args.short) {
        (true, true) => vec!["specon"],
        (true, false) => ALL.to_vec(),
        (false, _) => ALL.into_iter().filter(|policy| args.only.iter().any(|only| only == policy)).collect(),
    };
    let most_rounds = if args.short { SHORT_ROUNDS } else { 1 };
    for policy in policies {
        for number in 1..=most_rounds {
            eprintln!("e2e: under {policy}, seed {seed}");
            let mut namespace = format!("under-{policy}");
            if args.seeds > 1 {
                namespace += &format!("-seed-{seed}");
            }
            if number > 1 {
                namespace += &format!("-{number}");
            }
            let round = play(kube, programs, (policy, &namespace), &jobs, &mut report)?;
            check_figures(kube, programs, &namespace, &round, args.figures.as_deref())?;
            // The next round begins without pods of this one.
            kube.kubectl(&["delete", "trainingjobs", "--all", "-n", &namespace, "--timeout=90s"])?;
            let has_moved = !round.moves.is_empty();
            report.rounds.insert(policy, round);
            if has_moved {
                break;
            }
        }
    }
    compare(&mut report);
    report.took_s = began.elapsed().as_secs_f64();
    Ok(report)
}

/// Most rounds of the short form. SpeCon decides by noisy losses: in one of five rounds no job has to move, and
/// what the story checks needs a move.
const SHORT_ROUNDS: usize = 3;

/// Models, and how each prints.
const MODELS: [(&str, &str); 3] = [("vae", "keras"), ("mlp", "json"), ("gru", "json")];

/// One long job a node, which are flat when four shorter ones come: two of these meet on one node, and the
/// long one there is in their way.
fn crowd(program: &Path, work_s: f64) -> Result<Vec<StoryJob>> {
    let long = (0..3).map(|_| (0, 0.21, 0.0));
    let short = (0..4).map(|i| (1 + i % 2, 0.0925, 0.25));
    let jobs = long.chain(short).enumerate().map(|(i, (model, part, arrives))| {
        let (model, format) = MODELS[model];
        job(i, model, format, steps_per_second(program, model)?, work_s * part, work_s * arrives)
    });
    jobs.collect()
}

fn job(
    i: usize,
    model: &'static str,
    format: &'static str,
    rate: f64,
    work_s: f64,
    arrives_s: f64,
) -> Result<StoryJob> {
    let steps = ((rate * work_s) as u64).max(60);
    let report_every = ((rate / 4.0) as u64).max(1);
    Ok(StoryJob { name: format!("job-{}", i + 1), model, format, steps, total: true, report_every, arrives_s })
}

/// Sizes and arrivals by the seed: a few long jobs, several short ones, most of them within the first third.
fn schedule(program: &Path, seed: u64, work_s: f64) -> Result<Vec<StoryJob>> {
    let mut rates = BTreeMap::new();
    for (model, _) in MODELS {
        rates.insert(model, steps_per_second(program, model)?);
    }
    let mut state = seed;
    let mut draw = || {
        // SplitMix64: a fixed row of numbers for a seed.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let sizes: Vec<f64> = (0..COUNT).map(|i| if i % 3 == 0 { 3.0 + 2.0 * draw() } else { 0.6 + draw() }).collect();
    let all: f64 = sizes.iter().sum();
    let cores: f64 = NODES.iter().map(|(_, cores)| cores).sum();
    let mut arrivals: Vec<f64> = (0..COUNT).map(|_| draw() * work_s / cores * 0.4).collect();
    arrivals[0] = 0.0;
    arrivals.sort_by(f64::total_cmp);
    let jobs = sizes.into_iter().zip(arrivals).enumerate().map(|(i, (size, arrives_s))| {
        let (model, format) = MODELS[i % MODELS.len()];
        let job = job(i, model, format, rates[model], work_s * size / all, arrives_s)?;
        Ok(if i % 2 == 0 { job } else { StoryJob { format: "kv", total: false, ..job } })
    });
    jobs.collect()
}

/// One round under a policy, in a namespace of its own: the jobs come, and all of them end.
fn play(
    kube: &Kube,
    programs: &Programs,
    (policy, namespace): (&'static str, &str),
    jobs: &[StoryJob],
    report: &mut MoveFigures,
) -> Result<Round> {
    prepare(kube, namespace)?;
    let nodes: Vec<&str> = NODES.iter().map(|(name, _)| *name).collect();
    let attempts = Attempts::watch(kube, &nodes)?;
    let bystanders = Bystanders::watch(kube, &nodes)?;
    let began = Instant::now();
    let mut created = BTreeMap::new();
    for job in jobs {
        std::thread::sleep(Duration::from_secs_f64(job.arrives_s).saturating_sub(began.elapsed()));
        created.insert(job.name.clone(), unix_s());
        kube.create(&training_job(namespace, policy, job))?;
        eprintln!("e2e: {:5.1} s: {} came", began.elapsed().as_secs_f64(), job.name);
    }
    if let Some(job) = jobs.last().filter(|_| policy != "na") {
        // The operator decides where it runs about once a second.
        wait_for("the recorded decision about a job", Duration::from_secs(30), || {
            kube.replay(programs, namespace, &job.name)
        })?;
    }
    let total: f64 = jobs.last().map_or(0.0, |job| job.arrives_s);
    let patience = Duration::from_secs_f64(total * 4.0 + 300.0);
    let ended = wait_every(PAUSE, "the end of the jobs", patience, || {
        let list = kube.get(&["trainingjobs", "-n", namespace])?;
        for job in list["items"].as_array().into_iter().flatten() {
            let name = job["metadata"]["name"].as_str().unwrap_or_default();
            match job["status"]["state"].as_str() {
                Some("Succeeded") => {}
                Some("Failed") => return Ok(Err(format!("{name} failed: {}", job["status"]["message"]))),
                state => bail!("{name} is {}", state.unwrap_or("not looked at yet")),
            }
        }
        Ok(Ok(list))
    })?;
    let list = ended.map_err(|why| anyhow::anyhow!(why))?;
    let ran = attempts.end()?;
    let (bystanders_cores, nodes_cpu_s) = (bystanders.cores()?, bystanders.nodes_s()?);
    let mut round = Round { bystanders_cores, nodes_cpu_s, ..Round::default() };
    for job in jobs {
        let found = list["items"].as_array().into_iter().flatten().find(|j| j["metadata"]["name"] == json!(job.name));
        let status = &found.with_context(|| format!("{} is gone", job.name))?["status"];
        let last = ran.iter().filter(|r| r.job == job.name).max_by_key(|r| r.attempt);
        let last = last.with_context(|| format!("{} was never seen running", job.name))?;
        round.completion_s.insert(job.name.clone(), last.last_s - created[&job.name]);
        let loss = last.last_loss().with_context(|| format!("{} printed no loss", job.name))?;
        round.last_loss.insert(job.name.clone(), loss);
        let moves = status["lastMoves"].as_array().into_iter().flatten();
        round.moves.extend(moves.filter(|m| m["from"] != m["to"]).map(|m| move_record(&job.name, m)));
    }
    round.mean_s = round.completion_s.values().sum::<f64>() / jobs.len() as f64;
    let first = created.values().copied().fold(f64::INFINITY, f64::min);
    round.makespan_s = ran.iter().map(|r| r.last_s).fold(0.0, f64::max) - first;
    let (mean_s, makespan_s, moves) = (round.mean_s, round.makespan_s, round.moves.len());
    eprintln!("e2e: {policy}: mean {mean_s:.1} s, makespan {makespan_s:.1} s, {moves} moves");
    report.two_alive.extend(two_alive(&ran));
    report.not_continued.extend(not_continued(&ran));
    Ok(round)
}

/// What people are shown of a round: every move in the Gantt chart, with its mark, and in the words about its job.
fn check_figures(
    kube: &Kube,
    programs: &Programs,
    namespace: &str,
    round: &Round,
    figures: Option<&Path>,
) -> Result<()> {
    let plugin = |words: &[&str]| {
        let mut command = programs.command("kubectl-gainshare");
        command.args(words).args(["-n", namespace]);
        sh::output(command.env("KUBECONFIG", kube.testbed.kubeconfig()))
    };
    let stays: Value = serde_json::from_str(&plugin(&["gantt", "-o", "json"])?).context("the plugin prints JSON")?;
    let marked: Vec<&Value> = stays.as_array().into_iter().flatten().filter(|stay| stay["mark"] != "").collect();
    for m in &round.moves {
        let drawn = marked.iter().any(|stay| stay["job"] == json!(m.job) && stay["node"] == json!(m.to));
        ensure!(drawn, "the Gantt chart of {namespace} does not show that {} moved to {}: {stays}", m.job, m.to);
        let words = plugin(&["explain", &m.job])?;
        ensure!(words.contains(&m.why), "`explain {}` does not say why it moved: {words}", m.job);
    }
    ensure!(marked.len() == round.moves.len(), "the Gantt chart of {namespace} shows other moves: {stays}");
    if let Some(folder) = figures {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("{namespace}.svg"));
        plugin(&["gantt", "--figure", path.to_str().context("a path of plain letters")?])?;
    }
    Ok(())
}

fn move_record(job: &str, m: &Value) -> MoveRecord {
    let text = |key: &str| m[key].as_str().unwrap_or_default().to_owned();
    let number = |key: &str| m[key].as_f64().unwrap_or(f64::NAN);
    let (save_s, restore_s) = (number("saveS"), number("restoreS"));
    MoveRecord { job: job.to_owned(), from: text("from"), to: text("to"), why: text("message"), save_s, restore_s }
}

/// A namespace with the claim `checkpoints` on a folder that all nodes see.
pub(super) fn prepare(kube: &Kube, namespace: &str) -> Result<()> {
    let labels = json!({ "gainshare.dev/jobs": "enabled" });
    let metadata = json!({ "name": namespace, "labels": labels });
    kube.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": metadata }))?;
    let folder = kube.testbed.shared_folder(namespace)?;
    kube.apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": namespace },
        "spec": {
            "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteMany"], "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": { "namespace": namespace, "name": "checkpoints" },
            "hostPath": { "path": folder, "type": "Directory" },
        },
    }))?;
    kube.apply(&json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "checkpoints", "namespace": namespace },
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": namespace,
            "resources": { "requests": { "storage": "1Gi" } },
        },
    }))
}

fn training_job(namespace: &str, policy: &str, job: &StoryJob) -> Value {
    let (steps, every) = (job.steps.to_string(), job.report_every.to_string());
    let mut args = vec!["train", job.model, "--format", job.format, "--report-every", &every];
    args.extend(["--checkpoint", "/checkpoints", "--checkpoint-every", "0"]);
    // By this variable the watcher finds the job of a process.
    let mut env = vec![json!({ "name": "STORY_JOB", "value": job.name })];
    if job.total {
        args.extend(["--steps", &steps]);
    } else {
        // The node agent reads command lines, and no environments.
        env.push(json!({ "name": "GAINSHARE_TRAIN_STEPS", "value": steps }));
    }
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": { "name": job.name, "namespace": namespace },
        "spec": {
            "policy": policy,
            "objective": { "metric": "loss", "type": "minimize" },
            "checkpoint": { "claimName": "checkpoints", "path": "/checkpoints" },
            "template": { "spec": { "containers": [{
                "name": "train", "image": IMAGE, "imagePullPolicy": "Never", "args": args,
                "env": env,
                "resources": { "requests": { "cpu": "50m", "memory": "48Mi" } },
            }] } },
        },
    })
}

/// Attempts of one job whose lives overlapped.
fn two_alive(ran: &[ObservedAttempt]) -> Vec<String> {
    let mut found = vec![];
    for (i, a) in ran.iter().enumerate() {
        for b in ran[i + 1..].iter().filter(|b| b.job == a.job && b.pod != a.pod) {
            if a.first_s <= b.last_s && b.first_s <= a.last_s {
                found.push(format!("{}: attempts {} and {} were alive together", a.job, a.attempt, b.attempt));
            }
        }
    }
    found
}

/// Attempts after the first that did not begin with the step at which the one before was saved.
fn not_continued(ran: &[ObservedAttempt]) -> Vec<String> {
    let mut found = vec![];
    for later in ran {
        let before = ran.iter().filter(|r| r.job == later.job && r.attempt < later.attempt).max_by_key(|r| r.attempt);
        let Some(before) = before else { continue };
        let (saved, resumed) = (before.saved_step(), later.resumed_step());
        if saved.is_none() || saved != resumed {
            found.push(format!("{}: saved {saved:?}, attempt {} began at {resumed:?}", later.job, later.attempt));
        }
    }
    found
}

fn compare(report: &mut MoveFigures) {
    let na = report.rounds.get("na").map(|r| (r.mean_s, r.makespan_s, r.last_loss.clone()));
    for (policy, round) in &report.rounds {
        report.migrations += round.moves.len();
        for m in &round.moves {
            report.longest_save_s = report.longest_save_s.max(m.save_s);
            report.longest_restore_s = report.longest_restore_s.max(m.restore_s);
        }
        let Some((mean_s, makespan_s, losses)) = &na else { continue };
        report.mean_to_na.insert(policy, round.mean_s / mean_s);
        report.makespan_to_na.insert(policy, round.makespan_s / makespan_s);
        for (job, loss) in &round.last_loss {
            let twin = losses.get(job).copied().unwrap_or(f64::NAN);
            let apart = (loss - twin).abs() / twin.abs().max(1e-9);
            report.twins_differ = report.twins_differ.max(if apart.is_nan() { f64::INFINITY } else { apart });
        }
    }
}

fn print(r: &MoveFigures) {
    let heads = ["policy", "mean", "makespan", "to na", "moves", "bystanders", "nodes' CPU"];
    let [policy, mean, makespan, part, moves, beside, spent] = heads;
    println!("{policy:<10} {mean:>9} {makespan:>10} {part:>8} {moves:>6} {beside:>11} {spent:>11}");
    for (policy, round) in &r.rounds {
        let part = r.mean_to_na.get(policy).map_or("-".to_owned(), |part| format!("{part:.2}"));
        let (mean, makespan, moves) = (round.mean_s, round.makespan_s, round.moves.len());
        let (beside, spent) = (round.bystanders_cores, round.nodes_cpu_s);
        println!(
            "{policy:<10} {mean:>7.1} s {makespan:>8.1} s {part:>8} {moves:>6} {beside:>5.2} cores {spent:>9.1} s"
        );
    }
    for (policy, m) in r.rounds.iter().flat_map(|(p, round)| round.moves.iter().map(move |m| (p, m))) {
        let (job, from, to, why) = (&m.job, &m.from, &m.to, &m.why);
        println!("{policy}: {job} {from} → {to}: {why} (saved in {:.1} s, restored in {:.1} s)", m.save_s, m.restore_s);
    }
    println!("twins differ by {:.1e} of the loss at most; {:.0} s in all", r.twins_differ, r.took_s);
}

impl SeedsFigures {
    fn of(seeds: BTreeMap<u64, MoveFigures>, took_s: f64) -> SeedsFigures {
        let spreads = |part: fn(&MoveFigures) -> &BTreeMap<&'static str, f64>| {
            let mut values: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
            for (policy, value) in seeds.values().flat_map(part) {
                values.entry(policy).or_default().push(*value);
            }
            values.into_iter().map(|(policy, values)| (policy, Spread::of(&values))).collect()
        };
        let (mean_to_na, makespan_to_na) = (spreads(|r| &r.mean_to_na), spreads(|r| &r.makespan_to_na));
        SeedsFigures { seeds, mean_to_na, makespan_to_na, took_s }
    }

    fn print(&self) {
        for (seed, report) in &self.seeds {
            println!("seed {seed}");
            print(report);
        }
        println!("{:<10} {:>24} {:>24}", "policy", "mean to na (all seeds)", "makespan to na");
        for (policy, mean) in &self.mean_to_na {
            let words = |s: &Spread| format!("{:.2} ({:.2} to {:.2})", s.median, s.least, s.most);
            let makespan = self.makespan_to_na.get(policy).map_or("-".to_owned(), words);
            println!("{policy:<10} {:>24} {makespan:>24}", words(mean));
        }
        println!("{:.0} s in all", self.took_s);
    }

    /// Every promise that was broken with any seed, and the medians, in one error.
    fn check(&self) -> Result<()> {
        let mut broken = vec![];
        for (seed, report) in &self.seeds {
            broken.extend(check(report, true).err().map(|e| format!("seed {seed}: {e}")));
        }
        if let Some(gain) = self.mean_to_na.get("gainshare") {
            if gain.median > 1.0 - LEAST_MEDIAN_GAIN {
                broken.push(format!("gainshare's median is {:.2} of na's mean", gain.median));
            }
            if gain.most > 1.0 {
                broken.push(format!("with one seed gainshare takes {:.2} of na's mean", gain.most));
            }
        }
        ensure!(broken.is_empty(), "promises were broken: {}", broken.join("; "));
        Ok(())
    }
}

/// Every promise that was broken, in one error.
fn check(r: &MoveFigures, short: bool) -> Result<()> {
    let mut broken = r.two_alive.clone();
    broken.extend(r.not_continued.clone());
    if r.migrations == 0 {
        broken.push("no job was moved".to_owned());
    }
    if r.twins_differ > TOLERANCE {
        broken.push(format!("the last losses of twins differ by {} of the loss", r.twins_differ));
    }
    // Figures of speed are for a quiet machine: the short telling prints them and judges only what must always hold.
    if !short {
        let worse = |part: Option<&f64>, most: f64| part.is_none_or(|part| *part > most);
        if worse(r.mean_to_na.get("specon"), 1.0 + NOISE) || worse(r.makespan_to_na.get("specon"), 1.0 + NOISE) {
            broken.push(format!("specon is worse than nothing: {:?}, {:?}", r.mean_to_na, r.makespan_to_na));
        }
        if worse(r.mean_to_na.get("gainshare"), 1.0 - LEAST_GAIN) {
            broken.push(format!("gainshare is not {LEAST_GAIN} better in the mean: {:?}", r.mean_to_na));
        }
        if r.longest_save_s > LONGEST_STEP_S || r.longest_restore_s > LONGEST_STEP_S {
            broken.push(format!("saving took {:.1} s, restoring {:.1} s", r.longest_save_s, r.longest_restore_s));
        }
    }
    ensure!(broken.is_empty(), "promises were broken: {}", broken.join("; "));
    Ok(())
}
