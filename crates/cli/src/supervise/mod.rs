//! The parent of one job: starts it, carries its output, records how it ended.
//!
//! **Problem.** A job must outlive the daemon, keep its terminal, and leave a true record of its
//! end whatever else dies.
//!
//! **How.** One small process for each job, single-threaded but for one short-lived report:
//! [`child`] starts the job, [`pump`] carries bytes and signals. The supervisor writes
//! `starting.json` before it forks, `started.json` after exec and `exit.json` at the end into the
//! job's directory. It reports to the daemon as well, but only the files count: a daemon that was
//! away reads them when it is back.
//!
//! **Terms.** *Attached*: in the foreground of the terminal in which `gainshare run` was typed.
//! *Detached*: no terminal, output only to the log.
//!
//! **Properties.** An attempt whose intent was written is never started again, even if the
//! supervisor is killed at the next instruction. A child whose supervisor dies before exec dies,
//! too.

pub mod child;
mod log;
mod pump;
pub mod record;
pub mod signals;
mod terminal;

use crate::notice::notice;
use child::{ChildProcess, Launch, StartError, Streams};
use gainshare_daemon::api::client::{Client, ClientError};
use gainshare_daemon::api::types::{ExitReport, StartOrder, StartReport};
use gainshare_daemon::fail;
use gainshare_daemon::jobdir::{self, Intent, write_json};
use gainshare_daemon::spec::{GROUPS_VARIABLE, ROLES_VARIABLE};
use gainshare_limits::process::Identity;
use nix::fcntl::{Flock, FlockArg};
use record::{ExitOutcome, now_unix_s};
use signals::Signals;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};
use terminal::{Standard, UserTerminal};

/// How long an unresponsive daemon may hold up the end of `run`. What it misses it reads from `exit.json`.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a supervisor waits for another one of the same job to end.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The daemon that the job is reported to.
pub struct DaemonContact {
    pub client: Client,
    pub id: u64,
    pub order: StartOrder,
}

pub struct SupervisedJob<'a> {
    pub command: &'a [OsString],
    pub cwd: Option<&'a Path>,
    pub base_env: Option<&'a BTreeMap<String, String>>,
    pub env: &'a BTreeMap<String, String>,
    /// `None`: no daemon; the job just runs.
    pub contact: Option<&'a DaemonContact>,
}

/// Runs the job to its end and returns the exit code to pass on.
pub fn supervise(job: &SupervisedJob, signals: &Signals, attached: bool) -> Result<u8, StartError> {
    let standard = Standard::detect();
    let user = (attached && standard.wants_pty()).then(|| UserTerminal::new(standard));
    let order = job.contact.map(|contact| &contact.order);
    let mut env = job.env.clone();
    if let Some(order) = order.filter(|order| !order.procs_files.is_empty() && env.contains_key(ROLES_VARIABLE)) {
        env.insert(GROUPS_VARIABLE.to_owned(), order.procs_files.join(":"));
    }
    let launch = Launch {
        command: job.command,
        cwd: job.cwd,
        base_env: job.base_env,
        env: &env,
        env_if_absent: order
            .map_or_else(Vec::new, |o| o.env.iter().map(|v| (v.name.as_str(), v.value.as_str())).collect()),
        procs_files: order.map_or(&[], |o| &o.procs_files),
        cpus: order.and_then(|o| o.cpus.as_deref()),
    };
    let streams = if attached { Streams::Attached(standard, user.as_ref()) } else { Streams::Detached };
    if let Some(order) = order {
        announce_fork(order);
    }
    let spawned = match child::spawn(&launch, &streams) {
        Ok(spawned) => spawned,
        Err(error) => {
            if let Some(contact) = job.contact {
                let code = Some(i32::from(error.exit_code()));
                report_exit(contact, ExitReport { code, error: Some(error.to_string()), ..ExitReport::default() });
            }
            return Err(error);
        }
    };
    let ChildProcess { pid, pipes, pty, notes } = spawned;
    let report = job.contact.map(|contact| report_start(contact, pid.as_raw(), notes));
    let log = order.map(|o| log::Log::open(Path::new(&o.dir)));
    let mut pump = pump::Pump::new(signals, pid, log);
    for (from, to) in pipes {
        pump.add_pipe(from, attached.then_some(to));
    }
    let ending = match (pty, user) {
        (Some(pty), Some(user)) => pump.add_pty(pty, user).and_then(|()| pump.run()),
        _ => pump.run(),
    };
    let ending = ending.unwrap_or_else(|error| {
        // Only a broken kernel brings us here; the job is still ours to wait for.
        notice!("lost the job's output: {error}");
        nix::sys::wait::waitpid(pid, None).ok().and_then(ExitOutcome::from_wait).unwrap_or(ExitOutcome::Code(1))
    });
    if let Some(contact) = job.contact {
        let (code, signal) = match ending {
            ExitOutcome::Code(code) => (Some(code), None),
            ExitOutcome::Signal(signal) => (None, Some(signal)),
        };
        if let Some(report) = report {
            let _ = report.join();
        }
        report_exit(contact, ExitReport { code, signal, ..ExitReport::default() });
    }
    Ok(ending.exit_code())
}

/// Writes the intent before the fork. A disk that is full does not keep the job from running:
/// without the intent, and should the supervisor be killed in this moment, the daemon believes that
/// the job never began.
fn announce_fork(order: &StartOrder) {
    let dir = Path::new(&order.dir);
    if let Err(error) = write_json(dir, jobdir::STARTING, &Intent { attempt: order.attempt }) {
        notice!("cannot write {}/{}: {error}; the job goes on", order.dir, jobdir::STARTING);
    }
    fail::point("supervise-before-fork");
}

/// Records the start and reports it to the daemon from a thread of its own: output must flow even
/// if the daemon does not answer.
fn report_start(contact: &DaemonContact, pid: i32, notes: Vec<String>) -> std::thread::JoinHandle<()> {
    let started = StartReport { attempt: contact.order.attempt, pid, start_ticks: start_ticks(pid), notes };
    fail::point("supervise-before-started");
    if let Err(error) = write_json(Path::new(&contact.order.dir), jobdir::STARTED, &started) {
        notice!("cannot write {}/started.json: {error}; the job goes on", contact.order.dir);
    }
    let (client, id) = (contact.client.clone(), contact.id);
    std::thread::spawn(move || {
        report(client, |client| async move { client.started(id, &started).await.map(drop) });
    })
}

fn report_exit(contact: &DaemonContact, exited: ExitReport) {
    let exited = ExitReport { attempt: contact.order.attempt, ended_s: now_unix_s(), ..exited };
    if let Err(error) = write_json(Path::new(&contact.order.dir), jobdir::EXIT, &exited) {
        notice!("cannot write {}/exit.json: {error}; free some space", contact.order.dir);
    }
    let id = contact.id;
    if !report(contact.client.clone(), |client| async move { client.exited(id, &exited).await.map(drop) }) {
        remove_groups(&contact.order);
    }
}

/// Without a daemon the supervisor removes the job's groups, and the base they are in when it was
/// the last. The kernel refuses both while a process is left in them.
fn remove_groups(order: &StartOrder) {
    for group in order.procs_files.iter().filter_map(|file| Path::new(file).parent()) {
        let _ = std::fs::remove_dir(group);
        let ours = |base: &&Path| base.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"gainshare-"));
        if let Some(base) = group.parent().filter(ours) {
            let _ = std::fs::remove_dir(base);
        }
    }
}

/// Sends a report to the daemon if it is there; whether the daemon took it. What it misses now it
/// reads from the files later.
fn report<F: Future<Output = Result<(), ClientError>>>(client: Client, send: impl FnOnce(Client) -> F) -> bool {
    let Ok(runtime) = crate::link::runtime() else { return false };
    let sent = runtime.block_on(async { tokio::time::timeout(REPORT_TIMEOUT, send(client)).await });
    matches!(sent, Ok(Ok(())))
}

/// Held while an attempt lives: two supervisors of one job can never both start it.
pub struct AttemptLock(#[expect(dead_code, reason = "held, not read")] Flock<File>);

impl AttemptLock {
    /// Another holder may just be ending, so it is given a moment.
    pub fn take(dir: &Path) -> Result<AttemptLock, String> {
        let path = dir.join(jobdir::SUPERVISOR_LOCK);
        let start = Instant::now();
        loop {
            let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
            let file = file.map_err(|error| format!("cannot open {}: {error}", path.display()))?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(AttemptLock(lock)),
                Err(_) if start.elapsed() < LOCK_PATIENCE => std::thread::sleep(Duration::from_millis(50)),
                Err(_) => return Err(format!("{} is held by another supervisor of this job", path.display())),
            }
        }
    }
}

/// How many lines the user's terminal shows.
pub fn terminal_rows() -> Option<usize> {
    let size = UserTerminal::new(Standard::detect()).size()?;
    (size.ws_row > 0).then_some(usize::from(size.ws_row))
}

/// When a process started, in clock ticks after boot; 0 if it is gone already.
pub fn start_ticks(pid: i32) -> u64 {
    Identity::of(pid).map_or(0, |process| process.start_ticks)
}
