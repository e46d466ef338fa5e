//! What the controller still does while sharing is switched off: it never blocks a deletion.
//!
//! **Problem.** The switch stops every decision. But training jobs and their pods carry our finalizers, and an
//! object with a finalizer stays until the operator has removed it: a drain, an autoscaler or the deletion of a
//! namespace would wait for ever.
//!
//! **How.** [`limit`] keeps those effects of a step that complete a deletion that a user or another program asked for,
//! and drops all others: no pod is made, started or stopped, and no job is marked as ours.

use super::action::{Action, Step};
use crate::jobs::workload::JournalStep;
use crate::state::snapshot::{JobSnapshot, PodSnapshot};

/// The part of a step that is carried out while sharing is switched off.
pub(super) fn limit(job: &JobSnapshot, pods: &[PodSnapshot], next: Step) -> Step {
    let pod_is_deleted = pods.iter().any(|pod| pod.deleted.is_some() && pod.owner.as_ref() == Some(&job.uid));
    let completes_a_deletion = |action: &Action| match action {
        Action::LetGo { .. } | Action::Release => true,
        // The end of a pod must be on record before its finalizer goes.
        Action::Write(step, _) => job.deleting || (pod_is_deleted && *step == JournalStep::Stopped),
        Action::Delete { .. } => job.deleting,
        Action::Hold | Action::DeleteJob | Action::Create { .. } | Action::Open { .. } | Action::RemoveOrder => false,
    };
    Step { actions: next.actions.into_iter().filter(completes_a_deletion).collect(), wake: next.wake }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::names::PodUid;
    use gainshare_kube_api::training_job::TrainingJobStatus;

    fn effects() -> Vec<Action> {
        let (pod, uid) = ("run-1".to_owned(), PodUid::from("p"));
        vec![
            Action::Write(JournalStep::Stopped, Box::<TrainingJobStatus>::default()),
            Action::Write(JournalStep::Planned, Box::<TrainingJobStatus>::default()),
            Action::Hold,
            Action::Release,
            Action::DeleteJob,
            Action::Create { epoch: 1 },
            Action::Open { pod: pod.clone(), uid: uid.clone(), node: None },
            Action::Delete { pod: pod.clone(), uid: uid.clone() },
            Action::LetGo { pod, uid },
        ]
    }

    fn names(next: &Step) -> Vec<&'static str> {
        let name = |action: &Action| match action {
            Action::Write(step, _) => step.name(),
            Action::Release => "release",
            Action::Delete { .. } => "delete",
            Action::LetGo { .. } => "let-go",
            _ => "something else",
        };
        next.actions.iter().map(name).collect()
    }

    #[test]
    fn deletions_are_completed_and_nothing_else_is_done() {
        let job = JobSnapshot { uid: "u".into(), ..JobSnapshot::default() };
        let next = || Step { actions: effects(), wake: None };
        assert_eq!(names(&limit(&job, &[], next())), ["release", "let-go"]);
        let asked = (jiff::Timestamp::UNIX_EPOCH, jiff::Timestamp::UNIX_EPOCH);
        let pod = PodSnapshot { owner: Some("u".into()), deleted: Some(asked), ..PodSnapshot::default() };
        assert_eq!(names(&limit(&job, &[pod], next())), ["stopped", "release", "let-go"], "a drained pod may go");
        let deleting = JobSnapshot { deleting: true, ..job };
        assert_eq!(names(&limit(&deleting, &[], next())), ["stopped", "planned", "release", "delete", "let-go"]);
    }
}
