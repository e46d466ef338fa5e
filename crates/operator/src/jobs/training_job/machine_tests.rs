//! Tests of [`super`] in a model cluster. What always holds there: `never_two_live_attempts`, `always_ends`.

#[path = "machine_faults.rs"]
mod faults;
#[path = "machine_model.rs"]
mod model;
#[path = "machine_step_tests.rs"]
mod steps;

use super::{movable, step};
use crate::jobs::pods::PodFault;
use crate::jobs::training_job::action::{Action, Snapshot};
use crate::state::orders::{Order, OrderKind};
use crate::state::snapshot::{NodeState, Nodes};
use gainshare_kube_api::immovable::ImmovableReason;
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::training_job::{State, StopReason};
use jiff::SignedDuration;
use model::*;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn never_two_live_attempts_and_always_ends(
        ops in ops(),
        on_sigterm in prop_oneof![4 => Just(143), 1 => Just(0), 1 => Just(1), 1 => Just(137)],
    ) {
        let mut world = World::new(on_sigterm);
        let mut operators = [Executor::default(), Executor::default()];
        for op in &ops {
            play(&mut world, &mut operators, op);
            prop_assert!(world.broken.is_empty(), "{:?} after {op:?}", world.broken);
        }
        let [mut operator, _] = operators;
        in_peace(&mut world, &mut operator);
        prop_assert!(world.broken.is_empty(), "{:?}", world.broken);
        // A pod that was made for a job that had just gone has no owner: the controller releases
        // it, and it never ran.
        let held = world.pods.values().find(|pod| pod.has_finalizer && (world.job.is_some() || !pod.gated));
        prop_assert!(held.is_none(), "a pod is held: {held:?}");
    }
}

/// Lets one operator work until it has nothing to do. Answers what it did.
fn work(world: &mut World) -> Vec<String> {
    let mut operator = Executor::default();
    let mut done = Vec::new();
    for _ in 0..50 {
        operator.fresh(world);
        operator.act(world);
        if operator.queue.is_empty() {
            return done;
        }
        done.extend(operator.queue.iter().rev().map(word));
        while !operator.queue.is_empty() {
            operator.act(world);
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
    world.order = Some(Order { uid: "job".into(), node: node.into(), kind, reason: PlacementReason::Gain });
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
    assert_eq!(movable(world.job.as_ref().unwrap()), Err(ImmovableReason::NoCheckpoint));
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

/// A job is about to leave a node of which the stop of its pod cannot be proven: it waits with this message, and goes
/// on elsewhere when the node is off.
fn waits_until_the_node_is_off(state: NodeState, expected: &str) {
    let mut world = running(143);
    order(&mut world, OrderKind::Move, "b");
    work(&mut world);
    world.nodes.insert("a".into(), state);
    world.now += SignedDuration::from_secs(300);
    work(&mut world);
    assert!(message(&world).contains(expected), "{}", message(&world));
    assert_eq!(world.pods.len(), 1, "nothing is started while the stop is not proven");
    world.switch_off("a");
    work(&mut world);
    world.schedule();
    world.kubelet("b");
    work(&mut world);
    assert_eq!((world.state(), world.live.len()), (State::Running, 1));
}

#[test]
fn a_silent_node_is_waited_for_and_a_gone_one_is_left() {
    waits_until_the_node_is_off(NodeState::Silent, "out-of-service");
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
    assert_eq!(world.job.as_ref().unwrap().status.attempt.as_ref().unwrap().stopping, Some(StopReason::Deadline));
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
        let snapshot =
            Snapshot { pod_is_missing: true, fault: Some(&fault), ..Snapshot::plain(world.now, &job, &pods, &nodes) };
        if let Some(Action::Write(_, status)) = step(&snapshot).actions.first() {
            world.change_job(|job| job.status = (**status).clone());
        }
    }
    assert_eq!((world.state(), message(&world).as_str()), (State::Failed, "template.spec.containers is missing"));
}

#[test]
fn a_missing_node_object_is_no_proof_of_stop() {
    waits_until_the_node_is_off(NodeState::Missing, "the Node object of a is gone");
}

#[test]
fn the_last_epoch_fails_the_job() {
    let mut world = running(143);
    world.change_job(|job| job.status.attempt.as_mut().unwrap().epoch = u32::MAX);
    work(&mut world);
    assert_eq!(world.state(), State::Failed);
    assert!(message(&world).contains("create the job again"), "{}", message(&world));
}
