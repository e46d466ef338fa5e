//! The routes. Each is in [`table`] once, with its handler and its description, so that the OpenAPI
//! document cannot miss one.

use super::context::Api;
use super::logs::LogReader;
use super::openapi::{self, Description};
use crate::driver::{Driver, loop_reports};
use crate::error::Refusal;
use crate::types::*;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Json, Router};
use futures_util::{Stream, StreamExt};
use gainshare_core::model::JobId;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;

/// How long an admission request waits for its turn.
const LONG_POLL: Duration = Duration::from_secs(25);

/// How often a followed log is read.
const FOLLOW_PACE: Duration = Duration::from_millis(100);

type Answer = Result<Response, Refusal>;

/// One route: its description and its handler.
struct Route {
    description: Description,
    handler: MethodRouter<Api>,
}

fn route(
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    response: openapi::Content,
    handler: MethodRouter<Api>,
) -> Route {
    let description = Description { method, path, summary, query: &[], request: None, response, status: 200 };
    Route { description, handler }
}

impl Route {
    /// With a body.
    fn takes(mut self, request: openapi::Schema) -> Route {
        self.description.request = Some(request);
        self
    }

    /// With parameters in its address.
    fn asks(mut self, query: &'static [(&'static str, &'static str)]) -> Route {
        self.description.query = query;
        self
    }

    fn answers(mut self, status: u16) -> Route {
        self.description.status = status;
        self
    }
}

/// Every route there is.
fn table() -> Vec<Route> {
    use openapi::{Content, Schema, json, schema};
    vec![
        route(
            "get",
            "/healthz",
            "Whether every loop of the daemon came round lately",
            json::<Liveness>(),
            get(healthz),
        ),
        route("get", "/v1/health", "How the daemon is", json::<Health>(), get(health)),
        route("get", "/v1/version", "Which version it is", json::<Version>(), get(version)),
        route("get", "/v1/openapi.json", "This description", Content::AnyJson, get(describe)),
        route("get", "/metrics", "For Prometheus", Content::Text, get(metrics)),
        route("post", "/v1/jobs", "Submit jobs, all or none", json::<JobList>(), post(submit))
            .takes(schema::<SubmitRequest>())
            .answers(201),
        route(
            "post",
            "/v1/plan",
            "What would become of these jobs if submitted now",
            json::<PlanAnswers>(),
            post(plan),
        )
        .takes(schema::<PlanRequest>()),
        route("get", "/v1/jobs", "List jobs", json::<JobList>(), get(list))
            .asks(&[("all", "also jobs that have ended")]),
        route("get", "/v1/jobs/{job}", "One job, by id or name", json::<JobInfo>(), get(show)),
        route("delete", "/v1/jobs/{job}", "Forget an ended job", json::<JobInfo>(), delete(forget)),
        route(
            "post",
            "/v1/jobs/{job}/admission",
            "An attached supervisor asks whether it may start; answers within 25 s, with 202 while the job waits",
            json::<Admission>(),
            post(admission),
        ),
        route("post", "/v1/jobs/{job}/started", "A supervisor started the job", json::<JobInfo>(), post(started))
            .takes(schema::<StartReport>()),
        route("post", "/v1/jobs/{job}/exited", "A supervisor saw the job end", json::<JobInfo>(), post(exited))
            .takes(schema::<ExitReport>()),
        route("post", "/v1/jobs/{job}/stop", "SIGTERM, then SIGKILL", json::<JobInfo>(), post(stop))
            .takes(schema::<StopRequest>()),
        route("get", "/v1/jobs/{job}/explain", "Why the job has what it has", json::<Explanation>(), get(explain)),
        route("get", "/v1/jobs/{job}/samples", "What the job reported", json::<SampleList>(), get(samples))
            .asks(&[("since", "seconds after the job's start")]),
        route("get", "/v1/jobs/{job}/logs", "The job's output", Content::Bytes, get(logs))
            .asks(&[("offset", "bytes to skip"), ("follow", "go on until the job ends")]),
        route(
            "post",
            "/v1/jobs/{job}/push",
            "A job reports by itself, in our form or Kubeflow Trainer's",
            Content::AnyJson,
            post(push),
        )
        .takes(Schema::Any),
        route("get", "/v1/events", "What happens, as server-sent events", Content::Events, get(events)),
        route("get", "/v1/plans", "The last decisions, newest first", json::<PlanList>(), get(plans))
            .asks(&[("last", "how many, 20 if not given")]),
        route("get", "/v1/view", "A decision with all it depended on, for replay", Content::AnyJson, get(view)).asks(
            &[
                ("job", "the last decision about this job, by id or name; the last of all if not given"),
                ("gpu", "with `job`: the last decision about the job's share of its GPU, in place of its CPU"),
            ],
        ),
        route("post", "/v1/shutdown", "Put limits back and end", Content::AnyJson, post(shutdown))
            .takes(schema::<ShutdownRequest>()),
    ]
}

pub(super) fn document() -> serde_json::Value {
    openapi::document(table().into_iter().map(|route| route.description))
}

pub(super) fn router(api: Api) -> Router {
    let mut router = Router::new();
    for route in table() {
        router = router.route(route.description.path, route.handler);
    }
    router.fallback(nothing).method_not_allowed_fallback(nothing).with_state(api)
}

async fn nothing() -> Refusal {
    Refusal::new(ErrorCode::NotFound, "there is nothing here: /v1/openapi.json lists what there is")
}

/// An empty body stands for all defaults.
fn body<T: DeserializeOwned + Default>(bytes: &Bytes) -> Result<T, Refusal> {
    if bytes.is_empty() { Ok(T::default()) } else { required(bytes) }
}

fn required<T: DeserializeOwned>(bytes: &Bytes) -> Result<T, Refusal> {
    serde_json::from_slice(bytes).map_err(|e| {
        // A sound JSON text that does not fit is a mistake in the description, not in the request.
        let code = if e.is_data() { ErrorCode::InvalidSpec } else { ErrorCode::BadRequest };
        Refusal::new(code, format!("the body cannot be used: {e}"))
    })
}

/// Asks no loop, so it answers even if one is stuck.
async fn healthz(State(api): State<Api>) -> Response {
    let loops = loop_reports(&api.pulses);
    let alive = !loops.iter().any(|l| l.is_stuck);
    let status = if alive { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(Liveness { alive, loops })).into_response()
}

async fn health(State(api): State<Api>) -> Answer {
    Ok(Json(api.driver.ask(|d| d.health()).await?).into_response())
}

async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").into(), api: "v1".into() })
}

async fn describe() -> Response {
    Json(document()).into_response()
}

async fn metrics(State(api): State<Api>) -> Answer {
    let metrics = api.metrics.clone();
    api.driver.ask(move |d| d.picture().set_gauges(&metrics)).await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(axum::http::header::CONTENT_TYPE, kind)], api.metrics.text()).into_response())
}

async fn submit(State(api): State<Api>, bytes: Bytes) -> Answer {
    let jobs = api.submit(required(&bytes)?).await?;
    Ok((StatusCode::CREATED, Json(JobList { jobs })).into_response())
}

async fn plan(State(api): State<Api>, bytes: Bytes) -> Answer {
    let request: PlanRequest = required(&bytes)?;
    let jobs = api.driver.ask(|d| d.plan_ahead(request)).await??;
    Ok(Json(PlanAnswers { jobs }).into_response())
}

#[derive(Deserialize)]
struct ListQuery {
    #[serde(default)]
    all: bool,
}

async fn list(State(api): State<Api>, Query(query): Query<ListQuery>) -> Answer {
    let jobs = api.driver.ask(move |d| d.fresh_picture(None).list(query.all)).await?;
    Ok(Json(JobList { jobs }).into_response())
}

async fn show(State(api): State<Api>, Path(job): Path<String>) -> Answer {
    Ok(Json(api.about(job, |d, id| d.fresh_picture(Some(id)).show(id)).await?).into_response())
}

async fn forget(State(api): State<Api>, Path(job): Path<String>) -> Answer {
    let gone = |d: &mut Driver, id| {
        let info = d.fresh_picture(Some(id)).show(id)?;
        d.forget(id).map(|()| info)
    };
    Ok(Json(api.about(job, gone).await?).into_response())
}

async fn admission(State(api): State<Api>, Path(job): Path<String>) -> Answer {
    let deadline = tokio::time::Instant::now() + LONG_POLL;
    let mut changes = api.driver.changes();
    loop {
        changes.mark_unchanged();
        let answer = api.about(job.clone(), |d, id| d.admission(id)).await?;
        let waits = matches!(answer, Admission::Waiting { .. });
        let status = if waits { StatusCode::ACCEPTED } else { StatusCode::OK };
        if !waits || tokio::time::timeout_at(deadline, changes.changed()).await.is_err() {
            return Ok((status, Json(answer)).into_response());
        }
    }
}

async fn started(State(api): State<Api>, Path(job): Path<String>, bytes: Bytes) -> Answer {
    let started: StartReport = required(&bytes)?;
    Ok(Json(api.about(job, move |d, id| d.started(id, &started)).await?).into_response())
}

async fn exited(State(api): State<Api>, Path(job): Path<String>, bytes: Bytes) -> Answer {
    let exited: ExitReport = required(&bytes)?;
    Ok(Json(api.exited(job, exited).await?).into_response())
}

async fn stop(State(api): State<Api>, Path(job): Path<String>, bytes: Bytes) -> Answer {
    let request: StopRequest = body(&bytes)?;
    Ok(Json(api.about(job, move |d, id| d.stop(id, request.grace_s)).await?).into_response())
}

async fn explain(State(api): State<Api>, Path(job): Path<String>) -> Answer {
    Ok(Json(api.about(job, |d, id| d.fresh_picture(Some(id)).explain(id)).await?).into_response())
}

#[derive(Deserialize)]
struct SamplesQuery {
    #[serde(rename = "since", default)]
    since_s: f64,
}

async fn samples(State(api): State<Api>, Path(job): Path<String>, Query(query): Query<SamplesQuery>) -> Answer {
    Ok(Json(api.about(job, move |d, id| d.samples(id, query.since_s)).await?).into_response())
}

#[derive(Deserialize)]
struct LogsQuery {
    #[serde(default)]
    offset: u64,
    #[serde(default)]
    follow: bool,
}

async fn logs(State(api): State<Api>, Path(job): Path<String>, Query(query): Query<LogsQuery>) -> Answer {
    let info = api.about(job, |d, id| d.fresh_picture(Some(id)).show(id)).await?;
    let reader = LogReader::open(api.paths.job(info.id), query.offset);
    let follow = query.follow && !info.state.is_final();
    let stream = follow_log(api, info.id, reader, follow);
    let kind = [(axum::http::header::CONTENT_TYPE, "application/octet-stream")];
    Ok((kind, Body::from_stream(stream)).into_response())
}

/// Pieces of the log; with `follow` until the job has ended and nothing is left.
fn follow_log(
    api: Api,
    job: u64,
    reader: LogReader,
    follow: bool,
) -> impl Stream<Item = std::io::Result<Bytes>> + Send {
    futures_util::stream::unfold((api, reader, follow), move |(api, mut reader, mut follow)| async move {
        loop {
            match reader.next() {
                Ok(Some(piece)) => return Some((Ok(piece), (api, reader, follow))),
                Ok(None) if !follow => return None,
                Ok(None) => {}
                Err(e) => return Some((Err(e), (api, reader, false))),
            }
            tokio::time::sleep(FOLLOW_PACE).await;
            // Asked before the last reading of the file: what was written before the end is then certainly seen.
            let live = api.driver.ask(move |d| d.picture().is_live(JobId(job))).await.unwrap_or(false);
            follow = live;
        }
    })
}

async fn push(State(api): State<Api>, Path(job): Path<String>, bytes: Bytes) -> Answer {
    api.push(job, bytes).await?;
    Ok(Json(serde_json::json!({})).into_response())
}

async fn events(State(api): State<Api>) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
    let events = BroadcastStream::new(api.driver.subscribe());
    let over = |item: &Result<Arc<Event>, _>| matches!(item, Ok(event) if **event == Event::ShuttingDown);
    // The last event is passed on, then the stream ends.
    let stream = events.scan(false, move |ended, item| {
        let go_on = !std::mem::replace(ended, over(&item));
        std::future::ready(go_on.then_some(item))
    });
    let stream = stream.map(|item| {
        let missed;
        let event: &Event = match &item {
            Ok(event) => event,
            Err(BroadcastStreamRecvError::Lagged(events)) => {
                missed = Event::Missed { events: *events };
                &missed
            }
        };
        let data = serde_json::to_string(event).unwrap_or_default();
        Ok(sse::Event::default().event(event.name()).data(data))
    });
    Sse::new(stream).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}

#[derive(Deserialize)]
struct PlansQuery {
    #[serde(default = "twenty")]
    last: usize,
}

fn twenty() -> usize {
    20
}

async fn plans(State(api): State<Api>, Query(query): Query<PlansQuery>) -> Answer {
    let plans = api.driver.ask(move |d| d.plans(query.last.min(1000))).await??;
    Ok(Json(PlanList { plans }).into_response())
}

#[derive(Deserialize)]
struct ViewQuery {
    job: Option<String>,
    #[serde(default)]
    gpu: bool,
}

async fn view(State(api): State<Api>, Query(query): Query<ViewQuery>) -> Answer {
    let record = match query.job {
        None => api.driver.ask(|d| d.picture().recorded_decision(None)).await??,
        Some(job) if query.gpu => Arc::new(api.about(job, |d, id| d.picture().recorded_gpu_decision(id)).await?),
        Some(job) => api.about(job, |d, id| d.picture().recorded_decision(Some(id))).await?,
    };
    Ok(match gainshare_record::to_json(&record) {
        Ok(json) => ([(CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    })
}

async fn shutdown(State(api): State<Api>, bytes: Bytes) -> Answer {
    let request: ShutdownRequest = body(&bytes)?;
    api.driver.ask(move |d| d.shut_down(request)).await?;
    Ok(Json(serde_json::json!({})).into_response())
}
