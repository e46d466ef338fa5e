//! FlowCon's evaluation (thesis, section 6.1): one node, jobs at fixed or random times.

use super::setup::{at_random, experiment, kinds, row, submitted, workers, world};
use super::{Experiment, Measure};
use crate::models::{self, FLOWCON, Model};
use crate::random::Stream;
use crate::world::{SimJob, World};
use gainshare_core::model::Span;
use gainshare_core::policy::{Flowcon, Policy, ShareRule};
use serde_json::json;

pub(super) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            rows: TABLE_6_2.map(|(alpha, s, p)| row(flowcon, alpha, s, Some(p), Measure::Job(2))).into(),
            ..experiment(
                ("table-6.2", "FlowCon, Table 6.2: by how much MNIST-TensorFlow ends sooner, in ten settings"),
                fixed,
                ("flowcon", flowcon(0.05, 20)),
                json!({"same_setting_measured_twice_percent": [26.2, 19.0]}),
            )
        },
        Experiment {
            rows: [(20, Some(21.4)), (30, Some(31.9)), (40, None), (50, None), (60, None)]
                .map(|(s, p)| row(flowcon, 0.05, s, p, Measure::Job(2)))
                .into(),
            ..experiment(
                (
                    "flowcon-fixed",
                    "FlowCon, Figures 6.1–6.6: VAE at 0 s, MNIST-PyTorch at 40 s, MNIST-TensorFlow at 80 s",
                ),
                fixed,
                ("flowcon", flowcon(0.05, 20)),
                json!({
                    "na_makespan_s": 394.0, "na_completion_s": [394.0, 240.5, 84.7],
                    "flowcon_makespan_s_interval_20_to_60": [386.1, 372.4, 384.8, 389.0, 388.1],
                    "overlap_of_three_s": {"na": 84.7, "flowcon": 59.4}, "overlap_of_two_s": {"na": 240.5, "flowcon": 213.2},
                }),
            )
        },
        Experiment {
            rows: [(0.03, 30), (0.03, 60), (0.05, 30), (0.05, 60)]
                .map(|(a, s)| row(flowcon, a, s, None, Measure::Mean))
                .into(),
            ..experiment(
                ("flowcon-5", "FlowCon, Figures 6.7–6.9: five different jobs at random in 0–200 s"),
                five,
                ("flowcon", flowcon(0.03, 30)),
                json!({
                    "best_reduction_percent": 42.06, "faster": "4 to 5 of 5", "makespan_change_percent": [-5, -1],
                    "worst_slowdown_percent_alpha_5_interval_60": 11.8, "na_completion_s": {"Job-4": 422.5, "Job-5": 489.4},
                }),
            )
        },
        experiment(
            ("flowcon-10", "FlowCon, Figures 6.10–6.14: ten jobs at random in 0–200 s"),
            |seed| random(seed, kinds(seed, 10, &FLOWCON)),
            ("flowcon", flowcon(0.10, 20)),
            json!({
                "makespan_s": {"na": 1384.9, "flowcon": 1350.7}, "faster": "9 of 10",
                "best_job_s": {"na": 188.3, "flowcon": 110.8}, "worst_slowdown_percent": 1.1,
            }),
        ),
        experiment(
            ("flowcon-15", "FlowCon, Figure 6.15: fifteen jobs at random in 0–200 s"),
            |seed| random(seed, kinds(seed, 15, &FLOWCON)),
            ("flowcon", flowcon(0.10, 20)),
            json!({
                "makespan_s": {"na": 1980.1, "flowcon": 1950.9}, "faster": "11 of 15",
                "best_job_s": {"na": 308.1, "flowcon": 271.4}, "worst_slowdown_percent": 5.7,
            }),
        ),
    ]
}

/// α, interval in seconds, published reduction in percent. The first five are the thesis's Figure 6.2, the
/// others its Figure 6.3; one setting is in both, with different results: what the authors' machine itself
/// varied by.
const TABLE_6_2: [(f64, u64, f64); 10] = [
    (0.10, 20, 26.2),
    (0.10, 30, 32.4),
    (0.10, 40, 14.3),
    (0.10, 50, 15.3),
    (0.10, 60, 3.1),
    (0.01, 20, 32.1),
    (0.03, 20, 31.0),
    (0.05, 20, 21.4),
    (0.10, 20, 19.0),
    (0.15, 20, 19.8),
];

pub(super) fn flowcon(alpha: f64, interval_s: u64) -> Policy {
    let rule = Flowcon { alpha, interval: Span::from_secs(interval_s), ..Flowcon::default() };
    Policy { share: ShareRule::Flowcon(rule), ..Policy::equal() }
}

fn one_node(seed: u64, jobs: Vec<SimJob>) -> World {
    world(seed, workers(1), jobs)
}

fn by_name(name: &str) -> &'static Model {
    FLOWCON.iter().find(|m| m.name == name).expect("the experiments name only models of the table")
}

/// The fixed schedule. A container takes up to a second to come up.
fn fixed(seed: u64) -> World {
    let jobs = [("VAE-P", 0.0), ("MNIST-P", 40.0), ("MNIST-T", 80.0)].into_iter().enumerate().map(|(i, (name, at))| {
        let late = Stream::new(seed, i as u64, "arrival").unit();
        models::job(by_name(name), seed, i as u64, name.to_owned(), at + late)
    });
    one_node(seed, jobs.collect())
}

/// Five jobs, one of each kind, at random times.
fn five(seed: u64) -> World {
    random(seed, ["LSTM-CFC", "VAE-P", "VAE-T", "MNIST-P", "GRU"].into_iter().map(by_name))
}

/// Jobs of these kinds at random times. The thesis's clock starts with the first job.
fn random(seed: u64, kinds: impl Iterator<Item = &'static Model>) -> World {
    let times: Vec<(f64, &Model)> = at_random(seed, 200.0, kinds).collect();
    let first = times.iter().map(|t| t.0).fold(f64::INFINITY, f64::min);
    let mut jobs = submitted(seed, times.into_iter().map(|(at, model)| (at - first, model)));
    for job in &mut jobs {
        job.name = format!("{} {}", job.name, job.model);
    }
    one_node(seed, jobs)
}
