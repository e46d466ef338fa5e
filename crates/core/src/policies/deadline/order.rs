//! `order: deadline`: among waiting jobs, first those that can still make their deadlines, the most
//! urgent first.
//!
//! A job's *laxity* is the time it can still wait: its time left, less the time it takes with all it
//! can use. What was never measured takes, as far as is known, no time: its deadline decides. Then
//! come jobs without a deadline, first come, first served, and last jobs that cannot make theirs:
//! they must not keep others from a slot.

use crate::model::Time;
use crate::policies::plain::OrderRule;
use crate::policies::{Order, Queue};
use crate::view::{JobView, Phase, View};
use std::cmp::Reverse;

pub(crate) const BY_DEADLINE: OrderRule = OrderRule::new("deadline", || Box::new(ByDeadline));

/// The rule has no numbers and no memory.
struct ByDeadline;

/// The place of a job in the queue: its class, then its laxity in seconds.
fn urgency(now: Time, job: &JobView) -> (u8, f64) {
    let Some(deadline) = job.deadline else { return (1, 0.0) };
    let takes_s = job.ends_in_s(now, job.max.get()).map_or(0.0, |end| end.mid);
    let left_s = deadline.at.as_secs_f64() - now.as_secs_f64();
    let laxity_s = left_s - takes_s;
    if laxity_s + deadline.tolerance.as_secs_f64() >= 0.0 { (0, laxity_s) } else { (2, laxity_s) }
}

impl Order for ByDeadline {
    fn queue<'v>(&self, view: &'v View) -> Queue<'v> {
        let waiting = || view.jobs.iter().filter(|j| j.phase == Phase::Waiting);
        let mut ready: Vec<_> = waiting().filter(|j| j.waits_for.is_empty()).collect();
        ready.sort_by(|a, b| {
            let ((class_a, laxity_a), (class_b, laxity_b)) = (urgency(view.now, a), urgency(view.now, b));
            (Reverse(a.priority), class_a)
                .cmp(&(Reverse(b.priority), class_b))
                .then(laxity_a.total_cmp(&laxity_b))
                .then((a.arrived, a.id).cmp(&(b.arrived, b.id)))
        });
        let blocked = waiting().filter_map(|j| j.waits_for.first().map(|&other| (j, other))).collect();
        Queue { ready, blocked, too_large: vec![] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{JobId, Span};
    use crate::signal::speed::Pace;
    use crate::view::Deadline;

    #[test]
    fn least_laxity_then_no_deadline_then_too_late() {
        let job = |id, at_s: Option<u64>| JobView {
            id: JobId(id),
            deadline: at_s.map(|s| Deadline::strict(Time::ZERO + Span::from_secs(s))),
            ..JobView::default()
        };
        let mut jobs = vec![job(1, None), job(2, Some(50)), job(3, Some(100)), job(4, Some(30)), job(5, Some(60))];
        // Job 3 needs 80 s of its 100: it is the most urgent. Job 4 needs 40 of its 30.
        for (i, steps) in [(2, 80), (3, 40)] {
            jobs[i].signal.total = Some(steps);
            jobs[i].signal.pace = Some(Pace::from_law(0.0, 1.0, 1.0));
        }
        let view = View { now: Time::ZERO, jobs, ..View::default() };
        let order: Vec<u64> = ByDeadline.queue(&view).ready.iter().map(|j| j.id.0).collect();
        assert_eq!(order, [3, 2, 5, 1, 4]);
    }
}
