//! How far the ends of the scenarios lie apart, kept from forecast to forecast.
//!
//! **Problem.** All scenarios together cost ten times as much as the expected one. Forecasts that cost more are made
//! less often, and are older when somebody reads them.
//!
//! **How.** Each forecast plays the expected scenario and one pair of the others. Of each scenario the newest result is
//! kept: every job's end, as a multiple of its end in the expected scenario at that time.
//!
//! **Properties** (tests of that name): `each_scenario_is_played_in_turn`; `jobs_that_have_gone_are_forgotten`.

use super::scenario::{SCENARIOS, Scenario, quantile};
use super::track::ProjectedEnd;
use crate::model::JobId;
use std::collections::BTreeMap;

/// Fewer pairs say nothing of a tenth and a ninetieth.
const LEAST_PAIRS: usize = 2;

/// Ends as multiples of the expected one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) tenth: f64,
    pub(super) median: f64,
    pub(super) ninetieth: f64,
}

/// The newest results of the scenarios.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Spreads {
    /// Of each pair, and each job.
    pairs: [BTreeMap<JobId, [f64; 2]>; SCENARIOS / 2],
    next: usize,
}

impl Spreads {
    /// Plays the next pair of scenarios, beside which `expected` are the expected ends.
    pub(super) fn play(
        &mut self,
        expected: &BTreeMap<JobId, ProjectedEnd>,
        project: impl Fn(Scenario) -> BTreeMap<JobId, ProjectedEnd>,
    ) {
        let Some(pair) = Scenario::pairs().nth(self.next) else { return };
        let [one, other] = pair.map(project);
        let ratios = expected.iter().filter_map(|(id, end)| {
            let ratio = |ends: &BTreeMap<JobId, ProjectedEnd>| Some(ends.get(id)?.ends_s / end.ends_s.max(1e-9));
            Some((*id, [ratio(&one)?, ratio(&other)?]))
        });
        self.pairs[self.next] = ratios.collect();
        self.pairs.iter_mut().for_each(|pair| pair.retain(|id, _| expected.contains_key(id)));
        self.next = (self.next + 1) % self.pairs.len();
    }

    /// How far the ends of this job lie apart, if enough scenarios were played with it.
    pub(super) fn of(&self, job: JobId) -> Option<Spread> {
        let known: Vec<[f64; 2]> = self.pairs.iter().filter_map(|pair| pair.get(&job).copied()).collect();
        if known.len() < LEAST_PAIRS {
            return None;
        }
        let mut ends: Vec<f64> = known.into_iter().flatten().chain([1.0]).filter(|end| end.is_finite()).collect();
        ends.sort_by(f64::total_cmp);
        Some(Spread { tenth: quantile(&ends, 0.1), median: quantile(&ends, 0.5), ninetieth: quantile(&ends, 0.9) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(of: &[(u64, f64)]) -> BTreeMap<JobId, ProjectedEnd> {
        of.iter()
            .map(|&(id, ends_s)| (JobId(id), ProjectedEnd { ends_s, early: 0.0, late: 0.0, unsure: 0.0 }))
            .collect()
    }

    #[test]
    fn each_scenario_is_played_in_turn() {
        let mut spreads = Spreads::default();
        let played = std::cell::RefCell::new(vec![]);
        for _ in 0..SCENARIOS / 2 {
            spreads.play(&ends(&[(1, 10.0)]), |scenario| {
                played.borrow_mut().push(scenario);
                ends(&[(1, 10.0 + scenario.common())])
            });
        }
        let wanted: Vec<Scenario> = Scenario::pairs().flatten().collect();
        assert_eq!(played.into_inner(), wanted);
        let found = spreads.of(JobId(1)).expect("all were played");
        assert!((found.median - 1.0).abs() < 1e-9 && found.tenth < 0.9 && found.ninetieth > 1.1, "{found:?}");
        assert_eq!(spreads.of(JobId(2)), None);
    }

    #[test]
    fn jobs_that_have_gone_are_forgotten() {
        let mut spreads = Spreads::default();
        (0..3).for_each(|_| spreads.play(&ends(&[(1, 10.0), (2, 20.0)]), |_| ends(&[(1, 9.0), (2, 21.0)])));
        spreads.play(&ends(&[(2, 20.0)]), |_| ends(&[(2, 21.0)]));
        assert!(spreads.of(JobId(1)).is_none() && spreads.of(JobId(2)).is_some());
    }
}
