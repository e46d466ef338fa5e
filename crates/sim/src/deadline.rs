//! Which elastic GPU jobs are promised their deadline, and how many GPUs has each of them now?
//!
//! **Problem.** A user gives a deadline instead of a number of GPUs. The job can run on several counts of
//! GPUs, and its speed grows more slowly than the count. The cluster must promise as many deadlines as it
//! can keep, and must keep every promise.
//!
//! **Approach.** Every decision is a pure function of the present: [`qos::Planner`] plans each job's GPUs
//! until its deadline on one [`timeline::Timeline`] of free GPUs, gives away what the plan leaves free, and
//! never lets a new job into the plan that would break a promise. [`replay::replay`] runs a trace of jobs
//! under it and under the schedulers it is compared with: earliest deadline first, Tiresias, and
//! ElasticFlow (D. Gu et al., ASPLOS 2023).
//!
//! **Terms and units.** Times are whole seconds of the trace's clock. A *level* is a count of GPUs with the
//! job's speed on it in iterations per second. *GPU time* is GPUs × seconds. A job is *promised* its
//! deadline (admitted), or *provisional* (planned, but a cheaper job may take its place), or *spare* (runs
//! only on GPUs that no plan needs). A *restart* is the time a job loses when its GPUs change.
//!
//! **Properties.** Never more GPUs than exist; a gang has all of its GPUs or none; counts are powers of two,
//! so that gangs always pack into nodes; the same trace gives the same bytes.

pub mod baseline;
pub mod data;
pub mod elasticflow;
pub mod learned;
pub mod qos;
pub mod replay;
pub mod report;
pub mod timeline;

use std::sync::Arc;

/// One count of GPUs and the speed of a job on it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Level {
    pub gpus: u32,
    /// Iterations per second.
    pub speed: f64,
}

/// One job of a trace, with everything that is true about it.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuJob {
    pub submitted_s: i64,
    pub deadline_s: i64,
    pub iterations: f64,
    /// Model and batch size: jobs of one kind have one speed table.
    pub kind: Kind,
    /// What the user asked for; only schedulers without elasticity use it.
    pub requested_gpus: u32,
    /// The job's time on the requested GPUs.
    pub duration_s: i64,
    /// The measured levels, ascending in GPUs.
    pub levels: Arc<[Level]>,
}

/// What jobs with the same speed have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    pub model: String,
    pub batch: u32,
}

impl GpuJob {
    /// Whether the job would make its deadline with the whole cluster to itself.
    pub fn is_feasible_alone(&self, gpus: u32) -> bool {
        let window_s = (self.deadline_s - self.submitted_s) as f64;
        self.levels.iter().any(|l| l.gpus <= gpus && self.iterations <= l.speed * window_s)
    }
}

/// A cluster of equal nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cluster {
    pub nodes: u32,
    pub gpus_per_node: u32,
}

impl Cluster {
    pub fn gpus(&self) -> u32 {
        self.nodes * self.gpus_per_node
    }

    /// Seconds that a job loses when it starts on `gpus` GPUs or changes to them: the costs that
    /// ElasticFlow's simulator charges, which are higher in clusters of 256 GPUs and more.
    pub fn restart_s(&self, gpus: u32) -> i64 {
        let base = if self.gpus() >= 256 { 7 } else { 2 };
        base + 2 * (i64::from(gpus.max(1).ilog2()) + 1)
    }
}

/// The levels worth using: each is faster than every level with fewer GPUs.
pub fn useful_levels(levels: &[Level], most_gpus: u32) -> Vec<Level> {
    let mut useful: Vec<Level> = vec![];
    for level in levels.iter().filter(|l| l.gpus <= most_gpus && l.speed.is_finite() && l.speed > 0.0) {
        if useful.last().is_none_or(|last| level.speed > last.speed) {
            useful.push(*level);
        }
    }
    useful
}

/// The levels on the upper concave hull of speed over GPUs. Between two of them, running part of the time
/// on each needs less GPU time than any level below the hull.
pub fn efficient_levels(useful: &[Level]) -> Vec<Level> {
    let slope = |a: Level, b: Level| (b.speed - a.speed) / f64::from(b.gpus - a.gpus);
    let mut hull = vec![Level { gpus: 0, speed: 0.0 }];
    for &level in useful {
        while hull.len() >= 2 && slope(hull[hull.len() - 2], hull[hull.len() - 1]) <= slope(hull[hull.len() - 1], level)
        {
            hull.pop();
        }
        hull.push(level);
    }
    hull.split_off(1)
}
