//! GPU shares: each GPU is shared among its jobs by the same policy as the machine's CPU.
//!
//! **Problem.** A GPU has no weights: its driver gives all jobs with work equal slices of time. The library inside
//! a job can pace the job's launches to a part of the GPU's time, which the page contains.
//!
//! **How.** Once a second the driver reads the report of each job's library. For every GPU there is a decider of its
//! own, with the policy of the daemon: its view is a node with one GPU as the only core, whose jobs are those that
//! launch work there. Growth efficiency and gain are so computed for GPU time exactly as for CPU time. The job with
//! the largest share is never paced: it takes all that the others leave. A job alone on its GPU is not paced. A job
//! that launches nothing for some time leaves its share to the others, but the policy remembers the job. Jobs on
//! several GPUs, or of several ranks, are not paced and not counted.

use super::gpu_use::{orders, slices};
use super::inside::read_report;
use super::page::PAGE_FILE;
use super::{Driver, HERE, Job};
use crate::types::JobState;
use gainshare_core::decider::{Decider, Outcome};
use gainshare_core::model::{JobId, PerResource, Time};
use gainshare_core::view::{JobView, NodeView, View};
use gainshare_limits::RuntimeKind;
use gainshare_page::REPORT_SUFFIX;
use std::collections::BTreeMap;

/// One GPU: its policy's memory, and what was left unused.
struct Gpu {
    control: Decider,
    idle_s: f64,
    decided_at: Option<Time>,
}

/// All GPUs that jobs use, by their place on the bus.
#[derive(Default)]
pub(super) struct Gpus(BTreeMap<u64, Gpu>);

impl Driver {
    /// Reads what jobs did on GPUs and decides their shares. Once a second.
    pub(super) fn share_gpus(&mut self) {
        let now = self.now();
        let mut active: BTreeMap<u64, Vec<JobId>> = BTreeMap::new();
        let has_page =
            |job: &Job| job.record.state == JobState::Running && job.record.spec.runtime == RuntimeKind::Process;
        for id in self.jobs.ids(has_page) {
            let path = self.paths.job(id.0).join(format!("{PAGE_FILE}{REPORT_SUFFIX}"));
            let Some(job) = self.jobs.get_mut(&id) else { continue };
            if !job.has_inside() {
                continue;
            }
            let Some(report) = read_report(&path) else { continue };
            job.gpu.record(&report, now);
            (job.gpu.share, job.gpu.order) = (job.gpu.share.filter(|_| job.gpu.is_active(now)), (0, 0));
            if job.gpu.is_active(now) {
                active.entry(job.gpu.gpu).or_default().push(id);
            }
        }
        self.gpus.0.retain(|gpu, _| active.contains_key(gpu));
        for (gpu, ids) in active {
            self.share_gpu(gpu, &ids, now);
        }
    }

    fn share_gpu(&mut self, gpu: u64, ids: &[JobId], now: Time) {
        let working: Vec<f64> = ids.iter().filter_map(|id| self.jobs.get(id)).map(|job| job.gpu.working).collect();
        let slices = slices(&working);
        let policy = self.control.policy();
        let of = self.gpus.0.entry(gpu).or_insert_with(|| Gpu {
            control: Decider::new(policy.clone()),
            idle_s: 0.0,
            decided_at: None,
        });
        let elapsed_s = of.decided_at.map_or(0.0, |at| now.since(at).as_secs_f64());
        of.decided_at = Some(now);
        of.idle_s += (1.0 - slices.iter().sum::<f64>()).max(0.0) * elapsed_s;
        let idle_s = of.idle_s;
        for (id, slice) in ids.iter().zip(&slices) {
            if let Some(job) = self.jobs.get_mut(id) {
                job.gpu.used_s += slice * elapsed_s;
            }
        }
        let node = NodeView { id: HERE, cores: 1.0, speed: 1.0, memory_bytes: 0, slots: None, idle: Some(idle_s) };
        let view = View { now, nodes: vec![node], jobs: ids.iter().filter_map(|id| self.gpu_view(*id)).collect() };
        let Some(of) = self.gpus.0.get_mut(&gpu) else { return };
        match of.control.decide(view) {
            Outcome::NotDue => {}
            Outcome::Decision(decision) => {
                for id in ids {
                    if let Some(job) = self.jobs.get_mut(id) {
                        job.gpu.share = decision.plan.target(*id).map(|target| target.share.cpu.get());
                    }
                }
            }
            Outcome::Rejected(rejection) => {
                tracing::error!("a plan for a GPU failed its check and is not applied: {}", rejection.reasons());
            }
        }
        let shares: Vec<f64> =
            ids.iter().map(|id| self.jobs.get(id).and_then(|job| job.gpu.share).unwrap_or(1.0)).collect();
        let is_busy: Vec<bool> =
            ids.iter().map(|id| self.jobs.get(id).is_some_and(|job| job.gpu.is_busy(now))).collect();
        for (id, order) in ids.iter().zip(orders(&shares, &is_busy)) {
            if let Some(job) = self.jobs.get_mut(id) {
                job.gpu.order = order;
            }
        }
    }

    /// A job as one on a machine whose only core is the GPU.
    fn gpu_view(&self, id: JobId) -> Option<JobView> {
        let job = self.jobs.get(&id)?;
        let consumed = PerResource { cpu: job.gpu.used_s, ..PerResource::default() };
        // Earlier runs and deadlines are measured in CPU time.
        Some(JobView { consumed, history: Vec::new(), deadline: None, waits_for: Vec::new(), ..self.job_view(job) })
    }
}
