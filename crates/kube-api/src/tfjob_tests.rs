//! TFJob manifests as Kubeflow's users write them, and their conversion.

use super::*;
use crate::tasks::{RestartPolicy, Role};
use kube::CustomResourceExt;
use serde_json::json;

/// A manifest as people have them.
fn manifest() -> Value {
    let template = json!({"spec": {"containers": [{"name": "tensorflow", "image": "example/dist-mnist:1.0"}]}});
    json!({
        "apiVersion": "kubeflow.org/v1", "kind": "TFJob",
        "metadata": {"name": "dist-mnist", "namespace": "team", "labels": {"app": "mnist"}, "uid": "u"},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "None", "suspend": true, "schedulingPolicy": {"minAvailable": 2, "queue": "q"}},
            "tfReplicaSpecs": {
                "PS": {"replicas": 2, "restartPolicy": "Never", "template": template},
                "Worker": {"replicas": 4, "restartPolicy": "ExitCode", "template": template},
            },
        },
    })
}

#[test]
fn a_published_manifest_is_read_with_the_defaults_of_the_contract() {
    let job: TfJob = serde_json::from_value(manifest()).unwrap();
    let read = job.spec.task_job("dist-mnist").unwrap();
    assert_eq!(read.roles[&Role::Worker].restart, Some(RestartPolicy::ExitCode));
    let options = &read.options;
    assert!(options.is_tfjob && options.suspend && !options.is_foreign && !options.dynamic_workers);
    assert_eq!((options.run.clean, options.run.backoff_limit), (CleanPodPolicy::None, None));
    assert_eq!((options.run.min_available, options.queue.as_deref()), (Some(2), Some("q")));
    assert_eq!(options.success, SuccessPolicy::FirstWorker);
}

#[test]
fn wrong_words_are_answered_with_the_right_ones() {
    for (path, word, helps) in [
        ("/spec/runPolicy/cleanPodPolicy", "Some", "None, Running or All"),
        ("/spec/successPolicy", "Half", "AllWorkers"),
        ("/spec/tfReplicaSpecs/PS/restartPolicy", "Maybe", "ExitCode"),
    ] {
        let mut job = manifest();
        job["spec"]["successPolicy"] = json!("");
        *job.pointer_mut(path).unwrap() = json!(word);
        let job: TfJob = serde_json::from_value(job).unwrap();
        let said = job.spec.task_job("x").unwrap_err().to_string();
        assert!(said.contains(helps), "{path}: {said}");
    }
}

#[test]
fn jobs_of_other_managers_are_left_to_them() {
    for (manager, is_foreign) in [
        (json!(null), false),
        (json!(""), false),
        (json!("kubeflow.org/training-operator"), false),
        (json!("kueue.x-k8s.io/multikueue"), true),
    ] {
        let mut job = manifest();
        job["spec"]["runPolicy"]["managedBy"] = manager.clone();
        let job: TfJob = serde_json::from_value(job).unwrap();
        assert_eq!(job.spec.is_foreign(), is_foreign, "{manager}");
    }
}

#[test]
fn a_converted_job_describes_the_same_tasks() {
    let job: TfJob = serde_json::from_value(manifest()).unwrap();
    let (converted, notes) = to_training_job(&job).unwrap();
    assert_eq!(notes.len(), 3, "{notes:?}");
    let text = serde_json::to_value(&converted).unwrap();
    assert_eq!((&text["apiVersion"], &text["kind"]), (&json!("gainshare.dev/v1alpha1"), &json!("TrainingJob")));
    assert!(text["metadata"]["uid"].is_null() && text["status"].is_null() && text["spec"]["template"].is_null());
    assert_eq!(text["metadata"]["labels"], json!({"app": "mnist", QUEUE_LABEL: "q"}));
    let (before, after) = (job.spec.task_job("dist-mnist").unwrap(), converted.spec.task_job("dist-mnist").unwrap());
    let without_template = |read: &TaskJobSpec| {
        let mut roles = read.roles.clone();
        roles.values_mut().for_each(|role| role.template.clear());
        roles
    };
    assert_eq!(without_template(&before), without_template(&after));
    assert!(after.options.suspend);
}

#[test]
fn a_converted_job_keeps_its_priority_class() {
    let mut manifest = manifest();
    manifest["spec"]["runPolicy"]["schedulingPolicy"] = json!({"priorityClass": "high"});
    manifest["spec"]["tfReplicaSpecs"]["PS"]["template"]["spec"]["priorityClassName"] = json!("own");
    let (converted, notes) = to_training_job(&serde_json::from_value(manifest).unwrap()).unwrap();
    let class = |role: &str| converted.spec.replica_specs[role].template["spec"]["priorityClassName"].clone();
    assert_eq!((class("PS"), class("Worker")), (json!("own"), json!("high")));
    assert_eq!(notes.len(), 2, "{notes:?}");
}

/// A TFJob listens on `tfjob-port`, or 2222; a TrainingJob on the first port of its container.
#[test]
fn a_converted_job_keeps_its_addresses() {
    let mut manifest = manifest();
    let ports = |role: &str| format!("/spec/tfReplicaSpecs/{role}/template/spec/containers/0");
    manifest.pointer_mut(&ports("PS")).unwrap()["ports"] = json!([{"name": "metrics", "containerPort": 8080}]);
    manifest.pointer_mut(&ports("Worker")).unwrap()["ports"] =
        json!([{"containerPort": 8080}, {"name": "tfjob-port", "containerPort": 2300}]);
    let job: TfJob = serde_json::from_value(manifest).unwrap();
    let (before, (converted, _)) = (job.spec.task_job("x").unwrap(), to_training_job(&job).unwrap());
    let after = converted.spec.task_job("x").unwrap();
    for role in [Role::Ps, Role::Worker] {
        assert_eq!(before.roles[&role].port, after.roles[&role].port, "{role:?}");
    }
    assert_eq!((after.roles[&Role::Ps].port, after.roles[&Role::Worker].port), (2222, 2300));
    let worker = &converted.spec.replica_specs["Worker"].template["spec"]["containers"][0]["ports"];
    assert_eq!(worker.as_array().map(Vec::len), Some(2), "what is named stays: {worker}");
}

#[test]
fn a_converted_job_leaves_out_what_kubectl_keeps_about_the_tfjob() {
    let mut manifest = manifest();
    manifest["metadata"]["annotations"] = json!({LAST_APPLIED: "{}", "team": "a"});
    let (converted, _) = to_training_job(&serde_json::from_value(manifest).unwrap()).unwrap();
    assert_eq!(json!(converted.metadata.annotations), json!({"team": "a"}));
}

#[test]
fn a_converted_job_keeps_the_policy_of_its_annotation() {
    let mut manifest = manifest();
    manifest["metadata"]["annotations"] = json!({POLICY_ANNOTATION: "operator"});
    let (converted, _) = to_training_job(&serde_json::from_value(manifest).unwrap()).unwrap();
    assert_eq!(converted.spec.policy.preset(), Preset::Operator);
}

#[test]
fn the_annotation_names_a_policy_that_tfjobs_have() {
    for (text, policy) in [(None, None), (Some("na"), None), (Some("operator"), Some(Preset::Operator))] {
        assert_eq!(annotated_policy(text).map(|policy| policy.map(JobPolicy::preset)), Ok(policy), "{text:?}");
    }
    let said = annotated_policy(Some("magic")).unwrap_err().to_string();
    assert!(said.contains(POLICY_ANNOTATION) && said.contains("operator"), "{said}");
}

/// The API server refuses what the webhook of the training operator refuses.
#[test]
fn the_definition_has_the_rules_of_the_contract() {
    let crd = serde_json::to_value(TfJob::crd()).unwrap();
    let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
    let rules = |schema: &Value| {
        let rules = schema["x-kubernetes-validations"].as_array().cloned().unwrap_or_default();
        rules.iter().map(|rule| rule["rule"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let run = &spec["runPolicy"];
    assert!(rules(run)[0].contains("oldSelf.managedBy == self.managedBy"), "{run:#}");
    let managed_by = &run["properties"]["managedBy"];
    let words = rules(managed_by).concat();
    for word in ["''", TRAINING_OPERATOR, "kueue.x-k8s.io/multikueue", CONTROLLER] {
        assert!(words.contains(word), "{words}");
    }
    assert_eq!(rules(&run["properties"]["schedulingPolicy"]["properties"]["queue"]), ["self == oldSelf"]);
}

#[test]
fn the_definition_has_the_names_and_columns_of_kubeflow() {
    let crd = serde_json::to_value(TfJob::crd()).unwrap();
    assert_eq!(crd["metadata"]["name"], "tfjobs.kubeflow.org");
    assert_eq!(crd["spec"]["names"]["kind"], "TFJob");
    let version = &crd["spec"]["versions"][0];
    let columns = version["additionalPrinterColumns"].as_array().unwrap();
    let columns: Vec<&str> = columns.iter().map(|column| column["name"].as_str().unwrap()).collect();
    assert_eq!(columns, ["State", "Age", "Tasks", "Progress", "Time Left"]);
    let scale = &version["subresources"]["scale"];
    assert_eq!(scale["specReplicasPath"], ".spec.tfReplicaSpecs.Worker.replicas", "kubectl scale, and autoscalers");
    assert_eq!(scale["statusReplicasPath"], ".status.replicaStatuses.Worker.active");
    assert_eq!(scale["labelSelectorPath"], ".status.replicaStatuses.Worker.selector");
    let spec = &version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
    let role = &spec["tfReplicaSpecs"]["additionalProperties"]["properties"];
    assert_eq!(role["template"]["x-kubernetes-preserve-unknown-fields"], true);
}
