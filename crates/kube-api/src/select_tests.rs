//! Tests of [`super`].

use super::*;
use crate::fixtures::{facts, manifest};
use serde_json::{Value, json};

fn policy(name: &str, created: &str, spec: Value) -> PolicyFacts {
    let object = json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
        "metadata": {"namespace": "team", "name": name, "uid": name, "creationTimestamp": created},
        "spec": spec,
    });
    PolicyFacts::of(&serde_json::from_value(object).unwrap()).unwrap()
}

fn target(kind: &str, name: &str) -> PolicyFacts {
    policy("p", "2026-01-01T00:00:00Z", json!({"targetRef": {"kind": kind, "name": name}}))
}

/// A pod owned by this, with these labels.
fn owned(api_version: &str, kind: &str, name: &str, labels: Value) -> PodFacts {
    let mut pod = manifest();
    let owner = json!([{"apiVersion": api_version, "kind": kind, "name": name, "uid": "o", "controller": true}]);
    pod["metadata"]["ownerReferences"] = owner;
    pod["metadata"]["labels"] = labels;
    facts(&pod)
}

#[test]
fn selectors_as_the_api_server_means_them() {
    let selects = |selector: Value| {
        policy("p", "2026-01-01T00:00:00Z", json!({"selector": selector})).selects(&facts(&manifest()))
    };
    assert!(selects(json!({})), "an empty selector means all");
    assert!(selects(json!({"matchLabels": {"app": "train"}})));
    assert!(!selects(json!({"matchLabels": {"app": "serve"}})));
    let expression = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": "app", "operator": operator, "values": values}]});
    assert!(selects(expression("In", &["train", "tune"])) && !selects(expression("In", &["tune"])));
    assert!(selects(expression("NotIn", &["tune"])) && !selects(expression("NotIn", &["train"])));
    assert!(selects(expression("Exists", &[])) && !selects(expression("DoesNotExist", &[])));
    assert!(!selects(expression("Gt", &["1"])), "an unknown operator selects nothing");
    assert!(
        selects(json!({"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["a"]}]})),
        "absent is not in"
    );
}

#[test]
fn pods_of_our_tfjobs_are_measured_and_keep_their_resources() {
    let labels = |more: Value| {
        let mut labels =
            json!({JOB_LABEL: "mnist", names::EPOCH_LABEL: "1", names::ROLE_LABEL: "ps", names::INDEX_LABEL: "0"});
        labels.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        labels
    };
    let tfjob = |labels: Value| owned("kubeflow.org/v1", "TFJob", "mnist", labels);
    let share = by_tfjob(&tfjob(labels(json!({})))).unwrap();
    assert!(share.watch_only && share.name == "TFJob/na");
    assert_eq!(by_tfjob(&tfjob(labels(json!({names::SHARE_LABEL: "disabled"})))), None);
    assert_eq!(by_tfjob(&tfjob(json!({}))), None, "another operator's");
    assert_eq!(by_tfjob(&owned("gainshare.dev/v1alpha1", "TrainingJob", "mnist", labels(json!({})))), None);
    let mut scaled = tfjob(labels(json!({})));
    assert_eq!(by_job(&scaled), None);
    scaled.notes.insert(POLICY_ANNOTATION.to_owned(), "operator".to_owned());
    let share = by_job(&scaled).unwrap();
    assert!(share.watch_only && share.name == SCALED_POLICY, "the operator resizes it, not its node agent");
}

#[test]
fn jobs_of_different_aims_share_apart() {
    let share = |policy: &str, aim: Option<&str>| {
        let mut pod = owned("gainshare.dev/v1alpha1", "TrainingJob", "mnist", json!({}));
        pod.notes.insert(POLICY_ANNOTATION.to_owned(), policy.to_owned());
        pod.notes.extend(aim.map(|aim| (AIM_ANNOTATION.to_owned(), aim.to_owned())));
        let share = by_job(&pod).unwrap();
        (share.name, settings(&share.spec, &pod).aim)
    };
    let plain = ("TrainingJob/gainshare".to_owned(), None);
    for aim in [None, Some("finish"), Some("fast")] {
        assert_eq!(share("gainshare", aim), plain, "{aim:?}");
    }
    let quality = ("TrainingJob/gainshare/quality".to_owned(), Some(AimKind::Quality));
    assert_eq!(share("gainshare", Some("quality")), quality);
    assert_eq!(share("flowcon2", Some("quality")), ("TrainingJob/flowcon2".to_owned(), None), "it has no aim");
}

#[test]
fn owners_of_any_kind() {
    let job = owned("batch/v1", "Job", "train", json!({}));
    assert!(target("Job", "train").selects(&job) && !target("Job", "other").selects(&job));
    let unknown = owned("lab.example/v1", "Experiment", "e-7", json!({}));
    assert!(target("Experiment", "e-7").selects(&unknown), "a kind we have never heard of");
    let versioned = |version: &str| {
        policy(
            "p",
            "2026-01-01T00:00:00Z",
            json!({"targetRef": {"apiVersion": version, "kind": "Job", "name": "train"}}),
        )
    };
    assert!(versioned("batch/v1").selects(&job) && versioned("batch/v1beta1").selects(&job));
    assert!(!versioned("kubeflow.org/v1").selects(&job), "another group's Job");
}

#[test]
fn owners_behind_an_object_in_between() {
    let deployed = owned("apps/v1", "ReplicaSet", "web-7c9f", json!({"pod-template-hash": "7c9f"}));
    assert!(target("Deployment", "web").selects(&deployed));
    assert!(!target("Deployment", "we").selects(&deployed) && !target("Deployment", "web-7c9f").selects(&deployed));
    let scheduled = owned("batch/v1", "Job", "nightly-29384756", json!({}));
    assert!(target("CronJob", "nightly").selects(&scheduled) && !target("CronJob", "night").selects(&scheduled));
    let by_hand = owned("batch/v1", "Job", "nightly-manual", json!({}));
    assert!(!target("CronJob", "nightly").selects(&by_hand));
    let set = owned("batch/v1", "Job", "bert-node-0", json!({"jobset.sigs.k8s.io/jobset-name": "bert"}));
    assert!(target("JobSet", "bert").selects(&set) && target("TrainJob", "bert").selects(&set));
    assert!(target("Pod", "train-0").selects(&set));
}

#[test]
fn the_oldest_policy_has_the_pod() {
    let all = json!({"selector": {}});
    let policies = [
        policy("b", "2026-01-02T00:00:00Z", all.clone()),
        policy("c", "2026-01-01T00:00:00Z", all.clone()),
        policy("a", "2026-01-02T00:00:00Z", all.clone()),
    ];
    let pod = facts(&manifest());
    assert_eq!(choose(&policies, &pod).unwrap().name, "c");
    assert_eq!(choose(&policies[..1], &pod).unwrap().name, "b");
    assert_eq!(choose([&policies[0], &policies[2]], &pod).unwrap().name, "a", "of the same age, by name");
    let suspended = policy("z", "2025-01-01T00:00:00Z", json!({"selector": {}, "suspend": true}));
    assert_eq!(choose([&suspended, &policies[0]], &pod).unwrap().name, "b");
}

#[test]
fn an_author_can_keep_a_pod_out() {
    let mut pod = manifest();
    pod["metadata"]["labels"]["gainshare.dev/share"] = json!("disabled");
    assert!(!policy("p", "2026-01-01T00:00:00Z", json!({"selector": {}})).selects(&facts(&pod)));
    let labels = BTreeMap::from([("gainshare.dev/share".to_owned(), "enabled".to_owned())]);
    assert!(by_namespace(&labels, &facts(&manifest())) && !by_namespace(&labels, &facts(&pod)));
    assert!(!by_namespace(&BTreeMap::new(), &facts(&manifest())));
}

#[test]
fn a_pods_annotations_are_over_the_policy() {
    let spec: SharePolicySpec = serde_json::from_value(json!({
        "selector": {}, "objective": {"metric": "loss", "type": "minimize"}, "container": "main",
        "collector": {"kind": "stdout", "pattern": "a"},
    }))
    .unwrap();
    let mut pod = manifest();
    let said = settings(&spec, &facts(&pod));
    assert_eq!((said.metric.as_deref(), said.maximize), (Some("val_loss"), Some(false)));
    pod["metadata"]["annotations"] = json!({
        "gainshare.dev/objective": "maximize", "gainshare.dev/collector": "none", "gainshare.dev/pattern": "b",
        "gainshare.dev/container": "side",
    });
    let said = settings(&spec, &facts(&pod));
    assert_eq!(
        (said.metric.as_deref(), said.maximize, said.collector),
        (Some("loss"), Some(true), CollectorKind::None)
    );
    assert_eq!((said.pattern.as_deref(), container_name(&spec, &facts(&pod)).as_str()), (Some("b"), "side"));
    pod["metadata"]["annotations"] = json!({"gainshare.dev/objective": "sideways"});
    assert_eq!(settings(&spec, &facts(&pod)).maximize, Some(false), "an unknown word changes nothing");
}

#[test]
fn owners_have_names_for_people() {
    assert_eq!(owner_name(&facts(&manifest())), "Job/train");
    let mut alone = manifest();
    alone["metadata"]["ownerReferences"] = json!([]);
    assert_eq!(owner_name(&facts(&alone)), "Pod/train-0");
}

#[test]
fn the_target_of_a_pod_or_of_the_policy_is_a_setting() {
    let spec: SharePolicySpec =
        serde_json::from_value(json!({"selector": {}, "objective": {"metric": "loss", "goal": 0.2}})).unwrap();
    let with = |notes: Value| {
        let mut pod = manifest();
        pod["metadata"]["annotations"] = notes;
        let found = settings(&spec, &facts(&pod));
        (found.metric, found.target)
    };
    let loss = || Some("loss".to_owned());
    assert_eq!(with(json!({})), (loss(), Some(0.2)));
    assert_eq!(with(json!({names::TARGET_ANNOTATION: "0.05"})), (loss(), Some(0.05)));
    assert_eq!(with(json!({names::TARGET_ANNOTATION: "accuracy=0.9"})), (Some("accuracy".to_owned()), Some(0.9)));
    assert_eq!(with(json!({names::TARGET_ANNOTATION: "soon"})), (loss(), Some(0.2)));
}
