//! A second opinion on every plan, written without looking at how plans are made.
//!
//! **Problem.** A mistake in a policy must not reach a job: no job may lose its floor, run twice,
//! or be moved although it cannot be saved.
//!
//! **Approach.** [`check`] compares a plan with the view that it was made for. A sound plan becomes
//! a [`CheckedPlan`], which nothing else can make; executors (the adapters of `crates/limits`, the
//! node agent, the operator, the simulator) accept nothing but that, or a [`CheckedTarget`] or
//! [`CheckedTasks`] taken from it.
//!
//! **What is checked** (the promises of the design): each job has one verdict; a running job has a
//! target and a waiting one has none; a job is started at most once, only while it waits and only
//! after the jobs it depends on; a move takes a running job that is not pinned to another known
//! node, at most once; no node runs more jobs than it has slots; the shares of a node sum to at
//! most 1, those of one owner to at most the owner's part; floor ≤ limit ≤ maximum, and share ≥
//! floor, wherever an owner's floors fit the owner's part; what is promised on a node (for deadlines)
//! sums to at most 1, and no job has less than its promise; for jobs of tasks see `check/tasks.rs`.
//!
//! An unchecked plan cannot take the place of a checked one:
//! ```compile_fail
//! use gainshare_core::{check::CheckedPlan, plan::Plan};
//! let unchecked: CheckedPlan = Plan::default();
//! ```
//! ```compile_fail
//! use gainshare_core::{check::CheckedPlan, plan::Plan};
//! let unchecked = CheckedPlan(Plan::default());
//! ```
//! ```compile_fail
//! let unchecked: gainshare_core::check::CheckedPlan = serde_json::from_str("{}").unwrap();
//! ```
//! ```compile_fail
//! use gainshare_core::{check::CheckedTarget, plan::Target};
//! let unchecked: CheckedTarget = Target::FREE;
//! ```
//! ```compile_fail
//! use gainshare_core::{check::CheckedTasks, tasks::TaskPlan};
//! fn unchecked(plan: &TaskPlan) -> CheckedTasks<'_> { plan }
//! ```
//! ```compile_fail
//! use gainshare_core::{check::CheckedTasks, tasks::TaskPlan};
//! fn unchecked(plan: &TaskPlan) -> CheckedTasks<'_> { CheckedTasks(plan) }
//! ```

mod tasks;

use crate::model::{JobId, NodeId, OwnerId, PerResource, Resource};
use crate::plan::{Plan, Target};
use crate::tasks::{TaskId, TaskPlan};
use crate::view::{Phase, View};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

/// Rounding in sums of a few thousand shares stays far below this.
const TOLERANCE: f64 = 1e-6;

/// What a plan got wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Violation {
    #[error("the plan is of another moment than the view")]
    OtherMoment,
    #[error("{0} has no verdict")]
    NoVerdict(JobId),
    #[error("{0} has a verdict or is started, but the view does not know it")]
    UnknownJob(JobId),
    #[error("{0} runs but has no target")]
    NoTarget(JobId),
    #[error("{0} waits but has a target")]
    TargetWhileWaiting(JobId),
    #[error("{0} would be started although it already runs, or it would be started twice")]
    SecondAttempt(JobId),
    #[error("{0} would be started before the job it waits for has ended")]
    TooEarly(JobId),
    #[error("{0} would be moved although it does not run, is on that node already, or is moved twice")]
    NeedlessMove(JobId),
    #[error("{0} would be moved although it must stay on its node")]
    PinnedMove(JobId),
    #[error("{job} would be started on or moved to {node}, which the view does not know")]
    UnknownNode { job: JobId, node: NodeId },
    #[error("{node} would run {running} jobs in {slots} slots")]
    TooManyJobs { node: NodeId, running: usize, slots: usize },
    #[error("{node} would give away {sum:.4} of its {resource:?}")]
    OverCapacity { node: NodeId, resource: Resource, sum: f64 },
    #[error("{owner} would get {sum:.4} of the {resource:?} of {node}, but its part is {part:.4}")]
    OverPart { node: NodeId, owner: OwnerId, resource: Resource, sum: f64, part: f64 },
    #[error("{job} would get {share:.4} of the CPU, less than its floor {floor:.4}")]
    BelowFloor { job: JobId, share: f64, floor: f64 },
    #[error("{job} has a CPU limit of {limit:.4}, outside its floor {floor:.4} and its maximum {max:.4}")]
    LimitOutOfBounds { job: JobId, limit: f64, floor: f64, max: f64 },
    #[error("{node} would promise {sum:.4} of its CPU")]
    OverPromised { node: NodeId, sum: f64 },
    #[error("{job} would get {share:.4} of the CPU, less than the {promised:.4} promised for its deadline")]
    BelowPromise { job: JobId, share: f64, promised: f64 },
    #[error("the tasks on {node} would have {cores:.2} of its {of:.2} cores")]
    TaskCores { node: NodeId, cores: f64, of: f64 },
    #[error("the tasks on {node} would have {bytes} of its {of} bytes of memory")]
    TaskMemory { node: NodeId, bytes: u64, of: u64 },
    #[error("the tasks of {0} are not in order, or one is there twice")]
    TaskOrder(JobId),
    #[error("{job} would have {servers} servers and {workers} workers, which its owner does not allow")]
    TaskCount { job: JobId, servers: u32, workers: u32 },
    #[error("{task} of {job} would move to another node while it runs")]
    TaskMoved { job: JobId, task: TaskId },
    #[error("{task} of {job} would get {cores:.3} cores, less than keeps it alive")]
    TaskStarved { job: JobId, task: TaskId, cores: f64 },
    #[error("{task} of {job} would get less memory than it uses")]
    TaskMemoryShort { job: JobId, task: TaskId },
}

/// A plan that passed its check: the only thing that executors carry out. It reads like the
/// [`Plan`] in it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct CheckedPlan(Plan);

/// The target of one job from a checked plan. It reads like the [`Target`] in it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub struct CheckedTarget(Target);

/// The tasks of one job from a checked plan. It reads like the [`TaskPlan`] in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckedTasks<'p>(&'p TaskPlan);

impl CheckedPlan {
    /// What `job` may use from now on, if it runs.
    pub fn target(&self, job: JobId) -> Option<CheckedTarget> {
        self.0.verdicts.get(&job).and_then(|v| v.target).map(CheckedTarget)
    }

    /// What the tasks of `job` shall be from now on, if it has tasks and runs or starts.
    pub fn tasks(&self, job: JobId) -> Option<CheckedTasks<'_>> {
        self.0.tasks.get(&job).map(CheckedTasks)
    }

    pub fn as_plan(&self) -> &Plan {
        &self.0
    }
}

impl Deref for CheckedPlan {
    type Target = Plan;
    fn deref(&self) -> &Plan {
        &self.0
    }
}

impl Deref for CheckedTasks<'_> {
    type Target = TaskPlan;
    fn deref(&self) -> &TaskPlan {
        self.0
    }
}

impl Deref for CheckedTarget {
    type Target = Target;
    fn deref(&self) -> &Target {
        &self.0
    }
}

/// A plan that breaks a promise, and which.
#[derive(Debug, Clone, PartialEq)]
pub struct UnsoundPlan {
    pub plan: Plan,
    /// At least one.
    pub violations: Vec<Violation>,
}

/// Checks a plan against the view that it was made for.
pub fn check(view: &View, plan: Plan) -> Result<CheckedPlan, Box<UnsoundPlan>> {
    let violations = violations(view, &plan);
    if violations.is_empty() { Ok(CheckedPlan(plan)) } else { Err(Box::new(UnsoundPlan { plan, violations })) }
}

/// Checks the targets of an earlier plan again, for the jobs of `view` that run and have one: a
/// restarted driver puts back in force what it had journaled. Starts and moves are left out; the
/// earlier driver may have made them.
pub fn check_again(view: &View, earlier: Plan) -> Result<CheckedPlan, Box<UnsoundPlan>> {
    let has_target = |id: JobId| earlier.verdicts.get(&id).is_some_and(|v| v.target.is_some());
    let jobs = view.jobs.iter().filter(|j| j.node().is_some() && has_target(j.id)).cloned().collect();
    let view = View { now: view.now, nodes: view.nodes.clone(), jobs };
    let mut plan = Plan { at: view.now, starts: vec![], moves: vec![], ..earlier };
    plan.tasks.retain(|id, _| view.job(*id).is_some());
    plan.verdicts.retain(|id, _| view.job(*id).is_some());
    check(&view, plan)
}

/// All that is wrong with `plan` in the light of `view`; empty for a sound plan.
fn violations(view: &View, plan: &Plan) -> Vec<Violation> {
    let mut found = Vec::new();
    if plan.at != view.now {
        found.push(Violation::OtherMoment);
    }
    found.extend(plan.verdicts.keys().filter(|id| view.job(**id).is_none()).map(|id| Violation::UnknownJob(*id)));
    check_starts(view, plan, &mut found);
    check_targets(view, plan, &mut found);
    tasks::check_tasks(view, plan, &mut found);
    found
}

fn check_starts(view: &View, plan: &Plan, found: &mut Vec<Violation>) {
    let mut started = BTreeSet::new();
    let mut running: BTreeMap<NodeId, usize> = BTreeMap::new();
    for node in view.jobs.iter().filter(|j| j.tasks.is_none()).filter_map(|j| j.node()) {
        *running.entry(node).or_default() += 1;
    }
    for start in &plan.starts {
        match view.job(start.job) {
            None => found.push(Violation::UnknownJob(start.job)),
            Some(job) => {
                if job.phase != Phase::Waiting || !started.insert(start.job) {
                    found.push(Violation::SecondAttempt(start.job));
                }
                if !job.waits_for.is_empty() {
                    found.push(Violation::TooEarly(start.job));
                }
            }
        }
        let Some(node) = view.node(start.node) else {
            found.push(Violation::UnknownNode { job: start.job, node: start.node });
            continue;
        };
        let count = running.entry(node.id).or_default();
        *count += 1;
        if let Some(slots) = node.slots.filter(|slots| *count > *slots) {
            found.push(Violation::TooManyJobs { node: node.id, running: *count, slots });
        }
    }
    check_moves(view, plan, &mut running, found);
}

/// A move is sound if its job runs elsewhere, may leave its node, is moved once, and there is room
/// where it goes.
fn check_moves(view: &View, plan: &Plan, running: &mut BTreeMap<NodeId, usize>, found: &mut Vec<Violation>) {
    let mut moved = BTreeSet::new();
    for m in &plan.moves {
        let job = view.job(m.job);
        let Some(from) = job.and_then(|j| j.node()).filter(|n| *n != m.to && moved.insert(m.job)) else {
            found.push(Violation::NeedlessMove(m.job));
            continue;
        };
        if job.is_some_and(|j| j.pinned) {
            found.push(Violation::PinnedMove(m.job));
        }
        let Some(node) = view.node(m.to) else {
            found.push(Violation::UnknownNode { job: m.job, node: m.to });
            continue;
        };
        *running.entry(from).or_default() -= 1;
        let count = running.entry(m.to).or_default();
        *count += 1;
        if let Some(slots) = node.slots.filter(|slots| *count > *slots) {
            found.push(Violation::TooManyJobs { node: node.id, running: *count, slots });
        }
    }
}

/// The jobs of one owner on one node: their floors and what they get in all.
#[derive(Default)]
struct Part {
    floors: f64,
    promised: f64,
    sums: PerResource<f64>,
}

fn check_targets(view: &View, plan: &Plan, found: &mut Vec<Violation>) {
    let mut nodes: BTreeMap<NodeId, BTreeMap<OwnerId, Part>> = BTreeMap::new();
    for job in view.jobs.iter().filter(|job| job.tasks.is_none()) {
        if let Some(node) = job.node() {
            nodes.entry(node).or_default().entry(job.owner).or_default().floors += job.floor.get();
        }
    }
    for job in &view.jobs {
        let Some(verdict) = plan.verdicts.get(&job.id) else {
            found.push(Violation::NoVerdict(job.id));
            continue;
        };
        if job.tasks.is_some() {
            continue;
        }
        let (node, target) = match (job.node(), verdict.target) {
            (Some(node), Some(target)) => (node, target),
            (Some(_), None) => {
                found.push(Violation::NoTarget(job.id));
                continue;
            }
            (None, Some(_)) => {
                found.push(Violation::TargetWhileWaiting(job.id));
                continue;
            }
            (None, None) => continue,
        };
        let owners = nodes.entry(node).or_default();
        let of_owner = 1.0 / owners.len() as f64;
        let part = owners.entry(job.owner).or_default();
        for r in Resource::ALL {
            *part.sums.get_mut(r) += target.share.get(r).get();
        }
        let (share, limit) = (target.share.cpu.get(), target.limit.cpu.get());
        let promised = verdict.least.get();
        part.promised += promised;
        if share < promised - TOLERANCE {
            found.push(Violation::BelowPromise { job: job.id, share, promised });
        }
        let (floor, max) = (job.floor.get(), job.max.get());
        // Floors can be kept only while together they fit the part of their owner.
        let kept = part.floors <= of_owner;
        if kept && share < floor - TOLERANCE {
            found.push(Violation::BelowFloor { job: job.id, share, floor });
        }
        if limit > max + TOLERANCE || (kept && floor <= max && limit < floor - TOLERANCE) {
            found.push(Violation::LimitOutOfBounds { job: job.id, limit, floor, max });
        }
    }
    for (node, owners) in nodes {
        let of_owner = 1.0 / owners.len() as f64;
        let promised: f64 = owners.values().map(|p| p.promised).sum();
        if promised > 1.0 + TOLERANCE {
            found.push(Violation::OverPromised { node, sum: promised });
        }
        for resource in Resource::ALL {
            let sum: f64 = owners.values().map(|p| *p.sums.get(resource)).sum();
            if sum > 1.0 + TOLERANCE {
                found.push(Violation::OverCapacity { node, resource, sum });
            }
            // An owner alone on a node has all of it, which is checked above.
            for (owner, part) in owners.iter().filter(|_| owners.len() > 1) {
                let sum = *part.sums.get(resource);
                if sum > of_owner + TOLERANCE {
                    found.push(Violation::OverPart { node, owner: *owner, resource, sum, part: of_owner });
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
