//! Three jobs on one GPU by gain: a long one, a shorter one, and a short one that comes last.
//!
//! *Unmanaged*: a plain start, so that the GPU's own equal time slices decide. *Managed*: the policy `gainshare` with
//! `--gpu`: the daemon decides, and the library inside the jobs paces them. Rounds take turns; figures are medians.
//! *Training*: seconds from the moment a job begins to train to its end, without the import of PyTorch. *Span*: from
//! the moment at which the first job begins to train to the end of the last one. The makespan contains that job's
//! import, whose time differs by seconds between rounds.

use super::lab::Lab;
use super::median;
use super::training::{self, PrintingJob};
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Name, model of bench/gpu/train.py, arrival in seconds, and how long it would train alone.
const JOBS: [(&str, &str, f64, f64); 3] =
    [("long", "mlp", 0.0, 14.0), ("middle", "transformer", 3.0, 7.0), ("late", "mlp", 10.0, 3.0)];

/// The script, so that the benchmark needs no checkout.
const SCRIPT: &str = include_str!("../../../bench/gpu/train.py");

/// Steps between two printed losses.
const EVERY: usize = 10;

/// Steps of the runs that measure how fast a model trains alone.
const STEPS_ALONE: usize = 300;

/// Time from the start of a daemon to the first job.
const SETTLING: Duration = Duration::from_secs(3);

/// A round that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(150);

/// What the story needs.
pub(super) struct Story<'a> {
    pub(super) program: Option<PathBuf>,
    pub(super) python: &'a Path,
    pub(super) repeat: usize,
    /// The shares of all jobs and their GPU time, once a second, go into this file.
    pub(super) trace: Option<&'a Path>,
}

struct Round {
    training_s: Vec<f64>,
    makespan_s: f64,
    span_s: f64,
}

pub(super) fn run(story: &Story<'_>) -> Result<Value> {
    let mut lab = story.program.clone().map_or_else(Lab::new, Lab::with_program)?;
    let script = lab.path("train.py");
    std::fs::write(&script, SCRIPT)?;
    lab.up(&["--policy", "na"])?;
    let pace = ["mlp", "transformer"].map(|model| -> Result<f64> {
        let mut command = training::command(&lab, story.python, &script, "alone", &["--plain"]);
        command.args([model, "--every", &EVERY.to_string(), "--steps", &STEPS_ALONE.to_string()]);
        PrintingJob::spawn(command)?.pace(EVERY)
    });
    lab.down()?;
    let [mlp, transformer] = pace;
    let pace = [mlp?, transformer?];
    eprintln!("steps a second alone: {pace:.1?}");
    let [mut unmanaged, mut managed] = [const { Vec::<Round>::new() }; 2];
    for _ in 0..story.repeat {
        unmanaged.push(round(&mut lab, story, &script, pace, false)?);
        managed.push(round(&mut lab, story, &script, pace, true)?);
    }
    let training = |rounds: &[Round], job: usize| median(rounds.iter().map(|round| round.training_s[job]).collect());
    let makespan = |rounds: &[Round]| median(rounds.iter().map(|round| round.makespan_s).collect());
    let span = |rounds: &[Round]| median(rounds.iter().map(|round| round.span_s).collect());
    let change = |job: usize| training(&managed, job) / training(&unmanaged, job) - 1.0;
    let all = |rounds: &[Round]| -> Vec<Value> {
        let one = |r: &Round| json!({"training_s": r.training_s, "makespan_s": r.makespan_s, "span_s": r.span_s});
        rounds.iter().map(one).collect()
    };
    Ok(json!({
        "late_training_change": change(2),
        "training_changes": (0..JOBS.len()).map(change).collect::<Vec<_>>(),
        "makespan_change": makespan(&managed) / makespan(&unmanaged) - 1.0,
        "span_change": span(&managed) / span(&unmanaged) - 1.0,
        "steps_per_s_alone": pace,
        "unmanaged": all(&unmanaged),
        "managed": all(&managed),
    }))
}

fn round(lab: &mut Lab, story: &Story<'_>, script: &Path, pace: [f64; 2], is_managed: bool) -> Result<Round> {
    lab.up(&["--policy", if is_managed { "gainshare" } else { "na" }])?;
    // A daemon that people use runs for long, and has loaded NVML.
    std::thread::sleep(SETTLING);
    let flags = if is_managed { ["--gpu"] } else { ["--plain"] };
    let began = Instant::now();
    let mut jobs: Vec<PrintingJob> = Vec::new();
    let mut ended_s: Vec<Option<f64>> = vec![None; JOBS.len()];
    let mut traced_s = 0.0;
    while ended_s.iter().any(Option::is_none) {
        let now_s = began.elapsed().as_secs_f64();
        ensure!(began.elapsed() < LIMIT, "a round took longer than {} s", LIMIT.as_secs());
        if let Some((name, model, _, alone_s)) = JOBS.get(jobs.len()).filter(|(_, _, arrives_s, _)| now_s >= *arrives_s)
        {
            let steps = (pace[usize::from(*model != "mlp")] * alone_s / EVERY as f64) as usize * EVERY;
            let mut command = training::command(lab, story.python, script, name, &flags);
            command.args([model, "--every", &EVERY.to_string(), "--steps", &steps.to_string()]);
            jobs.push(PrintingJob::spawn(command)?);
        }
        for (job, end) in jobs.iter_mut().zip(&mut ended_s) {
            if end.is_none() && job.has_ended()? {
                *end = Some(now_s);
            }
        }
        if is_managed && now_s >= traced_s {
            traced_s += 1.0;
            trace(lab, story, now_s)?;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let ends: Vec<f64> = ended_s.into_iter().flatten().collect();
    let ready_s: Vec<f64> = jobs.iter().map(|job| job.ready_s(began).unwrap_or(0.0)).collect();
    let training_s: Vec<f64> = ends.iter().zip(&ready_s).map(|(end, ready)| end - ready).collect();
    let makespan_s = ends.iter().copied().fold(0.0, f64::max);
    let span_s = makespan_s - ready_s.into_iter().fold(f64::INFINITY, f64::min);
    drop(jobs);
    lab.down()?;
    eprintln!("managed {is_managed}: training {training_s:.1?}, makespan {makespan_s:.1}, span {span_s:.1}");
    Ok(Round { training_s, makespan_s, span_s })
}

fn trace(lab: &Lab, story: &Story<'_>, at_s: f64) -> Result<()> {
    let Some(path) = story.trace else { return Ok(()) };
    let jobs = lab.jobs()?;
    let field = |job: &Value, name: &str| job.get(name).cloned().unwrap_or_default();
    let row = |job: &Value| ["name", "share", "gpu_share", "gpu_time_s", "category"].map(|name| field(job, name));
    let jobs: Vec<[Value; 5]> = jobs.iter().map(row).collect();
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    writeln!(file, "{}", json!({"at_s": at_s, "jobs": jobs}))?;
    Ok(())
}
