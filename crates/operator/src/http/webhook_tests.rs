//! Tests of [`super`].

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn pod() -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "team"},
        "spec": {"containers": [{"name": "main", "image": "train", "resources": {"requests": {"cpu": "2500m"}}}]},
    })
}

/// The pod after a tuned start was added.
fn admitted(pod: &Value) -> Value {
    admitted_by(pod, review)
}

/// The pod after admission, by the patch in the answer of a handler.
pub(crate) fn admitted_by(pod: &Value, review: impl FnOnce(&[u8]) -> Result<ReviewAnswer, String>) -> Value {
    let request = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "r-1", "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "team", "operation": "CREATE", "userInfo": {}, "object": pod,
        },
    });
    let answer = serde_json::to_value(review(request.to_string().as_bytes()).unwrap().review).unwrap();
    assert_eq!(answer["response"]["uid"], "r-1");
    assert_eq!(answer["response"]["allowed"], true, "a pod is always allowed");
    let Some(patch) = answer["response"].get("patch") else { return pod.clone() };
    let patch: Vec<u8> = serde_json::from_value(patch.clone()).unwrap();
    let mut after = pod.clone();
    json_patch::patch(&mut after, &serde_json::from_slice::<json_patch::Patch>(&patch).unwrap()).unwrap();
    after
}

fn env(pod: &Value) -> std::collections::BTreeMap<String, String> {
    let vars = pod["spec"]["containers"][0]["env"].as_array().cloned().unwrap_or_default();
    vars.iter().map(|v| (v["name"].as_str().unwrap().into(), v["value"].as_str().unwrap_or("").into())).collect()
}

#[test]
fn a_plain_pod_gets_a_tuned_start_and_a_note() {
    let after = admitted(&pod());
    let env = env(&after);
    assert_eq!(env["OMP_WAIT_POLICY"], "PASSIVE");
    assert_eq!(env["OMP_NUM_THREADS"], "3", "its request of 2.5 cores, rounded up");
    assert_eq!(after["spec"]["containers"][0]["resizePolicy"][0]["restartPolicy"], "NotRequired");
    let note = after["metadata"]["annotations"]["gainshare.dev/start"].as_str().unwrap();
    assert!(note.starts_with("tuned; main: ") && note.contains("OMP_WAIT_POLICY=PASSIVE"), "{note}");
    assert_eq!(admitted(&after), after, "a second review finds nothing to add");
}

#[test]
fn never_overrides() {
    let mut mine = pod();
    mine["spec"]["containers"][0]["env"] = json!([
        {"name": "OMP_NUM_THREADS", "value": "7"},
        {"name": "KMP_BLOCKTIME", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    ]);
    mine["spec"]["containers"][0]["resizePolicy"] =
        json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
    let after = admitted(&mine);
    let vars = after["spec"]["containers"][0]["env"].as_array().unwrap();
    assert_eq!(vars[..2], mine["spec"]["containers"][0]["env"].as_array().unwrap()[..]);
    assert!(!env(&after).contains_key("MKL_NUM_THREADS"), "it would take precedence over the author's OMP_NUM_THREADS");
    let policies = after["spec"]["containers"][0]["resizePolicy"].as_array().unwrap();
    assert_eq!(policies[0]["restartPolicy"], "RestartContainer");
    assert_eq!(policies.len(), 2, "only memory was added");
}

#[test]
fn variables_from_elsewhere_are_left_alone() {
    let mut from = pod();
    from["spec"]["containers"][0]["envFrom"] = json!([{"configMapRef": {"name": "settings"}}]);
    assert!(env(&admitted(&from)).is_empty());
}

#[test]
fn without_a_cpu_request_thread_pools_are_left_alone() {
    let mut bare = pod();
    bare["spec"]["containers"][0]["resources"] = json!({});
    let env = env(&admitted(&bare));
    assert_eq!(env["OMP_WAIT_POLICY"], "PASSIVE");
    assert!(!env.contains_key("OMP_NUM_THREADS"), "{env:?}");
    let after = admitted(&bare);
    assert_eq!(after["spec"]["containers"][0]["resources"]["requests"]["cpu"], "50m", "so that it can be resized");
    assert_eq!(admitted(&after), after, "a second review finds nothing to add");
}

#[test]
fn a_container_that_was_added_between_two_reviews_is_sized_by_its_own_request() {
    let mut bare = pod();
    bare["spec"]["containers"][0]["resources"] = json!({});
    let mut reviewed = admitted(&bare);
    let first = reviewed["spec"]["containers"][0].clone();
    let added = json!({"name": "added", "image": "i", "resources": {"requests": {"cpu": "2500m"}}});
    reviewed["spec"]["containers"].as_array_mut().unwrap().push(added);
    let after = admitted(&reviewed);
    assert_eq!(after["spec"]["containers"][0], first, "its request is the one that the first review gave it");
    let vars = after["spec"]["containers"][1]["env"].as_array().unwrap();
    assert!(vars.contains(&json!({"name": "OMP_NUM_THREADS", "value": "3"})), "{vars:?}");
}

#[test]
fn authors_can_say_no() {
    let mut plain = pod();
    plain["metadata"]["annotations"] = json!({"gainshare.dev/start": "plain"});
    assert_eq!(admitted(&plain), plain);
    let mut out = pod();
    out["metadata"]["labels"] = json!({"gainshare.dev/share": "disabled"});
    assert_eq!(admitted(&out), out);
}

#[test]
fn what_is_no_review_is_an_error() {
    for nonsense in [json!({}), json!([]), json!("x"), json!({"request": {"uid": 5}})] {
        assert!(review(nonsense.to_string().as_bytes()).is_err());
    }
}

proptest! {
    #[test]
    fn harmless(names in prop::collection::vec("[A-Z_]{1,12}", 0..6), cpu in 0u64..100_000, labelled in any::<bool>()) {
        let mut any = pod();
        any["spec"]["containers"][0]["env"] = names.iter().map(|name| json!({"name": name, "value": "mine"})).collect();
        any["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": format!("{cpu}m")}});
        if labelled {
            any["metadata"]["labels"] = json!({"a": "b"});
        }
        let after = admitted(&any);
        for name in &names {
            prop_assert_eq!(&env(&after)[name], "mine");
        }
        prop_assert_eq!(&after["spec"]["containers"][0]["image"], &any["spec"]["containers"][0]["image"]);
    }
}
