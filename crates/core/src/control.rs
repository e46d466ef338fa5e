//! The loop, without a clock: view in, plan out.
//!
//! Drivers use it through [`crate::decider::Decider`], which checks every plan. [`Control::step`]
//! is called whenever something happened (a job came or went, a report arrived) and when
//! [`Control::due`] is reached. It answers with a plan if anything is due, and with nothing
//! otherwise. All that control remembers between two steps is in one serialisable [`Memory`], so a
//! view, a policy and a memory written to a file reproduce the plan.

use crate::deal::{self, Bounds};
use crate::model::{JobId, NodeId, OwnerId, PerResource, Resource, Share, Span, Time};
use crate::plan::{Plan, Reason, Standing, Start, Target, Verdict};
use crate::policies::{self, Claim, Opinion, Placer, Reservations, RuleMemory, Rules, Shares};
use crate::policy::Policy;
use crate::signal::Category;
use crate::view::{JobView, Marks, Phase, View};
use serde::{Deserialize, Serialize};
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
    standing: BTreeMap<JobId, StandingDecision>,
    /// When to decide again, if nothing happens before.
    #[serde(default)]
    due: Option<Time>,
    rules: RuleMemory,
}

/// The jobs of one owner on one node: the unit within which shares move.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct Group {
    members: BTreeSet<JobId>,
    reports: u64,
    due: Option<Time>,
}

/// The decision in force for a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct StandingDecision {
    target: Target,
    growth: PerResource<Option<f64>>,
    category: Category,
    reason: Reason,
    #[serde(default = "no_promise")]
    least: Share,
}

fn no_promise() -> Share {
    Share::ZERO
}

/// The running jobs of a view, by node and owner.
type JobGroups<'a> = BTreeMap<NodeId, BTreeMap<OwnerId, Vec<&'a JobView>>>;

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
        self.policy.moves.set_cost(cost);
    }

    pub(crate) fn usable(&self, job: JobId) -> Option<f64> {
        self.memory.rules.usable(job)
    }

    pub(crate) fn needs_node(&self, job: JobId) -> bool {
        self.memory.rules.needs_node(job)
    }

    pub(crate) fn marks(&self, job: JobId) -> Marks {
        self.memory.rules.marks(job)
    }

    pub(crate) fn target(&self, job: JobId) -> Option<Target> {
        self.memory.standing.get(&job).map(|d| d.target)
    }

    /// Decides if anything is due in this view. `before` is called first, while all that the plan
    /// depends on is still there.
    pub(crate) fn step(&mut self, view: &View, before: impl FnOnce(&Control)) -> Option<Plan> {
        let grouped = group(view);
        let must_move = self.memory.rules.bind(&self.policy).relocate.is_due(view);
        if !must_move && !self.is_due(view, &grouped) {
            return None;
        }
        before(self);
        Some(self.decide(view, &grouped))
    }

    /// When `step` should be called again, if nothing happens before.
    pub(crate) fn due(&self) -> Option<Time> {
        self.memory.due
    }

    fn is_due(&self, view: &View, grouped: &JobGroups) -> bool {
        if self.memory.rules.tasks().is_due(view) {
            return true;
        }
        let waiting = view.jobs.iter().filter(|j| j.phase == Phase::Waiting).map(|j| j.id);
        if !waiting.eq(self.memory.waiting.iter().copied()) {
            return true;
        }
        let known = self.memory.nodes.iter().map(|(node, owners)| (node, owners.len()));
        if !known.eq(grouped.iter().map(|(node, owners)| (node, owners.len()))) {
            return true;
        }
        grouped.iter().any(|(node, owners)| {
            owners.iter().any(|(owner, jobs)| {
                let group = self.memory.nodes.get(node).and_then(|o| o.get(owner));
                group.is_none_or(|g| g.is_due(&self.policy, view.now, jobs))
            })
        })
    }

    fn decide(&mut self, view: &View, grouped: &JobGroups) -> Plan {
        let Control { policy, memory } = self;
        let Memory { generation, waiting, nodes, standing, due, rules } = memory;
        let mut rules = rules.bind(policy);
        *generation += 1;
        let mut plan = Plan { generation: *generation, at: view.now, ..Plan::default() };
        rules.scale.observe(view);
        rules.share.observe(view);
        start_waiting(view, &mut rules, standing, waiting, &mut plan);
        nodes.retain(|node, _| grouped.contains_key(node));
        standing.retain(|id, _| view.job(*id).is_some_and(|j| j.node().is_some()));
        for (node, owners) in grouped {
            let groups = nodes.entry(*node).or_default();
            // When an owner comes or goes, every owner's part of the node changes.
            let regrouped = !groups.keys().eq(owners.keys());
            groups.retain(|owner, _| owners.contains_key(owner));
            let part = 1.0 / owners.len() as f64;
            for (owner, jobs) in owners {
                let group = groups.entry(*owner).or_default();
                if regrouped || group.is_due(policy, view.now, jobs) {
                    share_out(policy, &mut rules, jobs, part, group, standing, &mut plan);
                } else {
                    for job in jobs {
                        plan.verdicts.insert(job.id, standing[&job.id].verdict(Standing::NotDue));
                    }
                }
            }
        }
        decide_tasks(view, &mut rules, &mut plan);
        relocate(view, &mut rules, &mut plan);
        let tasks_due = rules.tasks.memory.due();
        let moves_due = if standing.is_empty() { None } else { rules.relocate.due() };
        *due = nodes
            .values()
            .flat_map(|owners| owners.values())
            .filter_map(|g| g.due)
            .chain(moves_due)
            .chain(tasks_due)
            .min();
        plan.next_due = *due;
        plan
    }
}

/// Asks `place` and `scale` for jobs of several tasks.
fn decide_tasks(view: &View, rules: &mut Rules<'_>, plan: &mut Plan) {
    let decision = rules.tasks.decide(view);
    for (id, reason) in decision.reasons {
        plan.verdicts.insert(id, waiting_verdict(reason));
    }
    plan.tasks = decision.plans;
}

/// Asks `move` for the running jobs.
fn relocate(view: &View, rules: &mut Rules<'_>, plan: &mut Plan) {
    plan.moves = rules.relocate.moves(view, plan, &*rules.share);
    for (id, verdict) in &mut plan.verdicts {
        verdict.category = rules.relocate.category(*id).unwrap_or(verdict.category);
    }
    for m in &plan.moves {
        let verdict = plan.verdicts.get_mut(&m.job).expect("every running job has a verdict by now");
        (verdict.reason, verdict.standing) = (Reason::Moves { to: m.to, because: m.why }, Standing::New);
    }
}

/// Asks `order` and `place` for the waiting jobs, and notes which jobs wait.
fn start_waiting(
    view: &View,
    rules: &mut Rules<'_>,
    standing: &BTreeMap<JobId, StandingDecision>,
    waiting: &mut BTreeSet<JobId>,
    plan: &mut Plan,
) {
    let mut queue = rules.order.queue(view);
    // Jobs of several tasks are placed task by task.
    queue.ready.retain(|job| job.tasks.is_none());
    queue.too_large.retain(|job| job.tasks.is_none());
    queue.blocked.retain(|(job, _)| job.tasks.is_none());
    let known = |id: JobId| standing.get(&id).map_or((Category::Growing, None), |d| (d.category, d.growth.cpu));
    let mut placer = Placer::new(view, &*rules.place, known, rules.share.homes());
    let why = placer.reason();
    let mut ahead = 0;
    for job in &queue.ready {
        let reason = match placer.place(job.id) {
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
    for job in queue.too_large {
        plan.verdicts.insert(job.id, waiting_verdict(Reason::WaitsForRoom { request: job.floor }));
    }
    for (job, other) in queue.blocked {
        plan.verdicts.insert(job.id, waiting_verdict(Reason::WaitsForJob { job: other }));
    }
    waiting.clear();
    waiting.extend(view.jobs.iter().filter(|j| j.phase == Phase::Waiting).map(|j| j.id));
}

/// A verdict without a target of its own: the job waits, or its tasks have targets.
fn waiting_verdict(reason: Reason) -> Verdict {
    Verdict {
        target: None,
        growth: PerResource::default(),
        category: Category::Growing,
        reason,
        standing: Standing::New,
        least: Share::ZERO,
    }
}

fn group(view: &View) -> JobGroups<'_> {
    let mut grouped = JobGroups::new();
    for job in view.jobs.iter().filter(|job| job.tasks.is_none()) {
        if let Some(node) = job.node() {
            grouped.entry(node).or_default().entry(job.owner).or_default().push(job);
        }
    }
    grouped
}

/// How many reports the jobs of a group have made in all: when the number changed, a job has
/// reported. The numbers come from other machines, so the sum may not overflow.
fn reports(jobs: &[&JobView]) -> u64 {
    jobs.iter().fold(0, |sum: u64, job| sum.saturating_add(job.signal.reports))
}

impl Group {
    fn changed(&self, jobs: &[&JobView]) -> bool {
        !self.members.iter().copied().eq(jobs.iter().map(|j| j.id))
    }

    fn is_due(&self, policy: &Policy, now: Time, jobs: &[&JobView]) -> bool {
        self.changed(jobs)
            || self.due.is_some_and(|due| now >= due)
            || (policy.react_to_reports && self.reports != reports(jobs))
    }
}

impl StandingDecision {
    fn verdict(&self, standing: Standing) -> Verdict {
        Verdict {
            target: Some(self.target),
            growth: self.growth,
            category: self.category,
            reason: self.reason,
            standing,
            least: self.least,
        }
    }
}

/// Whether the targets in force may stay: each is close to its new one and within its bounds, and
/// together they do not exceed `part`. Many jobs that each keep a little too much would else keep a
/// newcomer's or another owner's part.
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

/// Asks `share` and `scale` for one group and enters its verdicts into the plan.
fn share_out(
    policy: &Policy,
    rules: &mut Rules<'_>,
    jobs: &[&JobView],
    part: f64,
    group: &mut Group,
    standing: &mut BTreeMap<JobId, StandingDecision>,
    plan: &mut Plan,
) {
    let now = plan.at;
    let changed = group.changed(jobs);
    let Reservations { claims, rest, wait } = rules.scale.reserve(&policies::Group { now, jobs, part, changed });
    let unreserved: Vec<&JobView> =
        jobs.iter().zip(&claims).filter(|(_, c)| matches!(c, Claim::Rest { .. })).map(|(j, _)| *j).collect();
    let shares = if unreserved.is_empty() {
        Shares { opinions: vec![], wait: None }
    } else {
        rules.share.share(&policies::Group { now, jobs: &unreserved, part: rest, changed })
    };
    let wait = wait.into_iter().chain(shares.wait).min();
    let opinions = merge(&claims, shares.opinions, rest, part);
    if changed {
        group.members = jobs.iter().map(|j| j.id).collect();
    }
    group.reports = reports(jobs);
    group.due = wait.map(|w| now + w);

    let limits: Vec<_> = opinions.iter().map(|o| o.limit).collect();
    let bound = |(job, claim): (&&JobView, &Claim)| match claim {
        Claim::Rest { .. } => Bounds { floor: job.floor, max: job.max },
        Claim::Reserved { least, .. } => {
            Bounds { floor: Share::clamped(least.get().max(job.floor.get())), max: job.max }
        }
    };
    let bounds: Vec<_> = jobs.iter().zip(&claims).map(bound).collect();
    let targets = deal::targets(&limits, &bounds, part);
    // The deadband is judged for the group as a whole: holding one job back while its neighbours
    // change could promise more than the node has.
    let before: Option<Vec<Target>> = jobs.iter().map(|j| standing.get(&j.id).map(|d| d.target)).collect();
    let held = before.is_some_and(|before| may_stay(&before, &targets, &bounds, part, policy.deadband));
    for (((job, opinion), target), claim) in jobs.iter().zip(opinions).zip(targets).zip(claims) {
        let Opinion { growth, category, reason, .. } = opinion;
        let least = match claim {
            Claim::Rest { .. } => Share::ZERO,
            Claim::Reserved { least, .. } => least,
        };
        let mut decided = StandingDecision { target, growth, category, reason, least };
        if held && let Some(before) = standing.get(&job.id) {
            decided.target = before.target;
        }
        // Owners' floors that exceed their part are cut, and promises with them.
        decided.least = Share::clamped(decided.least.get().min(decided.target.share.cpu.get()));
        let verdict = decided.verdict(if held { Standing::InsideDeadband } else { Standing::New });
        standing.insert(job.id, decided);
        plan.verdicts.insert(job.id, verdict);
    }
}

/// The opinions about all jobs of a group. The share rule dealt out `rest` of the node; its limits become
/// parts of the group's `part`.
fn merge(claims: &[Claim], of_rest: Vec<Opinion>, rest: f64, part: f64) -> Vec<Opinion> {
    let mut of_rest = of_rest.into_iter();
    let opinion = |claim: &Claim| match *claim {
        Claim::Reserved { share, reason, .. } => Some(Opinion::of_cpu(Share::clamped(share.get() / part), reason)),
        Claim::Rest { why } => of_rest.next().map(|mut opinion| {
            opinion.limit.cpu = Share::clamped(opinion.limit.cpu.get() * (rest / part));
            opinion.reason = why.unwrap_or(opinion.reason);
            opinion
        }),
    };
    claims.iter().filter_map(opinion).collect()
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
