//! Carries the last plan out: writes every job's target as limits and keeps what was read back.
//!
//! **Properties.** Nothing is written after the lease has lapsed. A limit that cannot be written is kept
//! as an error of its job and does not stop the others.

use super::runtimes::kind_name;
use super::{Driver, Job};
use crate::record::Change;
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::JobId;
use gainshare_limits::{AppliedLimits, JobHandle, LimitMode, Runtime, RuntimeError, RuntimeKind};
use std::collections::BTreeMap;

impl Driver {
    /// Writes the targets of all jobs that have one, runtime by runtime.
    pub(super) fn apply(&mut self) {
        self.plans.applied_at = self.now();
        for kind in self.runtimes.kinds() {
            self.apply_to(kind);
        }
        // A job that came or went changes the shares of its GPU at once.
        self.share_gpus();
        self.write_pages();
    }

    /// Deals whole cores out again, so that cores which a job leaves unused are lent and come back.
    pub(super) fn lend_cores(&mut self) {
        let is_shared = self.jobs.values().filter(|job| job.record.holds_slot()).nth(1).is_some();
        if is_shared && self.runtimes.mode(&self.config) == LimitMode::Cores {
            self.apply_to(RuntimeKind::Process);
        }
    }

    /// Writes the targets of one runtime's jobs. The results come to [`Driver::applied`], at once
    /// or from another thread.
    pub(super) fn apply_to(&mut self, kind: RuntimeKind) {
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
        let targets: Vec<(JobHandle, CheckedTarget)> = wanted.iter().map(|(_, h, t)| (h.clone(), *t)).collect();
        let results = process.apply(generation, &targets);
        self.applied(kind, generation, wanted.into_iter().map(|(id, _, _)| id).zip(results).collect());
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
