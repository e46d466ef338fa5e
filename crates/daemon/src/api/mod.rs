//! The HTTP API: types on the wire, who may speak, the routes, and a client.

mod auth;
pub mod client;
mod logs;
mod openapi;
mod routes;
mod serve;
pub mod types;

pub use auth::Token;
pub use openapi::document as openapi;
pub(crate) use serve::{Api, serve};
