//! Publishes how to reach and trust the leader: its certificate in the ConfigMap that node agents mount and in
//! the webhook's configuration, and a label on the leader's own pod, which the Service selects.

use crate::Config;
use base64::Engine;
use gainshare_core::backoff::Backoff;
use gainshare_kube_api::names::{FIELD_MANAGER, LEADER_LABEL};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use std::time::Duration;

const CERTIFICATE_KEY: &str = "ca.crt";

const RETRIES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));
/// An administrator may apply the chart again, and with it another certificate.
const READ_INTERVAL: Duration = Duration::from_secs(30);

/// Publishes now, and again whenever it was undone.
pub(crate) async fn run(config: Config, client: Client, certificate_pem: String) {
    let mut retries = RETRIES;
    loop {
        match once(&config, &client, &certificate_pem).await {
            Ok(()) => {
                retries.reset();
                tokio::time::sleep(READ_INTERVAL).await;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot publish the certificate yet");
                tokio::time::sleep(retries.next_pause()).await;
            }
        }
    }
}

async fn once(config: &Config, client: &Client, certificate_pem: &str) -> Result<(), kube::Error> {
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &config.namespace);
    let published = maps.get_opt(&config.config_map).await?.and_then(|map| map.data?.remove(CERTIFICATE_KEY));
    if published.as_deref() != Some(certificate_pem) {
        let patch = json!({"data": {CERTIFICATE_KEY: certificate_pem}});
        maps.patch(&config.config_map, &params, &Patch::Merge(patch)).await?;
        tracing::info!(config_map = config.config_map, "published the certificate");
    }
    if let Some(name) = &config.webhook {
        publish_in_webhook(client, &params, name, certificate_pem).await?;
    }
    if let Some(own) = &config.pod_name {
        take_label(config, client, &params, own).await?;
    }
    Ok(())
}

async fn publish_in_webhook(
    client: &Client,
    params: &PatchParams,
    name: &str,
    certificate_pem: &str,
) -> Result<(), kube::Error> {
    let api: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    // The webhook is optional.
    let Some(found) = api.get_opt(name).await? else { return Ok(()) };
    let webhooks = found.webhooks.unwrap_or_default();
    let stale = |bundle: Option<&[u8]>| bundle != Some(certificate_pem.as_bytes());
    if webhooks.iter().any(|hook| stale(hook.client_config.ca_bundle.as_ref().map(|bundle| bundle.0.as_slice()))) {
        let encoded = base64::engine::general_purpose::STANDARD.encode(certificate_pem);
        let hooks: Vec<_> =
            webhooks.iter().map(|hook| json!({"name": hook.name, "clientConfig": {"caBundle": encoded}})).collect();
        api.patch(name, params, &Patch::Strategic(json!({"webhooks": hooks}))).await?;
    }
    Ok(())
}

/// Takes the label from the former leader's pod, then puts it on the own pod: at no moment do two pods have it.
async fn take_label(config: &Config, client: &Client, params: &PatchParams, own: &str) -> Result<(), kube::Error> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &config.namespace);
    let labelled = pods.list(&ListParams::default().labels(&format!("{LEADER_LABEL}=true"))).await?;
    let names: Vec<String> = labelled.items.into_iter().filter_map(|pod| pod.metadata.name).collect();
    for other in names.iter().filter(|name| *name != own) {
        pods.patch(other, params, &Patch::Merge(json!({"metadata": {"labels": {LEADER_LABEL: null}}}))).await?;
    }
    if !names.iter().any(|name| name == own) {
        pods.patch(own, params, &Patch::Merge(json!({"metadata": {"labels": {LEADER_LABEL: "true"}}}))).await?;
    }
    Ok(())
}
