//! What a pod's own annotation says about its share, and the events that go with it.
//!
//! Written only when the category, the share, the policy or what hinders a resize changes; progress itself never reaches the API server. The sentence
//! of the reason and the growth are refreshed at those moments only.
//!
//! What a pod was before we came is noted while it is being started, or with its first note, rather than with its first resize: a kubelet that has just
//! seen a pod change looks at it again only after its next round through the runtime, up to a second later, and the decision would wait for that.

use super::write::WriteError;
use crate::state::agents::Agents;
use crate::state::lead::Leader;
use futures_util::StreamExt;
use gainshare_kube_api::crd;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::wire::{Blocked, Category, JobState, PodOnNode, ResizeState};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Instant;

const AT_ONCE: usize = 16;

/// So many notes are written before policies' statuses have their turn again: when a large cluster changes at once, its policies must not wait for every pod.
const MOST_IN_A_PASS: usize = 1000;

const CONTESTED: &str =
    "Contested: something else changes this pod's CPU (another autoscaler?); keep one of the two away from it";

/// What is to be written on one pod.
struct Due {
    pod: PodFacts,
    /// The note it carries and the one it should carry.
    note: Option<(PodNote, PodNote)>,
    originals: Option<(&'static str, Option<String>)>,
}

/// The annotation [`crd::STATUS_ANNOTATION`].
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodNote {
    /// The SharePolicy; empty: the namespace's label.
    #[serde(default)]
    pub policy: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub category: Option<Category>,
    /// As last measured when one of the others changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth: Option<f64>,
    /// In hundredths of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_percent: Option<u32>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked: Option<Blocked>,
    /// Why the share is not in force: `Deferred` or `Infeasible`, in the kubelet's words, or `Contested`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
}

impl PodNote {
    fn of(pod: &PodOnNode, job: Option<&JobState>, contested: bool) -> PodNote {
        let pending = match &pod.resize {
            _ if contested => Some(CONTESTED.to_owned()),
            ResizeState::Deferred { message } => Some(format!("Deferred: {message}")),
            ResizeState::Infeasible { message } => Some(format!("Infeasible: {message}")),
            ResizeState::Settled | ResizeState::InProgress => None,
        };
        PodNote {
            policy: pod.policy.clone(),
            category: job.map(|job| job.category),
            growth: job.and_then(|job| job.growth).map(|growth| (growth * 1e4).round() / 1e4),
            share_percent: job.and_then(|job| job.share).map(|share| (share.clamp(0.0, 1.0) * 100.0).round() as u32),
            reason: job.map(|job| job.reason.clone()).unwrap_or_default(),
            blocked: pod.blocked.clone(),
            pending,
        }
    }

    fn says_the_same(&self, other: &PodNote) -> bool {
        let gist = |note: &PodNote| PodNote { reason: String::new(), growth: None, ..note.clone() };
        gist(self) == gist(other)
    }
}

/// The annotation that remembers what the pod was, if it has none yet.
pub(crate) fn originals(pod: &PodFacts) -> Option<(&'static str, Option<String>)> {
    let text = || serde_json::to_string(&pod.remember()).expect("names and quantities are JSON");
    pod.originals().is_none().then(|| (crd::ORIGINAL_ANNOTATION, Some(text())))
}

/// The note a pod carries and the one it should carry, if they say different things.
fn wanted(pod: &PodFacts, on_node: &PodOnNode, agents: &Agents, contested: bool) -> Option<(PodNote, PodNote)> {
    let job = agents.job(&pod.uid);
    let carried: Option<PodNote> =
        pod.notes.get(crd::STATUS_ANNOTATION).and_then(|text| serde_json::from_str(text).ok());
    // A manager that has just started knows no jobs yet: what a former one wrote stands until the agent speaks.
    if job.is_none() && on_node.blocked.is_none() {
        return None;
    }
    let note = PodNote::of(on_node, job, contested);
    match carried {
        Some(carried) if carried.says_the_same(&note) => None,
        carried => Some((carried.unwrap_or_default(), note)),
    }
}

/// Writes the notes of these pods where they changed. Those that could not be written are marked again.
pub(crate) async fn pass(leader: &Arc<Leader>, recorder: &Recorder, uids: impl IntoIterator<Item = String>) {
    let now = Instant::now();
    let mut due: Vec<Due> = leader.look(|world| {
        let agents = leader.agents.lock();
        let contests = leader.contests.lock();
        uids.into_iter()
            .filter_map(|uid| {
                let pod = world.pod(&uid)?;
                let note = match world.shared(&uid) {
                    Some(on_node) => Some(wanted(pod, on_node, &agents, contests.rests(&uid, now))?),
                    None => None,
                };
                let originals = originals(pod).filter(|_| match &note {
                    Some((_, note)) => note.blocked.is_none(),
                    None => world.is_coming(&uid),
                });
                (note.is_some() || originals.is_some()).then(|| Due { pod: pod.clone(), note, originals })
            })
            .collect()
    });
    let later = due.split_off(due.len().min(MOST_IN_A_PASS));
    leader.mark_pods(later.into_iter().map(|due| due.pod.uid));
    let results: Vec<Option<String>> = futures_util::stream::iter(due)
        .map(|Due { pod, note, originals }| async move {
            let text = note.as_ref().map(|(_, after)| serde_json::to_string(after)).transpose().ok()?;
            let annotations: Vec<_> =
                originals.into_iter().chain(text.map(|text| (crd::STATUS_ANNOTATION, Some(text)))).collect();
            match leader.writer.annotate(&pod, &annotations).await {
                Ok(written) => {
                    leader.change(|world| world.put_pod(written));
                    if let Some((before, after)) = &note {
                        tell(recorder, &pod, before, after).await;
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

/// An event for what people would want to know; losing one is no harm.
async fn tell(recorder: &Recorder, pod: &PodFacts, before: &PodNote, after: &PodNote) {
    let event = |type_: EventType, reason: &str, note: String| Event {
        type_,
        reason: reason.to_owned(),
        note: Some(note.chars().take(1000).collect()),
        action: "Share".to_owned(),
        secondary: None,
    };
    let event = match (&after.blocked, &after.pending, after.category) {
        (Some(blocked), ..) if before.blocked.as_ref() != Some(blocked) => {
            event(EventType::Warning, "NotResizable", blocked.message.clone())
        }
        (_, Some(pending), _) if before.pending.as_ref() != Some(pending) => {
            let type_ = if pending == CONTESTED { EventType::Warning } else { EventType::Normal };
            event(type_, "ResizePending", pending.clone())
        }
        // That a new job grows is no news.
        (_, _, Some(Category::Growing)) if before.category.is_none() => return,
        (_, _, Some(category)) if before.category != Some(category) => {
            event(EventType::Normal, "CategoryChanged", format!("{}: {}", category.name(), after.reason))
        }
        _ => return,
    };
    let reference = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.clone()),
        name: Some(pod.name.clone()),
        uid: Some(pod.uid.clone()),
        ..ObjectReference::default()
    };
    if let Err(error) = recorder.publish(&event, &reference).await {
        tracing::debug!(%error, "event not published");
    }
}
