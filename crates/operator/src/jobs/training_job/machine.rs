//! What to do about a job, from a snapshot of it. Pure: no I/O, no clock.
//!
//! **How.** [`step`] reads a job, its pods and their nodes, perhaps all of them old copies. It
//! answers either with one status to write (a *journal* entry, which the API server refuses if the
//! job has changed since) or with actions that carry out what the journal already says. Writing
//! comes first and alone: no action happens before its reason is on the object.
//!
//! **Why no two attempts live.** Three rules, each of which survives a crash, an old copy and a
//! second operator:
//! 1. Pods are made with a scheduling gate, so a pod that an outdated operator makes does not run.
//! 2. The gate is opened only for the pod whose uid the journal names, once per epoch.
//! 3. The journal goes on to the next epoch only with proof that the pod of this one has stopped
//!    ([`PodSnapshot::stop`]), or that it never had a uid in the journal.
//!
//! **Why it always ends.** Every state either waits for something that the status names (a kubelet,
//! a scheduler, an administrator, the clock) or has an action. Failures are counted, and no move is
//! ordered twice by itself.

use super::action::{Action, Snapshot, Step};
use super::ending;
use super::finish;
use super::status::{StatusText, set_status};
use crate::jobs::moves::{begin_move, close, closed_sentence, own_share_until, proof_of_stop, proof_without_pod};
use crate::jobs::waiting::{
    LONGEST_PAUSE, bounded_wait, missing_node_sentence, overdue, removed_sentence, silent_sentence, wait_end,
};
use crate::jobs::workload::JournalStep;
use crate::state::orders::{Order, OrderKind};
use crate::state::snapshot::{JobSnapshot, NodeState, PodSnapshot, Stop};
use gainshare_kube_api::immovable::ImmovableReason;
use gainshare_kube_api::names::is_our_job;
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::training_job::{Attempt, CleanPodPolicy, State, StopReason, TrainingJobStatus};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// How long a new pod waits for the decision before the cluster's own scheduler places it.
pub(crate) const DECISION_PATIENCE: SignedDuration = SignedDuration::from_secs(2);

/// How long a pod may find no room on the node chosen for it before another one is chosen.
pub(crate) const ROOM_PATIENCE: SignedDuration = SignedDuration::from_secs(10);

/// How long to wait before a pod that was refused (by a quota, for instance) is tried again.
pub(crate) const REFUSAL_PAUSE: SignedDuration = SignedDuration::from_secs(10);

/// A share is published again when it has changed by this number of hundredths.
const SHARE_STEP: u32 = 5;

/// Epochs beyond this are not used: the number of an attempt must be able to grow.
const LAST_EPOCH: u32 = u32::MAX - 1;

pub(crate) fn step(snapshot: &Snapshot<'_>) -> Step {
    let job = snapshot.job;
    if !is_our_job(job.spec.managed_by.as_deref()) {
        return Step::default();
    }
    if job.deleting {
        return if job.has_finalizer { leave(snapshot) } else { Step::default() };
    }
    if !job.has_finalizer {
        return Step::one(Action::Hold);
    }
    let mut next = match job.status.state {
        State::Succeeded | State::Failed => finished(snapshot),
        _ => alive(snapshot),
    };
    next.actions.extend(housekeeping(snapshot));
    if snapshot.order.is_some_and(|order| !applies(order, &job.status)) {
        next.actions.push(Action::RemoveOrder);
    }
    // A journal entry goes alone: the next step finds what follows from it, on the job as it was
    // written.
    if let Some(at) = next.actions.iter().position(|action| matches!(action, Action::Write(..))) {
        let taken = next.actions.contains(&Action::RemoveOrder);
        let write = next.actions.swap_remove(at);
        next.actions = if taken { vec![write, Action::RemoveOrder] } else { vec![write] };
    }
    next
}

/// Whether an order fits the job's state: a place for a job that waits, a move for one that runs.
fn applies(order: &Order, status: &TrainingJobStatus) -> bool {
    let attempt = status.attempt.as_ref().filter(|attempt| attempt.ended.is_none());
    match order.kind {
        OrderKind::Place => attempt.is_none_or(|attempt| attempt.uid.is_none() && !attempt.pinned),
        OrderKind::Move => attempt.is_some_and(|attempt| attempt.start_time.is_some() && attempt.stopping.is_none()),
    }
}

fn let_go(pod: &PodSnapshot) -> Action {
    Action::LetGo { pod: pod.name.clone(), uid: pod.uid.clone() }
}

fn delete(pod: &PodSnapshot) -> Action {
    Action::Delete { pod: pod.name.clone(), uid: pod.uid.clone() }
}

/// The proof that this pod has stopped: then its finalizer may be removed at once.
fn proof(snapshot: &Snapshot<'_>, pod: &PodSnapshot) -> Option<Stop> {
    proof_of_stop(pod, snapshot.job.declared_stopped.as_deref(), snapshot.nodes)
}

/// The job is being deleted: its pods end first.
fn leave(snapshot: &Snapshot<'_>) -> Step {
    let mut next = Step::default();
    let mut waits_for = None;
    for pod in snapshot.own_pods().filter(|pod| pod.has_finalizer) {
        if pod.deleted.is_none() {
            next.actions.push(delete(pod));
        } else if proof(snapshot, pod).is_some() {
            next.actions.push(let_go(pod));
        } else {
            waits_for = Some(pod);
        }
    }
    if let Some(pod) = waits_for
        && let (Some(message), wake) = overdue(pod, snapshot.nodes, snapshot.now)
    {
        next.wake = wake;
        let text = StatusText::new(snapshot.job.status.state, "WaitsForStop", message);
        next.actions.extend(write_if_new(snapshot, JournalStep::Noted, snapshot.job.status.clone(), text));
    } else if next.actions.is_empty() && waits_for.is_none() {
        next.actions.push(Action::Release);
    }
    next
}

fn finished(snapshot: &Snapshot<'_>) -> Step {
    let (job, mut next) = (snapshot.job, Step::default());
    for pod in snapshot.own_pods() {
        let clean = match job.spec.run_policy.clean_pod_policy {
            CleanPodPolicy::None => false,
            CleanPodPolicy::Running => pod.stop(snapshot.nodes).is_none(),
            CleanPodPolicy::All => true,
        };
        if clean && pod.deleted.is_none() {
            next.actions.push(delete(pod));
        }
    }
    let ended = job.status.completion_time.as_ref().map_or(snapshot.now, |time| time.0);
    next.expire(ended, job.spec.run_policy.ttl_seconds_after_finished, snapshot.now, Action::DeleteJob);
    next
}

/// Pods of earlier epochs, and pods that an outdated operator made.
fn housekeeping(snapshot: &Snapshot<'_>) -> Vec<Action> {
    let Some(attempt) = &snapshot.job.status.attempt else { return Vec::new() };
    let mut actions = Vec::new();
    for pod in snapshot.own_pods() {
        let is_it = attempt.uid.as_deref() == Some(&pod.uid);
        let is_over = pod.epoch < attempt.epoch || (pod.epoch == attempt.epoch && attempt.ended.is_some());
        let is_stray = pod.epoch == attempt.epoch && attempt.uid.is_some() && !is_it;
        if (is_stray || (is_over && pod.gated)) && pod.deleted.is_none() {
            actions.push(delete(pod));
        }
        // The journal names the next epoch only after proof of stop. A stray's gate is never
        // opened.
        if pod.has_finalizer && (is_over || (is_stray && pod.deleted.is_some())) {
            actions.push(let_go(pod));
        }
    }
    actions
}

fn alive(snapshot: &Snapshot<'_>) -> Step {
    let job = snapshot.job;
    let status = &job.status;
    let Some(attempt) = status.attempt.as_ref().filter(|attempt| attempt.ended.is_none()) else {
        if job.spec.suspend {
            let text = StatusText::new(State::Suspended, "Suspended", ending::suspended_sentence(status));
            return Step { actions: write_if_new(snapshot, JournalStep::Noted, status.clone(), text), wake: None };
        }
        let next = ending::next_attempt(snapshot, status.clone(), None, None);
        let message = "its pod is about to be made".to_owned();
        return write(
            JournalStep::Planned,
            set_status(next, StatusText::new(State::Waiting, "Planned", message), snapshot),
        );
    };
    if attempt.epoch >= LAST_EPOCH {
        let message = format!("attempt {} is the last that can be numbered: create the job again", attempt.epoch);
        return write(JournalStep::Failed, ending::fail(snapshot, status.clone(), "EpochsExhausted", &message));
    }
    match (snapshot.pod_of(attempt), &attempt.uid) {
        (None, None) => not_made(snapshot, attempt),
        (None, Some(_)) => missing(snapshot, attempt),
        (Some(pod), _) => with_pod(snapshot, attempt, pod),
    }
}

/// The journal has an attempt that has no pod yet.
fn not_made(snapshot: &Snapshot<'_>, attempt: &Attempt) -> Step {
    if let Some(stopping) = wants_stop(snapshot, attempt).or(attempt.stopping) {
        return write(
            JournalStep::Stopped,
            ending::ended(snapshot, attempt, Some(stopping), &Stop::NeverBegan("it had no pod yet".to_owned())),
        );
    }
    let not_before = attempt.not_before.as_ref();
    if let Some(after) = not_before.and_then(|at| bounded_wait(at.0, LONGEST_PAUSE, snapshot.now)) {
        return Step::at(after);
    }
    if let Some(fault) = snapshot.fault {
        if fault.for_good {
            return write(
                JournalStep::Failed,
                ending::fail(snapshot, snapshot.job.status.clone(), "InvalidTemplate", &fault.message),
            );
        }
        let text = StatusText::new(State::Waiting, "PodRefused", fault.message.clone());
        let again = snapshot.now.saturating_add(REFUSAL_PAUSE).ok();
        return Step {
            actions: write_if_new(snapshot, JournalStep::Noted, snapshot.job.status.clone(), text),
            wake: again,
        };
    }
    // A job of this name was deleted and its pod still exists: it may write to the same folder.
    let other = snapshot
        .pods
        .iter()
        .find(|pod| pod.owner.as_ref() != Some(&snapshot.job.uid) && proof(snapshot, pod).is_none());
    if let Some(other) = other {
        let message = format!("waits for the pod {} of an earlier job of this name to end", other.name);
        let text = StatusText::new(State::Waiting, "NameInUse", message);
        return Step {
            actions: write_if_new(snapshot, JournalStep::Noted, snapshot.job.status.clone(), text),
            wake: None,
        };
    }
    Step::one(Action::Create { epoch: attempt.epoch })
}

/// The journal names a pod, and there is none: our finalizer was removed by force.
fn missing(snapshot: &Snapshot<'_>, attempt: &Attempt) -> Step {
    if !snapshot.pod_is_missing {
        return Step::default();
    }
    let declared = snapshot.job.declared_stopped.as_deref();
    if let Some(stop) = proof_without_pod(&attempt.pod, attempt.node.as_ref(), declared, snapshot.nodes) {
        return write(JournalStep::Stopped, ending::ended(snapshot, attempt, attempt.stopping, &stop));
    }
    let message = removed_sentence(
        "trainingjob",
        (&snapshot.job.namespace, &snapshot.job.name),
        &attempt.pod,
        attempt.node.as_ref(),
    );
    let text = StatusText::new(snapshot.job.status.state, "StopNotProven", message);
    Step { actions: write_if_new(snapshot, JournalStep::Noted, snapshot.job.status.clone(), text), wake: None }
}

fn with_pod(snapshot: &Snapshot<'_>, attempt: &Attempt, pod: &PodSnapshot) -> Step {
    if let Some(stop) = proof(snapshot, pod) {
        return write(JournalStep::Stopped, ending::ended(snapshot, attempt, attempt.stopping, &stop));
    }
    if attempt.stopping.is_some() || pod.deleted.is_some() {
        return stopping(snapshot, attempt, pod);
    }
    if let Some(reason) = wants_stop(snapshot, attempt) {
        return write(JournalStep::Stopping, begin_stop(snapshot, attempt, reason));
    }
    let mut next = match &attempt.uid {
        None => place(snapshot, attempt, pod),
        Some(_) if pod.gated => Step::one(Action::Open {
            pod: pod.name.clone(),
            uid: pod.uid.clone(),
            node: attempt.node.clone().filter(|_| attempt.pinned),
        }),
        Some(_) if pod.running => running(snapshot, attempt, pod),
        Some(_) => beginning(snapshot, attempt, pod),
    };
    if let Some(deadline) = deadline(snapshot) {
        next.wake_by([deadline]);
    }
    next
}

/// Whether the job is to be stopped now, in any state.
fn wants_stop(snapshot: &Snapshot<'_>, attempt: &Attempt) -> Option<StopReason> {
    if attempt.stopping.is_some() {
        return None;
    }
    if snapshot.job.spec.suspend {
        return Some(StopReason::Suspend);
    }
    deadline(snapshot).is_some_and(|deadline| deadline <= snapshot.now).then_some(StopReason::Deadline)
}

fn deadline(snapshot: &Snapshot<'_>) -> Option<Timestamp> {
    let start = snapshot.job.status.start_time.as_ref()?.0;
    let limit_s = snapshot.job.spec.run_policy.active_deadline_seconds?;
    start.saturating_add(SignedDuration::from_secs(limit_s)).ok()
}

fn begin_stop(snapshot: &Snapshot<'_>, attempt: &Attempt, reason: StopReason) -> TrainingJobStatus {
    let mut status = snapshot.job.status.clone();
    let since = Some(MicroTime(snapshot.now));
    status.attempt = Some(Attempt { stopping: Some(reason), stopping_since: since, ..attempt.clone() });
    let message = match reason {
        StopReason::Suspend => "was asked to save itself and end, because spec.suspend is true",
        StopReason::Deadline => "was asked to end, because runPolicy.activeDeadlineSeconds is over",
        StopReason::Replace => "its node has no room for it: another one is chosen",
        StopReason::Migrate => "was asked to save itself and end, to continue elsewhere",
    };
    let state = if reason == StopReason::Migrate { State::Migrating } else { status.state };
    set_status(status, StatusText::new(state, "Stopping", message.to_owned()), snapshot)
}

/// Whether the job is being stopped and is to go on later.
pub(super) fn saves_itself(status: &TrainingJobStatus) -> bool {
    let stopping = status.attempt.as_ref().and_then(|attempt| attempt.stopping);
    matches!(stopping, Some(StopReason::Suspend | StopReason::Migrate))
}

/// The pod was asked to end, by the operator or by another client.
fn stopping(snapshot: &Snapshot<'_>, attempt: &Attempt, pod: &PodSnapshot) -> Step {
    if pod.deleted.is_none() {
        // It found room just before it was to be replaced.
        if attempt.stopping == Some(StopReason::Replace) && pod.node.is_some() {
            let mut status = snapshot.job.status.clone();
            status.attempt = Some(Attempt { stopping: None, stopping_since: None, ..attempt.clone() });
            return write(JournalStep::Noted, status);
        }
        // On a small share the job might not save itself in time: its own share comes back first.
        let saves = saves_itself(&snapshot.job.status);
        let until = attempt.stopping_since.as_ref().and_then(|since| own_share_until(pod, since.0, snapshot.now));
        if let Some(until) = until.filter(|_| saves && pod.running) {
            return Step::at(until);
        }
        return Step::one(delete(pod));
    }
    let (message, wake) = overdue(pod, snapshot.nodes, snapshot.now);
    let Some(message) = message else { return Step { actions: Vec::new(), wake } };
    let state =
        if attempt.stopping == Some(StopReason::Migrate) { State::Migrating } else { snapshot.job.status.state };
    let text = StatusText::new(state, "StopNotProven", message);
    Step { actions: write_if_new(snapshot, JournalStep::Noted, snapshot.job.status.clone(), text), wake }
}

/// A gated pod that the journal does not name yet: its node is decided on, and the journal names
/// both.
fn place(snapshot: &Snapshot<'_>, attempt: &Attempt, pod: &PodSnapshot) -> Step {
    let (job, status) = (snapshot.job, &snapshot.job.status);
    let order = snapshot.order.filter(|order| order.kind == OrderKind::Place && !attempt.tried.contains(&order.node));
    let (node, why) = if attempt.pinned {
        (attempt.node.clone(), status.last_decision.clone())
    } else if let Some(order) = order {
        (Some(order.node.clone()), Some(order.sentence()))
    } else if !job.spec.policy.places_pods() {
        (None, Some(format!("policy {}: the cluster's scheduler places", job.spec.policy.name())))
    } else if let Some(patience_ends) = wait_end(attempt.since.0, DECISION_PATIENCE, snapshot.now) {
        return Step::at(patience_ends);
    } else {
        (None, Some("no node was decided on in time: the cluster's scheduler places".to_owned()))
    };
    let mut next = status.clone();
    let pinned = node.is_some();
    let message = match &node {
        Some(node) => format!("the pod {} is to run on {node}", pod.name),
        None => format!("the pod {} waits for the cluster's scheduler", pod.name),
    };
    next.attempt = Some(Attempt { uid: Some(pod.uid.clone()), node, pinned, ..attempt.clone() });
    next.last_decision = why;
    let text = StatusText::new(status.state, "Placed", message);
    let taken = order.map(|_| Action::RemoveOrder);
    Step {
        actions: [Action::Write(JournalStep::Placed, Box::new(set_status(next, text, snapshot)))]
            .into_iter()
            .chain(taken)
            .collect(),
        wake: None,
    }
}

/// The pod's gate is open; it has no node yet, or its containers have not begun.
fn beginning(snapshot: &Snapshot<'_>, attempt: &Attempt, pod: &PodSnapshot) -> Step {
    let status = &snapshot.job.status;
    let Some((since, words)) = pod.unschedulable.as_ref().filter(|_| pod.node.is_none()) else {
        let silent = pod.node.as_ref().filter(|node| snapshot.nodes.get(*node) == Some(&NodeState::Silent));
        let message = match (silent, &pod.waiting, &pod.node) {
            (Some(node), ..) => silent_sentence(node),
            (_, Some(waiting), _) => format!("the pod {} does not begin: {waiting}", pod.name),
            (_, _, Some(node)) => format!("the pod {} begins on {node}", pod.name),
            _ => return Step::default(),
        };
        let text = StatusText::new(status.state, "Beginning", message);
        return Step { actions: write_if_new(snapshot, JournalStep::Noted, status.clone(), text), wake: None };
    };
    let patience_ends = wait_end(*since, ROOM_PATIENCE, snapshot.now);
    // A claim that is missing or not bound is so on every other node, too.
    let elsewhere = attempt.pinned && !words.to_lowercase().contains("persistentvolumeclaim");
    if elsewhere && patience_ends.is_none() {
        let mut replaced = begin_stop(snapshot, attempt, StopReason::Replace);
        let node = attempt.node.clone().unwrap_or_default();
        replaced.last_decision = Some(format!("{node} had no room ({words}): another node is chosen"));
        // The request was followed. A job that runs elsewhere by now is not stopped for the same node again.
        if snapshot.job.wanted_node == attempt.node {
            replaced.asked_node = attempt.node.clone();
        }
        return write(JournalStep::Stopping, replaced);
    }
    let text = StatusText::new(status.state, "Unschedulable", format!("no node takes the pod {}: {words}", pod.name));
    let wake = patience_ends.filter(|_| elsewhere);
    Step { actions: write_if_new(snapshot, JournalStep::Noted, status.clone(), text), wake }
}

fn running(snapshot: &Snapshot<'_>, attempt: &Attempt, pod: &PodSnapshot) -> Step {
    let status = &snapshot.job.status;
    let node = pod.node.clone().unwrap_or_default();
    let begun = attempt.start_time.is_some();
    if begun && let Some(order) = snapshot.order.filter(|order| order.kind == OrderKind::Move) {
        let allowed = movable(snapshot.job).is_ok() && order.node != node;
        if !allowed || matches!(snapshot.nodes.get(&node), Some(NodeState::Silent | NodeState::Missing)) {
            return Step::one(Action::RemoveOrder);
        }
        let mut next = begin_stop(snapshot, attempt, StopReason::Migrate);
        next.migration = Some(begin_move(order, node, attempt.epoch, snapshot.now));
        next.last_decision = Some(format!("move to {}: {}", order.node, order.sentence()));
        next.asked_node = snapshot.job.wanted_node.clone();
        return Step {
            actions: vec![Action::Write(JournalStep::Stopping, Box::new(next)), Action::RemoveOrder],
            wake: None,
        };
    }
    let mut next = status.clone();
    if !begun {
        next.start_time.get_or_insert(MicroTime(snapshot.now));
        next.attempt = Some(Attempt {
            node: Some(node.clone()),
            start_time: Some(MicroTime(snapshot.now)),
            tried: Vec::new(),
            ..attempt.clone()
        });
        if let Some(migration) = next.migration.take() {
            close(&mut next, &migration, &node, snapshot.now);
        }
    }
    if let Some((category, share)) = snapshot.progress {
        let turned = next.category.as_deref() != Some(category);
        let far = share.unwrap_or(0).abs_diff(next.share_percent.unwrap_or(0)) >= SHARE_STEP;
        if turned || far {
            next.category = Some(category.to_owned());
            next.share_percent = share;
        }
    }
    if let Some(reported) = snapshot.finish {
        finish::predict(&mut next, reported);
    }
    let text = if snapshot.nodes.get(&node) == Some(&NodeState::Silent) {
        StatusText::new(State::Running, "NodeSilent", silent_sentence(&node))
    } else if snapshot.nodes.get(&node) == Some(&NodeState::Missing) {
        StatusText::new(State::Running, "NodeMissing", missing_node_sentence(&node))
    } else {
        let stays = match movable(snapshot.job) {
            Ok(()) => String::new(),
            Err(why) => format!("; it is not moved: {why}"),
        };
        let waits = closed_sentence(snapshot.closed);
        StatusText::new(State::Running, "Running", format!("runs on {node} as {}{stays}{waits}", pod.name))
    };
    let step = if begun { JournalStep::Noted } else { JournalStep::Running };
    Step { actions: write_if_new(snapshot, step, next, text), wake: None }
}

/// The order of the node annotation, if the job does not run there and the value was not followed
/// before.
pub(crate) fn requested_order(job: &JobSnapshot) -> Option<Order> {
    let node = job.wanted_node.as_ref()?;
    let attempt = job.status.attempt.as_ref().filter(|attempt| attempt.ended.is_none());
    let kind = match attempt {
        Some(attempt) if attempt.start_time.is_some() => OrderKind::Move,
        _ => OrderKind::Place,
    };
    let fits = match kind {
        OrderKind::Place => attempt.is_none_or(|attempt| !attempt.tried.contains(node)),
        OrderKind::Move => {
            let there = attempt.is_some_and(|attempt| attempt.node.as_ref() == Some(node));
            !there && job.status.asked_node.as_ref() != Some(node) && movable(job).is_ok()
        }
    };
    let order = Order { uid: job.uid.clone(), node: node.clone(), kind, reason: PlacementReason::Requested };
    (fits && applies(&order, &job.status)).then_some(order)
}

/// Why the job must stay where it is.
pub(crate) fn movable(job: &JobSnapshot) -> Result<(), ImmovableReason> {
    if job.spec.checkpoint.is_none() {
        return Err(ImmovableReason::NoCheckpoint);
    }
    match (&job.status.unmovable, job.spec.policy) {
        (Some(why), _) => Err(ImmovableReason::FailedMove(why.clone())),
        (None, policy) if !policy.places_pods() => Err(ImmovableReason::Policy(policy)),
        (None, _) => Ok(()),
    }
}

fn write(step: JournalStep, status: TrainingJobStatus) -> Step {
    Step::one(Action::Write(step, Box::new(status)))
}

/// Writes the status unless it stays the same.
fn write_if_new(
    snapshot: &Snapshot<'_>,
    step: JournalStep,
    status: TrainingJobStatus,
    text: StatusText,
) -> Vec<Action> {
    let next = set_status(status, text, snapshot);
    if next == snapshot.job.status { Vec::new() } else { vec![Action::Write(step, Box::new(next))] }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
