//! `kubernetes`: what the default scheduler's integer scores do to jobs that request nothing.
//!
//! **Source.** The plugins NodeResourcesLeastAllocated and NodeResourcesBalancedAllocation of
//! kube-scheduler. They count 100 mCPU and 200 MiB for a pod without requests and cut scores to
//! whole numbers of 100; on a node of 16 cores and 64 GiB zero to eight jobs score 197, 196, 196,
//! 196, 194, 194, 193, 192 and 192. The balanced score is that of newer releases; 1.17, the
//! thesis's, gives the same ties for up to 12 jobs a node.
//! Ties are broken at random; here by a hash of the job and a seed that the driver hands in, so
//! that the same view gives the same plan.

use super::super::{JobCounts, Place};
use crate::model::{JobId, NodeId};
use crate::plan::StartReason;
use crate::view::NodeView;

/// What a job that requests nothing counts for, in thousandths of a core and in bytes.
const DEFAULT_MILLICORES: u64 = 100;
const DEFAULT_BYTES: u64 = 200 << 20;
/// Pods of the system itself on every node (proxy, network).
const SYSTEM_PODS: u64 = 2;

/// `seed` breaks ties.
pub(crate) struct Kubernetes {
    pub(crate) seed: u64,
}

impl Place for Kubernetes {
    fn key(&self, node: &NodeView, jobs: JobCounts) -> f64 {
        -(kubernetes_score(node, jobs.all() as u64) as f64)
    }

    fn tie(&self, job: JobId, node: NodeId) -> Option<u64> {
        Some(hash(self.seed, job, node))
    }

    fn reason(&self) -> StartReason {
        StartReason::BestScore
    }
}

/// The sum of the two resource scores of the default scheduler for a node with `jobs` jobs.
fn kubernetes_score(node: &NodeView, jobs: u64) -> u64 {
    let pods = jobs + SYSTEM_PODS + 1;
    let millicores = (node.cores * 1000.0) as u64;
    let left = |capacity: u64, used: u64| capacity.saturating_sub(used) * 100 / capacity.max(1);
    let cpu = left(millicores, pods * DEFAULT_MILLICORES);
    let memory = left(node.memory_bytes, pods * DEFAULT_BYTES);
    let fraction = |capacity: u64, used: u64| used as f64 / capacity.max(1) as f64;
    let apart =
        (fraction(millicores, pods * DEFAULT_MILLICORES) - fraction(node.memory_bytes, pods * DEFAULT_BYTES)).abs();
    // With two resources the standard deviation of the fractions is half their distance.
    let balanced = ((1.0 - apart / 2.0).max(0.0) * 100.0) as u64;
    (cpu + memory) / 2 + balanced
}

fn hash(seed: u64, job: JobId, node: NodeId) -> u64 {
    let mut x =
        seed ^ job.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(node.0).wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::Room;
    use super::*;
    use crate::signal::Category;
    use crate::view::View;
    use std::collections::BTreeSet;

    fn node(id: u32) -> NodeView {
        NodeView { id: NodeId(id), cores: 16.0, speed: 1.0, memory_bytes: 64 << 30, slots: None, idle_node_s: None }
    }

    #[test]
    fn some_counts_of_jobs_score_alike_and_then_chance_decides() {
        let scores: Vec<u64> = (0..8).map(|jobs| kubernetes_score(&node(0), jobs)).collect();
        assert!(scores.windows(2).all(|w| w[0] >= w[1]), "{scores:?}");
        assert!(scores.windows(2).any(|w| w[0] == w[1]) && scores[0] > scores[7], "{scores:?}");
        let view = View { nodes: (0..4).map(node).collect(), ..View::default() };
        let first = |seed| Room::new(&view, &Kubernetes { seed }, |_| (Category::Growing, None)).choose(JobId(1));
        let chosen: BTreeSet<_> = (0..40).map(first).collect();
        assert_eq!(chosen.len(), 4);
    }
}
