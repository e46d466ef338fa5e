//! `spread`: the node with a free slot that runs the fewest jobs for its cores.

use super::super::plain::PlainPlace;
use super::super::{JobCounts, Place};
use crate::plan::StartReason;
use crate::view::NodeView;

pub(crate) const SPREAD: PlainPlace = PlainPlace::new("spread", || Box::new(Spread));

/// The rule has no numbers.
pub(super) struct Spread;

impl Place for Spread {
    fn key(&self, node: &NodeView, jobs: JobCounts) -> f64 {
        jobs.all() as f64 / node.cores.max(f64::MIN_POSITIVE)
    }

    fn reason(&self) -> StartReason {
        StartReason::FewestJobs
    }
}
