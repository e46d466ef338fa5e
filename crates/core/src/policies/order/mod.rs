//! `fifo`: higher priority first, then first come, first served.
//!
//! A job that depends on another one steps aside until that one has ended; it keeps its place in
//! the queue.

use super::{Order, Queue};
use crate::view::{Phase, View};
use std::cmp::Reverse;

/// The rule has no numbers and no memory.
pub(crate) struct Fifo;

impl Order for Fifo {
    fn queue<'v>(&self, view: &'v View) -> Queue<'v> {
        let waiting = || view.jobs.iter().filter(|j| j.phase == Phase::Waiting);
        let mut ready: Vec<_> = waiting().filter(|j| j.waits_for.is_empty()).collect();
        ready.sort_by_key(|j| (Reverse(j.priority), j.arrived, j.id));
        let blocked = waiting().filter_map(|j| j.waits_for.first().map(|&other| (j, other))).collect();
        Queue { ready, blocked }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{JobId, Time};
    use crate::view::JobView;

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
}
