//! One machine in the simulation: the daemon's journal, decisions and lease are the real ones; the disk, the
//! kernel's limits, the processes of jobs and the clocks are modelled.
//!
//! The steps are those of the driver: an intent is committed before its effect, a plan is carried out limit by
//! limit, and a start of the daemon takes over what the journal holds. Between any two of them, and inside
//! every commit, the daemon may be killed, the machine may lose power, or the disk may be full.

use super::disk::{self, Disk, with_disk};
use super::parts::{Failure, Safeguard, limit_row, planned, record};
use crate::clock::Moment;
use crate::guard::{Finding, examine};
use crate::instance::Holder;
use crate::journal::{Batch, Journal, StoredSample};
use crate::lease::{Lapse, LeaseContent};
use crate::paths::Paths;
use crate::record::{Change, JobRecord, replay};
use crate::types::{JobState, StartOrder};
use gainshare_core::check::{CheckedPlan, check_again};
use gainshare_core::decider::{Decider, Outcome};
use gainshare_core::fixtures::node;
use gainshare_core::invariants::{Invariants, Observation, ObservedNode};
use gainshare_core::model::{JobId, NodeId, OwnerId, Share, Time};
use gainshare_core::plan::Plan;
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::seeds::Dice;
use gainshare_core::signal::{Signal, TimedValue};
use gainshare_core::view::{JobView, Phase, View};
use rusqlite::{Connection, OpenFlags};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::time::Duration;

const JOURNAL: &str = "/modelled/journal.db";
const LEASE: Duration = Duration::from_secs(15);
const MOST_JOBS: usize = 6;

/// What the kernel enforces for one job.
#[derive(Debug, Clone, Copy)]
struct KernelLimit {
    generation: u64,
    share: f64,
}

/// A running daemon.
struct Daemon {
    journal: Journal,
    records: BTreeMap<JobId, JobRecord>,
    decider: Decider,
    plan: Option<CheckedPlan>,
    /// Limits of the plan that are not written yet.
    unapplied: VecDeque<JobId>,
    unstarted: VecDeque<JobId>,
}

pub(super) struct Machine {
    dice: Dice,
    off: Option<Safeguard>,
    daemon: Option<Daemon>,
    invariants: Invariants,
    now_us: u64,
    wall_offset_s: f64,
    bounds: BTreeMap<JobId, (f64, f64)>,
    kernel: BTreeMap<JobId, KernelLimit>,
    /// The attempts of jobs that have a live process, each with a number of its own.
    processes: BTreeMap<JobId, Vec<String>>,
    last_process: u64,
    /// The newest attempt of each job whose supervisor has written its intent to fork; on the jobs' disk.
    intents: BTreeMap<JobId, u32>,
    /// When jobs save themselves. Choices of its own, so that they shift no others.
    checkpoints: Dice,
    /// The step of each job's newest checkpoint.
    saved: BTreeMap<JobId, u64>,
    /// What the newest plan guarantees.
    planned: ObservedNode,
    samples: BTreeMap<JobId, BTreeSet<u64>>,
    next_seq: u64,
    lease: Option<LeaseContent>,
    lapse: Option<Lapse>,
    last_epoch: u64,
    policy: Policy,
    pub(super) crashes: u64,
}

#[derive(Clone, Copy)]
enum Op {
    Submit,
    Decide,
    Apply,
    Start,
    Report,
    End,
    Forget,
    Renew,
    Guard,
    Tick,
    StandStill,
    WallClock,
    FullDisk,
    DieSoon,
    Kill,
    PowerLoss,
}

const OPS: &[(u64, Op)] = &[
    (12, Op::Submit),
    (20, Op::Decide),
    (25, Op::Apply),
    (15, Op::Start),
    (14, Op::Report),
    (6, Op::End),
    (3, Op::Forget),
    (15, Op::Renew),
    (10, Op::Guard),
    (10, Op::Tick),
    (2, Op::StandStill),
    (2, Op::WallClock),
    (2, Op::FullDisk),
    (7, Op::DieSoon),
    (3, Op::Kill),
    (3, Op::PowerLoss),
];

impl Machine {
    pub(super) fn new(seed: u64, off: Option<Safeguard>) -> Machine {
        disk::register();
        with_disk(|disk| {
            *disk = Disk::new(seed);
            disk.ignores_sync = off == Some(Safeguard::Sync);
        });
        let mut dice = Dice::new(seed, "machine");
        let preset = [Preset::Na, Preset::Flowcon, Preset::Gainshare][dice.below(3)];
        Machine {
            policy: Policy::from(preset),
            dice,
            off,
            daemon: None,
            invariants: Invariants::default(),
            now_us: 1_000_000,
            wall_offset_s: 0.0,
            bounds: BTreeMap::new(),
            kernel: BTreeMap::new(),
            processes: BTreeMap::new(),
            last_process: 0,
            intents: BTreeMap::new(),
            checkpoints: Dice::new(seed, "checkpoints"),
            saved: BTreeMap::new(),
            planned: ObservedNode::default(),
            samples: BTreeMap::new(),
            next_seq: 0,
            lease: None,
            lapse: None,
            last_epoch: 0,
            crashes: 0,
        }
    }

    pub(super) fn run(&mut self, steps: usize) -> Result<(), Failure> {
        self.start_daemon()?;
        for _ in 0..steps {
            let op = self.dice.weighted(OPS);
            self.play(op)?;
            self.check()?;
            if with_disk(|disk| disk.is_dead()) {
                let loses_power = self.dice.percent(50);
                self.crash(loses_power)?;
                self.check()?;
            }
        }
        // After all faults, one more start finds everything.
        self.crash(true)?;
        self.check()
    }

    fn moment(&self) -> Moment {
        Moment { time: Time(self.now_us), unix_s: self.now_us as f64 / 1e6 + self.wall_offset_s }
    }

    fn play(&mut self, op: Op) -> Result<(), Failure> {
        match op {
            Op::Submit => self.submit(),
            Op::Decide => self.decide(),
            Op::Apply => self.apply(),
            Op::Start => self.start_job(),
            Op::Report => self.report(),
            Op::End => self.end_job(),
            Op::Forget => self.forget(),
            Op::Renew => {
                self.renew();
                Ok(())
            }
            Op::Guard => self.guard(),
            Op::Tick => {
                self.now_us += 100_000 + self.dice.number() % 5_000_000;
                Ok(())
            }
            Op::StandStill => {
                self.now_us += LEASE.as_micros() as u64 * 3;
                Ok(())
            }
            Op::WallClock => {
                self.wall_offset_s += if self.dice.percent(50) { 3600.0 } else { -3600.0 };
                Ok(())
            }
            Op::FullDisk => {
                let is_full = self.dice.percent(50);
                with_disk(|disk| disk.is_full = is_full);
                Ok(())
            }
            Op::DieSoon => {
                let operations = 1 + self.dice.below(12) as u32;
                with_disk(|disk| disk.die_after(operations));
                Ok(())
            }
            Op::Kill => self.crash(false),
            Op::PowerLoss => self.crash(true),
        }
    }

    /// Commits a batch and, if the disk took it, makes it the daemon's state. Answers whether it did.
    fn commit(&mut self, changes: Vec<(JobId, Change)>, mut batch: Batch) -> Result<bool, Failure> {
        let at = self.moment();
        let Some(daemon) = &mut self.daemon else { return Ok(false) };
        let mut records = daemon.records.clone();
        for (id, change) in &changes {
            if let Change::Submitted { record } = change {
                records.insert(*id, (**record).clone());
            } else if let Some(record) = records.get_mut(id) {
                record.take(at, change);
                batch.records.retain(|other| other.id != *id);
                batch.records.push(record.clone());
            }
            if *change == Change::Forgotten {
                records.remove(id);
                batch.records.retain(|other| other.id != *id);
            }
        }
        batch.changes.extend(changes.into_iter().map(|(id, change)| (at, Some(id), change)));
        match daemon.journal.commit(&batch) {
            Ok(()) => {
                daemon.records = records;
                Ok(true)
            }
            Err(_) if with_disk(|disk| disk.is_dead()) => Ok(false),
            Err(error) if with_disk(|disk| disk.is_full) => {
                if error.is_full() {
                    Ok(false)
                } else {
                    Err(Failure::NotFull(error.to_string()))
                }
            }
            Err(error) => Err(Failure::Unopened(error.to_string())),
        }
    }

    fn submit(&mut self) -> Result<(), Failure> {
        let submitted = self.moment();
        let Some(daemon) = &self.daemon else { return Ok(()) };
        if daemon.records.values().filter(|record| record.is_live()).count() >= MOST_JOBS {
            return Ok(());
        }
        let Ok(id) = daemon.journal.next_id() else { return Ok(()) };
        let record = record(id, submitted);
        if self.commit(vec![(id, Change::Submitted { record: Box::new(record) })], Batch::default())? {
            self.invariants.acknowledge(&id.to_string());
            let floor = self.dice.below(10) as f64 / 100.0;
            self.bounds.insert(id, (floor, floor + (1.0 - floor) * (1 + self.dice.below(100)) as f64 / 100.0));
        }
        Ok(())
    }

    fn view(&self) -> View {
        let jobs = self.daemon.iter().flat_map(|daemon| daemon.records.values());
        let jobs = jobs.filter(|record| record.is_live()).map(|record| {
            let (floor, max) = self.bounds.get(&record.id).copied().unwrap_or((0.0, 1.0));
            let reports = self.samples.get(&record.id).map_or(0, BTreeSet::len) as u64;
            let value = 1.0 / (1.0 + reports as f64);
            let report = |value: f64| TimedValue { value, at: Time(self.now_us) };
            let mut signal = Signal { reports, ..Signal::default() };
            if reports > 0 {
                (signal.first, signal.last) = (Some(report(1.0)), Some(report(value)));
            }
            let phase = match (&record.started, record.holds_slot()) {
                (started, true) => Phase::Running {
                    node: NodeId(0),
                    since: started.map_or(record.submitted.time, |at| at.time),
                    attempt: record.attempt,
                },
                _ => Phase::Waiting,
            };
            JobView {
                id: record.id,
                owner: OwnerId(1),
                arrived: record.submitted.time,
                phase,
                signal,
                floor: Share::clamped(floor),
                max: Share::clamped(max),
                ..JobView::default()
            }
        });
        View { now: Time(self.now_us), nodes: vec![node(0)], jobs: jobs.collect() }
    }

    fn decide(&mut self) -> Result<(), Failure> {
        if self.recovers_from_lapse()? {
            return Ok(());
        }
        let view = self.view();
        let Some(daemon) = &mut self.daemon else { return Ok(()) };
        let mut decider = daemon.decider.clone();
        let decision = match decider.decide(view.clone()) {
            Outcome::Decision(decision) => decision,
            Outcome::NotDue => return Ok(()),
            Outcome::Rejected(rejection) => return Err(Failure::Rejected(rejection.reasons())),
        };
        self.planned = planned(&view, &decision.plan);
        let limits = decision.plan.verdicts.iter().filter(|(_, verdict)| verdict.target.is_some());
        let limits = limits.map(|(id, _)| limit_row(*id)).collect();
        let at = self.moment();
        let plan = Change::Plan { plan: decision.plan.as_plan().clone() };
        let batch =
            Batch { changes: vec![(at, None, plan)], limits, control: Some(decider.clone()), ..Batch::default() };
        if self.commit(Vec::new(), batch)?
            && let Some(daemon) = &mut self.daemon
        {
            daemon.decider = decider;
            daemon.unapplied = decision.plan.verdicts.keys().copied().collect();
            daemon.unstarted = decision.plan.starts.iter().map(|start| start.job).collect();
            daemon.plan = Some(decision.plan);
        }
        Ok(())
    }

    /// Whether the guard has put this daemon's limits back: then a new epoch begins.
    fn recovers_from_lapse(&mut self) -> Result<bool, Failure> {
        let Some(daemon) = &mut self.daemon else { return Ok(false) };
        let epoch = daemon.journal.epoch();
        let has_lapsed = self.lapse.is_some_and(|lapse| lapse.concerns(epoch)) && self.off != Some(Safeguard::Lapse);
        if !has_lapsed {
            return Ok(false);
        }
        if daemon.journal.next_epoch().is_err() {
            return Ok(true);
        }
        let generation = daemon.plan.as_ref().map_or(0, |plan| plan.generation);
        daemon.decider = Decider::new(self.policy.clone());
        daemon.decider.continue_from(generation);
        (daemon.plan, daemon.unapplied, daemon.unstarted) = (None, VecDeque::new(), VecDeque::new());
        self.renew();
        Ok(true)
    }

    /// Writes one limit of the plan.
    fn apply(&mut self) -> Result<(), Failure> {
        if self.recovers_from_lapse()? {
            return Ok(());
        }
        let Some(daemon) = &mut self.daemon else { return Ok(()) };
        let (Some(plan), Some(id)) = (daemon.plan.clone(), daemon.unapplied.pop_front()) else { return Ok(()) };
        let epoch = daemon.journal.epoch();
        let Some(target) = plan.target(id).filter(|_| self.processes.contains_key(&id)) else { return Ok(()) };
        if self.lapse.is_some_and(|lapse| lapse.epoch == epoch) {
            return Err(Failure::StaleWrite { job: id, epoch });
        }
        self.kernel.insert(id, KernelLimit { generation: plan.generation, share: target.share.cpu.get() });
        Ok(())
    }

    /// Starts one job of the plan: the order is journaled, then the process begins, then that is journaled.
    fn start_job(&mut self) -> Result<(), Failure> {
        let Some(daemon) = &mut self.daemon else { return Ok(()) };
        let Some(id) = daemon.unstarted.pop_front() else { return Ok(()) };
        let Some(record) = daemon.records.get(&id).filter(|record| record.state == JobState::Queued) else {
            return Ok(());
        };
        let attempt = record.attempt + 1;
        let order = StartOrder { attempt, ..StartOrder::default() };
        if self.commit(vec![(id, Change::Admitted { order, group: None })], Batch::default())? {
            self.spawn(id, attempt);
            self.record_start(id)?;
        }
        Ok(())
    }

    /// A supervisor lets the process of an attempt begin, from the job's first step, unless the attempt has begun
    /// before. The process may save itself before the daemon hears of it.
    fn spawn(&mut self, id: JobId, attempt: u32) {
        let is_alive = self.processes.contains_key(&id);
        let has_begun = self.intents.get(&id).is_some_and(|begun| *begun >= attempt);
        let is_refused = match self.off {
            Some(Safeguard::Lock) => has_begun && !is_alive,
            Some(Safeguard::Intent) => is_alive,
            _ => has_begun,
        };
        if is_refused {
            return;
        }
        self.intents.insert(id, attempt);
        self.last_process += 1;
        self.processes.entry(id).or_default().push(format!("{attempt}, process {}", self.last_process));
        if self.checkpoints.percent(50) {
            self.save(id, 1);
        }
    }

    /// The process of a job commits a checkpoint.
    fn save(&mut self, id: JobId, step: u64) {
        let saved = self.saved.entry(id).or_default();
        *saved = step.max(*saved);
    }

    fn record_start(&mut self, id: JobId) -> Result<(), Failure> {
        let started = Change::Started { leader: None, container: None, notes: Vec::new() };
        self.commit(vec![(id, started)], Batch::default()).map(drop)
    }

    fn report(&mut self) -> Result<(), Failure> {
        let running: Vec<JobId> = self.processes.keys().copied().collect();
        let Some(id) = running.get(self.dice.below(running.len())).copied() else { return Ok(()) };
        let time = Time(self.now_us);
        if self.checkpoints.percent(30) {
            self.save(id, self.next_seq);
        }
        let count = 1 + self.dice.below(8) as u64;
        let seqs: Vec<u64> = (0..count).map(|i| self.next_seq + i).collect();
        self.next_seq += count;
        let sample =
            |seq: &u64| (id, StoredSample { seq: *seq, time, step: Some(*seq), value: 1.0 / (1.0 + *seq as f64) });
        let batch = Batch {
            samples: seqs.iter().map(sample).collect(),
            positions: vec![(id, format!("{}", self.next_seq))],
            ..Batch::default()
        };
        let is_known = self.daemon.as_ref().is_some_and(|daemon| daemon.records.contains_key(&id));
        if is_known && self.commit(Vec::new(), batch)? {
            self.samples.entry(id).or_default().extend(seqs);
        }
        Ok(())
    }

    /// A process ends. The daemon journals that, and puts the limit back.
    fn end_job(&mut self) -> Result<(), Failure> {
        let running: Vec<JobId> = self.processes.keys().copied().collect();
        let Some(id) = running.get(self.dice.below(running.len())).copied() else { return Ok(()) };
        self.processes.remove(&id);
        self.kernel.remove(&id);
        self.record_end(id, JobState::Done)
    }

    fn record_end(&mut self, id: JobId, state: JobState) -> Result<(), Failure> {
        let ended = Change::Ended { state, exit_code: Some(0), signal: None, why: None, ended_s: None };
        let batch = Batch { released: vec![limit_row(id).key], ..Batch::default() };
        self.commit(vec![(id, ended)], batch).map(drop)
    }

    fn forget(&mut self) -> Result<(), Failure> {
        let Some(daemon) = &self.daemon else { return Ok(()) };
        let ended = daemon.records.values().find(|record| !record.is_live()).map(|record| record.id);
        let Some(id) = ended else { return Ok(()) };
        // The user asked for it: whether or not the commit survives, the job may be gone.
        self.invariants.forget(&id.to_string());
        self.saved.remove(&id);
        self.samples.remove(&id);
        self.commit(vec![(id, Change::Forgotten)], Batch::default()).map(drop)
    }

    fn renew(&mut self) {
        if let Some(daemon) = &self.daemon {
            self.lease = Some(LeaseContent {
                epoch: daemon.journal.epoch(),
                boottime_ns: self.now_us * 1000,
                length: LEASE,
                state: "/state".into(),
            });
        }
    }

    /// One round of the guard: a lapse first, then the limits that the journal lists.
    fn guard(&mut self) -> Result<(), Failure> {
        let paths = Paths { state: "/state".into(), runtime: "/run".into() };
        let holder = if self.daemon.is_some() { Holder::Daemon(None) } else { Holder::None };
        let found = examine(&paths, Duration::from_secs(60), self.now_us * 1000, &holder, self.lease.clone());
        let Finding::Lapsed { epoch: Some(epoch), .. } = found else { return Ok(()) };
        self.lapse = Some(Lapse { epoch, restored: false });
        let listed: BTreeSet<JobId> = match &self.daemon {
            Some(daemon) => match daemon.journal.limits() {
                Ok(rows) => rows.iter().map(|row| row.job).collect(),
                Err(_) => return Ok(()),
            },
            None => return Ok(()),
        };
        if let Some(id) = self.kernel.keys().find(|id| !listed.contains(id)) {
            return Err(Failure::UnlistedLimit { job: *id });
        }
        self.kernel.clear();
        self.lapse = Some(Lapse { epoch, restored: true });
        Ok(())
    }

    /// The daemon dies, and the next one starts. With the power, the jobs' processes go too.
    fn crash(&mut self, loses_power: bool) -> Result<(), Failure> {
        self.crashes += 1;
        with_disk(Disk::kill);
        self.daemon = None;
        with_disk(|disk| disk.restart(loses_power));
        if loses_power {
            self.processes.clear();
            self.kernel.clear();
            (self.lease, self.lapse) = (None, None);
        }
        self.start_daemon()
    }

    fn open(&self) -> Result<Journal, String> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let db = Connection::open_with_flags_and_vfs(JOURNAL, flags, disk::VFS_NAME).map_err(|e| e.to_string())?;
        Journal::begin(db, Path::new(JOURNAL)).map_err(|e| e.to_string())
    }

    /// As the driver does it: jobs from the journal, the last plan again, processes found again.
    fn start_daemon(&mut self) -> Result<(), Failure> {
        let journal = self.open().map_err(Failure::Unopened)?;
        if journal.epoch() <= self.last_epoch && self.last_epoch > 0 {
            return Err(Failure::EpochWentBack { before: self.last_epoch, now: journal.epoch() });
        }
        self.last_epoch = journal.epoch();
        let loaded = journal.load().map_err(|e| Failure::Unopened(e.to_string()))?;
        let records = loaded.jobs.into_iter().map(|(record, _)| (record.id, record)).collect();
        let last = loaded.plans.last().map(|(_, plan)| plan.clone());
        let mut decider = loaded.control.unwrap_or_else(|| Decider::new(self.policy.clone()));
        decider.continue_from(last.as_ref().map_or(0, |plan| plan.generation));
        self.daemon = Some(Daemon {
            journal,
            records,
            decider,
            plan: None,
            unapplied: VecDeque::new(),
            unstarted: VecDeque::new(),
        });
        self.find_again()?;
        if let Some(plan) = last {
            self.resume_plan(plan)?;
        }
        self.renew();
        Ok(())
    }

    fn find_again(&mut self) -> Result<(), Failure> {
        let held = self.daemon.iter().flat_map(|daemon| daemon.records.values());
        let held: Vec<JobRecord> = held.filter(|record| record.holds_slot()).cloned().collect();
        for record in held {
            let id = record.id;
            // The daemon does not know whether the process has begun; a new supervisor finds out.
            if record.state == JobState::Starting {
                self.spawn(id, record.attempt);
            }
            match (record.state, self.processes.contains_key(&id)) {
                (JobState::Starting, true) => self.record_start(id)?,
                (_, false) => self.record_end(id, JobState::Lost)?,
                (_, true) => {}
            }
        }
        Ok(())
    }

    fn resume_plan(&mut self, plan: Plan) -> Result<(), Failure> {
        let starts: VecDeque<JobId> = plan.starts.iter().map(|start| start.job).collect();
        let view = self.view();
        let checked = check_again(&view, plan.clone());
        let Some(daemon) = &mut self.daemon else { return Ok(()) };
        if let Ok(checked) = checked {
            daemon.unapplied = checked.verdicts.keys().copied().collect();
            daemon.plan = Some(checked);
        }
        let records = &daemon.records;
        let waits = |id: &JobId| records.get(id).is_some_and(|record| record.state == JobState::Queued);
        daemon.unstarted = starts.into_iter().filter(waits).collect();
        Ok(())
    }

    /// The jobs with processes or checkpoints, and what the plan guarantees. Each process starts at the first step.
    fn observe(&self) -> Observation {
        let mut observation = Observation::default();
        for (id, attempts) in &self.processes {
            attempts.iter().for_each(|attempt| observation.add_live(&id.to_string(), attempt, Some(0)));
        }
        for (id, step) in &self.saved {
            observation.add_checkpoint(&id.to_string(), *step);
        }
        observation.nodes.insert("this machine".to_owned(), self.planned.clone());
        observation
    }

    /// All invariants, after every step.
    fn check(&mut self) -> Result<(), Failure> {
        let mut observation = self.observe();
        let is_dead = with_disk(|disk| disk.is_dead());
        let Some(daemon) = self.daemon.as_ref().filter(|_| !is_dead) else {
            return self.invariants.check_first(&observation).map_err(Failure::from);
        };
        let unreadable = |error: crate::journal::JournalError| Failure::Unopened(error.to_string());
        let loaded = daemon.journal.load().map_err(unreadable)?;
        let stored: BTreeMap<JobId, JobRecord> = loaded.jobs.into_iter().map(|(r, _)| (r.id, r)).collect();
        let entries = daemon.journal.entries().map_err(unreadable)?;
        let replayed = replay(entries.iter().map(|entry| (entry.at, entry.job, &entry.change)));
        observation.add_replay(&stored, &replayed);
        observation.add_replay(&stored, &daemon.records);
        observation.set_recorded(stored.keys());
        self.invariants.check_first(&observation)?;
        for (job, seqs) in &self.samples {
            let kept = daemon.journal.samples(*job, Time::ZERO).map_err(unreadable)?;
            let kept: BTreeSet<u64> = kept.iter().map(|sample| sample.seq).collect();
            if let Some(seq) = seqs.difference(&kept).next().filter(|_| stored.contains_key(job)) {
                return Err(Failure::LostSample { job: *job, seq: *seq });
            }
        }
        let last = loaded.plans.last().map_or(0, |(_, plan)| plan.generation);
        for (job, limit) in &self.kernel {
            if limit.generation > last || !(0.0..=1.0).contains(&limit.share) {
                return Err(Failure::UnknownLimit { job: *job, found: limit.generation, last });
            }
        }
        Ok(())
    }
}
