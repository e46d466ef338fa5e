//! The operator's HTTP interface: node agents and admission reviews over TLS, health and metrics as plain HTTP
//! on a port of their own.
//!
//! **Properties.** No body is read before the token in the headers is proven. A request without proof is
//! answered and its connection closed; at most [`UNPROVEN_BYTES`] of its body are read, and thrown away.
//! Admission reviews carry no token that the operator could prove, so their bodies are small and few are read
//! at the same time. The plain port has health and metrics, nothing else.

use super::auth::{AuthError, Reviewer};
use super::peers::ConnectionSlot;
use crate::http::inside::Addition;
use crate::http::webhook::{self, ReviewAnswer};
use crate::shares::{Shares, resizes};
use crate::state::agents::ReportEffect;
use crate::state::lead::Leader;
use crate::state::metrics::{Metrics, StateLabels};
use crate::tasks::Health;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use futures_util::StreamExt;
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::wire::{Answer, LONGEST_WAIT_MS, Outcome, OutcomeState, Resize, SYNC_PATH, SyncRequest};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// A node has at most some hundred pods, with about a kilobyte each.
const MOST_SYNC_BYTES: usize = 2 << 20;
/// A pod has seldom more than some tens of kilobytes. A larger one starts as its author wrote it.
const MOST_REVIEW_BYTES: usize = 256 << 10;
/// Bytes of a refused request that are drained, so that the client can read the error.
const UNPROVEN_BYTES: usize = 64 << 10;
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
const UNPROVEN_TIMEOUT: Duration = Duration::from_secs(2);
/// The API server waits for 3 s, as the chart configures it.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(3);
const REVIEW_WAIT: Duration = Duration::from_secs(1);
/// Bodies of node agents that are read and parsed at the same time.
const SYNCS_READ_AT_ONCE: usize = 64;

/// What a leading replica answers node agents with.
pub(crate) struct LeaderContext {
    pub(crate) leader: Arc<Leader>,
    pub(crate) shares: Arc<Shares>,
    pub(crate) reviewer: Reviewer,
}

/// Empty while this replica does not lead.
pub(crate) type LeadingReceiver = watch::Receiver<Option<Arc<LeaderContext>>>;

#[derive(Clone)]
pub(crate) struct ServerState {
    pub(crate) leading: LeadingReceiver,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) health: Arc<Health>,
    /// Turns true when the process is to end.
    pub(crate) ending: watch::Receiver<bool>,
    bodies: Arc<Semaphore>,
    /// The image from which pods get the library inside jobs.
    inside_image: Option<Arc<str>>,
}

impl ServerState {
    pub(crate) fn new(
        leading: LeadingReceiver,
        metrics: Arc<Metrics>,
        health: Arc<Health>,
        ending: watch::Receiver<bool>,
    ) -> ServerState {
        let bodies = Arc::new(Semaphore::new(SYNCS_READ_AT_ONCE));
        ServerState { leading, metrics, health, ending, bodies, inside_image: None }
    }

    /// Pods of namespaces that ask for it get the library inside jobs from this image.
    pub(crate) fn with_inside(self, image: Option<&str>) -> ServerState {
        ServerState { inside_image: image.map(Arc::from), ..self }
    }
}

/// For node agents and the API server.
pub(crate) fn secure(served: ServerState) -> Router {
    Router::new()
        .route(SYNC_PATH, post(sync))
        .route("/mutate", post(mutate))
        .route("/mutate-inside", post(mutate_inside))
        .with_state(served)
}

/// For the kubelet and Prometheus.
pub(crate) fn plain(served: ServerState) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(served)
}

/// Healthy: every task of the process makes progress. The kubelet restarts a process that is not.
async fn healthz(State(served): State<ServerState>) -> Response {
    let stalled = served.health.stalled(Instant::now());
    if stalled.is_empty() {
        return "ok\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("stalled: {}\n", stalled.join(", "))).into_response()
}

/// Ready: leading with the whole cluster in view, or standby. A process that ends, or that still reads the
/// cluster, is not.
async fn readyz(State(served): State<ServerState>) -> Response {
    if *served.ending.borrow() {
        return (StatusCode::SERVICE_UNAVAILABLE, "ending\n").into_response();
    }
    match served.leading.borrow().as_ref() {
        Some(leading) if leading.leader.is_synced() => "leading\n".into_response(),
        Some(_) => (StatusCode::SERVICE_UNAVAILABLE, "reading the cluster's state\n").into_response(),
        None => "standby\n".into_response(),
    }
}

async fn metrics(State(served): State<ServerState>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], served.metrics.text()).into_response()
}

async fn mutate(
    State(served): State<ServerState>,
    Extension(slot): Extension<Arc<ConnectionSlot>>,
    body: Body,
) -> Response {
    admit(&served, &slot, body, webhook::review).await
}

/// Adds the library inside jobs.
async fn mutate_inside(
    State(served): State<ServerState>,
    Extension(slot): Extension<Arc<ConnectionSlot>>,
    body: Body,
) -> Response {
    let leading = served.leading.borrow().clone();
    let add = |namespace: &str, pod: &Pod| {
        let image = served.inside_image.as_deref()?;
        let known = leading.as_ref().map(|leading| {
            leading.leader.read(|world| (world.least_resources(namespace), world.paces_gpu_work(namespace)))
        });
        let (least, paces_gpu_work) = known.unwrap_or_default();
        Addition { image, least, paces_gpu_work }.add(pod)
    };
    admit(&served, &slot, body, |body| webhook::review_with(body, add)).await
}

/// Answers an admission review.
async fn admit(
    served: &ServerState,
    slot: &ConnectionSlot,
    body: Body,
    review: impl FnOnce(&[u8]) -> Result<ReviewAnswer, String>,
) -> Response {
    let (own, all) = slot.admissions();
    let permits = async {
        let own = match own {
            Some(own) => Some(own.acquire_owned().await.ok()?),
            None => None,
        };
        Some((own, all.acquire_owned().await.ok()?))
    };
    let Ok(Some(_permits)) = tokio::time::timeout(REVIEW_WAIT, permits).await else {
        return refuse(StatusCode::TOO_MANY_REQUESTS, "too many admission reviews at once");
    };
    let body = match read(body, MOST_REVIEW_BYTES, REVIEW_TIMEOUT).await {
        Ok(body) => body,
        Err((code, why)) => return refuse(code, why),
    };
    match review(&body) {
        Ok(answer) => {
            if answer.changed {
                served.metrics.admissions.inc();
            }
            Json(answer.review).into_response()
        }
        Err(error) => refuse(StatusCode::BAD_REQUEST, &error),
    }
}

/// The connection is closed with it: what was not read of the request is not waited for.
fn refuse(code: StatusCode, why: &str) -> Response {
    (code, [(header::CONNECTION, "close")], Json(json!({"error": why}))).into_response()
}

async fn read(body: Body, most: usize, longest: Duration) -> Result<Bytes, (StatusCode, &'static str)> {
    match tokio::time::timeout(longest, to_bytes(body, most)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(_)) => Err((StatusCode::PAYLOAD_TOO_LARGE, "the body is too large, or broke off")),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the body did not come in time")),
    }
}

/// Reads a small body to its end and keeps nothing of it.
async fn discard(body: Body) {
    let mut frames = body.into_data_stream();
    let all = async {
        let mut read = 0;
        while let Some(Ok(bytes)) = frames.next().await {
            read += bytes.len();
            if read > UNPROVEN_BYTES {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(UNPROVEN_TIMEOUT, all).await;
}

async fn sync(
    State(served): State<ServerState>,
    Extension(slot): Extension<Arc<ConnectionSlot>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let (answer, state) = match accept(&served, &slot, &headers, body).await {
        Ok((leading, sync)) => (Json(answer(&served, &leading, &sync).await).into_response(), "answered"),
        Err((answer, state)) => (answer, state),
    };
    served.metrics.syncs.get_or_create(&StateLabels { state }).inc();
    answer
}

/// The request of an agent that has proven its node; or the answer to any other, and what it is counted as.
async fn accept(
    served: &ServerState,
    slot: &ConnectionSlot,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Arc<LeaderContext>, SyncRequest), (Response, &'static str)> {
    let leading = served.leading.borrow().clone();
    let Some(leading) = leading.filter(|leading| leading.leader.is_synced()) else {
        discard(body).await;
        let why = "this replica does not lead, or has just begun to: try again";
        return Err((refuse(StatusCode::SERVICE_UNAVAILABLE, why), "not-leading"));
    };
    let token = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let proved = match leading.reviewer.node(token, slot).await {
        Ok(node) => node,
        Err(error) => {
            discard(body).await;
            return Err(refuse_token(&error));
        }
    };
    slot.prove();
    let malformed = |(code, why): (StatusCode, &str)| (refuse(code, why), "malformed");
    let Ok(_turn) = served.bodies.acquire().await else {
        return Err(malformed((StatusCode::SERVICE_UNAVAILABLE, "the process ends")));
    };
    let body = read(body, MOST_SYNC_BYTES, BODY_TIMEOUT).await.map_err(malformed)?;
    let sync: SyncRequest = serde_json::from_slice(&body).map_err(|error| {
        malformed((StatusCode::BAD_REQUEST, &format!("this is not a request of a node agent: {error}")))
    })?;
    if proved != sync.node {
        return Err(refuse_token(&AuthError::OtherNode { proved, claimed: sync.node }));
    }
    Ok((leading, sync))
}

fn refuse_token(error: &AuthError) -> (Response, &'static str) {
    let code = match error {
        AuthError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        AuthError::TooMany => StatusCode::TOO_MANY_REQUESTS,
        AuthError::Missing | AuthError::Rejected(_) => StatusCode::UNAUTHORIZED,
        AuthError::WrongAccount { .. } | AuthError::NoNode | AuthError::OtherNode { .. } => StatusCode::FORBIDDEN,
    };
    tracing::debug!(%error, "node agent refused");
    (refuse(code, &error.to_string()), "refused")
}

async fn answer(served: &ServerState, leading: &LeaderContext, sync: &SyncRequest) -> Answer {
    let leader = &leading.leader;
    let mut bell = leader.bell(&sync.node);
    let effect = take_in(leader, sync);
    let outcomes = if effect.stale {
        Vec::new()
    } else {
        // The older request of this agent need not wait any longer.
        leader.ring(&sync.node);
        bell.borrow_and_update();
        let outcomes = resize(&leading.shares, sync).await;
        // Notes come after resizes: a kubelet that has just read a changed note acts on a resize a second later.
        mark_changed(leader, effect.changed);
        outcomes
    };
    if !effect.stale && sync.resizes.is_empty() {
        wait_for_news(served, leader, sync, &mut bell).await;
    }
    let want_jobs = leader.agents.lock().want_jobs(&sync.node);
    leader.read(|world| {
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

/// Takes in the agent's report about the pods of its own node.
fn take_in(leader: &Leader, sync: &SyncRequest) -> ReportEffect {
    let effect = leader.read(|world| {
        let is_here = |uid: &PodUid| world.node_of(uid) == Some(&sync.node);
        leader.agents.lock().receive(sync, Instant::now(), is_here)
    });
    if !sync.finished.is_empty() && !effect.stale {
        leader.record_finished(&sync.node, &sync.finished);
    }
    if effect.foreign > 0 {
        leader.metrics.foreign_reports.inc_by(effect.foreign as u64);
        // A pod that has just gone is no longer on the node either, so this is not always a fault.
        tracing::debug!(
            node = sync.node.as_str(),
            pods = effect.foreign,
            "reports about pods that are not on the agent's node: ignored"
        );
    }
    effect
}

/// Carries out the resizes of this node's pods; those of other nodes' pods are refused, and leave no trace. One
/// outcome for each resize, in their order.
async fn resize(shares: &Shares, sync: &SyncRequest) -> Vec<Outcome> {
    let leader = &shares.leader;
    let is_own: Vec<bool> =
        leader.read(|world| sync.resizes.iter().map(|resize| world.node_of(&resize.uid) == Some(&sync.node)).collect());
    let own: Vec<_> = sync.resizes.iter().zip(&is_own).filter(|(_, is_own)| **is_own).map(|(r, _)| r.clone()).collect();
    let foreign = sync.resizes.len() - own.len();
    if foreign > 0 {
        leader.metrics.foreign_reports.inc_by(foreign as u64);
        tracing::debug!(
            node = sync.node.as_str(),
            foreign,
            "resizes of pods that are not on the agent's node: refused"
        );
    }
    let mut done = resizes::carry_out(shares, &sync.node, sync.epoch, &own).await.into_iter();
    let refused = |resize: &Resize| Outcome {
        uid: resize.uid.clone(),
        generation: resize.generation,
        state: OutcomeState::Refused { why: format!("there is no pod {} on node {}", resize.uid, sync.node) },
    };
    let outcomes = sync.resizes.iter().zip(is_own);
    outcomes.filter_map(|(resize, is_own)| if is_own { done.next() } else { Some(refused(resize)) }).collect()
}

/// Jobs whose category, share or reason changed: their notes and their policies' counts may have to be written.
fn mark_changed(leader: &Leader, uids: Vec<PodUid>) {
    if uids.is_empty() {
        return;
    }
    let policies = leader.read(|world| {
        let keys =
            uids.iter().filter_map(|uid| world.shared(uid)).map(|pod| (pod.namespace.clone(), pod.policy.clone()));
        keys.collect::<Vec<_>>()
    });
    leader.mark_policies(policies);
    leader.mark_progressed(uids.iter().cloned());
    leader.mark_pods(uids);
}

async fn wait_for_news(served: &ServerState, leader: &Leader, sync: &SyncRequest, bell: &mut watch::Receiver<u64>) {
    let wait = Duration::from_millis(sync.wait_ms.min(LONGEST_WAIT_MS).into());
    let until = tokio::time::Instant::now() + wait;
    let (mut leading, mut ending) = (served.leading.clone(), served.ending.clone());
    loop {
        let is_new = leader.read(|world| world.revision(&sync.node)) != sync.seen;
        let newest = {
            let agents = leader.agents.lock();
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

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
#[cfg(test)]
#[path = "wire_faults.rs"]
mod wire_faults;
