//! The state of one node and its decisions: pods and outcomes in, resizes and reports out. This module has no
//! clock and no network.
//!
//! **How.** The operator's list names the pods that are shared, and the policy of each. Each policy has one
//! [`Decider`] here, which gets a view of the pods of that policy. The node in the view has the cores of the
//! whole machine, and use is measured in parts of the machine. The shares of the plan are applied to the *pool*:
//! what those pods requested together. [`resize`] turns shares into requests and limits. A resize that differs
//! from the pod's present values is sent until the operator reports its outcome.
//!
//! **Retries.** A resize that failed is sent again after a pause that doubles. So is one that was refused,
//! because another pod's decrease may have come too late, or a quota may have room again. Another target that
//! is decided meanwhile is sent at once. A resize that the kubelet defers or calls infeasible is left to the
//! kubelet. If another writer changes a pod's resources after us, the resize is sent again, less and less often.
//!
//! **When to send.** After a pod's start, and after each change to it, its kubelet acts on the next change
//! only after it has read the state of the container runtime once more, which it does every second. So the
//! resizes of a plan are computed and sent when the kubelet is ready for all pods ([`PodJob::kubelet_ready_at`]):
//! they then take effect at once. Jobs are measured and judged from their first moment on.
//!
//! **After a start.** A node agent keeps nothing on disk, so a new one has measured no growth yet, and its first
//! decisions would give all pods equal shares again. Pods that were resized before keep their resources until
//! growth has been measured, or for [`HOLD_INTERVALS`] intervals.

use super::cgroups::{NodeQuota, PodGroups, is_in_force};
use super::finish;
use super::gpu::Gpus;
use super::inside::{NodeCpu, Teams};
use super::job::{Moment, PodJob, PolicyKey, THIS_NODE, policy_key};
use super::record::{JobDecision, RecordError};
use super::traffic::HostProcesses;
use super::volumes::Volumes;
use gainshare_core::backoff::Backoff;
use gainshare_core::check::CheckedPlan;
use gainshare_core::decider::{Decider, Decision, Outcome as DecisionOutcome, Rejection};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::plan::{Plan, Reason, Verdict};
use gainshare_core::policy::{Policy, ScaleRule, ShareRule};
use gainshare_core::view::{JobView, NodeView, View};
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::resize::{self, Resources};
use gainshare_kube_api::wire::{
    FinishedPod, JobReport, NodeTotals, Outcome, OutcomeState, PodOnNode, Resize, ResizeState, Settings,
};
use gainshare_limits::Capacity;
use gainshare_limits::usage::NodeResources;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How many intervals a pod that was resized before the agent's start keeps its resources. FlowCon measures
/// growth after one interval, and accepts that it has ended after another one.
const HOLD_INTERVALS: u64 = 3;

/// The longest time for which a plan waits until the kubelet is ready for all of its pods.
const MAX_READY_WAIT: Span = Span::from_secs(4);

/// The pods that have left the list of which the operator is informed.
const MOST_FINISHED: usize = 16;

/// The time between two searches for control groups that are missing.
const SEARCH_PACE: Span = Span::from_secs(1);

/// The pauses after a resize that failed or was undone by another writer. The first is short: most often the
/// kubelet has written the pod's status at the same moment, and the next try succeeds.
const RETRIES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(300));

/// New values of a pod need some time from the API server to the agent. Within this time, other values are not
/// taken as a change by another writer.
const SETTLING: Span = Span::from_secs(10);

/// A new share takes effect seconds after it was decided: the kubelet must be ready for it ([`MAX_READY_WAIT`]), the
/// operator writes it, and the kubelet puts it in force within a second. Deadlines are planned with this much to spare.
const EFFECT_RESERVE: Span = Span::from_secs(6);

/// After this time the agent stops checking whether a resize has taken effect.
const EFFECT_TIMEOUT: Span = Span::from_secs(60);

/// See the module documentation.
pub(crate) struct Node {
    logs: PathBuf,
    volumes: Volumes,
    groups: PodGroups,
    processes: HostProcesses,
    machine: Capacity,
    whole: NodeResources,
    /// Where the node is a part of its machine.
    quota: Option<NodeQuota>,
    jobs: BTreeMap<PodUid, PodJob>,
    next_id: u64,
    policies: BTreeMap<PolicyKey, PolicyState>,
    requests: BTreeMap<PodUid, ResizeRequest>,
    generation: u64,
    next_search: Time,
    /// Pods that have left the list, the newest last.
    finished: VecDeque<FinishedPod>,
    started_at: Time,
    /// The machine's idle time at the last step, and when that was.
    idle_before: Option<(Time, f64)>,
    /// Whether the node had no CPU to spare at the last step.
    is_scarce: bool,
    teams: Teams,
    gpus: Gpus,
    scratch: Box<[u8; 16 * 1024]>,
}

/// The decisions of one policy.
struct PolicyState {
    policy: Policy,
    decider: Decider,
    /// Until when pods keep the resources that they had at the agent's start.
    hold_until: Option<Time>,
    /// The newest decision that was not turned into resizes yet, and since when there has been such a decision.
    planned: Option<(Time, Arc<Decision>)>,
    /// The last decision, with what is needed to make its plan again.
    last: Option<Arc<Decision>>,
    forecasts: finish::Forecasts,
}

/// A resize of one pod, from the decision to its effect.
struct ResizeRequest {
    resize: Resize,
    decided_at: Time,
    state: RequestState,
    retries: Backoff,
    /// The share that it gives to the pod.
    share: f64,
    /// The kernel's files have the new values.
    in_force: bool,
}

impl ResizeRequest {
    /// The request is sent again after a pause, which is longer each time.
    fn retry(&mut self, now: Time) {
        let pause = Span(u64::try_from(self.retries.next_pause().as_micros()).unwrap_or(u64::MAX));
        self.state = RequestState::RetryAt(now + pause);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestState {
    /// Sent with every exchange until its outcome arrives.
    Pending,
    /// Sent again at this time.
    RetryAt(Time),
    /// The API server accepted it at this time.
    AcceptedAt(Time),
}

/// The results of one step, for metrics.
#[derive(Debug, Default)]
pub(crate) struct StepReport {
    pub(crate) reports: u64,
    pub(crate) refused_reports: u64,
    pub(crate) plans: u64,
    pub(crate) plans_rejected: u64,
    /// Seconds from a decision to the kernel's files.
    pub(crate) effects_s: Vec<f64>,
    /// Some job has printed more than one step reads.
    pub(crate) more: bool,
    /// There is a change that should be sent to the operator at once.
    pub(crate) is_urgent: bool,
}

impl Node {
    pub(crate) fn new(
        logs: &Path,
        volumes: Volumes,
        groups: PodGroups,
        processes: HostProcesses,
        machine: Capacity,
        now: Moment,
    ) -> Node {
        Node {
            logs: logs.to_owned(),
            volumes,
            groups,
            processes,
            machine,
            whole: NodeResources {
                capacity: machine,
                block_bytes_s: NodeResources::BLOCK_BYTES_S,
                net_bytes_s: NodeResources::NET_BYTES_S,
            },
            quota: None,
            jobs: BTreeMap::new(),
            next_id: 0,
            policies: BTreeMap::new(),
            requests: BTreeMap::new(),
            generation: 0,
            next_search: Time::ZERO,
            finished: VecDeque::new(),
            started_at: now.time,
            idle_before: None,
            is_scarce: true,
            teams: Teams::default(),
            gpus: Gpus::default(),
            scratch: Box::new([0; 16 * 1024]),
        }
    }

    /// The threads of pods with the library inside follow their shares.
    pub(crate) fn with_teams(self, teams: Teams) -> Node {
        Node { teams, ..self }
    }

    /// Replaces the list of pods by the operator's: all pods of this node that are shared.
    pub(crate) fn set_pods(&mut self, now: Moment, pods: Vec<PodOnNode>) {
        let listed: BTreeSet<PodUid> = pods.iter().map(|p| p.uid.clone()).collect();
        for job in self.jobs.values_mut().filter(|job| !listed.contains(&job.pod.uid)) {
            // What the job printed last has not been read yet.
            job.read_reports(now, &self.volumes);
            if let Some(finished) = job.finished() {
                self.finished.push_back(finished);
            }
        }
        let surplus = self.finished.len().saturating_sub(MOST_FINISHED);
        self.finished.drain(..surplus);
        self.jobs.retain(|uid, _| listed.contains(uid));
        self.requests.retain(|uid, _| listed.contains(uid));
        for pod in pods {
            match self.jobs.get_mut(&pod.uid) {
                Some(job) => job.update(pod, &self.logs, now),
                None => {
                    self.next_id += 1;
                    let job = PodJob::new(JobId(self.next_id), pod, &self.logs, now);
                    self.jobs.insert(job.pod.uid.clone(), job);
                    self.next_search = Time::ZERO;
                }
            }
        }
        self.update_policies(now);
        self.detect_foreign_changes(now.time);
    }

    fn update_policies(&mut self, now: Moment) {
        let mut present: BTreeMap<PolicyKey, (Policy, bool)> = BTreeMap::new();
        for job in self.jobs.values().filter(|j| j.takes_part()) {
            let resized = job.pod.now != job.pod.original;
            let entry = present.entry(policy_key(job)).or_insert_with(|| (policy_of(&job.pod.settings), false));
            // The pods of TrainingJobs share by deadlines as soon as one of them has a deadline.
            if job.pod.settings.policy.keeps_deadlines() {
                entry.0 = policy_of(&job.pod.settings);
            }
            entry.1 |= resized;
        }
        self.policies.retain(|key, _| present.contains_key(key));
        // Only the first list can contain pods that an earlier agent has resized.
        let is_first = now.time.since(self.started_at) < SETTLING || self.generation == 0;
        for (key, (policy, resized)) in present {
            let is_unchanged = self.policies.get(&key).is_some_and(|state| state.policy == policy);
            if !is_unchanged {
                let hold_until = (is_first && resized).then(|| now.time + hold_time(&policy));
                let (decider, forecasts) = (Decider::new(policy.clone()), finish::Forecasts::default());
                let state = PolicyState { policy, decider, hold_until, planned: None, last: None, forecasts };
                self.policies.insert(key, state);
            }
        }
    }

    /// Finds pods that another writer has changed: the API server accepted our values some time ago, and the pod
    /// has other values now.
    fn detect_foreign_changes(&mut self, now: Time) {
        for (uid, request) in &mut self.requests {
            let Some(job) = self.jobs.get(uid) else { continue };
            let RequestState::AcceptedAt(at) = request.state else { continue };
            let infeasible = matches!(job.pod.resize, ResizeState::Infeasible { .. });
            if !infeasible && now.since(at) > SETTLING && request.resize.to.over(job.pod.now) != job.pod.now {
                request.retry(now);
                tracing::warn!(pod = %name(job), "another writer has changed its resources: resizing it again, less often each time");
            }
        }
    }

    /// Records the outcomes of resizes.
    pub(crate) fn record_outcomes(&mut self, now: Time, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let Some(request) = self.requests.get_mut(&outcome.uid) else { continue };
            if request.resize.generation != outcome.generation {
                continue;
            }
            match &outcome.state {
                OutcomeState::Done => request.state = RequestState::AcceptedAt(now),
                OutcomeState::Unchanged => {
                    request.in_force = true;
                    if let Some(job) = self.jobs.get_mut(&outcome.uid) {
                        job.share_in_force = Some(request.share);
                    }
                    request.state = RequestState::AcceptedAt(now);
                }
                OutcomeState::Refused { why } => {
                    tracing::warn!(uid = outcome.uid.as_str(), "a resize was refused: {why}");
                    request.retry(now);
                }
                OutcomeState::Failed { why } => {
                    tracing::info!(uid = outcome.uid.as_str(), "a resize failed, trying again: {why}");
                    request.retry(now);
                }
            }
        }
    }

    /// Reads logs and counters, decides if anything is due, and writes the pages. `idle_s` is the unused CPU time of
    /// the machine, as `gainshare_limits::machine::idle_s` reads it.
    pub(crate) fn step(&mut self, now: Moment, idle_s: Option<f64>) -> StepReport {
        let mut step = StepReport::default();
        self.find_groups(now.time);
        for job in self.jobs.values_mut() {
            let read = job.read_reports(now, &self.volumes);
            step.reports += read.reports;
            step.refused_reports += read.refused;
            step.more |= read.more;
            // Jobs that take part in decisions are measured there.
            if job.pod.follow && !job.takes_part() {
                job.measure(now.time, &self.whole, &mut self.scratch);
            }
        }
        self.measure_traffic(now.time);
        self.decide(now, idle_s, &mut step);
        self.check_effects(now.time, &mut step);
        let of_policies = &self.policies;
        let policy = |job: &PodJob| match of_policies.get(&policy_key(job)) {
            Some(state) => state.policy.clone(),
            None => policy_of(&job.pod.settings),
        };
        step.plans_rejected += self.gpus.step(now, self.teams.pods(), &mut self.jobs, policy);
        let cpu = NodeCpu { cores: self.whole.capacity.cores, is_scarce: self.is_scarce };
        self.teams.step(now.time, &mut self.jobs, cpu, self.generation);
        for request in self.requests.values_mut() {
            if matches!(request.state, RequestState::RetryAt(at) if now.time >= at) {
                request.state = RequestState::Pending;
                step.is_urgent = true;
            }
        }
        step
    }

    /// The last decision about a pod, and the pod's number in it.
    pub(crate) fn last_decision(&self, uid: &PodUid) -> Result<JobDecision, RecordError> {
        let job = self.jobs.get(uid).ok_or_else(|| RecordError::NotShared { uid: uid.clone() })?;
        if let Some(blocked) = &job.pod.blocked {
            return Err(RecordError::Blocked { pod: name(job), why: blocked.message.clone() });
        }
        let last = self.policies.get(&policy_key(job)).and_then(|state| state.last.clone());
        let about_job = last.filter(|decision| decision.plan.verdicts.contains_key(&job.id));
        let decision = about_job.ok_or_else(|| RecordError::Undecided { pod: name(job) })?;
        Ok(JobDecision { job: job.id, decision })
    }

    /// When `step` must be called again, if no job prints anything.
    pub(crate) fn due(&self) -> Option<Time> {
        let decisions = self.policies.values().filter_map(|s| s.decider.due());
        let planned = self.policies.iter().filter_map(|(key, state)| {
            let members = self.jobs.values().filter(|j| j.takes_part() && policy_key(j) == *key);
            Some(ready_at(state.planned.as_ref()?.0, members))
        });
        let retries = self.requests.values().filter_map(|request| match request.state {
            RequestState::RetryAt(at) => Some(at),
            _ => None,
        });
        decisions.chain(planned).chain(retries).min()
    }

    /// Measures what the tasks of distributed jobs send and receive.
    fn measure_traffic(&mut self, now: Time) {
        let is_lost = |job: &&PodJob| job.is_measured() && job.traffic.is_lost();
        let lost: BTreeSet<&str> = self.jobs.values().filter(is_lost).map(|job| job.pod.uid.as_str()).collect();
        for (uid, pid) in self.processes.find(now, &lost) {
            if let Some(job) = self.jobs.get_mut(&uid) {
                job.traffic.set_process(pid);
            }
        }
        for (uid, job) in self.jobs.iter_mut().filter(|(_, job)| job.is_measured()) {
            job.traffic.measure(now, &self.processes, uid);
        }
    }

    fn find_groups(&mut self, now: Time) {
        let missing: BTreeSet<&str> = self
            .jobs
            .values()
            .filter(|j| j.group.is_none() && (j.takes_part() || j.pod.follow))
            .map(|j| j.pod.uid.as_str())
            .collect();
        if missing.is_empty() || now < self.next_search {
            return;
        }
        self.next_search = now + SEARCH_PACE;
        for (uid, group) in self.groups.find(&missing) {
            self.whole.capacity.cores = self.groups.cores_above(&group, self.machine.cores);
            let quota = self.groups.quota_above(&group);
            let is_known = self.quota.as_ref().zip(quota.as_ref()).is_some_and(|(a, b)| a.is_of_same_group(b));
            if !is_known {
                self.quota = quota;
            }
            if let Some(job) = self.jobs.get_mut(&uid) {
                job.group = Some(group);
            }
        }
    }

    /// Each policy measures its pods, decides if a decision is due, and requests resizes when its pods are ready.
    fn decide(&mut self, moment: Moment, idle_s: Option<f64>, step: &mut StepReport) {
        if self.policies.is_empty() {
            return;
        }
        let now = moment.time;
        self.measure_scarcity(now, idle_s);
        let node = self.view(idle_s);
        let starting: BTreeSet<JobId> =
            self.jobs.values().filter(|job| job.is_starting(now)).map(|job| job.id).collect();
        for (key, state) in &mut self.policies {
            let mut members: Vec<&mut PodJob> =
                self.jobs.values_mut().filter(|j| j.takes_part() && policy_key(j) == *key).collect();
            // A policy decides when the history of each of its jobs has been read. Other policies do not wait for it.
            if members.iter().any(|job| job.reads_history()) {
                continue;
            }
            members.sort_by_key(|j| j.id);
            for job in &mut members {
                job.measure(now, &self.whole, &mut self.scratch);
                let is_disturbed = starting.iter().any(|id| *id != job.id);
                finish::measure_pace(job, now, self.whole.capacity.cores, self.is_scarce, is_disturbed);
            }
            match state.decide(moment, &node, self.is_scarce, &mut members, step) {
                DecisionOutcome::NotDue => {}
                DecisionOutcome::Rejected(rejection) => {
                    // The limits in force were sound when they were set: they stay.
                    log_rejection(&key.1, &rejection);
                    step.plans_rejected += 1;
                    continue;
                }
                DecisionOutcome::Decision(decision) => {
                    trace_decision(&key.1, &decision);
                    step.is_urgent |= state.keep(now, decision, &mut members);
                }
            }
            for job in &mut members {
                step.is_urgent |= finish::predict(job, moment, &state.forecasts);
            }
            if let Some(decision) = state.take_ready(now, &members) {
                self.generation += 1;
                step.is_urgent |= publish_verdicts(&mut members);
                step.is_urgent |= carry_out(&mut self.requests, &mut members, &decision.plan, self.generation, now);
            }
        }
    }

    /// Finds out whether the node has CPU to spare.
    fn measure_scarcity(&mut self, now: Time, idle_s: Option<f64>) {
        let used_cores: f64 = self.jobs.values().filter_map(|job| job.meter.cores()).sum();
        let cores = self.whole.capacity.cores;
        // The kubelet and pods that are not shared use up the quota of a node, too.
        let is_used_up = self.quota.as_mut().is_some_and(|quota| quota.is_used_up(now));
        self.is_scarce = finish::is_scarce(&mut self.idle_before, now, idle_s, used_cores, cores) || is_used_up;
    }

    /// The node as policies see it.
    fn view(&self, idle_s: Option<f64>) -> NodeView {
        NodeView {
            id: THIS_NODE,
            cores: self.whole.capacity.cores,
            speed: 1.0,
            memory_bytes: self.whole.capacity.memory_bytes,
            slots: None,
            idle_node_s: idle_s,
        }
    }

    /// Finds resizes that the kubelet has put in force.
    fn check_effects(&mut self, now: Time, step: &mut StepReport) {
        for (uid, request) in &mut self.requests {
            let Some(job) = self.jobs.get_mut(uid) else { continue };
            let Some(group) = &job.group else { continue };
            if request.in_force || now.since(request.decided_at) > EFFECT_TIMEOUT {
                continue;
            }
            let Some(request_milli) = request.resize.to.requests.cpu_milli else { continue };
            if is_in_force(group, request_milli, request.resize.to.over(job.pod.now).limits.cpu_milli) {
                request.in_force = true;
                job.share_in_force = Some(request.share);
                step.effects_s.push(now.since(request.decided_at).as_secs_f64());
            }
        }
    }

    /// Whether the operator needs the progress of any job within seconds.
    pub(crate) fn has_followed_jobs(&self) -> bool {
        self.jobs.values().any(|job| job.pod.follow)
    }

    /// Whether the operator decides about the resources of any pod here, and so needs its use within seconds.
    pub(crate) fn has_scaled_jobs(&self) -> bool {
        self.jobs.values().any(|job| job.pod.is_scaled())
    }

    /// Whether a resize is about to take effect, so that steps should follow each other quickly.
    pub(crate) fn awaits_effect(&self, now: Time) -> bool {
        let recent = |request: &ResizeRequest| !request.in_force && now.since(request.decided_at) < SETTLING;
        self.requests.values().any(|request| {
            matches!(request.state, RequestState::Pending | RequestState::AcceptedAt(_)) && recent(request)
        })
    }

    pub(crate) fn beat(&self) -> NodeTotals {
        let mut beat = NodeTotals {
            cores: self.whole.capacity.cores,
            memory_bytes: self.whole.capacity.memory_bytes,
            ..NodeTotals::default()
        };
        for job in self.jobs.values() {
            beat.cpu_used_cores += job.meter.cores().unwrap_or(0.0);
            beat.memory_used_bytes = beat.memory_used_bytes.saturating_add(job.meter.memory_bytes().unwrap_or(0));
            match job.state().category {
                gainshare_kube_api::wire::ReportedCategory::Growing => beat.growing += 1,
                gainshare_kube_api::wire::ReportedCategory::Watching => beat.watching += 1,
                gainshare_kube_api::wire::ReportedCategory::Converged => beat.converged += 1,
            }
        }
        beat
    }

    pub(crate) fn states(&self) -> Vec<JobReport> {
        self.jobs.values().map(PodJob::state).collect()
    }

    /// The last few pods that have left the list.
    pub(crate) fn finished(&self) -> Vec<FinishedPod> {
        self.finished.iter().cloned().collect()
    }

    /// The resizes whose outcome is not known yet.
    pub(crate) fn resizes(&self) -> Vec<Resize> {
        let pending = self.requests.iter().filter(|(_, request)| request.state == RequestState::Pending);
        let mut resizes: Vec<Resize> = pending.map(|(_, request)| request.resize.clone()).collect();
        // Decreases first, so that the requests on the node never exceed it.
        resizes.sort_by_key(|r| self.jobs.get(&r.uid).is_some_and(|j| resize::is_up(&j.pod.now, &r.to)));
        resizes
    }

    pub(crate) fn dropped_lines(&self) -> u64 {
        self.jobs.values().map(PodJob::dropped).sum()
    }
}

impl PolicyState {
    /// Decides about the pods of this policy if a decision is due, and brings their forecasts up to date.
    fn decide(
        &mut self,
        moment: Moment,
        node: &NodeView,
        is_scarce: bool,
        members: &mut [&mut PodJob],
        step: &mut StepReport,
    ) -> DecisionOutcome {
        let now = moment.time;
        let view_of = |job: &PodJob| {
            let view = job.view(moment);
            JobView { signal: self.forecasts.on_this_node(view.signal), ..view }
        };
        let view = View { now, nodes: vec![node.clone()], jobs: members.iter().map(|job| view_of(job)).collect() };
        let to_forecast = self.forecasts.is_due(now).then(|| view.clone());
        let outcome = self.decider.decide_recorded(view);
        if let Some(view) = to_forecast {
            self.forecasts.update(&self.decider, &view, is_scarce);
        }
        if outcome != DecisionOutcome::NotDue {
            step.plans += 1;
            members.iter_mut().for_each(|job| job.usable = self.decider.usable(job.id));
        }
        outcome
    }

    /// Keeps a decision until its pods are ready for it. While pods keep the resources of the agent's start, only the
    /// verdicts are published; `true` if one puts its pod into another category.
    fn keep(&mut self, now: Time, decision: Decision, members: &mut [&mut PodJob]) -> bool {
        let decision = Arc::new(decision);
        self.last = Some(decision.clone());
        for job in members.iter_mut() {
            job.verdict = decision.plan.verdicts.get(&job.id).cloned();
        }
        if self.is_holding(now, &decision.plan) {
            return publish_verdicts(members);
        }
        let since = self.planned.as_ref().map_or(now, |(since, _)| *since);
        self.planned = Some((since, decision));
        false
    }

    /// The decision that waits, once its pods are ready for it.
    fn take_ready(&mut self, now: Time, members: &[&mut PodJob]) -> Option<Arc<Decision>> {
        let is_ready = |since: Time| now >= ready_at(since, members.iter().map(|job| &**job));
        self.planned.take_if(|(since, _)| is_ready(*since)).map(|(_, decision)| decision)
    }

    /// Whether pods still keep the resources that they had at the agent's start.
    fn is_holding(&mut self, now: Time, plan: &Plan) -> bool {
        let Some(until) = self.hold_until else { return false };
        let unsure = |reason| matches!(reason, Reason::NotYetMeasured | Reason::Watching { .. });
        if now < until && plan.verdicts.values().any(|v| unsure(v.reason)) {
            return true;
        }
        self.hold_until = None;
        false
    }
}

fn log_rejection(policy: &str, rejection: &Rejection) {
    let record = rejection.record.as_ref().and_then(|record| gainshare_record::to_json(record).ok());
    let list = rejection.reasons();
    tracing::error!(policy, record, "a plan failed its check and is not carried out: {list}");
}

fn trace_decision(policy: &str, decision: &Decision) {
    if tracing::enabled!(tracing::Level::TRACE) {
        let record = decision.record().and_then(|record| gainshare_record::to_json(&record).ok());
        tracing::trace!(policy, record, "decision");
    }
}

/// Publishes the latest verdicts; `true` if one puts its pod into another category.
fn publish_verdicts(members: &mut [&mut PodJob]) -> bool {
    members.iter_mut().fold(false, |has_changed, job| has_changed | job.publish_verdict())
}

/// Requests the resizes of a plan; `true` if there are any. A pod that is not resized has its share already.
fn carry_out(
    requests: &mut BTreeMap<PodUid, ResizeRequest>,
    members: &mut [&mut PodJob],
    plan: &CheckedPlan,
    generation: u64,
    now: Time,
) -> bool {
    let shared: Vec<&PodJob> = members.iter().map(|job| &**job).collect();
    let resized = request_resizes(requests, &shared, plan, generation, now);
    for job in members.iter_mut().filter(|job| !resized.contains(&job.id)) {
        let is_settled = requests.get(&job.pod.uid).is_none_or(|request| request.in_force);
        let share = plan.target(job.id).map(|target| target.share.cpu.get());
        job.share_in_force = share.filter(|_| is_settled).or(job.share_in_force);
    }
    !resized.is_empty()
}

/// When a plan that was made at `since` is turned into resizes.
fn ready_at<'j>(since: Time, members: impl Iterator<Item = &'j PodJob>) -> Time {
    let last = members.map(PodJob::kubelet_ready_at).max().unwrap_or(since);
    last.clamp(since, since + MAX_READY_WAIT)
}

/// Turns a plan into resizes of the policy's pods; the jobs for which there is a new one.
fn request_resizes(
    requests: &mut BTreeMap<PodUid, ResizeRequest>,
    members: &[&PodJob],
    plan: &CheckedPlan,
    generation: u64,
    now: Time,
) -> BTreeSet<JobId> {
    // A resize whose outcome is not known, or that was accepted a moment ago, counts as done: the operator's list
    // may not show it yet.
    let expected = |job: &PodJob| match requests.get(&job.pod.uid) {
        Some(ResizeRequest { state: RequestState::Pending, resize, .. }) => resize.to.over(job.pod.now),
        Some(ResizeRequest { state: RequestState::AcceptedAt(at), resize, .. }) if now.since(*at) < SETTLING => {
            resize.to.over(job.pod.now)
        }
        _ => job.pod.now,
    };
    let pods: Vec<PodOnNode> = members.iter().map(|j| PodOnNode { now: expected(j), ..j.pod.clone() }).collect();
    let share = |job: &PodJob| plan.target(job.id).map_or(0.0, |t| t.share.cpu.get());
    let shares: Vec<(&PodOnNode, f64)> = pods.iter().zip(members).map(|(pod, job)| (pod, share(job))).collect();
    // Only a deadline that is promised, or planned for, lets pods grow beyond what they requested together.
    let is_planned =
        |v: &Verdict| matches!(v.reason, Reason::MeetsDeadline { .. } | Reason::Early { .. } | Reason::Probes { .. });
    let has_planned = members.iter().any(|job| job.verdict.as_ref().is_some_and(is_planned));
    let room_milli = pods.iter().map(|pod| pod.room_milli).max().filter(|_| has_planned).unwrap_or(0);
    let mut changes: BTreeMap<usize, Resources> = resize::changes(&shares, room_milli).into_iter().collect();
    for (i, (pod, job)) in pods.iter().zip(members).enumerate() {
        let memory = job.meter.memory_bytes().and_then(|used| resize::memory_request(pod, used));
        let mut grown = Resources::default();
        grown.requests.memory_bytes = memory;
        if resize::is_worthwhile(&pod.now, &grown) {
            changes.entry(i).or_default().requests.memory_bytes = memory;
        }
    }
    let mut resized = BTreeSet::new();
    for (i, to) in changes {
        let (uid, container) = (pods[i].uid.clone(), pods[i].container.clone());
        // A resize that was refused or failed is not sent again before its pause is over.
        let is_waiting = |request: &ResizeRequest| {
            matches!(request.state, RequestState::RetryAt(_)) && !resize::is_worthwhile(&request.resize.to, &to)
        };
        if requests.get(&uid).is_some_and(is_waiting) {
            continue;
        }
        if let Some(cpu_milli) = to.requests.cpu_milli {
            let reason = members[i].verdict.as_ref().map(|v| v.reason.to_string()).unwrap_or_default();
            tracing::info!(pod = %name(members[i]), %uid, cpu_milli, reason, "requesting a resize");
        }
        let resize = Resize { uid: uid.clone(), container, generation, to };
        let (state, retries, share) = (RequestState::Pending, RETRIES, share(members[i]));
        requests.insert(uid, ResizeRequest { resize, decided_at: now, state, retries, share, in_force: false });
        resized.insert(members[i].id);
    }
    resized
}

fn hold_time(policy: &Policy) -> Span {
    match policy.share {
        ShareRule::Flowcon(f) => Span(f.interval.0.saturating_mul(HOLD_INTERVALS)),
        // This rule measures a new job within a few seconds.
        ShareRule::Gain(_) => Span::from_secs(10),
        _ => Span::ZERO,
    }
}

fn name(job: &PodJob) -> String {
    format!("{}/{}", job.pod.namespace, job.pod.name)
}

/// The core's policy for a SharePolicy. The API server refuses numbers out of bounds; should one arrive all the
/// same, the default policy is used.
fn policy_of(settings: &Settings) -> Policy {
    let defaults = Policy { moves: Policy::equal().moves, ..Policy::from(settings.policy.preset()) };
    let mut policy = defaults.clone();
    if let ShareRule::Flowcon(rule) = &mut policy.share {
        rule.alpha = settings.alpha.unwrap_or(rule.alpha);
        rule.beta = settings.beta.unwrap_or(rule.beta);
        rule.interval = settings.interval_ms.map_or(rule.interval, Span::from_millis);
        rule.longest_interval = rule.longest_interval.max(rule.interval);
    }
    if let Some(aim) = settings.aim {
        // The API server refuses an aim of policies that have none; should one arrive all the same, it is ignored.
        let _ = policy.set_aim(aim.into());
    }
    if let ScaleRule::Deadline(rule) = &mut policy.scale {
        rule.reserve = EFFECT_RESERVE;
    }
    match policy.validate() {
        Ok(()) => policy,
        Err(error) => {
            tracing::warn!("{error}: the policy's defaults are used instead");
            defaults
        }
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
