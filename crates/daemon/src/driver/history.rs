//! Earlier runs of a job's program: the best predictor of how long the next one takes.
//!
//! Two jobs run the same program if they have one owner and commands of one [`Shape`]. So the runs of a sweep
//! over learning rates are alike, and `--epochs 5` and `--epochs 50` are not. Only runs that ended well
//! count; the journal keeps them, so a restarted daemon knows them too. Jobs that wait or run already learn of a run of
//! their program when it ends.
//!
//! A program that never ran is judged by the other programs of its owner, as far as the reliability of its claims is
//! concerned: some people stop every run early, and some scripts draw bars of one epoch.

use super::jobs::{Job, JobTable};
use super::program::{PastRun, PastRuns, Shape};
use crate::spec::JobSpec;
use crate::types::JobState;
use gainshare_core::model::JobId;
use gainshare_core::signal::ClaimSource;
use gainshare_core::view::{ClaimRecord, FinishedRun};
use std::collections::BTreeMap;

/// Number of the newest runs that are handed to the rules.
const MAX_RUNS: usize = 8;

/// Number of the newest runs of other programs by which claims are judged.
const MAX_OTHERS: usize = 50;

impl JobTable {
    /// Looks up the earlier runs of a job that is about to be followed. The machine has this many `cores`.
    pub(super) fn find_earlier_runs(&mut self, id: JobId, cores: f64) {
        let Some(job) = self.get(&id) else { return };
        let shape = &job.shape;
        if shape.is_unknown() {
            return;
        }
        let is_of_owner = |past: &&Job| past.record.state == JobState::Done && past.record.owner == job.record.owner;
        let is_alike = |past: &Job| runs_program(past, &job.record.spec, shape);
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

    /// What earlier runs of a program say of a job with this spec. The machine has this many `cores`.
    pub(super) fn past_runs(&self, owner: &str, spec: &JobSpec, shape: &Shape, cores: f64) -> Option<PastRuns> {
        let is_same = |past: &Job| past.record.spec.command == spec.command;
        self.past_runs_where((owner, spec, shape), cores, is_same, true)
            .or_else(|| self.past_runs_where((owner, spec, shape), cores, |_| true, false))
    }

    /// The same by those earlier runs alone that are `wanted`.
    fn past_runs_where(
        &self,
        (owner, spec, shape): (&str, &JobSpec, &Shape),
        cores: f64,
        wanted: impl Fn(&Job) -> bool,
        is_same_command: bool,
    ) -> Option<PastRuns> {
        if shape.is_unknown() {
            return None;
        }
        let is_past = |past: &&Job| past.record.state == JobState::Done && past.record.owner == owner;
        let alike = self.values().rev().filter(is_past).filter(|past| runs_program(past, spec, shape) && wanted(past));
        let measured = alike.filter_map(|past| measured_run(past, cores)).take(MAX_RUNS);
        PastRuns::of(measured.collect(), is_same_command)
    }

    /// Finds out what earlier runs say of a live job.
    pub(super) fn find_past_runs(&mut self, id: JobId, cores: f64) {
        let Some(job) = self.get(&id) else { return };
        let past = self.past_runs(&job.record.owner, &job.record.spec, &job.shape, cores);
        if let Some(job) = self.get_mut(&id) {
            job.set_past(past);
        }
    }

    /// A job has ended: if it ended well, the live jobs of the same program learn how long it was.
    pub(super) fn add_finished_run(&mut self, id: JobId, cores: f64) {
        let Some(past) = self.get(&id).filter(|job| job.record.state == JobState::Done) else { return };
        let (owner, spec, shape) = (past.record.owner.clone(), past.record.spec.clone(), past.shape.clone());
        let Some(run) = finished_run(past, cores).filter(|_| !shape.is_unknown()) else { return };
        let same = self.past_runs(&owner, &spec, &shape, cores);
        let alike = self.past_runs_where((&owner, &spec, &shape), cores, |_| true, false);
        let is_alike =
            |job: &&mut Job| job.record.is_live() && job.record.owner == owner && runs_program(job, &spec, &shape);
        for job in self.values_mut().filter(is_alike) {
            job.history.push(run);
            let old = job.history.len().saturating_sub(MAX_RUNS);
            job.history.drain(..old);
            if job.record.spec.command == spec.command {
                job.set_past(same.clone());
            } else if job.past.as_ref().is_none_or(|past| !past.is_same_command) {
                job.set_past(alike.clone());
            }
        }
    }
}

/// Whether `job` runs the program of `spec`, whose command has this `shape`.
fn runs_program(job: &Job, spec: &JobSpec, shape: &Shape) -> bool {
    let own = &job.record.spec;
    own.runtime == spec.runtime && own.command.len() == spec.command.len() && job.shape == *shape
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
        // On most machines no run had memory on a GPU.
        let mut past = self.values().rev().filter(has_peak).peekable();
        if past.peek().is_none() || job.record.spec.command.is_empty() {
            return;
        }
        let is_alike = |past: &&Job| past.shape == job.shape;
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

/// A finished run whose speed was measured.
fn measured_run(job: &Job, cores: f64) -> Option<PastRun> {
    let (pace, run) = (job.progress.pace.own_pace()?, finished_run(job, cores)?);
    Some(PastRun { name: job.record.name.clone(), run, pace })
}

#[cfg(test)]
mod tests {
    use super::*;

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
