//! `affinity`: the tasks of a job on as few nodes as possible, servers beside the workers that they feed.
//!
//! **Problem.** Every worker exchanges gradients with every server. What crosses nodes uses the network, which is
//! slower than memory and shared by all jobs.
//!
//! **How.** First the fullest single node that holds the whole job. Otherwise nodes are filled one after the other,
//! the roomiest first, each with servers and workers in the proportion of the job; then single moves and swaps of
//! two tasks are made as long as they lower the traffic across nodes.
//!
//! **Traffic.** Workers talk to servers and to nobody else. What is measured is the traffic of each task, not of each
//! pair. A server's traffic is divided among the workers in proportion to their own. Workers of which nothing is known
//! count alike.
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
    /// What it sends and receives, in any unit that is the same for all tasks of its role. 0 for all workers: they
    /// count alike.
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
        // The largest first: what is left for the last node is small. A task with much traffic comes first.
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
    let of_role = |role| needs.iter().zip(places).filter(move |(need, _)| need.id.role == role);
    let known: f64 = of_role(TaskRole::Worker).map(|(need, _)| need.traffic).sum();
    // The part of a server's traffic that is this worker's.
    let part = |worker: &TaskRequest| if known > 0.0 { worker.traffic / known } else { 1.0 };
    let parts = if known > 0.0 { 1.0 } else { of_role(TaskRole::Worker).count().max(1) as f64 };
    let mut sum = 0.0;
    for (server, at) in of_role(TaskRole::Server) {
        let elsewhere = of_role(TaskRole::Worker).filter(|(_, place)| *place != at);
        sum += server.traffic / parts * elsewhere.map(|(worker, _)| part(worker)).sum::<f64>();
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

    /// The traffic across nodes that a placement leaves.
    fn left(needs: &[TaskRequest], places: &[NodeId]) -> f64 {
        crossing(needs, &places.iter().map(|node| node.0 as usize).collect::<Vec<_>>())
    }

    fn node_of(needs: &[TaskRequest], places: &[NodeId], id: TaskId) -> NodeId {
        places[needs.iter().position(|need| need.id == id).unwrap()]
    }

    /// Two nodes cannot hold the job together. Which server sits beside most workers follows the measured traffic.
    #[test]
    fn a_server_with_much_traffic_sits_beside_more_workers() {
        for (free, equal) in [(nodes(&[4.0, 3.0]), false), (nodes(&[3.0, 3.0]), true)] {
            let (workers, mut results) = (if equal { 4 } else { 5 }, vec![]);
            for hot in [0, 1] {
                let mut traffic = [1.0, 1.0];
                traffic[hot] = 20.0;
                let needs = needs(&traffic, workers, 1.0);
                let places = place(&needs, &free).unwrap();
                let beside = |server: u32| {
                    let at = node_of(&needs, &places, TaskId::server(server));
                    (0..workers).filter(|w| node_of(&needs, &places, TaskId::worker(*w)) == at).count()
                };
                let (of_hot, of_other) = (beside(hot as u32), beside(1 - hot as u32));
                assert!(of_hot >= of_other, "server {hot} is hot: {places:?}");
                let unknown = place(&self::needs(&[1.0, 1.0], workers, 1.0), &free).unwrap();
                assert!(left(&needs, &places) <= left(&needs, &unknown) + 1e-9);
                results.push(places);
            }
            assert_ne!(results[0], results[1], "the placement follows the hot server");
        }
    }

    /// Workers differ, too: one that exchanges most sits beside the server.
    #[test]
    fn a_worker_with_much_traffic_sits_beside_its_server() {
        for free in [nodes(&[2.0, 2.0]), nodes(&[2.0, 1.0, 1.0])] {
            for hot in 0..3 {
                let mut needs = needs(&[10.0], 3, 1.0);
                for worker in needs.iter_mut().filter(|need| need.id.role == TaskRole::Worker) {
                    worker.traffic = if worker.id.index == hot { 8.0 } else { 1.0 };
                }
                let places = place(&needs, &free).unwrap();
                let server = node_of(&needs, &places, TaskId::server(0));
                assert_eq!(node_of(&needs, &places, TaskId::worker(hot)), server, "worker {hot}: {places:?}");
            }
        }
    }

    #[test]
    fn traffic_of_pairs_adds_up_to_the_traffic_of_the_servers() {
        let mut needs = needs(&[6.0, 2.0], 3, 1.0);
        let apart = [0, 1, 2, 3, 4];
        assert!((crossing(&needs, &apart) - 8.0).abs() < 1e-9);
        assert!((crossing(&needs, &[0, 1, 0, 3, 4]) - (8.0 - 6.0 / 3.0)).abs() < 1e-9);
        needs[2].traffic = 9.0;
        needs[3].traffic = 1.0;
        assert!((crossing(&needs, &apart) - 8.0).abs() < 1e-9);
        assert!((crossing(&needs, &[0, 1, 0, 3, 4]) - (8.0 - 6.0 * 0.9)).abs() < 1e-9);
        assert!((crossing(&needs, &[0, 1, 2, 3, 0]) - 8.0).abs() < 1e-9, "a worker that says nothing");
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
