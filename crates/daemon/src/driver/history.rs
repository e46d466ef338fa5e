//! Earlier runs of a job's program: the best predictor of how long the next one takes.
//!
//! Two jobs run the same program if they have one owner and commands of one shape: the same words,
//! numbers apart, and the same length of the run where the command names one. So the runs of a sweep
//! over learning rates are alike, and `--epochs 5` and `--epochs 50` are not. Only runs that ended well
//! count; the journal keeps them, so a restarted daemon knows them too. Jobs that run already learn of a run of their
//! program when it ends.
//!
//! A program that never ran is judged by the other programs of its owner, as far as the reliability of its claims is
//! concerned: some people stop every run early, and some scripts draw bars of one epoch.

use super::jobs::{Job, JobTable};
use crate::spec::JobSpec;
use crate::types::JobState;
use gainshare_core::model::JobId;
use gainshare_core::signal::ClaimSource;
use gainshare_core::view::{ClaimRecord, FinishedRun};
use gainshare_progress::RunLength;
use std::collections::BTreeMap;

/// Number of the newest runs that are handed to the rules.
const MAX_RUNS: usize = 8;

/// Number of the newest runs of other programs by which claims are judged.
const MAX_OTHERS: usize = 50;

/// What two commands of one shape have in common.
#[derive(PartialEq, Eq)]
struct Shape {
    words: Vec<String>,
    length: RunLength,
}

impl Shape {
    fn of(command: &[String]) -> Shape {
        Shape { words: command.iter().map(|word| blank_number(word)).collect(), length: RunLength::read(command, None) }
    }
}

/// The word with its number, or the number after its `=`, left out.
fn blank_number(word: &str) -> String {
    let is_number = |text: &str| text.parse::<f64>().is_ok();
    match word.split_once('=') {
        _ if is_number(word) => "#".to_owned(),
        Some((name, value)) if is_number(value) => format!("{name}=#"),
        _ => word.to_owned(),
    }
}

impl JobTable {
    /// Looks up the earlier runs of a job that is about to be followed. The machine has this many `cores`.
    pub(super) fn find_earlier_runs(&mut self, id: JobId, cores: f64) {
        let Some(job) = self.get(&id) else { return };
        let shape = Shape::of(&job.record.spec.command);
        // A container that brings its own command is known by its image alone, which says too little.
        if shape.words.is_empty() {
            return;
        }
        let is_of_owner = |past: &&Job| past.record.state == JobState::Done && past.record.owner == job.record.owner;
        let is_alike = |past: &Job| runs_program(past, &job.record.spec, &shape);
        let of_owner = || self.values().rev().filter(is_of_owner);
        let newest = of_owner().filter(|past| is_alike(past)).take(MAX_RUNS);
        let mut runs: Vec<FinishedRun> = newest.filter_map(|past| finished_run(past, cores)).collect();
        runs.reverse();
        let past_steps = of_owner().filter(|past| is_alike(past)).find_map(|past| past.progress.rhythm_steps);
        let has_claim = |past: &&Job| past.progress.tracker.signal().claimed_by.is_some();
        let others = of_owner().filter(has_claim).filter(|past| !is_alike(past)).take(MAX_OTHERS);
        let claims = judge(others.filter_map(|past| finished_run(past, cores)));
        if let Some(job) = self.get_mut(&id) {
            (job.history, job.claims, job.past_steps) = (runs, claims, past_steps);
        }
    }

    /// A job has ended: if it ended well, the live jobs of the same program learn how long it was.
    pub(super) fn add_finished_run(&mut self, id: JobId, cores: f64) {
        let Some(past) = self.get(&id).filter(|job| job.record.state == JobState::Done) else { return };
        let (Some(run), owner, spec) = (finished_run(past, cores), past.record.owner.clone(), past.record.spec.clone())
        else {
            return;
        };
        let shape = Shape::of(&spec.command);
        if shape.words.is_empty() {
            return;
        }
        let is_alike =
            |job: &&mut Job| job.record.is_live() && job.record.owner == owner && runs_program(job, &spec, &shape);
        for job in self.values_mut().filter(is_alike) {
            job.history.push(run);
            let old = job.history.len().saturating_sub(MAX_RUNS);
            job.history.drain(..old);
        }
    }
}

/// Whether `job` runs the program of `spec`, whose command has this `shape`.
fn runs_program(job: &Job, spec: &JobSpec, shape: &Shape) -> bool {
    let own = &job.record.spec;
    own.runtime == spec.runtime && own.command.len() == spec.command.len() && Shape::of(&own.command) == *shape
}

impl JobTable {
    /// Finds out how much memory earlier runs of a job that waits had on one GPU.
    pub(super) fn find_gpu_memory(&mut self, id: JobId) {
        let Some(job) = self.get(&id) else { return };
        let has_peak = |past: &&Job| {
            past.progress.gpu_peak_bytes.is_some()
                && past.record.state == JobState::Done
                && past.record.owner == job.record.owner
        };
        // On most machines there is none.
        let mut past = self.values().rev().filter(has_peak).peekable();
        if past.peek().is_none() || job.record.spec.command.is_empty() {
            return;
        }
        let shape = Shape::of(&job.record.spec.command);
        let is_alike = |past: &&Job| {
            past.record.spec.command.len() == job.record.spec.command.len()
                && Shape::of(&past.record.spec.command) == shape
        };
        let bytes = past.filter(is_alike).take(MAX_RUNS).filter_map(|past| past.progress.gpu_peak_bytes).max();
        if let Some(job) = self.get_mut(&id) {
            job.past_gpu_bytes = bytes;
        }
    }
}

/// How the claims of these runs fared, by source.
fn judge(runs: impl Iterator<Item = FinishedRun>) -> BTreeMap<ClaimSource, ClaimRecord> {
    let mut claims: BTreeMap<ClaimSource, ClaimRecord> = BTreeMap::new();
    for run in runs {
        if let Some(source) = run.claimed_by {
            claims.entry(source).or_default().add(&run);
        }
    }
    claims
}

fn finished_run(job: &Job, cores: f64) -> Option<FinishedRun> {
    let signal = job.progress.tracker.signal();
    let steps = (signal.reports > 0).then(|| signal.position() as u64).filter(|steps| *steps > 0);
    let core_s = job.progress.meter.consumed().cpu * cores;
    (core_s > 0.0).then_some(FinishedRun { steps, claimed: signal.total, claimed_by: signal.claimed_by, core_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alike(a: &str, b: &str) -> bool {
        let shape = |text: &str| Shape::of(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        shape(a) == shape(b)
    }

    #[test]
    fn runs_of_a_sweep_are_alike_and_runs_of_other_lengths_are_not() {
        assert!(alike("python t.py --lr 0.1 --epochs 5", "python t.py --lr 0.01 --epochs 5"));
        assert!(alike("python t.py lr=0.1", "python t.py lr=1e-3"));
        assert!(!alike("python t.py --lr 0.1 --epochs 5", "python t.py --lr 0.1 --epochs 50"));
        assert!(!alike("python t.py --model small", "python t.py --model large"));
        assert!(!alike("python t.py", "python other.py"));
    }

    #[test]
    fn claims_are_judged_by_source() {
        let run = |steps, claimed, claimed_by| FinishedRun { steps, claimed, claimed_by, core_s: 1.0 };
        let runs = [
            run(Some(100), Some(100), Some(ClaimSource::Command)),
            run(Some(40), Some(100), Some(ClaimSource::Command)),
            run(Some(95), Some(100), Some(ClaimSource::Bar)),
            run(None, Some(100), Some(ClaimSource::Bar)),
            run(Some(50), Some(100), None),
        ];
        let claims = judge(runs.into_iter());
        let of = |source| claims.get(&source).copied();
        assert_eq!(of(ClaimSource::Command), Some(ClaimRecord { kept: 1, broken: 1 }));
        assert_eq!(of(ClaimSource::Bar), Some(ClaimRecord { kept: 1, broken: 0 }));
        assert_eq!(claims.len(), 2);
    }
}
