//! What there is to see of a job and its pods, and what proves that a pod has stopped.
//!
//! **Proof of stop.** A pod has stopped if its kubelet says so (a final phase, no container running: kubelets never take that back), if it was deleted before it had
//! a node (the API server binds no pod that is being deleted), or if its Node object is gone or carries the taint by which administrators
//! declare a node to be off. No other thing is proof: not a pod that is away from a list, not silence, not a forced deletion, which only takes the
//! object away. Each kind of proof stays true once it is, so that it may be read from an old copy; a missing node is the exception, and whoever
//! fills [`NodeState`] has to ask the API server itself.

use gainshare_kube_api::crd::ORIGINAL_ANNOTATION;
use gainshare_kube_api::quantity;
use gainshare_kube_api::training_job::{
    ATTEMPT_FINALIZER, EPOCH_LABEL, JOB_LABEL, PLACE_GATE, TrainingJobSpec, TrainingJobStatus,
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use std::collections::BTreeMap;

/// A grace period is a number that tenants write. A longer one than this is read as this (about a century).
const LONGEST_GRACE_S: i64 = 3_155_760_000;

/// A TrainingJob as it was read.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct JobSnapshot {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) resource_version: String,
    pub(crate) generation: i64,
    pub(crate) created: Timestamp,
    pub(crate) deleting: bool,
    pub(crate) has_finalizer: bool,
    /// The pod that an administrator swears has stopped.
    pub(crate) declared_stopped: Option<String>,
    /// Where somebody wants it to live.
    pub(crate) wanted_node: Option<String>,
    /// Without the template.
    pub(crate) spec: TrainingJobSpec,
    /// As text, because it is needed seldom: taken apart, the templates of a large cluster are most of the manager's memory.
    pub(crate) template: String,
    pub(crate) status: TrainingJobStatus,
}

/// A pod that carries a job's label.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct PodSnapshot {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) resource_version: String,
    /// The job's name (empty for a pod of an adopted Job that is not marked as such yet), and the uid of the object that made it.
    pub(crate) job: String,
    pub(crate) owner: Option<String>,
    pub(crate) epoch: u32,
    pub(crate) created: Timestamp,
    pub(crate) gated: bool,
    pub(crate) has_finalizer: bool,
    pub(crate) node: Option<String>,
    /// When it was asked to end, and when its time for that is over.
    pub(crate) deleted: Option<(Timestamp, Timestamp)>,
    pub(crate) phase: Phase,
    /// A container is text to run.
    pub(crate) running: bool,
    pub(crate) exit: Option<Exit>,
    /// It has, or may have, another share than its own.
    pub(crate) reshaped: bool,
    /// Since when the scheduler finds no place for it, and its words.
    pub(crate) unschedulable: Option<(Timestamp, String)>,
    /// Why a bound pod does not begin.
    pub(crate) waiting: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Phase {
    #[default]
    Pending,
    Running,
    Succeeded,
    Failed,
}

/// How the containers ended: the first that ended badly speaks for the pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Exit {
    pub(crate) code: i32,
    /// `OOMKilled` and the like.
    pub(crate) reason: String,
    pub(crate) message: String,
    pub(crate) finished: Timestamp,
}

/// What is known of a node that a pod is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum NodeState {
    #[default]
    Ready,
    /// Its kubelet does not answer: nothing is known about its pods.
    Silent,
    /// There is no such node, or an administrator declared it to be off.
    Off,
}

pub(crate) type Nodes = BTreeMap<String, NodeState>;

/// How a stop was proven.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    Exited(Exit),
    /// It never had a node, or its kubelet did not take it.
    NeverBegan(String),
    /// Whatever ran there, the node is off.
    NodeOff(String),
    /// An administrator's word.
    Declared,
}

impl PodSnapshot {
    /// A pod of a TrainingJob.
    pub(crate) fn of(pod: &Pod) -> Option<PodSnapshot> {
        let labels = pod.metadata.labels.as_ref()?;
        let epoch = labels.get(EPOCH_LABEL)?.parse().ok()?;
        PodSnapshot::read(pod, labels.get(JOB_LABEL)?.clone(), "TrainingJob", epoch)
    }

    /// A pod of a Job.
    pub(crate) fn of_batch(pod: &Pod) -> Option<PodSnapshot> {
        let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(JOB_LABEL));
        PodSnapshot::read(pod, label.cloned().unwrap_or_default(), "Job", 0)
    }

    fn read(pod: &Pod, job: String, owner_kind: &str, epoch: u32) -> Option<PodSnapshot> {
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
        let grace = jiff::SignedDuration::from_secs(grace_s);
        let owner = meta.owner_references.iter().flatten().find(|owner| owner.kind == owner_kind);
        Some(PodSnapshot {
            namespace: meta.namespace.clone()?,
            name: meta.name.clone()?,
            uid: meta.uid.clone()?,
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            job,
            owner: owner.map(|owner| owner.uid.clone()),
            epoch,
            created: meta.creation_timestamp.as_ref().map(|time| time.0).unwrap_or_default(),
            gated: spec.scheduling_gates.iter().flatten().any(|gate| gate.name == PLACE_GATE),
            has_finalizer: meta.finalizers.iter().flatten().any(|one| one == ATTEMPT_FINALIZER),
            node: spec.node_name.clone(),
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

    pub(crate) fn stop(&self, nodes: &Nodes) -> Option<Stop> {
        if matches!(self.phase, Phase::Succeeded | Phase::Failed) && !self.running {
            return Some(match &self.exit {
                Some(exit) => Stop::Exited(exit.clone()),
                None => Stop::NeverBegan("its node refused it".to_owned()),
            });
        }
        match &self.node {
            None if self.deleted.is_some() => Some(Stop::NeverBegan("it was deleted before it had a node".to_owned())),
            None => None,
            Some(node) => (nodes.get(node) == Some(&NodeState::Off)).then(|| Stop::NodeOff(node.clone())),
        }
    }
}

/// Whether we have a note of a pod's own values, or its kubelet has not put in force what its spec says.
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
    // The pod's phase already leaves out helpers that are killed when the others have ended; then the first bad end counts.
    let bad = ended.iter().find(|exit| exit.code != 0 && phase != Phase::Succeeded);
    let good = ended.iter().find(|exit| exit.code == 0);
    let mut exit = bad.or(good).or(ended.first())?.clone();
    exit.finished = latest;
    // A pod that its kubelet evicted says so as a whole.
    if phase == Phase::Failed
        && let Some(reason) = reason
    {
        exit.reason = reason.to_owned();
        exit.message = message.unwrap_or_default().to_owned();
        exit.code = if exit.code == 0 { 1 } else { exit.code };
    }
    Some(exit)
}
