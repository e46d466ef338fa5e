//! Ends that are predicted by playing the policy forward, for jobs whose true ends are known.

use gainshare_core::decider::Decider;
use gainshare_core::fixtures::{node, running};
use gainshare_core::forecast::{Arrivals, forecast};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::signal::speed::{Interval, Pace};
use gainshare_core::view::{Deadline, JobView, NodeView, Phase, View};
use std::collections::BTreeMap;

/// A job that has this many node-seconds of work left, and can use the whole node.
fn job(id: u64, work: u64) -> JobView {
    let mut job = running(id, 0);
    job.signal.total = Some(work);
    job.signal.pace = Some(Pace::from_law(0.0, 1.0, 1.0));
    job
}

fn waiting(id: u64, work: u64) -> JobView {
    JobView { phase: Phase::Waiting, ..job(id, work) }
}

fn view(now_s: u64, node: NodeView, jobs: Vec<JobView>) -> View {
    View { now: Time::ZERO + Span::from_secs(now_s), nodes: vec![node], jobs }
}

fn predict(preset: Preset, view: &View) -> BTreeMap<JobId, Interval> {
    let decider = Decider::new(Policy::from(preset));
    forecast(&decider, view, &Arrivals::default())
}

fn ends(found: &BTreeMap<JobId, Interval>) -> Vec<f64> {
    found.values().map(|end| end.mid).collect()
}

fn close(found: &[f64], wanted: &[f64]) {
    assert_eq!(found.len(), wanted.len(), "{found:?}");
    assert!(found.iter().zip(wanted).all(|(f, w)| (f - w).abs() < 0.01 * w), "{found:?} is not {wanted:?}");
}

#[test]
fn equal_shares_end_as_processor_sharing_does() {
    // Three share until the first ends at 30; two until the second has its last 10 at 50; the third is alone.
    let view = view(0, node(0), vec![job(1, 10), job(2, 20), job(3, 40)]);
    close(&ends(&predict(Preset::Na, &view)), &[30.0, 50.0, 70.0]);
}

#[test]
fn a_waiting_job_starts_when_a_slot_is_free() {
    let one_slot = NodeView { slots: Some(1), ..node(0) };
    let view = view(0, one_slot, vec![job(1, 10), waiting(2, 20), waiting(3, 5)]);
    close(&ends(&predict(Preset::Na, &view)), &[10.0, 30.0, 35.0]);
}

#[test]
fn a_job_that_cannot_use_its_share_leaves_the_rest_to_the_others() {
    let mut narrow = job(1, 10);
    narrow.signal.pace = Some(Pace::from_law(0.0, 1.0, 0.1));
    let view = view(0, node(0), vec![narrow, job(2, 90)]);
    close(&ends(&predict(Preset::Na, &view)), &[100.0, 100.0]);
}

#[test]
fn a_promised_job_ends_by_its_deadline_and_the_others_after_it_has() {
    let mut urgent = job(1, 50);
    urgent.deadline = Some(Deadline::strict(Time::ZERO + Span::from_secs(60)));
    let view = view(0, node(0), vec![urgent, job(2, 50)]);
    let found = predict(Preset::Qos, &view);
    let (urgent, other) = (found[&JobId(1)].mid, found[&JobId(2)].mid);
    assert!((50.0..=60.0).contains(&urgent), "{urgent}");
    assert!((other - 100.0).abs() < 2.0, "the node does 100 node-seconds by then: {other}");
}

#[test]
fn jobs_that_take_ages_end_in_the_projection() {
    // A job may print any total. After 10^11 s a moment is rounded to a hundred-thousandth of a second, and after
    // 10^16 s to seconds.
    for work in (10..19).flat_map(|power| [1, 3, 7, 9].map(|digit| digit * 10_u64.pow(power) + 7 * u64::from(power))) {
        let found = predict(Preset::Na, &view(0, node(0), vec![job(1, work), job(2, work / 3), job(3, 10)]));
        assert_eq!(found.len(), 3, "{work}");
    }
}

#[test]
fn the_number_of_decisions_is_bounded() {
    // Two thousand jobs: each end found by a decision of its own would take minutes.
    let jobs = (1..=2_000).map(|id| job(id, 1 + id % 50)).collect();
    let found = predict(Preset::Na, &view(0, node(0), jobs));
    assert_eq!(found.len(), 2_000);
    let all: u64 = (1..=2_000u64).map(|id| 1 + id % 50).sum();
    let last = ends(&found).into_iter().fold(0.0, f64::max);
    assert!((last - all as f64).abs() < 0.01 * all as f64, "{last} is not {all}");
}

#[test]
fn later_arrivals_widen_the_interval_on_the_late_side() {
    let mut arrivals = Arrivals::default();
    let mut jobs: Vec<JobView> = vec![];
    for i in 0..5 {
        let at = Time::ZERO + Span::from_secs(10 * i);
        jobs.push(JobView { arrived: at, ..job(i + 1, 100) });
        arrivals.observe(&View { now: at, nodes: vec![node(0)], jobs: jobs.clone() });
    }
    let view = view(40, node(0), jobs);
    let decider = Decider::new(Policy::from(Preset::Na));
    let without = predict(Preset::Na, &view)[&JobId(1)];
    let with = forecast(&decider, &view, &arrivals)[&JobId(1)];
    assert!(
        with.mid > without.mid && with.high - with.mid > 2.0 * (without.high - without.mid),
        "{with:?} {without:?}"
    );
    assert!(with.low <= without.mid, "no later arrival is possible too: {with:?} {without:?}");
}

/// A promised job has the least that makes its deadline. A job whose speed is not known would keep an equal part until
/// its end, and the third job would wait for it.
#[test]
fn a_job_that_has_not_reported_reports_in_the_projection() {
    let deadline = Some(Deadline::strict(Time::ZERO + Span::from_secs(400)));
    let silent = JobView { deadline, ..running(1, 0) };
    let mut urgent = JobView { deadline, ..job(2, 60) };
    (urgent.signal.reports, urgent.signal.step) = (30, Some(30));
    let found = predict(Preset::Qos, &view(0, node(0), vec![silent, urgent, job(3, 100)]));
    let rest = found[&JobId(3)].mid;
    // With a third of the node for the silent job all the time, it would be more than 160 s.
    assert!((110.0..=155.0).contains(&rest), "{rest}");
}

#[test]
fn the_decider_is_not_changed_and_unknown_jobs_have_no_forecast() {
    let decider = Decider::new(Policy::from(Preset::Gainshare));
    let before = decider.clone();
    let view = view(0, node(0), vec![running(1, 0), job(2, 10)]);
    let found = forecast(&decider, &view, &Arrivals::default());
    assert_eq!((decider, found.keys().copied().collect::<Vec<_>>()), (before, vec![JobId(2)]));
}
