//! What is published about deadlines: the deadline itself, the predicted end, and how the deadline stands.
//!
//! **How.** The operator reads deadlines ([`crate::deadline_input`]) and hands them to the node agent. The node
//! agent predicts the end ([`Forecast`]) and how the deadline stands ([`DeadlineState`]). The operator publishes both
//! ([`FinishStatus`] on a TrainingJob, the pod's note on a pod). Where new nodes would keep the deadline, the status
//! names them, too ([`NodesNeeded`]).
//!
//! **Units.** Milliseconds since 1970 (`at_ms`), milliseconds (`tolerance_ms`).

use crate::quantity;
use gainshare_core::forecast::{Certainty, Prospect};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// When a pod must be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// The lateness that is tolerated.
    #[serde(default)]
    pub tolerance_ms: u64,
}

impl Deadline {
    /// The last moment that still counts as in time.
    pub fn latest_ms(&self) -> u64 {
        self.at_ms.saturating_add(self.tolerance_ms)
    }
}

/// How a pod with a deadline ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadlineResult {
    pub deadline: Deadline,
    /// Milliseconds since 1970.
    pub ended_ms: u64,
    pub succeeded: bool,
    /// The job succeeded by the deadline, the tolerated lateness included.
    pub is_met: bool,
}

impl DeadlineResult {
    pub fn new(deadline: Deadline, ended_ms: u64, succeeded: bool) -> DeadlineResult {
        DeadlineResult { deadline, ended_ms, succeeded, is_met: succeeded && ended_ms <= deadline.latest_ms() }
    }
}

/// For people: `it met its deadline 2026-03-01T17:00:00Z: it ended at 2026-03-01T16:50:00Z`.
impl fmt::Display for DeadlineResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (met, ended) =
            (if self.is_met { "met" } else { "missed" }, if self.succeeded { "ended" } else { "failed" });
        let (due, at) = (moment_text(self.deadline.at_ms), moment_text(self.ended_ms));
        write!(f, "it {met} its deadline {due}: it {ended} at {at}")
    }
}

/// A moment for people and programs: RFC 3339, in whole seconds.
pub fn moment_text(at_ms: u64) -> String {
    let seconds = i64::try_from(at_ms / 1000).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX).to_string()
}

/// A predicted end, with the middle 80 % of the prediction. Milliseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forecast {
    pub done_ms: u64,
    pub earliest_ms: u64,
    pub latest_ms: u64,
}

impl Forecast {
    /// Whether `newer` is news for people: the end moved out of the interval that was published.
    pub fn is_outdated_by(&self, newer: &Forecast) -> bool {
        !(self.earliest_ms..=self.latest_ms).contains(&newer.done_ms)
    }
}

/// How a deadline stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, JsonSchema)]
pub enum DeadlineState {
    /// Nothing can be predicted yet.
    #[default]
    Unknown,
    /// The deadline will be met, as far as can be predicted.
    OnTime,
    /// The deadline will be missed, as far as can be predicted.
    AtRisk,
    /// The job succeeded in time.
    Met,
    /// The deadline passed, or the job failed.
    Missed,
}

impl DeadlineState {
    pub fn name(self) -> &'static str {
        match self {
            DeadlineState::Unknown => "Unknown",
            DeadlineState::OnTime => "OnTime",
            DeadlineState::AtRisk => "AtRisk",
            DeadlineState::Met => "Met",
            DeadlineState::Missed => "Missed",
        }
    }

    /// Whether a user should be warned.
    pub fn warns(self) -> bool {
        matches!(self, DeadlineState::AtRisk | DeadlineState::Missed)
    }
}

/// When a TrainingJob will be done, and how its deadline stands.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FinishStatus {
    /// The deadline, moved by the time for which the job was suspended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<String>,
    /// Whether the deadline will be met, or was.
    #[serde(rename = "standing", default)]
    pub state: DeadlineState,
    /// When the job will be done, as predicted from its own reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<String>,
    /// Four times in five the job ends between `earliest` and `latest`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earliest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latest: Option<String>,
    /// For how long the job was suspended, in seconds; the suspension of now is not counted yet.
    #[serde(default)]
    pub suspended_seconds: i64,
    /// When the suspension of now began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended_since: Option<MicroTime>,
    /// New nodes with which the deadline could be kept; absent if it can be kept without them, or if no node that
    /// is known would help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes_needed: Option<NodesNeeded>,
}

impl FinishStatus {
    /// How the deadline stands, and how surely, for people. `tolerance` is the lateness that the job tolerates.
    pub fn prospect(&self, tolerance: SignedDuration) -> Prospect {
        let second =
            |text: &Option<String>| Some(text.as_ref()?.parse::<Timestamp>().ok()?.as_millisecond() as f64 / 1e3);
        let certainty = match (second(&self.predicted), second(&self.latest), second(&self.deadline)) {
            (Some(done), Some(latest), Some(due)) => Certainty::of(done, latest, due + tolerance.as_secs_f64()),
            _ => Certainty::Sure,
        };
        match self.state {
            DeadlineState::Unknown => Prospect::Unknown,
            DeadlineState::OnTime => Prospect::InTime(certainty),
            DeadlineState::AtRisk => Prospect::Late,
            DeadlineState::Met => Prospect::Met,
            DeadlineState::Missed => Prospect::Missed,
        }
    }

    /// Takes in a prediction. Small changes are not worth a write.
    pub fn predict(&mut self, forecast: Forecast, state: DeadlineState) {
        let parse =
            |text: &Option<String>| text.as_ref()?.parse::<Timestamp>().ok().map(|at| at.as_millisecond().max(0));
        let is_news = match (parse(&self.earliest), parse(&self.latest)) {
            (Some(earliest), Some(latest)) => {
                let published =
                    Forecast { done_ms: 0, earliest_ms: earliest.unsigned_abs(), latest_ms: latest.unsigned_abs() };
                published.is_outdated_by(&forecast)
            }
            _ => true,
        };
        if is_news || state != self.state {
            self.state = state;
            self.predicted = Some(moment_text(forecast.done_ms));
            self.earliest = Some(moment_text(forecast.earliest_ms));
            self.latest = Some(moment_text(forecast.latest_ms));
        }
    }
}

/// New nodes with which a deadline could be kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodesNeeded {
    /// How many nodes the job needs. Other jobs may need the same nodes.
    pub count: u32,
    /// What such a node can give to pods, such as 3920m.
    pub cpu: String,
    /// The same for memory, such as 15360Mi.
    pub memory: String,
    /// The label node.kubernetes.io/instance-type of the nodes that were seen of this kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
}

/// For people: `2 more nodes of 4 cores / 16 GiB (m5.xlarge)`.
impl fmt::Display for NodesNeeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = |number: f64| {
            let text = format!("{number:.1}");
            text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
        };
        let milli = quantity::cpu_milli(&Quantity(self.cpu.clone())).unwrap_or(0);
        let bytes = quantity::whole(&Quantity(self.memory.clone())).unwrap_or(0);
        let nodes = if self.count == 1 { "node" } else { "nodes" };
        let (cores, gib) = (tenths(milli as f64 / 1e3), tenths(bytes as f64 / f64::from(1 << 30)));
        write!(f, "{} more {nodes} of {cores} cores / {gib} GiB", self.count)?;
        self.instance_type.as_ref().map_or(Ok(()), |name| write!(f, " ({name})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod_note::PodNote;

    #[test]
    fn a_deadline_is_met_by_a_success_within_the_tolerance() {
        let deadline = Deadline { at_ms: 100_000, tolerance_ms: 10_000 };
        let is_met = |ended_ms, succeeded| DeadlineResult::new(deadline, ended_ms, succeeded).is_met;
        assert!(is_met(100_000, true) && is_met(110_000, true));
        assert!(!is_met(110_001, true) && !is_met(50_000, false));
        let text = DeadlineResult::new(deadline, 50_000, false).to_string();
        assert_eq!(text, "it missed its deadline 1970-01-01T00:01:40Z: it failed at 1970-01-01T00:00:50Z");
    }

    #[test]
    fn the_prospect_of_a_job_says_how_much_of_its_interval_is_in_time() {
        let at = |seconds: u64| Some(moment_text(seconds * 1000));
        let finish = FinishStatus {
            deadline: at(1000),
            state: DeadlineState::OnTime,
            predicted: at(990),
            latest: at(1010),
            ..FinishStatus::default()
        };
        assert_eq!(finish.prospect(SignedDuration::ZERO).to_string(), "probably on time");
        assert_eq!(finish.prospect(SignedDuration::from_secs(10)).to_string(), "on time");
        let doubtful = FinishStatus { predicted: at(1001), ..finish.clone() };
        assert_eq!(doubtful.prospect(SignedDuration::ZERO).to_string(), "may be missed");
        let late = FinishStatus { state: DeadlineState::AtRisk, ..finish };
        assert_eq!(late.prospect(SignedDuration::ZERO), Prospect::Late);
    }

    #[test]
    fn a_forecast_is_news_when_the_end_leaves_the_published_interval() {
        let old = Forecast { done_ms: 100, earliest_ms: 80, latest_ms: 130 };
        let new = |done_ms| Forecast { done_ms, earliest_ms: 0, latest_ms: 1000 };
        assert!(!old.is_outdated_by(&new(130)) && old.is_outdated_by(&new(131)) && old.is_outdated_by(&new(79)));
    }

    /// Older operators, node agents and programs of users know it by this name.
    #[test]
    fn the_state_of_a_deadline_is_published_as_standing() {
        let state = DeadlineState::AtRisk;
        let finish = FinishStatus { state, ..FinishStatus::default() };
        let note = PodNote { deadline_state: Some(state), ..PodNote::default() };
        for published in [serde_json::to_value(&finish), serde_json::to_value(&note)] {
            assert_eq!(published.expect("JSON")["standing"], "AtRisk");
        }
    }
}
