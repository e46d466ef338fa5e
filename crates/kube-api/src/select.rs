//! Which policy a pod belongs to.
//!
//! A policy selects by labels or by the owner of the pod (`targetRef`). The owner is found on the
//! pod alone: its ownerReferences name owners of any kind. Some kinds put another object in between
//! (Deployment, CronJob, JobSet, TrainJob); for those the names and labels decide that their
//! controllers give to pods. So the operator needs no right on other projects' job kinds.
//!
//! If several policies select a pod, the oldest one applies. A namespace's label applies after all
//! policies.

use crate::aim::AimKind;
use crate::deadline_input;
use crate::facts::PodFacts;
use crate::names::{self, AIM_ANNOTATION, JOB_LABEL, POLICY_ANNOTATION};
use crate::share_policy::{Direction, SharePolicy, SharePolicySpec, SharePolicyStatus, TargetRef};
use crate::training_job::JobPolicy;
use crate::wire::{CollectorKind, PolicyKind, SCALED_POLICY, Settings};
use gainshare_core::policies::Preset;
use kube::core::{Selector, SelectorExt};
use std::collections::BTreeMap;

/// A policy, as far as it matters for pods.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyFacts {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub generation: i64,
    /// For "the oldest has it": creation time in seconds, then the name.
    pub created_s: i64,
    pub spec: SharePolicySpec,
    /// `spec.selector`, parsed; `None` if there is none, or if it cannot be parsed: then the policy
    /// selects nothing.
    pub selector: Option<Selector>,
    /// The policy is being deleted.
    pub ending: bool,
    pub status: Option<SharePolicyStatus>,
}

impl PolicyFacts {
    pub fn of(policy: &SharePolicy) -> Option<PolicyFacts> {
        let meta = &policy.metadata;
        Some(PolicyFacts {
            namespace: meta.namespace.clone()?,
            name: meta.name.clone()?,
            uid: meta.uid.clone().unwrap_or_default(),
            generation: meta.generation.unwrap_or_default(),
            created_s: meta.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            selector: policy.spec.selector.clone().and_then(|selector| Selector::try_from(selector).ok()),
            spec: policy.spec.clone(),
            ending: meta.deletion_timestamp.is_some(),
            status: policy.status.clone(),
        })
    }

    /// Whether pods belong to it at all at present.
    pub fn is_active(&self) -> bool {
        !self.spec.suspend && !self.ending
    }

    /// Whether the policy selects the pod, which is of the same namespace.
    pub fn selects(&self, pod: &PodFacts) -> bool {
        if is_out(pod) {
            return false;
        }
        match (&self.spec.selector, &self.spec.target_ref) {
            (Some(_), None) => self.selector.as_ref().is_some_and(|selector| selector.matches(&pod.labels)),
            (None, Some(target)) => made_by(target, pod),
            _ => false,
        }
    }
}

/// The author wants no sharing for this pod.
fn is_out(pod: &PodFacts) -> bool {
    pod.labels.get(names::SHARE_LABEL).is_some_and(|value| value == "disabled")
}

/// The policy that has this pod, if several select it.
pub fn choose<'a>(policies: impl IntoIterator<Item = &'a PolicyFacts>, pod: &PodFacts) -> Option<&'a PolicyFacts> {
    policies
        .into_iter()
        .filter(|policy| policy.is_active() && policy.selects(pod))
        .min_by(|a, b| (a.created_s, &a.name).cmp(&(b.created_s, &b.name)))
}

/// Whether the namespace's label has this pod.
pub fn by_namespace(namespace_labels: &BTreeMap<String, String>, pod: &PodFacts) -> bool {
    namespace_labels.get(names::SHARE_LABEL).is_some_and(|value| value == "enabled") && !is_out(pod)
}

/// How the pods of TrainingJobs share, if no policy says otherwise.
#[derive(Debug, Clone, PartialEq)]
pub struct JobShare {
    /// Stands where a policy's name would: no policy can have it.
    pub name: String,
    pub spec: SharePolicySpec,
    /// The job's policy has no answer to how a node is shared: the pod is watched and keeps what it
    /// has.
    pub watch_only: bool,
}

/// What a TrainingJob's own policy, or an adopted Job's, says about sharing its node. The author of
/// such a job wants it to share, so no SharePolicy is needed.
pub fn by_job(pod: &PodFacts) -> Option<JobShare> {
    // The operator marks pods of adopted Jobs.
    let is_marked = pod.labels.contains_key(JOB_LABEL);
    let wanted = pod.notes.get(POLICY_ANNOTATION).and_then(|word| from_word::<JobPolicy>(word));
    // The annotation of a TFJob is on its pods.
    if is_task_of_tfjob(pod) && wanted.map(JobPolicy::preset) == Some(Preset::Operator) && !is_out(pod) {
        let spec = SharePolicySpec { policy: PolicyKind::equal(), ..SharePolicySpec::default() };
        return Some(JobShare { name: SCALED_POLICY.to_owned(), spec, watch_only: true });
    }
    let ours = |owner: &crate::facts::Owner| {
        let own = owner.kind == "TrainingJob" && owner.api_version.starts_with(names::PREFIX);
        owner.controller && (own || is_marked && owner.kind == "Job" && owner.api_version.starts_with("batch/"))
    };
    if !pod.owners.iter().any(ours) || is_out(pod) {
        return None;
    }
    let policy = wanted.unwrap_or_default();
    let has_deadline = pod.notes.contains_key(names::DEADLINE_ANNOTATION);
    let kind = policy.share_kind(has_deadline);
    let aim = pod.notes.get(AIM_ANNOTATION).and_then(|word| from_word::<AimKind>(word));
    let aim = aim.filter(|aim| policy.has_aim() && *aim != AimKind::default());
    let spec = SharePolicySpec { policy: kind.unwrap_or_else(PolicyKind::equal), aim, ..SharePolicySpec::default() };
    // A node agent has one order for the pods of one name: pods of different aims share apart.
    let suffix = aim.map_or_else(String::new, |aim| format!("/{}", aim.name()));
    Some(JobShare { name: format!("TrainingJob/{}{suffix}", policy.name()), spec, watch_only: kind.is_none() })
}

/// Pods of a TFJob are measured and keep their resources, unless a policy or the namespace's label selects them: the
/// job's status shows how far it is.
pub fn by_tfjob(pod: &PodFacts) -> Option<JobShare> {
    let spec = SharePolicySpec { policy: PolicyKind::equal(), ..SharePolicySpec::default() };
    (is_task_of_tfjob(pod) && !is_out(pod)).then(|| JobShare { name: "TFJob/na".to_owned(), spec, watch_only: true })
}

fn is_task_of_tfjob(pod: &PodFacts) -> bool {
    pod.attempt.as_ref().is_some_and(|attempt| attempt.of_tfjob && attempt.epoch.is_some())
}

fn made_by(target: &TargetRef, pod: &PodFacts) -> bool {
    let direct = pod.owners.iter().any(|owner| {
        owner.kind == target.kind
            && owner.name == target.name
            && target.api_version.as_ref().is_none_or(|version| same_group(version, &owner.api_version))
    });
    if direct {
        return true;
    }
    let label = |key: &str| pod.labels.get(key).map(String::as_str);
    let owned_by = |kind: &str, fits: &dyn Fn(&str) -> bool| pod.owners.iter().any(|o| o.kind == kind && fits(&o.name));
    let rest_after_dash = |name: &str| name.strip_prefix(&target.name)?.strip_prefix('-').map(str::to_owned);
    match target.kind.as_str() {
        "Pod" => pod.name == target.name,
        // Its ReplicaSets are named after it and the template's hash, which the pods carry too.
        "Deployment" => owned_by("ReplicaSet", &|name| rest_after_dash(name).as_deref() == label("pod-template-hash")),
        // Its Jobs are named after it and the scheduled minute.
        "CronJob" => owned_by("Job", &|name| {
            rest_after_dash(name).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
        }),
        // Kubeflow's TrainJob makes a JobSet of its own name.
        "JobSet" | "TrainJob" => label("jobset.sigs.k8s.io/jobset-name") == Some(&target.name),
        _ => false,
    }
}

/// Versions of one group name the same objects.
fn same_group(a: &str, b: &str) -> bool {
    let group = |version: &str| version.split_once('/').map_or(String::new(), |(group, _)| group.to_owned());
    group(a) == group(b)
}

/// What made the pod, for people.
pub fn owner_name(pod: &PodFacts) -> String {
    let owner = pod.owners.iter().find(|owner| owner.controller).or(pod.owners.first());
    owner.map_or_else(|| format!("Pod/{}", pod.name), |owner| format!("{}/{}", owner.kind, owner.name))
}

/// The container that trains: by the pod's annotation, by the policy, or the first one.
pub fn container_name(spec: &SharePolicySpec, pod: &PodFacts) -> String {
    let named = pod.notes.get(names::CONTAINER_ANNOTATION).or(spec.container.as_ref());
    named.cloned().or_else(|| pod.containers.first().map(|c| c.name.clone())).unwrap_or_default()
}

/// The policy's settings with the pod's annotations over them.
pub fn settings(spec: &SharePolicySpec, pod: &PodFacts) -> Settings {
    let mut settings = spec.settings();
    let note = |key: &str| pod.notes.get(key).cloned();
    if let Some(metric) = note(names::METRIC_ANNOTATION) {
        settings.metric = Some(metric);
    }
    // A text that is not a target is reported with the pod's deadline.
    if let Some((metric, value)) = note(names::TARGET_ANNOTATION).and_then(|text| deadline_input::parse_target(&text)) {
        (settings.metric, settings.target) = (metric.or(settings.metric), Some(value));
    }
    if let Some(pattern) = note(names::PATTERN_ANNOTATION) {
        settings.pattern = Some(pattern);
    }
    let direction = note(names::OBJECTIVE_ANNOTATION).and_then(|text| from_word::<Direction>(&text));
    if let Some(direction) = direction {
        settings.maximize = Some(direction == Direction::Maximize);
    }
    if let Some(collector) = note(names::COLLECTOR_ANNOTATION).and_then(|text| from_word::<CollectorKind>(&text)) {
        settings.collector = collector;
    }
    if let Some(path) = note(names::PATH_ANNOTATION) {
        settings.path = Some(path);
    }
    settings
}

fn from_word<T: serde::de::DeserializeOwned>(word: &str) -> Option<T> {
    serde_json::from_value(serde_json::Value::String(word.to_owned())).ok()
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
