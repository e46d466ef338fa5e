//! The number of tasks, pods whose removal was not read, and waits that a wrong clock wrote.

use super::*;
use crate::jobs::deadline::AT_RISK;
use crate::jobs::task_job::{TaskJobs, TrainingJobKind};
use crate::jobs::workload::{EventText, Workload};
use std::sync::Arc;

/// A pod that has ended, and whose removal was not read, must not hold up its job for ever.
#[test]
fn a_job_never_waits_without_an_alarm_for_pods_that_have_ended() {
    for suspends in [false, true] {
        let mut cluster = small(json!({})).start();
        cluster.end("ps-0", 137);
        cluster.keeps_removed = true;
        cluster.settle();
        cluster.job.spec.as_mut().unwrap().options.suspend = suspends;
        cluster.settle();
        assert_eq!((cluster.names().len(), cluster.journal().epoch, cluster.state()), (3, 1, State::Restarting));
        let wake = cluster.step().wake.expect("the API server is asked again");
        assert!(wake <= cluster.now + SignedDuration::from_secs(5), "{wake}");
        cluster.pods.clear();
        cluster.settle();
        let state = if suspends { State::Suspended } else { State::Restarting };
        assert_eq!((cluster.state(), cluster.journal().epoch), (state, 2));
    }
}

#[test]
fn a_pause_written_with_a_wrong_clock_is_not_waited_for() {
    let mut cluster = small(json!({}));
    cluster.has_room = false;
    cluster.settle();
    cluster.pods.clear();
    cluster.job.status.journal.not_before = Some(MicroTime(cluster.now + SignedDuration::from_secs(3600)));
    cluster.settle();
    assert_eq!(cluster.names().len(), 3);
}

#[test]
fn the_number_of_workers_follows_what_is_asked_for() {
    let mut cluster = training(json!({"replicaSpecs": {
        "PS": {"template": template()},
        "Worker": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4, "template": template()},
    }}))
    .start();
    assert_eq!(cluster.names().len(), 3);
    cluster.job.asked = [(Role::Worker, 9)].into();
    cluster.settle();
    cluster.run();
    cluster.settle();
    assert_eq!(cluster.names(), ["ps-0", "worker-0", "worker-1", "worker-2", "worker-3"]);
    assert_eq!((cluster.state(), cluster.journal().epoch), (State::Running, 1));
    cluster.job.asked = [(Role::Worker, 1)].into();
    cluster.settle();
    assert_eq!((cluster.names(), cluster.state()), (vec!["ps-0".to_owned(), "worker-0".to_owned()], State::Running));
    assert_eq!(cluster.journal().nodes.len(), 2);
    assert_eq!(cluster.job.status.replicas["Worker"].desired, 1);
}

/// What the policy `operator` decides is written once, and the tasks follow it.
#[test]
fn the_number_of_workers_follows_the_decision() {
    let mut cluster = training(json!({"policy": "operator", "replicaSpecs": {
        "PS": {"template": template()},
        "Worker": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4, "template": template()},
    }}))
    .start();
    let scale = |workers: u32| TaskScale {
        workers: Some(workers),
        cause: "workers-starved".to_owned(),
        ..TaskScale::default()
    };
    cluster.scale = Some(scale(3));
    let written = cluster.settle();
    let count = |actions: &[Action]| {
        actions.iter().filter(|action| matches!(action, Action::Write(JournalStep::Scaled, _))).count()
    };
    assert_eq!(count(&written), 1);
    cluster.run();
    assert_eq!(count(&cluster.settle()), 0, "it is written once");
    assert_eq!(cluster.names(), ["ps-0", "worker-0", "worker-1", "worker-2"]);
    cluster.scale = Some(scale(99));
    cluster.settle();
    assert_eq!(cluster.names().len(), 5, "the author's bounds hold");
    cluster.job.asked = [(Role::Worker, 2)].into();
    cluster.settle();
    assert_eq!(cluster.names(), ["ps-0", "worker-0", "worker-1"], "the annotation comes first");
    cluster.scale = None;
    cluster.run();
    cluster.end("ps-0", 1);
    cluster.settle();
    assert_eq!(
        (cluster.journal().epoch, &cluster.journal().scale),
        (2, &None),
        "the next attempt begins as it was requested"
    );
}

/// The nodes that a deadline needs are in the status as long as they are needed.
#[test]
fn needed_nodes_are_published_with_the_deadline() {
    let mut cluster = small(json!({"deadlineSeconds": 3600}));
    cluster.has_room = false;
    cluster.settle();
    let finish = |cluster: &TestCluster| cluster.job.status.finish.clone().unwrap();
    assert!(finish(&cluster).deadline.is_some() && finish(&cluster).nodes_needed.is_none());
    let needed = NodesNeeded { count: 2, cpu: "4000m".to_owned(), memory: "16384Mi".to_owned(), instance_type: None };
    cluster.nodes_needed = Some(needed.clone());
    let writes = cluster.settle();
    assert_eq!((writes.len(), finish(&cluster).nodes_needed), (1, Some(needed)), "{writes:?}");
    assert_eq!(cluster.settle(), [], "it is written once");
    cluster.nodes_needed = None;
    cluster.settle();
    assert_eq!(finish(&cluster).nodes_needed, None);
    // A job without a deadline has nothing of this.
    let mut other = small(json!({}));
    other.settle();
    assert_eq!(other.job.status.finish, None);
}

/// When the job will be done, and how its deadline stands, is published for jobs of tasks too.
#[test]
fn the_end_of_a_job_with_a_deadline_is_predicted() {
    let mut cluster = small(json!({"deadlineSeconds": 3600}));
    cluster.job.deadline =
        Some(Deadline { at_ms: cluster.now.as_millisecond().unsigned_abs() + 3_600_000, tolerance_ms: 0 });
    let mut cluster = cluster.start();
    let finish = |cluster: &TestCluster| cluster.job.status.finish.clone().unwrap();
    assert_eq!((finish(&cluster).state, finish(&cluster).predicted), (DeadlineState::Unknown, None));
    let due_ms = cluster.job.deadline.unwrap().at_ms;
    let ends = |done_ms: u64| TaskProgress {
        forecast: Some(Forecast { done_ms, earliest_ms: done_ms - 60_000, latest_ms: done_ms + 60_000 }),
        ..TaskProgress::default()
    };
    cluster.progress = ends(due_ms - 600_000);
    cluster.settle();
    assert_eq!(finish(&cluster).state, DeadlineState::OnTime);
    let predicted = finish(&cluster).predicted;
    assert!(predicted.is_some());
    cluster.progress = ends(due_ms - 570_000);
    cluster.settle();
    assert_eq!(finish(&cluster).predicted, predicted, "a small change is not written");
    cluster.progress = ends(due_ms + 120_000);
    cluster.settle();
    assert_eq!(finish(&cluster).state, DeadlineState::AtRisk);
    cluster.progress = ends(due_ms - 300_000);
    cluster.settle();
    cluster.end("worker-0", 0);
    cluster.end("worker-1", 0);
    cluster.settle();
    assert_eq!((cluster.state(), finish(&cluster).state), (State::Succeeded, DeadlineState::Met));
}

/// What the tasks send and receive is written once, and is still there when all tasks start again.
#[test]
fn measured_traffic_outlasts_an_attempt() {
    let mut cluster = small(json!({})).start();
    let traffic = TaskTraffic::from([("ps-0".to_owned(), 9_000_000), ("worker-0".to_owned(), 4_500_000)]);
    cluster.traffic = Some(traffic.clone());
    let writes = cluster.settle().iter().filter(|action| matches!(action, Action::Write(..))).count();
    assert_eq!((writes, &cluster.journal().traffic), (1, &traffic));
    assert_eq!(cluster.step().actions, [], "nothing is written twice");
    cluster.traffic = None;
    cluster.end("ps-0", 137);
    cluster.settle();
    cluster.wait(60);
    cluster.settle();
    assert_eq!((cluster.journal().epoch, &cluster.journal().traffic), (2, &traffic));
}

/// A job of tasks whose deadline is this number of seconds after now.
fn due_in(seconds: u64) -> TestCluster {
    let mut cluster = small(json!({}));
    let at_ms = cluster.now.as_millisecond().unsigned_abs() + seconds * 1000;
    cluster.job.deadline = Some(Deadline { at_ms, tolerance_ms: 0 });
    cluster
}

/// The condition about the deadline: its status and its reason.
fn risk(cluster: &TestCluster) -> (String, String) {
    let known = cluster.job.status.conditions.iter().find(|known| known.type_ == AT_RISK).unwrap();
    (known.status.clone(), known.reason.clone())
}

/// The warnings about the deadline among what was written.
fn warnings(before: &TaskJobSnapshot, actions: &[Action]) -> Vec<EventText> {
    let mut job = before.clone();
    let mut events = Vec::new();
    for action in actions {
        events.extend(TaskJobs::<TrainingJobKind>::event(&Arc::new(job.clone()), action));
        if let Action::Write(_, status) = action {
            job.status = TaskJobStatus::clone(status);
        }
    }
    events.into_iter().filter(|event| event.reason == AT_RISK || event.note.contains("deadline")).collect()
}

#[test]
fn a_predicted_miss_of_a_job_of_tasks_is_a_condition_and_one_event() {
    let mut cluster = due_in(3600).start();
    assert_eq!(risk(&cluster), ("False".to_owned(), "NotPredicted".to_owned()));
    assert_eq!(cluster.job.status.conditions.last().unwrap().type_, "Running", "the last condition is the state");
    let due_ms = cluster.job.deadline.unwrap().at_ms;
    let late = Forecast { done_ms: due_ms + 120_000, earliest_ms: due_ms + 60_000, latest_ms: due_ms + 180_000 };
    cluster.progress = TaskProgress { forecast: Some(late), ..TaskProgress::default() };
    let before = cluster.job.clone();
    let written = cluster.settle();
    let events = warnings(&before, &written);
    assert_eq!(events.len(), 1);
    assert!(
        events[0].warns && events[0].reason == AT_RISK && events[0].note.contains("best effort"),
        "{}",
        events[0].note
    );
    assert_eq!(risk(&cluster), ("True".to_owned(), "MissPredicted".to_owned()));
    assert_eq!(cluster.settle(), [], "it is written once");
    // The end of a job that fails brings the miss, and its own reason.
    let mut other = due_in(3600).start();
    other.job.spec.as_mut().unwrap().options.run.backoff_limit = Some(0);
    let before = other.job.clone();
    other.end("worker-0", 1);
    let written = other.settle();
    let events = warnings(&before, &written);
    assert_eq!(other.state(), State::Failed);
    assert!(events.len() == 1 && events[0].reason == "Failed" && events[0].note.ends_with("was missed"));
}

/// No task reports here: the miss is announced when it happens.
#[test]
fn a_deadline_that_passes_while_the_job_waits_wakes_and_warns() {
    let mut cluster = due_in(60).start();
    let wake = cluster.step().wake.expect("it looks again at the deadline");
    assert!(wake <= cluster.now + SignedDuration::from_secs(61), "{wake}");
    cluster.wait(61);
    let before = cluster.job.clone();
    let written = cluster.settle();
    assert_eq!(warnings(&before, &written).len(), 1);
    assert_eq!(risk(&cluster), ("True".to_owned(), "Missed".to_owned()));
}

#[test]
fn a_deadline_in_the_past_warns_of_a_job_of_tasks_and_it_runs_all_the_same() {
    let mut cluster = small(json!({"deadline": "1969-01-01T00:00:00Z"}));
    let before = cluster.job.clone();
    let written = cluster.settle();
    let events = warnings(&before, &written);
    assert!(events.len() == 1 && events[0].note.contains("later deadline"), "{}", events.len());
    assert_eq!(risk(&cluster), ("True".to_owned(), "DeadlineInPast".to_owned()));
    cluster.run();
    cluster.settle();
    assert_eq!(cluster.state(), State::Running);
}

/// The operator was away, or the kubelet's report was late.
#[test]
fn the_success_of_tasks_is_judged_by_their_end() {
    for (ended_s, state) in [(50, DeadlineState::Met), (61, DeadlineState::Missed)] {
        let mut cluster = due_in(60).start();
        cluster.wait(65);
        cluster.settle();
        assert_eq!(cluster.job.status.finish.as_ref().unwrap().state, DeadlineState::Missed, "no end was seen");
        let seen = cluster.now;
        for (name, seconds) in [("worker-0", ended_s), ("worker-1", 40)] {
            cluster.now = seen + SignedDuration::from_secs(seconds - 65);
            cluster.end(name, 0);
        }
        cluster.now = seen;
        cluster.settle();
        assert_eq!(cluster.job.status.finish.as_ref().unwrap().state, state, "after {ended_s} s");
    }
}
