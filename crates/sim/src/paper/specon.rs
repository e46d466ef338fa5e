//! SpeCon's evaluation (thesis, section 6.2): clusters of four and eight workers under Kubernetes.

use super::{Experiment, Measure, Setting};
use crate::models::{self, CORES, INTERFERENCE, Model, SPECON};
use crate::random::Stream;
use crate::world::{Actuator, Job, Node, World};
use gainshare_core::model::Span;
use gainshare_core::policy::{MoveRule, PlaceRule, Policy, Specon};
use serde_json::json;

/// The testbed's default scheduler.
const DS: PlaceRule = PlaceRule::Kubernetes { seed: 0 };

pub(super) fn experiments() -> Vec<Experiment> {
    vec![
        Experiment {
            name: "specon-fixed",
            title: "SpeCon, Figure 6.16: 20 VAE jobs, one every 50 s, 4 workers",
            world: |seed| vae(seed, |i| 50.0 * i as f64),
            own: vec![("specon", specon(0.01, 30))],
            published: json!({
                "faster": "11 of 20", "best_job_s": {"na": 348.7, "specon": 217.6},
                "mean_completion_s": {"na": 275.2, "specon": 234.7}, "makespan_s": {"na": 1260, "specon": 1190},
            }),
            place: DS,
            rows: vec![],
        },
        Experiment {
            name: "specon-random-interval",
            title: "SpeCon, Figure 6.17: 20 VAE jobs at random in 0–300 s, α = 0.05, three intervals",
            world: |seed| vae_at_random(seed, 20),
            own: vec![("specon", specon(0.05, 30))],
            published: json!({
                "mean_reduction_percent_interval_20_25_30": [1.1, 5.2, 8.0],
                "job_1_s": {"na": 461.2, "specon_interval_20_25_30": [420.2, 345.8, 379.9]},
            }),
            place: DS,
            rows: vec![row(0.05, 20, 1.1), row(0.05, 25, 5.2), row(0.05, 30, 8.0)],
        },
        Experiment {
            name: "specon-random-alpha",
            title: "SpeCon, Figure 6.18: 20 VAE jobs at random in 0–300 s, every 30 s, three thresholds",
            world: |seed| vae_at_random(seed, 20),
            own: vec![("specon", specon(0.01, 30))],
            published: json!({"mean_reduction_percent_alpha_1_5_10": [7.2, 3.2, 9.5]}),
            place: DS,
            rows: vec![row(0.01, 30, 7.2), row(0.05, 30, 3.2), row(0.10, 30, 9.5)],
        },
        Experiment {
            name: "specon-20",
            title: "SpeCon, Figure 6.19: 20 jobs of random models in 0–300 s, 4 workers",
            world: |seed| mixed(seed, 20, 300.0, 4),
            own: vec![("specon", specon(0.01, 30))],
            published: json!({
                "faster": "15 of 20", "best_job_s": {"na": 1167.8, "specon": 799.2},
                "mean_reduction_percent": 13.6, "makespan_s": {"na": 1421, "specon": 1070},
            }),
            place: DS,
            rows: vec![],
        },
        Experiment {
            name: "specon-30",
            title: "SpeCon, Figures 6.20–6.24: 30 jobs of random models in 0–300 s, 4 workers",
            world: |seed| mixed(seed, 30, 300.0, 4),
            own: vec![("specon", specon(0.01, 30))],
            published: json!({
                "faster": "20 of 30", "best_job_s": {"na": 447.4, "specon": 314.9},
                "mean_completion_s": {"na": 799.5, "specon": 752.6}, "makespan_s": {"na": 1640, "specon": 1370},
            }),
            place: DS,
            rows: vec![],
        },
        Experiment {
            name: "specon-50",
            title: "SpeCon, Figure 6.25: 50 jobs of random models in 0–1200 s, 8 workers",
            world: |seed| longer(mixed(seed, 50, 1200.0, 8)),
            own: vec![("specon", specon(0.01, 30))],
            published: json!({
                "faster": "30 of 50", "best_job_s": {"na": 467.5, "specon": 273.4},
                "mean_completion_s": {"na": 596.3, "specon": 553.0}, "makespan_s": {"na": 2070, "specon": 1840},
            }),
            place: DS,
            rows: vec![],
        },
    ]
}

fn specon(alpha: f64, interval_s: u64) -> Policy {
    let rule = Specon { alpha, interval: Span::from_secs(interval_s), ..Specon::default() };
    Policy { moves: MoveRule::Specon(rule), place: DS, ..Policy::default() }
}

fn row(alpha: f64, interval_s: u64, published: f64) -> Setting {
    let policy = specon(alpha, interval_s);
    Setting { alpha, interval_s, policy, published: Some(published), measure: Measure::Mean }
}

pub(super) fn workers(n: usize) -> Vec<Node> {
    let worker =
        |i| Node { name: format!("Worker-{}", i + 1), cores: CORES, speed: 1.0, memory_bytes: 64 << 30, slots: None };
    (0..n).map(worker).collect()
}

pub(super) fn cluster(seed: u64, nodes: Vec<Node>, jobs: Vec<Job>) -> World {
    World { seed, nodes, jobs, actuator: Actuator::Weight, interference: INTERFERENCE }
}

/// Jobs of these kinds at these times, named in order of arrival.
pub(super) fn submitted(seed: u64, mut times: Vec<(f64, &Model)>) -> Vec<Job> {
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    let jobs = times.into_iter().enumerate();
    jobs.map(|(i, (at, model))| models::job(model, seed, i as u64, format!("Job-{}", i + 1), at)).collect()
}

fn vae(seed: u64, at: impl Fn(u64) -> f64) -> World {
    cluster(seed, workers(4), submitted(seed, (0..20).map(|i| (at(i), &SPECON[0])).collect()))
}

fn vae_at_random(seed: u64, n: u64) -> World {
    let at = |i| Stream::new(seed, i, "arrival").uniform(0.0, 300.0);
    cluster(seed, workers(4), submitted(seed, (0..n).map(|i| (at(i), &SPECON[0])).collect()))
}

pub(super) fn at_random(seed: u64, n: u64, until_s: f64) -> Vec<Job> {
    let draw = |i| {
        let kind = Stream::new(seed, i, "kind").below(SPECON.len());
        (Stream::new(seed, i, "arrival").uniform(0.0, until_s), &SPECON[kind])
    };
    submitted(seed, (0..n).map(draw).collect())
}

fn mixed(seed: u64, n: u64, until_s: f64, nodes: usize) -> World {
    cluster(seed, workers(nodes), at_random(seed, n, until_s))
}

/// The published means cannot come from the same jobs as those of the smaller cluster: 8 workers busy for 2070 s are 331 s for each of 50 jobs,
/// 4 workers busy for 1640 s at most 219 s for each of 30. Fitted to the mean completion time under the default scheduler.
const LONGER: f64 = 1.65;

fn longer(mut world: World) -> World {
    for job in &mut world.jobs {
        job.work *= LONGER;
        job.report_every *= LONGER;
    }
    world
}
