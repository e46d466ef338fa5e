//! The order in which waiting gangs of different queues may start. Pure: no I/O, no clock.
//!
//! **Problem.** Teams share a cluster and submit different numbers of jobs. In one line by age, the team that submits
//! most jobs gets most of the cluster.
//!
//! **How.** The administrator names queues with weights (`--queue research=3`), and a job names its queue. Jobs that
//! name no queue, or one that does not exist, are in one queue of weight 1. Among gangs of the same priority, the queue
//! goes first that holds least by its weight: what its running jobs request, and what its waiting jobs further in
//! front would add. Within a queue the older job goes first. A gang that starves ([`RoomRequest::starves`]) goes before
//! all that do not, so no queue holds up a job of another one for ever.
//!
//! A weight is no bound: a queue may use the whole cluster while no job of another queue waits.
//!
//! **Units.** Thousandths of a core.
//!
//! **Properties.** Without named queues the line is ordered by priority and age; `queues_take_turns_by_their_weights`;
//! `a_starving_gang_goes_before_all_queues`.

use super::request::{Class, RoomRequest};
use jiff::Timestamp;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The weight of each queue that the administrator has named.
pub type QueueWeights = BTreeMap<String, u32>;

/// The name of the queue of all jobs that are in no other one.
const OTHERS: &str = "";

/// Makes `held` comparable between queues of different weights.
const SCALE: u64 = 1000;

/// The queues, and what each of them holds.
#[derive(Debug, Clone, Default)]
pub(crate) struct QueueShares {
    weights: QueueWeights,
    held_milli: BTreeMap<String, u64>,
}

impl QueueShares {
    pub(super) fn new(weights: &QueueWeights) -> QueueShares {
        QueueShares { weights: weights.clone(), held_milli: BTreeMap::new() }
    }

    fn queue<'a>(&self, name: Option<&'a str>) -> &'a str {
        name.filter(|name| self.weights.contains_key(*name)).unwrap_or(OTHERS)
    }

    /// What a job of this queue holds.
    pub(super) fn hold(&mut self, queue: Option<&str>, milli: u64) {
        let queue = self.queue(queue).to_owned();
        let held = self.held_milli.entry(queue).or_default();
        *held = held.saturating_add(milli);
    }

    /// Puts the line in order.
    pub(super) fn sort(mut self, requests: &mut Vec<RoomRequest>, now: Timestamp) {
        requests.sort_by_cached_key(|one| (one.class, Reverse(one.priority), one.since, one.key.clone()));
        if self.weights.is_empty() {
            return;
        }
        let mut ranked: Vec<_> = std::mem::take(requests)
            .into_iter()
            .map(|one| {
                let turn = self.take_turn(&one);
                let turn = if one.starves(now) { None } else { Some(turn) };
                ((one.class, Reverse(one.priority), turn), one)
            })
            .collect();
        // Requests of the same rank stay in the order of their age.
        ranked.sort_by_key(|(rank, _)| *rank);
        requests.extend(ranked.into_iter().map(|(_, one)| one));
    }

    /// What the queue of the request holds by its weight, before the request.
    fn take_turn(&mut self, request: &RoomRequest) -> u64 {
        if request.class != Class::Gang {
            return 0;
        }
        let queue = self.queue(request.queue.as_deref());
        let weight = self.weights.get(queue).copied().unwrap_or(1).max(1);
        let held = self.held_milli.get(queue).copied().unwrap_or(0);
        self.hold(request.queue.as_deref(), request.milli());
        held.saturating_mul(SCALE) / u64::from(weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::task_job::request::TaskNeed;
    use crate::state::workload::{WorkloadKey, WorkloadKind};
    use gainshare_kube_api::names::NamespacedName;
    use gainshare_kube_api::tasks::{Role, TaskId};

    /// A gang of one worker.
    fn gang(name: &str, queue: &str, since_s: i64, milli: u64) -> RoomRequest {
        RoomRequest {
            key: WorkloadKey::new(WorkloadKind::TaskJob, NamespacedName::new("team", name)),
            uid: name.into(),
            class: Class::Gang,
            priority: 0,
            queue: Some(queue.to_owned()).filter(|queue| !queue.is_empty()),
            since: Timestamp::from_second(since_s).unwrap(),
            needs: vec![TaskNeed {
                task: TaskId::new(Role::Worker, 0),
                requests: (milli, 0),
                devices: None,
                traffic: None,
            }],
            optional: Vec::new(),
            avoid: Vec::new(),
            nodes: None,
        }
    }

    fn order(turns: &QueueShares, requests: &[RoomRequest], now_s: i64) -> Vec<String> {
        let mut requests = requests.to_vec();
        turns.clone().sort(&mut requests, Timestamp::from_second(now_s).unwrap());
        requests.into_iter().map(|one| one.uid.into()).collect()
    }

    fn turns(weights: &[(&str, u32)]) -> QueueShares {
        QueueShares::new(&weights.iter().map(|(name, weight)| ((*name).to_owned(), *weight)).collect())
    }

    #[test]
    fn queues_take_turns_by_their_weights() {
        let mut jobs: Vec<RoomRequest> = (0..6).map(|n| gang(&format!("a{n}"), "a", n, 1000)).collect();
        jobs.extend((0..3).map(|n| gang(&format!("b{n}"), "b", 10 + n, 1000)));
        let two_to_one = turns(&[("a", 2), ("b", 1)]);
        assert_eq!(order(&two_to_one, &jobs, 20), ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"]);
        assert_eq!(
            order(&QueueShares::default(), &jobs, 20)[..6],
            ["a0", "a1", "a2", "a3", "a4", "a5"],
            "by age alone"
        );
    }

    #[test]
    fn what_a_queue_holds_counts() {
        let jobs = [gang("old", "a", 0, 1000), gang("young", "b", 5, 1000)];
        let mut turns = turns(&[("a", 1), ("b", 1)]);
        assert_eq!(order(&turns, &jobs, 9), ["old", "young"]);
        turns.hold(Some("a"), 500);
        assert_eq!(order(&turns, &jobs, 9), ["young", "old"]);
    }

    #[test]
    fn unknown_queues_are_one_queue() {
        let jobs =
            [gang("x0", "x", 0, 1000), gang("y0", "y", 1, 1000), gang("none", "", 2, 1000), gang("a0", "a", 3, 1)];
        assert_eq!(order(&turns(&[("a", 1)]), &jobs, 9), ["x0", "a0", "y0", "none"], "new names bring no more turns");
    }

    #[test]
    fn a_starving_gang_goes_before_all_queues() {
        let mut turns = turns(&[("a", 1), ("b", 1)]);
        turns.hold(Some("a"), 1_000_000);
        let starving = [gang("large", "a", 0, 9000), gang("small", "b", 200, 1000)];
        assert_eq!(order(&turns, &starving, 299), ["small", "large"]);
        assert_eq!(order(&turns, &starving, 300), ["large", "small"]);
        let urgent = RoomRequest { priority: 1, ..gang("urgent", "b", 250, 1) };
        assert_eq!(order(&turns, &[&starving[..], &[urgent]].concat(), 300), ["urgent", "large", "small"]);
    }

    #[test]
    fn replacements_of_lost_tasks_do_not_take_turns() {
        let mut turns = turns(&[("a", 1)]);
        turns.hold(Some("a"), 5000);
        let lost = RoomRequest { class: Class::Replacement, ..gang("lost", "a", 0, 1000) };
        let other = RoomRequest { class: Class::Replacement, ..gang("other", "", 1, 1000) };
        assert_eq!(order(&turns, &[other, lost], 9), ["lost", "other"]);
    }
}
