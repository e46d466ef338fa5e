//! What one line of output or one record of a file reports: metrics, steps, epochs.
//!
//! Facts come from [`crate::line`], [`crate::json`] and [`crate::pattern`]; readings are made of
//! them by [`crate::output`], [`crate::metrics_file`] and [`crate::push`].

use crate::number::Number;
use crate::reading::{Batch, Counters, MAX_NAME, MetricReading, Progress, Unit};
use crate::words::{CountWord, count_word};

/// A line with more metrics than this is no report.
pub(crate) const MAX_PER_LINE: usize = 64;

/// Counts at or beyond this are garbage: they do not fit into an `f64` without loss.
const MAX_COUNT: f64 = 1e15;

/// What one line or record reported.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Facts {
    pub(crate) values: Vec<(String, Number)>,
    /// Number of values beyond [`MAX_PER_LINE`].
    pub(crate) surplus: u64,
    pub(crate) step: Option<Count>,
    pub(crate) epoch: Option<Epoch>,
    /// The line gave an epoch that is not a whole number.
    pub(crate) fractional_epoch: bool,
}

/// A step, with the total if the line has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) at: u64,
    pub(crate) total: Option<u64>,
    /// Shown by a bar, not by words: two counters side by side may differ.
    pub(crate) bar: bool,
}

/// An epoch as written, and the number of epochs finished when it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Epoch {
    pub(crate) at: u64,
    pub(crate) total: Option<u64>,
    pub(crate) over: u64,
}

impl Facts {
    pub(crate) fn add(&mut self, name: &str, value: Number) {
        if name.is_empty() || name.len() > MAX_NAME {
            return;
        }
        if self.values.len() < MAX_PER_LINE {
            self.values.push((name.to_string(), value));
        } else {
            self.surplus += 1;
        }
    }

    /// Adds a named number, or takes it for the step or the epoch if that is its name. `integral`:
    /// the number was written without a point.
    pub(crate) fn add_named(&mut self, name: &str, value: Number, integral: bool) {
        match (count_word(name.rsplit('/').next().unwrap_or(name), false), value) {
            (Some(word), Number::Good(x)) => {
                if integral && (0.0..MAX_COUNT).contains(&x) {
                    self.set_count(word, x as u64, None);
                } else {
                    self.fractional_epoch |= word == CountWord::Epoch;
                }
            }
            (Some(_), Number::Bad) => {}
            (None, value) => self.add(name, value),
        }
    }

    /// Sets the step or the epoch. A count with a total says more than one without, whichever comes
    /// first.
    pub(crate) fn set_count(&mut self, word: CountWord, at: u64, total: Option<u64>) {
        match word {
            CountWord::Step if self.step.is_none_or(|s| s.total.is_none() && total.is_some()) => {
                self.step = Some(Count { at, total, bar: false });
            }
            CountWord::Epoch if self.epoch.is_none_or(|e| e.total.is_none() && total.is_some()) => {
                let over = if total.is_some() { at.saturating_sub(1) } else { at };
                self.epoch = Some(Epoch { at, total, over });
            }
            _ => {}
        }
    }

    /// How far the job is by this record alone: its step, or else its epoch.
    pub(crate) fn own_progress(&self) -> Option<Progress> {
        let step = self.step.map(|s| Progress { step: s.at, total: s.total, unit: Unit::Step });
        step.or(self.epoch.map(|e| Progress { step: e.at, total: e.total, unit: Unit::Epoch }))
    }

    /// Adds the values to `batch`, each at `step` of `total`, and counts those that are refused.
    pub(crate) fn into_readings(
        self,
        step: Option<u64>,
        total: Option<u64>,
        counters: &mut Counters,
        batch: &mut Batch,
    ) {
        counters.dropped_readings = counters.dropped_readings.saturating_add(self.surplus);
        for (metric, value) in self.values {
            match value {
                Number::Good(value) => batch.readings.push(MetricReading { metric, value, step, total }),
                Number::Bad => counters.bad_values = counters.bad_values.saturating_add(1),
            }
        }
    }
}
