//! How a job's loss falls with the work done on it.
//!
//! **Problem.** Policies see jobs only through what they report. A simulated job must therefore report as
//! real ones do: fast progress first, then a long tail, noise from the minibatches, sudden drops where a
//! learning rate falls.
//!
//! **Terms.** `x` is the part of the work done, 0…1. Without noise the loss starts at `start` and ends at
//! `end`; in between it follows a family with one shape parameter. *Reduction* is the part of `start − end`
//! already gained, 0…1.

use crate::recorded;
use serde::{Deserialize, Serialize};

/// The form of the fall, before drops and noise.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "family")]
pub enum Family {
    /// The distance to the end shrinks by the same factor in equal parts of work: `exp(−rate·x)`.
    Exponential { rate: f64 },
    /// Fast first, then ever more slowly: `(1 + rate·x)^(−power)`.
    PowerLaw { rate: f64, power: f64 },
    /// In a straight line: a job that never flattens.
    Linear,
    /// As a real run did ([`crate::recorded`]); `start`, `end`, drops and noise do not count.
    Recorded { run: u16 },
}

/// A sudden fall, as when the learning rate is cut.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drop {
    /// At which part of the work.
    pub at: f64,
    /// Which part of the distance still to go is gained at once.
    pub gains: f64,
}

/// A loss as a function of the work done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    pub start: f64,
    pub end: f64,
    pub shape: Family,
    #[serde(default)]
    pub drops: Vec<Drop>,
    /// Standard deviation of one report, as a part of `start − end`.
    #[serde(default)]
    pub noise: f64,
}

impl Family {
    /// Whether the numbers make a curve that falls.
    pub fn is_sound(&self) -> bool {
        let positive = |x: f64| x > 0.0 && x.is_finite();
        match *self {
            Family::Exponential { rate } => positive(rate),
            Family::PowerLaw { rate, power } => positive(rate) && positive(power),
            Family::Linear | Family::Recorded { .. } => true,
        }
    }
}

impl Curve {
    /// An exponential fall that has made `part` of its reduction when a fifth of the work is done: how the
    /// thesis describes its models.
    pub fn by_first_fifth(start: f64, end: f64, part: f64, noise: f64) -> Curve {
        Curve { start, end, shape: Family::Exponential { rate: -(1.0 - part).ln() / 0.2 }, drops: vec![], noise }
    }

    /// The part of the reduction made at `x`, without noise. Zero at 0, one at 1, never falling.
    pub fn reduction(&self, x: f64) -> f64 {
        let x = x.clamp(0.0, 1.0);
        if let Family::Recorded { run } = self.shape {
            return recorded::run(run).reduction(x);
        }
        let left = |x: f64| {
            let smooth = match self.shape {
                Family::Exponential { rate } => (-rate * x).exp(),
                Family::PowerLaw { rate, power } => (1.0 + rate * x).powf(-power),
                Family::Linear | Family::Recorded { .. } => 1.0 - x,
            };
            self.drops.iter().filter(|d| x >= d.at).fold(smooth, |left, d| left * (1.0 - d.gains))
        };
        // What the family has not gained when all work is done is spread over the whole, so that the end is reached.
        let at_end = left(1.0);
        if at_end >= 1.0 { x } else { (1.0 - left(x)) / (1.0 - at_end) }
    }

    /// The loss at `x`, with `noise` standard deviations added.
    pub fn loss(&self, x: f64, noise: f64) -> f64 {
        if let Family::Recorded { run } = self.shape {
            return recorded::run(run).at(x);
        }
        let span = self.start - self.end;
        self.start - span * self.reduction(x) + noise * self.noise * span.abs()
    }

    /// The least `x` at which `part` of the reduction has been made.
    pub fn work_for(&self, part: f64) -> f64 {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if self.reduction(middle) >= part { high = middle } else { low = middle }
        }
        high
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_fifth_is_as_said() {
        for part in [0.65, 0.90, 0.98] {
            let made = Curve::by_first_fifth(2.3, 0.1, part, 0.0).reduction(0.2);
            assert!((made - part).abs() < 0.01, "{made} is not {part}");
        }
    }

    proptest! {
        #[test]
        fn curves_start_and_end_where_they_should_and_never_rise(rate in 0.1f64..40.0, power in 0.1f64..3.0, kind in 0..3, gains in 0.0f64..0.9) {
            let shape = match kind {
                0 => Family::Exponential { rate },
                1 => Family::PowerLaw { rate, power },
                _ => Family::Linear,
            };
            let curve = Curve { start: 5.0, end: 1.0, shape, drops: vec![Drop { at: 0.5, gains }], noise: 0.0 };
            prop_assert!((curve.loss(0.0, 0.0) - 5.0).abs() < 1e-9);
            prop_assert!((curve.loss(1.0, 0.0) - 1.0).abs() < 1e-9);
            let mut last = f64::MAX;
            for i in 0..=100 {
                let loss = curve.loss(f64::from(i) / 100.0, 0.0);
                prop_assert!(loss <= last + 1e-12);
                last = loss;
            }
            let x = curve.work_for(0.7);
            prop_assert!(curve.reduction(x) >= 0.7 - 1e-9 && (x == 0.0 || curve.reduction(x - 1e-6) <= 0.7 + 1e-9));
        }
    }
}
