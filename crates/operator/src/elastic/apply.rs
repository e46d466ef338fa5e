//! Carries out changes of tasks: containers are resized in place, decreases first.
//!
//! Each change is checked again on the pod as it is now: what Kubernetes allows, the namespace's LimitRange and
//! quotas, and what the node has free. The pod's own values are written down before its first change, so that they
//! come back when sharing is switched off.

use super::decide::TaskResize;
use crate::shares::write::WriteError;
use crate::shares::{Shares, resizes};
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::resize;
use gainshare_kube_api::resources::Resources;
use gainshare_kube_api::wire::{Mode, PodOnNode, QosClass, WATCHED_ONLY};
use std::time::Instant;

/// How often a pod that has changed meanwhile is read again.
const MOST_READS: usize = 3;

/// What became of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ResizeOutcome {
    Done,
    /// The pod has nearly these values already.
    Unchanged,
    Refused(String),
}

/// Resizes one task.
pub(super) async fn resize(shares: &Shares, wanted: &TaskResize) -> ResizeOutcome {
    let leader = &shares.leader;
    let turn = leader.turn(&wanted.node);
    let _turn = turn.lock().await;
    if let Err(why) = resizes::settle_doubts(shares, &wanted.node).await {
        return ResizeOutcome::Refused(why.to_string());
    }
    for _ in 0..MOST_READS {
        let (pod, container, to) = match vet(shares, wanted) {
            Ok(found) => found,
            Err(outcome) => return outcome,
        };
        match resizes::write(shares, pod.clone(), &container, to).await {
            Ok(()) => return ResizeOutcome::Done,
            // Mostly the kubelet has just written the pod's status.
            Err(WriteError::Changed(_)) => match shares.writer.read(&pod).await {
                Ok(fresh) => leader.change(|world| world.put_pod(fresh)),
                Err(error) => return ResizeOutcome::Refused(error.to_string()),
            },
            Err(error) => return ResizeOutcome::Refused(error.to_string()),
        }
    }
    ResizeOutcome::Refused("the pod changes all the time".to_owned())
}

/// The pod as it is now, its container, and the new values; or what to answer instead.
fn vet(shares: &Shares, wanted: &TaskResize) -> Result<(PodFacts, String, Resources), ResizeOutcome> {
    let refused = |why: String| ResizeOutcome::Refused(why);
    shares.leader.read(|world| {
        let pod = world.shared(&wanted.pod_uid).filter(|pod| pod.is_scaled());
        let facts = world.pod(&wanted.pod_uid).filter(|pod| pod.node.as_ref() == Some(&wanted.node));
        let (Some(pod), Some(facts)) = (pod, facts) else { return Err(refused("the pod is gone".to_owned())) };
        let pod = as_scaled(pod);
        let to = resources(&pod, wanted);
        if !resize::is_worthwhile(&pod.now, &to) {
            return Err(ResizeOutcome::Unchanged);
        }
        let contested = shares.contests.lock().check(&wanted.pod_uid, &pod.now, Instant::now());
        contested.map_err(|contested| refused(contested.to_string()))?;
        resize::vet(&pod, &to)
            .and_then(|()| world.quota(&pod.namespace, &pod.now, &to))
            .map_err(|refusal| refused(refusal.to_string()))?;
        let more = |now: Option<u64>, to: Option<u64>| to.unwrap_or(0).saturating_sub(now.unwrap_or(0));
        let (milli, bytes) = (
            more(pod.now.requests.cpu_milli, to.requests.cpu_milli),
            more(pod.now.requests.memory_bytes, to.requests.memory_bytes),
        );
        let asked = world.requested(&wanted.node);
        let node = world.nodes().get(&wanted.node).cloned().unwrap_or_default();
        let free =
            |whole: Option<u64>, jobs: u64, others: u64| whole.unwrap_or(0).saturating_sub(jobs.saturating_add(others));
        if milli > free(node.cpu_milli, asked.jobs.0, asked.others.0)
            || bytes > free(node.memory_bytes, asked.jobs.1, asked.others.1)
        {
            return Err(refused(format!("node {} has no room for that any more", wanted.node)));
        }
        Ok((facts.clone(), pod.container.clone(), to))
    })
}

/// The pod without the block that keeps node agents from resizing it. Limits move with the requests.
fn as_scaled(pod: &PodOnNode) -> PodOnNode {
    let mut pod = pod.clone();
    pod.blocked = pod.blocked.filter(|blocked| blocked.reason != WATCHED_ONLY);
    pod.settings.mode = Mode::Quota;
    pod
}

/// The requests and limits that carry out the change.
fn resources(pod: &PodOnNode, wanted: &TaskResize) -> Resources {
    let mut to =
        if wanted.to_milli == wanted.from_milli { Resources::default() } else { resize::shape(pod, wanted.to_milli) };
    if let Some(bytes) = wanted.memory_bytes {
        if pod.now.limits.memory_bytes.is_some() {
            to.limits.memory_bytes = Some(bytes);
        }
        if pod.class == QosClass::Guaranteed || pod.now.limits.memory_bytes.is_none() {
            to.requests.memory_bytes = Some(bytes);
        }
    }
    to
}
