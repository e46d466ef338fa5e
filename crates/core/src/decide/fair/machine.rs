//! One machine that shares equally: when would each job end on it, and what would each get until then?
//!
//! **Algorithm.** Every job has work left and a most it can use. All that can use more run at the same *level*, the others at their most. The level
//! only rises (jobs end, nobody comes), so a job that reached its most stays there. Jobs at the level end in order of their work, because the
//! integral of the level is the same for all of them; jobs at their most end at times known in advance. Each job passes through two queues: n log n.
//!
//! **Properties** (tests of that name): `conservation`; `alone_takes_its_work`; `an_unusable_part_goes_to_the_others`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One job of the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Task {
    /// Work left; infinite if nobody knows.
    pub(crate) left: f64,
    /// The most work it can do in a second, above 0.
    pub(crate) most: f64,
}

/// What became of one task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Fate {
    /// Seconds from now to its end; infinite if nobody knows.
    pub(crate) ends_s: f64,
    /// Work it gets done until the moment asked for.
    pub(crate) served: f64,
}

/// Total order for finite and infinite numbers that are not NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Key(f64);

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Key) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Runs `tasks` on a machine that does `capacity` of work in a second to their ends; `served` counts what each gets within the first `until_s` seconds.
pub(crate) fn run(tasks: &[Task], capacity: f64, until_s: f64) -> Vec<Fate> {
    let mut fates = vec![Fate { ends_s: f64::INFINITY, served: 0.0 }; tasks.len()];
    let mut by_left: BinaryHeap<Reverse<(Key, usize)>> = BinaryHeap::with_capacity(tasks.len());
    let mut by_most: Vec<usize> = (0..tasks.len()).collect();
    by_most.sort_by(|&a, &b| tasks[b].most.total_cmp(&tasks[a].most));
    by_left.extend(tasks.iter().enumerate().map(|(i, t)| Reverse((Key(t.left.max(0.0)), i))));
    let mut at_most: BinaryHeap<Reverse<(Key, usize)>> = BinaryHeap::new();
    let mut capped = vec![false; tasks.len()];
    let mut ended = vec![false; tasks.len()];
    let (mut at_level, mut taken) = (tasks.len(), 0.0);
    // `integral`: what a job that was at the level all the time has got; `marked`: the same at `until_s`.
    let (mut now, mut integral, mut marked) = (0.0, 0.0, None);
    loop {
        let mut level = if at_level > 0 { ((capacity - taken) / at_level as f64).max(0.0) } else { 0.0 };
        while let Some(&i) = by_most.last() {
            if ended[i] {
                by_most.pop();
                continue;
            }
            if tasks[i].most > level {
                break;
            }
            by_most.pop();
            capped[i] = true;
            at_level -= 1;
            taken += tasks[i].most;
            let ends = now + (tasks[i].left - integral).max(0.0) / tasks[i].most;
            at_most.push(Reverse((Key(ends), i)));
            // What it got until now, and what it will get until it ends or the moment asked for comes.
            let until = ends.min(until_s);
            fates[i].served = integral.min(tasks[i].left) + (until - now).max(0.0) * tasks[i].most;
            if now > until_s {
                fates[i].served = marked.unwrap_or(0.0f64).min(tasks[i].left);
            }
            level = if at_level > 0 { ((capacity - taken) / at_level as f64).max(0.0) } else { 0.0 };
        }
        while by_left.peek().is_some_and(|Reverse((_, i))| capped[*i]) {
            by_left.pop();
        }
        let next_level = by_left.peek().map_or(f64::INFINITY, |Reverse((Key(left), _))| {
            if level > 0.0 { now + (left - integral).max(0.0) / level } else { f64::INFINITY }
        });
        let next_most = at_most.peek().map_or(f64::INFINITY, |Reverse((Key(ends), _))| *ends);
        let next = next_level.min(next_most);
        if marked.is_none() && next >= until_s {
            marked = Some(integral + (until_s - now) * level);
        }
        if next.is_infinite() {
            break;
        }
        integral += (next - now) * level;
        now = next;
        let queue = if next_level <= next_most { &mut by_left } else { &mut at_most };
        let Some(Reverse((_, i))) = queue.pop() else { break };
        ended[i] = true;
        fates[i].ends_s = now;
        if capped[i] {
            taken = (taken - tasks[i].most).max(0.0);
        } else {
            at_level -= 1;
            fates[i].served = marked.unwrap_or(integral).min(tasks[i].left.max(0.0));
        }
    }
    for (i, fate) in fates.iter_mut().enumerate() {
        if !ended[i] && !capped[i] {
            fate.served = marked.unwrap_or(0.0);
        }
    }
    fates
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ends(tasks: &[(f64, f64)]) -> Vec<f64> {
        let tasks: Vec<Task> = tasks.iter().map(|&(left, most)| Task { left, most }).collect();
        run(&tasks, 1.0, 0.0).iter().map(|f| f.ends_s).collect()
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
        // Somebody who never ends keeps one half.
        close(&ends(&[(10.0, 1.0), (f64::INFINITY, 1.0)]), &[20.0, f64::INFINITY]);
    }

    #[test]
    fn an_unusable_part_goes_to_the_others() {
        // The first takes a fifth until 50 s; the second the rest until it has its 40.
        close(&ends(&[(10.0, 0.2), (40.0, 1.0)]), &[50.0, 50.0]);
        // Three at a third each until 15 s, when the first ends; then one of the others is held at 0.4, the last gets 0.6.
        close(&ends(&[(5.0, 1.0), (9.0, 0.4), (11.0, 1.0)]), &[15.0, 25.0, 25.0]);
    }

    #[test]
    fn service_is_counted_until_the_moment_asked_for() {
        let tasks = [Task { left: 10.0, most: 1.0 }, Task { left: 30.0, most: 1.0 }, Task { left: 99.0, most: 0.1 }];
        let served = |t: f64| run(&tasks, 1.0, t).iter().map(|f| f.served).collect::<Vec<_>>();
        close(&served(0.0), &[0.0, 0.0, 0.0]);
        close(&served(10.0), &[4.5, 4.5, 1.0]);
        close(&served(30.0), &[10.0, 17.0, 3.0]);
    }

    proptest! {
        #[test]
        fn conservation(
            jobs in prop::collection::vec((0.0f64..100.0, 0.05f64..=1.0), 1..12), capacity in 0.2f64..=1.0, until in 0.0f64..200.0,
        ) {
            let tasks: Vec<Task> = jobs.iter().map(|&(left, most)| Task { left, most }).collect();
            let fates = run(&tasks, capacity, until);
            let served: f64 = fates.iter().map(|f| f.served).sum();
            prop_assert!(served <= capacity * until + 1e-6);
            for (task, fate) in tasks.iter().zip(&fates) {
                prop_assert!(fate.served <= task.left + 1e-9 && fate.served <= task.most * until + 1e-9);
                prop_assert!(fate.ends_s >= task.left / task.most - 1e-6);
                // Whoever has ended has got all, whoever has not has something left.
                prop_assert_eq!(fate.ends_s <= until - 1e-6, fate.ends_s <= until - 1e-6 && (fate.served - task.left).abs() < 1e-6);
            }
            // Nothing is left idle: when the last one ends, either it could not use more or the machine was full.
            let widest = tasks.iter().map(|t| t.left / t.most).fold(0.0, f64::max);
            let work: f64 = tasks.iter().map(|t| t.left).sum();
            let last = fates.iter().map(|f| f.ends_s).fold(0.0, f64::max);
            prop_assert!(last <= widest + work / capacity + 1e-6);
        }
    }
}
