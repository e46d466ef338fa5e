//! The way to the daemon: finds it, starts one if there is none, and sends requests from ordinary blocking code.
//!
//! Starting is safe when many commands do it at once: `gainshare up --detach --on-demand` takes a
//! lock, checks again, and only then starts a daemon; the others wait for the lock and find it
//! running. A daemon that the same user runs with another runtime directory (a login session's, a
//! service's) is found through the state directory.

use crate::system;
use anyhow::{Context, Result, bail};
use gainshare_core::backoff::Backoff;
use gainshare_daemon::api::client::{Client, ClientError};
use gainshare_daemon::paths::Paths;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A daemon that re-adopts many jobs after a crash takes a second or two; a machine under full load somewhat longer.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// A healthy daemon answers in milliseconds. One that does not within this time is stopped or stuck.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks the daemon, blocking.
pub struct Link {
    pub client: Client,
    pub paths: Paths,
    runtime: tokio::runtime::Runtime,
}

/// Whether a daemon answers at the socket.
pub enum DaemonState {
    Running,
    Absent,
    /// A process has the socket but does not answer.
    Silent,
}

impl Link {
    /// To the daemon of `paths`, whether it runs or not.
    pub fn new(paths: Paths) -> Result<Link> {
        Ok(Link { client: Client::of(&paths), paths, runtime: runtime()? })
    }

    pub fn call<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// [`Link::call`] that gives up after a while, for what is only best effort.
    pub fn call_within<T>(
        &self,
        limit: Duration,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        self.runtime.block_on(async {
            tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
                Err(ClientError::Timeout {
                    socket: self.client.socket().display().to_string(),
                    seconds: limit.as_secs(),
                })
            })
        })
    }

    pub fn probe(&self) -> DaemonState {
        match self.call_within(HEALTH_TIMEOUT, self.client.health()) {
            Ok(_) => DaemonState::Running,
            Err(ClientError::Timeout { .. }) => DaemonState::Silent,
            Err(_) => DaemonState::Absent,
        }
    }

    /// The error for [`DaemonState::Silent`].
    pub fn silent_daemon(&self) -> anyhow::Error {
        let socket = self.client.socket().display();
        anyhow::anyhow!("the daemon at {socket} does not answer: it is stopped or stuck; see `gainshare doctor`")
    }

    /// Makes sure that a daemon answers, starting one if need be.
    pub fn ensure(&self) -> Result<()> {
        let socket = self.client.socket().display();
        match self.probe() {
            DaemonState::Running => return Ok(()),
            DaemonState::Silent => return Err(self.silent_daemon()),
            DaemonState::Absent if std::env::var_os("GAINSHARE_SOCKET").is_some_and(|v| !v.is_empty()) => {
                bail!("no daemon answers at {socket}, which GAINSHARE_SOCKET names; correct or unset it")
            }
            DaemonState::Absent => {}
        }
        let starter = own_program()?
            .args(["up", "--detach", "--on-demand"])
            .arg("--state-dir")
            .arg(&self.paths.state)
            .arg("--runtime-dir")
            .arg(&self.paths.runtime)
            .stdin(Stdio::null())
            .output()
            .context("cannot start the daemon")?;
        if starter.status.success() {
            return Ok(());
        }
        let words = String::from_utf8_lossy(&starter.stderr);
        bail!("{}", words.trim().trim_start_matches("gainshare: "));
    }

    /// For commands that only look: a daemon is started if there is anything it could know, so that
    /// jobs whose daemon died are watched again. `false`: there has never been one here.
    pub fn ensure_if_used(&self) -> Result<bool> {
        // A journal that was moved away leaves the folders of its jobs.
        let has_jobs = || self.paths.jobs().read_dir().is_ok_and(|mut folders| folders.next().is_some());
        let is_used = self.paths.journal().exists() || has_jobs();
        if matches!(self.probe(), DaemonState::Absent) && !is_used {
            return Ok(false);
        }
        self.ensure().map(|()| true)
    }
}

/// Just enough to wait for one answer at a time.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot set up polling")
}

/// This very program, to be run again.
pub fn own_program() -> Result<Command> {
    // The link works even if the file was replaced by a newer one meanwhile.
    Ok(Command::new(std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into())))
}

/// Makes `command` independent of our terminal and directory.
pub fn detach(command: &mut Command) -> &mut Command {
    system::detach(command)
}

/// Starts `up` with `arguments` in the background and waits until it answers; `false` if one was running already.
pub fn start_in_background(link: &Link, arguments: &[std::ffi::OsString]) -> Result<bool> {
    link.paths.create()?;
    let _lock = start_lock(&link.paths)?;
    match link.probe() {
        DaemonState::Running => return Ok(false),
        DaemonState::Silent => return Err(link.silent_daemon()),
        DaemonState::Absent => {}
    }
    let log_path = link.paths.daemon_log();
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(&log_path);
    let log = log.with_context(|| format!("cannot open {}", log_path.display()))?;
    let log_start = log.metadata().map_or(0, |m| m.len());
    let mut command = own_program()?;
    command.arg("up").args(arguments).current_dir("/").stdin(Stdio::null());
    command.stdout(log.try_clone()?).stderr(log);
    let mut child = detach(&mut command).spawn().context("cannot start the daemon")?;
    wait_until_ready(link, &mut child).map_err(|why| {
        let tail = tail(&log_path, log_start);
        let last = if tail.is_empty() { String::new() } else { format!(": {tail}") };
        anyhow::anyhow!("the daemon did not come up ({why}){last}; its log is {}", log_path.display())
    })?;
    Ok(true)
}

fn start_lock(paths: &Paths) -> Result<Flock<File>> {
    let path = paths.runtime.join("start.lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, errno)| anyhow::anyhow!("cannot lock {}: {errno}", path.display()))
}

/// How long a daemon that another command started may take to answer once ours has ended in its favour.
const OTHER_DAEMON_PATIENCE: Duration = Duration::from_secs(3);

fn wait_until_ready(link: &Link, child: &mut Child) -> Result<(), String> {
    let start = Instant::now();
    let mut retries = Backoff::new(Duration::from_millis(5), Duration::from_millis(100));
    let mut ended: Option<Instant> = None;
    loop {
        if matches!(link.probe(), DaemonState::Running) {
            return Ok(());
        }
        match child.try_wait() {
            Ok(Some(status)) => {
                // A daemon may have been started by hand in the same moment: ours ended in its
                // favour, and it will answer soon.
                if ended.get_or_insert_with(Instant::now).elapsed() > OTHER_DAEMON_PATIENCE {
                    return Err(status.to_string());
                }
            }
            Err(error) => return Err(error.to_string()),
            Ok(None) if start.elapsed() > START_TIMEOUT => {
                return Err(format!("no answer within {} s", START_TIMEOUT.as_secs()));
            }
            Ok(None) => {}
        }
        std::thread::sleep(retries.next_pause());
    }
}

/// The last words of the log since `start`, on one line.
fn tail(path: &std::path::Path, start: u64) -> String {
    let mut text = Vec::new();
    if let Ok(mut file) = File::open(path) {
        let _ = file.seek(SeekFrom::Start(start));
        let _ = file.take(64 << 10).read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    lines[lines.len().saturating_sub(3)..].join(" | ").trim_start_matches("gainshare: ").to_owned()
}
