//! Policies: a named choice of answers to the five decisions, and the numbers they need.
//!
//! A preset (`--policy flowcon`, a row of [`super::table`]) is what people type; a [`Policy`] is what
//! control runs. Every field can be set apart from its preset. The numbers of a rule are in the rule's own
//! folder.

use super::Silence;
use super::deadline::Finish;
use super::elastic::Elastic;
use super::error::PolicyError;
use super::flowcon::Flowcon;
use super::gain::{Gain, GainMove};
use super::rank::Rank;
use super::specon::Specon;
use crate::model::Span;
use crate::plan::Weighting;
use serde::{Deserialize, Serialize};

/// Which waiting job next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OrderRule {
    /// Higher priority first, then first come, first served.
    #[default]
    Fifo,
    /// First come, first served, each when what its owner requested is free.
    Requests,
    /// What can still make its deadline, the most urgent first.
    Deadline,
}

/// How large a job must be.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleRule {
    /// As large as its owner said.
    #[default]
    Fixed,
    /// As large as its deadline needs.
    Deadline(Finish),
    /// The tasks of parameter-server jobs grow into idle resources, and return them when others wait.
    Elastic(Elastic),
}

/// How the jobs of one node split it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "rule")]
pub enum ShareRule {
    #[default]
    Fair,
    Flowcon(Flowcon),
    /// One after the other: the first in line has the node, what it cannot use goes to the next.
    Rank(Rank),
    /// In proportion to weights that a published rule finds.
    Weigh {
        by: Weighting,
    },
    /// Where a unit of the node gains most.
    Gain(Gain),
}

/// On which node a waiting job starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "rule")]
pub enum PlaceRule {
    /// The fewest jobs for its cores.
    #[default]
    Spread,
    /// As Kubernetes' default scheduler scores jobs that request nothing; `seed` breaks ties.
    Kubernetes { seed: u64 },
    /// Where it will grow most.
    Growth,
    /// The tasks of a job on as few nodes as possible, servers beside their workers. A job without tasks is spread.
    Affinity,
}

/// Which running job should live elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "rule")]
pub enum MoveRule {
    #[default]
    Stay,
    Specon(Specon),
    /// To nodes that have run empty, where it ends jobs soonest; needs the share rule `gain`, which
    /// knows the work left.
    Gain(GainMove),
}

/// What control runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default = "Policy::equal", deny_unknown_fields)]
pub struct Policy {
    pub order: OrderRule,
    pub place: PlaceRule,
    pub share: ShareRule,
    pub moves: MoveRule,
    pub scale: ScaleRule,
    /// A target that differs by no more than this (absolute, of a whole node) from the one in force
    /// is not written.
    pub deadband: f64,
    /// A job that reported nothing for this long after its start gets an equal part.
    pub patience: Span,
    /// A job whose silence exceeds this many times its longest gap between reports gets an equal part.
    pub silence_factor: f64,
    /// Decide at every report, not only when the interval is over: for jobs of seconds, and for
    /// measuring latency.
    pub react_to_reports: bool,
}

impl Policy {
    /// Equal shares: the rules and numbers of the baseline `na`. Every other policy differs from it in a few fields.
    /// It is not the default of the programs, which is [`super::table::Preset::default`].
    pub fn equal() -> Policy {
        Policy {
            order: OrderRule::Fifo,
            place: PlaceRule::Spread,
            share: ShareRule::Fair,
            moves: MoveRule::Stay,
            scale: ScaleRule::Fixed,
            deadband: 0.01,
            patience: Span::from_secs(120),
            silence_factor: 4.0,
            react_to_reports: false,
        }
    }

    /// When a job's silence makes its last report worthless.
    pub(crate) fn silence(&self) -> Silence {
        Silence { patience: self.patience, factor: self.silence_factor }
    }

    /// Refuses numbers no decision could work with.
    pub fn validate(&self) -> Result<(), PolicyError> {
        if !(0.0..=1.0).contains(&self.deadband) {
            return Err(PolicyError::Deadband(self.deadband));
        }
        match &self.moves {
            MoveRule::Stay => {}
            MoveRule::Specon(numbers) => numbers.validate()?,
            MoveRule::Gain(numbers) => numbers.validate()?,
        }
        match &self.scale {
            ScaleRule::Fixed => {}
            ScaleRule::Deadline(numbers) => numbers.validate()?,
            ScaleRule::Elastic(numbers) => numbers.validate()?,
        }
        match &self.share {
            ShareRule::Flowcon(numbers) => numbers.validate(),
            ShareRule::Gain(numbers) => numbers.validate(),
            // The others have no numbers that could be wrong.
            _ => Ok(()),
        }
    }
}
