//! Three unmodified PyTorch jobs on this machine: what the start is worth, and what the policy is worth,
//! apart from each other.
//!
//! A VAE at 0 s, a classifier later, a short classifier last; completion counts from arrival. The rounds: a
//! *plain* start (what users have today, once each) and the *tuned* start of `gainshare run` (three times,
//! medians), under `na` and under `flowcon`. Sizes are set by how fast the machine trains one job alone, so
//! that the three meet on slow and fast machines alike.
//!
//! A plain PyTorch starts as many threads as it believes there are cores. On some virtual machines it
//! believes in half of them; there the plain rounds ask for one thread a core, as PyTorch does elsewhere by
//! itself, and the report says so (`threads`).

use super::lab::Lab;
use super::median;
use crate::{packages, sh};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out the rounds with a plain start (they take longest).
    #[arg(long)]
    tuned_only: bool,
    /// Repeat the rounds with a tuned start so many times, one policy after the other, and report medians.
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    #[arg(long, default_value = "0.1")]
    alpha: String,
    #[arg(long, default_value = "4s")]
    interval: String,
}

/// Name, model of bench/torch/train.py, arrival in seconds, and how long it would train alone.
const JOBS: [(&str, &str, f64, f64); 3] =
    [("vae", "vae", 0.0, 32.0), ("mlp", "mlp", 10.0, 16.0), ("late-mlp", "mlp", 20.0, 5.0)];

/// Debian's Python: the one python3-torch belongs to, whatever else is first in PATH.
const PYTHON: &str = "/usr/bin/python3";

/// What the caller's shell set would hide what a plain and a tuned start do.
const SHELL_SETTINGS: [&str; 5] =
    ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"];

pub(crate) fn run(args: &Args) -> Result<Value> {
    packages::install_all()?;
    let mut lab = Lab::new()?;
    let machine = Machine::measure(&mut lab)?;
    // The policies take turns, so that a machine that slows down for some minutes slows both.
    let plain = if args.tuned_only { 0 } else { 1 };
    let starts = std::iter::repeat_n("tuned", args.repeat).chain(std::iter::repeat_n("plain", plain));
    let mut rounds = Vec::new();
    for (start, policy) in starts.flat_map(|start| [(start, "na"), (start, "flowcon")]) {
        rounds.push(round(&mut lab, &machine, start, policy, args)?);
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
        "steps": machine.steps,
        "threads": {"cores": machine.cores, "pytorch_by_itself": machine.threads_by_itself, "plain_rounds": machine.plain_threads()},
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
            jobs.map(|((name, _, arrived, _), done)| json!({"name": name, "arrived_s": arrived, "completion_s": done}));
        json!({"start": self.start, "policy": self.policy, "makespan_s": self.makespan_s, "jobs": jobs.collect::<Vec<_>>()})
    }
}

/// What this machine makes of the jobs.
struct Machine {
    cores: usize,
    /// Threads that PyTorch starts by default.
    threads_by_itself: usize,
    /// Steps of each job.
    steps: Vec<usize>,
}

impl Machine {
    fn measure(lab: &mut Lab) -> Result<Machine> {
        let mut ask = Command::new(PYTHON);
        ask.args(["-c", "import os, torch; print(len(os.sched_getaffinity(0)), torch.get_num_threads())"]);
        for name in SHELL_SETTINGS {
            ask.env_remove(name);
        }
        let answer = sh::output(&mut ask)?;
        let mut numbers = answer.split_whitespace().filter_map(|n| n.parse().ok());
        let (cores, threads_by_itself) = numbers.next().zip(numbers.next()).context("Python did not answer")?;
        eprintln!("measuring how fast each model trains alone");
        lab.up(&["--policy", "na"])?;
        let pace = [("vae", pace(lab, "vae")?), ("mlp", pace(lab, "mlp")?)];
        lab.down()?;
        let of = |model: &str| pace.iter().find(|(m, _)| *m == model).map_or(1.0, |(_, pace)| *pace);
        // Whole reports: the script prints every 20 steps.
        let steps = JOBS.iter().map(|(_, model, _, alone_s)| ((of(model) * alone_s / 20.0) as usize).max(3) * 20);
        Ok(Machine { cores, threads_by_itself, steps: steps.collect() })
    }

    fn plain_threads(&self) -> usize {
        self.cores.max(self.threads_by_itself)
    }
}

/// Steps a second of one job alone, by the times of its first and last report: loading PyTorch does not count.
fn pace(lab: &Lab, model: &str) -> Result<f64> {
    const STEPS: usize = 200;
    let mut job = job(lab, &format!("{model}-alone"), model, STEPS, None).stdout(Stdio::piped()).spawn()?;
    let mut times = Vec::new();
    for line in BufReader::new(job.stdout.take().context("no output")?).lines() {
        if line?.contains("loss") {
            times.push(Instant::now());
        }
    }
    let (Some(first), Some(last)) = (times.first(), times.last()) else {
        bail!("{model} reported nothing: {}", job.wait()?);
    };
    job.wait()?;
    let reports = (times.len() - 1) as f64;
    Ok(reports * 20.0 / last.duration_since(*first).as_secs_f64().max(1e-3))
}

fn round(lab: &mut Lab, machine: &Machine, start: &'static str, policy: &'static str, args: &Args) -> Result<Round> {
    eprintln!("round: {start} start, policy {policy}");
    let mut flags = vec!["--policy", policy];
    if policy == "flowcon" {
        flags.extend(["--alpha", &args.alpha, "--interval", &args.interval]);
    }
    lab.up(&flags)?;
    let plain_threads = (start == "plain").then(|| machine.plain_threads());
    let began = Instant::now();
    let mut children: Vec<Child> = Vec::new();
    let mut ended: Vec<Option<f64>> = vec![None; JOBS.len()];
    while ended.iter().any(Option::is_none) {
        let now = began.elapsed().as_secs_f64();
        if let Some(&(name, model, arrives, _)) = JOBS.get(children.len())
            && now >= arrives
        {
            let log = std::fs::OpenOptions::new().create(true).append(true).open(lab.path("jobs.log"))?;
            let mut job = job(lab, name, model, machine.steps[children.len()], plain_threads);
            children.push(job.stdout(log.try_clone()?).stderr(log).spawn().context("cannot start `gainshare run`")?);
        }
        for (i, child) in children.iter_mut().enumerate() {
            if ended[i].is_none()
                && let Some(status) = child.try_wait()?
            {
                if !status.success() {
                    bail!("{} failed: {status}; see {}", JOBS[i].0, lab.path("jobs.log").display());
                }
                ended[i] = Some(now);
                eprintln!("  {} done after {:.1} s", JOBS[i].0, now - JOBS[i].2);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    lab.down()?;
    let ended: Vec<f64> = ended.into_iter().flatten().collect();
    let completion_s = ended.iter().zip(JOBS).map(|(end, (_, _, arrived, _))| end - arrived).collect();
    Ok(Round { start, policy, completion_s, makespan_s: ended.iter().copied().fold(0.0, f64::max) })
}

/// `gainshare run` in front of a training script; started plain, with so many threads, if a number is given.
fn job(lab: &Lab, name: &str, model: &str, steps: usize, plain_threads: Option<usize>) -> Command {
    let mut command = lab.gainshare();
    for name in SHELL_SETTINGS {
        command.env_remove(name);
    }
    command.args(["run", "--require-daemon", "--name", name]);
    if let Some(threads) = plain_threads {
        command.arg("--plain").env("OMP_NUM_THREADS", threads.to_string());
    }
    command.args(["--", PYTHON]).arg(sh::root().join("bench/torch/train.py"));
    command.args([model, "--steps", &steps.to_string()]).stdin(Stdio::null());
    command
}
