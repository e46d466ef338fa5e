//! When Jobs were created whose pods have a deadline: a length of time counts from then, for all pods of a Job.
//!
//! Any Job may name a deadline in its pod template, also one that the operator does not move. Only Jobs that do are
//! kept, because a cluster may have tens of thousands of others.

use gainshare_kube_api::adopted::BatchJobSnapshot;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{JobUid, NamespacedName};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(super) struct JobDates {
    /// The uid of each Job, and when it was created.
    created: BTreeMap<NamespacedName, (JobUid, u64)>,
}

impl JobDates {
    /// Takes in a Job. Whether its pods have another deadline than before.
    pub(super) fn put(&mut self, job: &BatchJobSnapshot) -> bool {
        let name = NamespacedName::new(&job.namespace, &job.name);
        if !job.has_deadline {
            return self.created.remove(&name).is_some();
        }
        let date = (job.uid.clone(), job.created.as_millisecond().max(0).unsigned_abs());
        self.created.insert(name, date.clone()) != Some(date)
    }

    pub(super) fn remove(&mut self, name: &NamespacedName) {
        self.created.remove(name);
    }

    /// The Jobs that exist: those not among them are gone.
    pub(super) fn keep(&mut self, alive: &BTreeSet<NamespacedName>) {
        self.created.retain(|name, _| alive.contains(name));
    }

    /// From when a length of time counts in a deadline of this pod: the creation of its Job, or its own.
    pub(super) fn since_ms(&self, pod: &PodFacts) -> Option<u64> {
        let owners = pod.owners.iter().filter(|owner| owner.controller && owner.kind == "Job");
        let of_job = |name: &str, uid: &str| {
            let (known, created_ms) = self.created.get(&NamespacedName::new(&pod.namespace, name))?;
            (*known == uid).then_some(*created_ms)
        };
        owners.filter_map(|owner| of_job(&owner.name, &owner.uid)).next().or(pod.created_ms)
    }
}
