//! The operator's copy of the cluster, and what follows from it. Pure: no I/O, no clock.
//!
//! **How.** Watches put facts in. For every pod that a policy selects, [`World`] keeps the
//! [`PodOnNode`] that its node agent gets, and for every node a revision that grows when its list
//! changes. Selection, limits and quotas concern one namespace, so a change is worked out for one
//! pod, or for one namespace, never for the whole cluster.
//!
//! **Originals are checked.** Tenants can write the annotation that keeps a pod's original
//! resources. The operator writes it exactly once per pod, with what the pod has at that moment. So
//! an annotation that appears or changes in any other way is forged ([`World::is_forged`]): the pod
//! is left alone, adds nothing to the pool, and its values are not put back (decision 11).
//!
//! **Properties.** The derived lists depend only on the facts, not on the order in which they came
//! (`order_does_not_matter`). A repeated or an older version of a pod changes nothing
//! (`stale_events_are_ignored`). A forged original never enlarges the pool
//! (`forged_originals_do_not_enlarge_the_pool`).

use super::job_dates::JobDates;
use super::jobs::{JobCache, JobChange, workload_of};
use super::nodes::NodeCache;
use super::removed::RemovedPods;
use super::request_totals::{RequestTotals, requests_of};
use super::run_history::RunHistory;
use super::snapshot::{NodeState, PodSnapshot, is_older};
use super::workload::WorkloadKey;
use gainshare_kube_api::adopted::BatchJobSnapshot;
use gainshare_kube_api::bounds::{self, NodeFacts, QuotaFacts, RangeFacts};
use gainshare_kube_api::deadline::{Deadline, DeadlineResult};
use gainshare_kube_api::deadline_input::{self, DeadlineError};
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{
    DEADLINE_ANNOTATION, GPU_ANNOTATION, GPU_LABEL, JOB_LABEL, NamespacedName, NodeName, ORIGINAL_ANNOTATION, PodUid,
};
use gainshare_kube_api::pod_note::PodNote;
use gainshare_kube_api::quantity::total;
use gainshare_kube_api::resize::Refusal;
use gainshare_kube_api::resources::Resources;
use gainshare_kube_api::select::{self, PolicyFacts};
use gainshare_kube_api::share_policy::SharePolicySpec;
use gainshare_kube_api::wire::{FinishedPod, PodOnNode, ResizeObstacle, SCALED_POLICY};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// Which policy a pod belongs to: its namespace, and its name (empty: the namespace's label).
pub(crate) type PolicyKey = (String, String);

#[derive(Debug, Default)]
pub(crate) struct World {
    pods: BTreeMap<PodUid, PodFacts>,
    removed: RemovedPods,
    pods_of_namespace: BTreeMap<String, BTreeSet<PodUid>>,
    /// By node.
    requested: HashMap<NodeName, RequestTotals>,
    /// The operator's namespace, where placeholders are. It is set before the first pod is read.
    pub(crate) own_namespace: String,
    pub(crate) policies: BTreeMap<PolicyKey, PolicyFacts>,
    namespaces: BTreeMap<String, BTreeMap<String, String>>,
    nodes: NodeCache,
    pub(crate) jobs: JobCache,
    job_dates: JobDates,
    ranges: BTreeMap<String, BTreeMap<String, RangeFacts>>,
    quotas: BTreeMap<String, BTreeMap<String, QuotaFacts>>,
    /// Pods whose annotation of original resources was not written by the operator.
    forged: BTreeSet<PodUid>,
    /// Sharing is switched off: every pod gets its own values back.
    off: bool,
    /// Pods that get their own share back because they are about to be stopped.
    given_back: BTreeSet<PodUid>,
    run_history: RunHistory,
    /// Pods whose run is in the history. Agents report a run several times.
    recorded_runs: BTreeSet<PodUid>,
    shared: BTreeMap<PodUid, PodOnNode>,
    shared_of_node: BTreeMap<NodeName, BTreeSet<PodUid>>,
    revisions: BTreeMap<NodeName, u64>,
    next_revision: u64,
    touched: ChangedObjects,
}

/// What changed since [`World::take_changed_objects`] was last called.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangedObjects {
    pub(crate) nodes: BTreeSet<NodeName>,
    pub(crate) policies: BTreeSet<PolicyKey>,
    /// Pods that a policy will select as soon as they run.
    pub(crate) pods: BTreeSet<PodUid>,
}

impl World {
    /// `first_revision` keeps the revisions apart from those of an operator that ran before.
    pub(crate) fn new(first_revision: u64) -> World {
        World { next_revision: first_revision.max(1), ..World::default() }
    }

    pub(crate) fn take_changed_objects(&mut self) -> ChangedObjects {
        std::mem::take(&mut self.touched)
    }

    pub(crate) fn pods(&self) -> impl Iterator<Item = &PodFacts> {
        self.pods.values()
    }

    pub(crate) fn pod(&self, uid: &PodUid) -> Option<&PodFacts> {
        self.pods.get(uid)
    }

    pub(crate) fn shared(&self, uid: &PodUid) -> Option<&PodOnNode> {
        self.shared.get(uid)
    }

    pub(crate) fn all_shared(&self) -> impl Iterator<Item = &PodOnNode> {
        self.shared.values()
    }

    pub(crate) fn pods_of_policy<'a>(&'a self, key: &'a PolicyKey) -> impl Iterator<Item = &'a PodOnNode> {
        let of_namespace = self.pods_of_namespace.get(&key.0).into_iter().flatten();
        of_namespace.filter_map(|uid| self.shared.get(uid)).filter(|pod| pod.policy == key.1)
    }

    pub(crate) fn node_of(&self, uid: &PodUid) -> Option<&NodeName> {
        self.pods.get(uid)?.node.as_ref()
    }

    /// The workload whose attempt the pod is.
    pub(crate) fn job_of(&self, uid: &PodUid) -> Option<WorkloadKey> {
        self.pods.get(uid).and_then(workload_of)
    }

    /// The pods of a workload.
    pub(crate) fn pods_of_job(&self, key: &WorkloadKey) -> Vec<PodSnapshot> {
        self.jobs.pods(key).filter_map(|uid| self.pods.get(uid)).filter_map(PodSnapshot::of_facts).collect()
    }

    /// The facts about the pods of a workload.
    pub(crate) fn pod_facts_of_job(&self, key: &WorkloadKey) -> impl Iterator<Item = &PodFacts> {
        self.jobs.pods(key).filter_map(|uid| self.pods.get(uid))
    }

    #[cfg(test)]
    pub(super) fn namespaces(&self) -> impl Iterator<Item = &String> {
        self.namespaces.keys()
    }

    pub(crate) fn nodes(&self) -> &NodeCache {
        &self.nodes
    }

    /// The state of a node that the API server does not have now, and how long until it counts as off.
    pub(crate) fn missing_node(&mut self, name: &NodeName, now: Instant) -> (NodeState, Option<Duration>) {
        self.nodes.missing(name, now)
    }

    /// What the pods of a node request together.
    pub(crate) fn requested(&self, node: &NodeName) -> RequestTotals {
        self.requested.get(node).copied().unwrap_or_default()
    }

    pub(crate) fn revision(&self, node: &NodeName) -> u64 {
        // A node without pods has a list too: the empty one, and it never changes.
        self.revisions.get(node).copied().unwrap_or(1)
    }

    pub(crate) fn list(&self, node: &NodeName) -> Vec<PodOnNode> {
        let uids = self.shared_of_node.get(node).into_iter().flatten();
        let pods = uids.filter_map(|uid| self.shared.get(uid));
        let earlier_steps = |pod: &PodOnNode| {
            let program = self.pods.get(&pod.uid).and_then(|facts| facts.container(&pod.container)?.program);
            program.map(|program| self.run_history.steps(&pod.namespace, program)).unwrap_or_default()
        };
        let listed = |pod: &PodOnNode| PodOnNode {
            room_milli: self.room_milli(pod, node),
            earlier_steps: earlier_steps(pod),
            ..pod.clone()
        };
        pods.map(listed).collect()
    }

    /// Pods that carry original values although no policy selects them any more: they are to be
    /// restored.
    pub(crate) fn let_go(&self) -> Vec<PodFacts> {
        // Few pods carry any: that is asked first.
        let touched = self.pods.values().filter(|pod| pod.running && pod.notes.contains_key(ORIGINAL_ANNOTATION));
        let free = touched.filter(|pod| !self.shared.contains_key(&pod.uid) && !self.forged.contains(&pod.uid));
        free.filter(|pod| pod.originals().is_some()).cloned().collect()
    }

    /// The pod is about to be stopped: it gets its own share back, so that it can save itself, and
    /// keeps it.
    pub(crate) fn give_back(&mut self, uid: &PodUid) {
        if self.pods.contains_key(uid) && self.given_back.insert(uid.clone()) {
            self.derive(uid);
        }
    }

    /// Takes in a pod, unless a newer version of it is known or it was removed. Checks its originals against the
    /// version before.
    pub(crate) fn put_pod(&mut self, mut facts: PodFacts) {
        if self.removed.contains(&facts.uid) {
            return;
        }
        if let Some(known) = self.pods.get(&facts.uid) {
            if is_older(&facts.resource_version, &known.resource_version) {
                return;
            }
            if is_forged(known, &facts, self.forged.contains(&facts.uid)) {
                self.forged.insert(facts.uid.clone());
            } else {
                self.forged.remove(&facts.uid);
            }
            if let (Some(attempt), Some(before)) = (&mut facts.attempt, &known.attempt) {
                attempt.date_refusal(before, jiff::Timestamp::now());
            }
            if known.node != facts.node {
                self.unshare(&facts.uid);
            }
        }
        self.pods_of_namespace.entry(facts.namespace.clone()).or_default().insert(facts.uid.clone());
        let uid = facts.uid.clone();
        let node = facts.node.clone();
        let requests = |pod| requests_of(pod, &self.own_namespace);
        let has_other_requests = self.pods.get(&uid).and_then(requests) != requests(&facts);
        self.count_in(&facts);
        self.jobs.link_pod(self.pods.get(&uid), Some(&facts));
        if let Some(before) = self.pods.insert(uid.clone(), facts) {
            self.count_out(&before);
        }
        self.derive(&uid);
        if has_other_requests && let Some(node) = node {
            self.bump_growing(node);
        }
    }

    /// The node's agent reports how far pods had come that left its list. Those that ended well count.
    pub(crate) fn record_finished(&mut self, node: &NodeName, finished: &[FinishedPod]) {
        for run in finished {
            let pod = self.pods.get(&run.uid).filter(|pod| pod.succeeded && pod.node.as_ref() == Some(node));
            let Some(pod) = pod else { continue };
            let program = pod.container(&run.container).and_then(|container| container.program);
            if let Some(program) = program.filter(|_| self.recorded_runs.insert(run.uid.clone())) {
                self.run_history.add(&pod.namespace, program, run.steps);
            }
        }
    }

    /// The pod does not exist any more: the API server or the watch said so.
    pub(crate) fn remove_pod(&mut self, uid: &PodUid) {
        self.removed.insert(uid);
        self.take_out(uid);
    }

    fn take_out(&mut self, uid: &PodUid) {
        self.unshare(uid);
        self.given_back.remove(uid);
        self.recorded_runs.remove(uid);
        self.forged.remove(uid);
        let Some(pod) = self.pods.remove(uid) else { return };
        self.count_out(&pod);
        if let Some(node) = pod.node.clone() {
            self.bump_growing(node);
        }
        self.jobs.link_pod(Some(&pod), None);
        if let Some(uids) = self.pods_of_namespace.get_mut(&pod.namespace) {
            uids.remove(uid);
        }
    }

    pub(crate) fn has_job_changes(&self) -> bool {
        self.jobs.has_changes() || self.nodes.has_changes()
    }

    /// The workloads that have changed since the last call, in the order in which they did.
    pub(crate) fn take_job_changes(&mut self) -> Vec<(WorkloadKey, JobChange)> {
        let nodes = self.nodes.take_changed();
        self.jobs.mark_nodes(&nodes, |uid| self.pods.get(uid)?.node.as_ref());
        self.jobs.take_changes()
    }

    fn count_in(&mut self, pod: &PodFacts) {
        if let Some((node, asked)) = requests_of(pod, &self.own_namespace) {
            let sum = self.requested.entry(node.clone()).or_default();
            *sum = sum.with(asked, u64::saturating_add);
        }
    }

    fn count_out(&mut self, pod: &PodFacts) {
        if let Some((node, asked)) = requests_of(pod, &self.own_namespace)
            && let Some(sum) = self.requested.get_mut(node)
        {
            *sum = sum.with(asked, u64::saturating_sub);
            if *sum == RequestTotals::default() {
                self.requested.remove(node);
            }
        }
    }

    /// The pods that exist, after a new start of the watch: those not among them are taken out. The list may be older
    /// than a pod that we have just made, so that a later event may bring a pod back.
    pub(crate) fn keep_pods(&mut self, alive: &BTreeSet<PodUid>) {
        let gone: Vec<PodUid> = self.pods.keys().filter(|uid| !alive.contains(*uid)).cloned().collect();
        gone.iter().for_each(|uid| self.take_out(uid));
    }

    pub(crate) fn put_policy(&mut self, facts: PolicyFacts) {
        let key = (facts.namespace.clone(), facts.name.clone());
        let known = self.policies.insert(key.clone(), facts);
        let now = &self.policies[&key];
        // Most changes of a policy are our own writes of its status.
        if known.is_none_or(|known| known.spec != now.spec || known.ending != now.ending || known.uid != now.uid) {
            self.touched.policies.insert(key.clone());
            self.derive_namespace(&key.0);
        }
    }

    pub(crate) fn remove_policy(&mut self, key: &PolicyKey) {
        if self.policies.remove(key).is_some() {
            self.derive_namespace(&key.0);
        }
    }

    pub(crate) fn keep_policies(&mut self, alive: &BTreeSet<PolicyKey>) {
        let gone: Vec<PolicyKey> = self.policies.keys().filter(|key| !alive.contains(*key)).cloned().collect();
        gone.iter().for_each(|key| self.remove_policy(key));
    }

    pub(crate) fn put_namespace(&mut self, name: &str, labels: BTreeMap<String, String>) {
        if self.namespaces.get(name) != Some(&labels) {
            self.namespaces.insert(name.to_owned(), labels);
            self.derive_namespace(name);
        }
    }

    pub(crate) fn remove_namespace(&mut self, name: &str) {
        if self.namespaces.remove(name).is_some() {
            self.derive_namespace(name);
        }
    }

    /// The namespaces that exist, after a new start of the watch: those not among them are gone.
    pub(crate) fn keep_namespaces(&mut self, alive: &BTreeSet<String>) {
        let gone: Vec<String> = self.namespaces.keys().filter(|name| !alive.contains(*name)).cloned().collect();
        gone.iter().for_each(|name| self.remove_namespace(name));
    }

    pub(crate) fn put_node(&mut self, name: &NodeName, facts: NodeFacts) {
        if self.nodes.put(name, facts) {
            let uids: Vec<PodUid> = self.shared_of_node.get(name).into_iter().flatten().cloned().collect();
            uids.iter().for_each(|uid| self.derive(uid));
        }
    }

    pub(crate) fn remove_node(&mut self, name: &NodeName, now: Instant) {
        self.nodes.remove(name, now);
    }

    /// The nodes that exist, after a new start of the watch: those not among them are gone.
    pub(crate) fn keep_nodes(&mut self, alive: &BTreeSet<NodeName>, now: Instant) {
        self.nodes.keep(alive, now);
    }

    pub(crate) fn put_batch_job(&mut self, job: &BatchJobSnapshot) {
        if self.job_dates.put(job) {
            let is_of_job = |uid: &&PodUid| self.pods[*uid].owners.iter().any(|owner| job.uid == owner.uid.as_str());
            let uids = self.pods_of_namespace.get(&job.namespace).into_iter().flatten();
            let uids: Vec<PodUid> = uids.filter(is_of_job).cloned().collect();
            uids.iter().for_each(|uid| self.derive(uid));
        }
        self.jobs.put_batch_job(job);
    }

    pub(crate) fn remove_batch_job(&mut self, name: &NamespacedName) {
        self.job_dates.remove(name);
        self.jobs.remove_batch_job(name);
    }

    /// The Jobs that exist, after a new start of the watch: those not among them are gone.
    pub(crate) fn keep_batch_jobs(&mut self, alive: &BTreeSet<NamespacedName>) {
        self.job_dates.keep(alive);
        self.jobs.keep_batch_jobs(alive);
    }

    /// The deadline of a pod whose container started at this moment, and what is wrong with it.
    pub(crate) fn deadline(&self, pod: &PodFacts, started_ms: u64) -> (Option<Deadline>, Option<DeadlineError>) {
        deadline_input::of_pod(pod, self.job_dates.since_ms(pod).unwrap_or(started_ms), started_ms)
    }

    /// `None`: the LimitRange is gone.
    pub(crate) fn put_range(&mut self, namespace: &str, name: &str, facts: Option<RangeFacts>) {
        let ranges = self.ranges.entry(namespace.to_owned()).or_default();
        let known = match facts.clone() {
            Some(facts) => ranges.insert(name.to_owned(), facts),
            None => ranges.remove(name),
        };
        if known != facts {
            self.derive_namespace(namespace);
        }
    }

    /// The least CPU (in thousandths of a core) and memory that each container of a namespace must request.
    pub(crate) fn least_resources(&self, namespace: &str) -> (u64, u64) {
        let ranges = self.ranges.get(namespace).into_iter().flat_map(BTreeMap::values).map(RangeFacts::least);
        ranges.fold((0, 0), |(cpu, memory), least| (cpu.max(least.0), memory.max(least.1)))
    }

    /// Whether the GPU work of a namespace's pods is to be paced.
    pub(crate) fn paces_gpu_work(&self, namespace: &str) -> bool {
        let label = self.namespaces.get(namespace).and_then(|labels| labels.get(GPU_LABEL));
        label.is_some_and(|value| value == "enabled")
    }

    pub(crate) fn put_quota(&mut self, namespace: &str, name: &str, facts: Option<QuotaFacts>) {
        let quotas = self.quotas.entry(namespace.to_owned()).or_default();
        match facts {
            Some(facts) => quotas.insert(name.to_owned(), facts),
            None => quotas.remove(name),
        };
    }

    pub(crate) fn keep_ranges(&mut self, alive: &BTreeSet<(String, String)>) {
        for (namespace, name) in missing(&self.ranges, alive) {
            self.put_range(&namespace, &name, None);
        }
    }

    pub(crate) fn keep_quotas(&mut self, alive: &BTreeSet<(String, String)>) {
        for (namespace, name) in missing(&self.quotas, alive) {
            self.put_quota(&namespace, &name, None);
        }
    }

    /// Switches sharing off or on.
    pub(crate) fn set_off(&mut self, off: bool) {
        if self.off != off {
            self.off = off;
            let namespaces: Vec<String> = self.pods_of_namespace.keys().cloned().collect();
            namespaces.iter().for_each(|namespace| self.derive_namespace(namespace));
            self.touched.policies.extend(self.policies.keys().cloned());
        }
    }

    pub(crate) fn is_off(&self) -> bool {
        self.off
    }

    /// Whether the namespace's quotas have room for going from `now` to `to`.
    pub(crate) fn quota(&self, namespace: &str, now: &Resources, to: &Resources) -> Result<(), Refusal> {
        bounds::over_quota(self.quotas.get(namespace).into_iter().flat_map(BTreeMap::values), now, to)
    }

    /// Refuses a change after which the pods of the policy on this node together would request more
    /// than before our first change.
    pub(crate) fn pool(&self, pod: &PodOnNode, node: &NodeName, to: &Resources) -> Result<(), Refusal> {
        let Some(asked_for) = to.requests.cpu_milli else { return Ok(()) };
        let mates = || self.mates(pod, node);
        let sum = |pick: fn(&PodOnNode) -> Option<u64>| total(mates().filter_map(pick));
        let pool = sum(|mate| mate.original.requests.cpu_milli);
        let now = sum(|mate| mate.now.requests.cpu_milli);
        let own = pod.now.requests.cpu_milli.unwrap_or(0);
        // Every pod may have the least request, also where its original was smaller.
        let slack = mates().count() as u64 * gainshare_kube_api::resize::LEAST_CPU_MILLI;
        let slack = slack.saturating_add(self.room_milli(pod, node));
        let after = now.saturating_sub(own).saturating_add(asked_for);
        if asked_for > own && after > pool.saturating_add(slack) {
            return Err(Refusal::Pool {
                what: "CPU (in thousandths of a core)",
                asked: after.saturating_sub(pool),
                pool,
            });
        }
        Ok(())
    }

    /// How many pods match a policy, and how many of them another policy has.
    pub(crate) fn matching(&self, policy: &PolicyFacts) -> (usize, usize) {
        let of_namespace = self.pods_of_namespace.get(&policy.namespace).into_iter().flatten();
        let matching: Vec<&PodUid> =
            of_namespace.filter(|uid| self.pods.get(*uid).is_some_and(|pod| policy.selects(pod))).collect();
        let taken = matching.iter().filter(|uid| self.shared.contains_key(**uid)).count();
        (matching.len(), taken)
    }

    fn derive_namespace(&mut self, namespace: &str) {
        let uids: Vec<PodUid> = self.pods_of_namespace.get(namespace).into_iter().flatten().cloned().collect();
        uids.iter().for_each(|uid| self.derive(uid));
    }

    fn derive(&mut self, uid: &PodUid) {
        let Some(entry) = self.entry(uid) else {
            if self.is_coming(uid) || self.result(uid).is_some() {
                self.touched.pods.insert(uid.clone());
            }
            return self.unshare(uid);
        };
        let key = (entry.namespace.clone(), entry.policy.clone());
        let node = self.pods[uid].node.clone().unwrap_or_default();
        let resizable = entry.blocked.is_none();
        let before = self.shared.insert(uid.clone(), entry);
        if before.as_ref() != self.shared.get(uid) {
            if let Some(before) = before {
                self.touched.policies.insert((before.namespace, before.policy));
            }
            self.touched.policies.insert(key);
            // The originals are written before the first change.
            if resizable && self.pods[uid].originals().is_none() {
                self.touched.pods.insert(uid.clone());
            }
            self.shared_of_node.entry(node.clone()).or_default().insert(uid.clone());
            self.bump(node);
        }
    }

    fn unshare(&mut self, uid: &PodUid) {
        let Some(before) = self.shared.remove(uid) else { return };
        self.touched.policies.insert((before.namespace, before.policy));
        if let Some(node) = self.pods.get(uid).and_then(|pod| pod.node.clone()) {
            if let Some(uids) = self.shared_of_node.get_mut(&node) {
                uids.remove(uid);
            }
            self.bump(node);
        }
    }

    /// Other requests on the node change how far its pods may grow.
    fn bump_growing(&mut self, node: NodeName) {
        if self.has_growing(&node) {
            self.bump(node);
        }
    }

    /// The pods on a node that a policy selects.
    pub(super) fn shared_on(&self, node: &NodeName) -> impl Iterator<Item = &PodOnNode> {
        self.shared_of_node.get(node).into_iter().flatten().filter_map(|uid| self.shared.get(uid))
    }

    /// The pods that share the node with `pod` by the same policy, itself included. Only running containers count,
    /// as for the node agent: a pod whose container has exited no longer reserves part of the pool.
    pub(super) fn mates<'a>(&'a self, pod: &'a PodOnNode, node: &NodeName) -> impl Iterator<Item = &'a PodOnNode> {
        self.shared_on(node).filter(|mate| {
            let same = (&mate.namespace, &mate.policy) == (&pod.namespace, &pod.policy);
            same && mate.blocked.is_none() && mate.started_ms.is_some()
        })
    }

    /// How much more CPU the namespace's quotas let its pods request.
    pub(super) fn quota_left_milli(&self, namespace: &str) -> u64 {
        let quotas = self.quotas.get(namespace).into_iter().flat_map(BTreeMap::values);
        quotas.filter_map(QuotaFacts::cpu_requests_left_milli).min().unwrap_or(u64::MAX)
    }

    fn bump(&mut self, node: NodeName) {
        self.next_revision += 1;
        self.revisions.insert(node.clone(), self.next_revision);
        self.touched.nodes.insert(node);
    }

    /// Whether the pod is starting, a policy will select it, and it can be resized.
    pub(crate) fn is_coming(&self, uid: &PodUid) -> bool {
        let Some(pod) = self.pods.get(uid).filter(|pod| pod.starting) else { return false };
        let chosen = self.chosen(pod).filter(|chosen| !chosen.watch_only);
        chosen.is_some_and(|chosen| pod.blocked(&select::container_name(&chosen.spec, pod)).is_none())
    }

    /// Whether a pod of a policy that has ended met its deadline, until that is published; with the policy's name.
    /// Pods of TrainingJobs have none: the job is judged as a whole. Neither have pods that were asked to end.
    pub(crate) fn result(&self, uid: &PodUid) -> Option<(String, DeadlineResult)> {
        let pod = self.pods.get(uid).filter(|pod| pod.ended && pod.notes.contains_key(DEADLINE_ANNOTATION))?;
        let is_of_task = pod.attempt.as_ref().is_some_and(|attempt| attempt.epoch.is_some());
        if is_of_task || PodNote::carried(pod).is_some_and(|note| note.ended.is_some()) {
            return None;
        }
        let PodPolicy { name, spec, .. } = self.chosen(pod)?;
        let (began_ms, ended_ms) = pod.container(&select::container_name(spec.as_ref(), pod))?.ran_ms?;
        let deadline = self.deadline(pod, began_ms).0?;
        Some((name, DeadlineResult::new(deadline, ended_ms, pod.succeeded)))
    }

    /// The policy that applies to the pod, or will apply when it runs.
    fn chosen(&self, pod: &PodFacts) -> Option<PodPolicy<'_>> {
        if self.off || self.given_back.contains(&pod.uid) {
            return None;
        }
        let from = self.policies.range((pod.namespace.clone(), String::new())..);
        let of_namespace = from.take_while(|((namespace, _), _)| *namespace == pod.namespace);
        if let Some(policy) = select::choose(of_namespace.map(|(_, policy)| policy), pod) {
            return Some(PodPolicy { name: policy.name.clone(), spec: Cow::Borrowed(&policy.spec), watch_only: false });
        }
        let by_job = |job: select::JobShare| PodPolicy {
            name: job.name,
            spec: Cow::Owned(job.spec),
            watch_only: job.watch_only,
        };
        if let Some(job) = select::by_job(pod) {
            return Some(by_job(job));
        }
        if self.namespaces.get(&pod.namespace).is_some_and(|labels| select::by_namespace(labels, pod)) {
            return Some(PodPolicy { name: String::new(), spec: Cow::Owned(label_policy()), watch_only: false });
        }
        select::by_tfjob(pod).map(by_job)
    }

    /// What the node agent gets about the pod, if a policy selects it.
    fn entry(&self, uid: &PodUid) -> Option<PodOnNode> {
        let pod = self.pods.get(uid).filter(|pod| pod.running)?;
        let node = pod.node.as_ref()?;
        let PodPolicy { name, spec, watch_only } = self.chosen(pod)?;
        let spec = spec.as_ref();
        let watched = watch_only.then(|| ResizeObstacle::watched(&name));
        let container = select::container_name(spec, pod);
        let obstacle = pod.blocked(&container).or_else(|| self.forged.contains(uid).then(forged_originals));
        // Only a pod that may be resized has an obstacle.
        let blocked = if name == SCALED_POLICY { obstacle.or(watched) } else { watched.or(obstacle) };
        let facts = pod.container(&container);
        let now = facts.map(|c| c.resources).unwrap_or_default();
        let originals = pod.originals().filter(|_| !self.forged.contains(uid));
        let original = originals
            .and_then(|originals| originals.containers.get(&container).map(|written| written.resources()))
            .unwrap_or(now);
        let ranges = self.ranges.get(&pod.namespace).into_iter().flat_map(BTreeMap::values);
        let started_ms = facts.and_then(|c| c.started_ms);
        let (deadline, deadline_error) = started_ms.map(|ms| self.deadline(pod, ms)).unwrap_or_default();
        Some(PodOnNode {
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            policy: name,
            owner: select::owner_name(pod),
            started_ms,
            settings: select::settings(spec, pod),
            original,
            now,
            class: pod.class,
            blocked,
            allowed: bounds::bounds(pod, &container, &original, ranges, self.nodes.get(node)),
            resize: pod.resize.clone(),
            noted: digest(&pod.notes),
            follow: pod.labels.contains_key(JOB_LABEL),
            traffic: !pod.host_network && pod.attempt.as_ref().is_some_and(|attempt| attempt.task.is_some()),
            gpu: pod.notes.get(GPU_ANNOTATION).is_some_and(|value| value == "enabled"),
            command: facts.map(|c| c.command.clone()).unwrap_or_default(),
            container,
            deadline,
            deadline_error: deadline_error.map(|error| error.to_string()),
            room_milli: 0,
            earlier_steps: Vec::new(),
        })
    }
}

/// Whether the annotation of original resources of a pod's new version was not written by the
/// operator: it must be what the pod had when the annotation appeared, and it must not change after
/// that.
fn is_forged(known: &PodFacts, now: &PodFacts, was_forged: bool) -> bool {
    match (known.notes.get(ORIGINAL_ANNOTATION), now.notes.get(ORIGINAL_ANNOTATION)) {
        (_, None) => false,
        (Some(before), Some(after)) if before == after => was_forged,
        (None, Some(_)) => now.originals() != Some(known.remember()),
        (Some(_), Some(_)) => true,
    }
}

fn forged_originals() -> ResizeObstacle {
    ResizeObstacle {
        reason: "ForgedOriginals".to_owned(),
        message: format!("the annotation {ORIGINAL_ANNOTATION} was not written by the operator: remove it"),
    }
}

/// The policy that applies to a pod.
struct PodPolicy<'a> {
    /// The policy's name (empty: the namespace's label), or the training job's.
    name: String,
    spec: Cow<'a, SharePolicySpec>,
    /// The pod is measured, and keeps its resources.
    watch_only: bool,
}

/// A number that tells notes apart.
fn digest(notes: &BTreeMap<String, String>) -> u64 {
    let mut hasher = DefaultHasher::new();
    notes.hash(&mut hasher);
    hasher.finish()
}

/// Namespaces and names of objects that are known but no longer alive.
fn missing<T>(
    known: &BTreeMap<String, BTreeMap<String, T>>,
    alive: &BTreeSet<(String, String)>,
) -> Vec<(String, String)> {
    let pairs =
        known.iter().flat_map(|(namespace, names)| names.keys().map(move |name| (namespace.clone(), name.clone())));
    pairs.filter(|pair| !alive.contains(pair)).collect()
}

/// The policy that a namespace's label stands for: all its pods, all defaults.
fn label_policy() -> SharePolicySpec {
    SharePolicySpec { selector: Some(LabelSelector::default()), ..SharePolicySpec::default() }
}

#[cfg(test)]
#[path = "world_tests.rs"]
mod tests;
