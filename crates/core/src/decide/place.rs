//! On which node?
//!
//! `spread`: the node with a free slot that runs the fewest jobs for its cores. `kubernetes`: what the default scheduler's integer scores do to jobs that
//! request nothing. `growth` (FlowCon 2.0): where the newcomer, and the jobs it joins, will grow most.
//!
//! **Kubernetes.** NodeResourcesLeastAllocated and NodeResourcesBalancedAllocation count 100 mCPU and 200 MiB for a pod without requests and
//! cut scores to whole numbers of 100; on a node of 16 cores and 64 GiB two pods score like three, four like six. Ties are broken at random; here by a hash of the
//! job and a seed that the driver hands in, so that the same view gives the same plan.
//!
//! **Growth.** Under FlowCon a completing job keeps `1/(β·n)` and the others split the rest, so a newcomer to a node with `g` growing and `c` completing
//! jobs can expect `(1 − c/(β·n))/(g + 1)` of its cores and speed, `n = g + c + 1`: a node full of completing jobs is roomier than
//! one with as many growing ones. (Source: V. Sharma's thesis on FlowCon 2.0 names the aim; the measure is ours.)

use crate::decide::Key;
use crate::model::{JobId, NodeId};
use crate::policy::PlaceRule;
use crate::signal::Category;
use crate::view::{NodeView, View};
use std::collections::{BTreeMap, BTreeSet};

/// Free slots and running jobs of every node, kept up to date while several jobs are placed in one go.
///
/// Nodes that have a slot are kept in the order in which the rule prefers them, so that placing a job costs the same among ten nodes and ten thousand.
pub(crate) struct Room<'a> {
    view: &'a View,
    rule: PlaceRule,
    /// Growing and completing jobs of each node of the view, in its order.
    running: Vec<(usize, usize)>,
    /// Places in the view of nodes with a free slot, by how little they would offer; only those without jobs in `empty`, by what they would.
    ranking: BTreeSet<(Key, usize)>,
    empty: BTreeSet<(Key, usize)>,
}

/// What a job that requests nothing counts for, in thousandths of a core and in bytes.
const DEFAULT_MILLICORES: u64 = 100;
const DEFAULT_BYTES: u64 = 200 << 20;
/// Pods of the system itself on every node (proxy, network).
const SYSTEM_PODS: u64 = 2;
/// FlowCon's β.
const BETA: f64 = 2.0;

impl<'a> Room<'a> {
    pub(crate) fn new(view: &'a View, rule: PlaceRule, category: impl Fn(JobId) -> Category) -> Room<'a> {
        let mut running = vec![(0, 0); view.nodes.len()];
        for job in &view.jobs {
            if let Some(place) = job.node().and_then(|node| place_of(view, node)) {
                let (growing, completing) = &mut running[place];
                *(if category(job.id) == Category::Completing { completing } else { growing }) += 1;
            }
        }
        Room::ranked(view, rule, running)
    }

    /// A world in which so many jobs run on each node.
    pub(crate) fn with(view: &'a View, rule: PlaceRule, jobs: &BTreeMap<NodeId, usize>) -> Room<'a> {
        let count = |node: &NodeView| (jobs.get(&node.id).copied().unwrap_or_default(), 0);
        Room::ranked(view, rule, view.nodes.iter().map(count).collect())
    }

    fn ranked(view: &'a View, rule: PlaceRule, running: Vec<(usize, usize)>) -> Room<'a> {
        let mut room = Room { view, rule, running, ranking: BTreeSet::new(), empty: BTreeSet::new() };
        for place in 0..view.nodes.len() {
            room.enter(place);
        }
        room
    }

    fn jobs(&self, place: usize) -> usize {
        let (growing, completing) = self.running[place];
        growing + completing
    }

    fn has_slot(&self, place: usize) -> bool {
        self.view.nodes[place].slots.is_none_or(|slots| self.jobs(place) < slots)
    }

    /// What the rule goes by, the smallest first. The default scheduler's ties are broken anew for each job, so that its key only groups nodes.
    fn key(&self, place: usize) -> Key {
        let node = &self.view.nodes[place];
        let (growing, completing) = self.running[place];
        Key(match self.rule {
            PlaceRule::Spread => self.jobs(place) as f64 / node.cores.max(f64::MIN_POSITIVE),
            PlaceRule::Kubernetes { .. } => -(kubernetes_score(node, self.jobs(place) as u64) as f64),
            PlaceRule::Growth => {
                let all = (growing + completing + 1) as f64;
                -node.cores * node.speed * (1.0 - completing as f64 / (BETA * all)) / (growing + 1) as f64
            }
        })
    }

    fn enter(&mut self, place: usize) {
        if self.has_slot(place) {
            self.ranking.insert((self.key(place), place));
            if self.jobs(place) == 0 {
                self.empty.insert((Key(-self.offer(place)), place));
            }
        }
    }

    /// Takes a slot.
    fn take(&mut self, place: usize) -> NodeId {
        self.ranking.remove(&(self.key(place), place));
        self.empty.remove(&(Key(-self.offer(place)), place));
        self.running[place].0 += 1;
        self.enter(place);
        self.view.nodes[place].id
    }

    fn offer(&self, place: usize) -> f64 {
        let node = &self.view.nodes[place];
        node.cores * node.speed / (self.jobs(place) + 1) as f64
    }

    /// Takes a slot for `job` on the node the rule prefers, if any has one.
    pub(crate) fn choose(&mut self, job: JobId) -> Option<NodeId> {
        let first = *self.ranking.first()?;
        let place = match self.rule {
            PlaceRule::Spread | PlaceRule::Growth => first.1,
            PlaceRule::Kubernetes { seed } => {
                let ties = self.ranking.iter().take_while(|(key, _)| *key == first.0).map(|(_, place)| *place);
                ties.max_by_key(|&place| hash(seed, job, self.view.nodes[place].id))?
            }
        };
        Some(self.take(place))
    }

    /// Takes a slot for a job that belongs on `home`: there, or on an empty node that has more to offer; nowhere if none has a slot.
    pub(crate) fn welcome(&mut self, home: NodeId) -> Option<NodeId> {
        let home = place_of(self.view, home).filter(|&place| self.has_slot(place));
        let empty = self.empty.first().map(|(_, place)| *place);
        let place = match (home, empty) {
            (Some(home), Some(empty)) if self.offer(empty) > self.offer(home) => empty,
            (home, empty) => home.or(empty)?,
        };
        Some(self.take(place))
    }
}

fn place_of(view: &View, node: NodeId) -> Option<usize> {
    view.nodes.binary_search_by_key(&node, |n| n.id).ok()
}

/// The sum of the two resource scores of the default scheduler for a node with so many jobs.
fn kubernetes_score(node: &NodeView, jobs: u64) -> u64 {
    let pods = jobs + SYSTEM_PODS + 1;
    let millicores = (node.cores * 1000.0) as u64;
    let left = |capacity: u64, used: u64| capacity.saturating_sub(used) * 100 / capacity.max(1);
    let cpu = left(millicores, pods * DEFAULT_MILLICORES);
    let memory = left(node.memory_bytes, pods * DEFAULT_BYTES);
    let fraction = |capacity: u64, used: u64| used as f64 / capacity.max(1) as f64;
    let apart =
        (fraction(millicores, pods * DEFAULT_MILLICORES) - fraction(node.memory_bytes, pods * DEFAULT_BYTES)).abs();
    // With two resources the standard deviation of the fractions is half their distance.
    let balanced = ((1.0 - apart / 2.0).max(0.0) * 100.0) as u64;
    (cpu + memory) / 2 + balanced
}

fn hash(seed: u64, job: JobId, node: NodeId) -> u64 {
    let mut x =
        seed ^ job.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(node.0).wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Time;
    use crate::view::{JobView, Phase};

    fn node(id: u32, cores: f64, speed: f64) -> NodeView {
        NodeView { id: NodeId(id), cores, speed, memory_bytes: 64 << 30, slots: None, idle: None }
    }

    fn view(nodes: Vec<NodeView>, jobs: &[(u64, u32)]) -> View {
        let job = |(id, node): &(u64, u32)| JobView {
            id: JobId(*id),
            phase: Phase::Running { node: NodeId(*node), since: Time::ZERO, attempt: 1 },
            ..JobView::default()
        };
        View { now: Time::ZERO, nodes, jobs: jobs.iter().map(job).collect() }
    }

    #[test]
    fn spreading_goes_by_jobs_for_each_core() {
        let v = view(vec![node(0, 4.0, 1.0), node(1, 16.0, 1.0)], &[(1, 0), (2, 1), (3, 1)]);
        let mut room = Room::new(&v, PlaceRule::Spread, |_| Category::Growing);
        assert_eq!(room.choose(JobId(9)), Some(NodeId(1)));
    }

    #[test]
    fn completing_jobs_leave_more_room_to_grow_than_new_ones() {
        let v = view(vec![node(0, 16.0, 1.0), node(1, 16.0, 1.0)], &[(1, 0), (2, 0), (3, 1)]);
        // Two completing: (1 − 2/6)/1 = 0.67 of the node; one growing: 0.5.
        let completing = |id: JobId| if id.0 < 3 { Category::Completing } else { Category::Growing };
        assert_eq!(Room::new(&v, PlaceRule::Growth, completing).choose(JobId(9)), Some(NodeId(0)));
        assert_eq!(Room::new(&v, PlaceRule::Growth, |_| Category::Growing).choose(JobId(9)), Some(NodeId(1)));
        // A node twice as fast is worth two growing neighbours.
        let fast = view(vec![node(0, 16.0, 2.5), node(1, 16.0, 1.0)], &[(1, 0), (2, 0)]);
        assert_eq!(Room::new(&fast, PlaceRule::Growth, |_| Category::Growing).choose(JobId(9)), Some(NodeId(1)));
        let faster = view(vec![node(0, 16.0, 3.5), node(1, 16.0, 1.0)], &[(1, 0), (2, 0)]);
        assert_eq!(Room::new(&faster, PlaceRule::Growth, |_| Category::Growing).choose(JobId(9)), Some(NodeId(0)));
    }

    #[test]
    fn a_newcomer_goes_home_or_to_an_empty_node_that_offers_more() {
        let v = view(vec![node(0, 16.0, 1.0), node(1, 16.0, 1.0), node(2, 4.0, 1.0)], &[(1, 0)]);
        let welcome = |jobs: &[(u64, u32)], home: u32| {
            let v = view(v.nodes.clone(), jobs);
            Room::new(&v, PlaceRule::Spread, |_| Category::Growing).welcome(NodeId(home))
        };
        assert_eq!(welcome(&[], 1), Some(NodeId(1)));
        assert_eq!(welcome(&[(1, 0)], 0), Some(NodeId(1)));
        // Half of a large node is more than a small one, a seventh of it is not.
        assert_eq!(welcome(&[(1, 0), (2, 1)], 0), Some(NodeId(0)));
        assert_eq!(welcome(&[(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)], 0), Some(NodeId(2)));
        // A busy node that is not its home is no choice.
        assert_eq!(welcome(&[(1, 0), (2, 0), (3, 1), (4, 2)], 0), Some(NodeId(0)));
    }

    #[test]
    fn kubernetes_cannot_tell_some_counts_apart_and_then_chance_decides() {
        let n = node(0, 16.0, 1.0);
        let scores: Vec<u64> = (0..8).map(|jobs| kubernetes_score(&n, jobs)).collect();
        assert!(scores.windows(2).all(|w| w[0] >= w[1]), "{scores:?}");
        assert!(scores.windows(2).any(|w| w[0] == w[1]) && scores[0] > scores[7], "{scores:?}");
        let v = view((0..4).map(|i| node(i, 16.0, 1.0)).collect(), &[]);
        let first = |seed| Room::new(&v, PlaceRule::Kubernetes { seed }, |_| Category::Growing).choose(JobId(1));
        let chosen: std::collections::BTreeSet<_> = (0..40).map(first).collect();
        assert_eq!(chosen.len(), 4);
    }
}
