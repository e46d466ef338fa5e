//! Recorded decisions for `kubectl gainshare explain POD --dump FILE`, as plain HTTP on the loopback
//! interface of the agent's pod.
//!
//! **Problem.** A user asks why a pod got its share. The answer is the decision itself: the view, the
//! memory before the step and the plan, from which `gainshare replay` makes the same plan again.
//!
//! **How.** The node's thread keeps the last decision of each policy as the core returned it, by `Arc`;
//! nothing is copied for the case that a user asks. A request goes to that thread as a message
//! ([`RecordRequest`]) and is answered between two steps. The JSON is made here, outside that thread.
//!
//! **Properties.** Records contain numbers only, no names and no output of jobs. One request is served at a
//! time. There is no token: the listener is bound to a loopback address (checked at the start), which in a
//! pod is reached by a port-forward only, and the rights of the cluster govern port-forwards.

use crate::Input;
use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use gainshare_core::decider::Decision;
use gainshare_core::model::JobId;
use gainshare_kube_api::decision_record::{JOB_HEADER, RECORD_PATH};
use gainshare_kube_api::names::PodUid;
use serde::Deserialize;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};

/// The node's thread answers between two steps, which take milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A decision, and the number of the job in it that was asked for.
#[derive(Debug, Clone)]
pub(crate) struct JobDecision {
    pub(crate) job: JobId,
    pub(crate) decision: Arc<Decision>,
}

/// Why there is no recorded decision about a pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("no pod with the uid {uid} is shared on this node: it has ended, or it has just started")]
    NotShared { uid: PodUid },
    #[error("the pod {pod} is not resized, so nothing is decided about it: {why}")]
    Blocked { pod: String, why: String },
    #[error("nothing has been decided about the pod {pod} since the node agent started: try again in a few seconds")]
    Undecided { pod: String },
}

/// A user's request, on its way to the node's thread.
pub(crate) struct RecordRequest {
    uid: PodUid,
    reply: oneshot::Sender<Result<JobDecision, RecordError>>,
}

impl RecordRequest {
    /// Answers with what `find` has for the pod's uid.
    pub(crate) fn answer(self, find: impl FnOnce(&PodUid) -> Result<JobDecision, RecordError>) {
        // A user who does not wait any longer needs no answer.
        let _ = self.reply.send(find(&self.uid));
    }
}

struct RecordServer {
    inputs: mpsc::Sender<Input>,
    turn: Semaphore,
}

#[derive(Deserialize)]
struct RecordQuery {
    uid: PodUid,
}

pub(crate) fn router(inputs: mpsc::Sender<Input>) -> Router {
    let served = RecordServer { inputs, turn: Semaphore::new(1) };
    Router::new().route(RECORD_PATH, get(decision)).with_state(Arc::new(served))
}

async fn decision(State(served): State<Arc<RecordServer>>, Query(query): Query<RecordQuery>) -> Response {
    let refuse = |code: StatusCode, why: String| (code, why + "\n").into_response();
    let Ok(_turn) = served.turn.acquire().await else {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "the node agent ends".into());
    };
    let (reply, answer) = oneshot::channel();
    let request = RecordRequest { uid: query.uid, reply };
    if served.inputs.send(Input::Record(request)).is_err() {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "the node agent ends".into());
    }
    let JobDecision { job, decision } = match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
        Ok(Ok(Ok(found))) => found,
        Ok(Ok(Err(error))) => return refuse(StatusCode::NOT_FOUND, error.to_string()),
        Ok(Err(_)) | Err(_) => {
            let why = format!("the node agent did not answer within {} s", ANSWER_TIMEOUT.as_secs());
            return refuse(StatusCode::SERVICE_UNAVAILABLE, why);
        }
    };
    // Decisions of a node agent are always recorded.
    let json = decision.record().ok_or_else(|| "the decision was not recorded".to_owned());
    match json.and_then(|record| serde_json::to_vec(&record).map_err(|error| error.to_string())) {
        Ok(json) => {
            let headers = [(CONTENT_TYPE.as_str(), "application/json".to_owned()), (JOB_HEADER, job.to_string())];
            (headers, json).into_response()
        }
        Err(why) => refuse(StatusCode::INTERNAL_SERVER_ERROR, why),
    }
}
