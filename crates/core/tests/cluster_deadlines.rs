//! The deadlines of `cargo xtask e2e kube-deadline`, played on a node whose pods disturb each other (`play`).

use crate::play::{Cluster, Play, RIGHT, Setting};
use gainshare_core::policy::Preset;

/// A pod takes 2.5 s to start; meanwhile the node's programs have a quarter of the core, and the steps of the other
/// pods cost 1.6 times as much.
const NODE: Cluster =
    Cluster { crowding: 0.02, start_s: 2.5, start_takes: 0.25, start_cost: 1.6, effect_s: 2.0, skew_s: 0.1 };

/// Beside nine others a step costs 1.4 times the CPU time that it costs alone, as measured on a node with one core.
const CROWDED: Cluster = Cluster { crowding: 0.044, ..NODE };

const SEEDS: std::ops::Range<u64> = 300..303;

fn play(preset: Preset, cluster: Cluster) -> Vec<Play> {
    let setting =
        Setting { preset, at_once: false, habits: RIGHT, warm_up: 3, horizon_s: 150.0, cluster: Some(cluster) };
    let plays: Vec<Play> = SEEDS.map(|seed| Play::run(seed, setting)).collect();
    let missed: Vec<_> = plays.iter().map(Play::missed).collect();
    println!("{preset:?}, {cluster:?}: missed {missed:?}, median error {:.3}", median_error(&plays));
    plays
}

fn median_error(plays: &[Play]) -> f64 {
    let mut errors: Vec<f64> = plays.iter().flat_map(|play| play.scores()).map(|(error, _)| error.abs()).collect();
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}

fn missed(plays: &[Play]) -> usize {
    plays.iter().map(|play| play.missed().len()).sum()
}

#[test]
fn deadlines_that_equal_shares_miss_are_met_on_a_node_whose_pods_disturb_each_other() {
    let (equal, ours) = (play(Preset::Na, NODE), play(Preset::Qos, NODE));
    assert!(missed(&equal) >= 9, "{} of 24 missed with equal shares", missed(&equal));
    assert!(missed(&ours) <= 2, "{} of 24 missed", missed(&ours));
}

#[test]
fn ends_are_predicted_while_pods_start_and_crowd_the_node() {
    let plays = play(Preset::Qos, CROWDED);
    assert!(median_error(&plays) <= 0.15, "{}", median_error(&plays));
    assert!(missed(&plays) <= 6, "{} of 24 missed", missed(&plays));
}
