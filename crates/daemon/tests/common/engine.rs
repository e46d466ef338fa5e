//! A stand-in for a Docker engine: it answers what the daemon asks about containers, remembers
//! them, reports their starts and ends, and can be made to hang. A container that is asked to stop ends at once.
#![allow(unreachable_pub, reason = "a module of tests exports nothing")]

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Context;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

#[derive(Default)]
pub struct EngineState {
    /// Name, id and labels of each container that was made.
    pub containers: Mutex<Vec<(String, String, Value)>>,
    /// The containers that were stopped, with their exit codes.
    ended: Mutex<BTreeMap<String, i32>>,
    pub starts: AtomicUsize,
    /// All requests wait for the end of this.
    hangs: watch::Sender<bool>,
    /// Requests for new containers wait.
    pub holds_creates: AtomicBool,
    pub requests: AtomicUsize,
    /// Method and path of every request that changes a container that exists.
    pub changes: Mutex<Vec<String>>,
    /// Clients that follow the events.
    followers: Mutex<Vec<mpsc::UnboundedSender<Bytes>>>,
    /// Clients that follow the output of a container.
    readers: Mutex<Vec<(String, mpsc::UnboundedSender<Bytes>)>>,
}

impl EngineState {
    /// Reports to all followers that something happened to a container. Its labels are among the attributes.
    fn report(&self, action: &str, id: &str, labels: &Value, exit_code: i32) {
        let mut attributes = labels.as_object().cloned().unwrap_or_default();
        attributes.insert("exitCode".into(), exit_code.to_string().into());
        // Later than any start, because the engine's clock stands still.
        let event = json!({
            "Type": "container", "Action": action, "Actor": {"ID": id, "Attributes": attributes},
            "time": ENGINE_TIME_S + 1, "timeNano": (ENGINE_TIME_S + 1) * 1_000_000_000,
        });
        let line = Bytes::from(format!("{event}\n"));
        self.followers.lock().unwrap().retain(|follower| follower.send(line.clone()).is_ok());
    }

    /// Reports that a container began.
    fn report_start(&self, id: &str) {
        if let Some((_, id, labels)) = self.containers.lock().unwrap().iter().find(|(_, other, _)| other == id) {
            self.report("start", id, labels, 0);
        }
    }

    /// Makes a container that runs, in place of the one of the same name; its id.
    pub fn replace(&self, name: &str, labels: Value) -> String {
        let mut containers = self.containers.lock().unwrap();
        containers.retain(|(other, _, _)| other != name);
        let id = format!("{:064x}", 0xf00d + containers.len());
        containers.push((name.to_owned(), id.clone(), labels));
        id
    }

    /// From now on requests wait, or go on.
    pub fn set_hangs(&self, hangs: bool) {
        self.hangs.send_replace(hangs);
    }

    /// Ends a container as a signal does. All of its output was sent.
    fn stop(&self, id: &str) {
        self.ended.lock().unwrap().insert(id.to_owned(), SIGTERM_CODE);
        self.readers.lock().unwrap().retain(|(other, _)| other != id);
        if let Some((_, id, labels)) = self.containers.lock().unwrap().iter().find(|(_, other, _)| other == id) {
            self.report("die", id, labels, SIGTERM_CODE);
        }
    }

    /// Ends all containers at the same moment. Their output stays open, as if the engine had more to send.
    pub fn end_all(&self, exit_code: i32) {
        for (_, id, labels) in self.containers.lock().unwrap().iter() {
            self.report("die", id, labels, exit_code);
        }
    }
}

/// What the engine's clock shows all the time: 2026-01-01T00:00:00Z.
const ENGINE_TIME_S: u64 = 1_767_225_600;

/// The exit code of a program that SIGTERM ended.
const SIGTERM_CODE: i32 = 128 + 15;

pub struct Engine {
    pub socket: PathBuf,
    pub state: Arc<EngineState>,
    _dir: tempfile::TempDir,
    _runtime: tokio::runtime::Runtime,
}

impl Engine {
    pub fn start() -> Engine {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("docker.sock");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let state = Arc::new(EngineState::default());
        let router = Router::new().fallback(answer).with_state(state.clone());
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::bind(&socket).unwrap()
        };
        runtime.spawn(async move { axum::serve(listener, router).await });
        Engine { socket, state, _dir: dir, _runtime: runtime }
    }
}

async fn answer(State(state): State<Arc<EngineState>>, method: Method, uri: Uri, body: Bytes) -> Response {
    state.requests.fetch_add(1, Ordering::Relaxed);
    let _ = state.hangs.subscribe().wait_for(|hangs| !hangs).await;
    // Every path but that of the version has a version of the API before it.
    let path = uri.path().trim_start_matches('/');
    let path = if path.starts_with("v1.") { path.split_once('/').map_or("", |(_, rest)| rest) } else { path };
    let parts: Vec<&str> = path.split('/').collect();
    if method != Method::GET && !path.ends_with("containers/create") {
        state.changes.lock().unwrap().push(format!("{method} {path}"));
    }
    match (method.as_str(), parts.as_slice()) {
        ("GET", ["version"]) => json(&json!({"ApiVersion": "1.43", "Version": "24.0"})),
        ("GET", ["info"]) => json(&json!({
            "NCPU": 4, "MemTotal": 8_000_000_000u64, "CgroupVersion": "2", "SystemTime": "2026-01-01T00:00:00Z"
        })),
        ("GET", ["containers", "json"]) => {
            let containers = state.containers.lock().unwrap();
            let ended = state.ended.lock().unwrap();
            let running = containers.iter().filter(|(_, id, _)| !ended.contains_key(id));
            let listed = running.map(|(_, id, labels)| json!({"Id": id, "Labels": labels}));
            json(&Value::Array(listed.collect()))
        }
        ("GET", ["events"]) => follow(&state),
        ("GET", ["containers", id, "logs"]) => follow_output(&state, id),
        ("POST", ["containers", "create"]) => {
            while state.holds_creates.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            create(&state, uri.query().unwrap_or(""), &body)
        }
        ("POST", ["containers", id, "start"]) => {
            state.starts.fetch_add(1, Ordering::Relaxed);
            state.report_start(id);
            StatusCode::NO_CONTENT.into_response()
        }
        ("GET", ["containers", name, "json"]) => inspect(&state, name),
        ("POST", ["containers", id, "stop"]) => {
            state.stop(id);
            StatusCode::NO_CONTENT.into_response()
        }
        ("POST", ["containers", _, "update"]) => json(&json!({"Warnings": []})),
        ("POST" | "DELETE", ["containers", ..]) => StatusCode::NO_CONTENT.into_response(),
        _ => error(StatusCode::NOT_FOUND, "no such thing"),
    }
}

/// The stream of events, from now on.
fn follow(state: &EngineState) -> Response {
    let (sender, events) = mpsc::unbounded_channel();
    state.followers.lock().unwrap().push(sender);
    stream(events)
}

/// The output of a container, which prints nothing, until it is stopped.
fn follow_output(state: &EngineState, id: &str) -> Response {
    let (sender, output) = mpsc::unbounded_channel();
    let ended = state.ended.lock().unwrap();
    if !ended.contains_key(id) {
        state.readers.lock().unwrap().push((id.to_owned(), sender));
    }
    stream(output)
}

/// What comes through the channel, until its sender is dropped.
fn stream(mut parts: mpsc::UnboundedReceiver<Bytes>) -> Response {
    let next = move |context: &mut Context<'_>| parts.poll_recv(context).map(|part| part.map(Ok::<_, Infallible>));
    Body::from_stream(futures_util::stream::poll_fn(next)).into_response()
}

fn create(state: &EngineState, query: &str, body: &[u8]) -> Response {
    let name = query.split('&').find_map(|pair| pair.strip_prefix("name=")).unwrap_or("").to_owned();
    let mut containers = state.containers.lock().unwrap();
    if containers.iter().any(|(other, _, _)| *other == name) {
        return error(StatusCode::CONFLICT, "the name is in use");
    }
    let id = format!("{:064x}", containers.len() + 1);
    let body: Value = serde_json::from_slice(body).unwrap();
    containers.push((name, id.clone(), body["Labels"].clone()));
    (StatusCode::CREATED, axum::Json(json!({"Id": id, "Warnings": []}))).into_response()
}

fn inspect(state: &EngineState, name: &str) -> Response {
    let containers = state.containers.lock().unwrap();
    let ended = state.ended.lock().unwrap();
    let status = |id: &str| match ended.get(id) {
        Some(exit_code) => json!({
            "Status": "exited", "Running": false, "Restarting": false, "StartedAt": "2026-01-01T00:00:00Z",
            "FinishedAt": "2026-01-01T00:00:01Z", "ExitCode": exit_code,
        }),
        None => json!({
            "Status": "running", "Running": true, "Restarting": false, "StartedAt": "2026-01-01T00:00:00Z",
        }),
    };
    match containers.iter().find(|(other, id, _)| other == name || id == name) {
        Some((name, id, labels)) => json(&json!({
            "Id": id,
            "Name": format!("/{name}"),
            "Config": {"Labels": labels, "Image": "image:1"},
            "State": status(id),
            "HostConfig": {"CpuShares": 0, "NetworkMode": "default"},
        })),
        None => error(StatusCode::NOT_FOUND, "no such container"),
    }
}

fn json(value: &Value) -> Response {
    axum::Json(value).into_response()
}

fn error(status: StatusCode, message: &str) -> Response {
    (status, axum::Json(json!({"message": message}))).into_response()
}
