//! Which type answers for which rule of a policy: the only file that names the rules.
//!
//! [`RuleMemory::bind`] gives control one object for each of the five decisions, bound to its
//! memory. A rule's memory is a type of the rule's own folder and a field of [`RuleMemory`].

use super::order::{Fifo, Requests};
use super::place::{Growth, Kubernetes, Spread};
use super::policy::{MoveRule, OrderRule, PlaceRule, Policy, ScaleRule, ShareRule};
use super::{
    Claim, Group, Order, Place, Relocate, Reservations, Scale, Share, deadline, elastic, fair, flowcon, gain, rank,
    specon, weigh,
};
use crate::model::{JobId, Span};
use crate::plan::{Move, Plan};
use crate::view::View;
use serde::{Deserialize, Serialize};

/// What the rules of a policy remember.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct RuleMemory {
    #[serde(default)]
    deadline: deadline::Memory,
    #[serde(default)]
    elastic: elastic::Memory,
    #[serde(default)]
    flowcon: flowcon::Memory,
    #[serde(default)]
    gain: gain::Memory,
    #[serde(default)]
    specon: specon::Memory,
}

/// The five decisions of a policy, ready to be asked.
pub(crate) struct Rules<'a> {
    pub(crate) order: Box<dyn Order>,
    pub(crate) place: Box<dyn Place>,
    pub(crate) share: Box<dyn Share + 'a>,
    pub(crate) relocate: Box<dyn Relocate + 'a>,
    pub(crate) scale: Box<dyn Scale + 'a>,
    /// `place` and `scale` for jobs of several tasks.
    pub(crate) tasks: elastic::Rule<'a>,
}

impl RuleMemory {
    pub(crate) fn bind<'a>(&'a mut self, policy: &'a Policy) -> Rules<'a> {
        let RuleMemory { deadline, elastic, flowcon, gain, specon } = self;
        let silence = policy.silence();
        Rules {
            order: match policy.order {
                OrderRule::Fifo => Box::new(Fifo),
                OrderRule::Requests => Box::new(Requests),
                OrderRule::Deadline => Box::new(deadline::ByDeadline),
            },
            place: match policy.place {
                PlaceRule::Spread | PlaceRule::Affinity => Box::new(Spread),
                PlaceRule::Kubernetes { seed } => Box::new(Kubernetes { seed }),
                PlaceRule::Growth => Box::new(Growth {
                    beta: match &policy.share {
                        ShareRule::Flowcon(numbers) => numbers.beta,
                        _ => flowcon::Flowcon::default().beta,
                    },
                }),
            },
            share: match &policy.share {
                ShareRule::Fair => Box::new(fair::Fair),
                ShareRule::Flowcon(numbers) => Box::new(flowcon::Rule { numbers, silence, memory: flowcon }),
                ShareRule::Rank(by) => Box::new(rank::Rule { by }),
                ShareRule::Weigh { by } => Box::new(weigh::Rule { by: *by }),
                ShareRule::Gain(numbers) => Box::new(gain::Rule { numbers, silence, memory: gain }),
            },
            relocate: match &policy.moves {
                MoveRule::Stay => Box::new(Stay),
                MoveRule::Specon(numbers) => Box::new(specon::Rule { numbers, memory: specon }),
                MoveRule::Gain(numbers) => Box::new(gain::MoveRule { numbers }),
            },
            scale: match &policy.scale {
                ScaleRule::Fixed | ScaleRule::Elastic(_) => Box::new(Fixed),
                ScaleRule::Deadline(numbers) => Box::new(deadline::Rule { numbers, memory: deadline }),
            },
            tasks: elastic::Rule {
                numbers: match &policy.scale {
                    ScaleRule::Elastic(numbers) => Some(numbers),
                    ScaleRule::Fixed | ScaleRule::Deadline(_) => None,
                },
                together: policy.place == PlaceRule::Affinity,
                memory: elastic,
            },
        }
    }

    /// What the rule of jobs with several tasks remembers.
    pub(crate) fn tasks(&self) -> &elastic::Memory {
        &self.elastic
    }

    /// The largest part of its node that a job was seen able to use, where the share rule measures
    /// it.
    pub(crate) fn usable(&self, job: JobId) -> Option<f64> {
        self.gain.usable(job)
    }
}

impl MoveRule {
    /// What saving, stopping and restoring a job was measured to cost, for rules that weigh it.
    pub(crate) fn set_cost(&mut self, cost: Span) {
        if let MoveRule::Gain(numbers) = self {
            numbers.cost = cost;
        }
    }
}

/// Every job stays on its node.
struct Stay;

impl Relocate for Stay {
    fn moves(&mut self, _view: &View, _plan: &Plan, _share: &dyn Share) -> Vec<Move> {
        vec![]
    }
}

/// No job has more than the share rule gives it.
struct Fixed;

impl Scale for Fixed {
    fn reserve(&mut self, group: &Group<'_>) -> Reservations {
        Reservations { claims: vec![Claim::Rest { why: None }; group.jobs.len()], rest: group.part, wait: None }
    }
}
