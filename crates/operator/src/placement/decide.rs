//! Where jobs should run. [`Placements::decide`] is pure: it puts a snapshot of the cluster into one
//! core view for every policy that jobs ask for, lets the core decide, and returns [`Order`]s with
//! their reasons. Shares stay with the node agents.

use super::RECORDED_JOBS;
use super::memory::{JobMemory, Nodes};
use super::snapshot::ClusterSnapshot;
use crate::state::orders::{JobFacts, JobState, Judgement, Order, OrderKind};
use gainshare_core::check::CheckedPlan;
use gainshare_core::decider::{Decider, Decision as RecordedPlan, Outcome};
use gainshare_core::model::{JobId, NodeId, OwnerId, Span};
use gainshare_core::policy::{MoveRule, Policy, Specon};
use gainshare_kube_api::names::{JobUid, NodeName};
use gainshare_kube_api::placement_reason::PlacementReason;
use gainshare_kube_api::training_job::JobPolicy;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Bounds on the cost of a move. Tenants can write the status that it is read from.
const MOVE_COST_S: std::ops::RangeInclusive<f64> = 1.0..=600.0;

/// The decision: one core decider for every policy that jobs ask for, and what is remembered
/// between two passes.
#[derive(Debug, Default)]
pub(crate) struct Placements {
    specon: Specon,
    deciders: BTreeMap<JobPolicy, Decider>,
    /// The last decision of each policy, if it was recorded.
    pub(super) recorded: BTreeMap<JobPolicy, Arc<RecordedPlan>>,
    /// Policies whose next decision is recorded however many jobs it is about.
    pub(super) record_next: BTreeSet<JobPolicy>,
    // Tens of thousands of jobs are read in every pass: a name is hashed once, and then a number
    // stands for it.
    pub(super) jobs: HashMap<JobUid, JobMemory>,
    next_job: u64,
    pub(super) nodes: Nodes,
    owners: HashMap<String, OwnerId>,
    pass: u64,
    /// Measured costs of moves in seconds, by owner.
    move_costs: BTreeMap<JobPolicy, BTreeMap<String, Vec<f64>>>,
    /// How many plans failed their check.
    pub(super) rejected: u64,
    /// Judgements of move rules that changed since the last `take_judgements()`, by the uid of the job.
    judgements: Vec<(JobUid, Judgement)>,
}

impl Placements {
    pub(crate) fn new(specon: Specon) -> Placements {
        Placements { specon, ..Placements::default() }
    }

    /// The orders of this pass.
    pub(crate) fn decide(&mut self, snapshot: &ClusterSnapshot) -> Vec<Order> {
        self.learn(snapshot);
        let mut orders = self.decide_for_all(snapshot);
        let mut returns = false;
        for memory in self.jobs.values_mut() {
            returns |= std::mem::take(&mut memory.is_left_out);
        }
        if returns {
            orders.extend(self.decide_for_all(snapshot));
        }
        orders
    }

    fn decide_for_all(&mut self, snapshot: &ClusterSnapshot) -> Vec<Order> {
        let policies = JobPolicy::all().filter(|policy| policy.places_pods());
        policies.flat_map(|policy| self.decide_for(policy, snapshot)).collect()
    }

    /// Takes in the jobs and their reports.
    fn learn(&mut self, snapshot: &ClusterSnapshot) {
        self.pass += 1;
        self.nodes.learn(&snapshot.nodes);
        self.move_costs.clear();
        for (facts, report) in &snapshot.jobs {
            if let Some(cost_s) = facts.move_cost_s.filter(|cost_s| cost_s.is_finite()) {
                let of_policy = self.move_costs.entry(facts.policy).or_default();
                of_policy.entry(facts.owner.clone()).or_default().push(cost_s);
            }
            if facts.state == JobState::Done {
                continue;
            }
            if let Some(memory) = self.jobs.get_mut(&facts.uid) {
                memory.learn(facts, &mut self.nodes, *report, snapshot.now);
                memory.pass = self.pass;
                continue;
            }
            self.next_job += 1;
            let next = OwnerId(self.owners.len() as u32);
            let owner = *self.owners.entry(facts.owner.clone()).or_insert(next);
            let mut memory = JobMemory::new(JobId(self.next_job), owner, facts);
            memory.learn(facts, &mut self.nodes, *report, snapshot.now);
            memory.pass = self.pass;
            self.jobs.insert(facts.uid.clone(), memory);
        }
        self.jobs.retain(|_, memory| memory.pass == self.pass);
    }

    fn decide_for(&mut self, policy: JobPolicy, snapshot: &ClusterSnapshot) -> Vec<Order> {
        let mut jobs: Vec<&JobMemory> = self.jobs.values().filter(|memory| memory.facts.policy == policy).collect();
        jobs.sort_unstable_by_key(|memory| memory.id);
        if jobs.is_empty() {
            self.deciders.remove(&policy);
            self.recorded.remove(&policy);
            return vec![];
        }
        let view = self.view(&jobs, snapshot);
        let decider = self.deciders.entry(policy).or_insert_with(|| Decider::new(rules(policy, self.specon)));
        if let Some(cost_s) = self.move_costs.get_mut(&policy).and_then(moving_cost_s) {
            decider.set_moving_cost(Span::from_secs_f64(cost_s));
        }
        // Recording copies what the policy remembers: nothing for a few jobs, tens of milliseconds
        // for tens of thousands.
        let recorded = view.jobs.len() <= RECORDED_JOBS || self.record_next.contains(&policy);
        let outcome = if recorded { decider.decide_recorded(view) } else { decider.decide(view) };
        if !matches!(outcome, Outcome::NotDue) {
            self.record_next.remove(&policy);
            self.recorded.remove(&policy);
        }
        let decision = match outcome {
            Outcome::NotDue => return vec![],
            Outcome::Decision(decision) => Arc::new(decision),
            Outcome::Rejected(rejection) => {
                // Without an order, jobs stay where they are, and the cluster's own scheduler
                // places those that wait.
                let record = rejection.record.as_ref().and_then(|r| gainshare_record::to_json(r).ok());
                tracing::error!(
                    policy = policy.name(),
                    record,
                    "a plan failed its check and is not carried out: {}",
                    rejection.reasons()
                );
                self.rejected += 1;
                return vec![];
            }
        };
        if recorded {
            self.recorded.insert(policy, decision.clone());
        }
        let plan = &decision.plan;
        if policy.moves_jobs() {
            let has_categories = policy.moves_converged_jobs();
            for memory in self.jobs.values_mut().filter(|memory| memory.facts.policy == policy) {
                let verdict = plan.verdicts.get(&memory.id).filter(|_| has_categories);
                let category = verdict.map(|verdict| verdict.category).or(memory.category);
                let marks = memory.marks.with(decider.marks(memory.id));
                if (category, marks) != (memory.category, memory.marks) {
                    let judgement = Judgement { category: category.map(Into::into), marks };
                    self.judgements.push((memory.facts.uid.clone(), judgement));
                }
                (memory.category, memory.marks) = (category, marks);
            }
        }
        let orders = self.orders(policy, plan);
        for order in &orders {
            if let Some(memory) = self.jobs.get_mut(&order.uid) {
                memory.order = Some((order.clone(), snapshot.now));
            }
        }
        orders
    }

    /// The orders that carry out a checked plan.
    fn orders(&self, policy: JobPolicy, plan: &CheckedPlan) -> Vec<Order> {
        if plan.starts.is_empty() && plan.moves.is_empty() {
            return vec![];
        }
        let of_policy = self.jobs.values().filter(|memory| memory.facts.policy == policy);
        let by_id: HashMap<JobId, &JobFacts> = of_policy.map(|memory| (memory.id, &*memory.facts)).collect();
        let names: HashMap<NodeId, &NodeName> = self.nodes.ids.iter().map(|(name, id)| (*id, name)).collect();
        let starts = plan.starts.iter().map(|s| (s.job, s.node, OrderKind::Place, PlacementReason::from(s.why)));
        let moves = plan.moves.iter().map(|m| (m.job, m.to, OrderKind::Move, PlacementReason::from(m.why)));
        starts
            .chain(moves)
            .filter_map(|(job, node, kind, reason)| {
                let (facts, node) = (by_id.get(&job)?, NodeName::clone(names.get(&node)?));
                let fits = match kind {
                    // Without an order the cluster's own scheduler finds a place.
                    OrderKind::Place => facts.state == JobState::Waiting && !facts.tried.contains(&node),
                    OrderKind::Move => {
                        facts.movable.is_ok()
                            && matches!(&facts.state, JobState::Running { node: from, .. } if *from != node)
                    }
                };
                fits.then(|| Order { uid: facts.uid.clone(), node, kind, reason })
            })
            .collect()
    }

    /// Jobs that will miss their deadlines on every node that there is, by their uids.
    pub(super) fn needing_nodes(&self) -> BTreeSet<JobUid> {
        let needs_node = |memory: &&JobMemory| {
            let decider = memory.now.finish.and_then(|_| self.deciders.get(&memory.facts.policy));
            decider.is_some_and(|decider| decider.needs_node(memory.id))
        };
        self.jobs.values().filter(needs_node).map(|memory| memory.facts.uid.clone()).collect()
    }

    /// The judgements that the decision has changed since the last call, by the uid of the job.
    pub(super) fn take_judgements(&mut self) -> Vec<(JobUid, Judgement)> {
        std::mem::take(&mut self.judgements)
    }
}

fn rules(policy: JobPolicy, specon: Specon) -> Policy {
    let mut rules = policy.policy();
    if let MoveRule::Specon(numbers) = &mut rules.moves {
        *numbers = specon;
    }
    rules
}

/// What a move costs, in seconds: the median over owners of each owner's median. An owner with many
/// jobs, real or forged, counts once.
fn moving_cost_s(by_owner: &mut BTreeMap<String, Vec<f64>>) -> Option<f64> {
    let clamp = |cost_s: f64| cost_s.clamp(*MOVE_COST_S.start(), *MOVE_COST_S.end());
    let mut medians: Vec<f64> = by_owner.values_mut().filter_map(|costs| median(costs)).map(clamp).collect();
    median(&mut medians)
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "hostile_tests.rs"]
mod hostile_tests;

#[cfg(test)]
#[path = "pass_tests.rs"]
mod pass_tests;
