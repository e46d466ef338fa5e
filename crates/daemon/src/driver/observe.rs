//! Starts and ends of jobs: what their supervisors' files say, and which processes are still alive.
//!
//! The files in a job's own folder are read on other threads ([`super::files`]). The end of a job that ran is recorded
//! when the last of these files were read, or when its folder turns out not to answer.
//!
//! A job's end is known from `exit.json`, which its supervisor writes. Where the supervisor died,
//! the job's process and its control group decide: a job whose process lives goes on, one whose
//! process is gone is *lost*, and one whose supervisor died before it wrote its intent to fork
//! never began.

use super::files::FileAnswer;
use super::inside::read_rhythm;
use super::jobs::PendingEnd;
use super::page::JobPage;
use super::reports::Reports;
use super::start::{drop_environment, keep_record};
use super::{Driver, Job};
use crate::clock::unix_s;
use crate::fail;
use crate::instance::is_locked;
use crate::jobdir::{self, read_json};
use crate::paths::Paths;
use crate::record::{Change, JobRecord};
use crate::types::{ExitReport, JobState, StartReport};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_limits::process::Identity;
use gainshare_limits::{Runtime, RuntimeError, RuntimeKind};
use nix::unistd::{Pid, getsid};
use std::path::{Path, PathBuf};
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

impl Driver {
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
                let earliest_s = self.jobs.get(&id).map_or(0.0, |job| earliest_end_s(&job.record));
                self.read_start(id);
                self.end_as_reported(id, &exited, earliest_s);
                true
            }
            _ => false,
        }
    }

    /// Ends a job as its supervisor reports, no earlier than at `earliest_s`.
    pub(super) fn end_as_reported(&mut self, id: JobId, exited: &ExitReport, earliest_s: f64) {
        let Some(job) = self.jobs.get(&id) else { return };
        let state = state_after(&job.record, exited);
        let ended_s = bounded_end_s(exited.ended_s, earliest_s, unix_s());
        let (exit_code, signal, why) = (exited.code, exited.signal, exited.error.clone());
        self.begin_end(id, PendingEnd { state, exit_code, signal, why, ended_s, replies: Vec::new() });
    }

    /// Ends a job now.
    pub(super) fn end(
        &mut self,
        id: JobId,
        state: JobState,
        exit_code: Option<i32>,
        signal: Option<i32>,
        why: Option<String>,
    ) {
        self.begin_end(id, PendingEnd { state, exit_code, signal, why, ended_s: None, replies: Vec::new() });
    }

    /// Ends a job and gives back what it held. If it did not end well, the jobs that wait for it fail. The end of a
    /// job that ran waits for the last reading of its files.
    pub(super) fn begin_end(&mut self, id: JobId, end: PendingEnd) {
        if self.jobs.get(&id).is_none_or(|j| !j.record.is_live() || j.end.is_some()) {
            return;
        }
        let now = self.now();
        if let Some(job) = self.jobs.get_mut(&id) {
            self.runtimes.read_usage(&self.config, job, now);
            read_rhythm(job, &self.paths, now);
            // The next run of the same program is as long.
            job.unsaved |= job.progress.rhythm_steps.is_some();
        }
        self.follower().read(id, true);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.end = Some(end);
        let has_run = job.record.state == JobState::Running;
        if !has_run || !self.follower().read_last_files(id) {
            self.conclude_end(id);
        }
    }

    /// Records the end of a job whose last files were read or cannot be read.
    fn conclude_end(&mut self, id: JobId) {
        let now = self.now();
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(PendingEnd { state, exit_code, signal, why, ended_s, replies }) = job.end.take() else { return };
        // A job that never ran has written nothing.
        let has_run = job.record.state == JobState::Running;
        let unread = job.reports.as_ref().filter(|_| has_run).and_then(Reports::unread_folder);
        let note = unread.map(|dir| format!("the last files in {} were not read: it does not answer", dir.display()));
        fail::point("ended-before-journal");
        if let Some(note) = note {
            self.fact(Some(id), Change::note(note));
        }
        self.fact(Some(id), Change::Ended { state, exit_code, signal, why, ended_s });
        self.jobs.add_finished_run(id, self.runtimes.cores(&self.config));
        if let Some(outcome) = self.jobs.get(&id).and_then(|job| self.forecasts.outcome(job, now)) {
            let count = if outcome.is_met { &self.metrics.deadlines_met } else { &self.metrics.deadlines_missed };
            count.inc();
            self.fact(Some(id), Change::note(outcome.to_string()));
        }
        self.store.flush(id);
        let _ = self.save();
        if let Some(job) = self.jobs.get(&id) {
            keep_record(&self.paths, &job.record);
        }
        fail::point("ended-before-release");
        self.release_limits(id);
        fail::point("ended-after-release");
        self.watch.remove(id);
        drop_environment(&self.paths, id);
        self.plans.starts.retain(|s| *s != id);
        if let Some(job) = self.jobs.get_mut(&id) {
            if let Some(reports) = job.reports.take() {
                let (position, request) = reports.close(now);
                job.progress.position = position;
                request.into_iter().for_each(|request| self.readers.send(id, request));
            }
            job.pump = None;
            job.page = JobPage::Unknown;
            job.leader = None;
            job.kill_at = None;
        }
        // A container that we started is kept until its end is recorded.
        let container = self.jobs.get(&id).filter(|j| !j.record.adopted).and_then(|j| j.record.container.clone());
        if let (Some(container), Some(docker)) = (container, &self.runtimes.docker) {
            docker.remove(container);
        }
        self.job_changed(id);
        if state != JobState::Done {
            for (dependant, why) in self.jobs.dependants(id) {
                self.end(dependant, JobState::Failed, None, None, Some(why));
            }
        }
        self.answer_exits(id, replies);
    }

    /// The files of a job were read, as far as they can be.
    pub(super) fn files_read(&mut self, id: JobId, ticket: &Arc<AtomicBool>, answer: FileAnswer) {
        let now = self.now();
        let Some(reports) = self.jobs.get_mut(&id).and_then(|j| j.reports.as_mut()) else { return };
        let Some((reading, is_last)) = reports.end_files(now, ticket, answer) else { return };
        self.follower().record(id, reading);
        let is_over = self.jobs.get(&id).is_some_and(|j| j.end.is_some());
        // A reading that began before the end is followed by the last one.
        if is_over && (is_last || !self.follower().read_last_files(id)) {
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

    /// Puts a job's limits back and forgets its group.
    pub(super) fn release_limits(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (Some(handle), kind) = (job.handle(), job.record.spec.runtime) else { return };
        match kind {
            RuntimeKind::Docker => self.runtimes.docker.iter().for_each(|docker| docker.release(id, handle.clone())),
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
                let _ = std::fs::remove_file(self.paths.job(id.0).join(jobdir::LIMITS));
            }
            Err(e) => tracing::warn!(job = %id, "limits could not be put back: {e}"),
        }
    }

    /// Collects supervisors that ended. A job whose supervisor never began it has failed.
    pub(super) fn reap_supervisors(&mut self) {
        for (id, status) in self.supervisors.reap() {
            if self.read_exit(id) || self.read_start(id) {
                continue;
            }
            let is_gone = |j: &Job| !may_have_begun(&self.paths, &j.record) && !is_supervised(&self.paths, id);
            let is_starting = |j: &&Job| j.record.state == JobState::Starting;
            if self.jobs.get(&id).filter(is_starting).is_some_and(is_gone) {
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
        }
    }

    /// Kills the jobs whose time is over, and asks again for stops of containers that the engine did not take. A job
    /// that survives is killed again after a pause.
    pub(super) fn stop_and_kill(&mut self) {
        let now = self.now();
        for id in self.jobs.ids(|job| job.stop_due().is_some_and(|due| now >= due)) {
            if let Some(job) = self.jobs.get_mut(&id) {
                job.stop_again_at = None;
                self.runtimes.signal_stop(job, now);
            }
        }
        for id in self.jobs.ids(|job| job.kill_due().is_some_and(|due| now >= due)) {
            if let Some(job) = self.jobs.get_mut(&id) {
                self.runtimes.kill(job, &self.handle, now);
            }
        }
    }

    fn check_starting(&mut self, id: JobId, now: Time) {
        if self.read_start(id) || self.read_exit(id) || is_supervised(&self.paths, id) {
            return;
        }
        if self.jobs.get(&id).is_some_and(|j| may_have_begun(&self.paths, &j.record)) {
            return self.resolve_interrupted_start(id, now);
        }
        let Some(job) = self.jobs.get(&id) else { return };
        if job.record.stop_requested {
            self.end(id, JobState::Stopped, None, None, Some("stopped before it began".into()));
        } else if now.since(job.heard) > SUPERVISOR_PATIENCE {
            self.end(id, JobState::Failed, None, None, Some("its supervisor went away before it began".into()));
        }
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
            let state = if job.record.stop_requested { job.record.stopped_state() } else { JobState::Lost };
            let why = "its supervisor died when it started the job, and no process of the job is left".to_owned();
            self.end(id, state, None, None, Some(why));
        }
    }

    fn check_running(&mut self, id: JobId, now: Time) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if job.has_live_leader() {
            job.missed = None;
            return;
        }
        let since = *job.missed.get_or_insert(now);
        let state = if job.record.stop_requested { job.record.stopped_state() } else { JobState::Lost };
        if self.read_exit(id) || now.since(since) < EXIT_PATIENCE || is_supervised(&self.paths, id) {
            return;
        }
        let why = "it is gone, and so is its supervisor, the only one that knew how it ended".to_owned();
        self.end(id, state, None, None, Some(why));
    }
}

/// The state of a job that is over; its supervisor knows how it ended.
pub(super) fn state_after(record: &JobRecord, exited: &ExitReport) -> JobState {
    match (record.stop_requested, exited.code, &exited.error) {
        (true, _, _) => record.stopped_state(),
        (_, Some(0), None) => JobState::Done,
        _ => JobState::Failed,
    }
}

/// The recorded end of a job by the wall clock: after its start and before now, also where the clock was set meanwhile.
/// `None` if no time was recorded.
pub(super) fn bounded_end_s(ended_s: f64, earliest_s: f64, now_s: f64) -> Option<f64> {
    (ended_s.is_finite() && ended_s > 0.0).then(|| ended_s.max(earliest_s).min(now_s))
}

/// A job ends after its start. Of a start that was not seen it is only known that the submission came before it.
pub(super) fn earliest_end_s(record: &JobRecord) -> f64 {
    record.started.unwrap_or(record.submitted).unix_s
}

/// Whether a supervisor of the present attempt announced that it forks.
pub(super) fn may_have_begun(paths: &Paths, record: &JobRecord) -> bool {
    jobdir::may_have_begun(&paths.job(record.id.0), record.attempt)
}

/// Whether a supervisor holds the job's lock.
pub(super) fn is_supervised(paths: &Paths, id: JobId) -> bool {
    is_locked(&paths.job(id.0).join(jobdir::SUPERVISOR_LOCK))
}

pub(super) fn group_pids(record: &JobRecord) -> Vec<u32> {
    let dir = record.group.as_ref().and_then(|group| group.procs_files.first()?.parent());
    let mut pids = Vec::new();
    let mut dirs: Vec<PathBuf> = dir.map(Path::to_owned).into_iter().collect();
    // Tasks have groups of their own below the job's.
    while let Some(dir) = dirs.pop() {
        let text = std::fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        let below = std::fs::read_dir(&dir).into_iter().flatten().flatten();
        dirs.extend(below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()));
    }
    pids
}

/// The process in the job's group that leads its session, as the one that a supervisor starts does;
/// else any that lives.
fn leader_in_group(record: &JobRecord) -> Option<Identity> {
    let pids: Vec<i32> = group_pids(record).into_iter().filter_map(|pid| i32::try_from(pid).ok()).collect();
    let leads = |pid: &i32| getsid(Some(Pid::from_raw(*pid))).is_ok_and(|session| session.as_raw() == *pid);
    let leader = pids.iter().copied().find(leads).or_else(|| pids.first().copied())?;
    Identity::of(leader).filter(Identity::is_alive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_end_lies_between_the_start_and_now() {
        assert_eq!(bounded_end_s(50.0, 10.0, 90.0), Some(50.0));
        assert_eq!(bounded_end_s(5.0, 10.0, 90.0), Some(10.0), "the clock was set back before the end");
        assert_eq!(bounded_end_s(100.0, 10.0, 90.0), Some(90.0), "the clock was set back after the end");
        assert_eq!(bounded_end_s(95.0, 100.0, 90.0), Some(90.0), "it was set back, and the start seems to be later");
        assert_eq!((bounded_end_s(0.0, 10.0, 90.0), bounded_end_s(f64::NAN, 10.0, 90.0)), (None, None));
    }
}
