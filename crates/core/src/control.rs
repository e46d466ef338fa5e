//! The loop, without a clock: view in, plan out.
//!
//! Drivers use it through [`crate::decider::Decider`], which checks every plan. [`Control::step`] is called whenever something happened
//! (a job came or went, a report arrived) and when [`Control::due`] is reached. It answers with a plan if anything is due, and with nothing
//! otherwise. All that control remembers between two steps is in one serialisable [`Memory`], so a view, a policy and a memory written to a
//! file reproduce the plan.

use crate::decide::relocate::{self, specon};
use crate::decide::share::{self, Bounds, Opinion, flowcon, gain, rank, weigh};
use crate::decide::{order, place};
use crate::model::{JobId, NodeId, OwnerId, PerResource, Resource, Span, Time};
use crate::plan::{Plan, Reason, Standing, Start, StartReason, Target, Verdict};
use crate::policy::{MoveRule, PlaceRule, Policy, ShareRule};
use crate::signal::Category;
use crate::view::{JobView, Phase, View};
use serde::{Deserialize, Serialize};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// The decisions of one policy, and what they remember.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Control {
    policy: Policy,
    memory: Memory,
}

/// What a policy remembers between two steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Memory {
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
    pub(crate) fn new(policy: Policy) -> Control {
        Control { policy, memory: Memory::default() }
    }

    /// Goes on with what a control of the same policy remembered.
    pub(crate) fn resume(policy: Policy, memory: Memory) -> Control {
        Control { policy, memory }
    }

    pub(crate) fn into_parts(self) -> (Policy, Memory) {
        (self.policy, self.memory)
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.policy
    }

    pub(crate) fn continue_from(&mut self, generation: u64) {
        self.memory.generation = self.memory.generation.max(generation);
    }

    pub(crate) fn set_moving_cost(&mut self, cost: Span) {
        if let MoveRule::Gain(rule) = &mut self.policy.moves {
            rule.cost = cost;
        }
    }

    pub(crate) fn usable(&self, job: JobId) -> Option<f64> {
        self.memory.gain.most(job)
    }

    /// Decides if anything is due in this view. `before` is called first, while all that the plan depends on is still there.
    pub(crate) fn step(&mut self, view: &View, before: impl FnOnce(&Control)) -> Option<Plan> {
        let grouped = group(view);
        if !self.is_due(view, &grouped) {
            return None;
        }
        before(self);
        Some(self.decide(view, &grouped))
    }

    /// When `step` should be called again, if nothing happens before.
    pub(crate) fn due(&self) -> Option<Time> {
        let shares = self.memory.nodes.values().flat_map(|owners| owners.values()).filter_map(|g| g.due);
        let moves = if self.memory.standing.is_empty() { None } else { self.memory.specon.due };
        shares.chain(moves).min()
    }

    fn is_due(&self, view: &View, grouped: &Grouped) -> bool {
        if matches!(self.policy.moves, MoveRule::Specon(_)) && specon::due(&self.memory.specon, view) {
            return true;
        }
        let waiting = view.jobs.iter().filter(|j| j.phase == Phase::Waiting).map(|j| j.id);
        if !waiting.eq(self.memory.waiting.iter().copied()) {
            return true;
        }
        let known = self.memory.nodes.iter().map(|(node, owners)| (node, owners.keys()));
        let seen = grouped.iter().map(|(node, owners)| (node, owners.keys()));
        if !known.clone().map(|(n, o)| (n, o.len())).eq(seen.map(|(n, o)| (n, o.len()))) {
            return true;
        }
        grouped.iter().any(|(node, owners)| {
            owners.iter().any(|(owner, jobs)| {
                let group = self.memory.nodes.get(node).and_then(|o| o.get(owner));
                group.is_none_or(|g| g.wants(&self.policy, view.now, jobs))
            })
        })
    }

    fn decide(&mut self, view: &View, grouped: &Grouped) -> Plan {
        self.memory.generation += 1;
        let mut plan = Plan { generation: self.memory.generation, at: view.now, ..Plan::default() };
        if let ShareRule::Gain(rule) = &self.policy.share {
            gain::observe(rule, view, &mut self.memory.gain);
        }
        self.start_waiting(view, &mut plan);
        self.memory.nodes.retain(|node, _| grouped.contains_key(node));
        self.memory.standing.retain(|id, _| view.job(*id).is_some_and(|j| j.node().is_some()));
        for (node, owners) in grouped {
            let groups = self.memory.nodes.entry(*node).or_default();
            // When an owner comes or goes, every owner's part of the node changes.
            let regrouped = !groups.keys().eq(owners.keys());
            groups.retain(|owner, _| owners.contains_key(owner));
            let part = 1.0 / owners.len() as f64;
            for (owner, jobs) in owners {
                let group = groups.entry(*owner).or_default();
                if regrouped || group.wants(&self.policy, view.now, jobs) {
                    let memory = &mut self.memory.gain;
                    let standing = &mut self.memory.standing;
                    share_out(&self.policy, jobs, part, memory, group, standing, &mut plan);
                } else {
                    for job in jobs {
                        plan.verdicts.insert(job.id, self.memory.standing[&job.id].verdict(Standing::NotDue));
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
                if specon::due(&self.memory.specon, view) {
                    plan.moves = specon::run(&rule, view, &mut self.memory.specon);
                }
                for (id, verdict) in &mut plan.verdicts {
                    verdict.category = specon::category(&self.memory.specon, *id).unwrap_or(verdict.category);
                }
            }
            MoveRule::Gain(rule) => {
                // An empty node that a waiting job is about to get is not empty.
                if plan.starts.is_empty() && view.nodes.len() > 1 {
                    plan.moves = relocate::gain::run(&rule, view, |id| self.memory.gain.stake(id));
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
        let category = |id: JobId| self.memory.standing.get(&id).map_or(Category::Growing, |d| d.category);
        let mut room = place::Room::new(view, self.policy.place, category);
        let counts = self.memory.gain.fair().counts();
        let mut fair_room = place::Room::with(view, self.policy.place, &counts);
        let mut ahead = 0;
        self.memory.waiting.clear();
        let why = match (&self.policy.share, self.policy.place) {
            (ShareRule::Gain(_), _) => StartReason::HomeOrEmpty,
            (_, PlaceRule::Spread) => StartReason::FewestJobs,
            (_, PlaceRule::Kubernetes { .. }) => StartReason::BestScore,
            (_, PlaceRule::Growth) => StartReason::MostGrowth,
        };
        for job in &ready {
            let node = if matches!(self.policy.share, ShareRule::Gain(_)) {
                let home = fair_room.choose(job.id);
                let node = home.and_then(|h| room.welcome(h)).or_else(|| room.choose(job.id));
                if let Some(home) = home.or(node).filter(|_| node.is_some()) {
                    self.memory.gain.fair().settle(job.id, home);
                }
                node
            } else {
                room.choose(job.id)
            };
            let reason = match node {
                Some(node) => {
                    plan.starts.push(Start { job: job.id, node, why });
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
        self.memory.waiting.extend(ready.iter().map(|j| j.id));
        self.memory.waiting.extend(view.jobs.iter().filter(|j| j.phase == Phase::Waiting).map(|j| j.id));
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

/// Whether the targets in force may stay: each is close to its new one and within its bounds, and together they do not exceed `part`. Many
/// jobs that each keep a little too much would else keep a newcomer's or another owner's part.
fn may_stay(before: &[Target], new: &[Target], bounds: &[Bounds], part: f64, deadband: f64) -> bool {
    const ROUNDING: f64 = 1e-9;
    let mut pairs = before.iter().zip(new).zip(bounds);
    let is_close = pairs.all(|((old, new), bounds)| {
        let (limit, share, floor) = (old.limit.cpu.get(), old.share.cpu.get(), bounds.floor.get());
        old.distance(new) <= deadband
            && limit <= bounds.max.get() + ROUNDING
            && limit + ROUNDING >= floor.min(new.limit.cpu.get())
            && share + ROUNDING >= floor.min(new.share.cpu.get())
    });
    let fits = |r: Resource| before.iter().map(|t| t.share.get(r).get()).sum::<f64>() <= part + ROUNDING;
    is_close && Resource::ALL.into_iter().all(fits)
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
    let before: Option<Vec<Target>> = jobs.iter().map(|j| standing.get(&j.id).map(|d| d.target)).collect();
    let held = before.is_some_and(|before| may_stay(&before, &targets, &bounds, part, policy.deadband));
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
