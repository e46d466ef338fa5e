//! What is done about a job of tasks while sharing is switched off: deletions are completed, and nothing else.
//!
//! **Problem.** The switch stops every decision. But the pods of tasks carry our finalizer, and a pod with a finalizer
//! stays until the operator has removed it: a drain or an autoscaler would wait for ever.
//!
//! **How.** [`step`] answers with the parts of a step that complete a deletion that a user or another program asked
//! for. The end of a task is written to the journal first, as always. No pod is made, opened or stopped. A task that
//! was lost is replaced when sharing is on again.

use super::action::{Snapshot, Step};
use super::machine::{let_go, record_ends, step as usual_step};
use crate::state::snapshot::PodSnapshot;
use gainshare_kube_api::training_job::State;
use std::collections::BTreeSet;

/// The part of a step that is carried out while sharing is switched off.
pub(super) fn step(snapshot: &Snapshot<'_>) -> Step {
    let job = snapshot.job;
    if job.is_foreign || job.deleting {
        return usual_step(snapshot);
    }
    let may_go = |pod: &&PodSnapshot| pod.deleted.is_some() && pod.has_finalizer && snapshot.is_stopped(pod);
    let leaving: Vec<&PodSnapshot> = snapshot.own_pods().filter(may_go).collect();
    let (journal, current, wanted) = (&job.status.journal, snapshot.current_pods(), job.wanted());
    let is_over = journal.restarting || matches!(journal.state, State::Succeeded | State::Failed);
    let spec = job.spec.as_ref().ok().filter(|spec| !is_over && !spec.options.suspend);
    // The ends of these pods count for the job, and are not on record yet.
    let counted: BTreeSet<&str> = current
        .iter()
        .filter(|(task, _)| spec.is_some() && task.index < wanted.get(&task.role).copied().unwrap_or(0))
        .map(|(_, pod)| pod.uid.as_str())
        .collect();
    let is_counted = |pod: &PodSnapshot| counted.contains(pod.uid.as_str());
    if let Some(spec) = spec.filter(|_| leaving.iter().any(|pod| is_counted(pod)))
        && let Some(record) = record_ends(snapshot, spec, &current)
    {
        return record;
    }
    let recorded = leaving.into_iter().filter(|pod| !is_counted(pod));
    Step { actions: recorded.map(let_go).collect(), wake: None }
}
