//! The parts of a job's description that all kinds of jobs share: bounds on a run, what remains of it, where its
//! checkpoint is, which policy places it, and the words for its state.
#![allow(unreachable_pub, reason = "the schema macro makes private copies of public types")]

pub use crate::policy_names::JobPolicy;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A volume that outlives the pods.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("self.claimName != ''").message("checkpoint.claimName names a PersistentVolumeClaim of this namespace that every node can mount"),
    validation = Rule::new("self.path.startsWith('/') && self.path != '/' && !self.path.contains(':')")
        .message("checkpoint.path is the folder in the container where the claim is mounted, such as /checkpoints"),
    validation = Rule::new("!has(self.subPath) || !self.subPath.startsWith('/') && !self.subPath.contains('..')")
        .message("checkpoint.subPath is a folder inside the claim, such as run-3: relative and without ..")
)]
pub struct Checkpoint {
    /// A claim that can be mounted on every node the job may run on (ReadWriteMany).
    #[schemars(length(max = 253))]
    pub claim_name: String,
    /// Where the containers see it; they also find it in GAINSHARE_CHECKPOINT_DIR.
    #[schemars(length(max = 4096))]
    pub path: String,
    /// The job's folder inside the claim; its name if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub sub_path: Option<String>,
}

/// Bounds on a run, and what remains of it.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(cel)]
pub struct RunPolicy {
    /// How often a failed job is tried again. Moves and lost nodes do not count.
    #[serde(default = "three")]
    #[x_kube(validation = Rule::new("self >= 0 && self <= 1000").message("backoffLimit lies between 0 (never try again) and 1000"))]
    pub backoff_limit: i32,
    /// Seconds after its first start until a job that has not ended fails. Suspended time does not
    /// count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1").message("activeDeadlineSeconds is at least 1"))]
    pub active_deadline_seconds: Option<i64>,
    /// Seconds after its end until the job is deleted. Default: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 0").message("ttlSecondsAfterFinished is 0 or more"))]
    pub ttl_seconds_after_finished: Option<i64>,
    /// Which pods go when the job has ended: `None`, those still `Running`, or `All`.
    #[serde(default)]
    pub clean_pod_policy: CleanPodPolicy,
    /// How long the job may take to save itself after SIGTERM.
    #[serde(default = "half_a_minute")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 3600").message("terminationGracePeriodSeconds lies between 1 and 3600: it must be enough to write a checkpoint"))]
    pub termination_grace_period_seconds: i64,
}

impl Default for RunPolicy {
    fn default() -> RunPolicy {
        RunPolicy {
            backoff_limit: three(),
            active_deadline_seconds: None,
            ttl_seconds_after_finished: None,
            clean_pod_policy: CleanPodPolicy::default(),
            termination_grace_period_seconds: half_a_minute(),
        }
    }
}

fn three() -> i32 {
    3
}

fn half_a_minute() -> i64 {
    30
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum CleanPodPolicy {
    None,
    #[default]
    Running,
    All,
}

/// The state of a job, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum State {
    /// No pod runs yet.
    #[default]
    Waiting,
    Running,
    Migrating,
    /// A failed attempt is followed by another one.
    Restarting,
    Suspended,
    Succeeded,
    Failed,
}
