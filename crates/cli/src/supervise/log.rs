//! The job's output on disk: appended as it comes, rotated, never in the job's way.
//!
//! `output.log` is moved to `output.log.1` (replacing it) when it passes [`ROTATE_AT_BYTES`], at
//! the end of a line if one comes soon. A write that fails (disk full) is reported once and what
//! could not be written is dropped: the job does not notice, and when there is space again the log
//! goes on.

use crate::notice::notice;
use gainshare_daemon::jobdir::{OUTPUT, append_regular};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Large enough for days of training output, small enough for two of them on any disk.
const ROTATE_AT_BYTES: u64 = 64 << 20;

/// How much longer than that the file may get while waiting for the end of a line.
const LINE_GRACE_BYTES: u64 = 1 << 20;

pub struct Log {
    path: PathBuf,
    file: Option<File>,
    size_bytes: u64,
    warned: bool,
}

impl Log {
    pub fn open(dir: &Path) -> Log {
        let mut log = Log { path: dir.join(OUTPUT), file: None, size_bytes: 0, warned: false };
        log.reopen();
        log
    }

    fn reopen(&mut self) {
        let opened = append_regular(&self.path);
        match opened.and_then(|file| Ok((file.metadata()?.len(), file))) {
            Ok((size, file)) => (self.size_bytes, self.file) = (size, Some(file)),
            Err(error) => self.warn(&error),
        }
    }

    pub fn append(&mut self, bytes: &[u8]) {
        let at_line_end = bytes.last() == Some(&b'\n');
        match self.file.as_mut().map(|file| file.write_all(bytes)) {
            Some(Ok(())) => self.size_bytes += bytes.len() as u64,
            Some(Err(error)) => return self.warn(&error),
            None => return,
        }
        if self.size_bytes >= ROTATE_AT_BYTES && (at_line_end || self.size_bytes >= ROTATE_AT_BYTES + LINE_GRACE_BYTES)
        {
            match std::fs::rename(&self.path, self.path.with_extension("log.1")) {
                Ok(()) => self.reopen(),
                // It is tried again once another grace has been written, not at every line.
                Err(_) => self.size_bytes -= LINE_GRACE_BYTES,
            }
        }
    }

    fn warn(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.warned, true) {
            notice!(
                "cannot write {}: {error}; the job goes on without a complete log (free some space)",
                self.path.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotates_at_a_line_end_and_keeps_every_byte() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("output.log.1"), "from an older rotation").unwrap();
        let mut log = Log::open(dir.path());
        log.size_bytes = ROTATE_AT_BYTES - 3;
        log.append(b"ab");
        log.append(b"cd");
        assert!(log.size_bytes > ROTATE_AT_BYTES, "waits for the end of the line");
        log.append(b"e\n");
        log.append(b"next\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("output.log.1")).unwrap(), "abcde\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("output.log")).unwrap(), "next\n");
    }

    #[test]
    fn a_second_attempt_appends() {
        let dir = tempfile::tempdir().unwrap();
        Log::open(dir.path()).append(b"one\n");
        let mut second = Log::open(dir.path());
        assert_eq!(second.size_bytes, 4);
        second.append(b"two\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("output.log")).unwrap(), "one\ntwo\n");
    }

    #[test]
    fn a_log_that_cannot_be_opened_is_no_error() {
        let mut log = Log::open(Path::new("/nonexistent/job"));
        log.append(b"lost, but nothing stops\n");
        assert!(log.warned);
    }
}
