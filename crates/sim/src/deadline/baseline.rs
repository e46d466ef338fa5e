//! The schedulers without promises: earliest deadline first, and Tiresias.
//!
//! Both are rebuilt as ElasticFlow's public simulator runs them (its figure 8): decisions are at least one
//! slot apart, an event in between waits for the end of the slot, and GPUs of a job that ends within a slot
//! stay idle until the slot ends.
//!
//! - **EDF**: the job with the earliest deadline gets as many GPUs as its speed table goes; the next jobs
//!   get the largest count of the table that is still free. A job past its deadline goes on. Restarts cost
//!   nothing.
//! - **Tiresias**: each job runs on the GPUs it asked for, all or none. Three queues by attained service
//!   (GPU seconds); within a queue running jobs come first, then waiting ones by submission. It does not
//!   know deadlines. A start costs a restart.

use super::replay::{Outcome, Run};
use super::timeline::SLOT_S;
use super::{Cluster, GpuJob};

/// Tiresias' limits of the first two queues in GPU seconds, as in ElasticFlow's simulator.
const QUEUE_LIMITS: [f64; 2] = [3250.0, 7200.0];

/// Runs a trace with decisions at least a slot apart. `decide` sees the time, the unfinished jobs and how
/// many of them, at the end of the list, are new; it sets their GPUs, may remove jobs, and returns when it
/// wants to decide again. Returns the end of each job that was not removed.
pub(super) fn run_slotted(
    jobs: &[GpuJob],
    mut decide: impl FnMut(i64, &mut Vec<Run>, usize) -> Option<i64>,
) -> Vec<Option<i64>> {
    let mut ends = vec![None; jobs.len()];
    let mut runs: Vec<Run> = vec![];
    let (mut next, mut wake_s) = (0, None);
    let mut now_s = jobs.first().map_or(0, |j| j.submitted_s - SLOT_S);
    loop {
        let arrival_s = jobs.get(next).map(|j| j.submitted_s);
        let end_s = runs.iter().filter_map(|r| release_s(r, &jobs[r.id], now_s)).min();
        let Some(event_s) = [arrival_s, end_s, wake_s].into_iter().flatten().min() else { return ends };
        let event_s = event_s.max(now_s + SLOT_S);
        runs.retain_mut(|run| {
            let job = &jobs[run.id];
            let ended = release_s(run, job, now_s).is_some_and(|end_s| end_s <= event_s);
            if ended {
                ends[run.id] = planned_end_s(run, now_s).or(run.end_s(job, now_s));
            }
            run.advance(job, planned_end_s(run, now_s).map_or(event_s, |end_s| end_s.min(event_s)) - now_s);
            !ended
        });
        now_s = event_s;
        let old = runs.len();
        while let Some(job) = jobs.get(next).filter(|j| j.submitted_s <= now_s) {
            runs.push(Run::new(next, job));
            next += 1;
        }
        let new = runs.len() - old;
        wake_s = decide(now_s, &mut runs, new).filter(|w| *w > now_s);
    }
}

/// When a job gives its GPUs back if nothing changes. A planned end is moved to the end of its slot, and
/// then by the restart that the plan left out; a decision before that finds the job unfinished.
fn release_s(run: &Run, job: &GpuJob, now_s: i64) -> Option<i64> {
    let end_s = run.end_s(job, now_s)?;
    let restart_s = run.restart_left_s.ceil() as i64;
    Some(planned_end_s(run, now_s).map_or(end_s, |planned_s| slot_end_s(now_s, planned_s) + restart_s))
}

/// The end that the scheduler planned. A job whose remaining work is shorter than its restart has none and
/// works until it ends: it would otherwise restart for ever.
fn planned_end_s(run: &Run, now_s: i64) -> Option<i64> {
    run.planned_end_s.filter(|end_s| (end_s - now_s) as f64 > run.restart_left_s)
}

/// The first end of a slot at or after `at_s`, for slots that begin at `from_s`.
pub(super) fn slot_end_s(from_s: i64, at_s: i64) -> i64 {
    from_s + (at_s - from_s + SLOT_S - 1).div_euclid(SLOT_S) * SLOT_S
}

/// The outcome of a scheduler without promises: every job is let in.
fn outcome(jobs: &[GpuJob], ends: &[Option<i64>]) -> Outcome {
    let met = jobs.iter().zip(ends).filter(|(j, end)| end.is_some_and(|e| e <= j.deadline_s)).count();
    Outcome { met, admitted: jobs.len(), admitted_missed: jobs.len() - met, ..Outcome::default() }
        .with_ratio(jobs.len())
}

/// Earliest deadline first.
pub fn edf(jobs: &[GpuJob], cluster: Cluster) -> Outcome {
    let ends = run_slotted(jobs, |_, runs, _| {
        let mut free = cluster.gpus();
        let mut order: Vec<&mut Run> = runs.iter_mut().collect();
        order.sort_by_key(|r| (jobs[r.id].deadline_s, r.id));
        for run in order {
            let most = free.min(jobs[run.id].kind.batch);
            run.gpus = jobs[run.id].levels.iter().rev().find(|l| l.gpus <= most).map_or(0, |l| l.gpus);
            free -= run.gpus;
        }
        None
    });
    outcome(jobs, &ends)
}

/// Tiresias.
pub fn tiresias(jobs: &[GpuJob], cluster: Cluster) -> Outcome {
    let mut attained = vec![0.0; jobs.len()];
    let mut last_s = 0;
    // Speed is relative: every job has its duration as work and a speed of one.
    let relative: Vec<GpuJob> = jobs
        .iter()
        .map(|j| GpuJob {
            iterations: j.duration_s as f64,
            levels: [super::Level { gpus: j.requested_gpus, speed: 1.0 }].into(),
            ..j.clone()
        })
        .collect();
    let ends = run_slotted(&relative, |now_s, runs, _| {
        for run in runs.iter().filter(|r| r.gpus > 0) {
            attained[run.id] += f64::from(run.gpus) * (now_s - last_s) as f64;
        }
        last_s = now_s;
        let queue = |id: usize| QUEUE_LIMITS.iter().filter(|limit| attained[id] >= **limit).count();
        let mut order: Vec<&mut Run> = runs.iter_mut().collect();
        order.sort_by_key(|r| (queue(r.id), r.gpus == 0, jobs[r.id].submitted_s, r.id));
        let mut free = cluster.gpus();
        let mut wake_s: Option<i64> = None;
        for run in order {
            let gpus = jobs[run.id].requested_gpus;
            let starts = free >= gpus;
            if starts && run.gpus == 0 {
                run.restart_left_s = cluster.restart_s(gpus) as f64;
            }
            run.gpus = if starts { gpus } else { 0 };
            free -= run.gpus;
            if let Some(limit) = QUEUE_LIMITS.get(queue(run.id)).filter(|_| starts) {
                let falls_s = now_s + ((limit - attained[run.id]) / f64::from(gpus)).ceil() as i64;
                wake_s = wake_s.into_iter().chain([falls_s]).min();
            }
        }
        wake_s
    });
    outcome(jobs, &ends)
}
