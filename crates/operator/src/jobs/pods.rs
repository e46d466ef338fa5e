//! Requests about the pods of jobs, the same for every kind of workload. Each is guarded by the
//! resourceVersion or uid it was decided on.

use super::workload::ActionError;
use crate::state::api_error::lacks_right;
use crate::state::lead::Leader;
use crate::state::snapshot::{NodeState, Nodes};
use axum::http;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{ATTEMPT_FINALIZER, FIELD_MANAGER, JobUid, NodeName, PodUid};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Status;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// What a request changed, for our cache.
#[derive(Debug)]
pub(super) enum PodEffect {
    Pod(Box<PodFacts>),
    Gone { uid: PodUid },
    Nothing,
}

/// Why a pod could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodFault {
    /// No retry helps, as the job is written.
    pub(crate) for_good: bool,
    pub(crate) message: String,
}

#[derive(Clone)]
pub(super) struct PodRequests {
    client: Client,
    leader: Arc<Leader>,
}

impl PodRequests {
    pub(super) fn new(client: Client, leader: Arc<Leader>) -> PodRequests {
        PodRequests { client, leader }
    }

    pub(super) fn api(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Makes a pod. A pod of this name that the job owns is as good.
    pub(super) async fn create(
        &self,
        namespace: &str,
        name: &str,
        owner_uid: &JobUid,
        pod: &Value,
    ) -> Result<Result<PodEffect, PodFault>, ActionError> {
        // Strict: the API server refuses a misspelt field of the template instead of dropping it.
        let path = format!("/api/v1/namespaces/{namespace}/pods?fieldManager={FIELD_MANAGER}&fieldValidation=Strict");
        let body = serde_json::to_vec(pod).map_err(|error| ActionError::Again(error.to_string()))?;
        let request = http::Request::post(path)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| ActionError::Again(error.to_string()))?;
        match self.client.request::<Pod>(request).await {
            Ok(made) => Ok(Ok(pod_done(&made))),
            Err(kube::Error::Api(status)) => self.not_created(namespace, name, owner_uid, &status).await,
            Err(error) => Err(ActionError::Again(error.to_string())),
        }
    }

    /// Why a pod was not made: it exists, it never can, or not now.
    async fn not_created(
        &self,
        namespace: &str,
        name: &str,
        owner_uid: &JobUid,
        status: &Status,
    ) -> Result<Result<PodEffect, PodFault>, ActionError> {
        let refused = |for_good, message: String| Ok(Err(PodFault { for_good, message }));
        match status.code {
            409 if status.reason == "AlreadyExists" => {
                let found = self.api(namespace).get(name).await;
                let found = found.map_err(|error| ActionError::Again(error.to_string()))?;
                if found.metadata.owner_references.iter().flatten().any(|owner| *owner_uid == owner.uid.as_str()) {
                    return Ok(Ok(pod_done(&found)));
                }
                refused(false, format!("there is a pod {name} that is not this job's: delete it, or rename the job"))
            }
            400 | 422 => refused(true, format!("the API server refuses the pod: {}", status.message)),
            403 if !lacks_right(status) => {
                refused(false, format!("the API server refuses the pod for now: {}", status.message))
            }
            _ => Err(ActionError::Again(status.message.clone())),
        }
    }

    /// The states of these nodes, and when a missing one of them counts as off. "Off" and "missing" are believed
    /// only if the API server itself answers so now.
    pub(super) async fn nodes(
        &self,
        names: impl IntoIterator<Item = NodeName>,
        now: Timestamp,
    ) -> kube::Result<(Nodes, Option<Timestamp>)> {
        let (mut nodes, mut wake) = (Nodes::new(), None);
        for name in names.into_iter().collect::<BTreeSet<NodeName>>() {
            let known = self.leader.read(|world| world.nodes().state(&name));
            let node = match known {
                Some(node) => node,
                None => match Api::<Node>::all(self.client.clone()).get_opt(&name).await? {
                    Some(found) => NodeState::of(&found),
                    None => {
                        let (node, left) = self.leader.missing_node(&name, Instant::now());
                        let left = left.and_then(|left| SignedDuration::try_from(left).ok());
                        let at = left.and_then(|left| now.saturating_add(left).ok());
                        wake = wake.into_iter().chain(at).min();
                        node
                    }
                },
            };
            nodes.insert(name, node);
        }
        Ok((nodes, wake))
    }

    /// Updates the cache with what a request has changed.
    pub(super) fn record(&self, effect: PodEffect) {
        match effect {
            PodEffect::Pod(pod) => self.leader.change(|world| world.put_pod(*pod)),
            PodEffect::Gone { uid } => self.leader.change(|world| world.remove_pod(&uid)),
            PodEffect::Nothing => {}
        }
    }

    /// The pod with this uid, as the API server has it now, or that it is gone.
    pub(super) async fn this_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &PodUid,
    ) -> Result<Result<Pod, PodEffect>, ActionError> {
        let gone = || PodEffect::Gone { uid: uid.clone() };
        match self.api(namespace).get(name).await {
            Ok(now) if now.metadata.uid.as_deref() == Some(uid.as_str()) => Ok(Ok(now)),
            Ok(_) => Ok(Err(gone())),
            Err(error) => classify(error, gone()).map(Err),
        }
    }

    /// Changes a pod that was just read, and no other version of it.
    pub(super) async fn change_pod(&self, pod: &Pod, uid: &PodUid, patch: Value) -> Result<PodEffect, ActionError> {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        match self.api(&namespace).patch(&name, &params(), &Patch::Merge(patch)).await {
            Ok(pod) => Ok(pod_done(&pod)),
            Err(error) => classify(error, PodEffect::Gone { uid: uid.clone() }),
        }
    }

    /// Puts our finalizer on a pod, or takes it off.
    pub(super) async fn hold(
        &self,
        namespace: &str,
        name: &str,
        uid: &PodUid,
        hold: bool,
    ) -> Result<PodEffect, ActionError> {
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

    /// Asks the pod to end.
    pub(super) async fn delete(&self, namespace: &str, name: &str, uid: &PodUid) -> Result<PodEffect, ActionError> {
        let gone = PodEffect::Gone { uid: uid.clone() };
        let params = DeleteParams::default().preconditions(only(uid));
        match self.api(namespace).delete(name, &params).await {
            Ok(answer) => Ok(answer.left().map_or(PodEffect::Nothing, |pod| pod_done(&pod))),
            // Another pod has the name: the one we meant is gone.
            Err(error) => classify(error, gone),
        }
    }
}

pub(super) fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

pub(super) fn only(uid: &str) -> Preconditions {
    Preconditions { uid: Some(uid.to_owned()), resource_version: None }
}

pub(super) fn pod_done(pod: &Pod) -> PodEffect {
    PodFacts::of(pod).map_or(PodEffect::Nothing, |pod| PodEffect::Pod(Box::new(pod)))
}

/// What an error means: the object is gone, our copy is old, or a retry may help.
pub(super) fn classify<T>(error: kube::Error, gone: T) -> Result<T, ActionError> {
    match error {
        kube::Error::Api(status) if status.code == 404 => Ok(gone),
        kube::Error::Api(status) if status.code == 409 => Err(ActionError::Old(status.message.clone())),
        error => Err(ActionError::Again(error.to_string())),
    }
}
