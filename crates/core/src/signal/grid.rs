//! Fits a form with one shape number, `y(x) = limit + span · form(shape, x)`, to points.
//!
//! For a given shape `limit` and `span` follow in closed form (weighted least squares). The shape comes from a
//! logarithmic grid that is refined twice around its best member. No start value is needed, and the result is the same
//! on every machine. Some 75 shapes are tried.

use super::predict::{WeightedPoint, solve};

/// The best member of the grid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GridFit {
    pub(super) shape: f64,
    pub(super) limit: f64,
    pub(super) span: f64,
    /// The mean squared distance of the points.
    pub(super) misfit: f64,
}

impl GridFit {
    /// The value where the form is `form(shape, x)`.
    pub(super) fn at(&self, x: f64, form: impl Fn(f64, f64) -> f64) -> f64 {
        self.limit + self.span * form(self.shape, x)
    }
}

/// Steps of the first grid and of each refinement.
const STEPS: usize = 24;

/// The best fit of `form(shape, x)` with a shape between `low` and `high`, or near them.
pub(super) fn best(
    points: &[WeightedPoint],
    (mut low, mut high): (f64, f64),
    form: impl Fn(f64, f64) -> f64,
) -> Option<GridFit> {
    let mut found: Option<GridFit> = None;
    for _ in 0..3 {
        let step = (high / low).powf(1.0 / STEPS as f64);
        for i in 0..=STEPS {
            let shape = low * step.powi(i as i32);
            if let Some((limit, span, misfit)) = solve(points, |x| form(shape, x))
                && found.is_none_or(|f| misfit < f.misfit)
            {
                found = Some(GridFit { shape, limit, span, misfit });
            }
        }
        let shape = found?.shape;
        (low, high) = (shape / step, shape * step);
    }
    found
}
