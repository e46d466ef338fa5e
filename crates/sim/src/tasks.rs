//! Parameter-server jobs on a simulated cluster: tasks on nodes, a network between them.
//!
//! **Problem.** The engine's jobs live on one node each. A parameter-server job has tasks on several nodes, and its
//! speed depends on all of them and on what crosses the network.
//!
//! **Step time** of a synchronous job is the sum of
//! - the workers' part: the CPU work of a step, divided among the workers; the slowest worker counts;
//! - the servers' part: the work for one gradient times the number of workers; the slowest server counts;
//! - the network's part: parameters and gradients between tasks on different nodes; the busiest node counts, and
//!   all jobs that use its link share it equally;
//! - a constant.
//!
//! In an asynchronous job each worker has its own cycle of the same parts, and every cycle is a step. A job trains
//! while all its servers and at least one worker run. Time goes in ticks.
//!
//! **Schedulers.** [`Scheduler::Core`] is the code of `gainshare-core`, with every plan checked. The rivals are in
//! [`rivals`]. All of them see the same counters.

pub mod rivals;

use crate::engine::SimError;
use gainshare_core::decider::{Decider, Decision, Outcome as Decided};
use gainshare_core::model::{JobId, NodeId, Time};
use gainshare_core::policy::Policy;
use gainshare_core::tasks::{TaskGroup, TaskRole, TaskTarget, TaskView, TrainingMode};
use gainshare_core::view::{JobView, NodeView, Phase, View};
use rivals::Rival;

pub const TICK_S: f64 = 5.0;
/// A run that is not over after this time counts its open jobs as ended then: jobs that block each other never end.
pub const HORIZON_S: f64 = 3.0 * 86_400.0;

/// What is true of a job, whether a scheduler knows it or not.
#[derive(Debug, Clone)]
pub struct TaskJob {
    pub arrival_s: f64,
    /// What the owner asked for.
    pub group: TaskGroup,
    pub steps: f64,
    /// CPU seconds of one batch, all workers together.
    pub work_core_s: f64,
    /// CPU seconds of all servers for one gradient.
    pub push: f64,
    /// The part of the parameters, and of the work, that each server has; sums to 1.
    pub loads: Vec<f64>,
    pub model_bytes: f64,
    pub overhead_s: f64,
    /// Cores that one worker can use.
    pub usable: f64,
}

/// A cluster and the jobs that come to it.
#[derive(Debug, Clone)]
pub struct TaskWorld {
    pub nodes: Vec<NodeView>,
    /// Bytes per second of each node's link, both directions together.
    pub link: f64,
    pub jobs: Vec<TaskJob>,
}

/// What decides.
#[derive(Debug, Clone)]
pub enum Scheduler {
    Core(Box<Policy>),
    Rival(Rival),
}

/// One run.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskOutcome {
    pub mean_completion_s: f64,
    /// CPU that was used, as a part of all CPU from the first arrival to the last end.
    pub utilisation: f64,
    pub makespan_s: f64,
    pub unfinished: usize,
}

/// A job in the run. Its view has the counters.
pub(crate) struct Running {
    pub(crate) view: JobView,
    /// Seconds for which it stands still, because its tasks are being replaced.
    pub(crate) pause_s: f64,
    truth: usize,
    used_cpu_s: f64,
}

impl Running {
    pub(crate) fn group(&self) -> &TaskGroup {
        self.view.tasks.as_ref().expect("every job here has tasks")
    }

    pub(crate) fn group_mut(&mut self) -> &mut TaskGroup {
        self.view.tasks.as_mut().expect("every job here has tasks")
    }

    /// Sets the tasks to these targets; tasks that stay keep their counters.
    pub(crate) fn set_tasks(&mut self, now: Time, targets: &[TaskTarget]) {
        if let (Phase::Waiting, Some(first)) = (self.view.phase, targets.first()) {
            self.view.phase = Phase::Running { node: first.node, since: now, attempt: 1 };
        }
        let group = self.group_mut();
        let old = std::mem::take(&mut group.tasks);
        for target in targets {
            let before = old.iter().find(|task| task.id == target.id).copied();
            let fresh = TaskView {
                id: target.id,
                node: target.node,
                cores: target.cores,
                memory_bytes: target.memory_bytes,
                cpu_s: 0.0,
                memory_used_bytes: target.memory_bytes / 2,
                traffic_bytes: 0.0,
            };
            let (cores, memory_bytes) = (target.cores, target.memory_bytes);
            group.tasks.push(TaskView { cores, memory_bytes, ..before.unwrap_or(fresh) });
        }
    }
}

/// Runs a world under a scheduler.
pub fn run(world: &TaskWorld, scheduler: &Scheduler) -> Result<TaskOutcome, SimError> {
    simulate(world, scheduler, None)
}

/// As [`run`], and shows every decision of [`Scheduler::Core`] to `observer` before it is carried out. Each can be
/// recorded and replayed, which costs time.
pub fn run_observed(
    world: &TaskWorld,
    scheduler: &Scheduler,
    observer: &mut dyn FnMut(&Decision),
) -> Result<TaskOutcome, SimError> {
    simulate(world, scheduler, Some(observer))
}

fn simulate(
    world: &TaskWorld,
    scheduler: &Scheduler,
    mut observer: Option<&mut dyn FnMut(&Decision)>,
) -> Result<TaskOutcome, SimError> {
    let mut running = match scheduler {
        Scheduler::Core(policy) => RunningScheduler::Core(Box::new(Decider::new((**policy).clone()))),
        Scheduler::Rival(rival) => RunningScheduler::Rival(rival.start()),
    };
    let mut alive: Vec<Running> = vec![];
    let mut next = 0;
    let mut now_s = 0.0;
    let mut ended: Vec<Ended> = vec![];
    while next < world.jobs.len() || !alive.is_empty() {
        while let Some(job) = world.jobs.get(next).filter(|job| job.arrival_s <= now_s) {
            let view = JobView {
                id: JobId(next as u64),
                arrived: Time::from_secs_f64(job.arrival_s),
                tasks: Some(TaskGroup { steps_left: Some(job.steps), ..job.group.clone() }),
                ..JobView::default()
            };
            alive.push(Running { view, pause_s: 0.0, truth: next, used_cpu_s: 0.0 });
            next += 1;
        }
        match &mut running {
            RunningScheduler::Core(decider) => decide(decider, now_s, world, &mut alive, &mut observer)?,
            RunningScheduler::Rival(rival) => rival.decide(now_s, &world.nodes, &mut alive),
        }
        advance(world, &mut alive);
        now_s += TICK_S;
        let is_late = now_s >= HORIZON_S;
        alive.retain(|job| {
            let is_done = job.group().steps_left.is_some_and(|left| left <= 0.0);
            if is_done || is_late {
                let took_s = now_s - world.jobs[job.truth].arrival_s;
                ended.push(Ended { at_s: now_s, took_s, used_cpu_s: job.used_cpu_s, is_done });
            }
            !is_done && !is_late
        });
        if is_late {
            break;
        }
    }
    Ok(outcome(world, &ended))
}

enum RunningScheduler {
    Core(Box<Decider>),
    Rival(rivals::State),
}

/// A job that has ended, or that was given up at the horizon.
struct Ended {
    at_s: f64,
    took_s: f64,
    used_cpu_s: f64,
    is_done: bool,
}

/// Decides by a policy, if a decision is due, and carries it out.
fn decide(
    decider: &mut Decider,
    now_s: f64,
    world: &TaskWorld,
    alive: &mut [Running],
    observer: &mut Option<&mut dyn FnMut(&Decision)>,
) -> Result<(), SimError> {
    let now = Time::from_secs_f64(now_s);
    let view = View { now, nodes: world.nodes.clone(), jobs: alive.iter().map(|job| job.view.clone()).collect() };
    let outcome = if observer.is_some() { decider.decide_recorded(view) } else { decider.decide(view) };
    match outcome {
        Decided::NotDue => Ok(()),
        Decided::Rejected(rejection) => Err(SimError::Unsound { at_s: now_s, what: rejection.reasons() }),
        Decided::Decision(decision) => {
            if let Some(observer) = observer {
                observer(&decision);
            }
            for job in alive {
                if let Some(plan) = decision.plan.tasks.get(&job.view.id) {
                    job.set_tasks(now, &plan.tasks);
                }
            }
            Ok(())
        }
    }
}

fn outcome(world: &TaskWorld, ended: &[Ended]) -> TaskOutcome {
    let used_cpu_s: f64 = ended.iter().map(|job| job.used_cpu_s).sum();
    let last_end_s = ended.last().map_or(0.0, |job| job.at_s);
    let first_s = world.jobs.first().map_or(0.0, |job| job.arrival_s);
    let cores: f64 = world.nodes.iter().map(|node| node.cores).sum();
    let makespan_s = (last_end_s - first_s).max(TICK_S);
    TaskOutcome {
        mean_completion_s: ended.iter().map(|job| job.took_s).sum::<f64>() / ended.len().max(1) as f64,
        utilisation: used_cpu_s / (cores * makespan_s),
        makespan_s,
        unfinished: ended.iter().filter(|job| !job.is_done).count(),
    }
}

/// Lets one tick pass.
fn advance(world: &TaskWorld, alive: &mut [Running]) {
    // How many jobs use each node's link.
    let mut users = vec![0usize; world.nodes.len()];
    let bytes: Vec<Vec<f64>> = alive.iter().map(|job| link_bytes(world, job)).collect();
    for (node, users) in users.iter_mut().enumerate() {
        *users = bytes.iter().filter(|bytes| bytes[node] > 0.0).count();
    }
    for (job, bytes) in alive.iter_mut().zip(&bytes) {
        let pause_s = job.pause_s.min(TICK_S);
        job.pause_s -= pause_s;
        let network_s =
            bytes.iter().zip(&users).map(|(bytes, users)| bytes * *users as f64 / world.link).fold(0.0, f64::max);
        let truth = &world.jobs[job.truth];
        let Some(speed) = speed(truth, job.group(), network_s) else { continue };
        let left = job.group().steps_left.unwrap_or(0.0);
        let steps = (speed * (TICK_S - pause_s)).min(left.max(0.0));
        let group = job.group_mut();
        let workers = group.of_role(TaskRole::Worker).count() as f64;
        let (pushes, per_worker) = match group.mode {
            TrainingMode::Sync => (workers, truth.work_core_s / workers),
            TrainingMode::Async => (1.0, truth.work_core_s / workers),
        };
        let mut used = 0.0;
        for task in &mut group.tasks {
            let cpu_s = steps
                * match task.id.role {
                    TaskRole::Server => truth.loads[task.id.index as usize] * truth.push * pushes,
                    TaskRole::Worker => per_worker,
                };
            task.cpu_s += cpu_s;
            used += cpu_s;
        }
        group.steps += steps;
        group.steps_left = Some(left - steps);
        job.used_cpu_s += used;
    }
}

/// Bytes of one step over each node's link; of one cycle of all workers if the job is asynchronous.
fn link_bytes(world: &TaskWorld, job: &Running) -> Vec<f64> {
    let truth = &world.jobs[job.truth];
    let mut bytes = vec![0.0; world.nodes.len()];
    let at = |node: NodeId| world.nodes.binary_search_by_key(&node, |n| n.id).ok();
    for server in job.group().of_role(TaskRole::Server) {
        for worker in job.group().of_role(TaskRole::Worker).filter(|worker| worker.node != server.node) {
            // Parameters to the worker and a gradient back.
            let sent = 2.0 * truth.model_bytes * truth.loads[server.id.index as usize];
            for node in [server.node, worker.node] {
                if let Some(at) = at(node) {
                    bytes[at] += sent;
                }
            }
        }
    }
    bytes
}

/// Steps per second; `None` while the job cannot train.
fn speed(truth: &TaskJob, group: &TaskGroup, network_s: f64) -> Option<f64> {
    let servers = group.of_role(TaskRole::Server).count();
    let workers = group.of_role(TaskRole::Worker).count() as f64;
    if servers < group.servers.count as usize || workers == 0.0 {
        return None;
    }
    let slowest =
        group.of_role(TaskRole::Worker).map(|task| task.cores.min(truth.usable)).fold(f64::INFINITY, f64::min);
    let serve = |task: &TaskView| truth.loads[task.id.index as usize] * truth.push * workers / task.cores;
    let serve_s = group.of_role(TaskRole::Server).map(serve).fold(0.0, f64::max);
    let rest_s = serve_s + network_s + truth.overhead_s;
    let speed = match group.mode {
        TrainingMode::Sync => 1.0 / (truth.work_core_s / (workers * slowest) + rest_s),
        TrainingMode::Async => workers / (truth.work_core_s / slowest + rest_s),
    };
    speed.is_finite().then_some(speed)
}
