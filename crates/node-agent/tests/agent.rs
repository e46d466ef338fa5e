//! The whole node agent, against an operator of the test's own over real TLS: logs and control groups are
//! folders, time is real.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use axum_server::tls_rustls::RustlsConfig;
use gainshare_kube_api::decision_record::{JOB_HEADER, RECORD_PATH};
use gainshare_kube_api::fixtures::pod_on_node;
use gainshare_kube_api::resize::{Amounts, Resources};
use gainshare_kube_api::wire::{Answer, Outcome, OutcomeState, PodOnNode, SYNC_PATH, SyncRequest};
use gainshare_node_agent::{AgentConfig, AgentError, run};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// An operator for one node and its pods.
#[derive(Default)]
struct FakeOperator {
    requests: Vec<SyncRequest>,
    token: String,
    revision: u64,
    pods: Vec<PodOnNode>,
    refused: u32,
}

type SharedOperator = Arc<Mutex<FakeOperator>>;

async fn sync(
    State(operator): State<SharedOperator>,
    headers: HeaderMap,
    Json(sync): Json<SyncRequest>,
) -> Result<Json<Answer>, StatusCode> {
    let (answer, nothing_new) = {
        let mut m = operator.lock().unwrap();
        let token = headers.get("authorization").and_then(|v| v.to_str().ok()).unwrap_or_default();
        if token != format!("Bearer {}", m.token) {
            m.refused += 1;
            return Err(StatusCode::UNAUTHORIZED);
        }
        let mut outcomes = Vec::new();
        for resize in &sync.resizes {
            let pod = m.pods.iter_mut().find(|p| p.uid == resize.uid).unwrap();
            pod.now = resize.to.over(pod.now);
            let state = OutcomeState::Done;
            outcomes.push(Outcome { uid: resize.uid.clone(), generation: resize.generation, state });
        }
        m.revision += u64::from(!outcomes.is_empty());
        let pods = (sync.seen != m.revision).then(|| m.pods.clone());
        let nothing_new = outcomes.is_empty() && pods.is_none();
        let (epoch, seq) = (sync.epoch, sync.seq);
        m.requests.push(sync);
        (Answer { epoch, seq, revision: m.revision, pods, outcomes, want_jobs: false }, nothing_new)
    };
    if nothing_new {
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    Ok(Json(answer))
}

/// Serves with a certificate of its own; returns the address and what stops it.
async fn serve(
    operator: SharedOperator,
    ca_file: &Path,
    address: SocketAddr,
) -> (SocketAddr, axum_server::Handle<SocketAddr>) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    std::fs::write(ca_file, made.cert.pem()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![CertificateDer::from(made.cert.der().to_vec())], key)
        .unwrap();
    let handle = axum_server::Handle::new();
    let router = Router::new().route(SYNC_PATH, post(sync)).with_state(operator);
    let server = axum_server::bind_rustls(address, RustlsConfig::from_config(Arc::new(tls))).handle(handle.clone());
    tokio::spawn(server.serve(router.into_make_service()));
    let address = handle.listening().await.expect("the port is free");
    (address, handle)
}

/// A node's folders, and two jobs that print and burn.
struct Node {
    dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
}

impl Node {
    fn new(names: &[&str]) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let mut files: Vec<(PathBuf, PathBuf)> = Vec::new();
        for name in names {
            let log = dir.path().join(format!("logs/team_{name}_uid-{name}/main"));
            let group = dir.path().join(format!("cgroup/cpu,cpuacct/kubepods/burstable/poduid-{name}"));
            for folder in [&log, &group] {
                std::fs::create_dir_all(folder).unwrap();
            }
            files.push((log.join("0.log"), group.join("cpuacct.usage")));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let until = stop.clone();
        let names: Vec<String> = names.iter().map(|n| n.to_string()).collect();
        std::thread::spawn(move || {
            let began = Instant::now();
            while !until.load(Ordering::Relaxed) {
                let age_s = began.elapsed().as_secs_f64();
                for (name, (log, usage)) in names.iter().zip(&files) {
                    std::fs::write(usage, format!("{}\n", (age_s * 1e9) as u64)).unwrap();
                    let mut log = std::fs::OpenOptions::new().append(true).create(true).open(log).unwrap();
                    let loss = if name == "flat" { 1.0 } else { 10.0 - age_s };
                    let now_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
                    let stamp = jiff::Timestamp::from_nanosecond(now_ns as i128).unwrap();
                    writeln!(log, "{stamp} stdout F step {} loss: {loss}", (age_s * 10.0) as u64).unwrap();
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        Node { dir, stop }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The writer may be in the middle of its round.
        std::thread::sleep(Duration::from_millis(150));
    }
}

fn pod(name: &str) -> PodOnNode {
    let original =
        Resources { requests: Amounts { cpu_milli: Some(500), memory_bytes: None }, limits: Amounts::default() };
    let mut pod = pod_on_node(name, original);
    pod.started_ms = Some(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64);
    pod.settings.interval_ms = Some(1000);
    pod
}

async fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{what} did not come about");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Sends a GET request and returns the whole answer.
async fn get(address: SocketAddr, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

/// The recorded decision about a pod comes over the socket, and its plan is made again bit for bit.
async fn replay_over_http(address: SocketAddr) {
    let answer = get(address, &format!("{RECORD_PATH}?uid=uid-flat")).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    let job = head.lines().find_map(|line| line.strip_prefix(&format!("{JOB_HEADER}: "))).unwrap();
    let record = gainshare_record::from_json(body).unwrap();
    assert_eq!(record.view.jobs.iter().filter(|view| view.id.to_string() == job).count(), 1, "{job}");
    assert_eq!(record.replay().unwrap().differences, []);
    // Numbers only: the names of pods, namespaces and nodes stay in the cluster's objects.
    for name in ["flat", "grows", "uid-flat", "team", "n1"] {
        assert!(!body.contains(&format!("\"{name}\"")), "{name}: {body}");
    }
    let unknown = get(address, &format!("{RECORD_PATH}?uid=uid-other")).await;
    assert!(unknown.starts_with("HTTP/1.1 404") && unknown.contains("uid-other"), "{unknown}");
    assert!(get(address, "/metrics").await.starts_with("HTTP/1.1 404"));
}

/// An agent with its node and its operator.
struct Scenario {
    node: Node,
    operator: SharedOperator,
    /// Where the operator listens, and what stops it.
    address: SocketAddr,
    server: axum_server::Handle<SocketAddr>,
    /// Where the agent serves probes and metrics, and recorded decisions.
    listen: SocketAddr,
    record_listen: SocketAddr,
    stop: tokio::sync::oneshot::Sender<()>,
    agent: tokio::task::JoinHandle<Result<(), AgentError>>,
}

impl Scenario {
    /// Starts an operator that knows these pods and expects the token `right`, and an agent with the token `token`.
    async fn start(names: &[&str], token: &str) -> Scenario {
        let node = Node::new(names);
        std::fs::write(node.path("token"), format!("{token}\n")).unwrap();
        let operator: SharedOperator = Arc::default();
        {
            let mut m = operator.lock().unwrap();
            (m.token, m.revision, m.pods) = ("right".into(), 7, names.iter().map(|name| pod(name)).collect());
        }
        let (address, server) = serve(operator.clone(), &node.path("ca.crt"), "127.0.0.1:0".parse().unwrap()).await;
        // A free port: it is bound once to learn its number.
        let free_address = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (listen, record_listen) = (free_address(), free_address());
        let config = AgentConfig {
            node: "n1".into(),
            operator: format!("https://localhost:{}", address.port()),
            ca_file: node.path("ca.crt"),
            token_file: node.path("token"),
            logs: node.path("logs"),
            volumes: None,
            pages: None,
            cgroups: node.path("cgroup"),
            processes: None,
            listen,
            record_listen: Some(record_listen),
        };
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let agent = tokio::spawn(run(config, async move { drop(stopped.await) }));
        Scenario { node, operator, address, server, listen, record_listen, stop, agent }
    }

    /// Waits until the operator has heard of this number of jobs.
    async fn until_jobs_are_reported(&self, count: usize) {
        until("a report of the jobs", || {
            let m = self.operator.lock().unwrap();
            let is_whole = |r: &SyncRequest| r.jobs.as_ref().is_some_and(|jobs| jobs.len() == count);
            m.requests.iter().any(is_whole).then_some(())
        })
        .await
    }

    /// The operator dies. Answers how many messages it has got.
    async fn stop_operator(&self) -> usize {
        self.server.shutdown();
        // A message that has just come is still counted.
        tokio::time::sleep(Duration::from_millis(700)).await;
        self.operator.lock().unwrap().requests.len()
    }

    /// Another operator comes in the place of the one that died, with another certificate, revisions of its own and
    /// this token.
    async fn start_operator(&mut self, token: &str) {
        {
            let mut m = self.operator.lock().unwrap();
            (m.token, m.revision) = (token.into(), 7);
        }
        (_, self.server) = serve(self.operator.clone(), &self.node.path("ca.crt"), self.address).await;
    }

    /// The agent's first message after this number of messages.
    async fn message_after(&self, count: usize) -> SyncRequest {
        until("the agent's return", || self.operator.lock().unwrap().requests.get(count).cloned()).await
    }

    async fn is_ready(&self) -> bool {
        get(self.listen, "/readyz").await.starts_with("HTTP/1.1 200")
    }

    /// The agent ends when it is asked to, without an error.
    async fn end(self) {
        drop(self.stop);
        self.agent.await.unwrap().unwrap();
        self.server.shutdown();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flat_job_makes_room_and_the_decision_can_be_replayed() {
    let s = Scenario::start(&["flat", "grows"], "right").await;
    let request = |m: &FakeOperator, uid: &str| m.pods.iter().find(|p| p.uid == uid).unwrap().now.requests.cpu_milli;
    until("a resize", || {
        let m = s.operator.lock().unwrap();
        let (flat, grows) = (request(&m, "uid-flat")?, request(&m, "uid-grows")?);
        (flat <= 260 && grows >= 700 && flat + grows <= 1000).then_some(())
    })
    .await;
    let metrics = get(s.listen, "/metrics").await;
    assert!(metrics.contains("gainshare_node_jobs{category=\"converged\"} 1"), "{metrics}");
    replay_over_http(s.record_listen).await;
    assert!(get(s.listen, "/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(s.is_ready().await);
    s.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_returns_to_a_new_operator_with_another_certificate_and_sends_its_whole_state() {
    let mut s = Scenario::start(&["flat", "grows"], "right").await;
    s.until_jobs_are_reported(2).await;
    let first_epoch = s.operator.lock().unwrap().requests[0].epoch;
    let before = s.stop_operator().await;
    assert!(s.is_ready().await, "an operator that is away for a moment changes nothing");
    s.start_operator("right").await;
    let next = s.message_after(before).await;
    // This operator may not have the state, and its revisions are its own.
    assert_eq!((next.epoch, next.seen, next.node.as_str()), (first_epoch, 0, "n1"));
    assert_eq!(next.jobs.map(|jobs| jobs.len()), Some(2));
    let numbers: Vec<u64> = s.operator.lock().unwrap().requests.iter().map(|r| r.seq).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    s.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_token_is_read_from_its_file() {
    let mut s = Scenario::start(&["grows"], "right").await;
    s.until_jobs_are_reported(1).await;
    let before = s.stop_operator().await;
    std::fs::write(s.node.path("token"), "renewed").unwrap();
    s.start_operator("renewed").await;
    s.message_after(before).await;
    s.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_goes_is_no_longer_reported() {
    let s = Scenario::start(&["flat", "grows"], "right").await;
    s.until_jobs_are_reported(2).await;
    {
        let mut m = s.operator.lock().unwrap();
        m.pods.retain(|p| p.uid != "uid-flat");
        m.revision += 1;
    }
    until("the pod's end", || {
        let m = s.operator.lock().unwrap();
        let jobs = m.requests.last()?.jobs.as_ref()?;
        (jobs.len() == 1 && jobs[0].uid == "uid-grows").then_some(())
    })
    .await;
    s.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_or_a_foreign_certificate_gets_nothing_and_does_not_end_the_agent() {
    let s = Scenario::start(&["grows"], "wrong").await;
    let ca = s.node.path("ca.crt");
    let right_ca = std::fs::read(&ca).unwrap();
    until("a refusal", || (s.operator.lock().unwrap().refused > 0).then_some(())).await;
    assert!(get(s.listen, "/readyz").await.starts_with("HTTP/1.1 503"));
    // A server with another certificate does not get the token.
    let other = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    std::fs::write(&ca, other.cert.pem()).unwrap();
    std::fs::write(s.node.path("token"), "right").unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(s.operator.lock().unwrap().requests.is_empty());
    std::fs::write(&ca, right_ca).unwrap();
    until("an exchange", || (!s.operator.lock().unwrap().requests.is_empty()).then_some(())).await;
    s.end().await;
}

#[tokio::test]
async fn wrong_settings_are_refused_at_the_start() {
    let node = Node::new(&["grows"]);
    let config = |operator: &str, logs: &str, cgroups: &str| AgentConfig {
        node: "n1".into(),
        operator: operator.into(),
        ca_file: node.path("ca.crt"),
        token_file: node.path("token"),
        logs: node.path(logs),
        volumes: None,
        pages: None,
        cgroups: node.path(cgroups),
        processes: None,
        listen: "127.0.0.1:0".parse().unwrap(),
        record_listen: None,
    };
    let url = "https://localhost:1";
    let everywhere = "0.0.0.0:0".parse().unwrap();
    for (config, says) in [
        (config("http://localhost", "logs", "cgroup"), "must look like https://"),
        (config(url, "nowhere", "cgroup"), "/var/log/pods"),
        (AgentConfig { volumes: Some(node.path("nowhere")), ..config(url, "logs", "cgroup") }, "/var/lib/kubelet/pods"),
        (AgentConfig { pages: Some(node.path("nowhere")), ..config(url, "logs", "cgroup") }, "leave --pod-pages out"),
        (AgentConfig { processes: Some(node.path("nowhere")), ..config(url, "logs", "cgroup") }, "--host-proc"),
        (config(url, "logs", "logs"), "/sys/fs/cgroup"),
        (AgentConfig { record_listen: Some(everywhere), ..config(url, "logs", "cgroup") }, "not a loopback address"),
    ] {
        let message = run(config, async {}).await.unwrap_err().to_string();
        assert!(message.contains(says), "{message}");
    }
}
