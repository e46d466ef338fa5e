//! What others reach over the network: node agents, admission reviews, health and metrics.

pub(crate) mod auth;
pub(crate) mod publish;
pub(crate) mod serve;
pub mod tls;
pub(crate) mod webhook;
