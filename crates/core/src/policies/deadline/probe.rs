//! Probes: a job is measured with a larger share before its deadline is promised.
//!
//! **Problem.** A job that has had only a small share has not shown how fast it is with a larger one, nor that it can
//! use a larger one at all. A promise that rests on that is often broken.
//!
//! **Approach.** Such a job is on *trial*: its deadline is planned for, and it has what the plan gives it, but it is
//! promised nothing until it was measured near the largest share that the plan gives it. If the plan gives it that share
//! only later, the job is *probed*: it has the share at once for a few reports, if every deadline that is
//! planned for has room nevertheless. One job of a node is probed at a time, and once near a share.

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
    pub(super) tried: Option<Tried>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Tried {
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
    let tried = |i: usize| candidates[i].promised.and_then(|p| p.trial).and_then(|t| t.tried);
    let is_on_trial = |i: usize| candidates[i].promised.is_none_or(|p| p.trial.is_some());
    let open = needs.iter().filter(|(i, need)| {
        let task = &tasks[*i];
        is_on_trial(*i) && !task.pace.is_guess && !task.has_shown(need.most) && NEAR * need.now < need.most
    });
    let probes = open.flat_map(|(i, need)| {
        let most = need.most.min(capacity);
        // All of it, or a part of the way there.
        [most, (most * tasks[*i].pace.seen).sqrt()].map(|share| (*i, share))
    });
    let mut probes: Vec<Probe> = probes
        .filter_map(|(i, share)| {
            let (task, signal) = (&tasks[i], &candidates[i].job.signal);
            let per_report = signal.position() / signal.reports.max(1) as f64;
            let seconds = REPORTS * per_report * task.pace.cautious_step_s(share, 1.0) + EFFECT_S;
            let is_useful = share > NEAR * task.pace.seen;
            let probe = Probe { task: i, since: now, share, seconds };
            match tried(i) {
                Some(t) if share <= NEAR * t.share => {
                    let ran_s = now.since(t.since).as_secs_f64();
                    let left_s = LONGEST * seconds - ran_s;
                    let is_running = left_s > 0.0 && !task.has_shown(t.share);
                    is_running.then_some(Probe {
                        since: t.since,
                        share: t.share,
                        seconds: seconds.min(left_s),
                        ..probe
                    })
                }
                _ => is_useful.then_some(probe),
            }
        })
        .collect();
    // What runs goes on.
    probes.sort_by_key(|p| p.since);
    probes.into_iter().find_map(|probe| Some((fits(&probe)?, probe)))
}
