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

use crate::model::{JobId, NodeId};
use crate::policy::PlaceRule;
use crate::signal::Category;
use crate::view::{NodeView, View};
use std::collections::BTreeMap;

/// Free slots and running jobs of every node, kept up to date while several jobs are placed in one go.
pub(crate) struct Room<'a> {
    view: &'a View,
    /// Growing and completing jobs of each node.
    running: BTreeMap<NodeId, (usize, usize)>,
}

/// What a job that requests nothing counts for, in thousandths of a core and in bytes.
const DEFAULT_MILLICORES: u64 = 100;
const DEFAULT_BYTES: u64 = 200 << 20;
/// Pods of the system itself on every node (proxy, network).
const SYSTEM_PODS: u64 = 2;
/// FlowCon's β.
const BETA: f64 = 2.0;

impl<'a> Room<'a> {
    pub(crate) fn new(view: &'a View, category: impl Fn(JobId) -> Category) -> Room<'a> {
        let mut running: BTreeMap<NodeId, (usize, usize)> = BTreeMap::new();
        for job in &view.jobs {
            if let Some(node) = job.node() {
                let (growing, completing) = running.entry(node).or_default();
                *(if category(job.id) == Category::Completing { completing } else { growing }) += 1;
            }
        }
        Room { view, running }
    }

    /// A world in which so many jobs run on each node.
    pub(crate) fn with(view: &'a View, jobs: &BTreeMap<NodeId, usize>) -> Room<'a> {
        Room { view, running: jobs.iter().map(|(node, jobs)| (*node, (*jobs, 0))).collect() }
    }

    fn counts(&self, id: NodeId) -> (usize, usize) {
        self.running.get(&id).copied().unwrap_or_default()
    }

    fn jobs(&self, id: NodeId) -> usize {
        let (growing, completing) = self.counts(id);
        growing + completing
    }

    /// Takes a slot for `job` on the node the rule prefers, if any has one.
    pub(crate) fn choose(&mut self, rule: &PlaceRule, job: JobId) -> Option<NodeId> {
        let free = self.view.nodes.iter().filter(|n| n.slots.is_none_or(|slots| self.jobs(n.id) < slots));
        let node = match rule {
            PlaceRule::Spread => {
                let crowd = |n: &NodeView| self.jobs(n.id) as f64 / n.cores.max(f64::MIN_POSITIVE);
                free.min_by(|a, b| crowd(a).total_cmp(&crowd(b)).then(a.id.cmp(&b.id)))?.id
            }
            PlaceRule::Kubernetes { seed } => {
                free.max_by_key(|n| (kubernetes_score(n, self.jobs(n.id) as u64), hash(*seed, job, n.id)))?.id
            }
            PlaceRule::Growth => {
                let worse = |n: &NodeView| {
                    let (growing, completing) = self.counts(n.id);
                    let all = (growing + completing + 1) as f64;
                    -n.cores * n.speed * (1.0 - completing as f64 / (BETA * all)) / (growing + 1) as f64
                };
                free.min_by(|a, b| worse(a).total_cmp(&worse(b)).then(a.id.cmp(&b.id)))?.id
            }
        };
        self.running.entry(node).or_default().0 += 1;
        Some(node)
    }

    /// Takes a slot for a job that belongs on `home`: there, or on an empty node that has more to offer; nowhere if none has a slot.
    pub(crate) fn welcome(&mut self, home: NodeId) -> Option<NodeId> {
        let free = self.view.nodes.iter().filter(|n| n.slots.is_none_or(|slots| self.jobs(n.id) < slots));
        let offer = |n: &NodeView| n.cores * n.speed / (self.jobs(n.id) + 1) as f64;
        let node = free
            .filter(|n| n.id == home || self.jobs(n.id) == 0)
            .max_by(|a, b| {
                offer(a).total_cmp(&offer(b)).then((a.id == home).cmp(&(b.id == home))).then(b.id.cmp(&a.id))
            })?
            .id;
        self.running.entry(node).or_default().0 += 1;
        Some(node)
    }
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
        NodeView { id: NodeId(id), cores, speed, memory_bytes: 64 << 30, slots: None }
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
        let mut room = Room::new(&v, |_| Category::Growing);
        assert_eq!(room.choose(&PlaceRule::Spread, JobId(9)), Some(NodeId(1)));
    }

    #[test]
    fn completing_jobs_leave_more_room_to_grow_than_new_ones() {
        let v = view(vec![node(0, 16.0, 1.0), node(1, 16.0, 1.0)], &[(1, 0), (2, 0), (3, 1)]);
        // Two completing: (1 − 2/6)/1 = 0.67 of the node; one growing: 0.5.
        let completing = |id: JobId| if id.0 < 3 { Category::Completing } else { Category::Growing };
        assert_eq!(Room::new(&v, completing).choose(&PlaceRule::Growth, JobId(9)), Some(NodeId(0)));
        assert_eq!(Room::new(&v, |_| Category::Growing).choose(&PlaceRule::Growth, JobId(9)), Some(NodeId(1)));
        // A node twice as fast is worth two growing neighbours.
        let fast = view(vec![node(0, 16.0, 2.5), node(1, 16.0, 1.0)], &[(1, 0), (2, 0)]);
        assert_eq!(Room::new(&fast, |_| Category::Growing).choose(&PlaceRule::Growth, JobId(9)), Some(NodeId(1)));
        let faster = view(vec![node(0, 16.0, 3.5), node(1, 16.0, 1.0)], &[(1, 0), (2, 0)]);
        assert_eq!(Room::new(&faster, |_| Category::Growing).choose(&PlaceRule::Growth, JobId(9)), Some(NodeId(0)));
    }

    #[test]
    fn a_newcomer_goes_home_or_to_an_empty_node_that_offers_more() {
        let v = view(vec![node(0, 16.0, 1.0), node(1, 16.0, 1.0), node(2, 4.0, 1.0)], &[(1, 0)]);
        let welcome = |jobs: &[(u64, u32)], home: u32| {
            let v = view(v.nodes.clone(), jobs);
            Room::new(&v, |_| Category::Growing).welcome(NodeId(home))
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
        let first = |seed| Room::new(&v, |_| Category::Growing).choose(&PlaceRule::Kubernetes { seed }, JobId(1));
        let chosen: std::collections::BTreeSet<_> = (0..40).map(first).collect();
        assert_eq!(chosen.len(), 4);
    }
}
