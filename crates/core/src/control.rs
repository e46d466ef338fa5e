//! The loop, without a clock: view in, plan out.

use crate::plan::Plan;
use crate::policy::Policy;
use crate::view::View;
use crate::model::Time;

/// Holds what must be remembered between two decisions. (Interface first; filled in by the next commit.)
#[derive(Debug, Clone)]
pub struct Control {
    policy: Policy,
}

impl Control {
    pub fn new(policy: Policy) -> Control {
        Control { policy }
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Decides if anything is due in this view: a job came or went, an interval is over, a report arrived where reports count.
    pub fn step(&mut self, _view: &View) -> Option<Plan> {
        None
    }

    /// When `step` should be called again, if nothing happens before.
    pub fn due(&self) -> Option<Time> {
        None
    }
}
