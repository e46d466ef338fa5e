//! What the tasks of one job were measured to use, and what that means.

use super::Elastic;
use crate::model::{Span, Time};
use crate::signal::parameter_server::{Configuration, SpeedModel, StepCost};
use crate::tasks::{TaskGroup, TaskId, TaskReason, TaskRole, TaskTarget, TrainingMode};
use serde::{Deserialize, Serialize};

/// What the rule remembers of a running job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobMemory {
    pub(crate) model: SpeedModel,
    /// Where the current measurement began.
    begun: Option<Snapshot>,
    /// The last whole measurement, if the tasks are still as they were then.
    pub(crate) load: Option<Load>,
    /// Measurements in a row in which the job had far too much.
    pub(crate) idle_rounds: u32,
    /// A change whose effect is still to be judged.
    pub(crate) trial: Option<Trial>,
    /// After a change that brought nothing the job is left alone until then.
    pub(crate) rest_until: Time,
}

/// The counters of a job at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Snapshot {
    at: Time,
    steps: f64,
    /// Task, its cores and its CPU time.
    tasks: Vec<(TaskId, f64, f64)>,
}

/// A change that is on trial.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Trial {
    pub(crate) before: Vec<TaskTarget>,
    pub(crate) speed_before: f64,
    /// The smallest speed with which the change may stay.
    pub(crate) speed_wanted: f64,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) steps_per_s: f64,
    pub(crate) tasks: Vec<TaskLoad>,
}

/// The use of one task, in cores.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct TaskLoad {
    pub(crate) id: TaskId,
    pub(crate) cores: f64,
    #[serde(rename = "used")]
    pub(crate) used_cores: f64,
}

impl TaskLoad {
    pub(crate) fn busy(&self) -> f64 {
        if self.cores > 0.0 { self.used_cores / self.cores } else { 1.0 }
    }
}

impl JobMemory {
    pub(crate) fn new(mode: TrainingMode) -> JobMemory {
        JobMemory {
            model: SpeedModel::new(mode),
            begun: None,
            load: None,
            idle_rounds: 0,
            trial: None,
            rest_until: Time::ZERO,
        }
    }

    /// Takes in the counters. A measurement lasts one interval in which the tasks do not change.
    pub(crate) fn measure(&mut self, numbers: &Elastic, now: Time, group: &TaskGroup) {
        let tasks = group.tasks.iter().map(|task| (task.id, task.cores, task.cpu_s)).collect();
        self.measure_tasks(numbers.interval, now, group.steps, tasks);
    }

    /// The same from the counters alone: each task, what it has, and its CPU time.
    pub(crate) fn measure_tasks(&mut self, interval: Span, now: Time, steps: f64, tasks: Vec<(TaskId, f64, f64)>) {
        let snapshot = Snapshot { at: now, steps, tasks };
        let same = |a: &Snapshot, b: &Snapshot| {
            a.tasks.len() == b.tasks.len()
                && a.tasks.iter().zip(&b.tasks).all(|(x, y)| x.0 == y.0 && (x.1 - y.1).abs() < 1e-9)
        };
        let Some(begun) = self.begun.as_ref().filter(|begun| same(begun, &snapshot)) else {
            (self.begun, self.load) = (Some(snapshot), None);
            return;
        };
        let elapsed: Span = now.since(begun.at);
        if elapsed < interval {
            return;
        }
        let seconds = elapsed.as_secs_f64();
        let used = |(old, new): (&(TaskId, f64, f64), &(TaskId, f64, f64))| TaskLoad {
            id: new.0,
            cores: new.1,
            used_cores: ((new.2 - old.2) / seconds).max(0.0),
        };
        let steps = snapshot.steps - begun.steps;
        let load = Load {
            steps_per_s: (steps / seconds).max(0.0),
            tasks: begun.tasks.iter().zip(&snapshot.tasks).map(used).collect(),
        };
        if steps > 0.0
            && let Some(configuration) = load.configuration(&[])
        {
            let cpu = |role| load.of_role(role).map(|task| task.used_cores).sum::<f64>() * seconds / steps;
            let cost = StepCost { workers_cpu_s: cpu(TaskRole::Worker), servers_cpu_s: cpu(TaskRole::Server) };
            self.model.observe(configuration, load.steps_per_s, cost);
        }
        (self.begun, self.load) = (Some(snapshot), Some(load));
    }
}

impl Load {
    pub(crate) fn of_role(&self, role: TaskRole) -> impl Iterator<Item = &TaskLoad> {
        self.tasks.iter().filter(move |task| task.id.role == role)
    }

    /// The mean of busy over the tasks of a role.
    pub(crate) fn busy(&self, role: TaskRole) -> f64 {
        let count = self.of_role(role).count().max(1) as f64;
        self.of_role(role).map(TaskLoad::busy).sum::<f64>() / count
    }

    /// The configuration with these targets, or as it was measured if there are none.
    pub(crate) fn configuration(&self, targets: &[TaskTarget]) -> Option<Configuration> {
        let cores_of = |task: &TaskLoad| targets.iter().find(|t| t.id == task.id).map_or(task.cores, |t| t.cores);
        let servers = self.of_role(TaskRole::Server).count();
        let total: f64 = self.of_role(TaskRole::Server).map(|task| task.used_cores).sum();
        // Servers that use nothing share the load equally, for want of better knowledge.
        let load = |task: &TaskLoad| if total > 0.0 { task.used_cores / total } else { 1.0 / servers as f64 };
        let pressure =
            self.of_role(TaskRole::Server).map(|task| load(task) / cores_of(task).max(1e-6)).fold(0.0, f64::max);
        let workers: Vec<f64> = if targets.is_empty() {
            self.of_role(TaskRole::Worker).map(|task| task.cores).collect()
        } else {
            targets.iter().filter(|t| t.id.role == TaskRole::Worker).map(|t| t.cores).collect()
        };
        if workers.is_empty() || servers == 0 {
            return None;
        }
        let worker_cores = workers.iter().sum::<f64>() / workers.len() as f64;
        Some(Configuration { servers: servers as u32, workers: workers.len() as u32, worker_cores, pressure })
    }

    /// What holds the job back.
    pub(crate) fn diagnose(&self, numbers: &Elastic) -> TaskReason {
        let mut servers: Vec<&TaskLoad> = self.of_role(TaskRole::Server).collect();
        servers.sort_by(|a, b| b.busy().total_cmp(&a.busy()));
        let workers = self.busy(TaskRole::Worker);
        match servers[..] {
            // Equals would be equally busy; a third less is more than noise.
            [hot, next, ..] if hot.busy() >= numbers.hot && next.busy() < 0.67 * hot.busy() => {
                TaskReason::HotServer { index: hot.id.index }
            }
            [hot, ..] if hot.busy() >= numbers.hot && workers < hot.busy() => TaskReason::ServersStarved,
            _ if workers >= numbers.hot => TaskReason::WorkersStarved,
            [hot, ..] if hot.busy() < numbers.idle && workers < numbers.idle => TaskReason::OverProvisioned,
            _ => TaskReason::Settled,
        }
    }
}
