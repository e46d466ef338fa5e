//! The custom resource `TrainingJob`: one training run that may be saved, moved to another node,
//! and resumed there.
//!
//! A run is a sequence of *attempts*, each one pod (or one pod per task, with `replicaSpecs`),
//! numbered by an *epoch* that only grows. The controller writes to the status what it intends before
//! it acts, so that the next leader continues from there after a crash. Field names follow related
//! projects: `suspend`, `managedBy` and `runPolicy` as in Kubeflow, `objective` and `metricsCollector`
//! as in Katib.
//!
//! The template is kept as the author wrote it. Fields that we do not know reach the API server
//! unchanged, and a mistake in it makes one job fail with a sentence; the controller's watch goes
//! on.
#![allow(clippy::duplicated_attributes, reason = "every printed column has a type, and many have the same")]
#![allow(unreachable_pub, reason = "the schema macro makes private copies of public types")]

use crate::aim::AimKind;
use crate::deadline::FinishStatus;
use crate::names::{CONTROLLER, NodeName, PodUid};
use crate::placement_reason::PlacementReason;
pub use crate::run_policy::{Checkpoint, CleanPodPolicy, JobPolicy, RunPolicy, State};
use crate::share_policy::{CollectorSpec, Objective};
pub use crate::specon_marks::SpeconMarks;
use crate::tasks::{
    ReplicaStatus, RestartPolicy, RoleInput, SpecProblem, SuccessPolicy, TaskJobOptions, TaskJobSpec, TaskJournal,
    TaskRunPolicy, check_name,
};
use gainshare_core::view::Marks;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The number of moves that are kept in a job's status.
pub const MOVES_KEPT: usize = 10;

/// A training run that Gainshare starts, watches, and moves to where the cluster gains most.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[kube(
    group = "gainshare.dev",
    version = "v1alpha1",
    kind = "TrainingJob",
    plural = "trainingjobs",
    shortname = "tj",
    category = "gainshare",
    namespaced,
    status = "TrainingJobStatus",
    derive = "PartialEq",
    doc = "A training run that is started, watched, and moved to where the cluster gains most.",
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.attempt.node"),
    printcolumn(
        name = "Attempt",
        type_ = "integer",
        json_path = ".status.attempt.epoch",
        description = "How many pods it has had, this one included"
    ),
    printcolumn(name = "Category", type_ = "string", json_path = ".status.category"),
    printcolumn(
        name = "Progress",
        type_ = "string",
        json_path = ".status.progress",
        description = "How much of the training is done"
    ),
    printcolumn(
        name = "Time Left",
        type_ = "string",
        json_path = ".status.timeLeft",
        description = "How long a job of several tasks will take from now on"
    ),
    printcolumn(
        name = "Done",
        type_ = "string",
        json_path = ".status.finish.predicted",
        description = "When it will be done, as predicted"
    ),
    printcolumn(
        name = "Deadline",
        type_ = "string",
        json_path = ".status.finish.standing",
        description = "Whether it will be done in time",
        priority = "1"
    ),
    printcolumn(name = "Moves", type_ = "integer", json_path = ".status.moves"),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", priority = "1"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("!has(oldSelf.managedBy) && !has(self.managedBy) || has(oldSelf.managedBy) && has(self.managedBy) && oldSelf.managedBy == self.managedBy")
        .message("managedBy cannot change: delete the job and create it again for another controller"),
    validation = Rule::new("has(self.template) != (has(self.replicaSpecs) && size(self.replicaSpecs) > 0)")
        .message("write exactly one of spec.template (one pod) and spec.replicaSpecs (several tasks)"),
    validation = Rule::new("!has(oldSelf.template) && !has(self.template) || has(oldSelf.template) && has(self.template) && oldSelf.template == self.template")
        .message("template cannot change while attempts may run from it: create a new TrainingJob"),
    validation = Rule::new("!(has(self.deadline) && has(self.deadlineSeconds))")
        .message("give deadline (a moment) or deadlineSeconds (counted from the creation), not both"),
    validation = Rule::new("!has(self.aim) || !has(self.policy) || self.policy == 'gainshare'")
        .message("aim belongs to the policy gainshare: leave it out, or choose that policy"),
    validation = Rule::new("!has(self.deadlineTolerance) || has(self.deadline) || has(self.deadlineSeconds)")
        .message("deadlineTolerance needs a deadline or deadlineSeconds")
)]
pub struct TrainingJobSpec {
    /// The pod that trains. Its restartPolicy is Never, whatever is written: we restart.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    #[schemars(schema_with = "any_object")]
    pub template: serde_json::Value,
    /// The tasks of a distributed job, by role: Chief (or Master), PS, Worker, Evaluator, in any letter case.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 5))]
    pub replica_specs: BTreeMap<String, ReplicaSpec>,
    /// When a distributed job without a chief has succeeded: worker 0 has, or `AllWorkers` have.
    #[serde(default, skip_serializing_if = "is_default")]
    pub success_policy: SuccessPolicy,
    /// Failed workers are ignored, and tasks get a sparse TF_CONFIG, so that workers may come and go.
    #[serde(default, skip_serializing_if = "is_default")]
    pub enable_dynamic_worker: bool,
    /// The metric to follow. Default: chosen from the output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective: Option<Objective>,
    /// How progress is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics_collector: Option<CollectorSpec>,
    /// Where the job keeps what it needs to resume. Without it the job is never moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,
    /// The policy that decides where it runs: `gainshare`, one of the papers, or `na` (the
    /// cluster's own scheduler).
    #[serde(default)]
    pub policy: JobPolicy,
    /// What comes as early as possible, in the mean over jobs: their end (`finish`), or nine tenths of their
    /// improvement (`quality`). Jobs of both aims on one node do not share with each other (gainshare; `finish` if
    /// left out).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aim: Option<AimKind>,
    /// Saves and stops the job until this is false again.
    #[serde(default)]
    pub suspend: bool,
    /// The controller that runs the job, if it is not Gainshare's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub managed_by: Option<String>,
    #[serde(default)]
    pub run_policy: RunPolicy,
    /// When the job must be done, such as 2026-03-01T18:00:00+01:00. The time for which the job is suspended
    /// is added. The job goes on after a deadline that it missed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = Rule::new("self.matches('^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$')")
        .message("deadline is a moment with its time zone, such as 2026-03-01T18:00:00+01:00"))]
    pub deadline: Option<String>,
    /// The same as seconds from the creation of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 315360000").message("deadlineSeconds lies between 1 and 315360000 (ten years)"))]
    pub deadline_seconds: Option<i64>,
    /// The lateness that is tolerated, such as 15m. Default: none, the deadline is strict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 20))]
    #[x_kube(validation = Rule::new("self.matches('^([0-9]+(ms|s|m|h))+$')").message("deadlineTolerance is a time with a unit, such as 15m or 1h30m"))]
    pub deadline_tolerance: Option<String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

pub(crate) fn any_object(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "description": "A pod template: metadata (labels, annotations) and spec.",
        "x-kubernetes-preserve-unknown-fields": true,
    })
}

/// The tasks of one role.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaSpec {
    /// How many tasks; `minReplicas` if left out, or 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Smallest number of tasks, with which the job starts. Default: `replicas`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_replicas: Option<i32>,
    /// Largest number of tasks. Default: `replicas`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_replicas: Option<i32>,
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    #[schemars(schema_with = "any_object")]
    pub template: serde_json::Value,
    /// If left out, a failed task is replaced, and a failed server restarts the job as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<RestartPolicy>,
}

impl TrainingJobSpec {
    /// Whether the job has several tasks.
    pub fn has_tasks(&self) -> bool {
        !self.replica_specs.is_empty()
    }

    /// The description of a job of several tasks, or why it cannot run.
    pub fn task_job(&self, name: &str) -> Result<TaskJobSpec, SpecProblem> {
        let run = &self.run_policy;
        let options = TaskJobOptions {
            is_tfjob: false,
            success: self.success_policy,
            dynamic_workers: self.enable_dynamic_worker,
            run: TaskRunPolicy {
                backoff_limit: Some(run.backoff_limit.max(0).unsigned_abs()),
                active_deadline_s: run.active_deadline_seconds,
                ttl_s: run.ttl_seconds_after_finished,
                clean: run.clean_pod_policy,
                grace_s: Some(run.termination_grace_period_seconds),
                priority_class: None,
                min_available: None,
            },
            suspend: self.suspend,
            is_foreign: self.managed_by.as_deref().is_some_and(|name| name != CONTROLLER),
            checkpoint: self.checkpoint.clone(),
            objective: self.objective.clone(),
            metrics_collector: self.metrics_collector.clone(),
            policy: Some(self.policy),
            queue: None,
        };
        let roles = self.replica_specs.iter().map(|(name, role)| RoleInput {
            name,
            replicas: role.replicas,
            min: role.min_replicas,
            max: role.max_replicas,
            template: &role.template,
            restart: role.restart_policy.map(RestartPolicy::name),
        });
        let job = TaskJobSpec::read(roles, options)?;
        check_name(name, &job)?;
        Ok(job)
    }
}

/// The controller's journal and what it publishes. Everything here is written before it is acted
/// upon.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrainingJobStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The state, in one word.
    #[serde(default)]
    pub state: State,
    /// Why, in one sentence.
    #[serde(default)]
    pub message: String,
    /// `Created`, `Running`, `Suspended`, `Migrating`, `Succeeded`, `Failed`; `DeadlineAtRisk` of
    /// jobs with a deadline; and `ReconcileFailed`
    /// while the operator cannot work on the job because of an error of its own.
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    #[serde(default)]
    pub conditions: Vec<Condition>,
    /// The pod of now, or the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<Attempt>,
    /// A move under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    /// Moves that were carried out.
    #[serde(default)]
    pub moves: u32,
    /// The last few, and those that came to nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_moves: Vec<Move>,
    /// Attempts that failed by themselves.
    #[serde(default)]
    pub failures: u32,
    /// Why the job is not moved any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmovable: Option<String>,
    /// What was done with the job and is not done again, under policy `specon` and for its deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub specon: Option<SpeconMarks>,
    /// `growing`, `watching` or `converged`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub category: Option<String>,
    /// The job's part of what the jobs of its node share, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_percent: Option<u32>,
    /// What was last decided about where it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_decision: Option<String>,
    /// The last value of the annotation gainshare.dev/node that was followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_node: Option<NodeName>,
    /// When the first attempt began; a suspension resets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<MicroTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<MicroTime>,
    /// How much of the training is done, such as 40%, where the job reports its steps and their number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<String>,
    /// For a job of several tasks: how long the training will take from now on, such as 1h20m. It is published again
    /// when it has changed by a quarter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_left: Option<String>,
    /// For a job of several tasks: how many of each role run or have ended.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub replica_statuses: BTreeMap<String, ReplicaStatus>,
    /// For a job of several tasks: the operator's journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskJournal>,
    /// When it will be done, and how its deadline stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<FinishStatus>,
}

/// One pod of the job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// Grows with every attempt.
    pub epoch: u32,
    /// The pod's name.
    pub pod: String,
    /// The pod whose gate may be opened; no other pod of the job ever runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<PodUid>,
    /// Where it is to run, or runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeName>,
    /// Whether the node was chosen by us (the pod is pinned to it) or left to the cluster's
    /// scheduler.
    #[serde(default)]
    pub pinned: bool,
    /// When it was decided on, and not before when it may begin (after a failure).
    pub since: MicroTime,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_before: Option<MicroTime>,
    /// When its containers began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<MicroTime>,
    /// Why the attempt is being stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopping: Option<StopReason>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopping_since: Option<MicroTime>,
    /// How the attempt has stopped, once that is proven.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// Nodes that did not take it, or its forerunners that did not begin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tried: Vec<NodeName>,
}

/// Why an attempt is asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StopReason {
    Migrate,
    /// The node cannot take it.
    Replace,
    Suspend,
    Deadline,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Migration {
    pub from: NodeName,
    pub to: NodeName,
    /// Why, for programs; absent in what older versions wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<PlacementReason>,
    /// Why, in one sentence.
    #[serde(default, alias = "why")]
    pub message: String,
    pub phase: Phase,
    /// Of the attempt that is stopped.
    pub epoch: u32,
    pub since: MicroTime,
    /// When the stop was proven.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<MicroTime>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// The job was asked to save itself and end.
    Stopping,
    /// The attempt's end is proven; the next attempt is on its way.
    Starting,
}

/// A move that is over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Move {
    pub at: MicroTime,
    pub from: NodeName,
    /// Where it went: `from` again if it had to stay.
    pub to: NodeName,
    /// Why, for programs; absent in what older versions wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<PlacementReason>,
    /// Why, in one sentence.
    #[serde(default, alias = "why")]
    pub message: String,
    /// From being asked to end until the end was proven.
    pub save_s: f64,
    /// From then until it ran again.
    pub restore_s: f64,
}

/// What move rules have done with a job that has these marks stored and made these moves.
pub fn specon_marks(stored: Option<&SpeconMarks>, moves: &[Move], migration: Option<&Migration>) -> Marks {
    let made = moves.iter().map(|made| (made.reason, &made.at));
    SpeconMarks::read(stored, made.chain(migration.map(|under_way| (under_way.reason, &under_way.since))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::CustomResourceExt;
    use serde_json::json;

    fn messages(spec: &serde_json::Value) -> String {
        match TrainingJobSpec::validate_cel(spec, None) {
            Ok(()) => String::new(),
            Err(errors) => format!("{errors:?}"),
        }
    }

    #[test]
    fn good_jobs_pass() {
        let template = json!({"spec": {"containers": [{"name": "main", "image": "i"}]}});
        for spec in [
            json!({"template": template}),
            json!({
                "template": template, "policy": "specon", "suspend": true,
                "checkpoint": {"claimName": "c", "path": "/keep", "subPath": "a/b"},
                "objective": {"metric": "loss", "type": "minimize"},
                "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "All"},
            }),
        ] {
            assert_eq!(messages(&spec), "", "{spec}");
            let read: TrainingJobSpec = serde_json::from_value(spec).unwrap();
            assert_eq!(read.run_policy.termination_grace_period_seconds, 30);
        }
    }

    #[test]
    fn mistakes_are_answered_with_what_to_write_instead() {
        for (more, helps) in [
            (json!({"checkpoint": {"claimName": "c", "path": "keep"}}), "such as /checkpoints"),
            (json!({"checkpoint": {"claimName": "", "path": "/keep"}}), "names a PersistentVolumeClaim"),
            (json!({"checkpoint": {"claimName": "c", "path": "/k", "subPath": "../../etc"}}), "relative and without"),
            (json!({"policy": "flowcon2", "aim": "quality"}), "aim belongs to the policy gainshare"),
            (json!({"runPolicy": {"backoffLimit": -1}}), "between 0 (never try again) and 1000"),
            (json!({"runPolicy": {"terminationGracePeriodSeconds": 0}}), "enough to write a checkpoint"),
        ] {
            let mut spec = json!({"template": {}});
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let said = messages(&spec);
            assert!(said.contains(helps), "{spec} was answered with {said:?}");
        }
    }

    #[test]
    fn moves_of_older_versions_are_read() {
        let old = json!({"at": "2026-01-01T10:00:00.000000Z", "from": "a", "to": "b", "why": "it gains", "saveS": 1.0, "restoreS": 2.0});
        let read: Move = serde_json::from_value(old.clone()).unwrap();
        assert_eq!((read.reason, read.message.as_str()), (None, "it gains"));
        let mut pruned = old;
        pruned.as_object_mut().unwrap().remove("why");
        assert_eq!(serde_json::from_value::<Move>(pruned).unwrap().message, "");
    }

    #[test]
    fn the_schema_has_columns_defaults_and_a_free_template() {
        let crd = serde_json::to_value(TrainingJob::crd()).unwrap();
        let version = &crd["spec"]["versions"][0];
        let columns = version["additionalPrinterColumns"].as_array().unwrap();
        let columns: Vec<&str> = columns.iter().map(|column| column["name"].as_str().unwrap()).collect();
        let shares = ["State", "Node", "Attempt", "Category", "Progress", "Time Left"];
        assert_eq!(columns, [&shares[..], &["Done", "Deadline", "Moves", "Message", "Age"]].concat());
        let status = &version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"];
        assert!(status["progress"].is_object() && status["timeLeft"].is_object());
        let spec = &version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
        assert_eq!(spec["policy"]["default"], "gainshare");
        assert_eq!(spec["template"]["x-kubernetes-preserve-unknown-fields"], true);
        assert_eq!(spec["runPolicy"]["default"]["backoffLimit"], 3);
    }
}
