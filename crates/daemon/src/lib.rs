//! The daemon of one machine: it watches jobs, lets the core decide, and carries the decisions out.
//!
//! **Parts.** A *driver* thread owns everything that changes: control, runtimes, collectors and the
//! journal. A small HTTP server asks the driver over a channel and streams its events. A
//! *supervisor* is the parent of one job and survives the daemon; a *guard* puts limits back if the
//! daemon dies for good.

pub mod api;
pub mod clock;
pub mod config;
pub mod daemon;
pub mod deadline;
mod driver;
pub mod duration;
pub mod error;
pub mod fail;
#[cfg(test)]
mod faultsim;
pub mod guard;
pub mod instance;
pub mod jobdir;
pub mod journal;
mod launch;
mod lease;
mod metrics;
pub mod paths;
mod pulse;
pub mod record;
mod restore;
pub mod size;
pub mod spec;
mod token;
pub mod types;
mod words;

pub use gainshare_page::{LIBRARY_FILE, SWITCH_VARIABLE};
pub use launch::library_beside;
