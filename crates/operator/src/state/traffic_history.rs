//! What the tasks of earlier jobs sent and received, so that the next job of the same templates is placed by it.
//!
//! **How.** The traffic of a job is in its own status ([`gainshare_kube_api::tasks::TaskJournal::traffic`]). It is kept
//! here by namespace and templates, the newest of each. A new leader reads it from the statuses of all jobs that still
//! exist. A namespace never learns from another one.

use gainshare_kube_api::tasks::TaskTraffic;
use std::collections::{BTreeMap, VecDeque};

/// Templates that are kept; those that have been known longest go first.
const MOST_PROGRAMS: usize = 10_000;

type ProgramKey = (String, u64);

#[derive(Debug, Default)]
pub(crate) struct TrafficHistory {
    jobs: BTreeMap<ProgramKey, TaskTraffic>,
    /// Oldest first.
    known: VecDeque<ProgramKey>,
}

impl TrafficHistory {
    pub(crate) fn add(&mut self, namespace: &str, program: u64, traffic: &TaskTraffic) {
        let key = (namespace.to_owned(), program);
        if self.jobs.insert(key.clone(), traffic.clone()).is_some() {
            return;
        }
        self.known.push_back(key);
        if self.known.len() > MOST_PROGRAMS
            && let Some(oldest) = self.known.pop_front()
        {
            self.jobs.remove(&oldest);
        }
    }

    pub(crate) fn get(&self, namespace: &str, program: u64) -> Option<&TaskTraffic> {
        self.jobs.get(&(namespace.to_owned(), program))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_traffic_of_a_template_is_kept_for_its_namespace_only() {
        let traffic = |bytes_s: u64| TaskTraffic::from([("ps-0".to_owned(), bytes_s)]);
        let mut history = TrafficHistory::default();
        history.add("team", 7, &traffic(1));
        history.add("team", 7, &traffic(2));
        assert_eq!(history.get("team", 7), Some(&traffic(2)));
        assert_eq!((history.get("team", 8), history.get("other", 7)), (None, None));
        for program in 0..MOST_PROGRAMS as u64 + 5 {
            history.add("many", program, &traffic(3));
        }
        assert_eq!((history.jobs.len(), history.known.len()), (MOST_PROGRAMS, MOST_PROGRAMS));
        assert_eq!(history.get("team", 7), None, "the oldest goes first");
    }
}
