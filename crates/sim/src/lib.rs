//! Would this policy help my jobs? The simulator answers with the very decisions that run in production.
//!
//! **Problem.** A policy for sharing machines cannot be judged on a machine that is in use, and a real
//! experiment takes hours.
//!
//! **Approach.** Jobs and nodes are modelled as a fluid: between two events every job works at a constant
//! rate, so time jumps from event to event. At each event the simulator hands
//! [`gainshare_core::decider::Decider`] a view, as the daemon does, and carries out its plan.
//!
//! **Properties.** Time is an integer; every random number comes from a stream of its own, named by what it
//! is for; the same scenario, policy and seed give the same bytes.

pub mod bounds;
pub mod curve;
pub mod deadline;
pub mod engine;
pub mod forecast;
pub mod models;
pub mod outcome;
pub mod paper;
pub mod picture;
pub mod random;
pub mod recorded;
pub mod scenario;
pub mod simulate;
pub mod study;
pub mod summary;
pub mod tasks;
pub mod trace;
pub mod world;
