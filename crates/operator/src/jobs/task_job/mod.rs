//! Jobs of several tasks: TrainingJobs with `replicaSpecs`, and Kubeflow's TFJobs.
//!
//! **Problem.** The tasks of a distributed job (chief, parameter servers, workers) must start together, find each
//! other, and be restarted by rules that depend on their role.
//!
//! **How.** One adapter serves both kinds ([`TaskKind`]). The pure [`machine`] decides from the job's journal and its
//! pods; [`outcome`] says what the end of a task means; [`gang`], [`turns`] and [`line`] decide which job may start
//! next and where; [`pod`] builds pods. The decision about moves of other jobs (`crate::placement`) does not know these
//! jobs: it sees their pods as requests on nodes.

pub(crate) mod action;
pub(crate) mod gang;
pub(crate) mod line;
pub(super) mod machine;
mod off;
mod outcome;
pub(crate) mod pod;
pub(crate) mod request;
mod status;
mod turns;

use super::deadline::{AT_RISK, count_end, with_warning};
use super::pods::{PodEffect, PodFault, PodRequests, classify, only, params};
use super::progress::{StatusField, TaskProgress};
use super::training_job::pod::open;
use super::workload::{self, ActionError, EventText, JournalStep, Turn, Workload};
use crate::fail_point::FailPoint;
use crate::state::api_error::lacks_right;
use crate::state::lead::Leader;
use crate::state::snapshot::{Nodes, Phase, PodSnapshot};
use crate::state::task_job::{TaskJobSnapshot, TaskJobStatus};
use crate::state::workload::{WorkloadKey, WorkloadKind};
use action::{Action, Snapshot};
use gainshare_kube_api::attempt::ENDING_DEADLINE_S;
use gainshare_kube_api::names::{API_VERSION, FIELD_MANAGER, JOB_FINALIZER, JOB_LABEL, JobUid, NamespacedName, PodUid};
use gainshare_kube_api::tasks::{TaskId, tasks};
use gainshare_kube_api::tfjob::{TFJOB_API_VERSION, TfJob};
use gainshare_kube_api::training_job::{State, TrainingJob};
use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Service;
use kube::api::{Api, DeleteParams, ListParams, Patch, PostParams};
use kube::{Client, Resource, ResourceExt};
pub(crate) use line::GangQueue;
use machine::{REFUSAL_PAUSE, step};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;
pub use turns::QueueWeights;

/// A custom resource that describes a job of tasks.
pub(super) trait TaskKind: Send + Sync + 'static {
    const KIND: WorkloadKind;
    const API_VERSION: &'static str;
    type Object: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + Sync;

    fn snapshot(object: &Self::Object) -> Option<TaskJobSnapshot>;
}

/// TrainingJobs with `replicaSpecs`.
pub(super) struct TrainingJobKind;

impl TaskKind for TrainingJobKind {
    const KIND: WorkloadKind = WorkloadKind::TaskJob;
    const API_VERSION: &'static str = API_VERSION;
    type Object = TrainingJob;

    fn snapshot(object: &TrainingJob) -> Option<TaskJobSnapshot> {
        object.spec.has_tasks().then(|| TaskJobSnapshot::of_training_job(object)).flatten()
    }
}

/// Kubeflow's TFJobs.
pub(super) struct TfJobKind;

impl TaskKind for TfJobKind {
    const KIND: WorkloadKind = WorkloadKind::TfJob;
    const API_VERSION: &'static str = TFJOB_API_VERSION;
    type Object = TfJob;

    fn snapshot(object: &TfJob) -> Option<TaskJobSnapshot> {
        TaskJobSnapshot::of_tfjob(object)
    }
}

/// The adapter of jobs of tasks of one kind.
pub(super) struct TaskJobs<K> {
    client: Client,
    leader: Arc<Leader>,
    pods: PodRequests,
    line: Arc<GangQueue>,
    /// Pods that the API server refused, and until when there is no point in trying again.
    faults: Mutex<BTreeMap<NamespacedName, (PodFault, Timestamp)>>,
    progress_field: StatusField,
    /// The training operator's variable for clusters with a domain of their own.
    cluster_domain: Option<String>,
    /// For the writes of an action that has several. The controller has the points around each action.
    fail_at: FailPoint,
    kind: PhantomData<K>,
}

impl<K: TaskKind> TaskJobs<K> {
    pub(super) fn new(
        client: Client,
        leader: Arc<Leader>,
        pods: PodRequests,
        line: Arc<GangQueue>,
        fail_at: FailPoint,
    ) -> TaskJobs<K> {
        let cluster_domain = std::env::var("CUSTOM_CLUSTER_DOMAIN").ok();
        let (faults, progress_field) = (Mutex::default(), StatusField::new("progress"));
        TaskJobs { client, leader, pods, line, faults, progress_field, cluster_domain, fail_at, kind: PhantomData }
    }

    fn key(name: &NamespacedName) -> WorkloadKey {
        WorkloadKey::new(K::KIND, name.clone())
    }

    fn jobs(&self, namespace: &str) -> Api<K::Object> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn job(&self, name: &NamespacedName) -> Option<Arc<TaskJobSnapshot>> {
        self.leader.read(|world| world.jobs.task_job(&Self::key(name)).cloned())
    }

    fn put(&self, object: &K::Object) {
        if let Some(job) = K::snapshot(object) {
            self.leader.change(|world| world.jobs.put_task_job(job));
        }
    }

    fn remove(&self, job: &TaskJobSnapshot) {
        self.leader.change(|world| world.jobs.remove_task_job(&job.key));
    }

    /// Updates the cache with the job as it was written.
    fn record(&self, job: &TaskJobSnapshot, written: kube::Result<K::Object>) -> Result<(), ActionError> {
        match written {
            Ok(object) => self.put(&object),
            Err(error) => {
                classify(error, ())?;
                self.remove(job);
            }
        }
        Ok(())
    }

    /// Writes the journal. The API server refuses it if the job has changed since it was read.
    async fn write(&self, job: &TaskJobSnapshot, status: &TaskJobStatus) -> Result<(), ActionError> {
        let patch = json!([
            {"op": "replace", "path": "/metadata/resourceVersion", "value": job.resource_version},
            {"op": "add", "path": "/status", "value": status.to_value(K::KIND, job.generation)},
        ]);
        let patch: json_patch::Patch =
            serde_json::from_value(patch).map_err(|error| ActionError::Again(error.to_string()))?;
        let name = &job.key.name;
        let written =
            self.jobs(&name.namespace).patch_status(&name.name, &params(), &Patch::<Value>::Json(patch)).await;
        if let Some(answered) = written.as_ref().ok().and_then(K::snapshot) {
            let (from, to) = (job.status.journal.state, status.journal.state);
            count_end(&self.leader.metrics, from, to, status.finish.as_ref());
            self.progress_field.check(K::KIND, status.progress.is_some(), answered.status.progress.is_some());
        }
        self.record(job, written)
    }

    async fn set_finalizer(&self, job: &TaskJobSnapshot, ours: bool) -> Result<(), ActionError> {
        let (name, jobs) = (&job.key.name, self.jobs(&job.key.name.namespace));
        let now = match jobs.get(&name.name).await {
            Ok(now) if now.meta().uid.as_deref() == Some(&job.uid) => now,
            Ok(_) => return Err(ActionError::Old("the job was made again".to_owned())),
            Err(error) => {
                classify(error, ())?;
                self.remove(job);
                return Ok(());
            }
        };
        let mut finalizers = now.meta().finalizers.clone().unwrap_or_default();
        finalizers.retain(|one| one != JOB_FINALIZER);
        if ours {
            finalizers.push(JOB_FINALIZER.to_owned());
        }
        let patch = json!({"metadata": {
            "uid": job.uid, "resourceVersion": now.resource_version(), "finalizers": finalizers,
        }});
        let written = jobs.patch(&name.name, &params(), &Patch::Merge(patch)).await;
        self.record(job, written)
    }

    /// Takes our finalizer off the job, if no pod of it carries ours. Our copies may be old, so the API server is
    /// asked.
    async fn release(&self, job: &TaskJobSnapshot) -> Result<(), ActionError> {
        let name = &job.key.name;
        let ours = ListParams::default().labels(&format!("{JOB_LABEL}={}", name.name));
        let pods = self.pods.api(&name.namespace).list(&ours).await?;
        let is_held = |pod: &PodSnapshot| pod.has_finalizer && pod.owner.as_ref() == Some(&job.uid);
        match pods.iter().find(|pod| PodSnapshot::of(pod).as_ref().is_some_and(is_held)) {
            Some(pod) => self.pods.record(super::pods::pod_done(pod)),
            None => self.set_finalizer(job, false).await?,
        }
        Ok(())
    }

    /// Makes the Service and the pod of a task.
    async fn create(&self, job: &TaskJobSnapshot, task: TaskId) -> Result<(), ActionError> {
        let Ok(spec) = &job.spec else { return Ok(()) };
        let counts = job.wanted();
        let reference = pod::reference(job, spec, &counts, self.cluster_domain.as_deref());
        let Some(pod) = pod::build(&reference, task) else { return Ok(()) };
        let (namespace, name) = (&job.key.name.namespace, task.object_name(&job.key.name.name));
        let service = serde_json::from_value::<Service>(reference.service(task));
        let service = service.map_err(|error| ActionError::Again(error.to_string()))?;
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let services: Api<Service> = Api::namespaced(self.client.clone(), namespace);
        self.fail_at.reach("before", "service");
        match services.create(&params, &service).await {
            Ok(_) => self.fail_at.reach("after", "service"),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                let found = services.get(&name).await?;
                if found.owner_references().iter().all(|owner| job.uid != owner.uid.as_str()) {
                    let message =
                        format!("there is a Service {name} that is not this job's: delete it, or rename the job");
                    return Err(self.refuse(job, PodFault { for_good: false, message }));
                }
            }
            Err(kube::Error::Api(status)) if status.code == 403 && !lacks_right(&status) => {
                let message = format!("the API server refuses the Service {name} for now: {}", status.message);
                return Err(self.refuse(job, PodFault { for_good: false, message }));
            }
            Err(error) => return Err(error.into()),
        }
        match self.pods.create(namespace, &name, &job.uid, &pod).await? {
            Ok(effect) => self.pods.record(effect),
            Err(fault) => return Err(self.refuse(job, fault)),
        }
        Ok(())
    }

    fn refuse(&self, job: &TaskJobSnapshot, fault: PodFault) -> ActionError {
        let until = Timestamp::now().saturating_add(REFUSAL_PAUSE).unwrap_or(Timestamp::MAX);
        let message = fault.message.clone();
        self.faults.lock().insert(job.key.name.clone(), (fault, until));
        ActionError::Refused(message)
    }

    fn fault(&self, job: &TaskJobSnapshot, now: Timestamp) -> Option<PodFault> {
        if let Some(fault) = template_fault(job) {
            return Some(fault);
        }
        let mut faults = self.faults.lock();
        if faults.get(&job.key.name).is_some_and(|(_, until)| *until <= now) {
            faults.remove(&job.key.name);
        }
        faults.get(&job.key.name).map(|(fault, _)| fault.clone())
    }

    async fn delete_services(&self, job: &TaskJobSnapshot) -> Result<(), ActionError> {
        let Ok(spec) = &job.spec else { return Ok(()) };
        let most = spec.roles.iter().map(|(role, role_spec)| (*role, role_spec.max)).collect();
        let name = &job.key.name;
        let services: Api<Service> = Api::namespaced(self.client.clone(), &name.namespace);
        let own = ListParams::default().labels(&format!("{JOB_LABEL}={}", name.name));
        let found = services.list_metadata(&own).await?;
        let names: Vec<String> = tasks(&most).map(|task| task.object_name(&name.name)).collect();
        for service in found.iter().filter(|one| names.contains(&one.name_any())) {
            if service.owner_references().iter().any(|owner| job.uid == owner.uid.as_str()) {
                self.fail_at.reach("before", "delete-service");
                let deleted = services.delete(&service.name_any(), &DeleteParams::default()).await;
                deleted.map(drop).or_else(|error| classify(error, ()))?;
                self.fail_at.reach("after", "delete-service");
            }
        }
        Ok(())
    }

    /// Leaves out pods that are gone. A pod that has ended and that no finalizer of ours holds should be; the API
    /// server is asked, because the watch may lag behind.
    async fn leave_out_removed(&self, job: &TaskJobSnapshot, pods: &mut Vec<PodSnapshot>) -> Result<(), ActionError> {
        let is_over = |pod: &PodSnapshot| {
            let has_ended =
                !pod.running && (matches!(pod.phase, Phase::Succeeded | Phase::Failed) || pod.node.is_none());
            has_ended && pod.deleted.is_some() && !pod.has_finalizer && pod.owner.as_ref() == Some(&job.uid)
        };
        let mut gone = Vec::new();
        for pod in pods.iter().filter(|pod| is_over(pod)) {
            if let Err(effect) = self.pods.this_pod(&pod.namespace, &pod.name, &pod.uid).await? {
                self.pods.record(effect);
                gone.push(pod.uid.clone());
            }
        }
        pods.retain(|pod| !gone.contains(&pod.uid));
        Ok(())
    }

    /// Changes one pod, if it is still the one that was decided on.
    async fn change_pod(
        &self,
        job: &TaskJobSnapshot,
        (pod, uid): (&str, &PodUid),
        patch: impl Fn(&Value) -> Value,
    ) -> Result<(), ActionError> {
        let effect = match self.pods.this_pod(&job.key.name.namespace, pod, uid).await? {
            Ok(now) => self.pods.change_pod(&now, uid, patch(&json!(now))).await?,
            Err(gone) => gone,
        };
        self.pods.record(effect);
        Ok(())
    }
}

/// What was read about a job for one turn.
pub(crate) struct JobTurn<'a> {
    pub(crate) now: Timestamp,
    pub(crate) job: &'a TaskJobSnapshot,
    pub(crate) pods: &'a [PodSnapshot],
    pub(crate) nodes: &'a Nodes,
    pub(crate) progress: TaskProgress,
}

/// What to do about a job now. No request is sent: everything else that counts is in the operator's memory.
pub(crate) fn next_step(
    leader: &Leader,
    line: &GangQueue,
    turn: &JobTurn<'_>,
    fault: Option<&PodFault>,
) -> workload::Step<Action> {
    let JobTurn { now, job, pods, nodes, progress } = *turn;
    let grant = line.ask(leader, job, now);
    let waits = grant.is_none() && !job.status.journal.admitted;
    let never_fits = waits && line.never_fits(leader, job, now);
    let scale = leader.scale_orders.lock().get(&job.uid).cloned();
    let scale = scale.filter(|order| job.is_scaled() && order.epoch == job.status.journal.epoch);
    let traffic = leader.traffic_orders.lock().get(&job.uid).cloned();
    let nodes_needed = leader.nodes_needed(&job.uid, job.status.finish.as_ref());
    step(&Snapshot {
        now,
        job,
        pods,
        nodes,
        grant: grant.as_ref(),
        never_fits,
        scale: scale.as_ref().map(|order| &order.scale),
        traffic: traffic.as_ref(),
        nodes_needed: nodes_needed.as_ref(),
        progress,
        fault,
    })
}

/// Why no pods can be made from the job's templates.
pub(crate) fn template_fault(job: &TaskJobSnapshot) -> Option<PodFault> {
    let (role, error) = job.spec.as_ref().ok().and_then(|spec| pod::check(spec).err())?;
    Some(PodFault { for_good: true, message: format!("{}: {error}", role.name()) })
}

impl<K: TaskKind> Workload for TaskJobs<K> {
    const KIND: WorkloadKind = K::KIND;
    const API_VERSION: &'static str = K::API_VERSION;
    const EVENT_ACTION: &'static str = "Run";

    type Job = Arc<TaskJobSnapshot>;
    type Action = Action;

    async fn read(&self, name: &NamespacedName, is_off: bool) -> kube::Result<Option<Turn<Self::Job, Action>>> {
        let key = Self::key(name);
        let known = self.leader.read(|world| Some((world.jobs.task_job(&key)?.clone(), world.pods_of_job(&key))));
        let Some((job, mut pods)) = known else { return Ok(None) };
        if let Err(error) = self.leave_out_removed(&job, &mut pods).await {
            tracing::debug!(%key, %error, "cannot ask whether a pod is gone");
        }
        let now = Timestamp::now();
        let (nodes, node_wake) = self.pods.nodes(pods.iter().filter_map(|pod| pod.node.clone()), now).await?;
        let fault = self.fault(&job, now);
        let mut next = if is_off {
            off::step(&Snapshot::without_orders(now, &job, &pods, &nodes))
        } else {
            let progress = TaskProgress::read(&self.leader.agents.lock(), &job, &pods);
            let progress = if self.progress_field.exists() { progress } else { TaskProgress::default() };
            let turn = JobTurn { now, job: &job, pods: &pods, nodes: &nodes, progress };
            next_step(&self.leader, &self.line, &turn, fault.as_ref())
        };
        next.wake_by(node_wake);
        Ok(Some(Turn { job, facts: None, saving_pods: Vec::new(), step: next }))
    }

    async fn act(&self, job: &Self::Job, action: &Action) -> Result<(), ActionError> {
        let namespace = &job.key.name.namespace;
        let record = |effect: PodEffect| self.pods.record(effect);
        match action {
            Action::Write(_, status) => self.write(job, status).await,
            Action::Hold => self.set_finalizer(job, true).await,
            Action::Release => self.release(job).await,
            Action::DeleteJob => {
                let params = DeleteParams::background().preconditions(only(&job.uid));
                let deleted = self.jobs(namespace).delete(&job.key.name.name, &params).await;
                deleted.map(drop).or_else(|error| classify(error, ()))
            }
            Action::Create(task) => self.create(job, *task).await,
            Action::Open { pod, uid, node } => self.change_pod(job, (pod, uid), |now| open(now, Some(node))).await,
            Action::End { pod, uid } => {
                let end = |now: &Value| {
                    json!({
                        "metadata": {"uid": uid, "resourceVersion": now["metadata"]["resourceVersion"]},
                        "spec": {"activeDeadlineSeconds": ENDING_DEADLINE_S},
                    })
                };
                self.change_pod(job, (pod, uid), end).await
            }
            Action::Delete { pod, uid } => self.pods.delete(namespace, pod, uid).await.map(record),
            Action::LetGo { pod, uid } => self.pods.hold(namespace, pod, uid, false).await.map(record),
            Action::DeleteServices => self.delete_services(job).await,
        }
    }

    async fn refresh(&self, job: &Self::Job) -> kube::Result<()> {
        let name = &job.key.name;
        let found = self.jobs(&name.namespace).get_opt(&name.name).await?;
        match found.filter(|found| K::snapshot(found).is_some()) {
            Some(found) => self.put(&found),
            None => self.remove(job),
        }
        let own = ListParams::default().labels(&format!("{JOB_LABEL}={}", name.name));
        for pod in self.pods.api(&name.namespace).list(&own).await? {
            self.pods.record(super::pods::pod_done(&pod));
        }
        Ok(())
    }

    async fn orphans(&self, name: &NamespacedName) -> kube::Result<Vec<PodSnapshot>> {
        self.faults.lock().remove(name);
        let mut held = self.leader.read(|world| world.pods_of_job(&Self::key(name)));
        held.retain(|pod| pod.has_finalizer);
        if held.is_empty() {
            return Ok(held);
        }
        match self.jobs(&name.namespace).get_opt(&name.name).await? {
            Some(job) if K::snapshot(&job).is_some() => {
                self.put(&job);
                Ok(Vec::new())
            }
            _ => Ok(held),
        }
    }

    async fn record_panic(&self, name: &NamespacedName, message: &str) -> bool {
        let Some(job) = self.job(name) else { return false };
        let Some(failed) = status::with_reconcile_failure(&job.status, message, Timestamp::now()) else { return false };
        if let Err(error) = self.write(&job, &failed).await {
            tracing::warn!(%name, %error, "cannot write the condition of a job whose reconcile panicked");
        }
        true
    }

    fn known_uid(&self, name: &NamespacedName) -> Option<JobUid> {
        self.job(name).map(|job| job.uid.clone())
    }

    fn uid(job: &Self::Job) -> &JobUid {
        &job.uid
    }

    fn action_name(action: &Action) -> &'static str {
        match action {
            Action::Write(step, _) => step.name(),
            Action::Hold => "hold",
            Action::Release => "release",
            Action::DeleteJob => "delete-job",
            Action::Create(_) => "create",
            Action::Open { .. } => "open",
            Action::Delete { .. } => "delete",
            Action::End { .. } => "end",
            Action::LetGo { .. } => "let-go",
            Action::DeleteServices => "delete-services",
        }
    }

    fn removes_order(_action: &Action) -> bool {
        false
    }

    fn event(job: &Self::Job, action: &Action) -> Option<EventText> {
        let Action::Write(step, new) = action else { return None };
        let old = &job.status;
        if *step == JournalStep::Scaled {
            let change = |status: &TaskJobStatus| status.journal.scale.as_ref().map(|scale| scale.changed_at.clone());
            let scale = new.journal.scale.as_ref().filter(|_| change(old).flatten() != change(new).flatten())?;
            let note = scale.last_change.clone();
            return Some(EventText { warns: false, reason: "Scaled".to_owned(), note });
        }
        let warning = status::new_warning(old, new);
        let has_ended = matches!(new.journal.state, State::Succeeded | State::Failed);
        if let Some(note) = warning.as_ref().filter(|_| !has_ended) {
            return Some(EventText { warns: true, reason: AT_RISK.to_owned(), note: note.clone() });
        }
        // Counts of running tasks and progress are in the status; an event for each would bury the others.
        let is_count = *step == JournalStep::Noted && old.journal.state == State::Running;
        if is_count || (old.journal.state, &old.message) == (new.journal.state, &new.message) {
            return None;
        }
        let state = new.journal.state;
        let warns = matches!(state, State::Failed | State::Restarting) || new.journal.failures != old.journal.failures;
        let warns = warns || warning.is_some();
        let reason = match step {
            JournalStep::Placed => "Placed".to_owned(),
            _ => status::event_reason(K::KIND, old.journal.state, state),
        };
        Some(EventText { warns, reason, note: with_warning(&new.message, warning) })
    }
}
