//! A make-believe API server, scheduler and kubelets around the real state machine, and everything that may go wrong between them: executors that
//! die between any two apply, two of them at once, copies that are old by any amount, nodes that fall silent or vanish, pods removed by force.
//! Whatever happens: `never_two_live_attempts`, `always_ends`.

use super::{movable, step};
use crate::jobs::action::{Action, PodFault, Snapshot, Step};
use crate::jobs::snapshot::{Exit, JobSnapshot, NodeState, Nodes, Phase, PodSnapshot};
use crate::jobs::{Order, OrderKind};
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::training_job::{Checkpoint, State, Stopping, TrainingJobSpec};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const NODES: [&str; 3] = ["a", "b", "c"];
const GRACE: SignedDuration = SignedDuration::from_secs(30);

/// The truth, as opposed to what anybody has read of it.
struct World {
    now: Timestamp,
    /// `None` when the object is gone.
    job: Option<JobSnapshot>,
    pods: BTreeMap<String, PodSnapshot>,
    pins: BTreeMap<String, Option<String>>,
    nodes: Nodes,
    /// Nodes that nothing fits on.
    full: BTreeSet<&'static str>,
    /// Uids of pods whose processes really run, and their nodes.
    live: BTreeMap<String, String>,
    /// What the job does on SIGTERM: its exit code.
    on_sigterm: i32,
    version: u64,
    uids: u64,
    /// All states that a reader may have snapshot, oldest first.
    past: Vec<(Option<JobSnapshot>, Vec<PodSnapshot>)>,
    most_live: usize,
    order: Option<Order>,
}

/// A manager: what it has read, and what it is about to do.
#[derive(Default)]
struct Executor {
    job: usize,
    pods: usize,
    /// A written object that came back, newer than `past[job]`.
    written: Option<JobSnapshot>,
    queue: Vec<Action>,
    /// The version of the job that the queue was decided on.
    based_on: String,
}

impl World {
    fn new(on_sigterm: i32) -> World {
        let spec = TrainingJobSpec {
            checkpoint: Some(Checkpoint { claim_name: "c".to_owned(), path: "/c".to_owned(), sub_path: None }),
            ..TrainingJobSpec::default()
        };
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let job =
            JobSnapshot { name: "run".to_owned(), uid: "job".to_owned(), created: now, spec, ..JobSnapshot::default() };
        let mut world = World {
            now,
            job: Some(job),
            pods: BTreeMap::new(),
            pins: BTreeMap::new(),
            nodes: NODES.iter().map(|node| ((*node).to_owned(), NodeState::Ready)).collect(),
            full: BTreeSet::new(),
            live: BTreeMap::new(),
            on_sigterm,
            version: 1,
            uids: 0,
            past: Vec::new(),
            most_live: 0,
            order: None,
        };
        world.changed();
        world
    }

    fn changed(&mut self) {
        self.version += 1;
        self.most_live = self.most_live.max(self.live.len());
        self.past.push((self.job.clone(), self.pods.values().cloned().collect()));
    }

    fn state(&self) -> State {
        self.job.as_ref().map_or(State::Succeeded, |job| job.status.state)
    }

    fn change_job(&mut self, change: impl FnOnce(&mut JobSnapshot)) {
        self.version += 1;
        let version = self.version.to_string();
        if let Some(job) = &mut self.job {
            change(job);
            job.resource_version = version;
        }
        self.changed();
    }

    fn with_uid(&mut self, pod: &str, uid: &str) -> Option<&mut PodSnapshot> {
        self.pods.get_mut(pod).filter(|pod| pod.uid == uid)
    }

    /// The API server removes what was deleted, has nothing that holds it, and runs nowhere.
    fn collect(&mut self) {
        let nodes = self.nodes.clone();
        self.pods.retain(|_, pod| pod.deleted.is_none() || pod.has_finalizer || pod.stop(&nodes).is_none());
        self.changed();
    }

    fn create(&mut self, epoch: u32) {
        let name = format!("run-{epoch}");
        if self.pods.contains_key(&name) || self.job.is_none() {
            return;
        }
        self.uids += 1;
        let pod = PodSnapshot {
            name: name.clone(),
            uid: format!("pod{}", self.uids),
            owner: Some("job".to_owned()),
            epoch,
            created: self.now,
            gated: true,
            has_finalizer: true,
            ..PodSnapshot::default()
        };
        self.pods.insert(name, pod);
        self.changed();
    }

    fn open(&mut self, pod: &str, uid: &str, node: Option<String>) {
        if let Some(found) = self.with_uid(pod, uid).filter(|pod| pod.gated) {
            found.gated = false;
            self.pins.insert(uid.to_owned(), node);
            self.changed();
        }
    }

    fn delete(&mut self, pod: &str, uid: &str) {
        let now = self.now;
        if let Some(found) = self.with_uid(pod, uid).filter(|pod| pod.deleted.is_none()) {
            let grace = if found.node.is_some() { GRACE } else { SignedDuration::ZERO };
            found.deleted = Some((now, now + grace));
            self.collect();
        }
    }

    fn schedule(&mut self) {
        let (nodes, full, now, pins) = (self.nodes.clone(), self.full.clone(), self.now, self.pins.clone());
        for pod in self.pods.values_mut().filter(|pod| !pod.gated && pod.node.is_none() && pod.deleted.is_none()) {
            let pin = pins.get(&pod.uid).cloned().flatten();
            let fits = |node: &&&str| {
                nodes.get(**node) == Some(&NodeState::Ready)
                    && !full.contains(**node)
                    && pin.as_deref().is_none_or(|pin| pin == **node)
            };
            match NODES.iter().find(fits) {
                Some(node) => pod.node = Some((*node).to_owned()),
                None => {
                    pod.unschedulable.get_or_insert((now, "0/3 nodes are available".to_owned()));
                }
            }
        }
        self.changed();
    }

    /// A kubelet looks at its pods, and reports.
    fn kubelet(&mut self, node: &str) {
        if self.nodes.get(node) != Some(&NodeState::Ready) {
            return;
        }
        let (now, code) = (self.now, self.on_sigterm);
        for pod in self.pods.values_mut().filter(|pod| pod.node.as_deref() == Some(node)) {
            let over = matches!(pod.phase, Phase::Succeeded | Phase::Failed);
            match pod.deleted {
                _ if over => {}
                // A job that ignores SIGTERM runs until its time is over.
                Some((_, until)) if code == 137 && until > now && self.live.contains_key(&pod.uid) => {}
                Some(_) => {
                    let ran = self.live.remove(&pod.uid).is_some();
                    end(pod, if ran { code } else { 137 }, now);
                }
                None => {
                    self.live.insert(pod.uid.clone(), node.to_owned());
                    pod.phase = Phase::Running;
                    pod.running = true;
                }
            }
        }
        // The process of a pod whose object was removed by force: the kubelet ends it when it notices.
        self.collect();
    }

    /// What runs comes to its own end.
    fn finish(&mut self, code: i32) {
        let now = self.now;
        let ready: Vec<String> = self.live.keys().cloned().collect();
        for pod in self.pods.values_mut().filter(|pod| ready.contains(&pod.uid)) {
            if self.nodes.get(pod.node.as_deref().unwrap_or_default()) == Some(&NodeState::Ready) {
                self.live.remove(&pod.uid);
                end(pod, code, now);
            }
        }
        self.collect();
    }

    fn switch_off(&mut self, node: &str) {
        self.nodes.insert(node.to_owned(), NodeState::Off);
        self.live.retain(|_, on| on != node);
        self.changed();
    }

    /// Somebody takes the finalizer away and deletes the object by force; the process goes on.
    fn remove_by_force(&mut self) {
        self.pods.retain(|_, pod| pod.gated);
        self.changed();
    }
}

fn end(pod: &mut PodSnapshot, code: i32, now: Timestamp) {
    pod.running = false;
    pod.phase = if code == 0 { Phase::Succeeded } else { Phase::Failed };
    // Whoever does not listen is killed when its time is over.
    let killed = pod.deleted.filter(|_| code == 137).map(|(_, until)| until);
    pod.exit = Some(Exit { code, finished: killed.unwrap_or(now), ..Exit::default() });
}

impl Executor {
    /// Reads on, by as much as the watch happens to deliver.
    fn read(&mut self, world: &World, job: usize, pods: usize) {
        let last = world.past.len() - 1;
        self.job = (self.job + job).min(last);
        self.pods = (self.pods + pods).min(last);
        let newer = |snapshot: &JobSnapshot| snapshot.resource_version.parse::<u64>().unwrap_or(0);
        if let (Some(written), Some(read)) = (&self.written, &world.past[self.job].0)
            && newer(read) >= newer(written)
        {
            self.written = None;
        }
    }

    fn fresh(&mut self, world: &World) {
        self.read(world, usize::MAX / 2, usize::MAX / 2);
    }

    fn next(&self, world: &World) -> Step {
        let (job, pods) = (&world.past[self.job].0, &world.past[self.pods].1);
        let Some(job) = self.written.as_ref().or(job.as_ref()) else { return Step::default() };
        let named = job.status.attempt.as_ref();
        // Absence is asked of the API server itself, as the controller does.
        let pod_is_missing = named.is_some_and(|attempt| !world.pods.contains_key(&attempt.pod));
        step(&Snapshot {
            now: world.now,
            job,
            pods,
            pod_is_missing,
            nodes: &world.nodes,
            order: world.order.as_ref(),
            fault: None,
            progress: None,
        })
    }

    /// Decides if there is nothing left to do, then does one thing.
    fn act(&mut self, world: &mut World) {
        if self.queue.is_empty() {
            self.queue = self.next(world).actions;
            self.queue.reverse();
            let job = self.written.as_ref().or(world.past[self.job].0.as_ref());
            self.based_on = job.map(|job| job.resource_version.clone()).unwrap_or_default();
            return;
        }
        let Some(actions) = self.queue.pop() else { return };
        match actions {
            Action::Write(_, status) => {
                if world.job.as_ref().is_some_and(|job| job.resource_version == self.based_on) {
                    world.change_job(|job| job.status = *status);
                    self.written = world.job.clone();
                } else {
                    self.queue.clear();
                }
            }
            Action::Hold => world.change_job(|job| job.has_finalizer = !job.deleting || job.has_finalizer),
            // The list that counts is the API server's own.
            Action::Release if world.pods.values().any(|pod| pod.has_finalizer) => {}
            Action::Release => {
                world.change_job(|job| job.has_finalizer = false);
                if world.job.as_ref().is_some_and(|job| job.deleting) {
                    world.job = None;
                    world.changed();
                }
            }
            Action::DeleteJob => world.change_job(|job| job.deleting = true),
            Action::Create { epoch } => world.create(epoch),
            Action::Open { pod, uid, node } => world.open(&pod, &uid, node),
            Action::Delete { pod, uid } => world.delete(&pod, &uid),
            Action::LetGo { pod, uid } => {
                if let Some(found) = world.with_uid(&pod, &uid) {
                    found.has_finalizer = false;
                    world.collect();
                }
            }
            Action::RemoveOrder => world.order = None,
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// One of two managers reads so far on, and does one thing.
    Act {
        which: usize,
        job: usize,
        pods: usize,
    },
    /// It dies and starts anew, with fresh lists.
    Crash(usize),
    Schedule,
    Kubelet(usize),
    Finish(i32),
    Silent(usize),
    Back(usize),
    Off(usize),
    Full(usize, bool),
    Order(usize, bool),
    Tick(i64),
    Suspend(bool),
    RemoveByForce,
    DeletePod,
    DeleteJob,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        30 => (0..2usize, 0..4usize, 0..4usize).prop_map(|(which, job, pods)| Op::Act { which, job, pods }),
        20 => Just(Op::Act { which: 0, job: 1000, pods: 1000 }),
        3 => (0..2usize).prop_map(Op::Crash),
        8 => Just(Op::Schedule),
        12 => (0..3usize).prop_map(Op::Kubelet),
        2 => prop_oneof![Just(0), Just(1), Just(137), Just(143)].prop_map(Op::Finish),
        1 => (0..3usize).prop_map(Op::Silent),
        2 => (0..3usize).prop_map(Op::Back),
        1 => (0..2usize).prop_map(Op::Off),
        1 => (0..3usize, any::<bool>()).prop_map(|(node, full)| Op::Full(node, full)),
        8 => (0..3usize, any::<bool>()).prop_map(|(node, place)| Op::Order(node, place)),
        8 => prop_oneof![Just(1), Just(5), Just(40)].prop_map(Op::Tick),
        1 => any::<bool>().prop_map(Op::Suspend),
        1 => Just(Op::RemoveByForce),
        1 => Just(Op::DeletePod),
        1 => Just(Op::DeleteJob),
    ];
    prop::collection::vec(op, 0..250)
}

fn play(world: &mut World, managers: &mut [Executor; 2], op: &Op) {
    match *op {
        Op::Act { which, job, pods } => {
            managers[which].read(world, job, pods);
            managers[which].act(world);
        }
        Op::Crash(which) => {
            managers[which] = Executor::default();
            managers[which].fresh(world);
        }
        Op::Schedule => world.schedule(),
        Op::Kubelet(node) => world.kubelet(NODES[node]),
        Op::Finish(code) => world.finish(code),
        Op::Silent(node) | Op::Back(node) if world.nodes[NODES[node]] == NodeState::Off => {}
        Op::Silent(node) => drop(world.nodes.insert(NODES[node].to_owned(), NodeState::Silent)),
        Op::Back(node) => drop(world.nodes.insert(NODES[node].to_owned(), NodeState::Ready)),
        Op::Off(node) => world.switch_off(NODES[node]),
        Op::Full(node, true) => drop(world.full.insert(NODES[node])),
        Op::Full(node, false) => drop(world.full.remove(NODES[node])),
        Op::Order(node, place) => {
            let kind = if place { OrderKind::Place } else { OrderKind::Move };
            world.order = Some(Order {
                uid: "job".to_owned(),
                node: NODES[node].to_owned(),
                kind,
                reason: PlacementReason::Gain,
            });
        }
        Op::Tick(s) => world.now += SignedDuration::from_secs(s),
        Op::Suspend(suspend) => world.change_job(|job| job.spec.suspend = suspend),
        Op::RemoveByForce => world.remove_by_force(),
        Op::DeletePod => {
            let pods: Vec<(String, String)> =
                world.pods.values().map(|pod| (pod.name.clone(), pod.uid.clone())).collect();
            pods.iter().for_each(|(pod, uid)| world.delete(pod, uid));
        }
        Op::DeleteJob => {
            world.change_job(|job| job.deleting = true);
            if world.job.as_ref().is_some_and(|job| !job.has_finalizer) {
                world.job = None;
                world.changed();
            }
        }
    }
}

/// Nothing goes wrong any more: everybody does their part, and a run takes three rounds.
fn in_peace(world: &mut World, manager: &mut Executor) -> usize {
    world.full.clear();
    world.change_job(|job| job.spec.suspend = false);
    for node in NODES {
        if world.nodes[node] == NodeState::Silent {
            world.nodes.insert(node.to_owned(), NodeState::Ready);
        }
    }
    manager.queue.clear();
    for round in 0..400 {
        manager.fresh(world);
        for _ in 0..20 {
            manager.act(world);
            manager.fresh(world);
        }
        let gone = world.job.is_none();
        if gone || (matches!(world.state(), State::Succeeded | State::Failed) && manager.next(world).actions.is_empty())
        {
            return round;
        }
        world.schedule();
        NODES.iter().for_each(|node| world.kubelet(node));
        world.now += SignedDuration::from_secs(5);
        if round % 3 == 2 {
            world.finish(0);
            // Whoever removed pods by force sees to it that they have ended, and says so.
            let known: BTreeSet<&String> = world.pods.values().map(|pod| &pod.uid).collect();
            world.live = world.live.clone().into_iter().filter(|(uid, _)| known.contains(uid)).collect();
            let lost = world.job.as_ref().and_then(|job| job.status.attempt.as_ref()).map(|a| a.pod.clone());
            if let Some(lost) = lost.filter(|pod| !world.pods.contains_key(pod)) {
                world.change_job(|job| job.declared_stopped = Some(lost));
            }
        }
    }
    panic!("it never ends: {:?} {:?}", world.job.as_ref().map(|job| &job.status), world.pods);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn never_two_live_attempts_and_always_ends(
        ops in ops(),
        on_sigterm in prop_oneof![4 => Just(143), 1 => Just(0), 1 => Just(1), 1 => Just(137)],
    ) {
        let mut world = World::new(on_sigterm);
        let mut managers = [Executor::default(), Executor::default()];
        for op in &ops {
            play(&mut world, &mut managers, op);
            prop_assert!(world.most_live <= 1, "two attempts live after {op:?}");
        }
        let [mut manager, _] = managers;
        in_peace(&mut world, &mut manager);
        prop_assert!(world.most_live <= 1, "two attempts lived");
        // A pod that was made for a job that had just gone is nobody's: the controller lets go of it, and it never ran.
        let held = world.pods.values().find(|pod| pod.has_finalizer && (world.job.is_some() || !pod.gated));
        prop_assert!(held.is_none(), "a pod is held: {held:?}");
    }
}

/// Lets one manager work until it has nothing to do; what it did, in words.
fn work(world: &mut World) -> Vec<String> {
    let mut manager = Executor::default();
    let mut done = Vec::new();
    for _ in 0..50 {
        manager.fresh(world);
        manager.act(world);
        if manager.queue.is_empty() {
            return done;
        }
        done.extend(manager.queue.iter().rev().map(word));
        while !manager.queue.is_empty() {
            manager.act(world);
        }
    }
    panic!("it does the same again and again: {done:?}");
}

fn word(actions: &Action) -> String {
    match actions {
        Action::Write(step, _) => format!("write {}", step.name()),
        Action::Create { epoch } => format!("create {epoch}"),
        Action::Open { node, .. } => format!("open {}", node.as_deref().unwrap_or("anywhere")),
        Action::Delete { pod, .. } => format!("delete {pod}"),
        Action::LetGo { pod, .. } => format!("let go {pod}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn order(world: &mut World, kind: OrderKind, node: &str) {
    world.order = Some(Order { uid: "job".to_owned(), node: node.to_owned(), kind, reason: PlacementReason::Gain });
}

/// A job that runs on node a.
fn running(on_sigterm: i32) -> World {
    let mut world = World::new(on_sigterm);
    order(&mut world, OrderKind::Place, "a");
    let done = work(&mut world);
    assert_eq!(done, ["hold", "write planned", "create 1", "write placed", "removeorder", "open a"]);
    world.schedule();
    world.kubelet("a");
    assert_eq!(work(&mut world), ["write running"]);
    assert_eq!(world.state(), State::Running);
    world
}

fn message(world: &World) -> String {
    world.job.as_ref().unwrap().status.message.clone()
}

#[test]
fn a_move_is_journalled_step_by_step() {
    let mut world = running(143);
    order(&mut world, OrderKind::Move, "b");
    assert_eq!(work(&mut world), ["write stopping", "removeorder", "delete run-1"]);
    assert_eq!(world.state(), State::Migrating);
    world.now += SignedDuration::from_secs(2);
    world.kubelet("a");
    assert_eq!(work(&mut world), ["write stopped", "create 2", "let go run-1", "write placed", "open b"]);
    world.now += SignedDuration::from_secs(1);
    world.schedule();
    world.kubelet("b");
    assert_eq!(work(&mut world), ["write running"]);
    let status = &world.job.as_ref().unwrap().status;
    let made = &status.last_moves[0];
    assert_eq!((made.from.as_str(), made.to.as_str(), made.save_s, made.restore_s), ("a", "b", 2.0, 1.0));
    assert_eq!((status.moves, status.failures, status.migration.is_none()), (1, 0, true));
    assert_eq!(status.attempt.as_ref().unwrap().epoch, 2);
    world.finish(0);
    assert_eq!(work(&mut world), ["write stopped", "let go run-2"]);
    assert_eq!(world.state(), State::Succeeded);
}

#[test]
fn a_job_on_another_share_gets_its_own_back_before_it_saves_itself() {
    for wait_s in [1, 3] {
        let mut world = running(143);
        world.pods.get_mut("run-1").unwrap().reshaped = true;
        world.changed();
        order(&mut world, OrderKind::Move, "b");
        assert_eq!(work(&mut world), ["write stopping", "removeorder"]);
        world.now += SignedDuration::from_secs(wait_s);
        assert_eq!(work(&mut world).is_empty(), wait_s < 2, "it is not waited for much longer");
        world.pods.get_mut("run-1").unwrap().reshaped = false;
        world.changed();
        work(&mut world);
        assert!(world.pods["run-1"].deleted.is_some());
    }
}

#[test]
fn a_job_that_ignores_sigterm_stays_and_says_so() {
    let mut world = running(137);
    order(&mut world, OrderKind::Move, "b");
    work(&mut world);
    world.now += SignedDuration::from_secs(31);
    world.kubelet("a");
    work(&mut world);
    world.schedule();
    world.kubelet("a");
    work(&mut world);
    let status = world.job.as_ref().unwrap().status.clone();
    assert_eq!((status.state, status.moves, status.failures), (State::Running, 0, 0));
    assert_eq!(status.attempt.unwrap().node.as_deref(), Some("a"));
    assert!(status.message.contains("it is not moved: it ignored SIGTERM"), "{}", status.message);
    order(&mut world, OrderKind::Move, "b");
    assert_eq!(work(&mut world), ["removeorder"], "it is not tried again");
}

#[test]
fn a_job_that_cannot_save_stays_and_says_so() {
    let mut world = running(1);
    order(&mut world, OrderKind::Move, "b");
    work(&mut world);
    world.kubelet("a");
    work(&mut world);
    world.schedule();
    world.kubelet("a");
    work(&mut world);
    let status = &world.job.as_ref().unwrap().status;
    assert_eq!((status.state, status.moves, status.failures), (State::Running, 0, 0));
    assert!(status.message.contains("saving on SIGTERM failed"), "{}", status.message);
}

#[test]
fn without_a_checkpoint_nothing_is_moved() {
    let mut world = running(143);
    world.change_job(|job| job.spec.checkpoint = None);
    assert!(movable(world.job.as_ref().unwrap()).unwrap_err().contains("spec.checkpoint"));
    order(&mut world, OrderKind::Move, "b");
    assert_eq!(work(&mut world), ["removeorder", "write noted"]);
    assert!(message(&world).contains("spec.checkpoint is missing"), "{}", message(&world));
}

#[test]
fn a_full_target_is_left_for_another() {
    let mut world = running(143);
    order(&mut world, OrderKind::Move, "b");
    work(&mut world);
    world.full.insert("b");
    world.kubelet("a");
    work(&mut world);
    world.schedule();
    assert_eq!(work(&mut world), ["write noted"]);
    assert!(message(&world).contains("no node takes the pod run-2"), "{}", message(&world));
    world.now += SignedDuration::from_secs(11);
    assert_eq!(work(&mut world), ["write stopping", "delete run-2", "write stopped", "create 3", "let go run-2"]);
    // The same node again is no answer.
    order(&mut world, OrderKind::Place, "b");
    world.now += SignedDuration::from_secs(3);
    assert_eq!(work(&mut world), ["write placed", "open anywhere", "removeorder"]);
    world.schedule();
    world.kubelet("a");
    work(&mut world);
    assert_eq!(world.state(), State::Running);
}

#[test]
fn a_silent_node_is_waited_for_and_a_gone_one_is_left() {
    let mut world = running(143);
    order(&mut world, OrderKind::Move, "b");
    work(&mut world);
    world.nodes.insert("a".to_owned(), NodeState::Silent);
    world.now += SignedDuration::from_secs(300);
    work(&mut world);
    assert!(message(&world).contains("out-of-service"), "{}", message(&world));
    assert_eq!(world.pods.len(), 1, "nothing is started while the stop is not proven");
    world.switch_off("a");
    work(&mut world);
    world.schedule();
    world.kubelet("b");
    work(&mut world);
    assert_eq!((world.state(), world.live.len()), (State::Running, 1));
}

#[test]
fn a_pod_removed_by_force_needs_a_word() {
    let mut world = running(143);
    world.remove_by_force();
    work(&mut world);
    assert!(message(&world).contains("gainshare.dev/stopped=run-1"), "{}", message(&world));
    world.live.clear();
    world.change_job(|job| job.declared_stopped = Some("run-1".to_owned()));
    assert!(work(&mut world).contains(&"create 2".to_owned()));
}

#[test]
fn failures_are_counted_and_pause() {
    let mut world = running(143);
    world.change_job(|job| job.spec.run_policy.backoff_limit = 1);
    world.finish(3);
    assert_eq!(work(&mut world), ["write stopped", "let go run-1"], "the next attempt waits");
    assert!(message(&world).contains("exit code 3"), "{}", message(&world));
    world.now += SignedDuration::from_secs(5);
    assert_eq!(work(&mut world), ["create 2", "write placed", "open anywhere"]);
    world.schedule();
    NODES.iter().for_each(|node| world.kubelet(node));
    work(&mut world);
    world.finish(3);
    work(&mut world);
    assert_eq!(world.state(), State::Failed);
    assert!(message(&world).contains("backoffLimit is 1"), "{}", message(&world));
}

#[test]
fn suspended_and_resumed() {
    let mut world = running(143);
    world.change_job(|job| job.spec.suspend = true);
    assert_eq!(work(&mut world), ["write stopping", "delete run-1"]);
    world.kubelet("a");
    assert_eq!(work(&mut world), ["write stopped", "let go run-1"]);
    assert_eq!(world.state(), State::Suspended);
    assert!(message(&world).contains("it saved itself"), "{}", message(&world));
    world.change_job(|job| job.spec.suspend = false);
    assert!(work(&mut world).contains(&"create 2".to_owned()));
}

#[test]
fn the_deadline_ends_a_job() {
    let mut world = running(143);
    world.change_job(|job| job.spec.run_policy.active_deadline_seconds = Some(60));
    assert!(work(&mut world).is_empty());
    world.now += SignedDuration::from_secs(61);
    work(&mut world);
    assert_eq!(world.job.as_ref().unwrap().status.attempt.as_ref().unwrap().stopping, Some(Stopping::Deadline));
    world.kubelet("a");
    work(&mut world);
    assert_eq!(world.state(), State::Failed);
}

#[test]
fn others_jobs_are_not_touched() {
    let mut world = World::new(143);
    world.change_job(|job| job.spec.managed_by = Some("example.com/other".to_owned()));
    assert!(work(&mut world).is_empty());
}

#[test]
fn an_impossible_template_fails_with_its_reason() {
    let mut world = World::new(143);
    world.change_job(|job| job.has_finalizer = true);
    let fault = PodFault { for_good: true, message: "template.spec.containers is missing".to_owned() };
    for _ in 0..2 {
        let job = world.job.clone().unwrap();
        let (nodes, pods) = (Nodes::new(), []);
        let snapshot = Snapshot {
            now: world.now,
            job: &job,
            pods: &pods,
            pod_is_missing: true,
            nodes: &nodes,
            order: None,
            fault: Some(&fault),
            progress: None,
        };
        if let Some(Action::Write(_, status)) = step(&snapshot).actions.first() {
            world.change_job(|job| job.status = (**status).clone());
        }
    }
    assert_eq!((world.state(), message(&world).as_str()), (State::Failed, "template.spec.containers is missing"));
}
