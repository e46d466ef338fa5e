//! The parts of the loop, one by one. The loop as a whole is in `tests/control.rs`.

use super::*;
use crate::fixtures::{node, running};

fn target(share: f64, limit: f64) -> Target {
    let all = |x| PerResource::from_fn(|_| Share::clamped(x));
    Target { share: all(share), limit: all(limit) }
}

fn bounds(floor: f64, max: f64) -> Bounds {
    Bounds { floor: Share::clamped(floor), max: Share::clamped(max) }
}

const FREE: (f64, f64) = (0.0, 1.0);

/// Whether one job keeps `before` although `new` was decided.
fn stays(before: (f64, f64), new: (f64, f64), (floor, max): (f64, f64), part: f64, deadband: f64) -> bool {
    may_stay(&[target(before.0, before.1)], &[target(new.0, new.1)], &[bounds(floor, max)], part, deadband)
}

#[test]
fn targets_inside_the_deadband_stay() {
    assert!(stays((0.5, 1.0), (0.5, 1.0), FREE, 1.0, 0.0));
    assert!(stays((0.5, 1.0), (0.75, 1.0), FREE, 1.0, 0.25), "exactly the deadband");
    assert!(!stays((0.5, 1.0), (0.8, 1.0), FREE, 1.0, 0.25));
    assert!(!stays((0.5, 1.0), (0.5, 0.7), FREE, 1.0, 0.25), "limits count as shares do");
}

#[test]
fn targets_beyond_their_bounds_do_not_stay() {
    assert!(stays((0.5, 0.5), (0.5, 0.5), (0.0, 0.5), 1.0, 0.25), "exactly the maximum");
    assert!(!stays((0.5, 0.6), (0.5, 0.5), (0.0, 0.5), 1.0, 0.25), "the maximum was lowered");
    assert!(!stays((0.4, 1.0), (0.5, 1.0), (0.5, 1.0), 1.0, 0.25), "the floor was raised: a share");
    assert!(!stays((0.5, 0.4), (0.5, 0.5), (0.5, 1.0), 1.0, 0.25), "the floor was raised: a limit");
    assert!(stays((0.4, 0.4), (0.4, 0.4), (0.5, 1.0), 1.0, 0.25), "a floor that cannot be kept");
}

#[test]
fn targets_stay_only_where_they_fit_together() {
    let two = |share: f64, part: f64| {
        let (before, new) = ([target(share, 1.0); 2], [target(0.25, 1.0); 2]);
        may_stay(&before, &new, &[bounds(0.0, 1.0); 2], part, 0.25)
    };
    assert!(two(0.25, 0.5), "exactly the part");
    assert!(!two(0.3, 0.5), "more than the part");
    let mut memory = target(0.25, 1.0);
    memory.share.memory = Share::clamped(0.3);
    assert!(!may_stay(&[memory; 2], &[target(0.25, 1.0); 2], &[bounds(0.0, 1.0); 2], 0.5, 0.25), "every resource");
}

#[test]
fn what_rounding_explains_may_stay() {
    let little = 5e-10;
    assert!(stays((0.5, 0.5 + little), (0.5, 0.5), (0.0, 0.5), 1.0, 0.25), "above the maximum");
    assert!(stays((0.5 - little, 0.5 - little), (0.5, 0.5), (0.5, 1.0), 1.0, 0.25), "below the floor");
    assert!(stays((0.5 + little, 1.0), (0.5, 1.0), FREE, 0.5, 0.25), "above the part");
}

/// Half of the node is an owner's part; a quarter of the node is left for jobs without a reservation.
#[test]
fn claims_and_opinions_are_merged_as_parts_of_the_owners_part() {
    let share = Share::clamped(0.25);
    let reason = Reason::NotYetMeasured;
    let claims = [Claim::Reserved { share, least: share, reason }, Claim::Rest { why: None }];
    let of_rest = vec![Opinion::of_cpu(Share::clamped(0.5), reason)];
    let merged = merge(&claims, of_rest, 0.25, 0.5);
    let limits: Vec<f64> = merged.iter().map(|opinion| opinion.limit.cpu.get()).collect();
    assert_eq!(limits, [0.5, 0.25], "0.25 of 0.5 is half; half of 0.25 is a quarter of 0.5");
}

fn view(jobs: Vec<JobView>) -> View {
    View { now: Time(1), nodes: vec![node(0)], jobs }
}

#[test]
fn a_group_is_due_when_it_changes_its_time_comes_or_a_job_reports() {
    let (first, second) = (running(1, 0), running(2, 0));
    let group = Group { members: [JobId(1)].into(), reports: 0, due: Some(Time(10)) };
    let quiet = Policy::equal();
    assert!(!group.is_due(&quiet, Time(9), &[&first]));
    assert!(group.is_due(&quiet, Time(10), &[&first]), "its time has come");
    assert!(group.is_due(&quiet, Time(9), &[&first, &second]), "a job came");
    assert!(group.is_due(&quiet, Time(9), &[&second]), "a job was replaced");
    let mut reported = first.clone();
    reported.signal.reports = 3;
    let eager = Policy { react_to_reports: true, ..Policy::equal() };
    assert!(!group.is_due(&quiet, Time(9), &[&reported]), "reports do not count by default");
    assert!(group.is_due(&eager, Time(9), &[&reported]));
    assert!(!group.is_due(&eager, Time(9), &[&first]), "nothing was reported");
}

#[test]
fn plans_are_numbered_and_waiting_jobs_know_how_many_are_ahead() {
    let mut control = Control::new(Policy::equal());
    control.continue_from(7);
    let waiting = |id: u64| JobView { id: JobId(id), ..JobView::default() };
    let mut view = view(vec![running(1, 0), waiting(2), waiting(3), waiting(4)]);
    view.nodes[0].slots = Some(2);
    let plan = control.step(&view, |_| {}).expect("jobs came");
    assert_eq!(plan.generation, 8);
    assert_eq!(plan.starts.iter().map(|start| start.job).collect::<Vec<_>>(), [JobId(2)]);
    let ahead = |id: u64| plan.verdicts[&JobId(id)].reason;
    assert_eq!(ahead(3), Reason::WaitsForSlot { ahead: 0 });
    assert_eq!(ahead(4), Reason::WaitsForSlot { ahead: 1 });
    control.continue_from(3);
    view.jobs.remove(3);
    assert_eq!(control.step(&view, |_| {}).expect("a job went").generation, 9, "numbers never go back");
}

#[test]
fn owners_split_a_node_and_only_what_is_due_is_decided() {
    let mut control = Control::new(Policy::equal());
    let other = JobView { owner: OwnerId(1), ..running(2, 0) };
    let both = view(vec![running(1, 0), other, running(3, 0)]);
    let plan = control.step(&both, |_| {}).expect("jobs came");
    let share = |plan: &Plan, id: u64| plan.verdicts[&JobId(id)].target.expect("it runs").share.cpu.get();
    assert_eq!([share(&plan, 1), share(&plan, 2), share(&plan, 3)], [0.25, 0.5, 0.25]);
    assert!(control.step(&both, |_| {}).is_none(), "nothing has changed");
    // A third job of the first owner changes nothing for the second one.
    let more = view([both.jobs.clone(), vec![running(4, 0)]].concat());
    let plan = control.step(&more, |_| {}).expect("a job came");
    assert_eq!(plan.verdicts[&JobId(2)].standing, Standing::NotDue);
    assert_eq!(plan.verdicts[&JobId(1)].standing, Standing::New);
    // Without the second owner all jobs of the first one are decided again.
    let alone = view(vec![running(1, 0), running(3, 0), running(4, 0)]);
    let plan = control.step(&alone, |_| {}).expect("an owner went");
    assert!((share(&plan, 1) - 1.0 / 3.0).abs() < 1e-9);
}
