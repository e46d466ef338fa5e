//! From the limits that a share rule sets to the shares that a node can keep.
//!
//! **Problem.** Jobs on a node want more than it has. A rule gives each a *soft limit* per
//! resource; limits may sum to more or less than the node, and what one job leaves others may use.
//!
//! **Approach.** Jobs are first grouped by owner: owners split a node equally, and a rule moves
//! shares only within one owner's group, so that no report of one user can cost another user
//! anything. Within a group the rule sets limits; then [`water_fill`] turns limits into *shares*,
//! what each would get of a fully wanted node. Runtimes that weigh use the shares, those that cap
//! use the limits. Last, floors are kept.
//!
//! **Properties** (each a test of that name): `conservation`: shares sum to at most one per node
//! and resource; `floor_respected`; `permutation_invariant`: the order of jobs does not matter;
//! `owners_are_apart` (in `tests/flowcon.rs`).

use crate::model::{PerResource, Resource, Share};
use crate::plan::Target;

/// What an owner asked for one job, whatever it gains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bounds {
    pub(crate) floor: Share,
    pub(crate) max: Share,
}

/// Turns the limits of one owner's jobs into targets. `part` is the owner's part of the node.
pub(crate) fn targets(limits: &[PerResource<Share>], bounds: &[Bounds], part: f64) -> Vec<Target> {
    let mut out = vec![Target::FREE; limits.len()];
    for r in Resource::ALL {
        // Floors and maxima are about the CPU; the other resources have neither.
        let (floors, maxima): (Vec<f64>, Vec<f64>) =
            bounds.iter().map(|b| if r == Resource::Cpu { (b.floor.get(), b.max.get()) } else { (0.0, 1.0) }).unzip();
        let caps: Vec<f64> =
            limits.iter().enumerate().map(|(i, l)| (l.get(r).get() * part).max(floors[i]).min(maxima[i])).collect();
        let shares = keep_floors(water_fill(&caps, part), &floors, part);
        for (i, target) in out.iter_mut().enumerate() {
            *target.limit.get_mut(r) = Share::clamped(caps[i]);
            *target.share.get_mut(r) = Share::clamped(shares[i]);
        }
    }
    out
}

/// Deals `capacity` out in equal parts, no job above its cap; what is left when all are at their
/// caps goes to all in proportion to the caps, because soft limits never leave a machine idle.
///
/// Example: caps 0.25 and 1 on a whole node give 0.25 and 0.75.
pub fn water_fill(caps: &[f64], capacity: f64) -> Vec<f64> {
    let total: f64 = caps.iter().sum();
    if total <= 0.0 {
        return vec![capacity / caps.len().max(1) as f64; caps.len()];
    }
    if total <= capacity {
        return caps.iter().map(|c| c / total * capacity).collect();
    }
    let mut order: Vec<usize> = (0..caps.len()).collect();
    order.sort_by(|&a, &b| caps[a].total_cmp(&caps[b]));
    let mut out = vec![0.0; caps.len()];
    let mut left = capacity;
    for (done, &i) in order.iter().enumerate() {
        let level = left / (caps.len() - done) as f64;
        out[i] = caps[i].min(level);
        left -= out[i];
    }
    out
}

/// Deals `capacity` of a node out in proportion to `weights`, no job above its cap; what one job cannot
/// use goes to the others. Weights of zero count only when no other job wants more. This is what the
/// kernel does with weights.
///
/// Example: weights 1 and 1 with caps 0.19 and 1 give 0.19 and 0.81 of a whole node.
pub fn deal_by_weight(weights: &[f64], caps: &[f64], capacity: f64) -> Vec<f64> {
    let mut parts = vec![0.0; caps.len()];
    let mut left = capacity;
    let mut open: Vec<usize> = (0..caps.len()).filter(|&i| weights[i] > 0.0).collect();
    // In the order in which they fill up, all jobs can be served in one pass.
    open.sort_by(|&a, &b| (caps[a] / weights[a]).total_cmp(&(caps[b] / weights[b])).then(a.cmp(&b)));
    let mut weight: f64 = open.iter().map(|&i| weights[i]).sum();
    for &i in &open {
        parts[i] = (left * weights[i] / weight).min(caps[i]);
        left = (left - parts[i]).max(0.0);
        weight = (weight - weights[i]).max(f64::MIN_POSITIVE);
    }
    let mut idle: Vec<usize> = (0..caps.len()).filter(|&i| weights[i] <= 0.0).collect();
    idle.sort_by(|&a, &b| caps[a].total_cmp(&caps[b]).then(a.cmp(&b)));
    for (done, &i) in idle.iter().enumerate() {
        parts[i] = (left / (idle.len() - done) as f64).min(caps[i]);
        left = (left - parts[i]).max(0.0);
    }
    parts
}

/// Lifts every job to its floor and takes it from the jobs above theirs, in proportion to what they
/// have above it. Floors that together exceed the capacity are cut in proportion: a node cannot
/// promise more than it has.
fn keep_floors(mut shares: Vec<f64>, floors: &[f64], capacity: f64) -> Vec<f64> {
    let promised: f64 = floors.iter().sum();
    let cut = if promised > capacity { capacity / promised } else { 1.0 };
    let missing: f64 = shares.iter().zip(floors).map(|(s, f)| (f * cut - s).max(0.0)).sum();
    if missing <= 0.0 {
        return shares;
    }
    let spare: f64 = shares.iter().zip(floors).map(|(s, f)| (s - f * cut).max(0.0)).sum();
    let keep = if spare > 0.0 { (1.0 - missing / spare).max(0.0) } else { 0.0 };
    for (share, floor) in shares.iter_mut().zip(floors) {
        let floor = floor * cut;
        *share = floor + (*share - floor).max(0.0) * keep;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        for (x, y) in a.iter().zip(b) {
            assert!((x - y).abs() < 1e-9, "{a:?} is not {b:?}");
        }
    }

    #[test]
    fn the_launch_of_mnist_p_in_the_thesis() {
        // VAE converged at 1/(2·2), MNIST-P new at 1: the thesis reports a 25/75 split.
        close(&water_fill(&[0.25, 1.0], 1.0), &[0.25, 0.75]);
    }

    #[test]
    fn water_levels_out_below_the_caps() {
        close(&water_fill(&[1.0, 1.0, 1.0], 1.0), &[1.0 / 3.0; 3]);
        // 0.1 is reached; the other two level out at 0.45.
        close(&water_fill(&[0.9, 0.1, 0.6], 1.0), &[0.45, 0.1, 0.45]);
        // Caps of 0.2 and 0.3 leave half the node: it goes out 2 to 3.
        close(&water_fill(&[0.2, 0.3], 1.0), &[0.4, 0.6]);
        close(&water_fill(&[0.0, 0.0], 1.0), &[0.5, 0.5]);
        close(&water_fill(&[], 1.0), &[]);
    }

    #[test]
    fn floors_are_taken_from_those_above_theirs() {
        // The first lacks 0.1; the others have 0.4 and 0.4 above their floors, so each gives 0.05.
        close(&keep_floors(vec![0.1, 0.45, 0.45], &[0.2, 0.05, 0.05], 1.0), &[0.2, 0.4, 0.4]);
        // Floors of 0.8 and 0.8 cannot both be kept: each gets half.
        close(&keep_floors(vec![0.9, 0.1], &[0.8, 0.8], 1.0), &[0.5, 0.5]);
    }

    #[test]
    fn what_one_job_cannot_use_goes_to_the_others() {
        close(&deal_by_weight(&[1.0, 1.0], &[0.19, 1.0], 1.0), &[0.19, 0.81]);
        close(&deal_by_weight(&[0.25, 0.75], &[1.0, 1.0], 0.8), &[0.2, 0.6]);
        // The first takes its cap of 0.5; the jobs without weight share the rest.
        close(&deal_by_weight(&[1.0, 0.0, 0.0], &[0.5, 1.0, 0.1], 1.0), &[0.5, 0.4, 0.1]);
        close(&deal_by_weight(&[], &[], 1.0), &[]);
    }

    proptest! {
        #[test]
        fn nothing_is_left_while_a_job_wants_it(
            jobs in prop::collection::vec((0.0f64..1.0, 0.01f64..1.0), 1..10),
            capacity in 0.1f64..=1.0,
        ) {
            let (weights, caps): (Vec<f64>, Vec<f64>) = jobs.into_iter().unzip();
            let parts = deal_by_weight(&weights, &caps, capacity);
            let (used, wanted): (f64, f64) = (parts.iter().sum(), caps.iter().sum());
            prop_assert!((used - wanted.min(capacity)).abs() < 1e-9, "{parts:?}");
            prop_assert!(parts.iter().zip(&caps).all(|(p, c)| *p <= c + 1e-12 && *p >= 0.0));
        }

        /// The order of jobs does not matter. Only the last bits may differ, because sums are taken
        /// in another order.
        #[test]
        fn permutation_invariant(
            jobs in prop::collection::vec((0.0f64..=1.0, 0.0f64..=0.2, 0.2f64..=1.0), 1..12),
            part in 0.05f64..=1.0,
            shift in 0usize..12,
        ) {
            let dealt = |jobs: &[(f64, f64, f64)]| {
                let limits: Vec<_> = jobs.iter().map(|j| PerResource::from_fn(|_| Share::clamped(j.0))).collect();
                let bounds: Vec<_> =
                    jobs.iter().map(|j| Bounds { floor: Share::clamped(j.1), max: Share::clamped(j.2) }).collect();
                targets(&limits, &bounds, part)
            };
            let mut turned = jobs.clone();
            turned.rotate_left(shift % jobs.len());
            turned.reverse();
            let mut back = dealt(&turned);
            back.reverse();
            back.rotate_right(shift % jobs.len());
            for (a, b) in dealt(&jobs).iter().zip(&back) {
                prop_assert!(a.distance(b) < 1e-12, "{a:?} {b:?}");
            }
        }

        #[test]
        fn conservation(caps in prop::collection::vec(0.0f64..=1.0, 1..20), part in 0.05f64..=1.0) {
            let sum: f64 = water_fill(&caps, part).iter().sum();
            prop_assert!((sum - part).abs() < 1e-9);
        }

        #[test]
        fn floor_respected(
            jobs in prop::collection::vec((0.0f64..=1.0, 0.0f64..=0.2), 1..12),
        ) {
            let (shares, floors): (Vec<f64>, Vec<f64>) = jobs.into_iter().unzip();
            let shares = water_fill(&shares, 1.0);
            let promised: f64 = floors.iter().sum();
            let out = keep_floors(shares, &floors, 1.0);
            prop_assert!((out.iter().sum::<f64>() - 1.0).abs() < 1e-9);
            let cut = if promised > 1.0 { 1.0 / promised } else { 1.0 };
            for (share, floor) in out.iter().zip(&floors) {
                prop_assert!(*share >= floor * cut - 1e-9);
            }
        }
    }
}
