//! The promises about jobs of tasks.
//!
//! A waiting job starts with all its servers and at least its smallest number of workers, or not at all; a running
//! job keeps all its servers, and each of its tasks keeps its node; the number of workers stays between the owner's
//! smallest and largest; no task has less than keeps it alive, or less memory than it uses; the tasks of a node fit
//! its cores and its memory.

use super::{TOLERANCE, Violation};
use crate::model::{JobId, NodeId};
use crate::plan::Plan;
use crate::tasks::{TaskGroup, TaskPlan, TaskRole};
use crate::view::{JobView, Phase, View};
use std::collections::BTreeMap;

pub(super) fn check_tasks(view: &View, plan: &Plan, found: &mut Vec<Violation>) {
    let mut used: BTreeMap<NodeId, (f64, u64)> = BTreeMap::new();
    for (id, tasks) in &plan.tasks {
        match view.job(*id).and_then(|job| Some((job, job.tasks.as_ref()?))) {
            Some((job, group)) => check_job(job, group, tasks, found),
            None => found.push(Violation::UnknownJob(*id)),
        }
        for task in &tasks.tasks {
            if view.node(task.node).is_none() {
                found.push(Violation::UnknownNode { job: *id, node: task.node });
            }
            let (cores, memory) = used.entry(task.node).or_default();
            *cores += task.cores;
            *memory = memory.saturating_add(task.memory_bytes);
        }
    }
    let running = view.jobs.iter().filter(|job| job.tasks.is_some() && job.phase != Phase::Waiting);
    found.extend(running.filter(|job| !plan.tasks.contains_key(&job.id)).map(|job| Violation::NoTarget(job.id)));
    for (id, (cores, memory)) in used {
        let Some(node) = view.node(id) else { continue };
        // A node that is overfull already cannot be mended at once, but it must not get worse.
        let (had_cores, had_memory) = in_use(view, id);
        if cores > node.cores.max(had_cores) + TOLERANCE {
            found.push(Violation::TaskCores { node: id, cores, of: node.cores });
        }
        if memory > node.memory_bytes.max(had_memory) {
            found.push(Violation::TaskMemory { node: id, bytes: memory, of: node.memory_bytes });
        }
    }
}

fn in_use(view: &View, node: NodeId) -> (f64, u64) {
    let tasks = view.jobs.iter().filter_map(|job| job.tasks.as_ref()).flat_map(|group| &group.tasks);
    tasks
        .filter(|task| task.node == node)
        .fold((0.0, 0u64), |(cores, memory), task| (cores + task.cores, memory.saturating_add(task.memory_bytes)))
}

fn check_job(job: &JobView, group: &TaskGroup, plan: &TaskPlan, found: &mut Vec<Violation>) {
    let id: JobId = job.id;
    if job.phase == Phase::Waiting && !job.waits_for.is_empty() {
        found.push(Violation::TooEarly(id));
    }
    if plan.tasks.windows(2).any(|pair| pair[0].id >= pair[1].id) {
        found.push(Violation::TaskOrder(id));
    }
    let count = |role| plan.tasks.iter().filter(|task| task.id.role == role).count() as u32;
    let (servers, workers) = (count(TaskRole::Server), count(TaskRole::Worker));
    let running = |role| group.of_role(role).count() as u32;
    // A job whose workers died may have fewer than it should; the plan must not remove more.
    let (fewest, most) = match job.phase {
        Phase::Waiting => (group.workers.min, group.workers.max),
        Phase::Running { .. } => {
            (group.workers.min.min(running(TaskRole::Worker)), group.workers.max.max(running(TaskRole::Worker)))
        }
    };
    let wanted = if job.phase == Phase::Waiting { group.servers.count } else { running(TaskRole::Server) };
    if servers != wanted || workers < fewest || workers > most {
        found.push(Violation::TaskCount { job: id, servers, workers });
    }
    for task in &plan.tasks {
        let before = group.tasks.iter().find(|t| t.id == task.id);
        if before.is_some_and(|before| before.node != task.node) {
            found.push(Violation::TaskMoved { job: id, task: task.id });
        }
        // A task that its owner gave less than the least may keep what it has.
        let spec = group.spec(task.id.role);
        let least = before.map_or(spec.cores, |before| before.cores).min(spec.least_cores);
        if !task.cores.is_finite() || task.cores < least - TOLERANCE || task.cores <= 0.0 {
            found.push(Violation::TaskStarved { job: id, task: task.id, cores: task.cores });
        }
        if before.is_some_and(|before| task.memory_bytes < before.memory_used_bytes.min(before.memory_bytes)) {
            found.push(Violation::TaskMemoryShort { job: id, task: task.id });
        }
    }
}

#[cfg(test)]
#[path = "tasks_tests.rs"]
mod tests;
