//! Objects with values that no cluster can have: which they are, and the events that name them.
//!
//! **Problem.** Quantities, times and annotations come from tenants. The operator reads every value within bounds,
//! so an absurd one harms no other object. The author of the object must learn that the value was not used as
//! written, and an administrator must be able to find the object.
//!
//! **How.** The watches pass each pod, Job, TrainingJob and TFJob to [`InvalidObjects`]. The first fault of an object
//! waits in a short queue, from which [`run`] publishes one warning event on the object.
//!
//! **Properties.** `one_event_for_each_object_and_generation`: a leader publishes one event for an object until its
//! specification changes. `a_namespace_gets_few_events`: a namespace gets [`BURST`] events at once, and one more
//! every [`REFILL`]. The queue and the memory are bounded; what does not fit is checked again with the object's
//! next change.

use super::events::{self, Subject, Text};
use gainshare_kube_api::adopted::Journal;
use gainshare_kube_api::names::{
    ADOPTED_ANNOTATION, DEADLINE_ANNOTATION, DEADLINE_TOLERANCE_ANNOTATION, TARGET_ANNOTATION,
};
use gainshare_kube_api::quantity;
use gainshare_kube_api::tfjob::TfJob;
use gainshare_kube_api::training_job::TrainingJob;
use k8s_openapi::api::batch::v1::{Job, JobCondition};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::events::Recorder;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// A longer grace period is a mistake: a year.
const LONGEST_GRACE_S: i64 = 366 * 86_400;

/// Letters of a tenant's text that an event repeats.
const QUOTED: usize = 40;

/// Objects that wait for their event.
const MOST_QUEUED: usize = 500;

/// Objects whose events are remembered.
const MOST_REMEMBERED: usize = 10_000;

/// Events that a namespace gets at once.
const BURST: f64 = 20.0;

/// A namespace gets one more event after this time.
const REFILL: Duration = Duration::from_secs(6);

/// Between two events, whatever their namespaces.
const PAUSE: Duration = Duration::from_millis(50);

/// The longest time between two reads of the task's queue.
const WAIT: Duration = Duration::from_secs(10);

/// An event must not hold up the next one.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Why the values of an object are not used as written.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fault {
    /// A word for programs.
    reason: &'static str,
    /// A sentence for people.
    note: String,
}

/// An object with a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
struct InvalidObject {
    api_version: &'static str,
    kind: &'static str,
    namespace: String,
    name: String,
    uid: String,
    fault: Fault,
}

/// The invalid objects that a leader has found.
#[derive(Debug, Default)]
pub(crate) struct InvalidObjects {
    found: Mutex<EventQueue>,
    is_new: Notify,
}

#[derive(Debug, Default)]
struct EventQueue {
    queue: VecDeque<InvalidObject>,
    /// The generation of each object that was queued, by uid.
    queued: BTreeMap<String, i64>,
}

impl InvalidObjects {
    pub(crate) fn check_pod(&self, pod: &Pod) {
        let fault = pod.spec.as_ref().and_then(pod_fault);
        self.add("v1", "Pod", &pod.metadata, fault);
    }

    pub(crate) fn check_job(&self, job: &Job) {
        let spec = job.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let fault = spec.and_then(pod_fault).or_else(|| journal_fault(&job.metadata)).or_else(|| deadline_fault(job));
        self.add("batch/v1", "Job", &job.metadata, fault);
    }

    pub(crate) fn check_training_job(&self, job: &TrainingJob) {
        let tasks = job.spec.replica_specs.values().map(|tasks| &tasks.template);
        let fault = std::iter::once(&job.spec.template).chain(tasks).find_map(template_fault);
        self.add("gainshare.dev/v1alpha1", "TrainingJob", &job.metadata, fault);
    }

    pub(crate) fn check_tfjob(&self, job: &TfJob) {
        let fault = job.spec.tf_replica_specs.values().find_map(|tasks| template_fault(&tasks.template));
        self.add("kubeflow.org/v1", "TFJob", &job.metadata, fault);
    }

    fn add(&self, api_version: &'static str, kind: &'static str, meta: &ObjectMeta, fault: Option<Fault>) {
        let Some(fault) = fault else { return };
        let (Some(namespace), Some(name), Some(uid)) = (&meta.namespace, &meta.name, &meta.uid) else { return };
        let generation = meta.generation.unwrap_or(0);
        let mut found = self.found.lock();
        if found.queued.get(uid) == Some(&generation) || found.queue.len() >= MOST_QUEUED {
            return;
        }
        if found.queued.len() >= MOST_REMEMBERED {
            found.queued.clear();
        }
        found.queued.insert(uid.clone(), generation);
        let (namespace, name, uid) = (namespace.clone(), name.clone(), uid.clone());
        found.queue.push_back(InvalidObject { api_version, kind, namespace, name, uid, fault });
        drop(found);
        self.is_new.notify_one();
    }

    fn take(&self) -> Option<InvalidObject> {
        self.found.lock().queue.pop_front()
    }

    /// The event of an object was not published: it is checked again with its next change.
    fn forget(&self, object: &InvalidObject) {
        self.found.lock().queued.remove(&object.uid);
    }
}

/// Publishes events for ever.
pub(crate) async fn run(invalid: Arc<InvalidObjects>, recorder: Recorder) {
    let mut budget = Budget::default();
    loop {
        let Some(object) = invalid.take() else {
            let _ = tokio::time::timeout(WAIT, invalid.is_new.notified()).await;
            continue;
        };
        let InvalidObject { namespace, name, fault, .. } = &object;
        tracing::warn!(kind = object.kind, namespace, name, reason = fault.reason, "{}", fault.note);
        if !budget.take(namespace, Instant::now()) {
            invalid.forget(&object);
            continue;
        }
        let subject =
            Subject { api_version: object.api_version, kind: object.kind, namespace, name, uid: Some(&object.uid) };
        let text = Text { warns: true, reason: fault.reason, note: &fault.note, action: "Read" };
        if tokio::time::timeout(TIMEOUT, events::publish(&recorder, subject, text)).await.is_err() {
            invalid.forget(&object);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// How many more events each namespace may get.
#[derive(Debug, Default)]
struct Budget(BTreeMap<String, (f64, Instant)>);

impl Budget {
    fn take(&mut self, namespace: &str, now: Instant) -> bool {
        let refilled = |left: f64, since: Instant| {
            (left + now.saturating_duration_since(since).as_secs_f64() / REFILL.as_secs_f64()).min(BURST)
        };
        let left = self.0.get(namespace).map_or(BURST, |(left, since)| refilled(*left, *since));
        if left < 1.0 {
            return false;
        }
        self.0.retain(|_, (left, since)| refilled(*left, *since) < BURST);
        self.0.insert(namespace.to_owned(), (left - 1.0, now));
        true
    }
}

/// The fault of a pod template that is kept as plain JSON. A template that cannot be read at all is reported by the
/// controller of jobs.
fn template_fault(template: &Value) -> Option<Fault> {
    let spec: PodSpec = serde_json::from_value(template.get("spec")?.clone()).ok()?;
    pod_fault(&spec)
}

fn pod_fault(spec: &PodSpec) -> Option<Fault> {
    let mut containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    containers.find_map(container_fault).or_else(|| {
        let seconds = spec.termination_grace_period_seconds.filter(|seconds| *seconds > LONGEST_GRACE_S)?;
        let note = format!(
            "terminationGracePeriodSeconds is {seconds}, which is more than a year: write the seconds that the program \
             needs to save its state"
        );
        Some(Fault { reason: "InvalidGracePeriod", note })
    })
}

fn container_fault(container: &Container) -> Option<Fault> {
    let resources = container.resources.as_ref()?;
    let named = |what: &'static str, map: &Option<BTreeMap<String, Quantity>>| {
        let bad = map.as_ref()?.iter().find(|(name, amount)| !is_possible(name, amount))?;
        Some((what, bad.0.clone(), bad.1.0.clone()))
    };
    let (what, resource, amount) =
        named("requests", &resources.requests).or_else(|| named("limits", &resources.limits))?;
    let note = format!(
        "container {} {what} {} of {}, which no machine has: the value is ignored; write an amount that a node has",
        quoted(&container.name),
        quoted(&amount),
        quoted(&resource)
    );
    Some(Fault { reason: "InvalidResources", note })
}

fn is_possible(resource: &str, amount: &Quantity) -> bool {
    match resource {
        "cpu" => quantity::cpu_milli(amount).is_some(),
        _ => quantity::whole(amount).is_some(),
    }
}

fn journal_fault(meta: &ObjectMeta) -> Option<Fault> {
    let text = meta.annotations.as_ref()?.get(ADOPTED_ANNOTATION)?;
    let why = Journal::fault(text)?;
    let note = format!("the annotation {ADOPTED_ANNOTATION} is written by the operator only, and {why}: remove it");
    Some(Fault { reason: "InvalidAnnotation", note })
}

/// Deadlines are read from pods, which have the annotations of their template.
fn deadline_fault(job: &Job) -> Option<Fault> {
    let has_ended = |condition: &JobCondition| {
        matches!(condition.type_.as_str(), "Complete" | "Failed") && condition.status == "True"
    };
    if job.status.iter().flat_map(|status| status.conditions.iter().flatten()).any(has_ended) {
        return None;
    }
    let template = job.spec.as_ref().and_then(|spec| spec.template.metadata.as_ref());
    let has = |meta: &ObjectMeta, name: &str| meta.annotations.as_ref().is_some_and(|notes| notes.contains_key(name));
    let is_lost = |name: &&str| has(&job.metadata, name) && !template.is_some_and(|meta| has(meta, name));
    let name = [DEADLINE_ANNOTATION, DEADLINE_TOLERANCE_ANNOTATION, TARGET_ANNOTATION].into_iter().find(is_lost)?;
    let note = format!(
        "the annotation {name} of the Job itself is ignored: write it into spec.template.metadata.annotations, and create \
         the Job again"
    );
    Some(Fault { reason: "IgnoredAnnotation", note })
}

/// The beginning of a tenant's text.
fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, generation: i64, spec: Value) -> Pod {
        let meta = json!({"name": name, "namespace": "team", "uid": name, "generation": generation});
        serde_json::from_value(json!({"metadata": meta, "spec": spec})).unwrap()
    }

    fn asks(resources: Value) -> Value {
        json!({"containers": [{"name": "main", "image": "i", "resources": resources}]})
    }

    fn found(invalid: &InvalidObjects) -> Vec<(String, &'static str)> {
        std::iter::from_fn(|| invalid.take()).map(|object| (object.name, object.fault.reason)).collect()
    }

    #[test]
    fn each_hostile_object_is_named_with_its_reason() {
        let invalid = InvalidObjects::default();
        invalid.check_pod(&pod("cpu", 1, asks(json!({"requests": {"cpu": "999999999999999"}}))));
        invalid.check_pod(&pod("memory", 1, asks(json!({"limits": {"memory": "999999999999999999"}}))));
        let mut endless = asks(json!({}));
        endless["terminationGracePeriodSeconds"] = json!(9_000_000_000_000_000_000u64);
        invalid.check_pod(&pod("grace", 1, endless));
        let meta = |name: &str| json!({"name": name, "namespace": "team", "uid": name, "generation": 1});
        let template = json!({"spec": asks(json!({"requests": {"cpu": "999999999999999"}}))});
        let job = json!({"metadata": meta("job"), "spec": {"suspend": true, "template": template}});
        invalid.check_job(&serde_json::from_value(job).unwrap());
        let mut forged = json!({"metadata": meta("forged"), "spec": {"template": {"spec": asks(json!({}))}}});
        forged["metadata"]["annotations"] = json!({ADOPTED_ANNOTATION: r#"{"moves":4294967295}"#});
        invalid.check_job(&serde_json::from_value(forged).unwrap());
        let training = json!({
            "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": meta("training"), "spec": {"template": template},
        });
        invalid.check_training_job(&serde_json::from_value(training).unwrap());
        let tfjob = json!({
            "apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": meta("tfjob"),
            "spec": {"tfReplicaSpecs": {"PS": {"template": {"spec": asks(json!({}))}}, "Worker": {"template": template}}},
        });
        invalid.check_tfjob(&serde_json::from_value(tfjob).unwrap());
        let expected = [
            ("cpu", "InvalidResources"),
            ("memory", "InvalidResources"),
            ("grace", "InvalidGracePeriod"),
            ("job", "InvalidResources"),
            ("forged", "InvalidAnnotation"),
            ("training", "InvalidResources"),
            ("tfjob", "InvalidResources"),
        ];
        assert_eq!(found(&invalid), expected.map(|(name, reason)| (name.to_owned(), reason)));
    }

    #[test]
    fn a_deadline_on_a_job_itself_is_named_with_its_place() {
        let job = |name: &str, of_job: Value, of_template: Value, conditions: Value| {
            let template = json!({"metadata": {"annotations": of_template}, "spec": asks(json!({}))});
            let mut meta = json!({"name": name, "namespace": "team", "uid": name, "generation": 1});
            meta["annotations"] = of_job;
            let job = json!({"metadata": meta, "spec": {"template": template}, "status": {"conditions": conditions}});
            serde_json::from_value::<Job>(job).unwrap()
        };
        let due = json!({DEADLINE_ANNOTATION: "2h"});
        let invalid = InvalidObjects::default();
        invalid.check_job(&job("lost", due.clone(), json!({}), json!([])));
        let object = invalid.take().unwrap();
        assert_eq!(object.fault.reason, "IgnoredAnnotation");
        assert!(object.fault.note.contains("spec.template.metadata.annotations"), "{}", object.fault.note);
        invalid.check_job(&job("both", due.clone(), due.clone(), json!([])));
        invalid.check_job(&job("right", json!({}), due.clone(), json!([])));
        let over = json!([{"type": "Complete", "status": "True"}]);
        invalid.check_job(&job("over", due, json!({}), over));
        assert!(found(&invalid).is_empty());
        invalid.check_job(&job("target", json!({TARGET_ANNOTATION: "loss=0.05"}), json!({}), json!([])));
        assert_eq!(found(&invalid), [("target".to_owned(), "IgnoredAnnotation")]);
    }

    #[test]
    fn sound_objects_have_no_event() {
        let invalid = InvalidObjects::default();
        let resources = json!({"requests": {"cpu": "64", "memory": "6Ti", "nvidia.com/gpu": "8"}});
        invalid.check_pod(&pod("large", 1, asks(resources)));
        let mut slow = asks(json!({}));
        slow["terminationGracePeriodSeconds"] = json!(86_400);
        invalid.check_pod(&pod("slow", 1, slow));
        assert!(found(&invalid).is_empty());
    }

    #[test]
    fn one_event_for_each_object_and_generation() {
        let invalid = InvalidObjects::default();
        let hostile = |generation| pod("p", generation, asks(json!({"requests": {"cpu": "999999999999999"}})));
        for _ in 0..3 {
            invalid.check_pod(&hostile(1));
        }
        assert_eq!(found(&invalid).len(), 1);
        invalid.check_pod(&hostile(1));
        assert_eq!(found(&invalid).len(), 0, "it was published before");
        invalid.check_pod(&hostile(2));
        assert_eq!(found(&invalid).len(), 1, "its specification is another one");
    }

    #[test]
    fn the_queue_is_bounded_and_nothing_is_forgotten_for_good() {
        let invalid = InvalidObjects::default();
        let hostile = |i: usize| pod(&format!("p{i}"), 1, asks(json!({"requests": {"cpu": "-1"}})));
        (0..MOST_QUEUED + 5).for_each(|i| invalid.check_pod(&hostile(i)));
        assert_eq!(found(&invalid).len(), MOST_QUEUED);
        invalid.check_pod(&hostile(MOST_QUEUED + 1));
        assert_eq!(found(&invalid).len(), 1, "it did not fit before");
    }

    #[test]
    fn a_namespace_gets_few_events() {
        let (mut budget, begin) = (Budget::default(), Instant::now());
        let granted = (0..100).filter(|_| budget.take("team", begin)).count();
        assert_eq!(granted, BURST as usize);
        assert!(budget.take("other", begin), "another namespace has its own");
        assert!(budget.take("team", begin + REFILL) && !budget.take("team", begin + REFILL));
        assert!(budget.take("third", begin + REFILL * 1000));
        assert_eq!(budget.0.len(), 1, "namespaces that have all their events are not kept");
    }

    #[test]
    fn notes_repeat_little_of_a_tenants_text() {
        let long = "ä".repeat(5000);
        assert_eq!(quoted(&long).chars().count(), QUOTED + 1);
        assert_eq!(quoted("short"), "short");
    }
}
