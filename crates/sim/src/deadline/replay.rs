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
use super::{Cluster, GpuJob, Kind, Level, efficient_levels, useful_levels};
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
    let mut replay = Replay::new(jobs, cluster, knowledge);
    let mut wake_s: Option<i64> = None;
    let mut now_s = jobs.first().map_or(0, |j| j.submitted_s - apart_s);
    while let Some(event_s) = replay.next_event_s(now_s).into_iter().chain(wake_s).min() {
        let event_s = event_s.max(now_s + apart_s);
        replay.advance(now_s, event_s);
        now_s = event_s;
        replay.remove_ended();
        replay.add_submitted(now_s);
        if replay.is_settled(now_s) {
            replay.count_late_runs();
            break;
        }
        wake_s = replay.decide(now_s);
    }
    replay.outcome()
}

/// A trace under way.
struct Replay<'a> {
    jobs: &'a [GpuJob],
    cluster: Cluster,
    knowledge: JobKnowledge,
    planner: Planner,
    beliefs: Beliefs,
    /// The useful levels of each kind of job, and those of them that are efficient.
    tables: BTreeMap<&'a Kind, [Arc<[Level]>; 2]>,
    runs: Vec<Run>,
    /// The number of jobs that were submitted.
    submitted: usize,
    promised: Vec<bool>,
    /// Promised jobs of which a speed or the length was predicted wrongly.
    misjudged: Vec<bool>,
    outcome: Outcome,
}

impl<'a> Replay<'a> {
    fn new(jobs: &'a [GpuJob], cluster: Cluster, knowledge: JobKnowledge) -> Replay<'a> {
        let mut tables: BTreeMap<&Kind, [Arc<[Level]>; 2]> = BTreeMap::new();
        for job in jobs {
            tables.entry(&job.kind).or_insert_with(|| {
                let useful = useful_levels(&job.levels, cluster.gpus());
                [useful.clone().into(), efficient_levels(&useful).into()]
            });
        }
        Replay {
            jobs,
            cluster,
            knowledge,
            planner: Planner::new(cluster),
            beliefs: Beliefs::default(),
            tables,
            runs: vec![],
            submitted: 0,
            promised: vec![false; jobs.len()],
            misjudged: vec![false; jobs.len()],
            outcome: Outcome::default(),
        }
    }

    /// The next submission or end of a job.
    fn next_event_s(&self, now_s: i64) -> Option<i64> {
        let arrival_s = self.jobs.get(self.submitted).map(|job| job.submitted_s);
        let ends_s = self.runs.iter().filter_map(|run| run.end_s(&self.jobs[run.id], now_s));
        ends_s.chain(arrival_s).min()
    }

    /// All jobs work from `since_s` to `now_s`, and speeds that were not known before are learned.
    fn advance(&mut self, since_s: i64, now_s: i64) {
        for run in &mut self.runs {
            let job = &self.jobs[run.id];
            run.ended_s = run.end_s(job, since_s).filter(|end_s| *end_s <= now_s);
            run.advance(job, now_s - since_s);
            if self.knowledge == JobKnowledge::Nothing
                && run.worked_s >= REPORT_S
                && self.beliefs.lacks(run.id, &job.kind, run.gpus)
            {
                self.beliefs.report(run.id, job, run.gpus, run.speed(job));
            }
        }
    }

    fn remove_ended(&mut self) {
        self.runs.retain(|run| {
            let Some(ended_s) = run.ended_s else { return true };
            let in_time = ended_s <= self.jobs[run.id].deadline_s;
            self.outcome.met += usize::from(in_time);
            if self.promised[run.id] && !in_time {
                self.outcome.admitted_missed += 1;
                self.outcome.missed_by_prediction += usize::from(self.misjudged[run.id]);
            }
            false
        });
    }

    fn add_submitted(&mut self, now_s: i64) {
        while let Some(job) = self.jobs.get(self.submitted).filter(|job| job.submitted_s <= now_s) {
            self.runs.push(Run::new(self.submitted, job));
            self.submitted += 1;
        }
    }

    /// Whether all jobs were submitted and every one that still runs has missed its deadline.
    fn is_settled(&self, now_s: i64) -> bool {
        self.submitted == self.jobs.len() && self.runs.iter().all(|run| self.jobs[run.id].deadline_s < now_s)
    }

    fn count_late_runs(&mut self) {
        for run in self.runs.iter().filter(|run| self.promised[run.id]) {
            self.outcome.admitted_missed += 1;
            self.outcome.missed_by_prediction += usize::from(self.misjudged[run.id]);
        }
    }

    /// Decides about all jobs; when the next decision is due without an event.
    fn decide(&mut self, now_s: i64) -> Option<i64> {
        let (views, are_wrong): (Vec<JobView>, Vec<bool>) = (0..self.runs.len()).map(|index| self.view(index)).unzip();
        let decision = self.planner.decide(now_s, &views);
        for (run, is_wrong) in self.runs.iter().zip(are_wrong) {
            self.promised[run.id] |= self.planner.is_promised(run.id);
            self.misjudged[run.id] |= self.promised[run.id] && is_wrong;
        }
        apply(&mut self.runs, &decision, self.cluster);
        let is_learning = |run: &&Run| {
            self.knowledge == JobKnowledge::Nothing && self.beliefs.lacks(run.id, &self.jobs[run.id].kind, run.gpus)
        };
        let report_s = |run: &Run| now_s + (run.restart_left_s + REPORT_S - run.worked_s).ceil() as i64;
        self.runs.iter().filter(is_learning).map(report_s).chain(decision.wake_s).min()
    }

    /// A job as the planner sees it, and whether what is believed of it is wrong.
    fn view(&mut self, index: usize) -> (JobView, bool) {
        let run = &self.runs[index];
        let job = &self.jobs[run.id];
        let table = &self.tables[&job.kind];
        let (left, [useful, efficient], is_wrong) = match self.knowledge {
            JobKnowledge::Tables => (Some(run.left), table.clone(), false),
            JobKnowledge::Nothing => {
                let counts = job.levels.iter().map(|l| l.gpus).filter(|g| *g <= self.cluster.gpus());
                let belief = self.beliefs.belief(run.id, &job.kind, counts);
                let done = job.iterations - run.left;
                let is_wrong = belief.is_wrong(job.iterations, &table[0]);
                let left = belief.iterations.map(|all| (all - done).max(1.0));
                (left, [belief.useful, belief.efficient], is_wrong)
            }
        };
        let restart_left_s = run.restart_left_s.ceil() as i64;
        let (id, deadline_s, gpus) = (run.id, job.deadline_s, run.gpus);
        (JobView { id, deadline_s, left, useful, efficient, gpus, restart_left_s }, is_wrong)
    }

    fn outcome(mut self) -> Outcome {
        self.outcome.admitted = self.promised.iter().filter(|p| **p).count();
        self.outcome.refused = self.jobs.len() - self.outcome.admitted;
        self.outcome.with_ratio(self.jobs.len())
    }
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
