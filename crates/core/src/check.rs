//! A second opinion on every plan, written without looking at how plans are made.

use crate::plan::Plan;
use crate::view::View;

/// What a plan got wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Violation {
    #[error("a placeholder until the checks land")]
    None,
}

/// All that is wrong with `plan` in the light of `view`; empty for a sound plan.
pub fn check(_view: &View, _plan: &Plan) -> Vec<Violation> {
    Vec::new()
}
