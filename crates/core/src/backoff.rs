//! Pauses between retries: the first is short, each later one is twice as long, up to a longest one.
//!
//! Every program that tries something again takes its pauses from here. There is no clock in it: the caller waits.
//!
//! **Properties.** `doubles_up_to_the_longest`; `reset` makes the next pause the first one again.

use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    /// Failures since the last success.
    failures: u32,
}

impl Backoff {
    pub const fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff { first, longest, failures: 0 }
    }

    /// The attempt failed: the pause before the next one.
    pub fn next_pause(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        self.pause_after(self.failures)
    }

    /// The pause after this number of failures in a row, for a caller that counts them itself.
    pub fn pause_after(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.longest)
    }

    pub const fn longest(&self) -> Duration {
        self.longest
    }

    /// The last attempt succeeded.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_the_longest() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(500));
        assert_eq!([0; 5].map(|_| backoff.next_pause()), [ms(100), ms(200), ms(400), ms(500), ms(500)]);
        backoff.reset();
        assert_eq!(backoff.next_pause(), ms(100));
        let mut huge = Backoff::new(Duration::MAX, Duration::MAX);
        assert_eq!([huge.next_pause(), huge.next_pause()], [Duration::MAX; 2]);
    }

    #[test]
    fn callers_that_count_get_the_same_pauses() {
        let ms = Duration::from_millis;
        let mut counted = Backoff::new(ms(100), ms(500));
        for failures in 1..100 {
            assert_eq!(Backoff::new(ms(100), ms(500)).pause_after(failures), counted.next_pause(), "{failures}");
        }
        assert_eq!(counted.pause_after(0), ms(100));
        assert_eq!(counted.pause_after(u32::MAX), counted.longest());
    }
}
