//! Tests of [`super`]: pods as the API server prints them.

use super::*;
use crate::fixtures::{facts, manifest};
use serde_json::{Value, json};

#[test]
fn a_pod_in_facts() {
    let pod = facts(&manifest());
    assert_eq!((pod.node.as_deref(), pod.generation, pod.running), (Some("node-a"), 4, true));
    assert_eq!(pod.notes.keys().collect::<Vec<_>>(), ["gainshare.dev/metric"], "only our own annotations are kept");
    let main = pod.container("main").unwrap();
    assert_eq!(main.resources.requests.cpu_milli, Some(500));
    assert_eq!(main.resources.limits.memory_bytes, Some(2 << 30));
    assert_eq!(main.started_ms, Some(1_794_744_000_000));
    assert!(!main.written.requests.contains_key("nvidia.com/gpu"), "other resources are not ours to put back");
    assert_eq!(pod.blocked("main"), None);
}

#[test]
fn originals_survive_a_round_trip_and_belong_to_one_pod() {
    let pod = facts(&manifest());
    let mut noted = manifest();
    noted["metadata"]["annotations"][names::ORIGINAL_ANNOTATION] =
        json!(serde_json::to_string(&pod.remember()).unwrap());
    noted["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("320m");
    let resized = facts(&noted);
    let originals = resized.originals().unwrap();
    assert_eq!(originals.containers["main"].requests["cpu"], "500m");
    assert_eq!(originals.containers["main"].resources(), pod.container("main").unwrap().resources);
    noted["metadata"]["uid"] = json!("copied");
    let copied = facts(&noted);
    assert_eq!(copied.originals(), None, "a copied manifest carries another pod's past");
    assert_eq!(copied.blocked("main").unwrap().reason, "UnreadableOriginals");
    noted["metadata"]["annotations"][names::ORIGINAL_ANNOTATION] = json!("{garbage");
    assert_eq!(facts(&noted).originals(), None);
}

#[test]
fn what_cannot_be_resized_says_why_and_what_to_do() {
    let reason = |change: &dyn Fn(&mut Value)| {
        let mut changed = manifest();
        change(&mut changed);
        let blocked = facts(&changed).blocked("main").unwrap();
        assert!(blocked.message.len() > 20, "{blocked:?}");
        blocked.reason
    };
    assert_eq!(reason(&|pod| pod["status"]["qosClass"] = json!("BestEffort")), "BestEffort");
    let restart = json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
    assert_eq!(reason(&|pod| pod["spec"]["containers"][0]["resizePolicy"] = restart.clone()), "RestartContainer");
    assert_eq!(
        reason(&|pod| pod["spec"]["containers"][0]["resources"]["requests"] = json!({"memory": "1Gi"})),
        "NoCpuRequest"
    );
    assert_eq!(reason(&|pod| pod["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("x")), "StaticPod");
    assert_eq!(reason(&|pod| pod["spec"]["os"] = json!({"name": "windows"})), "Windows");
    assert_eq!(reason(&|pod| pod["spec"]["resources"] = json!({"requests": {"cpu": "1"}})), "PodLevelResources");
    assert_eq!(facts(&manifest()).blocked("sidecar").unwrap().reason, "NoSuchContainer");
    let memory_only = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let mut fine = manifest();
    fine["spec"]["containers"][0]["resizePolicy"] = memory_only;
    assert_eq!(facts(&fine).blocked("main"), None, "a restart for memory does not hinder a new CPU value");
}

#[test]
fn conditions_count_only_for_the_spec_they_are_about() {
    let state = |kind: &str, reason: &str, observed: i64| {
        let mut pod = manifest();
        pod["status"]["conditions"] = json!([{
            "type": kind, "status": "True", "reason": reason, "message": "node has 2 cores", "observedGeneration": observed,
        }]);
        facts(&pod).resize
    };
    let message = "node has 2 cores".to_owned();
    assert_eq!(state("PodResizePending", "Deferred", 4), ResizeState::Deferred { message: message.clone() });
    assert_eq!(state("PodResizePending", "Infeasible", 4), ResizeState::Infeasible { message });
    assert_eq!(state("PodResizePending", "Infeasible", 3), ResizeState::Settled, "an older spec's condition");
    assert_eq!(state("PodResizeInProgress", "", 4), ResizeState::InProgress);
    let mut unseen = manifest();
    unseen["status"]["observedGeneration"] = json!(3);
    assert_eq!(facts(&unseen).resize, ResizeState::InProgress, "the kubelet has not seen it yet");
}

#[test]
fn ending_pods_do_not_run() {
    let mut ending = manifest();
    ending["metadata"]["deletionTimestamp"] = json!("2026-11-15T12:00:00Z");
    assert!(!facts(&ending).running);
    let mut done = manifest();
    done["status"]["phase"] = json!("Succeeded");
    assert!(!facts(&done).running);
}

#[test]
fn runs_of_a_sweep_are_runs_of_one_program_and_runs_of_other_lengths_are_not() {
    let program = |args: &str| {
        let mut pod = manifest();
        pod["spec"]["containers"][0]["args"] = args.split(' ').collect();
        facts(&pod).containers[0].program.unwrap()
    };
    assert_eq!(program("train.py --lr 0.1 --epochs 5"), program("train.py --lr 0.01 --epochs 5"));
    assert_eq!(program("train.py lr=0.1"), program("train.py lr=1e-3"));
    assert_ne!(program("train.py --lr 0.1 --epochs 5"), program("train.py --lr 0.1 --epochs 50"));
    assert_ne!(program("train.py max_steps=5"), program("train.py max_steps=50"));
    assert_ne!(program("train.py --model small"), program("train.py --model large"));
    assert_eq!(facts(&manifest()).containers[0].program, None, "the image alone says too little");
}
