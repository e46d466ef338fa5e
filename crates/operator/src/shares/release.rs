//! Releases every object in the cluster, for an uninstall: before it, or after the operator is gone.
//!
//! The switch in the operator's ConfigMap makes a running operator restore all pods and start nothing. If none
//! runs, this module restores the pods itself: their annotations hold all that is needed. Training jobs and
//! their pods lose our finalizers, so that deleting them needs no operator; Jobs that are suspended for a move
//! go on.
//!
//! **Properties.** Every list is read page by page. An object that cannot be changed does not keep the others
//! from being released; the errors are counted and reported at the end.

use super::restore::restore;
use super::write::{WriteError, Writer, point};
use crate::fail_point::FailPoint;
use crate::state::metrics::Metrics;
use crate::state::watch::SWITCH_KEY;
use crate::{Config, OperatorError};
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{ATTEMPT_FINALIZER, FIELD_MANAGER, JOB_FINALIZER, JOB_LABEL, ORIGINAL_ANNOTATION};
use gainshare_kube_api::tfjob::TfJob;
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

/// A running operator gets this long to restore the pods in its own order, decreases first.
const OPERATORS_TURN: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(120);
const READ_INTERVAL: Duration = Duration::from_secs(1);
const PAGE: u32 = 500;
/// An object that changed while it was released is read and tried again this often.
const MOST_TRIES: usize = 5;

/// Switches sharing off, restores every running pod and removes our finalizers. Answers how many pods carried
/// changed resources.
pub async fn release(config: &Config, client: &Client) -> Result<usize, OperatorError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &config.namespace);
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    config.fail_at.reach("before", point::SWITCH);
    match maps.patch(&config.config_map, &params, &Patch::Merge(json!({"data": {SWITCH_KEY: "off"}}))).await {
        Ok(_) => config.fail_at.reach("after", point::SWITCH),
        // After an uninstall there is no ConfigMap and no operator that reads it.
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(error) => return Err(error.into()),
    }
    let restored = restore_all(client, &config.fail_at).await;
    // Pods that could not be restored must not keep jobs from being deleted.
    let jobs_pods = ListParams::default().labels(JOB_LABEL);
    let mut failures = remove_finalizer::<Pod>(client, jobs_pods, ATTEMPT_FINALIZER, &config.fail_at).await?;
    let all = ListParams::default;
    failures.extend(remove_finalizer::<TrainingJob>(client, all(), JOB_FINALIZER, &config.fail_at).await?);
    if config.tfjobs {
        failures.extend(remove_finalizer::<TfJob>(client, all(), JOB_FINALIZER, &config.fail_at).await?);
    }
    failures.extend(crate::jobs::give_back(client).await?);
    let restored = restored?;
    if failures.is_empty() {
        return Ok(restored);
    }
    let first: Vec<&str> = failures.iter().take(5).map(String::as_str).collect();
    Err(OperatorError::Unfinished(format!(
        "{} objects could not be released: {}; remove the cause, then run this again",
        failures.len(),
        first.join("; ")
    )))
}

/// Waits until a running operator has restored every pod, and helps it after a while.
async fn restore_all(client: &Client, fail_at: &FailPoint) -> Result<usize, OperatorError> {
    let mut writer = Writer::new(client.clone(), Arc::new(Metrics::new()));
    writer.fail_at = fail_at.clone();
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
            return Err(OperatorError::Unfinished(format!(
                "{} pods could not be restored, among them {}: read the operator's log, then run this again",
                carrying.len(),
                names.join(", ")
            )));
        }
        if started.elapsed() > OPERATORS_TURN {
            for pod in &carrying {
                match restore(&writer, pod).await {
                    Ok(_) | Err(WriteError::Gone) => {}
                    Err(error) => tracing::warn!(pod = pod.name, namespace = pod.namespace, %error, "not restored yet"),
                }
            }
        }
        tokio::time::sleep(READ_INTERVAL).await;
    }
}

/// Running pods that carry original resources.
async fn carrying(client: &Client) -> Result<Vec<PodFacts>, OperatorError> {
    let mut found = Vec::new();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let page = Api::<Pod>::all(client.clone()).list(&params).await?;
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

/// Removes our finalizer from all objects of a kind, so that none of them waits for an operator that is gone.
/// Pods of training jobs run on. Answers what could not be changed, and why.
async fn remove_finalizer<K>(
    client: &Client,
    which: ListParams,
    finalizer: &str,
    fail_at: &FailPoint,
) -> Result<Vec<String>, OperatorError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let mut failures = Vec::new();
    let mut params = which.limit(PAGE);
    loop {
        let page = match Api::<K>::all(client.clone()).list(&params).await {
            Ok(page) => page,
            // Without the definition there are no objects.
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(failures),
            Err(error) => return Err(error.into()),
        };
        for object in page.items {
            let name = format!("{} {}/{}", K::kind(&()), object.namespace().unwrap_or_default(), object.name_any());
            if let Err(error) = let_go(client, object, finalizer, fail_at).await {
                failures.push(format!("{name}: {error}"));
            }
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(failures),
        }
    }
}

async fn let_go<K>(client: &Client, mut object: K, finalizer: &str, fail_at: &FailPoint) -> kube::Result<()>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    let api: Api<K> = Api::namespaced(client.clone(), &object.namespace().unwrap_or_default());
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let mut tries = 0;
    loop {
        if !object.finalizers().iter().any(|one| one == finalizer) {
            return Ok(());
        }
        let others: Vec<&String> = object.finalizers().iter().filter(|one| *one != finalizer).collect();
        let patch = json!({"metadata": {"resourceVersion": object.resource_version(), "finalizers": others}});
        fail_at.reach("before", point::FINALIZER);
        match api.patch(&object.name_any(), &params, &Patch::Merge(patch)).await {
            Ok(_) => {
                fail_at.reach("after", point::FINALIZER);
                return Ok(());
            }
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 409 && tries < MOST_TRIES => {
                tries += 1;
                match api.get_opt(&object.name_any()).await? {
                    Some(now) if now.uid() == object.uid() => object = now,
                    _ => return Ok(()),
                }
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::extract::{Path, Query, State};
    use axum::http::StatusCode;
    use axum::routing::{get, patch};
    use axum::{Json, Router};
    use gainshare_kube_api::names::ADOPTED_ANNOTATION;
    use parking_lot::Mutex;
    use serde_json::Value;
    use std::collections::HashMap;

    /// The objects that were changed, in order.
    type ChangedPods = Arc<Mutex<Vec<String>>>;

    fn object(name: &str) -> Value {
        json!({
            "metadata": {
                "namespace": "team", "name": name, "uid": name, "resourceVersion": "1",
                "finalizers": [ATTEMPT_FINALIZER], "annotations": {ADOPTED_ANNOTATION: "{}"},
            },
            "spec": {"containers": [], "template": {"spec": {"containers": []}}},
        })
    }

    /// Two pages: the first has an object that may not be changed.
    async fn list(Query(query): Query<HashMap<String, String>>) -> Json<Value> {
        let (names, rest) = match query.get("continue") {
            None => (["locked", "first"], "page-2"),
            Some(_) => (["second", "third"], ""),
        };
        Json(json!({"metadata": {"continue": rest}, "items": names.map(object)}))
    }

    async fn change(
        State(changed): State<ChangedPods>,
        Path(name): Path<String>,
    ) -> Result<Json<Value>, (StatusCode, Json<Value>)> {
        if name == "locked" {
            let status = json!({"kind": "Status", "status": "Failure", "code": 403, "message": "denied"});
            return Err((StatusCode::FORBIDDEN, Json(status)));
        }
        changed.lock().push(name.clone());
        Ok(Json(object(&name)))
    }

    #[tokio::test]
    async fn an_object_that_cannot_be_changed_keeps_no_other_from_being_released() {
        let changed = ChangedPods::default();
        let router = Router::new()
            .route("/api/v1/pods", get(list))
            .route("/api/v1/namespaces/team/pods/{name}", patch(change))
            .route("/apis/batch/v1/jobs", get(list))
            .route("/apis/batch/v1/namespaces/team/jobs/{name}", patch(change))
            .with_state(changed.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        let client = Client::try_from(kube::Config::new(format!("http://{address}").parse().unwrap())).unwrap();
        let of_pods = remove_finalizer::<Pod>(&client, ListParams::default(), ATTEMPT_FINALIZER, &FailPoint::default())
            .await
            .unwrap();
        assert_eq!(std::mem::take(&mut *changed.lock()), ["first", "second", "third"]);
        let of_jobs = crate::jobs::give_back(&client).await.unwrap();
        assert_eq!(*changed.lock(), ["first", "second", "third"]);
        for failures in [of_pods, of_jobs] {
            assert_eq!(failures.len(), 1, "{failures:?}");
            assert!(failures[0].contains("team/locked") && failures[0].contains("denied"), "{failures:?}");
        }
    }
}
