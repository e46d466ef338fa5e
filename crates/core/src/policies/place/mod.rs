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
        let home = equal.choose(job);
        let node = home.and_then(|home| self.room.welcome(home)).or_else(|| self.room.choose(job))?;
        homes.settle(job, home.unwrap_or(node));
        Some(node)
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
        let first = *self.ranking.first()?;
        let tie = |place: usize| self.rule.tie(job, self.view.nodes[place].id);
        let place = match tie(first.1) {
            None => first.1,
            Some(_) => {
                let ties = self.ranking.iter().take_while(|(key, _)| *key == first.0).map(|(_, place)| *place);
                ties.max_by_key(|&place| tie(place))?
            }
        };
        Some(self.take(place))
    }

    /// Takes a slot for a job that belongs on `home`: there, or on an empty node that has more to
    /// offer; nowhere if none has a slot.
    fn welcome(&mut self, home: NodeId) -> Option<NodeId> {
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

#[cfg(test)]
mod tests {
    use super::spread::Spread;
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
        let welcome = |jobs: &[(u64, u32)], home: u32| {
            let v = view(v.nodes.clone(), jobs);
            Room::new(&v, &Spread, |_| (Category::Growing, None)).welcome(NodeId(home))
        };
        assert_eq!(welcome(&[], 1), Some(NodeId(1)));
        assert_eq!(welcome(&[(1, 0)], 0), Some(NodeId(1)));
        // Half of a large node is more than a small one, a seventh of it is not.
        assert_eq!(welcome(&[(1, 0), (2, 1)], 0), Some(NodeId(0)));
        assert_eq!(welcome(&[(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)], 0), Some(NodeId(2)));
        // A busy node that is not its home is no choice.
        assert_eq!(welcome(&[(1, 0), (2, 0), (3, 1), (4, 2)], 0), Some(NodeId(0)));
    }
}
