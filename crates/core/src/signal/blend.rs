//! One forecast from several simple ones, with weights learnt from finished runs.
//!
//! **Problem.** The family of [`super::predict`] is fitted to what a job has reported. It does not
//! know what training runs usually do next: learning rates are lowered towards the end, power laws
//! go on falling, and a curve that looks flat often improves once more. Its interval is as wide as
//! its members disagree, which is too narrow on runs of other tasks.
//!
//! **Approach.** The forecast is the level plus a mean of two changes. One is the tested change of [`super::value`],
//! which counts as much as the curve's own past supports it. The other is a weighted sum:
//! - `last`: from the smoothed level to the newest report;
//! - `family`: the change that the family forecasts;
//! - `power`: the change if the newest two thirds of the curve go on as a power law;
//! - `room`: a part of what is left until the end of the natural range (error 0, accuracy 1).
//!
//! The weights of the sum depend on the part of the run that is over. They stand in a table at three parts
//! ([`PARTS`]); between these they are interpolated. The sum expects what finished runs did on the average, late drops
//! included; the tested change expects no drop. Half of each is better than either.
//!
//! The interval is the forecast plus and minus a multiple of one width, which is made of noise, disagreement and
//! expected change. The multiples are the 10th and the 90th percentile of the errors of finished runs, measured in
//! widths.
//!
//! **Learning.** [`Blend::learn`] minimises the mean relative error of the final value by
//! coordinate descent: for one weight the best value is a weighted median, so that single wild runs
//! do not bend the table. A source with `n` runs counts `√n`. [`Blend::LEARNT`] was learnt from the
//! curves that `docs/measurements/prediction.md` lists.
//!
//! **Properties** (tests): a flat curve stays flat, the forecast ends at the newest report as the
//! horizon comes near, units do not matter.

use serde::{Deserialize, Serialize};

/// A forecast, and the range that holds the truth four times out of five.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    pub mid: f64,
    pub low: f64,
    pub high: f64,
}

/// The parts of a run at which the table has an entry.
pub const PARTS: [f64; 3] = [0.2, 0.4, 0.6];

/// How many changes are summed.
const CLUES: usize = 4;

/// What is known about the value at one horizon.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clues {
    /// The smoothed value at the newest report.
    pub level: f64,
    /// The part of the run that is over, 0 to 1.
    pub part: f64,
    /// The changes from the level: last, family, power, room.
    pub changes: [f64; CLUES],
    /// The change from the level on which the forms agree that were right about the curve's own past.
    pub tested: f64,
    /// How much that counts against the learnt sum, 0 to 1.
    pub trust: f64,
    /// 1 for a rising curve, −1 for a falling one.
    pub direction: f64,
    /// The standard deviation of single reports.
    pub noise: f64,
    /// The standard deviation of the changes that the members of the family forecast.
    pub disagreement: f64,
    /// The magnitude of the change seen so far.
    pub seen: f64,
    /// The values that are possible.
    pub range: (f64, f64),
}

impl Clues {
    /// The unit of the interval around the forecast.
    fn width(&self, forecast: &Forecast) -> f64 {
        let ahead = 0.02 * (1.0 - self.part) * self.seen + 0.1 * self.changes[3].abs();
        let apart = self.disagreement + (forecast.mid - self.level).abs() + forecast.apart;
        self.noise + 0.5 * apart + ahead
    }
}

/// One finished run, cut short.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Example {
    /// Where the run is from, as a number.
    pub source: usize,
    pub clues: Clues,
    /// The value at the horizon.
    pub truth: f64,
}

/// The entry of the table for one part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Knot {
    pub weights: [f64; CLUES],
    /// The 10th and 90th percentile of the errors, in widths and in the direction of the curve.
    pub tails: (f64, f64),
}

/// The table: one entry for each of [`PARTS`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Blend {
    pub knots: [Knot; 3],
}

impl Blend {
    /// Learnt from the curves of all sources in `docs/measurements/prediction.md`.
    pub const LEARNT: Blend = Blend {
        knots: [
            Knot { weights: [0.182, 0.735, 0.058, 0.143], tails: (-0.54, 2.35) },
            Knot { weights: [1.0, 0.485, 0.267, 0.078], tails: (-0.67, 1.97) },
            Knot { weights: [1.0, 0.866, 0.0, 0.049], tails: (-0.67, 1.61) },
        ],
    };

    /// The value at the horizon of the clues.
    pub fn estimate(&self, clues: &Clues) -> Estimate {
        let knot = self.knot(clues.part);
        let forecast = Forecast::new(&knot.weights, clues);
        let (mid, width) = (forecast.mid, clues.width(&forecast));
        let ends = [knot.tails.0, knot.tails.1].map(|t| mid + clues.direction * t * width);
        let (low, high) = clues.range;
        Estimate {
            mid,
            low: ends[0].min(ends[1]).min(mid).clamp(low, high),
            high: ends[0].max(ends[1]).max(mid).clamp(low, high),
        }
    }

    /// The entry for `part`, interpolated.
    fn knot(&self, part: f64) -> Knot {
        let place = ((part - PARTS[0]) / (PARTS[1] - PARTS[0])).clamp(0.0, (PARTS.len() - 1) as f64);
        let before = (place as usize).min(PARTS.len() - 2);
        let (a, b, t) = (&self.knots[before], &self.knots[before + 1], place - before as f64);
        let between = |a: f64, b: f64| a + t * (b - a);
        Knot {
            weights: std::array::from_fn(|i| between(a.weights[i], b.weights[i])),
            tails: (between(a.tails.0, b.tails.0), between(a.tails.1, b.tails.1)),
        }
    }

    /// Learns the table. `examples[i]` are runs of which the part `PARTS[i]` was seen.
    pub fn learn(examples: [&[Example]; 3]) -> Blend {
        Blend { knots: examples.map(learn_knot) }
    }
}

struct Forecast {
    mid: f64,
    /// How far the two changes are apart, halved.
    apart: f64,
}

impl Forecast {
    fn new(weights: &[f64; CLUES], clues: &Clues) -> Forecast {
        let sum: f64 = weights.iter().zip(&clues.changes).map(|(w, c)| w * c).sum();
        let [sum, tested] =
            [sum, clues.tested].map(|change| (clues.level + change).clamp(clues.range.0, clues.range.1));
        let mid = (1.0 - clues.trust) * sum + clues.trust * tested;
        Forecast { mid, apart: (0.5 * sum - 0.5 * tested).abs() }
    }
}

/// Rounds of the descent. The weights no longer change in the second digit after ten.
const ROUNDS: usize = 25;

/// Where the descent begins, and the weights for which there is no example.
const FIRST_GUESS: [f64; CLUES] = [1.0, 0.5, 0.0, 0.0];

/// Pulls a weight towards zero as if this part of all examples asked for it: a clue that does not
/// help on several sources is left out.
const SHRINKAGE: f64 = 0.001;

fn learn_knot(examples: &[Example]) -> Knot {
    let runs_of = |source: usize| examples.iter().filter(|e| e.source == source).count() as f64;
    let counts: Vec<f64> = examples.iter().map(|e| runs_of(e.source).powf(-0.5)).collect();
    let total: f64 = counts.iter().sum();
    let unit = |e: &Example| e.truth.abs().max(f64::MIN_POSITIVE);
    let mut weights = FIRST_GUESS;
    for _ in 0..ROUNDS {
        for i in 0..CLUES {
            let mut wishes = vec![(0.0, SHRINKAGE * total)];
            for (e, count) in examples.iter().zip(&counts) {
                let change = e.clues.changes[i];
                let others: f64 = (0..CLUES).filter(|j| *j != i).map(|j| weights[j] * e.clues.changes[j]).sum();
                let wish = (e.truth - e.clues.level - others) / change;
                let count = count * change.abs() / unit(e);
                if wish.is_finite() && count.is_finite() && count > 1e-9 {
                    wishes.push((wish, count));
                }
            }
            weights[i] = percentile(&mut wishes, 0.5).clamp(0.0, 1.0);
        }
    }
    let mut errors: Vec<(f64, f64)> = vec![];
    for (e, count) in examples.iter().zip(&counts) {
        let forecast = Forecast::new(&weights, &e.clues);
        let error = e.clues.direction * (e.truth - forecast.mid) / e.clues.width(&forecast);
        errors.extend(error.is_finite().then_some((error, *count)));
    }
    let tails = (percentile(&mut errors, 0.1).min(0.0), percentile(&mut errors, 0.9).max(0.0));
    Knot { weights, tails }
}

/// The value below which `part` of the weight lies; 0 for none.
fn percentile(values: &mut [(f64, f64)], part: f64) -> f64 {
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = values.iter().map(|v| v.1).sum();
    let mut sum = 0.0;
    for (value, weight) in values.iter() {
        sum += weight;
        if sum >= part * total {
            return *value;
        }
    }
    values.last().map_or(0.0, |v| v.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clues(changes: [f64; CLUES]) -> Clues {
        let range = (0.0, f64::MAX);
        let (tested, trust) = (changes[1], 0.5);
        let (direction, noise, disagreement, seen) = (-1.0, 0.01, 0.0, 1.0);
        Clues { level: 1.0, part: 0.4, changes, tested, trust, direction, noise, disagreement, seen, range }
    }

    #[test]
    fn a_clue_that_is_always_right_gets_all_the_weight() {
        let example = |i: usize| {
            let x = 0.01 + 0.07 * ((i * 37) % 11) as f64;
            let changes = [0.0, -x, -0.02 * ((i * 13) % 7) as f64, 0.0];
            Example { source: i % 3, clues: clues(changes), truth: 1.0 - x }
        };
        let examples: Vec<Example> = (0..60).map(example).collect();
        let knot = Blend::learn([&examples; 3]).knots[0];
        assert!((knot.weights[1] - 1.0).abs() < 0.02 && knot.weights[2] < 0.02, "{knot:?}");
        let e = Blend::learn([&examples; 3]).estimate(&examples[5].clues);
        assert!((e.mid - examples[5].truth).abs() < 0.01, "{e:?}");
    }

    #[test]
    fn one_wild_run_does_not_bend_the_table() {
        let example = |i: usize| {
            let x = 0.1 + 0.01 * i as f64;
            Example { source: i, clues: clues([0.0, -x, 0.0, 0.0]), truth: 1.0 - 0.5 * x }
        };
        let mut examples: Vec<Example> = (0..30).map(example).collect();
        examples.push(Example { source: 30, clues: clues([0.0, -0.2, 0.0, 0.0]), truth: 50.0 });
        let knot = Blend::learn([&examples; 3]).knots[0];
        assert!((knot.weights[1] - 0.5).abs() < 0.02, "{knot:?}");
    }

    #[test]
    fn four_in_five_errors_lie_within_the_interval() {
        // Errors of −50 to 49 hundredths, evenly.
        let example = |i: usize| {
            let error = ((i * 37) % 100) as f64 / 100.0 - 0.5;
            Example { source: i, clues: clues([0.0; CLUES]), truth: 1.0 + error }
        };
        let examples: Vec<Example> = (0..100).map(example).collect();
        let blend = Blend::learn([&examples; 3]);
        let held = examples.iter().filter(|e| {
            let estimate = blend.estimate(&e.clues);
            (estimate.low..=estimate.high).contains(&e.truth)
        });
        let held = held.count();
        assert!((78..=82).contains(&held), "{held}");
    }

    #[test]
    fn between_two_parts_the_table_is_interpolated() {
        let blend = Blend::LEARNT;
        let [a, b, c] = blend.knots.map(|k| k.weights[1]);
        let at = |part: f64| blend.knot(part).weights[1];
        assert_eq!([at(0.0), at(0.2), at(1.0)], [a, a, c]);
        assert!((at(0.3) - 0.5 * (a + b)).abs() < 1e-12 && (at(0.5) - 0.5 * (b + c)).abs() < 1e-12);
    }
}
