//! Policies: a named choice of answers to the five decisions, and the numbers they need.
//!
//! A [`Preset`] is what people type (`--policy flowcon`); a [`Policy`] is what control runs. Every
//! field can be set apart from its preset. The rules and their numbers live in [`crate::policies`].

pub use crate::policies::Preset;
pub use crate::policies::flowcon::Flowcon;
pub use crate::policies::gain::{Gain, GainMove};
pub use crate::policies::rank::Rank;
pub use crate::policies::specon::Specon;
pub use crate::policies::weigh::Weighting;

use crate::model::Span;
use serde::{Deserialize, Serialize};

/// Which waiting job next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OrderRule {
    /// Higher priority first, then first come, first served.
    #[default]
    Fifo,
}

/// How much a job may have at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleRule {
    /// What its owner said.
    #[default]
    Fixed,
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
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    pub order: OrderRule,
    pub place: PlaceRule,
    pub share: ShareRule,
    pub moves: MoveRule,
    pub scale: ScaleRule,
    /// A target that differs by no more than this (absolute, of a whole node) from the one in force
    /// is not written.
    pub deadband: f64,
    /// A job that reported nothing for so long after its start gets an equal part.
    pub patience: Span,
    /// A job whose silence exceeds its longest gap between reports so many times gets an equal
    /// part.
    pub silence_factor: f64,
    /// Decide at every report, not only when the interval is over: for jobs of seconds, and for
    /// measuring latency.
    pub react_to_reports: bool,
}

impl Default for Policy {
    fn default() -> Self {
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
}

impl From<Preset> for Policy {
    fn from(preset: Preset) -> Policy {
        (preset.info().policy)()
    }
}

/// What is wrong with a policy's numbers.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PolicyError {
    #[error("alpha must be a finite number of at least 0, not {0}; 0.05 is a good start")]
    Alpha(f64),
    #[error("beta must be a finite number of at least 1, not {0}; the paper uses 2")]
    Beta(f64),
    #[error("the interval must be longer than zero; 20s is a good start")]
    Interval,
    #[error("{name} of the gain rule must lie between 0 and {largest}, not {value}")]
    Gain { name: &'static str, value: f64, largest: f64 },
    #[error("the looks of the gain rule must be longer than zero, the shortest no longer than the longest")]
    Looks,
    #[error(
        "SpeCon's alpha must be a finite number of at least 0, not {0}, and its interval longer than zero; 0.01 every 30s is a good start"
    )]
    Specon(f64),
    #[error("the deadband must lie between 0 and 1, not {0}")]
    Deadband(f64),
}

impl Policy {
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
        match &self.share {
            ShareRule::Flowcon(numbers) => numbers.validate(),
            ShareRule::Gain(numbers) => numbers.validate(),
            // The others have no numbers that could be wrong.
            _ => Ok(()),
        }
    }
}
