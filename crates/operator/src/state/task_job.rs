//! A job of several tasks as it was read: a TrainingJob with `replicaSpecs`, or a Kubeflow TFJob.

use super::workload::{WorkloadKey, WorkloadKind};
use gainshare_core::policy::Preset;
use gainshare_kube_api::deadline::{Deadline, FinishStatus};
use gainshare_kube_api::deadline_input;
use gainshare_kube_api::names::{
    JOB_FINALIZER, JobUid, NamespacedName, POLICY_ANNOTATION, QUEUE_LABEL, REPLICAS_ANNOTATION, STOPPED_ANNOTATION,
    TRAINING_MODE_ANNOTATION,
};
use gainshare_kube_api::tasks::{ReplicaStatus, Role, SpecProblem, TaskCondition, TaskJobSpec, TaskJournal, TaskScale};
use gainshare_kube_api::tfjob::{TfJob, TfJobStatus, annotated_policy};
use gainshare_kube_api::training_job::{JobPolicy, TrainingJob, TrainingJobStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime, ObjectMeta, Time};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A longer name of a queue is no label's value, and is left out.
const LONGEST_QUEUE: usize = 63;

/// What is decided about the sizes of a job's tasks, for the attempt with this epoch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScaleOrder {
    pub(crate) epoch: u32,
    pub(crate) scale: TaskScale,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TaskJobSnapshot {
    pub(crate) key: WorkloadKey,
    pub(crate) uid: JobUid,
    pub(crate) resource_version: String,
    pub(crate) generation: i64,
    pub(crate) created: Timestamp,
    pub(crate) deleting: bool,
    pub(crate) has_finalizer: bool,
    /// The pod that an administrator declares to have stopped.
    pub(crate) declared_stopped: Option<String>,
    /// How many tasks of a role are wanted now ([`REPLICAS_ANNOTATION`]).
    pub(crate) asked: BTreeMap<Role, u32>,
    /// Every gradient is a step ([`TRAINING_MODE_ANNOTATION`]).
    pub(crate) is_async: bool,
    /// When the job must be done. Only TrainingJobs have deadlines.
    pub(crate) deadline: Option<Deadline>,
    /// The deadline as its author wrote it, if it is not after the creation of the job: it is no deadline.
    pub(crate) past_deadline: Option<String>,
    /// Another controller runs the job.
    pub(crate) is_foreign: bool,
    pub(crate) spec: Result<TaskJobSpec, SpecProblem>,
    pub(crate) status: TaskJobStatus,
}

/// What the operator publishes and remembers about a job of tasks, for both kinds.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct TaskJobStatus {
    pub(crate) conditions: Vec<TaskCondition>,
    pub(crate) replicas: BTreeMap<String, ReplicaStatus>,
    pub(crate) start_time: Option<MicroTime>,
    pub(crate) completion_time: Option<MicroTime>,
    pub(crate) message: String,
    /// How many tasks run. Only TFJobs have the field: the message of a TrainingJob has the same number.
    pub(crate) running_tasks: Option<String>,
    /// How much of the training is done, such as `40%`.
    pub(crate) progress: Option<String>,
    /// How long it will take from now on, such as `1h20m`.
    pub(crate) time_left: Option<String>,
    pub(crate) journal: TaskJournal,
    /// The deadline, and the nodes that are needed for it.
    pub(crate) finish: Option<FinishStatus>,
}

impl TaskJobSnapshot {
    pub(crate) fn of_training_job(job: &TrainingJob) -> Option<TaskJobSnapshot> {
        let status = job.status.clone().unwrap_or_default();
        let spec = job.spec.task_job(job.metadata.name.as_deref()?);
        let is_foreign = spec.as_ref().is_ok_and(|spec| spec.options.is_foreign);
        let status = TaskJobStatus::of_training(status);
        let mut snapshot = TaskJobSnapshot::read(WorkloadKind::TaskJob, &job.metadata, spec, is_foreign, status)?;
        let moment = deadline_input::of_training_job(&job.spec, snapshot.created, 0);
        snapshot.deadline = moment.filter(|moment| *moment > snapshot.created).map(|moment| Deadline {
            at_ms: moment.as_millisecond().max(0).unsigned_abs(),
            tolerance_ms: deadline_input::tolerance(&job.spec).as_millis().max(0) as u64,
        });
        let seconds = || job.spec.deadline_seconds.map(|seconds| format!("{seconds} s after the creation"));
        let written = job.spec.deadline.clone().or_else(seconds);
        snapshot.past_deadline = written.filter(|_| snapshot.deadline.is_none());
        Some(snapshot)
    }

    pub(crate) fn of_tfjob(job: &TfJob) -> Option<TaskJobSnapshot> {
        let status = job.status.clone().unwrap_or_default();
        let annotation = job.metadata.annotations.as_ref().and_then(|notes| notes.get(POLICY_ANNOTATION));
        let policy = annotated_policy(annotation.map(String::as_str));
        let spec = job.spec.task_job(job.metadata.name.as_deref()?).and_then(|mut spec| {
            spec.options.policy = policy?;
            Ok(spec)
        });
        let status = TaskJobStatus {
            conditions: status.conditions,
            replicas: status.replica_statuses,
            start_time: status.start_time,
            completion_time: status.completion_time,
            message: status.message,
            running_tasks: status.running_tasks,
            progress: status.progress,
            time_left: status.time_left,
            journal: status.tasks.unwrap_or_default(),
            finish: None,
        };
        TaskJobSnapshot::read(WorkloadKind::TfJob, &job.metadata, spec, job.spec.is_foreign(), status)
    }

    fn read(
        kind: WorkloadKind,
        meta: &ObjectMeta,
        spec: Result<TaskJobSpec, SpecProblem>,
        is_foreign: bool,
        status: TaskJobStatus,
    ) -> Option<TaskJobSnapshot> {
        let note = |key: &str| meta.annotations.as_ref().and_then(|notes| notes.get(key)).cloned();
        let name = NamespacedName::new(meta.namespace.clone()?, meta.name.clone()?);
        let label = meta.labels.as_ref().and_then(|labels| labels.get(QUEUE_LABEL)).cloned();
        let spec = spec.map(|mut spec| {
            spec.options.queue = spec.options.queue.or(label).filter(|queue| queue.len() <= LONGEST_QUEUE);
            spec
        });
        Some(TaskJobSnapshot {
            key: WorkloadKey::new(kind, name),
            uid: meta.uid.clone()?.into(),
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0).unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            has_finalizer: meta.finalizers.iter().flatten().any(|one| one == JOB_FINALIZER),
            declared_stopped: note(STOPPED_ANNOTATION),
            asked: note(REPLICAS_ANNOTATION).map(|text| parse_counts(&text)).unwrap_or_default(),
            is_async: note(TRAINING_MODE_ANNOTATION).is_some_and(|mode| mode.eq_ignore_ascii_case("async")),
            deadline: None,
            past_deadline: None,
            is_foreign,
            spec,
            status,
        })
    }

    /// How many tasks of each role are wanted now: by the annotation, or by the policy `operator`, or by the author.
    pub(crate) fn wanted(&self) -> BTreeMap<Role, u32> {
        let Ok(spec) = &self.spec else { return BTreeMap::new() };
        let mut asked = self.asked.clone();
        let decided = self.status.journal.scale.as_ref().and_then(|scale| scale.workers);
        if let Some(workers) = decided.filter(|_| self.is_scaled()) {
            asked.entry(Role::Worker).or_insert(workers);
        }
        spec.wanted_counts(&asked)
    }

    /// Whether the policy `operator` decides about the sizes of its tasks.
    pub(crate) fn is_scaled(&self) -> bool {
        self.spec.as_ref().is_ok_and(|spec| spec.options.policy.map(JobPolicy::preset) == Some(Preset::Operator))
    }
}

/// Reads `Worker=4,PS=2`. What cannot be read is left out.
fn parse_counts(text: &str) -> BTreeMap<Role, u32> {
    let pair = |part: &str| {
        let (role, count) = part.split_once('=')?;
        Some((Role::parse(role.trim())?, count.trim().parse().ok()?))
    };
    text.split(',').filter_map(pair).collect()
}

impl TaskJobStatus {
    fn of_training(status: TrainingJobStatus) -> TaskJobStatus {
        let condition = |condition: Condition| TaskCondition {
            type_: condition.type_,
            status: condition.status,
            reason: condition.reason,
            message: condition.message,
            last_update_time: None,
            last_transition_time: Some(condition.last_transition_time),
        };
        TaskJobStatus {
            conditions: status.conditions.into_iter().map(condition).collect(),
            replicas: status.replica_statuses,
            start_time: status.start_time,
            completion_time: status.completion_time,
            message: status.message,
            running_tasks: None,
            progress: status.progress,
            time_left: status.time_left,
            journal: status.tasks.unwrap_or_default(),
            finish: status.finish,
        }
    }

    /// The status as the object has it.
    pub(crate) fn to_value(&self, kind: WorkloadKind, generation: i64) -> Value {
        let status = self.clone();
        if kind == WorkloadKind::TfJob {
            return json!(TfJobStatus {
                conditions: status.conditions,
                replica_statuses: status.replicas,
                start_time: status.start_time,
                completion_time: status.completion_time,
                message: status.message,
                running_tasks: status.running_tasks,
                progress: status.progress,
                time_left: status.time_left,
                tasks: Some(status.journal),
            });
        }
        let condition = |condition: TaskCondition| Condition {
            type_: condition.type_,
            status: condition.status,
            reason: condition.reason,
            message: condition.message,
            observed_generation: Some(generation),
            last_transition_time: condition.last_transition_time.unwrap_or(Time(Timestamp::UNIX_EPOCH)),
        };
        json!(TrainingJobStatus {
            observed_generation: Some(generation),
            state: status.journal.state,
            message: status.message,
            conditions: status.conditions.into_iter().map(condition).collect(),
            failures: status.journal.failures,
            start_time: status.start_time,
            completion_time: status.completion_time,
            replica_statuses: status.replicas,
            tasks: Some(status.journal),
            finish: status.finish,
            progress: status.progress,
            time_left: status.time_left,
            ..TrainingJobStatus::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_and_nonsense_is_left_out() {
        assert_eq!(parse_counts("worker=4, PS = 2"), [(Role::Worker, 4), (Role::Ps, 2)].into());
        assert_eq!(parse_counts("worker, =, x=1, worker=-1, chief=99999999999"), BTreeMap::new());
    }

    #[test]
    fn the_queue_is_read_from_the_tfjob_or_from_the_label() {
        let template = json!({"spec": {"containers": [{"name": "tensorflow", "image": "i"}]}});
        let queue = |label: &str, policy: Value| {
            let job: TfJob = serde_json::from_value(json!({
                "metadata": {"name": "a", "namespace": "team", "uid": "u", "labels": {QUEUE_LABEL: label}},
                "spec": {
                    "runPolicy": {"schedulingPolicy": policy},
                    "tfReplicaSpecs": {"Worker": {"replicas": 2, "template": template}},
                },
            }))
            .unwrap();
            TaskJobSnapshot::of_tfjob(&job).unwrap().spec.unwrap().options.queue
        };
        assert_eq!(queue("label", json!({"queue": "policy"})).as_deref(), Some("policy"));
        assert_eq!(queue("label", json!({})).as_deref(), Some("label"));
        assert_eq!(queue("label", json!({"queue": "long".repeat(100)})), None, "no label could name such a queue");
    }

    #[test]
    fn the_policy_of_a_tfjob_is_read_from_its_annotation() {
        let template = json!({"spec": {"containers": [{"name": "tensorflow", "image": "i"}]}});
        let read = |policy: &str| {
            let job: TfJob = serde_json::from_value(json!({
                "metadata": {"name": "a", "namespace": "team", "uid": "u", "annotations": {POLICY_ANNOTATION: policy}},
                "spec": {"tfReplicaSpecs": {"Worker": {"replicas": 2, "template": template}}},
            }))
            .unwrap();
            TaskJobSnapshot::of_tfjob(&job).unwrap()
        };
        assert!(read("operator").is_scaled() && !read("na").is_scaled());
        assert!(read("magic").spec.unwrap_err().to_string().contains("operator"));
    }

    #[test]
    fn a_status_survives_its_way_through_the_object() {
        let mut status = TaskJobStatus { message: "waits".to_owned(), ..TaskJobStatus::default() };
        (status.progress, status.time_left) = (Some("40%".to_owned()), Some("1h20m".to_owned()));
        status.journal.epoch = 3;
        status.journal.nodes.insert("ps-0".to_owned(), "n".into());
        status.replicas.insert("PS".to_owned(), ReplicaStatus { active: 1, ..ReplicaStatus::default() });
        let read: TrainingJobStatus = serde_json::from_value(status.to_value(WorkloadKind::TaskJob, 1)).unwrap();
        assert_eq!(TaskJobStatus::of_training(read), status);
        let read: TfJobStatus = serde_json::from_value(status.to_value(WorkloadKind::TfJob, 1)).unwrap();
        assert_eq!((read.progress, read.time_left), (status.progress, status.time_left));
        assert_eq!((read.tasks, read.replica_statuses), (Some(status.journal), status.replicas));
    }
}
