//! The loop: reads the cluster, works out which nodes are needed, publishes the need, and keeps the placeholders.

use super::damper::Damper;
use super::kinds::Kinds;
use super::placeholders::{Arrivals, Changes, Owner, Placeholder, ScalerConfig, excluded, manifest, reconcile};
use super::plan::{KindNeed, NeedPlan, plan};
use super::snapshot::{LateWorkload, NeedSnapshot, read};
use crate::Config;
use crate::isolate::catch_future;
use crate::state::events::{Subject, Text, publish};
use crate::state::lead::Leader;
use crate::state::metrics::NodeKindLabels;
use crate::state::workload::{WorkloadKey, WorkloadKind};
use crate::state::world::World;
use gainshare_core::policies::deadline::NodeKind;
use gainshare_kube_api::deadline::{FinishStatus, NodesNeeded, moment_text};
use gainshare_kube_api::names::{API_VERSION, FIELD_MANAGER, JobUid, PodUid};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Client;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::runtime::events::Recorder;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const PASS_EVERY: Duration = Duration::from_secs(5);
/// The pause after a pass that panicked.
const AFTER_PANIC: Duration = Duration::from_secs(10);
/// A request that takes longer is given up: the next pass repeats it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after a placeholder was refused, by a quota for instance.
const REFUSAL_PAUSE: SignedDuration = SignedDuration::from_secs(60);

/// Why a placeholder was not made.
#[derive(Debug, thiserror::Error)]
enum PlaceholderError {
    #[error("too many nodes have room for it")]
    TooManyNodes,
    #[error("there is no ConfigMap {0} to own placeholders: install the chart")]
    NoOwner(String),
    #[error("the API server does not answer")]
    NoAnswer,
    #[error("its manifest is not a pod: {0}")]
    Manifest(#[from] serde_json::Error),
    #[error(transparent)]
    Api(#[from] kube::Error),
}

/// Where the operator runs, and how it makes placeholders.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    namespace: String,
    config_map: String,
    placeholders: Option<ScalerConfig>,
}

impl Settings {
    pub(crate) fn of(config: &Config) -> Settings {
        Settings {
            namespace: config.namespace.clone(),
            config_map: config.config_map.clone(),
            placeholders: config.scaler.clone(),
        }
    }
}

/// Works out which nodes are needed for as long as this operator leads.
pub(crate) async fn run(leader: Arc<Leader>, client: Client, recorder: Recorder, settings: Settings) {
    let mut scaler = None;
    loop {
        tokio::time::sleep(PASS_EVERY).await;
        if !leader.jobs_are_synced() {
            continue;
        }
        let begin = || Scaler::begin(leader.clone(), client.clone(), recorder.clone(), settings.clone());
        let one: &mut Scaler = scaler.get_or_insert_with(begin);
        if let Err(panic) = catch_future(one.pass(Timestamp::now())).await {
            tracing::error!(panic, "a pass over the needed nodes panicked: it begins again");
            scaler = None;
            tokio::time::sleep(AFTER_PANIC).await;
        }
    }
}

fn placeholders<'a>(world: &'a World, namespace: &str) -> impl Iterator<Item = Placeholder> + use<'a> {
    let namespace = namespace.to_owned();
    world.pods().filter(move |pod| pod.namespace == namespace).filter_map(Placeholder::of)
}

struct Scaler {
    leader: Arc<Leader>,
    client: Client,
    recorder: Recorder,
    settings: Settings,
    kinds: Kinds,
    /// By the uid of the job.
    jobs: Damper<JobUid, NodesNeeded>,
    /// By the name of the kind.
    needs: Damper<String, KindNeed>,
    /// The jobs above, and late ones.
    keys: BTreeMap<JobUid, WorkloadKey>,
    arrivals: Arrivals,
    /// No placeholder is made before.
    not_before: Option<Timestamp>,
}

impl Scaler {
    /// Goes on where the last leader ended: with what it has published, and with its placeholders.
    fn begin(leader: Arc<Leader>, client: Client, recorder: Recorder, settings: Settings) -> Scaler {
        let (mut jobs, mut keys, mut needs) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::<String, KindNeed>::new());
        let mut published = |uid: &JobUid, key: WorkloadKey, finish: Option<&FinishStatus>| {
            if let Some(needed) = finish.and_then(|finish| finish.nodes_needed.clone()) {
                jobs.insert(uid.clone(), needed);
                keys.insert(uid.clone(), key);
            }
        };
        leader.read(|world| {
            for job in world.jobs.training_jobs() {
                let key = WorkloadKey::new(WorkloadKind::TrainingJob, job.key());
                published(&job.uid, key, job.status.finish.as_ref());
            }
            for job in world.jobs.task_jobs() {
                published(&job.uid, job.key.clone(), job.status.finish.as_ref());
            }
            for one in placeholders(world, &settings.namespace) {
                let need = needs.entry(one.kind).or_default();
                (need.count, need.hidden) = (need.count + 1, need.hidden + 1);
            }
        });
        // This process may have led before.
        leader.metrics.nodes_needed.clear();
        Scaler {
            leader,
            client,
            recorder,
            settings,
            kinds: Kinds::default(),
            jobs: Damper::with(jobs),
            needs: Damper::with(needs),
            keys,
            arrivals: Arrivals::default(),
            not_before: None,
        }
    }

    async fn pass(&mut self, now: Timestamp) {
        let is_off = self.leader.read(|world| {
            self.kinds.observe(world, now);
            world.is_off()
        });
        let snapshot = if is_off { NeedSnapshot::default() } else { read(&self.leader, now) };
        let plan = plan(&snapshot, &self.kinds);
        self.publish(&snapshot, &plan).await;
        self.keep_placeholders(is_off, now, &snapshot, &plan).await;
    }

    async fn publish(&mut self, snapshot: &NeedSnapshot, plan: &NeedPlan) {
        let late: BTreeMap<&JobUid, &LateWorkload> = snapshot.late.iter().map(|one| (&one.uid, one)).collect();
        self.keys.extend(late.iter().map(|(uid, one)| ((*uid).clone(), one.key.clone())));
        let changed = self.jobs.observe(&plan.jobs);
        *self.leader.nodes_needed.lock() = Some(self.jobs.values().clone());
        for uid in &changed {
            if let Some(key) = self.keys.get(uid) {
                self.leader.change(|world| world.jobs.mark(key.clone()));
            }
            if let (Some(needed), Some(one)) = (self.jobs.values().get(uid), late.get(uid)) {
                self.announce(one, needed).await;
            }
        }
        let values = self.jobs.values();
        self.keys.retain(|uid, _| values.contains_key(uid) || late.contains_key(uid));
        let changed = self.needs.observe(&plan.kinds);
        let metric = &self.leader.metrics.nodes_needed;
        for kind in changed.into_iter().filter(|kind| !self.needs.values().contains_key(kind)) {
            metric.remove(&NodeKindLabels { kind });
        }
        for (kind, need) in self.needs.values() {
            let labels = NodeKindLabels { kind: kind.clone() };
            metric.get_or_create(&labels).set(i64::try_from(need.count).unwrap_or(i64::MAX));
        }
    }

    /// The event of a job whose need is new, or has changed.
    async fn announce(&self, late: &LateWorkload, needed: &NodesNeeded) {
        let name = &late.key.name;
        let note = format!("needs {needed} to finish by {}", moment_text(late.deadline.at_ms));
        tracing::info!(job = %late.key, note, "nodes are needed");
        let api_version = if late.key.kind == WorkloadKind::Job { "batch/v1" } else { API_VERSION };
        let (kind, uid) = (late.key.kind.name(), Some(late.uid.as_str()));
        let subject = Subject { api_version, kind, namespace: &name.namespace, name: &name.name, uid };
        let text = Text { warns: true, reason: "NodesNeeded", note: &note, action: "Scale" };
        let sent = publish(&self.recorder, subject, text);
        if tokio::time::timeout(REQUEST_TIMEOUT, sent).await.is_err() {
            tracing::debug!(job = %late.key, "event not published in time");
        }
    }

    async fn keep_placeholders(&mut self, is_off: bool, now: Timestamp, snapshot: &NeedSnapshot, plan: &NeedPlan) {
        let existing: Vec<Placeholder> =
            self.leader.read(|world| placeholders(world, &self.settings.namespace).collect());
        self.leader.metrics.placeholders.set(i64::try_from(existing.len()).unwrap_or(i64::MAX));
        let config = self.settings.placeholders.clone().filter(|_| !is_off);
        let wanted: BTreeMap<String, usize> = match config {
            Some(_) => self.needs.values().iter().map(|(kind, need)| (kind.clone(), need.hidden)).collect(),
            None => BTreeMap::new(),
        };
        let most = config.as_ref().map_or(0, |config| config.most_nodes);
        let mut changes = reconcile(&existing, &wanted, most, &mut self.arrivals, now);
        // A need that is about to vanish keeps its placeholders and gets no new ones.
        changes.create.retain(|(_, kind)| plan.kinds.contains_key(kind));
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.settings.namespace);
        for (name, uid) in &changes.delete {
            self.delete(&pods, name, uid).await;
        }
        if let Some(config) = config.filter(|_| self.not_before.is_none_or(|at| at <= now))
            && !changes.create.is_empty()
            && let Err(error) = self.create(&pods, &changes, &snapshot.free, &config).await
        {
            tracing::warn!(%error, "a placeholder for a needed node is not made; retried in a minute");
            self.not_before = now.saturating_add(REFUSAL_PAUSE).ok();
        }
    }

    async fn delete(&self, pods: &Api<Pod>, name: &str, uid: &PodUid) {
        let preconditions = Some(Preconditions { uid: Some(uid.to_string()), resource_version: None });
        let params = DeleteParams { preconditions, grace_period_seconds: Some(0), ..DeleteParams::default() };
        match tokio::time::timeout(REQUEST_TIMEOUT, pods.delete(name, &params)).await {
            Ok(Ok(_)) => tracing::info!(pod = name, "a placeholder is deleted"),
            // It is gone, or another one has its name.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {}
            Ok(Err(error)) => tracing::warn!(pod = name, %error, "a placeholder is not deleted yet"),
            Err(_) => tracing::warn!(pod = name, "a placeholder is not deleted yet: the API server does not answer"),
        }
    }

    async fn create(
        &self,
        pods: &Api<Pod>,
        changes: &Changes,
        free: &[NodeKind],
        config: &ScalerConfig,
    ) -> Result<(), PlaceholderError> {
        let owner = self.owner().await?;
        for (name, kind_name) in &changes.create {
            let Some(kind) = self.kinds.get(kind_name) else { continue };
            let excluded = excluded(kind, free).ok_or(PlaceholderError::TooManyNodes)?;
            let pod = manifest((name, kind_name), kind, &excluded, &owner, config);
            let pod: Pod = serde_json::from_value(pod)?;
            let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
            match tokio::time::timeout(REQUEST_TIMEOUT, pods.create(&params, &pod)).await {
                Ok(Ok(_)) => tracing::info!(pod = name, "a placeholder waits for a node"),
                Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
                Ok(Err(error)) => return Err(error.into()),
                Err(_) => return Err(PlaceholderError::NoAnswer),
            }
        }
        Ok(())
    }

    /// The object with which placeholders go at an uninstall.
    async fn owner(&self) -> Result<Owner, PlaceholderError> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.settings.namespace);
        let name = &self.settings.config_map;
        let found = tokio::time::timeout(REQUEST_TIMEOUT, maps.get_opt(name)).await;
        let found = found.map_err(|_| PlaceholderError::NoAnswer)??;
        let uid = found.and_then(|map| map.metadata.uid).ok_or_else(|| PlaceholderError::NoOwner(name.clone()))?;
        Ok(Owner { namespace: self.settings.namespace.clone(), config_map: name.clone(), uid })
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
