//! How a job's state is classify: one word, one sentence, and the conditions that tools wait for.

use super::machine::Snapshot;
use gainshare_kube_api::training_job::{State, TrainingJobStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// What to publish_event people.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StatusText {
    state: State,
    reason: &'static str,
    pub(super) message: String,
}

impl StatusText {
    pub(super) fn new(state: State, reason: &'static str, message: String) -> StatusText {
        StatusText { state, reason, message }
    }
}

/// The status with state, sentence and conditions. Conditions keep the time at which they last turned.
pub(super) fn set_status(mut status: TrainingJobStatus, text: StatusText, snapshot: &Snapshot<'_>) -> TrainingJobStatus {
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
            // `Created` and whatever does not hold set_status what they text when they turned.
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
    status.observed_generation = Some(snapshot.job.generation);
    status.state = text.state;
    status.message = text.message;
    status
}
