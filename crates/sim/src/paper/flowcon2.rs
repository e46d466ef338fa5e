//! FlowCon 2.0's evaluation as far as its abstract tells it: four equal workers with 20 jobs, eight unequal
//! ones with 60.

use super::Experiment;
use super::flowcon::flowcon;
use super::setup::{at_random, experiment, kinds, submitted, workers, world};
use crate::models::FLOWCON;
use crate::world::{Node, World};
use gainshare_core::policy::{PlaceRule, Policy};
use serde_json::json;

pub(super) fn experiments() -> Vec<Experiment> {
    vec![
        beside_flowcon(experiment(
            ("flowcon2-20", "FlowCon 2.0: 20 jobs at random in 0–300 s on 4 equal workers"),
            |seed| mixed(seed, workers(4), 20),
            ("flowcon2", flowcon2()),
            json!({
                "faster": "18 of 20", "best_reduction_percent_of_all_experiments": 68.8,
                "makespan_reduction_percent_of_all_experiments": 18.0,
            }),
        )),
        beside_flowcon(experiment(
            ("flowcon2-60", "FlowCon 2.0: 60 jobs at random in 0–300 s on 8 unequal workers"),
            |seed| mixed(seed, unequal(), 60),
            ("flowcon2", flowcon2()),
            json!({
                "makespan": "a larger reduction than on equal workers", "best_reduction_percent_of_all_experiments": 68.8,
            }),
        )),
    ]
}

/// The same share rule with the default placement beside it: what placement alone does.
fn beside_flowcon(mut experiment: Experiment) -> Experiment {
    experiment.own.push(("flowcon", flowcon(0.05, 20)));
    experiment
}

fn mixed(seed: u64, nodes: Vec<Node>, n: u64) -> World {
    // Draws of its own, so that these are not SpeCon's worlds again.
    let draw = seed ^ 0x00f1_0c02;
    world(seed, nodes, submitted(draw, at_random(draw, 300.0, kinds(draw, n, &FLOWCON))))
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
