//! The loop around adopted Jobs: reads them and their pods, asks [`step`] what to do, and does it.
//!
//! Jobs change whenever one of their pods does (`active`, `ready`, `terminating`), so a watch of Jobs is enough; what a step decides on is read afresh.

use super::machine::{Action, Step, Snapshot, asked, facts, step};
use super::snapshot::BatchJobSnapshot;
use super::{Journal, Stopped};
use crate::jobs::Orders;
use crate::jobs::apply::{Effect, FailPoint, Executor, ActionError, params, classify};
use crate::jobs::snapshot::{NodeState, Nodes, PodSnapshot};
use crate::state::lead::Leader;
use crate::state::metrics::WriteLabels;
use crate::state::watch::{News, follow};
use futures_util::StreamExt;
use gainshare_kube_api::training_job::{ADOPTED_ANNOTATION, JOB_LABEL, POLICY_ANNOTATION};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod};
use kube::Client;
use kube::api::{Api, ListParams, Patch};
use kube::runtime::events::{Event, EventType, Recorder};
use kube::runtime::watcher;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// The label that Job controllers give to pods.
const CONTROLLER_UID: &str = "batch.kubernetes.io/controller-uid";

const AT_ONCE: usize = 8;
const STEPS_AT_ONCE: usize = 16;
/// The pause before a Job whose deed failed is looked at again.
const PAUSE: SignedDuration = SignedDuration::from_secs(1);
/// How often orders are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Namespace and name.
type Key = (String, String);

#[derive(Default)]
struct Known {
    /// Uids of the Jobs that concern us.
    jobs: BTreeMap<Key, String>,
    dirty: BTreeSet<Key>,
    wakes: BTreeMap<Key, Timestamp>,
    listed: bool,
    was_off: bool,
    /// A Job has gone, and perhaps left a pod that we hold.
    sweep: bool,
}

struct Adopter {
    executor: Executor,
    client: Client,
    leader: Arc<Leader>,
    orders: Arc<Orders>,
    recorder: Recorder,
    fail_at: FailPoint,
    known: Mutex<Known>,
    bell: Notify,
}

pub(in crate::jobs) fn start(
    tasks: &mut JoinSet<()>,
    leader: &Arc<Leader>,
    client: &Client,
    recorder: Recorder,
    fail_at: FailPoint,
) {
    let adopter = Arc::new(Adopter {
        executor: Executor::new(client.clone(), FailPoint::default()),
        client: client.clone(),
        leader: leader.clone(),
        orders: leader.jobs.clone(),
        recorder,
        fail_at,
        known: Mutex::default(),
        bell: Notify::new(),
    });
    let it = adopter.clone();
    tasks.spawn(async move {
        let api = Api::<Job>::all(it.client.clone());
        let complete = || it.change(|known| (known.listed, known.sweep) = (true, true));
        let read = |job: Job| BatchJobSnapshot::of(&job);
        follow(api, watcher::Config::default(), &it.leader.metrics, read, |news| it.put(news), complete).await;
    });
    tasks.spawn(adopter.run());
}

impl Known {
    /// Takes in a Job; answers the uid of one that no longer concerns us.
    fn put(&mut self, job: &BatchJobSnapshot, here: bool) -> Option<String> {
        let key = (job.namespace.clone(), job.name.clone());
        if here && job.is_ours() {
            self.dirty.insert(key.clone());
            return self.jobs.insert(key, job.uid.clone()).filter(|uid| *uid != job.uid);
        }
        self.sweep |= self.jobs.contains_key(&key);
        self.jobs.remove(&key)
    }
}

impl Adopter {
    fn change(&self, change: impl FnOnce(&mut Known)) {
        change(&mut self.known.lock().expect("never poisoned"));
        self.bell.notify_one();
    }

    fn put(&self, news: News<BatchJobSnapshot>) {
        self.change(|known| {
            let gone: Vec<String> = match news {
                News::Here(job) => known.put(&job, true).into_iter().collect(),
                News::Gone(job) => known.put(&job, false).into_iter().collect(),
                News::All(jobs) => {
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
            let off = self.leader.look(|world| world.is_off());
            let now = Timestamp::now();
            let (due, sweep) = {
                let mut known = self.known.lock().expect("never poisoned");
                if !known.listed || !self.leader.is_synced() {
                    (BTreeSet::new(), false)
                } else {
                    known.due(&self.orders, off, now)
                }
            };
            if sweep && let Err(error) = self.sweep().await {
                tracing::warn!(error, "cannot look for pods of Jobs that are gone");
                self.known.lock().expect("never poisoned").sweep = true;
            }
            futures_util::stream::iter(due).for_each_concurrent(AT_ONCE, |key| self.settle(key, off)).await;
            tokio::select! {
                () = self.bell.notified() => {}
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }

    async fn settle(&self, key: Key, off: bool) {
        for _ in 0..STEPS_AT_ONCE {
            let next = match self.step(&key, off).await {
                Ok(Some((job, next))) => {
                    let idle = next.actions.iter().all(|actions| *actions == Action::Taken);
                    if next.actions.contains(&Action::Taken) {
                        self.orders.taken(&job.uid);
                    }
                    if idle {
                        return self.wake(&key, next.wake);
                    }
                    self.act_all(&job, &next).await
                }
                Ok(None) => return,
                Err(error) => Err(ActionError::Again(error)),
            };
            match next {
                // Old: what is read next is newer.
                Ok(()) | Err(ActionError::Old(_)) => {}
                Err(error) => {
                    tracing::warn!(job = key.1, namespace = key.0, %error, "an adopted Job has to wait");
                    return self.wake(&key, Timestamp::now().saturating_add(PAUSE).ok());
                }
            }
        }
        self.wake(&key, Timestamp::now().saturating_add(PAUSE).ok());
    }

    fn wake(&self, key: &Key, at: Option<Timestamp>) {
        if let Some(at) = at {
            self.known.lock().expect("never poisoned").wakes.insert(key.clone(), at);
        }
    }

    /// Reads and decides.
    async fn step(&self, key: &Key, off: bool) -> Result<Option<(BatchJobSnapshot, Step)>, String> {
        let set_status = |error: kube::Error| error.to_string();
        let found = self.jobs(&key.0).get_opt(&key.1).await.map_err(set_status)?;
        let Some(job) = found.as_ref().and_then(BatchJobSnapshot::of).filter(BatchJobSnapshot::is_ours) else { return Ok(None) };
        let own = ListParams::default().labels(&format!("{CONTROLLER_UID}={}", job.uid));
        let pods = self.executor.pods(&key.0).list(&own).await.map_err(set_status)?;
        let pods: Vec<PodSnapshot> = pods.iter().filter_map(PodSnapshot::of_batch).collect();
        let pods: Vec<PodSnapshot> = pods.into_iter().filter(|pod| pod.owner.as_ref() == Some(&job.uid)).collect();
        let mut nodes = Nodes::new();
        if let Some(migration) = &job.journal.migration {
            let named = pods.iter().filter_map(|pod| pod.node.clone()).chain([migration.from.clone()]);
            for name in named.collect::<BTreeSet<String>>() {
                let node = Api::<Node>::all(self.client.clone()).get_opt(&name).await.map_err(set_status)?;
                nodes.insert(name, node.as_ref().map_or(NodeState::Off, NodeState::of));
            }
        }
        if let Some(pod) = job.journal.pod.as_ref().filter(|_| job.journal.migration.is_some()) {
            self.leader.change(|world| world.give_back(&pod.uid));
        }
        let order = asked(&job).or_else(|| self.orders.order(&job.uid));
        let snapshot = Snapshot { now: Timestamp::now(), job: &job, pods: &pods, nodes: &nodes, order: order.as_ref(), off };
        match facts(&snapshot) {
            Some(facts) => self.orders.publish(facts),
            None => self.orders.forget(&job.uid),
        }
        let next = step(&snapshot);
        Ok(Some((job, next)))
    }

    async fn act_all(&self, job: &BatchJobSnapshot, next: &Step) -> Result<(), ActionError> {
        for actions in next.actions.iter().filter(|actions| **actions != Action::Taken) {
            let name = name(actions);
            self.fail_at.reach("before", name);
            let done = self.act(job, actions).await;
            let outcome = if done.is_ok() { "done" } else { "again" };
            self.leader.metrics.writes.get_or_create(&WriteLabels { what: "job", outcome }).inc();
            done?;
            self.fail_at.reach("after", name);
            self.publish_event(job, actions).await;
        }
        Ok(())
    }

    fn jobs(&self, namespace: &str) -> Api<Job> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn act(&self, job: &BatchJobSnapshot, actions: &Action) -> Result<(), ActionError> {
        match actions {
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
            Action::Taken => Ok(()),
        }
    }

    /// Changes the Job, and no other version of it than the one that was decided on.
    async fn patch(&self, job: &BatchJobSnapshot, mut patch: Value) -> Result<(), ActionError> {
        patch["metadata"]["resourceVersion"] = json!(job.resource_version);
        let done = self.jobs(&job.namespace).patch(&job.name, &params(), &Patch::Merge(patch)).await;
        done.map(drop).or_else(gone)
    }

    async fn mark(&self, job: &BatchJobSnapshot, pod: &Stopped, mark: bool) -> Result<(), ActionError> {
        let (label, policy) = if mark { (Some(&job.name), Some(job.policy.name())) } else { (None, None) };
        let patch = json!({"metadata": {
            "uid": pod.uid, "labels": {JOB_LABEL: label}, "annotations": {POLICY_ANNOTATION: policy},
        }});
        let done = self.executor.pods(&job.namespace).patch(&pod.name, &params(), &Patch::Merge(patch)).await;
        done.map(drop).or_else(gone)
    }

    /// Pods that we hold and whose Job is gone: nothing follows them.
    async fn sweep(&self) -> Result<(), String> {
        // Those of TrainingJobs, tens of thousands perhaps, have no such uid.
        let marked = ListParams::default().labels(&format!("{JOB_LABEL},{CONTROLLER_UID}"));
        let pods = Api::<Pod>::all(self.client.clone()).list(&marked).await.map_err(|error| error.to_string())?;
        for pod in pods.iter().filter_map(PodSnapshot::of_batch).filter(|pod| pod.has_finalizer) {
            let Some(owner) = &pod.owner else { continue };
            let known = self.known.lock().expect("never poisoned").jobs.values().any(|uid| uid == owner);
            if !known {
                let done = self.executor.hold_pod(&pod.namespace, &pod.name, &pod.uid, false).await;
                done.map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    /// An event for what people would want to know; losing one is no harm.
    async fn publish_event(&self, job: &BatchJobSnapshot, actions: &Action) {
        let (Action::Write(step, journal) | Action::Resume(step, journal)) = actions else { return };
        if journal.message == job.journal.message {
            return;
        }
        tracing::info!(job = job.name, namespace = job.namespace, message = journal.message, "adopted Job");
        let warns = job.problem.is_some() || journal.unmovable != job.journal.unmovable;
        let event = Event {
            type_: if warns { EventType::Warning } else { EventType::Normal },
            reason: match *step {
                "stopping" => "Stopping",
                "stopped" => "Stopped",
                "running" => "Moved",
                "cancelled" => "MoveCancelled",
                _ if warns => "NotMovable",
                _ => "Adopted",
            }
            .to_owned(),
            note: Some(journal.message.chars().take(1000).collect()),
            action: "Move".to_owned(),
            secondary: None,
        };
        let reference = ObjectReference {
            api_version: Some("batch/v1".to_owned()),
            kind: Some("Job".to_owned()),
            namespace: Some(job.namespace.clone()),
            name: Some(job.name.clone()),
            uid: Some(job.uid.clone()),
            ..ObjectReference::default()
        };
        if let Err(error) = self.recorder.publish(&event, &reference).await {
            tracing::debug!(%error, "event not published");
        }
    }
}

impl Known {
    fn due(&mut self, orders: &Orders, off: bool, now: Timestamp) -> (BTreeSet<Key>, bool) {
        if std::mem::replace(&mut self.was_off, off) != off {
            self.dirty.extend(self.jobs.keys().cloned());
        }
        let ordered = self.jobs.iter().filter(|(_, uid)| orders.order(uid).is_some()).map(|(key, _)| key.clone());
        let mut due: BTreeSet<Key> = ordered.collect();
        due.append(&mut self.dirty);
        due.extend(self.wakes.iter().filter(|(_, at)| **at <= now).map(|(key, _)| key.clone()));
        self.wakes.retain(|_, at| *at > now);
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

fn name(actions: &Action) -> &'static str {
    match actions {
        Action::Write(step, _) => step,
        Action::Resume(..) => "resume",
        Action::Suspend => "suspend",
        Action::ClearStartTime => "clear-start-time",
        Action::Hold(_) => "hold-pod",
        Action::LetGo(_) => "let-go",
        Action::Mark(..) => "mark",
        Action::Forget => "forget",
        Action::Taken => "taken",
    }
}

/// Before an uninstall: no Job stays suspended by us. The Job controller itself waits for a pod that is still ending.
pub(crate) async fn give_back(client: &Client) -> kube::Result<()> {
    let all = Api::<Job>::all(client.clone()).list(&ListParams::default()).await?;
    for job in all.iter().filter_map(BatchJobSnapshot::of).filter(|job| job.has_journal) {
        let mut patch = json!({"metadata": note(None)});
        patch["metadata"]["resourceVersion"] = json!(job.resource_version);
        if job.journal.migration.is_some() && job.suspended {
            patch["spec"] = json!({"suspend": false});
        }
        let api = Api::<Job>::namespaced(client.clone(), &job.namespace);
        match api.patch(&job.name, &params(), &Patch::Merge(patch)).await {
            Ok(_) => {}
            // Gone, or changed meanwhile: whoever changed it is at work there, and the uninstall can be run again.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                tracing::warn!(name = job.name, "changed while it was let go");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
