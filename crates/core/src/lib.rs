//! The decisions of Gainshare, and nothing else.
//!
//! **Problem.** Several training jobs share one machine or one cluster. Some still learn, some have flattened; equal shares
//! waste most of the machine on the latter.
//!
//! **Approach.** A driver (the daemon, the operator, the simulator) observes jobs and hands [`control::Control`] one immutable
//! [`view::View`]. Control asks five decisions in order (which job next, on which node, with which share, whether to move, how
//! large) and returns a [`plan::Plan`] with a reason for every job, also for those left alone. [`check::check`] vets the plan
//! without knowing how it was made.
//!
//! **Properties.** No clock, no I/O, no async, no randomness that is not handed in: the same view and the same memory give
//! the same plan, bit for bit. `clippy.toml` and the dependency check of `cargo xtask check` keep it that way.

pub mod check;
pub mod control;
pub mod decide;
pub mod model;
pub mod plan;
pub mod policy;
pub mod signal;
pub mod view;
