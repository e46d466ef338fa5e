//! What is published about the deadline of a job whose pods the operator makes: the condition `DeadlineAtRisk`, and
//! the warning that is an event. It is the same for TrainingJobs of one pod and of several tasks.
//!
//! **Judgement.** A job that succeeded by its deadline, its tolerance included, has met it, whatever happens
//! afterwards, and whenever the operator learns it ([`end_of`]). A job that failed, or is late, has missed it.

use crate::state::metrics::Metrics;
use gainshare_kube_api::deadline::{DeadlineState, FinishStatus};
use gainshare_kube_api::training_job::State;
use jiff::{SignedDuration, Timestamp};

/// The condition of a job whose deadline will be missed, or was.
pub(super) const AT_RISK: &str = "DeadlineAtRisk";

/// The condition [`AT_RISK`] as the deadline stands.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RiskText {
    /// A user should be warned: the condition is `True`.
    pub(super) warns: bool,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl RiskText {
    /// `tolerance`: the lateness that the job tolerates. `is_past`: the deadline is not after the creation of the job.
    pub(super) fn of(finish: &FinishStatus, tolerance: SignedDuration, is_past: bool) -> RiskText {
        let deadline = finish.deadline.as_deref().unwrap_or_default();
        let prospect = finish.prospect(tolerance);
        let (reason, message) = match finish.state {
            _ if is_past => (
                "DeadlineInPast",
                "the deadline is not a moment after the creation of the job: create the job again with a later \
                 deadline; it runs as best effort"
                    .to_owned(),
            ),
            DeadlineState::AtRisk => (
                "MissPredicted",
                format!(
                    "the deadline {deadline} {prospect}: the job will be done at {}, and goes on as best effort",
                    finish.predicted.as_deref().unwrap_or("an unknown time"),
                ),
            ),
            DeadlineState::Missed => ("Missed", format!("the deadline {deadline} was missed")),
            DeadlineState::Met => ("Met", "the job succeeded in time".to_owned()),
            DeadlineState::OnTime => {
                ("OnTime", format!("{prospect} for the deadline {deadline}, as far as can be predicted"))
            }
            DeadlineState::Unknown => (
                "NotPredicted",
                "the end of the job cannot be predicted yet: it must have printed some steps and how many there will be \
                 (`step N/TOTAL`), or objective.goal must name the value at which it stops"
                    .to_owned(),
            ),
        };
        RiskText { warns: is_past || finish.state.warns(), reason, message }
    }
}

/// What a status has of the condition [`AT_RISK`]: whether a user is warned, and the sentence.
pub(super) struct Risk<'a> {
    pub(super) warns: bool,
    pub(super) message: &'a str,
}

/// The warning that a new status brings, if the old one did not have it.
pub(super) fn new_warning(old: Option<Risk<'_>>, new: Option<Risk<'_>>) -> Option<String> {
    let warning = new.filter(|risk| risk.warns)?;
    old.is_none_or(|risk| !risk.warns).then(|| warning.message.to_owned())
}

/// The sentence of an event about a job's end, with the warning that the end brings.
pub(super) fn with_warning(message: &str, warning: Option<String>) -> String {
    warning.map_or_else(|| message.to_owned(), |warning| format!("{message}; {warning}"))
}

/// Counts the deadline of a job that goes from one state into another, if it has ended.
pub(super) fn count_end(metrics: &Metrics, from: State, to: State, finish: Option<&FinishStatus>) {
    let has_ended = |state: State| matches!(state, State::Succeeded | State::Failed);
    if has_ended(to) && !has_ended(from) {
        finish.iter().for_each(|finish| metrics.count_deadline(finish.state));
    }
}

/// When a job ended of which its kubelet says that it ended at `finished`. Clocks of machines differ, and kubelets name
/// whole seconds: a job does not end before it began, nor after now. Without a time (1970) it ended now.
pub(super) fn end_of(finished: Timestamp, began: Timestamp, now: Timestamp) -> Timestamp {
    if finished == Timestamp::UNIX_EPOCH { now } else { finished.max(began).min(now) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_is_counted_once_by_its_result() {
        let metrics = Metrics::new();
        let finish = |state| FinishStatus { state, ..FinishStatus::default() };
        let (met, missed) = (finish(DeadlineState::Met), finish(DeadlineState::Missed));
        count_end(&metrics, State::Running, State::Running, Some(&missed));
        count_end(&metrics, State::Running, State::Succeeded, Some(&met));
        count_end(&metrics, State::Succeeded, State::Succeeded, Some(&met));
        count_end(&metrics, State::Running, State::Failed, Some(&missed));
        count_end(&metrics, State::Running, State::Failed, None);
        let text = metrics.text();
        for state in ["Met", "Missed"] {
            let line = format!("gainshare_operator_deadlines_ended_total{{state=\"{state}\"}} 1");
            assert!(text.contains(&line), "{text}");
        }
    }

    #[test]
    fn the_condition_says_how_sure_the_end_is() {
        let at = |second| Some(Timestamp::from_second(second).unwrap().to_string());
        let finish = FinishStatus {
            deadline: at(1000),
            state: DeadlineState::OnTime,
            predicted: at(990),
            latest: at(1010),
            ..FinishStatus::default()
        };
        let text = |tolerance_s| RiskText::of(&finish, SignedDuration::from_secs(tolerance_s), false).message;
        assert!(text(0).starts_with("probably on time for the deadline 1970-01-01T00:16:40Z"), "{}", text(0));
        assert!(text(10).starts_with("on time for"), "so much lateness is tolerated: {}", text(10));
    }

    #[test]
    fn a_job_ends_between_its_start_and_now() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(end_of(at(50), at(10), at(90)), at(50));
        assert_eq!(end_of(at(5), at(10), at(90)), at(10), "the node's clock was set back");
        assert_eq!(end_of(at(100), at(10), at(90)), at(90), "the node's clock is ahead");
        assert_eq!(end_of(at(5), at(100), at(90)), at(90), "our clock was set back");
        assert_eq!(end_of(at(0), at(10), at(90)), at(90), "the kubelet names no time");
    }
}
