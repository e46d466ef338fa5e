//! An operator that dies before or after any write about a job of tasks, and another one that goes on.
//!
//! Each story ([`crate::jobs::crash_stories`]) is played for a TrainingJob and for a TFJob. A write is one request: the
//! Service and the pod of a task are two. After every write one checker ([`gainshare_core::invariants`]) checks that no
//! task lives twice (I1) and that the job is not lost (I3).

use super::*;
use crate::jobs::crash_stories::{Death, Scene, Writes, die_around_each_write};
use crate::jobs::task_job::{TaskJobs, TfJobKind};
use crate::jobs::workload::Workload;
use gainshare_core::invariants::Invariants;
use std::collections::BTreeSet;

/// A cluster with an operator that dies at most once.
struct TaskScene {
    cluster: TestCluster,
    /// The Services, which outlive their pods.
    services: BTreeSet<String>,
    writes: Writes,
    invariants: Invariants,
}

impl TaskScene {
    fn new(kind: WorkloadKind, more: Value, death: Option<Death>) -> TaskScene {
        let roles = json!({
            "PS": {"restartPolicy": "ExitCode", "template": template()},
            "Worker": {"replicas": 2, "restartPolicy": "ExitCode", "template": template()},
        });
        let cluster = if kind == WorkloadKind::TfJob {
            tfjob(json!({"tfReplicaSpecs": roles, "runPolicy": more, "enableDynamicWorker": true}))
        } else {
            training(json!({"replicaSpecs": roles, "runPolicy": more}))
        };
        let mut invariants = Invariants::default();
        invariants.acknowledge("dist");
        TaskScene { cluster, services: BTreeSet::new(), writes: Writes::with(death), invariants }
    }

    /// One request. Answers whether the operator lives on.
    fn request(
        &mut self,
        name: &'static str,
        take_effect: impl FnOnce(&mut TestCluster, &mut BTreeSet<String>),
    ) -> bool {
        let lives = self.writes.request(name, || take_effect(&mut self.cluster, &mut self.services));
        if !lives {
            // What was decided and not written died with the operator.
            (self.cluster.scale, self.cluster.traffic) = (None, None);
        }
        self.check();
        lives
    }

    /// The requests of one action. Answers whether the operator lives on.
    fn act(&mut self, action: &Action) -> bool {
        let name = <TaskJobs<TfJobKind> as Workload>::action_name(action);
        match action {
            Action::Create(task) => {
                let service = task.object_name("dist");
                let is_made = self.services.contains(&service);
                let lives = is_made
                    || self.request("service", |_, services| {
                        services.insert(service);
                    });
                lives && self.request(name, |cluster, _| cluster.act(action))
            }
            Action::DeleteServices => {
                for service in self.services.clone() {
                    if !self.request("delete-service", |_, services| {
                        services.remove(&service);
                    }) {
                        return false;
                    }
                }
                self.cluster.act(action);
                true
            }
            _ => self.request(name, |cluster, _| cluster.act(action)),
        }
    }

    /// Operators work until nothing is left to do.
    fn settle(&mut self) {
        'next: for _ in 0..200 {
            let actions = self.cluster.step().actions;
            if actions.is_empty() || self.cluster.gone {
                return;
            }
            for action in actions {
                if !self.act(&action) || self.cluster.gone {
                    continue 'next;
                }
            }
        }
        panic!("it does not settle: {:?}", self.writes.names);
    }

    fn run(&mut self) {
        self.cluster.run();
        self.check();
        self.settle();
    }

    fn start(&mut self) {
        self.settle();
        self.run();
        assert_eq!(self.cluster.state(), State::Running, "{}", self.cluster.job.status.message);
    }

    /// Tasks end, and time goes by.
    fn end(&mut self, names: &[&str], code: i32) {
        names.iter().for_each(|name| self.cluster.end(name, code));
        self.settle();
        self.cluster.wait(3);
        self.settle();
    }

    fn check(&mut self) {
        let mut observation = self.cluster.observe();
        observation.set_recorded((!self.cluster.gone).then_some("dist"));
        let broken = self.invariants.check(&observation);
        assert!(broken.is_empty(), "{broken:?} after {:?}", self.writes.names);
    }

    /// The decision about the sizes of tasks and the measurement of their traffic come to these results. If the
    /// operator dies, the next one comes to the same results.
    fn decide(&mut self, workers: u32, traffic: &TaskTraffic) {
        let scale = TaskScale { workers: Some(workers), cause: "workers-starved".to_owned(), ..TaskScale::default() };
        for _ in 0..2 {
            (self.cluster.scale, self.cluster.traffic) = (Some(scale.clone()), Some(traffic.clone()));
            self.settle();
        }
        self.run();
        (self.cluster.scale, self.cluster.traffic) = (None, None);
    }
}

impl Scene for TaskScene {
    fn writes(&self) -> &Writes {
        &self.writes
    }

    fn state(&self) -> Value {
        let (cluster, status) = (&self.cluster, &self.cluster.job.status);
        let mut pods: Vec<String> = cluster.pods.iter().map(|pod| format!("{pod:?}")).collect();
        pods.sort();
        let journal = &status.journal;
        json!({
            "gone": cluster.gone, "state": format!("{:?}", journal.state), "message": status.message,
            "epoch": journal.epoch, "failures": journal.failures, "nodes": journal.nodes, "cleaned": journal.cleaned,
            "scale": journal.scale, "traffic": journal.traffic,
            "conditions": status.conditions.iter().map(|one| json!([one.type_, one.status])).collect::<Vec<_>>(),
            "replicas": format!("{:?}", status.replicas), "services": self.services, "pods": pods,
        })
    }
}

type Story = (&'static str, Value, fn(&mut TaskScene));

fn stories() -> Vec<Story> {
    let completes: fn(&mut TaskScene) = |scene| {
        scene.start();
        scene.end(&["worker-0", "worker-1"], 0);
        assert_eq!(scene.cluster.state(), State::Succeeded);
    };
    let restarts: fn(&mut TaskScene) = |scene| {
        scene.start();
        scene.end(&["ps-0"], 137);
        scene.run();
        assert_eq!((scene.cluster.state(), scene.cluster.journal().epoch), (State::Running, 2));
    };
    let replaces: fn(&mut TaskScene) = |scene| {
        scene.start();
        scene.end(&["worker-1"], 137);
        scene.run();
        assert_eq!((scene.cluster.state(), scene.cluster.journal().epoch), (State::Running, 1));
    };
    let fails: fn(&mut TaskScene) = |scene| {
        scene.start();
        scene.end(&["worker-1"], 1);
        assert_eq!(scene.cluster.state(), State::Failed);
    };
    let suspends: fn(&mut TaskScene) = |scene| {
        scene.start();
        scene.cluster.job.spec.as_mut().unwrap().options.suspend = true;
        scene.settle();
        assert_eq!((scene.cluster.state(), scene.cluster.names().len()), (State::Suspended, 0));
        scene.cluster.job.spec.as_mut().unwrap().options.suspend = false;
        scene.start();
    };
    let is_deleted: fn(&mut TaskScene) = |scene| {
        scene.start();
        scene.cluster.job.deleting = true;
        scene.invariants.forget("dist");
        scene.settle();
        assert!(scene.cluster.gone);
    };
    let expires: fn(&mut TaskScene) = |scene| {
        scene.start();
        scene.end(&["worker-0", "worker-1"], 0);
        scene.invariants.forget("dist");
        scene.cluster.wait(10);
        scene.settle();
        assert!(scene.cluster.gone);
    };
    let shrinks: fn(&mut TaskScene) = |scene| {
        scene.start();
        let mut other = json!({"replicas": 1, "restartPolicy": "ExitCode", "template": template()});
        for workers in [1, 2] {
            other["replicas"] = json!(workers);
            let roles = json!({"PS": {"restartPolicy": "ExitCode", "template": template()}, "Worker": other});
            scene.cluster.job.spec = match scene.cluster.job.key.kind {
                WorkloadKind::TfJob => tfjob(json!({"tfReplicaSpecs": roles, "enableDynamicWorker": true})).job.spec,
                _ => training(json!({"replicaSpecs": roles})).job.spec,
            };
            scene.settle();
            scene.run();
            assert_eq!((scene.cluster.state(), scene.cluster.names().len()), (State::Running, 1 + workers));
        }
    };
    let is_deleted_while_off: fn(&mut TaskScene) = |scene| {
        scene.start();
        (scene.cluster.is_off, scene.cluster.job.deleting) = (true, true);
        scene.invariants.forget("dist");
        scene.settle();
        assert!(scene.cluster.gone);
    };
    let is_scaled: fn(&mut TaskScene) = |scene| {
        let is_tfjob = scene.cluster.job.key.kind == WorkloadKind::TfJob;
        if !is_tfjob {
            let worker = json!({
                "replicas": 2, "minReplicas": 1, "maxReplicas": 3, "restartPolicy": "ExitCode", "template": template(),
            });
            let roles = json!({"PS": {"restartPolicy": "ExitCode", "template": template()}, "Worker": worker});
            scene.cluster.job.spec = training(json!({"policy": "operator", "replicaSpecs": roles})).job.spec;
        }
        scene.start();
        let traffic = TaskTraffic::from([("ps-0".to_owned(), 9_000_000), ("worker-0".to_owned(), 4_500_000)]);
        for workers in [3, 1] {
            scene.decide(workers, &traffic);
            let count = if is_tfjob { 2 } else { workers as usize };
            assert_eq!((scene.cluster.state(), scene.cluster.names().len()), (State::Running, 1 + count));
        }
        scene.end(&["ps-0"], 137);
        scene.run();
        let journal = scene.cluster.journal();
        assert_eq!((journal.epoch, &journal.scale, &journal.traffic), (2, &None, &traffic));
    };
    vec![
        ("completes", json!({}), completes),
        ("restarts", json!({}), restarts),
        ("replaces", json!({}), replaces),
        ("fails", json!({"backoffLimit": 0}), fails),
        ("suspends", json!({}), suspends),
        ("is deleted", json!({}), is_deleted),
        ("expires", json!({"ttlSecondsAfterFinished": 5, "cleanPodPolicy": "All"}), expires),
        ("shrinks and grows", json!({}), shrinks),
        ("is deleted while sharing is off", json!({}), is_deleted_while_off),
        ("is scaled", json!({}), is_scaled),
    ]
}

#[test]
fn an_operator_that_dies_around_any_write_about_tasks_changes_nothing() {
    let (mut names, mut deaths) = (BTreeSet::new(), 0);
    for kind in [WorkloadKind::TaskJob, WorkloadKind::TfJob] {
        for (title, run_policy, story) in stories() {
            let (written, died) = die_around_each_write(&format!("{kind:?} {title}"), |death| {
                let mut scene = TaskScene::new(kind, run_policy.clone(), death);
                story(&mut scene);
                scene
            });
            names.extend(written);
            deaths += died;
        }
    }
    let all = [
        "create",
        "delete",
        "delete-job",
        "delete-service",
        "end",
        "failed",
        "hold",
        "let-go",
        "noted",
        "open",
        "placed",
        "planned",
        "release",
        "running",
        "scaled",
        "service",
        "stopped",
        "stopping",
    ];
    assert_eq!(names, BTreeSet::from(all), "every write of the path is in a story");
    println!("fault: injected={deaths} violations=0");
}
