//! The three jobs of the story `gain` of `cargo xtask bench gpu` on a simulated GPU: a long one, one that prepares its
//! work more slowly than the GPU carries it out, and a short one that comes last.
//!
//! **How.** What decides is the real thing: [`SharedGpu`], and the reports and orders of [`GpuUse`]. The model plays
//! the GPU's driver (equal slices for all that have work, and what changes between jobs cost), the library (quanta and
//! pauses) and the daemon, which reads the reports and NVML. The figures of the model are those that were measured on
//! an H200 (docs/measurements/machines.md).

use super::*;
use gainshare_core::policy::Preset;
use gainshare_core::signal::{Sample, Tracker};
use gainshare_core::view::Phase;
use gainshare_page::{Report, WHOLE_GPU};

const HERE: NodeId = NodeId(0);

const TICK_S: f64 = 0.005;

/// How long the library lets a job launch before it pauses, and its longest pause.
const QUANTUM_S: f64 = 0.005;
const LONGEST_PAUSE_S: f64 = 0.5;

/// Seconds from the start of a program to its first step, and from then to its first work on the GPU.
const IMPORTS_S: f64 = 8.5;
const WARMS_S: f64 = 0.25;

/// A job launches a little while it makes its model, this long before its first step.
const PREPARES_S: f64 = 1.0;

/// From the last step of a program to its end.
const TIDIES_S: f64 = 0.3;

/// Two jobs that fill the GPU lose this part of it to changes from one to the other.
const LOST: f64 = 0.07;

/// A job as it truly is.
#[derive(Clone, Copy)]
struct Truth {
    starts_s: f64,
    /// How long it would train alone.
    alone_s: f64,
    /// The part of the GPU that it uses alone.
    fills: f64,
    /// The part of its time that it launches, alone. The rest of the time it waits.
    launches: f64,
    /// The part of its time that it waits for its turn beside others, if it does not fill the GPU.
    waits: f64,
    /// Reports a second alone.
    reports_per_s: f64,
}

const STEPS_PER_REPORT: u64 = 10;
const LAUNCHES_PER_S: f64 = 10_000.0;

const LONG: Truth = Truth { starts_s: 0.0, alone_s: 14.0, fills: 1.0, launches: 0.25, waits: 0.0, reports_per_s: 14.4 };
const SLOW: Truth = Truth { starts_s: 3.0, alone_s: 7.0, fills: 0.4, launches: 1.0, waits: 0.1, reports_per_s: 6.5 };
const LATE: Truth = Truth { starts_s: 10.0, alone_s: 3.0, ..LONG };

impl Truth {
    /// When it begins to train.
    fn ready_s(&self) -> f64 {
        self.starts_s + IMPORTS_S
    }
}

/// The library inside a job: launches for a quantum, waits for what it launched, and pauses.
#[derive(Default)]
struct Library {
    /// Seconds of work on the GPU that the quantum has still to do, and how long it took until now.
    left_s: f64,
    busy_s: f64,
    pause_s: f64,
}

impl Library {
    /// Whether the job works in this tick.
    fn works(&mut self, order: (u32, u32), truth: &Truth) -> bool {
        let (part, jobs) = (f64::from(order.0) / f64::from(WHOLE_GPU), f64::from(order.1.max(1)));
        if order.0 == 0 {
            *self = Library::default();
            return true;
        }
        if self.left_s <= 0.0 {
            // The pause follows the order at once, also if the order changes during the pause.
            let whole_s = (self.busy_s / jobs / part - self.busy_s).clamp(0.0, LONGEST_PAUSE_S);
            if self.pause_s < whole_s {
                return false;
            }
            *self = Library { left_s: QUANTUM_S / truth.launches * truth.fills, ..Library::default() };
        }
        true
    }

    fn work(&mut self, got: f64) {
        self.left_s -= got * TICK_S;
        self.busy_s += TICK_S;
    }
}

struct SimulatedJob {
    truth: Truth,
    done_s: f64,
    trained_s: Option<f64>,
    ended_s: Option<f64>,
    tracker: Tracker,
    reports: u64,
    library: Library,
    of: GpuUse,
    report: Report,
    launches: f64,
    /// What it had of the GPU since NVML was read, in seconds of a whole GPU.
    had_s: f64,
}

impl SimulatedJob {
    fn new(truth: Truth) -> SimulatedJob {
        SimulatedJob {
            truth,
            done_s: 0.0,
            trained_s: None,
            ended_s: None,
            tracker: Tracker::default(),
            reports: 0,
            library: Library::default(),
            of: GpuUse::default(),
            report: Report { gpu: 5, gpus: 1, ..Report::default() },
            launches: 0.0,
            had_s: 0.0,
        }
    }

    fn is_training(&self, now_s: f64) -> bool {
        self.trained_s.is_none() && now_s >= self.truth.ready_s() + WARMS_S
    }

    /// A tick in which the job works: `got` is what it has of the GPU.
    fn train(&mut self, got: f64, now_s: f64) {
        let Truth { fills, alone_s, launches, reports_per_s, .. } = self.truth;
        self.library.work(got);
        self.had_s += got * TICK_S;
        let speed = got / fills;
        self.done_s += speed * TICK_S;
        self.launches += LAUNCHES_PER_S * speed * TICK_S;
        self.report.launches = self.launches as u64;
        self.report.waited_ns += ((1.0 - launches * speed).max(0.0) * TICK_S * 1e9) as u64;
        let reports = (reports_per_s * self.done_s) as u64;
        if reports > self.reports {
            self.reports = reports;
            let total = Some(STEPS_PER_REPORT * (reports_per_s * alone_s) as u64);
            let (value, step) = (0.3 + (-self.done_s).exp(), Some(STEPS_PER_REPORT * reports));
            self.tracker.push(Time::from_secs_f64(now_s), Sample { value, step, total });
        }
        self.trained_s = (self.done_s >= alone_s).then_some(now_s);
    }

    fn view(&self, id: u64) -> JobView {
        let since = Time::from_secs_f64(self.truth.starts_s);
        let phase = Phase::Running { node: HERE, since, attempt: 1 };
        let signal = self.tracker.signal();
        JobView { id: JobId(id), arrived: since, phase, signal, on_gpu: true, ..JobView::default() }
    }
}

/// What each job that works gets of the GPU: equal slices, but no more than it can use.
fn dealt(jobs: &[SimulatedJob], works: &[usize]) -> Vec<f64> {
    let mut got = vec![0.0; jobs.len()];
    let mut left = 1.0;
    let mut order = works.to_vec();
    order.sort_by(|&a, &b| jobs[a].truth.fills.total_cmp(&jobs[b].truth.fills));
    for (place, &i) in order.iter().enumerate() {
        let others = order.len() - place - 1;
        let Truth { fills, waits, .. } = jobs[i].truth;
        let most = if others > 0 { fills * (1.0 - waits) } else { fills };
        got[i] = most.min(left / (others + 1) as f64);
        left -= got[i];
    }
    let used: f64 = got.iter().sum();
    let changes = if used > 0.0 { 1.0 - got.iter().map(|got| (got / used) * (got / used)).sum::<f64>() } else { 0.0 };
    got.iter().map(|got| got * (1.0 - 2.0 * LOST * changes)).collect()
}

/// When the daemon does what, in ticks.
#[derive(Clone, Copy)]
struct Daemon {
    /// Between two readings of the reports.
    read: u64,
    /// The first of them; of the readings of NVML; and of the decisions about processors, after which reports are read,
    /// too.
    phases: [u64; 3],
}

const TICKS_PER_S: u64 = 200;

/// The time between two readings of the reports while several jobs use one GPU.
const READ_TICKS: u64 = 50;

/// One round of the three jobs.
struct Round {
    training_s: Vec<f64>,
    makespan_s: f64,
    /// GPU time that nobody used while a job trained.
    idle_s: f64,
}

/// Plays the jobs. `None`: without management.
fn play(truths: &[Truth], daemon: Option<Daemon>) -> Round {
    let mut jobs: Vec<SimulatedJob> = truths.iter().map(|truth| SimulatedJob::new(*truth)).collect();
    let mut gpu = SharedGpu::new(Policy::from(Preset::Gainshare), HERE);
    let mut idle_s = 0.0;
    for tick in 1..20_000 {
        if jobs.iter().all(|job| job.ended_s.is_some()) {
            break;
        }
        let now_s = tick as f64 * TICK_S;
        let now = Time::from_secs_f64(now_s);
        let trains: Vec<usize> = (0..jobs.len()).filter(|&i| jobs[i].is_training(now_s)).collect();
        let mut works = Vec::new();
        for &i in &trains {
            let job = &mut jobs[i];
            match job.library.works(job.of.order, &job.truth) {
                true => works.push(i),
                false => {
                    job.library.pause_s += TICK_S;
                    job.report.paused_ns += (TICK_S * 1e9) as u64;
                }
            }
        }
        let got = dealt(&jobs, &works);
        if !trains.is_empty() {
            idle_s += (1.0 - got.iter().sum::<f64>()) * TICK_S;
        }
        for i in works {
            jobs[i].train(got[i], now_s);
        }
        let mut has_ended = false;
        for job in &mut jobs {
            if (now_s - job.truth.ready_s() + PREPARES_S).abs() < TICK_S {
                job.launches += 30.0;
                job.report.launches += 30;
            }
            if job.ended_s.is_none() && job.trained_s.is_some_and(|at_s| now_s >= at_s + TIDIES_S) {
                job.ended_s = Some(now_s);
                has_ended = true;
            }
        }
        let Some(Daemon { read, phases: [beat, nvml, decision] }) = daemon else { continue };
        if tick % TICKS_PER_S == nvml {
            for job in jobs.iter_mut().filter(|job| job.ended_s.is_none()) {
                let measured = GpuMeasurement::on(&[5], now, Some(job.had_s));
                job.of.measure(Some(measured), 1.0);
                job.had_s = 0.0;
            }
        }
        if tick % read == beat % read || tick % TICKS_PER_S == decision || has_ended {
            share(&mut gpu, &mut jobs, now);
        }
    }
    let ends: Vec<f64> = jobs.iter().map(|job| job.ended_s.expect("every job ends")).collect();
    let training_s = ends.iter().zip(truths).map(|(end, truth)| end - truth.ready_s()).collect();
    Round { training_s, makespan_s: ends.into_iter().fold(0.0, f64::max), idle_s }
}

/// The daemon reads the reports and decides.
fn share(gpu: &mut SharedGpu, jobs: &mut [SimulatedJob], now: Time) {
    let mut active: Vec<usize> = Vec::new();
    for (i, job) in jobs.iter_mut().enumerate().filter(|(_, job)| job.ended_s.is_none()) {
        job.of.record(&job.report, now);
        job.of.order = (0, 0);
        active.extend(job.of.is_active(now).then_some(i));
    }
    let mut views: Vec<(JobView, GpuUse)> =
        active.iter().map(|&i| (jobs[i].view(i as u64), jobs[i].of.clone())).collect();
    gpu.share(&mut views, now);
    let replay = gpu.record.as_ref().map(|record| record.replay().expect("it can be replayed"));
    assert_eq!(replay.map_or(vec![], |replay| replay.differences), vec![]);
    for (i, (_, of)) in active.into_iter().zip(views) {
        jobs[i].of = of;
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

const ROUNDS: u64 = 21;

/// Many rounds under the policy. They differ in when the daemon does what.
fn rounds(truths: &[Truth]) -> Vec<Round> {
    let round = |seed: u64| {
        let phases = [37 * seed % TICKS_PER_S, 91 * seed % TICKS_PER_S, 153 * seed % TICKS_PER_S];
        play(truths, Some(Daemon { read: READ_TICKS, phases }))
    };
    (1..=ROUNDS).map(round).collect()
}

#[test]
fn the_model_takes_as_long_as_the_benchmark_without_management() {
    let found = play(&[LONG, SLOW, LATE], None);
    // The medians of sixteen rounds.
    for (modelled, measured) in found.training_s.iter().zip([21.9, 8.6, 7.5]) {
        assert!((modelled / measured - 1.0).abs() < 0.06, "{:?}", found.training_s);
    }
}

#[test]
fn the_late_short_job_ends_sooner_and_all_jobs_together_no_later() {
    // The last two wait for a fifth of their time, so that the others are paced for them, and they hold the late job
    // up.
    for (fills, waits, most_late) in
        [(0.36, 0.1, 0.6), (0.4, 0.05, 0.6), (0.4, 0.1, 0.6), (0.4, 0.15, 0.65), (0.44, 0.15, 0.65)]
    {
        let three = [LONG, Truth { fills, waits, ..SLOW }, LATE];
        let (equal, managed) = (play(&three, None), rounds(&three));
        let change = |of: &dyn Fn(&Round) -> f64| median(managed.iter().map(of).collect()) / of(&equal);
        let [long, slow, late] = [0, 1, 2].map(|job: usize| change(&|round| round.training_s[job]));
        let (makespan, idle_s) =
            (change(&|round| round.makespan_s), median(managed.iter().map(|r| r.idle_s).collect()));
        let found = format!(
            "fills {fills}, waits {waits}: long {long:.3}, slow {slow:.3}, late {late:.3}, makespan {makespan:.3}, idle \
             {idle_s:.2} s, else {:.2} s",
            equal.idle_s
        );
        println!("{found}");
        assert!(late < most_late && makespan < 1.03 && long < 1.05 && slow < 1.25, "{found}");
    }
}

#[test]
fn an_unsound_plan_for_a_gpu_changes_no_share() {
    let (mut gpu, now) = (SharedGpu::new(Policy::from(Preset::Gainshare), HERE), Time::from_secs_f64(1.0));
    let mut jobs: Vec<(JobView, GpuUse)> =
        (1..=2).map(|id| (SimulatedJob::new(LONG).view(id), GpuUse::default())).collect();
    assert_eq!(gpu.share(&mut jobs, now), Some(Ok(())));
    let shares = |jobs: &[(JobView, GpuUse)]| jobs.iter().map(|(_, of)| of.share).collect::<Vec<_>>();
    let (before, record) = (shares(&jobs), gpu.record.clone());
    assert!(before.iter().all(Option::is_some));
    gpu.control.break_plans();
    jobs.push((SimulatedJob::new(LONG).view(3), GpuUse::default()));
    let outcome = gpu.share(&mut jobs, Time::from_secs_f64(2.0));
    assert!(matches!(&outcome, Some(Err(rejection)) if rejection.reasons().contains("another moment")), "{outcome:?}");
    assert_eq!((shares(&jobs[..2]), jobs[2].1.share, gpu.record), (before, None, record));
}
