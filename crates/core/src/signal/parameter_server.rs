//! How fast a job with parameter servers trains, as a function of its tasks and their CPU.
//!
//! **Source.** Optimus (Y. Peng et al., EuroSys 2018) fits the speed of such a job to a few terms with coefficients
//! that are not negative. With `w` workers and `p` servers, the time of a step is
//! - synchronous: `θ0/w + θ1·w/p + θ2 + θ3·w + θ4·p`, and the speed is its inverse;
//! - asynchronous: a worker's cycle takes `θ0 + θ1·w/p + θ2 + θ3·w + θ4·p`, and the speed is `w` times its inverse.
//!
//! **Ours.** The first term is CPU work of a worker and the second that of a server, so they are divided by the
//! cores of one worker (`c`) and of the servers: `θ0/(w·c)` and `θ1·w·pressure`. The *pressure* is the largest of
//! `load/cores` over the servers, where the loads of all servers sum to 1: with equal servers it is `1/(p·cores)`,
//! and a hot server shows in it.
//!
//! **Fit.** Non-negative least squares on the relative error of the step time, by coordinate descent, over the
//! newest observations. The CPU time that workers and servers were measured to use per step is the prior of `θ0` and
//! `θ1`, with the weight of one observation. One configuration is therefore enough for a first prediction.

use crate::tasks::TrainingMode;
use serde::{Deserialize, Serialize};

const TERMS: usize = 5;
/// Older configurations are forgotten.
const MAX_OBSERVATIONS: usize = 24;
/// Coordinate descent on five unknowns converges in far fewer rounds.
const ROUNDS: usize = 200;

/// What the speed depends on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Configuration {
    pub servers: u32,
    pub workers: u32,
    /// Cores of one worker.
    pub worker_cores: f64,
    /// The largest of load/cores over the servers.
    pub pressure: f64,
}

/// One measured interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Observation {
    configuration: Configuration,
    steps_per_s: f64,
}

/// CPU time per step, summed over the tasks of a role.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StepCost {
    pub workers_cpu_s: f64,
    pub servers_cpu_s: f64,
}

/// The speed of one job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SpeedModel {
    mode: TrainingMode,
    observations: Vec<Observation>,
    prior: [f64; TERMS],
    theta: [f64; TERMS],
}

impl SpeedModel {
    pub fn new(mode: TrainingMode) -> SpeedModel {
        SpeedModel { mode, ..SpeedModel::default() }
    }

    /// Takes in a measured speed and what a step cost, and fits again. An interval without steps says nothing.
    pub fn observe(&mut self, configuration: Configuration, steps_per_s: f64, cost: StepCost) {
        let is_sound = |x: f64| x.is_finite() && x > 0.0;
        let Configuration { servers, workers, worker_cores, pressure } = configuration;
        if servers == 0 || workers == 0 || ![steps_per_s, worker_cores, pressure].into_iter().all(is_sound) {
            return;
        }
        let same = |o: &Observation| {
            let old = o.configuration;
            old.servers == servers
                && old.workers == workers
                && (old.worker_cores / worker_cores - 1.0).abs() < 0.02
                && (old.pressure / pressure - 1.0).abs() < 0.02
        };
        match self.observations.iter_mut().find(|o| same(o)) {
            // A moving average follows a job whose speed changes, and evens out noise.
            Some(known) => known.steps_per_s += 0.4 * (steps_per_s - known.steps_per_s),
            None => self.observations.push(Observation { configuration, steps_per_s }),
        }
        if self.observations.len() > MAX_OBSERVATIONS {
            self.observations.remove(0);
        }
        let per_push = match self.mode {
            TrainingMode::Sync => f64::from(workers),
            TrainingMode::Async => 1.0,
        };
        for (prior, measured) in self.prior.iter_mut().zip([cost.workers_cpu_s, cost.servers_cpu_s / per_push]) {
            if measured.is_finite() && measured >= 0.0 {
                *prior = if *prior > 0.0 { *prior + 0.4 * (measured - *prior) } else { measured };
            }
        }
        self.fit();
    }

    /// Steps per second in a configuration; `None` before the first observation.
    pub fn predict(&self, configuration: Configuration) -> Option<f64> {
        if self.observations.is_empty() {
            return None;
        }
        let time_s: f64 = terms(self.mode, configuration).iter().zip(self.theta).map(|(x, theta)| x * theta).sum();
        let speed = rounds_at_once(self.mode, configuration) / time_s;
        speed.is_finite().then_some(speed)
    }

    fn fit(&mut self) {
        // Relative error: each row is divided by its measured time, so that its target is 1.
        let mut rows: Vec<([f64; TERMS], f64)> = vec![];
        for o in &self.observations {
            let time_s = rounds_at_once(self.mode, o.configuration) / o.steps_per_s;
            rows.push((terms(self.mode, o.configuration).map(|x| x / time_s), 1.0));
        }
        // The prior of each coefficient is a row of its own, scaled as the term is in the newest observation.
        let newest = rows.last().map_or([0.0; TERMS], |(row, _)| *row);
        for (i, prior) in self.prior.iter().enumerate() {
            let mut row = [0.0; TERMS];
            // What has no prior is expected to be small, but weakly so.
            row[i] = if i < 2 { newest[i] } else { 0.1 * newest[i] };
            rows.push((row, row[i] * prior));
        }
        self.theta = non_negative_least_squares(&rows);
    }
}

/// The terms of a step's time, or of a worker's cycle.
fn terms(mode: TrainingMode, c: Configuration) -> [f64; TERMS] {
    let (p, w) = (f64::from(c.servers), f64::from(c.workers));
    let split = match mode {
        TrainingMode::Sync => w,
        TrainingMode::Async => 1.0,
    };
    [1.0 / (split * c.worker_cores), w * c.pressure, 1.0, w, p]
}

/// Steps that are under way at the same time.
fn rounds_at_once(mode: TrainingMode, c: Configuration) -> f64 {
    match mode {
        TrainingMode::Sync => 1.0,
        TrainingMode::Async => f64::from(c.workers),
    }
}

/// The `x ≥ 0` with the smallest sum of squares of `row·x − target`.
fn non_negative_least_squares(rows: &[([f64; TERMS], f64)]) -> [f64; TERMS] {
    let mut gram = [[0.0; TERMS]; TERMS];
    let mut right = [0.0; TERMS];
    for (row, target) in rows {
        for i in 0..TERMS {
            right[i] += row[i] * target;
            for j in 0..TERMS {
                gram[i][j] += row[i] * row[j];
            }
        }
    }
    let mut x = [0.0; TERMS];
    for _ in 0..ROUNDS {
        for i in 0..TERMS {
            if gram[i][i] > 0.0 {
                let others: f64 = (0..TERMS).filter(|&j| j != i).map(|j| gram[i][j] * x[j]).sum();
                x[i] = ((right[i] - others) / gram[i][i]).max(0.0);
            }
        }
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(servers: u32, workers: u32, worker_cores: f64, server_cores: f64) -> Configuration {
        Configuration { servers, workers, worker_cores, pressure: 1.0 / (f64::from(servers) * server_cores) }
    }

    fn truth(mode: TrainingMode, theta: [f64; TERMS], c: Configuration) -> f64 {
        let time: f64 = terms(mode, c).iter().zip(theta).map(|(x, t)| x * t).sum();
        rounds_at_once(mode, c) / time
    }

    #[test]
    fn coefficients_are_found_and_never_negative() {
        // Rows whose plain least squares would need a negative second coefficient.
        let rows = [([1.0, 0.0, 0.0, 0.0, 0.0], 1.0), ([1.0, 1.0, 0.0, 0.0, 0.0], 0.5)];
        let x = non_negative_least_squares(&rows);
        assert!((x[0] - 0.75).abs() < 1e-9 && x[1] == 0.0, "{x:?}");
    }

    #[test]
    fn an_unseen_configuration_is_predicted_from_a_few_seen_ones() {
        for mode in [TrainingMode::Sync, TrainingMode::Async] {
            let theta = [2.0, 0.05, 0.01, 0.002, 0.001];
            let mut model = SpeedModel::new(mode);
            for (p, w, cw, cp) in
                [(2, 2, 1.0, 1.0), (2, 4, 1.0, 1.0), (2, 4, 2.0, 1.0), (2, 8, 2.0, 0.5), (2, 6, 2.0, 2.0)]
            {
                let c = configuration(p, w, cw, cp);
                let per_push = if mode == TrainingMode::Sync { f64::from(w) } else { 1.0 };
                let cost = StepCost { workers_cpu_s: 2.0, servers_cpu_s: 0.05 * per_push };
                model.observe(c, truth(mode, theta, c), cost);
            }
            for (p, w, cw, cp) in [(2, 12, 2.0, 1.0), (2, 3, 4.0, 0.5), (2, 8, 1.0, 4.0)] {
                let c = configuration(p, w, cw, cp);
                let (predicted, expected) = (model.predict(c).unwrap(), truth(mode, theta, c));
                assert!((predicted / expected - 1.0).abs() < 0.1, "{mode:?} {c:?}: {predicted}, not {expected}");
            }
        }
    }

    /// The measured cost of a step is enough to know which resource is worth more.
    #[test]
    fn one_observation_tells_busy_servers_from_busy_workers() {
        let c = configuration(2, 4, 1.0, 0.5);
        let mut starved = SpeedModel::new(TrainingMode::Sync);
        // A step takes 0.5 s: 0.1 s of each worker, 0.4 s of each server at half a core.
        starved.observe(c, 2.0, StepCost { workers_cpu_s: 0.4, servers_cpu_s: 0.4 });
        let now = starved.predict(c).unwrap();
        assert!((now / 2.0 - 1.0).abs() < 0.05, "{now}");
        let more_servers = starved.predict(configuration(2, 4, 1.0, 1.0)).unwrap();
        let more_workers = starved.predict(configuration(2, 4, 2.0, 0.5)).unwrap();
        assert!(more_servers > 1.5 * now && more_workers < 1.15 * now, "{now} {more_servers} {more_workers}");
    }

    #[test]
    fn nonsense_is_not_taken_in() {
        let mut model = SpeedModel::new(TrainingMode::Async);
        for speed in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
            model.observe(configuration(1, 1, 1.0, 1.0), speed, StepCost::default());
        }
        assert_eq!(model.predict(configuration(1, 1, 1.0, 1.0)), None);
    }
}
