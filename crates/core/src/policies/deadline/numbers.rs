//! The numbers of the deadline rule.

use crate::model::Span;
use crate::policies::error::PolicyError;
use serde::{Deserialize, Serialize};

/// When a deadline that was not promised is looked at again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// At every decision: predictions sharpen and other jobs end early.
    #[default]
    Revised,
    /// Never: a job is admitted or refused when it arrives, as in ElasticFlow.
    Final,
}

/// How jobs are brought to their deadlines.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Finish {
    pub admission: Admission,
    /// Standard deviations of the prediction that are planned for.
    pub caution: f64,
    /// The part of the time left that is planned to be left over.
    pub margin: f64,
    /// Jobs are planned to end this long before their deadlines, where that is possible: a share that turns out too
    /// small in the last moments cannot be corrected any more. It is the time from a reading to a new share in force.
    #[serde(default = "none")]
    pub reserve: Span,
    /// Whether a deadline is promised only when the job was measured near the share that it needs. Recorded decisions
    /// of earlier versions promised it before.
    #[serde(default = "no_probes")]
    pub probes: bool,
    /// A reservation that is too large by less than this part stays as it is.
    pub give_back: f64,
    /// A job may have this many times the share that it was seen able to use, so that growing demand shows.
    pub room: f64,
    /// The part of the node that is never promised while other jobs run.
    pub keep: f64,
    /// The same while only promised jobs run.
    pub keep_idle: f64,
    /// The part of the node that all jobs have together whose deadlines cannot be met, while promised
    /// jobs could use it.
    pub hopeless: f64,
    /// The next decision comes after this part of the time to the nearest deadline,
    pub look: f64,
    /// but not sooner than this
    pub shortest_look: Span,
    /// and not later than this.
    pub longest_look: Span,
}

/// Recorded decisions of earlier versions have no reserve.
fn none() -> Span {
    Span::ZERO
}

fn no_probes() -> bool {
    false
}

impl Default for Finish {
    fn default() -> Self {
        Finish {
            admission: Admission::Revised,
            caution: 1.0,
            margin: 0.02,
            reserve: Span::from_millis(1500),
            probes: true,
            give_back: 0.1,
            room: 1.05,
            keep: 0.03,
            keep_idle: 0.01,
            hopeless: 0.03,
            look: 0.05,
            shortest_look: Span::from_secs(1),
            longest_look: Span::from_secs(30),
        }
    }
}

impl Finish {
    /// ElasticFlow's admission: announced paces, no second chance, nothing for refused jobs.
    pub fn elasticflow() -> Finish {
        Finish {
            admission: Admission::Final,
            caution: 0.0,
            reserve: Span::ZERO,
            probes: false,
            room: 1.0,
            keep: 0.001,
            hopeless: 0.001,
            ..Finish::default()
        }
    }

    pub(crate) fn validate(&self) -> Result<(), PolicyError> {
        let parts = [
            ("margin", self.margin, 0.5),
            ("give_back", self.give_back, 1.0),
            ("keep", self.keep, 0.5),
            ("keep_idle", self.keep_idle, 0.5),
            ("hopeless", self.hopeless, 1.0),
            ("look", self.look, 1.0),
            ("caution", self.caution, 10.0),
            ("room", self.room, 10.0),
        ];
        if let Some((name, value, largest)) = parts.into_iter().find(|(_, v, most)| !(0.0..=*most).contains(v)) {
            return Err(PolicyError::Deadline { name, value, largest });
        }
        if self.shortest_look == Span::ZERO || self.shortest_look > self.longest_look {
            return Err(PolicyError::DeadlineLooks);
        }
        Ok(())
    }
}
