//! From a snapshot to changes of tasks. Pure: no I/O, no clock.
//!
//! The core decides with its preset `operator`. A plan that fails its check changes nothing.

use super::snapshot::{ElasticSnapshot, RoleBounds, RunningJob, RunningTask};
use crate::placement::RECORDED_JOBS;
use crate::placement::record::{JobDecision, RecordError};
use crate::state::agents::MOST_STEPS;
use gainshare_core::check::CheckedTasks;
use gainshare_core::decider::{Decider, Decision, Outcome};
use gainshare_core::model::{JobId, NodeId, Time};
use gainshare_core::policy::{Elastic, Policy, Preset, ScaleRule};
use gainshare_core::tasks::{RoleSpec, TaskGroup, TaskId as CoreTask, TaskReason, TaskRole, TaskView, TrainingMode};
use gainshare_core::view::{Deadline, JobView, NodeView, Phase, View};
use gainshare_kube_api::names::{JobUid, NodeName, PodUid};
use gainshare_kube_api::tasks::{Role, TaskId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// A task keeps at least this part of its request, and at least [`LEAST_CORES`].
const LEAST_PART: f64 = 0.1;
const LEAST_CORES: f64 = 0.05;
/// Seconds of CPU of a thousand cores over thirty years.
const MOST_COUNT: f64 = 1e12;
/// Node agents report every two seconds.
const EXTRAPOLATED_S: f64 = 3.0;

/// What shall change for a job, and why.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ScaleDecision {
    pub(super) uid: JobUid,
    pub(super) why: TaskReason,
    /// Another number of workers, without the chief.
    pub(super) workers: Option<(u32, u32)>,
    pub(super) resizes: Vec<TaskResize>,
}

/// New resources of a task.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TaskResize {
    pub(super) task: TaskId,
    pub(super) pod_uid: PodUid,
    pub(super) node: NodeName,
    pub(super) from_milli: u64,
    pub(super) to_milli: u64,
    /// More memory, if it was nearly used up.
    pub(super) memory_bytes: Option<u64>,
}

/// The decision, and what it remembers.
#[derive(Debug)]
pub(super) struct SizeDecider {
    decider: Decider,
    /// By uid and epoch: the measurements of one attempt say nothing about the next.
    jobs: BTreeMap<(JobUid, u32), JobId>,
    next_job: u64,
    nodes: BTreeMap<NodeName, NodeId>,
    /// The CPU time of each pod.
    cpu_counters: HashMap<PodUid, Counter>,
    /// The steps of each job, by its uid.
    step_counters: HashMap<JobUid, Counter>,
    /// Plans that failed their check.
    pub(super) rejected: u64,
    /// The last decision, if it was recorded.
    recorded: Option<Arc<Decision>>,
}

/// A counter that only grows, of reports that come every few seconds and may start again from zero.
///
/// Reports do not come at the moments of decisions. Between two reports the counter goes on with the last rate, for
/// at most [`EXTRAPOLATED_S`]; without that, a measurement of some seconds would be wrong by a whole report.
#[derive(Debug, Clone, Copy, Default)]
struct Counter {
    before: f64,
    last: f64,
    at_s: f64,
    rate: f64,
    /// The largest value that was answered.
    shown: f64,
}

impl Counter {
    fn value(&mut self, reported: f64, now_s: f64) -> f64 {
        let reported = if reported.is_finite() { reported.clamp(0.0, MOST_COUNT) } else { self.last };
        let elapsed_s = (now_s - self.at_s).max(0.0);
        if reported < self.last {
            self.before += self.last;
            (self.last, self.at_s) = (reported, now_s);
        } else if reported > self.last {
            let is_first = self.at_s <= 0.0;
            self.rate = if is_first || elapsed_s <= 0.0 { 0.0 } else { (reported - self.last) / elapsed_s };
            (self.last, self.at_s) = (reported, now_s);
        }
        let since_s = (now_s - self.at_s).clamp(0.0, EXTRAPOLATED_S);
        self.shown = self.shown.max(self.before + self.last + self.rate * since_s);
        self.shown
    }
}

impl SizeDecider {
    pub(super) fn new(numbers: Elastic) -> SizeDecider {
        let policy = Policy { scale: ScaleRule::Elastic(numbers), ..Policy::from(Preset::Operator) };
        SizeDecider {
            decider: Decider::new(policy),
            jobs: BTreeMap::new(),
            next_job: 0,
            nodes: BTreeMap::new(),
            cpu_counters: HashMap::new(),
            step_counters: HashMap::new(),
            rejected: 0,
            recorded: None,
        }
    }

    /// What shall change now: one decision for each running job, or nothing if nothing is due.
    pub(super) fn decide(&mut self, snapshot: &ElasticSnapshot, now: Time) -> Vec<ScaleDecision> {
        let view = self.view(snapshot, now);
        // Recording copies the memory of the policy, which costs time in a large cluster.
        let is_recorded = view.jobs.len() <= RECORDED_JOBS;
        let outcome = if is_recorded { self.decider.decide_recorded(view) } else { self.decider.decide(view) };
        let decision = match outcome {
            Outcome::NotDue => return Vec::new(),
            Outcome::Decision(decision) => Arc::new(decision),
            Outcome::Rejected(rejection) => {
                let record = rejection.record.as_ref().and_then(|record| serde_json::to_string(record).ok());
                let reasons = rejection.reasons();
                tracing::error!(record, "a plan for tasks failed its check and is not carried out: {reasons}");
                self.rejected += 1;
                return Vec::new();
            }
        };
        self.recorded = is_recorded.then(|| decision.clone());
        let with_plan = snapshot.running.iter().filter_map(|job| {
            let id = self.jobs.get(&(job.uid.clone(), job.epoch))?;
            Some(changes(job, decision.plan.tasks(*id)?))
        });
        with_plan.collect()
    }

    /// The last decision about each job that takes part, by uid.
    pub(super) fn records(&self) -> HashMap<JobUid, Result<JobDecision, RecordError>> {
        let record = |job: &JobId| match &self.recorded {
            None if self.jobs.len() > RECORDED_JOBS => Err(RecordError::TooManyJobs),
            Some(decision) if decision.plan.verdicts.contains_key(job) => {
                Ok(JobDecision { job: *job, decision: decision.clone() })
            }
            _ => Err(RecordError::Undecided),
        };
        // Of several attempts of a job, the newest comes last and stays.
        self.jobs.iter().map(|((uid, _), job)| (uid.clone(), record(job))).collect()
    }

    fn node(&mut self, name: &NodeName) -> NodeId {
        let next = NodeId(self.nodes.len() as u32);
        *self.nodes.entry(name.clone()).or_insert(next)
    }

    fn job(&mut self, uid: &JobUid, epoch: u32) -> JobId {
        let next = &mut self.next_job;
        *self.jobs.entry((uid.clone(), epoch)).or_insert_with(|| {
            *next += 1;
            JobId(*next)
        })
    }

    fn view(&mut self, snapshot: &ElasticSnapshot, now: Time) -> View {
        let alive: BTreeSet<(JobUid, u32)> = snapshot.running.iter().map(|job| (job.uid.clone(), job.epoch)).collect();
        let waiting: BTreeSet<(JobUid, u32)> = snapshot.waiting.iter().map(|gang| (gang.uid.clone(), 0)).collect();
        self.jobs.retain(|key, _| alive.contains(key) || waiting.contains(key));
        let pods: BTreeSet<&PodUid> =
            snapshot.running.iter().flat_map(|job| &job.tasks).map(|task| &task.pod_uid).collect();
        self.cpu_counters.retain(|uid, _| pods.contains(uid));
        let job_uids: BTreeSet<&JobUid> = snapshot.running.iter().map(|job| &job.uid).collect();
        self.step_counters.retain(|uid, _| job_uids.contains(uid));
        // The tasks that take part have their part of a node beside what is free.
        let mut rooms: BTreeMap<NodeId, (u64, u64)> = BTreeMap::new();
        for (name, free) in &snapshot.free {
            rooms.insert(self.node(name), *free);
        }
        let mut jobs: Vec<JobView> = Vec::new();
        for job in &snapshot.running {
            let view = self.running_view(job, &mut rooms, now.as_secs_f64());
            jobs.extend(view);
        }
        for gang in &snapshot.waiting {
            let group = TaskGroup {
                mode: TrainingMode::Sync,
                servers: role_spec(gang.servers, None),
                workers: role_spec(gang.workers, None),
                tasks: Vec::new(),
                steps: 0.0,
                steps_left: None,
                traffic: gang.traffic.clone(),
            };
            jobs.push(JobView {
                id: self.job(&gang.uid, 0),
                arrived: Time(gang.created.as_microsecond().max(0).unsigned_abs()),
                priority: gang.priority,
                tasks: Some(group),
                ..JobView::default()
            });
        }
        jobs.sort_by_key(|job| job.id);
        let node = |(id, (milli, bytes)): (NodeId, (u64, u64))| NodeView {
            id,
            cores: milli as f64 / 1000.0,
            speed: 1.0,
            memory_bytes: bytes,
            slots: None,
            idle_node_s: None,
        };
        View { now, nodes: rooms.into_iter().map(node).collect(), jobs }
    }

    fn running_view(
        &mut self,
        job: &RunningJob,
        rooms: &mut BTreeMap<NodeId, (u64, u64)>,
        now_s: f64,
    ) -> Option<JobView> {
        let mut tasks = Vec::new();
        for task in &job.tasks {
            let node = self.node(&task.node);
            let cpu_s = self.cpu_counters.entry(task.pod_uid.clone()).or_default().value(task.cpu_s, now_s);
            let memory_bytes = memory_in_view(task);
            // A node that takes no new pods keeps its tasks, and they keep what they have.
            let room = rooms.entry(node).or_default();
            *room = (room.0.saturating_add(task.milli), room.1.saturating_add(memory_bytes));
            tasks.push(TaskView {
                id: core_task(job, task.task),
                node,
                cores: task.milli as f64 / 1000.0,
                memory_bytes,
                cpu_s,
                memory_used_bytes: task.memory_used_bytes.min(memory_bytes),
                traffic_bytes: 0.0,
            });
        }
        tasks.sort_by_key(|task| task.id);
        let first = tasks.first()?.node;
        let since = Time(job.created.as_microsecond().max(0).unsigned_abs());
        let step = job.step.unwrap_or(0).min(MOST_STEPS);
        let of_role = |is_server: bool| {
            let tasks = job.tasks.iter().filter(move |task| (task.task.role == Role::Ps) == is_server);
            let least = tasks.clone().map(|task| task.allowed_milli.0).max().unwrap_or(0);
            (least, tasks.map(|task| task.allowed_milli.1).min().unwrap_or(0))
        };
        let group = TaskGroup {
            mode: if job.is_async { TrainingMode::Async } else { TrainingMode::Sync },
            servers: role_spec(job.servers, Some(of_role(true))),
            workers: role_spec(job.workers, Some(of_role(false))),
            tasks,
            steps: self.step_counters.entry(job.uid.clone()).or_default().value(step as f64, now_s),
            steps_left: job.total.map(|total| total.min(MOST_STEPS).saturating_sub(step) as f64),
            traffic: Vec::new(),
        };
        Some(JobView {
            id: self.job(&job.uid, job.epoch),
            arrived: since,
            deadline: job.due_in_s.map(|due_in_s| Deadline::strict(Time::from_secs_f64((now_s + due_in_s).max(0.0)))),
            phase: Phase::Running { node: first, since, attempt: job.epoch },
            tasks: Some(group),
            ..JobView::default()
        })
    }
}

/// A task without a memory setting never has too little of it.
fn memory_in_view(task: &RunningTask) -> u64 {
    task.memory_bytes.unwrap_or_else(|| task.memory_used_bytes.saturating_mul(2))
}

fn role_spec(bounds: RoleBounds, allowed_milli: Option<(u64, u64)>) -> RoleSpec {
    let cores = bounds.milli as f64 / 1000.0;
    let (least, most) = allowed_milli.unwrap_or((0, u64::MAX));
    RoleSpec {
        count: bounds.count,
        min: bounds.min,
        max: bounds.max,
        cores,
        memory_bytes: bounds.bytes,
        least_cores: (cores * LEAST_PART).max(LEAST_CORES).max(least as f64 / 1000.0),
        max_cores: most as f64 / 1000.0,
    }
}

/// Servers keep their numbers. The chief is the first worker.
fn core_task(job: &RunningJob, task: TaskId) -> CoreTask {
    let has_chief = job.tasks.iter().any(|one| one.task.role.is_chief());
    match task.role {
        Role::Ps => CoreTask::server(task.index),
        role if role.is_chief() => CoreTask::worker(0),
        _ => CoreTask::worker(task.index.saturating_add(u32::from(has_chief))),
    }
}

/// The differences between what a job has and its plan.
fn changes(job: &RunningJob, plan: CheckedTasks<'_>) -> ScaleDecision {
    let mut resizes = Vec::new();
    for task in &job.tasks {
        let id = core_task(job, task.task);
        let Some(target) = plan.tasks.iter().find(|target| target.id == id) else { continue };
        // Rounded down, so that the sum over a node never exceeds what the plan gives.
        let to_milli = (target.cores * 1000.0 + 1e-6).floor().clamp(0.0, u64::MAX as f64) as u64;
        let memory_bytes = Some(target.memory_bytes).filter(|bytes| task.memory_bytes.is_some_and(|now| *bytes > now));
        if to_milli != task.milli || memory_bytes.is_some() {
            resizes.push(TaskResize {
                task: task.task,
                pod_uid: task.pod_uid.clone(),
                node: task.node.clone(),
                from_milli: task.milli,
                to_milli,
                memory_bytes,
            });
        }
    }
    let chiefs = job.tasks.iter().filter(|task| task.task.role.is_chief()).count() as u32;
    let now = job.tasks.iter().filter(|task| task.task.role == Role::Worker).count() as u32;
    let planned = plan.tasks.iter().filter(|target| target.id.role == TaskRole::Worker).count() as u32;
    let planned = planned.saturating_sub(chiefs);
    let workers = (planned != now).then_some((now, planned));
    ScaleDecision { uid: job.uid.clone(), why: plan.why, workers, resizes }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
