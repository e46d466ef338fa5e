//! The controller of all workloads: takes one from the queue, lets its adapter read it and decide, executes the
//! actions, and repeats that until nothing is left to do for now.
//!
//! A workload becomes due when something about it changes, when its alarm rings, or when there is an
//! order for it. One worker at a time has a workload. At most [`AT_ONCE`] are reconciled concurrently,
//! to bound the load on the API server. A failed request needs no cleanup: the workload is read again
//! and its state machine recomputes what to do.
//!
//! **A panic stays with its workload.** It is caught, published on that object, and the workload is tried again
//! after a growing rest.

use super::batch_job::BatchJobs;
use super::pods::PodRequests;
use super::queue::Queue;
use super::task_job::{GangQueue, QueueWeights, TaskJobs, TfJobKind, TrainingJobKind};
use super::training_job::TrainingJobs;
use super::workload::{ActionError, EventText, Workload};
use crate::fail_point::FailPoint;
use crate::isolate::catch_future;
use crate::state::events::{self, Subject, Text};
use crate::state::lead::Leader;
use crate::state::metrics::WriteLabels;
use crate::state::orders::Orders;
use crate::state::workload::{WorkloadKey, WorkloadKind};
use crate::tasks::Tasks;
use gainshare_kube_api::names::{JobUid, NamespacedName};
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::runtime::events::Recorder;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// The number of workloads that are reconciled at once.
const AT_ONCE: usize = 16;

/// A workload that is not settled after this number of steps in a row goes to the end of the queue.
const STEPS_AT_ONCE: usize = 16;

/// A request that takes longer is given up and tried again.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The pause before a workload whose action failed is tried again.
const PAUSE: SignedDuration = SignedDuration::from_secs(1);

/// This number of new jobs is published to the decision before their turn, so that a burst of them is
/// decided on together and no job waits for its order. The number is small because an order that
/// waits for long is outdated.
const ANNOUNCED: usize = 500;

/// How often progress is read, and published where it has changed much.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

/// The report of a panic must not hold up the queue.
const PANIC_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

struct Controller {
    leader: Arc<Leader>,
    orders: Arc<Orders>,
    recorder: Recorder,
    fail_at: FailPoint,
    queue: Mutex<Queue>,
    pods: PodRequests,
    training_jobs: TrainingJobs,
    batch_jobs: BatchJobs,
    task_jobs: TaskJobs<TrainingJobKind>,
    tfjobs: TaskJobs<TfJobKind>,
}

/// Starts the controller as a task that ends with the set.
pub(crate) fn start(
    tasks: &mut Tasks,
    leader: &Arc<Leader>,
    client: &Client,
    recorder: Recorder,
    (fail_at, queues): (FailPoint, QueueWeights),
) {
    let pods = PodRequests::new(client.clone(), leader.clone());
    // Jobs of both kinds wait in one line.
    let line = Arc::new(GangQueue::new(queues));
    let controller = Arc::new(Controller {
        leader: leader.clone(),
        orders: leader.orders.clone(),
        recorder,
        fail_at: fail_at.clone(),
        queue: Mutex::default(),
        training_jobs: TrainingJobs::new(client.clone(), leader.clone(), pods.clone()),
        batch_jobs: BatchJobs::new(client.clone(), leader.clone(), pods.clone()),
        task_jobs: TaskJobs::new(client.clone(), leader.clone(), pods.clone(), line.clone(), fail_at.clone()),
        tfjobs: TaskJobs::new(client.clone(), leader.clone(), pods.clone(), line, fail_at),
        pods,
    });
    tasks.spawn("the controller of jobs", controller.run());
}

impl Controller {
    async fn run(self: Arc<Self>) {
        let mut progress_read = Instant::now();
        let (mut begun, mut was_off) = (false, false);
        let mut workers: JoinSet<(WorkloadKey, Option<String>)> = JoinSet::new();
        loop {
            let mut next = None;
            // Nothing is done before every list has been read once. While sharing is switched off,
            // only deletions are completed and moves ended.
            let is_off = self.leader.read(|world| world.is_off());
            if self.leader.jobs_are_synced() {
                let switched = std::mem::replace(&mut was_off, is_off) != is_off;
                self.queue_changes(switched);
                if !is_off && !std::mem::replace(&mut begun, true) {
                    self.orders.publish_all(self.training_jobs.facts_of_begun());
                }
                if progress_read.elapsed() >= PROGRESS_EVERY {
                    progress_read = Instant::now();
                    self.queue_progress();
                }
                if !is_off {
                    let coming = self.queue.lock().coming(ANNOUNCED);
                    self.orders.publish_all(self.training_jobs.facts_of_new(&coming));
                }
                let mut queue = self.queue.lock();
                while workers.len() < AT_ONCE
                    && let Some(key) = queue.take(Timestamp::now())
                {
                    let it = self.clone();
                    workers.spawn(async move {
                        let panic = catch_future(it.settle_any(&key, is_off)).await.err();
                        (key, panic)
                    });
                }
                next = queue.next_alarm().filter(|_| workers.len() < AT_ONCE);
            }
            let until = next.map_or(PROGRESS_EVERY, |at| {
                Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or(Duration::ZERO).min(PROGRESS_EVERY)
            });
            tokio::select! {
                Some(done) = workers.join_next(), if !workers.is_empty() => {
                    match done {
                        Ok((key, None)) => self.queue.lock().done(&key),
                        Ok((key, Some(panic))) => self.report_any_panic(&key, &panic).await,
                        // A worker is cancelled only when the whole set ends.
                        Err(error) => tracing::error!(%error, "a worker ended without an answer"),
                    }
                }
                () = self.leader.jobs_changed.notified() => {}
                () = self.orders.ordered.notified() => {}
                () = tokio::time::sleep(until.max(Duration::from_millis(1))) => {}
            }
        }
    }

    /// Queues the workloads for which something has happened, or all of them: what may be done has changed.
    fn queue_changes(&self, all: bool) {
        let changes = self.leader.take_job_changes();
        let ordered = self.orders.take_ordered();
        let ordered: Vec<_> = self.leader.read(|world| {
            let marked = if all { world.jobs.keys().collect() } else { Vec::new() };
            let keys = marked.into_iter().chain(ordered);
            keys.map(|key| (world.jobs.order_change(&key), key)).collect()
        });
        let mut queue = self.queue.lock();
        changes.into_iter().for_each(|(key, change)| queue.put(key, change));
        ordered.into_iter().for_each(|(change, key)| queue.put(key, change));
    }

    /// Queues the workloads whose published progress or judgement may be old. Jobs have no place for progress.
    fn queue_progress(&self) {
        let progressed = self.leader.take_progressed().into_iter().filter(|key| key.kind != WorkloadKind::Job);
        let judged = self.orders.take_judged();
        let mut queue = self.queue.lock();
        progressed.chain(judged).for_each(|key| queue.put_last(key));
    }

    async fn settle_any(&self, key: &WorkloadKey, is_off: bool) {
        match key.kind {
            WorkloadKind::TrainingJob => self.settle(&self.training_jobs, key, is_off).await,
            WorkloadKind::Job => self.settle(&self.batch_jobs, key, is_off).await,
            WorkloadKind::TaskJob => self.settle(&self.task_jobs, key, is_off).await,
            WorkloadKind::TfJob => self.settle(&self.tfjobs, key, is_off).await,
        }
    }

    /// Runs steps for one workload until nothing is left to do for now.
    async fn settle<W: Workload>(&self, workload: &W, key: &WorkloadKey, is_off: bool) {
        match self.run_steps(workload, &key.name, is_off).await {
            Ok(wake) => self.queue.lock().wake_at(key, wake),
            Err(error) => {
                let (job, namespace, kind) = (&key.name.name, &key.name.namespace, key.kind.name());
                tracing::warn!(job, namespace, kind, %error, "a job is retried later");
                let now = Timestamp::now();
                self.queue.lock().wake_at(key, Some(now.saturating_add(PAUSE).unwrap_or(now)));
            }
        }
    }

    /// Answers when to run the next step if nothing happens before.
    async fn run_steps<W: Workload>(
        &self,
        workload: &W,
        name: &NamespacedName,
        is_off: bool,
    ) -> Result<Option<Timestamp>, ActionError> {
        for _ in 0..STEPS_AT_ONCE {
            let Some(turn) = workload.read(name, is_off).await? else {
                for pod in workload.orphans(name).await? {
                    let released = self.pods.hold(&pod.namespace, &pod.name, &pod.uid, false);
                    self.pods.record(self.request("let-go", released).await?);
                }
                return Ok(None);
            };
            for uid in &turn.saving_pods {
                self.leader.change(|world| world.give_back(uid));
            }
            match turn.facts {
                Some(facts) => self.orders.publish(facts),
                None => self.orders.forget(W::uid(&turn.job)),
            }
            let mut has_acted = false;
            for action in &turn.step.actions {
                if W::removes_order(action) {
                    has_acted |= self.orders.remove_order(W::uid(&turn.job));
                    continue;
                }
                has_acted = true;
                match self.request(W::action_name(action), workload.act(&turn.job, action)).await {
                    Ok(()) => self.publish_step::<W>(name, &turn.job, action).await,
                    Err(ActionError::Old(_)) => {
                        workload.refresh(&turn.job).await?;
                        break;
                    }
                    Err(ActionError::Refused(_)) => break,
                    Err(error) => return Err(error),
                }
            }
            if !has_acted {
                return Ok(turn.step.wake);
            }
        }
        // Our copies are probably old: the watch will bring newer ones.
        Err(ActionError::Again("many steps in a row".to_owned()))
    }

    /// Sends the request of one action, between its fail points.
    async fn request<T>(
        &self,
        name: &str,
        request: impl Future<Output = Result<T, ActionError>>,
    ) -> Result<T, ActionError> {
        self.fail_at.reach("before", name);
        let result = match tokio::time::timeout(TIMEOUT, request).await {
            Ok(result) => result,
            Err(_) => Err(ActionError::Again(format!("no answer within {} s", TIMEOUT.as_secs()))),
        };
        let outcome = match &result {
            Ok(_) => "done",
            Err(ActionError::Refused(_)) => "refused",
            Err(_) => "again",
        };
        self.leader.metrics.writes.get_or_create(&WriteLabels { what: "job", outcome }).inc();
        if result.is_ok() {
            self.fail_at.reach("after", name);
        }
        result
    }

    async fn report_any_panic(&self, key: &WorkloadKey, panic: &str) {
        match key.kind {
            WorkloadKind::TrainingJob => self.report_panic(&self.training_jobs, key, panic).await,
            WorkloadKind::Job => self.report_panic(&self.batch_jobs, key, panic).await,
            WorkloadKind::TaskJob => self.report_panic(&self.task_jobs, key, panic).await,
            WorkloadKind::TfJob => self.report_panic(&self.tfjobs, key, panic).await,
        }
    }

    /// The reconcile of this workload panicked: the workload rests, and its object says so. No other workload is
    /// affected.
    async fn report_panic<W: Workload>(&self, workload: &W, key: &WorkloadKey, panic: &str) {
        let rest = self.queue.lock().panicked(key, Timestamp::now());
        tracing::error!(%key, panic, rest_s = rest.as_secs(), "the reconcile of a job panicked");
        let kind = if key.kind == WorkloadKind::Job { "Job" } else { "job" };
        let note = format!(
            "the operator cannot work on this {kind} because of an error of its own ({panic}): please report it"
        );
        let report = async {
            if workload.record_panic(&key.name, &note).await {
                let text = EventText { warns: true, reason: "ReconcileFailed".to_owned(), note: note.clone() };
                self.publish_event::<W>(&key.name, workload.known_uid(&key.name).as_ref(), &text).await;
            }
        };
        if !matches!(tokio::time::timeout(PANIC_REPORT_TIMEOUT, catch_future(report)).await, Ok(Ok(()))) {
            tracing::warn!(%key, "cannot report on its object that the reconcile of a job panicked");
        }
    }

    /// Publishes an event about an action. A lost event is harmless.
    async fn publish_step<W: Workload>(&self, name: &NamespacedName, job: &W::Job, action: &W::Action) {
        let Some(text) = W::event(job, action) else { return };
        tracing::info!(job = name.name, namespace = name.namespace, message = text.note, "{}", W::KIND.name());
        self.publish_event::<W>(name, Some(W::uid(job)), &text).await;
    }

    async fn publish_event<W: Workload>(&self, name: &NamespacedName, uid: Option<&JobUid>, text: &EventText) {
        let subject = Subject {
            api_version: W::API_VERSION,
            kind: W::KIND.name(),
            namespace: &name.namespace,
            name: &name.name,
            uid: uid.map(JobUid::as_str),
        };
        let EventText { warns, reason, note } = text;
        let text = Text { warns: *warns, reason, note, action: W::EVENT_ACTION };
        events::publish(&self.recorder, subject, text).await;
    }
}
