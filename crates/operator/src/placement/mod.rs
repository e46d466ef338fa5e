//! Where jobs should run: one view of the whole cluster, decided by the core, published as orders.
//!
//! **How.** [`snapshot`] reads nodes, reports and jobs. [`decide`] (pure) remembers them
//! ([`memory`]), makes the core's view of them ([`view`]), and turns the core's checked plan into
//! orders. [`run`] does that about once a second. [`record`] hands out the last decision to users who ask why.

mod clock;
mod decide;
mod memory;
pub(crate) mod record;
pub(crate) mod run;
mod snapshot;
mod view;

/// Decisions over no more jobs than this are always recorded, so that a plan that fails its check can be made again and
/// a user who asks gets the last decision. Decisions over more jobs about where they run are recorded when a user asks,
/// and decisions over more jobs about the sizes of tasks are not recorded.
pub(crate) const RECORDED_JOBS: usize = 2000;
