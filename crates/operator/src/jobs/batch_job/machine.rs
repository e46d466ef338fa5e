//! What to do about an adopted Job, from a snapshot of it. Pure, and by the same rule as for
//! TrainingJobs: the intention is written first, and each action is harmless if repeated. The Job
//! and its pods are read from the API server itself before each step, the Job first. The API server
//! refuses writes to a Job that has changed since.

use crate::jobs::moves::{
    begin_move, closed_sentence, continue_move, own_share_until, proof_of_stop, proof_without_pod, record, verdict,
};
use crate::jobs::waiting::check_not_kept;
use crate::jobs::waiting::{overdue, removed_sentence};
use crate::jobs::workload::JournalStep;
use crate::state::orders::{JobFacts, JobState, Order, OrderKind};
use crate::state::snapshot::{Nodes, PodSnapshot, Stop};
use crate::state::workload::WorkloadKind;
use gainshare_core::view::Marks;
use gainshare_kube_api::adopted::{BatchJobSnapshot, Journal, StoppedPod};
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::training_job::{Migration, Phase};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// How often a Job is read while it is moved.
const READ_EVERY: SignedDuration = SignedDuration::from_millis(500);

pub(super) struct Snapshot<'a> {
    pub(super) now: Timestamp,
    pub(super) job: &'a BatchJobSnapshot,
    /// All pods that the Job owns.
    pub(super) pods: &'a [PodSnapshot],
    pub(super) nodes: &'a Nodes,
    pub(super) order: Option<&'a Order>,
    /// The node that was asked for, while it takes no pods.
    pub(super) closed: Option<&'a NodeName>,
    /// Sharing is switched off: everything is to be given back.
    pub(super) off: bool,
    /// What SpeCon has done with the Job.
    pub(super) marks: Marks,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Writes only the journal.
    Write(JournalStep, Box<Journal>),
    /// Marks the pod for its node agent, or removes the mark.
    Mark(StoppedPod, bool),
    /// Puts our finalizer on the pod, so that its end is read.
    Hold(StoppedPod),
    LetGo(StoppedPod),
    Suspend,
    /// Without a start time, the template of a suspended Job can change.
    ClearStartTime,
    /// The journal, our preference, and `suspend: false`, at once.
    Resume(JournalStep, Box<Journal>),
    /// Removes the journal, and our preference where that is possible.
    Forget,
    /// Removes the order: it is in the journal, or cannot be carried out.
    RemoveOrder,
}

pub(super) type Step = crate::jobs::workload::Step<Action>;

impl From<Action> for Step {
    fn from(action: Action) -> Step {
        Step { actions: vec![action], wake: None }
    }
}

pub(super) fn step(snapshot: &Snapshot<'_>) -> Step {
    let job = snapshot.job;
    let mut next = match &job.journal.migration {
        _ if job.deleting || job.ended => over(snapshot),
        Some(migration) if migration.phase == Phase::Stopping => stopping(snapshot, migration),
        Some(migration) => starting(snapshot, migration),
        None if job.asked && !snapshot.off => followed(snapshot),
        None => let_be(snapshot),
    };
    let takes = next.actions.iter().any(|action| matches!(action, Action::Write(JournalStep::Stopping, _)));
    if snapshot.order.is_some() && (takes || next.actions.is_empty()) {
        next.actions.push(Action::RemoveOrder);
    }
    next
}

pub(super) fn id(pod: &PodSnapshot) -> StoppedPod {
    StoppedPod { name: pod.name.clone(), uid: pod.uid.clone() }
}

/// The pod that runs and is not about to end.
fn running<'a>(snapshot: &Snapshot<'a>) -> Option<&'a PodSnapshot> {
    snapshot.pods.iter().find(|pod| pod.running && pod.deleted.is_none() && pod.node.is_some())
}

/// The Job has ended, or is being deleted: no attempt follows, so no pod has to be held.
fn over(snapshot: &Snapshot<'_>) -> Step {
    let held = snapshot.pods.iter().filter(|pod| pod.has_finalizer);
    let mut actions: Vec<Action> = held.map(|pod| Action::LetGo(id(pod))).collect();
    if snapshot.job.journal.migration.is_some() && !snapshot.job.deleting {
        let journal = cancelled(snapshot, "it ended before it was moved");
        actions.push(Action::Write(JournalStep::Cancelled, Box::new(journal)));
    }
    Step { actions, wake: None }
}

fn cancelled(snapshot: &Snapshot<'_>, message: &str) -> Journal {
    Journal { migration: None, pod: None, message: message.to_owned(), ..snapshot.job.journal.clone() }
}

/// Gives up the move, and resumes a Job that was suspended for it.
fn cancel(snapshot: &Snapshot<'_>, message: &str) -> Step {
    let journal = Box::new(cancelled(snapshot, message));
    if snapshot.job.suspended {
        Action::Resume(JournalStep::Cancelled, journal).into()
    } else {
        Action::Write(JournalStep::Cancelled, journal).into()
    }
}

fn note(snapshot: &Snapshot<'_>, message: String) -> Vec<Action> {
    if snapshot.job.has_journal && snapshot.job.journal.message == message {
        return Vec::new();
    }
    vec![Action::Write(JournalStep::Noted, Box::new(Journal { message, ..snapshot.job.journal.clone() }))]
}

/// The Job is not to be moved any more.
fn let_be(snapshot: &Snapshot<'_>) -> Step {
    let job = snapshot.job;
    let marked = snapshot.pods.iter().filter(|pod| !pod.job.is_empty() && pod.stop(snapshot.nodes).is_none());
    let mut actions: Vec<Action> = marked.map(|pod| Action::Mark(id(pod), false)).collect();
    // Without a move no step waits for a pod's end, so no pod may be held.
    actions.extend(snapshot.pods.iter().filter(|pod| pod.has_finalizer).map(|pod| Action::LetGo(id(pod))));
    let idle = job.suspended && snapshot.pods.iter().all(|pod| pod.stop(snapshot.nodes).is_some());
    match &job.journal.prefers {
        _ if !job.has_journal => {}
        None => actions.push(Action::Forget),
        Some(_) if idle && job.has_start_time => actions.push(Action::ClearStartTime),
        Some(_) if idle => actions.push(Action::Forget),
        // A running Job's template cannot change; a preference does no harm.
        Some(_) => {}
    }
    Step { actions, wake: None }
}

fn followed(snapshot: &Snapshot<'_>) -> Step {
    let job = snapshot.job;
    let held = snapshot.pods.iter().filter(|pod| pod.has_finalizer);
    let mut actions: Vec<Action> = held.map(|pod| Action::LetGo(id(pod))).collect();
    if let Some(problem) = &job.problem {
        let marked = snapshot.pods.iter().filter(|pod| !pod.job.is_empty() && pod.stop(snapshot.nodes).is_none());
        actions.extend(marked.map(|pod| Action::Mark(id(pod), false)));
        actions.extend(note(snapshot, format!("is not moved: {problem}")));
        return Step { actions, wake: None };
    }
    let Some(pod) = running(snapshot) else { return Step { actions, wake: None } };
    if pod.job.is_empty() {
        actions.push(Action::Mark(id(pod), true));
    }
    let node = pod.node.clone().unwrap_or_default();
    let order = snapshot.order.filter(|order| order.kind == OrderKind::Move && order.node != node);
    if let Some(order) = order.filter(|_| job.movable().is_ok()) {
        let mut journal = job.journal.clone().with_marks(snapshot.marks);
        journal.pod = Some(id(pod));
        journal.message = format!("is to be saved and resumed on {}: {}", order.node, order.sentence());
        journal.migration = Some(begin_move(order, node, job.journal.moves.saturating_add(1), snapshot.now));
        journal.asked_node = job.wanted_node.clone();
        actions.push(Action::Write(JournalStep::Stopping, Box::new(journal)));
        return Step { actions, wake: None };
    }
    let stays = job.movable().err().map(|why| format!("; it is not moved: {why}")).unwrap_or_default();
    let mut journal = job.journal.clone().with_marks(snapshot.marks);
    let waits = closed_sentence(snapshot.closed);
    journal.message = format!("runs on {node} as {}{stays}{waits}", pod.name);
    journal.node = Some(node);
    journal.began = journal.began.or(Some(MicroTime(pod.created)));
    if journal != job.journal {
        actions.push(Action::Write(JournalStep::Noted, Box::new(journal)));
    }
    Step { actions, wake: None }
}

/// The journal says that this pod is to be stopped.
fn stopping(snapshot: &Snapshot<'_>, migration: &Migration) -> Step {
    let job = snapshot.job;
    let Some(stopped) = &job.journal.pod else {
        return cancel(snapshot, "the journal names no pod: the move is given up");
    };
    let pod = snapshot.pods.iter().find(|pod| pod.uid == stopped.uid);
    let declared = job.declared_stopped.as_deref();
    let stop = match pod {
        Some(pod) => proof_of_stop(pod, declared, snapshot.nodes),
        None => proof_without_pod(&stopped.name, Some(&migration.from), declared, snapshot.nodes),
    };
    let wake = snapshot.now.saturating_add(READ_EVERY).ok();
    match (pod, stop) {
        // The pod ended, or was deleted, before the Job was suspended: the Job controller goes on
        // by its own rules.
        (None, _) | (_, Some(_)) if !job.suspended => cancel(snapshot, "its pod ended before it was moved"),
        (Some(pod), Some(Stop::Exited(_) | Stop::NeverBegan(_))) if pod.deleted.is_none() => {
            cancel(snapshot, "its pod ended by itself before it was moved")
        }
        (_, Some(stop)) => {
            let others = snapshot.pods.iter().filter(|pod| pod.uid != stopped.uid);
            if others.filter(|pod| pod.stop(snapshot.nodes).is_none()).count() > 0 {
                return Step { actions: Vec::new(), wake };
            }
            proven(snapshot, migration, pod, &stop)
        }
        (None, None) => {
            let sentence = removed_sentence("job", (&job.namespace, &job.name), &stopped.name, Some(&migration.from));
            Step { actions: note(snapshot, sentence), wake }
        }
        (Some(pod), None) if pod.deleted.is_some() && !job.suspended => {
            cancel(snapshot, "its pod was deleted before it was moved")
        }
        (Some(pod), None) if pod.deleted.is_none() && !pod.has_finalizer => Action::Hold(id(pod)).into(),
        // The pod gets its own share back before it saves itself, as for TrainingJobs.
        (Some(pod), None) if !job.suspended && own_share_until(pod, migration.since.0, snapshot.now).is_some() => {
            Step { actions: Vec::new(), wake }
        }
        (Some(_), None) if !job.suspended => Action::Suspend.into(),
        (Some(pod), None) => {
            let actions =
                overdue(pod, snapshot.nodes, snapshot.now).0.map(|message| note(snapshot, message)).unwrap_or_default();
            Step { actions, wake }
        }
    }
}

/// The end is proven: the Job goes on, at its target or where it was.
fn proven(snapshot: &Snapshot<'_>, migration: &Migration, pod: Option<&PodSnapshot>, stop: &Stop) -> Step {
    let job = snapshot.job;
    if job.has_start_time {
        return Action::ClearStartTime.into();
    }
    let time = format!("{} s: terminationGracePeriodSeconds of its template", job.grace_s);
    let (moves, message) = verdict(stop, migration, pod, &time);
    let migration = continue_move(migration.clone(), moves, snapshot.now);
    let mut journal = job.journal.clone();
    journal.unmovable = (!moves).then(|| message.clone());
    journal.message = message;
    journal.prefers = Some(migration.to.clone());
    journal.migration = Some(migration);
    Action::Resume(JournalStep::Stopped, Box::new(journal)).into()
}

/// The Job was resumed; the scheduler decides where it runs.
fn starting(snapshot: &Snapshot<'_>, migration: &Migration) -> Step {
    let held = snapshot.pods.iter().filter(|pod| pod.has_finalizer);
    let mut actions: Vec<Action> = held.map(|pod| Action::LetGo(id(pod))).collect();
    let before = snapshot.job.journal.pod.as_ref().map(|pod| pod.uid.as_str());
    let arrived = running(snapshot).filter(|pod| Some(pod.uid.as_str()) != before);
    let Some((pod, node)) = arrived.and_then(|pod| Some((pod, pod.node.as_ref()?))) else {
        return Step { actions, wake: snapshot.now.saturating_add(READ_EVERY).ok() };
    };
    let mut journal = Journal { migration: None, pod: None, ..snapshot.job.journal.clone() };
    journal.moves = journal.moves.saturating_add(u32::from(*node != migration.from));
    record(&mut journal.last_moves, migration, node, snapshot.now);
    journal.message = format!("runs on {node} as {}", pod.name);
    journal.node = Some(node.clone());
    if *node != migration.to {
        journal.message.push_str(&format!(": the scheduler did not put it on {}", migration.to));
    }
    actions.push(Action::Write(JournalStep::Running, Box::new(journal)));
    Step { actions, wake: None }
}

/// The order of the node annotation, if the value was not followed before.
pub(super) fn requested_order(job: &BatchJobSnapshot) -> Option<Order> {
    let node = job.wanted_node.clone().filter(|node| job.journal.asked_node.as_ref() != Some(node))?;
    Some(Order { uid: job.uid.clone(), node, kind: OrderKind::Move, reason: PlacementReason::Requested })
}

/// What the decision reads.
pub(super) fn facts(snapshot: &Snapshot<'_>) -> Option<JobFacts> {
    let job = snapshot.job;
    if job.deleting || !job.asked || snapshot.off {
        return None;
    }
    let pod = running(snapshot);
    let state = match pod.and_then(|pod| Some((pod, pod.node.clone()?))) {
        _ if job.ended => JobState::Done,
        Some((pod, node)) if job.journal.migration.is_none() && !job.suspended => {
            JobState::Running { node, epoch: job.journal.moves.saturating_add(1), since: pod.created }
        }
        _ => JobState::Moving,
    };
    Some(JobFacts {
        uid: job.uid.clone(),
        kind: WorkloadKind::Job,
        namespace: job.namespace.clone(),
        name: job.name.clone(),
        owner: job.namespace.clone(),
        arrived: job.created,
        policy: job.policy,
        state,
        movable: job.movable().and_then(|()| check_not_kept(job.wanted_node.as_ref())),
        pod_uid: pod.map(|pod| pod.uid.clone()),
        cpu_request_milli: job.requests.0,
        memory_request_bytes: job.requests.1,
        tried: Vec::new(),
        move_cost_s: job.journal.last_moves.last().map(|made| made.save_s + made.restore_s),
        marks: job.journal.marks(),
    })
}

/// Runs one step with an order to move, as tests outside of this module need it.
#[cfg(test)]
pub(in crate::jobs) fn test_step(job: &BatchJobSnapshot, pods: &[PodSnapshot], nodes: &Nodes, now: Timestamp) {
    let order = requested_order(job).unwrap_or_else(|| Order {
        uid: job.uid.clone(),
        node: "b".into(),
        kind: OrderKind::Move,
        reason: PlacementReason::Gain,
    });
    for off in [false, true] {
        let snapshot =
            Snapshot { now, job, pods, nodes, order: Some(&order), closed: None, off, marks: Marks::default() };
        let _ = (step(&snapshot), facts(&snapshot));
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "step_tests.rs"]
mod step_tests;
