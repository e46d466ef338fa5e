//! Deadlines as people write them: `tomorrow 9:00`, `18:00`, `friday noon`, `2h`, RFC 3339.
//!
//! **Problem.** A time of day means a moment only together with a day and a time zone. On two days of
//! the year some times of day do not exist, or exist twice.
//!
//! **How.** [`parse`] takes the text and the present moment in the user's time zone. A time of day
//! alone is the next one to come. A length of time counts from now. What names no moment, or more than
//! one, is refused with the ways to say it clearly, unless the clocks have changed already and a later day is meant; so
//! is a moment in the past. The command line
//! resolves the text where the user is; a request over the API is resolved in the daemon's time zone.
//!
//! **Properties** (tests of that name): `words_mean_what_people_mean`; `daylight_saving_is_never_guessed`;
//! `the_past_is_refused`, `a_zone_is_never_guessed`.

use crate::duration::parse_duration;
use jiff::civil::{Date, DateTime, Time, Weekday};
use jiff::tz::{AmbiguousOffset, Offset, TimeZone};
use jiff::{SignedDuration, Timestamp, Zoned};

/// Why a text is not a deadline.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DeadlineError {
    #[error(
        "`{text}` is not a deadline: write a time (18:00, `tomorrow 9:00`, `friday noon`), a length of time (2h), or a moment \
         like 2026-03-01T18:00:00+01:00"
    )]
    Unknown { text: String },
    #[error("`{text}` may be a time of day or a length of time: write 18:00 for the time, 18s or 18h for the length")]
    BareNumber { text: String },
    #[error("`{text}` names a day but no time: write for example `{text} 9:00`")]
    NoTime { text: String },
    #[error("the deadline `{text}` is in the past: it was {moment}, and now it is {now}")]
    Past { text: String, moment: String, now: String },
    #[error("`{text}` does not exist, because the clocks of {zone} go forward over it: write {before} or {after}")]
    Gap { text: String, zone: String, before: String, after: String },
    #[error("`{text}` occurs twice, because the clocks of {zone} go back: write {first} or {second}")]
    Twice { text: String, zone: String, first: String, second: String },
    #[error(
        "`{text}` is a time of day, and the time zone is not known: set TZ to a name such as Europe/Berlin, or write a \
         moment like 2026-03-01T18:00:00+01:00"
    )]
    NoZone { text: String },
    #[error("`{text}` is not a target: write NAME=VALUE, such as loss=0.05")]
    Target { text: String },
}

/// The present moment in the time zone of this process. A machine that names no time zone has UTC. A `TZ` that names
/// none is a mistake, and the zone is then unknown.
pub fn now() -> Zoned {
    let now = Zoned::now();
    let is_named = std::env::var_os("TZ").is_some_and(|name| !name.is_empty() && name != ":");
    if now.time_zone().is_unknown() && !is_named { now.with_time_zone(TimeZone::UTC) } else { now }
}

/// The moment that `text` names.
pub fn parse(text: &str, now: &Zoned) -> Result<Timestamp, DeadlineError> {
    let given = text.trim();
    let moment = moment(given, now)?;
    if moment <= now.timestamp() {
        let local = |t: Timestamp| t.to_zoned(now.time_zone().clone()).strftime("%Y-%m-%d %H:%M:%S %Z").to_string();
        return Err(DeadlineError::Past { text: given.into(), moment: local(moment), now: local(now.timestamp()) });
    }
    Ok(moment)
}

fn moment(text: &str, now: &Zoned) -> Result<Timestamp, DeadlineError> {
    let unknown = || DeadlineError::Unknown { text: text.into() };
    // The reader of moments takes one with a zone too, and drops the zone, which may contradict the offset.
    if text.contains('[') {
        return text.parse::<Zoned>().map(|moment| moment.timestamp()).map_err(|_| unknown());
    }
    if let Ok(moment) = text.parse::<Timestamp>() {
        return Ok(moment);
    }
    let words = text.to_lowercase().replace(',', " ");
    let words: Vec<&str> = words.split_whitespace().filter(|w| !matches!(*w, "at" | "by" | "on")).collect();
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return Err(DeadlineError::BareNumber { text: text.into() });
    }
    let length = words.strip_prefix(&["in"]).unwrap_or(&words).join(" ");
    if !length.contains(':')
        && let Ok(length) = parse_duration(&length)
    {
        let length = SignedDuration::try_from(length).ok();
        let moment = length.and_then(|length| now.timestamp().checked_add(length).ok());
        return moment.ok_or_else(unknown);
    }
    match *words.as_slice() {
        [word] => match (time(word), day(word, now.date())) {
            (Some(time), _) => next(text, time, now),
            // The reader of dates takes a date with a time too, and drops the time.
            (None, Some(_)) if !has_time(word) => Err(DeadlineError::NoTime { text: text.into() }),
            (None, _) => match word.parse::<DateTime>() {
                Ok(datetime) if has_time(word) => civil(text, datetime, now.time_zone()),
                _ => Err(unknown()),
            },
        },
        [hour, half @ ("am" | "pm")] => match time(&format!("{hour}{half}")) {
            Some(time) => next(text, time, now),
            None => Err(unknown()),
        },
        [first, second] if time(first).is_some() => on_day(text, second, first, now),
        [first, second] => on_day(text, first, second, now),
        [first, half @ ("am" | "pm"), second] => on_day(text, second, &format!("{first}{half}"), now),
        [first, second, half @ ("am" | "pm")] => on_day(text, first, &format!("{second}{half}"), now),
        _ => Err(unknown()),
    }
}

/// Whether a date is followed by a time of day, as in `2026-03-01t18:00` and `20260301t180000`.
fn has_time(word: &str) -> bool {
    word.contains(':') || (word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('t'))
}

/// The next moment at which the clock on the wall shows this time.
fn next(text: &str, time: Time, now: &Zoned) -> Result<Timestamp, DeadlineError> {
    let today = now.date();
    let date = if is_over(today.to_datetime(time), now) { today.tomorrow() } else { Ok(today) };
    let date = date.map_err(|_| DeadlineError::Unknown { text: text.into() })?;
    civil(text, date.to_datetime(time), now.time_zone())
}

/// The moment of a time of day on a day. `friday 9:00`, said on a Friday at ten, means the next one.
fn on_day(text: &str, day_word: &str, time_word: &str, now: &Zoned) -> Result<Timestamp, DeadlineError> {
    let unknown = || DeadlineError::Unknown { text: text.into() };
    let (Some(mut date), Some(time)) = (day(day_word, now.date()), time(time_word)) else { return Err(unknown()) };
    if weekday(day_word).is_some() && is_over(date.to_datetime(time), now) {
        date = (0..7).try_fold(date, |d, _| d.tomorrow()).map_err(|_| unknown())?;
    }
    civil(text, date.to_datetime(time), now.time_zone())
}

/// Whether a moment of the clock on the wall has passed, or was left out when the clocks went forward. One that occurs
/// twice has passed when it has passed the second time.
fn is_over(datetime: DateTime, now: &Zoned) -> bool {
    match now.time_zone().to_ambiguous_zoned(datetime).offset() {
        AmbiguousOffset::Unambiguous { offset } | AmbiguousOffset::Fold { after: offset, .. } => {
            offset.to_timestamp(datetime).is_ok_and(|moment| moment <= now.timestamp())
        }
        AmbiguousOffset::Gap { .. } => datetime < now.datetime(),
    }
}

/// A moment of the clock on the wall, if there is exactly one.
fn civil(text: &str, datetime: DateTime, zone: &TimeZone) -> Result<Timestamp, DeadlineError> {
    if zone.is_unknown() {
        return Err(DeadlineError::NoZone { text: text.into() });
    }
    let name = || zone.iana_name().unwrap_or("this time zone").to_owned();
    let ambiguous = zone.to_ambiguous_zoned(datetime);
    match ambiguous.offset() {
        AmbiguousOffset::Unambiguous { offset } => {
            offset.to_timestamp(datetime).map_err(|_| DeadlineError::Unknown { text: text.into() })
        }
        AmbiguousOffset::Gap { before, after } => {
            // As far from the change as the time that does not exist, on each side of it.
            let at = |read: Offset, shown: Offset| {
                let moment = read.to_timestamp(datetime).map_err(|_| DeadlineError::Unknown { text: text.into() })?;
                Ok(format!("{}{}", shown.to_datetime(moment), offset_text(shown)))
            };
            let (before, after) = (at(after, before)?, at(before, after)?);
            Err(DeadlineError::Gap { text: text.into(), zone: name(), before, after })
        }
        AmbiguousOffset::Fold { before, after } => {
            let at = |offset: Offset| format!("{datetime}{}", offset_text(offset));
            Err(DeadlineError::Twice { text: text.into(), zone: name(), first: at(before), second: at(after) })
        }
    }
}

fn offset_text(offset: Offset) -> String {
    let (sign, seconds) = if offset.seconds() < 0 { ('-', -offset.seconds()) } else { ('+', offset.seconds()) };
    format!("{sign}{:02}:{:02}", seconds / 3600, seconds / 60 % 60)
}

/// A day, from a word or a date. A weekday is the next one, today included.
fn day(word: &str, today: Date) -> Option<Date> {
    if let Some(wanted) = weekday(word) {
        let mut date = today;
        while date.weekday() != wanted {
            date = date.tomorrow().ok()?;
        }
        return Some(date);
    }
    match word {
        "today" | "tonight" => Some(today),
        "tomorrow" => today.tomorrow().ok(),
        _ => word.parse::<Date>().ok(),
    }
}

fn weekday(word: &str) -> Option<Weekday> {
    let names = [
        ("monday", Weekday::Monday),
        ("tuesday", Weekday::Tuesday),
        ("wednesday", Weekday::Wednesday),
        ("thursday", Weekday::Thursday),
        ("friday", Weekday::Friday),
        ("saturday", Weekday::Saturday),
        ("sunday", Weekday::Sunday),
    ];
    names.into_iter().find(|(name, _)| *name == word || (word.len() >= 3 && name.starts_with(word))).map(|(_, day)| day)
}

/// A time of day: `9:00`, `18:30:15`, `9am`, `5:30pm`, `noon`, `midnight`.
fn time(word: &str) -> Option<Time> {
    match word {
        "noon" => return Time::new(12, 0, 0, 0).ok(),
        // The end of a day is the beginning of the next; `midnight` alone is always the next one.
        "midnight" => return Time::new(0, 0, 0, 0).ok(),
        _ => {}
    }
    let (digits, half) = match (word.strip_suffix("am"), word.strip_suffix("pm")) {
        (Some(digits), _) => (digits, Some(0)),
        (_, Some(digits)) => (digits, Some(12)),
        _ => (word, None),
    };
    if half.is_none() && !digits.contains(':') {
        return None;
    }
    let parts: Option<Vec<i8>> = digits.split(':').map(|p| p.parse().ok().filter(|_| p.len() <= 2)).collect();
    let (hour, minute, second) = match *parts?.as_slice() {
        [hour] => (hour, 0, 0),
        [hour, minute] => (hour, minute, 0),
        [hour, minute, second] => (hour, minute, second),
        _ => return None,
    };
    let hour = match half {
        None => hour,
        Some(half) if (1..=12).contains(&hour) => hour % 12 + half,
        Some(_) => return None,
    };
    Time::new(hour, minute, second, 0).ok()
}

/// A day and a month further away than this may be taken for those of another year.
const HALF_A_YEAR_S: f64 = 182.0 * 86_400.0;

/// Name and value of a target such as `loss=0.05`.
pub fn parse_target(text: &str) -> Result<(String, f64), DeadlineError> {
    let wrong = || DeadlineError::Target { text: text.into() };
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let value: f64 = value.trim().parse().map_err(|_| wrong())?;
    let name = name.trim();
    if name.is_empty() || !value.is_finite() { Err(wrong()) } else { Ok((name.to_owned(), value)) }
}

/// A moment for people in the time zone of this process: the time alone for today, else with the day, and with the year
/// if it is not nearer than half a year. Seconds are shown of a moment that is nearer than an hour.
pub fn local(unix_s: f64) -> String {
    local_at(unix_s, &now())
}

/// A length of time for people: seconds below 90 s, then minutes, hours and days.
pub fn length(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    let minutes = (seconds / 60.0).round() as u64;
    let pair = |large: u64, unit: &str, small: u64, part: &str| match small {
        0 => format!("{large} {unit}"),
        _ => format!("{large} {unit} {small} {part}"),
    };
    match minutes {
        _ if seconds < 89.5 => format!("{seconds:.0} s"),
        0..60 => format!("{minutes} min"),
        60..1440 => pair(minutes / 60, "h", minutes % 60, "min"),
        _ => pair(minutes / 1440, "d", minutes % 1440 / 60, "h"),
    }
}

/// [`local`] with what may be added or taken away, as in `07:40 ± 20 min`.
pub fn local_within(unix_s: f64, side_s: f64) -> String {
    format!("{} ± {}", local(unix_s), length(side_s))
}

fn local_at(unix_s: f64, now: &Zoned) -> String {
    let Ok(moment) = Timestamp::from_second(unix_s as i64) else { return "never".into() };
    let moment = moment.to_zoned(now.time_zone().clone());
    let distance_s = (unix_s - now.timestamp().as_second() as f64).abs();
    let is_near = distance_s < HALF_A_YEAR_S;
    let format = match () {
        () if moment.date() == now.date() && distance_s < 3600.0 => "%H:%M:%S",
        () if moment.date() == now.date() => "%H:%M",
        () if is_near => "%a %d %b %H:%M",
        () => "%a %d %b %Y %H:%M",
    };
    moment.strftime(format).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wednesday, 18 March 2026, 10:30 in Berlin.
    fn wednesday() -> Zoned {
        "2026-03-18T10:30:00+01:00[Europe/Berlin]".parse().expect("a moment")
    }

    #[test]
    fn the_note_about_a_miss_has_the_words_of_the_prospect() {
        let miss = crate::types::PredictedMiss { deadline_s: 0.0, cause: crate::types::MissCause::NoTimeLeft };
        assert!(miss.to_string().contains(&gainshare_core::forecast::Prospect::Late.to_string()), "{miss}");
    }

    #[test]
    fn a_moment_has_the_year_unless_it_is_near() {
        let now = wednesday();
        let shown = |text: &str| {
            let moment: Timestamp = text.parse().expect(text);
            local_at(moment.as_second() as f64, &now)
        };
        assert_eq!(shown("2026-03-18T17:00:00Z"), "18:00");
        assert_eq!(shown("2026-03-18T09:31:05Z"), "10:31:05", "minutes alone say nothing of a moment that is so near");
        assert_eq!(shown("2026-03-20T08:00:00Z"), "Fri 20 Mar 09:00");
        assert_eq!(shown("2027-03-01T17:00:00Z"), "Mon 01 Mar 2027 18:00");
        assert_eq!(shown("2036-03-01T17:00:00Z"), "Sat 01 Mar 2036 18:00");
    }

    #[test]
    fn lengths_have_units_that_fit() {
        for (seconds, text) in [
            (-3.0, "0 s"),
            (89.4, "89 s"),
            (89.6, "1 min"),
            (150.0, "3 min"),
            (3600.0, "1 h"),
            (5400.0, "1 h 30 min"),
            (86_400.0, "1 d"),
            (93_600.0, "1 d 2 h"),
        ] {
            assert_eq!(length(seconds), text);
        }
    }

    fn at(text: &str) -> String {
        parse(text, &wednesday()).expect(text).to_string()
    }

    #[test]
    fn words_mean_what_people_mean() {
        for (text, moment) in [
            ("18:00", "2026-03-18T17:00:00Z"),
            ("9:00", "2026-03-19T08:00:00Z"),
            ("tomorrow 9:00", "2026-03-19T08:00:00Z"),
            ("Tomorrow at 9am", "2026-03-19T08:00:00Z"),
            ("5:30pm", "2026-03-18T16:30:00Z"),
            ("today 5 pm", "2026-03-18T16:00:00Z"),
            ("5 pm", "2026-03-18T16:00:00Z"),
            ("9 AM", "2026-03-19T08:00:00Z"),
            ("9am tomorrow", "2026-03-19T08:00:00Z"),
            ("9 am tomorrow", "2026-03-19T08:00:00Z"),
            ("at noon on friday", "2026-03-20T11:00:00Z"),
            ("friday noon", "2026-03-20T11:00:00Z"),
            ("wed 9:00", "2026-03-25T08:00:00Z"),
            ("wed 9 am", "2026-03-25T08:00:00Z"),
            ("wed 11:00", "2026-03-18T10:00:00Z"),
            ("midnight", "2026-03-18T23:00:00Z"),
            ("2h", "2026-03-18T11:30:00Z"),
            ("in 1h30m", "2026-03-18T11:00:00Z"),
            ("90m", "2026-03-18T11:00:00Z"),
            ("2026-03-18 18:00", "2026-03-18T17:00:00Z"),
            ("2026-03-18T18:00", "2026-03-18T17:00:00Z"),
            ("2026-03-18T18:00:00-05:00", "2026-03-18T23:00:00Z"),
            ("2026-03-18T18:00:00Z", "2026-03-18T18:00:00Z"),
            ("20260318T180000", "2026-03-18T17:00:00Z"),
            ("2026-03-18T18:00:00+01:00[Europe/Berlin]", "2026-03-18T17:00:00Z"),
            ("2026-03-18T18:00:00[America/New_York]", "2026-03-18T22:00:00Z"),
            // After the clocks went forward.
            ("2026-04-01 09:00", "2026-04-01T07:00:00Z"),
        ] {
            assert_eq!(at(text), moment, "{text}");
        }
    }

    #[test]
    fn a_zone_is_never_guessed() {
        let nowhere = wednesday().with_time_zone(TimeZone::unknown());
        for text in ["18:00", "tomorrow 9:00", "friday noon", "2026-03-18 18:00"] {
            let refused = parse(text, &nowhere).expect_err(text);
            assert!(matches!(refused, DeadlineError::NoZone { .. }) && refused.to_string().contains("TZ"), "{refused}");
        }
        for text in ["2h", "2026-03-18T18:00:00+01:00", "2026-03-18T18:00:00[Europe/Berlin]"] {
            assert!(parse(text, &nowhere).is_ok(), "{text} means the same everywhere");
        }
        let contradiction = "2026-03-18T18:00:00+05:00[Europe/Berlin]";
        assert!(matches!(parse(contradiction, &wednesday()), Err(DeadlineError::Unknown { .. })));
    }

    #[test]
    fn daylight_saving_is_never_guessed() {
        let before = "2026-03-28T20:00:00+01:00[Europe/Berlin]".parse().expect("a moment");
        let gap = parse("tomorrow 2:30", &before).expect_err("the clocks go from 2:00 to 3:00");
        assert!(matches!(gap, DeadlineError::Gap { .. }) && gap.to_string().contains("Europe/Berlin"), "{gap}");
        let words = gap.to_string();
        let sides = ["2026-03-29T01:30:00+01:00", "2026-03-29T03:30:00+02:00"];
        for side in sides {
            assert!(words.contains(side) && parse(side, &before).is_ok(), "{words}");
        }
        let before = "2026-10-24T20:00:00+02:00[Europe/Berlin]".parse().expect("a moment");
        let twice = parse("tomorrow 2:30", &before).expect_err("2:30 comes twice");
        let words = twice.to_string();
        assert!(words.contains("2026-10-25T02:30:00+02:00") && words.contains("2026-10-25T02:30:00+01:00"), "{words}");
        // On the day of the change itself.
        for (now, text, moment) in [
            ("2026-03-29T01:30:00+01:00", "2:30", None),
            ("2026-03-29T03:00:00+02:00", "2:30", Some("2026-03-30T00:30:00Z")),
            ("2026-03-29T10:00:00+02:00", "2:30", Some("2026-03-30T00:30:00Z")),
            ("2026-03-29T10:00:00+02:00", "sunday 2:30", Some("2026-04-05T00:30:00Z")),
            ("2026-03-29T10:00:00+02:00", "sunday 2:30 am", Some("2026-04-05T00:30:00Z")),
            ("2026-03-29T10:00:00+02:00", "today 2:30", None),
            ("2026-10-25T01:30:00+02:00", "2:30", None),
            // The first 2:30 has passed, and the second one has not.
            ("2026-10-25T02:40:00+02:00", "2:30", None),
            ("2026-10-25T02:30:00+01:00", "2:30", Some("2026-10-26T01:30:00Z")),
            ("2026-10-25T18:00:00+01:00", "2:30", Some("2026-10-26T01:30:00Z")),
            ("2026-10-25T18:00:00+01:00", "sun 2:30", Some("2026-11-01T01:30:00Z")),
        ] {
            let here = format!("{now}[Europe/Berlin]").parse().expect("a moment");
            let parsed = parse(text, &here).map(|moment| moment.to_string());
            match moment {
                Some(moment) => assert_eq!(parsed.as_deref(), Ok(moment), "`{text}` at {now}"),
                None => assert!(
                    matches!(parsed, Err(DeadlineError::Gap { .. } | DeadlineError::Twice { .. })),
                    "`{text}` at {now}: {parsed:?}"
                ),
            }
        }
    }

    #[test]
    fn the_past_is_refused() {
        for text in ["today 9:00", "2020-01-01 12:00", "2026-03-18T10:30:00+01:00", "0s"] {
            let refused = parse(text, &wednesday()).expect_err(text);
            assert!(matches!(refused, DeadlineError::Past { .. }), "{text}: {refused}");
        }
    }

    #[test]
    fn what_names_no_moment_is_refused_with_the_remedy() {
        for (text, word) in [
            ("18", "18:00"),
            ("tomorrow", "tomorrow 9:00"),
            ("soon", "2h"),
            ("25:00", "18:00"),
            ("", "2h"),
            ("13 pm", "2h"),
        ] {
            let refused = parse(text, &wednesday()).expect_err(text).to_string();
            assert!(refused.contains(word), "{text}: {refused}");
        }
    }

    #[test]
    fn a_target_is_a_name_and_a_number() {
        assert_eq!(parse_target("loss=0.05"), Ok(("loss".to_owned(), 0.05)));
        for bad in ["loss", "=1", "loss=", "loss=nan", "loss=inf", "loss=x"] {
            assert!(parse_target(bad).is_err(), "{bad}");
        }
    }
}
