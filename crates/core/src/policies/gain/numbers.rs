//! The numbers of the gain rule and of its moves.

use super::super::error::PolicyError;
use crate::model::Span;
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
    pub(crate) fn validate(&self) -> Result<(), PolicyError> {
        let numbers = [
            ("quality", self.quality, 100.0),
            ("guard", self.guard, 1.0),
            ("boldness", self.boldness, 1.0),
            ("slack", self.slack, 100.0),
            ("floor", self.floor, 1.0),
            ("switch", self.switch, 100.0),
            ("probe", self.probe, 1.0),
            ("look", self.look, 1.0),
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
