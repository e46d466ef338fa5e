//! Which waiting job next? Higher priority first, then first come, first served.
//!
//! A job that depends on another one steps aside until that one has ended; it keeps its place in the queue.

use crate::model::JobId;
use crate::view::{JobView, Phase, View};

/// The waiting jobs that could start, first to last, and those that wait for another job, with the one they wait for.
pub(crate) fn queue(view: &View) -> (Vec<&JobView>, Vec<(&JobView, JobId)>) {
    let waiting = || view.jobs.iter().filter(|j| j.phase == Phase::Waiting);
    let mut ready: Vec<_> = waiting().filter(|j| j.waits_for.is_empty()).collect();
    ready.sort_by_key(|j| (std::cmp::Reverse(j.priority), j.arrived, j.id));
    let blocked = waiting().filter_map(|j| j.waits_for.first().map(|&other| (j, other))).collect();
    (ready, blocked)
}
