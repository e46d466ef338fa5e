//! The process as a whole, with a stand-in for the API server.

use super::*;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(60);

/// An API server that has one Lease and nothing else. A task that lists nodes panics.
async fn serve(lease: Arc<Mutex<Option<Value>>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    assert_ne!(path, "/api/v1/nodes", "a defect in the task that lists nodes");
    let refuse = |code: StatusCode, reason: &str| {
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": reason, "reason": reason, "code": code.as_u16()});
        (code, Json(status)).into_response()
    };
    if !path.contains("/leases") {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
    }
    if parts.method != Method::GET {
        let body = to_bytes(body, 1 << 20).await.unwrap_or_default();
        *lease.lock() = serde_json::from_slice(&body).ok();
    }
    let known = lease.lock().clone();
    known.map_or_else(|| refuse(StatusCode::NOT_FOUND, "NotFound"), |lease| Json(lease).into_response())
}

fn config() -> Config {
    Config {
        namespace: "system".to_owned(),
        pod_name: None,
        listen: ([127, 0, 0, 1], 0).into(),
        plain_listen: ([127, 0, 0, 1], 0).into(),
        record_listen: None,
        server_names: vec!["operator".to_owned()],
        agent_account: "agent".to_owned(),
        lease: "operator".to_owned(),
        config_map: "operator".to_owned(),
        webhook: None,
        inside_image: None,
        authority_folders: Vec::new(),
        fail_at: crate::FailPoint::default(),
        specon: Default::default(),
        elastic: Default::default(),
        queues: Default::default(),
        tfjobs: false,
        scaler: None,
    }
}

/// A task that panics ends the process with an error that names it, and the Lease is free for a standby.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_panics_ends_the_process() {
    let lease = Arc::new(Mutex::new(None::<Value>));
    let seen = lease.clone();
    let router = Router::new().fallback(move |request: Request| serve(seen.clone(), request));
    let running = run(config(), Client::new(router, "system"), std::future::pending());
    let ended = tokio::time::timeout(LONG, running).await.expect("the process ends");
    match ended {
        Err(OperatorError::TaskEnded(text)) => {
            assert!(text.starts_with("the watch of Node objects panicked"), "{text}");
        }
        other => panic!("a task has ended, and the process said {other:?}"),
    }
    let lease = lease.lock().clone().expect("it has led");
    assert!(lease["spec"]["holderIdentity"].is_null(), "a standby need not wait: {lease}");
}
