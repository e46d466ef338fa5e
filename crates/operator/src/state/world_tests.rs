//! Tests of [`super`].

use super::*;
use gainshare_kube_api::fixtures::{facts, manifest};
use gainshare_kube_api::names;
use gainshare_kube_api::resources::Amounts;
use serde_json::{Value, json};

fn pod(uid: &str, node: &str, version: u64) -> PodFacts {
    let mut pod = manifest();
    pod["metadata"]["uid"] = json!(uid);
    pod["metadata"]["name"] = json!(uid);
    pod["metadata"]["resourceVersion"] = json!(version.to_string());
    pod["spec"]["nodeName"] = json!(node);
    facts(&pod)
}

fn policy(name: &str, spec: Value) -> PolicyFacts {
    let object = json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
        "metadata": {"namespace": "team", "name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": spec,
    });
    PolicyFacts::of(&serde_json::from_value(object).unwrap()).unwrap()
}

fn all(name: &str) -> PolicyFacts {
    policy(name, json!({"selector": {}}))
}

/// The pod after we changed it.
fn touched(mut pod: PodFacts, request: u64, version: u64) -> PodFacts {
    let text = serde_json::to_string(&pod.remember()).unwrap();
    pod.notes.insert(names::ORIGINAL_ANNOTATION.into(), text);
    pod.containers[0].resources.requests.cpu_milli = Some(request);
    pod.resource_version = version.to_string();
    pod
}

fn request(milli: u64) -> Resources {
    Resources { requests: Amounts { cpu_milli: Some(milli), memory_bytes: None }, limits: Amounts::default() }
}

fn names(world: &World, node: &str) -> Vec<String> {
    world.list(&node.into()).into_iter().map(|pod| pod.name).collect()
}

#[test]
fn a_pod_that_is_being_started_is_made_ready_if_a_policy_will_have_it() {
    let starting = |uid: &str| PodFacts { running: false, starting: true, ..pod(uid, "n1", 1) };
    let mut world = World::new(1);
    world.put_pod(starting("unselected"));
    assert!(world.take_changed_objects().pods.is_empty());
    world.put_policy(all("p"));
    assert!(world.take_changed_objects().pods.contains("unselected"), "the policy came later");
    world.put_pod(PodFacts { class: gainshare_kube_api::wire::QosClass::BestEffort, ..starting("cannot") });
    world.put_pod(PodFacts { starting: false, ..starting("ends") });
    assert!(world.take_changed_objects().pods.is_empty() && !world.is_coming(&"cannot".into()));
    assert_eq!(names(&world, "n1"), Vec::<String>::new(), "agents hear of it when it runs");
    world.put_pod(pod("unselected", "n1", 2));
    assert!(!world.is_coming(&"unselected".into()) && names(&world, "n1") == ["unselected"]);
}

/// An ended pod with a deadline waits for the writer of notes until its result is published.
#[test]
fn the_result_of_a_deadline_is_known_until_it_is_published() {
    let ended = |phase: &str, change: &dyn Fn(&mut Value)| {
        let mut pod = manifest();
        pod["metadata"]["annotations"][names::DEADLINE_ANNOTATION] = json!("1h");
        pod["status"]["phase"] = json!(phase);
        pod["status"]["containerStatuses"][0]["state"] = json!({"terminated": {
            "exitCode": 0, "startedAt": "2026-11-15T12:00:00Z", "finishedAt": "2026-11-15T12:59:00Z",
        }});
        change(&mut pod);
        facts(&pod)
    };
    let result = |pod: PodFacts| {
        let mut world = World::new(1);
        world.put_policy(all("p"));
        world.take_changed_objects();
        world.put_pod(pod);
        let result = world.result(&"u-1".into());
        assert_eq!(world.take_changed_objects().pods.contains("u-1"), result.is_some(), "it is marked for the writer");
        result.map(|(policy, result)| (policy, result.is_met))
    };
    assert_eq!(result(ended("Succeeded", &|_| {})), Some(("p".to_owned(), true)));
    assert_eq!(result(ended("Failed", &|_| {})), Some(("p".to_owned(), false)));
    let late = |pod: &mut Value| {
        pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = json!("2026-11-15T13:00:01Z");
    };
    assert_eq!(result(ended("Succeeded", &late)), Some(("p".to_owned(), false)));
    let published = |pod: &mut Value| {
        pod["metadata"]["annotations"][names::STATUS_ANNOTATION] = json!(r#"{"ended":"2026-11-15T12:59:00Z"}"#);
    };
    assert_eq!(result(ended("Succeeded", &published)), None);
    let deleted = |pod: &mut Value| pod["metadata"]["deletionTimestamp"] = json!("2026-11-15T12:59:00Z");
    assert_eq!(result(ended("Failed", &deleted)), None, "it was asked to end");
    let of_training_job = |pod: &mut Value| {
        pod["metadata"]["labels"] = json!({names::JOB_LABEL: "train", names::EPOCH_LABEL: "1"});
    };
    assert_eq!(result(ended("Failed", &of_training_job)), None, "the job is judged as a whole");
    let without = |pod: &mut Value| pod["metadata"]["annotations"] = json!({});
    assert_eq!(result(ended("Succeeded", &without)), None);
}

/// A length of time counts from one moment for all pods of a Job, whenever their containers start.
#[test]
fn pods_and_containers_that_come_later_have_the_deadline_of_their_job() {
    const CREATED_MS: u64 = 1_794_740_400_000;
    let owned = |uid: &str, owner: &str, started: &str| {
        let mut pod = manifest();
        let created = json!("2026-11-15T11:30:00Z");
        for (key, value) in [("uid", json!(uid)), ("name", json!(uid)), ("creationTimestamp", created)] {
            pod["metadata"][key] = value;
        }
        pod["metadata"]["annotations"][names::DEADLINE_ANNOTATION] = json!("2h");
        pod["metadata"]["ownerReferences"][0]["uid"] = json!(owner);
        pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = json!(started);
        facts(&pod)
    };
    let job = |created_ms: u64| BatchJobSnapshot {
        namespace: "team".to_owned(),
        name: "train".to_owned(),
        uid: "j".into(),
        created: jiff::Timestamp::from_millisecond(created_ms as i64).unwrap(),
        has_deadline: true,
        ..BatchJobSnapshot::default()
    };
    let due = |world: &World, uid: &str| world.shared(&uid.into()).unwrap().deadline.unwrap().at_ms;
    let mut world = World::new(1);
    world.put_policy(all("p"));
    world.put_pod(owned("first", "j", "2026-11-15T11:31:00Z"));
    world.put_pod(owned("restarted", "j", "2026-11-15T12:40:00Z"));
    world.put_pod(owned("of-another", "k", "2026-11-15T12:40:00Z"));
    assert_eq!(
        due(&world, "first"),
        CREATED_MS + 30 * 60_000 + 7_200_000,
        "of a Job that is not known, the pod counts"
    );
    assert_eq!(due(&world, "restarted"), due(&world, "first"));
    world.put_batch_job(&job(CREATED_MS));
    world.put_pod(owned("new", "j", "2026-11-15T14:00:00Z"));
    for uid in ["first", "restarted", "new"] {
        assert_eq!(due(&world, uid), CREATED_MS + 7_200_000, "{uid}");
    }
    assert_eq!(due(&world, "of-another"), CREATED_MS + 30 * 60_000 + 7_200_000, "its Job had the same name before");
    let without = BatchJobSnapshot { has_deadline: false, ..job(CREATED_MS) };
    world.put_batch_job(&without);
    assert_eq!(due(&world, "first"), CREATED_MS + 30 * 60_000 + 7_200_000);
}

/// The answer to the request that removed a pod may be read after the watch has delivered the removal.
#[test]
fn a_removed_pod_does_not_come_back_by_a_late_answer() {
    let mut world = World::new(1);
    world.put_pod(pod("a", "n1", 5));
    world.remove_pod(&"a".into());
    world.put_pod(pod("a", "n1", 6));
    assert!(world.pod(&"a".into()).is_none());
    // A list may be older than a pod that we have just made: its event follows.
    world.put_pod(pod("b", "n1", 7));
    world.keep_pods(&BTreeSet::new());
    assert!(world.pod(&"b".into()).is_none());
    world.put_pod(pod("b", "n1", 7));
    assert!(world.pod(&"b".into()).is_some());
}

#[test]
fn each_node_gets_its_own_pods_and_a_revision_that_moves() {
    let mut world = World::new(100);
    world.put_policy(all("p"));
    world.put_pod(pod("a", "n1", 1));
    world.put_pod(pod("b", "n2", 1));
    assert_eq!((names(&world, "n1"), names(&world, "n2")), (vec!["a".into()], vec!["b".into()]));
    let touched = world.take_changed_objects();
    assert!(touched.nodes.contains("n1") && touched.policies.contains(&("team".into(), "p".into())));
    let (one, two) = (world.revision(&"n1".into()), world.revision(&"n2".into()));
    assert!(one > 100 && two > one);
    world.put_pod(pod("a", "n1", 2));
    assert_eq!(world.revision(&"n1".into()), one, "nothing that the agent would see has changed");
    assert_eq!(world.take_changed_objects(), ChangedObjects::default());
    world.remove_pod(&"a".into());
    assert!(names(&world, "n1").is_empty() && world.revision(&"n1".into()) > two);
    assert_eq!(world.revision(&"elsewhere".into()), 1);
}

#[test]
fn stale_events_are_ignored() {
    let mut world = World::new(1);
    world.put_policy(all("p"));
    world.put_pod(touched(pod("a", "n1", 1), 300, 9));
    world.put_pod(pod("a", "n1", 5));
    assert_eq!(world.list(&"n1".into())[0].now.requests.cpu_milli, Some(300));
    assert_eq!(world.list(&"n1".into())[0].original.requests.cpu_milli, Some(500));
}

#[test]
fn order_does_not_matter() {
    type Step = Box<dyn Fn(&mut World)>;
    let steps: Vec<Step> = vec![
        Box::new(|w| w.put_pod(pod("a", "n1", 1))),
        Box::new(|w| w.put_policy(all("p"))),
        Box::new(|w| w.put_policy(policy("q", json!({"selector": {}, "suspend": true})))),
        Box::new(|w| w.put_node(&"n1".into(), NodeFacts { cpu_milli: Some(2000), ..NodeFacts::default() })),
        Box::new(|w| {
            let range = json!({"spec": {"limits": [{"type": "Container", "max": {"cpu": "1500m"}}]}});
            w.put_range("team", "r", Some(RangeFacts::of(&serde_json::from_value(range).unwrap())));
        }),
        Box::new(|w| w.put_pod(pod("b", "n1", 1))),
    ];
    let run = |order: &[usize]| {
        let mut world = World::new(1);
        order.iter().for_each(|&i| steps[i](&mut world));
        world.list(&"n1".into())
    };
    let wanted = run(&[0, 1, 2, 3, 4, 5]);
    assert_eq!(wanted.len(), 2);
    assert_eq!(wanted[0].allowed.cpu_milli.max, 1500);
    for order in [[5, 4, 3, 2, 1, 0], [1, 0, 3, 5, 2, 4], [3, 4, 2, 0, 5, 1], [2, 5, 0, 4, 1, 3]] {
        assert_eq!(run(&order), wanted, "{order:?}");
    }
}

#[test]
fn requests_are_counted_as_pods_come_change_end_and_go() {
    let mut world = World::new(1);
    let of_a_job = |mut pod: PodFacts| {
        pod.labels.insert(JOB_LABEL.to_owned(), "job".to_owned());
        pod
    };
    let sums = |world: &World| {
        let (n1, n2) = (world.requested(&"n1".into()), world.requested(&"n2".into()));
        [n1.others.0, n1.jobs.0, n2.others.0, n2.jobs.0]
    };
    world.put_pod(pod("a", "n1", 1));
    world.put_pod(of_a_job(pod("b", "n1", 1)));
    world.put_pod(of_a_job(pod("c", "n2", 1)));
    assert_eq!(sums(&world), [500, 500, 0, 500]);
    world.put_pod(touched(pod("a", "n1", 1), 300, 2));
    world.put_pod(pod("a", "n1", 1));
    assert_eq!(sums(&world), [300, 500, 0, 500], "the older version changes nothing");
    world.put_pod(PodFacts { holds_node: false, ..of_a_job(pod("b", "n1", 2)) });
    assert_eq!(sums(&world), [300, 0, 0, 500]);
    world.remove_pod(&"c".into());
    world.remove_pod(&"c".into());
    assert_eq!(sums(&world), [300, 0, 0, 0]);
    world.keep_pods(&BTreeSet::new());
    assert_eq!((sums(&world), world.requested.len()), ([0; 4], 0));
}

#[test]
fn what_no_policy_has_is_let_go() {
    let mut world = World::new(1);
    world.put_policy(all("p"));
    world.put_pod(touched(pod("a", "n1", 1), 300, 2));
    world.put_pod(pod("b", "n1", 1));
    assert!(world.let_go().is_empty());
    let let_go = |world: &World| world.let_go().into_iter().map(|pod| pod.name).collect::<Vec<_>>();
    world.put_policy(policy("p", json!({"selector": {}, "suspend": true})));
    assert_eq!(let_go(&world), ["a"], "b was never touched");
    world.put_policy(policy("p", json!({"selector": {"matchLabels": {"app": "other"}}})));
    assert_eq!(let_go(&world), ["a"]);
    world.put_policy(all("p"));
    assert!(world.let_go().is_empty());
    world.set_off(true);
    assert_eq!(let_go(&world), ["a"]);
    world.set_off(false);
    world.remove_policy(&("team".into(), "p".into()));
    assert_eq!(let_go(&world), ["a"]);
    world.put_namespace("team", BTreeMap::from([(names::SHARE_LABEL.to_owned(), "enabled".to_owned())]));
    assert!(world.let_go().is_empty(), "the namespace's label has it now");
    assert_eq!(world.list(&"n1".into())[0].policy, "");
    world.put_namespace("team", BTreeMap::new());
    assert_eq!(let_go(&world), ["a"]);
}

#[test]
fn a_list_after_a_lost_watch_ends_what_is_gone() {
    let mut world = World::new(1);
    world.put_policy(all("p"));
    world.put_policy(all("q"));
    for uid in ["a", "b"] {
        world.put_pod(pod(uid, "n1", 1));
    }
    world.keep_pods(&BTreeSet::from(["b".into()]));
    assert_eq!(names(&world, "n1"), ["b"]);
    world.keep_policies(&BTreeSet::from([("team".to_owned(), "q".to_owned())]));
    assert_eq!(world.list(&"n1".into())[0].policy, "q");
}

#[test]
fn the_label_of_a_namespace_goes_with_the_namespace() {
    let mut world = World::new(1);
    world.put_namespace("team", BTreeMap::from([(names::SHARE_LABEL.to_owned(), "enabled".to_owned())]));
    world.put_pod(pod("a", "n1", 1));
    assert_eq!(names(&world, "n1"), ["a"]);
    world.keep_namespaces(&BTreeSet::from(["other".to_owned()]));
    assert_eq!(names(&world, "n1"), Vec::<String>::new());
}

#[test]
fn node_agents_learn_whose_gpu_work_is_to_be_paced() {
    let mut world = World::new(1);
    world.put_policy(all("p"));
    world.put_namespace("team", BTreeMap::from([(names::GPU_LABEL.to_owned(), "enabled".to_owned())]));
    world.put_namespace("other", BTreeMap::from([(names::GPU_LABEL.to_owned(), "disabled".to_owned())]));
    assert_eq!(["team", "other", "none"].map(|namespace| world.paces_gpu_work(namespace)), [true, false, false]);
    // A pod that started before the namespace had the label does not have what it takes.
    for (uid, value) in [("a", None), ("b", Some("enabled")), ("c", Some("disabled"))] {
        let mut pod = pod(uid, "n1", 1);
        pod.notes.extend(value.map(|value| (names::GPU_ANNOTATION.to_owned(), value.to_owned())));
        world.put_pod(pod);
    }
    assert_eq!(["a", "b", "c"].map(|uid| world.shared(&uid.into()).unwrap().gpu), [false, true, false]);
}

#[test]
fn no_pod_gets_more_than_the_pods_had_together() {
    let mut world = World::new(1);
    world.put_policy(all("p"));
    world.put_pod(touched(pod("a", "n1", 1), 200, 2));
    world.put_pod(pod("b", "n1", 1));
    world.put_pod(pod("c", "n2", 1));
    let b = world.shared(&"b".into()).unwrap().clone();
    // The two of n1 had 1000m together; a has 200m now.
    assert!(world.pool(&b, &"n1".into(), &request(800)).is_ok());
    assert!(matches!(world.pool(&b, &"n1".into(), &request(900)), Err(Refusal::Pool { pool: 1000, .. })));
    assert!(world.pool(&b, &"n1".into(), &request(100)).is_ok());
}

#[test]
fn matching_tells_why_nothing_is_selected() {
    let mut world = World::new(1);
    world.put_policy(all("a-first"));
    world.put_policy(all("b-second"));
    world.put_pod(pod("a", "n1", 1));
    let mut waiting = manifest();
    waiting["metadata"]["uid"] = json!("w");
    waiting["status"]["phase"] = json!("Pending");
    world.put_pod(facts(&waiting));
    assert_eq!(world.matching(&all("b-second")), (2, 1));
    assert_eq!(world.matching(&policy("x", json!({"selector": {"matchLabels": {"app": "none"}}}))), (0, 0));
}

#[test]
fn a_pod_that_is_about_to_be_stopped_gets_its_own_values_back_and_keeps_them() {
    let mut world = World::new(1);
    world.put_policy(all("p"));
    world.put_pod(touched(pod("a", "n1", 1), 70, 2));
    world.put_pod(touched(pod("b", "n1", 1), 70, 2));
    world.give_back(&"a".into());
    world.give_back(&"unknown".into());
    assert_eq!(names(&world, "n1"), ["b"]);
    assert_eq!(world.let_go().iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>(), ["a"]);
    world.put_pod(touched(pod("a", "n1", 1), 500, 3));
    assert_eq!(names(&world, "n1"), ["b"], "no policy takes it again");
    world.keep_pods(&["b".into()].into());
    world.put_pod(pod("a", "n1", 4));
    assert_eq!(names(&world, "n1"), ["a", "b"], "a pod that was taken out begins again");
}

#[test]
fn forged_originals_do_not_enlarge_the_pool() {
    let forged = |mut pod: PodFacts, request: &str, version: u64| {
        let mut originals = pod.remember();
        originals.containers.get_mut("main").unwrap().requests.insert("cpu".to_owned(), request.to_owned());
        let text = serde_json::to_string(&originals).unwrap();
        pod.notes.insert(names::ORIGINAL_ANNOTATION.to_owned(), text);
        pod.resource_version = version.to_string();
        pod
    };
    let mut world = World::new(1);
    world.put_policy(all("p"));
    world.put_pod(pod("honest", "n1", 1));
    world.put_pod(touched(pod("honest", "n1", 1), 300, 2));
    assert_eq!(world.shared(&"honest".into()).unwrap().blocked, None);
    assert_eq!(world.shared(&"honest".into()).unwrap().original.requests.cpu_milli, Some(500));
    // A tenant writes the annotation itself, or changes ours.
    world.put_pod(pod("forger", "n1", 1));
    world.put_pod(forged(pod("forger", "n1", 1), "64", 2));
    world.put_pod(forged(touched(pod("honest", "n1", 1), 300, 2), "64", 3));
    for name in ["forger", "honest"] {
        let entry = world.shared(&name.into()).unwrap();
        assert_eq!(entry.blocked.as_ref().unwrap().reason, "ForgedOriginals", "{name}");
        assert_ne!(entry.original.requests.cpu_milli, Some(64_000), "{name}");
    }
    world.remove_policy(&("team".to_owned(), "p".to_owned()));
    assert_eq!(world.let_go(), [], "forged values are never put back");
    // Without the annotation the pod is as any other.
    world.put_policy(all("p"));
    world.put_pod(pod("forger", "n1", 3));
    assert_eq!(world.shared(&"forger".into()).unwrap().blocked, None);
}

#[test]
fn a_gated_pod_is_refused_only_since_its_gate_is_open() {
    use gainshare_kube_api::attempt::AttemptFacts;
    use jiff::{SignedDuration, Timestamp};
    let created = Timestamp::now() - SignedDuration::from_mins(5);
    let attempt = |refused: bool| {
        let unschedulable = refused.then(|| (created, "0/2 nodes are available".to_owned()));
        Some(Box::new(AttemptFacts { unschedulable, ..AttemptFacts::default() }))
    };
    let mut world = World::default();
    let mut since = |version, refused| {
        world.put_pod(PodFacts { attempt: attempt(refused), ..pod("p", "", version) });
        let attempt = world.pod(&"p".into()).unwrap().attempt.clone().unwrap();
        attempt.unschedulable.map(|(since, _)| since)
    };
    assert_eq!(since(1, false), None, "gated");
    let first = since(2, true).unwrap();
    assert!(Timestamp::now().duration_since(first) < SignedDuration::from_mins(1), "{first}");
    assert_eq!(since(3, true), Some(first), "the time stays while the scheduler goes on refusing");
}

#[test]
fn finished_runs_are_known_to_later_pods_of_the_same_program() {
    let run = |uid: &str, phase: &str, lr: &str| {
        let mut pod = manifest();
        pod["metadata"]["uid"] = json!(uid);
        pod["metadata"]["name"] = json!(uid);
        pod["spec"]["nodeName"] = json!("n1");
        pod["spec"]["containers"][0]["args"] = json!(["train.py", "--lr", lr]);
        pod["status"]["phase"] = json!(phase);
        facts(&pod)
    };
    let steps = |world: &World| world.list(&"n1".into()).into_iter().map(|pod| pod.earlier_steps).collect::<Vec<_>>();
    let finished = |uid: &str| FinishedPod { uid: uid.into(), container: "main".to_owned(), steps: 500 };
    let mut world = World::new(1);
    world.put_policy(all("p"));
    for (uid, phase) in [("well", "Succeeded"), ("badly", "Failed"), ("elsewhere", "Succeeded")] {
        world.put_pod(run(uid, phase, "0.1"));
    }
    world.put_pod(run("next", "Running", "0.01"));
    assert_eq!(steps(&world), [Vec::<u64>::new()]);
    world.record_finished(&"n1".into(), &[finished("well"), finished("badly"), finished("unknown")]);
    world.record_finished(&"n2".into(), &[finished("elsewhere")]);
    world.record_finished(&"n1".into(), &[finished("well")]);
    assert_eq!(steps(&world), [vec![500]], "runs that failed and reports of other nodes do not count");
}
