//! The papers' experiments: does the model reproduce what it was calibrated to, and are the reports as promised?

use gainshare_core::policy::{Aim, Gain};
use gainshare_sim::engine::Record;
use gainshare_sim::outcome::Outcome;
use gainshare_sim::paper::{Curves, ExperimentResult, RowResult, SEEDS, Settings, experiments, find};
use gainshare_sim::study::{compare, median};

fn report(name: &str, seeds: u64) -> ExperimentResult {
    let settings = Settings { seeds, ..Settings::default() };
    find(name).expect("it exists").run(&settings, &|_, _| ()).expect("a sound run")
}

#[test]
#[ignore = "needs half a minute of simulation"]
fn table_6_2_is_nearer_than_any_constant_with_the_same_trends() {
    let rows = report("table-6.2", SEEDS).rows;
    assert_eq!(rows.len(), 10);
    let error = |f: &dyn Fn(&RowResult) -> f64| {
        rows.iter().map(|r| (f(r) - r.published.expect("all are published")).abs()).sum::<f64>() / 10.0
    };
    // The best constant is the median of what was published.
    let published: Vec<f64> = rows.iter().filter_map(|r| r.published).collect();
    let constant = median(&published);
    let (ours, best) = (error(&|r| r.simulated), error(&|_| constant));
    assert!(ours < 0.8 * best, "{ours:.1} points against {best:.1} of a constant: {rows:?}");
    assert!(rows.iter().all(|r| r.simulated > 0.0), "FlowCon helps in every setting: {rows:?}");
    let at = |alpha: f64, s: u64| rows.iter().find(|r| r.alpha == alpha && r.interval_s == s).unwrap().simulated;
    // 30 s is best, then longer intervals help less and less; larger thresholds help less than the smallest.
    assert!(at(0.10, 30) > at(0.10, 20) && at(0.10, 30) > at(0.10, 40));
    assert!(at(0.10, 40) > at(0.10, 50) && at(0.10, 50) > at(0.10, 60));
    assert!(at(0.01, 20) > at(0.05, 20) && at(0.05, 20) >= at(0.15, 20));
}

/// Medians of mean completion time and makespan under one policy of an experiment.
fn medians(name: &str, policy: &str) -> (f64, f64) {
    let experiment = find(name).expect("it exists");
    let (_, policy) = experiment.policies().into_iter().find(|(n, _)| n == policy).expect("it exists");
    let outcomes = compare(&experiment.world, &[policy], 0..SEEDS, Record::default(), &|_| ()).expect("a sound run");
    let of = |f: fn(&Outcome) -> f64| median(&outcomes[0].iter().map(f).collect::<Vec<_>>());
    (of(Outcome::mean_completion_s), of(Outcome::makespan_s))
}

#[test]
#[ignore = "needs half a minute of simulation"]
fn the_baselines_are_what_was_measured() {
    let near = |got: f64, published: f64, within: f64| {
        assert!((got / published - 1.0).abs() < within, "{got} against {published}");
    };
    let (mean, makespan) = medians("flowcon-fixed", "na");
    near(mean, (394.0 + 240.5 + 84.7) / 3.0, 0.01);
    near(makespan, 394.0, 0.01);
    near(medians("flowcon-10", "na").1, 1384.9, 0.05);
    near(medians("flowcon-15", "na").1, 1980.1, 0.05);
    near(medians("specon-fixed", "na").0, 275.2, 0.05);
    let (na, specon) = (medians("specon-30", "na"), medians("specon-30", "specon"));
    near(na.0, 799.5, 0.05);
    near(na.1, 1640.0, 0.05);
    // SpeCon helps the mean and the makespan, as published.
    assert!(specon.0 < na.0 && specon.1 < na.1, "{specon:?} {na:?}");
}

#[test]
#[ignore = "needs half a minute of simulation"]
fn every_experiment_reports_what_was_promised_and_draws() {
    for experiment in experiments() {
        let report = report(experiment.name, 1);
        let json = serde_json::to_value(&report).expect("it serialises");
        for policy in ["na", "flowcon", "gainshare", "srtf", "srpt"] {
            let tails = ["worst_slowdown_p90", "worst_slowdown_max", "time_to_90"];
            for field in ["mean_completion_s", "makespan_s", "faster_share", "worst_slowdown"].into_iter().chain(tails)
            {
                assert!(json["policies"][policy][field].is_number(), "{}: {policy} {field}", experiment.name);
            }
        }
        assert!(json["published"].is_object());
        let figures = experiment.figures(&report).expect("figures");
        assert!(figures.len() > 1, "{}: {} figures", experiment.name, figures.len());
        assert!(figures.iter().all(|f| f.svg.starts_with("<svg") && !f.svg.contains("NaN")), "{}", experiment.name);
        assert!(experiment.page(&report).expect("a page").contains("</html>"));
    }
}

#[test]
fn the_gantt_of_specon_marks_what_was_moved() {
    let experiment = find("specon-30").expect("it exists");
    let report = report("specon-30", 1);
    let first = &experiment.figures(&report).expect("figures")[0];
    assert!(first.svg.contains("-M") && first.svg.contains("Worker-4"), "no move to be seen");
}

/// A few policies of an experiment under some conditions.
fn under(name: &str, settings: Settings) -> ExperimentResult {
    let only = ["srtf", "gainshare", "srpt", "flowcon", "flowcon2"].map(str::to_owned).to_vec();
    find(name).expect("it exists").run(&Settings { only, ..settings }, &|_, _| ()).expect("a sound run")
}

/// The part of the gap between equal shares and clairvoyant SRPT.
fn captured(report: &ExperimentResult, policy: &str) -> f64 {
    let mean = |name: &str| report.policies[name].mean_completion_s;
    (mean("na") - mean(policy)) / (mean("na") - mean("srpt"))
}

#[test]
#[ignore = "needs half a minute of simulation"]
fn most_of_the_gap_is_captured_though_half_of_the_models_print_no_total() {
    for name in ["flowcon-fixed", "flowcon-5", "flowcon-10", "flowcon-15"] {
        let report = under(name, Settings::default());
        let (ours, srtf) = (captured(&report, "gainshare"), captured(&report, "srtf"));
        assert!(ours > 0.85 && ours > srtf, "{name}: {ours:.3}, srtf {srtf:.3}");
        let worst = |policy: &str| report.policies[policy].worst_slowdown_p90;
        assert!(worst("gainshare") < 0.15 && worst("gainshare") < worst("srtf"), "{name}: {}", worst("gainshare"));
    }
}

#[test]
#[ignore = "needs half a minute of simulation"]
fn curves_of_real_runs_cost_little_of_what_is_captured_on_one_node() {
    for name in ["flowcon-fixed", "flowcon-5", "flowcon-10", "flowcon-15"] {
        let report = under(name, Settings { curves: Curves::Recorded, ..Settings::default() });
        let (ours, srtf) = (captured(&report, "gainshare"), captured(&report, "srtf"));
        assert!(ours > 0.75 && ours > srtf, "{name}: {ours:.3}, srtf {srtf:.3}");
        let worst = |policy: &str| report.policies[policy].worst_slowdown_p90;
        assert!(worst("gainshare") < 0.25 && worst("gainshare") < worst("srtf"), "{name}: {}", worst("gainshare"));
    }
}

#[test]
fn numbers_for_a_single_node_change_no_cluster() {
    let of = |name: &str, gain| {
        let settings =
            Settings { seeds: 1, gain: Some(gain), only: vec!["gainshare".to_owned()], ..Settings::default() };
        find(name).expect("it exists").run(&settings, &|_, _| ()).expect("a sound run").policies["gainshare"].clone()
    };
    let without = Gain { one_node: None, ..Gain::default() };
    assert_eq!(of("specon-20", Gain::default()), of("specon-20", without));
    assert_ne!(of("flowcon-5", Gain::default()), of("flowcon-5", without));
}

#[test]
#[ignore = "needs half a minute of simulation"]
fn one_earlier_run_tells_most_of_what_a_total_would() {
    for name in ["flowcon-fixed", "flowcon-10"] {
        let report = under(name, Settings { history: 1, ..Settings::default() });
        let ours = captured(&report, "gainshare");
        assert!(ours > 0.92, "{name}: {ours:.3}");
    }
}

#[test]
#[ignore = "needs half a minute of simulation"]
fn with_the_aim_of_quality_nine_tenths_come_a_quarter_sooner_than_with_equal_shares() {
    for name in ["flowcon-10", "flowcon-15"] {
        let gain = Some(Gain { aim: Aim::Quality, ..Gain::default() });
        let report = under(name, Settings { gain, ..Settings::default() });
        let (ours, na) = (report.policies["gainshare"].time_to_90, report.policies["na"].time_to_90);
        assert!(ours < 0.75 * na, "{name}: {ours:.0} s against {na:.0} s");
    }
}

#[test]
#[ignore = "needs half a minute of simulation"]
fn placement_by_growth_beats_the_default_placement() {
    for name in ["flowcon2-20", "flowcon2-60"] {
        let report = under(name, Settings::default());
        let of = |policy: &str| (report.policies[policy].mean_completion_s, report.policies[policy].makespan_s);
        let ((mean, makespan), (default_mean, default_makespan)) = (of("flowcon2"), of("flowcon"));
        // On equal nodes the makespans are the same within a second.
        assert!(mean < default_mean, "{name}: mean {mean} against {default_mean}");
        assert!(makespan < 1.005 * default_makespan, "{name}: makespan {makespan} against {default_makespan}");
    }
}

#[test]
fn the_same_experiment_gives_the_same_bytes() {
    let bytes = || serde_json::to_string(&report("flowcon-5", 3)).expect("it serialises");
    assert_eq!(bytes(), bytes());
}

#[test]
fn an_unknown_experiment_names_the_known_ones() {
    let error = find("table-9").err().expect("unknown");
    assert!(error.contains("table-9") && error.contains("table-6.2") && error.contains("specon-30"), "{error}");
}
