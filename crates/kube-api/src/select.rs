//! Which policy a pod belongs to.
//!
//! A policy selects by labels or by what made the pod (`targetRef`). For the latter we look only at the pod: its ownerReferences, which name
//! any kind including those we have never heard of, and, for the kinds that put another object in between (Deployment, CronJob, JobSet,
//! TrainJob), the names and labels those controllers are known to give. So no right on anybody's job kinds is needed.
//!
//! If several policies select a pod, the oldest has it; a namespace's label stands behind all policies.

use crate::crd::{self, Goal, SharePolicy, SharePolicySpec, TargetRef};
use crate::facts::PodFacts;
use crate::training_job::{JOB_LABEL, JobPolicy, POLICY_ANNOTATION};
use crate::wire::{Collector, PolicyKind, Settings};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
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
    /// It is being deleted.
    pub ending: bool,
    pub status: Option<crd::SharePolicyStatus>,
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
            spec: policy.spec.clone(),
            ending: meta.deletion_timestamp.is_some(),
            status: policy.status.clone(),
        })
    }

    /// Whether pods belong to it at all at present.
    pub fn is_active(&self) -> bool {
        !self.spec.suspend && !self.ending
    }

    /// Whether the pod (of the same namespace) is meant.
    pub fn selects(&self, pod: &PodFacts) -> bool {
        if is_out(pod) {
            return false;
        }
        match (&self.spec.selector, &self.spec.target_ref) {
            (Some(selector), None) => labels_match(selector, &pod.labels),
            (None, Some(target)) => made_by(target, pod),
            _ => false,
        }
    }
}

/// The author wants no sharing for this pod.
fn is_out(pod: &PodFacts) -> bool {
    pod.labels.get(crd::SHARE_LABEL).is_some_and(|value| value == "disabled")
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
    namespace_labels.get(crd::SHARE_LABEL).is_some_and(|value| value == "enabled") && !is_out(pod)
}

/// How the pods of TrainingJobs share, if no policy says otherwise.
#[derive(Debug, Clone, PartialEq)]
pub struct JobShare {
    /// Stands where a policy's name would: no policy can have it.
    pub name: String,
    pub spec: SharePolicySpec,
    /// The job's policy has no answer to how a node is shared: the pod is watched and keeps what it has.
    pub watch_only: bool,
}

/// What a TrainingJob's own policy, or an adopted Job's, says about sharing its node. A job is its author's wish to be shared, so no SharePolicy is needed.
pub fn by_job(pod: &PodFacts) -> Option<JobShare> {
    // Pods of adopted Jobs are marked by the manager.
    let is_marked = pod.labels.contains_key(JOB_LABEL);
    let ours = |owner: &crate::facts::Owner| {
        let own = owner.kind == "TrainingJob" && owner.api_version.starts_with("gainshare.dev/");
        owner.controller && (own || is_marked && owner.kind == "Job" && owner.api_version.starts_with("batch/"))
    };
    if !pod.owners.iter().any(ours) || is_out(pod) {
        return None;
    }
    let policy = pod.notes.get(POLICY_ANNOTATION).and_then(|word| from_word::<JobPolicy>(word)).unwrap_or_default();
    let (kind, watch_only) = match policy {
        JobPolicy::Na | JobPolicy::Specon => (PolicyKind::Fair, true),
        JobPolicy::Flowcon2 => (PolicyKind::Flowcon, false),
        JobPolicy::Gainshare => (PolicyKind::Gainshare, false),
    };
    let spec = SharePolicySpec { policy: kind, ..SharePolicySpec::default() };
    Some(JobShare { name: format!("TrainingJob/{}", policy.name()), spec, watch_only })
}

/// Label selectors as the API server understands them. An unknown operator selects nothing.
pub fn labels_match(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let fits = selector.match_expressions.iter().flatten().all(|wanted| {
        let value = labels.get(&wanted.key);
        let listed = || value.is_some_and(|value| wanted.values.iter().flatten().any(|one| one == value));
        match wanted.operator.as_str() {
            "In" => listed(),
            "NotIn" => !listed(),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            _ => false,
        }
    });
    equal && fits
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

/// The container that trains: the pod's annotation, the policy's word, or the first one.
pub fn container_name(spec: &SharePolicySpec, pod: &PodFacts) -> String {
    let said = pod.notes.get(crd::CONTAINER_ANNOTATION).or(spec.container.as_ref());
    said.cloned().or_else(|| pod.containers.first().map(|c| c.name.clone())).unwrap_or_default()
}

/// The policy's settings with the pod's annotations over them.
pub fn settings(spec: &SharePolicySpec, pod: &PodFacts) -> Settings {
    let mut settings = spec.settings();
    let note = |key: &str| pod.notes.get(key).cloned();
    if let Some(metric) = note(crd::METRIC_ANNOTATION) {
        settings.metric = Some(metric);
    }
    if let Some(pattern) = note(crd::PATTERN_ANNOTATION) {
        settings.pattern = Some(pattern);
    }
    let goal = note(crd::OBJECTIVE_ANNOTATION).and_then(|text| from_word::<Goal>(&text));
    if let Some(goal) = goal {
        settings.maximize = Some(goal == Goal::Maximize);
    }
    if let Some(collector) = note(crd::COLLECTOR_ANNOTATION).and_then(|text| from_word::<Collector>(&text)) {
        settings.collector = collector;
    }
    if let Some(path) = note(crd::PATH_ANNOTATION) {
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
