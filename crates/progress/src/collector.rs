//! All ways of one job together.
//!
//! **How.** A driver hands over what comes by itself (output, pushes, the answers of an endpoint) and calls [`Collector::poll`] about once a second, which
//! looks at files. Each call gives an [`Update`]: readings of the one metric that is the job's evaluation function, and the job's progress.
//!
//! **Which way.** The job's [`MetricSpec`] names one, or the first in the order of [`Source`] that reports a metric worth having. A better one
//! may still take over during the first [`SETTLE`], and any other after the chosen one was silent for [`SILENCE`]; then
//! [`Update::forget`] tells that earlier values belong to something else. A metrics file that was found by itself is only taken if the
//! output says nothing, because nobody knows whose it is where several jobs share a folder; event files name their writer, see
//! [`Collector::own_pids`].
//!
//! **Properties.** No call blocks. A job that floods us costs at most [`OUTPUT_BYTES_PER_S`] of parsing and is given at most
//! [`MAX_READINGS`] readings a call; the rest of its output is dropped and counted, the rest of its files waits. [`Collector::state`] after a call,
//! kept together with that call's update, lets a restarted daemon go on without losing or doubling a reading.

use super::beneath::Root;
use super::discover;
use super::metrics_file::{FileState, MetricsFile};
use super::output::{OutputParser, OutputState};
use super::prometheus::{self, Endpoint, FetchError};
use super::push::{self, PushError};
use super::spec::{MetricSpec, MetricSpecError, Source};
use super::tail::Position;
use super::tensorboard::EventFiles;
use super::{Batch, Chooser, Counters, Goal, Progress, Reading, Verdict};
use gainshare_core::model::{Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// While a source is new, a better one may replace it: long enough for a first epoch of a small model.
const SETTLE: Span = Span::from_secs(60);

/// After this long without a reading any other source may take over.
const SILENCE: Span = Span::from_secs(600);

/// A metrics file found by itself is ignored this long, so that the job's own output can speak first.
const FILE_AFTER: Span = Span::from_secs(15);

/// Output beyond this is dropped. 10,000 lines of 200 bytes a second are still read.
const OUTPUT_BYTES_PER_S: u64 = 2 << 20;

/// Readings in one update.
const MAX_READINGS: usize = 256;

/// Time between two looks through the job's folder; it doubles from the first to the second while nothing is found.
const FIRST_LOOK: Span = Span::from_secs(2);
const LAST_LOOK: Span = Span::from_secs(60);

/// Time between two fetches of an endpoint.
const FETCH_EVERY: Span = Span::from_secs(2);

/// Process ids remembered to know a job's own event files.
const MAX_PIDS: usize = 4096;

/// What one call found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Update {
    /// Readings of the job's evaluation function, oldest first.
    pub readings: Vec<Reading>,
    /// The latest word on how far the job is.
    pub progress: Option<Progress>,
    /// The readings are of another metric or source than all before: forget those.
    pub forget: bool,
}

impl Update {
    /// Adds what was found after it.
    fn then(&mut self, later: Update) {
        if later.forget {
            self.readings.clear();
        }
        self.forget |= later.forget;
        self.readings.extend(later.readings);
        self.progress = later.progress.or(self.progress.take());
    }
}

/// What must be kept to go on after a restart. Small: a few kilobytes at most, mostly the beginning of a line.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CollectorState {
    chooser: Chooser,
    source: Option<Source>,
    output: OutputState,
    events: BTreeMap<PathBuf, Position>,
    file: Option<(PathBuf, FileState)>,
    counters: Counters,
}

/// Follows one job; see the module documentation.
#[derive(Debug)]
pub struct Collector {
    spec: MetricSpec,
    endpoint: Option<Endpoint>,
    root: Option<Arc<Root>>,
    started: SystemTime,
    chooser: Chooser,
    source: Option<Source>,
    chosen_at: Option<Time>,
    heard_at: Option<Time>,
    first_call: Option<Time>,
    output: OutputParser,
    output_allowance: Allowance,
    events: Option<EventFiles>,
    file: Option<MetricsFile>,
    pids: BTreeSet<u32>,
    next_look: Time,
    look_every: Span,
    next_fetch: Time,
    last_fetched: BTreeMap<String, (f64, Option<u64>)>,
    /// Counted by what no longer exists, or by this module itself.
    counters: Counters,
}

impl Collector {
    /// `folder` is where the job may write (its working directory), if it has one that we can read; `started` when it began, by the wall clock,
    /// since that is what files are stamped with.
    pub fn new(
        spec: &MetricSpec,
        folder: Option<&Path>,
        started: SystemTime,
        state: CollectorState,
    ) -> Result<Collector, MetricSpecError> {
        spec.validate()?;
        let pattern = spec.compiled_pattern()?;
        let root = folder.and_then(|f| Root::open(f).ok()).map(Arc::new);
        let fresh = state == CollectorState::default();
        let events = root.clone().map(|root| EventFiles::new(root, state.events));
        if let (Some(root), Some(path)) = (&root, &spec.path)
            && root.relative(Path::new(path)).is_none()
        {
            return Err(MetricSpecError::PathEscapes { path: path.clone() });
        }
        let named = spec.path.as_deref().filter(|_| spec.source == Source::File).map(Path::new);
        let file = root.as_ref().and_then(|root| {
            let (path, kept) = match (state.file, named) {
                (Some((path, kept)), _) => (path, kept),
                (None, Some(path)) => (root.relative(path)?.to_path_buf(), FileState::default()),
                (None, None) => return None,
            };
            Some(MetricsFile::new(root.clone(), &path, pattern.clone(), kept))
        });
        let mut spec = spec.clone();
        // A pattern is about output unless the job says otherwise.
        if spec.source == Source::Auto && spec.pattern.is_some() {
            spec.source = Source::Output;
        }
        Ok(Collector {
            endpoint: spec.url.as_deref().map(Endpoint::parse).transpose()?,
            chooser: if fresh { Chooser::new(spec.name.as_deref()) } else { state.chooser },
            source: state.source,
            chosen_at: None,
            heard_at: None,
            first_call: None,
            output: OutputParser::resume(pattern, state.output),
            output_allowance: Allowance::default(),
            events,
            file,
            pids: BTreeSet::new(),
            next_look: Time::ZERO,
            look_every: FIRST_LOOK,
            next_fetch: Time::ZERO,
            last_fetched: BTreeMap::new(),
            counters: state.counters,
            spec,
            root,
            started,
        })
    }

    /// What to keep; valid for what was handed out so far.
    pub fn state(&self) -> CollectorState {
        CollectorState {
            chooser: self.chooser.clone(),
            source: self.source,
            output: self.output.state().clone(),
            events: self.events.as_ref().map(EventFiles::positions).unwrap_or_default(),
            file: self.file.as_ref().map(|f| (f.path().to_path_buf(), f.state())),
            counters: self.counters(),
        }
    }

    /// Where the readings come from, once something was found.
    pub fn source(&self) -> Option<Source> {
        self.source
    }

    /// The metric that is the job's evaluation function, once it is known, as the job writes it.
    pub fn metric(&self) -> Option<&str> {
        self.chooser.metric()
    }

    pub fn goal(&self) -> Goal {
        self.chooser.goal()
    }

    /// What was refused or dropped.
    pub fn counters(&self) -> Counters {
        let mut all = self.counters;
        all += self.output.counters();
        all += self.events.as_ref().map(EventFiles::counters).unwrap_or_default();
        all += self.file.as_ref().map(MetricsFile::counters).unwrap_or_default();
        all
    }

    /// Tells which processes are the job's, so that it is not given the event files of a neighbour in the same folder. To be called before
    /// each poll; as long as none is known, every event file below the folder is taken for the job's own.
    pub fn own_pids(&mut self, pids: impl IntoIterator<Item = u32>) {
        for pid in pids {
            if self.pids.len() < MAX_PIDS {
                self.pids.insert(pid);
            }
        }
    }

    /// Takes the next bytes that the job printed.
    pub fn output(&mut self, now: Time, bytes: &[u8]) -> Update {
        let allowed = self.output_allowance.take(now, bytes.len());
        let mut batch = Batch::default();
        self.output.feed(&bytes[..allowed], &mut batch);
        self.output.skip(&bytes[allowed..]);
        self.accept(now, Source::Output, batch)
    }

    /// Takes the body of a push.
    pub fn pushed(&mut self, now: Time, body: &[u8]) -> Result<Update, PushError> {
        let batch = push::parse(body, &mut self.counters)?;
        Ok(self.accept(now, Source::Push, batch))
    }

    /// The endpoint to ask now, if it is time; its answer goes to [`Self::fetched`]. Asking blocks, so it belongs on another thread.
    pub fn fetch_due(&mut self, now: Time) -> Option<Endpoint> {
        if self.endpoint.is_none() || now < self.next_fetch {
            return None;
        }
        self.next_fetch = now + FETCH_EVERY;
        self.endpoint.clone()
    }

    /// Takes an endpoint's answer. What did not change since the last answer is not reported again: the job has not spoken.
    pub fn fetched(&mut self, now: Time, answer: Result<Vec<u8>, FetchError>) -> Update {
        let Ok(body) = answer else {
            self.counters.failures += 1;
            return Update::default();
        };
        let mut batch = prometheus::parse(&body, &mut self.counters);
        let last = std::mem::take(&mut self.last_fetched);
        self.last_fetched = batch.readings.iter().map(|r| (r.metric.clone(), (r.value, r.step))).collect();
        batch.readings.retain(|r| last.get(&r.metric) != Some(&(r.value, r.step)));
        self.accept(now, Source::Prometheus, batch)
    }

    /// Looks at files: those that are followed at each call, the folder now and then.
    pub fn poll(&mut self, now: Time) -> Update {
        self.first_call.get_or_insert(now);
        if now >= self.next_look {
            self.look(now);
        }
        self.read_files(now, false)
    }

    /// The job is over: last lines count even without their end.
    pub fn finish(&mut self, now: Time) -> Update {
        self.first_call.get_or_insert(now);
        self.look(now);
        let mut update = self.read_files(now, true);
        let mut batch = Batch::default();
        self.output.finish(&mut batch);
        update.then(self.accept(now, Source::Output, batch));
        update
    }

    fn read_files(&mut self, now: Time, last: bool) -> Update {
        let mut batch = Batch::default();
        if let Some(events) = &mut self.events {
            events.poll(MAX_READINGS, &mut batch);
        }
        let mut update = self.accept(now, Source::Tensorboard, batch);
        let mut batch = Batch::default();
        if let Some(file) = &mut self.file {
            let read = if last { file.finish(&mut batch) } else { file.poll(MAX_READINGS, &mut batch) };
            self.counters.failures += u64::from(read.is_err());
        }
        update.then(self.accept(now, Source::File, batch));
        update
    }

    /// Looks through the job's folder for files to follow.
    fn look(&mut self, now: Time) {
        self.next_look = now + self.look_every;
        let wants_events = matches!(self.spec.source, Source::Auto | Source::Tensorboard);
        let (Some(root), Some(events)) = (&self.root, &mut self.events) else { return };
        if !wants_events {
            return;
        }
        let under = self.spec.path.as_deref().filter(|_| self.spec.source == Source::Tensorboard).map(Path::new);
        let Some(under) = root.relative(under.unwrap_or(Path::new(""))) else {
            self.counters.failures += 1;
            return;
        };
        let found = discover::look(root, under, self.started);
        let before = events.positions().len();
        for path in found.events {
            let foreign = self.spec.source == Source::Auto
                && !self.pids.is_empty()
                && discover::writer_pid(&path).is_some_and(|pid| !self.pids.contains(&pid));
            if !foreign {
                events.found(&path);
            }
        }
        let news = events.positions().len() > before;
        let waited = self.first_call.is_some_and(|first| now.since(first) >= FILE_AFTER);
        if self.spec.source == Source::Auto
            && self.file.is_none()
            && self.source.is_none()
            && waited
            && let Some(path) = found.metrics.first()
        {
            self.file = Some(MetricsFile::new(root.clone(), path, None, FileState::default()));
        }
        self.look_every = if news { FIRST_LOOK } else { Span(self.look_every.0 * 2).min(LAST_LOOK) };
    }

    /// Decides whether `source` is the one that counts, and what of `batch` is of the job's evaluation function.
    fn accept(&mut self, now: Time, source: Source, batch: Batch) -> Update {
        let mut update = Update { progress: batch.progress, ..Update::default() };
        if self.spec.source != Source::Auto && self.spec.source != source {
            return update;
        }
        if !batch.readings.iter().any(|r| self.chooser.would_take(&r.metric)) {
            return update;
        }
        if self.source != Some(source) {
            // After a restart the choice is settled, and silence counts from then.
            let settling = self.chosen_at.is_some_and(|t| now.since(t) < SETTLE);
            let better = settling && self.source.is_some_and(|current| source < current);
            let silent = now.since(*self.heard_at.get_or_insert(now)) >= SILENCE;
            if self.source.is_some() && !better && !silent {
                return update;
            }
            update.forget = self.source.is_some();
            self.chooser = Chooser::new(self.spec.name.as_deref());
            self.source = Some(source);
            self.chosen_at = Some(now);
        }
        for reading in batch.readings {
            match self.chooser.offer(&reading.metric) {
                Verdict::Ignore => continue,
                Verdict::Take => {}
                Verdict::TakeAndForget => {
                    update.readings.clear();
                    update.forget = true;
                }
            }
            update.readings.push(reading);
        }
        if !update.readings.is_empty() {
            self.heard_at = Some(now);
        }
        self.counters.dropped_readings += thin_out(&mut update.readings);
        update
    }
}

/// Keeps every n-th reading and the last, so that at most [`MAX_READINGS`] remain; gives the number dropped.
fn thin_out(readings: &mut Vec<Reading>) -> u64 {
    let before = readings.len();
    let every = before.div_ceil(MAX_READINGS).max(1);
    let mut i = 0;
    readings.retain(|_| {
        i += 1;
        (before - i).is_multiple_of(every)
    });
    (before - readings.len()) as u64
}

/// How many bytes of output may still be read: refills with time, up to one second's worth above what one call of a driver carries.
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
