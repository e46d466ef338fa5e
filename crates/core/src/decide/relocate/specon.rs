//! SpeCon: jobs that have converged make room for those that still grow.
//!
//! **Source.** Y. Mao et al., "Speculative Container Scheduling for Deep Learning Applications in a Kubernetes Cluster" (SpeCon), IEEE Systems
//! Journal 2021, Algorithms 3, 4 and 5, as the thesis prints them.
//!
//! **Terms.** Categories are SpeCon's PC, WC and CC (progressing, watching, converged), here [`Category`]. `G(t_m) = |E(t_m) − E(t_{m−1})|`, relative to the
//! first value. A job is *settled* once Algorithm 4 has dealt with it ("migrated" in the paper, also when it stayed).
//!
//! **Algorithm 3**, every interval, for jobs not settled: `G` below both its predecessor and α moves a job one category on; in CC it asks to be
//! moved if more than one of its neighbours is in PC or WC; `G > α` brings it back to PC; else it stays. **Algorithm 4** scores each node
//! `2·|PC| + 1.5·|WC| + |CC|`; the lowest score hosts the job, and if its own node is among the lowest it stays; ties go to the node that uses
//! least. **Algorithm 5**, once every job has converged or settled: with `bf = ⌊jobs/nodes⌋`, idle nodes take jobs until they hold `bf`; without idle nodes, those
//! that hold fewer than `bf − 1` do. The job that settled last is taken first.
//!
//! **Where the paper is silent.** A first `G` counts as falling. A job that has not reported since the last run keeps its category. Rebalancing takes
//! jobs only from nodes that hold more than `bf` and each job once: as printed, it could empty one node to fill another and back again.

use crate::model::{JobId, NodeId, Span, Time};
use crate::plan::{Move, MoveReason};
use crate::policy::Specon;
use crate::signal::Category;
use crate::view::View;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the manager and its workers remember between two runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Memory {
    pub(crate) due: Option<Time>,
    ran: Option<Time>,
    jobs: BTreeMap<JobId, Job>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct Job {
    category: Category,
    reports: u64,
    value: Option<f64>,
    growth: Option<f64>,
    /// When it became converged, or when Algorithm 4 dealt with it.
    since: Option<Time>,
    settled: bool,
    rebalanced: bool,
    /// CPU consumed at the last run, and the part of its node used since the one before.
    consumed: f64,
    used: f64,
}

/// Runs Algorithms 3, 4 and 5 once and returns the moves to make.
pub(crate) fn run(rule: &Specon, view: &View, memory: &mut Memory) -> Vec<Move> {
    memory.due = Some(view.now + rule.interval);
    memory.jobs.retain(|id, _| view.job(*id).is_some_and(|j| j.node().is_some()));
    let interval = memory.ran.map_or(Span::ZERO, |t| view.now.since(t));
    memory.ran = Some(view.now);

    let mut cluster = Cluster { nodes: view.nodes.iter().map(|n| (n.id, vec![])).collect() };
    let mut asking = vec![];
    for job in &view.jobs {
        let Some(node) = job.node() else { continue };
        cluster.nodes.entry(node).or_default().push(job.id);
        let known = memory.jobs.entry(job.id).or_default();
        let spent = (job.consumed.cpu - known.consumed).max(0.0);
        known.used = if interval == Span::ZERO { 0.0 } else { spent / interval.as_secs_f64() };
        known.consumed = job.consumed.cpu;
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
                    known.category = Category::Completing;
                    known.since = Some(view.now);
                }
                Category::Completing => asking.push((job.id, node)),
            }
        }
        known.growth = Some(growth);
    }

    let mut moves = vec![];
    for (id, host) in asking {
        let busy = cluster.count(host, memory, |c| c != Category::Completing);
        if busy <= 1 {
            continue;
        }
        let target = cluster.best(rule, host, memory);
        let job = memory.jobs.get_mut(&id).expect("only known jobs ask");
        (job.settled, job.since) = (true, Some(view.now));
        if target != host {
            cluster.move_job(id, host, target);
            moves.push(Move { job: id, to: target, why: MoveReason::SlowGrowth });
        }
    }
    let at_rest = |j: &Job| j.settled || j.category == Category::Completing;
    if rule.rebalance && moves.is_empty() && !memory.jobs.is_empty() && memory.jobs.values().all(at_rest) {
        rebalance(&mut cluster, memory, &mut moves);
    }
    moves
}

/// How soon a run is due, given that it never ran or ran last at the remembered moment.
pub(crate) fn due(memory: &Memory, view: &View) -> bool {
    let anyone = view.jobs.iter().any(|j| j.node().is_some());
    anyone && memory.due.is_none_or(|due| view.now >= due)
}

/// The category a job is in, if SpeCon knows it.
pub(crate) fn category(memory: &Memory, id: JobId) -> Option<Category> {
    memory.jobs.get(&id).map(|j| j.category)
}

/// Algorithm 5.
fn rebalance(cluster: &mut Cluster, memory: &mut Memory, moves: &mut Vec<Move>) {
    let total: usize = cluster.nodes.values().map(Vec::len).sum();
    let factor = total / cluster.nodes.len().max(1);
    let idle = cluster.nodes.values().any(Vec::is_empty);
    let enough = if idle { factor } else { factor.saturating_sub(1) };
    let room = |jobs: &Vec<JobId>| if idle { jobs.is_empty() } else { jobs.len() < enough };
    let takers: Vec<NodeId> = cluster.nodes.iter().filter(|(_, j)| room(j)).map(|(n, _)| *n).collect();
    for taker in takers {
        while cluster.nodes[&taker].len() < enough {
            let crowded = cluster.nodes.iter().filter(|(_, jobs)| jobs.len() > factor);
            let candidates = crowded.flat_map(|(n, jobs)| jobs.iter().map(|j| (*n, *j)));
            let newest = candidates
                .filter(|(_, j)| !memory.jobs[j].rebalanced)
                .max_by_key(|(_, j)| (memory.jobs[j].since, std::cmp::Reverse(*j)));
            let Some((from, job)) = newest else { break };
            cluster.move_job(job, from, taker);
            memory.jobs.get_mut(&job).expect("only known jobs are candidates").rebalanced = true;
            moves.push(Move { job, to: taker, why: MoveReason::Rebalance });
        }
    }
}

/// Who is where, kept up to date while several jobs are moved in one go.
struct Cluster {
    nodes: BTreeMap<NodeId, Vec<JobId>>,
}

impl Cluster {
    fn count(&self, node: NodeId, memory: &Memory, which: impl Fn(Category) -> bool) -> usize {
        self.nodes[&node].iter().filter(|j| which(memory.jobs[j].category)).count()
    }

    /// Algorithm 4: the node with the lowest score; the host if it is among them, else the one that uses least.
    fn best(&self, rule: &Specon, host: NodeId, memory: &Memory) -> NodeId {
        let score = |node: NodeId| {
            let n = |category| self.count(node, memory, |c| c == category) as f64;
            let [progressing, watching, converged] = rule.weights;
            progressing * n(Category::Growing) + watching * n(Category::Watching) + converged * n(Category::Completing)
        };
        let use_of = |node: NodeId| self.nodes[&node].iter().map(|j| memory.jobs[j].used).sum::<f64>();
        let nodes = self.nodes.keys().copied().map(|n| (score(n), n != host, use_of(n), n));
        let best =
            nodes.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.total_cmp(&b.2)).then(a.3.cmp(&b.3)));
        best.map_or(host, |b| b.3)
    }

    fn move_job(&mut self, job: JobId, from: NodeId, to: NodeId) {
        self.nodes.entry(from).or_default().retain(|j| *j != job);
        self.nodes.entry(to).or_default().push(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Category::{Completing, Growing, Watching};

    /// A cluster whose workers hold jobs of these categories; ids are counted through.
    fn cluster(workers: &[&[Category]]) -> (Cluster, Memory) {
        let (mut cluster, mut memory) = (Cluster { nodes: BTreeMap::new() }, Memory::default());
        let mut id = 0;
        for (n, categories) in workers.iter().enumerate() {
            let jobs = cluster.nodes.entry(NodeId(n as u32)).or_default();
            for category in *categories {
                memory.jobs.insert(JobId(id), Job { category: *category, since: Some(Time(id)), ..Job::default() });
                jobs.push(JobId(id));
                id += 1;
            }
        }
        (cluster, memory)
    }

    #[test]
    fn the_worked_example_of_algorithm_4() {
        // 3, 2, 2 and 6 active jobs with scores 6, 3.5, 4 and 11: Worker-2 is chosen.
        let (cluster, memory) = cluster(&[
            &[Growing, Growing, Growing],
            &[Growing, Watching],
            &[Growing, Growing],
            &[Growing, Growing, Growing, Growing, Growing, Completing],
        ]);
        assert_eq!(cluster.best(&Specon::default(), NodeId(3), &memory), NodeId(1));
    }

    #[test]
    fn a_host_among_the_lowest_keeps_its_job_and_ties_go_to_the_least_used() {
        let (cluster, mut memory) = cluster(&[&[Growing], &[Growing], &[Completing, Completing], &[Growing, Growing]]);
        assert_eq!(cluster.best(&Specon::default(), NodeId(2), &memory), NodeId(2));
        memory.jobs.get_mut(&JobId(0)).unwrap().used = 0.9;
        memory.jobs.get_mut(&JobId(2)).unwrap().used = 0.9;
        assert_eq!(cluster.best(&Specon::default(), NodeId(3), &memory), NodeId(1));
    }

    #[test]
    fn an_idle_worker_takes_the_jobs_that_settled_last() {
        let (mut cluster, mut memory) = cluster(&[&[], &[Completing; 3], &[Completing; 3], &[Completing; 2]]);
        let mut moves = vec![];
        rebalance(&mut cluster, &mut memory, &mut moves);
        // Eight jobs on four nodes: two each. The newest on crowded nodes is job 5, then job 2.
        let moved: Vec<_> = moves.iter().map(|m| (m.job.0, m.to.0, m.why)).collect();
        assert_eq!(moved, [(5, 0, MoveReason::Rebalance), (2, 0, MoveReason::Rebalance)]);
        assert!(cluster.nodes.values().all(|jobs| jobs.len() == 2));
    }

    #[test]
    fn without_an_idle_worker_those_far_below_the_mean_take_one() {
        let (mut cluster, mut memory) = cluster(&[&[Completing], &[Completing; 5], &[Completing; 4], &[Completing; 3]]);
        let mut moves = vec![];
        rebalance(&mut cluster, &mut memory, &mut moves);
        // Thirteen on four: bf = 3; only the first holds fewer than two, and takes one from a node that holds more than three.
        assert_eq!(moves.iter().map(|m| (m.job.0, m.to.0)).collect::<Vec<_>>(), [(9, 0)]);
    }

    #[test]
    fn an_even_cluster_is_left_alone() {
        for workers in [&[&[Completing][..], &[Completing], &[Completing]][..], &[&[], &[Completing], &[]]] {
            let (mut cluster, mut memory) = cluster(workers);
            let mut moves = vec![];
            rebalance(&mut cluster, &mut memory, &mut moves);
            assert_eq!(moves, []);
        }
    }
}
