//! One machine whose cores are shared equally by jobs with teams of threads: when would each job end on it, and what
//! would each get until then?
//!
//! **Problem.** A further core brings such a job less than the first one did ([`crate::scaling`]). Three jobs with a
//! third of the cores each do more together than one job with all of them. What the machine does in a second depends on
//! how many jobs are left, and [`machine`] knows no such machines. With its ends, jobs on many cores were promised more
//! than equal shares give. Every job was then late, and the order of deadlines replaced the order of gain.
//!
//! **Algorithm.** Every job has an equal part of the cores, or the most that it can use; the others share the rest.
//! The speed of a job follows from its cores. When a job ends, the cores are dealt out again: n² steps for n jobs.
//!
//! **Properties** (tests): `with_one_core_for_each_job_both_machines_agree`, `jobs_that_remain_get_the_cores`,
//! `a_job_on_one_core_leaves_the_others`, `time_can_be_cut`.

use super::machine::{TaskResult, slowdown};
use crate::scaling::speed;
use serde::{Deserialize, Serialize};

/// How a job gains from further cores, as the driver measured it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct TeamUse {
    /// The part of its work on one thread, once that was measured.
    pub(crate) serial: Option<f64>,
    /// The job works on one core at the moment.
    pub(crate) on_one_core: bool,
}

/// The cores that a job keeps which works on one of them and lends the others, as the drivers deal teams out.
const KEPT_CORES: f64 = 2.0;

/// With fewer cores for each job, weights decide instead of whole cores, and a job on one core leaves all others.
const CORES_PER_JOB: f64 = 2.0;

/// The cores that a job on one core keeps, where each job has an equal part of `cores` cores.
pub(crate) fn kept_cores(cores: f64) -> f64 {
    if cores < CORES_PER_JOB {
        1.0
    } else if cores < KEPT_CORES + 1.0 {
        cores
    } else {
        KEPT_CORES
    }
}

/// What the jobs of one node lend to each other.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Lending {
    lent: f64,
    /// The cores of the jobs that borrow.
    borrowing: f64,
}

impl Lending {
    /// Adds a job whose share is `own` cores, on a node with `each` cores for each job.
    pub(crate) fn add(&mut self, own: f64, on_one_core: bool, each: f64) {
        if !on_one_core {
            self.borrowing += own;
        } else if each >= CORES_PER_JOB && own >= KEPT_CORES + 1.0 {
            self.lent += own - KEPT_CORES;
        }
    }

    /// The cores of a job whose share is `own` cores, with what it borrows.
    pub(crate) fn cores(&self, own: f64, on_one_core: bool) -> f64 {
        if on_one_core || self.borrowing <= 0.0 { own } else { own + self.lent * own / self.borrowing }
    }
}

/// One job of the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TeamTask {
    /// Work left, in seconds of one core; infinite if it is not known.
    pub(crate) left_core_s: f64,
    /// The most cores that it takes.
    pub(crate) most: f64,
    /// How its speed follows its cores; `None` if every core brings the same.
    pub(crate) team: Option<TeamUse>,
}

impl TeamUse {
    /// The speed of the job on `cores`, where one core has 1.
    pub(crate) fn speed(&self, cores: f64) -> f64 {
        if self.on_one_core { cores.min(1.0) } else { speed(self.serial, cores) }
    }
}

impl TeamTask {
    fn speed(&self, cores: f64) -> f64 {
        self.team.map_or(cores, |team| team.speed(cores))
    }
}

/// Runs `tasks` on a machine with `cores` until all have ended, or for `until_s` seconds. `served_core_s` counts the
/// work within that time; tasks that have not ended by then get `ends_s = ∞`.
pub(crate) fn run(tasks: &[TeamTask], cores: f64, disturbance: f64, until_s: Option<f64>) -> Vec<TaskResult> {
    let mut results = vec![TaskResult { ends_s: f64::INFINITY, served_core_s: 0.0 }; tasks.len()];
    let mut open: Vec<usize> = (0..tasks.len()).collect();
    // Those that take least come first, so that what they leave is known when the others get their part.
    open.sort_by(|&a, &b| tasks[a].most.total_cmp(&tasks[b].most));
    let mut clock = 0.0;
    while !open.is_empty() {
        let (mut left, mut used, mut squares) = (cores, 0.0, 0.0);
        let mut speeds = Vec::with_capacity(open.len());
        for (place, &i) in open.iter().enumerate() {
            let part = (left / (open.len() - place) as f64).min(tasks[i].most).max(0.0);
            (left, used, squares) = (left - part, used + part, squares + part * part);
            speeds.push(tasks[i].speed(part));
        }
        let slow = slowdown(disturbance, used, squares);
        let needs_s = |(&i, speed): (&usize, &f64)| {
            let rest = (tasks[i].left_core_s - results[i].served_core_s).max(0.0);
            if rest > 0.0 { rest * slow / speed } else { 0.0 }
        };
        let needs: Vec<f64> = open.iter().zip(&speeds).map(needs_s).collect();
        let first_s = needs.iter().copied().fold(f64::INFINITY, f64::min);
        let cut_s = until_s.map_or(f64::INFINITY, |until_s| (until_s - clock).max(0.0));
        let step_s = first_s.min(cut_s);
        if step_s.is_infinite() {
            break;
        }
        clock += step_s;
        for ((&i, speed), needs_s) in open.iter().zip(&speeds).zip(&needs) {
            if *needs_s <= step_s {
                results[i] = TaskResult { ends_s: clock, served_core_s: tasks[i].left_core_s.max(0.0) };
            } else {
                results[i].served_core_s += speed * step_s / slow;
            }
        }
        if cut_s <= first_s {
            break;
        }
        // A task that ends after more seconds than a number holds has ended all the same.
        let mut ends = needs.iter().map(|needs_s| *needs_s <= step_s);
        open.retain(|_| !ends.next().unwrap_or(false));
    }
    results
}

#[cfg(test)]
mod tests {
    use super::super::machine::{self, Task};
    use super::*;
    use proptest::prelude::*;

    const PARALLEL: Option<TeamUse> = Some(TeamUse { serial: Some(0.1), on_one_core: false });
    const IMPORTS: Option<TeamUse> = Some(TeamUse { serial: None, on_one_core: true });

    fn task(left: f64, team: Option<TeamUse>) -> TeamTask {
        TeamTask { left_core_s: left, most: f64::INFINITY, team }
    }

    fn ends(tasks: &[TeamTask], cores: f64) -> Vec<f64> {
        run(tasks, cores, 0.0, None).iter().map(|fate| fate.ends_s).collect()
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9 * expected.max(1.0), "{found} and not {expected}");
    }

    #[test]
    fn jobs_that_remain_get_the_cores() {
        let (half, whole) = (speed(Some(0.1), 8.0), speed(Some(0.1), 16.0));
        assert!(whole < 1.4 * half, "the last cores bring little");
        let found = ends(&[task(40.0, PARALLEL), task(20.0, PARALLEL)], 16.0);
        close(found[1], 20.0 / half);
        close(found[0], 20.0 / half + 20.0 / whole);
        // The machine without teams would end both sooner: it expects as much of one job as of two.
        let tasks = [Task { left_core_s: 40.0, rate: whole }, Task { left_core_s: 20.0, rate: whole }];
        let without = machine::run(&tasks, 2.0 * half, 0.0, None);
        assert!(without[0].ends_s <= found[0] + 1e-9, "{without:?} and {found:?}");
    }

    #[test]
    fn a_job_on_one_core_leaves_the_others() {
        let at_once = |most: f64| [task(30.0, PARALLEL), TeamTask { most, ..task(f64::INFINITY, IMPORTS) }];
        let served = |most: f64| run(&at_once(most), 16.0, 0.0, Some(2.0));
        close(served(1.0)[0].served_core_s, 2.0 * speed(Some(0.1), 15.0));
        close(served(1.0)[1].served_core_s, 2.0);
        // With an equal part of the cores it still does the work of one.
        close(served(f64::INFINITY)[0].served_core_s, 2.0 * speed(Some(0.1), 8.0));
        close(served(f64::INFINITY)[1].served_core_s, 2.0);
        let found = ends(&at_once(f64::INFINITY), 16.0);
        close(found[0], 30.0 / speed(Some(0.1), 8.0));
        assert_eq!(found[1], f64::INFINITY, "unknown");
    }

    #[test]
    fn no_tasks_and_no_cores() {
        assert!(run(&[], 16.0, 0.0, None).is_empty());
        assert_eq!(ends(&[task(0.0, PARALLEL)], 16.0), [0.0]);
        assert_eq!(ends(&[task(1.0, PARALLEL)], 0.0), [f64::INFINITY], "a machine without cores");
    }

    #[test]
    fn work_that_takes_longer_than_a_number_holds_comes_to_an_end() {
        let found = ends(&[task(0.8e308, PARALLEL), task(1.77e308, PARALLEL)], 1.0);
        assert!(found[0].is_finite() && found[1].is_infinite(), "{found:?}");
    }

    proptest! {
        /// With less than a core for each job, cores are shared by time.
        #[test]
        fn with_one_core_for_each_job_both_machines_agree(
            left in prop::collection::vec(0.1f64..100.0, 2..9), disturbance in 0.0f64..0.5,
        ) {
            let tasks: Vec<Task> = left.iter().map(|&left| Task { left_core_s: left, rate: 1.0 }).collect();
            let teams = left.iter().map(|&left| TeamTask { most: 1.0, ..task(left, PARALLEL) });
            let teams: Vec<TeamTask> = teams.collect();
            let (one, other) = (machine::run(&tasks, 2.0, disturbance, None), run(&teams, 2.0, disturbance, None));
            for (a, b) in one.iter().zip(&other) {
                prop_assert!((a.ends_s - b.ends_s).abs() < 1e-6 * a.ends_s.max(1.0), "{one:?} and {other:?}");
            }
        }

        /// What is served until a moment and what is left then take as long as all at once.
        #[test]
        fn time_can_be_cut(
            left in prop::collection::vec((0.1f64..100.0, 0.0f64..0.5), 1..7),
            cores in 1.0f64..64.0,
            cut in 0.0f64..1.0,
        ) {
            let team = |serial: f64| Some(TeamUse { serial: Some(serial), on_one_core: false });
            let tasks: Vec<TeamTask> = left.iter().map(|&(left, serial)| task(left, team(serial))).collect();
            let all = ends(&tasks, cores);
            let until_s = cut * all.iter().copied().fold(0.0, f64::max);
            let served = run(&tasks, cores, 0.0, Some(until_s));
            let rest = tasks.iter().zip(&served).filter(|(_, fate)| fate.ends_s.is_infinite());
            let rest = rest.map(|(task, fate)| TeamTask { left_core_s: task.left_core_s - fate.served_core_s, ..*task });
            let rest: Vec<TeamTask> = rest.collect();
            let open = all.iter().zip(&served).filter(|(_, fate)| fate.ends_s.is_infinite()).map(|(end, _)| *end);
            for (end, later) in open.zip(ends(&rest, cores)) {
                prop_assert!((until_s + later - end).abs() < 1e-6 * end.max(1.0), "{end} and {later} after {until_s}");
            }
        }
    }
}
