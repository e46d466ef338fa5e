//! What the decisions see: a picture of the driver's parts at one moment, and the views made of it.

use super::deadlines::{Forecasts, deadline};
use super::gpu::Gpus;
use super::inside::expects_page;
use super::jobs::{Job, JobTable};
use super::page::JobPage;
use super::runtimes::Runtimes;
use super::{HERE, Plans};
use crate::clock::Clock;
use crate::config::DaemonConfig;
use crate::paths::Paths;
use crate::types::JobState;
use gainshare_core::model::{JobId, Share, Time};
use gainshare_core::view::{JobView, NodeView, Phase, View};
use gainshare_limits::LimitMode;
use gainshare_limits::gpu::gpu_view;

/// The parts of the driver that views and answers are made of. Nothing is changed through it.
#[derive(Clone, Copy)]
pub(crate) struct Picture<'a> {
    pub(super) now: Time,
    pub(super) clock: &'a Clock,
    pub(super) config: &'a DaemonConfig,
    pub(super) paths: &'a Paths,
    pub(super) jobs: &'a JobTable,
    pub(super) runtimes: &'a Runtimes,
    pub(super) forecasts: &'a Forecasts,
    pub(super) plans: &'a Plans,
    pub(super) gpus: &'a Gpus,
}

impl Picture<'_> {
    /// The view of what was read last.
    pub(super) fn view(&self) -> View {
        let capacity = self.runtimes.whole(self.config).capacity;
        let node = NodeView {
            id: HERE,
            cores: capacity.cores,
            speed: 1.0,
            memory_bytes: capacity.memory_bytes,
            slots: self.config.slots,
            idle_node_s: self.forecasts.idle_s(self.config, self.now),
        };
        // A container that is being taken over runs already: the plan must not start it.
        let is_taken_over = |j: &Job| j.record.adopted && j.record.state == JobState::Queued;
        // A job that would not fit into the memory of a GPU waits.
        let has_no_room =
            |j: &Job| j.record.state == JobState::Queued && self.gpus.without_room.contains_key(&j.record.id);
        let shown = self.jobs.values().filter(|j| j.record.is_live() && !is_taken_over(j) && !has_no_room(j));
        let jobs = shown.map(|j| self.job_view(j)).collect();
        View { now: self.now, nodes: vec![node], jobs }
    }

    fn job_view(&self, job: &Job) -> JobView {
        let r = &job.record;
        let phase = match r.state {
            JobState::Starting | JobState::Running => {
                Phase::Running { node: HERE, since: r.started.unwrap_or(r.submitted).time, attempt: r.attempt }
            }
            _ => Phase::Waiting,
        };
        let is_measured = self.runtimes.mode(self.config) != LimitMode::Quota;
        // The first share of a job is decided before it has a page.
        let has_page = match job.page {
            JobPage::Open { .. } => true,
            JobPage::Absent => false,
            JobPage::Unknown => expects_page(self.config, r),
        };
        let has_team = is_measured && has_page;
        let done = |id: &JobId| self.jobs.get(id).is_none_or(|j| j.record.state == JobState::Done);
        JobView {
            id: r.id,
            owner: self.jobs.owner(&r.owner),
            arrived: r.submitted.time,
            phase,
            signal: self.forecasts.signal(job, self.now),
            consumed_node_s: job.progress.meter.consumed(),
            floor: Share::clamped(r.spec.floor),
            max: Share::clamped(r.spec.max),
            priority: r.spec.priority,
            waits_for: r.after.iter().copied().filter(|id| !done(id)).collect(),
            pinned: false,
            usable: None,
            has_team,
            serial: job.team_use.serial().filter(|_| has_team),
            on_one_core: job.team_use.is_serial() || (has_team && !job.team_use.is_measured()),
            known_left_s: None,
            // Of a job that has shown nothing yet the very same command says more than the same program.
            history: job.past_guess().map_or(&job.history, |past| &past.runs).clone(),
            claims: job.claim_record(),
            deadline: deadline(&r.spec, self.now),
            ..JobView::default()
        }
    }

    /// A job as one on a machine whose only core is the GPU.
    pub(super) fn gpu_view(&self, job: &Job) -> JobView {
        gpu_view(self.job_view(job))
    }
}
