//! The daemon's sign of life.
//!
//! Once a second the driver writes a lease: its epoch, the boot clock, how long the lease is valid,
//! and its state directory. The guard, a process of its own, puts all limits back when the lease
//! has expired. Before it begins it writes a *lapse* with the epoch. A driver that finds its own
//! epoch there was stopped and runs again; the limits that it believes to be in force are not.
//! A driver that waits for the disk again and again in one round renews the lease between two waits.
//!
//! **Properties.** Both files are written aside and renamed, so a reader never sees half of one. A
//! lapse concerns exactly one epoch: a file that an older journal left behind means nothing to the
//! present one.

use crate::clock::boottime_ns;
use crate::paths::Paths;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the lease file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeaseContent {
    pub(crate) epoch: u64,
    pub(crate) boottime_ns: u64,
    /// How long the lease is valid after `boottime_ns`.
    pub(crate) length: Duration,
    pub(crate) state: PathBuf,
}

impl LeaseContent {
    pub(crate) fn read(path: &Path) -> Option<LeaseContent> {
        let text = std::fs::read_to_string(path).ok()?;
        let mut words = text.trim_end().splitn(4, ' ');
        Some(LeaseContent {
            epoch: words.next()?.parse().ok()?,
            boottime_ns: words.next()?.parse().ok()?,
            length: Duration::from_millis(words.next()?.parse().ok()?),
            state: words.next()?.into(),
        })
    }

    /// A clock that is behind the lease belongs to another boot: the lease has expired.
    pub(crate) fn has_expired(&self, now_ns: u64) -> bool {
        self.boottime_ns > now_ns || Duration::from_nanos(now_ns - self.boottime_ns) > self.length
    }
}

/// What the guard did about an expired lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lapse {
    pub(crate) epoch: u64,
    /// All limits are back; before that only some may be.
    pub(crate) restored: bool,
}

impl Lapse {
    pub(crate) fn read(path: &Path) -> Option<Lapse> {
        let text = std::fs::read_to_string(path).ok()?;
        let (epoch, state) = text.trim_end().split_once(' ')?;
        Some(Lapse { epoch: epoch.parse().ok()?, restored: state == "restored" })
    }

    /// Whether the limits of this epoch are being put back, or were: a daemon of that epoch writes no more.
    pub(crate) fn concerns(self, epoch: u64) -> bool {
        self.epoch == epoch
    }

    pub(crate) fn write(self, path: &Path) -> std::io::Result<()> {
        write_aside(path, &format!("{} {}\n", self.epoch, if self.restored { "restored" } else { "restoring" }))
    }
}

fn write_aside(path: &Path, text: &str) -> std::io::Result<()> {
    let aside = path.with_extension("new");
    std::fs::write(&aside, text)?;
    std::fs::rename(aside, path)
}

/// The driver's side.
pub(crate) struct Lease {
    file: PathBuf,
    lapse: PathBuf,
    state: PathBuf,
    length: Duration,
    epoch: u64,
    /// The boot clock at the last renewal.
    renewed_ns: Cell<u64>,
}

impl Lease {
    /// Begins a lease for a new epoch. A lapse of an earlier daemon does not count any more.
    pub(crate) fn begin(paths: &Paths, epoch: u64, length: Duration) -> Lease {
        let (file, lapse, state) = (paths.lease(), paths.lapsed(), paths.state.clone());
        let lease = Lease { file, lapse, state, length, epoch, renewed_ns: Cell::new(0) };
        lease.renew();
        let _ = std::fs::remove_file(&lease.lapse);
        lease
    }

    pub(crate) fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    pub(crate) fn renew(&self) {
        let (length_ms, state) = (self.length.as_millis(), self.state.display());
        let now_ns = boottime_ns();
        self.renewed_ns.set(now_ns);
        let text = format!("{} {now_ns} {length_ms} {state}\n", self.epoch);
        if let Err(e) = write_aside(&self.file, &text) {
            tracing::warn!("cannot renew the lease {}: {e}", self.file.display());
        }
    }

    /// Renews a lease that is `age` old, for the middle of work that takes long. A lapsed one is left as it is: the
    /// driver must begin a new epoch first.
    pub(crate) fn renew_after(&self, age: Duration) {
        let is_due = boottime_ns().saturating_sub(self.renewed_ns.get()) >= age.as_nanos() as u64;
        if is_due && !self.has_lapsed() {
            self.renew();
        }
    }

    /// Whether the guard has begun to put the limits of this epoch back.
    pub(crate) fn has_lapsed(&self) -> bool {
        self.lapse_check()()
    }

    /// [`Lease::has_lapsed`] for a thread that writes limits.
    pub(crate) fn lapse_check(&self) -> impl Fn() -> bool + Send + use<> {
        let (path, epoch) = (self.lapse.clone(), self.epoch);
        move || Lapse::read(&path).is_some_and(|lapse| lapse.concerns(epoch))
    }

    /// The daemon ends properly: without a lease the guard ends, too.
    pub(crate) fn end(&self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lapse_of_another_epoch_means_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { state: dir.path().join("a state"), runtime: dir.path().to_path_buf() };
        Lapse { epoch: 900, restored: true }.write(&paths.lapsed()).unwrap();
        let lease = Lease::begin(&paths, 1, Duration::from_secs(15));
        assert!(!lease.has_lapsed(), "the journal was moved away, and epochs begin at 1 again");
        Lapse { epoch: 900, restored: false }.write(&paths.lapsed()).unwrap();
        assert!(!lease.has_lapsed(), "a late guard of the old journal");
        Lapse { epoch: 1, restored: false }.write(&paths.lapsed()).unwrap();
        assert!(lease.has_lapsed(), "some limits may be back already");
        let content = LeaseContent::read(&paths.lease()).unwrap();
        assert_eq!((content.epoch, content.length, content.state), (1, Duration::from_secs(15), paths.state));
    }

    #[test]
    fn a_lease_is_renewed_in_the_middle_of_long_work_unless_it_has_lapsed() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths { state: dir.path().join("state"), runtime: dir.path().to_path_buf() };
        let lease = Lease::begin(&paths, 1, Duration::from_secs(15));
        let renewed_ns = || LeaseContent::read(&paths.lease()).unwrap().boottime_ns;
        let first_ns = renewed_ns();
        lease.renew_after(Duration::from_secs(3600));
        assert_eq!(renewed_ns(), first_ns, "it is not due");
        lease.renew_after(Duration::ZERO);
        let second_ns = renewed_ns();
        assert!(second_ns > first_ns);
        Lapse { epoch: 1, restored: false }.write(&paths.lapsed()).unwrap();
        lease.renew_after(Duration::ZERO);
        assert_eq!(renewed_ns(), second_ns, "the guard is at work");
    }

    #[test]
    fn a_lease_expires_by_age_and_by_a_reboot() {
        let length = Duration::from_secs(3);
        let content = LeaseContent { epoch: 1, boottime_ns: 10_000_000_000, length, state: "/s".into() };
        assert!(!content.has_expired(13_000_000_000));
        assert!(content.has_expired(13_000_000_001));
        assert!(content.has_expired(9_000_000_000), "the boot clock began again");
    }
}
