//! Which nodes are needed, on made-up jobs and nodes.

use super::*;
use crate::scaler::kinds::to_core_room;
use crate::scaler::snapshot::LateWorkload;
use crate::state::workload::{WorkloadKey, WorkloadKind};
use crate::state::world::World;
use gainshare_core::policies::deadline::LateJob;
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::deadline::Deadline;
use gainshare_kube_api::names::NamespacedName;
use jiff::Timestamp;

/// The kinds of a cluster with a node of each of these sizes, in cores and GiB.
fn kinds(sizes: &[(u64, u64)]) -> Kinds {
    let mut world = World::new(1);
    for (index, (cores, gib)) in sizes.iter().enumerate() {
        let (cpu_milli, memory_bytes) = (Some(cores * 1000), Some(gib << 30));
        let facts = NodeFacts { cpu_milli, memory_bytes, open: true, speed_percent: 100, ..NodeFacts::default() };
        world.put_node(&format!("n{index}").into(), facts);
    }
    let mut kinds = Kinds::default();
    kinds.observe(&world, Timestamp::UNIX_EPOCH);
    kinds
}

/// A job that waits for `pods` pods of these cores and GiB.
fn waits(uid: &str, pods: usize, (cores, gib): (u64, u64), is_visible: bool) -> LateWorkload {
    LateWorkload {
        key: WorkloadKey::new(WorkloadKind::TrainingJob, NamespacedName::new("team", uid)),
        uid: uid.into(),
        deadline: Deadline { at_ms: 3_600_000, tolerance_ms: 0 },
        job: LateJob {
            pods: vec![to_core_room((cores * 1000, gib << 30)); pods],
            left: None,
            left_s: 3600.0,
            runs: false,
        },
        is_visible,
    }
}

fn need(late: Vec<LateWorkload>, kinds: &Kinds) -> NeedPlan {
    plan(&NeedSnapshot { late, free: vec![] }, kinds)
}

#[test]
fn each_job_learns_of_its_own_nodes() {
    let late = vec![waits("a", 1, (3, 1), true), waits("gang", 3, (3, 1), false)];
    let plan = need(late, &kinds(&[(4, 16)]));
    assert_eq!((plan.jobs["a"].count, plan.jobs["gang"].count), (1, 3));
    assert_eq!(plan.jobs["gang"].to_string(), "3 more nodes of 4 cores / 16 GiB");
    assert_eq!(plan.kinds, [("4000m-16384mi".to_owned(), KindNeed { count: 4, hidden: 3 })].into());
}

#[test]
fn a_waiting_pod_is_its_own_request() {
    let plan = need(vec![waits("a", 1, (3, 1), true), waits("b", 1, (1, 1), true)], &kinds(&[(4, 16)]));
    assert_eq!(plan.kinds["4000m-16384mi"], KindNeed { count: 1, hidden: 0 });
    // A gang beside it on the same node is not read by other programs.
    let plan = need(vec![waits("a", 1, (3, 1), true), waits("b", 1, (1, 1), false)], &kinds(&[(4, 16)]));
    assert_eq!(plan.kinds["4000m-16384mi"], KindNeed { count: 1, hidden: 1 });
}

#[test]
fn a_kind_that_can_never_fit_is_not_asked_for() {
    let kinds = kinds(&[(4, 16), (32, 64)]);
    let late =
        vec![waits("wide", 1, (20, 1), false), waits("huge", 1, (64, 1), false), waits("heavy", 1, (1, 100), false)];
    let plan = need(late, &kinds);
    assert_eq!(plan.jobs.keys().collect::<Vec<_>>(), ["wide"]);
    assert_eq!(plan.kinds.keys().collect::<Vec<_>>(), ["32000m-65536mi"]);
    assert_eq!(need(vec![], &kinds), NeedPlan::default());
}

#[test]
fn a_node_that_would_come_too_late_is_not_asked_for() {
    let mut soon = waits("soon", 1, (3, 1), false);
    soon.job.left_s = ARRIVES_IN_S;
    assert_eq!(need(vec![soon], &kinds(&[(4, 16)])), NeedPlan::default());
}
