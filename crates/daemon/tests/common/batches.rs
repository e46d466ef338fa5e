//! Batches for a journal: jobs and their samples.
#![allow(dead_code, unreachable_pub, reason = "each test file uses another part")]

use gainshare_core::model::{JobId, Time};
use gainshare_daemon::clock::Moment;
use gainshare_daemon::journal::{Batch, StoredSample};
use gainshare_daemon::record::{Change, JobRecord};
use gainshare_daemon::spec::JobSpec;

/// Samples of each job.
pub const SAMPLES: usize = 20;

pub fn moment(n: u64) -> Moment {
    Moment { time: Time(n * 1_000_000), unix_s: n as f64 }
}

pub fn record(id: u64) -> JobRecord {
    let spec = JobSpec { name: Some(format!("job-{id}")), ..JobSpec::new(vec!["true".into()]) };
    JobRecord::queued(JobId(id), spec, "me".into(), moment(id))
}

pub fn submitted(id: u64) -> Batch {
    let change = Change::Submitted { record: Box::new(record(id)) };
    Batch { changes: vec![(moment(id), Some(JobId(id)), change)], ..Batch::default() }
}

/// A job with its samples, all or nothing.
pub fn batch(id: u64) -> Batch {
    let sample =
        |seq| (JobId(id), StoredSample { seq, time: Time(id * 1000 + seq), step: Some(seq), value: seq as f64 });
    Batch { samples: (0..SAMPLES as u64).map(sample).collect(), ..submitted(id) }
}
