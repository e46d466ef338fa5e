//! From what is remembered of the cluster to the core's view of it.
//!
//! **In doubt, nothing.** A node whose agent is silent is unknown: its jobs are left alone and no
//! job is sent there. A node that is cordoned, not ready or tainted keeps its jobs and gets no
//! others. A job between two nodes, and one whose order has not been carried out yet, counts where
//! it is going, so that two passes never give the same room away twice.

use super::clock::time;
use super::decide::Placements;
use super::memory::{JobMemory, ORDER_STANDS};
use super::snapshot::ClusterSnapshot;
use crate::state::orders::{JobFacts, JobState, Order, OrderKind};
use gainshare_core::model::{NodeId, Share, Span, Time};
use gainshare_core::view::{JobView, NodeView, Phase, View};
use std::collections::HashMap;

/// A job that is between two nodes for longer (suspended, for instance) takes no room any more.
const MOVING_COUNTS: Span = Span::from_secs(60);

impl Placements {
    /// The nodes and jobs of one policy, by their numbers.
    pub(super) fn view(&self, jobs: &[&JobMemory], snapshot: &ClusterSnapshot) -> View {
        let mut nodes: Vec<NodeView> = vec![];
        let heard = snapshot.nodes.iter().filter(|(_, node)| node.heard);
        let views: Vec<JobView> = jobs.iter().filter_map(|memory| self.job_view(memory, snapshot.now)).collect();
        let mut running: HashMap<NodeId, usize> = HashMap::new();
        for node in views.iter().filter_map(JobView::node) {
            *running.entry(node).or_default() += 1;
        }
        let mut settled: HashMap<NodeId, usize> = HashMap::new();
        for memory in jobs.iter().filter(|memory| matches!(memory.facts.state, JobState::Running { .. })) {
            if let Some((node, _)) = memory.node {
                *settled.entry(node).or_default() += 1;
            }
        }
        // Room is counted in jobs of the largest size among those that wait, or else among all, so
        // that it is not overestimated.
        let waiting = || jobs.iter().filter(|memory| memory.facts.state == JobState::Waiting);
        let largest = |of: fn(&JobFacts) -> u64| {
            let size = |memory: &&JobMemory| of(&memory.facts);
            waiting().map(size).max().unwrap_or_else(|| jobs.iter().map(size).max().unwrap_or(0))
        };
        let (milli, bytes) = (largest(|f| f.cpu_request_milli), largest(|f| f.memory_request_bytes));
        for (name, node) in heard {
            let Some(&id) = self.nodes.ids.get(name) else { continue };
            let here = running.get(&id).copied().unwrap_or(0);
            let fits = |free: u64, need: u64| free.checked_div(need).map_or(usize::MAX, |n| n as usize);
            let more = fits(node.free_milli, milli).min(fits(node.free_bytes, bytes));
            let slots = match (node.open, more) {
                (false, _) => Some(here),
                (true, usize::MAX) => None,
                // Jobs on their way here have not taken their part of the free resources yet.
                (true, more) => Some(settled.get(&id).copied().unwrap_or(0).saturating_add(more).max(here)),
            };
            let (cores, speed, memory_bytes) = (node.cores, node.speed, node.memory_bytes);
            nodes.push(NodeView { id, cores, speed, memory_bytes, slots, idle_node_s: None });
        }
        nodes.sort_by_key(|node| node.id);
        View { now: snapshot.now, nodes, jobs: views }
    }

    /// The job for the core; `None` if it takes no part in the decision.
    pub(super) fn job_view(&self, memory: &JobMemory, now: Time) -> Option<JobView> {
        if memory.is_left_out {
            return None;
        }
        let facts = &memory.facts;
        let mut pinned = facts.movable.is_err();
        let going = memory.order.as_ref().filter(|(_, at)| now.since(*at) <= ORDER_STANDS).map(|(order, _)| order);
        let on = |node: NodeId, since: Time, attempt: u32| {
            self.nodes.there(node)?.heard.then_some(Phase::Running { node, since, attempt })
        };
        let ordered_to = |order: &Order| self.nodes.ids.get(&order.node).copied();
        let here = memory.node.map(|(node, _)| node);
        let phase = match (&facts.state, going) {
            (JobState::Done, _) => return None,
            (JobState::Waiting, None) => Phase::Waiting,
            (JobState::Waiting, Some(order)) => {
                pinned = true;
                on(ordered_to(order)?, now, 1)?
            }
            (JobState::Running { node, epoch, since }, order) => {
                let moving = order.filter(|order| order.kind == OrderKind::Move && order.node != *node);
                pinned |= moving.is_some();
                on(moving.map_or(here, ordered_to)?, time(*since), *epoch)?
            }
            (JobState::Moving, _) => {
                pinned = true;
                let since = memory.moving_since.unwrap_or(now);
                if now.since(since) > MOVING_COUNTS {
                    return None;
                }
                on(memory.order.as_ref().map_or(here, |(order, _)| ordered_to(order))?, since, 2)?
            }
        };
        let all = memory.all();
        // What is known of its deadline is about the node on which it runs, not about the one to which it goes.
        let is_here = matches!(phase, Phase::Running { node, .. } if Some(node) == here);
        let is_settled = is_here && matches!(facts.state, JobState::Running { .. });
        Some(JobView {
            id: memory.id,
            owner: memory.owner,
            arrived: time(facts.arrived),
            phase,
            signal: all.signal,
            consumed_node_s: all.consumed_node_s,
            usable: all.usable,
            floor: Share::clamped(all.floor.unwrap_or(0.0)),
            pinned,
            marks: memory.marks,
            deadline: all.deadline,
            finish: all.finish.filter(|_| is_settled),
            ..JobView::default()
        })
    }
}
