//! What to do about a job, from what is seen of it. Pure: no I/O, no clock.
//!
//! **How.** [`step`] looks at a job, its pods and their nodes, perhaps all of them old copies, and answers either with one status to write
//! (a *journal* entry, refused by the API server if the job has changed since) or with effects that carry out what the journal already
//! says. Writing comes first and alone: an effect is never done before its reason is on the object.
//!
//! **Why no two attempts live.** Three rules, each of which survives a crash, an old copy and a second manager:
//! 1. Pods are made with a scheduling gate, so a pod that a forgetful manager makes does not run.
//! 2. The gate is opened only for the pod whose uid the journal names, once per epoch.
//! 3. The journal goes on to the next epoch only with proof that the pod of this one has stopped ([`PodSeen::stop`]), or that it never had a uid
//!    in the journal.
//!
//! **Why it always ends.** Every state either waits for somebody named in the status (a kubelet, a scheduler, an administrator, the clock) or has
//! an effect; failures are counted, and no move is ordered twice by itself.

use super::ending;
use super::seen::{JobSeen, NodeSeen, Nodes, PodSeen, Stop};
use super::status::{Said, say};
use super::{Order, OrderKind};
use gainshare_kube_api::training_job::{
    Attempt, CleanPodPolicy, JobPolicy, Migration, Move, NODE_ANNOTATION, OUR_NAME, Phase, STOPPED_ANNOTATION, State,
    Stopping, TrainingJobStatus,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// How long a new pod waits for the decision before the cluster's own scheduler places it.
pub(crate) const DECISION_PATIENCE: SignedDuration = SignedDuration::from_secs(2);

/// How long a pod may find no room on the node chosen for it before another one is chosen.
pub(crate) const ROOM_PATIENCE: SignedDuration = SignedDuration::from_secs(10);

/// So long a job that is to save itself may have to wait for its own share; most often it takes a tenth of it.
pub(super) const OWN_SHARE_WAIT: SignedDuration = SignedDuration::from_secs(2);

/// A kubelet that has not reported a pod's end so long after its time was over is called silent.
const SILENCE: SignedDuration = SignedDuration::from_secs(10);

/// How long to wait before a pod that was refused (by a quota, say) is tried again.
pub(crate) const REFUSAL_PAUSE: SignedDuration = SignedDuration::from_secs(10);

/// A share is written anew when it has changed by so many hundredths.
const SHARE_STEP: u32 = 5;

/// So many moves are kept for people to read.
const MOVES_KEPT: usize = 10;

/// Everything a step may look at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) now: Timestamp,
    pub(crate) job: &'a JobSeen,
    /// All pods with the job's label, whoever made them.
    pub(crate) pods: &'a [PodSeen],
    /// The API server itself said that the pod of the attempt does not exist.
    pub(crate) pod_is_missing: bool,
    pub(crate) nodes: &'a Nodes,
    pub(crate) order: Option<&'a Order>,
    /// Why there can be no pod: the template is wrong, or the API server refused it.
    pub(crate) fault: Option<&'a Fault>,
    /// What the agent of its node last said: category and share in percent.
    pub(crate) progress: Option<(&'static str, Option<u32>)>,
}

/// Why a pod could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    /// It never can, as the job is written.
    pub(crate) for_good: bool,
    pub(crate) message: String,
}

/// One thing to do. All are harmless if repeated, or if what they were decided on is old.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Do {
    /// Write the status, unless the job has changed; the step's name is for fail points and logs.
    Write(&'static str, Box<TrainingJobStatus>),
    /// Mark the job as ours, or let it go.
    Hold,
    Release,
    /// Its time after the end is over.
    DeleteJob,
    /// Make the pod of this epoch, gated.
    Create {
        epoch: u32,
    },
    /// Pin the pod to the node and open its gate.
    Open {
        pod: String,
        uid: String,
        node: Option<String>,
    },
    /// Ask the pod to end.
    Delete {
        pod: String,
        uid: String,
    },
    /// The pod's end is written down: its object may go.
    LetGo {
        pod: String,
        uid: String,
    },
    /// The order was taken, or cannot be carried out.
    Taken,
}

/// What to do now, and when to look again if nothing happens.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Next {
    pub(crate) todo: Vec<Do>,
    pub(crate) wake: Option<Timestamp>,
}

impl Next {
    fn one(todo: Do) -> Next {
        Next { todo: vec![todo], wake: None }
    }

    fn at(wake: Timestamp) -> Next {
        Next { todo: Vec::new(), wake: Some(wake) }
    }
}

pub(crate) fn step(seen: &Seen<'_>) -> Next {
    let job = seen.job;
    if job.spec.managed_by.as_deref().is_some_and(|name| name != OUR_NAME) {
        return Next::default();
    }
    if job.deleting {
        return if job.has_finalizer { leave(seen) } else { Next::default() };
    }
    if !job.has_finalizer {
        return Next::one(Do::Hold);
    }
    let mut next = match job.status.state {
        State::Succeeded | State::Failed => finished(seen),
        _ => alive(seen),
    };
    next.todo.extend(housekeeping(seen));
    if seen.order.is_some_and(|order| !applies(order, &job.status)) {
        next.todo.push(Do::Taken);
    }
    // An entry of the journal goes alone: what follows from it is found by the next step, on the job as it was written.
    if let Some(at) = next.todo.iter().position(|todo| matches!(todo, Do::Write(..))) {
        let taken = next.todo.contains(&Do::Taken);
        let write = next.todo.swap_remove(at);
        next.todo = if taken { vec![write, Do::Taken] } else { vec![write] };
    }
    next
}

/// Whether an order speaks of the state the job is in: a place for a job that waits, a move for one that runs.
fn applies(order: &Order, status: &TrainingJobStatus) -> bool {
    let attempt = status.attempt.as_ref().filter(|attempt| attempt.ended.is_none());
    match order.kind {
        OrderKind::Place => attempt.is_none_or(|attempt| attempt.uid.is_none() && !attempt.pinned),
        OrderKind::Move => attempt.is_some_and(|attempt| attempt.start_time.is_some() && attempt.stopping.is_none()),
    }
}

/// The pods that this very job made.
pub(super) fn own<'a>(seen: &Seen<'a>) -> impl Iterator<Item = &'a PodSeen> {
    let uid = seen.job.uid.as_str();
    seen.pods.iter().filter(move |pod| pod.owner.as_deref() == Some(uid))
}

/// The pod of this attempt: the one the journal names, or the one it may name.
pub(super) fn pod_of<'a>(seen: &Seen<'a>, attempt: &Attempt) -> Option<&'a PodSeen> {
    match &attempt.uid {
        Some(uid) => seen.pods.iter().find(|pod| pod.uid == *uid),
        None => own(seen).find(|pod| pod.epoch == attempt.epoch),
    }
}

fn let_go(pod: &PodSeen) -> Do {
    Do::LetGo { pod: pod.name.clone(), uid: pod.uid.clone() }
}

fn delete(pod: &PodSeen) -> Do {
    Do::Delete { pod: pod.name.clone(), uid: pod.uid.clone() }
}

/// Whether the pod can be told to go without waiting for anybody.
fn has_stopped(seen: &Seen<'_>, pod: &PodSeen) -> bool {
    pod.stop(seen.nodes).is_some() || is_sworn(seen, pod)
}

/// An administrator's word counts for a pod that was asked to end.
fn is_sworn(seen: &Seen<'_>, pod: &PodSeen) -> bool {
    pod.deleted.is_some() && seen.job.sworn_stopped.as_deref() == Some(&pod.name)
}

/// The job is being deleted: its pods end first.
fn leave(seen: &Seen<'_>) -> Next {
    let mut next = Next::default();
    let mut waits_for = None;
    for pod in own(seen).filter(|pod| pod.has_finalizer) {
        if pod.deleted.is_none() {
            next.todo.push(delete(pod));
        } else if has_stopped(seen, pod) {
            next.todo.push(let_go(pod));
        } else {
            waits_for = Some(pod);
        }
    }
    if let Some(pod) = waits_for
        && let (Some(message), wake) = overdue(pod, seen.now)
    {
        next.wake = wake;
        let said = Said::new(seen.job.status.state, "WaitsForStop", message);
        next.todo.extend(write_if_new(seen, "said", seen.job.status.clone(), said));
    } else if next.todo.is_empty() && waits_for.is_none() {
        next.todo.push(Do::Release);
    }
    next
}

fn finished(seen: &Seen<'_>) -> Next {
    let (job, mut next) = (seen.job, Next::default());
    for pod in own(seen) {
        let clean = match job.spec.run_policy.clean_pod_policy {
            CleanPodPolicy::None => false,
            CleanPodPolicy::Running => pod.stop(seen.nodes).is_none(),
            CleanPodPolicy::All => true,
        };
        if clean && pod.deleted.is_none() {
            next.todo.push(delete(pod));
        }
    }
    let ended = job.status.completion_time.as_ref().map_or(seen.now, |time| time.0);
    if let Some(ttl_s) = job.spec.run_policy.ttl_seconds_after_finished {
        let until = ended.saturating_add(SignedDuration::from_secs(ttl_s)).unwrap_or(Timestamp::MAX);
        if until <= seen.now {
            next.todo.push(Do::DeleteJob);
        } else {
            next.wake = Some(until);
        }
    }
    next
}

/// Pods of former epochs, and pods that a manager made which did not know better.
fn housekeeping(seen: &Seen<'_>) -> Vec<Do> {
    let Some(attempt) = &seen.job.status.attempt else { return Vec::new() };
    let mut todo = Vec::new();
    for pod in own(seen) {
        let is_it = attempt.uid.as_deref() == Some(&pod.uid);
        let is_over = pod.epoch < attempt.epoch || (pod.epoch == attempt.epoch && attempt.ended.is_some());
        let is_stray = pod.epoch == attempt.epoch && attempt.uid.is_some() && !is_it;
        if (is_stray || (is_over && pod.gated)) && pod.deleted.is_none() {
            todo.push(delete(pod));
        }
        // The end of an epoch was proven before the journal said it. A stray's gate is closed for ever.
        if pod.has_finalizer && (is_over || (is_stray && pod.deleted.is_some())) {
            todo.push(let_go(pod));
        }
    }
    todo
}

fn alive(seen: &Seen<'_>) -> Next {
    let job = seen.job;
    let status = &job.status;
    let Some(attempt) = status.attempt.as_ref().filter(|attempt| attempt.ended.is_none()) else {
        if job.spec.suspend {
            let said = Said::new(State::Suspended, "Suspended", ending::suspended_sentence(status));
            return Next { todo: write_if_new(seen, "said", status.clone(), said), wake: None };
        }
        let next = ending::next_attempt(seen, status.clone(), None, None);
        let message = "its pod is about to be made".to_owned();
        return write("planned", say(next, Said::new(State::Waiting, "Planned", message), seen));
    };
    match (pod_of(seen, attempt), &attempt.uid) {
        (None, None) => not_made(seen, attempt),
        (None, Some(_)) => missing(seen, attempt),
        (Some(pod), _) => with_pod(seen, attempt, pod),
    }
}

/// The journal speaks of an attempt that has no pod yet.
fn not_made(seen: &Seen<'_>, attempt: &Attempt) -> Next {
    if let Some(stopping) = wants_stop(seen, attempt).or(attempt.stopping) {
        return write(
            "stopped",
            ending::ended(seen, attempt, Some(stopping), &Stop::NeverBegan("it had no pod yet".to_owned())),
        );
    }
    if let Some(after) = attempt.not_before.as_ref().filter(|after| after.0 > seen.now) {
        return Next::at(after.0);
    }
    if let Some(fault) = seen.fault {
        if fault.for_good {
            return write("failed", ending::fail(seen, seen.job.status.clone(), "InvalidTemplate", &fault.message));
        }
        let said = Said::new(State::Waiting, "PodRefused", fault.message.clone());
        let again = seen.now.saturating_add(REFUSAL_PAUSE).ok();
        return Next { todo: write_if_new(seen, "said", seen.job.status.clone(), said), wake: again };
    }
    // A job of this name was deleted and its pod is still there: it may write to the same folder.
    let other = seen.pods.iter().find(|pod| pod.owner.as_deref() != Some(&seen.job.uid) && !has_stopped(seen, pod));
    if let Some(other) = other {
        let message = format!("waits for the pod {} of an earlier job of this name to end", other.name);
        let said = Said::new(State::Waiting, "NameInUse", message);
        return Next { todo: write_if_new(seen, "said", seen.job.status.clone(), said), wake: None };
    }
    Next::one(Do::Create { epoch: attempt.epoch })
}

/// The journal names a pod, and there is none: somebody removed our finalizer by force.
fn missing(seen: &Seen<'_>, attempt: &Attempt) -> Next {
    if !seen.pod_is_missing {
        return Next::default();
    }
    let off = attempt.node.as_ref().filter(|node| seen.nodes.get(*node) == Some(&NodeSeen::Off));
    if let Some(node) = off {
        return write("stopped", ending::ended(seen, attempt, attempt.stopping, &Stop::NodeOff(node.clone())));
    }
    if seen.job.sworn_stopped.as_deref() == Some(&attempt.pod) {
        return write("stopped", ending::ended(seen, attempt, attempt.stopping, &Stop::Sworn));
    }
    let message =
        removed_sentence("trainingjob", (&seen.job.namespace, &seen.job.name), &attempt.pod, attempt.node.as_deref());
    let said = Said::new(seen.job.status.state, "StopNotProven", message);
    Next { todo: write_if_new(seen, "said", seen.job.status.clone(), said), wake: None }
}

/// For a pod that is away although its end was never seen.
pub(super) fn removed_sentence(kind: &str, (namespace, name): (&str, &str), pod: &str, node: Option<&str>) -> String {
    let there = node.map(|node| format!(" on {node}")).unwrap_or_default();
    format!(
        "the pod {pod} was removed by force, so nobody can tell whether it still runs{there}; when you are sure that it does not: \
         kubectl annotate {kind} {name} -n {namespace} {STOPPED_ANNOTATION}={pod}"
    )
}

fn with_pod(seen: &Seen<'_>, attempt: &Attempt, pod: &PodSeen) -> Next {
    if let Some(stop) = pod.stop(seen.nodes) {
        return write("stopped", ending::ended(seen, attempt, attempt.stopping, &stop));
    }
    if is_sworn(seen, pod) {
        return write("stopped", ending::ended(seen, attempt, attempt.stopping, &Stop::Sworn));
    }
    if attempt.stopping.is_some() || pod.deleted.is_some() {
        return stopping(seen, attempt, pod);
    }
    if let Some(reason) = wants_stop(seen, attempt) {
        return write("stopping", begin_stop(seen, attempt, reason));
    }
    let mut next = match &attempt.uid {
        None => place(seen, attempt, pod),
        Some(_) if pod.gated => Next::one(Do::Open {
            pod: pod.name.clone(),
            uid: pod.uid.clone(),
            node: attempt.node.clone().filter(|_| attempt.pinned),
        }),
        Some(_) if pod.running => running(seen, attempt, pod),
        Some(_) => beginning(seen, attempt, pod),
    };
    if let Some(deadline) = deadline(seen) {
        next.wake = Some(next.wake.map_or(deadline, |wake| wake.min(deadline)));
    }
    next
}

/// Whether the job is to be stopped now, whatever it does.
fn wants_stop(seen: &Seen<'_>, attempt: &Attempt) -> Option<Stopping> {
    if attempt.stopping.is_some() {
        return None;
    }
    if seen.job.spec.suspend {
        return Some(Stopping::Suspend);
    }
    deadline(seen).is_some_and(|deadline| deadline <= seen.now).then_some(Stopping::Deadline)
}

fn deadline(seen: &Seen<'_>) -> Option<Timestamp> {
    let start = seen.job.status.start_time.as_ref()?.0;
    let limit_s = seen.job.spec.run_policy.active_deadline_seconds?;
    start.saturating_add(SignedDuration::from_secs(limit_s)).ok()
}

fn begin_stop(seen: &Seen<'_>, attempt: &Attempt, reason: Stopping) -> TrainingJobStatus {
    let mut status = seen.job.status.clone();
    let since = Some(MicroTime(seen.now));
    status.attempt = Some(Attempt { stopping: Some(reason), stopping_since: since, ..attempt.clone() });
    let message = match reason {
        Stopping::Suspend => "was asked to save itself and end, because spec.suspend is true",
        Stopping::Deadline => "was asked to end, because runPolicy.activeDeadlineSeconds is over",
        Stopping::Replace => "its node has no room for it: another one is chosen",
        Stopping::Migrate => "was asked to save itself and end, to go on elsewhere",
    };
    let state = if reason == Stopping::Migrate { State::Migrating } else { status.state };
    say(status, Said::new(state, "Stopping", message.to_owned()), seen)
}

/// Whether the job is being stopped in such a way that it is to go on later.
pub(super) fn saves_itself(status: &TrainingJobStatus) -> bool {
    let stopping = status.attempt.as_ref().and_then(|attempt| attempt.stopping);
    matches!(stopping, Some(Stopping::Suspend | Stopping::Migrate))
}

/// The pod was asked to end, by us or by somebody else.
fn stopping(seen: &Seen<'_>, attempt: &Attempt, pod: &PodSeen) -> Next {
    if pod.deleted.is_none() {
        // It found room after all, just before it was to give up.
        if attempt.stopping == Some(Stopping::Replace) && pod.node.is_some() {
            let mut status = seen.job.status.clone();
            status.attempt = Some(Attempt { stopping: None, stopping_since: None, ..attempt.clone() });
            return write("said", status);
        }
        // On the share of a job that waits for others it might not be able to save itself in time.
        let saves = saves_itself(&seen.job.status);
        let until = attempt.stopping_since.as_ref().and_then(|since| since.0.checked_add(OWN_SHARE_WAIT).ok());
        if let Some(until) = until.filter(|until| saves && pod.running && pod.reshaped && *until > seen.now) {
            return Next { todo: Vec::new(), wake: Some(until) };
        }
        return Next::one(delete(pod));
    }
    let (message, wake) = overdue(pod, seen.now);
    let Some(message) = message else { return Next { todo: Vec::new(), wake } };
    let state = if attempt.stopping == Some(Stopping::Migrate) { State::Migrating } else { seen.job.status.state };
    let said = Said::new(state, "StopNotProven", message);
    Next { todo: write_if_new(seen, "said", seen.job.status.clone(), said), wake }
}

/// What to say if a pod should have ended by now, and when to look again.
pub(super) fn overdue(pod: &PodSeen, now: Timestamp) -> (Option<String>, Option<Timestamp>) {
    let Some((_, until)) = pod.deleted else { return (None, None) };
    let late = until.saturating_add(SILENCE).unwrap_or(Timestamp::MAX);
    if late > now {
        return (None, Some(late));
    }
    let node = pod.node.as_deref().unwrap_or_default();
    let message = format!(
        "node {node} does not say that the pod {} has ended, so nothing is started elsewhere; if the node is off for good: \
         kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
        pod.name
    );
    (Some(message), None)
}

/// A gated pod that the journal does not name yet gets its node, and its name into the journal.
fn place(seen: &Seen<'_>, attempt: &Attempt, pod: &PodSeen) -> Next {
    let (job, status) = (seen.job, &seen.job.status);
    let order = seen.order.filter(|order| order.kind == OrderKind::Place && !attempt.tried.contains(&order.node));
    let patience_ends = attempt.since.0.saturating_add(DECISION_PATIENCE).unwrap_or(seen.now);
    let (node, why) = if attempt.pinned {
        (attempt.node.clone(), status.last_decision.clone())
    } else if let Some(order) = order {
        (Some(order.node.clone()), Some(order.why.clone()))
    } else if job.spec.policy == JobPolicy::Na {
        (None, Some("policy na: the cluster's scheduler places".to_owned()))
    } else if patience_ends <= seen.now {
        (None, Some("no node was decided on in time: the cluster's scheduler places".to_owned()))
    } else {
        return Next::at(patience_ends);
    };
    let mut next = status.clone();
    let pinned = node.is_some();
    let message = match &node {
        Some(node) => format!("the pod {} is to run on {node}", pod.name),
        None => format!("the pod {} waits for the cluster's scheduler", pod.name),
    };
    next.attempt = Some(Attempt { uid: Some(pod.uid.clone()), node, pinned, ..attempt.clone() });
    next.last_decision = why;
    let said = Said::new(status.state, "Placed", message);
    let taken = order.map(|_| Do::Taken);
    Next { todo: [Do::Write("placed", Box::new(say(next, said, seen)))].into_iter().chain(taken).collect(), wake: None }
}

/// Its gate is open; it has no node yet, or its containers have not begun.
fn beginning(seen: &Seen<'_>, attempt: &Attempt, pod: &PodSeen) -> Next {
    let status = &seen.job.status;
    let Some((since, words)) = pod.unschedulable.as_ref().filter(|_| pod.node.is_none()) else {
        let silent = pod.node.as_ref().filter(|node| seen.nodes.get(*node) == Some(&NodeSeen::Silent));
        let message = match (silent, &pod.waiting, &pod.node) {
            (Some(node), ..) => silent_sentence(node),
            (_, Some(waiting), _) => format!("the pod {} does not begin: {waiting}", pod.name),
            (_, _, Some(node)) => format!("the pod {} begins on {node}", pod.name),
            _ => return Next::default(),
        };
        let said = Said::new(status.state, "Beginning", message);
        return Next { todo: write_if_new(seen, "said", status.clone(), said), wake: None };
    };
    let patience_ends = since.saturating_add(ROOM_PATIENCE).unwrap_or(seen.now);
    // A claim that is missing or not bound yet would be so on any other node, too.
    let elsewhere = attempt.pinned && !words.to_lowercase().contains("persistentvolumeclaim");
    if elsewhere && patience_ends <= seen.now {
        let mut replaced = begin_stop(seen, attempt, Stopping::Replace);
        let node = attempt.node.clone().unwrap_or_default();
        replaced.last_decision = Some(format!("{node} had no room ({words}): another node is chosen"));
        return write("stopping", replaced);
    }
    let said = Said::new(status.state, "Unschedulable", format!("no node takes the pod {}: {words}", pod.name));
    let wake = elsewhere.then_some(patience_ends);
    Next { todo: write_if_new(seen, "said", status.clone(), said), wake }
}

fn silent_sentence(node: &str) -> String {
    format!(
        "node {node} is silent: the job is left where it is until the node answers, or is declared off: \
         kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
}

fn running(seen: &Seen<'_>, attempt: &Attempt, pod: &PodSeen) -> Next {
    let status = &seen.job.status;
    let node = pod.node.clone().unwrap_or_default();
    let begun = attempt.start_time.is_some();
    if begun && let Some(order) = seen.order.filter(|order| order.kind == OrderKind::Move) {
        let allowed = movable(seen.job).is_ok() && order.node != node;
        if !allowed || seen.nodes.get(&node) == Some(&NodeSeen::Silent) {
            return Next::one(Do::Taken);
        }
        let mut next = begin_stop(seen, attempt, Stopping::Migrate);
        next.migration = Some(Migration {
            from: node,
            to: order.node.clone(),
            why: order.why.clone(),
            phase: Phase::Stopping,
            epoch: attempt.epoch,
            since: MicroTime(seen.now),
            stopped: None,
        });
        next.last_decision = Some(format!("move to {}: {}", order.node, order.why));
        next.asked_node = seen.job.wanted_node.clone();
        return Next { todo: vec![Do::Write("stopping", Box::new(next)), Do::Taken], wake: None };
    }
    let mut next = status.clone();
    if !begun {
        next.start_time.get_or_insert(MicroTime(seen.now));
        next.attempt = Some(Attempt {
            node: Some(node.clone()),
            start_time: Some(MicroTime(seen.now)),
            tried: Vec::new(),
            ..attempt.clone()
        });
        if let Some(migration) = next.migration.take() {
            close(&mut next, &migration, &node, seen.now);
        }
    }
    if let Some((category, share)) = seen.progress {
        let turned = next.category.as_deref() != Some(category);
        let far = share.unwrap_or(0).abs_diff(next.share_percent.unwrap_or(0)) >= SHARE_STEP;
        if turned || far {
            next.category = Some(category.to_owned());
            next.share_percent = share;
        }
    }
    let said = if seen.nodes.get(&node) == Some(&NodeSeen::Silent) {
        Said::new(State::Running, "NodeSilent", silent_sentence(&node))
    } else {
        let stays = match movable(seen.job) {
            Ok(()) => String::new(),
            Err(why) => format!("; it is not moved: {why}"),
        };
        Said::new(State::Running, "Running", format!("runs on {node} as {}{stays}", pod.name))
    };
    let step = if begun { "said" } else { "running" };
    Next { todo: write_if_new(seen, step, next, said), wake: None }
}

/// A move is over: for the figures and for people.
pub(super) fn close(status: &mut TrainingJobStatus, migration: &Migration, node: &str, now: Timestamp) {
    status.moves += u32::from(node != migration.from);
    record(&mut status.last_moves, migration, node, now);
}

/// Adds a move that ended on this node to the last few.
pub(super) fn record(moves: &mut Vec<Move>, migration: &Migration, node: &str, now: Timestamp) {
    let stopped = migration.stopped.as_ref().map_or(now, |stopped| stopped.0);
    let seconds = |from: Timestamp, to: Timestamp| (to.duration_since(from).as_secs_f64().max(0.0) * 1e3).round() / 1e3;
    moves.push(Move {
        at: MicroTime(now),
        from: migration.from.clone(),
        to: node.to_owned(),
        why: migration.why.clone(),
        save_s: seconds(migration.since.0, stopped),
        restore_s: seconds(stopped, now),
    });
    let surplus = moves.len().saturating_sub(MOVES_KEPT);
    moves.drain(..surplus);
}

/// What the annotation of the job orders, if it does not live there and was not sent there before.
pub(crate) fn asked(job: &JobSeen) -> Option<Order> {
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
    let why = format!("the annotation {NODE_ANNOTATION} asks for it");
    let order = Order { uid: job.uid.clone(), node: node.clone(), kind, why };
    (fits && applies(&order, &job.status)).then_some(order)
}

/// Why the job must stay where it is.
pub(crate) fn movable(job: &JobSeen) -> Result<(), String> {
    if job.spec.checkpoint.is_none() {
        return Err("spec.checkpoint is missing, so it could not resume elsewhere".to_owned());
    }
    match (&job.status.unmovable, job.spec.policy) {
        (Some(why), _) => Err(why.clone()),
        (None, JobPolicy::Na) => Err("its policy is na".to_owned()),
        (None, _) => Ok(()),
    }
}

fn write(step: &'static str, status: TrainingJobStatus) -> Next {
    Next::one(Do::Write(step, Box::new(status)))
}

/// Nothing, if the status would say what it says already.
fn write_if_new(seen: &Seen<'_>, step: &'static str, status: TrainingJobStatus, said: Said) -> Vec<Do> {
    let next = say(status, said, seen);
    if next == seen.job.status { Vec::new() } else { vec![Do::Write(step, Box::new(next))] }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
