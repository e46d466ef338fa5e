//! Kubeflow's `TFJob` (kubeflow.org/v1), so that manifests written for the training operator run unchanged.
//!
//! The fields, defaults, labels and conditions are those of the training operator's release 1.9. Words that its
//! webhook checks (`cleanPodPolicy`, `restartPolicy`, `successPolicy`) are plain text here: a wrong one fails its job
//! with a sentence, and the operator's watch goes on.
//!
//! **Differences, on purpose.** Without `cleanPodPolicy` the servers of a finished job are stopped, and their logs
//! stay readable; the training operator lets them run for ever. A server that fails restarts the job as a whole where
//! its restart policy allows a restart, because its state is lost. `activeDeadlineSeconds` begins when the tasks
//! start, and not while the job waits for room.
#![allow(clippy::duplicated_attributes, reason = "every printed column has a type, and many have the same")]
#![allow(unreachable_pub, reason = "the schema macro makes private copies of public types")]

use crate::names::{CONTROLLER, INDEX_LABEL, JOB_LABEL, KUBEFLOW_PREFIX, POLICY_ANNOTATION, QUEUE_LABEL, ROLE_LABEL};
use crate::tasks::{
    PORT_NAME, ReplicaStatus, RoleInput, SpecProblem, SuccessPolicy, TENSORFLOW, TaskCondition, TaskJobOptions,
    TaskJobSpec, TaskJournal, TaskRunPolicy, check_name,
};
use crate::training_job::{
    CleanPodPolicy, JobPolicy, ReplicaSpec, RunPolicy, TrainingJob, TrainingJobSpec, any_object,
};
use gainshare_core::policies::Preset;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The API version, as object references write it.
pub const TFJOB_API_VERSION: &str = "kubeflow.org/v1";
/// The value of `managedBy` that stands for "the operator that serves TFJobs here".
const TRAINING_OPERATOR: &str = "kubeflow.org/training-operator";
/// Where kubectl keeps the manifest that was applied last.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// A TensorFlow job of several tasks.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kubeflow.org",
    version = "v1",
    kind = "TFJob",
    root = "TfJob",
    plural = "tfjobs",
    singular = "tfjob",
    namespaced,
    status = "TfJobStatus",
    derive = "PartialEq",
    doc = "A TensorFlow job of several tasks, as Kubeflow's training operator defined it.",
    scale(
        spec_replicas_path = ".spec.tfReplicaSpecs.Worker.replicas",
        status_replicas_path = ".status.replicaStatuses.Worker.active",
        label_selector_path = ".status.replicaStatuses.Worker.selector"
    ),
    printcolumn(name = "State", type_ = "string", json_path = ".status.conditions[-1:].type"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Tasks", type_ = "string", json_path = ".status.runningTasks"),
    printcolumn(name = "Progress", type_ = "string", json_path = ".status.progress"),
    printcolumn(name = "Time Left", type_ = "string", json_path = ".status.timeLeft")
)]
#[serde(rename_all = "camelCase")]
pub struct TfJobSpec {
    /// Bounds on the run, and what remains of it.
    #[serde(default)]
    pub run_policy: TfRunPolicy,
    /// `AllWorkers`: a job without a chief has succeeded when all workers have; else worker 0 decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub success_policy: Option<String>,
    /// The roles Chief (or Master), PS, Worker and Evaluator, in any letter case.
    #[schemars(extend("maxProperties" = 5))]
    pub tf_replica_specs: BTreeMap<String, TfReplicaSpec>,
    /// Failed workers are ignored, and tasks get a sparse TF_CONFIG, so that workers may come and go.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub enable_dynamic_worker: bool,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TfReplicaSpec {
    /// 1 if left out; a role of 0 replicas is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    #[schemars(schema_with = "any_object")]
    pub template: Value,
    /// `Always`, `OnFailure`, `Never` (if left out) or `ExitCode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
}

#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("!has(oldSelf.managedBy) && !has(self.managedBy) || has(oldSelf.managedBy) && has(self.managedBy) && oldSelf.managedBy == self.managedBy")
        .message("runPolicy.managedBy cannot change: delete the job and create it again for another controller")
)]
pub struct TfRunPolicy {
    /// Which pods go when the job has ended: `None`, those still `Running`, or `All`. If left out, tasks that still
    /// run are stopped, and their pods stay for their logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clean_pod_policy: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds_after_finished: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<i64>,
    /// How often a failed job is tried again. Default: no bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backoff_limit: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling_policy: Option<TfSchedulingPolicy>,
    /// No pod exists while this is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend: Option<bool>,
    /// The controller that runs the job: another one than `kubeflow.org/training-operator` is left to do so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self in ['', 'kubeflow.org/training-operator', 'kueue.x-k8s.io/multikueue', 'gainshare.dev/operator']")
        .message("runPolicy.managedBy is kubeflow.org/training-operator or kueue.x-k8s.io/multikueue, or is left out"))]
    pub managed_by: Option<String>,
}

#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(cel)]
pub struct TfSchedulingPolicy {
    /// The number of tasks that is enough to start. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_available: Option<i32>,
    /// The queue in which the job waits, if the operator has a queue of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("schedulingPolicy.queue cannot change: delete the job and create it again in another queue"))]
    pub queue: Option<String>,
    /// Accepted without effect: the requests of the templates count.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    #[schemars(schema_with = "any_object")]
    pub min_resources: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class: Option<String>,
    /// Accepted without effect: a job waits for as long as it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_timeout_seconds: Option<i32>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TfJobStatus {
    /// `Created`, `Running`, `Restarting`, `Suspended`, `Succeeded`, `Failed`; the last one is the state.
    #[serde(default)]
    pub conditions: Vec<TaskCondition>,
    /// By role.
    #[serde(default)]
    pub replica_statuses: BTreeMap<String, ReplicaStatus>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<MicroTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<MicroTime>,
    /// The state, in one sentence.
    #[serde(default)]
    pub message: String,
    /// How many of the tasks run, or have ended well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_tasks: Option<String>,
    /// How much of the training is done, such as 40%, where a task reports its steps and their number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
    /// How long the training will take from now on, such as 1h20m; published again when it has changed by a quarter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_left: Option<String>,
    /// The operator's journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskJournal>,
}

impl TfJobSpec {
    /// The job's description, or why it cannot run.
    pub fn task_job(&self, name: &str) -> Result<TaskJobSpec, SpecProblem> {
        let run = &self.run_policy;
        let scheduling = run.scheduling_policy.clone().unwrap_or_default();
        let word =
            |field, text: &str, allowed| SpecProblem::Word { field, text: text.chars().take(63).collect(), allowed };
        let clean = match run.clean_pod_policy.as_deref() {
            None | Some("" | "Running") => CleanPodPolicy::Running,
            Some("None") => CleanPodPolicy::None,
            Some("All") => CleanPodPolicy::All,
            Some(text) => return Err(word("runPolicy.cleanPodPolicy", text, "None, Running or All")),
        };
        let success = match self.success_policy.as_deref() {
            None | Some("") => SuccessPolicy::FirstWorker,
            Some("AllWorkers") => SuccessPolicy::AllWorkers,
            Some(text) => return Err(word("successPolicy", text, "AllWorkers, or leave it out")),
        };
        let options = TaskJobOptions {
            is_tfjob: true,
            success,
            dynamic_workers: self.enable_dynamic_worker,
            run: TaskRunPolicy {
                backoff_limit: run.backoff_limit.map(|limit| limit.max(0).unsigned_abs()),
                active_deadline_s: run.active_deadline_seconds,
                ttl_s: run.ttl_seconds_after_finished.map(i64::from),
                clean,
                grace_s: None,
                priority_class: scheduling.priority_class.filter(|name| !name.is_empty()),
                min_available: scheduling.min_available.map(|count| count.max(1).unsigned_abs()),
            },
            suspend: run.suspend == Some(true),
            is_foreign: self.is_foreign(),
            queue: scheduling.queue.filter(|name| !name.is_empty()),
            ..TaskJobOptions::default()
        };
        let roles = self.tf_replica_specs.iter().map(|(name, role)| RoleInput {
            name,
            replicas: role.replicas,
            min: None,
            max: None,
            template: &role.template,
            restart: role.restart_policy.as_deref(),
        });
        let job = TaskJobSpec::read(roles, options)?;
        check_name(name, &job)?;
        Ok(job)
    }

    /// Whether another controller runs the job.
    pub fn is_foreign(&self) -> bool {
        let manager = self.run_policy.managed_by.as_deref().unwrap_or_default();
        !["", TRAINING_OPERATOR, CONTROLLER].contains(&manager)
    }
}

/// The policy that a TFJob names by its annotation; `None` if its tasks keep what their author requested.
pub fn annotated_policy(annotation: Option<&str>) -> Result<Option<JobPolicy>, SpecProblem> {
    match annotation {
        None | Some("na") => Ok(None),
        Some("operator") => Ok(JobPolicy::try_from(Preset::Operator).ok()),
        Some(text) => {
            let text = text.chars().take(63).collect();
            Err(SpecProblem::Word { field: POLICY_ANNOTATION, text, allowed: "operator or na, or leave it out" })
        }
    }
}

/// The same job as a TrainingJob, for clusters where Kubeflow owns the kind TFJob; and sentences about what the
/// TrainingJob does differently.
pub fn to_training_job(job: &TfJob) -> Result<(TrainingJob, Vec<String>), SpecProblem> {
    let name = job.metadata.name.clone().unwrap_or_default();
    let read = job.spec.task_job(&name)?;
    let annotation = job.metadata.annotations.as_ref().and_then(|notes| notes.get(POLICY_ANNOTATION));
    let policy = annotated_policy(annotation.map(String::as_str))?;
    let mut notes = Vec::new();
    let run = &job.spec.run_policy;
    if run.backoff_limit.is_none() {
        notes.push(format!(
            "a TFJob without backoffLimit is restarted for ever; the TrainingJob has {}",
            RunPolicy::default().backoff_limit
        ));
    }
    notes.push(format!(
        "its pods have the labels {JOB_LABEL}, {ROLE_LABEL} and {INDEX_LABEL} in place of {KUBEFLOW_PREFIX}*"
    ));
    if read.options.run.min_available.is_some() {
        notes.push("minAvailable is left out: write minReplicas for a smaller gang".to_owned());
    }
    let roles = job.spec.tf_replica_specs.iter().filter_map(|(name, role)| {
        let key = crate::tasks::Role::parse(name)?;
        let spec = read.roles.get(&key)?;
        let mut template = role.template.clone();
        name_port(&mut template, spec.port);
        if let Some(class) = &read.options.run.priority_class
            && template["spec"]["priorityClassName"].is_null()
        {
            template["spec"]["priorityClassName"] = json!(class);
        }
        let replica =
            ReplicaSpec { replicas: role.replicas, template, restart_policy: spec.restart, ..ReplicaSpec::default() };
        Some((key.name().to_owned(), replica))
    });
    let spec = TrainingJobSpec {
        replica_specs: roles.collect(),
        policy: policy.unwrap_or_default(),
        success_policy: read.options.success,
        enable_dynamic_worker: job.spec.enable_dynamic_worker,
        suspend: read.options.suspend,
        managed_by: run.managed_by.clone().filter(|_| read.options.is_foreign),
        run_policy: RunPolicy {
            backoff_limit: run.backoff_limit.unwrap_or(RunPolicy::default().backoff_limit).clamp(0, 1000),
            active_deadline_seconds: run.active_deadline_seconds,
            ttl_seconds_after_finished: run.ttl_seconds_after_finished.map(i64::from),
            clean_pod_policy: read.options.run.clean,
            ..RunPolicy::default()
        },
        ..TrainingJobSpec::default()
    };
    let mut converted = TrainingJob::new(&name, spec);
    let annotations = job.metadata.annotations.clone().map(|mut notes| {
        // The manifest of the TFJob, as kubectl keeps it, is none of the TrainingJob.
        notes.remove(LAST_APPLIED);
        notes
    });
    converted.metadata = ObjectMeta {
        name: job.metadata.name.clone(),
        namespace: job.metadata.namespace.clone(),
        labels: job.metadata.labels.clone(),
        annotations: annotations.filter(|notes| !notes.is_empty()),
        ..ObjectMeta::default()
    };
    if let Some(queue) = read.options.queue {
        converted.metadata.labels.get_or_insert_default().insert(QUEUE_LABEL.to_owned(), queue);
    }
    Ok((converted, notes))
}

/// Writes down the port of the container that trains. A TrainingJob would otherwise take the first port of that
/// container, which may be one for metrics.
fn name_port(template: &mut Value, port: u16) {
    let containers = template["spec"]["containers"].as_array_mut().into_iter().flatten();
    for container in containers.filter(|container| container["name"] == TENSORFLOW) {
        let is_named = |one: &Value| one["name"] == PORT_NAME;
        match container["ports"].as_array_mut() {
            Some(ports) if ports.iter().any(is_named) => {}
            Some(ports) => ports.push(json!({"name": PORT_NAME, "containerPort": port})),
            None => container["ports"] = json!([{"name": PORT_NAME, "containerPort": port}]),
        }
    }
}

#[cfg(test)]
#[path = "tfjob_tests.rs"]
mod tests;
