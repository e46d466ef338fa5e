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
