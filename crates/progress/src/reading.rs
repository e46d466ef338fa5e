//! The values that leave this crate: readings, progress, and counts of what was refused.
//!
//! **Units.** A step is whatever the job counts: batches, optimiser steps, epochs or per cent. [`Unit`] says which.

use serde::{Deserialize, Serialize};

/// Values beyond this are refused: no loss is that large, and differences of such values overflow.
pub const MAX_MAGNITUDE: f64 = 1e30;

/// Longest metric name in bytes. A longer one is text that happened to look like a name.
pub(crate) const MAX_NAME: usize = 96;

/// One value of one metric. `value` is finite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricReading {
    pub metric: String,
    pub value: f64,
    pub step: Option<u64>,
    pub total: Option<u64>,
}

impl From<&MetricReading> for gainshare_core::signal::Sample {
    fn from(r: &MetricReading) -> Self {
        gainshare_core::signal::Sample { value: r.value, step: r.step, total: r.total }
    }
}

/// What a job counts.
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

/// The result of reading one source once.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// In the order in which the job reported them.
    pub readings: Vec<MetricReading>,
    /// The latest progress, if the job reported any.
    pub progress: Option<Progress>,
}

impl Batch {
    /// Drops the oldest readings until at most `max` remain. Returns the number dropped.
    pub(crate) fn keep_newest(&mut self, max: usize) -> u64 {
        let surplus = self.readings.len().saturating_sub(max);
        self.readings.drain(..surplus);
        surplus as u64
    }
}

/// Counts of what was refused or dropped since the start of the job. They saturate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Values that are NaN, infinite or larger than [`MAX_MAGNITUDE`].
    pub bad_values: u64,
    /// Lines too long to be a report.
    pub long_lines: u64,
    /// Readings beyond the limit of one line or one call, or of too many different metrics.
    pub dropped_readings: u64,
    /// Lines dropped unread because the job prints faster than its allowance.
    pub flooded_lines: u64,
    /// Records of event files that were damaged or too large.
    pub bad_records: u64,
    /// Times a file was replaced, truncated or rewritten. Its finished records were all read.
    pub restarts: u64,
    /// Times a source could not be read (a missing endpoint, a path out of the job's folder).
    pub failures: u64,
    /// Lines that the job's own pattern was not tried on because it had used up its CPU time.
    pub rested_lines: u64,
    /// Panics of a collector. The first one switches the job's collectors off.
    pub panics: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, o: Counters) {
        let add = |a: &mut u64, b: u64| *a = a.saturating_add(b);
        add(&mut self.bad_values, o.bad_values);
        add(&mut self.long_lines, o.long_lines);
        add(&mut self.dropped_readings, o.dropped_readings);
        add(&mut self.flooded_lines, o.flooded_lines);
        add(&mut self.bad_records, o.bad_records);
        add(&mut self.restarts, o.restarts);
        add(&mut self.failures, o.failures);
        add(&mut self.rested_lines, o.rested_lines);
        add(&mut self.panics, o.panics);
    }
}
