//! Which workloads are due now or later.
//!
//! There are two rows. Workloads for which something has happened (an order, a change of a pod, an
//! alarm) are in `first`, in the order in which it happened. Jobs that have not begun, and jobs whose
//! progress may have to be published, are in `then`; they are taken when `first` is empty. So ten
//! thousand new jobs do not delay a move. One worker at a time takes a workload; a workload that
//! becomes due meanwhile is queued again afterwards. A workload whose reconcile panicked rests before
//! its next turn.

use crate::isolate;
use crate::state::jobs::JobChange;
use crate::state::workload::WorkloadKey;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct Queue {
    first: Row,
    then: Row,
    working: BTreeSet<WorkloadKey>,
    /// Workloads that became due while a worker had them.
    once_more: BTreeSet<WorkloadKey>,
    /// Workloads whose reconcile panicked: how often in a row, and until when they rest.
    resting: BTreeMap<WorkloadKey, (u32, Timestamp)>,
    wakes: BTreeMap<WorkloadKey, Timestamp>,
    alarms: BTreeSet<(Timestamp, WorkloadKey)>,
}

/// Workloads that are due, each once.
#[derive(Debug, Default)]
struct Row {
    keys: VecDeque<WorkloadKey>,
    within: BTreeSet<WorkloadKey>,
    /// The number of jobs at the front that have been published to the decision.
    announced: usize,
}

impl Row {
    fn push(&mut self, key: WorkloadKey) {
        if self.within.insert(key.clone()) {
            self.keys.push_back(key);
        }
    }

    fn pop(&mut self) -> Option<WorkloadKey> {
        let key = self.keys.pop_front()?;
        self.within.remove(&key);
        self.announced = self.announced.saturating_sub(1);
        Some(key)
    }
}

impl Queue {
    /// Something has happened to a workload.
    pub(super) fn put(&mut self, key: WorkloadKey, change: JobChange) {
        match change {
            JobChange::New => self.then.push(key),
            JobChange::Changed => self.first.push(key),
            JobChange::Gone => {
                self.wake_at(&key, None);
                self.resting.remove(&key);
                self.first.push(key);
            }
        }
    }

    /// The job's progress may have to be written.
    pub(super) fn put_last(&mut self, key: WorkloadKey) {
        self.then.push(key);
    }

    /// The next new jobs, up to `most` of them. Each is returned once.
    pub(super) fn coming(&mut self, most: usize) -> Vec<WorkloadKey> {
        let row = &mut self.then;
        let upto = row.keys.len().min(most);
        let from = row.announced.min(upto);
        row.announced = row.announced.max(upto);
        row.keys.range(from..upto).cloned().collect()
    }

    pub(super) fn wake_at(&mut self, key: &WorkloadKey, at: Option<Timestamp>) {
        let before = match at {
            Some(at) => self.wakes.insert(key.clone(), at),
            None => self.wakes.remove(key),
        };
        if let Some(before) = before {
            self.alarms.remove(&(before, key.clone()));
        }
        if let Some(at) = at {
            self.alarms.insert((at, key.clone()));
        }
    }

    /// The next workload that is due; [`Queue::done`] or [`Queue::panicked`] must follow.
    pub(super) fn take(&mut self, now: Timestamp) -> Option<WorkloadKey> {
        while let Some((_, key)) = self.alarms.first().filter(|(at, _)| *at <= now).cloned() {
            self.wake_at(&key, None);
            self.first.push(key);
        }
        while let Some(key) = self.first.pop().or_else(|| self.then.pop()) {
            if let Some((_, until)) = self.resting.get(&key).filter(|(_, until)| *until > now) {
                self.wake_at(&key, Some(*until));
                continue;
            }
            if self.working.insert(key.clone()) {
                return Some(key);
            }
            self.once_more.insert(key);
        }
        None
    }

    /// The work on a workload ended with a panic: it rests for a while. Answers for how long.
    pub(super) fn panicked(&mut self, key: &WorkloadKey, now: Timestamp) -> Duration {
        self.working.remove(key);
        self.once_more.remove(key);
        let times = self.resting.get(key).map_or(0, |(times, _)| *times).saturating_add(1);
        let rest = isolate::rest_after(times);
        let until = SignedDuration::try_from(rest).ok().and_then(|rest| now.saturating_add(rest).ok()).unwrap_or(now);
        self.resting.insert(key.clone(), (times, until));
        self.wake_at(key, Some(until));
        rest
    }

    /// The work on a workload has ended.
    pub(super) fn done(&mut self, key: &WorkloadKey) {
        self.resting.remove(key);
        self.working.remove(key);
        if let Some(key) = self.once_more.take(key) {
            self.first.push(key);
        }
    }

    /// When the next one is to be woken.
    pub(super) fn next_alarm(&self) -> Option<Timestamp> {
        self.alarms.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
