//! The manager: knows the cluster's pods and policies, tells agents what concerns their nodes, and resizes on their behalf.
//!
//! One manager leads (a Lease decides); others stand by. All that must survive it is on the objects: a manager that starts reads the cluster, waits
//! for the agents' words, and goes on. If the API server is away, nothing is decided and nothing is lost: pods keep what they have, watches and
//! agents ask again, and everything converges when it is back.

pub mod http;
pub mod jobs;
mod placement;
mod shares;
mod state;

pub use shares::release::release;

use crate::http::tls::{Authority, TlsError};
use axum_server::tls_rustls::RustlsConfig;
use http::serve::Served;
use kube::Client;
use kube::runtime::events::{Recorder, Reporter};
use kube_lease_manager::LeaseManagerBuilder;
use state::lead::Leader;
use state::metrics::Metrics;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::task::JoinSet;

/// A leader renews its lease well within this time; a successor waits for it to run out.
const LEASE_S: u64 = 15;
const LEASE_GRACE_S: u64 = 5;

/// How soon notes are written, where there is something new to note.
const NOTE_EVERY: Duration = Duration::from_millis(250);

/// Statuses and notes are written at most this often, so that ten changes in a moment make one write.
const WRITE_EVERY: Duration = Duration::from_secs(1);

/// How long writes rest after one failed: the API server is probably away.
const WRITE_PAUSE: Duration = Duration::from_secs(4);

/// How often silence of agents is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// How long requests under way may take when the process is to end.
const ENDING: Duration = Duration::from_secs(5);

/// Where and as whom the manager runs.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its own namespace: lease, ConfigMap and the agents' ServiceAccount are there.
    pub namespace: String,
    /// The pod's name, by which the Service finds the leader; absent outside a cluster.
    pub pod_name: Option<String>,
    /// For agents and admission reviews, TLS.
    pub listen: SocketAddr,
    /// For health and metrics.
    pub plain_listen: SocketAddr,
    /// Names by which it is reached.
    pub server_names: Vec<String>,
    pub agent_account: String,
    pub lease: String,
    /// The ConfigMap that publishes our certificate and holds the switch.
    pub config_map: String,
    /// The MutatingWebhookConfiguration to publish it in, too.
    pub webhook: Option<String>,
    /// Where the certificate authority may be kept; see [`Authority::load_or_make`].
    pub authority_folders: Vec<PathBuf>,
    /// For tests: the step of a training job at which the process ends.
    pub fail_at: crate::jobs::FailPoint,
    /// The numbers of the policy `specon` for training jobs.
    pub specon: gainshare_core::policy::Specon,
}

#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    #[error("cannot reach a cluster: {0}; run inside one, or set KUBECONFIG")]
    Config(#[from] kube::config::InferConfigError),
    #[error("the API server refused: {0}")]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(
        "cannot hold the lease {lease}: {source}; the manager needs get, create and patch on leases in its namespace"
    )]
    Lease { lease: String, source: kube_lease_manager::LeaseManagerError },
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("{0}")]
    Unfinished(String),
}

/// A client for the cluster we are in, or that KUBECONFIG names. It does not repeat requests by itself: we do, knowing what they mean.
pub async fn client() -> Result<Client, ManagerError> {
    let mut config = kube::Config::infer().await?;
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    Ok(Client::try_from(config)?)
}

/// Runs until `end` resolves.
pub async fn run(config: Config, client: Client, end: impl Future<Output = ()>) -> Result<(), ManagerError> {
    let metrics = Arc::new(Metrics::new());
    let authority = Arc::new(Authority::load_or_make(&config.authority_folders)?);
    let (leading, leading_seen) = tokio::sync::watch::channel(None::<Arc<Leader>>);
    let (ending, ending_seen) = tokio::sync::watch::channel(false);
    let served = Served { leading: leading_seen, metrics: metrics.clone(), ending: ending_seen };

    let secure = listen(config.listen)?;
    let plain = listen(config.plain_listen)?;
    let tls = RustlsConfig::from_config(authority.server_config(&config.server_names)?);
    let handle = axum_server::Handle::new();
    let secure_server = axum_server::from_tcp_rustls(secure, tls)
        .map_err(|source| ManagerError::Listen { address: config.listen, source })?
        .handle(handle.clone())
        .serve(http::serve::secure(served.clone()).into_make_service());
    let plain_server = axum_server::from_tcp(plain)
        .map_err(|source| ManagerError::Listen { address: config.plain_listen, source })?
        .handle(handle.clone())
        .serve(http::serve::plain(served).into_make_service());
    let mut servers = JoinSet::new();
    servers.spawn(secure_server);
    servers.spawn(plain_server);

    let lease_error = |source| ManagerError::Lease { lease: config.lease.clone(), source };
    let identity = config.pod_name.clone().unwrap_or_else(|| format!("outside-{}", std::process::id()));
    let lease = loop {
        // Without an API server there is nothing to lead; the process waits rather than crashing in a loop.
        let built = LeaseManagerBuilder::new(client.clone(), &config.lease)
            .with_namespace(&config.namespace)
            .with_identity(format!("{identity}-{}", started()))
            .with_duration(LEASE_S)
            .with_grace(LEASE_GRACE_S)
            .with_field_manager(gainshare_kube_api::names::FIELD_MANAGER)
            .build()
            .await;
        match built {
            Ok(lease) => break lease,
            Err(error) => tracing::warn!(%error, "cannot reach the lease yet"),
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    };
    let (mut is_leader, lease_task) = lease.watch().await;
    tokio::pin!(end);
    loop {
        if *is_leader.borrow_and_update() {
            tracing::info!("leading");
            metrics.leader.set(1);
            let tasks = lead(&config, &client, &authority, &metrics, &leading);
            tokio::select! {
                () = &mut end => { stop(&leading, &metrics, tasks); break }
                _ = is_leader.changed() => { stop(&leading, &metrics, tasks); tracing::warn!("no longer leading") }
            }
        } else {
            tokio::select! {
                () = &mut end => break,
                _ = is_leader.changed() => {}
            }
        }
    }
    // Readiness goes first, so that nobody new is sent here; then requests under way end; then the successor may begin.
    ending.send_replace(true);
    handle.graceful_shutdown(Some(ENDING));
    while servers.join_next().await.is_some() {}
    drop(is_leader);
    if let Ok(Err(source)) = lease_task.await {
        return Err(lease_error(source));
    }
    tracing::info!("ended; the lease is free");
    Ok(())
}

fn stop(leading: &tokio::sync::watch::Sender<Option<Arc<Leader>>>, metrics: &Metrics, tasks: JoinSet<()>) {
    leading.send_replace(None);
    metrics.leader.set(0);
    drop(tasks);
}

/// Everything a leader does, as tasks that end when the set is dropped.
fn lead(
    config: &Config,
    client: &Client,
    authority: &Arc<Authority>,
    metrics: &Arc<Metrics>,
    leading: &tokio::sync::watch::Sender<Option<Arc<Leader>>>,
) -> JoinSet<()> {
    let writer = shares::write::Writer::new(client.clone(), metrics.clone());
    let reviewer = http::auth::Reviewer::new(client.clone(), &config.namespace, &config.agent_account);
    let leader = Arc::new(Leader::new(writer, reviewer, metrics.clone(), started()));
    let mut tasks = JoinSet::new();
    state::watch::start(&mut tasks, &leader, client, &config.namespace, &config.config_map);
    tasks.spawn(http::publish::run(config.clone(), client.clone(), authority.certificate_pem().to_owned()));
    tasks.spawn(restore_loop(leader.clone()));
    let reporter =
        Reporter { controller: gainshare_kube_api::names::CONTROLLER.to_owned(), instance: config.pod_name.clone() };
    let recorder = Recorder::new(client.clone(), reporter);
    tasks.spawn(placement::run::run(leader.clone(), config.specon));
    crate::jobs::start(&mut tasks, &leader, client, recorder.clone(), config.fail_at.clone());
    tasks.spawn(note_loop(leader.clone(), recorder.clone()));
    tasks.spawn(write_loop(leader.clone(), client.clone(), recorder));
    leading.send_replace(Some(leader));
    tasks
}

async fn restore_loop(leader: Arc<Leader>) {
    let mut pauses = shares::restore::Pauses::default();
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if leader.is_synced() {
            shares::restore::pass(&leader, &mut pauses).await;
        }
    }
}

/// Notes follow closely on the resizes they tell of, so that the pods are left in peace again soon.
async fn note_loop(leader: Arc<Leader>, recorder: Recorder) {
    loop {
        tokio::time::sleep(NOTE_EVERY).await;
        if leader.is_synced() {
            shares::notes::pass(&leader, &recorder, leader.take_pods()).await;
        }
    }
}

async fn write_loop(leader: Arc<Leader>, client: Client, recorder: Recorder) {
    let mut looked = Instant::now();
    loop {
        tokio::time::sleep(WRITE_EVERY).await;
        // Nothing happening is also something to look at: agents may have fallen silent.
        let _ = tokio::time::timeout(LOOK_EVERY, leader.work.notified()).await;
        if !leader.is_synced() {
            continue;
        }
        if looked.elapsed() >= LOOK_EVERY {
            looked = Instant::now();
            leader.mark_all_policies();
        }
        let again = shares::policies::pass(&leader, &client, &recorder, leader.take_policies()).await;
        count(&leader);
        if !again.is_empty() {
            leader.mark_policies(again);
            tokio::time::sleep(WRITE_PAUSE).await;
        }
    }
}

fn count(leader: &Leader) {
    let shared: std::collections::BTreeSet<String> =
        leader.look(|world| world.all_shared().map(|pod| pod.uid.clone()).collect());
    leader.contests.lock().expect("never poisoned").keep(|uid| shared.contains(uid));
    let (pods, blocked) = leader
        .look(|world| (world.all_shared().count(), world.all_shared().filter(|pod| pod.blocked.is_some()).count()));
    leader.metrics.pods.set(pods as i64);
    leader.metrics.blocked.set(blocked as i64);
    let now = Instant::now();
    let mut agents = leader.agents.lock().expect("never poisoned");
    agents.forget_silent(now);
    leader.metrics.agents.set(agents.heard_count(now) as i64);
    for (category, number) in agents.counts(now) {
        leader
            .metrics
            .jobs
            .get_or_create(&state::metrics::CategoryLabels { category: category.name() })
            .set(number.into());
    }
}

/// Microseconds since 1970: names this start, and keeps its revisions apart from those of earlier ones.
fn started() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

fn listen(address: SocketAddr) -> Result<std::net::TcpListener, ManagerError> {
    let bound = std::net::TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    bound.map_err(|source| ManagerError::Listen { address, source })
}
