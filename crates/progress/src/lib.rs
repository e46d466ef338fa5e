//! What a training job says about its own progress, gathered without changing its code.
//!
//! **Problem.** A job tells how it does in whatever way its framework has: a progress bar full of escape sequences, a Python dict, a
//! CSV file that is rewritten whenever a column appears, TensorBoard's event files, a Prometheus endpoint, a push. All of it may be torn,
//! rotated, flooded or plain garbage, and none of it may hurt the daemon.
//!
//! **How.** One parser for each way turns bytes into [`Reading`]s and [`Progress`]: [`OutputParser`] (the process's output),
//! [`MetricsFile`] (CSV, NDJSON, text), [`EventFiles`] (TensorBoard), [`prometheus`] and [`push`]. A [`Chooser`] picks the one metric that is
//! the job's evaluation function. A [`Collector`] puts them together for one job: it finds the ways by itself, in a fixed order, or
//! uses the one that the job's [`MetricSpec`] names. Nothing here has a clock or a thread; a driver calls `poll`.
//!
//! **Terms.** A *reading* is one value of one metric. *Progress* is how far the job is, in steps, epochs or per cent. A *position* is
//! what must be kept, so that a restarted daemon goes on exactly where it was.
//!
//! **Properties.** No value that leaves is NaN, infinite or larger than [`MAX_MAGNITUDE`]; memory is bounded whatever is fed; where the
//! input is cut into pieces does not matter; what is refused or dropped is counted in [`Counters`].

mod beneath;
mod chooser;
mod collector;
mod course;
mod discover;
mod json;
mod line;
mod metrics_file;
mod number;
mod output;
pub mod prometheus;
pub mod push;
mod spec;
mod tail;
mod tensorboard;
mod terminal;

pub use beneath::Root;
pub use chooser::{Chooser, Goal, Verdict};
pub use collector::{Collector, CollectorState, Update};
pub use line::{Pattern, PatternError};
pub use metrics_file::{FileState, MetricsFile};
pub use output::{OutputParser, OutputState};
pub use spec::{MetricSpec, MetricSpecError, Source};
pub use tail::{Change, FileTail, Position};
pub use tensorboard::EventFiles;

use serde::{Deserialize, Serialize};

/// Values beyond this are taken for garbage: no loss means anything there, and differences of such values overflow.
pub const MAX_MAGNITUDE: f64 = 1e30;

/// Longest metric name taken; longer ones are text that happened to look like one.
pub(crate) const MAX_NAME: usize = 96;

/// One value of one metric. `value` is finite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    pub metric: String,
    pub value: f64,
    pub step: Option<u64>,
    pub total: Option<u64>,
}

impl From<&Reading> for gainshare_core::signal::Sample {
    fn from(r: &Reading) -> Self {
        gainshare_core::signal::Sample { value: r.value, step: r.step, total: r.total }
    }
}

/// In what a job counts its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Batches or optimiser steps, counted over the whole run.
    Step,
    Epoch,
    Percent,
}

/// How far a job is. `step` never exceeds `total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub step: u64,
    pub total: Option<u64>,
    pub unit: Unit,
}

/// What one look at a source gave.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// In the order in which the job reported them.
    pub readings: Vec<Reading>,
    /// The latest, if the job said anything about it.
    pub progress: Option<Progress>,
}

/// What was refused or dropped, since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Values that are NaN, infinite or absurdly large.
    pub bad_values: u64,
    /// Lines too long to be a report.
    pub long_lines: u64,
    /// Readings beyond what one line or one look may give, or of too many different metrics.
    pub dropped_readings: u64,
    /// Lines thrown away unread because the job prints faster than it may.
    pub flooded_lines: u64,
    /// Records of event files that were damaged or too large.
    pub bad_records: u64,
    /// Files that were replaced, truncated or rewritten; their finished records were all read.
    pub restarts: u64,
    /// Sources that could not be read (a missing endpoint, a path out of the job's folder).
    pub failures: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, o: Counters) {
        self.bad_values += o.bad_values;
        self.long_lines += o.long_lines;
        self.dropped_readings += o.dropped_readings;
        self.flooded_lines += o.flooded_lines;
        self.bad_records += o.bad_records;
        self.restarts += o.restarts;
        self.failures += o.failures;
    }
}
