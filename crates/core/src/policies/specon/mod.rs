//! SpeCon: jobs that have converged make room for those that still grow.
//!
//! **Source.** Y. Mao et al., "Speculative Container Scheduling for Deep Learning Applications in a
//! Kubernetes Cluster" (SpeCon), IEEE Systems Journal 2021, Algorithms 3, 4 and 5, as the thesis
//! prints them.
//!
//! **Terms.** Categories are SpeCon's PC, WC and CC (progressing, watching, converged), here
//! [`Category`]. `G(t_m) = |E(t_m) − E(t_{m−1})|`, relative to the first value. A job is *settled*
//! once Algorithm 4 has dealt with it ("migrated" in the paper, also when it stayed).
//!
//! **Algorithm 3**, every interval, for jobs not settled: `G` below both its predecessor and α
//! moves a job one category on; in CC it asks to be moved if more than one of its neighbours is in
//! PC or WC; `G > α` brings it back to PC; else it stays. **Algorithm 4** scores each node `2·|PC|
//! + 1.5·|WC| + |CC|`; the lowest score hosts the job, and if its own node is among the lowest it
//! stays; ties go to the node that uses least. **Algorithm 5**, once every job has converged or
//! settled: with `bf = ⌊jobs/nodes⌋`, idle nodes take jobs until they hold `bf`; without idle
//! nodes, those that hold fewer than `bf − 1` do. The job that settled last is taken first.
//!
//! **Where the paper is silent.** A first `G` counts as falling. A job that has not reported since
//! the last run keeps its category. Rebalancing takes jobs only from nodes that hold more than `bf`
//! and each job once: as printed, it could empty one node to fill another and back again. A node
//! whose slots are taken is no candidate. What was done with a job (its [`Marks`]) outlasts its
//! absence from the view; a driver that stores marks gives them back in the view. A job that has
//! been silent for ten runs does not block rebalancing. The listing can also be read as a request on
//! *entering* CC; here the request follows a further fall in CC.
//!
//! **Several owners.** The paper has one user. Where jobs have several owners, a report must give no owner more than
//! its part, so reports are read within one owner only. To Algorithms 3 and 4 the jobs of each owner are a cluster of
//! their own, which consists of the nodes on which that owner has jobs. Owners split each node equally, and an owner
//! whose job moves has other jobs on both nodes, so a move by a report changes no owner's part. Algorithm 5 reads no
//! reports then: it does not wait until all jobs have converged, and takes the newest job first.

use super::error::PolicyError;
use super::{Relocate, Share};
use crate::model::{JobId, NodeId, OwnerId, Span, Time};
use crate::plan::{Move, MoveReason, Plan};
use crate::signal::{Category, Normalisation};
use crate::sort::Key;
use crate::view::{Marks, View};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// The numbers of SpeCon's Algorithms 3, 4 and 5.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Specon {
    /// α: growth over one interval below it counts as slow.
    pub alpha: f64,
    pub interval: Span,
    /// What a progressing, a watching and a converged job count for in a node's score.
    pub weights: [f64; 3],
    /// Whether Algorithm 5 runs.
    pub rebalance: bool,
    pub normalisation: Normalisation,
}

impl Default for Specon {
    /// α = 0.01, every 30 s: the thesis's setting for all experiments with several models.
    fn default() -> Self {
        Specon {
            alpha: 0.01,
            interval: Span::from_secs(30),
            weights: [2.0, 1.5, 1.0],
            rebalance: true,
            normalisation: Normalisation::Relative,
        }
    }
}

impl Specon {
    pub(crate) fn validate(&self) -> Result<(), PolicyError> {
        let sound = self.alpha.is_finite() && self.alpha >= 0.0 && self.interval > Span::ZERO;
        if sound { Ok(()) } else { Err(PolicyError::Specon(self.alpha)) }
    }
}

/// The rule with its numbers and its memory.
pub(crate) struct Rule<'a> {
    pub(crate) numbers: &'a Specon,
    pub(crate) memory: &'a mut Memory,
}

impl Relocate for Rule<'_> {
    fn moves(&mut self, view: &View, _plan: &Plan, _share: &dyn Share) -> Vec<Move> {
        if self.is_due(view) { run(self.numbers, view, self.memory) } else { vec![] }
    }

    fn is_due(&self, view: &View) -> bool {
        let anyone = view.jobs.iter().any(|j| j.node().is_some());
        anyone && self.memory.due.is_none_or(|due| view.now >= due)
    }

    fn due(&self) -> Option<Time> {
        self.memory.due
    }

    fn category(&self, job: JobId) -> Option<Category> {
        self.memory.jobs.get(&job).map(|j| j.category)
    }
}

impl Memory {
    /// What was done with a job and is not done again.
    pub(crate) fn marks(&self, job: JobId) -> Marks {
        self.jobs.get(&job).map(SpeconJob::marks).unwrap_or_default()
    }
}

/// What the algorithms remember between two runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Memory {
    due: Option<Time>,
    ran: Option<Time>,
    jobs: BTreeMap<JobId, SpeconJob>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct SpeconJob {
    category: Category,
    reports: u64,
    value: Option<f64>,
    growth: Option<f64>,
    /// When it became converged, or when Algorithm 4 dealt with it.
    since: Option<Time>,
    settled: bool,
    rebalanced: bool,
    #[serde(default)]
    pinned: bool,
    /// Runs of the rule since its last report.
    #[serde(default)]
    quiet_runs: u32,
    /// Since when it has been out of view.
    #[serde(default)]
    absent_since: Option<Time>,
    /// CPU consumed at the last run, and the part of its node used since the one before.
    #[serde(rename = "consumed")]
    consumed_node_s: f64,
    used: f64,
}

impl SpeconJob {
    fn marks(&self) -> Marks {
        let settled = self.since.filter(|_| self.settled);
        Marks { settled, rebalanced: self.rebalanced, ..Marks::default() }
    }

    /// Takes in what the driver has stored. A job that was settled had converged.
    fn learn(&mut self, marks: Marks, now: Time) {
        if let Some(at) = marks.settled.filter(|_| !self.settled) {
            (self.settled, self.since, self.category) = (true, Some(at.min(now)), Category::Converged);
        }
        self.rebalanced |= marks.rebalanced;
    }
}

/// The marks of a job that is out of view are kept here for this long: longer than any move or outage.
const ABSENCE: Span = Span::from_secs(24 * 3600);

/// A job that was silent for this many runs does not hold Algorithm 5 up any more.
const QUIET_RUNS: u32 = 10;

/// Runs Algorithms 3, 4 and 5 once and returns the moves to make.
fn run(rule: &Specon, view: &View, memory: &mut Memory) -> Vec<Move> {
    memory.due = Some(view.now + rule.interval);
    // A job may be out of view for a while (a long move, a node agent that is silent) or without a
    // node. What it was marked with must outlast that; ids are never used again.
    memory.jobs.retain(|id, job| {
        let in_view = view.job(*id).is_some();
        job.absent_since = if in_view { None } else { Some(job.absent_since.unwrap_or(view.now)) };
        let kept = (job.settled || job.rebalanced) && job.absent_since.is_some_and(|t| view.now.since(t) < ABSENCE);
        in_view || kept
    });
    let interval = memory.ran.map_or(Span::ZERO, |t| view.now.since(t));
    memory.ran = Some(view.now);

    let mut cluster = Cluster::of(view);
    let mut asking: BTreeMap<OwnerId, Vec<(JobId, NodeId)>> = BTreeMap::new();
    for job in &view.jobs {
        let Some(node) = job.node() else { continue };
        cluster.place(job.id, job.owner, node);
        let known = memory.jobs.entry(job.id).or_default();
        let spent = (job.consumed_node_s.cpu - known.consumed_node_s).max(0.0);
        known.used = if interval == Span::ZERO { 0.0 } else { spent / interval.as_secs_f64() };
        known.consumed_node_s = job.consumed_node_s.cpu;
        known.pinned = job.pinned;
        known.learn(job.marks, view.now);
        known.quiet_runs = if job.signal.reports == known.reports { known.quiet_runs.saturating_add(1) } else { 0 };
        let Some(last) = job.signal.last else { continue };
        if known.settled || job.signal.reports == known.reports {
            continue;
        }
        let growth = known.value.map(|v| (last.value - v).abs() / job.signal.scale(rule.normalisation));
        (known.value, known.reports) = (Some(last.value), job.signal.reports);
        let Some(growth) = growth else { continue };
        if growth > rule.alpha {
            (known.category, known.since) = (Category::Growing, None);
        } else if growth < rule.alpha && known.growth.is_none_or(|before| growth < before) {
            match known.category {
                Category::Growing => known.category = Category::Watching,
                Category::Watching => {
                    known.category = Category::Converged;
                    known.since = Some(view.now);
                }
                Category::Converged if !job.pinned => asking.entry(job.owner).or_default().push((job.id, node)),
                Category::Converged => {}
            }
        }
        // Values far apart overflow; a memory that is written to a file and read again must stay
        // the same.
        known.growth = Some(growth).filter(|g| g.is_finite());
    }

    let mut moves = vec![];
    for (owner, jobs) in asking {
        answer(rule, owner, &jobs, &mut cluster, memory, &mut moves);
    }
    let at_rest = |j: &SpeconJob| j.settled || j.category == Category::Converged || j.quiet_runs >= QUIET_RUNS;
    let mut running = view.jobs.iter().filter(|j| j.node().is_some()).peekable();
    if rule.rebalance
        && moves.is_empty()
        && running.peek().is_some()
        && (!cluster.has_one_owner() || running.all(|j| memory.jobs.get(&j.id).is_some_and(at_rest)))
    {
        rebalance(&mut cluster, memory, &mut moves);
    }
    moves
}

/// Algorithm 4, for the jobs of one owner that ask to be moved, each with its node.
fn answer(
    rule: &Specon,
    owner: OwnerId,
    asking: &[(JobId, NodeId)],
    cluster: &mut Cluster,
    memory: &mut Memory,
    moves: &mut Vec<Move>,
) {
    let mut scores = Scores::new(rule, cluster, memory, owner);
    for &(id, host) in asking {
        let [progressing, watching, _] = scores.tallies[&host].counts;
        if progressing + watching <= 1 {
            continue;
        }
        let target = scores.best(host);
        let job = memory.jobs.get_mut(&id).expect("only known jobs ask");
        (job.settled, job.since) = (true, memory.ran);
        if target != host {
            cluster.move_job(id, host, target);
            scores.move_job(job, host, target);
            moves.push(Move { job: id, to: target, why: MoveReason::SlowGrowth });
        }
    }
}

/// Algorithm 5.
fn rebalance(cluster: &mut Cluster, memory: &mut Memory, moves: &mut Vec<Move>) {
    let total: usize = cluster.nodes.values().map(|n| n.jobs.len()).sum();
    let factor = total / cluster.nodes.len().max(1);
    let idle = cluster.nodes.values().any(|n| n.jobs.is_empty() && n.has_room());
    let enough = if idle { factor } else { factor.saturating_sub(1) };
    let takes = |n: &Node| if idle { n.jobs.is_empty() } else { n.jobs.len() < enough };
    let takers: Vec<NodeId> = cluster.nodes.iter().filter(|(_, n)| takes(n)).map(|(id, _)| *id).collect();
    if takers.is_empty() {
        return;
    }
    // The job that settled last goes first; where jobs have several owners, the newest job. Nodes only lose jobs here
    // until they hold no more than the factor. A job that was skipped once need not be checked again.
    let crowded = cluster.nodes.iter().filter(|(_, n)| n.jobs.len() > factor);
    let mut candidates: Vec<(NodeId, JobId)> = crowded
        .flat_map(|(id, n)| n.jobs.iter().map(|j| (*id, *j)))
        .filter(|(_, j)| !memory.jobs[j].rebalanced && !memory.jobs[j].pinned)
        .collect();
    if cluster.has_one_owner() {
        candidates.sort_by_key(|(_, j)| (Reverse(memory.jobs[j].since), *j));
    } else {
        candidates.sort_by_key(|(_, j)| Reverse(*j));
    }
    let mut candidates = candidates.into_iter();
    for taker in takers {
        while cluster.nodes[&taker].jobs.len() < enough && cluster.nodes[&taker].has_room() {
            let Some((from, job)) = candidates.find(|(from, _)| cluster.nodes[from].jobs.len() > factor) else {
                return;
            };
            cluster.move_job(job, from, taker);
            memory.jobs.get_mut(&job).expect("only known jobs are candidates").rebalanced = true;
            moves.push(Move { job, to: taker, why: MoveReason::Rebalance });
        }
    }
}

/// The jobs of each node, kept up to date while several jobs are moved in one go.
#[derive(Default)]
struct Cluster {
    nodes: BTreeMap<NodeId, Node>,
    owners: BTreeMap<JobId, OwnerId>,
}

#[derive(Debug, Clone, Default)]
struct Node {
    jobs: Vec<JobId>,
    /// Owners that had jobs here when the run began.
    owners: BTreeSet<OwnerId>,
    slots: Option<usize>,
}

impl Node {
    fn has_room(&self) -> bool {
        self.slots.is_none_or(|slots| self.jobs.len() < slots)
    }
}

impl Cluster {
    /// The nodes of a view, still without jobs.
    fn of(view: &View) -> Cluster {
        let nodes = view.nodes.iter().map(|n| (n.id, Node { slots: n.slots, ..Node::default() }));
        Cluster { nodes: nodes.collect(), owners: BTreeMap::new() }
    }

    fn place(&mut self, job: JobId, owner: OwnerId, node: NodeId) {
        let node = self.nodes.entry(node).or_default();
        node.jobs.push(job);
        node.owners.insert(owner);
        self.owners.insert(job, owner);
    }

    fn has_one_owner(&self) -> bool {
        let mut owners = self.owners.values();
        let first = owners.next();
        owners.all(|owner| Some(owner) == first)
    }

    fn move_job(&mut self, job: JobId, from: NodeId, to: NodeId) {
        self.nodes.entry(from).or_default().jobs.retain(|j| *j != job);
        self.nodes.entry(to).or_default().jobs.push(job);
    }
}

/// Scores by which Algorithm 4 ranks nodes for the jobs of one owner, kept sorted, so that thousands of requests on
/// thousands of nodes are answered in one go.
struct Scores<'a> {
    rule: &'a Specon,
    /// The owner's jobs on the nodes that may host them.
    tallies: BTreeMap<NodeId, Tally>,
    /// Nodes that have room, the best first.
    ranking: BTreeSet<Rank>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    /// Progressing, watching and converged jobs.
    counts: [usize; 3],
    used: f64,
    /// `None`: as many as come.
    free: Option<usize>,
}

/// Score, use and number.
type Rank = (Key, Key, NodeId);

impl<'a> Scores<'a> {
    fn new(rule: &'a Specon, cluster: &Cluster, memory: &Memory, owner: OwnerId) -> Scores<'a> {
        let one_owner = cluster.has_one_owner();
        let tally = |node: &Node| {
            let free = node.slots.map(|slots| slots.saturating_sub(node.jobs.len()));
            let mut tally = Tally { free, ..Tally::default() };
            for job in node.jobs.iter().filter(|id| cluster.owners[*id] == owner).map(|id| &memory.jobs[id]) {
                tally.counts[job.category as usize] += 1;
                tally.used += job.used;
            }
            tally
        };
        let open = cluster.nodes.iter().filter(|(_, node)| one_owner || node.owners.contains(&owner));
        let tallies = open.map(|(id, node)| (*id, tally(node))).collect();
        let mut scores = Scores { rule, tallies, ranking: BTreeSet::new() };
        let ranks = scores.tallies.iter().filter(|(_, t)| t.free != Some(0)).map(|(id, t)| scores.rank(*id, t));
        scores.ranking = ranks.collect();
        scores
    }

    fn rank(&self, node: NodeId, tally: &Tally) -> Rank {
        let score = self.rule.weights.iter().zip(tally.counts).map(|(weight, n)| weight * n as f64).sum();
        (Key(score), Key(tally.used), node)
    }

    /// Algorithm 4: the node with the lowest score; the host if it is among them, else the one that
    /// uses least.
    fn best(&self, host: NodeId) -> NodeId {
        let own = self.rank(host, &self.tallies[&host]);
        match self.ranking.first() {
            Some(best) if best.0 < own.0 => best.2,
            _ => host,
        }
    }

    fn move_job(&mut self, job: &SpeconJob, from: NodeId, to: NodeId) {
        for (node, comes) in [(from, false), (to, true)] {
            let mut tally = self.tallies[&node];
            self.ranking.remove(&self.rank(node, &tally));
            let count = &mut tally.counts[job.category as usize];
            if comes {
                *count += 1;
                tally.used += job.used;
                tally.free = tally.free.map(|free| free.saturating_sub(1));
            } else {
                *count -= 1;
                tally.used -= job.used;
                tally.free = tally.free.map(|free| free + 1);
            }
            if tally.free != Some(0) {
                self.ranking.insert(self.rank(node, &tally));
            }
            self.tallies.insert(node, tally);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::JobView;
    use Category::{Converged, Growing, Watching};

    /// A cluster whose workers hold jobs of these categories; ids are counted through.
    fn cluster(workers: &[&[Category]]) -> (Cluster, Memory) {
        let (mut cluster, mut memory) = (Cluster::default(), Memory::default());
        let mut id = 0;
        for (n, categories) in workers.iter().enumerate() {
            cluster.nodes.entry(NodeId(n as u32)).or_default();
            for category in *categories {
                memory.jobs.insert(
                    JobId(id),
                    SpeconJob { category: *category, since: Some(Time(id)), ..SpeconJob::default() },
                );
                cluster.place(JobId(id), OwnerId::default(), NodeId(n as u32));
                id += 1;
            }
        }
        (cluster, memory)
    }

    #[test]
    fn marks_outlast_a_job_s_absence_and_silence_does_not_block_for_ever() {
        let rule = Specon::default();
        let view = |s: u64, ids: &[u64]| View {
            now: Time::ZERO + Span::from_secs(s),
            nodes: vec![crate::fixtures::node(0), crate::fixtures::node(1)],
            jobs: ids.iter().map(|id| crate::fixtures::running(*id, 0)).collect(),
        };
        let mut memory = Memory::default();
        run(&rule, &view(30, &[1, 2, 3]), &mut memory);
        memory.jobs.get_mut(&JobId(1)).unwrap().settled = true;
        // Job 1 is out of view for 90 s, job 2 for good; only the mark is kept.
        for s in [60, 90, 120] {
            run(&rule, &view(s, &[3]), &mut memory);
        }
        run(&rule, &view(150, &[1, 3]), &mut memory);
        assert!(memory.jobs[&JobId(1)].settled && !memory.jobs.contains_key(&JobId(2)));
        run(&rule, &view(150 + 25 * 3600, &[3]), &mut memory);
        run(&rule, &view(150 + 50 * 3600, &[3]), &mut memory);
        assert!(!memory.jobs.contains_key(&JobId(1)));
        // Four silent jobs on one of two nodes: after ten runs the empty node takes its part.
        let mut memory = Memory::default();
        let moved: Vec<usize> = (1..=10).map(|n| run(&rule, &view(30 * n, &[1, 2, 3, 4]), &mut memory).len()).collect();
        assert_eq!((moved[..9].iter().sum::<usize>(), moved.iter().sum::<usize>()), (0, 2), "{moved:?}");
    }

    #[test]
    fn marks_of_the_view_are_not_made_again() {
        let view = |marks: &[(u64, Marks)]| View {
            now: Time::ZERO + Span::from_secs(30),
            nodes: vec![crate::fixtures::node(0), crate::fixtures::node(1)],
            jobs: (1..=4)
                .map(|id| {
                    let marks = marks.iter().find(|(marked, _)| *marked == id).map(|(_, marks)| *marks);
                    JobView { marks: marks.unwrap_or_default(), ..crate::fixtures::running(id, 0) }
                })
                .collect(),
        };
        let settled = |s: u64| Marks { settled: Some(Time::ZERO + Span::from_secs(s)), ..Marks::default() };
        let all = [(1, settled(9)), (2, settled(12)), (3, settled(11)), (4, settled(10))];
        let rule = Specon::default();
        let mut memory = Memory::default();
        let moves = run(&rule, &view(&all), &mut memory);
        // All are settled, so that the empty node takes its part, those that settled last first.
        assert_eq!(moves.iter().map(|m| m.job.0).collect::<Vec<_>>(), [2, 3]);
        assert!(all.iter().all(|(id, marks)| memory.marks(JobId(*id)).settled == marks.settled));
        assert!(memory.jobs.values().all(|job| job.category == Converged));
        assert!(memory.marks(JobId(2)).rebalanced && !memory.marks(JobId(1)).rebalanced);
        // The rule forgets everything; the driver does not.
        let rebalanced = all.map(|(id, marks)| (id, Marks { rebalanced: true, ..marks }));
        assert_eq!(run(&rule, &view(&rebalanced), &mut Memory::default()), []);
        // A mark from the future is one of now.
        let mut memory = Memory::default();
        run(&rule, &view(&[(1, settled(10_000))]), &mut memory);
        assert_eq!(memory.marks(JobId(1)).settled, Some(Time::ZERO + Span::from_secs(30)));
        assert!(memory.marks(JobId(2)).is_empty());
    }

    #[test]
    fn the_worked_example_of_algorithm_4() {
        // 3, 2, 2 and 6 active jobs with scores 6, 3.5, 4 and 11: Worker-2 is chosen.
        let (cluster, memory) = cluster(&[
            &[Growing, Growing, Growing],
            &[Growing, Watching],
            &[Growing, Growing],
            &[Growing, Growing, Growing, Growing, Growing, Converged],
        ]);
        assert_eq!(Scores::new(&Specon::default(), &cluster, &memory, OwnerId::default()).best(NodeId(3)), NodeId(1));
    }

    #[test]
    fn a_host_among_the_lowest_keeps_its_job_and_ties_go_to_the_least_used() {
        let (cluster, mut memory) = cluster(&[&[Growing], &[Growing], &[Converged, Converged], &[Growing, Growing]]);
        assert_eq!(Scores::new(&Specon::default(), &cluster, &memory, OwnerId::default()).best(NodeId(2)), NodeId(2));
        memory.jobs.get_mut(&JobId(0)).unwrap().used = 0.9;
        memory.jobs.get_mut(&JobId(2)).unwrap().used = 0.9;
        assert_eq!(Scores::new(&Specon::default(), &cluster, &memory, OwnerId::default()).best(NodeId(3)), NodeId(1));
    }

    #[test]
    fn an_idle_worker_takes_the_jobs_that_settled_last() {
        let (mut cluster, mut memory) = cluster(&[&[], &[Converged; 3], &[Converged; 3], &[Converged; 2]]);
        let mut moves = vec![];
        rebalance(&mut cluster, &mut memory, &mut moves);
        // Eight jobs on four nodes: two each. The newest on crowded nodes is job 5, then job 2.
        let moved: Vec<_> = moves.iter().map(|m| (m.job.0, m.to.0, m.why)).collect();
        assert_eq!(moved, [(5, 0, MoveReason::Rebalance), (2, 0, MoveReason::Rebalance)]);
        assert!(cluster.nodes.values().all(|node| node.jobs.len() == 2));
    }

    #[test]
    fn without_an_idle_worker_those_far_below_the_mean_take_one() {
        let (mut cluster, mut memory) = cluster(&[&[Converged], &[Converged; 5], &[Converged; 4], &[Converged; 3]]);
        let mut moves = vec![];
        rebalance(&mut cluster, &mut memory, &mut moves);
        // Thirteen on four: bf = 3; only the first holds fewer than two, and takes one from a node
        // that holds more than three.
        assert_eq!(moves.iter().map(|m| (m.job.0, m.to.0)).collect::<Vec<_>>(), [(9, 0)]);
    }

    #[test]
    fn an_even_cluster_is_left_alone() {
        for workers in [&[&[Converged][..], &[Converged], &[Converged]][..], &[&[], &[Converged], &[]]] {
            let (mut cluster, mut memory) = cluster(workers);
            let mut moves = vec![];
            rebalance(&mut cluster, &mut memory, &mut moves);
            assert_eq!(moves, []);
        }
    }
}
