//! Plays the jobs of the deadline stories (`cargo xtask e2e local-deadline` and `kube-deadline`) on one core, with jobs
//! and a driver that are as imperfect as real ones, in steps of a tenth of a second.
//!
//! **One machine.** Other programs leave a part of the core that changes. Each job has a start-up, a warm-up and noise
//! of 5 to 10 %, and half of the jobs evaluate. The driver does what the daemon does: it decides when a job comes or
//! goes and when a decision is due, has a beat once a second, and reads no counters twice within 0.9 s.
//!
//! **A node of a cluster.** Steps cost more CPU time the more pods run. The start of a pod takes seconds in which the
//! node's own programs have a part of the core, and the steps of all pods cost more. Jobs do not evaluate: those of the
//! story do not. The driver does what the node agent does: it reads everything twice a second, a little later than it
//! believes, and a new share is in force seconds after its decision.
#![allow(dead_code, reason = "each test program uses a part of it")]

use gainshare_core::deal::deal_by_weight;
use gainshare_core::decider::{Decider, Outcome};
use gainshare_core::fixtures::{node, running};
use gainshare_core::forecast::Forecaster;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::policy::{Policy, Preset, ScaleRule};
use gainshare_core::seeds::Dice;
use gainshare_core::signal::speed::{Interval, PaceReading, PaceTracker};
use gainshare_core::signal::{Sample, Signal, Tracker};
use gainshare_core::view::{Deadline, JobView, NodeView, Phase, View};
use std::collections::{BTreeMap, VecDeque};

/// Arrival, work and deadline of the jobs, as parts of the horizon.
const MIX: [(f64, f64, Option<f64>); 10] = [
    (0.00, 0.14, Some(1.30)),
    (0.00, 0.12, Some(1.25)),
    (0.00, 0.10, None),
    (0.03, 0.10, Some(1.20)),
    (0.06, 0.08, Some(0.55)),
    (0.10, 0.07, Some(0.60)),
    (0.15, 0.08, Some(0.38)),
    (0.20, 0.20, Some(0.28)),
    (0.30, 0.07, Some(0.60)),
    (0.50, 0.07, Some(0.80)),
];

/// The job whose deadline cannot be met.
const IMPOSSIBLE: usize = 7;

const TICK_S: f64 = 0.1;

/// Steps of each job.
const STEPS: u64 = 400;

/// Jobs that are submitted together are submitted one after the other.
const SUBMISSION_S: f64 = 0.15;

/// Counters younger than this are not read again at a beat.
const USAGE_AGE_S: f64 = 0.9;

/// The pods that ran beside each other when the story measured what a step costs.
const CALIBRATED_BESIDE: f64 = 3.0;

/// What is different on a node of a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cluster {
    /// The part by which each neighbour makes steps cost more.
    pub(crate) crowding: f64,
    /// How long a pod takes to start, the part of the core that the node's programs have meanwhile, and how many times
    /// as much the steps of others cost.
    pub(crate) start_s: f64,
    pub(crate) start_takes: f64,
    pub(crate) start_cost: f64,
    /// From a decision to its shares in force.
    pub(crate) effect_s: f64,
    /// Counters are up to this much newer than the agent believes.
    pub(crate) skew_s: f64,
}

/// Where and how the jobs run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Setting {
    pub(crate) preset: Preset,
    /// All jobs are there from the beginning.
    pub(crate) at_once: bool,
    pub(crate) habits: Habits,
    /// Steps that cost twice as much at the beginning of a run.
    pub(crate) warm_up: usize,
    pub(crate) horizon_s: f64,
    /// `None`: one machine.
    pub(crate) cluster: Option<Cluster>,
}

struct PlayedJob {
    arrives_s: f64,
    deadline_s: Option<f64>,
    /// CPU seconds before the first step, and the CPU seconds of each step with what follows it.
    startup_s: f64,
    costs: Vec<f64>,
    started: bool,
    ended_s: Option<f64>,
    done: usize,
    /// CPU seconds of the present step.
    progress_s: f64,
    consumed_node_s: f64,
    tracker: Tracker,
    pace: PaceTracker,
    /// The counter as it was read last, and when.
    read: (f64, f64),
    dice: Dice,
}

fn unit(dice: &mut Dice) -> f64 {
    (dice.number() >> 11) as f64 / (1u64 << 53) as f64
}

/// About normal, with mean 0 and deviation 1.
fn normal(dice: &mut Dice) -> f64 {
    (0..12).map(|_| unit(dice)).sum::<f64>() - 6.0
}

/// The part of the core that other programs usually leave.
fn usual_part(seed: u64) -> f64 {
    0.65 + 0.3 * unit(&mut Dice::new(seed, "machine"))
}

impl PlayedJob {
    fn new(seed: u64, place: usize, setting: &Setting) -> PlayedJob {
        let Setting { at_once, warm_up, horizon_s, .. } = *setting;
        let is_machine = setting.cluster.is_none();
        let (arrives, work, deadline) = MIX[place];
        let mut dice = Dice::new(seed.wrapping_mul(100) + place as u64, "job");
        let noise = 0.05 + 0.05 * unit(&mut dice);
        let evaluates = dice.percent(50) && is_machine;
        let every = 20 + dice.below(20);
        // The story knows what it asks for; a user's job may be larger or smaller.
        let size = if is_machine { 0.8 + 0.4 * unit(&mut dice) } else { 1.0 };
        let work_s = work * horizon_s * size;
        let cost = work_s / STEPS as f64;
        let costs = (0..STEPS as usize).map(|step| {
            let warm_up = if step < warm_up { 2.0 } else { 1.0 };
            let evaluation = if evaluates && step % every == every - 1 { 0.15 * every as f64 } else { 0.0 };
            cost * (warm_up * (1.0 + noise * normal(&mut dice)).max(0.2) + evaluation)
        });
        // The stories make everything longer on a busy machine.
        let wall_s = if is_machine { horizon_s / 0.8 } else { horizon_s / usual_part(seed) };
        let arrives_s = if is_machine { arrives * horizon_s } else { arrives * wall_s };
        let start_up = unit(&mut Dice::new(seed.wrapping_mul(100) + place as u64, "start-up"));
        PlayedJob {
            arrives_s: match (at_once, is_machine) {
                (true, true) => place as f64 * SUBMISSION_S,
                (true, false) => 0.0,
                (false, _) => arrives_s,
            },
            deadline_s: deadline.map(|d| d * wall_s),
            // A trainer of the story takes about this long before its first step, however long it trains.
            startup_s: if is_machine { 0.1 + 0.1 * start_up } else { 0.02 * work_s },
            costs: costs.collect(),
            started: false,
            ended_s: None,
            done: 0,
            progress_s: 0.0,
            consumed_node_s: 0.0,
            tracker: Tracker::default(),
            pace: PaceTracker::default(),
            read: (0.0, 0.0),
            dice: Dice::new(seed.wrapping_mul(100) + place as u64, "turns"),
        }
    }

    fn is_live(&self) -> bool {
        self.started && self.ended_s.is_none()
    }

    /// Works for a tick with this part of the core, on steps that cost `dearer` times what they usually do.
    fn work(&mut self, now_s: f64, used: f64, dearer: f64) {
        let mut cpu_s = used * TICK_S;
        self.consumed_node_s += cpu_s;
        let loaded_s = cpu_s.min(self.startup_s);
        (self.startup_s, cpu_s) = (self.startup_s - loaded_s, cpu_s - loaded_s);
        self.progress_s += cpu_s / dearer;
        while let Some(cost) = self.costs.get(self.done).filter(|cost| **cost <= self.progress_s) {
            (self.progress_s, self.done) = (self.progress_s - cost, self.done + 1);
            if self.done.is_multiple_of(2) {
                let value = 1.0 + (-(self.done as f64) / 100.0).exp();
                let sample = Sample { value, step: Some(self.done as u64), total: Some(STEPS) };
                self.tracker.push(Time::from_secs_f64(now_s), sample);
            }
        }
        if self.done == self.costs.len() {
            self.ended_s = Some(now_s);
        }
    }
}

/// What the driver does as it should, or as it did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Habits {
    /// Counters count for the time at which they were read, and not for the present.
    pub(crate) knows_reading_time: bool,
    /// A core that jobs cannot use is idle beside theirs, and is taken for theirs.
    pub(crate) sees_foreign_idle: bool,
    /// The driver says when a pod is starting.
    pub(crate) knows_starts: bool,
}

pub(crate) const RIGHT: Habits = Habits { knows_reading_time: true, sees_foreign_idle: false, knows_starts: true };

/// The forecasts that were published for one job: when, and the ends, since the beginning.
type EndForecasts = Vec<(f64, Interval)>;

pub(crate) struct Play {
    setting: Setting,
    seed: u64,
    jobs: Vec<PlayedJob>,
    decider: Decider,
    forecaster: Forecaster,
    published: BTreeMap<usize, EndForecasts>,
    /// Shares in force, and those that will be, with the time at which each decision takes effect.
    in_force: BTreeMap<JobId, f64>,
    to_come: VecDeque<(f64, BTreeMap<JobId, f64>)>,
    dice: Dice,
    now_s: f64,
}

impl Play {
    /// The jobs of one seed, run to their ends.
    pub(crate) fn run(seed: u64, setting: Setting) -> Play {
        let mut policy = Policy::from(setting.preset);
        if let (Some(_), ScaleRule::Deadline(rule)) = (setting.cluster, &mut policy.scale) {
            // As the node agent sets it.
            rule.reserve = Span::from_secs(6);
        }
        let mut play = Play {
            setting,
            seed,
            jobs: (0..MIX.len()).map(|place| PlayedJob::new(seed, place, &setting)).collect(),
            decider: Decider::new(policy),
            forecaster: Forecaster::default(),
            published: BTreeMap::new(),
            in_force: BTreeMap::new(),
            to_come: VecDeque::new(),
            dice: Dice::new(seed, "reader"),
            now_s: 0.0,
        };
        play.play();
        play
    }

    fn view(&self) -> View {
        let live = self.jobs.iter().enumerate().filter(|(_, job)| job.is_live());
        let jobs = live.map(|(place, job)| {
            let since = Time::from_secs_f64(job.arrives_s);
            let pace = job.pace.pace().map(|pace| pace.with_available(self.forecaster.available()));
            let mut view = JobView {
                arrived: since,
                phase: Phase::Running { node: node(0).id, since, attempt: 1 },
                signal: Signal { pace, ..job.tracker.signal() },
                deadline: job.deadline_s.map(|d| Deadline::strict(Time::from_secs_f64(d))),
                ..running(place as u64, 0)
            };
            view.consumed_node_s.cpu = job.read.0;
            view
        });
        let one_core = NodeView { cores: 1.0, ..node(0) };
        View { now: Time::from_secs_f64(self.now_s), nodes: vec![one_core], jobs: jobs.collect() }
    }

    fn read_counters(&mut self, least_age_s: f64) {
        let skew_s = self.setting.cluster.map_or(0.0, |c| c.skew_s) * unit(&mut self.dice);
        for job in self.jobs.iter_mut().filter(|j| j.is_live() && self.now_s - j.read.1 >= least_age_s) {
            job.read = (job.consumed_node_s, (self.now_s - skew_s).max(job.read.1));
        }
        let scarce = !self.setting.habits.sees_foreign_idle;
        let is_disturbed = self.is_starting() && self.setting.habits.knows_starts;
        for (place, job) in self.jobs.iter_mut().enumerate().filter(|(_, j)| j.is_live()) {
            // Nothing shows that a job without a grant left some of it.
            let granted = self.in_force.get(&JobId(place as u64)).copied().unwrap_or(0.0);
            let read_at = if self.setting.habits.knows_reading_time { job.read.1 } else { self.now_s };
            let (now, consumed_node_s) = (Time::from_secs_f64(read_at), job.read.0);
            let reading = PaceReading { now, consumed_node_s, granted, scarce, has_idle: !scarce, is_disturbed };
            job.pace.observe(reading, &job.tracker.signal());
        }
    }

    fn decide(&mut self) {
        self.read_counters(0.0);
        for _ in 0..4 {
            match self.decider.decide(self.view()) {
                Outcome::NotDue => break,
                Outcome::Decision(_) => {}
                Outcome::Rejected(rejection) => panic!("an unsound plan: {}", rejection.reasons()),
            }
        }
        let live = (0..self.jobs.len()).filter(|&i| self.jobs[i].is_live()).map(|i| JobId(i as u64));
        let shares = live.filter_map(|id| Some((id, self.decider.target(id)?.share.cpu.get()))).collect();
        let effect_s = self.setting.cluster.map_or(0.0, |c| c.effect_s);
        self.to_come.push_back((self.now_s + effect_s, shares));
        self.take_effect();
    }

    fn take_effect(&mut self) {
        while self.to_come.front().is_some_and(|(at_s, _)| *at_s <= self.now_s) {
            self.in_force = self.to_come.pop_front().map(|(_, shares)| shares).unwrap_or_default();
        }
    }

    fn beat(&mut self) {
        self.read_counters(USAGE_AGE_S);
        let scarce = !self.setting.habits.sees_foreign_idle;
        let live = || self.jobs.iter().enumerate().filter(|(_, job)| job.is_live());
        let read_at_s = live().map(|(_, job)| job.read.1).fold(0.0, f64::max);
        let consumed = live().map(|(place, job)| (JobId(place as u64), job.read.0));
        self.forecaster.measure(Time::from_secs_f64(read_at_s), consumed, scarce);
        let view = self.view();
        self.forecaster.update(&self.decider, &view);
        for job in &view.jobs {
            if let Some(end) = self.forecaster.ends_in_s(job.id, view.now) {
                let since_start = |s: f64| self.now_s + s;
                let [mid, low, high] = [end.mid, end.low, end.high].map(since_start);
                self.published.entry(job.id.0 as usize).or_default().push((self.now_s, Interval { mid, low, high }));
            }
        }
    }

    /// Whether a pod is starting.
    fn is_starting(&self) -> bool {
        let start_s = self.setting.cluster.map_or(0.0, |c| c.start_s);
        self.jobs.iter().any(|j| j.is_live() && self.now_s - j.arrives_s < start_s)
    }

    /// What other programs and the start of pods leave of the core, and how many times as much steps cost.
    fn conditions(&self, available: f64) -> (f64, f64) {
        let Some(cluster) = self.setting.cluster else { return (available, 1.0) };
        let live = self.jobs.iter().filter(|j| j.is_live()).count() as f64;
        let crowd = |beside: f64| 1.0 + cluster.crowding * (beside - 1.0);
        let dearer = crowd(live.max(1.0)) / crowd(CALIBRATED_BESIDE);
        if self.is_starting() {
            return (available - cluster.start_takes, dearer * cluster.start_cost);
        }
        (available, dearer)
    }

    fn play(&mut self) {
        let mut dice = Dice::new(self.seed, "machine");
        let usual = 0.65 + 0.3 * unit(&mut dice);
        let start_s = self.setting.cluster.map_or(0.0, |c| c.start_s);
        let (mut available, mut next_beat_s, mut next_read_s) = (usual, 0.35, 0.2);
        while self.jobs.iter().any(|job| job.ended_s.is_none()) {
            let mut is_changed = false;
            for job in self.jobs.iter_mut().filter(|j| !j.started && j.arrives_s <= self.now_s) {
                (job.started, is_changed) = (true, true);
                job.read = (0.0, self.now_s);
            }
            self.take_effect();
            let now = Time::from_secs_f64(self.now_s);
            let is_read = self.setting.cluster.is_none() || self.now_s >= next_read_s;
            if is_read {
                next_read_s += 0.5;
            }
            if is_changed || (is_read && self.decider.due().is_some_and(|due| now >= due)) {
                self.decide();
            } else if is_read && self.setting.cluster.is_some() {
                self.read_counters(0.0);
            }
            if self.now_s >= next_beat_s {
                next_beat_s += 1.0;
                self.beat();
            }
            self.now_s += TICK_S;
            available = (available + 0.05 * (usual - available) + 0.01 * normal(&mut dice)).clamp(0.3, 1.0);
            let (left, dearer) = self.conditions(available);
            let runs = |job: &PlayedJob| job.is_live() && self.now_s >= job.arrives_s + start_s;
            let live: Vec<usize> = (0..self.jobs.len()).filter(|&i| runs(&self.jobs[i])).collect();
            let weights: Vec<f64> = live.iter().map(|&i| self.weight(i)).collect();
            // A scheduler keeps to weights only in the mean.
            let turns = live.iter().zip(weights).map(|(&i, w)| w * (0.3 * normal(&mut self.jobs[i].dice)).exp());
            let turns: Vec<f64> = turns.collect();
            for (&i, used) in live.iter().zip(deal_by_weight(&turns, &vec![1.0; live.len()], left)) {
                self.jobs[i].work(self.now_s, used, dearer);
            }
            if live.iter().any(|&i| self.jobs[i].ended_s.is_some()) {
                self.decide();
            }
            assert!(self.now_s < 100.0 * self.setting.horizon_s, "the jobs do not end");
        }
    }

    /// The share in force; a pod that was just created has what it requests, a small part.
    fn weight(&self, place: usize) -> f64 {
        let new = if self.setting.cluster.is_some() { 0.04 } else { 1.0 };
        self.in_force.get(&JobId(place as u64)).copied().unwrap_or(new)
    }

    /// The error of each job's forecast, as a part of its run, and whether its end lay inside the interval.
    pub(crate) fn scores(&self) -> Vec<(f64, bool)> {
        let score = |(place, job): (usize, &PlayedJob)| {
            let (began_s, ended_s) = (job.arrives_s, job.ended_s?);
            let run_s = ended_s - began_s;
            let published = self.published.get(&place)?;
            let (_, end) = published.iter().find(|(at_s, _)| *at_s >= began_s + 0.1 * run_s)?;
            Some(((end.mid - ended_s) / run_s, (end.low..=end.high).contains(&ended_s)))
        };
        self.jobs.iter().enumerate().filter_map(score).collect()
    }

    /// The jobs that missed deadlines that could be met.
    pub(crate) fn missed(&self) -> Vec<usize> {
        let is_missed = |place: usize| {
            let job = &self.jobs[place];
            place != IMPOSSIBLE && job.deadline_s.zip(job.ended_s).is_some_and(|(due_s, ended_s)| ended_s > due_s)
        };
        (0..self.jobs.len()).filter(|&place| is_missed(place)).collect()
    }

    /// When the job without a deadline ended, as a part of the horizon.
    pub(crate) fn best_effort_ended(&self) -> f64 {
        let ended_s = MIX.iter().zip(&self.jobs).find(|((.., deadline), _)| deadline.is_none());
        ended_s.and_then(|(_, job)| job.ended_s).unwrap_or(f64::NAN) / self.setting.horizon_s
    }
}
