//! Shares of the node's GPUs: the GPU work of pods follows their policy.
//!
//! **Problem.** Where a cluster gives one GPU to several pods (time slicing, MPS), the driver of the GPU gives all pods
//! with work equal slices of its time. A resize changes nothing about that.
//!
//! **How.** The library that the webhook puts into pods catches the launches of pods that ask for it, and its report
//! names the GPU. Once a second the reports are read. The pods of one policy that launch work on one GPU share it like
//! the jobs of one machine ([`SharedGpu`]): a decider of their own decides with their policy, and [`super::inside`]
//! writes the orders into the pages. GPU time is taken from how long the programs waited. Pods of other policies on
//! the same GPU keep the slices that the driver gives them: no pod is paced for a pod of another namespace.
//!
//! What hinders a resize (a class, a static CPU manager) does not hinder pacing. Pods that are measured only are never
//! paced. Nothing is kept across a restart of the agent.
//!
//! **Properties.** In `gpu_tests.rs`: `the_larger_share_of_a_gpu_is_not_paced`, `a_pod_alone_on_its_gpu_is_not_paced`,
//! `a_silent_pod_leaves_its_share`, `pods_on_several_gpus_are_not_paced`,
//! `what_a_pod_claims_takes_nothing_from_the_floor_of_another`, `launches_of_real_programs_are_paced`.

use super::inside::read_report;
use super::job::{Moment, PageState, PodJob, PolicyKey, THIS_NODE, policy_key};
use gainshare_core::model::{Span, Time};
use gainshare_core::policy::Policy;
use gainshare_core::view::JobView;
use gainshare_kube_api::gpu_pacing::GpuPacing;
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::wire::WATCHED_ONLY;
use gainshare_limits::gpu::{GpuUse, SharedGpu, gpu_view};
use gainshare_page::Report;
use gainshare_progress::Root;
use std::collections::BTreeMap;

/// The time between two readings of the reports.
const PACE: Span = Span::from_secs(1);

/// A pod counts as paced for this long after it was: each change of what users see is a write to the pod.
const PACED_FOR: Span = Span::from_secs(60);

/// The GPUs on which pods launch work, by the policy of these pods and the GPU's place on the bus.
#[derive(Default)]
pub(crate) struct Gpus {
    shared: BTreeMap<(PolicyKey, u64), SharedGpu>,
    next: Time,
}

impl Gpus {
    /// Reads what pods did on GPUs and decides their shares, once a second. `pods` is the kubelet's folder of pods, if
    /// the agent may write there; `policy` is the policy of a pod. Returns the number of plans that were rejected.
    pub(crate) fn step(
        &mut self,
        now: Moment,
        pods: Option<&Root>,
        jobs: &mut BTreeMap<PodUid, PodJob>,
        policy: impl Fn(&PodJob) -> Policy,
    ) -> u64 {
        if now.time < self.next {
            return 0;
        }
        self.next = now.time + PACE;
        let mut groups: BTreeMap<(PolicyKey, u64), Vec<&mut PodJob>> = BTreeMap::new();
        for job in jobs.values_mut() {
            read(job, pods, now.time);
            let takes_part = may_be_paced(job) && !job.reads_history() && job.gpu.is_active(now.time);
            // Pods that take part get new orders below.
            (job.gpu.share, job.gpu.order) = (job.gpu.share.filter(|_| takes_part), (0, 0));
            if takes_part {
                groups.entry((policy_key(job), job.gpu.gpu)).or_default().push(job);
            }
        }
        self.shared.retain(|key, _| groups.contains_key(key));
        groups.into_iter().map(|(key, members)| u64::from(self.share(key, members, now, &policy).is_none())).sum()
    }

    /// Decides the shares of the pods of one policy on one GPU. `None`: the plan was rejected.
    fn share(
        &mut self,
        key: (PolicyKey, u64),
        mut members: Vec<&mut PodJob>,
        now: Moment,
        policy: impl Fn(&PodJob) -> Policy,
    ) -> Option<()> {
        members.sort_by_key(|job| job.id);
        let policy = policy(members.first()?);
        if self.shared.get(&key).is_none_or(|gpu| *gpu.policy() != policy) {
            self.shared.insert(key.clone(), SharedGpu::new(policy, THIS_NODE));
        }
        let gpu = self.shared.get_mut(&key)?;
        let mut views: Vec<(JobView, GpuUse)> =
            members.iter().map(|job| (gpu_view(job.view(now)), job.gpu.clone())).collect();
        let outcome = gpu.share(&mut views, now.time);
        for (job, (_, of)) in members.into_iter().zip(views) {
            job.gpu = of;
        }
        let Some(Err(rejection)) = outcome else { return Some(()) };
        // The shares stay as they are.
        let record = rejection.record.as_ref().and_then(|record| gainshare_record::to_json(record).ok());
        let (policy, list) = (key.0.1, rejection.reasons());
        tracing::error!(policy, record, "a plan for a GPU failed its check and is not carried out: {list}");
        None
    }
}

/// Whether the pod is one that its policy shapes. An obstacle to resizes is none here.
fn may_be_paced(job: &PodJob) -> bool {
    let is_watched = job.pod.blocked.as_ref().is_some_and(|blocked| blocked.reason == WATCHED_ONLY);
    job.pod.started_ms.is_some() && !is_watched
}

/// Takes in the pod's report, and what users see of the orders until now.
fn read(job: &mut PodJob, pods: Option<&Root>, now: Time) {
    let is_due = job.pod.started_ms.is_some() && job.gpu.is_due(job.pod.gpu, now);
    let report = pods.filter(|_| is_due).and_then(|pods| read_report(pods, &job.pod.uid));
    if let Some(report) = &report {
        job.gpu.record(report, now);
    }
    if job.gpu.order.0 > 0 {
        let share = job.gpu.share.unwrap_or_default();
        job.gpu_paced = Some((now, (100.0 * share).round() as u32));
    }
    let is_asked = job.pod.gpu || job.gpu.gpu != 0;
    let is_shown = is_asked && may_be_paced(job);
    job.gpu_pacing = is_shown.then(|| pacing(job, report.as_ref(), pods.is_some(), now));
}

fn pacing(job: &PodJob, report: Option<&Report>, may_write: bool, now: Time) -> GpuPacing {
    match report {
        _ if !may_write => GpuPacing::PagesOff,
        _ if job.page == PageState::Refused => GpuPacing::PageRefused,
        None => GpuPacing::NoLibrary,
        Some(_) if job.gpu.is_several() => GpuPacing::SeveralGpus,
        Some(report) if report.programs == 0 => GpuPacing::NotLoaded,
        Some(report) if report.gpu == 0 => GpuPacing::NoLaunches,
        Some(_) => match job.gpu_paced {
            Some((at, percent)) if now.since(at) <= PACED_FOR => GpuPacing::Paced { percent },
            _ => GpuPacing::Unpaced,
        },
    }
}
