//! Whether every long-lived thread of the daemon still does its work.
//!
//! Each loop records the boot clock whenever it comes round. [`Pulses::report`] compares the
//! records with the clock; it asks no loop, so it answers even if one is stuck. A loop that ends
//! without having been asked to is reported by [`Sentinel`], whose destructor also runs when the
//! thread panics.

use crate::clock::boottime_ns;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A loop that has not come round for this long is stuck. Every loop comes round at least once a second.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(10);

/// One loop's sign of life.
#[derive(Debug, Clone)]
pub(crate) struct Pulse(Arc<AtomicU64>);

impl Pulse {
    fn new() -> Pulse {
        Pulse(Arc::new(AtomicU64::new(boottime_ns())))
    }

    /// Called by the loop each time it comes round.
    pub(crate) fn beat(&self) {
        self.0.store(boottime_ns(), Ordering::Relaxed);
    }

    fn age(&self, now_ns: u64) -> Duration {
        Duration::from_nanos(now_ns.saturating_sub(self.0.load(Ordering::Relaxed)))
    }
}

/// The loops of one daemon, by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pulses(Arc<Mutex<Vec<(&'static str, Pulse)>>>);

impl Pulses {
    /// Adds a loop; one of the same name that was replaced is dropped.
    pub(crate) fn register(&self, name: &'static str) -> Pulse {
        let pulse = Pulse::new();
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|(other, _)| *other != name);
        list.push((name, pulse.clone()));
        pulse
    }

    /// Each loop's name and how long ago it came round.
    pub(crate) fn report(&self) -> Vec<(&'static str, Duration)> {
        let now_ns = boottime_ns();
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().map(|(name, pulse)| (*name, pulse.age(now_ns))).collect()
    }
}

/// Calls its function when it is dropped: put into a thread, it reports the thread's end, also by a panic.
pub(crate) struct Sentinel<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Sentinel<F> {
    pub(crate) fn new(report: F) -> Sentinel<F> {
        Sentinel(Some(report))
    }

    /// The end is expected: nothing is reported.
    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for Sentinel<F> {
    fn drop(&mut self) {
        if let Some(report) = self.0.take() {
            report();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_panics_is_reported_and_one_that_was_asked_to_end_is_not() {
        let (sender, ended) = std::sync::mpsc::channel();
        let report = |name: &'static str| {
            let sender = sender.clone();
            Sentinel::new(move || {
                let _ = sender.send(name);
            })
        };
        let (bad, good) = (report("panicked"), report("asked"));
        let panicking = std::thread::spawn(move || {
            let _sentinel = bad;
            panic!("as a test");
        });
        assert!(panicking.join().is_err());
        std::thread::spawn(move || good.disarm()).join().unwrap();
        drop(sender);
        assert_eq!(ended.iter().collect::<Vec<_>>(), ["panicked"]);
    }

    #[test]
    fn a_loop_that_does_not_come_round_grows_old() {
        let pulses = Pulses::default();
        let (stuck, sound) = (pulses.register("stuck"), pulses.register("sound"));
        stuck.0.store(0, Ordering::Relaxed);
        sound.beat();
        let ages = pulses.report();
        assert!(ages[0].1 > STUCK_AFTER && ages[1].1 < STUCK_AFTER, "{ages:?}");
    }
}
