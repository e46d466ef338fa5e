//! When a TrainingJob will be done, and how its deadline stands: the part `finish` of its status, and the
//! condition `DeadlineAtRisk`.
//!
//! **Suspension.** A suspended job cannot work, so its deadline moves by the time for which it was suspended.
//! The status keeps since when the job is suspended, and for how long it was suspended before. Every pod gets
//! the deadline that holds when the pod is made; a job that is resumed has a new pod.

use super::action::{PodFinish, Snapshot};
use crate::jobs::deadline::{self, AT_RISK, Risk, RiskText};
use crate::jobs::progress::newer_progress;
use crate::state::snapshot::JobSnapshot;
use gainshare_kube_api::deadline::{DeadlineState, FinishStatus};
use gainshare_kube_api::deadline_input;
use gainshare_kube_api::training_job::{State, TrainingJobStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime, Time};

/// When the job must be done, by what its status says about suspensions that are over.
pub(super) fn moment(job: &JobSnapshot) -> Option<Timestamp> {
    let suspended_s = job.status.finish.as_ref().map_or(0, |finish| finish.suspended_seconds);
    deadline_input::of_training_job(&job.spec, job.created, suspended_s)
}

/// The deadline for the annotation of a new pod. A deadline that was in the past when the job was created is no
/// deadline: the job runs as best effort.
pub(super) fn for_pod(job: &JobSnapshot) -> Option<String> {
    moment(job).filter(|moment| *moment > job.created).map(|moment| moment.to_string())
}

/// Takes in the prediction and the progress that the node agent reports. Small changes are not worth a write.
pub(super) fn predict(status: &mut TrainingJobStatus, reported: PodFinish) {
    let percent = reported.percent.and_then(|percent| newer_progress(status.progress.as_deref(), percent));
    status.progress = percent.or(status.progress.take());
    let Some(forecast) = reported.forecast else { return };
    let state = reported.deadline_state.unwrap_or_default();
    status.finish.get_or_insert_default().predict(forecast, state);
}

/// Brings the deadline, its state and its condition up to date for a job that goes into `state`. `ended` is when it
/// ended, if that is known.
pub(super) fn update(status: &mut TrainingJobStatus, state: State, ended: Option<Timestamp>, snapshot: &Snapshot<'_>) {
    let job = snapshot.job;
    if job.spec.deadline.is_none() && job.spec.deadline_seconds.is_none() {
        return;
    }
    let mut finish = status.finish.clone().unwrap_or_default();
    count_suspension(&mut finish, state, snapshot.now);
    let at = deadline_input::of_training_job(&job.spec, job.created, finish.suspended_seconds);
    finish.deadline = at.map(|at| at.to_string());
    let has_ended = matches!(state, State::Succeeded | State::Failed);
    finish.nodes_needed = snapshot.nodes_needed.filter(|_| !has_ended).cloned();
    let tolerance = deadline_input::tolerance(&job.spec);
    let latest = at.and_then(|at| at.saturating_add(tolerance).ok());
    let is_past = at.is_none_or(|at| at <= job.created);
    let is_late = latest.is_none_or(|latest| ended.unwrap_or(snapshot.now) > latest);
    // Of a job that has not ended, `Missed` only says that its end was not seen by the deadline.
    let was_judged = matches!(status.state, State::Succeeded | State::Failed)
        && matches!(finish.state, DeadlineState::Met | DeadlineState::Missed);
    finish.state = match state {
        State::Succeeded | State::Failed if was_judged => finish.state,
        State::Succeeded if !is_late => DeadlineState::Met,
        State::Succeeded | State::Failed => DeadlineState::Missed,
        State::Suspended => DeadlineState::Unknown,
        _ if is_past || is_late => DeadlineState::Missed,
        _ => finish.state,
    };
    let RiskText { warns, reason, message } = RiskText::of(&finish, tolerance, is_past);
    let holds = if warns { "True" } else { "False" };
    let known = status.conditions.iter().find(|known| known.type_ == AT_RISK);
    // The sentence of a warning stays as it was written: the prediction changes all the time.
    let repeated = known.filter(|known| warns && known.status == holds && known.reason == reason);
    let condition = Condition {
        type_: AT_RISK.to_owned(),
        status: holds.to_owned(),
        reason: reason.to_owned(),
        message: repeated.map_or(message, |known| known.message.clone()),
        observed_generation: Some(job.generation),
        last_transition_time: known
            .filter(|known| known.status == holds)
            .map_or(Time(snapshot.now), |known| known.last_transition_time.clone()),
    };
    status.conditions.retain(|known| known.type_ != AT_RISK);
    status.conditions.push(condition);
    status.finish = Some(finish);
}

fn count_suspension(finish: &mut FinishStatus, state: State, now: Timestamp) {
    match (state == State::Suspended, &finish.suspended_since) {
        (true, None) => finish.suspended_since = Some(MicroTime(now)),
        (false, Some(since)) => {
            let seconds = now.duration_since(since.0).as_secs().max(0);
            finish.suspended_seconds = finish.suspended_seconds.saturating_add(seconds);
            finish.suspended_since = None;
        }
        _ => {}
    }
}

/// The warning that a new status brings, if the old one did not have it.
pub(super) fn new_warning(old: &TrainingJobStatus, new: &TrainingJobStatus) -> Option<String> {
    let [old, new] = [old, new].map(|status| {
        let known = status.conditions.iter().find(|known| known.type_ == AT_RISK)?;
        Some(Risk { warns: known.status == "True", message: &known.message })
    });
    deadline::new_warning(old, new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::snapshot::Nodes;
    use gainshare_kube_api::deadline::Forecast;
    use gainshare_kube_api::deadline::NodesNeeded;
    use jiff::SignedDuration;

    fn job(seconds: Option<i64>) -> JobSnapshot {
        let mut job = JobSnapshot { created: Timestamp::from_second(1_000_000).unwrap(), ..JobSnapshot::default() };
        job.spec.deadline_seconds = seconds;
        job
    }

    /// The job's status after it went into a state, this number of seconds after its creation.
    fn after(job: &JobSnapshot, state: State, at_s: i64) -> TrainingJobStatus {
        after_with(job, state, at_s, None)
    }

    fn after_with(job: &JobSnapshot, state: State, at_s: i64, needed: Option<&NodesNeeded>) -> TrainingJobStatus {
        let nodes = Nodes::new();
        let now = job.created.saturating_add(SignedDuration::from_secs(at_s)).unwrap();
        let snapshot = Snapshot { nodes_needed: needed, ..Snapshot::plain(now, job, &[], &nodes) };
        let mut status = job.status.clone();
        update(&mut status, state, None, &snapshot);
        status.state = state;
        status
    }

    /// The status after the operator sees, this number of seconds after the creation, that the job has succeeded.
    fn after_success(job: &JobSnapshot, ended_s: i64, seen_s: i64) -> TrainingJobStatus {
        let nodes = Nodes::new();
        let at = |s| job.created.saturating_add(SignedDuration::from_secs(s)).unwrap();
        let mut status = job.status.clone();
        let snapshot = Snapshot::plain(at(seen_s), job, &[], &nodes);
        update(&mut status, State::Succeeded, Some(at(ended_s)), &snapshot);
        status.state = State::Succeeded;
        status
    }

    #[test]
    fn suspended_time_does_not_count() {
        let mut job = job(Some(100));
        job.status = after(&job, State::Running, 10);
        assert_eq!(moment(&job).unwrap().as_second(), 1_000_100);
        job.status = after(&job, State::Suspended, 20);
        assert_eq!(moment(&job).unwrap().as_second(), 1_000_100, "the suspension is not over");
        // Later steps of a suspended job do not begin it again.
        job.status = after(&job, State::Suspended, 200);
        assert!(!job.status.finish.as_ref().unwrap().state.warns(), "a suspended job is not late");
        job.status = after(&job, State::Waiting, 320);
        assert_eq!(moment(&job).unwrap().as_second(), 1_000_400);
        job.status = after(&job, State::Succeeded, 399);
        assert_eq!(job.status.finish.as_ref().unwrap().state, DeadlineState::Met);
        // The result stays, however late the object is read again.
        assert_eq!(after(&job, State::Succeeded, 9_000).finish.unwrap().state, DeadlineState::Met);
    }

    #[test]
    fn success_counts_within_the_tolerance_only() {
        let mut job = job(Some(100));
        assert_eq!(after(&job, State::Succeeded, 101).finish.unwrap().state, DeadlineState::Missed);
        job.spec.deadline_tolerance = Some("10s".to_owned());
        assert_eq!(after(&job, State::Succeeded, 109).finish.unwrap().state, DeadlineState::Met);
        assert_eq!(after(&job, State::Failed, 50).finish.unwrap().state, DeadlineState::Missed);
    }

    /// The operator may have been away, or the kubelet's report late.
    #[test]
    fn a_success_is_judged_by_its_end_whenever_it_is_seen() {
        let mut job = job(Some(100));
        let deadline_state = |status: &TrainingJobStatus| status.finish.as_ref().unwrap().state;
        assert_eq!(deadline_state(&after_success(&job, 99, 500)), DeadlineState::Met);
        assert_eq!(deadline_state(&after_success(&job, 101, 500)), DeadlineState::Missed);
        // Until the success is seen, the job seems to be late.
        job.status = after(&job, State::Running, 103);
        assert_eq!(deadline_state(&job.status), DeadlineState::Missed);
        let met = after_success(&job, 99, 104);
        let condition = met.conditions.iter().find(|known| known.type_ == AT_RISK).unwrap();
        assert_eq!(
            (deadline_state(&met), condition.status.as_str(), condition.reason.as_str()),
            (DeadlineState::Met, "False", "Met")
        );
        job.status = after_success(&job, 101, 104);
        assert_eq!(deadline_state(&after(&job, State::Succeeded, 105)), DeadlineState::Missed, "the result stays");
    }

    #[test]
    fn a_predicted_miss_is_a_condition_and_one_warning() {
        let mut job = job(Some(100));
        job.status = after(&job, State::Running, 1);
        let before = job.status.clone();
        let forecast = Forecast { done_ms: 1_000_500_000, earliest_ms: 1_000_400_000, latest_ms: 1_000_600_000 };
        predict(
            &mut job.status,
            PodFinish { forecast: Some(forecast), deadline_state: Some(DeadlineState::AtRisk), percent: Some(40) },
        );
        let status = after(&job, State::Running, 2);
        let warning = new_warning(&before, &status).unwrap();
        assert!(warning.contains("1970-01-12T13:55:00Z") && warning.contains("best effort"), "{warning}");
        assert_eq!(new_warning(&status, &status), None);
        // A prediction within the published interval is no news.
        job.status = status.clone();
        let near = Forecast { done_ms: 1_000_550_000, ..forecast };
        predict(
            &mut job.status,
            PodFinish { forecast: Some(near), deadline_state: Some(DeadlineState::AtRisk), percent: Some(44) },
        );
        assert_eq!((&job.status, job.status.progress.as_deref()), (&status, Some("40%")));
        let silent = PodFinish { forecast: None, deadline_state: None, percent: Some(45) };
        predict(&mut job.status, silent);
        assert_eq!(job.status.progress.as_deref(), Some("45%"), "progress needs no prediction");
    }

    #[test]
    fn needed_nodes_are_published_until_they_are_not_needed() {
        let mut job = job(Some(100));
        let needed = NodesNeeded { count: 1, cpu: "4000m".into(), memory: "8192Mi".into(), instance_type: None };
        let of = |status: &TrainingJobStatus| status.finish.as_ref().and_then(|finish| finish.nodes_needed.clone());
        job.status = after_with(&job, State::Waiting, 1, Some(&needed));
        assert_eq!(of(&job.status), Some(needed.clone()));
        assert_eq!(of(&after_with(&job, State::Running, 2, Some(&needed))), Some(needed.clone()));
        assert_eq!(of(&after_with(&job, State::Running, 2, None)), None);
        assert_eq!(of(&after_with(&job, State::Succeeded, 2, Some(&needed))), None);
    }

    #[test]
    fn a_deadline_in_the_past_warns_and_leaves_best_effort() {
        let mut job = job(None);
        job.spec.deadline = Some("1970-01-01T00:00:00Z".to_owned());
        let status = after(&job, State::Waiting, 0);
        assert_eq!(for_pod(&job), None);
        assert!(new_warning(&job.status, &status).unwrap().contains("later deadline"));
        let plain = after(&self::job(None), State::Running, 5);
        assert_eq!((plain.finish, plain.conditions), (None, Vec::new()), "no deadline, no status");
    }
}
