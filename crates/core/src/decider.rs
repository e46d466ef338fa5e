//! The one way to a decision: a view goes in, a checked plan comes out.
//!
//! **Problem.** Four drivers (daemon, node agent, operator, simulator) let the same policies
//! decide. Each must check a plan before it carries the plan out, and each decision should be
//! reproducible later. A driver that forgets either looks like one that does not.
//!
//! **Approach.** A [`Decider`] holds a policy and its memory. [`Decider::decide`] takes a view and
//! answers with an [`Outcome`]: nothing is due, a [`Decision`] whose plan passed
//! [`crate::check::check`], or a [`Rejection`] with the violations. Executors accept only the
//! [`CheckedPlan`] of a decision, so a plan that failed its check has no way to the kernel or to
//! the cluster.
//!
//! **Recording.** [`Decider::decide_recorded`] also keeps the memory as it was before the step,
//! from which [`RecordedDecision::replay`] makes the plan again. It copies the memory, whose size
//! grows with the number of jobs: a few microseconds for a machine, tens of milliseconds for a
//! cluster of 50,000 jobs. Nothing is copied while nothing is due.

use crate::check::{CheckedPlan, UnsoundPlan, Violation, check};
use crate::control::Control;
use crate::model::{JobId, Span, Time};
use crate::plan::{Plan, Target};
use crate::policy::Policy;
use crate::replay::{FORMAT, RecordedDecision};
use crate::view::{Marks, View};
use serde::{Deserialize, Serialize};

/// A policy and its memory. It serialises, so that a restarted driver goes on where it stopped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Decider {
    control: Control,
    /// Plans are made unsound before their check.
    #[cfg(any(test, feature = "fixtures"))]
    #[serde(skip)]
    breaks_plans: bool,
}

/// What became of one view.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "an outcome is made once a step and matched at once; it is never stored")]
pub enum Outcome {
    /// No job came or went, no interval is over: what was decided before stands.
    NotDue,
    /// A sound plan, to be carried out.
    Decision(Decision),
    /// The policy made a plan that breaks a promise. It must not be carried out; the limits in
    /// force stay.
    Rejected(Rejection),
}

/// A sound plan and what it was made of.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    pub view: View,
    pub plan: CheckedPlan,
    before: Option<Control>,
}

/// A plan that failed its check.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejection {
    pub generation: u64,
    pub violations: Vec<Violation>,
    /// How the plan can be made again; only after [`Decider::decide_recorded`].
    pub record: Option<Box<RecordedDecision>>,
}

impl Decider {
    pub fn new(policy: Policy) -> Decider {
        Decider {
            control: Control::new(policy),
            #[cfg(any(test, feature = "fixtures"))]
            breaks_plans: false,
        }
    }

    pub fn policy(&self) -> &Policy {
        self.control.policy()
    }

    /// Plans are numbered from here on: a driver that restarts says where it left off.
    pub fn continue_from(&mut self, generation: u64) {
        self.control.continue_from(generation);
    }

    /// What saving, stopping and restoring a job was measured to cost: moves by gain must be worth
    /// it.
    pub fn set_moving_cost(&mut self, cost: Span) {
        self.control.set_moving_cost(cost);
    }

    /// The largest part of its node that a job was seen able to use, where the share rule measures
    /// it.
    pub fn usable(&self, job: JobId) -> Option<f64> {
        self.control.usable(job)
    }

    /// What a running job may use by the last decision about it.
    pub fn target(&self, job: JobId) -> Option<Target> {
        self.control.target(job)
    }

    /// Whether a job will miss its deadline on every node that there is, so that only a further one would help.
    pub fn needs_node(&self, job: JobId) -> bool {
        self.control.needs_node(job)
    }

    /// What the move rule has done with a job and does not do again.
    pub fn marks(&self, job: JobId) -> Marks {
        self.control.marks(job)
    }

    /// When to decide again, if nothing happens before.
    pub fn due(&self) -> Option<Time> {
        self.control.due()
    }

    /// Decides if anything is due in this view: a job came or went, an interval is over, a report
    /// arrived where reports count. Deciding too often is harmless.
    pub fn decide(&mut self, view: View) -> Outcome {
        self.run(view, false)
    }

    /// As [`Decider::decide`], and keeps what is needed to make the plan again.
    pub fn decide_recorded(&mut self, view: View) -> Outcome {
        self.run(view, true)
    }

    /// The checked plan, if anything is due in this view. For forecasts, which decide about one view many times and
    /// keep it.
    pub(crate) fn plan(&mut self, view: &View) -> Option<CheckedPlan> {
        let plan = self.step(view, |_| ())?;
        check(view, plan).ok()
    }

    /// Makes every plan from now on unsound, for tests which show that an executor does not carry such a plan out.
    #[cfg(any(test, feature = "fixtures"))]
    pub fn break_plans(&mut self) {
        self.breaks_plans = true;
    }

    fn run(&mut self, view: View, recorded: bool) -> Outcome {
        let mut before = None;
        let plan = self.step(&view, |control| before = recorded.then(|| control.clone()));
        let Some(plan) = plan else { return Outcome::NotDue };
        vet(view, plan, before)
    }

    fn step(&mut self, view: &View, before: impl FnOnce(&Control)) -> Option<Plan> {
        let plan = self.control.step(view, before)?;
        #[cfg(any(test, feature = "fixtures"))]
        let plan = if self.breaks_plans { crate::fixtures::unsound(plan) } else { plan };
        Some(plan)
    }
}

/// Checks a plan before anything can be done with it.
fn vet(view: View, plan: Plan, before: Option<Control>) -> Outcome {
    match check(&view, plan) {
        Ok(plan) => Outcome::Decision(Decision { view, plan, before }),
        Err(unsound) => {
            let UnsoundPlan { plan, violations } = *unsound;
            let generation = plan.generation;
            let record = before.map(|before| Box::new(record(before, view, plan)));
            Outcome::Rejected(Rejection { generation, violations, record })
        }
    }
}

fn record(before: Control, view: View, plan: Plan) -> RecordedDecision {
    let (policy, memory) = before.into_parts();
    RecordedDecision { format: FORMAT, policy, memory, view, plan }
}

impl Outcome {
    /// The decision, if there is a sound one.
    pub fn decision(self) -> Option<Decision> {
        match self {
            Outcome::Decision(decision) => Some(decision),
            Outcome::NotDue | Outcome::Rejected(_) => None,
        }
    }
}

impl Decision {
    /// What makes the plan again, if the decision was recorded.
    pub fn record(&self) -> Option<RecordedDecision> {
        let before = self.before.clone()?;
        Some(record(before, self.view.clone(), self.plan.as_plan().clone()))
    }
}

impl Rejection {
    /// All violations in one line, for a log.
    pub fn reasons(&self) -> String {
        let list: Vec<String> = self.violations.iter().map(Violation::to_string).collect();
        list.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, running};
    use crate::policy::Preset;

    #[test]
    fn an_unsound_plan_is_rejected_with_its_violations_and_its_record() {
        let view = View { now: Time(1), nodes: vec![node(0)], jobs: vec![running(1, 0)] };
        let plan = Plan { generation: 7, at: Time(1), ..Plan::default() };
        let before = Control::new(Policy::equal());
        let Outcome::Rejected(rejection) = vet(view, plan, Some(before)) else { panic!("a plan without verdicts") };
        assert_eq!((rejection.generation, &rejection.violations[..]), (7, &[Violation::NoVerdict(JobId(1))][..]));
        assert_eq!(rejection.reasons(), "job-1 has no verdict");
        let replay = rejection.record.expect("it was recorded").replay().expect("it can be replayed");
        assert!(!replay.differences.is_empty(), "the policy makes another plan than the unsound one");
    }

    #[test]
    fn a_decider_that_breaks_plans_is_always_rejected() {
        let view = View { now: Time(1), nodes: vec![node(0)], jobs: vec![running(1, 0), running(2, 0)] };
        let mut decider = Decider::new(Policy::from(Preset::Na));
        decider.break_plans();
        let Outcome::Rejected(rejection) = decider.decide(view) else { panic!("an unsound plan") };
        assert!(rejection.violations.contains(&Violation::OtherMoment), "{rejection:?}");
        let is_over = |violation: &Violation| matches!(violation, Violation::OverCapacity { sum, .. } if *sum > 1.9);
        assert!(rejection.violations.iter().any(is_over), "{rejection:?}");
        let kept: Decider =
            serde_json::from_str(&serde_json::to_string(&decider).expect("it serialises")).expect("it is read back");
        assert!(!kept.breaks_plans, "no driver keeps this");
    }

    #[test]
    fn a_policy_that_counts_cpu_only_reads_no_other_counter() {
        let mut is_some = false;
        for preset in Preset::ALL {
            let policy = Policy::from(preset);
            if !policy.counts_cpu_only() {
                continue;
            }
            is_some = true;
            let mut plain = Decider::new(policy);
            let mut other = plain.clone();
            for second in 1..6 {
                let mut view = View { now: Time(second * 1_000_000), nodes: vec![node(0)], jobs: vec![] };
                view.jobs = vec![running(1, 0), running(2, 0)];
                for job in &mut view.jobs {
                    job.consumed_node_s.cpu = 0.1 * second as f64;
                }
                let plan = plain.decide(view.clone()).decision().map(|decision| decision.plan);
                for (place, job) in view.jobs.iter_mut().enumerate() {
                    let used = (1 + place) as f64 * second as f64;
                    (job.consumed_node_s.memory, job.consumed_node_s.block_io, job.consumed_node_s.net_io) =
                        (used, 0.5 * used, 2.0 * used);
                }
                assert_eq!(other.decide(view).decision().map(|decision| decision.plan), plan, "{preset:?}");
            }
        }
        assert!(is_some);
    }

    #[test]
    fn a_decision_is_recorded_only_on_request_and_replays() {
        let view = View { now: Time(1), nodes: vec![node(0)], jobs: vec![running(1, 0)] };
        let mut plain = Decider::new(Policy::equal());
        let mut recorded = plain.clone();
        let decision = plain.decide(view.clone()).decision().expect("a job came");
        assert_eq!(decision.record(), None);
        let decision = recorded.decide_recorded(view.clone()).decision().expect("a job came");
        assert_eq!(decision.record().expect("recorded").replay().expect("replayed").differences, vec![]);
        assert_eq!(recorded.decide_recorded(view), Outcome::NotDue);
        assert_eq!(plain, recorded, "recording changes nothing");
    }
}
