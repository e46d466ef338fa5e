//! How soon a job makes nine tenths of its improvement: what `aim: quality` goes by.
//!
//! **Problem.** A young curve says little. Two or three reports fit a curve that is nearly flat as well as one that has
//! hardly begun, and a rule that believes either holds back the very job that improves fastest.
//!
//! **Approach.** The time scale of the curve is a distribution: log-normal around [`TYPICAL_SCALE`] of the run, as far
//! as the length of the run is known, and sharpened by what the points tell. Nine tenths of an exponential fall are
//! made after ln 10 time scales. The chance to make them for each unit of work is the Gittins index of that
//! distribution. The part of it that lies behind the job counts as made: it gains nothing.

use super::estimate::{EstimatedJob, WorkLeft};
use crate::signal::predict::TYPICAL_SCALE;
use crate::signal::{Outlook, Signal};
use std::f64::consts::LN_10;

/// Ninths of a normal distribution: the middle of each, in deviations.
const NINTHS: [f64; 9] = [-1.593, -0.967, -0.589, -0.282, 0.0, 0.282, 0.589, 0.967, 1.593];

/// The deviation of the logarithm of a curve's time scale from [`TYPICAL_SCALE`] of the run: in 212 public runs the
/// scale and the length belong together within a factor of 4 to 5.
const SCALE_SPREAD: f64 = 1.5;

/// The logarithm of a fitted time scale is not known better than this, because no real curve is an exponential.
const LEAST_SPREAD: f64 = 0.2;

/// A curve that falls in a straight line makes nine tenths of its improvement here.
const STRAIGHT: f64 = 0.9;

/// The largest chance, for each unit of work, that `job` makes nine tenths of its improvement.
pub(super) fn chance_per_work(signal: &Signal, job: &EstimatedJob, left: &WorkLeft) -> f64 {
    match job.place() {
        Some((per_step, at)) => chance_per_step(signal.outlook, at, left.mean_s / per_step) / per_step,
        // Before the first report, positions are in work.
        None => chance_per_step(None, job.consumed_node_s, left.mean_s),
    }
}

/// The same for each step of a job at position `at` that has about `left` steps to go.
fn chance_per_step(outlook: Option<Outlook>, at: f64, left: f64) -> f64 {
    let whole = at + left;
    let (mut ln_scale, mut precision) = ((TYPICAL_SCALE * whole).ln(), SCALE_SPREAD.powi(-2));
    if let Some(outlook) = outlook.filter(|o| o.scale > 0.0) {
        let points = (outlook.scale_spread.powi(2) + LEAST_SPREAD.powi(2)).recip();
        ln_scale = (ln_scale * precision + outlook.scale.ln() * points) / (precision + points);
        precision += points;
    }
    let spread = precision.sqrt().recip();
    let ninth = (NINTHS.len() as f64).recip();
    let (mut chance, mut service, mut best) = (0.0, 0.0, 0.0f64);
    for deviations in NINTHS {
        let good_at = ((ln_scale + deviations * spread).exp() * LN_10).min(STRAIGHT * whole);
        let steps = good_at - at;
        if steps > 0.0 {
            chance += ninth;
            service += ninth * steps;
            best = best.max(chance / (service + steps * (1.0 - chance)));
        }
    }
    if best.is_finite() { best } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chance of a job of 100 steps at step `at`, whose points tell of a time scale with `scale_spread`.
    fn chance(at: f64, scale: f64, scale_spread: f64) -> f64 {
        let outlook = Outlook { at, flat_at: at, gain_left: 0.0, scale, scale_spread };
        chance_per_step(Some(outlook), at, 100.0 - at)
    }

    #[test]
    fn a_job_gains_the_more_the_nearer_its_nine_tenths_are_and_nothing_after_them() {
        // Nine tenths are made after 23 steps.
        let (far, near, past) = (chance(2.0, 10.0, 0.05), chance(18.0, 10.0, 0.05), chance(60.0, 10.0, 0.05));
        assert!(0.02 < far && far < near && past == 0.0, "{far} {near} {past}");
    }

    #[test]
    fn one_report_does_not_show_that_the_improvement_is_made() {
        // A curve of one report is flat, and nothing is known of its scale.
        let (young, old) = (chance(1.0, 0.3, 3.0), chance(70.0, 21.0, 3.0));
        assert!(young > 0.02 && young > 5.0 * old, "{young} {old}");
    }
}
