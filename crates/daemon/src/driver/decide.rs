//! Decisions: make the view, let control decide, check the plan, journal it, have it applied, publish it.

use super::jobs::{Job, JobTable};
use super::{Driver, Plans, RECENT_PLANS};
use crate::clock::{Moment, rfc3339};
use crate::fail;
use crate::journal::Batch;
use crate::record::Change;
use crate::types::{DecisionInfo, Event, JobState, PlanInfo, ReasonInfo};
use gainshare_core::decider::{Decision, Outcome};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::plan::{Plan, Standing, Verdict};
use gainshare_core::replay::RecordedDecision;
use gainshare_core::view::View;
use gainshare_limits::RuntimeKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time for the starts of one round. A start takes tens of milliseconds (a commit, a new process); a plan that
/// starts hundreds of jobs must not keep the lease from being renewed.
const START_BUDGET: Duration = Duration::from_millis(300);

/// While jobs of a plan are being started, decisions wait for this long.
const START_PAUSE: Span = Span::from_secs(2);

/// Decisions kept for `explain`.
const DECISIONS_KEPT: usize = 5;

impl Job {
    /// Keeps a decision for `explain`, in place of the oldest one.
    pub(super) fn add_decision(&mut self, decision: DecisionInfo) {
        if self.decisions.len() == DECISIONS_KEPT {
            self.decisions.pop_front();
        }
        self.decisions.push_back(decision);
    }
}

impl JobTable {
    /// Keeps what a plan says about each job.
    fn note_verdicts(&mut self, at: Moment, plan: &Plan) {
        for (id, verdict) in &plan.verdicts {
            let Some(job) = self.get_mut(id) else { continue };
            if verdict.standing != Standing::NotDue {
                job.add_decision(decision(at, plan.generation, verdict));
            }
            job.verdict = Some(verdict.clone());
        }
    }

    /// Keeps a decision for replay, for each job that was due.
    fn note_record(&mut self, record: &Arc<RecordedDecision>) {
        for job in self.values_mut() {
            let verdict = record.plan.verdicts.get(&job.record.id);
            if verdict.is_some_and(|v| v.standing != Standing::NotDue) {
                job.record_of_decision = Some(record.clone());
            } else if !job.record.is_live() {
                job.record_of_decision = None;
            }
        }
    }
}

impl Plans {
    /// Keeps a plan for the API.
    fn add_recent(&mut self, info: PlanInfo) {
        if self.recent.len() == RECENT_PLANS {
            self.recent.pop_back();
        }
        self.recent.push_front(info);
    }
}

impl Driver {
    /// What the decisions see. Use is read right before.
    pub(super) fn view(&mut self) -> View {
        let now = self.now();
        let cpu_only = self.control.policy().counts_cpu_only();
        for job in self.jobs.values_mut() {
            match cpu_only {
                true => self.runtimes.read_cpu(&self.config, job, now),
                false => self.runtimes.read_usage(&self.config, job, now),
            }
        }
        self.runtimes.docker.iter_mut().for_each(|docker| docker.read_usage(&self.jobs));
        let mode = self.runtimes.mode(&self.config);
        self.forecasts.measure_paces(&mut self.jobs, &self.config, mode, now);
        self.find_gpu_waits();
        self.picture().view()
    }

    /// When to decide next. A daemon that ends decides nothing: jobs that wait stay in the queue of the next daemon.
    pub(super) fn decision_due(&self, now: Time) -> Option<Time> {
        if self.timeline.ending.is_some() {
            return None;
        }
        let due = if self.plans.is_wanted { Some(now) } else { self.control.due() };
        let has_starts = !self.plans.due.is_empty();
        due.map(|due| if has_starts { due.max(self.plans.decided_at + START_PAUSE) } else { due })
    }

    /// Decides if anything is due, and carries the decision out.
    pub(super) fn decide(&mut self) {
        let now = self.now();
        if self.decision_due(now).is_none_or(|due| now < due) {
            return;
        }
        self.plans.is_wanted = false;
        self.plans.decided_at = now;
        let begun = Instant::now();
        let view = self.view();
        let outcome = self.control.decide_recorded(view);
        if outcome == Outcome::NotDue {
            return;
        }
        self.metrics.decision_seconds.observe(begun.elapsed().as_secs_f64());
        self.metrics.plans.inc();
        self.store.control_changed();
        match outcome {
            Outcome::NotDue => {}
            Outcome::Decision(decision) => {
                self.problems.remove("plan");
                self.carry_out(decision);
            }
            Outcome::Rejected(rejection) => {
                // The limits in force come from a plan that passed its check; they stay.
                let (generation, list) = (rejection.generation, rejection.reasons());
                let record = rejection.record.and_then(|r| gainshare_record::to_json(&r).ok());
                tracing::error!(generation, record, "a plan failed its check and is not applied: {list}");
                self.problems.insert("plan", format!("plan {generation} was not applied: {list}"));
                self.metrics.plans_rejected.inc();
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
            self.problems.note_disk(&saved);
            if saved.is_err() {
                self.plans.held = Some(decision);
                return;
            }
            fail::point("plan-before-apply");
        }
        self.plans.held = None;
        self.plans.current = Some(plan.clone());
        self.jobs.note_verdicts(at, plan);
        let starting: Vec<JobId> = plan.starts.iter().map(|start| start.job).collect();
        self.foresee_starts(&starting);
        self.note_misses();
        if let Some(record) = decision.record().map(Arc::new) {
            self.jobs.note_record(&record);
            self.plans.last_record = Some(record);
        }
        if changes || self.is_check_due() {
            self.apply();
        }
        fail::point("plan-after-apply");
        let info = self.picture().plan_info(at, plan);
        if self.inbox.has_listeners() {
            self.inbox.emit(Event::Plan { plan: info.clone() });
        }
        self.plans.add_recent(info);
        // A job of an earlier plan that is not started yet still waits, so the new plan names it again.
        self.plans.due = starting.into();
        self.start_jobs();
    }

    /// Starts jobs of the newest plan, as many as fit into the time of one round.
    pub(super) fn start_jobs(&mut self) {
        if self.timeline.ending.is_some() {
            // Jobs that wait stay in the queue of the next daemon.
            self.plans.due.clear();
        }
        let begun = Instant::now();
        while let Some(id) = self.plans.due.pop_front() {
            self.try_start(id);
            if begun.elapsed() >= START_BUDGET {
                return;
            }
        }
    }

    fn try_start(&mut self, id: JobId) {
        let is_container = self.jobs.get(&id).is_some_and(|j| j.record.spec.runtime == RuntimeKind::Docker);
        if is_container && self.runtimes.is_connecting_docker() {
            return self.plans.starts.push(id);
        }
        if let Err(e) = self.admit(id) {
            use crate::types::ErrorCode;
            if e.code == ErrorCode::DiskFull {
                self.problems.note_disk::<()>(&Err(e));
                self.plans.starts.push(id);
            } else {
                self.end(id, JobState::Failed, None, None, Some(e.message));
            }
        }
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

/// The reason as the API shows it: a decision that changed nothing says so.
pub(super) fn why(verdict: &Verdict) -> ReasonInfo {
    let text = match verdict.standing {
        Standing::InsideDeadband => format!("{}; as before", verdict.reason),
        Standing::New | Standing::NotDue => verdict.reason.to_string(),
    };
    ReasonInfo { why: verdict.reason.name().to_owned(), text }
}

#[cfg(test)]
mod tests {
    use super::super::Job;
    use super::super::program::{PastRun, PastRuns};
    use super::*;
    use crate::record::JobRecord;
    use crate::spec::JobSpec;
    use crate::types::SubmitRequest;
    use gainshare_core::decider::Decider;
    use gainshare_core::plan::Reason;
    use gainshare_core::policy::{Policy, Preset};
    use gainshare_core::signal::speed::Pace;
    use gainshare_core::view::FinishedRun;
    use std::collections::BTreeMap;
    use std::path::Path;

    /// A daemon without a runtime, and one job whose parent is not the daemon.
    fn submitted(dir: &Path, is_unsound: bool) -> Driver {
        let mut driver = Driver::without_runtimes(dir);
        if is_unsound {
            driver.control.break_plans();
        }
        let spec = JobSpec { command: vec!["train".into()], ..JobSpec::default() };
        let request =
            SubmitRequest { jobs: vec![spec], attached: true, base_env: BTreeMap::new(), env_names: Vec::new() };
        driver.submit(request).unwrap_or_else(|refusal| panic!("{}", refusal.message));
        driver
    }

    #[test]
    fn the_deadline_of_a_job_that_waited_is_judged_when_it_starts() {
        let dir = tempfile::tempdir().expect("a folder");
        let mut driver = submitted(&dir.path().join("waits"), false);
        let (id, now) = (*driver.jobs.keys().next().expect("a job was submitted"), driver.now());
        // It waits, and needs 100 s with the whole machine until its deadline in an hour.
        let spec = JobSpec {
            command: vec!["train".into()],
            deadline: Some(rfc3339(driver.clock.moment().unix_s + 3600.0)),
            ..JobSpec::default()
        };
        let mut job = Job::new(JobRecord::queued(id, spec, "me".into(), driver.clock.moment()), now);
        let run = FinishedRun { steps: Some(100), claimed: None, claimed_by: None, core_s: 100.0 };
        let past = PastRun { name: "earlier".into(), run, pace: Pace::from_law(0.0, 1.0, 1.0) };
        job.set_past(PastRuns::of(vec![past], true));
        // The machine was full when it was submitted.
        job.early_reason = Some(Reason::CannotMeet { earliest_s: Some(7200.0) });
        driver.jobs.insert(id, job);
        driver.control = Decider::new(Policy::from(Preset::Qos));
        driver.plans.is_wanted = true;
        driver.decide();
        let reason = driver.jobs[&id].early_reason;
        assert!(matches!(reason, Some(Reason::MeetsDeadline { .. })), "{reason:?}");
    }

    fn has_plan(driver: &Driver) -> bool {
        let entries = driver.store.journal.entries().expect("the journal can be read");
        entries.iter().any(|entry| matches!(entry.change, Change::Plan { .. }))
    }

    #[test]
    fn an_unsound_plan_is_neither_journaled_nor_carried_out_and_is_counted() {
        let dir = tempfile::tempdir().expect("a folder");
        let driver = submitted(&dir.path().join("unsound"), true);
        assert_eq!((driver.metrics.plans.get(), driver.metrics.plans_rejected.get()), (1, 1));
        assert!(driver.problems["plan"].contains("another moment"), "{:?}", driver.problems);
        assert!(driver.jobs.values().all(|job| job.record.state == JobState::Queued && job.verdict.is_none()));
        assert!(driver.plans.current.is_none() && driver.plans.due.is_empty() && !has_plan(&driver));
        // A sound plan takes the same job off the queue.
        let driver = submitted(&dir.path().join("sound"), false);
        assert_eq!((driver.metrics.plans.get(), driver.metrics.plans_rejected.get()), (1, 0));
        assert!(driver.jobs.values().all(|job| job.record.state != JobState::Queued));
        assert!(driver.plans.current.is_some() && has_plan(&driver));
    }
}
