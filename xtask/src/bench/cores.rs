//! Shares that bind on many cores: real PyTorch jobs with teams of threads on a machine with at least eight cores.
//!
//! Sets of jobs: *three* (a VAE, a convolutional net, and a short convolutional net that comes last) and *six*. The
//! jobs of *three* have the proportions of 3,000, 1,500 and 400 steps. In the set *short*, which earlier figures are
//! about, the second job is much shorter and has often less left than the late job when that one begins to train.
//! Every set runs with the tuned start under each policy, several times, the policies in turn, so that a machine that
//! slows down for a while slows all of them; the figures are medians. One round with a plain start shows what users
//! have without Gainshare. Sizes are set by how fast one job trains alone.
//!
//! **Terms.** *Completion*: seconds from a job's arrival to its end. *Training*: the same without the time until the
//! script printed that it begins to train, because importing PyTorch takes as long as training here. *Late job*: the
//! last one of its set.

use super::lab::Lab;
use super::median;
use super::training::{self, PrintingJob};
use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The sets of jobs.
    #[arg(long, value_delimiter = ',', default_values = ["three", "six"])]
    jobs: Vec<String>,
    /// The policies; changes are against the first one.
    #[arg(long, value_delimiter = ',', default_values = ["na", "flowcon", "gainshare"])]
    policies: Vec<String>,
    /// How shares become limits: `default`, `weight`, `cores`.
    #[arg(long, value_delimiter = ',', default_value = "default")]
    modes: Vec<String>,
    /// How often every round with a tuned start is repeated.
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// Leave out the rounds with a plain start.
    #[arg(long)]
    tuned_only: bool,
    /// The length of all jobs, relative to the usual one.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Steps a second of a VAE and of a convolutional net alone, instead of measuring them.
    #[arg(long, value_delimiter = ',')]
    pace: Vec<f64>,
    /// A round that takes longer is ended and reported as such.
    #[arg(long, default_value_t = 100.0)]
    limit_s: f64,
    /// FlowCon's interval.
    #[arg(long, default_value = "2s")]
    interval: String,
    /// FlowCon's divisor of the part that converged jobs keep; its own default otherwise.
    #[arg(long)]
    beta: Option<f64>,
    /// Refuse machines with fewer cores.
    #[arg(long, default_value_t = 8)]
    least_cores: usize,
    /// Writes the share of every job once a second into this file.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Do not build, but use this `gainshare`, with the library beside it.
    #[arg(long)]
    program: Option<PathBuf>,
    /// The Python with PyTorch.
    #[arg(long, default_value = "/usr/bin/python3")]
    python: PathBuf,
}

/// One training job: its model, when it arrives, and how long it would train alone.
struct JobPlan {
    name: &'static str,
    model: Model,
    arrives_s: f64,
    alone_s: f64,
}

#[derive(Clone, Copy, PartialEq)]
enum Model {
    Vae,
    Conv,
}

impl Model {
    const ALL: [Model; 2] = [Model::Vae, Model::Conv];

    /// The words for bench/torch/train.py: models large enough for many threads.
    fn words(self) -> [&'static str; 5] {
        match self {
            Model::Vae => ["vae", "--hidden", "1200", "--batch", "512"],
            Model::Conv => ["conv", "--hidden", "128", "--batch", "128"],
        }
    }
}

const fn plan(name: &'static str, model: Model, arrives_s: f64, alone_s: f64) -> JobPlan {
    JobPlan { name, model, arrives_s, alone_s }
}

const THREE: [JobPlan; 3] = [
    plan("vae", Model::Vae, 0.0, 15.0),
    plan("conv", Model::Conv, 5.0, 17.0),
    plan("late-conv", Model::Conv, 10.0, 4.5),
];

const SHORT: [JobPlan; 3] =
    [plan("vae", Model::Vae, 0.0, 15.0), plan("conv", Model::Conv, 3.0, 8.0), plan("late-conv", Model::Conv, 9.0, 4.0)];

const SIX: [JobPlan; 6] = [
    plan("vae-1", Model::Vae, 0.0, 9.0),
    plan("conv-1", Model::Conv, 2.0, 6.0),
    plan("vae-2", Model::Vae, 4.0, 5.0),
    plan("conv-2", Model::Conv, 6.0, 4.0),
    plan("vae-3", Model::Vae, 8.0, 3.0),
    plan("late-conv", Model::Conv, 12.0, 2.5),
];

/// Steps between two printed losses.
const EVERY: usize = 10;

/// The script, so that the benchmark needs no checkout.
const SCRIPT: &str = include_str!("../../../bench/torch/train.py");

pub(crate) fn run(args: &Args) -> Result<Value> {
    let cores = std::thread::available_parallelism()?.get();
    ensure!(
        cores >= args.least_cores,
        "this benchmark needs a machine with at least {} cores; this one has {cores}",
        args.least_cores
    );
    let lab = args.program.as_ref().map_or_else(Lab::new, |program| Lab::with_program(program.clone()))?;
    let script = lab.path("train.py");
    std::fs::write(&script, SCRIPT)?;
    let mut bench = Bench { lab, args, script, pace: Vec::new() };
    bench.measure_pace()?;
    let mut figures = json!({"cores": cores, "steps_per_s_alone": bench.pace});
    for name in &args.jobs {
        let plans: &[JobPlan] = match name.as_str() {
            "three" => &THREE,
            "six" => &SIX,
            "short" => &SHORT,
            other => bail!("--jobs knows `three`, `six` and `short`, not `{other}`"),
        };
        for mode in &args.modes {
            figures[name][mode] = bench.run_set(plans, mode)?;
        }
        if !args.tuned_only {
            let plain = bench.round(plans, "default", &args.policies[0], Start::Plain)?;
            figures[name]["plain"] = plain.json(plans);
        }
    }
    Ok(figures)
}

#[derive(Clone, Copy, PartialEq)]
enum Start {
    Tuned,
    Plain,
}

struct Bench<'a> {
    lab: Lab,
    args: &'a Args,
    script: PathBuf,
    /// Steps a second alone, by model.
    pace: Vec<f64>,
}

/// What one round gave, by job.
struct Round {
    completion_s: Vec<f64>,
    training_s: Vec<f64>,
    makespan_s: f64,
    /// Whether all jobs ended within the limit.
    is_whole: bool,
}

impl Round {
    fn json(&self, plans: &[JobPlan]) -> Value {
        let job = |i: usize, plan: &JobPlan| json!({"name": plan.name, "completion_s": self.completion_s[i], "training_s": self.training_s[i]});
        let jobs: Vec<Value> = plans.iter().enumerate().map(|(i, plan)| job(i, plan)).collect();
        json!({"jobs": jobs, "makespan_s": self.makespan_s, "ended_within_limit": self.is_whole})
    }
}

impl Bench<'_> {
    fn measure_pace(&mut self) -> Result<()> {
        if self.args.pace.len() == Model::ALL.len() {
            self.pace.clone_from(&self.args.pace);
            return Ok(());
        }
        self.lab.up(&["--policy", "na"])?;
        for model in Model::ALL {
            const STEPS: usize = 300;
            self.pace.push(self.start("alone", model, STEPS, Start::Tuned)?.pace(EVERY)?);
        }
        eprintln!("steps a second alone: vae {:.1}, conv {:.1}", self.pace[0], self.pace[1]);
        self.lab.down()
    }

    fn start(&self, name: &str, model: Model, steps: usize, start: Start) -> Result<PrintingJob> {
        let flags: &[&str] = if start == Start::Plain { &["--plain"] } else { &[] };
        let mut command = training::command(&self.lab, &self.args.python, &self.script, name, flags);
        command.args(model.words()).args(["--every", &EVERY.to_string(), "--steps", &steps.to_string()]);
        PrintingJob::spawn(command)
    }

    fn steps(&self, plan: &JobPlan) -> usize {
        let pace = self.pace[usize::from(plan.model == Model::Conv)];
        ((pace * plan.alone_s * self.args.scale / EVERY as f64) as usize).max(5) * EVERY
    }

    fn run_set(&mut self, plans: &[JobPlan], mode: &str) -> Result<Value> {
        let policies = &self.args.policies;
        let mut rounds: Vec<Vec<Round>> = policies.iter().map(|_| Vec::new()).collect();
        for _ in 0..self.args.repeat {
            for (of_policy, policy) in rounds.iter_mut().zip(policies) {
                of_policy.push(self.round(plans, mode, policy, Start::Tuned)?);
            }
        }
        let medians: Vec<Medians> = rounds.iter().map(|rounds| Medians::of(rounds, plans.len())).collect();
        let mut figures = json!({});
        for ((policy, of), rounds) in policies.iter().zip(&medians).zip(&rounds) {
            let base = &medians[0];
            let change = |now: &[f64], before: &[f64], i: usize| now[i] / before[i] - 1.0;
            let late = plans.len() - 1;
            let worst =
                (0..plans.len()).map(|i| change(&of.completion_s, &base.completion_s, i)).fold(f64::MIN, f64::max);
            figures[policy] = json!({
                "late_training_change": change(&of.training_s, &base.training_s, late),
                "late_completion_change": change(&of.completion_s, &base.completion_s, late),
                "worst_completion_change": worst,
                "makespan_change": of.makespan_s / base.makespan_s - 1.0,
                "completion_s": of.completion_s,
                "training_s": of.training_s,
                "makespan_s": of.makespan_s,
                "rounds": rounds.iter().map(|round| round.json(plans)).collect::<Vec<_>>(),
            });
        }
        Ok(figures)
    }

    fn round(&mut self, plans: &[JobPlan], mode: &str, policy: &str, start: Start) -> Result<Round> {
        let mut flags = vec!["--policy", policy];
        if mode != "default" {
            flags.extend(["--mode", mode]);
        }
        let beta = self.args.beta.map(|beta| beta.to_string());
        if policy == "flowcon" {
            flags.extend(["--alpha", "0.1", "--interval", &self.args.interval]);
            flags.extend(beta.iter().flat_map(|beta| ["--beta", beta]));
        }
        self.lab.up(&flags)?;
        let began = Instant::now();
        let elapsed = || began.elapsed().as_secs_f64();
        let mut jobs: Vec<PrintingJob> = Vec::new();
        let mut ended_s: Vec<Option<f64>> = vec![None; plans.len()];
        let mut traced_s = 0.0;
        while ended_s.iter().any(Option::is_none) && elapsed() < self.args.limit_s {
            if let Some(plan) = plans.get(jobs.len()).filter(|plan| elapsed() >= plan.arrives_s) {
                jobs.push(self.start(plan.name, plan.model, self.steps(plan), start)?);
            }
            for (i, job) in jobs.iter_mut().enumerate() {
                if ended_s[i].is_none() && job.has_ended()? {
                    ended_s[i] = Some(elapsed());
                }
            }
            if elapsed() >= traced_s {
                traced_s += 1.0;
                self.trace(mode, policy, elapsed())?;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let limit_s = self.args.limit_s;
        let is_whole = ended_s.iter().all(Option::is_some);
        let ended_s: Vec<f64> = ended_s.into_iter().map(|end| end.unwrap_or(limit_s)).collect();
        let ready_s: Vec<f64> = jobs.iter().map(|job| job.ready_s(began).unwrap_or(limit_s)).collect();
        drop(jobs);
        self.lab.down()?;
        let arrivals = plans.iter().map(|plan| plan.arrives_s);
        let round = Round {
            completion_s: ended_s.iter().zip(arrivals).map(|(end, arrived)| end - arrived).collect(),
            training_s: ended_s.iter().zip(ready_s).map(|(end, ready)| (end - ready).max(0.0)).collect(),
            makespan_s: ended_s.iter().copied().fold(0.0, f64::max),
            is_whole,
        };
        let kind = if start == Start::Plain { "plain" } else { "tuned" };
        eprintln!(
            "{kind} {mode} {policy}: training {:.1?}, completion {:.1?}, makespan {:.1}",
            round.training_s, round.completion_s, round.makespan_s
        );
        Ok(round)
    }

    /// Writes what `ps` shows.
    fn trace(&self, mode: &str, policy: &str, at_s: f64) -> Result<()> {
        let Some(path) = &self.args.trace else { return Ok(()) };
        let field = |job: &Value, name: &str| job.get(name).cloned().unwrap_or_default();
        let jobs = self.lab.jobs()?;
        let names = ["name", "share", "category", "cpu_cores", "whole_cores", "team"];
        let jobs: Vec<[Value; 6]> = jobs.iter().map(|job| names.map(|name| field(job, name))).collect();
        let line = json!({"mode": mode, "policy": policy, "at_s": at_s, "jobs": jobs});
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
        writeln!(file, "{line}")?;
        Ok(())
    }
}

/// Medians over the rounds, by job.
struct Medians {
    completion_s: Vec<f64>,
    training_s: Vec<f64>,
    makespan_s: f64,
}

impl Medians {
    fn of(rounds: &[Round], jobs: usize) -> Medians {
        let over = |of: &dyn Fn(&Round) -> f64| median(rounds.iter().map(of).collect());
        Medians {
            completion_s: (0..jobs).map(|i| over(&|round| round.completion_s[i])).collect(),
            training_s: (0..jobs).map(|i| over(&|round| round.training_s[i])).collect(),
            makespan_s: over(&|round| round.makespan_s),
        }
    }
}
