//! Deterministic fault simulation of the move protocol of TrainingJobs.
//!
//! **How.** The real state machine runs for two operators in the model cluster of [`super::model`]. A seed fixes
//! the order of everything: which operator acts, how old its copies are, which nodes fail. On top of that model,
//! requests to the API server are lost before or after they take effect, are sent twice, or arrive much later
//! than the operator has given them up; clocks of operators are wrong by an hour; and the job trains and saves
//! itself into a claim that outlives its pods. After every step [`Invariants`] checks I1, I3 and I4. At the end the
//! faults stop, and the job must come to an end.
//!
//! **Use.** As for the daemon's part: `cargo xtask faultsim`.

use super::model::*;
use crate::jobs::training_job::action::Action;
use gainshare_core::invariants::{BrokenInvariant, Invariants};
use gainshare_core::seeds::{Campaign, Dice, first_failure};
use gainshare_kube_api::names::PodUid;
use jiff::SignedDuration;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::collections::BTreeMap;

const CAMPAIGN: Campaign = Campaign {
    part: "move",
    package: "gainshare-operator",
    test: "machine::tests::faults::every_seed_holds_the_invariants",
    kept: include_str!("machine_faults.txt"),
    kept_in: "crates/operator/src/jobs/training_job/machine_faults.txt",
    few: 500,
};

const JOB: &str = "run";

/// The job's own state: what its live attempts have reached, and what is saved.
struct Training {
    invariants: Invariants,
    /// By the uid of the pod: the step at which it started, and the step that it has reached.
    steps: BTreeMap<PodUid, (u64, u64)>,
    /// The checkpoint in the claim.
    saved: u64,
}

impl Training {
    /// Processes start and end as they do in the cluster. Checks everything that can be observed.
    fn observe(&mut self, world: &World) -> Result<(), BrokenInvariant> {
        self.steps.retain(|uid, _| world.live.contains_key(uid));
        let mut observation = world.observe();
        for uid in world.live.keys() {
            let (from, _) = *self.steps.entry(uid.clone()).or_insert((self.saved, self.saved));
            observation.add_live(JOB, uid, Some(from));
        }
        observation.add_checkpoint(JOB, self.saved);
        observation.set_recorded(world.job.iter().map(|job| &job.name));
        self.invariants.check_first(&observation)
    }

    fn train(&mut self, dice: &mut Dice) {
        self.steps.values_mut().for_each(|(_, step)| *step += 1 + dice.number() % 5);
        let live: Vec<u64> = self.steps.values().map(|(_, step)| *step).collect();
        if let Some(step) = live.get(dice.below(live.len())).filter(|_| dice.percent(40)) {
            self.saved = *step;
        }
    }
}

/// The operations of a seed, drawn from the same strategy as those of the property test.
fn operations(seed: u64) -> Vec<Op> {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let mut draw = || ops().new_tree(&mut runner).expect("the strategy filters nothing").current();
    let all: Vec<Op> = (0..4).flat_map(|_| draw()).collect();
    // What ends the job for good, or waits for a person, would leave little to simulate.
    let is_short = seed.is_multiple_of(4);
    all.into_iter()
        .filter(|op| is_short || !matches!(op, Op::DeleteJob | Op::RemoveByForce | Op::Finish(_) | Op::Off(_)))
        .collect()
}

/// Sends the operator's next request through a network with faults. Answers how many faults were injected.
fn send(world: &mut World, operator: &mut Executor, late: &mut Vec<Executor>, dice: &mut Dice) -> u64 {
    let copy = |operator: &Executor, action: Action| Executor {
        queue: vec![action],
        based_on: operator.based_on.clone(),
        ..Executor::default()
    };
    let Some(action) = operator.queue.last().cloned() else {
        operator.act(world);
        return 0;
    };
    match dice.below(20) {
        // Lost before it took effect; the operator reads again.
        0 => operator.queue.clear(),
        // Its answer is lost.
        1 => {
            copy(operator, action).act(world);
            operator.queue.clear();
        }
        // Sent twice.
        2 => {
            copy(operator, action).act(world);
            operator.act(world);
        }
        // Given up by the operator, and delivered later.
        3 => {
            late.push(copy(operator, action));
            operator.queue.clear();
        }
        _ => {
            operator.act(world);
            return 0;
        }
    }
    1
}

fn run_seed(seed: u64, off: Option<Safeguard>) -> Result<u64, String> {
    let mut dice = Dice::new(seed, "network");
    let on_sigterm = dice.weighted(&[(4, 143), (1, 0), (1, 1), (1, 137)]);
    let mut world = World::new(on_sigterm);
    world.off = off;
    let mut operators = [Executor::default(), Executor::default()];
    let mut late: Vec<Executor> = Vec::new();
    let mut training = Training { invariants: Invariants::default(), steps: BTreeMap::new(), saved: 0 };
    training.invariants.acknowledge(JOB);
    let mut injected = 0;
    for op in operations(seed) {
        match &op {
            Op::Act { which, job, pods } => {
                operators[*which].read(&world, *job, *pods);
                injected += send(&mut world, &mut operators[*which], &mut late, &mut dice);
            }
            _ => play(&mut world, &mut operators, &op),
        }
        injected += u64::from(!matches!(op, Op::Act { .. } | Op::Schedule | Op::Kubelet(_) | Op::Tick(_)));
        if matches!(op, Op::DeleteJob) {
            training.invariants.forget(JOB);
        }
        if !late.is_empty() && dice.percent(10) {
            let at = dice.below(late.len());
            late.swap_remove(at).act(&mut world);
        }
        if dice.percent(2) {
            let hours = dice.below(3) as i64 - 1;
            operators[dice.below(2)].clock_is_off_by = SignedDuration::from_hours(hours);
            injected += 1;
        }
        training.observe(&world).map_err(|broken| format!("{broken}, after {op:?}"))?;
        training.train(&mut dice);
    }
    late.iter_mut().for_each(|request| request.act(&mut world));
    training.observe(&world).map_err(|broken| format!("{broken}, after late requests"))?;
    if off.is_some() {
        return Ok(injected);
    }
    let [mut operator, _] = operators;
    operator.clock_is_off_by = SignedDuration::ZERO;
    // What was written by a clock that is an hour ahead is waited for.
    world.now += SignedDuration::from_hours(2);
    in_peace(&mut world, &mut operator);
    training.observe(&world).map_err(|broken| format!("{broken}, after the faults"))?;
    Ok(injected)
}

#[test]
fn every_seed_holds_the_invariants() {
    CAMPAIGN.must_hold(|name| std::env::var(name).ok(), |seed| run_seed(seed, None));
}

#[test]
fn a_seed_does_the_same_every_time() {
    for seed in 0..20 {
        assert_eq!(run_seed(seed, None), run_seed(seed, None));
    }
}

/// The simulation would find a defect: with a check turned off, some of 200 seeds fail.
#[test]
fn a_missing_check_is_found_within_200_seeds() {
    for safeguard in [Safeguard::ProofOfStop, Safeguard::SilentNode] {
        let (_, found) = first_failure(safeguard, |seed| run_seed(seed, Some(safeguard)));
        assert!(found.contains("I1") || found.contains("I4"), "{safeguard:?}: {found}");
    }
}
