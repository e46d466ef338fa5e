//! The admission webhook: it adds a tuned start to new pods of namespaces that ask for it.
//!
//! **Problem.** Thread pools are sized once, at the start of a process, by the cores of the machine, and their
//! waiting threads spin. A limit that is set later cannot change that.
//!
//! **How.** In namespaces labelled `gainshare.dev/start=tuned`, containers of new pods get the same environment
//! variables as jobs that `gainshare run` starts (one list, in `gainshare-limits`), sized by the container's
//! own CPU request, and a resize policy that does not restart them. A container without a CPU request gets a
//! small one, so that it can be resized at all. An annotation names everything that was
//! added.
//!
//! **Properties.** `never_overrides`: what the author wrote stays. A container whose variables come from
//! elsewhere (`envFrom`) gets none, because the webhook cannot read them. `harmless`: the pod is allowed,
//! whatever the review contains.

use gainshare_kube_api::names::{SHARE_LABEL, START_ANNOTATION};
use gainshare_kube_api::quantity;
use gainshare_limits::process::start::tuned_env;
use gainshare_page::PAGE_VARIABLE;
use k8s_openapi::api::core::v1::{Container, ContainerResizePolicy, EnvVar, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use std::collections::BTreeMap;

/// The CPU request of a container whose author gave it none.
const GIVEN_CPU: &str = "50m";

/// The answer to a review, and whether it changes the pod.
pub(crate) struct ReviewAnswer {
    pub(crate) review: AdmissionReview<kube::core::DynamicObject>,
    pub(crate) changed: bool,
}

/// Answers a review with a tuned start; an error if the body is not a review of a pod.
pub(crate) fn review(body: &[u8]) -> Result<ReviewAnswer, String> {
    review_with(body, |_, pod| tune(pod))
}

/// Answers a review. `change` gets the pod and its namespace, and makes the changed pod, if anything is to be changed.
pub(crate) fn review_with(body: &[u8], change: impl FnOnce(&str, &Pod) -> Option<Pod>) -> Result<ReviewAnswer, String> {
    let review: AdmissionReview<Pod> =
        serde_json::from_slice(body).map_err(|error| format!("this is not an admission review of a pod: {error}"))?;
    let request: AdmissionRequest<Pod> =
        review.try_into().map_err(|error| format!("the admission review has no request: {error}"))?;
    let response = AdmissionResponse::from(&request);
    let namespace = request.namespace.as_deref().unwrap_or_default();
    let changed = request.object.as_ref().and_then(|pod| Some((pod, change(namespace, pod)?)));
    let Some((before, after)) = changed else {
        return Ok(ReviewAnswer { review: response.into_review(), changed: false });
    };
    let patch = match (serde_json::to_value(before), serde_json::to_value(&after)) {
        (Ok(before), Ok(after)) => json_patch::diff(&before, &after),
        _ => return Ok(ReviewAnswer { review: response.into_review(), changed: false }),
    };
    // A pod that cannot be patched is admitted as it is: what the webhook adds is optional.
    match response.with_patch(patch) {
        Ok(patched) => Ok(ReviewAnswer { review: patched.into_review(), changed: true }),
        Err(_) => Ok(ReviewAnswer { review: AdmissionResponse::from(&request).into_review(), changed: false }),
    }
}

/// The pod with a tuned start; nothing if there is nothing to add.
fn tune(pod: &Pod) -> Option<Pod> {
    let out = |map: &Option<std::collections::BTreeMap<String, String>>, key: &str, value: &str| {
        map.as_ref().and_then(|map| map.get(key)).is_some_and(|found| found == value)
    };
    if out(&pod.metadata.labels, SHARE_LABEL, "disabled") || out(&pod.metadata.annotations, START_ANNOTATION, "plain") {
        return None;
    }
    let was_reviewed = pod.metadata.annotations.as_ref().is_some_and(|notes| notes.contains_key(START_ANNOTATION));
    let mut tuned = pod.clone();
    let mut added: Vec<String> = Vec::new();
    for container in &mut tuned.spec.as_mut()?.containers {
        let was_given_request = was_reviewed && has_given_request(container);
        let mut what = add_env(container, was_given_request);
        what.extend(add_request(container));
        what.extend(add_resize_policy(container));
        if !what.is_empty() {
            added.push(format!("{}: {}", container.name, what.join(" ")));
        }
    }
    if added.is_empty() {
        return None;
    }
    let notes = tuned.metadata.annotations.get_or_insert_default();
    notes.insert(START_ANNOTATION.to_owned(), format!("tuned; {}", added.join("; ")));
    Some(tuned)
}

/// A small CPU request for a container without one: Kubernetes resizes no container that requests nothing. A
/// container with a CPU limit has a request already, because the API server copies the limit.
fn add_request(container: &mut Container) -> Option<String> {
    let resources = container.resources.get_or_insert_default();
    let has_cpu = |map: &Option<BTreeMap<String, Quantity>>| map.as_ref().is_some_and(|map| map.contains_key("cpu"));
    if has_cpu(&resources.requests) || has_cpu(&resources.limits) {
        return None;
    }
    resources.requests.get_or_insert_default().insert("cpu".to_owned(), Quantity(GIVEN_CPU.to_owned()));
    Some(format!("requests.cpu={GIVEN_CPU}"))
}

/// Whether the container has what [`add_request`] gives. Of an author who wrote the same, an earlier review has already
/// added what follows from it.
fn has_given_request(container: &Container) -> bool {
    let Some(resources) = &container.resources else { return false };
    let cpu = |map: &Option<BTreeMap<String, Quantity>>| map.as_ref().and_then(|map| map.get("cpu")).cloned();
    cpu(&resources.requests).is_some_and(|request| request.0 == GIVEN_CPU) && cpu(&resources.limits).is_none()
}

/// `was_given_request`: an earlier review gave the container its CPU request, which says nothing about its cores.
fn add_env(container: &mut Container, was_given_request: bool) -> Vec<String> {
    if container.env_from.as_ref().is_some_and(|from| !from.is_empty()) {
        return Vec::new();
    }
    let env = container.env.clone().unwrap_or_default();
    let set = |name: &str| env.iter().find(|var| var.name == name).map(|var| var.value.clone().unwrap_or_default());
    let request = quantity::resources(container.resources.as_ref()).requests.cpu_milli;
    let request = request.filter(|_| !was_given_request);
    let cores = request.map(|milli| milli.div_ceil(1000) as f64);
    let mut wanted = tuned_env(set, cores.unwrap_or(1.0), 1);
    if cores.is_none() {
        // Without a request the number of cores is unknown: only variables that do not depend on it are added.
        let with_more = tuned_env(set, 64.0, 1);
        wanted.retain(|var| with_more.contains(var));
    }
    if set(PAGE_VARIABLE).is_some() {
        // The library inside sizes the teams of OpenMP and MKL while the container runs, within what is set here.
        wanted.retain(|var| !matches!(&*var.name, "OMP_NUM_THREADS" | "MKL_NUM_THREADS"));
    }
    let vars = wanted.iter().map(|var| EnvVar {
        name: var.name.to_string(),
        value: Some(var.value.clone()),
        value_from: None,
    });
    container.env.get_or_insert_default().extend(vars);
    wanted.iter().map(|var| format!("{}={}", var.name, var.value)).collect()
}

fn add_resize_policy(container: &mut Container) -> Option<String> {
    let policies = container.resize_policy.get_or_insert_default();
    let missing: Vec<&str> =
        ["cpu", "memory"].into_iter().filter(|name| !policies.iter().any(|p| p.resource_name == *name)).collect();
    policies.extend(missing.iter().map(|name| ContainerResizePolicy {
        resource_name: (*name).to_owned(),
        restart_policy: "NotRequired".to_owned(),
    }));
    (!missing.is_empty()).then(|| format!("resizePolicy({})=NotRequired", missing.join(",")))
}

#[cfg(test)]
#[path = "webhook_tests.rs"]
pub(super) mod tests;
