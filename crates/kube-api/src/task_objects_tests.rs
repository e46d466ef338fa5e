//! The objects of tasks against TFJob's contract: `TF_CONFIG`, environment, names, labels and Services.

use super::*;
use crate::tfjob::TfJobSpec;
use crate::training_job::TrainingJobSpec;

fn template() -> Value {
    json!({"spec": {"containers": [{"name": "tensorflow", "image": "i"}]}})
}

fn tfjob(roles: Value, dynamic: bool) -> TaskJobSpec {
    let spec: TfJobSpec =
        serde_json::from_value(json!({"tfReplicaSpecs": roles, "enableDynamicWorker": dynamic})).unwrap();
    spec.task_job("dist").unwrap()
}

fn with<T>(spec: &TaskJobSpec, domain: Option<&str>, test: impl FnOnce(TaskJobRef<'_>) -> T) -> T {
    let counts = spec.wanted_counts(&BTreeMap::new());
    test(TaskJobRef {
        namespace: "team",
        name: "dist",
        uid: &"u".into(),
        epoch: 3,
        spec,
        counts: &counts,
        cluster_domain: domain,
    })
}

fn config(spec: &TaskJobSpec, role: Role, index: u32) -> Value {
    with(spec, None, |job| serde_json::from_str(&job.tf_config(TaskId { role, index }).unwrap()).unwrap())
}

#[test]
fn the_full_form_lists_all_members() {
    let roles = json!({
        "Chief": {"template": template()}, "PS": {"replicas": 2, "template": template()},
        "worker": {"replicas": 2, "template": template()}, "Evaluator": {"template": template()},
    });
    let spec = tfjob(roles, false);
    assert_eq!(
        config(&spec, Role::Worker, 1),
        json!({
            "cluster": {
                "chief": ["dist-chief-0.team.svc:2222"],
                "ps": ["dist-ps-0.team.svc:2222", "dist-ps-1.team.svc:2222"],
                "worker": ["dist-worker-0.team.svc:2222", "dist-worker-1.team.svc:2222"],
            },
            "task": {"type": "worker", "index": 1},
            "environment": "cloud",
        })
    );
    assert_eq!(config(&spec, Role::Evaluator, 0)["task"], json!({"type": "evaluator", "index": 0}));
}

#[test]
fn the_sparse_form_names_what_a_task_needs() {
    let roles =
        json!({"PS": {"replicas": 2, "template": template()}, "Worker": {"replicas": 3, "template": template()}});
    let spec = tfjob(roles, true);
    let ps = json!(["dist-ps-0.team.svc:2222", "dist-ps-1.team.svc:2222"]);
    assert_eq!(
        config(&spec, Role::Worker, 1),
        json!({
            "sparseCluster": {"worker": {"1": "dist-worker-1.team.svc:2222"}, "ps": ps},
            "task": {"type": "worker", "index": 1},
        })
    );
    assert_eq!(
        config(&spec, Role::Ps, 1),
        json!({
            "sparseCluster": {"worker": {}, "ps": ["dist-ps-1.team.svc:2222"]},
            "task": {"type": "ps", "index": 1},
        })
    );
}

#[test]
fn one_task_needs_no_cluster_and_a_domain_and_port_are_followed() {
    let one = tfjob(json!({"Worker": {"template": template()}}), false);
    assert_eq!(with(&one, None, |job| job.tf_config(TaskId::new(Role::Worker, 0))), None);
    let mut other = template();
    other["spec"]["containers"][0]["ports"] =
        json!([{"containerPort": 80}, {"name": "tfjob-port", "containerPort": 3333}]);
    let two = tfjob(json!({"Worker": {"replicas": 2, "template": other}}), false);
    let text = with(&two, Some("example.org"), |job| job.tf_config(TaskId::new(Role::Worker, 0))).unwrap();
    assert!(text.contains("dist-worker-1.team.svc.example.org:3333"), "{text}");
}

#[test]
fn torchrun_gets_a_meeting_point_and_its_bounds() {
    let spec: TrainingJobSpec = serde_json::from_value(json!({"replicaSpecs": {
        "Worker": {"minReplicas": 2, "maxReplicas": 4, "template": template()},
    }}))
    .unwrap();
    let spec = spec.task_job("dist").unwrap();
    let variables = with(&spec, None, |job| job.torch_variables(TaskId::new(Role::Worker, 1)));
    let expected = [
        ("PET_NNODES", "2:4"),
        ("PET_RDZV_BACKEND", "c10d"),
        ("PET_RDZV_ENDPOINT", "dist-worker-0:2222"),
        ("PET_RDZV_ID", "dist-3"),
    ];
    assert_eq!(variables, expected.map(|(key, value)| (key, value.to_owned())));
    let with_servers = tfjob(json!({"PS": {"template": template()}, "Worker": {"template": template()}}), false);
    assert_eq!(with(&with_servers, None, |job| job.torch_variables(TaskId::new(Role::Worker, 0))), []);
}

#[test]
fn objects_carry_the_labels_of_the_contract() {
    let spec = tfjob(json!({"PS": {"template": template()}, "WORKER": {"replicas": 2, "template": template()}}), false);
    with(&spec, None, |job| {
        let first = TaskId::new(Role::Worker, 0);
        let service = job.service(first);
        assert_eq!(service["metadata"]["name"], "dist-worker-0");
        let labels = &service["spec"]["selector"];
        for (key, value) in [
            ("training.kubeflow.org/job-name", "dist"),
            ("training.kubeflow.org/replica-type", "worker"),
            ("training.kubeflow.org/replica-index", "0"),
            ("training.kubeflow.org/operator-name", "tfjob-controller"),
            ("training.kubeflow.org/job-role", "master"),
            ("gainshare.dev/job", "dist"),
        ] {
            assert_eq!(labels[key], value, "{key}");
        }
        assert_eq!(
            (&service["spec"]["clusterIP"], &service["spec"]["ports"][0]["port"]),
            (&json!("None"), &json!(2222))
        );
        assert_eq!(service["metadata"]["ownerReferences"][0]["kind"], "TFJob");
        assert_eq!(service["spec"]["publishNotReadyAddresses"], true, "tasks that are not ready find each other");
        assert!(labels["gainshare.dev/epoch"].is_null(), "the Service outlives an attempt");
        assert_eq!(job.pod_labels(first)["gainshare.dev/epoch"], "3");
        let second = job.labels(TaskId::new(Role::Worker, 1));
        assert!(!second.contains_key("training.kubeflow.org/job-role"));
    });
}
