//! What simulating and deciding cost on this machine, as JSON on standard output: `cargo run --release -p
//! gainshare-sim --example bench`.
//!
//! Traces are made up, so that the figures need no file; the number of jobs at which a figure was taken is
//! part of its name. Everything but the times is the same on every run.

use gainshare_core::decider::Decider;
use gainshare_core::forecast::{Arrivals, forecast};
use gainshare_core::model::{JobId, NodeId, PerResource, Span, Time};
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::signal::speed::Pace;
use gainshare_core::signal::{Sample, Signal, Tracker};
use gainshare_core::view::{Deadline, JobView, NodeView, Phase, View};
use gainshare_sim::trace::gang::GangOrder;
use gainshare_sim::trace::{Shape, offered_load, replay};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;

/// Jobs of the largest public traces.
const TRACE_JOBS: usize = 80_000;

fn main() {
    println!("{:#}", measure());
}

/// Runs everything; takes a few seconds.
fn measure() -> Value {
    let trace = Shape::typical().generate(TRACE_JOBS, 1);
    let devices = (offered_load(&trace) / 0.9).ceil() as u32;
    let timed = |order: GangOrder| {
        let begun = Instant::now();
        let out = replay(&trace, devices, order, Span::from_secs(30));
        json!({"seconds": begun.elapsed().as_secs_f64(), "events": out.events, "longest_queue": out.longest_queue})
    };
    let per_event = json!({
        "1000": event_cost_ns(1_000), "10000": event_cost_ns(10_000), "100000": event_cost_ns(100_000),
    });
    json!({
        "replay_80000_jobs": {
            "fifo": timed(GangOrder::Fifo), "tiresias": timed(GangOrder::tiresias()), "srtf": timed(GangOrder::Srtf),
        },
        "event_cost_ns_by_jobs": per_event,
        "decision_over_1000_jobs_ms": {
            "flowcon": decision_ms(Preset::Flowcon), "gainshare": decision_ms(Preset::Gainshare), "na": decision_ms(Preset::Na),
        },
        "forecast_ms_by_jobs": {
            "na": {"50": forecast_ms(Preset::Na, 50), "600": forecast_ms(Preset::Na, 600)},
            "qos": {"50": forecast_ms(Preset::Qos, 50), "600": forecast_ms(Preset::Qos, 600)},
            "gainshare": {"50": forecast_ms(Preset::Gainshare, 50), "600": forecast_ms(Preset::Gainshare, 600)},
        },
        "pass_over_5000_nodes_50000_jobs": {
            "specon": cluster_pass(Preset::Specon), "flowcon2": cluster_pass(Preset::Flowcon2),
            "gainshare": cluster_pass(Preset::Gainshare),
        },
        "peak_memory_mib": peak_memory_mib(),
    })
}

/// Nanoseconds for each event of a trace of `n` jobs under Tiresias, the best of several runs. Jobs are
/// short, so that also the smallest trace spends most of its time with a full cluster: what is compared is
/// the cost of more jobs, not that of an emptier cluster.
fn event_cost_ns(n: usize) -> f64 {
    let mut shape = Shape::typical();
    for duration in shape.sizes.iter_mut().flat_map(|s| &mut s.durations_s) {
        *duration /= 20.0;
    }
    let trace = shape.generate(n, 2);
    let devices = (offered_load(&trace) / 0.9).ceil() as u32;
    let once = || {
        let begun = Instant::now();
        let events = replay(&trace, devices, GangOrder::tiresias(), Span::from_secs(30)).events;
        begun.elapsed().as_nanos() as f64 / events as f64
    };
    (0..3 + 20_000 / n).map(|_| once()).fold(f64::INFINITY, f64::min)
}

/// Milliseconds for one due decision over 1,000 jobs on one node, all reporting; the best of several.
fn decision_ms(preset: Preset) -> f64 {
    const JOBS: u64 = 1_000;
    let mut decider = Decider::new(Policy::from(preset));
    let mut trackers = vec![Tracker::default(); JOBS as usize];
    let mut best = f64::INFINITY;
    for round in 0..12u64 {
        let now = Time::ZERO + Span::from_secs(400 * round);
        let jobs = (0..JOBS).map(|i| {
            let tracker = &mut trackers[i as usize];
            let value = 1.0 / (1.0 + (round + i % 7) as f64);
            tracker.push(now, Sample { value, step: Some(round), total: None });
            let cpu = round as f64 * 0.4 * (1.0 + (i % 3) as f64);
            JobView {
                id: JobId(i),
                phase: Phase::Running { node: NodeId(0), since: Time::ZERO, attempt: 1 },
                signal: tracker.signal(),
                consumed_node_s: PerResource { cpu, memory: cpu, ..PerResource::default() },
                ..JobView::default()
            }
        });
        let node =
            NodeView { id: NodeId(0), cores: 64.0, speed: 1.0, memory_bytes: 1 << 38, slots: None, idle_node_s: None };
        let view = View { now, nodes: vec![node], jobs: jobs.collect() };
        let begun = Instant::now();
        let decision = decider.decide(view).decision();
        let took = begun.elapsed().as_secs_f64() * 1e3;
        if round > 2 && decision.is_some() {
            best = best.min(took);
        }
    }
    best
}

/// Milliseconds for the predicted ends of all jobs of one node, later arrivals included; the best of several.
fn forecast_ms(preset: Preset, jobs: u64) -> f64 {
    let node =
        NodeView { id: NodeId(0), cores: 64.0, speed: 1.0, memory_bytes: 1 << 38, slots: None, idle_node_s: None };
    let mut arrivals = Arrivals::default();
    let mut view = View { now: Time::ZERO, nodes: vec![node], jobs: vec![] };
    for i in 0..jobs {
        view.now = Time::ZERO + Span::from_secs(i);
        let mut tracker = Tracker::default();
        for step in 1..4 {
            tracker.push(view.now, Sample { value: 1.0 / step as f64, step: Some(step), total: Some(50 + i % 30) });
        }
        let pace = Some(Pace::from_law(0.01, 0.1 + 0.01 * (i % 7) as f64, 0.5));
        let due = view.now + Span::from_secs(50 * (i + 1));
        view.jobs.push(JobView {
            id: JobId(i),
            arrived: view.now,
            phase: Phase::Running { node: NodeId(0), since: view.now, attempt: 1 },
            signal: Signal { pace, ..tracker.signal() },
            deadline: i.is_multiple_of(2).then(|| Deadline::strict(due)),
            ..JobView::default()
        });
        arrivals.observe(&view);
    }
    let mut decider = Decider::new(Policy::from(preset));
    decider.decide(view.clone());
    let once = || {
        let begun = Instant::now();
        std::hint::black_box(forecast(&decider, &view, &arrivals));
        begun.elapsed().as_secs_f64() * 1e3
    };
    (0..5).map(|_| once()).fold(f64::INFINITY, f64::min)
}

/// Passes over a whole cluster: jobs on unequal nodes report, and turn about a twentieth of the nodes run
/// empty, to which others may move, and as many new jobs wait for a place. Seconds of the median and the
/// slowest pass.
fn cluster_pass(preset: Preset) -> Value {
    const NODES: u32 = 5_000;
    const JOBS: usize = 50_000;
    let nodes: Vec<NodeView> = (0..NODES)
        .map(|i| {
            let cores = [8.0, 16.0, 32.0][i as usize % 3];
            NodeView { id: NodeId(i), cores, speed: 1.0, memory_bytes: 1 << 36, slots: Some(32), idle_node_s: None }
        })
        .collect();
    let mut decider = Decider::new(Policy::from(preset));
    let mut jobs: BTreeMap<u64, PassJob> = BTreeMap::new();
    let (mut next, mut seconds, mut placed, mut placing_s, mut moved) = (0, vec![], 0, 0.0, 0);
    for round in 0..16u64 {
        let now = Time::ZERO + Span::from_secs(60 * (round + 1));
        if round % 2 == 0 {
            while jobs.len() < JOBS {
                jobs.insert(next, PassJob::default());
                next += 1;
            }
        } else {
            let emptied = |node: NodeId| u64::from(node.0) % 20 == round % 20;
            jobs.retain(|_, job| !job.node.is_some_and(emptied));
        }
        let view =
            View { now, nodes: nodes.clone(), jobs: jobs.iter_mut().map(|(i, job)| job.go_on(*i, now)).collect() };
        let begun = Instant::now();
        let decision = decider.decide(view).decision();
        let took = begun.elapsed().as_secs_f64();
        let Some(plan) = decision.map(|d| d.plan) else { continue };
        // The first places everybody at once.
        if round > 0 {
            seconds.push(took);
            if !plan.starts.is_empty() {
                placing_s += took;
            }
            placed += plan.starts.len();
            moved += plan.moves.len();
        }
        let places = plan.starts.iter().map(|s| (s.job, s.node)).chain(plan.moves.iter().map(|m| (m.job, m.to)));
        for (job, node) in places {
            jobs.entry(job.0).and_modify(|job| job.node = Some(node));
        }
    }
    seconds.sort_by(f64::total_cmp);
    json!({
        "median_s": seconds[seconds.len() / 2], "slowest_s": seconds.last(), "placed": placed, "moved": moved,
        "placements_per_s": placed as f64 / placing_s,
    })
}

/// A job of [`cluster_pass`].
#[derive(Default)]
struct PassJob {
    node: Option<NodeId>,
    rounds: u64,
    tracker: Tracker,
    consumed_node_s: f64,
}

impl PassJob {
    /// A minute passes. Every fifth job hardly slackens; the others converge within some rounds.
    fn go_on(&mut self, id: u64, now: Time) -> JobView {
        if self.node.is_some() {
            self.rounds += 1;
            self.consumed_node_s += 60.0 * [0.05, 0.1, 0.2][id as usize % 3];
            let value = if id.is_multiple_of(5) {
                1.0 - 0.03 * self.rounds as f64
            } else {
                (-0.7 * (self.rounds * (1 + id % 5)) as f64).exp()
            };
            self.tracker.push(now, Sample { value, step: Some(self.rounds), total: Some(30 + id % 40) });
        }
        JobView {
            id: JobId(id),
            phase: self.node.map_or(Phase::Waiting, |node| Phase::Running { node, since: Time::ZERO, attempt: 1 }),
            signal: self.tracker.signal(),
            consumed_node_s: PerResource {
                cpu: self.consumed_node_s,
                memory: self.consumed_node_s,
                ..PerResource::default()
            },
            ..JobView::default()
        }
    }
}

/// The most memory this process has had, where the kernel says.
fn peak_memory_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024.0)
}
