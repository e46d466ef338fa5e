//! Distributed jobs on make-believe nodes: what do a thousand jobs of eight tasks cost the operator
//! in front of a real API server?
//!
//! **Phases.** *Start*: all jobs are created at once, and the operator makes their pods and
//! Services, chooses nodes and opens the gates; the cluster's own scheduler binds the pods. *Idle*:
//! all jobs run and nothing changes. *Touch*: every job's object is changed in a way that does not
//! concern the operator, so the operator reads and reconciles all of them once. *Full*: more jobs
//! come, which find no room and wait. *Return*: the operator was killed, and another one finds
//! everything as it was.
//!
//! No node agent reports here. The decision about the sizes of tasks, with reports, is measured in
//! one process (`crates/operator/src/rehearsal.rs`).
//!
//! **Units.** `_cpu_s`: seconds of processor time of the operator's whole process, with the reading
//! of what the API server sends.

use super::measure::{self, Mark, OF_JOBS, Span, leads, process, settled};
use super::prepare::{self, AT_ONCE, create_jobs};
use super::{Plan, Result};
use futures_util::{StreamExt, TryStreamExt};
use gainshare_kube_api::training_job::TrainingJob;
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// The operator has settled when it has written nothing for this time.
const QUIET: Duration = Duration::from_secs(10);
const SERVERS: usize = 2;
const WORKERS: usize = 6;
const TASKS: usize = SERVERS + WORKERS;
/// Cores of a worker. A node of 32 cores holds two jobs, and four cores are left.
const WORKER_CORES: u32 = 2;
/// Cores of a worker of the jobs that find no room while the others run.
const LATE_WORKER_CORES: u32 = 5;

pub(super) async fn run(plan: &Plan, client: &Client) -> Result<Value> {
    namespaces(plan, client).await?;
    leads(plan).await?;
    let start = start(plan, client).await?;
    eprintln!("crowd: {start}");
    let idle = measure::idle(plan, client, OF_JOBS).await?;
    eprintln!("crowd: {}", figures(&idle));
    let touch = touch(plan, client, idle.cores()).await?;
    eprintln!("crowd: {touch}");
    let before = Mark::now(plan, client, OF_JOBS).await?;
    create(plan, client, "late", plan.coming, LATE_WORKER_CORES).await?;
    before.until(client, "pod_creations", plan.coming * TASKS).await?;
    settled(&plan.metrics, QUIET).await?;
    let full = measure::idle(plan, client, OF_JOBS).await?;
    let states = states(plan, client).await?;
    let (peak_rss_mib, cpu_s) = process(plan.operator_pid)?;
    Ok(json!({
        "nodes": plan.nodes, "jobs": plan.running, "tasks_per_job": TASKS, "late_jobs": plan.coming,
        "start": start, "idle": figures(&idle), "touch": touch, "full": figures(&full), "states": states,
        "operator_peak_rss_mib": peak_rss_mib, "operator_cpu_s": cpu_s,
    }))
}

/// The operator was killed and another one started, which waits for the lease at first.
pub(super) async fn after_return(plan: &Plan, client: &Client) -> Result<Value> {
    let before = Mark::now(plan, client, OF_JOBS).await?;
    leads(plan).await?;
    let leading_s = before.at.elapsed().as_secs_f64();
    settled(&plan.metrics, QUIET).await?;
    let span = before.since(plan, client).await?;
    let states = states(plan, client).await?;
    let (_, cpu_s) = process(plan.operator_pid)?;
    Ok(json!({
        "leading_s": leading_s, "cpu_s_since_its_start": cpu_s, "until_it_is_quiet": figures(&span), "states": states,
    }))
}

async fn namespaces(plan: &Plan, client: &Client) -> Result<()> {
    for index in 0..plan.namespaces {
        prepare::namespace(client, &format!("team-{index}"), json!({"gainshare.dev/jobs": "enabled"})).await?;
    }
    Ok(())
}

fn job(plan: &Plan, name: &str, index: usize, worker_cores: u32) -> Value {
    let template = |cores: u32| {
        json!({"spec": {
            "automountServiceAccountToken": false, "tolerations": [{"operator": "Exists"}],
            "containers": [{
                "name": "tensorflow", "image": "none", "command": ["python3", "train.py"],
                "resources": {"requests": {"cpu": cores.to_string(), "memory": "4Gi"}},
            }],
        }})
    };
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": format!("team-{}", index % plan.namespaces)},
        "spec": {"policy": "operator", "replicaSpecs": {
            "PS": {"replicas": SERVERS, "template": template(1)},
            "Worker": {
                "replicas": WORKERS, "minReplicas": WORKERS, "maxReplicas": WORKERS + 2,
                "template": template(worker_cores),
            },
        }},
    })
}

async fn create(plan: &Plan, client: &Client, prefix: &str, count: usize, worker_cores: u32) -> Result<()> {
    create_jobs(client, count, |index| job(plan, &format!("{prefix}-{index}"), index, worker_cores)).await
}

fn figures(span: &Span) -> Value {
    json!({
        "seconds": span.seconds, "cpu_s": span.cpu_s, "cores": span.cores(), "writes": span.counts.ours(),
        "writes_by_kind": span.counts.json(),
    })
}

/// All jobs at once, until all of them run.
async fn start(plan: &Plan, client: &Client) -> Result<Value> {
    let mark = Mark::now(plan, client, OF_JOBS).await?;
    create(plan, client, "job", plan.running, WORKER_CORES).await?;
    let created_s = mark.at.elapsed().as_secs_f64();
    let bound_s = mark.until(client, "pod_bindings", plan.running * TASKS).await?;
    let last_write_s = settled(&plan.metrics, QUIET).await?.duration_since(mark.at).as_secs_f64();
    let span = mark.since(plan, client).await?;
    let states = states(plan, client).await?;
    if states.get("Running") != Some(&plan.running) {
        return Err(format!("not all {} jobs run: {states:?}", plan.running).into());
    }
    Ok(json!({
        "created_s": created_s, "bound_s": bound_s, "last_write_s": last_write_s, "cpu_s": span.cpu_s,
        "writes_per_job": span.counts.ours() / plan.running.max(1) as f64, "writes_by_kind": span.counts.json(),
    }))
}

/// An annotation on every job, which the operator does not read. What the operator does all the time
/// (`idle_cores`) is not counted.
async fn touch(plan: &Plan, client: &Client, idle_cores: f64) -> Result<Value> {
    let mark = Mark::now(plan, client, OF_JOBS).await?;
    let patch = json!({"metadata": {"annotations": {"example.com/touched": "yes"}}});
    futures_util::stream::iter(0..plan.running)
        .map(|index| {
            let api: Api<TrainingJob> = Api::namespaced(client.clone(), &format!("team-{}", index % plan.namespaces));
            let patch = Patch::Merge(&patch);
            async move { api.patch(&format!("job-{index}"), &PatchParams::default(), &patch).await.map(drop) }
        })
        .buffer_unordered(AT_ONCE)
        .try_collect::<Vec<()>>()
        .await?;
    settled(&plan.metrics, QUIET).await?;
    let span = mark.since(plan, client).await?;
    let own = plan.running as f64;
    Ok(json!({
        "seconds": span.seconds, "cpu_s": span.cpu_s, "reconcile_of_all_cpu_s": span.cpu_s - idle_cores * span.seconds,
        "writes": span.counts.ours() - own,
    }))
}

/// How many jobs are in each state.
async fn states(plan: &Plan, client: &Client) -> Result<BTreeMap<String, usize>> {
    let mut states = BTreeMap::new();
    for index in 0..plan.namespaces {
        let api: Api<TrainingJob> = Api::namespaced(client.clone(), &format!("team-{index}"));
        for job in api.list(&ListParams::default()).await? {
            let state = json!(job.status)["state"].as_str().unwrap_or("none").to_owned();
            *states.entry(state).or_insert(0) += 1;
        }
    }
    Ok(states)
}
