//! The cache of jobs: TrainingJobs and TFJobs as they were read, and the names of the `batch/v1` Jobs that the operator
//! follows. It also keeps which workloads have changed, until the controller of jobs reads that.
//!
//! Copies may be old. An older version of an object never replaces a newer one, so that the watch
//! does not undo the result of our own write while it lags behind.

use super::snapshot::{JobSnapshot, is_older};
use super::task_job::TaskJobSnapshot;
use super::traffic_history::TrafficHistory;
use super::workload::{WorkloadKey, WorkloadKind};
use gainshare_kube_api::adopted::BatchJobSnapshot;
use gainshare_kube_api::deadline::DeadlineState;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{JOB_LABEL, JobUid, NamespacedName, NodeName, PodUid};
use gainshare_kube_api::tasks::TaskTraffic;
use gainshare_kube_api::training_job::State;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct JobCache {
    training_jobs: BTreeMap<NamespacedName, Arc<JobSnapshot>>,
    /// Jobs of several tasks, of both kinds.
    task_jobs: BTreeMap<WorkloadKey, Arc<TaskJobSnapshot>>,
    /// The uids of the Jobs that the operator follows. Everything else about a Job is read from the API server
    /// before each step.
    batch_jobs: BTreeMap<NamespacedName, JobUid>,
    /// The pods of each workload, by uid.
    pods: BTreeMap<WorkloadKey, BTreeSet<PodUid>>,
    changes: Vec<(WorkloadKey, JobChange)>,
    /// The uids of jobs that are gone, or are not followed any more.
    gone: Vec<JobUid>,
    traffic: TrafficHistory,
}

/// What happened to a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobChange {
    /// The job has come, and no attempt of it has begun.
    New,
    /// The job or one of its pods has changed.
    Changed,
    Gone,
}

fn training(name: &NamespacedName) -> WorkloadKey {
    WorkloadKey::new(WorkloadKind::TrainingJob, name.clone())
}

/// The workload whose attempt the pod is.
pub(super) fn workload_of(pod: &PodFacts) -> Option<WorkloadKey> {
    let attempt = pod.attempt.as_ref()?;
    let kind = match (attempt.epoch, attempt.task) {
        (None, _) => WorkloadKind::Job,
        (Some(_), None) => WorkloadKind::TrainingJob,
        (Some(_), Some(_)) if attempt.of_tfjob => WorkloadKind::TfJob,
        (Some(_), Some(_)) => WorkloadKind::TaskJob,
    };
    Some(WorkloadKey::new(kind, NamespacedName::new(&pod.namespace, pod.labels.get(JOB_LABEL)?)))
}

impl JobCache {
    pub(crate) fn training_job(&self, name: &NamespacedName) -> Option<&Arc<JobSnapshot>> {
        self.training_jobs.get(name)
    }

    pub(crate) fn training_jobs(&self) -> impl Iterator<Item = &Arc<JobSnapshot>> {
        self.training_jobs.values()
    }

    /// The uid of a Job that the operator follows.
    pub(crate) fn batch_job(&self, name: &NamespacedName) -> Option<&JobUid> {
        self.batch_jobs.get(name)
    }

    /// How an order changes a workload: a TrainingJob that has not begun keeps its place among the new ones.
    pub(crate) fn order_change(&self, key: &WorkloadKey) -> JobChange {
        let job = self.training_jobs.get(&key.name).filter(|_| key.kind == WorkloadKind::TrainingJob);
        let is_new = job.is_some_and(|job| job.status.attempt.is_none());
        if is_new { JobChange::New } else { JobChange::Changed }
    }

    /// All workloads.
    pub(crate) fn keys(&self) -> impl Iterator<Item = WorkloadKey> {
        let batch = self.batch_jobs.keys().map(|name| WorkloadKey::new(WorkloadKind::Job, name.clone()));
        self.training_jobs.keys().map(training).chain(batch).chain(self.task_jobs.keys().cloned())
    }

    pub(crate) fn task_job(&self, key: &WorkloadKey) -> Option<&Arc<TaskJobSnapshot>> {
        self.task_jobs.get(key)
    }

    pub(crate) fn task_jobs(&self) -> impl Iterator<Item = &Arc<TaskJobSnapshot>> {
        self.task_jobs.values()
    }

    /// How the deadlines of running jobs of several tasks stand. No node agent knows them.
    pub(crate) fn deadline_states(&self) -> BTreeMap<DeadlineState, u32> {
        let running = self.task_jobs.values().filter(|job| job.status.journal.state == State::Running);
        let mut counts: BTreeMap<DeadlineState, u32> = BTreeMap::new();
        for finish in running.filter_map(|job| job.status.finish.as_ref()) {
            *counts.entry(finish.state).or_default() += 1;
        }
        counts
    }

    pub(crate) fn put_task_job(&mut self, job: TaskJobSnapshot) {
        let known = self.task_jobs.get(&job.key);
        if known.is_some_and(|known| known.uid == job.uid && is_older(&job.resource_version, &known.resource_version)) {
            return;
        }
        if known.is_none_or(|known| **known != job) {
            let is_new = known.is_none() && job.status.journal.epoch == 0;
            let change = if is_new { JobChange::New } else { JobChange::Changed };
            self.changes.push((job.key.clone(), change));
            if let Some(known) = known.filter(|known| known.uid != job.uid) {
                self.gone.push(known.uid.clone());
            }
            if let (Ok(spec), false) = (&job.spec, job.status.journal.traffic.is_empty()) {
                self.traffic.add(&job.key.name.namespace, spec.program, &job.status.journal.traffic);
            }
            self.task_jobs.insert(job.key.clone(), Arc::new(job));
        }
    }

    /// What the job's tasks send and receive, as it was measured, or that of the last job of the same templates.
    pub(crate) fn traffic<'a>(&'a self, job: &'a TaskJobSnapshot) -> Option<&'a TaskTraffic> {
        let own = Some(&job.status.journal.traffic).filter(|own| !own.is_empty());
        own.or_else(|| self.traffic.get(&job.key.name.namespace, job.spec.as_ref().ok()?.program))
    }

    pub(crate) fn remove_task_job(&mut self, key: &WorkloadKey) {
        if let Some(job) = self.task_jobs.remove(key) {
            self.gone.push(job.uid.clone());
        }
        // Its pods may still be held by our finalizer.
        self.changes.push((key.clone(), JobChange::Gone));
    }

    /// The jobs of several tasks of this kind that exist, after a start of the watch: those not among them are gone.
    pub(crate) fn keep_task_jobs(&mut self, kind: WorkloadKind, alive: &BTreeSet<WorkloadKey>) {
        let of_kind = self.task_jobs.keys().filter(|key| key.kind == kind);
        let gone: Vec<WorkloadKey> = of_kind.filter(|key| !alive.contains(*key)).cloned().collect();
        gone.iter().for_each(|key| self.remove_task_job(key));
    }

    /// Queues a job again: something that it waits for has happened.
    pub(crate) fn mark(&mut self, key: WorkloadKey) {
        self.changes.push((key, JobChange::Changed));
    }

    pub(crate) fn put_training_job(&mut self, job: JobSnapshot) {
        let name = job.key();
        let known = self.training_jobs.get(&name);
        if known.is_some_and(|known| known.uid == job.uid && is_older(&job.resource_version, &known.resource_version)) {
            return;
        }
        if known.is_none_or(|known| **known != job) {
            let is_new = known.is_none() && job.status.attempt.is_none();
            let change = if is_new { JobChange::New } else { JobChange::Changed };
            self.changes.push((training(&name), change));
            if let Some(known) = known.filter(|known| known.uid != job.uid) {
                self.gone.push(known.uid.clone());
            }
            self.training_jobs.insert(name, Arc::new(job));
        }
    }

    pub(crate) fn remove_training_job(&mut self, name: &NamespacedName) {
        if let Some(job) = self.training_jobs.remove(name) {
            self.gone.push(job.uid.clone());
        }
        // Its pods may still be held by our finalizer.
        self.changes.push((training(name), JobChange::Gone));
    }

    /// The TrainingJobs of one pod that exist, after a start of the watch: those not among them are gone.
    pub(crate) fn keep_training_jobs(&mut self, alive: &BTreeSet<NamespacedName>) {
        let gone: Vec<NamespacedName> =
            self.training_jobs.keys().filter(|name| !alive.contains(*name)).cloned().collect();
        gone.iter().for_each(|name| self.remove_training_job(name));
    }

    /// Takes in a Job: the operator follows it if it is ours.
    pub(crate) fn put_batch_job(&mut self, job: &BatchJobSnapshot) {
        let name = NamespacedName::new(&job.namespace, &job.name);
        if !job.is_ours() {
            return self.remove_batch_job(&name);
        }
        self.changes.push((WorkloadKey::new(WorkloadKind::Job, name.clone()), JobChange::Changed));
        if let Some(known) = self.batch_jobs.insert(name, job.uid.clone())
            && known != job.uid
        {
            self.gone.push(known);
        }
    }

    pub(crate) fn remove_batch_job(&mut self, name: &NamespacedName) {
        if let Some(uid) = self.batch_jobs.remove(name) {
            self.gone.push(uid);
            self.changes.push((WorkloadKey::new(WorkloadKind::Job, name.clone()), JobChange::Gone));
        }
    }

    /// The Jobs that exist, after a start of the watch: those not among them are gone.
    pub(crate) fn keep_batch_jobs(&mut self, alive: &BTreeSet<NamespacedName>) {
        let gone: Vec<NamespacedName> = self.batch_jobs.keys().filter(|name| !alive.contains(*name)).cloned().collect();
        gone.iter().for_each(|name| self.remove_batch_job(name));
    }

    /// The uids of a workload's pods.
    pub(super) fn pods(&self, key: &WorkloadKey) -> impl Iterator<Item = &PodUid> {
        self.pods.get(key).into_iter().flatten()
    }

    /// Enters a pod under its workload, or takes it out. `before` is the version that was known, and `after` the
    /// one that replaces it.
    pub(super) fn link_pod(&mut self, before: Option<&PodFacts>, after: Option<&PodFacts>) {
        let (old, new) = (before.and_then(workload_of), after.and_then(workload_of));
        if let (Some(old), Some(pod)) = (old.as_ref().filter(|old| Some(*old) != new.as_ref()), before) {
            if let Some(uids) = self.pods.get_mut(old) {
                uids.remove(&pod.uid);
                if uids.is_empty() {
                    self.pods.remove(old);
                }
            }
            // A Job itself changes whenever one of its pods goes.
            if old.kind != WorkloadKind::Job {
                self.changes.push((old.clone(), JobChange::Changed));
            }
        }
        let (Some(new), Some(pod)) = (new, after) else { return };
        if before != after && self.concerns_job(&new, pod) {
            self.changes.push((new.clone(), JobChange::Changed));
        }
        self.pods.entry(new).or_default().insert(pod.uid.clone());
    }

    /// Whether a change of the pod is news for its workload. A Job itself changes whenever one of its pods
    /// does; only a pod that our finalizer holds for a Job that is not followed is news.
    fn concerns_job(&self, key: &WorkloadKey, pod: &PodFacts) -> bool {
        let Some(attempt) = &pod.attempt else { return false };
        match key.kind {
            WorkloadKind::TrainingJob | WorkloadKind::TaskJob | WorkloadKind::TfJob => true,
            WorkloadKind::Job => attempt.has_finalizer && self.batch_job(&key.name) != attempt.owner.as_ref(),
        }
    }

    /// Marks the jobs on these nodes whose pods we make as changed, by their pods and by their journals: a pod may
    /// be gone.
    pub(super) fn mark_nodes<'a>(
        &mut self,
        nodes: &BTreeSet<NodeName>,
        node_of: impl Fn(&PodUid) -> Option<&'a NodeName>,
    ) {
        if nodes.is_empty() {
            return;
        }
        let is_there = |uids: &BTreeSet<PodUid>| uids.iter().filter_map(&node_of).any(|n| nodes.contains(n));
        let of_own_kinds = self.pods.iter().filter(|(key, _)| key.kind != WorkloadKind::Job);
        let by_pod = of_own_kinds.filter(|(_, uids)| is_there(uids)).map(|(key, _)| key.clone());
        let journal_node = |job: &JobSnapshot| job.status.attempt.as_ref().and_then(|attempt| attempt.node.clone());
        let by_journal = self.training_jobs.iter();
        let by_journal = by_journal.filter(|(_, job)| journal_node(job).is_some_and(|node| nodes.contains(&node)));
        let keys: BTreeSet<WorkloadKey> = by_pod.chain(by_journal.map(|(name, _)| training(name))).collect();
        self.changes.extend(keys.into_iter().map(|key| (key, JobChange::Changed)));
    }

    pub(super) fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// What has happened since the last call, in its order.
    pub(super) fn take_changes(&mut self) -> Vec<(WorkloadKey, JobChange)> {
        std::mem::take(&mut self.changes)
    }

    pub(super) fn take_gone(&mut self) -> Vec<JobUid> {
        std::mem::take(&mut self.gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::attempt::AttemptFacts;
    use gainshare_kube_api::training_job::TrainingJob;
    use serde_json::json;

    fn name(name: &str) -> NamespacedName {
        NamespacedName::new("team", name)
    }

    fn key(kind: WorkloadKind, job: &str) -> WorkloadKey {
        WorkloadKey::new(kind, name(job))
    }

    /// A pod of the TrainingJob `run` (with an epoch) or of the Job `run`, which the uid `owner` has.
    fn pod(uid: &str, epoch: Option<u32>, has_finalizer: bool) -> PodFacts {
        let attempt = AttemptFacts { owner: Some("owner".into()), epoch, has_finalizer, ..AttemptFacts::default() };
        PodFacts {
            uid: uid.into(),
            namespace: "team".to_owned(),
            name: uid.to_owned(),
            labels: [(JOB_LABEL.to_owned(), "run".to_owned())].into(),
            attempt: Some(Box::new(attempt)),
            ..PodFacts::default()
        }
    }

    fn batch_job(uid: &str) -> BatchJobSnapshot {
        BatchJobSnapshot {
            namespace: "team".to_owned(),
            name: "run".to_owned(),
            uid: uid.into(),
            asked: true,
            ..BatchJobSnapshot::default()
        }
    }

    #[test]
    fn pods_are_kept_by_workload_and_their_changes_are_news() {
        let mut jobs = JobCache::default();
        let training = key(WorkloadKind::TrainingJob, "run");
        let first = pod("p", Some(1), true);
        jobs.link_pod(None, Some(&first));
        assert_eq!(jobs.take_changes(), [(training.clone(), JobChange::Changed)]);
        jobs.link_pod(Some(&first), Some(&first));
        assert_eq!(jobs.take_changes(), [], "the same again is no news");
        assert_eq!(jobs.pods(&training).collect::<Vec<_>>(), ["p"]);
        let unlabelled = PodFacts { attempt: None, ..first.clone() };
        jobs.link_pod(Some(&first), Some(&unlabelled));
        assert_eq!(jobs.take_changes(), [(training.clone(), JobChange::Changed)]);
        assert_eq!(jobs.pods(&training).count(), 0);
    }

    #[test]
    fn a_held_pod_of_a_job_that_is_not_followed_is_news_and_no_other() {
        let mut jobs = JobCache::default();
        let batch = key(WorkloadKind::Job, "run");
        jobs.link_pod(None, Some(&pod("p", None, false)));
        assert_eq!(jobs.take_changes(), []);
        jobs.link_pod(None, Some(&pod("q", None, true)));
        assert_eq!(jobs.take_changes(), [(batch.clone(), JobChange::Changed)]);
        jobs.put_batch_job(&batch_job("owner"));
        jobs.take_changes();
        jobs.link_pod(None, Some(&pod("r", None, true)));
        assert_eq!(jobs.take_changes(), [], "the Job itself changes with its pods");
        jobs.put_batch_job(&batch_job("another"));
        assert_eq!(jobs.take_gone(), ["owner"], "the Job was made again under its name");
        jobs.take_changes();
        jobs.link_pod(None, Some(&pod("s", None, true)));
        assert_eq!(jobs.take_changes(), [(batch.clone(), JobChange::Changed)]);
        jobs.keep_batch_jobs(&BTreeSet::new());
        assert_eq!((jobs.take_changes(), jobs.take_gone()), (vec![(batch, JobChange::Gone)], vec!["another".into()]));
    }

    #[test]
    fn deadlines_of_running_jobs_of_tasks_are_counted_by_their_state() {
        let mut jobs = JobCache::default();
        for (name, state, deadline_state) in [
            ("a", State::Running, Some(DeadlineState::AtRisk)),
            ("b", State::Running, Some(DeadlineState::AtRisk)),
            ("c", State::Running, None),
            ("d", State::Succeeded, Some(DeadlineState::Met)),
        ] {
            let job = json!({"metadata": {"name": name, "namespace": "team", "uid": name},
                "spec": {"replicaSpecs": {"Worker": {"template": {}}}},
                "status": {"tasks": {"state": state}, "finish": deadline_state.map(|s| json!({"standing": s}))}});
            let job: TrainingJob = serde_json::from_value(job).unwrap();
            jobs.put_task_job(TaskJobSnapshot::of_training_job(&job).unwrap());
        }
        assert_eq!(jobs.deadline_states(), [(DeadlineState::AtRisk, 2)].into());
    }

    #[test]
    fn jobs_that_are_gone_are_reported_once() {
        let mut jobs = JobCache::default();
        let job = |uid: &str| JobSnapshot {
            namespace: "team".to_owned(),
            name: "run".to_owned(),
            uid: uid.into(),
            ..JobSnapshot::default()
        };
        jobs.put_training_job(job("a"));
        jobs.keep_training_jobs(&[name("run")].into());
        assert_eq!(jobs.take_changes(), [(key(WorkloadKind::TrainingJob, "run"), JobChange::New)]);
        jobs.put_training_job(job("b"));
        assert_eq!(jobs.take_gone(), ["a"]);
        jobs.keep_training_jobs(&BTreeSet::new());
        assert_eq!(jobs.take_gone(), ["b"]);
        jobs.remove_training_job(&name("run"));
        assert_eq!(jobs.take_gone(), [""; 0]);
        assert!(jobs.training_job(&name("run")).is_none());
    }
}
