//! Grammar of one plain line: metrics, steps, epochs.
//!
//! **Grammar**, one pass each, no backtracking:
//! - `name=value`, `name: value`, also with quotes around either (Python dicts, torn JSON) and
//!   `tensor(…)` around the value;
//! - `name value` only for names that are certainly metrics (`loss 0.34`), as old PyTorch examples
//!   print;
//! - a line that is a JSON object ([`crate::json`]);
//! - `3/10`, `3 / 10` and `3 of 10` beside a word (`Epoch 3/10`, `Step [100/600]`,
//!   `200/ 2983 batches`) or inside the bar of tqdm (`| 37/200 [`), Keras (`37/200 ━━` or
//!   `37/200 [==`), rich (`━━ 37/200`) or PyTorch's MNIST example (`[640/60000 (1%)]`).
//!
//! A job's own pattern ([`crate::pattern`]) replaces the metrics part; steps and epochs of
//! fractions are still found.
//!
//! **Properties.** The work is linear in the length of the line.

use crate::facts::{Count, Epoch, Facts, MAX_PER_LINE};
use crate::json;
use crate::number;
use crate::pattern::BudgetedPattern;
use crate::ranking::is_metric_word;
use crate::reading::{Counters, MAX_NAME};
use crate::words::{count_word, is_chore, is_qualifier};

/// Fractions (`3/10`) examined on one line, and words. An honest line has a few, and the
/// surroundings of each are examined.
const MAX_FRACTIONS: usize = 16;
const MAX_WORDS: usize = 256;

/// The longest title of a bar, and the longest rest behind its counts.
const MAX_BAR_TEXT: usize = 300;

/// Splits a tqdm bar from the text that the program printed right behind it.
pub(crate) fn split_after_bar(line: &[u8]) -> (&[u8], &[u8]) {
    let find = |from: usize, what: &[u8]| line[from..].windows(what.len()).position(|w| w == what).map(|i| from + i);
    let end = find(0, b"%|").and_then(|bar| find(bar, b" [")).and_then(|open| find(open, b"]"));
    end.map_or((line, &[]), |end| line.split_at(end + 1))
}

/// Reads one plain line.
pub(crate) fn parse(line: &[u8], pattern: Option<&mut BudgetedPattern>, counters: &mut Counters) -> Facts {
    let mut facts = Facts::default();
    let line = line.trim_ascii();
    if !line.iter().any(u8::is_ascii_digit) && !mentions_non_number(line) {
        return facts;
    }
    if let Some(pattern) = pattern {
        fractions(line, &mut facts);
        pattern.apply(line, &mut facts, counters);
        return facts;
    }
    if line.first() == Some(&b'{')
        && let Ok(serde_json::Value::Object(object)) = serde_json::from_slice(line)
    {
        json::read_object(&object, &mut facts);
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
        if line[i] == b':' && !spaced && !quoted && !is_metric_word(short) && count_word(short, false).is_none() {
            continue;
        }
        let integral = rest[..len].iter().all(u8::is_ascii_digit);
        let before = (!quoted && name.start >= 2 && line[name.start - 1] == b' ')
            .then(|| name_before(line, name.start - 1))
            .flatten()
            .map(|range| text(line, range))
            .filter(|word| is_qualifier(word) && count_word(short, false).is_none());
        match before {
            Some(word) => facts.add_named(&format!("{word}_{short}"), value, integral),
            None => facts.add_named(short, value, integral),
        }
    }
}

/// Finds `epoch 3` and `loss 0.34`, where nothing stands between. The latter counts only for names
/// that are certainly metrics, and only where no metric was found in a clearer form.
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
        if count_word(name, false).is_some() {
            facts.add_named(name, value, integral);
        } else if !clearer && is_metric_word(name) {
            facts.add(name, value);
        }
    }
}

/// Finds counts such as `Epoch 3/10`.
fn fractions(line: &[u8], facts: &mut Facts) {
    for (i, _) in line.iter().enumerate().filter(|(_, b)| **b == b'/').take(MAX_FRACTIONS) {
        fraction_at(line, i, i + 1, facts);
    }
    for (i, _) in line.windows(4).enumerate().filter(|(_, w)| w == b" of ").take(MAX_FRACTIONS) {
        fraction_at(line, i, i + 4, facts);
    }
}

/// Reads the fraction whose numerator ends before `end` and whose denominator starts at or after
/// `next`.
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
    if let Some(word) = count_word(ahead, true).or(count_word(behind, true)) {
        facts.set_count(word, at, total);
        return;
    }

    const BAR: &[u8] = "━".as_bytes();
    let tqdm = before.ends_with(b"| ") && after.starts_with(b" [");
    let keras = trimmed.is_empty() && (after.starts_with(b" [") || after.trim_ascii_start().starts_with(BAR));
    let rich = trimmed.ends_with(BAR) || trimmed.ends_with("╸".as_bytes()) || trimmed.ends_with("╺".as_bytes());
    let mnist = before.ends_with(b"[") && after.starts_with(b" (");
    if tqdm {
        // No bar is longer, and the search must not be either.
        let after = &after[..after.len().min(MAX_BAR_TEXT)];
        let title = &line[..line.iter().position(|&b| b == b'|').unwrap_or(0)];
        if title.len() > MAX_BAR_TEXT
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
