//! The HTTP API: types on the wire, the server's routes and the client.

pub mod client;
pub mod types;
