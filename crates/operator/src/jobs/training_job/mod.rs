//! TrainingJobs: the operator makes their pods itself.
//!
//! **How.** The steps are: read the job and its pods from the caches ([`TrainingJobs`]), validate and build the pod
//! ([`pod`]), decide ([`machine`] and [`ending`], pure), apply ([`apply`]), publish ([`status`]). The journal is the
//! status of the TrainingJob.

pub(super) mod action;
mod apply;
mod ending;
mod finish;
pub(super) mod machine;
mod off;
pub(super) mod pod;
mod status;

use super::deadline::{AT_RISK, count_end, with_warning};
use super::moves::{CurrentOrder, current_order, request_wake};
use super::pods::{PodFault, PodRequests};
use super::progress::StatusField;
use super::waiting::check_not_kept;
use super::workload::{ActionError, EventText, JournalStep, Turn, Workload};
use crate::isolate::skip_on_panic;
use crate::state::lead::Leader;
use crate::state::orders::{JobFacts, JobState};
use crate::state::snapshot::{JobSnapshot, Nodes, PodSnapshot};
use crate::state::workload::{WorkloadKey, WorkloadKind};
use action::{Action, PodFinish, Snapshot};
use apply::{Effect, Executor};
use gainshare_core::view::Marks;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{API_VERSION, JobUid, NamespacedName, PodUid, is_our_job};
use gainshare_kube_api::quantity::template_requests;
use gainshare_kube_api::training_job::{State, TrainingJobStatus, specon_marks};
use jiff::Timestamp;
use kube::Client;
use machine::{REFUSAL_PAUSE, movable, requested_order, step};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The adapter of TrainingJobs.
pub(super) struct TrainingJobs {
    leader: Arc<Leader>,
    pods: PodRequests,
    executor: Executor,
    /// Pods that the API server refused, and until when there is no point in trying again.
    faults: Mutex<BTreeMap<NamespacedName, (PodFault, Timestamp)>>,
    progress_field: StatusField,
    marks_field: StatusField,
}

fn key_of(name: &NamespacedName) -> WorkloadKey {
    WorkloadKey::new(WorkloadKind::TrainingJob, name.clone())
}

impl TrainingJobs {
    pub(super) fn new(client: Client, leader: Arc<Leader>, pods: PodRequests) -> TrainingJobs {
        let executor = Executor::new(client, pods.clone());
        let [progress_field, marks_field] = ["progress", "specon"].map(StatusField::new);
        TrainingJobs { leader, pods, executor, faults: Mutex::default(), progress_field, marks_field }
    }

    fn job(&self, name: &NamespacedName) -> Option<Arc<JobSnapshot>> {
        self.leader.read(|world| world.jobs.training_job(name).cloned())
    }

    fn put(&self, job: JobSnapshot) {
        self.leader.change(|world| world.jobs.put_training_job(job));
    }

    fn remove(&self, job: &JobSnapshot) {
        self.leader.change(|world| world.jobs.remove_training_job(&job.key()));
    }

    /// The facts of all jobs that have begun. They are published at once: with only some of them, the decision
    /// would take nodes for empty that are not.
    pub(super) fn facts_of_begun(&self) -> Vec<JobFacts> {
        let begun: Vec<(Arc<JobSnapshot>, Vec<PodSnapshot>)> = self.leader.read(|world| {
            let begun = world.jobs.training_jobs().filter(|job| job.status.attempt.is_some());
            begun.map(|job| (job.clone(), world.pods_of_job(&key_of(&job.key())))).collect()
        });
        let facts = begun.iter().filter_map(|(job, pods)| {
            let read = || facts(job, pods, self.requests(job).unwrap_or_default());
            skip_on_panic("TrainingJob", &job.key().to_string(), read).flatten()
        });
        facts.collect()
    }

    /// The facts of those of these jobs that have not begun.
    pub(super) fn facts_of_new(&self, keys: &[WorkloadKey]) -> Vec<JobFacts> {
        let training = keys.iter().filter(|key| key.kind == WorkloadKind::TrainingJob);
        let new = training.filter_map(|key| self.job(&key.name)).filter(|job| job.status.attempt.is_none());
        let facts = new.filter_map(|job| {
            let read = || facts(&job, &[], self.requests(&job).ok()?);
            skip_on_panic("TrainingJob", &job.key().to_string(), read).flatten()
        });
        facts.collect()
    }

    /// What the job's pods request; an error if there can be no pod.
    fn requests(&self, job: &JobSnapshot) -> Result<(u64, u64), pod::TemplateError> {
        let has_pod = job.status.attempt.as_ref().is_some_and(|attempt| attempt.uid.is_some());
        let known = self.leader.orders.requests(&job.uid).filter(|_| has_pod);
        known.map_or_else(|| pod::check(job).map(|template| template_requests(&template)), Ok)
    }

    fn fault(&self, name: &NamespacedName, now: Timestamp) -> Option<PodFault> {
        let mut faults = self.faults.lock();
        if faults.get(name).is_some_and(|(_, until)| *until <= now) {
            faults.remove(name);
        }
        faults.get(name).map(|(fault, _)| fault.clone())
    }

    /// Whether the pod that the journal names does not exist. Our copies may be old, so the API
    /// server is asked.
    async fn is_missing(&self, job: &JobSnapshot, pods: &mut Vec<PodSnapshot>) -> kube::Result<bool> {
        let Some(attempt) = job.status.attempt.as_ref().filter(|attempt| attempt.ended.is_none()) else {
            return Ok(false);
        };
        let Some(uid) = attempt.uid.as_ref().filter(|uid| pods.iter().all(|pod| pod.uid != **uid)) else {
            return Ok(false);
        };
        let found = self.pods.api(&job.namespace).get_opt(&attempt.pod).await?;
        let Some(found) = found.filter(|pod| PodSnapshot::of(pod).is_some()) else { return Ok(true) };
        let is_it = found.metadata.uid.as_deref() == Some(uid.as_str());
        pods.retain(|pod| pod.name != attempt.pod);
        pods.extend(PodSnapshot::of(&found));
        self.leader.change(|world| PodFacts::of(&found).into_iter().for_each(|pod| world.put_pod(pod)));
        Ok(!is_it)
    }

    /// The nodes of this job, and when a missing one of them counts as off.
    async fn nodes(
        &self,
        job: &JobSnapshot,
        pods: &[PodSnapshot],
        now: Timestamp,
    ) -> kube::Result<(Nodes, Option<Timestamp>)> {
        let named = job.status.attempt.as_ref().and_then(|attempt| attempt.node.clone());
        self.pods.nodes(pods.iter().filter_map(|pod| pod.node.clone()).chain(named), now).await
    }

    /// The category and the share in percent that the node agent reported last for this pod.
    fn progress(&self, job: &JobSnapshot, pod_uid: &PodUid) -> Option<(&'static str, Option<u32>)> {
        let judgement = self.leader.orders.judgement(&job.uid);
        let agents = self.leader.agents.lock();
        let report = agents.job(pod_uid)?;
        let category = judgement.and_then(|judgement| judgement.category).unwrap_or(report.category).name();
        Some((category, report.share.map(|share| (share.clamp(0.0, 1.0) * 100.0).round() as u32)))
    }
}

impl TrainingJobs {
    /// What the decision has done with this job, as far as the job can store it.
    fn marks(&self, job: &JobSnapshot) -> Marks {
        let judgement = self.leader.orders.judgement(&job.uid).filter(|_| self.marks_field.exists());
        judgement.map(|judgement| judgement.marks).unwrap_or_default()
    }

    /// The prediction that the node agent reported last for this pod.
    fn finish(&self, pod_uid: &PodUid) -> Option<PodFinish> {
        let agents = self.leader.agents.lock();
        let report = agents.job(pod_uid)?;
        let percent = report.progress.percent().filter(|_| self.progress_field.exists());
        Some(PodFinish { forecast: report.forecast, deadline_state: report.deadline_state, percent })
    }
}

impl Workload for TrainingJobs {
    const KIND: WorkloadKind = WorkloadKind::TrainingJob;
    const API_VERSION: &'static str = API_VERSION;
    const EVENT_ACTION: &'static str = "Run";

    type Job = Arc<JobSnapshot>;
    type Action = Action;

    async fn read(&self, name: &NamespacedName, is_off: bool) -> kube::Result<Option<Turn<Arc<JobSnapshot>, Action>>> {
        let key = key_of(name);
        let known = self.leader.read(|world| Some((world.jobs.training_job(name)?.clone(), world.pods_of_job(&key))));
        let Some((job, mut pods)) = known else { return Ok(None) };
        let now = Timestamp::now();
        let pod_is_missing = self.is_missing(&job, &mut pods).await?;
        let (nodes, node_wake) = self.nodes(&job, &pods, now).await?;
        let requests = self.requests(&job);
        let fault = match &requests {
            Err(error) => Some(PodFault { for_good: true, message: error.to_string() }),
            Ok(_) => self.fault(name, now),
        };
        let CurrentOrder { order, closed } = current_order(&self.leader, &job.uid, requested_order(&job));
        let pod_uid = job.status.attempt.as_ref().and_then(|attempt| attempt.uid.clone());
        let nodes_needed = self.leader.nodes_needed(&job.uid, job.status.finish.as_ref());
        let mut next = step(&Snapshot {
            now,
            job: &job,
            pods: &pods,
            pod_is_missing,
            nodes: &nodes,
            order: order.as_ref(),
            closed: closed.as_ref(),
            fault: fault.as_ref(),
            progress: pod_uid.as_ref().and_then(|uid| self.progress(&job, uid)),
            finish: pod_uid.as_ref().and_then(|uid| self.finish(uid)),
            nodes_needed: nodes_needed.as_ref(),
            marks: self.marks(&job),
        });
        next.wake_by(node_wake.into_iter().chain(request_wake(closed.as_ref(), now)));
        if is_off {
            next = off::limit(&job, &pods, next);
        }
        let facts = facts(&job, &pods, requests.unwrap_or_default());
        let saving_pods = pod_uid.filter(|_| machine::saves_itself(&job.status)).into_iter().collect();
        Ok(Some(Turn { job, facts, saving_pods, step: next }))
    }

    async fn act(&self, job: &Arc<JobSnapshot>, action: &Action) -> Result<(), ActionError> {
        match self.executor.send(job, action).await? {
            Effect::Job(written) => {
                if let Action::Write(_, status) = action {
                    let answered = &written.status;
                    count_end(&self.leader.metrics, job.status.state, status.state, status.finish.as_ref());
                    self.progress_field.check(Self::KIND, status.progress.is_some(), answered.progress.is_some());
                    // A definition of an earlier version has the field without the mark for deadlines.
                    let marks = |of: &TrainingJobStatus| Some(of.specon.as_ref()?.for_deadline.is_some());
                    self.marks_field.check(Self::KIND, marks(status).is_some(), marks(answered) == marks(status));
                }
                self.put(*written);
            }
            Effect::JobGone => self.remove(job),
            Effect::Pod(effect) => self.pods.record(effect),
            Effect::Refused(fault) => {
                let until = Timestamp::now().saturating_add(REFUSAL_PAUSE).unwrap_or(Timestamp::MAX);
                let message = fault.message.clone();
                self.faults.lock().insert(job.key(), (fault, until));
                return Err(ActionError::Refused(message));
            }
            Effect::Nothing => {}
        }
        Ok(())
    }

    /// Reads the job and the pod that its journal names again.
    async fn refresh(&self, job: &Arc<JobSnapshot>) -> kube::Result<()> {
        let found = self.executor.jobs(&job.namespace).get_opt(&job.name).await?;
        match found.as_ref().and_then(JobSnapshot::of) {
            Some(found) => self.put(found),
            None => self.remove(job),
        }
        if let Some(attempt) = &job.status.attempt
            && let Some(pod) = self.pods.api(&job.namespace).get_opt(&attempt.pod).await?
            && let Some(pod) = PodFacts::of(&pod)
        {
            self.leader.change(|world| world.put_pod(pod));
        }
        Ok(())
    }

    async fn orphans(&self, name: &NamespacedName) -> kube::Result<Vec<PodSnapshot>> {
        self.faults.lock().remove(name);
        let mut held = self.leader.read(|world| world.pods_of_job(&key_of(name)));
        held.retain(|pod| pod.has_finalizer);
        if held.is_empty() {
            return Ok(held);
        }
        match self.executor.jobs(&name.namespace).get_opt(&name.name).await? {
            None => Ok(held),
            Some(job) => {
                JobSnapshot::of(&job).into_iter().for_each(|job| self.put(job));
                Ok(Vec::new())
            }
        }
    }

    /// Writes a condition, unless the job has it already.
    async fn record_panic(&self, name: &NamespacedName, message: &str) -> bool {
        let Some(job) = self.job(name) else { return false };
        let failed = status::with_reconcile_failure(&job.status, job.generation, message, Timestamp::now());
        let Some(failed) = failed else { return false };
        match self.executor.write(&job, &failed).await {
            Ok(Effect::Job(written)) => self.put(*written),
            Ok(_) => {}
            Err(error) => tracing::warn!(%name, %error, "cannot write the condition of a TrainingJob that panicked"),
        }
        true
    }

    fn known_uid(&self, name: &NamespacedName) -> Option<JobUid> {
        self.job(name).map(|job| job.uid.clone())
    }

    fn uid(job: &Arc<JobSnapshot>) -> &JobUid {
        &job.uid
    }

    fn action_name(action: &Action) -> &'static str {
        apply::name(action)
    }

    fn removes_order(action: &Action) -> bool {
        *action == Action::RemoveOrder
    }

    fn event(job: &Arc<JobSnapshot>, action: &Action) -> Option<EventText> {
        let Action::Write(step, new) = action else { return None };
        let old = &job.status;
        let warning = finish::new_warning(old, new);
        let has_ended = matches!(new.state, State::Succeeded | State::Failed);
        if let Some(note) = warning.as_ref().filter(|_| !has_ended) {
            return Some(EventText { warns: true, reason: AT_RISK.to_owned(), note: note.clone() });
        }
        if (old.state, &old.message) == (new.state, &new.message) {
            return None;
        }
        let warns = matches!(new.state, State::Failed | State::Restarting) || new.unmovable != old.unmovable;
        let warns = warns || warning.is_some();
        // Events of one reason are counted, not listed: each step has its own.
        let reason = if *step == JournalStep::Noted { format!("{:?}", new.state) } else { capital(step.name()) };
        Some(EventText { warns, reason, note: with_warning(&new.message, warning) })
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
    if job.deleting || !is_our_job(job.spec.managed_by.as_deref()) {
        return None;
    }
    let status = &job.status;
    let attempt = status.attempt.as_ref().filter(|attempt| attempt.ended.is_none());
    let deleted = |uid: &Option<PodUid>| pods.iter().any(|pod| Some(&pod.uid) == uid.as_ref() && pod.deleted.is_some());
    let state = match (status.state, attempt) {
        (State::Succeeded | State::Failed, _) => JobState::Done,
        _ if job.spec.suspend => JobState::Moving,
        (_, None) => JobState::Waiting,
        (_, Some(attempt)) if attempt.stopping.is_some() || deleted(&attempt.uid) => JobState::Moving,
        (_, Some(attempt)) => match (&attempt.start_time, &attempt.node) {
            (Some(since), Some(node)) => JobState::Running { node: node.clone(), epoch: attempt.epoch, since: since.0 },
            _ if attempt.uid.is_none() && !attempt.pinned && job.spec.policy.places_pods() => JobState::Waiting,
            _ => JobState::Moving,
        },
    };
    Some(JobFacts {
        uid: job.uid.clone(),
        kind: WorkloadKind::TrainingJob,
        namespace: job.namespace.clone(),
        name: job.name.clone(),
        owner: job.namespace.clone(),
        arrived: job.created,
        policy: job.spec.policy,
        state,
        movable: movable(job).and_then(|()| check_not_kept(job.wanted_node.as_ref())),
        pod_uid: attempt.and_then(|attempt| attempt.uid.clone()),
        cpu_request_milli,
        memory_request_bytes,
        tried: attempt.map(|attempt| attempt.tried.clone()).unwrap_or_default(),
        move_cost_s: status.last_moves.last().map(|made| made.save_s + made.restore_s),
        marks: specon_marks(status.specon.as_ref(), &status.last_moves, status.migration.as_ref()),
    })
}
