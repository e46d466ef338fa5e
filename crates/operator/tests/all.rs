//! The tests of the operator in one program: what they share is compiled and linked once. `cargo xtask test`
//! runs each module as a program of its own.

#[path = "../../../xtask/tests/common/mod.rs"]
mod common;
mod invariants;

mod admission;
mod chart;
mod cluster;
mod crashes;
mod gangs;
mod jobs;
mod kills;
mod nodes;
mod outages;
mod secrets;
mod share_crashes;
mod task_jobs;
mod tensorflow;
mod upgrades;
mod watches;
