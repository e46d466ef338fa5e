//! A second opinion on every plan, written without looking at how plans are made.
//!
//! It runs in tests, in the simulator and before every apply; a plan with a violation is not carried out.

use crate::model::{JobId, NodeId, OwnerId, Resource};
use crate::plan::Plan;
use crate::view::{Phase, View};
use std::collections::{BTreeMap, BTreeSet};

/// Rounding in sums of a few thousand shares stays far below this.
const TOLERANCE: f64 = 1e-6;

/// What a plan got wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Violation {
    #[error("the plan is of another moment than the view")]
    OtherMoment,
    #[error("{0} has no verdict")]
    NoVerdict(JobId),
    #[error("{0} has a verdict, but nobody knows it")]
    UnknownJob(JobId),
    #[error("{0} runs but has no target")]
    NoTarget(JobId),
    #[error("{0} waits but has a target")]
    TargetWhileWaiting(JobId),
    #[error("{0} would be started though it already runs or is started twice")]
    SecondAttempt(JobId),
    #[error("{0} would be started before the job it waits for has ended")]
    TooEarly(JobId),
    #[error("{0} would be moved though it does not run, is where it should go, or is moved twice")]
    NeedlessMove(JobId),
    #[error("{job} would be started on {node}, which nobody knows")]
    UnknownNode { job: JobId, node: NodeId },
    #[error("{node} would run {running} jobs in {slots} slots")]
    TooManyJobs { node: NodeId, running: usize, slots: usize },
    #[error("{node} would give away {sum:.4} of its {resource:?}")]
    OverCapacity { node: NodeId, resource: Resource, sum: f64 },
    #[error("{job} would get {share:.4} of the CPU, less than its floor {floor:.4}")]
    BelowFloor { job: JobId, share: f64, floor: f64 },
    #[error("{job} has a CPU limit of {limit:.4}, outside its floor {floor:.4} and its maximum {max:.4}")]
    LimitOutOfBounds { job: JobId, limit: f64, floor: f64, max: f64 },
}

/// All that is wrong with `plan` in the light of `view`; empty for a sound plan.
pub fn check(view: &View, plan: &Plan) -> Vec<Violation> {
    let mut found = Vec::new();
    if plan.at != view.now {
        found.push(Violation::OtherMoment);
    }
    found.extend(plan.verdicts.keys().filter(|id| view.job(**id).is_none()).map(|id| Violation::UnknownJob(*id)));
    check_starts(view, plan, &mut found);
    check_targets(view, plan, &mut found);
    found
}

fn check_starts(view: &View, plan: &Plan, found: &mut Vec<Violation>) {
    let mut started = BTreeSet::new();
    let mut running: BTreeMap<NodeId, usize> = BTreeMap::new();
    for node in view.jobs.iter().filter_map(|j| j.node()) {
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

/// A move is sound if its job runs elsewhere, once, and there is room where it goes.
fn check_moves(view: &View, plan: &Plan, running: &mut BTreeMap<NodeId, usize>, found: &mut Vec<Violation>) {
    let mut moved = BTreeSet::new();
    for m in &plan.moves {
        let Some(from) = view.job(m.job).and_then(|j| j.node()).filter(|n| *n != m.to && moved.insert(m.job)) else {
            found.push(Violation::NeedlessMove(m.job));
            continue;
        };
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

fn check_targets(view: &View, plan: &Plan, found: &mut Vec<Violation>) {
    let mut sums: BTreeMap<(NodeId, Resource), f64> = BTreeMap::new();
    let mut floors: BTreeMap<NodeId, f64> = BTreeMap::new();
    let mut owners: BTreeMap<NodeId, BTreeSet<OwnerId>> = BTreeMap::new();
    for job in &view.jobs {
        if let Some(node) = job.node() {
            *floors.entry(node).or_default() += job.floor.get();
            owners.entry(node).or_default().insert(job.owner);
        }
    }
    for job in &view.jobs {
        let Some(verdict) = plan.verdicts.get(&job.id) else {
            found.push(Violation::NoVerdict(job.id));
            continue;
        };
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
        for r in Resource::ALL {
            *sums.entry((node, r)).or_default() += target.share.get(r).get();
        }
        let (share, limit) = (target.share.cpu.get(), target.limit.cpu.get());
        let (floor, max) = (job.floor.get(), job.max.get());
        // Floors can be kept only while together they fit the part of the owner who set them; with several owners that part is an
        // equal one, which this opinion does not recompute for each.
        let kept = floors[&node] <= 1.0 && owners[&node].len() == 1;
        if kept && share < floor - TOLERANCE {
            found.push(Violation::BelowFloor { job: job.id, share, floor });
        }
        if limit > max + TOLERANCE || (kept && floor <= max && limit < floor - TOLERANCE) {
            found.push(Violation::LimitOutOfBounds { job: job.id, limit, floor, max });
        }
    }
    let over = sums.into_iter().filter(|(_, sum)| *sum > 1.0 + TOLERANCE);
    found.extend(over.map(|((node, resource), sum)| Violation::OverCapacity { node, resource, sum }));
}
