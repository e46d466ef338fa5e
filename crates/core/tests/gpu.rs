//! The gain rule on one GPU, with the three jobs of the story `gain` of `cargo xtask bench gpu`: a long one, one that
//! prepares its work more slowly than the GPU carries it out, and a short one that comes last.
//!
//! The model divides the GPU as its driver and the pauses of the library do, and shows the rule what is known of each
//! job's use. Beside other jobs that is what the library's pauses tell: equal slices for all that work, so that a job
//! that prepares slowly counts as one that fills the GPU. For jobs without the library, and for a job alone, it is what
//! the driver's counters show: use of windows of a second, late, with errors, and for some windows nothing at all. A
//! rule that believes every reading takes the long job for late, and pays it back while the short one waits.

use crate::world;
use gainshare_core::decider::Decider;
use gainshare_core::model::*;
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::signal::{Sample, Tracker};
use gainshare_core::view::*;

/// A job as it truly is.
#[derive(Clone, Copy)]
struct Truth {
    /// When it begins to train.
    begins_s: f64,
    /// How long it would train alone.
    alone_s: f64,
    /// The part of the GPU that it uses alone.
    fills: f64,
}

/// The jobs of the benchmark, each after the import of its libraries.
const THREE: [Truth; 3] = [
    Truth { begins_s: 8.5, alone_s: 14.0, fills: 1.0 },
    Truth { begins_s: 11.5, alone_s: 7.0, fills: 0.4 },
    Truth { begins_s: 18.5, alone_s: 3.0, fills: 1.0 },
];

/// A job launches a little while it makes its model, this long before it begins to train.
const PREPARES_S: f64 = 1.0;

const TICK_S: f64 = 0.05;
const TICKS_PER_READING: usize = 20;

/// Reports a second alone, and steps between two reports.
const REPORTS_PER_S: f64 = 20.0;
const STEPS: u64 = 10;

/// Two jobs that fill the GPU lose this part of it to changes from one to the other.
const LOST: f64 = 0.06;

/// A job that does not fill the GPU waits this part of its time for its turn beside one that does.
const WAITS: f64 = 0.15;

/// What is known of the truth.
#[derive(Debug, Clone, Copy)]
struct Counters {
    /// Beside other jobs, use is known by the library's pauses, and only that of a job alone by the driver's counters.
    by_pauses: bool,
    /// The part of the time that the counters see.
    counted: f64,
    /// The errors of single readings, as a part of them.
    error: f64,
    /// How often a reading of a job beside others shows nothing.
    missing: f64,
    /// How late they are, in ticks.
    late: usize,
}

const ROUGH: Counters = Counters { by_pauses: false, counted: 0.95, error: 0.2, missing: 0.1, late: 8 };

const BY_PAUSES: Counters = Counters { by_pauses: true, ..ROUGH };

/// Numbers from 0 to 1.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }
}

/// One job in the midst.
#[derive(Clone, Default)]
struct Progress {
    done_s: f64,
    reports: u64,
    ended_s: Option<f64>,
    tracker: Tracker,
    /// The part of the GPU that it had in each tick.
    had: Vec<f64>,
    /// The same by the library's pauses, beside other jobs.
    by_pauses: Vec<Option<f64>>,
    /// GPU time by the counters.
    counted_s: f64,
}

/// What the daemon makes of shares.
#[derive(Default)]
struct Pace {
    /// The most of the GPU's time that each job may take.
    limits: Vec<f64>,
    favourite: Option<usize>,
    /// How much more than their shares the paced jobs may work, because the favourite hardly waits.
    slack: f64,
}

impl Pace {
    /// Only the job with the largest share is not paced. `had`: the last reading, if there is a new one.
    fn update(&mut self, jobs: &[Truth], shares: &[f64], with_work: &[usize], had: Option<&[f64]>) {
        self.limits = vec![1.0; jobs.len()];
        let whole: f64 = with_work.iter().map(|&i| shares[i]).sum();
        let Some(&first) = with_work.iter().max_by(|&&a, &&b| shares[a].total_cmp(&shares[b])) else { return };
        let waits = if jobs[first].fills < 1.0 { 0.0 } else { 1.0 };
        self.slack = match had {
            _ if self.favourite != Some(first) => 0.0,
            Some(had) if had[first] > 0.0 => (self.slack + 10.0 * (0.1 - waits)).min(self.slack + 0.5),
            Some(_) => 0.0,
            None => self.slack,
        };
        (self.slack, self.favourite) = (self.slack.clamp(0.0, 1.0), Some(first));
        for &i in with_work.iter().filter(|&&i| shares[first] - shares[i] > 0.02 * whole) {
            let part = shares[i] / whole;
            self.limits[i] = part + self.slack * (1.0 - part);
        }
    }
}

/// Equal slices for the jobs with work, but no more than the most of each job.
fn slices(with_work: &[usize], most: &[f64]) -> Vec<f64> {
    let (mut had, mut left) = (vec![0.0; most.len()], 1.0);
    let mut open = with_work.to_vec();
    open.sort_by(|&a, &b| most[a].total_cmp(&most[b]));
    for (place, &i) in open.iter().enumerate() {
        had[i] = most[i].min(left / (open.len() - place) as f64);
        left -= had[i];
    }
    had
}

/// The part of the GPU that each job with work has: no more than it may and can use.
fn divide(jobs: &[Truth], with_work: &[usize], limits: &[f64]) -> Vec<f64> {
    let most: Vec<f64> = jobs.iter().zip(limits).map(|(job, limit)| job.fills.min(*limit)).collect();
    let mut had = slices(with_work, &most);
    let used: f64 = had.iter().sum();
    for &i in with_work.iter().filter(|&&i| jobs[i].fills < 1.0) {
        had[i] *= 1.0 - WAITS * (used - had[i]).min(1.0);
    }
    had
}

/// When each job ends. `is_managed`: by the gain rule, else in equal slices. `on_gpu`: the rule knows that the node is
/// a GPU.
fn ends_s(jobs: &[Truth], is_managed: bool, on_gpu: bool, counters: Counters, seed: u64) -> Vec<f64> {
    let count = jobs.len();
    let mut dice = Dice(seed);
    let mut decider = Decider::new(Policy::from(Preset::Gainshare));
    let mut all = vec![Progress::default(); count];
    let mut pace = Pace { limits: vec![1.0; count], ..Pace::default() };
    let (mut shares, mut idle_s) = (vec![1.0f64; count], 0.0);
    // A job that ends leaves its share to the others at once.
    let mut has_ended = false;
    let phase = (dice.roll() * TICKS_PER_READING as f64) as usize;
    for tick in 0.. {
        assert!(tick < 5_000, "the jobs never end");
        if all.iter().all(|job| job.ended_s.is_some()) {
            break;
        }
        let now_s = tick as f64 * TICK_S;
        let is_live = |i: usize, from_s: f64| all[i].ended_s.is_none() && now_s >= from_s;
        let with_work: Vec<usize> = (0..count).filter(|&i| is_live(i, jobs[i].begins_s)).collect();
        let active: Vec<usize> = (0..count).filter(|&i| is_live(i, jobs[i].begins_s - PREPARES_S)).collect();
        if is_managed && tick % TICKS_PER_READING == phase && !active.is_empty() {
            let used = used_until(tick.saturating_sub(counters.late), &all);
            let sum: f64 = count_use(&mut all, &used, tick, counters, &mut dice);
            idle_s += (1.0 - sum).max(0.0);
            let seen: Vec<JobView> = active.iter().map(|&i| all[i].view(i, &jobs[i], on_gpu)).collect();
            if let Some(plan) = world::decide(&mut decider, view(now_s, idle_s, seen)) {
                for &i in &active {
                    shares[i] = world::share(&plan, i as u64);
                }
            }
            pace.update(jobs, &shares, &with_work, Some(&used));
        } else if is_managed && has_ended {
            pace.update(jobs, &shares, &with_work, None);
        }
        let had = divide(jobs, &with_work, &pace.limits);
        let by_pauses = slices(&with_work, &pace.limits);
        let is_shared = with_work.len() > 1;
        // The chance that a slice follows one of another job.
        let used: f64 = had.iter().sum();
        let changes =
            if used > 0.0 { 1.0 - had.iter().map(|had| (had / used) * (had / used)).sum::<f64>() } else { 0.0 };
        has_ended = false;
        for (((job, truth), had), by_pauses) in all.iter_mut().zip(jobs).zip(had).zip(by_pauses) {
            job.by_pauses.push(is_shared.then_some(by_pauses));
            has_ended |= job.work(truth, had, changes, now_s);
        }
    }
    all.into_iter().map(|job| job.ended_s.expect("the loop ends when all have")).collect()
}

/// The part of the GPU that each job used in the window that ends with this tick.
fn used_until(tick: usize, all: &[Progress]) -> Vec<f64> {
    let window = tick.saturating_sub(TICKS_PER_READING)..tick;
    all.iter().map(|job| job.had[window.clone()].iter().sum::<f64>() / TICKS_PER_READING as f64).collect()
}

/// Counts this use, with the errors of the counters. Returns what they count of all jobs together. The pauses of the
/// library are known at once, and without errors.
fn count_use(all: &mut [Progress], used: &[f64], tick: usize, counters: Counters, dice: &mut Dice) -> f64 {
    let is_shared = used.iter().filter(|used| **used > 0.0).count() > 1;
    let mut sum = 0.0;
    for (job, used) in all.iter_mut().zip(used) {
        let noise = 1.0 + counters.error * (2.0 * dice.roll() - 1.0);
        let is_missing = dice.roll() < counters.missing && is_shared;
        let shown = if is_missing { 0.0 } else { (counters.counted * noise * used).min(1.0) };
        let read = job.known_by_pauses(tick).filter(|_| counters.by_pauses).unwrap_or(shown);
        job.counted_s += read;
        sum += read;
    }
    sum
}

fn view(now_s: f64, idle_s: f64, jobs: Vec<JobView>) -> View {
    let node =
        NodeView { id: NodeId(0), cores: 1.0, speed: 1.0, memory_bytes: 0, slots: None, idle_node_s: Some(idle_s) };
    View { now: Time::from_secs_f64(now_s), nodes: vec![node], jobs }
}

impl Progress {
    /// What the library's pauses tell of the last second; `None`: the job was alone at its end.
    fn known_by_pauses(&self, tick: usize) -> Option<f64> {
        let window = tick.saturating_sub(TICKS_PER_READING)..tick;
        let (by_pauses, had) = (self.by_pauses.get(window.clone())?, self.had.get(window)?);
        (*by_pauses.last()?)?;
        Some(
            by_pauses.iter().zip(had).map(|(by_pauses, had)| by_pauses.unwrap_or(*had)).sum::<f64>() / had.len() as f64,
        )
    }

    fn view(&self, index: usize, truth: &Truth, on_gpu: bool) -> JobView {
        let since = Time::from_secs_f64(truth.begins_s - PREPARES_S);
        JobView {
            id: JobId(index as u64),
            arrived: since,
            phase: Phase::Running { node: NodeId(0), since, attempt: 1 },
            signal: self.tracker.signal(),
            consumed_node_s: PerResource { cpu: self.counted_s, ..PerResource::default() },
            on_gpu,
            ..JobView::default()
        }
    }

    /// Works for a tick with this part of the GPU; `true` if the job ends with it.
    fn work(&mut self, truth: &Truth, had: f64, changes: f64, now_s: f64) -> bool {
        self.had.push(had);
        self.done_s += had / truth.fills * (1.0 - 2.0 * LOST * changes) * TICK_S;
        let reports = (REPORTS_PER_S * self.done_s) as u64;
        if reports > self.reports {
            self.reports = reports;
            let total = Some(STEPS * (REPORTS_PER_S * truth.alone_s) as u64);
            let value = 0.3 + (-self.done_s).exp();
            self.tracker.push(Time::from_secs_f64(now_s), Sample { value, step: Some(STEPS * reports), total });
        }
        let ends = self.done_s >= truth.alone_s && self.ended_s.is_none();
        if ends {
            self.ended_s = Some(now_s + TICK_S);
        }
        ends
    }
}

/// What the rule does over many rounds of errors, as parts of what equal slices give, from the best to the worst.
#[derive(Debug)]
struct Rounds {
    late_training: Vec<f64>,
    makespan: Vec<f64>,
    worst_training: Vec<f64>,
}

const ROUNDS: u64 = 41;

fn rounds(jobs: &[Truth], on_gpu: bool, counters: Counters) -> Rounds {
    let makespan = |ends: &[f64]| ends.iter().copied().fold(0.0, f64::max);
    let training = |ends: &[f64], i: usize| ends[i] - jobs[i].begins_s;
    let equal = ends_s(jobs, false, on_gpu, counters, 0);
    let last = jobs.len() - 1;
    let mut found = Rounds { late_training: vec![], makespan: vec![], worst_training: vec![] };
    for seed in 0..ROUNDS {
        let ours = ends_s(jobs, true, on_gpu, counters, 1 + 7919 * seed);
        let change = |i: usize| training(&ours, i) / training(&equal, i);
        found.late_training.push(change(last));
        found.worst_training.push((0..jobs.len()).map(change).fold(0.0, f64::max));
        found.makespan.push(makespan(&ours) / makespan(&equal));
    }
    for values in [&mut found.late_training, &mut found.makespan, &mut found.worst_training] {
        values.sort_by(f64::total_cmp);
    }
    found
}

impl Rounds {
    fn median(values: &[f64]) -> f64 {
        values[values.len() / 2]
    }

    /// The value that nine in ten rounds do not exceed.
    fn ninth(values: &[f64]) -> f64 {
        values[values.len() * 9 / 10]
    }

    fn print(&self, name: &str) {
        for (what, values) in
            [("late", &self.late_training), ("makespan", &self.makespan), ("worst-off", &self.worst_training)]
        {
            let (median, ninth) = (Rounds::median(values), Rounds::ninth(values));
            println!(
                "{name}: {what} {median:.3}, nine in ten {ninth:.3}, {:.3} to {:.3}",
                values[0],
                values[values.len() - 1]
            );
        }
    }
}

#[test]
fn the_model_takes_as_long_as_the_benchmark_without_management() {
    let ends = ends_s(&THREE, false, false, ROUGH, 0);
    let training: Vec<f64> = THREE.iter().zip(&ends).map(|(job, end)| end - job.begins_s).collect();
    println!("equal slices: training {training:.1?}");
    for (modelled, measured) in training.iter().zip([21.7, 8.4, 7.3]) {
        assert!((modelled / measured - 1.0).abs() < 0.1, "{training:?}");
    }
}

#[test]
fn the_late_short_job_gains_whatever_single_readings_say() {
    let rougher = Counters { error: 0.3, missing: 0.2, ..ROUGH };
    let low = Counters { counted: 0.8, ..ROUGH };
    let sound = Counters { error: 0.1, missing: 0.0, ..ROUGH };
    // By pauses, a slow job counts as one that fills the GPU, so it seems to have more left than it has.
    for (name, counters, most_late) in [
        ("by pauses", BY_PAUSES, 0.62),
        ("rough", ROUGH, 0.6),
        ("rougher", rougher, 0.6),
        ("low", low, 0.6),
        ("sound", sound, 0.6),
    ] {
        let found = rounds(&THREE, true, counters);
        found.print(name);
        let (late, makespan) = (&found.late_training, &found.makespan);
        assert!(Rounds::median(late) <= most_late && Rounds::median(makespan) <= 1.03, "{name}: {found:?}");
        assert!(Rounds::ninth(late) <= 0.65 && Rounds::ninth(makespan) <= 1.03, "{name}: {found:?}");
        assert!(Rounds::ninth(&found.worst_training) <= 1.2, "{name}: {found:?}");
    }
}

/// The same rule where it believes every reading, as on a machine's processors. Measured on an H200: the late job 25 %
/// sooner, and the makespan 4 % longer.
#[test]
fn believing_every_reading_costs_the_late_job_its_gain() {
    let (before, after) = (rounds(&THREE, false, ROUGH), rounds(&THREE, true, ROUGH));
    before.print("every reading believed");
    let (late_before, late_after) = (Rounds::median(&before.late_training), Rounds::median(&after.late_training));
    assert!(late_before > 0.65 && late_after < late_before - 0.1, "{before:?}");
}
