//! How running jobs grow, shrink and return what they have beyond their requests.
//!
//! **Growth.** For each job a few changes are considered: its hottest server, all servers, all workers, servers and
//! workers, more workers. The speed model predicts what each brings. Over all jobs, the change is made that shortens
//! the remaining time most for each core, then the next, while cores are free and the change is efficient enough. A
//! job changes once in an interval.
//!
//! **Deadlines.** A job that will miss its deadline with what it has grows before all others. If it finds no room, jobs
//! that are in time, or have no deadline, return what they have beyond their requests, those first that lose least. A
//! job that would be late by that returns nothing.
//!
//! **No thrash.** Every change is on trial for one measurement. A growth that brought less than a third of the
//! predicted speed, and a shrinking that cost more than a tenth, is taken back, and the job is left alone for some
//! intervals.

use super::load::{JobMemory, Load, Trial};
use super::{Elastic, FreeNode, Memory, free_nodes, task_jobs};
use crate::model::{JobId, Span};
use crate::sort::Key;
use crate::tasks::{TaskGroup, TaskId, TaskPlan, TaskReason, TaskRole, TaskTarget};
use crate::view::View;
use std::collections::{BTreeMap, BTreeSet};

/// A task at most doubles at once: predictions far from what was seen are poor. A hot server with less than its
/// request is the exception.
const FACTOR: f64 = 2.0;
/// A change that raises the speed by less than this is not worth making.
const LEAST_SPEEDUP: f64 = 0.05;
/// This part of a predicted gain must come true.
const KEPT_PROMISE: f64 = 0.33;
/// Shrinking may cost this part of the speed.
const TOLERATED_LOSS: f64 = 0.1;
/// A job is left alone for this many intervals after a change was taken back.
const REST: u64 = 10;
/// A job has too much only if it was seen so in two measurements in a row.
const IDLE_ROUNDS: u32 = 2;

/// Judges the changes on trial, and takes back those that did not keep their promise.
pub(crate) fn take_back(numbers: &Elastic, view: &View, memory: &mut Memory, plans: &mut BTreeMap<JobId, TaskPlan>) {
    for (id, memory) in &mut memory.jobs {
        let (Some(plan), Some(load)) = (plans.get_mut(id), &memory.load) else { continue };
        let Some(trial) = memory.trial.take() else { continue };
        if load.steps_per_s >= trial.speed_wanted {
            continue;
        }
        memory.rest_until = view.now + Span(numbers.interval.0.saturating_mul(REST));
        let mut tasks: Vec<TaskTarget> = vec![];
        // Tasks that ended since are not brought back; memory stays.
        for old in trial.before {
            let now = plan.tasks.iter().find(|task| task.id == old.id);
            tasks.extend(now.map(|now| TaskTarget { cores: old.cores, ..*now }));
        }
        let mut trial_plans = plans_with(plans, *id, tasks);
        if free_nodes(view, &trial_plans).iter().all(|node| node.cores >= -1e-6) {
            let tasks = trial_plans.remove(id).map(|plan| plan.tasks).unwrap_or_default();
            plans.insert(*id, TaskPlan { tasks, why: TaskReason::TakenBack });
        }
    }
}

fn plans_with(plans: &BTreeMap<JobId, TaskPlan>, id: JobId, tasks: Vec<TaskTarget>) -> BTreeMap<JobId, TaskPlan> {
    let mut plans = plans.clone();
    if let Some(plan) = plans.get_mut(&id) {
        plan.tasks = tasks;
    }
    plans
}

/// Takes cores from tasks that use far less than they have.
pub(crate) fn shrink(numbers: &Elastic, view: &View, memory: &mut Memory, plans: &mut BTreeMap<JobId, TaskPlan>) {
    for (job, group) in task_jobs(view) {
        let (Some(plan), Some(memory)) = (plans.get_mut(&job.id), memory.jobs.get_mut(&job.id)) else { continue };
        let Some(load) = &memory.load else { continue };
        if load.diagnose(numbers) != TaskReason::OverProvisioned {
            memory.idle_rounds = 0;
            continue;
        }
        memory.idle_rounds += 1;
        if memory.idle_rounds < IDLE_ROUNDS || view.now < memory.rest_until || plan.why == TaskReason::TakenBack {
            continue;
        }
        let before = plan.tasks.clone();
        for target in &mut plan.tasks {
            let Some(task) = load.tasks.iter().find(|task| task.id == target.id) else { continue };
            let least = group.spec(target.id.role).least_cores;
            let wanted = (task.used_cores / numbers.headroom).max(target.cores / FACTOR).max(least);
            target.cores = wanted.min(target.cores);
        }
        if changed(&before, &plan.tasks) {
            let speed = load.steps_per_s;
            memory.trial = Some(Trial { before, speed_before: speed, speed_wanted: speed * (1.0 - TOLERATED_LOSS) });
            memory.idle_rounds = 0;
            plan.why = TaskReason::OverProvisioned;
        }
    }
}

/// Whether a change is worth a write: a tenth of the cores of a task, or another task.
fn changed(before: &[TaskTarget], after: &[TaskTarget]) -> bool {
    before.len() != after.len() || before.iter().zip(after).any(|(b, a)| (a.cores - b.cores).abs() >= 0.1 * b.cores)
}

/// The running jobs that have more than their requests, those first that lose least for a returned core.
pub(crate) fn by_loss(view: &View, memory: &Memory, plans: &BTreeMap<JobId, TaskPlan>) -> Vec<JobId> {
    let mut jobs: Vec<(Key, JobId)> = vec![];
    for (job, group) in task_jobs(view) {
        let Some(plan) = plans.get(&job.id).filter(|plan| plan.why != TaskReason::Started) else { continue };
        let returned = requested(group, &plan.tasks);
        let cores = total_cores(&plan.tasks) - total_cores(&returned);
        if cores <= 0.0 {
            continue;
        }
        let loss = memory.jobs.get(&job.id).and_then(|memory| {
            let load = memory.load.as_ref()?;
            let (now, then) = (predict(memory, load, &plan.tasks)?, predict(memory, load, &returned)?);
            Some(steps_left(group) * (1.0 / then - 1.0 / now))
        });
        jobs.push((Key(loss.unwrap_or(0.0) / cores), job.id));
    }
    jobs.sort();
    jobs.into_iter().map(|(_, id)| id).collect()
}

/// Sets a job back to its request. Returns whether that frees anything.
pub(crate) fn give_back(view: &View, id: JobId, plans: &mut BTreeMap<JobId, TaskPlan>) -> bool {
    let (Some(group), Some(plan)) = (view.job(id).and_then(|job| job.tasks.as_ref()), plans.get_mut(&id)) else {
        return false;
    };
    let returned = requested(group, &plan.tasks);
    let frees = total_cores(&returned) < total_cores(&plan.tasks) - 1e-9;
    if frees {
        *plan = TaskPlan { tasks: returned, why: TaskReason::GivesBack };
    }
    frees
}

/// The tasks without what exceeds the request: cores, and the youngest of the workers that were added.
fn requested(group: &TaskGroup, tasks: &[TaskTarget]) -> Vec<TaskTarget> {
    let mut workers = 0;
    let mut kept = vec![];
    for task in tasks {
        if task.id.role == TaskRole::Worker {
            workers += 1;
            if workers > group.workers.count {
                continue;
            }
        }
        kept.push(TaskTarget { cores: task.cores.min(group.spec(task.id.role).cores), ..*task });
    }
    kept
}

fn total_cores(tasks: &[TaskTarget]) -> f64 {
    tasks.iter().map(|task| task.cores).sum()
}

fn predict(memory: &JobMemory, load: &Load, tasks: &[TaskTarget]) -> Option<f64> {
    memory.model.predict(load.configuration(tasks)?)
}

/// A job that names no total is expected to run as long again as it has run.
fn steps_left(group: &TaskGroup) -> f64 {
    group.steps_left.unwrap_or(group.steps).max(1.0)
}

/// Whether the job will miss its deadline with these tasks, as far as that can be predicted. A job that does not name
/// its total is taken for one in time.
fn is_late(view: &View, memory: &Memory, id: JobId, tasks: &[TaskTarget]) -> bool {
    let end_s = || {
        let (job, memory) = (view.job(id)?, memory.jobs.get(&id)?);
        let speed = predict(memory, memory.load.as_ref()?, tasks)?;
        Some((job.deadline?, job.tasks.as_ref()?.steps_left? / speed))
    };
    end_s().is_some_and(|(deadline, end_s)| {
        let left_s = deadline.latest().as_secs_f64() - view.now.as_secs_f64();
        // A deadline that has passed is nothing to hurry for.
        left_s > 0.0 && end_s > left_s
    })
}

/// A change that could be made.
struct Candidate {
    job: JobId,
    /// Whether the job will miss its deadline without a change.
    is_late: bool,
    tasks: Vec<TaskTarget>,
    why: TaskReason,
    speed_before: f64,
    speed_after: f64,
    /// Seconds of the remaining time that one core saves.
    gain: f64,
}

/// Grows jobs into what is free: first those that will be late, then where a core saves most time.
pub(crate) fn grow(numbers: &Elastic, view: &View, memory: &mut Memory, plans: &mut BTreeMap<JobId, TaskPlan>) {
    make_room_for_late_jobs(numbers, view, memory, plans);
    let mut changed_jobs: BTreeSet<JobId> = BTreeSet::new();
    loop {
        let free = free_nodes(view, plans);
        let jobs = task_jobs(view).map(|(job, _)| job.id).filter(|id| !changed_jobs.contains(id));
        let all = jobs.flat_map(|id| candidates(numbers, view, id, memory, plans, &free));
        let best =
            all.reduce(
                |best, next| if (next.is_late, Key(next.gain)) > (best.is_late, Key(best.gain)) { next } else { best },
            );
        let Some(Candidate { job, tasks, why, speed_before, speed_after, .. }) = best else { return };
        changed_jobs.insert(job);
        let before = plans.insert(job, TaskPlan { tasks, why }).map(|plan| plan.tasks).unwrap_or_default();
        if let Some(memory) = memory.jobs.get_mut(&job) {
            let speed_wanted = speed_before + KEPT_PROMISE * (speed_after - speed_before);
            memory.trial = Some(Trial { before, speed_before, speed_wanted });
        }
    }
}

/// Lets jobs that can spare it return what they have beyond their requests, if a job that will be late could grow into
/// it and finds no other room.
fn make_room_for_late_jobs(numbers: &Elastic, view: &View, memory: &Memory, plans: &mut BTreeMap<JobId, TaskPlan>) {
    for (job, _) in task_jobs(view) {
        let can_grow = |plans: &BTreeMap<JobId, TaskPlan>| {
            !candidates(numbers, view, job.id, memory, plans, &free_nodes(view, plans)).is_empty()
        };
        let Some(plan) = plans.get(&job.id) else { continue };
        if !is_late(view, memory, job.id, &plan.tasks) || can_grow(plans) {
            continue;
        }
        let mut returned = plans.clone();
        for other in by_loss(view, memory, plans).into_iter().filter(|other| *other != job.id) {
            let before = returned.clone();
            let gives = give_back(view, other, &mut returned);
            if !gives || returned.get(&other).is_some_and(|plan| is_late(view, memory, other, &plan.tasks)) {
                returned = before;
                continue;
            }
            if can_grow(&returned) {
                *plans = returned;
                break;
            }
        }
    }
}

/// The changes that a job could make in this room.
fn candidates(
    numbers: &Elastic,
    view: &View,
    job: JobId,
    all: &Memory,
    plans: &BTreeMap<JobId, TaskPlan>,
    free: &[FreeNode],
) -> Vec<Candidate> {
    let group = view.job(job).and_then(|job| job.tasks.as_ref());
    let (Some(group), Some(plan), Some(memory)) = (group, plans.get(&job), all.jobs.get(&job)) else { return vec![] };
    let is_free = matches!(plan.why, TaskReason::Settled | TaskReason::MemoryShort);
    let Some(load) = memory.load.as_ref().filter(|_| is_free && view.now >= memory.rest_until) else { return vec![] };
    let is_late = is_late(view, all, job, &plan.tasks);
    let diagnosis = load.diagnose(numbers);
    let servers = load.of_role(TaskRole::Server);
    let hottest = servers.max_by_key(|task| Key(task.busy())).map(|task| task.id);
    let is_server = |id: TaskId| id.role == TaskRole::Server;
    let mut changes: Vec<(Vec<TaskTarget>, TaskReason)> = vec![];
    if let Some(hot) = hottest {
        // A server that is hot because it has less than its equals returns to its request at once: what the author
        // asked for is no far prediction.
        let least = if matches!(diagnosis, TaskReason::HotServer { .. }) { group.servers.cores } else { 0.0 };
        let only = raise_to(group, plan, free, |task| if task.id == hot { doubled(task).max(least) } else { 0.0 });
        changes.push((only, TaskReason::HotServer { index: hot.index }));
    }
    changes.push((raise(group, plan, free, is_server), TaskReason::ServersStarved));
    changes.push((raise(group, plan, free, |id| !is_server(id)), TaskReason::WorkersStarved));
    changes.push((raise(group, plan, free, |_| true), TaskReason::WorkersStarved));
    let workers = plan.tasks.iter().filter(|task| !is_server(task.id)).count() as u32;
    for more in [1, workers / 2, workers].into_iter().filter(|more| *more > 0) {
        changes.push((add_workers(group, plan, free, more), TaskReason::WorkersStarved));
    }
    let Some(now) = predict(memory, load, &plan.tasks) else { return vec![] };
    let cores_now = total_cores(&plan.tasks);
    let judge = |(tasks, why): (Vec<TaskTarget>, TaskReason)| {
        let cores = total_cores(&tasks) - cores_now;
        let after = predict(memory, load, &tasks).filter(|_| cores > 1e-6 && changed(&plan.tasks, &tasks))?;
        let speedup = after / now - 1.0;
        let is_efficient = speedup / cores >= numbers.efficiency / cores_now.max(1e-6);
        // A diagnosis that names a role is more telling than a guess of the model among several growths.
        let why =
            if diagnosis == TaskReason::Settled || diagnosis == TaskReason::OverProvisioned { why } else { diagnosis };
        let gain = steps_left(group) * (1.0 / now - 1.0 / after) / cores;
        let (speed_before, speed_after) = (load.steps_per_s, load.steps_per_s * after / now);
        // A deadline is worth cores that bring little.
        (speedup >= LEAST_SPEEDUP && (is_efficient || is_late)).then_some(Candidate {
            job,
            is_late,
            tasks,
            why,
            speed_before,
            speed_after,
            gain,
        })
    };
    changes.into_iter().filter_map(judge).collect()
}

/// Raises the cores of the chosen tasks, as far as their nodes have any; tasks on one node share what is free.
fn raise(group: &TaskGroup, plan: &TaskPlan, free: &[FreeNode], chosen: impl Fn(TaskId) -> bool) -> Vec<TaskTarget> {
    raise_to(group, plan, free, |task| if chosen(task.id) { doubled(task) } else { 0.0 })
}

fn doubled(task: &TaskTarget) -> f64 {
    task.cores * FACTOR
}

/// Raises tasks to these cores, as far as they can use them and their nodes have any. No task shrinks.
fn raise_to(
    group: &TaskGroup,
    plan: &TaskPlan,
    free: &[FreeNode],
    cores: impl Fn(&TaskTarget) -> f64,
) -> Vec<TaskTarget> {
    let wanted = |task: &TaskTarget| cores(task).min(group.spec(task.id.role).max_cores).max(task.cores) - task.cores;
    let mut tasks = plan.tasks.clone();
    for node in free {
        let on_node = || plan.tasks.iter().filter(|task| task.node == node.id);
        let sum: f64 = on_node().map(wanted).sum();
        let part = if sum > node.cores { (node.cores / sum).max(0.0) } else { 1.0 };
        for task in tasks.iter_mut().filter(|task| task.node == node.id) {
            task.cores += wanted(task) * part;
        }
    }
    tasks
}

/// Adds workers with the cores of the others, first on nodes that have tasks of the job.
fn add_workers(group: &TaskGroup, plan: &TaskPlan, free: &[FreeNode], more: u32) -> Vec<TaskTarget> {
    let mut tasks = plan.tasks.clone();
    let workers: Vec<TaskTarget> = tasks.iter().filter(|task| task.id.role == TaskRole::Worker).copied().collect();
    let Some(pattern) = workers.last() else { return tasks };
    let memory_bytes = pattern.memory_bytes.max(group.workers.memory_bytes);
    let mut free = free.to_vec();
    for _ in 0..more.min(group.workers.max.saturating_sub(workers.len() as u32)) {
        let on_node = |node: &FreeNode| tasks.iter().filter(|task| task.node == node.id).count();
        let fits = free.iter().enumerate().filter(|(_, node)| node.holds(pattern.cores, memory_bytes));
        let best = fits.max_by_key(|(_, node)| (on_node(node), Key(node.cores), std::cmp::Reverse(node.id)));
        let Some(at) = best.map(|(at, _)| at) else { break };
        free[at].take(pattern.cores, memory_bytes);
        let index = tasks.iter().filter(|t| t.id.role == TaskRole::Worker).map(|t| t.id.index + 1).max().unwrap_or(0);
        let id = TaskId::worker(index);
        tasks.push(TaskTarget { id, node: free[at].id, cores: pattern.cores, memory_bytes });
    }
    tasks
}
