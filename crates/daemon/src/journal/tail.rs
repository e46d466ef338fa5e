//! What SQLite drops when it opens the journal after a crash.
//!
//! A daemon that dies within a commit leaves an incomplete batch: frames at the end of the write-ahead log that no
//! commit follows, or a rollback journal. SQLite drops the one and undoes the other without a word. This module reads
//! the files before SQLite does, so that the daemon can report it, and opens them so that all of this is left to the
//! daemon.
//!
//! The log is a header and frames. Each frame has two salts, which are those of the header, and a checksum of
//! everything before it. A log that began again keeps old frames behind its end; their first salt is smaller. They are
//! no damage. The format: <https://www.sqlite.org/fileformat2.html#walformat>.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use rusqlite::{Connection, OpenFlags};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const HEADER: usize = 32;
const FRAME_HEADER: usize = 24;
/// The number at the beginning of the log. Its last bit is set if checksums read big-endian words.
const MAGIC: u32 = 0x377f_0682;
/// How often a log can have begun again since a frame was written that is still in the file.
const RESTARTS: u32 = 1 << 20;

/// What a path may have in the address of a database.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/');

/// What will be dropped of the journal, in words; `None` if all of it is whole.
pub(super) fn find_dropped(journal: &Path) -> Option<String> {
    let undone = beside(journal, "-journal");
    if is_filled(&undone) {
        return Some(format!("a batch that was not complete was undone with {}", undone.display()));
    }
    let log = beside(journal, "-wal");
    let length = std::fs::metadata(&log).ok()?.len();
    let bytes = length.checked_sub(whole_length(&log, length)?)?;
    let log = log.display();
    (bytes > 0).then(|| format!("the last {bytes} of {length} bytes of {log} are not a whole batch and were dropped"))
}

/// Opens the journal so that neither it nor its log changes; `None` if a batch has to be undone first.
pub(super) fn open_unchanged(journal: &Path) -> rusqlite::Result<Option<Connection>> {
    if is_filled(&beside(journal, "-journal")) {
        return Ok(None);
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    if is_filled(&beside(journal, "-wal")) {
        return Connection::open_with_flags(journal, flags).map(Some);
    }
    // Without a log the file is complete, and SQLite need not make one.
    let address = format!("file:{}?immutable=1", percent_encode(journal.as_os_str().as_bytes(), PATH));
    Connection::open_with_flags(address, flags | OpenFlags::SQLITE_OPEN_URI).map(Some)
}

fn is_filled(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|file| file.len() > 0)
}

fn beside(journal: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(journal);
    name.push(suffix);
    name.into()
}

/// The length of the log up to its last commit; the whole length if nothing but old frames follows. `None`: the log
/// cannot be read.
fn whole_length(log: &Path, length: u64) -> Option<u64> {
    let mut file = BufReader::new(File::open(log).ok()?);
    let mut header = [0; HEADER];
    let read = read_up_to(&mut file, &mut header)?;
    let (magic, page, salts) = (word(&header, 0), word(&header, 8), [word(&header, 16), word(&header, 20)]);
    let is_big_endian = magic & 1 == 1;
    let mut sum = checksum([0, 0], &header[..24], is_big_endian);
    let is_valid = magic & !1 == MAGIC && (512..=65_536).contains(&page) && page.is_power_of_two();
    if read < HEADER || !is_valid || sum != [word(&header, 24), word(&header, 28)] {
        return Some(0);
    }
    let mut frame = vec![0; FRAME_HEADER + page as usize];
    let (mut end, mut committed) = (HEADER as u64, HEADER as u64);
    loop {
        let read = read_up_to(&mut file, &mut frame)?;
        if read == 0 {
            return Some(committed);
        }
        if read >= 16 && [word(&frame, 8), word(&frame, 12)] != salts {
            let is_old = (1..RESTARTS).contains(&salts[0].wrapping_sub(word(&frame, 8)));
            // Frames of this log that no commit follows are incomplete, whatever comes after them.
            return Some(if is_old && end == committed { length } else { committed });
        }
        if read < frame.len() {
            return Some(committed);
        }
        sum = checksum(checksum(sum, &frame[..8], is_big_endian), &frame[FRAME_HEADER..], is_big_endian);
        if sum != [word(&frame, 16), word(&frame, 20)] {
            return Some(committed);
        }
        end += frame.len() as u64;
        if word(&frame, 4) > 0 {
            committed = end;
        }
    }
}

/// Fills the buffer, or as much of it as the file has left; `None` if the file cannot be read.
fn read_up_to(file: &mut impl Read, buffer: &mut [u8]) -> Option<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    Some(filled)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The checksum of the log, continued over these bytes. Their number is a multiple of eight.
fn checksum(sum: [u32; 2], bytes: &[u8], is_big_endian: bool) -> [u32; 2] {
    let read = |at: &[u8]| {
        let word = [at[0], at[1], at[2], at[3]];
        if is_big_endian { u32::from_be_bytes(word) } else { u32::from_le_bytes(word) }
    };
    bytes.chunks_exact(8).fold(sum, |[first, second], pair| {
        let first = first.wrapping_add(read(&pair[..4])).wrapping_add(second);
        [first, second.wrapping_add(read(&pair[4..])).wrapping_add(first)]
    })
}
