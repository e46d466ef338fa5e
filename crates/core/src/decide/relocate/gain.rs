//! Moves by gain: a node that has run empty takes the job whose move ends jobs soonest.
//!
//! **Problem.** Shares help only within a node. While one node has nothing to do, jobs queue up on another; but a move costs seconds, and a visitor
//! must not slow those down who come to the node later.
//!
//! **Approach.** Only nodes without jobs take one, so a move never hurts anybody who is there. On the node it leaves, jobs are served in order of the work left;
//! let `S` be the time until job `k` of `m` would end there, `l` its own part of it and `t` the time it would take on the empty node, the cost of moving
//! included. Moving it ends it `S − t` sooner and each of the `m − k` jobs behind it `l` sooner: the gain is the sum. The best move of all is made
//! if it gains several times what it costs and the job itself ends sooner. Its deadline stays what it was, so that it cannot push aside those who would have had
//! the node to themselves (`decide::fair`).
//!
//! **Properties** (tests): nobody moves to a node with jobs, nobody moves for less than it costs, and a job alone on its node moves only to a faster one.

use crate::decide::fair::Prediction;
use crate::model::{JobId, NodeId};
use crate::plan::{Move, MoveReason};
use crate::policy::GainMove;
use crate::view::{NodeView, View};
use std::collections::BTreeMap;

/// One job that could move.
struct Candidate {
    id: JobId,
    known: Prediction,
}

/// The moves to make. `known` tells what the share rule knows of a job.
pub(crate) fn run(rule: &GainMove, view: &View, known: impl Fn(JobId) -> Option<Prediction>) -> Vec<Move> {
    let mut crowds: BTreeMap<NodeId, Vec<Candidate>> = BTreeMap::new();
    let mut busy: BTreeMap<NodeId, usize> = BTreeMap::new();
    for job in &view.jobs {
        let Some(node) = job.node() else { continue };
        *busy.entry(node).or_default() += 1;
        if let Some(known) = known(job.id) {
            crowds.entry(node).or_default().push(Candidate { id: job.id, known });
        }
    }
    for crowd in crowds.values_mut() {
        crowd.sort_by(|a, b| a.known.left.total_cmp(&b.known.left).then(a.id.cmp(&b.id)));
    }
    let empty = |n: &&NodeView| !busy.contains_key(&n.id) && n.slots != Some(0);
    let mut moves = vec![];
    for to in view.nodes.iter().filter(empty) {
        let best = crowds
            .iter()
            .filter_map(|(from, crowd)| Some((*from, best_of(rule, view.node(*from)?, to, crowd)?)))
            .max_by(|a, b| a.1.1.total_cmp(&b.1.1).then(b.0.cmp(&a.0)));
        let Some((from, (place, _))) = best else { continue };
        let crowd = crowds.get_mut(&from).expect("the best move starts from one of the crowds");
        moves.push(Move { job: crowd.remove(place).id, to: to.id, why: MoveReason::Gain });
    }
    moves
}

/// The job of `crowd` whose move gains most, and how many seconds, if any is worth it.
fn best_of(rule: &GainMove, from: &NodeView, to: &NodeView, crowd: &[Candidate]) -> Option<(usize, f64)> {
    let cost_s = rule.cost.as_secs_f64();
    let mut here_s = 0.0;
    let gains = crowd.iter().enumerate().filter_map(|(k, c)| {
        here_s += c.known.left;
        let alone_s = here_s.max(c.known.left / c.known.most);
        let there_s = cost_s + seconds_on(&c.known, from, to);
        let behind = (crowd.len() - 1 - k) as f64;
        (there_s < alone_s).then_some((k, behind * c.known.left + alone_s - there_s))
    });
    gains.filter(|g| g.1 > rule.worth * cost_s).max_by(|a, b| a.1.total_cmp(&b.1))
}

/// How long the rest of a job takes alone on `to`.
fn seconds_on(job: &Prediction, from: &NodeView, to: &NodeView) -> f64 {
    let core_seconds = job.left * from.cores * from.speed;
    let cores = (job.most * from.cores).min(to.cores);
    // A job that could use all of a small node may use more of a larger one.
    let cores = if job.most >= 1.0 { to.cores } else { cores };
    core_seconds / (cores * to.speed).max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Span, Time};
    use crate::view::{JobView, Phase};

    fn world(nodes: &[f64], jobs: &[(u64, u32)]) -> View {
        let node = |(i, speed): (usize, &f64)| NodeView {
            id: NodeId(i as u32),
            cores: 4.0,
            speed: *speed,
            memory_bytes: 1 << 30,
            slots: None,
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
        let rule = GainMove { cost: Span::from_secs(5), worth: 3.0 };
        let known = |id: JobId| Some(Prediction { left: lefts[id.0 as usize], most: 1.0 });
        run(&rule, view, known).iter().map(|m| (m.job.0, m.to.0)).collect()
    }

    #[test]
    fn the_job_whose_move_ends_jobs_soonest_goes_to_the_empty_node() {
        let view = world(&[1.0, 1.0], &[(0, 0), (1, 0), (2, 0)]);
        // In order 10, 20, 90: moving the first would not end it sooner; moving the second ends it 10 − 5 sooner and the third 20 sooner, moving the
        // third ends it 30 − 5 sooner: a tie, which goes to the one that has been served least.
        assert_eq!(moves(&view, &[10.0, 90.0, 20.0]), [(1, 1)]);
        // Twice as fast a node ends the third of 10, 20 and 90 at 5 + 45, 70 sooner; the second would gain 15 + 20.
        assert_eq!(moves(&world(&[1.0, 2.0], &[(0, 0), (1, 0), (2, 0)]), &[10.0, 20.0, 90.0]), [(2, 1)]);
    }

    #[test]
    fn nobody_moves_to_a_node_with_jobs_or_for_less_than_it_costs() {
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
    fn several_empty_nodes_take_one_each() {
        let view = world(&[1.0, 1.0, 1.0], &[(0, 0), (1, 0), (2, 0)]);
        assert_eq!(moves(&view, &[100.0, 100.0, 100.0]).len(), 2);
    }
}
