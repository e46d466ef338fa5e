//! The best that is possible, whatever the policy: no policy that does not know the future can beat it.
//!
//! **Mean completion time.** With the jobs where a run put them, each node is one machine that can work on
//! any job at full speed and without disturbance; serving the job with the least work left first (SRPT) is
//! then optimal. Limits on parallelism and interference only make things worse, so the result is a bound.
//! **Makespan.** All work over all capacity, and no job faster than alone from its arrival. **Time to
//! quality.** An oracle that serves next the job that can make 90 % of its loss reduction soonest: SRPT on
//! the work to that point.

use crate::outcome::Outcome;
use crate::world::World;
use gainshare_figures::Table;
use serde::Serialize;

/// Bounds in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bounds {
    pub mean_completion_s: f64,
    pub makespan_s: f64,
    pub mean_to_90_percent_s: f64,
}

impl Bounds {
    /// For people.
    pub fn table(&self) -> Table {
        let row = |name: &str, value: f64| vec![name.to_owned(), format!("{value:.1} s")];
        Table {
            head: vec!["bound".into(), "value".into()],
            rows: vec![
                row("mean completion (SRPT on each node)", self.mean_completion_s),
                row("makespan (work over capacity)", self.makespan_s),
                row("mean time to 90 % (greedy oracle)", self.mean_to_90_percent_s),
            ],
        }
    }
}

/// One job on one machine: when it comes and how many seconds of the whole machine it needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Task {
    pub arrival_s: f64,
    pub work_s: f64,
}

/// Bounds for jobs placed as in `outcome` (the first node of each).
pub fn bounds(world: &World, outcome: &Outcome) -> Bounds {
    let mut whole: Vec<Vec<Task>> = vec![vec![]; world.nodes.len()];
    let mut quality = whole.clone();
    for (job, fate) in world.jobs.iter().zip(&outcome.jobs) {
        let node = fate.stays.first().map_or(0, |s| s.node);
        let spec = &world.nodes[node];
        // Node-seconds at its best rate: a job that can use a fifth of the node needs a fifth of it for as
        // long as it takes alone.
        let work_s = job.alone_s(spec) * (job.max_cores / spec.cores).min(1.0);
        let arrival_s = job.arrival.as_secs_f64();
        whole[node].push(Task { arrival_s, work_s });
        quality[node].push(Task { arrival_s, work_s: work_s * job.curve.work_for(0.9) });
    }
    let mean = |nodes: &[Vec<Task>]| {
        let all: Vec<f64> = nodes.iter().flat_map(|tasks| srpt(tasks)).collect();
        if all.is_empty() { 0.0 } else { all.iter().sum::<f64>() / all.len() as f64 }
    };
    let capacity: f64 = world.nodes.iter().map(|n| n.cores * n.speed).sum();
    let best = |j: &crate::world::SimJob| {
        let alone = world.nodes.iter().map(|n| j.alone_s(n)).fold(f64::INFINITY, f64::min);
        j.arrival.as_secs_f64() + alone
    };
    let longest = world.jobs.iter().map(best).fold(0.0, f64::max);
    // Core-seconds at one core's rate overstate what a node can do for jobs that scale worse than linearly,
    // which keeps this a bound.
    let work: f64 = world.jobs.iter().map(|j| j.work_core_s).sum();
    let first = world.jobs.iter().map(|j| j.arrival.as_secs_f64()).fold(f64::INFINITY, f64::min);
    let makespan_s = longest.max(if first.is_finite() { first + work / capacity } else { 0.0 });
    Bounds { mean_completion_s: mean(&whole), makespan_s, mean_to_90_percent_s: mean(&quality) }
}

/// Completion times, from arrival, of serving the task with the least work left first, preemptively; in the
/// order of `tasks`.
pub fn srpt(tasks: &[Task]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by(|&a, &b| tasks[a].arrival_s.total_cmp(&tasks[b].arrival_s).then(a.cmp(&b)));
    let mut left: Vec<f64> = tasks.iter().map(|t| t.work_s).collect();
    let mut taken = vec![0.0; tasks.len()];
    let mut open: Vec<usize> = vec![];
    let (mut now, mut next) = (0.0, 0);
    while next < order.len() || !open.is_empty() {
        let arrival = order.get(next).map(|&i| tasks[i].arrival_s);
        let best = open.iter().copied().min_by(|&a, &b| left[a].total_cmp(&left[b]).then(a.cmp(&b)));
        match (best, arrival) {
            (Some(job), arrival) if arrival.is_none_or(|a| now + left[job] <= a) => {
                now += left[job];
                taken[job] = now - tasks[job].arrival_s;
                open.retain(|&j| j != job);
            }
            (best, Some(arrival)) => {
                if let Some(job) = best {
                    left[job] -= arrival - now;
                }
                now = arrival.max(now);
                open.push(order[next]);
                next += 1;
            }
            (_, None) => break,
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn task(arrival_s: f64, work_s: f64) -> Task {
        Task { arrival_s, work_s }
    }

    #[test]
    fn the_fixed_schedule_of_the_thesis() {
        // Solo work as it follows from equal sharing without interference: the bound is 394.0, 134.3 and 28.2 s.
        let taken = srpt(&[task(0.0, 259.7), task(40.0, 106.1), task(80.0, 28.2)]);
        for (got, expected) in taken.iter().zip([394.0, 134.3, 28.2]) {
            assert!((got - expected).abs() < 0.2, "{taken:?}");
        }
    }

    /// Total completion time of the best schedule on a time grid: at every unit of time any present job may
    /// be served.
    fn brute_force(arrivals: &[u32], left: &[u32], now: u32) -> u32 {
        if left.iter().all(|l| *l == 0) {
            return 0;
        }
        let present: Vec<usize> = (0..left.len()).filter(|&i| left[i] > 0 && arrivals[i] <= now).collect();
        let waiting = left.iter().filter(|l| **l > 0).count() as u32;
        if present.is_empty() {
            return waiting + brute_force(arrivals, left, now + 1);
        }
        let serve = |i: usize| {
            let mut left = left.to_vec();
            left[i] -= 1;
            waiting + brute_force(arrivals, &left, now + 1)
        };
        present.into_iter().map(serve).min().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn srpt_is_optimal_on_small_instances(jobs in prop::collection::vec((0u32..5, 1u32..4), 1..4)) {
            let (arrivals, works): (Vec<u32>, Vec<u32>) = jobs.iter().copied().unzip();
            let tasks: Vec<Task> = jobs.iter().map(|&(a, w)| task(f64::from(a), f64::from(w))).collect();
            let total: f64 = srpt(&tasks).iter().sum();
            // The brute force counts from time zero, also for jobs that have not come yet.
            let best = f64::from(brute_force(&arrivals, &works, 0)) - arrivals.iter().map(|a| f64::from(*a)).sum::<f64>();
            prop_assert!((total - best).abs() < 1e-9, "{total} against {best}");
        }
    }
}
