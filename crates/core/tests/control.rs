//! The loop: queue, repeatability, and what holds for any history of reports whatsoever.

use crate::world::*;
use gainshare_core::decider::Decider;
use gainshare_core::model::*;
use gainshare_core::plan::Reason;
use gainshare_core::policy::Policy;
use gainshare_core::view::{Phase, View};
use proptest::prelude::*;

#[test]
fn waiting_jobs_start_by_priority_then_arrival_while_slots_last() {
    let mut w = World::new(Policy::equal());
    w.slots = Some(2);
    w.arrive(1);
    w.wait(2);
    w.wait(3).priority = 5;
    w.wait(4).waits_for = vec![JobId(1)];
    let plan = w.must_step();
    assert_eq!(plan.starts.iter().map(|s| s.job.0).collect::<Vec<_>>(), [3]);
    assert_eq!(of(&plan, 2).reason, Reason::WaitsForSlot { ahead: 0 });
    assert_eq!(of(&plan, 4).reason, Reason::WaitsForJob { job: JobId(1) });
    // The driver starts job 3; job 1 ends, which frees a slot and lets job 4 go, behind job 2.
    w.leave(1);
    w.arrive(3).phase = Phase::Running { node: NodeId(0), since: w.now, attempt: 1 };
    w.arrive(4).waits_for.clear();
    let plan = w.must_step();
    assert_eq!(plan.starts.iter().map(|s| s.job.0).collect::<Vec<_>>(), [2]);
    assert_eq!(of(&plan, 4).reason, Reason::WaitsForSlot { ahead: 0 });
}

#[test]
fn a_node_without_jobs_wants_nothing() {
    let mut w = World::new(flowcon(0.05, 20));
    assert!(w.step().is_none());
    assert_eq!(w.decider.due(), None);
    w.arrive(1);
    w.must_step();
    w.leave(1);
    assert!(w.must_step().verdicts.is_empty());
    assert_eq!(w.decider.due(), None);
}

#[test]
fn a_restarted_decider_never_numbers_its_plans_backwards() {
    let mut w = World::new(Policy::equal());
    w.decider.continue_from(41);
    w.arrive(1);
    assert_eq!(w.must_step().generation, 42);
}

/// Node agents report the counts, so they may be anything.
#[test]
fn counts_of_reports_do_not_overflow() {
    let mut w = World::new(Policy { react_to_reports: true, ..Policy::equal() });
    w.arrive(1);
    w.arrive(2);
    let mut view = w.view();
    for job in &mut view.jobs {
        job.signal.reports = u64::MAX;
    }
    assert!(decide(&mut w.decider, view.clone()).is_some());
    assert!(decide(&mut w.decider, view).is_none(), "nothing new was reported");
}

#[test]
fn many_small_shares_make_room_for_another_owner() {
    // Each of 200 jobs has 0.5 % and would have 0.25 %: closer than the deadband, but together they
    // would keep the whole node.
    let mut w = World::new(Policy::equal());
    for id in 1..=200 {
        w.arrive(id);
    }
    w.must_step();
    w.arrive(201).owner = OwnerId(1);
    let plan = w.must_step();
    assert_close(share(&plan, 201), 0.5);
    assert_close(share(&plan, 1), 0.0025);
}

/// Something that can happen to a node.
#[derive(Debug, Clone)]
enum Event {
    Arrive { id: u64, owner: u32, floor: f64 },
    Leave(u64),
    Report { id: u64, value: f64 },
    Use { id: u64, cpu: f64 },
    Wait(f64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (1..6u64, 0..3u32, 0.0..0.3f64).prop_map(|(id, owner, floor)| Event::Arrive { id, owner, floor }),
        (1..6u64).prop_map(Event::Leave),
        (1..6u64, prop_oneof![-10.0..10.0f64, Just(f64::NAN), Just(f64::INFINITY), Just(1e308), Just(0.0)])
            .prop_map(|(id, value)| Event::Report { id, value }),
        (1..6u64, 0.0..30.0f64).prop_map(|(id, cpu)| Event::Use { id, cpu }),
        (0.0..60.0f64).prop_map(Event::Wait),
    ]
}

/// Plays a history and returns what was decided and shown. Every plan is checked on the way (in
/// `World::step`).
fn play(events: &[Event]) -> (Vec<String>, Option<View>) {
    let mut w = World::new(flowcon(0.05, 20));
    let mut alive = std::collections::BTreeSet::new();
    let mut plans = vec![];
    let mut last = None;
    for event in events {
        match *event {
            Event::Arrive { id, owner, floor } if alive.insert(id) => {
                let job = w.arrive(id);
                (job.owner, job.floor) = (OwnerId(owner), Share::clamped(floor));
            }
            Event::Leave(id) => {
                alive.remove(&id);
                w.leave(id);
            }
            Event::Report { id, value } if alive.contains(&id) => w.report(id, value),
            Event::Use { id, cpu } if alive.contains(&id) => w.used(id, cpu),
            Event::Wait(s) => {
                w.after(s);
            }
            _ => {}
        }
        last = Some(w.view());
        if let Some(plan) = w.step() {
            plans.push(serde_json::to_string(&plan).expect("plans serialise"));
        }
        assert!(w.step().is_none(), "idempotent: the same view twice gives nothing new");
    }
    (plans, last)
}

proptest! {
    #[test]
    fn any_history_gives_sound_plans_and_the_same_history_the_same_plans(events in prop::collection::vec(event(), 1..80)) {
        let (first, _) = play(&events);
        let (second, _) = play(&events);
        for plan in &first {
            prop_assert!(!plan.contains("null,\"share\"") && !plan.contains("NaN"));
        }
        prop_assert_eq!(first, second);
    }

    #[test]
    fn a_decider_written_to_a_file_decides_the_same(events in prop::collection::vec(event(), 1..60)) {
        let (_, view) = play(&events);
        let Some(mut view) = view else { return Ok(()) };
        let mut decider = Decider::new(flowcon(0.05, 20));
        decider.decide(view.clone());
        let mut replayed = gainshare_record::decider_from_json(&gainshare_record::decider_to_json(&decider).expect("it is written")).expect("it is read");
        view.now = view.now + Span::from_secs(100);
        prop_assert_eq!(decider.decide(view.clone()), replayed.decide(view));
    }
}
