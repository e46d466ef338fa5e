//! Pauses between retries: the first is short, each later one is twice as long, up to a longest one.
//!
//! **Properties.** `doubles_up_to_the_longest`; `reset` makes the next pause the first one again.

use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff { first, longest, next: first }
    }

    /// The pause before the next retry.
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.longest);
        pause
    }

    /// The last attempt succeeded.
    pub fn reset(&mut self) {
        self.next = self.first;
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
}
