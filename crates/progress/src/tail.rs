//! Follows one growing file by its path, through everything that may happen to it.
//!
//! **How.** Like a buffered reader that remembers: [`FileTail::fill`] looks for bytes after the position, [`FileTail::data`] shows them,
//! [`FileTail::consume`] moves the position. What is not consumed (a torn last line) is shown again when there is more. The position is
//! the file's identity, the offset and a checksum of the last bytes before it; kept by a daemon, it lets the next one go on at the
//! same byte, or notice that the bytes before it are not those that were read.
//!
//! **Terms.** *Rotated*: the file was renamed and another has its name; the old one is read to its end first. *Rewritten*: truncated, replaced
//! or written anew; reading starts at its beginning, and what comes may be known already.
//!
//! **Properties.** Reads at most [`WINDOW`] bytes at a time; never blocks; opens only regular files below the root. Loses nothing that was
//! complete in the file at some call, unless a file is rotated twice between two calls.

use super::beneath::Root;
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes looked at in one call, and thus the longest record.
pub(super) const WINDOW: usize = 256 << 10;

/// Bytes before the position that are checked.
const MARK: usize = 256;

/// Files of one folder among which a renamed file is looked for after a restart.
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
    /// Keep the file open between calls, which a file that may be rotated needs and one of many append-only files does not.
    hold: bool,
    /// Size and time of change at the last look.
    seen: Option<(u64, i64, i64)>,
    /// Something was consumed since the last look, so there may be more without any change of the file.
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
            position,
            file: None,
            hold,
            seen: None,
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

    /// Moves the position over the first `n` bytes of [`Self::data`].
    pub fn consume(&mut self, n: usize) {
        let end = usize::from(self.position.mark_len) + n.min(self.data().len());
        let start = end.saturating_sub(MARK);
        self.position.offset += n.min(self.data().len()) as u64;
        self.position.mark = crc32c::crc32c(&self.buffer[start..end]);
        self.position.mark_len = (end - start) as u16;
        self.buffer.drain(..start);
        self.advanced |= n > 0;
    }

    /// Moves the position over `n` bytes without reading them; `false` if the file does not have them yet.
    pub fn skip(&mut self, n: u64) -> bool {
        let there =
            self.seen.is_some_and(|(size, ..)| self.position.offset.checked_add(n).is_some_and(|end| end <= size));
        if there {
            self.position = Position { offset: self.position.offset + n, mark: 0, mark_len: 0, ..self.position };
            self.buffer.clear();
            self.advanced = true;
        }
        there
    }

    /// Back to the beginning of the same file.
    pub fn rewind(&mut self) {
        self.position = Position { offset: 0, mark: 0, mark_len: 0, ..self.position };
        self.buffer.clear();
        self.advanced = true;
    }

    /// Looks for more. A file that is not there (yet, or any more) is nothing new.
    pub fn fill(&mut self) -> io::Result<Change> {
        let result = self.look();
        if !self.hold {
            self.file = None;
        }
        match result {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Change::Same),
            other => other,
        }
    }

    fn look(&mut self) -> io::Result<Change> {
        if self.file.is_none() {
            let unchanged = self.seen.is_some()
                && !self.advanced
                && Some(stamp(&self.root.peek(&self.path)?.metadata()?)) == self.seen;
            if unchanged {
                return Ok(Change::Same);
            }
            if let Some(change) = self.open()? {
                return self.read(change);
            }
        }
        let Some(meta) = self.file.as_ref().map(File::metadata).transpose()? else { return Ok(Change::Same) };
        if self.seen != Some(stamp(&meta)) || self.advanced {
            match self.read(Change::More)? {
                Change::Same => {}
                change => return Ok(change),
            }
        }
        if self.hold { self.follow_rename() } else { Ok(Change::Same) }
    }

    /// Opens the file; tells if it is not the one of the position.
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

    /// The file of the position under another name in the same folder: it was rotated while nobody looked.
    fn renamed(&self) -> Option<File> {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let mut dir = self.root.folder(folder).ok()?;
        let entry = dir.iter().take(MAX_SIBLINGS).flatten().find(|e| e.ino() == self.position.inode)?;
        let name = std::ffi::OsStr::new(entry.file_name().to_str().ok()?);
        let file = self.root.file(&folder.join(name)).ok()?;
        let meta = file.metadata().ok()?;
        (self.position.is_of(&meta) && meta.len() >= self.position.offset).then_some(file)
    }

    /// Turns to the file that has the path now, if it is another one, has content, and nothing more came into the old one.
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

    /// Makes `file` the one that is followed. A replacement that has the same bytes where we stand goes on there.
    fn move_to(&mut self, file: File, meta: &Metadata, change: Change) -> io::Result<Change> {
        let there = Position { device: meta.dev(), inode: meta.ino(), ..self.position };
        self.file = Some(file);
        self.seen = None;
        self.buffer.clear();
        self.position = there;
        if change == Change::Rewritten && usize::from(there.mark_len) == MARK && self.load()? {
            return Ok(Change::More);
        }
        self.position = Position::start_of(meta);
        Ok(change)
    }

    /// Reads what follows the position. `Same` if there is nothing.
    fn read(&mut self, change: Change) -> io::Result<Change> {
        let Some(file) = &self.file else { return Ok(Change::Same) };
        let meta = file.metadata()?;
        self.seen = Some(stamp(&meta));
        self.advanced = false;
        let mut change = change;
        if meta.len() < self.position.offset || !self.load()? {
            self.position = Position::start_of(&meta);
            change = Change::Rewritten;
            self.load()?;
        }
        if self.data().is_empty() && change == Change::More {
            return Ok(Change::Same);
        }
        Ok(change)
    }

    /// Fills the buffer with the mark and what follows; `false` if the mark is not what was read. One system call reads both, so that a
    /// file written anew cannot change between them.
    fn load(&mut self) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(true) };
        let mark_len = usize::from(self.position.mark_len);
        let size = file.metadata()?.len().saturating_sub(self.position.offset);
        let wanted = mark_len + usize::try_from(size).unwrap_or(WINDOW).min(WINDOW);
        self.buffer.resize(wanted, 0);
        let n = loop {
            match file.read_at(&mut self.buffer, self.position.offset - mark_len as u64) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.buffer.truncate(n);
        // Memory for a window is only kept while there is a backlog.
        if self.buffer.len() < self.buffer.capacity() / 4 {
            self.buffer.shrink_to(4096.max(n));
        }
        Ok(n >= mark_len && crc32c::crc32c(&self.buffer[..mark_len]) == self.position.mark)
    }
}

fn stamp(meta: &Metadata) -> (u64, i64, i64) {
    (meta.len(), meta.mtime(), meta.mtime_nsec())
}
