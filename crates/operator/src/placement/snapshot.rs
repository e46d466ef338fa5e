//! What a decision reads: nodes from the API server, progress from the node agents, jobs from the
//! controllers.
//!
//! Numbers of node agents are bounded here, so that a broken agent cannot overflow a sum.

use super::clock::Clock;
use crate::state::agents::Agents;
use crate::state::finish::finish;
use crate::state::lead::Leader;
use crate::state::orders::{JobFacts, JobState};
use crate::state::world::World;
use gainshare_core::model::{PerResource, Span, Time};
use gainshare_core::signal::Signal;
use gainshare_core::view::{Deadline, FinishView};
use gainshare_kube_api::names::NodeName;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A job makes fewer reports than this: a larger count is read as this.
const MOST_REPORTS: u64 = 1 << 40;

/// A job consumes less than this, in node-seconds.
const MOST_CONSUMED: f64 = 1e12;

/// A node.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NodeSnapshot {
    /// What training jobs can have of it: all but what other pods request.
    pub(crate) cores: f64,
    /// How fast a core is, relative to the others'.
    pub(crate) speed: f64,
    pub(crate) memory_bytes: u64,
    /// What no pod requests.
    pub(crate) free_milli: u64,
    pub(crate) free_bytes: u64,
    /// New pods may come.
    pub(crate) open: bool,
    /// The node's node agent reports.
    pub(crate) heard: bool,
}

/// The node agents' report about a job's present pod, on our clock.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct JobReport {
    pub(crate) signal: Signal,
    /// In node-seconds of its node.
    pub(crate) consumed_node_s: PerResource<f64>,
    /// The largest part of its node that it was seen to use.
    pub(crate) usable: Option<f64>,
    /// Under policies that move jobs for deadlines: its deadline, and how that stands.
    pub(crate) deadline: Option<Deadline>,
    pub(crate) finish: Option<FinishView>,
    /// Under the same policies: the part of its node that is kept for it (`floorPercent` of its SharePolicy), 0 to 1.
    pub(crate) floor: Option<f64>,
}

/// Everything that a decision reads.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClusterSnapshot {
    pub(crate) now: Time,
    /// By name.
    pub(crate) nodes: BTreeMap<NodeName, NodeSnapshot>,
    pub(crate) jobs: Vec<(Arc<JobFacts>, Option<JobReport>)>,
}

pub(super) fn read(leader: &Leader, jobs: Vec<Arc<JobFacts>>, clock: &Clock) -> ClusterSnapshot {
    let now = Instant::now();
    leader.read(|world| {
        let agents = leader.agents.lock();
        let with_report = |facts: Arc<JobFacts>| {
            let report = report(world, &agents, &facts, clock);
            (facts, report)
        };
        let jobs = jobs.into_iter().map(with_report).collect();
        ClusterSnapshot { now: clock.at(now), nodes: nodes(world, &agents, now), jobs }
    })
}

fn nodes(world: &World, agents: &Agents, now: Instant) -> BTreeMap<NodeName, NodeSnapshot> {
    let snapshot = world.nodes().iter().map(|(name, facts)| {
        let asked = world.requested(name);
        let (milli, bytes) = (facts.cpu_milli.unwrap_or(0), facts.memory_bytes.unwrap_or(0));
        let node = NodeSnapshot {
            cores: milli.saturating_sub(asked.others.0) as f64 / 1000.0,
            speed: f64::from(facts.speed_percent) / 100.0,
            memory_bytes: bytes.saturating_sub(asked.others.1),
            free_milli: milli.saturating_sub(asked.others.0.saturating_add(asked.jobs.0)),
            free_bytes: bytes.saturating_sub(asked.others.1.saturating_add(asked.jobs.1)),
            open: facts.open,
            heard: agents.is_heard(name, now),
        };
        (name.clone(), node)
    });
    snapshot.filter(|(_, node)| node.cores > 0.0).collect()
}

fn report(world: &World, agents: &Agents, facts: &JobFacts, clock: &Clock) -> Option<JobReport> {
    let pod = facts.pod_uid.as_ref()?;
    let reported = agents.job(pod)?.signal.as_ref()?;
    let node = match &facts.state {
        JobState::Running { node, .. } => node,
        _ => world.node_of(pod)?,
    };
    let agent = agents.clock(node)?;
    let mut signal = reported.signal(|us| clock.at(agent.at(us)));
    signal.reports = signal.reports.min(MOST_REPORTS);
    let consumed_node_s = reported.consumed();
    let consumed_node_s = PerResource::from_fn(|r| finite(*consumed_node_s.get(r)).clamp(0.0, MOST_CONSUMED));
    let usable = reported.usable.map(|usable| finite(usable).clamp(0.0, 1.0));
    let moves_for_deadlines = facts.policy.moves_for_deadlines();
    let finish = finish(world, agents, node, pod).filter(|_| moves_for_deadlines);
    let floor = world.shared(pod).filter(|_| moves_for_deadlines).map(|pod| pod.settings.floor);
    let (deadline, finish) = finish.unzip();
    let deadline = deadline.map(|deadline| Deadline {
        at: Time(deadline.at_ms.saturating_mul(1000)),
        tolerance: Span(deadline.tolerance_ms.saturating_mul(1000)),
    });
    Some(JobReport { signal, consumed_node_s, usable, deadline, finish: finish.flatten(), floor })
}

fn finite(number: f64) -> f64 {
    if number.is_finite() { number } else { 0.0 }
}

#[cfg(test)]
#[path = "snapshot_tests.rs"]
mod tests;
