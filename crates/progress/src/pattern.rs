//! A job's own regular expression for lines that nothing else understands, and its CPU budget.
//!
//! **Problem.** The engine is linear in the length of a line, but the factor is the size of the
//! compiled pattern: an innocent-looking `1[01]{2500}` takes half a minute for two megabytes. The
//! pattern comes from a tenant and runs on the only thread of the driver.
//!
//! **How.** Three limits. The compiled pattern has at most [`MAX_NFA_BYTES`]. Lines longer than
//! [`MAX_LINE`] are not matched. And the pattern has a budget of CPU time: at most
//! [`ROUND_CPU`] in one round, and over time the part [`CPU_PART`] of a core with [`BURST_CPU`] saved
//! up at most. While the budget is used up the pattern rests: its lines are counted, not matched.
//!
//! **Units.** CPU time is that of the calling thread, read in [`thread_cpu_time`] and nowhere else;
//! tests put another clock in its place.

use crate::facts::{Count, Facts, MAX_PER_LINE};
use crate::number;
use crate::reading::Counters;
use gainshare_core::model::Time;
use nix::time::{ClockId, clock_gettime};
use regex::bytes::{Regex, RegexBuilder};
use std::time::Duration;

/// Largest text of a pattern.
const MAX_TEXT: usize = 4096;

/// Largest compiled pattern. A pattern with four groups and some classes needs about 3 KiB.
const MAX_NFA_BYTES: usize = 8 << 10;

/// Longest line that a pattern is tried on. Reports are a few hundred bytes.
const MAX_LINE: usize = 1024;

/// CPU time of one round: more than 10,000 lines for a usual pattern.
const ROUND_CPU: Duration = Duration::from_millis(50);

/// CPU time that can be saved up: a long history is read at the start of a node agent.
const BURST_CPU: Duration = Duration::from_millis(250);

/// The part of a core that a pattern may use over time: one in this many.
const CPU_PART: u64 = 20;

/// A user's own way to find a metric in a line.
#[derive(Debug, Clone)]
pub struct Pattern {
    regex: Regex,
    /// The metric's name where the pattern has no group `metric`.
    name: String,
}

/// Why a pattern cannot be used. The message is one line and says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error(
        "metric pattern {pattern:?} does not compile: {reason}; correct it or leave it out \
         (the syntax is that of the Rust regex crate, without look-around and back-references)"
    )]
    Syntax { pattern: String, reason: String },
    #[error("metric pattern {pattern:?} is too large; use fewer or smaller repetitions")]
    TooLarge { pattern: String },
    #[error("metric pattern {pattern:?} has no group named value; write it as in loss=(?P<value>[0-9.e+-]+)")]
    NoValue { pattern: String },
    #[error("metric pattern {pattern:?} has an unknown group {group:?}; use value, metric, step and total")]
    UnknownGroup { pattern: String, group: String },
}

impl Pattern {
    /// Compiles `pattern`, which has a group named `value` and may have `metric`, `step` and
    /// `total`. `name` is the metric's name where there is no group `metric`.
    pub fn new(pattern: &str, name: &str) -> Result<Pattern, PatternError> {
        let shown = || pattern.chars().take(200).collect::<String>();
        if pattern.len() > MAX_TEXT {
            return Err(PatternError::TooLarge { pattern: shown() });
        }
        // Classes are those of ASCII: `\w` of all scripts is a hundred times larger, and the
        // pattern is to find numbers.
        let built = RegexBuilder::new(pattern)
            .unicode(false)
            .size_limit(MAX_NFA_BYTES)
            .dfa_size_limit(256 << 10)
            .nest_limit(50)
            .build();
        let regex = built.map_err(|e| match e {
            regex::Error::CompiledTooBig(_) => PatternError::TooLarge { pattern: shown() },
            // The engine draws a picture over several lines; its last line is the reason.
            other => {
                let message = other.to_string();
                let reason =
                    message.lines().last().unwrap_or_default().trim().trim_start_matches("error: ").to_string();
                PatternError::Syntax { pattern: shown(), reason }
            }
        })?;
        for group in regex.capture_names().flatten() {
            if !["value", "metric", "step", "total"].contains(&group) {
                return Err(PatternError::UnknownGroup { pattern: shown(), group: group.to_string() });
            }
        }
        if !regex.capture_names().flatten().any(|g| g == "value") {
            return Err(PatternError::NoValue { pattern: shown() });
        }
        Ok(Pattern { regex, name: name.to_string() })
    }
}

/// A pattern with the CPU time that it may use.
#[derive(Debug, Clone)]
pub(crate) struct BudgetedPattern {
    pattern: Pattern,
    budget: CpuBudget,
    has_rested: bool,
}

impl BudgetedPattern {
    pub(crate) fn new(pattern: Pattern) -> BudgetedPattern {
        BudgetedPattern { pattern, budget: CpuBudget::new(thread_cpu_time), has_rested: false }
    }

    /// A driver begins to read the job.
    pub(crate) fn begin_round(&mut self, now: Time) {
        self.budget.begin_round(now);
    }

    /// A sentence for people once the pattern has had to rest.
    pub(crate) fn note(&self) -> Option<String> {
        self.has_rested.then(|| {
            format!(
                "its metric pattern uses more than {} ms of CPU time in one round of reading: it rests when that is \
                 used up, and lines are left out; use a simpler pattern",
                ROUND_CPU.as_millis()
            )
        })
    }

    /// Matches `line` and adds what the groups hold to `facts`.
    pub(crate) fn apply(&mut self, line: &[u8], facts: &mut Facts, counters: &mut Counters) {
        if line.len() > MAX_LINE {
            counters.long_lines = counters.long_lines.saturating_add(1);
            return;
        }
        if self.budget.is_used_up() {
            self.has_rested = true;
            counters.rested_lines = counters.rested_lines.saturating_add(1);
            return;
        }
        self.budget.start();
        for (i, found) in self.pattern.regex.captures_iter(line).take(MAX_PER_LINE).enumerate() {
            // Each further match may scan the rest of the line again.
            if i > 0 {
                self.budget.charge();
                if self.budget.is_used_up() {
                    break;
                }
            }
            let group = |name| found.name(name).and_then(|m| std::str::from_utf8(m.as_bytes()).ok());
            if let Some(value) = group("value").and_then(number::whole) {
                facts.add(group("metric").unwrap_or(&self.pattern.name), value);
            }
            if let Some(at) = group("step").and_then(|s| s.parse().ok()) {
                let total = group("total").and_then(|s| s.parse().ok()).filter(|&total| total >= at);
                facts.step = Some(Count { at, total, bar: false });
            }
        }
        self.budget.charge();
    }
}

/// CPU time that may still be used, now and over time.
#[derive(Debug, Clone)]
struct CpuBudget {
    clock: fn() -> Duration,
    /// The clock when the use that is not charged yet began.
    started: Duration,
    saved: Duration,
    round_left: Duration,
    last_round: Option<Time>,
}

impl CpuBudget {
    fn new(clock: fn() -> Duration) -> CpuBudget {
        CpuBudget { clock, started: Duration::ZERO, saved: BURST_CPU, round_left: ROUND_CPU, last_round: None }
    }

    fn begin_round(&mut self, now: Time) {
        let since_us = self.last_round.map_or(0, |last| now.since(last).0);
        self.last_round = self.last_round.max(Some(now));
        self.saved = self.saved.saturating_add(Duration::from_micros(since_us / CPU_PART)).min(BURST_CPU);
        self.round_left = ROUND_CPU.min(self.saved);
    }

    fn is_used_up(&self) -> bool {
        self.round_left.is_zero()
    }

    fn start(&mut self) {
        self.started = (self.clock)();
    }

    fn charge(&mut self) {
        let now = (self.clock)();
        let used = now.saturating_sub(self.started);
        self.started = now;
        self.saved = self.saved.saturating_sub(used);
        self.round_left = self.round_left.saturating_sub(used);
    }
}

/// CPU time of this thread so far.
fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        static CLOCK: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    /// A clock on which each reading costs 5 ms.
    fn slow_clock() -> Duration {
        CLOCK.set(CLOCK.get() + Duration::from_millis(5));
        CLOCK.get()
    }

    fn costly() -> BudgetedPattern {
        let pattern = Pattern::new("loss=(?P<value>[0-9.]+)", "loss").unwrap();
        BudgetedPattern { budget: CpuBudget::new(slow_clock), ..BudgetedPattern::new(pattern) }
    }

    fn matched(pattern: &mut BudgetedPattern, lines: usize, counters: &mut Counters) -> usize {
        let mut facts = Facts::default();
        (0..lines).for_each(|_| pattern.apply(b"loss=1", &mut facts, counters));
        facts.values.len()
    }

    #[test]
    fn usual_patterns_fit_and_costly_ones_do_not() {
        for usual in [
            r"loss=(?P<value>[0-9.e+-]+)",
            r"^(?P<step>\d+)\s+of\s+(?P<total>\d+)\s+->\s+(?P<value>\S+)",
            r"(?i)(?P<metric>\w+) is (?P<value>[-+]?\d+(\.\d+)?([eE][-+]?\d+)?)",
            r"\[\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2},\d{3}\] .*step (?P<step>\d+)/(?P<total>\d+).*loss (?P<value>[\d.]+)",
            r"(train|val|test)_(?P<metric>loss|acc|f1)\s*[:=]\s*(?P<value>[0-9]+\.[0-9]{1,8})",
        ] {
            assert!(Pattern::new(usual, "loss").is_ok(), "{usual}");
        }
        for costly in [r"(?P<value>1[01]{2500})2", r"(?P<value>\w{900}){900}", r"(\w+\s?){1,200}(?P<value>[0-9.]+)x"] {
            let error = Pattern::new(costly, "loss").unwrap_err();
            assert!(matches!(error, PatternError::TooLarge { .. }), "{costly}: {error}");
        }
    }

    #[test]
    fn a_costly_pattern_rests_until_its_budget_grows_again() {
        let (mut pattern, mut counters) = (costly(), Counters::default());
        pattern.begin_round(Time::ZERO);
        assert_eq!(pattern.note(), None);
        // Each line reads the clock twice and is charged 5 ms; the round has 50 ms.
        assert_eq!(matched(&mut pattern, 20, &mut counters), 10);
        assert_eq!(counters.rested_lines, 10);
        assert!(pattern.note().is_some_and(|note| note.contains("simpler pattern")));
        // Rounds that follow at once use up what was saved: 250 ms are 50 lines in all.
        let at_once: usize = (0..20)
            .map(|_| {
                pattern.begin_round(Time::ZERO);
                matched(&mut pattern, 20, &mut counters)
            })
            .sum();
        assert_eq!(at_once, 40);
        // One second later a twentieth of it may be used.
        pattern.begin_round(Time::from_secs_f64(1.0));
        assert_eq!(matched(&mut pattern, 20, &mut counters), 10);
    }

    #[test]
    fn a_line_with_many_matches_is_given_up_in_the_middle() {
        let (mut pattern, mut facts, mut counters) = (costly(), Facts::default(), Counters::default());
        pattern.begin_round(Time::ZERO);
        pattern.apply("loss=1 ".repeat(100).as_bytes(), &mut facts, &mut counters);
        assert_eq!(facts.values.len(), 10);
    }

    #[test]
    fn long_lines_are_not_matched() {
        let mut pattern = BudgetedPattern::new(Pattern::new("(?P<value>[0-9]+)x", "loss").unwrap());
        let (mut facts, mut counters) = (Facts::default(), Counters::default());
        let line = |length: usize| [vec![b' '; length - 2], b"1x".to_vec()].concat();
        pattern.apply(&line(MAX_LINE), &mut facts, &mut counters);
        pattern.apply(&line(MAX_LINE + 1), &mut facts, &mut counters);
        assert_eq!((facts.values.len(), counters.long_lines), (1, 1));
    }

    #[test]
    fn the_threads_cpu_time_advances() {
        let start = thread_cpu_time();
        let mut sum = 0u64;
        // Ends as soon as the clock moves; a clock that stands still is the fault to be found.
        let moved = (0..100_000_000u64).any(|i| {
            sum = sum.wrapping_mul(31).wrapping_add(i);
            i % 1000 == 0 && thread_cpu_time() > start
        });
        assert!(moved, "{sum}");
    }
}
