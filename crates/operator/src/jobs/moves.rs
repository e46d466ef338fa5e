//! The parts of a move that are the same for every kind of job: its beginning, how long a job gets its own share
//! back before it is stopped, the proof of its stop, what its end means for the move, and the record of the move.
//!
//! A move is a request to end, a proof of the stop, and a start elsewhere.

use super::waiting::wait_end;
use crate::state::lead::Leader;
use crate::state::orders::Order;
use crate::state::snapshot::{Exit, NodeState, Nodes, PodSnapshot, Stop};
use gainshare_kube_api::names::{JobUid, NodeName};
use gainshare_kube_api::training_job::{MOVES_KEPT, Migration, Move, Phase, TrainingJobStatus};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// 128 + SIGTERM, 128 + SIGKILL.
pub(super) const TERMINATED: i32 = 143;
const KILLED: i32 = 137;

/// Longest wait for a job's original CPU request to be restored before SIGTERM, so that it can save
/// a checkpoint at full speed (usually 0.2 s).
const OWN_SHARE_WAIT: SignedDuration = SignedDuration::from_secs(2);

/// How often a request for a node that takes no pods is read again.
const CLOSED_NODE_PAUSE: SignedDuration = SignedDuration::from_secs(5);

/// What to carry out now about a job.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CurrentOrder {
    pub(super) order: Option<Order>,
    /// The node that the annotation asks for, while it takes no pods: the request waits.
    pub(super) closed: Option<NodeName>,
}

/// The order about a job that can be carried out now. A request, which a person wrote, goes before the decision.
///
/// An order is older than what is known of its node now: the node may have been cordoned, or have fallen silent, since
/// the decision. A pod could not start there, and a job that was stopped for it would have no place. So the newest copy
/// of the node is read. An order of the decision that is outdated is withdrawn, and a request waits.
pub(super) fn current_order(leader: &Leader, uid: &JobUid, requested: Option<Order>) -> CurrentOrder {
    if let Some(order) = &requested
        && leader.read(|world| world.nodes().takes_requested_pods(&order.node))
    {
        return CurrentOrder { order: requested, closed: None };
    }
    let closed = requested.map(|order| order.node);
    let decided = leader.orders.order(uid);
    if let Some(order) = &decided
        && !leader.read(|world| world.nodes().is_open(&order.node))
    {
        tracing::info!(job = uid.as_str(), node = order.node.as_str(), kind = ?order.kind, "order withdrawn: its node takes no pods now");
        leader.orders.withdraw(order);
        return CurrentOrder { order: None, closed };
    }
    CurrentOrder { order: decided, closed }
}

/// The sentence about a request that waits for its node, after the one about where the job runs.
pub(super) fn closed_sentence(closed: Option<&NodeName>) -> String {
    closed.map(|node| format!("; {node}, which was asked for, takes no pods now")).unwrap_or_default()
}

/// When a job whose request waits is read again.
pub(super) fn request_wake(closed: Option<&NodeName>, now: Timestamp) -> Option<Timestamp> {
    closed.and_then(|_| now.saturating_add(CLOSED_NODE_PAUSE).ok())
}

/// The journal entry of a move that begins: the attempt on `from` is to be stopped.
pub(super) fn begin_move(order: &Order, from: NodeName, epoch: u32, now: Timestamp) -> Migration {
    Migration {
        from,
        to: order.node.clone(),
        reason: Some(order.reason),
        message: order.sentence(),
        phase: Phase::Stopping,
        epoch,
        since: MicroTime(now),
        stopped: None,
    }
}

/// Until when a pod that saves itself is not asked to end yet: on a small share it might not save itself in
/// time, so its own share comes back first.
pub(super) fn own_share_until(pod: &PodSnapshot, since: Timestamp, now: Timestamp) -> Option<Timestamp> {
    wait_end(since, OWN_SHARE_WAIT, now).filter(|_| pod.reshaped)
}

/// The proof that a pod has stopped, if there is one. An administrator's declaration (`declared`, the name of a
/// pod) counts for a pod that was asked to end.
pub(super) fn proof_of_stop(pod: &PodSnapshot, declared: Option<&str>, nodes: &Nodes) -> Option<Stop> {
    let is_declared = pod.deleted.is_some() && declared == Some(&pod.name);
    pod.stop(nodes).or_else(|| is_declared.then_some(Stop::Declared))
}

/// The same for a pod whose object was removed by force.
pub(super) fn proof_without_pod(
    pod: &str,
    node: Option<&NodeName>,
    declared: Option<&str>,
    nodes: &Nodes,
) -> Option<Stop> {
    let off = node.filter(|node| nodes.get(*node) == Some(&NodeState::Off));
    off.map(|node| Stop::NodeOff(node.clone())).or_else(|| (declared == Some(pod)).then_some(Stop::Declared))
}

/// The journal entry of a move after the stop: the next attempt starts at the target. The target of a move that
/// came to nothing is where the job was; the record of the move is closed when it runs again.
pub(super) fn continue_move(migration: Migration, moves: bool, now: Timestamp) -> Migration {
    let to = if moves { migration.to } else { migration.from.clone() };
    Migration { phase: Phase::Starting, to, stopped: Some(MicroTime(now)), ..migration }
}

/// Whether a job that was asked to save itself goes on at its target, and the sentence about it.
/// `time` says how long it had, and by which field.
pub(super) fn verdict(stop: &Stop, migration: &Migration, pod: Option<&PodSnapshot>, time: &str) -> (bool, String) {
    let (from, to) = (&migration.from, &migration.to);
    // Times of pods are whole seconds.
    let before_its_time = |finished: Timestamp| {
        let until = pod.and_then(|pod| pod.deleted).map(|(_, until)| until);
        until.is_some_and(|until| until.duration_since(finished) > SignedDuration::from_secs(1))
    };
    match stop {
        Stop::Exited(exit) if matches!(exit.code, 0 | TERMINATED) => {
            (true, format!("saved itself and ended on {from}; continues on {to}"))
        }
        // The node failed, not the job.
        Stop::Exited(exit) if exit.code == KILLED && exit.reason != "OOMKilled" && before_its_time(exit.finished) => {
            (true, format!("was killed on {from} while it saved itself; continues on {to} from its last checkpoint"))
        }
        Stop::Exited(exit)
            if exit.code == KILLED && exit.reason != "OOMKilled" && exit.reason != "ContainerStatusUnknown" =>
        {
            let sentence = format!(
                "it ignored SIGTERM and was killed when its time was over: it continues on {from} from its last checkpoint and is not moved again; \
                 let it save itself on SIGTERM, or give it more time than {time}"
            );
            (false, sentence)
        }
        Stop::Exited(exit) => {
            let sentence = format!(
                "saving on SIGTERM failed ({}): it continues on {from} from its last checkpoint and is not moved again; \
                 is the claim writable and large enough?",
                exit_text(exit)
            );
            (false, sentence)
        }
        Stop::NodeOff(node) => (true, format!("node {node} is gone: continues on {to} from the last checkpoint")),
        Stop::NeverBegan(_) | Stop::Declared => (true, format!("continues on {to}")),
    }
}

/// Counts and records a move that is over.
pub(super) fn close(status: &mut TrainingJobStatus, migration: &Migration, node: &NodeName, now: Timestamp) {
    status.moves = status.moves.saturating_add(u32::from(*node != migration.from));
    record(&mut status.last_moves, migration, node, now);
}

/// Adds a move that ended on this node to the last few.
pub(super) fn record(moves: &mut Vec<Move>, migration: &Migration, node: &NodeName, now: Timestamp) {
    let stopped = migration.stopped.as_ref().map_or(now, |stopped| stopped.0);
    let seconds = |from: Timestamp, to: Timestamp| (to.duration_since(from).as_secs_f64().max(0.0) * 1e3).round() / 1e3;
    moves.push(Move {
        at: MicroTime(now),
        from: migration.from.clone(),
        to: node.clone(),
        reason: migration.reason,
        message: migration.message.clone(),
        save_s: seconds(migration.since.0, stopped),
        restore_s: seconds(stopped, now),
    });
    let surplus = moves.len().saturating_sub(MOVES_KEPT);
    moves.drain(..surplus);
}

/// How a container ended, for people.
pub(super) fn exit_text(exit: &Exit) -> String {
    let reason = match exit.reason.as_str() {
        "" | "Error" | "Completed" => String::new(),
        reason => format!(" ({reason})"),
    };
    let message = if exit.message.is_empty() { String::new() } else { format!(": {}", short(&exit.message)) };
    format!("exit code {}{reason}{message}", exit.code)
}

fn short(text: &str) -> String {
    text.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::metrics::Metrics;
    use crate::state::orders::OrderKind;
    use gainshare_kube_api::bounds::NodeFacts;
    use gainshare_kube_api::node_rules::NodeTraits;
    use gainshare_kube_api::placement_reason::PlacementReason;
    use std::sync::Arc;

    fn order(node: &str, reason: PlacementReason) -> Order {
        Order { uid: "job".into(), node: node.into(), kind: OrderKind::Place, reason }
    }

    fn leader(facts: NodeFacts) -> Leader {
        let leader = Leader::new(Arc::new(Metrics::new()), 1);
        leader.change(|world| world.put_node(&"a".into(), facts));
        leader
    }

    const OPEN: NodeFacts = NodeFacts {
        cpu_milli: None,
        memory_bytes: None,
        open: true,
        cordoned: false,
        speed_percent: 100,
        instance_type: None,
        state: NodeState::Ready,
        traits: NodeTraits::NONE,
    };

    #[test]
    fn an_order_is_withdrawn_when_its_node_was_closed_after_the_decision() {
        let leader = leader(OPEN);
        leader.orders.put(order("a", PlacementReason::FewestJobs));
        let current = || current_order(&leader, &"job".into(), None).order;
        assert_eq!(current(), Some(order("a", PlacementReason::FewestJobs)));
        leader.change(|world| world.put_node(&"a".into(), NodeFacts { open: false, cordoned: true, ..OPEN }));
        assert_eq!(current(), None);
        leader.change(|world| world.put_node(&"a".into(), OPEN));
        assert_eq!(current(), None, "the decision has to give it again");
        leader.orders.put(order("gone", PlacementReason::FewestJobs));
        assert_eq!(current(), None, "there is no such node");
    }

    #[test]
    fn a_newer_order_is_not_withdrawn_with_an_older_one() {
        let leader = leader(OPEN);
        leader.orders.put(order("a", PlacementReason::FewestJobs));
        leader.orders.withdraw(&order("b", PlacementReason::FewestJobs));
        assert!(leader.orders.order(&"job".into()).is_some());
    }

    #[test]
    fn a_request_waits_for_its_node_and_the_decision_places_meanwhile() {
        let leader = leader(NodeFacts { open: false, cordoned: true, ..OPEN });
        leader.change(|world| world.put_node(&"b".into(), OPEN));
        let request = order("a", PlacementReason::Requested);
        let current = || current_order(&leader, &"job".into(), Some(request.clone()));
        assert_eq!(current(), CurrentOrder { order: None, closed: Some("a".into()) });
        let decided = order("b", PlacementReason::FewestJobs);
        leader.orders.put(decided.clone());
        assert_eq!(current(), CurrentOrder { order: Some(decided), closed: Some("a".into()) });
        for facts in [OPEN, NodeFacts { open: false, ..OPEN }] {
            leader.change(|world| world.put_node(&"a".into(), facts.clone()));
            let followed = CurrentOrder { order: Some(request.clone()), closed: None };
            assert_eq!(current(), followed, "its pod may tolerate a taint: {facts:?}");
        }
        leader.change(|world| world.put_node(&"a".into(), NodeFacts { state: NodeState::Silent, ..OPEN }));
        assert_eq!(current().closed.as_deref(), Some("a"), "its kubelet does not answer");
    }
}
