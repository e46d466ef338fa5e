//! What would become of jobs if they were submitted now.

use super::HERE;
use super::deadlines::{deadline, forecast_at};
use super::intake::unix_user;
use super::jobs::Job;
use super::program::{PastRuns, Shape};
use super::view::Picture;
use crate::clock::{rfc3339, unix_s};
use crate::error::Refusal;
use crate::spec::JobSpec;
use crate::types::{DeadlineInfo, DeadlineState, JobState, MissCause, PlanAnswer, PlannedWait, PredictedMiss};
use gainshare_core::decider::Decider;
use gainshare_core::model::{JobId, Share, Time};
use gainshare_core::plan::{Plan, Reason};
use gainshare_core::signal::Signal;
use gainshare_core::signal::speed::Interval;
use gainshare_core::view::{JobView, Phase, View};
use std::collections::BTreeMap;

/// When jobs end, in seconds from now.
type Ends = BTreeMap<JobId, Interval>;

/// A job that ends later than before by less than this part is not delayed.
const SAME: f64 = 0.05;

impl Picture<'_> {
    /// Adds jobs with these specs to a view, as if they ran already. Answers with what is known of the program of each.
    fn add_new(&self, view: &mut View, specs: &[&JobSpec]) -> Vec<(JobId, Option<PastRuns>)> {
        let next = self.jobs.keys().last().map_or(1, |id| id.0 + 1);
        let mut added = Vec::with_capacity(specs.len());
        for (id, spec) in (next..).map(JobId).zip(specs) {
            let owner = spec.owner.clone().unwrap_or_else(unix_user);
            let cores = self.runtimes.cores(self.config);
            let past = self.jobs.past_runs(&owner, spec, &Shape::of(&spec.command), cores);
            let available = self.forecasts.forecaster.available();
            view.jobs.push(JobView {
                id,
                owner: self.jobs.owner(&owner),
                arrived: view.now,
                phase: Phase::Running { node: HERE, since: view.now, attempt: 1 },
                floor: Share::clamped(spec.floor),
                max: Share::clamped(spec.max),
                priority: spec.priority,
                deadline: deadline(spec, self.now),
                signal: past.as_ref().map_or(Signal::default(), |past| past.signal(available)),
                history: past.as_ref().map_or_else(Vec::new, |past| past.runs.clone()),
                ..JobView::default()
            });
            added.push((id, past));
        }
        added
    }

    /// What the policy would decide about each of these waiting jobs, which are about to start, as soon as it runs.
    /// Only jobs with a deadline whose ends follow from earlier runs have a reason.
    pub(super) fn reasons_at_start(&self, control: &Decider, starting: &[JobId]) -> BTreeMap<JobId, Reason> {
        let is_foreseen = |id: &&JobId| self.jobs.get(id).is_some_and(Job::is_foreseen);
        let foreseen: Vec<JobId> = starting.iter().filter(is_foreseen).copied().collect();
        if foreseen.is_empty() {
            return BTreeMap::new();
        }
        let mut view = self.view();
        for job in view.jobs.iter_mut().filter(|job| starting.contains(&job.id)) {
            job.phase = Phase::Running { node: HERE, since: view.now, attempt: 1 };
        }
        let plan = decide_copy(control, view, self.now);
        let reason = |id: JobId| Some((id, plan.as_ref()?.verdicts.get(&id)?.reason));
        foreseen.into_iter().filter_map(reason).collect()
    }

    /// Lets those of the added jobs wait that would wait: for the jobs that their specs name, or for a free slot.
    fn let_wait(&self, view: &mut View, added: &[JobId], specs: &[JobSpec]) -> Result<(), Refusal> {
        let is_new = |job: &JobView| added.contains(&job.id);
        // Jobs that are ready to start take the free slots first.
        let ahead = view.jobs.iter().filter(|job| !is_new(job) && job.waits_for.is_empty()).count();
        let mut free = self.config.slots.map(|slots| slots.saturating_sub(ahead));
        let names: BTreeMap<String, JobId> =
            specs.iter().zip(added).filter_map(|(spec, id)| Some((spec.name.clone()?, *id))).collect();
        let is_done = |id: &JobId| self.jobs.get(id).is_some_and(|job| job.record.state == JobState::Done);
        for (job, spec) in view.jobs.iter_mut().filter(|job| added.contains(&job.id)).zip(specs) {
            job.waits_for = self.jobs.awaited(&spec.label(), spec, &names)?;
            job.waits_for.retain(|id| !is_done(id));
            if !job.waits_for.is_empty() || free == Some(0) {
                job.phase = Phase::Waiting;
            } else {
                free = free.map(|free| free - 1);
            }
        }
        Ok(())
    }

    /// What would become of jobs with these specs if they were submitted now.
    pub(super) fn plan_ahead(&self, control: &Decider, specs: &[JobSpec]) -> Result<Vec<PlanAnswer>, Refusal> {
        let view = self.view();
        // Everything is decided on copies: once as it is, once with the new jobs.
        let before = decide_copy(control, view.clone(), self.now);
        let mut with = view.clone();
        let added = self.add_new(&mut with, &specs.iter().collect::<Vec<_>>());
        self.let_wait(&mut with, &added.iter().map(|(id, _)| *id).collect::<Vec<_>>(), specs)?;
        let after = decide_copy(control, with.clone(), self.now);
        let forecaster = &self.forecasts.forecaster;
        let (ends_before, ends) = (forecaster.ends_of(control, &view), forecaster.ends_of(control, &with));
        let delays = self.delays(&with, (before.as_ref(), &ends_before), (after.as_ref(), &ends));
        let answers = specs.iter().zip(added).map(|(spec, (id, past))| {
            let verdict = after.as_ref().and_then(|plan| plan.verdicts.get(&id));
            let share = verdict.and_then(|v| v.target).map(|t| t.share.cpu.get());
            let basis = past.as_ref().map(PastRuns::basis);
            let done = ends.get(&id).map(|end| forecast_at(unix_s(), *end, basis.clone()));
            let reason = verdict.map(|v| v.reason);
            let deadline = spec.deadline_s().map(|at_s| {
                let tolerance_s = spec.tolerance_s();
                let state = match (reason, &done) {
                    (Some(Reason::CannotMeet { .. }), _) => DeadlineState::AtRisk,
                    (Some(Reason::MeetsDeadline { .. } | Reason::Early { .. }), _) => DeadlineState::OnTime,
                    (_, Some(done)) if done.at_s > at_s + tolerance_s => DeadlineState::AtRisk,
                    (_, Some(_)) => DeadlineState::OnTime,
                    (_, None) => DeadlineState::Unknown,
                };
                let miss = match reason {
                    Some(Reason::CannotMeet { earliest_s: Some(s) }) => {
                        let cause = MissCause::EarliestEnd { earliest_s: unix_s() + s, basis: basis.clone() };
                        Some(PredictedMiss { deadline_s: at_s, cause })
                    }
                    _ => None,
                };
                DeadlineInfo { at: rfc3339(at_s), at_s, tolerance_s, state, miss, outcome: None }
            });
            let waits_for = match reason {
                Some(Reason::WaitsForSlot { .. }) => Some(PlannedWait::Slot),
                Some(Reason::WaitsForJob { .. }) => Some(PlannedWait::Jobs),
                _ => None,
            };
            let like = past.map(|past| past.like);
            let (name, delays, text) = (spec.label(), delays.clone(), String::new());
            let answer = PlanAnswer { name, like, basis, share, done, deadline, waits_for, delays, text };
            PlanAnswer { text: answer.sentence(), ..answer }
        });
        Ok(answers.collect())
    }

    /// Running jobs that would end later, or whose deadlines could no longer be promised.
    fn delays(&self, view: &View, before: (Option<&Plan>, &Ends), after: (Option<&Plan>, &Ends)) -> Vec<String> {
        let ((Some(before), ends_before), (Some(after), ends_after)) = (before, after) else { return Vec::new() };
        let mut names = Vec::new();
        for job in &view.jobs {
            let (Some(old), Some(new)) = (before.verdicts.get(&job.id), after.verdicts.get(&job.id)) else { continue };
            let breaks =
                !matches!(old.reason, Reason::CannotMeet { .. }) && matches!(new.reason, Reason::CannotMeet { .. });
            let later = job.deadline.is_none()
                && ends_after
                    .get(&job.id)
                    .zip(ends_before.get(&job.id))
                    .is_some_and(|(new, old)| new.mid > old.mid * (1.0 + SAME));
            if breaks || later {
                names.push(self.jobs.get(&job.id).map_or_else(|| job.id.to_string(), |j| j.record.name.clone()));
            }
        }
        names
    }
}

/// The plan that a copy of `control` makes of `view`, whatever is due.
fn decide_copy(control: &Decider, mut view: View, now: Time) -> Option<Plan> {
    let mut fresh = control.clone();
    view.now = now;
    if let Some(decision) = fresh.decide(view.clone()).decision() {
        return Some(decision.plan.as_plan().clone());
    }
    // Nothing is due: a control without memory decides at once.
    let mut fresh = Decider::new(control.policy().clone());
    fresh.decide(view).decision().map(|d| d.plan.as_plan().clone())
}
