//! What the decision reads: nodes with their room, jobs of tasks, and gangs that wait.
//!
//! A job takes part if all its servers and at least one worker run, the node agents of all its tasks report, and
//! every task can be resized. The requests of all other jobs count as taken.

use crate::jobs::task_job::line;
use crate::jobs::task_job::request::Class;
use crate::state::agents::Agents;
use crate::state::lead::Leader;
use crate::state::task_job::TaskJobSnapshot;
use crate::state::workload::WorkloadKey;
use crate::state::world::World;
use gainshare_kube_api::attempt::AttemptFacts;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{JobUid, NodeName, PodUid};
use gainshare_kube_api::tasks::{Role, TaskId, TaskJobSpec};
use gainshare_kube_api::training_job::State;
use gainshare_kube_api::wire::{PodOnNode, WATCHED_ONLY};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::time::Instant;

/// What growth leaves free of a node for new pods, in hundredths of what jobs can have of it.
pub(super) const RESERVE_PERCENT: u64 = 10;

/// Everything that one decision reads.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ElasticSnapshot {
    /// By name: what no pod requests, less the reserve, in thousandths of a core and bytes.
    pub(super) free: BTreeMap<NodeName, (u64, u64)>,
    pub(super) running: Vec<RunningJob>,
    pub(super) waiting: Vec<WaitingGang>,
    /// Jobs of the policy that cannot be resized, and why.
    pub(super) blocked: Vec<(WorkloadKey, FixedSize)>,
}

/// Why a task must keep the size that it has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum FixedSize {
    #[error("the pod {pod} belongs to the SharePolicy {policy}: remove one of the two")]
    OtherPolicy { pod: String, policy: String },
    #[error("{pod}: {message}")]
    Blocked { pod: String, message: String },
    #[error("{pod} requests no CPU: set a request")]
    NoRequest { pod: String },
}

/// A job whose tasks run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RunningJob {
    pub(super) key: WorkloadKey,
    pub(super) uid: JobUid,
    pub(super) epoch: u32,
    pub(super) created: Timestamp,
    pub(super) is_async: bool,
    pub(super) tasks: Vec<RunningTask>,
    /// What the author wrote for servers and for workers.
    pub(super) servers: RoleBounds,
    pub(super) workers: RoleBounds,
    /// The seconds until the last moment that its deadline tolerates; negative once that has passed.
    pub(super) due_in_s: Option<f64>,
    /// The largest step that a task has reported, and how many there are.
    pub(super) step: Option<u64>,
    pub(super) total: Option<u64>,
}

/// A gang that waits for room: what its tasks request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct WaitingGang {
    pub(super) uid: JobUid,
    pub(super) created: Timestamp,
    pub(super) priority: i32,
    pub(super) servers: RoleBounds,
    pub(super) workers: RoleBounds,
    /// Bytes per second of each server, if all were measured.
    pub(super) traffic: Vec<f64>,
}

/// How many tasks of a role there may be, and what each requests. The chief counts as a worker.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct RoleBounds {
    pub(super) count: u32,
    pub(super) min: u32,
    pub(super) max: u32,
    pub(super) milli: u64,
    pub(super) bytes: u64,
}

/// A task whose container runs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RunningTask {
    pub(super) task: TaskId,
    pub(super) pod_uid: PodUid,
    pub(super) node: NodeName,
    pub(super) milli: u64,
    /// Between which values the request may move.
    pub(super) allowed_milli: (u64, u64),
    /// The memory limit, or the request; `None` if it has neither.
    pub(super) memory_bytes: Option<u64>,
    pub(super) memory_used_bytes: u64,
    /// CPU time, as the node agent has measured it since it knows the pod.
    pub(super) cpu_s: f64,
}

pub(super) fn read(leader: &Leader, now: Timestamp) -> ElasticSnapshot {
    leader.read(|world| {
        let agents = leader.agents.lock();
        snapshot(world, &agents, now, Instant::now())
    })
}

fn snapshot(world: &World, agents: &Agents, now: Timestamp, at: Instant) -> ElasticSnapshot {
    let mut all = ElasticSnapshot::default();
    for room in line::rooms(world).into_iter().filter(|room| room.open) {
        let spare = |free: u64, size: u64| free.saturating_sub(size / 100 * RESERVE_PERCENT);
        let free = (spare(room.free.0, room.size.0), spare(room.free.1, room.size.1));
        all.free.insert(room.name, free);
    }
    for job in world.jobs.task_jobs().filter(|job| job.is_scaled()) {
        match running_job(world, agents, job, now, at) {
            Ok(Some(running)) => all.running.push(running),
            Ok(None) => {}
            Err(why) => all.blocked.push((job.key.clone(), why)),
        }
    }
    for request in line::requests(world, now).into_iter().filter(|request| request.class == Class::Gang) {
        let (mut servers, mut workers) = (RoleBounds::default(), RoleBounds::default());
        for need in &request.needs {
            let role = if need.task.role == Role::Ps { &mut servers } else { &mut workers };
            role.count += 1;
            role.milli = role.milli.max(need.requests.0);
            role.bytes = role.bytes.max(need.requests.1);
        }
        for role in [&mut servers, &mut workers] {
            (role.min, role.max) = (role.count, role.count);
        }
        let of_servers = request.needs.iter().filter(|need| need.task.role == Role::Ps);
        let traffic: Option<Vec<f64>> = of_servers.map(|need| need.traffic.map(|bytes_s| bytes_s as f64)).collect();
        all.waiting.push(WaitingGang {
            uid: request.uid,
            created: request.since,
            priority: request.priority,
            servers,
            workers,
            traffic: traffic.unwrap_or_default(),
        });
    }
    all
}

/// The job, if it takes part. An error names what keeps its tasks from being resized.
fn running_job(
    world: &World,
    agents: &Agents,
    job: &TaskJobSnapshot,
    now: Timestamp,
    at: Instant,
) -> Result<Option<RunningJob>, FixedSize> {
    let (Ok(spec), journal) = (&job.spec, &job.status.journal) else { return Ok(None) };
    let runs = journal.state == State::Running && journal.admitted && !journal.restarting;
    if !runs || job.deleting || job.is_foreign || spec.options.suspend {
        return Ok(None);
    }
    let (mut tasks, mut step, mut total) = (Vec::new(), None, None);
    for (task, (pod, attempt)) in line::current(world, job) {
        if task.role == Role::Evaluator || !is_up(pod, attempt) {
            continue;
        }
        let Some(on_node) = world.shared(&pod.uid) else { return Ok(None) };
        check_resizable(on_node)?;
        let Some(node) = pod.node.as_ref().filter(|node| agents.is_heard(node, at)) else { return Ok(None) };
        let (Some(cores), Some(report)) = (agents.cores(node), agents.job(&pod.uid)) else { return Ok(None) };
        let Some(signal) = &report.signal else { return Ok(None) };
        step = step.max(report.progress.step).max(signal.step);
        total = total.max(report.progress.total).max(signal.total);
        tasks.push(RunningTask {
            task,
            pod_uid: pod.uid.clone(),
            node: node.clone(),
            milli: on_node.now.requests.cpu_milli.unwrap_or_default(),
            allowed_milli: (on_node.allowed.cpu_milli.min, on_node.allowed.cpu_milli.max),
            memory_bytes: on_node.now.limits.memory_bytes.or(on_node.now.requests.memory_bytes),
            memory_used_bytes: signal.memory_used_bytes.unwrap_or_default(),
            cpu_s: signal.consumed_cpu_node_s * cores,
        });
    }
    let (servers, workers) = bounds(spec, job);
    let is_server = |task: &RunningTask| task.task.role == Role::Ps;
    let running_servers = tasks.iter().filter(|task| is_server(task)).count();
    if running_servers != servers.count as usize || running_servers == tasks.len() {
        return Ok(None);
    }
    Ok(Some(RunningJob {
        key: job.key.clone(),
        uid: job.uid.clone(),
        epoch: journal.epoch,
        created: job.created,
        is_async: job.is_async,
        due_in_s: job.deadline.map(|deadline| (deadline.latest_ms() as f64 - now.as_millisecond() as f64) / 1000.0),
        tasks,
        servers,
        workers,
        step,
        total,
    }))
}

fn is_up(pod: &PodFacts, attempt: &AttemptFacts) -> bool {
    attempt.running && attempt.deleted.is_none() && pod.node.is_some()
}

/// An error if the pod must keep what it has. Pods of the policy are only watched, as far as node agents are concerned.
fn check_resizable(on_node: &PodOnNode) -> Result<(), FixedSize> {
    let pod = on_node.name.clone();
    if !on_node.is_scaled() {
        return Err(FixedSize::OtherPolicy { pod, policy: on_node.policy.clone() });
    }
    match &on_node.blocked {
        Some(blocked) if blocked.reason != WATCHED_ONLY => {
            Err(FixedSize::Blocked { pod, message: blocked.message.clone() })
        }
        _ if on_node.now.requests.cpu_milli.is_none() => Err(FixedSize::NoRequest { pod }),
        _ => Ok(()),
    }
}

/// What the author wrote for servers and for workers. The number of workers may change if the author has set both
/// bounds, and no annotation sets it.
fn bounds(spec: &TaskJobSpec, job: &TaskJobSnapshot) -> (RoleBounds, RoleBounds) {
    let wanted = job.wanted();
    let fixed = |role: Role| {
        let count = wanted.get(&role).copied().unwrap_or(0);
        let (milli, bytes) = spec.roles.get(&role).map(|role| role.requests).unwrap_or_default();
        RoleBounds { count, min: count, max: count, milli, bytes }
    };
    let mut workers = fixed(Role::Worker);
    if let Some(role) = spec.roles.get(&Role::Worker).filter(|role| role.scales)
        && !job.asked.contains_key(&Role::Worker)
    {
        (workers.count, workers.min, workers.max) = (role.replicas, role.min, role.max);
    }
    if let Some(chief) = spec.chief() {
        let chief = fixed(chief);
        workers.count += chief.count;
        workers.min += chief.count;
        workers.max += chief.count;
        workers.milli = workers.milli.max(chief.milli);
        workers.bytes = workers.bytes.max(chief.bytes);
    }
    (fixed(Role::Ps), workers)
}
