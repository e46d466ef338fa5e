//! The page in a job's folder that the library inside the job reads, as far as the daemon has opened it.
//!
//! The job's owner can replace or truncate the file. It is opened without following links, checked, and never
//! mapped. [`super::inside`] writes it.

use gainshare_page::{Orders, PAGE_BYTES};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// The name of the page in the job's folder.
pub(super) const PAGE_FILE: &str = "inside.page";

/// The page of one job, as far as this daemon knows it.
#[derive(Default)]
pub(super) enum JobPage {
    /// Not opened since this daemon or this attempt began.
    #[default]
    Unknown,
    /// The job has no page.
    Absent,
    Open {
        file: File,
        orders: Orders,
    },
}

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
            Some(orders) => JobPage::Open { file, orders },
            None => JobPage::Absent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_page::encode;

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
}
