//! Deadlines over the API: the predicted end, how the deadline stands, a miss that is predicted, and the result.
//!
//! A predicted miss and a result are values, in the journal and in the API. Their sentences for people are made in one
//! place each (`Display`), and no program reads a sentence back.

use super::JobState;
use crate::deadline::length;
use gainshare_core::forecast::{Certainty, Prospect};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// A predicted end. Four times in five the job ends between `earliest_s` and `latest_s`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Forecast {
    pub at: String,
    pub at_s: f64,
    pub earliest_s: f64,
    pub latest_s: f64,
    /// What the forecast rests on while the job itself was not measured, such as `3 earlier runs of this program`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub basis: Option<String>,
}

/// A job's deadline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeadlineInfo {
    pub at: String,
    pub at_s: f64,
    /// Seconds of lateness that are tolerated.
    pub tolerance_s: f64,
    /// Programs of earlier versions called this `standing`.
    #[serde(alias = "standing")]
    pub state: DeadlineState,
    /// The miss of which the job's owner was warned last, unless the job is in time again. The sentence is one of the
    /// job's notes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub miss: Option<PredictedMiss>,
    /// The result, once the job has ended. The sentence is one of the job's notes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<DeadlineOutcome>,
}

/// How a deadline stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeadlineState {
    /// Nothing can be predicted yet.
    Unknown,
    /// The deadline will be met, as far as can be predicted.
    OnTime,
    /// The deadline will be missed, as far as can be predicted. Programs of earlier versions wrote `late`.
    #[serde(alias = "late")]
    AtRisk,
    /// The job ended well in time.
    Met,
    /// The deadline passed, or the job ended otherwise.
    Missed,
}

impl DeadlineInfo {
    /// How it stands, and how surely, by the predicted end.
    pub fn prospect(&self, done: Option<&Forecast>) -> Prospect {
        let until_s = self.at_s + self.tolerance_s;
        match self.state {
            DeadlineState::Unknown => Prospect::Unknown,
            DeadlineState::OnTime => {
                Prospect::InTime(done.map_or(Certainty::Sure, |done| Certainty::of(done.at_s, done.latest_s, until_s)))
            }
            DeadlineState::AtRisk => Prospect::Late,
            DeadlineState::Met => Prospect::Met,
            DeadlineState::Missed => Prospect::Missed,
        }
    }
}

/// A miss of a deadline that was predicted. The job goes on as best effort.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PredictedMiss {
    /// The deadline, without the tolerated lateness.
    pub deadline_s: f64,
    pub cause: MissCause,
}

/// Why a miss is predicted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "why")]
pub enum MissCause {
    /// The policy cannot keep the deadline: at the earliest the job ends at this time.
    EarliestEnd {
        earliest_s: f64,
        /// As in a [`Forecast`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        basis: Option<String>,
    },
    /// The job will be done after the deadline.
    PredictedEnd { done: Forecast },
    /// The policy cannot keep the deadline, and the end is not predicted.
    NoTimeLeft,
    /// The deadline has passed.
    Passed,
}

impl fmt::Display for PredictedMiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let late = |end_s: f64| length(end_s - self.deadline_s);
        let by = |basis: &Option<String>| basis.as_ref().map_or_else(String::new, |basis| format!(", by {basis}"));
        match &self.cause {
            MissCause::EarliestEnd { earliest_s: end_s, basis } => {
                let (late, by) = (late(*end_s), by(basis));
                write!(f, "its deadline will be missed: the earliest end is {late} after it{by}")?;
            }
            MissCause::PredictedEnd { done } => {
                let (late, by) = (late(done.at_s), by(&done.basis));
                write!(f, "its deadline will be missed: the job will be {late} late{by}")?;
            }
            MissCause::NoTimeLeft => write!(f, "its deadline will be missed: there is not enough time left")?,
            MissCause::Passed => write!(f, "its deadline has passed")?,
        }
        write!(f, "; the job goes on as best effort")
    }
}

/// How the deadline of a job that has ended turned out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeadlineOutcome {
    /// The job ended with exit code 0 by the deadline, the tolerated lateness included.
    pub is_met: bool,
    /// Seconds from its end to the deadline, without the tolerated lateness; negative if it ended after it.
    pub early_s: f64,
    /// How it ended.
    pub state: JobState,
}

impl fmt::Display for DeadlineOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeadlineOutcome { is_met, early_s, state } = *self;
        match (is_met, early_s >= 0.0) {
            (true, true) => write!(f, "it met its deadline, {} early", length(early_s)),
            (true, false) => write!(f, "it met its deadline within the tolerance, {} late", length(-early_s)),
            (false, false) => write!(f, "it missed its deadline by {}", length(-early_s)),
            (false, true) => write!(f, "it missed its deadline: it ended as {}", state.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const DUE_S: f64 = 2e9;

    fn miss(cause: MissCause) -> PredictedMiss {
        PredictedMiss { deadline_s: DUE_S, cause }
    }

    fn done(at_s: f64, basis: Option<&str>) -> Forecast {
        let basis = basis.map(str::to_owned);
        Forecast { at: String::new(), at_s, earliest_s: at_s - 5.0, latest_s: at_s + 5.0, basis }
    }

    #[test]
    fn every_predicted_miss_has_its_sentence() {
        let runs = || Some("2 earlier runs of this program".to_owned());
        let earliest_s = DUE_S + 30.0;
        for (cause, why) in [
            (MissCause::EarliestEnd { earliest_s, basis: None }, "the earliest end is 30 s after it".to_owned()),
            (
                MissCause::EarliestEnd { earliest_s, basis: runs() },
                "the earliest end is 30 s after it, by 2 earlier runs of this program".to_owned(),
            ),
            (MissCause::PredictedEnd { done: done(DUE_S + 7.4, None) }, "the job will be 7 s late".to_owned()),
            (MissCause::PredictedEnd { done: done(DUE_S + 7200.0, None) }, "the job will be 2 h late".to_owned()),
            (
                MissCause::PredictedEnd { done: done(DUE_S - 1.0, Some("1 earlier run of this command")) },
                "the job will be 0 s late, by 1 earlier run of this command".to_owned(),
            ),
            (MissCause::NoTimeLeft, "there is not enough time left".to_owned()),
        ] {
            let sentence = format!("its deadline will be missed: {why}; the job goes on as best effort");
            assert_eq!(miss(cause).to_string(), sentence);
        }
        assert_eq!(miss(MissCause::Passed).to_string(), "its deadline has passed; the job goes on as best effort");
    }

    #[test]
    fn every_result_has_its_sentence() {
        let text = |is_met, early_s, state| DeadlineOutcome { is_met, early_s, state }.to_string();
        assert_eq!(text(true, 12.3, JobState::Done), "it met its deadline, 12 s early");
        assert_eq!(text(true, -4.0, JobState::Done), "it met its deadline within the tolerance, 4 s late");
        assert_eq!(text(false, -89.0, JobState::Done), "it missed its deadline by 89 s");
        assert_eq!(text(true, 5400.0, JobState::Done), "it met its deadline, 1 h 30 min early");
        assert_eq!(text(false, 5.0, JobState::Stopped), "it missed its deadline: it ended as stopped");
    }

    #[test]
    fn a_predicted_miss_is_the_same_after_it_was_written_and_read() {
        for cause in [
            MissCause::EarliestEnd { earliest_s: DUE_S + 0.1, basis: None },
            MissCause::PredictedEnd { done: done(DUE_S + 0.3, Some("1 earlier run of this command")) },
            MissCause::NoTimeLeft,
            MissCause::Passed,
        ] {
            let written = serde_json::to_string(&miss(cause.clone())).expect("it is written");
            assert_eq!(serde_json::from_str::<PredictedMiss>(&written).expect("it is read"), miss(cause));
        }
        let passed = serde_json::to_value(miss(MissCause::Passed)).expect("it is written");
        assert_eq!(passed, json!({"deadline_s": DUE_S, "cause": {"why": "passed"}}));
    }

    #[test]
    fn a_deadline_of_an_older_daemon_has_neither_a_miss_nor_a_result() {
        let old = json!({"at": "", "at_s": DUE_S, "tolerance_s": 0.0, "standing": "late"});
        let read: DeadlineInfo = serde_json::from_value(old).expect("it is read");
        assert_eq!((&read.miss, read.outcome), (&None, None));
        assert_eq!(read.state, DeadlineState::AtRisk);
        let new = json!({"at": "", "at_s": DUE_S, "tolerance_s": 0.0, "state": "at-risk"});
        assert_eq!(serde_json::to_value(&read).expect("it is written"), new, "what is not known is left out");
    }
}
