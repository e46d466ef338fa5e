//! Recorded decisions about where jobs run and about the sizes of their tasks, as plain HTTP on the loopback
//! interface of the operator's pod.
//!
//! **How.** `GET /decision?uid=UID` hands the request to the placement pass ([`RecordRequests`]) and writes
//! the decision as JSON. Only the leader decides, so a standby refuses.
//!
//! **Properties.** Records contain numbers only. One request is served at a time, because the record of a
//! large cluster takes some hundred megabytes while it is written. There is no token: the listener is bound
//! to a loopback address (checked at the start), which in a pod is reached by a port-forward only, and the
//! rights of the cluster govern port-forwards.

use super::serve::LeadingReceiver;
use crate::placement::record::{JobDecision, RecordRequests};
use axum::Router;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use gainshare_kube_api::decision_record::{JOB_HEADER, RECORD_PATH};
use gainshare_kube_api::names::JobUid;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// SpeCon decides every 30 s by default, and a large cluster records only the next decision.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

struct RecordServer {
    leading: LeadingReceiver,
    requests: Arc<RecordRequests>,
    turn: Semaphore,
}

#[derive(Deserialize)]
struct RecordQuery {
    uid: JobUid,
}

pub(crate) fn router(leading: LeadingReceiver, requests: Arc<RecordRequests>) -> Router {
    let served = RecordServer { leading, requests, turn: Semaphore::new(1) };
    Router::new().route(RECORD_PATH, get(decision)).with_state(Arc::new(served))
}

fn refuse(code: StatusCode, why: &str) -> Response {
    (code, format!("{why}\n")).into_response()
}

async fn decision(State(served): State<Arc<RecordServer>>, Query(query): Query<RecordQuery>) -> Response {
    let Ok(_turn) = served.turn.acquire().await else {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "the operator ends");
    };
    if served.leading.borrow().is_none() {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "this replica of the operator does not lead: try again");
    }
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, served.requests.ask(query.uid)).await;
    let JobDecision { job, decision } = match answer {
        Ok(Ok(Ok(found))) => found,
        Ok(Ok(Err(error))) => return refuse(StatusCode::NOT_FOUND, &error.to_string()),
        Ok(Err(_)) | Err(_) => {
            let why = format!("nothing was decided within {} s: try again", ANSWER_TIMEOUT.as_secs());
            return refuse(StatusCode::SERVICE_UNAVAILABLE, &why);
        }
    };
    // The record of a large cluster takes a second to write: agents are served meanwhile.
    let write = move || decision.record().map(|record| gainshare_record::to_json(&record));
    match tokio::task::spawn_blocking(write).await {
        Ok(Some(Ok(json))) => {
            let headers =
                [(header::CONTENT_TYPE.as_str(), "application/json".to_owned()), (JOB_HEADER, job.to_string())];
            (headers, json).into_response()
        }
        Ok(Some(Err(error))) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        Ok(None) => refuse(StatusCode::INTERNAL_SERVER_ERROR, "the decision was not recorded"),
        Err(error) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}
