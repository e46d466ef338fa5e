//! Clocks: moments of this process and of objects, both as microseconds since 1970 that never jump.

use gainshare_core::model::Time;
use std::time::Instant;

/// From moments of this process to microseconds since 1970 that never jump.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    pub(super) origin: Instant,
    pub(super) unix_us: u64,
}

impl Clock {
    pub(super) fn at(&self, moment: Instant) -> Time {
        let after = moment.saturating_duration_since(self.origin).as_micros() as u64;
        let before = self.origin.saturating_duration_since(moment).as_micros() as u64;
        Time(self.unix_us.saturating_add(after).saturating_sub(before))
    }
}

/// A moment of an object.
pub(super) fn time(at: jiff::Timestamp) -> Time {
    Time(at.as_microsecond().max(0) as u64)
}
