//! The published state of a job of tasks: conditions as Kubeflow's tools expect them, counts by role, one sentence.
//!
//! Conditions follow the training operator: each has an entry once it has held, the newest is the last in the list,
//! `Running` and `Restarting` replace each other, and `Running` is false after the end. A job that goes on after a
//! suspension has the reason `Resumed` at the condition `Suspended`.

use crate::jobs::deadline::{self, AT_RISK, Risk, RiskText};
use crate::state::task_job::TaskJobStatus;
use crate::state::workload::WorkloadKind;
use gainshare_kube_api::tasks::TaskCondition;
use gainshare_kube_api::training_job::State;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// The condition of a job whose reconcile panicked. [`set_state`] removes it.
const RECONCILE_FAILED: &str = "ReconcileFailed";
const RUNNING: &str = "Running";
const RESTARTING: &str = "Restarting";
const SUSPENDED: &str = "Suspended";
const RESUMED: &str = "Resumed";
const TRUE: &str = "True";
const FALSE: &str = "False";

/// Sets state, sentence and conditions.
pub(super) fn set_state(status: &mut TaskJobStatus, kind: WorkloadKind, state: State, message: &str, now: Timestamp) {
    status.journal.state = state;
    message.clone_into(&mut status.message);
    status.conditions.retain(|known| known.type_ != RECONCILE_FAILED);
    put(status, kind, "Created", "the job was accepted", now, false);
    let type_ = match state {
        State::Waiting | State::Migrating => {
            turn_off(status, SUSPENDED, Some((kind, RESUMED)), now);
            return;
        }
        State::Running => RUNNING,
        State::Restarting => RESTARTING,
        State::Suspended => SUSPENDED,
        State::Succeeded => "Succeeded",
        State::Failed => "Failed",
    };
    let replaced = match type_ {
        RUNNING => RESTARTING,
        RESTARTING => RUNNING,
        _ => "",
    };
    status.conditions.retain(|known| known.type_ != replaced);
    if type_ != RUNNING {
        turn_off(status, RUNNING, (type_ == SUSPENDED).then_some((kind, SUSPENDED)), now);
    }
    if type_ != RESTARTING {
        turn_off(status, RESTARTING, None, now);
    }
    if type_ != SUSPENDED {
        turn_off(status, SUSPENDED, Some((kind, RESUMED)), now);
    }
    put(status, kind, type_, message, now, true);
}

/// Shows that failed tasks of a running TFJob are replaced: the training operator has the condition `Restarting`
/// until they run again. The state in the journal stays.
pub(super) fn set_replacing(status: &mut TaskJobStatus, kind: WorkloadKind, message: &str, now: Timestamp) {
    message.clone_into(&mut status.message);
    status.conditions.retain(|known| known.type_ != RUNNING);
    put(status, kind, RESTARTING, message, now, true);
}

/// Sets the condition about the deadline. It stays the first: the last one is the state.
pub(super) fn set_risk(status: &mut TaskJobStatus, risk: RiskText, now: Timestamp) {
    let word = if risk.warns { TRUE } else { FALSE };
    let known = status.conditions.iter().find(|known| known.type_ == AT_RISK && known.status == word);
    // The sentence of a warning stays as it was written: the prediction changes all the time.
    if risk.warns && known.is_some_and(|known| known.reason == risk.reason) {
        return;
    }
    let since = known.and_then(|known| known.last_transition_time.clone());
    status.conditions.retain(|known| known.type_ != AT_RISK);
    let condition = TaskCondition {
        type_: AT_RISK.to_owned(),
        status: word.to_owned(),
        reason: risk.reason.to_owned(),
        message: risk.message,
        last_update_time: None,
        last_transition_time: since.or(Some(Time(now))),
    };
    status.conditions.insert(0, condition);
}

/// The warning about the deadline that a new status brings, if the old one did not have it.
pub(super) fn new_warning(old: &TaskJobStatus, new: &TaskJobStatus) -> Option<String> {
    let [old, new] = [old, new].map(|status| {
        let known = status.conditions.iter().find(|known| known.type_ == AT_RISK)?;
        Some(Risk { warns: known.status == TRUE, message: &known.message })
    });
    deadline::new_warning(old, new)
}

/// Whether [`set_replacing`] was the last word about the job.
pub(super) fn is_replacing(status: &TaskJobStatus) -> bool {
    status.journal.state == State::Running && status.conditions.iter().any(|known| known.type_ == RESTARTING)
}

/// The reason of the event about a change of state. Those of TFJobs are the training operator's.
pub(super) fn event_reason(kind: WorkloadKind, before: State, after: State) -> String {
    if kind != WorkloadKind::TfJob {
        return format!("{after:?}");
    }
    let word = match (before, after) {
        (State::Suspended, State::Waiting) => RESUMED,
        (_, State::Waiting | State::Migrating) => "Created",
        (_, State::Running) => RUNNING,
        (_, State::Restarting) => RESTARTING,
        (_, State::Suspended) => SUSPENDED,
        (_, State::Succeeded) => "Succeeded",
        (_, State::Failed) => "Failed",
    };
    format!("{}{word}", kind.name())
}

/// The condition holds. It goes to the end of the list when it begins to hold.
fn put(status: &mut TaskJobStatus, kind: WorkloadKind, type_: &str, message: &str, now: Timestamp, renew: bool) {
    let known = status.conditions.iter_mut().find(|known| known.type_ == type_ && known.status == TRUE);
    if let Some(known) = known {
        if renew && known.message != message {
            message.clone_into(&mut known.message);
            known.last_update_time = Some(Time(now));
        }
        return;
    }
    status.conditions.retain(|known| known.type_ != type_);
    status.conditions.push(TaskCondition {
        type_: type_.to_owned(),
        status: TRUE.to_owned(),
        reason: format!("{}{type_}", kind.name()),
        message: message.to_owned(),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    });
}

/// The condition does not hold any more. It keeps its reason if there is no other one.
fn turn_off(status: &mut TaskJobStatus, type_: &str, reason: Option<(WorkloadKind, &str)>, now: Timestamp) {
    for known in status.conditions.iter_mut().filter(|known| known.type_ == type_ && known.status == TRUE) {
        FALSE.clone_into(&mut known.status);
        if let Some((kind, word)) = reason {
            known.reason = format!("{}{word}", kind.name());
        }
        known.last_update_time = Some(Time(now));
        known.last_transition_time = Some(Time(now));
    }
}

/// The status of a job whose reconcile panicked; `None` if it says so already.
pub(super) fn with_reconcile_failure(status: &TaskJobStatus, message: &str, now: Timestamp) -> Option<TaskJobStatus> {
    let mut status = status.clone();
    if status.conditions.iter().any(|known| known.type_ == RECONCILE_FAILED && known.message == message) {
        return None;
    }
    status.conditions.retain(|known| known.type_ != RECONCILE_FAILED);
    status.conditions.push(TaskCondition {
        type_: RECONCILE_FAILED.to_owned(),
        status: TRUE.to_owned(),
        reason: "Panic".to_owned(),
        message: message.to_owned(),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    });
    Some(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(status: &TaskJobStatus) -> Vec<(&str, &str)> {
        status.conditions.iter().map(|one| (one.type_.as_str(), one.status.as_str())).collect()
    }

    #[test]
    fn the_last_condition_is_the_state() {
        let mut status = TaskJobStatus::default();
        let mut set = |state| {
            set_state(&mut status, WorkloadKind::TfJob, state, "m", Timestamp::UNIX_EPOCH);
            types(&status).into_iter().map(|(a, b)| format!("{a}={b}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(set(State::Waiting), "Created=True");
        assert_eq!(set(State::Running), "Created=True Running=True");
        assert_eq!(set(State::Restarting), "Created=True Restarting=True");
        assert_eq!(set(State::Running), "Created=True Running=True");
        assert_eq!(set(State::Suspended), "Created=True Running=False Suspended=True");
        assert_eq!(set(State::Running), "Created=True Suspended=False Running=True");
        assert_eq!(set(State::Succeeded), "Created=True Suspended=False Running=False Succeeded=True");
        assert_eq!(status.conditions.last().unwrap().reason, "TFJobSucceeded");
    }

    #[test]
    fn conditions_have_the_reasons_of_the_training_operator() {
        let mut status = TaskJobStatus::default();
        let mut set = |state| {
            set_state(&mut status, WorkloadKind::TfJob, state, "m", Timestamp::UNIX_EPOCH);
            let reason = |type_: &str| {
                let known = status.conditions.iter().find(|known| known.type_ == type_);
                known.map(|known| known.reason.clone()).unwrap_or_default()
            };
            [reason("Created"), reason("Running"), reason("Suspended")].join(" ")
        };
        assert_eq!(set(State::Running), "TFJobCreated TFJobRunning ");
        assert_eq!(set(State::Suspended), "TFJobCreated TFJobSuspended TFJobSuspended");
        assert_eq!(set(State::Waiting), "TFJobCreated TFJobSuspended TFJobResumed");
        assert_eq!(set(State::Running), "TFJobCreated TFJobRunning TFJobResumed");
        assert_eq!(set(State::Suspended), "TFJobCreated TFJobSuspended TFJobSuspended", "a second time, too");
    }

    #[test]
    fn events_of_tfjobs_have_the_reasons_of_the_training_operator() {
        let of_tfjob = |before, after| event_reason(WorkloadKind::TfJob, before, after);
        assert_eq!(of_tfjob(State::Waiting, State::Waiting), "TFJobCreated");
        assert_eq!(of_tfjob(State::Suspended, State::Waiting), "TFJobResumed");
        assert_eq!(of_tfjob(State::Running, State::Restarting), "TFJobRestarting");
        assert_eq!(of_tfjob(State::Running, State::Succeeded), "TFJobSucceeded");
        assert_eq!(event_reason(WorkloadKind::TaskJob, State::Running, State::Failed), "Failed");
    }
}
