//! Deadlines as users write them: the fields of a TrainingJob, and annotations of pods.
//!
//! **Problem.** A user writes when a job must be done: as a moment on a TrainingJob, or as an annotation on a
//! pod (or on the pod template of a Job). The text may be wrong, and the moment may be in the past. A job that
//! is suspended cannot work, so its deadline must wait for it.
//!
//! **How.** A TrainingJob's deadline becomes the annotation of each of its pods ([`of_training_job`]). The
//! operator reads the annotation of every shared pod ([`of_pod`]). A length of time in it counts from the creation of
//! the pod, or of the Job that owns the pod: restarts of containers and new pods of the Job have the same deadline.
//!
//! **Bad input.** A text that names no moment, and a moment that has passed when the pod starts, are errors with
//! the remedy. The pod then shares its node like a pod without a deadline.
//!
//! **Suspension.** The deadline of a TrainingJob moves by the time for which the job was suspended.

use crate::deadline::{Deadline, moment_text};
use crate::facts::PodFacts;
use crate::names::{DEADLINE_ANNOTATION, DEADLINE_TOLERANCE_ANNOTATION, TARGET_ANNOTATION};
use crate::share_policy::parse_interval_ms;
use crate::training_job::TrainingJobSpec;
use jiff::{SignedDuration, Timestamp};

/// Why a text is not a deadline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeadlineError {
    #[error(
        "the annotation {DEADLINE_ANNOTATION} is `{text}`, which is not a deadline: write a moment such as 2026-03-01T18:00:00+01:00, \
         or a length of time from the creation of the pod or of its Job such as 2h; the pod runs as best effort"
    )]
    Text { text: String },
    #[error(
        "the annotation {DEADLINE_TOLERANCE_ANNOTATION} is `{text}`, which is not a length of time: write 15m or 1h30m; the \
         deadline is strict"
    )]
    Tolerance { text: String },
    #[error(
        "the annotation {TARGET_ANNOTATION} is `{text}`, which is not a target: write loss=0.05, or 0.05 where the metric is \
         named elsewhere; the end of the pod is predicted without it"
    )]
    Target { text: String },
    #[error(
        "the deadline {moment} had passed when the pod started: create it again with a later deadline; the pod runs as best effort"
    )]
    Past { moment: String },
}

/// The deadline of a pod by its annotations, and what is wrong with them. A length of time counts from `since_ms`,
/// which no restart of a container changes. A moment must not have passed at `started_ms`, the start of the container.
pub fn of_pod(pod: &PodFacts, since_ms: u64, started_ms: u64) -> (Option<Deadline>, Option<DeadlineError>) {
    let target = pod.notes.get(TARGET_ANNOTATION).filter(|text| parse_target(text).is_none());
    let target = target.map(|text| DeadlineError::Target { text: shorten(text) });
    let Some(text) = pod.notes.get(DEADLINE_ANNOTATION).map(|text| text.trim()) else { return (None, target) };
    let moment = text.parse::<Timestamp>().ok().map(|moment| moment.as_millisecond().max(0) as u64);
    let at_ms = moment.or_else(|| since_ms.checked_add(parse_interval_ms(text).filter(|ms| *ms > 0)?));
    let Some(at_ms) = at_ms else { return (None, Some(DeadlineError::Text { text: shorten(text) })) };
    let (tolerance_ms, error) = match pod.notes.get(DEADLINE_TOLERANCE_ANNOTATION) {
        None => (0, None),
        Some(text) => match parse_interval_ms(text.trim()) {
            Some(ms) => (ms, None),
            None => (0, Some(DeadlineError::Tolerance { text: shorten(text) })),
        },
    };
    let deadline = Deadline { at_ms, tolerance_ms };
    if moment.is_some() && deadline.latest_ms() <= started_ms {
        return (None, Some(DeadlineError::Past { moment: moment_text(at_ms) }));
    }
    (Some(deadline), error.or(target))
}

/// The metric, if it is named, and the value of a target such as `loss=0.05` or `0.05`.
pub fn parse_target(text: &str) -> Option<(Option<String>, f64)> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (Some(name.trim().to_owned()), value),
        None => (None, text),
    };
    let value: f64 = value.trim().parse().ok()?;
    (value.is_finite() && name.as_deref() != Some("")).then_some((name, value))
}

/// A text of a tenant, cut to a length that fits into an event.
fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

/// When a TrainingJob must be done: `None` without a deadline, or if the text names no moment. `created` is
/// when the job was created, and `suspended_s` for how many seconds it has been suspended since.
pub fn of_training_job(spec: &TrainingJobSpec, created: Timestamp, suspended_s: i64) -> Option<Timestamp> {
    let moment = match (&spec.deadline, spec.deadline_seconds) {
        (Some(text), _) => text.trim().parse::<Timestamp>().ok()?,
        (None, Some(seconds)) => created.saturating_add(SignedDuration::from_secs(seconds.max(0))).ok()?,
        (None, None) => return None,
    };
    moment.saturating_add(SignedDuration::from_secs(suspended_s.max(0))).ok()
}

/// The lateness that a TrainingJob tolerates.
pub fn tolerance(spec: &TrainingJobSpec) -> SignedDuration {
    let ms = spec.deadline_tolerance.as_deref().and_then(parse_interval_ms).unwrap_or(0);
    SignedDuration::from_millis(i64::try_from(ms).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{facts, manifest};
    use serde_json::json;

    const START_MS: u64 = 1_000_000_000_000;

    fn pod(deadline: &str, tolerance: Option<&str>) -> PodFacts {
        let mut pod = manifest();
        pod["metadata"]["annotations"][DEADLINE_ANNOTATION] = json!(deadline);
        if let Some(tolerance) = tolerance {
            pod["metadata"]["annotations"][DEADLINE_TOLERANCE_ANNOTATION] = json!(tolerance);
        }
        facts(&pod)
    }

    #[test]
    fn a_moment_or_a_length_of_time_is_a_deadline() {
        let later = moment_text(START_MS + 5_000);
        assert_eq!(
            of_pod(&pod(&later, None), START_MS, START_MS).0,
            Some(Deadline { at_ms: START_MS + 5_000, tolerance_ms: 0 })
        );
        let (deadline, error) = of_pod(&pod("2h", Some("15m")), START_MS, START_MS);
        assert_eq!(deadline, Some(Deadline { at_ms: START_MS + 7_200_000, tolerance_ms: 900_000 }));
        assert_eq!(error, None);
        assert_eq!(of_pod(&facts(&manifest()), START_MS, START_MS), (None, None));
    }

    #[test]
    fn a_restart_of_the_container_does_not_move_a_length_of_time() {
        let at = |started_ms| of_pod(&pod("2h", None), START_MS, started_ms);
        let deadline = Deadline { at_ms: START_MS + 7_200_000, tolerance_ms: 0 };
        assert_eq!(at(START_MS + 3_600_000), (Some(deadline), None));
        assert_eq!(at(START_MS + 9_000_000), (Some(deadline), None), "the job is late, and no error of its author");
    }

    #[test]
    fn a_target_names_the_value_at_which_a_job_stops() {
        assert_eq!(parse_target("loss=0.05"), Some((Some("loss".to_owned()), 0.05)));
        assert_eq!(parse_target(" 0.97 "), Some((None, 0.97)));
        for bad in ["", "loss", "=0.05", "loss=", "loss=low", "loss=NaN", "inf"] {
            assert_eq!(parse_target(bad), None, "{bad}");
            let mut with = manifest();
            with["metadata"]["annotations"][TARGET_ANNOTATION] = json!(bad);
            let (deadline, error) = of_pod(&facts(&with), START_MS, START_MS);
            let words = error.unwrap().to_string();
            assert!(deadline.is_none() && words.contains("write loss=0.05"), "{bad}: {words}");
        }
    }

    #[test]
    fn bad_texts_are_answered_with_the_remedy_and_leave_best_effort() {
        for (text, helps) in [("soon", "such as 2h"), ("", "such as 2h"), ("0s", "such as 2h"), ("18:00", "such as 2h")]
        {
            let (deadline, error) = of_pod(&pod(text, None), START_MS, START_MS);
            let words = error.unwrap().to_string();
            assert!(deadline.is_none() && words.contains(helps) && words.contains("best effort"), "{text}: {words}");
        }
        let (deadline, error) = of_pod(&pod("2001-01-01T00:00:00Z", None), START_MS, START_MS);
        assert!(deadline.is_none() && error.unwrap().to_string().contains("later deadline"));
        let (deadline, error) = of_pod(&pod("2h", Some("much")), START_MS, START_MS);
        assert_eq!(deadline.unwrap().tolerance_ms, 0);
        assert!(error.unwrap().to_string().contains("strict"));
    }

    #[test]
    fn the_deadline_of_a_job_moves_by_its_suspension() {
        let created: Timestamp = "2026-03-01T10:00:00Z".parse().unwrap();
        let at = |spec: &TrainingJobSpec, s| of_training_job(spec, created, s).map(|moment| moment.to_string());
        let moment =
            TrainingJobSpec { deadline: Some("2026-03-01T18:00:00+01:00".into()), ..TrainingJobSpec::default() };
        assert_eq!(at(&moment, 0).unwrap(), "2026-03-01T17:00:00Z");
        assert_eq!(at(&moment, 600).unwrap(), "2026-03-01T17:10:00Z");
        let length = TrainingJobSpec { deadline_seconds: Some(3600), ..TrainingJobSpec::default() };
        assert_eq!(at(&length, 60).unwrap(), "2026-03-01T11:01:00Z");
        assert_eq!(at(&TrainingJobSpec::default(), 60), None);
        let huge = TrainingJobSpec { deadline_seconds: Some(i64::MAX), ..TrainingJobSpec::default() };
        assert!(of_training_job(&huge, created, i64::MAX).is_some_and(|moment| moment > created));
    }
}
