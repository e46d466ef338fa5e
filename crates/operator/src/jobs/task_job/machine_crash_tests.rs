//! An operator that dies before or after any write about a job of tasks, and another one that goes on.
//!
//! Each story is played once without a fault, for a TrainingJob and for a TFJob. Then it is played again for every
//! write and for both sides of the write: the operator dies there, and the next one has only what the API server has. A
//! write is one request: the Service and the pod of a task are two. After every write one checker
//! ([`gainshare_core::invariants`]) checks that no task lives twice (I1) and that the job is not lost (I3). At the end
//! everything is as without the fault.

use super::*;
use crate::jobs::task_job::{TaskJobs, TfJobKind};
use crate::jobs::workload::Workload;
use gainshare_core::invariants::Invariants;
use std::collections::BTreeSet;

/// Where an operator dies.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Death {
    /// The number of the write, from 0.
    write: usize,
    /// Before the write takes effect, or after it.
    before: bool,
}

/// A cluster with an operator that dies at most once.
struct Scene {
    cluster: TestCluster,
    /// The Services, which outlive their pods.
    services: BTreeSet<String>,
    death: Option<Death>,
    /// The name of each write.
    writes: Vec<&'static str>,
    has_died: bool,
    invariants: Invariants,
}

impl Scene {
    fn new(kind: WorkloadKind, more: Value, death: Option<Death>) -> Scene {
        let roles = json!({
            "PS": {"restartPolicy": "ExitCode", "template": template()},
            "Worker": {"replicas": 2, "restartPolicy": "ExitCode", "template": template()},
        });
        let cluster = if kind == WorkloadKind::TfJob {
            tfjob(json!({"tfReplicaSpecs": roles, "runPolicy": more, "enableDynamicWorker": true}))
        } else {
            training(json!({"replicaSpecs": roles, "runPolicy": more}))
        };
        let (services, writes) = (BTreeSet::new(), Vec::new());
        let mut invariants = Invariants::default();
        invariants.acknowledge("dist");
        Scene { cluster, services, death, writes, has_died: false, invariants }
    }

    /// One request. Answers whether the operator lives on.
    fn request(&mut self, name: &'static str, take_effect: impl FnOnce(&mut Scene)) -> bool {
        let number = self.writes.len();
        let dies = |before: bool| self.death == Some(Death { write: number, before }) && !self.has_died;
        if dies(true) {
            self.has_died = true;
            return false;
        }
        let dies_after = dies(false);
        self.writes.push(name);
        take_effect(self);
        self.has_died |= dies_after;
        self.check();
        !dies_after
    }

    /// The requests of one action. Answers whether the operator lives on.
    fn act(&mut self, action: &Action) -> bool {
        let name = <TaskJobs<TfJobKind> as Workload>::action_name(action);
        match action {
            Action::Create(task) => {
                let service = task.object_name("dist");
                let is_made = self.services.contains(&service);
                let lives = is_made
                    || self.request("service", |scene| {
                        scene.services.insert(service);
                    });
                lives && self.request(name, |scene| scene.cluster.act(action))
            }
            Action::DeleteServices => {
                for service in self.services.clone() {
                    if !self.request("delete-service", |scene| {
                        scene.services.remove(&service);
                    }) {
                        return false;
                    }
                }
                self.cluster.act(action);
                true
            }
            _ => self.request(name, |scene| scene.cluster.act(action)),
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
        panic!("it does not settle: {:?}", self.writes);
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
        assert!(broken.is_empty(), "{broken:?} after {:?}", self.writes);
    }

    /// What must be the same with and without a death.
    fn state(&self) -> Value {
        let (cluster, status) = (&self.cluster, &self.cluster.job.status);
        let mut pods: Vec<String> = cluster.pods.iter().map(|pod| format!("{pod:?}")).collect();
        pods.sort();
        let journal = &status.journal;
        json!({
            "gone": cluster.gone, "state": format!("{:?}", journal.state), "message": status.message,
            "epoch": journal.epoch, "failures": journal.failures, "nodes": journal.nodes, "cleaned": journal.cleaned,
            "conditions": status.conditions.iter().map(|one| json!([one.type_, one.status])).collect::<Vec<_>>(),
            "replicas": format!("{:?}", status.replicas), "services": self.services, "pods": pods,
        })
    }
}

type Story = (&'static str, Value, fn(&mut Scene));

fn stories() -> Vec<Story> {
    let completes: fn(&mut Scene) = |scene| {
        scene.start();
        scene.end(&["worker-0", "worker-1"], 0);
        assert_eq!(scene.cluster.state(), State::Succeeded);
    };
    let restarts: fn(&mut Scene) = |scene| {
        scene.start();
        scene.end(&["ps-0"], 137);
        scene.run();
        assert_eq!((scene.cluster.state(), scene.cluster.journal().epoch), (State::Running, 2));
    };
    let replaces: fn(&mut Scene) = |scene| {
        scene.start();
        scene.end(&["worker-1"], 137);
        scene.run();
        assert_eq!((scene.cluster.state(), scene.cluster.journal().epoch), (State::Running, 1));
    };
    let fails: fn(&mut Scene) = |scene| {
        scene.start();
        scene.end(&["worker-1"], 1);
        assert_eq!(scene.cluster.state(), State::Failed);
    };
    let suspends: fn(&mut Scene) = |scene| {
        scene.start();
        scene.cluster.job.spec.as_mut().unwrap().options.suspend = true;
        scene.settle();
        assert_eq!((scene.cluster.state(), scene.cluster.names().len()), (State::Suspended, 0));
        scene.cluster.job.spec.as_mut().unwrap().options.suspend = false;
        scene.start();
    };
    let is_deleted: fn(&mut Scene) = |scene| {
        scene.start();
        scene.cluster.job.deleting = true;
        scene.invariants.forget("dist");
        scene.settle();
        assert!(scene.cluster.gone);
    };
    let expires: fn(&mut Scene) = |scene| {
        scene.start();
        scene.end(&["worker-0", "worker-1"], 0);
        scene.invariants.forget("dist");
        scene.cluster.wait(10);
        scene.settle();
        assert!(scene.cluster.gone);
    };
    let shrinks: fn(&mut Scene) = |scene| {
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
    let is_deleted_while_off: fn(&mut Scene) = |scene| {
        scene.start();
        (scene.cluster.is_off, scene.cluster.job.deleting) = (true, true);
        scene.invariants.forget("dist");
        scene.settle();
        assert!(scene.cluster.gone);
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
    ]
}

#[test]
fn an_operator_that_dies_around_any_write_about_tasks_changes_nothing() {
    let (mut names, mut deaths) = (BTreeSet::new(), 0);
    for kind in [WorkloadKind::TaskJob, WorkloadKind::TfJob] {
        for (title, run_policy, story) in stories() {
            let play = |death: Option<Death>| {
                let mut scene = Scene::new(kind, run_policy.clone(), death);
                story(&mut scene);
                scene
            };
            let undisturbed = play(None);
            names.extend(undisturbed.writes.iter().copied());
            for write in 0..undisturbed.writes.len() {
                for before in [true, false] {
                    let scene = play(Some(Death { write, before }));
                    let place = format!("{kind:?} {title}, write {write} ({}), {before}", undisturbed.writes[write]);
                    assert!(scene.has_died, "{place}: no operator died");
                    assert_eq!(scene.state(), undisturbed.state(), "{place}");
                    deaths += 1;
                }
            }
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
        "service",
        "stopped",
        "stopping",
    ];
    assert_eq!(names, BTreeSet::from(all), "every write of the path is in a story");
    println!("fault: injected={deaths} violations=0");
}
