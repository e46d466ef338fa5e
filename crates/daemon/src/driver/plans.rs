//! Decisions: view, plan, second opinion, journal, apply, read back, tell.

use super::jobs::kind_name;
use super::{Driver, Job, RECENT_PLANS};
use crate::api::types::{DecisionInfo, Event, JobState, Why};
use crate::clock::{Moment, rfc3339};
use crate::fail;
use crate::journal::Batch;
use crate::record::Change;
use gainshare_core::check::{CheckedPlan, CheckedTarget};
use gainshare_core::decider::{Decision, Outcome};
use gainshare_core::model::{JobId, NodeId, OwnerId, Share, Span};
use gainshare_core::plan::{Plan, Standing, Verdict};
use gainshare_core::view::{JobView, NodeView, Phase, View};
use gainshare_limits::usage::NodeResources;
use gainshare_limits::{Capacity, JobHandle, RuntimeError, machine};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A daemon has one node: its machine.
const HERE: NodeId = NodeId(0);

/// How often unchanged limits are looked at.
const APPLY_PACE: Span = Span::from_secs(1);

/// Decisions kept for `explain`.
const DECISIONS_KEPT: usize = 5;

impl Driver {
    pub(super) fn whole(&self) -> NodeResources {
        let capacity = Capacity { cores: self.cores(), ..self.runtimes.capacity() };
        NodeResources { capacity, block_bytes_s: self.config.block_bandwidth, net_bytes_s: self.config.net_bandwidth }
    }

    /// What the decisions see. Use is read right before.
    pub(super) fn view(&mut self) -> View {
        let running: Vec<JobId> =
            self.jobs.values().filter(|j| j.record.state == JobState::Running).map(|j| j.record.id).collect();
        for id in running {
            self.read_usage(id);
        }
        let capacity = self.whole().capacity;
        let node = NodeView {
            id: HERE,
            cores: capacity.cores,
            speed: 1.0,
            memory_bytes: capacity.memory_bytes,
            slots: self.config.slots,
            idle: machine::idle_s(Path::new(machine::ROOT)),
        };
        let jobs = self.jobs.values().filter(|j| j.record.is_live()).map(|j| self.job_view(j)).collect();
        View { now: self.now(), nodes: vec![node], jobs }
    }

    fn job_view(&self, job: &Job) -> JobView {
        let r = &job.record;
        let phase = match r.state {
            JobState::Starting | JobState::Running => {
                Phase::Running { node: HERE, since: r.started.unwrap_or(r.submitted).time, attempt: r.attempt }
            }
            _ => Phase::Waiting,
        };
        let done = |id: &JobId| self.jobs.get(id).is_none_or(|j| j.record.state == JobState::Done);
        let owner = self.owners.iter().position(|o| *o == r.owner).unwrap_or(0);
        JobView {
            id: r.id,
            owner: OwnerId(owner as u32),
            arrived: r.submitted.time,
            phase,
            signal: job.progress.tracker.signal(),
            consumed: job.progress.meter.consumed(),
            floor: Share::clamped(r.spec.floor),
            max: Share::clamped(r.spec.max),
            priority: r.spec.priority,
            waits_for: r.after.iter().copied().filter(|id| !done(id)).collect(),
            pinned: false,
            usable: None,
            known_left_s: None,
        }
    }

    /// Decides if anything is due, and carries the decision out.
    pub(super) fn decide(&mut self) {
        let due = self.control.due().is_some_and(|due| self.now() >= due);
        if self.ending.is_some() || !(self.wants_decision || due) {
            return;
        }
        self.wants_decision = false;
        let begun = Instant::now();
        let view = self.view();
        let outcome = self.control.decide_recorded(view);
        if outcome == Outcome::NotDue {
            return;
        }
        self.metrics.decision_seconds.observe(begun.elapsed().as_secs_f64());
        self.metrics.plans.inc();
        self.control_unsaved = true;
        match outcome {
            Outcome::NotDue => {}
            Outcome::Decision(decision) => {
                self.problems.remove("plan");
                self.carry_out(decision);
            }
            Outcome::Rejected(rejection) => {
                // The limits in force were sound when they were set: they stay.
                let (generation, list) = (rejection.generation, rejection.reasons());
                let record = rejection.record.and_then(|r| serde_json::to_string(&r).ok());
                tracing::error!(generation, record, "a plan failed its check and is not applied: {list}");
                self.problems.insert("plan", format!("plan {generation} was not applied: {list}"));
                self.metrics.plans_refused.inc();
            }
        }
    }

    /// Journals the plan if it changes anything, then applies it. Without the disk it is held back.
    pub(super) fn carry_out(&mut self, decision: Decision) {
        let plan = &decision.plan;
        let changes = !plan.starts.is_empty()
            || plan.verdicts.iter().any(|(id, v)| {
                self.jobs.get(id).is_some_and(|j| j.verdict.as_ref().and_then(|old| old.target) != v.target)
            });
        let at = self.clock.moment();
        if changes {
            fail::point("plan-before-journal");
            let change = Change::Plan { plan: plan.as_plan().clone() };
            let saved = self.save_with(Batch { changes: vec![(at, None, change)], ..Batch::default() });
            self.note_disk(&saved);
            if saved.is_err() {
                self.held_plan = Some(decision);
                return;
            }
            fail::point("plan-before-apply");
        }
        self.held_plan = None;
        self.note_verdicts(at, plan);
        self.note_record(&decision);
        // Nothing new is written again only now and then, to notice others who write the same limits.
        if changes || at.time >= self.applied_at + APPLY_PACE {
            self.apply(plan);
        }
        fail::point("plan-after-apply");
        self.tell(at, plan);
        let starts: Vec<JobId> = plan.starts.iter().map(|s| s.job).collect();
        for id in starts {
            self.try_start(id);
        }
    }

    fn try_start(&mut self, id: JobId) {
        if let Err(e) = self.admit(id) {
            use crate::api::types::ErrorCode;
            if e.code == ErrorCode::DiskFull {
                self.note_disk::<()>(&Err(e));
                self.starts.push(id);
            } else {
                self.end(id, JobState::Failed, None, None, Some(e.message));
            }
        }
    }

    /// What the disk refused before.
    pub(super) fn retry_starts(&mut self) {
        if let Some(decision) = self.held_plan.take() {
            self.carry_out(decision);
        }
        for id in std::mem::take(&mut self.starts) {
            self.try_start(id);
        }
    }

    fn note_verdicts(&mut self, at: Moment, plan: &Plan) {
        for (id, verdict) in &plan.verdicts {
            let Some(job) = self.jobs.get_mut(id) else { continue };
            if verdict.standing != Standing::NotDue {
                if job.decisions.len() == DECISIONS_KEPT {
                    job.decisions.pop_front();
                }
                job.decisions.push_back(decision(at, plan.generation, verdict));
            }
            job.verdict = Some(verdict.clone());
        }
    }

    /// Keeps the decision for replay, for each job that it decided about anew.
    fn note_record(&mut self, decision: &Decision) {
        let Some(record) = decision.record().map(Arc::new) else { return };
        for job in self.jobs.values_mut() {
            let verdict = record.plan.verdicts.get(&job.record.id);
            if verdict.is_some_and(|v| v.standing != Standing::NotDue) {
                job.record_of_decision = Some(record.clone());
            } else if !job.record.is_live() {
                job.record_of_decision = None;
            }
        }
        self.last_record = Some(record);
    }

    /// Writes the targets of all jobs that have one, runtime by runtime, and keeps what was read back.
    pub(super) fn apply(&mut self, plan: &CheckedPlan) {
        let generation = plan.generation;
        if self.lease.has_lapsed() {
            // The limits were put back while we stood still. The next beat begins anew under another epoch.
            return;
        }
        self.applied_at = self.now();
        let mut errors = BTreeMap::new();
        let mut gone = Vec::new();
        for kind in self.runtimes.kinds() {
            let mut ids = Vec::new();
            let mut wanted: Vec<(JobHandle, CheckedTarget)> = Vec::new();
            for job in self.jobs.values().filter(|j| j.record.holds_slot() && j.record.spec.runtime == kind) {
                if let (Some(handle), Some(target)) = (job.handle(), plan.target(job.record.id)) {
                    ids.push(job.record.id);
                    wanted.push((handle, target));
                }
            }
            if wanted.is_empty() {
                continue;
            }
            let Ok(runtime) = self.runtimes.of(kind) else { continue };
            let results = runtime.apply(generation, &wanted);
            for (id, result) in ids.into_iter().zip(results) {
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
        }
        if !errors.is_empty() {
            self.fact(None, Change::Applied { generation, errors });
            self.note_originals();
        }
        for id in gone {
            self.look_for_exit(id);
        }
    }

    fn tell(&mut self, at: Moment, plan: &Plan) {
        let info = self.plan_info(at, plan);
        if self.recent_plans.len() == RECENT_PLANS {
            self.recent_plans.pop_back();
        }
        if self.events.receiver_count() > 0 {
            self.emit(Event::Plan { plan: info.clone() });
        }
        self.recent_plans.push_front(info);
    }
}

pub(super) fn decision(at: Moment, generation: u64, verdict: &Verdict) -> DecisionInfo {
    DecisionInfo {
        at: rfc3339(at.unix_s),
        at_s: at.unix_s,
        generation,
        share: verdict.target.map(|t| t.share.cpu.get()),
        limit: verdict.target.map(|t| t.limit.cpu.get()),
        growth: verdict.growth.cpu,
        category: verdict.target.map(|_| verdict.category.name().to_owned()),
        reason: why(verdict),
        error: None,
    }
}

/// The reason as the API tells it: a decision that changed nothing says so.
pub(super) fn why(verdict: &Verdict) -> Why {
    let text = match verdict.standing {
        Standing::InsideDeadband => format!("{}; as before", verdict.reason),
        Standing::New | Standing::NotDue => verdict.reason.to_string(),
    };
    Why { why: verdict.reason.name().to_owned(), text }
}
