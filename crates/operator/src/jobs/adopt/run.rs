//! The loop around adopted Jobs: reads them and their pods, asks [`step`] what to do, and does it.
//!
//! Jobs change whenever one of their pods does (`active`, `ready`, `terminating`), so a watch of Jobs is enough; what a step decides on is read afresh.

use super::machine::{Do, Next, Seen, asked, facts, step};
use super::seen::BatchSeen;
use super::{Journal, Stopped};
use crate::jobs::Board;
use crate::jobs::effects::{Done, FailPoint, Hand, NotDone, params, told};
use crate::jobs::seen::{NodeSeen, Nodes, PodSeen};
use crate::state::lead::Leader;
use crate::state::metrics::WriteLabels;
use crate::state::watch::{News, follow};
use crate::tasks::Tasks;
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

/// The label that Job controllers give to pods.
const CONTROLLER_UID: &str = "batch.kubernetes.io/controller-uid";

const AT_ONCE: usize = 8;
const STEPS_AT_ONCE: usize = 16;
/// Jobs per page of a list.
const PAGE: u32 = 500;
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
    hand: Hand,
    client: Client,
    leader: Arc<Leader>,
    board: Arc<Board>,
    recorder: Recorder,
    fail_at: FailPoint,
    known: Mutex<Known>,
    bell: Notify,
}

pub(in crate::jobs) fn start(
    tasks: &mut Tasks,
    leader: &Arc<Leader>,
    client: &Client,
    recorder: Recorder,
    fail_at: FailPoint,
) {
    let adopter = Arc::new(Adopter {
        hand: Hand::new(client.clone(), FailPoint::default()),
        client: client.clone(),
        leader: leader.clone(),
        board: leader.jobs.clone(),
        recorder,
        fail_at,
        known: Mutex::default(),
        bell: Notify::new(),
    });
    let it = adopter.clone();
    tasks.spawn("the watch of Jobs", async move {
        let api = Api::<Job>::all(it.client.clone());
        let complete = || it.change(|known| (known.listed, known.sweep) = (true, true));
        let read = |job: Job| BatchSeen::of(&job);
        follow(api, watcher::Config::default(), &it.leader.metrics, read, |news| it.put(news), complete).await;
    });
    tasks.spawn("the controller of adopted Jobs", adopter.run());
}

impl Known {
    /// Takes in a Job; answers the uid of one that no longer concerns us.
    fn put(&mut self, job: &BatchSeen, here: bool) -> Option<String> {
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

    fn put(&self, news: News<BatchSeen>) {
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
            gone.iter().for_each(|uid| self.board.forget(uid));
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
                    known.due(&self.board, off, now)
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
                    let idle = next.todo.iter().all(|todo| *todo == Do::Taken);
                    if next.todo.contains(&Do::Taken) {
                        self.board.taken(&job.uid);
                    }
                    if idle {
                        return self.wake(&key, next.wake);
                    }
                    self.act_all(&job, &next).await
                }
                Ok(None) => return,
                Err(error) => Err(NotDone::Again(error)),
            };
            match next {
                // Old: what is read next is newer.
                Ok(()) | Err(NotDone::Old(_)) => {}
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
    async fn step(&self, key: &Key, off: bool) -> Result<Option<(BatchSeen, Next)>, String> {
        let say = |error: kube::Error| error.to_string();
        let found = self.jobs(&key.0).get_opt(&key.1).await.map_err(say)?;
        let Some(job) = found.as_ref().and_then(BatchSeen::of).filter(BatchSeen::is_ours) else { return Ok(None) };
        let own = ListParams::default().labels(&format!("{CONTROLLER_UID}={}", job.uid));
        let pods = self.hand.pods(&key.0).list(&own).await.map_err(say)?;
        let pods: Vec<PodSeen> = pods.iter().filter_map(PodSeen::of_batch).collect();
        let pods: Vec<PodSeen> = pods.into_iter().filter(|pod| pod.owner.as_ref() == Some(&job.uid)).collect();
        let mut nodes = Nodes::new();
        if let Some(migration) = &job.journal.migration {
            let named = pods.iter().filter_map(|pod| pod.node.clone()).chain([migration.from.clone()]);
            for name in named.collect::<BTreeSet<String>>() {
                let node = Api::<Node>::all(self.client.clone()).get_opt(&name).await.map_err(say)?;
                nodes.insert(name, node.as_ref().map_or(NodeSeen::Off, NodeSeen::of));
            }
        }
        if let Some(pod) = job.journal.pod.as_ref().filter(|_| job.journal.migration.is_some()) {
            self.leader.change(|world| world.give_back(&pod.uid));
        }
        let order = asked(&job).or_else(|| self.board.order(&job.uid));
        let seen = Seen { now: Timestamp::now(), job: &job, pods: &pods, nodes: &nodes, order: order.as_ref(), off };
        match facts(&seen) {
            Some(facts) => self.board.publish(facts),
            None => self.board.forget(&job.uid),
        }
        let next = step(&seen);
        Ok(Some((job, next)))
    }

    async fn act_all(&self, job: &BatchSeen, next: &Next) -> Result<(), NotDone> {
        for todo in next.todo.iter().filter(|todo| **todo != Do::Taken) {
            let name = name(todo);
            self.fail_at.reach("before", name);
            let done = self.act(job, todo).await;
            let outcome = if done.is_ok() { "done" } else { "again" };
            self.leader.metrics.writes.get_or_create(&WriteLabels { what: "job", outcome }).inc();
            done?;
            self.fail_at.reach("after", name);
            self.tell(job, todo).await;
        }
        Ok(())
    }

    fn jobs(&self, namespace: &str) -> Api<Job> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn act(&self, job: &BatchSeen, todo: &Do) -> Result<(), NotDone> {
        match todo {
            Do::Write(_, journal) => self.patch(job, json!({"metadata": note(Some(journal))})).await,
            Do::Suspend => self.patch(job, json!({"spec": {"suspend": true}})).await,
            Do::Resume(_, journal) => {
                let mut spec = match &journal.prefers {
                    Some(node) if job.journal.prefers.as_ref() != Some(node) => job.preferring(Some(node)),
                    _ => json!({}),
                };
                spec["suspend"] = json!(false);
                self.patch(job, json!({"metadata": note(Some(journal)), "spec": spec})).await
            }
            Do::Forget => {
                let spec = if job.journal.prefers.is_some() { job.preferring(None) } else { json!({}) };
                self.patch(job, json!({"metadata": note(None), "spec": spec})).await
            }
            Do::ClearStartTime => {
                let patch =
                    json!({"metadata": {"resourceVersion": job.resource_version}, "status": {"startTime": null}});
                let done = self.jobs(&job.namespace).patch_status(&job.name, &params(), &Patch::Merge(patch)).await;
                done.map(drop).or_else(gone)
            }
            Do::Hold(pod) => self.hand.hold_pod(&job.namespace, &pod.name, &pod.uid, true).await.map(drop),
            Do::LetGo(pod) => self.hand.hold_pod(&job.namespace, &pod.name, &pod.uid, false).await.map(drop),
            Do::Mark(pod, mark) => self.mark(job, pod, *mark).await,
            Do::Taken => Ok(()),
        }
    }

    /// Changes the Job, and no other version of it than the one that was decided on.
    async fn patch(&self, job: &BatchSeen, mut patch: Value) -> Result<(), NotDone> {
        patch["metadata"]["resourceVersion"] = json!(job.resource_version);
        let done = self.jobs(&job.namespace).patch(&job.name, &params(), &Patch::Merge(patch)).await;
        done.map(drop).or_else(gone)
    }

    async fn mark(&self, job: &BatchSeen, pod: &Stopped, mark: bool) -> Result<(), NotDone> {
        let (label, policy) = if mark { (Some(&job.name), Some(job.policy.name())) } else { (None, None) };
        let patch = json!({"metadata": {
            "uid": pod.uid, "labels": {JOB_LABEL: label}, "annotations": {POLICY_ANNOTATION: policy},
        }});
        let done = self.hand.pods(&job.namespace).patch(&pod.name, &params(), &Patch::Merge(patch)).await;
        done.map(drop).or_else(gone)
    }

    /// Pods that we hold and whose Job is gone: nothing follows them.
    async fn sweep(&self) -> Result<(), String> {
        // Those of TrainingJobs, tens of thousands perhaps, have no such uid.
        let marked = ListParams::default().labels(&format!("{JOB_LABEL},{CONTROLLER_UID}"));
        let pods = Api::<Pod>::all(self.client.clone()).list(&marked).await.map_err(|error| error.to_string())?;
        for pod in pods.iter().filter_map(PodSeen::of_batch).filter(|pod| pod.has_finalizer) {
            let Some(owner) = &pod.owner else { continue };
            let known = self.known.lock().expect("never poisoned").jobs.values().any(|uid| uid == owner);
            if !known {
                let done = self.hand.hold_pod(&pod.namespace, &pod.name, &pod.uid, false).await;
                done.map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    /// An event for what people would want to know; losing one is no harm.
    async fn tell(&self, job: &BatchSeen, todo: &Do) {
        let (Do::Write(step, journal) | Do::Resume(step, journal)) = todo else { return };
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
    fn due(&mut self, board: &Board, off: bool, now: Timestamp) -> (BTreeSet<Key>, bool) {
        if std::mem::replace(&mut self.was_off, off) != off {
            self.dirty.extend(self.jobs.keys().cloned());
        }
        let ordered = self.jobs.iter().filter(|(_, uid)| board.order(uid).is_some()).map(|(key, _)| key.clone());
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
fn gone(error: kube::Error) -> Result<(), NotDone> {
    told(error, Done::Nothing).map(drop)
}

fn name(todo: &Do) -> &'static str {
    match todo {
        Do::Write(step, _) => step,
        Do::Resume(..) => "resume",
        Do::Suspend => "suspend",
        Do::ClearStartTime => "clear-start-time",
        Do::Hold(_) => "hold-pod",
        Do::LetGo(_) => "let-go",
        Do::Mark(..) => "mark",
        Do::Forget => "forget",
        Do::Taken => "taken",
    }
}

/// For an uninstall: no Job stays suspended by us. The Job controller itself waits for a pod that is still ending. Answers what could
/// not be changed, and why.
pub(crate) async fn give_back(client: &Client) -> kube::Result<Vec<String>> {
    let mut failures = Vec::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let jobs = Api::<Job>::all(client.clone()).list(&page).await?;
        for job in jobs.iter().filter_map(BatchSeen::of).filter(|job| job.has_journal) {
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
