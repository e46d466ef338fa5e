//! How well the ends of jobs are predicted after a tenth of their runs, with a driver and jobs that are as imperfect as
//! real ones.
//!
//! **Problem.** The simulator's jobs report in time and its counters are exact. Real jobs load and warm up before their
//! steps are alike, evaluate now and then, and share a core with other programs. A real driver reads counters now
//! and then. Predictions that are right in the simulator may be wrong there.
//!
//! **How.** The jobs of `cargo xtask e2e local-deadline` run on one core, in steps of a tenth of a second. Of the core,
//! other programs leave a part that changes. Each job has a start-up, a warm-up and noise of 5 to 10 %, and half
//! of the jobs evaluate. The driver does what the daemon does: it decides when a job comes or goes and when a
//! decision is due, has a beat once a second, and reads no counters twice within 0.9 s. The first forecast after a
//! tenth of each run is compared with its end.
//!
//! **The two cases.** `at once`: all jobs are there from the beginning. `arrivals`: jobs come as in the story, and no
//! driver can know of them.

use gainshare_core::deal::deal_by_weight;
use gainshare_core::decider::{Decider, Outcome};
use gainshare_core::fixtures::{node, running};
use gainshare_core::forecast::Forecaster;
use gainshare_core::model::{JobId, Time};
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::seeds::Dice;
use gainshare_core::signal::speed::{Interval, PaceTracker, Reading};
use gainshare_core::signal::{Sample, Signal, Tracker};
use gainshare_core::view::{Deadline, JobView, NodeView, Phase, View};
use std::collections::BTreeMap;

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

const HORIZON_S: f64 = 60.0;
const TICK_S: f64 = 0.1;

/// Steps of each job.
const STEPS: u64 = 400;

/// Counters younger than this are not read again at a beat.
const USAGE_AGE_S: f64 = 0.9;

struct Job {
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
    consumed_s: f64,
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

impl Job {
    fn new(seed: u64, place: usize, at_once: bool, warm_up: usize) -> Job {
        let (arrives, work, deadline) = MIX[place];
        let mut dice = Dice::new(seed.wrapping_mul(100) + place as u64, "job");
        let noise = 0.05 + 0.05 * unit(&mut dice);
        let evaluates = dice.percent(50);
        let every = 20 + dice.below(20);
        let work_s = work * HORIZON_S * (0.8 + 0.4 * unit(&mut dice));
        let cost = work_s / STEPS as f64;
        let costs = (0..STEPS as usize).map(|step| {
            let warm_up = if step < warm_up { 2.0 } else { 1.0 };
            let evaluation = if evaluates && step % every == every - 1 { 0.15 * every as f64 } else { 0.0 };
            cost * (warm_up * (1.0 + noise * normal(&mut dice)).max(0.2) + evaluation)
        });
        Job {
            arrives_s: if at_once { 0.0 } else { arrives * HORIZON_S },
            deadline_s: deadline.map(|d| d * HORIZON_S / 0.8),
            startup_s: 0.02 * work_s,
            costs: costs.collect(),
            started: false,
            ended_s: None,
            done: 0,
            progress_s: 0.0,
            consumed_s: 0.0,
            tracker: Tracker::default(),
            pace: PaceTracker::default(),
            read: (0.0, 0.0),
            dice: Dice::new(seed.wrapping_mul(100) + place as u64, "turns"),
        }
    }

    fn is_live(&self) -> bool {
        self.started && self.ended_s.is_none()
    }

    /// Works for a tick with this part of the core.
    fn work(&mut self, now_s: f64, used: f64) {
        let mut cpu_s = used * TICK_S;
        self.consumed_s += cpu_s;
        let loaded_s = cpu_s.min(self.startup_s);
        (self.startup_s, cpu_s) = (self.startup_s - loaded_s, cpu_s - loaded_s);
        self.progress_s += cpu_s;
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
struct Habits {
    /// Counters count for the time at which they were read, and not for the present.
    knows_reading_time: bool,
    /// A core that jobs cannot use is idle beside theirs, and is taken for theirs.
    sees_foreign_idle: bool,
}

const RIGHT: Habits = Habits { knows_reading_time: true, sees_foreign_idle: false };

/// The forecasts that were published for one job: when, and the ends, since the beginning.
type EndForecasts = Vec<(f64, Interval)>;

struct Play {
    jobs: Vec<Job>,
    decider: Decider,
    forecaster: Forecaster,
    published: BTreeMap<usize, EndForecasts>,
    habits: Habits,
    now_s: f64,
}

impl Play {
    fn new(seed: u64, preset: Preset, at_once: bool, habits: Habits, warm_up: usize) -> Play {
        Play {
            jobs: (0..MIX.len()).map(|place| Job::new(seed, place, at_once, warm_up)).collect(),
            decider: Decider::new(Policy::from(preset)),
            forecaster: Forecaster::default(),
            published: BTreeMap::new(),
            habits,
            now_s: 0.0,
        }
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
            view.consumed.cpu = job.read.0;
            view
        });
        let one_core = NodeView { cores: 1.0, ..node(0) };
        View { now: Time::from_secs_f64(self.now_s), nodes: vec![one_core], jobs: jobs.collect() }
    }

    fn read_counters(&mut self, least_age_s: f64) {
        for job in self.jobs.iter_mut().filter(|j| j.is_live() && self.now_s - j.read.1 >= least_age_s) {
            job.read = (job.consumed_s, self.now_s);
        }
        let scarce = !self.habits.sees_foreign_idle;
        for (place, job) in self.jobs.iter_mut().enumerate().filter(|(_, j)| j.is_live()) {
            let granted = self.decider.target(JobId(place as u64)).map_or(1.0, |t| t.share.cpu.get());
            let read_at = if self.habits.knows_reading_time { job.read.1 } else { self.now_s };
            let (now, consumed_s) = (Time::from_secs_f64(read_at), job.read.0);
            let reading = Reading { now, consumed_s, granted, scarce, has_idle: !scarce };
            job.pace.observe(reading, &job.tracker.signal());
        }
    }

    fn decide(&mut self) {
        self.read_counters(0.0);
        for _ in 0..4 {
            match self.decider.decide(self.view()) {
                Outcome::NotDue => return,
                Outcome::Decision(_) => {}
                Outcome::Rejected(rejection) => panic!("an unsound plan: {}", rejection.reasons()),
            }
        }
    }

    fn beat(&mut self) {
        self.read_counters(USAGE_AGE_S);
        let scarce = !self.habits.sees_foreign_idle;
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

    fn run(&mut self, seed: u64) {
        let mut dice = Dice::new(seed, "machine");
        let usual = 0.65 + 0.3 * unit(&mut dice);
        let (mut available, mut next_beat_s) = (usual, 0.35);
        while self.jobs.iter().any(|job| job.ended_s.is_none()) {
            let mut is_changed = false;
            for job in self.jobs.iter_mut().filter(|j| !j.started && j.arrives_s <= self.now_s) {
                (job.started, is_changed) = (true, true);
                job.read = (0.0, self.now_s);
            }
            let now = Time::from_secs_f64(self.now_s);
            if is_changed || self.decider.due().is_some_and(|due| now >= due) {
                self.decide();
            }
            if self.now_s >= next_beat_s {
                next_beat_s += 1.0;
                self.beat();
            }
            self.now_s += TICK_S;
            available = (available + 0.05 * (usual - available) + 0.01 * normal(&mut dice)).clamp(0.3, 1.0);
            let live: Vec<usize> = (0..self.jobs.len()).filter(|&i| self.jobs[i].is_live()).collect();
            let target = |i: usize| self.decider.target(JobId(i as u64)).map_or(1.0, |t| t.share.cpu.get());
            let weights: Vec<f64> = live.iter().map(|&i| target(i)).collect();
            // A scheduler keeps to weights only in the mean.
            let turns = live.iter().zip(weights).map(|(&i, w)| w * (0.3 * normal(&mut self.jobs[i].dice)).exp());
            let turns: Vec<f64> = turns.collect();
            for (&i, used) in live.iter().zip(deal_by_weight(&turns, &vec![1.0; live.len()], available)) {
                self.jobs[i].work(self.now_s, used);
            }
            if live.iter().any(|&i| self.jobs[i].ended_s.is_some()) {
                self.decide();
            }
            assert!(self.now_s < 100.0 * HORIZON_S, "the jobs do not end");
        }
    }

    /// The error of each job's forecast, as a part of its run, and whether its end lay inside the interval.
    fn scores(&self) -> Vec<(f64, bool)> {
        let score = |(place, job): (usize, &Job)| {
            let (began_s, ended_s) = (job.arrives_s, job.ended_s?);
            let run_s = ended_s - began_s;
            let published = self.published.get(&place)?;
            let (_, end) = published.iter().find(|(at_s, _)| *at_s >= began_s + 0.1 * run_s)?;
            Some(((end.mid - ended_s) / run_s, (end.low..=end.high).contains(&ended_s)))
        };
        self.jobs.iter().enumerate().filter_map(score).collect()
    }
}

/// Median and 90th percentile of the errors, and the part of the ends inside the interval.
fn figures(scores: &[(f64, bool)]) -> [f64; 3] {
    let mut errors: Vec<f64> = scores.iter().map(|(error, _)| error.abs()).collect();
    errors.sort_by(f64::total_cmp);
    let at = |part: f64| errors[((errors.len() - 1) as f64 * part).round() as usize];
    let inside = scores.iter().filter(|(_, inside)| *inside).count();
    [at(0.5), at(0.9), inside as f64 / scores.len() as f64]
}

fn measure(preset: Preset, at_once: bool, habits: Habits, warm_up: usize, seeds: u64) -> Vec<(f64, bool)> {
    let mut all = vec![];
    for seed in FIRST_SEED..FIRST_SEED + seeds {
        let mut play = Play::new(seed, preset, at_once, habits, warm_up);
        play.run(seed);
        all.extend(play.scores());
    }
    let [median, ninetieth, inside] = figures(&all).map(|figure| 100.0 * figure);
    let bias = 100.0 * all.iter().map(|(error, _)| error).sum::<f64>() / all.len() as f64;
    println!(
        "{preset:?}, {}, {habits:?}, warm-up of {warm_up} steps: {} runs, median error {median:.1} %, 90th percentile {ninetieth:.1} %, \
         {inside:.0} % inside, mean error {bias:+.1} %",
        if at_once { "at once" } else { "arrivals" },
        all.len()
    );
    all
}

/// The numbers of the prediction were chosen with other seeds.
const FIRST_SEED: u64 = 100;
const SEEDS: u64 = 6;

/// Steps that cost twice as much at the beginning of a run.
const WARM_UP: usize = 3;
const LONG_WARM_UP: usize = 8;

#[test]
fn ends_of_known_jobs_are_predicted_after_a_tenth_of_the_run() {
    let mut all = measure(Preset::Na, true, RIGHT, WARM_UP, SEEDS);
    all.extend(measure(Preset::Qos, true, RIGHT, WARM_UP, SEEDS));
    let [median, ninetieth, inside] = figures(&all);
    println!("both: median {median:.3}, 90th percentile {ninetieth:.3}, inside {inside:.3}");
    assert!(median <= 0.1 && ninetieth <= 0.25, "median {median}, 90th percentile {ninetieth}");
    assert!((0.7..=0.95).contains(&inside), "{inside} inside");
}

#[test]
fn jobs_that_come_later_are_allowed_for() {
    let mut all = measure(Preset::Na, false, RIGHT, WARM_UP, SEEDS);
    all.extend(measure(Preset::Qos, false, RIGHT, WARM_UP, SEEDS));
    let [median, ninetieth, inside] = figures(&all);
    println!("both: median {median:.3}, 90th percentile {ninetieth:.3}, inside {inside:.3}");
    assert!(median <= 0.3 && inside >= 0.65, "median {median}, {inside} inside");
}

/// A job whose share is small is still in a long warm-up after a tenth of its run, and nothing shows that its steps
/// will become shorter.
#[test]
fn a_long_warm_up_makes_predictions_late_but_not_absurd() {
    let mut all = measure(Preset::Na, true, RIGHT, LONG_WARM_UP, 3);
    all.extend(measure(Preset::Qos, true, RIGHT, LONG_WARM_UP, 3));
    let [median, ninetieth, inside] = figures(&all);
    println!("both: median {median:.3}, 90th percentile {ninetieth:.3}, inside {inside:.3}");
    assert!(median <= 0.2 && inside >= 0.6, "median {median}, 90th percentile {ninetieth}, {inside} inside");
}

/// What the driver's two errors cost; printed, so that a change of either shows.
#[test]
fn a_driver_that_mistakes_times_or_idle_cores_spoils_predictions() {
    let with = |habits: Habits| figures(&measure(Preset::Qos, true, habits, WARM_UP, 2));
    let right = with(RIGHT);
    let late = with(Habits { knows_reading_time: false, ..RIGHT });
    let idle = with(Habits { sees_foreign_idle: true, ..RIGHT });
    assert!(right[1] <= late[1] + 0.05 && right[1] < idle[1], "{right:?} {late:?} {idle:?}");
}
