//! Jobs of several tasks: parameter servers and the workers that they feed.
//!
//! **Problem.** A job with parameter servers is more than one process on one node. Its tasks have nodes, CPU and
//! memory of their own, and the number of its workers may change.
//!
//! **How.** A driver puts a [`TaskGroup`] into the view of such a job; a decision answers with a [`TaskPlan`]: all
//! tasks that the job shall have from now on, with node, CPU and memory. A task that the plan leaves out ends; a
//! task that is new starts. All other jobs have neither.
//!
//! **Terms and units.** CPU in cores, memory in bytes. `cpu_s`, `traffic_bytes` and `steps` are counters that only
//! grow. The chief of a job counts as one of its workers.

use crate::model::NodeId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a task does. Servers sort before workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TaskRole {
    /// Holds a part of the parameters.
    Server,
    /// Computes gradients.
    Worker,
}

/// One task of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaskId {
    pub role: TaskRole,
    pub index: u32,
}

impl TaskId {
    pub const fn server(index: u32) -> TaskId {
        TaskId { role: TaskRole::Server, index }
    }

    pub const fn worker(index: u32) -> TaskId {
        TaskId { role: TaskRole::Worker, index }
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = if self.role == TaskRole::Server { "server" } else { "worker" };
        write!(f, "{role}-{}", self.index)
    }
}

/// When the servers take a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrainingMode {
    /// A step needs the gradients of all workers, which split one batch.
    #[default]
    Sync,
    /// Every gradient is a step.
    Async,
}

/// What an owner wants for the tasks of one role.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RoleSpec {
    /// How many tasks the owner asked for.
    pub count: u32,
    /// How many there may be. Servers cannot change their number, so both are `count` for them.
    pub min: u32,
    pub max: u32,
    /// What the owner requested for each task.
    pub cores: f64,
    pub memory_bytes: u64,
    /// A task with less cannot live.
    pub least_cores: f64,
    /// A task cannot use more.
    pub max_cores: f64,
}

/// The tasks of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskGroup {
    pub mode: TrainingMode,
    pub servers: RoleSpec,
    pub workers: RoleSpec,
    /// The tasks that run, sorted by id; empty while the job waits.
    #[serde(default)]
    pub tasks: Vec<TaskView>,
    /// Steps taken since the job started.
    #[serde(default)]
    pub steps: f64,
    /// Steps that are left, where the driver knows the total.
    #[serde(default)]
    pub steps_left: Option<f64>,
    /// Traffic of each server relative to the others, as measured in an earlier attempt; empty: all alike.
    #[serde(default)]
    pub traffic: Vec<f64>,
}

/// One running task.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TaskView {
    pub id: TaskId,
    pub node: NodeId,
    /// The limit in force.
    pub cores: f64,
    pub memory_bytes: u64,
    /// CPU time used since the start.
    pub cpu_s: f64,
    pub memory_used_bytes: u64,
    /// Bytes sent and received since the start.
    #[serde(default)]
    pub traffic_bytes: f64,
}

impl TaskGroup {
    pub fn spec(&self, role: TaskRole) -> &RoleSpec {
        match role {
            TaskRole::Server => &self.servers,
            TaskRole::Worker => &self.workers,
        }
    }

    pub fn of_role(&self, role: TaskRole) -> impl Iterator<Item = &TaskView> {
        self.tasks.iter().filter(move |task| task.id.role == role)
    }
}

/// What the tasks of a job shall be from now on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskPlan {
    /// Sorted by id. A running task keeps its node.
    pub tasks: Vec<TaskTarget>,
    pub why: TaskReason,
}

/// What one task shall have.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TaskTarget {
    pub id: TaskId,
    pub node: NodeId,
    pub cores: f64,
    pub memory_bytes: u64,
}

impl TaskTarget {
    pub fn of(task: &TaskView) -> TaskTarget {
        TaskTarget { id: task.id, node: task.node, cores: task.cores, memory_bytes: task.memory_bytes }
    }
}

/// Why the tasks of a job are what they are. The serialised names are part of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "cause")]
pub enum TaskReason {
    /// All tasks start together.
    Started,
    /// Not measured for a whole interval yet.
    NotYetMeasured,
    /// One server is busy while the others wait for it: only this one grows.
    HotServer { index: u32 },
    /// All servers are busy and the workers wait for them.
    ServersStarved,
    /// The workers are busy: they grow, or their number does.
    WorkersStarved,
    /// The tasks use far less than they have.
    OverProvisioned,
    /// Other jobs wait or will be late: the job returns what it has beyond its request.
    GivesBack,
    /// The last change brought too little, and was taken back.
    TakenBack,
    /// Memory was nearly used up.
    MemoryShort,
    /// Nothing to gain, or nothing free to gain it with.
    Settled,
}

impl TaskReason {
    /// The name used in statuses and metrics; the same as the serialised one.
    pub fn name(self) -> &'static str {
        match self {
            TaskReason::Started => "started",
            TaskReason::NotYetMeasured => "not-yet-measured",
            TaskReason::HotServer { .. } => "hot-server",
            TaskReason::ServersStarved => "servers-starved",
            TaskReason::WorkersStarved => "workers-starved",
            TaskReason::OverProvisioned => "over-provisioned",
            TaskReason::GivesBack => "gives-back",
            TaskReason::TakenBack => "taken-back",
            TaskReason::MemoryShort => "memory-short",
            TaskReason::Settled => "settled",
        }
    }
}

impl fmt::Display for TaskReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TaskReason::Started => f.write_str("all tasks start together"),
            TaskReason::NotYetMeasured => f.write_str("new: its tasks keep what they have until they are measured"),
            TaskReason::HotServer { index } => write!(f, "server {index} is busy while the others wait: it grows"),
            TaskReason::ServersStarved => f.write_str("the workers wait for busy servers: the servers grow"),
            TaskReason::WorkersStarved => f.write_str("the servers wait for busy workers: the workers grow"),
            TaskReason::OverProvisioned => f.write_str("its tasks use far less than they have, and return the rest"),
            TaskReason::GivesBack => f.write_str("other jobs need it: it returns what it has beyond its request"),
            TaskReason::TakenBack => f.write_str("the last change brought too little and was taken back"),
            TaskReason::MemoryShort => f.write_str("its memory was nearly used up and was raised"),
            TaskReason::Settled => f.write_str("nothing to gain, or nothing free to gain it with"),
        }
    }
}
