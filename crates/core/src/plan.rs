//! What the decisions answer: targets for the jobs, and why.
//!
//! A plan is a value. It has a generation, so that an executor never goes backwards: an older
//! generation is refused, a repeated one is harmless. Every running job has a [`Verdict`], also a
//! job that is left as it is; every waiting job has one too.

use crate::model::{JobId, NodeId, PerResource, Resource, Share, Span, Time};
use crate::signal::Category;
use crate::tasks::{TaskPlan, TaskReason};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Plan {
    pub generation: u64,
    pub at: Time,
    /// Waiting jobs to start now, in this order.
    pub starts: Vec<Start>,
    /// Running jobs to save, stop and restore on another node.
    #[serde(default)]
    pub moves: Vec<Move>,
    /// One entry for every job in the view.
    pub verdicts: BTreeMap<JobId, Verdict>,
    /// What the tasks of jobs with several tasks shall be: one entry for every such job that runs or starts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<JobId, TaskPlan>,
    /// When control wants to be asked again, if nothing happens before.
    pub next_due: Option<Time>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    pub job: JobId,
    pub node: NodeId,
    /// Plans in old journals have none.
    #[serde(default)]
    pub why: StartReason,
}

/// Why a waiting job starts on its node. The serialised names are part of the API: statuses and
/// journals hold them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartReason {
    /// The node has the fewest jobs for its cores.
    #[default]
    FewestJobs,
    /// The node has the best score of the cluster's default scheduler.
    BestScore,
    /// The job and the jobs beside it will grow most there.
    MostGrowth,
    /// Equal sharing would start it there, or the node is empty and offers more.
    HomeOrEmpty,
}

impl StartReason {
    /// The name used in statuses and the API; the same as the serialised one.
    pub fn name(self) -> &'static str {
        match self {
            StartReason::FewestJobs => "fewest-jobs",
            StartReason::BestScore => "best-score",
            StartReason::MostGrowth => "most-growth",
            StartReason::HomeOrEmpty => "home-or-empty",
        }
    }
}

impl fmt::Display for StartReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StartReason::FewestJobs => "the node has the fewest jobs for its cores",
            StartReason::BestScore => "the node has the best score of the default scheduler",
            StartReason::MostGrowth => "the job and the jobs beside it are expected to grow most there",
            StartReason::HomeOrEmpty => "the node has the fewest jobs for its cores, or none",
        })
    }
}

/// A running job that should live elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    pub job: JobId,
    pub to: NodeId,
    pub why: MoveReason,
}

/// Why a running job moves. The serialised names are part of the API: statuses and journals hold
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveReason {
    /// The job has converged and its neighbours still grow.
    SlowGrowth,
    /// All have converged and another node has less to do.
    Rebalance,
    /// A node has run empty, and the move ends jobs sooner by far more than it costs.
    Gain,
    /// On its node it would end later than with equal shares; on the other node it ends sooner.
    Owed,
    /// On its node it would miss its deadline; on the other node it makes it.
    Deadline,
}

impl MoveReason {
    pub const ALL: [MoveReason; 5] =
        [MoveReason::SlowGrowth, MoveReason::Rebalance, MoveReason::Gain, MoveReason::Owed, MoveReason::Deadline];

    /// The name used in statuses and the API; the same as the serialised one.
    pub fn name(self) -> &'static str {
        match self {
            MoveReason::SlowGrowth => "slow-growth",
            MoveReason::Rebalance => "rebalance",
            MoveReason::Gain => "gain",
            MoveReason::Owed => "owed",
            MoveReason::Deadline => "deadline",
        }
    }

    /// How a chart marks the stay that begins with such a move: `moved` for the job's own sake or
    /// its neighbours', `rebalanced` to even the nodes out or to bring the job home.
    pub fn mark(self) -> &'static str {
        match self {
            MoveReason::SlowGrowth | MoveReason::Gain | MoveReason::Deadline => "moved",
            MoveReason::Rebalance | MoveReason::Owed => "rebalanced",
        }
    }
}

/// The reason without the node; a driver that knows the node's name writes "{reason}: moves to
/// {name}".
impl fmt::Display for MoveReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MoveReason::SlowGrowth => "the job has converged beside jobs that still grow",
            MoveReason::Rebalance => "every job has converged and the other node has less to do",
            MoveReason::Gain => "the other node is empty, and the move ends jobs sooner by far more than it costs",
            MoveReason::Owed => "the job, or one beside it, would end later than with equal shares",
            MoveReason::Deadline => "the job would miss its deadline where it is, and makes it on the other node",
        })
    }
}

/// What happens to one job, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// What the job may use from now on; `None` for a job that waits.
    pub target: Option<Target>,
    /// Growth per second and unit of each resource, as last measured.
    pub growth: PerResource<Option<f64>>,
    pub category: Category,
    pub reason: Reason,
    pub standing: Standing,
    /// What the job is promised of its node's CPU, whatever others gain; zero without a promise.
    #[serde(default = "no_promise", skip_serializing_if = "is_zero")]
    pub least: Share,
}

fn no_promise() -> Share {
    Share::ZERO
}

fn is_zero(share: &Share) -> bool {
    *share == Share::ZERO
}

/// Whether a verdict changes anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Decided now, and different from before.
    New,
    /// Decided now, but so close to the target in force that changing it is not worth it.
    InsideDeadband,
    /// Nothing was due for this job: the last decision stands, with its reason.
    NotDue,
}

/// How much of its node a running job may use, resource by resource.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// Soft limits as the papers mean them: the part a job should not exceed while others want the
    /// rest. They may sum to more than one.
    pub limit: PerResource<Share>,
    /// What each job gets of a fully wanted node under these limits: sums to at most one over the
    /// jobs of a node. A work-conserving runtime uses it as the weight.
    pub share: PerResource<Share>,
}

impl Target {
    pub const FREE: Target = Target {
        limit: PerResource { cpu: Share::FULL, memory: Share::FULL, block_io: Share::FULL, net_io: Share::FULL },
        share: PerResource { cpu: Share::FULL, memory: Share::FULL, block_io: Share::FULL, net_io: Share::FULL },
    };

    /// The largest change of any limit or share, absolute.
    pub fn distance(&self, other: &Target) -> f64 {
        Resource::ALL
            .iter()
            .flat_map(|&r| {
                [
                    (self.limit.get(r).get() - other.limit.get(r).get()).abs(),
                    (self.share.get(r).get() - other.share.get(r).get()).abs(),
                ]
            })
            .fold(0.0, f64::max)
    }
}

/// Published rules that weigh jobs against each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Weighting {
    Drf,
    Slaq,
    Optimus,
    Themis,
}

/// Why a job has what it has. The variant names are also what metrics and the API call it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "why")]
pub enum Reason {
    /// The policy gives all jobs the same.
    Fair { neighbours: usize },
    /// No growth measured yet: free competition until two reports have been seen.
    NotYetMeasured,
    /// The job gets an equal part, because it never reported anything that could be read for longer than the patience.
    NoSignal { waited: Span },
    /// The job reported once, then fell silent for unusually long: an equal part, not a guess.
    StaleSignal { silent: Span },
    /// The job grows: its part of the sum of all growth.
    Growing { growth: f64, total: f64 },
    /// Growth fell below the threshold once: limits stay as they were, to be sure.
    Watching { growth: f64, threshold: f64 },
    /// Growth stayed below the threshold: its part of the growth, but never less than the floor.
    #[serde(alias = "completing")]
    Converged { growth: f64, threshold: f64, floor: Share },
    /// No job on the node grows any more: free competition, and the next decision comes later.
    #[serde(alias = "all-completing")]
    AllConverged { next_look: Span },
    /// Jobs are served one after the other; `ahead` of them go before it on its node.
    Ranked { ahead: usize },
    /// `left_s` node-seconds are left by its own account, and `ahead` jobs go before it on its node: they gain more, or
    /// would end late otherwise.
    Gaining { left_s: f64, ahead: usize },
    /// Others would gain more, but an equal share would soon have ended it: it goes first so as not
    /// to lose by their gain.
    Owed { left_s: f64 },
    /// The job's part as a published rule weighs it, with the work left (node-seconds) where its reports
    /// say.
    Weighed { by: Weighting, left_s: Option<f64> },
    /// The job has what its deadline needs: at least `least` of the node. With it the job ends `spare_s`
    /// before the deadline, or within the tolerated lateness of `late_s`.
    MeetsDeadline { least: Share, spare_s: f64, late_s: f64 },
    /// The job will end before its deadline with less than it had, and gives back what it does not need.
    Early { least: Share, spare_s: f64 },
    /// The job would keep its deadline with `needs` of the node, as far as its speed with `seen` says. It is measured
    /// with a larger share before the deadline is promised.
    Probes { needs: Share, seen: Share },
    /// The job's deadline cannot be met beside the deadlines already promised: at the earliest it ends
    /// `earliest_s` seconds from now, if that can be said. It runs as best effort.
    CannotMeet { earliest_s: Option<f64> },
    /// The job has a deadline, but neither a total number of steps nor a target value says when it will end.
    UnknownEnd,
    /// The part of its owner's share that a simple rule gives it.
    Portion { part: Share },
    /// The job moves to another node.
    Moves { to: NodeId, because: MoveReason },
    /// Started now.
    Started { node: NodeId },
    /// All slots are taken; `ahead` jobs go before it.
    WaitsForSlot { ahead: usize },
    /// What the job requests is not free.
    WaitsForRoom { request: Share },
    /// A job it depends on has not ended yet.
    WaitsForJob { job: JobId },
    /// The job's tasks, which start together, need `cores` cores.
    WaitsForTasks { cores: f64 },
    /// The job's tasks are what they are for this reason.
    Tasks { because: TaskReason },
}

impl Reason {
    /// The name used in metrics and the API.
    pub fn name(&self) -> &'static str {
        match self {
            Reason::Fair { .. } => "fair",
            Reason::NotYetMeasured => "not-yet-measured",
            Reason::NoSignal { .. } => "no-signal",
            Reason::StaleSignal { .. } => "stale-signal",
            Reason::Growing { .. } => "growing",
            Reason::Watching { .. } => "watching",
            Reason::Converged { .. } => "converged",
            Reason::AllConverged { .. } => "all-converged",
            Reason::Ranked { .. } => "ranked",
            Reason::Gaining { .. } => "gaining",
            Reason::Owed { .. } => "owed",
            Reason::Weighed { .. } => "weighed",
            Reason::MeetsDeadline { .. } => "meets-deadline",
            Reason::Early { .. } => "early",
            Reason::Probes { .. } => "probes",
            Reason::CannotMeet { .. } => "cannot-meet",
            Reason::UnknownEnd => "unknown-end",
            Reason::Portion { .. } => "portion",
            Reason::Moves { .. } => "moves",
            Reason::Started { .. } => "started",
            Reason::WaitsForSlot { .. } => "waits-for-slot",
            Reason::WaitsForRoom { .. } => "waits-for-room",
            Reason::WaitsForJob { .. } => "waits-for-job",
            Reason::WaitsForTasks { .. } => "waits-for-tasks",
            Reason::Tasks { because } => because.name(),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::Fair { neighbours: 0 } => write!(f, "alone on the node"),
            Reason::Fair { neighbours } => write!(f, "equal share beside {neighbours} other job(s)"),
            Reason::NotYetMeasured => write!(f, "new: shares freely until its progress is measured"),
            Reason::NoSignal { waited } => {
                write!(f, "no loss or accuracy seen for {:.0} s: gets an equal share", waited.as_secs_f64())
            }
            Reason::StaleSignal { silent } => {
                write!(f, "silent for {:.0} s, longer than usual: gets an equal share", silent.as_secs_f64())
            }
            Reason::Growing { growth, total } => {
                write!(f, "grows: {} of all growth on the node", Share::clamped(growth / total))
            }
            Reason::Watching { growth, threshold } => {
                write!(f, "growth {growth:.4} fell below {threshold}: watched, limits unchanged")
            }
            Reason::Converged { growth, threshold, floor } => {
                write!(f, "growth {growth:.4} stayed below {threshold}: makes room, keeps at least {floor}")
            }
            Reason::AllConverged { next_look } => {
                write!(
                    f,
                    "no job on the node grows any more: all share freely, next decision in {:.0} s",
                    next_look.as_secs_f64()
                )
            }
            Reason::Ranked { ahead: 0 } => write!(f, "first in the queue: may use the whole node"),
            Reason::Ranked { ahead } => write!(f, "{ahead} job(s) ahead in the queue: gets what they leave unused"),
            Reason::Gaining { left_s, ahead: 0 } => {
                write!(f, "highest gain per unit of CPU on this node; about {left_s:.0} node-seconds of work left")
            }
            Reason::Gaining { left_s, ahead } => {
                write!(
                    f,
                    "{ahead} job(s) on this node gain more or would end late, and go first; about {left_s:.0} node-seconds of work left"
                )
            }
            Reason::Owed { left_s } => {
                write!(
                    f,
                    "goes first, because it would end later than with an equal share; about {left_s:.0} node-seconds of work left"
                )
            }
            Reason::Weighed { by, left_s } => {
                let rule = match by {
                    Weighting::Drf => "an equal part of the resource that each job needs most",
                    Weighting::Slaq => "in proportion to how much its loss will fall next",
                    Weighting::Optimus => "in proportion to how much its end comes nearer",
                    Weighting::Themis => "so that all jobs are late by the same factor",
                };
                match left_s {
                    Some(left) => write!(f, "{rule}; about {left:.0} node-seconds of work left"),
                    None => write!(f, "{rule}"),
                }
            }
            Reason::MeetsDeadline { least, spare_s, late_s } if late_s > 0.0 => {
                write!(
                    f,
                    "keeps its deadline with the tolerated lateness of {late_s:.0} s, {spare_s:.0} s to spare; needs {least}"
                )
            }
            Reason::MeetsDeadline { least, spare_s, .. } => {
                write!(f, "keeps its deadline with {spare_s:.0} s to spare; needs {least}")
            }
            Reason::Early { least, spare_s } => {
                write!(f, "will be early by {spare_s:.0} s: gives back what it does not need, keeps {least}")
            }
            Reason::Probes { needs, seen } => write!(
                f,
                "seems to keep its deadline with {needs}, but its speed was measured with at most {seen}: it is measured \
                 with more before the deadline is promised"
            ),
            Reason::CannotMeet { earliest_s: Some(earliest_s) } => write!(
                f,
                "cannot meet its deadline: it ends {earliest_s:.0} s from now at the earliest; runs as best effort"
            ),
            Reason::CannotMeet { earliest_s: None } => write!(f, "cannot meet its deadline; runs as best effort"),
            Reason::UnknownEnd => write!(
                f,
                "it has a deadline, but nothing says when it will end: let it print `step N/TOTAL`, or give it --target"
            ),
            Reason::Portion { part } => write!(f, "gets {part} by the rule of its policy"),
            Reason::Moves { to, because } => write!(f, "{because}: moves to {to}"),
            Reason::Started { node } => write!(f, "started on {node}"),
            Reason::WaitsForSlot { ahead } => write!(f, "all slots are taken; {ahead} job(s) ahead in the queue"),
            Reason::WaitsForRoom { request } => write!(f, "waits until {request} of a node is free"),
            Reason::WaitsForJob { job } => write!(f, "waits for {job} to end"),
            Reason::WaitsForTasks { cores } => write!(f, "waits until {cores:.1} cores are free for all its tasks"),
            Reason::Tasks { because } => write!(f, "{because}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_of_old_journals_are_still_read() {
        let read = |value| serde_json::from_value::<Reason>(value).expect("an old reason");
        let old = json!({"why": "completing", "growth": 0.1, "threshold": 0.2, "floor": 0.25});
        assert!(matches!(read(old), Reason::Converged { .. }));
        let old = json!({"why": "all-completing", "next_look": 40});
        assert_eq!(read(old), Reason::AllConverged { next_look: Span(40) });
        assert_eq!(serde_json::from_value::<Category>(json!("completing")).expect("an old word"), Category::Converged);
        let start: Start = serde_json::from_value(json!({"job": 1, "node": 2})).expect("an old start");
        assert_eq!(start.why, StartReason::FewestJobs);
    }

    #[test]
    fn tolerated_lateness_is_reported_where_there_is_some() {
        let meets = |late_s| Reason::MeetsDeadline { least: Share::FULL, spare_s: 7.0, late_s }.to_string();
        assert!(meets(0.0).starts_with("keeps its deadline with 7 s to spare"), "{}", meets(0.0));
        assert!(meets(3.0).starts_with("keeps its deadline with the tolerated lateness of 3 s"), "{}", meets(3.0));
        assert!(!meets(-1.0).contains("lateness"), "{}", meets(-1.0));
    }

    #[test]
    fn a_promise_is_written_only_where_there_is_one() {
        let mut verdict = crate::fixtures::verdict(Target::FREE);
        let text = |verdict: &Verdict| serde_json::to_string(verdict).expect("it serialises");
        assert!(!text(&verdict).contains("least"), "{}", text(&verdict));
        verdict.least = Share::clamped(0.25);
        assert!(text(&verdict).contains(r#""least":0.25"#), "{}", text(&verdict));
        assert_eq!(serde_json::from_str::<Verdict>(&text(&verdict)).expect("it is read back"), verdict);
    }

    #[test]
    fn the_distance_of_targets_is_their_largest_change() {
        let mut other = Target::FREE;
        assert_eq!(Target::FREE.distance(&other), 0.0);
        other.share.memory = Share::clamped(0.75);
        other.limit.cpu = Share::clamped(0.5);
        assert_eq!((Target::FREE.distance(&other), other.distance(&Target::FREE)), (0.5, 0.5));
    }

    #[test]
    fn names_are_the_serialised_ones() {
        for reason in MoveReason::ALL {
            assert_eq!(serde_json::to_value(reason).expect("it serialises"), reason.name());
            assert!(["moved", "rebalanced"].contains(&reason.mark()));
        }
        use StartReason::{BestScore, FewestJobs, HomeOrEmpty, MostGrowth};
        for reason in [FewestJobs, BestScore, MostGrowth, HomeOrEmpty] {
            assert_eq!(serde_json::to_value(reason).expect("it serialises"), reason.name());
        }
        let texts = [FewestJobs, BestScore, MostGrowth, HomeOrEmpty].map(|reason| reason.to_string());
        assert!(texts.iter().all(|text| text.contains("there") || text.contains("the node")), "{texts:?}");
        let reason = Reason::WaitsForSlot { ahead: 1 };
        assert_eq!(serde_json::to_value(reason).expect("it serialises")["why"], reason.name());
        let moves = Reason::Moves { to: NodeId(3), because: MoveReason::SlowGrowth };
        assert_eq!(moves.to_string(), "the job has converged beside jobs that still grow: moves to node-3");
    }
}
