//! The HTTP API: which requests are allowed, the routes, and a client. The types of requests and answers are
//! in [`crate::types`], because driver and journal use them too.

mod auth;
pub mod client;
mod context;
mod logs;
mod openapi;
mod routes;
mod serve;

pub use crate::types;
pub(crate) use context::Api;
pub(crate) use serve::serve;

/// The OpenAPI document of all routes.
pub fn openapi() -> serde_json::Value {
    routes::document()
}
