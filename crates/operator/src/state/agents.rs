//! The node agents' reports: when each agent reported last, and the state of each job.
//!
//! Progress lives here and nowhere else: agents report it again to a new leader. `(epoch, seq)` orders the
//! reports of one agent; an older report that arrives late is ignored.
//!
//! **An agent speaks for its own node.** Job states of pods that are not on the agent's node are dropped and
//! counted. Numbers are clamped when they come in ([`clamp`]), so that no later sum overflows, and sums
//! saturate anyway. What is remembered of an agent is bounded by the pods of its node.

use crate::state::clock::AgentClock;
use gainshare_kube_api::deadline::{DeadlineState, Forecast};
use gainshare_kube_api::gpu_pacing::GpuPacing;
use gainshare_kube_api::names::{NodeName, PodUid};
use gainshare_kube_api::share_reason::ShareReason;
use gainshare_kube_api::wire::{
    JobReport, NodeTotals, ReportedCategory, ReportedSignal, ReportedTraffic, ReportedValue, SyncRequest, WorkLeft,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// An agent that was silent for longer counts as absent in conditions. Its pods keep their resources.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(40);

/// A node whose agent was silent for longer is forgotten; if it comes back, it is new.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

/// Nodes have some hundred pods; more jobs than this are not counted.
const MOST_JOBS: u32 = 10_000;
/// Thirty years, in microseconds: clocks of agents count from the start of their machine.
const LATEST_US: u64 = 1_000_000_000_000_000;
/// More reports or steps than a training run can have. The API server has no larger integers than 2^63.
pub(crate) const MOST_STEPS: u64 = 1 << 50;
/// Node-seconds of thirty thousand years.
const MOST_CONSUMED: f64 = 1e12;
const MOST_CORES: f64 = 1e6;
/// A prediction that may be off by more says nothing.
const MOST_SPREAD: f64 = 100.0;
const MOST_BYTES: u64 = 1 << 60;
/// Faster than the network of any node.
const MOST_BYTES_S: f64 = 1e12;
/// Metrics larger than this carry no information about progress.
const LARGEST_VALUE: f64 = 1e100;
/// For sentences and names; longer ones are cut.
const LONGEST_TEXT: usize = 1000;

/// Why a node agent's plan is not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanRefusal {
    #[error("the agent is not known")]
    UnknownAgent,
    #[error("a newer start of this agent has taken over")]
    OlderStart,
    #[error("plan {generation} is older than plan {newest}, which was carried out already")]
    OlderPlan { generation: u64, newest: u64 },
}

#[derive(Debug, Default)]
pub(crate) struct Agents {
    nodes: HashMap<NodeName, Agent>,
    jobs: HashMap<PodUid, JobReport>,
    /// Old reports and old plans are accepted, so that a test can see whether its simulation notices.
    #[cfg(test)]
    pub(crate) takes_old: bool,
}

#[derive(Debug)]
struct Agent {
    epoch: u64,
    seq: u64,
    heard: Instant,
    clock: AgentClock,
    beat: NodeTotals,
    /// Whether it has reported its jobs in this epoch.
    has_reported_jobs: bool,
    jobs: BTreeSet<PodUid>,
    /// The newest plan that was carried out for each pod of the node.
    generations: BTreeMap<PodUid, u64>,
}

/// What a report has changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReportEffect {
    /// A newer one has come already: this one is ignored.
    pub(crate) stale: bool,
    /// Pods whose category, share, progress, prediction or reason differ from before.
    pub(crate) changed: Vec<PodUid>,
    /// How many job states were dropped because their pods are not on the agent's node.
    pub(crate) foreign: usize,
}

impl Agents {
    /// Takes in an agent's report, unless it is old. `is_here` tells whether a pod is on the agent's node.
    pub(crate) fn receive(
        &mut self,
        sync: &SyncRequest,
        now: Instant,
        is_here: impl Fn(&PodUid) -> bool,
    ) -> ReportEffect {
        let known = self.nodes.get(&sync.node);
        if self.refuses_old() && known.is_some_and(|agent| (agent.epoch, agent.seq) >= (sync.epoch, sync.seq)) {
            return ReportEffect { stale: true, changed: Vec::new(), foreign: 0 };
        }
        let new_epoch = known.is_none_or(|agent| agent.epoch != sync.epoch);
        let beat = clamp_beat(sync.beat);
        let agent = self.nodes.entry(sync.node.clone()).or_insert_with(|| Agent {
            epoch: sync.epoch,
            seq: 0,
            heard: now,
            clock: AgentClock::of(beat.at_us, now),
            beat: NodeTotals::default(),
            has_reported_jobs: false,
            jobs: BTreeSet::new(),
            generations: BTreeMap::new(),
        });
        if new_epoch {
            agent.has_reported_jobs = false;
            agent.generations.clear();
            agent.clock = AgentClock::of(beat.at_us, now);
        }
        agent.clock = agent.clock.quicker(AgentClock::of(beat.at_us, now));
        (agent.epoch, agent.seq, agent.heard, agent.beat) = (sync.epoch, sync.seq, now, beat);
        let mut heard = ReportEffect { stale: false, changed: Vec::new(), foreign: 0 };
        let Some(reported) = &sync.jobs else { return heard };
        agent.has_reported_jobs = true;
        agent.generations.retain(|uid, _| is_here(uid));
        let jobs: Vec<JobReport> = reported.iter().filter(|job| is_here(&job.uid)).map(clamp).collect();
        heard.foreign = reported.len() - jobs.len();
        let uids: BTreeSet<PodUid> = jobs.iter().map(|job| job.uid.clone()).collect();
        let ended: Vec<PodUid> = agent.jobs.difference(&uids).cloned().collect();
        agent.jobs = uids;
        ended.iter().for_each(|uid| drop(self.jobs.remove(uid)));
        for job in jobs {
            if self.jobs.get(&job.uid).is_none_or(|old| gist(old) != gist(&job)) {
                heard.changed.push(job.uid.clone());
            }
            self.jobs.insert(job.uid.clone(), job);
        }
        heard
    }

    fn refuses_old(&self) -> bool {
        #[cfg(test)]
        if self.takes_old {
            return false;
        }
        true
    }

    /// Whether the node's agent should send its jobs.
    pub(crate) fn want_jobs(&self, node: &NodeName) -> bool {
        self.nodes.get(node).is_none_or(|agent| !agent.has_reported_jobs)
    }

    /// Whether a request is still the newest of its node: an older one need not wait any longer.
    pub(crate) fn is_newest(&self, sync: &SyncRequest) -> bool {
        self.nodes.get(&sync.node).is_some_and(|agent| (agent.epoch, agent.seq) == (sync.epoch, sync.seq))
    }

    /// Whether a plan of this generation may be carried out for a pod of the agent's node; older plans may not.
    pub(crate) fn admit(
        &mut self,
        node: &NodeName,
        epoch: u64,
        uid: &PodUid,
        generation: u64,
    ) -> Result<(), PlanRefusal> {
        let refuses_old = self.refuses_old();
        let Some(agent) = self.nodes.get_mut(node) else { return Err(PlanRefusal::UnknownAgent) };
        if refuses_old && agent.epoch > epoch {
            return Err(PlanRefusal::OlderStart);
        }
        let newest = agent.generations.entry(uid.clone()).or_insert(generation);
        if refuses_old && generation < *newest {
            return Err(PlanRefusal::OlderPlan { generation, newest: *newest });
        }
        *newest = generation;
        Ok(())
    }

    pub(crate) fn job(&self, uid: &PodUid) -> Option<&JobReport> {
        self.jobs.get(uid)
    }

    pub(crate) fn clock(&self, node: &NodeName) -> Option<AgentClock> {
        self.nodes.get(node).map(|agent| agent.clock)
    }

    /// The cores of an agent's machine, by which it measures use.
    pub(crate) fn cores(&self, node: &NodeName) -> Option<f64> {
        self.nodes.get(node).map(|agent| agent.beat.cores).filter(|cores| *cores > 0.0)
    }

    pub(crate) fn is_heard(&self, node: &NodeName, now: Instant) -> bool {
        self.nodes.get(node).is_some_and(|agent| now.saturating_duration_since(agent.heard) < SILENT_AFTER)
    }

    pub(crate) fn heard_count(&self, now: Instant) -> usize {
        self.nodes.keys().filter(|node| self.is_heard(node, now)).count()
    }

    /// Forgets nodes whose agents have been silent for long, and their jobs.
    pub(crate) fn forget_silent(&mut self, now: Instant) {
        let gone: Vec<NodeName> = self
            .nodes
            .iter()
            .filter(|(_, agent)| now.saturating_duration_since(agent.heard) > FORGOTTEN_AFTER)
            .map(|(node, _)| node.clone())
            .collect();
        for agent in gone.iter().filter_map(|node| self.nodes.remove(node)) {
            agent.jobs.iter().for_each(|uid| drop(self.jobs.remove(uid)));
        }
    }

    /// Jobs with a deadline, by how the deadline stands.
    pub(crate) fn deadline_states(&self) -> BTreeMap<DeadlineState, u32> {
        let mut counts: BTreeMap<DeadlineState, u32> = BTreeMap::new();
        for state in self.jobs.values().filter_map(|job| job.deadline_state) {
            *counts.entry(state).or_default() += 1;
        }
        counts
    }

    /// Jobs by category, as the agents that are not silent counted them.
    pub(crate) fn counts(&self, now: Instant) -> BTreeMap<ReportedCategory, u32> {
        let mut counts: BTreeMap<ReportedCategory, u32> = BTreeMap::new();
        let heard = self.nodes.iter().filter(|(node, _)| self.is_heard(node, now));
        for beat in heard.map(|(_, agent)| agent.beat) {
            let parts = [
                (ReportedCategory::Growing, beat.growing),
                (ReportedCategory::Watching, beat.watching),
                (ReportedCategory::Converged, beat.converged),
            ];
            for (category, number) in parts {
                let count = counts.entry(category).or_default();
                *count = count.saturating_add(number);
            }
        }
        counts
    }
}

/// A number of an agent, between 0 and `most`; 0 if it is not finite.
fn within(value: f64, most: f64) -> f64 {
    if value.is_finite() { value.clamp(0.0, most) } else { 0.0 }
}

fn clamp_beat(beat: NodeTotals) -> NodeTotals {
    NodeTotals {
        growing: beat.growing.min(MOST_JOBS),
        watching: beat.watching.min(MOST_JOBS),
        converged: beat.converged.min(MOST_JOBS),
        cpu_used_cores: within(beat.cpu_used_cores, MOST_CORES),
        memory_used_bytes: beat.memory_used_bytes.min(MOST_BYTES),
        cores: within(beat.cores, MOST_CORES),
        memory_bytes: beat.memory_bytes.min(MOST_BYTES),
        at_us: beat.at_us.min(LATEST_US),
    }
}

/// What of a report concerns more than the operator's own picture. Of the reason it is the name: its numbers change all
/// the time.
#[derive(PartialEq)]
struct Gist {
    category: ReportedCategory,
    share: Option<f64>,
    deadline_state: Option<DeadlineState>,
    forecast: Option<Forecast>,
    percent: Option<u32>,
    reason: Option<&'static str>,
    gpu: Option<GpuPacing>,
}

fn gist(job: &JobReport) -> Gist {
    Gist {
        category: job.category,
        share: job.share,
        deadline_state: job.deadline_state,
        forecast: job.forecast,
        percent: job.progress.percent(),
        reason: job.cause.as_ref().map(ShareReason::name),
        gpu: job.gpu.map(GpuPacing::kind),
    }
}

/// The job state with every number in its range and every text cut to a length that fits into a note.
fn clamp(job: &JobReport) -> JobReport {
    let short = |text: &str| text.chars().take(LONGEST_TEXT).collect::<String>();
    let value = |value: f64| value.is_finite().then(|| value.clamp(-LARGEST_VALUE, LARGEST_VALUE));
    let mut progress = job.progress.clone();
    progress.step = progress.step.map(|step| step.min(MOST_STEPS));
    progress.first_step = progress.first_step.map(|step| step.min(MOST_STEPS));
    progress.total = progress.total.map(|total| total.min(MOST_STEPS));
    progress.metric = progress.metric.as_deref().map(short);
    progress.value = progress.value.and_then(value);
    JobReport {
        uid: job.uid.clone(),
        container: short(&job.container),
        category: job.category,
        growth: job.growth.and_then(value),
        progress,
        share: job.share.filter(|share| share.is_finite()).map(|share| share.clamp(0.0, 1.0)),
        reason: short(&job.reason),
        cause: job.cause.as_ref().map(|cause| cause.cut(LONGEST_TEXT)),
        signal: job.signal.map(clamp_signal),
        forecast: job.forecast.map(clamp_forecast),
        deadline_state: job.deadline_state,
        gpu: job.gpu.map(GpuPacing::clamped),
    }
}

/// The year 2200, in milliseconds since 1970: a job that ends later ends never.
const LATEST_END_MS: u64 = 7_258_118_400_000;

fn clamp_forecast(forecast: Forecast) -> Forecast {
    let within = |ms: u64| ms.min(LATEST_END_MS);
    Forecast {
        done_ms: within(forecast.done_ms),
        earliest_ms: within(forecast.earliest_ms),
        latest_ms: within(forecast.latest_ms),
    }
}

fn clamp_signal(signal: ReportedSignal) -> ReportedSignal {
    let report = |report: ReportedValue| {
        let value = report.value.is_finite().then(|| report.value.clamp(-LARGEST_VALUE, LARGEST_VALUE))?;
        Some(ReportedValue { value, at_us: report.at_us.min(LATEST_US) })
    };
    let finite = |outlook: &[f64; 3]| outlook.iter().all(|value| value.is_finite());
    ReportedSignal {
        reports: signal.reports.min(MOST_STEPS),
        first: signal.first.and_then(report),
        last: signal.last.and_then(report),
        longest_gap_us: signal.longest_gap_us.min(LATEST_US),
        step: signal.step.map(|step| step.min(MOST_STEPS)),
        total: signal.total.map(|total| total.min(MOST_STEPS)),
        outlook: signal.outlook.filter(finite).map(|outlook| outlook.map(|v| v.clamp(-LARGEST_VALUE, LARGEST_VALUE))),
        consumed_cpu_node_s: within(signal.consumed_cpu_node_s, MOST_CONSUMED),
        consumed_memory_node_s: within(signal.consumed_memory_node_s, MOST_CONSUMED),
        memory_used_bytes: signal.memory_used_bytes.map(|bytes| bytes.min(MOST_BYTES)),
        usable: signal.usable.filter(|usable| usable.is_finite()).map(|usable| usable.clamp(0.0, 1.0)),
        left: signal.left.map(|left| WorkLeft {
            parallel_node_s: within(left.parallel_node_s, MOST_CONSUMED),
            serial_s: within(left.serial_s, MOST_CONSUMED),
            usable: within(left.usable, 1.0),
            spread: within(left.spread, MOST_SPREAD),
        }),
        traffic: signal.traffic.map(|traffic| ReportedTraffic {
            received_bytes_s: within(traffic.received_bytes_s, MOST_BYTES_S),
            sent_bytes_s: within(traffic.sent_bytes_s, MOST_BYTES_S),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_core::plan::Reason;
    use gainshare_kube_api::wire::Progress;

    /// Every pod is on the node.
    fn here(_: &PodUid) -> bool {
        true
    }

    fn sync(epoch: u64, seq: u64, jobs: Option<&[(&str, ReportedCategory)]>) -> SyncRequest {
        let job = |(uid, category): &(&str, ReportedCategory)| JobReport {
            uid: (*uid).into(),
            container: "main".into(),
            category: *category,
            ..JobReport::default()
        };
        let jobs = jobs.map(|jobs| jobs.iter().map(job).collect());
        SyncRequest { node: "n".into(), epoch, seq, jobs, ..SyncRequest::default() }
    }

    #[test]
    fn late_and_doubled_reports_are_ignored() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        let growing = [("a", ReportedCategory::Growing)];
        let converged = [("a", ReportedCategory::Converged)];
        assert_eq!(agents.receive(&sync(1, 2, Some(&converged)), now, here).changed, ["a"]);
        assert!(agents.receive(&sync(1, 1, Some(&growing)), now, here).stale, "late");
        assert!(agents.receive(&sync(1, 2, Some(&growing)), now, here).stale, "doubled");
        assert_eq!(agents.job(&"a".into()).unwrap().category, ReportedCategory::Converged);
        assert!(!agents.receive(&sync(2, 1, None), now, here).stale, "a new start of the agent counts from one again");
        assert!(agents.receive(&sync(1, 9, Some(&growing)), now, here).stale, "the old start is over");
        println!("fault: injected=3 violations=0");
    }

    #[test]
    fn a_reason_has_changed_when_its_name_has_whatever_its_sentence_and_its_numbers_are() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        let mut report = |seq, reason: Reason| {
            let mut sync = sync(1, seq, Some(&[("a", ReportedCategory::Growing)]));
            let job = &mut sync.jobs.as_mut().unwrap()[0];
            job.reason = reason.to_string();
            job.cause = Some(ShareReason::Decided(reason));
            agents.receive(&sync, now, here).changed
        };
        assert_eq!(report(1, Reason::Ranked { ahead: 1 }), ["a"]);
        assert!(report(2, Reason::Ranked { ahead: 2 }).is_empty());
        assert_eq!(report(3, Reason::NotYetMeasured), ["a"]);
    }

    #[test]
    fn a_new_epoch_reports_its_jobs_again_and_ended_jobs_are_forgotten() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        assert!(agents.want_jobs(&"n".into()));
        agents.receive(
            &sync(1, 1, Some(&[("a", ReportedCategory::Growing), ("b", ReportedCategory::Growing)])),
            now,
            here,
        );
        assert!(!agents.want_jobs(&"n".into()));
        agents.receive(&sync(1, 2, Some(&[("b", ReportedCategory::Growing)])), now, here);
        assert!(agents.job(&"a".into()).is_none() && agents.job(&"b".into()).is_some());
        agents.receive(&sync(2, 1, None), now, here);
        assert!(agents.want_jobs(&"n".into()));
    }

    #[test]
    fn plans_never_go_backwards() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        agents.receive(&sync(5, 1, None), now, here);
        assert!(agents.admit(&"n".into(), 5, &"a".into(), 3).is_ok());
        assert!(agents.admit(&"n".into(), 5, &"a".into(), 3).is_ok(), "the same again is harmless");
        assert_eq!(
            agents.admit(&"n".into(), 5, &"a".into(), 2),
            Err(PlanRefusal::OlderPlan { generation: 2, newest: 3 })
        );
        assert_eq!(agents.admit(&"n".into(), 4, &"a".into(), 9), Err(PlanRefusal::OlderStart));
        agents.receive(&sync(6, 1, None), now, here);
        assert!(agents.admit(&"n".into(), 6, &"a".into(), 1).is_ok());
        println!("fault: injected=2 violations=0");
    }

    #[test]
    fn silence_is_noticed() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        agents.receive(&sync(1, 1, None), now, here);
        assert!(
            agents.is_heard(&"n".into(), now)
                && !agents.is_heard(&"n".into(), now + SILENT_AFTER)
                && !agents.is_heard(&"m".into(), now)
        );
        agents.receive(&sync(1, 2, Some(&[("a", ReportedCategory::Growing)])), now, here);
        agents.forget_silent(now + SILENT_AFTER);
        assert!(agents.job(&"a".into()).is_some());
        agents.forget_silent(now + FORGOTTEN_AFTER * 2);
        assert!(agents.job(&"a".into()).is_none() && agents.want_jobs(&"n".into()));
    }

    /// A report of node B's agent.
    fn from_other_node(seq: u64, jobs: Option<&[(&str, ReportedCategory)]>) -> SyncRequest {
        SyncRequest { node: "m".into(), ..sync(1, seq, jobs) }
    }

    #[test]
    fn an_agent_speaks_for_its_own_node_only() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        let on_n = |uid: &PodUid| uid == "a";
        let on_m = |uid: &PodUid| uid == "b";
        agents.receive(&sync(1, 1, Some(&[("a", ReportedCategory::Growing)])), now, on_n);
        let both = [("a", ReportedCategory::Converged), ("b", ReportedCategory::Growing)];
        let heard = agents.receive(&from_other_node(1, Some(&both)), now, on_m);
        assert_eq!((heard.changed, heard.foreign), (vec!["b".into()], 1));
        assert_eq!(
            agents.job(&"a".into()).unwrap().category,
            ReportedCategory::Growing,
            "the other node's report is dropped"
        );
        agents.receive(&from_other_node(2, Some(&[])), now, on_m);
        assert!(agents.job(&"a".into()).is_some(), "the other node's agent cannot end it either");
        assert!(agents.job(&"b".into()).is_none());
    }

    #[test]
    fn plans_of_pods_that_are_gone_are_forgotten() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        agents.receive(&sync(1, 1, Some(&[])), now, here);
        for pod in 0..100 {
            agents.admit(&"n".into(), 1, &pod.to_string().into(), 1).unwrap();
        }
        agents.receive(&sync(1, 2, Some(&[])), now, |uid| uid == "7");
        assert_eq!(agents.nodes["n"].generations.keys().collect::<Vec<_>>(), ["7"]);
    }

    #[test]
    fn counts_of_agents_do_not_overflow() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        let most = NodeTotals { growing: u32::MAX, watching: u32::MAX, converged: u32::MAX, ..NodeTotals::default() };
        agents.receive(&SyncRequest { beat: most, ..sync(1, 1, None) }, now, here);
        agents.receive(&SyncRequest { beat: most, ..from_other_node(1, None) }, now, here);
        assert_eq!(agents.counts(now)[&ReportedCategory::Growing], 2 * MOST_JOBS);
        let agent = agents.nodes.get_mut("n").unwrap();
        agent.beat = most;
        assert_eq!(agents.counts(now)[&ReportedCategory::Growing], u32::MAX, "sums saturate");
    }

    #[test]
    fn numbers_of_agents_are_clamped() {
        let mut report = sync(1, 1, Some(&[("a", ReportedCategory::Growing)]));
        report.beat = NodeTotals { at_us: u64::MAX, cores: f64::MAX, cpu_used_cores: -1.0, ..NodeTotals::default() };
        let job = &mut report.jobs.as_mut().unwrap()[0];
        job.share = Some(7.0);
        job.growth = Some(f64::NAN);
        job.reason = "x".repeat(5000);
        job.cause = Some(ShareReason::Unreadable { error: "x".repeat(5000) });
        job.progress = Progress { step: Some(u64::MAX), value: Some(f64::INFINITY), ..Progress::default() };
        let last = Some(ReportedValue { value: f64::MAX, at_us: u64::MAX });
        job.signal = Some(ReportedSignal {
            reports: u64::MAX,
            first: Some(ReportedValue { value: f64::NAN, at_us: 0 }),
            last,
            longest_gap_us: u64::MAX,
            outlook: Some([f64::INFINITY, 0.0, 0.0]),
            consumed_cpu_node_s: f64::MAX,
            usable: Some(-3.0),
            left: Some(WorkLeft { parallel_node_s: f64::NAN, serial_s: -1.0, usable: 7.0, spread: 1e9 }),
            traffic: Some(ReportedTraffic { received_bytes_s: f64::MAX, sent_bytes_s: f64::NAN }),
            ..ReportedSignal::default()
        });
        let (mut agents, now) = (Agents::default(), Instant::now());
        agents.receive(&report, now, here);
        let beat = agents.nodes["n"].beat;
        assert_eq!((beat.at_us, beat.cores, beat.cpu_used_cores), (LATEST_US, MOST_CORES, 0.0));
        let job = agents.job(&"a".into()).unwrap();
        assert_eq!((job.share, job.growth, job.reason.len()), (Some(1.0), None, LONGEST_TEXT));
        assert_eq!(job.cause, Some(ShareReason::Unreadable { error: "x".repeat(LONGEST_TEXT) }));
        assert_eq!((job.progress.step, job.progress.value), (Some(MOST_STEPS), None));
        let signal = job.signal.unwrap();
        assert_eq!((signal.reports, signal.first, signal.outlook), (MOST_STEPS, None, None));
        assert_eq!(signal.last, Some(ReportedValue { value: LARGEST_VALUE, at_us: LATEST_US }));
        assert_eq!(
            (signal.longest_gap_us, signal.consumed_cpu_node_s, signal.usable),
            (LATEST_US, MOST_CONSUMED, Some(0.0))
        );
        let left = WorkLeft { parallel_node_s: 0.0, serial_s: 0.0, usable: 1.0, spread: MOST_SPREAD };
        assert_eq!(signal.left, Some(left));
        assert_eq!(signal.traffic, Some(ReportedTraffic { received_bytes_s: MOST_BYTES_S, sent_bytes_s: 0.0 }));
    }
}
