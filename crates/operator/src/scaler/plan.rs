//! What is needed: by job for people, and by kind of node for programs that add nodes. Pure: no I/O, no clock.

use super::kinds::{KindSize, Kinds};
use super::snapshot::NeedSnapshot;
use gainshare_core::policies::deadline::{NodeKind, nodes_needed};
use gainshare_kube_api::deadline::NodesNeeded;
use gainshare_kube_api::names::JobUid;
use std::collections::{BTreeMap, BTreeSet};

/// A new node is there after about this time: until then it helps no job.
const ARRIVES_IN_S: f64 = 120.0;

/// What would keep the deadlines.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct NeedPlan {
    /// By the uid of the job: the nodes on which it would run.
    pub(super) jobs: BTreeMap<JobUid, NodesNeeded>,
    /// By the name of the kind.
    pub(super) kinds: BTreeMap<String, KindNeed>,
}

/// How many nodes of a kind are needed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct KindNeed {
    pub(super) count: usize,
    /// Nodes among `count` for which no pod waits that programs that add nodes can read.
    pub(super) hidden: usize,
}

pub(super) fn plan(snapshot: &NeedSnapshot, kinds: &Kinds) -> NeedPlan {
    if snapshot.late.is_empty() {
        return NeedPlan::default();
    }
    let known: Vec<(&String, &KindSize)> = kinds.iter().collect();
    let core_kinds: Vec<NodeKind> = known.iter().map(|(name, kind)| kind.to_core(name)).collect();
    let late: Vec<_> = snapshot.late.iter().map(|late| late.job.clone()).collect();
    let mut plan = NeedPlan::default();
    for need in nodes_needed(&late, &snapshot.free, &core_kinds, ARRIVES_IN_S) {
        let (name, kind) = known[need.kind];
        let is_hidden = |node: &&BTreeSet<usize>| node.iter().any(|job| !snapshot.late[*job].is_visible);
        let hidden = need.nodes.iter().filter(is_hidden).count();
        plan.kinds.insert(name.clone(), KindNeed { count: need.nodes.len(), hidden });
        for (at, late) in snapshot.late.iter().enumerate() {
            let own = need.nodes.iter().filter(|node| node.contains(&at)).count();
            if own > 0 {
                plan.jobs.insert(late.uid.clone(), kind.needed(own));
            }
        }
    }
    plan
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
