//! Requests of users and supervisors: submit, admission, started, exited, stop, forget.
//!
//! The values of a job's environment may be secret. They are written to JOBDIR/spec.json before the
//! job is acknowledged and removed when it has started; the record, and with it the journal, has
//! only the names.

use super::jobs::{EndReply, JobTable};
use super::observe::earliest_end_s;
use super::runtimes::kind_name;
use super::start::{drop_environment, keep_record};
use super::{Driver, Ending, Job};
use crate::clock::Moment;
use crate::duration::format_duration;
use crate::error::{Refusal, disk_refusal};
use crate::fail;
use crate::jobdir;
use crate::journal::Batch;
use crate::paths::Paths;
use crate::record::{Change, JobRecord};
use crate::spec::{self, JobSpec};
use crate::types::*;
use gainshare_core::model::{JobId, Span};
use gainshare_limits::RuntimeKind;
use gainshare_limits::process::Identity;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::oneshot;

/// Jobs in one request.
const MAX_SUBMIT: usize = 1000;

/// Jobs that wait or run at once.
const MAX_LIVE: usize = 10_000;

/// Up to this many files are synced one by one; for more, one sync of the whole file system is faster.
const FEW_FILES: usize = 8;

/// Submissions whose folders and programs are being looked up at once.
const MAX_CHECKS: usize = 8;

/// Submissions that are under way.
pub(super) struct Submissions {
    /// Threads that look folders and programs up.
    checks: usize,
    /// No folder has this number or a larger one, except those of jobs that this daemon entered.
    first_free: JobId,
}

impl Submissions {
    pub(super) fn new(first_free: JobId) -> Submissions {
        Submissions { checks: 0, first_free }
    }
}

/// The answer to a submission.
type SubmitReply = oneshot::Sender<Result<Vec<JobInfo>, Refusal>>;

impl JobTable {
    /// Gives every job its id, name, owner and the ids of the jobs it waits for. `first` is the first free id.
    fn name_and_number(
        &self,
        specs: Vec<JobSpec>,
        request: &SubmitRequest,
        first: JobId,
        at: Moment,
    ) -> Result<Vec<JobRecord>, Refusal> {
        let mut taken: BTreeSet<String> = self.values().map(|j| j.record.name.clone()).collect();
        let live = |name: &str| self.values().find(|j| j.record.is_live() && j.record.name == name);
        let mut by_name = BTreeMap::new();
        let mut records = Vec::with_capacity(specs.len());
        taken.extend(specs.iter().filter_map(|s| s.name.clone()));
        for (id, mut spec) in (first.0..).map(JobId).zip(specs) {
            let name = match &spec.name {
                Some(name) => name.clone(),
                None => {
                    let base = spec.base_name();
                    let free = (1u64..).map(|n| format!("{base}-{n}")).find(|n| !taken.contains(n));
                    free.expect("numbers do not end")
                }
            };
            if let Some(other) = live(&name) {
                let message = format!(
                    "a job named {name} is already {} (id {}): choose another --name, or stop it first",
                    other.record.state.name(),
                    other.record.id.0
                );
                return Err(Refusal::new(ErrorCode::DuplicateName, message));
            }
            taken.insert(name.clone());
            by_name.insert(name.clone(), id);
            spec.name = Some(name);
            let mut record = new_record(id, spec, request.attached, at);
            record.env_names = match (request.attached, record.spec.runtime) {
                (true, _) => request.env_names.clone(),
                (false, RuntimeKind::Process) => request.base_env.keys().cloned().collect(),
                // A container has the environment of its image, not of the user who submitted it.
                (false, RuntimeKind::Docker) => Vec::new(),
            };
            records.push(record);
        }
        for record in &mut records {
            record.after = self.awaited(&record.name, &record.spec, &by_name)?;
        }
        refuse_cycles(&records)?;
        Ok(records)
    }

    /// The jobs for which a job of this spec waits. `new`: those that come with it.
    pub(super) fn awaited(
        &self,
        name: &str,
        spec: &JobSpec,
        new: &BTreeMap<String, JobId>,
    ) -> Result<Vec<JobId>, Refusal> {
        let find = |other: &String| {
            new.get(other).copied().map_or_else(|| self.find(other), Ok).map_err(|_| {
                let message = format!(
                    "job {name} waits for {other}, which is not known: submit {other} first, or in the same file"
                );
                Refusal::new(ErrorCode::InvalidSpec, message)
            })
        };
        spec.after.iter().map(find).collect()
    }
}

impl Driver {
    /// Looks the folders and programs of the jobs up on another thread, because a file system may not answer, and then
    /// submits. A client that went away meanwhile submits nothing.
    pub(crate) fn submit_checked(&mut self, request: SubmitRequest, reply: SubmitReply) {
        if request.attached {
            return drop(reply.send(self.submit(request)));
        }
        let records = match self.new_records(&mut request.clone()) {
            Ok(records) => records,
            Err(refusal) => return drop(reply.send(Err(refusal))),
        };
        if self.submissions.checks >= MAX_CHECKS {
            let what = "too many submissions wait for folders that do not answer: try again later";
            return drop(reply.send(Err(Refusal::new(ErrorCode::Timeout, what))));
        }
        self.submissions.checks += 1;
        let (runtimes, base_env) = (self.config.runtime.clone(), request.base_env.clone());
        let check = move || records.iter().try_for_each(|record| check_startable(&record.spec, &base_env, &runtimes));
        self.handle.off_thread("submit-check", check, move |driver, checked| {
            driver.submissions.checks -= 1;
            if !reply.is_closed() {
                let _ = reply.send(checked.and_then(|()| driver.submit(request)));
            }
        });
    }

    /// Takes all jobs or none.
    pub(crate) fn submit(&mut self, mut request: SubmitRequest) -> Result<Vec<JobInfo>, Refusal> {
        let mut records = self.new_records(&mut request)?;
        let ids: Vec<JobId> = records.iter().map(|r| r.id).collect();
        let files = if request.attached { Vec::new() } else { spec_files(&records, &request.base_env) };
        records.iter_mut().for_each(|r| r.spec.hide_env_values());
        self.enter(records, files)?;
        fail::point("submit-before-reply");
        // Decided right away, so that the answer already says whether the job starts or what it waits for.
        self.decide();
        self.predict_submitted(&ids);
        Ok(ids.iter().filter_map(|id| self.jobs.get(id)).map(|j| self.picture().info(j)).collect())
    }

    /// The records of the jobs of a request, if they may be submitted. Nothing is changed.
    fn new_records(&self, request: &mut SubmitRequest) -> Result<Vec<JobRecord>, Refusal> {
        if self.timeline.ending.is_some() {
            return Err(Refusal::new(ErrorCode::ShuttingDown, "the daemon is shutting down: start it again first"));
        }
        let mut specs = spec::prepare(std::mem::take(&mut request.jobs))?;
        let here = crate::deadline::now();
        specs.iter_mut().try_for_each(|spec| spec.resolve(&here))?;
        specs.iter().try_for_each(|spec| self.refuse_without_gpu(&spec.label(), spec.gpu_memory_bytes()))?;
        if specs.is_empty() || specs.len() > MAX_SUBMIT || (request.attached && specs.len() != 1) {
            let wanted = if request.attached { "one job".into() } else { format!("1 to {MAX_SUBMIT} jobs") };
            return Err(Refusal::new(
                ErrorCode::BadRequest,
                format!("{} jobs in one request: send {wanted}", specs.len()),
            ));
        }
        if self.jobs.live_count() + specs.len() > MAX_LIVE {
            return Err(Refusal::new(
                ErrorCode::TooLarge,
                format!("more than {MAX_LIVE} live jobs: wait for some to end"),
            ));
        }
        self.jobs.name_and_number(specs, request, self.next_id()?, self.clock.moment())
    }

    /// The smallest number that no job and no folder of one has had yet.
    pub(super) fn next_id(&self) -> Result<JobId, Refusal> {
        Ok(self.store.journal.next_id()?.max(self.submissions.first_free))
    }

    /// Makes the jobs' directories with their `files` and journals the jobs; from then on they exist.
    pub(super) fn enter(&mut self, records: Vec<JobRecord>, files: Vec<SuperviseFile>) -> Result<(), Refusal> {
        let at = self.clock.moment();
        let submitted =
            |record: &JobRecord| (at, Some(record.id), Change::Submitted { record: Box::new(record.clone()) });
        let batch = Batch { changes: records.iter().map(submitted).collect(), ..Batch::default() };
        let owners: BTreeSet<&str> = records.iter().map(|r| r.owner.as_str()).collect();
        let (store, jobs) = (&mut self.store, &mut self.jobs);
        let mut made = Vec::new();
        let entered = make_dirs(&self.paths, &mut made, &records, &files)
            .and_then(|()| owners.iter().try_for_each(|owner| store.register_owner(jobs, owner)));
        let entered = entered.and_then(|()| {
            fail::point("submit-before-journal");
            self.save_with(batch)
        });
        self.problems.note_disk(&entered);
        if let Err(e) = entered {
            made.iter().for_each(|dir| self.removals.remove(dir));
            // A folder that is there now is not of these jobs, or cannot be removed. Its number is not used.
            let is_taken = |id: &JobId| self.paths.job(id.0).symlink_metadata().is_ok();
            if let Some(taken) = records.iter().map(|record| record.id).filter(is_taken).max() {
                self.submissions.first_free = self.submissions.first_free.max(JobId(taken.0 + 1));
            }
            return Err(e);
        }
        let (now, cores) = (self.now(), self.runtimes.cores(&self.config));
        for record in records {
            let id = record.id;
            // The only file of a job whose supervisor has the environment.
            if record.attached {
                keep_record(&self.paths, &record);
            }
            self.jobs.insert(id, Job::new(record, now));
            self.jobs.find_gpu_memory(id);
            self.jobs.find_past_runs(id, cores);
            self.job_changed(id);
        }
        Ok(())
    }

    /// What an attached supervisor should do now.
    pub(crate) fn admission(&mut self, id: JobId) -> Result<Admission, Refusal> {
        let now = self.now();
        let job =
            self.jobs.get_mut(&id).ok_or_else(|| Refusal::new(ErrorCode::NotFound, format!("there is no job {id}")))?;
        job.heard = now;
        let job = &self.jobs[&id];
        if !job.record.attached {
            let message = format!("job {} is started by the daemon itself: do not ask for admission", job.record.name);
            return Err(Refusal::new(ErrorCode::WrongState, message));
        }
        match (job.record.state, &job.record.order) {
            (JobState::Queued, _) => Ok(Admission::Waiting { reason: self.picture().why(job) }),
            (JobState::Starting, Some(order)) => Ok(Admission::Start { start: order.clone() }),
            (state, _) if state.is_final() => {
                Ok(Admission::Refused { state_now: state, reason: self.picture().why(job) })
            }
            (state, _) => {
                let message = format!("job {} is {} already", job.record.name, state.name());
                Err(Refusal::new(ErrorCode::WrongState, message))
            }
        }
    }

    /// A supervisor reports that the job's process is there.
    pub(crate) fn started(&mut self, id: JobId, started: &StartReport) -> Result<JobInfo, Refusal> {
        let job = self.jobs.job(id)?;
        let (state, attempt) = (job.record.state, job.record.attempt);
        let leader = Identity { pid: started.pid, start_ticks: started.start_ticks };
        if started.attempt != attempt {
            let message =
                format!("attempt {} of {} is over: attempt {attempt} counts now", started.attempt, job.record.name);
            return Err(Refusal::new(ErrorCode::WrongState, message));
        }
        if state == JobState::Running && job.record.leader == Some(leader) {
            return Ok(self.picture().info(job));
        }
        if state != JobState::Starting {
            let message = format!("job {} is {}: it cannot start", job.record.name, state.name());
            return Err(Refusal::new(ErrorCode::WrongState, message));
        }
        let handle = job.handle();
        let stopping = job.record.stop_requested;
        if let (Some(handle), Some(process)) = (&handle, &mut self.runtimes.process)
            && let Err(e) = process.started(handle, leader)
        {
            tracing::warn!(job = %id, "{e}");
        }
        fail::point("started-before-journal");
        let notes = started.notes.clone();
        self.fact(Some(id), Change::Started { leader: Some(leader), container: None, notes });
        // The acknowledgement may not outrun the disk; a full disk does not make the process any less there.
        if self.save().is_ok() {
            drop_environment(&self.paths, id);
        }
        fail::point("started-before-reply");
        self.job_changed(id);
        if stopping {
            if let Some(job) = self.jobs.get_mut(&id) {
                // A kill before the start found no process.
                job.kill_at = job.record.kill_at.or(job.kill_at);
            }
            self.runtimes.signal_stop(&self.jobs[&id], self.clock.now());
        }
        Ok(self.picture().info(&self.jobs[&id]))
    }

    /// A supervisor reports that the job is over. Answered when the end is recorded.
    pub(crate) fn exited(&mut self, id: JobId, exited: &ExitReport, reply: EndReply) {
        let record = match self.jobs.job(id) {
            Ok(job) => &job.record,
            Err(refusal) => return drop(reply.send(Err(refusal))),
        };
        if exited.attempt != record.attempt {
            let message = format!("attempt {} of {} is not the present one", exited.attempt, record.name);
            return drop(reply.send(Err(Refusal::new(ErrorCode::WrongState, message))));
        }
        let earliest_s = earliest_end_s(record);
        self.end_as_reported(id, exited, earliest_s);
        match self.jobs.get_mut(&id).and_then(|job| job.end.as_mut()) {
            Some(end) => end.replies.push(reply),
            None => self.answer_exits(id, vec![reply]),
        }
    }

    /// Answers supervisors whose job's end is recorded.
    pub(super) fn answer_exits(&mut self, id: JobId, replies: Vec<EndReply>) {
        if replies.is_empty() {
            return;
        }
        let saved = self.save();
        self.decide();
        let answer = saved.and_then(|()| Ok(self.picture().info(self.jobs.job(id)?)));
        for reply in replies {
            let _ = reply.send(answer.clone());
        }
    }

    /// Ends a job: at once if it waits, else by SIGTERM and, after the grace, SIGKILL.
    pub(crate) fn stop(&mut self, id: JobId, grace_s: f64) -> Result<JobInfo, Refusal> {
        self.stop_because(id, grace_s, None)
    }

    /// Once a second: stops jobs that have run for longer than they may.
    pub(super) fn check_time_limits(&mut self) {
        let now = self.now();
        let over = |job: &Job| {
            let (limit, started) = (job.record.spec.time_limit()?, job.record.started?);
            let is_over = now.since(started.time) >= Span::from_secs_f64(limit.as_secs_f64());
            let runs = job.record.state == JobState::Running && !job.record.stop_requested;
            (runs && is_over).then_some((job.record.id, limit))
        };
        let over: Vec<(JobId, Duration)> = self.jobs.values().filter_map(over).collect();
        for (id, limit) in over {
            let why = format!("it did not end within its time limit of {}", format_duration(limit));
            tracing::warn!(job = %id, "{why}: stopping it");
            // What the disk refuses is tried again with the next beat.
            let _ = self.stop_because(id, StopRequest::default().grace_s, Some(why));
        }
    }

    fn stop_because(&mut self, id: JobId, grace_s: f64, why: Option<String>) -> Result<JobInfo, Refusal> {
        let now = self.now();
        let job = self.jobs.job(id)?;
        if !job.record.is_live() {
            let message = format!("job {} has already ended ({})", job.record.name, job.record.state.name());
            return Err(Refusal::new(ErrorCode::WrongState, message));
        }
        if job.record.state == JobState::Queued {
            self.end(id, JobState::Stopped, None, None, Some("stopped before it began".into()));
        } else {
            let at = now + Span::from_secs_f64(grace_s.clamp(0.0, 86_400.0));
            if !job.record.stop_requested || job.record.kill_at.is_none_or(|earlier| at < earlier) {
                self.fact(Some(id), Change::StopRequested { kill_at: at, why });
            }
            if let Some(job) = self.jobs.get_mut(&id) {
                job.kill_at = Some(job.kill_at.map_or(at, |earlier| earlier.min(at)));
            }
            self.runtimes.signal_stop(&self.jobs[&id], now);
        }
        let saved = self.save();
        self.decide();
        saved?;
        Ok(self.picture().info(self.jobs.job(id)?))
    }

    /// Removes what is kept of an ended job.
    pub(crate) fn forget(&mut self, id: JobId) -> Result<(), Refusal> {
        let job = self.jobs.job(id)?;
        let name = job.record.name.clone();
        if job.record.is_live() {
            let message = format!("job {name} is {}: stop it before you remove it", job.record.state.name());
            return Err(Refusal::new(ErrorCode::WrongState, message));
        }
        if let Some(other) = self.jobs.values().find(|j| j.record.is_live() && j.record.after.contains(&id)) {
            let message = format!("job {} waits for {name}: stop it first", other.record.name);
            return Err(Refusal::new(ErrorCode::WrongState, message));
        }
        self.save_with(Batch {
            changes: vec![(self.clock.moment(), Some(id), Change::Forgotten)],
            ..Batch::default()
        })?;
        self.jobs.forget(id);
        self.removals.remove(&self.paths.job(id.0));
        self.inbox.emit(Event::Forgotten { id: id.0, name });
        Ok(())
    }

    pub(crate) fn shut_down(&mut self, request: ShutdownRequest) {
        let since = self.now();
        self.timeline.ending = Some(Ending { stop_jobs: request.stop_jobs, since });
        if request.stop_jobs {
            for id in self.jobs.live() {
                let _ = self.stop(id, StopRequest::default().grace_s);
            }
        }
    }
}

/// Finds mistakes now that would otherwise show only when the job's turn has come. May take as long as the file
/// systems of the job's folder and programs take.
fn check_startable(
    spec: &JobSpec,
    base_env: &BTreeMap<String, String>,
    runtimes: &[RuntimeKind],
) -> Result<(), Refusal> {
    if !runtimes.contains(&spec.runtime) {
        let message = format!(
            "job {}: the daemon runs without the runtime {}: start it with `gainshare up --runtime process,docker`",
            spec.label(),
            kind_name(spec.runtime)
        );
        return Err(Refusal::new(ErrorCode::InvalidSpec, message));
    }
    let cwd = spec.cwd.clone().unwrap_or_else(|| PathBuf::from("/"));
    if !cwd.is_dir() {
        let what = if cwd.exists() { "is not a directory: correct cwd" } else { "does not exist: make it, or set cwd" };
        let message = format!("job {}: its working directory {} {what}", spec.label(), cwd.display());
        return Err(Refusal::new(ErrorCode::InvalidSpec, message));
    }
    if spec.runtime != RuntimeKind::Process {
        return Ok(());
    }
    let path = spec.env.get("PATH").or(base_env.get("PATH")).cloned();
    let path = path.or_else(|| std::env::var("PATH").ok()).unwrap_or_else(|| "/usr/bin:/bin".into());
    let program = &spec.command[0];
    if find_program(program, &cwd, &path).is_none() {
        let found = program.contains('/').then(|| cwd.join(program).metadata().ok()).flatten();
        let why = match found {
            Some(found) if found.is_dir() => format!("`{program}` is a directory; give the program inside it"),
            Some(_) => format!("`{program}` is not executable; `chmod +x` it, or name its interpreter"),
            None => format!("there is no program `{program}`: check its name, or give its full path"),
        };
        let message = format!("job {}: {why}", spec.label());
        return Err(Refusal::new(ErrorCode::MissingProgram, message));
    }
    Ok(())
}

/// A job that waits; its spec has a name.
pub(super) fn new_record(id: JobId, spec: JobSpec, attached: bool, at: Moment) -> JobRecord {
    let owner = spec.owner.clone().unwrap_or_else(unix_user);
    JobRecord { attached, ..JobRecord::queued(id, spec, owner, at) }
}

/// Makes the directories and writes the files, so that they are still there after a power cut. A directory that is
/// there already is of a job that the journal does not know: it stays as it is. `made`: those that are new.
fn make_dirs(
    paths: &Paths,
    made: &mut Vec<PathBuf>,
    records: &[JobRecord],
    files: &[SuperviseFile],
) -> Result<(), Refusal> {
    for record in records {
        let dir = paths.job(record.id.0);
        std::fs::DirBuilder::new().mode(0o700).create(&dir).map_err(|e| disk_refusal("make", &dir, e))?;
        made.push(dir);
    }
    let mut written = Vec::with_capacity(files.len());
    for file in files {
        let dir = paths.job(file.id);
        let bytes = serde_json::to_vec(file).map_err(|e| disk_refusal("write", &dir, e.into()))?;
        let file = jobdir::write_unsynced(&dir, jobdir::SPEC, &bytes);
        written.push((file.map_err(|e| disk_refusal("write", &dir.join(jobdir::SPEC), e))?, dir));
    }
    let jobs = paths.jobs();
    let sync = || -> io::Result<()> {
        if written.len() > FEW_FILES {
            return Ok(nix::unistd::syncfs(File::open(&jobs)?)?);
        }
        let files = written.iter().map(|(file, dir)| (file, dir.as_path()));
        jobdir::sync_new(&jobs, files, File::sync_all)
    };
    sync().map_err(|e| disk_refusal("sync", &jobs, e))
}

/// What the supervisors of jobs will need; a container has no supervisor, only values of its own variables.
fn spec_files(records: &[JobRecord], base_env: &BTreeMap<String, String>) -> Vec<SuperviseFile> {
    let file = |record: &JobRecord| SuperviseFile {
        id: record.id.0,
        name: record.name.clone(),
        spec: record.spec.clone(),
        base_env: if record.spec.runtime == RuntimeKind::Process { base_env.clone() } else { BTreeMap::new() },
        order: StartOrder::default(),
        socket: String::new(),
    };
    records.iter().map(file).collect()
}

/// Only jobs of one request can wait for each other in a circle.
fn refuse_cycles(records: &[JobRecord]) -> Result<(), Refusal> {
    let mut left: BTreeMap<JobId, &JobRecord> = records.iter().map(|r| (r.id, r)).collect();
    loop {
        let free: Vec<JobId> =
            left.values().filter(|r| r.after.iter().all(|a| !left.contains_key(a))).map(|r| r.id).collect();
        if free.is_empty() {
            break;
        }
        left.retain(|id, _| !free.contains(id));
    }
    if left.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = left.values().map(|r| r.name.as_str()).collect();
    let message = format!("jobs {} wait for each other in a circle: remove one `after`", names.join(", "));
    Err(Refusal::new(ErrorCode::InvalidSpec, message))
}

pub(super) fn unix_user() -> String {
    let uid = nix::unistd::getuid();
    nix::unistd::User::from_uid(uid).ok().flatten().map_or_else(|| uid.to_string(), |u| u.name)
}

fn find_program(program: &str, cwd: &Path, path: &str) -> Option<PathBuf> {
    let runs = |p: &Path| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    if program.contains('/') {
        return Some(cwd.join(program)).filter(|p| runs(p));
    }
    std::env::split_paths(OsStr::new(path)).map(|dir| cwd.join(dir).join(program)).find(|p| runs(p))
}
