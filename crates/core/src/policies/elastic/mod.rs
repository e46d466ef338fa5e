//! `elastic`: the tasks of parameter-server jobs start together, grow into idle resources and return them.
//!
//! **Source.** The dynamic resource adjustment operator for parameter-server jobs; its speed model is Optimus's
//! ([`crate::signal::parameter_server`]), its test cases are the four misconfigurations that DLRover describes.
//!
//! **Order of a decision.**
//! 1. Each job is measured: CPU of every task, steps per second.
//! 2. Memory that is nearly used up is raised, before the kernel kills the task. Such a task does not wait for the next
//!    interval: it makes a decision due.
//! 3. A change that brought too little is taken back ([`grow`]).
//! 4. Waiting jobs start, all tasks or none, the highest priority first, then the oldest. If the room is not there,
//!    running jobs return what they have beyond their requests, those first that lose least by it.
//! 5. Only if no job waits, jobs grow: first those that will miss their deadlines, then where a core shortens the
//!    remaining time most ([`grow`]).
//!
//! **Properties**, each a test: `pending_jobs_come_before_growth`, `growth_is_given_back`,
//! `never_below_what_keeps_a_job_alive`, `no_thrash`, `memory_is_raised_before_it_runs_out`,
//! `a_job_that_will_be_late_grows_first`, `jobs_in_time_return_what_a_late_job_needs`; the four cases are
//! `too_little_cpu`, `few_servers_many_workers`, `too_much_everywhere` and `one_hot_server_among_equals`.

pub mod affinity;
pub mod divide;
mod grow;
mod load;
#[cfg(test)]
mod tests;

use super::error::PolicyError;
use crate::model::{JobId, NodeId, Span, Time};
use crate::plan::Reason;
use crate::sort::Key;
use crate::tasks::{TaskGroup, TaskId, TaskPlan, TaskReason, TaskRole, TaskTarget, TaskView};
use crate::view::{JobView, Phase, View};
use affinity::TaskRequest;
use load::JobMemory;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A task that uses this part of its memory is close to being killed.
const NEARLY_FULL: f64 = 0.85;
/// Between two decisions because of memory: memory that cannot be raised must not keep the rule busy.
const MEMORY_PAUSE: Span = Span::from_secs(5);

/// The numbers of the rule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Elastic {
    /// Between two changes of one job: long enough to measure what the last one brought.
    pub interval: Span,
    /// A task is busy if it uses this part of its cores.
    pub hot: f64,
    /// A task is idle if it uses less than this part of its cores.
    pub idle: f64,
    /// A shrunk task uses this part of its cores.
    pub headroom: f64,
    /// A core must bring at least this part of what the job's cores bring on average; DLRover stops at the same.
    pub efficiency: f64,
}

impl Default for Elastic {
    fn default() -> Elastic {
        Elastic { interval: Span::from_secs(30), hot: 0.8, idle: 0.3, headroom: 0.7, efficiency: 0.2 }
    }
}

impl Elastic {
    pub(crate) fn validate(&self) -> Result<(), PolicyError> {
        let parts =
            [("hot", self.hot), ("idle", self.idle), ("headroom", self.headroom), ("efficiency", self.efficiency)];
        if let Some((name, value)) = parts.into_iter().find(|(_, value)| !(*value > 0.0 && *value <= 1.0)) {
            return Err(PolicyError::Elastic { name, value });
        }
        if self.interval == Span::ZERO { Err(PolicyError::Interval) } else { Ok(()) }
    }
}

/// What is free on a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FreeNode {
    pub id: NodeId,
    pub cores: f64,
    pub memory_bytes: u64,
}

impl FreeNode {
    /// Rounding must not keep a task from a node that it fits exactly.
    pub(crate) fn holds(&self, cores: f64, memory_bytes: u64) -> bool {
        cores <= self.cores + 1e-9 && memory_bytes <= self.memory_bytes
    }

    pub(crate) fn take(&mut self, cores: f64, memory_bytes: u64) {
        self.cores -= cores;
        self.memory_bytes = self.memory_bytes.saturating_sub(memory_bytes);
    }
}

/// What the rule remembers.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Memory {
    jobs: BTreeMap<JobId, JobMemory>,
    /// The jobs of tasks at the last decision, and whether each ran.
    known: BTreeMap<JobId, bool>,
    due: Option<Time>,
    /// When tasks that are short of memory may make the next decision due.
    #[serde(default)]
    memory_due: Option<Time>,
}

impl Memory {
    /// Whether jobs of tasks came or went, a task is short of memory, or it is time to measure them.
    pub(crate) fn is_due(&self, view: &View) -> bool {
        let now = task_jobs(view).map(|(job, _)| (job.id, job.phase != Phase::Waiting));
        let is_short = || task_jobs(view).any(|(_, group)| group.tasks.iter().any(is_nearly_full));
        !now.eq(self.known.iter().map(|(id, runs)| (*id, *runs)))
            || self.due.is_some_and(|due| view.now >= due)
            || self.memory_due.is_some_and(|due| view.now >= due) && is_short()
    }

    pub(crate) fn due(&self) -> Option<Time> {
        self.due
    }
}

/// The jobs of a view that have tasks.
pub(crate) fn task_jobs(view: &View) -> impl Iterator<Item = (&JobView, &TaskGroup)> {
    view.jobs.iter().filter_map(|job| Some((job, job.tasks.as_ref()?)))
}

/// What is decided about the jobs of tasks.
#[derive(Debug, Default)]
pub(crate) struct Decision {
    pub(crate) plans: BTreeMap<JobId, TaskPlan>,
    pub(crate) reasons: BTreeMap<JobId, Reason>,
}

/// The rule, bound to its memory. Without numbers every task keeps what its owner requested.
pub(crate) struct Rule<'a> {
    pub(crate) numbers: Option<&'a Elastic>,
    /// Whether tasks of a job are kept together; otherwise each goes to the node with the most free cores.
    pub(crate) together: bool,
    pub(crate) memory: &'a mut Memory,
}

impl Rule<'_> {
    pub(crate) fn decide(&mut self, view: &View) -> Decision {
        self.memory.known = task_jobs(view).map(|(job, _)| (job.id, job.phase != Phase::Waiting)).collect();
        self.memory.jobs.retain(|id, _| self.memory.known.get(id) == Some(&true));
        let mut plans: BTreeMap<JobId, TaskPlan> = BTreeMap::new();
        for (job, group) in task_jobs(view).filter(|(job, _)| job.phase != Phase::Waiting) {
            let tasks = group.tasks.iter().map(TaskTarget::of).collect();
            plans.insert(job.id, TaskPlan { tasks, why: TaskReason::Settled });
        }
        let mut decision = Decision::default();
        if let Some(numbers) = self.numbers {
            for (job, group) in task_jobs(view).filter(|(job, _)| plans.contains_key(&job.id)) {
                let memory = self.memory.jobs.entry(job.id).or_insert_with(|| JobMemory::new(group.mode));
                memory.measure(numbers, view.now, group);
            }
            raise_memory(view, &mut plans);
            grow::take_back(numbers, view, self.memory, &mut plans);
            grow::shrink(numbers, view, self.memory, &mut plans);
        }
        let waits = self.start_waiting(view, &mut plans, &mut decision.reasons);
        if let (Some(numbers), false) = (self.numbers, waits) {
            grow::grow(numbers, view, self.memory, &mut plans);
        }
        for (id, plan) in &plans {
            // A job that gave back is slower because of the others, not because of its last change.
            if let (TaskReason::GivesBack, Some(memory)) = (plan.why, self.memory.jobs.get_mut(id)) {
                memory.trial = None;
            }
            decision.reasons.insert(*id, Reason::Tasks { because: plan.why });
        }
        let interval = self.numbers.map(|numbers| numbers.interval);
        self.memory.due = interval.filter(|_| !self.memory.known.is_empty()).map(|interval| view.now + interval);
        self.memory.memory_due = self.memory.due.map(|_| view.now + MEMORY_PAUSE);
        decision.plans = plans;
        decision
    }

    /// Starts waiting jobs. Returns whether one still waits for room.
    fn start_waiting(
        &mut self,
        view: &View,
        plans: &mut BTreeMap<JobId, TaskPlan>,
        reasons: &mut BTreeMap<JobId, Reason>,
    ) -> bool {
        let mut queue: Vec<_> = task_jobs(view).filter(|(job, _)| job.phase == Phase::Waiting).collect();
        queue.sort_by_key(|(job, _)| (std::cmp::Reverse(job.priority), job.arrived, job.id));
        let mut waits = false;
        for (job, group) in queue {
            if let Some(other) = job.waits_for.first() {
                reasons.insert(job.id, Reason::WaitsForJob { job: *other });
                continue;
            }
            match self.find_room(view, plans, group) {
                Some(tasks) => {
                    plans.insert(job.id, TaskPlan { tasks, why: TaskReason::Started });
                }
                None => {
                    let requested = |role| f64::from(group.spec(role).min) * group.spec(role).cores;
                    let cores = requested(TaskRole::Server) + requested(TaskRole::Worker);
                    reasons.insert(job.id, Reason::WaitsForTasks { cores });
                    waits = true;
                }
            }
        }
        waits
    }

    /// A place for all tasks of a waiting job: with all its workers, with fewer, or after others have given back.
    fn find_room(
        &self,
        view: &View,
        plans: &mut BTreeMap<JobId, TaskPlan>,
        group: &TaskGroup,
    ) -> Option<Vec<TaskTarget>> {
        let free = free_nodes(view, plans);
        let with = |workers: u32, free: &[FreeNode]| self.place(group, workers, free);
        if let Some(found) = with(group.workers.count, &free) {
            return Some(found);
        }
        if self.numbers.is_some() {
            let mut returned = plans.clone();
            for id in grow::by_loss(view, self.memory, &returned) {
                if grow::give_back(view, id, &mut returned)
                    && let Some(found) = with(group.workers.count, &free_nodes(view, &returned))
                {
                    *plans = returned;
                    return Some(found);
                }
            }
            let free = free_nodes(view, &returned);
            let fewer = (group.workers.min..group.workers.count).rev().find_map(|workers| with(workers, &free));
            if fewer.is_some() {
                *plans = returned;
            }
            return fewer;
        }
        (group.workers.min..group.workers.count).rev().find_map(|workers| with(workers, &free))
    }

    fn place(&self, group: &TaskGroup, workers: u32, free: &[FreeNode]) -> Option<Vec<TaskTarget>> {
        let needs = needs(group, workers);
        let nodes = if self.together { affinity::place(&needs, free)? } else { spread(&needs, free)? };
        let target = |(need, node): (&TaskRequest, NodeId)| TaskTarget {
            id: need.id,
            node,
            cores: need.cores,
            memory_bytes: need.memory_bytes,
        };
        Some(needs.iter().zip(nodes).map(target).collect())
    }
}

/// What the tasks of a job need at its start.
fn needs(group: &TaskGroup, workers: u32) -> Vec<TaskRequest> {
    let need = |id: TaskId, traffic| {
        let spec = group.spec(id.role);
        TaskRequest { id, cores: spec.cores, memory_bytes: spec.memory_bytes, traffic }
    };
    // Where nothing is measured, all servers are taken for alike.
    let sum: f64 = group.traffic.iter().map(|traffic| traffic.max(0.0)).sum();
    let mean = if sum > 0.0 { sum / group.traffic.len() as f64 } else { 1.0 };
    let traffic = |index: u32| match group.traffic.get(index as usize) {
        Some(traffic) if sum > 0.0 => traffic.max(0.0),
        _ => mean,
    };
    let servers = (0..group.servers.count).map(|i| need(TaskId::server(i), traffic(i)));
    servers.chain((0..workers).map(|i| need(TaskId::worker(i), 0.0))).collect()
}

/// Each task on the node with the most free cores.
fn spread(needs: &[TaskRequest], free: &[FreeNode]) -> Option<Vec<NodeId>> {
    let mut free = free.to_vec();
    let mut nodes = vec![];
    for need in needs {
        let fits = free.iter_mut().filter(|node| node.holds(need.cores, need.memory_bytes));
        let node = fits.max_by_key(|node| (Key(node.cores), std::cmp::Reverse(node.id)))?;
        node.take(need.cores, need.memory_bytes);
        nodes.push(node.id);
    }
    Some(nodes)
}

/// What these plans, and the floors of jobs without tasks, leave of each node.
pub(crate) fn free_nodes(view: &View, plans: &BTreeMap<JobId, TaskPlan>) -> Vec<FreeNode> {
    let mut free: Vec<FreeNode> = view
        .nodes
        .iter()
        .map(|node| FreeNode { id: node.id, cores: node.cores, memory_bytes: node.memory_bytes })
        .collect();
    let mut take = |node: NodeId, cores: f64, memory: u64| {
        if let Ok(at) = free.binary_search_by_key(&node, |n| n.id) {
            free[at].take(cores, memory);
        }
    };
    for job in view.jobs.iter().filter(|job| job.tasks.is_none()) {
        if let Some(node) = job.node().and_then(|node| view.node(node)) {
            take(node.id, job.floor.get() * node.cores, 0);
        }
    }
    for task in plans.values().flat_map(|plan| &plan.tasks) {
        take(task.node, task.cores, task.memory_bytes);
    }
    free
}

fn is_nearly_full(task: &TaskView) -> bool {
    task.memory_used_bytes > 0 && task.memory_used_bytes as f64 >= NEARLY_FULL * task.memory_bytes as f64
}

/// Raises the memory of tasks that have used most of it, as far as their nodes have any.
fn raise_memory(view: &View, plans: &mut BTreeMap<JobId, TaskPlan>) {
    const GROWTH: f64 = 1.5;
    let mut free = free_nodes(view, plans);
    for (job, group) in task_jobs(view) {
        let Some(plan) = plans.get_mut(&job.id) else { continue };
        for (task, target) in group.tasks.iter().zip(&mut plan.tasks) {
            if !is_nearly_full(task) {
                continue;
            }
            let Ok(at) = free.binary_search_by_key(&task.node, |node| node.id) else { continue };
            let wanted = (task.memory_used_bytes as f64 * GROWTH) as u64;
            let more = wanted.saturating_sub(target.memory_bytes).min(free[at].memory_bytes);
            if more > 0 {
                free[at].take(0.0, more);
                target.memory_bytes += more;
                plan.why = TaskReason::MemoryShort;
            }
        }
    }
}
