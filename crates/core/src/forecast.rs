//! When each job of a view will end: the policy's own sharing, played forward.
//!
//! **Problem.** A job's end does not follow from its present share. When a neighbour ends, the job
//! gets more; when a job arrives, it gets less; a policy with deadlines changes shares all the time.
//!
//! **Approach.** [`forecast`] copies the decider and a view, and *projects* them: the policy decides,
//! every job makes steps at the speed that its pace gives for its share, and the first job that ends
//! leaves the view; then the policy decides again, until every job has ended ([`project`]). Jobs that
//! wait in the queue start when the policy starts them. The number of decisions is bounded; between
//! two of them a job that ends leaves its share to the others by their weights, as the kernel does.
//!
//! *Arrivals.* Jobs that will be submitted later are not known. [`Arrivals`] remembers the jobs that
//! came so far. The end is projected twice: without any later arrival, and with jobs like those seen,
//! which arrive as often as before. That cannot go on for ever: arrivals that have gone on for a time
//! `T` are believed to go on for another `x` with the chance `T / (T + x)`. The prediction lies between
//! the two projections ([`EXPECTED`]), and the interval contains both.
//!
//! *The interval* is the middle 80 %. Its sides are the root of the sum of three squares: the
//! uncertainty of the job's own steps and pace, a part of the predicted time for what the neighbours
//! will do otherwise ([`OTHERS`]), and the distance to the projection with or without arrivals.
//!
//! **Terms and units.** Times are seconds from the view's present. Work is in steps of the job, or in
//! node-seconds for a job whose steps are not measured. *Available* is the part of a node that its jobs
//! get together: other programs may take the rest. [`Forecaster`] measures it, and drivers put it into the
//! paces of the view ([`crate::signal::speed::Pace::with_available`]), so that decisions know it too.
//!
//! **Properties** (tests of that name in `tests/forecast.rs`): `equal_shares_end_as_processor_sharing_does`;
//! `a_waiting_job_starts_when_a_slot_is_free`; `the_number_of_decisions_is_bounded`;
//! `later_arrivals_widen_the_interval_on_the_late_side`.

mod arrivals;
mod forecaster;
mod project;

pub use arrivals::Arrivals;
pub use forecaster::Forecaster;

use crate::decider::Decider;
use crate::model::JobId;
use crate::signal::speed::Interval;
use crate::view::View;
use project::{ProjectedEnd, project};
use std::collections::BTreeMap;

/// Where between the projection without arrivals (0) and the one with them (1) the end is expected. Chosen, not fitted;
/// `crates/sim/examples/forecast.rs` measures the errors it leads to.
const EXPECTED: f64 = 0.5;

/// The part of the predicted time by which it is wrong because neighbours go on otherwise than
/// predicted: half the width of the middle 80 %. Chosen, not fitted.
const OTHERS: f64 = 0.08;

/// When each job will end, in seconds from the view's present, for jobs whose pace and steps left are
/// known. The decider is not changed.
pub fn forecast(decider: &Decider, view: &View, arrivals: &Arrivals) -> BTreeMap<JobId, Interval> {
    let is_known = |j: &crate::view::JobView| j.signal.pace.is_some() && j.signal.steps_left().is_some();
    if !view.jobs.iter().any(is_known) {
        return BTreeMap::new();
    }
    let alone = project(decider, view, arrivals, &[]);
    let later = arrivals.expected(view, alone.values().map(|e| e.ends_s).fold(0.0, f64::max));
    let crowded = if later.is_empty() { None } else { Some(project(decider, view, arrivals, &later)) };
    alone
        .iter()
        .map(|(id, ending)| {
            let crowded_s = crowded.as_ref().and_then(|c| c.get(id)).map_or(ending.ends_s, |e| e.ends_s);
            (*id, interval(ending, crowded_s))
        })
        .collect()
}

fn interval(ending: &ProjectedEnd, crowded_s: f64) -> Interval {
    let mid = ending.ends_s + EXPECTED * (crowded_s - ending.ends_s);
    let side = |own: f64, arrivals_s: f64| ((own * mid).powi(2) + (OTHERS * mid).powi(2) + arrivals_s.powi(2)).sqrt();
    let (to_alone, to_crowded) = (mid - ending.ends_s, crowded_s - mid);
    // A job that later arrivals would help, as a deadline may, has its sides swapped.
    let (early_s, late_s) = if crowded_s >= ending.ends_s { (to_alone, to_crowded) } else { (-to_crowded, -to_alone) };
    Interval { mid, low: (mid - side(ending.early, early_s)).max(0.0), high: mid + side(ending.late, late_s) }
}
