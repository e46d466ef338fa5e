//! Small sound values for tests of the executors, and damaged texts for tests of parsers. Only tests see them (feature
//! `fixtures`).

use crate::check::{CheckedPlan, CheckedTarget, check};
use crate::model::{JobId, NodeId, PerResource, Share, Time};
use crate::plan::{Plan, Reason, Standing, Target, Verdict};
use crate::seeds::Dice;
use crate::signal::Category;
use crate::view::{JobView, NodeView, Phase, View};
use std::collections::BTreeMap;

/// One node without limits on its number of jobs.
pub fn node(id: u32) -> NodeView {
    NodeView { id: NodeId(id), cores: 4.0, speed: 1.0, memory_bytes: 1 << 33, slots: None, idle_node_s: None }
}

/// A job that has run on `node` since time zero.
pub fn running(id: u64, node: u32) -> JobView {
    JobView {
        id: JobId(id),
        phase: Phase::Running { node: NodeId(node), since: Time::ZERO, attempt: 1 },
        ..JobView::default()
    }
}

/// A verdict that gives a running job `target`.
pub fn verdict(target: Target) -> Verdict {
    Verdict {
        target: Some(target),
        growth: PerResource::default(),
        category: Category::Growing,
        reason: Reason::NotYetMeasured,
        standing: Standing::New,
        least: Share::ZERO,
    }
}

/// A checked plan for one node on which each of these jobs gets its target.
///
/// # Panics
/// If the targets break a promise.
pub fn checked_plan(generation: u64, targets: &[(JobId, Target)]) -> CheckedPlan {
    let verdicts: BTreeMap<_, _> = targets.iter().map(|(id, target)| (*id, verdict(*target))).collect();
    let jobs = verdicts.keys().map(|id| running(id.0, 0)).collect();
    let view = View { now: Time::ZERO, nodes: vec![node(0)], jobs };
    let plan = Plan { generation, verdicts, ..Plan::default() };
    check(&view, plan).expect("a sound plan")
}

/// The plan as no policy may make it: it is of another moment than its view, every running job gets the whole of its
/// node, and every task a thousand times its cores. Starts and moves stay, so that an executor that does not check
/// would carry them out.
pub(crate) fn unsound(mut plan: Plan) -> Plan {
    plan.at = Time(plan.at.0.wrapping_add(1));
    for verdict in plan.verdicts.values_mut() {
        verdict.target = verdict.target.map(|_| Target::FREE);
    }
    for task in plan.tasks.values_mut().flat_map(|tasks| &mut tasks.tasks) {
        task.cores *= 1000.0;
    }
    plan
}

/// `target` as the only one of its node.
///
/// # Panics
/// If the target breaks a promise.
pub fn checked_target(target: Target) -> CheckedTarget {
    checked_plan(1, &[(JobId(0), target)]).target(JobId(0)).expect("the plan has one job")
}

/// Pieces that lead deep into parsers of every format.
const PIECES: [&str; 19] = [
    "0",
    "-1",
    "1e308",
    "-1e308",
    "nan",
    "inf",
    "18446744073709551615",
    "9223372036854775808",
    "0.0000001",
    "true",
    "null",
    "\n",
    "\"",
    "[",
    "]",
    "{",
    "}",
    ",",
    "€",
];

/// One of `texts` after one to five edits. An edit removes up to eleven bytes and inserts a piece: a number, a bracket
/// and the like, or one of `pieces`, which belong to the format of the texts, or a few bytes of any value. The same
/// seed gives the same bytes.
///
/// # Panics
/// If there is no text.
pub fn damaged(texts: &[&str], pieces: &[&str], seed: u64) -> Vec<u8> {
    let known: Vec<&str> = PIECES.iter().chain(pieces).copied().collect();
    let mut dice = Dice::new(seed, "damage");
    let mut bytes = texts[dice.below(texts.len())].as_bytes().to_vec();
    for _ in 0..=dice.below(5) {
        let start = dice.below(bytes.len() + 1);
        let end = (start + dice.below(12)).min(bytes.len());
        let piece = if dice.percent(20) {
            (0..dice.below(8)).map(|_| dice.number() as u8).collect()
        } else {
            known[dice.below(known.len())].as_bytes().to_vec()
        };
        bytes.splice(start..end, piece);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_same_seed_damages_a_text_in_the_same_way_and_other_seeds_in_others() {
        let texts = ["a = 1\nb = 2\n", "c = [3]\n"];
        let found: BTreeSet<Vec<u8>> = (0..1000).map(|seed| damaged(&texts, &["<format>"], seed)).collect();
        assert!(found.len() > 900, "{} different texts", found.len());
        assert_eq!(damaged(&texts, &[], 7), damaged(&texts, &[], 7));
        let has = |piece: &str| found.iter().any(|text| text.windows(piece.len()).any(|part| part == piece.as_bytes()));
        assert!(has("<format>") && PIECES.into_iter().all(has), "every piece is used");
        assert!(found.iter().any(|text| std::str::from_utf8(text).is_err()), "bytes of any value are used");
    }
}
