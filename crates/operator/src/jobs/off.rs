//! What the controller still does while sharing is switched off: it never blocks a deletion.
//!
//! **Problem.** The switch stops every decision. But training jobs and their pods carry our finalizers, and an
//! object with a finalizer stays until the operator has removed it: a drain, an autoscaler or the deletion of a
//! namespace would wait for ever.
//!
//! **How.** [`limit`] keeps those effects of a step that complete a deletion which somebody else has asked for,
//! and drops all others: no pod is made, started or stopped, and no job is marked as ours.

use super::machine::{Do, Next};
use super::seen::{JobSeen, PodSeen};

/// The part of a step that is carried out while sharing is switched off.
pub(super) fn limit(job: &JobSeen, pods: &[PodSeen], next: Next) -> Next {
    let pod_is_deleted = pods.iter().any(|pod| pod.deleted.is_some() && pod.owner.as_deref() == Some(&job.uid));
    let completes_a_deletion = |todo: &Do| match todo {
        Do::LetGo { .. } | Do::Release => true,
        // The end of a pod must be on record before its finalizer goes.
        Do::Write(step, _) => job.deleting || (pod_is_deleted && *step == "stopped"),
        Do::Delete { .. } => job.deleting,
        Do::Hold | Do::DeleteJob | Do::Create { .. } | Do::Open { .. } | Do::Taken => false,
    };
    Next { todo: next.todo.into_iter().filter(completes_a_deletion).collect(), wake: next.wake }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::training_job::TrainingJobStatus;

    fn effects() -> Vec<Do> {
        let (pod, uid) = ("run-1".to_owned(), "p".to_owned());
        vec![
            Do::Write("stopped", Box::<TrainingJobStatus>::default()),
            Do::Write("planned", Box::<TrainingJobStatus>::default()),
            Do::Hold,
            Do::Release,
            Do::DeleteJob,
            Do::Create { epoch: 1 },
            Do::Open { pod: pod.clone(), uid: uid.clone(), node: None },
            Do::Delete { pod: pod.clone(), uid: uid.clone() },
            Do::LetGo { pod, uid },
        ]
    }

    fn names(next: &Next) -> Vec<&'static str> {
        let name = |todo: &Do| match todo {
            Do::Write(step, _) => *step,
            Do::Release => "release",
            Do::Delete { .. } => "delete",
            Do::LetGo { .. } => "let-go",
            _ => "something else",
        };
        next.todo.iter().map(name).collect()
    }

    #[test]
    fn deletions_are_completed_and_nothing_else_is_done() {
        let job = JobSeen { uid: "u".to_owned(), ..JobSeen::default() };
        let next = || Next { todo: effects(), wake: None };
        assert_eq!(names(&limit(&job, &[], next())), ["release", "let-go"]);
        let asked = (jiff::Timestamp::UNIX_EPOCH, jiff::Timestamp::UNIX_EPOCH);
        let pod = PodSeen { owner: Some("u".to_owned()), deleted: Some(asked), ..PodSeen::default() };
        assert_eq!(names(&limit(&job, &[pod], next())), ["stopped", "release", "let-go"], "a drained pod may go");
        let deleting = JobSeen { deleting: true, ..job };
        assert_eq!(names(&limit(&deleting, &[], next())), ["stopped", "planned", "release", "delete", "let-go"]);
    }
}
