//! How long a job's steps take at any share of its node, and when the job will therefore end.
//!
//! **Problem.** A deadline can be kept with the smallest sufficient share only if the time per step
//! is known for shares that the job has never had. The job announces nothing about it: it must come from the
//! job's reports and its CPU counters, within a few steps.
//!
//! **Approach.** Steps of a training job are alike. Between two reports a [`PaceTracker`] measures
//! one *window*: the steps made, the seconds they took, and the share the job had. The windows are
//! fitted by `t(c) = serial + parallel / c` (Amdahl's law; `c` is the share, 0 to 1), by least
//! squares of the *relative* error, so that a window at a tenth of the node weighs as much as one
//! at the whole node. Old windows fade. The serial part is pulled towards zero as strongly as one
//! uncertain observation: with windows at one share only, the law is linear, and a wider interval
//! says how little is known of other shares.
//!
//! *Which share a window had.* It had what it used: on a machine that gives unused CPU away this may be
//! more than its grant. A job that used less than its grant, or that left CPU idle which it was free to
//! use, could not use more: its use is the largest *usable* share, and a larger share makes no step
//! shorter. While the node has nothing to spare, others may keep a job from its grant, but not from nearly all of it:
//! a job that used less than [`ASLEEP`] of its grant waits for something else.
//!
//! *Earlier runs.* Where earlier runs of the program were measured, they say before the first window how long steps
//! take. Afterwards the serial part is pulled towards their ratio of the two parts in place of zero ([`super::past`]).
//!
//! *Counters and reports have their own times.* A report may be newer than the counters. Its window is
//! closed when counters that are newer than the report have been read. Counters that stand still while steps are
//! made are old, and close no window.
//!
//! *A change of cost.* Windows that take much longer, or much shorter, than fitted are left out at first. If the next
//! ones agree, the cost has changed: the whole law is scaled to them, and from then on it rests mostly on new windows,
//! so that a wrong scale is corrected within a few windows. Steps are much shorter only if they cost less: two
//! windows are enough. They are longer for many reasons that pass: the start of a pod takes seconds, and the steps of
//! its neighbours cost more meanwhile. So longer steps are believed when they have lasted for two windows and
//! [`LASTING_S`], or [`LASTING_DISTURBED_S`] while other jobs start. If several windows in a row are a little longer,
//! or all a little shorter, the law drifts, and rests mostly on new windows, too. The first windows may be those of a
//! warm-up: a much faster window replaces them.
//!
//! *Pauses.* Longer windows that are followed by ordinary ones are a pause: an evaluation, a checkpoint, the end of an
//! epoch. The law leaves them out. Pauses that come again take their part of all time, and the law is slowed by that
//! part. A first pause is believed to come again if it lies at the end of an epoch; otherwise half of it counts.
//! Windows in which another job was starting are no pause of this job.
//!
//! **Terms and units.** `parallel_s` is node-seconds per step, `serial_s` seconds per step.
//! Intervals are the middle 80 %.
//!
//! **Properties** (tests of that name): `amdahl_is_found`; `one_share_means_linear`;
//! `a_doubled_cost_is_followed`; `the_start_of_a_neighbour_is_no_change_of_the_cost`;
//! `a_wrong_belief_is_corrected_within_a_few_windows`; `intervals_hold_four_in_five`;
//! `a_job_that_sleeps_on_a_busy_node_limits_itself`; `a_restart_begins_a_new_window`; `old_counters_make_no_window`;
//! `a_warm_up_is_forgotten`; `pauses_that_come_again_are_counted`.

use super::Signal;
use crate::model::Time;
use serde::{Deserialize, Serialize};

/// Half the width of a normal distribution's middle 80 %, in standard deviations.
pub(crate) const Z80: f64 = 1.2816;

/// Each new window leaves this part of the weight of all before it: about the last thirty count.
const FADING: f64 = 0.97;

/// A window that is longer than a second makes those before it fade as much as this many short ones at most: of a job
/// with a small share, whose windows are long, about the last half minute counts, or the last eight windows.
const MOST_FADING: f64 = 4.0;

/// The serial part of a step, as a part of the whole, before two different shares were seen: zero,
/// give or take this much.
const SERIAL_PRIOR: f64 = 0.2;

/// Below this share a step says no more of the serial part than at this share.
const SMALL_SHARE: f64 = 0.1;

/// No law is known better than this, relative: machines vary, and training has pauses that short
/// windows do not show.
const LEAST_ERROR: f64 = 0.03;

/// Use below this part of the grant, while CPU is idle, means that the job cannot use more.
const UNUSED: f64 = 0.9;

/// Use below this part of the grant means the same while no CPU is idle: other programs never take all of a grant.
const ASLEEP: f64 = 0.1;

/// Use above this part of what a job was thought able to use shows that it was underestimated.
const MORE: f64 = 1.02;

/// A window that took this many times longer (or shorter) than fitted is a jump of the cost, if the
/// next ones agree.
const JUMP: f64 = 1.4;

/// Windows that must agree.
const AGREEING: u32 = 2;

/// A higher cost is believed when it has lasted this long,
const LASTING_S: f64 = 5.0;

/// or this long while other jobs were starting: one start after the other may disturb the job.
const LASTING_DISTURBED_S: f64 = 15.0;

/// The law drifts if this many windows in a row are longer than fitted by more than [`DRIFT`], or all shorter.
const DRIFTING: u32 = 5;
const DRIFT: f64 = 1.05;

/// After a jump or a drift all earlier windows together weigh as much as this many.
const WEIGHT_AFTER_CHANGE: f64 = 3.0;

/// A shorter window says more about the reading of files than about the job.
const SHORTEST_WINDOW_S: f64 = 0.25;

/// Windows that may be those of a warm-up.
const WARM_UP: u32 = 3;

/// Counters that have not moved for longer than this are believed: the job's CPU cannot be measured.
const LONGEST_STANDSTILL_S: f64 = 5.0;

/// Each window takes this part of the weight of all pauses before it: about the last two hundred count.
const PAUSE_FADING: f64 = 0.995;

/// Pauses are believed to take at most this part of the time of the steps.
const MOST_PAUSED: f64 = 1.0;

/// No share is smaller: below it a job does not run.
pub const LEAST_SHARE: f64 = 1e-3;

/// A number with its middle 80 %.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub mid: f64,
    pub low: f64,
    pub high: f64,
}

impl Interval {
    pub fn exact(mid: f64) -> Interval {
        Interval { mid, low: mid, high: mid }
    }
}

/// The fitted law of one job: seconds per step as a function of its share.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// Seconds of a step that no share shortens.
    pub serial_s: f64,
    /// Node-seconds of a step that shorten with the share.
    pub parallel_s: f64,
    /// Variances and covariance of the two: serial, both, parallel.
    pub variance: [f64; 3],
    /// The relative error that no number of windows removes.
    pub error: f64,
    /// The largest share that the job was seen able to use.
    pub usable: f64,
    /// The largest share at which the job was measured; laws that earlier versions recorded do not say it.
    #[serde(default = "all", skip_serializing_if = "is_all")]
    pub seen: f64,
    /// Windows measured so far; 0 for a law that was given.
    pub windows: u32,
    /// The law is what earlier runs of the program say: the job itself has shown nothing yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_guess: bool,
}

fn all() -> f64 {
    1.0
}

fn is_all(seen: &f64) -> bool {
    *seen == all()
}

/// How much of a step no share shortens, as a ratio to its node-seconds; runs of one program have it in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// `serial_s` in units of `parallel_s`.
    pub ratio: f64,
    pub deviation: f64,
}

impl Pace {
    /// A law that is given, not measured.
    pub fn from_law(serial_s: f64, parallel_s: f64, usable: f64) -> Pace {
        Pace { serial_s, parallel_s, variance: [0.0; 3], error: 0.0, usable, seen: all(), windows: 0, is_guess: false }
    }

    /// The law as a function of the granted share, where the jobs of a node get only `available` of what
    /// they are granted, because other programs take the rest.
    pub fn with_available(self, available: f64) -> Pace {
        let a = available.clamp(0.01, 1.0);
        let [serial, both, parallel] = self.variance;
        Pace {
            parallel_s: self.parallel_s / a,
            variance: [serial, both / a, parallel / (a * a)],
            usable: (self.usable / a).min(1.0),
            seen: (self.seen / a).min(1.0),
            ..self
        }
    }

    /// What this law says of the law of another run, however long the steps of that run take.
    pub fn shape(&self) -> Shape {
        let parallel_s = self.parallel_s.max(LEAST_SHARE * self.serial_s).max(f64::MIN_POSITIVE);
        let ratio = self.serial_s / parallel_s;
        let [serial, both, parallel] = self.variance;
        let variance = (serial - 2.0 * ratio * both + ratio * ratio * parallel).max(0.0) / (parallel_s * parallel_s);
        Shape { ratio, deviation: variance.sqrt() }
    }

    /// Seconds per step at `share`.
    pub fn step_s(&self, share: f64) -> f64 {
        self.serial_s + self.parallel_s / share.min(self.usable).max(LEAST_SHARE)
    }

    /// The standard deviation of [`Pace::step_s`], as a mean over many steps.
    pub fn deviation_s(&self, share: f64) -> f64 {
        let x = 1.0 / share.min(self.usable).max(LEAST_SHARE);
        let [serial, both, parallel] = self.variance;
        let law = (serial + 2.0 * both * x + parallel * x * x).max(0.0);
        (law + (self.error * self.step_s(share)).powi(2)).sqrt()
    }

    /// Seconds per step at `share`, `caution` standard deviations on the slow side.
    pub fn cautious_step_s(&self, share: f64, caution: f64) -> f64 {
        self.step_s(share) + caution * self.deviation_s(share)
    }

    /// How long `steps` take at `share`.
    pub fn time_s(&self, steps: Interval, share: f64) -> Interval {
        let (step, deviation) = (self.step_s(share), self.deviation_s(share));
        let side = |end: f64| {
            let of_steps = (end - steps.mid) * step;
            (of_steps * of_steps + (Z80 * deviation * steps.mid).powi(2)).sqrt()
        };
        let mid = steps.mid * step;
        Interval { mid, low: (mid - side(steps.low)).max(0.0), high: mid + side(steps.high) }
    }
}

/// Where a signal's steps end: as the job announced, or where the fitted curve meets the goal.
impl Signal {
    /// How far the job is: steps, or reports where it counts no steps.
    pub fn position(&self) -> f64 {
        self.step.unwrap_or(self.reports) as f64
    }

    /// The steps left, if there is a way to know them. A job that goes on after its announced total
    /// is believed to have as much left as it has gone on.
    pub fn steps_left(&self) -> Option<Interval> {
        let at = self.position();
        if let Some(total) = self.total {
            return Some(Interval::exact((total as f64 - at).abs()));
        }
        let goal = self.goal.filter(|g| g.chance >= 0.5)?;
        let left = |x: f64| (x - at).max(0.0);
        Some(Interval { mid: left(goal.at.mid), low: left(goal.at.low), high: left(goal.at.high) })
    }

    /// When the job ends if it has `share` of its node from now on, in seconds from `now`; `None`
    /// while its steps left or its pace are not known.
    pub fn ends_in_s(&self, now: Time, share: f64) -> Option<Interval> {
        self.ends_after_s(self.steps_left()?, now, share)
    }

    /// The same if `steps` are left.
    pub(crate) fn ends_after_s(&self, steps: Interval, now: Time, share: f64) -> Option<Interval> {
        let pace = self.pace?;
        let since_report = self.last.map_or(0.0, |l| now.since(l.at).as_secs_f64());
        // Part of the next step is made already; a job is never believed to have ended.
        let done = (since_report / pace.step_s(share)).min(1.0) * pace.step_s(share);
        let time = pace.time_s(steps, share);
        let less = |t: f64| (t - done).max(0.0);
        Some(Interval { mid: less(time.mid), low: less(time.low), high: less(time.high) })
    }
}

/// What a driver knows of a job when it reads the job's counters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PaceReading {
    /// When the counters were read. Reports may be newer.
    pub now: Time,
    /// Node-seconds of CPU since the job's start.
    pub consumed_node_s: f64,
    /// The share that was in force since the last reading.
    pub granted: f64,
    /// Whether the node had no CPU to spare: a job that used less than its grant may then have wanted more.
    pub scarce: bool,
    /// Whether CPU was idle since the last reading that the job was free to use: what it used was then
    /// all it could.
    pub has_idle: bool,
    /// Whether another job of the node was starting since the last reading: its start may make steps longer.
    pub is_disturbed: bool,
}

/// Measures windows and fits the law. It belongs to the driver, beside the [`super::Tracker`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PaceTracker {
    last: Option<Counters>,
    /// The counters when the newest window ended.
    window: Option<(f64, Counters)>,
    /// Readings since the window began.
    #[serde(default)]
    limited: SelfLimitedTime,
    /// Another job was starting since the window began.
    #[serde(default)]
    is_disturbed: bool,
    sums: Sums,
    usable: Option<f64>,
    /// The last windows, if they were far from the law.
    odd: Option<OddRun>,
    /// How many of the last windows in a row were longer than by the law, or shorter, and which.
    #[serde(default)]
    drift: (u32, bool),
    /// A report that is newer than the counters: its time and position.
    #[serde(default)]
    ahead: Option<(Time, f64)>,
    #[serde(default)]
    pauses: Pauses,
    /// What earlier runs of the program say of the law.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    past: Option<Pace>,
}

/// Windows in a row that took much longer than by the law, or all much shorter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct OddRun {
    count: u32,
    /// What they took, and what they would have taken by the law.
    seconds: f64,
    law_s: f64,
    /// Another job was starting during one of them.
    is_disturbed: bool,
}

impl OddRun {
    fn is_longer(&self) -> bool {
        self.seconds > self.law_s
    }

    /// How many times longer, if that is a change of the cost.
    fn change(&self) -> Option<f64> {
        let lasting_s = if self.is_disturbed { LASTING_DISTURBED_S } else { LASTING_S };
        let is_believed = self.count >= AGREEING && (!self.is_longer() || self.seconds >= lasting_s);
        is_believed.then(|| self.seconds / self.law_s)
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Counters {
    at: Time,
    #[serde(rename = "consumed_s")]
    consumed_node_s: f64,
}

impl Counters {
    fn between(a: Counters, b: Counters, at: Time) -> Counters {
        let span = b.at.since(a.at).as_secs_f64();
        let part = if span > 0.0 { (at.since(a.at).as_secs_f64() / span).min(1.0) } else { 1.0 };
        let mix = |x: f64, y: f64| x + part * (y - x);
        Counters { at: at.max(a.at).min(b.at), consumed_node_s: mix(a.consumed_node_s, b.consumed_node_s) }
    }
}

/// For how much of the time since a window began only the job itself limited its use. The grant may change within
/// a window, so each reading is classified alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct SelfLimitedTime {
    all_s: f64,
    limited_s: f64,
    /// Node-seconds used in that time.
    used_s: f64,
}

impl SelfLimitedTime {
    fn add(&mut self, reading: &PaceReading, now: Counters, before: Counters) {
        let seconds = now.at.since(before.at).as_secs_f64();
        let used_s = now.consumed_node_s - before.consumed_node_s;
        let unused = if reading.scarce { ASLEEP } else { UNUSED };
        let left_over = used_s < unused * reading.granted.min(1.0) * seconds;
        self.all_s += seconds;
        if left_over || reading.has_idle {
            self.limited_s += seconds;
            self.used_s += used_s;
        }
    }

    /// The share that the job can use, if it was limited by itself for most of the time: one pause proves
    /// nothing.
    fn usable(self) -> Option<f64> {
        let is_most = self.limited_s > 0.5 * self.all_s;
        is_most.then(|| (self.used_s / self.limited_s).clamp(LEAST_SHARE, 1.0))
    }
}

/// Time between steps that the law of the steps leaves out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Pauses {
    /// The time of the steps by the law, and what pauses took beyond it.
    steps_s: f64,
    paused_s: f64,
    count: f64,
    /// Some pause lay at the end of an epoch.
    at_epoch: bool,
    /// The last windows, if they may be a pause: seconds by the law, seconds beyond it, whether an epoch ended.
    pending: Option<(f64, f64, bool)>,
}

impl Pauses {
    /// Counts a window that took `law_s` by the law and `beyond_s` more, if it is no step of the law.
    fn add(&mut self, law_s: f64, beyond_s: Option<f64>, ends_epoch: bool) {
        for sum in [&mut self.steps_s, &mut self.paused_s, &mut self.count] {
            *sum *= PAUSE_FADING;
        }
        let pending = self.pending.take();
        match beyond_s {
            // Whether it is a pause or a change of the cost, the next windows show.
            Some(beyond_s) => {
                let (law_before_s, beyond_before_s, ended_epoch) = pending.unwrap_or_default();
                self.pending = Some((law_before_s + law_s, beyond_before_s + beyond_s, ended_epoch | ends_epoch));
            }
            None => {
                if let Some((law_s, beyond_s, ends_epoch)) = pending {
                    self.steps_s += law_s;
                    self.paused_s += beyond_s;
                    self.count += 1.0;
                    self.at_epoch |= ends_epoch;
                }
                self.steps_s += law_s;
            }
        }
    }

    /// The part of the time of the steps that pauses take, and its standard deviation.
    fn part(&self) -> (f64, f64) {
        let part = (self.paused_s / self.steps_s.max(1e-9)).clamp(0.0, MOST_PAUSED);
        let deviation = 0.5 * part / self.count.max(1.0).sqrt();
        // Of a first pause nothing says whether it comes again.
        let comes_again = self.count > 1.5 || (self.at_epoch && self.count > 0.5);
        (if comes_again { part } else { 0.5 * part }, deviation)
    }
}

/// Whether an epoch of `epoch_steps` ended between two positions.
fn ends_epoch(from: f64, to: f64, epoch_steps: Option<u64>) -> bool {
    let Some(epoch) = epoch_steps.filter(|e| *e > 1).map(|e| e as f64) else { return false };
    // The last report of an epoch comes before its evaluation.
    (from / epoch).floor() != (to / epoch).floor() || from % epoch == 0.0
}

/// Sums of the fit of `1 = serial · (1/t) + parallel · (x/t)`, with `x = 1/c`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Sums {
    n: f64,
    one: f64,
    x: f64,
    one_one: f64,
    one_x: f64,
    x_x: f64,
    windows: u32,
    /// The largest share of a window.
    #[serde(default)]
    seen: f64,
}

impl PaceTracker {
    /// Takes in what earlier runs of the program say ([`super::past::expected_pace`]). It stands for the law until the
    /// first window. After that it says how the law of the job's own windows goes on to shares that the job never had.
    pub fn expect(&mut self, past: Option<Pace>) {
        self.past = past;
    }

    /// Takes in the job's counters and the signal of its reports so far.
    pub fn observe(&mut self, reading: PaceReading, signal: &Signal) {
        let before = self.last.filter(|l| reading.consumed_node_s >= l.consumed_node_s && reading.now >= l.at);
        let now = Counters { at: reading.now, consumed_node_s: reading.consumed_node_s };
        self.last = Some(now);
        self.is_disturbed |= reading.is_disturbed;
        match before {
            Some(before) => self.limited.add(&reading, now, before),
            // A new attempt.
            None => (self.window, self.ahead) = (None, None),
        }
        let Some((at, position)) = self.covered_report(now.at, signal) else { return };
        let same_attempt = self.window.filter(|(from, _)| position >= *from);
        let (Some(before), Some((from, start))) = (before, same_attempt) else {
            // The first report, a new attempt, or a step back to a checkpoint.
            self.window = Some((position, before.map_or(now, |b| Counters::between(b, now, at))));
            (self.limited, self.is_disturbed) = (SelfLimitedTime::default(), reading.is_disturbed);
            return;
        };
        let end = Counters::between(before, now, at);
        let seconds = end.at.since(start.at).as_secs_f64();
        let is_standing = end.consumed_node_s <= start.consumed_node_s && seconds < LONGEST_STANDSTILL_S;
        if position <= from || seconds < SHORTEST_WINDOW_S || is_standing {
            return;
        }
        let used = (end.consumed_node_s - start.consumed_node_s) / seconds;
        let used = used.clamp(LEAST_SHARE, 1.0);
        self.window = Some((position, end));
        let usable = self.usable.unwrap_or(1.0);
        self.usable = match std::mem::take(&mut self.limited).usable() {
            Some(seen) if self.usable.is_some() => Some(0.5 * (usable + seen)),
            Some(seen) => Some(seen),
            // It used all it had, and more than it was thought able to: it may well use more.
            None if used > MORE * usable => Some((1.25 * used).min(1.0)),
            None => self.usable,
        };
        let steps = position - from;
        let law_s = self.law().map_or(seconds, |law| steps * law.step_s(used));
        let is_disturbed = std::mem::replace(&mut self.is_disturbed, reading.is_disturbed);
        let is_left_out = self.add(steps, seconds, used, is_disturbed);
        let is_pause = is_left_out && !is_disturbed;
        let beyond_s = Some(seconds - law_s).filter(|beyond_s| is_pause && *beyond_s > 0.0);
        self.pauses.add(law_s, beyond_s, ends_epoch(from, position, signal.epoch_steps));
    }

    /// The time and the position of a report that is not newer than the counters.
    fn covered_report(&mut self, now: Time, signal: &Signal) -> Option<(Time, f64)> {
        let report = signal.last?;
        let newest = (report.at, signal.position());
        if report.at <= now {
            self.ahead = None;
            return Some(newest);
        }
        let covered = self.ahead.take_if(|(at, _)| *at <= now);
        // A step back to a checkpoint replaces the report that waits.
        self.ahead = self.ahead.filter(|(_, position)| *position <= newest.1).or(Some(newest));
        covered
    }

    /// Adds a window to the fit; `true` if it is left out for now, because it is far from the law.
    fn add(&mut self, steps: f64, seconds: f64, share: f64, is_disturbed: bool) -> bool {
        let law_s = self.law().map_or(seconds, |law| steps * law.step_s(share));
        let ratio = seconds / law_s;
        // Much longer windows may be a pause.
        if ratio <= JUMP {
            self.follow_drift(ratio);
        }
        let before = self.odd.take().filter(|run| run.is_longer() == (ratio > 1.0));
        if !(1.0 / JUMP..=JUMP).contains(&ratio) {
            let run = before.unwrap_or_default();
            let run = OddRun {
                count: run.count + 1,
                seconds: run.seconds + seconds,
                law_s: run.law_s + law_s,
                is_disturbed: run.is_disturbed | is_disturbed,
            };
            if let Some(ratio) = run.change() {
                self.sums.scale(ratio);
                self.sums.limit_weight(WEIGHT_AFTER_CHANGE);
                self.pauses.pending = None;
            } else if self.sums.windows >= WARM_UP {
                // Counted only if the next windows agree: it may be a pause.
                self.odd = Some(run);
                return true;
            } else if ratio < 1.0 {
                // The windows before were those of a warm-up.
                self.sums = Sums::default();
            }
        }
        self.sums.add(seconds / steps, share.max(LEAST_SHARE), seconds.clamp(1.0, MOST_FADING));
        false
    }

    /// Lets the law rest on new windows if several in a row were off in the same direction.
    fn follow_drift(&mut self, ratio: f64) {
        let is_longer = ratio > 1.0;
        let before = if self.drift.1 == is_longer { self.drift.0 } else { 0 };
        let is_off = !(1.0 / DRIFT..=DRIFT).contains(&ratio);
        self.drift = (if is_off { before + 1 } else { 0 }, is_longer);
        if self.drift.0 == DRIFTING {
            self.sums.limit_weight(WEIGHT_AFTER_CHANGE);
            self.drift.0 = 0;
        }
    }

    fn law(&self) -> Option<Pace> {
        self.sums.fit(1.0, self.past.map(|past| past.shape()))
    }

    /// The law as far as it is known: by the job's own windows, and before the first one by earlier runs.
    pub fn pace(&self) -> Option<Pace> {
        self.pace_after(self.past.as_ref()).or(self.past)
    }

    /// The law by the job's own windows alone.
    pub fn own_pace(&self) -> Option<Pace> {
        self.pace_after(None)
    }

    /// Whether the job's own windows say something.
    pub fn is_measured(&self) -> bool {
        self.sums.windows > 0
    }

    fn pace_after(&self, past: Option<&Pace>) -> Option<Pace> {
        // What others could not use is no reason to keep more from this job: its own windows show what it can use.
        let law = self.sums.fit(self.usable.unwrap_or(1.0), past.map(Pace::shape))?;
        let (part, deviation) = self.pauses.part();
        let slower = 1.0 + part;
        Some(Pace {
            serial_s: law.serial_s * slower,
            parallel_s: law.parallel_s * slower,
            variance: law.variance.map(|v| v * slower * slower),
            error: law.error.hypot(deviation / slower),
            ..law
        })
    }
}

impl Sums {
    /// Adds a window; those before it fade as by `fadings` short ones.
    fn add(&mut self, t: f64, share: f64, fadings: f64) {
        let (w, x) = (1.0 / t, 1.0 / share);
        self.weigh(FADING.powf(fadings));
        self.n += 1.0;
        self.one += w;
        self.x += x * w;
        self.one_one += w * w;
        self.one_x += x * w * w;
        self.x_x += x * x * w * w;
        self.windows = self.windows.saturating_add(1);
        self.seen = self.seen.max(share);
    }

    /// Multiplies the weight of all windows.
    fn weigh(&mut self, factor: f64) {
        for sum in [&mut self.n, &mut self.one, &mut self.x, &mut self.one_one, &mut self.one_x, &mut self.x_x] {
            *sum *= factor;
        }
    }

    /// All windows together weigh at most as much as `windows` new ones.
    fn limit_weight(&mut self, windows: f64) {
        if self.n > windows {
            self.weigh(windows / self.n);
        }
    }

    /// All windows took `ratio` times as long.
    fn scale(&mut self, ratio: f64) {
        for sum in [&mut self.one, &mut self.x] {
            *sum /= ratio;
        }
        for sum in [&mut self.one_one, &mut self.one_x, &mut self.x_x] {
            *sum /= ratio * ratio;
        }
    }

    fn fit(&self, usable: f64, shape: Option<Shape>) -> Option<Pace> {
        if self.windows == 0 || self.x_x <= 0.0 {
            return None;
        }
        // The relative scatter around the linear law bounds the noise from above; it weighs the prior.
        let linear = self.x / self.x_x;
        let (ratio, deviation) = match shape {
            Some(Shape { ratio, deviation }) => {
                let parallel =
                    (ratio * self.one + self.x) / (ratio * ratio * self.one_one + 2.0 * ratio * self.one_x + self.x_x);
                (ratio, deviation * parallel)
            }
            // A step at a very small share is long, but that does not make a long serial part likely.
            None => (0.0, SERIAL_PRIOR * (self.n / self.one).min(linear / SMALL_SHARE)),
        };
        let prior = deviation.powi(-2);
        let scatter = |a: f64, b: f64| {
            let misfit = self.n - 2.0 * (a * self.one + b * self.x)
                + a * a * self.one_one
                + 2.0 * a * b * self.one_x
                + b * b * self.x_x;
            // One window more than there was, as noisy as the least error: few windows agree by chance.
            ((misfit.max(0.0) + LEAST_ERROR * LEAST_ERROR) / (self.n - 1.0).max(1.0)).max(1e-6)
        };
        // The normal equations, with the prior as one more observation: serial = ratio · parallel.
        let equations = |noise: f64| {
            let weight = noise * prior;
            let s11 = self.one_one + weight;
            let s12 = self.one_x - ratio * weight;
            let s22 = self.x_x + ratio * ratio * weight;
            (s11, s12, s22, s11 * s22 - s12 * s12)
        };
        let mut noise = LEAST_ERROR * LEAST_ERROR;
        let (mut serial, mut parallel) = (0.0, linear);
        for _ in 0..2 {
            let (s11, s12, s22, det) = equations(noise);
            if det > 0.0 {
                serial = (self.one * s22 - self.x * s12) / det;
                parallel = (s11 * self.x - s12 * self.one) / det;
            }
            if serial < 0.0 || det <= 0.0 {
                (serial, parallel) = (0.0, linear);
            } else if parallel <= 0.0 {
                (serial, parallel) = (self.one / self.one_one, 0.0);
            }
            noise = scatter(serial, parallel);
        }
        let (s11, s12, s22, det) = equations(noise);
        let det = det.max(f64::MIN_POSITIVE);
        let variance = [noise * s22 / det, -noise * s12 / det, noise * s11 / det];
        let pace = Pace {
            serial_s: serial,
            parallel_s: parallel,
            variance,
            error: LEAST_ERROR,
            usable,
            seen: self.seen.min(1.0),
            windows: self.windows,
            is_guess: false,
        };
        let sound = serial.is_finite() && parallel.is_finite() && variance.iter().all(|v| v.is_finite());
        (sound && serial + parallel > 0.0).then_some(pace)
    }
}

#[cfg(test)]
#[path = "speed_tests.rs"]
mod tests;
