//! What to do about a job of tasks, from a snapshot of it. Pure: no I/O, no clock.
//!
//! **How.** [`step`] answers either with one status to write (the journal), or with actions that carry out what the
//! journal already says. Writing comes first and alone.
//!
//! **Life.** Every task's pod is made behind a scheduling gate. When the line ([`super::gang`]) has room for the
//! gang, the nodes of all its tasks are written to the journal, and then all gates are opened. Lost tasks are
//! replaced alone or together ([`super::outcome`]); a new epoch begins when all start again.
//!
//! **Why no task lives twice.** A task's pod has a name of its own (`JOB-role-index`), so the API server holds one at
//! a time. Our finalizer keeps the object until the pod's end is proven, also where it is deleted by force.
//!
//! **Properties.** `no_gate_opens_before_the_whole_gang_has_a_node`; `a_failure_is_counted_once`;
//! `no_pod_while_suspended`.

use super::action::{Action, Snapshot, Step};
use super::outcome::{AttemptOutcome, Loss, vet};
use super::status::{is_replacing, set_replacing, set_risk, set_state};
use crate::jobs::deadline::{RiskText, end_of};
use crate::jobs::progress::percent_text;
use crate::jobs::waiting::{LONGEST_PAUSE, bounded_wait, overdue, pause_after};
use crate::jobs::workload::JournalStep;
use crate::state::agents::MOST_STEPS;
use crate::state::snapshot::{Phase, PodSnapshot};
use crate::state::task_job::{TaskJobSnapshot, TaskJobStatus};
use crate::state::workload::WorkloadKind;
use gainshare_kube_api::deadline::{DeadlineState, moment_text};
use gainshare_kube_api::names::{NodeName, PodUid};
use gainshare_kube_api::task_objects::TaskJobRef;
use gainshare_kube_api::tasks::{ReplicaStatus, Role, TaskId, TaskJobSpec, tasks};
use gainshare_kube_api::training_job::{CleanPodPolicy, State};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use std::collections::{BTreeMap, BTreeSet};

/// How long to wait before a pod that was refused (by a quota, for instance) is tried again.
pub(super) const REFUSAL_PAUSE: SignedDuration = SignedDuration::from_secs(10);
/// How long to wait before the API server is asked again whether a pod that has ended is gone.
const REMOVAL_PAUSE: SignedDuration = SignedDuration::from_secs(2);
/// How long a node that did not take a task is avoided.
pub(super) const AVOID_FOR: SignedDuration = SignedDuration::from_secs(60);
/// How often a job that waits for room asks again.
const ROOM_PAUSE: SignedDuration = SignedDuration::from_secs(2);
/// A job is late when its deadline has passed, not at the deadline.
const AFTER_DEADLINE: SignedDuration = SignedDuration::from_millis(1);
/// The number of pods that are made in one step.
const CREATED_AT_ONCE: usize = 50;
/// Epochs beyond this are not used: the number of an attempt must be able to grow.
const LAST_EPOCH: u32 = u32::MAX - 1;

pub(crate) fn step(snapshot: &Snapshot<'_>) -> Step {
    let job = snapshot.job;
    if job.is_foreign {
        return Step::default();
    }
    if job.deleting {
        return if job.has_finalizer { leave(snapshot) } else { Step::default() };
    }
    if !job.has_finalizer {
        return Step::one(Action::Hold);
    }
    if matches!(job.status.journal.state, State::Succeeded | State::Failed) {
        return finished(snapshot);
    }
    let mut next = alive(snapshot);
    // A journal entry goes alone: the next step finds what follows from it, on the job as it was written.
    if let Some(at) = next.actions.iter().position(|action| matches!(action, Action::Write(..))) {
        next.actions = vec![next.actions.swap_remove(at)];
    }
    next
}

fn delete(pod: &PodSnapshot) -> Action {
    Action::Delete { pod: pod.name.clone(), uid: pod.uid.clone() }
}

pub(super) fn let_go(pod: &PodSnapshot) -> Action {
    Action::LetGo { pod: pod.name.clone(), uid: pod.uid.clone() }
}

/// Stops these pods: what to do now, and the pod that takes too long.
fn stop<'a>(snapshot: &Snapshot<'a>, pods: impl Iterator<Item = &'a PodSnapshot>) -> (Step, Option<String>, bool) {
    let (mut next, mut late, mut all_gone) = (Step::default(), None, true);
    for pod in pods {
        all_gone = false;
        if pod.deleted.is_none() {
            next.actions.push(delete(pod));
        } else if snapshot.is_stopped(pod) && pod.has_finalizer {
            next.actions.push(let_go(pod));
        } else if snapshot.is_stopped(pod) {
            // Its kubelet removes the object. Should the event be lost, the API server is asked.
            let again = snapshot.now.saturating_add(REMOVAL_PAUSE).unwrap_or(snapshot.now);
            next.wake_by([again]);
        } else {
            let (message, wake) = overdue(pod, snapshot.nodes, snapshot.now);
            late = late.or(message);
            next.wake_by(wake);
        }
    }
    (next, late, all_gone)
}

/// The job is being deleted: its pods end first.
fn leave(snapshot: &Snapshot<'_>) -> Step {
    let held = snapshot.own_pods().filter(|pod| pod.has_finalizer);
    let (mut next, late, all_gone) = stop(snapshot, held);
    if all_gone {
        return Step::one(Action::Release);
    }
    if let Some(message) = late.filter(|message| *message != snapshot.job.status.message) {
        let mut status = snapshot.job.status.clone();
        status.message = message;
        next.actions.push(Action::Write(JournalStep::Noted, Box::new(status)));
    }
    next
}

/// The job has ended: pods are as `cleanPodPolicy` wants them, and the job goes when its time is over.
fn finished(snapshot: &Snapshot<'_>) -> Step {
    let (job, mut next) = (snapshot.job, Step::default());
    let run = job.spec.as_ref().map(|spec| spec.options.run.clone()).unwrap_or_default();
    let mut is_clean = true;
    for pod in snapshot.own_pods() {
        let is_stopped = snapshot.is_stopped(pod);
        if is_stopped && pod.has_finalizer {
            next.actions.push(let_go(pod));
        }
        is_clean &= is_stopped || run.clean == CleanPodPolicy::None;
        let action = match run.clean {
            CleanPodPolicy::All => Some(delete(pod)),
            CleanPodPolicy::Running if !is_stopped && pod.node.is_none() => Some(delete(pod)),
            CleanPodPolicy::Running if !is_stopped && !pod.ending => {
                Some(Action::End { pod: pod.name.clone(), uid: pod.uid.clone() })
            }
            CleanPodPolicy::Running | CleanPodPolicy::None => None,
        };
        next.actions.extend(action.filter(|_| pod.deleted.is_none()));
    }
    let journal = &job.status.journal;
    if is_clean && next.actions.is_empty() && !journal.cleaned {
        if run.clean != CleanPodPolicy::None && job.spec.is_ok() {
            next.actions.push(Action::DeleteServices);
        }
        let mut status = job.status.clone();
        status.journal.cleaned = true;
        if run.clean != CleanPodPolicy::None {
            // What still ran was stopped.
            status.replicas.values_mut().for_each(|role| role.active = 0);
        }
        next.actions.push(Action::Write(JournalStep::Noted, Box::new(status)));
    }
    let ended = job.status.completion_time.as_ref().map_or(snapshot.now, |time| time.0);
    next.expire(ended, run.ttl_s, snapshot.now, Action::DeleteJob);
    next
}

fn alive(snapshot: &Snapshot<'_>) -> Step {
    let (job, journal) = (snapshot.job, &snapshot.job.status.journal);
    let spec = match &job.spec {
        Ok(spec) => spec,
        Err(problem) => return fail(snapshot, "InvalidSpec", &problem.to_string()),
    };
    if journal.epoch >= LAST_EPOCH {
        return fail(snapshot, "EpochsExhausted", "no further attempt can be numbered: create the job again");
    }
    if spec.options.suspend {
        return suspend(snapshot);
    }
    if journal.epoch == 0 || journal.state == State::Suspended {
        let mut status = job.status.clone();
        status.journal.epoch = journal.epoch.max(1);
        status.journal.waiting_since = Some(MicroTime(snapshot.now));
        return write(snapshot, JournalStep::Planned, status, State::Waiting, "its pods are about to be made");
    }
    if let Some(deadline) = deadline(snapshot, spec)
        && deadline <= snapshot.now
    {
        return fail(snapshot, "DeadlineExceeded", "it did not end within runPolicy.activeDeadlineSeconds");
    }
    let mut next = if journal.restarting { restart(snapshot) } else { run(snapshot, spec) };
    next.wake_by(deadline(snapshot, spec));
    next
}

fn deadline(snapshot: &Snapshot<'_>, spec: &TaskJobSpec) -> Option<Timestamp> {
    let start = snapshot.job.status.start_time.as_ref()?.0;
    start.saturating_add(SignedDuration::from_secs(spec.options.run.active_deadline_s?)).ok()
}

/// No pod exists while the job is suspended.
fn suspend(snapshot: &Snapshot<'_>) -> Step {
    let status = &snapshot.job.status;
    let (mut next, late, all_gone) = stop(snapshot, snapshot.own_pods());
    let mut after = status.clone();
    after.replicas = BTreeMap::new();
    if !all_gone {
        let message = late.unwrap_or_else(|| "its tasks are asked to end, because it is suspended".to_owned());
        if message != status.message {
            after.message = message;
            next.actions.insert(0, Action::Write(JournalStep::Stopping, Box::new(after)));
        }
        return next;
    }
    if status.journal.state == State::Suspended {
        return Step::default();
    }
    next_epoch(&mut after);
    after.start_time = None;
    after.journal.not_before = None;
    write(snapshot, JournalStep::Stopped, after, State::Suspended, "suspended: no task runs")
}

/// All tasks start again: first, all pods of this attempt end.
fn restart(snapshot: &Snapshot<'_>) -> Step {
    let status = &snapshot.job.status;
    let (mut next, late, all_gone) = stop(snapshot, snapshot.own_pods());
    let mut after = status.clone();
    if all_gone {
        next_epoch(&mut after);
        after.journal.waiting_since = Some(MicroTime(snapshot.now));
        return write(snapshot, JournalStep::Planned, after, State::Restarting, &status.message);
    }
    // Reports come some seconds late, so the last steps before the stop may be known only now.
    after.journal.reached_step = after.journal.reached_step.max(snapshot.progress.step);
    after.message = late.unwrap_or_else(|| status.message.clone());
    if after != *status {
        next.actions.insert(0, Action::Write(JournalStep::Noted, Box::new(after)));
    }
    next
}

fn next_epoch(status: &mut TaskJobStatus) {
    let journal = &mut status.journal;
    journal.epoch = journal.epoch.saturating_add(1);
    journal.restarting = false;
    journal.admitted = false;
    journal.nodes.clear();
    journal.replaced.clear();
    // The tasks of the next attempt begin with what their author requested.
    journal.scale = None;
    status.time_left = None;
}

/// An attempt that is not being stopped.
fn run(snapshot: &Snapshot<'_>, spec: &TaskJobSpec) -> Step {
    let pods = snapshot.current_pods();
    if let Some(record) = record_ends(snapshot, spec, &pods).or_else(|| record_news(snapshot)) {
        return record;
    }
    let wanted = snapshot.job.wanted();
    let gang: BTreeSet<TaskId> = spec.gang().into_iter().collect();
    if let Some(placed) = place(snapshot, &wanted, &gang, &pods) {
        return placed;
    }
    let missing: Vec<TaskId> = tasks(&wanted).filter(|task| is_missing(snapshot, *task)).collect();
    if let Some(fault) = snapshot.fault.filter(|fault| fault.for_good && !missing.is_empty()) {
        return fail(snapshot, "InvalidTemplate", &fault.message);
    }
    let (mut next, late, _) = stop(snapshot, superfluous(snapshot, &wanted, &pods));
    let (made, retry_at) = create(snapshot, &missing);
    next.actions.extend(made);
    next.wake_by(retry_at);
    next.actions.extend(open_gates(snapshot, &pods));
    next.wake_by(miss_at(snapshot));
    next.wake_by(wait_for_nodes(snapshot, &pods));
    if let Some(write) = publish(snapshot, spec, (&wanted, &gang), &pods, late) {
        next.actions.insert(0, write);
    }
    next
}

/// The journal entry about new sizes of tasks, new traffic or a new prediction, if it is not written yet.
fn record_news(snapshot: &Snapshot<'_>) -> Option<Step> {
    let status = &snapshot.job.status;
    let mut after = status.clone();
    let entry = |step, after: TaskJobStatus| Some(Step::one(Action::Write(step, Box::new(after))));
    if let Some(scale) = snapshot.scale.filter(|scale| Some(*scale) != status.journal.scale.as_ref()) {
        after.journal.scale = Some(scale.clone());
        return entry(JournalStep::Scaled, after);
    }
    if let Some(traffic) = snapshot.traffic.filter(|traffic| **traffic != status.journal.traffic) {
        after.journal.traffic = traffic.clone();
        return entry(JournalStep::Noted, after);
    }
    set_finish(&mut after, snapshot, None);
    if after != *status { entry(JournalStep::Noted, after) } else { None }
}

/// Pods of earlier attempts, replaced pods, and pods that are too many.
fn superfluous<'a>(
    snapshot: &Snapshot<'a>,
    wanted: &BTreeMap<Role, u32>,
    pods: &BTreeMap<TaskId, &PodSnapshot>,
) -> impl Iterator<Item = &'a PodSnapshot> {
    let is_wanted = move |task: TaskId| task.index < wanted.get(&task.role).copied().unwrap_or(0);
    snapshot.own_pods().filter(move |pod| {
        let stays =
            pod.task.is_some_and(|task| is_wanted(task) && pods.get(&task).is_some_and(|one| one.uid == pod.uid));
        !stays
    })
}

/// Opens the gates of the pods that have a node in the journal.
fn open_gates(snapshot: &Snapshot<'_>, pods: &BTreeMap<TaskId, &PodSnapshot>) -> Vec<Action> {
    let journal = &snapshot.job.status.journal;
    if !journal.admitted {
        return Vec::new();
    }
    let gated = pods.iter().filter(|(_, pod)| pod.gated && pod.deleted.is_none());
    let open = gated.filter_map(|(task, pod)| {
        let node = journal.nodes.get(&task.to_string())?.clone();
        Some(Action::Open { pod: pod.name.clone(), uid: pod.uid.clone(), node })
    });
    open.collect()
}

/// When the job misses its deadline, if that is still to come. The miss is announced when it happens, also where no
/// task reports.
fn miss_at(snapshot: &Snapshot<'_>) -> Option<Timestamp> {
    let due_ms = i64::try_from(snapshot.job.deadline?.latest_ms()).ok()?;
    let due = Timestamp::from_millisecond(due_ms).ok()?;
    due.saturating_add(AFTER_DEADLINE).ok().filter(|at| *at > snapshot.now)
}

/// When pods without a node are looked at again: those that wait for room, and those whose patience ends.
fn wait_for_nodes(snapshot: &Snapshot<'_>, pods: &BTreeMap<TaskId, &PodSnapshot>) -> Option<Timestamp> {
    let nodes = &snapshot.job.status.journal.nodes;
    let waits_for_room = pods.iter().any(|(task, pod)| pod.gated && !nodes.contains_key(&task.to_string()));
    let ask_again = waits_for_room.then(|| snapshot.now.saturating_add(ROOM_PAUSE).unwrap_or(snapshot.now));
    let refused = pods.values().filter(|pod| pod.node.is_none()).filter_map(|pod| pod.unschedulable.as_ref());
    let patience = refused.filter_map(|(since, _)| since.saturating_add(REFUSAL_PAUSE).ok());
    ask_again.into_iter().chain(patience.filter(|at| *at > snapshot.now)).min()
}

/// The journal entry about pods of the present attempt that have ended, if it is not written yet.
pub(super) fn record_ends(
    snapshot: &Snapshot<'_>,
    spec: &TaskJobSpec,
    pods: &BTreeMap<TaskId, &PodSnapshot>,
) -> Option<Step> {
    match vet(snapshot, spec, pods) {
        AttemptOutcome::Continues => None,
        AttemptOutcome::Succeeded { message, finished } => {
            let status = &snapshot.job.status;
            let began = status.start_time.as_ref().map_or(snapshot.job.created, |start| start.0);
            Some(end(snapshot, State::Succeeded, &message, end_of(finished, began, snapshot.now)))
        }
        AttemptOutcome::Failed { reason, message } => Some(fail(snapshot, reason, &message)),
        AttemptOutcome::Lost(loss) => Some(lose(snapshot, &loss)),
    }
}

/// Brings what is published about the deadline up to date. `end`: the state in which the job has ended, and when.
fn set_finish(status: &mut TaskJobStatus, snapshot: &Snapshot<'_>, end: Option<(State, Timestamp)>) {
    let job = snapshot.job;
    let mut finish = status.finish.clone().unwrap_or_default();
    match (job.deadline, &job.past_deadline) {
        (None, None) => return,
        (None, Some(past)) => {
            finish.deadline = Some(past.clone());
            finish.state = DeadlineState::Missed;
        }
        (Some(deadline), _) => {
            finish.deadline = Some(moment_text(deadline.at_ms));
            finish.nodes_needed = snapshot.nodes_needed.filter(|_| end.is_none()).cloned();
            let at_ms = end.map_or(snapshot.now, |(_, at)| at).as_millisecond();
            let is_late = at_ms > i64::try_from(deadline.latest_ms()).unwrap_or(i64::MAX);
            match (end, snapshot.progress.forecast) {
                (Some((State::Succeeded, _)), _) if !is_late => finish.state = DeadlineState::Met,
                (Some(_), _) => finish.state = DeadlineState::Missed,
                (None, _) if is_late => finish.state = DeadlineState::Missed,
                (None, None) => {}
                (None, Some(forecast)) => {
                    // At risk only if even the lucky end of the prediction is late: a warning should not come and go.
                    let is_late = forecast.earliest_ms > deadline.latest_ms();
                    finish.predict(forecast, if is_late { DeadlineState::AtRisk } else { DeadlineState::OnTime });
                }
            }
        }
    }
    let tolerance_ms = job.deadline.map_or(0, |deadline| deadline.tolerance_ms);
    let tolerance = SignedDuration::from_millis(i64::try_from(tolerance_ms).unwrap_or(i64::MAX));
    let risk = RiskText::of(&finish, tolerance, job.deadline.is_none());
    set_risk(status, risk, snapshot.now);
    status.finish = Some(finish);
}

/// No pod, of whatever attempt, has the task's name.
fn is_missing(snapshot: &Snapshot<'_>, task: TaskId) -> bool {
    snapshot.own_pods().all(|pod| pod.task != Some(task))
}

fn create(snapshot: &Snapshot<'_>, missing: &[TaskId]) -> (Vec<Action>, Option<Timestamp>) {
    let not_before = snapshot.job.status.journal.not_before.as_ref();
    let after = not_before.and_then(|at| bounded_wait(at.0, LONGEST_PAUSE, snapshot.now));
    if after.is_some() && !missing.is_empty() {
        return (Vec::new(), after);
    }
    if snapshot.fault.is_some() {
        return (Vec::new(), snapshot.now.saturating_add(REFUSAL_PAUSE).ok());
    }
    (missing.iter().take(CREATED_AT_ONCE).map(|task| Action::Create(*task)).collect(), None)
}

/// Writes the nodes that the line has chosen. The first time, they must cover the whole gang.
fn place(
    snapshot: &Snapshot<'_>,
    wanted: &BTreeMap<Role, u32>,
    gang: &BTreeSet<TaskId>,
    pods: &BTreeMap<TaskId, &PodSnapshot>,
) -> Option<Step> {
    let grant = snapshot.grant?;
    let mut status = snapshot.job.status.clone();
    let is_gated = |task: &TaskId| pods.get(task).is_some_and(|pod| pod.gated && pod.deleted.is_none());
    if !status.journal.admitted {
        if !gang.iter().all(|task| grant.contains_key(task) && is_gated(task)) {
            return None;
        }
        status.journal.admitted = true;
        status.journal.nodes.clear();
    }
    let is_wanted = |task: &TaskId| task.index < wanted.get(&task.role).copied().unwrap_or(0);
    let new: Vec<(&TaskId, &NodeName)> = grant
        .iter()
        .filter(|(task, _)| is_wanted(task) && is_gated(task))
        .filter(|(task, _)| !status.journal.nodes.contains_key(&task.to_string()))
        .collect();
    if new.is_empty() {
        return None;
    }
    let nodes: BTreeSet<&NodeName> = new.iter().map(|(_, node)| *node).collect();
    let message = format!("{} get their place on {}", count(new.len(), "task"), count(nodes.len(), "node"));
    status.journal.nodes.extend(new.into_iter().map(|(task, node)| (task.to_string(), node.clone())));
    let state = status.journal.state;
    Some(write(snapshot, JournalStep::Placed, status, state, &message))
}

/// Tasks were lost: they are replaced, or all start again.
fn lose(snapshot: &Snapshot<'_>, loss: &Loss) -> Step {
    let mut status = snapshot.job.status.clone();
    let journal = &mut status.journal;
    journal.failures = journal.failures.saturating_add(loss.failures);
    if loss.failures > 0 {
        journal.not_before = snapshot.now.saturating_add(pause_after(journal.failures)).ok().map(MicroTime);
    }
    if !loss.refused_by.is_empty() {
        if journal.tried_until.as_ref().is_none_or(|until| until.0 <= snapshot.now) {
            journal.tried.clear();
        }
        journal.tried.extend(loss.refused_by.iter().cloned());
        journal.tried.sort();
        journal.tried.dedup();
        journal.tried_until = snapshot.now.saturating_add(AVOID_FOR).ok().map(MicroTime);
    }
    if loss.whole {
        journal.restarting = true;
        journal.reached_step = snapshot.progress.step.or(journal.reached_step);
        let reached = journal.reached_step.map(|step| format!(", after step {step}")).unwrap_or_default();
        let message = format!("{}: all tasks start again{reached}", loss.message);
        return write(snapshot, JournalStep::Stopping, status, State::Restarting, &message);
    }
    let exists = |uid: &PodUid| snapshot.pods.iter().any(|pod| pod.uid == *uid);
    journal.replaced.retain(exists);
    for (uid, task) in &loss.pods {
        journal.replaced.push(uid.clone());
        journal.nodes.remove(&task.to_string());
    }
    let message = format!("{}: it is replaced", loss.message);
    let (kind, state) = (snapshot.job.key.kind, journal.state);
    set_state(&mut status, kind, state, &message, snapshot.now);
    if kind == WorkloadKind::TfJob && state == State::Running && loss.failures > 0 {
        set_replacing(&mut status, kind, &message, snapshot.now);
    }
    Step::one(Action::Write(JournalStep::Stopping, Box::new(status)))
}

/// The status that people read, if it is new.
fn publish(
    snapshot: &Snapshot<'_>,
    spec: &TaskJobSpec,
    (wanted, gang): (&BTreeMap<Role, u32>, &BTreeSet<TaskId>),
    pods: &BTreeMap<TaskId, &PodSnapshot>,
    late: Option<String>,
) -> Option<Action> {
    let job = snapshot.job;
    let mut status = job.status.clone();
    let journal = &mut status.journal;
    journal.nodes.retain(|task, _| {
        let task = TaskId::parse(task);
        task.is_some_and(|task| task.index < wanted.get(&task.role).copied().unwrap_or(0))
    });
    let is_active = |task: &TaskId| pods.get(task).is_some_and(|pod| pod.running && pod.deleted.is_none());
    let is_done = |task: &TaskId| pods.get(task).is_some_and(|pod| pod.phase == Phase::Succeeded);
    let alive = tasks(wanted).filter(|task| is_active(task) || is_done(task)).count();
    let wanted_count = tasks(wanted).count();
    let gang_runs = gang.iter().all(|task| is_active(task) || is_done(task));
    // Agents of earlier versions do not report where an attempt began.
    let resumed = snapshot.progress.first_step.or(snapshot.progress.step);
    if let (true, Some(reached), Some(resumed)) = (gang_runs, journal.reached_step, resumed) {
        journal.steps_lost = journal.steps_lost.saturating_add(reached.saturating_sub(resumed)).min(MOST_STEPS);
        journal.reached_step = None;
    }
    let (state, message) = if gang_runs {
        let nodes: BTreeSet<&NodeName> = pods.values().filter_map(|pod| pod.node.as_ref()).collect();
        let lost = match journal.steps_lost {
            0 => String::new(),
            lost => format!("; {lost} steps were lost by restarts"),
        };
        let (tasks, nodes) = (count(wanted_count, "task"), count(nodes.len(), "node"));
        (State::Running, format!("{alive} of {tasks} run on {nodes}{lost}"))
    } else if let Some(fault) = snapshot.fault {
        (journal.state, fault.message.clone())
    } else if let Some(late) = late {
        (journal.state, late)
    } else if journal.state == State::Running {
        (State::Running, format!("{alive} of {} run; lost ones are replaced", count(wanted_count, "task")))
    } else if !journal.admitted && gang.iter().all(|task| pods.contains_key(task)) {
        (journal.state, waits_sentence(snapshot, spec, gang))
    } else if journal.admitted {
        let waiting = pods.values().find_map(|pod| Some(format!("{}: {}", pod.name, pod.waiting.as_ref()?)));
        let message = format!("{alive} of {} run, the others begin", count(wanted_count, "task"));
        (journal.state, waiting.map_or(message, |why| format!("a task does not begin: {why}")))
    } else {
        (journal.state, "its pods are being made".to_owned())
    };
    if state == State::Running {
        status.start_time.get_or_insert(MicroTime(snapshot.now));
    }
    status.replicas = replica_statuses(job, spec, wanted, pods);
    status.running_tasks = running_tasks(job, alive, wanted_count);
    snapshot.progress.publish(&mut status, state, snapshot.now);
    if !gang_runs && is_replacing(&job.status) {
        set_replacing(&mut status, job.key.kind, &message, snapshot.now);
    } else {
        set_state(&mut status, job.key.kind, state, &message, snapshot.now);
    }
    let step = if state == State::Running && job.status.journal.state != state {
        JournalStep::Running
    } else {
        JournalStep::Noted
    };
    (status != job.status).then(|| Action::Write(step, Box::new(status)))
}

fn waits_sentence(snapshot: &Snapshot<'_>, spec: &TaskJobSpec, gang: &BTreeSet<TaskId>) -> String {
    let requests = || gang.iter().filter_map(|task| spec.roles.get(&task.role)).map(|role| role.requests);
    let milli = requests().fold(0, |sum: u64, one| sum.saturating_add(one.0));
    let bytes = requests().fold(0, |sum: u64, one| sum.saturating_add(one.1));
    let need = format!(
        "{} ({:.1} cores and {:.1} GiB together)",
        count(gang.len(), "task"),
        milli as f64 / 1000.0,
        bytes as f64 / f64::from(1 << 30)
    );
    if snapshot.never_fits {
        let demands = if spec.roles.values().any(|role| role.rules.is_some()) {
            " with the labels, tolerated taints and devices that its templates demand"
        } else {
            ""
        };
        return format!(
            "no nodes of this cluster{demands} could ever hold its {need}: lower the requests, or add nodes; it waits \
             meanwhile"
        );
    }
    format!("waits until there is room for all of its {need} at once")
}

/// The column of a TFJob. A TrainingJob has no such field: its message has the same number.
fn running_tasks(job: &TaskJobSnapshot, alive: usize, wanted: usize) -> Option<String> {
    (job.key.kind == WorkloadKind::TfJob).then(|| format!("{alive}/{wanted}"))
}

fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

fn replica_statuses(
    job: &TaskJobSnapshot,
    spec: &TaskJobSpec,
    wanted: &BTreeMap<Role, u32>,
    pods: &BTreeMap<TaskId, &PodSnapshot>,
) -> BTreeMap<String, ReplicaStatus> {
    let name = &job.key.name;
    let reference = TaskJobRef {
        namespace: &name.namespace,
        name: &name.name,
        uid: &job.uid,
        epoch: job.status.journal.epoch,
        spec,
        counts: wanted,
        cluster_domain: None,
    };
    let status = |(role, desired): (&Role, &u32)| {
        let number = |is: &dyn Fn(&PodSnapshot) -> bool| {
            let found = pods.iter().filter(|(task, pod)| task.role == *role && is(pod)).count();
            i32::try_from(found).unwrap_or(i32::MAX)
        };
        let counts = ReplicaStatus {
            active: number(&|pod| pod.running && !matches!(pod.phase, Phase::Succeeded | Phase::Failed)),
            succeeded: number(&|pod| pod.phase == Phase::Succeeded),
            failed: number(&|pod| pod.phase == Phase::Failed),
            desired: i32::try_from(*desired).unwrap_or(i32::MAX),
            selector: Some(reference.selector(*role)),
        };
        (role.name().to_owned(), counts)
    };
    wanted.iter().map(status).collect()
}

fn fail(snapshot: &Snapshot<'_>, reason: &'static str, message: &str) -> Step {
    end(snapshot, State::Failed, &format!("{reason}: {message}"), snapshot.now)
}

/// The job has ended at `at`.
fn end(snapshot: &Snapshot<'_>, state: State, message: &str, at: Timestamp) -> Step {
    let job = snapshot.job;
    let mut status = job.status.clone();
    status.completion_time = Some(MicroTime(snapshot.now));
    set_finish(&mut status, snapshot, Some((state, at)));
    if let Ok(spec) = &job.spec {
        let (wanted, pods) = (job.wanted(), snapshot.current_pods());
        status.replicas = replica_statuses(job, spec, &wanted, &pods);
        let done = pods.values().filter(|pod| pod.running || pod.phase == Phase::Succeeded).count();
        status.running_tasks = running_tasks(job, done, tasks(&wanted).count());
    }
    status.time_left = None;
    if state == State::Succeeded {
        // Servers never end by themselves: with the job they have done their part. The training operator counts so.
        for role in status.replicas.values_mut() {
            role.succeeded = role.succeeded.saturating_add(std::mem::take(&mut role.active));
        }
        status.progress = Some(percent_text(100));
    }
    let step = if state == State::Failed { JournalStep::Failed } else { JournalStep::Stopped };
    write(snapshot, step, status, state, message)
}

fn write(snapshot: &Snapshot<'_>, step: JournalStep, mut status: TaskJobStatus, state: State, message: &str) -> Step {
    let kind = snapshot.job.key.kind;
    if state == State::Running && is_replacing(&status) {
        set_replacing(&mut status, kind, message, snapshot.now);
    } else {
        set_state(&mut status, kind, state, message, snapshot.now);
    }
    Step::one(Action::Write(step, Box::new(status)))
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
