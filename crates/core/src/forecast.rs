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
//! came so far. Jobs like those are believed to arrive as often as before. That cannot go on for ever: arrivals
//! that have gone on for a time `T` are believed to go on for another `x` with the chance `T / (T + x)`, and
//! less the longer none has come. The end is projected three times: without any later arrival, with
//! arrivals for as long as they go on in the median ([`MEDIAN`]), which is the prediction, and with
//! arrivals for as long as they go on in one case of ten ([`LONGEST`]).
//!
//! *The interval* is the middle 80 %. Its sides are the root of the sum of three squares: the
//! uncertainty of the job's own steps and pace, a part of the predicted time for what the neighbours
//! will do otherwise ([`OTHERS`]), and the distance to the projection without arrivals or with the most of them.
//! [`Forecaster`] compares the intervals that it stated with the ends of the jobs, and makes the next
//! intervals wider or narrower accordingly.
//!
//! *Words for people* are in one place: [`Prospect`].
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
mod calibration;
mod forecaster;
mod project;
mod prospect;

pub use arrivals::Arrivals;
pub use forecaster::Forecaster;
pub use prospect::{Certainty, Prospect};

use crate::decider::Decider;
use crate::model::JobId;
use crate::signal::speed::Interval;
use crate::view::View;
use project::{ProjectedEnd, project};
use std::collections::BTreeMap;

/// Arrivals go on for longer than this median length in half of all cases,
const MEDIAN: f64 = 0.5;

/// and for longer than this one in a tenth of them.
const LONGEST: f64 = 0.1;

/// The part of the predicted time by which it is wrong because neighbours go on otherwise than
/// predicted: half the width of the middle 80 %. Chosen, not fitted.
const OTHERS: f64 = 0.08;

/// When each job will end, in seconds from the view's present, for jobs whose pace and steps left are
/// known. The decider is not changed.
pub fn forecast(decider: &Decider, view: &View, arrivals: &Arrivals) -> BTreeMap<JobId, Interval> {
    let is_known = |j: &crate::view::JobView| j.signal.pace.is_some() && j.steps_left().is_some();
    if !view.jobs.iter().any(is_known) {
        return BTreeMap::new();
    }
    let alone = project(decider, view, arrivals, &[]);
    // Later jobs delay the others, so that still more arrive before these have ended.
    let horizon_s = 1.5 * alone.values().map(|e| e.ends_s).fold(0.0, f64::max);
    let [median, longest] = [MEDIAN, LONGEST].map(|chance| arrivals.expected(view, horizon_s, chance));
    let crowded = if longest.is_empty() { None } else { Some(project(decider, view, arrivals, &longest)) };
    let middle = match median.len() {
        0 => None,
        count if count == longest.len() => crowded.clone(),
        _ => Some(project(decider, view, arrivals, &median)),
    };
    let end_s = |ends: &Option<BTreeMap<JobId, ProjectedEnd>>, id: &JobId, without: &ProjectedEnd| {
        ends.as_ref().and_then(|ends| ends.get(id)).map_or(without.ends_s, |e| e.ends_s)
    };
    let interval_of = |(id, ending): (&JobId, &ProjectedEnd)| {
        let (middle_s, crowded_s) = (end_s(&middle, id, ending), end_s(&crowded, id, ending));
        (*id, interval(ending, middle_s, crowded_s))
    };
    alone.iter().map(interval_of).collect()
}

fn interval(ending: &ProjectedEnd, mid: f64, crowded_s: f64) -> Interval {
    let side = |own: f64, arrivals_s: f64| ((own * mid).powi(2) + (OTHERS * mid).powi(2) + arrivals_s.powi(2)).sqrt();
    // Later arrivals may also help a job, as a deadline may, so either projection may be the earlier one.
    let (first_s, last_s) = (ending.ends_s.min(crowded_s).min(mid), ending.ends_s.max(crowded_s).max(mid));
    let (low, high) = (mid - side(ending.early, mid - first_s), mid + side(ending.late, last_s - mid));
    Interval { mid, low: low.max(0.0), high }
}
