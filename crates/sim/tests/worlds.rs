//! Small worlds worked by hand, and what holds for any world under any policy.

use gainshare_core::decider::Decision;
use gainshare_core::model::{Span, Time};
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::view::FinishedRun;
use gainshare_sim::bounds::bounds;
use gainshare_sim::curve::{Curve, Family};
use gainshare_sim::engine::{Record, run, run_observed};
use gainshare_sim::outcome::Outcome;
use gainshare_sim::paper::{Settings, find};
use gainshare_sim::scenario::Scenario;
use gainshare_sim::simulate::simulate;
use gainshare_sim::world::{Actuator, AnnouncedTotal, Law, Node, SimJob, Speedup, World};
use proptest::prelude::*;

fn node(cores: f64) -> Node {
    Node { name: "n".into(), cores, speed: 1.0, memory_bytes: 64 << 30, slots: None }
}

fn job(arrives_s: f64, work: f64) -> SimJob {
    SimJob {
        name: format!("at {arrives_s}"),
        model: "m".into(),
        arrival: Time::from_secs_f64(arrives_s),
        work_core_s: work,
        speedup: Speedup::Linear,
        max_cores: f64::INFINITY,
        memory_bytes: 1 << 30,
        curve: Curve { start: 1.0, end: 0.1, shape: Family::Exponential { rate: 6.0 }, drops: vec![], noise: 0.01 },
        startup_core_s: 0.0,
        report_every_core_s: work / 20.0,
        report_positions: vec![],
        planned_reports: None,
        claim: AnnouncedTotal::Nothing,
        history: vec![],
        program: None,
        start: Span::ZERO,
        save: Span::from_secs(1),
        restore: Span::from_secs(1),
        owner: 0,
        priority: 0,
        floor: 0.0,
        deadline: None,
        request: None,
        tells_pace: false,
        shows_pace: false,
    }
}

fn world(nodes: Vec<Node>, jobs: Vec<SimJob>) -> World {
    World { seed: 1, nodes, jobs, actuator: Actuator::Weight, interference: 0.0, law: Law::Turns }
}

fn ends(world: &World, preset: Preset) -> Vec<f64> {
    let outcome = run(world, &Policy::from(preset), Record::default()).expect("a sound run");
    outcome.jobs.iter().map(|j| j.finished.expect("it ended").as_secs_f64()).collect()
}

fn close(got: &[f64], expected: &[f64], within: f64) {
    assert!(
        got.len() == expected.len() && got.iter().zip(expected).all(|(a, b)| (a - b).abs() <= within),
        "{got:?} is not {expected:?}"
    );
}

#[test]
fn equal_sharing_by_hand() {
    // Four cores. The first has them alone for 5 s (20 of 40 done), then both work at two cores each until 15 s.
    let w = world(vec![node(4.0)], vec![job(0.0, 40.0), job(5.0, 20.0)]);
    close(&ends(&w, Preset::Na), &[15.0, 15.0], 1e-5);
}

#[test]
fn the_shortest_first_and_the_first_first_by_hand() {
    let w = world(vec![node(4.0)], vec![job(0.0, 40.0), job(5.0, 12.0)]);
    // SRPT: the second runs from 5 to 8, the first has 5 s left. First come, first served: 10, then 13.
    close(&ends(&w, Preset::Srpt), &[13.0, 8.0], 0.01);
    close(&ends(&w, Preset::Fifo), &[10.0, 13.0], 0.01);
}

#[test]
fn starting_takes_its_time_and_leaves_the_node_to_others() {
    let mut late = job(0.0, 40.0);
    late.start = Span::from_secs(3);
    // Until 3 s the other works alone (12 of 20 done); then 8 are left of it at two cores: it ends at 7,
    // the late one has done 8 and needs 8 s more.
    let w = world(vec![node(4.0)], vec![late, job(0.0, 20.0)]);
    close(&ends(&w, Preset::Na), &[15.0, 7.0], 1e-5);
}

#[test]
fn what_a_job_cannot_use_others_do() {
    let mut narrow = job(0.0, 10.0);
    narrow.max_cores = 1.0;
    // One core for the first (10 s), three for the second (30 of 42 done by then), which then has four: 3 s more.
    let w = world(vec![node(4.0)], vec![narrow, job(0.0, 42.0)]);
    close(&ends(&w, Preset::Na), &[10.0, 13.0], 1e-5);
}

#[test]
fn interference_memory_and_amdahl_slow_jobs_as_they_should() {
    let pair = || vec![job(0.0, 20.0), job(0.0, 20.0)];
    // Two equal neighbours under γ = 0.2 are slowed by 1.1: 40 core-seconds on four cores take 11 s.
    let disturbed = World { interference: 0.2, ..world(vec![node(4.0)], pair()) };
    close(&ends(&disturbed, Preset::Na), &[11.0, 11.0], 1e-5);
    // Together they hold 6 GiB on 4: slowed by 1.5.
    let mut crowded = world(vec![node(4.0)], pair());
    crowded.nodes[0].memory_bytes = 4 << 30;
    crowded.jobs.iter_mut().for_each(|j| j.memory_bytes = 3 << 30);
    close(&ends(&crowded, Preset::Na), &[15.0, 15.0], 1e-5);
    // Nine parallel tenths on four cores: 1/(0.1 + 0.9/4) = 3.077 cores' worth.
    let mut serial = world(vec![node(4.0)], vec![job(0.0, 20.0)]);
    serial.jobs[0].speedup = Speedup::Amdahl { parallel: 0.9 };
    close(&ends(&serial, Preset::Na), &[20.0 * (0.1 + 0.9 / 4.0)], 1e-5);
}

#[test]
fn a_hard_cap_wastes_what_a_weight_does_not() {
    // The narrow job is given half the node and can use a quarter; under caps the other half stays half.
    let mut narrow = job(0.0, 100.0);
    (narrow.max_cores, narrow.claim) = (1.0, AnnouncedTotal::Total);
    let mut wide = job(0.0, 100.0);
    wide.claim = AnnouncedTotal::Total;
    let soft = world(vec![node(4.0)], vec![narrow, wide]);
    let hard = World { actuator: Actuator::Quota, ..soft.clone() };
    let (soft, hard) = (ends(&soft, Preset::Optimus), ends(&hard, Preset::Optimus));
    assert!(hard[1] > soft[1] + 5.0, "{soft:?} {hard:?}");
}

#[test]
fn owners_have_equal_parts_of_a_node() {
    // One owner has three jobs, the other one: the lone job has half the node and ends first.
    let mut jobs = vec![job(0.0, 20.0); 4];
    jobs[3].owner = 1;
    close(&ends(&world(vec![node(4.0)], jobs), Preset::Na), &[20.0, 20.0, 20.0, 10.0], 1e-5);
}

#[test]
fn queues_hold_jobs_back_until_there_is_a_slot() {
    let mut w = world(vec![node(4.0)], vec![job(0.0, 20.0), job(0.0, 20.0), job(0.0, 20.0)]);
    w.nodes[0].slots = Some(1);
    close(&ends(&w, Preset::Na), &[5.0, 10.0, 15.0], 1e-5);
}

#[test]
fn specon_moves_jobs_and_nothing_of_their_work_is_lost() {
    let experiment = gainshare_sim::paper::find("specon-30").expect("it exists");
    let w = World { interference: 0.0, ..(experiment.world)(0) };
    let (_, policy) = experiment.policies().into_iter().find(|(n, _)| n == "specon").expect("its own policy");
    let outcome = run(&w, &policy, Record::default()).expect("a sound run");
    assert!(!outcome.migrations.is_empty(), "no job was moved");
    for m in &outcome.migrations {
        let stays = &outcome.jobs[m.job].stays;
        assert!(stays.windows(2).all(|s| s[0].to == s[1].from && s[0].node != s[1].node), "{stays:?}");
    }
    conserved(&w, &outcome);
}

/// With linear speedup and no disturbance, what a job consumed is its work; and no job is faster than alone.
fn conserved(world: &World, outcome: &Outcome) {
    for (job, fate) in world.jobs.iter().zip(&outcome.jobs) {
        let consumed = fate.consumed_node_s * world.nodes[0].cores;
        assert!(
            (consumed - job.work_core_s).abs() < 1e-3 * job.work_core_s + 1e-3,
            "{}: {consumed} of {}",
            job.name,
            job.work_core_s
        );
        assert!(fate.completion_s() >= fate.alone_s - 1e-5, "{fate:?}");
    }
}

prop_compose! {
    fn any_world()(
        nodes in 1usize..4,
        jobs in prop::collection::vec((0.0f64..60.0, 5.0f64..200.0, 0.3f64..4.0, 2.0f64..60.0, any::<bool>()), 1..9),
        seed in any::<u64>(),
    ) -> World {
        let mut jobs: Vec<SimJob> = jobs.into_iter().map(|(at, work, max_cores, reports, tells_total)| SimJob {
            max_cores, claim: if tells_total { AnnouncedTotal::Total } else { AnnouncedTotal::Nothing }, report_every_core_s: work / reports, ..job(at, work)
        }).collect();
        jobs.sort_by_key(|j| j.arrival);
        World { seed, ..world(vec![node(4.0); nodes], jobs) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn every_policy_ends_every_job_conserves_work_and_beats_no_bound(w in any_world()) {
        for preset in Preset::ALL {
            let policy = Policy::from(preset);
            let outcome = run(&w, &policy, Record::default()).map_err(|e| TestCaseError::fail(format!("{preset:?}: {e}")))?;
            conserved(&w, &outcome);
            let bound = bounds(&w, &outcome);
            prop_assert!(outcome.makespan_s() >= bound.makespan_s - 1e-3, "{preset:?} {bound:?}");
            if outcome.migrations.is_empty() {
                prop_assert!(outcome.mean_completion_s() >= bound.mean_completion_s - 1e-3, "{preset:?} {bound:?}");
                prop_assert!(outcome.mean_quality_s(0.9) >= bound.mean_to_90_percent_s - 1e-3, "{preset:?} {bound:?}");
            }
            prop_assert_eq!(run(&w, &policy, Record::default()).ok(), Some(outcome));
        }
    }
}

#[test]
fn the_same_scenario_and_seeds_give_the_same_bytes() {
    let text = include_str!("../../../scenarios/lab.toml");
    let policies: Vec<_> = Preset::ALL.map(|p| (p.name().to_owned(), Policy::from(p))).to_vec();
    let once = || {
        let scenario = Scenario::parse("lab.toml", text).expect("a sound scenario");
        serde_json::to_string(&simulate(&scenario, &policies, 5, &|_, _| ()).expect("a sound run"))
            .expect("it serialises")
    };
    let (first, second) = (once(), once());
    assert_eq!(first, second);
    assert!(!first.contains("null"), "{first}");
}

#[test]
fn every_scenario_of_the_folder_is_sound() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scenarios");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("readable").path();
        let name = path.display().to_string();
        let scenario =
            Scenario::parse(&name, &std::fs::read_to_string(&path).expect("readable")).expect("a sound scenario");
        run(&scenario.world(3), &Policy::from(Preset::Gainshare), Record::default()).expect("a sound run");
        seen += 1;
    }
    assert!(seen >= 3);
}

#[test]
fn the_end_of_a_job_tells_how_long_the_others_of_its_program_are() {
    // Twenty runs of one program.
    let most_runs = |remembers: bool| {
        let settings = Settings { remembers, ..Settings::default() };
        let world = find("specon-fixed").expect("it exists").drawn(0, &settings);
        let mut most = 0;
        let mut count = |decision: &Decision| {
            for job in &decision.view.jobs {
                most = most.max(job.history.len());
                let is_whole = |run: &FinishedRun| run.steps.is_some_and(|steps| steps >= 99) && run.core_s > 0.0;
                assert!(job.history.iter().all(is_whole), "{:?}", job.history);
            }
        };
        run_observed(&world, &Policy::from(Preset::Na), &mut count).expect("a sound run");
        most
    };
    assert_eq!((most_runs(true), most_runs(false)), (8, 0));
}
