//! The guard: puts limits back when the daemon is dead or stands still.
//!
//! **Problem.** If the daemon dies for good, its last limits would stay for ever: jobs stay
//! throttled and nothing frees them.
//!
//! **How.** A process of its own, one for each state directory, reads the daemon's lease several
//! times within the lease's length. When the lease has expired, the guard writes a lapse, restores
//! every job listed in the journal's `limits` table, and tries again, with pauses that grow, what
//! could not be restored. A daemon that only stood still finds its epoch in the lapse and decides
//! again under a new epoch. A daemon that starts while a guard of an earlier daemon lives uses that
//! guard.
//!
//! **Properties.** The guard touches no limit while the lease is valid. It ends when the daemon
//! ended properly (no lease), when another daemon has taken over the journal with another runtime
//! directory, or when the daemon is dead and every limit is back.

use crate::clock::boottime_ns;
use crate::config::DaemonConfig;
use crate::duration::format_duration;
use crate::fail;
use crate::instance::{self, Holder, is_locked};
use crate::journal;
use crate::launch::{detach, program};
use crate::lease::{Lapse, LeaseContent};
use crate::paths::Paths;
use crate::restore::restore;
use gainshare_core::backoff::Backoff;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// A missing lease at the very beginning means that the daemon is only just starting.
const FIRST_LEASE_WITHIN: Duration = Duration::from_secs(10);

/// Pauses between attempts to restore what could not be restored.
const RETRIES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));

/// What the guard found in one round.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// The lease is valid, or not there yet.
    Alive,
    /// The limits must go back; `epoch` is missing if the lease belongs to a daemon of another state directory.
    Lapsed { epoch: Option<u64>, is_dead: bool },
    /// Nothing is left to guard.
    Over,
}

pub(crate) fn examine(
    paths: &Paths,
    age: Duration,
    now_ns: u64,
    holder: &Holder,
    lease: Option<LeaseContent>,
) -> Finding {
    let is_dead = *holder == Holder::None;
    if let Holder::Daemon(Some(address)) = holder
        && address.socket != paths.socket()
    {
        return Finding::Over;
    }
    match lease {
        None if !is_dead && age < FIRST_LEASE_WITHIN => Finding::Alive,
        None => Finding::Over,
        Some(lease) if lease.state != paths.state => {
            if is_dead {
                Finding::Lapsed { epoch: None, is_dead }
            } else {
                Finding::Alive
            }
        }
        Some(lease) if lease.has_expired(now_ns) => Finding::Lapsed { epoch: Some(lease.epoch), is_dead },
        Some(_) => Finding::Alive,
    }
}

/// Watches until nothing is left to guard. `lease` sets the pace; the length that counts is the one in the
/// lease file.
pub fn run(state_dir: PathBuf, runtime_dir: PathBuf, lease: Duration) -> std::io::Result<()> {
    let paths = Paths { state: state_dir, runtime: runtime_dir };
    let Some(_lock) = lock(&paths)? else { return Ok(()) };
    // Often enough that limits are back soon after the lease is over, seldom enough to cost nothing.
    let pace = (lease / 8).clamp(Duration::from_millis(100), Duration::from_secs(1));
    let begun = Instant::now();
    let find = || {
        let holder = instance::holder(&paths);
        examine(&paths, begun.elapsed(), boottime_ns(), &holder, LeaseContent::read(&paths.lease()))
    };
    let (mut retries, mut next_try) = (RETRIES, begun);
    loop {
        std::thread::sleep(pace);
        let (epoch, is_dead) = match find() {
            Finding::Over => return Ok(()),
            Finding::Alive => {
                (retries, next_try) = (RETRIES, Instant::now());
                continue;
            }
            Finding::Lapsed { epoch, is_dead } => (epoch, is_dead),
        };
        let restored = epoch.map(|epoch| Lapse { epoch, restored: true });
        let mut is_whole = restored.is_some() && Lapse::read(&paths.lapsed()) == restored;
        if !is_whole && Instant::now() >= next_try {
            // Written first: a daemon that runs again in the middle of this must not believe in its limits.
            if let Some(epoch) = epoch {
                Lapse { epoch, restored: false }.write(&paths.lapsed())?;
            }
            fail::point("guard-before-restore");
            is_whole = restore_all(&paths, || matches!(find(), Finding::Lapsed { .. }));
            fail::point("guard-before-restored");
            if let Some(lapse) = restored.filter(|_| is_whole) {
                lapse.write(&paths.lapsed())?;
            }
            next_try = Instant::now() + retries.next_pause();
        }
        if is_whole && is_dead {
            return Ok(());
        }
    }
}

/// Only one guard for each journal; a second one has nothing to do.
fn lock(paths: &Paths) -> std::io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    let mut file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(paths.guard_lock())?;
    match file.try_lock() {
        Ok(()) => {
            file.set_len(0)?;
            writeln!(file, "{}", std::process::id())?;
            Ok(Some(file))
        }
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

/// Whether every limit is back. Stops as soon as a daemon has a valid lease again: from then on the
/// limits are the daemon's.
fn restore_all(paths: &Paths, has_lapsed: impl Fn() -> bool) -> bool {
    let rows = match journal::limits_in(&paths.journal()) {
        Ok(rows) => rows,
        Err(e) => {
            tracing::error!("the guard cannot read which limits to put back: {e}");
            return false;
        }
    };
    let mut is_whole = true;
    for row in rows {
        if !has_lapsed() {
            return false;
        }
        if let Err(e) = restore(&row) {
            tracing::error!(job = %row.job, "the guard cannot put limits back: {e}");
            is_whole = false;
        }
        fail::point("guard-after-one-restore");
    }
    is_whole
}

/// The daemon's side: makes sure that a guard runs.
pub(crate) struct GuardKeeper {
    child: Option<Child>,
    retries: Backoff,
    next_start: Instant,
}

impl GuardKeeper {
    pub(crate) fn new() -> GuardKeeper {
        GuardKeeper { child: None, retries: RETRIES, next_start: Instant::now() }
    }

    /// Starts a guard if none runs, neither one of ours nor one of an earlier daemon. Pauses grow
    /// while guards end at once.
    pub(crate) fn ensure(&mut self, paths: &Paths, config: &DaemonConfig) {
        if let Some(child) = &mut self.child {
            if matches!(child.try_wait(), Ok(None)) {
                self.retries.reset();
                return;
            }
            self.child = None;
        }
        if is_locked(&paths.guard_lock()) || Instant::now() < self.next_start {
            return;
        }
        self.next_start = Instant::now() + self.retries.next_pause();
        let program = program(config);
        let mut command = Command::new(&program);
        command.arg("guard").arg("--state-dir").arg(&paths.state).arg("--runtime-dir").arg(&paths.runtime);
        command.arg("--lease").arg(format_duration(config.lease));
        detach(&mut command);
        match command.spawn() {
            Ok(child) => {
                tracing::info!("started the guard (pid {})", child.id());
                self.child = Some(child);
            }
            Err(e) => tracing::warn!("cannot start the guard {}: {e}", program.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::Address;

    const LENGTH: Duration = Duration::from_secs(3);

    fn paths() -> Paths {
        Paths { state: "/state".into(), runtime: "/run".into() }
    }

    fn lease(state: &str) -> Option<LeaseContent> {
        Some(LeaseContent { epoch: 7, boottime_ns: 1, length: LENGTH, state: state.into() })
    }

    fn daemon(socket: &str) -> Holder {
        Holder::Daemon(Some(Address { host: "h".into(), boot_id: "b".into(), pid: 1, socket: socket.into() }))
    }

    /// A stop of the unit, or a lack of memory in it, must not take the guard and the supervisors along.
    #[test]
    fn the_unit_of_systemd_ends_the_daemon_alone() {
        let unit = include_str!("../../../deploy/systemd/gainshare.service");
        for line in ["KillMode=process", "OOMPolicy=continue", "Restart=on-failure"] {
            assert!(unit.lines().any(|one| one == line), "{line}");
        }
    }

    #[test]
    fn what_the_guard_makes_of_lock_and_lease() {
        let (young, old) = (Duration::from_secs(1), Duration::from_secs(60));
        let late = 10_000_000_000;
        let find = |age, now, holder: Holder, lease| examine(&paths(), age, now, &holder, lease);
        let ours = || daemon("/run/api.sock");
        assert_eq!(find(old, 5, ours(), lease("/state")), Finding::Alive);
        assert_eq!(find(old, 5, Holder::None, lease("/state")), Finding::Alive, "a restart may still come");
        assert_eq!(find(old, late, ours(), lease("/state")), Finding::Lapsed { epoch: Some(7), is_dead: false });
        assert_eq!(find(old, late, Holder::None, lease("/state")), Finding::Lapsed { epoch: Some(7), is_dead: true });
        assert_eq!(find(young, 5, ours(), None), Finding::Alive, "the daemon is starting");
        assert_eq!(find(old, 5, ours(), None), Finding::Over);
        assert_eq!(find(young, 5, Holder::None, None), Finding::Over);
        // The journal has another daemon, which has a guard of its own.
        assert_eq!(find(old, late, daemon("/other/api.sock"), lease("/state")), Finding::Over);
        // The runtime directory has the daemon of another journal: its lease says nothing about our jobs.
        assert_eq!(find(old, 5, Holder::None, lease("/other")), Finding::Lapsed { epoch: None, is_dead: true });
    }
}
