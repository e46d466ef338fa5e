//! Which job has more cores than others, where each can have a core of its own and teams of threads follow shares.
//!
//! **Problem.** Further cores bring a job less and less. A job that was held back cannot catch up later with the whole
//! machine, and jobs one after the other, each with the whole machine, take longer than side by side. So little can be
//! taken from a job, and each bit of it should go where it gains most.
//!
//! **Approach.** The first job in the order has more cores than the others, which have the same number each. How many?
//! The most with which all others still end in time: until the first job ends they have the rest of the cores, and
//! afterwards all cores, in equal parts. In time is a little later than in the fair world ([`TOLERANCE`]). Both worlds
//! follow the same law of speed, so that its errors cancel. The first job has at most [`MOST_PART`] of the cores and
//! [`MOST_EQUAL`] times an equal part: beyond that all jobs together lose too much. In the model of
//! `tests/teams.rs` (three jobs on 16 cores) it has 10 cores, and trains 35 % shorter than with equal shares. With 11
//! cores it is 38 %, and the makespan grows by 4 % in place of 3 %.
//!
//! **Terms.** Work is in seconds of one core.
//!
//! **Properties** (tests): `the_first_has_twice_an_equal_part_while_all_end_in_time`,
//! `nobody_is_favoured_at_the_cost_of_a_late_job`, `a_job_alone_has_all_cores`.

use super::machine::slowdown;
use super::teams::{self, TeamTask, TeamUse};
use crate::scaling::speed;

/// How much later than in the fair world a job may end by the forecast, as a part of its whole time there.
pub(super) const TOLERANCE: f64 = 0.05;

/// The largest part of the cores for one of several jobs.
const MOST_PART: f64 = 2.0 / 3.0;

/// How many times an equal part one job may have.
const MOST_EQUAL: f64 = 2.0;

/// The part of its cores that each job gives to a newcomer that is measured, and the part of the usual cost of that.
pub(super) const FOR_NEWCOMER: f64 = 0.4;

/// One job, in the order in which jobs are favoured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contender {
    pub(super) left: f64,
    /// The part of its work on one thread, once that was measured.
    pub(super) serial: Option<f64>,
    /// When it must have ended, in seconds from now.
    pub(super) latest_s: f64,
}

impl Contender {
    fn speed(&self, cores: f64) -> f64 {
        speed(self.serial, cores).max(f64::MIN_POSITIVE)
    }
}

/// The most that a newcomer has beside `others` until it is measured, where `equal` is an equal share.
pub(super) fn most_for_newcomer(equal: f64, others: usize) -> f64 {
    equal * (1.0 + FOR_NEWCOMER * others as f64).min(MOST_EQUAL)
}

/// The cores of the first of `line`. The others have equal parts of the rest.
pub(super) fn cores_of_first(line: &[Contender], cores: f64, disturbance: f64) -> f64 {
    let equal = cores / line.len().max(1) as f64;
    let mut first = (cores * MOST_PART).min(equal * MOST_EQUAL).floor();
    while first > equal {
        if all_end_in_time(line, first, cores, disturbance) {
            return first;
        }
        first -= 1.0;
    }
    equal
}

/// Whether all but the first end in time if the first one has `first` cores until it ends, and then all share equally.
fn all_end_in_time(line: &[Contender], first: f64, cores: f64, disturbance: f64) -> bool {
    let Some((favoured, others)) = line.split_first() else { return true };
    let each = (cores - first) / others.len().max(1) as f64;
    let slow = slowdown(disturbance, cores, first * first + others.len() as f64 * each * each);
    let until_s = slow * favoured.left / favoured.speed(first);
    let task = |job: &Contender| TeamTask {
        left: (job.left - job.speed(each) * until_s / slow).max(0.0),
        most: f64::INFINITY,
        team: Some(TeamUse { serial: job.serial, on_one_core: false }),
    };
    let tasks: Vec<TeamTask> = others.iter().map(task).collect();
    let ends = teams::run(&tasks, cores, disturbance, None);
    others.iter().zip(ends).all(|(job, end)| until_s + end.ends_s <= job.latest_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three jobs on 16 cores that end in the fair world when they would with equal parts from now on.
    fn line(left: [f64; 3], late_s: f64) -> Vec<Contender> {
        let serial = Some(0.08);
        let tasks =
            left.map(|left| TeamTask { left, most: f64::INFINITY, team: Some(TeamUse { serial, on_one_core: false }) });
        let ends = teams::run(&tasks, 16.0, 0.0, None);
        left.iter().zip(ends).map(|(&left, end)| Contender { left, serial, latest_s: end.ends_s - late_s }).collect()
    }

    #[test]
    fn the_first_has_twice_an_equal_part_while_all_end_in_time() {
        assert_eq!(cores_of_first(&line([20.0, 40.0, 60.0], -1.0), 16.0, 0.0), 10.0);
        let cores = cores_of_first(&line([20.0, 40.0, 60.0], -0.2), 16.0, 0.0);
        assert!((6.0..10.0).contains(&cores), "{cores}");
        let six: Vec<Contender> = (0..6).map(|_| line([20.0; 3], -9.0)[0]).collect();
        assert_eq!(cores_of_first(&six, 16.0, 0.0), 5.0);
    }

    #[test]
    fn nobody_is_favoured_at_the_cost_of_a_late_job() {
        assert_eq!(cores_of_first(&line([20.0, 40.0, 60.0], 1.0), 16.0, 0.0), 16.0 / 3.0);
        let unknown = Contender { left: 20.0, serial: None, latest_s: f64::INFINITY };
        assert_eq!(cores_of_first(&[unknown; 2], 16.0, 0.0), 10.0, "no deadline is known");
    }

    #[test]
    fn a_job_alone_has_all_cores() {
        assert_eq!(cores_of_first(&line([20.0, 40.0, 60.0], 0.0)[..1], 16.0, 0.0), 16.0);
        assert_eq!(most_for_newcomer(0.25, 0), 0.25, "nobody gives anything");
        assert!((most_for_newcomer(0.25, 1) - 0.35).abs() < 1e-9 && most_for_newcomer(0.25, 3) == 0.5);
    }
}
