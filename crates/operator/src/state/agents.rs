//! What the agents have said: who was heard of when, and where each job stands.
//!
//! Progress lives here and nowhere else: it is streamed to us and forgotten when a manager ends. `(epoch, seq)` orders what one agent says; an older
//! request that arrives late is not believed.

use crate::placement::clock::AgentClock;
use gainshare_kube_api::wire::{Beat, Category, JobState, SyncRequest};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// An agent that was silent for longer is not there, as far as conditions go. Its pods keep what they have.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(40);

/// A node that was silent for longer will not come back under this name, or as a new one.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);

#[derive(Debug, Default)]
pub(crate) struct Agents {
    nodes: HashMap<String, Agent>,
    jobs: HashMap<String, JobState>,
}

#[derive(Debug)]
struct Agent {
    epoch: u64,
    seq: u64,
    heard: Instant,
    clock: AgentClock,
    beat: Beat,
    /// Whether it has told its jobs in this epoch.
    told_jobs: bool,
    jobs: BTreeSet<String>,
    /// The newest plan that was carried out for each pod.
    generations: BTreeMap<String, u64>,
}

/// How a request stands to those before it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Heard {
    /// A newer one has come already: what this one says is old.
    pub(crate) stale: bool,
    /// Pods whose category, share or reason differ from before.
    pub(crate) changed: Vec<String>,
}

impl Agents {
    /// Takes in what an agent says, unless it is old.
    pub(crate) fn hear(&mut self, sync: &SyncRequest, now: Instant) -> Heard {
        let known = self.nodes.get(&sync.node);
        if known.is_some_and(|agent| (agent.epoch, agent.seq) >= (sync.epoch, sync.seq)) {
            return Heard { stale: true, changed: Vec::new() };
        }
        let new_epoch = known.is_none_or(|agent| agent.epoch != sync.epoch);
        let agent = self.nodes.entry(sync.node.clone()).or_insert_with(|| Agent {
            epoch: sync.epoch,
            seq: 0,
            heard: now,
            clock: AgentClock::of(sync.beat.at_us, now),
            beat: Beat::default(),
            told_jobs: false,
            jobs: BTreeSet::new(),
            generations: BTreeMap::new(),
        });
        if new_epoch {
            agent.told_jobs = false;
            agent.generations.clear();
            agent.clock = AgentClock::of(sync.beat.at_us, now);
        }
        agent.clock = agent.clock.quicker(AgentClock::of(sync.beat.at_us, now));
        (agent.epoch, agent.seq, agent.heard, agent.beat) = (sync.epoch, sync.seq, now, sync.beat);
        let mut changed = Vec::new();
        if let Some(jobs) = &sync.jobs {
            agent.told_jobs = true;
            let told: BTreeSet<String> = jobs.iter().map(|job| job.uid.clone()).collect();
            let ended: Vec<String> = agent.jobs.difference(&told).cloned().collect();
            agent.jobs = told;
            ended.iter().for_each(|uid| drop(self.jobs.remove(uid)));
            for job in jobs {
                let before = self.jobs.insert(job.uid.clone(), job.clone());
                let same =
                    |old: &JobState| old.category == job.category && old.share == job.share && old.reason == job.reason;
                if !before.as_ref().is_some_and(same) {
                    changed.push(job.uid.clone());
                }
            }
        }
        Heard { stale: false, changed }
    }

    /// Whether the node's agent should send its jobs.
    pub(crate) fn want_jobs(&self, node: &str) -> bool {
        self.nodes.get(node).is_none_or(|agent| !agent.told_jobs)
    }

    /// Whether a request is still the newest of its node: an older one need not wait any longer.
    pub(crate) fn is_newest(&self, sync: &SyncRequest) -> bool {
        self.nodes.get(&sync.node).is_some_and(|agent| (agent.epoch, agent.seq) == (sync.epoch, sync.seq))
    }

    /// Whether a plan of this generation may be carried out for the pod; the older ones may not.
    pub(crate) fn admit(&mut self, node: &str, epoch: u64, uid: &str, generation: u64) -> Result<(), String> {
        let Some(agent) = self.nodes.get_mut(node) else { return Err("the agent is not known".to_owned()) };
        if agent.epoch > epoch {
            return Err("a newer start of this agent has taken over".to_owned());
        }
        let newest = agent.generations.entry(uid.to_owned()).or_insert(generation);
        if generation < *newest {
            return Err(format!("plan {generation} is older than plan {newest}, which was carried out already"));
        }
        *newest = generation;
        Ok(())
    }

    pub(crate) fn job(&self, uid: &str) -> Option<&JobState> {
        self.jobs.get(uid)
    }

    pub(crate) fn clock(&self, node: &str) -> Option<AgentClock> {
        self.nodes.get(node).map(|agent| agent.clock)
    }

    pub(crate) fn is_heard(&self, node: &str, now: Instant) -> bool {
        self.nodes.get(node).is_some_and(|agent| now.saturating_duration_since(agent.heard) < SILENT_AFTER)
    }

    pub(crate) fn heard_count(&self, now: Instant) -> usize {
        self.nodes.keys().filter(|node| self.is_heard(node, now)).count()
    }

    /// Forgets nodes that have been silent for so long that they are gone, and their jobs.
    pub(crate) fn forget_silent(&mut self, now: Instant) {
        let gone: Vec<String> = self
            .nodes
            .iter()
            .filter(|(_, agent)| now.saturating_duration_since(agent.heard) > FORGOTTEN_AFTER)
            .map(|(node, _)| node.clone())
            .collect();
        for agent in gone.iter().filter_map(|node| self.nodes.remove(node)) {
            agent.jobs.iter().for_each(|uid| drop(self.jobs.remove(uid)));
        }
    }

    /// Jobs by category, as the agents that can be heard counted them.
    pub(crate) fn counts(&self, now: Instant) -> BTreeMap<Category, u32> {
        let mut counts = BTreeMap::new();
        let heard = self.nodes.iter().filter(|(node, _)| self.is_heard(node, now));
        for beat in heard.map(|(_, agent)| agent.beat) {
            *counts.entry(Category::Growing).or_default() += beat.growing;
            *counts.entry(Category::Watching).or_default() += beat.watching;
            *counts.entry(Category::Converged).or_default() += beat.converged;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sync(epoch: u64, seq: u64, jobs: Option<&[(&str, Category)]>) -> SyncRequest {
        let job = |(uid, category): &(&str, Category)| JobState {
            uid: (*uid).into(),
            container: "main".into(),
            category: *category,
            growth: None,
            progress: Default::default(),
            share: None,
            reason: String::new(),
            signal: None,
        };
        SyncRequest {
            node: "n".into(),
            epoch,
            seq,
            seen: 0,
            wait_ms: 0,
            beat: Beat::default(),
            jobs: jobs.map(|jobs| jobs.iter().map(job).collect()),
            resizes: Vec::new(),
        }
    }

    #[test]
    fn late_and_doubled_requests_are_not_believed() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        let growing = [("a", Category::Growing)];
        let converged = [("a", Category::Converged)];
        assert_eq!(agents.hear(&sync(1, 2, Some(&converged)), now).changed, ["a"]);
        assert!(agents.hear(&sync(1, 1, Some(&growing)), now).stale, "late");
        assert!(agents.hear(&sync(1, 2, Some(&growing)), now).stale, "doubled");
        assert_eq!(agents.job("a").unwrap().category, Category::Converged);
        assert!(!agents.hear(&sync(2, 1, None), now).stale, "a new start of the agent counts from one again");
        assert!(agents.hear(&sync(1, 9, Some(&growing)), now).stale, "the old start has nothing to say any more");
    }

    #[test]
    fn a_new_epoch_is_asked_for_its_jobs_and_ended_jobs_are_forgotten() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        assert!(agents.want_jobs("n"));
        agents.hear(&sync(1, 1, Some(&[("a", Category::Growing), ("b", Category::Growing)])), now);
        assert!(!agents.want_jobs("n"));
        agents.hear(&sync(1, 2, Some(&[("b", Category::Growing)])), now);
        assert!(agents.job("a").is_none() && agents.job("b").is_some());
        agents.hear(&sync(2, 1, None), now);
        assert!(agents.want_jobs("n"));
    }

    #[test]
    fn plans_never_go_backwards() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        agents.hear(&sync(5, 1, None), now);
        assert!(agents.admit("n", 5, "a", 3).is_ok());
        assert!(agents.admit("n", 5, "a", 3).is_ok(), "the same again is harmless");
        assert!(agents.admit("n", 5, "a", 2).is_err());
        assert!(agents.admit("n", 4, "a", 9).is_err(), "an older start of the agent");
        agents.hear(&sync(6, 1, None), now);
        assert!(agents.admit("n", 6, "a", 1).is_ok());
    }

    #[test]
    fn silence_is_noticed() {
        let (mut agents, now) = (Agents::default(), Instant::now());
        agents.hear(&sync(1, 1, None), now);
        assert!(agents.is_heard("n", now) && !agents.is_heard("n", now + SILENT_AFTER) && !agents.is_heard("m", now));
        agents.hear(&sync(1, 2, Some(&[("a", Category::Growing)])), now);
        agents.forget_silent(now + SILENT_AFTER);
        assert!(agents.job("a").is_some());
        agents.forget_silent(now + FORGOTTEN_AFTER * 2);
        assert!(agents.job("a").is_none() && agents.want_jobs("n"));
    }
}
