//! The whole loop against a stand-in for the API server that records requests.

use super::*;
use crate::scaler::damper::{PASSES_TO_APPEAR, PASSES_TO_VANISH};
use crate::state::metrics::Metrics;
use crate::state::task_job::TaskJobSnapshot;
use axum::body::Bytes;
use axum::http::{Method, StatusCode, Uri};
use axum::response::IntoResponse;
use axum::{Json, Router};
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{CONTROLLER, EPOCH_LABEL, INDEX_LABEL, JOB_LABEL, PLACE_GATE, ROLE_LABEL};
use gainshare_kube_api::training_job::TrainingJob;
use kube::runtime::events::Reporter;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;

const SYSTEM: &str = "system";
const NOW_S: i64 = 1_800_000_000;

type Requests = Arc<Mutex<Vec<(Method, String, Value)>>>;

/// An API server that has the operator's ConfigMap, makes every pod and event, and deletes every pod.
async fn api_server() -> (Client, Requests) {
    let requests = Requests::default();
    let log = requests.clone();
    let answer = move |method: Method, uri: Uri, body: Bytes| {
        let log = log.clone();
        async move {
            let body: Value = serde_json::from_slice(&body).unwrap_or_default();
            let path = uri.path().to_owned();
            log.lock().push((method.clone(), path.clone(), body.clone()));
            if path.ends_with("/configmaps/gainshare-operator") {
                let metadata = json!({"name": "gainshare-operator", "uid": "map"});
                return Json(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})).into_response();
            }
            match method {
                Method::POST => (StatusCode::CREATED, Json(body)).into_response(),
                Method::DELETE => {
                    Json(json!({"kind": "Status", "apiVersion": "v1", "status": "Success"})).into_response()
                }
                _ => StatusCode::NOT_FOUND.into_response(),
            }
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    let config = kube::Config::new(format!("http://{address}").parse().unwrap());
    (Client::try_from(config).unwrap(), requests)
}

struct TestScaler {
    scaler: Scaler,
    leader: Arc<Leader>,
    requests: Requests,
    passes: i64,
}

async fn bench(placeholders: Option<ScalerConfig>, fill: impl FnOnce(&Leader)) -> TestScaler {
    let (client, requests) = api_server().await;
    let leader = Arc::new(Leader::new(Arc::new(Metrics::new()), 1));
    leader.change(|world| world.own_namespace = SYSTEM.to_owned());
    fill(&leader);
    let recorder = Recorder::new(client.clone(), Reporter { controller: CONTROLLER.to_owned(), instance: None });
    let settings = Settings { namespace: SYSTEM.to_owned(), config_map: "gainshare-operator".to_owned(), placeholders };
    TestScaler { scaler: Scaler::begin(leader.clone(), client, recorder, settings), leader, requests, passes: 0 }
}

impl TestScaler {
    async fn passes(&mut self, count: u32) {
        for _ in 0..count {
            self.passes += 1;
            let now = Timestamp::from_second(NOW_S + 5 * self.passes).unwrap();
            self.scaler.pass(now).await;
        }
    }

    /// The requests since the last call that change something, and the pods that were made.
    fn take(&self) -> (Vec<String>, Vec<Value>) {
        let taken = std::mem::take(&mut *self.requests.lock());
        let changes = taken.into_iter().filter(|(method, ..)| *method != Method::GET);
        let (mut lines, mut pods) = (Vec::new(), Vec::new());
        for (method, path, body) in changes {
            let end = path.rsplit('/').next().unwrap_or_default();
            lines.push(match end {
                "events" => format!("event {}", body["note"].as_str().unwrap_or_default()),
                end => format!("{method} {end}"),
            });
            if end == "pods" {
                pods.push(body);
            }
        }
        (lines, pods)
    }

    fn metric(&self) -> String {
        let text = self.leader.metrics.text();
        let lines = text.lines().filter(|line| line.starts_with("gainshare_operator_nodes_needed{"));
        lines.collect::<Vec<_>>().join(" ")
    }
}

fn settings(most_nodes: usize) -> Option<ScalerConfig> {
    Some(ScalerConfig {
        image: "gainshare:1".to_owned(),
        priority_class: "gainshare-placeholder".to_owned(),
        most_nodes,
    })
}

fn add_node(leader: &Leader, name: &str) {
    let (cpu_milli, memory_bytes) = (Some(4000), Some(16 << 30));
    let facts = NodeFacts { cpu_milli, memory_bytes, open: true, speed_percent: 100, ..NodeFacts::default() };
    leader.change(|world| world.put_node(&name.into(), facts));
}

fn put_pod(leader: &Leader, pod: Value) {
    let pod = PodFacts::of(&serde_json::from_value(pod).unwrap()).unwrap();
    leader.change(|world| world.put_pod(pod));
}

/// A job of two workers of three cores each, whose pods wait behind their gates, in a cluster of one node.
fn gang(leader: &Leader) {
    add_node(leader, "n");
    let created = Timestamp::from_second(NOW_S).unwrap().to_string();
    let containers = json!([{
        "name": "main", "image": "i", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}},
    }]);
    let job: TrainingJob = serde_json::from_value(json!({
        "apiVersion": API_VERSION, "kind": "TrainingJob",
        "metadata": {"name": "run", "namespace": "team", "uid": "job", "creationTimestamp": created},
        "spec": {
            "deadlineSeconds": 3600,
            "replicaSpecs": {"Worker": {"replicas": 2, "template": {"spec": {"containers": containers}}}},
        },
        "status": {"tasks": {"epoch": 1, "state": "Waiting"}},
    }))
    .unwrap();
    leader.change(|world| world.jobs.put_task_job(TaskJobSnapshot::of_training_job(&job).unwrap()));
    for index in ["0", "1"] {
        put_pod(
            leader,
            json!({
                "metadata": {
                    "name": format!("run-worker-{index}"), "namespace": "team", "uid": format!("pod-{index}"),
                    "labels": {JOB_LABEL: "run", EPOCH_LABEL: "1", ROLE_LABEL: "worker", INDEX_LABEL: index},
                    "ownerReferences": [
                        {"apiVersion": API_VERSION, "kind": "TrainingJob", "name": "run", "uid": "job", "controller": true},
                    ],
                },
                "spec": {"containers": containers, "schedulingGates": [{"name": PLACE_GATE}]},
                "status": {"phase": "Pending"},
            }),
        );
    }
}

/// A placeholder as the API server shows it.
fn placed(mut pod: Value, node: Option<&str>) -> Value {
    pod["metadata"]["uid"] = json!("placeholder-uid");
    pod["status"] = json!({"phase": "Pending"});
    if let Some(node) = node {
        pod["spec"]["nodeName"] = json!(node);
    }
    pod
}

const NEEDS: &str = "event needs 1 more node of 4 cores / 16 GiB to finish by 2027-01-15T09:00:00Z";
const NAME: &str = "gainshare-placeholder-4000m-16384mi-0";

#[tokio::test]
async fn a_gang_without_room_gets_placeholders_until_the_node_has_come() {
    let mut bench = bench(settings(5), gang).await;
    bench.passes(PASSES_TO_APPEAR - 1).await;
    assert_eq!(bench.take().0, [""; 0], "a need counts after some passes");
    bench.passes(1).await;
    let (lines, pods) = bench.take();
    assert_eq!(lines, [NEEDS, "POST pods"]);
    let placeholder = pods[0].clone();
    assert_eq!(
        (&placeholder["metadata"]["name"], &placeholder["spec"]["priorityClassName"]),
        (&json!(NAME), &json!("gainshare-placeholder"))
    );
    assert_eq!(placeholder["metadata"]["ownerReferences"][0]["uid"], "map");
    // The node that exists has room for the placeholder, and is no help for the whole gang.
    let affinity = &placeholder["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let other = json!({"key": "metadata.name", "operator": "NotIn", "values": ["n"]});
    assert_eq!(affinity["nodeSelectorTerms"], json!([{"matchFields": [other]}]));
    assert_eq!(bench.leader.nodes_needed(&"job".into(), None).unwrap().count, 1);
    assert_eq!(bench.metric(), r#"gainshare_operator_nodes_needed{kind="4000m-16384mi"} 1"#);

    put_pod(&bench.leader, placed(placeholder.clone(), None));
    bench.passes(20).await;
    assert_eq!(bench.take().0, [""; 0], "nothing is repeated while the need stays");

    // The node comes, and the placeholder is the first pod on it.
    add_node(&bench.leader, "new");
    put_pod(&bench.leader, placed(placeholder, Some("new")));
    bench.passes(1).await;
    assert_eq!(bench.take().0, [format!("DELETE {NAME}")]);
    bench.leader.change(|world| world.remove_pod(&"placeholder-uid".into()));
    bench.passes(PASSES_TO_VANISH + 20).await;
    assert_eq!(bench.take().0, [""; 0], "the room is there: no other placeholder is made");
    assert_eq!(bench.leader.nodes_needed(&"job".into(), None), None);
    assert_eq!(bench.metric(), "");
}

#[tokio::test]
async fn without_the_scaler_the_need_is_published_only() {
    let mut bench = bench(None, gang).await;
    bench.passes(20).await;
    assert_eq!(bench.take().0, [NEEDS]);
    assert_eq!(bench.leader.nodes_needed(&"job".into(), None).unwrap().count, 1);
}

#[tokio::test]
async fn placeholders_of_an_earlier_leader_are_kept_or_removed() {
    let kind = |leader: &Leader| {
        gang(leader);
        let labels = json!({"gainshare.dev/placeholder": "4000m-16384mi"});
        let metadata = json!({"name": NAME, "namespace": SYSTEM, "labels": labels});
        put_pod(leader, placed(json!({"metadata": metadata, "spec": {"containers": []}}), None));
    };
    let mut next = bench(settings(5), kind).await;
    next.passes(20).await;
    assert_eq!(next.take().0, [NEEDS], "the placeholder is kept, and no other one is made");
    assert_eq!(next.metric(), r#"gainshare_operator_nodes_needed{kind="4000m-16384mi"} 1"#);
    // The scaler was switched off meanwhile.
    let mut off = bench(None, kind).await;
    off.passes(1).await;
    assert_eq!(off.take().0, [format!("DELETE {NAME}")]);
    // Sharing as a whole was switched off.
    let mut all_off = bench(settings(5), kind).await;
    all_off.leader.change(|world| world.set_off(true));
    all_off.passes(1).await;
    assert_eq!(all_off.take().0, [format!("DELETE {NAME}")]);
}

#[tokio::test]
async fn the_need_goes_with_the_job() {
    let mut bench = bench(settings(5), gang).await;
    bench.passes(PASSES_TO_APPEAR).await;
    let placeholder = bench.take().1[0].clone();
    put_pod(&bench.leader, placed(placeholder, None));
    let key = bench.leader.read(|world| world.jobs.task_jobs().next().map(|job| job.key.clone())).unwrap();
    bench.leader.change(|world| world.jobs.remove_task_job(&key));
    bench.passes(PASSES_TO_VANISH - 1).await;
    assert_eq!(bench.take().0, [""; 0]);
    bench.passes(1).await;
    assert_eq!(bench.take().0, [format!("DELETE {NAME}")]);
}
