//! Shares of pods: resizes on behalf of node agents, original values, annotations and policy statuses.

pub(crate) mod contest;
pub(crate) mod notes;
pub(crate) mod policies;
pub(crate) mod release;
pub(crate) mod resizes;
pub(crate) mod restore;
pub(crate) mod write;
