//! The line of jobs that need room: reads from the operator's copy of the cluster which jobs wait and what is free, and
//! keeps the answers that are not in a journal yet.
//!
//! **How.** A pass chooses all jobs that fit ([`GRANTS_AT_ONCE`] at most) and keeps a grant for each. The room of a
//! grant counts as taken until its nodes are in the job's journal. From then on [`rooms`] counts them as taken, until
//! the pods themselves hold them. A new leader finds the same in the journals.

use super::gang::{NodeRoom, Placement, choose, fits_empty, take_all, take_devices};
use super::machine::AVOID_FOR;
use super::request::{Class, RoleNodes, RoomRequest, TaskNeed};
use super::turns::{QueueShares, QueueWeights};
use crate::jobs::waiting::bounded_wait;
use crate::state::lead::Leader;
use crate::state::task_job::TaskJobSnapshot;
use crate::state::world::World;
use gainshare_kube_api::attempt::{AttemptFacts, Phase};
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{JobUid, NodeName};
use gainshare_kube_api::node_rules::{Devices, NodeRules};
use gainshare_kube_api::quantity::total;
use gainshare_kube_api::tasks::{Role, TaskId, TaskJobSpec, TaskTraffic, tasks};
use gainshare_kube_api::training_job::State;
use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A grant that is not in its job's journal after this time is given up.
const GRANT_STANDS: SignedDuration = SignedDuration::from_secs(5);

/// The line is not worked out more often than this.
const PASS_EVERY: SignedDuration = SignedDuration::from_millis(100);

/// The number of grants that are made in one pass: more could not be written to journals while they stand.
const GRANTS_AT_ONCE: usize = 100;

/// The sizes of the nodes are read again after this time, to find jobs that could never fit.
const SIZES_STAND: SignedDuration = SignedDuration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct GangQueue {
    queues: QueueWeights,
    state: Mutex<LineState>,
}

#[derive(Debug, Default)]
struct LineState {
    /// By the uid of the job.
    grants: BTreeMap<JobUid, Grant>,
    passed: Option<Timestamp>,
    /// What jobs could have of each node if no job ran, and when that was read.
    sizes: Vec<NodeRoom>,
    sizes_read: Option<Timestamp>,
}

#[derive(Debug)]
struct Grant {
    request: RoomRequest,
    placement: Placement,
    at: Timestamp,
}

impl GangQueue {
    pub(crate) fn new(queues: QueueWeights) -> GangQueue {
        GangQueue { queues, state: Mutex::default() }
    }

    /// The nodes for tasks of this job, if it is its turn. Other jobs whose turn it is are queued.
    pub(crate) fn ask(&self, leader: &Leader, job: &TaskJobSnapshot, now: Timestamp) -> Option<Placement> {
        leader.read(|world| request(world, job, now, None))?;
        // The line's lock is never taken while the world's is held.
        let mut state = self.state.lock();
        if let Some(grant) = state.grants.get(&job.uid) {
            if leader.read(|world| grant.stands(world, now)) {
                return Some(grant.placement.clone());
            }
            state.grants.remove(&job.uid);
        } else if state.passed.is_some_and(|passed| now.duration_since(passed) < PASS_EVERY) {
            return None;
        }
        state.passed = Some(now);
        let grants = &mut state.grants;
        let (rooms, requests, turns) = leader.read(|world| {
            // In one read of the world: what is granted is either among the grants or in a journal.
            grants.retain(|_, grant| grant.stands(world, now));
            let mut rooms = rooms(world);
            let mut turns = turns(world, &self.queues);
            for grant in grants.values() {
                turns.hold(grant.request.queue.as_deref(), grant.request.milli());
                take_all(&mut rooms, grant.request.needs.iter().chain(&grant.request.optional), &grant.placement);
            }
            let mut requests = requests(world, now);
            requests.retain(|request| !grants.contains_key(&request.uid));
            (rooms, requests, turns)
        });
        let chosen = choose(&rooms, requests, turns, now, GRANTS_AT_ONCE);
        let others: Vec<_> =
            chosen.iter().filter(|(one, _)| one.uid != job.uid).map(|(one, _)| one.key.clone()).collect();
        if !others.is_empty() {
            leader.change(|world| others.into_iter().for_each(|key| world.jobs.mark(key)));
        }
        let new = chosen.into_iter();
        grants.extend(new.map(|(request, placement)| (request.uid.clone(), Grant { request, placement, at: now })));
        grants.get(&job.uid).map(|grant| grant.placement.clone())
    }

    /// Whether the gang would not even fit an empty cluster.
    pub(super) fn never_fits(&self, leader: &Leader, job: &TaskJobSnapshot, now: Timestamp) -> bool {
        let Ok(spec) = &job.spec else { return false };
        let mut state = self.state.lock();
        if state.sizes_read.is_none_or(|read| now.duration_since(read) >= SIZES_STAND) {
            state.sizes = leader.read(sizes);
            state.sizes_read = Some(now);
        }
        let nodes = leader.read(|world| NodeSets::default().of_roles(world, spec));
        !state.sizes.is_empty() && !fits_empty(&state.sizes, &needs(spec, spec.gang(), None), nodes.as_ref())
    }
}

impl Grant {
    fn stands(&self, world: &World, now: Timestamp) -> bool {
        now.duration_since(self.at) < GRANT_STANDS && is_open(world, self)
    }
}

/// Whether the job still waits for what it was granted.
fn is_open(world: &World, grant: &Grant) -> bool {
    let Some(job) = world.jobs.task_job(&grant.request.key).filter(|job| job.uid == grant.request.uid) else {
        return false;
    };
    let journal = &job.status.journal;
    !journal.restarting && !grant.request.needs.iter().all(|need| journal.nodes.contains_key(&need.task.to_string()))
}

fn needs(spec: &TaskJobSpec, tasks: impl IntoIterator<Item = TaskId>, traffic: Option<&TaskTraffic>) -> Vec<TaskNeed> {
    let devices: BTreeMap<Role, Arc<Devices>> = spec
        .roles
        .iter()
        .filter_map(|(role, spec)| Some((*role, &spec.rules.as_ref()?.devices)))
        .filter(|(_, devices)| !devices.is_empty())
        .map(|(role, devices)| (role, Arc::new(devices.clone())))
        .collect();
    let need = |task: TaskId| {
        let requests = spec.roles.get(&task.role)?.requests;
        let traffic = traffic.and_then(|known| known.get(&task.to_string()).copied());
        Some(TaskNeed { task, requests, devices: devices.get(&task.role).cloned(), traffic })
    };
    tasks.into_iter().filter_map(need).collect()
}

/// Rules, and the nodes that meet them.
type NodesOfRules = (Option<Arc<NodeRules>>, Arc<BTreeSet<NodeName>>);

/// Which nodes meet which rules. Many jobs have the same rules: each is compared with all nodes once.
#[derive(Debug, Default)]
struct NodeSets {
    known: Vec<NodesOfRules>,
}

impl NodeSets {
    /// The nodes that each role may use; `None` if no role demands anything.
    fn of_roles(&mut self, world: &World, spec: &TaskJobSpec) -> Option<RoleNodes> {
        if spec.roles.values().all(|role| role.rules.is_none()) {
            return None;
        }
        Some(spec.roles.iter().map(|(role, spec)| (*role, self.of_rules(world, spec.rules.as_ref()))).collect())
    }

    fn of_rules(&mut self, world: &World, rules: Option<&Arc<NodeRules>>) -> Arc<BTreeSet<NodeName>> {
        if let Some((_, nodes)) = self.known.iter().find(|(known, _)| known.as_ref() == rules) {
            return nodes.clone();
        }
        let admits = |name: &NodeName, facts: &NodeFacts| match rules {
            Some(rules) => rules.admit(name, facts.open, &facts.traits),
            None => facts.open,
        };
        let nodes = world.nodes().iter().filter(|(name, facts)| admits(name, facts));
        let nodes: Arc<BTreeSet<NodeName>> = Arc::new(nodes.map(|(name, _)| name.clone()).collect());
        self.known.push((rules.cloned(), nodes.clone()));
        nodes
    }
}

/// The pods of the job's present attempt, by task.
pub(crate) fn current<'a>(
    world: &'a World,
    job: &TaskJobSnapshot,
) -> BTreeMap<TaskId, (&'a PodFacts, &'a AttemptFacts)> {
    let journal = &job.status.journal;
    let pods = world.pod_facts_of_job(&job.key).filter_map(|pod| Some((pod, pod.attempt.as_deref()?)));
    let ours = pods.filter(|(pod, attempt)| {
        let is_own = attempt.owner.as_ref() == Some(&job.uid);
        is_own && attempt.epoch == Some(journal.epoch) && !journal.replaced.contains(&pod.uid)
    });
    ours.filter_map(|(pod, attempt)| Some((attempt.task?, (pod, attempt)))).collect()
}

/// What each node has for tasks: all that no pod requests, less what is promised to tasks on their way.
pub(crate) fn rooms(world: &World) -> Vec<NodeRoom> {
    let mut promised: BTreeMap<&NodeName, (u64, u64)> = BTreeMap::new();
    let mut devices: BTreeMap<&NodeName, Vec<&Devices>> = BTreeMap::new();
    let jobs = world.jobs.task_jobs().filter(|job| job.status.journal.admitted && !is_over(job));
    for job in jobs {
        let Ok(spec) = &job.spec else { continue };
        let pods = current(world, job);
        for (task, node) in &job.status.journal.nodes {
            let Some(task) = TaskId::parse(task) else { continue };
            let Some(role) = spec.roles.get(&task.role) else { continue };
            // Devices of other pods are not known: the scheduler refuses what they leave no room for.
            let has_ended = |attempt: &AttemptFacts| matches!(attempt.phase, Phase::Succeeded | Phase::Failed);
            if let Some(rules) = role.rules.as_ref().filter(|rules| !rules.devices.is_empty())
                && !pods.get(&task).is_some_and(|(_, attempt)| has_ended(attempt))
            {
                devices.entry(node).or_default().push(&rules.devices);
            }
            // A pod with a node is among what pods request, until it ends.
            if pods.get(&task).is_none_or(|(pod, attempt)| pod.node.is_none() && attempt.phase == Phase::Pending) {
                let sum = promised.entry(node).or_default();
                *sum = (sum.0.saturating_add(role.requests.0), sum.1.saturating_add(role.requests.1));
            }
        }
    }
    let mut rooms = sizes(world);
    for room in &mut rooms {
        let promised = promised.get(&room.name).copied().unwrap_or_default();
        room.free = less(less(room.size, world.requested(&room.name).jobs), promised);
        for taken in devices.get(&room.name).into_iter().flatten() {
            take_devices(room, Some(taken));
        }
    }
    rooms
}

/// What the jobs of each queue hold: the requests of their tasks that have nodes.
fn turns(world: &World, queues: &QueueWeights) -> QueueShares {
    let mut turns = QueueShares::new(queues);
    if queues.is_empty() {
        return turns;
    }
    for job in world.jobs.task_jobs().filter(|job| job.status.journal.admitted && !is_over(job)) {
        let Ok(spec) = &job.spec else { continue };
        let tasks = job.status.journal.nodes.keys().filter_map(|task| TaskId::parse(task));
        let milli = tasks.filter_map(|task| Some(spec.roles.get(&task.role)?.requests.0));
        turns.hold(spec.options.queue.as_deref(), total(milli));
    }
    turns
}

/// What jobs could have of each node if no job ran: size and free room are the same.
fn sizes(world: &World) -> Vec<NodeRoom> {
    let usable = world.nodes().iter().filter(|(_, facts)| facts.open || !facts.traits.taints.is_empty());
    usable
        .map(|(name, facts)| {
            let all = (facts.cpu_milli.unwrap_or(0), facts.memory_bytes.unwrap_or(0));
            let size = less(all, world.requested(name).others);
            let devices = || facts.traits.devices.clone();
            let (free_devices, all_devices) = (devices(), devices());
            NodeRoom { name: name.clone(), free: size, size, free_devices, all_devices, open: facts.open }
        })
        .collect()
}

fn less(from: (u64, u64), what: (u64, u64)) -> (u64, u64) {
    (from.0.saturating_sub(what.0), from.1.saturating_sub(what.1))
}

fn is_over(job: &TaskJobSnapshot) -> bool {
    let journal = &job.status.journal;
    matches!(journal.state, State::Succeeded | State::Failed | State::Suspended) || journal.restarting
}

/// All jobs that wait for room.
pub(crate) fn requests(world: &World, now: Timestamp) -> Vec<RoomRequest> {
    let mut sets = NodeSets::default();
    world.jobs.task_jobs().filter_map(|job| request(world, job, now, Some(&mut sets))).collect()
}

/// What the job waits for: its whole gang, or one task of a gang that runs. Without `sets` it is not worked out which
/// nodes the tasks may use.
fn request(world: &World, job: &TaskJobSnapshot, now: Timestamp, sets: Option<&mut NodeSets>) -> Option<RoomRequest> {
    let spec = job.spec.as_ref().ok()?;
    let journal = &job.status.journal;
    let is_out = job.is_foreign || job.deleting || spec.options.suspend || is_over(job) || journal.epoch == 0;
    if is_out {
        return None;
    }
    let pods = current(world, job);
    let is_ready = |task: &TaskId| {
        let pod = pods.get(task).filter(|(_, attempt)| attempt.gated && attempt.deleted.is_none());
        pod.is_some() && !journal.nodes.contains_key(&task.to_string())
    };
    let gang: BTreeSet<TaskId> = spec.gang().into_iter().collect();
    let wanted = job.wanted();
    let others = || tasks(&wanted).filter(|task| !gang.contains(task) && is_ready(task));
    let (class, needed, optional) = if journal.admitted {
        match (gang.iter().find(|task| is_ready(task)), others().next()) {
            (Some(task), _) => (Class::Replacement, vec![*task], Vec::new()),
            (None, Some(task)) => (Class::Growth, vec![task], Vec::new()),
            (None, None) => return None,
        }
    } else if gang.iter().all(is_ready) {
        (Class::Gang, gang.iter().copied().collect(), others().collect())
    } else {
        return None;
    };
    let traffic = world.jobs.traffic(job);
    let is_avoiding = journal.tried_until.as_ref().is_some_and(|until| bounded_wait(until.0, AVOID_FOR, now).is_some());
    Some(RoomRequest {
        key: job.key.clone(),
        uid: job.uid.clone(),
        class,
        priority: pods.values().map(|(_, attempt)| attempt.priority).max().unwrap_or(0),
        queue: spec.options.queue.clone(),
        since: job.created,
        needs: needs(spec, needed, traffic),
        optional: needs(spec, optional, traffic),
        avoid: if is_avoiding { journal.tried.clone() } else { Vec::new() },
        nodes: sets.and_then(|sets| sets.of_roles(world, spec)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::metrics::Metrics;
    use gainshare_kube_api::tfjob::TfJob;
    use serde_json::{Value, json};

    fn put_node(leader: &Leader, name: &str, taints: Value, gpus: &str) {
        let node = json!({
            "metadata": {"name": name}, "spec": {"taints": taints},
            "status": {
                "allocatable": {"cpu": "8", "memory": "8Gi", "nvidia.com/gpu": gpus},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        });
        let node = serde_json::from_value(node).unwrap();
        leader.change(|world| world.put_node(&name.into(), NodeFacts::of(&node)));
    }

    /// A published form of TFJobs: workers with GPUs, which tolerate the taint of GPU nodes.
    fn gpu_job() -> TaskJobSnapshot {
        let spec = json!({
            "containers": [{"name": "tensorflow", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        });
        let job: TfJob = serde_json::from_value(json!({
            "apiVersion": "kubeflow.org/v1", "kind": "TFJob",
            "metadata": {
                "name": "mnist", "namespace": "team", "uid": "u", "resourceVersion": "1",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"tfReplicaSpecs": {"Worker": {"replicas": 2, "template": {"spec": spec}}}},
        }))
        .unwrap();
        TaskJobSnapshot::of_tfjob(&job).unwrap()
    }

    #[test]
    fn a_gang_that_needs_gpus_fits_only_nodes_that_have_them() {
        let leader = Leader::new(Arc::new(Metrics::new()), 1);
        let (line, job) = (GangQueue::default(), gpu_job());
        let mut second = 0;
        let mut never_fits = || {
            second += 10;
            line.never_fits(&leader, &job, Timestamp::from_second(second).unwrap())
        };
        let taint = || json!([{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]);
        put_node(&leader, "plain", json!([]), "0");
        assert!(never_fits(), "no node has a GPU");
        put_node(&leader, "a", taint(), "1");
        assert!(never_fits(), "one GPU is too few");
        put_node(&leader, "b", taint(), "1");
        assert!(!never_fits(), "two nodes with one each");
        put_node(&leader, "b", json!([{"key": "other", "effect": "NoSchedule"}]), "1");
        assert!(never_fits(), "a taint that it does not tolerate");
    }
}
