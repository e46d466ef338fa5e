//! The wall around the collectors of one job: a panic inside them goes no further.
//!
//! **Problem.** A job controls everything that its collectors read. A fault in a parser must not take
//! down the daemon or the node agent, which serve all other jobs too.
//!
//! **How.** Drivers read a job only through [`GuardedCollector::read`]. A panic in there switches the
//! job's collectors off for good: the collector is dropped, the panic is counted, and a note names the
//! source. The job goes on; a policy treats it like a job that reports nothing and leaves it its fair
//! share. The stored state remembers that the collectors are off, so a restart does not meet the same
//! panic again.
//!
//! **Properties.** `read` and `new` never panic (where the program unwinds on panics).

use crate::collector::{Collector, CollectorState, Update};
use crate::files::{FileTask, FilesReading};
use crate::reading::Counters;
use crate::run_length::RunLength;
use crate::spec::{MetricSpec, MetricSpecError, Source};
use gainshare_core::model::Time;
use gainshare_core::signal::ClaimSource;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::SystemTime;

/// Runs `work`; `None` if it panics. The caller drops whatever `work` may have left half-way through a
/// change.
pub fn contain_panic<R>(work: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

/// A [`Collector`] that is switched off by its first panic.
#[derive(Debug)]
pub struct GuardedCollector {
    collector: Option<Collector>,
    /// The state to store once the collector is off.
    last: CollectorState,
    note: Option<String>,
    note_given: bool,
}

impl GuardedCollector {
    /// As [`Collector::new`]. A state that says "switched off" gives a collector that stays off.
    pub fn new(
        spec: &MetricSpec,
        folder: Option<&Path>,
        started: SystemTime,
        state: CollectorState,
    ) -> Result<GuardedCollector, MetricSpecError> {
        let off = |last| GuardedCollector { collector: None, last, note: None, note_given: false };
        if state.switched_off.is_some() {
            return Ok(off(state));
        }
        match contain_panic(|| Collector::new(spec, folder, started, state)) {
            Some(collector) => Ok(GuardedCollector { collector: Some(collector?), ..off(CollectorState::default()) }),
            None => {
                let mut guarded = off(CollectorState::default());
                guarded.switch_off(spec.source);
                Ok(guarded)
            }
        }
    }

    /// As [`Collector::set_run_length`].
    pub fn set_run_length(&mut self, claim: RunLength) {
        if let Some(collector) = &mut self.collector {
            collector.set_run_length(claim);
        }
    }

    /// Begins a round of reading at `now`. A driver calls it once for each visit to the job: it limits
    /// the CPU time of the job's pattern during the visit.
    pub fn begin_round(&mut self, now: Time) {
        if let Some(collector) = &mut self.collector {
            collector.begin_round(now);
        }
    }

    /// Reads the job: `reading` calls the collector as often as it needs to. Returns the default if
    /// the collectors are off or panic.
    pub fn read<R: Default>(&mut self, reading: impl FnOnce(&mut Collector) -> R) -> R {
        let Some(collector) = &mut self.collector else { return R::default() };
        match contain_panic(|| reading(collector)) {
            Some(result) => {
                if self.note.is_none() {
                    self.note = collector.note();
                }
                result
            }
            None => {
                let source = collector.reading();
                // Counters and the source are plain values. Positions may be half-way through a change
                // and are not kept.
                self.last.counters = collector.counters();
                self.last.source = collector.source();
                self.switch_off(source);
                R::default()
            }
        }
    }

    /// As [`Collector::begin_reading`].
    pub fn begin_reading(&mut self, now: Time, last: bool) -> Option<FileTask> {
        self.read(|collector| collector.begin_reading(now, last))
    }

    /// As [`Collector::end_reading`]. A panic on the thread that read switches the collectors off, too.
    pub fn end_reading(&mut self, now: Time, reading: FilesReading) -> Update {
        self.read(|collector| collector.end_reading(now, reading))
    }

    fn switch_off(&mut self, source: Source) {
        self.collector = None;
        self.last.switched_off = Some(source);
        self.last.counters.panics = self.last.counters.panics.saturating_add(1);
        self.note = Some(format!(
            "reading its progress failed inside the {source} collector, which is a fault of gainshare: its progress is \
             not read any more, and it goes on with an equal share"
        ));
        self.note_given = false;
    }

    /// Whether a panic has switched the collectors off.
    pub fn is_off(&self) -> bool {
        self.collector.is_none()
    }

    /// A sentence for people that was not returned before.
    pub fn take_note(&mut self) -> Option<String> {
        let note = self.note.clone().filter(|_| !self.note_given);
        self.note_given |= note.is_some();
        note
    }

    /// The state to store; see [`Collector::state`].
    pub fn state(&self) -> CollectorState {
        self.collector.as_ref().map_or_else(|| self.last.clone(), Collector::state)
    }

    /// The source of the readings, once there is one.
    pub fn source(&self) -> Option<Source> {
        self.collector.as_ref().map_or(self.last.source, Collector::source)
    }

    /// As [`Collector::claim_source`]. `None` once the collectors are off.
    pub fn claim_source(&self) -> Option<ClaimSource> {
        self.collector.as_ref().and_then(Collector::claim_source)
    }

    /// The metric that is the job's evaluation function, as the job writes it. `None` once the
    /// collectors are off.
    pub fn metric(&self) -> Option<&str> {
        self.collector.as_ref().and_then(Collector::metric)
    }

    /// What was refused or dropped.
    pub fn counters(&self) -> Counters {
        self.collector.as_ref().map_or(self.last.counters, Collector::counters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(state: CollectorState) -> GuardedCollector {
        GuardedCollector::new(&MetricSpec::default(), None, SystemTime::UNIX_EPOCH, state).unwrap()
    }

    #[test]
    fn a_panic_switches_the_collectors_off_and_is_reported_once() {
        let mut job = follow(CollectorState::default());
        let readings = |job: &mut GuardedCollector, text: &[u8]| {
            job.read(|collector| collector.output(Time::ZERO, text)).readings.len()
        };
        assert_eq!(readings(&mut job, b"loss: 2\nloss: nan\n"), 1);
        assert_eq!((job.take_note(), job.is_off()), (None, false));
        let result: u64 = job.read(|collector| {
            collector.poll(Time::ZERO);
            panic!("a fault in a parser")
        });
        assert_eq!((result, job.is_off()), (0, true));
        let note = job.take_note().unwrap();
        assert!(note.contains("file collector") && note.contains("equal share"), "{note}");
        assert_eq!(job.take_note(), None, "once");
        assert_eq!((job.counters().panics, job.counters().bad_values), (1, 1));
        assert_eq!(readings(&mut job, b"loss: 1\n"), 0);

        let stored: CollectorState = serde_json::from_str(&serde_json::to_string(&job.state()).unwrap()).unwrap();
        let mut job = follow(stored);
        assert_eq!((job.is_off(), job.take_note(), job.counters().panics), (true, None, 1));
        assert_eq!(readings(&mut job, b"loss: 1\n"), 0, "a restart keeps it off");
    }

    #[test]
    fn a_costly_pattern_is_reported_once() {
        let spec = MetricSpec { pattern: Some("(?P<value>[0-9]+)".into()), ..MetricSpec::default() };
        let mut job = GuardedCollector::new(&spec, None, SystemTime::UNIX_EPOCH, CollectorState::default()).unwrap();
        job.begin_round(Time::ZERO);
        let lines = "1 2 3 4 5 6 7 8 9 10\n".repeat(1000);
        // The clock of a round is the thread's CPU time, so this ends as soon as 50 ms are used.
        let rested = job.read(|collector| {
            (0..1_000_000u64).any(|i| {
                collector.output(Time::from_secs_f64(i as f64), lines.as_bytes());
                collector.counters().rested_lines > 0
            })
        });
        assert!(rested);
        assert!(job.take_note().is_some_and(|note| note.contains("pattern")));
        assert_eq!(job.take_note(), None);
    }
}
