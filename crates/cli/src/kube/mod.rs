//! The commands that run in a cluster, or talk to one.

pub mod crd;
pub mod operator;
