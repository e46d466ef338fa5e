//! The gain rule on machines where the team of threads of each job follows its share, with jobs as they were measured:
//! a second core adds 6 to 50 % to the speed of PyTorch jobs.

mod world;

use gainshare_core::decider::Decider;
use gainshare_core::model::*;
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::scaling::busy_cores;
use gainshare_core::signal::{Sample, Tracker};
use gainshare_core::view::*;

/// A job as it truly is.
struct Truth {
    arrival_s: f64,
    /// Work in seconds of one core, without the start.
    work: f64,
    /// The speed with two threads, where one thread has 1.
    two_threads: f64,
    reports: u32,
    prints_total: bool,
}

fn job_with_total(arrival_s: f64, work: f64, two_threads: f64, reports: u32) -> Truth {
    Truth { arrival_s, work, two_threads, reports, prints_total: true }
}

fn job_without_total(arrival_s: f64, work: f64, two_threads: f64, reports: u32) -> Truth {
    Truth { prints_total: false, ..job_with_total(arrival_s, work, two_threads, reports) }
}

/// The six jobs of `cargo xtask bench torch`: a VAE, a convolutional net, a recurrent net, a classifier, a transformer
/// and a short classifier.
fn six_jobs() -> [Truth; 6] {
    [
        job_without_total(0.0, 26.0 * 1.24, 1.24, 80),
        job_with_total(4.0, 16.0 * 1.5, 1.5, 3),
        job_without_total(8.0, 10.0 * 1.32, 1.32, 3),
        job_with_total(12.0, 8.0 * 1.06, 1.06, 38),
        job_without_total(18.0, 6.0 * 1.25, 1.25, 3),
        job_with_total(24.0, 3.0 * 1.06, 1.06, 14),
    ]
}

/// Every program imports its libraries first. That takes this many seconds of one core.
const IMPORT_S: f64 = 2.0;

/// The part of the work on one thread that two threads in use for 1.8 cores show.
const SERIAL: f64 = 0.07;

/// Steps between two reports.
const STEPS: u64 = 20;

/// Seconds between two steps of the make-believe machine.
const TICK_S: f64 = 0.1;

impl Truth {
    /// The speed with a team of `threads` on as many cores, where one core has 1: Amdahl's law, less what threads lose
    /// that wait for each other.
    fn speed(&self, threads: f64) -> f64 {
        let worth = self.two_threads / busy_cores(SERIAL, 2.0);
        if threads < 1.5 { threads } else { worth * busy_cores(SERIAL, threads) }
    }
}

/// How long each job took under `preset`, from its arrival to its end, on a machine with `cores`.
fn completion_s(jobs: &[Truth], preset: Preset, cores: f64) -> Vec<f64> {
    let mut decider = Decider::new(Policy::from(preset));
    let node = |idle: f64| NodeView {
        id: NodeId(0),
        cores,
        speed: 1.0,
        memory_bytes: 1 << 34,
        slots: None,
        idle: Some(idle / cores),
    };
    let count = jobs.len();
    let (mut used, mut done, mut said) = (vec![0.0f64; count], vec![-IMPORT_S; count], vec![0u64; count]);
    let mut trackers = vec![Tracker::default(); count];
    let (mut ended, mut shares, mut idle) = (vec![None; count], vec![1.0f64; count], 0.0);
    for tick in 1.. {
        assert!(tick < 100_000, "the jobs never end");
        let now_s = f64::from(tick) * TICK_S;
        let here: Vec<usize> = (0..count).filter(|&i| jobs[i].arrival_s <= now_s && ended[i].is_none()).collect();
        if ended.iter().all(Option::is_some) {
            break;
        }
        let views = here.iter().map(|&i| JobView {
            id: JobId(i as u64),
            arrived: Time::from_secs_f64(jobs[i].arrival_s),
            phase: Phase::Running { node: NodeId(0), since: Time::from_secs_f64(jobs[i].arrival_s), attempt: 1 },
            signal: trackers[i].signal(),
            consumed: PerResource { cpu: used[i] / cores, ..PerResource::default() },
            has_team: true,
            on_one_core: done[i] < 0.0,
            serial: (cores > 2.0 && done[i] > 1.0).then_some(SERIAL),
            ..JobView::default()
        });
        let view = View { now: Time::from_secs_f64(now_s), nodes: vec![node(idle)], jobs: views.collect() };
        if let Some(plan) = world::decide(&mut decider, view) {
            for &i in &here {
                shares[i] = world::share(&plan, i as u64);
            }
        }
        // Each job has as many threads as its share has cores, and no more than that of the machine.
        let team = |i: usize| if done[i] < 0.0 { 1.0 } else { (shares[i] * cores).round().max(1.0) };
        let threads: Vec<f64> = (0..count).map(team).collect();
        let mut got = vec![0.0; count];
        let mut left = cores;
        for _ in 0..count {
            let open: Vec<usize> = here.iter().copied().filter(|&i| got[i] < threads[i] - 1e-9).collect();
            let weights: f64 = open.iter().map(|&i| shares[i]).sum();
            let part = left;
            for &i in &open {
                let more = (part * shares[i] / weights).min(threads[i] - got[i]);
                (got[i], left) = (got[i] + more, left - more);
            }
        }
        idle += left.max(0.0) * TICK_S;
        for &i in &here {
            let speed = if done[i] < 0.0 { got[i] } else { got[i] / threads[i] * jobs[i].speed(threads[i]) };
            used[i] += got[i] / threads[i] * busy_cores(SERIAL, threads[i]) * TICK_S;
            done[i] += speed * TICK_S;
            let step = (done[i].max(0.0) / jobs[i].work * f64::from(jobs[i].reports)) as u64;
            if step > said[i] {
                said[i] = step;
                let value = 1.0 + (-4.0 * done[i] / jobs[i].work).exp();
                let total = jobs[i].prints_total.then_some(STEPS * u64::from(jobs[i].reports));
                trackers[i].push(Time::from_secs_f64(now_s), Sample { value, step: Some(STEPS * step), total });
            }
            if done[i] >= jobs[i].work {
                ended[i] = Some(now_s - jobs[i].arrival_s);
            }
        }
    }
    ended.into_iter().map(|end| end.expect("the loop ends when all have")).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn makespan(jobs: &[Truth], took: &[f64]) -> f64 {
    jobs.iter().zip(took).map(|(job, took)| job.arrival_s + took).fold(0.0, f64::max)
}

/// What the gain rule does, as parts of what equal shares give.
#[derive(Debug)]
struct Comparison {
    mean: f64,
    makespan: f64,
    /// The job that fares worst.
    worst: f64,
    /// The job that came last.
    late: f64,
}

fn compare(jobs: &[Truth], cores: f64) -> Comparison {
    let (na, ours) = (completion_s(jobs, Preset::Na, cores), completion_s(jobs, Preset::Gainshare, cores));
    let parts: Vec<f64> = na.iter().zip(&ours).map(|(na, ours)| ours / na).collect();
    Comparison {
        mean: mean(&ours) / mean(&na),
        makespan: makespan(jobs, &ours) / makespan(jobs, &na),
        worst: parts.iter().copied().fold(0.0, f64::max),
        late: parts[parts.len() - 1],
    }
}

#[test]
fn six_jobs_on_two_cores_end_sooner_and_none_pays() {
    let found = compare(&six_jobs(), 2.0);
    assert!(found.mean < 0.85 && found.makespan < 1.03 && found.worst < 1.1, "{found:?}");
}

#[test]
fn the_late_job_on_sixteen_cores_ends_sooner_and_none_pays() {
    // The same jobs, sixteen times as long, as jobs on larger machines are.
    let jobs = six_jobs().map(|job| Truth { work: 16.0 * job.work, two_threads: job.two_threads.max(1.5), ..job });
    for (count, late) in [(3, 0.9), (6, 0.7)] {
        let found = compare(&jobs[6 - count..], 16.0);
        assert!(found.late < late && found.makespan < 1.06 && found.worst < 1.08, "{count} jobs: {found:?}");
    }
}
