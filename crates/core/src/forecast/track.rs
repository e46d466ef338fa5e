//! One job of a projection: how fast it is, how far it is, and what its driver would know of it.
//!
//! **How.** The projection plays a law and a length of the job. Decisions see its signal: whole reports, at the time at
//! which each is made, and a [`Belief`] about the law, which is measured in the projection.
//! A job that has not reported yet is believed to be as long as others, and to report as often.
//!
//! **Terms and units.** Seconds (`_s`), node-seconds (`_node_s`), shares of the node.

use super::belief::Belief;
use super::scenario::Scenario;
use crate::model::{JobId, Span, Time};
use crate::signal::length;
use crate::signal::speed::{Interval, LEAST_SHARE, Pace, Z80};
use crate::signal::{Signal, TimedValue};
use crate::view::{JobView, Phase};

/// A share is surely usable up to one core, and up to this many times the mean share that the job has used.
const SURELY_USABLE: f64 = 1.25;

/// The part by which the time at larger shares may be longer, for a job that was never seen short of its share: it may
/// be unable to use them.
const UNSURE: f64 = 0.3;

/// A step of the fastest scenario takes no less than this part of what is expected.
const LEAST_STEP: f64 = 0.3;

/// Standard deviations of the logarithm of the time that a step takes, beside what the law's own error explains: of all
/// jobs together, because other programs take more or less than they did, and of each job, because evaluations and
/// checkpoints come that it has not shown yet. Chosen by hand, after runs of seeds 0 to 19 of the model in `tests/play`
/// with numbers near these.
const COMMON: f64 = 0.07;
const OWN: f64 = 0.05;

/// The same of the length of a job that has not shown its speed, beside that of the jobs like it.
const UNKNOWN_SPREAD: f64 = 0.6;

/// Steps of a job that has not reported. It is as long as others; how many steps that makes is of no interest.
const UNKNOWN_STEPS: f64 = 1000.0;

/// The law of a job that has not reported is known this roughly after its first reports, as a part of each step.
const FIRST_ERROR: f64 = 0.2;

/// A job has shown its own speed after this many reports.
const SHOWN: f64 = 2.0;

/// How one job ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ProjectedEnd {
    pub(super) ends_s: f64,
    /// How much sooner and later, as parts of the time, the job's own steps and pace allow.
    pub(super) early: f64,
    pub(super) late: f64,
    /// How much later, because the job was never seen with shares as large as it will have.
    pub(super) unsure: f64,
}

/// What is expected of a job that has not reported.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Typical {
    /// All its work, and the work between two reports, in what is granted.
    pub(super) work_node_s: Option<f64>,
    pub(super) report_node_s: Option<f64>,
    /// The part of what jobs are granted that they get.
    pub(super) available: f64,
    /// Core-seconds of a node-second, and the part of the node that is one core.
    pub(super) core_s: f64,
    pub(super) one_core: f64,
}

/// What is projected of one job; in the order of the view's jobs.
#[derive(Debug, Clone)]
pub(super) struct Track {
    /// Steps left.
    pub(super) left: f64,
    /// The law, and by how many standard deviations the job is slower.
    pub(super) pace: Pace,
    deviation: f64,
    /// How many times as long everything takes.
    slower: f64,
    /// The law, as decisions know it; nothing before the first reports.
    belief: Option<Belief>,
    /// The job has not shown its speed at the present.
    is_silent: bool,
    /// Steps made since the present.
    made: f64,
    /// Steps between two reports.
    report_every: f64,
    /// The signal at the present.
    signal: Signal,
    /// The steps left at the present with their interval, for a job whose end can be predicted.
    pub(super) steps: Option<Interval>,
    /// Steps made since its last report when the projection began.
    unreported: f64,
    /// Seconds since its last report, until they were taken into account.
    since_report_s: f64,
    pub(super) weight: f64,
    /// The job's mean share until now.
    mean_share_used: f64,
    pub(super) used: f64,
    pub(super) rate: f64,
    /// The integral of its share, and the time it ran.
    share_s: f64,
    ran_s: f64,
    /// The share that it can surely use, and the time it ran with more.
    sure: f64,
    unsure_s: f64,
}

/// Whether the steps left that a job announces are what it will probably make.
fn is_believed(job: &JobView) -> bool {
    job.signal.total.is_none() || length::trust(&job.signal, &job.history, job.claims) >= 0.5
}

/// The mean part of its node that a job has used since it started.
fn mean_share_used(job: &JobView, now: Time) -> f64 {
    match job.phase {
        Phase::Running { since, .. } => job.consumed_node_s.cpu / now.since(since).as_secs_f64().max(1e-3),
        Phase::Waiting => 0.0,
    }
}

/// How many times as long everything takes for this job.
fn slower(job: JobId, scenario: Scenario) -> f64 {
    (COMMON * scenario.common() + OWN * scenario.deviation(job)).exp()
}

/// The middle of an interval, moved by this many standard deviations.
fn deviating(of: Interval, deviation: f64) -> f64 {
    let side = if deviation > 0.0 { of.high - of.mid } else { of.mid - of.low };
    (of.mid + deviation / Z80 * side).max(0.0)
}

impl Track {
    pub(super) fn new(job: &JobView, now: Time, typical: &Typical, scenario: Scenario) -> Track {
        let deviation = scenario.deviation(job.id);
        let slower = slower(job.id, scenario);
        let signal = job.signal;
        let position = signal.position();
        let reports = signal.reports.max(1) as f64;
        let (left, pace, steps) = match (signal.pace, job.steps_left()) {
            (Some(pace), Some(steps)) if is_believed(job) => (deviating(steps, deviation), pace, Some(steps)),
            (Some(pace), _) => {
                let residual = length::residual(&signal, &job.history, job.claims, position);
                // Where nothing says how long a job is, it lasts as long again as it has lasted.
                (residual.map_or(position.max(1.0), |r| r.quantile(scenario.quantile(job.id))), pace, None)
            }
            (None, _) => return Track::silent(job, now, typical, scenario),
        };
        let mean_share_used = mean_share_used(job, now);
        Track {
            left,
            pace,
            deviation,
            slower,
            belief: Some(Belief::new(pace)),
            is_silent: false,
            made: 0.0,
            report_every: if position > 0.0 { position / reports } else { 1.0 },
            signal,
            steps,
            unreported: 0.0,
            since_report_s: signal.last.map_or(0.0, |l| now.since(l.at).as_secs_f64()),
            weight: 0.0,
            mean_share_used,
            used: 0.0,
            rate: 0.0,
            share_s: 0.0,
            ran_s: 0.0,
            sure: if pace.usable < 1.0 { 1.0 } else { typical.one_core.max(SURELY_USABLE * mean_share_used) },
            unsure_s: 0.0,
        }
    }

    /// A job that has not shown its speed.
    fn silent(job: &JobView, now: Time, typical: &Typical, scenario: Scenario) -> Track {
        let consumed = job.consumed_node_s.cpu;
        let by_history = length::residual_work(&job.history, typical.core_s, consumed);
        let by_history = by_history.map(|r| r.quantile(scenario.quantile(job.id)) / typical.available);
        let consumed = consumed / typical.available;
        let longer = (UNKNOWN_SPREAD * scenario.deviation(job.id)).exp();
        let of_typical = typical.work_node_s.map(|work| longer * (work - consumed).max(0.25 * work));
        let left_node_s = by_history.or(of_typical).unwrap_or(consumed.max(1.0));
        let position = job.signal.position();
        let total = job.signal.total.map(|total| total as f64).filter(|total| *total > position);
        let steps = total.unwrap_or(UNKNOWN_STEPS.max(2.0 * position));
        let step_node_s = (consumed + left_node_s) / steps;
        let pace = Pace::from_law(0.0, step_node_s, job.usable.unwrap_or(1.0));
        let report_every = match typical.report_node_s {
            _ if position > 0.0 => position / job.signal.reports.max(1) as f64,
            Some(every) => every / step_node_s,
            None => f64::INFINITY,
        };
        let signal = Signal { pace: Some(pace), ..job.signal };
        let track = Track::new(&JobView { signal, ..job.clone() }, now, typical, Scenario::EXPECTED);
        let slower = slower(job.id, scenario);
        let left = if position > 0.0 { steps - position } else { left_node_s / step_node_s };
        Track { left, slower, belief: None, report_every, steps: None, is_silent: true, ..track }
    }

    /// A job that is expected to come.
    pub(super) fn later(job: &JobView, steps: f64, typical: &Typical) -> Track {
        Track {
            steps: None,
            left: steps,
            report_every: 1.0,
            ..Track::new(job, job.arrived, typical, Scenario::EXPECTED)
        }
    }

    pub(super) fn cap(&self, job: &JobView, typical_usable: f64) -> f64 {
        // A job that was never seen short of its grant is believed to be like the others.
        let usable = if self.pace.usable >= 1.0 { typical_usable.max(self.mean_share_used) } else { self.pace.usable };
        usable.min(job.max.get())
    }

    /// Gives the job this part of the node from now on.
    pub(super) fn serve(&mut self, used: f64) {
        self.used = used;
        // No law goes below the least share; there, half the share makes half the steps.
        let step_s = self.pace.step_s(used);
        let step_s = (step_s + self.deviation * self.pace.deviation_s(used)).max(LEAST_STEP * step_s);
        self.rate = (used / LEAST_SHARE).min(1.0) / (self.slower * step_s);
    }

    /// The steps that were made since the last report are known only by their time.
    pub(super) fn count_unreported(&mut self) {
        let made = (self.since_report_s * self.rate).min(self.report_every.max(1.0)).min(0.99 * self.left);
        if self.steps.is_some() && made > 0.0 {
            self.left -= made;
            self.unreported = made;
        }
        self.since_report_s = 0.0;
    }

    /// Works from `from_s` to `to_s`.
    pub(super) fn advance(&mut self, from_s: f64, to_s: f64) {
        let seconds = to_s - from_s;
        let made = (self.rate * seconds).min(self.left);
        // After ages a moment is rounded to whole seconds. A job that was to end at it has ended, whatever the rounded
        // difference left of it: otherwise its end would come again and again.
        self.left = if self.ends_s(from_s) <= to_s { 0.0 } else { self.left - made };
        self.made += made;
        self.share_s += self.used * seconds;
        self.ran_s += if self.rate > 0.0 { seconds } else { 0.0 };
        self.unsure_s += if self.used > self.sure + 1e-9 { seconds } else { 0.0 };
        let has_shown = self.made >= SHOWN * self.report_every;
        if self.belief.is_none() && has_shown {
            self.belief = Some(Belief::new(first_pace(self.pace, self.used)));
        }
        if let (Some(belief), true) = (&mut self.belief, self.rate > 0.0) {
            belief.observe(self.used, 1.0 / self.rate, seconds, made / self.report_every);
            if has_shown {
                belief.confirm();
            }
        }
    }

    /// Whether all its steps are made.
    pub(super) fn is_over(&self) -> bool {
        self.rate > 0.0 && self.left <= self.rate * 1e-6
    }

    /// The signal after the steps made in the projection. The value follows the fitted curve.
    pub(super) fn signal(&self, now: Time) -> Signal {
        let mut signal = self.signal;
        signal.pace = self.belief.map(|belief| belief.pace());
        if self.made <= 0.0 || !self.report_every.is_finite() {
            return signal;
        }
        // Only whole reports are seen, at the time at which each was made.
        let reports = ((self.made + self.unreported) / self.report_every).floor();
        if reports < 1.0 {
            return signal;
        }
        let since = (self.made + self.unreported) - reports * self.report_every;
        let since_s = if self.rate > 0.0 { since / self.rate } else { 0.0 };
        let at = Time(now.0.saturating_sub(Span::from_secs_f64(since_s).0));
        let position = (reports * self.report_every).round() as u64;
        if self.is_silent {
            let before = self.signal.position();
            signal.step = Some((before as u64).saturating_add(position));
            signal.total = Some((before + self.made + self.left).ceil() as u64);
            signal.reports = signal.reports.saturating_add(reports as u64);
            signal.last = Some(TimedValue { value: signal.last.map_or(0.0, |last| last.value), at });
            signal.first = signal.first.or(signal.last);
            return signal;
        }
        signal.reports = signal.reports.saturating_add(reports as u64);
        signal.step = signal.step.map(|step| step.saturating_add(position));
        let Some(last) = signal.last else { return signal };
        let mut value = last.value;
        if let (Some(outlook), Some(first)) = (&mut signal.outlook, signal.first) {
            let whole = (self.made + self.left).max(1e-9);
            let part = if outlook.scale > 0.0 {
                (-self.made / outlook.scale).exp_m1() / (-whole / outlook.scale).exp_m1()
            } else {
                self.made / whole
            };
            let (part, gain) = (part.clamp(0.0, 1.0), outlook.gain_left);
            value += (last.value - first.value) * gain * part;
            outlook.at += self.made;
            outlook.gain_left = gain * (1.0 - part) / (1.0 + gain * part);
        }
        if value.is_finite() {
            signal.last = Some(TimedValue { value, at: at.max(last.at) });
        }
        signal
    }

    /// When its steps are made at the present rate.
    pub(super) fn ends_s(&self, now_s: f64) -> f64 {
        if self.rate > 0.0 { now_s + self.left / self.rate } else { f64::INFINITY }
    }

    pub(super) fn ending(&self, ends_s: f64) -> Option<ProjectedEnd> {
        let steps = self.steps?;
        let share = if self.ran_s > 0.0 { self.share_s / self.ran_s } else { 1.0 };
        let own = self.pace.time_s(steps, share);
        let mid = own.mid.max(1e-9);
        let part = |x: f64| if x.is_finite() { x.clamp(0.0, 10.0) } else { 10.0 };
        let unsure = UNSURE * self.unsure_s / self.ran_s.max(1e-9);
        let (early, late) = (part((mid - own.low) / mid), part((own.high - mid) / mid));
        Some(ProjectedEnd { ends_s, early, late, unsure })
    }
}

/// The law that the first reports of a job show, at the share that it had.
fn first_pace(pace: Pace, share: f64) -> Pace {
    let step_s = FIRST_ERROR * pace.step_s(1.0);
    Pace { variance: [step_s * step_s, 0.0, 0.0], seen: share, windows: 1, ..pace }
}
