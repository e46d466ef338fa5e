//! A simulated Job controller, kubelets and people around the real state machine, with two operators
//! that die or are slow between any two actions. What always holds: `never_two_live_attempts`, and the
//! Job always goes on.

use super::*;
use crate::state::snapshot::{Exit, NodeState, Phase as PodPhase};
use gainshare_core::invariants::{BrokenInvariant, Invariants, Observation};
use gainshare_kube_api::names::PodUid;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[path = "machine_crash_tests.rs"]
mod machine_crash_tests;

const NODES: [&str; 3] = ["a", "b", "c"];

/// The truth.
struct World {
    now: Timestamp,
    job: BatchJobSnapshot,
    version: u64,
    pods: BTreeMap<String, PodSnapshot>,
    /// Uids of pods whose processes really run.
    live: BTreeMap<PodUid, String>,
    nodes: Nodes,
    on_sigterm: i32,
    pods_made: u32,
    /// What did not hold after some event.
    broken: Vec<BrokenInvariant>,
}

/// What an operator has decided and not done yet, and on which version of the Job.
#[derive(Default)]
struct Operator(Vec<Action>, String);

impl World {
    fn new(on_sigterm: i32) -> World {
        let job = BatchJobSnapshot {
            name: "run".into(),
            uid: "job".into(),
            asked: true,
            grace_s: 30,
            ..BatchJobSnapshot::default()
        };
        let nodes = NODES.iter().map(|node| ((*node).into(), NodeState::Ready)).collect();
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let (pods, live) = (BTreeMap::new(), BTreeMap::new());
        World { now, job, version: 1, pods, live, nodes, on_sigterm, pods_made: 0, broken: Vec::new() }
    }

    fn touch(&mut self) {
        self.version += 1;
        self.job.resource_version = self.version.to_string();
    }

    /// The cluster's own Job controller, with `podReplacementPolicy: Failed`, and its clean-up
    /// after nodes that are gone.
    fn controller(&mut self, choice: usize) {
        let is_off = |pod: &PodSnapshot| pod.node.as_ref().is_some_and(|node| self.nodes[node] == NodeState::Off);
        let until = (self.now, self.now);
        for pod in self.pods.values_mut().filter(|pod| is_off(pod) && !matches!(pod.phase, PodPhase::Succeeded)) {
            (pod.running, pod.phase, pod.deleted) = (false, PodPhase::Failed, pod.deleted.or(Some(until)));
        }
        self.pods.retain(|_, pod| !is_off(pod) || pod.has_finalizer);
        let over = |pod: &PodSnapshot| matches!(pod.phase, PodPhase::Succeeded | PodPhase::Failed);
        if self.pods.values().any(|pod| pod.phase == PodPhase::Succeeded && pod.deleted.is_none()) {
            self.job.ended = true;
        }
        if self.job.ended {
            return;
        }
        if self.job.suspended {
            let until = (self.now, self.now + SignedDuration::from_secs(30));
            self.pods
                .values_mut()
                .filter(|pod| !over(pod) && pod.deleted.is_none())
                .for_each(|pod| pod.deleted = Some(until));
            return;
        }
        let free: Vec<&str> = NODES.into_iter().filter(|node| self.nodes[*node] == NodeState::Ready).collect();
        if self.pods.values().all(over) && !free.is_empty() {
            self.pods_made += 1;
            let name = format!("run-{}", self.pods_made);
            let wanted = self.job.journal.prefers.as_deref().filter(|node| free.contains(node));
            let node = wanted.or(free.get(choice % free.len()).copied()).map(NodeName::from);
            let pod = PodSnapshot {
                uid: name.as_str().into(),
                name: name.clone(),
                owner: Some("job".into()),
                node,
                ..PodSnapshot::default()
            };
            self.pods.insert(name, pod);
            self.job.has_start_time = true;
            self.touch();
        }
    }

    fn kubelet(&mut self, node: &str) {
        if self.nodes[node] != NodeState::Ready {
            return;
        }
        for pod in self.pods.values_mut().filter(|pod| pod.node.as_deref() == Some(node)) {
            if pod.deleted.is_some() && self.live.remove(&pod.uid).is_some() {
                pod.running = false;
                pod.phase = if self.on_sigterm == 0 { PodPhase::Succeeded } else { PodPhase::Failed };
                let finished = pod.deleted.map(|(_, until)| until).unwrap_or_default();
                pod.exit = Some(Exit { code: self.on_sigterm, finished, ..Exit::default() });
            } else if pod.phase == PodPhase::Pending && pod.deleted.is_some() {
                pod.phase = PodPhase::Failed;
            } else if pod.phase == PodPhase::Pending {
                (pod.phase, pod.running) = (PodPhase::Running, true);
                self.live.insert(pod.uid.clone(), node.to_owned());
            }
        }
        self.pods.retain(|_, pod| {
            pod.deleted.is_none() || pod.has_finalizer || matches!(pod.phase, PodPhase::Pending | PodPhase::Running)
        });
    }

    /// Reads everything, and decides if nothing is left to do.
    fn decide(&self, operator: &mut Operator, order: Option<&str>) {
        if operator.0.is_empty() {
            let order = order.map(|node| Order {
                uid: "job".into(),
                node: node.into(),
                kind: OrderKind::Move,
                reason: PlacementReason::Gain,
            });
            let pods: Vec<PodSnapshot> = self.pods.values().cloned().collect();
            let (job, nodes) = (&self.job, &self.nodes);
            let next = step(&Snapshot {
                now: self.now,
                job,
                pods: &pods,
                nodes,
                order: order.as_ref(),
                closed: None,
                off: false,
                marks: Marks::default(),
            });
            *operator = Operator(next.actions, self.job.resource_version.clone());
        }
    }

    /// Does one thing; what was decided on an older version of the Job is refused.
    fn act(&mut self, operator: &mut Operator) {
        if operator.0.is_empty() {
            return;
        }
        let actions = operator.0.remove(0);
        if let Action::Hold(pod) | Action::LetGo(pod) | Action::Mark(pod, _) = &actions {
            if let Some(snapshot) = self.pods.get_mut(pod.uid.as_str()) {
                match &actions {
                    Action::Hold(_) => snapshot.has_finalizer |= snapshot.deleted.is_none(),
                    Action::LetGo(_) => snapshot.has_finalizer = false,
                    Action::Mark(_, true) => snapshot.job = "run".to_owned(),
                    _ => snapshot.job.clear(),
                }
            }
            return;
        }
        if operator.1 != self.job.resource_version {
            return operator.0.clear();
        }
        match actions {
            Action::Write(_, journal) => (self.job.journal, self.job.has_journal) = (*journal, true),
            Action::Suspend => self.job.suspended = true,
            Action::ClearStartTime => {
                assert!(self.job.suspended, "the API server refuses that");
                self.job.has_start_time = false;
            }
            Action::Resume(_, journal) => {
                let changes = journal.prefers != self.job.journal.prefers;
                assert!(!changes || self.job.suspended && !self.job.has_start_time, "a template that cannot change");
                (self.job.journal, self.job.suspended) = (*journal, false);
            }
            Action::Forget => (self.job.journal, self.job.has_journal) = (Journal::default(), false),
            _ => {}
        }
        self.touch();
        operator.1 = self.job.resource_version.clone();
    }
}

#[derive(Debug, Clone)]
enum Event {
    Operator {
        second: bool,
        dies: bool,
        order: Option<usize>,
    },
    Controller(usize),
    Kubelet(usize),
    /// The pods are deleted.
    Delete,
    /// Pods that are ending are removed by force.
    Force,
    /// People suspend and resume.
    Suspend(bool),
    Silent(usize, bool),
    Off(usize),
}

fn event() -> impl Strategy<Value = Event> {
    let operator = (any::<bool>(), prop::bool::weighted(0.2), prop::option::weighted(0.5, 0..3_usize));
    prop_oneof![
        8 => operator.prop_map(|(second, dies, order)| Event::Operator { second, dies, order }),
        4 => (0..3_usize).prop_map(Event::Controller),
        6 => (0..3_usize).prop_map(Event::Kubelet),
        1 => Just(Event::Delete),
        1 => Just(Event::Force),
        1 => any::<bool>().prop_map(Event::Suspend),
        1 => (0..3_usize, any::<bool>()).prop_map(|(node, on)| Event::Silent(node, on)),
        1 => (1..3_usize).prop_map(Event::Off),
    ]
}

fn happen(world: &mut World, operators: &mut [Operator; 2], event: &Event) {
    match event {
        Event::Operator { second, dies, order } => {
            let operator = &mut operators[usize::from(*second)];
            if *dies {
                operator.0.clear();
            }
            world.decide(operator, order.map(|node| NODES[node]));
            world.act(operator);
        }
        Event::Controller(choice) => world.controller(*choice),
        Event::Kubelet(node) => world.kubelet(NODES[*node]),
        Event::Delete => {
            let until = (world.now, world.now + SignedDuration::from_secs(30));
            let alive =
                world.pods.values_mut().filter(|pod| matches!(pod.phase, PodPhase::Pending | PodPhase::Running));
            alive.for_each(|pod| pod.deleted = pod.deleted.or(Some(until)));
        }
        // The Job controller's own finalizer keeps the pods of a Job that is not suspended. What
        // people do to a Job that they suspended themselves is theirs.
        Event::Force if world.job.suspended && world.job.journal.migration.is_some() => {
            world
                .pods
                .retain(|_, pod| pod.deleted.is_none() || pod.has_finalizer || !world.live.contains_key(&pod.uid));
        }
        Event::Force => {}
        Event::Suspend(on) if world.job.journal.migration.is_none() => {
            world.job.suspended = *on;
            world.touch();
        }
        Event::Suspend(_) => {}
        Event::Silent(node, on) => {
            let state = world.nodes.get_mut(NODES[*node]).unwrap();
            if *state != NodeState::Off {
                *state = if *on { NodeState::Silent } else { NodeState::Ready };
            }
        }
        Event::Off(node) => {
            // Taken away, and what ran there with it.
            world.nodes.insert(NODES[*node].into(), NodeState::Off);
            world.live.retain(|_, on| on != NODES[*node]);
        }
    }
    world.now += SignedDuration::from_secs(1);
    let mut observation = Observation::default();
    world.live.keys().for_each(|uid| observation.add_live("run", uid, None));
    world.broken.extend(Invariants::default().check(&observation));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn never_two_live_attempts(
        events in prop::collection::vec(event(), 0..120),
        on_sigterm in prop::sample::select(vec![143, 0, 137, 5]),
    ) {
        let mut world = World::new(on_sigterm);
        let mut operators = [Operator::default(), Operator::default()];
        for event in &events {
            happen(&mut world, &mut operators, event);
            prop_assert!(world.broken.is_empty(), "{event:?}: {:?}", world.broken);
        }
        // Quiet comes back: the Job runs once, or has ended, and nothing is held.
        for round in 0..60 {
            let quiet = [Event::Silent(0, false), Event::Silent(1, false), Event::Silent(2, false), Event::Suspend(false)];
            quiet.iter().for_each(|event| happen(&mut world, &mut operators, event));
            let second = round % 2 == 1;
            happen(&mut world, &mut operators, &Event::Operator { second, dies: false, order: None });
            happen(&mut world, &mut operators, &Event::Controller(0));
            (0..3).for_each(|node| happen(&mut world, &mut operators, &Event::Kubelet(node)));
            prop_assert!(world.broken.is_empty(), "{:?}", world.broken);
        }
        let journal = &world.job.journal;
        // An administrator's declaration is needed where our finalizer was removed by force.
        let waits = journal.message.contains("removed by force");
        prop_assert!(world.job.ended || waits || (world.live.len() == 1 && !world.job.suspended), "{journal:?}");
        prop_assert!(waits || journal.migration.is_none(), "{journal:?}");
        prop_assert!(world.pods.values().all(|pod| !pod.has_finalizer));
    }
}

#[test]
fn a_move_saves_stops_and_resumes_at_its_target() {
    for (on_sigterm, ends_on, moves) in [(143, "b", 1), (137, "a", 0), (5, "a", 0)] {
        let mut world = World::new(on_sigterm);
        let mut operators = [Operator::default(), Operator::default()];
        world.controller(0);
        world.kubelet("a");
        for round in 0..40 {
            let order = (round < 3).then_some(1);
            happen(&mut world, &mut operators, &Event::Operator { second: false, dies: false, order });
            happen(&mut world, &mut operators, &Event::Controller(2));
            (0..3).for_each(|node| happen(&mut world, &mut operators, &Event::Kubelet(node)));
        }
        let journal = &world.job.journal;
        assert_eq!(world.live.values().map(String::as_str).collect::<Vec<_>>(), [ends_on], "{journal:?}");
        assert_eq!((journal.moves, journal.migration.is_none(), world.pods_made), (moves, true, 2), "{journal:?}");
        assert_eq!(journal.unmovable.is_some(), moves == 0, "{journal:?}");
    }
}

#[test]
fn a_job_that_is_let_go_keeps_nothing_of_ours_that_can_be_taken_off() {
    let mut job =
        BatchJobSnapshot { name: "run".into(), has_journal: true, has_start_time: true, ..BatchJobSnapshot::default() };
    let decide = |job: &BatchJobSnapshot, pods: &[PodSnapshot]| {
        step(&Snapshot {
            now: Timestamp::UNIX_EPOCH,
            job,
            pods,
            nodes: &Nodes::new(),
            order: None,
            closed: None,
            off: false,
            marks: Marks::default(),
        })
        .actions
    };
    assert_eq!(decide(&job, &[]), [Action::Forget]);
    job.journal.prefers = Some("a".into());
    let running =
        PodSnapshot { name: "p".into(), uid: "p".into(), job: "run".into(), running: true, ..PodSnapshot::default() };
    let pod = StoppedPod { name: "p".into(), uid: "p".into() };
    assert_eq!(decide(&job, &[running]), [Action::Mark(pod, false)], "its template is out of reach while it runs");
    job.suspended = true;
    assert_eq!(decide(&job, &[]), [Action::ClearStartTime]);
    job.has_start_time = false;
    assert_eq!(decide(&job, &[]), [Action::Forget]);
}
