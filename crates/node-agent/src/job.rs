//! One shared pod: its reports, its resource use and the latest verdict about it.
//!
//! **Clocks.** Times in logs are of the node's wall clock. Decisions use the boot clock, which cannot be set. A
//! new agent reads reports that were printed some time ago: the age of a report by the wall clock is subtracted
//! from the present boot time ([`Moment::boot_time_of`]). A stamp in the future counts as now.

use super::logs::{ContainerLog, Piece};
use super::traffic::TrafficMeter;
use super::volumes::Volumes;
use gainshare_core::model::{JobId, NodeId, OwnerId, Share, Span, Time};
use gainshare_core::plan::Verdict;
use gainshare_core::signal::speed::PaceTracker;
use gainshare_core::signal::{Sample, Signal, Tracker};
use gainshare_core::teams::TeamUse;
use gainshare_core::view::{FinishedRun, JobView, Phase};
use gainshare_kube_api::deadline::{Deadline, DeadlineState, Forecast};
use gainshare_kube_api::gpu_pacing::GpuPacing;
use gainshare_kube_api::share_reason::ShareReason;
use gainshare_kube_api::wire::{self, PodOnNode};
use gainshare_limits::cgroup::Group;
use gainshare_limits::gpu::GpuUse;
use gainshare_limits::usage::{Meter, NodeResources};
use gainshare_progress::{CollectorState, Goal, GuardedCollector, MetricSpec, RunLength, Source, contain_panic};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The number of the agent's own node in its views.
pub(crate) const THIS_NODE: NodeId = NodeId(0);

/// How often a kubelet reads the state of its container runtime (once a second), with a margin.
const KUBELET_PERIOD: Span = Span::from_millis(1100);

/// The time between two searches for a file that does not exist yet.
const SEARCH_PACE: Span = Span::from_secs(2);

/// A pod that started less than this ago counts as just started.
const RECENT_START: Span = Span::from_secs(5);

/// How long the start of a pod disturbs the others, from the time at which the agent knows of it: the kubelet makes its
/// container, and its program is loaded.
const STARTING: Span = Span::from_secs(4);

/// One moment on two clocks: the boot clock, which decisions use, and the wall clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub(crate) time: Time,
    /// Nanoseconds since 1970.
    pub(crate) unix_ns: u64,
}

impl Moment {
    /// The boot time at which the wall clock showed `unix_ns`.
    pub(crate) fn boot_time_of(&self, unix_ns: u64) -> Time {
        Time(self.time.0.saturating_sub(self.unix_ns.saturating_sub(unix_ns) / 1000))
    }
}

impl Moment {
    /// A deadline on the boot clock, shifted by the present difference of the two clocks.
    pub(crate) fn deadline(&self, deadline: Deadline) -> gainshare_core::view::Deadline {
        let now_ms = self.unix_ns / 1_000_000;
        let at = if deadline.at_ms >= now_ms {
            self.time + Span::from_millis(deadline.at_ms - now_ms)
        } else {
            self.time - Span::from_millis(now_ms - deadline.at_ms)
        };
        gainshare_core::view::Deadline { at, tolerance: Span::from_millis(deadline.tolerance_ms) }
    }
}

/// When the pod's kubelet is ready for the next change. The kubelet handles a change to a pod only if it has read
/// the state of the container runtime since the change before. Changes that arrive while one waits are handled
/// together with it.
#[derive(Debug, Clone, Copy)]
struct KubeletTiming {
    handles_at: Time,
    ready_at: Time,
}

impl KubeletTiming {
    fn after(change: Time) -> KubeletTiming {
        KubeletTiming { handles_at: change, ready_at: change + KUBELET_PERIOD }
    }

    fn add_change(&mut self, at: Time) {
        if at >= self.handles_at {
            *self = KubeletTiming::after(at.max(self.ready_at));
        }
    }
}

/// The namespace and the name of a policy; an empty name stands for the namespace's label.
pub(crate) type PolicyKey = (String, String);

/// The policy that has the pod.
pub(crate) fn policy_key(job: &PodJob) -> PolicyKey {
    (job.pod.namespace.clone(), job.pod.policy.clone())
}

/// What became of the last write to a pod's page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum PageState {
    /// The pod has no page: the library was not added to it.
    #[default]
    Absent,
    Written,
    /// What lies in the place of the page is no page, or cannot be written.
    Refused,
}

/// A shared pod; the job is one of its containers.
#[derive(Debug)]
pub(crate) struct PodJob {
    pub(crate) id: JobId,
    pub(crate) pod: PodOnNode,
    pub(crate) group: Option<Group>,
    pub(crate) meter: Meter,
    pub(crate) verdict: Option<Verdict>,
    /// The verdict that users see. It is published after its resize, because a note that is written to the pod
    /// first delays the kubelet by up to a second (decision 9).
    pub(crate) published: Option<Verdict>,
    /// The share of the last decision whose resources the kernel has in force.
    pub(crate) share_in_force: Option<f64>,
    /// The largest part of the node that the job can use, once decisions have measured it.
    pub(crate) usable: Option<f64>,
    /// The threads of its parallel regions; 0 before the first decision about them.
    pub(crate) team: u32,
    pub(crate) team_use: TeamUse,
    /// The page of the library inside the pod.
    pub(crate) page: PageState,
    /// What its library reported about its GPU, its share of it, and what the page is to say.
    pub(crate) gpu: GpuUse,
    /// The orders about its GPU that were written last.
    pub(crate) gpu_written: (u32, u32),
    /// When its GPU work was last paced, and to how many hundredths.
    pub(crate) gpu_paced: Option<(Time, u32)>,
    /// What users see of it.
    pub(crate) gpu_pacing: Option<GpuPacing>,
    pub(crate) traffic: TrafficMeter,
    log: Option<ContainerLog>,
    collector: Option<GuardedCollector>,
    /// Why the job's reports cannot be read.
    read_error: Option<String>,
    /// When the job's metrics file is searched for again.
    next_search: Time,
    tracker: Tracker,
    /// How fast the job's steps are.
    pub(crate) pace: PaceTracker,
    /// When the job will be done, and how its deadline stands.
    pub(crate) forecast: Option<Forecast>,
    pub(crate) deadline_state: Option<DeadlineState>,
    latest_progress: Option<gainshare_progress::Progress>,
    /// The first step that the container has reported.
    first_step: Option<u64>,
    starts: u32,
    since: Time,
    /// When the agent got the job, until all output from before that time has been read.
    history_since: Option<Time>,
    kubelet: KubeletTiming,
}

/// The longest time for which decisions wait until a job's earlier output has been read.
const MAX_HISTORY_WAIT: Span = Span::from_secs(10);

/// The result of reading a job's output once.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct ReadResult {
    pub(crate) reports: u64,
    pub(crate) refused: u64,
    /// There is more to read.
    pub(crate) more: bool,
}

impl PodJob {
    pub(crate) fn new(id: JobId, pod: PodOnNode, logs: &Path, now: Moment) -> PodJob {
        let since = pod.started_ms.map_or(now.time, |ms| now.boot_time_of(ms.saturating_mul(1_000_000)));
        let mut job = PodJob {
            id,
            log: ContainerLog::new(logs, &pod.namespace, &pod.name, &pod.uid, &pod.container),
            pod,
            group: None,
            meter: Meter::default(),
            verdict: None,
            published: None,
            share_in_force: None,
            usable: None,
            team: 0,
            team_use: TeamUse::default(),
            page: PageState::default(),
            gpu: GpuUse::default(),
            gpu_written: (0, 0),
            gpu_paced: None,
            gpu_pacing: None,
            traffic: TrafficMeter::default(),
            collector: None,
            read_error: None,
            next_search: Time::ZERO,
            tracker: Tracker::default(),
            pace: PaceTracker::default(),
            forecast: None,
            deadline_state: None,
            latest_progress: None,
            first_step: None,
            starts: 0,
            since,
            history_since: Some(now.time),
            // A kubelet publishes a container's start after it has read the runtime, which is now. Pods that started
            // earlier are new only to this agent.
            kubelet: KubeletTiming::after(if now.time.since(since) < RECENT_START { now.time } else { since }),
        };
        job.reset_reports(since);
        job
    }

    /// Replaces the description of the pod by the operator's newer one.
    pub(crate) fn update(&mut self, pod: PodOnNode, logs: &Path, now: Moment) {
        let before = &self.pod;
        let same_reports = before.container == pod.container
            && metric_spec(&before.settings) == metric_spec(&pod.settings)
            && before.settings.target == pod.settings.target
            && before.settings.collector == pod.settings.collector;
        let work = |pod: &PodOnNode| (pod.started_ms, pod.now, pod.noted);
        if work(before) != work(&pod) {
            self.kubelet.add_change(now.time);
        }
        if same_reports {
            self.pod = pod;
        } else {
            // Another metric is another curve: all output is read again for it.
            let id = self.id;
            let (group, meter, kubelet) = (self.group.take(), self.meter, self.kubelet);
            let traffic = std::mem::take(&mut self.traffic);
            *self = PodJob { group, meter, kubelet, traffic, ..PodJob::new(id, pod, logs, now) };
        }
    }

    fn new_tracker(&self) -> Tracker {
        let mut tracker = Tracker::default();
        tracker.set_target(self.pod.settings.target);
        tracker
    }

    /// Forgets all reports, because the container has started again.
    fn reset_reports(&mut self, at: Time) {
        self.since = at;
        self.tracker = self.new_tracker();
        self.pace = PaceTracker::default();
        self.forecast = None;
        (self.latest_progress, self.first_step) = (None, None);
        self.read_error = None;
        self.collector = None;
        self.next_search = Time::ZERO;
        if self.pod.settings.collector == wire::CollectorKind::Stdout {
            self.collect_from(None);
        }
    }

    fn collect_from(&mut self, folder: Option<&Path>) {
        let started = SystemTime::UNIX_EPOCH + Duration::from_millis(self.pod.started_ms.unwrap_or(0));
        match GuardedCollector::new(&metric_spec(&self.pod.settings), folder, started, CollectorState::default()) {
            Ok(mut collector) => {
                // No folder: configuration files inside the container's image cannot be read.
                collector.set_run_length(RunLength::read(&self.pod.command, None));
                (self.collector, self.read_error) = (Some(collector), None);
            }
            Err(error) => self.read_error = Some(error.to_string()),
        }
    }

    /// Reads the files into which the job writes its progress.
    fn read_files(&mut self, now: Time, volumes: &Volumes) -> u64 {
        if !matches!(self.pod.settings.collector, wire::CollectorKind::File | wire::CollectorKind::Tensorboard) {
            return 0;
        }
        if self.collector.is_none() && now >= self.next_search {
            self.next_search = now + SEARCH_PACE;
            let path = self.pod.settings.path.as_deref().unwrap_or(".");
            match volumes.find(&self.pod.uid, path) {
                Ok(folder) => self.collect_from(Some(&folder)),
                Err(why) => self.read_error = Some(why),
            }
        }
        let Some(collector) = &mut self.collector else { return 0 };
        let update = collector.read(|collector| collector.poll(now));
        self.apply_update(now, update)
    }

    /// Reads the output and the files that the container has written since the last call.
    pub(crate) fn read_reports(&mut self, now: Moment, volumes: &Volumes) -> ReadResult {
        if let Some(collector) = &mut self.collector {
            collector.begin_round(now.time);
        }
        let mut result = ReadResult { reports: self.read_files(now.time, volumes), ..ReadResult::default() };
        // Taken out, because reading it changes other parts of the job.
        let Some(mut log) = self.log.take() else {
            self.history_since = None;
            return result;
        };
        let refused_before = self.tracker.refused();
        let read = contain_panic(|| {
            log.read_new(now.time, |piece| match piece {
                Piece::Started => {
                    self.starts += 1;
                    if self.starts > 1 {
                        self.reset_reports(now.time);
                    }
                }
                Piece::Text { at_ns, text } => result.reports += self.read_text(now.boot_time_of(at_ns), text),
            })
        });
        result.refused = self.tracker.refused().saturating_sub(refused_before);
        match read {
            Some(more) => (result.more, self.log) = (more, Some(log)),
            // The log is not read any more, and the job gets an equal share.
            None => self.read_error = Some("reading its log failed because of a fault in Gainshare".into()),
        }
        if let Some(note) = self.collector.as_mut().and_then(GuardedCollector::take_note) {
            self.read_error = Some(note);
        }
        let is_late = |since: Time| now.time.since(since) >= MAX_HISTORY_WAIT;
        if !result.more || self.history_since.is_some_and(is_late) {
            self.history_since = None;
        }
        result
    }

    /// Whether output from before the agent got the job is still being read. No decision is made about the job
    /// before that, because its curve would begin in the middle.
    pub(crate) fn reads_history(&self) -> bool {
        self.history_since.is_some()
    }

    fn read_text(&mut self, at: Time, text: &[u8]) -> u64 {
        if self.pod.settings.collector != wire::CollectorKind::Stdout {
            return 0;
        }
        let Some(collector) = &mut self.collector else { return 0 };
        let update = collector.read(|collector| collector.output(at, text));
        self.apply_update(at, update)
    }

    fn apply_update(&mut self, at: Time, update: gainshare_progress::Update) -> u64 {
        if update.forget {
            self.tracker = self.new_tracker();
            self.pace = PaceTracker::default();
        }
        self.latest_progress = update.progress.or(self.latest_progress);
        let first_step = || update.readings.iter().find_map(|r| r.step).or(update.progress.map(|p| p.step));
        self.first_step = self.first_step.or_else(first_step);
        update.readings.iter().filter(|r| self.tracker.push(at, Sample::from(*r))).count() as u64
    }

    /// Reads the counters of the pod's group; forgets a group that is gone.
    pub(crate) fn measure(&mut self, at: Time, whole: &NodeResources, scratch: &mut [u8; 16 * 1024]) {
        let Some(group) = &mut self.group else { return };
        match group.usage(scratch) {
            Ok(counters) => self.meter.record(at, counters, whole),
            Err(_) => self.group = None,
        }
    }

    /// Whether its traffic is measured.
    pub(crate) fn is_measured(&self) -> bool {
        self.pod.traffic && self.pod.started_ms.is_some()
    }

    /// Lines of its log that could not be read.
    pub(crate) fn dropped(&self) -> u64 {
        self.log.as_ref().map_or(0, ContainerLog::dropped)
    }

    /// When its kubelet can act on a resize at once.
    pub(crate) fn kubelet_ready_at(&self) -> Time {
        self.kubelet.ready_at
    }

    /// Whether it is starting: what that takes makes the steps of other pods longer.
    pub(crate) fn is_starting(&self, now: Time) -> bool {
        now.since(self.since) < STARTING
    }

    /// Whether the job takes part in the node's decisions.
    pub(crate) fn takes_part(&self) -> bool {
        self.pod.blocked.is_none() && self.pod.started_ms.is_some()
    }

    /// What the job's reports amount to, with its pace.
    pub(crate) fn signal(&self) -> Signal {
        Signal { pace: self.pace.pace(), ..self.tracker.signal() }
    }

    /// How far the job has come, if it has reported.
    pub(crate) fn finished(&self) -> Option<wire::FinishedPod> {
        let steps = self.tracker.signal().position() as u64;
        let (uid, container) = (self.pod.uid.clone(), self.pod.container.clone());
        (steps > 0).then_some(wire::FinishedPod { uid, container, steps })
    }

    pub(crate) fn view(&self, now: Moment) -> JobView {
        // What the runs consumed is not known; steps are enough for a job that reports.
        let run = |steps: &u64| FinishedRun { steps: Some(*steps), claimed: None, claimed_by: None, core_s: 0.0 };
        JobView {
            id: self.id,
            owner: OwnerId(0),
            arrived: self.since,
            phase: Phase::Running { node: THIS_NODE, since: self.since, attempt: self.starts.max(1) },
            signal: self.signal(),
            consumed_node_s: self.meter.consumed(),
            floor: Share::clamped(self.pod.settings.floor),
            history: self.pod.earlier_steps.iter().map(run).collect(),
            deadline: self.pod.deadline.map(|deadline| now.deadline(deadline)),
            ..JobView::default()
        }
    }

    /// Publishes the latest verdict; `true` if it puts the job into another category.
    pub(crate) fn publish_verdict(&mut self) -> bool {
        let category = |verdict: &Option<Verdict>| verdict.as_ref().map(|v| v.category);
        let has_changed = category(&self.published) != category(&self.verdict);
        self.published = self.verdict.clone();
        has_changed
    }

    /// The job's state for the operator.
    pub(crate) fn state(&self) -> wire::JobReport {
        let signal = self.signal();
        let verdict = self.published.as_ref();
        let cause = match (&self.pod.blocked, &self.read_error, verdict) {
            (Some(blocked), ..) => {
                ShareReason::Blocked { obstacle: blocked.reason.clone(), message: blocked.message.clone() }
            }
            (None, Some(read_error), _) => ShareReason::Unreadable { error: read_error.clone() },
            (None, None, Some(verdict)) => ShareReason::Decided(verdict.reason),
            (None, None, None) if self.pod.started_ms.is_none() => ShareReason::NotRunning,
            (None, None, None) => ShareReason::NotDecided,
        };
        let report = |r: gainshare_core::signal::TimedValue| wire::ReportedValue { value: r.value, at_us: r.at.0 };
        let consumed = self.meter.consumed();
        let wire_signal = wire::ReportedSignal {
            reports: signal.reports,
            first: signal.first.map(report),
            last: signal.last.map(report),
            longest_gap_us: signal.longest_gap.0,
            step: signal.step,
            total: signal.total,
            outlook: signal.outlook.map(|o| [o.at, o.flat_at, o.gain_left]),
            consumed_cpu_node_s: consumed.cpu,
            consumed_memory_node_s: consumed.memory,
            memory_used_bytes: self.meter.memory_bytes(),
            usable: self.usable,
            left: work_left(&signal),
            traffic: self.traffic.rate(),
        };
        wire::JobReport {
            uid: self.pod.uid.clone(),
            container: self.pod.container.clone(),
            signal: self.pod.follow.then_some(wire_signal),
            category: verdict.map(|v| v.category.into()).unwrap_or_default(),
            growth: verdict.and_then(|v| v.growth.cpu),
            progress: wire::Progress {
                step: self.latest_progress.map(|c| c.step).or(signal.step),
                first_step: self.first_step,
                total: self.latest_progress.and_then(|c| c.total).or(signal.total),
                metric: self.collector.as_ref().and_then(|c| c.metric()).map(str::to_owned),
                value: signal.last.map(|r| r.value),
            },
            share: verdict.and_then(|v| v.target).map(|t| t.share.cpu.get()),
            reason: cause.to_string(),
            cause: Some(cause),
            forecast: self.forecast,
            deadline_state: self.deadline_state,
            gpu: self.gpu_pacing,
        }
    }
}

/// What the job has left to do, where its pace and its steps left are known.
fn work_left(signal: &Signal) -> Option<wire::WorkLeft> {
    let (pace, steps) = (signal.pace?, signal.steps_left()?);
    let time = pace.time_s(steps, pace.usable);
    Some(wire::WorkLeft {
        parallel_node_s: pace.parallel_s * steps.mid,
        serial_s: pace.serial_s * steps.mid,
        usable: pace.usable,
        spread: if time.mid > 0.0 { time.high / time.mid - 1.0 } else { 0.0 },
    })
}

/// Where and how the job's metric is read.
fn metric_spec(settings: &wire::Settings) -> MetricSpec {
    let source = match settings.collector {
        wire::CollectorKind::File => Source::File,
        wire::CollectorKind::Tensorboard => Source::Tensorboard,
        wire::CollectorKind::Stdout | wire::CollectorKind::None => Source::Output,
    };
    let path = settings.path.clone().filter(|_| source != Source::Output);
    let goal = settings.maximize.map(|maximize| if maximize { Goal::Maximize } else { Goal::Minimize });
    MetricSpec { source, name: settings.metric.clone(), goal, pattern: settings.pattern.clone(), path, url: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(unix_s: u64) -> Moment {
        Moment { time: Time::from_secs_f64(100.0), unix_ns: unix_s * 1_000_000_000 }
    }

    #[test]
    fn deadlines_come_and_go_on_the_boot_clock() {
        let deadline = Deadline { at_ms: 50_000, tolerance_ms: 1_000 };
        let at = |unix_s| moment(unix_s).deadline(deadline).at.as_secs_f64();
        assert!((at(40) - 110.0).abs() < 1e-6 && (at(70) - 80.0).abs() < 1e-6);
        // The boot clock began after the deadline.
        assert!(at(10_000).abs() < 1e-6);
        assert_eq!(moment(40).deadline(deadline).tolerance, Span::from_secs(1));
    }

    #[test]
    fn a_kubelet_handles_one_change_a_period_and_waiting_changes_together() {
        let s = Time::from_secs_f64;
        let mut kubelet = KubeletTiming::after(s(10.0));
        assert_eq!(kubelet.ready_at, s(11.1));
        kubelet.add_change(s(20.0));
        assert_eq!((kubelet.handles_at, kubelet.ready_at), (s(20.0), s(21.1)));
        // The next change waits for the end of the period, and the one after it is handled with it.
        kubelet.add_change(s(20.3));
        kubelet.add_change(s(20.9));
        assert_eq!((kubelet.handles_at, kubelet.ready_at), (s(21.1), s(22.2)));
        kubelet.add_change(s(21.5));
        assert_eq!(kubelet.ready_at, s(23.3));
    }
}
