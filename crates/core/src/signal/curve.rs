//! The history of one job's value, in bounded memory.
//!
//! **Problem.** A forecast needs the whole curve, but a job may report a million times and there
//! are thousands of jobs.
//!
//! **Approach.** At most [`MOST_POINTS`] points, each the mean of the reports that fell into it.
//! When there is one too many, the two neighbours are merged that together span the least, measured
//! as a part of how far they lie from the start plus a tenth of the whole: narrow points where the
//! curve is young and steep, evenly spaced ones later. A report that stands alone between two
//! neighbours that agree with each other (a spike, a torn number) is replaced by the middle of the
//! three before it enters a mean; a level that stays is not touched.
//!
//! **Terms.** `x` is the position: the job's step where it counts steps, otherwise the number of
//! its reports. A step that falls back means that the job resumed from an earlier checkpoint: what
//! came after that step is forgotten.
//!
//! **Properties** (each a test of that name): `bounded`; `ascending`: positions only grow;
//! `spikes_do_not_enter`.

use serde::{Deserialize, Serialize};

/// A forecast from 64 points is as good as one from all of them (noise averages out within a
/// point), and costs microseconds.
pub const MOST_POINTS: usize = 64;

/// How much of the whole length is added to a position when spans are compared: small values favour
/// the start of the curve.
const EVENNESS: f64 = 0.1;

/// Values beyond this are torn numbers or runaway losses; squares of it still fit a float.
const LARGEST_VALUE: f64 = 1e150;

/// Neighbouring reports, taken together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Mean position of the reports.
    pub x: f64,
    /// Mean value of the reports.
    pub y: f64,
    /// How many reports.
    pub reports: u32,
    first_x: f64,
    last_x: f64,
}

impl Point {
    fn one(x: f64, y: f64) -> Point {
        Point { x, y, reports: 1, first_x: x, last_x: x }
    }

    fn merge(&self, other: &Point) -> Point {
        let (a, b) = (f64::from(self.reports), f64::from(other.reports));
        Point {
            x: (self.x * a + other.x * b) / (a + b),
            y: (self.y * a + other.y * b) / (a + b),
            reports: self.reports.saturating_add(other.reports),
            first_x: self.first_x,
            last_x: other.last_x,
        }
    }
}

/// A curve seen so far.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Curve {
    points: Vec<Point>,
    /// The value before the newest one, as reported.
    previous: Option<f64>,
    /// The newest report: not yet merged, because only its successor can tell whether it is a
    /// spike.
    newest: Option<(f64, f64)>,
}

impl Curve {
    /// Takes in one report. What is not finite, and absurdly large values, are left out.
    pub fn push(&mut self, x: f64, y: f64) {
        if !(x.is_finite() && y.is_finite() && y.abs() <= LARGEST_VALUE) {
            return;
        }
        if let Some((newest_x, newest_y)) = self.newest {
            if x <= newest_x {
                self.rewind(x);
            } else {
                let settled = self.previous.map_or(newest_y, |before| middle(before, newest_y, y));
                self.points.push(Point::one(newest_x, settled));
                self.previous = Some(newest_y);
                if self.points.len() >= MOST_POINTS {
                    self.merge_narrowest(x);
                }
            }
        }
        self.newest = Some((x, y));
    }

    /// The points in order of position, the newest report last.
    pub fn points(&self) -> impl Iterator<Item = Point> + '_ {
        self.points.iter().copied().chain(self.newest.map(|(x, y)| Point::one(x, y)))
    }

    pub fn len(&self) -> usize {
        self.points.len() + usize::from(self.newest.is_some())
    }

    pub fn is_empty(&self) -> bool {
        self.newest.is_none()
    }

    /// The position of the newest report.
    pub fn at(&self) -> Option<f64> {
        self.newest.map(|(x, _)| x)
    }

    /// The curve as it was at position `x`, in the points that are kept of it.
    pub(super) fn up_to(&self, x: f64) -> Curve {
        let all: Vec<Point> = self.points().collect();
        let mut points: Vec<Point> = all.into_iter().take_while(|p| p.last_x <= x).collect();
        let newest = points.pop().map(|p| (p.x, p.y));
        Curve { previous: points.last().map(|p| p.y), points, newest }
    }

    fn rewind(&mut self, x: f64) {
        self.points.retain(|p| p.last_x < x);
        self.previous = self.points.last().map(|p| p.y);
    }

    fn merge_narrowest(&mut self, end: f64) {
        let origin = self.points[0].first_x;
        let cost = |a: &Point, b: &Point| (b.last_x - a.first_x) / (a.x - origin + EVENNESS * (end - origin));
        let narrowest = (1..self.points.len())
            .min_by(|&i, &j| {
                let span = |i: usize| cost(&self.points[i - 1], &self.points[i]);
                span(i).total_cmp(&span(j))
            })
            .expect("there are points when one is too many");
        let merged = self.points[narrowest - 1].merge(&self.points[narrowest]);
        self.points[narrowest - 1] = merged;
        self.points.remove(narrowest);
    }
}

fn middle(a: f64, b: f64, c: f64) -> f64 {
    a.min(b).max(a.max(b).min(c))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(values: impl IntoIterator<Item = f64>) -> Curve {
        let mut c = Curve::default();
        for (i, v) in values.into_iter().enumerate() {
            c.push(i as f64, v);
        }
        c
    }

    #[test]
    fn a_short_curve_is_kept_as_it_is() {
        let c = curve([5.0, 4.0, 3.0, 2.5]);
        assert_eq!(c.points().map(|p| p.y).collect::<Vec<_>>(), [5.0, 4.0, 3.0, 2.5]);
        assert_eq!(c.at(), Some(3.0));
    }

    #[test]
    fn spikes_do_not_enter() {
        let c = curve([5.0, 4.0, 900.0, 3.0, 2.9]);
        assert_eq!(c.points().map(|p| p.y).collect::<Vec<_>>(), [5.0, 5.0, 4.0, 3.0, 2.9]);
        // A drop that stays is no spike.
        let c = curve([5.0, 5.0, 1.0, 1.0, 1.0]);
        assert_eq!(c.points().map(|p| p.y).collect::<Vec<_>>(), [5.0, 5.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_step_back_forgets_what_came_after_it() {
        let mut c = curve([5.0, 4.0, 3.0, 2.0]);
        c.push(2.0, 3.1);
        c.push(3.0, 2.1);
        assert_eq!(
            c.points().map(|p| (p.x, p.y)).collect::<Vec<_>>(),
            [(0.0, 5.0), (1.0, 4.0), (2.0, 3.1), (3.0, 2.1)]
        );
    }

    #[test]
    fn a_curve_is_cut_at_a_position() {
        let c = curve([5.0, 4.0, 3.0, 2.5]);
        assert_eq!(c.up_to(2.5), curve([5.0, 4.0, 3.0]));
        assert_eq!(c.up_to(3.0), c);
        assert!(c.up_to(-1.0).is_empty());
    }

    #[test]
    fn the_start_keeps_more_detail_than_the_end() {
        let c = curve((0..100_000).map(|i| 1.0 / (1.0 + f64::from(i))));
        let in_first_tenth = c.points().filter(|p| p.x < 10_000.0).count();
        let in_last_tenth = c.points().filter(|p| p.x >= 90_000.0).count();
        assert!(in_first_tenth >= 2 * in_last_tenth && in_last_tenth >= 2, "{in_first_tenth} and {in_last_tenth}");
    }

    proptest! {
        #[test]
        fn bounded(values in prop::collection::vec(prop::num::f64::ANY, 0..3000)) {
            let c = curve(values);
            prop_assert!(c.len() <= MOST_POINTS);
            prop_assert!(c.points().all(|p| p.x.is_finite() && p.y.is_finite()));
        }

        #[test]
        fn ascending(reports in prop::collection::vec((0.0f64..1e6, -1e3f64..1e3), 0..500)) {
            let mut c = Curve::default();
            for (x, y) in reports {
                c.push(x, y);
            }
            let xs: Vec<_> = c.points().map(|p| p.x).collect();
            prop_assert!(xs.windows(2).all(|w| w[0] < w[1]), "{xs:?}");
        }
    }
}
