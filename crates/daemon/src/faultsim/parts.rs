//! What the modelled machine is made of: the ways in which a seed can fail, the checks that a test can turn off, and
//! records of jobs.

use crate::clock::Moment;
use crate::journal::LimitRow;
use crate::record::JobRecord;
use crate::spec::JobSpec;
use gainshare_core::invariants::{BrokenInvariant, Guarantee, ObservedNode};
use gainshare_core::model::JobId;
use gainshare_core::plan::Plan;
use gainshare_core::view::View;

/// A check of the product that a test turns off, to see that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Safeguard {
    /// The disk keeps what was synced.
    Sync,
    /// A daemon whose lease has lapsed writes no limits.
    Lapse,
    /// A supervisor whose job lives lets no other one begin.
    Lock,
    /// A supervisor that finds the intent of an earlier one lets the job not begin again.
    Intent,
}

/// Why a seed failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Invariant(#[from] BrokenInvariant),
    #[error("the journal cannot be opened after a crash: {0}")]
    Unopened(String),
    #[error("sample {seq} of {job} was acknowledged and is lost")]
    LostSample { job: JobId, seq: u64 },
    #[error("a daemon of epoch {epoch} wrote a limit of {job} after the guard had put its limits back")]
    StaleWrite { job: JobId, epoch: u64 },
    #[error("the limit of {job} is of plan {found}, and the journal's last plan is {last}")]
    UnknownLimit { job: JobId, found: u64, last: u64 },
    #[error("a full disk was reported as another error: {0}")]
    NotFull(String),
    #[error("the limits of {job} are changed and the journal does not list them")]
    UnlistedLimit { job: JobId },
    #[error("a plan breaks a promise: {0}")]
    Rejected(String),
    #[error("epoch {now} follows epoch {before}")]
    EpochWentBack { before: u64, now: u64 },
}

/// What a plan guarantees, for the checker of invariants. It does not ask the core's own check.
pub(super) fn planned(view: &View, plan: &Plan) -> ObservedNode {
    let guarantees = view.jobs.iter().filter_map(|job| {
        let target = plan.verdicts.get(&job.id)?.target?;
        Some(Guarantee {
            job: job.id.to_string(),
            guaranteed: target.share.cpu.get(),
            floor: job.floor.get(),
            limit: target.limit.cpu.get(),
            max: job.max.get(),
        })
    });
    ObservedNode { capacity: 1.0, guarantees: guarantees.collect() }
}

pub(super) fn limit_row(job: JobId) -> LimitRow {
    LimitRow { key: format!("group-{}", job.0), job, runtime: "process".to_owned(), original: "{}".to_owned() }
}

pub(super) fn record(id: JobId, submitted: Moment) -> JobRecord {
    let spec = JobSpec { name: Some(format!("job-{}", id.0)), ..JobSpec::new(vec!["true".to_owned()]) };
    JobRecord::queued(id, spec, "me".to_owned(), submitted)
}
