//! What follows from the end of an attempt.
//!
//! | asked to end for | and it | then |
//! |---|---|---|
//! | nothing | ended with 0 | the job has succeeded |
//! | nothing | ended otherwise | a failure: another attempt after a pause, up to `backoffLimit` |
//! | nothing | was deleted, or its node is off | another attempt; not counted as a failure |
//! | a move | ended with 143 or 0 | it saved itself: the next attempt runs on the chosen node |
//! | a move | was killed when its time was over (137) | it ignores SIGTERM: it stays, and is not moved again |
//! | a move | was killed before that | its node failed: it goes on at the chosen node from its last checkpoint |
//! | a move | ended otherwise | saving failed: the same as if it had ignored SIGTERM |
//! | a move | and its node is off | it goes on at the chosen node from its last checkpoint |
//! | a suspension | ended anyhow | suspended |
//! | the deadline | ended anyhow | failed |
//!
//! An end with 0 after SIGTERM may mean "saved" or "done". If it ended before it was asked to, it
//! was done; else it is started once more, and a job that was done finds that in its checkpoint.

use super::action::Snapshot;
use super::status::{StatusText, set_status};
use crate::jobs::deadline::end_of;
use crate::jobs::moves::{TERMINATED, close, continue_move, exit_text, verdict};
use crate::jobs::progress::percent_text;
use crate::jobs::waiting::pause_after;
use crate::state::snapshot::Stop;
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::training_job::{Attempt, Phase, State, StopReason, TrainingJobStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// The status after the end of this attempt was proven.
pub(super) fn ended(
    snapshot: &Snapshot<'_>,
    attempt: &Attempt,
    stopping: Option<StopReason>,
    stop: &Stop,
) -> TrainingJobStatus {
    let status = snapshot.job.status.clone();
    if let Stop::Exited(exit) = stop
        && exit.code == 0
        && !was_asked_before(snapshot, attempt, exit.finished)
    {
        return succeed(snapshot, status, exit.finished);
    }
    match stopping {
        Some(StopReason::Deadline) => {
            let sentence = "it did not end within runPolicy.activeDeadlineSeconds";
            return fail(snapshot, status, "DeadlineExceeded", sentence);
        }
        Some(StopReason::Migrate) if !snapshot.job.spec.suspend => return migrate(snapshot, stop),
        _ if snapshot.job.spec.suspend => return suspend(snapshot, attempt, stop),
        _ => {}
    }
    let wait = |status: TrainingJobStatus, message: String| {
        let state = if status.migration.is_some() { State::Migrating } else { State::Restarting };
        set_status(status, StatusText::new(state, "NextAttempt", message), snapshot)
    };
    match stop {
        Stop::NodeOff(node) => {
            let next = next_attempt(snapshot, drop_migration(status), None, None);
            wait(next, format!("node {node} is gone: the job continues elsewhere from its last checkpoint"))
        }
        Stop::Declared => {
            let next = next_attempt(snapshot, drop_migration(status), None, None);
            wait(next, format!("the pod {} was declared stopped: the job continues with a new one", attempt.pod))
        }
        // Suspended and resumed again before the pod had ended.
        Stop::NeverBegan(_) | Stop::Exited(_) if stopping == Some(StopReason::Suspend) => {
            wait(next_attempt(snapshot, drop_migration(status), None, None), "resumes after a suspension".to_owned())
        }
        Stop::NeverBegan(why) if attempt.pinned || was_deleted(snapshot, attempt) => {
            let mut next = next_attempt(snapshot, status, None, None);
            if let Some(next) = &mut next.attempt {
                next.tried = attempt.tried.iter().chain(&attempt.node).cloned().collect();
            }
            wait(next, format!("the pod {} did not begin ({why}): another one is made", attempt.pod))
        }
        Stop::Exited(exit) if was_deleted(snapshot, attempt) => {
            let next = next_attempt(snapshot, drop_migration(status), None, None);
            let sentence =
                format!("the pod {} was deleted ({}): the job continues with a new one", attempt.pod, exit_text(exit));
            wait(next, sentence)
        }
        Stop::Exited(exit) => failure(snapshot, status, attempt, &exit_text(exit)),
        Stop::NeverBegan(why) => failure(snapshot, status, attempt, why),
    }
}

/// Whether SIGTERM may have been the cause of the end. Times of pods are whole seconds.
fn was_asked_before(snapshot: &Snapshot<'_>, attempt: &Attempt, finished: Timestamp) -> bool {
    snapshot.pod_of(attempt).and_then(|pod| pod.deleted).is_some_and(|(asked, _)| finished >= asked)
}

fn was_deleted(snapshot: &Snapshot<'_>, attempt: &Attempt) -> bool {
    snapshot.pod_of(attempt).is_some_and(|pod| pod.deleted.is_some())
}

/// A job that was asked to save itself for a move has ended.
fn migrate(snapshot: &Snapshot<'_>, stop: &Stop) -> TrainingJobStatus {
    let mut status = snapshot.job.status.clone();
    let Some(migration) = status.migration.take() else {
        return next_attempt(snapshot, status, None, None);
    };
    let time = format!(
        "{} s: runPolicy.terminationGracePeriodSeconds",
        snapshot.job.spec.run_policy.termination_grace_period_seconds
    );
    let pod = status.attempt.as_ref().and_then(|attempt| snapshot.pod_of(attempt));
    let (moves, message) = verdict(stop, &migration, pod, &time);
    let migration = continue_move(migration, moves, snapshot.now);
    if !moves {
        status.unmovable = Some(message.clone());
    }
    let target = Some(migration.to.clone());
    status.migration = Some(migration);
    let next = next_attempt(snapshot, status, target, None);
    let reason = if moves { "Saved" } else { "Stays" };
    set_status(next, StatusText::new(State::Migrating, reason, message), snapshot)
}

/// The status with one more attempt, whose pod is to be made.
pub(super) fn next_attempt(
    snapshot: &Snapshot<'_>,
    mut status: TrainingJobStatus,
    node: Option<NodeName>,
    not_before: Option<Timestamp>,
) -> TrainingJobStatus {
    let epoch = status.attempt.as_ref().map_or(1, |attempt| attempt.epoch.saturating_add(1));
    status.attempt = Some(Attempt {
        epoch,
        pod: format!("{}-{epoch}", snapshot.job.name),
        uid: None,
        pinned: node.is_some(),
        node,
        since: MicroTime(snapshot.now),
        not_before: not_before.map(MicroTime),
        start_time: None,
        stopping: None,
        stopping_since: None,
        ended: None,
        tried: Vec::new(),
    });
    status
}

/// Drops a move that another event overtook.
fn drop_migration(mut status: TrainingJobStatus) -> TrainingJobStatus {
    status.migration = None;
    status
}

fn failure(snapshot: &Snapshot<'_>, status: TrainingJobStatus, attempt: &Attempt, what: &str) -> TrainingJobStatus {
    let mut status = status;
    // The move is over, also if the job failed after it.
    if let (Some(migration), Some(node)) = (status.migration.take(), &attempt.node) {
        close(&mut status, &migration, node, snapshot.now);
    }
    status.failures = status.failures.saturating_add(1);
    let limit = snapshot.job.spec.run_policy.backoff_limit.max(0) as u32;
    if status.failures > limit {
        let sentence = format!("attempt {} failed: {what}; runPolicy.backoffLimit is {limit}", attempt.epoch);
        return fail(snapshot, status, "BackoffLimitExceeded", &sentence);
    }
    let pause = pause_after(status.failures);
    let after = snapshot.now.saturating_add(pause).unwrap_or(snapshot.now);
    let message = format!(
        "attempt {} failed: {what}; failure {} of {limit} that are followed by another attempt, in {} s",
        attempt.epoch,
        status.failures,
        pause.as_secs()
    );
    set_status(
        next_attempt(snapshot, status, None, Some(after)),
        StatusText::new(State::Restarting, "Failed", message),
        snapshot,
    )
}

fn suspend(snapshot: &Snapshot<'_>, attempt: &Attempt, stop: &Stop) -> TrainingJobStatus {
    let mut status = drop_migration(snapshot.job.status.clone());
    let how = match stop {
        Stop::Exited(exit) if matches!(exit.code, 0 | TERMINATED) => "it saved itself".to_owned(),
        Stop::Exited(exit) => {
            format!("it did not save itself ({}) and will resume from its last checkpoint", exit_text(exit))
        }
        Stop::NeverBegan(_) => "it had not begun".to_owned(),
        Stop::NodeOff(node) => format!("its node {node} is gone"),
        Stop::Declared => "it was declared stopped".to_owned(),
    };
    status.attempt = Some(Attempt { ended: Some(how), ..attempt.clone() });
    // The deadline counts from the resumption, as it does for the cluster's own jobs.
    status.start_time = None;
    let message = suspended_sentence(&status);
    set_status(status, StatusText::new(State::Suspended, "Suspended", message), snapshot)
}

pub(super) fn suspended_sentence(status: &TrainingJobStatus) -> String {
    let how = status.attempt.as_ref().and_then(|attempt| attempt.ended.as_deref()).unwrap_or("it had not begun");
    format!("suspended: {how}; set spec.suspend to false to resume")
}

fn succeed(snapshot: &Snapshot<'_>, mut status: TrainingJobStatus, finished: Timestamp) -> TrainingJobStatus {
    status.progress = Some(percent_text(100));
    // A start that was not seen came after the attempt was planned.
    let began = status.attempt.as_ref().map(|attempt| attempt.start_time.as_ref().unwrap_or(&attempt.since).0);
    let ended = end_of(finished, began.unwrap_or(snapshot.job.created), snapshot.now);
    let node = status.attempt.as_ref().and_then(|attempt| attempt.node.clone()).unwrap_or_default();
    let message = format!("ended with exit code 0 on {node}");
    finish(snapshot, status, StatusText::new(State::Succeeded, "Completed", message).ended_at(ended))
}

pub(super) fn fail(
    snapshot: &Snapshot<'_>,
    status: TrainingJobStatus,
    reason: &'static str,
    sentence: &str,
) -> TrainingJobStatus {
    finish(snapshot, status, StatusText::new(State::Failed, reason, sentence.to_owned()))
}

fn finish(snapshot: &Snapshot<'_>, status: TrainingJobStatus, text: StatusText) -> TrainingJobStatus {
    let mut status = status;
    if let (Some(migration), Some(node)) =
        (status.migration.take(), status.attempt.as_ref().and_then(|attempt| attempt.node.clone()))
        && migration.phase == Phase::Starting
    {
        close(&mut status, &migration, &node, snapshot.now);
    }
    status.completion_time = Some(MicroTime(snapshot.now));
    if let Some(attempt) = &mut status.attempt {
        attempt.ended = Some(text.message.clone());
    }
    set_status(status, text, snapshot)
}
