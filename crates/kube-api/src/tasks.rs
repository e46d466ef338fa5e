//! Jobs of several tasks: one description for a TrainingJob with `replicaSpecs` and for a Kubeflow TFJob.
//!
//! **Problem.** Two custom resources describe the same thing: roles (chief, parameter servers, workers, evaluators)
//! with a number of replicas and a pod template each. Every part of the operator that works on such jobs would need
//! two versions.
//!
//! **How.** [`TaskJobSpec::read`] turns the author's roles into one description and refuses what cannot run, with a
//! sentence that says what to write instead. Everything after it works on the description only.
//!
//! **Terms.** *Task*: one replica of a role, such as worker 2; it has one pod at a time. *Gang*: the tasks that must
//! start together ([`TaskJobSpec::gang_counts`]). *Server*: a task of the role `PS`.
//!
//! **Properties.** A description has at least one task and at most [`MOST_TASKS`]. For every role,
//! `1 <= min <= replicas <= max`.

use crate::names::{NodeName, PodUid};
use crate::node_rules::NodeRules;
use crate::quantity::template_requests;
use crate::run_policy::{Checkpoint, CleanPodPolicy, JobPolicy, State};
use crate::share_policy::{CollectorSpec, Objective};
use k8s_openapi::api::core::v1::{Container, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// The most tasks that a job may have. A larger number is a mistake or an attack.
pub const MOST_TASKS: u32 = 1000;

/// The port on which tasks listen if their author names none; the contract of TFJob.
pub const DEFAULT_PORT: u16 = 2222;
/// The name of that port in a TFJob.
pub const PORT_NAME: &str = "tfjob-port";
/// The container of a TFJob that trains.
pub const TENSORFLOW: &str = "tensorflow";

/// The part that a task has in its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Role {
    Chief,
    /// Another word for the chief, from older TensorFlow; a job has one or the other.
    Master,
    /// A parameter server.
    #[serde(rename = "PS")]
    Ps,
    Worker,
    Evaluator,
}

impl Role {
    pub const ALL: [Role; 5] = [Role::Chief, Role::Master, Role::Ps, Role::Worker, Role::Evaluator];

    /// Reads a role in any letter case.
    pub fn parse(text: &str) -> Option<Role> {
        Role::ALL.into_iter().find(|role| role.name().eq_ignore_ascii_case(text))
    }

    /// As manifests and statuses write it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Chief => "Chief",
            Role::Master => "Master",
            Role::Ps => "PS",
            Role::Worker => "Worker",
            Role::Evaluator => "Evaluator",
        }
    }

    /// As names of pods, labels and `TF_CONFIG` write it.
    pub fn lower(self) -> &'static str {
        match self {
            Role::Chief => "chief",
            Role::Master => "master",
            Role::Ps => "ps",
            Role::Worker => "worker",
            Role::Evaluator => "evaluator",
        }
    }

    pub fn is_chief(self) -> bool {
        matches!(self, Role::Chief | Role::Master)
    }
}

/// One task of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId {
    pub role: Role,
    pub index: u32,
}

impl TaskId {
    pub fn new(role: Role, index: u32) -> TaskId {
        TaskId { role, index }
    }

    /// The name of its pod and of its Service.
    pub fn object_name(self, job: &str) -> String {
        format!("{job}-{self}")
    }

    /// Reads what [`fmt::Display`] writes.
    pub fn parse(text: &str) -> Option<TaskId> {
        let (role, index) = text.rsplit_once('-')?;
        Some(TaskId { role: Role::parse(role)?, index: index.parse().ok()? })
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.role.lower(), self.index)
    }
}

/// What follows when a task of a role fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RestartPolicy {
    /// The kubelet restarts the container, whatever its exit code.
    Always,
    /// The kubelet restarts a container that failed.
    OnFailure,
    /// A failed task fails the job.
    Never,
    /// Exit codes 1 to 127 fail the job, larger ones restart the task.
    ExitCode,
}

impl RestartPolicy {
    fn parse(text: &str) -> Option<RestartPolicy> {
        [RestartPolicy::Always, RestartPolicy::OnFailure, RestartPolicy::Never, RestartPolicy::ExitCode]
            .into_iter()
            .find(|policy| policy.name() == text)
    }

    pub fn name(self) -> &'static str {
        match self {
            RestartPolicy::Always => "Always",
            RestartPolicy::OnFailure => "OnFailure",
            RestartPolicy::Never => "Never",
            RestartPolicy::ExitCode => "ExitCode",
        }
    }

    /// What the pod itself gets: the operator, not the kubelet, reads exit codes.
    pub fn of_pod(self) -> &'static str {
        if self == RestartPolicy::ExitCode { RestartPolicy::Never.name() } else { self.name() }
    }
}

/// When a job without a chief has succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum SuccessPolicy {
    /// Worker 0 has succeeded.
    #[default]
    #[serde(rename = "")]
    FirstWorker,
    /// All workers have succeeded.
    AllWorkers,
}

/// A role, as its author wrote it.
#[derive(Debug, Clone, Copy)]
pub struct RoleInput<'a> {
    pub name: &'a str,
    pub replicas: Option<i32>,
    pub min: Option<i32>,
    pub max: Option<i32>,
    pub template: &'a Value,
    pub restart: Option<&'a str>,
}

/// A role that can run.
#[derive(Debug, Clone, PartialEq)]
pub struct RoleSpec {
    /// The number of tasks that is wanted, the smallest and the largest.
    pub replicas: u32,
    pub min: u32,
    pub max: u32,
    /// The author has set both bounds: the number of tasks may change while the job runs.
    pub scales: bool,
    /// `None`: the operator replaces a failed task, up to the back-off limit.
    pub restart: Option<RestartPolicy>,
    /// The pod template as JSON text: parsed, the templates of a large cluster are most of the operator's memory.
    pub template: String,
    /// What a pod of the role requests: thousandths of a core, and bytes.
    pub requests: (u64, u64),
    /// What a pod of the role demands of its node besides that.
    pub rules: Option<Arc<NodeRules>>,
    pub port: u16,
    /// The container that gets `TF_CONFIG`.
    pub main_container: String,
}

/// Bounds on a run, and what remains of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TaskRunPolicy {
    /// `None`: no bound.
    pub backoff_limit: Option<u32>,
    pub active_deadline_s: Option<i64>,
    pub ttl_s: Option<i64>,
    pub clean: CleanPodPolicy,
    /// For templates that give no grace period.
    pub grace_s: Option<i64>,
    /// For templates that name no priority class.
    pub priority_class: Option<String>,
    /// The number of tasks that is enough to start, if that is fewer than the roles' minimums together.
    pub min_available: Option<u32>,
}

/// Everything about a job of tasks except its roles.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TaskJobOptions {
    /// The job is a Kubeflow TFJob, with its labels, its defaults and its container `tensorflow`.
    pub is_tfjob: bool,
    pub success: SuccessPolicy,
    /// Failed workers are ignored, and tasks do not know all workers.
    pub dynamic_workers: bool,
    pub run: TaskRunPolicy,
    pub suspend: bool,
    /// Another controller runs the job.
    pub is_foreign: bool,
    pub checkpoint: Option<Checkpoint>,
    pub objective: Option<Objective>,
    pub metrics_collector: Option<CollectorSpec>,
    /// `None`: the job's pods get no share policy of their own.
    pub policy: Option<JobPolicy>,
    /// The queue in which the job waits.
    pub queue: Option<String>,
}

/// A job of tasks that can run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TaskJobSpec {
    pub roles: BTreeMap<Role, RoleSpec>,
    pub options: TaskJobOptions,
    /// The same for jobs whose roles have the same templates. Not the same in every version of this program.
    pub program: u64,
}

/// Why a job of tasks cannot run, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecProblem {
    #[error("the role {name:?} is unknown: write Chief (or Master), PS, Worker or Evaluator")]
    UnknownRole { name: String },
    #[error("the role {role} is given twice, in different letter cases: keep one of them", role = role.name())]
    RoleTwice { role: Role },
    #[error("there are both a Chief and a Master, which are the same: keep one of them")]
    ChiefAndMaster,
    #[error("there are {count} replicas of {role}: a job has one chief", role = role.name())]
    TwoChiefs { role: Role, count: u32 },
    #[error("there are no roles with a task: give at least one role one replica")]
    NoTasks,
    #[error("there are {count} tasks: a job may have at most {MOST_TASKS}")]
    TooManyTasks { count: u64 },
    #[error("{role}: replicas is {replicas}: write 1 or more, or leave the role out", role = role.name())]
    NoReplicas { role: Role, replicas: i32 },
    #[error("{role}: minReplicas is {min}: write 1 or more", role = role.name())]
    NoMinimum { role: Role, min: i32 },
    #[error("{role}: maxReplicas ({max}) is less than minReplicas ({min}): exchange them", role = role.name())]
    MaxBelowMin { role: Role, min: u32, max: u32 },
    #[error("{role}: replicas ({replicas}) is not between minReplicas ({min}) and maxReplicas ({max})", role = role.name())]
    OutsideBounds { role: Role, replicas: u32, min: u32, max: u32 },
    #[error("{role} has no template: each role needs the pod template of its tasks", role = role.name())]
    NoTemplate { role: Role },
    #[error("{role}: the template is not a pod template: {error}", role = role.name())]
    NotATemplate { role: Role, error: String },
    #[error("{role}: the template has no containers: a task needs one that trains", role = role.name())]
    NoContainers { role: Role },
    #[error("{role}: no container is named `tensorflow`, which is the one that gets TF_CONFIG: rename yours", role = role.name())]
    NoTensorflow { role: Role },
    #[error("{role}: container {container} has no image", role = role.name())]
    NoImage { role: Role, container: String },
    #[error("{role}: restartPolicy {text:?} is none of Always, OnFailure, Never and ExitCode", role = role.name())]
    RestartPolicy { role: Role, text: String },
    #[error("{field} is {text:?}: write {allowed}")]
    Word { field: &'static str, text: String, allowed: &'static str },
    #[error(
        "the job's name {name:?} is part of host names: use at most {longest} letters a-z, digits and dashes, with a letter first"
    )]
    Name { name: String, longest: usize },
}

impl TaskJobSpec {
    /// Reads the roles of a job. The first problem is the answer, because later ones often follow from it.
    pub fn read<'a>(
        roles: impl IntoIterator<Item = RoleInput<'a>>,
        options: TaskJobOptions,
    ) -> Result<TaskJobSpec, SpecProblem> {
        let mut all: BTreeMap<Role, RoleSpec> = BTreeMap::new();
        for input in roles {
            let unknown = || SpecProblem::UnknownRole { name: input.name.chars().take(63).collect() };
            let role = Role::parse(input.name).ok_or_else(unknown)?;
            // The training operator accepts a role without tasks, and manifests that programs write have such roles.
            if options.is_tfjob && input.replicas == Some(0) {
                continue;
            }
            let spec = read_role(role, &input, options.is_tfjob)?;
            if all.insert(role, spec).is_some() {
                return Err(SpecProblem::RoleTwice { role });
            }
        }
        if all.contains_key(&Role::Chief) && all.contains_key(&Role::Master) {
            return Err(SpecProblem::ChiefAndMaster);
        }
        let count: u64 = all.values().map(|role| u64::from(role.max)).sum();
        if count == 0 {
            return Err(SpecProblem::NoTasks);
        }
        if count > u64::from(MOST_TASKS) {
            return Err(SpecProblem::TooManyTasks { count });
        }
        let mut hasher = DefaultHasher::new();
        all.iter().for_each(|(role, spec)| (role, &spec.template).hash(&mut hasher));
        Ok(TaskJobSpec { roles: all, options, program: hasher.finish() })
    }

    pub fn chief(&self) -> Option<Role> {
        self.roles.keys().copied().find(|role| role.is_chief())
    }

    /// How many tasks of each role are wanted: what the author wrote, or what `asked` says within the author's
    /// bounds.
    pub fn wanted_counts(&self, asked: &BTreeMap<Role, u32>) -> BTreeMap<Role, u32> {
        let count = |(role, spec): (&Role, &RoleSpec)| {
            let count = asked.get(role).copied().unwrap_or(spec.replicas).clamp(spec.min, spec.max);
            (*role, count)
        };
        self.roles.iter().map(count).collect()
    }

    /// The tasks that must start together. With `minAvailable`, that number of them, the chief and the servers first.
    pub fn gang(&self) -> Vec<TaskId> {
        let mut gang: Vec<TaskId> = tasks(&self.gang_counts()).collect();
        if let Some(enough) = self.options.run.min_available {
            gang.truncate(enough.max(1) as usize);
        }
        gang
    }

    /// The least number of tasks of each role.
    pub fn gang_counts(&self) -> BTreeMap<Role, u32> {
        self.roles.iter().map(|(role, spec)| (*role, spec.min)).collect()
    }

    /// Whether the number of workers may change while the job runs.
    pub fn is_elastic(&self) -> bool {
        self.options.dynamic_workers || self.roles.get(&Role::Worker).is_some_and(|workers| workers.min < workers.max)
    }

    /// Whether this task is the one that counts for the outside: the chief, or worker 0 if there is no chief.
    pub fn is_leading_task(&self, task: TaskId) -> bool {
        match self.chief() {
            Some(chief) => task.role == chief,
            None => task.role == Role::Worker && task.index == 0,
        }
    }
}

/// All tasks of these counts, in the order of roles.
pub fn tasks(counts: &BTreeMap<Role, u32>) -> impl Iterator<Item = TaskId> + '_ {
    counts.iter().flat_map(|(role, count)| (0..*count).map(|index| TaskId { role: *role, index }))
}

fn read_role(role: Role, input: &RoleInput<'_>, is_tfjob: bool) -> Result<RoleSpec, SpecProblem> {
    if let Some(min) = input.min.filter(|min| *min < 1) {
        return Err(SpecProblem::NoMinimum { role, min });
    }
    let replicas = input.replicas.or(input.min).unwrap_or(1);
    if replicas < 1 {
        return Err(SpecProblem::NoReplicas { role, replicas });
    }
    let min = input.min.unwrap_or(replicas);
    let max = input.max.unwrap_or(replicas.max(min));
    let (replicas, min, max) = (replicas.unsigned_abs(), min.unsigned_abs(), max.max(0).unsigned_abs());
    if max < min {
        return Err(SpecProblem::MaxBelowMin { role, min, max });
    }
    if !(min..=max).contains(&replicas) {
        return Err(SpecProblem::OutsideBounds { role, replicas, min, max });
    }
    if role.is_chief() && max > 1 {
        return Err(SpecProblem::TwoChiefs { role, count: max });
    }
    if input.template.as_object().is_none_or(|fields| fields.is_empty()) {
        return Err(SpecProblem::NoTemplate { role });
    }
    let template: PodTemplateSpec = serde_json::from_value(input.template.clone())
        .map_err(|error| SpecProblem::NotATemplate { role, error: error.to_string() })?;
    let containers = template.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let named = containers.iter().find(|container| container.name == TENSORFLOW);
    let main = match named.or(containers.first()) {
        None => return Err(SpecProblem::NoContainers { role }),
        Some(_) if is_tfjob && named.is_none() => return Err(SpecProblem::NoTensorflow { role }),
        Some(main) => main,
    };
    if let Some(bare) = containers.iter().find(|one| one.image.as_ref().is_none_or(String::is_empty)) {
        return Err(SpecProblem::NoImage { role, container: bare.name.clone() });
    }
    let restart = match input.restart.filter(|text| !text.is_empty()) {
        None => is_tfjob.then_some(RestartPolicy::Never),
        Some(text) => {
            let unknown = || SpecProblem::RestartPolicy { role, text: text.chars().take(63).collect() };
            Some(RestartPolicy::parse(text).ok_or_else(unknown)?)
        }
    };
    Ok(RoleSpec {
        replicas,
        min,
        max,
        scales: input.min.is_some() && input.max.is_some(),
        restart,
        requests: template_requests(&template),
        rules: NodeRules::of(&template).map(Arc::new),
        port: port(main, is_tfjob),
        main_container: main.name.clone(),
        template: input.template.to_string(),
    })
}

/// The port on which a task listens. A TFJob names it; another job's first port is it.
fn port(container: &Container, is_tfjob: bool) -> u16 {
    let mut ports = container.ports.iter().flatten();
    let named = ports.clone().find(|port| port.name.as_deref() == Some(PORT_NAME));
    let port = named.or_else(|| if is_tfjob { None } else { ports.next() });
    port.and_then(|port| u16::try_from(port.container_port).ok()).filter(|port| *port > 0).unwrap_or(DEFAULT_PORT)
}

/// Whether the names of all tasks can be host names: DNS labels that begin with the job's name.
pub fn check_name(name: &str, job: &TaskJobSpec) -> Result<(), SpecProblem> {
    const LONGEST_LABEL: usize = 63;
    let last = |(role, spec): (&Role, &RoleSpec)| {
        // The number of dynamic workers may grow while the job runs.
        let count = if job.options.dynamic_workers && *role == Role::Worker { MOST_TASKS } else { spec.max };
        TaskId::new(*role, count.saturating_sub(1)).object_name("").len()
    };
    let longest = LONGEST_LABEL.saturating_sub(job.roles.iter().map(last).max().unwrap_or(0));
    let good = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
    let starts = name.starts_with(|letter: char| letter.is_ascii_lowercase());
    if starts && name.len() <= longest && name.chars().all(good) && !name.ends_with('-') {
        return Ok(());
    }
    Err(SpecProblem::Name { name: name.chars().take(LONGEST_LABEL).collect(), longest })
}

/// How many tasks of a role do what.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaStatus {
    /// Tasks whose pod runs.
    #[serde(default)]
    pub active: i32,
    #[serde(default)]
    pub succeeded: i32,
    #[serde(default)]
    pub failed: i32,
    /// The number of tasks that is wanted now.
    #[serde(default)]
    pub desired: i32,
    /// The labels of the role's pods, as `kubectl get pods -l` takes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
}

/// A condition, as TFJobs have them: the last one in the list is the job's state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskCondition {
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_update_time: Option<Time>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
}

/// What the operator must remember about a job of tasks. It is written before it is acted upon.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskJournal {
    #[serde(default)]
    pub state: State,
    /// The attempt of the job as a whole; it grows when all tasks start again.
    #[serde(default)]
    pub epoch: u32,
    /// The gang may run: every task of it has a node.
    #[serde(default)]
    pub admitted: bool,
    /// Where each task is to run, by `role-index`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub nodes: BTreeMap<String, NodeName>,
    /// All pods of this attempt are asked to end; the job goes on with the next attempt.
    #[serde(default)]
    pub restarting: bool,
    /// No pod is made before this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_before: Option<MicroTime>,
    /// The uids of pods that have ended and are replaced.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<PodUid>,
    /// Tasks that failed by themselves.
    #[serde(default)]
    pub failures: u32,
    /// The step that the job had reached when all tasks had to start again, until they have reported a step again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reached_step: Option<u64>,
    /// Steps that restarts of all tasks have cost, as far as tasks report steps: from the last step before a restart
    /// back to the first one that is reported afterwards.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub steps_lost: u64,
    /// Nodes that did not take a task of the job, and until when none is sent there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tried: Vec<NodeName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tried_until: Option<MicroTime>,
    /// Since when the gang has waited for room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_since: Option<MicroTime>,
    /// The job has ended, and its pods and Services are as `cleanPodPolicy` wants them.
    #[serde(default)]
    pub cleaned: bool,
    /// What the policy `operator` has decided about the sizes of the tasks of this attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<TaskScale>,
    /// What each task sends and receives, by `role-index`: bytes per second, smoothed and rounded. The next placement
    /// of the job keeps together what talks much. It outlasts attempts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub traffic: TaskTraffic,
}

/// Bytes per second of tasks, by `role-index`.
pub type TaskTraffic = BTreeMap<String, u64>;

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A decision about the sizes of a job's tasks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TaskScale {
    /// The number of workers that is wanted. Default: what the author wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// The cause in one word, such as `hot-server` or `settled`.
    #[serde(default)]
    pub cause: String,
    /// The cause in one sentence.
    #[serde(default)]
    pub message: String,
    /// What was changed last, and when.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub last_change: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_at: Option<MicroTime>,
}

#[cfg(test)]
#[path = "tasks_tests.rs"]
mod tests;
