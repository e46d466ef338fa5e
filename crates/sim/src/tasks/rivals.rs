//! Other schedulers of parameter-server jobs, from their published behaviour.
//!
//! - `stock`: the TFJob operator without a gang scheduler. Every task is a pod of its own; the default scheduler puts
//!   each pod on the node with the most free CPU, in the order of arrival, as soon as its request fits. Requests never
//!   change. A job whose pods are placed only in part holds what it has.
//! - `packing`: all tasks of a job or none, each on the fullest node that holds it (first fit after the largest use).
//!   Requests never change.
//! - `dlrover`: DLRover's published rules on the stock placement. Hot server: if a server uses at least 0.8 of its
//!   CPU over the last three records, the CPU of all servers is multiplied by 32 divided by the number of workers, up
//!   to 32 cores; the tasks are replaced, which costs a checkpoint cycle. Otherwise one worker is added while the
//!   servers are below 0.9, until a new worker brings less than a fifth of an old one's speed. Nothing is taken from
//!   running jobs when others wait. Its cluster-wide model of job classes is not published and is left out.

use super::Running;
use gainshare_core::model::{NodeId, Time};
use gainshare_core::tasks::{TaskId, TaskRole, TaskTarget};
use gainshare_core::view::NodeView;
use std::collections::BTreeMap;

/// Which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rival {
    Stock,
    Packing,
    Dlrover,
}

/// Between two records, and two decisions, of DLRover.
const RECORD_S: f64 = 30.0;
const RECORDS: usize = 3;
const HOT: f64 = 0.8;
const FULL: f64 = 0.9;
const TARGET_WORKERS: f64 = 32.0;
const MAX_CORES: f64 = 32.0;
const LEAST_SPEED: f64 = 0.2;
/// Save, start a bigger pod, load: what a change of servers costs. Our assumption; the published text names none.
const MIGRATION_S: f64 = 60.0;

/// A rival and what it remembers.
pub(crate) struct State {
    rival: Rival,
    jobs: BTreeMap<u64, Records>,
    last_s: f64,
}

#[derive(Default)]
struct Records {
    /// The largest use of a server, as a part of its cores, newest last.
    hottest: Vec<f64>,
    cpu_s: BTreeMap<TaskId, f64>,
    steps: f64,
    speed: f64,
    /// Workers and speed before the last worker was added.
    before_growth: Option<(f64, f64)>,
    has_stopped: bool,
}

impl Rival {
    pub(crate) fn start(self) -> State {
        State { rival: self, jobs: BTreeMap::new(), last_s: 0.0 }
    }
}

#[derive(Clone, Copy)]
struct Free {
    id: NodeId,
    cores: f64,
    memory_bytes: u64,
}

fn free_nodes(nodes: &[NodeView], alive: &[Running]) -> Vec<Free> {
    let mut free: Vec<Free> =
        nodes.iter().map(|node| Free { id: node.id, cores: node.cores, memory_bytes: node.memory_bytes }).collect();
    for task in alive.iter().flat_map(|job| &job.group().tasks) {
        if let Some(node) = free.iter_mut().find(|node| node.id == task.node) {
            node.cores -= task.cores;
            node.memory_bytes = node.memory_bytes.saturating_sub(task.memory_bytes);
        }
    }
    free
}

impl Free {
    fn holds(&self, cores: f64, memory_bytes: u64) -> bool {
        cores <= self.cores + 1e-9 && memory_bytes <= self.memory_bytes
    }

    fn take(&mut self, target: &TaskTarget) {
        self.cores -= target.cores;
        self.memory_bytes = self.memory_bytes.saturating_sub(target.memory_bytes);
    }
}

impl State {
    pub(crate) fn decide(&mut self, now_s: f64, nodes: &[NodeView], alive: &mut [Running]) {
        self.start_tasks(now_s, nodes, alive);
        if self.rival == Rival::Dlrover && now_s - self.last_s >= RECORD_S {
            let seconds = now_s - self.last_s;
            self.last_s = now_s;
            self.jobs.retain(|id, _| alive.iter().any(|job| job.view.id.0 == *id));
            for at in 0..alive.len() {
                self.adjust(seconds, nodes, alive, at, Time::from_secs_f64(now_s));
            }
        }
    }

    /// Places tasks that wait, first come, first served; what does not fit is passed over.
    fn start_tasks(&self, now_s: f64, nodes: &[NodeView], alive: &mut [Running]) {
        let mut free = free_nodes(nodes, alive);
        for job in alive.iter_mut() {
            let group = job.group();
            let wanted = |role: TaskRole| (0..group.spec(role).count).map(move |index| TaskId { role, index });
            let all: Vec<TaskId> = wanted(TaskRole::Server).chain(wanted(TaskRole::Worker)).collect();
            let mut targets: Vec<TaskTarget> = group.tasks.iter().map(TaskTarget::of).collect();
            let missing: Vec<TaskId> =
                all.into_iter().filter(|id| !targets.iter().any(|task| task.id == *id)).collect();
            if missing.is_empty() {
                continue;
            }
            let mut trial = free.clone();
            let mut placed = 0;
            for id in &missing {
                let spec = group.spec(id.role);
                let fits = trial.iter_mut().filter(|node| node.holds(spec.cores, spec.memory_bytes));
                let node = match self.rival {
                    Rival::Packing => fits.min_by(|a, b| a.cores.total_cmp(&b.cores)),
                    Rival::Stock | Rival::Dlrover => fits.max_by(|a, b| a.cores.total_cmp(&b.cores)),
                };
                let Some(node) = node else { continue };
                let (cores, memory_bytes) = (spec.cores, spec.memory_bytes);
                let target = TaskTarget { id: *id, node: node.id, cores, memory_bytes };
                node.take(&target);
                targets.push(target);
                placed += 1;
            }
            if placed == 0 || (self.rival == Rival::Packing && placed < missing.len()) {
                continue;
            }
            free = trial;
            targets.sort_by_key(|task| task.id);
            job.set_tasks(Time::from_secs_f64(now_s), &targets);
        }
    }

    /// DLRover's rules for one job.
    fn adjust(&mut self, seconds: f64, nodes: &[NodeView], alive: &mut [Running], at: usize, now: Time) {
        let mut free = free_nodes(nodes, alive);
        let job = &mut alive[at];
        let group = job.group();
        if group.of_role(TaskRole::Server).count() < group.servers.count as usize {
            return;
        }
        let records = self.jobs.entry(job.view.id.0).or_default();
        let hottest = group.of_role(TaskRole::Server).filter_map(|task| {
            let before = records.cpu_s.get(&task.id)?;
            Some((task.cpu_s - before) / seconds / task.cores)
        });
        let hottest = hottest.fold(0.0, f64::max);
        let is_first = records.cpu_s.is_empty();
        records.cpu_s = group.tasks.iter().map(|task| (task.id, task.cpu_s)).collect();
        (records.speed, records.steps) = ((group.steps - records.steps) / seconds, group.steps);
        if is_first {
            return;
        }
        records.hottest.push(hottest);
        if records.hottest.len() < RECORDS {
            return;
        }
        let mean = records.hottest.iter().rev().take(RECORDS).sum::<f64>() / RECORDS as f64;
        let workers = group.of_role(TaskRole::Worker).count() as f64;
        let mut targets: Vec<TaskTarget> = group.tasks.iter().map(TaskTarget::of).collect();
        if mean >= HOT {
            let factor = TARGET_WORKERS / workers.max(1.0);
            let mut grew = false;
            for task in targets.iter_mut().filter(|task| task.id.role == TaskRole::Server) {
                let wanted = (task.cores * factor).min(MAX_CORES).max(task.cores) - task.cores;
                if let Some(node) = free.iter_mut().find(|node| node.id == task.node) {
                    let more = wanted.min(node.cores.max(0.0));
                    node.cores -= more;
                    task.cores += more;
                    grew |= more > 0.01 * task.cores;
                }
            }
            if grew {
                records.hottest.clear();
                records.before_growth = None;
                job.pause_s += MIGRATION_S;
                job.set_tasks(now, &targets);
            }
            return;
        }
        if let Some((old_workers, old_speed)) = records.before_growth.take() {
            let each = old_speed / old_workers;
            records.has_stopped |= (records.speed - old_speed) / (workers - old_workers).max(1.0) < LEAST_SPEED * each;
        }
        if records.has_stopped || mean >= FULL || workers >= f64::from(group.workers.max) {
            return;
        }
        let (cores, memory_bytes) = (group.workers.cores, group.workers.memory_bytes);
        let fits = free.iter().filter(|node| node.holds(cores, memory_bytes));
        if let Some(node) = fits.max_by(|a, b| a.cores.total_cmp(&b.cores)) {
            let next = group.of_role(TaskRole::Worker).map(|task| task.id.index + 1).max().unwrap_or(0);
            targets.push(TaskTarget { id: TaskId::worker(next), node: node.id, cores, memory_bytes });
            records.before_growth = Some((workers, records.speed));
            records.hottest.clear();
            job.set_tasks(now, &targets);
        }
    }
}
