//! How wide intervals must be, learned from the jobs that have ended.
//!
//! **Problem.** An interval states that it holds the end in eight of ten cases. Its width comes from a model of what
//! may go otherwise. On a machine where more goes otherwise, too few ends lie inside.
//!
//! **How.** The forecast of each job after a tenth of its run is kept. When the job has ended, its *score* is the
//! distance between the forecast and the end, in units of the side of the interval on which the end lies. If intervals
//! are right, eight of ten scores are at most 1. The factor for the next intervals is the score that eight of ten
//! have not exceeded (conformal prediction; V. Vovk et al., Algorithmic Learning in a Random World, 2005). A few
//! scores of right intervals are there from the beginning, so that the first jobs do not count for too much.
//!
//! **Terms and units.** Seconds (`_s`); a score has no unit.
//!
//! **Properties.** `intervals_become_as_wide_as_the_errors_are`; `a_job_that_was_stopped_does_not_count`.

use crate::model::{JobId, Time};
use crate::signal::speed::Interval;
use crate::view::{Phase, View};
use std::collections::{BTreeMap, VecDeque};

/// The part of a run after which its forecast is kept.
const AFTER: f64 = 0.1;

/// Scores of the newest jobs that are remembered.
const KEPT: usize = 64;

/// The part of the ends that intervals should hold.
const INSIDE: f64 = 0.8;

/// Scores of sixteen right intervals: the fourteenth, which eight of ten do not exceed, is 1.
const RIGHT: [f64; 16] = [0.05, 0.1, 0.16, 0.22, 0.28, 0.35, 0.42, 0.49, 0.57, 0.65, 0.74, 0.83, 0.92, 1.0, 1.2, 1.6];

/// No interval is made narrower or wider than this.
const NARROWEST: f64 = 0.7;
const WIDEST: f64 = 3.0;

/// A job may end this much sooner than its last forecast allowed, and still have ended by itself.
const GRACE_S: f64 = 1.0;

/// Keeps forecasts until their jobs have ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Calibration {
    forecasts: BTreeMap<JobId, KeptForecast>,
    scores: VecDeque<f64>,
}

/// The forecasts of one job, in seconds since the decisions' clock began.
#[derive(Debug, Clone, Copy, PartialEq)]
struct KeptForecast {
    /// The forecast after a tenth of the run.
    tenth: Option<Interval>,
    /// The earliest end by the last forecast.
    low_s: f64,
}

impl Calibration {
    /// Takes in the forecasts for the jobs of a view, with the sides that the model gives them.
    pub(super) fn observe(&mut self, view: &View, ends: &BTreeMap<JobId, Interval>, last_at: Time) {
        let now_s = view.now.as_secs_f64();
        let since_s = view.now.since(last_at).as_secs_f64();
        // Jobs that are gone ended some time after the last view.
        let ended_s = now_s - 0.5 * since_s;
        let scores = &mut self.scores;
        self.forecasts.retain(|id, kept| {
            if view.job(*id).is_some() {
                return true;
            }
            let ended_by_itself = kept.low_s <= now_s + GRACE_S;
            if let Some(tenth) = kept.tenth.filter(|_| ended_by_itself) {
                let side_s = if ended_s >= tenth.mid { tenth.high - tenth.mid } else { tenth.mid - tenth.low };
                scores.push_back((ended_s - tenth.mid).abs() / side_s.max(1e-6));
            }
            false
        });
        while self.scores.len() > KEPT {
            self.scores.pop_front();
        }
        for (id, end) in ends {
            let Some(Phase::Running { since, .. }) = view.job(*id).map(|job| job.phase) else { continue };
            let at = Interval { mid: now_s + end.mid, low: now_s + end.low, high: now_s + end.high };
            let ran_s = view.now.since(since).as_secs_f64();
            let kept = self.forecasts.entry(*id).or_insert(KeptForecast { tenth: None, low_s: 0.0 });
            kept.low_s = at.low;
            if kept.tenth.is_none() && ran_s >= AFTER * (ran_s + end.mid) {
                kept.tenth = Some(at);
            }
        }
    }

    /// What the sides of intervals are multiplied by.
    pub(super) fn factor(&self) -> f64 {
        let mut all: Vec<f64> = self.scores.iter().copied().chain(RIGHT).collect();
        all.sort_by(f64::total_cmp);
        let place = (INSIDE * (all.len() + 1) as f64).ceil() as usize;
        all[place.min(all.len()) - 1].clamp(NARROWEST, WIDEST)
    }
}

/// The interval with its sides multiplied by `factor`.
pub(super) fn widened(end: Interval, factor: f64) -> Interval {
    let low = end.mid - factor * (end.mid - end.low);
    Interval { mid: end.mid, low: low.max(0.0), high: end.mid + factor * (end.high - end.mid) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, running};
    use crate::view::JobView;

    /// Shows a job that runs for 100 s and was predicted to end at `predicted_s` ± 10 s; then it is gone.
    fn play(calibration: &mut Calibration, id: u64, predicted_s: f64, gone_s: f64) {
        let start_s = 1000.0 * id as f64;
        let at = |s: f64| Time::from_secs_f64(start_s + s);
        let job = JobView { phase: Phase::Running { node: node(0).id, since: at(0.0), attempt: 1 }, ..running(id, 0) };
        let view = |s: f64, jobs: Vec<JobView>| View { now: at(s), nodes: vec![node(0)], jobs };
        for s in [20.0, gone_s - 0.5] {
            // Near its end, every job is predicted well.
            let mid = if s < 50.0 { predicted_s - s } else { 100.0 - s };
            let end = Interval { mid, low: mid - 10.0, high: mid + 10.0 };
            calibration.observe(&view(s, vec![job.clone()]), &BTreeMap::from([(JobId(id), end)]), at(s - 1.0));
        }
        calibration.observe(&view(gone_s + 0.5, vec![]), &BTreeMap::new(), at(gone_s - 0.5));
    }

    #[test]
    fn intervals_become_as_wide_as_the_errors_are() {
        let mut calibration = Calibration::default();
        assert!((calibration.factor() - 1.0).abs() < 1e-9, "nothing is known at first");
        for id in 1..=50 {
            // Off by up to 20 s, where 10 s were stated.
            play(&mut calibration, id, 80.0 + 40.0 * ((id * 7) % 50) as f64 / 50.0, 100.0);
        }
        assert!((1.3..=1.8).contains(&calibration.factor()), "{}", calibration.factor());
        let end = widened(Interval { mid: 100.0, low: 90.0, high: 110.0 }, calibration.factor());
        assert!(end.low < 88.0 && end.high > 112.0 && end.mid == 100.0, "{end:?}");
        let mut good = Calibration::default();
        (1..=50).for_each(|id| play(&mut good, id, 100.0, 100.0));
        assert!((good.factor() - NARROWEST).abs() < 1e-9, "{}", good.factor());
    }

    #[test]
    fn a_job_that_was_stopped_does_not_count() {
        let mut calibration = Calibration::default();
        (1..=50).for_each(|id| play(&mut calibration, id, 100.0, 60.0));
        assert!((calibration.factor() - 1.0).abs() < 1e-9, "{}", calibration.factor());
    }
}
