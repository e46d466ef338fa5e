//! The pod of a task: the author's template, and what we add to it.
//!
//! Added: name, labels and finalizer, the owner, a closed gate, the role's restart policy, the checkpoint claim, and
//! the variables by which the tasks find each other. What the author wrote stays; the exceptions are
//! `restartPolicy` and our own names. What a TrainingJob's template may not contain is refused here, too.

use crate::jobs::training_job::pod::{TemplateError, annotations, check_template, fit_out, object, push, set_variable};
use crate::state::task_job::TaskJobSnapshot;
use gainshare_kube_api::names::{ATTEMPT_FINALIZER, CONTAINER_ANNOTATION, PLACE_GATE};
use gainshare_kube_api::task_objects::TaskJobRef;
use gainshare_kube_api::tasks::{DEFAULT_PORT, PORT_NAME, Role, TaskId, TaskJobSpec};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The job, as far as its tasks' objects depend on it. `CUSTOM_CLUSTER_DOMAIN` is a variable of the training
/// operator.
pub(crate) fn reference<'a>(
    job: &'a TaskJobSnapshot,
    spec: &'a TaskJobSpec,
    counts: &'a BTreeMap<Role, u32>,
    cluster_domain: Option<&'a str>,
) -> TaskJobRef<'a> {
    TaskJobRef {
        namespace: &job.key.name.namespace,
        name: &job.key.name.name,
        uid: &job.uid,
        epoch: job.status.journal.epoch,
        spec,
        counts,
        cluster_domain,
    }
}

/// Refuses templates from which no pods can be made.
pub(crate) fn check(spec: &TaskJobSpec) -> Result<(), (Role, TemplateError)> {
    for (role, role_spec) in &spec.roles {
        check_template(&role_spec.template, spec.options.checkpoint.as_ref()).map_err(|error| (*role, error))?;
    }
    Ok(())
}

/// The pod of a task, gated.
pub(crate) fn build(job: &TaskJobRef<'_>, task: TaskId) -> Option<Value> {
    let role = job.spec.roles.get(&task.role)?;
    let options = &job.spec.options;
    let template: Value = serde_json::from_str(&role.template).unwrap_or_default();
    let mut labels = object(&template["metadata"]["labels"]);
    for (key, value) in job.pod_labels(task) {
        labels[key] = json!(value);
    }
    let mut notes =
        annotations(&template, options.objective.as_ref(), options.metrics_collector.as_ref(), options.policy);
    // Without it the first container is the one that is measured and resized.
    if template["spec"]["containers"][0]["name"] != *role.main_container && notes[CONTAINER_ANNOTATION].is_null() {
        notes[CONTAINER_ANNOTATION] = json!(role.main_container);
    }
    let mut spec = object(&template["spec"]);
    spec["restartPolicy"] = json!(role.restart.map_or("Never", |restart| restart.of_pod()));
    let defaults = [
        ("terminationGracePeriodSeconds", options.run.grace_s.map(|grace_s| json!(grace_s))),
        ("priorityClassName", options.run.priority_class.as_ref().map(|class| json!(class))),
    ];
    for (key, value) in defaults {
        if let Some(value) = value
            && spec[key].is_null()
        {
            spec[key] = value;
        }
    }
    push(&mut spec["schedulingGates"], json!({"name": PLACE_GATE}));
    fit_out(&mut spec, options.checkpoint.as_ref(), job.name, job.epoch);
    let containers = spec["containers"].as_array_mut().into_iter().flatten();
    for container in containers.filter(|container| container["name"] == *role.main_container) {
        if let Some(config) = job.tf_config(task) {
            set_variable(container, "TF_CONFIG", &config);
        }
        for (name, value) in job.torch_variables(task) {
            set_variable(container, name, &value);
        }
        let is_named = |port: &Value| port["name"] == PORT_NAME;
        if options.is_tfjob && !container["ports"].as_array().into_iter().flatten().any(is_named) {
            push(&mut container["ports"], json!({"name": PORT_NAME, "containerPort": DEFAULT_PORT}));
        }
    }
    Some(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": task.object_name(job.name), "namespace": job.namespace, "labels": labels, "annotations": notes,
            "finalizers": [ATTEMPT_FINALIZER], "ownerReferences": [job.owner()],
        },
        "spec": spec,
    }))
}
