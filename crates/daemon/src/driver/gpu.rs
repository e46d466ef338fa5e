//! GPU shares: each GPU is shared among its jobs by the same policy as the machine's CPU.
//!
//! **How.** Once a second the driver reads the report of each job's library, more rarely where no launches are caught.
//! While several jobs use one GPU it reads four times a second: until a reading shows that a job has no more work, the
//! others are paced for nothing. For every GPU that jobs use there is a [`SharedGpu`], with the policy of the daemon.
//! It decides the shares and says what the pages of the jobs must contain. [`super::inside`] writes the pages.
//!
//! **Without the library.** A job whose launches are not caught, but which NVML shows on one GPU, takes part in the
//! decisions. Its processes are stopped and continued in periods of 0.1 s ([`Pacer`]), through a keeper that continues
//! them when the daemon is gone.
//!
//! **Properties.** In `tests/gpu.rs`: `a_job_whose_launches_are_not_caught_is_stopped_for_a_part_of_the_time`,
//! `a_stopped_job_goes_on_when_the_daemon_is_killed`.

use super::gpu_meter::GpuMeter;
use super::inside::read_report;
use super::jobs::{Job, JobTable};
use super::page::PAGE_FILE;
use super::runtimes::keeper_command;
use super::{Driver, HERE};
use crate::config::DaemonConfig;
use crate::error::Refusal;
use crate::paths::Paths;
use crate::spec::StartKind;
use crate::types::{ErrorCode, JobState};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::policy::Policy;
use gainshare_core::replay::RecordedDecision;
use gainshare_core::view::JobView;
use gainshare_limits::RuntimeKind;
use gainshare_limits::gpu::{GpuUse, SharedGpu};
use gainshare_limits::process::{PacedJob, Pacer};
use gainshare_page::{GPU_VARIABLE, RANK_VARIABLES, REPORT_SUFFIX};
use std::collections::BTreeMap;

/// All GPUs that jobs use.
#[derive(Default)]
pub(super) struct Gpus {
    /// By their place on the bus.
    shared: BTreeMap<u64, SharedGpu>,
    pub(super) meter: GpuMeter,
    /// Made when the first job is to be stopped.
    pacer: Option<Pacer>,
    /// Why jobs cannot be stopped and continued.
    pub(super) pacer_problem: Option<String>,
    /// Waiting jobs for whose memory no GPU has room, with the reason.
    pub(super) without_room: BTreeMap<JobId, String>,
    /// When the reports are read again, if that is to be before the next beat.
    pub(super) next_reading: Option<Time>,
}

/// Time between two readings of the reports while several jobs use one GPU.
const SHARED_PACE: Span = Span::from_millis(250);

/// What a rejected plan for a GPU is called among the problems.
const PLAN_OF_GPU: &str = "GPU plan";

/// Whether the job's work on a GPU is to follow its share: its owner or the daemon's configuration asks for that.
pub(super) fn is_asked(job: &Job, config: &DaemonConfig) -> bool {
    let spec = &job.record.spec;
    spec.gpu || (config.gpu && spec.start != StartKind::Plain)
}

/// Why a job is not stopped and continued although its launches are not caught; `None`: it may be. Of an inherited
/// variable only the name is known: one of a launcher counts as several ranks.
pub(super) fn why_never_stopped(job: &Job, config: &DaemonConfig, stops_jobs: bool) -> Option<&'static str> {
    let (record, spec) = (&job.record, &job.record.spec);
    let is_set = |name: &str| spec.env.contains_key(name) || record.env_names.iter().any(|other| other == name);
    match () {
        () if spec.runtime != RuntimeKind::Process => Some("containers are not stopped"),
        () if !is_asked(job, config) => Some("--gpu was not given for it"),
        () if !spec.roles.is_empty() => Some("it has several tasks"),
        () if RANK_VARIABLES.into_iter().any(is_set) => Some("a launcher of ranks has set its variables"),
        () if is_set(GPU_VARIABLE) => Some("GAINSHARE_INSIDE_GPU is set"),
        () if stops_jobs => Some("it is stopped and continued for its share of the CPU already"),
        () => None,
    }
}

impl Gpus {
    /// Reads what jobs did on GPUs: the jobs of each GPU. GPUs without a job are forgotten. `may_stop`: whether a job
    /// may be stopped and continued.
    fn read_reports(
        &mut self,
        jobs: &mut JobTable,
        paths: &Paths,
        may_stop: impl Fn(&Job) -> bool,
        now: Time,
    ) -> BTreeMap<u64, Vec<JobId>> {
        let mut active: BTreeMap<u64, Vec<JobId>> = BTreeMap::new();
        let is_process =
            |job: &&mut Job| job.record.state == JobState::Running && job.record.spec.runtime == RuntimeKind::Process;
        for job in jobs.values_mut().filter(is_process) {
            let id = job.record.id;
            if job.has_inside() && job.gpu.is_due(job.catches_launches(), now) {
                let path = paths.job(id.0).join(format!("{PAGE_FILE}{REPORT_SUFFIX}"));
                if let Some(report) = read_report(&path) {
                    job.gpu.record(&report, now);
                }
            }
            let may_stop = job.gpu.is_shown(now) && may_stop(job);
            job.gpu.record_uncaught(may_stop, now);
            (job.gpu.share, job.gpu.order) = (job.gpu.share.filter(|_| job.gpu.is_active(now)), (0, 0));
            if job.gpu.is_active(now) {
                active.entry(job.gpu.gpu).or_default().push(id);
            }
        }
        self.shared.retain(|gpu, _| active.contains_key(gpu));
        active
    }

    /// Stops and continues exactly these jobs from now on.
    fn stop_and_continue(&mut self, jobs: &[PacedJob], config: &DaemonConfig) {
        if jobs.is_empty() && self.pacer.is_none() {
            return;
        }
        let pacer = self.pacer.get_or_insert_with(|| Pacer::new(keeper_command(config)));
        let problem = pacer.hold(jobs).err().map(|e| format!("the keeper cannot be started: {e}"));
        if let Some(problem) = problem.as_ref().filter(|problem| self.pacer_problem.as_ref() != Some(problem)) {
            tracing::warn!("jobs are not stopped and continued for their share of a GPU: {problem}");
        }
        self.pacer_problem = problem;
    }

    /// Decides the shares of one GPU. `None`: no decision is due; an error: why the plan was rejected.
    fn share(
        &mut self,
        gpu: u64,
        policy: &Policy,
        jobs: &mut [(JobView, GpuUse)],
        now: Time,
    ) -> Option<Result<(), String>> {
        let shared = self.shared.entry(gpu).or_insert_with(|| SharedGpu::new(policy.clone(), HERE));
        shared.share(jobs, now).map(|decided| {
            decided.map_err(|rejection| {
                let list = rejection.reasons();
                let record = rejection.record.and_then(|r| serde_json::to_string(&r).ok());
                tracing::error!(record, "a plan for a GPU failed its check and is not applied: {list}");
                list
            })
        })
    }

    /// The last decision about `job` on its GPU, with all that is needed to make its plan again.
    pub(super) fn recorded_decision(&self, job: &Job) -> Result<RecordedDecision, Refusal> {
        let record = self.shared.get(&job.gpu.gpu).and_then(|gpu| gpu.record().cloned());
        record.filter(|record| record.plan.verdicts.contains_key(&job.record.id)).ok_or_else(|| {
            let name = &job.record.name;
            let text = format!("no decision about a GPU share of `{name}` is kept: it launches no work that is shared");
            Refusal::new(ErrorCode::NotFound, text)
        })
    }
}

impl Driver {
    /// Reads what jobs did on GPUs and decides their shares, if that is due before the next beat.
    pub(super) fn share_gpus_if_due(&mut self, now: Time) {
        if self.gpus.next_reading.is_some_and(|due| now >= due) {
            self.share_gpus();
            self.write_pages();
        }
    }

    /// Reads what jobs did on GPUs and decides their shares.
    pub(super) fn share_gpus(&mut self) {
        let now = self.now();
        let stops_jobs = self.runtimes.stops_jobs();
        let config = &self.config;
        let may_stop = |job: &Job| why_never_stopped(job, config, stops_jobs).is_none();
        let active = self.gpus.read_reports(&mut self.jobs, &self.paths, may_stop, now);
        self.gpus.next_reading = active.values().any(|jobs| jobs.len() > 1).then(|| now + SHARED_PACE);
        for (gpu, ids) in active {
            let picture = self.picture();
            let found = ids.iter().filter_map(|id| self.jobs.get(id));
            let mut jobs: Vec<(JobView, GpuUse)> = found.map(|job| (picture.gpu_view(job), job.gpu.clone())).collect();
            match self.gpus.share(gpu, self.control.policy(), &mut jobs, now) {
                None => {}
                Some(Ok(())) => drop(self.problems.remove(PLAN_OF_GPU)),
                Some(Err(why)) => {
                    self.problems.insert(PLAN_OF_GPU, format!("a plan for a GPU was not applied: {why}"));
                    self.metrics.plans_rejected.inc();
                }
            }
            for (view, of_job) in jobs {
                if let Some(job) = self.jobs.get_mut(&view.id) {
                    job.gpu = of_job;
                }
            }
        }
        let paced = self.jobs.values().filter(|job| job.record.state == JobState::Running).filter_map(|job| {
            // A job that was asked to end needs its time to save.
            let part = job.gpu.stopped_part().filter(|_| !job.record.stop_requested && job.end.is_none())?;
            Some(PacedJob { key: job.record.id.0.to_string(), leader: job.record.leader?, part })
        });
        let paced: Vec<PacedJob> = if self.lease.has_lapsed() { Vec::new() } else { paced.collect() };
        self.gpus.stop_and_continue(&paced, &self.config);
    }
}
