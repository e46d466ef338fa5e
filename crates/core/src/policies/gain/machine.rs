//! One machine that shares equally: when would each job end on it, and what would each get until
//! then?
//!
//! **Algorithm.** Every job has work left and a largest rate. Jobs that could go faster all run at
//! the same *level*; the others run at their largest rate. The level only rises (jobs end, no job
//! comes), so a job that reached its largest rate keeps it. Jobs at the level end in order of their
//! work, because the integral of the level is the same for all of them; the ends of the others are
//! known in advance. Each job passes through two queues: n log n.
//!
//! **Properties** (tests of that name): `conservation`; `alone_takes_its_work`;
//! `an_unusable_part_goes_to_the_others`.

use crate::sort::Key;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One job of the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Task {
    /// Work left; infinite if it is not known.
    pub(crate) left_core_s: f64,
    /// The largest work it can do in a second, above 0.
    pub(crate) rate: f64,
}

/// When one task ends, and what it was served.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TaskResult {
    /// Seconds from now to its end; infinite if it is not known.
    pub(crate) ends_s: f64,
    /// Work it gets done until the moment asked for.
    pub(crate) served_core_s: f64,
}

/// How much longer everything takes where jobs use a machine side by side: `1 + γ·(1 − Σu²)`, `u` a
/// job's part of what is used. `1 − Σu²` is the chance that a slice of time follows one of another
/// job.
pub(crate) fn slowdown(disturbance: f64, used: f64, squares: f64) -> f64 {
    if used > 0.0 { 1.0 + disturbance * (1.0 - squares / (used * used)).max(0.0) } else { 1.0 }
}

/// Simulates `tasks` on a machine that does `capacity` of work in a second while they do not
/// disturb each other: until all tasks finish, or for `until_s` seconds. `served_core_s` counts the work
/// within that time; unfinished tasks get `ends_s = ∞`.
pub(crate) fn run(tasks: &[Task], capacity: f64, disturbance: f64, until_s: Option<f64>) -> Vec<TaskResult> {
    let mut results = vec![TaskResult { ends_s: f64::INFINITY, served_core_s: 0.0 }; tasks.len()];
    // Heaps, because a short run looks at few of the jobs.
    let heap = |key: fn(&Task) -> f64| -> BinaryHeap<Reverse<(Key, usize)>> {
        tasks.iter().enumerate().map(|(i, t)| Reverse((Key(key(t)), i))).collect::<Vec<_>>().into()
    };
    let (mut by_left, mut by_rate) = (heap(|t| t.left_core_s.max(0.0)), heap(|t| t.rate));
    let mut at_rate: BinaryHeap<Reverse<(Key, usize)>> = BinaryHeap::new();
    // When a job reached its rate, and what it had got by then.
    let mut capped: Vec<Option<(f64, f64)>> = vec![None; tasks.len()];
    let mut ended = vec![false; tasks.len()];
    let (mut at_level, mut taken, mut squares) = (tasks.len(), 0.0, 0.0);
    // All rates shrink alike while jobs disturb each other, so the race is run on a clock of its
    // own (`now`) that the real one (`clock`) outruns. `integral`: what a job that was at the level
    // all the time has got; `mark`: `now` and `integral` when the time asked for is over.
    let (mut now, mut clock, mut integral, mut mark) = (0.0, 0.0, 0.0, None);
    loop {
        let mut level = if at_level > 0 { ((capacity - taken) / at_level as f64).max(0.0) } else { 0.0 };
        while let Some(&Reverse((_, i))) = by_rate.peek() {
            if ended[i] {
                by_rate.pop();
                continue;
            }
            if tasks[i].rate > level {
                break;
            }
            by_rate.pop();
            capped[i] = Some((now, integral));
            at_level -= 1;
            taken += tasks[i].rate;
            squares += tasks[i].rate * tasks[i].rate;
            at_rate.push(Reverse((Key(now + (tasks[i].left_core_s - integral).max(0.0) / tasks[i].rate), i)));
            level = if at_level > 0 { ((capacity - taken) / at_level as f64).max(0.0) } else { 0.0 };
        }
        while by_left.peek().is_some_and(|Reverse((_, i))| capped[*i].is_some()) {
            by_left.pop();
        }
        let next_level = by_left.peek().map_or(f64::INFINITY, |Reverse((Key(left), _))| {
            if level > 0.0 { now + (left - integral).max(0.0) / level } else { f64::INFINITY }
        });
        let next_capped = at_rate.peek().map_or(f64::INFINITY, |Reverse((Key(ends), _))| *ends);
        let next = next_level.min(next_capped);
        let many = at_level as f64;
        let slow = slowdown(disturbance, many * level + taken, many * level * level + squares);
        if let Some(until_s) = until_s.filter(|u| clock + (next - now) * slow >= *u) {
            let until = now + (until_s - clock) / slow;
            mark = Some((until, integral + (until - now) * level));
            break;
        }
        if next.is_infinite() {
            break;
        }
        integral += (next - now) * level;
        clock += (next - now) * slow;
        now = next;
        let queue = if next_level <= next_capped { &mut by_left } else { &mut at_rate };
        let Some(Reverse((_, i))) = queue.pop() else { break };
        ended[i] = true;
        results[i].ends_s = clock;
        if capped[i].is_some() {
            taken = (taken - tasks[i].rate).max(0.0);
            squares = (squares - tasks[i].rate * tasks[i].rate).max(0.0);
        } else {
            at_level -= 1;
        }
    }
    let (until, at_level) = mark.unwrap_or((now, integral));
    for ((fate, task), capped) in results.iter_mut().zip(tasks).zip(capped) {
        let got = match capped {
            Some((since, got)) if until > since => got + (until - since) * task.rate,
            _ => at_level,
        };
        fate.served_core_s = got.min(task.left_core_s.max(0.0));
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ends(tasks: &[(f64, f64)]) -> Vec<f64> {
        let tasks: Vec<Task> = tasks.iter().map(|&(left, rate)| Task { left_core_s: left, rate }).collect();
        run(&tasks, 1.0, 0.0, None).iter().map(|f| f.ends_s).collect()
    }

    fn close(a: &[f64], b: &[f64]) {
        assert!(
            a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-9 || x == y),
            "{a:?} is not {b:?}"
        );
    }

    #[test]
    fn alone_takes_its_work() {
        close(&ends(&[(12.0, 1.0)]), &[12.0]);
        close(&ends(&[(12.0, 0.5)]), &[24.0]);
        close(&ends(&[(0.0, 1.0)]), &[0.0]);
    }

    #[test]
    fn two_that_share() {
        // Both at one half until 20 s; then the longer one alone for its last 20.
        close(&ends(&[(10.0, 1.0), (30.0, 1.0)]), &[20.0, 40.0]);
        // A job that never ends keeps one half.
        close(&ends(&[(10.0, 1.0), (f64::INFINITY, 1.0)]), &[20.0, f64::INFINITY]);
    }

    #[test]
    fn an_unusable_part_goes_to_the_others() {
        // The first takes a fifth until 50 s; the second the rest until it has its 40.
        close(&ends(&[(10.0, 0.2), (40.0, 1.0)]), &[50.0, 50.0]);
        // Three at a third each until 15 s, when the first ends; then one of the others is held at
        // 0.4, the last gets 0.6.
        close(&ends(&[(5.0, 1.0), (9.0, 0.4), (11.0, 1.0)]), &[15.0, 25.0, 25.0]);
    }

    #[test]
    fn service_is_counted_until_the_moment_asked_for() {
        let tasks = [
            Task { left_core_s: 10.0, rate: 1.0 },
            Task { left_core_s: 30.0, rate: 1.0 },
            Task { left_core_s: 99.0, rate: 0.1 },
        ];
        let served = |t: f64| run(&tasks, 1.0, 0.0, Some(t)).iter().map(|f| f.served_core_s).collect::<Vec<_>>();
        close(&served(0.0), &[0.0, 0.0, 0.0]);
        close(&served(10.0), &[4.5, 4.5, 1.0]);
        close(&served(30.0), &[10.0, 17.0, 3.0]);
    }

    #[test]
    fn neighbours_disturb_each_other() {
        // Two at a half each take 1 + 0.4/2 as long; the longer one's last 20 are undisturbed.
        let tasks = [Task { left_core_s: 10.0, rate: 1.0 }, Task { left_core_s: 30.0, rate: 1.0 }];
        close(&run(&tasks, 1.0, 0.4, None).iter().map(|f| f.ends_s).collect::<Vec<_>>(), &[24.0, 44.0]);
        close(&run(&tasks, 1.0, 0.4, Some(12.0)).iter().map(|f| f.served_core_s).collect::<Vec<_>>(), &[5.0, 5.0]);
    }

    proptest! {
        #[test]
        fn conservation(
            jobs in prop::collection::vec((0.0f64..100.0, 0.05f64..=1.0), 1..12), capacity in 0.2f64..=1.0, until in 0.0f64..200.0,
        ) {
            let tasks: Vec<Task> = jobs.iter().map(|&(left, rate)| Task { left_core_s: left, rate }).collect();
            let ends = run(&tasks, capacity, 0.0, None);
            let mut results = run(&tasks, capacity, 0.0, Some(until));
            for (fate, end) in results.iter_mut().zip(ends) {
                prop_assert!(fate.ends_s.is_infinite() || fate.ends_s == end.ends_s);
                fate.ends_s = end.ends_s;
            }
            let served: f64 = results.iter().map(|f| f.served_core_s).sum();
            prop_assert!(served <= capacity * until + 1e-6);
            for (task, fate) in tasks.iter().zip(&results) {
                prop_assert!(fate.served_core_s <= task.left_core_s + 1e-9 && fate.served_core_s <= task.rate * until + 1e-9);
                prop_assert!(fate.ends_s >= task.left_core_s / task.rate - 1e-6);
                // A task that ended in time has got all its work; one that ends later has some
                // left.
                if fate.ends_s <= until - 1e-6 {
                    prop_assert!((fate.served_core_s - task.left_core_s).abs() < 1e-6);
                } else if fate.ends_s > until + 1e-3 {
                    prop_assert!(fate.served_core_s < task.left_core_s);
                }
            }
            // Nothing is left idle: when the last one ends, either it could not use more or the
            // machine was full.
            let widest = tasks.iter().map(|t| t.left_core_s / t.rate).fold(0.0, f64::max);
            let work: f64 = tasks.iter().map(|t| t.left_core_s).sum();
            let last = results.iter().map(|f| f.ends_s).fold(0.0, f64::max);
            prop_assert!(last <= widest + work / capacity + 1e-6);
        }
    }
}
