//! Shares of one GPU: the jobs that launch work on it share its time by a policy.
//!
//! **Problem.** A GPU has no weights: its driver gives all jobs with work equal slices of time. The library inside
//! a job can pace the job's launches to a part of the GPU's time, which the page contains.
//!
//! **How.** A [`SharedGpu`] has a decider of its own. Its view is a node with one GPU as the only core, whose jobs are
//! those that launch work there. Growth efficiency and gain are so computed for GPU time exactly as for CPU time. Its
//! owner, the daemon or the node agent, reads the reports of the jobs once a second ([`GpuUse::record`]), calls
//! [`SharedGpu::share`], and writes [`GpuUse::order`] into the pages.
//!
//! The job with the largest share is never paced: it takes all that the others leave. A job alone on its GPU is not
//! paced. A job that launches nothing for some time leaves its share to the others, but the policy remembers the job.
//! What a job with a large share leaves idle goes to the paced jobs (`Slack`). Jobs on several GPUs, or of several
//! ranks, take no part ([`GpuUse::is_active`]). Reports are not trusted: any content gives some share.
//!
//! **Properties.** `the_late_short_job_ends_sooner_and_all_jobs_together_no_later`, on a simulated GPU.

mod gpu_use;
mod measurement;

pub use gpu_use::GpuUse;
pub use measurement::{FRESH, GpuMeasurement};

use gainshare_core::decider::{Decider, Outcome, Rejection};
use gainshare_core::model::{JobId, NodeId, PerResource, Time};
use gainshare_core::policy::Policy;
use gainshare_core::replay::RecordedDecision;
use gainshare_core::view::{JobView, NodeView, View};
use gpu_use::{Slack, orders, parts, time_slices};

/// One GPU: its policy's memory, its last decision, and what was left unused.
pub struct SharedGpu {
    control: Decider,
    /// The node on which the views of its jobs run.
    node: NodeId,
    record: Option<RecordedDecision>,
    idle_s: f64,
    decided_at: Option<Time>,
    slack: Slack,
}

/// A job's view for a decision about a GPU: without what concerns the CPU alone.
pub fn gpu_view(view: JobView) -> JobView {
    let mut view = view;
    // Earlier runs and deadlines are measured in CPU time, and cores and threads are not those of the GPU.
    (view.history, view.deadline, view.waits_for) = (Vec::new(), None, Vec::new());
    (view.signal.pace, view.has_team, view.serial, view.on_one_core) = (None, false, None, false);
    view.on_gpu = true;
    view
}

impl SharedGpu {
    pub fn new(policy: Policy, node: NodeId) -> SharedGpu {
        let control = Decider::new(policy);
        SharedGpu { control, node, record: None, idle_s: 0.0, decided_at: None, slack: Slack::default() }
    }

    pub fn policy(&self) -> &Policy {
        self.control.policy()
    }

    /// The last decision, with all that is needed to make its plan again.
    pub fn record(&self) -> Option<&RecordedDecision> {
        self.record.as_ref()
    }

    /// Counts the GPU time of the jobs, decides their shares and says what their pages must contain. `None`: no
    /// decision is due; an error: the plan was rejected, and the shares stay as they are.
    pub fn share(&mut self, jobs: &mut [(JobView, GpuUse)], now: Time) -> Option<Result<(), Rejection>> {
        let slices = time_slices(&mut jobs.iter_mut().map(|(_, of)| of).collect::<Vec<_>>(), now);
        let elapsed_s = self.decided_at.map_or(0.0, |at| now.since(at).as_secs_f64());
        self.decided_at = Some(now);
        self.idle_s += (1.0 - slices.iter().sum::<f64>()).max(0.0) * elapsed_s;
        for ((view, of), slice) in jobs.iter_mut().zip(&slices) {
            of.used_s += slice * elapsed_s;
            view.consumed_node_s = PerResource { cpu: of.used_s, ..PerResource::default() };
        }
        let idle_node_s = Some(self.idle_s);
        let node = NodeView { id: self.node, cores: 1.0, speed: 1.0, memory_bytes: 0, slots: None, idle_node_s };
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
            Outcome::Rejected(rejection) => Some(Err(rejection)),
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

    const HERE: NodeId = NodeId(0);

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
        let mut gpu = SharedGpu::new(Policy::from(Preset::Gainshare), HERE);
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
        let (mut gpu, now) = (SharedGpu::new(Policy::from(Preset::Gainshare), HERE), Time::from_secs_f64(1.0));
        let mut jobs: Vec<(JobView, GpuUse)> =
            (1..=2).map(|id| (SimulatedJob::new(0.0, 5.0, 1.0, 0.5).view(id), GpuUse::default())).collect();
        assert_eq!(gpu.share(&mut jobs, now), Some(Ok(())));
        let shares = |jobs: &[(JobView, GpuUse)]| jobs.iter().map(|(_, of)| of.share).collect::<Vec<_>>();
        let (before, record) = (shares(&jobs), gpu.record.clone());
        assert!(before.iter().all(Option::is_some));
        gpu.control.break_plans();
        jobs.push((SimulatedJob::new(0.0, 5.0, 1.0, 0.5).view(3), GpuUse::default()));
        let outcome = gpu.share(&mut jobs, Time::from_secs_f64(2.0));
        assert!(
            matches!(&outcome, Some(Err(rejection)) if rejection.reasons().contains("another moment")),
            "{outcome:?}"
        );
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
