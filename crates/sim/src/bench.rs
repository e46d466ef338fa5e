//! What simulating and deciding cost on this machine.
//!
//! Traces are made up, so that the figures need no file; the number of jobs at which a figure was taken is part of its name. Everything but the times is the same on every
//! run.

use crate::trace::{Shape, offered_load, replay};
use gainshare_core::control::Control;
use gainshare_core::decide::gang::GangOrder;
use gainshare_core::model::{JobId, NodeId, PerResource, Span, Time};
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::signal::{Sample, Tracker};
use gainshare_core::view::{JobView, NodeView, Phase, View};
use serde_json::{Value, json};
use std::time::Instant;

/// Jobs of the largest public traces.
const TRACE_JOBS: usize = 80_000;

/// Runs everything; takes a few seconds.
pub fn run() -> Value {
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
        "peak_memory_mib": peak_memory_mib(),
    })
}

/// Nanoseconds for each event of a trace of `n` jobs under Tiresias, the best of several runs. Jobs are short, so that also the smallest trace spends
/// most of its time with a full cluster: what is compared is the cost of more jobs, not that of an emptier cluster.
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
    let mut control = Control::new(Policy::from(preset));
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
                consumed: PerResource { cpu, memory: cpu, ..PerResource::default() },
                ..JobView::default()
            }
        });
        let node = NodeView { id: NodeId(0), cores: 64.0, speed: 1.0, memory_bytes: 1 << 38, slots: None };
        let view = View { now, nodes: vec![node], jobs: jobs.collect() };
        let begun = Instant::now();
        let plan = control.step(&view);
        let took = begun.elapsed().as_secs_f64() * 1e3;
        if round > 2 && plan.is_some() {
            best = best.min(took);
        }
    }
    best
}

/// The most memory this process has had, where the kernel says.
fn peak_memory_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024.0)
}
