//! Objects that tenants write, at their worst: extreme quantities, counts, times and annotations.
//! The operator reads them, derives from them, and steps on without a panic, for any content
//! (`any_objects_pass`). The named tests below are the inputs that once stopped the operator.

use super::batch_job::test_step as batch_step;
use super::pods::PodFault;
use super::training_job::action::{Action, Snapshot};
use super::training_job::machine::{movable, requested_order, step};
use super::training_job::pod;
use crate::state::invalid_objects::InvalidObjects;
use crate::state::orders::{Order, OrderKind};
use crate::state::snapshot::{JobSnapshot, NodeState, Nodes, PodSnapshot};
use crate::state::world::World;
use gainshare_kube_api::adopted::{AdoptedJob, BatchJobSnapshot};
use gainshare_kube_api::bounds::{NodeFacts, QuotaFacts, RangeFacts};
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::quantity::template_requests;
use gainshare_kube_api::resize;
use gainshare_kube_api::resources::{Amounts, Resources};
use gainshare_kube_api::select::PolicyFacts;
use jiff::Timestamp;
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const CONTAINERS: usize = 19;

/// Arbitrary sets of objects.
const CASES: u32 = 200;

/// The object, if the API server's types can hold it at all.
pub(super) fn read<T: DeserializeOwned>(value: &Value) -> Option<T> {
    serde_json::from_value(value.clone()).ok()
}

fn world() -> World {
    let mut world = World::new(1);
    let policy = json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
        "metadata": {"namespace": "team", "name": "all", "uid": "p"},
        "spec": {"selector": {}, "mode": "quota", "resources": ["cpu", "memory"], "floorPercent": 50},
    });
    world.put_policy(PolicyFacts::of(&read(&policy).unwrap()).unwrap());
    world
}

/// Puts pods into a world, plans for them as a node agent does, and checks the plan as the operator
/// does.
fn share(pods: &[Value]) {
    let mut world = world();
    for pod in pods {
        if let Some(pod) = read(pod) {
            InvalidObjects::default().check_pod(&pod);
        }
        if let Some(facts) = read(pod).as_ref().and_then(PodFacts::of) {
            world.put_pod(facts.clone());
            world.put_pod(PodFacts { resource_version: "9999".to_owned(), ..facts });
        }
    }
    let list = world.list(&"node-a".into());
    let shares: Vec<_> = list.iter().zip([0.9, 0.0, 1.0, f64::NAN].into_iter().cycle()).collect();
    let largest = Amounts { cpu_milli: Some(u64::MAX), memory_bytes: Some(u64::MAX) };
    let mut wanted = resize::changes(&shares, 0);
    wanted.extend((0..list.len()).map(|i| (i, Resources { requests: largest, limits: largest })));
    for (i, to) in wanted {
        let _ = resize::vet(&list[i], &to);
        let _ = world.pool(&list[i], &"node-a".into(), &to);
        let _ = world.quota("team", &list[i].now, &to);
        let _ = resize::memory_request(&list[i], u64::MAX);
    }
    let _ = (world.requested(&"node-a".into()), world.let_go(), world.take_changed_objects());
    let uids: Vec<PodUid> = list.iter().map(|pod| pod.uid.clone()).collect();
    uids.iter().for_each(|uid| world.remove_pod(uid));
}

/// Everything that is done to a TrainingJob and its pods, several steps on, with every order and
/// node state.
fn work_on(job: &Value, pods: &[Value]) {
    if let Some(job) = read(job) {
        InvalidObjects::default().check_training_job(&job);
    }
    let Some(mut job) = read(job).as_ref().and_then(JobSnapshot::of) else { return };
    let pods: Vec<PodSnapshot> = pods.iter().filter_map(|pod| read(pod).as_ref().and_then(PodSnapshot::of)).collect();
    let fault = match pod::check(&job) {
        Ok(template) => {
            let _ = template_requests(&template);
            None
        }
        Err(error) => Some(PodFault { for_good: true, message: error.to_string() }),
    };
    let epoch = job.status.attempt.as_ref().map_or(1, |attempt| attempt.epoch);
    let _ = (pod::build(&job, epoch), movable(&job), requested_order(&job));
    for state in [NodeState::Ready, NodeState::Silent, NodeState::Missing, NodeState::Off] {
        let nodes: Nodes = [("node-a".into(), state)].into();
        for (kind, now) in [
            (OrderKind::Place, Timestamp::MIN),
            (OrderKind::Move, Timestamp::MAX),
            (OrderKind::Move, Timestamp::UNIX_EPOCH),
        ] {
            let order = Order { uid: job.uid.clone(), node: "b".into(), kind, reason: PlacementReason::Gain };
            for _ in 0..4 {
                let snapshot = Snapshot {
                    pod_is_missing: pods.is_empty(),
                    order: Some(&order),
                    fault: fault.as_ref(),
                    progress: Some(("growing", Some(u32::MAX))),
                    ..Snapshot::plain(now, &job, &pods, &nodes)
                };
                let next = step(&snapshot);
                for action in next.actions {
                    match action {
                        Action::Write(_, status) => job.status = *status,
                        Action::Hold => job.has_finalizer = true,
                        _ => {}
                    }
                }
            }
        }
    }
}

/// The same for a Job and its pods.
fn work_on_batch(job: &Value, pods: &[Value]) {
    let Some(read_job) = read(job) else { return };
    InvalidObjects::default().check_job(&read_job);
    let _ = AdoptedJob::of(&read_job);
    let Some(job) = BatchJobSnapshot::of(&read_job) else { return };
    let pods: Vec<PodSnapshot> = pods.iter().filter_map(|pod| PodSnapshot::of_batch(&read(pod)?)).collect();
    let _ = job.preferring(Some(&"b".into()));
    for state in [NodeState::Ready, NodeState::Missing, NodeState::Off] {
        let nodes: Nodes = [("node-a".into(), state)].into();
        for now in [Timestamp::MIN, Timestamp::MAX, Timestamp::UNIX_EPOCH] {
            batch_step(&job, &pods, &nodes, now);
        }
    }
}

pub(super) fn containers(requests: &Value, limits: &Value) -> Vec<Value> {
    let container = |i: usize| json!({"name": format!("c{i}"), "image": "i", "resources": {"requests": requests, "limits": limits}});
    (0..CONTAINERS).map(container).collect()
}

pub(super) fn training_job(template: Value) -> Value {
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"namespace": "team", "name": "run", "uid": "u", "finalizers": ["gainshare.dev/training-job"]},
        "spec": {"template": template},
    })
}

pub(super) fn running_pod(uid: &str, containers: &[Value]) -> Value {
    let statuses: Vec<Value> = containers
        .iter()
        .map(|container| {
            json!({
                "name": container["name"], "ready": true, "restartCount": 0, "image": "i", "imageID": "i",
                "state": {"running": {"startedAt": "2026-11-15T12:00:00Z"}},
            })
        })
        .collect();
    json!({
        "metadata": {"uid": uid, "namespace": "team", "name": uid, "resourceVersion": "1"},
        "spec": {"nodeName": "node-a", "containers": containers},
        "status": {"phase": "Running", "qosClass": "Burstable", "containerStatuses": statuses},
    })
}

#[test]
fn a_training_job_with_huge_requests() {
    let requests = json!({"cpu": "999999999999999", "memory": "999999999999999999"});
    work_on(&training_job(json!({"spec": {"containers": containers(&requests, &json!({}))}})), &[]);
    let largest = json!({"cpu": "999999999", "memory": "7Pi"});
    work_on(&training_job(json!({"spec": {"containers": containers(&largest, &json!({}))}})), &[]);
}

#[test]
fn a_suspended_job_with_huge_requests() {
    let requests = json!({"cpu": "999999999999999", "memory": "999999999999999999"});
    let job = json!({
        "metadata": {"namespace": "team", "name": "run", "uid": "u"},
        "spec": {"suspend": true, "template": {"spec": {"containers": containers(&requests, &json!({}))}}},
    });
    work_on_batch(&job, &[]);
}

#[test]
fn a_bound_pod_with_huge_requests() {
    for requests in [json!({"cpu": "999999999999999"}), json!({"cpu": "999999999", "memory": "7Pi"})] {
        let pods: Vec<Value> =
            (0..3).map(|i| running_pod(&format!("p{i}"), &containers(&requests, &json!({})))).collect();
        share(&pods);
    }
}

#[test]
fn a_running_pod_with_huge_limits() {
    let limits = json!({"memory": "999999999999999999", "cpu": "999999999"});
    let mut all = containers(&json!({"cpu": "1"}), &limits);
    all.push(json!({"name": "c19", "image": "i", "resources": {"limits": {"memory": "7Pi"}}}));
    share(&[running_pod("p", &all)]);
}

#[test]
fn a_deleted_pod_with_an_endless_grace_period() {
    for grace in [9_000_000_000_000_000_000_i64, i64::MAX, i64::MIN, -1] {
        let mut pod = running_pod("p", &containers(&json!({}), &json!({})));
        pod["metadata"]["labels"] = json!({"gainshare.dev/job": "run", "gainshare.dev/epoch": "1"});
        pod["metadata"]["deletionTimestamp"] = json!("2026-11-15T12:00:00Z");
        pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        let snapshot = PodSnapshot::of(&read(&pod).unwrap()).unwrap();
        let (asked, until) = snapshot.deleted.unwrap();
        assert!(asked <= until, "{grace}");
        work_on(&training_job(json!({"spec": {"containers": [{"name": "main", "image": "i"}]}})), &[pod]);
    }
}

#[test]
fn a_forged_journal() {
    let journal = json!({"moves": u32::MAX}).to_string();
    let job = json!({
        "metadata": {
            "namespace": "team", "name": "run", "uid": "u",
            "annotations": {"gainshare.dev/adopt": "true", "gainshare.dev/adopted": journal, "gainshare.dev/node": "b"},
        },
        "spec": {"podReplacementPolicy": "Failed", "template": {"spec": {
            "containers": [{"name": "main", "volumeMounts": [{"name": "work", "mountPath": "/work"}]}],
            "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "c"}}],
        }}},
    });
    work_on_batch(&job, &[running_pod("p", &containers(&json!({"cpu": "1"}), &json!({})))]);
    let read = BatchJobSnapshot::of(&read(&job).unwrap()).unwrap();
    assert!(read.problem.is_none() && read.journal.moves < u32::MAX, "{read:?}");
}

#[test]
fn forged_originals() {
    let forged = |uid: &str, cpu: &str| {
        let mut pod = running_pod(uid, &containers(&json!({"cpu": "1"}), &json!({})));
        let originals = json!({"uid": uid, "containers": {"c0": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}}});
        pod["metadata"]["annotations"] = json!({"gainshare.dev/original-resources": originals.to_string()});
        pod
    };
    for cpu in ["999999999999999", "999999999", "18446744073709551615m", "-1", "1e99"] {
        let pods: Vec<Value> = (0..CONTAINERS).map(|i| forged(&format!("p{i}"), cpu)).collect();
        share(&pods);
    }
}

fn quantity() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!("999999999999999")),
        Just(json!("999999999999999999")),
        Just(json!("18446744073709551615")),
        Just(json!("999999999")),
        Just(json!("7Pi")),
        Just(json!("1e308")),
        Just(json!("-5")),
        Just(json!("0")),
        Just(json!("1n")),
        Just(json!("500m")),
        "[0-9]{1,20}(\\.[0-9]{0,3})?(m|k|Ki|G|Gi|E|Ei)?".prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
    ]
}

fn amounts() -> impl Strategy<Value = Value> {
    (prop::option::of(quantity()), prop::option::of(quantity())).prop_map(|(cpu, memory)| {
        let mut map = serde_json::Map::new();
        map.extend(cpu.map(|cpu| ("cpu".to_owned(), cpu)));
        map.extend(memory.map(|memory| ("memory".to_owned(), memory)));
        Value::Object(map)
    })
}

pub(super) fn integer() -> impl Strategy<Value = i64> {
    prop_oneof![
        Just(i64::MIN),
        Just(i64::MAX),
        Just(0),
        Just(-1),
        Just(i64::from(i32::MAX)),
        Just(i64::from(u32::MAX)),
        any::<i64>(),
        0..100_i64
    ]
}

pub(super) fn time() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "2026-11-15T12:00:00Z",
        "1970-01-01T00:00:00Z",
        "-009999-01-02T01:59:59Z",
        "9999-12-30T22:00:00Z",
        "0001-01-01T00:00:00Z",
    ])
    .prop_map(str::to_owned)
}

pub(super) fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![
            "",
            "true",
            "node-a",
            "b",
            "run",
            "run-1",
            "u",
            "gainshare",
            "specon",
            "{",
            "null",
            "4294967295"
        ])
        .prop_map(str::to_owned),
        "\\PC{0,12}",
    ]
}

/// Annotations of ours, forged.
fn annotations() -> impl Strategy<Value = Value> {
    let journal = (integer(), integer(), time(), any::<bool>()).prop_map(|(moves, epoch, at, stopping)| {
        let phase = if stopping { "Stopping" } else { "Starting" };
        let made = json!({"at": at, "from": "a", "to": "b", "why": "x", "saveS": 1e308, "restoreS": 1e308});
        json!({
            "moves": moves, "began": at, "lastMoves": vec![made; 40], "pod": {"name": "p0", "uid": "p0"},
            "migration": {"from": "node-a", "to": "b", "message": "x", "phase": phase, "epoch": epoch, "since": at, "stopped": at},
        })
        .to_string()
    });
    let small_journal = (0..=u64::from(u32::MAX)).prop_map(|moves| json!({"moves": moves}).to_string());
    let originals = amounts().prop_map(|amounts| {
        json!({"uid": "p0", "containers": {"c0": {"requests": amounts, "limits": amounts}, "c1": {"requests": amounts}}}).to_string()
    });
    let adopted = prop_oneof![journal, small_journal, word()];
    (adopted, prop_oneof![originals, word()], word(), word(), word()).prop_map(
        |(adopted, originals, node, stopped, policy)| {
            json!({
                "gainshare.dev/adopt": "true", "gainshare.dev/adopted": adopted,
                "gainshare.dev/original-resources": originals, "gainshare.dev/node": node,
                "gainshare.dev/stopped": stopped, "gainshare.dev/policy": policy, "gainshare.dev/status": node,
            })
        },
    )
}

pub(super) fn any_pod() -> impl Strategy<Value = Value> {
    let ends = (any::<bool>(), integer(), time(), integer());
    let phase = prop::sample::select(vec!["Pending", "Running", "Succeeded", "Failed", "Odd"]);
    let containers = prop::collection::vec((amounts(), amounts()), 0..CONTAINERS + 2);
    (containers, annotations(), ends, phase, any::<u32>(), time(), word()).prop_map(
        |(containers, notes, (deleted, grace, at, code), phase, epoch, began, text)| {
            let all: Vec<Value> = containers
                .iter()
                .enumerate()
                .map(|(i, (requests, limits))| {
                    json!({"name": format!("c{i}"), "image": "i", "resources": {"requests": requests, "limits": limits}})
                })
                .collect();
            let mut pod = running_pod("p0", &all);
            let meta = &mut pod["metadata"];
            meta["annotations"] = notes;
            meta["labels"] = json!({"gainshare.dev/job": "run", "gainshare.dev/epoch": epoch.to_string()});
            meta["creationTimestamp"] = json!(began);
            meta["finalizers"] = json!(["gainshare.dev/attempt"]);
            meta["ownerReferences"] = json!([
                {"apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "name": "run", "uid": "u", "controller": true},
                {"apiVersion": "batch/v1", "kind": "Job", "name": "run", "uid": "u", "controller": true},
            ]);
            if deleted {
                meta["deletionTimestamp"] = json!(at);
                meta["deletionGracePeriodSeconds"] = json!(grace);
            }
            meta["generation"] = json!(grace);
            pod["status"]["phase"] = json!(phase);
            pod["status"]["conditions"] = json!([{
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text, "lastTransitionTime": at,
            }]);
            let code = code as i32;
            if let Some(status) = pod["status"]["containerStatuses"].get_mut(0) {
                status["state"] = json!({"terminated": {"exitCode": code, "finishedAt": began, "startedAt": at, "message": text}});
                status["resources"] = all[0]["resources"].clone();
            }
            pod
        },
    )
}

pub(super) fn any_training_job() -> impl Strategy<Value = Value> {
    let numbers = (integer(), integer(), integer(), integer(), any::<u32>(), any::<u32>(), any::<u32>());
    let template = prop_oneof![
        prop::collection::vec((amounts(), amounts()), 0..CONTAINERS + 2).prop_map(|all| {
            let container = |(i, (requests, limits)): (usize, &(Value, Value))| {
                json!({"name": format!("c{i}"), "image": "i", "resources": {"requests": requests, "limits": limits}})
            };
            json!({"spec": {"containers": all.iter().enumerate().map(container).collect::<Vec<_>>()}})
        }),
        Just(json!({"metadata": {"labels": "text", "annotations": []}, "spec": {"containers": ["text", 5, null]}})),
        Just(json!({"metadata": 5, "spec": []})),
        Just(json!("text")),
        Just(Value::Null),
    ];
    let state =
        prop::sample::select(vec!["Waiting", "Running", "Migrating", "Restarting", "Suspended", "Succeeded", "Failed"]);
    let stopping = prop::option::of(prop::sample::select(vec!["Migrate", "Replace", "Suspend", "Deadline"]));
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), prop::option::of(Just("p0")));
    (numbers, template, annotations(), (time(), time()), state, stopping, flags).prop_map(
        |(numbers, template, notes, (at, later), state, stopping, (suspend, deleting, started, uid))| {
            let (deadline, ttl, grace, backoff, epoch, failures, moves) = numbers;
            let mut job = training_job(template);
            job["metadata"]["annotations"] = notes;
            job["metadata"]["creationTimestamp"] = json!(at);
            if deleting {
                job["metadata"]["deletionTimestamp"] = json!(later);
            }
            job["spec"]["suspend"] = json!(suspend);
            job["spec"]["checkpoint"] = json!({"claimName": "c", "path": "/c"});
            job["spec"]["runPolicy"] = json!({
                "activeDeadlineSeconds": deadline, "ttlSecondsAfterFinished": ttl, "terminationGracePeriodSeconds": grace,
                "backoffLimit": backoff as i32,
            });
            let mut attempt = json!({"epoch": epoch, "pod": "run-1", "node": "node-a", "since": at, "notBefore": later, "pinned": suspend});
            if let Some(uid) = uid {
                attempt["uid"] = json!(uid);
            }
            if started {
                attempt["startTime"] = json!(at);
            }
            if let Some(stopping) = stopping {
                attempt["stopping"] = json!(stopping);
                attempt["stoppingSince"] = json!(later);
            }
            let made = json!({"at": at, "from": "a", "to": "b", "message": "x", "saveS": 1e308, "restoreS": 1e308});
            job["status"] = json!({
                "state": state, "attempt": attempt, "failures": failures, "moves": moves, "startTime": at, "completionTime": later,
                "lastMoves": vec![made; 30], "sharePercent": epoch,
                "migration": {"from": "node-a", "to": "b", "message": "x", "phase": "Stopping", "epoch": epoch, "since": at, "stopped": later},
            });
            job
        },
    )
}

fn any_batch_job() -> impl Strategy<Value = Value> {
    let template = prop::collection::vec((amounts(), amounts()), 0..CONTAINERS + 2);
    (template, annotations(), integer(), time(), any::<bool>(), any::<bool>()).prop_map(
        |(containers, notes, grace, at, suspend, ended)| {
            let all: Vec<Value> = containers
                .iter()
                .map(|(requests, limits)| {
                    json!({
                        "name": "c", "resources": {"requests": requests, "limits": limits},
                        "volumeMounts": [{"name": "work", "mountPath": "/work"}],
                    })
                })
                .collect();
            json!({
                "metadata": {"namespace": "team", "name": "run", "uid": "u", "annotations": notes, "creationTimestamp": at},
                "spec": {"podReplacementPolicy": "Failed", "suspend": suspend, "template": {"spec": {
                    "containers": all, "terminationGracePeriodSeconds": grace,
                    "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "c"}}],
                }}},
                "status": {"startTime": at, "conditions": [
                    {"type": "Complete", "status": if ended { "True" } else { "False" }, "lastTransitionTime": at},
                ]},
            })
        },
    )
}

/// A policy and a node, with a LimitRange and a quota.
fn any_rules() -> impl Strategy<Value = [Value; 4]> {
    let interval = prop_oneof![Just("20s".to_owned()), Just("99999999999999999999h".to_owned()), word()];
    (amounts(), amounts(), quantity(), interval, integer(), word(), -1e300..1e300_f64).prop_map(
        |(min, max, ratio, interval, floor, text, number)| {
            let policy = json!({
                "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
                "metadata": {"namespace": "team", "name": text, "uid": "p", "generation": floor},
                "spec": {
                    "selector": {"matchExpressions": [{"key": text, "operator": "NotIn", "values": [text]}]},
                    "interval": interval, "floorPercent": floor as i32, "alpha": number, "beta": number, "mode": "quota",
                },
            });
            let node = json!({
                "metadata": {"name": "node-a", "labels": {"gainshare.dev/speed": text}},
                "status": {"allocatable": max, "conditions": [{"type": "Ready", "status": "True"}]},
            });
            let range = json!({"metadata": {"name": "r", "namespace": "team"}, "spec": {"limits": [
                {"type": "Container", "min": min, "max": max, "maxLimitRequestRatio": {"cpu": ratio}},
                {"type": "Pod", "min": min, "max": max},
            ]}});
            let quota = json!({"metadata": {"name": "q", "namespace": "team"}, "status": {
                "hard": {"requests.cpu": ratio, "limits.memory": ratio}, "used": {"requests.cpu": ratio},
            }});
            [policy, node, range, quota]
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, ..ProptestConfig::default() })]

    #[test]
    fn any_objects_pass(
        pods in prop::collection::vec(any_pod(), 0..4),
        job in any_training_job(),
        batch in any_batch_job(),
        rules in any_rules(),
    ) {
        share(&pods);
        work_on(&job, &pods);
        work_on_batch(&batch, &pods);
        let [policy, node, range, quota] = rules;
        let mut world = world();
        if let Some(policy) = read(&policy).as_ref().and_then(PolicyFacts::of) {
            world.put_policy(policy);
        }
        if let Some(node) = read(&node) {
            world.put_node(&"node-a".into(), NodeFacts::of(&node));
            let _ = NodeState::of(&node);
        }
        if let Some(range) = read(&range) {
            world.put_range("team", "r", Some(RangeFacts::of(&range)));
        }
        if let Some(quota) = read(&quota) {
            world.put_quota("team", "q", Some(QuotaFacts::of(&quota)));
        }
        for pod in &pods {
            if let Some(facts) = read(pod).as_ref().and_then(PodFacts::of) {
                world.put_pod(facts);
            }
        }
        let list = world.list(&"node-a".into());
        let shares: Vec<_> = list.iter().map(|pod| (pod, 0.5)).collect();
        for (i, to) in resize::changes(&shares, 0) {
            let _ = (resize::vet(&list[i], &to), world.pool(&list[i], &"node-a".into(), &to), world.quota("team", &list[i].now, &to));
        }
    }
}
