//! What one plain line says: metrics, steps, epochs.
//!
//! **Grammar**, all by hand, one pass each, no backtracking:
//! - `name=value`, `name: value`, also with quotes around either (Python dicts, torn JSON) and `tensor(…)` around the value;
//! - `name value` only for names that are metrics beyond doubt (`loss 0.34`), as old PyTorch examples print;
//! - a line that is a JSON object ([`super::json`]);
//! - `3/10`, `3 / 10` and `3 of 10` beside a word (`Epoch 3/10`, `Step [100/600]`, `200/ 2983 batches`) or inside the bar of
//!   tqdm (`| 37/200 [`), Keras (`37/200 ━━` or `37/200 [==`), rich (`━━ 37/200`) or PyTorch's MNIST example (`[640/60000 (1%)]`).
//!
//! A user's own [`Pattern`] replaces the metrics part; steps and epochs are still found. It runs on a linear-time engine with size limits, so no
//! pattern can hang or swell the daemon.

use super::chooser::is_metric_word;
use super::number::{self, Number};
use super::{MAX_NAME, json};
use regex::bytes::{Regex, RegexBuilder};

/// More metrics than this on one line are not a report.
pub(super) const MAX_PER_LINE: usize = 64;

/// Places (`3/10`) looked at on one line, and words: an honest line has a few, and each costs a look at its surroundings.
const MAX_FRACTIONS: usize = 16;
const MAX_WORDS: usize = 256;

/// What one line or record said.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Facts {
    pub(super) values: Vec<(String, Number)>,
    /// Values beyond [`MAX_PER_LINE`].
    pub(super) surplus: u64,
    pub(super) step: Option<Count>,
    pub(super) epoch: Option<Epoch>,
    /// The line gave an epoch that is no whole number.
    pub(super) fractional_epoch: bool,
}

/// A step, with the total if the line has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) at: u64,
    pub(super) total: Option<u64>,
    /// Shown by a bar, not by words: two counters side by side may differ.
    pub(super) bar: bool,
}

/// An epoch as written, and how many epochs are already over when it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Epoch {
    pub(super) at: u64,
    pub(super) total: Option<u64>,
    pub(super) over: u64,
}

impl Facts {
    pub(super) fn add(&mut self, name: &str, value: Number) {
        if name.is_empty() || name.len() > MAX_NAME {
            return;
        }
        if self.values.len() < MAX_PER_LINE {
            self.values.push((name.to_string(), value));
        } else {
            self.surplus += 1;
        }
    }

    /// Adds a named number, or takes it for the step or the epoch if that is its name. `integral`: written without a point.
    pub(super) fn add_named(&mut self, name: &str, value: Number, integral: bool) {
        match (position_word(name.rsplit('/').next().unwrap_or(name), false), value) {
            (Some(what), Number::Good(x)) => {
                if integral && (0.0..1e15).contains(&x) {
                    self.place(what, x as u64, None);
                } else {
                    self.fractional_epoch |= what == Word::Epoch;
                }
            }
            (Some(_), Number::Bad) => {}
            (None, value) => self.add(name, value),
        }
    }

    fn place(&mut self, what: Word, at: u64, total: Option<u64>) {
        match what {
            // A place with a total says more than one without, whichever comes first.
            Word::Step if self.step.is_none_or(|s| s.total.is_none() && total.is_some()) => {
                self.step = Some(Count { at, total, bar: false });
            }
            Word::Epoch if self.epoch.is_none_or(|e| e.total.is_none() && total.is_some()) => {
                self.epoch = Some(Epoch { at, total, over: if total.is_some() { at.saturating_sub(1) } else { at } });
            }
            _ => {}
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Step,
    Epoch,
}

/// Words that name a place in the run rather than a metric. Plurals (`epochs=10`, `batch=64`) only count beside a fraction: alone they are
/// settings.
fn position_word(word: &str, fraction: bool) -> Option<Word> {
    const STEPS: [&str; 10] = [
        "step",
        "global_step",
        "iter",
        "iteration",
        "it",
        "batch_idx",
        "update",
        "num_updates",
        "train_step",
        "training_step",
    ];
    const EPOCHS: [&str; 4] = ["epoch", "ep", "train_epoch", "current_epoch"];
    const STEPS_OF: [&str; 7] = ["steps", "iters", "iterations", "batch", "batches", "updates", "minibatch"];
    let is = |list: &[&str]| list.iter().any(|w| w.eq_ignore_ascii_case(word));
    if is(&EPOCHS) || (fraction && is(&["epochs"])) {
        Some(Word::Epoch)
    } else if is(&STEPS) || (fraction && is(&STEPS_OF)) {
        Some(Word::Step)
    } else {
        None
    }
}

/// What a program prints while a tqdm bar stands on the line comes right behind the bar; splits the two.
pub(super) fn split_after_bar(line: &[u8]) -> (&[u8], &[u8]) {
    let find = |from: usize, what: &[u8]| line[from..].windows(what.len()).position(|w| w == what).map(|i| from + i);
    let end = find(0, b"%|").and_then(|bar| find(bar, b" [")).and_then(|open| find(open, b"]"));
    end.map_or((line, &[]), |end| line.split_at(end + 1))
}

/// Reads one plain line.
pub(super) fn parse(line: &[u8], pattern: Option<&Pattern>) -> Facts {
    let mut facts = Facts::default();
    let line = line.trim_ascii();
    if !line.iter().any(u8::is_ascii_digit) && !mentions_non_number(line) {
        return facts;
    }
    if let Some(pattern) = pattern {
        fractions(line, &mut facts);
        pattern.apply(line, &mut facts);
        return facts;
    }
    if line.first() == Some(&b'{')
        && let Ok(serde_json::Value::Object(object)) = serde_json::from_slice(line)
    {
        json::facts(&object, &mut facts);
        return facts;
    }
    fractions(line, &mut facts);
    pairs(line, &mut facts);
    bare(line, &mut facts);
    facts
}

/// `loss: nan` has no digit but must be counted.
fn mentions_non_number(line: &[u8]) -> bool {
    line.windows(3).any(|w| w.eq_ignore_ascii_case(b"nan") || w.eq_ignore_ascii_case(b"inf"))
}

fn is_name(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'_' | b'/' | b'.' | b'-' | b'@')
}

/// The name that ends before `end`, as a range; names begin with a letter or an underscore.
fn name_before(line: &[u8], end: usize) -> Option<std::ops::Range<usize>> {
    let mut start = end;
    while start > 0 && is_name(line[start - 1]) {
        start -= 1;
    }
    while start < end && !(line[start].is_ascii_alphabetic() || line[start] == b'_') {
        start += 1;
    }
    (start < end && end - start <= MAX_NAME).then_some(start..end)
}

fn text(line: &[u8], range: std::ops::Range<usize>) -> &str {
    std::str::from_utf8(&line[range]).unwrap_or("")
}

/// Words that make `Train Loss: 0.3` a different metric than `Loss: 0.3`.
fn is_qualifier(word: &str) -> bool {
    const QUALIFIERS: [&str; 20] = [
        "train",
        "training",
        "val",
        "valid",
        "validation",
        "eval",
        "evaluation",
        "test",
        "dev",
        "avg",
        "average",
        "mean",
        "running",
        "total",
        "best",
        "batch",
        "epoch",
        "final",
        "g",
        "d",
    ];
    QUALIFIERS.iter().any(|q| q.eq_ignore_ascii_case(word))
}

/// Finds every `name=value` and `name: value`.
fn pairs(line: &[u8], facts: &mut Facts) {
    for (i, _) in line.iter().enumerate().filter(|(_, b)| matches!(b, b'=' | b':')) {
        let mut rest = &line[i + 1..];
        let spaced = rest.first() == Some(&b' ');
        rest = rest.trim_ascii_start();
        if let [b'\'' | b'"', inner @ ..] = rest {
            rest = inner;
        }
        // `tensor(0.25, grad_fn=…)`, `np.float32(0.25)`.
        let call = rest.iter().take_while(|&&b| is_name(b)).count();
        if call > 0 && rest[0].is_ascii_alphabetic() && rest.get(call) == Some(&b'(') {
            rest = &rest[call + 1..];
        }
        let Some((value, len)) = number::leading(rest) else { continue };
        if facts.values.len() >= MAX_PER_LINE {
            facts.surplus += 1;
            continue;
        }
        let mut end = line[..i].trim_ascii_end().len();
        let quoted = end > 0 && matches!(line[end - 1], b'\'' | b'"');
        end -= usize::from(quoted);
        let Some(name) = name_before(line, end) else { continue };
        let short = text(line, name.clone());
        // `train.py:123` and `localhost:8080` are no metrics; `loss:0.3` is one.
        if line[i] == b':' && !spaced && !quoted && !is_metric_word(short) && position_word(short, false).is_none() {
            continue;
        }
        let integral = rest[..len].iter().all(u8::is_ascii_digit);
        let before = (!quoted && name.start >= 2 && line[name.start - 1] == b' ')
            .then(|| name_before(line, name.start - 1))
            .flatten()
            .map(|range| text(line, range))
            .filter(|word| is_qualifier(word) && position_word(short, false).is_none());
        match before {
            Some(word) => facts.add_named(&format!("{word}_{short}"), value, integral),
            None => facts.add_named(short, value, integral),
        }
    }
}

/// Finds `epoch 3` and `loss 0.34`, where nothing stands between; the latter only for names that are metrics beyond doubt, and only where no
/// metric was found in a clearer form.
fn bare(line: &[u8], facts: &mut Facts) {
    let clearer = facts.values.iter().any(|(name, _)| is_metric_word(name));
    let mut words = line
        .split(|b| matches!(b, b' ' | b'|' | b',' | b'(' | b'['))
        .filter(|w| !w.is_empty())
        .take(MAX_WORDS)
        .peekable();
    while let Some(word) = words.next() {
        let Some((value, len)) = words.peek().and_then(|next| number::leading(next)) else { continue };
        let integral = words.peek().is_some_and(|next| next[..len].iter().all(u8::is_ascii_digit));
        let Ok(name) = std::str::from_utf8(word) else { continue };
        if !word.iter().all(|&b| is_name(b)) {
            continue;
        }
        if position_word(name, false).is_some() {
            facts.add_named(name, value, integral);
        } else if !clearer && is_metric_word(name) {
            facts.add(name, value);
        }
    }
}

/// Finds places such as `Epoch 3/10`.
fn fractions(line: &[u8], facts: &mut Facts) {
    for (i, _) in line.iter().enumerate().filter(|(_, b)| **b == b'/').take(MAX_FRACTIONS) {
        fraction_at(line, i, i + 1, facts);
    }
    for (i, _) in line.windows(4).enumerate().filter(|(_, w)| w == b" of ").take(MAX_FRACTIONS) {
        fraction_at(line, i, i + 4, facts);
    }
}

/// Reads the fraction whose numerator ends before `end` and whose denominator starts at or after `next`.
fn fraction_at(line: &[u8], end: usize, next: usize, facts: &mut Facts) {
    let head = line[..end].trim_ascii_end();
    let digits = head.iter().rev().take_while(|b| b.is_ascii_digit()).count();
    let before = &head[..head.len() - digits];
    if !matches!(before.last(), None | Some(b' ' | b'[' | b'(' | b'|' | b':' | b'=' | b'#')) {
        return;
    }
    let tail = line[next..].trim_ascii_start();
    let (Some((at, _)), Some((total, len))) = (number::leading_u64(&head[before.len()..]), number::leading_u64(tail))
    else {
        return;
    };
    let after = &tail[len..];
    if !matches!(after.first(), None | Some(b' ' | b']' | b')' | b',' | b':' | b';' | b'|')) {
        return;
    }
    if total == 0 || at > total || total > 1_000_000_000_000_000 {
        return;
    }
    let total = Some(total);

    let trimmed = before.trim_ascii_end();
    let opened = trimmed.strip_suffix(b"[").or(trimmed.strip_suffix(b"(")).unwrap_or(trimmed).trim_ascii_end();
    let word_end = opened.iter().rposition(|b| !matches!(b, b' ' | b':' | b'=' | b'#')).map_or(0, |p| p + 1);
    let ahead = name_before(opened, word_end).map_or("", |r| text(opened, r));
    let behind = after.trim_ascii_start();
    let behind = text(behind, 0..behind.iter().take_while(|b| b.is_ascii_alphabetic()).count());
    if let Some(word) = position_word(ahead, true).or(position_word(behind, true)) {
        facts.place(word, at, total);
        return;
    }

    const BAR: &[u8] = "━".as_bytes();
    let tqdm = before.ends_with(b"| ") && after.starts_with(b" [");
    let keras = trimmed.is_empty() && (after.starts_with(b" [") || after.trim_ascii_start().starts_with(BAR));
    let rich = trimmed.ends_with(BAR) || trimmed.ends_with("╸".as_bytes()) || trimmed.ends_with("╺".as_bytes());
    let mnist = before.ends_with(b"[") && after.starts_with(b" (");
    if tqdm {
        // Nobody's bar is longer, and the search must not be either.
        let after = &after[..after.len().min(300)];
        let title = &line[..line.iter().position(|&b| b == b'|').unwrap_or(0)];
        if title.len() > 300
            || is_chore(title)
            || after.windows(10).any(|w| w == b"examples/s")
            || after.windows(3).any(|w| w == b"B/s")
        {
            return;
        }
        let about_epochs = title.windows(5).any(|w| w.eq_ignore_ascii_case(b"epoch"));
        let numbered = title.iter().filter(|b| b.is_ascii_digit()).count()
            > title.iter().rev().take(5).filter(|b| b.is_ascii_digit()).count();
        if about_epochs && !numbered {
            facts.epoch = Some(Epoch { at, total, over: at });
            return;
        }
    }
    if (tqdm || keras || rich || mnist) && facts.step.is_none_or(|s| s.total.is_none()) {
        facts.step = Some(Count { at, total, bar: true });
    }
}

/// Bars that do not measure training: data preparation, checkpoints, validation.
fn is_chore(title: &[u8]) -> bool {
    const CHORES: [&[u8]; 17] = [
        b"valid",
        b"sanity",
        b"test",
        b"predict",
        b"eval",
        b"download",
        b"upload",
        b"loading",
        b"map",
        b"filter",
        b"tokeniz",
        b"generating",
        b"fetch",
        b"saving",
        b"extract",
        b"preprocess",
        b"writing",
    ];
    let title = title.to_ascii_lowercase();
    CHORES.iter().any(|chore| title.windows(chore.len()).any(|w| w == *chore))
}

/// A user's own way to find a metric in a line.
#[derive(Debug, Clone)]
pub struct Pattern {
    regex: Regex,
    /// What the metric is called where the pattern has no group `metric`.
    name: String,
}

/// Why a pattern cannot be used. The message is one line and says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error(
        "metric pattern {pattern:?} does not compile: {reason}; correct it or leave it out (the syntax is that of the Rust regex crate, without look-around and back-references)"
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
    /// Compiles `pattern`, with named groups `value` and, if wanted, `metric`, `step`, `total`. `name` is what the metric is called otherwise.
    pub fn new(pattern: &str, name: &str) -> Result<Pattern, PatternError> {
        let shown = || pattern.chars().take(200).collect::<String>();
        if pattern.len() > 4096 {
            return Err(PatternError::TooLarge { pattern: shown() });
        }
        // A quarter of a megabyte compiles any sensible pattern; `(\w{500}){500}` would need gigabytes.
        // Classes are those of ASCII: `\w` of all scripts is a hundred times larger, and numbers are what is looked for.
        let built = RegexBuilder::new(pattern)
            .unicode(false)
            .size_limit(256 << 10)
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

    fn apply(&self, line: &[u8], facts: &mut Facts) {
        for found in self.regex.captures_iter(line).take(MAX_PER_LINE) {
            let group = |name| found.name(name).and_then(|m| std::str::from_utf8(m.as_bytes()).ok());
            if let Some(value) = group("value").and_then(number::whole) {
                facts.add(group("metric").unwrap_or(&self.name), value);
            }
            if let Some(at) = group("step").and_then(|s| s.parse().ok()) {
                let total = group("total").and_then(|s| s.parse().ok()).filter(|&total| total >= at);
                facts.step = Some(Count { at, total, bar: false });
            }
        }
    }
}
