//! All writes to shared pods. Each carries the version it was decided on: the API server refuses a replica that
//! was stopped past its lease, or that has read an old state, instead of letting it undo what a newer leader
//! did.
//!
//! Around each write are fail points, so that a test can end the operator there: the names are in [`point`].

use crate::fail_point::FailPoint;
use crate::state::api_error::lacks_right;
use crate::state::metrics::{Metrics, WriteLabels};
use gainshare_kube_api::facts::{Originals, PodFacts, WrittenResources};
use gainshare_kube_api::names::{self, FIELD_MANAGER};
use gainshare_kube_api::quantity;
use gainshare_kube_api::resources::Resources;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A write that takes longer is given up and tried again: the API server is away or overloaded.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The writes about shares, as fail points name them. A write that does two things has both names.
pub(crate) mod point {
    /// A pod's own resources are written down.
    pub(crate) const ORIGINALS: &str = "share-originals";
    pub(crate) const RESIZE: &str = "share-resize";
    pub(crate) const NOTE: &str = "share-note";
    /// The status of a SharePolicy.
    pub(crate) const STATUS: &str = "share-status";
    /// A pod gets its own resources back.
    pub(crate) const RESTORE: &str = "share-restore";
    /// Our annotations are removed from a restored pod.
    pub(crate) const FORGET: &str = "share-forget";
    /// Sharing is switched off for an uninstall.
    pub(crate) const SWITCH: &str = "release-switch";
    /// An object loses our finalizer for an uninstall.
    pub(crate) const FINALIZER: &str = "release-finalizer";
}

/// Why a write did not happen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WriteError {
    /// Trying again is of no use before something changes.
    #[error("{0}")]
    Refused(String),
    /// The same write may work in a moment.
    #[error("{0}")]
    Again(String),
    /// The pod has changed since the decision: read it, and decide again.
    #[error("{0}")]
    Changed(String),
    #[error("the pod is gone")]
    Gone,
}

impl From<kube::Error> for WriteError {
    fn from(error: kube::Error) -> WriteError {
        match error {
            kube::Error::Api(status) => match status.code {
                404 => WriteError::Gone,
                409 => WriteError::Changed(status.message),
                // Too many requests, or an error of the server.
                429 | 500.. => WriteError::Again(status.message),
                401 => WriteError::Again(status.message),
                _ if lacks_right(&status) => WriteError::Again(status.message),
                _ => WriteError::Refused(status.message),
            },
            other => WriteError::Again(format!("the API server did not answer: {other}")),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Writer {
    client: Client,
    metrics: Arc<Metrics>,
    pub(crate) fail_at: FailPoint,
    /// Writes carry no version, so that a test can see whether its simulation notices.
    #[cfg(test)]
    pub(crate) omits_version: bool,
}

impl Writer {
    pub(crate) fn new(client: Client, metrics: Arc<Metrics>) -> Writer {
        Writer {
            client,
            metrics,
            fail_at: FailPoint::default(),
            #[cfg(test)]
            omits_version: false,
        }
    }

    /// The pod as it is now.
    pub(crate) async fn read(&self, pod: &PodFacts) -> Result<PodFacts, WriteError> {
        let now = self.send("read", &[], self.pods(pod).get(&pod.name)).await?;
        if now.uid == pod.uid { Ok(now) } else { Err(WriteError::Gone) }
    }

    /// Sets annotations, or removes those without a value. `points` names what the write does.
    pub(crate) async fn annotate(
        &self,
        points: &[&'static str],
        pod: &PodFacts,
        notes: &[(&str, Option<String>)],
    ) -> Result<PodFacts, WriteError> {
        let notes: BTreeMap<&str, &Option<String>> = notes.iter().map(|(key, value)| (*key, value)).collect();
        let patch = json!({"metadata": {"resourceVersion": self.version(pod), "uid": pod.uid, "annotations": notes}});
        let api = self.pods(pod);
        let params = PatchParams::apply(FIELD_MANAGER);
        self.send("annotate", points, api.patch(&pod.name, &params, &Patch::Merge(patch))).await
    }

    pub(crate) async fn resize(&self, pod: &PodFacts, container: &str, to: Resources) -> Result<PodFacts, WriteError> {
        let resources = json!(quantity::write(to));
        self.patch_resize(point::RESIZE, pod, vec![json!({"name": container, "resources": resources})]).await
    }

    /// Puts a pod's own resources back, if they differ, and removes our annotations.
    pub(crate) async fn restore(&self, pod: &PodFacts, originals: &Originals) -> Result<PodFacts, WriteError> {
        let changed: Vec<Value> = originals
            .containers
            .iter()
            .filter(|(name, written)| differs(pod, name, written))
            .map(|(name, written)| json!({"name": name, "resources": written}))
            .collect();
        let restored =
            if changed.is_empty() { pod.clone() } else { self.patch_resize(point::RESTORE, pod, changed).await? };
        let removed = [(names::ORIGINAL_ANNOTATION, None), (names::STATUS_ANNOTATION, None)];
        self.annotate(&[point::FORGET], &restored, &removed).await
    }

    /// The version that a write was decided on.
    fn version<'a>(&self, pod: &'a PodFacts) -> Option<&'a str> {
        #[cfg(test)]
        if self.omits_version {
            return None;
        }
        Some(&pod.resource_version)
    }

    async fn patch_resize(
        &self,
        point: &'static str,
        pod: &PodFacts,
        containers: Vec<Value>,
    ) -> Result<PodFacts, WriteError> {
        let patch = json!({
            "metadata": {"resourceVersion": self.version(pod), "uid": pod.uid},
            "spec": {"containers": containers},
        });
        let api = self.pods(pod);
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        self.send("resize", &[point], api.patch_subresource("resize", &pod.name, &params, &Patch::Strategic(patch)))
            .await
    }

    /// Sends a request, between its fail points.
    async fn send(
        &self,
        what: &'static str,
        points: &[&'static str],
        write: impl Future<Output = kube::Result<Pod>>,
    ) -> Result<PodFacts, WriteError> {
        points.iter().for_each(|point| self.fail_at.reach("before", point));
        let result = match tokio::time::timeout(WRITE_TIMEOUT, write).await {
            Ok(Ok(pod)) => PodFacts::of(&pod).ok_or(WriteError::Gone),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => {
                Err(WriteError::Again(format!("the API server did not answer within {} s", WRITE_TIMEOUT.as_secs())))
            }
        };
        let outcome = match &result {
            Ok(_) => "done",
            Err(WriteError::Refused(_)) => "refused",
            Err(WriteError::Again(_)) => "again",
            Err(WriteError::Changed(_)) => "changed",
            Err(WriteError::Gone) => "gone",
        };
        self.metrics.writes.get_or_create(&WriteLabels { what, outcome }).inc();
        if result.is_ok() {
            points.iter().for_each(|point| self.fail_at.reach("after", point));
        }
        result
    }

    fn pods(&self, pod: &PodFacts) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &pod.namespace)
    }
}

/// Whether the container's resources differ from its original ones. A container that is gone needs nothing.
fn differs(pod: &PodFacts, name: &str, written: &WrittenResources) -> bool {
    pod.container(name).is_some_and(|container| container.resources != written.resources())
}
