//! The loop around adopted Jobs: reads them and their pods, runs [`step`], and executes the
//! actions.
//!
//! A Job changes whenever one of its pods does (`active`, `ready`, `terminating`), so a watch of
//! Jobs is enough. The inputs of a step are read from the API server each time. A panic stays with
//! its Job: it is caught, published as an event of that Job, and the Job is tried again after a
//! growing rest.

use super::machine::{Action, Snapshot, Step, asked, facts, step};
use crate::isolate::{catch_future, rest_after};
use crate::jobs::Orders;
use crate::jobs::action::JournalStep;
use crate::jobs::apply::{ActionError, Effect, Executor, FailPoint, classify, params};
use crate::jobs::snapshot::{NodeState, Nodes, PodSnapshot};
use crate::jobs::store::MISSING_NODE_IS_OFF_AFTER;
use crate::state::events::{self, Subject, Text};
use crate::state::lead::Leader;
use crate::state::metrics::WriteLabels;
use crate::state::watch::{Change, follow};
use crate::tasks::Tasks;
use futures_util::StreamExt;
use gainshare_kube_api::adopted::{BatchJobSnapshot, Journal, StoppedPod};
use gainshare_kube_api::names::{ADOPTED_ANNOTATION, JOB_LABEL, NamespacedName, POLICY_ANNOTATION};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::api::{Api, ListParams, Patch};
use kube::runtime::events::Recorder;
use kube::runtime::watcher;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The label that Job controllers give to pods.
const CONTROLLER_UID: &str = "batch.kubernetes.io/controller-uid";

const AT_ONCE: usize = 8;
const STEPS_AT_ONCE: usize = 16;
/// Jobs per page of a list.
const PAGE: u32 = 500;
/// The pause before a Job whose action failed is tried again.
const PAUSE: SignedDuration = SignedDuration::from_secs(1);
/// How often orders are read.
const READ_EVERY: Duration = Duration::from_millis(500);

/// The Jobs that the operator follows, and which of them are due.
#[derive(Default)]
struct FollowedJobs {
    /// Their uids.
    jobs: BTreeMap<NamespacedName, String>,
    dirty: BTreeSet<NamespacedName>,
    wakes: BTreeMap<NamespacedName, Timestamp>,
    listed: bool,
    was_off: bool,
    /// A Job has gone, and perhaps left a pod with our finalizer.
    sweep: bool,
    /// Jobs whose reconcile panicked: how often in a row, and until when they rest.
    resting: BTreeMap<NamespacedName, (u32, Timestamp)>,
    /// Since when the API server has had no object of these nodes.
    missing_nodes: BTreeMap<String, Instant>,
}

struct Adopter {
    executor: Executor,
    client: Client,
    leader: Arc<Leader>,
    orders: Arc<Orders>,
    recorder: Recorder,
    fail_at: FailPoint,
    followed: Mutex<FollowedJobs>,
    wake: Notify,
}

pub(in crate::jobs) fn start(
    tasks: &mut Tasks,
    leader: &Arc<Leader>,
    client: &Client,
    recorder: Recorder,
    fail_at: FailPoint,
) {
    let adopter = Arc::new(Adopter {
        executor: Executor::new(client.clone(), FailPoint::default()),
        client: client.clone(),
        leader: leader.clone(),
        orders: leader.orders.clone(),
        recorder,
        fail_at,
        followed: Mutex::default(),
        wake: Notify::new(),
    });
    let it = adopter.clone();
    tasks.spawn("the watch of Jobs", async move {
        let api = Api::<Job>::all(it.client.clone());
        let complete = || it.change(|known| (known.listed, known.sweep) = (true, true));
        let read = |job: Job| BatchJobSnapshot::of(&job);
        follow(api, watcher::Config::default(), &it.leader.metrics, read, |change| it.put(change), complete).await;
    });
    tasks.spawn("the controller of adopted Jobs", adopter.run());
}

impl FollowedJobs {
    /// Takes in a Job. Answers the uid of a Job that the operator no longer follows.
    fn put(&mut self, job: &BatchJobSnapshot, here: bool) -> Option<String> {
        let key = NamespacedName::new(&job.namespace, &job.name);
        if here && job.is_ours() {
            self.dirty.insert(key.clone());
            return self.jobs.insert(key, job.uid.clone()).filter(|uid| *uid != job.uid);
        }
        self.sweep |= self.jobs.contains_key(&key);
        self.jobs.remove(&key)
    }
}

impl Adopter {
    fn change(&self, change: impl FnOnce(&mut FollowedJobs)) {
        change(&mut self.followed.lock());
        self.wake.notify_one();
    }

    fn put(&self, change: Change<BatchJobSnapshot>) {
        self.change(|known| {
            let gone: Vec<String> = match change {
                Change::Applied(job) => known.put(&job, true).into_iter().collect(),
                Change::Deleted(job) => known.put(&job, false).into_iter().collect(),
                Change::Listed(jobs) => {
                    let before = std::mem::take(&mut known.jobs);
                    jobs.iter().for_each(|job| drop(known.put(job, true)));
                    known.sweep = true;
                    before.into_values().filter(|uid| known.jobs.values().all(|one| one != uid)).collect()
                }
            };
            gone.iter().for_each(|uid| self.orders.forget(uid));
        });
    }

    async fn run(self: Arc<Self>) {
        loop {
            let off = self.leader.read(|world| world.is_off());
            let now = Timestamp::now();
            let (due, sweep) = {
                let mut known = self.followed.lock();
                if !known.listed || !self.leader.is_synced() {
                    (BTreeSet::new(), false)
                } else {
                    known.due(&self.orders, off, now)
                }
            };
            if sweep && let Err(error) = self.sweep().await {
                tracing::warn!(%error, "cannot list the pods of Jobs that are gone");
                self.followed.lock().sweep = true;
            }
            futures_util::stream::iter(due).for_each_concurrent(AT_ONCE, |key| self.settle_or_rest(key, off)).await;
            tokio::select! {
                () = self.wake.notified() => {}
                () = tokio::time::sleep(READ_EVERY) => {}
            }
        }
    }

    /// Settles one Job. A panic is reported, and the Job rests.
    async fn settle_or_rest(&self, key: NamespacedName, off: bool) {
        match catch_future(self.settle(&key, off)).await {
            Ok(()) => drop(self.followed.lock().resting.remove(&key)),
            Err(panic) => self.report_panic(&key, &panic).await,
        }
    }

    async fn settle(&self, key: &NamespacedName, off: bool) {
        for _ in 0..STEPS_AT_ONCE {
            let next = match self.step(key, off).await {
                Ok(Some((job, next))) => {
                    let idle = next.actions.iter().all(|action| *action == Action::RemoveOrder);
                    if next.actions.contains(&Action::RemoveOrder) {
                        self.orders.remove_order(&job.uid);
                    }
                    if idle {
                        return self.wake_at(key, next.wake);
                    }
                    self.act_all(&job, &next).await
                }
                Ok(None) => return,
                Err(error) => Err(ActionError::Again(error.to_string())),
            };
            match next {
                // Our copy was old: the next read is newer.
                Ok(()) | Err(ActionError::Old(_)) => {}
                Err(error) => {
                    tracing::warn!(job = key.name, namespace = key.namespace, %error, "an adopted Job is retried later");
                    return self.wake_at(key, Timestamp::now().saturating_add(PAUSE).ok());
                }
            }
        }
        self.wake_at(key, Timestamp::now().saturating_add(PAUSE).ok());
    }

    fn wake_at(&self, key: &NamespacedName, at: Option<Timestamp>) {
        if let Some(at) = at {
            self.followed.lock().wakes.insert(key.clone(), at);
        }
    }

    /// Reads and decides.
    async fn step(&self, key: &NamespacedName, off: bool) -> kube::Result<Option<(BatchJobSnapshot, Step)>> {
        let found = self.jobs(&key.namespace).get_opt(&key.name).await?;
        let Some(job) = found.as_ref().and_then(BatchJobSnapshot::of).filter(BatchJobSnapshot::is_ours) else {
            return Ok(None);
        };
        let own = ListParams::default().labels(&format!("{CONTROLLER_UID}={}", job.uid));
        let pods = self.executor.pods(&key.namespace).list(&own).await?;
        let pods: Vec<PodSnapshot> = pods.iter().filter_map(PodSnapshot::of_batch).collect();
        let pods: Vec<PodSnapshot> = pods.into_iter().filter(|pod| pod.owner.as_ref() == Some(&job.uid)).collect();
        let mut nodes = Nodes::new();
        if let Some(migration) = &job.journal.migration {
            let named = pods.iter().filter_map(|pod| pod.node.clone()).chain([migration.from.clone()]);
            for name in named.collect::<BTreeSet<String>>() {
                let node = Api::<Node>::all(self.client.clone()).get_opt(&name).await?;
                let state = node.as_ref().map_or_else(|| self.missing_node(&name), NodeState::of);
                if state != NodeState::Missing {
                    self.followed.lock().missing_nodes.remove(&name);
                }
                nodes.insert(name, state);
            }
        }
        if let Some(pod) = job.journal.pod.as_ref().filter(|_| job.journal.migration.is_some()) {
            self.leader.change(|world| world.give_back(&pod.uid));
        }
        let order = asked(&job).or_else(|| self.orders.order(&job.uid));
        let snapshot =
            Snapshot { now: Timestamp::now(), job: &job, pods: &pods, nodes: &nodes, order: order.as_ref(), off };
        match facts(&snapshot) {
            Some(facts) => self.orders.publish(facts),
            None => self.orders.forget(&job.uid),
        }
        let next = step(&snapshot);
        Ok(Some((job, next)))
    }

    /// What it means that the API server has no such node now: see [`MISSING_NODE_IS_OFF_AFTER`].
    fn missing_node(&self, name: &str) -> NodeState {
        let now = Instant::now();
        let since = *self.followed.lock().missing_nodes.entry(name.to_owned()).or_insert(now);
        if now.saturating_duration_since(since) >= MISSING_NODE_IS_OFF_AFTER {
            NodeState::Off
        } else {
            NodeState::Missing
        }
    }

    /// The reconcile of this Job panicked: the Job rests, and an event says so. No other Job is
    /// affected.
    async fn report_panic(&self, key: &NamespacedName, panic: &str) {
        let (uid, rest) = {
            let mut followed = self.followed.lock();
            let times = followed.resting.get(key).map_or(0, |(times, _)| *times).saturating_add(1);
            let rest = rest_after(times);
            let now = Timestamp::now();
            let until = SignedDuration::try_from(rest).ok().and_then(|rest| now.saturating_add(rest).ok());
            followed.resting.insert(key.clone(), (times, until.unwrap_or(now)));
            followed.wakes.insert(key.clone(), until.unwrap_or(now));
            (followed.jobs.get(key).cloned(), rest)
        };
        tracing::error!(%key, panic, rest_s = rest.as_secs(), "the reconcile of an adopted Job panicked");
        let message =
            format!("the operator cannot work on this Job because of an error of its own ({panic}): please report it");
        let text = Text { warns: true, reason: "ReconcileFailed", note: &message, action: "Move" };
        self.publish_event(key, uid.as_deref(), text).await;
    }

    async fn publish_event(&self, key: &NamespacedName, uid: Option<&str>, text: Text<'_>) {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        let subject = Subject { api_version: "batch/v1", kind: "Job", namespace, name, uid };
        events::publish(&self.recorder, subject, text).await;
    }

    async fn act_all(&self, job: &BatchJobSnapshot, next: &Step) -> Result<(), ActionError> {
        for action in next.actions.iter().filter(|action| **action != Action::RemoveOrder) {
            let name = name(action);
            self.fail_at.reach("before", name);
            let done = self.act(job, action).await;
            let outcome = if done.is_ok() { "done" } else { "again" };
            self.leader.metrics.writes.get_or_create(&WriteLabels { what: "job", outcome }).inc();
            done?;
            self.fail_at.reach("after", name);
            self.publish_step(job, action).await;
        }
        Ok(())
    }

    fn jobs(&self, namespace: &str) -> Api<Job> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn act(&self, job: &BatchJobSnapshot, action: &Action) -> Result<(), ActionError> {
        match action {
            Action::Write(_, journal) => self.patch(job, json!({"metadata": note(Some(journal))})).await,
            Action::Suspend => self.patch(job, json!({"spec": {"suspend": true}})).await,
            Action::Resume(_, journal) => {
                let mut spec = match &journal.prefers {
                    Some(node) if job.journal.prefers.as_ref() != Some(node) => job.preferring(Some(node)),
                    _ => json!({}),
                };
                spec["suspend"] = json!(false);
                self.patch(job, json!({"metadata": note(Some(journal)), "spec": spec})).await
            }
            Action::Forget => {
                let spec = if job.journal.prefers.is_some() { job.preferring(None) } else { json!({}) };
                self.patch(job, json!({"metadata": note(None), "spec": spec})).await
            }
            Action::ClearStartTime => {
                let patch =
                    json!({"metadata": {"resourceVersion": job.resource_version}, "status": {"startTime": null}});
                let done = self.jobs(&job.namespace).patch_status(&job.name, &params(), &Patch::Merge(patch)).await;
                done.map(drop).or_else(gone)
            }
            Action::Hold(pod) => self.executor.hold_pod(&job.namespace, &pod.name, &pod.uid, true).await.map(drop),
            Action::LetGo(pod) => self.executor.hold_pod(&job.namespace, &pod.name, &pod.uid, false).await.map(drop),
            Action::Mark(pod, mark) => self.mark(job, pod, *mark).await,
            Action::RemoveOrder => Ok(()),
        }
    }

    /// Changes the Job, and no other version of it than the one that was decided on.
    async fn patch(&self, job: &BatchJobSnapshot, mut patch: Value) -> Result<(), ActionError> {
        patch["metadata"]["resourceVersion"] = json!(job.resource_version);
        let done = self.jobs(&job.namespace).patch(&job.name, &params(), &Patch::Merge(patch)).await;
        done.map(drop).or_else(gone)
    }

    async fn mark(&self, job: &BatchJobSnapshot, pod: &StoppedPod, mark: bool) -> Result<(), ActionError> {
        let (label, policy) = if mark { (Some(&job.name), Some(job.policy.name())) } else { (None, None) };
        let patch = json!({"metadata": {
            "uid": pod.uid, "labels": {JOB_LABEL: label}, "annotations": {POLICY_ANNOTATION: policy},
        }});
        let done = self.executor.pods(&job.namespace).patch(&pod.name, &params(), &Patch::Merge(patch)).await;
        done.map(drop).or_else(gone)
    }

    /// Releases pods with our finalizer whose Job is gone: no attempt follows them.
    async fn sweep(&self) -> Result<(), ActionError> {
        // Pods of TrainingJobs, perhaps tens of thousands, have no such label.
        let marked = ListParams::default().labels(&format!("{JOB_LABEL},{CONTROLLER_UID}"));
        let pods = Api::<Pod>::all(self.client.clone())
            .list(&marked)
            .await
            .map_err(|error| ActionError::Again(error.to_string()))?;
        for pod in pods.iter().filter_map(PodSnapshot::of_batch).filter(|pod| pod.has_finalizer) {
            let Some(owner) = &pod.owner else { continue };
            let known = self.followed.lock().jobs.values().any(|uid| uid == owner);
            if !known {
                let done = self.executor.hold_pod(&pod.namespace, &pod.name, &pod.uid, false).await;
                done?;
            }
        }
        Ok(())
    }

    /// Publishes an event about a journal entry. A lost event is harmless.
    async fn publish_step(&self, job: &BatchJobSnapshot, action: &Action) {
        let (Action::Write(step, journal) | Action::Resume(step, journal)) = action else { return };
        if journal.message == job.journal.message {
            return;
        }
        tracing::info!(job = job.name, namespace = job.namespace, message = journal.message, "adopted Job");
        let warns = job.problem.is_some() || journal.unmovable != job.journal.unmovable;
        let reason = match step {
            JournalStep::Stopping => "Stopping",
            JournalStep::Stopped => "Stopped",
            JournalStep::Running => "Moved",
            JournalStep::Cancelled => "MoveCancelled",
            _ if warns => "NotMovable",
            _ => "Adopted",
        };
        let key = NamespacedName::new(&job.namespace, &job.name);
        let text = Text { warns, reason, note: &journal.message, action: "Move" };
        self.publish_event(&key, Some(&job.uid), text).await;
    }
}

impl FollowedJobs {
    fn due(&mut self, orders: &Orders, off: bool, now: Timestamp) -> (BTreeSet<NamespacedName>, bool) {
        if std::mem::replace(&mut self.was_off, off) != off {
            self.dirty.extend(self.jobs.keys().cloned());
        }
        let ordered = self.jobs.iter().filter(|(_, uid)| orders.order(uid).is_some()).map(|(key, _)| key.clone());
        let mut due: BTreeSet<NamespacedName> = ordered.collect();
        due.append(&mut self.dirty);
        due.extend(self.wakes.iter().filter(|(_, at)| **at <= now).map(|(key, _)| key.clone()));
        self.wakes.retain(|_, at| *at > now);
        due.retain(|key| self.resting.get(key).is_none_or(|(_, until)| *until <= now));
        (due, std::mem::take(&mut self.sweep))
    }
}

fn note(journal: Option<&Journal>) -> Value {
    json!({"annotations": {ADOPTED_ANNOTATION: journal.map(|journal| json!(journal).to_string())}})
}

/// An object that is gone needs nothing.
fn gone(error: kube::Error) -> Result<(), ActionError> {
    classify(error, Effect::Nothing).map(drop)
}

fn name(action: &Action) -> &'static str {
    match action {
        Action::Write(step, _) => step.name(),
        Action::Resume(..) => "resume",
        Action::Suspend => "suspend",
        Action::ClearStartTime => "clear-start-time",
        Action::Hold(_) => "hold-pod",
        Action::LetGo(_) => "let-go",
        Action::Mark(..) => "mark",
        Action::Forget => "forget",
        Action::RemoveOrder => "remove-order",
    }
}

/// For an uninstall: no Job stays suspended by us. The Job controller itself waits for a pod that is still
/// ending. Answers what could not be changed, and why.
pub(crate) async fn give_back(client: &Client) -> kube::Result<Vec<String>> {
    let mut failures = Vec::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let jobs = Api::<Job>::all(client.clone()).list(&page).await?;
        for job in jobs.iter().filter_map(BatchJobSnapshot::of).filter(|job| job.has_journal) {
            let mut patch = json!({"metadata": note(None)});
            patch["metadata"]["resourceVersion"] = json!(job.resource_version);
            if job.journal.migration.is_some() && job.suspended {
                patch["spec"] = json!({"suspend": false});
            }
            let api = Api::<Job>::namespaced(client.clone(), &job.namespace);
            match api.patch(&job.name, &params(), &Patch::Merge(patch)).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => failures.push(format!("Job {}/{}: {error}", job.namespace, job.name)),
            }
        }
        match jobs.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(failures),
        }
    }
}
