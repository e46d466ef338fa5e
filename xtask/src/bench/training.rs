//! A training job behind `gainshare run`, and what it prints, for benchmarks that compare ends of jobs.
//!
//! The scripts print [`READY`] when they have imported their libraries, and a loss from time to time.

use super::lab::Lab;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// What the scripts print before their first step.
const READY: &str = "ready to train";

/// Variables of the caller's shell that would hide what the start does.
const SHELL_SETTINGS: [&str; 7] = [
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "GAINSHARE_INSIDE",
    "GAINSHARE_INSIDE_GPU",
];

/// Takes the settings of the caller's shell off a command.
pub(super) fn clear_settings(command: &mut Command) {
    for name in SHELL_SETTINGS {
        command.env_remove(name);
    }
}

/// `gainshare run` with these flags in front of a script.
pub(super) fn command(lab: &Lab, python: &Path, script: &Path, name: &str, flags: &[&str]) -> Command {
    let mut command = lab.gainshare();
    clear_settings(&mut command);
    command.args(["run", "--require-daemon", "--name", name]).args(flags).arg("--").arg(python).arg(script);
    command
}

struct Line {
    at: Instant,
    text: String,
}

/// A job that runs, and the lines that it has printed.
pub(super) struct PrintingJob {
    child: Child,
    lines: Arc<Mutex<Vec<Line>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl PrintingJob {
    pub(super) fn spawn(mut command: Command) -> Result<PrintingJob> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?;
        let output = BufReader::new(child.stdout.take().context("no output")?);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = lines.clone();
        let reader = std::thread::spawn(move || {
            for text in output.lines().map_while(Result::ok) {
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(Line { at: Instant::now(), text });
            }
        });
        Ok(PrintingJob { child, lines, reader: Some(reader) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the job has ended well; an error if it failed.
    pub(super) fn has_ended(&mut self) -> Result<bool> {
        let Some(status) = self.child.try_wait()? else { return Ok(false) };
        ensure!(status.success(), "a job failed: {status}\n{}", self.tail());
        Ok(true)
    }

    /// When the job began to train, in seconds after `began`.
    pub(super) fn ready_s(&self, began: Instant) -> Option<f64> {
        let lines = self.lock();
        let ready = lines.iter().find(|line| line.text.contains(READY))?;
        Some(ready.at.duration_since(began).as_secs_f64())
    }

    /// Waits for the end; the steps a second between reports that lie `every` steps apart.
    pub(super) fn pace(mut self, every: usize) -> Result<f64> {
        /// The first reports come from cold caches.
        const SKIPPED: usize = 4;
        let status = self.child.wait()?;
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        ensure!(status.success(), "a job alone failed: {status}\n{}", self.tail());
        let lines = self.lock();
        let times: Vec<Instant> = lines.iter().filter(|line| line.text.contains("loss")).map(|line| line.at).collect();
        let (first, last) = times.get(SKIPPED).zip(times.last()).context("a job alone reported too little")?;
        let steps = (times.len() - 1 - SKIPPED) * every;
        Ok(steps as f64 / last.duration_since(*first).as_secs_f64().max(1e-3))
    }

    fn tail(&self) -> String {
        let lines = self.lock();
        lines.iter().rev().take(20).rev().map(|line| line.text.clone() + "\n").collect()
    }
}

impl Drop for PrintingJob {
    fn drop(&mut self) {
        // A job that has ended is reaped already and gets no signal.
        if let Ok(None) = self.child.try_wait() {
            let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
            // `gainshare run` passes the signal on to its job.
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM);
            let _ = self.child.wait();
        }
    }
}
