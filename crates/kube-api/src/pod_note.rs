//! The annotation [`crate::names::STATUS_ANNOTATION`]: what the operator publishes on a pod about
//! its share.
//!
//! It is written when the category, the share, the policy, an obstacle or the kind of pacing changes, never for
//! progress alone. The reason and the growth are refreshed at those moments only.
//!
//! Sentences are for people. Programs compare the values beside them: `cause` for `reason`, `pendingReason` for
//! `pending`. Notes of older versions have the sentences alone.

use crate::aim::AimKind;
use crate::deadline::{DeadlineResult, DeadlineState, Forecast, moment_text};
use crate::facts::PodFacts;
use crate::gpu_pacing::GpuPacing;
use crate::names;
use crate::share_reason::{ShareReason, known};
use crate::wire::{JobReport, PodOnNode, ReportedCategory, ResizeObstacle, ResizeState};
use serde::{Deserialize, Serialize};

/// Why a share that was decided is not in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PendingReason {
    /// The node has no room now; the kubelet tries again by itself.
    Deferred,
    /// The node can never grant it.
    Infeasible,
    /// Another program changes the pod, too.
    Contested,
}

impl PendingReason {
    /// The sentence for people. `message` is the kubelet's.
    fn sentence(self, message: &str) -> String {
        match self {
            PendingReason::Deferred => format!("Deferred: {message}"),
            PendingReason::Infeasible => format!("Infeasible: {message}"),
            PendingReason::Contested => "Contested: something else changes this pod's CPU (another autoscaler?); keep \
                                         one of the two away from it"
                .to_owned(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodNote {
    /// The SharePolicy; empty: the namespace's label.
    #[serde(default)]
    pub policy: String,
    /// What the policy makes as early as possible, where its author chose that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aim: Option<AimKind>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub category: Option<ReportedCategory>,
    /// As last measured when one of the others changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth: Option<f64>,
    /// In hundredths of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_percent: Option<u32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The reason as a value. An obstacle is in `blocked` instead.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known")]
    pub cause: Option<ShareReason>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked: Option<ResizeObstacle>,
    /// Why the share is not in force, in a sentence with the kubelet's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known")]
    pub pending_reason: Option<PendingReason>,
    /// When the pod must be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<String>,
    /// What is wrong with the deadline that its author wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_error: Option<String>,
    /// How the deadline stands.
    #[serde(rename = "standing", default, skip_serializing_if = "Option::is_none")]
    pub deadline_state: Option<DeadlineState>,
    /// When the pod ended, if it had a deadline. `deadline_state` is then the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// When the pod will be done, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<String>,
    /// The same with its interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// Whether its GPU work is paced, if it asks for that.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known")]
    pub gpu: Option<GpuPacing>,
}

impl PodNote {
    /// The note that the pod should carry now.
    pub fn of(pod: &PodOnNode, job: Option<&JobReport>, contested: bool) -> PodNote {
        let pending = match &pod.resize {
            _ if contested => Some((PendingReason::Contested, "")),
            ResizeState::Deferred { message } => Some((PendingReason::Deferred, message.as_str())),
            ResizeState::Infeasible { message } => Some((PendingReason::Infeasible, message.as_str())),
            ResizeState::Settled | ResizeState::InProgress => None,
        };
        PodNote {
            policy: pod.policy.clone(),
            aim: pod.settings.aim,
            category: job.map(|job| job.category),
            growth: job.and_then(|job| job.growth).map(|growth| (growth * 1e4).round() / 1e4),
            share_percent: job.and_then(|job| job.share).map(|share| (share.clamp(0.0, 1.0) * 100.0).round() as u32),
            reason: job.map(|job| job.reason.clone()).unwrap_or_default(),
            cause: job.and_then(|job| job.cause.clone()).filter(|_| pod.blocked.is_none()),
            blocked: pod.blocked.clone(),
            pending: pending.map(|(reason, message)| reason.sentence(message)),
            pending_reason: pending.map(|(reason, _)| reason),
            deadline: pod.deadline.map(|deadline| moment_text(deadline.at_ms)),
            deadline_error: pod.deadline_error.clone(),
            deadline_state: job.and_then(|job| job.deadline_state),
            ended: None,
            done: job.and_then(|job| job.forecast).map(|forecast| moment_text(forecast.done_ms)),
            forecast: job.and_then(|job| job.forecast),
            gpu: job.and_then(|job| job.gpu),
        }
    }

    /// The note of a pod that had a deadline and has ended. `carried` is the one that it has.
    pub fn of_ended(carried: PodNote, policy: &str, result: &DeadlineResult) -> PodNote {
        let state = if result.is_met { DeadlineState::Met } else { DeadlineState::Missed };
        PodNote {
            policy: policy.to_owned(),
            deadline: Some(moment_text(result.deadline.at_ms)),
            deadline_state: Some(state),
            ended: Some(moment_text(result.ended_ms)),
            done: None,
            forecast: None,
            gpu: None,
            reason: result.to_string(),
            cause: Some(ShareReason::Ended(*result)),
            ..carried
        }
    }

    /// The note that the pod carries, if it can be read.
    pub fn carried(pod: &PodFacts) -> Option<PodNote> {
        pod.notes.get(names::STATUS_ANNOTATION).and_then(|text| serde_json::from_str(text).ok())
    }

    /// Whether the two differ in nothing that is worth a write.
    pub fn means_the_same(&self, other: &PodNote) -> bool {
        let gist = |note: &PodNote| PodNote {
            reason: String::new(),
            cause: None,
            growth: None,
            done: None,
            forecast: None,
            gpu: note.gpu.map(GpuPacing::kind),
            ..note.clone()
        };
        // Only pods with a deadline have their prediction written: each write is work for the kubelet.
        let outdated = match (self.forecast, other.forecast) {
            (Some(old), Some(new)) => old.is_outdated_by(&new),
            (old, new) => old.is_some() != new.is_some(),
        };
        gist(self) == gist(other) && !(outdated && other.deadline.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline::Deadline;
    use serde_json::json;

    fn read(note: serde_json::Value) -> PodNote {
        serde_json::from_value(note).unwrap()
    }

    #[test]
    fn a_note_of_another_version_is_read_without_the_values_that_it_does_not_share() {
        let old = read(json!({"policy": "p", "reason": "makes room", "pending": "Contested: by another"}));
        assert_eq!((old.cause, old.pending_reason), (None, None), "no value is made of a sentence");
        assert_eq!((old.reason.as_str(), old.pending.as_deref()), ("makes room", Some("Contested: by another")));
        let newer = read(json!({"policy": "p", "pendingReason": "Paused", "cause": {"why": "of-the-future"}}));
        assert_eq!((newer.policy.as_str(), newer.cause, newer.pending_reason), ("p", None, None));
    }

    #[test]
    fn a_note_has_its_values_beside_the_sentences() {
        let cause = ShareReason::Decided(gainshare_core::plan::Reason::Ranked { ahead: 2 });
        let pending_reason = Some(PendingReason::Contested);
        let note = PodNote { cause: Some(cause), pending_reason, ..PodNote::default() };
        let written = serde_json::to_value(&note).unwrap();
        assert_eq!(written["cause"], json!({"why": "ranked", "ahead": 2}));
        assert_eq!(written["pendingReason"], "Contested");
        assert_eq!(read(written), note);
        // A reason whose numbers change is not worth a write, a new obstacle is.
        assert!(note.means_the_same(&PodNote { cause: None, ..note.clone() }));
        assert!(!note.means_the_same(&PodNote { pending_reason: None, ..note.clone() }));
        let paced = |percent| PodNote { gpu: Some(GpuPacing::Paced { percent }), ..note.clone() };
        assert!(paced(30).means_the_same(&paced(40)) && !paced(30).means_the_same(&note));
    }

    #[test]
    fn the_note_of_an_ended_pod_has_the_result_as_a_value() {
        let result = DeadlineResult::new(Deadline { at_ms: 5000, tolerance_ms: 0 }, 6000, true);
        let note = PodNote::of_ended(PodNote::default(), "p", &result);
        assert_eq!(note.cause, Some(ShareReason::Ended(result)));
        assert_eq!(note.reason, result.to_string());
    }
}
