//! The loop around the state machine: reads a TrainingJob, runs [`step`] on it, and executes the
//! actions.
//!
//! A job becomes due when something about it changes, when its alarm rings, or when there is an
//! order for it. One worker at a time has a job. At most [`AT_ONCE`] jobs are reconciled
//! concurrently, to bound the load on the API server. A failed request needs no cleanup: the job is
//! read again and `step` recomputes what to do.
//!
//! **A panic stays with its job.** It is caught, published as an event and as the condition
//! `ReconcileFailed` of that job, and the job is tried again after a growing rest.

use super::action::{Action, JournalStep, PodFault, Snapshot, Step};
use super::apply::{ActionError, Effect, Executor, FailPoint};
use super::machine::{self, REFUSAL_PAUSE, asked, movable, step};
use super::snapshot::{JobSnapshot, NodeState, Nodes, PodSnapshot};
use super::store::Store;
use super::{JobFacts, JobState, Orders, check_not_kept, off, pod, status};
use crate::isolate::{catch_future, skip_on_panic};
use crate::state::events::{self, Subject, Text};
use crate::state::lead::Leader;
use crate::state::metrics::WriteLabels;
use crate::state::watch::{Change, follow};
use crate::tasks::Tasks;
use gainshare_kube_api::names::{API_VERSION, CONTROLLER, JOB_LABEL, NamespacedName};
use gainshare_kube_api::quantity::template_requests;
use gainshare_kube_api::training_job::{JobPolicy, State, TrainingJob};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::Api;
use kube::runtime::events::Recorder;
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// So many jobs are reconciled at once.
const AT_ONCE: usize = 16;

/// A job that is not settled after so many steps in a row goes to the end of the queue.
const STEPS_AT_ONCE: usize = 16;

/// The pause before a job whose action failed is tried again.
const PAUSE: SignedDuration = SignedDuration::from_secs(1);

/// So many new jobs are published to the decision before their turn, so that a burst of them is
/// decided on together and no job waits for its order. The number is small because an order that
/// waits for long is outdated.
const ANNOUNCED: usize = 500;

/// How often progress is read, and published where it has changed much.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

/// The report of a panic must not hold up the queue.
const PANIC_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Jobs, pods, nodes.
const LISTS: usize = 3;

struct Controller {
    executor: Executor,
    client: Client,
    leader: Arc<Leader>,
    orders: Arc<Orders>,
    recorder: Recorder,
    store: Mutex<Store>,
    wake: Notify,
}

/// When to run the next step after an action that was not executed.
enum Retry {
    /// Our copies are newer now.
    AtOnce,
    /// After a pause, for this reason.
    Later(String),
}

impl From<kube::Error> for Retry {
    fn from(error: kube::Error) -> Retry {
        Retry::Later(error.to_string())
    }
}

/// Starts the controllers as tasks that end with the set.
pub(crate) fn start(tasks: &mut Tasks, leader: &Arc<Leader>, client: &Client, recorder: Recorder, fail_at: FailPoint) {
    super::adopt::start(tasks, leader, client, recorder.clone(), fail_at.clone());
    let controller = Arc::new(Controller {
        executor: Executor::new(client.clone(), fail_at),
        client: client.clone(),
        leader: leader.clone(),
        orders: leader.orders.clone(),
        recorder,
        store: Mutex::default(),
        wake: Notify::new(),
    });
    watch(tasks, &controller);
    tasks.spawn("the controller of training jobs", controller.run());
}

fn watch(tasks: &mut Tasks, controller: &Arc<Controller>) {
    let all = watcher::Config::default;
    let it = controller.clone();
    tasks.spawn("the watch of training jobs", async move {
        let put = |change| it.change(|store| it.put_jobs(store, change));
        let api = Api::<TrainingJob>::all(it.client.clone());
        follow(api, all(), &it.leader.metrics, |job| JobSnapshot::of(&job), put, || it.listed()).await;
    });
    let it = controller.clone();
    tasks.spawn("the watch of training jobs' pods", async move {
        let put = |change| {
            it.change(|store| match change {
                Change::Applied(pod) => store.put_pod(pod),
                Change::Deleted(pod) => store.gone_pod(&pod),
                Change::Listed(pods) => store.all_pods(pods),
            })
        };
        let api = Api::<Pod>::all(it.client.clone());
        let ours = all().labels(JOB_LABEL);
        follow(api, ours, &it.leader.metrics, |pod| PodSnapshot::of(&pod), put, || it.listed()).await;
    });
    let it = controller.clone();
    tasks.spawn("the watch of training jobs' nodes", async move {
        let put = |change: Change<(String, NodeState)>| {
            it.change(|store| match change {
                Change::Applied((name, node)) => store.put_node(&name, Some(node)),
                Change::Deleted((name, _)) => store.put_node(&name, None),
                Change::Listed(nodes) => store.all_nodes(nodes),
            })
        };
        let api = Api::<Node>::all(it.client.clone());
        let read = |node: Node| Some((node.name_any(), NodeState::of(&node)));
        follow(api, all(), &it.leader.metrics, read, put, || it.listed()).await;
    });
}

impl Controller {
    fn change(&self, change: impl FnOnce(&mut Store)) {
        change(&mut self.store.lock());
        self.wake.notify_one();
    }

    fn put_jobs(&self, store: &mut Store, change: Change<JobSnapshot>) {
        let gone = match change {
            Change::Applied(job) => {
                store.put_job(job);
                Vec::new()
            }
            Change::Deleted(job) => store.remove_job(&job.key()).into_iter().collect(),
            Change::Listed(jobs) => store.all_jobs(jobs),
        };
        gone.iter().for_each(|job| self.orders.forget(&job.uid));
    }

    fn listed(&self) {
        self.change(|store| store.lists_read += 1);
    }

    async fn run(self: Arc<Self>) {
        let mut progress_read = Instant::now();
        let (mut begun, mut was_off) = (false, false);
        let mut workers: JoinSet<(NamespacedName, Option<String>)> = JoinSet::new();
        loop {
            let mut next = None;
            // Nothing is done before every list has been read once. While sharing is switched off,
            // only deletions are completed.
            let is_off = self.leader.read(|world| world.is_off());
            if self.leader.is_synced() && self.store.lock().lists_read >= LISTS {
                if std::mem::replace(&mut was_off, is_off) != is_off {
                    self.mark_all();
                }
                if !is_off && !std::mem::replace(&mut begun, true) {
                    self.publish_running_jobs();
                }
                let mut progressed = Vec::new();
                if progress_read.elapsed() >= PROGRESS_EVERY {
                    progress_read = Instant::now();
                    progressed.extend(self.leader.take_progressed().into_iter().map(NamespacedName::from));
                    progressed.extend(self.orders.take_category_changes());
                }
                let ordered = self.orders.take_ordered();
                let mut store = self.store.lock();
                ordered.into_iter().for_each(|key| store.mark(key));
                progressed.into_iter().for_each(|key| store.mark_later(key));
                if !is_off {
                    self.announce(&mut store);
                }
                while workers.len() < AT_ONCE
                    && let Some(key) = store.take(Timestamp::now())
                {
                    let it = self.clone();
                    workers.spawn(async move {
                        let panic = catch_future(it.settle(&key, is_off)).await.err();
                        (key, panic)
                    });
                }
                next = store.next_alarm().filter(|_| workers.len() < AT_ONCE);
            }
            let until = next.map_or(PROGRESS_EVERY, |at| {
                Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO).min(PROGRESS_EVERY)
            });
            tokio::select! {
                Some(done) = workers.join_next(), if !workers.is_empty() => {
                    match done {
                        Ok((key, None)) => self.store.lock().done(&key),
                        Ok((key, Some(panic))) => self.report_panic(&key, &panic).await,
                        // A worker is cancelled only when the whole set ends.
                        Err(error) => tracing::error!(%error, "a worker ended without an answer"),
                    }
                }
                () = self.wake.notified() => {}
                () = self.orders.ordered.notified() => {}
                () = tokio::time::sleep(until.max(Duration::from_millis(1))) => {}
            }
        }
    }

    /// Marks every job for a step: what may be done has changed.
    fn mark_all(&self) {
        let mut store = self.store.lock();
        let keys: Vec<NamespacedName> = store.all().map(|(job, _)| job.key()).collect();
        keys.into_iter().for_each(|key| store.mark(key));
    }

    /// Publishes all jobs that have begun at once. With only some of them, the decision would take
    /// nodes for empty that are not.
    fn publish_running_jobs(&self) {
        let store = self.store.lock();
        let begun = store.all().filter(|(job, _)| job.status.attempt.is_some());
        let begun = begun.filter_map(|(job, pods)| {
            let read = || facts(job, &pods, self.requests(job).unwrap_or_default());
            skip_on_panic("TrainingJob", &job.key().to_string(), read).flatten()
        });
        self.orders.publish_all(begun.collect());
    }

    fn announce(&self, store: &mut Store) {
        let coming = store.coming(ANNOUNCED);
        let new = coming.iter().filter_map(|job| {
            let read = || facts(job, &[], self.requests(job).ok()?);
            skip_on_panic("TrainingJob", &job.key().to_string(), read).flatten()
        });
        self.orders.publish_all(new.collect());
    }

    /// The reconcile of this job panicked: the job rests, and an event and a condition say so. No
    /// other job is affected.
    async fn report_panic(&self, key: &NamespacedName, panic: &str) {
        let (job, rest) = {
            let mut store = self.store.lock();
            (store.job(key), store.panicked(key, Timestamp::now()))
        };
        tracing::error!(%key, panic, rest_s = rest.as_secs(), "the reconcile of a TrainingJob panicked");
        let Some(job) = job else { return };
        let message =
            format!("the operator cannot work on this job because of an error of its own ({panic}): please report it");
        let failed = status::with_reconcile_failure(&job.status, job.generation, &message, Timestamp::now());
        let Some(failed) = failed else { return };
        let report = async {
            let text = Text { warns: true, reason: "ReconcileFailed", note: &message, action: "Run" };
            self.publish_event(&job, text).await;
            self.executor.write(&job, &failed).await
        };
        match tokio::time::timeout(PANIC_REPORT_TIMEOUT, catch_future(report)).await {
            Ok(Ok(Ok(Effect::Job(written)))) => self.change(|store| store.put_job(*written)),
            Ok(Ok(Ok(_))) => {}
            other => tracing::warn!(%key, ?other, "cannot write the condition of a TrainingJob that panicked"),
        }
    }

    /// What the job's pods request; an error if there can be no pod.
    fn requests(&self, job: &JobSnapshot) -> Result<(u64, u64), pod::TemplateError> {
        let has_pod = job.status.attempt.as_ref().is_some_and(|attempt| attempt.uid.is_some());
        let known = self.orders.requests(&job.uid).filter(|_| has_pod);
        known.map_or_else(|| pod::check(job).map(|template| template_requests(&template)), Ok)
    }

    /// Runs steps for one job until nothing is left to do for now.
    async fn settle(&self, key: &NamespacedName, is_off: bool) {
        for _ in 0..STEPS_AT_ONCE {
            let job = self.store.lock().job(key);
            let Some(job) = job else { return self.release_orphans(key).await };
            let now = Timestamp::now();
            let next = match self.next(key, &job, now).await {
                Ok(next) if is_off => {
                    let pods = self.store.lock().pods(key);
                    off::limit(&job, &pods, next)
                }
                Ok(next) => next,
                Err(error) => return self.later(key, &error.to_string(), now),
            };
            if next.actions.is_empty() {
                return self.store.lock().wake_at(key, next.wake);
            }
            for action in &next.actions {
                if *action == Action::RemoveOrder {
                    self.orders.remove_order(&job.uid);
                    continue;
                }
                match self.act(key, &job, action).await {
                    Ok(()) => {}
                    Err(Retry::AtOnce) => break,
                    Err(Retry::Later(error)) => return self.later(key, &error, now),
                }
            }
        }
        // Our copies are probably old: the watch will bring newer ones.
        self.later(key, "many steps in a row", Timestamp::now());
    }

    fn later(&self, key: &NamespacedName, error: &str, now: Timestamp) {
        tracing::warn!(job = key.name, namespace = key.namespace, error, "a TrainingJob is retried later");
        let again = now.saturating_add(PAUSE).unwrap_or(now);
        self.store.lock().wake_at(key, Some(again));
    }

    /// Executes one action and updates our copies.
    async fn act(&self, key: &NamespacedName, job: &JobSnapshot, action: &Action) -> Result<(), Retry> {
        let result = self.executor.act(job, action).await;
        let outcome = match &result {
            Ok(_) => "done",
            Err(ActionError::Refused(_)) => "refused",
            Err(_) => "again",
        };
        self.leader.metrics.writes.get_or_create(&WriteLabels { what: "job", outcome }).inc();
        match result {
            Ok(Effect::Job(written)) => {
                self.publish_step(job, &written, action).await;
                self.change(|store| store.put_job(*written));
            }
            Ok(Effect::JobGone) => {
                self.orders.forget(&job.uid);
                self.change(|store| drop(store.remove_job(key)));
            }
            Ok(Effect::Pod(pod)) => self.change(|store| store.put_pod(*pod)),
            Ok(Effect::PodGone { name, uid }) => self.change(|store| store.remove_pod(key, &name, &uid)),
            Ok(Effect::Nothing) => {}
            Err(ActionError::Refused(fault)) => {
                let until = Timestamp::now().saturating_add(REFUSAL_PAUSE).unwrap_or(Timestamp::MAX);
                self.change(|store| store.put_fault(key, fault, until));
                return Err(Retry::AtOnce);
            }
            Err(ActionError::Old(_)) => return self.read_again(key, job).await,
            Err(ActionError::Again(error)) => return Err(Retry::Later(error)),
        }
        Ok(())
    }

    /// Our copies are old: reads the job and its pod again.
    async fn read_again(&self, key: &NamespacedName, job: &JobSnapshot) -> Result<(), Retry> {
        let found = self.executor.jobs(&key.namespace).get_opt(&key.name).await?;
        match found.as_ref().and_then(JobSnapshot::of) {
            Some(found) => self.change(|store| store.put_job(found)),
            None => {
                self.orders.forget(&job.uid);
                self.change(|store| drop(store.remove_job(key)));
            }
        }
        let named = job.status.attempt.as_ref().map(|attempt| attempt.pod.clone());
        if let Some(named) = named
            && let Some(pod) = self.executor.pods(&key.namespace).get_opt(&named).await?
            && let Some(pod) = PodSnapshot::of(&pod)
        {
            self.change(|store| store.put_pod(pod));
        }
        Err(Retry::AtOnce)
    }

    /// Gathers the snapshot, publishes the facts of the job to the decision, and runs a step.
    async fn next(&self, key: &NamespacedName, job: &JobSnapshot, now: Timestamp) -> kube::Result<Step> {
        let mut pods = self.store.lock().pods(key);
        let pod_is_missing = self.is_missing(key, job, &mut pods).await?;
        let (nodes, node_wake) = self.nodes(job, &pods, now).await?;
        let requests = self.requests(job);
        let fault = match &requests {
            Err(error) => Some(PodFault { for_good: true, message: error.to_string() }),
            Ok(_) => self.store.lock().fault(key, now),
        };
        // The annotation, which a person wrote, goes before the decision.
        let order = asked(job).or_else(|| self.orders.order(&job.uid));
        let pod_uid = job.status.attempt.as_ref().and_then(|attempt| attempt.uid.clone());
        if let Some(uid) = pod_uid.as_ref().filter(|_| machine::saves_itself(&job.status)) {
            self.leader.change(|world| world.give_back(uid));
        }
        let judged = self.orders.category(&job.uid);
        let progress = pod_uid.as_ref().and_then(|uid| {
            let agents = self.leader.agents.lock();
            let job = agents.job(uid)?;
            let category = judged.unwrap_or(job.category).name();
            Some((category, job.share.map(|share| (share.clamp(0.0, 1.0) * 100.0).round() as u32)))
        });
        match facts(job, &pods, requests.unwrap_or_default()) {
            Some(facts) => self.orders.publish(facts),
            None => self.orders.forget(&job.uid),
        }
        let mut next = step(&Snapshot {
            now,
            job,
            pods: &pods,
            pod_is_missing,
            nodes: &nodes,
            order: order.as_ref(),
            fault: fault.as_ref(),
            progress,
        });
        next.wake = next.wake.into_iter().chain(node_wake).min();
        Ok(next)
    }

    /// Whether the pod that the journal names does not exist. Our copies may be old, so the API
    /// server is asked.
    async fn is_missing(
        &self,
        key: &NamespacedName,
        job: &JobSnapshot,
        pods: &mut Vec<PodSnapshot>,
    ) -> kube::Result<bool> {
        let Some(attempt) = job.status.attempt.as_ref().filter(|attempt| attempt.ended.is_none()) else {
            return Ok(false);
        };
        let Some(uid) = attempt.uid.as_ref().filter(|uid| pods.iter().all(|pod| pod.uid != **uid)) else {
            return Ok(false);
        };
        let found = self.executor.pods(&key.namespace).get_opt(&attempt.pod).await?;
        let Some(found) = found.as_ref().and_then(PodSnapshot::of) else { return Ok(true) };
        let is_it = found.uid == *uid;
        pods.retain(|pod| pod.name != found.name);
        pods.push(found.clone());
        self.change(|store| store.put_pod(found));
        Ok(!is_it)
    }

    /// The nodes of this job, and when a missing one of them counts as off. "Off" and "missing" are
    /// believed only if the API server itself answers so now.
    async fn nodes(
        &self,
        job: &JobSnapshot,
        pods: &[PodSnapshot],
        now: Timestamp,
    ) -> kube::Result<(Nodes, Option<Timestamp>)> {
        let named = job.status.attempt.as_ref().and_then(|attempt| attempt.node.clone());
        let names = pods.iter().filter_map(|pod| pod.node.clone()).chain(named);
        let (mut nodes, mut wake) = (Nodes::new(), None);
        for name in names {
            let known = self.store.lock().node(&name);
            let node = match known {
                Some(node) => node,
                None => {
                    let api = Api::<Node>::all(self.client.clone());
                    match api.get_opt(&name).await? {
                        Some(found) => NodeState::of(&found),
                        None => {
                            let (node, left) = self.store.lock().missing_node(&name, Instant::now());
                            let left = left.and_then(|left| SignedDuration::try_from(left).ok());
                            let at = left.and_then(|left| now.saturating_add(left).ok());
                            wake = wake.into_iter().chain(at).min();
                            node
                        }
                    }
                }
            };
            nodes.insert(name, node);
        }
        Ok((nodes, wake))
    }

    /// Releases the pods of a job that does not exist: no attempt follows them, so their ends need
    /// not be read.
    async fn release_orphans(&self, key: &NamespacedName) {
        let held = self.store.lock().pods(key);
        let held: Vec<PodSnapshot> = held.into_iter().filter(|pod| pod.has_finalizer).collect();
        if held.is_empty() {
            return;
        }
        let now = Timestamp::now();
        match self.executor.jobs(&key.namespace).get_opt(&key.name).await {
            Ok(None) => {}
            Ok(Some(job)) => {
                return self.change(|store| JobSnapshot::of(&job).into_iter().for_each(|job| store.put_job(job)));
            }
            Err(error) => return self.later(key, &error.to_string(), now),
        }
        let no_job = JobSnapshot { namespace: key.namespace.clone(), name: key.name.clone(), ..JobSnapshot::default() };
        for pod in held {
            let action = Action::LetGo { pod: pod.name.clone(), uid: pod.uid.clone() };
            if let Err(Retry::Later(error)) = self.act(key, &no_job, &action).await {
                return self.later(key, &error, now);
            }
        }
    }

    /// Publishes an event about a journal entry. A lost event is harmless.
    async fn publish_step(&self, before: &JobSnapshot, after: &JobSnapshot, action: &Action) {
        let (old, new) = (&before.status, &after.status);
        let Action::Write(step, _) = action else { return };
        if (old.state, &old.message) == (new.state, &new.message) {
            return;
        }
        tracing::info!(job = after.name, namespace = after.namespace, state = ?new.state, message = new.message);
        let warns = matches!(new.state, State::Failed | State::Restarting) || new.unmovable != old.unmovable;
        // Events of one reason are counted, not listed: each step has its own.
        let reason = if *step == JournalStep::Noted { format!("{:?}", new.state) } else { capital(step.name()) };
        self.publish_event(after, Text { warns, reason: &reason, note: &new.message, action: "Run" }).await;
    }

    async fn publish_event(&self, job: &JobSnapshot, text: Text<'_>) {
        let subject = Subject {
            api_version: API_VERSION,
            kind: "TrainingJob",
            namespace: &job.namespace,
            name: &job.name,
            uid: Some(&job.uid),
        };
        events::publish(&self.recorder, subject, text).await;
    }
}

/// As reasons of events are written.
fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// What the decision reads; `None` for jobs of other controllers and jobs that are being deleted.
fn facts(
    job: &JobSnapshot,
    pods: &[PodSnapshot],
    (cpu_request_milli, memory_request_bytes): (u64, u64),
) -> Option<JobFacts> {
    if job.deleting || job.spec.managed_by.as_deref().is_some_and(|name| name != CONTROLLER) {
        return None;
    }
    let status = &job.status;
    let attempt = status.attempt.as_ref().filter(|attempt| attempt.ended.is_none());
    let deleted = |uid: &Option<String>| pods.iter().any(|pod| Some(&pod.uid) == uid.as_ref() && pod.deleted.is_some());
    let state = match (status.state, attempt) {
        (State::Succeeded | State::Failed, _) => JobState::Done,
        _ if job.spec.suspend => JobState::Moving,
        (_, None) => JobState::Waiting,
        (_, Some(attempt)) if attempt.stopping.is_some() || deleted(&attempt.uid) => JobState::Moving,
        (_, Some(attempt)) => match (&attempt.start_time, &attempt.node) {
            (Some(since), Some(node)) => JobState::Running { node: node.clone(), epoch: attempt.epoch, since: since.0 },
            _ if attempt.uid.is_none() && !attempt.pinned && job.spec.policy != JobPolicy::Na => JobState::Waiting,
            _ => JobState::Moving,
        },
    };
    Some(JobFacts {
        uid: job.uid.clone(),
        namespace: job.namespace.clone(),
        name: job.name.clone(),
        owner: job.namespace.clone(),
        arrived: job.created,
        policy: job.spec.policy,
        state,
        movable: movable(job).and_then(|()| check_not_kept(job.wanted_node.as_deref())),
        pod_uid: attempt.and_then(|attempt| attempt.uid.clone()),
        cpu_request_milli,
        memory_request_bytes,
        tried: attempt.map(|attempt| attempt.tried.clone()).unwrap_or_default(),
        move_cost_s: status.last_moves.last().map(|made| made.save_s + made.restore_s),
    })
}
