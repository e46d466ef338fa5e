//! `batch/v1` Jobs that may be moved.
//!
//! **Problem.** People have Jobs, not TrainingJobs. The cluster's Job controller makes their pods,
//! and a Job's template cannot change while it runs.
//!
//! **How.** The annotation `gainshare.dev/adopt: "true"` lets the operator follow a Job and move
//! it; the Job controller still makes every pod. The operator keeps a [`Journal`] in an annotation
//! of the Job and writes it before each action of a move: our finalizer on the pod, so that its end
//! is read; `suspend: true`, by which the Job controller asks the pod to end; proof of stop, as for
//! TrainingJobs; and then, in one request, a preference for the chosen node in the template and
//! `suspend: false`. The Job controller does not count the end of a suspended pod as a failure.
//!
//! **A preference, not a pin.** The template of a running Job cannot change, so what we write there
//! stays after an uninstall. A required node that vanishes would keep the Job from ever running
//! again; a preferred one does not. So the cluster's scheduler decides in the end, and the journal
//! says where the Job went.
//!
//! **Never two live attempts.** `podReplacementPolicy: Failed` is required: the Job controller
//! itself makes no second pod before the first has ended. One case remains, a pod whose object is
//! removed by force while the Job is suspended; our finalizer closes it.
//!
//! [`Journal`]: gainshare_kube_api::adopted::Journal

mod machine;
mod run;

#[cfg(test)]
pub(super) use machine::test_step;
pub(crate) use run::give_back;
pub(super) use run::start;
