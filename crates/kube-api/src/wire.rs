//! The messages between node agents and the operator: JSON over HTTPS, `POST /v1/node/sync`.
//!
//! **How.** The node agent sends a [`SyncRequest`] and gets an [`Answer`]; there is no other
//! message. If nothing is new for the agent, the operator holds the answer for up to `wait_ms` (a
//! long poll), so that news goes out at once and an idle connection costs nothing. The agent may
//! have several requests under way: a newer one ends the wait of the older.
//!
//! **Loss, doubling, reordering are harmless.** `(epoch, seq)` orders requests: the epoch is new at
//! each start of an agent, and `seq` counts within it. The operator ignores the jobs of an older
//! request after a newer one. `jobs` is always the whole list, never a difference. Resizes are
//! idempotent: they name wanted values, and a lower `generation` than the last one for that pod is
//! refused. A lost answer costs one repetition.
//!
//! **Units.** CPU in thousandths of a core (`_milli`), memory in bytes, times in milliseconds where
//! the name says `_ms`.
//!
//! **Compatibility.** Unknown fields are ignored and new ones have defaults, so that agents and
//! operators of neighbouring versions understand each other. A change that breaks this gets a new
//! path.

use crate::aim::AimKind;
use crate::deadline::{Deadline, DeadlineState, Forecast};
use crate::gpu_pacing::GpuPacing;
use crate::names::{NodeName, PodUid};
pub use crate::policy_names::PolicyKind;
use crate::resources::{Bounds, Resources};
use crate::share_reason::{ShareReason, known};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where agents send their [`SyncRequest`].
pub const SYNC_PATH: &str = "/v1/node/sync";

/// The audience of the agents' tokens. The API server does not accept such a token, and the
/// operator accepts no other.
pub const TOKEN_AUDIENCE: &str = "gainshare-operator";

/// The longest the operator holds an answer, whatever the agent asks for: proxies and load
/// balancers cut longer silences.
pub const LONGEST_WAIT_MS: u32 = 25_000;

/// From a node agent.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SyncRequest {
    /// The node's name; must be the one the token proves.
    pub node: NodeName,
    /// New and larger at each start of the agent, e.g. the start's wall time in microseconds.
    pub epoch: u64,
    /// Counts the requests of one epoch.
    pub seq: u64,
    /// Revision of the pod list last received; 0: none yet.
    #[serde(default)]
    pub seen: u64,
    /// How long the answer may be held if nothing is new.
    #[serde(default)]
    pub wait_ms: u32,
    #[serde(default)]
    pub beat: NodeTotals,
    /// All jobs of the node, or nothing if none has changed since the last list the operator has
    /// answered.
    #[serde(default)]
    pub jobs: Option<Vec<JobReport>>,
    #[serde(default)]
    pub resizes: Vec<Resize>,
    /// The last few pods that have left the agent's list, with what they had done by then. The same ones are sent
    /// again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub finished: Vec<FinishedPod>,
}

/// How far a pod had come when it left the agent's list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishedPod {
    pub uid: PodUid,
    pub container: String,
    /// The last step that it reported, or the number of its reports where they name no steps.
    pub steps: u64,
}

/// Totals over a node, as its agent measured them.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct NodeTotals {
    #[serde(default)]
    pub growing: u32,
    #[serde(default)]
    pub watching: u32,
    #[serde(default)]
    pub converged: u32,
    #[serde(default)]
    pub cpu_used_cores: f64,
    #[serde(default)]
    pub memory_used_bytes: u64,
    /// What the machine has.
    #[serde(default)]
    pub cores: f64,
    #[serde(default)]
    pub memory_bytes: u64,
    /// The agent's clock, in microseconds since its machine started. All moments in the message are
    /// of this clock.
    #[serde(default)]
    pub at_us: u64,
}

/// The state of a job's progress, as published to users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportedCategory {
    #[default]
    Growing,
    Watching,
    Converged,
}

impl ReportedCategory {
    pub fn name(self) -> &'static str {
        match self {
            ReportedCategory::Growing => "growing",
            ReportedCategory::Watching => "watching",
            ReportedCategory::Converged => "converged",
        }
    }
}

impl From<gainshare_core::signal::Category> for ReportedCategory {
    fn from(category: gainshare_core::signal::Category) -> ReportedCategory {
        match category {
            gainshare_core::signal::Category::Growing => ReportedCategory::Growing,
            gainshare_core::signal::Category::Watching => ReportedCategory::Watching,
            gainshare_core::signal::Category::Converged => ReportedCategory::Converged,
        }
    }
}

/// One job (one container of one pod) as its agent sees it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct JobReport {
    pub uid: PodUid,
    pub container: String,
    pub category: ReportedCategory,
    /// Growth per unit of the judged resource; absent until it was measured.
    #[serde(default)]
    pub growth: Option<f64>,
    #[serde(default)]
    pub progress: Progress,
    /// The pod's share of the pool, 0 to 1; absent until decided.
    #[serde(default)]
    pub share: Option<f64>,
    /// Why, in one sentence for people: that of `cause`.
    #[serde(default)]
    pub reason: String,
    /// Why, for programs. Older node agents send the sentence alone.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known")]
    pub cause: Option<ShareReason>,
    /// What its reports and its use amount to, for decisions about the whole cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<ReportedSignal>,
    /// When it will be done, once that can be predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// How its deadline stands, if it has one.
    #[serde(rename = "standing", default, skip_serializing_if = "Option::is_none")]
    pub deadline_state: Option<DeadlineState>,
    /// Whether its GPU work is paced, of pods that ask for it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known")]
    pub gpu: Option<GpuPacing>,
}

/// What a job's reports amount to so far, as the core's own signal has it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ReportedSignal {
    pub reports: u64,
    #[serde(default)]
    pub first: Option<ReportedValue>,
    #[serde(default)]
    pub last: Option<ReportedValue>,
    #[serde(default)]
    pub longest_gap_us: u64,
    #[serde(default)]
    pub step: Option<u64>,
    #[serde(default)]
    pub total: Option<u64>,
    /// Where its curve is, where it will be flat, and the change still to come in units of the
    /// change so far.
    #[serde(default)]
    pub outlook: Option<[f64; 3]>,
    /// Use of the node since the start, in node-seconds.
    #[serde(rename = "consumed_cpu", default)]
    pub consumed_cpu_node_s: f64,
    #[serde(rename = "consumed_memory", default)]
    pub consumed_memory_node_s: f64,
    /// Memory in use, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// The largest part of the node that the job can use, 0 to 1; absent until it was measured. Older node
    /// agents call the field `most`.
    #[serde(default, alias = "most")]
    pub usable: Option<f64>,
    /// What the job has left to do; absent until it can be predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<WorkLeft>,
    /// What its pod sends and receives; absent until it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<ReportedTraffic>,
}

/// Bytes per second on the interfaces of a pod, without its loopback.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ReportedTraffic {
    pub received_bytes_s: f64,
    pub sent_bytes_s: f64,
}

/// What a job has left to do, as its own reports predict it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct WorkLeft {
    /// Node-seconds that become shorter with the share.
    pub parallel_node_s: f64,
    /// Seconds that no share makes shorter.
    pub serial_s: f64,
    /// The largest part of its node that the job can use, 0 to 1.
    pub usable: f64,
    /// The job may take longer by this part: to the far end of the interval of its prediction. Older node agents do not
    /// send it.
    #[serde(default = "usual_spread")]
    pub spread: f64,
}

/// What is assumed of predictions whose interval is not known.
fn usual_spread() -> f64 {
    0.1
}

/// A value and when it was reported, on the agent's clock.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ReportedValue {
    pub value: f64,
    pub at_us: u64,
}

/// How far a job is by its own account.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Progress {
    #[serde(default)]
    pub step: Option<u64>,
    /// The first step that the container has reported. After a restart it shows where the job has resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_step: Option<u64>,
    #[serde(default)]
    pub total: Option<u64>,
    #[serde(default)]
    pub metric: Option<String>,
    #[serde(default)]
    pub value: Option<f64>,
}

impl Progress {
    /// How much of the run is done, in whole percent; `None` where its length is not known.
    pub fn percent(&self) -> Option<u32> {
        let (step, total) = (self.step?, self.total.filter(|total| *total > 0)?);
        let percent = u128::from(step.min(total)) * 100 / u128::from(total);
        u32::try_from(percent).ok()
    }
}

/// New resources for one pod's container. Absent values stay as they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resize {
    pub uid: PodUid,
    pub container: String,
    /// Of the plan it comes from, within the agent's epoch.
    pub generation: u64,
    pub to: Resources,
}

/// From the operator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// `epoch` and `seq` are those of the request that is answered.
    pub epoch: u64,
    pub seq: u64,
    /// The revision of the node's pod list. It is unrelated to revisions of an operator that ran
    /// before.
    pub revision: u64,
    /// The node's whole list, if the agent has not seen it.
    #[serde(default)]
    pub pods: Option<Vec<PodOnNode>>,
    /// One for each resize of the request.
    #[serde(default)]
    pub outcomes: Vec<Outcome>,
    /// The operator does not know the node's jobs (it has just started, say): send the list with
    /// the next request.
    #[serde(default)]
    pub want_jobs: bool,
}

/// What became of one resize.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    pub uid: PodUid,
    pub generation: u64,
    pub state: OutcomeState,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum OutcomeState {
    /// The API server has accepted the resize; how the kubelet fares is in [`PodOnNode::resize`].
    Done,
    /// The pod has these values already (or nearly: see the deadband): nothing was written.
    Unchanged,
    /// The resize is against the rules. To ask again is of no use before something changes.
    Refused { why: String },
    /// The request failed this time (API server away, pod changed meanwhile). Ask again after a moment.
    Failed { why: String },
}

/// A pod that a policy selects, as the agent of its node needs it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodOnNode {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    /// The name of the SharePolicy, in the pod's namespace, or empty if the namespace's label
    /// stands for one.
    pub policy: String,
    /// The container that is the job.
    pub container: String,
    /// What made the pod, e.g. `Job/sweep-3`; the pod itself if nothing did.
    pub owner: String,
    /// When its container started, in milliseconds since 1970, as the kubelet says; absent while it
    /// does not run.
    #[serde(default)]
    pub started_ms: Option<u64>,
    pub settings: Settings,
    /// Of the container, before our first change.
    pub original: Resources,
    /// What its spec says now.
    pub now: Resources,
    pub class: QosClass,
    /// Why it cannot be resized; absent if it can.
    #[serde(default)]
    pub blocked: Option<ResizeObstacle>,
    /// Between which values the resources may move (LimitRange, node, floor). Quotas are judged
    /// when a resize is asked for.
    pub allowed: Bounds,
    pub resize: ResizeState,
    /// Changes whenever our notes on the pod do: each of these, too, is work for its kubelet.
    #[serde(default)]
    pub noted: u64,
    /// The operator decides where this job runs: its agent reports its progress within seconds.
    #[serde(default)]
    pub follow: bool,
    /// The pod is a task of a distributed job with a network of its own: what it sends and receives is measured.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub traffic: bool,
    /// The GPU work of the pod is to be paced.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gpu: bool,
    /// When it must be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
    /// The command of the container of a pod with a deadline: it may name how long the run is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// What is wrong with the deadline that its author wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_error: Option<String>,
    /// By how much the pods of its policy on this node may together request more CPU than they did before our
    /// first change, if deadlines need it. 0 for policies without deadlines.
    #[serde(default)]
    pub room_milli: u64,
    /// The steps of finished runs of the same program in the namespace, the newest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier_steps: Vec<u64>,
}

/// Where the name of a policy would be, for pods whose tasks the policy `operator` resizes.
pub const SCALED_POLICY: &str = "TrainingJob/operator";

impl PodOnNode {
    /// Whether the operator decides about the pod's resources: its use must reach the operator within seconds.
    pub fn is_scaled(&self) -> bool {
        self.follow && self.policy == SCALED_POLICY
    }
}

/// What the kubelet makes of the pod's present spec.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum ResizeState {
    /// In force.
    #[default]
    Settled,
    InProgress,
    /// The node has no room now; the kubelet tries again by itself.
    Deferred {
        message: String,
    },
    /// The resize can never fit: ask for something else.
    Infeasible {
        message: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum QosClass {
    Guaranteed,
    #[default]
    Burstable,
    BestEffort,
}

/// The [`ResizeObstacle::reason`] of pods that a node agent measures and does not resize.
pub const WATCHED_ONLY: &str = "WatchedOnly";

/// Why a pod cannot be resized, and what its author could do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeObstacle {
    /// A word for programs, e.g. `BestEffort`.
    pub reason: String,
    /// Sentences for people.
    pub message: String,
}

impl ResizeObstacle {
    /// For a pod of this policy that is measured and keeps its resources.
    pub fn watched(policy: &str) -> ResizeObstacle {
        let why = match policy {
            SCALED_POLICY => "the operator resizes it, not its node agent",
            _ => "it is measured, and keeps the resources that its author requested",
        };
        ResizeObstacle { reason: WATCHED_ONLY.to_owned(), message: format!("{policy}: {why}") }
    }
}

/// What a policy asks for, resolved for one pod: preset and the pod's annotations are in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub policy: PolicyKind,
    /// Absent: the core's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aim: Option<AimKind>,
    /// Absent numbers are the core's defaults.
    #[serde(default)]
    pub alpha: Option<f64>,
    #[serde(default)]
    pub beta: Option<f64>,
    #[serde(default)]
    pub interval_ms: Option<u64>,
    #[serde(default)]
    pub mode: Mode,
    /// Whether memory moves too.
    #[serde(default)]
    pub memory: bool,
    /// The least share of the pool, 0 to 1.
    #[serde(default)]
    pub floor: f64,
    /// The metric to follow; absent: found by itself.
    #[serde(default)]
    pub metric: Option<String>,
    /// Whether a larger metric is better; absent: the name says.
    #[serde(default)]
    pub maximize: Option<bool>,
    /// The value of the metric at which the job stops.
    #[serde(default)]
    pub target: Option<f64>,
    #[serde(default)]
    pub collector: CollectorKind,
    /// Regular expression with a group `value`, for output that nothing else understands.
    #[serde(default)]
    pub pattern: Option<String>,
    /// What is read, below the root of one of the pod's volumes.
    #[serde(default)]
    pub path: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Requests carry the weight; limits stay, except of Guaranteed pods.
    #[default]
    Weight,
    /// Limits move with the requests, where a pod has them.
    Quota,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CollectorKind {
    /// The container's output, as the kubelet keeps it.
    #[default]
    Stdout,
    /// A metrics file (CSV, JSON lines, text) in one of the pod's volumes.
    File,
    /// TensorBoard's event files below a folder in one of the pod's volumes.
    Tensorboard,
    /// Nothing is read: the pod gets an equal part.
    None,
}

impl ReportedSignal {
    /// As the core knows it; `at` turns the node agent's microseconds into a moment of the caller's
    /// clock.
    pub fn signal(&self, at: impl Fn(u64) -> gainshare_core::model::Time) -> gainshare_core::signal::Signal {
        let report = |r: ReportedValue| gainshare_core::signal::TimedValue { value: r.value, at: at(r.at_us) };
        gainshare_core::signal::Signal {
            reports: self.reports,
            first: self.first.map(report),
            last: self.last.map(report),
            longest_gap: gainshare_core::model::Span(self.longest_gap_us),
            step: self.step,
            total: self.total,
            epoch_steps: None,
            outlook: self.outlook.map(|[at, flat_at, gain_left]| gainshare_core::signal::Outlook {
                at,
                flat_at,
                gain_left,
                scale: 0.0,
                scale_spread: 0.0,
            }),
            ..gainshare_core::signal::Signal::default()
        }
    }

    pub fn consumed(&self) -> gainshare_core::model::PerResource<f64> {
        gainshare_core::model::PerResource {
            cpu: self.consumed_cpu_node_s,
            memory: self.consumed_memory_node_s,
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_name_of_equal_shares_is_read_and_not_written() {
        let read = |name: &str| serde_json::from_value::<PolicyKind>(name.into()).ok();
        let na = PolicyKind::equal();
        assert_eq!((read("na"), read("fair"), read("equal")), (Some(na), Some(na), None));
        assert_eq!(serde_json::to_value(na).unwrap(), "na");
    }

    #[test]
    fn the_old_name_of_usable_is_read_during_an_upgrade() {
        let read = |name: &str| {
            let text = format!(r#"{{"reports": 3, "{name}": 0.25}}"#);
            serde_json::from_str::<ReportedSignal>(&text).unwrap().usable
        };
        assert_eq!((read("usable"), read("most"), read("other")), (Some(0.25), Some(0.25), None));
        let written =
            serde_json::to_string(&ReportedSignal { usable: Some(0.5), ..ReportedSignal::default() }).unwrap();
        assert!(written.contains(r#""usable":0.5"#) && !written.contains("most"), "{written}");
    }

    #[test]
    fn a_report_of_another_version_is_read_without_the_reason_that_it_does_not_share() {
        let read = |cause: serde_json::Value| {
            let mut report = serde_json::json!({
                "uid": "u", "container": "main", "category": "growing", "reason": "it grows",
            });
            if !cause.is_null() {
                report["cause"] = cause;
            }
            let report: JobReport = serde_json::from_value(report).unwrap();
            assert_eq!(report.reason, "it grows");
            report.cause
        };
        assert_eq!(read(serde_json::Value::Null), None, "an older agent sends the sentence alone");
        assert_eq!(read(serde_json::json!({"why": "of-the-future", "depth": 7})), None);
        assert_eq!(read(serde_json::json!({"why": "growing", "growth": null})), None);
        assert_eq!(read("it grows".into()), None);
        assert_eq!(read(serde_json::json!({"why": "not-decided"})), Some(ShareReason::NotDecided));
    }
}
