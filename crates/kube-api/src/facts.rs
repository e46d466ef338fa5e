//! The facts about a pod that the operator needs, and nothing else: the operator holds tens of thousands
//! of pods in memory.
//!
//! [`PodFacts::of`] reads the API server's object once; everything after that works on facts.
//! [`PodFacts::blocked`] says why a pod cannot be resized, with the remedy.

use crate::attempt::AttemptFacts;
use crate::names::{self, NodeName, PREFIX, PodUid};
use crate::quantity;
use crate::resources::Resources;
use crate::wire::{QosClass, ResizeObstacle, ResizeState};
use k8s_openapi::api::core::v1::{Container, Pod, PodStatus, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Options of a command are shorter, and fewer. In bytes, and words.
const LONGEST_WORD: usize = 200;
const MOST_WORDS: usize = 100;

#[derive(Debug, Clone, PartialEq, Default)]
pub struct PodFacts {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    pub resource_version: String,
    pub generation: i64,
    pub created_ms: Option<u64>,
    pub node: Option<NodeName>,
    pub labels: BTreeMap<String, String>,
    /// Annotations of our domain.
    pub notes: BTreeMap<String, String>,
    pub owners: Vec<Owner>,
    pub class: QosClass,
    pub containers: Vec<ContainerFacts>,
    /// The pod has begun to run, and it is not being deleted.
    pub running: bool,
    /// The pod has a node, and does not run yet.
    pub starting: bool,
    /// The pod has ended well.
    pub succeeded: bool,
    /// The pod has ended, and nobody asked it to.
    pub ended: bool,
    /// The pod takes room on its node: it is bound to one and has not ended.
    pub holds_node: bool,
    /// Made from a file on its node; the API server only shows it.
    pub is_static: bool,
    pub windows: bool,
    /// The pod uses the network of its node, so its traffic cannot be distinguished from that of others.
    pub host_network: bool,
    /// Resources are given for the pod as a whole.
    pub pod_level: bool,
    pub resize: ResizeState,
    /// For pods that carry a job's label, and for pods of a `batch/v1` Job that have a deadline and wait for a node.
    pub attempt: Option<Box<AttemptFacts>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Owner {
    pub api_version: String,
    pub kind: String,
    pub name: String,
    pub uid: String,
    pub controller: bool,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct ContainerFacts {
    pub name: String,
    pub resources: Resources,
    /// As written, so that exactly this can be put back.
    pub written: WrittenResources,
    /// A new CPU value restarts it.
    pub restarts_for_cpu: bool,
    pub started_ms: Option<u64>,
    /// When it began and ended, of pods with a deadline only.
    pub ran_ms: Option<(u64, u64)>,
    /// The pod's command and arguments, of pods with a deadline only: they may name how long the run is.
    pub command: Vec<String>,
    /// The same for containers that run the same program ([`program`]); nothing for one that names no command.
    pub program: Option<u64>,
}

/// Requests and limits as the author wrote them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WrittenResources {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, String>,
}

impl WrittenResources {
    fn of(requirements: Option<&ResourceRequirements>) -> WrittenResources {
        // Only what we may change: other resources (GPUs, ephemeral storage) are never put back by
        // us.
        let copy = |map: Option<&BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>| {
            let ours = map.into_iter().flatten().filter(|(name, _)| matches!(name.as_str(), "cpu" | "memory"));
            ours.map(|(name, quantity)| (name.clone(), quantity.0.clone())).collect()
        };
        WrittenResources {
            requests: copy(requirements.and_then(|r| r.requests.as_ref())),
            limits: copy(requirements.and_then(|r| r.limits.as_ref())),
        }
    }

    pub fn resources(&self) -> Resources {
        let quantities = |map: &BTreeMap<String, String>| {
            let pairs = map.iter().map(|(name, text)| {
                (name.clone(), k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.clone()))
            });
            Some(pairs.collect())
        };
        quantity::resources(Some(&ResourceRequirements {
            requests: quantities(&self.requests),
            limits: quantities(&self.limits),
            claims: None,
        }))
    }
}

/// The annotation that remembers what a pod was. The uid keeps a copied manifest from carrying
/// another pod's past.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Originals {
    pub uid: PodUid,
    pub containers: BTreeMap<String, WrittenResources>,
}

impl PodFacts {
    pub fn of(pod: &Pod) -> Option<PodFacts> {
        let meta = &pod.metadata;
        let spec = pod.spec.as_ref()?;
        let status = pod.status.clone().unwrap_or_default();
        let notes: BTreeMap<String, String> = meta
            .annotations
            .clone()
            .unwrap_or_default()
            .into_iter()
            .filter(|(key, _)| key.starts_with(PREFIX))
            .collect();
        let is_static = meta.annotations.as_ref().is_some_and(|a| a.contains_key("kubernetes.io/config.mirror"));
        let mut containers: Vec<_> = spec.containers.iter().map(|c| ContainerFacts::of(c, &status)).collect();
        if notes.contains_key(names::DEADLINE_ANNOTATION) {
            for (facts, container) in containers.iter_mut().zip(&spec.containers) {
                facts.command = command(container);
                facts.ran_ms = ran_ms(&facts.name, &status);
            }
        }
        let waits_for_deadline = spec.node_name.is_none() && notes.contains_key(names::DEADLINE_ANNOTATION);
        let of_waiting = || AttemptFacts::of_batch(pod).filter(|attempt| waits_for_deadline && attempt.owner.is_some());
        Some(PodFacts {
            uid: meta.uid.clone()?.into(),
            namespace: meta.namespace.clone()?,
            name: meta.name.clone()?,
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created_ms: meta.creation_timestamp.as_ref().map(unix_ms),
            node: spec.node_name.clone().map(NodeName::from),
            labels: meta.labels.clone().unwrap_or_default(),
            notes,
            owners: meta
                .owner_references
                .iter()
                .flatten()
                .map(|owner| Owner {
                    api_version: owner.api_version.clone(),
                    kind: owner.kind.clone(),
                    name: owner.name.clone(),
                    uid: owner.uid.clone(),
                    controller: owner.controller.unwrap_or_default(),
                })
                .collect(),
            class: match status.qos_class.as_deref() {
                Some("Guaranteed") => QosClass::Guaranteed,
                Some("BestEffort") => QosClass::BestEffort,
                _ => QosClass::Burstable,
            },
            containers,
            running: status.phase.as_deref() == Some("Running") && meta.deletion_timestamp.is_none(),
            starting: status.phase.as_deref() == Some("Pending")
                && meta.deletion_timestamp.is_none()
                && spec.node_name.is_some(),
            succeeded: status.phase.as_deref() == Some("Succeeded"),
            ended: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) && meta.deletion_timestamp.is_none(),
            holds_node: spec.node_name.is_some() && !matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            is_static,
            host_network: spec.host_network == Some(true),
            windows: spec.os.as_ref().is_some_and(|os| os.name == "windows"),
            pod_level: spec.resources.is_some(),
            resize: resize_state(&status, meta.generation.unwrap_or_default()),
            attempt: AttemptFacts::of(pod).or_else(of_waiting).map(Box::new),
        })
    }

    pub fn container(&self, name: &str) -> Option<&ContainerFacts> {
        self.containers.iter().find(|container| container.name == name)
    }

    /// The pod's resources before our first change. `None` if there was no change, or if the
    /// annotation is not this pod's or cannot be read.
    pub fn originals(&self) -> Option<Originals> {
        let text = self.notes.get(names::ORIGINAL_ANNOTATION)?;
        serde_json::from_str::<Originals>(text).ok().filter(|originals| originals.uid == self.uid)
    }

    /// The annotation to write before the first change.
    pub fn remember(&self) -> Originals {
        let containers = self.containers.iter().map(|c| (c.name.clone(), c.written.clone())).collect();
        Originals { uid: self.uid.clone(), containers }
    }

    /// Why the container cannot be resized, and what its author could do about it.
    pub fn blocked(&self, container: &str) -> Option<ResizeObstacle> {
        let blocked = |reason: &str, message: String| Some(ResizeObstacle { reason: reason.to_owned(), message });
        let Some(facts) = self.container(container) else {
            let names: Vec<&str> = self.containers.iter().map(|c| c.name.as_str()).collect();
            return blocked(
                "NoSuchContainer",
                format!(
                    "the pod has no container {container}; it has {}: name one of them in the policy",
                    names.join(", ")
                ),
            );
        };
        if self.is_static {
            return blocked(
                "StaticPod",
                "a static pod is changed on its node only: run it as a Deployment or Job".to_owned(),
            );
        }
        if self.windows {
            return blocked("Windows", "Windows pods cannot be resized in place".to_owned());
        }
        if self.pod_level {
            return blocked(
                "PodLevelResources",
                "resources are given for the pod as a whole: give them to its containers instead".to_owned(),
            );
        }
        if self.class == QosClass::BestEffort {
            return blocked(
                "BestEffort",
                format!(
                    "the pod requests nothing, and Kubernetes does not resize such pods: give container {container} a CPU request"
                ),
            );
        }
        if facts.restarts_for_cpu {
            return blocked(
                "RestartContainer",
                format!(
                    "container {container} would be restarted: set its resizePolicy for cpu to NotRequired in the pod's template"
                ),
            );
        }
        if facts.resources.requests.cpu_milli.is_none_or(|milli| milli == 0) {
            return blocked(
                "NoCpuRequest",
                format!(
                    "container {container} requests no CPU, and a request could not be taken away again: give it one in the pod's template"
                ),
            );
        }
        if self.notes.contains_key(names::ORIGINAL_ANNOTATION) && self.originals().is_none() {
            return blocked(
                "UnreadableOriginals",
                format!(
                    "the annotation {} is not this pod's or cannot be read, so nothing could be put back: remove it",
                    names::ORIGINAL_ANNOTATION
                ),
            );
        }
        None
    }
}

impl ContainerFacts {
    fn of(container: &Container, status: &PodStatus) -> ContainerFacts {
        let restarts_for_cpu = container
            .resize_policy
            .iter()
            .flatten()
            .any(|policy| policy.resource_name == "cpu" && policy.restart_policy == "RestartContainer");
        let running = status
            .container_statuses
            .iter()
            .flatten()
            .find(|status| status.name == container.name)
            .and_then(|status| status.state.as_ref()?.running.as_ref()?.started_at.as_ref());
        ContainerFacts {
            name: container.name.clone(),
            resources: quantity::resources(container.resources.as_ref()),
            written: WrittenResources::of(container.resources.as_ref()),
            restarts_for_cpu,
            started_ms: running.map(unix_ms),
            ran_ms: None,
            command: Vec::new(),
            program: program(container),
        }
    }
}

fn unix_ms(time: &Time) -> u64 {
    time.0.as_millisecond().max(0).unsigned_abs()
}

/// When the container of this name began and ended, by its kubelet.
fn ran_ms(container: &str, status: &PodStatus) -> Option<(u64, u64)> {
    let found = status.container_statuses.iter().flatten().find(|status| status.name == container)?;
    let ended = found.state.as_ref()?.terminated.as_ref()?;
    Some((unix_ms(ended.started_at.as_ref()?), unix_ms(ended.finished_at.as_ref()?)))
}

/// Words in names of options that say how long a run is.
const LENGTHS: [&str; 5] = ["epoch", "step", "iter", "round", "batches"];

/// A number for the program of a container: its image and its command, numbers apart that do not say how long the run
/// is. So the runs of a sweep over learning rates are runs of one program, and `--epochs 5` and `--epochs 50` are not.
fn program(container: &Container) -> Option<u64> {
    let is_number = |text: &str| text.parse::<f64>().is_ok();
    let is_length = |name: &str| LENGTHS.iter().any(|length| name.to_ascii_lowercase().contains(length));
    let mut hasher = DefaultHasher::new();
    container.image.hash(&mut hasher);
    let mut words = container.command.iter().flatten().chain(container.args.iter().flatten()).peekable();
    words.peek()?;
    let mut before = "";
    for word in words {
        match word.split_once('=') {
            _ if is_number(word) && !is_length(before) => "#".hash(&mut hasher),
            Some((name, value)) if is_number(value) && !is_length(name) => (name, "#").hash(&mut hasher),
            _ => word.hash(&mut hasher),
        }
        before = word.as_str();
    }
    Some(hasher.finish())
}

/// A container's command and arguments, as far as they are short: a script that stands in them names no options.
fn command(container: &Container) -> Vec<String> {
    let words = container.command.iter().flatten().chain(container.args.iter().flatten());
    words.filter(|word| word.len() <= LONGEST_WORD).take(MOST_WORDS).cloned().collect()
}

/// What the kubelet reports about the pod's present spec. A condition about an older spec is
/// ignored.
fn resize_state(status: &PodStatus, generation: i64) -> ResizeState {
    let about_now = |kind: &str| {
        let found = status.conditions.iter().flatten().find(|c| c.type_ == kind && c.status == "True")?;
        (found.observed_generation == Some(generation)).then_some(found)
    };
    if let Some(pending) = about_now("PodResizePending") {
        let message = pending.message.clone().unwrap_or_default();
        return match pending.reason.as_deref() {
            Some("Infeasible") => ResizeState::Infeasible { message },
            _ => ResizeState::Deferred { message },
        };
    }
    if about_now("PodResizeInProgress").is_some() || status.observed_generation.is_some_and(|seen| seen < generation) {
        return ResizeState::InProgress;
    }
    ResizeState::Settled
}

#[cfg(test)]
#[path = "facts_tests.rs"]
pub mod tests;
