//! SpeCon's evaluation (thesis, section 6.2): clusters of four and eight workers under Kubernetes.

use super::setup::{DS, at_random, experiment, kinds, row, submitted, workers, world};
use super::{Experiment, Measure};
use crate::models::SPECON;
use crate::world::World;
use gainshare_core::model::Span;
use gainshare_core::policy::{MoveRule, Policy, Specon};
use serde_json::json;

pub(super) fn experiments() -> Vec<Experiment> {
    let mean = |alpha, s, published| row(specon, alpha, s, Some(published), Measure::Mean);
    vec![
        experiment(
            ("specon-fixed", "SpeCon, Figure 6.16: 20 VAE jobs, one every 50 s, 4 workers"),
            |seed| world(seed, workers(4), submitted(seed, (0..20).map(|i| (50.0 * f64::from(i), &SPECON[0])))),
            ("specon", specon(0.01, 30)),
            json!({
                "faster": "11 of 20", "best_job_s": {"na": 348.7, "specon": 217.6},
                "mean_completion_s": {"na": 275.2, "specon": 234.7}, "makespan_s": {"na": 1260, "specon": 1190},
            }),
        ),
        Experiment {
            rows: vec![mean(0.05, 20, 1.1), mean(0.05, 25, 5.2), mean(0.05, 30, 8.0)],
            ..experiment(
                (
                    "specon-random-interval",
                    "SpeCon, Figure 6.17: 20 VAE jobs at random in 0–300 s, α = 0.05, three intervals",
                ),
                twenty_vae,
                ("specon", specon(0.05, 30)),
                json!({
                    "mean_reduction_percent_interval_20_25_30": [1.1, 5.2, 8.0],
                    "job_1_s": {"na": 461.2, "specon_interval_20_25_30": [420.2, 345.8, 379.9]},
                }),
            )
        },
        Experiment {
            rows: vec![mean(0.01, 30, 7.2), mean(0.05, 30, 3.2), mean(0.10, 30, 9.5)],
            ..experiment(
                (
                    "specon-random-alpha",
                    "SpeCon, Figure 6.18: 20 VAE jobs at random in 0–300 s, every 30 s, three thresholds",
                ),
                twenty_vae,
                ("specon", specon(0.01, 30)),
                json!({"mean_reduction_percent_alpha_1_5_10": [7.2, 3.2, 9.5]}),
            )
        },
        experiment(
            ("specon-20", "SpeCon, Figure 6.19: 20 jobs of random models in 0–300 s, 4 workers"),
            |seed| mixed(seed, 20, 300.0, 4),
            ("specon", specon(0.01, 30)),
            json!({
                "faster": "15 of 20", "best_job_s": {"na": 1167.8, "specon": 799.2},
                "mean_reduction_percent": 13.6, "makespan_s": {"na": 1421, "specon": 1070},
            }),
        ),
        experiment(
            ("specon-30", "SpeCon, Figures 6.20–6.24: 30 jobs of random models in 0–300 s, 4 workers"),
            |seed| mixed(seed, 30, 300.0, 4),
            ("specon", specon(0.01, 30)),
            json!({
                "faster": "20 of 30", "best_job_s": {"na": 447.4, "specon": 314.9},
                "mean_completion_s": {"na": 799.5, "specon": 752.6}, "makespan_s": {"na": 1640, "specon": 1370},
            }),
        ),
        experiment(
            ("specon-50", "SpeCon, Figure 6.25: 50 jobs of random models in 0–1200 s, 8 workers"),
            |seed| longer(mixed(seed, 50, 1200.0, 8)),
            ("specon", specon(0.01, 30)),
            json!({
                "faster": "30 of 50", "best_job_s": {"na": 467.5, "specon": 273.4},
                "mean_completion_s": {"na": 596.3, "specon": 553.0}, "makespan_s": {"na": 2070, "specon": 1840},
            }),
        ),
    ]
}

fn specon(alpha: f64, interval_s: u64) -> Policy {
    let rule = Specon { alpha, interval: Span::from_secs(interval_s), ..Specon::default() };
    Policy { moves: MoveRule::Specon(rule), place: DS, ..Policy::equal() }
}

fn twenty_vae(seed: u64) -> World {
    world(seed, workers(4), submitted(seed, at_random(seed, 300.0, std::iter::repeat_n(&SPECON[0], 20))))
}

fn mixed(seed: u64, n: u64, until_s: f64, nodes: usize) -> World {
    world(seed, workers(nodes), submitted(seed, at_random(seed, until_s, kinds(seed, n, &SPECON))))
}

/// The published means cannot come from the same jobs as those of the smaller cluster: 8 workers busy for
/// 2070 s are 331 s for each of 50 jobs, 4 workers busy for 1640 s at most 219 s for each of 30. Fitted to
/// the mean completion time under the default scheduler.
const LONGER: f64 = 1.65;

fn longer(mut world: World) -> World {
    for job in &mut world.jobs {
        job.work_core_s *= LONGER;
        job.report_every_core_s *= LONGER;
    }
    world
}
