//! Chooses which of a job's metrics is its evaluation function.
//!
//! **Problem.** Jobs report losses, accuracies, learning rates, gradient norms, speeds and memory
//! side by side. Growth is measured on one of them, and a change in the middle would look like a
//! leap.
//!
//! **How.** A metric that the job names is chosen, and no other. Otherwise the first metric with a
//! rank ([`crate::ranking`]) is chosen; during the next [`TRIAL_READINGS`] readings a better-ranked
//! metric may still replace it. A [`Goal`] without a name restricts the choice to metrics that
//! improve in that direction: with `maximize` an accuracy is chosen although a loss is reported too.
//! Growth itself is measured by the size of the change (as FlowCon defines it), so the direction
//! decides which metric is followed and nothing else.
//!
//! **Properties.** *sticky*: after the trial the choice never changes. *named wins*: a named metric
//! is never replaced. Offering a name allocates nothing unless it is chosen.

use crate::ranking::{self, Goal, Rank};
use serde::{Deserialize, Serialize};

/// Readings after the first choice during which a better-ranked metric may replace it. One line or
/// one summary of any framework has fewer.
const TRIAL_READINGS: u32 = 20;

/// Chooses the metric; see the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Chooser {
    /// In canonical form.
    named: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    goal: Option<Goal>,
    chosen: Option<String>,
    #[serde(rename = "reports")]
    readings: u32,
}

/// What [`Chooser::offer`] decided about a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// The reading belongs to the chosen metric.
    Take,
    /// The reading is the first of a newly chosen metric. Earlier readings belong to another one.
    TakeAndForget,
    /// The reading belongs to another metric.
    Ignore,
}

impl Chooser {
    /// `named`: the metric that the job names as its evaluation function, if any. `goal`: the
    /// direction in which it wants its metric to go, if it says.
    pub fn new(named: Option<&str>, goal: Option<Goal>) -> Chooser {
        Chooser { named: named.map(ranking::canonical), goal, ..Chooser::default() }
    }

    /// The chosen metric, as the job writes it.
    pub fn metric(&self) -> Option<&str> {
        self.chosen.as_deref()
    }

    /// Decides about a reading by the name of its metric.
    pub fn offer(&mut self, metric: &str) -> Selection {
        let Some(chosen) = &self.chosen else {
            if !self.is_candidate(metric) {
                return Selection::Ignore;
            }
            self.chosen = Some(metric.to_string());
            return Selection::Take;
        };
        self.readings = self.readings.saturating_add(1);
        if chosen == metric {
            return Selection::Take;
        }
        let on_trial = self.named.is_none() && self.readings <= TRIAL_READINGS;
        let better = on_trial && self.rank(metric).is_some_and(|new| self.rank(chosen).is_none_or(|old| new < old));
        if !better {
            return Selection::Ignore;
        }
        self.chosen = Some(metric.to_string());
        Selection::TakeAndForget
    }

    /// Whether a metric of this name could be the job's evaluation function.
    pub fn is_candidate(&self, metric: &str) -> bool {
        match &self.named {
            Some(name) => ranking::is_canonical_of(name, metric),
            None => self.rank(metric).is_some(),
        }
    }

    fn rank(&self, metric: &str) -> Option<Rank> {
        ranking::rank(metric).filter(|rank| self.goal.is_none_or(|goal| goal == rank.goal()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sticky() {
        let mut c = Chooser::new(None, None);
        assert_eq!(c.offer("lr"), Selection::Ignore);
        assert_eq!(c.offer("val_loss"), Selection::Take);
        assert_eq!(c.offer("accuracy"), Selection::Ignore);
        assert_eq!(c.offer("loss"), Selection::TakeAndForget);
        for _ in 0..TRIAL_READINGS {
            assert_eq!(c.offer("loss"), Selection::Take);
        }
        let mut c = Chooser::new(None, None);
        c.offer("val_loss");
        for _ in 0..TRIAL_READINGS {
            c.offer("val_loss");
        }
        assert_eq!(c.offer("loss"), Selection::Ignore, "too late");
    }

    #[test]
    fn named_wins() {
        let mut c = Chooser::new(Some("Val Acc"), Some(Goal::Minimize));
        assert_eq!(c.offer("loss"), Selection::Ignore);
        assert_eq!(c.offer("val_acc"), Selection::Take);
        assert_eq!(c.offer("loss"), Selection::Ignore);
        assert_eq!(c.metric(), Some("val_acc"));
    }

    #[test]
    fn the_goal_decides_between_loss_and_accuracy() {
        let choice = |goal| {
            let mut c = Chooser::new(None, goal);
            for metric in ["loss", "lr", "val_accuracy", "accuracy"] {
                c.offer(metric);
            }
            c.metric().map(str::to_owned)
        };
        assert_eq!(choice(None).as_deref(), Some("loss"));
        assert_eq!(choice(Some(Goal::Minimize)).as_deref(), Some("loss"));
        assert_eq!(choice(Some(Goal::Maximize)).as_deref(), Some("accuracy"));
    }

    #[test]
    fn states_of_earlier_versions_are_readable() {
        let old = r#"{"named":"val_acc","chosen":"Val Acc","reports":7}"#;
        let mut c: Chooser = serde_json::from_str(old).unwrap();
        assert_eq!(c.metric(), Some("Val Acc"));
        assert_eq!(c.offer("Val Acc"), Selection::Take);
    }
}
