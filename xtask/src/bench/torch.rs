//! Six real PyTorch jobs of different kinds on this machine: what the policy is worth, and what the start is worth.
//!
//! Each job prints what public scripts of its kind print; half of them never say how long they will train. Every
//! policy runs the same jobs with the tuned start of `gainshare run`, several times, the policies in turn, so that a
//! machine that slows down for a while slows all of them. One round with a *plain* start shows what users have
//! without Gainshare. Sizes are set by how fast each model trains alone, so that the jobs meet on slow and fast
//! machines alike.
//!
//! **Terms.** *Completion*: seconds from a job's arrival to its end. Changes are parts of what `na` (equal shares)
//! gives: −0.25 is a quarter less. They compare medians over the rounds; all rounds are printed too.
//!
//! A plain PyTorch starts as many threads as it believes there are cores. On some virtual machines it believes in
//! half of them. There the plain round asks for one thread a core, as PyTorch does elsewhere by itself, and the
//! report says so (`threads`).

use super::lab::Lab;
use super::median;
use super::training::{self, PrintingJob};
use crate::{packages, sh};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out the round with a plain start (it takes longest).
    #[arg(long)]
    tuned_only: bool,
    /// How often the rounds with a tuned start are repeated, one policy after the other; medians are reported.
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// The policies; changes are against the first one.
    #[arg(long, value_delimiter = ',', default_values = ["na", "flowcon", "gainshare"])]
    policies: Vec<String>,
    /// The length of all jobs, relative to the usual one.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// FlowCon's threshold of growth.
    #[arg(long, default_value = "0.1")]
    alpha: String,
    /// FlowCon's interval.
    #[arg(long, default_value = "4s")]
    interval: String,
    /// Do not build, but use this `gainshare`, with the library beside it.
    #[arg(long)]
    program: Option<PathBuf>,
}

/// A job: its name, the model and the style of bench/torch/train.py, whether it says how long it will train, when it
/// arrives, and how long it would train alone.
struct JobPlan {
    name: &'static str,
    model: &'static str,
    style: &'static str,
    tells_total: bool,
    arrives_s: f64,
    alone_s: f64,
}

const JOBS: [JobPlan; 6] = [
    JobPlan { name: "vae", model: "vae", style: "examples", tells_total: false, arrives_s: 0.0, alone_s: 26.0 },
    JobPlan { name: "conv", model: "conv", style: "keras", tells_total: true, arrives_s: 4.0, alone_s: 16.0 },
    JobPlan { name: "rnn", model: "rnn", style: "language", tells_total: false, arrives_s: 8.0, alone_s: 10.0 },
    JobPlan { name: "mlp", model: "mlp", style: "json", tells_total: true, arrives_s: 12.0, alone_s: 8.0 },
    JobPlan {
        name: "transformer",
        model: "transformer",
        style: "trainer",
        tells_total: false,
        arrives_s: 18.0,
        alone_s: 6.0,
    },
    JobPlan { name: "late-mlp", model: "mlp", style: "steps", tells_total: true, arrives_s: 24.0, alone_s: 3.0 },
];

/// Steps between two printed losses.
const EVERY: usize = 20;

/// Debian's Python: the one python3-torch belongs to, whatever else is first in PATH.
const PYTHON: &str = "/usr/bin/python3";

pub(crate) fn run(args: &Args) -> Result<Value> {
    ensure!(!args.policies.is_empty() && args.repeat > 0, "at least one policy and one round are needed");
    packages::install_all()?;
    let lab = args.program.as_ref().map_or_else(Lab::new, |program| Lab::with_program(program.clone()))?;
    let mut bench = Bench { lab, args, threads: Threads::measure()?, steps: Vec::new() };
    bench.measure_steps()?;
    let mut rounds: Vec<Vec<Round>> = args.policies.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.repeat {
        for (of_policy, policy) in rounds.iter_mut().zip(&args.policies) {
            of_policy.push(bench.round(policy, None)?);
        }
    }
    let base = Medians::of(&rounds[0]);
    let mut figures = json!({
        "jobs": JOBS.iter().zip(&bench.steps).map(|(job, steps)| job.json(*steps)).collect::<Vec<_>>(),
        "threads": {
            "cores": bench.threads.cores,
            "pytorch_by_itself": bench.threads.by_itself,
            "plain_round": bench.threads.plain(),
        },
    });
    for (policy, rounds) in args.policies.iter().zip(&rounds) {
        figures["policies"][policy] = Medians::of(rounds).json(&base, rounds);
    }
    if !args.tuned_only {
        let plain = bench.round(&args.policies[0], Some(bench.threads.plain()))?;
        figures["plain"] = plain.json();
        figures["tuned_start_speedup"] = json!(plain.makespan_s / base.makespan_s);
    }
    Ok(figures)
}

impl JobPlan {
    fn json(&self, steps: usize) -> Value {
        json!({
            "name": self.name, "model": self.model, "style": self.style, "tells_total": self.tells_total,
            "arrives_s": self.arrives_s, "steps": steps,
        })
    }
}

/// How many threads PyTorch starts.
struct Threads {
    cores: usize,
    by_itself: usize,
}

impl Threads {
    fn measure() -> Result<Threads> {
        let mut ask = Command::new(PYTHON);
        ask.args(["-c", "import os, torch; print(len(os.sched_getaffinity(0)), torch.get_num_threads())"]);
        training::clear_settings(&mut ask);
        let answer = sh::output(&mut ask)?;
        let mut numbers = answer.split_whitespace().filter_map(|n| n.parse().ok());
        let (cores, by_itself) = numbers.next().zip(numbers.next()).context("Python did not answer")?;
        Ok(Threads { cores, by_itself })
    }

    fn plain(&self) -> usize {
        self.cores.max(self.by_itself)
    }
}

struct Bench<'a> {
    lab: Lab,
    args: &'a Args,
    threads: Threads,
    /// Steps of each job.
    steps: Vec<usize>,
}

/// What one round gave.
struct Round {
    completion_s: Vec<f64>,
    makespan_s: f64,
}

impl Round {
    fn mean_s(&self) -> f64 {
        self.completion_s.iter().sum::<f64>() / self.completion_s.len() as f64
    }

    fn json(&self) -> Value {
        json!({"completion_s": self.completion_s, "mean_s": self.mean_s(), "makespan_s": self.makespan_s})
    }
}

impl Bench<'_> {
    /// Sets the length of each job by the speed of its model alone.
    fn measure_steps(&mut self) -> Result<()> {
        const STEPS: usize = 240;
        eprintln!("measuring how fast each model trains alone");
        self.lab.up(&["--policy", "na"])?;
        let mut paces: Vec<(&str, f64)> = Vec::new();
        for job in &JOBS {
            if paces.iter().all(|(model, _)| *model != job.model) {
                let job_with_total = JobPlan { tells_total: true, style: "steps", ..*job };
                paces.push((job.model, self.start(&job_with_total, STEPS, None)?.pace(EVERY)?));
            }
        }
        self.lab.down()?;
        let pace_of = |model: &str| paces.iter().find(|(m, _)| *m == model).map_or(1.0, |(_, pace)| *pace);
        let whole_reports = |steps: f64| ((steps / EVERY as f64) as usize).max(3) * EVERY;
        let scale = self.args.scale;
        self.steps = JOBS.iter().map(|job| whole_reports(pace_of(job.model) * job.alone_s * scale)).collect();
        Ok(())
    }

    /// `gainshare run` in front of a training script; started plain, with this number of threads, if one is given.
    fn start(&self, job: &JobPlan, steps: usize, plain_threads: Option<usize>) -> Result<PrintingJob> {
        let flags: &[&str] = if plain_threads.is_some() { &["--plain"] } else { &[] };
        let script = sh::root().join("bench/torch/train.py");
        let mut command = training::command(&self.lab, Path::new(PYTHON), &script, job.name, flags);
        command.args([job.model, "--style", job.style, "--every", &EVERY.to_string()]);
        if job.tells_total {
            command.args(["--steps", &steps.to_string()]);
        } else {
            command.env("TRAIN_STEPS", steps.to_string());
        }
        if let Some(threads) = plain_threads {
            command.env("OMP_NUM_THREADS", threads.to_string());
        }
        PrintingJob::spawn(command)
    }

    fn round(&mut self, policy: &str, plain_threads: Option<usize>) -> Result<Round> {
        let mut flags = vec!["--policy", policy];
        if policy == "flowcon" {
            flags.extend(["--alpha", &self.args.alpha, "--interval", &self.args.interval]);
        }
        self.lab.up(&flags)?;
        let began = Instant::now();
        let mut jobs: Vec<PrintingJob> = Vec::new();
        let mut ended_s: Vec<Option<f64>> = vec![None; JOBS.len()];
        while ended_s.iter().any(Option::is_none) {
            let now_s = began.elapsed().as_secs_f64();
            if let Some(plan) = JOBS.get(jobs.len()).filter(|plan| now_s >= plan.arrives_s * self.args.scale) {
                jobs.push(self.start(plan, self.steps[jobs.len()], plain_threads)?);
            }
            for (end_s, job) in ended_s.iter_mut().zip(&mut jobs) {
                if end_s.is_none() && job.has_ended()? {
                    *end_s = Some(now_s);
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.lab.down()?;
        let ended_s: Vec<f64> = ended_s.into_iter().flatten().collect();
        let since_arrival = |(end_s, job): (&f64, &JobPlan)| end_s - job.arrives_s * self.args.scale;
        let round = Round {
            completion_s: ended_s.iter().zip(&JOBS).map(since_arrival).collect(),
            makespan_s: ended_s.iter().copied().fold(0.0, f64::max),
        };
        let start = if plain_threads.is_some() { "plain" } else { "tuned" };
        eprintln!(
            "{start} start, {policy}: completion {:.1?}, mean {:.1}, makespan {:.1}",
            round.completion_s,
            round.mean_s(),
            round.makespan_s
        );
        Ok(round)
    }
}

/// Medians over rounds, by job.
struct Medians {
    completion_s: Vec<f64>,
    mean_s: f64,
    makespan_s: f64,
}

impl Medians {
    fn of(rounds: &[Round]) -> Medians {
        let over = |of: &dyn Fn(&Round) -> f64| median(rounds.iter().map(of).collect());
        Medians {
            completion_s: (0..JOBS.len()).map(|i| over(&|round| round.completion_s[i])).collect(),
            mean_s: over(&Round::mean_s),
            makespan_s: over(&|round| round.makespan_s),
        }
    }

    fn json(&self, base: &Medians, rounds: &[Round]) -> Value {
        let changes: Vec<f64> =
            self.completion_s.iter().zip(&base.completion_s).map(|(now, before)| now / before - 1.0).collect();
        json!({
            "mean_change": self.mean_s / base.mean_s - 1.0,
            "worst_change": changes.iter().copied().fold(f64::MIN, f64::max),
            "late_job_change": changes[JOBS.len() - 1],
            "makespan_change": self.makespan_s / base.makespan_s - 1.0,
            "completion_s": self.completion_s,
            "mean_s": self.mean_s,
            "makespan_s": self.makespan_s,
            "rounds": rounds.iter().map(Round::json).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_jobs_do_not_say_how_long_they_train() {
        assert_eq!(JOBS.iter().filter(|job| job.tells_total).count(), JOBS.len() / 2);
    }

    #[test]
    fn changes_compare_medians() {
        let round = |late_s: f64| Round { completion_s: vec![10.0, 10.0, 10.0, 10.0, 10.0, late_s], makespan_s: 40.0 };
        let base = Medians::of(&[round(8.0), round(10.0), round(90.0)]);
        let figures = Medians::of(&[round(5.0)]).json(&base, &[round(5.0)]);
        assert_eq!(figures["late_job_change"], -0.5);
        assert_eq!(figures["worst_change"], 0.0);
    }
}
