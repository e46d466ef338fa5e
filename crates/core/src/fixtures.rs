//! Small sound values for tests of the executors. Only tests see them (feature `fixtures`).

use crate::check::{CheckedPlan, CheckedTarget, check};
use crate::model::{JobId, NodeId, PerResource, Share, Time};
use crate::plan::{Plan, Reason, Standing, Target, Verdict};
use crate::signal::Category;
use crate::view::{JobView, NodeView, Phase, View};
use std::collections::BTreeMap;

/// One node without limits on its number of jobs.
pub fn node(id: u32) -> NodeView {
    NodeView { id: NodeId(id), cores: 4.0, speed: 1.0, memory_bytes: 1 << 33, slots: None, idle: None }
}

/// A job that has run on `node` since time zero.
pub fn running(id: u64, node: u32) -> JobView {
    JobView {
        id: JobId(id),
        phase: Phase::Running { node: NodeId(node), since: Time::ZERO, attempt: 1 },
        ..JobView::default()
    }
}

/// A verdict that gives a running job `target`.
pub fn verdict(target: Target) -> Verdict {
    Verdict {
        target: Some(target),
        growth: PerResource::default(),
        category: Category::Growing,
        reason: Reason::NotYetMeasured,
        standing: Standing::New,
        least: Share::ZERO,
    }
}

/// A checked plan for one node on which each of these jobs gets its target.
///
/// # Panics
/// If the targets break a promise.
pub fn checked_plan(generation: u64, targets: &[(JobId, Target)]) -> CheckedPlan {
    let verdicts: BTreeMap<_, _> = targets.iter().map(|(id, target)| (*id, verdict(*target))).collect();
    let jobs = verdicts.keys().map(|id| running(id.0, 0)).collect();
    let view = View { now: Time::ZERO, nodes: vec![node(0)], jobs };
    let plan = Plan { generation, verdicts, ..Plan::default() };
    check(&view, plan).expect("a sound plan")
}

/// The plan as no policy may make it: it is of another moment than its view, every running job gets the whole of its
/// node, and every task a thousand times its cores. Starts and moves stay, so that an executor that does not check
/// would carry them out.
pub(crate) fn unsound(mut plan: Plan) -> Plan {
    plan.at = Time(plan.at.0.wrapping_add(1));
    for verdict in plan.verdicts.values_mut() {
        verdict.target = verdict.target.map(|_| Target::FREE);
    }
    for task in plan.tasks.values_mut().flat_map(|tasks| &mut tasks.tasks) {
        task.cores *= 1000.0;
    }
    plan
}

/// `target` as the only one of its node.
///
/// # Panics
/// If the target breaks a promise.
pub fn checked_target(target: Target) -> CheckedTarget {
    checked_plan(1, &[(JobId(0), target)]).target(JobId(0)).expect("the plan has one job")
}
