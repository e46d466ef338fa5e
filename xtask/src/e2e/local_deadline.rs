//! `cargo xtask e2e local-deadline`: real jobs with deadlines on this machine, without Kubernetes, once with
//! equal shares (`na`) and once under `qos`.
//!
//! A daemon of its own runs the mix of [`super::deadline`] on one core. Jobs arrive one after the other, and
//! `gainshare ps -o json` is read twice a second until all have ended: it has the predicted ends, the shares,
//! the use and the warnings.

use super::StoryArgs;
use super::deadline::{DeadlineFigures, JobResult, Machine, MixJob, Round, Sample, Use, all_at_once, mix};
use super::kube::unix_s;
use crate::bench::lab::Lab;
use crate::programs::Programs;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Between two readings of the jobs.
const PACE: Duration = Duration::from_millis(500);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rounds of half a minute, as `cargo xtask test` does it. Deadlines met and predictions are printed, not judged.
    #[arg(long)]
    short: bool,
    /// About how long a round takes on an idle machine, in seconds. Default: 100, or 30 with --short.
    #[arg(long = "horizon", value_name = "SECONDS")]
    horizon_s: Option<f64>,
    #[command(flatten)]
    story: StoryArgs,
}

impl Args {
    /// With the programs that were built for the tests.
    pub(super) fn short(programs: &Programs) -> Args {
        Args { short: true, horizon_s: None, story: StoryArgs::with(programs) }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let began = Instant::now();
    let program = match &args.story.programs {
        Some(folder) => super::absolute(folder)?.join("gainshare"),
        None => Programs::build()?.gainshare(),
    };
    let machine = Machine::measure(&program, |words| calibrate(&program, words))?;
    eprintln!("e2e: other programs leave {:.2} of a core", machine.core);
    let jobs = mix(&machine, args.horizon_s.unwrap_or(if args.short { 30.0 } else { 100.0 }));
    let default = play(&program, "na", &jobs)?;
    let qos = play(&program, "qos", &jobs)?;
    let together = all_at_once(&jobs);
    let policies: &[&'static str] = if args.short { &["qos"] } else { &["na", "gainshare", "qos"] };
    let all_at_once: Result<Vec<Round>> = policies.iter().map(|policy| play(&program, policy, &together)).collect();
    let report = DeadlineFigures::new(machine, [default, qos], all_at_once?, began.elapsed().as_secs_f64());
    args.story.print(&report, DeadlineFigures::print)?;
    report.check(args.short)
}

/// What is known of one job while the round is played.
#[derive(Default)]
struct Track {
    arrived_s: f64,
    due_s: Option<f64>,
    warned_s: Option<f64>,
    samples: Vec<Sample>,
    last: Value,
}

/// Runs a job alone under a daemon, and returns how many seconds it ran.
fn calibrate(program: &Path, words: &[String]) -> Result<f64> {
    let mut lab = Lab::with_program(program.to_path_buf())?;
    lab.up(&["--policy", "na", "--cores", "1"])?;
    let began = Instant::now();
    submit(&lab, program, "calibration", words, None)?;
    loop {
        let all = lab.ask(&["ps", "--all"])?;
        let job = list(&all)?.first().context("the daemon has lost a job")?;
        if let (true, Some(seconds)) = (job["state"] == "done", job["elapsed_s"].as_f64()) {
            lab.down()?;
            return Ok(seconds);
        }
        ensure!(began.elapsed() < Duration::from_secs(120), "the machine is too busy: {job}");
        std::thread::sleep(PACE);
    }
}

/// Seconds for which the core of the jobs was idle since the machine started: the first one that this process may use.
/// What other cores leave idle, no job of the story could use.
fn idle_s() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or("0");
    let first = allowed.trim().split([',', '-']).next().unwrap_or("0");
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    idle_of_core_s(&stat, first).with_context(|| format!("/proc/stat has no core {first}"))
}

pub(super) fn idle_of_core_s(stat: &str, core: &str) -> Option<f64> {
    let times = stat.lines().find_map(|line| line.strip_prefix(&format!("cpu{core} ")))?;
    let ticks: Vec<f64> = times.split_whitespace().flat_map(str::parse).collect();
    // user, nice, system, idle, iowait; a tick is a hundredth of a second in the kernel's files.
    Some(ticks.iter().skip(3).take(2).sum::<f64>() / 100.0)
}

fn list(answer: &Value) -> Result<&Vec<Value>> {
    answer.get("jobs").unwrap_or(answer).as_array().context("`ps` printed no list")
}

fn play(program: &Path, policy: &'static str, jobs: &[MixJob]) -> Result<Round> {
    let mut lab = Lab::with_program(program.to_path_buf())?;
    lab.up(&["--policy", policy, "--cores", "1"])?;
    let began = Instant::now();
    let longest_s = jobs.iter().map(|j| j.arrives_s + j.deadline_s.unwrap_or(0.0)).fold(0.0, f64::max);
    let patience = Duration::from_secs_f64(6.0 * longest_s + 120.0);
    let mut tracks: BTreeMap<&str, Track> = BTreeMap::new();
    let mut waiting = jobs.iter().peekable();
    let mut cpu = Use::default();
    let mut read_at = (Instant::now(), idle_s()?);
    loop {
        while let Some(job) = waiting.next_if(|j| began.elapsed().as_secs_f64() >= j.arrives_s) {
            let arrived_s = unix_s();
            let due_s = job.deadline_s.map(|d| arrived_s + d);
            submit(&lab, program, job.name, &job.words("tqdm"), due_s)?;
            tracks.insert(job.name, Track { arrived_s, due_s, ..Track::default() });
            eprintln!("e2e: {policy}: {:5.1} s: {} arrives", began.elapsed().as_secs_f64(), job.name);
        }
        let all = lab.ask(&["ps", "--all"])?;
        let list = list(&all)?;
        let running: Vec<&Value> = list.iter().filter(|j| j["state"] == "running").collect();
        for job in list {
            let Some(track) = job["name"].as_str().and_then(|name| tracks.get_mut(name)) else { continue };
            track.observe(job);
        }
        let shares: f64 = running.iter().filter_map(|j| j["share"].as_f64()).sum();
        let cores: f64 = running.iter().filter_map(|j| j["cpu_cores"].as_f64()).sum();
        // The first reading of a job has no use yet.
        let now = (Instant::now(), idle_s()?);
        let span_s = (now.0 - read_at.0).as_secs_f64();
        if !running.is_empty() && running.iter().all(|j| j["cpu_cores"].is_f64()) {
            cpu.add(shares * span_s, cores * span_s, now.1 - read_at.1);
        }
        read_at = now;
        let is_over = list.len() == jobs.len() && running.is_empty() && list.iter().all(|j| j["ended_s"].is_f64());
        if waiting.peek().is_none() && is_over {
            break;
        }
        ensure!(began.elapsed() < patience, "the jobs did not end within {} s", patience.as_secs());
        std::thread::sleep(PACE);
    }
    let results: Result<Vec<JobResult>> = jobs.iter().map(|job| result(job, &tracks[job.name])).collect();
    lab.down()?;
    Ok(Round::new(policy, cpu.part(), results?))
}

fn submit(lab: &Lab, program: &Path, name: &str, words: &[String], due_s: Option<f64>) -> Result<()> {
    let mut command = vec![program.to_string_lossy().into_owned()];
    command.extend_from_slice(words);
    let mut entry = format!("[[job]]\nname = {}\ncommand = {}\n", json!(name), json!(command));
    if let Some(due_s) = due_s {
        let moment = jiff::Timestamp::from_millisecond((due_s * 1e3) as i64)?;
        entry += &format!("deadline = \"{moment}\"\n");
    }
    let file = lab.path(&format!("{name}.toml"));
    std::fs::write(&file, entry)?;
    lab.ask(&["submit", file.to_str().context("a temporary path is text")?])?;
    Ok(())
}

impl Track {
    fn observe(&mut self, job: &Value) {
        let now_s = unix_s();
        let number = |pointer: &str| job.pointer(pointer).and_then(Value::as_f64);
        let forecast = [number("/done/at_s"), number("/done/earliest_s"), number("/done/latest_s")];
        if let ([Some(done_s), Some(earliest_s), Some(latest_s)], true) = (forecast, job["state"] == "running") {
            self.samples.push(Sample { at_s: now_s, done_s, earliest_s, latest_s });
        }
        if self.warned_s.is_none() && job["deadline"]["miss"].is_object() {
            self.warned_s = Some(now_s - self.arrived_s);
        }
        self.last = job.clone();
    }
}

fn result(job: &MixJob, track: &Track) -> Result<JobResult> {
    let last = &track.last;
    ensure!(last["state"] == "done", "{} ended as {}: {last}", job.name, last["state"]);
    let number = |key: &str| last[key].as_f64().with_context(|| format!("{} has no {key}", job.name));
    let moments = [track.arrived_s, number("started_s")?, number("ended_s")?];
    let result = JobResult::new(job, moments, track.due_s, &track.samples);
    let restarts = last["attempt"].as_u64().unwrap_or(1).saturating_sub(1);
    Ok(JobResult { restarts, warned_s: track.warned_s, ..result })
}

#[cfg(test)]
mod tests {
    use super::idle_of_core_s;

    #[test]
    fn idle_time_is_that_of_the_core_of_the_jobs() {
        let stat = "cpu  1 2 3 4 5\ncpu1 0 0 0 500 100 7\ncpu10 0 0 0 90000 0\n";
        assert_eq!((idle_of_core_s(stat, "1"), idle_of_core_s(stat, "2")), (Some(6.0), None));
    }
}
