//! What the API says about the daemon itself: `GET /v1/health` and `GET /healthz`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `GET /v1/health`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// `ok`, or `degraded` with the reasons in `problems`.
    pub status: String,
    pub problems: Vec<String>,
    /// When each loop of the daemon last came round.
    #[serde(default)]
    pub loops: Vec<LoopReport>,
    pub pid: u32,
    pub epoch: u64,
    pub uptime_s: f64,
    pub policy: String,
    /// What the policy makes as early as possible, `finish` or `quality`, where that can be chosen.
    #[serde(default)]
    pub aim: Option<String>,
    pub mode: String,
    pub slots: Option<usize>,
    pub cores: f64,
    pub memory_bytes: u64,
    pub live_jobs: usize,
    pub state_dir: String,
    /// The TCP listener, if there is one.
    pub listen: Option<String>,
    /// Which runtimes are there, and what they cannot do.
    pub runtimes: Vec<RuntimeInfo>,
}

/// `GET /healthz`: 200 if every loop came round lately, else 503.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Liveness {
    pub alive: bool,
    pub loops: Vec<LoopReport>,
}

/// One long-lived loop of the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoopReport {
    pub name: String,
    /// Seconds since it last came round.
    pub age_s: f64,
    pub is_stuck: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RuntimeInfo {
    pub kind: String,
    pub notes: Vec<String>,
}
