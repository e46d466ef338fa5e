//! Readings from the output of a process.
//!
//! Bytes go through a small terminal ([`crate::terminal`]), its lines through a grammar
//! ([`crate::line`]), their counts through the run's [`crate::steps`]. A redraw that repeats a value
//! gives nothing. The state is small and can be stored, so that a restarted daemon that continues at
//! the same byte gives the same readings.

use crate::line;
use crate::number::Number;
use crate::pattern::{BudgetedPattern, Pattern};
use crate::reading::{Batch, Counters, MetricReading};
use crate::run_length::RunLength;
use crate::steps::RunSteps;
use crate::terminal::Terminal;
use gainshare_core::model::Time;
use gainshare_core::signal::ClaimSource;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Different metrics that are followed. A job that prints more names makes them up.
const MAX_METRICS: usize = 256;

/// The state of an [`OutputParser`] between two calls.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OutputState {
    terminal: Terminal,
    #[serde(rename = "course")]
    steps: RunSteps,
    /// The last value and step of each metric, to tell a redraw from a report.
    #[serde(rename = "seen")]
    last: BTreeMap<String, (f64, Option<u64>)>,
}

/// Turns raw output into readings.
#[derive(Debug, Clone, Default)]
pub struct OutputParser {
    state: OutputState,
    pattern: Option<BudgetedPattern>,
    counters: Counters,
}

impl OutputParser {
    pub fn new(pattern: Option<Pattern>) -> OutputParser {
        OutputParser::resume(pattern, OutputState::default())
    }

    /// Continues where `state` was taken.
    pub fn resume(pattern: Option<Pattern>, state: OutputState) -> OutputParser {
        OutputParser { pattern: pattern.map(BudgetedPattern::new), state, counters: Counters::default() }
    }

    /// Takes what the job's command claims about the length of the run. To be called before the first
    /// line.
    pub fn set_run_length(&mut self, claim: RunLength) {
        self.state.steps.set_claim(claim);
    }

    /// Where the newest total was read.
    pub fn claim_source(&self) -> Option<ClaimSource> {
        self.state.steps.claim_source()
    }

    pub fn state(&self) -> &OutputState {
        &self.state
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Begins a round: the pattern's CPU budget for the following calls is set.
    pub fn begin_round(&mut self, now: Time) {
        if let Some(pattern) = &mut self.pattern {
            pattern.begin_round(now);
        }
    }

    /// A sentence for people, if the pattern is too costly.
    pub fn note(&self) -> Option<String> {
        self.pattern.as_ref().and_then(BudgetedPattern::note)
    }

    /// Parses the next bytes and adds their readings to `batch`.
    pub fn feed(&mut self, bytes: &[u8], batch: &mut Batch) {
        let OutputParser { state, pattern, counters } = self;
        let OutputState { terminal, steps, last } = state;
        let mut lines = LineReader { pattern: pattern.as_mut(), steps, last, counters, batch };
        let long = terminal.feed(bytes, |line| lines.read(line));
        self.counters.long_lines = self.counters.long_lines.saturating_add(long);
    }

    /// Parses the last line, which counts even without its end.
    pub fn finish(&mut self, batch: &mut Batch) {
        let OutputParser { state, pattern, counters } = self;
        let OutputState { terminal, steps, last } = state;
        let mut lines = LineReader { pattern: pattern.as_mut(), steps, last, counters, batch };
        let long = terminal.finish(|line| lines.read(line));
        self.counters.long_lines = self.counters.long_lines.saturating_add(long);
    }

    /// Drops `bytes` together with the line that they are part of, and counts the lines.
    pub fn skip(&mut self, bytes: &[u8]) {
        let ends = bytes.iter().filter(|&&b| b == b'\n').count() as u64;
        let lines = ends.max(u64::from(!bytes.is_empty()));
        self.counters.flooded_lines = self.counters.flooded_lines.saturating_add(lines);
        if bytes.last() == Some(&b'\n') {
            self.state.terminal = Terminal::default();
        } else if !bytes.is_empty() {
            self.state.terminal.skip_line();
        }
    }
}

/// Everything that one line of the terminal may change.
struct LineReader<'a> {
    pattern: Option<&'a mut BudgetedPattern>,
    steps: &'a mut RunSteps,
    last: &'a mut BTreeMap<String, (f64, Option<u64>)>,
    counters: &'a mut Counters,
    batch: &'a mut Batch,
}

impl LineReader<'_> {
    fn read(&mut self, line: &[u8]) {
        let (bar, text) = line::split_after_bar(line);
        for part in [bar, text] {
            if !part.is_empty() {
                self.read_part(part);
            }
        }
    }

    fn read_part(&mut self, line: &[u8]) {
        let facts = line::parse(line, self.pattern.as_deref_mut(), self.counters);
        let place = self.steps.take_line(&facts);
        let set_back = facts.step.is_some_and(|s| s.at == 0 && s.total.is_some());
        self.batch.progress = place.progress.or(self.batch.progress);
        self.counters.dropped_readings = self.counters.dropped_readings.saturating_add(facts.surplus);
        for (metric, value) in facts.values {
            let Number::Good(value) = value else {
                self.counters.bad_values = self.counters.bad_values.saturating_add(1);
                continue;
            };
            let now = (value, place.step);
            if let Some(last) = self.last.get_mut(&metric) {
                // A bar that was set back to zero still shows the values of the end of the last one.
                let redrawn = last.1 == now.1 || set_back;
                if now.1.is_some() && last.0 == value && redrawn {
                    continue;
                }
                *last = now;
            } else if self.last.len() < MAX_METRICS {
                self.last.insert(metric.clone(), now);
            } else {
                self.counters.dropped_readings = self.counters.dropped_readings.saturating_add(1);
                continue;
            }
            self.batch.readings.push(MetricReading { metric, value, step: place.step, total: place.total });
        }
    }
}
