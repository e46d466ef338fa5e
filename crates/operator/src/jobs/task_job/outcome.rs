//! What the ends of a job's tasks mean for the job. Pure.
//!
//! | task | ended | restart policy | then |
//! |---|---|---|---|
//! | chief, or worker 0 without a chief | with success | any | the job has succeeded (see `successPolicy`) |
//! | any | with a failure | `Never` | the job has failed |
//! | any | exit code 1 to 127 | `ExitCode` | the job has failed |
//! | worker, chief, evaluator | with another failure | other or none | the task is replaced; a failure is counted |
//! | server | with another failure | other or none | all tasks start again; a failure is counted |
//! | any | its pod was deleted, evicted, or its node is off | any | the same, and no failure is counted |
//! | worker of a job with dynamic workers | with a failure | `Never` or none | it is ignored |
//!
//! A server restarts the whole job because its part of the model is lost: the other tasks would train on without it.
//! More failures than the back-off limit fail the job.

use super::action::Snapshot;
use crate::jobs::moves::{exit_text, proof_of_stop};
use crate::jobs::waiting::wait_end;
use crate::state::snapshot::{Phase, PodSnapshot, Stop};
use gainshare_kube_api::names::{NodeName, PodUid};
use gainshare_kube_api::tasks::{RestartPolicy, Role, SuccessPolicy, TaskId, TaskJobSpec};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;

/// How long a pod may find no room on the node chosen for it before another one is chosen.
const ROOM_PATIENCE: SignedDuration = SignedDuration::from_secs(10);

/// Reasons that kubelets give where the node, not the task, was at fault.
const NODE_REASONS: [&str; 5] = ["Evicted", "NodeShutdown", "Terminated", "Preempting", "UnexpectedAdmissionError"];

/// Exit codes up to this one are the program's own: another try would fail again.
const LAST_PERMANENT_CODE: i32 = 127;

/// What follows from the pods of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AttemptOutcome {
    Continues,
    Succeeded {
        message: String,
        /// When the last of the tasks ended that make the success; 1970 if no kubelet names a time.
        finished: Timestamp,
    },
    Failed {
        reason: &'static str,
        message: String,
    },
    /// Something was lost: tasks are replaced, or all of them start again.
    Lost(Loss),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Loss {
    /// All tasks start again.
    pub(super) whole: bool,
    /// The number of failures that are counted.
    pub(super) failures: u32,
    /// The uids and tasks of the pods that are replaced.
    pub(super) pods: Vec<(PodUid, TaskId)>,
    /// Nodes that did not take a task.
    pub(super) refused_by: Vec<NodeName>,
    pub(super) message: String,
}

/// One lost task.
struct LostTask {
    whole: bool,
    counts: bool,
    refused_by: Option<NodeName>,
    message: String,
}

/// Judges the pods of the present attempt. `pods` has at most one pod per task, without those already replaced.
pub(super) fn vet(
    snapshot: &Snapshot<'_>,
    spec: &TaskJobSpec,
    pods: &BTreeMap<TaskId, &PodSnapshot>,
) -> AttemptOutcome {
    if let Some((message, finished)) = success(snapshot, spec, pods) {
        return AttemptOutcome::Succeeded { message, finished };
    }
    let mut loss: Option<Loss> = None;
    let counts = snapshot.job.wanted();
    for (task, pod) in pods {
        if task.index >= counts.get(&task.role).copied().unwrap_or(0) {
            continue;
        }
        let lost = match lost_task(snapshot, spec, *task, pod) {
            Ok(None) => continue,
            Ok(Some(lost)) => lost,
            Err(message) => return AttemptOutcome::Failed { reason: "TaskFailed", message },
        };
        let all = loss.get_or_insert_with(|| Loss {
            whole: false,
            failures: 0,
            pods: Vec::new(),
            refused_by: Vec::new(),
            message: lost.message.clone(),
        });
        if lost.whole && !all.whole {
            all.message = lost.message;
        }
        all.whole |= lost.whole;
        all.failures += u32::from(lost.counts);
        all.refused_by.extend(lost.refused_by);
        all.pods.push((pod.uid.clone(), *task));
    }
    if let Some(failed) = over_the_limit(snapshot, spec, pods, loss.as_ref()) {
        return failed;
    }
    loss.map_or(AttemptOutcome::Continues, AttemptOutcome::Lost)
}

/// Whether the job has failed too often, with restarts by kubelets.
fn over_the_limit(
    snapshot: &Snapshot<'_>,
    spec: &TaskJobSpec,
    pods: &BTreeMap<TaskId, &PodSnapshot>,
    loss: Option<&Loss>,
) -> Option<AttemptOutcome> {
    let limit = spec.options.run.backoff_limit?;
    let by_kubelets = pods.values().fold(0_u32, |sum, pod| sum.saturating_add(pod.restarts));
    let new = loss.map_or(0, |loss| loss.failures);
    let failures = snapshot.job.status.journal.failures.saturating_add(by_kubelets).saturating_add(new);
    // What a kubelet restarts is no news for us: it is read when it happens.
    if failures <= limit || (new == 0 && by_kubelets == 0) {
        return None;
    }
    let last = loss.map(|loss| format!(": {}", loss.message)).unwrap_or_default();
    let message = format!("{failures} failures are more than runPolicy.backoffLimit ({limit}) allows{last}");
    Some(AttemptOutcome::Failed { reason: "BackoffLimitExceeded", message })
}

/// A task that ends with 0 because its pod is deleted has saved itself at best: it has not succeeded.
fn succeeded(pod: &PodSnapshot) -> bool {
    let finished = pod.exit.as_ref().map(|exit| exit.finished);
    let was_asked = pod.deleted.is_some_and(|(asked, _)| finished.is_none_or(|finished| finished >= asked));
    pod.phase == Phase::Succeeded && !pod.running && !was_asked
}

/// Why the job has succeeded, and when the last of the tasks ended that make the success.
fn success(
    snapshot: &Snapshot<'_>,
    spec: &TaskJobSpec,
    pods: &BTreeMap<TaskId, &PodSnapshot>,
) -> Option<(String, Timestamp)> {
    let done_at = |task: TaskId| {
        let pod = pods.get(&task).filter(|pod| succeeded(pod))?;
        Some(pod.exit.as_ref().map(|exit| exit.finished).unwrap_or_default())
    };
    let first_at = |role: Role| done_at(TaskId { role, index: 0 });
    if let Some(chief) = spec.chief() {
        return first_at(chief).map(|at| (format!("the {} has succeeded", chief.lower()), at));
    }
    let counts = snapshot.job.wanted();
    let all_at = |role: Role| {
        let count = counts.get(&role).copied().unwrap_or(0);
        let ends: Option<Vec<Timestamp>> = (0..count).map(|index| done_at(TaskId { role, index })).collect();
        ends?.into_iter().max()
    };
    if !spec.roles.contains_key(&Role::Worker) {
        let ends: Option<Vec<Timestamp>> = counts.keys().map(|role| all_at(*role)).collect();
        return Some(("all tasks have succeeded".to_owned(), ends?.into_iter().max().unwrap_or_default()));
    }
    if let Some(at) = first_at(Role::Worker).filter(|_| spec.options.success == SuccessPolicy::FirstWorker) {
        return Some(("worker 0 has succeeded".to_owned(), at));
    }
    all_at(Role::Worker).map(|at| ("all workers have succeeded".to_owned(), at))
}

/// Whether the task is lost. An error fails the job.
fn lost_task(
    snapshot: &Snapshot<'_>,
    spec: &TaskJobSpec,
    task: TaskId,
    pod: &PodSnapshot,
) -> Result<Option<LostTask>, String> {
    let is_server = task.role == Role::Ps;
    let lost = |counts: bool, message: String| LostTask { whole: is_server, counts, refused_by: None, message };
    let waits_for_node = pod.node.is_none() && !pod.gated && pod.deleted.is_none();
    if let Some((since, words)) = pod.unschedulable.as_ref().filter(|_| waits_for_node) {
        if wait_end(*since, ROOM_PATIENCE, snapshot.now).is_some() {
            return Ok(None);
        }
        let refused_by = snapshot.job.status.journal.nodes.get(&task.to_string()).cloned();
        let node = refused_by.as_deref().unwrap_or("its node");
        let message = format!("{node} did not take {task} ({words}): another place is chosen");
        // A gang that has not begun is taken back as a whole: a part of it must not hold room.
        return Ok(Some(LostTask { whole: !snapshot.has_begun(), counts: false, refused_by, message }));
    }
    if succeeded(pod) {
        return Ok(None);
    }
    let Some(stop) = proof_of_stop(pod, snapshot.job.declared_stopped.as_deref(), snapshot.nodes) else {
        return Ok(None);
    };
    let exit = match stop {
        Stop::NodeOff(node) => return Ok(Some(lost(false, format!("node {node} is gone, and {task} with it")))),
        Stop::Declared => return Ok(Some(lost(false, format!("{task} was declared stopped")))),
        Stop::NeverBegan(why) => {
            let refused_by = pod.node.clone();
            return Ok(Some(LostTask { refused_by, ..lost(false, format!("{task} did not begin: {why}")) }));
        }
        Stop::Exited(exit) => exit,
    };
    if pod.deleted.is_some() || NODE_REASONS.contains(&exit.reason.as_str()) {
        return Ok(Some(lost(false, format!("{task} was removed ({})", exit_text(&exit)))));
    }
    let restart = spec.roles.get(&task.role).and_then(|role| role.restart);
    let may_ignore = matches!(restart, None | Some(RestartPolicy::Never));
    if task.role == Role::Worker && spec.options.dynamic_workers && may_ignore {
        return Ok(None);
    }
    let text = format!("{task} failed ({})", exit_text(&exit));
    match restart {
        Some(RestartPolicy::Never) => Err(format!("{text}, and its restartPolicy is Never")),
        Some(RestartPolicy::ExitCode) if (1..=LAST_PERMANENT_CODE).contains(&exit.code) => {
            Err(format!("{text}; with restartPolicy ExitCode, codes 1 to {LAST_PERMANENT_CODE} are permanent"))
        }
        _ => Ok(Some(lost(true, text))),
    }
}
