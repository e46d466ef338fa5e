//! The network interface: node agents, admission reviews, health, metrics and recorded decisions.

pub(crate) mod auth;
#[cfg(test)]
mod body_tests;
pub(crate) mod inside;
pub(crate) mod listen;
pub(crate) mod peers;
pub(crate) mod publish;
pub(crate) mod record;
pub(crate) mod serve;
pub mod tls;
pub(crate) mod webhook;
