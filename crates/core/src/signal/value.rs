//! The value of a curve at a position that lies ahead.
//!
//! **Problem.** A family of curves, however well it fits the reports, is one opinion. Where a learning rate is lowered
//! late, or a curve turns, every single form is far off, and each on other runs. A sum with learnt weights expects what
//! runs do on the average; on a curve that a simple form describes it is worse than that form.
//!
//! **Approach.** Five forms answer: the newest report stays, the family of [`super::predict`], the newest part of the
//! curve goes on as a power of the position, a power law with a limit `a + b·(x + x₁)^−p` (`x₁` is the first
//! position), and the inverse form `a + b/(x + c)`. Each is tested on the curve's own past: it is fitted to the first
//! half and to the first seven tenths, and forecasts the value now. The better it did, the more it weighs in the
//! tested forecast; and the better all did, the more that forecast counts against the learnt sum of [`super::blend`].
//!
//! **Cost.** Three fits of everything, less than a millisecond for 64 points. No policy pays it: policies read the
//! [`Fit`] alone.
//!
//! **Properties** (tests): those of [`super::predict`]; a form that was wrong before is not believed; what all forms
//! forecast well is believed.

use super::blend::{Blend, Clues, Estimate};
use super::curve::Curve;
use super::grid::{GridFit, best};
use super::predict::{Fit, LARGEST_CHANGE, WeightedPoint, fit};

/// Powers of the power law.
const POWERS: (f64, f64) = (0.01, 10.0);

/// Offsets of the inverse form, as parts of the run so far.
const OFFSETS: (f64, f64) = (1e-3, 1e3);

/// How many forms are tested.
const FORMS: usize = 5;

/// The parts of the run so far from which the value now is forecast.
const TESTED_PARTS: [f64; 2] = [0.5, 0.7];

/// The fewest points from which that is done.
const FEWEST_POINTS: usize = 3;

/// The least trust in the tested forecast, and the most.
const TRUST: (f64, f64) = (0.25, 0.75);

/// Trust is least when the middle form was off by this part of the change seen.
const FAR_OFF: f64 = 0.1;

/// All forms, fitted to one curve.
#[derive(Debug, Clone, PartialEq)]
struct FittedForms {
    fit: Fit,
    /// The first position after 0, and the power law that counts from it.
    power_law: Option<(f64, GridFit)>,
    inverse: Option<GridFit>,
}

fn power_law(first: f64) -> impl Fn(f64, f64) -> f64 {
    move |power, x| (x / first + 1.0).powf(-power)
}

fn inverse(offset: f64, x: f64) -> f64 {
    1.0 / (x + offset)
}

impl FittedForms {
    fn new(curve: &Curve, horizon: f64) -> Option<FittedForms> {
        let (fit, end) = (fit(curve, Some(horizon))?, curve.at()?);
        let points: Vec<WeightedPoint> = curve.points().map(|p| WeightedPoint { x: p.x, y: p.y, w: 1.0 }).collect();
        let first = points.iter().map(|p| p.x).find(|x| *x > 0.0);
        let law = first.and_then(|first| Some((first, best(&points, POWERS, power_law(first))?)));
        let offsets = (OFFSETS.0 * end, OFFSETS.1 * end);
        let inverse = if end > 0.0 { best(&points, offsets, inverse) } else { None };
        Some(FittedForms { fit, power_law: law, inverse })
    }

    /// The changes from the level until `x`, and what else is known of it.
    fn changes(&self, x: f64) -> ([f64; FORMS], Clues) {
        let clues = self.fit.clues(x);
        let change = |y: f64| {
            let change = y.clamp(clues.range.0, clues.range.1) - clues.level;
            change.clamp(-LARGEST_CHANGE * clues.seen, LARGEST_CHANGE * clues.seen)
        };
        // A form that could not be fitted leaves the value as it is.
        let law = self.power_law.map_or(0.0, |(first, law)| change(law.at(x, power_law(first))));
        let inverse = self.inverse.map_or(0.0, |found| change(found.at(x, inverse)));
        let [last, family, power, _] = clues.changes;
        ([last, family, power, law, inverse], clues)
    }
}

/// How far each form was from the value now when it had seen a part of the run, on the average over parts.
fn past_errors(curve: &Curve, level: f64) -> Option<[f64; FORMS]> {
    let end = curve.at()?;
    let (mut errors, mut tests) = ([0.0; FORMS], 0);
    for part in TESTED_PARTS {
        // A report exactly at the part belongs to it, whatever the unit of the position rounds to.
        let seen = curve.up_to(part * end * (1.0 + 1e-9));
        if seen.len() < FEWEST_POINTS {
            continue;
        }
        let (changes, clues) = FittedForms::new(&seen, end)?.changes(end);
        for (error, change) in errors.iter_mut().zip(changes) {
            *error += (clues.level + change - level).abs();
        }
        tests += 1;
    }
    (tests > 0).then(|| errors.map(|e| e / f64::from(tests)))
}

fn middle(mut values: [f64; FORMS]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[FORMS / 2]
}

/// A curve, fitted in several ways.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueForecaster {
    forms: FittedForms,
    end: f64,
    /// `None` for a curve that is too short to be tested.
    past_errors: Option<[f64; FORMS]>,
}

impl ValueForecaster {
    /// `horizon` is the position at which the job will stop. `None` for a curve without any report.
    pub fn new(curve: &Curve, horizon: f64) -> Option<ValueForecaster> {
        let forms = FittedForms::new(curve, horizon)?;
        let past_errors = past_errors(curve, forms.fit.level());
        Some(ValueForecaster { forms, end: curve.at()?, past_errors })
    }

    /// The family alone.
    pub fn fit(&self) -> &Fit {
        &self.forms.fit
    }

    /// The value that will be reported at `x`. Within what was seen: the smooth curve.
    pub fn value_at(&self, x: f64) -> Estimate {
        if x > self.end { Blend::LEARNT.estimate(&self.clues(x)) } else { self.fit().family_at(x) }
    }

    /// What is known about the value at `x`, which lies beyond the newest report.
    pub fn clues(&self, x: f64) -> Clues {
        let (changes, clues) = self.forms.changes(x);
        let (tested, trust) = match &self.past_errors {
            Some(errors) => (weighted(&changes, errors, &clues), trust(errors, clues.seen)),
            None => (middle(changes), 0.5 * (TRUST.0 + TRUST.1)),
        };
        Clues { tested, trust, ..clues }
    }
}

/// The mean of `changes`, each weighted by the inverse square of its past error.
fn weighted(changes: &[f64; FORMS], errors: &[f64; FORMS], clues: &Clues) -> f64 {
    // Errors below this are chance.
    let least = (0.02 * clues.seen + 0.5 * clues.noise).max(f64::MIN_POSITIVE);
    let weights = errors.map(|error| (1.0 + error / least).powi(-2));
    let total: f64 = weights.iter().sum();
    let sum: f64 = changes.iter().zip(&weights).map(|(c, w)| c * w).sum();
    if total > 0.0 { sum / total } else { middle(*changes) }
}

fn trust(errors: &[f64; FORMS], seen: f64) -> f64 {
    let off = middle(*errors) / (FAR_OFF * seen).max(f64::MIN_POSITIVE);
    TRUST.0 + (TRUST.1 - TRUST.0) * (1.0 - off.min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(values: impl Iterator<Item = f64>) -> Curve {
        let mut curve = Curve::default();
        for (x, y) in (1_u32..).map(f64::from).zip(values) {
            curve.push(x, y);
        }
        curve
    }

    fn forecaster(values: impl Iterator<Item = f64>) -> ValueForecaster {
        ValueForecaster::new(&curve(values), 100.0).expect("there are reports")
    }

    #[test]
    fn both_forms_are_exact_on_their_own_curves() {
        let law = |x: f64| 0.3 + 2.0 * (x + 1.0).powf(-0.4);
        let (changes, clues) = forecaster((1..=40).map(|i| law(f64::from(i)))).forms.changes(100.0);
        assert!((clues.level + changes[3] - law(100.0)).abs() < 1e-3, "{changes:?}");
        let hyperbola = |x: f64| 0.3 + 2.0 / (x + 9.0);
        let (changes, clues) = forecaster((1..=40).map(|i| hyperbola(f64::from(i)))).forms.changes(100.0);
        assert!((clues.level + changes[4] - hyperbola(100.0)).abs() < 1e-3, "{changes:?}");
    }

    #[test]
    fn what_all_forms_forecast_well_is_believed() {
        let plain = forecaster((1..=40).map(|i| 0.3 + 2.0 * f64::from(i + 1).powf(-0.4))).clues(100.0);
        assert!(plain.trust > 0.9 * TRUST.1, "{plain:?}");
        // Half of the change comes at once, at the end.
        let late = (1..=40).map(|i| 1.0 + (-f64::from(i) / 5.0).exp() - if i > 35 { 1.0 } else { 0.0 });
        assert_eq!(forecaster(late).clues(100.0).trust, TRUST.0);
        assert_eq!(forecaster([2.0, 1.5].into_iter()).clues(100.0).trust, 0.5 * (TRUST.0 + TRUST.1));
    }

    #[test]
    fn a_form_that_was_wrong_before_is_not_believed() {
        let clues = forecaster((1..=40).map(|i| 0.5 + 2.0 * (-f64::from(i) / 5.0).exp())).clues(100.0);
        let changes = [0.0, 0.0, -9.0, 0.0, 0.0];
        assert!(weighted(&changes, &[0.0, 0.0, 1.0, 0.0, 0.0], &clues) > -0.01);
        assert_eq!(weighted(&changes, &[0.0; FORMS], &clues), -9.0 / 5.0);
    }

    #[test]
    fn a_single_report_stays() {
        let mut curve = Curve::default();
        curve.push(0.0, 2.0);
        let f = ValueForecaster::new(&curve, 10.0).expect("there is a report");
        assert_eq!((f.forms.power_law, f.forms.inverse, f.past_errors), (None, None, None));
        assert_eq!(f.value_at(10.0).mid, 2.0);
    }
}
