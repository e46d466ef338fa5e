//! What is simulated: nodes, jobs and how they disturb each other. All of it is drawn before a policy sees
//! anything, so that every policy faces the same world.
//!
//! **Terms.** Work is counted in seconds of one reference core. A node has `cores`, each `speed` times a
//! reference core. A job's *rate* is the work it does per second; with `c` cores of speed `s` it is `s ·
//! speedup(c)`.
//!
//! **Interference.** Jobs that share a node disturb each other (cold caches, context switches). With `u` a
//! job's part of what is used, the chance that a slice of time follows one of another job is `1 − Σu²` (one
//! half for two equal jobs, two thirds for three); every rate is divided by `1 + γ·(1 − Σu²)`. That is
//! [`Law::Turns`], the law that the gain rule fits. Under [`Law::Pairs`] it matters who the neighbours are:
//! with `a` a model's *appetite* ([`appetite`], 1 on average), a job is divided by `1 + γ·a·Σ a'u'` over the
//! others. Under [`Law::Bandwidth`] nothing happens until the jobs together want more memory bandwidth than
//! the node has: each is divided by `max(1, Σ a·u / max(1, a))`, which is 1 for a job alone. Jobs that
//! together hold more memory than the node has are slowed in proportion.

use crate::curve::Curve;
use crate::random::Stream;
use gainshare_core::model::{Span, Time};
use gainshare_core::signal::Tracker;
use gainshare_core::signal::speed::Pace;
use gainshare_core::view::{Deadline, FinishedRun};
use serde::{Deserialize, Serialize};

/// One machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub name: String,
    pub cores: f64,
    pub speed: f64,
    pub memory_bytes: u64,
    pub slots: Option<usize>,
}

/// How much faster a job runs on more cores; one core is 1.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "law")]
pub enum Speedup {
    /// Twice the cores, twice the rate.
    #[default]
    Linear,
    /// `1 / ((1 − parallel) + parallel/c)`.
    Amdahl { parallel: f64 },
    /// Measured points (cores, rate), joined by straight lines; flat beyond the last.
    Table { points: Vec<(f64, f64)> },
}

impl Speedup {
    /// Whether the numbers make a law: more cores never make a job slower.
    pub fn is_sound(&self) -> bool {
        match self {
            Speedup::Linear => true,
            Speedup::Amdahl { parallel } => (0.0..=1.0).contains(parallel),
            Speedup::Table { points } => {
                let rising = points.windows(2).all(|w| w[1].0 > w[0].0 && w[1].1 >= w[0].1);
                let first = points.first().is_some_and(|p| p.0 > 0.0 && p.1 > 0.0);
                first && rising && points.iter().all(|p| p.0.is_finite() && p.1.is_finite())
            }
        }
    }

    pub fn rate(&self, cores: f64) -> f64 {
        match self {
            Speedup::Linear => cores,
            // Below one core the job has one core's threads for a part of the time.
            Speedup::Amdahl { .. } if cores < 1.0 => cores,
            Speedup::Amdahl { parallel } => 1.0 / ((1.0 - parallel) + parallel / cores),
            Speedup::Table { points } => {
                let (mut before, mut rate) = ((0.0, 0.0), 0.0);
                for &(c, r) in points {
                    if cores <= c {
                        return before.1 + (r - before.1) * (cores - before.0) / (c - before.0);
                    }
                    (before, rate) = ((c, r), r);
                }
                rate
            }
        }
    }
}

/// One job, as it truly is; policies see only what it reports.
#[derive(Debug, Clone, PartialEq)]
pub struct SimJob {
    pub name: String,
    pub model: String,
    pub arrival: Time,
    /// Seconds of one reference core.
    pub work_core_s: f64,
    pub speedup: Speedup,
    /// The job cannot use more cores than this.
    pub max_cores: f64,
    pub memory_bytes: u64,
    pub curve: Curve,
    /// Work before the first step: imports, the data set, the first checkpoint. Part of `work`.
    pub startup_core_s: f64,
    /// Work between two reports, where all steps cost alike.
    pub report_every_core_s: f64,
    /// Where steps cost unlike: the work done when each report is made.
    pub report_positions: Vec<f64>,
    /// How many reports it set out to make, where it ends before.
    pub planned_reports: Option<u64>,
    /// What its reports say of its length.
    pub claim: AnnouncedTotal,
    /// Earlier runs of the same program.
    pub history: Vec<FinishedRun>,
    /// Jobs with the same number run the same program: when one of them has ended, the others know how long and how
    /// fast it was.
    pub program: Option<u32>,
    /// From the order to run until the first work is done.
    pub start: Span,
    /// What saving and restoring cost when it is moved.
    pub save: Span,
    pub restore: Span,
    pub owner: u32,
    pub priority: i32,
    pub floor: f64,
    /// When it must have ended, if its owner said.
    pub deadline: Option<Deadline>,
    /// What its owner requests and may not exceed, as a part of a node; only the policy `requests` reads it.
    pub request: Option<f64>,
    /// Whether its length and its speed at any share are known when it arrives.
    pub tells_pace: bool,
    /// Whether its speed at any share is known as soon as it was measured at one.
    pub shows_pace: bool,
}

/// What a job's reports say of its length.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "says", deny_unknown_fields)]
pub enum AnnouncedTotal {
    /// Steps alone.
    #[default]
    Nothing,
    /// Where in its epoch it is, `reports` reports making one, but not how many epochs there are.
    Epochs { reports: u64 },
    /// How many reports there will be.
    Total,
    /// As `Total`, but wrong by this factor.
    Wrong { factor: f64 },
    /// As `Wrong` until the part `at` of its reports is made, then right.
    Changed { factor: f64, at: f64 },
}

/// What makes a job unlike its model: see [`SimJob::roughen`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roughness {
    /// Start-up work, as a part of all work.
    pub startup: f64,
    /// The deviation of the logarithm of what a step costs.
    pub step_spread: f64,
    /// Number of reports after which an evaluation and a checkpoint come, and their cost in steps.
    pub evaluation: (u64, f64),
    /// The job ends when this part of its reports is made: early stopping, or a crash.
    pub stops_at: Option<f64>,
}

impl SimJob {
    /// The tracker of the job's reports, which knows what an epoch is where the job prints it.
    pub(crate) fn tracker(&self) -> Tracker {
        let mut tracker = Tracker::default();
        if let AnnouncedTotal::Epochs { reports } = self.claim {
            tracker.set_epoch_steps(reports);
        }
        tracker
    }

    /// How many reports it set out to make.
    pub fn planned(&self) -> u64 {
        let made = if self.report_positions.is_empty() {
            ((self.work_core_s - self.startup_core_s) / self.report_every_core_s).round() as u64
        } else {
            self.report_positions.len() as u64
        };
        self.planned_reports.unwrap_or(made).max(1)
    }

    /// The work done when report `n` (from 1) is made, if it is made at all.
    pub fn report_at(&self, n: u64) -> Option<f64> {
        let at = match self.report_positions.is_empty() {
            true => self.startup_core_s + n as f64 * self.report_every_core_s,
            false => *self.report_positions.get(n as usize - 1)?,
        };
        (at <= self.work_core_s * (1.0 + 1e-9)).then_some(at)
    }

    /// The total that report `n` names.
    pub fn claimed(&self, n: u64) -> Option<u64> {
        let planned = self.planned();
        let wrong = |factor: f64| ((planned as f64 * factor).round() as u64).max(n);
        match self.claim {
            AnnouncedTotal::Nothing | AnnouncedTotal::Epochs { .. } => None,
            AnnouncedTotal::Total => Some(planned),
            AnnouncedTotal::Wrong { factor } => Some(wrong(factor)),
            AnnouncedTotal::Changed { factor, at } if (n as f64) < at * planned as f64 => Some(wrong(factor)),
            AnnouncedTotal::Changed { .. } => Some(planned),
        }
    }

    /// Start-up work, steps that cost unlike, evaluations between them, an early end. All work
    /// stays the same, but for the early end.
    pub fn roughen(&mut self, rough: &Roughness, draw: &mut Stream) {
        let planned = self.planned();
        let (every, evaluation) = rough.evaluation;
        let mut at = 0.0;
        let mut positions = Vec::with_capacity(planned as usize);
        for n in 1..=planned {
            at += (rough.step_spread * draw.normal()).exp();
            positions.push(at);
            if every > 0 && n % every == 0 {
                at += evaluation;
            }
        }
        self.startup_core_s = rough.startup * self.work_core_s;
        let scale = (self.work_core_s - self.startup_core_s) / at.max(f64::MIN_POSITIVE);
        self.report_positions = positions.into_iter().map(|p| self.startup_core_s + p * scale).collect();
        if let Some(part) = rough.stops_at {
            let last = ((part * planned as f64).round() as usize).clamp(1, planned as usize);
            self.planned_reports = Some(planned);
            self.work_core_s = self.report_positions[last - 1];
            self.report_positions.truncate(last);
        }
    }

    /// The law of its steps on `node`; a table of measured points is taken by its ends.
    pub fn pace(&self, node: &Node) -> Pace {
        let step_s = self.report_every_core_s / node.speed;
        let most = self.max_cores.min(node.cores);
        let (serial, parallel) = match &self.speedup {
            Speedup::Linear => (0.0, 1.0),
            Speedup::Amdahl { parallel } => (1.0 - parallel, *parallel),
            Speedup::Table { .. } if most > 1.0 => {
                let (one, all) = (1.0 / self.speedup.rate(1.0), 1.0 / self.speedup.rate(most));
                let parallel = ((one - all) / (1.0 - 1.0 / most)).clamp(0.0, one);
                (one - parallel, parallel)
            }
            Speedup::Table { .. } => (0.0, 1.0 / self.speedup.rate(1.0)),
        };
        Pace::from_law(step_s * serial, step_s * parallel / node.cores, most / node.cores)
    }

    /// Seconds it would take alone on `node`, from its first work on.
    pub fn alone_s(&self, node: &Node) -> f64 {
        self.work_core_s / (node.speed * self.speedup.rate(node.cores.min(self.max_cores)))
    }
}

/// What a share means on the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Actuator {
    /// Work-conserving: what one job leaves, others use in proportion to their shares (`cpu.weight`).
    #[default]
    Weight,
    /// A hard cap at the limit and free competition below it (`docker update --cpus`).
    Quota,
}

/// Everything, before anything happened. Jobs are in order of arrival; a job's place is its id.
#[derive(Debug, Clone, PartialEq)]
pub struct World {
    pub seed: u64,
    pub nodes: Vec<Node>,
    pub jobs: Vec<SimJob>,
    pub actuator: Actuator,
    /// γ, see the module's text.
    pub interference: f64,
    pub law: Law,
}

impl World {
    /// The same world where no job learns from the end of another.
    pub fn forgetful(mut self) -> World {
        self.jobs.iter_mut().for_each(|job| job.program = None);
        self
    }
}

/// How neighbours slow each other; see the module's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Law {
    #[default]
    Turns,
    Pairs,
    Bandwidth,
}

/// How much of the memory bandwidth a model of this name needs, 0.3 to 1.7: its own number under the
/// laws in which jobs differ.
pub fn appetite(model: &str) -> f64 {
    Stream::new(0, 0, model).uniform(0.3, 1.7)
}

/// By how much each of the jobs with these parts and appetites is slowed.
pub fn slowdowns(law: Law, interference: f64, parts: &[f64], appetites: &[f64]) -> Vec<f64> {
    let demand: f64 = parts.iter().zip(appetites).map(|(p, a)| p * a).sum();
    let each = |(part, appetite): (&f64, &f64)| match law {
        Law::Turns => slowdown(interference, parts),
        Law::Pairs => 1.0 + interference * appetite * (demand - part * appetite).max(0.0),
        Law::Bandwidth => (demand / appetite.max(1.0)).max(1.0),
    };
    parts.iter().zip(appetites).map(each).collect()
}

/// By how much neighbours slow each other under [`Law::Turns`].
pub fn slowdown(interference: f64, parts: &[f64]) -> f64 {
    let used: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|p| p * p).sum();
    if squares <= 0.0 { 1.0 } else { 1.0 + interference * (1.0 - squares / (used * used)).max(0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_equal_neighbours_disturb_by_two_thirds_and_an_idle_one_not_at_all() {
        assert!((slowdown(0.3, &[1.0 / 3.0; 3]) - 1.2).abs() < 1e-12);
        assert!((slowdown(0.1, &[0.5, 0.0]) - 1.0).abs() < 1e-12);
        assert_eq!(slowdown(0.1, &[]), 1.0);
    }

    #[test]
    fn the_other_laws_leave_a_job_alone_as_it_is_and_tell_neighbours_apart() {
        for law in [Law::Turns, Law::Pairs, Law::Bandwidth] {
            assert_eq!(slowdowns(law, 0.15, &[1.0], &[1.7]), [1.0]);
        }
        let pair = slowdowns(Law::Pairs, 0.2, &[0.5, 0.5], &[1.5, 0.5]);
        assert!(pair.iter().all(|s| (s - 1.075).abs() < 1e-12), "{pair:?}");
        let bandwidth = slowdowns(Law::Bandwidth, 0.2, &[0.5, 0.5], &[1.6, 1.0]);
        assert!((bandwidth[0] - 1.0).abs() < 1e-12 && (bandwidth[1] - 1.3).abs() < 1e-12, "{bandwidth:?}");
    }

    #[test]
    fn speedups_are_as_their_laws_say() {
        assert_eq!(Speedup::Linear.rate(4.0), 4.0);
        assert!((Speedup::Amdahl { parallel: 0.9 }.rate(9.0) - 5.0).abs() < 1e-12);
        let table = Speedup::Table { points: vec![(1.0, 1.0), (4.0, 2.5)] };
        assert_eq!([table.rate(0.5), table.rate(2.0), table.rate(9.0)], [0.5, 1.5, 2.5]);
    }
}
