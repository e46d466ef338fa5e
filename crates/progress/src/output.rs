//! Progress out of what a process prints.
//!
//! Bytes go through a small terminal ([`super::terminal`]), its lines through a grammar ([`super::line`]), their places through the
//! run's [`super::course`]. A redraw that says the same again gives nothing. The state is small and can be kept, so that a restarted daemon that
//! goes on at the same byte gives the same readings.

use super::course::Course;
use super::line::{self, Pattern};
use super::number::Number;
use super::terminal::Terminal;
use super::{Batch, Counters, Reading};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Different metrics that are followed; a job that prints more names makes them up.
const MAX_METRICS: usize = 256;

/// What [`OutputParser`] remembers between two calls.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OutputState {
    terminal: Terminal,
    course: Course,
    /// The last value and step of each metric, to tell a redraw from a report.
    seen: BTreeMap<String, (f64, Option<u64>)>,
}

/// Turns raw output into readings.
#[derive(Debug, Clone, Default)]
pub struct OutputParser {
    state: OutputState,
    pattern: Option<Pattern>,
    counters: Counters,
}

impl OutputParser {
    pub fn new(pattern: Option<Pattern>) -> OutputParser {
        OutputParser { pattern, ..OutputParser::default() }
    }

    /// Goes on where `state` was taken.
    pub fn resume(pattern: Option<Pattern>, state: OutputState) -> OutputParser {
        OutputParser { pattern, state, counters: Counters::default() }
    }

    pub fn state(&self) -> &OutputState {
        &self.state
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Takes the next bytes; adds what they say to `batch`.
    pub fn feed(&mut self, bytes: &[u8], batch: &mut Batch) {
        let OutputState { terminal, course, seen } = &mut self.state;
        let (pattern, counters) = (self.pattern.as_ref(), &mut self.counters);
        let mut take = |line: &[u8]| report_line(line, pattern, course, seen, counters, batch);
        let long = terminal.feed(bytes, &mut take);
        self.counters.long_lines += long;
    }

    /// The output is over: the last line counts even without its end.
    pub fn finish(&mut self, batch: &mut Batch) {
        let OutputState { terminal, course, seen } = &mut self.state;
        let (pattern, counters) = (self.pattern.as_ref(), &mut self.counters);
        let mut take = |line: &[u8]| report_line(line, pattern, course, seen, counters, batch);
        let long = terminal.finish(&mut take);
        self.counters.long_lines += long;
    }

    /// Throws `bytes` away, together with the line that they are part of, and counts the lines.
    pub fn skip(&mut self, bytes: &[u8]) {
        let ends = bytes.iter().filter(|&&b| b == b'\n').count() as u64;
        self.counters.flooded_lines += ends.max(u64::from(!bytes.is_empty()));
        if bytes.last() == Some(&b'\n') {
            self.state.terminal = Terminal::default();
        } else if !bytes.is_empty() {
            self.state.terminal.skip_line();
        }
    }
}

/// Takes in one line of the terminal.
fn report_line(
    line: &[u8],
    pattern: Option<&Pattern>,
    course: &mut Course,
    seen: &mut BTreeMap<String, (f64, Option<u64>)>,
    counters: &mut Counters,
    batch: &mut Batch,
) {
    let (bar, text) = line::split_after_bar(line);
    for part in [bar, text] {
        if !part.is_empty() {
            report(part, pattern, course, seen, counters, batch);
        }
    }
}

fn report(
    line: &[u8],
    pattern: Option<&Pattern>,
    course: &mut Course,
    seen: &mut BTreeMap<String, (f64, Option<u64>)>,
    counters: &mut Counters,
    batch: &mut Batch,
) {
    let facts = line::parse(line, pattern);
    let place = course.note(&facts);
    let set_back = facts.step.is_some_and(|s| s.at == 0 && s.total.is_some());
    batch.progress = place.progress.or(batch.progress);
    counters.dropped_readings += facts.surplus;
    for (metric, value) in facts.values {
        let Number::Good(value) = value else {
            counters.bad_values += 1;
            continue;
        };
        let now = (value, place.step);
        if let Some(last) = seen.get_mut(&metric) {
            // A bar that was set back to zero still shows the values of the end of the last one.
            let redrawn = last.1 == now.1 || set_back;
            if now.1.is_some() && last.0 == value && redrawn {
                continue;
            }
            *last = now;
        } else if seen.len() < MAX_METRICS {
            seen.insert(metric.clone(), now);
        } else {
            counters.dropped_readings += 1;
            continue;
        }
        batch.readings.push(Reading { metric, value, step: place.step, total: place.total });
    }
}
