//! Runs a trace of elastic GPU jobs under one scheduler.
//!
//! **Approach.** Between two events every job works at the constant speed of its GPUs, so the clock jumps
//! from event to event: a submission, the end of a job, a change that the scheduler planned. A job that
//! changes its GPUs loses [`Cluster::restart_s`] seconds. What the scheduler knows is a [`JobKnowledge`];
//! progress always comes from the true speeds.
//!
//! **Properties.** The replay checks every decision: never more GPUs than exist, and powers of two
//! only, so that gangs pack into nodes.

use super::learned::{Beliefs, REPORT_S};
use super::qos::{Decision, JobView, Planner};
use super::{Cluster, GpuJob, Level, efficient_levels, useful_levels};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the scheduler knows of a job at its submission, besides its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobKnowledge {
    /// The speed table and the number of iterations.
    Tables,
    /// The model and the batch size only; speeds and lengths are learned.
    Nothing,
}

/// What became of the jobs under one scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct Outcome {
    /// Jobs that ended by their deadline.
    pub met: usize,
    /// `met` divided by all jobs.
    pub met_ratio: f64,
    /// Jobs that were promised their deadline.
    pub admitted: usize,
    pub refused: usize,
    /// Promised jobs that missed their deadline.
    pub admitted_missed: usize,
    /// Such jobs whose promise rested on a speed or a length that proved wrong.
    pub missed_by_prediction: usize,
}

impl Outcome {
    pub(super) fn with_ratio(mut self, jobs: usize) -> Outcome {
        self.met_ratio = self.met as f64 / jobs.max(1) as f64;
        self
    }
}

/// A running or waiting job.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) id: usize,
    pub(super) left: f64,
    pub(super) gpus: u32,
    pub(super) restart_left_s: f64,
    /// Seconds of work on the present GPUs.
    pub(super) worked_s: f64,
    /// When a scheduler that leaves restarts out of its plan believes that the job ends.
    pub(super) planned_end_s: Option<i64>,
    /// When the job ended.
    pub(super) ended_s: Option<i64>,
}

impl Run {
    pub(super) fn new(id: usize, job: &GpuJob) -> Run {
        Run {
            id,
            left: job.iterations,
            gpus: 0,
            restart_left_s: 0.0,
            worked_s: 0.0,
            planned_end_s: None,
            ended_s: None,
        }
    }

    pub(super) fn speed(&self, job: &GpuJob) -> f64 {
        job.levels.iter().find(|l| l.gpus == self.gpus).map_or(0.0, |l| l.speed)
    }

    /// When the job ends if its GPUs stay as they are.
    pub(super) fn end_s(&self, job: &GpuJob, now_s: i64) -> Option<i64> {
        let speed = self.speed(job);
        (speed > 0.0).then(|| now_s + (self.restart_left_s + self.left / speed - 1e-6).ceil().max(0.0) as i64)
    }

    pub(super) fn advance(&mut self, job: &GpuJob, over_s: i64) {
        let idle_s = self.restart_left_s.min(over_s as f64);
        self.restart_left_s -= idle_s;
        self.worked_s += over_s as f64 - idle_s;
        self.left -= self.speed(job) * (over_s as f64 - idle_s);
    }
}

/// Runs `jobs` (in order of submission) under our rule, with a decision at every event.
pub fn replay(jobs: &[GpuJob], cluster: Cluster, knowledge: JobKnowledge) -> Outcome {
    replay_apart(jobs, cluster, knowledge, 0)
}

/// The same with decisions at least `apart_s` seconds apart; an event in between waits. The planner does not
/// know about the wait, so its promises are certain only if `apart_s` is zero.
pub fn replay_apart(jobs: &[GpuJob], cluster: Cluster, knowledge: JobKnowledge, apart_s: i64) -> Outcome {
    let mut planner = Planner::new(cluster);
    let mut beliefs = Beliefs::default();
    let mut tables: BTreeMap<&super::Kind, [Arc<[Level]>; 2]> = BTreeMap::new();
    for job in jobs {
        tables.entry(&job.kind).or_insert_with(|| {
            let useful = useful_levels(&job.levels, cluster.gpus());
            [useful.clone().into(), efficient_levels(&useful).into()]
        });
    }
    let mut outcome = Outcome::default();
    let mut promised = vec![false; jobs.len()];
    // Promised jobs of which a speed or the length was predicted wrongly.
    let mut misjudged = vec![false; jobs.len()];
    let mut runs: Vec<Run> = vec![];
    let mut next = 0;
    let mut wake_s: Option<i64> = None;
    let mut now_s = jobs.first().map_or(0, |j| j.submitted_s - apart_s);
    loop {
        let arrival_s = jobs.get(next).map(|j| j.submitted_s);
        let end_s = runs.iter().filter_map(|r| r.end_s(&jobs[r.id], now_s)).min();
        let Some(event_s) = [arrival_s, end_s, wake_s].into_iter().flatten().min() else { break };
        let (since_s, event_s) = (now_s, event_s.max(now_s + apart_s));
        now_s = event_s;
        for run in &mut runs {
            let job = &jobs[run.id];
            run.ended_s = run.end_s(job, since_s).filter(|end_s| *end_s <= now_s);
            run.advance(job, now_s - since_s);
            if knowledge == JobKnowledge::Nothing
                && run.worked_s >= REPORT_S
                && beliefs.lacks(run.id, &job.kind, run.gpus)
            {
                beliefs.report(run.id, job, run.gpus, run.speed(job));
            }
        }
        runs.retain(|run| {
            let Some(ended_s) = run.ended_s else { return true };
            let in_time = ended_s <= jobs[run.id].deadline_s;
            outcome.met += usize::from(in_time);
            if promised[run.id] && !in_time {
                outcome.admitted_missed += 1;
                outcome.missed_by_prediction += usize::from(misjudged[run.id]);
            }
            false
        });
        while let Some(job) = jobs.get(next).filter(|j| j.submitted_s <= now_s) {
            runs.push(Run::new(next, job));
            next += 1;
        }
        let undecided = runs.iter().any(|r| jobs[r.id].deadline_s >= now_s);
        if next == jobs.len() && !undecided {
            let late = |r: &&Run| promised[r.id];
            outcome.admitted_missed += runs.iter().filter(late).count();
            outcome.missed_by_prediction += runs.iter().filter(late).filter(|r| misjudged[r.id]).count();
            break;
        }
        let mut wrong = vec![false; runs.len()];
        let mut view = |(i, run): (usize, &Run)| {
            let job = &jobs[run.id];
            let (left, [useful, efficient]) = match knowledge {
                JobKnowledge::Tables => (Some(run.left), tables[&job.kind].clone()),
                JobKnowledge::Nothing => {
                    let counts = job.levels.iter().map(|l| l.gpus).filter(|g| *g <= cluster.gpus());
                    let belief = beliefs.belief(run.id, &job.kind, counts);
                    let done = job.iterations - run.left;
                    wrong[i] = belief.is_wrong(job.iterations, &tables[&job.kind][0]);
                    (belief.iterations.map(|all| (all - done).max(1.0)), [belief.useful, belief.efficient])
                }
            };
            let restart_left_s = run.restart_left_s.ceil() as i64;
            JobView { id: run.id, deadline_s: job.deadline_s, left, useful, efficient, gpus: run.gpus, restart_left_s }
        };
        let views: Vec<JobView> = runs.iter().enumerate().map(&mut view).collect();
        let decision = planner.decide(now_s, &views);
        for (run, is_wrong) in runs.iter().zip(wrong) {
            promised[run.id] |= planner.is_promised(run.id);
            misjudged[run.id] |= promised[run.id] && is_wrong;
        }
        apply(&mut runs, &decision, cluster);
        let report_s = |r: &Run| now_s + (r.restart_left_s + REPORT_S - r.worked_s).ceil() as i64;
        let news =
            runs.iter().filter(|r| knowledge == JobKnowledge::Nothing && beliefs.lacks(r.id, &jobs[r.id].kind, r.gpus));
        wake_s = news.map(report_s).chain(decision.wake_s).min();
    }
    outcome.admitted = promised.iter().filter(|p| **p).count();
    outcome.refused = jobs.len() - outcome.admitted;
    outcome.with_ratio(jobs.len())
}

fn apply(runs: &mut [Run], decision: &Decision, cluster: Cluster) {
    let total: u32 = decision.gpus.values().sum();
    assert!(total <= cluster.gpus(), "{total} GPUs given of {}", cluster.gpus());
    for run in runs {
        let gpus = decision.gpus.get(&run.id).copied().unwrap_or(0);
        if gpus == run.gpus {
            continue;
        }
        assert!(gpus == 0 || gpus.is_power_of_two(), "a gang of {gpus} GPUs does not pack");
        run.gpus = gpus;
        run.worked_s = 0.0;
        run.restart_left_s = if gpus > 0 { cluster.restart_s(gpus) as f64 } else { 0.0 };
    }
}
