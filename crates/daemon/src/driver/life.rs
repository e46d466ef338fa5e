//! The life of jobs: what their files say, what they report, who is still alive, how they end.

use super::docker::Pump;
use super::reports::{Look, Progress, Reports};
use super::{Driver, Job, LOOK_PACE, OUTPUT_PACE};
use crate::api::types::{ErrorCode, Event, Exited, JobState, Started};
use crate::error::Refusal;
use crate::fail;
use crate::journal::{SAMPLES_KEPT, StoredSample};
use crate::record::{Change, JobRecord};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_limits::RuntimeKind;
use gainshare_progress::prometheus::Endpoint;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::path::Path;

/// A supervisor that has not been heard of for so long while its job waits or starts is gone.
const SUPERVISOR_PATIENCE: Span = Span::from_secs(60);

/// How long a supervisor may take to write exit.json after its job died.
const EXIT_PATIENCE: Span = Span::from_secs(3);

/// Samples held back while the disk takes none; beyond this the oldest go.
const MOST_UNSAVED_SAMPLES: usize = 50_000;

/// A file of a supervisor larger than this is not one.
const MAX_FILE_BYTES: u64 = 1 << 20;

impl Job {
    /// All that a restart needs, as the journal keeps it.
    pub(super) fn position(&self) -> String {
        let position = self.reports.as_ref().map_or_else(|| self.progress.position.clone(), Reports::position);
        let copied = self.pump.as_ref().map_or(self.progress.copied, Pump::copied);
        serde_json::to_string(&Progress { position, copied, ..self.progress.clone() }).unwrap_or_default()
    }
}

impl Driver {
    /// Follows a job's directory and reports from now on.
    pub(super) fn begin_watching(&mut self, id: JobId) {
        let dir = self.paths.job(id.0);
        self.watch.add(id, &dir);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let record = &job.record;
        // A container of ours sees the folder under the same name; of somebody else's container we know none.
        let folder = record.spec.cwd.as_deref();
        let began_s = record.started.unwrap_or(self.clock.moment()).unix_s;
        let position = std::mem::take(&mut job.progress.position);
        match Reports::open(&record.spec.metric, &dir, folder, began_s, position) {
            Ok(reports) => job.reports = Some(reports),
            Err(e) => {
                tracing::warn!(job = %id, "its reports cannot be read: {e}");
                self.fact(Some(id), Change::Noted { note: e.to_string() });
            }
        }
    }

    /// Takes in what supervisors wrote.
    pub(super) fn look_at_files(&mut self) {
        for (id, seen) in self.watch.read() {
            if seen.output
                && let Some(job) = self.jobs.get_mut(&id)
            {
                job.dirty = true;
            }
            if seen.started {
                self.look_for_start(id);
            }
            if seen.exit {
                self.look_for_exit(id);
            }
        }
    }

    /// Whether started.json is there and counted.
    pub(super) fn look_for_start(&mut self, id: JobId) -> bool {
        let path = self.paths.job(id.0).join("started.json");
        let Some(job) = self.jobs.get(&id) else { return false };
        if job.record.state != JobState::Starting {
            return false;
        }
        match read_json::<Started>(&path) {
            Some(started) if started.attempt == job.record.attempt => self.started(id, &started).is_ok(),
            _ => false,
        }
    }

    /// Whether exit.json is there and counted.
    pub(super) fn look_for_exit(&mut self, id: JobId) -> bool {
        let path = self.paths.job(id.0).join("exit.json");
        let Some(job) = self.jobs.get(&id) else { return false };
        if !job.record.is_live() {
            return false;
        }
        match read_json::<Exited>(&path) {
            Some(exited) if exited.attempt == job.record.attempt => {
                self.look_for_start(id);
                self.take_exit(id, &exited);
                true
            }
            _ => false,
        }
    }

    /// A job is over; how, its supervisor says.
    pub(super) fn take_exit(&mut self, id: JobId, exited: &Exited) {
        let Some(job) = self.jobs.get(&id) else { return };
        let state = match (job.record.stop_requested, exited.code, &exited.error) {
            (true, _, _) => JobState::Stopped,
            (_, Some(0), None) => JobState::Done,
            _ => JobState::Failed,
        };
        self.end(id, state, exited.code, exited.signal, exited.error.clone());
    }

    /// Ends a job and gives back what it held. Whoever depends on it fails if it did not end well.
    pub(super) fn end(
        &mut self,
        id: JobId,
        state: JobState,
        exit_code: Option<i32>,
        signal: Option<i32>,
        why: Option<String>,
    ) {
        if self.jobs.get(&id).is_none_or(|j| !j.record.is_live()) {
            return;
        }
        self.read_usage(id);
        self.look_at_report(id, true);
        fail::point("ended-before-journal");
        self.fact(Some(id), Change::Ended { state, exit_code, signal, why });
        let _ = self.save();
        fail::point("ended-before-release");
        self.let_go(id);
        fail::point("ended-after-release");
        self.watch.remove(id);
        self.starts.retain(|s| *s != id);
        if let Some(job) = self.jobs.get_mut(&id) {
            if let Some(reports) = job.reports.take() {
                job.progress.position = reports.position();
            }
            job.pump = None;
            job.kill_at = None;
        }
        self.job_changed(id);
        if state != JobState::Done {
            self.fail_dependants(id);
        }
    }

    fn fail_dependants(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let why = format!("job {}, which it waits for, ended as {}", job.record.name, job.record.state.name());
        let waiting = |j: &&Job| j.record.state == JobState::Queued && j.record.after.contains(&id);
        let dependants: Vec<JobId> = self.jobs.values().filter(waiting).map(|j| j.record.id).collect();
        for dependant in dependants {
            self.end(dependant, JobState::Failed, None, None, Some(why.clone()));
        }
    }

    /// Puts a job's limits back and forgets its group.
    pub(super) fn let_go(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (Some(handle), kind) = (job.handle(), job.record.spec.runtime) else { return };
        match self.runtimes.of(kind).and_then(|r| r.release(&handle)) {
            Ok(()) => {
                self.fact(Some(id), Change::Released);
                self.unsaved.released.push(handle.key);
            }
            Err(e) => tracing::warn!(job = %id, "limits could not be put back: {e}"),
        }
    }

    /// Reads the reports of all jobs that have something new or whose turn it is.
    pub(super) fn look_at_reports(&mut self) {
        let now = self.now();
        let due =
            |j: &Job| j.reports.is_some() && ((j.dirty && now >= j.last_look + OUTPUT_PACE) || now >= j.next_look);
        let ids: Vec<JobId> = self.jobs.values().filter(|j| due(j)).map(|j| j.record.id).collect();
        for id in ids {
            self.look_at_report(id, false);
        }
    }

    pub(super) fn look_at_report(&mut self, id: JobId, last: bool) {
        let now = self.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(reports) = &mut job.reports else { return };
        let look = if last { reports.finish(now) } else { reports.read_output(now) };
        job.dirty = look.more;
        job.last_look = now;
        let files = (now >= job.next_look && !last).then(|| {
            job.next_look = now + LOOK_PACE;
            reports.read_files(now, pids(&job.record))
        });
        let endpoint = reports.fetch_due(now).filter(|_| !last);
        self.take_look(id, look);
        if let Some(look) = files {
            self.take_look(id, look);
        }
        if let Some(endpoint) = endpoint {
            self.fetch(id, endpoint);
        }
    }

    /// Asks a job's endpoint on a thread of its own: it may take seconds.
    fn fetch(&self, id: JobId, endpoint: Endpoint) {
        let handle = self.handle.clone();
        let ask = move || {
            let answer = endpoint.fetch();
            handle.tell(move |driver| {
                let now = driver.now();
                if let Some(reports) = driver.jobs.get_mut(&id).and_then(|j| j.reports.as_mut()) {
                    let look = reports.fetched(now, answer);
                    driver.take_look(id, look);
                }
            });
        };
        if let Err(e) = std::thread::Builder::new().name("fetch".into()).stack_size(256 << 10).spawn(ask) {
            tracing::warn!(job = %id, "cannot start a thread: {e}");
        }
    }

    /// Feeds samples to the job's tracker and keeps them for the journal.
    fn take_look(&mut self, id: JobId, look: Look) {
        let now = self.now();
        if let Some(note) = &look.note {
            tracing::warn!(job = %id, "{note}");
            self.fact(Some(id), Change::Noted { note: note.clone() });
        }
        let Some(job) = self.jobs.get_mut(&id) else { return };
        // That a collector was switched off must be known after a restart, too.
        job.unsaved |= look.note.is_some();
        job.progress.course = look.progress.or(job.progress.course);
        let samples = &look.samples;
        if samples.is_empty() {
            return;
        }
        if look.forget {
            job.progress.tracker = Default::default();
            self.unsaved.samples.retain(|(owner, _)| *owner != id);
            self.unsaved.cleared.push(id);
        }
        if let Some(reports) = &job.reports {
            job.progress.metric = reports.metric().map(str::to_owned);
            job.progress.source = reports.source();
        }
        for sample in samples {
            if !job.progress.tracker.push(now, *sample) {
                self.metrics.samples_refused.inc();
                continue;
            }
            self.metrics.samples_accepted.inc();
            let seq = job.progress.next_seq;
            job.progress.next_seq += 1;
            if seq.is_multiple_of(job.progress.stride) {
                let stored = StoredSample { seq, time: now, step: sample.step, value: sample.value };
                self.unsaved.samples.push((id, stored));
            }
            if job.progress.next_seq / job.progress.stride > SAMPLES_KEPT {
                job.progress.stride *= 2;
                self.unsaved.thin.push((id, job.progress.stride));
            }
        }
        let surplus = self.unsaved.samples.len().saturating_sub(MOST_UNSAVED_SAMPLES);
        if surplus > 0 {
            self.unsaved.samples.drain(..surplus);
            self.metrics.samples_dropped.inc_by(surplus as u64);
        }
        job.unsaved = true;
        if self.control.policy().react_to_reports {
            self.wants_decision = true;
        }
        if now >= job.told + Span::from_secs(1) && self.events.receiver_count() > 0 {
            job.told = now;
            let (Some(sample), Some(metric)) = (samples.last(), job.progress.metric.clone()) else { return };
            let origin = job.record.started.map_or(job.record.submitted.time, |m| m.time);
            let event = Event::Sample {
                id: id.0,
                name: job.record.name.clone(),
                metric,
                time_s: now.since(origin).as_secs_f64(),
                step: sample.step,
                value: sample.value,
            };
            self.emit(event);
        }
    }

    /// A job reports by itself. Acknowledged only when it is on disk: there is no file to read it from again.
    pub(crate) fn push(&mut self, id: JobId, body: &[u8]) -> Result<(), Refusal> {
        let now = self.now();
        let Some(reports) = self.jobs.get_mut(&id).and_then(|j| j.reports.as_mut()) else {
            return Err(Refusal::new(ErrorCode::WrongState, format!("{id} does not run: it cannot report")));
        };
        let look = reports.pushed(now, body).map_err(|e| Refusal::new(ErrorCode::BadRequest, e.to_string()))?;
        self.take_look(id, look);
        self.save()
    }

    /// Asks the runtime what the job used so far.
    pub(super) fn read_usage(&mut self, id: JobId) {
        let (now, whole) = (self.now(), self.whole());
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.record.state != JobState::Running {
            return;
        }
        let (Some(handle), kind) = (job.handle(), job.record.spec.runtime) else { return };
        if let Ok(counters) = self.runtimes.of(kind).and_then(|r| r.read(&handle)) {
            job.progress.meter.record(now, counters, &whole);
        }
    }

    /// Collects supervisors that ended.
    pub(super) fn reap(&mut self) {
        let mut ended = Vec::new();
        self.children.retain_mut(|(id, child)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                ended.push((*id, status));
                false
            }
            Err(_) => false,
        });
        for (id, status) in ended {
            if self.look_for_exit(id) || self.look_for_start(id) {
                continue;
            }
            if self.jobs.get(&id).is_some_and(|j| j.record.state == JobState::Starting && !self.is_supervised(id)) {
                let why = format!("its supervisor ended ({status}) before the job began");
                self.end(id, JobState::Failed, None, None, Some(why));
            }
        }
    }

    /// Once a second: notices what no file tells.
    pub(super) fn look_after_the_living(&mut self) {
        let now = self.now();
        let live: Vec<JobId> = self.jobs.values().filter(|j| j.record.is_live()).map(|j| j.record.id).collect();
        for id in live {
            if self.watch.unwatched().contains(&id) {
                self.look_for_start(id);
                self.look_for_exit(id);
            }
            let Some(job) = self.jobs.get(&id) else { continue };
            match job.record.state {
                JobState::Queued if job.record.attached && now.since(job.heard) > SUPERVISOR_PATIENCE => {
                    let why = "its `gainshare run` went away while it waited".to_owned();
                    self.end(id, JobState::Stopped, None, None, Some(why));
                }
                JobState::Starting if job.record.spec.runtime == RuntimeKind::Process => self.look_at_starting(id, now),
                JobState::Running if job.record.spec.runtime == RuntimeKind::Process => self.look_at_running(id, now),
                _ => {}
            }
            if self.jobs.get(&id).and_then(|j| j.kill_at).is_some_and(|at| now >= at) {
                self.kill(id);
            }
        }
    }

    fn look_at_starting(&mut self, id: JobId, now: Time) {
        if self.look_for_start(id) || self.look_for_exit(id) || self.is_supervised(id) {
            return;
        }
        let job = &self.jobs[&id];
        if job.record.stop_requested {
            self.end(id, JobState::Stopped, None, None, Some("stopped before it began".into()));
        } else if now.since(job.heard) > SUPERVISOR_PATIENCE {
            self.end(id, JobState::Failed, None, None, Some("its supervisor went away before it began".into()));
        }
    }

    fn look_at_running(&mut self, id: JobId, now: Time) {
        let job = self.jobs.get_mut(&id).expect("looked up by the caller");
        if job.record.leader.is_some_and(|leader| leader.is_alive()) {
            job.missed = None;
            return;
        }
        let since = *job.missed.get_or_insert(now);
        if self.look_for_exit(id) || now.since(since) < EXIT_PATIENCE || self.is_supervised(id) {
            return;
        }
        let stopped = self.jobs[&id].record.stop_requested;
        let state = if stopped { JobState::Stopped } else { JobState::Lost };
        let why = "it is gone, and so is its supervisor, which alone knows how it ended".to_owned();
        self.end(id, state, None, None, Some(why));
    }

    fn kill(&mut self, id: JobId) {
        let now = self.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        // Tried again, should it fail.
        job.kill_at = Some(now + Span::from_secs(5));
        let (Some(handle), RuntimeKind::Process) = (job.handle(), job.record.spec.runtime) else { return };
        if let Some(process) = &mut self.runtimes.process
            && let Err(e) = process.kill(&handle)
        {
            tracing::warn!(job = %id, "cannot be killed: {e}");
        }
    }

    /// Whether a supervisor holds the job's lock.
    pub(super) fn is_supervised(&self, id: JobId) -> bool {
        is_locked(&self.paths.job(id.0).join("supervisor.lock"))
    }
}

/// The job's processes as its control group lists them, so that a neighbour's event files are not taken for its own.
fn pids(record: &JobRecord) -> Vec<u32> {
    let listed = record.group.as_ref().and_then(|g| g.procs_files.first());
    let text = listed.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).chain(record.leader.map(|l| l.pid as u32)).collect()
}

/// Whether some process holds an exclusive lock on the file.
pub(crate) fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    matches!(file.try_lock_shared(), Err(std::fs::TryLockError::WouldBlock))
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    if path.metadata().ok()?.len() > MAX_FILE_BYTES {
        return None;
    }
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}
