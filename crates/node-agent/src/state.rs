//! What the agent knows of its node, and what it decides: pods and answers in, resizes and reports out. No
//! clock and no network in here.
//!
//! **How.** The manager's list says which pods are shared and by which policy. Each policy has one
//! [`Decider`] here, fed with a view of its own pods: to it the *node* is the pool that those pods
//! requested together, so shares are parts of the pool. [`resize`] turns them into requests and limits;
//! what differs from the pod's present values is asked for until the manager says what became of it.
//!
//! **Waiting.** A resize that failed is asked for again after a pause that doubles; so is one that was
//! refused, because another pod's decrease may have come too late or a quota may have room again. Another
//! target that is decided meanwhile goes out at once. What the kubelet defers or calls infeasible is left
//! to it. Where somebody else changes a pod's resources after us, we ask again, more and more seldom.
//!
//! **When to ask.** After a pod's start, and after each change to it, its kubelet acts on the next change
//! only when it has looked at the runtime once more, which it does every second. So what a plan means for
//! the pods is worked out, and asked for, once the kubelet is ready for all of them ([`Job::quiet_at`]):
//! with all that was learnt until then, and in force at once. Jobs are measured and judged from their first
//! moment on.
//!
//! **After a start.** An agent keeps nothing on disk, so a fresh one has measured no growth yet, and its
//! first decisions would give everyone the same again. Pods that were reshaped already keep what they have
//! until it is known who still grows, or for [`HOLD_INTERVALS`] intervals.

use super::cgroups::{PodGroups, is_in_force};
use super::job::{HERE, Job, Now};
use super::record::{JobDecision, RecordError};
use super::volumes::Volumes;
use gainshare_core::check::CheckedPlan;
use gainshare_core::decider::{self, Decider, Decision};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::plan::{Plan, Reason};
use gainshare_core::policy::{MoveRule, Policy, Preset, ShareRule};
use gainshare_core::view::{NodeView, View};
use gainshare_kube_api::resize::{self, Resources};
use gainshare_kube_api::wire::{
    Beat, JobState, Outcome, OutcomeState, PodOnNode, PolicyKind, Resize, ResizeState, Settings,
};
use gainshare_limits::Capacity;
use gainshare_limits::usage::NodeResources;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many intervals a pod that was reshaped before our start keeps what it has: FlowCon measures growth
/// after one, and believes that it has ended after another.
const HOLD_INTERVALS: u64 = 3;

/// A plan waits no longer than this for kubelets that always have something else to do for one of its pods.
const LONGEST_QUIET_WAIT: Span = Span::from_secs(4);

/// Between two searches for groups that are missing.
const SEARCH_PACE: Span = Span::from_secs(1);

/// The first pause after a resize that did not work, or was undone by somebody; doubled each time. Most
/// often the kubelet has written the pod's status in the same moment, and the next try succeeds.
const FIRST_PAUSE: Span = Span::from_millis(100);
const LONGEST_PAUSE: Span = Span::from_secs(300);

/// A pod's new values take a moment from the API server to us. Within it they are not taken for somebody else's.
const SETTLING: Span = Span::from_secs(10);

/// After this the agent no longer waits to see a resize take effect.
const EFFECT_PATIENCE: Span = Span::from_secs(60);

/// A policy's name is unique in its namespace; an empty name stands for the namespace's label.
type PolicyKey = (String, String);

/// See the module documentation.
pub(crate) struct Node {
    logs: PathBuf,
    volumes: Volumes,
    groups: PodGroups,
    machine: Capacity,
    whole: NodeResources,
    jobs: BTreeMap<String, Job>,
    next_id: u64,
    policies: BTreeMap<PolicyKey, Shared>,
    wanted: BTreeMap<String, Wanted>,
    generation: u64,
    next_search: Time,
    began: Time,
    scratch: Box<[u8; 16 * 1024]>,
}

/// The pods of one policy.
struct Shared {
    policy: Policy,
    control: Decider,
    /// Until when pods keep what they had at our start.
    hold_until: Option<Time>,
    /// The newest plan that no resize was made of yet, and since when there has been such a plan.
    planned: Option<(Time, Arc<Decision>)>,
    /// The last decision, with what is needed to make its plan again.
    last: Option<Arc<Decision>>,
}

/// What a pod should have.
struct Wanted {
    resize: Resize,
    decided: Time,
    progress: Asked,
    failures: u32,
    /// Seen in the kernel's files.
    in_force: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// To be sent with every request until answered.
    Pending,
    /// Not before this time.
    Again(Time),
    /// Accepted at this time.
    Done(Time),
}

/// What happened in one step, for metrics.
#[derive(Debug, Default)]
pub(crate) struct Happened {
    pub(crate) reports: u64,
    pub(crate) refused_reports: u64,
    pub(crate) plans: u64,
    pub(crate) bad_plans: u64,
    /// Seconds from a decision to the kernel's files.
    pub(crate) effects_s: Vec<f64>,
    /// Some job has printed more than one look reads.
    pub(crate) more: bool,
    /// Something that the manager should know at once.
    pub(crate) is_urgent: bool,
}

impl Node {
    pub(crate) fn new(logs: &Path, volumes: Volumes, groups: PodGroups, machine: Capacity, now: Now) -> Node {
        Node {
            logs: logs.to_owned(),
            volumes,
            groups,
            machine,
            whole: NodeResources {
                capacity: machine,
                block_bytes_s: NodeResources::BLOCK_BYTES_S,
                net_bytes_s: NodeResources::NET_BYTES_S,
            },
            jobs: BTreeMap::new(),
            next_id: 0,
            policies: BTreeMap::new(),
            wanted: BTreeMap::new(),
            generation: 0,
            next_search: Time::ZERO,
            began: now.time,
            scratch: Box::new([0; 16 * 1024]),
        }
    }

    /// Takes the manager's list: all pods of this node that are shared.
    pub(crate) fn take_pods(&mut self, now: Now, pods: Vec<PodOnNode>) {
        let listed: BTreeSet<String> = pods.iter().map(|p| p.uid.clone()).collect();
        self.jobs.retain(|uid, _| listed.contains(uid));
        self.wanted.retain(|uid, _| listed.contains(uid));
        for pod in pods {
            match self.jobs.get_mut(&pod.uid) {
                Some(job) => job.update(pod, &self.logs, now),
                None => {
                    self.next_id += 1;
                    let job = Job::new(JobId(self.next_id), pod, &self.logs, now);
                    self.jobs.insert(job.pod.uid.clone(), job);
                    self.next_search = Time::ZERO;
                }
            }
        }
        self.sort_into_policies(now);
        self.watch_for_others(now.time);
    }

    fn sort_into_policies(&mut self, now: Now) {
        let mut present: BTreeMap<PolicyKey, (Policy, bool)> = BTreeMap::new();
        for job in self.jobs.values().filter(|j| j.takes_part()) {
            let reshaped = job.pod.now != job.pod.original;
            let entry = present.entry(policy_key(job)).or_insert_with(|| (policy_of(&job.pod.settings), false));
            entry.1 |= reshaped;
        }
        self.policies.retain(|key, _| present.contains_key(key));
        // Only the first list can hold pods that an agent before us has reshaped.
        let is_first = now.time.since(self.began) < SETTLING || self.generation == 0;
        for (key, (policy, reshaped)) in present {
            let known = self.policies.get(&key).is_some_and(|s| s.policy == policy);
            if !known {
                let hold_until = (is_first && reshaped).then(|| now.time + hold_for(&policy));
                let control = Decider::new(policy.clone());
                self.policies.insert(key, Shared { policy, control, hold_until, planned: None, last: None });
            }
        }
    }

    /// A pod whose values are not what we asked for, though the API server accepted them a while ago, was
    /// changed by somebody else.
    fn watch_for_others(&mut self, now: Time) {
        for (uid, wanted) in &mut self.wanted {
            let Some(job) = self.jobs.get(uid) else { continue };
            let Asked::Done(at) = wanted.progress else { continue };
            let infeasible = matches!(job.pod.resize, ResizeState::Infeasible { .. });
            if !infeasible && now.since(at) > SETTLING && wanted.resize.to.over(job.pod.now) != job.pod.now {
                wanted.progress = Asked::Again(now + pause(wanted.failures));
                wanted.failures += 1;
                tracing::warn!(pod = %name(job), "something else has changed its resources: asking for ours again, later each time");
            }
        }
    }

    /// Takes what became of resizes.
    pub(crate) fn take_outcomes(&mut self, now: Time, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let Some(wanted) = self.wanted.get_mut(&outcome.uid) else { continue };
            if wanted.resize.generation != outcome.generation {
                continue;
            }
            wanted.progress = match &outcome.state {
                OutcomeState::Done => Asked::Done(now),
                OutcomeState::Unchanged => {
                    wanted.in_force = true;
                    Asked::Done(now)
                }
                OutcomeState::Refused { why } => {
                    tracing::warn!(uid = outcome.uid, "a resize was refused: {why}");
                    let again = now + pause(wanted.failures);
                    wanted.failures += 1;
                    Asked::Again(again)
                }
                OutcomeState::Failed { why } => {
                    tracing::info!(uid = outcome.uid, "a resize did not work, trying again: {why}");
                    let again = now + pause(wanted.failures);
                    wanted.failures += 1;
                    Asked::Again(again)
                }
            };
        }
    }

    /// Reads logs and counters, and decides if anything is due. `idle_s` is the unused CPU time of the machine, as
    /// `gainshare_limits::machine::idle_s` reads it.
    pub(crate) fn step(&mut self, now: Now, idle_s: Option<f64>) -> Happened {
        let mut happened = Happened::default();
        self.find_groups(now.time);
        for job in self.jobs.values_mut() {
            let looked = job.look(now, &self.volumes);
            happened.reports += looked.reports;
            happened.refused_reports += looked.refused;
            happened.more |= looked.more;
            // The others are measured when they are decided about.
            if job.pod.follow && !job.takes_part() {
                job.measure(now.time, &self.whole, &mut self.scratch);
            }
        }
        self.decide(now.time, idle_s, &mut happened);
        self.look_for_effects(now.time, &mut happened);
        for wanted in self.wanted.values_mut() {
            if matches!(wanted.progress, Asked::Again(at) if now.time >= at) {
                wanted.progress = Asked::Pending;
                happened.is_urgent = true;
            }
        }
        happened
    }

    /// The last decision about a pod, and the pod's number in it.
    pub(crate) fn last_decision(&self, uid: &str) -> Result<JobDecision, RecordError> {
        let job = self.jobs.get(uid).ok_or_else(|| RecordError::NotShared { uid: uid.to_owned() })?;
        if let Some(blocked) = &job.pod.blocked {
            return Err(RecordError::Blocked { pod: name(job), why: blocked.message.clone() });
        }
        let last = self.policies.get(&policy_key(job)).and_then(|shared| shared.last.clone());
        let about_job = last.filter(|decision| decision.plan.verdicts.contains_key(&job.id));
        let decision = about_job.ok_or_else(|| RecordError::Undecided { pod: name(job) })?;
        Ok(JobDecision { job: job.id, decision })
    }

    /// When `step` should be called again at the latest, if nothing is printed.
    pub(crate) fn due(&self) -> Option<Time> {
        let decisions = self.policies.values().filter_map(|s| s.control.due());
        let quiet = self.policies.iter().filter_map(|(key, shared)| {
            let members = self.jobs.values().filter(|j| j.takes_part() && policy_key(j) == *key);
            Some(quiet_at(shared.planned.as_ref()?.0, members))
        });
        let retries = self.wanted.values().filter_map(|w| match w.progress {
            Asked::Again(at) => Some(at),
            _ => None,
        });
        decisions.chain(quiet).chain(retries).min()
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
            if let Some(job) = self.jobs.get_mut(&uid) {
                job.group = Some(group);
            }
        }
    }

    fn decide(&mut self, now: Time, idle_s: Option<f64>, happened: &mut Happened) {
        if self.policies.is_empty() {
            return;
        }
        let node = NodeView {
            id: HERE,
            cores: self.whole.capacity.cores,
            speed: 1.0,
            memory_bytes: self.whole.capacity.memory_bytes,
            slots: None,
            idle: idle_s,
        };
        for (key, shared) in &mut self.policies {
            let mut members: Vec<&mut Job> =
                self.jobs.values_mut().filter(|j| j.takes_part() && policy_key(j) == *key).collect();
            // One policy's jobs wait until the history of each is read. The jobs of other policies do not.
            if members.iter().any(|job| job.reads_history()) {
                continue;
            }
            members.sort_by_key(|j| j.id);
            for job in &mut members {
                job.measure(now, &self.whole, &mut self.scratch);
            }
            let view = View { now, nodes: vec![node.clone()], jobs: members.iter().map(|j| j.view()).collect() };
            let outcome = shared.control.decide_recorded(view);
            if outcome != decider::Outcome::NotDue {
                happened.plans += 1;
                members.iter_mut().for_each(|job| job.most = shared.control.usable(job.id));
            }
            match outcome {
                decider::Outcome::NotDue => {}
                decider::Outcome::Rejected(rejection) => {
                    // The limits in force were sound when they were set: they stay.
                    let record = rejection.record.as_ref().and_then(|r| serde_json::to_string(r).ok());
                    let list = rejection.reasons();
                    tracing::error!(policy = key.1, record, "a plan failed its check and is not carried out: {list}");
                    happened.bad_plans += 1;
                    continue;
                }
                decider::Outcome::Decision(decision) => {
                    if tracing::enabled!(tracing::Level::TRACE) {
                        let record = decision.record().and_then(|r| serde_json::to_string(&r).ok());
                        tracing::trace!(policy = key.1, record, "decision");
                    }
                    let decision = Arc::new(decision);
                    shared.last = Some(decision.clone());
                    for job in &mut members {
                        job.verdict = decision.plan.verdicts.get(&job.id).cloned();
                    }
                    if shared.holds(now, &decision.plan) {
                        members.iter_mut().for_each(|job| happened.is_urgent |= job.say());
                    } else {
                        let since = shared.planned.as_ref().map_or(now, |(since, _)| *since);
                        shared.planned = Some((since, decision));
                    }
                }
            }
            let is_ready = |since: Time| now >= quiet_at(since, members.iter().map(|job| &**job));
            if let Some((_, decision)) = shared.planned.take_if(|(since, _)| is_ready(*since)) {
                self.generation += 1;
                members.iter_mut().for_each(|job| happened.is_urgent |= job.say());
                let members: Vec<&Job> = members.into_iter().map(|j| &*j).collect();
                happened.is_urgent |= want(&mut self.wanted, &members, &decision.plan, self.generation, now);
            }
        }
    }

    /// Notes which resizes the kubelet has put in force.
    fn look_for_effects(&mut self, now: Time, happened: &mut Happened) {
        for (uid, wanted) in &mut self.wanted {
            let Some(job) = self.jobs.get(uid) else { continue };
            let Some(group) = &job.group else { continue };
            if wanted.in_force || now.since(wanted.decided) > EFFECT_PATIENCE {
                continue;
            }
            let Some(request) = wanted.resize.to.requests.cpu_milli else { continue };
            if is_in_force(group, request, wanted.resize.to.over(job.pod.now).limits.cpu_milli) {
                wanted.in_force = true;
                happened.effects_s.push(now.since(wanted.decided).as_secs_f64());
            }
        }
    }

    /// Whether the manager wants to hear of any job's progress within seconds.
    pub(crate) fn is_followed(&self) -> bool {
        self.jobs.values().any(|job| job.pod.follow)
    }

    /// Whether an effect is awaited, so that looks should come quickly.
    pub(crate) fn awaits_effect(&self, now: Time) -> bool {
        let recent = |w: &Wanted| !w.in_force && now.since(w.decided) < SETTLING;
        self.wanted.values().any(|w| matches!(w.progress, Asked::Pending | Asked::Done(_)) && recent(w))
    }

    pub(crate) fn beat(&self) -> Beat {
        let mut beat = Beat {
            cores: self.whole.capacity.cores,
            memory_bytes: self.whole.capacity.memory_bytes,
            ..Beat::default()
        };
        for job in self.jobs.values() {
            beat.cpu_used_cores += job.meter.cores().unwrap_or(0.0);
            beat.memory_used_bytes += job.meter.memory_bytes().unwrap_or(0);
            match job.state().category {
                gainshare_kube_api::wire::Category::Growing => beat.growing += 1,
                gainshare_kube_api::wire::Category::Watching => beat.watching += 1,
                gainshare_kube_api::wire::Category::Converged => beat.converged += 1,
            }
        }
        beat
    }

    pub(crate) fn states(&self) -> Vec<JobState> {
        self.jobs.values().map(Job::state).collect()
    }

    /// What the manager should do, as far as it has not said what became of it.
    pub(crate) fn resizes(&self) -> Vec<Resize> {
        let pending = self.wanted.iter().filter(|(_, w)| w.progress == Asked::Pending);
        let mut resizes: Vec<Resize> = pending.map(|(_, w)| w.resize.clone()).collect();
        // Decreases first, so that the node is never promised twice.
        resizes.sort_by_key(|r| self.jobs.get(&r.uid).is_some_and(|j| resize::is_up(&j.pod.now, &r.to)));
        resizes
    }

    pub(crate) fn dropped_lines(&self) -> u64 {
        self.jobs.values().map(Job::dropped).sum()
    }
}

impl Shared {
    /// Whether pods still keep what they had at our start.
    fn holds(&mut self, now: Time, plan: &Plan) -> bool {
        let Some(until) = self.hold_until else { return false };
        let unsure = |reason| matches!(reason, Reason::NotYetMeasured | Reason::Watching { .. });
        if now < until && plan.verdicts.values().any(|v| unsure(v.reason)) {
            return true;
        }
        self.hold_until = None;
        false
    }
}

/// When a plan that has been there since then is to be carried out.
fn quiet_at<'j>(since: Time, members: impl Iterator<Item = &'j Job>) -> Time {
    let last = members.map(Job::quiet_at).max().unwrap_or(since);
    last.clamp(since, since + LONGEST_QUIET_WAIT)
}

/// Notes what the members of a policy should have from now on, by `plan`; `true` if anything new is to be asked for.
fn want(
    wanted: &mut BTreeMap<String, Wanted>,
    members: &[&Job],
    plan: &CheckedPlan,
    generation: u64,
    now: Time,
) -> bool {
    // What was asked for and not answered, or accepted a moment ago, counts as if the pod had it: the list
    // may not show it yet.
    let expected = |job: &Job| match wanted.get(&job.pod.uid) {
        Some(Wanted { progress: Asked::Pending, resize, .. }) => resize.to.over(job.pod.now),
        Some(Wanted { progress: Asked::Done(at), resize, .. }) if now.since(*at) < SETTLING => {
            resize.to.over(job.pod.now)
        }
        _ => job.pod.now,
    };
    let pods: Vec<PodOnNode> = members.iter().map(|j| PodOnNode { now: expected(j), ..j.pod.clone() }).collect();
    let share = |job: &Job| plan.target(job.id).map_or(0.0, |t| t.share.cpu.get());
    let shares: Vec<(&PodOnNode, f64)> = pods.iter().zip(members).map(|(pod, job)| (pod, share(job))).collect();
    let mut changes: BTreeMap<usize, Resources> = resize::changes(&shares).into_iter().collect();
    for (i, (pod, job)) in pods.iter().zip(members).enumerate() {
        let memory = job.meter.memory_bytes().and_then(|used| resize::memory_request(pod, used));
        let mut grown = Resources::default();
        grown.requests.memory_bytes = memory;
        if resize::worth_it(&pod.now, &grown) {
            changes.entry(i).or_default().requests.memory_bytes = memory;
        }
    }
    let mut news = false;
    for (i, to) in changes {
        let (uid, container) = (pods[i].uid.clone(), pods[i].container.clone());
        // Refused or failed: the same again waits for its time.
        let is_waiting = |w: &Wanted| matches!(w.progress, Asked::Again(_)) && !resize::worth_it(&w.resize.to, &to);
        if wanted.get(&uid).is_some_and(is_waiting) {
            continue;
        }
        if let Some(cpu_milli) = to.requests.cpu_milli {
            let reason = members[i].verdict.as_ref().map(|v| v.reason.to_string()).unwrap_or_default();
            tracing::info!(pod = %name(members[i]), %uid, cpu_milli, reason, "wants");
        }
        let resize = Resize { uid: uid.clone(), container, generation, to };
        let entry = Wanted { resize, decided: now, progress: Asked::Pending, failures: 0, in_force: false };
        wanted.insert(uid, entry);
        news = true;
    }
    news
}

fn pause(failures: u32) -> Span {
    Span(FIRST_PAUSE.0.saturating_mul(1 << failures.min(20))).min(LONGEST_PAUSE)
}

fn hold_for(policy: &Policy) -> Span {
    match policy.share {
        ShareRule::Flowcon(f) => Span(f.interval.0.saturating_mul(HOLD_INTERVALS)),
        // It measures a newcomer within a few looks.
        ShareRule::Gain(_) => Span::from_secs(10),
        _ => Span::ZERO,
    }
}

fn policy_key(job: &Job) -> PolicyKey {
    (job.pod.namespace.clone(), job.pod.policy.clone())
}

fn name(job: &Job) -> String {
    format!("{}/{}", job.pod.namespace, job.pod.name)
}

/// The core's policy for a SharePolicy. Numbers that make no sense never get here; should one, the core's own stands.
fn policy_of(settings: &Settings) -> Policy {
    let preset = match settings.policy {
        PolicyKind::Fair => Preset::Na,
        PolicyKind::Flowcon => Preset::Flowcon,
        PolicyKind::Gainshare => Preset::Gainshare,
    };
    let defaults = Policy { moves: MoveRule::Stay, ..Policy::from(preset) };
    let mut policy = defaults.clone();
    if let ShareRule::Flowcon(rule) = &mut policy.share {
        rule.alpha = settings.alpha.unwrap_or(rule.alpha);
        rule.beta = settings.beta.unwrap_or(rule.beta);
        rule.interval = settings.interval_ms.map_or(rule.interval, Span::from_millis);
        rule.longest_interval = rule.longest_interval.max(rule.interval);
    }
    match policy.validate() {
        Ok(()) => policy,
        Err(error) => {
            tracing::warn!("{error}: using the defaults");
            defaults
        }
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
