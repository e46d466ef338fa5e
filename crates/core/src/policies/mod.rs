//! The policies, one folder each, and the interfaces through which [`crate::control`] calls them.
//!
//! **Problem.** A policy answers up to five questions: which waiting job next (`order`), on which
//! node (`place`), how the jobs of a node split it (`share`), which running job should live
//! elsewhere (`move`), how large must a job be (`scale`). The loop must not know which rule
//! answers, or no rule could be added without changing the loop.
//!
//! **Approach.** Each question is one trait here. A rule is a type that implements it and lives in
//! its own folder, with its numbers, its memory, its documentation and its tests. [`table`] has one row
//! for each named policy, which names its rules. The choices of the command line, the values of the custom resources
//! and `docs/policies.md` are made of the table. [`rules`] binds the rules of a [`policy::Policy`] to their memories.
//! `docs/write-a-policy.md` shows how to add a policy: a folder, its line below, and a row.
//!
//! **Terms.** A *group* is the jobs of one owner on one node. A job's *outlook* is what a share rule
//! predicts of it.

pub mod deadline;
pub mod elastic;
pub(crate) mod error;
pub mod flowcon;
pub mod gain;
mod order;
mod place;
pub(crate) mod plain;
pub(crate) mod policy;
pub mod rank;
mod rules;
pub mod specon;
pub(crate) mod table;
pub mod weigh;

mod fair;

/// The rule of `docs/write-a-policy.md`: compiled and tested, but in no table.
#[cfg(test)]
mod example;

pub(crate) use place::Placer;
pub use policy::Answers;
pub(crate) use rules::{RuleMemory, Rules};
pub use table::{PolicyInfo, Preset, Scope, reference};

use self::plain::{PlainMove, PlainScale};
use crate::model::{JobId, NodeId, PerResource, Share as Part, Span, Time};
use crate::plan::{Move, Plan, Reason, StartReason, Target};
use crate::signal::Category;
use crate::view::{JobView, NodeView, View};
use std::collections::BTreeMap;

/// `order`: which waiting job next?
pub(crate) trait Order {
    fn queue<'v>(&self, view: &'v View) -> Queue<'v>;
}

/// The waiting jobs.
pub(crate) struct Queue<'v> {
    /// Jobs that could start, first to last.
    pub(crate) ready: Vec<&'v JobView>,
    /// Jobs that wait for another job, with that job.
    pub(crate) blocked: Vec<(&'v JobView, JobId)>,
    /// Jobs that request more than is free.
    pub(crate) too_large: Vec<&'v JobView>,
}

/// `place`: on which node?
pub(crate) trait Place {
    /// What the rule goes by for a node with a free slot, the smallest first.
    fn key(&self, node: &NodeView, jobs: JobCounts) -> f64;

    /// Among nodes with the same smallest key the largest number wins; without numbers, the node
    /// with the smallest id.
    fn tie(&self, _job: JobId, _node: NodeId) -> Option<u64> {
        None
    }

    /// Why a job starts where this rule put it.
    fn reason(&self) -> StartReason;
}

/// How many jobs a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct JobCounts {
    /// New, growing or watched.
    pub(crate) growing: usize,
    pub(crate) converged: usize,
    /// Of the growing ones, those whose growth is not measured yet.
    pub(crate) unmeasured: usize,
    /// Sums of growth per core over the measured jobs, of the squares over the growing ones.
    pub(crate) growth: f64,
    pub(crate) growth_squares: f64,
    pub(crate) converged_growth: f64,
    /// The largest growth per core that was measured in the cluster; 0 if none was.
    pub(crate) best_growth: f64,
}

impl JobCounts {
    /// Counts a job of this category and growth per core.
    pub(crate) fn add(&mut self, category: Category, growth: Option<f64>) {
        match (category, growth) {
            (Category::Converged, growth) => {
                self.converged += 1;
                self.converged_growth += growth.unwrap_or(0.0);
            }
            (_, Some(growth)) => {
                self.growing += 1;
                self.growth += growth;
                self.growth_squares += growth * growth;
            }
            (_, None) => {
                self.growing += 1;
                self.unmeasured += 1;
            }
        }
    }

    /// The growth per core that is expected of a job without a measured one.
    pub(crate) fn newcomer_growth(&self) -> f64 {
        if self.best_growth > 0.0 { self.best_growth } else { 1.0 }
    }

    pub(crate) fn all(self) -> usize {
        self.growing + self.converged
    }
}

/// `share`: how do the jobs of one group split its part of the node?
pub(crate) trait Share {
    /// Takes in a view before anything is decided in it.
    fn observe(&mut self, _view: &View) {}

    /// One opinion for each job of the group, in the same order, and how long to wait until the
    /// next run.
    fn share(&mut self, group: &Group<'_>) -> Shares;

    /// What the rule predicts of a job, for rules that move jobs.
    fn outlook(&self, _job: JobId) -> Option<JobOutlook> {
        None
    }

    /// Where jobs would live if all shared equally, where the rule keeps account of it: waiting
    /// jobs are then placed there.
    fn homes(&mut self) -> Option<&mut dyn Homes> {
        None
    }
}

/// The jobs of one owner on one node, when their shares are decided.
pub(crate) struct Group<'a> {
    pub(crate) now: Time,
    /// Sorted by id, at least one.
    pub(crate) jobs: &'a [&'a JobView],
    /// The owner's part of the node, 0…1.
    pub(crate) part: f64,
    /// A job came or went since the last run.
    pub(crate) changed: bool,
}

/// What a share rule answers.
pub(crate) struct Shares {
    pub(crate) opinions: Vec<Opinion>,
    /// Until the next run; `None`: nothing changes with time alone.
    pub(crate) wait: Option<Span>,
}

/// When a job's silence makes its last report worthless.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Silence {
    /// Silence shorter than this means nothing.
    pub(crate) patience: Span,
    /// Longer silence counts if it exceeds this many times the job's usual gap between reports.
    pub(crate) factor: f64,
}

/// What a share rule says about one job, before owners and floors are taken into account.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Opinion {
    /// Parts of the group's part.
    pub(crate) limit: PerResource<Part>,
    pub(crate) growth: PerResource<Option<f64>>,
    pub(crate) category: Category,
    pub(crate) reason: Reason,
}

impl Opinion {
    /// A limit on the CPU alone, of a job without a measured growth.
    pub(crate) fn of_cpu(limit: Part, reason: Reason) -> Opinion {
        let mut all = Target::FREE.limit;
        all.cpu = limit;
        Opinion { limit: all, growth: PerResource::default(), category: Category::Growing, reason }
    }
}

/// What a share rule predicts of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct JobOutlook {
    pub(crate) prediction: Prediction,
    /// What the job has left if it ends as early as the promise to it assumes, in the unit of the prediction. Its
    /// deadline assumes this.
    pub(crate) promised_left_s: f64,
    /// Where the job would live if all shared equally.
    pub(crate) home: NodeId,
    /// When it would end there, in seconds from now; in the past for a job that is late.
    pub(crate) deadline_s: f64,
}

/// How much work a job has left, in node-seconds of the node it is on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Prediction {
    pub(crate) left_s: f64,
    /// The largest part of its node that it can use.
    pub(crate) usable: f64,
}

/// Where jobs would live if all shared equally.
pub(crate) trait Homes {
    /// How many unfinished jobs each node has there.
    fn counts(&self) -> BTreeMap<NodeId, usize>;

    /// A job that is about to start belongs on `node`.
    fn settle(&mut self, job: JobId, node: NodeId);
}

/// `move`: which running job should live elsewhere? (`move` is a word of the language.)
pub(crate) trait Relocate {
    /// The moves to make. `plan` has the starts and the verdicts of this step; `share` has taken in
    /// the view.
    fn moves(&mut self, view: &View, plan: &Plan, share: &dyn Share) -> Vec<Move>;

    /// Whether the rule must run in this view although nothing else is due.
    fn is_due(&self, _view: &View) -> bool {
        false
    }

    /// When it must run again.
    fn due(&self) -> Option<Time> {
        None
    }

    /// The category it has put a job into, where it has categories of its own.
    fn category(&self, _job: JobId) -> Option<Category> {
        None
    }
}

/// `scale`: how large must a job be? It comes before `share`, which deals out the rest.
pub(crate) trait Scale {
    /// Takes in a view before anything is decided in it.
    fn observe(&mut self, _view: &View) {}

    /// What each job of the group is guaranteed before the share rule is asked.
    fn reserve(&mut self, group: &Group<'_>) -> Reservations;
}

/// What a scale rule answers.
pub(crate) struct Reservations {
    /// One for each job of the group, in the same order.
    pub(crate) claims: Vec<Claim>,
    /// The part of the node that the share rule deals out to jobs without a reservation.
    pub(crate) rest: f64,
    /// Until the next run; `None`: nothing changes with time alone.
    pub(crate) wait: Option<Span>,
}

/// What a scale rule says about one job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Claim {
    /// The share rule decides; `why` takes the place of its reason.
    Rest { why: Option<Reason> },
    /// The job has `share`, and never less than `least`, both parts of the node.
    Reserved { least: Part, share: Part, reason: Reason },
}

/// `stay`: every job stays on its node.
pub(crate) const STAY: PlainMove = PlainMove::new("stay", |_| Box::new(Stay));

struct Stay;

impl Relocate for Stay {
    fn moves(&mut self, _view: &View, _plan: &Plan, _share: &dyn Share) -> Vec<Move> {
        vec![]
    }
}

/// `fixed`: no job has more than the share rule gives it.
pub(crate) const FIXED: PlainScale = PlainScale::new("fixed", |_| Box::new(Fixed));

struct Fixed;

impl Scale for Fixed {
    fn reserve(&mut self, group: &Group<'_>) -> Reservations {
        Reservations { claims: vec![Claim::Rest { why: None }; group.jobs.len()], rest: group.part, wait: None }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guide_shows_the_example_as_it_is_compiled() {
        let guide = include_str!("../../../../docs/write-a-policy.md");
        let example = include_str!("example/mod.rs");
        assert!(guide.contains(example.trim_end()), "copy policies/example/mod.rs into docs/write-a-policy.md");
    }

    #[test]
    fn the_reference_is_fresh() {
        let committed = include_str!("../../../../docs/policies.md");
        assert_eq!(
            committed,
            super::reference(),
            "run `cargo xtask generate`, or `gainshare policies > docs/policies.md`"
        );
    }
}
