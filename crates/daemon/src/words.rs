//! Says in plain words what a parser says about a file of a user.
//!
//! **Problem.** Parsers name the types of this program: `invalid type: string "high", expected i32`. A user knows
//! fields and values.
//!
//! **How.** A complaint about a value becomes a sentence with the field, what the field takes and what it has:
//! `priority must be a whole number, not "high"`. Any other complaint stays as it is, with the field before it.
//!
//! **Properties** (tests): `no_name_of_a_type_is_left`, `an_unknown_complaint_stays_as_it_is`.

/// Fields whose value is a list of texts.
const LISTS: [&str; 3] = ["command", "mounts", "after"];

/// What a TOML parser says of `text`, with the line. Fields of a job in a list of jobs have no prefix.
pub(crate) fn of_toml(mut error: toml::de::Error, text: &str) -> String {
    let line = error.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
    // Without its input the error names the keys that lead to the place, after its message.
    error.set_input(None);
    let shown = error.to_string();
    let keys = shown.lines().last().and_then(|last| last.strip_prefix("in `")?.strip_suffix('`'));
    let field = keys.map(|keys| keys.strip_prefix("job.").unwrap_or(keys));
    let what = plain(&error.message().replace('\n', "; "), field);
    line.map_or(what.clone(), |line| format!("line {line}: {what}"))
}

/// What a YAML parser says of `text`, with the line.
pub(crate) fn of_yaml(error: &serde_saphyr::Error, text: &str) -> String {
    // Parsers draw pictures of the place; one line is enough for us.
    let shown = error.without_snippet().to_string();
    let complaint = shown.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("cannot be read");
    let Some(place) = error.location().filter(|place| place.line() > 0) else { return plain(complaint, None) };
    let (line, column) = (place.line(), place.column());
    let complaint = complaint.strip_suffix(&format!(" at line {line}, column {column}")).unwrap_or(complaint);
    let before = text.lines().nth(line as usize - 1).map(|row| row.chars().take((column as usize).saturating_sub(1)));
    let field = before.map(String::from_iter).and_then(|before| key_before(&before).map(str::to_owned));
    format!("line {line}: {}", plain(complaint, field.as_deref()))
}

/// The key of a value, from what stands before the value on its line.
fn key_before(before: &str) -> Option<&str> {
    let before = before.trim_end().strip_suffix(':')?.trim_end_matches(['"', '\'']);
    let key = before.rsplit(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '-' | '.'))).next()?;
    Some(key).filter(|key| !key.is_empty())
}

/// A complaint about the value of `field`, in plain words.
fn plain(complaint: &str, field: Option<&str>) -> String {
    let Some((wanted, found)) = explain(complaint) else {
        // These name a field themselves.
        let is_about_field = ["unknown field", "missing field", "duplicate"].iter().any(|w| complaint.starts_with(w));
        let field = field.filter(|_| !is_about_field);
        return field.map_or(complaint.to_owned(), |field| format!("{field}: {complaint}"));
    };
    let what = match field {
        Some(field) if wanted == TEXT && LISTS.contains(&field) => format!("each value of {field}"),
        Some(field) => field.to_owned(),
        None => "this".to_owned(),
    };
    match found {
        Some(found) => format!("{what} must be {wanted}, not {found}"),
        None => format!("{what} must be {wanted}"),
    }
}

const TEXT: &str = "a text";

/// What is wanted, and what was found instead, if the complaint says so.
fn explain(complaint: &str) -> Option<(String, Option<String>)> {
    if let Some(rest) = complaint.strip_prefix("unknown variant ") {
        let (found, wanted) = rest.split_once(", expected ")?;
        let wanted = wanted.strip_prefix("one of ").map_or(wanted.to_owned(), |list| format!("one of {list}"));
        return Some((wanted, Some(found.to_owned())));
    }
    for (prefix, is_out_of_range) in [("invalid type: ", false), ("invalid value: ", true)] {
        if let Some(rest) = complaint.strip_prefix(prefix) {
            let (found, wanted) = rest.rsplit_once(", expected ")?;
            return Some((wanted_words(wanted, is_out_of_range)?, Some(found_words(found))));
        }
    }
    // The YAML parser does not say what it found.
    match complaint {
        "cannot deserialize null into string; use Option<String>" => Some((TEXT.into(), Some("nothing".into()))),
        "invalid boolean (strict mode expects true/false)" => Some((wanted_words("a boolean", false)?, None)),
        _ => {
            let wanted = complaint.strip_prefix("invalid ").or_else(|| complaint.strip_prefix("expected "))?;
            Some((wanted_words(wanted, true)?, None))
        }
    }
}

/// A type as serde or a parser names it, in words.
fn wanted_words(wanted: &str, has_range: bool) -> Option<String> {
    let range = match wanted {
        "i8" => Some((i128::from(i8::MIN), i128::from(i8::MAX))),
        "i16" => Some((i128::from(i16::MIN), i128::from(i16::MAX))),
        "i32" => Some((i128::from(i32::MIN), i128::from(i32::MAX))),
        "i64" | "isize" => Some((i128::from(i64::MIN), i128::from(i64::MAX))),
        "u8" => Some((0, i128::from(u8::MAX))),
        "u16" => Some((0, i128::from(u16::MAX))),
        "u32" => Some((0, i128::from(u32::MAX))),
        "u64" | "usize" => Some((0, i128::from(u64::MAX))),
        _ => None,
    };
    Some(match (wanted, range) {
        (_, Some((least, most))) if has_range => format!("a whole number from {least} to {most}"),
        (_, Some(_)) => "a whole number".into(),
        ("f32" | "f64" | "floating point" | "a floating point number", _) => "a number".into(),
        ("a boolean" | "boolean" | "bool", _) => "true or false".into(),
        ("a string" | "string" | "path string" | "string scalar" | "scalar", _) => TEXT.into(),
        ("a sequence" | "sequence start", _) => "a list".into(),
        ("a map" | "mapping start", _) => "a table".into(),
        (name, _) if name.starts_with("struct ") => "a table".into(),
        _ => return None,
    })
}

/// What serde calls a value, in words.
fn found_words(found: &str) -> String {
    let value = ["integer ", "floating point ", "boolean ", "character ", "string "];
    let value = value.iter().find_map(|kind| found.strip_prefix(kind));
    match (value, found) {
        (Some(value), _) => value.to_owned(),
        (None, "map") => "a table".to_owned(),
        (None, "sequence") => "a list".to_owned(),
        (None, "unit value" | "Option value") => "nothing".to_owned(),
        (None, other) => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_of_a_type_is_left() {
        for (complaint, words) in [
            ("invalid type: string \"high\", expected i32", "f must be a whole number, not \"high\""),
            ("invalid value: integer `-1`, expected u32", "f must be a whole number from 0 to 4294967295, not `-1`"),
            ("invalid type: map, expected f64", "f must be a number, not a table"),
            ("invalid type: integer `1`, expected a boolean", "f must be true or false, not `1`"),
            ("invalid type: sequence, expected a string", "f must be a text, not a list"),
            ("invalid type: string \", expected u8\", expected a sequence", "f must be a list, not \", expected u8\""),
            ("invalid type: string \"x\", expected struct MetricSpec", "f must be a table, not \"x\""),
            ("unknown variant `a`, expected `b` or `c`", "f must be `b` or `c`, not `a`"),
            ("unknown variant `a`, expected one of b, c, d", "f must be one of b, c, d, not `a`"),
            ("invalid i32", "f must be a whole number from -2147483648 to 2147483647"),
            ("invalid floating point", "f must be a number"),
            ("expected sequence start", "f must be a list"),
        ] {
            assert_eq!(plain(complaint, Some("f")), words);
        }
        let of_list = plain("invalid type: integer `3`, expected a string", Some("command"));
        assert_eq!(of_list, "each value of command must be a text, not `3`");
        assert_eq!(plain("invalid type: map, expected a sequence", None), "this must be a list, not a table");
    }

    #[test]
    fn an_unknown_complaint_stays_as_it_is() {
        assert_eq!(plain("unknown field `a`, expected `b`", Some("job")), "unknown field `a`, expected `b`");
        assert_eq!(plain("there is no role `x`", Some("roles")), "roles: there is no role `x`");
        assert_eq!(plain("invalid escape", None), "invalid escape");
    }

    #[test]
    fn the_key_stands_before_the_value() {
        for (before, key) in [
            ("priority: ", Some("priority")),
            ("  - priority: ", Some("priority")),
            ("{name: a, \"priority\": ", Some("priority")),
            ("command: [x, ", None),
            ("- ", None),
            ("", None),
        ] {
            assert_eq!(key_before(before), key, "{before}");
        }
    }
}
