//! The five invariants that every fault test checks, and the one checker for all of them.
//!
//! **Problem.** The fault simulation, the property tests and the tests on real programs must mean
//! the same thing by "no job was lost". A second definition would drift.
//!
//! **How.** A test describes what it observes at one moment as an [`Observation`]: nodes with what they guarantee,
//! jobs with their live attempts and their checkpoints, the jobs that a program has on record, and a journal beside its
//! replay. [`Invariants::check`] returns each [`BrokenInvariant`] with the objects that break it. A test calls it after
//! every step. What a test cannot observe stays empty, and is not checked. The checker remembers which jobs were
//! acknowledged, which attempts have begun, and the newest checkpoints. Only tests compile this module (feature
//! `fixtures`).
//!
//! **The invariants.**
//! * I1: at most one attempt of a job is alive.
//! * I2: the guarantees of a node sum to at most its capacity, and floor ≤ limit ≤ maximum.
//! * I3: an acknowledged job is never lost.
//! * I4: a resumed job starts at or after its last committed checkpoint.
//! * I5: replaying the journal gives the state.
//!
//! **Units.** Guarantees, limits and capacity of one node have the same unit, which the test
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

/// A node, or another pool that jobs share.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ObservedNode {
    pub capacity: f64,
    pub guarantees: Vec<Guarantee>,
}

/// A job with processes or a checkpoint.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ObservedJob {
    /// The attempts that live, each with the step at which it started, where that is known. A process that is started
    /// again is another attempt, and has another name.
    pub live: BTreeMap<String, Option<u64>>,
    /// The step of the newest checkpoint.
    pub checkpoint: Option<u64>,
}

/// What a test observes at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Observation {
    pub nodes: BTreeMap<String, ObservedNode>,
    pub jobs: BTreeMap<String, ObservedJob>,
    /// All jobs that the program has on record, or `None` if it was not asked.
    pub recorded: Option<BTreeSet<String>>,
    /// How states differ from what replaying their journals gives.
    pub replay_differences: Vec<String>,
}

impl Observation {
    /// Adds a live attempt and the step at which it started, if that is known.
    pub fn add_live(&mut self, job: &str, attempt: &str, from: Option<u64>) {
        self.jobs.entry(job.to_owned()).or_default().live.insert(attempt.to_owned(), from);
    }

    /// Adds the step of a checkpoint that is committed.
    pub fn add_checkpoint(&mut self, job: &str, step: u64) {
        let job = self.jobs.entry(job.to_owned()).or_default();
        job.checkpoint = job.checkpoint.max(Some(step));
    }

    /// Adds a node.
    pub fn add_node(&mut self, node: &str, capacity: f64, guarantees: Vec<Guarantee>) {
        self.nodes.insert(node.to_owned(), ObservedNode { capacity, guarantees });
    }

    /// Sets the jobs that the program has on record.
    pub fn set_recorded(&mut self, jobs: impl IntoIterator<Item = impl ToString>) {
        self.recorded = Some(jobs.into_iter().map(|job| job.to_string()).collect());
    }

    /// Adds a state and what replaying its journal gives.
    pub fn add_replay<T: PartialEq + Debug>(&mut self, state: &T, replayed: &T) {
        if state != replayed {
            self.replay_differences.push(format!("{state:?} and {replayed:?}"));
        }
    }
}

/// What is known of a job from earlier observations.
#[derive(Debug, Default)]
struct KnownJob {
    begun: BTreeSet<String>,
    committed: u64,
}

/// The checker, with what it remembers of earlier observations.
#[derive(Debug, Default)]
pub struct Invariants {
    acknowledged: BTreeSet<String>,
    jobs: BTreeMap<String, KnownJob>,
}

impl Invariants {
    /// The program has accepted the job: from now on the job must not be lost.
    pub fn acknowledge(&mut self, job: &str) {
        self.acknowledged.insert(job.to_owned());
    }

    /// The job's owner has deleted the job: it may go.
    pub fn forget(&mut self, job: &str) {
        self.acknowledged.remove(job);
        self.jobs.remove(job);
    }

    /// Everything that does not hold.
    pub fn check(&mut self, observation: &Observation) -> Vec<BrokenInvariant> {
        let mut broken = Vec::new();
        for (name, job) in &observation.jobs {
            self.check_job(name, job, &mut broken);
        }
        for (name, node) in &observation.nodes {
            check_node(name, node, &mut broken);
        }
        if let Some(recorded) = &observation.recorded {
            let lost = self.acknowledged.difference(recorded);
            broken.extend(lost.map(|job| BrokenInvariant::Lost { job: job.clone() }));
        }
        let differences = observation.replay_differences.iter().cloned();
        broken.extend(differences.map(|difference| BrokenInvariant::OtherReplay { difference }));
        broken
    }

    /// The same for a test that ends at the first invariant that does not hold.
    pub fn check_first(&mut self, observation: &Observation) -> Result<(), BrokenInvariant> {
        self.check(observation).into_iter().next().map_or(Ok(()), Err)
    }

    /// I1 and I4.
    fn check_job(&mut self, name: &str, job: &ObservedJob, broken: &mut Vec<BrokenInvariant>) {
        if job.live.len() > 1 {
            let attempts = job.live.keys().cloned().collect();
            broken.push(BrokenInvariant::SeveralLive { job: name.to_owned(), attempts });
        }
        let known = self.jobs.entry(name.to_owned()).or_default();
        for (attempt, from) in &job.live {
            let is_new = known.begun.insert(attempt.clone());
            // An attempt may commit a checkpoint between its start and this observation, so it is compared with the
            // checkpoint of the observation before.
            if let Some(from) = from.filter(|from| is_new && *from < known.committed) {
                let (job, attempt, committed) = (name.to_owned(), attempt.clone(), known.committed);
                broken.push(BrokenInvariant::BeforeCheckpoint { job, attempt, from, committed });
            }
        }
        known.committed = known.committed.max(job.checkpoint.unwrap_or(0));
    }
}

/// I2.
fn check_node(name: &str, node: &ObservedNode, broken: &mut Vec<BrokenInvariant>) {
    let (sum, capacity) = (node.guarantees.iter().map(|one| one.guaranteed).sum::<f64>(), node.capacity);
    // Both comparisons are written so that a value that is not a number breaks the invariant.
    let fits = sum <= capacity * (1.0 + TOLERANCE);
    if !fits {
        broken.push(BrokenInvariant::OverCapacity { node: name.to_owned(), sum, capacity });
    }
    for Guarantee { job, floor, limit, max, .. } in &node.guarantees {
        let is_inside = *limit + TOLERANCE >= *floor && *limit <= *max + TOLERANCE;
        if !is_inside {
            let (job, floor, limit, max) = (job.clone(), *floor, *limit, *max);
            broken.push(BrokenInvariant::LimitOutOfBounds { job, floor, limit, max });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the invariants that an observation breaks.
    fn names(invariants: &mut Invariants, observe: impl FnOnce(&mut Observation)) -> Vec<&'static str> {
        let mut observation = Observation::default();
        observe(&mut observation);
        invariants.check(&observation).iter().map(BrokenInvariant::name).collect()
    }

    const NONE: [&str; 0] = [];

    #[test]
    fn two_live_attempts_break_i1() {
        let mut invariants = Invariants::default();
        let both = |observation: &mut Observation| {
            observation.add_live("a", "1", None);
            observation.add_live("a", "2", None);
        };
        assert_eq!(names(&mut invariants, both), ["I1"]);
        assert_eq!(names(&mut invariants, both), ["I1"], "as long as both live");
        assert_eq!(names(&mut invariants, |observation| observation.add_live("a", "2", None)), NONE);
        let of_two_jobs = |observation: &mut Observation| {
            observation.add_live("a", "3", None);
            observation.add_live("b", "3", None);
        };
        assert_eq!(names(&mut invariants, of_two_jobs), NONE);
    }

    #[test]
    fn guarantees_beyond_a_node_and_limits_out_of_bounds_break_i2() {
        let guarantee =
            |guaranteed: f64, limit: f64| Guarantee { job: "a".to_owned(), guaranteed, floor: 0.25, limit, max: 0.75 };
        let node = |guarantees: &[Guarantee]| {
            names(&mut Invariants::default(), |observation| observation.add_node("n", 1.0, guarantees.to_vec()))
        };
        assert_eq!(node(&[guarantee(0.5, 0.25), guarantee(0.5, 0.75)]), NONE);
        assert_eq!(node(&[guarantee(0.5, 0.5), guarantee(0.51, 0.5)]), ["I2"]);
        assert_eq!(node(&[guarantee(f64::NAN, 0.5)]), ["I2"]);
        for limit in [0.2, 0.8, f64::NAN] {
            assert_eq!(node(&[guarantee(0.1, limit)]), ["I2"], "{limit}");
        }
        assert_eq!(node(&[guarantee(1.1, 0.2)]), ["I2", "I2"], "each violation is reported");
    }

    #[test]
    fn an_acknowledged_job_without_a_record_breaks_i3() {
        let mut invariants = Invariants::default();
        invariants.acknowledge("a");
        assert_eq!(names(&mut invariants, |observation| observation.set_recorded(["a", "b"])), NONE);
        assert_eq!(names(&mut invariants, |observation| observation.set_recorded(["b"])), ["I3"]);
        assert_eq!(names(&mut invariants, |_| {}), NONE, "the program was not asked");
        invariants.forget("a");
        assert_eq!(names(&mut invariants, |observation| observation.set_recorded(["b"])), NONE);
    }

    #[test]
    fn a_start_before_the_checkpoint_breaks_i4() {
        let mut invariants = Invariants::default();
        let live = |attempt: &'static str, from: u64, saved: u64| {
            move |observation: &mut Observation| {
                observation.add_live("a", attempt, Some(from));
                observation.add_checkpoint("a", saved);
            }
        };
        assert_eq!(names(&mut invariants, live("1", 0, 10)), NONE, "it saved itself after its start");
        assert_eq!(names(&mut invariants, live("1", 0, 7)), NONE, "it has begun before");
        assert_eq!(names(&mut invariants, live("2", 9, 10)), ["I4"]);
        assert_eq!(names(&mut invariants, live("2", 9, 10)), NONE, "a start is reported once");
        assert_eq!(names(&mut invariants, live("3", 10, 10)), NONE);
        assert_eq!(names(&mut invariants, |observation| observation.add_live("a", "4", None)), NONE);
        invariants.forget("a");
        assert_eq!(names(&mut invariants, live("1", 0, 0)), NONE);
    }

    #[test]
    fn another_state_after_a_replay_breaks_i5() {
        let mut invariants = Invariants::default();
        assert_eq!(names(&mut invariants, |observation| observation.add_replay(&1, &1)), NONE);
        assert_eq!(names(&mut invariants, |observation| observation.add_replay(&1, &2)), ["I5"]);
    }

    #[test]
    fn the_first_violation_ends_a_test() {
        let mut observation = Observation::default();
        assert_eq!(Invariants::default().check_first(&observation), Ok(()));
        observation.add_replay(&1, &2);
        let broken = Invariants::default().check_first(&observation).unwrap_err();
        assert_eq!(broken.to_string(), "I5: replaying the journal gives another state: 1 and 2");
    }
}
