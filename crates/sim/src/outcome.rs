//! What became of a world: when each job ended, where it was, and the figures people compare.

use crate::world::{Node, SimJob};
use gainshare_core::model::Time;
use gainshare_core::plan::MoveReason;

/// The result of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub jobs: Vec<JobOutcome>,
    /// Loss and share over time, one for each job; empty unless recorded.
    pub courses: Vec<Course>,
    pub migrations: Vec<Migration>,
    /// How many events it took.
    pub events: u64,
    /// How many plans were carried out.
    pub plans: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct JobOutcome {
    pub name: String,
    pub arrival: Time,
    pub finished: Option<Time>,
    /// Where it was, in order.
    pub stays: Vec<Stay>,
    /// When it reached parts of its loss reduction.
    pub marks: Vec<Mark>,
    /// Node-seconds of CPU.
    pub consumed_node_s: f64,
    /// The integral of what was reserved for it (its request, or what was promised for its deadline), and
    /// what it used of that. CPU beyond a reservation belongs to no job.
    pub allocated_node_s: f64,
    pub used_of_allocated_node_s: f64,
    /// The last moment at which its deadline counts as met.
    pub deadline: Option<Time>,
    /// Seconds it would have taken alone on the best node, start included.
    pub alone_s: f64,
}

/// A part of a job's loss reduction, the work it takes and when it was reached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mark {
    pub part: f64,
    pub work_core_s: f64,
    pub at: Option<Time>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stay {
    pub node: usize,
    pub from: Time,
    pub to: Time,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Course {
    /// (seconds, loss) at each report.
    pub loss: Vec<(f64, f64)>,
    /// (seconds, part of the node used from then on).
    pub share: Vec<(f64, f64)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Migration {
    pub job: usize,
    pub at: Time,
    pub why: MoveReason,
}

/// Parts of the loss reduction whose times are kept: quality of 90 % stands for "usable", 99 % for "converged".
const PARTS: [f64; 2] = [0.9, 0.99];

impl JobOutcome {
    pub(crate) fn new(job: &SimJob, nodes: &[Node]) -> JobOutcome {
        let span = job.work_core_s - job.startup_core_s;
        let mark = |part| Mark { part, work_core_s: job.startup_core_s + job.curve.work_for(part) * span, at: None };
        let alone = nodes.iter().map(|n| job.alone_s(n)).fold(f64::INFINITY, f64::min);
        JobOutcome {
            name: job.name.clone(),
            arrival: job.arrival,
            finished: None,
            stays: vec![],
            marks: PARTS.map(mark).to_vec(),
            consumed_node_s: 0.0,
            allocated_node_s: 0.0,
            used_of_allocated_node_s: 0.0,
            deadline: job.deadline.map(|d| d.latest()),
            alone_s: alone + job.start.as_secs_f64(),
        }
    }

    /// Seconds from arrival to end.
    pub fn completion_s(&self) -> f64 {
        self.finished.map_or(f64::NAN, |f| f.since(self.arrival).as_secs_f64())
    }

    /// Whether it ended by its deadline; `None` if it has none.
    pub fn met(&self) -> Option<bool> {
        self.deadline.map(|deadline| self.finished.is_some_and(|f| f <= deadline))
    }

    /// Seconds from arrival until `part` of the loss reduction was made.
    pub fn quality_s(&self, part: f64) -> f64 {
        let mark = self.marks.iter().find(|m| m.part == part).and_then(|m| m.at);
        mark.map_or(f64::NAN, |at| at.since(self.arrival).as_secs_f64())
    }
}

impl Outcome {
    pub fn completions_s(&self) -> impl Iterator<Item = f64> {
        self.jobs.iter().map(JobOutcome::completion_s)
    }

    pub fn mean_completion_s(&self) -> f64 {
        mean(self.completions_s())
    }

    /// When the last job ended, from time zero.
    pub fn makespan_s(&self) -> f64 {
        self.jobs.iter().filter_map(|j| j.finished).max().unwrap_or_default().as_secs_f64()
    }

    /// The part of all jobs with a deadline that met it; `None` if no job has one.
    pub fn deadlines_met(&self) -> Option<f64> {
        let met: Vec<bool> = self.jobs.iter().filter_map(JobOutcome::met).collect();
        (!met.is_empty()).then(|| met.iter().filter(|m| **m).count() as f64 / met.len() as f64)
    }

    /// How much of the reserved CPU was used, 0…1; 1 where nothing is reserved.
    pub fn utilisation(&self) -> f64 {
        let sum = |f: fn(&JobOutcome) -> f64| self.jobs.iter().map(f).sum::<f64>();
        let allocated = sum(|j| j.allocated_node_s);
        if allocated > 0.0 { sum(|j| j.used_of_allocated_node_s) / allocated } else { 1.0 }
    }

    pub fn mean_quality_s(&self, part: f64) -> f64 {
        mean(self.jobs.iter().map(|j| j.quality_s(part)))
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0usize), |(s, n), v| (s + v, n + 1));
    if n == 0 { 0.0 } else { sum / n as f64 }
}
