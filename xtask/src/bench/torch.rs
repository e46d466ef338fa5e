//! Three unmodified PyTorch jobs on this machine: what the start is worth, and what the policy is worth, apart from each other.
//!
//! A VAE at 0 s, a classifier later, a short classifier last; completion counts from arrival. Four rounds: a *plain* start (what
//! users have today) and the *tuned* start of `gainshare run`, each under `na` and under `flowcon`.

use super::lab::Lab;
use crate::{setup, sh};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out the rounds with a plain start (they take longest).
    #[arg(long)]
    tuned_only: bool,
    /// Repeat every round so many times and report the median.
    #[arg(long, default_value_t = 1)]
    repeat: usize,
    #[arg(long, default_value = "0.05")]
    alpha: String,
    #[arg(long, default_value = "4s")]
    interval: String,
}

/// Name, arrival in seconds, arguments of bench/torch/train.py.
const JOBS: [(&str, f64, &[&str]); 3] = [
    ("vae", 0.0, &["vae", "--steps", "1600"]),
    ("mlp", 16.0, &["mlp", "--steps", "1200"]),
    ("late-mlp", 32.0, &["mlp", "--steps", "300"]),
];

pub(crate) fn run(args: &Args) -> Result<Value> {
    setup::packages()?;
    let mut lab = Lab::new()?;
    let starts: &[&str] = if args.tuned_only { &["tuned"] } else { &["plain", "tuned"] };
    let mut rounds = Vec::new();
    for start in starts {
        for policy in ["na", "flowcon"] {
            for _ in 0..args.repeat {
                rounds.push(round(&mut lab, start, policy, args)?);
            }
        }
    }
    let find = |start: &str, policy: &str| {
        let of = |r: &&Round| r.start == start && r.policy == policy;
        rounds.iter().filter(of).collect::<Vec<_>>()
    };
    let completion = |start: &str, policy: &str, job: usize| {
        median(find(start, policy).iter().map(|r| r.completion_s[job]).collect())
    };
    let makespan = |start: &str, policy: &str| median(find(start, policy).iter().map(|r| r.makespan_s).collect());
    let change = |job: usize| completion("tuned", "flowcon", job) / completion("tuned", "na", job) - 1.0;
    let mut figures = json!({
        "late_job_change": change(2),
        "worst_change": (0..JOBS.len()).map(change).fold(f64::MIN, f64::max),
        "makespan_change": makespan("tuned", "flowcon") / makespan("tuned", "na") - 1.0,
        "rounds": rounds.iter().map(Round::json).collect::<Vec<_>>(),
    });
    if !args.tuned_only {
        figures["tuned_start_speedup"] = json!(makespan("plain", "na") / makespan("tuned", "na"));
        let each = (0..JOBS.len()).map(|j| completion("plain", "na", j) / completion("tuned", "na", j));
        figures["tuned_start_speedup_per_job"] = json!(each.collect::<Vec<_>>());
    }
    Ok(figures)
}

struct Round {
    start: &'static str,
    policy: &'static str,
    completion_s: Vec<f64>,
    makespan_s: f64,
}

impl Round {
    fn json(&self) -> Value {
        let jobs = JOBS.iter().zip(&self.completion_s);
        let jobs =
            jobs.map(|((name, arrived, _), done)| json!({"name": name, "arrived_s": arrived, "completion_s": done}));
        json!({"start": self.start, "policy": self.policy, "makespan_s": self.makespan_s, "jobs": jobs.collect::<Vec<_>>()})
    }
}

fn round(lab: &mut Lab, start: &str, policy: &str, args: &Args) -> Result<Round> {
    let start = if start == "plain" { "plain" } else { "tuned" };
    let policy = if policy == "na" { "na" } else { "flowcon" };
    eprintln!("round: {start} start, policy {policy}");
    let mut flags = vec!["--policy", policy];
    if policy == "flowcon" {
        flags.extend(["--alpha", &args.alpha, "--interval", &args.interval]);
    }
    lab.up(&flags)?;
    let began = Instant::now();
    let mut children: Vec<Child> = Vec::new();
    let mut ended: Vec<Option<f64>> = vec![None; JOBS.len()];
    while ended.iter().any(Option::is_none) {
        let now = began.elapsed().as_secs_f64();
        if let Some(&(name, arrives, words)) = JOBS.get(children.len())
            && now >= arrives
        {
            children.push(launch(lab, start, name, words)?);
        }
        for (i, child) in children.iter_mut().enumerate() {
            if ended[i].is_none()
                && let Some(status) = child.try_wait()?
            {
                if !status.success() {
                    bail!("{} failed: {status}; see {}", JOBS[i].0, lab.path("jobs.log").display());
                }
                ended[i] = Some(now);
                eprintln!("  {} done after {:.1} s", JOBS[i].0, now - JOBS[i].1);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    lab.down()?;
    let ended: Vec<f64> = ended.into_iter().flatten().collect();
    let completion_s = ended.iter().zip(JOBS).map(|(end, (_, arrived, _))| end - arrived).collect();
    Ok(Round { start, policy, completion_s, makespan_s: ended.iter().copied().fold(0.0, f64::max) })
}

fn launch(lab: &Lab, start: &str, name: &str, words: &[&str]) -> Result<Child> {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(lab.path("jobs.log"))?;
    let mut command = lab.gainshare();
    command.args(["run", "--require-daemon", "--name", name]);
    if start == "plain" {
        command.arg("--plain");
    }
    // Debian's Python: the one python3-torch belongs to, whatever else is first in PATH.
    command.args(["--", "/usr/bin/python3"]).arg(sh::root().join("bench/torch/train.py")).args(words);
    // What the caller's shell set would hide what a plain and a tuned start do.
    for name in ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn().context("cannot start `gainshare run`")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
