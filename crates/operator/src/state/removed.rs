//! The pods that were removed lately.
//!
//! **Problem.** Pods come into the cache by the watch and by the answers to our own requests. The watch may deliver
//! the removal of a pod before the answer to the request that removed it is read. That answer contains the pod, so
//! the cache would hold a pod that does not exist, and no later event would take it out.
//!
//! **How.** A uid is never used again. So a pod whose removal is certain is not taken in any more. The number of uids
//! is bounded; answers that are older than that many removals do not occur, because requests time out.

use gainshare_kube_api::names::PodUid;
use std::collections::{BTreeSet, VecDeque};

/// The number of removals that are remembered.
const MOST: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct RemovedPods {
    order: VecDeque<PodUid>,
    uids: BTreeSet<PodUid>,
}

impl RemovedPods {
    pub(super) fn insert(&mut self, uid: &PodUid) {
        if !self.uids.insert(uid.clone()) {
            return;
        }
        self.order.push_back(uid.clone());
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.uids.remove(&oldest);
        }
    }

    pub(super) fn contains(&self, uid: &PodUid) -> bool {
        self.uids.contains(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_removals_are_forgotten() {
        let mut removed = RemovedPods::default();
        (0..MOST + 2).for_each(|number| removed.insert(&number.to_string().into()));
        removed.insert(&"5".into());
        assert!(
            !removed.contains(&"1".into())
                && removed.contains(&"2".into())
                && removed.contains(&(MOST + 1).to_string().into())
        );
        assert_eq!((removed.order.len(), removed.uids.len()), (MOST, MOST));
    }
}
