//! The loop around the decision about the sizes of tasks.

use super::apply::{ResizeOutcome, resize};
use super::decide::{ScaleDecision, SizeDecider, TaskResize};
use super::snapshot::{ElasticSnapshot, read};
use super::traffic::{self, TrafficBook};
use crate::isolate::catch_future;
use crate::placement::record::RecordRequests;
use crate::shares::Shares;
use crate::state::task_job::{ScaleOrder, TaskJobSnapshot};
use gainshare_core::model::Time;
use gainshare_core::policy::Elastic;
use gainshare_kube_api::names::{JobUid, PodUid};
use gainshare_kube_api::tasks::TaskScale;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the cluster is read. Most passes decide nothing.
const PASS_EVERY: Duration = Duration::from_secs(1);
/// The pause after a pass that panicked.
const AFTER_PANIC: Duration = Duration::from_secs(10);
/// The cause that is published for a job whose tasks cannot be resized.
const NOT_RESIZABLE: &str = "not-resizable";

/// Decides about the sizes of tasks for as long as this operator leads.
pub(crate) async fn run(shares: Arc<Shares>, numbers: Elastic, records: Arc<RecordRequests>) {
    let origin = Instant::now();
    let mut sizes = SizeDecider::new(numbers);
    let mut book = TrafficBook::default();
    loop {
        tokio::time::sleep(PASS_EVERY).await;
        let leader = &shares.leader;
        if !leader.jobs_are_synced() || leader.read(|world| world.is_off()) {
            continue;
        }
        let now = Time(origin.elapsed().as_micros() as u64);
        let both = async {
            traffic::pass(&shares.leader, &mut book, now.as_secs_f64());
            pass(&shares, &mut sizes, &records, now).await;
        };
        if let Err(panic) = catch_future(both).await {
            // What was measured is lost with the pass. Tasks keep what they have until the next one.
            tracing::error!(panic, "a pass over the sizes of tasks panicked: the decision begins again");
            (sizes, book) = (SizeDecider::new(numbers), TrafficBook::default());
            tokio::time::sleep(AFTER_PANIC).await;
        }
    }
}

async fn pass(shares: &Shares, sizes: &mut SizeDecider, records: &RecordRequests, now: Time) {
    let leader = &shares.leader;
    let snapshot = read(leader, Timestamp::now());
    let known: BTreeSet<&JobUid> = snapshot.running.iter().map(|job| &job.uid).collect();
    leader.scale_orders.lock().retain(|uid, _| known.contains(uid));
    for (key, why) in &snapshot.blocked {
        let job = leader.read(|world| world.jobs.task_job(key).cloned());
        if let Some(job) = job {
            let scale = TaskScale {
                cause: NOT_RESIZABLE.to_owned(),
                message: format!("its tasks keep their sizes: {why}"),
                ..job.status.journal.scale.clone().unwrap_or_default()
            };
            put(shares, &job, scale);
        }
    }
    if snapshot.running.is_empty() && snapshot.waiting.is_empty() {
        records.put_sizes(HashMap::new());
        return;
    }
    let decisions = sizes.decide(&snapshot, now);
    records.put_sizes(sizes.records());
    leader.metrics.plans_rejected.inc_by(std::mem::take(&mut sizes.rejected));
    let outcomes = resize_all(shares, &decisions).await;
    for decision in &decisions {
        publish(shares, &snapshot, decision, &outcomes);
    }
}

/// Decreases go first, over all jobs: increases may need what they free.
async fn resize_all(shares: &Shares, decisions: &[ScaleDecision]) -> BTreeMap<PodUid, ResizeOutcome> {
    let mut all: Vec<&TaskResize> = decisions.iter().flat_map(|decision| &decision.resizes).collect();
    all.sort_by_key(|resize| (resize.to_milli > resize.from_milli || resize.memory_bytes.is_some(), resize.task));
    let mut outcomes = BTreeMap::new();
    for wanted in all {
        let outcome = resize(shares, wanted).await;
        if let ResizeOutcome::Refused(why) = &outcome {
            tracing::info!(pod = wanted.pod_uid.as_str(), task = %wanted.task, why, "a task is not resized");
        }
        outcomes.insert(wanted.pod_uid.clone(), outcome);
    }
    outcomes
}

/// Passes the decision to the job's state machine, if it changes anything that is published.
fn publish(
    shares: &Shares,
    snapshot: &ElasticSnapshot,
    decision: &ScaleDecision,
    outcomes: &BTreeMap<PodUid, ResizeOutcome>,
) {
    let key = snapshot.running.iter().find(|job| job.uid == decision.uid).map(|job| &job.key);
    let job = key.and_then(|key| shares.leader.read(|world| world.jobs.task_job(key).cloned()));
    if let Some(job) = job.filter(|job| job.uid == decision.uid) {
        let before = job.status.journal.scale.clone().unwrap_or_default();
        put(shares, &job, next_scale(before, decision, outcomes, Timestamp::now()));
    }
}

fn put(shares: &Shares, job: &TaskJobSnapshot, scale: TaskScale) {
    if job.status.journal.scale.as_ref() == Some(&scale) {
        return;
    }
    let order = ScaleOrder { epoch: job.status.journal.epoch, scale };
    shares.leader.scale_orders.lock().insert(job.uid.clone(), order);
    shares.leader.change(|world| world.jobs.mark(job.key.clone()));
}

/// What is published after a decision: the cause, and what was changed.
pub(super) fn next_scale(
    before: TaskScale,
    decision: &ScaleDecision,
    outcomes: &BTreeMap<PodUid, ResizeOutcome>,
    now: Timestamp,
) -> TaskScale {
    let mut changes: Vec<String> = Vec::new();
    let mut refusals: Vec<String> = Vec::new();
    for resize in &decision.resizes {
        match outcomes.get(&resize.pod_uid) {
            Some(ResizeOutcome::Done) => changes.push(change_text(resize)),
            Some(ResizeOutcome::Refused(why)) => refusals.push(format!("{} keeps its size: {why}", resize.task)),
            Some(ResizeOutcome::Unchanged) | None => {}
        }
    }
    if let Some((from, to)) = decision.workers {
        changes.push(format!("workers {from} to {to}"));
    }
    let mut message = decision.why.to_string();
    if let Some(refusal) = refusals.first() {
        message = format!("{message}; {refusal}");
    }
    let workers = decision.workers.map(|(_, to)| to).or(before.workers);
    let mut after = TaskScale { workers, cause: decision.why.name().to_owned(), message, ..before };
    if !changes.is_empty() {
        after.last_change = format!("{} ({})", decision.why, changes.join(", "));
        // The object keeps microseconds. A finer time would differ from what is read back, and be written again.
        after.changed_at = Some(MicroTime(Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now)));
    }
    after
}

fn change_text(resize: &TaskResize) -> String {
    let cores = |milli: u64| milli as f64 / 1000.0;
    let mut text = resize.task.to_string();
    if resize.to_milli != resize.from_milli {
        text = format!("{text}: {:.2} to {:.2} cores", cores(resize.from_milli), cores(resize.to_milli));
    }
    if let Some(bytes) = resize.memory_bytes {
        text = format!("{text}, memory to {} MiB", bytes >> 20);
    }
    text
}
