//! Lengths of time as people write them: `20s`, `1h30m`, `500ms`.

use jiff::fmt::friendly::SpanParser;
use jiff::{SignedDuration, SpanRelativeTo};
use serde::{Deserialize, Deserializer, Serializer};
use std::time::Duration;

/// Reads a sum of numbers with units (`ms`, `s`, `m`, `h`, `d`); a bare number counts seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a length of time: write something like 20s, 10m or 1h30m");
    let text = text.trim();
    let is_bare = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if is_bare {
        let seconds: f64 = text.parse().map_err(|_| wrong())?;
        return Duration::try_from_secs_f64(seconds).map_err(|_| wrong());
    }
    let span = SpanParser::new().parse_span(text).map_err(|_| wrong())?;
    // Months and years have no fixed length, so they are refused here.
    let length = span.to_duration(SpanRelativeTo::days_are_24_hours()).map_err(|_| wrong())?;
    Duration::try_from(length).map_err(|_| wrong())
}

/// A text that [`parse_duration`] reads back, exact to the millisecond.
pub fn format_duration(d: Duration) -> String {
    let ms = i64::try_from(d.as_millis()).unwrap_or(i64::MAX);
    let printer = jiff::fmt::friendly::SpanPrinter::new().spacing(jiff::fmt::friendly::Spacing::None);
    printer.duration_to_string(&SignedDuration::from_millis(ms))
}

/// For `#[serde(with = …)]`.
pub(crate) mod text {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(d: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format_duration(*d))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        parse_duration(&String::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

/// For `#[serde(with = …)]` where the length may be missing.
pub(crate) mod optional_text {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(d: &Option<Duration>, s: S) -> Result<S::Ok, S::Error> {
        match d {
            Some(d) => s.serialize_str(&format_duration(*d)),
            None => s.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
        let text: Option<String> = Option::deserialize(d)?;
        text.map(|t| parse_duration(&t).map_err(serde::de::Error::custom)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write_and_refuses_the_rest() {
        for (text, ms) in
            [("20s", 20_000), ("1h30m", 5_400_000), ("500ms", 500), ("2", 2_000), ("1.5s", 1_500), ("1m 5s", 65_000)]
        {
            assert_eq!(parse_duration(text).unwrap().as_millis(), ms, "{text}");
        }
        for text in ["", "s", "-1s", "1y", "1..2s", "ten", "1e3s", "99999999999999999999999d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        for ms in [0, 1, 999, 1_000, 60_000, 61_000, 3_600_000, 5_400_000] {
            let d = Duration::from_millis(ms);
            assert_eq!(parse_duration(&format_duration(d)).unwrap(), d);
        }
    }
}
