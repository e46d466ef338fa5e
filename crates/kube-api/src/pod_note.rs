//! The annotation [`crate::names::STATUS_ANNOTATION`]: what the operator publishes on a pod about
//! its share.
//!
//! It is written when the category, the share, the policy or an obstacle changes, never for
//! progress alone. The sentence of the reason and the growth are refreshed at those moments only.

use crate::aim::AimKind;
use crate::deadline::{DeadlineResult, DeadlineState, Forecast, moment_text};
use crate::facts::PodFacts;
use crate::names;
use crate::wire::{JobReport, PodOnNode, ReportedCategory, ResizeObstacle, ResizeState};
use serde::{Deserialize, Serialize};

/// The text of [`PodNote::pending`] while another program changes the pod, too.
pub const CONTESTED: &str =
    "Contested: something else changes this pod's CPU (another autoscaler?); keep one of the two away from it";

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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked: Option<ResizeObstacle>,
    /// Why the share is not in force: `Deferred` or `Infeasible`, in the kubelet's words, or
    /// `Contested`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
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
}

impl PodNote {
    /// The note that the pod should carry now.
    pub fn of(pod: &PodOnNode, job: Option<&JobReport>, contested: bool) -> PodNote {
        let pending = match &pod.resize {
            _ if contested => Some(CONTESTED.to_owned()),
            ResizeState::Deferred { message } => Some(format!("Deferred: {message}")),
            ResizeState::Infeasible { message } => Some(format!("Infeasible: {message}")),
            ResizeState::Settled | ResizeState::InProgress => None,
        };
        PodNote {
            policy: pod.policy.clone(),
            aim: pod.settings.aim,
            category: job.map(|job| job.category),
            growth: job.and_then(|job| job.growth).map(|growth| (growth * 1e4).round() / 1e4),
            share_percent: job.and_then(|job| job.share).map(|share| (share.clamp(0.0, 1.0) * 100.0).round() as u32),
            reason: job.map(|job| job.reason.clone()).unwrap_or_default(),
            blocked: pod.blocked.clone(),
            pending,
            deadline: pod.deadline.map(|deadline| moment_text(deadline.at_ms)),
            deadline_error: pod.deadline_error.clone(),
            deadline_state: job.and_then(|job| job.deadline_state),
            ended: None,
            done: job.and_then(|job| job.forecast).map(|forecast| moment_text(forecast.done_ms)),
            forecast: job.and_then(|job| job.forecast),
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
            reason: result.to_string(),
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
            growth: None,
            done: None,
            forecast: None,
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
