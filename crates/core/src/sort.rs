//! Numbers that can be sorted by.

use std::cmp::Ordering;

/// A number in total order; for numbers that are not NaN it is the usual one.
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
