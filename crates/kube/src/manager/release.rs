//! Lets go of every pod in the cluster, before an uninstall.
//!
//! The switch in the manager's ConfigMap makes a running manager give everything back and keep its hands off. If none runs, we do it ourselves: the
//! pods carry all that is needed.

use super::metrics::Metrics;
use super::restore::restore;
use super::watch::SWITCH_KEY;
use super::write::{FIELD_MANAGER, WriteError, Writer};
use super::{Config, ManagerError};
use crate::crd::ORIGINAL_ANNOTATION;
use crate::facts::PodFacts;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
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
