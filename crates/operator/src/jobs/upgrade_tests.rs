//! Objects as the previous version wrote them (`fixtures/v0.1`). The operator reads them and goes on where the
//! previous version stopped. A fixture is never changed; a change of the format adds another folder.

use super::batch_job::test_step as batch_step;
use super::training_job::action::{Action, Snapshot, Step};
use super::training_job::machine::step;
use crate::state::snapshot::{JobSnapshot, NodeState, Nodes, PodSnapshot};
use gainshare_kube_api::adopted::BatchJobSnapshot;
use gainshare_kube_api::select::PolicyFacts;
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::training_job::{Phase, State};
use jiff::Timestamp;
use serde_json::{Value, json};

const RUNNING: &str = include_str!("../../fixtures/v0.1/training-job-running.json");
const MOVING: &str = include_str!("../../fixtures/v0.1/training-job-moving.json");
const POD: &str = include_str!("../../fixtures/v0.1/pod-running.json");
const JOB: &str = include_str!("../../fixtures/v0.1/job-moving.json");
const POLICY: &str = include_str!("../../fixtures/v0.1/share-policy.json");

fn training_job(text: &str) -> JobSnapshot {
    let job = serde_json::from_str(text).expect("this version reads the object");
    JobSnapshot::of(&job).expect("this version follows the object")
}

fn next(job: &JobSnapshot, pod: &Value) -> Step {
    let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(pod.clone()).unwrap();
    let pods = [PodSnapshot::of(&pod).expect("a pod of a training job")];
    let nodes: Nodes = ["left", "right"].map(|node| (node.into(), NodeState::Ready)).into();
    let now: Timestamp = "2026-10-02T09:31:00Z".parse().unwrap();
    step(&Snapshot::plain(now, job, &pods, &nodes))
}

/// Carries out what is written, until nothing more is; answers all other actions.
fn settle(job: &mut JobSnapshot, pod: &Value) -> Vec<Action> {
    let mut others = Vec::new();
    for _ in 0..5 {
        let mut has_written = false;
        for action in next(job, pod).actions {
            match action {
                Action::Write(_, status) => {
                    has_written = true;
                    job.status = *status;
                }
                other => others.push(other),
            }
        }
        if !has_written {
            return others;
        }
    }
    panic!("the status never settles: {:?}", job.status);
}

#[test]
fn a_running_job_goes_on_without_a_new_attempt() {
    let mut job = training_job(RUNNING);
    assert_eq!(job.status.last_moves[0].message, "it has converged beside jobs that grow");
    let others = settle(&mut job, &serde_json::from_str(POD).unwrap());
    assert_eq!(others, [], "the pod is neither deleted nor made again");
    let attempt = job.status.attempt.as_ref().expect("its attempt");
    assert_eq!((job.status.state, attempt.epoch, attempt.pod.as_str()), (State::Running, 2, "digits-2"));
    assert_eq!((job.status.moves, job.status.failures), (1, 0));
}

#[test]
fn a_move_that_the_previous_version_began_is_completed() {
    let mut job = training_job(MOVING);
    let migration = job.status.migration.clone().expect("the move");
    assert_eq!((migration.phase, migration.message.as_str()), (Phase::Stopping, "the node right has run empty"));
    // The pod still runs: it is asked to end, and nothing is started.
    let mut pod: Value = serde_json::from_str(POD).unwrap();
    let others = settle(&mut job, &pod);
    assert!(others.iter().any(|action| matches!(action, Action::Delete { uid, .. } if uid == "pod-2")), "{others:?}");
    assert!(!others.iter().any(|action| matches!(action, Action::Create { .. })), "{others:?}");
    // The pod has ended: the next attempt starts at the target.
    pod["metadata"]["deletionTimestamp"] = json!("2026-10-02T09:30:30Z");
    pod["metadata"]["deletionGracePeriodSeconds"] = json!(30);
    pod["status"]["phase"] = json!("Succeeded");
    pod["status"]["containerStatuses"][0]["state"] =
        json!({"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": "2026-10-02T09:30:20Z"}});
    let others = settle(&mut job, &pod);
    let attempt = job.status.attempt.as_ref().expect("the next attempt");
    assert_eq!((attempt.epoch, attempt.node.as_deref()), (3, Some("right")));
    assert!(others.iter().any(|action| matches!(action, Action::Create { epoch: 3 })), "{others:?}");
}

#[test]
fn the_journal_of_a_job_is_read() {
    let job = BatchJobSnapshot::of(&serde_json::from_str(JOB).unwrap()).expect("a Job");
    assert_eq!((job.problem.as_deref(), job.asked, job.suspended), (None, true, true));
    let journal = &job.journal;
    let migration = journal.migration.as_ref().expect("the move");
    assert_eq!((migration.phase, migration.message.as_str()), (Phase::Stopping, "the node right has run empty"));
    assert_eq!((journal.moves, journal.last_moves[0].message.as_str()), (2, "it gains"));
    assert_eq!(journal.pod.as_ref().map(|pod| pod.uid.as_str()), Some("pod-1"));
    let nodes: Nodes = ["left", "right"].map(|node| (node.into(), NodeState::Ready)).into();
    batch_step(&job, &[], &nodes, "2026-10-02T09:31:00Z".parse().unwrap());
}

#[test]
fn a_policy_keeps_its_settings_and_its_status() {
    let policy: SharePolicy = serde_json::from_str(POLICY).unwrap();
    let status = policy.status.as_ref().expect("its status");
    assert_eq!((status.pods, status.resizable, status.converged), (4, 3, 2));
    assert_eq!((status.blocked[0].pod.as_str(), status.conditions[0].type_.as_str()), ("train-4", "Ready"));
    let settings = policy.spec.settings();
    assert_eq!((settings.interval_ms, settings.alpha, settings.floor), (Some(90_000), Some(0.05), 0.05));
    assert!(settings.memory && settings.path.as_deref() == Some("run/metrics.csv"));
    assert!(PolicyFacts::of(&policy).is_some());
}
