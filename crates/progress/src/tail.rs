//! Follows one growing file by its path, through rotation, truncation and rewriting.
//!
//! **How.** Like a buffered reader with a memory: [`FileTail::fill`] reads bytes after the position,
//! [`FileTail::data`] shows them, [`FileTail::consume`] moves the position. Bytes that are not
//! consumed (a torn last line) are shown again when the file has grown. The position is the file's
//! identity, the offset and a checksum of the last bytes before it. Stored by a daemon, it lets the
//! next one continue at the same byte, or notice that the bytes before it are not those that were
//! read.
//!
//! **Terms.** *Rotated*: the file was renamed and another one has its name; the old file is read to
//! its end first. *Rewritten*: truncated, replaced or written again; reading starts at the beginning,
//! and the content may be partly known. *Mark*: the bytes before the position that are checked.
//!
//! **Properties.** Reads at most [`WINDOW`] bytes at a time. Never blocks. Opens only regular files
//! below the root. Loses nothing that was complete in the file at some call, unless a file is rotated
//! twice between two calls. A stored position that no reader can have written counts as the start of
//! the file; no position and no file makes it panic.

use crate::root::Root;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes read in one call, and thus the longest record.
pub(crate) const WINDOW: usize = 256 << 10;

/// Bytes before the position that are checked.
const MARK: usize = 256;

/// Files of one folder that are searched for a renamed file after a restart.
const MAX_SIBLINGS: usize = 2000;

/// How far a file was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Position {
    device: u64,
    inode: u64,
    offset: u64,
    /// Checksum of the `mark_len` bytes before `offset`.
    mark: u32,
    mark_len: u16,
}

impl Position {
    /// The position itself, or the default one if no reader can have written it.
    fn or_start(self) -> Position {
        let mark_len = usize::from(self.mark_len);
        let possible = mark_len <= MARK && mark_len as u64 <= self.offset && i64::try_from(self.offset).is_ok();
        if possible { self } else { Position::default() }
    }

    fn start_of(meta: &Metadata) -> Position {
        Position { device: meta.dev(), inode: meta.ino(), ..Position::default() }
    }

    fn is_of(&self, meta: &Metadata) -> bool {
        (self.device, self.inode) == (meta.dev(), meta.ino())
    }
}

/// What [`FileTail::fill`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Nothing new.
    Same,
    /// There is data after the position.
    More,
    /// As `More`, from the beginning of another file.
    Rotated,
    /// As `More`, from the beginning of a file whose content may be partly known.
    Rewritten,
}

/// Follows one file; see the module documentation.
#[derive(Debug)]
pub struct FileTail {
    root: Arc<Root>,
    path: PathBuf,
    position: Position,
    file: Option<File>,
    /// Keep the file open between calls. A file that may be rotated needs it; one of many append-only
    /// files does not.
    hold: bool,
    /// Size and time of change when the file was last read.
    last_stamp: Option<(u64, i64, i64)>,
    /// Bytes were consumed since the last read, so there may be more without any change of the file.
    advanced: bool,
    /// The bytes of the mark, then those after the position.
    buffer: Vec<u8>,
}

impl FileTail {
    /// Follows `path`, relative to `root`, from `position` (the default one is the beginning).
    pub fn new(root: Arc<Root>, path: &Path, position: Position, hold: bool) -> FileTail {
        FileTail {
            root,
            path: path.to_path_buf(),
            position: position.or_start(),
            file: None,
            hold,
            last_stamp: None,
            advanced: false,
            buffer: Vec::new(),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn position(&self) -> Position {
        self.position
    }

    /// Bytes after the position, as far as they were read.
    pub fn data(&self) -> &[u8] {
        self.buffer.get(usize::from(self.position.mark_len)..).unwrap_or_default()
    }

    /// Bytes of the file after the position, as of the last read.
    pub(crate) fn unread(&self) -> u64 {
        self.last_stamp.map_or(0, |(size, ..)| size.saturating_sub(self.position.offset))
    }

    /// Whether everything was consumed that the file held at the last read.
    pub fn is_at_end(&self) -> bool {
        self.last_stamp.is_some() && self.unread() == 0
    }

    /// Moves the position over the first `n` bytes of [`Self::data`], or over all of it.
    pub fn consume(&mut self, n: usize) {
        let n = n.min(self.data().len());
        // Before the first read the buffer does not even hold the mark.
        if n == 0 {
            return;
        }
        let end = usize::from(self.position.mark_len) + n;
        let start = end.saturating_sub(MARK);
        self.position.offset = self.position.offset.saturating_add(n as u64);
        self.position.mark = crc32c::crc32c(&self.buffer[start..end]);
        self.position.mark_len = (end - start) as u16;
        self.buffer.drain(..start);
        self.advanced = true;
        if self.is_at_end() {
            self.release_memory();
        }
    }

    /// Memory for a window is kept only while there is a backlog.
    fn release_memory(&mut self) {
        if self.buffer.len() < self.buffer.capacity() / 4 {
            self.buffer.shrink_to(4096.max(self.buffer.len()));
        }
    }

    /// Moves the position over `n` bytes without reading them; `false` if the file does not have them
    /// yet.
    pub fn skip(&mut self, n: u64) -> bool {
        if self.last_stamp.is_none() || n > self.unread() {
            return false;
        }
        let offset = self.position.offset.saturating_add(n);
        self.position = Position { offset, mark: 0, mark_len: 0, ..self.position };
        self.buffer.clear();
        self.advanced = true;
        true
    }

    /// Moves the position to the beginning of the same file.
    pub fn rewind(&mut self) {
        self.position = Position { offset: 0, mark: 0, mark_len: 0, ..self.position };
        self.buffer.clear();
        self.advanced = true;
    }

    /// Reads bytes after the position. A file that does not exist (yet, or any more) is no change.
    pub fn fill(&mut self) -> io::Result<Change> {
        let result = self.check_and_read();
        if !self.hold {
            self.file = None;
        }
        match result {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Change::Same),
            other => other,
        }
    }

    fn check_and_read(&mut self) -> io::Result<Change> {
        if self.file.is_none() {
            let unchanged = self.last_stamp.is_some()
                && !self.advanced
                && Some(stamp(&self.root.peek(&self.path)?.metadata()?)) == self.last_stamp;
            if unchanged {
                return Ok(Change::Same);
            }
            if let Some(change) = self.open()? {
                return self.read(change);
            }
        }
        let Some(meta) = self.file.as_ref().map(File::metadata).transpose()? else { return Ok(Change::Same) };
        // What was consumed to the end is read again only when the file has changed.
        if self.last_stamp != Some(stamp(&meta)) || (self.advanced && !self.is_at_end()) {
            match self.read_as(Change::More, &meta)? {
                Change::Same => {}
                change => return Ok(change),
            }
        }
        if self.hold { self.follow_rename() } else { Ok(Change::Same) }
    }

    /// Opens the file. A change is returned if the file is not the one of the position.
    fn open(&mut self) -> io::Result<Option<Change>> {
        let file = self.root.file(&self.path)?;
        let meta = file.metadata()?;
        if self.position.inode == 0 {
            self.position = Position::start_of(&meta);
        } else if !self.position.is_of(&meta) {
            if let Some(renamed) = self.renamed() {
                self.file = Some(renamed);
                return Ok(None);
            }
            return self.move_to(file, &meta, Change::Rewritten).map(Some);
        }
        self.file = Some(file);
        Ok(None)
    }

    /// The file of the position under another name in the same folder: it was rotated between two
    /// daemons.
    fn renamed(&self) -> Option<File> {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let mut dir = self.root.folder(folder).ok()?;
        let entry = dir.iter().take(MAX_SIBLINGS).flatten().find(|e| e.ino() == self.position.inode)?;
        let file = self.root.file(&folder.join(OsStr::from_bytes(entry.file_name().to_bytes()))).ok()?;
        let meta = file.metadata().ok()?;
        (self.position.is_of(&meta) && meta.len() >= self.position.offset).then_some(file)
    }

    /// Switches to the file that has the path now, if it is another one, has content, and the old one
    /// has not grown.
    fn follow_rename(&mut self) -> io::Result<Change> {
        let meta = self.root.peek(&self.path)?.metadata()?;
        if self.position.is_of(&meta) || meta.len() == 0 {
            return Ok(Change::Same);
        }
        let file = self.root.file(&self.path)?;
        let meta = file.metadata()?;
        // A renamed file still has a name, a replaced one has none.
        let replaced = self.file.as_ref().is_none_or(|old| old.metadata().is_ok_and(|m| m.nlink() == 0));
        let change = self.move_to(file, &meta, if replaced { Change::Rewritten } else { Change::Rotated })?;
        self.read(change)
    }

    /// Follows `file` from now on. A replacement that has the same bytes before the position is
    /// continued there.
    fn move_to(&mut self, file: File, meta: &Metadata, change: Change) -> io::Result<Change> {
        let there = Position { device: meta.dev(), inode: meta.ino(), ..self.position };
        self.file = Some(file);
        self.last_stamp = None;
        self.buffer.clear();
        self.position = there;
        if change == Change::Rewritten && usize::from(there.mark_len) == MARK && self.load(meta.len())? {
            return Ok(Change::More);
        }
        self.position = Position::start_of(meta);
        Ok(change)
    }

    /// Reads what follows the position. `Same` if there is nothing.
    fn read(&mut self, change: Change) -> io::Result<Change> {
        let Some(meta) = self.file.as_ref().map(File::metadata).transpose()? else { return Ok(Change::Same) };
        self.read_as(change, &meta)
    }

    /// [`Self::read`] of an open file whose metadata was read just before.
    fn read_as(&mut self, change: Change, meta: &Metadata) -> io::Result<Change> {
        self.last_stamp = Some(stamp(meta));
        self.advanced = false;
        let mut change = change;
        if meta.len() < self.position.offset || !self.load(meta.len())? {
            self.position = Position::start_of(meta);
            change = Change::Rewritten;
            self.load(meta.len())?;
        }
        if self.data().is_empty() && change == Change::More {
            return Ok(Change::Same);
        }
        Ok(change)
    }

    /// Fills the buffer with the mark and the bytes after it; `false` if the mark is not what was read.
    /// One system call reads both, so that a file that is being rewritten cannot change between them.
    fn load(&mut self, length: u64) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(true) };
        let mark_len = usize::from(self.position.mark_len);
        let start = self.position.offset.saturating_sub(mark_len as u64);
        let size = length.saturating_sub(self.position.offset);
        let wanted = mark_len + usize::try_from(size).unwrap_or(WINDOW).min(WINDOW);
        self.buffer.resize(wanted, 0);
        let n = loop {
            match file.read_at(&mut self.buffer, start) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.buffer.truncate(n);
        self.release_memory();
        Ok(self.buffer.get(..mark_len).is_some_and(|mark| crc32c::crc32c(mark) == self.position.mark))
    }
}

fn stamp(meta: &Metadata) -> (u64, i64, i64) {
    (meta.len(), meta.mtime(), meta.mtime_nsec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(dir: &Path, position: Position) -> FileTail {
        FileTail::new(Arc::new(Root::open(dir).unwrap()), Path::new("f"), position, true)
    }

    /// The position of a reader that has consumed all of a file.
    fn consumed(dir: &Path) -> Position {
        std::fs::write(dir.join("f"), vec![b'x'; 1000]).unwrap();
        let mut tail = follow(dir, Position::default());
        assert_eq!(tail.fill().unwrap(), Change::More);
        tail.consume(usize::MAX);
        tail.position()
    }

    #[test]
    fn a_file_read_to_its_end_is_followed_when_it_grows_and_when_it_is_rotated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, "one\n").unwrap();
        let mut tail = follow(dir.path(), Position::default());
        assert!(!tail.is_at_end());
        assert_eq!((tail.fill().unwrap(), tail.data()), (Change::More, &b"one\n"[..]));
        assert!(!tail.is_at_end(), "nothing was consumed");
        tail.consume(4);
        assert!(tail.is_at_end());
        assert_eq!(tail.fill().unwrap(), Change::Same);
        std::fs::write(&path, "one\ntwo\n").unwrap();
        assert_eq!((tail.fill().unwrap(), tail.data()), (Change::More, &b"two\n"[..]));
        tail.consume(4);
        std::fs::rename(&path, dir.path().join("f.1")).unwrap();
        std::fs::write(&path, "three\n").unwrap();
        assert_eq!((tail.fill().unwrap(), tail.data()), (Change::Rotated, &b"three\n"[..]));
    }

    #[test]
    fn consuming_nothing_of_a_file_that_was_never_read_keeps_the_position() {
        let dir = tempfile::tempdir().unwrap();
        let stored = consumed(dir.path());
        std::fs::remove_file(dir.path().join("f")).unwrap();
        let mut tail = follow(dir.path(), stored);
        assert_eq!(tail.fill().unwrap(), Change::Same);
        tail.consume(0);
        tail.consume(7);
        assert_eq!((tail.position(), tail.data()), (stored, &b""[..]));
    }

    #[test]
    fn a_position_that_no_reader_can_have_written_is_the_start_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let stored = consumed(dir.path());
        for garbage in [
            Position { offset: 7, ..stored },
            Position { offset: u64::MAX, ..stored },
            Position { mark_len: u16::MAX, ..stored },
            Position { offset: i64::MAX as u64 + 1, mark_len: 0, ..stored },
        ] {
            let mut tail = follow(dir.path(), garbage);
            assert_eq!((tail.fill().unwrap(), tail.data().len()), (Change::More, 1000), "{garbage:?}");
        }
    }

    #[test]
    fn memory_for_a_window_is_kept_only_while_there_is_a_backlog() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), vec![b'x'; 3 * WINDOW]).unwrap();
        let mut tail = follow(dir.path(), Position::default());
        let mut largest = 0;
        while tail.fill().unwrap() != Change::Same {
            largest = largest.max(tail.buffer.capacity());
            tail.consume(usize::MAX);
        }
        assert!(largest <= 2 * (WINDOW + MARK), "{largest}");
        assert!(tail.buffer.capacity() <= 4096 + MARK, "{}", tail.buffer.capacity());
    }
}
