//! The interface between the controller of jobs and the kinds of workloads.
//!
//! **Problem.** TrainingJobs and `batch/v1` Jobs are started, stopped and moved under the same rules: one worker
//! at a time, the intention in a journal before each action, proof of stop before the next start, a failed request
//! is retried, a panic stays with its object. They differ in what the operator may do. It makes the pods of a
//! TrainingJob itself. The pods of a Job are made by the cluster's Job controller, which also counts failures; the
//! operator can only suspend and resume such a Job.
//!
//! **How.** An adapter ([`Workload`]) turns one object and the pods of its attempts into a [`Turn`]: facts for the
//! decision, and actions. The controller does everything around that, for all kinds alike.
//!
//! **Why each adapter has a state machine of its own.** The machine of a TrainingJob has states that a Job does not
//! have for us (planned, gated, placed, failed and paused, suspended by its author, past its deadline, cleaned up),
//! because the Job controller owns them. The machine of a Job has steps that a TrainingJob does not have (marking
//! pods, clearing the start time, a preference in the template). What both have in common is a move; its parts are
//! in [`super::moves`], and both machines call them. One machine for both would be a switch on the kind in nearly
//! every state.

use crate::state::orders::JobFacts;
use crate::state::snapshot::PodSnapshot;
use crate::state::workload::WorkloadKind;
use gainshare_kube_api::names::{JobUid, NamespacedName, PodUid};
use jiff::{SignedDuration, Timestamp};

/// An entry of a journal. The name is for fail points, logs and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JournalStep {
    /// The next attempt is decided on.
    Planned,
    /// The attempt's pod and node are decided on.
    Placed,
    /// The attempt runs.
    Running,
    /// Only the message or the progress changes.
    Noted,
    /// The attempt is to be stopped.
    Stopping,
    /// The attempt's stop is proven.
    Stopped,
    /// The job has failed without an attempt.
    Failed,
    /// A move is given up.
    Cancelled,
    /// Tasks have another size, or there is another number of them.
    Scaled,
}

impl JournalStep {
    pub(crate) fn name(self) -> &'static str {
        match self {
            JournalStep::Planned => "planned",
            JournalStep::Placed => "placed",
            JournalStep::Running => "running",
            JournalStep::Noted => "noted",
            JournalStep::Stopping => "stopping",
            JournalStep::Stopped => "stopped",
            JournalStep::Failed => "failed",
            JournalStep::Cancelled => "cancelled",
            JournalStep::Scaled => "scaled",
        }
    }
}

/// What to do now, and when to run the next step if nothing happens before.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step<A> {
    pub(crate) actions: Vec<A>,
    pub(crate) wake: Option<Timestamp>,
}

impl<A> Default for Step<A> {
    fn default() -> Step<A> {
        Step { actions: Vec::new(), wake: None }
    }
}

impl<A> Step<A> {
    pub(super) fn one(action: A) -> Step<A> {
        Step { actions: vec![action], wake: None }
    }

    pub(super) fn at(wake: Timestamp) -> Step<A> {
        Step { actions: Vec::new(), wake: Some(wake) }
    }

    /// The next step comes at the earliest of these times, or earlier where that was asked for before.
    pub(super) fn wake_by(&mut self, times: impl IntoIterator<Item = Timestamp>) {
        self.wake = self.wake.into_iter().chain(times).min();
    }

    /// Deletes the job when its time to live after its end is over. Until then the next step is due at that moment.
    pub(super) fn expire(&mut self, ended: Timestamp, ttl_s: Option<i64>, now: Timestamp, delete: A) {
        let Some(ttl_s) = ttl_s else { return };
        let until = ended.saturating_add(SignedDuration::from_secs(ttl_s)).unwrap_or(Timestamp::MAX);
        if until <= now {
            self.actions.push(delete);
        } else {
            self.wake = Some(until);
        }
    }
}

/// What an adapter has read and decided in one turn of a workload.
pub(super) struct Turn<J, A> {
    pub(super) job: J,
    /// What the decision reads; `None` if it must not know the workload.
    pub(super) facts: Option<JobFacts>,
    /// The uids of pods that are about to be stopped and save themselves: they get their own share back.
    pub(super) saving_pods: Vec<PodUid>,
    pub(super) step: Step<A>,
}

/// An event about an action.
pub(super) struct EventText {
    pub(super) warns: bool,
    /// A word for programs, such as `Stopping`.
    pub(super) reason: String,
    /// A sentence for people.
    pub(super) note: String,
}

/// Why an action failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ActionError {
    /// Our copy of the job or the pod is old: read it again.
    #[error("another client changed the object first: {0}")]
    Old(String),
    /// The API server refuses the object. The adapter remembers that, and its next step deals with it.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Again(String),
}

impl From<kube::Error> for ActionError {
    fn from(error: kube::Error) -> ActionError {
        ActionError::Again(error.to_string())
    }
}

/// A kind of workload, as the controller sees it.
pub(super) trait Workload: Send + Sync + 'static {
    const KIND: WorkloadKind;
    const API_VERSION: &'static str;
    /// What the operator does for this kind, as events name it.
    const EVENT_ACTION: &'static str;

    /// The object as it was read.
    type Job: Send + Sync;
    type Action: Send + Sync;

    /// Reads the workload and its pods, and decides what to do. `None`: the operator has no such workload.
    /// While sharing is switched off, only deletions are completed and moves ended.
    fn read(
        &self,
        name: &NamespacedName,
        is_off: bool,
    ) -> impl Future<Output = kube::Result<Option<Turn<Self::Job, Self::Action>>>> + Send;

    /// Executes one action, and updates the caches.
    fn act(&self, job: &Self::Job, action: &Self::Action) -> impl Future<Output = Result<(), ActionError>> + Send;

    /// Our copies are old: reads the workload again.
    fn refresh(&self, job: &Self::Job) -> impl Future<Output = kube::Result<()>> + Send;

    /// Pods that our finalizer holds although the API server has no such workload: no attempt follows them.
    fn orphans(&self, name: &NamespacedName) -> impl Future<Output = kube::Result<Vec<PodSnapshot>>> + Send;

    /// Records on the object, where it has a place for that, that its reconcile panicked. Answers whether an
    /// event is due.
    fn record_panic(&self, name: &NamespacedName, message: &str) -> impl Future<Output = bool> + Send;

    /// The uid of a workload in the cache.
    fn known_uid(&self, name: &NamespacedName) -> Option<JobUid>;

    fn uid(job: &Self::Job) -> &JobUid;

    /// The name of an action, for fail points.
    fn action_name(action: &Self::Action) -> &'static str;

    /// Whether the action only removes the order: it is in the journal, or cannot be carried out.
    fn removes_order(action: &Self::Action) -> bool;

    /// The event about an action that was executed on this version of the workload.
    fn event(job: &Self::Job, action: &Self::Action) -> Option<EventText>;
}
