//! The last decision about where jobs run or about the sizes of their tasks, for users who ask why
//! (`kubectl gainshare explain JOB --dump FILE`).
//!
//! **Problem.** A record needs the policy's memory from before the step. Copying it takes tens of
//! milliseconds in a pass over 50,000 jobs, and almost no decision is ever asked for.
//!
//! **How.** A decision over at most [`RECORDED_JOBS`] jobs is always recorded, and the last one is kept by
//! `Arc`. For more jobs a request switches recording on for the next decision of that policy, and waits for
//! it. Requests are answered in the pass itself ([`RecordRequests::answer`]), which owns all state. The last decision
//! about the sizes of tasks is put here when it is made ([`RecordRequests::put_sizes`]), and answered at once.

use super::RECORDED_JOBS;
use super::decide::Placements;
use gainshare_core::decider::Decision as RecordedPlan;
use gainshare_core::model::JobId;
use gainshare_kube_api::names::JobUid;
use gainshare_kube_api::training_job::JobPolicy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::oneshot;

/// A decision, and the number of the job in it that was asked for.
#[derive(Debug, Clone)]
pub(crate) struct JobDecision {
    pub(crate) job: JobId,
    pub(crate) decision: Arc<RecordedPlan>,
}

/// Why there is no recorded decision about a job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("the operator places no job with the uid {uid}: it has ended, or it was created a moment ago")]
    UnknownJob { uid: JobUid },
    #[error("the job's policy is `{}`, under which the cluster's own scheduler places it: nothing is decided here", policy.name())]
    NotPlaced { policy: JobPolicy },
    #[error(
        "nothing has been decided about the job since this operator leads: does the node agent of its node report?"
    )]
    Undecided,
    #[error("decisions about the sizes of tasks are recorded for at most {RECORDED_JOBS} jobs; this cluster has more")]
    TooManyJobs,
}

/// One user's request.
struct RecordRequest {
    /// Of the TrainingJob or Job.
    uid: JobUid,
    reply: oneshot::Sender<Result<JobDecision, RecordError>>,
}

/// Requests that wait for the next pass.
#[derive(Default)]
pub(crate) struct RecordRequests {
    pending: Mutex<Vec<RecordRequest>>,
    /// The last decision about the sizes of each job's tasks, by uid.
    sizes: Mutex<HashMap<JobUid, Result<JobDecision, RecordError>>>,
}

impl RecordRequests {
    /// Replaces what is known about the sizes of tasks.
    pub(crate) fn put_sizes(&self, sizes: HashMap<JobUid, Result<JobDecision, RecordError>>) {
        *self.sizes.lock() = sizes;
    }

    /// Asks for the last decision about a job. The answer about where it runs comes with one of the next passes.
    pub(crate) fn ask(&self, uid: JobUid) -> oneshot::Receiver<Result<JobDecision, RecordError>> {
        let (reply, answer) = oneshot::channel();
        let sizes = self.sizes.lock().get(&uid).cloned();
        if let Some(recorded) = sizes {
            let _ = reply.send(recorded);
            return answer;
        }
        self.pending.lock().push(RecordRequest { uid, reply });
        answer
    }

    /// Answers after a pass. Requests that need the next decision stay.
    pub(super) fn answer(&self, decision: &mut Placements) {
        let mut pending = self.pending.lock();
        for request in std::mem::take(&mut *pending) {
            // A user who does not wait any longer needs no answer.
            if request.reply.is_closed() {
                continue;
            }
            match decision.recorded_about(&request.uid) {
                Some(answer) => drop(request.reply.send(answer)),
                None => pending.push(request),
            }
        }
    }

    /// Answers when there are no jobs.
    pub(super) fn refuse_all(&self) {
        for request in self.pending.lock().drain(..) {
            let _ = request.reply.send(Err(RecordError::UnknownJob { uid: request.uid }));
        }
    }
}

impl Placements {
    /// The last decision about a job; `None` if the next one will be recorded and the request has to wait.
    fn recorded_about(&mut self, uid: &JobUid) -> Option<Result<JobDecision, RecordError>> {
        let Some(memory) = self.jobs.get(uid) else {
            return Some(Err(RecordError::UnknownJob { uid: uid.clone() }));
        };
        let (job, policy) = (memory.id, memory.facts.policy);
        if !policy.places_pods() {
            return Some(Err(RecordError::NotPlaced { policy }));
        }
        let has_job = |decision: &&Arc<RecordedPlan>| decision.view.jobs.binary_search_by_key(&job, |j| j.id).is_ok();
        if let Some(decision) = self.recorded.get(&policy).filter(has_job) {
            return Some(Ok(JobDecision { job, decision: decision.clone() }));
        }
        let jobs = self.jobs.values().filter(|memory| memory.facts.policy == policy).count();
        if jobs <= RECORDED_JOBS {
            return Some(Err(RecordError::Undecided));
        }
        self.record_next.insert(policy);
        None
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
