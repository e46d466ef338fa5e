//! FlowCon 2.0's evaluation as far as its abstract tells it: four equal workers with 20 jobs, eight unequal
//! ones with 60.

use super::Experiment;
use super::flowcon::flowcon;
use super::setup::{at_random, experiment, kinds, submitted, workers, world};
use crate::models::SPECON;
use crate::world::{Node, World};
use gainshare_core::policy::{PlaceRule, Policy};
use serde_json::json;

pub(super) fn experiments() -> Vec<Experiment> {
    vec![
        experiment(
            ("flowcon2-20", "FlowCon 2.0: 20 jobs at random in 0–300 s on 4 equal workers"),
            |seed| mixed(seed, workers(4), 20),
            ("flowcon2", flowcon2()),
            json!({
                "faster": "18 of 20", "best_reduction_percent_of_all_experiments": 68.8,
                "makespan_reduction_percent_of_all_experiments": 18.0,
            }),
        ),
        experiment(
            ("flowcon2-60", "FlowCon 2.0: 60 jobs at random in 0–300 s on 8 unequal workers"),
            |seed| mixed(seed, unequal(), 60),
            ("flowcon2", flowcon2()),
            json!({
                "makespan": "a larger reduction than on equal workers", "best_reduction_percent_of_all_experiments": 68.8,
            }),
        ),
    ]
}

fn mixed(seed: u64, nodes: Vec<Node>, n: u64) -> World {
    world(seed, nodes, submitted(seed, at_random(seed, 300.0, kinds(seed, n, &SPECON))))
}

fn flowcon2() -> Policy {
    Policy { place: PlaceRule::Growth, ..flowcon(0.05, 20) }
}

/// Eight workers of three kinds; the abstract says "heterogeneous" and no more.
fn unequal() -> Vec<Node> {
    let kinds = [(16.0, 1.0), (16.0, 1.0), (16.0, 1.0), (16.0, 1.0), (8.0, 1.0), (8.0, 1.0), (32.0, 1.2), (32.0, 1.2)];
    let nodes = workers(8).into_iter().zip(kinds);
    nodes.map(|(node, (cores, speed))| Node { cores, speed, ..node }).collect()
}
