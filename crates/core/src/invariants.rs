//! The five invariants that every fault test checks, in one place.
//!
//! **Problem.** The fault simulation, the property tests and the tests on real programs must mean
//! the same thing by "no job was lost". A second definition would drift.
//!
//! **How.** A test reports what happens to [`Invariants`] (a job was acknowledged, an attempt
//! started or ended, a checkpoint was committed) and asks for a check of what it observes. Each
//! answer is `Ok`, or the [`BrokenInvariant`] with the objects that break it. Only tests compile
//! this module (feature `fixtures`).
//!
//! **The invariants.**
//! * I1: at most one attempt of a job is alive.
//! * I2: the guarantees of a node sum to at most its capacity, and floor ≤ limit ≤ maximum.
//! * I3: an acknowledged job is never lost.
//! * I4: a resumed job starts at or after its last committed checkpoint.
//! * I5: replaying the journal gives the state.
//!
//! **Units.** Guarantees, limits and capacities of one call have the same unit, which the caller
//! chooses. Checkpoints are counted in steps of the job.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

/// Rounding in sums of shares stays far below this.
const TOLERANCE: f64 = 1e-6;

/// An invariant that does not hold, and for which objects.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BrokenInvariant {
    #[error("I1: the attempts {attempts:?} of job {job} are alive at the same time")]
    SeveralLive { job: String, attempts: Vec<String> },
    #[error("I2: node {node} guarantees {sum} of {capacity}")]
    OverCapacity { node: String, sum: f64, capacity: f64 },
    #[error("I2: job {job} has the limit {limit}, outside its floor {floor} and its maximum {max}")]
    LimitOutOfBounds { job: String, floor: f64, limit: f64, max: f64 },
    #[error("I3: job {job} was acknowledged and is lost")]
    Lost { job: String },
    #[error("I4: attempt {attempt} of job {job} starts at step {from}, before its checkpoint of step {committed}")]
    BeforeCheckpoint { job: String, attempt: String, from: u64, committed: u64 },
    #[error("I5: replaying the journal gives another state: {difference}")]
    OtherReplay { difference: String },
}

impl BrokenInvariant {
    /// `I1` to `I5`.
    pub fn name(&self) -> &'static str {
        match self {
            BrokenInvariant::SeveralLive { .. } => "I1",
            BrokenInvariant::OverCapacity { .. } | BrokenInvariant::LimitOutOfBounds { .. } => "I2",
            BrokenInvariant::Lost { .. } => "I3",
            BrokenInvariant::BeforeCheckpoint { .. } => "I4",
            BrokenInvariant::OtherReplay { .. } => "I5",
        }
    }
}

/// What one job is guaranteed on a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Guarantee {
    pub job: String,
    pub guaranteed: f64,
    pub floor: f64,
    pub limit: f64,
    pub max: f64,
}

/// What a test has reported so far.
#[derive(Debug, Default)]
pub struct Invariants {
    acknowledged: BTreeSet<String>,
    live: BTreeMap<String, BTreeSet<String>>,
    committed: BTreeMap<String, u64>,
}

impl Invariants {
    /// The program has accepted the job: from now on the job must not be lost.
    pub fn acknowledge(&mut self, job: &str) {
        self.acknowledged.insert(job.to_owned());
    }

    /// The job's owner has deleted the job: it may go.
    pub fn forget(&mut self, job: &str) {
        self.acknowledged.remove(job);
        self.committed.remove(job);
    }

    /// An attempt begins to run, from this step of the job. Checks I1 and I4.
    pub fn start(&mut self, job: &str, attempt: &str, from: u64) -> Result<(), BrokenInvariant> {
        let live = self.live.entry(job.to_owned()).or_default();
        live.insert(attempt.to_owned());
        if live.len() > 1 {
            return Err(BrokenInvariant::SeveralLive { job: job.to_owned(), attempts: live.iter().cloned().collect() });
        }
        let committed = self.committed.get(job).copied().unwrap_or(0);
        if from < committed {
            let (job, attempt) = (job.to_owned(), attempt.to_owned());
            return Err(BrokenInvariant::BeforeCheckpoint { job, attempt, from, committed });
        }
        Ok(())
    }

    /// An attempt has ended.
    pub fn end(&mut self, job: &str, attempt: &str) {
        if let Some(live) = self.live.get_mut(job) {
            live.remove(attempt);
        }
    }

    /// All attempts of a job have ended.
    pub fn end_all(&mut self, job: &str) {
        self.live.remove(job);
    }

    /// I1 for attempts that a test observes from outside.
    pub fn check_live<'a>(job: &str, attempts: impl IntoIterator<Item = &'a str>) -> Result<(), BrokenInvariant> {
        let attempts: Vec<String> = attempts.into_iter().map(str::to_owned).collect();
        if attempts.len() > 1 { Err(BrokenInvariant::SeveralLive { job: job.to_owned(), attempts }) } else { Ok(()) }
    }

    /// The job has saved itself at this step.
    pub fn commit_checkpoint(&mut self, job: &str, step: u64) {
        let committed = self.committed.entry(job.to_owned()).or_default();
        *committed = step.max(*committed);
    }

    /// I2 for one node.
    pub fn check_node(node: &str, capacity: f64, guarantees: &[Guarantee]) -> Result<(), BrokenInvariant> {
        let sum: f64 = guarantees.iter().map(|one| one.guaranteed).sum();
        if sum > capacity * (1.0 + TOLERANCE) {
            return Err(BrokenInvariant::OverCapacity { node: node.to_owned(), sum, capacity });
        }
        for Guarantee { job, floor, limit, max, .. } in guarantees {
            // Written so that a limit that is not a number is out of bounds.
            let is_inside = *limit + TOLERANCE >= *floor && *limit <= *max + TOLERANCE;
            if !is_inside {
                let (job, floor, limit, max) = (job.clone(), *floor, *limit, *max);
                return Err(BrokenInvariant::LimitOutOfBounds { job, floor, limit, max });
            }
        }
        Ok(())
    }

    /// I3: every acknowledged job is among these.
    pub fn check_present(&self, present: &BTreeSet<String>) -> Result<(), BrokenInvariant> {
        match self.acknowledged.difference(present).next() {
            Some(job) => Err(BrokenInvariant::Lost { job: job.clone() }),
            None => Ok(()),
        }
    }

    /// I5: the state that replaying gives is the state.
    pub fn check_replay<T: PartialEq + Debug>(state: &T, replayed: &T) -> Result<(), BrokenInvariant> {
        if state == replayed {
            return Ok(());
        }
        Err(BrokenInvariant::OtherReplay { difference: format!("{state:?} and {replayed:?}") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guarantee(guaranteed: f64, limit: f64) -> Guarantee {
        Guarantee { job: "a".to_owned(), guaranteed, floor: 0.25, limit, max: 0.75 }
    }

    #[test]
    fn each_invariant_can_break() {
        let mut invariants = Invariants::default();
        invariants.acknowledge("a");
        invariants.start("a", "1", 0).unwrap();
        let names = |result: Result<(), BrokenInvariant>| result.err().map(|broken| broken.name());
        assert_eq!(names(invariants.start("a", "2", 0)), Some("I1"));
        invariants.end("a", "1");
        invariants.end_all("a");
        invariants.commit_checkpoint("a", 10);
        invariants.commit_checkpoint("a", 7);
        assert_eq!(names(invariants.start("a", "3", 9)), Some("I4"));
        invariants.end("a", "3");
        assert_eq!(names(invariants.start("a", "4", 10)), None);
        assert_eq!(names(Invariants::check_live("a", ["x", "y"])), Some("I1"));
        assert_eq!(names(Invariants::check_live("a", ["x"])), None);
        assert_eq!(names(invariants.check_present(&BTreeSet::new())), Some("I3"));
        assert_eq!(names(invariants.check_present(&BTreeSet::from(["a".to_owned()]))), None);
        invariants.forget("a");
        assert_eq!(names(invariants.check_present(&BTreeSet::new())), None);
        assert_eq!(names(Invariants::check_replay(&1, &2)), Some("I5"));
        assert_eq!(names(Invariants::check_replay(&1, &1)), None);
        let node = |guarantees: &[Guarantee]| names(Invariants::check_node("n", 1.0, guarantees));
        assert_eq!(node(&[guarantee(0.5, 0.5), guarantee(0.5, 0.75)]), None);
        assert_eq!(node(&[guarantee(0.5, 0.5), guarantee(0.51, 0.5)]), Some("I2"));
        for limit in [0.2, 0.8, f64::NAN] {
            assert_eq!(node(&[guarantee(0.1, limit)]), Some("I2"), "{limit}");
        }
    }
}
