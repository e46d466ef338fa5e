//! ElasticFlow (D. Gu et al., ASPLOS 2023), rebuilt from its paper and from what its public simulator does.
//!
//! - **Minimum satisfactory share**: in order of deadline, each job gets the least level that makes its
//!   deadline if the job takes that level or the highest free one below it. The late part of the window has
//!   that level, the early part the level below.
//! - **Admission**: jobs that come within one slot are let in together, or refused together if any deadline
//!   would be missed. A refused job is gone.
//! - **Elastic growth**: free GPUs go, level by level, to jobs without GPUs first, then by the GPU time
//!   that the next level costs or saves.
//! - Decisions are at least a slot apart. Every decision costs every running job a restart, a short one if
//!   its GPUs stay. The plan does not contain restarts, so an admitted job can be late, and a late job lets
//!   no new job in until it ends.
//! - A job that starts and would end within one slot is judged by its planned end, unless another decision
//!   finds it unfinished: so does the public simulator, and jobs of half a minute depend on it.
//!
//! On the trace of figure 8a the public simulator meets 142 deadlines and this one 140.

use super::baseline::{run_slotted, slot_end_s};
use super::replay::{Outcome, Run};
use super::timeline::{Period, Reservation, SLOT_S, Timeline};
use super::{Cluster, GpuJob, Kind, Level};
use std::collections::BTreeMap;

/// The most GPUs that ElasticFlow gives to a job of each kind: where its speed stops growing.
fn most_gpus(kind: &Kind) -> u32 {
    match (kind.model.as_str(), kind.batch) {
        ("ncf", _) => 1,
        ("yolov3", _) => 4,
        ("bert", 64) => 8,
        ("bert" | "cifar10", _) | ("gpt2", 128) | ("inception3", 64) => 16,
        ("deepspeech2", 32 | 320) | ("gpt2", 256) | ("inception3", 128) | ("resnet50" | "vgg16", 64) => 32,
        _ => 64,
    }
}

/// What a plan holds for a job, and whether the job makes its deadline with it.
#[derive(Debug, Clone, Default)]
struct Course {
    reservation: Reservation,
    in_time: bool,
}

/// One job's share of the timeline from `now_s` on. With `first`, the job has that level until the timeline
/// first changes.
fn fill(timeline: &Timeline, now_s: i64, run: &Run, job: &GpuJob, first: Option<Level>) -> Course {
    let most = most_gpus(&job.kind);
    let levels: Vec<Level> = job.levels.iter().filter(|l| l.gpus <= most).copied().collect();
    let within = |cap: usize, free: u32| levels[..=cap].iter().rev().find(|l| l.gpus <= free);
    let deadline_s = job.deadline_s;
    let mut steps: Vec<(i64, u32)> = timeline.steps().to_vec();
    if let Err(place) = steps.binary_search_by_key(&deadline_s, |s| s.0)
        && deadline_s > now_s
    {
        steps.insert(place, (deadline_s, steps[place - 1].1));
    }
    let end_of = |i: usize| steps.get(i + 1).map_or(i64::MAX / 4, |s| s.0);
    let mut out = Course::default();
    let mut left = run.left;
    let mut from = 0;
    if let Some(level) = first {
        let end_s = end_of(0);
        let done = level.speed * (end_s - now_s) as f64;
        if done >= left {
            out.reservation.end_s = now_s + (left / level.speed).ceil() as i64;
            out.in_time = out.reservation.end_s <= deadline_s;
            let end_s = slot_end_s(now_s, out.reservation.end_s);
            out.reservation.periods.push(Period { start_s: now_s, end_s, gpus: level.gpus });
            return out;
        }
        left -= done;
        out.reservation.periods.push(Period { start_s: now_s, end_s, gpus: level.gpus });
        from = 1;
    }
    // The least level, and the step from which on that level is needed.
    let last = steps.partition_point(|s| s.0 < deadline_s);
    let found = (0..levels.len()).find_map(|high| {
        let mut work = 0.0;
        (from..last).rev().find_map(|i| {
            let speed = within(high, steps[i].1).map_or(0.0, |l| l.speed);
            work += speed * (end_of(i) - steps[i].0) as f64;
            (work >= left).then_some((high, i))
        })
    });
    let top = levels.len() - 1;
    for (i, &(start_s, free)) in steps.iter().enumerate().skip(from) {
        let cap = match found {
            Some((high, point)) if i < point => high.checked_sub(1),
            Some((high, _)) => Some(high),
            None => Some(top),
        };
        let Some(level) = cap.and_then(|c| within(c, free)) else { continue };
        let end_s = end_of(i);
        let done = level.speed * (end_s - start_s) as f64;
        if done >= left {
            out.reservation.end_s = start_s + (left / level.speed).ceil() as i64;
            out.in_time = out.reservation.end_s <= deadline_s;
            let end_s = slot_end_s(start_s, out.reservation.end_s).min(end_s);
            out.reservation.periods.push(Period { start_s, end_s, gpus: level.gpus });
            return out;
        }
        left -= done;
        out.reservation.periods.push(Period { start_s, end_s, gpus: level.gpus });
    }
    out
}

/// Fills all jobs in order of deadline.
fn fill_all<'a>(
    now_s: i64,
    runs: impl Iterator<Item = &'a Run>,
    jobs: &[GpuJob],
    cluster: Cluster,
) -> (Timeline, BTreeMap<usize, Course>) {
    let mut order: Vec<&Run> = runs.collect();
    order.sort_by_key(|r| (jobs[r.id].deadline_s, r.id));
    let mut timeline = Timeline::new(now_s, cluster);
    let mut courses = BTreeMap::new();
    for run in order {
        let course = fill(&timeline, now_s, run, &jobs[run.id], None);
        timeline.reserve(&course.reservation, now_s);
        courses.insert(run.id, course);
    }
    (timeline, courses)
}

/// A job's next level: what the job would have, and the GPU time it costs more per additional GPU.
fn next_level(
    timeline: &Timeline,
    now_s: i64,
    run: &Run,
    job: &GpuJob,
    course: &Course,
) -> Option<(f64, Timeline, Course)> {
    let gpus = course.reservation.gpus_at(now_s);
    let most = most_gpus(&job.kind);
    let level = job.levels.iter().find(|l| l.gpus > gpus && l.gpus <= most)?;
    if level.gpus - gpus > timeline.least_free(now_s, now_s + 1) {
        return None;
    }
    let mut without = timeline.clone();
    without.release(&course.reservation);
    let grown = fill(&without, now_s, run, job, Some(*level));
    without.reserve(&grown.reservation, now_s);
    let more = grown.reservation.gpu_time(now_s) - course.reservation.gpu_time(now_s);
    let rank = if gpus == 0 { f64::INFINITY } else { more / f64::from(level.gpus - gpus) };
    Some((rank, without, grown))
}

/// Gives away the GPUs that are free now.
fn grow(now_s: i64, runs: &[Run], jobs: &[GpuJob], timeline: &mut Timeline, courses: &mut BTreeMap<usize, Course>) {
    while timeline.least_free(now_s, now_s + 1) > 0 {
        let best = runs
            .iter()
            .filter_map(|r| next_level(timeline, now_s, r, &jobs[r.id], &courses[&r.id]).map(|next| (r.id, next)))
            .max_by(|a, b| a.1.0.total_cmp(&b.1.0).then(b.0.cmp(&a.0)));
        let Some((id, (_, after, course))) = best else { return };
        *timeline = after;
        courses.insert(id, course);
    }
}

/// Runs `jobs` under ElasticFlow.
pub fn elasticflow(jobs: &[GpuJob], cluster: Cluster) -> Outcome {
    let mut refused = vec![false; jobs.len()];
    let idle_s = if cluster.gpus() >= 256 { 7.0 } else { 2.0 };
    let ends = run_slotted(jobs, |now_s, runs, new| {
        if new > 0 {
            let (_, courses) = fill_all(now_s, runs.iter(), jobs, cluster);
            if courses.values().any(|c| !c.in_time) {
                runs.drain(runs.len() - new..).for_each(|r| refused[r.id] = true);
            }
        }
        let (mut timeline, mut courses) = fill_all(now_s, runs.iter(), jobs, cluster);
        grow(now_s, runs, jobs, &mut timeline, &mut courses);
        for run in runs.iter_mut() {
            let gpus = courses[&run.id].reservation.gpus_at(now_s);
            run.restart_left_s = if gpus == run.gpus { idle_s } else { cluster.restart_s(gpus) as f64 };
            let end_s = courses[&run.id].reservation.end_s;
            run.planned_end_s = (gpus != run.gpus && end_s <= now_s + SLOT_S).then_some(end_s);
            run.gpus = gpus;
        }
        // The end of a job is an event by itself.
        let changes = |c: &Course| c.reservation.periods.iter().map(|p| p.start_s).filter(|t| *t > now_s).min();
        courses.values().filter_map(changes).min()
    });
    let met = jobs.iter().zip(&ends).filter(|(j, end)| end.is_some_and(|e| e <= j.deadline_s)).count();
    let refused = refused.iter().filter(|r| **r).count();
    let admitted = jobs.len() - refused;
    Outcome { met, admitted, refused, admitted_missed: admitted - met, ..Outcome::default() }.with_ratio(jobs.len())
}
