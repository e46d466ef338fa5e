//! The table of jobs: the only owner of what is known of each job and of the numbers of owners.

use super::page::JobPage;
use super::program::{PastRuns, Shape};
use super::pump::Pump;
use super::reports::{Progress, Reports};
use super::rhythm::Rhythm;
use super::task_shares::TaskShares;
use crate::error::Refusal;
use crate::record::JobRecord;
use crate::types::{DecisionInfo, ErrorCode, Event, JobInfo, JobState};
use gainshare_core::model::{JobId, OwnerId, Span, Time};
use gainshare_core::plan::{Reason, Verdict};
use gainshare_core::replay::RecordedDecision;
use gainshare_core::signal::{ClaimSource, Sample};
use gainshare_core::teams::TeamUse;
use gainshare_core::view::{ClaimRecord, FinishedRun};
use gainshare_limits::gpu::GpuUse;
use gainshare_limits::process::ProcessWatch;
use gainshare_limits::{AppliedLimits, JobHandle, RuntimeKind};
use gainshare_page::{GPU_VARIABLE, PAGE_VARIABLE};
use std::collections::{BTreeMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Ended jobs that are remembered, and for how long.
const JOBS_KEPT: usize = 1000;
const KEPT_FOR: Span = Span::from_secs(30 * 86_400);

/// How a job ended, while its last files are being read. Its end is recorded after that.
pub(super) struct PendingEnd {
    pub(super) state: JobState,
    pub(super) exit_code: Option<i32>,
    pub(super) signal: Option<i32>,
    pub(super) why: Option<String>,
    /// When it ended by the wall clock, as its supervisor recorded it.
    pub(super) ended_s: Option<f64>,
    /// Answered when the end is recorded.
    pub(super) replies: Vec<EndReply>,
}

/// The answer to the supervisor that reported an end.
pub(super) type EndReply = oneshot::Sender<Result<JobInfo, Refusal>>;

/// One job: its record and what is known of it beyond the record.
pub(super) struct Job {
    pub(super) record: JobRecord,
    pub(super) progress: Progress,
    /// Present while the job is live.
    pub(super) reports: Option<Reports>,
    /// Copies a container's output.
    pub(super) pump: Option<Pump>,
    /// What its command has in common with others of the same program.
    pub(super) shape: Shape,
    /// Earlier runs of the same program, the newest last.
    pub(super) history: Vec<FinishedRun>,
    /// What those runs say of this one before its own reports do.
    pub(super) past: Option<PastRuns>,
    /// What the policy will decide about its deadline once the job runs, if it goes as `past` says. Found when the job
    /// starts: what held at its submission may hold no longer after a wait in the queue.
    pub(super) early_reason: Option<Reason>,
    /// The job's deadline was no more in danger after the miss that was noted last.
    pub(super) was_in_time: bool,
    /// Steps of the newest of them that reported none, by its rhythm.
    pub(super) past_steps: Option<u64>,
    /// The most memory that earlier runs had on one GPU.
    pub(super) past_gpu_bytes: Option<u64>,
    /// How claims of each source fared in other programs of the same owner.
    pub(super) claims: BTreeMap<ClaimSource, ClaimRecord>,
    pub(super) verdict: Option<Verdict>,
    pub(super) in_force: Option<AppliedLimits>,
    pub(super) apply_error: Option<String>,
    /// The page of the library inside this job.
    pub(super) page: JobPage,
    /// Threads of its parallel regions; 0 before the first plan.
    pub(super) team: u32,
    pub(super) team_use: TeamUse,
    pub(super) gpu: GpuUse,
    pub(super) task_shares: TaskShares,
    pub(super) rhythm: Rhythm,
    /// Newest last.
    pub(super) decisions: VecDeque<DecisionInfo>,
    /// The last decision about this job, for replay. Jobs that are decided together share it. Kept while
    /// the job is live.
    pub(super) record_of_decision: Option<Arc<RecordedDecision>>,
    /// When the job is killed, or killed again.
    pub(super) kill_at: Option<Time>,
    /// When the engine is asked again to stop this container. It did not take the last request.
    pub(super) stop_again_at: Option<Time>,
    /// How often the job was killed.
    pub(super) kills: u32,
    pub(super) end: Option<PendingEnd>,
    /// This container is being taken over on another thread.
    pub(super) is_busy: bool,
    /// This container ended, and the rest of its output is being read on another thread.
    pub(super) is_ending: bool,
    /// The job's leader, once it was asked for.
    pub(super) leader: Option<ProcessWatch>,
    /// When its supervisor last made contact while the job waits or starts.
    pub(super) heard: Time,
    /// When its leader, or its supervisor before the start, was first found dead without a record of the end.
    pub(super) missed: Option<Time>,
    /// Output was written since it was last read.
    pub(super) dirty: bool,
    pub(super) next_read: Time,
    pub(super) last_read: Time,
    /// When its counters were last read.
    pub(super) usage_read: Time,
    /// When a sample was last put on the event stream.
    pub(super) sample_sent: Time,
    /// The position changed since it was last committed.
    pub(super) unsaved: bool,
    /// The journal has a position of this job, and the samples that were committed after it lead to the present one.
    pub(super) is_replayable: bool,
}

impl Job {
    /// How claims from the source of this job's total fared in other programs of its owner.
    pub(super) fn claim_record(&self) -> ClaimRecord {
        let source = self.progress.tracker.signal().claimed_by;
        source.and_then(|source| self.claims.get(&source)).copied().unwrap_or_default()
    }

    /// What earlier runs say of this one, while its own speed is not measured.
    pub(super) fn past_guess(&self) -> Option<&PastRuns> {
        self.past.as_ref().filter(|_| !self.progress.pace.is_measured())
    }

    /// Whether it has a deadline, and earlier runs say what becomes of it.
    pub(super) fn is_foreseen(&self) -> bool {
        self.record.spec.deadline.is_some() && self.past_guess().is_some()
    }

    /// When it is killed, or killed again. A job that has ended is not, although its record keeps the moment.
    pub(super) fn kill_due(&self) -> Option<Time> {
        self.kill_at.filter(|_| self.record.is_live())
    }

    /// When the engine is asked again to stop this container.
    pub(super) fn stop_due(&self) -> Option<Time> {
        self.stop_again_at.filter(|_| self.record.is_live())
    }

    /// Notes what earlier runs of its program say.
    pub(super) fn set_past(&mut self, past: Option<PastRuns>) {
        self.past = past;
        self.expect_past_pace();
    }

    /// The job's steps are expected to take as long as those of earlier runs of its program.
    pub(super) fn expect_past_pace(&mut self) {
        self.progress.pace.expect(self.past.as_ref().map(|past| past.pace));
    }

    pub(super) fn new(record: JobRecord, now: Time) -> Job {
        Job {
            kill_at: record.kill_at,
            stop_again_at: None,
            shape: Shape::of(&record.spec.command),
            record,
            progress: Progress::default(),
            reports: None,
            pump: None,
            history: Vec::new(),
            past: None,
            early_reason: None,
            was_in_time: false,
            past_steps: None,
            past_gpu_bytes: None,
            claims: BTreeMap::new(),
            verdict: None,
            in_force: None,
            apply_error: None,
            page: JobPage::Unknown,
            team: 0,
            team_use: TeamUse::default(),
            gpu: GpuUse::default(),
            task_shares: TaskShares::default(),
            rhythm: Rhythm::default(),
            decisions: VecDeque::new(),
            record_of_decision: None,
            kills: 0,
            end: None,
            is_busy: false,
            is_ending: false,
            leader: None,
            heard: now,
            missed: None,
            dirty: true,
            next_read: now,
            last_read: Time::ZERO,
            usage_read: Time::ZERO,
            sample_sent: Time::ZERO,
            unsaved: false,
            is_replayable: false,
        }
    }

    /// Whether the process that was started runs.
    pub(super) fn has_live_leader(&mut self) -> bool {
        let Some(leader) = self.record.leader else { return false };
        let watch = self.leader.take().filter(|watch| watch.identity() == leader);
        self.leader.insert(watch.unwrap_or_else(|| ProcessWatch::new(leader))).is_alive()
    }

    /// Whether the library inside was given to this attempt.
    pub(super) fn has_inside(&self) -> bool {
        let order = self.record.order.as_ref();
        order.is_some_and(|order| order.env.iter().any(|variable| variable.name == PAGE_VARIABLE))
    }

    /// Whether launches on a GPU are caught in this attempt: by our order, or because the owner set the variable.
    pub(super) fn catches_launches(&self) -> bool {
        let (record, is_switch) = (&self.record, |name: &str| name == GPU_VARIABLE);
        let ordered = record.order.iter().flat_map(|order| &order.env).map(|variable| variable.name.as_str());
        let own = record.spec.env.keys().chain(&record.env_names).map(String::as_str);
        ordered.chain(own).any(is_switch)
    }

    /// How its runtime knows it, once there is something to know.
    pub(super) fn handle(&self) -> Option<JobHandle> {
        match self.record.spec.runtime {
            RuntimeKind::Process => self.record.group.as_ref().map(|g| g.handle.clone()),
            RuntimeKind::Docker => self.record.container.clone().map(|key| JobHandle { job: self.record.id, key }),
        }
    }

    /// A sample as the event stream shows it.
    pub(super) fn sample_event(&self, sample: &Sample, now: Time) -> Option<Event> {
        let origin = self.record.started.map_or(self.record.submitted.time, |m| m.time);
        Some(Event::Sample {
            id: self.record.id.0,
            name: self.record.name.clone(),
            metric: self.progress.metric.clone()?,
            time_s: now.since(origin).as_secs_f64(),
            step: sample.step,
            value: sample.value,
        })
    }

    /// All that a restart needs, as the journal keeps it; `None` if it cannot be written as text.
    pub(super) fn position(&self) -> Option<String> {
        let position = self.reports.as_ref().map_or_else(|| self.progress.position.clone(), Reports::position);
        let copied = self.pump.as_ref().map_or(self.progress.copied, Pump::copied);
        let progress = Progress { position, copied, ..self.progress.clone() };
        serde_json::to_string(&progress)
            .inspect_err(|e| tracing::warn!(job = %self.record.id, "its reading position cannot be kept: {e}"))
            .ok()
    }
}

/// All jobs that are remembered, live or ended, and the number of each owner.
pub(super) struct JobTable {
    jobs: BTreeMap<JobId, Job>,
    owners: BTreeMap<String, u32>,
}

impl Deref for JobTable {
    type Target = BTreeMap<JobId, Job>;

    fn deref(&self) -> &Self::Target {
        &self.jobs
    }
}

impl DerefMut for JobTable {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.jobs
    }
}

impl JobTable {
    pub(super) fn new(owners: BTreeMap<String, u32>) -> JobTable {
        JobTable { jobs: BTreeMap::new(), owners }
    }

    /// The ids of jobs that are as wanted, for loops that change the table.
    pub(super) fn ids(&self, wanted: impl Fn(&Job) -> bool) -> Vec<JobId> {
        self.jobs.values().filter(|j| wanted(j)).map(|j| j.record.id).collect()
    }

    pub(super) fn live(&self) -> Vec<JobId> {
        self.ids(|j| j.record.is_live())
    }

    pub(super) fn live_count(&self) -> usize {
        self.jobs.values().filter(|j| j.record.is_live()).count()
    }

    /// Jobs that start or run.
    pub(super) fn holding_slots(&self) -> Vec<JobId> {
        self.ids(|j| j.record.holds_slot())
    }

    pub(super) fn is_live(&self, id: JobId) -> bool {
        self.jobs.get(&id).is_some_and(|j| j.record.is_live())
    }

    pub(super) fn job(&self, id: JobId) -> Result<&Job, Refusal> {
        self.jobs.get(&id).ok_or_else(|| Refusal::new(ErrorCode::NotFound, format!("there is no job {id}")))
    }

    /// Finds a job by id or by name; of several with the name the live one, else the latest.
    pub(super) fn find(&self, text: &str) -> Result<JobId, Refusal> {
        if let Ok(id) = text.parse::<u64>()
            && self.jobs.contains_key(&JobId(id))
        {
            return Ok(JobId(id));
        }
        let named = self.jobs.values().filter(|j| j.record.name == text);
        named.max_by_key(|j| (j.record.is_live(), j.record.id)).map(|j| j.record.id).ok_or_else(|| {
            Refusal::new(ErrorCode::NotFound, format!("there is no job `{text}`: `gainshare ps --all` lists them"))
        })
    }

    /// The live job that is this container.
    pub(super) fn by_container(&self, container: &str) -> Option<&Job> {
        self.jobs.values().find(|j| j.record.is_live() && j.record.container.as_deref() == Some(container))
    }

    /// The jobs that wait for this one, which did not end well, and why they fail.
    pub(super) fn dependants(&self, id: JobId) -> Vec<(JobId, String)> {
        let Some(job) = self.jobs.get(&id) else { return Vec::new() };
        let why = format!("job {}, which it waits for, ended as {}", job.record.name, job.record.state.name());
        let is_waiting = |j: &Job| j.record.state == JobState::Queued && j.record.after.contains(&id);
        self.ids(is_waiting).into_iter().map(|dependant| (dependant, why.clone())).collect()
    }

    /// The oldest ended jobs, which are not remembered any more, and those whose authors want them forgotten.
    pub(super) fn surplus(&self, now: Time) -> Vec<JobId> {
        let mut ended: Vec<(Time, JobId)> = self
            .jobs
            .values()
            .filter(|j| !j.record.is_live())
            .map(|j| (j.record.ended.map_or(j.record.submitted.time, |m| m.time), j.record.id))
            .collect();
        ended.sort();
        let surplus = ended.len().saturating_sub(JOBS_KEPT);
        let old = ended.iter().take_while(|(at, _)| now.since(*at) > KEPT_FOR).count();
        let count = surplus.max(old);
        let is_over = |(at, id): &&(Time, JobId)| {
            let kept = self.jobs.get(id).and_then(|job| job.record.spec.keep_for());
            kept.is_some_and(|kept| now.since(*at) >= Span::from_secs_f64(kept.as_secs_f64())) && !self.is_awaited(*id)
        };
        let unwanted = ended.iter().skip(count).filter(is_over).map(|(_, id)| *id);
        ended.iter().take(count).map(|(_, id)| *id).chain(unwanted).collect()
    }

    /// Whether a job that has not ended waits for this one.
    pub(super) fn is_awaited(&self, id: JobId) -> bool {
        self.jobs.values().any(|job| job.record.is_live() && job.record.after.contains(&id))
    }

    pub(super) fn is_known_owner(&self, name: &str) -> bool {
        self.owners.contains_key(name)
    }

    pub(super) fn add_owner(&mut self, name: &str, number: u32) {
        self.owners.insert(name.to_owned(), number);
    }

    pub(super) fn owner(&self, name: &str) -> OwnerId {
        OwnerId(self.owners.get(name).copied().unwrap_or(0))
    }

    /// Removes a job and, with its last job, its owner: the journal does the same.
    pub(super) fn forget(&mut self, id: JobId) {
        self.jobs.remove(&id);
        let JobTable { jobs, owners } = self;
        owners.retain(|name, _| jobs.values().any(|j| j.record.owner == *name));
    }
}
