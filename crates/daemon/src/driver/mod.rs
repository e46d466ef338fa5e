//! The driver: one thread that owns all that changes.
//!
//! **Problem.** Jobs come, report and end; decisions fall due; clients ask; and everything must be
//! on disk before it takes effect. Done by several threads this needs locks and orders between
//! them; done by one it is a loop.
//!
//! **How.** The loop sleeps in `poll(2)` until a supervisor writes a file (inotify), a task arrives
//! (an event descriptor), or the next thing is due. Each round runs a bounded number of tasks,
//! commits what they pushed, reads files and reports, decides if a decision is due, and once a
//! second renews the lease and checks which jobs are still alive. Samples of files are committed
//! every few seconds. Output of many jobs is read together: after a change of a file, the loop waits a moment for
//! further changes. What may block (the container engine, a kill, an endpoint, a file in a job's own folder) runs on
//! other threads, whose results come back as tasks.
//!
//! **Parts.** A part owns its fields and what is done with them; it gets what else it needs as arguments. [`jobs`]: the
//! table of jobs, with earlier runs ([`history`], [`program`]). [`store`]: the way to the journal. [`handle`]: tasks
//! and events. [`runtimes`]: limits, counters, stops and kills; for containers [`docker_link`] and their output
//! [`pump`]. [`files`]: the threads that read jobs' own files. [`watch`]: changes of supervisors' files. [`deadlines`]:
//! predicted ends. [`inside`]: the pages of the library inside jobs ([`page`]) and their teams of threads. [`gpu`]:
//! shares of GPUs; [`gpu_meter`]: memory and time on them; [`gpu_memory`]: jobs that would not fit. [`rhythm`]: steps a
//! second of silent jobs. [`start`]: supervisors and the environment of a start. [`removals`]: folders of forgotten
//! jobs. Two parts are borrowed from others: [`follow`] for reports, [`view`] for what decisions and the API see
//! ([`read`]).
//!
//! **The driver itself** has the loop ([`sleep`]: when it goes on), the order of a round, and what concerns several
//! parts at once: [`intake`]: submit, admission, stop. [`start`]: how a job begins. [`observe`]: starts, ends and kills
//! of jobs. [`decide`]: decisions. [`apply`]: limits. [`recover`]: restarts and lapses. [`rebuild`]: jobs of a lost
//! journal. [`docker`]: containers that come and go.
//!
//! **Properties.** The lease is renewed about once a second, whatever clients do. The driver's thread
//! waits for the disk of the state directory, but not for the file systems of jobs' folders, for the container engine,
//! for processes that die or for the removal of folders; the exception is the daemon's own end. The loop rests while
//! nothing is due, whatever other threads wait for.

mod apply;
mod deadlines;
mod decide;
mod docker;
mod docker_link;
mod files;
mod follow;
mod gpu;
mod gpu_memory;
mod gpu_meter;
mod handle;
mod history;
mod inside;
mod intake;
mod jobs;
mod observe;
mod page;
mod plan_ahead;
mod problems;
mod program;
mod pump;
mod read;
mod rebuild;
mod recover;
mod removals;
mod reports;
mod rhythm;
mod runtimes;
mod sleep;
mod start;
mod store;
mod task_shares;
mod view;
mod watch;

pub(crate) use handle::DriverHandle;
pub(crate) use read::loop_reports;

use crate::clock::Clock;
use crate::config::DaemonConfig;
use crate::error::{DaemonError, Refusal};
use crate::guard::GuardKeeper;
use crate::journal::{Batch, Journal};
use crate::lease::Lease;
use crate::metrics::Metrics;
use crate::paths::Paths;
use crate::pulse::{Pulse, Pulses};
use crate::record::Change;
use crate::token::Token;
use crate::types::{Event, PlanInfo};
use follow::Follower;
use gainshare_core::check::CheckedPlan;
use gainshare_core::decider::{Decider, Decision};
use gainshare_core::model::{JobId, NodeId, Span, Time};
use gainshare_core::policy::Policy;
use gainshare_core::replay::RecordedDecision;
use gainshare_limits::{LimitMode, RuntimeKind};
use handle::Inbox;
use inside::TeamMeter;
use jobs::{Job, JobTable};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use store::Store;
use view::Picture;

/// How often the lease is renewed and live jobs are checked.
const HEARTBEAT: Span = Span::from_secs(1);

/// Shortest time between two readings of a job's output: short enough for any reaction, and a flood costs little.
const OUTPUT_PACE: Span = Span::from_millis(25);

/// Time between two readings of watched files that changed, for all jobs together, while no decision waits for a
/// report.
const WATCH_PACE: Span = Span::from_millis(50);

/// Time between two readings of files that are not watched: the job's own, and all of a job without a watch.
const FILES_PACE: Span = Span::from_secs(1);

/// A daemon has one node: its machine.
const HERE: NodeId = NodeId(0);

/// Plans kept for the API without asking the journal.
const RECENT_PLANS: usize = 32;

/// Why and how the loop ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ending {
    stop_jobs: bool,
    since: Time,
}

/// When things are due, and how the loop ends.
struct Timeline {
    began: Time,
    next_beat: Time,
    idle_since: Time,
    ending: Option<Ending>,
    /// A part of the daemon ended unexpectedly.
    failure: Option<DaemonError>,
}

/// What became of plans.
struct Plans {
    /// Something happened that control should react to.
    is_wanted: bool,
    /// A plan that waits for the disk.
    held: Option<Decision>,
    /// Jobs that the newest plan starts, in order. Each round starts some of them.
    due: VecDeque<JobId>,
    /// Jobs that the plan started but that could not be started yet.
    starts: Vec<JobId>,
    /// The last plan that was carried out.
    current: Option<CheckedPlan>,
    /// The last decision that was carried out, for replay.
    last_record: Option<Arc<RecordedDecision>>,
    /// When all limits were last read back, changed or not.
    checked_at: Time,
    /// When the last decision began.
    decided_at: Time,
    /// Newest first.
    recent: VecDeque<PlanInfo>,
}

impl Plans {
    fn new() -> Plans {
        Plans {
            is_wanted: true,
            held: None,
            due: VecDeque::new(),
            starts: Vec::new(),
            current: None,
            last_record: None,
            checked_at: Time::ZERO,
            decided_at: Time::ZERO,
            recent: VecDeque::new(),
        }
    }
}

/// The decisions go on from what the last daemon kept, if the policy is the same.
fn continue_control(kept: Option<Decider>, policy: Policy, last_generation: u64) -> Decider {
    let mut control = kept.filter(|kept| *kept.policy() == policy).unwrap_or_else(|| Decider::new(policy));
    control.continue_from(last_generation);
    control
}

/// What a job needs to report by itself.
struct PushAccess {
    listen: Option<SocketAddr>,
    token: Token,
}

/// See the module documentation.
pub(crate) struct Driver {
    config: DaemonConfig,
    paths: Paths,
    clock: Clock,
    control: Decider,
    plans: Plans,
    jobs: JobTable,
    store: Store,
    runtimes: runtimes::Runtimes,
    gpus: gpu::Gpus,
    teams: inside::Teams,
    watch: watch::Watch,
    lease: Lease,
    guard: GuardKeeper,
    supervisors: start::Supervisors,
    readers: files::FileReaders,
    submissions: intake::Submissions,
    removals: removals::Removals,
    forecasts: deadlines::Forecasts,
    push_access: PushAccess,
    timeline: Timeline,
    problems: problems::Problems,
    metrics: Arc<Metrics>,
    pulses: Pulses,
    pulse: Pulse,
    inbox: Inbox,
    /// For threads that work for the driver.
    handle: DriverHandle,
}

impl Driver {
    /// Reads the journal, finds the jobs that still run and is ready to loop.
    pub(crate) fn open(
        config: DaemonConfig,
        paths: Paths,
        mut journal: Journal,
        metrics: Arc<Metrics>,
        pulses: Pulses,
        listen: Option<SocketAddr>,
        token: Token,
    ) -> Result<(Driver, DriverHandle), DaemonError> {
        let policy = config.policy()?;
        let mut loaded = journal.load()?;
        let first_free = rebuild::find_lost_jobs(&paths, &mut journal, &mut loaded)?;
        let last_generation = loaded.plans.iter().map(|(_, p)| p.generation).max().unwrap_or(0);
        let control = continue_control(loaded.control, policy, last_generation);
        let runtimes = runtimes::Runtimes::open(&config, &paths)?;
        let (inbox, handle) = Inbox::new().map_err(|source| DaemonError::Io {
            action: "make",
            path: "an event descriptor".into(),
            source,
        })?;
        let clock = journal.clock().clone();
        let now = clock.now();
        // Before the first limit is written: a guard of the last daemon puts limits back until it sees a valid lease.
        let lease = Lease::begin(&paths, journal.epoch(), config.lease);
        let (removed, epoch) = (paths.removed(), journal.epoch());
        let mut driver = Driver {
            config,
            paths,
            clock,
            control,
            plans: Plans::new(),
            jobs: JobTable::new(loaded.owners),
            store: Store::new(journal, metrics.clone()),
            runtimes,
            gpus: gpu::Gpus::default(),
            teams: inside::Teams::new(now),
            watch: watch::Watch::new(),
            lease,
            guard: GuardKeeper::new(),
            supervisors: start::Supervisors::default(),
            readers: files::FileReaders::new(handle.clone()),
            submissions: intake::Submissions::new(first_free),
            removals: removals::Removals::new(removed, epoch, handle.clone()),
            forecasts: deadlines::Forecasts::default(),
            push_access: PushAccess { listen, token },
            timeline: Timeline::new(now),
            problems: problems::Problems::default(),
            metrics,
            pulse: pulses.register("driver"),
            pulses,
            inbox,
            handle: handle.clone(),
        };
        if let Some(dropped) = driver.store.journal.dropped() {
            tracing::warn!("the last daemon died while it wrote to the journal: {dropped}");
        }
        if loaded.unclean {
            tracing::info!("the last daemon did not end properly: going on from its journal");
        }
        driver.fact(None, Change::Opened { epoch: driver.store.journal.epoch(), pid: std::process::id() });
        driver.connect_docker();
        driver.restore(loaded.jobs, loaded.plans);
        driver.removals.empty();
        Ok((driver, handle))
    }

    /// Loops until the daemon is asked to end, or a part of it ended unexpectedly.
    pub(crate) fn run(mut self) -> Result<(), DaemonError> {
        self.guard.ensure(&self.paths, &self.config);
        // Read once, so that a job that can never run is refused when it is submitted.
        self.gpus.meter.ask(&self.handle, self.clock.now());
        loop {
            self.sleep();
            self.pulse.beat();
            self.metrics.rounds.inc();
            if self.round() {
                break;
            }
        }
        let failure = self.timeline.failure.take();
        self.close();
        failure.map_or(Ok(()), Err)
    }

    /// Does what is due. Whether this was the last round.
    fn round(&mut self) -> bool {
        self.run_tasks();
        self.read_watched_files();
        self.follower().read_due();
        let now = self.now();
        if now >= self.timeline.next_beat {
            self.timeline.next_beat = now + HEARTBEAT;
            self.beat();
        }
        self.share_gpus_if_due(now);
        self.stop_and_kill();
        let (runtimes, config, scarce) = (&mut self.runtimes, &self.config, self.forecasts.scarce);
        let meter = TeamMeter { runtimes, config, scarce, now };
        if self.teams.watch_serial_jobs(&mut self.jobs, meter) {
            self.write_pages();
        }
        self.decide();
        self.start_jobs();
        self.timeline.failure.is_some() || self.timeline.is_over(self.jobs.live_count(), now)
    }

    /// A thread or task that should live as long as the daemon ended: the daemon ends, and its
    /// successor starts all parts.
    pub(crate) fn part_ended(&mut self, part: &'static str) {
        tracing::error!("{part} ended unexpectedly: ending the daemon; jobs go on");
        let why = "see the daemon's log for a panic before this".to_owned();
        self.timeline.failure.get_or_insert(DaemonError::PartEnded { part, why });
    }

    /// Follows a job's directory and reports from now on.
    fn follow(&mut self, id: JobId) {
        self.jobs.find_earlier_runs(id, self.runtimes.cores(&self.config));
        let dir = self.paths.job(id.0);
        self.follower().begin(id, &dir);
    }

    /// What reports concern.
    pub(crate) fn follower(&mut self) -> Follower<'_> {
        Follower {
            jobs: &mut self.jobs,
            store: &mut self.store,
            watch: &mut self.watch,
            readers: &self.readers,
            inbox: &self.inbox,
            clock: &self.clock,
            handle: &self.handle,
            reacts: self.control.policy().react_to_reports,
            is_plan_wanted: &mut self.plans.is_wanted,
        }
    }

    /// What views and answers are made of.
    pub(crate) fn picture(&self) -> Picture<'_> {
        Picture {
            now: self.now(),
            clock: &self.clock,
            config: &self.config,
            paths: &self.paths,
            jobs: &self.jobs,
            runtimes: &self.runtimes,
            forecasts: &self.forecasts,
            plans: &self.plans,
            gpus: &self.gpus,
        }
    }

    fn now(&self) -> Time {
        self.clock.now()
    }

    /// Runs the tasks of one round, then commits and acknowledges the reports that were pushed in it.
    fn run_tasks(&mut self) {
        let mut round = self.inbox.begin_round();
        while let Some(task) = self.inbox.next(&mut round) {
            task(self);
        }
        if self.store.has_unacknowledged() {
            let committed = self.save();
            self.store.acknowledge(&committed);
        }
    }

    /// Records what has happened. See [`Store::fact`].
    fn fact(&mut self, job: Option<JobId>, change: Change) {
        let at = self.clock.moment();
        self.store.fact(&mut self.jobs, at, job, change);
    }

    /// Writes all that is unsaved; on failure everything stays unsaved.
    fn save(&mut self) -> Result<(), Refusal> {
        let result = self.save_with(Batch::default());
        self.problems.note_disk(&result);
        result
    }

    /// Writes an intent together with everything unsaved before it. The disk may be slow and a round may have many
    /// commits, so the lease is renewed here, too.
    fn save_with(&mut self, intent: Batch) -> Result<(), Refusal> {
        let result = self.store.save_with(&mut self.jobs, &self.control, intent);
        self.lease.renew_after(Duration::from_micros(HEARTBEAT.0));
        result
    }

    /// A job came, changed its state or went.
    fn job_changed(&mut self, id: JobId) {
        self.plans.is_wanted = true;
        self.inbox.count_change();
        if self.inbox.has_listeners()
            && let Some(job) = self.jobs.get(&id)
        {
            let job = Box::new(self.picture().info(job));
            self.inbox.emit(Event::Job { job });
        }
    }

    /// Once a second.
    fn beat(&mut self) {
        if self.lease.has_lapsed() {
            self.recover_from_lapse();
        }
        self.lease.renew();
        self.guard.ensure(&self.paths, &self.config);
        if self.jobs.holding_slots().len() > 1 && self.runtimes.mode(&self.config) == LimitMode::Cores {
            // Cores that a job leaves unused are lent and come back.
            let is_check = self.begin_check();
            self.apply_to(RuntimeKind::Process, is_check);
        }
        self.measure_gpus();
        self.share_gpus();
        inside::read_rhythms(&mut self.jobs, &self.paths, self.clock.now());
        let (runtimes, config, scarce) = (&mut self.runtimes, &self.config, self.forecasts.scarce);
        let mut meter = TeamMeter { runtimes, config, scarce, now: self.clock.now() };
        meter.measure_all(&mut self.jobs);
        self.write_pages();
        self.watch.read(self.clock.now());
        if !self.watch.has_starts_or_ends() {
            // These two would read all of the starts and ends that wait, with a commit each.
            self.reap_supervisors();
            self.check_live_jobs();
        }
        self.check_folders();
        self.connect_docker();
        self.runtimes.docker.iter_mut().for_each(|docker| docker.read_usage(&self.jobs));
        // What the disk refused before, or what waits for the container engine, is tried again.
        if let Some(decision) = self.plans.held.take() {
            self.carry_out(decision);
        }
        self.plans.due.extend(std::mem::take(&mut self.plans.starts));
        self.start_jobs();
        self.check_deadlines();
        self.check_time_limits();
        self.divide_among_tasks();
        self.store.flush_when_due(self.clock.now());
        if !self.store.is_clean(&self.jobs) {
            crate::fail::point("samples-before-journal");
            let _ = self.save();
            crate::fail::point("samples-after-journal");
        }
        for id in self.jobs.surplus(self.clock.now()) {
            if self.forget(id).is_err() {
                break;
            }
        }
        if self.timeline.is_idle(self.jobs.live_count(), self.config.idle_exit, self.clock.now()) {
            tracing::info!("no job for {} s: ending", self.config.idle_exit.map_or(0, |idle| idle.as_secs()));
            self.shut_down(Default::default());
        }
    }
}

#[cfg(test)]
impl Driver {
    /// A driver without a runtime, with its folders in `dir`.
    fn without_runtimes(dir: &std::path::Path) -> Driver {
        let config = DaemonConfig {
            state_dir: Some(dir.join("state")),
            runtime_dir: Some(dir.join("run")),
            runtime: vec![],
            ..DaemonConfig::default()
        };
        let paths = config.paths();
        paths.create().expect("folders can be made");
        let journal = Journal::open(&paths.journal()).expect("an empty journal");
        let (metrics, token) = (Arc::new(Metrics::new()), Token::of_text("token".into()));
        let opened = Driver::open(config, paths, journal, metrics, Pulses::default(), None, token);
        opened.unwrap_or_else(|error| panic!("{error}")).0
    }
}
