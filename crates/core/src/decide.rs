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

use std::cmp::Ordering;

/// A number that can be sorted by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key(pub(crate) f64);

impl Ord for Key {
    fn cmp(&self, other: &Key) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Key {}
