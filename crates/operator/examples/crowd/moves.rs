//! All node agents of a cluster of training jobs in one process: what do they cost the operator?
//!
//! **Phases.** *Start*: the operator finds a cluster full of jobs that run, as after a change of
//! the leader: how long until it has everything in view, and until all nodes have been heard?
//! *Idle*: jobs go on and nothing changes. *Burst*: many jobs come at once. *Moves*: some jobs stop
//! growing, and SpeCon sends them to nodes with less to do. *Return* is a start again, after the
//! operator was killed; as many jobs as in the burst came while it was away, so that it finds them
//! all at once.

use super::connection::{BUSY_NODE, Connection, Message};
use super::fill::{converges, job};
use super::log::{Pass, passes, sum_up};
use super::measure::{Counts, Mark, OF_JOBS, leads, metric, page, process, settled, spread, wait};
use super::prepare::create_jobs;
use super::{Plan, Result};
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::wire::{
    JobReport, NodeTotals, PodOnNode, Progress, ReportedCategory, ReportedSignal, ReportedValue,
};
use kube::Client;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The operator has settled when it has written nothing for this time.
const QUIET: Duration = Duration::from_secs(12);

/// Jobs' first values.
const FIRST: f64 = 2.3;

/// What all agents share.
#[derive(Default)]
struct Crowd {
    /// Jobs that are meant to do so stop growing.
    converge: AtomicBool,
    answered: Mutex<Vec<Duration>>,
    failures: AtomicU64,
    /// Agents that have reported their jobs.
    reported: AtomicU64,
}

impl Crowd {
    fn take_answered(&self) -> Value {
        spread(&mut std::mem::take(&mut *self.answered.lock().expect("never poisoned")))
    }
}

/// One reading of all counters, and the operator's passes before it.
struct PassMark {
    counters: Mark,
    passes: usize,
}

impl PassMark {
    async fn now(plan: &Plan, client: &Client) -> Result<PassMark> {
        Ok(PassMark { counters: Mark::now(plan, client, OF_JOBS).await?, passes: passes(&plan.log)?.len() })
    }

    fn elapsed_s(&self) -> f64 {
        self.counters.at.elapsed().as_secs_f64()
    }

    /// What happened since then.
    async fn since(&self, plan: &Plan, client: &Client, crowd: &Crowd) -> Result<(Value, Counts)> {
        let span = self.counters.since(plan, client).await?;
        let all: Vec<Pass> = passes(&plan.log)?;
        let figures = json!({
            "seconds": span.seconds, "pass": sum_up(&all[self.passes.min(all.len())..]), "writes": span.counts.json(),
            "operator_cores": span.cores(), "sync": crowd.take_answered(),
        });
        Ok((figures, span.counts))
    }
}

pub(super) async fn run(plan: &Plan, client: &Client) -> Result<Value> {
    let (crowd, start) = begin(plan, client).await?;
    // The writes that follow the first reports of the agents.
    settled(&plan.metrics, QUIET).await?;
    let start = json!({"until": start.0, "to_the_last_write": start.1.since(plan, client, &crowd).await?.0});
    eprintln!("crowd: {start}");

    let mark = PassMark::now(plan, client).await?;
    tokio::time::sleep(Duration::from_secs(plan.idle_s)).await;
    let (mut idle, counts) = mark.since(plan, client, &crowd).await?;
    idle["writes_a_minute"] = json!(counts.ours() * 60.0 / plan.idle_s.max(1) as f64);
    eprintln!("crowd: {idle}");

    let burst = burst(plan, client, &crowd).await?;
    eprintln!("crowd: {burst}");
    let moves = moves(plan, client, &crowd).await?;
    let (peak_rss_mib, cpu_s) = process(plan.operator_pid)?;
    Ok(json!({
        "nodes": plan.nodes, "jobs": plan.running + plan.coming, "operator_peak_rss_mib": peak_rss_mib, "operator_cpu_s": cpu_s,
        "failed_syncs": crowd.failures.load(Ordering::Relaxed), "start": start, "idle": idle, "burst": burst, "moves": moves,
        "all_passes": sum_up(&full(&passes(&plan.log)?, plan.running)),
    }))
}

/// The operator was killed and another one started.
pub(super) async fn after_return(plan: &Plan, client: &Client) -> Result<Value> {
    let (crowd, (mut until, mark)) = begin(plan, client).await?;
    until["all_bound_s"] = json!(all_bound(plan, client, &mark).await?);
    settled(&plan.metrics, QUIET).await?;
    let (after, _) = mark.since(plan, client, &crowd).await?;
    let (peak_rss_mib, _) = process(plan.operator_pid)?;
    Ok(json!({
        "until": until, "to_the_last_write": after, "operator_peak_rss_mib": peak_rss_mib,
        "all_passes": sum_up(&full(&passes(&plan.log)?, plan.running)),
    }))
}

/// Passes with all of the jobs in view that ran from the start.
fn full(all: &[Pass], jobs: usize) -> Vec<Pass> {
    all.iter().filter(|pass| pass.jobs >= jobs).copied().collect()
}

/// From the operator's start until it knows everything; all times are since then.
async fn begin(plan: &Plan, client: &Client) -> Result<(Arc<Crowd>, (Value, PassMark))> {
    let mark = PassMark::now(plan, client).await?;
    leads(plan).await?;
    let leads_s = mark.elapsed_s();
    let crowd = Arc::new(Crowd::default());
    let shared = Arc::new(plan.clone());
    for node in 0..plan.nodes {
        let agent = Agent::new(&shared, node, crowd.clone())?;
        tokio::spawn(agent.live());
    }
    let in_view = || async { passes(&plan.log).is_ok_and(|all| !full(&all, plan.running).is_empty()) };
    wait("a pass with all jobs in view", in_view).await?;
    let in_view_s = mark.elapsed_s();
    let all = plan.nodes as u64;
    wait("every agent to have reported its jobs", || async { crowd.reported.load(Ordering::Relaxed) >= all }).await?;
    let heard_s = mark.elapsed_s();
    let until = json!({"leading_s": leads_s, "all_jobs_in_view_s": in_view_s, "all_nodes_heard_s": heard_s});
    Ok((crowd, (until, mark)))
}

/// Many jobs at once, and how they find their places.
async fn burst(plan: &Plan, client: &Client, crowd: &Arc<Crowd>) -> Result<Value> {
    let mark = PassMark::now(plan, client).await?;
    come(plan, client, "new").await?;
    let created_s = mark.elapsed_s();
    let bound_s = all_bound(plan, client, &mark).await?;
    settled(&plan.metrics, QUIET).await?;
    let (mut figures, counts) = mark.since(plan, client, crowd).await?;
    figures["jobs"] = json!(plan.coming);
    figures["created_s"] = json!(created_s);
    figures["bound_s"] = json!(bound_s);
    figures["writes_per_job"] = json!(counts.ours() / (plan.coming as f64).max(1.0));
    Ok(figures)
}

/// Creates as many jobs as come at once.
pub(super) async fn come(plan: &Plan, client: &Client, name: &str) -> Result<()> {
    create_jobs(client, plan.coming, |index| job(plan, &format!("{name}-{index}"), index, index)).await
}

/// Waits until those that came have a node, and answers after how many seconds.
async fn all_bound(plan: &Plan, client: &Client, mark: &PassMark) -> Result<f64> {
    mark.counters.until(client, "pod_bindings", plan.coming).await
}

/// Some jobs stop growing, and are moved.
async fn moves(plan: &Plan, client: &Client, crowd: &Arc<Crowd>) -> Result<Value> {
    let mark = PassMark::now(plan, client).await?;
    let ordered = || async {
        let text = page(&plan.metrics, "/metrics").await.unwrap_or_default();
        metric(&text, "gainshare_operator_orders_total", &["kind=\"move\""])
    };
    let before = ordered().await;
    crowd.converge.store(true, Ordering::Relaxed);
    // All but those few that find their own node good enough.
    let most = plan.converging as f64 * 0.8;
    wait("jobs to be moved", || async { ordered().await - before >= most }).await?;
    let ordered_s = mark.elapsed_s();
    settled(&plan.metrics, QUIET).await?;
    let made = ordered().await - before;
    let (mut figures, counts) = mark.since(plan, client, crowd).await?;
    figures["jobs_that_stopped_growing"] = json!(plan.converging);
    figures["moves"] = json!(made);
    figures["ordered_s"] = json!(ordered_s);
    figures["writes_per_move"] = json!(counts.ours() / made.max(1.0));
    Ok(figures)
}

/// One node's agent.
struct Agent {
    plan: Arc<Plan>,
    index: usize,
    connection: Connection,
    crowd: Arc<Crowd>,
    began: Instant,
    jobs: BTreeMap<PodUid, FollowedJob>,
}

/// A job as its agent follows it.
struct FollowedJob {
    container: String,
    first_us: u64,
    reports: u64,
    value: f64,
    /// How far it still went in its last round, once it has begun to converge.
    pace: Option<f64>,
    converges: bool,
}

impl FollowedJob {
    fn of(plan: &Plan, pod: &PodOnNode, now_us: u64) -> FollowedJob {
        let converges = converges(plan, &pod.name);
        FollowedJob {
            container: pod.container.clone(),
            first_us: now_us,
            reports: 1,
            value: FIRST,
            pace: None,
            converges,
        }
    }

    /// A round further: growing ones by four hundredths of their first value, converging ones by
    /// less each time.
    fn go_on(&mut self, converge: bool) {
        self.reports += 1;
        self.pace = (self.converges && converge).then(|| self.pace.unwrap_or(0.01) * 0.5);
        self.value += FIRST * self.pace.unwrap_or(0.04);
    }

    fn state(&self, uid: &PodUid, now_us: u64) -> JobReport {
        let step = self.reports * 100;
        let seconds = now_us.saturating_sub(self.first_us) as f64 * 1e-6;
        let category = if self.pace.is_some() { ReportedCategory::Converged } else { ReportedCategory::Growing };
        JobReport {
            uid: uid.clone(),
            container: self.container.clone(),
            category,
            growth: Some(0.02),
            progress: Progress {
                step: Some(step),
                first_step: None,
                total: Some(1_000_000),
                metric: Some("loss".to_owned()),
                value: Some(self.value),
            },
            signal: Some(ReportedSignal {
                reports: self.reports,
                first: Some(ReportedValue { value: FIRST, at_us: self.first_us }),
                last: Some(ReportedValue { value: self.value, at_us: now_us }),
                longest_gap_us: 1_000_000,
                step: Some(step),
                total: Some(1_000_000),
                outlook: Some([step as f64, 1e6, 10.0]),
                consumed_cpu_node_s: seconds * 0.02,
                consumed_memory_node_s: seconds * 0.001,
                usable: None,
                left: None,
                memory_used_bytes: None,
                traffic: None,
            }),
            ..JobReport::default()
        }
    }
}

impl Agent {
    fn new(plan: &Arc<Plan>, index: usize, crowd: Arc<Crowd>) -> Result<Agent> {
        let (connection, began) = (Connection::new(plan, index)?, Instant::now());
        Ok(Agent { plan: plan.clone(), index, connection, crowd, began, jobs: BTreeMap::new() })
    }

    fn now_us(&self) -> u64 {
        // A machine has been up for a while when its agent starts.
        self.began.elapsed().as_micros() as u64 + 60_000_000
    }

    async fn live(mut self) {
        while self.ask(false, 0).await.is_none() {}
        while self.ask(true, 0).await.is_none() {}
        self.crowd.reported.fetch_add(1, Ordering::Relaxed);
        let pace = Duration::from_secs(self.plan.tell_every_s.max(1));
        // Agents do not report their jobs all at the same moment.
        let mut next = Instant::now() + pace.mul_f64((self.index % 97) as f64 / 97.0);
        loop {
            // A new pod is reported at once, as real agents do.
            let left = next.saturating_duration_since(Instant::now());
            if left > Duration::from_millis(20) {
                let before = self.jobs.len();
                let answered = self.ask(false, left.as_millis() as u32).await;
                if answered.is_none() || self.jobs.len() == before {
                    continue;
                }
            } else {
                next = Instant::now() + pace;
                let converge = self.crowd.converge.load(Ordering::Relaxed);
                self.jobs.values_mut().for_each(|job| job.go_on(converge));
            }
            self.ask(true, 0).await;
        }
    }

    async fn ask(&mut self, tell: bool, wait_ms: u32) -> Option<()> {
        let now_us = self.now_us();
        let converged = self.jobs.values().filter(|job| job.pace.is_some()).count() as u32;
        let growing = self.jobs.len() as u32 - converged;
        let message = Message {
            beat: NodeTotals { growing, converged, at_us: now_us, ..BUSY_NODE },
            jobs: tell.then(|| self.jobs.iter().map(|(uid, job)| job.state(uid, now_us)).collect()),
            resizes: Vec::new(),
            wait_ms,
        };
        let (answer, took) = self.connection.ask(message, &self.crowd.failures).await?;
        if wait_ms == 0 {
            self.crowd.answered.lock().expect("never poisoned").push(took);
        }
        if let Some(pods) = answer.pods {
            let mut before = std::mem::take(&mut self.jobs);
            let known = |pod: PodOnNode| {
                let job = before.remove(&pod.uid).unwrap_or_else(|| FollowedJob::of(&self.plan, &pod, now_us));
                (pod.uid, job)
            };
            self.jobs = pods.into_iter().map(known).collect();
        }
        Some(())
    }
}
