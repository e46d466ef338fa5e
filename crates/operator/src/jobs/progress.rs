//! How far a job is and how long it will take: what is published of the node agents' reports.
//!
//! **Which task counts.** Of a job of several tasks, the chief's report, or that of worker 0 without a chief. Where it
//! has no number, the furthest task and the latest predicted end count.
//!
//! **When it is written.** Progress is published again after [`PERCENT_STEP`] points, and the time left when it differs
//! from the published one by a quarter. So a training of ten hours makes some fifty writes, and one that does not go
//! on makes none.

use crate::state::agents::{Agents, MOST_STEPS};
use crate::state::snapshot::PodSnapshot;
use crate::state::task_job::{TaskJobSnapshot, TaskJobStatus};
use crate::state::workload::WorkloadKind;
use gainshare_kube_api::deadline::Forecast;
use gainshare_kube_api::training_job::State;
use gainshare_kube_api::wire::JobReport;
use jiff::Timestamp;
use std::sync::atomic::{AtomicBool, Ordering};

/// Progress is published again when it has changed by this number of points.
const PERCENT_STEP: u32 = 5;
/// A change of the time left by less is never worth a write.
const LEAST_CHANGE_S: u64 = 5;
/// Below this progress, in percent, the time left is not extrapolated from the time since the start.
const EXTRAPOLATED_FROM: u32 = 5;
/// The units of a published time, largest first.
const UNITS: [(&str, u64); 4] = [("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)];

/// What is reported about the tasks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct TaskProgress {
    pub(crate) percent: Option<u32>,
    /// When the job will be done.
    pub(crate) forecast: Option<Forecast>,
    /// The step that the job has reached.
    pub(crate) step: Option<u64>,
    /// The first step that the present attempt has reported.
    pub(crate) first_step: Option<u64>,
}

impl TaskProgress {
    /// What the node agents report about the pods of the job's present attempt.
    pub(crate) fn read(agents: &Agents, job: &TaskJobSnapshot, pods: &[PodSnapshot]) -> TaskProgress {
        let (Ok(spec), journal) = (&job.spec, &job.status.journal) else { return TaskProgress::default() };
        let own = pods.iter().filter(|pod| pod.owner.as_ref() == Some(&job.uid) && pod.epoch == journal.epoch);
        let reports: Vec<(bool, &JobReport)> = own
            .filter(|pod| !journal.replaced.contains(&pod.uid))
            .filter_map(|pod| Some((spec.is_leading_task(pod.task?), agents.job(&pod.uid)?)))
            .collect();
        let leading = reports.iter().find(|(is_leading, _)| *is_leading).map(|(_, report)| *report);
        let percent = |report: &JobReport| report.progress.percent();
        let latest = |a: Forecast, b: Forecast| if a.done_ms >= b.done_ms { a } else { b };
        let step = |report: &JobReport| report.progress.step.map(|step| step.min(MOST_STEPS));
        let first_step = |report: &JobReport| report.progress.first_step.map(|step| step.min(MOST_STEPS));
        TaskProgress {
            percent: leading.and_then(percent).or(reports.iter().filter_map(|(_, report)| percent(report)).max()),
            forecast: leading
                .and_then(|report| report.forecast)
                .or(reports.iter().filter_map(|(_, report)| report.forecast).reduce(latest)),
            step: leading.and_then(step).or(reports.iter().filter_map(|(_, report)| step(report)).max()),
            first_step: leading
                .and_then(first_step)
                .or(reports.iter().filter_map(|(_, report)| first_step(report)).min()),
        }
    }

    /// Brings what is published about the job up to date, for a job in this state.
    pub(super) fn publish(self, status: &mut TaskJobStatus, state: State, now: Timestamp) {
        if state != State::Running {
            status.time_left = None;
            return;
        }
        let known = status.progress.as_deref().and_then(parse_percent);
        status.progress = self.percent.and_then(|percent| newer_percent(known, percent)).or(known).map(percent_text);
        let Some(left_s) = self.left_s(status, now) else { return };
        let published_s = status.time_left.as_deref().and_then(parse_time);
        let is_news =
            published_s.is_none_or(|published_s| left_s.abs_diff(published_s) > (published_s / 4).max(LEAST_CHANGE_S));
        if is_news {
            status.time_left = Some(time_text(left_s));
        }
    }

    /// The predicted end, or else the time since the start in proportion. A job that has started again may have done a
    /// part of its steps before: nothing is extrapolated then.
    fn left_s(self, status: &TaskJobStatus, now: Timestamp) -> Option<u64> {
        let now_ms = now.as_millisecond().max(0).unsigned_abs();
        if let Some(forecast) = self.forecast {
            return Some(forecast.done_ms.saturating_sub(now_ms) / 1000);
        }
        let percent = self.percent.filter(|percent| (EXTRAPOLATED_FROM..=100).contains(percent))?;
        let start = status.start_time.as_ref().filter(|_| status.journal.epoch == 1)?;
        let elapsed_s = now.duration_since(start.0).as_secs().max(0).unsigned_abs();
        Some(elapsed_s.saturating_mul(u64::from(100 - percent)) / u64::from(percent))
    }
}

/// Whether the definition of a kind has a field of the status. One that is older than the operator may not have it: the
/// API server drops what is written, and it would be written again and again.
#[derive(Debug)]
pub(super) struct StatusField {
    name: &'static str,
    is_missing: AtomicBool,
}

impl StatusField {
    pub(super) fn new(name: &'static str) -> StatusField {
        StatusField { name, is_missing: AtomicBool::new(false) }
    }

    pub(super) fn exists(&self) -> bool {
        !self.is_missing.load(Ordering::Relaxed)
    }

    /// Compares what was written with what the API server has answered.
    pub(super) fn check(&self, kind: WorkloadKind, is_written: bool, is_answered: bool) {
        if is_written && !is_answered && !self.is_missing.swap(true, Ordering::Relaxed) {
            let (kind, field) = (kind.name(), self.name);
            tracing::warn!(
                kind,
                field,
                "a field of the status is not kept: the definition of the kind is older than this operator, apply the new one"
            );
        }
    }
}

/// The new progress, if it is worth a write. The first steps of a job are not: a new operator would write to all jobs
/// of a cluster that have just begun.
fn newer_percent(known: Option<u32>, percent: u32) -> Option<u32> {
    (known.unwrap_or(0).abs_diff(percent) >= PERCENT_STEP).then_some(percent)
}

/// The text of the new progress, if it is worth a write.
pub(super) fn newer_progress(published: Option<&str>, percent: u32) -> Option<String> {
    newer_percent(published.and_then(parse_percent), percent).map(percent_text)
}

/// As the columns of `kubectl get` show it.
pub(super) fn percent_text(percent: u32) -> String {
    format!("{percent}%")
}

fn parse_percent(text: &str) -> Option<u32> {
    text.strip_suffix('%')?.parse().ok()
}

/// A time in its two largest units, such as `1h20m`.
fn time_text(seconds: u64) -> String {
    let Some(first) = UNITS.iter().position(|(_, size)| seconds >= *size) else { return "0s".to_owned() };
    let mut rest = seconds;
    let mut text = String::new();
    for (unit, size) in UNITS.iter().skip(first).take(2) {
        if rest / size > 0 {
            text.push_str(&format!("{}{unit}", rest / size));
        }
        rest %= size;
    }
    text
}

/// Reads what [`time_text`] writes.
fn parse_time(text: &str) -> Option<u64> {
    let mut seconds: u64 = 0;
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|letter: char| !letter.is_ascii_digit())?;
        let number: u64 = rest[..end].parse().ok()?;
        let letters = rest[end..].chars().take_while(|letter| !letter.is_ascii_digit()).count();
        let (unit, after) = rest[end..].split_at_checked(letters)?;
        let (_, size) = UNITS.iter().find(|(name, _)| *name == unit)?;
        seconds = seconds.checked_add(number.checked_mul(*size)?)?;
        rest = after;
    }
    (!text.is_empty()).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::task_job::TaskJobStatus;
    use gainshare_kube_api::wire::{Progress, SyncRequest};
    use jiff::SignedDuration;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use serde_json::json;
    use std::time::Instant;

    const START_S: i64 = 1_000_000;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(START_S + seconds).unwrap()
    }

    fn running() -> TaskJobStatus {
        let mut status = TaskJobStatus { start_time: Some(MicroTime(at(0))), ..TaskJobStatus::default() };
        status.journal.epoch = 1;
        status
    }

    fn done_in(now: Timestamp, seconds: i64) -> Option<Forecast> {
        let done_ms = now.checked_add(SignedDuration::from_secs(seconds)).unwrap().as_millisecond().unsigned_abs();
        Some(Forecast { done_ms, earliest_ms: done_ms, latest_ms: done_ms })
    }

    #[test]
    fn times_are_short_and_are_read_back() {
        for (seconds, text) in
            [(0, "0s"), (59, "59s"), (61, "1m1s"), (3600, "1h"), (4830, "1h20m"), (90_000, "1d1h"), (86_460, "1d")]
        {
            assert_eq!(time_text(seconds), text);
            assert!(parse_time(text).unwrap().abs_diff(seconds) <= seconds / 24, "{text}");
        }
        for text in ["", "h", "1", "1x", "1h20", "99999999999999999999s", "9999999999999999d", "1ä"] {
            assert_eq!(parse_time(text), None, "{text}");
        }
    }

    #[test]
    fn progress_is_published_in_steps_and_the_time_left_when_it_has_changed_by_a_quarter() {
        let mut status = running();
        let mut publish = |percent, left_s, now_s| {
            let report = TaskProgress { percent, forecast: done_in(at(now_s), left_s), ..TaskProgress::default() };
            report.publish(&mut status, State::Running, at(now_s));
            (status.progress.clone().unwrap_or_default(), status.time_left.clone().unwrap_or_default())
        };
        let pair = |progress: &str, left: &str| (progress.to_owned(), left.to_owned());
        assert_eq!(publish(Some(40), 1000, 0), pair("40%", "16m40s"));
        assert_eq!(publish(Some(44), 800, 200), pair("40%", "16m40s"), "nothing that is worth a write");
        assert_eq!(publish(Some(45), 700, 300), pair("45%", "11m40s"));
        assert_eq!(publish(None, 700, 300), pair("45%", "11m40s"), "an agent that is silent takes nothing back");
        assert_eq!(publish(Some(20), 3000, 300), pair("20%", "50m"), "a job that has started again");
    }

    #[test]
    fn writes_are_few_over_a_whole_run() {
        let (mut status, length_s, mut writes) = (running(), 36_000, 0);
        for now_s in (0..length_s).step_by(10) {
            let before = status.clone();
            let report = TaskProgress {
                percent: Some((now_s * 100 / length_s) as u32),
                forecast: done_in(at(now_s), length_s - now_s),
                ..TaskProgress::default()
            };
            report.publish(&mut status, State::Running, at(now_s));
            writes += u32::from(status != before);
        }
        assert!((20..60).contains(&writes), "{writes}");
    }

    #[test]
    fn without_a_forecast_the_first_attempt_is_extrapolated() {
        let report = TaskProgress { percent: Some(25), ..TaskProgress::default() };
        let mut status = running();
        report.publish(&mut status, State::Running, at(100));
        assert_eq!(status.time_left.as_deref(), Some("5m"));
        let mut resumed = running();
        resumed.journal.epoch = 2;
        report.publish(&mut resumed, State::Running, at(100));
        assert_eq!((resumed.progress.as_deref(), resumed.time_left), (Some("25%"), None));
        report.publish(&mut status, State::Restarting, at(101));
        assert_eq!(status.time_left, None, "a job that does not run has no end in sight");
    }

    #[test]
    fn a_definition_without_the_field_is_noticed() {
        let field = StatusField::new("progress");
        field.check(WorkloadKind::TfJob, true, true);
        field.check(WorkloadKind::TfJob, false, false);
        assert!(field.exists());
        field.check(WorkloadKind::TfJob, true, false);
        assert!(!field.exists());
    }

    #[test]
    fn what_an_older_version_wrote_is_replaced() {
        let mut status = TaskJobStatus { progress: Some("3/4 tasks".to_owned()), ..running() };
        TaskProgress::default().publish(&mut status, State::Running, at(1));
        assert_eq!(status.progress, None);
    }

    /// One server, one chief and one worker, and what is reported for them: step and total.
    fn read(reports: &[(&str, Option<u64>, Option<u64>)]) -> TaskProgress {
        let template = json!({"spec": {"containers": [{"name": "tensorflow", "image": "i"}]}});
        let role = || json!({"template": template});
        let job = serde_json::from_value(json!({
            "apiVersion": "kubeflow.org/v1", "kind": "TFJob",
            "metadata": {"name": "dist", "namespace": "team", "uid": "u"},
            "spec": {"tfReplicaSpecs": {"Chief": role(), "PS": role(), "Worker": role()}},
        }));
        let job = TaskJobSnapshot::of_tfjob(&job.unwrap()).unwrap();
        let pod = |name: &str| PodSnapshot {
            uid: name.into(),
            owner: Some("u".into()),
            task: gainshare_kube_api::tasks::TaskId::parse(name),
            ..PodSnapshot::default()
        };
        let pods: Vec<PodSnapshot> = reports.iter().map(|(name, ..)| pod(name)).collect();
        let state = |(name, step, total): &(&str, Option<u64>, Option<u64>)| {
            let progress = Progress { step: *step, total: *total, ..Progress::default() };
            json!({"uid": name, "container": "tensorflow", "category": "growing", "progress": progress})
        };
        let states: Vec<_> = reports.iter().map(state).collect();
        let sync: SyncRequest = serde_json::from_value(json!({
            "node": "n", "epoch": 1, "seq": 1, "seen": 0, "wait_ms": 0, "jobs": states, "beat": {}, "resizes": [],
        }))
        .unwrap();
        let mut agents = Agents::default();
        agents.receive(&sync, Instant::now(), |_| true);
        TaskProgress::read(&agents, &job, &pods)
    }

    #[test]
    fn the_chief_counts_and_then_the_furthest_task() {
        let server = ("ps-0", None, None);
        let percent = |chief, worker| read(&[server, ("chief-0", Some(chief), Some(100)), worker]).percent;
        assert_eq!(percent(30, ("worker-0", Some(90), Some(100))), Some(30));
        assert_eq!(read(&[server, ("chief-0", Some(7), None), ("worker-0", Some(1), Some(3))]).percent, Some(33));
        assert_eq!(read(&[server]).percent, None);
        assert_eq!(percent(900, server), Some(100), "steps beyond the end");
        assert_eq!(read(&[("chief-0", Some(5), Some(0))]).percent, None, "a length of nothing");
        assert_eq!(read(&[server, ("chief-0", Some(7), None), ("worker-0", Some(9), None)]).step, Some(7));
        assert_eq!(read(&[server, ("worker-0", Some(u64::MAX), None)]).step, Some(MOST_STEPS));
    }
}
