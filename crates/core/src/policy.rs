//! Policies: a named choice of answers to the five decisions, and the numbers they need.
//!
//! A preset is what people type (`--policy flowcon`); a [`Policy`] is what control runs. Every field can be set apart from its
//! preset. Fields of decisions that have a single answer so far are left out until a second one exists.

use crate::model::{Resource, Span};
use crate::signal::Normalisation;
use serde::{Deserialize, Serialize};

/// Named policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Everyone the same: what a plain machine does. The baseline all others are held against.
    Na,
    /// FlowCon: shares follow growth efficiency.
    #[default]
    Flowcon,
    /// SpeCon: converged jobs move away from those that still grow.
    Specon,
    /// FlowCon 2.0: FlowCon on every node, and new jobs go where they will grow most.
    Flowcon2,
    /// First come, first served: the oldest job has the node to itself.
    Fifo,
    /// Dominant resource fairness.
    Drf,
    /// Shortest remaining time first, by what the jobs' own reports predict.
    Srtf,
    /// Tiresias: least attained service first, in queues.
    Tiresias,
    /// SLAQ: where the loss falls most in the next epoch.
    Slaq,
    /// Optimus: where the remaining time shrinks most.
    Optimus,
    /// Themis: everyone late by the same factor.
    Themis,
    /// Shortest remaining work first; it needs to know what nobody knows, and bounds what any policy can reach on one node.
    Srpt,
    /// Our own: the node goes where a unit of it gains most, and nobody ends later than with an equal share.
    Gainshare,
}

impl Preset {
    pub const ALL: [Preset; 13] = [
        Preset::Na,
        Preset::Flowcon,
        Preset::Specon,
        Preset::Flowcon2,
        Preset::Fifo,
        Preset::Drf,
        Preset::Srtf,
        Preset::Tiresias,
        Preset::Slaq,
        Preset::Optimus,
        Preset::Themis,
        Preset::Gainshare,
        Preset::Srpt,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Preset::Na => "na",
            Preset::Flowcon => "flowcon",
            Preset::Specon => "specon",
            Preset::Flowcon2 => "flowcon2",
            Preset::Fifo => "fifo",
            Preset::Drf => "drf",
            Preset::Srtf => "srtf",
            Preset::Tiresias => "tiresias",
            Preset::Slaq => "slaq",
            Preset::Optimus => "optimus",
            Preset::Themis => "themis",
            Preset::Srpt => "srpt",
            Preset::Gainshare => "gainshare",
        }
    }
}

impl std::str::FromStr for Preset {
    type Err = String;
    fn from_str(s: &str) -> Result<Preset, String> {
        Preset::ALL.into_iter().find(|p| p.name() == s).ok_or_else(|| {
            let known: Vec<_> = Preset::ALL.iter().map(|p| p.name()).collect();
            format!("unknown policy `{s}`; known are: {}", known.join(", "))
        })
    }
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
        by: Weigh,
    },
    /// Where a unit of the node gains most.
    Gain(Gain),
}

/// Published rules that weigh jobs against each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Weigh {
    Drf,
    Slaq,
    Optimus,
    Themis,
}

/// Who goes first where jobs are served one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Rank {
    /// The one that came first.
    Arrival,
    /// The one with the least work left, where it is known.
    Remaining,
    /// The one with the least work left, as its own reports predict it; before the first prediction, the one that consumed least.
    Predicted,
    /// The one that has consumed least of the node, in queues: consumption below the first limit (node-seconds) makes the first queue, below
    /// the second the next, and so on; first come first served within a queue.
    Attained { limits_s: [f64; 2] },
}

/// The numbers of our own rule. None of them is a time that would make it fit jobs of minutes but not of days; the looks are bounded by what looking costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gain {
    /// What the improvement still to come is worth, where ending the job is worth 1.
    pub quality: f64,
    /// A job that names no total is believed to run until so many times the point at which its curve is flat. Of the thesis's models, which make
    /// 65, 90 and 98 % of their improvement in the first fifth of their time, it is 1.3, 3 and 5.
    pub past_flat: f64,
    /// A job that names no total is believed to have at least this part of what it has consumed still before it.
    pub past_age: f64,
    /// How much later than with an equal share a job may end, as a part of its whole time.
    pub slack: f64,
    /// Every job keeps this part of an equal share.
    pub floor: f64,
    /// A job that is being served is passed only by one that gains more by this part.
    pub switch: f64,
    /// A newcomer is measured first, at a cost to the others of no more than this part of what they have left.
    pub probe: f64,
    /// The next look comes after this part of the time until the first job ends.
    pub look: f64,
    pub shortest_look: Span,
    pub longest_look: Span,
}

impl Default for Gain {
    fn default() -> Self {
        Gain {
            quality: 0.1,
            past_flat: 3.0,
            past_age: 0.5,
            slack: 0.0,
            floor: 0.05,
            switch: 0.1,
            probe: 0.05,
            look: 0.1,
            shortest_look: Span::from_secs(1),
            longest_look: Span::from_secs(300),
        }
    }
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
    /// To nodes that have run empty, where it ends jobs soonest; needs the share rule `gain`, which knows the work left.
    Gain(GainMove),
}

/// The numbers of moves by gain.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GainMove {
    /// What saving, stopping and restoring a job costs it. The thesis measured under 5 s.
    pub cost: Span,
    /// A move must gain so many times its cost, over all jobs: predictions err.
    pub worth: f64,
}

impl Default for GainMove {
    fn default() -> Self {
        GainMove { cost: Span::from_secs(5), worth: 3.0 }
    }
}

/// The numbers of SpeCon's Algorithms 3, 4 and 5.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Specon {
    /// α: growth over one interval below it counts as slow.
    pub alpha: f64,
    pub interval: Span,
    /// What a progressing, a watching and a converged job count for in a node's score.
    pub weights: [f64; 3],
    /// Whether Algorithm 5 runs.
    pub rebalance: bool,
    pub normalisation: Normalisation,
}

impl Default for Specon {
    /// α = 0.01, every 30 s: the thesis's setting for all experiments with several models.
    fn default() -> Self {
        Specon {
            alpha: 0.01,
            interval: Span::from_secs(30),
            weights: [2.0, 1.5, 1.0],
            rebalance: true,
            normalisation: Normalisation::Relative,
        }
    }
}

/// The numbers of FlowCon's Algorithm 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Flowcon {
    /// α: growth efficiency below it counts as "no longer growing".
    pub alpha: f64,
    /// β: a completing job keeps at least 1/(β·n) of a node with n jobs.
    pub beta: f64,
    /// The first interval between two runs; doubled each time everyone is completing.
    pub interval: Span,
    /// Back-off ends here, so that a long quiet spell cannot put the next look off for ever.
    pub longest_interval: Span,
    pub normalisation: Normalisation,
    /// Whose growth efficiency is held against α.
    pub judged_by: Resource,
}

impl Default for Flowcon {
    /// α = 5 %, every 20 s, β = 2: the thesis's middle setting.
    fn default() -> Self {
        Flowcon {
            alpha: 0.05,
            beta: 2.0,
            interval: Span::from_secs(20),
            longest_interval: Span::from_secs(20 * 64),
            normalisation: Normalisation::Relative,
            judged_by: Resource::Cpu,
        }
    }
}

/// What control runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    pub share: ShareRule,
    pub place: PlaceRule,
    pub moves: MoveRule,
    /// A target that differs by no more than this (absolute, of a whole node) from the one in force is not written.
    pub deadband: f64,
    /// A job that reported nothing for so long after its start gets an equal part.
    pub patience: Span,
    /// A job whose silence exceeds its longest gap between reports so many times gets an equal part.
    pub silence_factor: f64,
    /// Decide anew at every report, not only when the interval is over: for jobs of seconds, and for measuring latency.
    pub react_to_reports: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            share: ShareRule::Fair,
            place: PlaceRule::Spread,
            moves: MoveRule::Stay,
            deadband: 0.01,
            patience: Span::from_secs(120),
            silence_factor: 4.0,
            react_to_reports: false,
        }
    }
}

/// Tiresias leaves its queue limits to be tuned to the workload; for jobs of minutes on one node these sort the short from the long.
const TIRESIAS_LIMITS_S: [f64; 2] = [30.0, 120.0];

impl From<Preset> for Policy {
    fn from(preset: Preset) -> Policy {
        let share = match preset {
            Preset::Na | Preset::Specon => ShareRule::Fair,
            Preset::Flowcon | Preset::Flowcon2 => ShareRule::Flowcon(Flowcon::default()),
            Preset::Fifo => ShareRule::Rank(Rank::Arrival),
            Preset::Drf => ShareRule::Weigh { by: Weigh::Drf },
            Preset::Srtf => ShareRule::Rank(Rank::Predicted),
            Preset::Tiresias => ShareRule::Rank(Rank::Attained { limits_s: TIRESIAS_LIMITS_S }),
            Preset::Slaq => ShareRule::Weigh { by: Weigh::Slaq },
            Preset::Optimus => ShareRule::Weigh { by: Weigh::Optimus },
            Preset::Themis => ShareRule::Weigh { by: Weigh::Themis },
            Preset::Srpt => ShareRule::Rank(Rank::Remaining),
            Preset::Gainshare => ShareRule::Gain(Gain::default()),
        };
        let place = if preset == Preset::Flowcon2 { PlaceRule::Growth } else { PlaceRule::Spread };
        let moves = match preset {
            Preset::Specon => MoveRule::Specon(Specon::default()),
            Preset::Gainshare => MoveRule::Gain(GainMove::default()),
            _ => MoveRule::Stay,
        };
        Policy { share, place, moves, ..Policy::default() }
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
    #[error("{name} of the gain rule must lie between 0 and {most}, not {value}")]
    Gain { name: &'static str, value: f64, most: f64 },
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
        if let MoveRule::Specon(s) = self.moves
            && !(s.alpha.is_finite() && s.alpha >= 0.0 && s.interval > Span::ZERO)
        {
            return Err(PolicyError::Specon(s.alpha));
        }
        if let MoveRule::Gain(m) = self.moves
            && !(0.0..=1e6).contains(&m.worth)
        {
            return Err(PolicyError::Gain { name: "worth", value: m.worth, most: 1e6 });
        }
        match self.share {
            ShareRule::Fair | ShareRule::Rank(_) | ShareRule::Weigh { .. } => Ok(()),
            ShareRule::Flowcon(f) if !(f.alpha.is_finite() && f.alpha >= 0.0) => Err(PolicyError::Alpha(f.alpha)),
            ShareRule::Flowcon(f) if !(f.beta.is_finite() && f.beta >= 1.0) => Err(PolicyError::Beta(f.beta)),
            ShareRule::Flowcon(f) if f.interval == Span::ZERO => Err(PolicyError::Interval),
            ShareRule::Flowcon(_) => Ok(()),
            ShareRule::Gain(g) => g.validate(),
        }
    }
}

impl Gain {
    fn validate(&self) -> Result<(), PolicyError> {
        let numbers = [
            ("quality", self.quality, 100.0),
            ("past-flat", self.past_flat, 100.0),
            ("past-age", self.past_age, 100.0),
            ("slack", self.slack, 100.0),
            ("floor", self.floor, 1.0),
            ("switch", self.switch, 100.0),
            ("probe", self.probe, 1.0),
            ("look", self.look, 1.0),
        ];
        for (name, value, most) in numbers {
            if !(0.0..=most).contains(&value) {
                return Err(PolicyError::Gain { name, value, most });
            }
        }
        if self.shortest_look == Span::ZERO || self.shortest_look > self.longest_look {
            return Err(PolicyError::Looks);
        }
        Ok(())
    }
}
