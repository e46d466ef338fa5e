//! Follows the reports of live jobs: what they print, write, push and serve.
//!
//! The files in a job's own folder are read on other threads ([`super::files`]); an endpoint is asked on a thread of
//! its own.

use super::files::FileReaders;
use super::handle::{DriverHandle, Inbox};
use super::jobs::{Job, JobTable};
use super::observe::group_pids;
use super::reports::{ProgressReading, Reports};
use super::store::{Acknowledgement, Origin, Store};
use super::watch::Watch;
use super::{FILES_PACE, OUTPUT_PACE};
use crate::clock::Clock;
use crate::error::Refusal;
use crate::record::{Change, JobRecord};
use crate::types::ErrorCode;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_progress::prometheus::Endpoint;
use std::path::Path;

/// Time between two samples of a job on the event stream.
const SAMPLE_PACE: Span = Span::from_secs(1);

/// The parts of the driver that reports concern.
pub(crate) struct Follower<'a> {
    pub(super) jobs: &'a mut JobTable,
    pub(super) store: &'a mut Store,
    pub(super) watch: &'a mut Watch,
    pub(super) readers: &'a FileReaders,
    pub(super) inbox: &'a Inbox,
    pub(super) clock: &'a Clock,
    pub(super) handle: &'a DriverHandle,
    /// The policy decides at every report.
    pub(super) reacts: bool,
    pub(super) is_plan_wanted: &'a mut bool,
}

impl Job {
    /// When its output, or the files in its folder, are read next. `None`: it is not followed.
    pub(super) fn reading_due(&self) -> Option<Time> {
        self.reports.as_ref()?;
        Some(if self.dirty { self.next_read.min(self.last_read + OUTPUT_PACE) } else { self.next_read })
    }
}

impl Follower<'_> {
    /// Follows a job's directory and reports from now on.
    pub(super) fn begin(&mut self, id: JobId, dir: &Path) {
        let Some(job) = self.jobs.get_mut(&id).filter(|j| j.reports.is_none()) else { return };
        self.watch.add(id, dir);
        let record = &job.record;
        // A container that we started sees the folder under the same name; of an adopted container we know none.
        let folder = record.spec.cwd.as_deref();
        let began = record.started.unwrap_or(self.clock.moment());
        let position = std::mem::take(&mut job.progress.position);
        match Reports::open(&record.spec.metric, &record.spec.command, dir, folder, began, position) {
            Ok(reports) => job.reports = Some(reports),
            Err(e) => {
                tracing::warn!(job = %id, "its reports cannot be read: {e}");
                self.note(id, e.to_string());
            }
        }
    }

    /// Has the files of a job that is over read for the last time; `false` if there is nothing to wait for.
    pub(super) fn read_last_files(&mut self, id: JobId) -> bool {
        let now = self.clock.now();
        let Some(job) = self.jobs.get_mut(&id) else { return false };
        let Some(reports) = &mut job.reports else { return false };
        if reports.has_files_away() {
            return !reports.is_stuck();
        }
        match reports.begin_files(now, true, || pids(&job.record)) {
            Some(request) => self.readers.send(id, request),
            None => return false,
        }
        true
    }

    /// Reads the reports of all jobs that have something new or whose turn it is.
    pub(super) fn read_due(&mut self) {
        let now = self.clock.now();
        for id in self.jobs.ids(|job| job.reading_due().is_some_and(|due| now >= due)) {
            self.read(id, false);
        }
    }

    pub(super) fn read(&mut self, id: JobId, last: bool) {
        let now = self.clock.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(reports) = &mut job.reports else { return };
        // The watch has reported no new output.
        let is_silent = !job.dirty && !self.watch.unwatched().contains(&id);
        let reading = match (last, is_silent) {
            (true, _) => reports.finish_output(now),
            (false, true) => ProgressReading::default(),
            (false, false) => reports.read_output(now),
        };
        job.dirty = reading.more;
        job.last_read = now;
        if now >= job.next_read && !last {
            job.next_read = now + FILES_PACE;
            // The last files of a job that is over are being read.
            let is_over = job.end.is_some();
            let request = if is_over { None } else { reports.begin_files(now, false, || pids(&job.record)) };
            request.into_iter().for_each(|request| self.readers.send(id, request));
        }
        let endpoint = reports.fetch_due(now).filter(|_| !last);
        self.record(id, reading);
        if let Some(endpoint) = endpoint {
            self.fetch(id, endpoint);
        }
    }

    /// Asks a job's endpoint on a thread of its own: it may take seconds.
    fn fetch(&self, id: JobId, endpoint: Endpoint) {
        self.handle.off_thread(
            "fetch",
            move || endpoint.fetch(),
            move |driver, answer| {
                let mut follower = driver.follower();
                let now = follower.clock.now();
                if let Some(reports) = follower.jobs.get_mut(&id).and_then(|j| j.reports.as_mut()) {
                    let reading = reports.fetched(now, answer);
                    follower.record(id, reading);
                }
            },
        );
    }

    /// Notes something that the job's owner should know.
    fn note(&mut self, id: JobId, note: String) {
        self.store.fact(self.jobs, self.clock.moment(), Some(id), Change::note(note));
    }

    /// Feeds samples to the job's tracker, keeps them for the journal and shows them.
    pub(super) fn record(&mut self, id: JobId, reading: ProgressReading) {
        self.record_from(Origin::Read, id, reading);
    }

    fn record_from(&mut self, origin: Origin, id: JobId, reading: ProgressReading) {
        let now = self.clock.now();
        if let Some(note) = &reading.note {
            tracing::warn!(job = %id, "{note}");
            self.note(id, note.clone());
        }
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if !self.store.add_reading(job, &reading, origin, now) {
            return;
        }
        *self.is_plan_wanted |= self.reacts;
        if now >= job.sample_sent + SAMPLE_PACE && self.inbox.has_listeners() {
            job.sample_sent = now;
            let event = reading.samples.last().and_then(|sample| job.sample_event(sample, now));
            event.into_iter().for_each(|event| self.inbox.emit(event));
        }
    }

    /// A job reports by itself. Acknowledged only when it is on disk: there is no file to read it from again.
    pub(crate) fn push(&mut self, id: JobId, body: &[u8], reply: Acknowledgement) {
        let now = self.clock.now();
        let Some(reports) = self.jobs.get_mut(&id).and_then(|j| j.reports.as_mut()) else {
            let refusal = Refusal::new(ErrorCode::WrongState, format!("{id} does not run: it cannot report"));
            return drop(reply.send(Err(refusal)));
        };
        match reports.pushed(now, body) {
            Ok(reading) => {
                self.record_from(Origin::Pushed, id, reading);
                self.jobs.get(&id).into_iter().for_each(|job| self.store.flush_push(job));
                self.store.acknowledge_later(reply);
            }
            Err(e) => drop(reply.send(Err(Refusal::new(ErrorCode::BadRequest, e.to_string())))),
        }
    }
}

/// The job's processes as its control group lists them, so that a neighbour's event files are not taken for its own.
fn pids(record: &JobRecord) -> Vec<u32> {
    group_pids(record).into_iter().chain(record.leader.map(|l| l.pid as u32)).collect()
}
