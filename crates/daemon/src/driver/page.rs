//! The page in a job's folder that the library inside the job reads, as far as the daemon has opened it.
//!
//! The job's owner can replace or truncate the file. It is opened without following links, checked, and never
//! mapped. [`super::inside`] writes it.

use gainshare_page::{HEADER_BYTES, Orders, PAGE_BYTES, encode};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

/// The name of the page in the job's folder.
pub(super) const PAGE_FILE: &str = "inside.page";

/// The page of one job, as far as this daemon knows it.
#[derive(Default)]
pub(super) enum JobPage {
    /// The page was not opened since this daemon or this attempt began.
    #[default]
    Unknown,
    /// The job has no page.
    Absent,
    Open {
        file: File,
        orders: Orders,
        /// The heartbeat that was written last; 0: none by this daemon.
        heartbeat_ns: u64,
    },
}

/// How old the heartbeat of a page becomes while its orders stay. A page is stale after 5 s.
const RENEW_AFTER: Duration = Duration::from_millis(1800);

impl JobPage {
    /// Opens the page that a start has made. The job can replace the file, so no link is followed.
    pub(super) fn open(dir: &Path) -> JobPage {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(dir.join(PAGE_FILE));
        let Ok(file) = opened else { return JobPage::Absent };
        let is_page = file.metadata().is_ok_and(|m| m.is_file() && m.len() == PAGE_BYTES as u64);
        let mut bytes = [0; PAGE_BYTES];
        if !is_page || file.read_exact_at(&mut bytes, 0).is_err() {
            return JobPage::Absent;
        }
        // The heartbeat is that of another daemon and may be old.
        match gainshare_page::decode(&bytes) {
            Some(orders) => JobPage::Open { file, orders, heartbeat_ns: 0 },
            None => JobPage::Absent,
        }
    }

    /// Writes changed orders, or renews the heartbeat if that is due. Nothing happens to a job without a page.
    pub(super) fn write(&mut self, change: impl FnOnce(&mut Orders), now_ns: u64) -> io::Result<()> {
        let JobPage::Open { file, orders, heartbeat_ns } = self else { return Ok(()) };
        let before = *orders;
        change(orders);
        if *orders == before && Duration::from_nanos(now_ns.saturating_sub(*heartbeat_ns)) < RENEW_AFTER {
            return Ok(());
        }
        *heartbeat_ns = now_ns;
        file.write_all_at(&encode(orders, now_ns)[..HEADER_BYTES], 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_no_page_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(PAGE_FILE);
        assert!(matches!(JobPage::open(dir.path()), JobPage::Absent), "no file");
        for bytes in [&b""[..], &[7; PAGE_BYTES], &encode(&Orders::default(), 1)[..100]] {
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(JobPage::open(dir.path()), JobPage::Absent), "{} bytes", bytes.len());
        }
        let orders = Orders { team: 3, blas_may_grow: true, ..Orders::default() };
        std::fs::write(&path, encode(&orders, 1)).unwrap();
        assert!(matches!(JobPage::open(dir.path()), JobPage::Open { orders: found, .. } if found == orders));
        let target = dir.path().join("elsewhere");
        std::fs::rename(&path, &target).unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(matches!(JobPage::open(dir.path()), JobPage::Absent), "a link is not followed");
    }

    #[test]
    fn a_page_is_written_when_its_orders_change_or_its_heartbeat_is_due() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(PAGE_FILE);
        std::fs::write(&path, encode(&Orders::default(), 1)).unwrap();
        let mut page = JobPage::open(dir.path());
        let mut write = |team: u32, now_ms: u64| {
            let before = std::fs::read(&path).unwrap();
            page.write(|orders| orders.team = team, now_ms * 1_000_000).unwrap();
            std::fs::read(&path).unwrap() != before
        };
        assert!(write(3, 10_000), "the first heartbeat of this daemon");
        assert!(!write(3, 11_000) && write(4, 11_010), "new orders are written at once");
        assert!(!write(4, 12_010) && write(4, 13_010), "the heartbeat is renewed every other beat");
        let bytes = std::fs::read(&path).unwrap();
        let orders = gainshare_page::decode(bytes[..].try_into().unwrap()).unwrap();
        assert_eq!(orders.team, 4);
        assert!(2 * RENEW_AFTER < gainshare_page::STALE_AFTER);
    }
}
