//! Pods, policies and tokens for a cluster of make-believe nodes.

use super::{Plan, Result};
use futures_util::{StreamExt, TryStreamExt};
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::training_job::TrainingJob;
use gainshare_kube_api::wire::TOKEN_AUDIENCE;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::api::{Api, ListParams, PostParams};
use kube::{self, Client};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

pub(super) const AT_ONCE: usize = 24;

pub(super) async fn run(plan: &Plan, client: &Client) -> Result<Value> {
    let began = Instant::now();
    for i in 0..plan.namespaces {
        let name = format!("team-{i}");
        namespace(client, &name, json!({})).await?;
        let policy = json!({
            "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy", "metadata": {"name": "everyone"},
            "spec": {"selector": {"matchLabels": {"role": "training"}}},
        });
        Api::<SharePolicy>::namespaced(client.clone(), &name)
            .create(&PostParams::default(), &serde_json::from_value(policy)?)
            .await?;
    }
    let pods = (0..plan.nodes).flat_map(|node| (0..plan.pods_per_node).map(move |i| (node, i)));
    let training = pods.map(|(node, i)| {
        let container = json!({
            "name": "main", "image": "none",
            "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        });
        pod(&plan.namespace_of(node), &format!("train-{node}-{i}"), &plan.node(node), "default", "training", container)
    });
    let agents = (0..plan.nodes).map(|node| {
        let container = json!({"name": "agent", "image": "none"});
        pod(&plan.system, &agent_pod(node), &plan.node(node), "gainshare-agent", "agent", container)
    });
    futures_util::stream::iter(agents.chain(training))
        .map(|pod| create(client, pod))
        .buffer_unordered(AT_ONCE)
        .try_collect::<Vec<()>>()
        .await?;
    let created_s = began.elapsed().as_secs_f64();
    futures_util::stream::iter(0..plan.nodes)
        .map(|node| token(plan, client, node))
        .buffer_unordered(AT_ONCE)
        .try_collect::<Vec<()>>()
        .await?;
    let running_s = all_run(plan, client, began).await?;
    Ok(json!({"created_s": created_s, "running_s": running_s}))
}

/// Makes a namespace in which pods can be made.
pub(super) async fn namespace(client: &Client, name: &str, labels: Value) -> Result<()> {
    let object = json!({"metadata": {"name": name, "labels": labels}});
    make(&Api::<Namespace>::all(client.clone()), &serde_json::from_value(object)?).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), name);
    while accounts.get_opt("default").await?.is_none() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// Makes this number of TrainingJobs; `job` gives each by its number.
pub(super) async fn create_jobs(client: &Client, count: usize, job: impl Fn(usize) -> Value) -> Result<()> {
    futures_util::stream::iter((0..count).map(job))
        .map(|job| async move {
            let namespace = job["metadata"]["namespace"].as_str().unwrap_or_default().to_owned();
            let api: Api<TrainingJob> = Api::namespaced(client.clone(), &namespace);
            make(&api, &serde_json::from_value(job)?).await.map(drop)
        })
        .buffer_unordered(AT_ONCE)
        .try_collect::<Vec<()>>()
        .await
        .map(drop)
}

pub(super) fn agent_pod(node: usize) -> String {
    format!("agent-of-{node}")
}

pub(super) fn pod(namespace: &str, name: &str, node: &str, account: &str, role: &str, container: Value) -> Value {
    json!({
        "metadata": {"name": name, "namespace": namespace, "labels": {"role": role}},
        "spec": {
            "nodeName": node, "serviceAccountName": account, "automountServiceAccountToken": false,
            "tolerations": [{"operator": "Exists"}], "containers": [container],
        },
    })
}

async fn create(client: &Client, pod: Value) -> Result<()> {
    let pod: Pod = serde_json::from_value(pod)?;
    let api: Api<Pod> = Api::namespaced(client.clone(), pod.metadata.namespace.as_deref().unwrap_or_default());
    make(&api, &pod).await.map(drop)
}

/// Makes an object, however busy the API server is; one that is there already is as good.
pub(super) async fn make<K>(api: &Api<K>, object: &K) -> Result<K>
where
    K: kube::ResourceExt + serde::Serialize + serde::de::DeserializeOwned + Clone + std::fmt::Debug,
{
    loop {
        match api.create(&PostParams::default(), object).await {
            // An overloaded API server answers 429: wait as long as it asks.
            Err(kube::Error::Api(status)) if status.code == 429 || status.code >= 500 => {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            Err(kube::Error::Api(status)) if status.code == 409 => return Ok(api.get(&object.name_any()).await?),
            other => return Ok(other?),
        }
    }
}

/// The token that the kubelet would give the agent of this node: made for its pod, and for us.
pub(super) async fn token(plan: &Plan, client: &Client, node: usize) -> Result<()> {
    let request: TokenRequest = serde_json::from_value(json!({
        "metadata": {},
        "spec": {
            "audiences": [TOKEN_AUDIENCE], "expirationSeconds": 3600,
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": agent_pod(node)},
        },
    }))?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &plan.system);
    let made = accounts.create_token_request("gainshare-agent", &PostParams::default(), &request).await?;
    let token = made.status.ok_or("the API server made no token")?.token;
    Ok(std::fs::write(plan.token_file(node), token)?)
}

async fn all_run(plan: &Plan, client: &Client, began: Instant) -> Result<f64> {
    let pods: Api<Pod> = Api::all(client.clone());
    let pending = ListParams::default().labels("role=training").fields("status.phase!=Running").limit(1);
    loop {
        if pods.list_metadata(&pending).await?.items.is_empty() {
            return Ok(began.elapsed().as_secs_f64());
        }
        if began.elapsed() > Duration::from_secs(600) {
            return Err(format!("after ten minutes not all {} pods run", plan.pods()).into());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
