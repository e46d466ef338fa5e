//! The loop, without a clock: view in, plan out.
//!
//! A driver calls [`Control::step`] whenever something happened (a job came or went, a report arrived) and when [`Control::due`] is
//! reached. `step` answers with a plan if anything is due, and with nothing otherwise; calling it too often is harmless. All it
//! remembers between two calls is in one serialisable memory, so a view and a control written to a file reproduce the plan.

use crate::decide::relocate::{self, specon};
use crate::decide::share::{self, Bounds, Opinion, flowcon, gain, rank, weigh};
use crate::decide::{order, place};
use crate::model::{JobId, NodeId, OwnerId, PerResource, Span, Time};
use crate::plan::{Plan, Reason, Standing, Start, Target, Verdict};
use crate::policy::{MoveRule, Policy, ShareRule};
use crate::signal::Category;
use crate::view::{JobView, Phase, View};
use serde::{Deserialize, Serialize};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// The decisions of one policy, and what they remember.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Control {
    policy: Policy,
    generation: u64,
    waiting: BTreeSet<JobId>,
    nodes: BTreeMap<NodeId, BTreeMap<OwnerId, Group>>,
    standing: BTreeMap<JobId, Decided>,
    #[serde(default)]
    specon: specon::Memory,
    #[serde(default)]
    gain: gain::Memory,
}

/// The jobs of one owner on one node: the unit within which shares move.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct Group {
    members: BTreeSet<JobId>,
    reports: u64,
    due: Option<Time>,
    flowcon: flowcon::Memory,
}

/// The decision in force for a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Decided {
    target: Target,
    growth: PerResource<Option<f64>>,
    category: Category,
    reason: Reason,
}

/// The running jobs of a view, by node and owner.
type Grouped<'a> = BTreeMap<NodeId, BTreeMap<OwnerId, Vec<&'a JobView>>>;

impl Control {
    pub fn new(policy: Policy) -> Control {
        Control {
            policy,
            generation: 0,
            waiting: BTreeSet::new(),
            nodes: BTreeMap::new(),
            standing: BTreeMap::new(),
            specon: specon::Memory::default(),
            gain: gain::Memory::default(),
        }
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Plans are numbered from here on: a driver that restarts says where it left off.
    pub fn continue_from(&mut self, generation: u64) {
        self.generation = self.generation.max(generation);
    }

    /// What saving, stopping and restoring a job was measured to cost: moves by gain must be worth it.
    pub fn set_moving_cost(&mut self, cost: Span) {
        if let MoveRule::Gain(rule) = &mut self.policy.moves {
            rule.cost = cost;
        }
    }

    /// The most of its node that a job can use, where shares by gain have shown it.
    pub fn most(&self, job: JobId) -> Option<f64> {
        self.gain.most(job)
    }

    /// Decides if anything is due in this view: a job came or went, an interval is over, a report arrived where reports count.
    pub fn step(&mut self, view: &View) -> Option<Plan> {
        let grouped = group(view);
        self.is_due(view, &grouped).then(|| self.decide(view, &grouped))
    }

    /// When `step` should be called again, if nothing happens before.
    pub fn due(&self) -> Option<Time> {
        let shares = self.nodes.values().flat_map(|owners| owners.values()).filter_map(|g| g.due);
        let moves = if self.standing.is_empty() { None } else { self.specon.due };
        shares.chain(moves).min()
    }

    fn is_due(&self, view: &View, grouped: &Grouped) -> bool {
        if matches!(self.policy.moves, MoveRule::Specon(_)) && specon::due(&self.specon, view) {
            return true;
        }
        let waiting = view.jobs.iter().filter(|j| j.phase == Phase::Waiting).map(|j| j.id);
        if !waiting.eq(self.waiting.iter().copied()) {
            return true;
        }
        let known = self.nodes.iter().map(|(node, owners)| (node, owners.keys()));
        let seen = grouped.iter().map(|(node, owners)| (node, owners.keys()));
        if !known.clone().map(|(n, o)| (n, o.len())).eq(seen.map(|(n, o)| (n, o.len()))) {
            return true;
        }
        grouped.iter().any(|(node, owners)| {
            owners.iter().any(|(owner, jobs)| {
                let group = self.nodes.get(node).and_then(|o| o.get(owner));
                group.is_none_or(|g| g.wants(&self.policy, view.now, jobs))
            })
        })
    }

    fn decide(&mut self, view: &View, grouped: &Grouped) -> Plan {
        self.generation += 1;
        let mut plan = Plan { generation: self.generation, at: view.now, ..Plan::default() };
        if let ShareRule::Gain(rule) = &self.policy.share {
            gain::observe(rule, view, &mut self.gain);
        }
        self.start_waiting(view, &mut plan);
        self.nodes.retain(|node, _| grouped.contains_key(node));
        self.standing.retain(|id, _| view.job(*id).is_some_and(|j| j.node().is_some()));
        for (node, owners) in grouped {
            let groups = self.nodes.entry(*node).or_default();
            // When an owner comes or goes, every owner's part of the node changes.
            let regrouped = !groups.keys().eq(owners.keys());
            groups.retain(|owner, _| owners.contains_key(owner));
            let part = 1.0 / owners.len() as f64;
            for (owner, jobs) in owners {
                let group = groups.entry(*owner).or_default();
                if regrouped || group.wants(&self.policy, view.now, jobs) {
                    let memory = &mut self.gain;
                    share_out(&self.policy, jobs, part, memory, group, &mut self.standing, &mut plan);
                } else {
                    for job in jobs {
                        plan.verdicts.insert(job.id, self.standing[&job.id].verdict(Standing::NotDue));
                    }
                }
            }
        }
        self.relocate(view, &mut plan);
        plan.next_due = self.due();
        plan
    }

    /// Asks `move` for the running jobs.
    fn relocate(&mut self, view: &View, plan: &mut Plan) {
        match self.policy.moves {
            MoveRule::Stay => {}
            MoveRule::Specon(rule) => {
                if specon::due(&self.specon, view) {
                    plan.moves = specon::run(&rule, view, &mut self.specon);
                }
                for (id, verdict) in &mut plan.verdicts {
                    verdict.category = specon::category(&self.specon, *id).unwrap_or(verdict.category);
                }
            }
            MoveRule::Gain(rule) => {
                // An empty node that a waiting job is about to get is not empty.
                if plan.starts.is_empty() && view.nodes.len() > 1 {
                    plan.moves = relocate::gain::run(&rule, view, |id| self.gain.stake(id));
                }
            }
        }
        for m in &plan.moves {
            let verdict = plan.verdicts.get_mut(&m.job).expect("every running job has a verdict by now");
            (verdict.reason, verdict.standing) = (Reason::Moves { to: m.to, because: m.why }, Standing::New);
        }
    }

    /// Asks `order` and `place` for the waiting jobs.
    fn start_waiting(&mut self, view: &View, plan: &mut Plan) {
        let (ready, blocked) = order::queue(view);
        let category = |id: JobId| self.standing.get(&id).map_or(Category::Growing, |d| d.category);
        let mut room = place::Room::new(view, self.policy.place, category);
        let counts = self.gain.fair().counts();
        let mut fair_room = place::Room::with(view, self.policy.place, &counts);
        let mut ahead = 0;
        self.waiting.clear();
        for job in &ready {
            let node = if matches!(self.policy.share, ShareRule::Gain(_)) {
                let home = fair_room.choose(job.id);
                let node = home.and_then(|h| room.welcome(h)).or_else(|| room.choose(job.id));
                if let Some(home) = home.or(node).filter(|_| node.is_some()) {
                    self.gain.fair().settle(job.id, home);
                }
                node
            } else {
                room.choose(job.id)
            };
            let reason = match node {
                Some(node) => {
                    plan.starts.push(Start { job: job.id, node });
                    Reason::Started { node }
                }
                None => {
                    ahead += 1;
                    Reason::WaitsForSlot { ahead: ahead - 1 }
                }
            };
            plan.verdicts.insert(job.id, waiting_verdict(reason));
        }
        for (job, other) in blocked {
            plan.verdicts.insert(job.id, waiting_verdict(Reason::WaitsForJob { job: other }));
        }
        self.waiting.extend(ready.iter().map(|j| j.id));
        self.waiting.extend(view.jobs.iter().filter(|j| j.phase == Phase::Waiting).map(|j| j.id));
    }
}

fn waiting_verdict(reason: Reason) -> Verdict {
    Verdict {
        target: None,
        growth: PerResource::default(),
        category: Category::Growing,
        reason,
        standing: Standing::New,
    }
}

fn group(view: &View) -> Grouped<'_> {
    let mut grouped = Grouped::new();
    for job in &view.jobs {
        if let Some(node) = job.node() {
            grouped.entry(node).or_default().entry(job.owner).or_default().push(job);
        }
    }
    grouped
}

/// How many reports the jobs of a group have made in all: when it changed, somebody had something new to say.
fn reports(jobs: &[&JobView]) -> u64 {
    jobs.iter().map(|j| j.signal.reports).sum()
}

impl Group {
    fn changed(&self, jobs: &[&JobView]) -> bool {
        !self.members.iter().copied().eq(jobs.iter().map(|j| j.id))
    }

    fn wants(&self, policy: &Policy, now: Time, jobs: &[&JobView]) -> bool {
        self.changed(jobs)
            || self.due.is_some_and(|due| now >= due)
            || (policy.react_to_reports && self.reports != reports(jobs))
    }
}

impl Decided {
    fn verdict(&self, standing: Standing) -> Verdict {
        Verdict {
            target: Some(self.target),
            growth: self.growth,
            category: self.category,
            reason: self.reason,
            standing,
        }
    }
}

/// Asks `share` for one group and enters its verdicts into the plan.
fn share_out(
    policy: &Policy,
    jobs: &[&JobView],
    part: f64,
    memory: &mut gain::Memory,
    group: &mut Group,
    standing: &mut BTreeMap<JobId, Decided>,
    plan: &mut Plan,
) {
    let now = plan.at;
    let changed = group.changed(jobs);
    let (opinions, wait): (Vec<Opinion>, Option<Span>) = match &policy.share {
        ShareRule::Fair => (vec![Opinion::fair(jobs.len()); jobs.len()], None),
        ShareRule::Flowcon(rule) => {
            let (opinions, wait) = flowcon::run(rule, policy, now, jobs, changed, &mut group.flowcon);
            (opinions, Some(wait))
        }
        ShareRule::Rank(by) => rank::run(by, jobs),
        ShareRule::Weigh { by } => weigh::run(*by, now, jobs),
        ShareRule::Gain(rule) => {
            let (opinions, wait) = gain::run(rule, policy, now, jobs, part, memory);
            (opinions, Some(wait))
        }
    };
    if changed {
        group.members = jobs.iter().map(|j| j.id).collect();
    }
    group.reports = reports(jobs);
    group.due = wait.map(|w| now + w);

    let limits: Vec<_> = opinions.iter().map(|o| o.limit).collect();
    let bounds: Vec<_> = jobs.iter().map(|j| Bounds { floor: j.floor, max: j.max }).collect();
    let targets = share::targets(&limits, &bounds, part);
    // The deadband is judged for the group as a whole: holding one job back while its neighbours change could promise more than
    // the node has.
    let held = jobs
        .iter()
        .zip(&targets)
        .all(|(j, t)| standing.get(&j.id).is_some_and(|d| d.target.distance(t) <= policy.deadband));
    for ((job, opinion), target) in jobs.iter().zip(opinions).zip(targets) {
        let mut decided =
            Decided { target, growth: opinion.growth, category: opinion.category, reason: opinion.reason };
        match standing.entry(job.id) {
            Entry::Occupied(mut before) => {
                if held {
                    decided.target = before.get().target;
                }
                before.insert(decided.clone());
            }
            Entry::Vacant(none) => {
                none.insert(decided.clone());
            }
        }
        let verdict = decided.verdict(if held { Standing::InsideDeadband } else { Standing::New });
        plan.verdicts.insert(job.id, verdict);
    }
}
