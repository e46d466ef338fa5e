//! The forms others fit, for comparison: last value, exponential, power law, Optimus's and SLAQ's.
//!
//! Each takes the same points as [`super::predict`], is fitted by a grid (`grid.rs`), and answers with one number.
//!
//! **Sources.** Optimus (Peng et al., EuroSys 2018): `1/(β₀k + β₁) + β₂`. SLAQ (Zhang et al., SoCC
//! 2017): `1/(ak² + bk + c) + d` for sublinear, `μ^(k−b) + c` for linear and faster convergence,
//! whichever fits the history better, newer points weighing more. Both are meant for falling
//! losses; here the factor in front may have either sign, so that they serve rising accuracies as
//! well.

use super::curve::Curve;
use super::grid;
use super::predict::WeightedPoint;
use super::value::ValueForecaster;
use serde::{Deserialize, Serialize};

/// A way to forecast a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// The blend of [`super::value`].
    Gainshare,
    /// The last value stays.
    Last,
    /// `a + b·exp(−k/s)`.
    Exponential,
    /// `a + b·(k + 1)^−p`.
    PowerLaw,
    Optimus,
    Slaq,
}

impl Form {
    pub const ALL: [Form; 6] =
        [Form::Gainshare, Form::Last, Form::Exponential, Form::PowerLaw, Form::Optimus, Form::Slaq];

    pub fn name(self) -> &'static str {
        match self {
            Form::Gainshare => "gainshare",
            Form::Last => "last",
            Form::Exponential => "exponential",
            Form::PowerLaw => "power-law",
            Form::Optimus => "optimus",
            Form::Slaq => "slaq",
        }
    }

    /// The value at `horizon`; `None` for an empty curve.
    pub fn forecast(self, curve: &Curve, horizon: f64) -> Option<f64> {
        let last = curve.points().last()?;
        let points: Vec<WeightedPoint> = curve.points().map(|p| WeightedPoint { x: p.x, y: p.y, w: 1.0 }).collect();
        let end = last.x.max(f64::MIN_POSITIVE);
        let found = match self {
            Form::Gainshare => return ValueForecaster::new(curve, horizon).map(|f| f.value_at(horizon).mid),
            Form::Last => None,
            Form::Exponential => best(&points, horizon, (1e-3 * end, 1e3 * end), |s, x| (-x / s).exp()),
            Form::PowerLaw => best(&points, horizon, (0.01, 10.0), |p, x| (x + 1.0).powf(-p)),
            Form::Optimus => best(&points, horizon, (1e-3 * end, 1e3 * end), |c, x| 1.0 / (x + c)),
            Form::Slaq => slaq(points, end, horizon),
        };
        Some(found.map_or(last.y, |(y, _)| y))
    }
}

/// Both of SLAQ's forms over a history in which newer points weigh more; the better one answers.
fn slaq(mut points: Vec<WeightedPoint>, end: f64, horizon: f64) -> Option<(f64, f64)> {
    let n = points.len();
    for (i, p) in points.iter_mut().enumerate() {
        // The paper's decay of 0.95 per iteration, over at most the last hundred of them.
        p.w = 0.95f64.powi((n - 1 - i).min(100) as i32);
    }
    let linear = best(&points, horizon, (1e-3 * end, 1e3 * end), |s, x| (-x / s).exp());
    let sublinear = [0.0, 0.1, 1.0, 10.0].into_iter().filter_map(|bend| {
        best(&points, horizon, (1e-3 * end, 1e3 * end), move |c, x| 1.0 / (bend * x * x / end + x + c))
    });
    sublinear.chain(linear).min_by(|a, b| a.1.total_cmp(&b.1))
}

/// The forecast at `horizon` of the best fit of `form(shape, x)`, and its misfit.
fn best(
    points: &[WeightedPoint],
    horizon: f64,
    shapes: (f64, f64),
    form: impl Fn(f64, f64) -> f64,
) -> Option<(f64, f64)> {
    let found = grid::best(points, shapes, &form)?;
    Some((found.at(horizon, &form), found.misfit)).filter(|(y, _)| y.is_finite())
}
