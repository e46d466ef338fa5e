//! How far the pods of a policy may grow beyond what they requested, where deadlines need it.
//!
//! **Problem.** A pod with a deadline may need more CPU than its author requested. CPU that no pod of the node
//! requests can be given to it. But a node whose CPU is all requested takes no new pod.
//!
//! **How.** *Room* is what the pods of one policy on one node may together request beyond their originals: up to
//! [`FULL`] of the node, less what all other pods request, and within the quotas of their namespace. Limits of
//! single pods are in [`gainshare_kube_api::bounds`]. Only policies that keep deadlines have room. The node agent plans
//! with it, and the operator checks each resize with it.

use super::world::World;
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::quantity::total;
use gainshare_kube_api::wire::PodOnNode;

/// Grown pods leave the rest of the node free for new pods, in hundredths.
const FULL_PERCENT: u64 = 80;

impl World {
    /// The room of the pod's policy on this node.
    pub(crate) fn room_milli(&self, pod: &PodOnNode, node: &NodeName) -> u64 {
        if !pod.settings.policy.keeps_deadlines() {
            return 0;
        }
        let Some(whole) = self.nodes().get(node).and_then(|facts| facts.cpu_milli) else { return 0 };
        let mates: Vec<&PodOnNode> = self.mates(pod, node).collect();
        let sum = |pick: fn(&PodOnNode) -> Option<u64>| total(mates.iter().filter_map(|mate| pick(mate)));
        let (own, now) = (sum(|mate| mate.original.requests.cpu_milli), sum(|mate| mate.now.requests.cpu_milli));
        let requested = self.requested(node);
        let others = requested.jobs.0.saturating_add(requested.others.0).saturating_sub(now);
        let of_node = (whole / 100 * FULL_PERCENT).saturating_sub(others).saturating_sub(own);
        let of_quota = self.quota_left_milli(&pod.namespace).saturating_add(now).saturating_sub(own);
        of_node.min(of_quota)
    }

    /// Whether pods on the node may grow.
    pub(super) fn has_growing(&self, node: &NodeName) -> bool {
        self.shared_on(node).any(|pod| pod.settings.policy.keeps_deadlines())
    }
}
