//! Numbers as training scripts print them.
//!
//! A value counts only when it ends where a number ends: `5s`, `1:23` or `30ms/step` are not
//! metrics. A number that is NaN, infinite or larger than any honest loss is [`Number::Bad`], which
//! is counted; a text that is no number is `None`, which is not.

use crate::reading::MAX_MAGNITUDE;

/// A number found in a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Number {
    Good(f64),
    /// NaN, infinite or absurd.
    Bad,
}

/// Refuses values that must never leave this crate.
pub(crate) fn vet(x: f64) -> Number {
    // A NaN compares false and falls through.
    if x.abs() <= MAX_MAGNITUDE { Number::Good(x) } else { Number::Bad }
}

/// Reads a number at the start of `s`; gives it and its length. A percent sign is part of it.
pub(crate) fn leading(s: &[u8]) -> Option<(Number, usize)> {
    let sign = usize::from(matches!(s.first(), Some(b'+' | b'-')));
    for word in [&b"nan"[..], b"infinity", b"inf"] {
        if s.len() >= sign + word.len() && s[sign..sign + word.len()].eq_ignore_ascii_case(word) {
            let end = sign + word.len();
            return ends_number(&s[end..]).then_some((Number::Bad, end));
        }
    }
    let digits = |from: usize| s[from..].iter().take_while(|b| b.is_ascii_digit()).count();
    let whole = digits(sign);
    let mut end = sign + whole;
    let mut fraction = 0;
    if s.get(end) == Some(&b'.') {
        fraction = digits(end + 1);
        end += 1 + fraction;
    }
    if whole + fraction == 0 {
        return None;
    }
    if matches!(s.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(s.get(end + 1), Some(b'+' | b'-')));
        let exponent = digits(end + 1 + sign);
        if exponent > 0 {
            end += 1 + sign + exponent;
        }
    }
    let value: f64 = std::str::from_utf8(&s[..end]).ok()?.parse().ok()?;
    let percent = usize::from(s.get(end) == Some(&b'%'));
    // The percentage before a tqdm bar is a place, not a value.
    if percent == 1 && s.get(end + 1) == Some(&b'|') {
        return None;
    }
    ends_number(&s[end + percent..]).then_some((vet(value), end + percent))
}

/// Reads a whole number at the start of `s`, whatever follows it; gives it and its length.
pub(crate) fn leading_u64(s: &[u8]) -> Option<(u64, usize)> {
    let n = s.iter().take_while(|b| b.is_ascii_digit()).count();
    // Nineteen digits cannot overflow.
    if n == 0 || n > 19 {
        return None;
    }
    Some((s[..n].iter().fold(0u64, |acc, b| acc * 10 + u64::from(b - b'0')), n))
}

/// Whether a number may end before `rest`.
fn ends_number(rest: &[u8]) -> bool {
    match rest {
        [] => true,
        [b' ' | b',' | b';' | b')' | b']' | b'}' | b'|' | b'\'' | b'"' | b'>', ..] => true,
        // The full stop of a sentence, the colon that tqdm puts after a description.
        [b'.' | b':', next, ..] => *next == b' ',
        [b'.' | b':'] => true,
        _ => false,
    }
}

/// A text that is a number and nothing else.
pub(crate) fn whole(s: &str) -> Option<Number> {
    let s = s.trim();
    match leading(s.as_bytes()) {
        Some((n, len)) if len == s.len() => Some(n),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<(Number, usize)>) {
        assert_eq!(leading(text.as_bytes()), expected, "{text:?}");
    }

    #[test]
    fn numbers_end_where_numbers_end() {
        use Number::*;
        check("0.25", Some((Good(0.25), 4)));
        check("-1.5e-05,", Some((Good(-1.5e-5), 8)));
        check(".5]", Some((Good(0.5), 2)));
        check("3.", Some((Good(3.0), 2)));
        check("93.5% ", Some((Good(93.5), 5)));
        check("12.", Some((Good(12.0), 3)));
        check("0.43:  18%|", Some((Good(0.43), 4)));
        check("nan", Some((Bad, 3)));
        check("-Infinity}", Some((Bad, 9)));
        check("1e308", Some((Bad, 5)));
        check("1e999", Some((Bad, 5)));
        for nothing in [
            "5s",
            "1:23",
            "30ms/step",
            "1.2.3",
            "3/10",
            "nano",
            "information",
            "",
            "-",
            ".",
            "e5",
            "0x10",
            "1_000",
            "45%|██",
        ] {
            check(nothing, None);
        }
    }

    #[test]
    fn integers_never_overflow() {
        assert_eq!(leading_u64(b"9999999999999999999x"), Some((9_999_999_999_999_999_999, 19)));
        assert_eq!(leading_u64(b"99999999999999999999"), None);
    }
}
