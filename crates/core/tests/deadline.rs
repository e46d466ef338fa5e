//! The deadline rule on jobs whose pace is known: promises, kept promises, and reasons.

use crate::world;
use gainshare_core::check::CheckedPlan;
use gainshare_core::decider::Decider;
use gainshare_core::model::{JobId, NodeId, Share, Span, Time};
use gainshare_core::plan::{Reason, Verdict};
use gainshare_core::policy::{Policy, Preset, ScaleRule};
use gainshare_core::signal::past::expected_pace;
use gainshare_core::signal::speed::Pace;
use gainshare_core::signal::{Signal, TimedValue};
use gainshare_core::view::{Deadline, FinishedRun, JobView, NodeView, Phase, View};
use proptest::prelude::*;

const NOW: Time = Time(1_000_000_000);

/// A running job with `steps` left, each a node-second, and a deadline in `left_s`.
fn job(id: u64, steps: u64, left_s: Option<f64>) -> JobView {
    let report = Some(TimedValue { value: 1.0, at: NOW });
    JobView {
        id: JobId(id),
        phase: Phase::Running { node: NodeId(0), since: Time::ZERO, attempt: 1 },
        signal: Signal {
            reports: 1,
            first: report,
            last: report,
            step: Some(1),
            total: Some(steps + 1),
            pace: Some(Pace::from_law(0.0, 1.0, 1.0)),
            ..Signal::default()
        },
        deadline: left_s.map(|s| Deadline::strict(NOW + Span::from_secs_f64(s))),
        ..JobView::default()
    }
}

fn view(now: Time, jobs: Vec<JobView>) -> View {
    let node =
        NodeView { id: NodeId(0), cores: 8.0, speed: 1.0, memory_bytes: 1 << 34, slots: None, idle_node_s: None };
    View { now, nodes: vec![node], jobs }
}

fn decider() -> Decider {
    Decider::new(Policy::from(Preset::Qos))
}

fn decide(decider: &mut Decider, jobs: Vec<JobView>) -> CheckedPlan {
    world::decide(decider, view(NOW, jobs)).expect("jobs came")
}

fn verdict(plan: &CheckedPlan, id: u64) -> &Verdict {
    &plan.verdicts[&JobId(id)]
}

fn share(plan: &CheckedPlan, id: u64) -> f64 {
    verdict(plan, id).target.expect("it runs").share.cpu.get()
}

#[test]
fn a_job_has_the_least_that_makes_its_deadline_and_the_others_the_rest() {
    // 30 node-seconds in 60 s, 1.5 s and 2 % of it in reserve: a little over half the node. A job without a deadline
    // has the rest.
    let plan = decide(&mut decider(), vec![job(1, 30, Some(60.0)), job(2, 1000, None)]);
    let least = 30.0 / (58.5 * 0.98);
    assert!((share(&plan, 1) - least).abs() < 0.01, "{plan:?}");
    assert!((share(&plan, 2) - (1.0 - least)).abs() < 0.01, "{plan:?}");
    assert!(matches!(verdict(&plan, 1).reason, Reason::MeetsDeadline { .. }), "{plan:?}");
    assert!((verdict(&plan, 1).least.get() - least).abs() < 0.01);
    assert_eq!(verdict(&plan, 2).least, Share::ZERO);
}

#[test]
fn the_length_of_a_job_that_names_none_comes_from_finished_runs_of_its_program() {
    let unknown = |history: Vec<FinishedRun>| {
        let mut due = job(1, 30, Some(60.0));
        (due.signal.total, due.history) = (None, history);
        decide(&mut decider(), vec![due, job(2, 1000, None)])
    };
    let plan = unknown(vec![]);
    assert_eq!(verdict(&plan, 1).reason, Reason::UnknownEnd);
    // Three runs of 31 steps; this one has made one step. It plans for one that is a little longer.
    let run = FinishedRun { steps: Some(31), claimed: None, claimed_by: None, core_s: 240.0 };
    let plan = unknown(vec![run; 3]);
    assert!(matches!(verdict(&plan, 1).reason, Reason::MeetsDeadline { .. }), "{plan:?}");
    assert!((0.5..0.62).contains(&share(&plan, 1)), "{plan:?}");
    // Three hundred steps do not fit into a minute.
    let plan = unknown(vec![FinishedRun { steps: Some(300), ..run }; 3]);
    let Reason::CannotMeet { earliest_s: Some(earliest_s) } = verdict(&plan, 1).reason else { panic!("{plan:?}") };
    assert!((280.0..400.0).contains(&earliest_s), "{earliest_s}");
}

#[test]
fn a_job_that_cannot_meet_its_deadline_learns_that_and_starves_no_other_job() {
    let plan = decide(&mut decider(), vec![job(1, 50, Some(60.0)), job(2, 80, Some(70.0))]);
    let Reason::CannotMeet { earliest_s: Some(earliest_s) } = verdict(&plan, 2).reason else { panic!("{plan:?}") };
    // 50 node-seconds are promised before; 130 in all.
    assert!((125.0..145.0).contains(&earliest_s), "{earliest_s}");
    assert!(share(&plan, 1) >= 50.0 / 60.0, "{plan:?}");
    assert!(share(&plan, 2) > 0.0, "it still runs");
}

#[test]
fn jobs_are_planned_to_end_a_little_early_and_to_the_second_only_where_nothing_else_fits() {
    // The reserve counts: 30 node-seconds in 60 s take a little more than half of the node.
    let with = |reserve_s: u64, steps: u64| {
        let mut policy = Policy::from(Preset::Qos);
        let ScaleRule::Deadline(rule) = &mut policy.scale else { panic!("{policy:?}") };
        rule.reserve = Span::from_secs(reserve_s);
        decide(&mut Decider::new(policy), vec![job(1, steps, Some(60.0)), job(2, 1000, None)])
    };
    let (without, early) = (with(0, 30), with(10, 30));
    assert!((share(&early, 1) - share(&without, 1) - 0.1).abs() < 0.02, "{early:?}");
    // 54 node-seconds do not fit into 50 s, but into 60.
    let tight = with(10, 54);
    assert!(matches!(verdict(&tight, 1).reason, Reason::MeetsDeadline { .. }), "{tight:?}");
}

#[test]
fn a_job_whose_speed_at_larger_shares_is_not_known_is_given_one_to_find_out() {
    // One share so far, a tenth: at all of the node a step may as well take three times as long as expected.
    let unsure = |variance: [f64; 3]| {
        let mut due = job(1, 36, Some(60.0));
        due.signal.pace = Some(Pace { variance, windows: 3, ..Pace::from_law(0.0, 1.0, 1.0) });
        decide(&mut decider(), vec![due, job(2, 1000, None)])
    };
    // It is promised nothing before it was measured with that share.
    let plan = unsure([4.0, -0.4, 0.04]);
    assert!(matches!(verdict(&plan, 1).reason, Reason::Probes { .. }), "{plan:?}");
    assert!(share(&plan, 1) > 0.55, "{plan:?}");
    // It takes nothing from an earlier promise.
    let mut decider = decider();
    decide(&mut decider, vec![job(2, 50, Some(100.0))]);
    let mut due = job(1, 36, Some(60.0));
    due.signal.pace = Some(Pace { variance: [4.0, -0.4, 0.04], windows: 3, ..Pace::from_law(0.0, 1.0, 1.0) });
    let plan = decide(&mut decider, vec![due, job(2, 50, Some(100.0))]);
    assert!(matches!(verdict(&plan, 2).reason, Reason::MeetsDeadline { .. } | Reason::Early { .. }), "{plan:?}");
}

/// A job whose steps are taken to cost a node-second each, and that was measured with `seen` of the node at most.
fn seen_with(seen: f64, id: u64, steps: u64, left_s: f64) -> JobView {
    let mut due = job(id, steps, Some(left_s));
    (due.signal.step, due.signal.total, due.signal.reports) = (Some(5), Some(steps + 5), 5);
    due.signal.pace = Some(Pace { seen, windows: 4, error: 0.03, ..Pace::from_law(0.0, 1.0, 1.0) });
    due
}

fn is_on_trial(plan: &CheckedPlan, id: u64) -> bool {
    matches!(verdict(plan, id).reason, Reason::Probes { .. })
}

#[test]
fn a_deadline_is_promised_when_the_job_was_measured_near_the_share_that_it_needs() {
    let mut decider = decider();
    let at = |s: u64, jobs| view(NOW + Span::from_secs(s), jobs);
    // It needs half of the node and has had a tenth: it has the half at once, and no promise.
    let plan = decide(&mut decider, vec![seen_with(0.1, 1, 30, 60.0), job(2, 1000, None)]);
    let Reason::Probes { needs, seen } = verdict(&plan, 1).reason else { panic!("{plan:?}") };
    assert!((0.5..0.6).contains(&needs.get()) && seen == Share::clamped(0.1), "{plan:?}");
    assert!((0.5..0.6).contains(&share(&plan, 1)), "{plan:?}");
    // It shows that it is as fast as it seemed.
    let shown = vec![seen_with(0.52, 1, 28, 60.0), job(2, 1000, None)];
    let plan = world::decide(&mut decider.clone(), at(4, shown)).expect("due");
    assert!(is_promised(&plan, 1), "{plan:?}");
    // Or that it can use no more than a fifth of the node.
    let mut slow = seen_with(0.2, 1, 29, 60.0);
    slow.signal.pace = slow.signal.pace.map(|pace| Pace { usable: 0.2, ..pace });
    let plan = world::decide(&mut decider, at(4, vec![slow, job(2, 1000, None)])).expect("due");
    assert!(matches!(verdict(&plan, 1).reason, Reason::CannotMeet { .. }), "{plan:?}");
}

/// The first job needs nearly all of the node until its deadline. The second one needs half of it afterwards.
fn later(seen: f64, first_left_s: f64) -> Vec<JobView> {
    vec![seen_with(1.0, 1, 55, first_left_s), seen_with(seen, 2, 30, 130.0)]
}

#[test]
fn a_share_that_is_needed_only_later_is_probed_at_once_if_no_deadline_suffers() {
    let mut decider = decider();
    let plan = decide(&mut decider, later(1.0, 70.0));
    let before = share(&plan, 2);
    assert!(is_promised(&plan, 2) && before < 0.2, "{plan:?}");
    let mut fresh = Decider::new(Policy::from(Preset::Qos));
    let plan = decide(&mut fresh, later(0.05, 70.0));
    assert!(is_promised(&plan, 1) && is_on_trial(&plan, 2), "{plan:?}");
    assert!(share(&plan, 2) > before + 0.1, "{plan:?}");
    // Without room the first job keeps what it needs.
    let mut fresh = Decider::new(Policy::from(Preset::Qos));
    let plan = decide(&mut fresh, later(0.05, 60.0));
    assert!(is_promised(&plan, 1) && share(&plan, 1) > 0.9, "{plan:?}");
}

#[test]
fn a_probe_that_shows_nothing_ends_and_is_not_repeated() {
    let mut decider = Decider::new(Policy::from(Preset::Qos));
    let mut shares = vec![];
    for s in 0..40 {
        let jobs = || {
            // The first job makes its steps. The second one reports nothing more.
            let mut jobs = later(0.05, 70.0);
            let now = NOW + Span::from_secs(s);
            jobs[0].signal.step = Some(5 + (0.8 * s as f64) as u64);
            jobs[0].signal.last = Some(TimedValue { value: 1.0, at: now });
            let due = |left_s: u64| Some(Deadline::strict(NOW + Span::from_secs(left_s)));
            (jobs[0].deadline, jobs[1].deadline) = (due(70), due(130));
            jobs
        };
        if let Some(plan) = world::decide(&mut decider, view(NOW + Span::from_secs(s), jobs())) {
            assert!(is_on_trial(&plan, 2) || !is_promised(&plan, 2), "{plan:?}");
            shares.push(share(&plan, 2));
        }
    }
    let probed = shares.iter().rposition(|share| *share > 0.25).expect("it was probed");
    assert!(shares.len() > probed + 3, "the probe ends: {shares:?}");
}

/// A running job that has not reported. Three earlier runs of its program made `steps` steps, each of about
/// `step_s` node-seconds.
fn silent(id: u64, steps: u64, step_s: f64, left_s: f64) -> JobView {
    let run = FinishedRun { steps: Some(steps), claimed: None, claimed_by: None, core_s: 8.0 * steps as f64 };
    let paces = [0.95, 1.0, 1.05].map(|factor| Pace::from_law(0.0, factor * step_s, 1.0));
    let signal = Signal { pace: expected_pace(&paces), ..Signal::default() };
    JobView { signal, history: vec![run; 3], ..job(id, steps, Some(left_s)) }
}

/// A deadline that is far away is looked at seldom. One that is near and not measured yet does not wait for that.
#[test]
fn a_job_is_looked_at_by_its_own_deadline_before_it_is_measured() {
    let mut decider = decider();
    let far = || job(1, 30, Some(36_000.0));
    let new = JobView { signal: Signal::default(), ..job(2, 20, Some(60.0)) };
    let plan = decide(&mut decider, vec![far(), new]);
    assert_eq!(verdict(&plan, 2).reason, Reason::NotYetMeasured);
    let later = NOW + Span::from_secs(4);
    let plan = world::decide(&mut decider, view(later, vec![far(), job(2, 20, Some(60.0))])).expect("a new decision");
    assert!(is_promised(&plan, 2), "{plan:?}");
}

fn is_promised(plan: &CheckedPlan, id: u64) -> bool {
    matches!(verdict(plan, id).reason, Reason::MeetsDeadline { .. } | Reason::Early { .. })
}

#[test]
fn a_job_whose_program_is_known_is_promised_before_its_first_report() {
    let plan = decide(&mut decider(), vec![silent(1, 30, 1.0, 60.0), job(2, 1000, None)]);
    assert!(is_promised(&plan, 1), "{plan:?}");
    // A little more than the half of the node that a job of this length needs.
    assert!((0.5..0.65).contains(&share(&plan, 1)), "{plan:?}");
    // Nothing is known of a new program.
    let mut unknown = silent(1, 30, 1.0, 60.0);
    (unknown.signal.pace, unknown.history) = (None, vec![]);
    let plan = decide(&mut decider(), vec![unknown, job(2, 1000, None)]);
    assert!(!is_promised(&plan, 1), "{plan:?}");
}

#[test]
fn earlier_runs_that_mislead_by_a_factor_of_two_cost_no_promise_that_a_job_has_earned() {
    let mut decider = decider();
    // By its history the first job takes 20 node-seconds of 60. In truth it takes 40.
    let plan = decide(&mut decider, vec![silent(1, 20, 1.0, 60.0)]);
    assert!(is_promised(&plan, 1), "{plan:?}");
    // Another one comes, whose own reports say that it takes 35.
    let later = |s: u64, jobs| view(NOW + Span::from_secs(s), jobs);
    let plan = world::decide(&mut decider, later(1, vec![silent(1, 20, 1.0, 60.0), job(2, 35, Some(61.0))]));
    let plan = plan.expect("a job came");
    assert!(is_promised(&plan, 1) && is_promised(&plan, 2), "{plan:?}");
    // The first reports of the first job show that both do not fit.
    let mut shown = job(1, 19, Some(60.0));
    shown.signal.pace = Some(Pace { windows: 2, ..Pace::from_law(0.0, 2.0, 1.0) });
    let plan = world::decide(&mut decider, later(4, vec![shown, job(2, 34, Some(61.0))])).expect("due");
    assert!(is_promised(&plan, 2) && !is_promised(&plan, 1), "{plan:?}");
}

#[test]
fn a_job_is_not_starved_because_earlier_runs_took_too_long() {
    // By its history it needs 200 node-seconds in 60 s. Beside it are a promise of half the node and a job that will
    // surely be late.
    let jobs = |left| vec![silent(1, 200, 1.0, 60.0), job(2, 30, Some(60.0)), job(3, left, Some(60.0))];
    let plan = decide(&mut decider(), jobs(500));
    assert!(matches!(verdict(&plan, 1).reason, Reason::CannotMeet { .. }), "{plan:?}");
    assert!(is_promised(&plan, 2), "{plan:?}");
    // Its own reports may say otherwise, so it has more than the job that has shown that it is late.
    assert!(share(&plan, 1) > 0.1, "{plan:?}");
}

#[test]
fn a_promise_is_kept_before_a_new_one_is_made() {
    let mut decider = decider();
    let long = job(1, 50, Some(60.0));
    decide(&mut decider, vec![long.clone()]);
    // Two short jobs would fit if the long one were given up; it was promised first.
    let plan = decide(&mut decider, vec![long, job(2, 20, Some(40.0)), job(3, 20, Some(40.0))]);
    assert!(matches!(verdict(&plan, 1).reason, Reason::MeetsDeadline { .. } | Reason::Early { .. }), "{plan:?}");
    for id in [2, 3] {
        assert!(matches!(verdict(&plan, id).reason, Reason::CannotMeet { .. }), "{plan:?}");
    }
}

#[test]
fn of_new_jobs_that_do_not_all_fit_the_largest_is_left_out() {
    let jobs = vec![job(1, 50, Some(60.0)), job(2, 20, Some(50.0)), job(3, 20, Some(55.0))];
    let plan = decide(&mut decider(), jobs);
    assert!(matches!(verdict(&plan, 1).reason, Reason::CannotMeet { .. }), "{plan:?}");
    for id in [2, 3] {
        assert!(matches!(verdict(&plan, id).reason, Reason::MeetsDeadline { .. }), "{plan:?}");
    }
}

#[test]
fn a_tolerated_lateness_is_promised_where_the_deadline_cannot_be() {
    let mut late = job(2, 20, Some(50.0));
    let plan = decide(&mut decider(), vec![job(1, 55, Some(60.0)), late.clone()]);
    assert!(matches!(verdict(&plan, 2).reason, Reason::MeetsDeadline { .. }), "the smaller job is preferred: {plan:?}");
    late.signal.total = Some(71);
    late.deadline = late.deadline.map(|d| Deadline { tolerance: Span::from_secs(100), ..d });
    let plan = decide(&mut decider(), vec![job(1, 55, Some(60.0)), late]);
    let Reason::MeetsDeadline { late_s, .. } = verdict(&plan, 2).reason else { panic!("{plan:?}") };
    assert_eq!(late_s, 100.0);
}

#[test]
fn a_job_that_is_early_gives_back() {
    let mut decider = decider();
    let first = decide(&mut decider, vec![job(1, 45, Some(60.0)), job(2, 1000, None)]);
    assert!((share(&first, 1) - 45.0 / (58.5 * 0.98)).abs() < 0.01);
    // It made far more steps than its share explains.
    let ahead = job(1, 10, Some(60.0));
    let mut now = NOW;
    let mut shares = vec![];
    for _ in 0..6 {
        now = now + Span::from_secs(3);
        let mut ahead = ahead.clone();
        ahead.signal.last = Some(TimedValue { value: 1.0, at: now });
        let plan = world::decide(&mut decider, view(now, vec![ahead, job(2, 1000, None)])).expect("due");
        assert!(share(&plan, 1) >= 10.0 / 60.0, "{plan:?}");
        shares.push(share(&plan, 1));
    }
    assert!(shares.windows(2).all(|w| w[1] <= w[0] + 0.01), "it falls step by step: {shares:?}");
    assert!(shares[0] > 0.3 && shares[5] < 0.3, "{shares:?}");
}

#[test]
fn a_deadline_without_a_total_has_a_reason_and_is_treated_as_any_job() {
    let mut endless = job(1, 10, Some(60.0));
    endless.signal.total = None;
    let plan = decide(&mut decider(), vec![endless, job(2, 1000, None)]);
    assert_eq!(verdict(&plan, 1).reason, Reason::UnknownEnd);
    assert!(share(&plan, 1) > 0.1, "{plan:?}");
}

#[test]
fn without_deadlines_the_share_rule_decides_alone() {
    let jobs = vec![job(1, 10, None), job(2, 50, None), job(3, 90, None)];
    let ours = decide(&mut decider(), jobs.clone());
    let gain = decide(&mut Decider::new(Policy::from(Preset::Gainshare)), jobs);
    for id in 1..=3 {
        assert_eq!(verdict(&ours, id), verdict(&gain, id));
    }
}

proptest! {
    /// `check` refuses a plan whose promises exceed the node; `world::decide` fails on a refused plan.
    #[test]
    fn promises_fit_the_node(
        jobs in prop::collection::vec((1u64..200, prop::option::of(1.0f64..300.0), 0.0f64..0.2, 0u32..2), 1..12),
    ) {
        let jobs: Vec<JobView> = jobs.into_iter().enumerate().map(|(i, (steps, left, floor, owner))| JobView {
            floor: Share::clamped(floor),
            owner: gainshare_core::model::OwnerId(owner),
            ..job(i as u64, steps, left)
        }).collect();
        let mut decider = decider();
        let plan = decide(&mut decider, jobs.clone());
        let promised: f64 = plan.verdicts.values().map(|v| v.least.get()).sum();
        prop_assert!(promised <= 1.0 + 1e-6, "{promised}");
        // Again a little later, with what was promised in mind.
        let later = view(NOW + Span::from_secs(40), jobs);
        let _ = world::decide(&mut decider, later);
    }
}
