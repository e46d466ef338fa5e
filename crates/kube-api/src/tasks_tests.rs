//! Descriptions of distributed jobs: what is accepted, and the sentence for each mistake.

use super::*;
use serde_json::json;

fn template() -> Value {
    json!({"spec": {"containers": [{
        "name": "tensorflow", "image": "i", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
    }]}})
}

fn read(roles: &Value, is_tfjob: bool) -> Result<TaskJobSpec, SpecProblem> {
    let inputs = roles.as_object().unwrap().iter().map(|(name, role)| {
        let number = |key: &str| role[key].as_i64().map(|number| number as i32);
        RoleInput {
            name,
            replicas: number("replicas"),
            min: number("minReplicas"),
            max: number("maxReplicas"),
            template: &role["template"],
            restart: role["restartPolicy"].as_str(),
        }
    });
    TaskJobSpec::read(inputs, TaskJobOptions { is_tfjob, ..TaskJobOptions::default() })
}

#[test]
fn roles_are_read_in_any_letter_case_with_their_defaults() {
    let roles = json!({
        "chief": {"template": template()}, "ps": {"replicas": 2, "template": template()},
        "WORKER": {"minReplicas": 2, "maxReplicas": 5, "replicas": 3, "template": template(), "restartPolicy": "ExitCode"},
    });
    let spec = read(&roles, true).unwrap();
    assert_eq!(spec.chief(), Some(Role::Chief));
    let worker = &spec.roles[&Role::Worker];
    assert_eq!((worker.min, worker.replicas, worker.max), (2, 3, 5));
    assert_eq!(
        (worker.restart, spec.roles[&Role::Ps].restart),
        (Some(RestartPolicy::ExitCode), Some(RestartPolicy::Never))
    );
    assert_eq!((worker.requests, worker.port), ((500, 1 << 30), 2222));
    assert_eq!(RestartPolicy::ExitCode.of_pod(), "Never");
    assert_eq!(read(&roles, false).unwrap().roles[&Role::Ps].restart, None, "a TrainingJob has no default policy");
    let gang: Vec<String> = spec.gang().iter().map(TaskId::to_string).collect();
    assert_eq!(gang, ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"]);
    let asked = [(Role::Worker, 99), (Role::Ps, 0)].into();
    assert_eq!(spec.wanted_counts(&asked), [(Role::Chief, 1), (Role::Ps, 2), (Role::Worker, 5)].into());
}

#[test]
fn fewer_tasks_are_enough_where_the_author_says_so() {
    let mut spec =
        read(&json!({"ps": {"template": template()}, "worker": {"replicas": 4, "template": template()}}), true)
            .unwrap();
    spec.options.run.min_available = Some(3);
    assert_eq!(spec.gang().len(), 3);
    assert_eq!(spec.gang()[0].role, Role::Ps);
}

#[test]
fn mistakes_are_answered_with_what_to_write_instead() {
    let role = |more: Value| {
        let mut role = json!({"template": template()});
        role.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        role
    };
    let bare = json!({"template": {"spec": {"containers": [{"name": "main", "image": "i"}]}}});
    for (roles, helps) in [
        (json!({"Server": role(json!({}))}), "Chief (or Master), PS, Worker or Evaluator"),
        (json!({"PS": role(json!({})), "ps": role(json!({}))}), "given twice"),
        (json!({"Chief": role(json!({})), "Master": role(json!({}))}), "keep one"),
        (json!({"Chief": role(json!({"replicas": 2}))}), "one chief"),
        (json!({}), "at least one role"),
        (json!({"Worker": role(json!({"replicas": 0}))}), "at least one role"),
        (json!({"Worker": role(json!({"replicas": -7}))}), "1 or more"),
        (json!({"Worker": role(json!({"minReplicas": 0}))}), "minReplicas is 0"),
        (json!({"Worker": role(json!({"minReplicas": 4, "maxReplicas": 2}))}), "exchange them"),
        (json!({"Worker": role(json!({"minReplicas": 2, "maxReplicas": i32::MIN}))}), "exchange them"),
        (json!({"Worker": role(json!({"minReplicas": 2, "replicas": 1, "maxReplicas": 4}))}), "is not between"),
        (
            json!({"Worker": role(json!({"replicas": i32::MAX})), "PS": role(json!({"replicas": i32::MAX}))}),
            "may have at most 1000",
        ),
        (json!({"Worker": {}}), "has no template"),
        (json!({"Worker": {"template": {"spec": {"containers": "x"}}}}), "not a pod template"),
        (json!({"Worker": {"template": {"spec": {"containers": []}}}}), "no containers"),
        (json!({"Worker": bare}), "named `tensorflow`"),
        (json!({"Worker": {"template": {"spec": {"containers": [{"name": "tensorflow"}]}}}}), "has no image"),
        (json!({"Worker": role(json!({"restartPolicy": "Sometimes"}))}), "none of Always"),
    ] {
        let said = read(&roles, true).unwrap_err().to_string();
        assert!(said.contains(helps), "{roles} was answered with {said:?}");
    }
    assert!(read(&json!({"Worker": bare}), false).is_ok(), "only a TFJob needs the name tensorflow");
}

#[test]
fn a_role_without_tasks_is_left_out_of_a_tfjob() {
    let roles = json!({"PS": {"replicas": 0}, "Worker": {"replicas": 2, "template": template()}});
    let spec = read(&roles, true).unwrap();
    assert_eq!(spec.roles.keys().copied().collect::<Vec<_>>(), [Role::Worker]);
    let said = read(&roles, false).unwrap_err().to_string();
    assert!(said.contains("leave the role out"), "{said}");
}

#[test]
fn names_must_be_parts_of_host_names() {
    let mut spec = read(&json!({"worker": {"replicas": 2, "template": template()}}), true).unwrap();
    // With `-worker-1` it is a label of 63 letters.
    let long = "x".repeat(54);
    for good in ["a", "dist-mnist", "x1", &long] {
        assert_eq!(check_name(good, &spec), Ok(()));
    }
    for bad in ["", "1a", "Dist", "a.b", "a-", &"x".repeat(55)] {
        assert!(check_name(bad, &spec).is_err(), "{bad}");
    }
    spec.options.dynamic_workers = true;
    let said = check_name(&long, &spec).unwrap_err().to_string();
    assert!(said.contains("at most 52"), "a later worker has a longer number: {said}");
}

#[test]
fn tasks_are_named_by_role_and_index() {
    let task = TaskId::new(Role::Ps, 3);
    assert_eq!((task.object_name("job"), TaskId::parse("ps-3")), ("job-ps-3".to_owned(), Some(task)));
    for bad in ["", "ps", "ps-", "ps-x", "other-1", "ps--1"] {
        assert_eq!(TaskId::parse(bad), None, "{bad}");
    }
}
