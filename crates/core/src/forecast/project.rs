//! One projection: a view and a decider, played forward until the jobs have ended.
//!
//! **Cost.** At most [`MOST_DECISIONS`] decisions, however many jobs there are. Where there are more
//! jobs than that, several end between two decisions, and the rest is dealt by the weights in force.

use super::arrivals::{Arrivals, FutureJob, work_s};
use crate::deal::deal_by_weight;
use crate::decider::Decider;
use crate::model::{JobId, NodeId, Span, Time};
use crate::signal::length;
use crate::signal::speed::{Interval, LEAST_SHARE, Pace};
use crate::signal::{Signal, TimedValue};
use crate::view::{JobView, Phase, View};
use std::collections::BTreeMap;

/// Decisions of one projection.
pub(super) const MOST_DECISIONS: usize = 32;

/// Decisions at one moment: starts change the view, which may change shares.
const ROUNDS: usize = 3;

/// Minimum number of measured jobs before their median is used for unmeasured ones.
const LEAST_KNOWN: usize = 3;

/// A share is surely usable up to one core, and up to this many times the mean share that the job has used.
const SURELY_USABLE: f64 = 1.25;

/// The part by which the time at larger shares may be longer, for a job that was never seen short of its share: it may
/// be unable to use them.
const UNSURE: f64 = 0.3;

/// How one job ends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ProjectedEnd {
    pub(super) ends_s: f64,
    /// How much sooner and later, as parts of the time, the job's own steps and pace allow.
    pub(super) early: f64,
    pub(super) late: f64,
}

/// What is projected of one job; in the order of the view's jobs.
#[derive(Debug, Clone)]
struct Track {
    /// Steps left, or node-seconds for a job that is not measured.
    left: f64,
    pace: Pace,
    /// Steps made since the present.
    made: f64,
    /// Steps between two reports.
    report_every: f64,
    /// The signal at the present.
    signal: Signal,
    /// The steps left at the present with their interval, for a job whose end can be predicted.
    steps: Option<Interval>,
    /// Steps made since its last report when the projection began.
    unreported: f64,
    /// Seconds since its last report, until they were taken into account.
    since_report_s: f64,
    weight: f64,
    /// The job's mean share until now.
    mean_share_used: f64,
    used: f64,
    rate: f64,
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

impl Track {
    fn new(job: &JobView, now: Time, core_s: f64, one_core: f64, typical_work_s: Option<f64>) -> Track {
        let signal = job.signal;
        let position = signal.position();
        let reports = signal.reports.max(1) as f64;
        let since_report_s = signal.last.map_or(0.0, |l| now.since(l.at).as_secs_f64());
        let node_seconds = Pace::from_law(0.0, 1.0, job.usable.unwrap_or(1.0));
        let consumed = job.consumed_node_s.cpu;
        let (left, pace, steps) = match (signal.pace, job.steps_left()) {
            (Some(pace), Some(steps)) if is_believed(job) => (steps.mid, pace, Some(steps)),
            (Some(pace), _) => {
                let residual = length::residual(&signal, &job.history, job.claims, position);
                // Where nothing says how long a job is, it lasts as long again as it has lasted.
                (residual.map_or(position.max(1.0), |r| r.quantile(0.5)), pace, None)
            }
            (None, _) => {
                let by_history = length::residual_work(&job.history, core_s, consumed).map(|r| r.quantile(0.5));
                let typical = typical_work_s.map(|work| (work - consumed).max(0.25 * work));
                (by_history.or(typical).unwrap_or(consumed.max(1.0)), node_seconds, None)
            }
        };
        Track {
            left,
            pace,
            made: 0.0,
            report_every: match signal.pace {
                Some(_) if position > 0.0 => position / reports,
                Some(_) => 1.0,
                None => f64::INFINITY,
            },
            signal,
            steps,
            unreported: 0.0,
            since_report_s,
            weight: 0.0,
            mean_share_used: mean_share_used(job, now),
            used: 0.0,
            rate: 0.0,
            share_s: 0.0,
            ran_s: 0.0,
            sure: if pace.usable < 1.0 { 1.0 } else { one_core.max(SURELY_USABLE * mean_share_used(job, now)) },
            unsure_s: 0.0,
        }
    }

    fn cap(&self, job: &JobView, typical_usable: f64) -> f64 {
        // A job that was never seen short of its grant is believed to be like the others.
        let usable = if self.pace.usable >= 1.0 { typical_usable.max(self.mean_share_used) } else { self.pace.usable };
        usable.min(job.max.get())
    }

    /// The steps that were made since the last report are known only by their time.
    fn count_unreported(&mut self) {
        let made = (self.since_report_s * self.rate).min(self.report_every.max(1.0)).min(0.99 * self.left);
        if self.steps.is_some() && made > 0.0 {
            self.left -= made;
            self.unreported = made;
        }
        self.since_report_s = 0.0;
    }

    /// The signal after the steps made in the projection. The value follows the fitted curve.
    fn projected_signal(&self, now: Time) -> Signal {
        let mut signal = self.signal;
        if self.made <= 0.0 || !self.report_every.is_finite() {
            return signal;
        }
        // Only whole reports are seen, at the time at which each was made.
        let reports = ((self.made + self.unreported) / self.report_every).floor();
        if reports < 1.0 {
            return signal;
        }
        signal.reports = signal.reports.saturating_add(reports as u64);
        signal.step = signal.step.map(|step| step.saturating_add((reports * self.report_every).round() as u64));
        let since = (self.made + self.unreported) - reports * self.report_every;
        let since_s = if self.rate > 0.0 { since / self.rate } else { 0.0 };
        let at = Time(now.0.saturating_sub(Span::from_secs_f64(since_s).0));
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
    fn ends_s(&self, now_s: f64) -> f64 {
        if self.rate > 0.0 { now_s + self.left / self.rate } else { f64::INFINITY }
    }

    fn ending(&self, ends_s: f64) -> Option<ProjectedEnd> {
        let steps = self.steps?;
        let share = if self.ran_s > 0.0 { self.share_s / self.ran_s } else { 1.0 };
        let own = self.pace.time_s(steps, share);
        let mid = own.mid.max(1e-9);
        let part = |x: f64| if x.is_finite() { x.clamp(0.0, 10.0) } else { 10.0 };
        let unsure = UNSURE * self.unsure_s / self.ran_s.max(1e-9);
        let (early, late) = (part((mid - own.low) / mid), part((own.high - mid) / mid));
        Some(ProjectedEnd { ends_s, early, late: late.hypot(unsure) })
    }
}

/// The mean part of its node that a job has used since it started.
fn mean_share_used(job: &JobView, now: Time) -> f64 {
    match job.phase {
        Phase::Running { since, .. } => job.consumed_node_s.cpu / now.since(since).as_secs_f64().max(1e-3),
        Phase::Waiting => 0.0,
    }
}

/// What will be known of a job's speed after `seconds`: about one more window is measured in each. A rule that is
/// cautious because little is known now will be less so.
fn later_pace(pace: Pace, seconds: f64) -> Pace {
    let windows = f64::from(pace.windows.max(1));
    let seen = if seconds > 0.0 { 1.0 } else { pace.seen };
    Pace { variance: pace.variance.map(|v| v * windows / (windows + seconds)), seen, ..pace }
}

/// The whole state of a projection.
struct Projection<'a> {
    decider: Decider,
    view: View,
    tracks: Vec<Track>,
    began: Time,
    elapsed_s: f64,
    /// What jobs can use of a node, in the median of those of which it is known.
    typical_usable: f64,
    later: &'a [FutureJob],
    decisions: usize,
    endings: BTreeMap<JobId, ProjectedEnd>,
}

/// When the jobs of `view` end, where their steps and pace are known, if the jobs of `later` come.
pub(super) fn project(
    decider: &Decider,
    view: &View,
    arrivals: &Arrivals,
    later: &[FutureJob],
) -> BTreeMap<JobId, ProjectedEnd> {
    let core_s = view.nodes.first().map_or(1.0, |n| n.cores * n.speed);
    let one_core = view.nodes.first().map_or(1.0, |n| 1.0 / n.cores.max(1.0));
    let typical = arrivals.mean_work_s().or_else(|| mean_known_work_s(view));
    let tracks = view.jobs.iter().map(|job| Track::new(job, view.now, core_s, one_core, typical)).collect();
    let mut projection = Projection {
        decider: decider.clone(),
        view: view.clone(),
        tracks,
        began: view.now,
        elapsed_s: 0.0,
        typical_usable: typical_usable(view, arrivals),
        later,
        decisions: 0,
        endings: BTreeMap::new(),
    };
    projection.run();
    projection.endings
}

fn mean_known_work_s(view: &View) -> Option<f64> {
    let work = |j: &JobView| Some((j.signal.position() + j.steps_left()?.mid) * work_s(&j.signal.pace?));
    let works: Vec<f64> = view.jobs.iter().filter_map(work).collect();
    if works.is_empty() { None } else { Some(works.iter().sum::<f64>() / works.len() as f64) }
}

fn typical_usable(view: &View, arrivals: &Arrivals) -> f64 {
    let here = view.jobs.iter().filter_map(|j| j.signal.pace);
    let mut known: Vec<f64> =
        arrivals.paces().chain(here).map(|pace| pace.usable).filter(|usable| *usable < 1.0).collect();
    if known.len() < LEAST_KNOWN {
        return 1.0;
    }
    known.sort_by(f64::total_cmp);
    known[known.len() / 2]
}

impl Projection<'_> {
    fn run(&mut self) {
        // Several ends share a decision where there are more jobs than decisions.
        let stride = (self.view.jobs.len() + self.later.len()).div_ceil(MOST_DECISIONS).max(1);
        let pause_s = self.horizon_s() / MOST_DECISIONS as f64;
        loop {
            self.decide();
            let mut events = 0;
            let due_s = self
                .decider
                .due()
                .map_or(f64::INFINITY, |due| due.since(self.began).as_secs_f64().max(self.elapsed_s + pause_s));
            let can_decide = self.decisions < 2 * MOST_DECISIONS;
            let mut is_first = true;
            while events < stride || !can_decide {
                self.deal();
                if std::mem::take(&mut is_first) && self.decisions == 1 {
                    self.tracks.iter_mut().for_each(Track::count_unreported);
                }
                let Some(next_s) = self.next_event_s(if can_decide { due_s } else { f64::INFINITY }) else { return };
                self.advance(next_s);
                let ended = self.end_jobs();
                let arrived = self.admit_later();
                events += ended + arrived;
                if can_decide && next_s >= due_s {
                    break;
                }
            }
            if self.view.jobs.is_empty() {
                return;
            }
        }
    }

    /// About how long all work takes: the length of the projection.
    fn horizon_s(&self) -> f64 {
        let work: f64 = self.tracks.iter().map(|t| t.left * work_s(&t.pace)).sum();
        work / self.view.nodes.len().max(1) as f64
    }

    fn now(&self) -> Time {
        self.began + Span::from_secs_f64(self.elapsed_s)
    }

    fn decide(&mut self) {
        self.decisions += 1;
        let now = self.now();
        self.view.now = now;
        for (job, track) in self.view.jobs.iter_mut().zip(&self.tracks) {
            job.signal = track.projected_signal(now);
            if let Some(pace) = &mut job.signal.pace {
                *pace = later_pace(*pace, self.elapsed_s);
                // After two reports the job has shown its own speed.
                pace.is_guess &= track.made < 2.0 * track.report_every;
            }
        }
        for _ in 0..ROUNDS {
            let Some(plan) = self.decider.plan(&self.view) else { break };
            let places: BTreeMap<JobId, NodeId> =
                plan.starts.iter().map(|s| (s.job, s.node)).chain(plan.moves.iter().map(|m| (m.job, m.to))).collect();
            if places.is_empty() {
                break;
            }
            for job in &mut self.view.jobs {
                let Some(&node) = places.get(&job.id) else { continue };
                let attempt = match job.phase {
                    Phase::Running { attempt, .. } => attempt + 1,
                    Phase::Waiting => 1,
                };
                job.phase = Phase::Running { node, since: now, attempt };
            }
        }
        for (job, track) in self.view.jobs.iter().zip(&mut self.tracks) {
            track.weight = self.decider.target(job.id).map_or(0.0, |target| target.share.cpu.get());
        }
    }

    /// What each running job gets by the weights in force.
    fn deal(&mut self) {
        for node in &self.view.nodes {
            let here: Vec<usize> =
                (0..self.view.jobs.len()).filter(|&i| self.view.jobs[i].node() == Some(node.id)).collect();
            let weights: Vec<f64> = here.iter().map(|&i| self.tracks[i].weight).collect();
            let caps: Vec<f64> =
                here.iter().map(|&i| self.tracks[i].cap(&self.view.jobs[i], self.typical_usable)).collect();
            for (&i, used) in here.iter().zip(deal_by_weight(&weights, &caps, 1.0)) {
                let track = &mut self.tracks[i];
                track.used = used;
                // No law goes below the least share; there, half the share makes half the steps.
                track.rate = (used / LEAST_SHARE).min(1.0) / track.pace.step_s(used);
            }
        }
        for (job, track) in self.view.jobs.iter().zip(&mut self.tracks) {
            if job.phase == Phase::Waiting {
                (track.used, track.rate) = (0.0, 0.0);
            }
        }
    }

    /// The next end or arrival, or `due_s`; `None` if nothing more can happen.
    fn next_event_s(&self, due_s: f64) -> Option<f64> {
        let first_end = self.tracks.iter().map(|t| t.ends_s(self.elapsed_s)).fold(f64::INFINITY, f64::min);
        let arrival = self.later.first().map_or(f64::INFINITY, |later| later.in_s);
        // Once all real jobs have ended, later ones are of no interest.
        if self.tracks.iter().all(|t| t.steps.is_none()) || (first_end.is_infinite() && arrival.is_infinite()) {
            return None;
        }
        Some(first_end.min(arrival).min(due_s).max(self.elapsed_s))
    }

    fn advance(&mut self, to_s: f64) {
        let (from_s, seconds) = (self.elapsed_s, to_s - self.elapsed_s);
        self.elapsed_s = to_s;
        for (job, track) in self.view.jobs.iter_mut().zip(&mut self.tracks) {
            let made = (track.rate * seconds).min(track.left);
            // After ages a moment is rounded to whole seconds. A job that was to end at it has ended, whatever the
            // rounded difference left of it: otherwise its end would come again and again.
            track.left = if track.ends_s(from_s) <= to_s { 0.0 } else { track.left - made };
            track.made += made;
            track.share_s += track.used * seconds;
            track.ran_s += if track.rate > 0.0 { seconds } else { 0.0 };
            track.unsure_s += if track.used > track.sure + 1e-9 { seconds } else { 0.0 };
            job.consumed_node_s.cpu += track.used * seconds;
            job.known_left_s = job.known_left_s.map(|left| (left - track.used * seconds).max(0.0));
        }
        for node in &mut self.view.nodes {
            let here = self.view.jobs.iter().zip(&self.tracks).filter(|(j, _)| j.node() == Some(node.id));
            let used: f64 = here.map(|(_, t)| t.used).sum();
            node.idle_node_s = node.idle_node_s.map(|idle| idle + (1.0 - used).max(0.0) * seconds);
        }
    }

    /// Takes out the jobs that have ended; how many.
    fn end_jobs(&mut self) -> usize {
        let mut ended = 0;
        let mut i = 0;
        while i < self.tracks.len() {
            let track = &self.tracks[i];
            let is_over = track.rate > 0.0 && track.left <= track.rate * 1e-6;
            if !is_over {
                i += 1;
                continue;
            }
            let (job, track) = (self.view.jobs.remove(i), self.tracks.remove(i));
            if let Some(ending) = track.ending(self.elapsed_s) {
                self.endings.insert(job.id, ending);
            }
            self.view.jobs.iter_mut().for_each(|j| j.waits_for.retain(|id| *id != job.id));
            ended += 1;
        }
        ended
    }

    /// Adds the expected jobs whose time has come; how many.
    fn admit_later(&mut self) -> usize {
        let due = self.later.iter().take_while(|l| l.in_s <= self.elapsed_s).count();
        let (now, rest) = self.later.split_at(due);
        self.later = rest;
        for later in now {
            let mut track = Track::new(&later.job, later.job.arrived, 1.0, 1.0, None);
            (track.steps, track.left, track.report_every) = (None, later.steps, 1.0);
            self.view.jobs.push(later.job.clone());
            self.tracks.push(track);
        }
        due
    }
}
