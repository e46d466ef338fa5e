//! The facts about a job's pod by which the life of the job is decided: who owns it, whether it runs, how it
//! ended, and what it waits for.
//!
//! Few pods have these facts ([`crate::facts::PodFacts::attempt`]); the operator holds tens of thousands of pods in
//! memory.
//!
//! **Terms.** *Attempt*: one start of a job. *Epoch*: the number of an attempt of a TrainingJob.

use crate::names::{
    ATTEMPT_FINALIZER, EPOCH_LABEL, INDEX_LABEL, JOB_LABEL, JobUid, ORIGINAL_ANNOTATION, PLACE_GATE, ROLE_LABEL,
};
use crate::quantity;
use crate::tasks::{Role, TaskId};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodSpec};

/// A grace period is a number that tenants write. A longer one than this is read as this (about a
/// century).
const LONGEST_GRACE_S: i64 = 3_155_760_000;

/// A pod with this `activeDeadlineSeconds` ends at once, and its object and its logs stay: the operator stops the
/// servers of a finished job so.
pub const ENDING_DEADLINE_S: i64 = 1;

/// What the pod of an attempt is and does.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AttemptFacts {
    /// The uid of the TrainingJob or Job that owns the pod.
    pub owner: Option<JobUid>,
    /// Absent for pods of a `batch/v1` Job, whose attempts have no numbers.
    pub epoch: Option<u32>,
    /// The task, for pods of a job of several tasks.
    pub task: Option<TaskId>,
    /// The job is a Kubeflow TFJob.
    pub of_tfjob: bool,
    /// How often its kubelet has restarted its containers.
    pub restarts: u32,
    /// The pod was asked to end without its object going away ([`ENDING_DEADLINE_S`]).
    pub ending: bool,
    /// By its priority class, as the API server resolved it.
    pub priority: i32,
    pub created: Timestamp,
    /// The operator's scheduling gate is closed.
    pub gated: bool,
    /// The pod selects its nodes, or needs more of them than CPU and memory: not every node with room can run it.
    pub choosy: bool,
    /// The operator's finalizer keeps the object until the pod's end was read.
    pub has_finalizer: bool,
    /// When it was asked to end, and when its grace period is over.
    pub deleted: Option<(Timestamp, Timestamp)>,
    pub phase: Phase,
    /// A container runs, by its kubelet's report.
    pub running: bool,
    pub exit: Option<Exit>,
    /// The pod has, or may have, other resources than its own.
    pub reshaped: bool,
    /// Since when the scheduler finds no place for it, and its message.
    pub unschedulable: Option<(Timestamp, String)>,
    /// Why a bound pod does not begin.
    pub waiting: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    #[default]
    Pending,
    Running,
    Succeeded,
    Failed,
}

/// How the containers ended: the first failure counts for the pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Exit {
    pub code: i32,
    /// `OOMKilled` and the like.
    pub reason: String,
    pub message: String,
    pub finished: Timestamp,
}

impl AttemptFacts {
    /// The facts of a pod that carries a job's label.
    pub fn of(pod: &Pod) -> Option<AttemptFacts> {
        let labels = pod.metadata.labels.as_ref().filter(|labels| labels.contains_key(JOB_LABEL))?;
        let Some(epoch) = labels.get(EPOCH_LABEL) else { return AttemptFacts::of_batch(pod) };
        let epoch = Some(epoch.parse().ok()?);
        let (Some(role), Some(index)) = (labels.get(ROLE_LABEL), labels.get(INDEX_LABEL)) else {
            return AttemptFacts::read(pod, "TrainingJob", epoch);
        };
        let task = TaskId { role: Role::parse(role)?, index: index.parse().ok()? };
        let of_tfjob = pod.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "TFJob");
        let facts = AttemptFacts::read(pod, if of_tfjob { "TFJob" } else { "TrainingJob" }, epoch)?;
        Some(AttemptFacts { task: Some(task), of_tfjob, ..facts })
    }

    /// The facts of a pod of a `batch/v1` Job, with or without the label.
    pub fn of_batch(pod: &Pod) -> Option<AttemptFacts> {
        AttemptFacts::read(pod, "Job", None)
    }

    /// Corrects the time since which the scheduler refuses the pod. The API keeps the time at which a pod became "not
    /// scheduled", which for a gated pod is its creation. `before` is what was known about the pod until `now`.
    pub fn date_refusal(&mut self, before: &AttemptFacts, now: Timestamp) {
        let Some((since, _)) = &mut self.unschedulable else { return };
        let first_seen = before.unschedulable.as_ref().map_or(now, |(since, _)| *since);
        *since = first_seen.max(*since);
    }

    fn read(pod: &Pod, owner_kind: &str, epoch: Option<u32>) -> Option<AttemptFacts> {
        let meta = &pod.metadata;
        let (spec, status) = (pod.spec.as_ref()?, pod.status.clone().unwrap_or_default());
        let statuses: Vec<&ContainerStatus> =
            [&status.container_statuses, &status.init_container_statuses].into_iter().flatten().flatten().collect();
        let state_of = |status: &ContainerStatus| status.state.clone().unwrap_or_default();
        let condition =
            status.conditions.iter().flatten().find(|c| {
                c.type_ == "PodScheduled" && c.status == "False" && c.reason.as_deref() == Some("Unschedulable")
            });
        let phase = match status.phase.as_deref() {
            Some("Running") => Phase::Running,
            Some("Succeeded") => Phase::Succeeded,
            Some("Failed") => Phase::Failed,
            _ => Phase::Pending,
        };
        let grace_s = meta.deletion_grace_period_seconds.unwrap_or_default().clamp(0, LONGEST_GRACE_S);
        let grace = SignedDuration::from_secs(grace_s);
        let owner = meta.owner_references.iter().flatten().find(|owner| owner.kind == owner_kind);
        Some(AttemptFacts {
            owner: owner.map(|owner| owner.uid.as_str().into()),
            epoch,
            task: None,
            of_tfjob: false,
            restarts: statuses.iter().fold(0, |sum, one| sum.saturating_add(one.restart_count.max(0).unsigned_abs())),
            ending: spec.active_deadline_seconds == Some(ENDING_DEADLINE_S),
            priority: spec.priority.unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0).unwrap_or_default(),
            gated: spec.scheduling_gates.iter().flatten().any(|gate| gate.name == PLACE_GATE),
            choosy: is_choosy(spec),
            has_finalizer: meta.finalizers.iter().flatten().any(|one| one == ATTEMPT_FINALIZER),
            deleted: meta.deletion_timestamp.as_ref().map(|time| {
                let asked = time.0.saturating_sub(grace).unwrap_or(time.0);
                (asked, time.0)
            }),
            phase,
            running: statuses.iter().any(|status| state_of(status).running.is_some()),
            exit: exit(&statuses, phase, status.reason.as_deref(), status.message.as_deref()),
            reshaped: is_reshaped(pod),
            unschedulable: condition.map(|c| {
                let since = c.last_transition_time.as_ref().map(|time| time.0).unwrap_or_default();
                (since, c.message.clone().unwrap_or_default())
            }),
            waiting: statuses.iter().find_map(|status| {
                let waiting = state_of(status).waiting?;
                let reason =
                    waiting.reason.filter(|reason| reason != "ContainerCreating" && reason != "PodInitializing")?;
                Some(format!("{reason}: {}", waiting.message.unwrap_or_default()))
            }),
        })
    }
}

/// Whether the author has restricted the nodes on which the pod can run. The operator's own choice of a node is a
/// field (`matchFields`), and does not count.
fn is_choosy(spec: &PodSpec) -> bool {
    let selects = spec.node_selector.as_ref().is_some_and(|labels| !labels.is_empty());
    let affinity = spec.affinity.as_ref();
    let required = affinity.and_then(|affinity| {
        affinity.node_affinity.as_ref()?.required_during_scheduling_ignored_during_execution.as_ref()
    });
    let mut terms = required.into_iter().flat_map(|required| &required.node_selector_terms);
    let by_label = terms.any(|term| term.match_expressions.as_ref().is_some_and(|all| !all.is_empty()));
    let other_resources = spec.containers.iter().chain(spec.init_containers.iter().flatten()).any(|container| {
        let requests = container.resources.iter().flat_map(|resources| resources.requests.iter().flatten());
        requests.into_iter().any(|(name, _)| !matches!(name.as_str(), "cpu" | "memory"))
    });
    selects || by_label || other_resources || spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty())
}

/// Whether the pod carries an annotation with its own values, or its kubelet has not applied its
/// spec yet.
fn is_reshaped(pod: &Pod) -> bool {
    let noted = pod.metadata.annotations.as_ref().is_some_and(|notes| notes.contains_key(ORIGINAL_ANNOTATION));
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let in_force = |status: &ContainerStatus| {
        let container = pod.spec.iter().flat_map(|spec| &spec.containers).find(|one| one.name == status.name);
        let (Some(wanted), Some(actual)) = (container.and_then(|one| one.resources.as_ref()), &status.resources) else {
            return true;
        };
        quantity::resources(Some(wanted)).requests.cpu_milli == quantity::resources(Some(actual)).requests.cpu_milli
    };
    noted || !statuses.into_iter().all(in_force)
}

fn exit(statuses: &[&ContainerStatus], phase: Phase, reason: Option<&str>, message: Option<&str>) -> Option<Exit> {
    let ended = statuses.iter().filter_map(|status| status.state.clone()?.terminated);
    let ended: Vec<Exit> = ended
        .map(|end| Exit {
            code: end.exit_code,
            reason: end.reason.unwrap_or_default(),
            message: end.message.unwrap_or_default(),
            finished: end.finished_at.map(|time| time.0).unwrap_or_default(),
        })
        .collect();
    let latest = ended.iter().map(|exit| exit.finished).max()?;
    // The pod's phase already leaves out sidecars that are killed when the others have ended; then
    // the first failure counts.
    let bad = ended.iter().find(|exit| exit.code != 0 && phase != Phase::Succeeded);
    let good = ended.iter().find(|exit| exit.code == 0);
    let mut exit = bad.or(good).or(ended.first())?.clone();
    exit.finished = latest;
    // An evicted pod has the reason in its own status.
    if phase == Phase::Failed
        && let Some(reason) = reason
    {
        exit.reason = reason.to_owned();
        exit.message = message.unwrap_or_default().to_owned();
        exit.code = if exit.code == 0 { 1 } else { exit.code };
    }
    Some(exit)
}
