//! Gives pods their own values back: when a policy goes, no longer selects them, or is suspended,
//! and when sharing is switched off.

use super::Shares;
use super::write::{WriteError, Writer};
use futures_util::StreamExt;
use gainshare_core::backoff::Backoff;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::resize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const AT_ONCE: usize = 8;
const RETRIES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));

/// Pods that could not be restored, and when to try again.
#[derive(Default)]
pub(crate) struct Pauses {
    until: BTreeMap<PodUid, (Instant, Backoff)>,
}

/// Restores what is to be restored now. Decreases go first, because the increases may need the
/// room.
pub(crate) async fn pass(shares: &Shares, pauses: &mut Pauses) {
    let leader = &shares.leader;
    let now = Instant::now();
    let waiting = leader.read(|world| world.let_go());
    leader.metrics.to_restore.set(waiting.len() as i64);
    pauses.until.retain(|uid, _| waiting.iter().any(|pod| pod.uid == *uid));
    let due = |pod: &PodFacts| pauses.until.get(&pod.uid).is_none_or(|(until, _)| *until <= now);
    let (ups, downs): (Vec<PodFacts>, Vec<PodFacts>) = waiting.into_iter().filter(due).partition(is_up);
    for group in [downs, ups] {
        let results: Vec<(PodUid, Result<(), WriteError>)> = futures_util::stream::iter(group)
            .map(|pod| async move {
                // What we wrote before is no measure for the values after this, also if the answer
                // is lost.
                shares.contests.lock().forget(&pod.uid);
                let result = restore(&shares.writer, &pod).await;
                (pod.uid.clone(), result.map(|restored| leader.change(|world| world.put_pod(restored))))
            })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        for (uid, result) in results {
            match result {
                Ok(()) => {
                    pauses.until.remove(&uid);
                    shares.contests.lock().forget(&uid);
                }
                Err(WriteError::Gone) => leader.change(|world| world.remove_pod(&uid)),
                Err(error) => {
                    let mut retries = pauses.until.get(&uid).map_or(RETRIES, |(_, retries)| *retries);
                    let pause = retries.next_pause();
                    tracing::warn!(uid = uid.as_str(), %error, retry_in_s = pause.as_secs(), "cannot restore a pod yet");
                    pauses.until.insert(uid, (Instant::now() + pause, retries));
                }
            }
        }
    }
}

/// Restores one pod. A pod without originals is left as it is.
pub(crate) async fn restore(writer: &Writer, pod: &PodFacts) -> Result<PodFacts, WriteError> {
    match pod.originals() {
        Some(originals) => writer.restore(pod, &originals).await,
        None => Ok(pod.clone()),
    }
}

fn is_up(pod: &PodFacts) -> bool {
    let Some(originals) = pod.originals() else { return false };
    pod.containers.iter().any(|container| {
        originals
            .containers
            .get(&container.name)
            .is_some_and(|written| resize::is_up(&container.resources, &written.resources()))
    })
}
