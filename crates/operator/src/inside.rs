//! Puts the library inside jobs, and its page, into the volumes of a pod: the work of the container that the webhook
//! adds ([`crate::http::inside`]).
//!
//! **How.** The library is copied from Gainshare's image into a volume, into one folder for each value that the dynamic
//! linker of a distribution puts in the place of `$LIB`. The linker of musl knows no `$LIB`: it finds nothing, and its
//! programs run without the library, which needs the C library of GNU.
//!
//! The page gets the team that fits the pod's CPU request. This holds for some seconds, until the node agent writes the
//! page. Without a node agent the page becomes stale, and the library changes nothing.
//!
//! **Properties.** `a_page_in_use_stays_the_same_file`: programs and the node agent keep what they have opened.

use gainshare_limits::machine::monotonic_ns;
use gainshare_page::{LIBRARY_FILE, Orders, REPORT_SUFFIX, empty_report, encode};
use std::ffi::OsString;
use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Where the containers of a pod find the library. No folder of an image or of a volume lies above it.
pub(crate) const LIBRARY_FOLDER: &str = "/.gainshare/library";

/// Where they find the page and the report.
pub(crate) const PAGE_FOLDER: &str = "/.gainshare/page";

/// What the dynamic linkers of 64-bit distributions put in the place of `$LIB`.
const LIB_FOLDERS: [&str; 3] =
    ["lib64", "lib", if cfg!(target_arch = "aarch64") { "lib/aarch64-linux-gnu" } else { "lib/x86_64-linux-gnu" }];

/// The value of `LD_PRELOAD` for the library.
pub(crate) fn preload() -> String {
    format!("{LIBRARY_FOLDER}/$LIB/{LIBRARY_FILE}")
}

/// The library that lies beside this program, as it does in Gainshare's image.
pub fn own_library() -> io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(LIBRARY_FILE))
}

/// Copies `library` into `folder`, and makes a page with these orders and an empty report.
pub fn place(library: &Path, folder: &Path, page: &Path, orders: &Orders) -> io::Result<()> {
    for name in LIB_FOLDERS {
        let folder = folder.join(name);
        fs::create_dir_all(&folder)?;
        // A program may have loaded the copy of an earlier start: it is replaced and not changed.
        let copy = folder.join(format!("{LIBRARY_FILE}.new"));
        fs::copy(library, &copy)?;
        fs::rename(&copy, folder.join(LIBRARY_FILE))?;
    }
    write_for_all(&with_suffix(page), &empty_report())?;
    write_for_all(page, &encode(orders, monotonic_ns()))
}

fn with_suffix(page: &Path) -> PathBuf {
    let mut name = OsString::from(page);
    name.push(REPORT_SUFFIX);
    name.into()
}

/// Writes a file that the pod's containers and the node agent may write, whatever users they have.
fn write_for_all(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    file.set_permissions(Permissions::from_mode(0o666))?;
    file.write_all_at(bytes, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_page::{PAGE_BYTES, Report, decode, decode_report};
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn every_distribution_finds_the_library_and_every_user_may_write_the_page() {
        let dir = tempfile::tempdir().unwrap();
        let (library, page) = (dir.path().join(LIBRARY_FILE), dir.path().join("page"));
        fs::write(&library, "code").unwrap();
        let orders = Orders { team: 3, blas_may_grow: true, ..Orders::default() };
        place(&library, &dir.path().join("to"), &page, &orders).unwrap();
        for name in LIB_FOLDERS {
            let copy = dir.path().join("to").join(name).join(LIBRARY_FILE);
            assert_eq!(fs::read_to_string(&copy).unwrap(), "code", "{name}");
        }
        let bytes: [u8; PAGE_BYTES] = fs::read(&page).unwrap().try_into().unwrap();
        assert_eq!(decode(&bytes), Some(orders));
        let report = dir.path().join("page.report");
        assert_eq!(decode_report(&fs::read(&report).unwrap()), Some(Report::default()));
        for file in [page, report] {
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o666, "{}", file.display());
        }
    }

    #[test]
    fn a_page_in_use_stays_the_same_file() {
        let dir = tempfile::tempdir().unwrap();
        let (library, page) = (dir.path().join(LIBRARY_FILE), dir.path().join("page"));
        fs::write(&library, "code").unwrap();
        let mut inodes = Vec::new();
        for team in [1, 2] {
            place(&library, dir.path(), &page, &Orders { team, ..Orders::default() }).unwrap();
            inodes.push(fs::metadata(&page).unwrap().ino());
        }
        assert_eq!(inodes[0], inodes[1]);
        let missing = place(&dir.path().join("none"), dir.path(), &page, &Orders::default());
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
