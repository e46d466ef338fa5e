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

use super::finish;
use crate::state::snapshot::JobSnapshot;
use gainshare_kube_api::names::{
    self, AIM_ANNOTATION, ATTEMPT_FINALIZER, CHECKPOINT_VOLUME as VOLUME, EPOCH_LABEL, INDEX_LABEL, JOB_LABEL,
    NodeName, PLACE_GATE, POLICY_ANNOTATION, ROLE_LABEL,
};
use gainshare_kube_api::share_policy::{CollectorSpec, Objective};
use gainshare_kube_api::training_job::{Checkpoint, JobPolicy, TrainingJob};
use k8s_openapi::api::core::v1::{Container, PodSpec, PodTemplateSpec};
use kube::Resource;
use serde_json::{Map, Value, json};

/// The longest value a label can have.
const LONGEST_NAME: usize = 63;

const UNCONFINED: &str = "Unconfined";

/// What the baseline of the Pod Security Standards lets containers add.
const SAFE_CAPABILITIES: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// What the same baseline lets pods set.
const SAFE_SYSCTLS: [&str; 10] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
];

/// Why no pod can be made from a job's template, and the remedy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TemplateError {
    #[error("the job's name is a label of its pods and may have {LONGEST_NAME} letters: choose a shorter one")]
    NameTooLong,
    #[error("spec.template is not a pod template: {0}")]
    NotATemplate(#[from] serde_json::Error),
    #[error("spec.template.spec.containers is missing: a job needs a container that trains")]
    NoContainers,
    #[error("the volume name {VOLUME} is ours, for the claim {claim}: rename yours")]
    VolumeName { claim: String },
    #[error("volume {volume} is a hostPath, which a TrainingJob may not have: use a claim")]
    HostPath { volume: String },
    #[error("hostNetwork, hostPID and hostIPC are not for TrainingJobs: remove them")]
    HostNamespaces,
    #[error("nodeName goes around the scheduler: use nodeSelector or affinity")]
    NodeName,
    #[error("sysctl {sysctl} may affect the node: remove it")]
    Sysctl { sysctl: String },
    #[error("container {container} is privileged, which a TrainingJob may not be: remove it")]
    Privileged { container: String },
    #[error("container {container} has a hostPort, which takes a port of the node: remove it")]
    HostPort { container: String },
    #[error("container {container} adds the capability {capability}, which reaches for the node: remove it")]
    Capability { container: String, capability: String },
    #[error("{what} of container {container} takes protection away: remove it")]
    Unconfined { container: String, what: &'static str },
}

/// The template, if pods can be made from it.
pub(crate) fn check(job: &JobSnapshot) -> Result<PodTemplateSpec, TemplateError> {
    if job.name.len() > LONGEST_NAME {
        return Err(TemplateError::NameTooLong);
    }
    check_template(&job.template, job.spec.checkpoint.as_ref())
}

/// The template, if pods can be made from it.
pub(crate) fn check_template(text: &str, checkpoint: Option<&Checkpoint>) -> Result<PodTemplateSpec, TemplateError> {
    let template: PodTemplateSpec = serde_json::from_str(text)?;
    let spec = template.spec.as_ref().filter(|spec| !spec.containers.is_empty());
    check_isolation(spec.ok_or(TemplateError::NoContainers)?)?;
    let volumes = template.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    if let Some(checkpoint) = checkpoint
        && volumes.into_iter().any(|volume| volume.name == VOLUME)
    {
        return Err(TemplateError::VolumeName { claim: checkpoint.claim_name.clone() });
    }
    Ok(template)
}

/// Refuses what the baseline of the Pod Security Standards refuses, and a node's name.
fn check_isolation(spec: &PodSpec) -> Result<(), TemplateError> {
    let is = |flag: Option<bool>| flag == Some(true);
    if let Some(volume) = spec.volumes.iter().flatten().find(|volume| volume.host_path.is_some()) {
        return Err(TemplateError::HostPath { volume: volume.name.clone() });
    }
    if is(spec.host_network) || is(spec.host_pid) || is(spec.host_ipc) {
        return Err(TemplateError::HostNamespaces);
    }
    if spec.node_name.is_some() {
        return Err(TemplateError::NodeName);
    }
    let context = spec.security_context.as_ref();
    let sysctls = context.iter().flat_map(|context| context.sysctls.iter().flatten());
    if let Some(sysctl) = sysctls.into_iter().find(|sysctl| !SAFE_SYSCTLS.contains(&sysctl.name.as_str())) {
        return Err(TemplateError::Sysctl { sysctl: sysctl.name.clone() });
    }
    let container = "the pod".to_owned();
    if let Some(context) = context {
        let host_process = context.windows_options.as_ref().is_some_and(|windows| is(windows.host_process));
        let seccomp = context.seccomp_profile.as_ref().is_some_and(|profile| profile.type_ == UNCONFINED);
        let app_armor = context.app_armor_profile.as_ref().is_some_and(|profile| profile.type_ == UNCONFINED);
        if let Some(what) = unconfined(host_process, seccomp, app_armor) {
            return Err(TemplateError::Unconfined { container, what });
        }
    }
    spec.init_containers.iter().flatten().chain(&spec.containers).try_for_each(check_container)
}

fn unconfined(host_process: bool, seccomp: bool, app_armor: bool) -> Option<&'static str> {
    let found = [(host_process, "hostProcess"), (seccomp, "seccompProfile"), (app_armor, "appArmorProfile")];
    found.into_iter().find_map(|(is, what)| is.then_some(what))
}

fn check_container(container: &Container) -> Result<(), TemplateError> {
    let name = || container.name.clone();
    if container.ports.iter().flatten().any(|port| port.host_port.is_some_and(|port| port != 0)) {
        return Err(TemplateError::HostPort { container: name() });
    }
    let Some(context) = &container.security_context else { return Ok(()) };
    if context.privileged == Some(true) {
        return Err(TemplateError::Privileged { container: name() });
    }
    let added = context.capabilities.iter().flat_map(|capabilities| capabilities.add.iter().flatten());
    if let Some(capability) = added.into_iter().find(|added| !SAFE_CAPABILITIES.contains(&added.as_str())) {
        return Err(TemplateError::Capability { container: name(), capability: capability.clone() });
    }
    if context.proc_mount.as_ref().is_some_and(|mount| mount != "Default") {
        return Err(TemplateError::Unconfined { container: name(), what: "procMount" });
    }
    let host_process = context.windows_options.as_ref().is_some_and(|windows| windows.host_process == Some(true));
    let seccomp = context.seccomp_profile.as_ref().is_some_and(|profile| profile.type_ == UNCONFINED);
    let app_armor = context.app_armor_profile.as_ref().is_some_and(|profile| profile.type_ == UNCONFINED);
    match unconfined(host_process, seccomp, app_armor) {
        Some(what) => Err(TemplateError::Unconfined { container: name(), what }),
        None => Ok(()),
    }
}

/// The pod of this epoch, gated.
pub(crate) fn build(job: &JobSnapshot, epoch: u32) -> Value {
    let template: Value = serde_json::from_str(&job.template).unwrap_or_default();
    let mut metadata = Map::new();
    metadata.insert("name".to_owned(), json!(format!("{}-{epoch}", job.name)));
    metadata.insert("namespace".to_owned(), json!(job.namespace));
    metadata.insert("labels".to_owned(), labels(job, &template, epoch));
    let (objective, collector) = (job.spec.objective.as_ref(), job.spec.metrics_collector.as_ref());
    let mut notes = annotations(&template, objective, collector, Some(job.spec.policy));
    let aim = job.spec.aim.map(|aim| aim.name().to_owned());
    add_missing(&mut notes, [(AIM_ANNOTATION, aim)]);
    let deadline = [
        (names::DEADLINE_ANNOTATION, finish::for_pod(job)),
        (names::DEADLINE_TOLERANCE_ANNOTATION, job.spec.deadline_tolerance.clone()),
    ];
    add_missing(&mut notes, deadline);
    metadata.insert("annotations".to_owned(), notes);
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
    fit_out(&mut spec, job.spec.checkpoint.as_ref(), &job.name, epoch);
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
}

/// Adds the checkpoint claim and the variables of an attempt to a pod.
pub(crate) fn fit_out(spec: &mut Value, checkpoint: Option<&Checkpoint>, job: &str, epoch: u32) {
    if let Some(checkpoint) = checkpoint {
        let claim = json!({"name": VOLUME, "persistentVolumeClaim": {"claimName": checkpoint.claim_name}});
        push(&mut spec["volumes"], claim);
    }
    for container in spec["containers"].as_array_mut().into_iter().flatten().filter(|container| container.is_object()) {
        fit_out_container(container, checkpoint, job, epoch);
    }
}

/// Sets a variable of a container, unless its author has set it.
pub(crate) fn set_variable(container: &mut Value, name: &str, value: &str) {
    if container["env"].as_array().into_iter().flatten().all(|one| one["name"] != name) {
        push(&mut container["env"], json!({"name": name, "value": value}));
    }
}

fn fit_out_container(container: &mut Value, checkpoint: Option<&Checkpoint>, job: &str, epoch: u32) {
    set_variable(container, "GAINSHARE_ATTEMPT", &epoch.to_string());
    let Some(checkpoint) = checkpoint else { return };
    set_variable(container, "GAINSHARE_CHECKPOINT_DIR", &checkpoint.path);
    let mounted = container["volumeMounts"].as_array().into_iter().flatten().any(|m| m["mountPath"] == checkpoint.path);
    if !mounted {
        let sub_path = checkpoint.sub_path.as_deref().unwrap_or(job);
        push(
            &mut container["volumeMounts"],
            json!({"name": VOLUME, "mountPath": checkpoint.path, "subPath": sub_path}),
        );
    }
}

/// The object, or an empty one: fields of it can be set whatever the author wrote.
pub(crate) fn object(value: &Value) -> Value {
    if value.is_object() { value.clone() } else { json!({}) }
}

pub(crate) fn push(list: &mut Value, item: Value) {
    match list {
        Value::Array(items) => items.push(item),
        other => *other = json!([item]),
    }
}

fn labels(job: &JobSnapshot, template: &Value, epoch: u32) -> Value {
    let mut labels = object(&template["metadata"]["labels"]);
    labels[JOB_LABEL] = json!(job.name);
    labels[EPOCH_LABEL] = json!(epoch.to_string());
    // With these it would be taken for a task of a distributed job.
    if let Some(labels) = labels.as_object_mut() {
        labels.retain(|key, _| key != ROLE_LABEL && key != INDEX_LABEL);
    }
    labels
}

/// Adds the annotations that the template does not have.
fn add_missing<const N: usize>(notes: &mut Value, ours: [(&str, Option<String>); N]) {
    for (key, value) in ours {
        if let Some(value) = value
            && notes[key].is_null()
        {
            notes[key] = json!(value);
        }
    }
}

/// The job's objective, as annotations for the node agent. The template's own annotations stay.
pub(crate) fn annotations(
    template: &Value,
    objective: Option<&Objective>,
    collector: Option<&CollectorSpec>,
    policy: Option<JobPolicy>,
) -> Value {
    let mut notes = object(&template["metadata"]["annotations"]);
    let objective = objective.cloned().unwrap_or_default();
    let collector = collector.cloned();
    let word = |value: Value| value.as_str().map(str::to_owned);
    let ours = [
        (names::METRIC_ANNOTATION, objective.metric),
        (names::OBJECTIVE_ANNOTATION, objective.kind.and_then(|direction| word(json!(direction)))),
        (names::TARGET_ANNOTATION, objective.goal.map(|goal| goal.to_string())),
        (names::COLLECTOR_ANNOTATION, collector.as_ref().and_then(|collector| word(json!(collector.kind)))),
        (names::PATTERN_ANNOTATION, collector.as_ref().and_then(|collector| collector.pattern.clone())),
        (names::PATH_ANNOTATION, collector.and_then(|collector| collector.path)),
        (POLICY_ANNOTATION, policy.map(|policy| policy.name().to_owned())),
    ];
    add_missing(&mut notes, ours);
    notes
}

/// The patch that pins a gated pod to a node and opens our gate. The API server refuses it if the
/// pod has changed since it was read.
pub(crate) fn open(pod: &Value, node: Option<&NodeName>) -> Value {
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
    use gainshare_kube_api::share_policy::Direction;
    use gainshare_kube_api::training_job::TrainingJobSpec;

    fn job(template: Value) -> JobSnapshot {
        let spec = TrainingJobSpec {
            objective: Some(Objective {
                metric: Some("loss".to_owned()),
                kind: Some(Direction::Minimize),
                goal: Some(0.05),
            }),
            metrics_collector: Some(CollectorSpec::default()),
            checkpoint: Some(Checkpoint { claim_name: "work".to_owned(), path: "/ck".to_owned(), sub_path: None }),
            ..TrainingJobSpec::default()
        };
        JobSnapshot {
            name: "run".to_owned(),
            namespace: "team".to_owned(),
            uid: "u".into(),
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
        assert_eq!(pod["metadata"]["annotations"]["gainshare.dev/target"], "0.05");
        assert_eq!(pod["metadata"]["annotations"]["gainshare.dev/policy"], "gainshare");
        assert!(pod["metadata"]["annotations"]["gainshare.dev/aim"].is_null());
        let mut aimed = job.clone();
        aimed.spec.aim = Some(gainshare_kube_api::aim::AimKind::Quality);
        assert_eq!(build(&aimed, 7)["metadata"]["annotations"]["gainshare.dev/aim"], "quality");
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
        let with = |more: Value| {
            let mut container = container.clone();
            container.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"spec": {"containers": [container]}})
        };
        for (template, helps) in [
            (json!({}), "containers is missing"),
            (json!({"spec": {"containers": []}}), "containers is missing"),
            (json!({"spec": {"containers": "main"}}), "not a pod template"),
            (json!({"spec": {"containers": [container], "hostNetwork": true}}), "hostNetwork"),
            (json!({"spec": {"containers": [container], "nodeName": "n"}}), "nodeSelector"),
            (json!({"spec": {"containers": [privileged]}}), "privileged"),
            (with(json!({"ports": [{"containerPort": 80, "hostPort": 80}]})), "hostPort"),
            (with(json!({"securityContext": {"capabilities": {"add": ["CHOWN", "SYS_ADMIN"]}}})), "SYS_ADMIN"),
            (with(json!({"securityContext": {"procMount": "Unmasked"}})), "procMount"),
            (with(json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}})), "seccompProfile"),
            (with(json!({"securityContext": {"windowsOptions": {"hostProcess": true}}})), "hostProcess"),
            (
                json!({"spec": {"containers": [container], "securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}}),
                "kernel.msgmax",
            ),
            (
                json!({"spec": {"containers": [container], "securityContext": {"appArmorProfile": {"type": "Unconfined"}}}}),
                "appArmorProfile",
            ),
            (
                json!({"spec": {"containers": [container], "volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}),
                "use a claim",
            ),
            (
                json!({"spec": {"containers": [container], "volumes": [{"name": VOLUME, "emptyDir": {}}]}}),
                "rename yours",
            ),
        ] {
            let text = check(&job(template.clone())).unwrap_err().to_string();
            assert!(text.contains(helps), "{template} was answered with {text:?}");
        }
        let mut long = job(json!({"spec": {"containers": [container]}}));
        long.name = "x".repeat(64);
        assert!(check(&long).unwrap_err().to_string().contains("shorter"));
    }

    #[test]
    fn a_pin_narrows_what_the_author_asked_for() {
        let gates = json!([{"name": "example.com/quota"}, {"name": PLACE_GATE}]);
        let plain = json!({"metadata": {"uid": "u", "resourceVersion": "5"}, "spec": {"schedulingGates": gates}});
        let opened = open(&plain, None);
        assert_eq!(opened["spec"], json!({"schedulingGates": [{"name": "example.com/quota"}]}));
        let pinned = open(&plain, Some(&"n1".into()));
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
            terms(&open(&choosy, Some(&"n1".into()))),
            json!([{"matchExpressions": [zone], "matchFields": [wanted]}, {"matchExpressions": [], "matchFields": [wanted]}])
        );
    }
}
