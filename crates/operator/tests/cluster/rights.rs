//! What the operator's and the node agents' accounts may do at a real API server: roles first, then the chart's
//! admission policies.

use crate::common::{FaultTally, SYSTEM, Scenarios, TestBed, eventually, text};
use serde_json::{Value, json};
use std::process::Command;

/// A uid that no object has, in the form that uids have.
const SOME_UID: &str = "0b54d1c2-9f51-4a8e-8e2f-0d5a7b1c2d3e";

/// Uses an account and counts what was not denied.
type Check = fn(&Account<'_>, &mut FaultTally);

/// Uses the operator's token for anything else than the operator's work.
pub(crate) fn check_operator(scenarios: &mut Scenarios, bed: &TestBed, tally: &mut FaultTally) {
    let operator = Account::of(bed, "operator");
    let checks: [(&str, Check); 4] = [
        ("the roles grant what the work needs and no more", roles),
        ("the operator creates pods of TrainingJobs only", creation_of_pods),
        ("the operator changes no foreign pod", changes_of_pods),
        ("the operator changes no foreign Job and reads no Secret", jobs_webhook_and_secrets),
    ];
    for (name, check) in checks {
        scenarios.run_counted(name, tally, |tally| check(&operator, tally));
    }
}

/// What any account may do: ask about itself.
const ABOUT_ITSELF: [&str; 3] = ["selfsubjectreviews", "selfsubjectaccessreviews", "selfsubjectrulesreviews"];

/// A node agent has no rights at the API server. The API server itself says so for each of these namespaces, and
/// refuses what an attacker with the token of an agent would try first.
pub(crate) fn check_agent(bed: &TestBed, tally: &mut FaultTally) {
    let agent = Account::of(bed, "agent");
    bed.apply(super::pod("target", "kwok-1", json!({"requests": {"cpu": "100m"}})));
    for namespace in ["team", SYSTEM, "kube-system", "kube-node-lease", "default"] {
        tally.inject(1);
        let beyond = agent.rules_beyond_itself(namespace);
        tally.demand(beyond.is_empty(), || format!("a node agent may do this in {namespace}: {beyond:?}"));
    }
    let patch = r#"{"metadata":{"annotations":{"gainshare.dev/status":"{}"}}}"#;
    let attempts: [&[&str]; 14] = [
        &["get", "pods", "-A"],
        &["get", "pod", "target", "-n", "team"],
        &["get", "nodes"],
        &["get", "secrets", "-n", SYSTEM],
        &["get", "configmap", "gainshare-operator", "-n", SYSTEM],
        &["get", "sharepolicies", "-A"],
        &["get", "leases", "-n", SYSTEM],
        &["logs", "target", "-n", "team"],
        &["patch", "pod", "target", "-n", "team", "--type=merge", "-p", patch],
        &["patch", "pod", "target", "-n", "team", "--subresource=resize", "--type=merge", "-p", "{}"],
        &["patch", "node", "kwok-0", "--type=merge", "-p", patch],
        &["delete", "pod", "target", "-n", "team", "--wait=false"],
        &["create", "token", "gainshare-operator", "-n", SYSTEM],
        &["get", "secrets", "-n", SYSTEM, "--as=system:admin", "--as-group=system:masters"],
    ];
    for attempt in attempts {
        tally.inject(1);
        let result = agent.run(attempt, &json!({}));
        let is_denied = result.as_ref().is_err_and(|error| error.contains("Forbidden") || error.contains("forbidden"));
        tally.demand(is_denied, || format!("a node agent's token was not refused {attempt:?}: {result:?}"));
    }
    bed.kubectl(&["delete", "pod", "target", "-n", "team", "--wait=false"]);
}

/// One of our accounts, as an attacker with its token would use it.
struct Account<'a> {
    bed: &'a TestBed,
    kubeconfig: String,
}

fn roles(operator: &Account<'_>, tally: &mut FaultTally) {
    for verb in ["get", "list", "watch", "create", "patch", "delete"] {
        for what in ["secrets", "deployments.apps"] {
            tally.inject(1);
            tally.demand(!operator.can(verb, what), || format!("the operator must not {verb} {what}"));
        }
    }
    for (verb, what) in [
        ("update", "pods"),
        ("patch", "pods/status"),
        ("create", "pods/exec"),
        ("create", "pods/portforward"),
        ("create", "pods/binding"),
        ("create", "trainingjobs.gainshare.dev"),
        ("create", "jobs.batch"),
        ("delete", "jobs.batch"),
        ("create", "persistentvolumeclaims"),
    ] {
        tally.inject(1);
        tally.demand(!operator.can(verb, what), || format!("the operator must not {verb} {what}"));
    }
    for (verb, what) in [
        ("patch", "pods/resize"),
        ("patch", "pods"),
        ("watch", "pods"),
        ("patch", "sharepolicies.gainshare.dev/status"),
        ("patch", "trainingjobs.gainshare.dev/status"),
        ("patch", "jobs.batch"),
    ] {
        assert!(operator.can(verb, what), "the operator must {verb} {what}");
    }
}

impl<'a> Account<'a> {
    fn of(bed: &'a TestBed, part: &str) -> Account<'a> {
        Account { bed, kubeconfig: format!("--kubeconfig={}", bed.kubeconfig_of(part).display()) }
    }

    fn can(&self, verb: &str, what: &str) -> bool {
        let (resource, part) = what.split_once('/').unwrap_or((what, ""));
        let part = format!("--subresource={part}");
        let args = ["auth", "can-i", verb, resource, &part, "-n", "team", &self.kubeconfig];
        let output = self.bed.output("kubectl", &args, "");
        let said = text(&output.stdout);
        assert!(said.starts_with("yes") || said.starts_with("no"), "{args:?}: {said}{}", text(&output.stderr));
        said.starts_with("yes")
    }

    /// The rules that the API server has for the account in a namespace, without those that every account has.
    fn rules_beyond_itself(&self, namespace: &str) -> Vec<String> {
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        });
        // To validate the object, kubectl would list kinds first, which is another right.
        let args = ["create", "--validate=false", "-f", "-", "-o", "json", self.kubeconfig.as_str()];
        let output = self.bed.output("kubectl", &args, &review.to_string());
        let answer: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}{}", text(&output.stdout), text(&output.stderr)));
        let rules = answer["status"]["resourceRules"].as_array().unwrap_or_else(|| panic!("no rules: {answer:#}"));
        assert!(!rules.is_empty(), "every account may ask about itself: {answer:#}");
        let is_usual = |rule: &Value| {
            let resources = rule["resources"].as_array().into_iter().flatten();
            let are_usual = resources.filter_map(Value::as_str).all(|name| ABOUT_ITSELF.contains(&name));
            are_usual && rule["verbs"] == json!(["create"])
        };
        rules.iter().filter(|rule| !is_usual(rule)).map(Value::to_string).collect()
    }

    /// Runs kubectl with the account's token; the error output if it was refused.
    fn run(&self, args: &[&str], input: &Value) -> Result<(), String> {
        let output = self.bed.output("kubectl", &[args, &[self.kubeconfig.as_str()]].concat(), &input.to_string());
        if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
    }

    fn create(&self, pod: &Value) -> Result<(), String> {
        self.run(&["create", "--dry-run=server", "-f", "-"], pod)
    }

    /// The API server's answer to a resize. kubectl would read `pods/resize` first, which is another right.
    fn resize(&self, pod: &str, cpu: &str) -> String {
        let server = self.bed.kubectl(&["config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"]);
        let token = self.bed.kubectl(&["create", "token", "gainshare-operator", "-n", SYSTEM]);
        let container = json!({"name": "main", "resources": {"requests": {"cpu": cpu}}});
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--insecure", "--request", "PATCH"])
            .args(["--header", &format!("authorization: Bearer {}", token.trim())])
            .args(["--header", "content-type: application/strategic-merge-patch+json"])
            .args(["--data", &json!({"spec": {"containers": [container]}}).to_string()])
            .arg(format!("{server}/api/v1/namespaces/team/pods/{pod}/resize?dryRun=All"))
            .output()
            .expect("curl starts");
        text(&output.stdout)
    }

    fn patch(&self, pod: &str, patch: Value) -> Result<(), String> {
        self.patch_in("team", pod, patch)
    }

    fn patch_in(&self, namespace: &str, pod: &str, patch: Value) -> Result<(), String> {
        let patch = patch.to_string();
        self.run(&["patch", "pod", pod, "-n", namespace, "--dry-run=server", "--type=merge", "-p", &patch], &json!({}))
    }
}

fn denied(tally: &mut FaultTally, result: Result<(), String>, words: &str) {
    tally.inject(1);
    let is_denied = result.as_ref().is_err_and(|error| error.contains(words));
    tally.demand(is_denied, || format!("this was not denied with {words:?}: {result:?}"));
}

/// A pod as the operator creates it for a TrainingJob.
fn pod_of_a_job() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "run-1", "namespace": "team", "labels": {"gainshare.dev/job": "run", "gainshare.dev/epoch": "1"},
            "ownerReferences": [{
                "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "name": "run", "uid": SOME_UID,
                "controller": true,
            }],
        },
        "spec": {
            "restartPolicy": "Never", "schedulingGates": [{"name": "gainshare.dev/place"}],
            "containers": [{"name": "main", "image": "none"}],
        },
    })
}

fn creation_of_pods(operator: &Account<'_>, tally: &mut FaultTally) {
    let changed = |change: fn(&mut Value)| {
        let mut pod = pod_of_a_job();
        change(&mut pod);
        pod
    };
    // The API server takes some seconds to know a new policy.
    let not_opted_in = "kubectl label namespace team gainshare.dev/jobs=enabled";
    eventually("a policy that holds", || operator.create(&pod_of_a_job()).err()?.contains(not_opted_in).then_some(()));
    operator.bed.kubectl(&["label", "namespace", "team", "gainshare.dev/jobs=enabled"]);
    let allowed = || operator.create(&pod_of_a_job());
    eventually("a namespace that has opted in", || allowed().ok());
    denied(
        tally,
        operator.create(&changed(|pod| pod["metadata"]["namespace"] = json!("kube-system"))),
        "own namespaces",
    );
    let owner = "pods of TrainingJobs only";
    denied(tally, operator.create(&changed(|pod| pod["metadata"]["ownerReferences"] = json!([]))), owner);
    denied(tally, operator.create(&changed(|pod| pod["metadata"]["ownerReferences"][0]["uid"] = json!("1"))), owner);
    denied(tally, operator.create(&changed(|pod| pod["metadata"]["name"] = json!("other-1"))), owner);
    denied(tally, operator.create(&changed(|pod| pod["spec"]["schedulingGates"] = json!([]))), "scheduling gate");
    operator.bed.kubectl(&["create", "serviceaccount", "powerful", "-n", "team"]);
    let other_account = changed(|pod| pod["spec"]["serviceAccountName"] = json!("powerful"));
    denied(tally, operator.create(&other_account), "gainshare.dev/job-service-account=powerful");
    let host_path = changed(|pod| pod["spec"]["volumes"] = json!([{"name": "r", "hostPath": {"path": "/"}}]));
    denied(tally, operator.create(&host_path), "host paths");
    let secret = changed(|pod| pod["spec"]["volumes"] = json!([{"name": "s", "secret": {"secretName": "x"}}]));
    denied(tally, operator.create(&secret), "gainshare.dev/job-secrets=enabled");
    denied(tally, operator.create(&changed(|pod| pod["spec"]["hostNetwork"] = json!(true))), "host namespaces");
    for (context, words) in [
        (json!({"privileged": true}), "privileged"),
        (json!({"capabilities": {"add": ["SYS_ADMIN"]}}), "capabilities"),
        (json!({"seccompProfile": {"type": "Unconfined"}}), "seccomp"),
    ] {
        let mut pod = pod_of_a_job();
        pod["spec"]["containers"][0]["securityContext"] = context;
        denied(tally, operator.create(&pod), words);
    }
}

fn changes_of_pods(operator: &Account<'_>, tally: &mut FaultTally) {
    let foreign = super::pod("foreign", "kwok-1", json!({"requests": {"cpu": "100m"}}));
    operator.bed.apply(&foreign);
    let spec = "changes no pod's spec";
    eventually("a policy that holds", || {
        let patch = json!({"spec": {"activeDeadlineSeconds": 9}});
        operator.patch("foreign", patch).err()?.contains(spec).then_some(())
    });
    let image = json!([{"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}]).to_string();
    let patch = ["patch", "pod", "foreign", "-n", "team", "--dry-run=server", "--type=json", "-p", &image];
    denied(tally, operator.run(&patch, &json!({})), spec);
    let owner =
        json!([{"apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "name": "run", "uid": SOME_UID}]);
    denied(tally, operator.patch("foreign", json!({"metadata": {"ownerReferences": owner}})), "no pod's owner");
    denied(tally, operator.patch("foreign", json!({"metadata": {"finalizers": ["a.b/c"]}})), "its own finalizer");
    denied(tally, operator.patch("foreign", json!({"metadata": {"labels": {"role": "other"}}})), "its own label");
    denied(tally, operator.patch("foreign", json!({"metadata": {"annotations": {"a": "b"}}})), "gainshare.dev/");
    let delete = ["delete", "--dry-run=server", "pod", "foreign", "-n", "team"];
    denied(tally, operator.run(&delete, &json!({})), "pods of TrainingJobs only");
    let answer = operator.resize("foreign", "90m");
    let words = "with the annotation gainshare.dev/original-resources only";
    denied(tally, Err(answer), words);
    let note = json!({"metadata": {"annotations": {"gainshare.dev/status": "{}"}}});
    operator.patch("foreign", note.clone()).unwrap();
    operator.bed.kubectl(&["delete", "pod", "foreign", "-n", "team", "--wait=false"]);

    let mut system = foreign.clone();
    system["metadata"]["namespace"] = json!("kube-system");
    operator.bed.apply(&system);
    denied(tally, operator.patch_in("kube-system", "foreign", note), "no pods of the cluster's own namespaces");
    operator.bed.kubectl(&["delete", "pod", "foreign", "-n", "kube-system", "--wait=false"]);
    originals(operator.bed);
}

/// Only the operator writes the original resources of a pod; an administrator cannot.
fn originals(bed: &TestBed) {
    let mut forged = super::pod("forged", "kwok-1", json!({"requests": {"cpu": "100m"}}));
    forged["metadata"]["annotations"] = json!({"gainshare.dev/original-resources": "{}"});
    eventually("a policy that holds", || {
        let output = bed.output("kubectl", &["create", "--dry-run=server", "-f", "-"], &forged.to_string());
        text(&output.stderr).contains("by Gainshare's operator only").then_some(())
    });
}

fn jobs_webhook_and_secrets(operator: &Account<'_>, tally: &mut FaultTally) {
    let bed = operator.bed;
    let container = json!({"name": "main", "image": "none"});
    bed.apply(json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "foreign", "namespace": "team"},
        "spec": {"suspend": true, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }));
    let annotate = ["annotate", "job", "foreign", "-n", "team", "a=b"];
    denied(tally, operator.run(&annotate, &json!({})), "annotation gainshare.dev/adopt only");
    bed.kubectl(&["annotate", "job", "foreign", "-n", "team", "gainshare.dev/adopt=true"]);
    denied(tally, operator.run(&annotate, &json!({})), "annotations that begin with gainshare.dev/ only");
    operator.run(&["annotate", "job", "foreign", "-n", "team", "gainshare.dev/adopted={}"], &json!({})).unwrap();
    for (patch, words) in [
        (json!({"spec": {"parallelism": 9}}), "and nothing else"),
        (json!({"spec": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}}), "and nothing else"),
        (json!({"metadata": {"finalizers": ["a.b/c"]}}), "owner, finalizers or labels"),
    ] {
        let patch = patch.to_string();
        let args = ["patch", "job", "foreign", "-n", "team", "--dry-run=server", "--type=merge", "-p", &patch];
        denied(tally, operator.run(&args, &json!({})), words);
    }
    bed.kubectl(&["delete", "job", "foreign", "-n", "team", "--wait=false"]);
    let elsewhere = json!([{"op": "replace", "path": "/webhooks/0/clientConfig/service/name", "value": "elsewhere"}]);
    let patch = elsewhere.to_string();
    let webhook =
        ["patch", "mutatingwebhookconfiguration", "gainshare", "--type=json", "--dry-run=server", "-p", &patch];
    denied(tally, operator.run(&webhook, &json!({})), "the certificate of its webhook only");
    bed.kubectl(&["create", "secret", "generic", "canary", "-n", "team", "--from-literal=a=b"]);
    denied(
        tally,
        operator.run(&["get", "secret", "canary", "-n", "team"], &json!({})),
        "cannot get resource \"secrets\"",
    );
}
