//! How many threads the parallel regions of each job have: the job's *team*.
//!
//! **Problem.** A team waits at the end of every region for its last thread. If all teams together have more threads
//! than the machine has cores, some threads share a core, and every team waits for them. On 16 cores (2026-11-17)
//! three PyTorch jobs with teams of 5, 5 and 5 make 46, 14 and 12 steps a second, with 6, 6 and 6 only 33, 15 and 13,
//! and with 16, 16 and 16 only 16, 11 and 10. The cores in use are the same 11 to 12 of 16 each time. What is idle on
//! average is not free: every team needs all of its cores at the same moment, and between these moments none.
//!
//! **How.**
//! 1. The team of a job is the number of cores that its share stands for. All teams together have at most as many
//!    threads as there are cores, with one thread for each job at least. A job that works on one core, or was never
//!    seen to do anything else, has at least two threads: with one thread its parallel work could not show.
//! 2. A job that works on one core (it imports libraries, loads data, validates) *lends* its other cores: the teams of
//!    the jobs that work in parallel grow by them, in proportion to their shares. The kernel's weights protect the
//!    lender meanwhile. Its own team stays as large as its share, because some libraries keep the size of their first
//!    region. As soon as it keeps more than [`SERIAL_CORES`] busy, it gets its cores back and lends none for [`PAUSE`].
//! 3. Teams stay as they are while no job's number of cores has moved by three quarters of a core, or a tenth. Where
//!    jobs with equal shares cannot have equal teams (16 cores for six jobs), they take turns of [`TURN`].
//! 4. A machine with fewer than [`CORES_PER_JOB`] cores for each job has no whole cores to deal out. Weights decide
//!    there, and each team is as large as its share, rounded.
//!
//! The daemon deals teams to its jobs, and a node agent to the pods of its node.
//!
//! **Terms.** *Busy*: the number of cores in use by one job, on average. *Serial*: the part of a job's work that runs
//! on one thread ([`crate::scaling`]).
//!
//! **Properties** (tests): `no_more_threads_than_cores`, `equal_jobs_take_turns`,
//! `a_job_that_works_on_one_core_lends_the_others`, `teams_stay_while_shares_hardly_move`,
//! `a_lender_gets_its_cores_back_at_once`.

use crate::model::{Span, Time};
use crate::scaling::serial_part;

/// A team changes when the share is this many cores away from it.
const DEADBAND_CORES: f64 = 0.75;

/// Large teams change when the share is such a part of the team away from it.
const DEADBAND_PART: f64 = 0.1;

/// With fewer cores for each job, weights decide instead of whole cores.
const CORES_PER_JOB: f64 = 2.0;

/// A job that keeps fewer cores busy works on one core. A team of two keeps about 1.8 cores busy.
const SERIAL_CORES: f64 = 1.5;

/// A team that keeps this part of its cores busy waits for nothing.
const ALL_BUSY: f64 = 0.9;

/// The cores that a lender keeps.
const KEPT_CORES: f64 = 2.0;

/// How long the larger one of two teams belongs to the same of two equal jobs.
pub const TURN: Span = Span::from_secs(5);

/// A job that needed its cores again keeps them for this long.
const PAUSE: Span = Span::from_secs(3);

/// Use is measured over at least this time.
const SHORTEST_MEASUREMENT: Span = Span::from_millis(800);

/// The use of a lender is measured over at least this time.
const SHORTEST_OF_LENDER: Span = Span::from_millis(200);

/// How many cores one job keeps busy, and how its work scales with its team.
#[derive(Debug, Clone, Default)]
pub struct TeamUse {
    since: Option<CpuReading>,
    is_measured: bool,
    is_serial: bool,
    lends_again: Time,
    serial: Option<f64>,
}

/// The CPU time of a job at one moment.
#[derive(Debug, Clone, Copy)]
struct CpuReading {
    at: Time,
    cpu_core_s: f64,
    team: u32,
}

impl TeamUse {
    /// Takes a reading of the job's CPU time, with the team that is in force. `is_scarce`: the machine has hardly an
    /// idle core, so that a job that uses little may be in the way of others.
    pub fn record(&mut self, at: Time, cpu_core_s: f64, team: u32, is_scarce: bool) {
        let reading = CpuReading { at, cpu_core_s, team };
        // Use with two different teams shows neither.
        let Some(since) = self.since.filter(|since| since.team == team) else {
            self.since = Some(reading);
            return;
        };
        let shortest = if self.is_serial { SHORTEST_OF_LENDER } else { SHORTEST_MEASUREMENT };
        let elapsed = at.since(since.at);
        if elapsed < shortest {
            return;
        }
        (self.since, self.is_measured) = (Some(reading), true);
        let busy = (cpu_core_s - since.cpu_core_s).max(0.0) / elapsed.as_secs_f64();
        let did_lend = self.is_serial;
        let may_lend = did_lend || (!is_scarce && at >= self.lends_again);
        self.is_serial = team >= 2 && busy < SERIAL_CORES && may_lend;
        if busy < SERIAL_CORES {
            return;
        }
        if did_lend {
            // A part of this time the job worked on one core, so that nothing can be measured.
            self.lends_again = at + PAUSE;
        } else if let Some(new) = serial_part(busy, team).filter(|_| !is_scarce || busy > ALL_BUSY * f64::from(team)) {
            self.serial = Some(self.serial.map_or(new, |old| 0.5 * (old + new)));
        }
    }

    /// Whether the job works on one core at the moment.
    pub fn is_serial(&self) -> bool {
        self.is_serial
    }

    /// Whether its use was measured yet. Every program begins on one core.
    pub fn is_measured(&self) -> bool {
        self.is_measured
    }

    /// The part of its work that runs on one thread, once the job was seen to work in parallel.
    pub fn serial(&self) -> Option<f64> {
        self.serial
    }
}

/// What the deal needs to know of one job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TeamClaim {
    /// The job's part of the machine.
    pub share: f64,
    /// The team in force; 0 before the first one.
    pub team: u32,
    /// The job works on one core and may lend the others.
    pub is_serial: bool,
    /// The job was never seen to work in parallel.
    pub is_new: bool,
}

impl TeamClaim {
    /// Whether the job has cores that others can use meanwhile.
    pub fn lends(&self, cores: f64) -> bool {
        self.is_serial && self.share * cores >= KEPT_CORES + 1.0
    }

    /// The smallest team for this job.
    fn least(&self) -> u32 {
        if self.is_serial || self.is_new { 2 } else { 1 }
    }
}

/// How many jobs a machine has whole cores for. With more jobs, weights decide, and teams together may have more
/// threads than there are cores.
pub fn jobs_with_whole_cores(cores: f64) -> usize {
    (cores / CORES_PER_JOB) as usize
}

/// The team of each job on a machine with `cores` cores. `turn` counts turns; within a turn teams may stay.
pub fn deal_teams(cores: f64, claims: &[TeamClaim], turn: usize, is_same_turn: bool) -> Vec<u32> {
    if claims.len() > jobs_with_whole_cores(cores) {
        return claims.iter().map(|claim| team_alone(claim.share * cores, claim.team)).collect();
    }
    let lends: Vec<bool> = claims.iter().map(|claim| claim.lends(cores)).collect();
    let lenders = || claims.iter().zip(&lends).filter(|(_, lends)| **lends).map(|(claim, _)| claim);
    let lent: f64 = lenders().map(|claim| claim.share * cores - KEPT_CORES).sum();
    let borrowing: f64 = claims.iter().filter(|claim| !claim.is_serial).map(|claim| claim.share).sum();
    let wanted_of = |claim: &TeamClaim| {
        let borrowed = if claim.is_serial || borrowing <= 0.0 { 0.0 } else { lent * claim.share / borrowing };
        (claim.share * cores + borrowed).max(f64::from(claim.least()))
    };
    let wanted: Vec<f64> = claims.iter().map(wanted_of).collect();
    // The team of a lender does not count, but the cores that it keeps do.
    let kept = KEPT_CORES as u32 * lenders().count() as u32;
    let room = ((cores + 0.25) as u32).saturating_sub(kept);
    let threads =
        |teams: &[u32]| -> u32 { teams.iter().zip(&lends).map(|(team, &lends)| if lends { 0 } else { *team }).sum() };
    let before: Vec<u32> = claims.iter().map(|claim| claim.team).collect();
    let are_close = before.iter().zip(&wanted).all(|(&team, &cores)| is_close(cores, team));
    if is_same_turn && are_close && threads(&before) <= room {
        return before;
    }
    let mut teams: Vec<u32> = wanted.iter().map(|cores| cores.round() as u32).collect();
    for _ in room..threads(&teams) {
        // The job that got most by rounding gives a thread back; of several, the one with the smallest share.
        let thousandths = |cores: f64| (cores * 1000.0).round() as i64;
        let key = |i: usize| {
            let surplus = thousandths(f64::from(teams[i]) - wanted[i]);
            (surplus, -thousandths(wanted[i]), (i + turn) % claims.len())
        };
        let candidates = (0..teams.len()).filter(|&i| !lends[i] && teams[i] > claims[i].least());
        let Some(i) = candidates.max_by_key(|&i| key(i)) else { break };
        teams[i] -= 1;
    }
    teams
}

/// The team for `cores` cores, without regard to other jobs.
fn team_alone(cores: f64, before: u32) -> u32 {
    if is_close(cores, before) { before } else { (cores.round() as u32).max(1) }
}

fn is_close(cores: f64, team: u32) -> bool {
    team > 0 && (cores - f64::from(team)).abs() < DEADBAND_CORES.max(DEADBAND_PART * f64::from(team))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claims(shares: &[f64]) -> Vec<TeamClaim> {
        shares.iter().map(|&share| TeamClaim { share, team: 0, is_serial: false, is_new: false }).collect()
    }

    #[test]
    fn each_team_has_the_cores_of_its_share() {
        let third = 1.0 / 3.0;
        for (shares, expected) in [
            (vec![1.0], vec![16]),
            (vec![third, third, third], vec![5, 5, 5]),
            (vec![0.5 * third, 0.5 * third, 2.0 * third], vec![3, 2, 11]),
            (vec![0.73, 0.267, 0.003], vec![11, 4, 1]),
            (vec![0.99, 0.005, 0.005], vec![14, 1, 1]),
        ] {
            assert_eq!(deal_teams(16.0, &claims(&shares), 0, true), expected, "{shares:?}");
        }
    }

    #[test]
    fn without_whole_cores_each_share_is_rounded() {
        for (cores, before, expected) in [
            (0.5, 0, 1),
            (2.0, 1, 2),
            (1.4, 1, 1),
            (1.4, 2, 2),
            (1.2, 2, 1),
            (0.5, 2, 1),
            (16.0, 5, 16),
            (15.0, 16, 16),
            (13.0, 16, 13),
            (0.01, 1, 1),
        ] {
            assert_eq!(team_alone(cores, before), expected, "{cores} cores, {before} before");
        }
        // Two jobs on two cores: weights give the first one 1.5 cores, which needs two threads.
        assert_eq!(deal_teams(2.0, &claims(&[0.75, 0.25]), 0, true), [2, 1]);
    }

    #[test]
    fn whole_cores_are_for_jobs_with_two_each() {
        for (cores, jobs) in [(0.5, 0), (1.0, 0), (2.0, 1), (3.9, 1), (4.0, 2), (16.0, 8), (128.0, 64)] {
            assert_eq!(jobs_with_whole_cores(cores), jobs, "{cores} cores");
        }
        // Two jobs on three cores have two threads each, on four cores as many as there are cores.
        assert_eq!(deal_teams(3.0, &claims(&[0.5, 0.5]), 0, true), [2, 2]);
        assert_eq!(deal_teams(4.0, &claims(&[0.6, 0.4]), 0, true), [2, 2]);
    }

    #[test]
    fn a_job_that_works_on_one_core_lends_the_others() {
        let mut jobs = claims(&[0.17, 0.17, 0.66]);
        jobs[2].is_serial = true;
        // The third keeps two cores, and its own team stays ready for its share.
        assert_eq!(deal_teams(16.0, &jobs, 0, true), [7, 7, 11]);
        jobs[1].is_serial = true;
        assert_eq!(deal_teams(16.0, &jobs, 0, true), [11, 3, 11], "a job with few cores lends none");
        jobs[0].is_serial = true;
        assert_eq!(deal_teams(16.0, &jobs, 0, true), [3, 3, 11], "no job can use what is lent");
    }

    #[test]
    fn a_job_of_unknown_work_has_two_threads() {
        let mut jobs = claims(&[0.99, 0.005, 0.005]);
        jobs[1].is_new = true;
        jobs[2].is_serial = true;
        assert_eq!(deal_teams(16.0, &jobs, 0, true), [12, 2, 2]);
    }

    #[test]
    fn equal_jobs_take_turns() {
        let mut jobs = claims(&[1.0 / 6.0; 6]);
        let mut threads = [0; 6];
        for turn in 0..6 {
            let teams = deal_teams(16.0, &jobs, turn, false);
            assert_eq!(teams.iter().sum::<u32>(), 16);
            for ((job, sum), team) in jobs.iter_mut().zip(&mut threads).zip(&teams) {
                (job.team, *sum) = (*team, *sum + team);
            }
            assert_eq!(deal_teams(16.0, &jobs, turn, true), teams, "within a turn they stay");
        }
        assert_eq!(threads, [16; 6]);
    }

    #[test]
    fn teams_stay_while_shares_hardly_move() {
        let mut jobs = claims(&[0.34, 0.66]);
        for (job, team) in jobs.iter_mut().zip([5, 11]) {
            job.team = team;
        }
        assert_eq!(deal_teams(16.0, &jobs, 0, true), [5, 11]);
        for (share, job) in [0.37, 0.63].into_iter().zip(&mut jobs) {
            job.share = share;
        }
        assert_eq!(deal_teams(16.0, &jobs, 0, true), [6, 10]);
        // Earlier teams that are together too large do not stay.
        for (job, team) in jobs.iter_mut().zip([6, 11]) {
            job.team = team;
        }
        assert_eq!(deal_teams(16.0, &jobs, 0, true), [6, 10]);
    }

    fn at(seconds: f64) -> Time {
        Time::from_secs_f64(seconds)
    }

    #[test]
    fn a_lender_gets_its_cores_back_at_once() {
        let mut job = TeamUse::default();
        job.record(at(10.0), 100.0, 5, false);
        job.record(at(10.5), 100.5, 5, false);
        assert!(!job.is_measured() && !job.is_serial() && job.serial().is_none(), "too short a time");
        job.record(at(11.0), 101.0, 5, false);
        assert!(job.is_measured() && job.is_serial() && job.serial().is_none());
        job.record(at(11.25), 102.0, 5, false);
        assert!(!job.is_serial() && job.serial().is_none(), "four cores are busy, for a part of the time");
        job.record(at(12.25), 106.0, 5, false);
        assert!(job.serial().is_some_and(|serial| (serial - 0.0625).abs() < 1e-9), "{job:?}");
        job.record(at(13.25), 107.0, 5, false);
        assert!(!job.is_serial(), "it keeps its cores for a while");
        job.record(at(14.5), 108.0, 5, false);
        assert!(job.is_serial() && job.serial().is_some(), "what is known of its parallel work stays");
    }

    #[test]
    fn use_says_nothing_on_a_full_machine_and_with_changing_teams() {
        let mut job = TeamUse::default();
        for second in 0..10 {
            job.record(at(f64::from(second)), 3.0 * f64::from(second), 4, true);
        }
        assert_eq!(job.serial(), None);
        let mut crowded = TeamUse::default();
        for second in 0..10 {
            crowded.record(at(f64::from(second)), 1.2 * f64::from(second), 2, true);
        }
        assert!(!crowded.is_serial());
        for second in 10..20 {
            job.record(at(f64::from(second)), 3.0 * f64::from(second), 3 + second % 2, false);
        }
        assert!(job.serial().is_none() && !job.is_serial());
        // One thread can keep one core busy and no more.
        for second in 20..30 {
            job.record(at(f64::from(second)), 60.0 + f64::from(second), 1, false);
        }
        assert!(job.serial().is_none() && !job.is_serial());
        // A team that is busy all the time waits for nothing, on a full machine, too.
        for second in 30..33 {
            job.record(at(f64::from(second)), 3.9 * f64::from(second), 4, true);
        }
        assert!(job.serial().is_some_and(|serial| serial < 0.01), "{job:?}");
    }

    proptest! {
        #[test]
        fn no_more_threads_than_cores(
            jobs in prop::collection::vec((0.001f64..1.0, 0u32..20, any::<bool>(), any::<bool>()), 1..9),
            cores in 16u32..130,
        ) {
            let sum: f64 = jobs.iter().map(|job| job.0).sum();
            let claims: Vec<TeamClaim> = jobs
                .iter()
                .map(|&(part, team, is_serial, is_new)| TeamClaim { share: part / sum, team, is_serial, is_new })
                .collect();
            let cores = f64::from(cores);
            let teams = deal_teams(cores, &claims, 0, true);
            prop_assert!(teams.iter().all(|&team| team >= 1));
            let threads = |(claim, team): (&TeamClaim, &u32)| if claim.lends(cores) { KEPT_CORES as u32 } else { *team };
            let all: u32 = claims.iter().zip(&teams).map(threads).sum();
            prop_assert!(all <= cores as u32, "{teams:?} of {claims:?}");
        }
    }
}
