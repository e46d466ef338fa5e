//! Jobs of several tasks at their worst: absurd counts, wrong words, forged journals. The operator
//! reads every one of them and steps on without a panic.

use super::hostile_tests::{
    any_pod, any_training_job, containers, integer, read, running_pod, time, training_job, word,
};
use super::task_job::action::{Action, Snapshot};
use super::task_job::gang::Placement;
use super::task_job::machine::step;
use super::task_job::{pod as task_pod, template_fault};
use crate::state::invalid_objects::InvalidObjects;
use crate::state::snapshot::{NodeState, Nodes, PodSnapshot};
use crate::state::task_job::TaskJobSnapshot;
use gainshare_kube_api::tasks::{Role, TaskId, tasks};
use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Everything that is done to a job of tasks and its pods, several steps on, with every node state.
fn work_on_tasks(job: &TaskJobSnapshot, pods: &[Value]) {
    let mut job = job.clone();
    let mut pods: Vec<PodSnapshot> =
        pods.iter().filter_map(|pod| read(pod).as_ref().and_then(PodSnapshot::of)).collect();
    for (pod, index) in pods.iter_mut().zip(0..) {
        pod.task = Some(TaskId { role: Role::ALL[index as usize % 5], index });
    }
    let grant: Option<Placement> = job.spec.as_ref().ok().map(|spec| {
        let _ = task_pod::check(spec);
        let counts = job.wanted();
        let reference = task_pod::reference(&job, spec, &counts, Some("x"));
        tasks(&counts)
            .map(|task| {
                let _ = (task_pod::build(&reference, task), reference.service(task));
                (task, "node-a".into())
            })
            .collect()
    });
    for state in [NodeState::Ready, NodeState::Missing, NodeState::Off] {
        let nodes: Nodes = [("node-a".into(), state)].into();
        for now in [Timestamp::MIN, Timestamp::MAX, Timestamp::UNIX_EPOCH] {
            for _ in 0..4 {
                let next = step(&Snapshot {
                    now,
                    job: &job,
                    pods: &pods,
                    nodes: &nodes,
                    grant: grant.as_ref(),
                    never_fits: true,
                    scale: None,
                    traffic: None,
                    nodes_needed: None,
                    progress: Default::default(),
                    fault: None,
                });
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

#[test]
fn a_job_of_absurdly_many_tasks() {
    let template =
        json!({"spec": {"containers": containers(&json!({"cpu": "999999999", "memory": "7Pi"}), &json!({}))}});
    for replicas in [i32::MAX, i32::MIN, 0, -1, 1001, 1000, 3] {
        let role = json!({"replicas": replicas, "minReplicas": replicas, "template": template});
        let mut job = training_job(Value::Null);
        job["spec"]["replicaSpecs"] = json!({"Worker": role, "ps": role});
        let job = TaskJobSnapshot::of_training_job(&read(&job).unwrap()).unwrap();
        assert_eq!(job.spec.is_ok(), replicas == 3, "{replicas}");
        work_on_tasks(&job, &[running_pod("p0", &containers(&json!({}), &json!({})))]);
    }
}

/// The templates of tasks obey the rules for jobs of one pod, whatever the role.
#[test]
fn a_task_that_asks_for_the_host_is_refused_with_its_role() {
    let container = json!({"name": "main", "image": "i"});
    let privileged = json!({"name": "main", "image": "i", "securityContext": {"privileged": true}});
    let volume = json!({"name": "v", "hostPath": {"path": "/"}});
    let sound = json!({"spec": {"containers": [container]}});
    let hostile = [
        (json!({"spec": {"containers": [container], "hostNetwork": true}}), "hostNetwork"),
        (json!({"spec": {"containers": [container], "volumes": [volume]}}), "use a claim"),
        (json!({"spec": {"containers": [privileged]}}), "privileged"),
    ];
    let fault_of = |roles: Value| {
        let mut job = training_job(Value::Null);
        job["spec"]["replicaSpecs"] = roles;
        template_fault(&TaskJobSnapshot::of_training_job(&read(&job).unwrap()).unwrap())
    };
    assert!(fault_of(json!({"PS": {"template": sound}, "Worker": {"template": sound}})).is_none());
    for (template, words) in &hostile {
        for role in ["PS", "Worker"] {
            let mut roles = json!({"PS": {"template": sound}, "Worker": {"template": sound}});
            roles[role]["template"] = template.clone();
            let fault = fault_of(roles).unwrap_or_else(|| panic!("a {role} is not refused: {template}"));
            let names_it = fault.message.to_lowercase().starts_with(&role.to_lowercase());
            assert!(fault.for_good && names_it && fault.message.contains(words), "{}", fault.message);
        }
    }
    println!("fault: injected={} violations=0", 2 * hostile.len());
}

/// A job of tasks: the same roles as a TrainingJob and as a TFJob, with a forged journal.
fn any_task_job() -> impl Strategy<Value = (Value, Value)> {
    let counts = (integer(), integer(), integer(), 0..40_i64);
    let texts = (word(), word(), word());
    (any_training_job(), counts, texts, any::<u32>(), time(), (any::<bool>(), any::<bool>())).prop_map(
        |(mut job, (replicas, min, max, few), (role, word, restart), epoch, at, (sane, admitted))| {
            let template = job["spec"]["template"].take();
            let number = |n: i64| if sane { few.max(1) as i32 } else { n as i32 };
            let journal = json!({
                "state": job["status"]["state"], "epoch": epoch, "admitted": admitted, "nodes": {&word: "b", "worker-0": "node-a"},
                "restarting": sane, "notBefore": at, "replaced": ["p0"], "failures": epoch, "tried": [&word], "triedUntil": at,
                "waitingSince": at,
            });
            let mut tfjob = job.clone();
            tfjob["kind"] = json!("TFJob");
            tfjob["spec"] = json!({
                "runPolicy": {"cleanPodPolicy": word, "backoffLimit": number(min), "ttlSecondsAfterFinished": number(max),
                    "activeDeadlineSeconds": replicas, "schedulingPolicy": {"minAvailable": number(max)}},
                "enableDynamicWorker": sane, "successPolicy": if sane { "" } else { &word },
                "tfReplicaSpecs": {"worker": {"replicas": number(replicas), "template": template, "restartPolicy": restart}, "PS": {"template": template}},
            });
            tfjob["status"] = json!({"tasks": journal, "startTime": at});
            let name = if sane { "Worker".to_owned() } else { role };
            job["spec"]["replicaSpecs"] = json!({
                name: {"replicas": number(replicas), "minReplicas": number(min), "maxReplicas": number(max), "template": template},
                "ps": {"template": template},
            });
            job["metadata"]["annotations"]["gainshare.dev/replicas"] = json!(format!("worker={max},{word}"));
            job["status"]["tasks"] = journal;
            (job, tfjob)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn any_jobs_of_tasks_pass(pods in prop::collection::vec(any_pod(), 0..4), (task_job, tfjob) in any_task_job()) {
        if let Some(job) = read(&task_job).as_ref().and_then(TaskJobSnapshot::of_training_job) {
            work_on_tasks(&job, &pods);
        }
        let tfjob = read(&tfjob);
        tfjob.iter().for_each(|job| InvalidObjects::default().check_tfjob(job));
        if let Some(job) = tfjob.as_ref().and_then(TaskJobSnapshot::of_tfjob) {
            work_on_tasks(&job, &pods);
        }
    }
}
