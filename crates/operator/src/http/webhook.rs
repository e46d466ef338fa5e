//! A good start for new pods: an admission webhook for namespaces that ask for it.
//!
//! **Problem.** How a training process starts matters more than any limit later: thread pools are sized once, by the machine's cores, and waiting threads
//! spin. **How.** In namespaces labelled `gainshare.dev/start=tuned`, containers of new pods get the same variables as jobs that
//! `gainshare run` starts (one list, in the process runtime), sized by the container's own CPU request, and a resize policy that does
//! not restart them. Everything added is named in an annotation.
//!
//! **Properties.** `never_overrides`: what the author wrote stays, and a container whose variables come from elsewhere (`envFrom`), where we cannot see
//! them, gets none. `harmless`: whatever is sent, the pod is allowed.

use gainshare_kube_api::names::{SHARE_LABEL, START_ANNOTATION};
use gainshare_kube_api::quantity;
use gainshare_limits::process::start::tuned_env;
use k8s_openapi::api::core::v1::{Container, ContainerResizePolicy, EnvVar, Pod};
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use serde_json::Value;

/// The answer to a review.
pub(crate) struct Reviewed {
    pub(crate) review: AdmissionReview<kube::core::DynamicObject>,
    pub(crate) changed: bool,
}

/// Answers a review. An error means that it was none.
pub(crate) fn review(review: Value) -> Result<Reviewed, String> {
    let review: AdmissionReview<Pod> =
        serde_json::from_value(review).map_err(|error| format!("this is no admission review of a pod: {error}"))?;
    let request: AdmissionRequest<Pod> =
        review.try_into().map_err(|error| format!("the admission review has no request: {error}"))?;
    let response = AdmissionResponse::from(&request);
    let tuned = request.object.as_ref().and_then(|pod| Some((pod, tune(pod)?)));
    let Some((before, after)) = tuned else {
        return Ok(Reviewed { review: response.into_review(), changed: false });
    };
    let patch = match (serde_json::to_value(before), serde_json::to_value(&after)) {
        (Ok(before), Ok(after)) => json_patch::diff(&before, &after),
        _ => return Ok(Reviewed { review: response.into_review(), changed: false }),
    };
    // A pod that cannot be patched is let through as it is: a good start is an offer, not a condition.
    match response.with_patch(patch) {
        Ok(patched) => Ok(Reviewed { review: patched.into_review(), changed: true }),
        Err(_) => Ok(Reviewed { review: AdmissionResponse::from(&request).into_review(), changed: false }),
    }
}

/// The pod with a good start; nothing if there is nothing to add.
fn tune(pod: &Pod) -> Option<Pod> {
    let out = |map: &Option<std::collections::BTreeMap<String, String>>, key: &str, value: &str| {
        map.as_ref().and_then(|map| map.get(key)).is_some_and(|found| found == value)
    };
    if out(&pod.metadata.labels, SHARE_LABEL, "disabled") || out(&pod.metadata.annotations, START_ANNOTATION, "plain") {
        return None;
    }
    let mut tuned = pod.clone();
    let mut added: Vec<String> = Vec::new();
    for container in &mut tuned.spec.as_mut()?.containers {
        let mut what = add_env(container);
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

fn add_env(container: &mut Container) -> Vec<String> {
    if container.env_from.as_ref().is_some_and(|from| !from.is_empty()) {
        return Vec::new();
    }
    let env = container.env.clone().unwrap_or_default();
    let set = |name: &str| env.iter().find(|var| var.name == name).map(|var| var.value.clone().unwrap_or_default());
    let request = quantity::resources(container.resources.as_ref()).requests.cpu_milli;
    let cores = request.map(|milli| milli.div_ceil(1000) as f64);
    let mut wanted = tuned_env(set, cores.unwrap_or(1.0), 1);
    if cores.is_none() {
        // Nothing says how many cores it can expect: only what does not depend on them.
        let with_more = tuned_env(set, 64.0, 1);
        wanted.retain(|var| with_more.contains(var));
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
mod tests;
