//! What will be known of a job's speed in the course of a projection.
//!
//! **Problem.** A rule that is cautious because little is known of a job, or that probes the job to learn more, decides
//! otherwise once the job was measured. A projection that keeps the job's law as it is now, or that makes it known at
//! once, plays trials and probes that never end, or none.
//!
//! **How.** The projection measures the job as a driver would: about one window a second, or one for each report if
//! reports are rarer. Each window at a share is an observation of the law's two parts, which a Kalman filter takes in.
//! A share counts as seen after a whole window at it.
//!
//! **Terms and units.** As in [`crate::signal::speed`]: seconds, node-seconds, shares of the node.
//!
//! **Properties** (tests of that name): `a_share_that_was_measured_is_known`; `a_law_that_was_given_stays`.

use crate::signal::speed::{LEAST_SHARE, Pace};

/// The relative error of one window.
const WINDOW_ERROR: f64 = 0.05;

/// Seconds of one window, where reports are not rarer.
const WINDOW_S: f64 = 1.0;

/// The law of one job as it will be known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Belief {
    pace: Pace,
    /// The share that the job has, and the windows measured at it.
    at: (f64, f64),
    windows: f64,
}

impl Belief {
    pub(super) fn new(pace: Pace) -> Belief {
        Belief { pace, at: (0.0, 0.0), windows: f64::from(pace.windows) }
    }

    pub(super) fn pace(&self) -> Pace {
        self.pace
    }

    /// The job had `share` for `seconds`, in which it made this number of reports, at `step_s` seconds a step.
    pub(super) fn observe(&mut self, share: f64, step_s: f64, seconds: f64, reports: f64) {
        let windows = (seconds / WINDOW_S).min(reports);
        // A law that was given is not measured.
        if windows <= 0.0 || self.pace.windows == 0 && !self.pace.is_guess {
            return;
        }
        let share = share.max(LEAST_SHARE);
        self.at =
            if (share - self.at.0).abs() <= 0.1 * share { (share, self.at.1 + windows) } else { (share, windows) };
        if self.at.1 >= 1.0 {
            self.pace.seen = self.pace.seen.max(share);
        }
        let x = 1.0 / share.min(self.pace.usable).max(LEAST_SHARE);
        let [serial, both, parallel] = self.pace.variance;
        let (of_serial, of_parallel) = (serial + both * x, both + parallel * x);
        let noise = (WINDOW_ERROR * step_s).powi(2) / windows;
        let all = of_serial + of_parallel * x + noise;
        if all <= 0.0 || !all.is_finite() {
            return;
        }
        let (to_serial, to_parallel) = (of_serial / all, of_parallel / all);
        let off = step_s - (self.pace.serial_s + self.pace.parallel_s * x);
        self.pace.variance = [
            (serial - to_serial * of_serial).max(0.0),
            both - to_serial * of_parallel,
            (parallel - to_parallel * of_parallel).max(0.0),
        ];
        self.pace.serial_s = (self.pace.serial_s + to_serial * off).max(0.0);
        self.pace.parallel_s = (self.pace.parallel_s + to_parallel * off).max(0.0);
        self.windows += windows;
        self.pace.windows = self.windows as u32;
    }

    /// The job's own reports have taken the place of earlier runs.
    pub(super) fn confirm(&mut self) {
        self.pace.is_guess = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_that_was_measured_is_known() {
        // Measured at a tenth of the node only: a fifth of a step may be serial.
        let pace = Pace {
            variance: [0.04, -0.004, 0.0005],
            seen: 0.1,
            windows: 5,
            error: 0.03,
            ..Pace::from_law(0.0, 0.1, 1.0)
        };
        let before = pace.deviation_s(1.0) / pace.step_s(1.0);
        let mut belief = Belief::new(pace);
        belief.observe(1.0, 0.12, 0.5, 5.0);
        assert_eq!(belief.pace().seen, 0.1, "half a window shows nothing");
        belief.observe(1.0, 0.12, 2.0, 20.0);
        let after = belief.pace();
        assert_eq!(after.seen, 1.0);
        assert!(before > 0.5 && after.deviation_s(1.0) < 0.1 * after.step_s(1.0), "{before} {after:?}");
        assert!((after.step_s(1.0) - 0.12).abs() < 0.005, "{after:?}");
        // Of small shares it is still known what was measured there.
        assert!((after.step_s(0.1) - 1.0).abs() < 0.1, "{after:?}");
    }

    #[test]
    fn a_law_that_was_given_stays() {
        let mut belief = Belief::new(Pace::from_law(0.1, 0.2, 1.0));
        belief.observe(0.5, 3.0, 10.0, 10.0);
        assert_eq!(belief.pace(), Pace::from_law(0.1, 0.2, 1.0));
    }
}
