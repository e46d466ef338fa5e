//! Shares of one GPU: the jobs that launch work on it share its time by a policy.
//!
//! **Problem.** A GPU has no weights: its driver gives all jobs with work equal slices of time. The library inside
//! a job can pace the job's launches to a part of the GPU's time, which the page contains.
//!
//! **How.** A [`SharedGpu`] has a decider of its own. Its view is a node with one GPU as the only core, whose jobs are
//! those that launch work there. Growth efficiency and gain are so computed for GPU time exactly as for CPU time. Its
//! owner, the daemon or the node agent, reads the reports of the jobs ([`GpuUse::record`]), calls
//! [`SharedGpu::share`], and writes [`GpuUse::order`] into the pages.
//!
//! The job with the largest share is never paced: it takes all that the others leave. A job alone on its GPU is not
//! paced. A job that launches nothing for some time leaves its share to the others, but the policy remembers the job.
//! What a job with a large share leaves idle goes to the paced jobs, in the order of the policy (`Slack`). Jobs on
//! several GPUs, or of several ranks, take no part ([`GpuUse::is_active`]). Reports are not trusted: any content gives
//! some share.
//!
//! **Properties.** `the_late_short_job_ends_sooner_and_all_jobs_together_no_later`, on a simulated GPU.

mod gpu_use;
mod measurement;
#[cfg(test)]
mod model_tests;

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
                    of.growth =
                        decision.plan.verdicts.get(&view.id).and_then(|verdict| verdict.growth.cpu).unwrap_or(0.0);
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
        for (i, order) in busy.into_iter().zip(orders(&parts, &is_paced, &slack)) {
            jobs[i].1.order = order;
        }
        outcome
    }
}
