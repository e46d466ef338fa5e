//! Reports and ends of jobs: what their files say, what they report, which processes are still alive.
//!
//! The files in a job's own folder are read on other threads ([`super::files`]). The end of a job that ran is recorded
//! when the last of these files were read, or when its folder turns out not to answer.
//!
//! A job's end is known from `exit.json`, which its supervisor writes. Where the supervisor died,
//! the job's process and its control group decide: a job whose process lives goes on, one whose
//! process is gone is *lost*, and one whose supervisor died before it wrote its intent to fork
//! never began.

use super::files::FileAnswer;
use super::jobs::PendingEnd;
use super::page::JobPage;
use super::reports::{ProgressReading, Reports};
use super::store::Acknowledgement;
use super::{Driver, FILES_PACE, Job, OUTPUT_PACE};
use crate::error::Refusal;
use crate::fail;
use crate::instance::is_locked;
use crate::jobdir::{self, read_json};
use crate::journal::{SAMPLES_KEPT, StoredSample};
use crate::record::{Change, JobRecord};
use crate::types::{ErrorCode, Event, ExitReport, JobState, StartReport};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_limits::cgroup::Group;
use gainshare_limits::process::Identity;
use gainshare_limits::{Runtime, RuntimeError, RuntimeKind};
use gainshare_progress::prometheus::Endpoint;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, getsid};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A supervisor that has made no contact for this long while its job waits or starts is gone.
const SUPERVISOR_PATIENCE: Span = Span::from_secs(60);

/// Time for the starts and ends that are read in one round. Each takes a commit; hundreds of jobs that end together
/// must not keep the lease from being renewed and clients from being answered.
const WATCH_BUDGET: Duration = Duration::from_millis(300);

/// How long a supervisor may take to write exit.json after its job died.
const EXIT_PATIENCE: Span = Span::from_secs(3);

/// Time between two attempts to kill a control group whose processes survived SIGKILL (an uninterruptible wait in the
/// kernel).
const KILL_PACE: Span = Span::from_secs(5);

/// Without control groups each attempt sends the signals once and waits for nothing, so the attempts follow sooner.
const SIGNAL_PACE: Span = Span::from_secs(1);

/// After this many attempts without control groups, processes that are still there have survived SIGKILL.
const SIGNAL_TRIES: u32 = 3;

impl Driver {
    /// Follows a job's directory and reports from now on.
    pub(super) fn begin_watching(&mut self, id: JobId) {
        self.find_earlier_runs(id);
        let dir = self.paths.job(id.0);
        let Some(job) = self.jobs.get_mut(&id).filter(|j| j.reports.is_none()) else { return };
        self.watch.add(id, &dir);
        let record = &job.record;
        // A container that we started sees the folder under the same name; of an adopted container we know none.
        let folder = record.spec.cwd.as_deref();
        let began = record.started.unwrap_or(self.clock.moment());
        let position = std::mem::take(&mut job.progress.position);
        match Reports::open(&record.spec.metric, &record.spec.command, &dir, folder, began, position) {
            Ok(reports) => job.reports = Some(reports),
            Err(e) => {
                tracing::warn!(job = %id, "its reports cannot be read: {e}");
                self.fact(Some(id), Change::Noted { note: e.to_string() });
            }
        }
    }

    /// Reads what supervisors wrote since the last round; what takes too long waits for the next round.
    pub(super) fn read_watched_files(&mut self) {
        self.watch.read(self.clock.now());
        let begun = Instant::now();
        while let Some((id, changed)) = self.watch.take() {
            if changed.output
                && let Some(job) = self.jobs.get_mut(&id)
            {
                job.dirty = true;
            }
            if changed.started {
                self.read_start(id);
            }
            if changed.exit {
                self.read_exit(id);
            }
            if begun.elapsed() >= WATCH_BUDGET {
                return;
            }
        }
    }

    /// Whether started.json is there and counted.
    pub(super) fn read_start(&mut self, id: JobId) -> bool {
        let path = self.paths.job(id.0).join(jobdir::STARTED);
        let Some(job) = self.jobs.get(&id) else { return false };
        if job.record.state != JobState::Starting {
            return false;
        }
        match read_json::<StartReport>(&path) {
            Some(started) if started.attempt == job.record.attempt => self.started(id, &started).is_ok(),
            _ => false,
        }
    }

    /// Whether exit.json is there and counted.
    pub(super) fn read_exit(&mut self, id: JobId) -> bool {
        let path = self.paths.job(id.0).join(jobdir::EXIT);
        let Some(job) = self.jobs.get(&id) else { return false };
        if !job.record.is_live() {
            return false;
        }
        match read_json::<ExitReport>(&path) {
            Some(exited) if exited.attempt == job.record.attempt => {
                self.read_start(id);
                self.take_exit(id, &exited);
                true
            }
            _ => false,
        }
    }

    /// A job is over; its supervisor knows how.
    pub(super) fn take_exit(&mut self, id: JobId, exited: &ExitReport) {
        let Some(job) = self.jobs.get(&id) else { return };
        let state = match (job.record.stop_requested, exited.code, &exited.error) {
            (true, _, _) => JobState::Stopped,
            (_, Some(0), None) => JobState::Done,
            _ => JobState::Failed,
        };
        self.end(id, state, exited.code, exited.signal, exited.error.clone());
    }

    /// Ends a job and gives back what it held. If it did not end well, the jobs that wait for it fail. The end of a
    /// job that ran waits for the last reading of its files.
    pub(super) fn end(
        &mut self,
        id: JobId,
        state: JobState,
        exit_code: Option<i32>,
        signal: Option<i32>,
        why: Option<String>,
    ) {
        if self.jobs.get(&id).is_none_or(|j| !j.record.is_live() || j.end.is_some()) {
            return;
        }
        self.read_usage(id);
        self.read_report(id, true);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.end = Some(PendingEnd { state, exit_code, signal, why, replies: Vec::new() });
        let has_run = job.record.state == JobState::Running;
        if !has_run || !self.read_last_files(id) {
            self.conclude_end(id);
        }
    }

    /// Has the files of a job that is over read for the last time; `false` if there is nothing to wait for.
    fn read_last_files(&mut self, id: JobId) -> bool {
        let now = self.now();
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

    /// Records the end of a job whose last files were read or cannot be read.
    fn conclude_end(&mut self, id: JobId) {
        let now = self.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(PendingEnd { state, exit_code, signal, why, replies }) = job.end.take() else { return };
        // A job that never ran has written nothing.
        let has_run = job.record.state == JobState::Running;
        let unread = job.reports.as_ref().filter(|_| has_run).and_then(Reports::unread_folder);
        let note = unread.map(|dir| format!("the last files in {} were not read: it does not answer", dir.display()));
        fail::point("ended-before-journal");
        if let Some(note) = note {
            self.fact(Some(id), Change::Noted { note });
        }
        self.fact(Some(id), Change::Ended { state, exit_code, signal, why });
        self.conclude_deadline(id);
        self.store.flush(id);
        let _ = self.save();
        fail::point("ended-before-release");
        self.release_limits(id);
        fail::point("ended-after-release");
        self.watch.remove(id);
        self.drop_environment(id);
        self.plans.starts.retain(|s| *s != id);
        if let Some(job) = self.jobs.get_mut(&id) {
            if let Some(reports) = job.reports.take() {
                let (position, request) = reports.close(now);
                job.progress.position = position;
                request.into_iter().for_each(|request| self.readers.send(id, request));
            }
            job.pump = None;
            job.page = JobPage::Unknown;
            job.kill_at = None;
        }
        self.remove_container(id);
        self.job_changed(id);
        if state != JobState::Done {
            self.fail_dependants(id);
        }
        self.answer_exits(id, replies);
    }

    /// The files of a job were read, as far as they can be.
    pub(super) fn files_read(&mut self, id: JobId, ticket: &Arc<AtomicBool>, answer: FileAnswer) {
        let now = self.now();
        let Some(reports) = self.jobs.get_mut(&id).and_then(|j| j.reports.as_mut()) else { return };
        let Some((reading, is_last)) = reports.end_files(now, ticket, answer) else { return };
        self.record_reading(id, reading);
        let is_over = self.jobs.get(&id).is_some_and(|j| j.end.is_some());
        // A reading that began before the end is followed by the last one.
        if is_over && (is_last || !self.read_last_files(id)) {
            self.conclude_end(id);
        }
    }

    /// Once a second: notices which folders do not answer. A job that is over does not wait for its folder.
    pub(super) fn check_folders(&mut self) {
        let stuck = self.readers.replace_stuck();
        if self.readers.are_all_stuck() {
            let what = "too many folders of jobs do not answer: files are not read as reports; see the jobs' notes";
            self.problems.insert("folders", what.to_owned());
        } else {
            self.problems.remove("folders");
        }
        let mut over = Vec::new();
        for job in self.jobs.values_mut() {
            let Some(reports) = &mut job.reports else { continue };
            let id = job.record.id;
            if reports.set_stuck(stuck.contains(&id))
                && let Some(note) = reports.folder_note()
            {
                tracing::warn!(job = %id, "{note}");
            }
            over.extend(Some(id).filter(|_| reports.is_stuck() && job.end.is_some()));
        }
        for id in over {
            self.conclude_end(id);
        }
    }

    fn fail_dependants(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let why = format!("job {}, which it waits for, ended as {}", job.record.name, job.record.state.name());
        let is_waiting = |j: &Job| j.record.state == JobState::Queued && j.record.after.contains(&id);
        for dependant in self.jobs.ids(is_waiting) {
            self.end(dependant, JobState::Failed, None, None, Some(why.clone()));
        }
    }

    /// Puts a job's limits back and forgets its group.
    pub(super) fn release_limits(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (Some(handle), kind) = (job.handle(), job.record.spec.runtime) else { return };
        match kind {
            RuntimeKind::Docker => self.release_container(id, handle),
            RuntimeKind::Process => {
                let result = self.runtimes.process().and_then(|r| r.release(&handle));
                self.limits_released(id, handle.key, result);
            }
        }
    }

    pub(super) fn limits_released(&mut self, id: JobId, key: String, result: Result<(), RuntimeError>) {
        match result {
            Ok(()) => {
                self.fact(Some(id).filter(|id| self.jobs.contains_key(id)), Change::Released);
                self.store.remove_limit(key);
            }
            Err(e) => tracing::warn!(job = %id, "limits could not be put back: {e}"),
        }
    }

    /// Reads the reports of all jobs that have something new or whose turn it is.
    pub(super) fn read_reports(&mut self) {
        let now = self.now();
        let is_due =
            |j: &Job| j.reports.is_some() && ((j.dirty && now >= j.last_read + OUTPUT_PACE) || now >= j.next_read);
        for id in self.jobs.ids(is_due) {
            self.read_report(id, false);
        }
    }

    pub(super) fn read_report(&mut self, id: JobId, last: bool) {
        let now = self.now();
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
        self.record_reading(id, reading);
        if let Some(endpoint) = endpoint {
            self.fetch(id, endpoint);
        }
    }

    /// Asks a job's endpoint on a thread of its own: it may take seconds.
    fn fetch(&mut self, id: JobId, endpoint: Endpoint) {
        self.off_thread(
            "fetch",
            move || endpoint.fetch(),
            move |driver, answer| {
                let now = driver.now();
                if let Some(reports) = driver.jobs.get_mut(&id).and_then(|j| j.reports.as_mut()) {
                    let reading = reports.fetched(now, answer);
                    driver.record_reading(id, reading);
                }
            },
        );
    }

    /// Feeds samples to the job's tracker and keeps them for the journal.
    fn record_reading(&mut self, id: JobId, reading: ProgressReading) {
        let now = self.now();
        if let Some(note) = &reading.note {
            tracing::warn!(job = %id, "{note}");
            self.fact(Some(id), Change::Noted { note: note.clone() });
        }
        let Some(job) = self.jobs.get_mut(&id) else { return };
        // That a collector was switched off must be known after a restart, too.
        job.unsaved |= reading.note.is_some();
        job.progress.course = reading.progress.or(job.progress.course);
        let samples = &reading.samples;
        if samples.is_empty() {
            return;
        }
        if reading.forget {
            job.progress.tracker = Default::default();
            job.progress.pace = Default::default();
            self.store.clear_samples(id);
        }
        if let Some(reports) = &job.reports {
            job.progress.metric = reports.metric().map(str::to_owned);
            job.progress.source = reports.source();
        }
        job.progress.tracker.set_target(job.record.spec.target_value());
        for sample in samples {
            if !job.progress.tracker.push(now, *sample) {
                self.metrics.samples_refused.inc();
                continue;
            }
            self.metrics.samples_accepted.inc();
            let seq = job.progress.next_seq;
            job.progress.next_seq += 1;
            let stride = job.progress.stride();
            if seq.is_multiple_of(stride) {
                let stored = StoredSample { seq, time: now, step: sample.step, value: sample.value };
                self.store.add_sample(id, stored);
            }
            if job.progress.next_seq / stride > SAMPLES_KEPT {
                job.progress.double_stride();
                self.store.thin_samples(id, job.progress.stride());
            }
        }
        job.unsaved = true;
        if self.control.policy().react_to_reports {
            self.plans.is_wanted = true;
        }
        if now >= job.sample_sent + Span::from_secs(1) && self.inbox.has_listeners() {
            job.sample_sent = now;
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
    pub(crate) fn push(&mut self, id: JobId, body: &[u8], reply: Acknowledgement) {
        let now = self.now();
        let Some(reports) = self.jobs.get_mut(&id).and_then(|j| j.reports.as_mut()) else {
            let refusal = Refusal::new(ErrorCode::WrongState, format!("{id} does not run: it cannot report"));
            return drop(reply.send(Err(refusal)));
        };
        match reports.pushed(now, body) {
            Ok(reading) => {
                self.record_reading(id, reading);
                self.store.flush(id);
                self.store.acknowledge_later(reply);
            }
            Err(e) => drop(reply.send(Err(Refusal::new(ErrorCode::BadRequest, e.to_string())))),
        }
    }

    /// Reads what a process job used so far. Containers are read together, see [`Driver::read_container_usage`].
    pub(super) fn read_usage(&mut self, id: JobId) {
        let (now, whole) = (self.now(), self.whole());
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.record.state != JobState::Running || job.record.spec.runtime != RuntimeKind::Process {
            return;
        }
        let Some(handle) = job.handle() else { return };
        if let Ok(counters) = self.runtimes.process().and_then(|r| r.read(&handle)) {
            job.progress.meter.record(now, counters, &whole);
            job.usage_read = now;
        }
    }

    /// Collects supervisors that ended.
    pub(super) fn reap_supervisors(&mut self) {
        let mut ended = Vec::new();
        self.supervisors.retain_mut(|(id, child)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                ended.push((*id, status));
                false
            }
            Err(_) => false,
        });
        for (id, status) in ended {
            if self.read_exit(id) || self.read_start(id) || self.may_have_begun(id) {
                continue;
            }
            if self.jobs.state(id) == Some(JobState::Starting) && !self.is_supervised(id) {
                let why = format!("its supervisor ended ({status}) before the job began");
                self.end(id, JobState::Failed, None, None, Some(why));
            }
        }
    }

    /// Once a second: notices what no file says.
    pub(super) fn check_live_jobs(&mut self) {
        let now = self.now();
        for id in self.jobs.live() {
            if self.watch.unwatched().contains(&id) {
                self.read_start(id);
                self.read_exit(id);
            }
            let Some(job) = self.jobs.get(&id) else { continue };
            match job.record.state {
                JobState::Queued if job.record.attached && now.since(job.heard) > SUPERVISOR_PATIENCE => {
                    let why = "its `gainshare run` went away while it waited".to_owned();
                    self.end(id, JobState::Stopped, None, None, Some(why));
                }
                JobState::Starting if job.record.spec.runtime == RuntimeKind::Process => self.check_starting(id, now),
                JobState::Running if job.record.spec.runtime == RuntimeKind::Process => self.check_running(id, now),
                _ => {}
            }
            if self.jobs.get(&id).and_then(|j| j.kill_at).is_some_and(|at| now >= at) {
                self.kill(id);
            }
        }
    }

    fn check_starting(&mut self, id: JobId, now: Time) {
        if self.read_start(id) || self.read_exit(id) || self.is_supervised(id) {
            return;
        }
        if self.may_have_begun(id) {
            return self.resolve_interrupted_start(id, now);
        }
        let Some(job) = self.jobs.get(&id) else { return };
        if job.record.stop_requested {
            self.end(id, JobState::Stopped, None, None, Some("stopped before it began".into()));
        } else if now.since(job.heard) > SUPERVISOR_PATIENCE {
            self.end(id, JobState::Failed, None, None, Some("its supervisor went away before it began".into()));
        }
    }

    /// Whether a supervisor of the present attempt announced that it forks.
    pub(super) fn may_have_begun(&self, id: JobId) -> bool {
        let attempt = self.jobs.get(&id).map_or(0, |j| j.record.attempt);
        jobdir::may_have_begun(&self.paths.job(id.0), attempt)
    }

    /// The supervisor died between its intent to fork and its record of the start. The job may run
    /// all the same: it is never started again. Its control group decides.
    pub(super) fn resolve_interrupted_start(&mut self, id: JobId, now: Time) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if let Some(leader) = leader_in_group(&job.record) {
            let note = "its supervisor died when it started: its output is lost, and its exit code will be".to_owned();
            let (pid, start_ticks) = (leader.pid, leader.start_ticks);
            let started = StartReport { attempt: job.record.attempt, pid, start_ticks, notes: vec![note] };
            let _ = self.started(id, &started);
            return;
        }
        // The process joins its group before it runs the job's program; it is given a moment for that.
        let since = *job.missed.get_or_insert(now);
        if now.since(since) >= EXIT_PATIENCE {
            let state = if job.record.stop_requested { JobState::Stopped } else { JobState::Lost };
            let why = "its supervisor died when it started the job, and no process of the job is left".to_owned();
            self.end(id, state, None, None, Some(why));
        }
    }

    fn check_running(&mut self, id: JobId, now: Time) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.record.leader.is_some_and(|leader| leader.is_alive()) {
            job.missed = None;
            return;
        }
        let since = *job.missed.get_or_insert(now);
        let stop_requested = job.record.stop_requested;
        if self.read_exit(id) || now.since(since) < EXIT_PATIENCE || self.is_supervised(id) {
            return;
        }
        let state = if stop_requested { JobState::Stopped } else { JobState::Lost };
        let why = "it is gone, and so is its supervisor, the only one that knew how it ended".to_owned();
        self.end(id, state, None, None, Some(why));
    }

    /// Kills every process of a job without waiting for them to go. A control group is killed on another thread, which
    /// waits. Without control groups the signals are sent once, and again at the next beats until the job has ended.
    fn kill(&mut self, id: JobId) {
        let now = self.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.kills += 1;
        let (kills, leader) = (job.kills, job.record.leader);
        let group = job.record.group.clone();
        let has_groups = group.as_ref().is_none_or(|g| g.version.is_some());
        let pace = if has_groups || kills > SIGNAL_TRIES { KILL_PACE } else { SIGNAL_PACE };
        // Tried again, should it fail.
        job.kill_at = Some(now + pace);
        let (Some(group), RuntimeKind::Process) = (group, job.record.spec.runtime) else { return };
        let report = move |result: Result<bool, RuntimeError>| match result {
            Ok(true) | Err(RuntimeError::Gone { .. }) => {}
            Ok(false) => tracing::warn!(job = %id, "some of its processes survive SIGKILL"),
            Err(e) => tracing::warn!(job = %id, "cannot be killed: {e}"),
        };
        if let Some(version) = group.version {
            let kill = move || Group::reopen(&group.handle.key, version, &group.dirs).and_then(|g| g.kill());
            return self.off_thread("kill", kill, move |_, result| report(result));
        }
        // The runtime finds descendants that left the process group, as long as their parents live. A signal to the
        // process group also reaches processes that are forked meanwhile.
        if let Some(process) = &mut self.runtimes.process {
            // Processes that were there at the first attempts had no time to go.
            let result = process.kill_once(&group.handle);
            report(result.map(|is_empty| is_empty || kills <= SIGNAL_TRIES));
        }
        if let Some(leader) = leader.filter(|leader| leader.pid > 1 && leader.is_alive()) {
            let _ = killpg(Pid::from_raw(leader.pid), Signal::SIGKILL);
        }
    }

    /// Whether a supervisor holds the job's lock.
    pub(super) fn is_supervised(&self, id: JobId) -> bool {
        is_locked(&self.paths.job(id.0).join(jobdir::SUPERVISOR_LOCK))
    }
}

/// The job's processes as its control group lists them, so that a neighbour's event files are not taken for its own.
fn pids(record: &JobRecord) -> Vec<u32> {
    group_pids(record).into_iter().chain(record.leader.map(|l| l.pid as u32)).collect()
}

fn group_pids(record: &JobRecord) -> Vec<u32> {
    let listed = record.group.as_ref().and_then(|g| g.procs_files.first());
    let text = listed.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// The process in the job's group that leads its session, as the one that a supervisor starts does;
/// else any that lives.
fn leader_in_group(record: &JobRecord) -> Option<Identity> {
    let pids: Vec<i32> = group_pids(record).into_iter().filter_map(|pid| i32::try_from(pid).ok()).collect();
    let leads = |pid: &i32| getsid(Some(Pid::from_raw(*pid))).is_ok_and(|session| session.as_raw() == *pid);
    let leader = pids.iter().copied().find(leads).or_else(|| pids.first().copied())?;
    Identity::of(leader).filter(Identity::is_alive)
}
