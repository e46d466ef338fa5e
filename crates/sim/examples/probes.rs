//! What it is worth to know how fast a job with a deadline is with shares that it never had:
//! `cargo run --release -p gainshare-sim --example probes -- SEEDS FIRST`.
//!
//! `qos` runs three times in each world: without probes; as it is, with probes; and with the true speeds of a job as
//! soon as the job was measured at all. No probe can tell more than the true speed at every share, so the last one is
//! the most that probes could bring.
//!
//! Three kinds of world: the jobs of `gainshare paper qos`; an evening on one machine; and nights in which a job must
//! grow when an earlier deadline is met, while another one asks for a promise.

use gainshare_core::model::{JobId, Time};
use gainshare_core::plan::Reason;
use gainshare_core::policy::{Policy, Preset, ScaleRule};
use gainshare_core::view::Deadline;
use gainshare_sim::engine::{SimError, run_observed};
use gainshare_sim::models::{self, SPECON};
use gainshare_sim::paper::qos::Regime;
use gainshare_sim::random::Stream;
use gainshare_sim::world::{Actuator, AnnouncedTotal, Law, Node, Roughness, SimJob, Speedup, World};

const CORES: f64 = 8.0;

fn job(seed: u64, entity: u64, arrival_s: f64, alone_s: f64, parallel: f64, noise: f64) -> SimJob {
    let mut job = models::job(&SPECON[0], seed, entity, format!("job-{entity}"), arrival_s);
    job.speedup = Speedup::Amdahl { parallel };
    job.max_cores = CORES;
    job.work_core_s = alone_s * job.speedup.rate(CORES);
    job.report_every_core_s = job.work_core_s / 300.0;
    job.claim = AnnouncedTotal::Total;
    if noise > 0.0 {
        let rough = Roughness { startup: 0.0, step_spread: noise, evaluation: (0, 0.0), stops_at: None };
        job.roughen(&rough, &mut Stream::new(seed, entity, "rough"));
    }
    job
}

fn world(seed: u64, jobs: Vec<SimJob>) -> World {
    let node = Node { name: "machine".into(), cores: CORES, speed: 1.0, memory_bytes: 1 << 40, slots: None };
    World { seed, nodes: vec![node], jobs, actuator: Actuator::Weight, interference: 0.0, law: Law::default() }
}

fn due(job: &mut SimJob, at_s: f64) {
    job.deadline = Some(Deadline::strict(Time::from_secs_f64(at_s)));
}

/// Ten jobs with deadlines come within an hour, and two without run all the time.
fn evening(seed: u64, noise: f64, longest_s: f64) -> World {
    let mut jobs: Vec<SimJob> = (0..2).map(|i| job(seed, i, 0.0, 3000.0, 0.95, noise)).collect();
    let mut at_s = 0.0;
    for i in 2..12 {
        let mut draw = Stream::new(seed, i, "evening");
        at_s += 360.0 * draw.exponential();
        let alone_s = draw.uniform(60.0, longest_s);
        let mut one = job(seed, i, at_s, alone_s, draw.uniform(0.8, 1.0), noise);
        due(&mut one, at_s + alone_s * draw.uniform(2.0, 7.0));
        jobs.push(one);
    }
    world(seed, jobs)
}

/// One job must end soon, one later; a third one comes while the second still has a small share.
fn night(seed: u64, noise: f64, is_tight: bool) -> World {
    let mut draw = Stream::new(seed, 0, "night");
    let mut parallel = || draw.uniform(0.8, 1.0);
    let laws = [parallel(), parallel(), parallel()];
    let (later, last) = if is_tight { ((900.0, 1250.0), 700.0) } else { ((500.0, 1100.0), 500.0) };
    let mut jobs = vec![job(seed, 0, 0.0, 2500.0, 0.95, noise)];
    let mut a = job(seed, 1, 0.0, draw.uniform(450.0, 650.0), laws[0], noise);
    due(&mut a, 1000.0);
    let mut b = job(seed, 2, draw.uniform(0.0, 30.0), draw.uniform(later.0, later.1), laws[1], noise);
    due(&mut b, 2000.0);
    let mut c = job(seed, 3, draw.uniform(200.0, 800.0), draw.uniform(50.0, last), laws[2], noise);
    due(&mut c, draw.uniform(1500.0, 2300.0));
    jobs.extend([a, b, c]);
    world(seed, jobs)
}

/// One promised job beside two without deadlines.
fn alone(seed: u64, noise: f64) -> World {
    let mut draw = Stream::new(seed, 0, "alone");
    let mut jobs: Vec<SimJob> = (0..2).map(|i| job(seed, i, 0.0, 2000.0, 0.95, noise)).collect();
    let mut one = job(seed, 2, 0.0, draw.uniform(100.0, 500.0), draw.uniform(0.8, 1.0), noise);
    due(&mut one, draw.uniform(600.0, 2000.0));
    jobs.push(one);
    world(seed, jobs)
}

#[derive(Default)]
struct Tally {
    jobs: usize,
    met: usize,
    /// Promised and missed.
    broken: usize,
    /// The sum of the parts of the time before the deadline at which these misses were known.
    lead: f64,
    reserved_node_s: f64,
    others_s: f64,
}

impl Tally {
    fn run(worlds: impl Iterator<Item = World>, policy: &Policy) -> Result<Tally, SimError> {
        let mut tally = Tally::default();
        for world in worlds {
            let mut last_promise = vec![None; world.jobs.len()];
            let outcome = run_observed(&world, policy, &mut |decision| {
                for (&JobId(job), verdict) in &decision.plan.verdicts {
                    if matches!(verdict.reason, Reason::MeetsDeadline { .. } | Reason::Early { .. }) {
                        last_promise[job as usize] = Some(decision.plan.at);
                    }
                }
            })?;
            for (job, promised_at) in outcome.jobs.iter().zip(last_promise) {
                let Some(met) = job.met() else {
                    tally.others_s += job.completion_s();
                    continue;
                };
                tally.jobs += 1;
                tally.met += usize::from(met);
                tally.reserved_node_s += job.allocated_node_s;
                if let (false, Some(at), Some(due)) = (met, promised_at, job.deadline) {
                    tally.broken += 1;
                    tally.lead += due.since(at).as_secs_f64() / due.since(job.arrival).as_secs_f64();
                }
            }
        }
        Ok(tally)
    }
}

/// The policy `qos`, with or without probes.
fn qos(probes: bool) -> Policy {
    let mut policy = Policy::from(Preset::Qos);
    if let ScaleRule::Deadline(numbers) = &mut policy.scale {
        numbers.probes = probes;
    }
    policy
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seeds: u64 = std::env::args().nth(1).map_or(Ok(20), |s| s.parse())?;
    let first: u64 = std::env::args().nth(2).map_or(Ok(0), |s| s.parse())?;
    type Make = fn(u64) -> World;
    let kinds: [(&str, Make); 12] = [
        ("alone, exact", |s| alone(s, 0.0)),
        ("alone, 5 %", |s| alone(s, 0.05)),
        ("night, exact", |s| night(s, 0.0, false)),
        ("night, 5 %", |s| night(s, 0.05, false)),
        ("tight night, exact", |s| night(s, 0.0, true)),
        ("tight night, 5 %", |s| night(s, 0.05, true)),
        ("evening, exact", |s| evening(s, 0.0, 500.0)),
        ("evening, 5 %", |s| evening(s, 0.05, 500.0)),
        ("full evening, exact", |s| evening(s, 0.0, 900.0)),
        ("full evening, 5 %", |s| evening(s, 0.05, 900.0)),
        ("qos short, forgetful", |s| Regime::Short.world(s, false).forgetful()),
        ("qos short", |s| Regime::Short.world(s, false)),
    ];
    for (name, make) in kinds {
        for (variant, probes, shown) in [("measured", false, false), ("probes", true, false), ("known", false, true)] {
            let worlds = (first..first + seeds).map(|seed| {
                let mut world = make(seed);
                world.jobs.iter_mut().for_each(|job| job.shows_pace = shown);
                world
            });
            let Tally { jobs, met, broken, lead, reserved_node_s, others_s } = Tally::run(worlds, &qos(probes))?;
            println!(
                "{name:22} {variant:9} met {met:4} of {jobs:4}, promised and missed {broken:3}, known at {:.3} of the time \
                 before, reserved {reserved_node_s:.0} node-seconds, others {others_s:.0} s",
                lead / broken.max(1) as f64,
            );
        }
    }
    Ok(())
}
