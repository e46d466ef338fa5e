//! A job's published state: one word, one sentence, and the conditions that tools wait for.

use super::action::Snapshot;
use super::finish;
use crate::jobs::deadline::AT_RISK;
use gainshare_kube_api::training_job::{SpeconMarks, State, TrainingJobStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The condition of a job whose reconcile panicked. [`set_status`] removes it.
const RECONCILE_FAILED: &str = "ReconcileFailed";

/// The state and its explanation, for people.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StatusText {
    state: State,
    reason: &'static str,
    pub(super) message: String,
    /// When the job ended, by its kubelet.
    ended: Option<Timestamp>,
}

impl StatusText {
    pub(super) fn new(state: State, reason: &'static str, message: String) -> StatusText {
        StatusText { state, reason, message, ended: None }
    }

    pub(super) fn ended_at(self, at: Timestamp) -> StatusText {
        StatusText { ended: Some(at), ..self }
    }
}

/// The status with state, sentence and conditions. Conditions keep the time at which they last
/// changed.
pub(super) fn set_status(
    mut status: TrainingJobStatus,
    text: StatusText,
    snapshot: &Snapshot<'_>,
) -> TrainingJobStatus {
    let is = |state: State| text.state == state;
    let all = [
        ("Created", status.attempt.is_some()),
        ("Running", is(State::Running)),
        ("Suspended", is(State::Suspended)),
        ("Migrating", is(State::Migrating)),
        ("Succeeded", is(State::Succeeded)),
        ("Failed", is(State::Failed)),
    ];
    let before = std::mem::take(&mut status.conditions);
    status.conditions = all
        .into_iter()
        .map(|(kind, holds)| {
            let holds_now = if holds { "True" } else { "False" };
            let known = before.iter().find(|known| known.type_ == kind && known.status == holds_now);
            // `Created`, and every condition that does not hold, keep the text of the moment at
            // which they changed.
            let repeat = known.filter(|_| !holds || kind == "Created");
            Condition {
                type_: kind.to_owned(),
                status: holds_now.to_owned(),
                reason: repeat.map_or_else(|| text.reason.to_owned(), |known| known.reason.clone()),
                message: repeat.map_or_else(|| text.message.clone(), |known| known.message.clone()),
                observed_generation: Some(snapshot.job.generation),
                last_transition_time: known.map_or(Time(snapshot.now), |known| known.last_transition_time.clone()),
            }
        })
        .collect();
    status.conditions.extend(before.into_iter().filter(|known| known.type_ == AT_RISK));
    finish::update(&mut status, text.state, text.ended, snapshot);
    // With the status of a move that begins: no operator that comes later may order it again.
    status.specon = SpeconMarks::add(status.specon.take(), snapshot.marks);
    status.observed_generation = Some(snapshot.job.generation);
    status.state = text.state;
    status.message = text.message;
    status
}

/// The status of a job whose reconcile panicked; `None` if it says so already.
pub(super) fn with_reconcile_failure(
    status: &TrainingJobStatus,
    generation: i64,
    message: &str,
    now: Timestamp,
) -> Option<TrainingJobStatus> {
    let mut status = status.clone();
    if status.conditions.iter().any(|known| known.type_ == RECONCILE_FAILED && known.message == message) {
        return None;
    }
    status.conditions.retain(|known| known.type_ != RECONCILE_FAILED);
    status.conditions.push(Condition {
        type_: RECONCILE_FAILED.to_owned(),
        status: "True".to_owned(),
        reason: "Panic".to_owned(),
        message: message.to_owned(),
        observed_generation: Some(generation),
        last_transition_time: Time(now),
    });
    Some(status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::snapshot::{JobSnapshot, Nodes};

    #[test]
    fn a_reconcile_failure_is_published_once_and_goes_with_the_next_status() {
        let now = Timestamp::UNIX_EPOCH;
        let failed = with_reconcile_failure(&TrainingJobStatus::default(), 3, "overflow", now).unwrap();
        let condition = &failed.conditions[0];
        assert_eq!((condition.type_.as_str(), condition.status.as_str()), ("ReconcileFailed", "True"));
        assert_eq!(condition.message, "overflow");
        assert_eq!(with_reconcile_failure(&failed, 3, "overflow", now), None, "it is not written again and again");
        let other = with_reconcile_failure(&failed, 3, "another", now).unwrap();
        assert_eq!(other.conditions.len(), 1);
        let (job, nodes) = (JobSnapshot::default(), Nodes::new());
        let snapshot = Snapshot::plain(now, &job, &[], &nodes);
        let next = set_status(other, StatusText::new(State::Waiting, "Planned", "soon".to_owned()), &snapshot);
        assert!(next.conditions.iter().all(|condition| condition.type_ != "ReconcileFailed"));
    }
}
