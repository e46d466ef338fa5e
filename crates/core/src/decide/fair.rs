//! The world in which everybody shares equally, in thought: when would each job end there?
//!
//! **Problem.** A policy that prefers some jobs must not make others pay for it. What a job may expect is what it would have had without the policy: the
//! default placement, an equal share of its node, no moves. So that world is simulated beside the real one, and when it ends a job is that job's
//! *deadline* in the real one, wherever the job lives there.
//!
//! **Approach.** Each job has a home: the node where the placement rule would have put it in the fair world, or where it was found. On each node the owners
//! split it equally and an owner's jobs share its part ([`machine`]). Between two steps the world is moved on by what its machines would have done; then the
//! jobs' predictions are taken over and the ends computed anew. A job that has really ended stays as long as it would have lasted, because it
//! would have slowed its neighbours for so long.
//!
//! **Terms.** Work is in core-seconds of a core of speed 1, so that jobs can be followed across unequal nodes.

pub(crate) mod machine;

use crate::model::{JobId, NodeId, OwnerId, Time};
use crate::view::{NodeView, View};
use machine::Task;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct FairWorld {
    at: Time,
    jobs: BTreeMap<JobId, Job>,
    /// Where jobs that are about to start belong.
    homes: BTreeMap<JobId, NodeId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Job {
    home: NodeId,
    owner: OwnerId,
    since: Time,
    /// Work done by the real job since then, and what it had consumed of its real node when last looked at.
    done: f64,
    consumed: f64,
    /// Work given by the fair world.
    given: f64,
    /// All its work since then, as last predicted.
    total: Option<f64>,
    /// Cores it can use; infinite if it never left any unused.
    cores: f64,
    ends: Option<Time>,
}

/// What is predicted of a job, in node-seconds of the node it is on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Prediction {
    pub(crate) left: f64,
    /// The most of its node it can use.
    pub(crate) most: f64,
}

impl FairWorld {
    /// How many jobs each node has.
    pub(crate) fn counts(&self) -> BTreeMap<NodeId, usize> {
        let mut counts = BTreeMap::new();
        for home in self.jobs.values().map(|j| j.home).chain(self.homes.values().copied()) {
            *counts.entry(home).or_default() += 1;
        }
        counts
    }

    /// A job that is about to start belongs on `node`.
    pub(crate) fn settle(&mut self, job: JobId, node: NodeId) {
        self.homes.insert(job, node);
    }

    /// When the fair world ends `job` and when it came there, if the end is known.
    pub(crate) fn ends(&self, job: JobId) -> Option<(Time, Time)> {
        self.jobs.get(&job).and_then(|j| Some((j.ends?, j.since)))
    }

    /// Moves the world on to `view`.
    pub(crate) fn step(&mut self, view: &View, predict: impl Fn(JobId) -> Option<Prediction>) {
        self.advance(view);
        for job in &view.jobs {
            let Some(node) = job.node().and_then(|n| view.node(n)) else { continue };
            let speed = node.cores * node.speed;
            let known = self.jobs.entry(job.id).or_insert_with(|| Job {
                home: self.homes.remove(&job.id).filter(|h| view.node(*h).is_some()).unwrap_or(node.id),
                owner: job.owner,
                since: view.now,
                done: 0.0,
                consumed: job.consumed.cpu,
                given: 0.0,
                total: None,
                cores: f64::INFINITY,
                ends: None,
            });
            if view.node(known.home).is_none() {
                known.home = node.id;
            }
            known.done += (job.consumed.cpu - known.consumed).max(0.0) * speed;
            known.consumed = job.consumed.cpu;
            let prediction = predict(job.id);
            known.total = prediction.map(|p| known.done + p.left * speed);
            known.cores = prediction.filter(|p| p.most < 1.0).map_or(f64::INFINITY, |p| p.most * node.cores);
        }
        self.homes.retain(|id, _| view.job(*id).is_some());
        // A job that ended before anything was known of it leaves nothing to remember.
        self.jobs.retain(|id, j| {
            view.job(*id).is_some_and(|v| v.node().is_some()) || (j.total.is_some() && view.node(j.home).is_some())
        });
        self.look_ahead(view);
    }

    /// Gives every job what its machine gives it until now; who has all its work and has really ended is forgotten.
    fn advance(&mut self, view: &View) {
        let elapsed_s = if self.at == Time::ZERO { 0.0 } else { view.now.since(self.at).as_secs_f64() };
        self.at = view.now;
        if elapsed_s <= 0.0 {
            return;
        }
        for (ids, fates) in self.machines(view, elapsed_s) {
            for (id, fate) in ids.iter().zip(fates) {
                let job = self.jobs.get_mut(id).expect("machines are made of the jobs");
                job.given += fate.served;
            }
        }
        self.jobs.retain(|id, j| view.job(*id).is_some() || j.total.is_some_and(|t| t - j.given > 1e-9 * t));
    }

    fn look_ahead(&mut self, view: &View) {
        for (ids, fates) in self.machines(view, 0.0) {
            for (id, fate) in ids.iter().zip(fates) {
                let job = self.jobs.get_mut(id).expect("machines are made of the jobs");
                job.ends = fate.ends_s.is_finite().then(|| view.now + crate::model::Span::from_secs_f64(fate.ends_s));
            }
        }
    }

    /// Runs the machine of every node and owner: the jobs on it, and what becomes of each.
    fn machines(&self, view: &View, until_s: f64) -> Vec<(Vec<JobId>, Vec<machine::Fate>)> {
        let mut parts: BTreeMap<(NodeId, OwnerId), Vec<JobId>> = BTreeMap::new();
        let mut owners: BTreeMap<NodeId, BTreeSet<OwnerId>> = BTreeMap::new();
        for (id, job) in &self.jobs {
            parts.entry((job.home, job.owner)).or_default().push(*id);
            owners.entry(job.home).or_default().insert(job.owner);
        }
        let run = |((home, _), ids): ((NodeId, OwnerId), Vec<JobId>)| {
            let node = view.node(home)?;
            let capacity = node.cores * node.speed / owners[&home].len() as f64;
            let tasks: Vec<Task> = ids.iter().map(|id| self.jobs[id].task(node)).collect();
            let fates = machine::run(&tasks, capacity, until_s);
            Some((ids, fates))
        };
        parts.into_iter().filter_map(run).collect()
    }
}

impl Job {
    fn task(&self, node: &NodeView) -> Task {
        Task {
            left: self.total.map_or(f64::INFINITY, |t| (t - self.given).max(0.0)),
            most: (self.cores.min(node.cores) * node.speed).max(f64::MIN_POSITIVE),
        }
    }
}
