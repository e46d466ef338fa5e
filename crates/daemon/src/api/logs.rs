//! A job's output as a stream of bytes, from the files that its supervisor writes.
//!
//! output.log is renamed to output.log.1 when it has grown large; offsets count over both, as far
//! as they are kept. With `follow` the stream goes on until the job has ended and everything was
//! sent.

use crate::jobdir::{OLDER_OUTPUT, OUTPUT, open_regular};
use bytes::Bytes;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

const PIECE_BYTES: usize = 64 << 10;

/// Reads one job's output in pieces. Only regular files are read, so a read never waits for a writer.
pub(super) struct LogReader {
    dir: PathBuf,
    skip: u64,
    /// Files still to be read, the current one first.
    current: Option<File>,
    waiting: Option<File>,
}

impl LogReader {
    pub(super) fn open(dir: PathBuf, offset: u64) -> LogReader {
        let mut reader = LogReader { skip: offset, current: None, waiting: None, dir };
        let older = open_regular(&reader.dir.join(OLDER_OUTPUT)).ok();
        let newer = open_regular(&reader.dir.join(OUTPUT)).ok();
        (reader.current, reader.waiting) = if older.is_some() { (older, newer) } else { (newer, None) };
        reader
    }

    /// The next piece; `None` if there is nothing now.
    pub(super) fn next(&mut self) -> std::io::Result<Option<Bytes>> {
        loop {
            if self.current.is_none() {
                self.current = open_regular(&self.dir.join(OUTPUT)).ok();
            }
            let Some(file) = &mut self.current else { return Ok(None) };
            if self.skip > 0 {
                let len = file.metadata()?.len();
                let step = self.skip.min(len);
                file.seek(SeekFrom::Start(step))?;
                self.skip -= step;
            }
            let mut piece = vec![0; PIECE_BYTES];
            let n = file.read(&mut piece)?;
            if n > 0 {
                piece.truncate(n);
                return Ok(Some(piece.into()));
            }
            if !self.advance()? {
                return Ok(None);
            }
        }
    }

    /// At the end of a file: on to the newer one, if there is one.
    fn advance(&mut self) -> std::io::Result<bool> {
        if let Some(next) = self.waiting.take() {
            self.current = Some(next);
            return Ok(true);
        }
        let Some(file) = &self.current else { return Ok(false) };
        let here = file.metadata()?.ino();
        match open_regular(&self.dir.join(OUTPUT)) {
            Ok(newer) if newer.metadata()?.ino() != here => {
                self.current = Some(newer);
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(reader: &mut LogReader) -> String {
        let mut text = Vec::new();
        while let Some(piece) = reader.next().unwrap() {
            text.extend_from_slice(&piece);
        }
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_fifo_or_a_link_in_place_of_the_log_is_no_output() {
        let dir = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&dir.path().join(OUTPUT), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", dir.path().join(OLDER_OUTPUT)).unwrap();
        assert_eq!(all(&mut LogReader::open(dir.path().into(), 0)), "");
    }

    #[test]
    fn follows_over_a_rotation_and_counts_offsets_over_both_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut early = LogReader::open(dir.path().into(), 0);
        assert_eq!(all(&mut early), "");
        std::fs::write(path("output.log"), "one\n").unwrap();
        assert_eq!(all(&mut early), "one\n");
        std::fs::rename(path("output.log"), path("output.log.1")).unwrap();
        std::fs::write(path("output.log"), "two\n").unwrap();
        assert_eq!(all(&mut early), "two\n");
        assert_eq!(all(&mut LogReader::open(dir.path().into(), 0)), "one\ntwo\n");
        assert_eq!(all(&mut LogReader::open(dir.path().into(), 2)), "e\ntwo\n");
        assert_eq!(all(&mut LogReader::open(dir.path().into(), 5)), "wo\n");
        assert_eq!(all(&mut LogReader::open(dir.path().into(), 99)), "");
    }
}
