//! The chart's admission policies, evaluated without a cluster: each change that the operator makes is allowed,
//! and each way to misuse its account is denied.
//!
//! **How.** The policies are read from the chart's template. Its few placeholders are filled in, and the CEL
//! expressions are evaluated by a CEL library in this process. A real API server evaluates the same policies in
//! `cluster.rs`.

use kube::core::cel::cel::extractors::This;
use kube::core::cel::cel::objects::Key;
use kube::core::cel::cel::{Context, ExecutionError, Program, Value as Cel};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

const SYSTEM: &str = "gainshare-system";

/// The policy's spec, by the end of its name.
fn policy(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/chart/templates/admission.yaml");
    let template = std::fs::read_to_string(path).unwrap();
    let filled = template
        .replace("{{ $account }}", &format!("system:serviceaccount:{SYSTEM}:gainshare-operator"))
        .replace("{{ $cluster }}", "['kube-system', 'kube-public', 'kube-node-lease']")
        .replace("{{ $system }}", &format!("['kube-system', 'kube-public', 'kube-node-lease', '{SYSTEM}']"))
        .replace("{{ $owners }}", "owner.kind == 'TrainingJob' && owner.apiVersion.startsWith('gainshare.dev/')")
        .replace("{{ .Release.Namespace }}", SYSTEM)
        .replace("{{ include \"gainshare.image\" . }}", "gainshare:1")
        .replace("{{- include \"gainshare.labels\" . | nindent 4 }}", "{}");
    let start = filled.find("apiVersion:").unwrap();
    let end = filled.find("{{- $policies :=").unwrap();
    let plain: Vec<&str> = filled[start..end].lines().filter(|line| !line.starts_with("{{")).collect();
    let all: Vec<Value> = serde_saphyr::from_multiple(&plain.join("\n")).unwrap();
    let name = format!("gainshare-operator-{name}");
    let found = all.into_iter().find(|policy| policy["metadata"]["name"] == name.as_str());
    found.unwrap_or_else(|| panic!("the chart has no policy {name}"))["spec"].clone()
}

/// JSON as the API server hands it to CEL: whole numbers are signed.
fn cel(value: &Value) -> Cel {
    match value {
        Value::Null => Cel::Null,
        Value::Bool(flag) => Cel::Bool(*flag),
        Value::Number(number) => number.as_i64().map_or_else(|| Cel::Float(number.as_f64().unwrap()), Cel::Int),
        Value::String(text) => Cel::from(text.clone()),
        Value::Array(items) => Cel::from(items.iter().map(cel).collect::<Vec<_>>()),
        Value::Object(fields) => {
            let map: HashMap<Key, Cel> =
                fields.iter().map(|(key, value)| (Key::from(key.clone()), cel(value))).collect();
            Cel::from(map)
        }
    }
}

/// Optional fields: `a.?b` is written as `a.at('b')`, because the library fails on `.?` of a field that is
/// absent. An optional value is a list with one element or none here.
fn evaluate(expression: &str, context: &Context) -> Result<Cel, String> {
    let mut parts = expression.split(".?");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(part.len());
        plain.push_str(&format!(".at('{}'){}", &part[..end], &part[end..]));
    }
    let program = Program::compile(&plain).map_err(|error| format!("{plain}: {error}"))?;
    program.execute(context).map_err(|error| format!("{plain}: {error}"))
}

type FunctionResult = Result<Cel, ExecutionError>;

fn at(This(value): This<Cel>, name: Arc<String>) -> FunctionResult {
    let field = |value: &Cel| match value {
        Cel::Map(map) => map.map.get(&Key::from(name.to_string())).cloned(),
        _ => None,
    };
    let found = match &value {
        Cel::List(optional) => optional.first().and_then(field),
        value => field(value),
    };
    Ok(Cel::from(found.into_iter().collect::<Vec<_>>()))
}

fn or_value(This(optional): This<Cel>, default: Cel) -> FunctionResult {
    match &optional {
        Cel::List(optional) => Ok(optional.first().cloned().unwrap_or(default)),
        other => Err(ExecutionError::function_error("orValue", format!("{other:?} is not optional"))),
    }
}

fn has_value(This(optional): This<Cel>) -> FunctionResult {
    Ok(Cel::Bool(matches!(&optional, Cel::List(optional) if !optional.is_empty())))
}

/// A request of the operator in a namespace.
struct Request {
    namespace: &'static str,
    namespace_labels: Value,
    namespace_annotations: Value,
    object: Value,
    old: Value,
}

impl Request {
    /// The messages of the validations that deny the request; an expression that fails denies it, too.
    fn denials(&self, name: &str) -> Vec<String> {
        self.denials_of(name, &format!("system:serviceaccount:{SYSTEM}:gainshare-operator"))
    }

    /// The same for a request of another user.
    fn denials_of(&self, name: &str, user: &str) -> Vec<String> {
        let policy = policy(name);
        let mut context = Context::default();
        context.add_function("dyn", |value: Cel| -> FunctionResult { Ok(value) });
        context.add_function("at", at);
        context.add_function("orValue", or_value);
        context.add_function("hasValue", has_value);
        context.add_variable_from_value("object", cel(&self.object));
        context.add_variable_from_value("oldObject", cel(&self.old));
        let user = json!({"username": user});
        let operation = match (self.object.is_null(), self.old.is_null()) {
            (true, _) => "DELETE",
            (false, true) => "CREATE",
            (false, false) => "UPDATE",
        };
        let request = json!({"namespace": self.namespace, "userInfo": user, "operation": operation});
        context.add_variable_from_value("request", cel(&request));
        let metadata = json!({
            "name": self.namespace, "labels": self.namespace_labels, "annotations": self.namespace_annotations,
        });
        context.add_variable_from_value("namespaceObject", cel(&json!({"metadata": metadata})));
        let conditions = policy["matchConditions"].as_array().unwrap();
        let holds = |condition: &Value| evaluate(condition["expression"].as_str().unwrap(), &context);
        assert_eq!(holds(&conditions[0]), Ok(Cel::Bool(true)), "the policy is about such requests");
        if conditions.iter().any(|condition| holds(condition) == Ok(Cel::Bool(false))) {
            return vec![format!("{name} does not apply")];
        }
        let mut variables: HashMap<Key, Cel> = HashMap::new();
        for variable in policy["variables"].as_array().into_iter().flatten() {
            context.add_variable_from_value("variables", Cel::from(variables.clone()));
            let value = evaluate(variable["expression"].as_str().unwrap(), &context).unwrap();
            variables.insert(Key::from(variable["name"].as_str().unwrap().to_owned()), value);
        }
        context.add_variable_from_value("variables", Cel::from(variables));
        let mut denials = Vec::new();
        for validation in policy["validations"].as_array().unwrap() {
            match evaluate(validation["expression"].as_str().unwrap(), &context) {
                Ok(Cel::Bool(true)) => {}
                Ok(Cel::Bool(false)) => {
                    let message =
                        validation["messageExpression"].as_str().map(|text| evaluate(text, &context).unwrap());
                    denials.push(match message {
                        Some(Cel::String(text)) => text.to_string(),
                        _ => validation["message"].as_str().unwrap().to_owned(),
                    });
                }
                other => denials.push(format!("error: {other:?}")),
            }
        }
        denials
    }
}

/// A pod as the operator creates it.
fn pod() -> Value {
    json!({
        "metadata": {
            "name": "run-3", "namespace": "team", "finalizers": ["gainshare.dev/attempt"],
            "labels": {"gainshare.dev/job": "run", "gainshare.dev/epoch": "3", "app": "vae"},
            "annotations": {"gainshare.dev/policy": "gainshare"},
            "ownerReferences": [{
                "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "name": "run", "controller": true,
                "uid": "0b54d1c2-9f51-4a8e-8e2f-0d5a7b1c2d3e", "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "restartPolicy": "Never", "serviceAccountName": "default",
            "schedulingGates": [{"name": "example.com/quota"}, {"name": "gainshare.dev/place"}],
            "volumes": [
                {"name": "keep", "persistentVolumeClaim": {"claimName": "work"}},
                {"name": "kube-api-access-x", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
            ],
            "containers": [{"name": "main", "image": "train:1", "env": [{"name": "A", "value": "1"}]}],
        },
    })
}

fn container(pod: &mut Value) -> &mut Value {
    &mut pod["spec"]["containers"][0]
}

fn request(object: Value, old: Value) -> Request {
    let namespace_labels = json!({"gainshare.dev/jobs": "enabled"});
    Request { namespace: "team", namespace_labels, namespace_annotations: json!({}), object, old }
}

fn creation(change: impl FnOnce(&mut Value)) -> Request {
    let mut object = pod();
    change(&mut object);
    request(object, Value::Null)
}

fn allowed(request: &Request, policy: &str) {
    assert_eq!(request.denials(policy), [""; 0]);
}

/// Exactly one validation denies the request, in these words.
fn denied(request: &Request, policy: &str, words: &str) {
    let denials = request.denials(policy);
    assert!(denials.len() == 1 && denials[0].contains(words), "{denials:?} should be about {words:?}");
}

#[test]
fn the_operators_own_changes_are_allowed() {
    allowed(&creation(|_| {}), "pods-create");
    allowed(&request(Value::Null, pod()), "pods-delete");
    let wanted = json!({"key": "metadata.name", "operator": "In", "values": ["n1"]});
    let required = json!({"nodeSelectorTerms": [{"matchFields": [wanted]}]});
    let mut opened = pod();
    opened["spec"]["schedulingGates"] = json!([{"name": "example.com/quota"}]);
    opened["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}});
    let mut noted = pod();
    noted["metadata"]["annotations"]["gainshare.dev/original-resources"] = json!("{}");
    let mut released = pod();
    released["metadata"].as_object_mut().unwrap().remove("finalizers");
    let mut unmarked = pod();
    unmarked["metadata"]["labels"].as_object_mut().unwrap().remove("gainshare.dev/job");
    for changed in [opened, noted.clone(), released, unmarked, pod()] {
        allowed(&request(changed, pod()), "pods-update");
    }
    allowed(&request(noted.clone(), noted), "pods-resize");
    let mut leading = pod();
    leading["metadata"]["labels"]["gainshare.dev/leader"] = json!("true");
    allowed(&Request { namespace: SYSTEM, ..request(leading.clone(), pod()) }, "pods-update");
    denied(&request(leading, pod()), "pods-update", "gainshare.dev/leader on its own pods");
}

#[test]
fn other_changes_of_pods_are_denied() {
    let update = |change: &dyn Fn(&mut Value)| {
        let mut object = pod();
        change(&mut object);
        request(object, pod())
    };
    let spec = "changes no pod's spec";
    denied(&update(&|pod| container(pod)["image"] = json!("evil")), "pods-update", spec);
    denied(&update(&|pod| pod["spec"]["activeDeadlineSeconds"] = json!(1)), "pods-update", spec);
    denied(&update(&|pod| pod["spec"]["tolerations"] = json!([{"operator": "Exists"}])), "pods-update", spec);
    denied(&update(&|pod| drop(pod["spec"].as_object_mut().unwrap().remove("volumes"))), "pods-update", spec);
    denied(&update(&|pod| pod["spec"]["schedulingGates"] = json!([])), "pods-update", "its own scheduling gate");
    denied(&update(&|pod| pod["metadata"]["ownerReferences"][0]["uid"] = json!("x")), "pods-update", "no pod's owner");
    denied(&update(&|pod| pod["metadata"]["finalizers"] = json!(["a/b"])), "pods-update", "its own finalizer");
    denied(&update(&|pod| pod["metadata"]["labels"]["app"] = json!("x")), "pods-update", "its own label");
    denied(
        &update(&|pod| pod["metadata"]["annotations"]["a"] = json!("b")),
        "pods-update",
        "begin with gainshare.dev/",
    );
    let affinity = json!({"podAffinity": {"x": 1}});
    denied(&update(&|pod| pod["spec"]["affinity"] = affinity.clone()), "pods-update", "behind its scheduling gate");
    let mut open = pod();
    open["spec"]["schedulingGates"] = json!([]);
    let mut pinned = open.clone();
    pinned["spec"]["affinity"] = json!({"nodeAffinity": {"x": 1}});
    denied(&request(pinned, open), "pods-update", "behind its scheduling gate");
    denied(&request(pod(), pod()), "pods-resize", "gainshare.dev/original-resources");
    let mut noted = pod();
    noted["metadata"]["annotations"]["gainshare.dev/original-resources"] = json!("{}");
    let system = Request { namespace: "kube-system", ..request(noted.clone(), noted.clone()) };
    denied(&system, "pods-resize", "the cluster's own namespaces");
    for namespace in ["kube-system", "kube-public", "kube-node-lease"] {
        let annotated = Request { namespace, ..request(noted.clone(), pod()) };
        denied(&annotated, "pods-update", "no pods of the cluster's own namespaces");
    }
}

#[test]
fn original_resources_are_written_by_the_operator_only() {
    let with = |originals: &str| {
        let mut noted = pod();
        noted["metadata"]["annotations"]["gainshare.dev/original-resources"] = json!(originals);
        noted
    };
    let tenant = |object: Value, old: Value| request(object, old).denials_of("originals", "tenant");
    let is_denied = |denials: Vec<String>| denials.len() == 1 && denials[0].contains("by Gainshare's operator only");
    assert!(is_denied(tenant(with("{}"), Value::Null)), "a pod that is created with it");
    assert!(is_denied(tenant(with("{}"), pod())), "it is added");
    assert!(is_denied(tenant(with("{1}"), with("{}"))), "it is changed");
    let mut bare = pod();
    bare["metadata"].as_object_mut().unwrap().remove("annotations");
    assert!(is_denied(tenant(with("{}"), bare)), "there was no annotation at all");
    assert_eq!(tenant(with("{}"), with("{}")), [""; 0], "it stays as it is");
    assert_eq!(request(with("{}"), pod()).denials("originals"), ["originals does not apply"], "the operator writes it");
}

#[test]
fn foreign_pods_are_not_deleted() {
    let mut foreign = pod();
    foreign["metadata"].as_object_mut().unwrap().remove("ownerReferences");
    let mut of_a_set = pod();
    of_a_set["metadata"]["ownerReferences"][0]["kind"] = json!("ReplicaSet");
    let mut unlabelled = pod();
    unlabelled["metadata"].as_object_mut().unwrap().remove("labels");
    for pod in [foreign, of_a_set, unlabelled] {
        denied(&request(Value::Null, pod), "pods-delete", "its placeholders and pods of TrainingJobs only");
    }
    println!("fault: injected=3 violations=0");
}

#[test]
fn pods_are_created_where_the_namespace_has_opted_in() {
    let not_asked = Request { namespace_labels: json!({}), ..creation(|_| {}) };
    denied(&not_asked, "pods-create", "kubectl label namespace team gainshare.dev/jobs=enabled");
    for namespace in ["kube-system", SYSTEM] {
        denied(&Request { namespace, ..creation(|_| {}) }, "pods-create", "the cluster's own namespaces");
    }
    println!("fault: injected=3 violations=0");
}

#[test]
fn pods_without_their_job_are_not_created() {
    let changes: [fn(&mut Value); 6] = [
        |pod| drop(pod["metadata"].as_object_mut().unwrap().remove("ownerReferences")),
        |pod| pod["metadata"]["ownerReferences"][0]["uid"] = json!("1"),
        |pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("Job"),
        |pod| pod["metadata"]["labels"]["gainshare.dev/job"] = json!("other"),
        |pod| pod["metadata"]["name"] = json!("run-4"),
        |pod| drop(pod["metadata"].as_object_mut().unwrap().remove("labels")),
    ];
    for change in changes {
        denied(&creation(change), "pods-create", "pods of TrainingJobs only");
    }
    denied(&creation(|pod| pod["spec"]["schedulingGates"] = json!([])), "pods-create", "scheduling gate");
}

#[test]
fn accounts_and_secrets_need_the_namespaces_consent() {
    let other = || creation(|pod| pod["spec"]["serviceAccountName"] = json!("trainer"));
    denied(&other(), "pods-create", "kubectl annotate namespace team gainshare.dev/job-service-account=trainer");
    let namespace_annotations = json!({"gainshare.dev/job-service-account": "trainer"});
    allowed(&Request { namespace_annotations, ..other() }, "pods-create");
    let secrets: [fn(&mut Value); 5] = [
        |pod| pod["spec"]["volumes"] = json!([{"name": "s", "secret": {"secretName": "x"}}]),
        |pod| pod["spec"]["volumes"] = json!([{"name": "s", "projected": {"sources": [{"secret": {"name": "x"}}]}}]),
        |pod| pod["spec"]["volumes"] = json!([{"name": "s", "csi": {"driver": "d", "nodePublishSecretRef": {}}}]),
        |pod| container(pod)["env"] = json!([{"name": "A", "valueFrom": {"secretKeyRef": {"name": "x"}}}]),
        |pod| pod["spec"]["initContainers"] = json!([{"name": "i", "envFrom": [{"secretRef": {"name": "x"}}]}]),
    ];
    for change in secrets {
        denied(&creation(change), "pods-create", "gainshare.dev/job-secrets=enabled");
        let namespace_labels = json!({"gainshare.dev/jobs": "enabled", "gainshare.dev/job-secrets": "enabled"});
        allowed(&Request { namespace_labels, ..creation(change) }, "pods-create");
    }
}

#[test]
fn the_baseline_of_pod_security_holds() {
    type Case = (fn(&mut Value), &'static str);
    let cases: [Case; 19] = [
        (|pod| pod["spec"]["hostNetwork"] = json!(true), "host namespaces"),
        (|pod| pod["spec"]["hostPID"] = json!(true), "host namespaces"),
        (|pod| pod["spec"]["hostIPC"] = json!(true), "host namespaces"),
        (|pod| pod["spec"]["volumes"] = json!([{"name": "r", "hostPath": {"path": "/"}}]), "host paths"),
        (|pod| pod["spec"]["volumes"] = json!([{"name": "r", "flexVolume": {"driver": "d"}}]), "host paths"),
        (|pod| container(pod)["securityContext"] = json!({"privileged": true}), "privileged"),
        (|pod| container(pod)["securityContext"] = json!({"capabilities": {"add": ["SYS_ADMIN"]}}), "capabilities"),
        (|pod| container(pod)["ports"] = json!([{"containerPort": 1, "hostPort": 80}]), "host ports"),
        (|pod| container(pod)["securityContext"] = json!({"procMount": "Unmasked"}), "procMount"),
        (|pod| container(pod)["securityContext"] = json!({"seccompProfile": {"type": "Unconfined"}}), "seccomp"),
        (|pod| pod["spec"]["securityContext"] = json!({"seccompProfile": {"type": "Unconfined"}}), "seccomp"),
        (|pod| container(pod)["securityContext"] = json!({"appArmorProfile": {"type": "Unconfined"}}), "AppArmor"),
        (|pod| pod["metadata"]["annotations"][APPARMOR] = json!("unconfined"), "AppArmor"),
        (|pod| pod["spec"]["securityContext"] = json!({"seLinuxOptions": {"type": "spc_t"}}), "SELinux"),
        (|pod| container(pod)["securityContext"] = json!({"seLinuxOptions": {"role": "sysadm_r"}}), "SELinux"),
        (|pod| pod["spec"]["securityContext"] = json!({"sysctls": [{"name": "kernel.msgmax"}]}), "sysctls"),
        (|pod| pod["spec"]["securityContext"] = json!({"windowsOptions": {"hostProcess": true}}), "Windows"),
        (|pod| container(pod)["securityContext"] = json!({"windowsOptions": {"hostProcess": true}}), "Windows"),
        (
            |pod| pod["spec"]["initContainers"] = json!([{"name": "i", "securityContext": {"privileged": true}}]),
            "privileged",
        ),
    ];
    for (change, words) in cases {
        denied(&creation(change), "pods-create", words);
    }
    println!("fault: injected={} violations=0", cases.len());
    let harmless = creation(|pod| {
        container(pod)["securityContext"] =
            json!({"capabilities": {"add": ["CHOWN"], "drop": ["ALL"]}, "runAsUser": 1000});
        container(pod)["ports"] = json!([{"containerPort": 8080}]);
        pod["spec"]["securityContext"] = json!({"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 1});
    });
    allowed(&harmless, "pods-create");
}

const APPARMOR: &str = "container.apparmor.security.beta.kubernetes.io/main";

#[test]
fn the_webhook_is_changed_as_intended_only() {
    let hooks = |bundle: &str, service: &str, group: &str| {
        json!({"webhooks": [{
            "name": "start.gainshare.dev", "rules": [{"apiGroups": [group]}],
            "clientConfig": {"caBundle": bundle, "service": {"name": service}},
        }]})
    };
    let before = || hooks("", "gainshare-operator", "");
    allowed(&request(hooks("new", "gainshare-operator", ""), before()), "webhook");
    let words = "the certificate of its webhook only";
    denied(&request(hooks("new", "elsewhere", ""), before()), "webhook", words);
    denied(&request(hooks("new", "gainshare-operator", "*"), before()), "webhook", words);
    denied(&request(json!({"webhooks": []}), before()), "webhook", words);
}

/// A change of an object.
type Change<'a> = &'a dyn Fn(&mut Value);

/// A Job that the operator may move, and that runs.
fn adopted_job() -> Value {
    let anti = json!({"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]});
    json!({
        "metadata": {"name": "j", "labels": {"app": "x"}, "annotations": {"gainshare.dev/adopt": "true", "team": "x"}},
        "spec": {
            "suspend": false, "parallelism": 1, "podReplacementPolicy": "Failed",
            "template": {
                "metadata": {"labels": {"app": "x"}},
                "spec": {
                    "restartPolicy": "Never", "containers": [{"name": "main", "image": "train:1"}],
                    "affinity": {"podAntiAffinity": anti},
                },
            },
        },
        "status": {"active": 1, "startTime": "2026-11-18T10:00:00Z"},
    })
}

#[test]
fn jobs_are_suspended_resumed_and_sent_to_a_node_and_nothing_else() {
    let update = |change: Change<'_>| {
        let mut job = adopted_job();
        change(&mut job);
        request(job, adopted_job())
    };
    let prefers = json!([{"weight": 100, "preference": {"matchFields": [
        {"key": "metadata.name", "operator": "In", "values": ["n1"]},
    ]}}]);
    let own: [Change<'_>; 4] = [
        &|_| {},
        &|job| job["spec"]["suspend"] = json!(true),
        &|job| job["metadata"]["annotations"]["gainshare.dev/adopted"] = json!("{}"),
        &|job| {
            let affinity = &mut job["spec"]["template"]["spec"]["affinity"];
            affinity["nodeAffinity"] = json!({"preferredDuringSchedulingIgnoredDuringExecution": prefers});
        },
    ];
    own.iter().for_each(|change| allowed(&update(*change), "jobs"));
    let (spec, affinity) = ("and nothing else", "no other affinity");
    let misuses: [(Change<'_>, &str); 10] = [
        (&|job| job["spec"]["parallelism"] = json!(9), spec),
        (&|job| job["spec"]["ttlSecondsAfterFinished"] = json!(0), spec),
        (&|job| drop(job["spec"].as_object_mut().unwrap().remove("podReplacementPolicy")), spec),
        (&|job| job["spec"]["template"]["metadata"]["labels"] = json!({"app": "y"}), spec),
        (&|job| job["spec"]["template"]["spec"]["containers"][0]["image"] = json!("evil"), spec),
        (&|job| job["spec"]["template"]["spec"]["tolerations"] = json!([{"operator": "Exists"}]), spec),
        (&|job| job["spec"]["template"]["spec"]["affinity"] = json!({}), affinity),
        (&|job| job["metadata"]["finalizers"] = json!(["a.b/c"]), "owner, finalizers or labels"),
        (&|job| job["metadata"]["labels"] = json!({}), "owner, finalizers or labels"),
        (&|job| job["metadata"]["annotations"]["team"] = json!("y"), "begin with gainshare.dev/ only"),
    ];
    misuses.iter().for_each(|(change, words)| denied(&update(*change), "jobs", words));
    let required = json!({"nodeSelectorTerms": []});
    let forced = update(&|job| {
        let affinity = &mut job["spec"]["template"]["spec"]["affinity"];
        affinity["nodeAffinity"] = json!({"requiredDuringSchedulingIgnoredDuringExecution": required});
    });
    denied(&forced, "jobs", affinity);
    let mut foreign = adopted_job();
    foreign["metadata"]["annotations"] = json!({"team": "x"});
    denied(&request(foreign.clone(), foreign.clone()), "jobs", "annotation gainshare.dev/adopt only");

    let stopped = update(&|job| drop(job["status"].as_object_mut().unwrap().remove("startTime")));
    allowed(&stopped, "jobs-status");
    let status = "and changes nothing else of its status";
    denied(&update(&|job| job["status"] = json!({"active": 1, "startTime": "x"})), "jobs-status", status);
    denied(&update(&|job| job["status"] = json!({"active": 0})), "jobs-status", status);
    denied(&update(&|job| job["status"] = json!({"active": 1, "succeeded": 1})), "jobs-status", status);
    denied(&update(&|job| job["status"] = json!({})), "jobs-status", status);
    let mut bare = foreign.clone();
    bare["status"].as_object_mut().unwrap().remove("startTime");
    denied(&request(bare, foreign), "jobs-status", "annotation gainshare.dev/adopt only");
}

/// A Service of a task as the operator creates it.
fn service() -> Value {
    json!({
        "metadata": {
            "name": "run-ps-0", "namespace": "team",
            "ownerReferences": [{"apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "name": "run",
                "uid": "0b0c7d3e-5a8e-4c5e-9d6f-3f1f9a1b2c3d", "controller": true}],
        },
        "spec": {"clusterIP": "None", "selector": {"gainshare.dev/job": "run", "gainshare.dev/role": "ps"}},
    })
}

#[test]
fn services_are_those_of_tasks_only() {
    let changed = |change: fn(&mut Value)| {
        let mut service = service();
        change(&mut service);
        request(service, Value::Null)
    };
    allowed(&changed(|_| {}), "services");
    allowed(&request(Value::Null, service()), "services");
    denied(&changed(|s| s["spec"]["clusterIP"] = json!("10.0.0.1")), "services", "headless Services");
    denied(&changed(|s| s["spec"]["externalIPs"] = json!(["203.0.113.1"])), "services", "headless Services");
    denied(&changed(|s| s["spec"]["selector"] = json!({"app": "bank"})), "services", "headless Services");
    let foreign = json!({"metadata": {"name": "bank", "namespace": "team"}, "spec": {}});
    denied(&request(Value::Null, foreign), "services", "distributed jobs only");
    let outside = Request { namespace: "kube-system", ..changed(|_| {}) };
    denied(&outside, "services", "cluster's own namespaces");
    let refused = Request { namespace_labels: json!({}), ..changed(|_| {}) };
    denied(&refused, "services", "gainshare.dev/jobs=enabled");
}

#[test]
fn a_task_is_named_by_its_role_and_index() {
    let task = |name: &'static str| {
        creation(move |pod| {
            pod["metadata"]["name"] = json!(name);
            pod["metadata"]["labels"]["gainshare.dev/role"] = json!("worker");
            pod["metadata"]["labels"]["gainshare.dev/index"] = json!("1");
        })
    };
    let job = pod()["metadata"]["labels"]["gainshare.dev/job"].as_str().unwrap().to_owned();
    assert_eq!(job, "run", "the names below belong to this job");
    allowed(&task("run-worker-1"), "pods-create");
    denied(&task("run-worker-2"), "pods-create", "pods of TrainingJobs only");
}

/// A placeholder as the operator creates it and as the API server completes it.
fn placeholder() -> Value {
    json!({
        "metadata": {
            "name": "gainshare-placeholder-a-0", "namespace": SYSTEM,
            "labels": {"gainshare.dev/placeholder": "a", "gainshare.dev/share": "disabled"},
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "ConfigMap", "name": "gainshare-operator",
                "uid": "0b54d1c2-9f51-4a8e-8e2f-0d5a7b1c2d3e",
            }],
        },
        "spec": {
            "priorityClassName": "gainshare-placeholder", "priority": -10, "preemptionPolicy": "Never",
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "serviceAccountName": "default",
            "automountServiceAccountToken": false, "enableServiceLinks": false, "dnsPolicy": "ClusterFirst",
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532},
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "containers": [{
                "name": "placeholder", "image": "gainshare:1", "command": ["/usr/local/bin/gainshare-operator", "pause"],
                "resources": {"requests": {"cpu": "3600m", "memory": "1"}},
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    })
}

#[test]
fn placeholders_do_nothing_and_stay_in_the_operators_namespace() {
    let system = |object: Value, old: Value| Request { namespace: SYSTEM, ..request(object, old) };
    allowed(&system(placeholder(), Value::Null), "placeholders");
    denied(&system(placeholder(), Value::Null), "pods-create", "pods-create does not apply");
    allowed(&system(Value::Null, placeholder()), "pods-delete");
    // Elsewhere, the label is worth nothing.
    assert!(!request(placeholder(), Value::Null).denials("pods-create").is_empty());
    denied(&request(Value::Null, placeholder()), "pods-delete", "its placeholders and pods of TrainingJobs only");
    let mut other = placeholder();
    other["metadata"]["labels"] = json!({"app": "operator"});
    denied(&system(Value::Null, other.clone()), "pods-delete", "its placeholders and pods of TrainingJobs only");
    assert!(!system(other, Value::Null).denials("pods-create").is_empty());
    // No pod becomes a placeholder that may be deleted.
    let mut labelled = pod();
    labelled["metadata"]["labels"]["gainshare.dev/placeholder"] = json!("a");
    denied(&system(labelled, pod()), "pods-update", "its own label");
    type Case = (fn(&mut Value), &'static str);
    let cases: [Case; 14] = [
        (|pod| pod["metadata"]["name"] = json!("coredns"), "are named"),
        (|pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("Deployment"), "belong to the ConfigMap"),
        (|pod| pod["metadata"]["finalizers"] = json!(["a/b"]), "no finalizers"),
        (|pod| pod["spec"]["priorityClassName"] = json!("system-node-critical"), "PriorityClass"),
        (|pod| pod["spec"]["volumes"] = json!([{"name": "s", "secret": {"secretName": "x"}}]), "no volumes"),
        (|pod| pod["spec"]["hostNetwork"] = json!(true), "no volumes"),
        (|pod| pod["spec"]["nodeName"] = json!("n"), "no volumes"),
        (|pod| pod["spec"]["initContainers"] = json!([{"name": "i", "image": "x"}]), "no volumes"),
        (|pod| pod["spec"]["automountServiceAccountToken"] = json!(true), "no token"),
        (|pod| pod["spec"]["serviceAccountName"] = json!("gainshare-operator"), "no account"),
        (|pod| container(pod)["image"] = json!("evil"), "the command pause"),
        (|pod| container(pod)["command"] = json!(["sh"]), "the command pause"),
        (|pod| container(pod)["env"] = json!([{"name": "A", "value": "1"}]), "the command pause"),
        (|pod| container(pod)["securityContext"] = json!({"privileged": true}), "the command pause"),
    ];
    for (change, words) in cases {
        let mut object = placeholder();
        change(&mut object);
        denied(&system(object, Value::Null), "placeholders", words);
    }
}
