//! Executes actions. Each is one API request, guarded by the resourceVersion or uid it was decided
//! on.

use super::action::Action;
use super::pod;
use crate::jobs::pods::{PodEffect, PodFault, PodRequests, classify, only, params, pod_done};
use crate::jobs::workload::ActionError;
use crate::state::snapshot::{JobSnapshot, PodSnapshot};
use gainshare_kube_api::names::{JOB_FINALIZER, JOB_LABEL, NodeName, PodUid};
use gainshare_kube_api::training_job::{TrainingJob, TrainingJobStatus};
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch};
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
                self.open(&job.namespace, pod, uid, node.as_ref()).await.map(Effect::Pod)
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
        let is_held = |pod: &PodSnapshot| pod.has_finalizer && pod.owner.as_ref() == Some(&job.uid);
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
        let name = format!("{}-{epoch}", job.name);
        let created = self.pods.create(&job.namespace, &name, &job.uid, &pod::build(job, epoch)).await?;
        Ok(created.map_or_else(Effect::Refused, Effect::Pod))
    }

    async fn open(
        &self,
        namespace: &str,
        name: &str,
        uid: &PodUid,
        node: Option<&NodeName>,
    ) -> Result<PodEffect, ActionError> {
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
