//! Whether a deadline will be met, and how people are told: the same words on one machine and in a cluster.
//!
//! **Terms.** A *prospect* is how a deadline stands. A deadline that is promised, or is expected to be met, has a
//! *certainty*: how much of the predicted interval lies before the last moment that counts as in time.

use std::fmt;

/// How far the interval of a predicted end is from the deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certainty {
    /// The whole interval lies before the deadline, or nothing is predicted.
    Sure,
    /// The interval reaches beyond the deadline.
    Likely,
    /// More than half of the interval lies beyond the deadline.
    Doubtful,
}

impl Certainty {
    /// The certainty for a job that ends at `mid_s`, at the latest at `latest_s`, and is in time until `until_s`. All
    /// three are seconds of one clock.
    pub fn of(mid_s: f64, latest_s: f64, until_s: f64) -> Certainty {
        if mid_s > until_s {
            Certainty::Doubtful
        } else if latest_s > until_s {
            Certainty::Likely
        } else {
            Certainty::Sure
        }
    }
}

/// How a deadline stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prospect {
    /// Nothing can be predicted yet.
    Unknown,
    /// The deadline will be met, as surely as this says.
    InTime(Certainty),
    /// The deadline will be missed, as far as can be predicted.
    Late,
    /// The job succeeded in time.
    Met,
    /// The deadline passed, or the job failed.
    Missed,
}

impl Prospect {
    /// What would become of the deadline of a job that is not submitted yet: `would make its deadline`. `None` if that
    /// is not known.
    pub fn of_plan(self) -> Option<&'static str> {
        match self {
            Prospect::Unknown => None,
            Prospect::InTime(Certainty::Sure) | Prospect::Met => Some("would make its deadline"),
            Prospect::InTime(Certainty::Likely) => Some("would probably make its deadline"),
            Prospect::InTime(Certainty::Doubtful) => Some("might miss its deadline"),
            Prospect::Late | Prospect::Missed => Some("would miss its deadline"),
        }
    }
}

/// For people: what is said of the deadline, such as `probably on time`.
impl fmt::Display for Prospect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Prospect::Unknown => "not known yet",
            Prospect::InTime(Certainty::Sure) => "on time",
            Prospect::InTime(Certainty::Likely) => "probably on time",
            Prospect::InTime(Certainty::Doubtful) => "may be missed",
            Prospect::Late => "will be missed",
            Prospect::Met => "met",
            Prospect::Missed => "missed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_certainty_is_how_much_of_the_interval_lies_before_the_deadline() {
        assert_eq!(Certainty::of(90.0, 100.0, 100.0), Certainty::Sure);
        assert_eq!(Certainty::of(90.0, 101.0, 100.0), Certainty::Likely);
        assert_eq!(Certainty::of(100.0, 101.0, 100.0), Certainty::Likely);
        assert_eq!(Certainty::of(100.5, 101.0, 100.0), Certainty::Doubtful);
    }

    #[test]
    fn each_prospect_has_words_of_its_own() {
        let certain = [Certainty::Sure, Certainty::Likely, Certainty::Doubtful].map(Prospect::InTime);
        let others = [Prospect::Unknown, Prospect::Late, Prospect::Met, Prospect::Missed];
        let words: std::collections::BTreeSet<String> =
            certain.iter().chain(&others).map(ToString::to_string).collect();
        assert_eq!(words.len(), certain.len() + others.len());
        let of_plans: std::collections::BTreeSet<_> =
            certain.into_iter().chain([Prospect::Late]).filter_map(Prospect::of_plan).collect();
        assert_eq!(of_plans.len(), 4);
    }
}
