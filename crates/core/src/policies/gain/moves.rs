//! Moves by gain: an empty node takes the job whose move ends jobs soonest, and visitors go home
//! before they make a job late.
//!
//! **Problem.** Shares help only within a node. While one node has nothing to do, jobs queue up on
//! another. But a move costs seconds, and a visitor must not slow down the jobs that come to the
//! node later.
//!
//! **Approach.** *To an empty node.* Only nodes without jobs take one, so such a move hurts no job
//! there. On the node it leaves, jobs are served in order of the work left. Let `S` be the time
//! until job `k` of `m` would end there, `l` its own part of it, and `t` the time it would take on
//! the empty node, the cost of moving included. Moving it ends it `S − t` sooner and each of the `m
//! − k` jobs behind it `l` sooner: the gain is the sum. The best move of all is made if it gains
//! several times what it costs and the job itself ends sooner. Each further move of the same job must
//! gain as much again as the first one.
//!
//! *Home.* Every job has a home, the node on which the fair world has it (`gain::world`). There it
//! can always be kept from being late: its share of that node was promised to no other job. A job
//! elsewhere is a *visitor*. It goes home where, served in order of deadline, residents would end
//! late and less so without it, or where it would itself end late and sooner at home. Whether a job
//! would be late is judged by the same work left from which its deadline was computed: that of a job
//! that ends early. What the visitor loses by the move is taken off what residents gain. A visitor
//! with less work left than a move takes stays: it is done before it could arrive.
//!
//! **Properties** (tests): no job moves to a node with jobs except home; no job moves for less than
//! it costs, and a job that has moved only for more; a job alone on its node moves only to a faster
//! one; a job that has just moved stays for a while.

use super::super::{JobOutlook, Prediction, Relocate, Share};
use super::numbers::GainMove;
use crate::model::{JobId, NodeId};
use crate::plan::{Move, MoveReason, Plan};
use crate::view::{NodeView, Phase, View};
use std::collections::BTreeMap;

/// The rule with its numbers. What it knows of jobs comes from the share rule.
pub(crate) struct MoveRule<'a> {
    pub(crate) numbers: &'a GainMove,
}

impl Relocate for MoveRule<'_> {
    fn moves(&mut self, view: &View, plan: &Plan, share: &dyn Share) -> Vec<Move> {
        // An empty node that a waiting job is about to get is not empty.
        if plan.starts.is_empty() && view.nodes.len() > 1 {
            run(self.numbers, view, |id| share.outlook(id))
        } else {
            vec![]
        }
    }
}

/// One job that could move.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: JobId,
    known: Prediction,
    promised_left_s: f64,
    home: NodeId,
    deadline_s: f64,
    /// Whether it has been where it is for long enough to move again.
    settled: bool,
    /// What a move of this job must gain, in seconds.
    worth_s: f64,
}

/// The job of each node, by its place in the crowd, whose move would gain most, and how many
/// seconds.
type BestMoves = BTreeMap<NodeId, (usize, f64)>;

/// The moves to make. `outlook` tells what the share rule knows of a job.
fn run(rule: &GainMove, view: &View, outlook: impl Fn(JobId) -> Option<JobOutlook>) -> Vec<Move> {
    let mut crowds: BTreeMap<NodeId, Vec<Candidate>> = BTreeMap::new();
    let mut busy: BTreeMap<NodeId, usize> = BTreeMap::new();
    for job in &view.jobs {
        let Phase::Running { node, since, attempt } = job.phase else { continue };
        *busy.entry(node).or_default() += 1;
        if let Some(JobOutlook { prediction: known, promised_left_s, home, deadline_s }) = outlook(job.id) {
            // A job that has just moved is being restored, and its move must first have been worth
            // its cost.
            let first_worth_s = rule.worth * rule.cost.as_secs_f64();
            let stayed_s = view.now.since(since).as_secs_f64();
            // A job that was moved for its deadline makes it where it is now.
            let may_move = !job.pinned && job.marks.for_deadline.is_none();
            let settled = may_move && (attempt <= 1 || stayed_s >= first_worth_s);
            // Each further move must gain as much again, so that a job does not go back and forth.
            let worth_s = first_worth_s * f64::from(attempt.max(1));
            // The share rule serves jobs that are late already in order of the work left.
            let deadline_s = deadline_s.max(0.0);
            let candidate = Candidate { id: job.id, known, promised_left_s, home, deadline_s, settled, worth_s };
            crowds.entry(node).or_default().push(candidate);
        }
    }
    for crowd in crowds.values_mut() {
        let left = |a: &Candidate, b: &Candidate| a.promised_left_s.total_cmp(&b.promised_left_s);
        crowd.sort_by(|a, b| a.deadline_s.total_cmp(&b.deadline_s).then(left(a, b)).then(a.id.cmp(&b.id)));
    }
    let mut moves = send_home(rule, view, &mut crowds, &mut busy);
    for crowd in crowds.values_mut() {
        crowd.sort_by(|a, b| a.known.left_s.total_cmp(&b.known.left_s).then(a.id.cmp(&b.id)));
    }
    let empty = |n: &&NodeView| !busy.contains_key(&n.id) && n.slots != Some(0);
    // Nodes of one kind have the same best moves, which change only where a job has left.
    let mut kinds: BTreeMap<(u64, u64), (&NodeView, BestMoves)> = BTreeMap::new();
    for to in view.nodes.iter().filter(empty) {
        let best_from = |from: NodeId, to: &NodeView, crowd: &[Candidate]| best_of(rule, view.node(from)?, to, crowd);
        let (_, bests) = kinds.entry((to.cores.to_bits(), to.speed.to_bits())).or_insert_with(|| {
            let bests = crowds.iter().filter_map(|(from, crowd)| Some((*from, best_from(*from, to, crowd)?)));
            (to, bests.collect())
        });
        let best = bests.iter().max_by(|a, b| a.1.1.total_cmp(&b.1.1).then(b.0.cmp(a.0)));
        let Some((&from, &(place, _))) = best else { continue };
        let crowd = crowds.get_mut(&from).expect("the best move starts from one of the crowds");
        moves.push(Move { job: crowd.remove(place).id, to: to.id, why: MoveReason::Gain });
        for (like, bests) in kinds.values_mut() {
            bests.remove(&from);
            bests.extend(best_from(from, like, crowd).map(|best| (from, best)));
        }
    }
    moves
}

/// Sends visitors home: where they, or those they visit, would else end later than in the fair
/// world. One from each node at a time.
fn send_home(
    rule: &GainMove,
    view: &View,
    crowds: &mut BTreeMap<NodeId, Vec<Candidate>>,
    busy: &mut BTreeMap<NodeId, usize>,
) -> Vec<Move> {
    let cost_s = rule.cost.as_secs_f64();
    let mut moves = vec![];
    let nodes: Vec<NodeId> = crowds.keys().copied().collect();
    for from in nodes {
        let (Some(here), crowd) = (view.node(from), &crowds[&from]) else { continue };
        let late_s = late_residents_s(crowd, from);
        let may_leave = |c: &Candidate| c.home != from && c.settled && c.known.left_s > cost_s;
        let visitors = crowd.iter().enumerate().filter(|(_, c)| may_leave(c));
        let gains = visitors.filter_map(|(place, visitor)| {
            let to = view.node(visitor.home).filter(|n| has_room(n, busy))?;
            // What the residents of this node are spared, and what the visitor itself gains.
            let mut rest = crowd.clone();
            rest.remove(place);
            let spared_s = late_s - late_residents_s(&rest, from);
            let at_home = crowds.get(&to.id).map_or(&[][..], |c| c.as_slice());
            let first = at_home.partition_point(|c| c.deadline_s <= visitor.deadline_s);
            let before_s: f64 = at_home[..first].iter().map(|c| c.promised_left_s).sum();
            let promised = Prediction { left_s: visitor.promised_left_s, ..visitor.known };
            let there_s = cost_s + before_s + seconds_on(&promised, here, to);
            let here_s: f64 = crowd[..=place].iter().map(|c| c.promised_left_s).sum();
            let sooner_s = here_s - there_s;
            let own_s = if here_s > visitor.deadline_s { sooner_s } else { 0.0 };
            let gain_s = (spared_s + sooner_s.min(0.0)).max(own_s);
            (gain_s > visitor.worth_s).then_some((place, to.id, gain_s))
        });
        let best = gains.max_by(|a, b| a.2.total_cmp(&b.2).then(b.0.cmp(&a.0)));
        let Some((place, to, _)) = best else { continue };
        let gone = crowds.get_mut(&from).expect("it is one of the keys").remove(place);
        // It still takes its place on the node it leaves, until it has left.
        *busy.entry(to).or_default() += 1;
        moves.push(Move { job: gone.id, to, why: MoveReason::Owed });
    }
    moves
}

/// By how much the residents of `node` end later than in the fair world, in all, if `crowd` is
/// served in order of deadline.
fn late_residents_s(crowd: &[Candidate], node: NodeId) -> f64 {
    let mut ends_s = 0.0;
    let late = crowd.iter().map(|c| {
        ends_s += c.promised_left_s;
        if c.home == node { (ends_s - c.deadline_s).max(0.0) } else { 0.0 }
    });
    late.sum()
}

/// Whether `node` has a slot left beside the jobs that run there or are about to come.
fn has_room(node: &NodeView, busy: &BTreeMap<NodeId, usize>) -> bool {
    node.slots.is_none_or(|slots| busy.get(&node.id).copied().unwrap_or(0) < slots)
}

/// The job of `crowd` whose move gains most, and how many seconds, if any is worth it.
fn best_of(rule: &GainMove, from: &NodeView, to: &NodeView, crowd: &[Candidate]) -> Option<(usize, f64)> {
    let cost_s = rule.cost.as_secs_f64();
    let mut here_s = 0.0;
    let gains = crowd.iter().enumerate().filter_map(|(k, c)| {
        here_s += c.known.left_s;
        let alone_s = here_s.max(c.known.left_s / c.known.usable);
        let there_s = cost_s + seconds_on(&c.known, from, to);
        let behind = (crowd.len() - 1 - k) as f64;
        (c.settled && there_s < alone_s).then_some((k, behind * c.known.left_s + alone_s - there_s))
    });
    gains.filter(|g| g.1 > crowd[g.0].worth_s).max_by(|a, b| a.1.total_cmp(&b.1))
}

/// How long the rest of a job takes alone on `to`.
fn seconds_on(job: &Prediction, from: &NodeView, to: &NodeView) -> f64 {
    let core_seconds = job.left_s * from.cores * from.speed;
    let cores = (job.usable * from.cores).min(to.cores);
    // A job that could use all of a small node may use more of a larger one.
    let cores = if job.usable >= 1.0 { to.cores } else { cores };
    core_seconds / (cores * to.speed).max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Span, Time};
    use crate::view::JobView;

    fn world(nodes: &[f64], jobs: &[(u64, u32)]) -> View {
        let node = |(i, speed): (usize, &f64)| NodeView {
            id: NodeId(i as u32),
            cores: 4.0,
            speed: *speed,
            memory_bytes: 1 << 30,
            slots: None,
            idle_node_s: None,
        };
        let job = |&(id, node): &(u64, u32)| JobView {
            id: JobId(id),
            phase: Phase::Running { node: NodeId(node), since: Time::ZERO, attempt: 1 },
            ..JobView::default()
        };
        View {
            now: Time::ZERO,
            nodes: nodes.iter().enumerate().map(node).collect(),
            jobs: jobs.iter().map(job).collect(),
        }
    }

    fn moves(view: &View, lefts: &[f64]) -> Vec<(u64, u32)> {
        let outlooks: Vec<_> = lefts.iter().map(|left| (*left, 0, f64::INFINITY)).collect();
        moves_of(view, &outlooks)
    }

    /// With (work left, home, deadline) of each job.
    fn moves_of(view: &View, outlooks: &[(f64, u32, f64)]) -> Vec<(u64, u32)> {
        let rule = GainMove { cost: Span::from_secs(5), worth: 3.0 };
        let outlook = |id: JobId| {
            let (left_s, home, deadline_s) = outlooks[id.0 as usize];
            let prediction = Prediction { left_s, usable: 1.0 };
            Some(JobOutlook { prediction, promised_left_s: left_s, home: NodeId(home), deadline_s })
        };
        run(&rule, view, outlook).iter().map(|m| (m.job.0, m.to.0)).collect()
    }

    /// Starts a job of `view` for the third time, long ago: it has moved twice.
    fn moved_twice(view: &mut View, job: usize) {
        view.now = Time::from_secs_f64(1000.0);
        let node = view.jobs[job].node().unwrap();
        view.jobs[job].phase = Phase::Running { node, since: Time::ZERO, attempt: 3 };
    }

    #[test]
    fn the_job_whose_move_ends_jobs_soonest_goes_to_the_empty_node() {
        let view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 0)]);
        // In order 10, 20, 90: moving the first would not end it sooner; moving the second ends it
        // 10 − 5 sooner and the third 20 sooner, moving the third ends it 30 − 5 sooner: a tie,
        // which goes to the one that has been served least.
        assert_eq!(moves(&view, &[10.0, 90.0, 20.0]), [(1, 1)]);
        // Twice as fast a node ends the third of 10, 20 and 90 at 5 + 45, 70 sooner; the second
        // would gain 15 + 20.
        assert_eq!(moves(&world(&[1.0, 2.0], &[(0, 0), (1, 0), (2, 0)]), &[10.0, 20.0, 90.0]), [(2, 1)]);
    }

    #[test]
    fn no_job_moves_to_a_node_with_jobs_or_for_less_than_it_costs() {
        assert_eq!(moves(&world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 1)]), &[50.0, 50.0, 1.0]), []);
        // The gain is the first job's 19 s less 5 s of moving: not three times 5.
        assert_eq!(moves(&world(&[1.0, 1.0], &[(0, 0), (1, 0)]), &[19.0, 60.0]), []);
        assert_eq!(moves(&world(&[1.0, 1.0], &[(0, 0), (1, 0)]), &[21.0, 60.0]), [(1, 1)]);
    }

    #[test]
    fn a_job_alone_moves_only_to_a_faster_node() {
        assert_eq!(moves(&world(&[1.0, 1.0], &[(0, 0)]), &[1000.0]), []);
        assert_eq!(moves(&world(&[1.0, 2.0], &[(0, 0)]), &[1000.0]), [(0, 1)]);
    }

    #[test]
    fn a_visitor_in_the_way_goes_home_and_residents_stay() {
        // Node 0: a visitor (home 1) and a resident, which the visitor makes 40 s late if it is due
        // first. Node 1 is busy, so that no job moves for gain.
        let view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 1)]);
        assert_eq!(moves_of(&view, &[(40.0, 1, 95.0), (50.0, 0, 50.0), (9.0, 1, 99.0)]), []);
        assert_eq!(moves_of(&view, &[(40.0, 1, 45.0), (50.0, 0, 50.0), (9.0, 1, 99.0)]), [(0, 1)]);
        // Both live there: they have to get along.
        assert_eq!(moves_of(&view, &[(40.0, 0, 45.0), (50.0, 0, 50.0), (9.0, 1, 99.0)]), []);
    }

    #[test]
    fn a_visitor_that_is_late_goes_home_if_that_is_sooner() {
        let view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 1)]);
        // It would end at 90 and is due at 60; at home after 5 + 40, unless the one there is due
        // before it.
        assert_eq!(moves_of(&view, &[(40.0, 1, 60.0), (50.0, 0, 50.0), (60.0, 1, 99.0)]), [(0, 1)]);
        assert_eq!(moves_of(&view, &[(40.0, 1, 60.0), (50.0, 0, 50.0), (60.0, 1, 55.0)]), []);
    }

    #[test]
    fn a_visitor_that_ends_sooner_than_it_moves_stays() {
        // The visitor delays six residents by its 4 s each, which is far more than a move costs. But it is done after
        // 4 s, and a move takes 5.
        let view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 1)]);
        let residents: Vec<_> = (1..=6).map(|k| (10.0, 0, 10.0 * f64::from(k))).collect();
        let with_visitor = |left_s| [&[(left_s, 1, 4.0)][..], &residents, &[(9.0, 1, 99.0)]].concat();
        assert_eq!(moves_of(&view, &with_visitor(4.0)), []);
        assert_eq!(moves_of(&view, &with_visitor(6.0)), [(0, 1)]);
    }

    #[test]
    fn what_a_visitor_loses_counts_against_its_move() {
        // The visitor makes one resident 24 s late. At home two jobs are due before it: it would end
        // 5 + 60 s later than here.
        let view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 1), (3, 1)]);
        assert_eq!(moves_of(&view, &[(24.0, 1, 40.0), (50.0, 0, 50.0), (30.0, 1, 10.0), (30.0, 1, 20.0)]), []);
        assert_eq!(moves_of(&view, &[(24.0, 1, 40.0), (50.0, 0, 50.0), (0.5, 1, 10.0), (0.5, 1, 20.0)]), [(0, 1)]);
    }

    #[test]
    fn a_job_that_has_just_moved_stays_for_a_while() {
        let mut view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 1)]);
        view.now = Time::from_secs_f64(20.0);
        let moved_at = |view: &mut View, s: f64| {
            view.jobs[0].phase = Phase::Running { node: NodeId(0), since: Time::from_secs_f64(s), attempt: 2 };
        };
        let outlooks = [(40.0, 1, 45.0), (50.0, 0, 50.0), (9.0, 1, 99.0)];
        moved_at(&mut view, 10.0);
        assert_eq!(moves_of(&view, &outlooks), []);
        moved_at(&mut view, 5.0);
        assert_eq!(moves_of(&view, &outlooks), [(0, 1)]);
    }

    #[test]
    fn each_further_move_of_a_job_must_gain_more() {
        // To an empty node: the third move must gain 45 s. It would gain 40 s, and then 60 s.
        let mut view = world(&[1.0, 1.0], &[(0, 0), (1, 0)]);
        moved_twice(&mut view, 1);
        assert_eq!(moves(&view, &[45.0, 60.0]), []);
        assert_eq!(moves(&view, &[65.0, 70.0]), [(1, 1)]);
        // Home: the resident is spared 40 s, of which the visitor loses 5.
        let mut view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 1)]);
        moved_twice(&mut view, 0);
        assert_eq!(moves_of(&view, &[(40.0, 1, 45.0), (50.0, 0, 50.0), (9.0, 1, 99.0)]), []);
        assert_eq!(moves_of(&view, &[(60.0, 1, 45.0), (50.0, 0, 50.0), (9.0, 1, 99.0)]), [(0, 1)]);
    }

    #[test]
    fn a_job_is_late_only_if_it_would_be_late_when_it_ends_early() {
        // The resident has 80 s left in the mean, but the promise to it is for a job that ends after 20 s. Behind the
        // visitor's 40 s it ends after 60 s.
        let view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 1)]);
        let outlooks = |deadline_s| {
            let of = |left_s, promised_left_s, home, deadline_s| {
                let prediction = Prediction { left_s, usable: 1.0 };
                JobOutlook { prediction, promised_left_s, home: NodeId(home), deadline_s }
            };
            [of(40.0, 40.0, 1, 10.0), of(80.0, 20.0, 0, deadline_s), of(9.0, 9.0, 1, 99.0)]
        };
        let rule = GainMove { cost: Span::from_secs(5), worth: 3.0 };
        let moves = |deadline_s| run(&rule, &view, |id| Some(outlooks(deadline_s)[id.0 as usize])).len();
        assert_eq!(moves(60.0), 0);
        assert_eq!(moves(30.0), 1, "30 s late, of which the visitor would lose 5");
    }

    #[test]
    fn several_empty_nodes_take_one_each() {
        let view = world(&[1.0, 1.0, 1.0], &[(0, 0), (1, 0), (2, 0)]);
        assert_eq!(moves(&view, &[100.0, 100.0, 100.0]).len(), 2);
    }
}
