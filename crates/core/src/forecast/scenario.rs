//! What may be otherwise than expected: a few scenarios, each with a speed and a length for every job.
//!
//! **Problem.** A policy that orders jobs by what they have left serves them in another order if one of them turns out
//! longer than expected. One projection shows one order. The others may end a job much sooner, or much later.
//!
//! **How.** Each job has a distribution of its speed, and of its length where that is not known. A scenario takes one
//! quantile of each. Each job has a multiplier by its number: in scenario `s` the job has the place `s · multiplier
//! mod SCENARIOS` (a lattice rule: I. Sloan and S. Joe, Lattice Methods for Multiple Integration, 1994). So each job
//! has each of its quantiles once, and all jobs are at their medians in the first scenario. Jobs with different
//! multipliers go different ways, some of them opposite ways. A multiplier of its own says how all jobs together
//! deviate. Nothing is drawn.
//!
//! **Properties** (tests of that name): `each_job_has_each_quantile_once`; `the_two_of_a_pair_are_opposite`.

use crate::model::JobId;

/// A prime number.
pub(super) const SCENARIOS: usize = 11;

/// The middle values of eleven equally likely parts of a normal distribution, in standard deviations.
const DEVIATIONS: [f64; SCENARIOS] = [-1.69, -1.10, -0.75, -0.47, -0.23, 0.0, 0.23, 0.47, 0.75, 1.10, 1.69];

/// One choice of all jobs' speeds and lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scenario(usize);

impl Scenario {
    /// All jobs are as expected.
    pub(super) const EXPECTED: Scenario = Scenario(0);

    /// The others, in pairs that deviate in opposite directions.
    pub(super) fn pairs() -> impl Iterator<Item = [Scenario; 2]> {
        (1..=SCENARIOS / 2).map(|s| [Scenario(s), Scenario(SCENARIOS - s)])
    }

    fn place(self, multiplier: usize) -> usize {
        (self.0 * multiplier + SCENARIOS / 2) % SCENARIOS
    }

    /// The multipliers of jobs are 2 to 9: 1 is that of all jobs together, and 10 would be its opposite.
    fn of_job(self, job: JobId) -> usize {
        self.place(2 + (job.0 % (SCENARIOS as u64 - 3)) as usize)
    }

    /// By how many standard deviations all jobs are slower than expected.
    pub(super) fn common(self) -> f64 {
        DEVIATIONS[self.place(1)]
    }

    /// By how many standard deviations this job is slower than expected.
    pub(super) fn deviation(self, job: JobId) -> f64 {
        DEVIATIONS[self.of_job(job)]
    }

    /// The part of jobs like this one that are shorter.
    pub(super) fn quantile(self, job: JobId) -> f64 {
        (self.of_job(job) as f64 + 0.5) / SCENARIOS as f64
    }
}

/// The value that the part `part` of `ends` does not exceed, between its neighbours. `ends` is sorted, and not empty.
pub(super) fn quantile(ends: &[f64], part: f64) -> f64 {
    let at = (part * ends.len() as f64 - 0.5).clamp(0.0, ends.len() as f64 - 1.0);
    let (below, above) = (ends[at.floor() as usize], ends[at.ceil() as usize]);
    below + at.fract() * (above - below)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn all() -> impl Iterator<Item = Scenario> {
        Scenario::pairs().flatten().chain([Scenario::EXPECTED])
    }

    #[test]
    fn each_job_has_each_quantile_once() {
        for job in (0..20).map(JobId) {
            let places: BTreeSet<usize> = all().map(|s| s.of_job(job)).collect();
            assert_eq!(places.len(), SCENARIOS, "{job:?}");
            assert_eq!((Scenario::EXPECTED.deviation(job), Scenario::EXPECTED.quantile(job)), (0.0, 0.5));
        }
        // Jobs that came one after the other are not slow in the same scenarios. Nor is a job slow when all are.
        let both = |a: u64, b: u64| all().map(|s| s.deviation(JobId(a)) * s.deviation(JobId(b))).sum::<f64>();
        let common = |a: u64| all().map(|s| s.deviation(JobId(a)) * s.common()).sum::<f64>();
        for job in 0..8 {
            let (own, next, all) = (both(job, job), both(job, job + 1), common(job));
            assert!(next < 0.8 * own && all.abs() < 0.8 * own, "{job}: {own} {next} {all}");
        }
    }

    #[test]
    fn the_two_of_a_pair_are_opposite() {
        for [one, other] in Scenario::pairs() {
            assert_eq!(one.common(), -other.common());
            assert!((0..20).map(JobId).all(|job| one.deviation(job) == -other.deviation(job)));
        }
    }

    #[test]
    fn quantiles_lie_between_the_ends() {
        let ends = [1.0, 2.0, 3.0, 4.0, 5.0];
        assert_eq!((quantile(&ends, 0.5), quantile(&ends, 0.2), quantile(&ends, 0.01)), (3.0, 1.5, 1.0));
    }
}
