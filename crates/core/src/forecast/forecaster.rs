//! The forecasts of one driver: what it remembers between two of them, and the last result.
//!
//! *What is available* is the part of a node that its jobs get together. It is measured from reading to reading, also
//! while jobs come: what a new job has consumed, it has consumed since the last reading. Right after the start the
//! first readings count for most of it.

use super::calibration::{Calibration, widened};
use super::project::{Surroundings, project};
use super::scenario::Scenario;
use super::spread::Spreads;
use super::{Arrivals, is_of_use, with_arrivals};
use crate::decider::Decider;
use crate::model::{JobId, Time};
use crate::signal::speed::Interval;
use crate::view::View;
use std::collections::BTreeMap;

/// What is available is a mean over this many seconds.
const MEMORY_S: f64 = 20.0;

/// Before anything was measured, all is believed to be available, as surely as if it had been measured for this many
/// seconds.
const PRIOR_S: f64 = 1.0;

/// A shorter interval between two readings says little of what is available.
const SHORTEST_S: f64 = 0.2;

/// Keeps the forecasts of a driver's jobs between two views.
#[derive(Debug, Clone, PartialEq)]
pub struct Forecaster {
    arrivals: Arrivals,
    calibration: Calibration,
    spreads: Spreads,
    available: f64,
    /// The seconds that count for what is available; older ones fade.
    measured_s: f64,
    /// The node-seconds that each running job had consumed at the last reading.
    before: Option<(Time, BTreeMap<JobId, f64>)>,
    made_at: Time,
    ends: BTreeMap<JobId, Interval>,
}

impl Default for Forecaster {
    fn default() -> Self {
        Forecaster {
            arrivals: Arrivals::default(),
            calibration: Calibration::default(),
            spreads: Spreads::default(),
            available: 1.0,
            measured_s: PRIOR_S,
            before: None,
            made_at: Time::ZERO,
            ends: BTreeMap::new(),
        }
    }
}

impl Forecaster {
    /// Makes the forecasts of this view. Views have one node.
    pub fn update(&mut self, decider: &Decider, view: &View) {
        self.arrivals.observe(view);
        let ends = if is_of_use(view) {
            let around = Surroundings { arrivals: &self.arrivals, available: self.available };
            let expected = project(decider, view, around, &[], Scenario::EXPECTED);
            self.spreads.play(&expected, |scenario| project(decider, view, around, &[], scenario));
            with_arrivals(decider, view, around, &expected, &self.spreads)
        } else {
            BTreeMap::new()
        };
        self.calibration.observe(view, &ends, self.made_at);
        let factor = self.calibration.factor();
        self.ends = ends.into_iter().map(|(id, end)| (id, widened(end, factor))).collect();
        self.made_at = view.now;
    }

    /// Takes in the node-seconds that each running job had consumed when the counters were read. `scarce` says
    /// that the node had no CPU to spare since the last reading, so that what its jobs used is all they can get.
    pub fn measure(&mut self, read_at: Time, consumed: impl Iterator<Item = (JobId, f64)>, scarce: bool) {
        let consumed: BTreeMap<JobId, f64> = consumed.collect();
        if let Some((at, before)) = &self.before {
            let seconds = read_at.since(*at).as_secs_f64();
            if seconds < SHORTEST_S {
                return;
            }
            // A job that ended meanwhile ran for an unknown part of the time.
            if before.keys().all(|id| consumed.contains_key(id)) && !consumed.is_empty() {
                let since = |id: &JobId, now: &f64| (now - before.get(id).unwrap_or(&0.0)).max(0.0);
                let used: f64 = consumed.iter().map(|(id, now)| since(id, now)).sum::<f64>() / seconds;
                let sample = if scarce { used.clamp(0.01, 1.0) } else { 1.0 };
                self.measured_s = self.measured_s * (-seconds / MEMORY_S).exp() + seconds;
                self.available += (seconds / self.measured_s).min(1.0) * (sample - self.available);
            }
        }
        self.before = Some((read_at, consumed));
    }

    /// When the jobs of another view than the driver's own would end, such as one with a job that may come.
    pub fn ends_of(&self, decider: &Decider, view: &View) -> BTreeMap<JobId, Interval> {
        if !is_of_use(view) {
            return BTreeMap::new();
        }
        let around = Surroundings { arrivals: &self.arrivals, available: self.available };
        let expected = project(decider, view, around, &[], Scenario::EXPECTED);
        with_arrivals(decider, view, around, &expected, &self.spreads)
    }

    /// The part of what jobs are granted that they get, 0…1: other programs of the machine take the rest.
    pub fn available(&self) -> f64 {
        self.available
    }

    /// When a job will end, in seconds from `now`, by the last forecast.
    pub fn ends_in_s(&self, job: JobId, now: Time) -> Option<Interval> {
        let since_s = now.since(self.made_at).as_secs_f64();
        let left = |s: f64| (s - since_s).max(0.0);
        let end = self.ends.get(&job)?;
        Some(Interval { mid: left(end.mid), low: left(end.low), high: left(end.high) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Span;

    #[test]
    fn what_other_programs_take_is_learned_while_no_cpu_is_idle() {
        let mut forecaster = Forecaster::default();
        let mut measure = |s: u64, consumed_node_s: f64, scarce: bool| {
            forecaster.measure(Time::ZERO + Span::from_secs(s), std::iter::once((JobId(1), consumed_node_s)), scarce);
            forecaster.available()
        };
        let found = (0..200).map(|s| measure(s, 0.6 * s as f64, true)).last();
        assert!(found.is_some_and(|found| (found - 0.6).abs() < 0.01), "{found:?}");
        let found = (200..400).map(|s| measure(s, 120.0, false)).last();
        assert!(found.is_some_and(|found| found > 0.99), "idle CPU is available: {found:?}");
    }

    #[test]
    fn what_other_programs_take_is_known_within_seconds_also_while_jobs_come() {
        let mut forecaster = Forecaster::default();
        // A job comes every second, and the jobs get 0.7 of the node together.
        let mut consumed: BTreeMap<JobId, f64> = BTreeMap::new();
        for s in 0..8u64 {
            let count = consumed.len().max(1) as f64;
            consumed.values_mut().for_each(|c| *c += 0.7 / count);
            consumed.insert(JobId(s), 0.0);
            let now = Time::ZERO + Span::from_secs(s);
            forecaster.measure(now, consumed.iter().map(|(id, c)| (*id, *c)), true);
        }
        assert!((0.65..0.78).contains(&forecaster.available()), "{}", forecaster.available());
    }
}
