//! The smallest shares with which jobs make their deadlines, over time.
//!
//! **Problem.** Several jobs with deadlines share one node. Which of them can all be finished in
//! time, and what is the least each needs now?
//!
//! **Approach.** Jobs are taken in order of their deadlines. Each finds the smallest *level* with
//! which it ends in time if it has, at every moment, its level or all that earlier deadlines leave
//! free, whichever is less; then that much is taken out of the free capacity until the job ends.
//! (ElasticFlow calls it progressive filling, and the level the minimum satisfactory share: D. Gu et
//! al., ASPLOS 2023.) A low level suits jobs that gain little from more, and leaves room for others.
//!
//! **Terms.** Times are seconds from now, capacity and levels are shares of the node.
//!
//! **Properties** (tests of that name): `never_more_than_the_capacity`; `a_level_is_enough_and_no_less`.

use crate::signal::speed::{LEAST_SHARE, Pace};

/// The speed at a share counts as known if its relative standard deviation is below this.
const UNSURE: f64 = 0.15;

/// A job has shown its speed at shares up to this many times the largest one with which it was measured.
const NEAR: f64 = 1.5;

/// One job with a deadline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Task {
    pub(super) pace: Pace,
    pub(super) steps: f64,
    /// Until its deadline.
    pub(super) left_s: f64,
    /// The largest share that it may have and can use.
    pub(super) cap: f64,
    /// Standard deviations by which its steps are believed to be slower than fitted.
    pub(super) caution: f64,
}

impl Task {
    /// Steps per second at `share`.
    pub(super) fn rate(&self, share: f64) -> f64 {
        if share < LEAST_SHARE { 0.0 } else { 1.0 / self.pace.cautious_step_s(share, self.caution) }
    }

    /// Whether it is not known how fast the job is with its largest share.
    pub(super) fn is_unsure(&self) -> bool {
        self.is_unsure_at(self.cap)
    }

    fn is_unsure_at(&self, share: f64) -> bool {
        self.pace.deviation_s(share) > UNSURE * self.pace.step_s(share)
    }

    /// Whether the job was measured near `share`, or its law is known there anyway. Only a share that it had
    /// shows that it can use one of that size.
    pub(super) fn has_shown(&self, share: f64) -> bool {
        share <= NEAR * self.pace.seen && !(self.pace.windows > 0 && self.is_unsure_at(share))
    }

    /// Node-seconds at its largest share: how much of the node it takes.
    pub(super) fn work(&self) -> f64 {
        self.steps * self.cap / self.rate(self.cap).max(f64::MIN_POSITIVE)
    }
}

/// What one job takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Allocation {
    /// The job's share now.
    pub(super) now: f64,
    /// The largest share that it has until it ends.
    pub(super) most: f64,
    pub(super) ends_s: f64,
}

/// The free capacity from now on: each piece lasts until its end, the last one for ever.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Free {
    pieces: Vec<(f64, f64)>,
}

/// The level is found to this part of a node.
const ROUNDS: usize = 16;

impl Free {
    pub(super) fn new(capacity: f64) -> Free {
        Free { pieces: vec![(f64::INFINITY, capacity)] }
    }

    /// Takes `share` out of the first `seconds`.
    pub(super) fn lend(&mut self, share: f64, seconds: f64) {
        let mut pieces = Vec::with_capacity(self.pieces.len() + 1);
        let mut from = 0.0;
        for &(until, free) in &self.pieces {
            if from < seconds {
                pieces.push((until.min(seconds), (free - share).max(0.0)));
            }
            if until > seconds {
                pieces.push((until, free));
            }
            from = until;
        }
        self.pieces = pieces;
    }

    /// When `task` ends if it never has more than `level`.
    pub(super) fn ends_s(&self, task: &Task, level: f64) -> f64 {
        let (mut left, mut from) = (task.steps, 0.0);
        for &(until, free) in &self.pieces {
            let rate = task.rate(level.min(free).min(task.cap));
            if rate > 0.0 && left <= rate * (until - from) {
                return from + left / rate;
            }
            left -= rate * (until - from);
            from = until;
        }
        f64::INFINITY
    }

    /// The smallest level with which `task` ends in time.
    fn level(&self, task: &Task) -> Option<f64> {
        if self.ends_s(task, task.cap) > task.left_s {
            return None;
        }
        let (mut low, mut high) = (0.0, task.cap);
        for _ in 0..ROUNDS {
            let middle = 0.5 * (low + high);
            if self.ends_s(task, middle) <= task.left_s { high = middle } else { low = middle }
        }
        Some(high)
    }

    /// Takes what `task` needs at `level` out of the free capacity.
    fn take(&mut self, task: &Task, level: f64) -> Allocation {
        let ends_s = self.ends_s(task, level);
        let level = level.min(task.cap);
        let now = self.pieces.first().map_or(0.0, |(_, free)| level.min(*free));
        let mut pieces = Vec::with_capacity(self.pieces.len() + 1);
        let (mut from, mut most) = (0.0, now);
        for &(until, free) in &self.pieces {
            if from < ends_s {
                most = f64::max(most, level.min(free));
            }
            let taken = (free - level).max(0.0);
            if until <= ends_s {
                pieces.push((until, taken));
            } else if from >= ends_s {
                pieces.push((until, free));
            } else {
                pieces.push((ends_s, taken));
                pieces.push((until, free));
            }
            from = until;
        }
        self.pieces = pieces;
        Allocation { now, most, ends_s }
    }
}

/// The tasks of `chosen` in order of their deadlines.
pub(super) fn by_deadline(tasks: &[Task], chosen: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut order: Vec<usize> = chosen.collect();
    order.sort_by(|&a, &b| tasks[a].left_s.total_cmp(&tasks[b].left_s).then(a.cmp(&b)));
    order
}

/// What each task needs, if all of them can end in time; `order` lists them by deadline.
pub(super) fn fill(tasks: &[Task], order: &[usize], capacity: f64) -> Option<Vec<(usize, Allocation)>> {
    fill_free(tasks, order, Free::new(capacity))
}

/// The same with the capacity that is free over time.
pub(super) fn fill_free(tasks: &[Task], order: &[usize], mut free: Free) -> Option<Vec<(usize, Allocation)>> {
    let mut needs = Vec::with_capacity(order.len());
    for &i in order {
        let level = free.level(&tasks[i])?;
        needs.push((i, free.take(&tasks[i], level)));
    }
    Some(needs)
}

/// When `task` could end at the earliest if the tasks of `order` have what they need first.
pub(super) fn earliest_s(tasks: &[Task], order: &[usize], capacity: f64, task: &Task) -> f64 {
    let mut free = Free::new(capacity);
    for &i in order {
        let level = free.level(&tasks[i]).unwrap_or(tasks[i].cap);
        free.take(&tasks[i], level);
    }
    free.ends_s(task, task.cap)
}

/// Deals `spare` out to tasks that already have `shares`, in small parts, each to the task that
/// makes most of it; among equals to the one whose deadline comes first.
pub(super) fn deal_spare(tasks: &[(Task, f64)], spare: f64) -> Vec<f64> {
    const PARTS: usize = 32;
    let mut shares: Vec<f64> = tasks.iter().map(|(_, share)| *share).collect();
    let part = spare / PARTS as f64;
    if part <= 0.0 {
        return shares;
    }
    for _ in 0..PARTS {
        // How much of a node-second becomes work: 1 for a job that scales linearly.
        let worth = |i: usize| {
            let (task, share) = (&tasks[i].0, shares[i]);
            let more = (share + part).min(task.cap);
            (task.rate(more) - task.rate(share)) * task.pace.parallel_s / part
        };
        let better = |a: &usize, b: &usize| {
            let by_worth = (worth(*b) * 100.0).round().total_cmp(&(worth(*a) * 100.0).round());
            by_worth.then(tasks[*a].0.left_s.total_cmp(&tasks[*b].0.left_s)).then(a.cmp(b))
        };
        let open = (0..tasks.len()).filter(|&i| shares[i] + part <= tasks[i].0.cap);
        let Some(i) = open.min_by(better) else { break };
        shares[i] += part;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn linear(work: f64, left_s: f64) -> Task {
        Task { pace: Pace::from_law(0.0, 1.0, 1.0), steps: work, left_s, cap: 1.0, caution: 0.0 }
    }

    #[test]
    fn a_level_is_enough_and_no_less() {
        // 10 node-seconds in 40 s: a quarter. Then 30 in 60 s beside it: half.
        let tasks = [linear(10.0, 40.0), linear(30.0, 60.0)];
        let needs = fill(&tasks, &[0, 1], 1.0).expect("both fit");
        assert!((needs[0].1.now - 0.25).abs() < 1e-3 && (needs[1].1.now - 0.5).abs() < 1e-3, "{needs:?}");
        assert!(needs.iter().all(|(i, n)| n.ends_s <= tasks[*i].left_s));
    }

    #[test]
    fn a_later_deadline_uses_what_an_earlier_one_leaves_behind() {
        // The first takes the whole node for 10 s; the second needs all that comes after.
        let tasks = [linear(10.0, 10.0), linear(20.0, 30.0)];
        let needs = fill(&tasks, &[0, 1], 1.0).expect("both fit");
        assert!((needs[0].1.now - 1.0).abs() < 1e-3 && needs[1].1.now < 1e-3, "{needs:?}");
        assert_eq!(fill(&[linear(10.0, 10.0), linear(21.0, 30.0)], &[0, 1], 1.0), None);
        let late = earliest_s(&tasks, &[0], 1.0, &linear(21.0, 30.0));
        assert!((late - 31.0).abs() < 1e-3, "{late}");
    }

    #[test]
    fn spare_capacity_goes_where_it_does_most() {
        let serial = Task { pace: Pace::from_law(0.9, 0.1, 1.0), ..linear(10.0, 20.0) };
        let dealt = deal_spare(&[(serial, 0.2), (linear(10.0, 99.0), 0.2)], 0.4);
        assert!((dealt[0] - 0.2).abs() < 1e-9 && (dealt[1] - 0.6).abs() < 1e-9, "{dealt:?}");
    }

    proptest! {
        #[test]
        fn never_more_than_the_capacity(
            jobs in prop::collection::vec((0.1f64..50.0, 1.0f64..100.0, 0.0f64..0.5, 0.05f64..=1.0), 1..10),
            capacity in 0.2f64..=1.0,
        ) {
            let tasks: Vec<Task> = jobs.iter().map(|&(work, left_s, serial, cap)| Task {
                pace: Pace::from_law(serial, 1.0 - serial, 1.0), cap, ..linear(work, left_s)
            }).collect();
            let mut order: Vec<usize> = (0..tasks.len()).collect();
            order.sort_by(|&a, &b| tasks[a].left_s.total_cmp(&tasks[b].left_s));
            if let Some(needs) = fill(&tasks, &order, capacity) {
                prop_assert!(needs.iter().map(|(_, n)| n.now).sum::<f64>() <= capacity + 1e-9);
                prop_assert!(needs.iter().all(|(i, n)| n.ends_s <= tasks[*i].left_s + 1e-6));
            } else {
                let work: f64 = tasks.iter().map(|t| t.work()).sum();
                let last = tasks.iter().map(|t| t.left_s).fold(0.0, f64::max);
                prop_assert!(tasks.len() > 1 || work > 0.0 && last > 0.0);
            }
        }
    }
}
