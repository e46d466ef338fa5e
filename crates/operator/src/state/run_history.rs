//! How long finished runs of programs were, so that the end of the next run can be predicted although it names no
//! number of steps.
//!
//! **How.** When a shared pod has ended well, its node agent reports the steps that it made. They are kept by namespace
//! and program ([`gainshare_kube_api::facts::ContainerFacts::program`]), the newest few of each. A namespace never
//! learns from another one: what tenants print must not change predictions for others.
//!
//! The history is kept in memory only. A new leader begins without it, and predicts such jobs again after their next
//! finished run.

use super::agents::MOST_STEPS;
use std::collections::{BTreeMap, VecDeque};

/// Runs of one program that are kept.
const MOST_RUNS: usize = 8;
/// Programs that are kept; the one that has been known longest goes first.
const MOST_PROGRAMS: usize = 10_000;

/// A namespace, and a program within it.
type ProgramKey = (String, u64);

#[derive(Debug, Default)]
pub(crate) struct RunHistory {
    /// The steps of each run, the newest last.
    runs: BTreeMap<ProgramKey, VecDeque<u64>>,
    /// Oldest first.
    known: VecDeque<ProgramKey>,
}

impl RunHistory {
    /// Notes a run that ended well. One that counted no steps says nothing. The number is a node agent's, so it is
    /// bounded here.
    pub(crate) fn add(&mut self, namespace: &str, program: u64, steps: u64) {
        if steps == 0 {
            return;
        }
        let key = (namespace.to_owned(), program);
        if !self.runs.contains_key(&key) {
            self.known.push_back(key.clone());
            if self.known.len() > MOST_PROGRAMS
                && let Some(oldest) = self.known.pop_front()
            {
                self.runs.remove(&oldest);
            }
        }
        let runs = self.runs.entry(key).or_default();
        runs.push_back(steps.min(MOST_STEPS));
        let surplus = runs.len().saturating_sub(MOST_RUNS);
        runs.drain(..surplus);
    }

    /// The steps of finished runs of a program, the newest last.
    pub(crate) fn steps(&self, namespace: &str, program: u64) -> Vec<u64> {
        let runs = self.runs.get(&(namespace.to_owned(), program));
        runs.into_iter().flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_runs_of_a_program_are_kept_for_its_namespace_only() {
        let mut history = RunHistory::default();
        for run in 0..20 {
            history.add("team", 7, 100 + run);
        }
        assert_eq!(history.steps("team", 7), (112..120).collect::<Vec<u64>>());
        assert_eq!((history.steps("team", 8), history.steps("other", 7)), (vec![], vec![]));
        history.add("team", 8, 0);
        assert!(history.steps("team", 8).is_empty(), "a run that counted no steps says nothing");
    }

    #[test]
    fn the_steps_of_an_agent_are_bounded() {
        let mut history = RunHistory::default();
        history.add("team", 7, u64::MAX);
        assert_eq!(history.steps("team", 7), [MOST_STEPS]);
    }

    #[test]
    fn the_number_of_programs_is_bounded() {
        let mut history = RunHistory::default();
        for program in 0..MOST_PROGRAMS as u64 + 5 {
            history.add("team", program, 10);
        }
        assert_eq!((history.runs.len(), history.known.len()), (MOST_PROGRAMS, MOST_PROGRAMS));
        assert_eq!((history.steps("team", 4), history.steps("team", 5)), (vec![], vec![10]));
    }
}
