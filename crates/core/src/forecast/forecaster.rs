//! The forecasts of one driver: what it remembers between two of them, and the last result.

use super::{Arrivals, forecast};
use crate::decider::Decider;
use crate::model::{JobId, Time};
use crate::signal::speed::Interval;
use crate::view::View;
use std::collections::BTreeMap;

/// What is available is a mean over this many seconds.
const MEMORY_S: f64 = 20.0;

/// A shorter interval between two views says little of what is available.
const SHORTEST_S: f64 = 0.2;

/// Keeps the forecasts of a driver's jobs between two views.
#[derive(Debug, Clone, PartialEq)]
pub struct Forecaster {
    arrivals: Arrivals,
    available: f64,
    /// The node-seconds that each running job had consumed in the last view.
    before: Option<(Time, BTreeMap<JobId, f64>)>,
    made_at: Time,
    ends: BTreeMap<JobId, Interval>,
}

impl Default for Forecaster {
    fn default() -> Self {
        Forecaster {
            arrivals: Arrivals::default(),
            available: 1.0,
            before: None,
            made_at: Time::ZERO,
            ends: BTreeMap::new(),
        }
    }
}

impl Forecaster {
    /// Makes the forecasts of this view. `scarce` says that the node had no CPU to spare since the last
    /// view, so that what its jobs used is all they can get. Views have one node.
    pub fn update(&mut self, decider: &Decider, view: &View, scarce: bool) {
        self.arrivals.observe(view);
        self.measure_available(view, scarce);
        self.ends = forecast(decider, view, &self.arrivals);
        self.made_at = view.now;
    }

    /// The part of what jobs are granted that they get, 0…1: other programs of the machine take the rest.
    pub fn available(&self) -> f64 {
        self.available
    }

    pub fn arrivals(&self) -> &Arrivals {
        &self.arrivals
    }

    /// When a job will end, in seconds from `now`, by the last forecast.
    pub fn ends_in_s(&self, job: JobId, now: Time) -> Option<Interval> {
        let since_s = now.since(self.made_at).as_secs_f64();
        let left = |s: f64| (s - since_s).max(0.0);
        let end = self.ends.get(&job)?;
        Some(Interval { mid: left(end.mid), low: left(end.low), high: left(end.high) })
    }

    fn measure_available(&mut self, view: &View, scarce: bool) {
        let running = view.jobs.iter().filter(|j| j.node().is_some());
        let consumed: BTreeMap<JobId, f64> = running.map(|j| (j.id, j.consumed.cpu)).collect();
        if let Some((at, before)) = &self.before {
            let seconds = view.now.since(*at).as_secs_f64();
            if seconds < SHORTEST_S {
                return;
            }
            // A job that started or ended meanwhile ran for an unknown part of the time.
            if before.keys().eq(consumed.keys()) && !consumed.is_empty() {
                let used: f64 = consumed.iter().map(|(id, now)| (now - before[id]).max(0.0)).sum::<f64>() / seconds;
                let sample = if scarce { used.clamp(0.01, 1.0) } else { 1.0 };
                let weight = 1.0 - (-seconds / MEMORY_S).exp();
                self.available += weight * (sample - self.available);
            }
        }
        self.before = Some((view.now, consumed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, running};
    use crate::model::Span;

    #[test]
    fn what_other_programs_take_is_learned_while_no_cpu_is_idle() {
        let mut forecaster = Forecaster::default();
        let decider = Decider::new(crate::policy::Policy::equal());
        let mut job = running(1, 0);
        let view = |s: u64, job: &crate::view::JobView| View {
            now: Time::ZERO + Span::from_secs(s),
            nodes: vec![node(0)],
            jobs: vec![job.clone()],
        };
        for s in 0..200 {
            job.consumed.cpu = 0.6 * s as f64;
            forecaster.update(&decider, &view(s, &job), true);
        }
        assert!((forecaster.available() - 0.6).abs() < 0.01, "{forecaster:?}");
        for s in 200..400 {
            job.consumed.cpu = 120.0;
            forecaster.update(&decider, &view(s, &job), false);
        }
        assert!(forecaster.available() > 0.99, "idle CPU is available: {forecaster:?}");
    }
}
