//! The number of tasks, pods whose removal was not read, and waits that a wrong clock wrote.

use super::*;

/// A pod that has ended, and whose removal was not read, must not hold up its job for ever.
#[test]
fn a_job_never_waits_without_an_alarm_for_pods_that_have_ended() {
    for suspends in [false, true] {
        let mut bed = small(json!({})).start();
        bed.end("ps-0", 137);
        bed.keeps_removed = true;
        bed.settle();
        bed.job.spec.as_mut().unwrap().options.suspend = suspends;
        bed.settle();
        assert_eq!((bed.names().len(), bed.journal().epoch, bed.state()), (3, 1, State::Restarting));
        let wake = bed.step().wake.expect("the API server is asked again");
        assert!(wake <= bed.now + SignedDuration::from_secs(5), "{wake}");
        bed.pods.clear();
        bed.settle();
        let state = if suspends { State::Suspended } else { State::Restarting };
        assert_eq!((bed.state(), bed.journal().epoch), (state, 2));
    }
}

#[test]
fn a_pause_written_with_a_wrong_clock_is_not_waited_for() {
    let mut bed = small(json!({}));
    bed.has_room = false;
    bed.settle();
    bed.pods.clear();
    bed.job.status.journal.not_before = Some(MicroTime(bed.now + SignedDuration::from_secs(3600)));
    bed.settle();
    assert_eq!(bed.names().len(), 3);
}

#[test]
fn the_number_of_workers_follows_what_is_asked_for() {
    let mut bed = training(json!({"replicaSpecs": {
        "PS": {"template": template()},
        "Worker": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4, "template": template()},
    }}))
    .start();
    assert_eq!(bed.names().len(), 3);
    bed.job.asked = [(Role::Worker, 9)].into();
    bed.settle();
    bed.run();
    bed.settle();
    assert_eq!(bed.names(), ["ps-0", "worker-0", "worker-1", "worker-2", "worker-3"]);
    assert_eq!((bed.state(), bed.journal().epoch), (State::Running, 1));
    bed.job.asked = [(Role::Worker, 1)].into();
    bed.settle();
    assert_eq!((bed.names(), bed.state()), (vec!["ps-0".to_owned(), "worker-0".to_owned()], State::Running));
    assert_eq!(bed.journal().nodes.len(), 2);
    assert_eq!(bed.job.status.replicas["Worker"].desired, 1);
}

/// What the policy `operator` decides is written once, and the tasks follow it.
#[test]
fn the_number_of_workers_follows_the_decision() {
    let mut bed = training(json!({"policy": "operator", "replicaSpecs": {
        "PS": {"template": template()},
        "Worker": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4, "template": template()},
    }}))
    .start();
    let scale = |workers: u32| TaskScale {
        workers: Some(workers),
        cause: "workers-starved".to_owned(),
        ..TaskScale::default()
    };
    bed.scale = Some(scale(3));
    let written = bed.settle();
    let count = |actions: &[Action]| {
        actions.iter().filter(|action| matches!(action, Action::Write(JournalStep::Scaled, _))).count()
    };
    assert_eq!(count(&written), 1);
    bed.run();
    assert_eq!(count(&bed.settle()), 0, "it is written once");
    assert_eq!(bed.names(), ["ps-0", "worker-0", "worker-1", "worker-2"]);
    bed.scale = Some(scale(99));
    bed.settle();
    assert_eq!(bed.names().len(), 5, "the author's bounds hold");
    bed.job.asked = [(Role::Worker, 2)].into();
    bed.settle();
    assert_eq!(bed.names(), ["ps-0", "worker-0", "worker-1"], "the annotation comes first");
    bed.scale = None;
    bed.run();
    bed.end("ps-0", 1);
    bed.settle();
    assert_eq!((bed.journal().epoch, &bed.journal().scale), (2, &None), "the next attempt begins as it was requested");
}

/// The nodes that a deadline needs are in the status as long as they are needed.
#[test]
fn needed_nodes_are_published_with_the_deadline() {
    let mut bed = small(json!({"deadlineSeconds": 3600}));
    bed.has_room = false;
    bed.settle();
    let finish = |bed: &Bed| bed.job.status.finish.clone().unwrap();
    assert!(finish(&bed).deadline.is_some() && finish(&bed).nodes_needed.is_none());
    let needed = NodesNeeded { count: 2, cpu: "4000m".to_owned(), memory: "16384Mi".to_owned(), instance_type: None };
    bed.nodes_needed = Some(needed.clone());
    let writes = bed.settle();
    assert_eq!((writes.len(), finish(&bed).nodes_needed), (1, Some(needed)), "{writes:?}");
    assert_eq!(bed.settle(), [], "it is written once");
    bed.nodes_needed = None;
    bed.settle();
    assert_eq!(finish(&bed).nodes_needed, None);
    // A job without a deadline has nothing of this.
    let mut other = small(json!({}));
    other.settle();
    assert_eq!(other.job.status.finish, None);
}
