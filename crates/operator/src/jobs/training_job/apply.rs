//! Executes actions. Each is one API request, guarded by the resourceVersion or uid it was decided
//! on.

use super::action::{Action, PodFault};
use super::pod;
use crate::jobs::pods::{PodEffect, PodRequests, classify, only, params, pod_done};
use crate::jobs::workload::ActionError;
use crate::state::snapshot::{JobSnapshot, PodSnapshot};
use axum::http;
use gainshare_kube_api::names::{FIELD_MANAGER, JOB_FINALIZER, JOB_LABEL};
use gainshare_kube_api::training_job::{TrainingJob, TrainingJobStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch};
use kube::core::Status;
use serde_json::{Value, json};

/// What an action changed, for our cache.
#[derive(Debug)]
pub(super) enum Effect {
    Job(Box<JobSnapshot>),
    JobGone,
    Pod(PodEffect),
    /// The API server refuses the pod.
    Refused(PodFault),
    Nothing,
}

pub(super) struct Executor {
    client: Client,
    pods: PodRequests,
}

impl Executor {
    pub(super) fn new(client: Client, pods: PodRequests) -> Executor {
        Executor { client, pods }
    }

    pub(super) fn jobs(&self, namespace: &str) -> Api<TrainingJob> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Executes one action. `RemoveOrder` needs no request.
    pub(super) async fn send(&self, job: &JobSnapshot, action: &Action) -> Result<Effect, ActionError> {
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
            Action::Open { pod, uid, node } => {
                self.open(&job.namespace, pod, uid, node.as_deref()).await.map(Effect::Pod)
            }
            Action::Delete { pod, uid } => self.pods.delete(&job.namespace, pod, uid).await.map(Effect::Pod),
            Action::LetGo { pod, uid } => self.pods.hold(&job.namespace, pod, uid, false).await.map(Effect::Pod),
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
        let pods = self.pods.api(&job.namespace).list(&ours).await?;
        let is_held = |pod: &PodSnapshot| pod.has_finalizer && pod.owner.as_deref() == Some(&job.uid);
        match pods.iter().find(|pod| PodSnapshot::of(pod).as_ref().is_some_and(is_held)) {
            Some(pod) => Ok(Effect::Pod(pod_done(pod))),
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
            Ok(made) => Ok(Effect::Pod(pod_done(&made))),
            Err(kube::Error::Api(status)) => self.not_created(job, epoch, &status).await,
            Err(error) => Err(ActionError::Again(error.to_string())),
        }
    }

    /// Why a pod was not made: it exists, it never can, or not now.
    async fn not_created(&self, job: &JobSnapshot, epoch: u32, status: &Status) -> Result<Effect, ActionError> {
        let refused = |for_good, message: String| Ok(Effect::Refused(PodFault { for_good, message }));
        let name = format!("{}-{epoch}", job.name);
        match status.code {
            409 if status.reason == "AlreadyExists" => {
                let found = self.pods.api(&job.namespace).get(&name).await;
                let found = found.map_err(|error| ActionError::Again(error.to_string()))?;
                let ours = found.metadata.owner_references.iter().flatten().any(|owner| owner.uid == job.uid);
                if ours {
                    return Ok(Effect::Pod(pod_done(&found)));
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

    async fn open(&self, namespace: &str, name: &str, uid: &str, node: Option<&str>) -> Result<PodEffect, ActionError> {
        let now = match self.pods.this_pod(namespace, name, uid).await? {
            Ok(now) => now,
            Err(gone) => return Ok(gone),
        };
        if PodSnapshot::of(&now).is_none_or(|pod| !pod.gated) {
            return Ok(pod_done(&now));
        }
        self.pods.change_pod(&now, uid, pod::open(&json!(now), node)).await
    }
}

pub(super) fn name(action: &Action) -> &'static str {
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

fn job_done(written: kube::Result<TrainingJob>) -> Result<Effect, ActionError> {
    match written {
        Ok(job) => Ok(JobSnapshot::of(&job).map_or(Effect::Nothing, |job| Effect::Job(Box::new(job)))),
        Err(error) => classify(error, Effect::JobGone),
    }
}
