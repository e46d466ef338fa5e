//! The pod of an attempt: the author's template, and what we add to it.
//!
//! Added: labels and finalizer, the owner, a closed gate, `restartPolicy: Never`, the checkpoint
//! claim, and two variables (`GAINSHARE_ATTEMPT`, and `GAINSHARE_CHECKPOINT_DIR` where there is a
//! claim). What the author wrote stays; the exceptions are `restartPolicy` and our own names.
//!
//! Refused: pods that would let a tenant pass the cluster's own rules. The operator makes pods for
//! everyone who may write a TrainingJob, so it makes none that reaches for its node (host paths and
//! namespaces, privileged containers) or names its node.
//!
//! **Property.** No template makes these functions panic: see `hostile_tests`.

use super::snapshot::JobSnapshot;
use gainshare_kube_api::names::{
    self, ATTEMPT_FINALIZER, CHECKPOINT_VOLUME as VOLUME, EPOCH_LABEL, JOB_LABEL, PLACE_GATE, POLICY_ANNOTATION,
};
use gainshare_kube_api::training_job::TrainingJob;
use k8s_openapi::api::core::v1::{PodSpec, PodTemplateSpec};
use kube::Resource;
use serde_json::{Map, Value, json};

/// The longest value a label can have.
const LONGEST_NAME: usize = 63;

/// The template, if pods can be made from it; otherwise what is wrong with the job, and the remedy.
pub(crate) fn check(job: &JobSnapshot) -> Result<PodTemplateSpec, String> {
    if job.name.len() > LONGEST_NAME {
        return Err(format!(
            "the job's name is a label of its pods and may have {LONGEST_NAME} letters: choose a shorter one"
        ));
    }
    let template: PodTemplateSpec =
        serde_json::from_str(&job.template).map_err(|error| format!("spec.template is no pod template: {error}"))?;
    let spec = template.spec.as_ref().filter(|spec| !spec.containers.is_empty());
    let Some(spec) = spec else {
        return Err("spec.template.spec.containers is missing: a job needs a container that trains".to_owned());
    };
    reaches_for_the_node(spec).map_or(Ok(()), Err)?;
    if let Some(checkpoint) = &job.spec.checkpoint
        && spec.volumes.iter().flatten().any(|volume| volume.name == VOLUME)
    {
        return Err(format!("the volume name {VOLUME} is ours, for the claim {}: rename yours", checkpoint.claim_name));
    }
    Ok(template)
}

fn reaches_for_the_node(spec: &PodSpec) -> Option<String> {
    let is = |flag: Option<bool>| flag == Some(true);
    if let Some(volume) = spec.volumes.iter().flatten().find(|volume| volume.host_path.is_some()) {
        return Some(format!("volume {} is a hostPath, which a TrainingJob may not have: use a claim", volume.name));
    }
    if is(spec.host_network) || is(spec.host_pid) || is(spec.host_ipc) {
        return Some("hostNetwork, hostPID and hostIPC are not for TrainingJobs: remove them".to_owned());
    }
    if spec.node_name.is_some() {
        return Some("nodeName goes around the scheduler: use nodeSelector or affinity".to_owned());
    }
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let privileged = containers.into_iter().find(|c| c.security_context.as_ref().is_some_and(|s| is(s.privileged)))?;
    Some(format!("container {} is privileged, which a TrainingJob may not be: remove it", privileged.name))
}

/// The pod of this epoch, gated.
pub(crate) fn build(job: &JobSnapshot, epoch: u32) -> Value {
    let template: Value = serde_json::from_str(&job.template).unwrap_or_default();
    let mut metadata = Map::new();
    metadata.insert("name".to_owned(), json!(format!("{}-{epoch}", job.name)));
    metadata.insert("namespace".to_owned(), json!(job.namespace));
    metadata.insert("labels".to_owned(), labels(job, &template, epoch));
    metadata.insert("annotations".to_owned(), annotations(job, &template));
    metadata.insert("finalizers".to_owned(), json!([ATTEMPT_FINALIZER]));
    metadata.insert(
        "ownerReferences".to_owned(),
        json!([{
            "apiVersion": TrainingJob::api_version(&()), "kind": TrainingJob::kind(&()),
            "name": job.name, "uid": job.uid, "controller": true, "blockOwnerDeletion": true,
        }]),
    );
    let mut spec = object(&template["spec"]);
    spec["restartPolicy"] = json!("Never");
    if spec["terminationGracePeriodSeconds"].is_null() {
        spec["terminationGracePeriodSeconds"] = json!(job.spec.run_policy.termination_grace_period_seconds);
    }
    push(&mut spec["schedulingGates"], json!({"name": PLACE_GATE}));
    if let Some(checkpoint) = &job.spec.checkpoint {
        push(
            &mut spec["volumes"],
            json!({"name": VOLUME, "persistentVolumeClaim": {"claimName": checkpoint.claim_name}}),
        );
    }
    for container in spec["containers"].as_array_mut().into_iter().flatten().filter(|container| container.is_object()) {
        fit_out(container, job, epoch);
    }
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
}

fn fit_out(container: &mut Value, job: &JobSnapshot, epoch: u32) {
    // A variable that the author has set stays.
    let set = |container: &mut Value, name: &str, value: &str| {
        if container["env"].as_array().into_iter().flatten().all(|one| one["name"] != name) {
            push(&mut container["env"], json!({"name": name, "value": value}));
        }
    };
    set(container, "GAINSHARE_ATTEMPT", &epoch.to_string());
    let Some(checkpoint) = &job.spec.checkpoint else { return };
    set(container, "GAINSHARE_CHECKPOINT_DIR", &checkpoint.path);
    let mounted = container["volumeMounts"].as_array().into_iter().flatten().any(|m| m["mountPath"] == checkpoint.path);
    if !mounted {
        let sub_path = checkpoint.sub_path.as_ref().unwrap_or(&job.name);
        push(
            &mut container["volumeMounts"],
            json!({"name": VOLUME, "mountPath": checkpoint.path, "subPath": sub_path}),
        );
    }
}

/// The object, or an empty one: fields of it can be set whatever the author wrote.
fn object(value: &Value) -> Value {
    if value.is_object() { value.clone() } else { json!({}) }
}

fn push(list: &mut Value, item: Value) {
    match list {
        Value::Array(items) => items.push(item),
        other => *other = json!([item]),
    }
}

fn labels(job: &JobSnapshot, template: &Value, epoch: u32) -> Value {
    let mut labels = object(&template["metadata"]["labels"]);
    labels[JOB_LABEL] = json!(job.name);
    labels[EPOCH_LABEL] = json!(epoch.to_string());
    labels
}

/// The job's objective, as annotations for the node agent. The template's own annotations stay.
fn annotations(job: &JobSnapshot, template: &Value) -> Value {
    let mut notes = object(&template["metadata"]["annotations"]);
    let objective = job.spec.objective.clone().unwrap_or_default();
    let collector = job.spec.metrics_collector.clone();
    let word = |value: Value| value.as_str().map(str::to_owned);
    let ours = [
        (names::METRIC_ANNOTATION, objective.metric),
        (names::OBJECTIVE_ANNOTATION, objective.kind.and_then(|direction| word(json!(direction)))),
        (names::COLLECTOR_ANNOTATION, collector.as_ref().and_then(|collector| word(json!(collector.kind)))),
        (names::PATTERN_ANNOTATION, collector.as_ref().and_then(|collector| collector.pattern.clone())),
        (names::PATH_ANNOTATION, collector.and_then(|collector| collector.path)),
        (POLICY_ANNOTATION, Some(job.spec.policy.name().to_owned())),
    ];
    for (key, value) in ours {
        if let Some(value) = value
            && notes[key].is_null()
        {
            notes[key] = json!(value);
        }
    }
    notes
}

/// The patch that pins a gated pod to a node and opens our gate. The API server refuses it if the
/// pod has changed since it was read.
pub(crate) fn open(pod: &Value, node: Option<&str>) -> Value {
    let others: Vec<&Value> = pod["spec"]["schedulingGates"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|gate| gate["name"] != PLACE_GATE)
        .collect();
    let mut patch = json!({
        "metadata": {"uid": pod["metadata"]["uid"], "resourceVersion": pod["metadata"]["resourceVersion"]},
        "spec": {"schedulingGates": others},
    });
    let Some(node) = node else { return patch };
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let mut affinity = pod["spec"]["affinity"]["nodeAffinity"].clone();
    let wanted = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    // Terms are alternatives, so each of them is narrowed.
    match affinity[required]["nodeSelectorTerms"].as_array_mut().filter(|terms| !terms.is_empty()) {
        Some(terms) => terms.iter_mut().for_each(|term| push(&mut term["matchFields"], wanted.clone())),
        None => affinity[required] = json!({"nodeSelectorTerms": [{"matchFields": [wanted]}]}),
    }
    patch["spec"]["affinity"] = json!({"nodeAffinity": affinity});
    patch
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::share_policy::{CollectorSpec, Direction, Objective};
    use gainshare_kube_api::training_job::{Checkpoint, TrainingJobSpec};

    fn job(template: Value) -> JobSnapshot {
        let spec = TrainingJobSpec {
            objective: Some(Objective { metric: Some("loss".to_owned()), kind: Some(Direction::Minimize) }),
            metrics_collector: Some(CollectorSpec::default()),
            checkpoint: Some(Checkpoint { claim_name: "work".to_owned(), path: "/ck".to_owned(), sub_path: None }),
            ..TrainingJobSpec::default()
        };
        JobSnapshot {
            name: "run".to_owned(),
            namespace: "team".to_owned(),
            uid: "u".to_owned(),
            spec,
            template: template.to_string(),
            ..JobSnapshot::default()
        }
    }

    #[test]
    fn the_authors_word_stands() {
        let job = job(json!({
            "metadata": {"labels": {"app": "x"}, "annotations": {"gainshare.dev/metric": "accuracy"}},
            "spec": {
                "restartPolicy": "Always", "terminationGracePeriodSeconds": 5, "futureField": {"kept": true},
                "schedulingGates": [{"name": "example.com/quota"}],
                "containers": [
                    {"name": "main", "image": "i", "env": [{"name": "GAINSHARE_ATTEMPT", "value": "mine"}],
                     "volumeMounts": [{"name": "own", "mountPath": "/ck"}]},
                    {"name": "side", "image": "i"},
                ],
            },
        }));
        check(&job).unwrap();
        let pod = build(&job, 7);
        assert_eq!(pod["metadata"]["name"], "run-7");
        assert_eq!(
            pod["metadata"]["labels"],
            json!({"app": "x", "gainshare.dev/job": "run", "gainshare.dev/epoch": "7"})
        );
        assert_eq!(pod["metadata"]["annotations"]["gainshare.dev/metric"], "accuracy");
        assert_eq!(pod["metadata"]["annotations"]["gainshare.dev/objective"], "minimize");
        assert_eq!(pod["metadata"]["annotations"]["gainshare.dev/policy"], "gainshare");
        let spec = &pod["spec"];
        assert_eq!((&spec["restartPolicy"], &spec["terminationGracePeriodSeconds"]), (&json!("Never"), &json!(5)));
        assert_eq!(spec["futureField"]["kept"], true, "fields we do not know reach the API server");
        assert_eq!(spec["schedulingGates"], json!([{"name": "example.com/quota"}, {"name": PLACE_GATE}]));
        let [main, side] = [&spec["containers"][0], &spec["containers"][1]];
        assert_eq!(main["env"][0]["value"], "mine");
        assert_eq!(main["volumeMounts"].as_array().unwrap().len(), 1, "the author's mount stands");
        assert_eq!(side["env"][0], json!({"name": "GAINSHARE_ATTEMPT", "value": "7"}));
        assert_eq!(side["volumeMounts"][0]["subPath"], "run");
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_reason() {
        let container = json!({"name": "main", "image": "i"});
        let privileged = json!({"name": "main", "image": "i", "securityContext": {"privileged": true}});
        for (template, helps) in [
            (json!({}), "containers is missing"),
            (json!({"spec": {"containers": []}}), "containers is missing"),
            (json!({"spec": {"containers": "main"}}), "no pod template"),
            (json!({"spec": {"containers": [container], "hostNetwork": true}}), "hostNetwork"),
            (json!({"spec": {"containers": [container], "nodeName": "n"}}), "nodeSelector"),
            (json!({"spec": {"containers": [privileged]}}), "privileged"),
            (
                json!({"spec": {"containers": [container], "volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}),
                "use a claim",
            ),
            (
                json!({"spec": {"containers": [container], "volumes": [{"name": VOLUME, "emptyDir": {}}]}}),
                "rename yours",
            ),
        ] {
            let text = check(&job(template.clone())).unwrap_err();
            assert!(text.contains(helps), "{template} was answered with {text:?}");
        }
        let mut long = job(json!({"spec": {"containers": [container]}}));
        long.name = "x".repeat(64);
        assert!(check(&long).unwrap_err().contains("shorter"));
    }

    #[test]
    fn a_pin_narrows_what_the_author_asked_for() {
        let gates = json!([{"name": "example.com/quota"}, {"name": PLACE_GATE}]);
        let plain = json!({"metadata": {"uid": "u", "resourceVersion": "5"}, "spec": {"schedulingGates": gates}});
        let opened = open(&plain, None);
        assert_eq!(opened["spec"], json!({"schedulingGates": [{"name": "example.com/quota"}]}));
        let pinned = open(&plain, Some("n1"));
        let terms = |pod: &Value| {
            pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
                .clone()
        };
        let wanted = json!({"key": "metadata.name", "operator": "In", "values": ["n1"]});
        assert_eq!(terms(&pinned), json!([{"matchFields": [wanted]}]));
        let mut choosy = plain;
        let zone = json!({"key": "zone", "operator": "Exists"});
        choosy["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] =
            json!([{"matchExpressions": [zone]}, {"matchExpressions": []}]);
        assert_eq!(
            terms(&open(&choosy, Some("n1"))),
            json!([{"matchExpressions": [zone], "matchFields": [wanted]}, {"matchExpressions": [], "matchFields": [wanted]}])
        );
    }
}
