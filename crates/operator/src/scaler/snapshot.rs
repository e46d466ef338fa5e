//! What the plan reads: jobs whose deadlines cannot be kept now, and the free room of the nodes that exist.
//!
//! **Which jobs are late.** A job that waits for a node and has a deadline: how long it will run is not known yet, so
//! no plan keeps its deadline while it waits. A job that runs, for which a miss is predicted
//! ([`crate::state::finish`]), and for which the decision about moves has found no node
//! ([`crate::state::orders::Orders::needing_nodes`]): a job that may not move for its deadline, or for which a node
//! that exists has room, needs no new one.
//!
//! **Which are left out.** Jobs whose deadline counts from their start and which have not started. Jobs whose pods
//! select nodes or need more than CPU and memory: it is not known which kind of node could run them. Jobs whose
//! deadline has passed.
//!
//! **Units.** Milliseconds since 1970 (`_ms`), core-seconds of a core of speed 1.

use super::kinds::to_core_room;
use crate::jobs::task_job::line;
use crate::jobs::task_job::request::Class;
use crate::state::agents::Agents;
use crate::state::finish::finish;
use crate::state::lead::Leader;
use crate::state::orders::{JobFacts, JobState};
use crate::state::workload::WorkloadKey;
use crate::state::world::World;
use gainshare_core::policies::deadline::{LateJob, NodeKind, Room};
use gainshare_core::view::Ends;
use gainshare_kube_api::deadline::Deadline;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{JobUid, NamespacedName, NodeName};
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How long a move takes that was never measured: from the request to end until the job runs again.
const MOVE_S: f64 = 60.0;

/// More late jobs are not planned for at once: those that are due first count.
const MOST_LATE: usize = 500;

/// A job that could keep its deadline with another node.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LateWorkload {
    pub(super) key: WorkloadKey,
    pub(super) uid: JobUid,
    pub(super) deadline: Deadline,
    pub(super) job: LateJob,
    /// The job's pod waits for the cluster's scheduler, so programs that add nodes read it by themselves.
    pub(super) is_visible: bool,
}

/// Everything that the plan reads.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct NeedSnapshot {
    pub(super) late: Vec<LateWorkload>,
    /// What each node has free.
    pub(super) free: Vec<NodeKind>,
}

pub(super) fn read(leader: &Leader, now: Timestamp) -> NeedSnapshot {
    let (facts, needing) = (leader.orders.facts(), leader.orders.needing_nodes());
    leader.read(|world| {
        let agents = leader.agents.lock();
        snapshot(world, &agents, (&facts, &needing), now)
    })
}

/// `needing`: running jobs that only a further node would help.
fn snapshot(
    world: &World,
    agents: &Agents,
    (facts, needing): (&[Arc<JobFacts>], &BTreeSet<JobUid>),
    now: Timestamp,
) -> NeedSnapshot {
    let now_ms = now.as_millisecond().max(0).unsigned_abs();
    let mut late: Vec<LateWorkload> = gangs(world, now, now_ms);
    let waiting_pods = waiting_pods(world);
    late.extend(facts.iter().filter_map(|job| {
        let running = || running(world, agents, job, now_ms).filter(|_| needing.contains(&job.uid));
        waiting(world, &waiting_pods, job, now_ms).or_else(running)
    }));
    if late.is_empty() {
        return NeedSnapshot::default();
    }
    late.sort_by(|a, b| (a.deadline.latest_ms(), &a.uid).cmp(&(b.deadline.latest_ms(), &b.uid)));
    late.truncate(MOST_LATE);
    let free: Vec<NodeKind> = line::rooms(world)
        .into_iter()
        .filter(|room| room.open)
        .map(|room| NodeKind { speed: speed(world, &room.name), room: to_core_room(room.free), name: room.name.into() })
        .collect();
    NeedSnapshot { late, free }
}

fn speed(world: &World, node: &NodeName) -> f64 {
    world.nodes().get(node).map_or(1.0, |facts| f64::from(facts.speed_percent) / 100.0)
}

fn left_s(deadline: Deadline, now_ms: u64) -> f64 {
    deadline.latest_ms().saturating_sub(now_ms) as f64 / 1e3
}

/// Jobs of several tasks that wait for room. Their pods are behind a gate, so no other program reads them.
fn gangs(world: &World, now: Timestamp, now_ms: u64) -> Vec<LateWorkload> {
    let waiting = line::requests(world, now).into_iter().filter(|request| request.class != Class::Growth);
    let late = waiting.filter_map(|request| {
        let deadline = world.jobs.task_job(&request.key)?.deadline.filter(|deadline| deadline.latest_ms() > now_ms)?;
        if world.pod_facts_of_job(&request.key).any(is_choosy) {
            return None;
        }
        let pods = request.needs.iter().map(|need| to_core_room(need.requests)).collect();
        let job = LateJob { pods, left: None, left_s: left_s(deadline, now_ms), runs: false };
        Some(LateWorkload { key: request.key, uid: request.uid, deadline, job, is_visible: false })
    });
    late.collect()
}

/// Pods of `batch/v1` Jobs that wait for a node, by the uid of the Job: such a pod is marked only when it runs.
fn waiting_pods(world: &World) -> BTreeMap<&JobUid, &PodFacts> {
    let of_jobs = world.pods().filter_map(|pod| {
        let attempt = pod.attempt.as_ref().filter(|attempt| attempt.epoch.is_none() && pod.node.is_none())?;
        Some((attempt.owner.as_ref()?, pod))
    });
    of_jobs.collect()
}

/// A job of one pod for which the cluster's scheduler finds no node.
fn waiting(world: &World, pods: &BTreeMap<&JobUid, &PodFacts>, job: &JobFacts, now_ms: u64) -> Option<LateWorkload> {
    if job.state == JobState::Done {
        return None;
    }
    let pod = match &job.pod_uid {
        Some(uid) => world.pod(uid)?,
        None => *pods.get(&job.uid)?,
    };
    let attempt =
        pod.attempt.as_ref().filter(|attempt| attempt.unschedulable.is_some() && attempt.deleted.is_none())?;
    if pod.node.is_some() || attempt.choosy {
        return None;
    }
    // Its container has not started: no moment can have passed by then.
    let deadline = world.deadline(pod, 0).0.filter(|deadline| deadline.latest_ms() > now_ms)?;
    let job_left = LateJob { pods: vec![requests(job)], left: None, left_s: left_s(deadline, now_ms), runs: false };
    Some(LateWorkload { key: key(job), uid: job.uid.clone(), deadline, job: job_left, is_visible: !attempt.gated })
}

/// A job that runs and will miss its deadline where it is.
fn running(world: &World, agents: &Agents, job: &JobFacts, now_ms: u64) -> Option<LateWorkload> {
    let JobState::Running { node, .. } = &job.state else { return None };
    let pod_uid = job.pod_uid.as_ref()?;
    let (deadline, finish) = finish(world, agents, node, pod_uid)?;
    let left = finish.filter(|finish| finish.ends == Ends::Late)?.left;
    if deadline.latest_ms() <= now_ms {
        return None;
    }
    let left_s = left_s(deadline, now_ms) - job.move_cost_s.filter(|cost| cost.is_finite()).unwrap_or(MOVE_S).max(0.0);
    let late = LateJob { pods: vec![requests(job)], left: Some(left), left_s, runs: true };
    Some(LateWorkload { key: key(job), uid: job.uid.clone(), deadline, job: late, is_visible: false })
}

fn is_choosy(pod: &PodFacts) -> bool {
    pod.attempt.as_ref().is_some_and(|attempt| attempt.choosy)
}

fn requests(job: &JobFacts) -> Room {
    to_core_room((job.cpu_request_milli, job.memory_request_bytes))
}

fn key(job: &JobFacts) -> WorkloadKey {
    WorkloadKey::new(job.kind, NamespacedName::new(&job.namespace, &job.name))
}

#[cfg(test)]
#[path = "snapshot_tests.rs"]
mod tests;
