//! How the tasks of one job divide what the job has: on one machine, where a job has a share and its tasks have none.
//!
//! **Problem.** Servers and workers of a job on one machine compete with each other. The kernel gives equal tasks equal
//! parts, whatever each has to do for a step. A server that has too little holds up all workers.
//!
//! **How.** The speed model is the operator's ([`crate::signal::parameter_server`]), and so is the measurement. Of the
//! time of a step, two terms depend on the division: `A/W + max(b/s)`. `A` and `b` are the CPU time of all workers and
//! of each server for a step, `W` and `s` their parts, which sum to 1. A little more for the workers saves as much as
//! it costs the servers if `W : S` is as the roots of `A` and `B`, where `B` is the sum of `b`. Each server has its
//! part of `S` by its own `b`. Workers get equal parts: one that is starved also computes less, so its use does not
//! show its need.
//!
//! **No thrash.** What a step costs does not depend on the division, so a change does not bring about the next one. A
//! task at most doubles or halves at once. A change is made if the two terms become shorter by a twentieth. It is on
//! trial for one measurement: one after which the job is slower by [`TOLERATED_LOSS`] is taken back, and the job is
//! left alone for [`REST`] measurements. If the share of the job has changed meanwhile, the trial is dropped. Nothing
//! changes for a job that reports no steps.
//!
//! **Properties**, each a test: `a_hot_server_gets_more_and_the_job_is_faster`, `no_other_division_is_faster`,
//! `no_task_falls_below_the_floor`, `a_settled_job_is_left_alone`, `what_made_the_job_slower_is_taken_back`,
//! `no_steps_no_change`.

use super::load::{JobMemory, Load};
use crate::model::{Span, Time};
use crate::tasks::{TaskId, TaskReason, TaskRole, TrainingMode};

/// One measurement, if the job makes enough steps in it.
const INTERVAL: Span = Span::from_secs(10);
const LONGEST_INTERVAL: Span = Span::from_secs(160);
/// Fewer steps than this are too few to compare speeds.
const LEAST_STEPS: f64 = 8.0;
/// A task keeps at least this part of an equal part.
const LEAST_PART: f64 = 0.25;
/// A task at most doubles or halves at once.
const FACTOR: f64 = 2.0;
/// A change that promises less than this is not worth making.
const LEAST_SPEEDUP: f64 = 0.05;
const TOLERATED_LOSS: f64 = 0.03;
const REST: u64 = 10;
/// A share of the job that has changed by this part is another share.
const SAME_SHARE: f64 = 0.1;

/// The CPU time of a task since its start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TaskUse {
    pub id: TaskId,
    pub cpu_s: f64,
}

/// The parts of the tasks of one job, and what is remembered to decide about them.
#[derive(Debug, Clone)]
pub struct Division {
    memory: JobMemory,
    /// By task; they sum to 1.
    parts: Vec<(TaskId, f64)>,
    why: TaskReason,
    interval: Span,
    trial: Option<DivisionTrial>,
    rest_until: Time,
}

/// A change whose effect is still to be judged.
#[derive(Debug, Clone)]
struct DivisionTrial {
    before: Vec<(TaskId, f64)>,
    /// The smallest speed with which the change may stay.
    speed_wanted: f64,
    /// The job's share at the change.
    share: f64,
}

impl Division {
    /// A job whose tasks have these parts now, in any unit.
    pub fn new(parts: &[(TaskId, f64)]) -> Division {
        let mut parts = parts.to_vec();
        parts.sort_by_key(|(id, _)| *id);
        let is_sound = parts.iter().all(|(_, part)| part.is_finite() && *part > 0.0);
        let sum: f64 = parts.iter().map(|(_, part)| part).sum();
        let equal = 1.0 / parts.len().max(1) as f64;
        parts.iter_mut().for_each(|(_, part)| *part = if is_sound { *part / sum } else { equal });
        Division {
            memory: JobMemory::new(TrainingMode::Sync),
            parts,
            why: TaskReason::NotYetMeasured,
            interval: INTERVAL,
            trial: None,
            rest_until: Time::ZERO,
        }
    }

    /// The part of each task, sorted by task.
    pub fn parts(&self) -> &[(TaskId, f64)] {
        &self.parts
    }

    pub fn why(&self) -> TaskReason {
        self.why
    }

    /// Whether these are the tasks that are divided.
    pub fn is_of(&self, tasks: &[TaskUse]) -> bool {
        self.parts.len() == tasks.len() && self.parts.iter().zip(tasks).all(|((id, _), task)| *id == task.id)
    }

    /// Takes in the counters of the tasks, sorted by task, and the steps of the job. `share` is the part of the machine
    /// that the job has. Returns whether parts have changed.
    pub fn decide(&mut self, now: Time, share: f64, steps: f64, tasks: &[TaskUse]) -> bool {
        if !self.is_of(tasks) || !share.is_finite() || !steps.is_finite() {
            return false;
        }
        let counters = self.parts.iter().zip(tasks).map(|((id, part), task)| (*id, *part, task.cpu_s)).collect();
        self.memory.load = None;
        self.memory.measure_tasks(self.interval, now, steps, counters);
        let Some(load) = self.memory.load.take() else { return false };
        if load.steps_per_s * self.interval.as_secs_f64() < LEAST_STEPS {
            self.interval = Span(self.interval.0.saturating_mul(2)).min(LONGEST_INTERVAL);
            return false;
        }
        let is_same_share = |trial: &DivisionTrial| (trial.share - share).abs() <= SAME_SHARE * trial.share.max(share);
        if let Some(trial) = self.trial.take().filter(is_same_share)
            && load.steps_per_s < trial.speed_wanted
        {
            self.rest_until = now + Span(self.interval.0.saturating_mul(REST));
            (self.parts, self.why) = (trial.before, TaskReason::TakenBack);
            return true;
        }
        if now < self.rest_until {
            return false;
        }
        let is_worth_it = |better: &Vec<(TaskId, f64)>| {
            step_time(&load, &self.parts) >= (1.0 + LEAST_SPEEDUP) * step_time(&load, better)
        };
        let Some(better) = optimum(&load, &self.parts).filter(is_worth_it) else {
            self.why = TaskReason::Settled;
            return false;
        };
        self.why = reason(&self.parts, &better);
        let before = std::mem::replace(&mut self.parts, better);
        self.trial = Some(DivisionTrial { before, speed_wanted: load.steps_per_s * (1.0 - TOLERATED_LOSS), share });
        true
    }
}

/// The two terms of a step's time that depend on the division, in any unit.
fn step_time(load: &Load, parts: &[(TaskId, f64)]) -> f64 {
    let of_role = |role| load.tasks.iter().zip(parts).filter(move |(task, _)| task.id.role == role);
    let work: f64 = of_role(TaskRole::Worker).map(|(task, _)| task.used_cores).sum();
    let workers: f64 = of_role(TaskRole::Worker).map(|(_, (_, part))| part).sum();
    let serve = of_role(TaskRole::Server).map(|(task, (_, part))| task.used_cores / part).fold(0.0, f64::max);
    work / workers + serve
}

/// The parts with which a step is shortest, not too far from those of now. `None` for a job without servers or workers,
/// and for one that used nothing.
fn optimum(load: &Load, now: &[(TaskId, f64)]) -> Option<Vec<(TaskId, f64)>> {
    let sum = |role| load.of_role(role).map(|task| task.used_cores).sum::<f64>();
    let (workers_cpu, servers_cpu) = (sum(TaskRole::Worker), sum(TaskRole::Server));
    let workers = load.of_role(TaskRole::Worker).count() as f64;
    if !(workers_cpu > 0.0 && servers_cpu > 0.0) {
        return None;
    }
    let both = workers_cpu.sqrt() + servers_cpu.sqrt();
    let wanted = load.tasks.iter().zip(now).map(|(task, (id, now))| {
        let part = match id.role {
            TaskRole::Worker => workers_cpu.sqrt() / both / workers,
            TaskRole::Server => servers_cpu.sqrt() / both * task.used_cores / servers_cpu,
        };
        (*id, part.clamp(now / FACTOR, now * FACTOR))
    });
    Some(with_floor(wanted.collect()))
}

/// The same parts, with sum 1 and none below the floor.
fn with_floor(mut parts: Vec<(TaskId, f64)>) -> Vec<(TaskId, f64)> {
    let floor = LEAST_PART / parts.len().max(1) as f64;
    let sum: f64 = parts.iter().map(|(_, part)| part).sum();
    parts.iter_mut().for_each(|(_, part)| *part = if sum > 0.0 { *part / sum } else { 0.0 });
    // What small tasks lack is taken from what the others have above the floor.
    let above: f64 = parts.iter().map(|(_, part)| (part - floor).max(0.0)).sum();
    let spare = 1.0 - floor * parts.len() as f64;
    for (_, part) in &mut parts {
        *part = floor + (*part - floor).max(0.0) * if above > 0.0 { spare / above } else { 0.0 };
    }
    parts
}

/// Which tasks get more, in the words of the operator.
fn reason(before: &[(TaskId, f64)], after: &[(TaskId, f64)]) -> TaskReason {
    let growth = |at: usize| after[at].1 / before[at].1;
    let servers: Vec<usize> = (0..before.len()).filter(|at| before[*at].0.role == TaskRole::Server).collect();
    let sum = |parts: &[(TaskId, f64)]| servers.iter().map(|at| parts[*at].1).sum::<f64>();
    let mut by_growth = servers.clone();
    by_growth.sort_by(|a, b| growth(*b).total_cmp(&growth(*a)));
    match by_growth[..] {
        [hot, next, ..] if growth(hot) > 1.0 && growth(next) < 0.67 * growth(hot) => {
            TaskReason::HotServer { index: before[hot].0.index }
        }
        _ if sum(after) > sum(before) => TaskReason::ServersStarved,
        _ => TaskReason::WorkersStarved,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job that behaves as the model says: CPU time for a step of all workers, and of each server.
    struct TrueJob {
        work: f64,
        serve: Vec<f64>,
        workers: usize,
        division: Division,
        cpu_s: Vec<f64>,
        steps: f64,
        now_s: f64,
        /// The true speed is multiplied by it.
        luck: f64,
    }

    impl TrueJob {
        fn new(work: f64, serve: &[f64], workers: usize) -> TrueJob {
            let ids = ids(serve.len(), workers);
            let division = Division::new(&ids.iter().map(|id| (*id, 7.0)).collect::<Vec<_>>());
            let cpu_s = vec![0.0; ids.len()];
            TrueJob { work, serve: serve.to_vec(), workers, division, cpu_s, steps: 0.0, now_s: 0.0, luck: 1.0 }
        }

        fn speed_with(&self, parts: &[(TaskId, f64)]) -> f64 {
            let servers = self.serve.len();
            let slowest = parts[servers..].iter().map(|(_, part)| *part).fold(f64::INFINITY, f64::min);
            let serve = self.serve.iter().zip(parts).map(|(cost, (_, part))| cost / part).fold(0.0, f64::max);
            self.luck / (self.work / (slowest * self.workers as f64) + serve)
        }

        fn speed(&self) -> f64 {
            self.speed_with(self.division.parts())
        }

        /// Lets a second pass. Returns whether parts have changed.
        fn second(&mut self) -> bool {
            let made = self.speed();
            self.steps += made;
            self.now_s += 1.0;
            for at in 0..self.cpu_s.len() {
                let cost = self.serve.get(at).copied().unwrap_or(self.work / self.workers as f64);
                self.cpu_s[at] += made * cost;
            }
            let ids = ids(self.serve.len(), self.workers);
            let uses: Vec<TaskUse> =
                ids.iter().zip(&self.cpu_s).map(|(id, cpu_s)| TaskUse { id: *id, cpu_s: *cpu_s }).collect();
            self.division.decide(Time::from_secs_f64(self.now_s), 0.5, self.steps, &uses)
        }

        fn run(&mut self, seconds: usize) -> usize {
            (0..seconds).filter(|_| self.second()).count()
        }
    }

    fn ids(servers: usize, workers: usize) -> Vec<TaskId> {
        let servers = (0..servers as u32).map(TaskId::server);
        servers.chain((0..workers as u32).map(TaskId::worker)).collect()
    }

    fn part(job: &TrueJob, id: TaskId) -> f64 {
        job.division.parts().iter().find(|(one, _)| *one == id).unwrap().1
    }

    #[test]
    fn a_hot_server_gets_more_and_the_job_is_faster() {
        let mut job = TrueJob::new(0.02, &[0.004, 0.04], 3);
        let before = job.speed();
        assert_eq!(job.run(12), 1);
        assert_eq!(job.division.why(), TaskReason::HotServer { index: 1 });
        job.run(100);
        assert!(part(&job, TaskId::server(1)) > 2.0 * part(&job, TaskId::server(0)), "{:?}", job.division.parts());
        assert!(job.speed() > 1.4 * before, "{before} {}", job.speed());
    }

    #[test]
    fn no_other_division_is_faster() {
        for (work, serve, workers) in [(0.1, vec![0.02], 2), (0.01, vec![0.05, 0.01], 3), (0.05, vec![0.05, 0.05], 2)] {
            let mut job = TrueJob::new(work, &serve, workers);
            job.run(300);
            let ours = job.speed();
            let mut seed = 7_u64;
            for _ in 0..20_000 {
                let mut random = || {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (seed >> 33) as f64 / (1_u64 << 31) as f64
                };
                let other = with_floor(job.division.parts().iter().map(|(id, _)| (*id, random())).collect());
                let other_speed = job.speed_with(&other);
                // The last twentieth is not worth a change.
                assert!(other_speed <= ours * (1.0 + 1.1 * LEAST_SPEEDUP), "{ours} {other_speed} {other:?}");
            }
        }
    }

    #[test]
    fn no_task_falls_below_the_floor() {
        let mut job = TrueJob::new(0.1, &[1e-9, 1e-9], 2);
        job.run(600);
        let sum: f64 = job.division.parts().iter().map(|(_, part)| part).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{sum}");
        assert!(
            job.division.parts().iter().all(|(_, part)| *part >= LEAST_PART / 4.0 - 1e-9),
            "{:?}",
            job.division.parts()
        );
    }

    #[test]
    fn a_settled_job_is_left_alone() {
        let mut job = TrueJob::new(0.02, &[0.004, 0.04], 3);
        assert!(job.run(200) <= 4);
        assert_eq!((job.run(600), job.division.why()), (0, TaskReason::Settled));
    }

    #[test]
    fn what_made_the_job_slower_is_taken_back() {
        let mut job = TrueJob::new(0.02, &[0.004, 0.04], 3);
        assert_eq!(job.run(12), 1);
        let equal = 1.0 / 5.0;
        assert!((part(&job, TaskId::server(1)) - equal).abs() > 0.05);
        job.luck = 0.3;
        assert_eq!(job.run(12), 1);
        assert_eq!(job.division.why(), TaskReason::TakenBack);
        assert!((part(&job, TaskId::server(1)) - equal).abs() < 1e-9, "{:?}", job.division.parts());
        assert_eq!(job.run(80), 0, "it rests");
    }

    #[test]
    fn no_steps_no_change() {
        let mut job = TrueJob::new(0.02, &[0.004, 0.04], 3);
        job.luck = 1e-6;
        assert_eq!(job.run(600), 0);
        let mut alone = TrueJob::new(0.02, &[], 3);
        assert_eq!(alone.run(60), 0, "no servers");
        let uses = [TaskUse { id: TaskId::server(0), cpu_s: 0.0 }, TaskUse { id: TaskId::worker(0), cpu_s: f64::NAN }];
        let mut division = Division::new(&[(TaskId::worker(0), f64::NAN), (TaskId::server(0), 1.0)]);
        for second in 0..60_u32 {
            let now = Time::from_secs_f64(f64::from(second));
            assert!(!division.decide(now, 0.5, f64::from(second) * 10.0, &uses), "a counter that is no number");
        }
        assert_eq!(division.parts(), [(TaskId::server(0), 0.5), (TaskId::worker(0), 0.5)]);
    }
}
