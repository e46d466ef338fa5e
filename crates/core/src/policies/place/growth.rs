//! `growth`: where the newcomer and the jobs it joins grow most together.
//!
//! **Source.** V. Sharma's thesis on FlowCon 2.0 names the aim: placement by the jobs' own evaluation
//! functions. The measure is ours.
//!
//! **Measure.** Under FlowCon a converged job keeps `1/(β·n)` of its node, and the others split the
//! rest in proportion to their growth. With `G` the measured growth per core of each job, a node's
//! growth is `capacity · Σ share·G`. It is computed with and without the newcomer, of which is
//! expected what the best measured job of the cluster grows. The rule prefers the node where the sum
//! of the newcomer's own growth and of the change of the whole node's growth is largest: the change
//! alone cannot tell a crowded node from an empty one where all grow alike.

use super::super::{JobCounts, Place};
use crate::plan::StartReason;
use crate::view::NodeView;

/// `beta` is FlowCon's β, as the share rule of the policy has it.
pub(crate) struct Growth {
    pub(crate) beta: f64,
}

impl Growth {
    /// `Σ share·G` of a node with these jobs, and the growth of one that is not measured yet.
    fn growth(&self, jobs: &JobCounts) -> (f64, f64) {
        let all = jobs.all() as f64;
        if all == 0.0 {
            return (0.0, 0.0);
        }
        let new = jobs.newcomer_growth();
        let unmeasured = jobs.unmeasured as f64;
        let sum = jobs.growth + unmeasured * new;
        let squares = jobs.growth_squares + unmeasured * new * new;
        let kept = if jobs.growing > 0 { jobs.converged as f64 / (self.beta * all) } else { 1.0 };
        let (growing, own) = if sum > 0.0 { (squares / sum, new * new / sum) } else { (0.0, 0.0) };
        let converged = if jobs.converged > 0 { jobs.converged_growth / jobs.converged as f64 } else { 0.0 };
        ((1.0 - kept) * growing + kept * converged, (1.0 - kept) * own)
    }
}

impl Place for Growth {
    fn key(&self, node: &NodeView, jobs: JobCounts) -> f64 {
        let mut joined = jobs;
        joined.growing += 1;
        joined.unmeasured += 1;
        let ((before, _), (after, own)) = (self.growth(&jobs), self.growth(&joined));
        -node.cores * node.speed * (own + after - before)
    }

    fn reason(&self) -> StartReason {
        StartReason::MostGrowth
    }
}
