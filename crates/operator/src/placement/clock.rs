//! Clocks: moments of this process, of node agents, and of objects, all as microseconds since 1970
//! that never jump.

use gainshare_core::model::Time;
use std::time::{Duration, Instant};

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

/// A node agent's clock on ours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AgentClock {
    heard: Instant,
    at_us: u64,
}

impl AgentClock {
    /// A message that the agent sent at `at_us` of its clock has arrived now.
    pub(crate) fn of(at_us: u64, heard: Instant) -> AgentClock {
        AgentClock { heard, at_us }
    }

    /// The better of two: the one whose message was under way for less time.
    pub(crate) fn quicker(self, other: AgentClock) -> AgentClock {
        let ours = other.heard.saturating_duration_since(self.heard).as_micros() as u64;
        let theirs = other.at_us.saturating_sub(self.at_us);
        if theirs > ours { other } else { self }
    }

    pub(super) fn at(&self, us: u64) -> Instant {
        let (after, before) = (us.saturating_sub(self.at_us), self.at_us.saturating_sub(us));
        let moment = self.heard.checked_add(Duration::from_micros(after)).unwrap_or(self.heard);
        moment.checked_sub(Duration::from_micros(before)).unwrap_or(moment)
    }
}
