//! From a job's reports to what they say about its growth.
//!
//! A [`Tracker`] belongs to the driver: it is fed every report and keeps a few numbers. A
//! [`Signal`] is its snapshot inside a [`crate::view::View`]. Growth itself is measured by the
//! decisions, each over its own interval, from two snapshots.
//!
//! **Terms.** `E(t)` is the value of the job's own evaluation function (loss, accuracy, …) at time
//! `t`; asked for between two reports it is the last one. Progress per second is `P = |E(t_i) −
//! E(t_{i−1})| / (t_i − t_{i−1})`. Growth efficiency for resource `r` is `G_r = P / R_r` with `R_r`
//! the average fraction of the node used over the interval.

pub mod blend;
pub mod curve;
pub mod forms;
mod grid;
pub mod length;
pub mod parameter_server;
pub mod past;
pub mod predict;
pub mod speed;
pub mod value;

use crate::model::{PerResource, Resource, Span, Time};
use curve::Curve;
use serde::{Deserialize, Serialize};
use speed::{Interval, Pace};

/// One report of a job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub value: f64,
    pub step: Option<u64>,
    /// How many steps there will be, if the job says.
    pub total: Option<u64>,
}

/// Where a job stands. FlowCon calls the lists NL, WL and CL; SpeCon the categories PC, WC and CC:
/// they are the same three.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Category {
    /// New or growing.
    #[default]
    Growing,
    /// The job's growth fell below the threshold once.
    Watching,
    /// The job's growth stayed below. Old journals call it `completing`.
    #[serde(alias = "completing")]
    Converged,
}

impl Category {
    pub fn name(self) -> &'static str {
        match self {
            Category::Growing => "growing",
            Category::Watching => "watching",
            Category::Converged => "converged",
        }
    }
}

/// Whether a value is divided by the first one before its changes are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Normalisation {
    /// Relative to the magnitude of the first finite value, so that a loss of 200 and one of 2
    /// weigh alike.
    #[default]
    Relative,
    /// As reported.
    Raw,
}

/// What a job's reports amount to so far.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Signal {
    pub reports: u64,
    /// The first finite value and when it came.
    pub first: Option<TimedValue>,
    /// The last finite value and when it came.
    pub last: Option<TimedValue>,
    /// The longest time between two reports so far: silence is judged against it.
    pub longest_gap: Span,
    pub step: Option<u64>,
    pub total: Option<u64>,
    /// Where the total was read, if the driver knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_by: Option<ClaimSource>,
    /// How many steps make an epoch, if the job says: `[640/60000]` within an epoch.
    #[serde(default)]
    pub epoch_steps: Option<u64>,
    /// Where its curve is going.
    #[serde(default)]
    pub outlook: Option<Outlook>,
    /// Where its curve meets the value at which the job stops, if the owner named one.
    #[serde(default)]
    pub goal: Option<Goal>,
    /// How long its steps take, where the driver measures it; before the first measurement what earlier runs of its
    /// program say.
    #[serde(default)]
    pub pace: Option<Pace>,
}

/// The position at which a job reaches the value that ends it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    /// Steps, or reports of a job that does not count steps.
    pub at: Interval,
    /// How likely the value is reached at all, 0 to 1.
    pub chance: f64,
}

/// What the fitted curve says, as of a recent report. Positions are steps, or reports of a job that
/// does not count steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Outlook {
    /// The position of the newest report.
    pub at: f64,
    /// The position at which the curve will be flat.
    pub flat_at: f64,
    /// The change still to come until the end (the total, or the limit if the job names no total),
    /// in units of the change seen so far.
    pub gain_left: f64,
    /// The time scale on which the curve falls, and the deviation of its logarithm; 0 if not known.
    #[serde(default)]
    pub scale: f64,
    #[serde(default)]
    pub scale_spread: f64,
}

/// Where a job's total number of steps was read. Each source errs in its own way: a bar may count one epoch, a
/// configuration file may be overridden, a job may stop before the end that its command names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClaimSource {
    /// In words that the job printed, such as `Epoch 3/20`.
    Output,
    /// The length of a bar that the job drew.
    Bar,
    /// An option of its command, such as `--epochs 20`.
    Command,
    /// The configuration file that its command names.
    Config,
    /// A file that the job writes.
    File,
    /// What the job pushed.
    Push,
}

impl ClaimSource {
    /// For people, after "the total is from".
    pub fn name(self) -> &'static str {
        match self {
            ClaimSource::Output => "its output",
            ClaimSource::Bar => "a bar",
            ClaimSource::Command => "its command",
            ClaimSource::Config => "its configuration file",
            ClaimSource::File => "a file of the job",
            ClaimSource::Push => "a push",
        }
    }
}

/// How claims fared: runs that ended where they claimed, and runs that ended elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClaimRecord {
    pub kept: u32,
    pub broken: u32,
}

impl ClaimRecord {
    pub fn is_empty(&self) -> bool {
        *self == ClaimRecord::default()
    }

    /// Counts a run that made a claim.
    pub fn add(&mut self, run: &FinishedRun) {
        match run.kept_its_claim() {
            Some(true) => self.kept = self.kept.saturating_add(1),
            Some(false) => self.broken = self.broken.saturating_add(1),
            None => {}
        }
    }
}

/// A claim counts as kept if a run ended within this part of it.
const CLAIM_ERROR: f64 = 0.1;

/// How long an earlier run of a program was.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FinishedRun {
    /// The last step it reported, if it counted steps.
    pub steps: Option<u64>,
    /// The total it named, if it named one: a program that ended elsewhere before is believed less.
    #[serde(default)]
    pub claimed: Option<u64>,
    /// Where that total was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_by: Option<ClaimSource>,
    /// CPU it consumed, in core-seconds of a core of speed 1.
    pub core_s: f64,
}

impl FinishedRun {
    /// Whether it ended where it had claimed; `None` without a claim or steps.
    pub fn kept_its_claim(&self) -> Option<bool> {
        let (steps, claimed) = (self.steps? as f64, self.claimed? as f64);
        Some((steps / claimed - 1.0).abs() <= CLAIM_ERROR)
    }
}

/// A reported value of the metric, and when it was reported.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TimedValue {
    pub value: f64,
    pub at: Time,
}

impl Signal {
    /// By what the changes of this job's value are divided.
    pub fn scale(&self, normalisation: Normalisation) -> f64 {
        match (normalisation, self.first) {
            (Normalisation::Relative, Some(first)) if first.value.abs() > f64::MIN_POSITIVE => first.value.abs(),
            _ => 1.0,
        }
    }
}

/// Takes in reports. Values that are not finite are refused and counted, never used.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Tracker {
    signal: Signal,
    refused: u64,
    #[serde(default)]
    curve: Curve,
    /// How many reports had come when the curve was last fitted.
    #[serde(default)]
    fitted_at: u64,
    /// The value at which the job stops.
    #[serde(default)]
    stops_at: Option<f64>,
}

/// A fit costs microseconds, a flood of reports comes faster: the curve is fitted again when this
/// part of its reports is new.
const NEW_PART: u64 = 16;

impl Tracker {
    /// Feeds one report; `false` if it was refused.
    pub fn push(&mut self, at: Time, sample: Sample) -> bool {
        if !sample.value.is_finite() {
            self.refused += 1;
            return false;
        }
        let s = &mut self.signal;
        // Sources may hand over late what they read early; time within one job never runs
        // backwards.
        let at = s.last.map_or(at, |last| at.max(last.at));
        let report = TimedValue { value: sample.value, at };
        if let Some(last) = s.last {
            s.longest_gap = s.longest_gap.max(at.since(last.at));
        }
        s.first.get_or_insert(report);
        s.last = Some(report);
        s.reports += 1;
        if s.step.is_none() && sample.step.is_some() {
            // Positions counted in reports cannot be compared with steps.
            self.curve = Curve::default();
        }
        s.step = sample.step.or(s.step);
        s.total = sample.total.or(s.total);
        let x = s.step.map_or(s.reports as f64, |step| step as f64);
        self.curve.push(x, sample.value);
        if (s.reports - self.fitted_at) * NEW_PART >= s.reports {
            self.fitted_at = s.reports;
            (s.outlook, s.goal) = outlook(&self.curve, s.total, self.stops_at);
        } else if let Some(outlook) = &mut s.outlook {
            outlook.at = x;
        }
        true
    }

    /// Notes how many steps make an epoch of this job.
    pub fn set_epoch_steps(&mut self, steps: u64) {
        self.signal.epoch_steps = Some(steps).filter(|s| *s > 0);
    }

    /// Notes where the newest total was read.
    pub fn set_claim_source(&mut self, source: Option<ClaimSource>) {
        self.signal.claimed_by = source.filter(|_| self.signal.total.is_some()).or(self.signal.claimed_by);
    }

    /// The job stops when its value reaches `target`.
    pub fn set_target(&mut self, target: Option<f64>) {
        self.stops_at = target.filter(|t| t.is_finite());
    }

    /// The curve seen so far.
    pub fn curve(&self) -> &Curve {
        &self.curve
    }

    pub fn signal(&self) -> Signal {
        self.signal
    }

    pub fn refused(&self) -> u64 {
        self.refused
    }
}

fn outlook(curve: &Curve, total: Option<u64>, target: Option<f64>) -> (Option<Outlook>, Option<Goal>) {
    let end = total.map(|t| t as f64);
    let (Some(fit), Some(at)) = (predict::fit(curve, end), curve.at()) else { return (None, None) };
    let gain_left = fit.gain_left(end.unwrap_or(f64::INFINITY));
    let goal = target.and_then(|target| {
        let reach = fit.reaches(target);
        let at = reach.at?;
        Some(Goal { at: Interval { mid: at.mid, low: at.low, high: at.high }, chance: reach.chance })
    });
    let (scale, scale_spread) = fit.scale();
    (Some(Outlook { at, flat_at: fit.flat_at().mid, gain_left, scale, scale_spread }), goal)
}

/// Use below this fraction of a node is no use: dividing by it would make any progress look
/// infinitely efficient.
const LEAST_USE: f64 = 1e-3;

/// Growth efficiency of each resource over an interval: progress per second over the average use.
/// `None` where the job used (next to) nothing of the resource, so that it has no claim to it.
pub fn growth_efficiency(
    progress_per_second: f64,
    consumed: PerResource<f64>,
    interval: Span,
) -> PerResource<Option<f64>> {
    let seconds = interval.as_secs_f64();
    PerResource::from_fn(|r: Resource| {
        let used = consumed.get(r) / seconds;
        (seconds > 0.0 && used >= LEAST_USE && progress_per_second.is_finite()).then(|| progress_per_second / used)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(value: f64) -> Sample {
        Sample { value, step: None, total: None }
    }

    #[test]
    fn what_is_not_finite_is_refused_and_counted() {
        let mut t = Tracker::default();
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(!t.push(Time(1), sample(bad)));
        }
        assert!(t.push(Time(2), sample(1e308)));
        assert_eq!((t.refused(), t.signal().reports), (3, 1));
        assert_eq!(t.signal().first.unwrap().value, 1e308);
    }

    #[test]
    fn time_within_a_job_never_runs_backwards() {
        let mut t = Tracker::default();
        t.push(Time(100), sample(2.0));
        t.push(Time(40), sample(1.0));
        assert_eq!(t.signal().last.unwrap().at, Time(100));
    }

    #[test]
    fn scale_is_the_magnitude_of_the_first_value_unless_it_is_zero() {
        let mut t = Tracker::default();
        t.push(Time(1), sample(-4.0));
        t.push(Time(2), sample(9.0));
        assert_eq!(t.signal().scale(Normalisation::Relative), 4.0);
        assert_eq!(t.signal().scale(Normalisation::Raw), 1.0);
        let mut z = Tracker::default();
        z.push(Time(1), sample(0.0));
        assert_eq!(z.signal().scale(Normalisation::Relative), 1.0);
    }

    #[test]
    fn growth_is_progress_over_average_use() {
        let consumed = PerResource { cpu: 5.0, memory: 1.0, block_io: 0.0, net_io: 0.009 };
        let g = growth_efficiency(0.1, consumed, Span::from_secs(10));
        assert_eq!(g.cpu, Some(0.2));
        assert_eq!(g.memory, Some(1.0));
        assert_eq!((g.block_io, g.net_io), (None, None));
        assert_eq!(growth_efficiency(0.1, consumed, Span::ZERO).cpu, None);
    }
}
