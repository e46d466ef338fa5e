//! Copies of a job, its pods and their nodes, and what proves that a pod has stopped.
//!
//! **Proof of stop.** A pod has stopped if its kubelet reports it (a final phase with no container
//! running; kubelets never take that back), if it was deleted before it had a node (the API server
//! binds no pod that is being deleted), or if its node is off ([`NodeState::Off`]). A node is off
//! if it carries the taint by which administrators declare that, or if its Node object has been
//! missing for [`super::nodes::MISSING_NODE_IS_OFF_AFTER`]. Nothing else is proof: not a pod that
//! is missing from a list, not a silent node, not a forced deletion, which removes the object only.
//! Each kind of proof stays true, so it may be read from an old copy. A missing node is the
//! exception: the code that fills [`NodeState`] has to ask the API server itself.
//!
//! **Property.** No object makes these functions panic: see `crate::jobs::hostile_tests`.

use gainshare_kube_api::attempt::AttemptFacts;
pub(crate) use gainshare_kube_api::attempt::{Exit, Phase};
pub(crate) use gainshare_kube_api::bounds::NodeState;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{
    JOB_FINALIZER, JOB_LABEL, JobUid, NODE_ANNOTATION, NamespacedName, NodeName, PodUid, STOPPED_ANNOTATION,
};
use gainshare_kube_api::tasks::TaskId;
use gainshare_kube_api::training_job::{MOVES_KEPT, TrainingJob, TrainingJobSpec, TrainingJobStatus};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;

/// A TrainingJob as it was read.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct JobSnapshot {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: JobUid,
    pub(crate) resource_version: String,
    pub(crate) generation: i64,
    pub(crate) created: Timestamp,
    pub(crate) deleting: bool,
    pub(crate) has_finalizer: bool,
    /// The pod that an administrator declares to have stopped.
    pub(crate) declared_stopped: Option<String>,
    /// The node that a person wants it to run on.
    pub(crate) wanted_node: Option<NodeName>,
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
    pub(crate) uid: PodUid,
    pub(crate) resource_version: String,
    /// The job's name (empty for a pod of an adopted Job that is not marked yet), and the uid of
    /// its owner.
    pub(crate) job: String,
    pub(crate) owner: Option<JobUid>,
    pub(crate) epoch: u32,
    /// The task, for pods of a job of several tasks.
    pub(crate) task: Option<TaskId>,
    /// How often its kubelet has restarted its containers.
    pub(crate) restarts: u32,
    /// The pod was asked to end, and its object stays.
    pub(crate) ending: bool,
    pub(crate) created: Timestamp,
    pub(crate) gated: bool,
    pub(crate) has_finalizer: bool,
    pub(crate) node: Option<NodeName>,
    /// When it was asked to end, and when its grace period is over.
    pub(crate) deleted: Option<(Timestamp, Timestamp)>,
    pub(crate) phase: Phase,
    /// A container runs, by its kubelet's report.
    pub(crate) running: bool,
    pub(crate) exit: Option<Exit>,
    /// The pod has, or may have, other resources than its own.
    pub(crate) reshaped: bool,
    /// Since when the scheduler finds no place for it, and its message.
    pub(crate) unschedulable: Option<(Timestamp, String)>,
    /// Why a bound pod does not begin.
    pub(crate) waiting: Option<String>,
}

pub(crate) type Nodes = BTreeMap<NodeName, NodeState>;

/// How a stop was proven.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    Exited(Exit),
    /// The pod never had a node, or its kubelet did not take it.
    NeverBegan(String),
    /// The node is off, and with it everything that ran there.
    NodeOff(NodeName),
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
            uid: meta.uid.clone()?.into(),
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0).unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            has_finalizer: meta.finalizers.iter().flatten().any(|one| one == JOB_FINALIZER),
            declared_stopped: note(STOPPED_ANNOTATION),
            wanted_node: note(NODE_ANNOTATION).map(NodeName::from),
            spec,
            template,
            status,
        })
    }

    pub(crate) fn key(&self) -> NamespacedName {
        NamespacedName::new(&self.namespace, &self.name)
    }
}

impl PodSnapshot {
    /// A pod of a TrainingJob, as the API server answered.
    pub(crate) fn of(pod: &Pod) -> Option<PodSnapshot> {
        let facts = PodFacts::of(pod)?;
        facts.attempt.as_ref().filter(|attempt| attempt.epoch.is_some())?;
        PodSnapshot::of_facts(&facts)
    }

    /// A pod of a `batch/v1` Job, as the API server answered.
    pub(crate) fn of_batch(pod: &Pod) -> Option<PodSnapshot> {
        let mut facts = PodFacts::of(pod)?;
        facts.attempt = Some(Box::new(AttemptFacts::of_batch(pod)?));
        PodSnapshot::of_facts(&facts)
    }

    /// A job's pod, as the cache has it.
    pub(crate) fn of_facts(pod: &PodFacts) -> Option<PodSnapshot> {
        let attempt = AttemptFacts::clone(pod.attempt.as_ref()?);
        Some(PodSnapshot {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            resource_version: pod.resource_version.clone(),
            job: pod.labels.get(JOB_LABEL).cloned().unwrap_or_default(),
            owner: attempt.owner,
            epoch: attempt.epoch.unwrap_or_default(),
            task: attempt.task,
            restarts: attempt.restarts,
            ending: attempt.ending,
            created: attempt.created,
            gated: attempt.gated,
            has_finalizer: attempt.has_finalizer,
            node: pod.node.clone(),
            deleted: attempt.deleted,
            phase: attempt.phase,
            running: attempt.running,
            exit: attempt.exit,
            reshaped: attempt.reshaped,
            unschedulable: attempt.unschedulable,
            waiting: attempt.waiting,
        })
    }

    /// The proof that the pod has stopped, if there is one.
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

/// Versions of one object are numbers that only grow, as Kubernetes 1.35 promises.
pub(crate) fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}
