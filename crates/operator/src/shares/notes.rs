//! Writes what is published on a pod ([`PodNote`]), its originals, and the events that go with
//! them.
//!
//! A note is written only when the category, the share, the policy or an obstacle changes; progress
//! alone never reaches the API server.
//!
//! The originals are written while the pod starts, or with its first note, rather than with its
//! first resize. A kubelet that has just seen a pod change handles its next change only after its
//! next round through the runtime, up to a second later, and the resize would wait for that.

use super::Shares;
use super::write::{WriteError, point};
use crate::isolate::skip_on_panic;
use crate::state::agents::Agents;
use crate::state::events::{self, Subject, Text};
use futures_util::StreamExt;
use gainshare_core::forecast::Prospect;
use gainshare_kube_api::deadline::DeadlineState;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{self, PodUid};
use gainshare_kube_api::pod_note::{PendingReason, PodNote};
use gainshare_kube_api::wire::{PodOnNode, ReportedCategory, WATCHED_ONLY};
use kube::runtime::events::Recorder;
use std::time::Instant;

const AT_ONCE: usize = 16;

/// The number of notes that are written in one pass. When a large cluster changes at once, the statuses of its
/// policies must not wait for every pod.
const MOST_IN_A_PASS: usize = 1000;

/// What is to be written on one pod.
struct PodWrite {
    pod: PodFacts,
    /// The note it carries and the one it should carry.
    note: Option<(PodNote, PodNote)>,
    originals: Option<(&'static str, Option<String>)>,
}

/// The annotation with the original resources, if the pod has none yet.
pub(crate) fn originals(pod: &PodFacts) -> Option<(&'static str, Option<String>)> {
    let text = serde_json::to_string(&pod.remember()).ok().filter(|_| pod.originals().is_none())?;
    Some((names::ORIGINAL_ANNOTATION, Some(text)))
}

/// The note a pod carries and the one it should carry, if they say different things.
fn wanted(pod: &PodFacts, on_node: &PodOnNode, agents: &Agents, contested: bool) -> Option<(PodNote, PodNote)> {
    let job = agents.job(&pod.uid);
    let carried = PodNote::carried(pod);
    // An operator that has just started knows no jobs yet: the note stays until the node agent
    // reports.
    if job.is_none() && on_node.blocked.is_none() {
        return None;
    }
    let note = PodNote::of(on_node, job, contested);
    match carried {
        Some(carried) if carried.means_the_same(&note) => None,
        carried => Some((carried.unwrap_or_default(), note)),
    }
}

/// Writes the notes of these pods where they changed. Those that could not be written are marked
/// again.
pub(crate) async fn pass(shares: &Shares, recorder: &Recorder, uids: impl IntoIterator<Item = PodUid>) {
    let leader = &shares.leader;
    let now = Instant::now();
    let mut due: Vec<PodWrite> = leader.read(|world| {
        let agents = leader.agents.lock();
        let contests = shares.contests.lock();
        let due = |uid: &PodUid| {
            let pod = world.pod(uid)?;
            let note = match world.shared(uid) {
                Some(on_node) => Some(wanted(pod, on_node, &agents, contests.is_resting(uid, now))?),
                None => world.result(uid).map(|(policy, result)| {
                    let carried = PodNote::carried(pod).unwrap_or_default();
                    (carried.clone(), PodNote::of_ended(carried, &policy, &result))
                }),
            };
            let originals = originals(pod).filter(|_| match &note {
                Some((_, note)) => note.blocked.is_none() && note.ended.is_none(),
                None => world.is_coming(uid),
            });
            (note.is_some() || originals.is_some()).then(|| PodWrite { pod: pod.clone(), note, originals })
        };
        uids.into_iter().filter_map(|uid| skip_on_panic("Pod", &uid, || due(&uid)).flatten()).collect()
    });
    let later = due.split_off(due.len().min(MOST_IN_A_PASS));
    leader.mark_pods(later.into_iter().map(|due| due.pod.uid));
    let results: Vec<Option<PodUid>> = futures_util::stream::iter(due)
        .map(|PodWrite { pod, note, originals }| async move {
            let text = note.as_ref().map(|(_, after)| serde_json::to_string(after)).transpose().ok()?;
            let annotations: Vec<_> =
                originals.into_iter().chain(text.map(|text| (names::STATUS_ANNOTATION, Some(text)))).collect();
            let points: Vec<&'static str> = annotations.iter().map(|(key, _)| point_of(key)).collect();
            match shares.writer.annotate(&points, &pod, &annotations).await {
                Ok(written) => {
                    leader.change(|world| world.put_pod(written));
                    if let Some((before, after)) = &note {
                        let result = after.deadline_state.filter(|_| after.ended.is_some());
                        result.into_iter().for_each(|result| leader.metrics.count_deadline(result));
                        publish_event(recorder, &pod, before, after).await;
                    }
                    None
                }
                Err(WriteError::Again(_) | WriteError::Changed(_)) => Some(pod.uid),
                Err(error) => {
                    tracing::warn!(pod = pod.name, namespace = pod.namespace, %error, "cannot write a pod's note");
                    None
                }
            }
        })
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    leader.mark_pods(results.into_iter().flatten());
}

/// The fail point of an annotation.
fn point_of(key: &str) -> &'static str {
    if key == names::ORIGINAL_ANNOTATION { point::ORIGINALS } else { point::NOTE }
}

/// Publishes an event about a change of the note. A lost event is harmless.
async fn publish_event(recorder: &Recorder, pod: &PodFacts, before: &PodNote, after: &PodNote) {
    let subject =
        || Subject { api_version: "v1", kind: "Pod", namespace: &pod.namespace, name: &pod.name, uid: Some(&pod.uid) };
    if after.ended.is_some() {
        let (warns, reason) = result_event(after);
        let text = Text { warns, reason, note: &after.reason, action: "Share" };
        return events::publish(recorder, subject(), text).await;
    }
    for (reason, note) in deadline_warnings(before, after) {
        events::publish(recorder, subject(), Text { warns: true, reason, note: &note, action: "Share" }).await;
    }
    if let Some((warns, reason, note)) = change_event(before, after) {
        events::publish(recorder, subject(), Text { warns, reason, note: &note, action: "Share" }).await;
    }
}

/// The event about a change of what the pod gets: whether it is a warning, the word for it, and the sentence.
fn change_event(before: &PodNote, after: &PodNote) -> Option<(bool, &'static str, String)> {
    let event = match (&after.blocked, &after.pending, after.category) {
        // A pod that is only measured is as its author wanted it: that is no warning.
        (Some(blocked), ..) if blocked.reason != WATCHED_ONLY && before.blocked.as_ref() != Some(blocked) => {
            (true, "NotResizable", blocked.message.clone())
        }
        (_, Some(pending), _) if before.pending.as_ref() != Some(pending) => {
            (after.pending_reason == Some(PendingReason::Contested), "ResizePending", pending.clone())
        }
        // That a new job grows needs no event.
        (_, _, Some(ReportedCategory::Growing)) if before.category.is_none() => return None,
        (_, _, Some(category)) if before.category != Some(category) => {
            (false, "CategoryChanged", format!("{}: {}", category.name(), after.reason))
        }
        _ => return None,
    };
    Some(event)
}

/// Whether the result of a pod's deadline is a warning, and the word for it.
fn result_event(ended: &PodNote) -> (bool, &'static str) {
    if ended.deadline_state == Some(DeadlineState::Met) { (false, "DeadlineMet") } else { (true, "DeadlineMissed") }
}

/// What is new about a pod's deadline and worth a warning.
fn deadline_warnings(before: &PodNote, after: &PodNote) -> Vec<(&'static str, String)> {
    let mut warnings = Vec::new();
    if let Some(error) = after.deadline_error.as_ref().filter(|error| before.deadline_error.as_ref() != Some(error)) {
        warnings.push(("BadDeadline", error.clone()));
    }
    let warns = |note: &PodNote| note.deadline_state.is_some_and(DeadlineState::warns);
    if warns(after) && !warns(before) {
        let due = after.deadline.as_deref().unwrap_or_default();
        let done = after.done.as_ref().map_or_else(String::new, |done| format!(", the pod will be done at {done}"));
        warnings.push((
            "DeadlineAtRisk",
            format!("its deadline {due} {}{done}: {}; it goes on as best effort", Prospect::Late, after.reason),
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::deadline::{Deadline, DeadlineResult};

    #[test]
    fn the_result_of_an_ended_pod_is_an_event_and_keeps_the_rest_of_its_note() {
        let deadline = Deadline { at_ms: 100_000, tolerance_ms: 0 };
        let late = DeadlineResult::new(deadline, 101_000, true);
        let carried = PodNote { share_percent: Some(40), done: Some("later".into()), ..PodNote::default() };
        let missed = PodNote::of_ended(carried, "p", &late);
        assert_eq!((result_event(&missed), missed.share_percent), ((true, "DeadlineMissed"), Some(40)));
        assert_eq!((missed.deadline_state, missed.done.as_deref()), (Some(DeadlineState::Missed), None));
        assert!(missed.reason.contains("1970-01-01T00:01:41Z"), "{}", missed.reason);
        let met = PodNote::of_ended(PodNote::default(), "p", &DeadlineResult::new(deadline, 99_000, true));
        assert_eq!(result_event(&met), (false, "DeadlineMet"));
    }

    #[test]
    fn a_contested_pod_is_warned_of_by_its_value_whatever_the_sentence_says() {
        let pending = |pending_reason, text: &str| PodNote {
            pending: Some(text.into()),
            pending_reason: Some(pending_reason),
            ..PodNote::default()
        };
        let event = |after: &PodNote| change_event(&PodNote::default(), after);
        let contested = pending(PendingReason::Contested, "another program changes it");
        assert_eq!(event(&contested), Some((true, "ResizePending", "another program changes it".to_owned())));
        let deferred = pending(PendingReason::Deferred, "Deferred: no room");
        assert_eq!(event(&deferred).map(|(warns, ..)| warns), Some(false));
        assert_eq!(change_event(&contested, &contested), None);
    }

    #[test]
    fn a_miss_and_a_bad_deadline_are_warned_of_once() {
        let at_risk =
            PodNote { deadline_state: Some(DeadlineState::AtRisk), done: Some("later".into()), ..PodNote::default() };
        let warnings = deadline_warnings(&PodNote::default(), &at_risk);
        assert_eq!(warnings[0].0, "DeadlineAtRisk");
        assert!(warnings[0].1.contains("done at later"), "{warnings:?}");
        let missed = PodNote { deadline_state: Some(DeadlineState::Missed), ..PodNote::default() };
        assert!(deadline_warnings(&at_risk, &missed).is_empty());
        let bad = PodNote { deadline_error: Some("write 2h".into()), ..PodNote::default() };
        assert_eq!(deadline_warnings(&PodNote::default(), &bad), [("BadDeadline", "write 2h".to_owned())]);
        assert!(deadline_warnings(&bad, &bad).is_empty());
    }
}
