//! How much neighbours slow each other down, learned from the jobs' own reports.
//!
//! **Problem.** Jobs on one machine disturb each other (caches, memory bandwidth), so a world in
//! which all share equally is slower than their work says. Without it the fair world would run
//! ahead of what really would have happened.
//!
//! **Approach.** The model is `cost = c · (1 + γ·d)`: what a step of a job costs in CPU, where `d =
//! 1 − Σu²` is the chance that a slice of time follows one of another job (`u`: parts of what is
//! used). `c` differs from job to job, γ is one number for the cluster. Each job meets other values
//! of `d` in the course of its life, so γ is the slope of `ln cost` over `d` within jobs, pooled
//! over all of them; it starts at zero and is pulled there until jobs have been seen in different
//! company.
//!
//! **Properties** (tests): `nothing_is_learned_from_constant_company`, `a_true_slope_is_found`,
//! `one_wild_report_changes_little`.

use serde::{Deserialize, Serialize};

/// What is known over all jobs: the sums of a linear regression within jobs.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Disturbance {
    xx: f64,
    xy: f64,
}

/// What is known of one job: the number of intervals between reports, their mean `d`, and their mean logarithm of the
/// cost per step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct NeighbourStats {
    stretches: f64,
    x: f64,
    y: f64,
    /// CPU since the newest report, and the same weighted by `d`.
    open_cpu: f64,
    open_shared: f64,
}

/// Prior weight of slope 0, as the sum of squares of `d`: that of one job that was alone for one report and beside an
/// equal for the next.
const PRIOR: f64 = 0.125;

/// A step whose cost differs from the usual by more than this (as a logarithm) is an evaluation or a checkpoint and
/// says nothing of neighbours.
const WILD: f64 = 0.4;

/// Two equal neighbours: where the slope of the logarithm is turned into γ.
const TYPICAL: f64 = 0.5;

impl Disturbance {
    /// γ.
    pub(crate) fn gamma(&self) -> f64 {
        let slope = (self.xy / (self.xx + PRIOR)).clamp(0.0, 1.0);
        ((slope * TYPICAL).exp() - 1.0) / TYPICAL
    }

    /// A job used `cpu` in company `d`. If it made `steps` meanwhile, the newest of them came when
    /// `since` of that was still to be used.
    pub(crate) fn observe(&mut self, job: &mut NeighbourStats, cpu: f64, d: f64, report: Option<(f64, f64)>) {
        let Some((steps, since)) = report else {
            job.open_cpu += cpu;
            job.open_shared += cpu * d;
            return;
        };
        let (used, shared) = (job.open_cpu + cpu - since, job.open_shared + (cpu - since) * d);
        (job.open_cpu, job.open_shared) = (since, since * d);
        if !(used > 0.0 && steps > 0.0) {
            return;
        }
        let (x, y) = (shared / used, (used / steps).ln());
        if job.stretches > 0.0 && (y - job.y).abs() > WILD {
            return;
        }
        job.stretches += 1.0;
        let dx = x - job.x;
        job.x += dx / job.stretches;
        job.y += (y - job.y) / job.stretches;
        self.xx += dx * (x - job.x);
        self.xy += dx * (y - job.y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job whose steps cost `c·(1 + γ·d)` in changing company.
    fn learn(company: &[f64], c: f64, gamma: f64, all: &mut Disturbance) {
        let mut job = NeighbourStats::default();
        for d in company {
            all.observe(&mut job, c * (1.0 + gamma * d), *d, Some((1.0, 0.0)));
        }
    }

    #[test]
    fn nothing_is_learned_from_constant_company() {
        let mut all = Disturbance::default();
        learn(&[0.5; 40], 3.0, 0.2, &mut all);
        learn(&[0.0; 40], 1.0, 0.2, &mut all);
        assert_eq!(all.gamma(), 0.0);
    }

    #[test]
    fn a_true_slope_is_found() {
        let mut all = Disturbance::default();
        for c in [0.5, 2.0, 10.0] {
            learn(&[0.0, 0.0, 0.5, 0.5, 0.67, 0.0, 0.5], c, 0.15, &mut all);
        }
        assert!((all.gamma() - 0.15).abs() < 0.03, "{}", all.gamma());
    }

    #[test]
    fn one_wild_report_changes_little() {
        let mut all = Disturbance::default();
        let mut job = NeighbourStats::default();
        for d in [0.0, 0.5, 0.0, 0.5, 0.0, 0.5] {
            all.observe(&mut job, 1.0, d, Some((1.0, 0.0)));
        }
        all.observe(&mut job, 50.0, 0.5, Some((1.0, 0.0)));
        assert_eq!(all.gamma(), 0.0);
    }
}
