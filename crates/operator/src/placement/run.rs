//! The loop around the decision: reads the cluster, decides, and puts the orders.

use super::clock::Clock;
use super::decide::Placements;
use super::record::RecordRequests;
use super::snapshot::read;
use crate::state::lead::Leader;
use crate::state::metrics::OrderLabels;
use crate::state::orders::OrderKind;
use gainshare_core::policy::Specon;
use nix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often the decision runs if nothing happens.
const DECIDE_EVERY: Duration = Duration::from_secs(1);
/// The pause after a pass that panicked.
const AFTER_PANIC: Duration = Duration::from_secs(10);

/// Decides about the cluster for as long as this operator leads.
pub(crate) async fn run(leader: Arc<Leader>, specon: Specon, records: Arc<RecordRequests>) {
    let orders_of_jobs = leader.orders.clone();
    let origin = Instant::now();
    let unix_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
    let clock = Clock { origin, unix_us };
    let mut decision = Placements::new(specon);
    loop {
        let _ = tokio::time::timeout(DECIDE_EVERY, orders_of_jobs.changed.notified()).await;
        if !leader.is_synced() {
            continue;
        }
        if orders_of_jobs.is_empty() {
            records.refuse_all();
            continue;
        }
        // A large cluster takes a good part of a second: agents and watches are served meanwhile.
        let (reader, records) = (leader.clone(), records.clone());
        let pass = tokio::task::spawn_blocking(move || {
            let (began, spent_before) = (Instant::now(), thread_time());
            let snapshot = read(&reader, reader.orders.facts(), &clock);
            let read_in = began.elapsed();
            let orders = decision.decide(&snapshot);
            records.answer(&mut decision);
            reader.orders.set_judgements(decision.take_judgements());
            reader.orders.set_needing_nodes(decision.needing_nodes());
            reader.metrics.plans_rejected.inc_by(std::mem::take(&mut decision.rejected));
            let (jobs, nodes, took) = (snapshot.jobs.len(), snapshot.nodes.len(), began.elapsed());
            // On a busy machine a pass takes longer than it costs.
            let spent = thread_time().saturating_sub(spent_before);
            tracing::debug!(jobs, nodes, orders = orders.len(), ?read_in, ?took, ?spent, "pass");
            (decision, orders, took)
        });
        let (decided, orders, took) = match pass.await {
            Ok(pass) => pass,
            Err(error) => {
                // What was remembered is lost with the pass. Jobs stay where they are until the
                // next one.
                tracing::error!(%error, "a pass over the cluster panicked: the decision begins again");
                decision = Placements::new(specon);
                tokio::time::sleep(AFTER_PANIC).await;
                continue;
            }
        };
        decision = decided;
        leader.metrics.pass_seconds.observe(took.as_secs_f64());
        for order in orders {
            tracing::info!(job = order.uid.as_str(), node = order.node.as_str(), kind = ?order.kind, reason = ?order.reason, "order");
            let kind = if order.kind == OrderKind::Move { "move" } else { "place" };
            leader.metrics.orders.get_or_create(&OrderLabels { kind }).inc();
            orders_of_jobs.put(order);
        }
        // When everything changes at once, passes take half of a core and no more.
        tokio::time::sleep(took).await;
    }
}

/// The processor time of this thread.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}
