//! SLAQ: at every epoch the node goes where it lowers losses most.
//!
//! **Source.** H. Zhang, L. Stafman, A. Or and M. Freedman, "SLAQ: Quality-Driven Scheduling for
//! Distributed Machine Learning", SoCC 2017: predict for every job the normalised loss reduction of
//! the next epoch as a function of its resources, and hand out units greedily by marginal
//! reduction, one to each job first.
//!
//! **Here.** The prediction is the one of this project ([`super::account`]); units are a fiftieth
//! of the node. A job without a prediction gets an equal part.

use super::account::improvement;
use crate::view::JobView;

/// How finely the node is handed out.
const UNITS: usize = 50;

/// Shares of one group, in the order of `jobs`; they sum to one. `epoch_s` is the time to the next
/// run.
pub(crate) fn shares(jobs: &[&JobView], epoch_s: f64) -> Vec<f64> {
    let n = jobs.len();
    let units = UNITS.max(2 * n);
    let unit = 1.0 / units as f64;
    let known: Vec<bool> = jobs.iter().map(|j| improvement(j, 1.0).is_some()).collect();
    let mut given: Vec<usize> = known.iter().map(|k| if *k { 1 } else { units / n }).collect();
    let gain = |i: usize, units: usize| improvement(jobs[i], epoch_s * unit * units as f64).unwrap_or(0.0);
    let mut next: Vec<f64> =
        (0..n).map(|i| if known[i] { gain(i, 2) - gain(i, 1) } else { f64::NEG_INFINITY }).collect();
    for _ in given.iter().sum::<usize>()..units {
        // The first of the largest, so that the order is that of the ids.
        let best = (0..n).reduce(|a, b| if next[b] > next[a] { b } else { a });
        let Some(best) = best.filter(|b| next[*b] > 0.0) else { break };
        given[best] += 1;
        next[best] = gain(best, given[best] + 1) - gain(best, given[best]);
    }
    let total: f64 = given.iter().sum::<usize>() as f64;
    given.into_iter().map(|g| g as f64 / total.max(1.0)).collect()
}
