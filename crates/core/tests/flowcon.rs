//! FlowCon, Algorithms 1 and 2, through the public interface, with the arithmetic worked by hand.

use crate::world::*;
use gainshare_core::model::*;
use gainshare_core::plan::{Reason, Standing};
use gainshare_core::policy::{Policy, ShareRule};
use gainshare_core::signal::{Category, Normalisation};

/// Two jobs, measured once: job 1 fell from 1.0 to 0.9, job 2 from 1.0 to 0.5, each using half the
/// node for 20 s.
fn two_measured() -> World {
    let mut w = World::new(flowcon(0.004, 20));
    w.arrive(1);
    w.arrive(2);
    w.must_step();
    w.report(1, 1.0);
    w.report(2, 1.0);
    w.after(20.0);
    w.must_step();
    for id in [1, 2] {
        w.used(id, 10.0);
    }
    w.after(20.0);
    w.report(1, 0.9);
    w.report(2, 0.5);
    w
}

#[test]
fn growing_jobs_get_their_part_of_all_growth() {
    // P = 0.1/40 s and 0.5/40 s between reports, R = 0.5 each: G = 0.005 and 0.025; parts 1/6 and
    // 5/6.
    let mut w = two_measured();
    let plan = w.must_step();
    assert_close(of(&plan, 1).growth.cpu.unwrap(), 0.005);
    assert_close(of(&plan, 2).growth.cpu.unwrap(), 0.025);
    assert_close(limit(&plan, 1), 1.0 / 6.0);
    assert_close(limit(&plan, 2), 5.0 / 6.0);
    assert!(matches!(of(&plan, 2).reason, Reason::Growing { .. }));
}

#[test]
fn a_job_not_yet_measured_competes_freely() {
    let mut w = World::new(flowcon(0.05, 20));
    w.arrive(1);
    w.arrive(2);
    let plan = w.must_step();
    assert_close(limit(&plan, 1), 1.0);
    assert_close(share(&plan, 1), 0.5);
    assert_eq!(of(&plan, 1).reason, Reason::NotYetMeasured);
}

#[test]
fn lists_are_walked_one_step_a_run_and_watching_leaves_limits_alone() {
    let mut w = two_measured();
    let before = limit(&w.must_step(), 1);
    // Job 1 stops learning: watching, unchanged; then converged, at the floor 1/(2·2).
    let mut seen = vec![];
    for round in 1..=2 {
        w.used(1, 10.0);
        w.used(2, 10.0);
        w.after(20.0);
        w.report(1, 0.9);
        w.report(2, 0.5 - 0.2 * round as f64);
        let plan = w.must_step();
        seen.push((of(&plan, 1).category, limit(&plan, 1)));
    }
    assert_eq!(seen[0], (Category::Watching, before));
    assert_eq!(seen[1].0, Category::Converged);
    assert_close(seen[1].1, 0.25);
    // A step drop brings it back at once.
    w.used(1, 10.0);
    w.used(2, 10.0);
    w.after(20.0);
    w.report(1, 0.3);
    w.report(2, 0.0);
    assert_eq!(of(&w.must_step(), 1).category, Category::Growing);
}

#[test]
fn the_launch_of_a_second_job_splits_the_node_25_to_75() {
    let mut w = World::new(flowcon(0.05, 20));
    w.arrive(1);
    w.must_step();
    w.report(1, 1.0);
    w.after(20.0);
    w.must_step();
    for value in [0.99, 0.98] {
        w.used(1, 20.0);
        w.after(20.0);
        w.report(1, value);
        w.must_step();
    }
    // Alone and converged: free competition, and the interval doubled.
    assert_eq!(w.decider.due(), Some(w.now + Span::from_secs(40)));
    w.after(5.0);
    w.arrive(2);
    let plan = w.must_step();
    assert_close(limit(&plan, 1), 0.25);
    assert_close(limit(&plan, 2), 1.0);
    assert_close(share(&plan, 1), 0.25);
    assert_close(share(&plan, 2), 0.75);
    // The newcomer reset the interval.
    assert_eq!(w.decider.due(), Some(w.now + Span::from_secs(20)));
}

#[test]
fn when_all_are_converged_competition_is_free_and_the_next_decision_comes_later_each_time() {
    let mut w = two_measured();
    w.must_step();
    let mut waits = vec![];
    for _ in 0..5 {
        w.used(1, 10.0);
        w.used(2, 10.0);
        let wait = w.decider.due().unwrap().since(w.now);
        w.now = w.decider.due().unwrap();
        w.report(1, 0.9);
        w.report(2, 0.5);
        let plan = w.must_step();
        waits.push((wait.as_secs_f64(), of(&plan, 1).category, limit(&plan, 1)));
    }
    assert_eq!(waits[0].1, Category::Watching);
    let all_converged: Vec<_> = waits[1..].iter().map(|w| (w.0, w.2)).collect();
    assert_eq!(all_converged, [(20.0, 1.0), (40.0, 1.0), (80.0, 1.0), (160.0, 1.0)]);
}

#[test]
fn arrivals_and_exits_are_noticed_at_once_even_when_the_count_stays() {
    let mut w = two_measured();
    w.must_step();
    assert!(w.step().is_none(), "nothing happened: nothing is due");
    w.after(1.0);
    w.leave(1);
    w.arrive(3);
    let plan = w.must_step();
    assert_eq!(plan.verdicts.keys().map(|j| j.0).collect::<Vec<_>>(), [2, 3]);
    w.after(1.0);
    w.leave(2);
    assert_close(limit(&w.must_step(), 3), 1.0);
}

#[test]
fn raw_normalisation_lets_large_losses_weigh_more() {
    let mut policy = flowcon(0.005, 20);
    let ShareRule::Flowcon(ref mut rule) = policy.share else { unreachable!("just made") };
    rule.normalisation = Normalisation::Raw;
    let mut w = World::new(policy);
    for id in [1, 2] {
        w.arrive(id);
    }
    w.must_step();
    w.report(1, 200.0);
    w.report(2, 2.0);
    w.after(20.0);
    w.must_step();
    w.used(1, 10.0);
    w.used(2, 10.0);
    w.after(20.0);
    w.report(1, 100.0);
    w.report(2, 1.0);
    // Both halved. Raw: 100 against 1. (Relative it would be 1 against 1.)
    assert_close(limit(&w.must_step(), 1), 100.0 / 101.0);
}

#[test]
fn every_resource_has_its_own_growth_and_limit() {
    let mut w = World::new(flowcon(0.001, 20));
    for id in [1, 2] {
        w.arrive(id);
    }
    w.must_step();
    for id in [1, 2] {
        w.report(id, 1.0);
    }
    w.after(20.0);
    w.must_step();
    for (id, memory, block) in [(1, 0.1, 0.0), (2, 0.3, 0.2)] {
        let job = w.arrive(id);
        job.consumed_node_s.cpu += 10.0;
        job.consumed_node_s.memory += memory * 20.0;
        job.consumed_node_s.block_io += block * 20.0;
    }
    w.after(20.0);
    for id in [1, 2] {
        w.report(id, 0.8);
    }
    let plan = w.must_step();
    let limits = |id| of(&plan, id).target.unwrap().limit;
    // Same progress, same CPU; job 1 does it with a third of the memory, so three quarters of the
    // growth per byte are its.
    assert_close(limits(1).cpu.get(), 0.5);
    assert_close(limits(1).memory.get(), 0.75);
    assert_close(limits(2).memory.get(), 0.25);
    // Job 1 uses no block I/O: it is not limited there, and job 2 has all the growth.
    assert_close(limits(1).block_io.get(), 1.0);
    assert_close(limits(2).block_io.get(), 1.0);
    assert_eq!(of(&plan, 1).growth.net_io, None);
}

#[test]
fn a_job_whose_epochs_outlast_the_interval_keeps_its_growth() {
    let mut w = two_measured();
    let before = limit(&w.must_step(), 2);
    w.used(1, 10.0);
    w.used(2, 10.0);
    w.after(20.0);
    w.report(1, 0.8);
    let plan = w.must_step();
    assert_eq!(of(&plan, 2).category, Category::Growing);
    // Job 1 now grows by 0.1 in 20 s at half the node: 0.01 against job 2's 0.025.
    assert_close(limit(&plan, 2), 0.025 / 0.035);
    assert!(limit(&plan, 2) < before);
}

#[test]
fn silence_beyond_the_usual_gives_an_equal_part() {
    let mut w = two_measured();
    w.must_step();
    for _ in 0..20 {
        w.used(1, 10.0);
        w.used(2, 10.0);
        w.after(20.0);
        w.report(1, 0.5);
        w.step();
    }
    let plan = w.step();
    let plan = plan.unwrap_or_else(|| {
        w.now = w.decider.due().unwrap();
        w.must_step()
    });
    assert!(matches!(of(&plan, 2).reason, Reason::StaleSignal { .. } | Reason::AllConverged { .. }));
}

#[test]
fn a_job_that_never_reports_gets_an_equal_part_after_a_while() {
    let mut w = two_measured();
    w.arrive(3);
    w.must_step();
    for round in 0..8 {
        w.used(1, 10.0);
        w.used(2, 10.0);
        w.after(20.0);
        w.report(1, 0.9 - 0.05 * round as f64);
        w.report(2, 0.5 - 0.05 * round as f64);
        w.must_step();
    }
    w.after(20.0);
    let plan = w.must_step();
    assert!(matches!(of(&plan, 3).reason, Reason::NoSignal { .. }), "{:?}", of(&plan, 3));
    assert_close(limit(&plan, 3), 1.0 / 3.0);
}

#[test]
fn small_changes_are_not_worth_a_write() {
    let mut w = two_measured();
    w.must_step();
    let mut policy = w.decider.policy().clone();
    policy.deadband = 0.05;
    let mut w2 = World::new(policy);
    std::mem::swap(&mut w2, &mut w);
    for id in [1, 2] {
        w.arrive(id);
    }
    let first = w.must_step();
    w.after(20.0);
    let again = w.must_step();
    assert_eq!(of(&first, 1).standing, Standing::New);
    assert_eq!(of(&again, 1).standing, Standing::InsideDeadband);
    assert!(again.generation > first.generation);
}

#[test]
fn owners_are_apart() {
    // Owner 1 has one job, owner 2 two, one of which fakes enormous growth: it can only take from
    // its sibling.
    let mut w = World::new(flowcon(0.005, 20));
    w.arrive(1).owner = OwnerId(1);
    w.arrive(2).owner = OwnerId(2);
    w.arrive(3).owner = OwnerId(2);
    w.must_step();
    for id in [1, 2, 3] {
        w.report(id, 1.0);
    }
    w.after(20.0);
    w.must_step();
    for id in [1, 2, 3] {
        w.used(id, 6.0);
    }
    w.after(20.0);
    w.report(1, 0.9);
    w.report(2, 0.9);
    w.report(3, 1e6);
    let plan = w.must_step();
    assert_close(share(&plan, 1), 0.5);
    assert!(share(&plan, 3) > 0.49 && share(&plan, 3) <= 0.5);
}

#[test]
fn reports_can_trigger_a_decision() {
    let mut policy = flowcon(0.005, 20);
    policy.react_to_reports = true;
    let mut w = World::new(policy);
    w.arrive(1);
    w.must_step();
    assert!(w.step().is_none());
    w.after(0.1);
    w.report(1, 1.0);
    assert!(w.step().is_some());
    assert!(w.step().is_none());
}

#[test]
fn the_equal_policy_is_fair_and_asks_for_no_second_run() {
    let mut w = World::new(Policy::equal());
    for id in 1..=4 {
        w.arrive(id);
    }
    let plan = w.must_step();
    assert_close(share(&plan, 3), 0.25);
    assert_eq!(plan.next_due, None);
}
