//! Dominant resource fairness: equal shares of what each needs most.
//!
//! **Source.** A. Ghodsi et al., "Dominant Resource Fairness: Fair Allocation of Multiple Resource
//! Types", NSDI 2011.
//!
//! **Here.** A job's demand is the CPU it may use at most and the memory it holds, both as parts of
//! the node; its rate scales both. Where memory is what it needs most, its CPU is cut so that its
//! memory counts as much as others' CPU.

use crate::model::Time;
use crate::view::{JobView, Phase};

/// Shares of one group, in the order of `jobs`; they sum to one.
pub(crate) fn shares(now: Time, jobs: &[&JobView]) -> Vec<f64> {
    let weight = |job: &&JobView| {
        let cpu = job.max.get().max(1e-6);
        let ran_s = match job.phase {
            Phase::Running { since, .. } => now.since(since).as_secs_f64(),
            Phase::Waiting => 0.0,
        };
        let memory = if ran_s > 0.0 { (job.consumed_node_s.memory / ran_s).clamp(0.0, 1.0) } else { 0.0 };
        cpu / cpu.max(memory)
    };
    let weights: Vec<f64> = jobs.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}
