//! `fifo`: higher priority first, then first come, first served. `requests`: the same, and a job
//! starts only if what it requests is free.
//!
//! A job that depends on another one steps aside until that one has ended; it keeps its place in
//! the queue.

use super::plain::OrderRule;
use super::{Order, Queue};
use crate::model::NodeId;
use crate::view::{JobView, Phase, View};
use std::cmp::Reverse;

pub(crate) const FIFO: OrderRule = OrderRule::new("fifo", || Box::new(Fifo));
pub(crate) const REQUESTS: OrderRule = OrderRule::new("requests", || Box::new(Requests));

/// The rule has no numbers and no memory.
pub(crate) struct Fifo;

impl Order for Fifo {
    fn queue<'v>(&self, view: &'v View) -> Queue<'v> {
        let waiting = || view.jobs.iter().filter(|j| j.phase == Phase::Waiting);
        let mut ready: Vec<_> = waiting().filter(|j| j.waits_for.is_empty()).collect();
        ready.sort_by_key(|j| (Reverse(j.priority), j.arrived, j.id));
        let blocked = waiting().filter_map(|j| j.waits_for.first().map(|&other| (j, other))).collect();
        Queue { ready, blocked, too_large: vec![] }
    }
}

/// As a cluster's default scheduler does: every job reserves what its owner requested (its floor), and
/// waits until that much of a node is free. Jobs behind it that fit go first.
struct Requests;

/// Rounding of a sum of requests.
const ROUNDING: f64 = 1e-9;

impl Order for Requests {
    fn queue<'v>(&self, view: &'v View) -> Queue<'v> {
        let Queue { ready, blocked, .. } = Fifo.queue(view);
        let on = |node: NodeId| view.jobs.iter().filter(move |j| j.node() == Some(node));
        let reserved = |node: NodeId| on(node).map(|j| j.floor.get()).sum::<f64>();
        let mut free: Vec<f64> = view.nodes.iter().map(|n| 1.0 - reserved(n.id) + ROUNDING).collect();
        let mut fits = |job: &&JobView| {
            let room = free.iter_mut().find(|f| **f >= job.floor.get());
            room.is_some_and(|f| {
                *f -= job.floor.get();
                true
            })
        };
        let (ready, too_large) = ready.into_iter().partition(|job| fits(job));
        Queue { ready, blocked, too_large }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::node;
    use crate::model::{JobId, Share, Time};

    #[test]
    fn priority_then_arrival_then_number() {
        let job = |id, priority, at| JobView { id: JobId(id), priority, arrived: Time(at), ..JobView::default() };
        let mut jobs = vec![job(1, 0, 5), job(2, 0, 4), job(3, 7, 9), job(4, 0, 4), job(5, 9, 0)];
        jobs[4].waits_for = vec![JobId(1)];
        let view = View { jobs, ..View::default() };
        let queue = Fifo.queue(&view);
        assert_eq!(queue.ready.iter().map(|j| j.id.0).collect::<Vec<_>>(), [3, 2, 4, 1]);
        assert_eq!(queue.blocked.iter().map(|(j, other)| (j.id.0, other.0)).collect::<Vec<_>>(), [(5, 1)]);
    }

    #[test]
    fn a_job_waits_until_its_request_is_free() {
        let job = |id, request| JobView { id: JobId(id), floor: Share::clamped(request), ..JobView::default() };
        let mut jobs = vec![job(1, 0.5), job(2, 0.6), job(3, 0.4), job(4, 0.2)];
        jobs[0].phase = Phase::Running { node: node(0).id, since: Time::ZERO, attempt: 1 };
        let view = View { jobs, nodes: vec![node(0)], ..View::default() };
        let queue = Requests.queue(&view);
        assert_eq!(queue.ready.iter().map(|j| j.id.0).collect::<Vec<_>>(), [3]);
        assert_eq!(queue.too_large.iter().map(|j| j.id.0).collect::<Vec<_>>(), [2, 4]);
    }
}
