//! The HTTP API: types on the wire, which requests are allowed, the routes, and a client.

mod auth;
pub mod client;
mod context;
mod logs;
mod openapi;
mod routes;
mod serve;
pub mod types;

pub use auth::Token;
pub(crate) use context::Api;
pub(crate) use serve::serve;

/// The OpenAPI document of all routes.
pub fn openapi() -> serde_json::Value {
    routes::document()
}
