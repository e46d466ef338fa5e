//! Elastic GPU jobs with deadlines: are promises kept, and are as many deadlines met as we publish?

use gainshare_sim::deadline::qos::{JobView, Planner};
use gainshare_sim::deadline::replay::{JobKnowledge, replay, replay_apart};
use gainshare_sim::deadline::report::{figure_8a, itp};
use gainshare_sim::deadline::timeline::{JobDemand, Period, Timeline};
use gainshare_sim::deadline::{Cluster, GpuJob, Kind, Level, data, efficient_levels, useful_levels};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

const FOUR: Cluster = Cluster { nodes: 1, gpus_per_node: 4 };

fn levels(speeds: &[f64]) -> Vec<Level> {
    speeds.iter().enumerate().map(|(i, &speed)| Level { gpus: 1 << i, speed }).collect()
}

fn need(levels: &[Level], left: f64, deadline_s: i64) -> JobDemand<'_> {
    JobDemand { left, deadline_s, levels, gpus: 0, restart_left_s: 0, held_until_s: 0, held_speed: 0.0 }
}

#[test]
fn figure_8a_is_as_published_and_ours_meets_more() {
    let comparison = figure_8a().expect("sound data");
    assert_eq!((comparison.jobs, comparison.feasible, comparison.gpus), (195, 181, 64));
    let met = |policy: &str| comparison.policies[policy].met;
    assert!(met("edf").abs_diff(23) <= 3, "{}", met("edf"));
    assert!(met("tiresias").abs_diff(56) <= 3, "{}", met("tiresias"));
    assert!(met("elasticflow").abs_diff(142) <= 3, "{}", met("elasticflow"));
    let (qos, learned) = (&comparison.policies["qos"], &comparison.policies["qos-learned"]);
    assert!(qos.met >= 165, "{qos:?}");
    assert_eq!(qos.admitted_missed, 0, "with true speeds every promise holds");
    assert!(learned.met >= 155, "{learned:?}");
    assert_eq!(learned.admitted_missed, learned.missed_by_prediction, "only a wrong prediction breaks a promise");
    for outcome in comparison.policies.values() {
        assert_eq!(outcome.admitted + outcome.refused, 195);
        assert!((outcome.met_ratio - outcome.met as f64 / 195.0).abs() < 1e-12);
    }
}

#[test]
fn the_small_itp_clusters_meet_more_than_published_and_keep_every_promise() {
    for cluster in [6, 10] {
        let comparison = itp(cluster).expect("sound data");
        let qos = &comparison.policies["qos"];
        assert!(qos.met_ratio >= comparison.published["elasticflow"], "cluster {cluster}: {qos:?}");
        assert!(qos.met <= comparison.feasible);
        assert_eq!(qos.admitted_missed, 0, "cluster {cluster}");
    }
}

#[test]
fn ours_meets_more_also_with_decisions_a_minute_apart() {
    let (jobs, cluster) = data::figure_8a().expect("sound data");
    let qos = replay_apart(&jobs, cluster, JobKnowledge::Tables, 60);
    assert!(qos.met >= 160 && qos.admitted_missed == 0, "{qos:?}");
    let learned = replay_apart(&jobs, cluster, JobKnowledge::Nothing, 60);
    assert!(learned.met >= 150, "{learned:?}");
}

#[test]
fn the_same_trace_gives_the_same_outcome() {
    let (jobs, cluster) = data::figure_8a().expect("sound data");
    for knowledge in [JobKnowledge::Tables, JobKnowledge::Nothing] {
        assert_eq!(replay(&jobs, cluster, knowledge), replay(&jobs, cluster, knowledge));
    }
}

#[test]
fn the_minimum_satisfactory_share_is_the_least_level_that_makes_the_deadline() {
    let table = levels(&[1.0, 1.9, 3.4]);
    let timeline = Timeline::new(0, FOUR);
    // One GPU: 4 s of restart and 50 s of work.
    let one = timeline.fill(&need(&table, 50.0, 60)).expect("fits");
    assert_eq!(one.periods, [Period { start_s: 0, end_s: 60, gpus: 1 }]);
    assert_eq!(one.end_s, 54);
    // Two GPUs: 6 s of restart and 100 / 1.9 = 52.6 s of work.
    let two = timeline.fill(&need(&table, 100.0, 60)).expect("fits");
    assert_eq!((two.periods.as_slice(), two.end_s), ([Period { start_s: 0, end_s: 60, gpus: 2 }].as_slice(), 59));
    // Four GPUs would need 8 s and 200 / 3.4 = 58.8 s.
    assert_eq!(timeline.fill(&need(&table, 200.0, 60)), None);
}

#[test]
fn a_share_works_around_what_is_taken_and_is_lowered_once_less_is_enough() {
    let table = levels(&[1.0, 1.9, 3.4]);
    let mut timeline = Timeline::new(0, FOUR);
    timeline.take(&Period { start_s: 0, end_s: 600, gpus: 3 });
    let share = timeline.fill(&need(&table, 1000.0, 1000)).expect("fits");
    assert_eq!(share.gpus_at(0), 1, "three GPUs are taken");
    assert_eq!(share.gpus_at(600), 2, "596 of 1000 iterations are done by then");
    assert!(share.end_s <= 1000);
    // Two GPUs all the time would end at 1,059; one GPU needs 2,004 s.
    let lowered = Timeline::new(0, FOUR).fill(&need(&table, 2000.0, 1900)).expect("fits");
    assert_eq!((lowered.gpus_at(0), lowered.gpus_at(1800)), (2, 1), "{lowered:?}");
    assert!(lowered.gpu_time(0) < 2.0 * 1059.0);
}

#[test]
fn levels_below_the_hull_are_not_efficient() {
    // Measured for cifar10 with batch size 4096 on T4: two GPUs and eight are worse than a mix of their neighbours.
    let table = levels(&[0.356, 0.597, 1.266, 2.225, 4.474, 4.440, 3.315]);
    let useful = useful_levels(&table, 64);
    assert_eq!(useful.iter().map(|l| l.gpus).collect::<Vec<_>>(), [1, 2, 4, 8, 16]);
    assert_eq!(efficient_levels(&useful).iter().map(|l| l.gpus).collect::<Vec<_>>(), [1, 4, 16]);
}

fn view(id: usize, left: f64, deadline_s: i64) -> JobView {
    let useful: Arc<[Level]> = levels(&[1.0, 1.9, 3.4]).into();
    JobView { id, deadline_s, left: Some(left), efficient: useful.clone(), useful, gpus: 0, restart_left_s: 0 }
}

#[test]
fn a_new_job_never_takes_a_promise_away_and_is_admitted_once_it_fits() {
    let mut planner = Planner::new(FOUR);
    let first = view(0, 300.0, 100);
    let decision = planner.decide(0, std::slice::from_ref(&first));
    assert!(planner.is_promised(0));
    assert_eq!(decision.gpus[&0], 4, "300 iterations by second 100 need all GPUs");
    // The second job is more urgent and cheaper, and all the same it must wait.
    let running = JobView { gpus: 4, left: Some(300.0 - 3.4 * 2.0), ..first };
    let second = view(1, 30.0, 60);
    let decision = planner.decide(10, &[running, second.clone()]);
    assert!(planner.is_promised(0) && !planner.is_promised(1));
    assert_eq!(decision.gpus.get(&1), None);
    // The first job ends early, and the refused job can still make it.
    let decision = planner.decide(20, &[second]);
    assert!(planner.is_promised(1));
    assert!(decision.gpus[&1] >= 1);
}

#[test]
fn of_new_jobs_that_do_not_fit_together_the_costliest_is_refused() {
    let mut planner = Planner::new(FOUR);
    let jobs = [view(0, 300.0, 100), view(1, 60.0, 100), view(2, 60.0, 100)];
    planner.decide(0, &jobs);
    assert_eq!([0, 1, 2].map(|id| planner.is_promised(id)), [false, true, true]);
}

/// The third job starts on two GPUs, because they are expected to be faster than one. Its first report shows that they
/// are slower, and what it can be promised then must not count on the speed of one GPU for the time on two.
#[test]
fn no_promise_rests_on_gpus_that_proved_slower() {
    let job = |submitted_s: i64, deadline_s: i64, iterations: f64| GpuJob {
        submitted_s,
        deadline_s,
        iterations,
        kind: Kind { model: "model".into(), batch: 0 },
        requested_gpus: 1,
        duration_s: deadline_s - submitted_s,
        levels: levels(&[1.0, 0.7]).into(),
    };
    let jobs = [job(0, 30, 9.0), job(2161, 3683, 632.0), job(2821, 3240, 406.0)];
    let outcome = replay(&jobs, Cluster { nodes: 4, gpus_per_node: 4 }, JobKnowledge::Nothing);
    assert_eq!((outcome.met, outcome.admitted_missed), (3, 0), "{outcome:?}");
}

fn arbitrary_job() -> impl Strategy<Value = GpuJob> {
    let speed_ups = prop::collection::vec(0.7f64..2.0, 1..5);
    (0i64..5000, 30i64..4000, 0.3f64..2.0, 0u32..6, speed_ups).prop_map(|(submitted_s, window_s, load, batch, ups)| {
        let mut speed = 1.0;
        let mut table = vec![Level { gpus: 1, speed }];
        for (i, up) in ups.iter().enumerate() {
            speed *= up;
            table.push(Level { gpus: 2 << i, speed });
        }
        GpuJob {
            submitted_s,
            deadline_s: submitted_s + window_s,
            iterations: window_s as f64 * load,
            kind: Kind { model: format!("model-{}", ups.len()), batch },
            requested_gpus: 1,
            duration_s: window_s,
            levels: table.into(),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The replay stops with a panic if a decision gives more GPUs than exist or a gang that does not pack.
    #[test]
    fn promises_hold_on_any_trace(mut jobs in prop::collection::vec(arbitrary_job(), 1..40)) {
        jobs.sort_by_key(|j| j.submitted_s);
        // Jobs of one kind have one table.
        let mut tables = BTreeMap::new();
        for job in &mut jobs {
            let table: &Arc<[Level]> = tables.entry(job.kind.clone()).or_insert_with(|| job.levels.clone());
            job.levels = table.clone();
        }
        let cluster = Cluster { nodes: 4, gpus_per_node: 4 };
        let outcome = replay(&jobs, cluster, JobKnowledge::Tables);
        prop_assert_eq!(outcome.admitted_missed, 0);
        prop_assert!(outcome.met >= outcome.admitted);
        let learned = replay(&jobs, cluster, JobKnowledge::Nothing);
        prop_assert_eq!(learned.admitted_missed, learned.missed_by_prediction);
    }

    #[test]
    fn a_gang_has_a_whole_level_or_nothing(
        jobs in prop::collection::vec((10.0f64..4000.0, 60i64..4000), 1..12),
    ) {
        let views: Vec<JobView> = jobs.iter().enumerate().map(|(i, &(left, by_s))| view(i, left, by_s)).collect();
        let decision = Planner::new(FOUR).decide(0, &views);
        prop_assert!(decision.gpus.values().sum::<u32>() <= FOUR.gpus());
        for (id, gpus) in &decision.gpus {
            prop_assert!(views[*id].useful.iter().any(|l| l.gpus == *gpus));
        }
    }
}
