//! The five decisions: `order`, `place`, `share`, `move`, `scale`.
//!
//! Each is one module, each answer to its question one function over values. A module appears here when it has more to say than
//! "leave it": `move` and `scale` will join `order`, `place` and `share` with the first policy that answers them.

pub mod order;
pub mod place;
pub mod share;
