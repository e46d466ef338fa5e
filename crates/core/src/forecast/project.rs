//! One projection: a view and a decider, played forward until the jobs have ended.
//!
//! **Cost.** At most [`MOST_DECISIONS`] decisions, however many jobs there are. Where there are more
//! jobs than that, several end between two decisions, and the rest is dealt by the weights in force.

use super::arrivals::{Arrivals, FutureJob, work_s};
use super::scenario::Scenario;
use super::track::{ProjectedEnd, Track, Typical};
use crate::deal::deal_by_weight;
use crate::decider::Decider;
use crate::model::{JobId, NodeId, Span, Time};
use crate::view::{JobView, Phase, View};
use std::collections::BTreeMap;

/// Decisions of one projection.
pub(super) const MOST_DECISIONS: usize = 32;

/// Decisions at one moment: starts change the view, which may change shares.
const ROUNDS: usize = 3;

/// Minimum number of measured jobs before their median is used for unmeasured ones.
const LEAST_KNOWN: usize = 3;

/// What a projection needs to know beside the jobs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub(super) arrivals: &'a Arrivals,
    /// The part of what jobs are granted that they get: other programs take the rest.
    pub(super) available: f64,
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
    typical: Typical,
    available: f64,
    later: &'a [FutureJob],
    decisions: usize,
    endings: BTreeMap<JobId, ProjectedEnd>,
}

/// When the jobs of `view` end, where their steps and pace are known, if the jobs of `later` come.
pub(super) fn project(
    decider: &Decider,
    view: &View,
    around: Surroundings<'_>,
    later: &[FutureJob],
    scenario: Scenario,
) -> BTreeMap<JobId, ProjectedEnd> {
    let typical = typical(view, around);
    let mut projection = Projection {
        decider: decider.clone(),
        view: view.clone(),
        tracks: view.jobs.iter().map(|job| Track::new(job, view.now, &typical, scenario)).collect(),
        began: view.now,
        elapsed_s: 0.0,
        typical_usable: typical_usable(view, around.arrivals),
        typical,
        available: around.available,
        later,
        decisions: 0,
        endings: BTreeMap::new(),
    };
    projection.run();
    projection.endings
}

/// What jobs of which nothing is known are like.
fn typical(view: &View, around: Surroundings<'_>) -> Typical {
    let measured = || view.jobs.iter().filter(|j| j.signal.pace.is_some());
    let work = |j: &JobView| Some((j.signal.position() + j.steps_left()?.mid) * work_s(&j.signal.pace?));
    let report = |j: &JobView| {
        let per_report = j.signal.position() / j.signal.reports.max(1) as f64;
        Some(per_report * work_s(&j.signal.pace?)).filter(|work| *work > 0.0)
    };
    let mean = |works: Vec<f64>| match works.len() {
        0 => None,
        count => Some(works.iter().sum::<f64>() / count as f64),
    };
    Typical {
        work_node_s: around.arrivals.mean_work_s().or_else(|| mean(measured().filter_map(work).collect())),
        report_node_s: mean(measured().filter_map(report).collect()),
        available: around.available,
        core_s: view.nodes.first().map_or(1.0, |n| n.cores * n.speed),
        one_core: view.nodes.first().map_or(1.0, |n| 1.0 / n.cores.max(1.0)),
    }
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
            job.signal = track.signal(now);
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
                self.tracks[i].serve(used);
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
            track.advance(from_s, to_s);
            let consumed_node_s = track.used * self.available * seconds;
            job.consumed_node_s.cpu += consumed_node_s;
            job.known_left_s = job.known_left_s.map(|left| (left - consumed_node_s).max(0.0));
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
            if !self.tracks[i].is_over() {
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
            self.tracks.push(Track::later(&later.job, later.steps, &self.typical));
            self.view.jobs.push(later.job.clone());
        }
        due
    }
}
