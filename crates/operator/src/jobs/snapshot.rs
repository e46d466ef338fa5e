//! Copies of a job, its pods and their nodes, and what proves that a pod has stopped.
//!
//! **Proof of stop.** A pod has stopped if its kubelet reports it (a final phase with no container
//! running; kubelets never take that back), if it was deleted before it had a node (the API server
//! binds no pod that is being deleted), or if its node is off ([`NodeState::Off`]). A node is off
//! if it carries the taint by which administrators declare that, or if its Node object has been
//! missing for [`super::store::MISSING_NODE_IS_OFF_AFTER`]. Nothing else is proof: not a pod that
//! is missing from a list, not a silent node, not a forced deletion, which removes the object only.
//! Each kind of proof stays true, so it may be read from an old copy. A missing node is the
//! exception: the code that fills [`NodeState`] has to ask the API server itself.
//!
//! **Property.** No object makes these functions panic: see `hostile_tests`.

use gainshare_kube_api::names::{
    ATTEMPT_FINALIZER, EPOCH_LABEL, JOB_FINALIZER, JOB_LABEL, NODE_ANNOTATION, NamespacedName, ORIGINAL_ANNOTATION,
    PLACE_GATE, STOPPED_ANNOTATION,
};
use gainshare_kube_api::quantity;
use gainshare_kube_api::training_job::{MOVES_KEPT, TrainingJob, TrainingJobSpec, TrainingJobStatus};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};
use std::collections::BTreeMap;

/// A grace period is a number that tenants write. A longer one than this is read as this (about a
/// century).
const LONGEST_GRACE_S: i64 = 3_155_760_000;

/// The taint by which an administrator declares a node to be off.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

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
    /// The pod that an administrator declares to have stopped.
    pub(crate) declared_stopped: Option<String>,
    /// The node that a person wants it to run on.
    pub(crate) wanted_node: Option<String>,
    /// Without the template.
    pub(crate) spec: TrainingJobSpec,
    /// As text, because it is rarely needed: parsed, the templates of a large cluster are most of
    /// the operator's memory.
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
    /// The job's name (empty for a pod of an adopted Job that is not marked yet), and the uid of
    /// its owner.
    pub(crate) job: String,
    pub(crate) owner: Option<String>,
    pub(crate) epoch: u32,
    pub(crate) created: Timestamp,
    pub(crate) gated: bool,
    pub(crate) has_finalizer: bool,
    pub(crate) node: Option<String>,
    /// When it was asked to end, and when its grace period is over.
    pub(crate) deleted: Option<(Timestamp, Timestamp)>,
    pub(crate) phase: Phase,
    /// A container runs, by its kubelet's report.
    pub(crate) running: bool,
    pub(crate) exit: Option<Exit>,
    /// It has, or may have, other resources than its own.
    pub(crate) reshaped: bool,
    /// Since when the scheduler finds no place for it, and its message.
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

/// How the containers ended: the first failure counts for the pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Exit {
    pub(crate) code: i32,
    /// `OOMKilled` and the like.
    pub(crate) reason: String,
    pub(crate) message: String,
    pub(crate) finished: Timestamp,
}

/// The state of a node that a pod is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum NodeState {
    #[default]
    Ready,
    /// Its kubelet does not answer: nothing is known about its pods.
    Silent,
    /// The Node object is missing, but not for long enough to prove anything: the machine may still
    /// run, cut off.
    Missing,
    /// An administrator declared it to be off, or its object has been missing for long.
    Off,
}

pub(crate) type Nodes = BTreeMap<String, NodeState>;

/// How a stop was proven.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    Exited(Exit),
    /// It never had a node, or its kubelet did not take it.
    NeverBegan(String),
    /// The node is off, and with it everything that ran there.
    NodeOff(String),
    /// An administrator declared the pod to have stopped.
    Declared,
}

impl JobSnapshot {
    pub(crate) fn of(job: &TrainingJob) -> Option<JobSnapshot> {
        let meta = &job.metadata;
        let note = |key: &str| meta.annotations.as_ref().and_then(|notes| notes.get(key)).cloned();
        let mut spec = job.spec.clone();
        let template = std::mem::take(&mut spec.template).to_string();
        let mut status = job.status.clone().unwrap_or_default();
        let surplus = status.last_moves.len().saturating_sub(MOVES_KEPT);
        status.last_moves.drain(..surplus);
        Some(JobSnapshot {
            namespace: meta.namespace.clone()?,
            name: meta.name.clone()?,
            uid: meta.uid.clone()?,
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0).unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            has_finalizer: meta.finalizers.iter().flatten().any(|one| one == JOB_FINALIZER),
            declared_stopped: note(STOPPED_ANNOTATION),
            wanted_node: note(NODE_ANNOTATION),
            spec,
            template,
            status,
        })
    }

    pub(super) fn key(&self) -> NamespacedName {
        NamespacedName::new(&self.namespace, &self.name)
    }
}

impl NodeState {
    pub(super) fn of(node: &Node) -> NodeState {
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
        if taints.into_iter().flatten().any(|taint| taint.key == OUT_OF_SERVICE) {
            return NodeState::Off;
        }
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        // A node without the condition has just come. "False" is a kubelet that reports, "Unknown"
        // one that does not.
        let silent = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "Unknown");
        if silent { NodeState::Silent } else { NodeState::Ready }
    }
}

impl PodSnapshot {
    /// A pod of a TrainingJob.
    pub(crate) fn of(pod: &Pod) -> Option<PodSnapshot> {
        let labels = pod.metadata.labels.as_ref()?;
        let epoch = labels.get(EPOCH_LABEL)?.parse().ok()?;
        PodSnapshot::read(pod, labels.get(JOB_LABEL)?.clone(), "TrainingJob", epoch)
    }

    pub(super) fn job_key(&self) -> NamespacedName {
        NamespacedName::new(&self.namespace, &self.job)
    }

    /// A pod of a `batch/v1` Job.
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
        let grace = SignedDuration::from_secs(grace_s);
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
