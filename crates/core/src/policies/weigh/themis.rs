//! Themis: all jobs end late by the same factor.
//!
//! **Source.** K. Mahajan et al., "Themis: Fair and Efficient GPU Cluster Scheduling", NSDI 2020:
//! finish-time fairness `ρ = T_shared / T_ideal`, the time a job takes in the shared cluster over
//! the time it would take alone with its `1/n` of it; resources go to the jobs with the worst `ρ`.
//!
//! **Here.** Auctions among few bidders approximate the fluid optimum: the least `ρ` that all can
//! have. With age `a`, work left `Q` and whole work `W`, `ρ = (a + Q/s) / (n·W)`, so `s = Q /
//! (ρ·n·W − a)`; shares fall as `ρ` grows, and the `ρ` at which they sum to one is found by
//! halving. A job without a prediction gets an equal part.

use super::account::work_left;
use crate::model::Time;
use crate::view::JobView;

/// Shares of one group, in the order of `jobs`; they sum to one.
pub(crate) fn shares(now: Time, jobs: &[&JobView]) -> Vec<f64> {
    let n = jobs.len() as f64;
    let equal = 1.0 / n;
    let known: Vec<Option<(f64, f64, f64)>> = jobs
        .iter()
        .map(|j| {
            work_left(j).map(|left| (now.since(j.arrived).as_secs_f64(), left, n * (j.consumed_node_s.cpu + left)))
        })
        .collect();
    let capacity = equal * known.iter().flatten().count() as f64;
    let share = |rho: f64, (age, left, ideal): (f64, f64, f64)| {
        let time = rho * ideal - age;
        if time <= 0.0 { f64::INFINITY } else { left / time }
    };
    let total = |rho: f64| known.iter().flatten().map(|k| share(rho, *k)).sum::<f64>();
    let (mut low, mut high) = (0.0, 1.0);
    while capacity > 0.0 && total(high) > capacity && high < 1e12 {
        high *= 2.0;
    }
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if total(middle) > capacity { low = middle } else { high = middle }
    }
    known.into_iter().map(|k| k.map_or(equal, |k| share(high, k).min(1.0))).collect()
}
