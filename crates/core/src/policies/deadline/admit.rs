//! Which deadlines are promised.
//!
//! Promises already given come first, those that rest on the job's own reports before all others. Then new ones are
//! added in order of their deadlines as long as there is room for all of them.

use super::fill::{Task, by_deadline, fill};
use super::{Admission, Promise, Rule};
use crate::view::JobView;
use std::collections::BTreeSet;

/// One job whose deadline may be promised.
pub(super) struct Candidate<'a> {
    pub(super) place: usize,
    pub(super) job: &'a JobView,
    /// Seconds that the deadline may be exceeded.
    pub(super) tolerance_s: f64,
    pub(super) promised: Option<Promise>,
}

impl Candidate<'_> {
    /// Plans task `i` with as little safety as is needed for `fits`: at the speed that is expected, without caution,
    /// and then with the tolerated lateness. A promise is given up only if none of that can keep it: a job without a
    /// promise would surely miss in its last seconds. A new promise is made without caution only to a job whose speed
    /// at larger shares is not known. `false` if nothing helps; the task is then what it was.
    fn relax(&self, tasks: &mut [Task], i: usize, fits: impl Fn(&[Task]) -> bool) -> bool {
        let planned = tasks[i];
        let least_caution = if self.promised.is_some() || planned.is_unsure() { 0.0 } else { planned.caution };
        let cautions = [planned.caution, least_caution];
        let mut attempts: Vec<_> = [0.0, self.tolerance_s].into_iter().flat_map(|s| cautions.map(|c| (s, c))).collect();
        attempts.dedup();
        for (later_s, caution) in attempts {
            tasks[i] = Task { left_s: planned.left_s + later_s, caution, ..planned };
            if fits(tasks) {
                return true;
            }
        }
        tasks[i] = planned;
        false
    }

    /// Whether the job has shown what its trial was for.
    fn has_shown(&self, task: &Task) -> bool {
        self.promised.and_then(|p| p.trial).is_some_and(|trial| task.has_shown(trial.needs))
    }
}

fn fits(tasks: &[Task], chosen: &BTreeSet<usize>, capacity: f64) -> bool {
    fill(tasks, &by_deadline(tasks, chosen.iter().copied()), capacity).is_some()
}

impl Rule<'_> {
    /// Which deadlines are planned for: places in `tasks`. The deadlines of tasks that are promised only
    /// with their tolerance are moved back by it.
    pub(super) fn admit(&mut self, candidates: &[Candidate<'_>], tasks: &mut [Task], capacity: f64) -> BTreeSet<usize> {
        let mut accepted = keep(candidates, tasks, capacity);
        let new: Vec<usize> = (0..candidates.len()).filter(|i| !accepted.contains(i)).collect();
        match self.numbers.admission {
            Admission::Final => self.add_once(candidates, tasks, &new, capacity, &mut accepted),
            Admission::Revised => add(candidates, tasks, &new, capacity, &mut accepted),
        }
        accepted
    }

    /// Adds what fits, and refuses the others for good.
    fn add_once(
        &mut self,
        candidates: &[Candidate<'_>],
        tasks: &[Task],
        new: &[usize],
        capacity: f64,
        accepted: &mut BTreeSet<usize>,
    ) {
        for &i in new {
            let id = candidates[i].job.id;
            if self.memory.declined.contains(&id) {
                continue;
            }
            accepted.insert(i);
            if !fits(tasks, accepted, capacity) {
                accepted.remove(&i);
                self.memory.declined.insert(id);
            }
        }
    }
}

/// The promises already given that can be kept.
fn keep(candidates: &[Candidate<'_>], tasks: &mut [Task], capacity: f64) -> BTreeSet<usize> {
    // A job whose trial is over is judged as a new one, by what it has shown.
    let is_old = |i: &usize| candidates[*i].promised.is_some() && !candidates[*i].has_shown(&tasks[*i]);
    let mut old: Vec<usize> = (0..candidates.len()).filter(is_old).collect();
    // What rests on other runs, or on a speed that was not shown, gives way to what jobs have shown themselves.
    let rank = |p: Promise| (p.is_unproven || p.trial.is_some(), p.since);
    old.sort_by_key(|&i| (candidates[i].promised.map(rank), candidates[i].job.id));
    let mut accepted: BTreeSet<usize> = old.iter().copied().collect();
    if !fits(tasks, &accepted, capacity) {
        accepted.clear();
        for i in old {
            accepted.insert(i);
            if !candidates[i].relax(tasks, i, |t| fits(t, &accepted, capacity)) {
                accepted.remove(&i);
            }
        }
    }
    accepted
}

/// Adds new promises in order of their deadlines. Where there is no room for all, the one that takes most of the node
/// is left out, because that leaves room for the most others.
fn add(candidates: &[Candidate<'_>], tasks: &mut [Task], new: &[usize], capacity: f64, accepted: &mut BTreeSet<usize>) {
    let mut chosen: BTreeSet<usize> = BTreeSet::new();
    for i in by_deadline(tasks, new.iter().copied()) {
        chosen.insert(i);
        let mut all: BTreeSet<usize> = accepted.union(&chosen).copied().collect();
        while !fits(tasks, &all, capacity) {
            let largest = |a: &&usize, b: &&usize| tasks[**a].work().total_cmp(&tasks[**b].work()).then(a.cmp(b));
            let Some(&out) = chosen.iter().max_by(largest) else { break };
            chosen.remove(&out);
            all.remove(&out);
        }
    }
    accepted.extend(chosen);
    for &i in new {
        if accepted.insert(i) && !candidates[i].relax(tasks, i, |t| fits(t, accepted, capacity)) {
            accepted.remove(&i);
        }
    }
}
