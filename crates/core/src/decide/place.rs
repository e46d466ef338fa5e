//! On which node? `spread`: the node with a free slot that runs the fewest jobs for its cores, as Kubernetes' default does.

use crate::model::NodeId;
use crate::view::View;
use std::collections::BTreeMap;

/// Free slots and running jobs of every node, kept up to date while several jobs are placed in one go.
pub(crate) struct Room<'a> {
    view: &'a View,
    running: BTreeMap<NodeId, usize>,
}

impl<'a> Room<'a> {
    pub(crate) fn new(view: &'a View) -> Room<'a> {
        let mut running = BTreeMap::new();
        for node in view.jobs.iter().filter_map(|j| j.node()) {
            *running.entry(node).or_insert(0) += 1;
        }
        Room { view, running }
    }

    /// Takes a slot on the least crowded node, if any has one.
    pub(crate) fn spread(&mut self) -> Option<NodeId> {
        let count = |id: NodeId| self.running.get(&id).copied().unwrap_or(0);
        let node = self
            .view
            .nodes
            .iter()
            .filter(|n| n.slots.is_none_or(|slots| count(n.id) < slots))
            .min_by(|a, b| {
                let crowd = |n: &crate::view::NodeView| count(n.id) as f64 / n.cores.max(f64::MIN_POSITIVE);
                crowd(a).total_cmp(&crowd(b)).then(a.id.cmp(&b.id))
            })?
            .id;
        *self.running.entry(node).or_insert(0) += 1;
        Some(node)
    }
}
