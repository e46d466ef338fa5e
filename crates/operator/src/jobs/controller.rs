//! The loop around the state machine: reads, asks [`step`] what to do, and does it.
//!
//! Jobs are looked at when something about them changes, when their own time comes, or when an order lies on the board. One job is worked on by one
//! task at a time; some jobs at once, and never more: that is what the API server is asked to bear, however many orders lie on the board. A deed
//! that fails is no matter: the job is read again and the next step finds what is to be done.

use super::effects::{Done, FailPoint, Hand, NotDone};
use super::machine::{self, Do, Fault, Next, REFUSAL_PAUSE, Seen, asked, movable, step};
use super::seen::{self, JobSeen, NodeSeen, Nodes, PodSeen};
use super::store::{Key, Store};
use super::{Board, JobFacts, JobState, unless_kept};
use super::{off, pod};
use crate::state::lead::Leader;
use crate::state::metrics::WriteLabels;
use crate::state::watch::{News, follow};
use crate::tasks::Tasks;
use gainshare_kube_api::training_job::{JOB_LABEL, JobPolicy, OUR_NAME, State, TrainingJob};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod};
use kube::api::Api;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// So many jobs are worked on at once.
const AT_ONCE: usize = 16;

/// A job that is not settled after so many steps in a row waits for its turn.
const STEPS_AT_ONCE: usize = 16;

/// The pause before a job whose deed failed is looked at again.
const PAUSE: jiff::SignedDuration = jiff::SignedDuration::from_secs(1);

/// So many new jobs are told to the decision before their turn comes, so that a burst of them is decided on together and nobody waits for its order; not
/// more, because an order that waits for long is an old one.
const ANNOUNCED: usize = 500;

/// How often progress is looked at, to be written where it has changed much.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

/// Jobs, pods, nodes.
const LISTS: usize = 3;

struct Controller {
    hand: Hand,
    client: Client,
    leader: Arc<Leader>,
    board: Arc<Board>,
    recorder: Recorder,
    store: Mutex<Store>,
    bell: Notify,
}

/// Everything the controller does, as tasks that end with the set.
pub(crate) fn start(tasks: &mut Tasks, leader: &Arc<Leader>, client: &Client, recorder: Recorder, fail_at: FailPoint) {
    super::adopt::start(tasks, leader, client, recorder.clone(), fail_at.clone());
    let controller = Arc::new(Controller {
        hand: Hand::new(client.clone(), fail_at),
        client: client.clone(),
        leader: leader.clone(),
        board: leader.jobs.clone(),
        recorder,
        store: Mutex::default(),
        bell: Notify::new(),
    });
    watch(tasks, &controller);
    tasks.spawn("the controller of training jobs", controller.run());
}

fn watch(tasks: &mut Tasks, controller: &Arc<Controller>) {
    let all = watcher::Config::default;
    let it = controller.clone();
    tasks.spawn("the watch of training jobs", async move {
        let put = |news| it.change(|store| it.put_jobs(store, news));
        let api = Api::<TrainingJob>::all(it.client.clone());
        follow(api, all(), &it.leader.metrics, |job| JobSeen::of(&job), put, || it.listed()).await;
    });
    let it = controller.clone();
    tasks.spawn("the watch of training jobs' pods", async move {
        let put = |news| {
            it.change(|store| match news {
                News::Here(pod) => store.put_pod(pod),
                News::Gone(pod) => store.gone_pod(&pod),
                News::All(pods) => store.all_pods(pods),
            })
        };
        let api = Api::<Pod>::all(it.client.clone());
        let ours = all().labels(JOB_LABEL);
        follow(api, ours, &it.leader.metrics, |pod| PodSeen::of(&pod), put, || it.listed()).await;
    });
    let it = controller.clone();
    tasks.spawn("the watch of training jobs' nodes", async move {
        let put = |news: News<(String, NodeSeen)>| {
            it.change(|store| match news {
                News::Here((name, node)) => store.put_node(&name, Some(node)),
                News::Gone((name, _)) => store.put_node(&name, None),
                News::All(nodes) => store.all_nodes(nodes),
            })
        };
        let api = Api::<Node>::all(it.client.clone());
        let read = |node: Node| Some((node.name_any(), NodeSeen::of(&node)));
        follow(api, all(), &it.leader.metrics, read, put, || it.listed()).await;
    });
}

impl Controller {
    fn change(&self, change: impl FnOnce(&mut Store)) {
        change(&mut self.store.lock().expect("never poisoned"));
        self.bell.notify_one();
    }

    fn put_jobs(&self, store: &mut Store, news: News<JobSeen>) {
        let gone = match news {
            News::Here(job) => {
                store.put_job(job);
                Vec::new()
            }
            News::Gone(job) => store.remove_job(&job.key()).into_iter().collect(),
            News::All(jobs) => store.all_jobs(jobs),
        };
        gone.iter().for_each(|job| self.board.forget(&job.uid));
    }

    fn listed(&self) {
        self.change(|store| store.lists_seen += 1);
    }

    async fn run(self: Arc<Self>) {
        let mut looked = std::time::Instant::now();
        let (mut begun, mut was_off) = (false, false);
        let mut workers: JoinSet<Key> = JoinSet::new();
        loop {
            let mut next = None;
            // Nothing is done before everything has been seen once. While sharing is switched off, only deletions are completed.
            let is_off = self.leader.look(|world| world.is_off());
            if self.leader.is_synced() && self.store.lock().expect("never poisoned").lists_seen >= LISTS {
                if std::mem::replace(&mut was_off, is_off) != is_off {
                    self.mark_all();
                }
                if !is_off && !std::mem::replace(&mut begun, true) {
                    self.publish_what_runs();
                }
                let mut progressed = Vec::new();
                if looked.elapsed() >= PROGRESS_EVERY {
                    looked = std::time::Instant::now();
                    progressed.extend(self.leader.take_progressed());
                    progressed.extend(self.board.take_turned());
                }
                let ordered = self.board.take_ordered();
                let mut store = self.store.lock().expect("never poisoned");
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
                        it.settle(&key, is_off).await;
                        key
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
                        Ok(key) => self.store.lock().expect("never poisoned").done(&key),
                        Err(error) => tracing::error!(%error, "work on a training job broke off: it rests until the next manager"),
                    }
                }
                () = self.bell.notified() => {}
                () = self.board.ordered.notified() => {}
                () = tokio::time::sleep(until.max(Duration::from_millis(1))) => {}
            }
        }
    }

    /// Every job has its turn: what may be done has changed.
    fn mark_all(&self) {
        let mut store = self.store.lock().expect("never poisoned");
        let keys: Vec<Key> = store.all().map(|(job, _)| job.key()).collect();
        keys.into_iter().for_each(|key| store.mark(key));
    }

    /// The decision gets to know of all jobs that have begun in one moment: seeing only some, it would take nodes for empty that are not.
    fn publish_what_runs(&self) {
        let store = self.store.lock().expect("never poisoned");
        let begun = store.all().filter(|(job, _)| job.status.attempt.is_some());
        let begun = begun.filter_map(|(job, pods)| facts(job, &pods, self.asked(job).unwrap_or_default()));
        self.board.publish_all(begun.collect());
    }

    fn announce(&self, store: &mut Store) {
        let coming = store.coming(ANNOUNCED);
        let new = coming.iter().filter_map(|job| facts(job, &[], self.asked(job).ok()?));
        self.board.publish_all(new.collect());
    }

    /// What the job's pods ask for; an error if there can be none.
    fn asked(&self, job: &JobSeen) -> Result<(u64, u64), String> {
        let has_pod = job.status.attempt.as_ref().is_some_and(|attempt| attempt.uid.is_some());
        let known = self.board.asked(&job.uid).filter(|_| has_pod);
        known.map_or_else(|| pod::check(job).map(|template| seen::requests(&template)), Ok)
    }

    /// Works on one job until nothing is left to do for now.
    async fn settle(&self, key: &Key, is_off: bool) {
        for _ in 0..STEPS_AT_ONCE {
            let job = self.store.lock().expect("never poisoned").job(key);
            let Some(job) = job else { return self.bury(key).await };
            let now = Timestamp::now();
            let next = match self.next(key, &job, now).await {
                Ok(next) if is_off => {
                    let pods = self.store.lock().expect("never poisoned").pods(key);
                    off::limit(&job, &pods, next)
                }
                Ok(next) => next,
                Err(error) => return self.later(key, &error, now),
            };
            if next.todo.is_empty() {
                return self.store.lock().expect("never poisoned").wake_at(key, next.wake);
            }
            for todo in &next.todo {
                if *todo == Do::Taken {
                    self.board.taken(&job.uid);
                    continue;
                }
                if let Err(stop) = self.act(key, &job, todo).await {
                    match stop {
                        Some(error) => return self.later(key, &error, now),
                        None => break,
                    }
                }
            }
        }
        // Something is not as it seems; whatever it is, the watch will bring it.
        self.later(key, "many steps in a row", Timestamp::now());
    }

    fn later(&self, key: &Key, error: &str, now: Timestamp) {
        tracing::warn!(job = key.1, namespace = key.0, error, "a training job has to wait");
        let again = now.saturating_add(PAUSE).unwrap_or(now);
        self.store.lock().expect("never poisoned").wake_at(key, Some(again));
    }

    /// One deed and what we learn from it. `Err(None)`: look again at once.
    async fn act(&self, key: &Key, job: &JobSeen, todo: &Do) -> Result<(), Option<String>> {
        let result = self.hand.act(job, todo).await;
        let outcome = match &result {
            Ok(_) => "done",
            Err(NotDone::Refused(_)) => "refused",
            Err(_) => "again",
        };
        self.leader.metrics.writes.get_or_create(&WriteLabels { what: "job", outcome }).inc();
        match result {
            Ok(Done::Job(written)) => {
                self.tell(job, &written, todo).await;
                self.change(|store| store.put_job(*written));
            }
            Ok(Done::JobGone) => {
                self.board.forget(&job.uid);
                self.change(|store| drop(store.remove_job(key)));
            }
            Ok(Done::Pod(pod)) => self.change(|store| store.put_pod(*pod)),
            Ok(Done::PodGone { name, uid }) => self.change(|store| store.remove_pod(key, &name, &uid)),
            Ok(Done::Nothing) => {}
            Err(NotDone::Refused(fault)) => {
                let until = Timestamp::now().saturating_add(REFUSAL_PAUSE).unwrap_or(Timestamp::MAX);
                self.change(|store| store.put_fault(key, fault, until));
                return Err(None);
            }
            Err(NotDone::Old(_)) => return self.read_again(key, job).await,
            Err(NotDone::Again(error)) => return Err(Some(error)),
        }
        Ok(())
    }

    /// Our copies are old: the API server's own are asked for.
    async fn read_again(&self, key: &Key, job: &JobSeen) -> Result<(), Option<String>> {
        let found = self.hand.jobs(&key.0).get_opt(&key.1).await.map_err(|error| Some(error.to_string()))?;
        match found.as_ref().and_then(JobSeen::of) {
            Some(found) => self.change(|store| store.put_job(found)),
            None => {
                self.board.forget(&job.uid);
                self.change(|store| drop(store.remove_job(key)));
            }
        }
        let named = job.status.attempt.as_ref().map(|attempt| attempt.pod.clone());
        if let Some(named) = named
            && let Some(pod) = self.hand.pods(&key.0).get_opt(&named).await.map_err(|error| Some(error.to_string()))?
            && let Some(pod) = PodSeen::of(&pod)
        {
            self.change(|store| store.put_pod(pod));
        }
        Err(None)
    }

    /// Gathers what a step may look at, asks, and tells the decision where the job stands.
    async fn next(&self, key: &Key, job: &JobSeen, now: Timestamp) -> Result<Next, String> {
        let mut pods = self.store.lock().expect("never poisoned").pods(key);
        let pod_is_missing = self.is_missing(key, job, &mut pods).await?;
        let nodes = self.nodes(job, &pods).await?;
        let asked_for = self.asked(job);
        let fault = match &asked_for {
            Err(message) => Some(Fault { for_good: true, message: message.clone() }),
            Ok(_) => self.store.lock().expect("never poisoned").fault(key, now),
        };
        // Whoever writes the annotation goes before the decision.
        let order = asked(job).or_else(|| self.board.order(&job.uid));
        let pod_uid = job.status.attempt.as_ref().and_then(|attempt| attempt.uid.clone());
        if let Some(uid) = pod_uid.as_ref().filter(|_| machine::saves_itself(&job.status)) {
            self.leader.change(|world| world.give_back(uid));
        }
        let judged = self.board.category(&job.uid);
        let progress = pod_uid.as_ref().and_then(|uid| {
            let agents = self.leader.agents.lock();
            let job = agents.job(uid)?;
            let category = judged.unwrap_or(job.category).name();
            Some((category, job.share.map(|share| (share.clamp(0.0, 1.0) * 100.0).round() as u32)))
        });
        match facts(job, &pods, asked_for.unwrap_or_default()) {
            Some(facts) => self.board.publish(facts),
            None => self.board.forget(&job.uid),
        }
        Ok(step(&Seen {
            now,
            job,
            pods: &pods,
            pod_is_missing,
            nodes: &nodes,
            order: order.as_ref(),
            fault: fault.as_ref(),
            progress,
        }))
    }

    /// Whether the pod that the journal names does not exist. A list may be old, so the API server itself is asked.
    async fn is_missing(&self, key: &Key, job: &JobSeen, pods: &mut Vec<PodSeen>) -> Result<bool, String> {
        let Some(attempt) = job.status.attempt.as_ref().filter(|attempt| attempt.ended.is_none()) else {
            return Ok(false);
        };
        let Some(uid) = attempt.uid.as_ref().filter(|uid| pods.iter().all(|pod| pod.uid != **uid)) else {
            return Ok(false);
        };
        let found = self.hand.pods(&key.0).get_opt(&attempt.pod).await.map_err(|error| error.to_string())?;
        let Some(found) = found.as_ref().and_then(PodSeen::of) else { return Ok(true) };
        let is_it = found.uid == *uid;
        pods.retain(|pod| pod.name != found.name);
        pods.push(found.clone());
        self.change(|store| store.put_pod(found));
        Ok(!is_it)
    }

    /// The nodes that matter for this job. That one is off is believed only if the API server itself says so now.
    async fn nodes(&self, job: &JobSeen, pods: &[PodSeen]) -> Result<Nodes, String> {
        let named = job.status.attempt.as_ref().and_then(|attempt| attempt.node.clone());
        let names = pods.iter().filter_map(|pod| pod.node.clone()).chain(named);
        let mut nodes = Nodes::new();
        for name in names {
            let known = self.store.lock().expect("never poisoned").nodes.get(&name).copied();
            let node = match known {
                Some(node @ (NodeSeen::Ready | NodeSeen::Silent)) => node,
                Some(NodeSeen::Off) | None => {
                    let api = Api::<Node>::all(self.client.clone());
                    let found = api.get_opt(&name).await.map_err(|error| error.to_string())?;
                    found.as_ref().map_or(NodeSeen::Off, NodeSeen::of)
                }
            };
            nodes.insert(name, node);
        }
        Ok(nodes)
    }

    /// Pods of a job that does not exist: nothing follows them, so nothing has to hold them.
    async fn bury(&self, key: &Key) {
        let held = self.store.lock().expect("never poisoned").pods(key);
        let held: Vec<PodSeen> = held.into_iter().filter(|pod| pod.has_finalizer).collect();
        if held.is_empty() {
            return;
        }
        let now = Timestamp::now();
        match self.hand.jobs(&key.0).get_opt(&key.1).await {
            Ok(None) => {}
            Ok(Some(job)) => {
                return self.change(|store| JobSeen::of(&job).into_iter().for_each(|job| store.put_job(job)));
            }
            Err(error) => return self.later(key, &error.to_string(), now),
        }
        let nobody = JobSeen { namespace: key.0.clone(), name: key.1.clone(), ..JobSeen::default() };
        for pod in held {
            let todo = Do::LetGo { pod: pod.name.clone(), uid: pod.uid.clone() };
            if let Err(Some(error)) = self.act(key, &nobody, &todo).await {
                return self.later(key, &error, now);
            }
        }
    }

    /// An event for what people would want to know; losing one is no harm.
    async fn tell(&self, before: &JobSeen, after: &JobSeen, todo: &Do) {
        let (old, new) = (&before.status, &after.status);
        let Do::Write(step, _) = todo else { return };
        if (old.state, &old.message) == (new.state, &new.message) {
            return;
        }
        tracing::info!(job = after.name, namespace = after.namespace, state = ?new.state, message = new.message);
        let type_ = match new.state {
            State::Failed | State::Restarting => EventType::Warning,
            _ if new.unmovable != old.unmovable => EventType::Warning,
            _ => EventType::Normal,
        };
        let event = Event {
            type_,
            // Events of one reason are counted, not listed: each step has its own.
            reason: if *step == "said" { format!("{:?}", new.state) } else { capital(step) },
            note: Some(new.message.chars().take(1000).collect()),
            action: "Run".to_owned(),
            secondary: None,
        };
        let reference = ObjectReference {
            api_version: Some("gainshare.dev/v1alpha1".to_owned()),
            kind: Some("TrainingJob".to_owned()),
            namespace: Some(after.namespace.clone()),
            name: Some(after.name.clone()),
            uid: Some(after.uid.clone()),
            ..ObjectReference::default()
        };
        if let Err(error) = self.recorder.publish(&event, &reference).await {
            tracing::debug!(%error, "event not published");
        }
    }
}

/// As reasons of events are written.
fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// What the decision gets to know; nothing of jobs that are not ours or on their way out.
fn facts(job: &JobSeen, pods: &[PodSeen], (cpu_request_milli, memory_request_bytes): (u64, u64)) -> Option<JobFacts> {
    if job.deleting || job.spec.managed_by.as_deref().is_some_and(|name| name != OUR_NAME) {
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
        movable: movable(job).and_then(|()| unless_kept(job.wanted_node.as_deref())),
        pod_uid: attempt.and_then(|attempt| attempt.uid.clone()),
        cpu_request_milli,
        memory_request_bytes,
        tried: attempt.map(|attempt| attempt.tried.clone()).unwrap_or_default(),
        move_cost_s: status.last_moves.last().map(|made| made.save_s + made.restore_s),
    })
}
