//! The messages about jobs that wait for a node: what is missing, and what a person can do about
//! it.

use crate::state::nodes::MISSING_NODE_IS_OFF_AFTER;
use crate::state::snapshot::{NodeState, Nodes, PodSnapshot};
use gainshare_core::backoff::Backoff;
use gainshare_kube_api::immovable::ImmovableReason;
use gainshare_kube_api::names::{NodeName, STOPPED_ANNOTATION};
use jiff::{SignedDuration, Timestamp};
use std::time::Duration;

/// A kubelet that has not reported a pod's end this long after the grace period is called silent.
const SILENCE: SignedDuration = SignedDuration::from_secs(10);

const RETRIES: Backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(300));
/// The longest pause between a failure of a job and its next attempt.
pub(super) const LONGEST_PAUSE: SignedDuration = SignedDuration::from_secs(RETRIES.longest().as_secs() as i64);

/// The pause before the next attempt of a job that failed this number of times.
pub(super) fn pause_after(failures: u32) -> SignedDuration {
    SignedDuration::try_from(RETRIES.pause_after(failures)).unwrap_or(LONGEST_PAUSE)
}

/// The end of a wait that began at `since`, or nothing if it is over. A wait never lasts longer than `patience` from
/// now: a `since` in the future was written with a wrong clock, and the wait counts as over.
pub(super) fn wait_end(since: Timestamp, patience: SignedDuration, now: Timestamp) -> Option<Timestamp> {
    let end = since.saturating_add(patience).ok()?;
    bounded_wait(end, patience, now)
}

/// The same for a wait whose end was written down.
pub(super) fn bounded_wait(end: Timestamp, longest: SignedDuration, now: Timestamp) -> Option<Timestamp> {
    let latest = now.saturating_add(longest).unwrap_or(Timestamp::MAX);
    (now < end && end <= latest).then_some(end)
}

/// The message about a pod whose object is gone although its end was never read.
pub(super) fn removed_sentence(
    kind: &str,
    (namespace, name): (&str, &str),
    pod: &str,
    node: Option<&NodeName>,
) -> String {
    let there = node.map(|node| format!(" on {node}")).unwrap_or_default();
    format!(
        "the pod {pod} was removed by force, so it cannot be proven that it has stopped{there}; when you are sure that it does not: \
         kubectl annotate {kind} {name} -n {namespace} {STOPPED_ANNOTATION}={pod}"
    )
}

/// The message about a pod that should have ended by now, and when to check again.
pub(super) fn overdue(pod: &PodSnapshot, nodes: &Nodes, now: Timestamp) -> (Option<String>, Option<Timestamp>) {
    let Some((_, until)) = pod.deleted else { return (None, None) };
    let late = until.saturating_add(SILENCE).unwrap_or(Timestamp::MAX);
    if late > now {
        return (None, Some(late));
    }
    let node = &pod.node.clone().unwrap_or_default();
    if nodes.get(node) == Some(&NodeState::Missing) {
        return (Some(missing_node_sentence(node)), None);
    }
    let message = format!(
        "node {node} has not reported that the pod {} has ended, so nothing is started elsewhere; if the node is off for good: \
         kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
        pod.name
    );
    (Some(message), None)
}

/// The message about a pod on a node whose object is gone.
pub(super) fn missing_node_sentence(node: &NodeName) -> String {
    format!(
        "the Node object of {node} is gone, which does not prove that the machine has stopped: the job continues elsewhere when \
         the object has been missing for {} min, or when you are sure and write the annotation {STOPPED_ANNOTATION}=POD",
        MISSING_NODE_IS_OFF_AFTER.as_secs() / 60
    )
}

/// The message about a pod on a node whose kubelet does not answer.
pub(super) fn silent_sentence(node: &NodeName) -> String {
    format!(
        "node {node} is silent: the job is left where it is until the node answers, or is declared off: \
         kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
}

/// An error if the node annotation of a job keeps it where it is.
pub(super) fn check_not_kept(node: Option<&NodeName>) -> Result<(), ImmovableReason> {
    node.map_or(Ok(()), |node| Err(ImmovableReason::KeptOn(node.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_clock_does_not_prolong_a_wait() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let patience = SignedDuration::from_secs(10);
        assert_eq!(wait_end(at(100), patience, at(104)), Some(at(110)));
        assert_eq!(wait_end(at(100), patience, at(110)), None, "it is over");
        assert_eq!(wait_end(at(3700), patience, at(100)), None, "written an hour ahead");
        assert_eq!(wait_end(Timestamp::MAX, patience, at(100)), None);
        assert_eq!(bounded_wait(at(130), SignedDuration::from_secs(300), at(100)), Some(at(130)));
        assert_eq!(bounded_wait(at(3700), SignedDuration::from_secs(300), at(100)), None);
    }
}
