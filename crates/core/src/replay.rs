//! Recorded decisions, and making their plans again.
//!
//! **Problem.** "Why did this job get 5 % at three o'clock?" can be answered only if the decision
//! can be repeated afterwards.
//!
//! **Approach.** A [`RecordedDecision`] holds all that a plan depends on: the policy, its memory
//! before the step and the view. It is written as JSON. [`RecordedDecision::replay`] makes the plan
//! again and compares it with the recorded one. The decisions use no clock and no chance, so the
//! two plans are the same, bit for bit; a [`Difference`] means another version of the code or a
//! file that was changed. A view with numbers that no machine has is refused: rules count cores and tasks, and would
//! count for ever.

use crate::control::{Control, Memory};
use crate::model::{JobId, NodeId};
use crate::plan::{Plan, Verdict};
use crate::policy::Policy;
use crate::view::View;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// The version of the recorded form that this code writes and reads.
pub const FORMAT: u32 = 1;

/// No machine has more cores than this, or cores that are faster than this many reference cores.
const MOST_CORES: f64 = 1e6;

/// No job has more tasks of one role than this.
const MOST_TASKS: u32 = 10_000;

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
    #[error(
        "{node} of the recorded view has {cores:e} cores of speed {speed:e}, and no machine has more than {MOST_CORES:e} \
         of either: the file was changed after it was recorded"
    )]
    AbsurdNode { node: NodeId, cores: f64, speed: f64 },
    #[error(
        "{job} of the recorded view may have {count} tasks of one role, and no job has more than {MOST_TASKS}: the file \
         was changed after it was recorded"
    )]
    AbsurdTasks { job: JobId, count: u32 },
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
        refuse_absurd_numbers(&self.view)?;
        let mut control = Control::resume(self.policy.clone(), self.memory.clone());
        let plan = control.step(&self.view, |_| ()).ok_or(ReplayError::NothingDue)?;
        let differences = differences(&self.plan, &plan);
        Ok(Replay { plan, differences })
    }
}

/// Refuses machines and jobs that cannot exist.
fn refuse_absurd_numbers(view: &View) -> Result<(), ReplayError> {
    let is_possible = |number: f64| (0.0..=MOST_CORES).contains(&number);
    if let Some(node) = view.nodes.iter().find(|node| !is_possible(node.cores) || !is_possible(node.speed)) {
        return Err(ReplayError::AbsurdNode { node: node.id, cores: node.cores, speed: node.speed });
    }
    for job in &view.jobs {
        let roles = job.tasks.iter().flat_map(|group| [group.servers, group.workers]);
        let most = roles.flat_map(|role| [role.count, role.min, role.max]).max();
        if let Some(count) = most.filter(|most| *most > MOST_TASKS) {
            return Err(ReplayError::AbsurdTasks { job: job.id, count });
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decider::Decider;
    use crate::fixtures::{node, running};
    use crate::model::Time;
    use crate::policy::Preset;
    use crate::tasks::{RoleSpec, TaskGroup, TrainingMode};

    fn record() -> RecordedDecision {
        let view = View { now: Time(1), nodes: vec![node(0)], jobs: vec![running(1, 0), running(2, 0)] };
        let decision = Decider::new(Policy::from(Preset::Gainshare)).decide_recorded(view).decision();
        decision.expect("two jobs came").record().expect("it was recorded")
    }

    #[test]
    fn numbers_that_no_machine_has_are_refused() {
        assert_eq!(record().replay().expect("it can be replayed").differences, vec![]);
        for (cores, speed) in [(1e16, 1.0), (-1.0, 1.0), (f64::NAN, 1.0), (4.0, 1e300)] {
            let mut record = record();
            (record.view.nodes[0].cores, record.view.nodes[0].speed) = (cores, speed);
            let error = record.replay().expect_err("no machine is like this");
            assert!(matches!(error, ReplayError::AbsurdNode { .. }), "{cores}, {speed}: {error}");
        }
        let role = |max| RoleSpec {
            count: 1,
            min: 1,
            max,
            cores: 1.0,
            memory_bytes: 1 << 30,
            least_cores: 0.1,
            max_cores: 4.0,
        };
        let mut record = record();
        record.view.jobs[0].tasks = Some(TaskGroup {
            mode: TrainingMode::Sync,
            servers: role(1),
            workers: role(u32::MAX),
            tasks: vec![],
            steps: 0.0,
            steps_left: None,
            traffic: vec![],
        });
        let error = record.replay().expect_err("no job has so many tasks");
        assert_eq!(error, ReplayError::AbsurdTasks { job: JobId(1), count: u32::MAX });
    }
}
