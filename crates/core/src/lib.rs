//! The decisions of Gainshare, and nothing else.
//!
//! **Problem.** Several training jobs share one machine or one cluster. Some still learn, some have
//! flattened; equal shares waste most of the machine on the latter.
//!
//! **Approach.** A driver (the daemon, the node agent, the operator, the simulator) observes jobs
//! and hands [`decider::Decider`] one immutable [`view::View`]. Five decisions are asked in order
//! (which job next, on which node, with which share, whether to move, how large); the answer is a
//! [`plan::Plan`] with a reason for every job, also for those left alone. [`check::check`] vets the
//! plan without knowing how it was made, and only a [`check::CheckedPlan`] can be carried out.
//!
//! **Properties.** No clock, no I/O, no async, no randomness that is not handed in: the same view
//! and the same memory give the same plan, bit for bit ([`replay`] proves it for recorded
//! decisions). `clippy.toml` and the dependency check of `cargo xtask check` keep it that way.

pub mod backoff;
pub mod check;
mod control;
pub mod deal;
pub mod decider;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
pub mod forecast;
#[cfg(any(test, feature = "fixtures"))]
pub mod invariants;
pub mod model;
pub mod plan;
pub mod policies;
pub mod policy;
pub mod replay;
pub mod scaling;
#[cfg(any(test, feature = "fixtures"))]
pub mod seeds;
pub mod signal;
mod sort;
pub mod tasks;
pub mod teams;
pub mod view;

pub use control::Memory;
