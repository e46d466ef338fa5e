//! Progress that a job pushes.
//!
//! Two bodies are understood, whichever route they come by. Our own is
//! `{"metric": "loss", "value": 0.3, "step": 12, "total": 100}`: one object or a list of them, and
//! several metrics may stand in one object as `{"loss": 0.3, "step": 12}`. The other is the status of
//! Kubeflow Trainer's protocol:
//! `{"trainerStatus": {"progressPercentage": 40, "metrics": [{"name": "loss", "value": "0.3"}], …}}`.
//! Values may be numbers or texts.

use crate::facts::Facts;
use crate::json;
use crate::number::Number;
use crate::reading::{Batch, Counters, Progress, Unit};
use serde_json::Value;

/// Reports in one body. A body with more is a flood.
const MAX_REPORTS: usize = 1000;

/// Why a body was refused; the sender gets the message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    #[error(
        "the body is not JSON ({0}); send an object such as {{\"metric\": \"loss\", \"value\": 0.3, \"step\": 12}}"
    )]
    NotJson(String),
    #[error(
        "the body holds no metric and no progress; send an object such as {{\"metric\": \"loss\", \"value\": 0.3, \"step\": 12}}"
    )]
    Nothing,
    #[error("the body holds {0} reports, and at most {MAX_REPORTS} are allowed; send fewer at a time")]
    TooMany(usize),
}

/// Reads one body. Values that are not finite are counted and are no error: the job did report.
pub fn parse(body: &[u8], counters: &mut Counters) -> Result<Batch, PushError> {
    let value: Value = serde_json::from_slice(body).map_err(|e| PushError::NotJson(e.to_string()))?;
    let reports = match value {
        Value::Array(items) => items,
        one => vec![one],
    };
    if reports.len() > MAX_REPORTS {
        return Err(PushError::TooMany(reports.len()));
    }
    let mut batch = Batch::default();
    let mut found = Counters::default();
    for report in &reports {
        let Some(object) = report.as_object() else { continue };
        let mut facts = Facts::default();
        match object.get("trainerStatus").and_then(Value::as_object) {
            Some(status) => {
                if let Some(metrics) = status.get("metrics").and_then(Value::as_array) {
                    for metric in metrics.iter().filter_map(Value::as_object) {
                        json::read_object(metric, &mut facts);
                    }
                }
                if let Some(Number::Good(percent)) = status.get("progressPercentage").and_then(json::as_number)
                    && (0.0..=100.0).contains(&percent)
                {
                    batch.progress = Some(Progress { step: percent as u64, total: Some(100), unit: Unit::Percent });
                }
            }
            None => json::read_object(object, &mut facts),
        }
        batch.progress = facts.own_progress().or(batch.progress);
        let step = facts.own_progress().map(|p| p.step);
        // The total of epochs is no total of steps.
        let total = facts.step.and_then(|s| s.total);
        facts.into_readings(step, total, &mut found, &mut batch);
    }
    let nothing = batch == Batch::default() && found.bad_values == 0;
    *counters += found;
    if nothing { Err(PushError::Nothing) } else { Ok(batch) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(body: &str) -> Vec<(String, f64, Option<u64>, Option<u64>)> {
        let batch = parse(body.as_bytes(), &mut Counters::default()).unwrap();
        batch.readings.into_iter().map(|r| (r.metric, r.value, r.step, r.total)).collect()
    }

    #[test]
    fn our_own_form() {
        let one = ("loss".to_string(), 0.3, Some(12), Some(100));
        assert_eq!(shown(r#"{"metric":"loss","value":0.3,"step":12,"total":100}"#), vec![one.clone()]);
        assert_eq!(shown(r#"[{"metric":"loss","value":"0.3","step":12,"total":100}, 7]"#), vec![one.clone()]);
        assert_eq!(shown(r#"{"loss":0.3,"step":12,"total":100}"#), [one]);
        assert_eq!(shown(r#"{"metric":"loss","value":0.3,"epoch":4}"#), [("loss".to_string(), 0.3, Some(4), None)]);
    }

    #[test]
    fn the_status_of_kubeflow_trainer() {
        let body = r#"{"trainerStatus": {"progressPercentage": 45, "estimatedRemainingSeconds": 795649,
            "metrics": [{"name": "loss", "value": "0.2347"}, {"name": "eval_accuracy", "value": 0.9}, {"name": "lr", "value": "nan"}],
            "lastUpdatedTime": "2026-01-23T13:00:00Z"}}"#;
        let mut counters = Counters::default();
        let batch = parse(body.as_bytes(), &mut counters).unwrap();
        assert_eq!(batch.progress, Some(Progress { step: 45, total: Some(100), unit: Unit::Percent }));
        let readings: Vec<_> = batch.readings.iter().map(|r| (r.metric.as_str(), r.value)).collect();
        assert_eq!(readings, [("loss", 0.2347), ("eval_accuracy", 0.9)]);
        assert_eq!(counters.bad_values, 1);
        let only_progress = r#"{"trainerStatus": {"progressPercentage": 7}}"#;
        assert!(parse(only_progress.as_bytes(), &mut counters).unwrap().readings.is_empty());
    }

    #[test]
    fn nonsense_is_refused_with_a_remedy() {
        let refuse = |body: &[u8]| parse(body, &mut Counters::default()).unwrap_err();
        assert!(matches!(refuse(b"loss=1"), PushError::NotJson(_)));
        assert!(matches!(refuse(b"{\"loss\": NaN}"), PushError::NotJson(_)));
        assert_eq!(refuse(b"{}"), PushError::Nothing);
        assert_eq!(refuse(b"[[1]]"), PushError::Nothing);
        assert_eq!(refuse(format!("[{}1]", "1,".repeat(1000)).as_bytes()), PushError::TooMany(1001));
        assert!(matches!(refuse("[".repeat(100_000).as_bytes()), PushError::NotJson(_)));
    }
}
