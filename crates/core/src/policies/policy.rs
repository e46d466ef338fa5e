//! Policies: a named choice of answers to the five decisions, and the numbers they need.
//!
//! A preset (`--policy flowcon`, a row of [`super::table`]) is what people type; a [`Policy`] is what
//! control runs. Every field can be set apart from its preset. The numbers of a rule are in the rule's own
//! folder. A rule with numbers that drivers set is a variant here; all other rules are [`super::plain`] rules, which
//! only their rows name.

use super::deadline::Finish;
use super::elastic::Elastic;
use super::error::PolicyError;
use super::fair::FAIR;
use super::flowcon::Flowcon;
use super::gain::{Aim, Gain, GainMove};
use super::order::FIFO;
use super::place::SPREAD;
use super::plain::{OrderRule, PlainMove, PlainPlace, PlainScale, PlainShare};
use super::rank::Rank;
use super::specon::Specon;
use super::{FIXED, STAY, Silence};
use crate::model::Span;
use crate::plan::Weighting;
use serde::{Deserialize, Serialize};

/// How large a job must be.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    expecting = "this version has no such scale rule, or the rule does not take these numbers"
)]
pub enum ScaleRule {
    /// As large as its deadline needs.
    Deadline(Finish),
    /// The tasks of parameter-server jobs grow into idle resources, and return them when others wait.
    Elastic(Elastic),
    /// `fixed`: as large as its owner said. Rules of other rows.
    #[serde(untagged)]
    Plain(PlainScale),
}

/// How the jobs of one node split it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    tag = "rule",
    expecting = "this version has no such share rule, or the rule does not take these numbers"
)]
pub enum ShareRule {
    Flowcon(Flowcon),
    /// One after the other: the first in line has the node, what it cannot use goes to the next.
    Rank(Rank),
    /// In proportion to weights that a published rule finds.
    Weigh {
        by: Weighting,
    },
    /// Where a unit of the node gains most.
    Gain(Gain),
    /// `fair`: equal shares. Rules of other rows.
    #[serde(untagged)]
    Plain(PlainShare),
}

/// On which node a waiting job starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    tag = "rule",
    expecting = "this version has no such place rule, or the rule does not take these numbers"
)]
pub enum PlaceRule {
    /// As Kubernetes' default scheduler scores jobs that request nothing; `seed` breaks ties.
    Kubernetes { seed: u64 },
    /// Where it will grow most.
    Growth,
    /// The tasks of a job on as few nodes as possible, servers beside their workers. A job without tasks is spread.
    Affinity,
    /// `spread`: the fewest jobs for its cores. Rules of other rows.
    #[serde(untagged)]
    Plain(PlainPlace),
}

/// Which running job should live elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    tag = "rule",
    expecting = "this version has no such move rule, or the rule does not take these numbers"
)]
pub enum MoveRule {
    Specon(Specon),
    /// To nodes that have run empty, where it ends jobs soonest; needs the share rule `gain`, which
    /// knows the work left. Before that, a job that will miss its deadline goes to a node on which it makes it, where
    /// the driver says how deadlines stand.
    Gain(GainMove),
    /// `stay`: none. Rules of other rows.
    #[serde(untagged)]
    Plain(PlainMove),
}

impl ScaleRule {
    pub fn name(&self) -> &'static str {
        match self {
            ScaleRule::Deadline(_) => "deadline",
            ScaleRule::Elastic(_) => "elastic",
            ScaleRule::Plain(rule) => rule.name(),
        }
    }
}

impl ShareRule {
    pub fn name(&self) -> &'static str {
        match self {
            ShareRule::Flowcon(_) => "flowcon",
            ShareRule::Rank(Rank::Arrival) => "rank by arrival",
            ShareRule::Rank(Rank::Deadline) => "rank by deadline",
            ShareRule::Rank(Rank::Remaining) => "rank by work left",
            ShareRule::Rank(Rank::Predicted) => "rank by predicted work left",
            ShareRule::Rank(Rank::Attained { .. }) => "rank by attained service",
            ShareRule::Weigh { by: Weighting::Drf } => "drf",
            ShareRule::Weigh { by: Weighting::Slaq } => "slaq",
            ShareRule::Weigh { by: Weighting::Optimus } => "optimus",
            ShareRule::Weigh { by: Weighting::Themis } => "themis",
            ShareRule::Gain(_) => "gain",
            ShareRule::Plain(rule) => rule.name(),
        }
    }
}

impl PlaceRule {
    pub fn name(&self) -> &'static str {
        match self {
            PlaceRule::Kubernetes { .. } => "kubernetes",
            PlaceRule::Growth => "growth",
            PlaceRule::Affinity => "affinity",
            PlaceRule::Plain(rule) => rule.name(),
        }
    }
}

impl MoveRule {
    pub fn name(&self) -> &'static str {
        match self {
            MoveRule::Specon(_) => "specon",
            MoveRule::Gain(_) => "gain",
            MoveRule::Plain(rule) => rule.name(),
        }
    }

    /// What saving, stopping and restoring a job was measured to cost, for rules that weigh it.
    pub(crate) fn set_cost(&mut self, cost: Span) {
        if let MoveRule::Gain(numbers) = self {
            numbers.cost = cost;
        }
    }
}

/// The names of the rules that answer the five questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answers {
    pub order: &'static str,
    pub place: &'static str,
    pub share: &'static str,
    pub moves: &'static str,
    pub scale: &'static str,
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
    /// Whether decisions read a job's CPU time and none of its other counters. Of other rules, such as one that a
    /// reader of the guide wrote, that is not known.
    pub fn counts_cpu_only(&self) -> bool {
        match &self.share {
            ShareRule::Gain(_) => true,
            ShareRule::Plain(rule) => *rule == FAIR,
            ShareRule::Flowcon(_) | ShareRule::Rank(_) | ShareRule::Weigh { .. } => false,
        }
    }

    /// Equal shares: the rules and numbers of the baseline `na`. Every other policy differs from it in a few fields.
    /// It is not the default of the programs, which is [`super::table::Preset::default`].
    pub fn equal() -> Policy {
        Policy {
            order: FIFO,
            place: PlaceRule::Plain(SPREAD),
            share: ShareRule::Plain(FAIR),
            moves: MoveRule::Plain(STAY),
            scale: ScaleRule::Plain(FIXED),
            deadband: 0.01,
            patience: Span::from_secs(120),
            silence_factor: 4.0,
            react_to_reports: false,
        }
    }

    /// Which rules answer.
    pub fn answers(&self) -> Answers {
        Answers {
            order: self.order.name(),
            place: self.place.name(),
            share: self.share.name(),
            moves: self.moves.name(),
            scale: self.scale.name(),
        }
    }

    /// What the share rule makes as early as possible, where that can be chosen.
    pub fn aim(&self) -> Option<Aim> {
        match &self.share {
            ShareRule::Gain(numbers) => Some(numbers.aim),
            _ => None,
        }
    }

    /// Chooses what the share rule makes as early as possible. Rules without a choice refuse it.
    pub fn set_aim(&mut self, aim: Aim) -> Result<(), PolicyError> {
        match &mut self.share {
            ShareRule::Gain(numbers) => {
                numbers.aim = aim;
                Ok(())
            }
            other => Err(PolicyError::Aim(other.name())),
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
            MoveRule::Plain(_) => {}
            MoveRule::Specon(numbers) => numbers.validate()?,
            MoveRule::Gain(numbers) => numbers.validate()?,
        }
        match &self.scale {
            ScaleRule::Plain(_) => {}
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::table::Preset;

    #[test]
    fn only_policies_that_share_by_gain_have_an_aim() {
        for preset in Preset::ALL {
            let mut policy = Policy::from(preset);
            let by_gain = matches!(policy.share, ShareRule::Gain(_));
            assert_eq!(policy.aim(), by_gain.then_some(Aim::Finish), "{}", preset.name());
            assert_eq!(policy.set_aim(Aim::Quality).is_ok(), by_gain, "{}", preset.name());
            assert_eq!(policy.aim(), by_gain.then_some(Aim::Quality), "{}", preset.name());
        }
        let refused = Policy::equal().set_aim(Aim::Quality).unwrap_err().to_string();
        assert!(refused.contains("fair") && refused.contains("leave the aim out"), "{refused}");
    }

    #[test]
    fn aims_are_written_as_they_are_read() {
        for aim in Aim::ALL {
            assert_eq!(aim.name().parse(), Ok(aim));
            assert_eq!(serde_json::to_value(aim).unwrap(), aim.name());
        }
        assert!("fast".parse::<Aim>().unwrap_err().contains("finish and quality"));
    }
}
