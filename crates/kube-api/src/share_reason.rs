//! Why a pod has the share that it has, as a value.
//!
//! The node agent makes the value and reports it; the operator publishes it in the pod's note
//! ([`crate::pod_note`]). Its sentence is made in one place (`Display`). The sentence travels beside the value, for
//! people and for versions that know no values, and no program reads a sentence back.
//!
//! **Compatibility.** Older versions wrote the sentence alone, and newer ones may know other reasons. Both are read
//! as no value ([`known`]).

use crate::deadline::DeadlineResult;
use crate::names::TARGET_ANNOTATION;
use gainshare_core::plan::Reason;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;

/// Why a pod has the share that it has. The names of reasons (`why`) are part of the annotation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "why")]
pub enum ShareReason {
    /// The pod cannot be resized, or is not to be: the word for the obstacle, and sentences about it.
    Blocked { obstacle: String, message: String },
    /// What the pod reports cannot be read.
    Unreadable { error: String },
    /// The pod's container does not run.
    NotRunning,
    /// Nothing was decided about it yet.
    NotDecided,
    /// The pod had a deadline and has ended.
    Ended(DeadlineResult),
    /// The reason of the decision about its node.
    #[serde(untagged)]
    Decided(Reason),
}

impl ShareReason {
    /// The name of the reason, which is the same whatever its numbers are.
    pub fn name(&self) -> &'static str {
        match self {
            ShareReason::Blocked { .. } => "blocked",
            ShareReason::Unreadable { .. } => "unreadable",
            ShareReason::NotRunning => "not-running",
            ShareReason::NotDecided => "not-decided",
            ShareReason::Ended(_) => "ended",
            ShareReason::Decided(reason) => reason.name(),
        }
    }

    /// The reason with each of its texts cut to this many characters.
    pub fn cut(&self, longest: usize) -> ShareReason {
        let short = |text: &str| text.chars().take(longest).collect::<String>();
        match self {
            ShareReason::Blocked { obstacle, message } => {
                ShareReason::Blocked { obstacle: short(obstacle), message: short(message) }
            }
            ShareReason::Unreadable { error } => ShareReason::Unreadable { error: short(error) },
            other => other.clone(),
        }
    }
}

/// For people who use a cluster: a remedy is one that they have there.
impl fmt::Display for ShareReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShareReason::Blocked { message, .. } => write!(f, "{message}"),
            ShareReason::Unreadable { error } => write!(f, "its reports cannot be read: {error}"),
            ShareReason::NotRunning => write!(f, "its container does not run"),
            ShareReason::NotDecided => write!(f, "not decided yet"),
            ShareReason::Ended(result) => write!(f, "{result}"),
            ShareReason::Decided(Reason::UnknownEnd) => write!(
                f,
                "it has a deadline, but nothing says when it will end: let it print `step N/TOTAL`, write the number of \
                 steps into its command (--max-steps 1000), or name the value at which it stops in the annotation \
                 {TARGET_ANNOTATION} (in objective.goal of a TrainingJob)"
            ),
            ShareReason::Decided(reason) => write!(f, "{reason}"),
        }
    }
}

/// Reads a field whose value another version may write otherwise: a value that this one does not know is none.
pub(crate) fn known<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<Option<T>, D::Error> {
    Ok(serde_json::from_value(serde_json::Value::deserialize(deserializer)?).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline::Deadline;
    use gainshare_core::model::Share;
    use gainshare_core::tasks::TaskReason;
    use serde_json::{Value, json};

    fn written(reason: &ShareReason) -> Value {
        serde_json::to_value(reason).unwrap()
    }

    #[test]
    fn a_reason_is_written_as_its_name_and_its_numbers_and_read_again() {
        let result = DeadlineResult::new(Deadline { at_ms: 5000, tolerance_ms: 0 }, 4000, true);
        for reason in [
            ShareReason::Blocked { obstacle: "BestEffort".into(), message: "it requests nothing".into() },
            ShareReason::Unreadable { error: "no such file".into() },
            ShareReason::NotRunning,
            ShareReason::NotDecided,
            ShareReason::Ended(result),
            ShareReason::Decided(Reason::Growing { growth: 0.1, total: 0.3 }),
            ShareReason::Decided(Reason::NotYetMeasured),
            ShareReason::Decided(Reason::MeetsDeadline { least: Share::clamped(0.4), spare_s: 1.5, late_s: 0.0 }),
            ShareReason::Decided(Reason::Probes { needs: Share::clamped(0.4), seen: Share::clamped(0.05) }),
            ShareReason::Decided(Reason::CannotMeet { earliest_s: None }),
            ShareReason::Decided(Reason::Tasks { because: TaskReason::Settled }),
        ] {
            let value = written(&reason);
            let read: ShareReason = serde_json::from_str(&value.to_string()).unwrap();
            assert_eq!(read, reason, "{value}");
        }
        let ranked = ShareReason::Decided(Reason::Ranked { ahead: 2 });
        assert_eq!(written(&ranked), json!({"why": "ranked", "ahead": 2}));
        assert_eq!(ranked.name(), "ranked");
        assert_eq!(written(&ShareReason::NotRunning), json!({"why": "not-running"}));
        assert_eq!(written(&ShareReason::NotRunning)["why"], ShareReason::NotRunning.name());
    }

    #[test]
    fn people_read_the_sentence_of_the_decision() {
        let reason = Reason::Gaining { left_s: 12.0, ahead: 0 };
        assert_eq!(ShareReason::Decided(reason).to_string(), reason.to_string());
        let blocked = ShareReason::Blocked { obstacle: "StaticPod".into(), message: "run it as a Job".into() };
        assert_eq!(blocked.to_string(), "run it as a Job");
        assert_eq!(blocked.cut(3).to_string(), "run");
    }

    #[test]
    fn the_remedy_for_an_unknown_end_is_one_that_a_cluster_has() {
        let text = ShareReason::Decided(Reason::UnknownEnd).to_string();
        assert!(text.contains("gainshare.dev/target") && text.contains("objective.goal"), "{text}");
        assert!(!text.contains("--target"), "{text}");
    }
}
