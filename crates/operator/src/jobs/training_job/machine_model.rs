//! A model API server, scheduler and kubelets around the real state machine, and everything that may go
//! wrong between them: executors that die between any two actions, two of them at once, copies that are
//! old by any amount, nodes that fall silent or vanish, pods removed by force.

use super::super::step;
use crate::jobs::training_job::action::{Action, Snapshot, Step};
use crate::state::orders::{Order, OrderKind};
use crate::state::snapshot::{Exit, JobSnapshot, NodeState, Nodes, Phase, PodSnapshot};
use gainshare_core::invariants::{BrokenInvariant, Invariants, Observation};
use gainshare_kube_api::names::{NodeName, PodUid};
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::training_job::{Checkpoint, State, TrainingJobSpec};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

pub(super) const NODES: [&str; 3] = ["a", "b", "c"];
pub(super) const GRACE: SignedDuration = SignedDuration::from_secs(30);

/// A check that a test turns off, to see that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Safeguard {
    /// The next attempt begins only after the proof that this one has stopped.
    ProofOfStop,
    /// A silent or missing node may still run its pods.
    SilentNode,
}

/// The true state, as opposed to copies of it.
pub(super) struct World {
    /// The check that is turned off.
    pub(super) off: Option<Safeguard>,
    pub(super) now: Timestamp,
    /// `None` when the object is gone.
    pub(super) job: Option<JobSnapshot>,
    pub(super) pods: BTreeMap<String, PodSnapshot>,
    pub(super) pins: BTreeMap<PodUid, Option<NodeName>>,
    pub(super) nodes: Nodes,
    /// Nodes that nothing fits on.
    pub(super) full: BTreeSet<&'static str>,
    /// Uids of pods whose processes really run, and their nodes.
    pub(super) live: BTreeMap<PodUid, String>,
    /// What the job does on SIGTERM: its exit code.
    pub(super) on_sigterm: i32,
    pub(super) version: u64,
    pub(super) uids: u64,
    /// All states that a reader may have read, oldest first.
    pub(super) past: Vec<(Option<JobSnapshot>, Vec<PodSnapshot>)>,
    /// What did not hold after some change.
    pub(super) broken: Vec<BrokenInvariant>,
    pub(super) order: Option<Order>,
}

/// An operator: what it has read, and what it is about to do.
#[derive(Default)]
pub(super) struct Executor {
    pub(super) job: usize,
    pub(super) pods: usize,
    /// A written object that came back, newer than `past[job]`.
    pub(super) written: Option<JobSnapshot>,
    pub(super) queue: Vec<Action>,
    /// The version of the job that the queue was decided on.
    pub(super) based_on: String,
    pub(super) clock_is_off_by: SignedDuration,
}

impl World {
    pub(super) fn new(on_sigterm: i32) -> World {
        let spec = TrainingJobSpec {
            checkpoint: Some(Checkpoint { claim_name: "c".to_owned(), path: "/c".to_owned(), sub_path: None }),
            ..TrainingJobSpec::default()
        };
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let job =
            JobSnapshot { name: "run".to_owned(), uid: "job".into(), created: now, spec, ..JobSnapshot::default() };
        let mut world = World {
            off: None,
            now,
            job: Some(job),
            pods: BTreeMap::new(),
            pins: BTreeMap::new(),
            nodes: NODES.iter().map(|node| ((*node).into(), NodeState::Ready)).collect(),
            full: BTreeSet::new(),
            live: BTreeMap::new(),
            on_sigterm,
            version: 1,
            uids: 0,
            past: Vec::new(),
            broken: Vec::new(),
            order: None,
        };
        world.changed();
        world
    }

    pub(super) fn changed(&mut self) {
        self.version += 1;
        self.broken.extend(Invariants::default().check(&self.observe()));
        self.past.push((self.job.clone(), self.pods.values().cloned().collect()));
    }

    /// The attempts that really run.
    pub(super) fn observe(&self) -> Observation {
        let mut observation = Observation::default();
        self.live.keys().for_each(|uid| observation.add_live("run", uid, None));
        observation
    }

    pub(super) fn state(&self) -> State {
        self.job.as_ref().map_or(State::Succeeded, |job| job.status.state)
    }

    pub(super) fn change_job(&mut self, change: impl FnOnce(&mut JobSnapshot)) {
        self.version += 1;
        let version = self.version.to_string();
        if let Some(job) = &mut self.job {
            change(job);
            job.resource_version = version;
        }
        self.changed();
    }

    pub(super) fn with_uid(&mut self, pod: &str, uid: &PodUid) -> Option<&mut PodSnapshot> {
        self.pods.get_mut(pod).filter(|pod| pod.uid == *uid)
    }

    /// The API server removes what was deleted, has nothing that holds it, and runs nowhere.
    pub(super) fn collect(&mut self) {
        let nodes = self.nodes.clone();
        self.pods.retain(|_, pod| pod.deleted.is_none() || pod.has_finalizer || pod.stop(&nodes).is_none());
        self.changed();
    }

    pub(super) fn create(&mut self, epoch: u32) {
        let name = format!("run-{epoch}");
        if self.pods.contains_key(&name) || self.job.is_none() {
            return;
        }
        self.uids += 1;
        let pod = PodSnapshot {
            name: name.clone(),
            uid: format!("pod{}", self.uids).into(),
            owner: Some("job".into()),
            epoch,
            created: self.now,
            gated: true,
            has_finalizer: true,
            ..PodSnapshot::default()
        };
        self.pods.insert(name, pod);
        self.changed();
    }

    pub(super) fn open(&mut self, pod: &str, uid: &PodUid, node: Option<NodeName>) {
        if let Some(found) = self.with_uid(pod, uid).filter(|pod| pod.gated) {
            found.gated = false;
            self.pins.insert(uid.clone(), node);
            self.changed();
        }
    }

    pub(super) fn delete(&mut self, pod: &str, uid: &PodUid) {
        let now = self.now;
        if let Some(found) = self.with_uid(pod, uid).filter(|pod| pod.deleted.is_none()) {
            let grace = if found.node.is_some() { GRACE } else { SignedDuration::ZERO };
            found.deleted = Some((now, now + grace));
            self.collect();
        }
    }

    pub(super) fn schedule(&mut self) {
        let (nodes, full, now, pins) = (self.nodes.clone(), self.full.clone(), self.now, self.pins.clone());
        for pod in self.pods.values_mut().filter(|pod| !pod.gated && pod.node.is_none() && pod.deleted.is_none()) {
            let pin = pins.get(&pod.uid).cloned().flatten();
            let fits = |node: &&&str| {
                nodes.get(**node) == Some(&NodeState::Ready)
                    && !full.contains(**node)
                    && pin.as_deref().is_none_or(|pin| pin == **node)
            };
            match NODES.iter().find(fits) {
                Some(node) => pod.node = Some((*node).into()),
                None => {
                    pod.unschedulable.get_or_insert((now, "0/3 nodes are available".to_owned()));
                }
            }
        }
        self.changed();
    }

    /// A kubelet looks at its pods, and reports.
    pub(super) fn kubelet(&mut self, node: &str) {
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
        // The process of a pod whose object was removed by force: the kubelet ends it when it
        // notices.
        self.collect();
    }

    /// What runs comes to its own end.
    pub(super) fn finish(&mut self, code: i32) {
        let now = self.now;
        let ready: Vec<PodUid> = self.live.keys().cloned().collect();
        for pod in self.pods.values_mut().filter(|pod| ready.contains(&pod.uid)) {
            if self.nodes.get(pod.node.as_deref().unwrap_or_default()) == Some(&NodeState::Ready) {
                self.live.remove(&pod.uid);
                end(pod, code, now);
            }
        }
        self.collect();
    }

    pub(super) fn switch_off(&mut self, node: &str) {
        self.nodes.insert(node.into(), NodeState::Off);
        self.live.retain(|_, on| on != node);
        self.changed();
    }

    /// The finalizer is removed and the object is deleted by force; the process goes on.
    pub(super) fn remove_by_force(&mut self) {
        self.pods.retain(|_, pod| pod.gated);
        self.changed();
    }
}

pub(super) fn end(pod: &mut PodSnapshot, code: i32, now: Timestamp) {
    pod.running = false;
    pod.phase = if code == 0 { Phase::Succeeded } else { Phase::Failed };
    // A job that ignores SIGTERM is killed when its grace period is over.
    let killed = pod.deleted.filter(|_| code == 137).map(|(_, until)| until);
    pod.exit = Some(Exit { code, finished: killed.unwrap_or(now), ..Exit::default() });
}

impl Executor {
    /// Reads on, by as much as the watch happens to deliver.
    pub(super) fn read(&mut self, world: &World, job: usize, pods: usize) {
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

    pub(super) fn fresh(&mut self, world: &World) {
        self.read(world, usize::MAX / 2, usize::MAX / 2);
    }

    pub(super) fn next(&self, world: &World) -> Step {
        let (job, pods) = (&world.past[self.job].0, &world.past[self.pods].1);
        let Some(job) = self.written.as_ref().or(job.as_ref()) else { return Step::default() };
        let named = job.status.attempt.as_ref();
        // Absence is asked of the API server itself, as the controller does.
        let pod_is_missing = named.is_some_and(|attempt| !world.pods.contains_key(&attempt.pod));
        let (mut job, mut nodes) = (job.clone(), world.nodes.clone());
        match world.off {
            Some(Safeguard::ProofOfStop) => job.declared_stopped = named.map(|attempt| attempt.pod.clone()),
            Some(Safeguard::SilentNode) => {
                let doubtful = |state: &&mut NodeState| matches!(state, NodeState::Silent | NodeState::Missing);
                nodes.values_mut().filter(doubtful).for_each(|state| *state = NodeState::Off);
            }
            _ => {}
        }
        step(&Snapshot {
            pod_is_missing,
            order: world.order.as_ref(),
            ..Snapshot::plain(world.now + self.clock_is_off_by, &job, pods, &nodes)
        })
    }

    /// Decides if there is nothing left to do, then does one thing.
    pub(super) fn act(&mut self, world: &mut World) {
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
pub(super) enum Op {
    /// One of two operators reads so far on, and does one thing.
    Act {
        which: usize,
        job: usize,
        pods: usize,
    },
    /// The operator dies and starts again, with fresh lists.
    Crash(usize),
    Schedule,
    Kubelet(usize),
    Finish(i32),
    Silent(usize),
    /// The Node object is deleted, and the machine runs on, cut off.
    Missing(usize),
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

pub(super) fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        30 => (0..2usize, 0..4usize, 0..4usize).prop_map(|(which, job, pods)| Op::Act { which, job, pods }),
        20 => Just(Op::Act { which: 0, job: 1000, pods: 1000 }),
        3 => (0..2usize).prop_map(Op::Crash),
        8 => Just(Op::Schedule),
        12 => (0..3usize).prop_map(Op::Kubelet),
        2 => prop_oneof![Just(0), Just(1), Just(137), Just(143)].prop_map(Op::Finish),
        1 => (0..3usize).prop_map(Op::Silent),
        1 => (0..3usize).prop_map(Op::Missing),
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

pub(super) fn play(world: &mut World, operators: &mut [Executor; 2], op: &Op) {
    match *op {
        Op::Act { which, job, pods } => {
            operators[which].read(world, job, pods);
            operators[which].act(world);
        }
        Op::Crash(which) => {
            operators[which] = Executor::default();
            operators[which].fresh(world);
        }
        Op::Schedule => world.schedule(),
        Op::Kubelet(node) => world.kubelet(NODES[node]),
        Op::Finish(code) => world.finish(code),
        Op::Silent(node) | Op::Missing(node) | Op::Back(node) if world.nodes[NODES[node]] == NodeState::Off => {}
        Op::Silent(node) => drop(world.nodes.insert(NODES[node].into(), NodeState::Silent)),
        Op::Missing(node) => drop(world.nodes.insert(NODES[node].into(), NodeState::Missing)),
        Op::Back(node) => drop(world.nodes.insert(NODES[node].into(), NodeState::Ready)),
        Op::Off(node) => world.switch_off(NODES[node]),
        Op::Full(node, true) => drop(world.full.insert(NODES[node])),
        Op::Full(node, false) => drop(world.full.remove(NODES[node])),
        Op::Order(node, place) => {
            let kind = if place { OrderKind::Place } else { OrderKind::Move };
            world.order =
                Some(Order { uid: "job".into(), node: NODES[node].into(), kind, reason: PlacementReason::Gain });
        }
        Op::Tick(s) => world.now += SignedDuration::from_secs(s),
        Op::Suspend(suspend) => world.change_job(|job| job.spec.suspend = suspend),
        Op::RemoveByForce => world.remove_by_force(),
        Op::DeletePod => {
            let pods: Vec<(String, PodUid)> =
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
pub(super) fn in_peace(world: &mut World, operator: &mut Executor) -> usize {
    world.full.clear();
    world.change_job(|job| job.spec.suspend = false);
    for node in NODES {
        if matches!(world.nodes[node], NodeState::Silent | NodeState::Missing) {
            world.nodes.insert(node.into(), NodeState::Ready);
        }
    }
    operator.queue.clear();
    for round in 0..400 {
        operator.fresh(world);
        for _ in 0..20 {
            operator.act(world);
            operator.fresh(world);
        }
        let gone = world.job.is_none();
        if gone
            || (matches!(world.state(), State::Succeeded | State::Failed) && operator.next(world).actions.is_empty())
        {
            return round;
        }
        world.schedule();
        NODES.iter().for_each(|node| world.kubelet(node));
        world.now += SignedDuration::from_secs(5);
        if round % 3 == 2 {
            world.finish(0);
            // The administrator who removed pods by force makes sure that they have ended, and
            // declares it.
            let known: BTreeSet<&PodUid> = world.pods.values().map(|pod| &pod.uid).collect();
            world.live = world.live.clone().into_iter().filter(|(uid, _)| known.contains(uid)).collect();
            let lost = world.job.as_ref().and_then(|job| job.status.attempt.as_ref()).map(|a| a.pod.clone());
            if let Some(lost) = lost.filter(|pod| !world.pods.contains_key(pod)) {
                world.change_job(|job| job.declared_stopped = Some(lost));
            }
        }
    }
    panic!("it never ends: {:?} {:?}", world.job.as_ref().map(|job| &job.status), world.pods);
}
