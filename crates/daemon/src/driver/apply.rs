//! Carries the last plan out: writes every job's target as limits and keeps what was read back.
//!
//! Files whose values a plan leaves as they are, are read back every [`CHECK_PACE`] only. A file costs six system calls,
//! and each job has eight of them.
//!
//! **Properties.** Nothing is written after the lease has lapsed. A limit that cannot be written is kept
//! as an error of its job and does not stop the others.

use super::inside::Deal;
use super::runtimes::kind_name;
use super::{Driver, Job};
use crate::record::Change;
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::{JobId, Span};
use gainshare_limits::{AppliedLimits, JobHandle, Runtime, RuntimeError, RuntimeKind};
use std::collections::BTreeMap;

/// How often unchanged limits are read back.
const CHECK_PACE: Span = Span::from_secs(10);

impl Driver {
    /// Whether unchanged limits are to be read back, to notice another program that writes them.
    pub(super) fn is_check_due(&self) -> bool {
        self.now() >= self.plans.checked_at + CHECK_PACE
    }

    /// Whether this application reads back unchanged limits, too. Then the next one to do so is due later.
    pub(super) fn begin_check(&mut self) -> bool {
        let is_due = self.is_check_due();
        if is_due {
            self.plans.checked_at = self.now();
        }
        is_due
    }

    /// Writes the targets of all jobs that have one, runtime by runtime.
    pub(super) fn apply(&mut self) {
        let is_check = self.begin_check();
        for kind in self.runtimes.kinds() {
            self.apply_to(kind, is_check);
        }
        // A job that came or went changes the shares of its GPU at once.
        self.share_gpus();
        self.write_pages();
    }

    /// Deals the teams out and writes them into the pages of all process jobs.
    pub(super) fn write_pages(&mut self) {
        if self.lease.has_lapsed() {
            return;
        }
        let by = Deal {
            plan: self.plans.current.as_ref(),
            cores: self.runtimes.cores(&self.config),
            mode: self.runtimes.mode(&self.config),
            now: self.clock.now(),
        };
        self.teams.write_pages(&mut self.jobs, &self.paths, &by);
    }

    /// Writes the targets of one runtime's jobs. The results come to [`Driver::applied`], at once
    /// or from another thread. `is_check`: unchanged limits of processes are read back, too.
    pub(super) fn apply_to(&mut self, kind: RuntimeKind, is_check: bool) {
        if self.lease.has_lapsed() {
            // The limits were put back while this daemon stood still. The next beat begins a new epoch.
            return;
        }
        let Some(plan) = &self.plans.current else { return };
        let generation = plan.generation;
        let is_limited = |j: &&Job| j.record.holds_slot() && j.record.spec.runtime == kind;
        let wanted = self
            .jobs
            .values()
            .filter(is_limited)
            .filter_map(|job| Some((job.record.id, job.handle()?, plan.target(job.record.id)?)));
        let wanted: Vec<(JobId, JobHandle, CheckedTarget)> = wanted.collect();
        if wanted.is_empty() {
            return;
        }
        if kind == RuntimeKind::Docker {
            return self.apply_to_containers(generation, wanted);
        }
        let Some(process) = &mut self.runtimes.process else { return };
        let (ids, targets): (Vec<JobId>, Vec<(JobHandle, CheckedTarget)>) =
            wanted.into_iter().map(|(id, handle, target)| (id, (handle, target))).unzip();
        let results = match is_check {
            true => process.apply(generation, &targets),
            false => process.apply_changes(generation, &targets),
        };
        self.applied(kind, generation, ids.into_iter().zip(results).collect());
    }

    /// Keeps what was read back after limits were written.
    pub(super) fn applied(
        &mut self,
        kind: RuntimeKind,
        generation: u64,
        results: Vec<(JobId, Result<AppliedLimits, RuntimeError>)>,
    ) {
        let mut errors = BTreeMap::new();
        let mut gone = Vec::new();
        for (id, result) in results {
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            match result {
                Ok(in_force) => {
                    job.in_force = Some(in_force);
                    job.apply_error = None;
                }
                Err(e) => {
                    if matches!(e, RuntimeError::Gone { .. }) {
                        gone.push(id);
                    } else {
                        tracing::warn!(job = %id, runtime = kind_name(kind), "{e}");
                        self.metrics.apply_errors.inc();
                    }
                    if let Some(last) = job.decisions.back_mut() {
                        last.error = Some(e.to_string());
                    }
                    errors.insert(id.0, e.to_string());
                    job.apply_error = Some(e.to_string());
                }
            }
        }
        if !errors.is_empty() {
            self.fact(None, Change::Applied { generation, errors });
        }
        for id in gone {
            self.read_exit(id);
        }
    }
}
