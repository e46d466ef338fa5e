//! What the papers' worlds have in common: equal nodes, jobs of known kinds at fixed or random times, one
//! disturbance.

use super::{Experiment, Measure, Setting};
use crate::models::{self, CORES, INTERFERENCE, Model};
use crate::random::Stream;
use crate::world::{Actuator, Law, Node, SimJob, World};
use gainshare_core::policy::{PlaceRule, Policy};
use serde_json::Value;

/// Kubernetes' default scheduler, as in the testbeds with several workers; the seed of the world is added to it.
pub(super) const DS: PlaceRule = PlaceRule::Kubernetes { seed: 0 };

/// A paper's policy by its two numbers: the threshold α and the interval in seconds.
pub(super) type PolicyMaker = fn(f64, u64) -> Policy;

/// An experiment of one setting; those with several add rows. On one node placement does not matter.
pub(super) fn experiment(
    (name, title): (&'static str, &'static str),
    world: fn(u64) -> World,
    (own, policy): (&'static str, Policy),
    published: Value,
) -> Experiment {
    Experiment { name, title, world, own: vec![(own, policy)], published, place: DS, rows: vec![] }
}

/// One line of a table: the policy with this α and interval.
pub(super) fn row(
    make_policy: PolicyMaker,
    alpha: f64,
    interval_s: u64,
    published: Option<f64>,
    measure: Measure,
) -> Setting {
    Setting { alpha, interval_s, policy: make_policy(alpha, interval_s), published, measure }
}

pub(super) fn workers(n: usize) -> Vec<Node> {
    let worker =
        |i| Node { name: format!("Worker-{}", i + 1), cores: CORES, speed: 1.0, memory_bytes: 64 << 30, slots: None };
    (0..n).map(worker).collect()
}

pub(super) fn world(seed: u64, nodes: Vec<Node>, jobs: Vec<SimJob>) -> World {
    World { seed, nodes, jobs, actuator: Actuator::Weight, interference: INTERFERENCE, law: Law::Turns }
}

/// `n` kinds drawn from `models`.
pub(super) fn kinds(seed: u64, n: u64, models: &'static [Model]) -> impl Iterator<Item = &'static Model> {
    (0..n).map(move |i| &models[Stream::new(seed, i, "kind").below(models.len())])
}

/// Each kind at a random time in 0…`until_s`.
pub(super) fn at_random<'m>(
    seed: u64,
    until_s: f64,
    kinds: impl Iterator<Item = &'m Model>,
) -> impl Iterator<Item = (f64, &'m Model)> {
    kinds.enumerate().map(move |(i, m)| (Stream::new(seed, i as u64, "arrival").uniform(0.0, until_s), m))
}

/// Jobs of these kinds at these times, numbered in order of arrival.
pub(super) fn submitted<'m>(seed: u64, times: impl Iterator<Item = (f64, &'m Model)>) -> Vec<SimJob> {
    let mut times: Vec<(f64, &Model)> = times.collect();
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    let jobs = times.into_iter().enumerate();
    jobs.map(|(i, (at, model))| models::job(model, seed, i as u64, format!("Job-{}", i + 1), at)).collect()
}
