//! Recorded decisions, and making their plans again.
//!
//! **Problem.** "Why did this job get 5 % at three o'clock?" can be answered only if the decision
//! can be repeated afterwards.
//!
//! **Approach.** A [`RecordedDecision`] holds all that a plan depends on: the policy, its memory
//! before the step and the view. It is written as JSON. [`RecordedDecision::replay`] makes the plan
//! again and compares it with the recorded one. The decisions use no clock and no chance, so the
//! two plans are the same, bit for bit; a [`Difference`] means another version of the code or a
//! file that was changed.

use crate::control::{Control, Memory};
use crate::model::JobId;
use crate::plan::{Plan, Verdict};
use crate::policy::Policy;
use crate::view::View;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// The version of the recorded form that this code writes and reads.
pub const FORMAT: u32 = 1;

/// A decision with all that it depended on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordedDecision {
    pub format: u32,
    pub policy: Policy,
    /// What the policy remembered before the step.
    pub memory: Memory,
    pub view: View,
    /// The plan that was made.
    pub plan: Plan,
}

/// One place where a replayed plan is not the recorded one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The part of the plan, such as `generation` or `job-3 target`.
    pub place: String,
    pub recorded: String,
    pub replayed: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: recorded {}, replayed {}", self.place, self.recorded, self.replayed)
    }
}

/// Why a record cannot be replayed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ReplayError {
    #[error(
        "the decision is recorded in format {0}, but this version reads format {FORMAT}: use the version that recorded it"
    )]
    OtherFormat(u32),
    #[error("the recorded view is not sorted by id: the file was changed after it was recorded")]
    Unsorted,
    #[error("nothing is due in the recorded view: the memory in the file is not the one from before the decision")]
    NothingDue,
}

/// A plan that was made again.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    pub plan: Plan,
    /// Empty if the plan is the recorded one, bit for bit.
    pub differences: Vec<Difference>,
}

impl RecordedDecision {
    /// Makes the plan again and compares.
    pub fn replay(&self) -> Result<Replay, ReplayError> {
        if self.format != FORMAT {
            return Err(ReplayError::OtherFormat(self.format));
        }
        let sorted =
            self.view.jobs.is_sorted_by(|a, b| a.id < b.id) && self.view.nodes.is_sorted_by(|a, b| a.id < b.id);
        if !sorted {
            return Err(ReplayError::Unsorted);
        }
        let mut control = Control::resume(self.policy.clone(), self.memory.clone());
        let plan = control.step(&self.view, |_| ()).ok_or(ReplayError::NothingDue)?;
        let differences = differences(&self.plan, &plan);
        Ok(Replay { plan, differences })
    }
}

/// Where `replayed` is not `recorded`. Texts are compared: Rust prints a number so that no two
/// numbers print alike, also not 0 and −0.
fn differences(recorded: &Plan, replayed: &Plan) -> Vec<Difference> {
    let mut found = vec![];
    let mut compare = |place: String, a: String, b: String| {
        if a != b {
            found.push(Difference { place, recorded: a, replayed: b });
        }
    };
    compare("generation".into(), recorded.generation.to_string(), replayed.generation.to_string());
    compare("at".into(), format!("{:?}", recorded.at), format!("{:?}", replayed.at));
    compare("next due".into(), format!("{:?}", recorded.next_due), format!("{:?}", replayed.next_due));
    compare("starts".into(), format!("{:?}", recorded.starts), format!("{:?}", replayed.starts));
    compare("moves".into(), format!("{:?}", recorded.moves), format!("{:?}", replayed.moves));
    let jobs: BTreeSet<JobId> = recorded.verdicts.keys().chain(replayed.verdicts.keys()).copied().collect();
    for job in jobs {
        match (recorded.verdicts.get(&job), replayed.verdicts.get(&job)) {
            (Some(a), Some(b)) => {
                for ((part, a), (_, b)) in parts(a).into_iter().zip(parts(b)) {
                    compare(format!("{job} {part}"), a, b);
                }
                let tasks = |plan: &Plan| format!("{:?}", plan.tasks.get(&job));
                compare(format!("{job} tasks"), tasks(recorded), tasks(replayed));
            }
            (a, b) => {
                let verdict = |v: Option<&Verdict>| v.map_or("no verdict".to_owned(), |v| v.reason.to_string());
                compare(job.to_string(), verdict(a), verdict(b));
            }
        }
    }
    found
}

fn parts(verdict: &Verdict) -> [(&'static str, String); 6] {
    [
        ("target", format!("{:?}", verdict.target)),
        ("growth", format!("{:?}", verdict.growth)),
        ("category", verdict.category.name().to_owned()),
        ("reason", format!("{:?}", verdict.reason)),
        ("standing", format!("{:?}", verdict.standing)),
        ("promise", format!("{:?}", verdict.least)),
    ]
}
