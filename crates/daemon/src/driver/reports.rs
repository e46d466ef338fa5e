//! What a job reports, and what must be kept so that a restart goes on at the same byte.
//!
//! The job's output comes from output.log in its directory; everything else (event files, a metrics file,
//! an endpoint, pushes) is the collector's business. Positions are committed together with the samples read
//! before them.
//!
//! The job's own folder may be on a file system that does not answer. So its files go to another thread
//! ([`super::files`]) and come back with what was read. Meanwhile the position is the one before that reading.

use super::files::{FileAnswer, FileRequest};
use super::pump::CopyPosition;
use crate::clock::Moment;
use gainshare_core::model::Time;
use gainshare_core::signal::speed::PaceTracker;
use gainshare_core::signal::{ClaimSource, Sample, Tracker};
use gainshare_limits::usage::Meter;
use gainshare_progress::prometheus::{Endpoint, FetchError};
use gainshare_progress::push::PushError;
use gainshare_progress::{
    self, Change, CollectorState, Counters, FileTail, GuardedCollector, MetricSpec, MetricSpecError, Root, RunLength,
    Update,
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// Output that one reading takes in. The rest is read next time, after the output of other jobs.
const MOST_WINDOWS: usize = 8;

/// Follows one live job.
pub(super) struct Reports {
    tail: Option<FileTail>,
    collector: GuardedCollector,
    began: Time,
    /// Where the job itself writes.
    folder: Option<PathBuf>,
    /// The command, while its configuration file was not searched for the length of the run.
    command: Option<Vec<String>>,
    away: Option<AwayFiles>,
}

/// A request for the job's own files that was not answered yet.
struct AwayFiles {
    is_cancelled: Arc<AtomicBool>,
    /// The job has ended, and this is its last reading.
    is_last: bool,
    /// The folder does not answer.
    is_stuck: bool,
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
    /// Whether its samples alone lead from `progress` to the state after this reading.
    pub(super) fn is_samples_only(&self, progress: &Progress) -> bool {
        let total = progress.tracker.signal().total;
        let is_same = |sample: &Sample| sample.total.is_none() || sample.total == total;
        let course = self.samples.last().map_or(progress.course, |last| progress.course_after(last));
        let is_known = self.progress.or(progress.course) == course;
        !self.forget && self.note.is_none() && is_known && self.samples.iter().all(is_same)
    }

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
        let length = RunLength::read(command, None);
        let command = length.is_empty().then(|| command.to_vec());
        collector.set_run_length(length);
        let root = Root::open(dir).inspect_err(|e| tracing::warn!("cannot open {}: {e}", dir.display())).ok();
        let tail = root.map(|root| FileTail::new(Arc::new(root), Path::new("output.log"), position.output, true));
        Ok(Reports { tail, collector, began: began.time, folder: folder.map(Path::to_path_buf), command, away: None })
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

    pub(super) fn claim_source(&self) -> Option<ClaimSource> {
        self.collector.claim_source()
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

    /// Gives the job's own files away to be read, unless there is nothing to read or they are away; `pids` reads which
    /// processes are the job's, as far as they are known. `last`: the job is over.
    pub(super) fn begin_files(
        &mut self,
        now: Time,
        last: bool,
        pids: impl FnOnce() -> Vec<u32>,
    ) -> Option<FileRequest> {
        let folder = self.folder.clone().filter(|_| self.away.is_none())?;
        let start = self.start_today(now);
        self.collector.read(|collector| {
            collector.correct_start(start);
            if collector.wants_pids(now) {
                collector.own_pids(pids());
            }
        });
        let task = self.collector.begin_reading(now, last);
        let command = self.command.take();
        if task.is_none() && command.is_none() {
            return None;
        }
        let is_cancelled = Arc::new(AtomicBool::new(false));
        self.away = Some(AwayFiles { is_cancelled: is_cancelled.clone(), is_last: last, is_stuck: false });
        Some(FileRequest { folder, command, task, is_cancelled })
    }

    /// Takes the answer to the request of this `ticket`: what was read, and whether it was the last reading.
    pub(super) fn end_files(
        &mut self,
        now: Time,
        ticket: &Arc<AtomicBool>,
        answer: FileAnswer,
    ) -> Option<(ProgressReading, bool)> {
        let away = self.away.take_if(|away| Arc::ptr_eq(&away.is_cancelled, ticket))?;
        if away.is_stuck
            && let Some(folder) = &self.folder
        {
            tracing::info!("{} answers again", folder.display());
        }
        if let Some(length) = answer.run_length {
            self.collector.set_run_length(length);
        }
        let mut reading = ProgressReading::default();
        if let Some(files) = answer.reading {
            reading.add(self.collector.end_reading(now, files));
        }
        Some((self.noted(reading), away.is_last))
    }

    pub(super) fn has_files_away(&self) -> bool {
        self.away.is_some()
    }

    /// Whether the job's folder does not answer.
    pub(super) fn is_stuck(&self) -> bool {
        self.away.as_ref().is_some_and(|away| away.is_stuck)
    }

    /// Sets whether the job's folder does not answer; `true` if this is new.
    pub(super) fn set_stuck(&mut self, is_stuck: bool) -> bool {
        let before = self.away.as_mut().map(|away| std::mem::replace(&mut away.is_stuck, is_stuck));
        is_stuck && before == Some(false)
    }

    /// What people should know while the folder does not answer.
    pub(super) fn folder_note(&self) -> Option<String> {
        let folder = self.folder.as_ref().filter(|_| self.is_stuck())?;
        Some(format!(
            "its folder {} does not answer: files in it are not read as reports until it does, output and pushes are; \
             check the server of its file system, or unmount it",
            folder.display()
        ))
    }

    /// The folder whose last files were not read.
    pub(super) fn unread_folder(&self) -> Option<&Path> {
        self.folder.as_deref().filter(|_| self.has_files_away())
    }

    /// Follows the job no more. Returns the position, and a request whose files are to be closed elsewhere.
    pub(super) fn close(mut self, now: Time) -> (Position, Option<FileRequest>) {
        let position = self.position();
        let request = self.begin_files(now, true, Vec::new);
        if let Some(away) = &self.away {
            away.is_cancelled.store(true, Ordering::Release);
        }
        (position, request)
    }

    /// The job is over: reads the rest of its output.
    pub(super) fn finish_output(&mut self, now: Time) -> ProgressReading {
        let mut reading = self.read_tail(now, true);
        reading.add(self.collector.read(|collector| collector.finish_output(now)));
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
    /// Steps of a job that reports none, by its rhythm.
    pub(super) rhythm_steps: Option<u64>,
    /// The most memory that it had on one GPU at once.
    pub(super) gpu_peak_bytes: Option<u64>,
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
            rhythm_steps: None,
            gpu_peak_bytes: None,
            next_seq: 0,
            stride: 1,
            metric: None,
            source: None,
        }
    }
}

impl Progress {
    /// How far the job is after a sample, if its unit and its total stay the same.
    pub(super) fn course_after(&self, sample: &Sample) -> Option<gainshare_progress::Progress> {
        self.course.map(|course| gainshare_progress::Progress { step: sample.step.unwrap_or(course.step), ..course })
    }

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
