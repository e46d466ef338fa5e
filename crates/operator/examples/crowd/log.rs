//! The operator's passes, from its log: exact times, where metrics have only steps.

use super::Result;
use serde_json::{Value, json};
use std::path::Path;

/// One pass of the decision about training jobs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pass {
    pub(super) jobs: usize,
    pub(super) orders: usize,
    /// The time to read the world and the agents' reports, and the whole time.
    pub(super) read_s: f64,
    pub(super) took_s: f64,
    /// What its thread had of a processor: what the pass costs, also where others use the machine
    /// too.
    pub(super) spent_s: f64,
}

/// All passes so far.
pub(super) fn passes(log: &Path) -> Result<Vec<Pass>> {
    let text = std::fs::read_to_string(log)?;
    Ok(text.lines().filter(|line| line.contains(" pass jobs=")).filter_map(pass).collect())
}

fn pass(line: &str) -> Option<Pass> {
    let word = |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let count = |name: &str| word(name)?.parse::<usize>().ok();
    Some(Pass {
        jobs: count("jobs")?,
        orders: count("orders")?,
        read_s: seconds(word("read_in")?)?,
        took_s: seconds(word("took")?)?,
        spent_s: seconds(word("spent")?)?,
    })
}

/// As Rust prints durations.
fn seconds(word: &str) -> Option<f64> {
    let units = [("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let (number, unit) = units.iter().find_map(|(name, unit)| Some((word.strip_suffix(name)?, unit)))?;
    Some(number.parse::<f64>().ok()? * unit)
}

/// What these passes took, and how many decisions a second those made that decided anything.
pub(super) fn sum_up(passes: &[Pass]) -> Value {
    let spread = |of: fn(&Pass) -> f64| {
        let mut times: Vec<f64> = passes.iter().map(of).collect();
        times.sort_by(f64::total_cmp);
        let at = |part: f64| {
            times
                .get(((times.len().saturating_sub(1)) as f64 * part).round() as usize)
                .map(|s| (s * 1e4).round() / 10.0)
        };
        json!({"median_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)})
    };
    let deciding: Vec<&Pass> = passes.iter().filter(|pass| pass.orders > 0).collect();
    let orders: usize = deciding.iter().map(|pass| pass.orders).sum();
    let largest = deciding.iter().max_by_key(|pass| pass.orders);
    json!({
        "passes": passes.len(), "jobs_in_view": passes.iter().map(|pass| pass.jobs).max(), "whole": spread(|pass| pass.took_s), "processor": spread(|pass| pass.spent_s),
        "looking": spread(|pass| pass.read_s), "orders": orders,
        "largest_pass": largest.map(|pass| json!({
            "orders": pass.orders, "took_s": pass.took_s, "spent_s": pass.spent_s,
            "orders_per_s": (pass.orders as f64 / pass.took_s).round(),
            "orders_per_s_of_processor": (pass.orders as f64 / pass.spent_s.max(1e-9)).round(),
        })),
    })
}
