//! A tiny make-believe node for tests: jobs with a value and a rate, moved on by hand. Shared by
//! the tests of this folder.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part of the world")]

use gainshare_core::check::CheckedPlan;
use gainshare_core::decider::{Decider, Outcome};
use gainshare_core::model::*;
use gainshare_core::plan::{Plan, Verdict};
use gainshare_core::policy::{Flowcon, Policy, ShareRule};
use gainshare_core::signal::{Sample, Tracker};
use gainshare_core::view::*;
use std::collections::BTreeMap;

pub struct World {
    pub decider: Decider,
    pub now: Time,
    pub slots: Option<usize>,
    jobs: BTreeMap<JobId, (JobView, Tracker)>,
}

pub fn flowcon(alpha: f64, interval_s: u64) -> Policy {
    let rule = Flowcon { alpha, interval: Span::from_secs(interval_s), ..Flowcon::default() };
    Policy { share: ShareRule::Flowcon(rule), deadband: 0.0, ..Policy::equal() }
}

impl World {
    pub fn new(policy: Policy) -> World {
        policy.validate().expect("a sound policy");
        World { decider: Decider::new(policy), now: Time::ZERO, slots: None, jobs: BTreeMap::new() }
    }

    pub fn arrive(&mut self, id: u64) -> &mut JobView {
        let view = JobView {
            id: JobId(id),
            owner: OwnerId(0),
            arrived: self.now,
            phase: Phase::Running { node: NodeId(0), since: self.now, attempt: 1 },
            signal: Tracker::default().signal(),
            ..JobView::default()
        };
        &mut self.jobs.entry(JobId(id)).or_insert((view, Tracker::default())).0
    }

    pub fn wait(&mut self, id: u64) -> &mut JobView {
        let job = self.arrive(id);
        job.phase = Phase::Waiting;
        job
    }

    pub fn leave(&mut self, id: u64) {
        self.jobs.remove(&JobId(id));
    }

    /// The job reports `value` now.
    pub fn report(&mut self, id: u64, value: f64) {
        let now = self.now;
        let (_, tracker) = self.jobs.get_mut(&JobId(id)).unwrap();
        tracker.push(now, Sample { value, step: None, total: None });
    }

    /// The job used `rate` of the node's CPU for the next `seconds`; call once for each job, then
    /// move time on.
    pub fn used(&mut self, id: u64, cpu_node_seconds: f64) {
        self.jobs.get_mut(&JobId(id)).unwrap().0.consumed_node_s.cpu += cpu_node_seconds;
    }

    pub fn after(&mut self, seconds: f64) -> &mut Self {
        self.now = self.now + Span::from_secs_f64(seconds);
        self
    }

    pub fn view(&self) -> View {
        let node = NodeView {
            id: NodeId(0),
            cores: 2.0,
            speed: 1.0,
            memory_bytes: 1 << 30,
            slots: self.slots,
            idle_node_s: None,
        };
        let jobs = self.jobs.values().map(|(v, t)| JobView { signal: t.signal(), ..v.clone() }).collect();
        View { now: self.now, nodes: vec![node], jobs }
    }

    /// Steps; every plan is checked.
    pub fn step(&mut self) -> Option<CheckedPlan> {
        let view = self.view();
        decide(&mut self.decider, view)
    }

    pub fn must_step(&mut self) -> CheckedPlan {
        self.step().expect("a plan was due")
    }
}

/// The plan that is due; a rejected one fails the test.
pub fn decide(decider: &mut Decider, view: View) -> Option<CheckedPlan> {
    match decider.decide(view) {
        Outcome::NotDue => None,
        Outcome::Decision(decision) => Some(decision.plan),
        Outcome::Rejected(rejection) => panic!("an unsound plan: {}", rejection.reasons()),
    }
}

pub fn of(plan: &Plan, id: u64) -> &Verdict {
    &plan.verdicts[&JobId(id)]
}

/// The CPU limit of a job in a plan.
pub fn limit(plan: &Plan, id: u64) -> f64 {
    of(plan, id).target.expect("a running job has a target").limit.cpu.get()
}

/// The CPU share of a job in a plan.
pub fn share(plan: &Plan, id: u64) -> f64 {
    of(plan, id).target.expect("a running job has a target").share.cpu.get()
}

pub fn assert_close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9, "{a} is not {b}");
}
