//! A whole pass over a large cluster, as `run` makes it, without an API server.

use super::*;
use crate::placement::clock::Clock;
use crate::placement::snapshot::read;
use crate::state::lead::Leader;
use crate::state::metrics::Metrics;
use crate::state::workload::WorkloadKind;
use gainshare_core::policy::Preset;
use gainshare_core::view::Marks;
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::facts::{ContainerFacts, PodFacts};
use gainshare_kube_api::fixtures::job_policy;
use gainshare_kube_api::names::{JOB_LABEL, PodUid};
use gainshare_kube_api::resources::{Amounts, Resources};
use gainshare_kube_api::wire::{self, NodeTotals, SyncRequest};
use std::sync::Arc;
use std::time::Instant;

const NODES: usize = 5000;
const RUNNING: usize = 49_000;
const WAITING: usize = 1000;

fn leader() -> Leader {
    Leader::new(Arc::new(Metrics::new()), 1)
}

fn node(index: usize) -> NodeName {
    format!("node-{index}.example.com").into()
}

fn facts(index: usize, state: JobState) -> JobFacts {
    let policies = [job_policy(Preset::Specon), job_policy(Preset::Gainshare), job_policy(Preset::Flowcon2)];
    let is_running = matches!(state, JobState::Running { .. });
    JobFacts {
        uid: format!("8e6c2c1c-0000-4000-8000-{index:012}").into(),
        kind: WorkloadKind::TrainingJob,
        namespace: format!("team-{}", index % 10),
        name: format!("job-{index}"),
        owner: format!("team-{}", index % 10),
        arrived: jiff::Timestamp::now(),
        policy: policies[(index / NODES) % 3],
        state,
        movable: Ok(()),
        pod_uid: is_running.then(|| pod_uid(index)),
        cpu_request_milli: 500,
        memory_request_bytes: 256 << 20,
        tried: vec![],
        move_cost_s: None,
        marks: Marks::default(),
    }
}

fn pod_uid(index: usize) -> PodUid {
    format!("9f7d3d2d-0000-4000-8000-{index:012}").into()
}

fn pod(index: usize) -> PodFacts {
    let requests = Amounts { cpu_milli: Some(500), memory_bytes: Some(256 << 20) };
    let container = ContainerFacts {
        name: "main".to_owned(),
        resources: Resources { requests, limits: Amounts::default() },
        ..ContainerFacts::default()
    };
    PodFacts {
        uid: pod_uid(index),
        namespace: format!("team-{}", index % 10),
        name: format!("job-{index}-1"),
        node: Some(node(index % NODES)),
        labels: [(JOB_LABEL.to_owned(), format!("job-{index}"))].into(),
        containers: vec![container],
        running: true,
        holds_node: true,
        ..PodFacts::default()
    }
}

/// The `round`-th message of a node's agent.
fn message(at: usize, round: u64) -> SyncRequest {
    let job = |index: usize| wire::JobReport {
        uid: pod_uid(index),
        container: "main".to_owned(),
        growth: Some(0.02),
        signal: Some(wire::ReportedSignal {
            reports: round,
            first: Some(wire::ReportedValue { value: 2.3, at_us: 1_000_000 }),
            last: Some(wire::ReportedValue { value: 2.3 - 0.05 * round as f64, at_us: 1_000_000 * round }),
            longest_gap_us: 1_000_000,
            step: Some(100 * round),
            total: Some(1_000_000),
            outlook: Some([100.0 * round as f64, 1e6, 10.0]),
            consumed_cpu_node_s: round as f64,
            consumed_memory_node_s: 0.0,
            memory_used_bytes: None,
            usable: None,
            left: None,
            traffic: None,
        }),
        ..wire::JobReport::default()
    };
    SyncRequest {
        node: node(at),
        epoch: 1,
        seq: round,
        beat: NodeTotals { at_us: 1_000_000 * round, ..NodeTotals::default() },
        jobs: Some((at..RUNNING).step_by(NODES).map(job).collect()),
        ..SyncRequest::default()
    }
}

#[tokio::test]
async fn a_pass_over_5000_nodes_and_50000_jobs() {
    let leader = leader();
    leader.change(|world| {
        let (cpu_milli, memory_bytes) = (Some(32_000), Some(256 << 30));
        let facts = || NodeFacts { cpu_milli, memory_bytes, open: true, speed_percent: 100, ..NodeFacts::default() };
        (0..NODES).for_each(|index| world.put_node(&node(index), facts()));
        (0..RUNNING).for_each(|index| world.put_pod(pod(index)));
    });
    let running = |index| JobState::Running { node: node(index % NODES), epoch: 1, since: jiff::Timestamp::now() };
    leader.orders.publish_all((0..RUNNING).map(|index| facts(index, running(index))).collect());
    let clock = Clock { origin: Instant::now(), unix_us: 1_700_000_000_000_000 };
    let mut decision = Placements::new(Specon::default());
    let mut pass = |round: u64| {
        let mut agents = leader.agents.lock();
        (0..NODES).for_each(|index| drop(agents.receive(&message(index, round), Instant::now(), |_| true)));
        drop(agents);
        decision.decide(&read(&leader, leader.orders.facts(), &clock))
    };
    // The jobs that run are met for the first time, and then again.
    pass(1);
    pass(2);
    leader.orders.publish_all((RUNNING..RUNNING + WAITING).map(|index| facts(index, JobState::Waiting)).collect());
    let orders = pass(3);
    assert_eq!(orders.iter().filter(|order| order.kind == OrderKind::Place).count(), WAITING);
}
