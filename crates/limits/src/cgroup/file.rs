//! Reading and writing the kernel's small files.
//!
//! A cgroup file is written in one `write` (the kernel parses each `write` on its own) and read in one
//! `pread` from the start. Reading a file of a removed group fails with `ENODEV` through an open descriptor
//! and with `ENOENT` by path; both mean *gone*.
//!
//! **Properties.** Files that are read every second stay open ([`OpenFile`]), so that a read costs one system
//! call and no allocation. Parsers take `&str` and return `None` for text they cannot read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// The largest file that is read is `memory.stat` with some 3 KiB; a busy `io.stat` has a line for each device.
pub(crate) const BUFFER_BYTES: usize = 16 * 1024;

/// The kernel returns a file that is shorter than a page by one read.
const SHORT_BYTES: usize = 4096;

/// The whole file without the line end. Meant for files of one or few lines.
pub(crate) fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.read_to_string(&mut text)?;
    text.truncate(text.trim_end().len());
    Ok(text)
}

/// Writes `value` in one system call. Never creates a file: a missing one is an error.
pub(crate) fn write(path: &Path, value: &str) -> io::Result<()> {
    // A cgroup file has no content to cut off, but a plain file (a test's tree) would keep the tail of a
    // longer value.
    let mut file = OpenOptions::new().write(true).truncate(true).custom_flags(libc::O_CLOEXEC).open(path)?;
    let written = file.write(value.as_bytes())?;
    if written == value.len() { Ok(()) } else { Err(io::Error::new(io::ErrorKind::WriteZero, "short write")) }
}

pub(crate) fn inode(path: &Path) -> io::Result<u64> {
    Ok(std::fs::symlink_metadata(path)?.ino())
}

/// Whether the error means that the group (or the process) is no longer there.
pub(crate) fn means_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENOTDIR | libc::ESRCH))
}

/// A file kept open to be read again and again.
#[derive(Debug)]
pub(crate) struct OpenFile(File);

impl OpenFile {
    pub(crate) fn new(file: File) -> OpenFile {
        OpenFile(file)
    }

    /// The file's text now; `buffer` is the caller's to reuse. What is longer than the buffer is cut off. The files
    /// of cgroups that are read every second consist of one record, which the kernel returns as a whole.
    pub(crate) fn read<'b>(&self, buffer: &'b mut [u8; BUFFER_BYTES]) -> io::Result<&'b str> {
        let mut length = 0;
        // The kernel may hand out a long file page by page.
        while length < buffer.len() {
            match self.0.read_at(&mut buffer[length..], length as u64)? {
                0 => break,
                n => length += n,
            }
            if length < SHORT_BYTES {
                break;
            }
        }
        std::str::from_utf8(&buffer[..length]).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// The number after `key` in a file of `key value` lines.
pub(crate) fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Bytes read and written in v2's `io.stat`: `8:0 rbytes=1 wbytes=2 rios=…`, one line for each device.
pub(crate) fn io_stat_bytes(text: &str) -> u64 {
    text.split_ascii_whitespace()
        .filter_map(|word| word.strip_prefix("rbytes=").or_else(|| word.strip_prefix("wbytes="))?.parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

/// Bytes in v1's `blkio.throttle.io_service_bytes*`: the last line is `Total N`; a group that never read a disk has
/// only `Total 0`.
pub(crate) fn blkio_total_bytes(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("Total ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsers_read_what_kernels_write() {
        assert_eq!(keyed("usage_usec 12\nuser_usec 5\n", "usage_usec"), Some(12));
        assert_eq!(keyed("total_inactive_file 7\ninactive_file 3\n", "inactive_file"), Some(3));
        assert_eq!(keyed("inactive_file_x 7\n", "inactive_file"), None);
        assert_eq!(
            io_stat_bytes("8:0 rbytes=10 wbytes=5 rios=1 wios=1 dbytes=9 dios=0\n254:0 rbytes=1 wbytes=0\n"),
            16
        );
        assert_eq!(io_stat_bytes("8:0 \n"), 0);
        assert_eq!(blkio_total_bytes("8:0 Read 4\n8:0 Write 5\n8:0 Total 9\nTotal 9\n"), Some(9));
        assert_eq!(blkio_total_bytes("Total 0\n"), Some(0));
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(text in "\\PC*") {
            let _ = (keyed(&text, "a"), io_stat_bytes(&text), blkio_total_bytes(&text));
        }
    }
}
