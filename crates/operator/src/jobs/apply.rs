//! Executes actions. Each is one API request, guarded by the resourceVersion or uid it was decided
//! on.
//!
//! *Fail points* end the process before or after an action (`GAINSHARE_FAIL_AT=after-delete`), so
//! that a test can kill the operator at every step of a move.

use super::action::{Action, PodFault};
use super::pod;
use super::snapshot::{JobSnapshot, PodSnapshot};
use axum::http;
use gainshare_kube_api::names::{ATTEMPT_FINALIZER, FIELD_MANAGER, JOB_FINALIZER, JOB_LABEL};
use gainshare_kube_api::training_job::{TrainingJob, TrainingJobStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::core::Status;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use std::time::Duration;

/// A request that takes longer is given up and tried again.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The exit code of a process that ended at a fail point.
pub const FAIL_POINT_EXIT: i32 = 86;

/// Where to end the process, if anywhere: `before-` or `after-` and the name of an action or of a
/// journal step.
#[derive(Debug, Clone, Default)]
pub struct FailPoint(Option<String>);

impl FailPoint {
    pub fn at(name: Option<String>) -> FailPoint {
        FailPoint(name)
    }

    pub(super) fn reach(&self, when: &str, action: &str) {
        if let Some(name) = &self.0
            && name.strip_prefix(when).and_then(|rest| rest.strip_prefix('-')) == Some(action)
        {
            tracing::error!(name, "fail point reached: the process ends");
            std::process::exit(FAIL_POINT_EXIT);
        }
    }
}

/// What an action changed, for our copies.
#[derive(Debug)]
pub(super) enum Effect {
    Job(Box<JobSnapshot>),
    JobGone,
    Pod(Box<PodSnapshot>),
    PodGone { name: String, uid: String },
    Nothing,
}

/// Why an action failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ActionError {
    /// Our copy of the job or the pod is old: read it again.
    #[error("another client changed the object first: {0}")]
    Old(String),
    /// The pod cannot be made.
    #[error("{}", .0.message)]
    Refused(PodFault),
    #[error("{0}")]
    Again(String),
}

pub(super) struct Executor {
    client: Client,
    fail_at: FailPoint,
}

impl Executor {
    pub(super) fn new(client: Client, fail_at: FailPoint) -> Executor {
        Executor { client, fail_at }
    }

    pub(super) fn jobs(&self, namespace: &str) -> Api<TrainingJob> {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(super) fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Executes one action. `RemoveOrder` needs no request.
    pub(super) async fn act(&self, job: &JobSnapshot, action: &Action) -> Result<Effect, ActionError> {
        let name = name(action);
        self.fail_at.reach("before", name);
        let done = tokio::time::timeout(TIMEOUT, self.send(job, action)).await;
        let done = done.map_err(|_| ActionError::Again(format!("no answer within {} s", TIMEOUT.as_secs())))??;
        self.fail_at.reach("after", name);
        Ok(done)
    }

    async fn send(&self, job: &JobSnapshot, action: &Action) -> Result<Effect, ActionError> {
        match action {
            Action::Write(_, status) => self.write(job, status).await,
            Action::Hold => self.set_finalizer(job, true).await,
            Action::Release => self.release(job).await,
            Action::DeleteJob => {
                let params = DeleteParams::background().preconditions(only(&job.uid));
                match self.jobs(&job.namespace).delete(&job.name, &params).await {
                    Ok(_) => Ok(Effect::Nothing),
                    Err(error) => classify(error, Effect::JobGone),
                }
            }
            Action::Create { epoch } => self.create(job, *epoch).await,
            Action::Open { pod, uid, node } => self.open(&job.namespace, pod, uid, node.as_deref()).await,
            Action::Delete { pod, uid } => self.delete(&job.namespace, pod, uid).await,
            Action::LetGo { pod, uid } => self.hold_pod(&job.namespace, pod, uid, false).await,
            Action::RemoveOrder => Ok(Effect::Nothing),
        }
    }

    /// Writes the journal. The API server refuses it if the job has changed since it was read.
    pub(super) async fn write(&self, job: &JobSnapshot, status: &TrainingJobStatus) -> Result<Effect, ActionError> {
        let patch = json!([
            {"op": "replace", "path": "/metadata/resourceVersion", "value": job.resource_version},
            {"op": "add", "path": "/status", "value": status},
        ]);
        let patch: json_patch::Patch =
            serde_json::from_value(patch).map_err(|error| ActionError::Again(error.to_string()))?;
        let written = self.jobs(&job.namespace).patch_status(&job.name, &params(), &Patch::<Value>::Json(patch)).await;
        job_done(written)
    }

    /// Takes our finalizer off the job, if no pod of it carries ours. Our copies may be old, so the
    /// API server is asked.
    async fn release(&self, job: &JobSnapshot) -> Result<Effect, ActionError> {
        let ours = ListParams::default().labels(&format!("{JOB_LABEL}={}", job.name));
        let pods =
            self.pods(&job.namespace).list(&ours).await.map_err(|error| ActionError::Again(error.to_string()))?;
        let held = pods.iter().filter_map(PodSnapshot::of);
        let mut held = held.filter(|pod| pod.has_finalizer && pod.owner.as_deref() == Some(&job.uid));
        match held.next() {
            Some(pod) => Ok(Effect::Pod(Box::new(pod))),
            None => self.set_finalizer(job, false).await,
        }
    }

    async fn set_finalizer(&self, job: &JobSnapshot, ours: bool) -> Result<Effect, ActionError> {
        let jobs = self.jobs(&job.namespace);
        let now = match jobs.get(&job.name).await {
            Ok(now) if now.metadata.uid.as_deref() == Some(&job.uid) => now,
            Ok(_) => return Ok(Effect::JobGone),
            Err(error) => return classify(error, Effect::JobGone),
        };
        let mut finalizers = now.metadata.finalizers.clone().unwrap_or_default();
        finalizers.retain(|one| one != JOB_FINALIZER);
        if ours {
            // The API server takes no new finalizer on an object that is being deleted.
            finalizers.push(JOB_FINALIZER.to_owned());
        }
        let patch = json!({"metadata": {
            "uid": job.uid, "resourceVersion": now.metadata.resource_version, "finalizers": finalizers,
        }});
        job_done(jobs.patch(&job.name, &params(), &Patch::Merge(patch)).await)
    }

    async fn create(&self, job: &JobSnapshot, epoch: u32) -> Result<Effect, ActionError> {
        let pod = pod::build(job, epoch);
        // Strict: the API server refuses a misspelt field of the template instead of dropping it.
        let path =
            format!("/api/v1/namespaces/{}/pods?fieldManager={FIELD_MANAGER}&fieldValidation=Strict", job.namespace);
        let body = serde_json::to_vec(&pod).map_err(|error| ActionError::Again(error.to_string()))?;
        let request = http::Request::post(path)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| ActionError::Again(error.to_string()))?;
        match self.client.request::<Pod>(request).await {
            Ok(made) => Ok(pod_done(&made)),
            Err(kube::Error::Api(status)) => self.not_created(job, epoch, &status).await,
            Err(error) => Err(ActionError::Again(error.to_string())),
        }
    }

    /// Why a pod was not made: it exists, it never can, or not now.
    async fn not_created(&self, job: &JobSnapshot, epoch: u32, status: &Status) -> Result<Effect, ActionError> {
        let refused = |for_good, message: String| Err(ActionError::Refused(PodFault { for_good, message }));
        let name = format!("{}-{epoch}", job.name);
        match status.code {
            409 if status.reason == "AlreadyExists" => {
                let found = self.pods(&job.namespace).get(&name).await;
                let found = found.map_err(|error| ActionError::Again(error.to_string()))?;
                let ours = found.metadata.owner_references.iter().flatten().any(|owner| owner.uid == job.uid);
                if ours {
                    return Ok(pod_done(&found));
                }
                refused(false, format!("there is a pod {name} that is not this job's: delete it, or rename the job"))
            }
            400 | 422 => refused(true, format!("the API server refuses the pod: {}", status.message)),
            403 if !status.message.contains("forbidden: User ") => {
                refused(false, format!("the API server refuses the pod for now: {}", status.message))
            }
            _ => Err(ActionError::Again(status.message.clone())),
        }
    }

    async fn open(&self, namespace: &str, name: &str, uid: &str, node: Option<&str>) -> Result<Effect, ActionError> {
        let now = match self.this_pod(namespace, name, uid).await? {
            Ok(now) => now,
            Err(gone) => return Ok(gone),
        };
        if PodSnapshot::of(&now).is_none_or(|pod| !pod.gated) {
            return Ok(pod_done(&now));
        }
        self.change_pod(&now, uid, pod::open(&json!(now), node)).await
    }

    /// The pod with this uid, as the API server has it now, or that it is gone.
    pub(super) async fn this_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<Result<Pod, Effect>, ActionError> {
        let gone = || Effect::PodGone { name: name.to_owned(), uid: uid.to_owned() };
        match self.pods(namespace).get(name).await {
            Ok(now) if now.metadata.uid.as_deref() == Some(uid) => Ok(Ok(now)),
            Ok(_) => Ok(Err(gone())),
            Err(error) => classify(error, gone()).map(Err),
        }
    }

    /// Changes a pod that was just read, and no other version of it.
    async fn change_pod(&self, pod: &Pod, uid: &str, patch: Value) -> Result<Effect, ActionError> {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        match self.pods(&namespace).patch(&name, &params(), &Patch::Merge(patch)).await {
            Ok(pod) => Ok(pod_done(&pod)),
            Err(error) => classify(error, Effect::PodGone { name, uid: uid.to_owned() }),
        }
    }

    /// Puts our finalizer on a pod, or takes it off.
    pub(super) async fn hold_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        hold: bool,
    ) -> Result<Effect, ActionError> {
        let now = match self.this_pod(namespace, name, uid).await? {
            Ok(now) => now,
            Err(gone) => return Ok(gone),
        };
        let mut finalizers = now.metadata.finalizers.clone().unwrap_or_default();
        finalizers.retain(|one| one != ATTEMPT_FINALIZER);
        if hold {
            finalizers.push(ATTEMPT_FINALIZER.to_owned());
        }
        let patch = json!({"metadata": {
            "uid": uid, "resourceVersion": now.metadata.resource_version, "finalizers": finalizers,
        }});
        self.change_pod(&now, uid, patch).await
    }

    async fn delete(&self, namespace: &str, name: &str, uid: &str) -> Result<Effect, ActionError> {
        let gone = Effect::PodGone { name: name.to_owned(), uid: uid.to_owned() };
        let params = DeleteParams::default().preconditions(only(uid));
        match self.pods(namespace).delete(name, &params).await {
            Ok(answer) => Ok(answer.left().map_or(Effect::Nothing, |pod| pod_done(&pod))),
            // Another pod has the name: the one we meant is gone.
            Err(error) => classify(error, gone),
        }
    }
}

fn name(action: &Action) -> &'static str {
    match action {
        Action::Write(step, _) => step.name(),
        Action::Hold => "hold",
        Action::Release => "release",
        Action::DeleteJob => "delete-job",
        Action::Create { .. } => "create",
        Action::Open { .. } => "open",
        Action::Delete { .. } => "delete",
        Action::LetGo { .. } => "let-go",
        Action::RemoveOrder => "remove-order",
    }
}

pub(super) fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

fn only(uid: &str) -> Preconditions {
    Preconditions { uid: Some(uid.to_owned()), resource_version: None }
}

fn pod_done(pod: &Pod) -> Effect {
    PodSnapshot::of(pod).map_or(Effect::Nothing, |pod| Effect::Pod(Box::new(pod)))
}

fn job_done(written: kube::Result<TrainingJob>) -> Result<Effect, ActionError> {
    match written {
        Ok(job) => Ok(JobSnapshot::of(&job).map_or(Effect::Nothing, |job| Effect::Job(Box::new(job)))),
        Err(error) => classify(error, Effect::JobGone),
    }
}

/// What an error means: the object is gone, our copy is old, or a retry may help.
pub(super) fn classify(error: kube::Error, gone: Effect) -> Result<Effect, ActionError> {
    match error {
        kube::Error::Api(status) if status.code == 404 => Ok(gone),
        kube::Error::Api(status) if status.code == 409 => Err(ActionError::Old(status.message.clone())),
        error => Err(ActionError::Again(error.to_string())),
    }
}
