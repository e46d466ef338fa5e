//! The operator of a cluster: it reads pods and policies, sends each node agent the list of its node's pods,
//! resizes pods for the agents, starts and moves training jobs, and resizes the tasks of distributed ones.
//!
//! **Problem.** All nodes of a cluster share one set of policies, and moves of jobs concern several nodes. Node
//! agents have no rights at the API server, so one program must write for all of them.
//!
//! **How.** Two replicas run; the one that holds a Lease leads ([`state::lease`]). The leader keeps no state of
//! its own that must survive it: everything is on the objects, so a new leader reads the cluster, waits for the
//! agents' reports, and goes on. While the API server is away nothing is decided and nothing is lost: pods keep
//! their resources, and watches and agents retry.
//!
//! **Properties.** No task of the process ends unnoticed: the process ends with it ([`tasks`]). Every write to
//! an object carries the version it was decided on, so a replica that was stopped past its lease is refused by
//! the API server.

mod elastic;
mod fail_point;
pub mod http;
pub mod inside;
mod isolate;
pub mod jobs;
mod placement;
pub mod rehearsal;
mod scaler;
mod shares;
mod state;
mod tasks;

pub use fail_point::{FAIL_POINT_EXIT, FailPoint};
pub use scaler::ScalerConfig;
pub use shares::release::release;

use crate::http::peers::{Limits, Peers};
use crate::http::tls::{Authority, TlsError};
use gainshare_kube_api::deadline::DeadlineState;
use gainshare_kube_api::names::PodUid;
use http::serve::{LeaderContext, ServerState};
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client};
use placement::record::RecordRequests;
use shares::Shares;
use state::lead::Leader;
use state::lease::{self, Election};
use state::metrics::Metrics;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tasks::{Health, Tasks};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

/// How soon pods' notes are written after something changed.
const NOTE_EVERY: Duration = Duration::from_millis(250);

/// Policies' statuses are written at most this often, so that ten changes in a moment make one write.
const WRITE_EVERY: Duration = Duration::from_secs(1);

/// The pause after a write failed: the API server is probably away.
const WRITE_PAUSE: Duration = Duration::from_secs(4);

/// How often policies are checked for agents that fell silent.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// How long requests under way may take when the process ends.
const ENDING: Duration = Duration::from_secs(6);

/// The election renews every 2 s and gives up a request after 5 s.
const ELECTION_QUIET: Duration = Duration::from_secs(30);

/// The decision waits for at most a second, and a pass over a large cluster takes some seconds.
const DECISION_QUIET: Duration = Duration::from_secs(120);

/// The kubelet and some scrapers of metrics.
const PLAIN_CONNECTIONS: usize = 128;

/// Users of `kubectl gainshare explain --dump`. One is served at a time.
const RECORD_CONNECTIONS: usize = 8;

/// Where and under which names the operator runs.
#[derive(Debug, Clone)]
pub struct Config {
    /// The operator's own namespace: the Lease, the ConfigMap and the node agents' ServiceAccount are there.
    pub namespace: String,
    /// The pod's name, which gets a label while it leads; absent outside a cluster.
    pub pod_name: Option<String>,
    /// For node agents and admission reviews, with TLS.
    pub listen: SocketAddr,
    /// For health and metrics, as plain HTTP.
    pub plain_listen: SocketAddr,
    /// For recorded decisions, as plain HTTP without a token: a loopback address, or nowhere.
    pub record_listen: Option<SocketAddr>,
    /// The names in its certificate.
    pub server_names: Vec<String>,
    pub agent_account: String,
    pub lease: String,
    /// The ConfigMap that publishes the certificate and holds the switch.
    pub config_map: String,
    /// The MutatingWebhookConfiguration that publishes the certificate, too.
    pub webhook: Option<String>,
    /// The image from which pods get the library inside jobs, in namespaces that ask for it. Without it, none do.
    pub inside_image: Option<String>,
    /// Where the certificate authority may be kept; see [`Authority::load_or_make`].
    pub authority_folders: Vec<PathBuf>,
    /// For tests: the step of a training job, or the write about shares, at which the process ends.
    pub fail_at: FailPoint,
    /// The parameters of the policy `specon` for training jobs.
    pub specon: gainshare_core::policy::Specon,
    /// The parameters of the policy `operator` for the tasks of distributed jobs.
    pub elastic: gainshare_core::policy::Elastic,
    /// The queues of distributed jobs.
    pub queues: crate::jobs::QueueWeights,
    /// Kubeflow's TFJobs are run, too. The kind must exist, and no other operator may run them.
    pub tfjobs: bool,
    /// Placeholders ask for nodes that deadlines need. Without it, the need is published only.
    pub scaler: Option<ScalerConfig>,
}

#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    #[error("cannot reach a cluster: {0}; run inside one, or set KUBECONFIG")]
    Config(#[from] kube::config::InferConfigError),
    #[error("the API server refused: {0}")]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(
        "--record-listen {address} is not a loopback address: records are served without a token, so nothing outside the pod may reach them"
    )]
    RecordListen { address: SocketAddr },
    #[error("a task that must not end has ended: {0}; the process ends so that another one can take over")]
    TaskEnded(String),
    #[error("{0}")]
    Unfinished(String),
}

/// A client for the cluster the process is in, or that KUBECONFIG names. It does not repeat requests: the
/// callers do, because they know which requests may be repeated.
pub async fn client() -> Result<Client, OperatorError> {
    let mut config = kube::Config::infer().await?;
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    Ok(Client::try_from(config)?)
}

/// What the parts of the process share.
struct Process {
    config: Config,
    client: Client,
    authority: Arc<Authority>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    records: Arc<RecordRequests>,
    /// What listeners need of the leader, while this process leads.
    leading: watch::Sender<Option<Arc<LeaderContext>>>,
    /// True from the beginning of the process's end.
    ending: watch::Sender<bool>,
}

/// Runs until `end` resolves, or until a task ends that must not.
pub async fn run(config: Config, client: Client, end: impl Future<Output = ()>) -> Result<(), OperatorError> {
    let process = Process::new(config, client)?;
    let mut listeners = process.listen().await?;
    let (may_lead, mut is_leader) = watch::channel(false);
    let (release, release_seen) = watch::channel(false);
    let mut election = process.elect(may_lead, release_seen);

    tokio::pin!(end);
    let ended = loop {
        let mut tasks = if *is_leader.borrow_and_update() {
            tracing::info!("leading");
            process.metrics.leader.set(1);
            process.lead()
        } else {
            Tasks::new(process.health.clone())
        };
        let ended = tokio::select! {
            () = &mut end => Some(Ok(())),
            what = tasks.ended() => Some(Err(OperatorError::TaskEnded(what))),
            what = listeners.ended() => Some(Err(OperatorError::TaskEnded(what))),
            what = election.ended() => Some(Err(OperatorError::TaskEnded(what))),
            _ = is_leader.changed() => None,
        };
        drop(tasks);
        process.metrics.leader.set(0);
        if process.leading.send_replace(None).is_some() {
            tracing::warn!("no longer leading");
        }
        if let Some(ended) = ended {
            break ended;
        }
    };
    if let Err(error) = &ended {
        tracing::error!(%error, "the process ends");
    }
    // Readiness goes first, so that no new requests are sent here; then requests under way end; then a standby
    // may lead.
    process.ending.send_replace(true);
    listeners.finish(ENDING).await;
    release.send_replace(true);
    election.finish(ENDING).await;
    tracing::info!("ended; the lease is free");
    ended
}

impl Process {
    fn new(config: Config, client: Client) -> Result<Process, OperatorError> {
        Ok(Process {
            authority: Arc::new(Authority::load_or_make(&config.authority_folders)?),
            metrics: Arc::new(Metrics::new()),
            health: Health::new(),
            records: Arc::new(RecordRequests::default()),
            leading: watch::Sender::new(None),
            ending: watch::Sender::new(false),
            config,
            client,
        })
    }

    /// Serves everything that others ask of this process, also while it does not lead.
    async fn listen(&self) -> Result<Tasks, OperatorError> {
        let config = &self.config;
        let secure = bind(config.listen).await?;
        let plain = bind(config.plain_listen).await?;
        let record = match config.record_listen {
            None => None,
            Some(address) if !address.ip().is_loopback() => return Err(OperatorError::RecordListen { address }),
            Some(address) => Some(bind(address).await?),
        };
        let tls = TlsAcceptor::from(self.authority.server_config(&config.server_names)?);
        let leading = || self.leading.subscribe();
        let served = ServerState::new(leading(), self.metrics.clone(), self.health.clone(), self.ending.subscribe())
            .with_inside(config.inside_image.as_deref());
        let serve = |listener, router, tls, limits| {
            http::listen::serve(
                listener,
                router,
                tls,
                Peers::new(limits),
                self.metrics.clone(),
                self.ending.subscribe(),
            )
        };

        let mut listeners = Tasks::new(self.health.clone());
        // A listener waits for as long as no connection comes.
        let mut spawn = |name, serve| listeners.spawn_within(name, Duration::MAX, serve);
        let router = http::serve::secure(served.clone());
        spawn("the listener for node agents", serve(secure, router, Some(tls), Limits::default()));
        let limits = Limits { connections: PLAIN_CONNECTIONS, ..Limits::default() };
        spawn("the listener for health and metrics", serve(plain, http::serve::plain(served), None, limits));
        if let Some(record) = record {
            let router = http::record::router(leading(), self.records.clone());
            let limits = Limits { connections: RECORD_CONNECTIONS, ..Limits::default() };
            spawn("the listener for recorded decisions", serve(record, router, None, limits));
        }
        Ok(listeners)
    }

    /// Stands for election until `release` turns true: then the lease is given up.
    fn elect(&self, may_lead: watch::Sender<bool>, release: watch::Receiver<bool>) -> Tasks {
        let mut election = Tasks::new(self.health.clone());
        let candidate = Election::new(lease::identity(self.config.pod_name.as_deref()));
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.config.namespace);
        let task = lease::run(leases, self.config.lease.clone(), candidate, may_lead, release);
        election.spawn_within("the election", ELECTION_QUIET, task);
        election
    }

    /// Everything a leader does, as tasks that end when the set is dropped.
    fn lead(&self) -> Tasks {
        let (config, client, records) = (&self.config, &self.client, &self.records);
        let reviewer = http::auth::Reviewer::new(client.clone(), &config.namespace, &config.agent_account);
        let leader = Arc::new(Leader::new(self.metrics.clone(), started()));
        leader.change(|world| world.own_namespace.clone_from(&config.namespace));
        let shares = Shares::new(leader.clone(), client.clone(), self.metrics.clone());
        let shares = Arc::new(shares.with_fail_point(config.fail_at.clone()));
        let reporter = Reporter {
            controller: gainshare_kube_api::names::CONTROLLER.to_owned(),
            instance: config.pod_name.clone(),
        };
        let recorder = Recorder::new(client.clone(), reporter);

        let mut tasks = Tasks::new(self.health.clone());
        state::watch::start(&mut tasks, &leader, client, (&config.namespace, &config.config_map), config.tfjobs);
        let publish = http::publish::run(config.clone(), client.clone(), self.authority.certificate_pem().to_owned());
        tasks.spawn("the publication of the certificate", publish);
        tasks.spawn("the restoration of pods", restore_loop(shares.clone()));
        let decision = placement::run::run(leader.clone(), config.specon, records.clone());
        tasks.spawn_within("the decision about training jobs", DECISION_QUIET, decision);
        let sizes = elastic::run::run(shares.clone(), config.elastic, records.clone());
        tasks.spawn_within("the decision about the sizes of tasks", DECISION_QUIET, sizes);
        let settings = scaler::run::Settings::of(config);
        let nodes = scaler::run::run(leader.clone(), client.clone(), recorder.clone(), settings);
        tasks.spawn_within("the decision about new nodes", DECISION_QUIET, nodes);
        let settings = (config.fail_at.clone(), config.queues.clone());
        crate::jobs::start(&mut tasks, &leader, client, recorder.clone(), settings);
        let invalid = state::invalid_objects::run(leader.invalid.clone(), recorder.clone());
        tasks.spawn("the reporter of invalid objects", invalid);
        tasks.spawn("the writer of pods' notes", note_loop(shares.clone(), recorder.clone()));
        tasks.spawn("the writer of policies' statuses", write_loop(shares.clone(), client.clone(), recorder));
        self.leading.send_replace(Some(Arc::new(LeaderContext { leader, shares, reviewer })));
        tasks
    }
}

async fn restore_loop(shares: Arc<Shares>) {
    let mut pauses = shares::restore::Pauses::default();
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if shares.leader.is_synced() {
            shares::restore::pass(&shares, &mut pauses).await;
        }
    }
}

/// Notes follow soon after the resizes they describe: a kubelet acts later on a pod that has just changed.
async fn note_loop(shares: Arc<Shares>, recorder: Recorder) {
    loop {
        tokio::time::sleep(NOTE_EVERY).await;
        if shares.leader.is_synced() {
            shares::notes::pass(&shares, &recorder, shares.leader.take_pods()).await;
        }
    }
}

async fn write_loop(shares: Arc<Shares>, client: Client, recorder: Recorder) {
    let leader = &shares.leader;
    let mut checked = Instant::now();
    loop {
        tokio::time::sleep(WRITE_EVERY).await;
        // Without a change policies are checked, too: an agent may have fallen silent.
        let _ = tokio::time::timeout(CHECK_EVERY, leader.work.notified()).await;
        if !leader.is_synced() {
            continue;
        }
        if checked.elapsed() >= CHECK_EVERY {
            checked = Instant::now();
            leader.mark_all_policies();
        }
        let again = shares::policies::pass(&shares, &client, &recorder, leader.take_policies()).await;
        count(&shares);
        if !again.is_empty() {
            leader.mark_policies(again);
            tokio::time::sleep(WRITE_PAUSE).await;
        }
    }
}

fn count(shares: &Shares) {
    let leader = &shares.leader;
    let shared: BTreeSet<PodUid> = leader.read(|world| world.all_shared().map(|pod| pod.uid.clone()).collect());
    shares.contests.lock().keep(|uid| shared.contains(uid));
    let (pods, blocked) = leader
        .read(|world| (world.all_shared().count(), world.all_shared().filter(|pod| pod.blocked.is_some()).count()));
    let of_task_jobs = leader.read(|world| world.jobs.deadline_states());
    leader.metrics.pods.set(pods as i64);
    leader.metrics.blocked.set(blocked as i64);
    let now = Instant::now();
    let mut agents = leader.agents.lock();
    agents.forget_silent(now);
    leader.metrics.agents.set(agents.heard_count(now) as i64);
    let of_pods = agents.deadline_states();
    for state in [DeadlineState::Unknown, DeadlineState::OnTime, DeadlineState::AtRisk, DeadlineState::Missed] {
        let labels = state::metrics::StateLabels { state: state.name() };
        let number = |counts: &BTreeMap<DeadlineState, u32>| counts.get(&state).copied().unwrap_or(0);
        let number = i64::from(number(&of_pods)).saturating_add(number(&of_task_jobs).into());
        leader.metrics.deadlines.get_or_create(&labels).set(number);
    }
    for (category, number) in agents.counts(now) {
        leader
            .metrics
            .jobs
            .get_or_create(&state::metrics::CategoryLabels { category: category.name() })
            .set(number.into());
    }
}

/// Microseconds since 1970: a leader's revisions differ from those of earlier leaders.
fn started() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

async fn bind(address: SocketAddr) -> Result<TcpListener, OperatorError> {
    TcpListener::bind(address).await.map_err(|source| OperatorError::Listen { address, source })
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
