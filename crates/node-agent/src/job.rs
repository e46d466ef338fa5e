//! One selected pod as its node sees it: what it prints, what it uses, where it stands.
//!
//! Times in logs are the node's wall clock; decisions run on the boot clock, which nobody can set. A report
//! that was printed a while ago (an agent that has just started reads a job's history) is placed as far
//! back as its stamp lies behind the wall clock now, never in the future.

use super::logs::{ContainerLog, Piece};
use super::volumes::Volumes;
use gainshare_core::model::{JobId, NodeId, OwnerId, Share, Span, Time};
use gainshare_core::plan::Verdict;
use gainshare_core::signal::{Sample, Tracker};
use gainshare_core::view::{JobView, Phase};
use gainshare_kube_api::wire::{self, PodOnNode};
use gainshare_limits::cgroup::Group;
use gainshare_limits::usage::{Meter, NodeResources};
use gainshare_progress::{CollectorState, Goal, GuardedCollector, MetricSpec, Source, contain_panic};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The agent has one node: its own.
pub(crate) const HERE: NodeId = NodeId(0);

/// How often kubelets look at their runtime, and a little more.
const LOOKS_EVERY: Span = Span::from_millis(1100);

/// Between two searches for a file that is not there yet.
const SEARCH_PACE: Span = Span::from_secs(2);

/// A pod that started less than this ago has just been started.
const YOUNG: Span = Span::from_secs(5);

/// One moment on the clock of decisions and on the wall.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    pub(crate) time: Time,
    /// Nanoseconds since 1970.
    pub(crate) unix_ns: u64,
}

impl Now {
    /// When a wall clock that reads what ours reads would have shown `unix_ns`.
    pub(crate) fn place(&self, unix_ns: u64) -> Time {
        Time(self.time.0.saturating_sub(self.unix_ns.saturating_sub(unix_ns) / 1000))
    }
}

/// When the pod's kubelet is ready for the next change. It handles a change to a pod only if it has looked
/// at the runtime since the change before; changes that come while one waits for that are handled together
/// with it.
#[derive(Debug, Clone, Copy)]
struct Kubelet {
    handles: Time,
    ready: Time,
}

impl Kubelet {
    fn after(change: Time) -> Kubelet {
        Kubelet { handles: change, ready: change + LOOKS_EVERY }
    }

    fn gets_work(&mut self, at: Time) {
        if at >= self.handles {
            *self = Kubelet::after(at.max(self.ready));
        }
    }
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) pod: PodOnNode,
    pub(crate) group: Option<Group>,
    pub(crate) meter: Meter,
    pub(crate) verdict: Option<Verdict>,
    /// The verdict that is shown to users. It is published only after its resize, because a note on the pod
    /// that comes first delays the kubelet by up to a second (decision 9).
    pub(crate) published: Option<Verdict>,
    /// The most of the node it can use, as far as decisions have shown.
    pub(crate) most: Option<f64>,
    log: Option<ContainerLog>,
    collector: Option<GuardedCollector>,
    /// Why the job's reports cannot be read, if so.
    trouble: Option<String>,
    /// When the file that it is to write is looked for again.
    next_search: Time,
    tracker: Tracker,
    course: Option<gainshare_progress::Progress>,
    starts: u32,
    since: Time,
    /// When the agent first knew the job, until all that it had printed before is read.
    reads_history_since: Option<Time>,
    kubelet: Kubelet,
}

/// A job that prints faster than its log can be read is judged by what was read after this time.
const LONGEST_HISTORY: Span = Span::from_secs(10);

/// What one look at a job's output gave.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Looked {
    pub(crate) reports: u64,
    pub(crate) refused: u64,
    /// There is more to read.
    pub(crate) more: bool,
}

impl Job {
    pub(crate) fn new(id: JobId, pod: PodOnNode, logs: &Path, now: Now) -> Job {
        let since = pod.started_ms.map_or(now.time, |ms| now.place(ms.saturating_mul(1_000_000)));
        let mut job = Job {
            id,
            log: ContainerLog::new(logs, &pod.namespace, &pod.name, &pod.uid, &pod.container),
            pod,
            group: None,
            meter: Meter::default(),
            verdict: None,
            published: None,
            most: None,
            collector: None,
            trouble: None,
            next_search: Time::ZERO,
            tracker: Tracker::default(),
            course: None,
            starts: 0,
            since,
            reads_history_since: Some(now.time),
            // The kubelet says that a container runs after its next look at it; of others we hear because we are new.
            kubelet: Kubelet::after(if now.time.since(since) < YOUNG { now.time } else { since }),
        };
        job.begin(since);
        job
    }

    /// Takes the operator's newer description of the same pod.
    pub(crate) fn update(&mut self, pod: PodOnNode, logs: &Path, now: Now) {
        let before = &self.pod;
        let same_reports = before.container == pod.container
            && metric_spec(&before.settings) == metric_spec(&pod.settings)
            && before.settings.collector == pod.settings.collector;
        let work = |pod: &PodOnNode| (pod.started_ms, pod.now, pod.noted);
        if work(before) != work(&pod) {
            self.kubelet.gets_work(now.time);
        }
        if same_reports {
            self.pod = pod;
        } else {
            // Another metric is another curve: everything printed so far is read again with the new eyes.
            let id = self.id;
            let (group, meter, kubelet) = (self.group.take(), self.meter, self.kubelet);
            *self = Job { group, meter, kubelet, ..Job::new(id, pod, logs, now) };
        }
    }

    /// A start of the container: nothing that was reported before counts.
    fn begin(&mut self, at: Time) {
        self.since = at;
        self.tracker = Tracker::default();
        self.course = None;
        self.trouble = None;
        self.collector = None;
        self.next_search = Time::ZERO;
        if self.pod.settings.collector == wire::Collector::Stdout {
            self.collect_from(None);
        }
    }

    fn collect_from(&mut self, folder: Option<&Path>) {
        let started = SystemTime::UNIX_EPOCH + Duration::from_millis(self.pod.started_ms.unwrap_or(0));
        match GuardedCollector::new(&metric_spec(&self.pod.settings), folder, started, CollectorState::default()) {
            Ok(collector) => (self.collector, self.trouble) = (Some(collector), None),
            Err(error) => self.trouble = Some(error.to_string()),
        }
    }

    /// Reads the files that the job is to write its progress into.
    fn read_files(&mut self, now: Time, volumes: &Volumes) -> u64 {
        if !matches!(self.pod.settings.collector, wire::Collector::File | wire::Collector::Tensorboard) {
            return 0;
        }
        if self.collector.is_none() && now >= self.next_search {
            self.next_search = now + SEARCH_PACE;
            let path = self.pod.settings.path.as_deref().unwrap_or(".");
            match volumes.find(&self.pod.uid, path) {
                Ok(folder) => self.collect_from(Some(&folder)),
                Err(why) => self.trouble = Some(why),
            }
        }
        let Some(collector) = &mut self.collector else { return 0 };
        let update = collector.read(|collector| collector.poll(now));
        self.take(now, update)
    }

    /// Reads what the container printed, and wrote, since the last look.
    pub(crate) fn look(&mut self, now: Now, volumes: &Volumes) -> Looked {
        if let Some(collector) = &mut self.collector {
            collector.begin_round(now.time);
        }
        let mut looked = Looked { reports: self.read_files(now.time, volumes), ..Looked::default() };
        // Taken out while it hands us what it reads.
        let Some(mut log) = self.log.take() else {
            self.reads_history_since = None;
            return looked;
        };
        let refused_before = self.tracker.refused();
        let read = contain_panic(|| {
            log.look(now.time, |piece| match piece {
                Piece::Started => {
                    self.starts += 1;
                    if self.starts > 1 {
                        self.begin(now.time);
                    }
                }
                Piece::Text { at_ns, text } => looked.reports += self.hear(now.place(at_ns), text),
            })
        });
        looked.refused = self.tracker.refused().saturating_sub(refused_before);
        match read {
            Some(more) => (looked.more, self.log) = (more, Some(log)),
            // The log is not read any more; the job goes on with its fair share.
            None => self.trouble = Some("reading its log failed, which is a fault of gainshare".into()),
        }
        if let Some(note) = self.collector.as_mut().and_then(GuardedCollector::take_note) {
            self.trouble = Some(note);
        }
        let is_late = |since: Time| now.time.since(since) >= LONGEST_HISTORY;
        if !looked.more || self.reads_history_since.is_some_and(is_late) {
            self.reads_history_since = None;
        }
        looked
    }

    /// Whether output from before the agent knew the job is still being read. No decision is made about the job
    /// before, because its curve would begin in the middle.
    pub(crate) fn reads_history(&self) -> bool {
        self.reads_history_since.is_some()
    }

    fn hear(&mut self, at: Time, text: &[u8]) -> u64 {
        if self.pod.settings.collector != wire::Collector::Stdout {
            return 0;
        }
        let Some(collector) = &mut self.collector else { return 0 };
        let update = collector.read(|collector| collector.output(at, text));
        self.take(at, update)
    }

    fn take(&mut self, at: Time, update: gainshare_progress::Update) -> u64 {
        if update.forget {
            self.tracker = Tracker::default();
        }
        self.course = update.progress.or(self.course);
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

    /// Lines of its log that nobody could read.
    pub(crate) fn dropped(&self) -> u64 {
        self.log.as_ref().map_or(0, ContainerLog::dropped)
    }

    /// From when on its kubelet would act on a resize at once.
    pub(crate) fn quiet_at(&self) -> Time {
        self.kubelet.ready
    }

    /// Whether the job takes part in the node's decisions.
    pub(crate) fn takes_part(&self) -> bool {
        self.pod.blocked.is_none() && self.pod.started_ms.is_some()
    }

    pub(crate) fn view(&self) -> JobView {
        JobView {
            id: self.id,
            owner: OwnerId(0),
            arrived: self.since,
            phase: Phase::Running { node: HERE, since: self.since, attempt: self.starts.max(1) },
            signal: self.tracker.signal(),
            consumed: self.meter.consumed(),
            floor: Share::clamped(self.pod.settings.floor),
            max: Share::FULL,
            priority: 0,
            waits_for: Vec::new(),
            pinned: false,
            usable: None,
            known_left_s: None,
            deadline: None,
        }
    }

    /// From now on people may know the latest verdict; `true` if it puts the job into another category.
    pub(crate) fn say(&mut self) -> bool {
        let category = |verdict: &Option<Verdict>| verdict.as_ref().map(|v| v.category);
        let turned = category(&self.published) != category(&self.verdict);
        self.published = self.verdict.clone();
        turned
    }

    /// What people should know.
    pub(crate) fn state(&self) -> wire::JobState {
        let signal = self.tracker.signal();
        let verdict = self.published.as_ref();
        let reason = match (&self.pod.blocked, &self.trouble, verdict) {
            (Some(blocked), ..) => blocked.message.clone(),
            (None, Some(trouble), _) => format!("its reports cannot be read: {trouble}"),
            (None, None, Some(verdict)) => verdict.reason.to_string(),
            (None, None, None) if self.pod.started_ms.is_none() => "its container does not run".into(),
            (None, None, None) => "not decided yet".into(),
        };
        let report = |r: gainshare_core::signal::Report| wire::Report { value: r.value, at_us: r.at.0 };
        let consumed = self.meter.consumed();
        let told = wire::Signal {
            reports: signal.reports,
            first: signal.first.map(report),
            last: signal.last.map(report),
            longest_gap_us: signal.longest_gap.0,
            step: signal.step,
            total: signal.total,
            outlook: signal.outlook.map(|o| [o.at, o.flat_at, o.gain_left]),
            consumed_cpu: consumed.cpu,
            consumed_memory: consumed.memory,
            most: self.most,
        };
        wire::JobState {
            uid: self.pod.uid.clone(),
            container: self.pod.container.clone(),
            signal: self.pod.follow.then_some(told),
            category: verdict.map(|v| v.category.into()).unwrap_or_default(),
            growth: verdict.and_then(|v| v.growth.cpu),
            progress: wire::Progress {
                step: self.course.map(|c| c.step).or(signal.step),
                total: self.course.and_then(|c| c.total).or(signal.total),
                metric: self.collector.as_ref().and_then(|c| c.metric()).map(str::to_owned),
                value: signal.last.map(|r| r.value),
            },
            share: verdict.and_then(|v| v.target).map(|t| t.share.cpu.get()),
            reason,
        }
    }
}

/// Where the job's evaluation function is found.
fn metric_spec(settings: &wire::Settings) -> MetricSpec {
    let source = match settings.collector {
        wire::Collector::File => Source::File,
        wire::Collector::Tensorboard => Source::Tensorboard,
        wire::Collector::Stdout | wire::Collector::None => Source::Output,
    };
    let path = settings.path.clone().filter(|_| source != Source::Output);
    let goal = settings.maximize.map(|maximize| if maximize { Goal::Maximize } else { Goal::Minimize });
    MetricSpec { source, name: settings.metric.clone(), goal, pattern: settings.pattern.clone(), path, url: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_handles_one_change_after_each_look_and_those_that_wait_together() {
        let s = Time::from_secs_f64;
        let mut kubelet = Kubelet::after(s(10.0));
        assert_eq!(kubelet.ready, s(11.1));
        kubelet.gets_work(s(20.0));
        assert_eq!((kubelet.handles, kubelet.ready), (s(20.0), s(21.1)));
        // The next waits for the look, and the one after it goes with it.
        kubelet.gets_work(s(20.3));
        kubelet.gets_work(s(20.9));
        assert_eq!((kubelet.handles, kubelet.ready), (s(21.1), s(22.2)));
        kubelet.gets_work(s(21.5));
        assert_eq!(kubelet.ready, s(23.3));
    }
}
