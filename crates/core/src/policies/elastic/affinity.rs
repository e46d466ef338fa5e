//! `affinity`: the tasks of a job on as few nodes as possible, servers beside the workers that they feed.
//!
//! **Problem.** Every worker exchanges gradients with every server. What crosses nodes uses the network, which is
//! slower than memory and shared by all jobs.
//!
//! **How.** First the fullest single node that holds the whole job. Otherwise nodes are filled one after the other,
//! the roomiest first, each with servers and workers in the proportion of the job; then single moves and swaps of
//! two tasks are made as long as they lower the traffic across nodes. Traffic between a server and a worker is the
//! server's measured traffic, divided among the workers.
//!
//! The last part is left out for jobs of more than [`IMPROVED_TASKS`] tasks, because its cost grows with a high power
//! of their number.
//!
//! **Properties.** All or none: a job that does not fit is not placed in part. The same view gives the same places.

use super::FreeNode;
use crate::model::NodeId;
use crate::tasks::{TaskId, TaskRole};

/// The places of jobs of more tasks than this are not improved.
const IMPROVED_TASKS: usize = 24;

/// What a task needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TaskRequest {
    pub id: TaskId,
    pub cores: f64,
    pub memory_bytes: u64,
    /// Traffic of a server; ignored for a worker.
    pub traffic: f64,
}

/// A node for each task, in the order of `needs`, and nothing if not all fit.
pub fn place(needs: &[TaskRequest], free: &[FreeNode]) -> Option<Vec<NodeId>> {
    if needs.is_empty() {
        return None;
    }
    let (cores, memory) = total(needs.iter());
    let whole = free.iter().filter(|node| node.holds(cores, memory));
    if let Some(node) = whole.min_by(|a, b| a.cores.total_cmp(&b.cores).then(a.id.cmp(&b.id))) {
        return Some(vec![node.id; needs.len()]);
    }
    let mut places = fill(needs, free)?;
    if needs.len() <= IMPROVED_TASKS {
        improve(needs, free, &mut places);
    }
    Some(places.into_iter().map(|place| free[place].id).collect())
}

fn total<'a>(needs: impl Iterator<Item = &'a TaskRequest>) -> (f64, u64) {
    needs.fold((0.0, 0u64), |(cores, memory), need| (cores + need.cores, memory.saturating_add(need.memory_bytes)))
}

/// Fills nodes one after the other, the roomiest first, with tasks in the proportion of the job.
fn fill(needs: &[TaskRequest], free: &[FreeNode]) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..free.len()).collect();
    order.sort_by(|&a, &b| free[b].cores.total_cmp(&free[a].cores).then(free[a].id.cmp(&free[b].id)));
    let of_role = |role: TaskRole| {
        let mut tasks: Vec<usize> = (0..needs.len()).filter(|&i| needs[i].id.role == role).collect();
        // The largest first: what is left for the last node is small. A server with much traffic comes first.
        tasks.sort_by(|&a, &b| {
            let (x, y) = (&needs[a], &needs[b]);
            y.traffic.total_cmp(&x.traffic).then(y.cores.total_cmp(&x.cores)).then(x.id.cmp(&y.id))
        });
        tasks
    };
    let (mut servers, mut workers) = (of_role(TaskRole::Server), of_role(TaskRole::Worker));
    let share = servers.len() as f64 / needs.len() as f64;
    let mut places = vec![usize::MAX; needs.len()];
    for place in order {
        let mut left = free[place];
        let (mut on_node, mut servers_on_node) = (0.0, 0.0);
        loop {
            let wants_server = servers_on_node < share * (on_node + 1.0);
            let mut take = |list: &mut Vec<usize>| {
                let at = list.iter().position(|&i| left.holds(needs[i].cores, needs[i].memory_bytes))?;
                let task = list.remove(at);
                left.take(needs[task].cores, needs[task].memory_bytes);
                Some(task)
            };
            let task = if wants_server {
                take(&mut servers).or_else(|| take(&mut workers))
            } else {
                take(&mut workers).or_else(|| take(&mut servers))
            };
            let Some(task) = task else { break };
            places[task] = place;
            on_node += 1.0;
            if needs[task].id.role == TaskRole::Server {
                servers_on_node += 1.0;
            }
        }
    }
    (servers.is_empty() && workers.is_empty()).then_some(places)
}

/// Traffic that crosses nodes.
pub(crate) fn crossing(needs: &[TaskRequest], places: &[usize]) -> f64 {
    let workers = needs.iter().filter(|need| need.id.role == TaskRole::Worker).count().max(1) as f64;
    let mut sum = 0.0;
    for (server, at) in needs.iter().zip(places).filter(|(need, _)| need.id.role == TaskRole::Server) {
        let elsewhere = |(need, place): &(&TaskRequest, &usize)| need.id.role == TaskRole::Worker && *place != at;
        sum += server.traffic / workers * needs.iter().zip(places).filter(elsewhere).count() as f64;
    }
    sum
}

/// Moves and swaps tasks between nodes that the job uses already, while that lowers the traffic across nodes.
fn improve(needs: &[TaskRequest], free: &[FreeNode], places: &mut [usize]) {
    let fits = |places: &[usize], node: usize| {
        let (cores, memory) = total(needs.iter().zip(places).filter(|(_, at)| **at == node).map(|(need, _)| need));
        free[node].holds(cores, memory)
    };
    let mut best = crossing(needs, places);
    // Each round lowers the traffic; the bound only guards against sums that differ in their last bits.
    for _ in 0..needs.len() * needs.len() {
        let mut found: Option<(f64, Vec<usize>)> = None;
        let mut consider = |trial: Vec<usize>, changed: [usize; 2]| {
            let traffic = crossing(needs, &trial);
            let is_better = traffic < found.as_ref().map_or(best, |(traffic, _)| *traffic) - 1e-9;
            if is_better && changed.into_iter().all(|node| fits(&trial, node)) {
                found = Some((traffic, trial));
            }
        };
        let mut used: Vec<usize> = places.to_vec();
        used.sort_unstable();
        used.dedup();
        for i in 0..needs.len() {
            for &node in used.iter().filter(|node| **node != places[i]) {
                let mut trial = places.to_vec();
                trial[i] = node;
                consider(trial, [node, node]);
            }
            for j in (i + 1..needs.len()).filter(|&j| places[j] != places[i]) {
                let mut trial = places.to_vec();
                trial.swap(i, j);
                consider(trial, [places[i], places[j]]);
            }
        }
        let Some((traffic, trial)) = found else { return };
        best = traffic;
        places.copy_from_slice(&trial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(cores: &[f64]) -> Vec<FreeNode> {
        let node = |(i, cores): (usize, &f64)| FreeNode { id: NodeId(i as u32), cores: *cores, memory_bytes: 1 << 40 };
        cores.iter().enumerate().map(node).collect()
    }

    fn needs(servers: &[f64], workers: u32, cores: f64) -> Vec<TaskRequest> {
        let need = |id, traffic| TaskRequest { id, cores, memory_bytes: 1 << 20, traffic };
        let servers = servers.iter().enumerate().map(|(i, traffic)| need(TaskId::server(i as u32), *traffic));
        servers.chain((0..workers).map(|i| need(TaskId::worker(i), 0.0))).collect()
    }

    #[test]
    fn a_job_that_fits_one_node_gets_the_fullest_such_node() {
        let places = place(&needs(&[1.0, 1.0], 2, 1.0), &nodes(&[16.0, 5.0, 4.0, 3.0])).unwrap();
        assert_eq!(places, vec![NodeId(2); 4]);
    }

    #[test]
    fn what_does_not_fit_is_not_placed_in_part() {
        assert_eq!(place(&needs(&[1.0], 3, 2.0), &nodes(&[4.0, 3.0])), None);
        let mut small = nodes(&[8.0]);
        small[0].memory_bytes = 1 << 20;
        assert_eq!(place(&needs(&[1.0], 1, 1.0), &small), None, "the memory counts too");
    }

    /// On equal and unequal nodes no other placement crosses less, except where more nodes would be used.
    #[test]
    fn no_placement_on_as_few_nodes_crosses_less() {
        for (free, servers, workers) in [
            (nodes(&[4.0, 4.0]), &[1.0, 1.0][..], 4),
            (nodes(&[2.0, 6.0]), &[1.0, 1.0], 5),
            (nodes(&[3.0, 3.0]), &[9.0, 1.0], 4),
            (nodes(&[3.0, 2.0, 2.0]), &[1.0, 1.0, 1.0], 4),
            (nodes(&[5.0, 2.0]), &[1.0, 5.0], 4),
        ] {
            let needs = needs(servers, workers, 1.0);
            let places = place(&needs, &free).unwrap();
            let ours: Vec<usize> = places.iter().map(|node| node.0 as usize).collect();
            let mut fewest = f64::INFINITY;
            let count = |places: &[usize]| (0..free.len()).filter(|n| places.contains(n)).count();
            for code in 0..free.len().pow(needs.len() as u32) {
                let trial: Vec<usize> =
                    (0..needs.len()).map(|i| code / free.len().pow(i as u32) % free.len()).collect();
                let fits = (0..free.len()).all(|n| trial.iter().filter(|p| **p == n).count() as f64 <= free[n].cores);
                if fits && count(&trial) <= count(&ours) {
                    fewest = fewest.min(crossing(&needs, &trial));
                }
            }
            assert!(crossing(&needs, &ours) <= fewest + 1e-9, "{free:?} {ours:?}: {fewest}");
        }
    }
}
