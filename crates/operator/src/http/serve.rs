//! What the manager answers over the network: agents and admission reviews over TLS, health and metrics in the clear on a port of their own.

use super::auth::AuthError;
use crate::http::webhook;
use crate::shares::resizes;
use crate::state::lead::Leader;
use crate::state::metrics::{Metrics, StateLabels};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use gainshare_kube_api::wire::{Answer, LONGEST_WAIT_MS, SYNC_PATH, SyncRequest};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A node has at most some hundred pods; a pod in an admission review can be large.
const LARGEST_BODY: usize = 8 << 20;

/// Whether somebody leads here, and the leader's things.
pub(crate) type Leading = watch::Receiver<Option<Arc<Leader>>>;

#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) leading: Leading,
    pub(crate) metrics: Arc<Metrics>,
    /// Turns true when the process is to end.
    pub(crate) ending: watch::Receiver<bool>,
}

/// For agents and the API server.
pub(crate) fn secure(served: Served) -> Router {
    Router::new()
        .route(SYNC_PATH, post(sync))
        .route("/mutate", post(mutate))
        .layer(DefaultBodyLimit::max(LARGEST_BODY))
        .with_state(served)
}

/// For the kubelet and Prometheus.
pub(crate) fn plain(served: Served) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(served)
}

/// Ready: either leading with everything in view, or waiting to lead. A manager that ends, or is still reading, is not.
async fn readyz(State(served): State<Served>) -> Response {
    if *served.ending.borrow() {
        return (StatusCode::SERVICE_UNAVAILABLE, "ending\n").into_response();
    }
    match served.leading.borrow().as_ref() {
        Some(leader) if leader.is_synced() => "leading\n".into_response(),
        Some(_) => (StatusCode::SERVICE_UNAVAILABLE, "reading the cluster's state\n").into_response(),
        None => "standing by\n".into_response(),
    }
}

async fn metrics(State(served): State<Served>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], served.metrics.text()).into_response()
}

async fn mutate(State(served): State<Served>, Json(review): Json<Value>) -> Response {
    match webhook::review(review) {
        Ok(answer) => {
            if answer.changed {
                served.metrics.admissions.inc();
            }
            Json(answer.review).into_response()
        }
        Err(error) => refuse(StatusCode::BAD_REQUEST, &error),
    }
}

fn refuse(code: StatusCode, why: &str) -> Response {
    (code, Json(json!({"error": why}))).into_response()
}

async fn sync(State(served): State<Served>, headers: HeaderMap, Json(sync): Json<SyncRequest>) -> Response {
    let leader = served.leading.borrow().clone();
    let (answer, state) = match leader.filter(|leader| leader.is_synced()) {
        None => (
            refuse(StatusCode::SERVICE_UNAVAILABLE, "this manager does not lead, or has just begun: ask again"),
            "not-leading",
        ),
        Some(leader) => match prove(&leader, &headers, &sync).await {
            Ok(()) => (Json(answer(&served, &leader, &sync).await).into_response(), "answered"),
            Err(error) => {
                let code = match error {
                    AuthError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
                    AuthError::Missing | AuthError::Rejected(_) => StatusCode::UNAUTHORIZED,
                    _ => StatusCode::FORBIDDEN,
                };
                tracing::warn!(node = sync.node, %error, "agent turned away");
                (refuse(code, &error.to_string()), "turned-away")
            }
        },
    };
    served.metrics.syncs.get_or_create(&StateLabels { state }).inc();
    answer
}

async fn prove(leader: &Leader, headers: &HeaderMap, sync: &SyncRequest) -> Result<(), AuthError> {
    let header = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let proved = leader.reviewer.node(header).await?;
    if proved != sync.node {
        return Err(AuthError::OtherNode { proved, claimed: sync.node.clone() });
    }
    Ok(())
}

async fn answer(served: &Served, leader: &Arc<Leader>, sync: &SyncRequest) -> Answer {
    let mut bell = leader.bell(&sync.node);
    let heard = leader.agents.lock().expect("never poisoned").hear(sync, Instant::now());
    let outcomes = if heard.stale {
        Vec::new()
    } else {
        // The older request of this agent need not wait any longer.
        leader.ring(&sync.node);
        bell.borrow_and_update();
        let outcomes = resizes::carry_out(leader, &sync.node, sync.epoch, &sync.resizes).await;
        // After the deed: a kubelet that has just taken in a note acts on a resize only after its next look at the runtime.
        touch(leader, heard.changed);
        outcomes
    };
    if !heard.stale && sync.resizes.is_empty() {
        wait_for_news(served, leader, sync, &mut bell).await;
    }
    let want_jobs = leader.agents.lock().expect("never poisoned").want_jobs(&sync.node);
    leader.look(|world| {
        let revision = world.revision(&sync.node);
        Answer {
            epoch: sync.epoch,
            seq: sync.seq,
            revision,
            pods: (revision != sync.seen).then(|| world.list(&sync.node)),
            outcomes,
            want_jobs,
        }
    })
}

/// Jobs whose standing changed: their notes and their policies' counts may have to be written.
fn touch(leader: &Leader, uids: Vec<String>) {
    if uids.is_empty() {
        return;
    }
    let policies = leader.look(|world| {
        let keys =
            uids.iter().filter_map(|uid| world.shared(uid)).map(|pod| (pod.namespace.clone(), pod.policy.clone()));
        keys.collect::<Vec<_>>()
    });
    leader.mark_policies(policies);
    leader.mark_progressed(uids.iter().cloned());
    leader.mark_pods(uids);
}

async fn wait_for_news(served: &Served, leader: &Leader, sync: &SyncRequest, bell: &mut watch::Receiver<u64>) {
    let wait = Duration::from_millis(sync.wait_ms.min(LONGEST_WAIT_MS).into());
    let until = tokio::time::Instant::now() + wait;
    let (mut leading, mut ending) = (served.leading.clone(), served.ending.clone());
    loop {
        let is_new = leader.look(|world| world.revision(&sync.node)) != sync.seen;
        let newest = {
            let agents = leader.agents.lock().expect("never poisoned");
            agents.is_newest(sync) && !agents.want_jobs(&sync.node)
        };
        if is_new || !newest || *ending.borrow() || leading.borrow().is_none() {
            return;
        }
        tokio::select! {
            _ = bell.changed() => {}
            _ = leading.changed() => {}
            _ = ending.changed() => {}
            () = tokio::time::sleep_until(until) => return,
        }
    }
}
