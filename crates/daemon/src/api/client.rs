//! A small client for the daemon's Unix socket.
//!
//! One connection for each request: the daemon is on the same machine, and a connection costs less
//! than keeping one alive through its restarts. Every call has a deadline. An error carries the
//! daemon's own one-line message.

use crate::instance::{self, Holder};
use crate::paths::Paths;
use crate::spec::JobSpec;
use crate::types::*;
use bytes::Bytes;
use gainshare_core::replay::RecordedDecision;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;

/// Longer than the daemon needs for anything but a long poll.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The daemon answers an admission request within 25 s, ready or not.
const LONG_POLL_TIMEOUT: Duration = Duration::from_secs(40);

/// A line of server-sent events longer than this is not ours.
const MAX_EVENT_BYTES: usize = 8 << 20;

/// What can go wrong between a client and the daemon.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("no daemon answers at {socket}: start one with `gainshare up`")]
    NoDaemon { socket: String },
    #[error("{message}")]
    Refused { status: u16, code: Option<ErrorCode>, message: String },
    #[error("the daemon at {socket} did not answer within {seconds} s")]
    Timeout { socket: String, seconds: u64 },
    #[error("the connection to the daemon broke: {what}")]
    Broken { what: String },
    #[error(
        "the daemon answered something unexpected ({what}): is it of another version? Try `gainshare down`, then again"
    )]
    Unexpected { what: String },
}

impl ClientError {
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            ClientError::Refused { code, .. } => *code,
            _ => None,
        }
    }

    /// Whether trying again, perhaps after starting a daemon, may help.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, ClientError::NoDaemon { .. } | ClientError::Broken { .. } | ClientError::Timeout { .. })
    }
}

type Result<T> = std::result::Result<T, ClientError>;

/// Sends requests to one daemon. Jobs are named by id or name.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    /// The directories whose daemon is asked if the socket has none.
    paths: Option<Paths>,
}

impl Client {
    /// Asks the daemon of this socket and no other.
    pub fn new(socket: impl Into<PathBuf>) -> Client {
        Client { socket: socket.into(), paths: None }
    }

    /// Asks the daemon that `GAINSHARE_SOCKET` names, else the one of the runtime directory, else
    /// the one that holds the state directory with another runtime directory.
    pub fn of(paths: &Paths) -> Client {
        match std::env::var_os("GAINSHARE_SOCKET").filter(|v| !v.is_empty()) {
            Some(socket) => Client::new(socket),
            None => Client { socket: paths.socket(), paths: Some(paths.clone()) },
        }
    }

    async fn connect(&self) -> Result<UnixStream> {
        let missing = |_| ClientError::NoDaemon { socket: self.socket.display().to_string() };
        let error = match UnixStream::connect(&self.socket).await {
            Ok(stream) => return Ok(stream),
            Err(e) => missing(e),
        };
        match self.paths.as_ref().map(instance::holder) {
            Some(Holder::Daemon(Some(address))) if address.socket != self.socket => {
                UnixStream::connect(&address.socket).await.map_err(missing)
            }
            _ => Err(error),
        }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub async fn health(&self) -> Result<Health> {
        self.get("/v1/health").await
    }

    pub async fn version(&self) -> Result<Version> {
        self.get("/v1/version").await
    }

    /// Submits jobs whose supervisors the daemon starts. All or none.
    pub async fn submit(&self, jobs: Vec<JobSpec>, base_env: BTreeMap<String, String>) -> Result<Vec<JobInfo>> {
        let body = SubmitRequest { jobs, base_env, ..SubmitRequest::default() };
        Ok(self.post::<JobList>("/v1/jobs", &body, CALL_TIMEOUT).await?.jobs)
    }

    /// What would become of these jobs if they were submitted now.
    pub async fn plan(&self, jobs: Vec<JobSpec>) -> Result<Vec<PlanAnswer>> {
        Ok(self.post::<PlanAnswers>("/v1/plan", &PlanRequest { jobs }, CALL_TIMEOUT).await?.jobs)
    }

    /// Submits one job that the caller will supervise itself; ask for [`Client::admission`] next.
    /// `env_names` are the variables that its environment has.
    pub async fn submit_attached(&self, job: JobSpec, env_names: Vec<String>) -> Result<JobInfo> {
        let body = SubmitRequest { jobs: vec![job], attached: true, env_names, ..SubmitRequest::default() };
        let list: JobList = self.post("/v1/jobs", &body, CALL_TIMEOUT).await?;
        list.jobs.into_iter().next().ok_or_else(|| ClientError::Unexpected { what: "no job in the answer".into() })
    }

    /// Live jobs, or all that are remembered.
    pub async fn jobs(&self, all: bool) -> Result<Vec<JobInfo>> {
        Ok(self.get::<JobList>(&format!("/v1/jobs?all={all}")).await?.jobs)
    }

    pub async fn job(&self, job: &str) -> Result<JobInfo> {
        self.get(&format!("/v1/jobs/{}", encode(job))).await
    }

    pub async fn admission(&self, job: u64) -> Result<Admission> {
        self.post(&format!("/v1/jobs/{job}/admission"), &(), LONG_POLL_TIMEOUT).await
    }

    pub async fn started(&self, job: u64, started: &StartReport) -> Result<JobInfo> {
        self.post(&format!("/v1/jobs/{job}/started"), started, CALL_TIMEOUT).await
    }

    pub async fn exited(&self, job: u64, exited: &ExitReport) -> Result<JobInfo> {
        self.post(&format!("/v1/jobs/{job}/exited"), exited, CALL_TIMEOUT).await
    }

    /// Asks a job to end; returns at once.
    pub async fn stop(&self, job: &str, grace_s: f64) -> Result<JobInfo> {
        self.post(&format!("/v1/jobs/{}/stop", encode(job)), &StopRequest { grace_s }, CALL_TIMEOUT).await
    }

    /// Forgets an ended job and its log.
    pub async fn forget(&self, job: &str) -> Result<()> {
        let response = self.send(Method::DELETE, &format!("/v1/jobs/{}", encode(job)), None, CALL_TIMEOUT).await?;
        read_all(response).await.map(drop)
    }

    pub async fn explain(&self, job: &str) -> Result<Explanation> {
        self.get(&format!("/v1/jobs/{}/explain", encode(job))).await
    }

    /// Samples later than `since_s` seconds after the job's start.
    pub async fn samples(&self, job: &str, since_s: f64) -> Result<SampleList> {
        self.get(&format!("/v1/jobs/{}/samples?since={since_s}", encode(job))).await
    }

    pub async fn plans(&self, last: usize) -> Result<Vec<PlanInfo>> {
        Ok(self.get::<PlanList>(&format!("/v1/plans?last={last}")).await?.plans)
    }

    /// The last decision about a job, or the last of all, with all that is needed to make its plan again.
    pub async fn view(&self, job: Option<&str>) -> Result<RecordedDecision> {
        match job {
            Some(job) => self.record(&format!("/v1/view?job={}", encode(job))).await,
            None => self.record("/v1/view").await,
        }
    }

    /// The last decision about a job's share of its GPU.
    pub async fn gpu_view(&self, job: &str) -> Result<RecordedDecision> {
        self.record(&format!("/v1/view?job={}&gpu=true", encode(job))).await
    }

    async fn record(&self, path: &str) -> Result<RecordedDecision> {
        let body = read_all(self.send(Method::GET, path, None, CALL_TIMEOUT).await?).await?;
        let unexpected = |what: String| ClientError::Unexpected { what };
        let text = std::str::from_utf8(&body).map_err(|e| unexpected(e.to_string()))?;
        gainshare_record::from_json(text).map_err(|e| unexpected(e.to_string()))
    }

    pub async fn shutdown(&self, stop_jobs: bool) -> Result<()> {
        self.post::<serde_json::Value>("/v1/shutdown", &ShutdownRequest { stop_jobs }, CALL_TIMEOUT).await.map(drop)
    }

    /// The raw bytes of a job's output from `offset`; with `follow` the stream ends when the job does.
    pub async fn logs(&self, job: &str, offset: u64, follow: bool) -> Result<ByteStream> {
        let path = format!("/v1/jobs/{}/logs?offset={offset}&follow={follow}", encode(job));
        self.stream(&path).await
    }

    /// What happens from now on.
    pub async fn events(&self) -> Result<EventStream> {
        Ok(EventStream { bytes: self.stream("/v1/events").await?, pending: Vec::new() })
    }

    async fn stream(&self, path: &str) -> Result<ByteStream> {
        let response = self.send(Method::GET, path, None, CALL_TIMEOUT).await?;
        if !response.status().is_success() {
            return Err(refusal(response).await);
        }
        Ok(ByteStream { body: response.into_body() })
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        decode(read_all(self.send(Method::GET, path, None, CALL_TIMEOUT).await?).await?)
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize, timeout: Duration) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(|e| ClientError::Unexpected { what: e.to_string() })?;
        decode(read_all(self.send(Method::POST, path, Some(body), timeout).await?).await?)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        timeout: Duration,
    ) -> Result<Response<hyper::body::Incoming>> {
        let exchange = async {
            let stream = self.connect().await?;
            let broken = |e: hyper::Error| ClientError::Broken { what: e.to_string() };
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
            tokio::spawn(connection);
            let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
            if body.is_some() {
                request = request.header("content-type", "application/json");
            }
            let request = request
                .body(Full::new(Bytes::from(body.unwrap_or_default())))
                .map_err(|e| ClientError::Unexpected { what: e.to_string() })?;
            sender.send_request(request).await.map_err(broken)
        };
        tokio::time::timeout(timeout, exchange).await.map_err(|_| ClientError::Timeout {
            socket: self.socket.display().to_string(),
            seconds: timeout.as_secs(),
        })?
    }
}

/// Bytes as they come.
#[derive(Debug)]
pub struct ByteStream {
    body: hyper::body::Incoming,
}

impl ByteStream {
    /// The next piece; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(e)) => return Err(ClientError::Broken { what: e.to_string() }),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }
}

/// Server-sent events, decoded.
#[derive(Debug)]
pub struct EventStream {
    bytes: ByteStream,
    pending: Vec<u8>,
}

impl EventStream {
    /// The next event; `None` when the daemon ends the stream. Events of a newer daemon that we do
    /// not know are skipped.
    pub async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            while let Some(end) = self.pending.windows(2).position(|w| w == b"\n\n") {
                let block: Vec<u8> = self.pending.drain(..end + 2).collect();
                let text = String::from_utf8_lossy(&block);
                let data: String = text.lines().filter_map(|l| l.strip_prefix("data:")).map(str::trim_start).collect();
                if let Ok(event) = serde_json::from_str(&data) {
                    return Ok(Some(event));
                }
            }
            if self.pending.len() > MAX_EVENT_BYTES {
                return Err(ClientError::Unexpected { what: "an event without an end".into() });
            }
            match self.bytes.next().await? {
                Some(bytes) => self.pending.extend_from_slice(&bytes),
                None => return Ok(None),
            }
        }
    }
}

async fn read_all(response: Response<hyper::body::Incoming>) -> Result<Bytes> {
    if !response.status().is_success() {
        return Err(refusal(response).await);
    }
    let body = response.into_body().collect().await.map_err(|e| ClientError::Broken { what: e.to_string() })?;
    Ok(body.to_bytes())
}

async fn refusal(response: Response<hyper::body::Incoming>) -> ClientError {
    let status: StatusCode = response.status();
    let body = response.into_body().collect().await.map(|b| b.to_bytes()).unwrap_or_default();
    match serde_json::from_slice::<ErrorBody>(&body) {
        Ok(e) => ClientError::Refused { status: status.as_u16(), code: Some(e.code), message: e.error },
        Err(_) => {
            let text = String::from_utf8_lossy(&body);
            let line = text.lines().next().unwrap_or("");
            ClientError::Refused {
                status: status.as_u16(),
                code: None,
                message: format!("the daemon said {status} {line}"),
            }
        }
    }
}

fn decode<T: DeserializeOwned>(body: Bytes) -> Result<T> {
    serde_json::from_slice(&body).map_err(|e| ClientError::Unexpected { what: e.to_string() })
}

/// A name as one segment of a path.
fn encode(name: &str) -> String {
    // Everything but the characters that RFC 3986 calls unreserved.
    const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    utf8_percent_encode(name, SEGMENT).to_string()
}
