//! The fair world: a simulation in which all jobs share equally. When would each job end there?
//!
//! **Problem.** A policy that prefers some jobs must not make others pay for it. What a job may
//! expect is what it would have had without the policy: the default placement, an equal share of
//! its node, no moves. That world is simulated beside the real one. The end of a job in the fair
//! world is the job's *deadline* in the real one, on whichever node the job really runs.
//!
//! **Approach.** Each job has a home: the node where the placement rule would have put it in the
//! fair world, or where it was found. On each node the owners split it equally, and an owner's jobs
//! share its part ([`machine`], or [`teams`] where teams of threads follow the shares). Each step
//! first gives every job what its machine would have given it since the last step; then it takes
//! over the new predictions and computes the ends again. A job that has really ended stays until it
//! would have ended in the fair world, because until then it would have slowed its neighbours. How long that is was
//! predicted while the job ran. Where the predictions are medians, half of them are too long, so the world takes the
//! true length when the job ends ([`EndedJob`]).
//!
//! How fast a team is, a law tells only roughly. A job that is slower than the law would fall behind the fair world
//! even with an equal share. So a job with a team gets what it really did since the last step, times its speed by the
//! law with equal shares over its speed with the cores that it really had: only what shares took makes it late.
//!
//! The same holds on a GPU, where nothing tells in advance how much of it a job can use, and where use is read roughly.
//! A job that had an equal share or more gets no more than it really did: with less it would have done no more.
//!
//! **Terms.** Work is in core-seconds of a core of speed 1, so that jobs can be followed across
//! unequal nodes.

use super::super::{Homes, Prediction};
use super::machine::{self, Task, TaskResult};
use super::teams::{self, TeamTask, TeamUse};
use crate::model::{JobId, NodeId, OwnerId, Span, Time};
use crate::view::{JobView, NodeView, View};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct FairWorld {
    at: Time,
    jobs: BTreeMap<JobId, PlacedJob>,
    /// Where jobs that are about to start belong.
    homes: BTreeMap<JobId, NodeId>,
    /// How much neighbours slow each other down, see [`machine::slowdown`].
    disturbance: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct PlacedJob {
    home: NodeId,
    owner: OwnerId,
    since: Time,
    /// Work done by the real job since then.
    done: f64,
    /// Work given by the fair world.
    given: f64,
    /// All its work since then, as last predicted.
    total: Option<f64>,
    /// Cores it can use; infinite if it never left any unused.
    #[serde(with = "infinite")]
    cores: f64,
    /// How it gains from further cores, where its team of threads follows its share.
    #[serde(default)]
    team: Option<TeamUse>,
    ends: Option<Time>,
}

/// JSON has no infinity: it is written as nothing.
mod infinite {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        Some(*value).filter(|v| v.is_finite()).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::INFINITY))
    }
}

/// What became known of a job since the last step, in node-seconds of the node it is on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Observation {
    /// Work it has done.
    pub(crate) done: f64,
    pub(crate) prediction: Option<Prediction>,
    /// How it gains from further cores, where its team of threads follows its share.
    pub(crate) team: Option<TeamUse>,
    /// The cores that its share stood for since the last step.
    pub(crate) cores: f64,
    /// The job works on a GPU and had an equal share or more since the last step.
    pub(crate) had_enough: bool,
}

/// What an ended job did after the last view that had it, in node-seconds of the node it was on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct EndedJob {
    pub(crate) id: JobId,
    pub(crate) node: NodeId,
    pub(crate) done: f64,
}

impl Homes for FairWorld {
    fn counts(&self) -> BTreeMap<NodeId, usize> {
        let mut counts = BTreeMap::new();
        let here = self.jobs.values().filter(|j| !j.has_ended()).map(|j| j.home);
        for home in here.chain(self.homes.values().copied()) {
            *counts.entry(home).or_default() += 1;
        }
        counts
    }

    fn settle(&mut self, job: JobId, node: NodeId) {
        self.homes.insert(job, node);
    }
}

impl FairWorld {
    /// Where `job` lives.
    pub(crate) fn home(&self, job: JobId) -> Option<NodeId> {
        self.jobs.get(&job).map(|j| j.home)
    }

    /// When the fair world ends `job` and when it came there, if the end is known.
    pub(crate) fn ends(&self, job: JobId) -> Option<(Time, Time)> {
        self.jobs.get(&job).and_then(|j| Some((j.ends?, j.since)))
    }

    /// Moves the world on to `view`. `disturbance` is what is now known of how much neighbours slow
    /// each other down, `news` what became known of each running job, in their order. Of `ended` jobs, which are not in
    /// the view any more, the world knows the length from now on.
    pub(crate) fn step(
        &mut self,
        view: &View,
        disturbance: f64,
        news: impl Iterator<Item = Observation>,
        ended: &[EndedJob],
    ) {
        let running = || view.jobs.iter().filter_map(|j| Some((j, view.node(j.node()?))));
        let news: Vec<Observation> = news.collect();
        let work = |node: &NodeView, news: &Observation| {
            let done = news.done * node.cores * node.speed;
            Some(TeamWork { team: news.team?, done, cores: news.cores, speed: node.speed })
        };
        let with_teams = running().zip(&news).filter_map(|((job, node), news)| Some((job.id, work(node?, news)?)));
        let with_teams: BTreeMap<JobId, TeamWork> = with_teams.collect();
        let done = |((job, node), news): ((&JobView, Option<&NodeView>), &Observation)| {
            node.filter(|_| news.had_enough).map(|node| (job.id, news.done * node.cores * node.speed))
        };
        let enough: BTreeMap<JobId, f64> = running().zip(&news).filter_map(done).collect();
        self.advance(view, &with_teams, &enough);
        self.disturbance = disturbance;
        for EndedJob { id, node, done } in ended {
            let Some((job, node)) = self.jobs.get_mut(id).zip(view.node(*node)) else { continue };
            job.done += done * node.cores * node.speed;
            job.total = Some(job.done);
        }
        for ((job, node), Observation { done, prediction, team, .. }) in running().zip(news) {
            let Some(node) = node else { continue };
            let speed = node.cores * node.speed;
            let known = self.jobs.entry(job.id).or_insert_with(|| PlacedJob {
                home: self.homes.remove(&job.id).filter(|h| view.node(*h).is_some()).unwrap_or(node.id),
                owner: job.owner,
                since: view.now,
                done: 0.0,
                given: 0.0,
                total: None,
                cores: f64::INFINITY,
                team: None,
                ends: None,
            });
            if view.node(known.home).is_none() {
                known.home = node.id;
            }
            known.done += done * speed;
            known.total = prediction.map(|p| known.done + p.left_s * speed);
            known.team = team;
            known.cores = prediction.filter(|p| p.usable < 1.0).map_or(f64::INFINITY, |p| p.usable * node.cores);
        }
        self.homes.retain(|id, _| view.job(*id).is_some());
        // A finished job stays in the fair-share simulation until it would have finished there as
        // well, because it would still slow its neighbours. Jobs that finished before there was a
        // prediction are dropped.
        self.jobs.retain(|id, j| {
            view.job(*id).is_some_and(|v| v.node().is_some())
                || (j.total.is_some() && !j.has_ended() && view.node(j.home).is_some())
        });
        let ends = self.machines(view, None);
        for (job, fate) in self.jobs.values_mut().zip(ends) {
            // The moment at which it ended there stays, so that it is known how late the real job is.
            if job.has_ended() && job.ends.is_some_and(|ends| ends <= view.now) {
                continue;
            }
            job.ends = fate.ends_s.is_finite().then(|| view.now + Span::from_secs_f64(fate.ends_s));
        }
    }

    /// Gives every job what its machine gives it until now. `real` is what jobs with teams really did meanwhile,
    /// `enough` what jobs did on a GPU that had an equal share or more.
    fn advance(&mut self, view: &View, real: &BTreeMap<JobId, TeamWork>, enough: &BTreeMap<JobId, f64>) {
        let elapsed_s = if self.at == Time::ZERO { 0.0 } else { view.now.since(self.at).as_secs_f64() };
        self.at = view.now;
        // A job shows its team only after its first moments, in which it could not use more than one core either.
        for (id, real) in real {
            if let Some(job) = self.jobs.get_mut(id) {
                job.team.get_or_insert(real.team);
            }
        }
        if elapsed_s > 0.0 {
            let served = self.machines(view, Some(elapsed_s));
            for ((id, job), fate) in self.jobs.iter_mut().zip(served) {
                let scale = job.team.zip(real.get(id)).map_or(1.0, |(team, real)| real.scale(&team, elapsed_s));
                let served = scale * fate.served_core_s;
                job.given += enough.get(id).map_or(served, |done| served.min(*done));
            }
        }
    }

    /// Runs the machine of every node and owner, to the end or for `until_s` seconds: what becomes of
    /// each job, in their order.
    fn machines(&self, view: &View, until_s: Option<f64>) -> Vec<TaskResult> {
        let mut parts: BTreeMap<(NodeId, OwnerId), Part<'_>> = BTreeMap::new();
        let mut results = vec![TaskResult { ends_s: f64::INFINITY, served_core_s: 0.0 }; self.jobs.len()];
        for (place, job) in self.jobs.values().enumerate() {
            let part = parts.entry((job.home, job.owner)).or_default();
            part.places.push(place);
            part.jobs.push(job);
        }
        let mut owners: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (home, _) in parts.keys() {
            *owners.entry(*home).or_default() += 1;
        }
        for ((home, _), Part { places, jobs }) in parts {
            let Some(node) = view.node(home) else { continue };
            let cores = node.cores / owners[&home] as f64;
            let run = if jobs.iter().any(|job| job.team.is_some()) {
                let kept = until_s.map(|_| teams::kept_cores(cores / jobs.len() as f64));
                let tasks: Vec<TeamTask> = jobs.iter().map(|job| job.team_task(node, kept)).collect();
                // What jobs really did until now contains how much they slowed each other down.
                let disturbance = if until_s.is_some() { 0.0 } else { self.disturbance };
                let mut run = teams::run(&tasks, cores, disturbance, until_s);
                for fate in &mut run {
                    fate.served_core_s *= node.speed;
                }
                run
            } else {
                let tasks: Vec<Task> = jobs.iter().map(|job| job.task(node)).collect();
                machine::run(&tasks, cores * node.speed, self.disturbance, until_s)
            };
            for (place, fate) in places.into_iter().zip(run) {
                results[place] = fate;
            }
        }
        results
    }
}

/// What a job with a team really did since the last step.
struct TeamWork {
    team: TeamUse,
    done: f64,
    /// The cores that it had, and their speed.
    cores: f64,
    speed: f64,
}

/// A job that seems this many times as fast as the law shows an error of the counters.
const FASTEST: f64 = 2.0;

impl TeamWork {
    /// What the job did, as a part of what the law expects of it with the cores that it had. Less than half a core
    /// shows nothing.
    fn scale(&self, team: &TeamUse, elapsed_s: f64) -> f64 {
        let expected = self.speed * elapsed_s * team.speed(self.cores);
        if self.cores < 0.5 || expected <= 0.0 { 1.0 } else { (self.done / expected).clamp(0.0, FASTEST) }
    }
}

/// The jobs of one owner on one node.
#[derive(Default)]
struct Part<'a> {
    /// The places of these jobs among all jobs.
    places: Vec<usize>,
    jobs: Vec<&'a PlacedJob>,
}

impl PlacedJob {
    /// Whether the fair world has given it all its work.
    fn has_ended(&self) -> bool {
        self.total.is_some_and(|t| t - self.given <= 1e-9 * t)
    }

    /// Work that the fair world has still to give; infinite if it is not known.
    fn left(&self) -> f64 {
        self.total.map_or(f64::INFINITY, |t| (t - self.given).max(0.0))
    }

    /// The job on a machine that is shared by teams. A job that works on one core (it imports its libraries) has `kept`
    /// cores now and leaves the others to its neighbours. How long it will do so is not known. For the future (`None`)
    /// it counts with an equal part of the cores, but no end is promised to it that it could not reach with one core.
    fn team_task(&self, node: &NodeView, kept: Option<f64>) -> TeamTask {
        let most = match (self.team, kept) {
            (Some(TeamUse { on_one_core: true, .. }), Some(kept)) => kept,
            (Some(_), _) => f64::INFINITY,
            (None, _) => self.cores,
        };
        TeamTask { left_core_s: self.left() / node.speed, most: most.min(node.cores), team: self.team }
    }

    fn task(&self, node: &NodeView) -> Task {
        Task { left_core_s: self.left(), rate: (self.cores.min(node.cores) * node.speed).max(f64::MIN_POSITIVE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, running};

    /// One node with one core, on which the given jobs have started just now.
    fn one_core(jobs: u64) -> View {
        let node = NodeView { cores: 1.0, speed: 1.0, ..node(0) };
        View { now: Time::from_secs_f64(1.0), nodes: vec![node], jobs: (0..jobs).map(|id| running(id, 0)).collect() }
    }

    fn with_left(left_s: f64) -> Observation {
        let prediction = Some(Prediction { left_s, usable: 1.0 });
        Observation { done: 0.0, prediction, team: None, cores: 1.0, had_enough: false }
    }

    /// In how many seconds each job is to end.
    fn ends_s(world: &FairWorld, view: &View) -> Vec<f64> {
        let ends = |job: &JobView| world.ends(job.id).expect("its length is known").0.since(view.now).as_secs_f64();
        view.jobs.iter().map(ends).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        let is_close = |(f, e): (&f64, &f64)| (f - e).abs() < 1e-5;
        assert!(found.len() == expected.len() && found.iter().zip(expected).all(is_close), "{found:?}, {expected:?}");
    }

    #[test]
    fn a_job_that_has_ended_has_its_true_length() {
        let mut view = one_core(2);
        let mut world = FairWorld::default();
        world.step(&view, 0.0, [with_left(100.0), with_left(40.0)].into_iter(), &[]);
        assert_close(&ends_s(&world, &view), &[140.0, 80.0]);
        // The first ends after 20 s in which it had all of the node. In the fair world it has 10 s of that behind it
        // and ends 20 s from now; the other one has the node then.
        view.now = view.now + Span::from_secs(20);
        view.jobs.remove(0);
        let ended = EndedJob { id: JobId(0), node: NodeId(0), done: 20.0 };
        world.step(&view, 0.0, [with_left(40.0)].into_iter(), &[ended]);
        assert_close(&ends_s(&world, &view), &[40.0]);
    }
}
