//! Made-up traces whose distributions can be fitted to a real one.
//!
//! **What is kept of a trace.** The mean rate of submissions and how it varies over the hours of a day; the
//! part of jobs of each gang size; for each size the distribution of durations, as 41 quantiles joined in
//! the logarithm. Jobs are independent of each other: bursts of one user are not kept.

use super::TraceJob;
use crate::random::Stream;
use crate::study::quantile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How many quantiles of a duration are kept.
const QUANTILES: usize = 41;

/// What is needed to make up a trace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    pub jobs_per_hour: f64,
    /// Relative rate in each hour of a day that begins with the trace; mean 1.
    pub hours: Vec<f64>,
    pub sizes: Vec<Size>,
}

/// Jobs of one gang size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Size {
    pub devices: u32,
    /// The part of all jobs that have this size.
    pub part: f64,
    /// Durations in seconds, ascending: the quantiles 0, 1/(n−1), …, 1.
    pub durations_s: Vec<f64>,
}

impl Shape {
    /// Fits a shape to a trace in order of submission.
    pub fn fit(jobs: &[TraceJob]) -> Shape {
        let mut by_size: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        let mut hours = [0usize; 24];
        for job in jobs {
            by_size.entry(job.devices).or_default().push(job.duration_s);
            hours[(job.submitted_s / 3600.0) as usize % 24] += 1;
        }
        let span_h = (jobs.last().map_or(0.0, |j| j.submitted_s) / 3600.0).max(1.0 / 60.0);
        let count = jobs.len().max(1) as f64;
        let size = |(devices, durations): (u32, Vec<f64>)| Size {
            devices,
            part: durations.len() as f64 / count,
            durations_s: (0..QUANTILES).map(|q| quantile(&durations, q as f64 / (QUANTILES - 1) as f64)).collect(),
        };
        // A trace shorter than a few days says little about the hours of a day.
        let flat = span_h < 72.0;
        let hours = hours.map(|n| if flat { 1.0 } else { 24.0 * n as f64 / count });
        Shape {
            jobs_per_hour: jobs.len() as f64 / span_h,
            hours: hours.to_vec(),
            sizes: by_size.into_iter().map(size).collect(),
        }
    }

    /// A stand-in for a GPU cluster, for tests and benchmarks: mostly single devices, durations from a
    /// minute to days.
    pub fn typical() -> Shape {
        let durations = |scale: f64| {
            (0..QUANTILES).map(|q| scale * 10f64.powf(1.7 + 3.3 * q as f64 / (QUANTILES - 1) as f64)).collect()
        };
        let sizes = [(1, 0.80, 1.0), (2, 0.06, 1.2), (4, 0.06, 1.5), (8, 0.06, 2.0), (16, 0.02, 2.0)];
        Shape {
            jobs_per_hour: 60.0,
            hours: (0..24).map(|h| 1.0 + 0.5 * (f64::from(h) / 24.0 * std::f64::consts::TAU).sin()).collect(),
            sizes: sizes.map(|(devices, part, scale)| Size { devices, part, durations_s: durations(scale) }).to_vec(),
        }
    }

    /// Makes up `n` jobs.
    pub fn generate(&self, n: usize, seed: u64) -> Vec<TraceJob> {
        let (mut arrivals, mut sizes, mut durations) =
            (Stream::new(seed, 0, "arrivals"), Stream::new(seed, 0, "sizes"), Stream::new(seed, 0, "durations"));
        let whole: f64 = self.sizes.iter().map(|s| s.part).sum();
        let mut now_s = 0.0;
        let job = |i: usize| {
            // Within an hour the rate is constant; an exponential that reaches beyond it is stretched by
            // the rate that holds when it is drawn.
            let hour = self.hours.get((now_s / 3600.0) as usize % 24).copied().unwrap_or(1.0).max(1e-3);
            now_s += arrivals.exponential() * 3600.0 / (self.jobs_per_hour * hour).max(1e-9);
            let mut at = sizes.unit() * whole;
            let size = self.sizes.iter().find(|s| {
                at -= s.part;
                at < 0.0
            });
            let size = size.or(self.sizes.last());
            let duration_s = size.map_or(1.0, |s| s.duration(durations.unit()));
            TraceJob {
                name: format!("job-{i}"),
                submitted_s: now_s,
                duration_s,
                devices: size.map_or(1, |s| s.devices),
                owner: String::new(),
            }
        };
        (0..n).map(job).collect()
    }
}

impl Size {
    fn duration(&self, q: f64) -> f64 {
        let at = q * self.durations_s.len().saturating_sub(1) as f64;
        let (low, part) = (at.floor() as usize, at.fract());
        let value = |i: usize| self.durations_s.get(i).or(self.durations_s.last()).copied().unwrap_or(1.0).max(1e-3);
        (value(low).ln() * (1.0 - part) + value(low + 1).ln() * part).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_to_a_made_up_trace_gives_the_shape_back() {
        let shape = Shape::typical();
        let jobs = shape.generate(30_000, 5);
        let fitted = Shape::fit(&jobs);
        assert!((fitted.jobs_per_hour / shape.jobs_per_hour - 1.0).abs() < 0.05, "{}", fitted.jobs_per_hour);
        for (a, b) in fitted.sizes.iter().zip(&shape.sizes) {
            assert_eq!(a.devices, b.devices);
            assert!((a.part - b.part).abs() < 0.01);
            let (x, y) = (a.durations_s[20], b.durations_s[20]);
            assert!((x / y).ln().abs() < 0.5, "median {x} against {y}");
        }
        assert!((fitted.hours[6] - shape.hours[6]).abs() < 0.15);
        assert_eq!(jobs, shape.generate(30_000, 5));
    }
}
