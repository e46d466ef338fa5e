//! Moments of a node agent's clock as moments of this process.
//!
//! An agent's clock counts from the start of its machine. A message shows how far that clock has come by the
//! time the message arrives; the message that travelled fastest shows it best.

use std::time::{Duration, Instant};

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

    pub(crate) fn at(&self, us: u64) -> Instant {
        let (after, before) = (us.saturating_sub(self.at_us), self.at_us.saturating_sub(us));
        let moment = self.heard.checked_add(Duration::from_micros(after)).unwrap_or(self.heard);
        moment.checked_sub(Duration::from_micros(before)).unwrap_or(moment)
    }
}
