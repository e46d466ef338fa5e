//! An operator that dies before or after any write about an adopted Job, and another one that goes on.
//!
//! The cluster around the operator is the one of [`super`]. After every write and every second one checker
//! ([`gainshare_core::invariants`]) checks that no two attempts live (I1).

use super::*;
use crate::jobs::batch_job::BatchJobs;
use crate::jobs::crash_stories::{Death, Scene, Writes, die_around_each_write};
use crate::jobs::workload::Workload;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A Job on its nodes, with an operator that dies at most once.
struct JobScene {
    world: World,
    writes: Writes,
    invariants: Invariants,
}

impl JobScene {
    fn new(on_sigterm: i32, death: Option<Death>) -> JobScene {
        JobScene { world: World::new(on_sigterm), writes: Writes::with(death), invariants: Invariants::default() }
    }

    /// What the next step does. The order to move is an annotation of the Job, so no operator forgets it.
    fn actions(&self) -> Vec<Action> {
        let (job, nodes) = (&self.world.job, &self.world.nodes);
        let order = requested_order(job);
        let pods: Vec<PodSnapshot> = self.world.pods.values().cloned().collect();
        let (order, now, marks) = (order.as_ref(), self.world.now, Marks::default());
        let next = step(&Snapshot { now, job, pods: &pods, nodes, order, closed: None, off: false, marks });
        next.actions.into_iter().filter(|action| *action != Action::RemoveOrder).collect()
    }

    /// Operators work until nothing is left to do for now.
    fn settle(&mut self) {
        'next: for _ in 0..50 {
            let mut operator = Operator(self.actions(), self.world.job.resource_version.clone());
            if operator.0.is_empty() {
                return;
            }
            while let Some(action) = operator.0.first() {
                let name = <BatchJobs as Workload>::action_name(action);
                let lives = self.writes.request(name, || self.world.act(&mut operator));
                self.check();
                if !lives {
                    continue 'next;
                }
            }
        }
        panic!("it does not settle: {:?}", self.writes.names);
    }

    /// Operators, the Job controller and the kubelets do what is due, second by second.
    fn run(&mut self) {
        for _ in 0..20 {
            self.settle();
            self.world.controller(0);
            NODES.into_iter().for_each(|node| self.world.kubelet(node));
            self.world.now += SignedDuration::from_secs(1);
            self.check();
        }
    }

    fn check(&mut self) {
        let mut observation = Observation::default();
        self.world.live.keys().for_each(|uid| observation.add_live("run", uid, None));
        let broken = self.invariants.check(&observation);
        assert!(broken.is_empty(), "{broken:?} after {:?}", self.writes.names);
    }

    /// A person sends the Job to a node.
    fn order(&mut self, node: &str) {
        self.world.job.wanted_node = Some(node.into());
        self.world.touch();
    }

    /// The same, and it runs there or where it was.
    fn send(&mut self, node: &str, ends_on: &str) {
        self.order(node);
        self.run();
        let journal = &self.world.job.journal;
        assert_eq!((journal.node.as_deref(), journal.migration.is_none()), (Some(ends_on), true), "{journal:?}");
        assert_eq!(self.world.live.values().collect::<Vec<_>>(), [ends_on], "{journal:?}");
    }

    /// The author takes the Job back.
    fn take_back(&mut self) {
        self.world.job.asked = false;
        self.world.touch();
        self.run();
    }
}

impl Scene for JobScene {
    fn writes(&self) -> &Writes {
        &self.writes
    }

    fn state(&self) -> Value {
        let (job, pods) = (&self.world.job, self.world.pods.values());
        json!({
            "journal": job.journal, "hasJournal": job.has_journal, "suspended": job.suspended, "ended": job.ended,
            "hasStartTime": job.has_start_time, "pods": pods.map(|pod| format!("{pod:?}")).collect::<Vec<_>>(),
            "live": self.world.live, "made": self.world.pods_made,
        })
    }
}

type Story = (&'static str, i32, fn(&mut JobScene));

fn stories() -> Vec<Story> {
    let moves: fn(&mut JobScene) = |scene| {
        scene.run();
        scene.send("b", "b");
        assert_eq!((scene.world.job.journal.moves, scene.world.pods_made), (1, 2));
    };
    let stays: fn(&mut JobScene) = |scene| {
        scene.run();
        scene.send("b", "a");
        assert!(scene.world.job.journal.unmovable.is_some() && scene.world.job.journal.moves == 0);
    };
    let loses_its_pod: fn(&mut JobScene) = |scene| {
        scene.run();
        // It waits for its own share, so it is not suspended yet.
        scene.world.pods.values_mut().for_each(|pod| pod.reshaped = true);
        scene.order("b");
        scene.settle();
        let until = (scene.world.now, scene.world.now + SignedDuration::from_secs(30));
        scene.world.pods.values_mut().for_each(|pod| pod.deleted = Some(until));
        scene.run();
        let journal = &scene.world.job.journal;
        assert_eq!((journal.moves, journal.migration.is_none(), scene.world.pods_made), (0, true, 2), "{journal:?}");
        assert_eq!((scene.world.live.len(), scene.world.job.suspended), (1, false), "{journal:?}");
    };
    let is_taken_back: fn(&mut JobScene) = |scene| {
        scene.run();
        scene.take_back();
        assert!(!scene.world.job.has_journal && scene.world.pods.values().all(|pod| pod.job.is_empty()));
    };
    let is_taken_back_after_a_move: fn(&mut JobScene) = |scene| {
        scene.run();
        scene.send("b", "b");
        scene.world.job.suspended = true;
        scene.take_back();
        assert!(!scene.world.job.has_journal && !scene.world.job.has_start_time && scene.world.live.is_empty());
    };
    vec![
        ("moves", 143, moves),
        ("stays, because it does not save itself", 137, stays),
        ("loses its pod before it is suspended", 143, loses_its_pod),
        ("is taken back", 143, is_taken_back),
        ("is taken back after a move", 143, is_taken_back_after_a_move),
    ]
}

#[test]
fn an_operator_that_dies_around_any_write_about_a_job_changes_nothing() {
    let (mut names, mut deaths) = (BTreeSet::new(), 0);
    for (title, on_sigterm, story) in stories() {
        let (written, died) = die_around_each_write(title, |death| {
            let mut scene = JobScene::new(on_sigterm, death);
            story(&mut scene);
            scene
        });
        names.extend(written);
        deaths += died;
    }
    let all = [
        "cancelled",
        "clear-start-time",
        "forget",
        "hold-pod",
        "let-go",
        "mark",
        "noted",
        "resume",
        "running",
        "stopping",
        "suspend",
    ];
    assert_eq!(names, BTreeSet::from(all), "every write of the path is in a story");
    println!("fault: injected={deaths} violations=0");
}
