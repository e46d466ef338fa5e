//! Lets go of every pod in the cluster, before an uninstall.
//!
//! The switch in the manager's ConfigMap makes a running manager give everything back and keep its hands off. If none runs, we do it ourselves: the
//! pods carry all that is needed. Training jobs and their pods lose our finalizers, so that they can be deleted without us; Jobs
//! that are suspended for a move go on.

use super::restore::restore;
use super::write::{WriteError, Writer};
use crate::state::metrics::Metrics;
use crate::state::watch::SWITCH_KEY;
use crate::{Config, ManagerError};
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{ATTEMPT_FINALIZER, FIELD_MANAGER, JOB_FINALIZER, JOB_LABEL, ORIGINAL_ANNOTATION};
use gainshare_kube_api::training_job::TrainingJob;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A running manager gets this long to do it in its own order, decreases first.
const MANAGERS_TURN: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_secs(1);
const PAGE: u32 = 500;

/// Switches sharing off and returns when no running pod carries values of ours any more. Answers how many did.
pub async fn release(config: &Config, client: &Client) -> Result<usize, ManagerError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &config.namespace);
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    match maps.patch(&config.config_map, &params, &Patch::Merge(json!({"data": {SWITCH_KEY: "off"}}))).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => return Err(error.into()),
    }
    let writer = Writer::new(client.clone(), Arc::new(Metrics::new()));
    let started = Instant::now();
    let mut most = 0;
    loop {
        let carrying = carrying(client).await?;
        most = most.max(carrying.len());
        if carrying.is_empty() {
            unhold::<Pod>(client, ListParams::default().labels(JOB_LABEL), ATTEMPT_FINALIZER).await?;
            unhold::<TrainingJob>(client, ListParams::default(), JOB_FINALIZER).await?;
            crate::jobs::give_back(client).await?;
            return Ok(most);
        }
        if started.elapsed() > LONGEST {
            let names: Vec<String> =
                carrying.iter().take(5).map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
            return Err(ManagerError::Unfinished(format!(
                "{} pods still have our values, among them {}: look at the manager's log, then run this again",
                carrying.len(),
                names.join(", ")
            )));
        }
        if started.elapsed() > MANAGERS_TURN {
            for pod in &carrying {
                match restore(&writer, pod).await {
                    Ok(_) | Err(WriteError::Gone) => {}
                    Err(error) => tracing::warn!(pod = pod.name, namespace = pod.namespace, %error, "not restored yet"),
                }
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Running pods that carry original values.
async fn carrying(client: &Client) -> Result<Vec<PodFacts>, ManagerError> {
    let api: Api<Pod> = Api::all(client.clone());
    let mut params = ListParams::default().limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = api.list(&params).await?;
        let facts = page.items.iter().filter_map(PodFacts::of);
        found.extend(
            facts.filter(|pod| pod.running && pod.notes.contains_key(ORIGINAL_ANNOTATION) && pod.originals().is_some()),
        );
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(found),
        }
    }
}

/// Takes our finalizer off, so that nothing waits for a manager that will not come. Pods of training jobs run on.
async fn unhold<K>(client: &Client, which: ListParams, finalizer: &str) -> Result<(), ManagerError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let all = match Api::<K>::all(client.clone()).list(&which).await {
        Ok(all) => all,
        // The definition is not there, so no object is.
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    for object in all.items.iter().filter(|object| object.finalizers().iter().any(|one| one == finalizer)) {
        let others: Vec<&String> = object.finalizers().iter().filter(|one| *one != finalizer).collect();
        let api: Api<K> = Api::namespaced(client.clone(), &object.namespace().unwrap_or_default());
        let patch = json!({"metadata": {"resourceVersion": object.resource_version(), "finalizers": others}});
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        match api.patch(&object.name_any(), &params, &Patch::Merge(patch)).await {
            Ok(_) => {}
            // Gone, or changed meanwhile: whoever changed it is at work there, and the uninstall can be run again.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                tracing::warn!(name = object.name_any(), finalizer, "changed while it was let go");
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
