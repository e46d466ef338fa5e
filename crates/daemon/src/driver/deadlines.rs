//! Predicted ends, deadlines and warnings.
//!
//! **Problem.** A user who gave a deadline wants to know when the job will be done, and wants to be
//! warned as soon as the deadline will be missed, whatever the policy.
//!
//! **How.** Once a second, and before every decision, each running job's counters feed its
//! [`gainshare_core::signal::speed::PaceTracker`]. Then the policy is played forward until every job
//! has ended ([`gainshare_core::forecast`]); in between, the last result stands. A job that has not
//! reported yet is expected to go as the last run of the same command went. A predicted miss is noted
//! once: in the journal, the log, the event stream and a metric. A job that ends is judged: an end with
//! exit code 0 by the deadline, its tolerance included, has met it.
//!
//! **Terms.** Deadlines are moments of the wall clock. A view has them on the decisions' clock, shifted
//! by the present difference between the two, so that setting the wall clock moves them along.

use super::runtimes::first_cpus;
use super::{Driver, HERE, Job};
use crate::clock::{rfc3339, unix_s};
use crate::error::Refusal;
use crate::record::Change;
use crate::spec::{self, JobSpec};
use crate::types::{DeadlineInfo, DeadlineState, ErrorCode, Forecast, JobState, PlanAnswer, PlanRequest};
use gainshare_core::decider::Decider;
use gainshare_core::forecast::{Forecaster, forecast};
use gainshare_core::model::{JobId, Share, Span, Time};
use gainshare_core::plan::{Plan, Reason};
use gainshare_core::signal::Signal;
use gainshare_core::signal::speed::{Interval, Reading};
use gainshare_core::view::{Deadline, JobView, Phase, View};
use gainshare_limits::{LimitMode, machine};
use gainshare_progress::{Progress, Unit};
use nix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// When jobs end, in seconds from now.
type Ends = BTreeMap<JobId, Interval>;

/// What the driver knows of ends.
#[derive(Default)]
pub(super) struct Forecasts {
    forecaster: Forecaster,
    /// When the last forecasts were made, and how much CPU time that took.
    made_at: Time,
    took: Span,
    /// The jobs that they were made for.
    made_for: JobCount,
    /// The machine had no CPU to spare when use was last read.
    pub(super) scarce: bool,
}

/// Forecasts are out of date when this changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct JobCount {
    live: usize,
    /// Live jobs whose pace is known.
    measured: usize,
    newest: Option<JobId>,
}

/// With less than this part of the machine idle, a job that used little may have wanted more.
const SPARE: f64 = 0.1;

/// Counters younger than this are good enough for predictions. A little less than the time between two beats.
const USAGE_AGE: Span = Span::from_millis(900);

/// Every warning of a predicted miss begins so.
const WARNING: &str = "its deadline will be missed";

/// A job that ends later than before by less than this part is not delayed.
const SAME: f64 = 0.05;

/// After a forecast the daemon waits for this many times the CPU time that it took: with many jobs forecasts are made
/// less often than once a second.
const FORECAST_LOAD: u64 = 400;

/// The same while the last forecasts are soon wrong: after a job came, went or was measured for the first time, and
/// while some job is [`YOUNG`].
const CHANGED_LOAD: u64 = 50;

/// Of a job that has run for less than this, more is known every second.
const YOUNG: Span = Span::from_secs(30);

impl Driver {
    /// A job's signal with its pace on a machine as busy as this one is now.
    pub(super) fn signal(&self, job: &Job) -> Signal {
        let pace = job.progress.pace.pace().map(|pace| pace.with_available(self.forecasts.forecaster.available()));
        let signal = Signal { pace, ..job.progress.tracker.signal() };
        advance(signal, job.progress.course, self.now())
    }

    /// Feeds the counters that were read last to the jobs' pace trackers.
    pub(super) fn measure_paces(&mut self) {
        let now = self.now();
        // Jobs may be confined to some of the CPUs: what the others leave idle, no job can use.
        let idle = match self.config.cores.and_then(first_cpus) {
            Some(cpus) => machine::idle_s_of_cpus(Path::new(machine::ROOT), &cpus),
            None => machine::idle_s(Path::new(machine::ROOT)),
        };
        let scarce = match (self.idle_seen, idle) {
            (Some((at, before)), Some(idle)) if now > at => idle - before < SPARE * now.since(at).as_secs_f64(),
            _ => true,
        };
        self.idle_seen = idle.map(|idle| (now, idle));
        self.forecasts.scarce = scarce;
        // With weights a job may use all that is idle; with quotas it may not.
        let is_free = self.runtimes.mode(&self.config) == LimitMode::Weight;
        for job in self.jobs.values_mut().filter(|j| j.record.state == JobState::Running) {
            let granted = job.verdict.as_ref().and_then(|v| v.target).map_or(1.0, |t| t.share.cpu.get());
            let consumed_s = job.progress.meter.consumed().cpu;
            // Counters that were read before count for the time at which they were read.
            let Some(now) = job.progress.meter.read_at() else { continue };
            let reading = Reading { now, consumed_s, granted, scarce, has_idle: !scarce && is_free };
            let signal = job.progress.tracker.signal();
            job.progress.pace.observe(reading, &signal);
        }
    }

    /// Once a second. Counters that a decision has read within that second are not read again.
    pub(super) fn check_deadlines(&mut self) {
        let now = self.now();
        let is_old = |j: &Job| now.since(j.usage_read) >= USAGE_AGE;
        for id in self.jobs.ids(|j| j.record.state == JobState::Running && is_old(j)) {
            self.read_usage(id);
        }
        self.measure_paces();
        self.measure_available();
        self.update_forecasts();
        self.warn_of_misses();
    }

    /// Measures what other programs of the machine leave to the jobs.
    fn measure_available(&mut self) {
        let running = |j: &&Job| j.record.state == JobState::Running;
        let meters = || self.jobs.values().filter(running).map(|j| (j.record.id, &j.progress.meter));
        // The counters of all jobs are read together, at a decision or at a beat.
        let read_at = meters().filter_map(|(_, meter)| meter.read_at()).max();
        let Some(read_at) = read_at else { return };
        let consumed = meters().map(|(id, meter)| (id, meter.consumed().cpu));
        self.forecasts.forecaster.measure(read_at, consumed, self.forecasts.scarce);
    }

    /// Makes new forecasts, unless the last ones took so long that they must stand for a while.
    fn update_forecasts(&mut self) {
        let now = self.now();
        let live = || self.jobs.values().filter(|j| j.record.is_live());
        let made_for = JobCount {
            live: live().count(),
            measured: live().filter(|j| j.progress.pace.pace().is_some()).count(),
            newest: live().map(|j| j.record.id).max(),
        };
        let is_young = |j: &Job| j.record.started.is_some_and(|started| now.since(started.time) < YOUNG);
        let is_changing = made_for != self.forecasts.made_for || live().any(is_young);
        let load = if is_changing { CHANGED_LOAD } else { FORECAST_LOAD };
        let next = self.forecasts.made_at + Span(self.forecasts.took.0.saturating_mul(load));
        if now < next || made_for.live == 0 {
            return;
        }
        let begun = cpu_time();
        let view = self.forecast_view();
        self.forecasts.forecaster.update(&self.control, &view);
        self.forecasts.took = Span(cpu_time().0.saturating_sub(begun.0));
        (self.forecasts.made_at, self.forecasts.made_for) = (now, made_for);
    }

    /// The view with what is known of jobs that have not reported yet: the last run of the same command.
    fn forecast_view(&self) -> View {
        let mut view = self.view_as_read();
        if view.jobs.iter().all(|j| j.signal.pace.is_some()) {
            return view;
        }
        let past = self.past_runs();
        for job in view.jobs.iter_mut().filter(|j| j.signal.pace.is_none()) {
            let Some(command) = self.jobs.get(&job.id).map(|j| &j.record.spec.command) else { continue };
            if let Some((_, known)) = past.get(command) {
                job.signal.total = job.signal.total.or(known.total);
                job.signal.pace = known.pace;
            }
        }
        view
    }

    /// The deadline of a job on the decisions' clock.
    pub(super) fn deadline(&self, spec: &JobSpec) -> Option<Deadline> {
        let left_s = spec.deadline_s()? - unix_s();
        let now = self.now();
        let at = if left_s >= 0.0 { now + Span::from_secs_f64(left_s) } else { now - Span::from_secs_f64(-left_s) };
        Some(Deadline { at, tolerance: Span::from_secs_f64(spec.tolerance_s()) })
    }

    /// When a live job will be done, by the last forecast.
    pub(super) fn forecast(&self, job: &Job) -> Option<Forecast> {
        let end = self.forecasts.forecaster.ends_in_s(job.record.id, self.now())?;
        Some(forecast_at(unix_s(), end))
    }

    pub(super) fn deadline_info(&self, job: &Job) -> Option<DeadlineInfo> {
        let r = &job.record;
        let at_s = r.spec.deadline_s()?;
        let tolerance_s = r.spec.tolerance_s();
        let latest_s = at_s + tolerance_s;
        let standing = match (r.state, r.ended) {
            (JobState::Done, Some(ended)) if ended.unix_s <= latest_s => DeadlineState::Met,
            (state, _) if state.is_final() => DeadlineState::Missed,
            _ if unix_s() > latest_s => DeadlineState::Missed,
            _ => self.predicted_standing(job, latest_s),
        };
        Some(DeadlineInfo { at: rfc3339(at_s), at_s, tolerance_s, standing })
    }

    fn predicted_standing(&self, job: &Job, latest_s: f64) -> DeadlineState {
        match job.verdict.as_ref().map(|v| v.reason) {
            Some(Reason::CannotMeet { .. }) => DeadlineState::Late,
            Some(Reason::MeetsDeadline { .. } | Reason::Early { .. }) => DeadlineState::OnTime,
            _ => match self.forecast(job) {
                // Late only if even the lucky end of the interval is: a warning should not come and go.
                Some(done) if done.earliest_s > latest_s => DeadlineState::Late,
                Some(_) => DeadlineState::OnTime,
                None => DeadlineState::Unknown,
            },
        }
    }

    /// Notes each predicted miss once.
    pub(super) fn warn_of_misses(&mut self) {
        let is_new = |j: &Job| {
            j.record.is_live()
                && j.record.spec.deadline.is_some()
                && !j.record.notes.iter().any(|n| n.starts_with(WARNING))
        };
        for id in self.jobs.ids(is_new) {
            let Some(job) = self.jobs.get(&id) else { continue };
            let Some(info) = self.deadline_info(job) else { continue };
            let why = match (info.standing, job.verdict.as_ref().map(|v| v.reason)) {
                (DeadlineState::Late, Some(Reason::CannotMeet { earliest_s: Some(earliest_s) })) => {
                    let late_s = unix_s() + earliest_s - info.at_s;
                    format!("the earliest end is {:.0} s after it", late_s.max(0.0))
                }
                (DeadlineState::Late, _) => match self.forecast(job) {
                    Some(done) => format!("the job will be {:.0} s late", (done.at_s - info.at_s).max(0.0)),
                    None => "there is not enough time left".to_owned(),
                },
                (DeadlineState::Missed, _) => "it has passed".to_owned(),
                _ => continue,
            };
            let name = job.record.name.clone();
            let note = format!("{WARNING}: {why}; the job goes on as best effort");
            tracing::warn!(job = %id, name, "{note}");
            self.metrics.misses_predicted.inc();
            self.fact(Some(id), Change::Noted { note });
            self.job_changed(id);
        }
    }

    /// Counts and notes whether a job that just ended met its deadline.
    pub(super) fn conclude_deadline(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (Some(info), Some(ended)) = (self.deadline_info(job), job.record.ended) else { return };
        let early_s = info.at_s - ended.unix_s;
        let note = if info.standing == DeadlineState::Met {
            self.metrics.deadlines_met.inc();
            if early_s >= 0.0 {
                format!("it met its deadline, {early_s:.0} s early")
            } else {
                format!("it met its deadline within the tolerance, {:.0} s late", -early_s)
            }
        } else {
            self.metrics.deadlines_missed.inc();
            if early_s < 0.0 {
                format!("it missed its deadline by {:.0} s", -early_s)
            } else {
                format!("it missed its deadline: it ended as {}", job.record.state.name())
            }
        };
        self.fact(Some(id), Change::Noted { note });
    }

    /// What would become of `request` if it were submitted now. Nothing is changed.
    pub(crate) fn plan_ahead(&mut self, request: PlanRequest) -> Result<Vec<PlanAnswer>, Refusal> {
        let mut specs = spec::prepare(request.jobs)?;
        if specs.is_empty() {
            return Err(Refusal::new(ErrorCode::BadRequest, "no job to plan: send at least one"));
        }
        let here = crate::deadline::now();
        specs.iter_mut().try_for_each(|spec| spec.resolve(&here))?;
        self.view();
        let view = self.forecast_view();
        // Everything is decided on copies: once as it is, once with the new jobs running.
        let before = decide_copy(&self.control, view.clone(), self.now());
        let mut with = view.clone();
        let next = self.jobs.keys().last().map_or(1, |id| id.0 + 1);
        let past = self.past_runs();
        let likes: Vec<Option<(String, Signal)>> = specs.iter().map(|s| past.get(&s.command).cloned()).collect();
        for (i, (spec, like)) in specs.iter().zip(&likes).enumerate() {
            let mut job = JobView {
                id: JobId(next + i as u64),
                owner: self.jobs.owner(spec.owner.as_deref().unwrap_or_default()),
                arrived: with.now,
                phase: Phase::Running { node: HERE, since: with.now, attempt: 1 },
                floor: Share::clamped(spec.floor),
                max: Share::clamped(spec.max),
                priority: spec.priority,
                deadline: self.deadline(spec),
                ..JobView::default()
            };
            if spec.owner.is_none() {
                job.owner = with.jobs.first().map_or(job.owner, |j| j.owner);
            }
            job.signal = like.as_ref().map_or(Signal::default(), |(_, signal)| *signal);
            with.jobs.push(job);
        }
        let after = decide_copy(&self.control, with.clone(), self.now());
        let arrivals = self.forecasts.forecaster.arrivals();
        let ends_before = forecast(&self.control, &view, arrivals);
        let ends = forecast(&self.control, &with, arrivals);
        let delays = self.delays(&with, (before.as_ref(), &ends_before), (after.as_ref(), &ends));
        let answers = specs.iter().zip(likes).enumerate().map(|(i, (spec, like))| {
            let id = JobId(next + i as u64);
            let verdict = after.as_ref().and_then(|plan| plan.verdicts.get(&id));
            let share = verdict.and_then(|v| v.target).map(|t| t.share.cpu.get());
            let done = ends.get(&id).map(|end| forecast_at(unix_s(), *end));
            let deadline = spec.deadline_s().map(|at_s| {
                let tolerance_s = spec.tolerance_s();
                let standing = match (verdict.map(|v| v.reason), &done) {
                    (Some(Reason::CannotMeet { .. }), _) => DeadlineState::Late,
                    (Some(Reason::MeetsDeadline { .. } | Reason::Early { .. }), _) => DeadlineState::OnTime,
                    (_, Some(done)) if done.at_s > at_s + tolerance_s => DeadlineState::Late,
                    (_, Some(_)) => DeadlineState::OnTime,
                    (_, None) => DeadlineState::Unknown,
                };
                DeadlineInfo { at: rfc3339(at_s), at_s, tolerance_s, standing }
            });
            let like = like.map(|(name, _)| name);
            let text = answer_text(&like, &done, &deadline, &delays, verdict.map(|v| v.reason));
            PlanAnswer { name: spec.label(), like, share, done, deadline, delays: delays.clone(), text }
        });
        Ok(answers.collect())
    }

    /// Of each command the newest run that ended well and was measured, by name and as a job that has not begun.
    fn past_runs(&self) -> BTreeMap<&Vec<String>, (String, Signal)> {
        let mut runs = BTreeMap::new();
        // Jobs are sorted by number, so a newer run replaces an older one.
        for job in self.jobs.values().filter(|j| j.record.state == JobState::Done) {
            let Some(pace) = job.progress.pace.pace() else { continue };
            let total = Some(job.progress.tracker.signal().position().max(1.0) as u64);
            let pace = Some(pace.with_available(self.forecasts.forecaster.available()));
            let signal = Signal { total, pace, ..Signal::default() };
            runs.insert(&job.record.spec.command, (job.record.name.clone(), signal));
        }
        runs
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

/// The CPU time of this thread. On a busy machine a thread takes longer than it works.
fn cpu_time() -> Span {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from);
    Span::from_secs_f64(time.as_secs_f64())
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

fn forecast_at(now_s: f64, end: Interval) -> Forecast {
    let at_s = now_s + end.mid;
    Forecast { at: rfc3339(at_s), at_s, earliest_s: now_s + end.low, latest_s: now_s + end.high }
}

fn answer_text(
    like: &Option<String>,
    done: &Option<Forecast>,
    deadline: &Option<DeadlineInfo>,
    delays: &[String],
    reason: Option<Reason>,
) -> String {
    let Some(like) = like else {
        return "not known: no run of this command has ended well here yet; submit it, and its end is predicted within \
                its first steps"
            .to_owned();
    };
    let when = done.as_ref().map_or_else(
        || "at a time that cannot be predicted".to_owned(),
        |d| {
            let minutes = 0.5 * (d.latest_s - d.earliest_s) / 60.0;
            format!("at {} ± {minutes:.0} min", crate::deadline::local(d.at_s))
        },
    );
    let verdict = match (deadline.as_ref().map(|d| d.standing), reason) {
        (Some(DeadlineState::OnTime), _) => format!("would make its deadline, done {when}"),
        (Some(DeadlineState::Late), Some(Reason::CannotMeet { earliest_s: Some(s) })) => {
            format!("would miss its deadline: done at {} at the earliest", crate::deadline::local(unix_s() + s))
        }
        (Some(DeadlineState::Late), _) => format!("would miss its deadline: done {when}"),
        _ => format!("would be done {when}"),
    };
    let delays = if delays.is_empty() {
        "would delay no other job".to_owned()
    } else {
        format!("would delay {}", delays.join(", "))
    };
    format!("{verdict} (as {like} ran); {delays}")
}

/// A job whose value is no longer a number makes steps all the same: its position is then that of the output.
fn advance(signal: Signal, course: Option<Progress>, now: Time) -> Signal {
    let (Some(course), Some(last), Some(step)) = (course, signal.last, signal.step) else { return signal };
    let is_silent = now.since(last.at).as_secs_f64() > 1.0 + 2.0 * signal.longest_gap.as_secs_f64();
    let is_same_count = course.unit == Unit::Step && course.total == signal.total;
    if is_silent && is_same_count && course.step > step { Signal { step: Some(course.step), ..signal } } else { signal }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_core::signal::TimedValue;

    #[test]
    fn steps_count_on_when_the_value_is_no_longer_a_number() {
        let at = Time::from_secs_f64;
        let signal = Signal {
            reports: 2,
            last: Some(TimedValue { value: 2.3, at: at(10.0) }),
            longest_gap: Span::from_millis(100),
            step: Some(20),
            total: Some(100),
            ..Signal::default()
        };
        let course = |step, total| Some(Progress { step, total: Some(total), unit: Unit::Step });
        let step = |course, now| advance(signal, course, at(now)).step;
        assert_eq!(step(course(60, 100), 13.0), Some(60));
        assert_eq!(step(course(60, 100), 11.0), Some(20), "the next value may be on its way");
        assert_eq!(step(course(60, 70), 13.0), Some(20), "another count");
        assert_eq!(step(course(10, 100), 13.0), Some(20), "never back");
        assert_eq!(step(None, 13.0), Some(20));
    }
}
