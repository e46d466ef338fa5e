//! What a job gains from false reports: at most 5 % over an honest twin of another owner, under every policy that
//! may decide on real jobs.
//!
//! **How.** Jobs on make-believe nodes use what their shares allow. One of them, the *cheat*, reports made-up
//! numbers instead of its progress. Its *twin* does the same work for another owner and reports the truth. CPU is in
//! node-seconds.
//!
//! **What holds.** Owners split a node equally before any report is read, so a cheat can take CPU only from jobs of
//! its own owner (`a_cheat_takes_from_its_own_owner_only`). Policies that move jobs give a cheat no more of the cluster
//! than with true reports. SECURITY.md says what is possible within one owner.

use crate::world;
use gainshare_core::decider::Decider;
use gainshare_core::model::*;
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::signal::{Sample, Tracker};
use gainshare_core::view::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A way to report false progress.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Lie {
    /// The loss falls in large steps.
    Staircase,
    /// The loss falls steeply and jumps back, as if another model were trained.
    Resets,
    /// The loss rises and falls.
    Sawtooth,
    /// A loss of about 1e-300.
    Tiny,
    /// A loss of about 1e300.
    Huge,
    /// Step counts that claim an end in the next moment.
    NearlyDone,
    /// Step counts that claim far more work than there is.
    NeverDone,
    /// Values that are no numbers.
    NotANumber,
}

const LIES: [Lie; 8] = [
    Lie::Staircase,
    Lie::Resets,
    Lie::Sawtooth,
    Lie::Tiny,
    Lie::Huge,
    Lie::NearlyDone,
    Lie::NeverDone,
    Lie::NotANumber,
];

/// How many seconds are played; no job ends before.
const LENGTH_S: u64 = 600;
/// Node-seconds that a job needs for a step.
const STEP_COST: f64 = 0.5;
const STEPS: u64 = 2000;
/// Time to save, stop and restore a job that moves.
const MOVE_S: u64 = 5;

impl Lie {
    /// What the cheat reports for the time since its start, having truly made `step` steps.
    fn sample(self, second: u64, step: u64) -> Sample {
        let t = second as f64;
        let honest = honest_sample(step);
        let value = match self {
            Lie::Staircase => 100.0 - 10.0 * (second / 60) as f64,
            Lie::Resets => 10.0 * (-((second % 40) as f64) / 8.0).exp(),
            Lie::Sawtooth => 1.0 + (second % 20) as f64,
            Lie::Tiny => 1e-300 / (1.0 + t),
            Lie::Huge => 1e300 / (1.0 + t),
            Lie::NotANumber if second.is_multiple_of(2) => f64::NAN,
            Lie::NearlyDone | Lie::NeverDone | Lie::NotANumber => honest.value,
        };
        let total = match self {
            Lie::NearlyDone => Some(step + 1),
            Lie::NeverDone => Some(u64::MAX),
            _ => honest.total,
        };
        Sample { value, total, ..honest }
    }
}

fn honest_sample(step: u64) -> Sample {
    Sample { value: 1.0 + (-3.0 * step as f64 / STEPS as f64).exp(), step: Some(step), total: Some(STEPS) }
}

#[derive(Debug, Clone, Copy)]
struct Player {
    owner: u32,
    node: u32,
    lie: Option<Lie>,
    deadline_s: Option<f64>,
}

fn player(owner: u32) -> Player {
    Player { owner, node: 0, lie: None, deadline_s: None }
}

/// The CPU that each job used, in node-seconds.
fn play(preset: Preset, nodes: u32, players: &[Player]) -> Vec<f64> {
    let mut decider = Decider::new(Policy::from(preset));
    let views = (0..nodes).map(|id| NodeView {
        id: NodeId(id),
        cores: 4.0,
        speed: 1.0,
        memory_bytes: 1 << 34,
        slots: None,
        idle_node_s: None,
    });
    let nodes: Vec<NodeView> = views.collect();
    let mut trackers = vec![Tracker::default(); players.len()];
    let mut used = vec![0.0f64; players.len()];
    let mut shares = vec![1.0f64; players.len()];
    let mut at: Vec<(u32, u64, u32)> = players.iter().map(|p| (p.node, 0, 1)).collect();
    for second in 1..=LENGTH_S {
        let now = Time::from_secs_f64(second as f64);
        let job = |i: usize| JobView {
            id: JobId(i as u64),
            owner: OwnerId(players[i].owner),
            arrived: Time::from_secs_f64(0.5),
            phase: Phase::Running {
                node: NodeId(at[i].0),
                since: Time::from_secs_f64(at[i].1 as f64 + 0.5),
                attempt: at[i].2,
            },
            signal: trackers[i].signal(),
            consumed_node_s: PerResource { cpu: used[i], memory: used[i] / 2.0, ..PerResource::default() },
            deadline: players[i].deadline_s.map(|s| Deadline::strict(Time::from_secs_f64(s))),
            ..JobView::default()
        };
        let view = View { now, nodes: nodes.clone(), jobs: (0..players.len()).map(job).collect() };
        if let Some(plan) = world::decide(&mut decider, view) {
            for (i, share) in shares.iter_mut().enumerate() {
                *share = world::share(&plan, i as u64);
            }
            for order in &plan.moves {
                let i = order.job.0 as usize;
                at[i] = (order.to.0, second + MOVE_S, at[i].2 + 1);
            }
        }
        let runs = |i: usize| second >= at[i].1;
        for node in &nodes {
            let here: Vec<usize> = (0..players.len()).filter(|&i| at[i].0 == node.id.0 && runs(i)).collect();
            let all: f64 = here.iter().map(|&i| shares[i]).sum();
            for i in here {
                used[i] += shares[i] / all;
                let step = (used[i] / STEP_COST) as u64;
                let sample = players[i].lie.map_or(honest_sample(step), |lie| lie.sample(second, step));
                trackers[i].push(now, sample);
            }
        }
    }
    used
}

/// Every policy that may decide on real jobs.
fn production() -> impl Iterator<Item = Preset> {
    Preset::ALL.into_iter().filter(|preset| preset.for_real_jobs().is_ok())
}

/// Judges every production policy with every lie.
fn each(mut judge: impl FnMut(Preset, Lie)) {
    let mut policies = 0;
    for preset in production() {
        policies += 1;
        LIES.into_iter().for_each(|lie| judge(preset, lie));
    }
    assert!(policies >= 8, "{policies} policies");
}

#[test]
fn a_cheat_gains_at_most_5_percent_over_an_honest_twin_of_another_owner() {
    let (mut most, mut lies) = (0.0f64, 0);
    each(|preset, lie| {
        for deadline_s in [None, Some(900.0)] {
            lies += 1;
            let twin = Player { deadline_s, ..player(1) };
            let used = play(preset, 1, &[twin, Player { owner: 2, lie: Some(lie), ..twin }]);
            let gain = used[1] / used[0] - 1.0;
            most = most.max(gain);
            assert!(gain <= 0.05, "{}: {lie:?} with deadline {deadline_s:?} gains {gain:.3}", preset.name());
        }
    });
    println!("a cheat gains at most {:.2} % over its twin", 100.0 * most);
    println!("fault: injected={lies} violations=0");
}

#[test]
fn a_cheat_takes_from_its_own_owner_only() {
    let (mut most, mut within) = (0.0f64, BTreeMap::new());
    each(|preset, lie| {
        let honest = [player(1), player(1), player(2), player(2)];
        let mut cheats = honest;
        cheats[2].lie = Some(lie);
        let (before, after) = (play(preset, 1, &honest), play(preset, 1, &cheats));
        let loss = 1.0 - (after[0] + after[1]) / (before[0] + before[1]);
        most = most.max(loss);
        assert!(loss <= 0.05, "{}: {lie:?} costs the other owner {loss:.3}", preset.name());
        let part = within.entry(preset.name()).or_insert(0.0f64);
        *part = part.max(after[2] / (after[2] + after[3]));
    });
    println!("the other owner loses at most {:.2} %", 100.0 * most);
    for (policy, part) in within {
        println!("{policy:10} a cheat has up to {:.0} % of what its owner's two jobs have", 100.0 * part);
    }
}

/// A policy that moves jobs may move the cheat to an emptier node. The jobs that stay keep their part of the node on
/// which all began, and `gainshare` moves no job for a false report that it would not have moved for a true one.
/// SpeCon moves jobs that claim to have converged only between nodes on which their owner has other jobs.
#[test]
fn a_lie_about_moves_costs_no_other_owner_its_part() {
    let (mut least, mut most) = (f64::INFINITY, BTreeMap::new());
    each(|preset, lie| {
        if preset.info().answers().moves == "stay" {
            return;
        }
        for count in [3, 4] {
            let mut players: Vec<Player> = (0..count).map(player).collect();
            let last = players.len() - 1;
            let before = play(preset, 2, &players);
            players[last].lie = Some(lie);
            let after = play(preset, 2, &players);
            let part = LENGTH_S as f64 / f64::from(count);
            for other in &after[..last] {
                least = least.min(other / part);
                assert!(*other >= 0.95 * part, "{}: {lie:?} leaves {after:.0?} node-seconds", preset.name());
            }
            let gain = after[last] / before[last] - 1.0;
            assert!(gain <= 0.05, "{}: {lie:?} gains {gain:.3}", preset.name());
            let largest = most.entry(preset.name()).or_insert(0.0f64);
            *largest = largest.max(gain);
        }
    });
    let played = most.keys().copied().collect::<Vec<_>>();
    assert!(played.contains(&"specon") && played.contains(&"gainshare"), "policies that move jobs: {played:?}");
    println!("others keep at least {:.1} % of their parts", 100.0 * least);
    for (policy, gain) in most {
        println!("{policy:10} a cheat gains up to {:.0} % by a move", 100.0 * gain);
    }
}

/// The CPU that each owner's jobs used, in node-seconds.
fn used_by_owner(players: &[Player], used: &[f64]) -> BTreeMap<u32, f64> {
    let mut owners = BTreeMap::new();
    for (player, used) in players.iter().zip(used) {
        *owners.entry(player.owner).or_insert(0.0) += used;
    }
    owners
}

/// Lets the last job lie under SpeCon, where each job is given by its owner and its node.
fn check_parts_under_specon(nodes: u32, jobs: &[(u32, u32)], lies: &[Lie]) {
    let mut players: Vec<Player> = jobs.iter().map(|&(owner, node)| Player { node, ..player(owner) }).collect();
    let cheat = players.len() - 1;
    let before = used_by_owner(&players, &play(Preset::Specon, nodes, &players));
    for lie in lies {
        players[cheat].lie = Some(*lie);
        let after = used_by_owner(&players, &play(Preset::Specon, nodes, &players));
        for (owner, before) in &before {
            let gain = after[owner] / before - 1.0;
            let sound = if *owner == players[cheat].owner { gain <= 0.05 } else { gain >= -0.05 };
            assert!(sound, "{lie:?} on {nodes} nodes with {jobs:?}: owner {owner} has {gain:+.3}");
        }
    }
}

#[test]
fn a_lie_under_specon_changes_no_owner_s_part_of_the_cluster() {
    // The other node has one job.
    check_parts_under_specon(2, &[(0, 0), (1, 0), (3, 1), (2, 0)], &LIES);
    // Two owners with two jobs each, and an empty node.
    check_parts_under_specon(2, &[(0, 0), (0, 0), (1, 0), (1, 0)], &LIES);
    // The cheat's owner has the crowded node to itself, and the other node has a job of another owner.
    check_parts_under_specon(2, &[(0, 1), (1, 0), (1, 0), (1, 0)], &LIES);
    // Both owners have jobs on both nodes, and a claim to have converged moves the cheat.
    check_parts_under_specon(2, &[(0, 0), (0, 1), (1, 1), (1, 0), (1, 0), (1, 0)], &LIES);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_lie_under_specon_changes_no_part_in_any_layout(
        nodes in 2u32..5,
        jobs in prop::collection::vec((0u32..4, 0u32..8), 3..9),
    ) {
        // Half of the jobs are on the first node.
        let place = |node: u32| if node < nodes { node } else { 0 };
        let jobs: Vec<(u32, u32)> = jobs.iter().map(|&(owner, node)| (owner, place(node))).collect();
        if jobs.iter().any(|(owner, _)| *owner != jobs[0].0) {
            check_parts_under_specon(nodes, &jobs, &[Lie::Staircase, Lie::Sawtooth, Lie::Tiny]);
        }
    }
}
