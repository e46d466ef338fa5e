//! Which waiting job may start next, and on which nodes its tasks run. Pure: no I/O, no clock.
//!
//! **Problem.** A distributed job with half of its tasks running makes no progress and holds what it has. Two such
//! jobs can hold what the other needs, for ever. So a job starts with all tasks of its gang or with none.
//!
//! **How.** Jobs that need room stand in one line. [`choose`] goes through the line and takes each job whose tasks all
//! fit what is free. What one job takes is not free for those behind it. A job that has waited for long
//! ([`RoomRequest::starves`]) and would fit an empty cluster holds up all jobs behind it, so that small jobs do not
//! starve a large one.
//!
//! **The line.** First tasks that replace lost ones of jobs that run, because these jobs hold room already. Then
//! gangs, by priority, queue ([`QueueShares`]) and age. Last, tasks by which jobs grow: jobs that wait go first.
//!
//! **Placement.** [`pack`] uses as few nodes as possible. The core's rule `affinity` places servers beside the workers
//! that they feed, by the traffic of the job's tasks where an earlier attempt or job has shown it. It fills nodes
//! without going back; where it finds no place, and for jobs of very many tasks, servers and workers are placed in
//! turns, and if that does not fit either, the largest tasks go first. Tasks whose templates demand something of their
//! nodes (labels, tolerated taints, GPUs) go to nodes that meet it.
//!
//! **Properties.** `never_more_than_free`; `a_hundred_contending_jobs_all_run`; `all_or_nothing`;
//! `fewest_nodes_first`; `no_job_overtakes_a_starving_one`.

use super::request::{Class, RoleNodes, RoomRequest, TaskNeed};
use super::turns::QueueShares;
use gainshare_core::model::NodeId;
use gainshare_core::policy::{FreeNode, TaskRequest, place_tasks};
use gainshare_core::tasks::TaskId as CoreTask;
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::node_rules::Devices;
use gainshare_kube_api::quantity::total;
use gainshare_kube_api::tasks::{Role, TaskId};
use jiff::Timestamp;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Jobs of more tasks are placed by a simpler rule.
const PLACED_BY_AFFINITY: usize = 64;

/// Faster than the network of any node.
const MOST_BYTES_S: u64 = 1_000_000_000_000;

/// Where each task is to run.
pub(crate) type Placement = BTreeMap<TaskId, NodeName>;

/// What a node has: thousandths of a core, and bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeRoom {
    pub(crate) name: NodeName,
    /// What no pod requests, less what is promised to tasks on their way.
    pub(crate) free: (u64, u64),
    /// What jobs could have if no job ran.
    pub(crate) size: (u64, u64),
    /// GPUs and their like that no task has, and all of them.
    pub(crate) free_devices: Devices,
    pub(crate) all_devices: Devices,
    /// The node takes tasks that demand nothing of their node. Others may tolerate what closes it.
    pub(crate) open: bool,
}

/// The jobs of the line that start now, at most `most`, and where their tasks go.
pub(crate) fn choose(
    rooms: &[NodeRoom],
    mut requests: Vec<RoomRequest>,
    turns: QueueShares,
    now: Timestamp,
    most: usize,
) -> Vec<(RoomRequest, Placement)> {
    turns.sort(&mut requests, now);
    let mut left = rooms.to_vec();
    let mut chosen: Vec<(RoomRequest, Placement)> = Vec::new();
    let mut waiting: Vec<RoomRequest> = Vec::new();
    // Room only becomes less here, so what found none finds none again.
    let mut failed: BTreeSet<Vec<(u64, u64)>> = BTreeSet::new();
    for request in requests {
        // A job that grows now would take what a waiting job needs next.
        if request.class == Class::Growth && waiting.iter().any(|one| fits_empty(rooms, &one.needs, one.nodes.as_ref()))
        {
            break;
        }
        let shape: Vec<(u64, u64)> = request.needs.iter().map(|need| need.requests).collect();
        let is_plain = request.avoid.is_empty() && request.nodes.is_none();
        let placement = if is_plain && failed.contains(&shape) { None } else { place(&left, &request) };
        if let Some(placement) = placement {
            take_all(&mut left, request.needs.iter().chain(&request.optional), &placement);
            chosen.push((request, placement));
            if chosen.len() >= most {
                break;
            }
            continue;
        }
        if request.class == Class::Gang {
            if request.starves(now) && fits_empty(rooms, &request.needs, request.nodes.as_ref()) {
                break;
            }
            waiting.push(request);
        }
        if is_plain {
            failed.insert(shape);
        }
    }
    chosen
}

/// Places for the tasks that the request needs, and for those of its optional tasks that still fit.
fn place(rooms: &[NodeRoom], request: &RoomRequest) -> Option<Placement> {
    let least = |part: fn(&(u64, u64)) -> u64| request.needs.iter().map(|need| part(&need.requests)).min().unwrap_or(0);
    let least = (least(|both| both.0), least(|both| both.1));
    // Most nodes of a full cluster could not hold a single task: they are left out first.
    let usable = rooms.iter().filter(|room| least.0 <= room.free.0 && least.1 <= room.free.1);
    let nodes = request.nodes.as_ref();
    let may_use = |room: &&NodeRoom| (room.open || nodes.is_some()) && !request.avoid.contains(&room.name);
    let usable: Vec<NodeRoom> = usable.filter(may_use).cloned().collect();
    let mut placement = pack(&usable, &request.needs, nodes)?;
    if !request.optional.is_empty() {
        let all: Vec<NodeRoom> = rooms.iter().filter(may_use).cloned().collect();
        add_optional(&all, request, &mut placement);
    }
    Some(placement)
}

/// Takes what a placement uses out of the free room.
pub(super) fn take_all<'a>(
    rooms: &mut [NodeRoom],
    needs: impl IntoIterator<Item = &'a TaskNeed>,
    placement: &Placement,
) {
    let mut taken: BTreeMap<&NodeName, Vec<&TaskNeed>> = BTreeMap::new();
    for need in needs {
        if let Some(node) = placement.get(&need.task) {
            taken.entry(node).or_default().push(need);
        }
    }
    for room in rooms.iter_mut() {
        for need in taken.get(&room.name).into_iter().flatten() {
            take(room, need);
        }
    }
}

/// Whether the tasks would fit if no job ran.
pub(crate) fn fits_empty(rooms: &[NodeRoom], needs: &[TaskNeed], nodes: Option<&RoleNodes>) -> bool {
    let usable = rooms.iter().filter(|room| room.open || nodes.is_some());
    let empty = |room: &NodeRoom| NodeRoom { free: room.size, free_devices: room.all_devices.clone(), ..room.clone() };
    pack(&usable.map(empty).collect::<Vec<_>>(), needs, nodes).is_some()
}

fn add_optional(rooms: &[NodeRoom], request: &RoomRequest, placement: &mut Placement) {
    let mut left: Vec<NodeRoom> = rooms.to_vec();
    take_all(&mut left, &request.needs, placement);
    // Nodes that the job uses already come first.
    left.sort_by_key(|room| !placement.values().any(|node| *node == room.name));
    for need in &request.optional {
        let may_use = |room: &NodeRoom| {
            let own = request.nodes.as_ref().and_then(|nodes| nodes.get(&need.task.role));
            own.is_none_or(|own| own.contains(&room.name))
        };
        if let Some(room) = left.iter_mut().find(|room| may_use(room) && fits(room, need)) {
            take(room, need);
            placement.insert(need.task, room.name.clone());
        }
    }
}

fn fits(room: &NodeRoom, need: &TaskNeed) -> bool {
    need.requests.0 <= room.free.0 && need.requests.1 <= room.free.1 && has_devices(room, need.devices.as_deref())
}

fn has_devices(room: &NodeRoom, devices: Option<&Devices>) -> bool {
    devices.into_iter().flatten().all(|(name, count)| room.free_devices.get(name).is_some_and(|free| count <= free))
}

fn take(room: &mut NodeRoom, need: &TaskNeed) {
    room.free = (room.free.0.saturating_sub(need.requests.0), room.free.1.saturating_sub(need.requests.1));
    take_devices(room, need.devices.as_deref());
}

pub(super) fn take_devices(room: &mut NodeRoom, devices: Option<&Devices>) {
    for (name, count) in devices.into_iter().flatten() {
        let free = room.free_devices.entry(name.clone()).or_default();
        *free = free.saturating_sub(*count);
    }
}

/// A place for every task, on as few nodes as possible; `None` if there is none. Roles that may use different nodes
/// are placed one after the other: those with the fewest nodes first, and the others beside them where they can be.
pub(crate) fn pack(rooms: &[NodeRoom], needs: &[TaskNeed], nodes: Option<&RoleNodes>) -> Option<Placement> {
    let Some(nodes) = nodes else { return pack_alike(rooms, needs) };
    let mut groups: Vec<(&BTreeSet<NodeName>, Vec<TaskNeed>)> = Vec::new();
    for need in needs {
        let own: &BTreeSet<NodeName> = nodes.get(&need.task.role)?;
        match groups.iter_mut().find(|(known, _)| *known == own) {
            Some((_, group)) => group.push(need.clone()),
            None => groups.push((own, vec![need.clone()])),
        }
    }
    groups.sort_by_key(|(own, _)| own.len());
    let mut left = rooms.to_vec();
    let mut placement = Placement::new();
    for (own, needs) in groups {
        let is_used = |room: &NodeRoom| placement.values().any(|node| *node == room.name);
        let all: Vec<NodeRoom> = left.iter().filter(|room| own.contains(&room.name)).cloned().collect();
        let used: Vec<NodeRoom> = all.iter().filter(|room| is_used(room)).cloned().collect();
        let found = pack_alike(&used, &needs).or_else(|| pack_alike(&all, &needs))?;
        take_all(&mut left, &needs, &found);
        placement.extend(found);
    }
    Some(placement)
}

/// A place for tasks that may all use the same nodes.
fn pack_alike(rooms: &[NodeRoom], needs: &[TaskNeed]) -> Option<Placement> {
    let mut devices = Devices::new();
    for (name, count) in needs.iter().filter_map(|need| need.devices.as_ref()).flat_map(|devices| devices.iter()) {
        let sum = devices.entry(name.clone()).or_default();
        *sum = sum.saturating_add(*count);
    }
    let wanted = (total(needs.iter().map(|need| need.requests.0)), total(needs.iter().map(|need| need.requests.1)));
    let holds = |free: (u64, u64)| wanted.0 <= free.0 && wanted.1 <= free.1;
    // One node: the smallest that holds all, so that larger ones stay whole.
    let whole = rooms.iter().filter(|room| holds(room.free) && has_devices(room, Some(&devices)));
    let one = whole.min_by_key(|room| (room.free, &room.name));
    if let Some(room) = one {
        return Some(needs.iter().map(|need| (need.task, room.name.clone())).collect());
    }
    let all = (total(rooms.iter().map(|room| room.free.0)), total(rooms.iter().map(|room| room.free.1)));
    if !holds(all) {
        return None;
    }
    // The core's rule knows CPU and memory only.
    if needs.len() <= PLACED_BY_AFFINITY
        && devices.is_empty()
        && let Some(placement) = by_affinity(rooms, needs)
    {
        return Some(placement);
    }
    let mut largest: Vec<NodeRoom> = rooms.to_vec();
    largest.sort_by_key(|room| (Reverse(room.free), room.name.clone()));
    let mixed = mixed(needs);
    let mut by_size = needs.to_vec();
    by_size.sort_by_key(|need| (Reverse(need.requests), need.task));
    let mut count = 2;
    while count <= largest.len() {
        let nodes = &largest[..count];
        let sum = (total(nodes.iter().map(|room| room.free.0)), total(nodes.iter().map(|room| room.free.1)));
        if holds(sum)
            && let Some(placement) = first_fit(nodes, &mixed).or_else(|| first_fit(nodes, &by_size))
        {
            return Some(placement);
        }
        // Large clusters are searched in larger strides; the last stride ends at the last node.
        let next = count + (count / 8).max(1);
        count = if next > largest.len() && count < largest.len() { largest.len() } else { next };
    }
    None
}

/// The places that the core's rule `affinity` finds, by the traffic of the tasks.
fn by_affinity(rooms: &[NodeRoom], needs: &[TaskNeed]) -> Option<Placement> {
    let cores = |milli: u64| milli as f64 / 1000.0;
    let free = |(at, room): (usize, &NodeRoom)| FreeNode {
        id: NodeId(at as u32),
        cores: cores(room.free.0),
        memory_bytes: room.free.1,
    };
    let free: Vec<FreeNode> = rooms.iter().enumerate().map(free).collect();
    let core_needs: Vec<TaskRequest> = (0_u32..)
        .zip(needs.iter().zip(traffic(needs)))
        .map(|(index, (need, traffic))| {
            let id = if need.task.role == Role::Ps { CoreTask::server(index) } else { CoreTask::worker(index) };
            TaskRequest { id, cores: cores(need.requests.0), memory_bytes: need.requests.1, traffic }
        })
        .collect();
    let nodes = place_tasks(&core_needs, &free)?;
    needs.iter().zip(nodes).map(|(need, node)| Some((need.task, rooms.get(node.0 as usize)?.name.clone()))).collect()
}

/// What each task sends and receives, as the core's rule wants it. Where nothing was measured, all servers are alike,
/// and all other tasks. A task of which nothing is known counts as the mean of its kind.
fn traffic(needs: &[TaskNeed]) -> Vec<f64> {
    let is_server = |need: &TaskNeed| need.task.role == Role::Ps;
    // An evaluator reads checkpoints: no server talks to it.
    let talks = |need: &&TaskNeed| need.task.role != Role::Evaluator;
    let mean = |servers: bool| {
        let of_kind = needs.iter().filter(talks).filter(|need| is_server(need) == servers);
        let known: Vec<f64> = of_kind.filter_map(|need| need.traffic).map(measured).collect();
        let sum: f64 = known.iter().sum();
        (sum > 0.0).then(|| sum / known.len() as f64)
    };
    let (server_mean, worker_mean) = (mean(true), mean(false));
    let of_task = |need: &TaskNeed| {
        let mean = if is_server(need) { server_mean } else { worker_mean };
        match (mean, need.traffic, need.task.role) {
            (None, _, Role::Ps) => 1.0,
            (None, ..) => 0.0,
            (Some(_), _, Role::Evaluator) => 0.0,
            (Some(mean), traffic, _) => traffic.map_or(mean, measured),
        }
    };
    needs.iter().map(of_task).collect()
}

/// A status can be written by others: no number may drown all others.
fn measured(bytes_s: u64) -> f64 {
    bytes_s.min(MOST_BYTES_S) as f64
}

/// The tasks in turns of their roles, each role evenly spread over the order.
fn mixed(needs: &[TaskNeed]) -> Vec<TaskNeed> {
    let mut counts = BTreeMap::new();
    for need in needs {
        *counts.entry(need.task.role).or_insert(0_u32) += 1;
    }
    let mut seen = BTreeMap::new();
    let mut order: Vec<(f64, TaskNeed)> = Vec::with_capacity(needs.len());
    for need in needs {
        let index = seen.entry(need.task.role).or_insert(0_u32);
        let count = counts.get(&need.task.role).copied().unwrap_or(1).max(1);
        order.push(((f64::from(*index) + 0.5) / f64::from(count), need.clone()));
        *index += 1;
    }
    order.sort_by(|(a, one), (b, other)| a.total_cmp(b).then(one.task.cmp(&other.task)));
    order.into_iter().map(|(_, need)| need).collect()
}

fn first_fit(rooms: &[NodeRoom], needs: &[TaskNeed]) -> Option<Placement> {
    let mut left: Vec<NodeRoom> = rooms.to_vec();
    let mut placement = Placement::new();
    for need in needs {
        let room = left.iter_mut().find(|room| fits(room, need))?;
        take(room, need);
        placement.insert(need.task, room.name.clone());
    }
    Some(placement)
}

#[cfg(test)]
#[path = "gang_tests.rs"]
mod tests;
