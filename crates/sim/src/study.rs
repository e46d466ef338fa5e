//! Many seeds, several policies, all cores: one comparison.
//!
//! Every (seed, policy) pair is a run of its own; threads take the next pair from a counter and put the
//! outcome into its place, so that the result does not depend on who was faster.

use crate::engine::{Record, SimError, run};
use crate::outcome::Outcome;
use crate::world::World;
use gainshare_core::policy::Policy;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Outcomes of each policy, one for each seed, in the order asked for.
pub type Outcomes = Vec<Vec<Outcome>>;

/// Runs `make(seed)` under every policy for each of `seeds`. `tell` hears after each run how many are done.
pub fn compare(
    make: &(impl Fn(u64) -> World + Sync),
    policies: &[Policy],
    seeds: Range<u64>,
    record: Record,
    tell: &(impl Fn(usize) + Sync),
) -> Result<Outcomes, SimError> {
    let (first, seeds) = (seeds.start, seeds.end.saturating_sub(seeds.start));
    let count = policies.len() * seeds as usize;
    let next = AtomicUsize::new(0);
    let done = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<Result<Outcome, SimError>>>> = Mutex::new(vec![None; count]);
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(count.max(1));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count {
                        return;
                    }
                    let (policy, seed) = (i / seeds as usize, first + i as u64 % seeds);
                    let outcome = run(&make(seed), &policies[policy], record);
                    results.lock().expect("no run panics while it holds the lock")[i] = Some(outcome);
                    tell(done.fetch_add(1, Ordering::Relaxed) + 1);
                }
            });
        }
    });
    let results = results.into_inner().expect("no run panics while it holds the lock");
    let mut results = results.into_iter().map(|r| r.expect("every run has been made"));
    policies.iter().map(|_| results.by_ref().take(seeds as usize).collect()).collect()
}

/// The middle value; with an even count the mean of the two in the middle. Not a number if there is none.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value below which `q` of all lie, interpolated.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|v| !v.is_nan()).collect();
    if sorted.is_empty() {
        return f64::NAN;
    }
    sorted.sort_unstable_by(f64::total_cmp);
    quantile_of_sorted(&sorted, q)
}

/// As [`quantile`], of values that are in order already; there must be one at least.
pub(crate) fn quantile_of_sorted(sorted: &[f64], q: f64) -> f64 {
    let at = q.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (low, part) = (at.floor() as usize, at.fract());
    let high = (low + 1).min(sorted.len() - 1);
    sorted[low] + (sorted[high] - sorted[low]) * part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(quantile(&[0.0, 10.0], 0.25), 2.5);
        assert!(median(&[f64::NAN]).is_nan());
    }
}
