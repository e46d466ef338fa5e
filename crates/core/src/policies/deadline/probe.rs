//! Probes: a job is measured with a larger share before its deadline is promised.
//!
//! **Problem.** A job that has had only a small share has not shown how fast it is with a larger one, nor that it can
//! use a larger one at all. A promise that rests on that is often broken.
//!
//! **Approach.** Such a job is on *trial*: its deadline is planned for, and it has what the plan gives it, but it is
//! promised nothing until it was measured near the largest share that the plan gives it. If the plan gives it that
//! share only later, the job is *probed*: it has the share at once for a few reports, if every deadline that is planned
//! for has room nevertheless. One job of a node is probed at a time, and once near a share.

use super::admit::Candidate;
use super::fill::{Allocation, Task};
use crate::model::Time;
use serde::{Deserialize, Serialize};

/// What a job on trial has to show.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Trial {
    /// The largest share that its plan gives it.
    pub(super) needs: f64,
    /// The last probe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tried: Option<PastProbe>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct PastProbe {
    pub(super) since: Time,
    pub(super) share: f64,
}

/// A share that a job has for a while only to be measured with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Probe {
    /// The place of its task.
    pub(super) task: usize,
    pub(super) since: Time,
    pub(super) share: f64,
    /// How much longer it may take.
    pub(super) seconds: f64,
}

/// A probe takes this many reports: a window lies between two of them, and the first may have begun before.
const REPORTS: f64 = 2.5;

/// and the time until a new share is in force.
const EFFECT_S: f64 = 2.0;

/// A probe is over after this many times its expected length, whatever it has shown.
const LONGEST: f64 = 2.0;

/// A share is near another one if it is not larger by more than this factor.
const NEAR: f64 = 1.25;

/// The task that is probed, and what all need beside the probe.
pub(super) fn choose(
    now: Time,
    candidates: &[Candidate<'_>],
    tasks: &[Task],
    needs: &[(usize, Allocation)],
    capacity: f64,
    fits: impl Fn(&Probe) -> Option<Vec<(usize, Allocation)>>,
) -> Option<(Vec<(usize, Allocation)>, Probe)> {
    let mut probes = vec![];
    for (i, need) in needs {
        let (candidate, task) = (&candidates[*i], &tasks[*i]);
        let is_on_trial = candidate.promised.is_none_or(|p| p.trial.is_some());
        let comes_later = NEAR * need.now < need.most;
        if is_on_trial && comes_later && !task.pace.is_guess && !task.has_shown(need.most) {
            probes.extend(open(now, *i, candidate, task, need.most.min(capacity)));
        }
    }
    // What runs goes on.
    probes.sort_by_key(|p| p.since);
    probes.into_iter().find_map(|probe| Some((fits(&probe)?, probe)))
}

/// The probes of one job, the best first: the one that runs, or with `most` of the node, or with a part of the way.
fn open(now: Time, i: usize, candidate: &Candidate<'_>, task: &Task, most: f64) -> Vec<Probe> {
    let signal = &candidate.job.signal;
    let per_report = signal.position() / signal.reports.max(1) as f64;
    let probe = |since: Time, share: f64| {
        let expected_s = REPORTS * per_report * task.pace.cautious_step_s(share, 1.0) + EFFECT_S;
        let left_s = LONGEST * expected_s - now.since(since).as_secs_f64();
        Probe { task: i, since, share, seconds: expected_s.min(left_s) }
    };
    let tried = candidate.promised.and_then(|p| p.trial).and_then(|t| t.tried);
    let running = tried.map(|t| probe(t.since, t.share)).filter(|p| p.seconds > 0.0 && !task.has_shown(p.share));
    let seen = tried.map_or(0.0, |t| t.share).max(task.pace.seen);
    let new = [most, (most * task.pace.seen).sqrt()].into_iter().filter(|share| *share > NEAR * seen);
    running.into_iter().chain(new.map(|share| probe(now, share))).collect()
}
