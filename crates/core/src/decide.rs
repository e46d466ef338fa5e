//! The five decisions: `order`, `place`, `share`, `move`, `scale`.
//!
//! Each is one module, each answer to its question one function over values. A module appears here when it has more to say than
//! "leave it": `scale` will join with the first policy that answers it. (`move` is a word of the language, so its module is `relocate`.)

mod fair;
pub mod gang;
pub mod order;
pub mod place;
pub mod relocate;
pub mod share;
