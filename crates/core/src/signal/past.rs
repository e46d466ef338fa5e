//! What earlier runs of a program say of the pace of its next run.
//!
//! **Problem.** A job shows its speed after two reports. A deadline that could be kept from the start may be out of
//! reach by then. Runs of one program are alike, but their data, their threads and their numbers differ.
//!
//! **Approach.** Each finished run has a law of its own, `serial + parallel / share`, with variances
//! ([`super::speed`]). Two things are combined separately, because runs know them differently well:
//! - the *shape*: the ratio of the serial part to the parallel part. Runs that had several shares know it well, and
//!   count by how well they know it;
//! - the *scale*: how long steps take. Every run knows it, at the shares that it had.
//!
//! The next run can use the largest share that any of them could. A job that can use less shows it at once.
//!
//! How far the runs are from each other is added to what each of them does not know: runs that differ make a wide
//! prediction. One run alone is believed to differ from the next by [`ONE_RUN`] in its scale and [`ONE_SHAPE`] in its
//! shape.
//!
//! **Terms and units.** Those of [`super::speed`].
//!
//! **Properties** (tests of that name): `runs_that_differ_make_a_wide_prediction`;
//! `a_run_with_several_shares_says_more_of_the_shape`.

use super::speed::{LEAST_SHARE, Pace, Shape};

/// One run says this little of the next: the relative deviation of its speed.
const ONE_RUN: f64 = 0.1;

/// The same of the ratio of the serial part to the parallel one.
const ONE_SHAPE: f64 = 0.3;

/// No shape is known better than this.
const LEAST_DEVIATION: f64 = 0.02;

/// One measured run.
struct Run {
    /// The shape's deviation is that of a weight: never zero.
    shape: Shape,
    /// The inverse of the share at which its step is known best, and how long the step takes there.
    center: f64,
    step_s: f64,
}

impl Run {
    fn of(pace: &Pace) -> Option<Run> {
        let [_, both, parallel] = pace.variance;
        let least = 1.0 / pace.usable.clamp(LEAST_SHARE, 1.0);
        let center = if parallel > 0.0 { (-both / parallel).max(least) } else { least };
        let center = center.min(1.0 / LEAST_SHARE);
        let shape = pace.shape();
        let shape = Shape { deviation: shape.deviation.max(LEAST_DEVIATION), ..shape };
        let step_s = pace.serial_s + pace.parallel_s * center;
        let is_sound = step_s.is_finite() && step_s > 0.0 && shape.ratio.is_finite() && shape.deviation.is_finite();
        is_sound.then_some(Run { shape, center, step_s })
    }

    /// The parallel part of a run of this scale with another shape.
    fn parallel_s(&self, ratio: f64) -> f64 {
        self.step_s / (ratio + self.center)
    }
}

/// The pace of the next run of a program, from the paces of earlier runs; `None` if there are none.
pub fn expected_pace(paces: &[Pace]) -> Option<Pace> {
    let runs: Vec<Run> = paces.iter().filter_map(Run::of).collect();
    if runs.is_empty() {
        return None;
    }
    let count = runs.len() as f64;
    let shape = combined_shape(&runs);
    let ratio = shape.ratio;
    let logs: Vec<f64> = runs.iter().map(|run| run.parallel_s(ratio).ln()).collect();
    let mean = logs.iter().sum::<f64>() / count;
    let scatter: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
    let error = ((ONE_RUN * ONE_RUN + scatter) / count).sqrt();
    let parallel_s = mean.exp();
    // A step at the share that the runs had is known; only at other shares the shape matters.
    let center = runs.iter().map(|run| run.center).sum::<f64>() / count;
    let turn = shape.deviation * parallel_s / (ratio + center);
    let pace = Pace {
        serial_s: ratio * parallel_s,
        parallel_s,
        variance: [(turn * center).powi(2), -turn * turn * center, turn * turn],
        error,
        usable: usable(paces),
        seen: 1.0,
        windows: 0,
        is_guess: true,
    };
    let is_sound = pace.serial_s.is_finite() && error.is_finite() && pace.variance.iter().all(|v| v.is_finite());
    is_sound.then_some(pace)
}

/// The shapes, each by how well it is known, and by how far they are from each other.
fn combined_shape(runs: &[Run]) -> Shape {
    let mean_of = |between: f64| {
        let weight = |run: &Run| 1.0 / (run.shape.deviation.powi(2) + between);
        let sum: f64 = runs.iter().map(weight).sum();
        (runs.iter().map(|run| weight(run) * run.shape.ratio).sum::<f64>() / sum, sum)
    };
    let (mean, sum) = mean_of(0.0);
    let squares: f64 = runs.iter().map(|run| run.shape.deviation.powi(-4)).sum();
    let excess: f64 = runs.iter().map(|run| ((run.shape.ratio - mean) / run.shape.deviation).powi(2)).sum();
    let freedom = runs.len() as f64 - 1.0;
    let between = if freedom > 0.0 { ((excess - freedom) / (sum - squares / sum)).max(0.0) } else { 0.0 };
    let between = between + (ONE_SHAPE * mean).powi(2) / runs.len() as f64;
    let (ratio, sum) = mean_of(between);
    Shape { ratio, deviation: (1.0 / sum + between).sqrt() }
}

/// The largest share that one of the runs may have been able to use. A job that can use less shows that with its first
/// window; that it can use more, it could only show if it had more.
fn usable(paces: &[Pace]) -> f64 {
    paces.iter().map(|pace| pace.usable).fold(LEAST_SHARE, f64::max).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run whose serial part is known as well as this, at the share at which it mostly ran.
    fn run(serial_s: f64, parallel_s: f64, deviation: f64, share: f64) -> Pace {
        let x = 1.0 / share;
        let turn = deviation * parallel_s / (serial_s / parallel_s + x);
        let variance = [(turn * x).powi(2), -turn * turn * x, turn * turn];
        Pace { variance, windows: 9, error: 0.03, ..Pace::from_law(serial_s, parallel_s, 1.0) }
    }

    fn expected(runs: &[Pace]) -> Pace {
        expected_pace(runs).expect("there are runs")
    }

    #[test]
    fn runs_that_differ_make_a_wide_prediction() {
        assert_eq!(expected_pace(&[]), None);
        let spread = |pace: &Pace| pace.deviation_s(0.5) / pace.step_s(0.5);
        let one = expected(&[run(0.0, 2.0, 0.1, 0.5)]);
        assert!((one.step_s(0.5) - 4.0).abs() < 1e-9 && (spread(&one) - ONE_RUN).abs() < 0.01, "{one:?}");
        assert!(one.is_guess);
        let alike = expected(&[1.98, 2.0, 2.01, 2.02, 1.99].map(|parallel| run(0.0, parallel, 0.1, 0.5)));
        assert!((alike.step_s(0.5) - 4.0).abs() < 0.02 && spread(&alike) < 0.06, "{alike:?}");
        let unlike = expected(&[1.0, 2.0, 4.0].map(|parallel| run(0.0, parallel, 0.1, 0.5)));
        assert!((unlike.step_s(0.5) - 4.0).abs() < 0.02 && spread(&unlike) > 0.5, "{unlike:?}");
    }

    #[test]
    fn a_run_with_several_shares_says_more_of_the_shape() {
        // The first one ran with a tenth of the node only, and its law is taken to be linear.
        let pace = expected(&[run(0.0, 1.1, 2.0, 0.1), run(1.0, 1.0, 0.05, 0.3)]);
        let shape = pace.shape();
        assert!((0.8..1.05).contains(&shape.ratio), "{shape:?}");
        // At a share where both ran, the shape hardly matters.
        assert!((pace.step_s(0.1) - 11.0).abs() < 0.5, "{pace:?}");
    }

    #[test]
    fn the_next_run_can_use_what_any_run_could() {
        let usable = |runs: &[f64]| {
            let runs: Vec<Pace> = runs.iter().map(|usable| Pace::from_law(0.1, 1.0, *usable)).collect();
            expected(&runs).usable
        };
        assert_eq!((usable(&[0.3]), usable(&[0.3, 0.1, 0.35])), (0.3, 0.35));
        // The second one was never short of its share: it may well have been able to use all of the node.
        assert_eq!(usable(&[0.3, 1.0]), 1.0);
    }

    #[test]
    fn odd_laws_make_no_prediction_that_is_not_a_number() {
        for (serial_s, parallel_s) in [(1.0, 0.0), (0.0, 0.0), (1e300, 1e-300), (f64::NAN, 1.0)] {
            if let Some(pace) = expected_pace(&[Pace::from_law(serial_s, parallel_s, 0.5); 3]) {
                assert!(pace.step_s(0.1).is_finite() && pace.deviation_s(0.1).is_finite(), "{pace:?}");
            }
        }
    }
}
