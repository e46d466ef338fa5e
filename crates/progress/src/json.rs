//! Metrics in JSON objects: a line of output, a record of a file, the body of a push.
//!
//! Numbers, and texts that are numbers, are metrics under their key. Nested objects give
//! `outer/inner`, except that wrappers such as `metrics` or `logs` are left out of the name.
//! `{"metric": "loss", "value": 0.3}` is one metric named by its own text. `step`, `epoch` and
//! `total` say where the job is.

use crate::facts::{Count, Facts};
use crate::number::{self, Number};
use crate::words::{TOTAL_KEYS, WRAPPER_KEYS};
use serde_json::{Map, Value};

/// Objects nested deeper than this are not reports.
const MAX_DEPTH: usize = 4;

/// Adds what `object` reports to `facts`.
pub(crate) fn read_object(object: &Map<String, Value>, facts: &mut Facts) {
    walk(object, "", 0, facts);
    let total = TOTAL_KEYS.iter().find_map(|key| object.get(*key)?.as_u64());
    if let (Some(Count { at, total: None, .. }), Some(total)) = (facts.step, total)
        && at <= total
    {
        facts.step = Some(Count { at, total: Some(total), bar: false });
        // Both count the whole run. Beside an epoch they would be taken for steps of that epoch, as
        // those of progress bars are.
        facts.epoch = None;
    }
}

fn walk(object: &Map<String, Value>, prefix: &str, depth: usize, facts: &mut Facts) {
    let named = object.get("metric").or(object.get("name")).and_then(Value::as_str);
    if let (Some(name), Some(value)) = (named, object.get("value").and_then(as_number)) {
        facts.add(name, value);
    }
    for (key, value) in object {
        if (key == "value" && named.is_some()) || TOTAL_KEYS.contains(&key.as_str()) {
            continue;
        }
        let wrapper = WRAPPER_KEYS.contains(&key.as_str());
        match value {
            Value::Object(inner) if depth < MAX_DEPTH => {
                let name = if wrapper { prefix.to_string() } else { format!("{prefix}{key}/") };
                walk(inner, &name, depth + 1, facts);
            }
            Value::Array(items) if depth < MAX_DEPTH && wrapper => {
                for item in items.iter().filter_map(Value::as_object) {
                    walk(item, prefix, depth + 1, facts);
                }
            }
            _ => {
                if let Some(number) = as_number(value) {
                    let integral = value.as_u64().is_some()
                        || value.as_str().is_some_and(|s| s.bytes().all(|b| b.is_ascii_digit()));
                    facts.add_named(&format!("{prefix}{key}"), number, integral);
                }
            }
        }
    }
}

/// A number, or a text that is nothing but a number.
pub(crate) fn as_number(value: &Value) -> Option<Number> {
    match value {
        Value::Number(n) => n.as_f64().map(number::vet),
        Value::String(s) => number::whole(s),
        _ => None,
    }
}
