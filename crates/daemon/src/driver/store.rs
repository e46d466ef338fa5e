//! The driver's way to the journal.
//!
//! *Facts* (a job ended) are true whether or not the disk takes them: they are kept until it does.
//! *Intents* (a submission, a plan, a start) become true by being written: without the disk they
//! are refused or put off. Pushed reports are committed together, once for all pushes of a round,
//! and acknowledged after that commit.

use super::jobs::JobTable;
use crate::clock::Moment;
use crate::error::Refusal;
use crate::journal::{Batch, Journal, StoredSample};
use crate::metrics::Metrics;
use crate::record::Change;
use gainshare_core::decider::Decider;
use gainshare_core::model::JobId;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Samples held back while the disk takes none; beyond this the oldest go.
const MAX_UNSAVED_SAMPLES: usize = 50_000;

/// The answer to a push, sent after its commit.
pub(super) type Acknowledgement = oneshot::Sender<Result<(), Refusal>>;

pub(super) struct Store {
    pub(super) journal: Journal,
    /// Facts and samples that the disk does not have yet.
    unsaved: Batch,
    control_changed: bool,
    unacknowledged: Vec<Acknowledgement>,
    metrics: Arc<Metrics>,
}

impl Store {
    pub(super) fn new(journal: Journal, metrics: Arc<Metrics>) -> Store {
        Store { journal, unsaved: Batch::default(), control_changed: false, unacknowledged: Vec::new(), metrics }
    }

    /// Records what has happened: it is true at once, and on disk as soon as the disk takes it.
    pub(super) fn fact(&mut self, jobs: &mut JobTable, at: Moment, id: Option<JobId>, change: Change) {
        if let Some(job) = id.and_then(|id| jobs.get_mut(&id)) {
            job.record.take(at, &change);
            let record = job.record.clone();
            self.unsaved.records.retain(|r| r.id != record.id);
            self.unsaved.records.push(record);
        }
        self.unsaved.changes.push((at, id, change));
    }

    pub(super) fn control_changed(&mut self) {
        self.control_changed = true;
    }

    pub(super) fn add_limit(&mut self, row: crate::journal::LimitRow) {
        self.unsaved.limits.push(row);
    }

    /// The limits of this key were put back.
    pub(super) fn remove_limit(&mut self, key: String) {
        self.unsaved.limits.retain(|row| row.key != key);
        self.unsaved.released.push(key);
    }

    /// The job's earlier samples belong to another metric.
    pub(super) fn clear_samples(&mut self, id: JobId) {
        self.unsaved.samples.retain(|(owner, _)| *owner != id);
        self.unsaved.cleared.push(id);
    }

    pub(super) fn add_sample(&mut self, id: JobId, sample: StoredSample) {
        self.unsaved.samples.push((id, sample));
        let surplus = self.unsaved.samples.len().saturating_sub(MAX_UNSAVED_SAMPLES);
        if surplus > 0 {
            self.unsaved.samples.drain(..surplus);
            self.metrics.samples_dropped.inc_by(surplus as u64);
        }
    }

    /// From now on only every `stride`th sample is kept.
    pub(super) fn thin_samples(&mut self, id: JobId, stride: u64) {
        self.unsaved.thin.push((id, stride));
    }

    /// To be answered by [`Store::acknowledge`].
    pub(super) fn acknowledge_later(&mut self, reply: Acknowledgement) {
        self.unacknowledged.push(reply);
    }

    pub(super) fn has_unacknowledged(&self) -> bool {
        !self.unacknowledged.is_empty()
    }

    /// Answers all pushes since the last call with the result of the commit.
    pub(super) fn acknowledge(&mut self, committed: &Result<(), Refusal>) {
        for reply in self.unacknowledged.drain(..) {
            let _ = reply.send(committed.clone());
        }
    }

    pub(super) fn is_clean(&self, jobs: &JobTable) -> bool {
        self.unsaved.is_empty() && !self.control_changed && !jobs.values().any(|j| j.unsaved)
    }

    /// Writes an intent together with everything unsaved before it. On failure the intent did not
    /// happen, and the facts stay.
    pub(super) fn save_with(&mut self, jobs: &mut JobTable, control: &Decider, intent: Batch) -> Result<(), Refusal> {
        // Only the driver itself makes samples and positions; an intent never carries any.
        let Batch { changes, records, limits, released, .. } = intent;
        let counts = (self.unsaved.changes.len(), self.unsaved.limits.len(), self.unsaved.released.len());
        let old_records = self.unsaved.records.clone();
        self.unsaved.changes.extend(changes);
        for record in records {
            self.unsaved.records.retain(|r| r.id != record.id);
            self.unsaved.records.push(record);
        }
        self.unsaved.limits.extend(limits);
        self.unsaved.released.extend(released);
        self.unsaved.control = self.control_changed.then(|| control.clone());
        let positions = jobs.iter().filter(|(_, j)| j.unsaved).filter_map(|(id, j)| Some((*id, j.position()?)));
        self.unsaved.positions.extend(positions);
        if self.unsaved.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let result = self.journal.commit(&self.unsaved);
        self.metrics.journal_seconds.observe(begun.elapsed().as_secs_f64());
        match result {
            Ok(()) => {
                self.unsaved = Batch::default();
                self.control_changed = false;
                jobs.values_mut().for_each(|j| j.unsaved = false);
                Ok(())
            }
            Err(e) => {
                self.unsaved.changes.truncate(counts.0);
                self.unsaved.limits.truncate(counts.1);
                self.unsaved.released.truncate(counts.2);
                self.unsaved.records = old_records;
                self.unsaved.positions.clear();
                self.unsaved.control = None;
                Err(e.into())
            }
        }
    }
}
