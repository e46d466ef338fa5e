//! How well [`gainshare_core::forecast`] predicts when jobs end, over many simulated worlds.
//!
//! **Problem.** A prediction is judged by the ends that it predicted. Real runs take minutes each and
//! differ from run to run; here thousands of jobs are judged in a minute.
//!
//! **How.** Each world runs under each policy. At fixed times the forecast of every job is made. After
//! the run, the first forecast after a tenth of each job's run is compared with its end, and so is what
//! the job would have taken at its share of that moment (the rule that the forecast replaces).
//!
//! **The worlds.** `short` and `enough` are those of [`crate::paper::qos`]. `batch` has twelve of its jobs
//! at once, so that no job arrives later. `mix` is that of `cargo xtask e2e local-deadline`: ten jobs on one
//! core within half of the time. No job learns from the end of another: what is judged is what a job's own reports say.
//!
//! **Terms.** An error is (predicted − actual end) / length of the run. A job is *undisturbed* if no job
//! arrived between the forecast and its end.

use crate::engine::{SimError, run_probed};
use crate::paper::qos::Regime;
use crate::study::quantile;
use crate::world::{Node, Speedup, World};
use gainshare_core::forecast::Forecaster;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::signal::speed::Interval;
use gainshare_core::view::Deadline;
use serde::Serialize;
use std::collections::BTreeMap;

/// Forecasts of one world: a tenth of a short job must be found well enough.
const PROBES: f64 = 300.0;

/// The part of a run after which its forecast is judged.
const AFTER: f64 = 0.1;

/// Which world is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Short,
    Enough,
    Batch,
    Mix,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Short, Kind::Enough, Kind::Batch, Kind::Mix];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Short => "short",
            Kind::Enough => "enough",
            Kind::Batch => "batch",
            Kind::Mix => "mix",
        }
    }

    pub fn world(self, seed: u64) -> World {
        match self {
            Kind::Short => Regime::Short.world(seed, false).forgetful(),
            Kind::Enough => Regime::Enough.world(seed, false).forgetful(),
            Kind::Batch => {
                let mut world = Regime::Short.world(seed, false).forgetful();
                world.jobs.truncate(12);
                for job in &mut world.jobs {
                    job.deadline = job.deadline.map(|d| Deadline::strict(Time::ZERO + d.at.since(job.arrival)));
                    job.arrival = Time::ZERO;
                }
                world
            }
            Kind::Mix => mix(seed),
        }
    }
}

/// Arrival, work and deadline of the jobs of `local-deadline`, as parts of its horizon.
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

fn mix(seed: u64) -> World {
    const HORIZON_S: f64 = 100.0;
    const REPORTS: f64 = 100.0;
    let node = Node { name: "core".into(), cores: 1.0, speed: 1.0, memory_bytes: 1 << 40, slots: None };
    let mut world = Regime::Short.world(seed, false).forgetful();
    world.nodes = vec![node];
    world.jobs.truncate(MIX.len());
    for (job, (arrives, work, deadline)) in world.jobs.iter_mut().zip(MIX) {
        job.arrival = Time::from_secs_f64(arrives * HORIZON_S);
        (job.work_core_s, job.max_cores, job.speedup) = (work * HORIZON_S, 1.0, Speedup::Linear);
        job.report_every_core_s = job.work_core_s / REPORTS;
        job.request = None;
        job.deadline = deadline.map(|d| Deadline::strict(Time::from_secs_f64(d * HORIZON_S)));
    }
    world
}

/// How good the prediction of one job's end was after a tenth of its run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForecastScore {
    /// Errors of the forecast, and of the rule that a job keeps its share, as parts of the run's length.
    pub error: f64,
    pub kept_share_error: f64,
    pub is_inside: bool,
    pub is_undisturbed: bool,
}

/// The forecasts of some jobs, summed up.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Accuracy {
    pub jobs: usize,
    pub median_error: f64,
    pub ninetieth_error: f64,
    /// The part of the ends within the predicted 80 %.
    pub inside: f64,
    /// The mean error with its sign: positive if ends are predicted too late.
    pub bias: f64,
    pub kept_share_median_error: f64,
}

impl Accuracy {
    pub fn of<'a>(jobs: impl Iterator<Item = &'a ForecastScore>) -> Accuracy {
        let jobs: Vec<&ForecastScore> = jobs.collect();
        let errors: Vec<f64> = jobs.iter().map(|j| j.error.abs()).collect();
        let kept: Vec<f64> = jobs.iter().map(|j| j.kept_share_error.abs()).collect();
        let count = jobs.len().max(1) as f64;
        Accuracy {
            jobs: jobs.len(),
            median_error: quantile(&errors, 0.5),
            ninetieth_error: quantile(&errors, 0.9),
            inside: jobs.iter().filter(|j| j.is_inside).count() as f64 / count,
            bias: jobs.iter().map(|j| j.error).sum::<f64>() / count,
            kept_share_median_error: quantile(&kept, 0.5),
        }
    }
}

/// One moment's forecasts, and what the rule of the kept share predicts.
type Probe = (Time, BTreeMap<JobId, (Interval, f64)>);

/// Compares the forecasts in one world under one policy with the ends of its jobs.
pub fn score(world: &World, preset: Preset) -> Result<Vec<ForecastScore>, SimError> {
    let cores: f64 = world.nodes.iter().map(|n| n.cores * n.speed).sum();
    let last_arrival_s = world.jobs.iter().map(|j| j.arrival.as_secs_f64()).fold(0.0, f64::max);
    let length_s = last_arrival_s.max(world.jobs.iter().map(|j| j.work_core_s).sum::<f64>() / cores);
    let every = Span::from_secs_f64(length_s / PROBES);
    let mut forecaster = Forecaster::default();
    let mut probes: Vec<Probe> = vec![];
    let outcome = run_probed(world, &Policy::from(preset), every, &mut |decider, view| {
        forecaster.update(decider, view);
        let with_kept = view.jobs.iter().filter_map(|job| {
            let end = forecaster.ends_in_s(job.id, view.now)?;
            let share = decider.target(job.id).map_or(1.0, |t| t.share.cpu.get());
            let kept = job.signal.ends_in_s(view.now, share).map_or(f64::NAN, |e| e.mid);
            Some((job.id, (end, kept)))
        });
        probes.push((view.now, with_kept.collect()));
    })?;
    let mut scores = vec![];
    for (i, job) in outcome.jobs.iter().enumerate() {
        let (Some(stay), Some(finished)) = (job.stays.first(), job.finished) else { continue };
        let (began_s, ended_s) = (stay.from.as_secs_f64(), finished.as_secs_f64());
        let run_s = (ended_s - began_s).max(1e-9);
        let id = JobId(i as u64);
        let is_late_enough = |p: &&Probe| p.0.as_secs_f64() >= began_s + AFTER * run_s && p.1.contains_key(&id);
        let Some((at, ends)) = probes.iter().find(is_late_enough) else { continue };
        let ((end, kept_s), at_s) = (ends[&id], at.as_secs_f64());
        if at_s >= ended_s {
            continue;
        }
        let left_s = ended_s - at_s;
        scores.push(ForecastScore {
            error: (end.mid - left_s) / run_s,
            kept_share_error: (kept_s - left_s) / run_s,
            is_inside: (end.low..=end.high).contains(&left_s),
            is_undisturbed: !world.jobs.iter().any(|j| j.arrival > *at && j.arrival < finished),
        });
    }
    Ok(scores)
}
