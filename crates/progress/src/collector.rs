//! All sources of one job together.
//!
//! **How.** A driver hands over what arrives by itself (output, pushes, the answers of an endpoint)
//! and calls [`Collector::poll`] about once a second, which reads files. Each call gives an
//! [`Update`]: readings of the one metric that is the job's evaluation function, and the job's
//! progress. Drivers use the collector through [`crate::GuardedCollector`].
//!
//! **Which source.** The job's [`MetricSpec`] names one; otherwise the first in the order of
//! [`Source`] that reports a suitable metric is chosen. A better one may still take over during the
//! first [`SETTLE`], and any other after the chosen one was silent for [`SILENCE`]; then
//! [`Update::forget`] says that earlier values belong to something else. A metrics file that was
//! found by itself is used only if the output reports nothing, because its name does not tell which
//! of several jobs in a folder writes it. Event files name their writer, see
//! [`Collector::own_pids`].
//!
//! **Files.** A folder may be on a file system that does not answer. [`Collector::begin_reading`] gives the files away,
//! another thread reads them, and [`Collector::end_reading`] takes the result: see [`crate::files`].
//!
//! **Properties.** Only [`Collector::poll`] and [`Collector::finish`] access the job's folder; no other call blocks. A
//! job that floods its output costs at most
//! [`OUTPUT_BYTES_PER_S`] of parsing and gets at most [`MAX_READINGS`] readings a call; the rest of
//! its output is dropped and counted, the rest of its files waits. [`Collector::state`] after a call,
//! stored together with the update of that call, lets a restarted daemon continue without losing or
//! doubling a reading.

use crate::chooser::{Chooser, Selection};
use crate::discover::FolderListings;
use crate::files::{
    FileTask, FilesAfter, FilesReading, FilesState, FolderSearch, JobFiles, MAX_READINGS, MAX_SCAN_PACE,
};
use crate::metrics_file::{FileState, MetricsFile};
use crate::output::{OutputParser, OutputState};
use crate::prometheus::{self, Endpoint, FetchError};
use crate::push::{self, PushError};
use crate::reading::{Batch, Counters, MetricReading, Progress};
use crate::root::Root;
use crate::run_length::RunLength;
use crate::spec::{MetricSpec, MetricSpecError, Source};
use crate::stored_path::StoredPath;
use crate::tail::Position;
use gainshare_core::model::{Span, Time};
use gainshare_core::signal::ClaimSource;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// While a source is new, a better one may replace it: long enough for a first epoch of a small model.
const SETTLE: Span = Span::from_secs(60);

/// After this long without a reading any other source may take over.
const SILENCE: Span = Span::from_secs(600);

/// A metrics file found by itself is ignored this long, so that the job's output comes first.
const FILE_AFTER: Span = Span::from_secs(15);

/// Output beyond this is dropped. 10,000 lines of 200 bytes a second are read.
const OUTPUT_BYTES_PER_S: u64 = 2 << 20;

/// Time between two fetches of an endpoint.
const FETCH_EVERY: Span = Span::from_secs(2);

/// The result of one call.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Update {
    /// Readings of the job's evaluation function, oldest first.
    pub readings: Vec<MetricReading>,
    /// How far the job is, if it reported that.
    pub progress: Option<Progress>,
    /// The readings are of another metric or source than all before; those are to be forgotten.
    pub forget: bool,
}

impl Update {
    /// Appends the result of a later call.
    fn append(&mut self, later: Update) {
        if later.forget {
            self.readings.clear();
        }
        self.forget |= later.forget;
        self.readings.extend(later.readings);
        self.progress = later.progress.or(self.progress.take());
    }
}

/// The stored state of a [`Collector`]. Small: a few kilobytes at most, mostly the beginning of a
/// line.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CollectorState {
    chooser: Chooser,
    pub(crate) source: Option<Source>,
    output: OutputState,
    events: BTreeMap<StoredPath, Position>,
    file: Option<(StoredPath, FileState)>,
    pub(crate) counters: Counters,
    /// The source whose collector panicked. A job with such a state is not read any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) switched_off: Option<Source>,
}

/// Follows one job; see the module documentation.
#[derive(Debug)]
pub struct Collector {
    spec: MetricSpec,
    /// The collector began without a stored state.
    fresh: bool,
    endpoint: Option<Endpoint>,
    files: Files,
    /// The source that is being read: the one to blame for a panic.
    reading: Source,
    chooser: Chooser,
    source: Option<Source>,
    chosen_at: Option<Time>,
    last_reading_at: Option<Time>,
    output: OutputParser,
    output_allowance: Allowance,
    next_fetch: Time,
    last_fetched: BTreeMap<String, (f64, Option<u64>)>,
    /// Counts of earlier daemons and of this module itself.
    counters: Counters,
}

/// Where the job's files are.
#[derive(Debug)]
enum Files {
    /// The job has no folder.
    None,
    Here(Box<JobFiles>),
    /// The files are being read, or were closed. The state is the one before that reading, or the last one.
    Away(Box<FilesState>),
}

impl Collector {
    /// `folder` is where the job may write (its working directory), if it has one that is readable.
    /// `started` is when the job began, by the wall clock, which also stamps files.
    pub fn new(
        spec: &MetricSpec,
        folder: Option<&Path>,
        started: SystemTime,
        state: CollectorState,
    ) -> Result<Collector, MetricSpecError> {
        spec.validate()?;
        let pattern = spec.compiled_pattern()?;
        // Opened by the first reading of files.
        let root = folder.map(Root::later).map(Arc::new);
        let fresh = state == CollectorState::default();
        let positions = state.events.into_iter().map(|(path, position)| (path.0, position)).collect();
        if let (Some(root), Some(path)) = (&root, &spec.path)
            && root.relative(Path::new(path)).is_none()
        {
            return Err(MetricSpecError::PathEscapes { path: path.clone() });
        }
        let named = spec.path.as_deref().filter(|_| spec.source == Source::File).map(Path::new);
        let file = root.as_ref().and_then(|root| {
            let (path, stored) = match (state.file, named) {
                (Some((path, stored)), _) => (path.0, stored),
                (None, Some(path)) => (root.relative(path)?.to_path_buf(), FileState::default()),
                (None, None) => return None,
            };
            let pattern = pattern.clone().filter(|_| spec.source == Source::File);
            Some(MetricsFile::new(root.clone(), &path, pattern, stored))
        });
        let files = match root {
            Some(root) => Files::Here(Box::new(JobFiles::new(root, started, positions, file))),
            None => Files::None,
        };
        let mut spec = spec.clone();
        // A pattern is for the output unless the job names a file. It is never used for both, so that
        // the job has one budget of CPU time.
        if spec.source == Source::Auto && spec.pattern.is_some() {
            spec.source = Source::Output;
        }
        let pattern = pattern.filter(|_| spec.source != Source::File);
        Ok(Collector {
            fresh,
            endpoint: spec.url.as_deref().map(Endpoint::parse).transpose()?,
            chooser: if fresh { Chooser::new(spec.name.as_deref(), spec.goal) } else { state.chooser },
            reading: spec.source,
            source: state.source,
            chosen_at: None,
            last_reading_at: None,
            output: OutputParser::resume(pattern, state.output),
            output_allowance: Allowance::default(),
            next_fetch: Time::ZERO,
            last_fetched: BTreeMap::new(),
            counters: state.counters,
            spec,
            files,
        })
    }

    /// Takes the job's start by the wall clock as it is set now. Without it, the files of a job are not found any more
    /// once the clock was set back.
    pub fn correct_start(&mut self, started: SystemTime) {
        if let Files::Here(files) = &mut self.files {
            files.correct_start(started);
        }
    }

    /// Takes what the job's command claims about the length of the run. A collector that goes on from a
    /// stored state has it already.
    pub fn set_run_length(&mut self, claim: RunLength) {
        if self.fresh {
            self.output.set_run_length(claim);
        }
    }

    /// The state to store; it belongs to everything that was handed out so far.
    pub fn state(&self) -> CollectorState {
        let (events, file) = match &self.files {
            Files::None => Default::default(),
            Files::Here(files) => (files.events(), files.file()),
            Files::Away(state) => (state.events.clone(), state.file.clone()),
        };
        CollectorState {
            chooser: self.chooser.clone(),
            source: self.source,
            output: self.output.state().clone(),
            events,
            file,
            counters: self.counters(),
            switched_off: None,
        }
    }

    /// The source of the readings, once there is one.
    pub fn source(&self) -> Option<Source> {
        self.source
    }

    /// Where the newest total number of steps was read.
    pub fn claim_source(&self) -> Option<ClaimSource> {
        match self.source? {
            Source::Output => self.output.claim_source(),
            Source::Push => Some(ClaimSource::Push),
            Source::Tensorboard | Source::Prometheus | Source::File => Some(ClaimSource::File),
            Source::Auto => None,
        }
    }

    /// The metric that is the job's evaluation function, once it is known, as the job writes it.
    pub fn metric(&self) -> Option<&str> {
        self.chooser.metric()
    }

    /// The source that is being read, or was read last.
    pub(crate) fn reading(&self) -> Source {
        self.reading
    }

    /// Begins a round: the CPU budget of the job's pattern for its output is set.
    pub fn begin_round(&mut self, now: Time) {
        self.output.begin_round(now);
    }

    /// A sentence for people, if something about the job's settings needs their attention.
    pub fn note(&self) -> Option<String> {
        self.output.note().or_else(|| match &self.files {
            Files::None => None,
            Files::Here(files) => files.note(),
            Files::Away(state) => state.note.clone(),
        })
    }

    /// What was refused or dropped.
    pub fn counters(&self) -> Counters {
        let mut all = self.counters;
        all += self.output.counters();
        all += match &self.files {
            Files::None => Counters::default(),
            Files::Here(files) => files.counters(),
            Files::Away(state) => state.counters,
        };
        all
    }

    /// Sets which processes are the job's, so that the event files of a neighbour in the same folder
    /// are left out. To be called before each poll while [`Collector::wants_pids`]. While none is known, every
    /// event file below the folder counts as the job's own.
    pub fn own_pids(&mut self, pids: impl IntoIterator<Item = u32>) {
        if let Files::Here(files) = &mut self.files {
            files.add_pids(pids);
        }
    }

    /// Whether [`Collector::own_pids`] matters at `now`: files of the folder could become the job's source. While
    /// another source reports, the processes at the time of a search are enough.
    pub fn wants_pids(&self, now: Time) -> bool {
        let Files::Here(files) = &self.files else { return false };
        let is_served = self.source.is_some_and(|source| source != Source::Tensorboard);
        let is_search_due = now >= files.next_scan;
        self.spec.source == Source::Auto && !self.is_settled_without_events(now) && (!is_served || is_search_due)
    }

    /// Takes the next bytes that the job printed.
    pub fn output(&mut self, now: Time, bytes: &[u8]) -> Update {
        self.reading = Source::Output;
        let allowed = self.output_allowance.take(now, bytes.len());
        let mut batch = Batch::default();
        self.output.feed(&bytes[..allowed], &mut batch);
        self.output.skip(&bytes[allowed..]);
        self.accept(now, Source::Output, batch)
    }

    /// Takes the body of a push.
    pub fn pushed(&mut self, now: Time, body: &[u8]) -> Result<Update, PushError> {
        self.reading = Source::Push;
        let batch = push::parse(body, &mut self.counters)?;
        Ok(self.accept(now, Source::Push, batch))
    }

    /// The endpoint to ask now, if it is time; its answer goes to [`Self::fetched`]. Asking blocks, so
    /// it belongs on another thread.
    pub fn fetch_due(&mut self, now: Time) -> Option<Endpoint> {
        if self.endpoint.is_none() || now < self.next_fetch {
            return None;
        }
        self.next_fetch = now + FETCH_EVERY;
        self.endpoint.clone()
    }

    /// Takes an endpoint's answer. A value that did not change since the last answer is no new report.
    pub fn fetched(&mut self, now: Time, answer: Result<Vec<u8>, FetchError>) -> Update {
        self.reading = Source::Prometheus;
        let Ok(body) = answer else {
            self.count_failure();
            return Update::default();
        };
        let mut batch = prometheus::parse(&body, &mut self.counters);
        let last = std::mem::take(&mut self.last_fetched);
        self.last_fetched = batch.readings.iter().map(|r| (r.metric.clone(), (r.value, r.step))).collect();
        batch.readings.retain(|r| last.get(&r.metric) != Some(&(r.value, r.step)));
        self.accept(now, Source::Prometheus, batch)
    }

    /// Reads files: those that are followed at each call, the folder now and then.
    pub fn poll(&mut self, now: Time) -> Update {
        self.poll_with(now, &mut FolderListings::default())
    }

    /// [`Collector::poll`] with the listings of folders that several jobs share.
    pub fn poll_with(&mut self, now: Time, listings: &mut FolderListings) -> Update {
        let task = self.begin_reading(now, false);
        task.map_or_else(Update::default, |task| self.end_reading(now, task.read(listings)))
    }

    /// Gives the job's files away to be read, unless there is nothing to read or they are away. `last`: the job has
    /// ended. The result goes to [`Collector::end_reading`].
    pub fn begin_reading(&mut self, now: Time, last: bool) -> Option<FileTask> {
        self.reading = Source::File;
        let is_settled = self.is_settled_without_events(now);
        let Files::Here(files) = &mut self.files else { return None };
        files.first_call.get_or_insert(now);
        let is_search_due = last || (now >= files.next_scan && !is_settled);
        if now >= files.next_scan {
            // A search that takes place sets the time itself.
            files.next_scan = now + MAX_SCAN_PACE;
        }
        let search = if is_search_due { self.folder_search(now) } else { None };
        let Files::Here(files) = &self.files else { return None };
        if search.is_none() && !files.has_any() {
            return None;
        }
        let state = Files::Away(Box::new(files.state()));
        let Files::Here(files) = std::mem::replace(&mut self.files, state) else { return None };
        Some(FileTask::new(files, now, search, last))
    }

    /// Takes the files back with what was read from them.
    pub fn end_reading(&mut self, now: Time, reading: FilesReading) -> Update {
        self.reading = Source::File;
        match reading.files {
            FilesAfter::Open(files) => self.files = Files::Here(files),
            FilesAfter::Closed(state) => self.files = Files::Away(state),
            FilesAfter::Panicked(source) => {
                self.reading = source;
                // As if the files had been read here.
                std::panic::resume_unwind(Box::new("reading files failed"));
            }
        }
        if reading.has_failed {
            self.count_failure();
        }
        let mut update = self.accept(now, Source::Tensorboard, reading.events);
        update.append(self.accept(now, Source::File, reading.file));
        update
    }

    /// Whether files that a scan could find would be ignored: another source was chosen for good and is not
    /// silent.
    fn is_settled_without_events(&self, now: Time) -> bool {
        let is_chosen = self.source.is_some_and(|source| source != Source::Tensorboard);
        let is_settled = self.chosen_at.is_none_or(|t| now.since(t) >= SETTLE);
        let is_silent = self.last_reading_at.is_none_or(|t| now.since(t) >= SILENCE);
        is_chosen && is_settled && !is_silent
    }

    /// The job has ended: a bounded piece of its files is read, and last lines count even without
    /// their end.
    pub fn finish(&mut self, now: Time) -> Update {
        let task = self.begin_reading(now, true);
        let read = |task: FileTask| task.read(&mut FolderListings::default());
        let mut update = task.map_or_else(Update::default, |task| self.end_reading(now, read(task)));
        update.append(self.finish_output(now));
        update
    }

    /// The job has ended, and all of its output was passed on: a last line counts even without its end.
    pub fn finish_output(&mut self, now: Time) -> Update {
        let mut batch = Batch::default();
        self.reading = Source::Output;
        self.output.finish(&mut batch);
        self.accept(now, Source::Output, batch)
    }

    /// What to search the job's folder for, if anything.
    fn folder_search(&mut self, now: Time) -> Option<FolderSearch> {
        let Files::Here(files) = &self.files else { return None };
        if !matches!(self.spec.source, Source::Auto | Source::Tensorboard) {
            return None;
        }
        let under = self.spec.path.as_deref().filter(|_| self.spec.source == Source::Tensorboard).map(Path::new);
        let Some(under) = files.root.relative(under.unwrap_or(Path::new(""))) else {
            self.count_failure();
            return None;
        };
        let is_auto = self.spec.source == Source::Auto;
        let has_waited = files.first_call.is_some_and(|first| now.since(first) >= FILE_AFTER);
        Some(FolderSearch {
            under: under.to_path_buf(),
            own_events_only: is_auto,
            takes_file: is_auto && self.source.is_none() && has_waited,
        })
    }

    fn count_failure(&mut self) {
        self.counters.failures = self.counters.failures.saturating_add(1);
    }

    /// Decides whether `source` is the one that counts, and which readings of `batch` are of the job's
    /// evaluation function.
    fn accept(&mut self, now: Time, source: Source, batch: Batch) -> Update {
        let mut update = Update { progress: batch.progress, ..Update::default() };
        if self.spec.source != Source::Auto && self.spec.source != source {
            return update;
        }
        if !batch.readings.iter().any(|r| self.chooser.is_candidate(&r.metric)) {
            return update;
        }
        if self.source != Some(source) {
            // After a restart the choice is settled, and silence counts from the restart.
            let settling = self.chosen_at.is_some_and(|t| now.since(t) < SETTLE);
            let better = settling && self.source.is_some_and(|current| source < current);
            let silent = now.since(*self.last_reading_at.get_or_insert(now)) >= SILENCE;
            if self.source.is_some() && !better && !silent {
                return update;
            }
            update.forget = self.source.is_some();
            self.chooser = Chooser::new(self.spec.name.as_deref(), self.spec.goal);
            self.source = Some(source);
            self.chosen_at = Some(now);
        }
        for reading in batch.readings {
            match self.chooser.offer(&reading.metric) {
                Selection::Ignore => continue,
                Selection::Take => {}
                Selection::TakeAndForget => {
                    update.readings.clear();
                    update.forget = true;
                }
            }
            update.readings.push(reading);
        }
        if !update.readings.is_empty() {
            self.last_reading_at = Some(now);
        }
        let dropped = thin_out(&mut update.readings);
        self.counters.dropped_readings = self.counters.dropped_readings.saturating_add(dropped);
        update
    }
}

/// Keeps every n-th reading and the last, so that at most [`MAX_READINGS`] remain; returns the number
/// dropped.
fn thin_out(readings: &mut Vec<MetricReading>) -> u64 {
    let before = readings.len();
    let every = before.div_ceil(MAX_READINGS).max(1);
    let mut i = 0;
    readings.retain(|_| {
        i += 1;
        (before - i).is_multiple_of(every)
    });
    (before - readings.len()) as u64
}

/// Bytes of output that may still be read. The allowance grows with time, up to one second's worth
/// above what one call of a driver carries.
#[derive(Debug, Default)]
struct Allowance {
    used: u64,
    at: Time,
}

impl Allowance {
    fn take(&mut self, now: Time, wanted: usize) -> usize {
        let refill = now.since(self.at).0.saturating_mul(OUTPUT_BYTES_PER_S) / 1_000_000;
        self.used = self.used.saturating_sub(refill);
        self.at = now.max(self.at);
        let allowed = (2 * OUTPUT_BYTES_PER_S).saturating_sub(self.used).min(wanted as u64);
        self.used += allowed;
        allowed as usize
    }
}
