//! Tests of [`super`] over real connections, with a stand-in for the API server that counts token reviews.

use super::*;
use crate::http::listen;
use crate::http::peers::{Limits, Peers};
use crate::http::tls::Authority;
use gainshare_kube_api::wire::{JobReport, ReportedCategory, TOKEN_AUDIENCE};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::TlsAcceptor;

/// The token of node A's agent; all others are refused.
const GOOD: &str = "good";
const LONG: Duration = Duration::from_secs(20);

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// An API server that reviews tokens and nothing else.
async fn api_server() -> (kube::Client, Arc<AtomicUsize>) {
    let reviews = Arc::new(AtomicUsize::new(0));
    let count = reviews.clone();
    let review = move |Json(review): Json<Value>| {
        let count = count.clone();
        async move {
            count.fetch_add(1, Ordering::SeqCst);
            let status = match review["spec"]["token"].as_str() {
                Some(GOOD) => json!({
                    "authenticated": true, "audiences": [TOKEN_AUDIENCE],
                    "user": {
                        "username": "system:serviceaccount:system:agent",
                        "extra": {"authentication.kubernetes.io/node-name": ["a"]},
                    },
                }),
                _ => json!({"authenticated": false}),
            };
            let metadata = json!({});
            Json(json!({
                "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
                "metadata": metadata, "spec": review["spec"], "status": status,
            }))
        }
    };
    let router = Router::new().route("/apis/authentication.k8s.io/v1/tokenreviews", post(review));
    let (listener, address) = listen().await;
    tokio::spawn(async move { axum::serve(listener, router).await });
    let config = kube::Config::new(format!("http://{address}").parse().unwrap());
    (kube::Client::try_from(config).unwrap(), reviews)
}

/// A leader with an empty cluster in view, and its listener.
struct TestServer {
    address: SocketAddr,
    leader: Arc<Leader>,
    reviews: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
    peers: Arc<Peers>,
    _ending: watch::Sender<bool>,
    _leading: watch::Sender<Option<Arc<LeaderContext>>>,
}

async fn bench(limits: Limits, tls: Option<TlsAcceptor>) -> TestServer {
    let (client, reviews) = api_server().await;
    let metrics = Arc::new(Metrics::new());
    let leader = Arc::new(Leader::new(metrics.clone(), 1));
    leader.lists.await_one();
    leader.lists.complete_one();
    let shares = Arc::new(Shares::new(leader.clone(), client.clone(), metrics.clone()));
    let reviewer = Reviewer::new(client, "system", "agent");
    let leads = Arc::new(LeaderContext { leader: leader.clone(), shares, reviewer });
    let (leading, leading_seen) = watch::channel(Some(leads));
    let (ending, ending_seen) = watch::channel(false);
    let served = ServerState::new(leading_seen, metrics.clone(), Health::new(), ending_seen.clone());
    let (listener, address) = listen().await;
    let peers = Peers::new(limits);
    tokio::spawn(listen::serve(listener, secure(served), tls, peers.clone(), metrics.clone(), ending_seen));
    TestServer { address, leader, reviews, metrics, peers, _ending: ending, _leading: leading }
}

fn limits() -> Limits {
    Limits { limit_loopback: true, ..Limits::default() }
}

fn request(path: &str, token: Option<&str>, length: usize) -> String {
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    format!(
        "POST {path} HTTP/1.1\r\nhost: operator\r\ncontent-type: application/json\r\n{token}content-length: {length}\r\n\r\n"
    )
}

fn sync_of(node: &str) -> SyncRequest {
    SyncRequest { node: node.into(), epoch: 1, seq: 1, ..SyncRequest::default() }
}

/// The status line of the answer to a whole request on a connection of its own.
async fn ask(address: SocketAddr, path: &str, token: Option<&str>, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request(path, token, body.len()).as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let read = stream.read(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer[..read]).lines().next().unwrap_or_default().to_owned()
}

/// The most that this process has had in memory, in MiB.
fn peak_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux counts the peak");
    peak.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() / 1024
}

/// Runs a test of this module in a process of its own: memory is counted for a whole process.
fn run_alone(name: &str) {
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    let name = format!("http::serve::tests::{name}");
    let output = alone.args(["--exact", &name, "--ignored", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().filter(|line| line.starts_with("fault: ")).for_each(|line| println!("{line}"));
}

/// Sends the request and as much of its body as the operator takes; answers how it ended.
async fn send_most(address: SocketAddr, path: &str, token: Option<&str>) -> std::io::Result<usize> {
    let all = (8 << 20) - 1000;
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request(path, token, all).as_bytes()).await?;
    let zeros = [b'0'; 64 << 10];
    let mut sent = 0;
    while sent + zeros.len() < all - 1000 {
        // The operator closes the connection while the client is still sending.
        match stream.write(&zeros).await {
            Ok(0) | Err(_) => break,
            Ok(written) => sent += written,
        }
    }
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    Ok(sent)
}

#[test]
fn sixty_unfinished_requests_hold_next_to_nothing_and_are_closed() {
    run_alone("inner_sixty_unfinished_requests");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a process of its own; another test starts it"]
async fn inner_sixty_unfinished_requests() {
    for (path, token) in [(SYNC_PATH, None), (SYNC_PATH, Some("wrong")), ("/mutate", None)] {
        let bench = bench(limits(), None).await;
        let before = peak_mib();
        let clients: Vec<_> = (0..60).map(|_| tokio::spawn(send_most(bench.address, path, token))).collect();
        let ended = async {
            for client in clients {
                // Each client ends because the operator has closed its connection.
                let _ = client.await.unwrap();
            }
        };
        tokio::time::timeout(LONG * 3, ended).await.expect("every connection is closed");
        let grown = peak_mib().saturating_sub(before);
        assert!(grown < 100, "{grown} MiB for 60 connections to {path} that hold 480 MiB of body");
    }
}

/// An admission review of a pod with this text in an annotation.
fn review_with(text: &str) -> String {
    let pods = json!({"group": "", "version": "v1", "resource": "pods"});
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "r-1", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "resource": pods,
            "operation": "CREATE", "userInfo": {},
            "object": {
                "metadata": {"name": "p", "namespace": "team", "annotations": {"text": text}},
                "spec": {"containers": [{"name": "main", "image": "train"}]},
            },
        },
    })
    .to_string()
}

/// Sends an admission review from one of this machine's addresses. Answers the status line, or nothing if the operator
/// closed the connection while the client was sending.
async fn review_from(peer: [u8; 4], address: SocketAddr, body: Arc<String>) -> String {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((peer, 0))).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let head = request("/mutate", None, body.len());
    // A client that fails to send may still find an answer.
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(body.as_bytes()).await;
    let mut answer = vec![0; 4096];
    let read = stream.read(&mut answer).await.unwrap_or(0);
    String::from_utf8_lossy(&answer[..read]).lines().next().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn admission_reviews_have_few_places_and_fewer_for_each_peer() {
    let bench = bench(limits(), None).await;
    let (busy, other) = ([127, 0, 0, 2], [127, 0, 0, 3]);
    let review = |peer| review_from(peer, bench.address, Arc::new(review_with("short")));
    // All places of one peer are taken. The others are answered.
    let slot = bench.peers.admit(busy.into(), Instant::now()).unwrap();
    let (own, all) = slot.admissions();
    let own = own.expect("this peer is limited");
    assert_eq!((own.available_permits(), all.available_permits()), (4, 16));
    let taken = own.clone().acquire_many_owned(4).await.unwrap();
    assert!(review(busy).await.contains("429"), "the peer's places are taken");
    assert!(review(other).await.contains("200"), "another peer has places of its own");
    drop(taken);
    assert!(review(busy).await.contains("200"));
    // All places are taken.
    let taken = all.clone().acquire_many_owned(16).await.unwrap();
    assert!(review(other).await.contains("429"));
    drop(taken);
    assert!(review(other).await.contains("200"));
    assert_eq!(bench.metrics.admissions.get(), 3);
    // A review takes a place of its peer and one of all while its body comes.
    let seen = async {
        loop {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from((busy, 0))).unwrap();
            let mut stream = socket.connect(bench.address).await.unwrap();
            stream.write_all(request("/mutate", None, 1000).as_bytes()).await.unwrap();
            for _ in 0..50 {
                if (own.available_permits(), all.available_permits()) == (3, 15) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    tokio::time::timeout(LONG, seen).await.expect("an unfinished review has places");
}

#[test]
fn twelve_whole_reviews_of_seven_mebibytes_cost_little_and_lock_no_other_out() {
    run_alone("inner_twelve_large_reviews");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a process of its own; another test starts it"]
async fn inner_twelve_large_reviews() {
    let bench = bench(limits(), None).await;
    // Made in one piece, so that the peak before is small.
    let frame = review_with("@");
    let (head, tail) = frame.split_once('@').unwrap();
    let mut large = String::with_capacity((7 << 20) + frame.len());
    large.push_str(head);
    large.extend(std::iter::repeat_n('x', 7 << 20));
    large.push_str(tail);
    let large = Arc::new(large);
    // The small review comes first, so that what it needs is not counted.
    assert!(review_from([127, 0, 0, 3], bench.address, Arc::new(review_with("short"))).await.contains("200"));
    let before = peak_mib();
    let clients: Vec<_> =
        (0..12).map(|_| tokio::spawn(review_from([127, 0, 0, 2], bench.address, large.clone()))).collect();
    let (mut fewest, all) = (16, bench.peers.admissions.clone());
    while !clients.iter().all(tokio::task::JoinHandle::is_finished) {
        fewest = fewest.min(all.available_permits());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for client in clients {
        let answer = client.await.unwrap();
        let is_refused = ["413", "429"].iter().any(|code| answer.contains(code));
        assert!(answer.is_empty() || is_refused, "a review of 7 MiB is not read: {answer}");
    }
    assert!(fewest >= 12, "one peer had {} places of 16", 16 - fewest);
    let grown = peak_mib().saturating_sub(before);
    assert!(grown < 20, "{grown} MiB for twelve bodies of 7 MiB");
    let short = Arc::new(review_with("short"));
    assert!(review_from([127, 0, 0, 2], bench.address, short).await.contains("200"), "the peer is answered again");
    println!("fault: injected=12 violations=0 grown_mib={grown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_costs_few_reviews() {
    let bench = bench(limits(), None).await;
    for _ in 0..50 {
        assert!(ask(bench.address, SYNC_PATH, Some("wrong"), "{}").await.contains("401"));
    }
    assert_eq!(bench.reviews.load(Ordering::SeqCst), 1, "a refusal is remembered");
    let mut too_many = 0;
    for attempt in 0..100 {
        let answer = ask(bench.address, SYNC_PATH, Some(&format!("guess-{attempt}")), "{}").await;
        too_many += usize::from(answer.contains("429"));
    }
    let reviews = bench.reviews.load(Ordering::SeqCst);
    assert!(reviews <= 12, "{reviews} reviews for a hundred guesses of one peer");
    assert!(too_many >= 88, "{too_many} guesses were refused unreviewed");
    println!("fault: injected=150 violations=0 reviews={reviews}");
}

#[tokio::test(flavor = "multi_thread")]
async fn guesses_at_once_cost_few_reviews_too() {
    let bench = bench(limits(), None).await;
    let address = bench.address;
    let guesses =
        (0..60).map(|i| tokio::spawn(async move { ask(address, SYNC_PATH, Some(&format!("{i}")), "{}").await }));
    for guess in guesses.collect::<Vec<_>>() {
        guess.await.unwrap();
    }
    let reviews = bench.reviews.load(Ordering::SeqCst);
    assert!(reviews <= 12, "{reviews} reviews");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_is_answered_and_its_token_reviewed_once() {
    let bench = bench(limits(), None).await;
    for seq in 1..=5 {
        let body = serde_json::to_string(&SyncRequest { seq, ..sync_of("a") }).unwrap();
        assert!(ask(bench.address, SYNC_PATH, Some(GOOD), &body).await.contains("200"));
    }
    assert_eq!(bench.reviews.load(Ordering::SeqCst), 1);
    let other = serde_json::to_string(&sync_of("b")).unwrap();
    assert!(ask(bench.address, SYNC_PATH, Some(GOOD), &other).await.contains("403"), "another node's name");
    assert!(ask(bench.address, SYNC_PATH, Some(GOOD), "[]").await.contains("400"));
    assert!(ask(bench.address, SYNC_PATH, None, "{}").await.contains("401"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_without_proof_has_few_connections() {
    let bench = bench(Limits { unproven_per_peer: 5, ..limits() }, None).await;
    let mut idle = Vec::new();
    for _ in 0..5 {
        idle.push(TcpStream::connect(bench.address).await.unwrap());
    }
    // The operator accepts in the order of arrival, so the sixth finds the places taken.
    let mut sixth = TcpStream::connect(bench.address).await.unwrap();
    let closed = tokio::time::timeout(LONG, sixth.read(&mut [0; 1])).await.expect("it is closed");
    assert!(matches!(closed, Ok(0) | Err(_)));
    assert_eq!(bench.metrics.connections_refused.get(), 1);
    drop(idle);
    let body = serde_json::to_string(&sync_of("a")).unwrap();
    // Places are free again when the operator has noticed that the connections are closed.
    let again = async {
        loop {
            let mut stream = TcpStream::connect(bench.address).await.unwrap();
            let head = request(SYNC_PATH, Some(GOOD), body.len());
            let sent = stream.write_all(format!("{head}{body}").as_bytes()).await;
            let mut answer = [0; 64];
            if sent.is_ok() && stream.read(&mut answer).await.is_ok_and(|read| read > 0) {
                return String::from_utf8_lossy(&answer).into_owned();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(LONG, again).await.unwrap().contains("200"));
}

/// Two hundred clients on eight addresses send half a request each and take every place. An agent with a new connection
/// for each message is answered all the same.
#[tokio::test(flavor = "multi_thread")]
async fn agents_are_answered_beside_two_hundred_unfinished_requests() {
    let bench = bench(Limits { unproven: 200, unproven_per_peer: 25, ..limits() }, None).await;
    let mut hostile = Vec::new();
    for client in 0..200_u8 {
        let socket = TcpSocket::new_v4().unwrap();
        // Every address of 127.0.0.0/8 is this machine.
        socket.bind(SocketAddr::from(([127, 0, 0, 2 + client / 25], 0))).unwrap();
        let mut stream = socket.connect(bench.address).await.unwrap();
        let whole = request(SYNC_PATH, Some("wrong"), 1000);
        stream.write_all(&whole.as_bytes()[..whole.len() / 2]).await.unwrap();
        hostile.push(stream);
    }
    let mut longest = Duration::ZERO;
    for seq in 1..=20 {
        let body = serde_json::to_string(&SyncRequest { seq, ..sync_of("a") }).unwrap();
        let began = std::time::Instant::now();
        let answer = tokio::time::timeout(LONG, ask(bench.address, SYNC_PATH, Some(GOOD), &body)).await;
        assert!(answer.expect("an agent is answered").contains("200"));
        longest = longest.max(began.elapsed());
    }
    println!("the longest wait of an agent: {} ms", longest.as_millis());
    println!("fault: injected={} violations=0", hostile.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_reports_are_dropped_and_counted() {
    let bench = bench(limits(), None).await;
    let job = JobReport {
        uid: "on-node-b".into(),
        container: "main".to_owned(),
        category: ReportedCategory::Converged,
        ..JobReport::default()
    };
    let to = Default::default();
    let resize = Resize { uid: "on-node-b".into(), container: "main".to_owned(), generation: 1, to };
    let sync = SyncRequest { jobs: Some(vec![job]), resizes: vec![resize], ..sync_of("a") };
    let body = serde_json::to_string(&sync).unwrap();
    let mut stream = TcpStream::connect(bench.address).await.unwrap();
    stream.write_all(format!("{}{body}", request(SYNC_PATH, Some(GOOD), body.len())).as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let read = stream.read(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
    assert!(answer.contains("200 OK") && answer.contains("there is no pod on-node-b on node a"), "{answer}");
    assert!(bench.leader.agents.lock().job(&"on-node-b".into()).is_none());
    assert_eq!(bench.metrics.foreign_reports.get(), 2);
    // The plan of the foreign resize is not remembered: it would refuse older plans for that pod.
    assert_eq!(bench.leader.agents.lock().admit(&"a".into(), 1, &"on-node-b".into(), 0), Ok(()));
    println!("fault: injected=2 violations=0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_agent_connects_with_tls() {
    let authority = Authority::load_or_make(&[]).unwrap();
    let tls = TlsAcceptor::from(authority.server_config(&["127.0.0.1".to_owned()]).unwrap());
    let bench = bench(limits(), Some(tls)).await;
    let folder = tempfile::tempdir().unwrap();
    let (ca, token) = (folder.path().join("ca.crt"), folder.path().join("token"));
    std::fs::write(&ca, authority.certificate_pem()).unwrap();
    std::fs::write(&token, GOOD).unwrap();
    let mut link = gainshare_node_agent::Link::new(&format!("https://{}", bench.address), &ca, &token).unwrap();
    let answer = link.sync(&sync_of("a")).await.unwrap();
    assert_eq!((answer.epoch, answer.want_jobs), (1, true));
}

async fn probe(health: Arc<Health>, path: &str) -> (StatusCode, String) {
    let (_leading, leading_seen) = watch::channel(None);
    let (_ending, ending_seen) = watch::channel(false);
    let served = ServerState::new(leading_seen, Arc::new(Metrics::new()), health, ending_seen.clone());
    let response = match path {
        "/healthz" => healthz(State(served)).await,
        _ => readyz(State(served)).await,
    };
    let status = response.status();
    let body = to_bytes(response.into_body(), 1000).await.unwrap();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn health_names_the_stalled_task() {
    let health = Health::new();
    let mut tasks = crate::tasks::Tasks::new(health.clone());
    tasks.spawn("the watch of pods", std::future::pending());
    assert_eq!(probe(health.clone(), "/healthz").await, (StatusCode::OK, "ok\n".to_owned()));
    tasks.spawn_within("the decision", Duration::ZERO, std::future::pending());
    tokio::time::sleep(Duration::from_millis(20)).await;
    let (status, body) = probe(health.clone(), "/healthz").await;
    assert_eq!((status, body.as_str()), (StatusCode::SERVICE_UNAVAILABLE, "stalled: the decision\n"));
    assert_eq!(probe(health, "/readyz").await, (StatusCode::OK, "standby\n".to_owned()));
}

/// The plain port is for probes and metrics. What agents and the API server send is accepted with TLS only.
#[tokio::test(flavor = "multi_thread")]
async fn the_plain_port_serves_probes_and_metrics_only() {
    let (_leading, leading_seen) = watch::channel(None);
    let (_ending, ending_seen) = watch::channel(false);
    let served = ServerState::new(leading_seen, Arc::new(Metrics::new()), Health::new(), ending_seen);
    let (listener, address) = listen().await;
    tokio::spawn(async move { axum::serve(listener, plain(served)).await });
    for path in [SYNC_PATH, "/mutate", "/v1/record"] {
        assert!(ask(address, path, Some(GOOD), "{}").await.contains("404"), "{path}");
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert!(ask(address, path, None, "{}").await.contains("405"), "{path} is for reading");
    }
}
