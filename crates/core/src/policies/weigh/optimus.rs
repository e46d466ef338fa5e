//! Optimus: resources where they shorten the remaining time most.
//!
//! **Source.** Y. Peng, Y. Bao, Y. Chen, C. Wu and C. Guo, "Optimus: An Efficient Dynamic Resource
//! Scheduler for Deep Learning Clusters", EuroSys 2018: fit the loss to predict the work left `Q`,
//! and hand out units greedily by the reduction of the remaining time they bring.
//!
//! **Here.** With speed in proportion to the share, the remaining time is `Q/s` and a small unit
//! shortens it by `Q/s²`; handing out ever smaller units levels these, so that shares are in
//! proportion to `√Q`. A job without a prediction gets an equal part.

use super::account::work_left;
use crate::view::JobView;

/// Shares of one group, in the order of `jobs`; they sum to one.
pub(crate) fn shares(jobs: &[&JobView]) -> Vec<f64> {
    let roots: Vec<Option<f64>> = jobs.iter().map(|j| work_left(j).map(f64::sqrt)).collect();
    let known = roots.iter().flatten().count();
    let mean = roots.iter().flatten().sum::<f64>() / known.max(1) as f64;
    let weights: Vec<f64> = roots.iter().map(|r| r.unwrap_or(if known > 0 { mean } else { 1.0 })).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}
