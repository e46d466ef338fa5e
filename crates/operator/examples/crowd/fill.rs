//! A cluster full of training jobs, as an operator that ran before would have left it.
//!
//! Every job is really there: its TrainingJob with a journal, its pod with the owner, labels,
//! finalizer and note that the operator gives pods, on a node whose make-believe kubelet runs it.
//! Only the way there is shorter: an operator would have written each job four times and asked the
//! scheduler.
//!
//! **Where jobs are.** Nodes have jobs in layers, and a layer's jobs have one policy: `specon`,
//! `gainshare`, `flowcon2`, and again. One node in fifty has fewer layers than the others, so that
//! there is somewhere to move to.

use super::prepare::{self, AT_ONCE, agent_pod, make, pod, token};
use super::{Plan, Result};
use futures_util::{StreamExt, TryStreamExt};
use gainshare_core::policy::Preset;
use gainshare_kube_api::training_job::{JobPolicy, TrainingJob};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::{Api, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{self, Client};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::pin::pin;
use std::time::{Duration, Instant};

/// One node in this number of nodes has few jobs.
const LIGHT: usize = 50;
/// How many it has.
const LIGHT_LAYERS: usize = 4;
const POLICIES: [Preset; 3] = [Preset::Specon, Preset::Gainshare, Preset::Flowcon2];
const CLAIM: &str = "work";

/// Where a job that runs from the start lives, and in which layer.
pub(super) fn place_of(plan: &Plan, index: usize) -> (usize, usize) {
    let light = (plan.nodes / LIGHT).max(1).min(plan.nodes - 1);
    let heavy = plan.nodes - light;
    if index < light * LIGHT_LAYERS {
        return (heavy + index % light, index / light);
    }
    let index = index - light * LIGHT_LAYERS;
    (index % heavy, index / heavy)
}

fn policy_of(layer: usize) -> JobPolicy {
    JobPolicy::try_from(POLICIES[layer % POLICIES.len()]).expect("a TrainingJob takes it")
}

/// Of the jobs that run from the start, those that stop growing on demand: of the
/// lowest layer, one per node.
pub(super) fn converges(plan: &Plan, name: &str) -> bool {
    let index = name.strip_prefix("job-").and_then(|rest| rest.split('-').next()?.parse::<usize>().ok());
    index.is_some_and(|index| {
        let (node, layer) = place_of(plan, index);
        layer == 0 && node < plan.converging
    })
}

/// A job as people write it: the `index`-th that comes.
pub(super) fn job(plan: &Plan, name: &str, index: usize, layer: usize) -> Value {
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": format!("team-{}", index % plan.namespaces)},
        "spec": {
            "policy": policy_of(layer),
            "checkpoint": {"claimName": CLAIM, "path": "/keep"},
            "template": {"spec": {
                "automountServiceAccountToken": false, "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "main", "image": "none", "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}}}],
            }},
        },
    })
}

pub(super) async fn run(plan: &Plan, client: &Client) -> Result<Value> {
    let began = Instant::now();
    // All at once: binding a claim to its volume takes some time for each.
    let names = (0..plan.namespaces).map(|i| format!("team-{i}"));
    futures_util::future::try_join_all(names.map(|name| async move { namespace(client, &name).await })).await?;
    futures_util::stream::iter(0..plan.nodes)
        .map(|node| agent(plan, client, node))
        .buffer_unordered(AT_ONCE)
        .try_collect::<Vec<()>>()
        .await?;
    let agents_s = began.elapsed().as_secs_f64();
    eprintln!("crowd: {} agents have their tokens after {agents_s:.0} s", plan.nodes);
    let mut filled = futures_util::stream::iter(0..plan.running)
        .map(|index| begin(plan, client, index))
        .buffer_unordered(AT_ONCE * 2);
    let mut count = 0;
    while let Some(made) = filled.next().await {
        made?;
        count += 1;
        if count % 5000 == 0 {
            eprintln!("crowd: {count} jobs after {:.0} s", began.elapsed().as_secs_f64());
        }
    }
    let filled_s = began.elapsed().as_secs_f64();
    let running_s = all_run(client, began).await?;
    let jobs_per_s = plan.running as f64 / (filled_s - agents_s);
    Ok(json!({"agents_s": agents_s, "filled_s": filled_s, "running_s": running_s, "jobs_per_s": jobs_per_s}))
}

async fn namespace(client: &Client, name: &str) -> Result<()> {
    prepare::namespace(client, name, json!({"gainshare.dev/jobs": "enabled"})).await?;
    // A volume that every node could mount, so that the scheduler takes pods that name it.
    let size = json!({"storage": "1Gi"});
    let volume = json!({
        "metadata": {"name": name},
        "spec": {
            "capacity": size, "accessModes": ["ReadWriteMany"], "storageClassName": "", "nfs": {"server": "nowhere", "path": "/"},
            "claimRef": {"namespace": name, "name": CLAIM},
        },
    });
    make(&Api::<PersistentVolume>::all(client.clone()), &serde_json::from_value(volume)?).await?;
    let claim = json!({
        "metadata": {"name": CLAIM},
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": name, "resources": {"requests": size},
        },
    });
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), name);
    make(&claims, &serde_json::from_value(claim)?).await?;
    let bound = |claim: PersistentVolumeClaim| claim.status.and_then(|s| s.phase).is_some_and(|phase| phase == "Bound");
    while !bound(claims.get(CLAIM).await?) {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

async fn agent(plan: &Plan, client: &Client, node: usize) -> Result<()> {
    let container = json!({"name": "agent", "image": "none"});
    let object = pod(&plan.system, &agent_pod(node), &plan.node(node), "gainshare-agent", "agent", container);
    make(&Api::<Pod>::namespaced(client.clone(), &plan.system), &serde_json::from_value(object)?).await?;
    token(plan, client, node).await
}

/// One job that runs, and its journal.
async fn begin(plan: &Plan, client: &Client, index: usize) -> Result<()> {
    let (node, layer) = place_of(plan, index);
    let (name, node, policy) = (format!("job-{index}"), plan.node(node), policy_of(layer));
    let mut object = job(plan, &name, index, layer);
    object["metadata"]["finalizers"] = json!(["gainshare.dev/training-job"]);
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default().to_owned();
    let jobs: Api<TrainingJob> = Api::namespaced(client.clone(), &namespace);
    let template = object["spec"]["template"]["spec"].clone();
    let made = make(&jobs, &serde_json::from_value(object)?).await?;
    let pod_name = format!("{name}-1");
    // As the operator would have written it.
    let mut note = json!({"policy": format!("TrainingJob/{}", policy.name()), "category": "growing"});
    if policy.preset() == Preset::Specon {
        let message = "TrainingJob/specon: it is measured, and keeps the resources that its author requested";
        note["blocked"] = json!({"reason": "WatchedOnly", "message": message});
    }
    let mut spec = template;
    spec["nodeName"] = json!(node);
    spec["restartPolicy"] = json!("Never");
    let object = json!({
        "metadata": {
            "name": pod_name, "namespace": namespace, "finalizers": ["gainshare.dev/attempt"],
            "labels": {"gainshare.dev/job": name, "gainshare.dev/epoch": "1"},
            "annotations": {"gainshare.dev/policy": policy.name(), "gainshare.dev/status": note.to_string()},
            "ownerReferences": [{
                "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "name": name, "uid": made.metadata.uid,
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": spec,
    });
    let pod = make(&Api::<Pod>::namespaced(client.clone(), &namespace), &serde_json::from_value(object)?).await?;
    let status = json!({"status": journal(&pod_name, pod.metadata.uid.as_deref().unwrap_or_default(), &node)});
    loop {
        match jobs.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await {
            Err(kube::Error::Api(status)) if status.code == 429 || status.code >= 500 => {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            other => return Ok(other.map(drop)?),
        }
    }
}

/// What an operator has written when a job runs.
fn journal(pod: &str, uid: &str, node: &str) -> Value {
    let (second, micro) = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00.000000Z");
    let message = format!("runs on {node} as {pod}");
    let condition = |kind: &str, holds: bool| {
        json!({
            "type": kind, "status": if holds { "True" } else { "False" }, "reason": "Running", "message": message,
            "observedGeneration": 1, "lastTransitionTime": second,
        })
    };
    let kinds = ["Created", "Running", "Suspended", "Migrating", "Succeeded", "Failed"];
    let conditions: Vec<Value> = kinds.iter().enumerate().map(|(i, kind)| condition(kind, i < 2)).collect();
    json!({
        "observedGeneration": 1, "state": "Running", "message": message, "conditions": conditions, "moves": 0, "failures": 0,
        "category": "growing", "startTime": micro,
        "attempt": {
            "epoch": 1, "pod": pod, "uid": uid, "node": node, "pinned": true, "since": micro, "startTime": micro,
        },
    })
}

/// Watched, not asked for again and again: one list of the pods of the whole cluster costs the API
/// server several seconds of a core, and it is to start pods meanwhile.
async fn all_run(client: &Client, began: Instant) -> Result<f64> {
    let pods: Api<PartialObjectMeta<Pod>> = Api::all(client.clone());
    let pending = watcher::Config::default().labels("gainshare.dev/job").fields("status.phase!=Running").any_semantic();
    let mut events = pin!(watcher(pods, pending));
    let (mut waiting, mut all_seen) = (BTreeSet::new(), false);
    while !all_seen || !waiting.is_empty() {
        let hour = Duration::from_secs(3600).saturating_sub(began.elapsed());
        let Ok(Some(event)) = tokio::time::timeout(hour, events.next()).await else {
            return Err("after an hour not all pods run".into());
        };
        match event {
            Ok(Event::Init) => (waiting, all_seen) = (BTreeSet::new(), false),
            Ok(Event::InitApply(pod) | Event::Apply(pod)) => drop(waiting.insert(pod.metadata.uid)),
            Ok(Event::InitDone) => all_seen = true,
            // It runs, so it is not among those that are watched any more.
            Ok(Event::Delete(pod)) => drop(waiting.remove(&pod.metadata.uid)),
            Err(error) => {
                eprintln!("crowd: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
    Ok(began.elapsed().as_secs_f64())
}
