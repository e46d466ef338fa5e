//! Speeds and lengths of jobs, learned while they run.
//!
//! **Problem.** A scheduler is rarely given the speed table of a job and its number of iterations. ElasticFlow
//! profiles every model beforehand; here both are learned online.
//!
//! **What is known.** At submission: the deadline, the kind of job (model and batch size) and the counts of
//! GPUs that the job can run on. Once the job has worked [`REPORT_S`] seconds on some count, its first
//! report shows how many iterations it will make in all, and its speed on that count.
//!
//! **What is predicted.** The *length* of a job that has not reported: the longest of the earlier jobs of
//! its kind, if they were about equally long. The *speed* on a count where no job of the kind has run: from
//! the nearest measured count, by the factor between the two counts that was measured for another batch size
//! of the same model, or else for all kinds together, or else [`DOUBLING`] for each doubling; times
//! [`CAUTION`]. A job without a length is *unknown*: it gets its lowest level as a probe, and no promise.
//!
//! **Properties.** A measured speed is never replaced by a prediction.

use super::{GpuJob, Kind, Level, efficient_levels, useful_levels};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Seconds of work after which a job has reported its speed and its length.
pub const REPORT_S: f64 = 10.0;

/// How much faster twice the GPUs are if no job has shown it yet.
const DOUBLING: f64 = 1.7;

/// Predicted speeds are lowered to this part, since a broken promise is worse than an idle GPU.
const CAUTION: f64 = 0.9;

/// Jobs of a kind are of one length if the longest is at most this many times as long as the shortest.
const ALIKE: f64 = 1.1;

#[derive(Debug, Clone, Default)]
struct Record {
    /// Speed by GPUs.
    measured: BTreeMap<u32, f64>,
    /// Lengths of the jobs that reported, ascending.
    lengths: Vec<f64>,
}

/// What has been learned of all kinds of jobs.
#[derive(Debug, Clone, Default)]
pub struct Beliefs {
    kinds: BTreeMap<Kind, Record>,
    /// Length of each job that has reported.
    reported: BTreeMap<usize, f64>,
    tables: BTreeMap<Kind, [Arc<[Level]>; 2]>,
}

/// What is believed of one job.
#[derive(Debug, Clone)]
pub struct Belief {
    /// Iterations in all; none while the length can be neither seen nor predicted.
    pub iterations: Option<f64>,
    pub useful: Arc<[Level]>,
    pub efficient: Arc<[Level]>,
}

impl Belief {
    /// Whether a speed or the length differs from the truth. With true beliefs every promise holds, so only
    /// a wrong one can cost a promised job its deadline.
    pub fn is_wrong(&self, iterations: f64, useful: &[Level]) -> bool {
        let same = |(a, b): (&Level, &Level)| a.gpus == b.gpus && (a.speed / b.speed - 1.0).abs() < 1e-6;
        let same_speeds = self.useful.len() == useful.len() && self.useful.iter().zip(useful).all(same);
        self.iterations != Some(iterations) || !same_speeds
    }
}

impl Beliefs {
    /// Whether a report of a job of this kind on `gpus` GPUs would be news.
    pub fn lacks(&self, id: usize, kind: &Kind, gpus: u32) -> bool {
        let measured = self.kinds.get(kind).is_some_and(|r| r.measured.contains_key(&gpus));
        gpus > 0 && (!measured || !self.reported.contains_key(&id))
    }

    /// Takes in a report: the job's length, and its speed on `gpus` GPUs.
    pub fn report(&mut self, id: usize, job: &GpuJob, gpus: u32, speed: f64) {
        let record = self.kinds.entry(job.kind.clone()).or_default();
        record.measured.insert(gpus, speed);
        if self.reported.insert(id, job.iterations).is_none() {
            let place = record.lengths.partition_point(|l| *l < job.iterations);
            record.lengths.insert(place, job.iterations);
        }
        // A new speed can change the predictions of every kind.
        self.tables.clear();
    }

    /// What is believed of a job now. `counts` are the counts of GPUs that it can run on.
    pub fn belief(&mut self, id: usize, kind: &Kind, counts: impl Iterator<Item = u32>) -> Belief {
        let lengths = self.kinds.get(kind).map_or(&[][..], |r| &r.lengths);
        let alike = |l: &[f64]| l.first().zip(l.last()).is_some_and(|(least, most)| *most <= ALIKE * least);
        let typical = if alike(lengths) { lengths.last().copied() } else { None };
        let iterations = self.reported.get(&id).copied().or(typical);
        if !self.tables.contains_key(kind) {
            let levels: Vec<Level> = counts.map(|gpus| Level { gpus, speed: self.speed(kind, gpus) }).collect();
            let useful = useful_levels(&levels, u32::MAX);
            let table = [useful.clone().into(), efficient_levels(&useful).into()];
            self.tables.insert(kind.clone(), table);
        }
        let [useful, efficient] = self.tables[kind].clone();
        Belief { iterations, useful, efficient }
    }

    fn speed(&self, kind: &Kind, gpus: u32) -> f64 {
        let empty = Record::default();
        let measured = &self.kinds.get(kind).unwrap_or(&empty).measured;
        if let Some(speed) = measured.get(&gpus) {
            return *speed;
        }
        let doublings = |g: u32| (f64::from(g).log2() - f64::from(gpus).log2()).abs();
        let nearest = measured.iter().min_by(|a, b| doublings(*a.0).total_cmp(&doublings(*b.0)));
        // Without any measurement only the shape matters: the job is unknown.
        let (&from, &speed) = nearest.unwrap_or((&1, &1.0));
        speed * self.factor(kind, from, gpus) * CAUTION
    }

    /// How much faster a job of this kind is expected to be on `to` GPUs than on `from`.
    fn factor(&self, kind: &Kind, from: u32, to: u32) -> f64 {
        let shown = |record: &Record| Some(record.measured.get(&to)? / record.measured.get(&from)?);
        let same_model = self.kinds.iter().filter(|(k, _)| k.model == kind.model).find_map(|(_, r)| shown(r));
        let all: Vec<f64> = self.kinds.values().filter_map(shown).collect();
        let mean = (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64);
        let doublings = f64::from(to).log2() - f64::from(from).log2();
        same_model.or(mean).unwrap_or_else(|| DOUBLING.powf(doublings))
    }
}
