//! Which job has more cores than others, where each can have a core of its own and teams of threads follow shares.
//!
//! **Problem.** Further cores bring a job less and less. A job that was held back cannot catch up later with the whole
//! machine, and jobs one after the other, each with the whole machine, take longer than side by side. So little can be
//! taken from a job, and each bit of it should go where it gains most.
//!
//! **Approach.** The first job in the order has more cores than the others. How many? The most with which two things
//! hold. (1) All others still end in time. That is a little later than in the fair world ([`TOLERANCE`]). (2) It gains
//! at least [`WORTH`] times what all others lose together, each counted by its weight. Both are forecast: until the
//! first job ends all have their parts, and afterwards equal parts. Both worlds follow the same law of speed, so that
//! its errors cancel. The first job has at most [`MOST_PART`] of the cores and [`MOST_EQUAL`] times an equal part.
//!
//! The others have whole cores, too. Each has at least [`LEAST_PART`] of an equal part, and each further core goes to
//! the one that would end latest, as a part of its whole time: a job that will have the whole machine at its end can
//! catch up, and another one cannot.
//!
//! **Terms.** Work is in seconds of one core.
//!
//! **Properties** (tests): `the_first_has_twice_an_equal_part_while_all_end_in_time`,
//! `nobody_is_favoured_at_the_cost_of_a_late_job`, `nobody_is_favoured_for_a_small_gain`,
//! `who_can_catch_up_gives_most`, `a_job_alone_has_all_cores`, `no_core_is_dealt_twice`,
//! `a_number_of_cores_that_no_machine_has_is_dealt_out`.

use super::machine::{TaskResult, slowdown};
use super::teams::{self, TeamTask, TeamUse};
use crate::scaling::{MOST_CORES, speed};

/// How much later than in the fair world a job may end by the forecast, as a part of its whole time there.
const TOLERANCE: f64 = 0.03;

/// The first job gains at least this many times what the others lose.
const WORTH: f64 = 2.0;

/// The largest part of the cores for one of several jobs.
const MOST_PART: f64 = 0.7;

/// How many times an equal part one job may have.
const MOST_EQUAL: f64 = 2.1;

/// The part of an equal part that every job keeps. With fewer cores than that the law of speed tells too little.
const LEAST_PART: f64 = 0.4;

/// With fewer cores for each job, weights decide instead of whole cores.
const CORES_PER_JOB: f64 = 2.0;

/// The part of its cores that each job gives to a newcomer that is measured, and the part of the usual cost of that.
pub(super) const FOR_NEWCOMER: f64 = 0.4;

/// How many times an equal part such a newcomer may have.
const MOST_FOR_NEWCOMER: f64 = 2.0;

/// One job, in the order in which jobs are favoured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contender {
    pub(super) left_core_s: f64,
    /// The part of its work on one thread, once that was measured.
    pub(super) serial: Option<f64>,
    /// When it should have ended, in seconds from now.
    pub(super) deadline_s: f64,
    /// The job's whole time in the fair world.
    pub(super) fair_s: f64,
    /// How much its delay counts.
    pub(super) weight: f64,
}

impl Contender {
    fn speed(&self, cores: f64) -> f64 {
        speed(self.serial, cores).max(f64::MIN_POSITIVE)
    }

    /// How late an end is, as a part of the whole time.
    fn lateness(&self, ends_s: f64) -> f64 {
        (ends_s - self.deadline_s) / self.fair_s.max(f64::MIN_POSITIVE)
    }
}

/// The most that a newcomer has beside `others` until it is measured, where `equal` is an equal share.
pub(super) fn most_for_newcomer(equal: f64, others: usize) -> f64 {
    equal * (1.0 + FOR_NEWCOMER * others as f64).min(MOST_FOR_NEWCOMER)
}

/// The cores of each job of `line`.
pub(super) fn deal(line: &[Contender], cores: f64, disturbance: f64) -> Vec<f64> {
    let each = cores / line.len().max(1) as f64;
    let equal = vec![each; line.len()];
    // Cores are counted one by one. Here every job has more than it can use, and above 2⁵³ one core less is the same
    // number.
    if cores > MOST_CORES {
        return equal;
    }
    let world = Forecast { line, cores, disturbance };
    let ends_with_equal = world.ends(&equal);
    let mut first = (cores * MOST_PART).min(each * MOST_EQUAL).floor();
    while first > each {
        let parts = world.split(first);
        let ends = world.ends(&parts);
        if world.are_in_time(&ends) && world.is_worth(&ends, &ends_with_equal) {
            return parts;
        }
        first -= 1.0;
    }
    equal
}

/// What becomes of jobs that share `cores`.
struct Forecast<'a> {
    line: &'a [Contender],
    cores: f64,
    disturbance: f64,
}

impl Forecast<'_> {
    /// When each job ends if all have their `parts` until the first one ends, and then equal parts.
    fn ends(&self, parts: &[f64]) -> Vec<f64> {
        let Some((favoured, others)) = self.line.split_first() else { return Vec::new() };
        let slow = slowdown(self.disturbance, parts.iter().sum(), parts.iter().map(|part| part * part).sum());
        let until_s = slow * favoured.left_core_s / favoured.speed(parts[0]);
        let task = |(job, part): (&Contender, &f64)| TeamTask {
            left_core_s: (job.left_core_s - job.speed(*part) * until_s / slow).max(0.0),
            most: f64::INFINITY,
            team: Some(TeamUse { serial: job.serial, on_one_core: false }),
        };
        let tasks: Vec<TeamTask> = others.iter().zip(&parts[1..]).map(task).collect();
        let later = teams::run(&tasks, self.cores, self.disturbance, None);
        let end = |((job, part), later): ((&Contender, &f64), TaskResult)| {
            (slow * job.left_core_s / job.speed(*part)).min(until_s + later.ends_s)
        };
        std::iter::once(until_s).chain(others.iter().zip(&parts[1..]).zip(later).map(end)).collect()
    }

    /// The parts of all jobs if the first one has `first` cores.
    fn split(&self, first: f64) -> Vec<f64> {
        let others = (self.line.len() - 1) as f64;
        let each = (self.cores - first) / others;
        let least = (LEAST_PART * self.cores / (others + 1.0)).floor().max(1.0);
        let mut parts = vec![each.floor(); self.line.len()];
        parts[0] = first;
        if self.cores / (others + 1.0) < CORES_PER_JOB || each < least {
            parts[1..].fill(each);
            return parts;
        }
        let latest_of = |ends: &[f64]| {
            let late = |i: &usize| self.line[*i].lateness(ends[*i]);
            let by_lateness = |a: &usize, b: &usize| late(a).total_cmp(&late(b));
            let places = 1..self.line.len();
            let (last, spare) = (places.clone().max_by(by_lateness)?, places.min_by(by_lateness)?);
            Some((last, spare, late(&last)))
        };
        // What rounding left goes to those that would end latest. It is less than a core for each of them.
        let mut rest = self.cores - parts.iter().sum::<f64>();
        for _ in 1..self.line.len() {
            if rest <= 0.0 {
                break;
            }
            let Some((last, ..)) = latest_of(&self.ends(&parts)) else { break };
            parts[last] += rest.min(1.0);
            rest -= 1.0;
        }
        // Then cores move from the job with most time to spare to the one with least, while that helps.
        for _ in 0..self.line.len() {
            let Some((last, spare, lateness)) = latest_of(&self.ends(&parts)) else { break };
            if parts[spare] - 1.0 < least || last == spare {
                break;
            }
            parts[last] += 1.0;
            parts[spare] -= 1.0;
            if latest_of(&self.ends(&parts)).is_none_or(|(_, _, now)| now >= lateness) {
                parts[last] -= 1.0;
                parts[spare] += 1.0;
                break;
            }
        }
        parts
    }

    /// Whether all but the first end in time.
    fn are_in_time(&self, ends: &[f64]) -> bool {
        self.line.iter().zip(ends).skip(1).all(|(job, end)| job.lateness(*end) <= TOLERANCE)
    }

    /// Whether the first gains much more than the others lose, against the ends `before`.
    fn is_worth(&self, ends: &[f64], before: &[f64]) -> bool {
        let later = |i: usize| self.line[i].weight * (ends[i] - before[i]);
        -later(0) >= WORTH * (1..self.line.len()).map(|i| later(i).max(0.0)).sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Jobs on 16 cores, by their work left and their whole time. They end in the fair world when they would with equal
    /// parts from now on, and `late_s` seconds sooner.
    fn line(jobs: &[(f64, f64)], late_s: f64) -> Vec<Contender> {
        let serial = Some(0.08);
        let team = Some(TeamUse { serial, on_one_core: false });
        let tasks: Vec<TeamTask> =
            jobs.iter().map(|&(left, _)| TeamTask { left_core_s: left, most: f64::INFINITY, team }).collect();
        let ends = teams::run(&tasks, 16.0, 0.0, None);
        let job = |(&(left, fair_s), end): (&(f64, f64), TaskResult)| Contender {
            left_core_s: left,
            serial,
            deadline_s: end.ends_s - late_s,
            fair_s,
            weight: 1.0 / fair_s,
        };
        jobs.iter().zip(ends).map(job).collect()
    }

    const SHORT: (f64, f64) = (15.0, 12.0);

    #[test]
    fn the_first_has_twice_an_equal_part_while_all_end_in_time() {
        let cores = deal(&line(&[SHORT, (40.0, 30.0), (60.0, 40.0)], 0.0), 16.0, 0.0);
        assert!(cores[0] == 11.0 && cores.iter().sum::<f64>() == 16.0, "{cores:?}");
        // With less time to spare it has less.
        let cores = deal(&line(&[SHORT, (40.0, 30.0), (60.0, 40.0)], 0.7), 16.0, 0.0);
        assert!((6.0..11.0).contains(&cores[0]), "{cores:?}");
    }

    #[test]
    fn nobody_is_favoured_at_the_cost_of_a_late_job() {
        assert_eq!(deal(&line(&[SHORT, (40.0, 30.0), (60.0, 40.0)], 3.0), 16.0, 0.0), [16.0 / 3.0; 3]);
    }

    #[test]
    fn nobody_is_favoured_for_a_small_gain() {
        // Of two jobs that end at about the same time, one would lose what the other gains.
        let cores = deal(&line(&[(40.0, 30.0), (50.0, 30.0)], -9.0), 16.0, 0.0);
        assert_eq!(cores, [8.0; 2]);
    }

    #[test]
    fn who_can_catch_up_gives_most() {
        // The second job ends soon after the first one. The third has the whole machine at its end.
        let cores = deal(&line(&[SHORT, (24.0, 20.0), (90.0, 50.0)], -0.5), 16.0, 0.0);
        assert!(cores[0] >= 10.0 && cores[1] > cores[2] && cores[2] >= 2.0, "{cores:?}");
    }

    #[test]
    fn a_job_alone_has_all_cores() {
        assert_eq!(deal(&line(&[SHORT], 0.0), 16.0, 0.0), [16.0]);
        assert!(deal(&[], 16.0, 0.0).is_empty());
        assert_eq!(most_for_newcomer(0.25, 0), 0.25, "nobody gives anything");
        assert!((most_for_newcomer(0.25, 1) - 0.35).abs() < 1e-9 && most_for_newcomer(0.25, 3) == 0.5);
    }

    #[test]
    fn a_number_of_cores_that_no_machine_has_is_dealt_out() {
        for cores in [1e5, 1e16, 1e300, f64::INFINITY] {
            let parts = deal(&line(&[SHORT, (40.0, 30.0), (60.0, 40.0)], 0.0), cores, 0.0);
            assert_eq!(parts, [cores / 3.0; 3]);
        }
    }

    proptest! {
        #[test]
        fn no_core_is_dealt_twice(
            jobs in prop::collection::vec((0.1f64..200.0, 1.0f64..100.0), 1..9),
            late_s in -5.0f64..5.0,
            cores in 9.0f64..130.0,
        ) {
            let parts = deal(&line(&jobs, late_s), cores, 0.1);
            prop_assert!((parts.iter().sum::<f64>() - cores).abs() < 1e-6, "{parts:?}");
            let each = cores / jobs.len() as f64;
            prop_assert!(parts.iter().all(|part| *part >= (LEAST_PART * each).floor().max(0.5)), "{parts:?}");
        }
    }
}
