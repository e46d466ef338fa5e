//! `growth`: where the newcomer, and the jobs it joins, will grow most.
//!
//! **Source.** V. Sharma's thesis on FlowCon 2.0 names the aim; the measure is ours.
//!
//! **Measure.** Under FlowCon a converged job keeps `1/(β·n)` and the others split the rest. A
//! newcomer to a node with `g` growing and `c` converged jobs can expect `(1 − c/(β·n))/(g + 1)` of
//! its cores and speed, `n = g + c + 1`: a node full of converged jobs is roomier than one with as
//! many growing ones.

use super::super::{JobCounts, Place};
use crate::plan::StartReason;
use crate::view::NodeView;

/// FlowCon's β.
const BETA: f64 = 2.0;

/// The rule has no numbers.
pub(crate) struct Growth;

impl Place for Growth {
    fn key(&self, node: &NodeView, JobCounts { growing, converged }: JobCounts) -> f64 {
        let all = (growing + converged + 1) as f64;
        -node.cores * node.speed * (1.0 - converged as f64 / (BETA * all)) / (growing + 1) as f64
    }

    fn reason(&self) -> StartReason {
        StartReason::MostGrowth
    }
}
