//! The operator's metrics, for Prometheus.

use gainshare_kube_api::deadline::DeadlineState;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upper bounds of the histogram of decision passes, in seconds.
const PASS_SECONDS: [f64; 10] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct WriteLabels {
    pub(crate) what: &'static str,
    pub(crate) outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StateLabels {
    pub(crate) state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct CategoryLabels {
    pub(crate) category: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OrderLabels {
    pub(crate) kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct NodeKindLabels {
    pub(crate) kind: String,
}

#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) leader: Gauge,
    pub(crate) pods: Gauge,
    pub(crate) blocked: Gauge,
    pub(crate) jobs: Family<CategoryLabels, Gauge>,
    pub(crate) deadlines: Family<StateLabels, Gauge>,
    pub(crate) deadlines_ended: Family<StateLabels, Counter>,
    pub(crate) agents: Gauge,
    pub(crate) to_restore: Gauge,
    pub(crate) writes: Family<WriteLabels, Counter>,
    pub(crate) resizes: Family<StateLabels, Counter>,
    pub(crate) syncs: Family<StateLabels, Counter>,
    pub(crate) watch_errors: Counter,
    pub(crate) admissions: Counter,
    pub(crate) connections_refused: Counter,
    pub(crate) foreign_reports: Counter,
    pub(crate) pass_seconds: Histogram,
    pub(crate) orders: Family<OrderLabels, Counter>,
    pub(crate) plans_rejected: Counter,
    pub(crate) nodes_needed: Family<NodeKindLabels, Gauge>,
    pub(crate) placeholders: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut metrics = Metrics {
            registry: Registry::default(),
            leader: Gauge::default(),
            pods: Gauge::default(),
            blocked: Gauge::default(),
            jobs: Family::default(),
            deadlines: Family::default(),
            deadlines_ended: Family::default(),
            agents: Gauge::default(),
            to_restore: Gauge::default(),
            writes: Family::default(),
            resizes: Family::default(),
            syncs: Family::default(),
            watch_errors: Counter::default(),
            admissions: Counter::default(),
            connections_refused: Counter::default(),
            foreign_reports: Counter::default(),
            pass_seconds: Histogram::new(PASS_SECONDS),
            orders: Family::default(),
            plans_rejected: Counter::default(),
            nodes_needed: Family::default(),
            placeholders: Gauge::default(),
        };
        let mut registry = Registry::with_prefix("gainshare_operator");
        registry.register("leader", "1 if this replica leads", metrics.leader.clone());
        registry.register("pods", "Running pods that a policy selects", metrics.pods.clone());
        registry.register("pods_blocked", "Selected pods that cannot be resized", metrics.blocked.clone());
        registry.register("jobs", "Jobs by category, as the node agents count them", metrics.jobs.clone());
        let deadlines = "Running jobs with a deadline, by how it stands: Unknown, OnTime, AtRisk, Missed";
        registry.register("deadlines", deadlines, metrics.deadlines.clone());
        let ended = "Jobs and pods with a deadline that have ended, by the result: Met, Missed";
        registry.register("deadlines_ended", ended, metrics.deadlines_ended.clone());
        registry.register("agents", "Node agents that reported within the last 40 s", metrics.agents.clone());
        registry.register("pods_to_restore", "Pods whose own resources are to be restored", metrics.to_restore.clone());
        registry.register("writes", "Writes to the API server", metrics.writes.clone());
        registry.register("resizes", "Resizes that node agents asked for", metrics.resizes.clone());
        registry.register("syncs", "Requests of node agents", metrics.syncs.clone());
        registry.register("watch_errors", "Times a watch was restarted after an error", metrics.watch_errors.clone());
        registry.register("admissions", "New pods that got a tuned start", metrics.admissions.clone());
        let refused = "Connections refused because their peer, or all peers, had too many";
        registry.register("connections_refused", refused, metrics.connections_refused.clone());
        let foreign = "Job states and resizes of node agents about pods that are not on their node";
        registry.register("foreign_reports", foreign, metrics.foreign_reports.clone());
        let pass = "Time of one decision about where training jobs run";
        registry.register("decision_seconds", pass, metrics.pass_seconds.clone());
        registry.register("orders", "Orders for training jobs: places and moves", metrics.orders.clone());
        let rejected = "Decisions about training jobs that failed their check and were not carried out";
        registry.register("plans_rejected", rejected, metrics.plans_rejected.clone());
        let needed = "New nodes with which deadlines could be kept, by kind of node";
        registry.register("nodes_needed", needed, metrics.nodes_needed.clone());
        let placeholders = "Pods that wait for new nodes on behalf of jobs with deadlines";
        registry.register("node_placeholders", placeholders, metrics.placeholders.clone());
        metrics.registry = registry;
        metrics
    }

    /// Counts a job or a pod that has ended, if its deadline was met or missed.
    pub(crate) fn count_deadline(&self, state: DeadlineState) {
        if matches!(state, DeadlineState::Met | DeadlineState::Missed) {
            self.deadlines_ended.get_or_create(&StateLabels { state: state.name() }).inc();
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
