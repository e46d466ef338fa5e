//! When each job of the demo arrives, and how much work it brings.
//!
//! The thesis runs VAE (259.6 s of work alone) at 0 s, MNIST on PyTorch (106.1 s) at 40 s and MNIST on
//! TensorFlow (28.2 s) at 80 s; together 393.9 s of a whole machine. We keep these proportions and fit them
//! into the length of a round, by measuring how fast this machine does a step of each trainer.

use crate::notice;
use anyhow::{Context, Result, bail};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The thesis's schedule: name, trainer, its options, arrival and solo work in seconds.
const THESIS: [(&str, &str, &[&str], f64, f64); 3] = [
    ("vae", "vae", &["--seed", "1"], 0.0, 259.6),
    ("mnist", "mlp", &["--seed", "2"], 40.0, 106.1),
    ("mnist-late", "mlp", &["--seed", "3", "--hidden", "256"], 80.0, 28.2),
];

/// All the work there is: the makespan of a machine that is never idle.
const THESIS_WORK_S: f64 = 393.9;

/// A job of the demo, sized for this machine.
#[derive(Debug, Clone)]
pub(super) struct DemoJob {
    pub(super) name: &'static str,
    /// After `gainshare`.
    pub(super) words: Vec<String>,
    pub(super) arrives_s: f64,
}

/// Reports a second: often enough for a smooth chart, rare enough to cost nothing.
const REPORTS_PER_SECOND: f64 = 5.0;

/// Measures the trainers and sizes the jobs for rounds of about `length_s`.
pub(super) fn calibrate(length_s: f64) -> Result<Vec<DemoJob>> {
    notice::print("measuring how fast this machine trains …\n");
    let scale = length_s / THESIS_WORK_S;
    THESIS
        .iter()
        .map(|&(name, model, options, arrives, work)| {
            let rate = steps_per_cpu_second(model, options)?;
            let steps = (rate * work * scale).round().max(50.0) as u64;
            let every = (rate / REPORTS_PER_SECOND).round().max(1.0) as u64;
            let mut words: Vec<String> = ["train", model].map(String::from).to_vec();
            words.extend(options.iter().map(|o| o.to_string()));
            words.extend(["--steps".into(), steps.to_string(), "--report-every".into(), every.to_string()]);
            Ok(DemoJob { name, words, arrives_s: arrives * scale })
        })
        .collect()
}

/// Counted in CPU time, so that a busy machine does not make the jobs small.
fn steps_per_cpu_second(model: &str, options: &[&str]) -> Result<f64> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let run = |steps: u64| -> Result<f64> {
        let before = children_cpu_s()?;
        let status = Command::new(&program)
            .args(["train", model, "--steps", &steps.to_string(), "--report-every", "1000000"])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .with_context(|| format!("cannot run the built-in trainer {model}"))?;
        if !status.success() {
            bail!("the built-in trainer {model} failed: {status}; run `gainshare train {model}` to see why");
        }
        Ok(children_cpu_s()? - before)
    };
    // Two runs of different length: their difference leaves the start of the program out. Long enough to
    // last a fraction of a second even on a fast machine.
    let began = Instant::now();
    let mut steps = 40;
    loop {
        let (short, long) = (run(steps / 4)?, run(steps)?);
        let spent = long - short;
        if spent > 0.4 || began.elapsed().as_secs_f64() > 10.0 {
            return Ok((steps - steps / 4) as f64 / spent.max(1e-3));
        }
        steps *= 4;
    }
}

/// CPU time of all children that ended so far.
fn children_cpu_s() -> Result<f64> {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_CHILDREN)?;
    let seconds = |t: nix::sys::time::TimeVal| t.tv_sec() as f64 + t.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}
