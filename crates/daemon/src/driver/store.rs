//! The driver's way to the journal.
//!
//! *Facts* (a job ended) are true whether or not the disk takes them: they are kept until it does.
//! *Intents* (a submission, a plan, a start) become true by being written: without the disk they
//! are refused or put off. Pushed reports are committed together, once for all pushes of a round,
//! and acknowledged after that commit.
//!
//! Samples of files and the positions up to which the files were read are *held*: they are
//! committed every [`FLUSH_PACE`], because a job that reports every second would else cost several
//! pages of the journal every second. A daemon that is killed reads its files again from the last
//! position. Samples of files and the position of their job are always committed together. Numbers of samples are
//! part of the position, so a sample that is read again replaces itself.
//!
//! A position is many times as large as a sample. So the samples of a push are committed *alone* where the journal
//! has a position from which they lead to the present state; the position follows with the next flush. A daemon that
//! is killed before that feeds them to the tracker again ([`Store::replay_samples`]).

use super::jobs::{Job, JobTable};
use super::reports::{ProgressReading, Reports};
use crate::clock::Moment;
use crate::error::Refusal;
use crate::journal::{Batch, Journal, SAMPLES_KEPT, StoredSample, Thinning};
use crate::metrics::Metrics;
use crate::record::Change;
use gainshare_core::decider::Decider;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::signal::Sample;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Samples held back while the disk takes none; beyond this the oldest go.
const MAX_UNSAVED_SAMPLES: usize = 50_000;

/// How often held samples and positions are committed.
pub(super) const FLUSH_PACE: Span = Span::from_secs(5);

/// This many held samples are committed at the next beat.
const MAX_HELD_SAMPLES: usize = 5_000;

/// Where samples come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// From output, a file or an endpoint: they can be read again.
    Read,
    /// The job pushed them.
    Pushed,
}

/// The answer to a push, sent after its commit.
pub(super) type Acknowledgement = oneshot::Sender<Result<(), Refusal>>;

pub(super) struct Store {
    pub(super) journal: Journal,
    /// Facts and samples that the disk does not have yet.
    unsaved: Batch,
    held: HeldSamples,
    /// Jobs whose held samples go with the next commit.
    flushed: BTreeSet<JobId>,
    /// Jobs whose held samples go with the next commit, without their position.
    pushed: BTreeSet<JobId>,
    /// Everything that is held goes with the next commit.
    flushes_all: bool,
    next_flush: Time,
    control_changed: bool,
    unacknowledged: Vec<Acknowledgement>,
    metrics: Arc<Metrics>,
}

/// Changes of samples that wait for the next flush, as in [`Batch`].
#[derive(Default)]
struct HeldSamples {
    cleared: Vec<JobId>,
    samples: Vec<(JobId, StoredSample)>,
    thin: Vec<Thinning>,
}

/// Moves the entries of one list that are wanted to the end of another one.
fn transfer<T>(from: &mut Vec<T>, to: &mut Vec<T>, is_wanted: impl Fn(&T) -> bool) {
    let (wanted, kept): (Vec<T>, Vec<T>) = std::mem::take(from).into_iter().partition(is_wanted);
    *from = kept;
    to.extend(wanted);
}

impl Store {
    pub(super) fn new(journal: Journal, metrics: Arc<Metrics>) -> Store {
        Store {
            journal,
            unsaved: Batch::default(),
            held: HeldSamples::default(),
            flushed: BTreeSet::new(),
            pushed: BTreeSet::new(),
            flushes_all: false,
            next_flush: Time::ZERO,
            control_changed: false,
            unacknowledged: Vec::new(),
            metrics,
        }
    }

    /// The samples and the position of this job go with the next commit.
    pub(super) fn flush(&mut self, id: JobId) {
        self.flushed.insert(id);
    }

    /// What the job pushed goes with the next commit: the samples alone if they are enough.
    pub(super) fn flush_push(&mut self, job: &Job) {
        let jobs = if job.is_replayable { &mut self.pushed } else { &mut self.flushed };
        jobs.insert(job.record.id);
    }

    /// The samples and positions of all jobs, and the state of the decisions, go with the next commit.
    pub(super) fn flush_all(&mut self) {
        self.flushes_all = true;
    }

    /// [`Store::flush_all`] if it is time.
    pub(super) fn flush_when_due(&mut self, now: Time) {
        if now >= self.next_flush || self.held.samples.len() >= MAX_HELD_SAMPLES {
            self.next_flush = now + FLUSH_PACE;
            self.flush_all();
        }
    }

    fn is_flushed(&self, id: JobId) -> bool {
        self.flushes_all || self.flushed.contains(&id)
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

    /// Gives an owner that is new a number.
    pub(super) fn register_owner(&mut self, jobs: &mut JobTable, name: &str) -> Result<(), Refusal> {
        if !jobs.is_known_owner(name) {
            jobs.add_owner(name, self.journal.add_owner(name)?);
        }
        Ok(())
    }

    /// Feeds samples to the job's tracker and keeps them for the journal. Whether there are any.
    pub(super) fn add_reading(&mut self, job: &mut Job, reading: &ProgressReading, origin: Origin, now: Time) -> bool {
        let id = job.record.id;
        job.is_replayable &= reading.is_samples_only(&job.progress);
        // That a collector was switched off must be known after a restart, too.
        job.unsaved |= reading.note.is_some();
        job.progress.course = reading.progress.or(job.progress.course);
        if reading.samples.is_empty() {
            return false;
        }
        if reading.forget {
            job.progress.tracker = Default::default();
            job.progress.pace = Default::default();
            job.expect_past_pace();
            self.clear_samples(id);
        }
        if let Some(reports) = &job.reports {
            let (metric, source) = (reports.metric().map(str::to_owned), reports.source());
            job.is_replayable &= (&metric, &source) == (&job.progress.metric, &job.progress.source);
            (job.progress.metric, job.progress.source) = (metric, source);
        }
        job.is_replayable &= origin == Origin::Pushed;
        job.progress.tracker.set_target(job.record.spec.target_value());
        for sample in &reading.samples {
            if !job.progress.tracker.push(now, *sample) {
                self.metrics.samples_refused.inc();
                continue;
            }
            self.metrics.samples_accepted.inc();
            let seq = job.progress.next_seq;
            if job.is_replayable || seq.is_multiple_of(job.progress.stride()) {
                self.add_sample(id, StoredSample { seq, time: now, step: sample.step, value: sample.value });
            }
            self.count_sample(job, seq);
        }
        let source = job.reports.as_ref().and_then(Reports::claim_source);
        job.progress.tracker.set_claim_source(source);
        job.unsaved = true;
        true
    }

    /// Feeds the samples that were committed after the job's position to its tracker, as the last daemon did.
    pub(super) fn replay_samples(&mut self, job: &mut Job) -> Result<(), Refusal> {
        for stored in self.journal.samples_from(job.record.id, job.progress.next_seq)? {
            let sample = Sample { value: stored.value, step: stored.step, total: None };
            job.progress.tracker.push(stored.time, sample);
            job.progress.course = job.progress.course_after(&sample);
            self.count_sample(job, stored.seq);
            job.unsaved = true;
        }
        Ok(())
    }

    /// Counts the sample with this number. When a job has many samples, every second one is dropped. The journal drops
    /// them with the next flush.
    fn count_sample(&mut self, job: &mut Job, seq: u64) {
        job.progress.next_seq = seq.saturating_add(1);
        if job.progress.next_seq / job.progress.stride() > SAMPLES_KEPT {
            job.progress.double_stride();
            self.thin_samples(Thinning { job: job.record.id, stride: job.progress.stride(), from: 0 });
        } else if !seq.is_multiple_of(job.progress.stride()) {
            self.thin_samples(Thinning { job: job.record.id, stride: job.progress.stride(), from: seq });
        }
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
    fn clear_samples(&mut self, id: JobId) {
        self.unsaved.samples.retain(|(owner, _)| *owner != id);
        self.held.samples.retain(|(owner, _)| *owner != id);
        self.held.cleared.push(id);
    }

    fn add_sample(&mut self, id: JobId, sample: StoredSample) {
        self.held.samples.push((id, sample));
        let count = self.unsaved.samples.len() + self.held.samples.len();
        let surplus = count.saturating_sub(MAX_UNSAVED_SAMPLES);
        if surplus > 0 {
            let oldest = surplus.min(self.unsaved.samples.len());
            self.unsaved.samples.drain(..oldest);
            self.held.samples.drain(..surplus - oldest);
            self.metrics.samples_dropped.inc_by(surplus as u64);
        }
    }

    /// From now on only every `stride`th sample is kept.
    fn thin_samples(&mut self, wanted: Thinning) {
        let includes =
            |held: &Thinning| (held.job, held.stride) == (wanted.job, wanted.stride) && held.from <= wanted.from;
        if !self.held.thin.iter().any(includes) {
            self.held.thin.push(wanted);
        }
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

    /// Whether a commit now would write nothing.
    pub(super) fn is_clean(&self, jobs: &JobTable) -> bool {
        let is_held = |j: &Job| !j.unsaved || !self.is_flushed(j.record.id);
        self.unsaved.is_empty() && !(self.control_changed && self.flushes_all) && jobs.values().all(is_held)
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
        // The state of the decisions belongs to a plan; without one it can wait like samples.
        let has_plan = self.unsaved.changes.iter().any(|(_, _, change)| matches!(change, Change::Plan { .. }));
        let has_control = self.control_changed && (has_plan || self.flushes_all);
        self.unsaved.control = has_control.then(|| control.clone());
        let is_flushed = |id: &JobId| self.flushes_all || self.flushed.contains(id);
        transfer(&mut self.held.cleared, &mut self.unsaved.cleared, is_flushed);
        let is_pushed = |id: &JobId| self.pushed.contains(id) || is_flushed(id);
        transfer(&mut self.held.samples, &mut self.unsaved.samples, |(id, _)| is_pushed(id));
        transfer(&mut self.held.thin, &mut self.unsaved.thin, |thin| is_flushed(&thin.job));
        let positions = jobs.iter().filter(|(id, j)| j.unsaved && is_flushed(id));
        self.unsaved.positions.extend(positions.filter_map(|(id, j)| Some((*id, j.position()?))));
        self.pushed.clear();
        if self.unsaved.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let result = self.journal.commit(&self.unsaved);
        self.metrics.journal_seconds.observe(begun.elapsed().as_secs_f64());
        match result {
            Ok(()) => {
                for (id, _) in std::mem::take(&mut self.unsaved).positions {
                    jobs.get_mut(&id).into_iter().for_each(|job| job.is_replayable = true);
                }
                self.control_changed &= !has_control;
                jobs.values_mut().filter(|j| self.is_flushed(j.record.id)).for_each(|j| j.unsaved = false);
                self.flushed.clear();
                self.flushes_all = false;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::JobRecord;
    use crate::spec::JobSpec;
    use gainshare_core::policy::Policy;
    use gainshare_progress::{Progress, Unit};

    struct Fixture {
        store: Store,
        jobs: JobTable,
        control: Decider,
        _dir: tempfile::TempDir,
    }

    fn fixture() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(&dir.path().join("journal.db")).unwrap();
        let moment = journal.clock().moment();
        let mut store = Store::new(journal, Arc::new(Metrics::new()));
        let mut jobs = JobTable::new(Default::default());
        for id in [JobId(1), JobId(2)] {
            let record = JobRecord::queued(id, JobSpec::default(), "me".into(), moment);
            store.unsaved.changes.push((moment, Some(id), Change::Submitted { record: record.clone().into() }));
            jobs.insert(id, Job::new(record, moment.time));
        }
        Fixture { store, jobs, control: Decider::new(Policy::equal()), _dir: dir }
    }

    impl Fixture {
        fn report(&mut self, id: JobId, seq: u64) {
            let sample = StoredSample { seq, time: Time(seq + 1), step: None, value: 1.0 };
            self.store.add_sample(id, sample);
            let job = self.jobs.get_mut(&id).unwrap();
            job.progress.next_seq = seq + 1;
            job.unsaved = true;
        }

        fn save(&mut self) {
            self.store.save_with(&mut self.jobs, &self.control, Batch::default()).unwrap();
        }

        /// The samples of a job that are on the disk, and the number of the next one by its position there.
        fn kept(&self, id: JobId) -> (usize, Option<u64>) {
            let samples = self.store.journal.samples(id, Time::ZERO).unwrap().len();
            let loaded = self.store.journal.load().unwrap();
            let position = loaded.jobs.into_iter().find(|(record, _)| record.id == id).and_then(|(_, text)| text);
            let position: Option<super::super::reports::Progress> =
                position.map(|text| serde_json::from_str(&text).unwrap());
            (samples, position.map(|position| position.next_seq))
        }
    }

    #[test]
    fn samples_and_their_position_wait_for_a_flush_and_are_committed_together() {
        let (mut fixture, [one, two]) = (fixture(), [JobId(1), JobId(2)]);
        fixture.save();
        for seq in 0..3 {
            fixture.report(one, seq);
            fixture.report(two, seq);
        }
        assert!(fixture.store.is_clean(&fixture.jobs));
        fixture.save();
        assert_eq!((fixture.kept(one), fixture.kept(two)), ((0, None), (0, None)));
        fixture.store.flush(one);
        assert!(!fixture.store.is_clean(&fixture.jobs));
        fixture.save();
        assert_eq!((fixture.kept(one), fixture.kept(two)), ((3, Some(3)), (0, None)));
        fixture.report(one, 3);
        fixture.store.flush_when_due(Time::ZERO);
        fixture.save();
        assert_eq!((fixture.kept(one), fixture.kept(two)), ((4, Some(4)), (3, Some(3))));
        assert!(fixture.store.is_clean(&fixture.jobs));
    }

    impl Fixture {
        /// Each push is acknowledged by a commit of its own.
        fn push(&mut self, id: JobId, seq: u64) {
            self.push_reading(id, seq, ProgressReading::default());
            self.save();
        }

        fn push_reading(&mut self, id: JobId, seq: u64, mut reading: ProgressReading) {
            reading.progress.get_or_insert(Progress { step: seq, total: None, unit: Unit::Step });
            reading.samples.push(Sample { value: 1.0 / (seq + 1) as f64, step: Some(seq), total: None });
            self.add(id, seq, &reading, Origin::Pushed);
        }

        fn add(&mut self, id: JobId, seq: u64, reading: &ProgressReading, origin: Origin) {
            let job = self.jobs.get_mut(&id).unwrap();
            self.store.add_reading(job, reading, origin, Time(seq + 1));
            if origin == Origin::Pushed {
                self.store.flush_push(job);
            }
        }

        /// Whether a daemon that begins now has the state of this one.
        fn assert_restored(&mut self, id: JobId) {
            let loaded = self.store.journal.load().unwrap();
            let (record, position) = loaded.jobs.into_iter().find(|(record, _)| record.id == id).unwrap();
            let mut job = Job::new(record, Time::ZERO);
            job.progress = serde_json::from_str(&position.unwrap()).unwrap();
            self.store.replay_samples(&mut job).unwrap();
            let (restored, present) = (&job.progress, &self.jobs[&id].progress);
            assert_eq!(restored.tracker, present.tracker);
            assert_eq!((restored.next_seq, restored.stride), (present.next_seq, present.stride));
            assert_eq!(restored.course, present.course);
        }
    }

    #[test]
    fn pushes_after_the_first_are_committed_without_the_position_and_survive() {
        let (mut fixture, one) = (fixture(), JobId(1));
        fixture.save();
        fixture.push(one, 0);
        assert_eq!(fixture.kept(one), (1, Some(1)));
        (1..40).for_each(|seq| fixture.push(one, seq));
        assert_eq!(fixture.kept(one), (40, Some(1)));
        fixture.assert_restored(one);
        fixture.store.flush_all();
        fixture.save();
        assert_eq!(fixture.kept(one), (40, Some(40)));
        fixture.push(one, 40);
        assert_eq!(fixture.kept(one), (41, Some(40)));
        fixture.assert_restored(one);
    }

    #[test]
    fn a_push_that_does_not_follow_from_the_position_takes_it_along() {
        let (mut fixture, one) = (fixture(), JobId(1));
        fixture.save();
        fixture.push(one, 0);
        // A total that the position does not have.
        let total = ProgressReading {
            samples: vec![Sample { value: 1.0, step: Some(1), total: Some(9) }],
            progress: Some(Progress { step: 1, total: None, unit: Unit::Step }),
            ..Default::default()
        };
        fixture.add(one, 1, &total, Origin::Pushed);
        fixture.save();
        assert_eq!(fixture.kept(one), (2, Some(2)));
        fixture.add(one, 2, &total, Origin::Pushed);
        fixture.save();
        assert_eq!(fixture.kept(one), (3, Some(2)), "the position has this total");
        fixture.assert_restored(one);
        // Samples of a file are read again from the position.
        fixture.add(one, 3, &total, Origin::Read);
        fixture.push(one, 4);
        assert_eq!(fixture.kept(one), (5, Some(5)));
        for (seq, more) in [
            (5, ProgressReading { note: Some("a note".into()), ..Default::default() }),
            (
                6,
                ProgressReading {
                    progress: Some(Progress { step: 6, total: Some(9), unit: Unit::Epoch }),
                    ..Default::default()
                },
            ),
        ] {
            fixture.push_reading(one, seq, more);
            fixture.save();
            assert_eq!(fixture.kept(one), (seq as usize + 1, Some(seq + 1)));
        }
        // The samples of another metric replace all earlier ones.
        fixture.push(one, 7);
        fixture.push_reading(one, 8, ProgressReading { forget: true, ..Default::default() });
        fixture.save();
        assert_eq!(fixture.kept(one), (1, Some(9)));
        fixture.assert_restored(one);
    }

    #[test]
    fn many_pushes_are_thinned_with_the_next_position() {
        let (mut fixture, one) = (fixture(), JobId(1));
        fixture.save();
        fixture.push(one, 0);
        let count = SAMPLES_KEPT + 7;
        (1..count).for_each(|seq| fixture.push_reading(one, seq, ProgressReading::default()));
        fixture.save();
        assert_eq!(fixture.kept(one), (count as usize, Some(1)));
        fixture.assert_restored(one);
        for more in [0, 3] {
            (count..count + more).for_each(|seq| fixture.push(one, seq));
            fixture.assert_restored(one);
            fixture.store.flush_all();
            fixture.save();
            let kept = fixture.store.journal.samples(one, Time::ZERO).unwrap();
            assert!(kept.iter().map(|sample| sample.seq).eq((0..count + more).step_by(2)), "{} samples", kept.len());
        }
    }

    #[test]
    fn a_push_that_the_disk_refused_goes_with_a_later_commit() {
        let (mut fixture, one) = (fixture(), JobId(1));
        fixture.save();
        fixture.push(one, 0);
        fixture.push_reading(one, 1, ProgressReading::default());
        // A job that is there already cannot be submitted again.
        let moment = fixture.store.journal.clock().moment();
        let again = Change::Submitted { record: fixture.jobs[&one].record.clone().into() };
        let intent = Batch { changes: vec![(moment, Some(one), again)], ..Batch::default() };
        assert!(fixture.store.save_with(&mut fixture.jobs, &fixture.control, intent).is_err());
        assert_eq!(fixture.kept(one), (1, Some(1)));
        assert!(!fixture.store.is_clean(&fixture.jobs));
        fixture.save();
        assert_eq!(fixture.kept(one), (2, Some(1)));
        fixture.assert_restored(one);
    }

    #[test]
    fn a_flush_is_due_every_few_seconds_and_with_many_samples() {
        let mut fixture = fixture();
        fixture.store.flush_when_due(Time::ZERO);
        fixture.save();
        fixture.report(JobId(1), 0);
        fixture.store.flush_when_due(Time::ZERO + Span::from_secs(4));
        assert!(!fixture.store.flushes_all);
        fixture.store.flush_when_due(Time::ZERO + FLUSH_PACE);
        assert!(fixture.store.flushes_all);
        fixture.save();
        (1..=MAX_HELD_SAMPLES as u64).for_each(|seq| fixture.report(JobId(1), seq));
        fixture.store.flush_when_due(Time::ZERO + FLUSH_PACE + Span::from_secs(1));
        assert!(fixture.store.flushes_all);
    }

    #[test]
    fn samples_of_another_metric_leave_before_they_were_committed() {
        let mut fixture = fixture();
        fixture.report(JobId(1), 0);
        fixture.store.clear_samples(JobId(1));
        fixture.report(JobId(1), 1);
        fixture.store.flush_all();
        fixture.save();
        assert_eq!(fixture.kept(JobId(1)), (1, Some(2)));
    }
}
