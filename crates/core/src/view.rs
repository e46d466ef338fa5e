//! What a driver shows to the decisions: one immutable picture of nodes and jobs.
//!
//! Use is handed over as *counters* that only grow (see [`JobView::consumed`]), never as rates, so
//! that each decision can average over its own interval and no driver needs to know when the last
//! decision was. Everything in here serialises: a view and a memory written to a file reproduce the
//! plan that was made of them.

use crate::model::{JobId, NodeId, OwnerId, PerResource, Share, Span, Time};
use crate::signal::speed::Interval;
pub use crate::signal::{ClaimRecord, FinishedRun};
use crate::signal::{Signal, length};
use crate::tasks::TaskGroup;
use serde::{Deserialize, Serialize};

/// Everything there is to know at one moment. Nodes and jobs are sorted by id; a job that ended is
/// no longer here.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct View {
    pub now: Time,
    pub nodes: Vec<NodeView>,
    pub jobs: Vec<JobView>,
}

/// One machine that can run jobs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeView {
    pub id: NodeId,
    pub cores: f64,
    /// How fast one core is, relative to a reference core.
    #[serde(default = "one")]
    pub speed: f64,
    pub memory_bytes: u64,
    /// How many jobs may run here at once; `None`: as many as come.
    #[serde(default)]
    pub slots: Option<usize>,
    /// CPU that was idle since the machine started, in node-seconds, where the driver knows it. A
    /// job that used less than its grant while nothing was idle may have wanted more.
    #[serde(rename = "idle", default)]
    pub idle_node_s: Option<f64>,
}

fn one() -> f64 {
    1.0
}

fn no_floor() -> Share {
    Share::ZERO
}

fn no_maximum() -> Share {
    Share::FULL
}

/// One job that waits or runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    pub id: JobId,
    pub owner: OwnerId,
    pub arrived: Time,
    pub phase: Phase,
    /// What the job's own reports say.
    pub signal: Signal,
    /// Use since the job started, in node-seconds per resource: a job that used half the node's CPU
    /// for ten seconds consumed 5.0 of it. Memory counts alike: a quarter of the memory held for
    /// ten seconds is 2.5.
    #[serde(rename = "consumed")]
    pub consumed_node_s: PerResource<f64>,
    /// The least share of the CPU the owner wants kept for it, whatever it gains.
    #[serde(default = "no_floor")]
    pub floor: Share,
    /// The largest share of the CPU it may have.
    #[serde(default = "no_maximum")]
    pub max: Share,
    /// Larger goes first among waiting jobs.
    #[serde(default)]
    pub priority: i32,
    /// The job must stay on its node, because it cannot be saved and restored.
    #[serde(default)]
    pub pinned: bool,
    /// What a move rule has done with this job and may do only once, as the driver has stored it.
    #[serde(default, skip_serializing_if = "Marks::is_empty")]
    pub marks: Marks,
    /// Jobs that must have ended well before this one may start; those still to wait for.
    #[serde(default)]
    pub waits_for: Vec<JobId>,
    /// The largest part of its node that this job was seen to use, 0…1. The operator copies it from
    /// the node agents; other drivers leave it empty, and the share rule measures it.
    #[serde(default)]
    pub usable: Option<f64>,
    /// The driver sets the job's team of threads to the cores of its share, so that the job can work on one core and on
    /// all of them. A further core then brings less than the first one ([`crate::scaling::next_core`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_team: bool,
    /// The part of its work that this job does on one thread, 0…1, where the driver sets the job's team of threads and
    /// measures its use ([`crate::scaling`]). Such a job uses less than its share, because its team follows the share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<f64>,
    /// The job keeps no more than one core busy at the moment, though it has more: it imports, loads data or validates.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_one_core: bool,
    /// The node of the job is a GPU. What the job used is read once a second and roughly, and it may prepare its work
    /// more slowly than the GPU carries it out, so that it cannot use the share that it has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_gpu: bool,
    /// The work left, in node-seconds. Only the simulator knows it, for the policy that bounds all
    /// others; a real driver leaves it empty.
    #[serde(default)]
    pub known_left_s: Option<f64>,
    /// Finished runs of the same program, the newest last, where the driver remembers them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<FinishedRun>,
    /// How claims from the same source as this job's total fared in other programs of its owner, where the driver
    /// remembers them.
    #[serde(default, skip_serializing_if = "ClaimRecord::is_empty")]
    pub claims: ClaimRecord,
    /// When the job must have ended, if its owner said.
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// How the deadline of a running job stands, where another program decides about the shares of the job's node and
    /// says so: the operator copies it from the node agents. Other drivers leave it empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<FinishView>,
    /// The tasks of a job that has several, such as parameter servers and workers. Such a job runs on the nodes of
    /// its tasks; its phase names the first of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskGroup>,
}

/// What move rules do with a job at most once in the job's life. A driver that must keep this over its own restart
/// reads it from [`crate::decider::Decider::marks`] and puts it into the views that follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Marks {
    /// When Algorithm 4 moved the job, or found that it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled: Option<Time>,
    /// Algorithm 5 has moved the job.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rebalanced: bool,
    /// When the deadline rule moved the job, because it would have missed its deadline where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_deadline: Option<Time>,
}

impl Marks {
    pub fn is_empty(&self) -> bool {
        *self == Marks::default()
    }

    /// Both together; of two times the one that was known first.
    pub fn with(self, other: Marks) -> Marks {
        Marks {
            settled: self.settled.or(other.settled),
            rebalanced: self.rebalanced || other.rebalanced,
            for_deadline: self.for_deadline.or(other.for_deadline),
        }
    }
}

impl JobView {
    /// The steps left, if there is a way to know them: the job names its total, its curve leads to a target, or
    /// earlier runs of the same program have ended.
    pub fn steps_left(&self) -> Option<Interval> {
        let by_history = || length::steps_left_by_history(&self.history, self.signal.position());
        self.signal.steps_left().or_else(by_history)
    }

    /// When the job ends if it has `share` of its node from now on, in seconds from `now`; `None` while its steps left
    /// or its pace are not known.
    pub fn ends_in_s(&self, now: Time, share: f64) -> Option<Interval> {
        self.signal.ends_after_s(self.steps_left()?, now, share)
    }
}

/// When a job must have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    pub at: Time,
    /// Lateness that is tolerated; zero for a strict deadline.
    #[serde(default)]
    pub tolerance: Span,
}

impl Deadline {
    pub fn strict(at: Time) -> Deadline {
        Deadline { at, tolerance: Span::ZERO }
    }

    /// The last moment that is still tolerated.
    pub fn latest(&self) -> Time {
        self.at + self.tolerance
    }
}

/// How the deadline of a running job stands on its node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FinishView {
    pub ends: Ends,
    pub left: WorkLeft,
}

/// Whether a job ends by its deadline, tolerated lateness included, if it stays on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ends {
    /// The deadline is promised, or the job makes it without a promise.
    InTime,
    /// A miss is predicted.
    Late,
    /// Neither is certain enough to act on it.
    Open,
}

/// What a job has left to do, in units that are the same on every node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WorkLeft {
    /// Core-seconds, of a core of speed 1, that more cores make shorter.
    pub work_core_s: f64,
    /// Time that no share makes shorter, on a core of speed 1.
    pub serial_s: f64,
    /// The most cores that the job can use.
    pub usable_cores: f64,
    /// The job may take longer by this part: to the far end of the interval of its prediction.
    #[serde(default)]
    pub spread: f64,
}

/// Where a job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub enum Phase {
    /// In the queue, without a node.
    #[default]
    Waiting,
    /// Alive on a node. `attempt` counts starts; no two attempts are ever alive together.
    Running { node: NodeId, since: Time, attempt: u32 },
}

impl Default for JobView {
    /// A job that waits, has no floor and may have a whole node.
    fn default() -> Self {
        JobView {
            id: JobId::default(),
            owner: OwnerId::default(),
            arrived: Time::ZERO,
            phase: Phase::Waiting,
            signal: Signal::default(),
            consumed_node_s: PerResource::default(),
            floor: no_floor(),
            max: no_maximum(),
            priority: 0,
            pinned: false,
            marks: Marks::default(),
            waits_for: vec![],
            usable: None,
            has_team: false,
            serial: None,
            on_one_core: false,
            on_gpu: false,
            known_left_s: None,
            history: vec![],
            claims: ClaimRecord::default(),
            deadline: None,
            finish: None,
            tasks: None,
        }
    }
}

impl JobView {
    pub fn node(&self) -> Option<NodeId> {
        match self.phase {
            Phase::Running { node, .. } => Some(node),
            Phase::Waiting => None,
        }
    }
}

impl View {
    pub fn job(&self, id: JobId) -> Option<&JobView> {
        self.jobs.binary_search_by_key(&id, |j| j.id).ok().map(|i| &self.jobs[i])
    }

    pub fn node(&self, id: NodeId) -> Option<&NodeView> {
        self.nodes.binary_search_by_key(&id, |n| n.id).ok().map(|i| &self.nodes[i])
    }
}
