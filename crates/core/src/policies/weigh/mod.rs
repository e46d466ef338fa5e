//! The published rules that weigh jobs against each other: what they have in common is that each
//! says how to split a node, nothing else.

mod account;
mod drf;
mod optimus;
mod slaq;
mod themis;

pub(crate) use account::work_left;

use super::{Group, Opinion, Share as ShareRule, Shares};
use crate::model::{Share, Span, Time};
use crate::plan::{Reason, Weighting};
use crate::view::JobView;

/// The rule has no memory.
pub(crate) struct Rule {
    pub(crate) by: Weighting,
}

impl ShareRule for Rule {
    fn share(&mut self, group: &Group<'_>) -> Shares {
        let (opinions, wait) = run(self.by, group.now, group.jobs);
        Shares { opinions, wait }
    }
}

/// Interval between decisions of the weighing rules. SLAQ's authors use epochs of a few seconds, the others longer
/// ones; ten serve all.
const EPOCH: Span = Span::from_secs(10);

fn run(by: Weighting, now: Time, jobs: &[&JobView]) -> (Vec<Opinion>, Option<Span>) {
    let shares = match by {
        Weighting::Drf => drf::shares(now, jobs),
        Weighting::Slaq => slaq::shares(jobs, EPOCH.as_secs_f64()),
        Weighting::Optimus => optimus::shares(jobs),
        Weighting::Themis => themis::shares(now, jobs),
    };
    let opinions = jobs
        .iter()
        .zip(shares)
        .map(|(job, share)| Opinion::of_cpu(Share::clamped(share), Reason::Weighed { by, left_s: work_left(job) }));
    (opinions.collect(), Some(EPOCH))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{JobId, NodeId, PerResource};
    use crate::signal::{Outlook, Signal};
    use crate::view::Phase;
    use proptest::prelude::*;

    /// A job that has consumed `cpu` for 10 of `total` steps.
    fn job(id: u64, cpu: f64, total: u64) -> JobView {
        JobView {
            id: JobId(id),
            phase: Phase::Running { node: NodeId(0), since: Time::ZERO, attempt: 1 },
            consumed_node_s: PerResource { cpu, ..PerResource::default() },
            signal: Signal { reports: 10, step: Some(10), total: Some(total), ..Signal::default() },
            max: Share::FULL,
            ..JobView::default()
        }
    }

    fn shares(by: Weighting, now_s: u64, jobs: &[JobView]) -> Vec<f64> {
        let refs: Vec<&JobView> = jobs.iter().collect();
        run(by, Time::ZERO + Span::from_secs(now_s), &refs).0.iter().map(|o| o.limit.cpu.get()).collect()
    }

    #[test]
    fn optimus_splits_by_the_roots_of_what_is_left() {
        // 10 consumed for 10 of 20 steps leaves 10; 10 of 50 leaves 40: shares 1 to 2.
        let got = shares(Weighting::Optimus, 20, &[job(1, 10.0, 20), job(2, 10.0, 50)]);
        assert!((got[0] - 1.0 / 3.0).abs() < 1e-9 && (got[1] - 2.0 / 3.0).abs() < 1e-9, "{got:?}");
    }

    #[test]
    fn themis_makes_up_for_what_one_job_missed() {
        // Both came at 0 and have 50 of work left after 40 s; the first got 30 of the node, the
        // second 10.
        let got = shares(Weighting::Themis, 40, &[job(1, 30.0, 10 + 17), job(2, 10.0, 60)]);
        assert!(got[1] > got[0] && (got.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{got:?}");
        // By hand: ρ·2·81 = 40 + 51/s₁ and ρ·2·60 = 40 + 50/s₂.
        let rho = |s: f64, left: f64, whole: f64| (40.0 + left / s) / (2.0 * whole);
        assert!((rho(got[0], 51.0, 81.0) - rho(got[1], 50.0, 60.0)).abs() < 1e-6);
    }

    #[test]
    fn slaq_feeds_the_one_that_still_improves() {
        let outlook =
            |gain_left, flat_at| Some(Outlook { at: 10.0, flat_at, gain_left, scale: 0.0, scale_spread: 0.0 });
        let mut jobs = [job(1, 10.0, 100), job(2, 10.0, 100)];
        jobs[0].signal.outlook = outlook(1.0, 40.0);
        jobs[1].signal.outlook = outlook(0.03, 11.0);
        let got = shares(Weighting::Slaq, 20, &jobs);
        assert!(got[0] > 0.8 && got[1] >= 0.02, "{got:?}");
    }

    #[test]
    fn drf_cuts_the_cpu_of_what_needs_memory_most() {
        let mut jobs = [job(1, 10.0, 20), job(2, 10.0, 20)];
        jobs[0].max = Share::clamped(0.25);
        jobs[0].consumed_node_s.memory = 10.0;
        // Half the memory, a quarter of the CPU at most: its weight is a half.
        let got = shares(Weighting::Drf, 20, &jobs);
        assert!((got[0] - 1.0 / 3.0).abs() < 1e-9, "{got:?}");
    }

    proptest! {
        #[test]
        fn every_rule_splits_one_node(
            spec in prop::collection::vec((0.0f64..500.0, 0u64..200, prop::option::of((0.0f64..3.0, 10.0f64..90.0))), 1..9),
            now_s in 0u64..1000,
        ) {
            let jobs: Vec<JobView> = spec.into_iter().enumerate().map(|(i, (cpu, total, outlook))| {
                let mut j = job(i as u64, cpu, total);
                j.signal.total = Some(total).filter(|t| *t >= 10);
                j.signal.outlook = outlook.map(|(gain_left, flat_at)| Outlook { at: 10.0, flat_at, gain_left, scale: 0.0, scale_spread: 0.0 });
                j
            }).collect();
            for by in [Weighting::Drf, Weighting::Slaq, Weighting::Optimus, Weighting::Themis] {
                let got = shares(by, now_s, &jobs);
                prop_assert!((got.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{by:?} {got:?}");
                prop_assert!(got.iter().all(|s| *s > 0.0), "{by:?} {got:?}");
            }
        }
    }
}
