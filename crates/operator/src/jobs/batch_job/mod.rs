//! `batch/v1` Jobs that may be moved.
//!
//! **Problem.** People have Jobs, not TrainingJobs. The cluster's Job controller makes their pods,
//! and a Job's template cannot change while it runs.
//!
//! **How.** The annotation `gainshare.dev/adopt: "true"` lets the operator follow a Job and move
//! it; the Job controller still makes every pod. The operator keeps a [`Journal`] in an annotation
//! of the Job and writes it before each action of a move: our finalizer on the pod, so that its end
//! is read; `suspend: true`, by which the Job controller asks the pod to end; proof of stop, as for
//! TrainingJobs; and then, in one request, a preference for the chosen node in the template and
//! `suspend: false`. The Job controller does not count the end of a suspended pod as a failure.
//!
//! **A preference, not a pin.** The template of a running Job cannot change, so what we write there
//! stays after an uninstall. A required node that vanishes would keep the Job from ever running
//! again; a preferred one does not. So the cluster's scheduler decides in the end, and the journal
//! says where the Job went.
//!
//! **Never two live attempts.** `podReplacementPolicy: Failed` is required: the Job controller
//! itself makes no second pod before the first has ended. One case remains, a pod whose object is
//! removed by force while the Job is suspended; our finalizer closes it.
//!
//! [`Journal`]: gainshare_kube_api::adopted::Journal

mod machine;

#[cfg(test)]
pub(super) use machine::test_step;

use super::moves::{CurrentOrder, current_order, request_wake};
use super::pods::{PodRequests, classify, params};
use super::workload::{ActionError, EventText, JournalStep, Turn, Workload};
use crate::state::lead::Leader;
use crate::state::snapshot::{NodeState, Nodes, PodSnapshot};
use crate::state::workload::{WorkloadKey, WorkloadKind};
use gainshare_kube_api::adopted::{BatchJobSnapshot, Journal, StoppedPod};
use gainshare_kube_api::names::{ADOPTED_ANNOTATION, JOB_LABEL, JobUid, NamespacedName, NodeName, POLICY_ANNOTATION};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, ListParams, Patch};
use machine::{Action, Snapshot, facts, id, requested_order, step};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// The label that Job controllers give to pods.
const CONTROLLER_UID: &str = "batch.kubernetes.io/controller-uid";

/// Jobs per page of a list.
const PAGE: u32 = 500;

/// The adapter of Jobs. A Job changes whenever one of its pods does (`active`, `ready`, `terminating`), so the
/// watch of Jobs makes it due. The inputs of a step are read from the API server each time.
pub(super) struct BatchJobs {
    client: Client,
    leader: Arc<Leader>,
    pods: PodRequests,
}

impl BatchJobs {
    pub(super) fn new(client: Client, leader: Arc<Leader>, pods: PodRequests) -> BatchJobs {
        BatchJobs { client, leader, pods }
    }

    fn jobs(&self, namespace: &str) -> Api<Job> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// The Job as the API server has it now, if the operator is to follow it.
    async fn read_job(&self, name: &NamespacedName) -> kube::Result<Option<BatchJobSnapshot>> {
        let found = self.jobs(&name.namespace).get_opt(&name.name).await?;
        Ok(found.as_ref().and_then(BatchJobSnapshot::of).filter(BatchJobSnapshot::is_ours))
    }

    /// All pods that the Job owns.
    async fn read_pods(&self, job: &BatchJobSnapshot) -> kube::Result<Vec<PodSnapshot>> {
        let own = ListParams::default().labels(&format!("{CONTROLLER_UID}={}", job.uid));
        let pods = self.pods.api(&job.namespace).list(&own).await?;
        let pods = pods.iter().filter_map(PodSnapshot::of_batch);
        Ok(pods.filter(|pod| pod.owner.as_ref() == Some(&job.uid)).collect())
    }

    /// The nodes that a move depends on.
    async fn read_nodes(&self, job: &BatchJobSnapshot, pods: &[PodSnapshot]) -> kube::Result<Nodes> {
        let mut nodes = Nodes::new();
        let Some(migration) = &job.journal.migration else { return Ok(nodes) };
        let named = pods.iter().filter_map(|pod| pod.node.clone()).chain([migration.from.clone()]);
        for name in named.collect::<BTreeSet<NodeName>>() {
            let node = Api::<Node>::all(self.client.clone()).get_opt(&name).await?;
            let missing = || self.leader.missing_node(&name, Instant::now()).0;
            let state = node.as_ref().map_or_else(missing, NodeState::of);
            nodes.insert(name, state);
        }
        Ok(nodes)
    }

    /// Pods in our cache that our finalizer holds and that this Job does not own: they are left over from a Job of
    /// the same name, or from one that is not followed any more.
    fn held_for_others(&self, name: &NamespacedName, uid: Option<&JobUid>) -> Vec<PodSnapshot> {
        let key = WorkloadKey::new(WorkloadKind::Job, name.clone());
        let mut held = self.leader.read(|world| world.pods_of_job(&key));
        held.retain(|pod| pod.has_finalizer && pod.owner.is_some() && pod.owner.as_ref() != uid);
        held
    }

    /// Changes the Job, and no other version of it than the one that was decided on.
    async fn patch(&self, job: &BatchJobSnapshot, mut patch: Value) -> Result<(), ActionError> {
        patch["metadata"]["resourceVersion"] = json!(job.resource_version);
        let done = self.jobs(&job.namespace).patch(&job.name, &params(), &Patch::Merge(patch)).await;
        done.map(drop).or_else(|error| classify(error, ()))
    }

    async fn mark(&self, job: &BatchJobSnapshot, pod: &StoppedPod, mark: bool) -> Result<(), ActionError> {
        let (label, policy) = if mark { (Some(&job.name), Some(job.policy.name())) } else { (None, None) };
        let patch = json!({"metadata": {
            "uid": pod.uid, "labels": {JOB_LABEL: label}, "annotations": {POLICY_ANNOTATION: policy},
        }});
        let done = self.pods.api(&job.namespace).patch(&pod.name, &params(), &Patch::Merge(patch)).await;
        done.map(drop).or_else(|error| classify(error, ()))
    }

    /// Puts our finalizer on a pod, or takes it off.
    async fn hold(&self, job: &BatchJobSnapshot, pod: &StoppedPod, hold: bool) -> Result<(), ActionError> {
        self.pods.record(self.pods.hold(&job.namespace, &pod.name, &pod.uid, hold).await?);
        Ok(())
    }
}

impl Workload for BatchJobs {
    const KIND: WorkloadKind = WorkloadKind::Job;
    const API_VERSION: &'static str = "batch/v1";
    const EVENT_ACTION: &'static str = "Move";

    type Job = BatchJobSnapshot;
    type Action = Action;

    async fn read(&self, name: &NamespacedName, is_off: bool) -> kube::Result<Option<Turn<BatchJobSnapshot, Action>>> {
        let Some(job) = self.read_job(name).await? else { return Ok(None) };
        let pods = self.read_pods(&job).await?;
        let nodes = self.read_nodes(&job, &pods).await?;
        let CurrentOrder { order, closed } = current_order(&self.leader, &job.uid, requested_order(&job));
        let now = Timestamp::now();
        let snapshot = Snapshot {
            now,
            job: &job,
            pods: &pods,
            nodes: &nodes,
            order: order.as_ref(),
            closed: closed.as_ref(),
            off: is_off,
            marks: self.leader.orders.judgement(&job.uid).map(|judgement| judgement.marks).unwrap_or_default(),
        };
        let (facts, mut step) = (facts(&snapshot), step(&snapshot));
        step.wake_by(request_wake(closed.as_ref(), now));
        let leftovers = self.held_for_others(name, Some(&job.uid));
        step.actions.splice(0..0, leftovers.iter().map(|pod| Action::LetGo(id(pod))));
        let saved = job.journal.pod.as_ref().filter(|_| job.journal.migration.is_some());
        let saving_pods = saved.map(|pod| pod.uid.clone()).into_iter().collect();
        Ok(Some(Turn { facts, saving_pods, step, job }))
    }

    async fn act(&self, job: &BatchJobSnapshot, action: &Action) -> Result<(), ActionError> {
        match action {
            Action::Write(_, journal) => self.patch(job, json!({"metadata": note(Some(journal))})).await,
            Action::Suspend => self.patch(job, json!({"spec": {"suspend": true}})).await,
            Action::Resume(_, journal) => {
                let mut spec = match &journal.prefers {
                    Some(node) if job.journal.prefers.as_ref() != Some(node) => job.preferring(Some(node)),
                    _ => json!({}),
                };
                spec["suspend"] = json!(false);
                self.patch(job, json!({"metadata": note(Some(journal)), "spec": spec})).await
            }
            Action::Forget => {
                let spec = if job.journal.prefers.is_some() { job.preferring(None) } else { json!({}) };
                self.patch(job, json!({"metadata": note(None), "spec": spec})).await
            }
            Action::ClearStartTime => {
                let patch =
                    json!({"metadata": {"resourceVersion": job.resource_version}, "status": {"startTime": null}});
                let done = self.jobs(&job.namespace).patch_status(&job.name, &params(), &Patch::Merge(patch)).await;
                done.map(drop).or_else(|error| classify(error, ()))
            }
            Action::Hold(pod) => self.hold(job, pod, true).await,
            Action::LetGo(pod) => self.hold(job, pod, false).await,
            Action::Mark(pod, mark) => self.mark(job, pod, *mark).await,
            Action::RemoveOrder => Ok(()),
        }
    }

    /// Every step reads the Job from the API server anyway.
    async fn refresh(&self, _job: &BatchJobSnapshot) -> kube::Result<()> {
        Ok(())
    }

    async fn orphans(&self, name: &NamespacedName) -> kube::Result<Vec<PodSnapshot>> {
        let held = self.held_for_others(name, None);
        if held.is_empty() {
            return Ok(held);
        }
        // The Job may have been adopted since it was read.
        let job = self.read_job(name).await?;
        Ok(self.held_for_others(name, job.as_ref().map(|job| &job.uid)))
    }

    /// A Job has no place for the operator's conditions: the event is all.
    async fn record_panic(&self, _name: &NamespacedName, _message: &str) -> bool {
        true
    }

    fn known_uid(&self, name: &NamespacedName) -> Option<JobUid> {
        self.leader.read(|world| world.jobs.batch_job(name).cloned())
    }

    fn uid(job: &BatchJobSnapshot) -> &JobUid {
        &job.uid
    }

    fn action_name(action: &Action) -> &'static str {
        match action {
            Action::Write(step, _) => step.name(),
            Action::Resume(..) => "resume",
            Action::Suspend => "suspend",
            Action::ClearStartTime => "clear-start-time",
            Action::Hold(_) => "hold-pod",
            Action::LetGo(_) => "let-go",
            Action::Mark(..) => "mark",
            Action::Forget => "forget",
            Action::RemoveOrder => "remove-order",
        }
    }

    fn removes_order(action: &Action) -> bool {
        *action == Action::RemoveOrder
    }

    fn event(job: &BatchJobSnapshot, action: &Action) -> Option<EventText> {
        let (Action::Write(step, journal) | Action::Resume(step, journal)) = action else { return None };
        if journal.message == job.journal.message {
            return None;
        }
        let warns = job.problem.is_some() || journal.unmovable != job.journal.unmovable;
        let reason = match step {
            JournalStep::Stopping => "Stopping",
            JournalStep::Stopped => "Stopped",
            JournalStep::Running => "Moved",
            JournalStep::Cancelled => "MoveCancelled",
            _ if warns => "NotMovable",
            _ => "Adopted",
        };
        Some(EventText { warns, reason: reason.to_owned(), note: journal.message.clone() })
    }
}

fn note(journal: Option<&Journal>) -> Value {
    json!({"annotations": {ADOPTED_ANNOTATION: journal.map(|journal| json!(journal).to_string())}})
}

/// For an uninstall: no Job stays suspended by us. The Job controller itself waits for a pod that is still
/// ending. Answers what could not be changed, and why.
pub(crate) async fn give_back(client: &Client) -> kube::Result<Vec<String>> {
    let mut failures = Vec::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let jobs = Api::<Job>::all(client.clone()).list(&page).await?;
        for job in jobs.iter().filter_map(BatchJobSnapshot::of).filter(|job| job.has_journal) {
            let mut patch = json!({"metadata": note(None)});
            patch["metadata"]["resourceVersion"] = json!(job.resource_version);
            if job.journal.migration.is_some() && job.suspended {
                patch["spec"] = json!({"suspend": false});
            }
            let api = Api::<Job>::namespaced(client.clone(), &job.namespace);
            match api.patch(&job.name, &params(), &Patch::Merge(patch)).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                Err(error) => failures.push(format!("Job {}/{}: {error}", job.namespace, job.name)),
            }
        }
        match jobs.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(failures),
        }
    }
}
