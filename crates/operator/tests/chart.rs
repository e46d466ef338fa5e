//! Defaults of the chart on which promises rest. The plain manifests are rendered from the same files.

use serde_json::Value;

fn deploy(file: &str) -> String {
    let path = format!("{}/../../deploy/{file}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The documents of the plain manifests.
fn manifests() -> Vec<Value> {
    let text = deploy("gainshare.yaml");
    let documents = text.split("\n---\n").filter_map(|document| serde_saphyr::from_str(document).ok());
    let documents: Vec<Value> = documents.filter(|document: &Value| document["kind"].is_string()).collect();
    assert!(documents.len() > 20, "{} documents", documents.len());
    documents
}

fn find<'a>(all: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut found = all.iter().filter(|one| one["kind"] == kind && one["metadata"]["name"] == name);
    found.next().unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// A node's failure or a drain leaves one operator that takes over.
#[test]
fn two_operators_with_a_disruption_budget_on_different_nodes() {
    let all = manifests();
    let operator = find(&all, "Deployment", "gainshare-operator");
    assert_eq!(operator["spec"]["replicas"], 2);
    let spread = &operator["spec"]["template"]["spec"]["topologySpreadConstraints"][0];
    assert_eq!(spread["topologyKey"], "kubernetes.io/hostname");
    let budget = find(&all, "PodDisruptionBudget", "gainshare-operator");
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    assert_eq!(budget["spec"]["selector"], operator["spec"]["selector"]);
}

/// The most CPU and memory that the output of tenants costs a node.
#[test]
fn node_agents_have_limits_of_cpu_and_memory() {
    let all = manifests();
    let agent = find(&all, "DaemonSet", "gainshare-agent");
    let limits = &agent["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"];
    assert!(limits["cpu"].is_string() && limits["memory"].is_string(), "{limits}");
}

/// Node agents mount folders of their node, which Pod Security admission refuses below `privileged`.
#[test]
fn the_namespace_admits_node_agents() {
    let all = manifests();
    let labels = &find(&all, "Namespace", "gainshare-system")["metadata"]["labels"];
    assert_eq!(labels["pod-security.kubernetes.io/enforce"], "privileged");
    let notes = deploy("chart/templates/NOTES.txt");
    assert!(notes.contains("pod-security.kubernetes.io/enforce=privileged"), "helm does not label namespaces");
}

/// New nodes cost money: they are asked for only where an administrator wants it.
#[test]
fn no_nodes_are_asked_for_by_default() {
    let all = manifests();
    assert!(all.iter().all(|one| one["kind"] != "PriorityClass"));
    let operator = find(&all, "Deployment", "gainshare-operator");
    let args = operator["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
    assert!(args.contains("--record-listen") && !args.contains("--scaler"), "{args}");
    let created = find(&all, "ValidatingAdmissionPolicy", "gainshare-operator-pods-create");
    assert_eq!(created["spec"]["matchConditions"].as_array().map(Vec::len), Some(1), "it applies to every pod");
}

/// Records of decisions are served on the pod's own loopback interface only.
#[test]
fn records_are_not_reached_from_other_pods() {
    let all = manifests();
    for (kind, name) in [("Deployment", "gainshare-operator"), ("DaemonSet", "gainshare-agent")] {
        let pod = &find(&all, kind, name)["spec"]["template"]["spec"];
        let args = pod["containers"][0]["args"].to_string();
        assert!(args.contains("--record-listen=127.0.0.1:"), "{name}: {args}");
        assert!(pod["hostNetwork"] != true, "{name} uses the network of its node");
    }
}

/// The library inside pods is added, and node agents write into volumes, only where an administrator wants it.
#[test]
fn pods_stay_as_they_are_by_default() {
    let all = manifests();
    let hooks = find(&all, "MutatingWebhookConfiguration", "gainshare")["webhooks"].as_array().unwrap();
    for hook in hooks {
        assert_eq!(hook["failurePolicy"], "Ignore", "pods start without an operator, too");
        assert_eq!(hook["namespaceSelector"]["matchLabels"].as_object().map(|labels| labels.len()), Some(1));
    }
    assert_eq!((hooks.len(), &hooks[0]["name"]), (1, &"start.gainshare.dev".into()));
    let agent = &find(&all, "DaemonSet", "gainshare-agent")["spec"]["template"]["spec"];
    for mount in agent["containers"][0]["volumeMounts"].as_array().unwrap() {
        assert_eq!(mount["readOnly"], true, "{mount}");
    }
    let template = deploy("chart/templates/webhook.yaml");
    assert_eq!(template.matches("failurePolicy: Ignore").count(), template.matches("- name: ").count());
}
