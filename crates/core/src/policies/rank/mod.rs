//! One after the other: the first in line has the node, what it cannot use goes to the next.
//!
//! **Sources.** First come, first served needs none. Shortest remaining processing time is optimal
//! for the mean completion time on one machine (L. Schrage, 1968), but needs the work left, which
//! is not known; it is here as the bound that other policies are held against. Least attained
//! service in discrete queues is J. Gu et al., "Tiresias: A GPU Cluster Manager for Distributed
//! Deep Learning", NSDI 2019 (2D-LAS; on one node the second dimension, the number of devices, is
//! the share consumed).
//!
//! **Properties.** `permutation_invariant`: ties go to the lower id. A job whose remaining work is
//! not known goes last under [`Rank::Remaining`]; one without a prediction goes first under
//! [`Rank::Predicted`], so that there will be one.

use super::weigh::work_left;
use super::{Group, Opinion, Share as ShareRule, Shares};
use crate::model::{PerResource, Share, Span};
use crate::plan::Reason;
use crate::signal::Category;
use crate::view::JobView;
use serde::{Deserialize, Serialize};

/// Which job goes first where jobs are served one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Rank {
    /// The one that came first.
    Arrival,
    /// The one whose deadline comes first; then those without a deadline, as they came.
    Deadline,
    /// The one with the least work left, where it is known.
    Remaining,
    /// The one with the least work left, as its own reports predict it; before the first
    /// prediction, the one that consumed least.
    Predicted,
    /// The one that has consumed least of the node, in queues: consumption below the first limit
    /// (node-seconds) makes the first queue, below the second the next, and so on; first come first
    /// served within a queue.
    Attained { limits_s: [f64; 2] },
}

/// The rule has no memory.
pub(crate) struct Rule<'a> {
    pub(crate) by: &'a Rank,
}

impl ShareRule for Rule<'_> {
    fn share(&mut self, group: &Group<'_>) -> Shares {
        let (opinions, wait) = run(self.by, group.jobs);
        Shares { opinions, wait }
    }
}

/// Ratio of the weights of two jobs that follow each other in the queue. It is small enough that the second does not
/// slow the first; what the first cannot use goes to the others in the order of the queue.
const NEXT: f64 = 1e-4;

/// Interval between decisions when ranks depend on time.
const INTERVAL: Span = Span::from_secs(5);

fn run(by: &Rank, jobs: &[&JobView]) -> (Vec<Opinion>, Option<Span>) {
    let key = |job: &JobView| match by {
        Rank::Arrival => (0, job.arrived.0 as f64),
        Rank::Deadline => match job.deadline {
            Some(deadline) => (0, deadline.at.0 as f64),
            None => (1, job.arrived.0 as f64),
        },
        Rank::Remaining => (0, job.known_left_s.unwrap_or(f64::INFINITY)),
        Rank::Predicted => match work_left(job) {
            None => (0, job.consumed_node_s.cpu),
            Some(left) => (1, left),
        },
        Rank::Attained { limits_s } => {
            (limits_s.iter().filter(|l| job.consumed_node_s.cpu >= **l).count(), job.arrived.0 as f64)
        }
    };
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by(|&a, &b| {
        let (ka, kb) = (key(jobs[a]), key(jobs[b]));
        ka.0.cmp(&kb.0).then(ka.1.total_cmp(&kb.1)).then(jobs[a].id.cmp(&jobs[b].id))
    });
    let mut ahead = vec![0; jobs.len()];
    for (place, &i) in order.iter().enumerate() {
        ahead[i] = place;
    }
    let opinions = ahead.into_iter().map(|ahead| Opinion {
        limit: PerResource::from_fn(|_| Share::clamped(NEXT.powi(ahead.min(3) as i32))),
        growth: PerResource::default(),
        category: Category::Growing,
        reason: Reason::Ranked { ahead },
    });
    let wait = matches!(by, Rank::Attained { .. } | Rank::Predicted).then_some(INTERVAL);
    (opinions.collect(), wait)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::running;
    use crate::model::Time;
    use proptest::prelude::*;

    const RULES: [Rank; 4] =
        [Rank::Arrival, Rank::Remaining, Rank::Predicted, Rank::Attained { limits_s: [30.0, 120.0] }];

    /// A job that came at `arrived_s`, has consumed `cpu` for 10 of `total` steps and truly has
    /// `left_s` to go.
    fn job(id: u64, arrived_s: f64, cpu: f64, total: u64, left_s: f64) -> JobView {
        let mut job = running(id, 0);
        job.arrived = Time::from_secs_f64(arrived_s);
        job.consumed_node_s.cpu = cpu;
        (job.signal.reports, job.signal.step, job.signal.total) = (10, Some(10), Some(total));
        job.known_left_s = Some(left_s);
        job
    }

    /// How many jobs go before each.
    fn ahead(by: &Rank, jobs: &[JobView]) -> Vec<usize> {
        let jobs: Vec<_> = jobs.iter().collect();
        let ahead = |o: &Opinion| match o.reason {
            Reason::Ranked { ahead } => ahead,
            ref other => panic!("{other:?}"),
        };
        run(by, &jobs).0.iter().map(ahead).collect()
    }

    #[test]
    fn each_rule_has_its_own_first_job() {
        // The first came first; the second has consumed least; the third has least left by its
        // reports, the fourth in truth.
        let jobs = [
            job(1, 0.0, 50.0, 100, 90.0),
            job(2, 5.0, 9.0, 1000, 80.0),
            job(3, 6.0, 40.0, 11, 70.0),
            job(4, 7.0, 45.0, 90, 3.0),
        ];
        let first = |by: &Rank| ahead(by, &jobs).iter().position(|a| *a == 0);
        assert_eq!(RULES.map(|by| first(&by)), [Some(0), Some(3), Some(2), Some(1)]);
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        let jobs = [job(1, 0.0, 5.0, 20, 9.0), job(2, 0.0, 5.0, 20, 9.0), job(3, 0.0, 5.0, 20, 9.0)];
        for by in RULES {
            assert_eq!(ahead(&by, &jobs), [0, 1, 2], "{by:?}");
        }
    }

    proptest! {
        /// Jobs that differ keep their places under any numbering.
        #[test]
        fn permutation_invariant(
            jobs in prop::collection::btree_set((0u32..1000, 1u32..1000, 11u64..1000, 1u32..1000), 1..9),
            shift in 0usize..9,
        ) {
            let make = |(id, (at, cpu, total, left)): (usize, &(u32, u32, u64, u32))| {
                // No two are alike in anything a rule goes by.
                let apart = f64::from(*at) * 1e-7;
                job(id as u64, f64::from(*at), f64::from(*cpu) + apart, *total, f64::from(*left) + apart)
            };
            let jobs: Vec<_> = jobs.into_iter().collect();
            prop_assume!(jobs.windows(2).all(|w| w[0].0 != w[1].0));
            let mut turned = jobs.clone();
            turned.rotate_left(shift % jobs.len());
            let forward: Vec<JobView> = jobs.iter().enumerate().map(make).collect();
            let backward: Vec<JobView> = turned.iter().enumerate().map(make).collect();
            for by in RULES {
                let mut places = ahead(&by, &backward);
                places.rotate_right(shift % jobs.len());
                prop_assert_eq!(ahead(&by, &forward), places, "{:?}", by);
            }
        }
    }
}
