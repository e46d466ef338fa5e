//! GPU shares: each GPU is shared among its jobs by the same policy as the machine's CPU.
//!
//! **Problem.** A GPU has no weights: its driver gives all jobs with work equal slices of time. The library inside
//! a job can pace the job's launches to a part of the GPU's time, which the page contains.
//!
//! **How.** Once a second the driver reads the report of each job's library, more rarely where no launches are caught.
//! For every GPU there is a decider of its own, with the policy of the daemon: its view is a node with one GPU as the
//! only core, whose jobs are those that launch work there. Growth efficiency and gain are so computed for GPU time
//! exactly as for CPU time. The job with the largest share is never paced: it takes all that the others leave. A job
//! alone on its GPU is not paced. A job that launches nothing for some time leaves its share to the others, but the
//! policy remembers the job. What a job with a large share leaves idle goes to the paced jobs ([`Slack`]). Jobs on
//! several GPUs, or of several ranks, are not paced and not counted.
//!
//! **Without the library.** A job whose launches are not caught, but which NVML shows on one GPU, takes part in the
//! decisions. Its processes are stopped and continued in periods of 0.1 s ([`Pacer`]), through a keeper that continues
//! them when the daemon is gone.
//!
//! **Properties.** `the_late_short_job_ends_sooner_and_all_jobs_together_no_later`, on a simulated GPU. In
//! `tests/gpu.rs`: `a_job_whose_launches_are_not_caught_is_stopped_for_a_part_of_the_time`,
//! `a_stopped_job_goes_on_when_the_daemon_is_killed`.

use super::gpu_meter::GpuMeter;
use super::gpu_use::{GpuUse, Slack, orders, parts, slices};
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
use gainshare_core::decider::{Decider, Outcome};
use gainshare_core::model::{JobId, PerResource, Time};
use gainshare_core::policy::Policy;
use gainshare_core::replay::RecordedDecision;
use gainshare_core::view::{JobView, NodeView, View};
use gainshare_limits::RuntimeKind;
use gainshare_limits::process::{PacedJob, Pacer};
use gainshare_page::{GPU_VARIABLE, RANK_VARIABLES, REPORT_SUFFIX};
use std::collections::BTreeMap;

/// One GPU: its policy's memory, its last decision, and what was left unused.
struct Gpu {
    control: Decider,
    record: Option<RecordedDecision>,
    idle_s: f64,
    decided_at: Option<Time>,
    slack: Slack,
}

/// All GPUs that jobs use.
#[derive(Default)]
pub(super) struct Gpus {
    /// By their place on the bus.
    shared: BTreeMap<u64, Gpu>,
    pub(super) meter: GpuMeter,
    /// Made when the first job is to be stopped.
    pacer: Option<Pacer>,
    /// Why jobs cannot be stopped and continued.
    pub(super) pacer_problem: Option<String>,
    /// Waiting jobs for whose memory no GPU has room, with the reason.
    pub(super) without_room: BTreeMap<JobId, String>,
}

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
        let shared = self.shared.entry(gpu).or_insert_with(|| Gpu::new(policy.clone()));
        shared.share(jobs, now)
    }

    /// The last decision about `job` on its GPU, with all that is needed to make its plan again.
    pub(super) fn recorded_decision(&self, job: &Job) -> Result<RecordedDecision, Refusal> {
        let record = self.shared.get(&job.gpu.gpu).and_then(|gpu| gpu.record.clone());
        record.filter(|record| record.plan.verdicts.contains_key(&job.record.id)).ok_or_else(|| {
            let name = &job.record.name;
            let text = format!("no decision about a GPU share of `{name}` is kept: it launches no work that is shared");
            Refusal::new(ErrorCode::NotFound, text)
        })
    }
}

impl Driver {
    /// Reads what jobs did on GPUs and decides their shares. Once a second.
    pub(super) fn share_gpus(&mut self) {
        let now = self.now();
        let stops_jobs = self.runtimes.stops_jobs();
        let config = &self.config;
        let may_stop = |job: &Job| why_never_stopped(job, config, stops_jobs).is_none();
        for (gpu, ids) in self.gpus.read_reports(&mut self.jobs, &self.paths, may_stop, now) {
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

impl Gpu {
    fn new(policy: Policy) -> Gpu {
        let control = Decider::new(policy);
        Gpu { control, record: None, idle_s: 0.0, decided_at: None, slack: Slack::default() }
    }

    /// Counts the GPU time of the jobs, decides their shares and says what their pages must contain. `None`: no
    /// decision is due; an error: why the plan was rejected. The shares then stay as they are.
    fn share(&mut self, jobs: &mut [(JobView, GpuUse)], now: Time) -> Option<Result<(), String>> {
        let by_waiting = slices(&jobs.iter().map(|(_, of)| of.working).collect::<Vec<f64>>());
        let slice = |((_, of), by_waiting): (&(JobView, GpuUse), f64)| of.measured_slice(now).unwrap_or(by_waiting);
        let slices: Vec<f64> = jobs.iter().zip(by_waiting).map(slice).collect();
        let elapsed_s = self.decided_at.map_or(0.0, |at| now.since(at).as_secs_f64());
        self.decided_at = Some(now);
        self.idle_s += (1.0 - slices.iter().sum::<f64>()).max(0.0) * elapsed_s;
        for ((view, of), slice) in jobs.iter_mut().zip(&slices) {
            of.used_s += slice * elapsed_s;
            view.consumed_node_s = PerResource { cpu: of.used_s, ..PerResource::default() };
        }
        let idle_node_s = Some(self.idle_s);
        let node = NodeView { id: HERE, cores: 1.0, speed: 1.0, memory_bytes: 0, slots: None, idle_node_s };
        let view = View { now, nodes: vec![node], jobs: jobs.iter().map(|(view, _)| view.clone()).collect() };
        let outcome = match self.control.decide_recorded(view) {
            Outcome::NotDue => None,
            Outcome::Decision(decision) => {
                for (view, of) in jobs.iter_mut() {
                    of.share = decision.plan.target(view.id).map(|target| target.share.cpu.get());
                }
                self.record = decision.record();
                Some(Ok(()))
            }
            Outcome::Rejected(rejection) => {
                let list = rejection.reasons();
                let record = rejection.record.and_then(|r| serde_json::to_string(&r).ok());
                tracing::error!(record, "a plan for a GPU failed its check and is not applied: {list}");
                Some(Err(list))
            }
        };
        // Jobs without work leave their shares to the others and are not paced, so that they can begin at once.
        let busy: Vec<usize> = (0..jobs.len()).filter(|&i| jobs[i].1.is_busy(now)).collect();
        let shares: Vec<f64> = busy.iter().map(|&i| jobs[i].1.share.unwrap_or(1.0)).collect();
        let (parts, is_paced) = parts(&shares);
        let with_work: Vec<(JobId, &GpuUse)> = busy.iter().map(|&i| (jobs[i].0.id, &jobs[i].1)).collect();
        let slack = self.slack.update(&with_work, &is_paced, now);
        for (i, order) in busy.into_iter().zip(orders(&parts, &is_paced, slack)) {
            jobs[i].1.order = order;
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_core::policy::Preset;
    use gainshare_core::signal::{Sample, Tracker};
    use gainshare_core::view::Phase;
    use gainshare_page::{Report, WHOLE_GPU};

    /// A job on a simulated GPU.
    struct SimulatedJob {
        starts_s: f64,
        /// How long it would train alone.
        alone_s: f64,
        /// The part of the GPU that it uses alone.
        fills: f64,
        /// The part of its time that it launches, alone. The rest of the time it waits.
        launches: f64,
        done_s: f64,
        ended_s: Option<f64>,
        tracker: Tracker,
        of: GpuUse,
        report: Report,
    }

    /// Seconds from the start of a program to its first step. A few launches come in the midst.
    const STARTING_S: f64 = 5.0;

    const TICK_S: f64 = 0.05;

    /// Steps a second alone, and launches of one tick.
    const PACE: f64 = 20.0;
    const LAUNCHES_OF_TICK: u64 = 100;

    impl SimulatedJob {
        fn new(starts_s: f64, alone_s: f64, fills: f64, launches: f64) -> SimulatedJob {
            let report = Report { gpu: 5, gpus: 1, ..Report::default() };
            let (tracker, of) = (Tracker::default(), GpuUse::default());
            SimulatedJob { starts_s, alone_s, fills, launches, done_s: 0.0, ended_s: None, tracker, of, report }
        }

        fn is_training(&self, now_s: f64) -> bool {
            self.ended_s.is_none() && now_s >= self.starts_s + STARTING_S
        }

        /// The part of the wall time in which the library lets the job work.
        fn working(&self, now_s: f64) -> f64 {
            match self.of.order {
                _ if !self.is_training(now_s) => 0.0,
                (0, _) => 1.0,
                (part, jobs) => (f64::from(part) / f64::from(WHOLE_GPU) * f64::from(jobs)).min(1.0),
            }
        }

        fn train(&mut self, got: f64, working: f64, now_s: f64) {
            let before = (PACE * self.done_s) as u64;
            self.done_s += got / self.fills * TICK_S;
            let step = (PACE * self.done_s) as u64;
            let (value, total) = (0.3 + (-self.done_s).exp(), Some((PACE * self.alone_s) as u64));
            if step > before {
                self.tracker.push(Time::from_secs_f64(now_s), Sample { value, step: Some(step), total });
            }
            self.report.paused_ns += ((1.0 - working) * TICK_S * 1e9) as u64;
            self.report.waited_ns += ((working - self.launches * got / self.fills).max(0.0) * TICK_S * 1e9) as u64;
            self.report.launches += LAUNCHES_OF_TICK;
            self.ended_s = (self.done_s >= self.alone_s).then_some(now_s);
        }

        fn view(&self, id: u64) -> JobView {
            let since = Time::from_secs_f64(self.starts_s);
            let phase = Phase::Running { node: HERE, since, attempt: 1 };
            let signal = self.tracker.signal();
            JobView { id: JobId(id), arrived: since, phase, signal, on_gpu: true, ..JobView::default() }
        }
    }

    /// What each job gets of the GPU: equal slices, but no more than it can use.
    fn dealt(most: &[f64]) -> Vec<f64> {
        let mut got = vec![0.0; most.len()];
        let mut left = 1.0;
        let mut order: Vec<usize> = (0..most.len()).collect();
        order.sort_by(|&a, &b| most[a].total_cmp(&most[b]));
        for (place, i) in order.into_iter().enumerate() {
            got[i] = most[i].min(left / (most.len() - place) as f64);
            left -= got[i];
        }
        got
    }

    /// When each of three jobs ends: a long one, a shorter one that leaves most of the GPU idle, and a late short one.
    fn play(is_managed: bool) -> Vec<f64> {
        let mut jobs = [(0.0, 14.0, 1.0, 0.6), (3.0, 7.0, 0.36, 1.0), (10.0, 3.0, 1.0, 0.6)]
            .map(|(at, alone, fills, launches)| SimulatedJob::new(at, alone, fills, launches));
        let mut gpu = Gpu::new(Policy::from(Preset::Gainshare));
        for tick in 1..2000 {
            let now_s = f64::from(tick) * TICK_S;
            let now = Time::from_secs_f64(now_s);
            let working: Vec<f64> = jobs.iter().map(|job| job.working(now_s)).collect();
            let most: Vec<f64> = jobs.iter().zip(&working).map(|(job, working)| job.fills * working).collect();
            for ((job, got), working) in jobs.iter_mut().zip(dealt(&most)).zip(&working) {
                if job.is_training(now_s) {
                    job.train(got, *working, now_s);
                } else if (now_s - job.starts_s - 0.5 * STARTING_S).abs() < TICK_S {
                    job.report.launches += 1;
                }
            }
            if is_managed && tick % 20 == 0 {
                let mut active: Vec<usize> = Vec::new();
                for (i, job) in jobs.iter_mut().enumerate().filter(|(_, job)| job.ended_s.is_none()) {
                    job.of.record(&job.report, now);
                    job.of.order = (0, 0);
                    active.extend(job.of.is_active(now).then_some(i));
                }
                let mut views: Vec<(JobView, GpuUse)> =
                    active.iter().map(|&i| (jobs[i].view(i as u64), jobs[i].of.clone())).collect();
                gpu.share(&mut views, now);
                let replay = gpu.record.as_ref().map(|record| record.replay().expect("it can be replayed"));
                assert_eq!(replay.map_or(vec![], |replay| replay.differences), vec![]);
                for (i, (_, of)) in active.into_iter().zip(views) {
                    jobs[i].of = of;
                }
            }
        }
        jobs.iter().map(|job| job.ended_s.expect("every job ends")).collect()
    }

    #[test]
    fn an_unsound_plan_for_a_gpu_changes_no_share() {
        let (mut gpu, now) = (Gpu::new(Policy::from(Preset::Gainshare)), Time::from_secs_f64(1.0));
        let mut jobs: Vec<(JobView, GpuUse)> =
            (1..=2).map(|id| (SimulatedJob::new(0.0, 5.0, 1.0, 0.5).view(id), GpuUse::default())).collect();
        assert_eq!(gpu.share(&mut jobs, now), Some(Ok(())));
        let shares = |jobs: &[(JobView, GpuUse)]| jobs.iter().map(|(_, of)| of.share).collect::<Vec<_>>();
        let (before, record) = (shares(&jobs), gpu.record.clone());
        assert!(before.iter().all(Option::is_some));
        gpu.control.break_plans();
        jobs.push((SimulatedJob::new(0.0, 5.0, 1.0, 0.5).view(3), GpuUse::default()));
        let outcome = gpu.share(&mut jobs, Time::from_secs_f64(2.0));
        assert!(matches!(&outcome, Some(Err(why)) if why.contains("another moment")), "{outcome:?}");
        assert_eq!((shares(&jobs[..2]), jobs[2].1.share, gpu.record), (before, None, record));
    }

    #[test]
    fn the_late_short_job_ends_sooner_and_all_jobs_together_no_later() {
        let (equal, managed) = (play(false), play(true));
        let training = |ends: &[f64]| ends[2] - 10.0 - STARTING_S;
        // When the late job begins, only the long one is left: equal slices would double its time.
        assert!(training(&managed) < 0.7 * training(&equal), "{managed:?} against {equal:?}");
        let makespan = |ends: &[f64]| ends.iter().copied().fold(0.0, f64::max);
        assert!(makespan(&managed) < 1.03 * makespan(&equal), "{managed:?} against {equal:?}");
    }
}
