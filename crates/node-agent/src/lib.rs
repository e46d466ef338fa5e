//! `gainshare agent`: the part of Gainshare that runs on every node.
//!
//! **Problem.** Only the node sees what its containers print and use, but nothing on a node should have
//! rights at the API server that reach beyond it.
//!
//! **How.** One thread owns all that changes ([`state`]): it follows the logs of selected containers
//! ([`logs`], [`cri`]), reads their pods' control groups ([`cgroups`]) and runs the decisions. Next to it
//! [`link`] exchanges state with the manager: pods and outcomes in, reports and wanted resizes out.
//! [`serve`] tells the kubelet that all is well.
//!
//! **Properties.** The agent writes nothing anywhere: no file, no kernel setting, no object; every change
//! goes through the manager. While the manager is away, limits hold and decisions go on. Nothing is kept on
//! disk.

mod cgroups;
mod cri;
mod job;
mod link;
mod logs;
mod record;
mod serve;
mod state;
mod volumes;

pub use cgroups::CgroupError;
pub use link::{Link, LinkError};

use cgroups::PodGroups;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use gainshare_core::model::{Span, Time};
use gainshare_kube_api::wire::{Answer, Beat, Category, JobState, Resize, SyncRequest};
use gainshare_limits::{Capacity, machine};
use job::Now;
use link::Pause;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};
use record::RecordRequest;
use serve::Status;
use state::Node;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::Instant;
use volumes::Volumes;

/// How often the manager hears of jobs that it may move, while they report.
const FOLLOW_PACE: Span = Span::from_secs(2);

/// How often logs and counters are looked at. Decisions come every few seconds at most, so sooner is of no use.
const LOOK_PACE: Span = Span::from_millis(500);

/// How often we look while a resize is under way, to know when it took effect.
const EFFECT_PACE: Span = Span::from_millis(50);

/// How long the manager may hold an answer; the next request carries the jobs' progress, so this is also
/// the heartbeat.
const WAIT_MS: u32 = 10_000;

/// Requests under way at once: one that waits, and what became urgent meanwhile.
const MOST_REQUESTS: usize = 4;

/// What an agent needs to know.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// The node's name in the cluster.
    pub node: String,
    /// `https://host:port`
    pub manager: String,
    pub ca_file: PathBuf,
    pub token_file: PathBuf,
    /// The host's `/var/log/pods`.
    pub logs: PathBuf,
    /// The host's `/var/lib/kubelet/pods`, where we may look into pods' volumes.
    pub volumes: Option<PathBuf>,
    /// The host's `/sys/fs/cgroup`.
    pub cgroups: PathBuf,
    /// Where health and metrics are served.
    pub listen: SocketAddr,
    /// Where recorded decisions are served: a loopback address, or nowhere.
    pub record_listen: Option<SocketAddr>,
}

/// Why an agent cannot run.
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

/// What the manager should know, as of the last look.
#[derive(Debug, Clone, Default)]
struct Outgoing {
    beat: Beat,
    jobs: Arc<Vec<JobState>>,
    resizes: Vec<Resize>,
    /// Counts what should go out at once.
    urgent: u64,
}

/// Runs until `stop` is ready. Limits stay as they are when it ends.
pub async fn run(config: AgentConfig, stop: impl Future<Output = ()>) -> Result<(), AgentError> {
    let link = Link::new(&config.manager, &config.ca_file, &config.token_file)?;
    let groups = PodGroups::at(&config.cgroups)?;
    if !config.logs.is_dir() {
        return Err(AgentError::NoLogs { path: config.logs.display().to_string() });
    }
    if let Some(path) = config.volumes.as_ref().filter(|path| !path.is_dir()) {
        return Err(AgentError::NoVolumes { path: path.display().to_string() });
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
    let (outgoing_in, outgoing) = watch::channel(Outgoing::default());
    let volumes = Volumes::at(config.volumes.clone());
    let node = Node::new(&config.logs, volumes, groups, machine(), now());
    let looking = std::thread::Builder::new().name("node".into());
    let loop_status = status.clone();
    let looking = looking.spawn(move || look_and_decide(node, &inputs, &outgoing_in, &loop_status));
    if let Err(source) = looking {
        return Err(AgentError::Listen { address: config.listen, source });
    }
    tracing::info!(node = config.node, manager = config.manager, "the agent runs");
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
        () = exchange(link, &config.node, outgoing, inputs_in, &status) => {}
    }
    Ok(())
}

/// The loop of the thread that owns the node's state. Ends when nobody listens any more.
fn look_and_decide(
    mut node: Node,
    inputs: &mpsc::Receiver<Input>,
    outgoing: &watch::Sender<Outgoing>,
    status: &Status,
) {
    let take = |node: &mut Node, input: Input| {
        let answer = match input {
            Input::Answer(answer) => answer,
            Input::Record(request) => return request.answer(node),
        };
        let now = now();
        node.take_outcomes(now.time, &answer.outcomes);
        if let Some(pods) = answer.pods {
            node.take_pods(now, pods);
            status.has_pods.store(true, Ordering::Relaxed);
        }
    };
    // Reports that the manager has not heard of, and when it last heard.
    let (mut unsaid, mut said_at) = (0, Time::ZERO);
    loop {
        while let Ok(input) = inputs.try_recv() {
            take(&mut node, input);
        }
        let begun = std::time::Instant::now();
        let at = now();
        let happened = node.step(at, machine::idle_s(Path::new(machine::ROOT)));
        if happened.plans > 0 {
            status.decision_seconds.observe(begun.elapsed().as_secs_f64());
        }
        status.reports.inc_by(happened.reports);
        status.refused_reports.inc_by(happened.refused_reports);
        status.plans.inc_by(happened.plans);
        status.bad_plans.inc_by(happened.bad_plans);
        happened.effects_s.iter().for_each(|s| status.effect_seconds.observe(*s));
        status.dropped_lines.set(i64::try_from(node.dropped_lines()).unwrap_or(i64::MAX));
        let beat = Beat { at_us: now().time.0, ..node.beat() };
        let counts = [
            (Category::Growing, beat.growing),
            (Category::Watching, beat.watching),
            (Category::Converged, beat.converged),
        ];
        for (category, count) in counts {
            status.jobs.get_or_create(&[("category", category.name())]).set(count.into());
        }
        unsaid += happened.reports;
        let is_news = node.is_followed() && unsaid > 0 && at.time >= said_at + FOLLOW_PACE;
        if is_news || happened.is_urgent {
            (unsaid, said_at) = (0, at.time);
        }
        outgoing.send_modify(|out| {
            out.beat = beat;
            let jobs = node.states();
            if *out.jobs != jobs {
                out.jobs = Arc::new(jobs);
            }
            out.resizes = node.resizes();
            out.urgent += u64::from(happened.is_urgent || is_news);
        });
        status.came_round();
        let pace = match (happened.more, node.awaits_effect(at.time)) {
            (true, _) => Span::ZERO,
            (false, true) => EFFECT_PACE,
            (false, false) => LOOK_PACE,
        };
        let until = node.due().map_or(at.time + pace, |due| due.min(at.time + pace));
        let wait = Duration::from_micros(until.since(now().time).0);
        match inputs.recv_timeout(wait) {
            Ok(input) => take(&mut node, input),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Exchanges state with the manager for ever.
async fn exchange(
    link: Link,
    node: &str,
    mut outgoing: watch::Receiver<Outgoing>,
    inputs: mpsc::Sender<Input>,
    status: &Status,
) {
    let epoch = now().unix_ns / 1000;
    let mut pause = Pause::of(node);
    let mut under_way = FuturesUnordered::new();
    let (mut seq, mut latest_answer, mut seen) = (0, 0, 0);
    let mut urgent_sent = 0;
    // What the manager has been told of the jobs; nothing if it may have forgotten.
    let mut told: Option<Arc<Vec<JobState>>> = None;
    let mut not_before = Instant::now();
    let mut complaint = String::new();
    loop {
        let out = outgoing.borrow_and_update().clone();
        let has_news = out.urgent != urgent_sent && under_way.len() < MOST_REQUESTS;
        if (under_way.is_empty() || has_news) && Instant::now() >= not_before {
            urgent_sent = out.urgent;
            seq += 1;
            let jobs = (told.as_ref() != Some(&out.jobs)).then(|| out.jobs.clone());
            let sync = SyncRequest {
                node: node.to_owned(),
                epoch,
                seq,
                seen,
                wait_ms: WAIT_MS,
                beat: out.beat,
                jobs: jobs.as_deref().cloned(),
                resizes: out.resizes,
            };
            let mut link = link.clone();
            under_way.push(async move { (jobs, link.ask(&sync).await) });
        }
        let retry = tokio::time::sleep_until(not_before);
        tokio::select! {
            Some((jobs, result)) = under_way.next() => match result {
                Ok(answer) => {
                    if !complaint.is_empty() {
                        tracing::info!("the manager answers again");
                        complaint.clear();
                    }
                    status.syncs.get_or_create(&[("result", "ok")]).inc();
                    status.connected.set(1);
                    pause.succeeded();
                    told = jobs.or(told).filter(|_| !answer.want_jobs);
                    if answer.seq < latest_answer {
                        continue;
                    }
                    latest_answer = answer.seq;
                    seen = answer.revision;
                    if inputs.send(Input::Answer(answer)).is_err() {
                        return;
                    }
                    // The next request should say what was made of this answer.
                    let _ = tokio::time::timeout(Duration::from_millis(200), outgoing.changed()).await;
                }
                Err(error) => {
                    let error = error.to_string();
                    if error != complaint {
                        tracing::warn!("{error}; limits hold, trying again");
                        complaint = error;
                    }
                    status.syncs.get_or_create(&[("result", "failed")]).inc();
                    status.connected.set(0);
                    // Another replica may answer next. Its lists have other numbers, and it does not know this agent.
                    (told, seen) = (None, 0);
                    not_before = Instant::now() + pause.failed();
                }
            },
            () = retry, if under_way.is_empty() => {}
            changed = outgoing.changed() => if changed.is_err() { return },
        }
    }
}

/// The moment on the boot clock, which counts suspended time and which nobody can set, and on the wall.
fn now() -> Now {
    let boot_us =
        clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |t| t.tv_sec() as u64 * 1_000_000 + t.tv_nsec() as u64 / 1000);
    let unix_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    Now { time: Time(boot_us), unix_ns }
}

/// What the machine has, whatever the agent itself may use of it.
fn machine() -> Capacity {
    let cores = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten().unwrap_or(1);
    Capacity { cores: cores.max(1) as f64, memory_bytes: machine::memory_bytes(Path::new(machine::ROOT)) }
}
