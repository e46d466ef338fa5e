//! For each violation a plan that has it, and nothing else wrong.

use super::*;
use crate::fixtures::{node, running, verdict};
use crate::model::{PerResource, Share, Time};
use crate::plan::{Move, MoveReason, Reason, Standing, Start, StartReason, Verdict};
use crate::signal::Category;
use crate::view::JobView;

/// Two nodes; jobs 1 and 2 run on node 0, job 3 waits.
fn world() -> (View, Plan) {
    let waiting = JobView { id: JobId(3), ..JobView::default() };
    let view = View { now: Time(5), nodes: vec![node(0), node(1)], jobs: vec![running(1, 0), running(2, 0), waiting] };
    let verdicts = [(JobId(1), half()), (JobId(2), half()), (JobId(3), idle())].into();
    (view, Plan { generation: 1, at: Time(5), verdicts, ..Plan::default() })
}

fn half() -> Verdict {
    verdict(target(0.5, 1.0))
}

fn idle() -> Verdict {
    let reason = Reason::WaitsForSlot { ahead: 0 };
    let growth = PerResource::default();
    Verdict { target: None, growth, category: Category::Growing, reason, standing: Standing::New, least: Share::ZERO }
}

fn target(share: f64, limit: f64) -> Target {
    let all = |x| PerResource::from_fn(|_| Share::clamped(x));
    Target { share: all(share), limit: all(limit) }
}

fn start(job: u64, node: u32) -> Start {
    Start { job: JobId(job), node: NodeId(node), why: StartReason::FewestJobs }
}

fn move_to(job: u64, node: u32) -> Move {
    Move { job: JobId(job), to: NodeId(node), why: MoveReason::Gain }
}

/// What is found after `change`.
fn found(change: impl FnOnce(&mut View, &mut Plan)) -> Vec<Violation> {
    let (mut view, mut plan) = world();
    change(&mut view, &mut plan);
    check(&view, plan).err().map_or(vec![], |unsound| unsound.violations)
}

#[test]
fn a_sound_plan_passes_unchanged() {
    let (view, mut plan) = world();
    (plan.starts, plan.moves) = (vec![start(3, 0)], vec![move_to(1, 1)]);
    let checked = check(&view, plan.clone()).expect("it is sound");
    assert_eq!(checked.as_plan(), &plan);
    assert_eq!(checked.target(JobId(2)).map(|t| *t), Some(target(0.5, 1.0)));
    assert_eq!(checked.target(JobId(3)), None);
}

#[test]
fn plan_and_view_belong_together() {
    assert_eq!(found(|_, p| p.at = Time(6)), [Violation::OtherMoment]);
    assert_eq!(
        found(|_, p| {
            p.verdicts.remove(&JobId(2));
        }),
        [Violation::NoVerdict(JobId(2))]
    );
    assert_eq!(
        found(|_, p| {
            p.verdicts.insert(JobId(9), idle());
        }),
        [Violation::UnknownJob(JobId(9))]
    );
    assert_eq!(
        found(|_, p| {
            p.verdicts.insert(JobId(2), idle());
        }),
        [Violation::NoTarget(JobId(2))]
    );
    assert_eq!(
        found(|_, p| {
            p.verdicts.insert(JobId(3), half());
        }),
        [Violation::TargetWhileWaiting(JobId(3))]
    );
}

#[test]
fn a_job_has_at_most_one_live_attempt() {
    assert_eq!(found(|_, p| p.starts = vec![start(1, 1)]), [Violation::SecondAttempt(JobId(1))]);
    assert_eq!(found(|_, p| p.starts = vec![start(3, 1), start(3, 0)]), [Violation::SecondAttempt(JobId(3))]);
    let both = found(|_, p| (p.starts, p.moves) = (vec![start(3, 0)], vec![move_to(3, 1)]));
    assert_eq!(both, [Violation::NeedlessMove(JobId(3))]);
}

#[test]
fn starts_wait_for_their_jobs_and_go_to_known_nodes_with_room() {
    assert_eq!(found(|_, p| p.starts = vec![start(8, 0)]), [Violation::UnknownJob(JobId(8))]);
    let early = found(|v, p| {
        v.jobs[2].waits_for = vec![JobId(1)];
        p.starts = vec![start(3, 1)];
    });
    assert_eq!(early, [Violation::TooEarly(JobId(3))]);
    let nowhere = Violation::UnknownNode { job: JobId(3), node: NodeId(7) };
    assert_eq!(found(|_, p| p.starts = vec![start(3, 7)]), [nowhere]);
    let full = |v: &mut View| v.nodes[0].slots = Some(2);
    let crowded = Violation::TooManyJobs { node: NodeId(0), running: 3, slots: 2 };
    assert_eq!(
        found(|v, p| {
            full(v);
            p.starts = vec![start(3, 0)];
        }),
        [crowded]
    );
    let fits = found(|v, p| {
        v.nodes[0].slots = Some(3);
        p.starts = vec![start(3, 0)];
    });
    assert_eq!(fits, [], "the last slot may be used");
}

#[test]
fn moves_take_running_jobs_elsewhere_once() {
    assert_eq!(found(|_, p| p.moves = vec![move_to(3, 1)]), [Violation::NeedlessMove(JobId(3))]);
    assert_eq!(found(|_, p| p.moves = vec![move_to(1, 0)]), [Violation::NeedlessMove(JobId(1))]);
    assert_eq!(found(|_, p| p.moves = vec![move_to(1, 1), move_to(1, 1)]), [Violation::NeedlessMove(JobId(1))]);
    let nowhere = Violation::UnknownNode { job: JobId(1), node: NodeId(7) };
    assert_eq!(found(|_, p| p.moves = vec![move_to(1, 7)]), [nowhere]);
    let crowded = found(|v, p| {
        v.nodes[1].slots = Some(0);
        p.moves = vec![move_to(1, 1)];
    });
    assert_eq!(crowded, [Violation::TooManyJobs { node: NodeId(1), running: 1, slots: 0 }]);
}

#[test]
fn a_job_that_leaves_makes_room_for_another() {
    let swapped = |slots: usize| {
        found(|v, p| {
            v.nodes[0].slots = Some(slots);
            v.jobs.push(running(5, 1));
            p.verdicts.insert(JobId(5), half());
            p.moves = vec![move_to(1, 1), move_to(5, 0)];
        })
    };
    assert_eq!(swapped(2), [], "one leaves, one comes: the node is as full as before");
    assert_eq!(swapped(1), [Violation::TooManyJobs { node: NodeId(0), running: 2, slots: 1 }]);
}

#[test]
fn a_pinned_job_stays_on_its_node() {
    let pinned = found(|v, p| {
        v.jobs[0].pinned = true;
        p.moves = vec![move_to(1, 1)];
    });
    assert_eq!(pinned, [Violation::PinnedMove(JobId(1))]);
}

#[test]
fn a_node_is_not_given_away_twice() {
    let over = found(|_, p| {
        p.verdicts.insert(JobId(1), verdict(target(0.6, 1.0)));
    });
    assert_eq!(over.len(), 4, "one for each resource: {over:?}");
    assert!(over.iter().all(|v| matches!(v, Violation::OverCapacity { sum, .. } if (*sum - 1.1).abs() < 1e-9)));
}

#[test]
fn an_owner_takes_nothing_of_another_owners_part() {
    let over = found(|v, p| {
        v.jobs[1].owner = OwnerId(1);
        p.verdicts.insert(JobId(1), verdict(target(0.7, 1.0)));
        p.verdicts.insert(JobId(2), verdict(target(0.3, 1.0)));
    });
    assert_eq!(over.len(), 4, "one for each resource: {over:?}");
    assert!(over.iter().all(|v| matches!(v, Violation::OverPart { owner: OwnerId(0), part: 0.5, .. })), "{over:?}");
}

#[test]
fn floors_and_maxima_are_kept_where_floors_fit() {
    let with_floor = |floor: f64, share: f64, limit: f64| {
        found(|v, p| {
            v.jobs[0].floor = Share::clamped(floor);
            p.verdicts.insert(JobId(1), verdict(target(share, limit)));
        })
    };
    assert_eq!(with_floor(0.4, 0.3, 1.0), [Violation::BelowFloor { job: JobId(1), share: 0.3, floor: 0.4 }]);
    let below = Violation::LimitOutOfBounds { job: JobId(1), limit: 0.3, floor: 0.4, max: 1.0 };
    assert_eq!(with_floor(0.4, 0.5, 0.3), [below]);
    let above = found(|v, _| v.jobs[0].max = Share::clamped(0.6));
    assert_eq!(above, [Violation::LimitOutOfBounds { job: JobId(1), limit: 1.0, floor: 0.0, max: 0.6 }]);
    // Two floors of 0.8 do not fit one node: neither can be kept, and neither is asked for.
    let too_many = found(|v, _| v.jobs.iter_mut().for_each(|j| j.floor = Share::clamped(0.8)));
    assert_eq!(too_many, []);
    let limited = found(|v, p| {
        v.jobs[..2].iter_mut().for_each(|j| j.floor = Share::clamped(0.8));
        p.verdicts.insert(JobId(1), verdict(target(0.5, 0.5)));
    });
    assert_eq!(limited, [], "nor is a limit that is as high");
    // One floor of 0.8 does not fit half a node.
    let beyond_its_part = found(|v, _| (v.jobs[1].owner, v.jobs[0].floor) = (OwnerId(1), Share::clamped(0.8)));
    assert_eq!(beyond_its_part, []);
    // Beside another owner's job the part is a half, and a floor in it counts.
    let apart = found(|v, p| {
        (v.jobs[1].owner, v.jobs[0].floor) = (OwnerId(1), Share::clamped(0.4));
        p.verdicts.insert(JobId(1), verdict(target(0.2, 1.0)));
    });
    assert_eq!(apart, [Violation::BelowFloor { job: JobId(1), share: 0.2, floor: 0.4 }]);
}

#[test]
fn an_earlier_plan_is_checked_for_the_jobs_that_still_run() {
    let (mut view, plan) = world();
    view.now = Time(900);
    view.jobs.remove(0);
    view.jobs.push(running(7, 1));
    let mut ordered = plan.clone();
    (ordered.starts, ordered.moves) = (vec![start(3, 0)], vec![move_to(2, 1)]);
    let again = check_again(&view, ordered).expect("half a node for one job");
    assert_eq!(again.verdicts.keys().copied().collect::<Vec<_>>(), [JobId(2)]);
    assert_eq!(
        (&again.starts[..], &again.moves[..], again.at),
        (&[][..], &[][..], Time(900)),
        "orders are not repeated"
    );
    view.jobs[0].max = Share::clamped(0.25);
    let unsound = check_again(&view, plan).expect_err("the job may no longer have its share");
    assert!(matches!(unsound.violations[..], [Violation::LimitOutOfBounds { .. }]), "{unsound:?}");
}

#[test]
fn promises_fit_their_node_and_are_kept() {
    let (view, mut plan) = world();
    let promise = |plan: &mut Plan, job: u64, least: f64| {
        plan.verdicts.get_mut(&JobId(job)).expect("it has a verdict").least = Share::clamped(least);
    };
    promise(&mut plan, 1, 0.5);
    promise(&mut plan, 2, 0.4);
    assert_eq!(violations(&view, &plan), vec![]);
    promise(&mut plan, 1, 0.7);
    let found = violations(&view, &plan);
    let over = Violation::OverPromised { node: NodeId(0), sum: 0.7 + 0.4 };
    assert_eq!(found, vec![Violation::BelowPromise { job: JobId(1), share: 0.5, promised: 0.7 }, over]);
}

#[test]
fn what_rounding_explains_is_tolerated() {
    // Each number lies exactly on the border of what is still tolerated.
    let at_least = |plan: &mut Plan, job: u64, share: f64, limit: f64, least: f64| {
        let mut border = verdict(target(share, limit));
        border.least = Share::clamped(least);
        plan.verdicts.insert(JobId(job), border);
    };
    assert_eq!(found(|_, p| at_least(p, 1, 0.5 - TOLERANCE, 1.0, 0.5)), [], "a promise");
    let floor = found(|v, p| {
        v.jobs[0].floor = Share::clamped(0.5);
        at_least(p, 1, 0.5 - TOLERANCE, 0.5 - TOLERANCE, 0.0);
    });
    assert_eq!(floor, [], "a floor, of share and limit");
    let maximum = found(|v, p| {
        v.jobs[0].max = Share::clamped(0.5);
        at_least(p, 1, 0.5, 0.5 + TOLERANCE, 0.0);
    });
    assert_eq!(maximum, [], "a maximum");
    let whole = found(|_, p| {
        at_least(p, 1, 1.0, 1.0, 1.0);
        at_least(p, 2, TOLERANCE, 1.0, TOLERANCE);
    });
    assert_eq!(whole, [], "a node, and what is promised of it");
    let part = found(|v, p| {
        v.jobs[1].owner = OwnerId(1);
        at_least(p, 1, 0.5 + TOLERANCE, 1.0, 0.0);
        at_least(p, 2, 0.5 - TOLERANCE, 1.0, 0.0);
    });
    assert_eq!(part, [], "an owner's part");
}
