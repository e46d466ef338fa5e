//! One after the other: the first in line has the node, what it cannot use goes to the next.
//!
//! **Sources.** First come, first served needs none. Shortest remaining processing time is optimal for the mean completion time on one machine
//! (L. Schrage, 1968), but must know what nobody knows; it is here as the bound that other policies are held against. Least attained
//! service in discrete queues is J. Gu et al., "Tiresias: A GPU Cluster Manager for Distributed Deep Learning", NSDI 2019 (2D-LAS; on one node
//! the second dimension, the number of devices, is the share consumed).
//!
//! **Properties.** `permutation_invariant`: ties go to the lower id. A job whose remaining work nobody knows goes last under
//! [`Rank::Remaining`]; one without a prediction goes first under [`Rank::Predicted`], so that there will be one.

use super::weigh::work_left;
use super::{Group, GroupMemory, Opinion, Share as ShareRule, Shares};
use crate::model::{PerResource, Share, Span};
use crate::plan::Reason;
use crate::signal::Category;
use crate::view::JobView;
use serde::{Deserialize, Serialize};

/// Who goes first where jobs are served one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Rank {
    /// The one that came first.
    Arrival,
    /// The one with the least work left, where it is known.
    Remaining,
    /// The one with the least work left, as its own reports predict it; before the first prediction, the one that consumed least.
    Predicted,
    /// The one that has consumed least of the node, in queues: consumption below the first limit (node-seconds) makes the first queue, below
    /// the second the next, and so on; first come first served within a queue.
    Attained { limits_s: [f64; 2] },
}

/// The rule has no memory.
pub(crate) struct Rule<'a> {
    pub(crate) by: &'a Rank,
}

impl ShareRule for Rule<'_> {
    fn share(&mut self, group: &Group<'_>, _memory: &mut GroupMemory) -> Shares {
        let (opinions, wait) = run(self.by, group.jobs);
        Shares { opinions, wait }
    }
}

/// Each next in line weighs so much less than the one before: near enough to nothing that it does not slow the first, yet what the first cannot
/// use goes down the line in order.
const NEXT: f64 = 1e-4;

/// How often what changes with time is looked at: no job overstays for longer.
const LOOK: Span = Span::from_secs(5);

fn run(by: &Rank, jobs: &[&JobView]) -> (Vec<Opinion>, Option<Span>) {
    let key = |job: &JobView| match by {
        Rank::Arrival => (0, job.arrived.0 as f64),
        Rank::Remaining => (0, job.known_left_s.unwrap_or(f64::INFINITY)),
        Rank::Predicted => match work_left(job) {
            None => (0, job.consumed.cpu),
            Some(left) => (1, left),
        },
        Rank::Attained { limits_s } => {
            (limits_s.iter().filter(|l| job.consumed.cpu >= **l).count(), job.arrived.0 as f64)
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
    let wait = matches!(by, Rank::Attained { .. } | Rank::Predicted).then_some(LOOK);
    (opinions.collect(), wait)
}
