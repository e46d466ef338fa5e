//! Thread teams that follow the share, on two cores by default: what a job gains that is left alone, and that jobs
//! side by side lose nothing against pools of a fixed size.
//!
//! The job is `bench/torch/train.py` with a model large enough for two threads. Three measurements, each repeated:
//! - *alone*: a job that has the machine from its start;
//! - *left alone*: a job that was started beside three others, after the others have ended;
//! - *together*: the steps of four jobs side by side, with the library inside and with fixed pools
//!   (`GAINSHARE_INSIDE=0`).
//!
//! Speeds are steps a second, counted between reports, so that loading PyTorch does not count. Two jobs that run
//! alone, one with the library and one with fixed pools, must print the same losses.

use super::lab::Lab;
use super::training::clear_settings;
use crate::packages;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often every measurement is repeated; medians are reported.
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// How long one measurement takes, in seconds.
    #[arg(long, default_value_t = 8.0)]
    seconds: f64,
    /// How many cores the jobs may use.
    #[arg(long, default_value = "2")]
    cores: String,
    /// Do not build, but use this `gainshare`, with the library beside it.
    #[arg(long)]
    program: Option<PathBuf>,
    /// The Python with PyTorch.
    #[arg(long, default_value = "/usr/bin/python3")]
    python: PathBuf,
}

/// The script, so that the benchmark needs no checkout, and the file that it is written to.
const SCRIPT: &str = include_str!("../../../bench/torch/train.py");
const SCRIPT_FILE: &str = "train.py";

/// More steps than any measurement reaches.
const ENDLESS: usize = 10_000_000;

/// Steps of the two runs whose losses are compared.
const COMPARED_STEPS: usize = 60;

/// How long a job has to adapt after the others have ended.
const SETTLE: Duration = Duration::from_secs(2);

/// Loading PyTorch beside other jobs takes a while.
const PATIENCE: Duration = Duration::from_secs(180);

/// Whether the job's teams follow its share.
#[derive(Clone, Copy, PartialEq)]
enum Teams {
    Following,
    Fixed,
}

pub(crate) fn run(args: &Args) -> Result<Value> {
    if args.program.is_none() {
        packages::install_all()?;
    }
    let mut lab = args.program.as_ref().map_or_else(Lab::new, |program| Lab::with_program(program.clone()))?;
    std::fs::write(lab.path(SCRIPT_FILE), SCRIPT)?;
    lab.up(&["--policy", "na", "--cores", &args.cores])?;
    let [mut alone, mut left, mut together, mut fixed] = [const { Vec::<f64>::new() }; 4];
    for round in 1..=args.repeat {
        alone.push(speed_alone(&lab, args)?);
        left.push(speed_left_alone(&lab, args)?);
        together.push(speed_together(&lab, args, Teams::Following)?);
        fixed.push(speed_together(&lab, args, Teams::Fixed)?);
        let last = |values: &[f64]| values.last().copied().unwrap_or(f64::NAN);
        eprintln!(
            "round {round}, steps a second: alone {:.1}, left alone {:.1}, together {:.1}, with fixed pools {:.1}",
            last(&alone),
            last(&left),
            last(&together),
            last(&fixed),
        );
    }
    let losses = [Teams::Following, Teams::Fixed].map(|teams| losses(&lab, args, teams));
    let [following, fixed_pools] = losses;
    let is_identical = following? == fixed_pools?;
    lab.down()?;
    let medians = [alone, left, together, fixed].map(super::median);
    let [alone, left, together, fixed] = medians;
    Ok(json!({
        "left_alone_speed": left / alone,
        "together_speed": together / fixed,
        "losses_identical": is_identical,
        "steps_per_s": {"alone": alone, "left_alone": left, "together": together, "together_fixed": fixed},
    }))
}

fn speed_alone(lab: &Lab, args: &Args) -> Result<f64> {
    let job = ReportingJob::start(lab, args, "alone", ENDLESS, Teams::Following)?;
    job.wait_for_reports(2)?;
    job.speed(args.seconds)
}

fn speed_left_alone(lab: &Lab, args: &Args) -> Result<f64> {
    let others = (0..3).map(|i| ReportingJob::start(lab, args, &format!("other-{i}"), ENDLESS, Teams::Following));
    let others: Vec<ReportingJob> = others.collect::<Result<_>>()?;
    for other in &others {
        other.wait_for_reports(1)?;
    }
    let job = ReportingJob::start(lab, args, "left-alone", ENDLESS, Teams::Following)?;
    job.wait_for_reports(2)?;
    drop(others);
    std::thread::sleep(SETTLE);
    job.speed(args.seconds)
}

/// The steps a second of four jobs, added up.
fn speed_together(lab: &Lab, args: &Args, teams: Teams) -> Result<f64> {
    let jobs = (0..4).map(|i| ReportingJob::start(lab, args, &format!("together-{i}"), ENDLESS, teams));
    let jobs: Vec<ReportingJob> = jobs.collect::<Result<_>>()?;
    for job in &jobs {
        job.wait_for_reports(2)?;
    }
    let before: usize = jobs.iter().map(ReportingJob::steps).sum();
    let began = Instant::now();
    std::thread::sleep(Duration::from_secs_f64(2.0 * args.seconds));
    let after: usize = jobs.iter().map(ReportingJob::steps).sum();
    Ok((after - before) as f64 / began.elapsed().as_secs_f64())
}

/// The losses that a job prints that runs alone.
fn losses(lab: &Lab, args: &Args, teams: Teams) -> Result<Vec<String>> {
    let mut job = ReportingJob::start(lab, args, "losses", COMPARED_STEPS, teams)?;
    let status = job.child.wait()?;
    ensure!(status.success(), "the job whose losses are compared failed: {status}");
    if let Some(reader) = job.reader.take() {
        let _ = reader.join();
    }
    Ok(job.lock().iter().map(|(_, line)| line.clone()).collect())
}

type Reports = Vec<(Instant, String)>;

/// A training job and the reports it has printed.
struct ReportingJob {
    name: String,
    child: Child,
    reports: Arc<Mutex<Reports>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

/// Steps between two reports.
const EVERY: usize = 2;

impl ReportingJob {
    fn start(lab: &Lab, args: &Args, name: &str, steps: usize, teams: Teams) -> Result<ReportingJob> {
        let mut command = lab.gainshare();
        clear_settings(&mut command);
        if teams == Teams::Fixed {
            command.env("GAINSHARE_INSIDE", "0");
        }
        command.args(["run", "--require-daemon", "--name", name, "--"]).arg(&args.python);
        command.arg(lab.path(SCRIPT_FILE));
        command.args(["mlp", "--hidden", "1500", "--batch", "256"]);
        command.args(["--every", &EVERY.to_string(), "--steps", &steps.to_string()]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?;
        let output = BufReader::new(child.stdout.take().context("no output")?);
        let reports = Arc::new(Mutex::new(Reports::new()));
        let kept = reports.clone();
        let reader = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok).filter(|line| line.contains("loss")) {
                kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((Instant::now(), line));
            }
        });
        Ok(ReportingJob { name: name.to_owned(), child, reports, reader: Some(reader) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn steps(&self) -> usize {
        self.lock().len() * EVERY
    }

    fn wait_for_reports(&self, count: usize) -> Result<()> {
        let began = Instant::now();
        while self.lock().len() < count {
            ensure!(began.elapsed() < PATIENCE, "{} printed no loss for {} s", self.name, PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Steps a second from now on.
    fn speed(&self, seconds: f64) -> Result<f64> {
        let before = self.lock().len();
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let reports = self.lock();
        let (first, last) = reports.get(before).zip(reports.last()).context("no report while measuring")?;
        let count = reports.len() - before - 1;
        Ok((count * EVERY) as f64 / last.0.duration_since(first.0).as_secs_f64().max(1e-3))
    }
}

impl Drop for ReportingJob {
    fn drop(&mut self) {
        // `gainshare run` passes the signal on to its job.
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.child.id() as i32), nix::sys::signal::SIGTERM);
        let _ = self.child.wait();
    }
}
