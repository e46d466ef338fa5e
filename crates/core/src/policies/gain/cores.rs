//! Cores for jobs whose teams of threads follow their shares.
//!
//! **Problem.** The job that gains most is served first, with all that it can use. But a further core brings a job less
//! than the first one did, and takes it from a job that would use all of it. If each job in turn has the whole machine,
//! every job pays for that, and all of them together end later than with equal shares.
//!
//! **Approach.** Suppose that jobs are served in their order, each with the whole machine. Then every bit of work that
//! is done now ends its job sooner, and all jobs behind it as well: it is worth the number of jobs that wait for it.
//! So each core goes where that number, times what the core adds to the speed of the job ([`next_core`]), is largest.
//! Jobs may count by different weights. Three jobs on 16 cores get about what heSRPT gives them, the optimum where the
//! speed of a job is a power of its number of cores (B. Berg, R. Vesilo, M. Harchol-Balter, arXiv 2011.09676). A job
//! without a team gains from all that it can use. A long job would be alone at the end, with many cores that bring it
//! little. So a job has at least one core as soon as it needs as long with one core as all jobs together need with the
//! whole machine. Where each job can have a core of its own and all have teams, [`super::favour`] decides instead.
//!
//! **Properties** (tests): `without_teams_jobs_are_served_one_after_the_other`, `two_cores_go_to_two_jobs`,
//! `the_first_job_has_most_cores`, `what_a_job_keeps_comes_first`, `no_more_is_dealt_than_there_is`.

use super::Team;
use crate::scaling::next_core;

/// One job, in the order in which jobs are to be served.
pub(super) struct CoreClaim {
    /// The most that it may get.
    pub(super) most: f64,
    /// What the job gets before all others.
    pub(super) least: f64,
    /// The weights of the job and of all jobs behind it.
    pub(super) waiting: f64,
    /// How it gains from further cores; `None` if it gains from all that it can use alike.
    pub(super) team: Option<Team>,
}

/// No machine is dealt out in smaller parts than this.
const SMALLEST_PART: f64 = 1.0 / 512.0;

/// What each job gets of `capacity`.
pub(super) fn deal(claims: &[CoreClaim], capacity: f64) -> Vec<f64> {
    let mut left = capacity.max(0.0);
    let mut grants = Vec::with_capacity(claims.len());
    for claim in claims {
        let grant = claim.least.min(claim.most).clamp(0.0, left);
        grants.push(grant);
        left -= grant;
    }
    while left > 0.0 {
        let value = |rank: usize| {
            claims[rank].waiting
                * claims[rank].team.map_or(1.0, |team| next_core(team.serial, grants[rank] / team.core))
        };
        // Of equal ones the first: the iterator is turned round because `max_by` takes the last.
        let open = (0..claims.len()).rev().filter(|&rank| grants[rank] < claims[rank].most);
        let Some(rank) = open.max_by(|&a, &b| value(a).total_cmp(&value(b))) else { break };
        let claim = &claims[rank];
        let size = claim.team.map_or(f64::INFINITY, |team| team.core.max(SMALLEST_PART));
        let (before, rest) = (grants[rank], claim.most - grants[rank]);
        grants[rank] = if rest <= size.min(left) { claim.most } else { before + size.min(left) };
        left -= rest.min(size).min(left);
    }
    grants
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn team(serial: f64, cores: f64) -> Option<Team> {
        Some(Team { serial: Some(serial), core: 1.0 / cores })
    }

    const FREE: CoreClaim = CoreClaim { most: 1.0, least: 0.0, waiting: 0.0, team: None };

    /// Claims of jobs that all count alike.
    fn line(claims: impl ExactSizeIterator<Item = CoreClaim>) -> Vec<CoreClaim> {
        let jobs = claims.len();
        claims.enumerate().map(|(rank, claim)| CoreClaim { waiting: (jobs - rank) as f64, ..claim }).collect()
    }

    fn in_cores(claims: &[CoreClaim], cores: f64) -> Vec<f64> {
        deal(claims, 1.0).into_iter().map(|grant| (grant * cores * 100.0).round() / 100.0).collect()
    }

    #[test]
    fn without_teams_jobs_are_served_one_after_the_other() {
        let claims = |most: &[f64]| line(most.iter().map(|&most| CoreClaim { most, ..FREE }));
        assert_eq!(deal(&claims(&[0.6, 0.3, 0.5]), 1.0), [0.6, 0.3, 1.0 - 0.6 - 0.3]);
        assert_eq!(deal(&claims(&[0.6, 0.3]), 1.0), [0.6, 0.3]);
    }

    fn claims_of_two_cores(jobs: usize) -> Vec<CoreClaim> {
        line((0..jobs).map(|_| CoreClaim { team: Some(Team { serial: None, core: 0.5 }), ..FREE }))
    }

    #[test]
    fn two_cores_go_to_two_jobs() {
        for jobs in 2..7 {
            let claims = claims_of_two_cores(jobs);
            let mut expected = vec![0.0; jobs];
            expected[..2].fill(1.0);
            assert_eq!(in_cores(&claims, 2.0), expected);
        }
        let mut claims = claims_of_two_cores(3);
        claims[2].least = 0.5;
        assert_eq!(in_cores(&claims, 2.0), [1.0, 0.0, 1.0], "a long job has a core before others");
        let alone = claims_of_two_cores(1);
        assert_eq!(in_cores(&alone, 2.0), [2.0]);
    }

    #[test]
    fn the_first_job_has_most_cores() {
        let claims = |jobs: usize| -> Vec<CoreClaim> {
            line((0..jobs).map(|_| CoreClaim { most: 0.7, team: team(0.07, 16.0), ..FREE }))
        };
        assert_eq!(in_cores(&claims(3), 16.0), [10.0, 5.0, 1.0]);
        assert_eq!(in_cores(&claims(6), 16.0), [6.0, 5.0, 3.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn what_a_job_keeps_comes_first() {
        let mut claims = line((0..3).map(|_| CoreClaim { team: team(0.07, 16.0), ..FREE }));
        (claims[1].least, claims[2].least) = (3.0 / 16.0, 4.0 / 16.0);
        assert_eq!(in_cores(&claims, 16.0), [8.0, 4.0, 4.0]);
        // A light job has little beyond what it keeps.
        for (claim, waiting) in claims.iter_mut().zip([2.6, 0.6, 0.5]) {
            claim.waiting = waiting;
        }
        assert_eq!(in_cores(&claims, 16.0), [9.0, 3.0, 4.0]);
    }

    #[test]
    fn a_job_that_can_use_little_leaves_the_rest() {
        let claim = |most: f64, team: Option<Team>| CoreClaim { most, team, ..FREE };
        let claims = line([claim(0.05, team(0.07, 16.0)), claim(0.3, None), claim(1.0, None)].into_iter());
        let grants = deal(&claims, 1.0);
        assert_eq!(grants[..2], [0.05, 0.3]);
        assert!((grants[2] - 0.65).abs() < 1e-9, "{grants:?}");
    }

    proptest! {
        #[test]
        fn no_more_is_dealt_than_there_is(
            jobs in prop::collection::vec((0.0f64..1.3, 0.0f64..0.1, prop::option::of(0.0f64..1.0)), 0..40),
            cores in 1.5f64..2000.0,
            capacity in 0.0f64..1.0,
        ) {
            let claims = line(jobs.iter().map(|&(most, least, serial)| {
                CoreClaim { most, least, team: serial.and_then(|s| team(s, cores)), ..FREE }
            }));
            let grants = deal(&claims, capacity);
            prop_assert!(grants.iter().sum::<f64>() <= capacity + 1e-9);
            prop_assert!(grants.iter().zip(&claims).all(|(grant, claim)| (0.0..=claim.most).contains(grant)));
            // Nothing is left while a job could use it.
            let wanted: f64 = claims.iter().map(|claim| claim.most).sum();
            prop_assert!(grants.iter().sum::<f64>() >= wanted.min(capacity) - 1e-9);
        }
    }
}
