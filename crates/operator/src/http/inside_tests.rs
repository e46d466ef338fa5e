//! Tests of [`super`].

use super::*;
use crate::http::webhook::tests::admitted_by;
use crate::http::webhook::{review, review_with};
use serde_json::{Value, json};

const OURS: &str = "/.gainshare/library/$LIB/libgainshare_inside.so";
const ADDITION: Addition<'static> = Addition { image: "gainshare:1", least: (0, 0), paces_gpu_work: false };

fn pod() -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "team"},
        "spec": {
            "initContainers": [{"name": "fetch", "image": "fetch"}],
            "containers": [
                {"name": "main", "image": "train", "resources": {"requests": {"cpu": "2500m", "memory": "1Gi"}}},
                {"name": "helper", "image": "help"},
            ],
        },
    })
}

fn with_library(pod: &Value) -> Value {
    admitted_by(pod, |body| review_with(body, |_, pod| ADDITION.add(pod)))
}

fn value(container: &Value, name: &str) -> Option<String> {
    let found = container["env"].as_array()?.iter().find(|variable| variable["name"] == name)?;
    found["value"].as_str().map(str::to_owned)
}

#[test]
fn each_container_gets_the_library_and_the_pod_a_note() {
    let after = with_library(&pod());
    for container in after["spec"]["containers"].as_array().unwrap() {
        assert_eq!(value(container, "LD_PRELOAD").as_deref(), Some(OURS));
        assert_eq!(value(container, "GAINSHARE_INSIDE_PAGE").as_deref(), Some("/.gainshare/page/page"));
        let mounts = json!([
            {"name": "gainshare-inside", "mountPath": "/.gainshare/library", "readOnly": true},
            {"name": "gainshare-page", "mountPath": "/.gainshare/page"},
        ]);
        assert_eq!(container["volumeMounts"], mounts);
    }
    let before = after["spec"]["initContainers"].as_array().unwrap();
    assert_eq!((before.len(), &before[0]["name"]), (2, &json!("fetch")), "what the author runs before comes first");
    assert_eq!(before[1]["image"], "gainshare:1");
    let command = before[1]["command"].to_string();
    assert!(command.contains("--team=3") && command.contains("--blas-may-grow"), "{command}");
    assert_eq!(after["metadata"]["annotations"]["gainshare.dev/inside"], "library in main, helper");
    let volumes = after["spec"]["volumes"].as_array().unwrap();
    assert!(volumes.len() == 2 && volumes.iter().all(|volume| volume["emptyDir"].is_object()), "{volumes:?}");
}

#[test]
fn the_authors_preload_stays_in_front() {
    for (own, expected) in [("/a.so", format!("/a.so:{OURS}")), ("a.so b.so", format!("a.so b.so:{OURS}"))] {
        let mut mine = pod();
        mine["spec"]["containers"][0]["env"] =
            json!([{"name": "LD_PRELOAD", "value": own}, {"name": "A", "value": "1"}]);
        let after = with_library(&mine);
        let container = &after["spec"]["containers"][0];
        assert_eq!(value(container, "LD_PRELOAD"), Some(expected));
        assert_eq!(value(container, "A").as_deref(), Some("1"));
    }
    for empty in ["", " "] {
        let mut mine = pod();
        mine["spec"]["containers"][0]["env"] = json!([{"name": "LD_PRELOAD", "value": empty}]);
        assert_eq!(value(&with_library(&mine)["spec"]["containers"][0], "LD_PRELOAD").as_deref(), Some(OURS));
    }
}

#[test]
fn what_cannot_be_read_is_left_alone() {
    let from = json!({"configMapKeyRef": {"name": "c", "key": "k"}});
    let cases = [
        ("envFrom", json!([{"configMapRef": {"name": "c"}}]), "its variables come from elsewhere"),
        ("env", json!([{"name": "LD_PRELOAD", "valueFrom": from}]), "its LD_PRELOAD comes from elsewhere"),
        ("env", json!([{"name": "GAINSHARE_INSIDE", "value": "0"}]), "GAINSHARE_INSIDE is 0"),
        ("volumeMounts", json!([{"name": "v", "mountPath": "/.gainshare/page/"}]), "folder is taken"),
    ];
    for (field, content, why) in cases {
        let mut mine = pod();
        mine["spec"]["containers"][0][field] = content;
        let after = with_library(&mine);
        assert_eq!(after["spec"]["containers"][0], mine["spec"]["containers"][0], "{why}");
        let note = after["metadata"]["annotations"]["gainshare.dev/inside"].as_str().unwrap().to_owned();
        assert!(note.starts_with("library in helper; not in main: ") && note.ends_with(why), "{note}");
        mine["spec"]["containers"].as_array_mut().unwrap().truncate(1);
        assert_eq!(with_library(&mine), mine, "{why}: no container is left, so nothing is added");
    }
}

#[test]
fn authors_can_say_no() {
    let cases = [
        ("/metadata/annotations", json!({"gainshare.dev/inside": "disabled"})),
        ("/metadata/labels", json!({"gainshare.dev/share": "disabled"})),
        ("/metadata/annotations", json!({"kubernetes.io/config.mirror": "1"})),
        ("/spec/os", json!({"name": "windows"})),
        ("/spec/volumes", json!([{"name": "gainshare-inside", "emptyDir": {}}])),
    ];
    for (place, content) in cases {
        let mut out = pod();
        let (parent, name) = place.rsplit_once('/').unwrap();
        out.pointer_mut(parent).unwrap()[name] = content;
        assert_eq!(with_library(&out), out, "{place}");
    }
    // Without an image nothing can be added.
    assert_eq!(admitted_by(&pod(), |body| review_with(body, |_, _| None)), pod());
}

#[test]
fn gpu_work_is_caught_where_somebody_asks_for_it() {
    const SWITCH: &str = "GAINSHARE_INSIDE_GPU";
    const NOTE: &str = "gainshare.dev/gpu";
    let admit = |pod: &Value, paces_gpu_work: bool| {
        let addition = Addition { paces_gpu_work, ..ADDITION };
        admitted_by(pod, |body| review_with(body, |_, pod| addition.add(pod)))
    };
    for (asked, annotation, is_caught) in [
        (false, None, false),
        (true, None, true),
        (false, Some("enabled"), true),
        (true, Some("disabled"), false),
        (true, Some("perhaps"), false),
    ] {
        let mut mine = pod();
        if let Some(value) = annotation {
            mine["metadata"]["annotations"] = json!({NOTE: value});
        }
        let after = admit(&mine, asked);
        for container in after["spec"]["containers"].as_array().unwrap() {
            let expected = is_caught.then(|| "1".to_owned());
            assert_eq!(value(container, SWITCH), expected, "{asked} {annotation:?}");
            assert_eq!(value(container, "LD_PRELOAD").as_deref(), Some(OURS), "the library is there all the same");
        }
        let noted = after["metadata"]["annotations"][NOTE].as_str();
        assert_eq!(noted, if is_caught { Some("enabled") } else { annotation }, "{asked} {annotation:?}");
        assert_eq!(admit(&after, asked), after, "a second review");
    }
    // What the author says stays.
    let mut mine = pod();
    mine["spec"]["containers"][0]["env"] = json!([{"name": SWITCH, "value": "all"}]);
    let after = admit(&mine, true);
    let values: Vec<_> =
        [0_usize, 1].iter().map(|i| value(&after["spec"]["containers"][*i], SWITCH).unwrap()).collect();
    assert_eq!(values, ["all", "1"]);
    let variables = after["spec"]["containers"][0]["env"].as_array().unwrap();
    assert_eq!(variables.iter().filter(|variable| variable["name"] == SWITCH).count(), 1);
    // Without the library nothing can be caught, and the node agent is not told otherwise.
    mine["spec"]["containers"].as_array_mut().unwrap().truncate(1);
    mine["spec"]["containers"][0]["env"] = json!([{"name": "GAINSHARE_INSIDE", "value": "0"}]);
    assert_eq!(admit(&mine, true), mine);
}

#[test]
fn a_second_review_finds_nothing_to_add() {
    let after = with_library(&pod());
    assert_ne!(after, pod());
    assert_eq!(with_library(&after), after);
}

/// The rules of the level `restricted` for containers and volumes.
#[test]
fn restricted_pod_security_holds() {
    let after = with_library(&pod());
    let context = &after["spec"]["initContainers"][1]["securityContext"];
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
    assert_eq!(context["runAsNonRoot"], true);
    assert!(context["runAsUser"].as_i64().unwrap() > 0);
    assert_eq!(context["seccompProfile"]["type"], "RuntimeDefault");
    assert!(context["privileged"].is_null());
    let allowed = |volume: &Value| volume["hostPath"].is_null() && volume["emptyDir"].is_object();
    assert!(after["spec"]["volumes"].as_array().unwrap().iter().all(allowed));
}

#[test]
fn quotas_and_classes_hold() {
    let resources = |containers: Value| {
        let mut mine = pod();
        mine["spec"]["containers"] = containers;
        with_library(&mine)["spec"]["initContainers"][1]["resources"].clone()
    };
    let main = |resources: Value| json!({"name": "main", "image": "i", "resources": resources});
    assert_eq!(resources(json!([main(json!({}))])), Value::Null, "a pod of the class BestEffort");
    let whole = json!({"cpu": "2", "memory": "1Gi"});
    let equal = json!({"cpu": "20m", "memory": "32Mi"});
    let guaranteed = resources(json!([main(json!({"requests": whole, "limits": whole}))]));
    assert_eq!(guaranteed, json!({"requests": equal, "limits": equal}), "a pod of the class Guaranteed");
    let burstable = resources(json!([main(json!({"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}}))]));
    assert_eq!(burstable, json!({"requests": equal, "limits": {"memory": "32Mi"}}));
    let some = resources(json!([main(json!({"limits": whole})), main(json!({"requests": {"cpu": "1"}}))]));
    assert_eq!(some, json!({"requests": equal}), "only one of the containers has limits");
    // A LimitRange with larger amounts.
    let strict = Addition { image: "i", least: (100, 64 << 20), ..ADDITION };
    let after = admitted_by(&pod(), |body| review_with(body, |_, pod| strict.add(pod)));
    let requests = &after["spec"]["initContainers"][1]["resources"]["requests"];
    assert_eq!(requests, &json!({"cpu": "100m", "memory": "67108864"}));
}

#[test]
fn a_tuned_start_leaves_the_teams_to_the_library() {
    let mut bare = pod();
    bare["spec"]["containers"] = json!([{"name": "main", "image": "i"}]);
    let tuned = admitted_by(&with_library(&bare), review);
    let container = &tuned["spec"]["containers"][0];
    assert_eq!(value(container, "OMP_WAIT_POLICY").as_deref(), Some("PASSIVE"));
    assert_eq!(value(container, "LD_PRELOAD").as_deref(), Some(OURS));
    // The tuned start has added a CPU request, which a quota expects of every container.
    let again = with_library(&tuned);
    assert_eq!(again["spec"]["initContainers"][1]["resources"]["requests"], json!({"cpu": "20m"}));
    assert_eq!(with_library(&again), again);

    let tuned = admitted_by(&with_library(&pod()), review);
    let container = &tuned["spec"]["containers"][0];
    for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
        assert_eq!(value(container, name), None, "the library sizes the teams within {name}");
    }
    assert_eq!(value(container, "OPENBLAS_NUM_THREADS").as_deref(), Some("3"), "the page lets this pool grow");
}
