//! Predicted ends, deadlines and warnings.
//!
//! **Problem.** A user who gave a deadline wants to know when the job will be done, and wants to be
//! warned as soon as the deadline will be missed, whatever the policy.
//!
//! **How.** Once a second, and before every decision, each running job's counters feed its
//! [`gainshare_core::signal::speed::PaceTracker`]. Then the policy is played forward until every job
//! has ended ([`gainshare_core::forecast`]); in between, the last result stands. A job that has not
//! reported yet is expected to go as earlier runs of its program went ([`super::program`]); a job with a deadline is
//! predicted so when it is submitted, and the answer to its owner contains the result. What the policy will decide
//! about it is found when it starts. A predicted miss is noted once, and once more if the job was in time meanwhile: in
//! the journal, the log and the event stream; a metric counts the jobs. A job that ends is judged: an end with
//! exit code 0 by the deadline, its tolerance included, has met it.
//!
//! **Terms.** Deadlines are moments of the wall clock. A view has them on the decisions' clock, shifted
//! by the present difference between the two, so that setting the wall clock moves them along.

use super::Driver;
use super::jobs::{Job, JobTable};
use super::program::PastRuns;
use super::runtimes::first_cpus;
use crate::clock::{rfc3339, unix_s};
use crate::config::DaemonConfig;
use crate::error::Refusal;
use crate::record::Change;
use crate::spec::{self, JobSpec};
use crate::types::{
    DeadlineInfo, DeadlineOutcome, DeadlineState, ErrorCode, Forecast, JobState, MissCause, PlanAnswer, PlanRequest,
    PredictedMiss,
};
use gainshare_core::decider::Decider;
use gainshare_core::forecast::Forecaster;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::plan::Reason;
use gainshare_core::signal::Signal;
use gainshare_core::signal::speed::{Interval, PaceReading};
use gainshare_core::view::{Deadline, View};
use gainshare_limits::{LimitMode, machine};
use gainshare_progress::{Progress, Unit};
use nix::time::{ClockId, clock_gettime};
use std::path::Path;
use std::time::Duration;

/// Predicted ends of jobs, and what they are predicted from.
#[derive(Default)]
pub(super) struct Forecasts {
    pub(super) forecaster: Forecaster,
    /// When the last forecasts were made, and how much CPU time that took.
    made_at: Time,
    took: Span,
    /// The jobs that they were made for.
    made_for: JobCount,
    /// When the idle time of the jobs' processors was last read, and what it was in node-seconds.
    idle_seen: Option<(Time, f64)>,
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

impl JobCount {
    fn of(jobs: &JobTable) -> JobCount {
        let live = || jobs.values().filter(|j| j.record.is_live());
        JobCount {
            live: live().count(),
            measured: live().filter(|j| j.progress.pace.is_measured()).count(),
            newest: live().map(|j| j.record.id).max(),
        }
    }
}

/// With less than this part of the machine idle, a job that used little may have wanted more.
const SPARE: f64 = 0.1;

/// Counters younger than this are good enough for predictions. A little less than the time between two beats.
const USAGE_AGE: Span = Span::from_millis(900);

/// Idle time this old is that of the present moment: the kernel counts it in hundredths of a second.
const FRESH_IDLE: Span = Span::from_millis(10);

/// After a forecast the daemon waits for this many times the CPU time that it took: with many jobs forecasts are made
/// less often than once a second.
const FORECAST_LOAD: u64 = 1000;

/// The same while the last forecasts are soon wrong: after a job came, went or was measured for the first time, and
/// while some job is [`YOUNG`].
const CHANGED_LOAD: u64 = 400;

/// Of a job that has run for less than this, more is known every second.
const YOUNG: Span = Span::from_secs(30);

/// How long the start of a job disturbs the others: its program is loaded.
const STARTING: Span = Span::from_secs(2);

impl Forecasts {
    /// A job's signal with its pace on a machine as busy as this one is now; the pace of a job that has shown none is
    /// that of earlier runs of its program.
    pub(super) fn signal(&self, job: &Job, now: Time) -> Signal {
        let pace = job.progress.pace.pace().map(|pace| pace.with_available(self.forecaster.available()));
        let signal = Signal { pace, ..job.progress.tracker.signal() };
        advance(signal, job.progress.course, now)
    }

    /// Feeds the counters that were read last to the jobs' pace trackers.
    pub(super) fn measure_paces(&mut self, jobs: &mut JobTable, config: &DaemonConfig, mode: LimitMode, now: Time) {
        let idle = read_idle_s(config);
        let scarce = match (self.idle_seen, idle) {
            (Some((at, before)), Some(idle)) if now > at => idle - before < SPARE * now.since(at).as_secs_f64(),
            _ => true,
        };
        self.idle_seen = idle.map(|idle| (now, idle));
        self.scarce = scarce;
        // With weights a job may use all that is idle; with quotas it may not.
        let is_free = mode == LimitMode::Weight;
        let running = |j: &&Job| j.record.state == JobState::Running;
        let is_starting = |j: &&Job| j.record.started.is_some_and(|started| now.since(started.time) < STARTING);
        let starting: Vec<JobId> = jobs.values().filter(running).filter(is_starting).map(|j| j.record.id).collect();
        for job in jobs.values_mut().filter(|j| j.record.state == JobState::Running) {
            // Nothing shows that a job without a grant left some of it.
            let granted = job.verdict.as_ref().and_then(|v| v.target).map_or(0.0, |t| t.share.cpu.get());
            let consumed_node_s = job.progress.meter.consumed().cpu;
            // Counters that were read before count for the time at which they were read.
            let Some(now) = job.progress.meter.read_at() else { continue };
            let is_disturbed = starting.iter().any(|id| *id != job.record.id);
            let reading =
                PaceReading { now, consumed_node_s, granted, scarce, has_idle: !scarce && is_free, is_disturbed };
            let signal = job.progress.tracker.signal();
            job.progress.pace.observe(reading, &signal);
        }
    }

    /// The idle time of the jobs' processors in node-seconds: as it was read for the paces, if that was a moment ago.
    pub(super) fn idle_s(&self, config: &DaemonConfig, now: Time) -> Option<f64> {
        let fresh = self.idle_seen.filter(|(at, _)| now.since(*at) < FRESH_IDLE).map(|(_, idle)| idle);
        fresh.or_else(|| read_idle_s(config))
    }

    /// Measures what other programs of the machine leave to the jobs.
    fn measure_available(&mut self, jobs: &JobTable) {
        let running = |j: &&Job| j.record.state == JobState::Running;
        let meters = || jobs.values().filter(running).map(|j| (j.record.id, &j.progress.meter));
        // The counters of all jobs are read together, at a decision or at a beat.
        let read_at = meters().filter_map(|(_, meter)| meter.read_at()).max();
        let Some(read_at) = read_at else { return };
        let consumed = meters().map(|(id, meter)| (id, meter.consumed().cpu));
        self.forecaster.measure(read_at, consumed, self.scarce);
    }

    /// The jobs for which new forecasts are to be made; `None` while the last ones stand. Forecasts that took long
    /// stand for a while.
    fn due_for(&self, jobs: &JobTable, now: Time) -> Option<JobCount> {
        let made_for = JobCount::of(jobs);
        let is_young = |j: &Job| j.record.started.is_some_and(|started| now.since(started.time) < YOUNG);
        let is_changing = made_for != self.made_for || jobs.values().any(|j| j.record.is_live() && is_young(j));
        let load = if is_changing { CHANGED_LOAD } else { FORECAST_LOAD };
        let next = self.made_at + Span(self.took.0.saturating_mul(load));
        (now >= next && made_for.live > 0).then_some(made_for)
    }

    /// Makes new forecasts. `begun` is the CPU time of the thread when the work for them began.
    fn update(&mut self, control: &Decider, view: &View, now: Time, made_for: JobCount, begun: Span) {
        self.forecaster.update(control, view);
        self.took = Span(cpu_time().0.saturating_sub(begun.0));
        (self.made_at, self.made_for) = (now, made_for);
    }

    /// When a live job will be done, by the last forecast.
    pub(super) fn forecast(&self, job: &Job, now: Time) -> Option<Forecast> {
        let end = self.forecaster.ends_in_s(job.record.id, now)?;
        Some(forecast_at(unix_s(), end, job.past_guess().map(PastRuns::basis)))
    }

    pub(super) fn deadline_info(&self, job: &Job, now: Time) -> Option<DeadlineInfo> {
        let r = &job.record;
        let at_s = r.spec.deadline_s()?;
        let tolerance_s = r.spec.tolerance_s();
        let latest_s = at_s + tolerance_s;
        let state = match (r.state, r.ended) {
            (JobState::Done, Some(ended)) if ended.unix_s <= latest_s => DeadlineState::Met,
            (state, _) if state.is_final() => DeadlineState::Missed,
            _ if unix_s() > latest_s => DeadlineState::Missed,
            _ => self.predicted_state(job, latest_s, now),
        };
        let outcome = r.ended.filter(|_| r.state.is_final()).map(|ended| DeadlineOutcome {
            is_met: state == DeadlineState::Met,
            early_s: at_s - ended.unix_s,
            state: r.state,
        });
        let is_late = matches!(state, DeadlineState::AtRisk | DeadlineState::Missed);
        let miss = r.miss.clone().filter(|_| is_late);
        Some(DeadlineInfo { at: rfc3339(at_s), at_s, tolerance_s, state, miss, outcome })
    }

    fn predicted_state(&self, job: &Job, latest_s: f64, now: Time) -> DeadlineState {
        match deadline_reason(job) {
            Some(Reason::CannotMeet { .. }) => DeadlineState::AtRisk,
            Some(Reason::MeetsDeadline { .. } | Reason::Early { .. }) => DeadlineState::OnTime,
            _ => match self.forecast(job, now) {
                // At risk only if even the lucky end of the interval is late: a warning should not come and go.
                Some(done) if done.earliest_s > latest_s => DeadlineState::AtRisk,
                Some(_) => DeadlineState::OnTime,
                None => DeadlineState::Unknown,
            },
        }
    }

    /// The misses that are predicted for the first time, or after the job was in time again.
    fn new_misses(&self, jobs: &mut JobTable, now: Time) -> Vec<(JobId, PredictedMiss)> {
        let has_deadline = |j: &&mut Job| j.record.is_live() && j.record.spec.deadline.is_some();
        for job in jobs.values_mut().filter(has_deadline) {
            let state = self.deadline_info(job, now).map(|info| info.state);
            job.was_in_time |= state == Some(DeadlineState::OnTime);
        }
        let is_new = |j: &&Job| {
            let is_open = j.record.miss.is_none() || j.was_in_time;
            is_open && j.record.is_live() && j.record.spec.deadline.is_some()
        };
        let miss = |job: &Job| {
            let info = self.deadline_info(job, now)?;
            let basis = || job.past_guess().map(PastRuns::basis);
            let cause = match (info.state, deadline_reason(job)) {
                (DeadlineState::AtRisk, Some(Reason::CannotMeet { earliest_s: Some(earliest_s) })) => {
                    MissCause::EarliestEnd { earliest_s: unix_s() + earliest_s, basis: basis() }
                }
                (DeadlineState::AtRisk, _) => match self.forecast(job, now) {
                    Some(done) => MissCause::PredictedEnd { done },
                    None => MissCause::NoTimeLeft,
                },
                (DeadlineState::Missed, _) => MissCause::Passed,
                _ => return None,
            };
            Some((job.record.id, PredictedMiss { deadline_s: info.at_s, cause }))
        };
        jobs.values().filter(is_new).filter_map(miss).collect()
    }

    /// How the deadline of a job that just ended turned out.
    pub(super) fn outcome(&self, job: &Job, now: Time) -> Option<DeadlineOutcome> {
        self.deadline_info(job, now)?.outcome
    }
}

/// The idle time of the processors that jobs may use, in node-seconds. Jobs may be confined to some of the processors:
/// what the others leave idle, no job can use.
fn read_idle_s(config: &DaemonConfig) -> Option<f64> {
    let root = Path::new(machine::ROOT);
    match config.cores.and_then(first_cpus) {
        Some(cpus) => machine::idle_s_of_cpus(root, &cpus),
        None => machine::idle_s(root),
    }
}

/// What the policy decided about a job's deadline; before the job is measured, what it would decide if the job goes as
/// earlier runs of its program went.
fn deadline_reason(job: &Job) -> Option<Reason> {
    let about_deadline =
        |r: &Reason| matches!(r, Reason::CannotMeet { .. } | Reason::MeetsDeadline { .. } | Reason::Early { .. });
    let decided = job.verdict.as_ref().map(|v| v.reason).filter(about_deadline);
    let early = || job.early_reason.filter(|_| job.record.holds_slot() && job.past_guess().is_some());
    decided.or_else(early)
}

/// The deadline of a job on the decisions' clock.
pub(super) fn deadline(spec: &JobSpec, now: Time) -> Option<Deadline> {
    let left_s = spec.deadline_s()? - unix_s();
    let at = if left_s >= 0.0 { now + Span::from_secs_f64(left_s) } else { now - Span::from_secs_f64(-left_s) };
    Some(Deadline { at, tolerance: Span::from_secs_f64(spec.tolerance_s()) })
}

impl Driver {
    /// Once a second. Counters that a decision has read within that second are not read again.
    pub(super) fn check_deadlines(&mut self) {
        let now = self.now();
        for job in self.jobs.values_mut().filter(|j| now.since(j.usage_read) >= USAGE_AGE) {
            self.runtimes.read_cpu(&self.config, job, now);
        }
        let mode = self.runtimes.mode(&self.config);
        self.forecasts.measure_paces(&mut self.jobs, &self.config, mode, now);
        self.forecasts.measure_available(&self.jobs);
        if let Some(made_for) = self.forecasts.due_for(&self.jobs, now) {
            let begun = cpu_time();
            let view = self.picture().view();
            self.forecasts.update(&self.control, &view, now, made_for, begun);
        }
        self.note_misses();
    }

    /// Predicts at once when jobs that were just submitted will be done, if earlier runs say what becomes of the
    /// deadline of one of them.
    pub(super) fn predict_submitted(&mut self, ids: &[JobId]) {
        if !ids.iter().any(|id| self.jobs.get(id).is_some_and(Job::is_foreseen)) {
            return;
        }
        let (now, begun, made_for) = (self.now(), cpu_time(), JobCount::of(&self.jobs));
        let view = self.picture().view();
        self.forecasts.update(&self.control, &view, now, made_for, begun);
        self.note_misses();
    }

    /// Finds what the policy will decide about the deadlines of waiting jobs that are about to start.
    pub(super) fn foresee_starts(&mut self, starting: &[JobId]) {
        let mut reasons = self.picture().reasons_at_start(&self.control, starting);
        for id in starting {
            if let Some(job) = self.jobs.get_mut(id) {
                job.early_reason = reasons.remove(id);
            }
        }
    }

    /// Notes each predicted miss once, and again if the job was in time meanwhile.
    pub(super) fn note_misses(&mut self) {
        for (id, miss) in self.forecasts.new_misses(&mut self.jobs, self.clock.now()) {
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            job.was_in_time = false;
            tracing::warn!(job = %id, name = job.record.name.as_str(), "{miss}");
            if job.record.miss.is_none() {
                self.metrics.misses_predicted.inc();
            }
            self.fact(Some(id), Change::predicted_miss(miss));
            self.job_changed(id);
        }
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
        self.picture().plan_ahead(&self.control, &specs)
    }
}

/// The CPU time of this thread. On a busy machine a thread takes longer than it works.
fn cpu_time() -> Span {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from);
    Span::from_secs_f64(time.as_secs_f64())
}

pub(super) fn forecast_at(now_s: f64, end: Interval, basis: Option<String>) -> Forecast {
    let at_s = now_s + end.mid;
    Forecast { at: rfc3339(at_s), at_s, earliest_s: now_s + end.low, latest_s: now_s + end.high, basis }
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
    fn cores_that_jobs_may_not_use_are_not_idle_for_them() {
        let config = DaemonConfig { cores: Some(1), ..DaemonConfig::default() };
        let of_first = || match first_cpus(1) {
            Some(first) => machine::idle_s_of_cpus(Path::new(machine::ROOT), &first),
            None => machine::idle_s(Path::new(machine::ROOT)),
        };
        let (before, found, after) = (of_first(), Forecasts::default().idle_s(&config, Time::ZERO), of_first());
        assert!(before.is_some() && before <= found && found <= after, "{before:?} {found:?} {after:?}");
    }

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
