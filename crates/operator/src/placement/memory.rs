//! What a decision remembers of jobs and nodes between two passes.
//!
//! **Continuity.** A job's reports and its use go on over its moves: the sums of earlier attempts
//! are kept here while the operator leads.

use super::snapshot::{JobReport, NodeSnapshot};
use crate::state::orders::{JobFacts, JobState, Order};
use gainshare_core::model::{JobId, NodeId, OwnerId, PerResource, Span, Time};
use gainshare_core::signal::{Category, Signal};
use gainshare_core::view::Marks;
use gainshare_kube_api::names::{NodeName, PodUid};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// An order that had no effect for this time is dropped.
pub(super) const ORDER_STANDS: Span = Span::from_secs(15);

/// The nodes' numbers, and the facts of those that exist in this pass.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    pub(super) ids: HashMap<NodeName, NodeId>,
    there: Vec<Option<KnownNode>>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct KnownNode {
    cores: f64,
    pub(super) heard: bool,
    open: bool,
}

impl Nodes {
    pub(super) fn learn(&mut self, snapshot: &BTreeMap<NodeName, NodeSnapshot>) {
        self.there.fill(None);
        for (name, node) in snapshot {
            let NodeId(id) = self.id(name);
            if let Some(there) = self.there.get_mut(id as usize) {
                *there = Some(KnownNode { cores: node.cores, heard: node.heard, open: node.open });
            }
        }
    }

    pub(super) fn id(&mut self, name: &NodeName) -> NodeId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        let id = NodeId(self.there.len() as u32);
        self.ids.insert(name.clone(), id);
        self.there.push(None);
        id
    }

    /// Whether new pods may come to a node.
    fn is_open(&self, name: &NodeName) -> bool {
        self.ids.get(name).and_then(|id| self.there(*id)).is_some_and(|node| node.open)
    }

    pub(super) fn there(&self, NodeId(id): NodeId) -> Option<KnownNode> {
        self.there.get(id as usize).copied().flatten()
    }
}

#[derive(Debug)]
pub(super) struct JobMemory {
    pub(super) id: JobId,
    pub(super) owner: OwnerId,
    /// As last read, and in which pass.
    pub(super) facts: Arc<JobFacts>,
    pub(super) pass: u64,
    pub(super) pod: Option<PodUid>,
    /// The job's node while that is known, and the node's cores.
    pub(super) node: Option<(NodeId, f64)>,
    /// The reports of earlier attempts, and of this one.
    pub(super) before: JobReport,
    pub(super) now: JobReport,
    /// The last order, and when it was given.
    pub(super) order: Option<(Order, Time)>,
    /// The job waits again, because the node of its order was closed. The core decides about a job that waits when it
    /// comes, so the job is absent from one view and comes again with the next one.
    pub(super) is_left_out: bool,
    /// Since when it has been between two nodes.
    pub(super) moving_since: Option<Time>,
    /// What move rules have done with it: known from the job itself, and from this operator's decisions.
    pub(super) marks: Marks,
    /// SpeCon's category; the node agent, which only measures such jobs, has none.
    pub(super) category: Option<Category>,
}

impl JobMemory {
    pub(super) fn new(id: JobId, owner: OwnerId, facts: &Arc<JobFacts>) -> JobMemory {
        JobMemory {
            id,
            owner,
            facts: facts.clone(),
            pass: 0,
            pod: None,
            node: None,
            before: JobReport::default(),
            now: JobReport::default(),
            order: None,
            is_left_out: false,
            moving_since: None,
            marks: facts.marks,
            category: None,
        }
    }

    pub(super) fn learn(&mut self, facts: &Arc<JobFacts>, nodes: &mut Nodes, report: Option<JobReport>, now: Time) {
        // Most jobs have not changed: their node need not be looked up by its name.
        let same = Arc::ptr_eq(&self.facts, facts).then_some(self.node).flatten();
        let node = match (&facts.state, same) {
            (JobState::Running { .. }, Some((node, _))) => Some(node),
            (JobState::Running { node, .. }, None) => Some(nodes.id(node)),
            _ => None,
        };
        self.facts = facts.clone();
        self.marks = self.marks.with(facts.marks);
        match &facts.state {
            JobState::Moving => self.moving_since = self.moving_since.or(Some(now)),
            _ => self.moving_since = None,
        }
        // An order is over when the job runs where it should, when its node takes no pods any more,
        // or when it has had no effect for long.
        if let Some((order, at)) = &self.order {
            let has_arrived = matches!(&facts.state, JobState::Running { node, .. } if *node == order.node);
            let is_closed = !nodes.is_open(&order.node);
            let is_outdated = is_closed || now.since(*at) > ORDER_STANDS;
            if has_arrived || (is_outdated && facts.state != JobState::Moving) {
                self.is_left_out = is_closed && facts.state == JobState::Waiting;
                self.order = None;
            }
        }
        if facts.pod_uid.is_some() && facts.pod_uid != self.pod {
            // The next attempt: earlier reports are kept apart.
            self.before = self.all();
            self.now = JobReport::default();
            self.pod = facts.pod_uid.clone();
        }
        if let Some(node) = node {
            let cores = nodes.there(node).map_or(1.0, |there| there.cores);
            if let Some((_, old)) = self.node.filter(|(before, _)| *before != node) {
                // Use is counted in parts of the node it happens on.
                let factor = old / cores.max(f64::MIN_POSITIVE);
                self.before.consumed_node_s.cpu *= factor;
            }
            self.node = Some((node, cores));
        }
        // Report counts within an attempt never decrease. A restarted agent reads the log again and
        // may briefly report fewer: that report is ignored until the agent has caught up.
        match report.filter(|report| report.signal.reports >= self.now.signal.reports) {
            Some(report) => self.now = report,
            // How its deadline stood before is no reason to move it.
            None => self.now.finish = None,
        }
    }

    /// Over all attempts.
    pub(super) fn all(&self) -> JobReport {
        let (before, now) = (&self.before, &self.now);
        let signal = Signal {
            reports: before.signal.reports.saturating_add(now.signal.reports),
            first: before.signal.first.or(now.signal.first),
            last: now.signal.last.or(before.signal.last),
            longest_gap: now.signal.longest_gap.max(before.signal.longest_gap),
            step: now.signal.step.or(before.signal.step),
            total: now.signal.total.or(before.signal.total),
            epoch_steps: now.signal.epoch_steps.or(before.signal.epoch_steps),
            outlook: now.signal.outlook.or(before.signal.outlook),
            ..Signal::default()
        };
        let consumed_node_s = PerResource::from_fn(|r| before.consumed_node_s.get(r) + now.consumed_node_s.get(r));
        let (usable, deadline) = (now.usable.or(before.usable), now.deadline.or(before.deadline));
        let floor = now.floor.or(before.floor);
        JobReport { signal, consumed_node_s, usable, deadline, finish: now.finish, floor }
    }
}
