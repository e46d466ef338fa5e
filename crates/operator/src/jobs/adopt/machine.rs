//! What to do about an adopted Job, from what is seen of it. Pure, and by the same rule as for TrainingJobs: what is intended is written first, and each
//! deed is harmless if repeated. The Job and its pods are read from the API server itself before each step, the Job first; writes to it are
//! refused if it has changed since.

use super::seen::BatchSeen;
use super::{Journal, Stopped};
use crate::jobs::ending::verdict;
use crate::jobs::machine::{OWN_SHARE_WAIT, overdue, record, removed_sentence};
use crate::jobs::seen::{NodeSeen, Nodes, PodSeen, Stop};
use crate::jobs::{JobFacts, JobState, Order, OrderKind, unless_kept};
use gainshare_kube_api::training_job::{JobPolicy, Migration, NODE_ANNOTATION, Phase};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// How often a Job is looked at while it is moved.
const LOOK_EVERY: SignedDuration = SignedDuration::from_millis(500);

pub(super) struct Seen<'a> {
    pub(super) now: Timestamp,
    pub(super) job: &'a BatchSeen,
    /// The Job's own, all of them.
    pub(super) pods: &'a [PodSeen],
    pub(super) nodes: &'a Nodes,
    pub(super) order: Option<&'a Order>,
    /// Everything is to be given back.
    pub(super) off: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Do {
    /// Only the journal; the step's name is for events and fail points.
    Write(&'static str, Box<Journal>),
    /// The pod is to be followed by its node's agent, or no longer.
    Mark(Stopped, bool),
    /// Its end must not be missed.
    Hold(Stopped),
    LetGo(Stopped),
    Suspend,
    /// Without it the template of a suspended Job can change.
    ClearStartTime,
    /// The journal, our preference, and `suspend: false`, at once.
    Resume(&'static str, Box<Journal>),
    /// The journal goes; our preference with it, where it can.
    Forget,
    Taken,
}

#[derive(Debug, Default, PartialEq)]
pub(super) struct Next {
    pub(super) todo: Vec<Do>,
    pub(super) wake: Option<Timestamp>,
}

impl From<Do> for Next {
    fn from(todo: Do) -> Next {
        Next { todo: vec![todo], wake: None }
    }
}

pub(super) fn step(seen: &Seen<'_>) -> Next {
    let job = seen.job;
    let mut next = match &job.journal.migration {
        _ if job.deleting || job.ended => over(seen),
        Some(migration) if migration.phase == Phase::Stopping => stopping(seen, migration),
        Some(migration) => starting(seen, migration),
        None if job.asked && !seen.off => followed(seen),
        None => let_be(seen),
    };
    let takes = next.todo.iter().any(|todo| matches!(todo, Do::Write("stopping", _)));
    if seen.order.is_some() && (takes || next.todo.is_empty()) {
        next.todo.push(Do::Taken);
    }
    next
}

fn id(pod: &PodSeen) -> Stopped {
    Stopped { name: pod.name.clone(), uid: pod.uid.clone() }
}

/// The pod that runs and is not about to end.
fn running<'a>(seen: &Seen<'a>) -> Option<&'a PodSeen> {
    seen.pods.iter().find(|pod| pod.running && pod.deleted.is_none() && pod.node.is_some())
}

/// It has ended, or is being deleted: nothing follows, so nothing has to be held.
fn over(seen: &Seen<'_>) -> Next {
    let held = seen.pods.iter().filter(|pod| pod.has_finalizer);
    let mut todo: Vec<Do> = held.map(|pod| Do::LetGo(id(pod))).collect();
    if seen.job.journal.migration.is_some() && !seen.job.deleting {
        let journal = cancelled(seen, "it ended before it was moved");
        todo.push(Do::Write("cancelled", Box::new(journal)));
    }
    Next { todo, wake: None }
}

fn cancelled(seen: &Seen<'_>, message: &str) -> Journal {
    Journal { migration: None, pod: None, message: message.to_owned(), ..seen.job.journal.clone() }
}

/// The move comes to nothing; what was suspended for it goes on.
fn cancel(seen: &Seen<'_>, message: &str) -> Next {
    let journal = Box::new(cancelled(seen, message));
    if seen.job.suspended { Do::Resume("cancelled", journal).into() } else { Do::Write("cancelled", journal).into() }
}

fn say(seen: &Seen<'_>, message: String) -> Vec<Do> {
    if seen.job.has_journal && seen.job.journal.message == message {
        return Vec::new();
    }
    vec![Do::Write("said", Box::new(Journal { message, ..seen.job.journal.clone() }))]
}

/// Nobody wants it to be moved any more.
fn let_be(seen: &Seen<'_>) -> Next {
    let job = seen.job;
    let marked = seen.pods.iter().filter(|pod| !pod.job.is_empty() && pod.stop(seen.nodes).is_none());
    let mut todo: Vec<Do> = marked.map(|pod| Do::Mark(id(pod), false)).collect();
    // Without a move nothing waits for a pod's end, so nothing may hold it.
    todo.extend(seen.pods.iter().filter(|pod| pod.has_finalizer).map(|pod| Do::LetGo(id(pod))));
    let idle = job.suspended && seen.pods.iter().all(|pod| pod.stop(seen.nodes).is_some());
    match &job.journal.prefers {
        _ if !job.has_journal => {}
        None => todo.push(Do::Forget),
        Some(_) if idle && job.has_start_time => todo.push(Do::ClearStartTime),
        Some(_) if idle => todo.push(Do::Forget),
        // A running Job's template cannot change; a preference does no harm.
        Some(_) => {}
    }
    Next { todo, wake: None }
}

pub(super) fn movable(job: &BatchSeen) -> Result<(), String> {
    match (&job.problem, &job.journal.unmovable) {
        (Some(why), _) | (None, Some(why)) => Err(why.clone()),
        (None, None) if job.policy == JobPolicy::Na => Err("its policy is na".to_owned()),
        (None, None) => Ok(()),
    }
}

fn followed(seen: &Seen<'_>) -> Next {
    let job = seen.job;
    let held = seen.pods.iter().filter(|pod| pod.has_finalizer);
    let mut todo: Vec<Do> = held.map(|pod| Do::LetGo(id(pod))).collect();
    if let Some(problem) = &job.problem {
        let marked = seen.pods.iter().filter(|pod| !pod.job.is_empty() && pod.stop(seen.nodes).is_none());
        todo.extend(marked.map(|pod| Do::Mark(id(pod), false)));
        todo.extend(say(seen, format!("is not moved: {problem}")));
        return Next { todo, wake: None };
    }
    let Some(pod) = running(seen) else { return Next { todo, wake: None } };
    if pod.job.is_empty() {
        todo.push(Do::Mark(id(pod), true));
    }
    let node = pod.node.clone().unwrap_or_default();
    let order = seen.order.filter(|order| order.kind == OrderKind::Move && order.node != node);
    if let Some(order) = order.filter(|_| movable(job).is_ok()) {
        let mut journal = job.journal.clone();
        journal.pod = Some(id(pod));
        journal.message = format!("is to be saved and to go on on {}: {}", order.node, order.why);
        journal.migration = Some(Migration {
            from: node,
            to: order.node.clone(),
            why: order.why.clone(),
            phase: Phase::Stopping,
            epoch: job.journal.moves + 1,
            since: MicroTime(seen.now),
            stopped: None,
        });
        journal.asked_node = job.wanted_node.clone();
        todo.push(Do::Write("stopping", Box::new(journal)));
        return Next { todo, wake: None };
    }
    let stays = movable(job).err().map(|why| format!("; it is not moved: {why}")).unwrap_or_default();
    let mut journal = job.journal.clone();
    journal.message = format!("runs on {node} as {}{stays}", pod.name);
    journal.node = Some(node);
    journal.began = journal.began.or(Some(MicroTime(pod.created)));
    if journal != job.journal {
        todo.push(Do::Write("said", Box::new(journal)));
    }
    Next { todo, wake: None }
}

/// The journal says that this pod is to be stopped.
fn stopping(seen: &Seen<'_>, migration: &Migration) -> Next {
    let job = seen.job;
    let Some(stopped) = &job.journal.pod else { return cancel(seen, "the journal names no pod: the move is given up") };
    let pod = seen.pods.iter().find(|pod| pod.uid == stopped.uid);
    let sworn = job.sworn_stopped.as_deref() == Some(&stopped.name);
    let stop = match pod {
        Some(pod) => pod.stop(seen.nodes).or_else(|| (sworn && pod.deleted.is_some()).then_some(Stop::Sworn)),
        None if seen.nodes.get(&migration.from) == Some(&NodeSeen::Off) => Some(Stop::NodeOff(migration.from.clone())),
        None => sworn.then_some(Stop::Sworn),
    };
    let wake = seen.now.saturating_add(LOOK_EVERY).ok();
    match (pod, stop) {
        // It ended, or somebody deleted it, before we had asked anybody: the Job controller goes on by its own rules.
        (None, _) | (_, Some(_)) if !job.suspended => cancel(seen, "its pod ended before it was moved"),
        (Some(pod), Some(Stop::Exited(_) | Stop::NeverBegan(_))) if pod.deleted.is_none() => {
            cancel(seen, "its pod ended by itself before it was moved")
        }
        (_, Some(stop)) => {
            let others = seen.pods.iter().filter(|pod| pod.uid != stopped.uid);
            if others.filter(|pod| pod.stop(seen.nodes).is_none()).count() > 0 {
                return Next { todo: Vec::new(), wake };
            }
            proven(seen, migration, pod, &stop)
        }
        (None, None) => {
            let sentence =
                removed_sentence("job", (&job.namespace, &job.name), &stopped.name, Some(migration.from.as_str()));
            Next { todo: say(seen, sentence), wake }
        }
        (Some(pod), None) if pod.deleted.is_some() && !job.suspended => {
            cancel(seen, "somebody deleted its pod before it was moved")
        }
        (Some(pod), None) if pod.deleted.is_none() && !pod.has_finalizer => Do::Hold(id(pod)).into(),
        // It saves itself on its own share, as TrainingJobs do.
        (Some(pod), None) if !job.suspended && pod.reshaped && since(migration, seen.now) < OWN_SHARE_WAIT => {
            Next { todo: Vec::new(), wake }
        }
        (Some(_), None) if !job.suspended => Do::Suspend.into(),
        (Some(pod), None) => {
            let todo = overdue(pod, seen.now).0.map(|message| say(seen, message)).unwrap_or_default();
            Next { todo, wake }
        }
    }
}

fn since(migration: &Migration, now: Timestamp) -> SignedDuration {
    now.duration_since(migration.since.0)
}

/// The end is proven: the Job goes on, at its target or where it was.
fn proven(seen: &Seen<'_>, migration: &Migration, pod: Option<&PodSeen>, stop: &Stop) -> Next {
    let job = seen.job;
    if job.has_start_time {
        return Do::ClearStartTime.into();
    }
    let time = format!("{} s: terminationGracePeriodSeconds of its template", job.grace_s);
    let (moves, message) = verdict(stop, migration, pod, &time);
    let target = if moves { migration.to.clone() } else { migration.from.clone() };
    let mut journal = job.journal.clone();
    journal.unmovable = (!moves).then(|| message.clone());
    journal.message = message;
    journal.prefers = Some(target.clone());
    let stopped = Some(MicroTime(seen.now));
    journal.migration = Some(Migration { phase: Phase::Starting, to: target, stopped, ..migration.clone() });
    Do::Resume("stopped", Box::new(journal)).into()
}

/// It is on its way; the scheduler has the last word about where.
fn starting(seen: &Seen<'_>, migration: &Migration) -> Next {
    let held = seen.pods.iter().filter(|pod| pod.has_finalizer);
    let mut todo: Vec<Do> = held.map(|pod| Do::LetGo(id(pod))).collect();
    let before = seen.job.journal.pod.as_ref().map(|pod| pod.uid.as_str());
    let arrived = running(seen).filter(|pod| Some(pod.uid.as_str()) != before);
    let Some((pod, node)) = arrived.and_then(|pod| Some((pod, pod.node.as_ref()?))) else {
        return Next { todo, wake: seen.now.saturating_add(LOOK_EVERY).ok() };
    };
    let mut journal = Journal { migration: None, pod: None, ..seen.job.journal.clone() };
    journal.moves += u32::from(*node != migration.from);
    record(&mut journal.last_moves, migration, node, seen.now);
    journal.message = format!("runs on {node} as {}", pod.name);
    journal.node = Some(node.clone());
    if *node != migration.to {
        journal.message.push_str(&format!(": the scheduler did not put it on {}", migration.to));
    }
    todo.push(Do::Write("running", Box::new(journal)));
    Next { todo, wake: None }
}

/// What the annotation of the Job orders, if it was not followed before.
pub(super) fn asked(job: &BatchSeen) -> Option<Order> {
    let node = job.wanted_node.clone().filter(|node| job.journal.asked_node.as_ref() != Some(node))?;
    let why = format!("the annotation {NODE_ANNOTATION} asks for it");
    Some(Order { uid: job.uid.clone(), node, kind: OrderKind::Move, why })
}

/// What the decision gets to know.
pub(super) fn facts(seen: &Seen<'_>) -> Option<JobFacts> {
    let job = seen.job;
    if job.deleting || !job.asked || seen.off {
        return None;
    }
    let pod = running(seen);
    let state = match pod.and_then(|pod| Some((pod, pod.node.clone()?))) {
        _ if job.ended => JobState::Done,
        Some((pod, node)) if job.journal.migration.is_none() && !job.suspended => {
            JobState::Running { node, epoch: job.journal.moves + 1, since: pod.created }
        }
        _ => JobState::Moving,
    };
    Some(JobFacts {
        uid: job.uid.clone(),
        namespace: job.namespace.clone(),
        name: job.name.clone(),
        owner: job.namespace.clone(),
        arrived: job.created,
        policy: job.policy,
        state,
        movable: movable(job).and_then(|()| unless_kept(job.wanted_node.as_deref())),
        pod_uid: pod.map(|pod| pod.uid.clone()),
        cpu_request_milli: job.requests.0,
        memory_request_bytes: job.requests.1,
        tried: Vec::new(),
        move_cost_s: job.journal.last_moves.last().map(|made| made.save_s + made.restore_s),
    })
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
