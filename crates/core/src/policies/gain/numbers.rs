//! The numbers of the gain rule and of its moves.

use super::super::error::PolicyError;
use crate::model::Span;
use crate::signal::length::Belief;
use crate::view::View;
use serde::{Deserialize, Serialize};

/// The numbers of the gain rule. All are ratios except the two bounds, so the rule fits jobs of any length. The bounds
/// limit what decisions cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gain {
    /// What the improvement still to come is worth, where ending the job is worth 1.
    pub quality: f64,
    /// The promise to a job whose length is not known is kept if it ends as early as this part of
    /// the jobs like it. Small: safe, and less is gained. Large: a job that ends early may be late.
    pub guard: f64,
    /// Jobs go in the order of `effort^boldness · mean^(1 − boldness)` of the work left: 1 is the
    /// Gittins index, which gambles on an early end as far as the distribution is believed; 0 is
    /// the mean, which trusts it less.
    pub boldness: f64,
    /// What the rule goes by on a single node without teams of threads. Without it, as in policies that were recorded
    /// before there was one, `guard` and `boldness` hold there, too.
    #[serde(default)]
    pub one_node: Option<OneNode>,
    /// What is minimised: the time to the end, or to 90 % of the improvement.
    pub aim: Aim,
    /// How much later than with an equal share a job may end, as a part of its whole time.
    pub slack: f64,
    /// Every job keeps this part of an equal share.
    pub floor: f64,
    /// A job that is being served is passed only by one that gains more by this part.
    pub switch: f64,
    /// A newcomer is measured first, at a cost to the others of no more than this part of what they
    /// have left.
    pub probe: f64,
    /// The next decision comes after this part of the time until the first job ends.
    pub look: f64,
    pub shortest_look: Span,
    pub longest_look: Span,
}

/// How far the rule goes by guesses at lengths on a single node, where no job has a team of threads that follows its
/// share.
///
/// A job that was passed over can catch up there: there are no moves and no other homes, and the whole node serves the
/// job as fast as it served others. In a cluster the job may lie on a node that others need. And further cores bring a
/// team of threads less than the first ones. In both cases the same numbers make single jobs much later.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OneNode {
    /// As [`Gain::guard`]. A half is the median: the promise is too early as often as too late.
    pub guard: f64,
    /// As [`Gain::boldness`].
    pub boldness: f64,
    /// How likely the curve makes any length at least ([`Belief::least_likelihood`]).
    pub least_likelihood: f64,
    /// The largest number of epochs that is expected ([`Belief::most_epochs`]).
    pub most_epochs: f64,
}

impl Default for OneNode {
    fn default() -> Self {
        OneNode { guard: 0.5, boldness: 0.0, least_likelihood: 0.05, most_epochs: 300.0 }
    }
}

/// How far the rule goes by guesses at lengths.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Caution {
    pub(super) guard: f64,
    pub(super) boldness: f64,
    pub(super) belief: Belief,
    /// Whether the fair world takes over the true length of a job that has ended.
    pub(super) knows_ends: bool,
}

/// The event that the gain rule makes as early as possible, in the mean over jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aim {
    /// The end of the job.
    #[default]
    Finish,
    /// Nine tenths of the job's improvement: jobs that have made them wait for those that have not.
    Quality,
}

impl Aim {
    pub const ALL: [Aim; 2] = [Aim::Finish, Aim::Quality];

    pub fn name(self) -> &'static str {
        match self {
            Aim::Finish => "finish",
            Aim::Quality => "quality",
        }
    }

    /// What it is for, in one line.
    pub fn summary(self) -> &'static str {
        match self {
            Aim::Finish => "jobs end as early as possible, in the mean",
            Aim::Quality => "jobs make nine tenths of their improvement as early as possible, in the mean",
        }
    }
}

impl std::str::FromStr for Aim {
    type Err = String;

    fn from_str(name: &str) -> Result<Aim, String> {
        let found = Aim::ALL.into_iter().find(|aim| aim.name() == name);
        found.ok_or_else(|| format!("unknown aim `{name}`: known are finish and quality"))
    }
}

impl Default for Gain {
    fn default() -> Self {
        Gain {
            quality: 0.1,
            guard: 0.2,
            boldness: 1.0,
            one_node: Some(OneNode::default()),
            aim: Aim::Finish,
            slack: 0.0,
            floor: 0.01,
            switch: 0.1,
            probe: 0.05,
            look: 0.1,
            shortest_look: Span::from_secs(1),
            longest_look: Span::from_secs(300),
        }
    }
}

impl Gain {
    /// How far the rule goes by guesses where it decides about `view`.
    pub(super) fn caution(&self, view: &View) -> Caution {
        let can_catch_up = view.nodes.len() == 1 && view.jobs.iter().all(|job| !job.has_team);
        match self.one_node.filter(|_| can_catch_up) {
            Some(OneNode { guard, boldness, least_likelihood, most_epochs }) => {
                Caution { guard, boldness, belief: Belief { least_likelihood, most_epochs }, knows_ends: true }
            }
            None => Caution { guard: self.guard, boldness: self.boldness, belief: Belief::FULL, knows_ends: false },
        }
    }

    pub(crate) fn validate(&self) -> Result<(), PolicyError> {
        let one_node = self.one_node.unwrap_or_default();
        let numbers = [
            ("quality", self.quality, 100.0),
            ("guard", self.guard, 1.0),
            ("boldness", self.boldness, 1.0),
            ("slack", self.slack, 100.0),
            ("floor", self.floor, 1.0),
            ("switch", self.switch, 100.0),
            ("probe", self.probe, 1.0),
            ("look", self.look, 1.0),
            ("one_node.guard", one_node.guard, 1.0),
            ("one_node.boldness", one_node.boldness, 1.0),
            ("one_node.least_likelihood", one_node.least_likelihood, 1.0),
            ("one_node.most_epochs", one_node.most_epochs, 1e9),
        ];
        for (name, value, largest) in numbers {
            if !(0.0..=largest).contains(&value) {
                return Err(PolicyError::Gain { name, value, largest });
            }
        }
        if self.shortest_look == Span::ZERO || self.shortest_look > self.longest_look {
            return Err(PolicyError::Looks);
        }
        Ok(())
    }
}

/// The numbers of moves by gain.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GainMove {
    /// What saving, stopping and restoring a job costs it. The thesis measured under 5 s.
    pub cost: Span,
    /// A move must gain this many times its cost, over all jobs: predictions err.
    pub worth: f64,
}

impl Default for GainMove {
    fn default() -> Self {
        GainMove { cost: Span::from_secs(5), worth: 3.0 }
    }
}

impl GainMove {
    pub(crate) fn validate(&self) -> Result<(), PolicyError> {
        let largest = 1e6;
        let sound = (0.0..=largest).contains(&self.worth);
        if sound { Ok(()) } else { Err(PolicyError::Gain { name: "worth", value: self.worth, largest }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, running};
    use crate::model::Time;
    use crate::view::JobView;

    #[test]
    fn more_is_dared_on_a_single_node_without_teams() {
        let rule = Gain::default();
        let view = |nodes: u32, has_team| View {
            now: Time::ZERO,
            nodes: (0..nodes).map(node).collect(),
            jobs: vec![running(0, 0), JobView { has_team, ..running(1, 0) }],
        };
        let daring = rule.caution(&view(1, false));
        assert!(daring.guard > rule.guard && daring.boldness < rule.boldness && daring.knows_ends);
        let without = Gain { one_node: None, ..rule };
        for view in [view(2, false), view(1, true)] {
            assert_eq!(rule.caution(&view), without.caution(&view));
        }
        assert_ne!(rule.caution(&view(1, false)), without.caution(&view(1, false)));
    }
}
