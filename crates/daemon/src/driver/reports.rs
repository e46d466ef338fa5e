//! What a job reports, and what must be kept so that a restart goes on at the same byte.
//!
//! The job's output comes from output.log in its directory; everything else (event files, a metrics file,
//! an endpoint, pushes) is the collector's business. Positions are committed together with the samples read
//! before them.

use super::pump::CopyPosition;
use crate::clock::Moment;
use gainshare_core::model::Time;
use gainshare_core::signal::speed::PaceTracker;
use gainshare_core::signal::{Sample, Tracker};
use gainshare_limits::usage::Meter;
use gainshare_progress::prometheus::{Endpoint, FetchError};
use gainshare_progress::push::PushError;
use gainshare_progress::{
    self, Change, CollectorState, Counters, FileTail, FolderListings, GuardedCollector, MetricSpec, MetricSpecError,
    Root, RunLength, Update,
};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Output that one reading takes in. The rest is read next time, after the output of other jobs.
const MOST_WINDOWS: usize = 8;

/// Follows one live job.
pub(super) struct Reports {
    tail: Option<FileTail>,
    collector: GuardedCollector,
    began: Time,
}

/// Where reading stands.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Position {
    output: gainshare_progress::Position,
    collector: CollectorState,
}

/// What was read from a job's output, files or pushes at one moment.
#[derive(Debug, Default)]
pub(super) struct ProgressReading {
    /// Earlier samples belong to another metric.
    pub(super) forget: bool,
    pub(super) samples: Vec<Sample>,
    pub(super) progress: Option<gainshare_progress::Progress>,
    /// There is more output than one reading may read.
    pub(super) more: bool,
    /// A sentence for people about the job's reports.
    pub(super) note: Option<String>,
}

impl ProgressReading {
    fn add(&mut self, update: Update) {
        if update.forget {
            self.samples.clear();
            self.forget = true;
        }
        self.samples.extend(update.readings.iter().map(Sample::from));
        self.progress = update.progress.or(self.progress);
    }
}

impl Reports {
    /// `dir` is the job's directory with output.log in it, `folder` where the job itself writes, `began` when it began.
    pub(super) fn open(
        spec: &MetricSpec,
        command: &[String],
        dir: &Path,
        folder: Option<&Path>,
        began: Moment,
        position: Position,
    ) -> Result<Reports, MetricSpecError> {
        let started = SystemTime::UNIX_EPOCH + Duration::try_from_secs_f64(began.unix_s).unwrap_or_default();
        let mut collector = GuardedCollector::new(spec, folder, started, position.collector)?;
        collector.set_run_length(RunLength::read(command, folder));
        let root = Root::open(dir).inspect_err(|e| tracing::warn!("cannot open {}: {e}", dir.display())).ok();
        let tail = root.map(|root| FileTail::new(Arc::new(root), Path::new("output.log"), position.output, true));
        Ok(Reports { tail, collector, began: began.time })
    }

    /// The job's start by the wall clock as it is set now. The clock may have been set since.
    fn start_today(&self, now: Time) -> SystemTime {
        let age = Duration::from_micros(now.since(self.began).0);
        SystemTime::now().checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    pub(super) fn position(&self) -> Position {
        let output = self.tail.as_ref().map(FileTail::position).unwrap_or_default();
        Position { output, collector: self.collector.state() }
    }

    pub(super) fn metric(&self) -> Option<&str> {
        self.collector.metric()
    }

    pub(super) fn source(&self) -> Option<String> {
        self.collector.source().map(|s| s.to_string())
    }

    pub(super) fn counters(&self) -> Counters {
        self.collector.counters()
    }

    /// Reads what was printed since the last reading.
    pub(super) fn read_output(&mut self, now: Time) -> ProgressReading {
        self.read_tail(now, false)
    }

    /// Reads output. `follow`: also what another file of the same name holds, after the end of this one.
    fn read_tail(&mut self, now: Time, follow: bool) -> ProgressReading {
        let Some(tail) = &mut self.tail else { return ProgressReading::default() };
        self.collector.begin_round(now);
        let reading = self.collector.read(|collector| {
            let mut reading = ProgressReading::default();
            for _ in 0..MOST_WINDOWS {
                match tail.fill() {
                    Ok(Change::Same) | Err(_) => return reading,
                    Ok(Change::More | Change::Rotated | Change::Rewritten) => {}
                }
                crate::fail::panic_on(tail.data());
                reading.add(collector.output(now, tail.data()));
                tail.consume(tail.data().len());
                if !follow && tail.is_at_end() {
                    return reading;
                }
            }
            reading.more = true;
            reading
        });
        self.noted(reading)
    }

    /// Looks at the job's own files; `pids` reads which processes are the job's, as far as they are known.
    pub(super) fn read_files(
        &mut self,
        now: Time,
        pids: impl FnOnce() -> Vec<u32>,
        listings: &mut FolderListings,
    ) -> ProgressReading {
        let start = self.start_today(now);
        self.collector.begin_round(now);
        let mut reading = ProgressReading::default();
        reading.add(self.collector.read(|collector| {
            collector.correct_start(start);
            if collector.wants_pids(now) {
                collector.own_pids(pids());
            }
            collector.poll_with(now, listings)
        }));
        self.noted(reading)
    }

    /// The job is over.
    pub(super) fn finish(&mut self, now: Time) -> ProgressReading {
        let mut reading = self.read_tail(now, true);
        let start = self.start_today(now);
        reading.add(self.collector.read(|collector| {
            collector.correct_start(start);
            collector.finish(now)
        }));
        self.noted(reading)
    }

    pub(super) fn pushed(&mut self, now: Time, body: &[u8]) -> Result<ProgressReading, PushError> {
        let mut reading = ProgressReading::default();
        if let Some(update) = self.collector.read(|collector| Some(collector.pushed(now, body))) {
            reading.add(update?);
        }
        Ok(self.noted(reading))
    }

    /// The endpoint to ask now, elsewhere, because asking blocks.
    pub(super) fn fetch_due(&mut self, now: Time) -> Option<Endpoint> {
        self.collector.read(|collector| collector.fetch_due(now))
    }

    pub(super) fn fetched(&mut self, now: Time, answer: Result<Vec<u8>, FetchError>) -> ProgressReading {
        let mut reading = ProgressReading::default();
        reading.add(self.collector.read(|collector| collector.fetched(now, answer)));
        self.noted(reading)
    }

    /// Adds what people should know about the job's reports, once.
    fn noted(&mut self, reading: ProgressReading) -> ProgressReading {
        ProgressReading { note: self.collector.take_note().or(reading.note), ..reading }
    }
}

/// All that a restart needs to go on with a job's reports.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Progress {
    pub(super) tracker: Tracker,
    pub(super) position: Position,
    /// For a container.
    pub(super) copied: CopyPosition,
    pub(super) meter: Meter,
    /// How long its steps take at which share.
    pub(super) pace: PaceTracker,
    /// How far the job is, in its own words.
    pub(super) course: Option<gainshare_progress::Progress>,
    /// The number of the next sample.
    pub(super) next_seq: u64,
    /// Only samples whose number is a multiple of this are kept; 0 in a damaged journal.
    pub(super) stride: u64,
    pub(super) metric: Option<String>,
    pub(super) source: Option<String>,
}

impl Default for Progress {
    fn default() -> Self {
        Progress {
            tracker: Tracker::default(),
            position: Position::default(),
            copied: CopyPosition::default(),
            meter: Meter::default(),
            pace: PaceTracker::default(),
            course: None,
            next_seq: 0,
            stride: 1,
            metric: None,
            source: None,
        }
    }
}

impl Progress {
    /// At least 1.
    pub(super) fn stride(&self) -> u64 {
        self.stride.max(1)
    }

    pub(super) fn double_stride(&mut self) {
        self.stride = self.stride().saturating_mul(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stride_of_zero_or_none_divides_nothing() {
        for text in ["{}", r#"{"stride":0}"#] {
            let mut progress: Progress = serde_json::from_str(text).unwrap();
            assert_eq!(progress.stride(), 1, "{text}");
            progress.double_stride();
            assert_eq!(progress.stride(), 2, "{text}");
        }
    }
}
