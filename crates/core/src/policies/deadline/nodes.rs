//! How many more nodes would keep the deadlines that cannot be kept.
//!
//! **Problem.** A deadline that no plan of its node can keep is announced. An administrator, or a program
//! that adds nodes, wants to know what would help: how many nodes of which kind.
//!
//! **Approach.** For each kind of node, the late jobs are put onto new nodes of that kind, the earliest
//! deadline first, each onto the first node on which [`super::fill`] finds room for all its deadlines; a
//! node is added when there is none. A job that is too slow even alone on a node of a kind cannot be
//! helped by that kind. The kind that helps most jobs is chosen; among equals the one with the fewest cores
//! in all, then the one with the fewest nodes.
//!
//! **Terms and units.** Work is in core-seconds of a core of speed 1. The number is an upper bound of what
//! is needed: first fit is not the best packing, but never worse than 1.7 times it.
//!
//! **Properties** (tests of that name): `jobs_that_fit_together_share_a_node`;
//! `a_job_that_no_node_can_help_asks_for_none`; `the_cheapest_kind_that_helps_most_is_chosen`.

use super::fill::{Task, fill};
use crate::signal::speed::Pace;
use serde::{Deserialize, Serialize};

/// A job whose deadline cannot be met where it is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LateJob {
    /// Work left that more cores make shorter.
    pub work_core_s: f64,
    /// Time left that no share makes shorter.
    pub serial_s: f64,
    /// The most cores that it can use.
    pub usable_cores: f64,
    /// Until its deadline, its tolerance included.
    pub left_s: f64,
}

/// Nodes that are alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeKind {
    pub name: String,
    /// Cores for jobs, and how fast one is.
    pub cores: f64,
    pub speed: f64,
}

/// What would keep the deadlines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeNeed {
    pub kind: String,
    pub count: usize,
    /// How many of the late jobs would meet their deadlines then.
    pub helped: usize,
}

/// The part of a new node that deadlines may take: the rest is for its own daemons, and for error.
const USABLE_PART: f64 = 0.9;

/// More nodes are never asked for at once.
const MOST_NODES: usize = 100;

/// The fewest nodes of one of `kinds` with which the most of `late` meet their deadlines; `None` if none
/// helps.
pub fn nodes_needed(late: &[LateJob], kinds: &[NodeKind]) -> Option<NodeNeed> {
    let needs = kinds.iter().filter(|kind| kind.cores > 0.0 && kind.speed > 0.0).map(|kind| (kind, pack(late, kind)));
    let cost = |kind: &NodeKind, nodes: usize| kind.cores * kind.speed * nodes as f64;
    needs
        .filter(|(_, (_, helped))| *helped > 0)
        .min_by(|(a, (nodes_a, helped_a)), (b, (nodes_b, helped_b))| {
            helped_b
                .cmp(helped_a)
                .then(cost(a, *nodes_a).total_cmp(&cost(b, *nodes_b)))
                .then(nodes_a.cmp(nodes_b))
                .then(a.name.cmp(&b.name))
        })
        .map(|(kind, (count, helped))| NodeNeed { kind: kind.name.clone(), count, helped })
}

/// How many nodes of a kind the jobs take that it helps, and how many jobs those are.
fn pack(late: &[LateJob], kind: &NodeKind) -> (usize, usize) {
    let mut tasks: Vec<Task> = late.iter().map(|job| task(job, kind)).collect();
    tasks.sort_by(|a, b| a.left_s.total_cmp(&b.left_s).then(b.steps.total_cmp(&a.steps)));
    let fits = |tasks: &[Task]| {
        let order: Vec<usize> = (0..tasks.len()).collect();
        fill(tasks, &order, USABLE_PART).is_some()
    };
    let mut nodes: Vec<Vec<Task>> = vec![];
    let mut helped = 0;
    for task in tasks.into_iter().filter(|task| fits(std::slice::from_ref(task))) {
        let place = nodes.iter_mut().find_map(|node| {
            node.push(task);
            if fits(node) {
                return Some(());
            }
            node.pop();
            None
        });
        if place.is_none() {
            if nodes.len() == MOST_NODES {
                break;
            }
            nodes.push(vec![task]);
        }
        helped += 1;
    }
    (nodes.len(), helped)
}

/// A job on a node of a kind, as one step.
fn task(job: &LateJob, kind: &NodeKind) -> Task {
    let usable = (job.usable_cores / kind.cores).clamp(0.0, 1.0);
    let parallel_s = job.work_core_s.max(0.0) / (kind.cores * kind.speed);
    let pace = Pace::told(job.serial_s.max(0.0) / kind.speed, parallel_s, usable);
    Task { pace, steps: 1.0, left_s: job.left_s, cap: usable.min(USABLE_PART), caution: 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(name: &str, cores: f64) -> NodeKind {
        NodeKind { name: name.into(), cores, speed: 1.0 }
    }

    fn late(work_core_s: f64, left_s: f64) -> LateJob {
        LateJob { work_core_s, serial_s: 0.0, usable_cores: 64.0, left_s }
    }

    #[test]
    fn jobs_that_fit_together_share_a_node() {
        // A node of ten cores does 900 core-seconds for deadlines in 100 s: two jobs of 400 each.
        let jobs = [late(400.0, 100.0), late(400.0, 100.0), late(400.0, 100.0)];
        let need = nodes_needed(&jobs, &[kind("ten", 10.0)]).expect("nodes help");
        assert_eq!((need.count, need.helped), (2, 3));
        // One that is due later takes what the first leaves behind.
        let need = nodes_needed(&[late(800.0, 100.0), late(800.0, 200.0)], &[kind("ten", 10.0)]).expect("nodes help");
        assert_eq!((need.count, need.helped), (1, 2));
    }

    #[test]
    fn a_job_that_no_node_can_help_asks_for_none() {
        let narrow = LateJob { usable_cores: 1.0, ..late(400.0, 100.0) };
        let serial = LateJob { serial_s: 101.0, ..late(1.0, 100.0) };
        let past = late(1.0, -5.0);
        assert_eq!(nodes_needed(&[narrow, serial, past], &[kind("ten", 10.0)]), None);
        let need = nodes_needed(&[narrow, late(10.0, 100.0)], &[kind("ten", 10.0)]).expect("one is helped");
        assert_eq!((need.count, need.helped), (1, 1));
        assert_eq!((nodes_needed(&[], &[kind("ten", 10.0)]), nodes_needed(&[late(1.0, 9.0)], &[])), (None, None));
    }

    #[test]
    fn the_cheapest_kind_that_helps_most_is_chosen() {
        let kinds = [kind("large", 64.0), kind("medium", 16.0), kind("small", 2.0)];
        // 1000 core-seconds in 100 s take more than ten cores: one medium node.
        let need = nodes_needed(&[late(1000.0, 100.0)], &kinds).expect("nodes help");
        assert_eq!((need.kind.as_str(), need.count), ("medium", 1));
        // Five of them: five medium nodes have 80 cores, one large one has 64.
        let need = nodes_needed(&[late(1000.0, 100.0); 5], &kinds).expect("nodes help");
        assert_eq!((need.kind.as_str(), need.count), ("large", 1));
    }
}
