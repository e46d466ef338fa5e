//! FlowCon 2.0's evaluation as far as its abstract tells it: four equal workers with 20 jobs, eight unequal ones with 60.

use super::Experiment;
use super::flowcon::flowcon;
use super::specon::{at_random, cluster, workers};
use crate::world::Node;
use gainshare_core::policy::{PlaceRule, Policy};
use serde_json::json;

const DS: PlaceRule = PlaceRule::Kubernetes { seed: 0 };

pub(super) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            name: "flowcon2-20",
            title: "FlowCon 2.0: 20 jobs at random in 0–300 s on 4 equal workers",
            world: |seed| cluster(seed, workers(4), at_random(seed, 20, 300.0)),
            own: vec![("flowcon2", flowcon2())],
            published: json!({
                "faster": "18 of 20", "best_reduction_percent_of_all_experiments": 68.8,
                "makespan_reduction_percent_of_all_experiments": 18.0,
            }),
            place: DS,
            rows: vec![],
        },
        Experiment {
            name: "flowcon2-60",
            title: "FlowCon 2.0: 60 jobs at random in 0–300 s on 8 unequal workers",
            world: |seed| cluster(seed, unequal(), at_random(seed, 60, 300.0)),
            own: vec![("flowcon2", flowcon2())],
            published: json!({
                "makespan": "a larger reduction than on equal workers", "best_reduction_percent_of_all_experiments": 68.8,
            }),
            place: DS,
            rows: vec![],
        },
    ]
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
