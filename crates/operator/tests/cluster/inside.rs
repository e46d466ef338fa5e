//! The library inside jobs in a real pod: the webhook adds it, the pod's program loads it, and the node agent writes
//! the size of the teams into the pod's page.
//!
//! The namespace enforces the level `restricted` of the Pod Security Standards and has a quota, so that the API server
//! itself refuses a pod to which too much or too little was added.

use crate::common::training::Operator;
use crate::common::{TestBed, eventually, program, text};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use gainshare_limits::machine::monotonic_ns;
use gainshare_page::{Orders, Report, decode_report, read};
use serde_json::{Value, json};
use std::process::Command;

const NAMESPACE: &str = "threads";

/// Prints the page and the report of its pod every second.
const PRINTS: &str = r#"
cd /.gainshare/page
while :; do echo "$(base64 page | tr -d '\n') $(base64 page.report | tr -d '\n')"; sleep 1; done
"#;

fn restricted(name: &str, more: Value) -> Value {
    let mut container = json!({
        "name": name, "imagePullPolicy": "Never", "resources": {"requests": {"cpu": "50m", "memory": "48Mi"}},
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": 1000, "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
        },
    });
    for (key, value) in more.as_object().unwrap() {
        container[key] = value.clone();
    }
    container
}

fn pod() -> Value {
    let trains = json!({"image": "gainshare:local", "args": ["train", "mlp", "--steps", "1000000"]});
    let prints = json!({"image": "busybox:local", "command": ["sh", "-c", PRINTS]});
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "follows", "namespace": NAMESPACE},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [restricted("main", trains), restricted("prints", prints)],
        },
    })
}

/// The orders in the page, if it is fresh, and the report.
fn page_and_report(bed: &TestBed) -> Option<(Orders, Report)> {
    let line = bed.output("kubectl", &["logs", "follows", "-c", "prints", "-n", NAMESPACE, "--tail=1"], "");
    let line = text(&line.stdout);
    let (page, report) = line.trim().split_once(' ')?;
    let (page, report) = (STANDARD.decode(page).ok()?, STANDARD.decode(report).ok()?);
    let words: Vec<_> = page.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word).into()).collect();
    let orders = read(&words, monotonic_ns())?;
    Some((orders, decode_report(&report)?))
}

pub(crate) fn check(bed: &TestBed) {
    let values = ["inside.enabled=true"];
    bed.apply(bed.chart_part("webhook", &values));
    // The operator runs beside the cluster, and not behind its Service.
    let at = |number: usize, path: &str| {
        let place = format!("/webhooks/{number}/clientConfig");
        let url = format!("https://{}/{path}", bed.listen);
        [
            json!({"op": "remove", "path": format!("{place}/service")}),
            json!({"op": "add", "path": format!("{place}/url"), "value": url}),
        ]
    };
    let patch = [at(0, "mutate-inside"), at(1, "mutate")].concat();
    let patch = Value::from(patch).to_string();
    bed.kubectl(&["patch", "mutatingwebhookconfiguration", "gainshare", "--type=json", "-p", &patch]);
    let machine = bed.machine();
    let args = ["--inside-image", "gainshare:local", "--webhook", "gainshare", "--server-name", &machine];
    let operator = Operator::with(bed, None, &args);
    bed.apply_agents(&values);

    bed.kubectl(&["create", "namespace", NAMESPACE]);
    bed.apply(json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all", "namespace": NAMESPACE},
        "spec": {"hard": {"requests.cpu": "1", "requests.memory": "1Gi"}},
    }));
    let try_out = || {
        let args = ["create", "--dry-run=server", "-o", "json", "-f", "-"];
        serde_json::from_str::<Value>(&bed.run("kubectl", &args, &pod().to_string())).unwrap()
    };
    assert!(try_out()["spec"]["initContainers"].is_null(), "a namespace that did not ask for it");
    let mut label = vec!["label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted"];
    label.extend(["gainshare.dev/inside=enabled", "gainshare.dev/share=enabled", "gainshare.dev/start=tuned"]);
    bed.kubectl(&label);
    eventually("a pod with the library", || try_out()["spec"]["initContainers"].is_array().then_some(()));

    bed.apply(pod());
    bed.kubectl(&["wait", "--for=condition=Ready", "pod/follows", "-n", NAMESPACE, "--timeout=120s"]);
    // The container that made the page knows no plan: one with a number is the node agent's.
    let mut last = None;
    let found = crate::common::within_a_minute(|| {
        last = page_and_report(bed);
        last.clone().filter(|(orders, _)| orders.generation > 0)
    });
    let agents = ["logs", "-n", crate::common::SYSTEM, "-l", "app.kubernetes.io/component=agent", "--tail=20"];
    let Some((orders, report)) = found else {
        panic!("no node agent writes the page: {last:?}\n{}\n{}", bed.kubectl(&agents), bed.operator_log());
    };
    assert_eq!(orders.team, 1, "the node has less than one core: {orders:?}");
    assert!(report.programs > 0, "no program has loaded the library: {report:?}");
    let explained = Command::new(program("kubectl-gainshare"))
        .args(["explain", "follows", "-n", NAMESPACE])
        .env("KUBECONFIG", &bed.kubeconfig)
        .output()
        .unwrap();
    let explained = text(&explained.stdout);
    assert!(explained.contains("follow the share: library in main, prints"), "{explained}");
    bed.kubectl(&["delete", "mutatingwebhookconfiguration", "gainshare"]);
    bed.kubectl(&["delete", "namespace", NAMESPACE, "--timeout=60s"]);
    drop(operator);
}
