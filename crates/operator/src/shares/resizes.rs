//! Carries out the resizes that node agents request: checked, decreases first, originals written
//! before the first change.

use super::write::{WriteError, point};
use super::{Shares, notes};
use crate::state::metrics::StateLabels;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{NodeName, PodUid};
use gainshare_kube_api::resize;
use gainshare_kube_api::resources::Resources;
use gainshare_kube_api::wire::{Outcome, OutcomeState, Resize, ResizeState};
use std::time::Instant;

/// How often a pod that has changed meanwhile is read again before the node agent has to request
/// the resize again.
const MOST_READS: usize = 3;

/// One outcome for each resize, in the order in which they came.
pub(crate) async fn carry_out(shares: &Shares, node: &NodeName, epoch: u64, resizes: &[Resize]) -> Vec<Outcome> {
    let leader = &shares.leader;
    let turn = leader.turn(node);
    let _turn = turn.lock().await;
    let mut order: Vec<usize> = (0..resizes.len()).collect();
    let is_up = |wanted: &Resize| {
        let now = leader.read(|world| world.shared(&wanted.uid).map(|pod| pod.now).unwrap_or_default());
        resize::is_up(&now, &wanted.to)
    };
    order.sort_by_key(|&i| is_up(&resizes[i]));
    let mut states: Vec<Option<OutcomeState>> = vec![None; resizes.len()];
    for i in order {
        let state = carry_out_one(shares, node, epoch, &resizes[i]).await;
        let name = match &state {
            OutcomeState::Done => "done",
            OutcomeState::Unchanged => "unchanged",
            OutcomeState::Refused { .. } => "refused",
            OutcomeState::Failed { .. } => "failed",
        };
        leader.metrics.resizes.get_or_create(&StateLabels { state: name }).inc();
        if let OutcomeState::Refused { why } | OutcomeState::Failed { why } = &state {
            tracing::info!(node = node.as_str(), uid = resizes[i].uid.as_str(), why, "resize not done");
        }
        states[i] = Some(state);
    }
    let outcomes = resizes.iter().zip(states).filter_map(|(wanted, state)| {
        Some(Outcome { uid: wanted.uid.clone(), generation: wanted.generation, state: state? })
    });
    outcomes.collect()
}

async fn carry_out_one(shares: &Shares, node: &NodeName, epoch: u64, wanted: &Resize) -> OutcomeState {
    let leader = &shares.leader;
    let admitted = leader.agents.lock().admit(node, epoch, &wanted.uid, wanted.generation);
    if let Err(why) = admitted {
        return OutcomeState::Refused { why: why.to_string() };
    }
    if let Err(why) = settle_doubts(shares, node).await {
        return OutcomeState::Failed { why: why.to_string() };
    }
    let mut reads = 0;
    loop {
        let pod = match vet(shares, node, wanted) {
            Ok(pod) => pod,
            Err(state) => return state,
        };
        let written = match write(shares, pod.clone(), wanted.container.as_str(), wanted.to).await {
            // Mostly the kubelet has just written the pod's status. The watch will bring that, but
            // the resize should not wait for the watch.
            Err(WriteError::Changed(_)) if reads < MOST_READS => {
                reads += 1;
                let fresh = shares.writer.read(&pod).await;
                fresh.map(|pod| leader.change(|world| world.put_pod(pod))).err()
            }
            Err(error) => Some(error),
            Ok(()) => {
                leader.mark_pods([wanted.uid.clone()]);
                return OutcomeState::Done;
            }
        };
        match written {
            None => {}
            Some(WriteError::Again(why) | WriteError::Changed(why)) => return OutcomeState::Failed { why },
            Some(WriteError::Refused(why)) => return OutcomeState::Refused { why },
            Some(WriteError::Gone) => return OutcomeState::Refused { why: "the pod is gone".to_owned() },
        }
    }
}

/// The outcome of a resize is unknown, and the pod cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("it is not known whether pod {pod} was resized: {error}")]
pub(crate) struct UnknownOutcome {
    pod: String,
    error: WriteError,
}

/// Reads the node's pods whose last resize has an unknown outcome. Without that, a resize that was made although
/// its answer was lost would not count, and the next one could exceed the pool.
pub(crate) async fn settle_doubts(shares: &Shares, node: &NodeName) -> Result<(), UnknownOutcome> {
    let leader = &shares.leader;
    let doubts: Vec<PodUid> = shares.doubts.lock().iter().cloned().collect();
    for uid in doubts {
        let Some(pod) = leader.read(|world| world.pod(&uid).cloned()) else {
            shares.doubts.lock().remove(&uid);
            continue;
        };
        if pod.node.as_ref() != Some(node) {
            continue;
        }
        match shares.writer.read(&pod).await {
            Ok(fresh) => leader.change(|world| world.put_pod(fresh)),
            Err(WriteError::Gone) => {}
            Err(error) => return Err(UnknownOutcome { pod: pod.name, error }),
        }
        shares.doubts.lock().remove(&uid);
    }
    Ok(())
}

/// The pod as it is to be changed, or what to answer instead.
fn vet(shares: &Shares, node: &NodeName, wanted: &Resize) -> Result<PodFacts, OutcomeState> {
    let leader = &shares.leader;
    let refused = |why: String| OutcomeState::Refused { why };
    leader.read(|world| {
        let pod = world.shared(&wanted.uid).filter(|_| world.node_of(&wanted.uid) == Some(node));
        let Some(pod) = pod else {
            return Err(refused(format!("no policy selects a pod {} on node {node}", wanted.uid)));
        };
        if pod.container != wanted.container {
            return Err(refused(format!("the policy means container {}, not {}", pod.container, wanted.container)));
        }
        if !resize::is_worthwhile(&pod.now, &wanted.to) && !resize::lowers_cpu(&pod.now, &wanted.to) {
            return Err(OutcomeState::Unchanged);
        }
        let contested = shares.contests.lock().check(&wanted.uid, &pod.now, Instant::now());
        if let Err(why) = contested {
            leader.mark_pods([wanted.uid.clone()]);
            return Err(refused(why.to_string()));
        }
        resize::vet(pod, &wanted.to)
            .and_then(|()| world.pool(pod, node, &wanted.to))
            .and_then(|()| world.quota(&pod.namespace, &pod.now, &wanted.to))
            .map_err(|refusal| refused(refusal.to_string()))?;
        if let ResizeState::Infeasible { message } = &pod.resize
            && resize::is_up(&pod.now, &wanted.to)
        {
            return Err(refused(format!("the kubelet calls less than this infeasible already: {message}")));
        }
        world.pod(&wanted.uid).cloned().ok_or_else(|| refused("the pod is gone".to_owned()))
    })
}

/// Resizes one container. The pod's own values are written down before its first change.
pub(crate) async fn write(shares: &Shares, pod: PodFacts, container: &str, to: Resources) -> Result<(), WriteError> {
    let leader = &shares.leader;
    let mut pod = pod;
    if let Some(originals) = notes::originals(&pod) {
        pod = shares.writer.annotate(&[point::ORIGINALS], &pod, &[originals]).await?;
        leader.change(|world| world.put_pod(pod.clone()));
    }
    // The intention is recorded first: the answer may be lost, or the node agent may hang up and
    // end this future.
    let now = pod.container(container).map(|facts| facts.resources).unwrap_or_default();
    shares.contests.lock().intend(&pod.uid, now, to);
    shares.doubts.lock().insert(pod.uid.clone());
    let resized = shares.writer.resize(&pod, container, to).await;
    if !matches!(resized, Err(WriteError::Again(_))) {
        shares.doubts.lock().remove(&pod.uid);
    }
    if let Err(WriteError::Refused(_) | WriteError::Changed(_) | WriteError::Gone) = &resized {
        shares.contests.lock().withdraw(&pod.uid);
    }
    let resized = resized?;
    if let Some(after) = resized.container(container) {
        shares.contests.lock().confirm(&pod.uid, after.resources);
    }
    leader.change(|world| world.put_pod(resized));
    Ok(())
}
