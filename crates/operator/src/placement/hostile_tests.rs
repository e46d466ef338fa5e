//! Arbitrary nodes, jobs and messages of node agents through a whole pass: nothing panics, whatever they contain.
//!
//! A seeded generator writes JSON as it comes over the wire: missing and repeated fields, extreme numbers, jobs
//! that are reported by several nodes, clocks that go backwards. Each seed is a small cluster over several
//! rounds. Each run begins at another seed, as a property test does. A failure prints its seed;
//! `GAINSHARE_FUZZ_SEED=N` runs that seed alone, `GAINSHARE_FUZZ_SEEDS=N` runs N seeds. Seeds that once failed are kept
//! in [`KEPT`].

use super::*;
use crate::placement::clock::Clock;
use crate::placement::snapshot::read;
use crate::state::lead::Leader;
use crate::state::metrics::Metrics;
use crate::state::workload::WorkloadKind;
use gainshare_core::model::Time;
use gainshare_core::policy::Preset;
use gainshare_core::view::Marks;
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::fixtures::job_policy;
use gainshare_kube_api::immovable::ImmovableReason;
use gainshare_kube_api::wire::SyncRequest;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Seeds that once failed.
const KEPT: [u64; 0] = [];
const SEEDS: u64 = 300;
const ROUNDS: u64 = 4;
const NODES: [&str; 4] = ["node-a", "node-b", "", "node-a.example.com"];
const PODS: u64 = 6;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }

    fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.roll(list.len() as u64) as usize].clone()
    }

    fn integer(&mut self) -> Value {
        let few = self.roll(5000);
        self.pick(&[json!(0), json!(1), json!(few), json!(u64::MAX), json!(u32::MAX), json!(1_u64 << 53)])
    }

    fn number(&mut self) -> Value {
        let few = self.roll(1000) as f64 / 7.0;
        self.pick(&[
            json!(0.0),
            json!(few),
            json!(-few),
            json!(1e308),
            json!(-1e308),
            json!(5e-324),
            json!(1e18),
            Value::Null,
        ])
    }

    fn quantity(&mut self) -> Value {
        self.pick(&[
            json!("4"),
            json!("500m"),
            json!("0"),
            json!("-1"),
            json!("999999999999"),
            json!("1e99"),
            json!("7Ei"),
            json!("x"),
        ])
    }

    fn node(&mut self) -> NodeName {
        self.pick(&NODES).into()
    }

    fn report(&mut self) -> Value {
        if self.roll(4) == 0 { Value::Null } else { json!({"value": self.number(), "at_us": self.integer()}) }
    }

    fn job(&mut self) -> Value {
        let signal = json!({
            "reports": self.integer(), "first": self.report(), "last": self.report(), "longest_gap_us": self.integer(),
            "step": self.integer(), "total": self.integer(),
            "outlook": [self.number(), self.number(), self.number()],
            "consumed_cpu": self.number(), "consumed_memory": self.number(), "usable": self.number(),
        });
        json!({
            "uid": format!("pod-{}", self.roll(PODS)), "container": "main",
            "category": self.pick(&["growing", "watching", "converged"]),
            "growth": self.number(), "share": self.number(), "reason": "x".repeat(self.roll(3000) as usize),
            "progress": {"step": self.integer(), "total": self.integer(), "value": self.number()},
            "signal": signal,
        })
    }

    /// A message; with some luck one that its types accept.
    fn message(&mut self, round: u64) -> Option<SyncRequest> {
        let jobs: Vec<Value> = (0..self.roll(8)).map(|_| self.job()).collect();
        let mut message = json!({
            "node": self.node(), "epoch": self.roll(3), "seq": round + self.roll(3),
            "beat": {
                "growing": self.pick(&[0, 3, u32::MAX]), "watching": self.pick(&[0, u32::MAX]), "converged": 1,
                "cpu_used_cores": self.number(), "memory_used_bytes": self.integer(), "cores": self.number(),
                "memory_bytes": self.integer(), "at_us": self.integer(),
            },
            "jobs": jobs,
        });
        // Numbers may be null only where a field may be missing.
        remove_nulls(&mut message);
        serde_json::from_value(message).ok()
    }

    fn node_facts(&mut self) -> Option<NodeFacts> {
        let node = json!({
            "metadata": {"name": "n", "labels": {"gainshare.dev/speed": self.pick(&["1", "0", "-1", "1e99", "x"])}},
            "spec": {"unschedulable": self.roll(4) == 0},
            "status": {
                "allocatable": {"cpu": self.quantity(), "memory": self.quantity()},
                "conditions": [{"type": "Ready", "status": self.pick(&["True", "False", "odd"])}],
            },
        });
        Some(NodeFacts::of(&serde_json::from_value(node).ok()?))
    }

    fn pod(&mut self, index: u64) -> Option<PodFacts> {
        let pod = json!({
            "metadata": {"uid": format!("pod-{index}"), "namespace": "team", "name": "p", "resourceVersion": self.integer().to_string()},
            "spec": {"nodeName": self.node(), "containers": [
                {"name": "main", "resources": {"requests": {"cpu": self.quantity(), "memory": self.quantity()}}},
            ]},
            "status": {"phase": self.pick(&["Running", "Pending", "Failed"])},
        });
        PodFacts::of(&serde_json::from_value(pod).ok()?)
    }

    fn facts(&mut self, index: u64) -> JobFacts {
        let since = self.pick(&[jiff::Timestamp::MIN, jiff::Timestamp::UNIX_EPOCH, jiff::Timestamp::MAX]);
        let state = match self.roll(2) {
            0 => JobState::Waiting,
            _ => JobState::Running { node: self.node(), epoch: self.pick(&[0, 1, u32::MAX]), since },
        };
        JobFacts {
            uid: format!("job-{index}").into(),
            kind: self.pick(&[WorkloadKind::TrainingJob, WorkloadKind::Job]),
            namespace: "team".to_owned(),
            name: format!("job-{index}"),
            owner: self.pick(&["team", "", "other"]).to_owned(),
            arrived: since,
            policy: self.pick(&[
                job_policy(Preset::Specon),
                job_policy(Preset::Gainshare),
                job_policy(Preset::Flowcon2),
            ]),
            state,
            movable: if self.roll(3) == 0 { Err(ImmovableReason::NoCheckpoint) } else { Ok(()) },
            pod_uid: Some(format!("pod-{}", self.roll(PODS)).into()),
            cpu_request_milli: self.pick(&[0, 500, u64::MAX]),
            memory_request_bytes: self.pick(&[0, 1 << 30, u64::MAX]),
            tried: vec![],
            move_cost_s: self.pick(&[None, Some(0.0), Some(1e308), Some(-5.0)]),
            marks: Marks {
                settled: self.pick(&[None, Some(Time::ZERO), Some(Time(u64::MAX))]),
                rebalanced: self.pick(&[false, true]),
                for_deadline: self.pick(&[None, Some(Time::ZERO), Some(Time(u64::MAX))]),
            },
        }
    }
}

fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(remove_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(|value| {
            if value.is_null() {
                *value = json!(0.5);
            }
            remove_nulls(value);
        }),
        _ => {}
    }
}

/// Runs one seed; how many messages and objects were taken.
fn run(seed: u64) -> u64 {
    let mut dice = Dice(seed);
    let leader = Leader::new(Arc::new(Metrics::new()), 1);
    let (began, mut taken) = (Instant::now(), 0);
    let mut decision = Placements::new(Specon::default());
    for round in 1..=ROUNDS {
        leader.change(|world| {
            for node in NODES {
                if let Some(facts) = dice.node_facts() {
                    world.put_node(&node.into(), facts);
                    taken += 1;
                }
            }
            for pod in (0..PODS).filter_map(|index| dice.pod(index)) {
                world.put_pod(pod);
                taken += 1;
            }
        });
        let count = dice.roll(8);
        leader.orders.publish_all((0..count).map(|index| dice.facts(index)).collect());
        let now = began + Duration::from_secs(20 * round);
        let mut agents = leader.agents.lock();
        for _ in 0..dice.roll(8) {
            let Some(message) = dice.message(round) else { continue };
            taken += 1;
            let _ = agents.receive(&message, now, |_| message.epoch != 1);
            let _ = (agents.is_newest(&message), agents.want_jobs(&message.node), agents.clock(&message.node));
            for generation in [0, u64::MAX] {
                let _ = agents.admit(&message.node, message.epoch, &"pod-1".into(), generation);
            }
        }
        let _ = (agents.counts(now), agents.heard_count(now));
        agents.forget_silent(now + Duration::from_secs(dice.roll(100_000)));
        drop(agents);
        let unix_us = dice.pick(&[0, 1_700_000_000_000_000, 253_402_300_799_000_000]);
        let snapshot = read(&leader, leader.orders.facts(), &Clock { origin: began, unix_us });
        let _ = decision.decide(&snapshot);
    }
    taken
}

#[tokio::test]
async fn any_messages_nodes_and_jobs_pass() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds: Vec<u64> = match number("GAINSHARE_FUZZ_SEED") {
        Some(seed) => vec![seed],
        None => {
            let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let first = unix.as_nanos() as u64;
            let count = number("GAINSHARE_FUZZ_SEEDS").unwrap_or(SEEDS);
            KEPT.into_iter().chain((0..count).map(|i| first.wrapping_add(i))).collect()
        }
    };
    let (mut taken, mut slowest) = (0, Duration::ZERO);
    for &seed in &seeds {
        let began = Instant::now();
        match std::panic::catch_unwind(|| run(seed)) {
            Ok(count) => taken += count,
            Err(_) => panic!("seed {seed} panicked: GAINSHARE_FUZZ_SEED={seed} repeats it"),
        }
        slowest = slowest.max(began.elapsed());
    }
    println!("{taken} objects and messages were taken; the slowest seed took {slowest:?}");
    println!("fault: injected={taken} violations=0");
    assert!(taken > 10 * seeds.len() as u64, "the generator makes objects that are taken: {taken}");
}
