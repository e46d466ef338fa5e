//! When are how many GPUs free, and which GPUs does a job need to make its deadline?
//!
//! **Approach.** A [`Timeline`] is a step function: the GPUs that no plan has taken, from now to the end of
//! time. [`Timeline::fill`] finds a job's *minimum satisfactory share*: the least level that makes the
//! deadline if the job takes, in every period, that level or the highest one below it that is free. The
//! share is then lowered by one level from the moment on from which the lower level is enough.
//!
//! **Units.** Whole seconds. Periods end at boundaries of slots of [`SLOT_S`] seconds.
//!
//! **Properties.** A filled reservation never takes more than is free, and its end is no later than the
//! deadline, restarts included.

use super::{Cluster, Level};

/// Running jobs change their GPUs at most once in a slot.
pub const SLOT_S: i64 = 60;

/// The first boundary of a slot at or after `at_s`. Plans change at these boundaries only, so that they
/// cause few events.
pub fn slot_boundary(at_s: i64) -> i64 {
    (at_s + SLOT_S - 1).div_euclid(SLOT_S) * SLOT_S
}

const FOREVER_S: i64 = i64::MAX / 4;

/// GPUs of one job over a period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Period {
    pub start_s: i64,
    pub end_s: i64,
    pub gpus: u32,
}

/// What a plan has set aside for one job: periods in order, without those of zero GPUs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reservation {
    pub periods: Vec<Period>,
    /// When the job will have finished.
    pub end_s: i64,
}

impl Reservation {
    pub fn gpus_at(&self, at_s: i64) -> u32 {
        self.periods.iter().find(|p| p.start_s <= at_s && at_s < p.end_s).map_or(0, |p| p.gpus)
    }

    /// GPU time from `from_s` on.
    pub fn gpu_time(&self, from_s: i64) -> f64 {
        self.periods.iter().map(|p| (p.end_s - p.start_s.max(from_s)).max(0) as f64 * f64::from(p.gpus)).sum()
    }

    /// The first change of the GPUs after `at_s`.
    pub fn next_change_s(&self, at_s: i64) -> Option<i64> {
        self.periods.iter().flat_map(|p| [p.start_s, p.end_s]).filter(|&t| t > at_s).min()
    }

    fn push(&mut self, start_s: i64, end_s: i64, gpus: u32) {
        if gpus == 0 || end_s <= start_s {
            return;
        }
        match self.periods.last_mut() {
            Some(last) if last.end_s == start_s && last.gpus == gpus => last.end_s = end_s,
            _ => self.periods.push(Period { start_s, end_s, gpus }),
        }
    }
}

/// What a plan must know of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobDemand<'a> {
    pub left: f64,
    pub deadline_s: i64,
    /// Ascending in GPUs and in speed.
    pub levels: &'a [Level],
    /// GPUs that the job has now, and the seconds of its last restart that remain.
    pub gpus: u32,
    pub restart_left_s: i64,
    /// Until then the job keeps its present GPUs, which are not on the timeline, and works at this speed.
    pub held_until_s: i64,
    pub held_speed: f64,
}

/// Free GPUs over time.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    cluster: Cluster,
    /// Start of each period and its free GPUs; the last period never ends.
    steps: Vec<(i64, u32)>,
}

/// The highest of `levels` with at most `gpus` GPUs, and not above `cap`.
fn level_within(levels: &[Level], cap: usize, gpus: u32) -> Option<Level> {
    levels[..=cap].iter().rev().find(|l| l.gpus <= gpus).copied()
}

impl Timeline {
    pub fn new(now_s: i64, cluster: Cluster) -> Timeline {
        Timeline { cluster, steps: vec![(now_s, cluster.gpus())] }
    }

    /// The least number of GPUs that is free at any time in the period.
    pub fn least_free(&self, start_s: i64, end_s: i64) -> u32 {
        let first = self.steps.partition_point(|s| s.0 <= start_s).saturating_sub(1);
        self.steps[first..].iter().take_while(|s| s.0 < end_s).map(|s| s.1).min().unwrap_or(0)
    }

    fn split(&mut self, at_s: i64) -> usize {
        let next = self.steps.partition_point(|s| s.0 < at_s);
        if next == self.steps.len() || self.steps[next].0 != at_s {
            let free = self.steps[next.max(1) - 1].1;
            self.steps.insert(next, (at_s, free));
        }
        next
    }

    /// Takes GPUs, which must be free.
    pub fn take(&mut self, period: &Period) {
        let from = self.split(period.start_s);
        let to = self.split(period.end_s);
        for step in &mut self.steps[from..to] {
            step.1 -= period.gpus;
        }
    }

    /// Gives a reservation's GPUs back.
    pub fn release(&mut self, reservation: &Reservation) {
        for period in &reservation.periods {
            let from = self.split(period.start_s);
            let to = self.split(period.end_s);
            self.steps[from..to].iter_mut().for_each(|s| s.1 += period.gpus);
        }
        self.steps.dedup_by_key(|s| s.1);
    }

    /// Start and free GPUs of each period.
    pub fn steps(&self) -> &[(i64, u32)] {
        &self.steps
    }

    /// Takes the part of a reservation after `now_s`, if all of it is free.
    pub fn reserve(&mut self, reservation: &Reservation, now_s: i64) -> bool {
        let rest = || reservation.periods.iter().filter(|p| p.end_s > now_s);
        let from = |p: &Period| Period { start_s: p.start_s.max(now_s), ..*p };
        if rest().any(|p| self.least_free(p.start_s.max(now_s), p.end_s) < p.gpus) {
            return false;
        }
        rest().for_each(|p| self.take(&from(p)));
        true
    }

    /// The reservation with which the job makes its deadline, using at most `high` until `switch_s` and at
    /// most `low` after it; none if it does not make it.
    fn course(&self, need: &JobDemand, high: usize, low: Option<usize>, switch_s: i64) -> Option<Reservation> {
        let mut out = Reservation::default();
        let (mut left, mut gpus, mut restart_s) = (need.left, need.gpus, need.restart_left_s);
        let mut at_s = self.steps[0].0;
        let mut i = 0;
        while at_s < need.deadline_s {
            while self.steps.get(i + 1).is_some_and(|s| s.0 <= at_s) {
                i += 1;
            }
            let mut end_s = self.steps.get(i + 1).map_or(need.deadline_s, |s| s.0.min(need.deadline_s));
            let level = if at_s < need.held_until_s {
                end_s = end_s.min(need.held_until_s);
                Some(Level { gpus: need.gpus, speed: need.held_speed })
            } else if at_s < switch_s {
                end_s = end_s.min(switch_s);
                level_within(need.levels, high, self.steps[i].1)
            } else {
                low.and_then(|low| level_within(need.levels, low, self.steps[i].1))
            };
            match level {
                Some(level) => {
                    if level.gpus != gpus {
                        (gpus, restart_s) = (level.gpus, self.cluster.restart_s(level.gpus));
                    }
                    let idle_s = restart_s.min(end_s - at_s);
                    restart_s -= idle_s;
                    let work = level.speed * (end_s - at_s - idle_s) as f64;
                    if left <= work {
                        out.end_s = (at_s + idle_s + (left / level.speed).ceil() as i64).max(at_s + 1);
                        out.push(at_s, slot_boundary(out.end_s), level.gpus);
                        return (out.end_s <= need.deadline_s).then_some(out);
                    }
                    left -= work;
                    out.push(at_s, end_s, level.gpus);
                }
                None => (gpus, restart_s) = (0, 0),
            }
            at_s = end_s;
        }
        None
    }

    /// The moment from which on the lower level is enough, if restarts cost nothing.
    fn switch_s(&self, need: &JobDemand, high: usize, low: Option<usize>) -> i64 {
        let speed = |cap: Option<usize>, free: u32| {
            cap.and_then(|c| level_within(need.levels, c, free)).map_or(0.0, |l| l.speed)
        };
        let last = self.steps.partition_point(|s| s.0 < need.deadline_s);
        let bounds = |i: usize| {
            let end_s = if i + 1 < last { self.steps[i + 1].0 } else { need.deadline_s };
            (self.steps[i].0, end_s)
        };
        let mut work: f64 = (0..last)
            .map(|i| {
                let (start_s, end_s) = bounds(i);
                speed(low, self.steps[i].1) * (end_s - start_s) as f64
            })
            .sum();
        for i in 0..last {
            let (start_s, end_s) = bounds(i);
            let more = speed(Some(high), self.steps[i].1) - speed(low, self.steps[i].1);
            let gain = more * (end_s - start_s) as f64;
            if work + gain >= need.left {
                let after_s = ((need.left - work).max(0.0) / more.max(1e-12)).ceil() as i64;
                // Both restarts are paid for from the higher level.
                let restarts_s = 2 * self.cluster.restart_s(need.levels[high].gpus);
                return slot_boundary((start_s + after_s).min(end_s) + restarts_s);
            }
            work += gain;
        }
        FOREVER_S
    }

    /// The job's minimum satisfactory share as a reservation (not yet taken), or none if no level makes the
    /// deadline.
    pub fn fill(&self, need: &JobDemand) -> Option<Reservation> {
        let now_s = self.steps[0].0;
        let window_s = (need.deadline_s - now_s) as f64;
        for high in 0..need.levels.len() {
            if need.left > need.levels[high].speed * window_s {
                continue;
            }
            let Some(whole) = self.course(need, high, Some(high), FOREVER_S) else { continue };
            let low = high.checked_sub(1);
            if low.is_none() {
                return Some(whole);
            }
            let switch_s = self.switch_s(need, high, low);
            if switch_s >= whole.end_s {
                return Some(whole);
            }
            let mixed = self.course(need, high, low, switch_s);
            return match mixed {
                Some(mixed) if mixed.gpu_time(now_s) < whole.gpu_time(now_s) => Some(mixed),
                _ => Some(whole),
            };
        }
        None
    }
}
