//! What travels over the API: requests, answers, events.
//!
//! These types are the wire, not the core's: they carry names for people beside numbers for
//! programs, say nothing that could be secret (of the environment only names), and are described in
//! the OpenAPI document that the daemon serves. Moments come twice: as RFC 3339 text in UTC for
//! people (`…_at`), and as seconds for programs (`…_s`, Unix time unless said otherwise).

mod deadline;
mod health;

pub use deadline::{DeadlineInfo, DeadlineOutcome, DeadlineState, Forecast, MissCause, PredictedMiss};
pub use health::{Health, Liveness, LoopReport, RuntimeInfo};

use crate::deadline::{local, local_within};
use crate::spec::JobSpec;
use gainshare_core::forecast::Prospect;
use gainshare_core::model as core;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Where a job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum JobState {
    /// Waits for a slot or for another job.
    Queued,
    /// Told to start; its process has not been seen yet.
    Starting,
    Running,
    /// Ended with exit code 0.
    Done,
    /// Ended otherwise, or could not start.
    Failed,
    /// Ended because a user asked for it.
    Stopped,
    /// The job is gone, and how it ended is not known.
    Lost,
}

impl JobState {
    pub const ALL: [JobState; 7] = [
        JobState::Queued,
        JobState::Starting,
        JobState::Running,
        JobState::Done,
        JobState::Failed,
        JobState::Stopped,
        JobState::Lost,
    ];

    pub fn name(self) -> &'static str {
        match self {
            JobState::Queued => "queued",
            JobState::Starting => "starting",
            JobState::Running => "running",
            JobState::Done => "done",
            JobState::Failed => "failed",
            JobState::Stopped => "stopped",
            JobState::Lost => "lost",
        }
    }

    /// Nothing more will happen to the job.
    pub fn is_final(self) -> bool {
        matches!(self, JobState::Done | JobState::Failed | JobState::Stopped | JobState::Lost)
    }
}

/// One value for each resource.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct Resources<T> {
    pub cpu: T,
    pub memory: T,
    pub block_io: T,
    pub net_io: T,
}

impl<A, B: From<A>> From<core::PerResource<A>> for Resources<B> {
    fn from(p: core::PerResource<A>) -> Self {
        Resources { cpu: p.cpu.into(), memory: p.memory.into(), block_io: p.block_io.into(), net_io: p.net_io.into() }
    }
}

/// Why something is as it is: a stable name for programs and a sentence for people.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReasonInfo {
    pub why: String,
    pub text: String,
}

/// What a job said last about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MetricInfo {
    pub name: String,
    pub value: f64,
    pub step: Option<u64>,
    pub total: Option<u64>,
    /// Where the total was read, such as `a bar` or `its command`, and how far it is believed, 0 to 1.
    #[serde(default)]
    pub total_from: Option<String>,
    #[serde(default)]
    pub total_trust: Option<f64>,
    /// Where it was found: `output`, `tensorboard`, `file`, `prometheus`, `push`.
    pub source: String,
}

/// The pace of a job that reports no steps, from the rhythm of its parallel regions and its launches on a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RhythmInfo {
    pub steps_per_s: f64,
    /// About how many steps it made.
    pub steps: u64,
    /// How many there will be, by its command or by the last run of the same program.
    pub total: Option<u64>,
    /// Seconds since its last region or launch, if it stands still.
    pub stalled_s: Option<f64>,
}

/// The reason ([`ReasonInfo::why`]) of a job that waits because it would not fit into the memory of a GPU.
pub const WAITS_FOR_GPU_MEMORY: &str = "waits-for-gpu-memory";

/// One job, as tables show it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobInfo {
    pub id: u64,
    pub name: String,
    pub state: JobState,
    /// Counts starts.
    pub attempt: u32,
    /// `process` or `docker`.
    pub runtime: String,
    pub command: Vec<String>,
    pub cwd: Option<String>,
    /// Names only: values may be secret.
    pub env_names: Vec<String>,
    pub owner: String,
    pub priority: i32,
    pub after: Vec<String>,
    /// Supervised by `gainshare run` in someone's terminal.
    pub attached: bool,
    /// JOBDIR: output.log, exit.json.
    pub dir: String,
    pub submitted_at: String,
    pub submitted_s: f64,
    pub started_at: Option<String>,
    pub started_s: Option<f64>,
    pub ended_at: Option<String>,
    pub ended_s: Option<f64>,
    /// How long it has run, or ran.
    pub elapsed_s: Option<f64>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    pub pid: Option<i32>,
    /// What the job gets of the CPU when everyone wants it, 0…1.
    pub share: Option<f64>,
    /// The job's soft limit on the CPU, 0…1.
    pub limit: Option<f64>,
    /// `growing`, `watching` or `converged`.
    pub category: Option<String>,
    /// Growth efficiency of the CPU, as last measured.
    pub growth: Option<f64>,
    pub metric: Option<MetricInfo>,
    #[serde(default)]
    pub rhythm: Option<RhythmInfo>,
    /// Seconds until it ends at its present pace, if it says how many steps there will be.
    pub eta_s: Option<f64>,
    /// When it will be done, as predicted from its own reports.
    pub done: Option<Forecast>,
    /// The job's deadline and how it stands, if it has one.
    pub deadline: Option<DeadlineInfo>,
    /// Cores in use, averaged since the last reading.
    pub cpu_cores: Option<f64>,
    /// Whole cores that the job has now, borrowed ones included, where jobs have cores of their own.
    #[serde(default)]
    pub whole_cores: Option<u32>,
    /// Threads of the job's parallel regions, where they follow its share.
    #[serde(default)]
    pub team: Option<u32>,
    /// What the job gets of its GPU, 0…1, while it launches work there.
    #[serde(default)]
    pub gpu_share: Option<f64>,
    /// GPU time that the present attempt used, in seconds of a whole GPU.
    #[serde(default)]
    pub gpu_time_s: Option<f64>,
    /// The job's memory on GPUs, where the driver of the GPUs says so.
    #[serde(default)]
    pub gpu_memory_bytes: Option<u64>,
    /// The most that it had on one GPU at once.
    #[serde(default)]
    pub gpu_memory_peak_bytes: Option<u64>,
    pub memory_bytes: Option<u64>,
    pub reason: Option<ReasonInfo>,
    /// Things its owner should know, such as limits that this machine cannot set.
    pub notes: Vec<String>,
}

/// `POST /v1/plan`: what would become of these jobs if they were submitted now?
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    pub jobs: Vec<JobSpec>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanAnswers {
    pub jobs: Vec<PlanAnswer>,
}

/// The answer for one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanAnswer {
    pub name: String,
    /// The past run on which the answer rests, of several that of middle length; without one nothing can be predicted.
    pub like: Option<String>,
    /// All of these runs, as in `done`.
    #[serde(default)]
    pub basis: Option<String>,
    /// The share it would get at first.
    pub share: Option<f64>,
    pub done: Option<Forecast>,
    pub deadline: Option<DeadlineInfo>,
    /// What it would wait for before it starts.
    #[serde(default)]
    pub waits_for: Option<PlannedWait>,
    /// Jobs that would end later than predicted now, or whose deadlines could no longer be promised.
    pub delays: Vec<String>,
    /// All of it in one sentence, with times of the daemon's time zone.
    pub text: String,
}

/// What a job would wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PlannedWait {
    /// A free slot.
    Slot,
    /// The jobs of its `after`.
    Jobs,
}

impl PlanAnswer {
    /// All that can be said of a job of which no earlier run is known.
    pub const UNKNOWN: &str = "not known: no run of this program has ended well here yet; submit it, and its end is \
                               predicted within its first steps";

    /// The answer where no job was ever run.
    pub fn without_runs(spec: &JobSpec) -> PlanAnswer {
        let state = DeadlineState::Unknown;
        let deadline = spec.deadline_s().map(|at_s| DeadlineInfo {
            at: crate::clock::rfc3339(at_s),
            at_s,
            tolerance_s: spec.tolerance_s(),
            state,
            miss: None,
            outcome: None,
        });
        let text = PlanAnswer::UNKNOWN.to_owned();
        PlanAnswer {
            name: spec.label(),
            like: None,
            basis: None,
            share: None,
            done: None,
            deadline,
            waits_for: None,
            delays: Vec::new(),
            text,
        }
    }

    /// All of it in one sentence, with times of this process's time zone.
    pub fn sentence(&self) -> String {
        let Some(basis) = &self.basis else {
            // A daemon of an earlier version sends the sentence alone.
            return if self.text.is_empty() { PlanAnswer::UNKNOWN.to_owned() } else { self.text.clone() };
        };
        let when = self.done.as_ref().map_or_else(
            || "at a time that cannot be predicted".to_owned(),
            |d| format!("at {}", local_within(d.at_s, 0.5 * (d.latest_s - d.earliest_s))),
        );
        let prospect = self.deadline.as_ref().map(|due| due.prospect(self.done.as_ref()));
        let cause = self.deadline.as_ref().and_then(|due| due.miss.as_ref()).map(|miss| &miss.cause);
        let verdict = match (prospect, prospect.and_then(Prospect::of_plan), cause) {
            (Some(Prospect::Late), Some(would), Some(MissCause::EarliestEnd { earliest_s, .. })) => {
                format!("{would}: done at {} at the earliest", local(*earliest_s))
            }
            (Some(Prospect::Late), Some(would), _) => format!("{would}: done {when}"),
            (_, Some(would), _) => format!("{would}, done {when}"),
            (_, None, _) => format!("would be done {when}"),
        };
        let delays = match self.delays.as_slice() {
            [] => "would delay no other job".to_owned(),
            delays => format!("would delay {}", delays.join(", ")),
        };
        let waits = match self.waits_for {
            Some(PlannedWait::Slot) => "would wait for a free slot first; ",
            Some(PlannedWait::Jobs) => "would wait for the jobs that it names first; ",
            None => "",
        };
        format!("{verdict} (by {basis}); {waits}{delays}")
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobList {
    pub jobs: Vec<JobInfo>,
}

/// `POST /v1/jobs`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SubmitRequest {
    pub jobs: Vec<JobSpec>,
    /// The caller will be the parent of the (single) job itself and asks for admission.
    #[serde(default)]
    pub attached: bool,
    /// The environment that the jobs' own variables are added to; for jobs that are not attached.
    /// Kept in JOBDIR/spec.json (0600) until the job has started, never shown.
    #[serde(default)]
    pub base_env: BTreeMap<String, String>,
    /// For an attached job: the names of the variables that its environment has, so that a tuned
    /// start leaves them alone.
    #[serde(default)]
    pub env_names: Vec<String>,
}

/// `POST /v1/jobs/{job}/admission`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Admission {
    /// Start now.
    Start { start: StartOrder },
    /// Ask again.
    Waiting { reason: Option<ReasonInfo> },
    /// The job ended before it began: stopped, or a job it depends on failed.
    Refused { state_now: JobState, reason: Option<ReasonInfo> },
}

/// How a supervisor starts one attempt.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct StartOrder {
    pub attempt: u32,
    /// JOBDIR.
    pub dir: String,
    /// Files into which the child writes its pid before it execs. A file that cannot be written is
    /// reported in `started`, never fatal.
    pub procs_files: Vec<String>,
    /// Added to the environment unless the variable is there already.
    pub env: Vec<StartVar>,
    /// CPUs the child binds itself to, in the kernel's list format (`0-3,8`).
    pub cpus: Option<String>,
    /// What the owner should know about this start.
    pub notes: Vec<String>,
}

/// One variable of a tuned start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StartVar {
    pub name: String,
    pub value: String,
    pub why: String,
}

/// `POST /v1/jobs/{job}/started`, and the content of JOBDIR/started.json.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct StartReport {
    pub attempt: u32,
    pub pid: i32,
    /// Field 22 of /proc/PID/stat: with the pid it names one process for ever.
    pub start_ticks: u64,
    #[serde(default)]
    pub notes: Vec<String>,
}

/// `POST /v1/jobs/{job}/exited`, and the content of JOBDIR/exit.json: `code` or `signal`, or `error` if it
/// never began.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct ExitReport {
    pub attempt: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Why the program could not be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Unix seconds.
    #[serde(default)]
    pub ended_s: f64,
}

/// JOBDIR/spec.json (0600): all that `gainshare supervise JOBDIR --attempt N` needs. Written when
/// the job is submitted, completed with `order` and `socket` when it is admitted, and removed when
/// it has started, because it holds the environment's values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SuperviseFile {
    pub id: u64,
    pub name: String,
    pub spec: JobSpec,
    pub base_env: BTreeMap<String, String>,
    pub order: StartOrder,
    /// The daemon's socket, to report start and exit to.
    pub socket: String,
}

/// `POST /v1/jobs/{job}/stop`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// Seconds between SIGTERM and SIGKILL.
    #[serde(default = "default_grace_s")]
    pub grace_s: f64,
}

fn default_grace_s() -> f64 {
    10.0
}

impl Default for StopRequest {
    fn default() -> Self {
        StopRequest { grace_s: default_grace_s() }
    }
}

/// `POST /v1/shutdown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ShutdownRequest {
    #[serde(default)]
    pub stop_jobs: bool,
}

/// `GET /v1/jobs/{job}/explain`: why a job has what it has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    pub job: JobInfo,
    pub policy: String,
    /// What the policy makes as early as possible, `finish` or `quality`, where that can be chosen.
    #[serde(default)]
    pub aim: Option<String>,
    /// Parts of the node that the last decision gave it.
    pub share: Option<Resources<f64>>,
    pub limit: Option<Resources<f64>>,
    /// As read back from the kernel or the engine, e.g. `cpu.weight=42`.
    pub in_force: Vec<Setting>,
    pub growth: Resources<Option<f64>>,
    pub category: Option<String>,
    pub neighbours: Vec<Neighbour>,
    pub metric: Option<MetricInfo>,
    /// Lines refused, values that were not finite, and so on.
    pub metric_notes: Vec<String>,
    /// What a tuned start set, and why.
    pub start_env: Vec<StartVar>,
    pub notes: Vec<String>,
    /// The last five, newest first.
    pub decisions: Vec<DecisionInfo>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Setting {
    pub name: String,
    pub value: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Neighbour {
    pub id: u64,
    pub name: String,
    pub share: Option<f64>,
    pub category: Option<String>,
    pub growth: Option<f64>,
}

/// What one plan said about one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DecisionInfo {
    pub at: String,
    /// Unix seconds.
    pub at_s: f64,
    pub generation: u64,
    pub share: Option<f64>,
    pub limit: Option<f64>,
    pub growth: Option<f64>,
    pub category: Option<String>,
    pub reason: ReasonInfo,
    /// What could not be applied, if so.
    pub error: Option<String>,
}

/// `GET /v1/jobs/{job}/samples?since=SECONDS`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SampleList {
    pub metric: Option<String>,
    /// Unix seconds of the job's start: what `time_s` counts from.
    pub origin_s: f64,
    pub samples: Vec<SampleInfo>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SampleInfo {
    /// Seconds since the job's start.
    pub time_s: f64,
    pub step: Option<u64>,
    pub value: f64,
}

/// One plan with names, for `GET /v1/plans?last=N` and the event stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanInfo {
    pub generation: u64,
    pub at: String,
    pub at_s: f64,
    pub starts: Vec<u64>,
    pub jobs: Vec<PlanJob>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanJob {
    pub id: u64,
    pub name: String,
    pub share: Option<f64>,
    pub limit: Option<f64>,
    pub growth: Option<f64>,
    pub category: String,
    pub reason: ReasonInfo,
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanList {
    pub plans: Vec<PlanInfo>,
}

/// What `GET /v1/events` streams. The event's name is the tag.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Event {
    /// A job came, changed its state or was forgotten.
    Job {
        job: Box<JobInfo>,
    },
    Forgotten {
        id: u64,
        name: String,
    },
    /// At most one for each job and second.
    Sample {
        id: u64,
        name: String,
        metric: String,
        time_s: f64,
        step: Option<u64>,
        value: f64,
    },
    Plan {
        plan: PlanInfo,
    },
    /// The reader was too slow and missed this many events: read the jobs again.
    Missed {
        events: u64,
    },
    ShuttingDown,
}

impl Event {
    pub fn name(&self) -> &'static str {
        match self {
            Event::Job { .. } => "job",
            Event::Forgotten { .. } => "forgotten",
            Event::Sample { .. } => "sample",
            Event::Plan { .. } => "plan",
            Event::Missed { .. } => "missed",
            Event::ShuttingDown => "shutting-down",
        }
    }
}

/// `GET /v1/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    pub version: String,
    pub api: String,
}

/// Every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// One line that names the thing and the remedy.
    pub error: String,
    pub code: ErrorCode,
}

/// Errors that programs tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    BadRequest,
    Unauthorised,
    ForbiddenHost,
    ForbiddenOrigin,
    NotFound,
    DuplicateName,
    /// The job is not in a state for this (still running, already ended, an older attempt).
    WrongState,
    TooLarge,
    InvalidSpec,
    MissingProgram,
    /// The journal cannot take more: nothing was changed.
    DiskFull,
    Internal,
    ShuttingDown,
    Timeout,
}

impl ErrorCode {
    /// The HTTP status that goes with it.
    pub fn status(self) -> u16 {
        match self {
            ErrorCode::BadRequest => 400,
            ErrorCode::Unauthorised => 401,
            ErrorCode::ForbiddenHost | ErrorCode::ForbiddenOrigin => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::DuplicateName | ErrorCode::WrongState => 409,
            ErrorCode::TooLarge => 413,
            ErrorCode::InvalidSpec | ErrorCode::MissingProgram => 422,
            ErrorCode::Internal => 500,
            ErrorCode::ShuttingDown => 503,
            ErrorCode::Timeout => 504,
            ErrorCode::DiskFull => 507,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_in_the_words_of_earlier_versions_is_read_and_written_in_those_of_now() {
        let deadline =
            |name: &str, state: &str| format!(r#"{{"at":"","at_s":9.0,"tolerance_s":0.0,"{name}":"{state}"}}"#);
        let read: DeadlineInfo = serde_json::from_str(&deadline("standing", "late")).expect("a deadline");
        assert_eq!(read.state, DeadlineState::AtRisk);
        assert_eq!(serde_json::to_string(&read).expect("JSON"), deadline("state", "at-risk"));
    }
}
