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
//! *What the projection knows.* Decisions in the projection see what a driver would show them: whole reports, laws that
//! are measured as the jobs run (so trials and probes end when the job was measured), jobs that have not reported yet
//! and then do, and the CPU that jobs consume where other programs take a part. A projection that counts work in
//! another unit than the counters do would make a rule believe that served jobs have become slower.
//!
//! *Scenarios.* Under a policy that orders jobs by what they have left, a small error changes who goes first. Besides
//! the expected course, others are projected in which jobs are slower or faster, longer or shorter ([`scenario`]): one
//! pair with each forecast. Their newest ends are kept ([`spread`]). The prediction is the median over the scenarios.
//!
//! *The interval* is the middle 80 %. Its sides are the root of the sum of three squares: how far the scenarios lie
//! apart, a part of the predicted time ([`LEAST_SIDE`]), and the distance to the projection without arrivals or
//! with the most of them. Before enough scenarios were played, the uncertainty of the job's own steps and pace
//! stands for them, with a larger part of the predicted time ([`OTHERS`]). [`Forecaster`] compares the intervals
//! that it stated with the ends of the jobs, and makes the next intervals wider or narrower accordingly.
//!
//! *Words for people* are in one place: [`Prospect`].
//!
//! **Terms and units.** Times are seconds from the view's present. Work is in steps of the job. *Available* is the
//! part of a node that its jobs get together: other programs may take the rest. [`Forecaster`] measures it, and
//! drivers put it into the paces of the view ([`crate::signal::speed::Pace::with_available`]), so that decisions
//! know it too.
//!
//! **Properties** (tests of that name in `tests/forecast.rs`): `equal_shares_end_as_processor_sharing_does`;
//! `a_waiting_job_starts_when_a_slot_is_free`; `the_number_of_decisions_is_bounded`;
//! `later_arrivals_widen_the_interval_on_the_late_side`; `a_job_that_has_not_reported_reports_in_the_projection`.

mod arrivals;
mod belief;
mod calibration;
mod forecaster;
mod project;
mod prospect;
mod scenario;
mod spread;
mod track;

pub use arrivals::Arrivals;
pub use forecaster::Forecaster;
pub use prospect::{Certainty, Prospect};

use crate::decider::Decider;
use crate::model::JobId;
use crate::signal::speed::Interval;
use crate::view::View;
use arrivals::FutureJob;
use project::{Surroundings, project};
use scenario::Scenario;
use spread::{Spread, Spreads};
use std::collections::BTreeMap;
use track::ProjectedEnd;

/// Arrivals go on for longer than this median length in half of all cases,
const MEDIAN: f64 = 0.5;

/// and for longer than this one in a tenth of them.
const LONGEST: f64 = 0.1;

/// The part of the predicted time by which it is wrong because neighbours go on otherwise than
/// predicted: half the width of the middle 80 %. Chosen, not fitted.
const OTHERS: f64 = 0.08;

/// The same where the scenarios say what may go otherwise: no end is known better.
const LEAST_SIDE: f64 = 0.02;

/// Where the scenarios lie far apart, the order of the jobs is open, and the real course differs from each of them more
/// than they show: a side that is the part `p` of the predicted time is widened by `OPEN_ORDER · p` times itself,
const OPEN_ORDER: f64 = 3.0;

/// and at most by this many times itself. Both were chosen by hand, after runs of seeds 0 to 19 of the model in
/// `tests/play` with other numbers.
const MOST_OPEN: f64 = 1.5;

/// When each job will end, in seconds from the view's present, for jobs whose pace and steps left are
/// known. The decider is not changed. Other programs are believed to take nothing; [`Forecaster`] knows better.
pub fn forecast(decider: &Decider, view: &View, arrivals: &Arrivals) -> BTreeMap<JobId, Interval> {
    let around = Surroundings { arrivals, available: 1.0 };
    let expected = project(decider, view, around, &[], Scenario::EXPECTED);
    with_arrivals(decider, view, around, &expected, &Spreads::default())
}

/// Whether there is a job whose end can be predicted.
fn is_of_use(view: &View) -> bool {
    view.jobs.iter().any(|j| j.signal.pace.is_some() && j.steps_left().is_some())
}

/// The intervals of the ends, of which `expected` are those without any later arrival.
fn with_arrivals(
    decider: &Decider,
    view: &View,
    around: Surroundings<'_>,
    expected: &BTreeMap<JobId, ProjectedEnd>,
    spreads: &Spreads,
) -> BTreeMap<JobId, Interval> {
    // Later jobs delay the others, so that still more arrive before these have ended.
    let horizon_s = 1.5 * expected.values().map(|e| e.ends_s).fold(0.0, f64::max);
    let [median, longest] = [MEDIAN, LONGEST].map(|chance| around.arrivals.expected(view, horizon_s, chance));
    let with = |later: &[FutureJob]| project(decider, view, around, later, Scenario::EXPECTED);
    let crowded = if longest.is_empty() { None } else { Some(with(&longest)) };
    let middle = match median.len() {
        0 => None,
        count if count == longest.len() => crowded.clone(),
        _ => Some(with(&median)),
    };
    let end_s = |ends: &Option<BTreeMap<JobId, ProjectedEnd>>, id: &JobId, without: &ProjectedEnd| {
        ends.as_ref().and_then(|ends| ends.get(id)).map_or(without.ends_s, |e| e.ends_s)
    };
    let interval_of = |(id, ending): (&JobId, &ProjectedEnd)| {
        let (middle_s, crowded_s) = (end_s(&middle, id, ending), end_s(&crowded, id, ending));
        (*id, interval(ending, spreads.of(*id), middle_s, crowded_s))
    };
    expected.iter().map(interval_of).collect()
}

/// The interval of an end with this spread over the scenarios, which later arrivals make `middle_s` and `crowded_s` in
/// the expected scenario.
fn interval(ending: &ProjectedEnd, spread: Option<Spread>, middle_s: f64, crowded_s: f64) -> Interval {
    // Later arrivals may also help a job, as a deadline may, so either projection may be the earlier one.
    let (first_s, last_s) = (ending.ends_s.min(crowded_s).min(middle_s), ending.ends_s.max(crowded_s).max(middle_s));
    let open = |part: f64| part.max(0.0) * (1.0 + (OPEN_ORDER * part).clamp(0.0, MOST_OPEN));
    let (mid, early, late, least) = match spread {
        Some(Spread { tenth, median, ninetieth }) => {
            (median * middle_s, open(1.0 - tenth / median), open(ninetieth / median - 1.0), LEAST_SIDE)
        }
        None => (middle_s, ending.early, ending.late, OTHERS),
    };
    let late = late.hypot(ending.unsure);
    let side = |part: f64, arrivals_s: f64| ((part * mid).powi(2) + (least * mid).powi(2) + arrivals_s.powi(2)).sqrt();
    let (low, high) = (mid - side(early, middle_s - first_s), mid + side(late, last_s - middle_s));
    Interval { mid, low: low.max(0.0), high }
}
