//! `/healthz`, `/readyz` and `/metrics` of the node agent, for the kubelet and for Prometheus, as plain HTTP.
//! They show no output of jobs and change nothing.
//!
//! **Terms.** *Healthy*: the loop that decides has run within the last ten seconds. *Ready*: the operator has
//! sent the node's pods at least once. The agent stays ready when the operator goes away later, because limits
//! stay and decisions go on without it.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

type Labels = [(&'static str, &'static str); 1];

/// The loop runs at least every second. Ten seconds without it are a fault.
const STALLED_AFTER: Duration = Duration::from_secs(10);

pub(crate) struct Status {
    started_at: Instant,
    /// When the loop last ran, in milliseconds after `started_at`.
    alive_ms: AtomicU64,
    pub(crate) has_pods: AtomicBool,
    registry: Registry,
    pub(crate) jobs: Family<Labels, Gauge>,
    pub(crate) reports: Counter,
    pub(crate) refused_reports: Counter,
    pub(crate) dropped_lines: Gauge,
    pub(crate) plans: Counter,
    pub(crate) plans_rejected: Counter,
    pub(crate) decision_seconds: Histogram,
    pub(crate) effect_seconds: Histogram,
    pub(crate) syncs: Family<Labels, Counter>,
    pub(crate) connected: Gauge,
}

impl Status {
    pub(crate) fn new() -> Arc<Status> {
        let seconds = |first: f64| Histogram::new(exponential_buckets(first, 2.0, 15));
        let mut s = Status {
            started_at: Instant::now(),
            alive_ms: AtomicU64::new(0),
            has_pods: AtomicBool::new(false),
            registry: Registry::with_prefix("gainshare_node"),
            jobs: Family::default(),
            reports: Counter::default(),
            refused_reports: Counter::default(),
            dropped_lines: Gauge::default(),
            plans: Counter::default(),
            plans_rejected: Counter::default(),
            decision_seconds: seconds(1e-5),
            effect_seconds: seconds(1e-2),
            syncs: Family::default(),
            connected: Gauge::default(),
        };
        let r = &mut s.registry;
        r.register("jobs", "Pods of this node that are shared, by category", s.jobs.clone());
        r.register("reports", "Reports of jobs that were used", s.reports.clone());
        r.register("reports_refused", "Reports that were not finite", s.refused_reports.clone());
        r.register("log_lines_dropped", "Lines of logs that could not be read", s.dropped_lines.clone());
        r.register("plans", "Decisions made", s.plans.clone());
        r.register(
            "plans_rejected",
            "Decisions that failed their check and were not carried out",
            s.plans_rejected.clone(),
        );
        r.register("decision_seconds", "Time to read all jobs and decide", s.decision_seconds.clone());
        r.register("effect_seconds", "Time from a decision to the kernel's files", s.effect_seconds.clone());
        r.register("syncs", "Exchanges with the operator, by result", s.syncs.clone());
        r.register("operator_connected", "1 if the last exchange with the operator worked", s.connected.clone());
        Arc::new(s)
    }

    /// The loop that decides has run.
    pub(crate) fn set_alive(&self) {
        let ms = u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.alive_ms.store(ms, Ordering::Relaxed);
    }

    fn is_healthy(&self) -> bool {
        let alive = Duration::from_millis(self.alive_ms.load(Ordering::Relaxed));
        self.started_at.elapsed().saturating_sub(alive) < STALLED_AFTER
    }
}

pub(crate) fn router(status: Arc<Status>) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(status)
}

async fn healthz(State(status): State<Arc<Status>>) -> (StatusCode, &'static str) {
    match status.is_healthy() {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "the loop that decides has not run for ten seconds\n"),
    }
}

async fn readyz(State(status): State<Arc<Status>>) -> (StatusCode, &'static str) {
    match status.has_pods.load(Ordering::Relaxed) {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "the operator has not been reached yet\n"),
    }
}

async fn metrics(State(status): State<Arc<Status>>) -> impl IntoResponse {
    let mut text = String::new();
    match encode(&mut text, &status.registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_is_in_the_reference() {
        let page = include_str!("../../../docs/reference/metrics.md");
        let mut text = String::new();
        encode(&mut text, &Status::new().registry).expect("text");
        let counters: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
        assert!(counters.contains(&"gainshare_node_plans_rejected"), "{text}");
        for name in counters {
            assert!(page.contains(&format!("| `{name}_total` |")), "docs/reference/metrics.md has no row for {name}");
        }
    }
}
