//! All agents of the cluster in one process, through four phases.

use super::connection::{BUSY_NODE, Connection, Message};
use super::measure::{self, Counts, Mark, OF_PODS, leads, metric, page, process, settled, spread, wait};
use super::{Plan, Result};
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::resize::{Amounts, Resources};
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::wire::{
    Answer, JobReport, NodeTotals, OutcomeState, PodOnNode, Progress, ReportedCategory, Resize,
};
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The operator has settled when it has written nothing for this time.
const QUIET: Duration = Duration::from_secs(6);

/// Of a hundred agents, this many have something to change each time they report their jobs in the
/// busy phase.
const CHANGING_PERCENT: u64 = 10;
/// What the policies change to, to see how fast the agents learn of it.
const NEW_ALPHA: f64 = 0.07;

/// What all agents share.
#[derive(Default)]
struct Crowd {
    busy: AtomicBool,
    /// From asking to the answer, where the operator had nothing to wait for.
    answered: Mutex<Vec<Duration>>,
    /// The same for requests with resizes in them.
    resized: Mutex<Vec<Duration>>,
    failures: AtomicU64,
    lists: AtomicU64,
    /// Agents that have reported their jobs.
    reported: AtomicU64,
    /// Changes that the operator has to write: notes, resizes that were done, and a pod's own
    /// values before its first.
    notes: AtomicU64,
    resizes: AtomicU64,
    originals: AtomicU64,
    refused: AtomicU64,
    /// When each agent had the changed policy.
    news: Mutex<Vec<Instant>>,
}

impl Crowd {
    fn take(&self, times: impl Fn(&Crowd) -> &Mutex<Vec<Duration>>) -> Value {
        spread(&mut std::mem::take(&mut *times(self).lock().expect("never poisoned")))
    }
}

pub(super) async fn run(plan: &Plan, client: &Client) -> Result<Value> {
    let began = Instant::now();
    leads(plan).await?;
    let ready_s = began.elapsed().as_secs_f64();
    let crowd = Arc::new(Crowd::default());
    let at_start = Mark::now(plan, client, OF_PODS).await?;

    let first = first_pass(plan, client, &crowd, &at_start).await?;
    let busy = busy(plan, client, &crowd).await?;
    let news = news(plan, client, &crowd).await?;
    let idle = idle(plan, client, &crowd).await?;

    let (peak_rss_mib, cpu_s) = process(plan.operator_pid)?;
    let failures = crowd.failures.load(Ordering::Relaxed);
    Ok(json!({
        "nodes": plan.nodes, "pods": plan.pods(), "operator_ready_s": ready_s, "operator_peak_rss_mib": peak_rss_mib,
        "operator_cpu_s": cpu_s, "played_s": began.elapsed().as_secs_f64(), "failed_syncs": failures,
        "first_pass": first, "busy": busy, "news": news, "idle": idle,
    }))
}

async fn first_pass(plan: &Plan, client: &Client, crowd: &Arc<Crowd>, before: &Mark) -> Result<Value> {
    let began = Instant::now();
    for node in 0..plan.nodes {
        let agent = Agent::new(plan, node, crowd.clone())?;
        tokio::spawn(agent.live());
    }
    let all = plan.nodes as u64;
    wait("every agent to have its list", || async { crowd.lists.load(Ordering::Relaxed) >= all }).await?;
    let lists_s = began.elapsed().as_secs_f64();
    wait("every agent to have reported its jobs", || async { crowd.reported.load(Ordering::Relaxed) >= all }).await?;
    let told_s = began.elapsed().as_secs_f64();
    let written = || async {
        let text = page(&plan.metrics, "/metrics").await.unwrap_or_default();
        metric(&text, "gainshare_operator_writes_total", &["what=\"annotate\"", "outcome=\"done\""]) as usize
            >= plan.pods()
    };
    wait("every pod's note", written).await?;
    let notes_s = began.elapsed().as_secs_f64();
    let policies: Api<SharePolicy> = Api::all(client.clone());
    let counted = || async {
        let Ok(all) = policies.list(&ListParams::default()).await else { return false };
        let growing = all.items.iter().filter_map(|policy| policy.status.as_ref()).map(|status| status.growing);
        growing.sum::<u32>() as usize == plan.pods()
    };
    wait("the policies to count every job", counted).await?;
    let pass_s = began.elapsed().as_secs_f64();
    let writes = before.since(plan, client).await?.counts;
    Ok(json!({
        "lists_s": lists_s, "told_s": told_s, "notes_s": notes_s, "status_pass_s": pass_s,
        "notes_per_s": plan.pods() as f64 / notes_s, "sync": crowd.take(|c| &c.answered), "changes": plan.pods(),
        "writes": writes.json(), "pod_writes_per_change": of_pods(&writes) / plan.pods() as f64,
    }))
}

async fn busy(plan: &Plan, client: &Client, crowd: &Arc<Crowd>) -> Result<Value> {
    let before = Mark::now(plan, client, OF_PODS).await?;
    crowd.busy.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(plan.busy_s)).await;
    crowd.busy.store(false, Ordering::Relaxed);
    let ended = Instant::now();
    let operator_cores = before.since(plan, client).await?.cores();
    let behind_s = settled(&plan.metrics, QUIET).await?.saturating_duration_since(ended).as_secs_f64();
    let writes = before.since(plan, client).await?.counts;
    let [notes, resizes, originals, refused] =
        [&crowd.notes, &crowd.resizes, &crowd.originals, &crowd.refused].map(|count| count.load(Ordering::Relaxed));
    let changes = notes + resizes + originals;
    Ok(json!({
        "seconds": plan.busy_s, "sync": crowd.take(|c| &c.answered), "sync_with_resizes": crowd.take(|c| &c.resized),
        "changes": {"notes": notes, "resizes": resizes, "originals": originals}, "resizes_not_done": refused,
        "writes": writes.json(), "pod_writes_per_change": of_pods(&writes) / changes.max(1) as f64,
        "last_write_after_s": behind_s, "operator_cores": operator_cores,
    }))
}

async fn news(plan: &Plan, client: &Client, crowd: &Arc<Crowd>) -> Result<Value> {
    let before = Mark::now(plan, client, OF_PODS).await?;
    let began = Instant::now();
    for i in 0..plan.namespaces {
        let api: Api<SharePolicy> = Api::namespaced(client.clone(), &format!("team-{i}"));
        let patch = json!({"spec": {"alpha": NEW_ALPHA}});
        api.patch("everyone", &PatchParams::default(), &Patch::Merge(patch)).await?;
    }
    let all = plan.nodes;
    wait("every agent to know of the changed policies", || async {
        crowd.news.lock().expect("never poisoned").len() >= all
    })
    .await?;
    let mut times: Vec<Duration> =
        crowd.news.lock().expect("never poisoned").iter().map(|at| at.saturating_duration_since(began)).collect();
    settled(&plan.metrics, QUIET).await?;
    let writes = before.since(plan, client).await?.counts;
    crowd.take(|c| &c.answered);
    Ok(json!({"agent_knows": spread(&mut times), "writes": writes.json()}))
}

async fn idle(plan: &Plan, client: &Client, crowd: &Arc<Crowd>) -> Result<Value> {
    let span = measure::idle(plan, client, OF_PODS).await?;
    Ok(json!({
        "seconds": plan.idle_s, "sync": crowd.take(|c| &c.answered), "writes": span.counts.json(),
        "pod_and_policy_writes": span.counts.ours(), "operator_cores": span.cores(),
    }))
}

/// Writes to pods.
fn of_pods(writes: &Counts) -> f64 {
    writes.get("pod_notes") + writes.get("pod_resizes")
}

/// One node's agent.
struct Agent {
    index: usize,
    connection: Connection,
    crowd: Arc<Crowd>,
    tell_every: Duration,
    pods: Vec<PodOnNode>,
    jobs: Vec<JobReport>,
    /// How often it has reported its jobs.
    round: u64,
    knows_news: bool,
    /// Pods that were resized at least once.
    resized: BTreeSet<PodUid>,
}

impl Agent {
    fn new(plan: &Plan, index: usize, crowd: Arc<Crowd>) -> Result<Agent> {
        Ok(Agent {
            index,
            connection: Connection::new(plan, index)?,
            crowd,
            tell_every: Duration::from_secs(plan.tell_every_s.max(1)),
            pods: Vec::new(),
            jobs: Vec::new(),
            round: 0,
            knows_news: false,
            resized: BTreeSet::new(),
        })
    }

    async fn live(mut self) {
        while self.pods.is_empty() {
            self.ask(None, Vec::new(), 0).await;
        }
        self.crowd.lists.fetch_add(1, Ordering::Relaxed);
        while self.ask(Some(self.jobs.clone()), Vec::new(), 0).await.is_none() {}
        self.crowd.reported.fetch_add(1, Ordering::Relaxed);
        // Agents do not report their jobs all at the same moment.
        let mut next = Instant::now() + self.tell_every.mul_f64((self.index % 97) as f64 / 97.0);
        loop {
            // News comes while a request is held.
            let left = next.saturating_duration_since(Instant::now());
            if left > Duration::from_millis(20) {
                self.ask(None, Vec::new(), left.as_millis() as u32).await;
                continue;
            }
            next = Instant::now() + self.tell_every;
            self.round += 1;
            let resizes = self.go_on();
            self.ask(Some(self.jobs.clone()), resizes, 0).await;
        }
    }

    /// Every job is a step further; in the busy phase some also change.
    fn go_on(&mut self) -> Vec<Resize> {
        for job in &mut self.jobs {
            job.progress.step = job.progress.step.map(|step| step + 100);
            job.progress.value = job.progress.value.map(|value| value * 0.999);
            job.growth = job.growth.map(|growth| growth * 0.99);
        }
        // A fixed draw for every agent and round: two runs do the same.
        let draw = (self.index as u64 * 2_654_435_761 + self.round * 40_503) % 100;
        if !self.crowd.busy.load(Ordering::Relaxed) || draw >= CHANGING_PERCENT || self.jobs.len() < 2 {
            return Vec::new();
        }
        let pair = (self.round as usize * 2) % (self.jobs.len() / 2 * 2);
        let [less, more] = [pair, pair + 1];
        // One slackens and gives to another; the next time it is the other way round.
        let back = self.jobs[less].category == ReportedCategory::Converged;
        self.jobs[less].category = if back { ReportedCategory::Growing } else { ReportedCategory::Converged };
        let tenth = 1.0 / self.jobs.len() as f64;
        self.jobs[less].share = Some(if back { tenth } else { tenth * 0.4 });
        self.jobs[more].share = Some(if back { tenth } else { tenth * 1.6 });
        self.crowd.notes.fetch_add(2, Ordering::Relaxed);
        let resize = |index: usize, factor: f64| {
            let pod = &self.pods[index];
            let cpu_milli = pod.original.requests.cpu_milli.map(|milli| (milli as f64 * factor) as u64);
            Resize {
                uid: pod.uid.clone(),
                container: pod.container.clone(),
                generation: self.round,
                to: Resources { requests: Amounts { cpu_milli, memory_bytes: None }, limits: Amounts::default() },
            }
        };
        if back { vec![resize(more, 1.0), resize(less, 1.0)] } else { vec![resize(less, 0.4), resize(more, 1.6)] }
    }

    async fn ask(&mut self, jobs: Option<Vec<JobReport>>, resizes: Vec<Resize>, wait_ms: u32) -> Option<()> {
        let has_resizes = !resizes.is_empty();
        let count = |category: ReportedCategory| self.jobs.iter().filter(|job| job.category == category).count() as u32;
        let beat = NodeTotals {
            growing: count(ReportedCategory::Growing),
            watching: count(ReportedCategory::Watching),
            converged: count(ReportedCategory::Converged),
            ..BUSY_NODE
        };
        let message = Message { beat, jobs, resizes, wait_ms };
        let (answer, took) = self.connection.ask(message, &self.crowd.failures).await?;
        if wait_ms == 0 {
            let times = if has_resizes { &self.crowd.resized } else { &self.crowd.answered };
            times.lock().expect("never poisoned").push(took);
        }
        self.learn(answer);
        Some(())
    }

    fn learn(&mut self, answer: Answer) {
        for outcome in &answer.outcomes {
            let done = outcome.state == OutcomeState::Done;
            if done && self.resized.insert(outcome.uid.clone()) {
                self.crowd.originals.fetch_add(1, Ordering::Relaxed);
            }
            let count = if done { &self.crowd.resizes } else { &self.crowd.refused };
            count.fetch_add(1, Ordering::Relaxed);
        }
        let Some(pods) = answer.pods else { return };
        if self.jobs.is_empty() {
            self.jobs = pods.iter().map(|pod| job(pod, pods.len())).collect();
        }
        let changed = pods.iter().all(|pod| pod.settings.alpha == Some(NEW_ALPHA));
        if !pods.is_empty() && changed && !std::mem::replace(&mut self.knows_news, true) {
            self.crowd.news.lock().expect("never poisoned").push(Instant::now());
        }
        self.pods = pods;
    }
}

fn job(pod: &PodOnNode, mates: usize) -> JobReport {
    JobReport {
        uid: pod.uid.clone(),
        container: pod.container.clone(),
        category: ReportedCategory::Growing,
        growth: Some(0.02),
        progress: Progress {
            step: Some(1),
            first_step: None,
            total: Some(1_000_000),
            metric: Some("loss".to_owned()),
            value: Some(2.3),
        },
        share: Some(1.0 / mates.max(1) as f64),
        reason: "its growth of 0.02 is a tenth of all".to_owned(),
        ..JobReport::default()
    }
}
