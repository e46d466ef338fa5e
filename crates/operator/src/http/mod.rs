//! The network interface: node agents, admission reviews, health and metrics.

pub(crate) mod auth;
pub(crate) mod listen;
pub(crate) mod peers;
pub(crate) mod publish;
pub(crate) mod serve;
pub mod tls;
pub(crate) mod webhook;
