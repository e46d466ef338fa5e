//! The node agent: the part of Gainshare that runs on every node of a cluster.
//!
//! **Problem.** Output and resource use of containers can be read on their node only, but a program on a node
//! should have no rights at the API server that reach beyond the node.
//!
//! **How.** One thread owns all state that changes ([`state`]): it reads the logs of selected containers
//! ([`logs`], [`cri`]), the files of metrics in their volumes ([`volumes`]), the control groups of their pods
//! ([`cgroups`]) and what tasks send and receive ([`traffic`]). It keeps what is known of each pod ([`job`]), runs the
//! decisions, and predicts ends ([`finish`]). Beside it [`link`] exchanges state with the operator: pods and outcomes
//! in, reports and resizes out. [`serve`] answers the kubelet's probes, and [`record`] serves recorded decisions.
//!
//! **Properties.** The node agent writes no kernel setting and no object; every change of a pod goes through the
//! operator. The only files that it writes are the pages of the library inside pods ([`inside`]), where the
//! administrator allows that: the sizes of teams, and shares of GPUs ([`gpu`]). While the operator is away, limits stay
//! and decisions go on. Nothing is kept on disk.

mod cgroups;
mod cri;
mod finish;
mod gpu;
mod inside;
mod job;
mod link;
mod logs;
mod record;
mod serve;
mod state;
mod traffic;
mod volumes;

pub use cgroups::CgroupError;
pub use link::{Link, LinkError};

use cgroups::PodGroups;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use gainshare_core::backoff::Backoff;
use gainshare_core::model::{Span, Time};
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::wire::{Answer, FinishedPod, JobReport, NodeTotals, ReportedCategory, Resize, SyncRequest};
use gainshare_limits::{Capacity, machine};
use inside::Teams;
use job::Moment;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};
use record::RecordRequest;
use serve::Status;
use state::{Node, StepReport};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::Instant;
use traffic::HostProcesses;
use volumes::Volumes;

/// How often reports of jobs that the operator may move are sent, while there are new ones.
const FOLLOW_PACE: Span = Span::from_secs(2);

/// How often logs and counters are read. Decisions come every few seconds, so reading more often gains nothing.
const READ_PACE: Span = Span::from_millis(500);

/// How often logs and counters are read while a resize is under way, to measure when it takes effect.
const EFFECT_PACE: Span = Span::from_millis(50);

/// How long the operator may hold an answer. The next request carries the progress of the jobs, so this is
/// also the interval of the heartbeat.
const WAIT_MS: u32 = 10_000;

/// Requests under way at the same time: one that waits for news, and urgent ones that were sent meanwhile.
const MAX_REQUESTS: usize = 4;

/// The settings of a node agent.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// The node's name in the cluster.
    pub node: NodeName,
    /// `https://host:port`
    pub operator: String,
    pub ca_file: PathBuf,
    pub token_file: PathBuf,
    /// The host's `/var/log/pods`.
    pub logs: PathBuf,
    /// The host's `/var/lib/kubelet/pods`, if the agent may read files in volumes of pods.
    pub volumes: Option<PathBuf>,
    /// The same folder, if the agent may write the pages of the library inside pods there.
    pub pages: Option<PathBuf>,
    /// The host's `/sys/fs/cgroup`.
    pub cgroups: PathBuf,
    /// The host's `/proc`, if the traffic of tasks is measured.
    pub processes: Option<PathBuf>,
    /// Where health and metrics are served.
    pub listen: SocketAddr,
    /// Where recorded decisions are served: a loopback address, or nowhere.
    pub record_listen: Option<SocketAddr>,
}

/// Why a node agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Cgroups(#[from] CgroupError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("{path} is not a directory: mount the host's /var/log/pods there, read-only")]
    NoLogs { path: String },
    #[error(
        "{path} is not a directory: mount the host's /var/lib/kubelet/pods there, read-only, or leave --pod-volumes out"
    )]
    NoVolumes { path: String },
    #[error("cannot open {path}: {source}; mount the host's /var/lib/kubelet/pods there, or leave --pod-pages out")]
    NoPages { path: String, source: std::io::Error },
    #[error("{path} is not a directory: mount the host's /proc there, read-only, or leave --host-proc out")]
    NoProcesses { path: String },
    #[error("cannot start the thread of the node: {source}; is the limit of processes or memory too low?")]
    Thread { source: std::io::Error },
    #[error("cannot listen on {address}: {source}; choose another with --listen")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(
        "--record-listen {address} is not a loopback address: records are served without a token, so nothing outside the pod may reach them"
    )]
    RecordListen { address: SocketAddr },
}

/// What the node's thread reacts to.
enum Input {
    /// From the operator.
    Answer(Answer),
    /// From a user who wants a recorded decision.
    Record(RecordRequest),
}

/// The node's state after the last step, for the operator.
#[derive(Debug, Clone, Default)]
struct NodeReport {
    beat: NodeTotals,
    jobs: Arc<Vec<JobReport>>,
    resizes: Vec<Resize>,
    finished: Vec<FinishedPod>,
    /// Counts the changes that should be sent at once.
    urgent: u64,
}

/// Runs until `stop` is ready. Limits stay as they are when it ends.
pub async fn run(config: AgentConfig, stop: impl Future<Output = ()>) -> Result<(), AgentError> {
    let link = Link::new(&config.operator, &config.ca_file, &config.token_file)?;
    let groups = PodGroups::at(&config.cgroups)?;
    if !config.logs.is_dir() {
        return Err(AgentError::NoLogs { path: config.logs.display().to_string() });
    }
    if let Some(path) = config.volumes.as_ref().filter(|path| !path.is_dir()) {
        return Err(AgentError::NoVolumes { path: path.display().to_string() });
    }
    let teams = match &config.pages {
        Some(path) => {
            Teams::at(path).map_err(|source| AgentError::NoPages { path: path.display().to_string(), source })?
        }
        None => Teams::default(),
    };
    if let Some(path) = config.processes.as_ref().filter(|path| !path.is_dir()) {
        return Err(AgentError::NoProcesses { path: path.display().to_string() });
    }
    let listener = tokio::net::TcpListener::bind(config.listen)
        .await
        .map_err(|source| AgentError::Listen { address: config.listen, source })?;
    let record_listener = match config.record_listen {
        None => None,
        Some(address) if !address.ip().is_loopback() => return Err(AgentError::RecordListen { address }),
        Some(address) => {
            let bound = tokio::net::TcpListener::bind(address).await;
            Some(bound.map_err(|source| AgentError::Listen { address, source })?)
        }
    };
    let status = Status::new();
    let (inputs_in, inputs) = mpsc::channel();
    let (report_in, report) = watch::channel(NodeReport::default());
    let volumes = Volumes::at(config.volumes.clone());
    let processes = HostProcesses::at(config.processes.clone());
    let node = Node::new(&config.logs, volumes, groups, processes, machine(), now()).with_teams(teams);
    let thread_status = status.clone();
    let thread = std::thread::Builder::new().name("node".into());
    thread
        .spawn(move || run_node(node, &inputs, &report_in, &thread_status))
        .map_err(|source| AgentError::Thread { source })?;
    tracing::info!(node = config.node.as_str(), operator = config.operator, "the node agent runs");
    let server = axum::serve(listener, serve::router(status.clone()));
    let record_router = record::router(inputs_in.clone());
    let record_server = async {
        match record_listener {
            Some(listener) => drop(axum::serve(listener, record_router).await),
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = stop => {}
        _ = server => {}
        () = record_server => {}
        () = exchange(link, &config.node, report, inputs_in, &status) => {}
    }
    Ok(())
}

/// The loop of the thread that owns the node's state. Ends when all senders of inputs are gone.
fn run_node(mut node: Node, inputs: &mpsc::Receiver<Input>, report: &watch::Sender<NodeReport>, status: &Status) {
    // Reports of jobs that were not sent to the operator yet, and when reports were last sent.
    let (mut unsent_reports, mut sent_at) = (0, Time::ZERO);
    loop {
        while let Ok(input) = inputs.try_recv() {
            handle(&mut node, input, status);
        }
        let begun = std::time::Instant::now();
        let at = now();
        let step = node.step(at, machine::idle_s(Path::new(machine::ROOT)));
        if step.plans > 0 {
            status.decision_seconds.observe(begun.elapsed().as_secs_f64());
        }
        let beat = NodeTotals { at_us: now().time.0, ..node.beat() };
        publish_metrics(status, &step, &beat, node.dropped_lines());
        unsent_reports += step.reports;
        let is_awaited = node.has_scaled_jobs() || (node.has_followed_jobs() && unsent_reports > 0);
        let has_reports = is_awaited && at.time >= sent_at + FOLLOW_PACE;
        if has_reports || step.is_urgent {
            (unsent_reports, sent_at) = (0, at.time);
        }
        report.send_modify(|report| {
            report.beat = beat;
            let jobs = node.states();
            if *report.jobs != jobs {
                report.jobs = Arc::new(jobs);
            }
            report.resizes = node.resizes();
            report.finished = node.finished();
            report.urgent += u64::from(step.is_urgent || has_reports);
        });
        status.set_alive();
        let pace = match (step.more, node.awaits_effect(at.time)) {
            (true, _) => Span::ZERO,
            (false, true) => EFFECT_PACE,
            (false, false) => READ_PACE,
        };
        let until = node.due().map_or(at.time + pace, |due| due.min(at.time + pace));
        let wait = Duration::from_micros(until.since(now().time).0);
        match inputs.recv_timeout(wait) {
            Ok(input) => handle(&mut node, input, status),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Gives the node what has come from the operator, or answers a user.
fn handle(node: &mut Node, input: Input, status: &Status) {
    let answer = match input {
        Input::Answer(answer) => answer,
        Input::Record(request) => return request.answer(|uid| node.last_decision(uid)),
    };
    let now = now();
    node.record_outcomes(now.time, &answer.outcomes);
    if let Some(pods) = answer.pods {
        node.set_pods(now, pods);
        status.has_pods.store(true, Ordering::Relaxed);
    }
}

fn publish_metrics(status: &Status, step: &StepReport, beat: &NodeTotals, dropped_lines: u64) {
    status.reports.inc_by(step.reports);
    status.refused_reports.inc_by(step.refused_reports);
    status.plans.inc_by(step.plans);
    status.plans_rejected.inc_by(step.plans_rejected);
    step.effects_s.iter().for_each(|s| status.effect_seconds.observe(*s));
    status.dropped_lines.set(i64::try_from(dropped_lines).unwrap_or(i64::MAX));
    let counts = [
        (ReportedCategory::Growing, beat.growing),
        (ReportedCategory::Watching, beat.watching),
        (ReportedCategory::Converged, beat.converged),
    ];
    for (category, count) in counts {
        status.jobs.get_or_create(&[("category", category.name())]).set(count.into());
    }
}

/// The list of jobs in a request or on the operator's side.
type JobList = Arc<Vec<JobReport>>;

/// What was sent to the operator, and what is known of its side.
struct Exchange<'a> {
    node: &'a NodeName,
    status: &'a Status,
    epoch: u64,
    /// The number of the last request.
    seq: u64,
    /// The number of the newest answer.
    answered_seq: u64,
    /// The revision of the operator's list that the agent has.
    seen: u64,
    /// The list of jobs that the operator has; `None` if the operator may have lost it.
    sent_jobs: Option<JobList>,
    retries: Backoff,
    /// After a failure, nothing is sent before this moment.
    not_before: Instant,
    last_error: String,
}

impl<'a> Exchange<'a> {
    fn new(node: &'a NodeName, status: &'a Status) -> Exchange<'a> {
        Exchange {
            node,
            status,
            epoch: now().unix_ns / 1000,
            seq: 0,
            answered_seq: 0,
            seen: 0,
            sent_jobs: None,
            retries: link::retries(node),
            not_before: Instant::now(),
            last_error: String::new(),
        }
    }

    /// The next request, and the list of jobs in it, which is left out if the operator has it.
    fn request(&mut self, latest: NodeReport) -> (SyncRequest, Option<JobList>) {
        self.seq += 1;
        let jobs = (self.sent_jobs.as_ref() != Some(&latest.jobs)).then_some(latest.jobs);
        let sync = SyncRequest {
            node: self.node.clone(),
            epoch: self.epoch,
            seq: self.seq,
            seen: self.seen,
            wait_ms: WAIT_MS,
            beat: latest.beat,
            jobs: jobs.as_deref().cloned(),
            resizes: latest.resizes,
            finished: latest.finished,
        };
        (sync, jobs)
    }

    /// Keeps what an answer to a request with this list of jobs tells; `None` if a later request was answered before.
    fn accept(&mut self, answer: Answer, jobs: Option<JobList>) -> Option<Answer> {
        if !self.last_error.is_empty() {
            tracing::info!("the operator answers again");
            self.last_error.clear();
        }
        self.status.syncs.get_or_create(&[("result", "ok")]).inc();
        self.status.connected.set(1);
        self.retries.reset();
        self.sent_jobs = jobs.or(self.sent_jobs.take()).filter(|_| !answer.want_jobs);
        if answer.seq < self.answered_seq {
            return None;
        }
        (self.answered_seq, self.seen) = (answer.seq, answer.revision);
        Some(answer)
    }

    fn fail(&mut self, error: String) {
        if error != self.last_error {
            tracing::warn!("{error}; limits stay as they are, trying again");
            self.last_error = error;
        }
        self.status.syncs.get_or_create(&[("result", "failed")]).inc();
        self.status.connected.set(0);
        // Another replica may answer next. Its lists have other revisions, and it has no list of jobs.
        (self.sent_jobs, self.seen) = (None, 0);
        self.not_before = Instant::now() + self.retries.next_pause();
    }
}

/// Exchanges state with the operator until the node's thread has ended.
async fn exchange(
    link: Link,
    node: &NodeName,
    mut report: watch::Receiver<NodeReport>,
    inputs: mpsc::Sender<Input>,
    status: &Status,
) {
    let mut exchange = Exchange::new(node, status);
    let mut under_way = FuturesUnordered::new();
    let mut urgent_sent = 0;
    loop {
        let latest = report.borrow_and_update().clone();
        let has_news = latest.urgent != urgent_sent && under_way.len() < MAX_REQUESTS;
        if (under_way.is_empty() || has_news) && Instant::now() >= exchange.not_before {
            urgent_sent = latest.urgent;
            let (sync, jobs) = exchange.request(latest);
            let mut link = link.clone();
            under_way.push(async move { (jobs, link.sync(&sync).await) });
        }
        let retry = tokio::time::sleep_until(exchange.not_before);
        tokio::select! {
            Some((jobs, result)) = under_way.next() => match result {
                Ok(answer) => {
                    let Some(answer) = exchange.accept(answer, jobs) else { continue };
                    if inputs.send(Input::Answer(answer)).is_err() {
                        return;
                    }
                    // The next request should carry the result of this answer.
                    let _ = tokio::time::timeout(Duration::from_millis(200), report.changed()).await;
                }
                Err(error) => exchange.fail(error.to_string()),
            },
            () = retry, if under_way.is_empty() => {}
            changed = report.changed() => if changed.is_err() { return },
        }
    }
}

/// The present moment on the boot clock, which counts suspended time and cannot be set, and on the wall clock.
fn now() -> Moment {
    let boot_us =
        clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |t| t.tv_sec() as u64 * 1_000_000 + t.tv_nsec() as u64 / 1000);
    let unix_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    Moment { time: Time(boot_us), unix_ns }
}

/// The cores and the memory of the machine, also those that the agent's own limits exclude.
fn machine() -> Capacity {
    let cores = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten().unwrap_or(1);
    Capacity { cores: cores.max(1) as f64, memory_bytes: machine::memory_bytes(Path::new(machine::ROOT)) }
}
