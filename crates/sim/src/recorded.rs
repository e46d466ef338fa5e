//! Loss curves recorded from real training runs, as loss curves of simulated jobs.
//!
//! **Problem.** Analytic curves belong to the very family that the predictor fits. A policy that
//! predicts from curves must also be judged on curves that no formula made.
//!
//! **Source.** `data/curves.csv`: validation errors at the end of each epoch of image
//! classification (100 epochs) and of recommendation (10 epochs), from petuum/adaptdl, branch
//! osdi21-artifact, licence Apache-2.0.

use std::sync::OnceLock;

/// The error before training: ten classes, or one hit among ten of a hundred candidates.
const CHANCE: f64 = 0.9;

/// One recorded run.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedRun {
    pub name: String,
    /// The error before training and after each epoch.
    pub values: Vec<f64>,
}

/// All recorded runs.
pub fn runs() -> &'static [RecordedRun] {
    static RUNS: OnceLock<Vec<RecordedRun>> = OnceLock::new();
    RUNS.get_or_init(|| {
        let lines = include_str!("../data/curves.csv").lines().filter(|l| !l.starts_with('#'));
        let run = |line: &str| {
            let mut cells = line.split(',');
            let name = cells.next().unwrap_or_default().to_owned();
            let values = std::iter::once(CHANCE).chain(cells.filter_map(|c| c.parse().ok())).collect();
            RecordedRun { name, values }
        };
        lines.map(run).collect()
    })
}

/// The run of that number; numbers beyond the last begin again at the first.
pub fn run(number: u16) -> &'static RecordedRun {
    let all = runs();
    &all[number as usize % all.len()]
}

impl RecordedRun {
    /// The value at the part `x` of the run, between two epochs in a straight line.
    pub fn at(&self, x: f64) -> f64 {
        let place = x.clamp(0.0, 1.0) * (self.values.len() - 1) as f64;
        let (low, part) = (place.floor() as usize, place.fract());
        let high = (low + 1).min(self.values.len() - 1);
        self.values[low] + (self.values[high] - self.values[low]) * part
    }

    /// The part of the improvement made at `x`: by the best value so far.
    pub fn reduction(&self, x: f64) -> f64 {
        let first = self.values[0];
        let best = self.values.iter().copied().fold(f64::INFINITY, f64::min);
        let epochs = (x.clamp(0.0, 1.0) * (self.values.len() - 1) as f64).floor() as usize;
        let so_far = self.values[..=epochs].iter().copied().fold(self.at(x), f64::min);
        ((first - so_far) / (first - best)).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_improves_from_chance_to_its_best() {
        assert_eq!(runs().len(), 14);
        for run in runs() {
            assert!(run.values.len() >= 11, "{}", run.name);
            assert_eq!((run.at(0.0), run.reduction(0.0), run.reduction(1.0)), (CHANCE, 0.0, 1.0), "{}", run.name);
            let parts: Vec<f64> = (0..=50).map(|i| run.reduction(f64::from(i) / 50.0)).collect();
            assert!(parts.windows(2).all(|w| w[1] >= w[0]), "{}: {parts:?}", run.name);
        }
    }
}
