//! Which type answers for which rule of a policy, where the rule has numbers that drivers set. Rows of the table name
//! all other rules.
//!
//! [`RuleMemory::bind`] gives control one object for each of the five decisions, bound to its
//! memory. A rule's memory is a type of the rule's own folder. The memory of a rule with numbers is a field of
//! [`RuleMemory`]; that of a plain rule is in [`RowMemory`], which the table makes.

use super::place::{Growth, Kubernetes};
use super::plain::Binding;
use super::policy::{MoveRule, PlaceRule, Policy, ScaleRule, ShareRule};
use super::table::RowMemory;
use super::{
    FIXED, Order, Place, Relocate, Scale, Share, deadline, elastic, flowcon, gain, place, rank, specon, weigh,
};
use crate::model::JobId;
use crate::view::Marks;
use serde::{Deserialize, Serialize};

/// What the rules of a policy remember.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct RuleMemory {
    #[serde(default)]
    deadline: deadline::Memory,
    /// Of moves for deadlines.
    #[serde(default, skip_serializing_if = "deadline::MoveMemory::is_empty")]
    deadline_moves: deadline::MoveMemory,
    #[serde(default)]
    elastic: elastic::Memory,
    #[serde(default)]
    flowcon: flowcon::Memory,
    #[serde(default)]
    gain: gain::Memory,
    #[serde(default)]
    specon: specon::Memory,
    /// Of plain rules, by decision.
    #[serde(default, skip_serializing_if = "RowMemory::is_empty")]
    share: RowMemory,
    #[serde(default, skip_serializing_if = "RowMemory::is_empty")]
    moves: RowMemory,
    #[serde(default, skip_serializing_if = "RowMemory::is_empty")]
    scale: RowMemory,
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
        let RuleMemory { deadline, deadline_moves, elastic, flowcon, gain, specon, share, moves, scale } = self;
        let silence = policy.silence();
        Rules {
            order: (policy.order.make)(),
            place: match policy.place {
                PlaceRule::Kubernetes { seed } => Box::new(Kubernetes { seed }),
                PlaceRule::Growth => Box::new(Growth {
                    beta: match &policy.share {
                        ShareRule::Flowcon(numbers) => numbers.beta,
                        _ => flowcon::Flowcon::default().beta,
                    },
                }),
                PlaceRule::Affinity => (place::SPREAD.make)(),
                PlaceRule::Plain(rule) => (rule.make)(),
            },
            share: match &policy.share {
                ShareRule::Flowcon(numbers) => Box::new(flowcon::Rule { numbers, silence, memory: flowcon }),
                ShareRule::Rank(by) => Box::new(rank::Rule { by }),
                ShareRule::Weigh { by } => Box::new(weigh::Rule { by: *by }),
                ShareRule::Gain(numbers) => Box::new(gain::Rule { numbers, silence, memory: gain }),
                ShareRule::Plain(rule) => (rule.make)(Binding { silence, memory: share }),
            },
            relocate: match &policy.moves {
                MoveRule::Specon(numbers) => Box::new(specon::Rule { numbers, memory: specon }),
                // A driver that says how deadlines stand on its nodes has jobs moved for them first.
                MoveRule::Gain(numbers) => Box::new(deadline::MoveRule {
                    cost: numbers.cost,
                    silence,
                    memory: deadline_moves,
                    otherwise: Box::new(gain::MoveRule { numbers }),
                }),
                MoveRule::Plain(rule) => (rule.make)(Binding { silence, memory: moves }),
            },
            scale: match &policy.scale {
                ScaleRule::Deadline(numbers) => Box::new(deadline::Rule { numbers, memory: deadline }),
                ScaleRule::Elastic(_) => (FIXED.make)(Binding { silence, memory: scale }),
                ScaleRule::Plain(rule) => (rule.make)(Binding { silence, memory: scale }),
            },
            tasks: elastic::Rule {
                numbers: match &policy.scale {
                    ScaleRule::Elastic(numbers) => Some(numbers),
                    ScaleRule::Deadline(_) | ScaleRule::Plain(_) => None,
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

    /// Whether a job will miss its deadline on every node that there is.
    pub(crate) fn needs_node(&self, job: JobId) -> bool {
        self.deadline_moves.needs_node(job)
    }

    /// What the move rule has done with a job and does not do again.
    pub(crate) fn marks(&self, job: JobId) -> Marks {
        self.specon.marks(job).with(self.deadline_moves.marks(job))
    }
}
