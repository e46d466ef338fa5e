//! Where waiting jobs start: the nodes in the order of a rule, and the slots that are left.
//!
//! **Rules.** [`SPREAD`]: the node with a free slot that runs the fewest jobs for its cores.
//! [`Kubernetes`]: what the default scheduler's integer scores do to jobs that request nothing.
//! [`Growth`] (FlowCon 2.0): where the newcomer, and the jobs it joins, will grow most.
//!
//! **Homes.** A share rule may know where a job would live if all shared equally ([`Homes`]). Then
//! the rule of the policy chooses that home, and the job starts there, or on an empty node that
//! offers more.

mod growth;
mod kubernetes;
mod spread;

pub(crate) use growth::Growth;
pub(crate) use kubernetes::Kubernetes;
pub(crate) use spread::SPREAD;

use super::{Homes, JobCounts, Place};
use crate::model::{JobId, NodeId};
use crate::plan::StartReason;
use crate::signal::Category;
use crate::sort::Key;
use crate::view::{NodeView, View};
use std::collections::{BTreeMap, BTreeSet};

/// Places the waiting jobs of one view, one after the other.
pub(crate) struct Placer<'a> {
    room: Room<'a>,
    /// The nodes as they would be if all shared equally.
    equal: Option<(Room<'a>, &'a mut dyn Homes)>,
}

impl<'a> Placer<'a> {
    pub(crate) fn new(
        view: &'a View,
        rule: &'a dyn Place,
        known: impl Fn(JobId) -> (Category, Option<f64>),
        homes: Option<&'a mut dyn Homes>,
    ) -> Placer<'a> {
        let equal = homes.map(|homes| (Room::with(view, rule, &homes.counts()), homes));
        Placer { room: Room::new(view, rule, known), equal }
    }

    /// Takes a slot for `job`, if any node has one.
    pub(crate) fn place(&mut self, job: JobId) -> Option<NodeId> {
        let Some((equal, homes)) = &mut self.equal else { return self.room.choose(job) };
        let Some(home) = equal.preferred(job) else {
            let node = self.room.choose(job)?;
            homes.settle(job, node);
            return Some(node);
        };
        let start = self.room.welcome(home).or_else(|| self.room.preferred(job))?;
        // Where the rule prefers neither of two nodes, the job lives where it starts.
        let home = if equal.has_slot(start) && equal.key(start) == equal.key(home) { start } else { home };
        homes.settle(job, equal.take(home));
        Some(self.room.take(start))
    }

    pub(crate) fn reason(&self) -> StartReason {
        if self.equal.is_some() { StartReason::HomeOrEmpty } else { self.room.rule.reason() }
    }
}

/// Free slots and running jobs of every node, kept up to date while several jobs are placed in one
/// go.
///
/// Nodes that have a slot are kept in the order in which the rule prefers them, so that placing a
/// job costs the same among ten nodes and ten thousand.
struct Room<'a> {
    view: &'a View,
    rule: &'a dyn Place,
    /// The jobs of each node of the view, in its order.
    running: Vec<JobCounts>,
    /// Places in the view of nodes with a free slot, by the rule's key; only those without jobs in
    /// `empty`, the largest offer first.
    ranking: BTreeSet<(Key, usize)>,
    empty: BTreeSet<(Key, usize)>,
}

impl<'a> Room<'a> {
    /// `known` tells the category of a job and its measured growth for a whole node.
    fn new(view: &'a View, rule: &'a dyn Place, known: impl Fn(JobId) -> (Category, Option<f64>)) -> Room<'a> {
        let mut running = vec![JobCounts::default(); view.nodes.len()];
        let mut best: f64 = 0.0;
        for job in &view.jobs {
            if let Some(place) = job.node().and_then(|node| place_of(view, node)) {
                let (category, growth) = known(job.id);
                let node = &view.nodes[place];
                let growth = growth.map(|g| g / (node.cores * node.speed)).filter(|g| g.is_finite());
                best = best.max(growth.unwrap_or(0.0));
                running[place].add(category, growth);
            }
        }
        running.iter_mut().for_each(|jobs| jobs.best_growth = best);
        Room::ranked(view, rule, running)
    }

    /// A world in which each node has the given number of jobs.
    fn with(view: &'a View, rule: &'a dyn Place, jobs: &BTreeMap<NodeId, usize>) -> Room<'a> {
        let count = |node: &NodeView| JobCounts {
            growing: jobs.get(&node.id).copied().unwrap_or_default(),
            ..JobCounts::default()
        };
        Room::ranked(view, rule, view.nodes.iter().map(count).collect())
    }

    fn ranked(view: &'a View, rule: &'a dyn Place, running: Vec<JobCounts>) -> Room<'a> {
        let mut room = Room { view, rule, running, ranking: BTreeSet::new(), empty: BTreeSet::new() };
        for place in 0..view.nodes.len() {
            room.enter(place);
        }
        room
    }

    fn jobs(&self, place: usize) -> usize {
        self.running[place].all()
    }

    fn has_slot(&self, place: usize) -> bool {
        self.view.nodes[place].slots.is_none_or(|slots| self.jobs(place) < slots)
    }

    fn key(&self, place: usize) -> Key {
        Key(self.rule.key(&self.view.nodes[place], self.running[place]))
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
        self.running[place].add(Category::Growing, None);
        self.enter(place);
        self.view.nodes[place].id
    }

    fn offer(&self, place: usize) -> f64 {
        let node = &self.view.nodes[place];
        node.cores * node.speed / (self.jobs(place) + 1) as f64
    }

    /// Takes a slot for `job` on the node the rule prefers, if any has one.
    fn choose(&mut self, job: JobId) -> Option<NodeId> {
        let place = self.preferred(job)?;
        Some(self.take(place))
    }

    /// The node with a slot that the rule prefers for `job`.
    fn preferred(&self, job: JobId) -> Option<usize> {
        let first = *self.ranking.first()?;
        let tie = |place: usize| self.rule.tie(job, self.view.nodes[place].id);
        match tie(first.1) {
            None => Some(first.1),
            Some(_) => {
                let ties = self.ranking.iter().take_while(|(key, _)| *key == first.0).map(|(_, place)| *place);
                ties.max_by_key(|&place| tie(place))
            }
        }
    }

    /// The node for a job that belongs on `home`: this one, or an empty node that has more to offer;
    /// none if none has a slot.
    fn welcome(&self, home: usize) -> Option<usize> {
        let home = Some(home).filter(|&place| self.has_slot(place));
        let empty = self.empty.first().map(|(_, place)| *place);
        match (home, empty) {
            (Some(home), Some(empty)) if self.offer(empty) > self.offer(home) => Some(empty),
            (home, empty) => home.or(empty),
        }
    }
}

fn place_of(view: &View, node: NodeId) -> Option<usize> {
    view.nodes.binary_search_by_key(&node, |n| n.id).ok()
}

#[cfg(test)]
mod tests {
    use super::spread::Spread;
    use super::*;
    use crate::model::Time;
    use crate::view::{JobView, Phase};

    fn node(id: u32, cores: f64, speed: f64) -> NodeView {
        NodeView { id: NodeId(id), cores, speed, memory_bytes: 64 << 30, slots: None, idle_node_s: None }
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
        let mut room = Room::new(&v, &Spread, |_| (Category::Growing, None));
        assert_eq!(room.choose(JobId(9)), Some(NodeId(1)));
    }

    #[test]
    fn growth_goes_where_the_newcomer_and_its_neighbours_grow_most() {
        let rule = Growth { beta: 2.0 };
        let v = view(vec![node(0, 16.0, 1.0), node(1, 16.0, 1.0)], &[(1, 0), (2, 0), (3, 1)]);
        // Two converged jobs that hardly grow leave more room than one that grows as a newcomer does.
        let converged =
            |id: JobId| if id.0 < 3 { (Category::Converged, Some(0.01)) } else { (Category::Growing, Some(1.0)) };
        assert_eq!(Room::new(&v, &rule, converged).choose(JobId(9)), Some(NodeId(0)));
        // All of them new: the fewer neighbours, the better.
        assert_eq!(Room::new(&v, &rule, |_| (Category::Growing, None)).choose(JobId(9)), Some(NodeId(1)));
        // One neighbour each: it joins the one that grows less, and loses less by sharing.
        let pair = view(vec![node(0, 16.0, 1.0), node(1, 16.0, 1.0)], &[(1, 0), (2, 1)]);
        let slow_first = |id: JobId| (Category::Growing, Some(if id.0 == 1 { 0.1 } else { 1.0 }));
        assert_eq!(Room::new(&pair, &rule, slow_first).choose(JobId(9)), Some(NodeId(0)));
        // A faster node is worth more neighbours.
        let faster = view(vec![node(0, 16.0, 3.5), node(1, 16.0, 1.0)], &[(1, 0), (2, 0), (3, 1)]);
        assert_eq!(Room::new(&faster, &rule, |_| (Category::Growing, None)).choose(JobId(9)), Some(NodeId(0)));
    }

    #[test]
    fn a_newcomer_goes_home_or_to_an_empty_node_that_offers_more() {
        let v = view(vec![node(0, 16.0, 1.0), node(1, 16.0, 1.0), node(2, 4.0, 1.0)], &[(1, 0)]);
        let welcome = |jobs: &[(u64, u32)], home: usize| {
            let v = view(v.nodes.clone(), jobs);
            Room::new(&v, &Spread, |_| (Category::Growing, None)).welcome(home)
        };
        assert_eq!(welcome(&[], 1), Some(1));
        assert_eq!(welcome(&[(1, 0)], 0), Some(1));
        // Half of a large node is more than a small one, a seventh of it is not.
        assert_eq!(welcome(&[(1, 0), (2, 1)], 0), Some(0));
        assert_eq!(welcome(&[(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)], 0), Some(2));
        // A busy node that is not its home is no choice.
        assert_eq!(welcome(&[(1, 0), (2, 0), (3, 1), (4, 2)], 0), Some(0));
    }

    /// Homes of jobs, as a share rule keeps them.
    #[derive(Default)]
    struct TestHomes(BTreeMap<JobId, NodeId>);

    impl Homes for TestHomes {
        fn counts(&self) -> BTreeMap<NodeId, usize> {
            let mut counts = BTreeMap::new();
            self.0.values().for_each(|home| *counts.entry(*home).or_default() += 1);
            counts
        }

        fn settle(&mut self, job: JobId, node: NodeId) {
            self.0.insert(job, node);
        }
    }

    #[test]
    fn a_job_lives_where_it_starts_unless_the_rule_prefers_another_node() {
        // All nodes are empty in both worlds: the job starts on the largest, and lives there.
        let v = view(vec![node(0, 4.0, 1.0), node(1, 5.0, 1.0)], &[]);
        let mut homes = TestHomes::default();
        let known = |_| (Category::Growing, None);
        assert_eq!(Placer::new(&v, &Spread, known, Some(&mut homes)).place(JobId(7)), Some(NodeId(1)));
        assert_eq!(homes.0, BTreeMap::from([(JobId(7), NodeId(1))]));
        // With equal shares a job would still run on node 1, so that the next one would go to node 0. It starts on
        // node 1, which is empty and has more to offer.
        assert_eq!(Placer::new(&v, &Spread, known, Some(&mut homes)).place(JobId(8)), Some(NodeId(1)));
        assert_eq!(homes.0[&JobId(8)], NodeId(0));
    }
}
