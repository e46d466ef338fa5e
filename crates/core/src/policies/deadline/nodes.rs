//! How many more nodes would keep the deadlines that cannot be kept.
//!
//! **Problem.** A deadline that no plan can keep on the nodes that there are is announced. An administrator, or
//! a program that adds nodes, needs to know what would help: how many nodes of which kind.
//!
//! **Approach.** The late jobs are taken in the order of their deadlines. A waiting job that fits into the free room of
//! a node that exists needs no other node. A running job that would make its deadline on a node that exists is moved
//! there ([`super::moves`]), so one that is here needs a new node. For the rest, each kind of node is tried:
//! every pod goes onto the first node with room for it, of those that exist and of new ones of the kind, and a new node
//! is added when there is none. The kind that helps the most jobs is chosen; among equals the one with the fewest cores
//! in all, then the one with the fewest nodes. Jobs that this kind cannot help are tried with the other kinds in the
//! same way.
//!
//! **When a pod fits.** Its requests fit beside those of the other pods. If it is known how much the job has
//! left to do, [`super::fill`] must also find a share for every job of the node with which it makes its
//! deadline, at the far end of the interval of its prediction. If not, the job gets what it requests until its end.
//!
//! **Terms and units.** Work is in core-seconds of a core of speed 1. The number of nodes is an upper bound of
//! what is needed: first fit is not the best packing, but never worse than 1.7 times it.
//!
//! **Properties** (tests of that name): `jobs_that_fit_together_share_a_node`;
//! `a_job_that_no_node_can_help_asks_for_none`; `the_cheapest_kind_that_helps_most_is_chosen`;
//! `free_room_is_used_first`; `a_gang_fits_as_a_whole_or_asks_for_nothing`;
//! `jobs_that_need_different_kinds_ask_for_each`; `the_number_of_nodes_is_bounded`.

use super::fill::{Task, by_deadline, fill};
use crate::signal::speed::Pace;
use crate::view::WorkLeft;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A job whose deadline cannot be met where it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LateJob {
    /// What each of its pods requests. The job starts with all of them or not at all.
    pub pods: Vec<Room>,
    /// What the job has left to do; absent if that is not known.
    pub left: Option<WorkLeft>,
    /// Until its deadline, its tolerance included.
    pub left_s: f64,
    /// The job runs, and no node that exists would help it.
    pub runs: bool,
}

/// Cores and memory.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Room {
    pub cores: f64,
    pub memory_bytes: u64,
}

/// Nodes that are alike, or one node that exists: what jobs can have of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeKind {
    pub name: String,
    pub room: Room,
    /// How fast a core is.
    pub speed: f64,
}

/// New nodes of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeNeed {
    /// Which of the kinds.
    pub kind: usize,
    /// For each new node, which of the late jobs it is for.
    pub nodes: Vec<BTreeSet<usize>>,
}

/// The part of a node that deadlines may take: the rest is for error.
pub(super) const USABLE_PART: f64 = 0.9;

/// More nodes are never asked for at once.
const MOST_NODES: usize = 100;

/// The fewest nodes of `kinds` with which the most of `late` meet their deadlines, beside the free room of the
/// nodes that exist. A new node is there after `arrives_in_s`.
pub fn nodes_needed(late: &[LateJob], free: &[NodeKind], kinds: &[NodeKind], arrives_in_s: f64) -> Vec<NodeNeed> {
    let mut open: Vec<usize> = (0..late.len()).filter(|&job| !late[job].pods.is_empty()).collect();
    let work = |job: usize| late[job].left.map_or(0.0, |left| left.work_core_s);
    open.sort_by(|&a, &b| late[a].left_s.total_cmp(&late[b].left_s).then(work(b).total_cmp(&work(a))).then(a.cmp(&b)));
    let mut existing: Vec<Bin> = free.iter().map(|node| Bin::new(node, 0.0)).collect();
    open.retain(|&job| !place(late, job, &mut existing, free.len(), None));
    let mut needs: Vec<NodeNeed> = vec![];
    let mut most = MOST_NODES;
    while !open.is_empty() && most > 0 {
        let packed = (0..kinds.len()).map(|kind| {
            let mut bins = existing.clone();
            let new = (&Bin::new(&kinds[kind], arrives_in_s), existing.len() + most);
            let helped = open.iter().copied().filter(|&job| place(late, job, &mut bins, existing.len(), Some(new)));
            let helped: BTreeSet<usize> = helped.collect();
            let nodes = bins.split_off(existing.len()).into_iter().map(|bin| bin.jobs).collect();
            (NodeNeed { kind, nodes }, helped, bins)
        });
        let cost = |need: &NodeNeed| {
            let kind = &kinds[need.kind];
            kind.room.cores * kind.speed * need.nodes.len() as f64
        };
        let best = packed.filter(|(_, helped, _)| !helped.is_empty()).min_by(|(a, helped_a, _), (b, helped_b, _)| {
            let by_cost = cost(a).total_cmp(&cost(b)).then(a.nodes.len().cmp(&b.nodes.len()));
            let by_name = kinds[a.kind].name.cmp(&kinds[b.kind].name);
            helped_b.len().cmp(&helped_a.len()).then(by_cost).then(by_name)
        });
        let Some((need, helped, bins)) = best else { break };
        existing = bins;
        open.retain(|job| !helped.contains(job));
        most -= need.nodes.len();
        needs.push(need);
    }
    needs
}

/// Puts all pods of a job onto nodes, or none. The first `existing` nodes exist. With `new`, empty nodes are added, up
/// to a number of nodes in all.
fn place(late: &[LateJob], job: usize, bins: &mut Vec<Bin>, existing: usize, new: Option<(&Bin, usize)>) -> bool {
    let before = if late[job].pods.len() > 1 { Some(bins.clone()) } else { None };
    let first = if late[job].runs { existing } else { 0 };
    for pod in &late[job].pods {
        let is_placed = bins.iter_mut().skip(first).any(|bin| bin.add(&late[job], pod, job));
        if is_placed {
            continue;
        }
        let added = new.filter(|(_, most)| bins.len() < *most).and_then(|(empty, _)| {
            let mut bin = empty.clone();
            bin.add(&late[job], pod, job).then_some(bin)
        });
        match added {
            Some(bin) => bins.push(bin),
            None => {
                if let Some(before) = before {
                    *bins = before;
                }
                return false;
            }
        }
    }
    true
}

/// A node with the jobs that were put onto it.
#[derive(Debug, Clone)]
struct Bin {
    room: Room,
    speed: f64,
    /// When the node is there.
    from_s: f64,
    /// What its pods request.
    requested: Room,
    /// Jobs whose work is known, and the part of the node that all others request.
    tasks: Vec<Task>,
    reserved: f64,
    jobs: BTreeSet<usize>,
}

impl Bin {
    fn new(node: &NodeKind, from_s: f64) -> Bin {
        Bin {
            room: node.room,
            speed: node.speed,
            from_s,
            requested: Room::default(),
            tasks: vec![],
            reserved: 0.0,
            jobs: BTreeSet::new(),
        }
    }

    /// Puts a pod onto the node if it fits; whether it does.
    fn add(&mut self, job: &LateJob, pod: &Room, index: usize) -> bool {
        let left_s = job.left_s - self.from_s;
        let cores = self.requested.cores + pod.cores.max(0.0);
        let memory_bytes = self.requested.memory_bytes.saturating_add(pod.memory_bytes);
        let has_room = cores <= self.room.cores && memory_bytes <= self.room.memory_bytes;
        if !has_room || self.room.cores <= 0.0 || self.speed <= 0.0 || left_s <= 0.0 {
            return false;
        }
        let (tasks, reserved) = (self.tasks.len(), self.reserved);
        match &job.left {
            Some(left) => self.tasks.push(task(left, self.room.cores, self.speed, left_s)),
            None => self.reserved += pod.cores.max(0.0) / self.room.cores,
        }
        if !self.keeps_deadlines() {
            self.tasks.truncate(tasks);
            self.reserved = reserved;
            return false;
        }
        self.requested = Room { cores, memory_bytes };
        self.jobs.insert(index);
        true
    }

    fn keeps_deadlines(&self) -> bool {
        if self.tasks.is_empty() {
            return true;
        }
        let order = by_deadline(&self.tasks, 0..self.tasks.len());
        fill(&self.tasks, &order, (1.0 - self.reserved).clamp(0.0, USABLE_PART)).is_some()
    }
}

/// The work left of a job as one step on a node with this many cores of this speed, on the slow side of its prediction.
pub(super) fn task(left: &WorkLeft, cores: f64, speed: f64, left_s: f64) -> Task {
    let usable = (left.usable_cores / cores).clamp(0.0, 1.0);
    let parallel_s = left.work_core_s.max(0.0) / (cores * speed);
    let pace = Pace::from_law(left.serial_s.max(0.0) / speed, parallel_s, usable);
    let pace = Pace { error: left.spread.max(0.0), ..pace };
    Task { pace, steps: 1.0, left_s, cap: usable.min(USABLE_PART), caution: 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn kind(name: &str, cores: f64) -> NodeKind {
        NodeKind { name: name.into(), room: Room { cores, memory_bytes: 64 * GIB }, speed: 1.0 }
    }

    fn late(work_core_s: f64, left_s: f64) -> LateJob {
        let left = WorkLeft { work_core_s, serial_s: 0.0, usable_cores: 64.0, spread: 0.0 };
        LateJob { pods: vec![Room::default()], left: Some(left), left_s, runs: false }
    }

    /// A job of which only the requests are known.
    fn waiting(pods: usize, cores: f64, memory_bytes: u64) -> LateJob {
        LateJob { pods: vec![Room { cores, memory_bytes }; pods], left: None, left_s: 1000.0, runs: false }
    }

    /// The kind, the number of nodes, and how many jobs are helped, of each need.
    fn needs(late: &[LateJob], free: &[NodeKind], kinds: &[NodeKind]) -> Vec<(String, usize, usize)> {
        let gist = |need: &NodeNeed| {
            let helped: BTreeSet<usize> = need.nodes.iter().flatten().copied().collect();
            (kinds[need.kind].name.clone(), need.nodes.len(), helped.len())
        };
        nodes_needed(late, free, kinds, 0.0).iter().map(gist).collect()
    }

    fn one(name: &str, nodes: usize, helped: usize) -> Vec<(String, usize, usize)> {
        vec![(name.to_owned(), nodes, helped)]
    }

    #[test]
    fn jobs_that_fit_together_share_a_node() {
        // A node of ten cores does 900 core-seconds for deadlines in 100 s: two jobs of 400 each.
        let jobs = [late(400.0, 100.0), late(400.0, 100.0), late(400.0, 100.0)];
        assert_eq!(needs(&jobs, &[], &[kind("ten", 10.0)]), one("ten", 2, 3));
        // One that is due later takes what the first leaves behind.
        assert_eq!(needs(&[late(800.0, 100.0), late(800.0, 200.0)], &[], &[kind("ten", 10.0)]), one("ten", 1, 2));
        // Requests are kept, whatever the work is.
        let greedy = |mut job: LateJob| {
            job.pods[0].cores = 6.0;
            job
        };
        let jobs = [greedy(late(10.0, 100.0)), greedy(late(10.0, 100.0))];
        assert_eq!(needs(&jobs, &[], &[kind("ten", 10.0)]), one("ten", 2, 2));
        // A pod of unknown length keeps its part of the node.
        let jobs = [waiting(1, 5.0, 0), late(600.0, 100.0)];
        assert_eq!(needs(&jobs, &[], &[kind("ten", 10.0)]), one("ten", 2, 2));
        assert_eq!(needs(&[waiting(1, 5.0, 0), late(400.0, 100.0)], &[], &[kind("ten", 10.0)]), one("ten", 1, 2));
    }

    #[test]
    fn a_job_that_no_node_can_help_asks_for_none() {
        let with = |change: fn(&mut WorkLeft)| {
            let mut job = late(400.0, 100.0);
            job.left.iter_mut().for_each(change);
            job
        };
        let narrow = with(|left| left.usable_cores = 1.0);
        let serial = with(|left| left.serial_s = 101.0);
        let past = late(1.0, -5.0);
        let wide = waiting(1, 11.0, 0);
        let heavy = waiting(1, 1.0, 65 * GIB);
        assert_eq!(needs(&[narrow.clone(), serial, past, wide, heavy], &[], &[kind("ten", 10.0)]), []);
        assert_eq!(needs(&[narrow, late(10.0, 100.0)], &[], &[kind("ten", 10.0)]), one("ten", 1, 1));
        assert_eq!((needs(&[], &[], &[kind("ten", 10.0)]), needs(&[late(1.0, 9.0)], &[], &[])), (vec![], vec![]));
        assert_eq!(nodes_needed(&[late(1.0, 9.0)], &[], &[kind("ten", 10.0)], 10.0), [], "the node comes too late");
        assert_eq!(needs(&[late(1.0, 9.0), waiting(1, 0.0, 0)], &[], &[kind("none", 0.0)]), []);
    }

    #[test]
    fn the_cheapest_kind_that_helps_most_is_chosen() {
        let kinds = [kind("large", 64.0), kind("medium", 16.0), kind("small", 2.0)];
        // 1000 core-seconds in 100 s take more than ten cores: one medium node.
        assert_eq!(needs(&[late(1000.0, 100.0)], &[], &kinds), one("medium", 1, 1));
        // Five of them: five medium nodes have 80 cores, one large one has 64.
        assert_eq!(needs(&vec![late(1000.0, 100.0); 5], &[], &kinds), one("large", 1, 5));
    }

    #[test]
    fn free_room_is_used_first() {
        let free = [kind("here", 4.0), kind("there", 4.0)];
        assert_eq!(needs(&[waiting(1, 3.0, 0), waiting(1, 3.0, 0)], &free, &[kind("ten", 10.0)]), []);
        assert_eq!(needs(&vec![waiting(1, 3.0, 0); 3], &free, &[kind("ten", 10.0)]), one("ten", 1, 1));
        // A job that runs and is late all the same was not helped by it.
        let stuck = LateJob { runs: true, ..late(300.0, 100.0) };
        assert_eq!(needs(std::slice::from_ref(&stuck), &free, &[kind("ten", 10.0)]), one("ten", 1, 1));
        // Beside a waiting job it takes a part of the new node.
        let both = [stuck, waiting(1, 5.0, 0)];
        assert_eq!(needs(&both, &free, &[kind("ten", 10.0)]), one("ten", 1, 2));
        // What may take longer than expected counts as longer.
        let mut unsure = late(800.0, 100.0);
        unsure.left.iter_mut().for_each(|left| left.spread = 0.2);
        assert_eq!(needs(&[unsure], &[], &[kind("ten", 10.0)]), []);
        // Free room that is too slow is no help either.
        let slow = NodeKind { speed: 0.1, ..kind("slow", 4.0) };
        assert_eq!(needs(&[late(300.0, 100.0)], &[slow], &[kind("ten", 10.0)]), one("ten", 1, 1));
    }

    #[test]
    fn a_gang_fits_as_a_whole_or_asks_for_nothing() {
        let kinds = [kind("four", 4.0)];
        assert_eq!(needs(&[waiting(3, 3.0, 0)], &[], &kinds), one("four", 3, 1));
        // Free room takes a part of a gang if new nodes take the rest.
        assert_eq!(needs(&[waiting(3, 3.0, 0)], &[kind("here", 7.0)], &kinds), one("four", 1, 1));
        // A job that fits into the free room as a whole goes first.
        let jobs = [waiting(3, 3.0, 0), waiting(1, 5.0, 0)];
        assert_eq!(needs(&jobs, &[kind("here", 7.0)], &kinds), one("four", 3, 1));
        assert_eq!(needs(&[waiting(2, 3.0, 0), waiting(1, 3.0, 0)], &[kind("here", 9.0)], &kinds), []);
        // What a gang that does not fit has tried is free again.
        let mut uneven = waiting(2, 3.0, 0);
        uneven.pods[1].cores = 5.0;
        assert_eq!(needs(&[uneven, waiting(1, 3.0, 0)], &[], &kinds), one("four", 1, 1));
    }

    #[test]
    fn jobs_that_need_different_kinds_ask_for_each() {
        let mut roomy = kind("roomy", 4.0);
        roomy.room.memory_bytes = 512 * GIB;
        let kinds = [kind("plain", 32.0), roomy];
        let jobs = [waiting(1, 20.0, GIB), waiting(1, 1.0, 300 * GIB), waiting(1, 20.0, GIB)];
        let found = needs(&jobs, &[], &kinds);
        assert_eq!(found, [("plain".to_owned(), 2, 2), ("roomy".to_owned(), 1, 1)]);
    }

    #[test]
    fn the_number_of_nodes_is_bounded() {
        let jobs = vec![waiting(1, 3.0, 0); 2 * MOST_NODES];
        assert_eq!(needs(&jobs, &[], &[kind("four", 4.0)]), one("four", MOST_NODES, MOST_NODES));
    }
}
