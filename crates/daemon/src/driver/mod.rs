//! The driver: one thread that owns all that changes.
//!
//! **Problem.** Jobs come, report and end; decisions fall due; people ask; and everything must be on disk before it takes effect. Done by
//! several threads this needs locks and orders between them; done by one it is a loop.
//!
//! **How.** The loop sleeps in `poll(2)` until a supervisor writes a file (inotify), somebody sends a task (an event descriptor), or the
//! next thing is due. A task is a closure over the driver, sent by an API handler that waits for its answer. After each wake-up: tasks,
//! files, reports, a decision if one is due, and once a second the lease, the samples' commit and a look at who is still alive.
//!
//! **Terms.** *Facts* (a job ended) are true whether or not the disk takes them: they are kept until it does. *Intents* (a submission, a
//! plan, a start) become true by being written: without the disk they are refused or put off.

mod adopt;
mod docker;
mod jobs;
mod lease;
mod life;
mod plans;
mod report;
mod reports;
mod runtimes;
mod start;
mod watch;

pub(crate) use lease::{LeaseContent, lapsed_epoch};
pub(crate) use life::is_locked;

use crate::api::Token;
use crate::api::types::{DecisionInfo, Event, PlanInfo};
use crate::clock::Clock;
use crate::config::DaemonConfig;
use crate::error::{DaemonError, Refusal};
use crate::journal::{Batch, Journal};
use crate::metrics::Metrics;
use crate::paths::Paths;
use crate::record::{Change, JobRecord};
use gainshare_core::decider::{Decider, Decision};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::plan::Verdict;
use gainshare_core::replay::RecordedDecision;
use gainshare_limits::{AppliedLimits, JobHandle, RuntimeKind};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::process::Child;
use std::sync::{Arc, mpsc};
use tokio::sync::{broadcast, oneshot, watch as tokio_watch};

/// How often the lease is renewed, samples are committed and the living are counted.
const HEARTBEAT: Span = Span::from_secs(1);

/// A job's output is read at most so often: enough for any reaction, and a flood costs little.
const OUTPUT_PACE: Span = Span::from_millis(25);

/// Where nothing tells us about changes (files of the job's own, jobs without a watch) we look so often.
const LOOK_PACE: Span = Span::from_secs(1);

/// Events that a slow reader may lag behind before it misses some.
const EVENT_BACKLOG: usize = 1024;

/// Plans kept for the API without asking the journal.
const RECENT_PLANS: usize = 32;

type Task = Box<dyn FnOnce(&mut Driver) + Send>;

/// How other threads speak to the driver.
#[derive(Clone)]
pub(crate) struct DriverHandle {
    tasks: mpsc::Sender<Task>,
    wake: Arc<EventFd>,
    events: broadcast::Sender<Arc<Event>>,
    changes: tokio_watch::Receiver<u64>,
}

impl DriverHandle {
    /// Runs `question` on the driver's thread and waits for its answer.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Driver) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        use crate::api::types::ErrorCode;
        let (reply, answer) = oneshot::channel();
        let task: Task = Box::new(move |driver| drop(reply.send(question(driver))));
        let ended = || Refusal::new(ErrorCode::ShuttingDown, "the daemon is shutting down: try again when it is back");
        self.tasks.send(task).map_err(|_| ended())?;
        let _ = self.wake.write(1);
        answer.await.map_err(|_| ended())
    }

    /// Sends without waiting; for whoever forwards events from other sources.
    pub(crate) fn tell(&self, news: impl FnOnce(&mut Driver) + Send + 'static) {
        if self.tasks.send(Box::new(news)).is_ok() {
            let _ = self.wake.write(1);
        }
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Arc<Event>> {
        self.events.subscribe()
    }

    /// Counts changes of the jobs' states, for long polls.
    pub(crate) fn changes(&self) -> tokio_watch::Receiver<u64> {
        self.changes.clone()
    }
}

/// One job, with what is known of it beyond the record.
struct Job {
    record: JobRecord,
    progress: reports::Progress,
    /// Present while the job is live.
    reports: Option<reports::Reports>,
    /// Copies a container's output.
    pump: Option<docker::Pump>,
    verdict: Option<Verdict>,
    in_force: Option<AppliedLimits>,
    apply_error: Option<String>,
    /// Newest last.
    decisions: VecDeque<DecisionInfo>,
    /// The last decision that was about this job, for replay; jobs that are decided together share it. Kept while the job is live.
    record_of_decision: Option<Arc<RecordedDecision>>,
    /// After this the job is killed.
    kill_at: Option<Time>,
    /// When its supervisor was last heard of while it waits or starts.
    heard: Time,
    /// When its leader was first found dead without an exit.json.
    missed: Option<Time>,
    /// Output was written since the last look.
    dirty: bool,
    next_look: Time,
    last_look: Time,
    /// When a sample was last put on the event stream.
    told: Time,
    /// The position changed since it was last committed.
    unsaved: bool,
}

impl Job {
    fn new(record: JobRecord, now: Time) -> Job {
        Job {
            record,
            progress: reports::Progress { stride: 1, ..Default::default() },
            reports: None,
            pump: None,
            verdict: None,
            in_force: None,
            apply_error: None,
            decisions: VecDeque::new(),
            record_of_decision: None,
            kill_at: None,
            heard: now,
            missed: None,
            dirty: true,
            next_look: now,
            last_look: Time::ZERO,
            told: Time::ZERO,
            unsaved: false,
        }
    }

    /// How its runtime knows it, once there is something to know.
    fn handle(&self) -> Option<JobHandle> {
        match self.record.spec.runtime {
            RuntimeKind::Process => self.record.group.as_ref().map(|g| g.handle.clone()),
            RuntimeKind::Docker => self.record.container.clone().map(|key| JobHandle { job: self.record.id, key }),
        }
    }
}

/// Why and how the loop ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ending {
    stop_jobs: bool,
    since: Time,
}

/// See the module documentation.
pub(crate) struct Driver {
    config: DaemonConfig,
    paths: Paths,
    journal: Journal,
    clock: Clock,
    control: Decider,
    runtimes: runtimes::Runtimes,
    jobs: BTreeMap<JobId, Job>,
    owners: Vec<String>,
    watch: watch::Watch,
    lease: lease::Lease,
    children: Vec<(JobId, Child)>,
    metrics: Arc<Metrics>,
    listen: Option<SocketAddr>,
    token: Token,
    /// Facts and samples that the disk does not have yet.
    unsaved: Batch,
    control_unsaved: bool,
    /// Jobs that the plan started but that could not be started yet.
    starts: Vec<JobId>,
    /// A plan that waits for the disk.
    held_plan: Option<Decision>,
    /// Something happened that control should look at.
    wants_decision: bool,
    /// The last decision that was carried out, for replay.
    last_record: Option<Arc<RecordedDecision>>,
    recent_plans: VecDeque<PlanInfo>,
    /// What is wrong at the moment, for `health`.
    problems: BTreeMap<&'static str, String>,
    next_beat: Time,
    next_engine: Time,
    /// When limits were last written or found to be as wanted.
    applied_at: Time,
    idle_since: Time,
    began: Time,
    ending: Option<Ending>,
    tasks: mpsc::Receiver<Task>,
    wake: Arc<EventFd>,
    events: broadcast::Sender<Arc<Event>>,
    changes: tokio_watch::Sender<u64>,
    /// For threads that work for the driver.
    handle: DriverHandle,
}

impl Driver {
    /// Reads the journal, finds the jobs that still run and is ready to loop.
    pub(crate) fn open(
        config: DaemonConfig,
        paths: Paths,
        journal: Journal,
        metrics: Arc<Metrics>,
        listen: Option<SocketAddr>,
        token: Token,
    ) -> Result<(Driver, DriverHandle), DaemonError> {
        let policy = config.policy()?;
        let loaded = journal.load()?;
        let mut control = match loaded.control {
            Some(kept) if *kept.policy() == policy => kept,
            _ => Decider::new(policy),
        };
        let last_generation = loaded.plans.iter().map(|(_, p)| p.generation).max().unwrap_or(0);
        control.continue_from(last_generation);
        let runtimes = runtimes::Runtimes::open(&config, &paths)?;
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(|e| DaemonError::Io { action: "make", path: "an event descriptor".into(), source: e.into() })?;
        let wake = Arc::new(wake);
        let (task_sender, tasks) = mpsc::channel();
        let (events, _) = broadcast::channel(EVENT_BACKLOG);
        let (changes, changed) = tokio_watch::channel(0);
        let handle = DriverHandle { tasks: task_sender, wake: wake.clone(), events: events.clone(), changes: changed };
        let clock = journal.clock().clone();
        let now = clock.now();
        let lease = lease::Lease::new(&paths, journal.epoch(), &config);
        let mut driver = Driver {
            config,
            paths,
            journal,
            clock,
            control,
            runtimes,
            jobs: BTreeMap::new(),
            owners: loaded.owners,
            watch: watch::Watch::new(),
            lease,
            children: Vec::new(),
            metrics,
            listen,
            token,
            unsaved: Batch::default(),
            control_unsaved: false,
            starts: Vec::new(),
            held_plan: None,
            wants_decision: true,
            last_record: None,
            recent_plans: VecDeque::new(),
            problems: BTreeMap::new(),
            next_beat: now,
            next_engine: Time::ZERO,
            applied_at: Time::ZERO,
            idle_since: now,
            began: now,
            ending: None,
            tasks,
            wake,
            events,
            changes,
            handle: handle.clone(),
        };
        if loaded.unclean {
            tracing::info!("the last daemon did not end properly: going on from its journal");
        }
        driver.fact(None, Change::Opened { epoch: driver.journal.epoch(), pid: std::process::id() });
        driver.look_for_docker();
        driver.restore(loaded.jobs, loaded.plans);
        Ok((driver, handle))
    }

    /// Loops until told to end.
    pub(crate) fn run(mut self) {
        self.lease.renew();
        self.lease.keep_guard(&self.paths, &self.config);
        loop {
            self.sleep();
            while let Ok(task) = self.tasks.try_recv() {
                task(&mut self);
            }
            self.look_at_files();
            self.look_at_reports();
            let now = self.now();
            if now >= self.next_beat {
                self.next_beat = now + HEARTBEAT;
                self.beat();
            }
            self.decide();
            if self.is_over() {
                break;
            }
        }
        self.close();
    }

    pub(crate) fn live_jobs(&self) -> usize {
        self.jobs.values().filter(|j| j.record.is_live()).count()
    }

    pub(crate) fn is_live(&self, id: JobId) -> bool {
        self.jobs.get(&id).is_some_and(|j| j.record.is_live())
    }

    fn now(&self) -> Time {
        self.clock.now()
    }

    /// Sleeps until there is something to do.
    fn sleep(&mut self) {
        let now = self.now();
        let mut until = self.next_beat;
        if let Some(due) = self.control.due() {
            until = until.min(due);
        }
        for job in self.jobs.values().filter(|j| j.reports.is_some()) {
            let look = if job.dirty { job.last_look + OUTPUT_PACE } else { job.next_look };
            until = until.min(look);
            until = job.kill_at.map_or(until, |at| until.min(at));
        }
        if self.wants_decision {
            until = now;
        }
        // Rounded up: waking a fraction of a millisecond early would only mean to sleep again.
        let ms = until.since(now).0.div_ceil(1000);
        let timeout = PollTimeout::from(u16::try_from(ms).unwrap_or(u16::MAX));
        let mut fds = vec![PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.watch.fd().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let _ = poll(&mut fds, timeout);
        let _ = self.wake.read();
    }

    /// Notes what has happened: it is true at once, and on disk as soon as the disk takes it.
    fn fact(&mut self, job: Option<JobId>, change: Change) {
        let at = self.clock.moment();
        if let Some(job) = job.and_then(|id| self.jobs.get_mut(&id)) {
            job.record.take(at, &change);
            let record = job.record.clone();
            self.unsaved.records.retain(|r| r.id != record.id);
            self.unsaved.records.push(record);
        }
        self.unsaved.changes.push((at, job, change));
    }

    /// Writes all that is unsaved; on failure everything stays unsaved.
    fn save(&mut self) -> Result<(), Refusal> {
        let result = self.save_with(Batch::default());
        self.note_disk(&result);
        result
    }

    /// Writes an intent together with everything unsaved before it.
    fn save_with(&mut self, intent: Batch) -> Result<(), Refusal> {
        // Only the driver itself makes samples and positions; an intent never carries any.
        let Batch { changes, records, limits, released, .. } = intent;
        let counts = (self.unsaved.changes.len(), self.unsaved.limits.len(), self.unsaved.released.len());
        let old_records = self.unsaved.records.clone();
        self.unsaved.changes.extend(changes);
        for record in records {
            self.unsaved.records.retain(|r| r.id != record.id);
            self.unsaved.records.push(record);
        }
        self.unsaved.limits.extend(limits);
        self.unsaved.released.extend(released);
        self.unsaved.control = self.control_unsaved.then(|| self.control.clone());
        for (id, job) in self.jobs.iter().filter(|(_, j)| j.unsaved) {
            self.unsaved.positions.push((*id, job.position()));
        }
        let begun = std::time::Instant::now();
        let result = self.journal.commit(&self.unsaved);
        self.metrics.journal_seconds.observe(begun.elapsed().as_secs_f64());
        match result {
            Ok(()) => {
                self.unsaved = Batch::default();
                self.control_unsaved = false;
                self.jobs.values_mut().for_each(|j| j.unsaved = false);
                Ok(())
            }
            Err(e) => {
                // The intent did not happen; the facts stay until the disk takes them.
                self.unsaved.changes.truncate(counts.0);
                self.unsaved.limits.truncate(counts.1);
                self.unsaved.released.truncate(counts.2);
                self.unsaved.records = old_records;
                self.unsaved.positions.clear();
                self.unsaved.control = None;
                Err(e.into())
            }
        }
    }

    /// Keeps `health` honest about the disk.
    fn note_disk<T>(&mut self, result: &Result<T, Refusal>) {
        match result {
            Ok(_) => {
                if self.problems.remove("journal").is_some() {
                    tracing::info!("the journal can be written again");
                }
            }
            Err(e) => {
                if self.problems.insert("journal", e.message.clone()).is_none() {
                    tracing::error!("{e}");
                }
            }
        }
    }

    fn emit(&self, event: Event) {
        // Nobody listening is no error.
        let _ = self.events.send(Arc::new(event));
    }

    /// A job came, changed its state or went.
    fn job_changed(&mut self, id: JobId) {
        self.wants_decision = true;
        self.changes.send_modify(|n| *n += 1);
        if self.events.receiver_count() > 0
            && let Some(job) = self.jobs.get(&id)
        {
            let job = Box::new(self.info(job));
            self.emit(Event::Job { job });
        }
    }

    /// Once a second.
    fn beat(&mut self) {
        if self.lease.has_lapsed() {
            self.recover_from_lapse();
        }
        self.lease.renew();
        self.lease.keep_guard(&self.paths, &self.config);
        self.reap();
        self.look_after_the_living();
        self.look_for_docker();
        self.retry_starts();
        if !self.unsaved.is_empty() || self.control_unsaved || self.jobs.values().any(|j| j.unsaved) {
            crate::fail::point("samples-before-journal");
            let _ = self.save();
            crate::fail::point("samples-after-journal");
        }
        self.forget_old();
        self.end_when_idle();
    }
}
