//! What a job's own reports say about the work before it: the one estimate that all rules share
//! ([`crate::signal::length`]), so that they differ by their rule only.

use crate::signal::length;
use crate::signal::predict::FLAT;
use crate::view::JobView;

/// Node-seconds of CPU left: the mean of the distribution that the gain rule uses, too, at the job's mean cost of a
/// step. `None` before the job has reported and used anything.
pub(crate) fn work_left(view: &JobView) -> Option<f64> {
    let signal = &view.signal;
    let at = signal.step.unwrap_or(signal.reports) as f64;
    if !(at > 0.0 && view.consumed_node_s.cpu > 0.0) {
        return None;
    }
    let left = length::residual(signal, &view.history, view.claims, at)?.mean() * view.consumed_node_s.cpu / at;
    // What is exactly zero could not be compared.
    left.is_finite().then(|| left.max(1e-3 * view.consumed_node_s.cpu))
}

/// The part of the improvement still to come that `work` more node-seconds would bring, relative to
/// the whole improvement: an exponential through the present and the flat point of the fitted
/// curve.
pub(crate) fn improvement(view: &JobView, work: f64) -> Option<f64> {
    let outlook = view.signal.outlook?;
    let to_come = outlook.gain_left / (1.0 + outlook.gain_left);
    let steps = work * outlook.at / view.consumed_node_s.cpu;
    let away = outlook.flat_at - outlook.at;
    let gain = if to_come > FLAT && away > 0.0 {
        to_come * (1.0 - (-(to_come / FLAT).ln() * steps / away).exp())
    } else {
        // Flat already: what little is left comes as slowly as the last part did.
        to_come * (steps / outlook.at).min(1.0)
    };
    gain.is_finite().then(|| gain.max(0.0))
}
