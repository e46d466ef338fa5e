//! The cache of nodes: their size and state, and since when the object of a node has been missing.

use gainshare_kube_api::bounds::{NodeFacts, NodeState};
use gainshare_kube_api::names::NodeName;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A missing Node object counts as a node that is off after this time. It is longer than Kubernetes
/// itself takes to give up a node and its pods: 40 s until the node's lease has expired, and 300 s
/// that pods tolerate an unreachable node by default.
pub(crate) const MISSING_NODE_IS_OFF_AFTER: Duration = Duration::from_secs(360);

#[derive(Debug, Default)]
pub(crate) struct NodeCache {
    nodes: BTreeMap<NodeName, NodeFacts>,
    /// Nodes whose object is missing, as far as jobs are concerned.
    missing: BTreeMap<NodeName, MissingNode>,
    /// Nodes that came, went or changed their state since [`NodeCache::take_changed`].
    changed: BTreeSet<NodeName>,
}

/// A node whose object is missing.
#[derive(Debug, Clone, Copy)]
struct MissingNode {
    since: Instant,
    /// An administrator had declared it to be off before its object went.
    declared_off: bool,
}

impl NodeCache {
    pub(crate) fn get(&self, name: &NodeName) -> Option<&NodeFacts> {
        self.nodes.get(name)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&NodeName, &NodeFacts)> {
        self.nodes.iter()
    }

    /// Whether the decision may send a pod there now.
    pub(crate) fn is_open(&self, name: &NodeName) -> bool {
        self.nodes.get(name).is_some_and(|facts| facts.open)
    }

    /// Whether a pod that a person sends there can start now. Taints do not count: the pod may tolerate them.
    pub(crate) fn takes_requested_pods(&self, name: &NodeName) -> bool {
        self.nodes.get(name).is_some_and(|facts| facts.state == NodeState::Ready && !facts.cordoned)
    }

    /// Takes in a node. Answers whether anything about it is new.
    pub(super) fn put(&mut self, name: &NodeName, facts: NodeFacts) -> bool {
        self.missing.remove(name);
        let known = self.nodes.get(name);
        if known.map(|known| known.state) != Some(facts.state) {
            self.changed.insert(name.to_owned());
        }
        let is_new = known != Some(&facts);
        self.nodes.insert(name.to_owned(), facts);
        is_new
    }

    pub(super) fn remove(&mut self, name: &NodeName, now: Instant) {
        let Some(known) = self.nodes.remove(name) else { return };
        let declared_off = known.state == NodeState::Off;
        self.missing.insert(name.to_owned(), MissingNode { since: now, declared_off });
        self.changed.insert(name.to_owned());
    }

    /// The nodes that exist, after a new start of the watch: those not among them are gone.
    pub(super) fn keep(&mut self, alive: &BTreeSet<NodeName>, now: Instant) {
        let gone: Vec<NodeName> = self.nodes.keys().filter(|name| !alive.contains(*name)).cloned().collect();
        gone.iter().for_each(|name| self.remove(name, now));
    }

    pub(super) fn has_changes(&self) -> bool {
        !self.changed.is_empty()
    }

    pub(super) fn take_changed(&mut self) -> BTreeSet<NodeName> {
        std::mem::take(&mut self.changed)
    }

    /// The state of the node by our copy. `None`: the node is unknown, or declared off; the API
    /// server has to be asked.
    pub(crate) fn state(&self, name: &NodeName) -> Option<NodeState> {
        let state = self.nodes.get(name)?.state;
        matches!(state, NodeState::Ready | NodeState::Silent).then_some(state)
    }

    /// The state of a node that the API server does not have now, and how long until it counts as off.
    pub(super) fn missing(&mut self, name: &NodeName, now: Instant) -> (NodeState, Option<Duration>) {
        let new = MissingNode { since: now, declared_off: false };
        let missing = *self.missing.entry(name.to_owned()).or_insert(new);
        let left = MISSING_NODE_IS_OFF_AFTER.saturating_sub(now.saturating_duration_since(missing.since));
        if missing.declared_off || left.is_zero() { (NodeState::Off, None) } else { (NodeState::Missing, Some(left)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(state: NodeState) -> NodeFacts {
        NodeFacts { state, ..NodeFacts::default() }
    }

    #[test]
    fn a_missing_node_is_off_only_after_a_while_unless_it_was_declared() {
        let mut nodes = NodeCache::default();
        nodes.put(&"n".into(), node(NodeState::Ready));
        nodes.put(&"tainted".into(), node(NodeState::Off));
        let now = Instant::now();
        nodes.remove(&"n".into(), now);
        nodes.remove(&"tainted".into(), now);
        let (state, left) = nodes.missing(&"n".into(), now);
        assert_eq!(state, NodeState::Missing);
        assert!(left.unwrap() <= MISSING_NODE_IS_OFF_AFTER);
        assert_eq!(nodes.missing(&"n".into(), now + MISSING_NODE_IS_OFF_AFTER), (NodeState::Off, None));
        assert_eq!(nodes.missing(&"tainted".into(), now), (NodeState::Off, None));
        assert_eq!(nodes.missing(&"never-seen".into(), now).0, NodeState::Missing);
        nodes.put(&"n".into(), node(NodeState::Ready));
        assert_eq!(nodes.state(&"n".into()), Some(NodeState::Ready));
        let later = now + MISSING_NODE_IS_OFF_AFTER;
        nodes.remove(&"n".into(), later);
        assert_eq!(nodes.missing(&"n".into(), later).0, NodeState::Missing, "the time begins again");
    }
}
