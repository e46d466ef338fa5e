//! The tests of the daemon in one program: what they share is compiled and linked once. `cargo xtask test`
//! runs each module as a program of its own.

#[path = "common/batches.rs"]
mod batches;
mod common;
#[path = "../../limits/tests/dockerd/mod.rs"]
mod dockerd;
#[path = "common/engine.rs"]
mod false_engine;

mod api;
mod clock;
mod daemon;
mod deadlines;
mod docker;
mod engine;
mod faults;
mod floods;
mod folders;
mod gpu;
mod journal;
mod limit_files;
mod restart;
mod rhythm;
mod spec;
mod synced;
mod upgrade;
