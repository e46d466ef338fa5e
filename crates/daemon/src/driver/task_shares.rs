//! The division of a job's share among its tasks.
//!
//! **How.** `gainshare tasks` puts each task into a control group of its own below the job's. Once a second the driver
//! reads their CPU time, and the core's rule ([`Division`], the operator's speed model) divides the job's share among
//! servers and workers by what a step costs each of them. The parts become weights of the groups: what a task leaves
//! unused goes to the others of the job.
//!
//! Parts are read back from the weights when a daemon begins, so that its successor continues. Without control groups
//! the kernel divides. An evaluator keeps an equal part: the speed of the job does not depend on it.

use super::Driver;
use crate::spec::{Role, Roles, Task};
use crate::types::JobState;
use gainshare_core::model::Time;
use gainshare_core::policy::{Division, TaskUse};
use gainshare_core::tasks::TaskId;
use gainshare_limits::cgroup::TaskWeights;

/// What is decided about the tasks of one job.
#[derive(Debug, Default)]
pub(super) struct TaskShares {
    division: Option<Division>,
}

impl TaskShares {
    /// The parts of the tasks, for people; nothing for a job whose tasks are not divided.
    pub(super) fn note(&self, roles: &Roles) -> Option<String> {
        let division = self.division.as_ref()?;
        let tasks = divided(roles);
        let part = |(id, part): &(TaskId, f64)| {
            let (_, task) = tasks.iter().find(|(known, _)| known == id)?;
            Some(format!("{} {:.0} %", task.group_name(), 100.0 * part))
        };
        let parts: Vec<String> = division.parts().iter().filter_map(part).collect();
        Some(format!("its tasks divide its share: {}; {}", parts.join(", "), division.why()))
    }

    /// Reads the tasks of a job and decides. Returns the weights to write, in units of an equal part.
    fn decide(
        &mut self,
        now: Time,
        share: f64,
        steps: f64,
        roles: &Roles,
        weights: &TaskWeights,
    ) -> Vec<(String, f64)> {
        let tasks = divided(roles);
        let read: Option<Vec<TaskUse>> = tasks
            .iter()
            .map(|(id, task)| Some(TaskUse { id: *id, cpu_s: weights.cpu_s(&task.group_name())? }))
            .collect();
        // Some tasks have no group: they have not started, or there are no groups at all.
        let Some(uses) = read.filter(|uses| uses.len() > 1) else {
            self.division = None;
            return Vec::new();
        };
        let division = self.division.get_or_insert_with(|| {
            let part = |(id, task): &(TaskId, Task)| (*id, weights.weight(&task.group_name()).unwrap_or(1.0));
            Division::new(&tasks.iter().map(part).collect::<Vec<_>>())
        });
        if !division.decide(now, share, steps, &uses) {
            return Vec::new();
        }
        let equal = 1.0 / tasks.len() as f64;
        let names = tasks.iter().map(|(_, task)| task.group_name());
        names.zip(division.parts()).map(|(name, (_, part))| (name, part / equal)).collect()
    }
}

/// The tasks on which the speed depends, as the core numbers them, in its order. The chief is the first worker.
fn divided(roles: &Roles) -> Vec<(TaskId, Task)> {
    let chiefs = u32::from(roles.0.contains_key(&Role::Chief));
    let id = |task: &Task| match task.role {
        Role::Ps => Some(TaskId::server(task.index)),
        Role::Chief => Some(TaskId::worker(0)),
        Role::Worker => Some(TaskId::worker(task.index + chiefs)),
        Role::Evaluator => None,
    };
    let mut all: Vec<(TaskId, Task)> = roles.tasks().iter().filter_map(|task| Some((id(task)?, *task))).collect();
    all.sort_by_key(|(id, _)| *id);
    all
}

impl Driver {
    /// Once a second.
    pub(super) fn divide_among_tasks(&mut self) {
        let now = self.clock.now();
        for job in self.jobs.values_mut() {
            let has_servers = job.record.spec.roles.0.contains_key(&Role::Ps);
            if job.record.state != JobState::Running || !has_servers {
                continue;
            }
            let group = job.record.group.as_ref().and_then(|group| TaskWeights::of(group.version?, &group.dirs));
            let Some(weights) = group else { continue };
            let share = job.verdict.as_ref().and_then(|verdict| verdict.target).map_or(1.0, |t| t.share.cpu.get());
            let steps = job.progress.tracker.signal().position();
            let changes = job.task_shares.decide(now, share, steps, &job.record.spec.roles, &weights);
            for (name, weight) in changes {
                if let Err(error) = weights.set_weight(&name, weight) {
                    tracing::debug!(job = %job.record.id, name, "its weight cannot be set: {error}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_numbered_as_the_core_numbers_them() {
        let roles: Roles = serde_json::from_str(r#"{"ps": 2, "worker": 2, "chief": 1, "evaluator": 1}"#).unwrap();
        let names: Vec<String> =
            divided(&roles).iter().map(|(id, task)| format!("{id}={}", task.group_name())).collect();
        assert_eq!(
            names,
            ["server-0=ps-0", "server-1=ps-1", "worker-0=chief-0", "worker-1=worker-0", "worker-2=worker-1"]
        );
        let flat: Roles = serde_json::from_str(r#"{"ps": 1, "worker": 2}"#).unwrap();
        assert_eq!(divided(&flat)[1].0, TaskId::worker(0));
        assert_eq!(TaskShares::default().note(&flat), None);
    }
}
