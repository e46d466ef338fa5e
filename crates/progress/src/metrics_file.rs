//! Readings from a file that the job writes: CSV, one JSON object a line, or text.
//!
//! **How.** The first line decides the form: `{` is JSON, a row of names is CSV (with commas,
//! semicolons or tabs), everything else is text, read like output, which covers Katib's
//! `<timestamp> name=value`. Only lines that have their end are read; the position stays before a
//! torn one.
//!
//! **Rewriting.** Lightning writes its CSV again when a column appears, pandas writes all of it each
//! time. So after a [`Change::Rewritten`] the rows are compared with the rows given out before, by
//! checksums of their values (an empty new column has none). While they agree, they are known and
//! skipped. As soon as one differs, the file is a new one and is read from its beginning.
//!
//! **End of the job.** [`MetricsFile::finish`] reads a bounded piece: the last [`FINISH_BYTES`] of a
//! file that is far ahead of the position, and no more windows than that even if the file grows.
//!
//! **Properties.** No complete row is lost, and none is given twice, when the file grows, is cut,
//! rotated, replaced or rewritten, also when the daemon restarts in between; except that `finish` may
//! skip rows. A stored state that is garbage makes nothing panic.

use crate::facts::Facts;
use crate::line;
use crate::number::{self, Number};
use crate::pattern::{BudgetedPattern, Pattern};
use crate::reading::{Batch, Counters, MAX_NAME};
use crate::root::Root;
use crate::row::{MAX_COLUMNS, RowReader};
use crate::tail::{Change, FileTail, Position, WINDOW};
use gainshare_core::model::Time;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The first rows are each remembered by a checksum, the rest by one for all.
const MAX_HEAD: usize = 64;

/// Delimiters of CSV files, the usual one first.
const DELIMITERS: [char; 3] = [',', ';', '\t'];

/// Windows read in one call of [`MetricsFile::poll`].
const POLL_WINDOWS: usize = 4;

/// Bytes read at the end of a job, if more than that is unread.
const FINISH_BYTES: u64 = 1 << 20;

/// Windows read at the end of a job. A window that ends within a line is shorter than [`WINDOW`].
const FINISH_WINDOWS: u64 = FINISH_BYTES / WINDOW as u64 + 2;

/// Readings kept at the end of a job, the newest ones.
const FINISH_READINGS: usize = 4096;

/// The stored state of a [`MetricsFile`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FileState {
    position: Position,
    decoder: Decoder,
}

/// Follows one metrics file.
#[derive(Debug)]
pub struct MetricsFile {
    tail: FileTail,
    decoder: Decoder,
    parsers: Parsers,
    counters: Counters,
}

/// What turns a line into facts. Nothing of it is stored.
#[derive(Debug)]
struct Parsers {
    pattern: Option<BudgetedPattern>,
    rows: RowReader,
}

impl MetricsFile {
    /// Follows `path`, relative to `root`. `state` is the stored one, or the default.
    pub fn new(root: Arc<Root>, path: &Path, pattern: Option<Pattern>, state: FileState) -> MetricsFile {
        let tail = FileTail::new(root, path, state.position, true);
        let parsers = Parsers { pattern: pattern.map(BudgetedPattern::new), rows: RowReader::default() };
        MetricsFile { tail, decoder: state.decoder.checked(), parsers, counters: Counters::default() }
    }

    pub fn state(&self) -> FileState {
        FileState { position: self.tail.position(), decoder: self.decoder.clone() }
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    pub fn path(&self) -> &Path {
        self.tail.path()
    }

    /// Begins a round: the pattern's CPU budget for the following calls is set.
    pub fn begin_round(&mut self, now: Time) {
        if let Some(pattern) = &mut self.parsers.pattern {
            pattern.begin_round(now);
        }
    }

    /// A sentence for people, if the pattern is too costly.
    pub fn note(&self) -> Option<String> {
        self.parsers.pattern.as_ref().and_then(BudgetedPattern::note)
    }

    /// Reads new rows until `batch` holds `max` readings; the rest comes with the next call. Reads at
    /// most [`POLL_WINDOWS`] windows.
    pub fn poll(&mut self, max: usize, batch: &mut Batch) -> io::Result<()> {
        for _ in 0..POLL_WINDOWS {
            if !self.read_window(max, batch)? || batch.readings.len() >= max {
                break;
            }
        }
        Ok(())
    }

    /// The job has ended: reads a bounded piece of what is left. The last line counts even without its
    /// end. `batch` gets at most [`FINISH_READINGS`] readings, the newest ones.
    pub fn finish(&mut self, batch: &mut Batch) -> io::Result<()> {
        // A file that was never read has its column names here.
        let mut more = self.read_window(usize::MAX, batch)?;
        let surplus = self.tail.unread().saturating_sub(FINISH_BYTES);
        // Rows that are compared with known ones cannot be skipped: the rest would look new.
        if surplus > 0 && self.decoder.again.is_none() && self.tail.skip(surplus) {
            self.decoder.skipping = true;
            // How many lines these were is unknown.
            self.counters.flooded_lines = self.counters.flooded_lines.saturating_add(1);
        }
        let mut dropped = batch.keep_newest(FINISH_READINGS);
        for _ in 0..FINISH_WINDOWS {
            if !more {
                break;
            }
            more = self.read_window(usize::MAX, batch)?;
            dropped = dropped.saturating_add(batch.keep_newest(FINISH_READINGS));
        }
        self.counters.dropped_readings = self.counters.dropped_readings.saturating_add(dropped);
        // Before the end of the file the rest of the window is a piece of a longer line.
        let at_end = self.tail.unread() <= self.tail.data().len() as u64;
        if at_end && !self.decoder.skipping {
            let rest = self.tail.data().to_vec();
            self.tail.consume(rest.len());
            self.decoder.read_line(&rest, &mut self.parsers, &mut self.counters, batch);
        }
        Ok(())
    }

    /// Reads one window; `false` if there was nothing new.
    fn read_window(&mut self, max: usize, batch: &mut Batch) -> io::Result<bool> {
        match self.tail.fill()? {
            Change::Same => return Ok(false),
            Change::More => {}
            Change::Rotated => {
                self.counters.restarts = self.counters.restarts.saturating_add(1);
                self.decoder = Decoder::default();
            }
            Change::Rewritten => {
                self.counters.restarts = self.counters.restarts.saturating_add(1);
                self.decoder.expect_known_rows();
            }
        }
        self.read_lines(max, batch);
        Ok(true)
    }

    fn read_lines(&mut self, max: usize, batch: &mut Batch) {
        let mut done = 0;
        let data = self.tail.data();
        while let Some(len) = data[done..].iter().position(|&b| b == b'\n') {
            let line = &data[done..done + len];
            done += len + 1;
            if std::mem::take(&mut self.decoder.skipping) {
                continue;
            }
            if !self.decoder.read_line(line, &mut self.parsers, &mut self.counters, batch) {
                self.decoder = Decoder::default();
                self.tail.rewind();
                return;
            }
            if batch.readings.len() >= max {
                break;
            }
        }
        // A line as long as the window is no row.
        if done == 0 && data.len() >= WINDOW {
            let begins = u64::from(!self.decoder.skipping);
            self.counters.long_lines = self.counters.long_lines.saturating_add(begins);
            self.decoder.skipping = true;
            done = data.len();
        }
        self.tail.consume(done);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Form {
    Csv { delimiter: char },
    Lines,
}

/// Turns lines into readings and knows which rows were given out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Decoder {
    form: Option<Form>,
    columns: Vec<String>,
    /// In the middle of a line whose beginning was not read.
    skipping: bool,
    given: Rows,
    /// Rows read since the file was rewritten, while they agree with `given`.
    again: Option<Rows>,
}

/// A digest of rows: their number, the first ones one by one, all of them together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Rows {
    count: u64,
    head: Vec<u32>,
    all: u32,
}

impl Rows {
    fn push(&mut self, row: u32) {
        self.count = self.count.saturating_add(1);
        if self.head.len() < MAX_HEAD {
            self.head.push(row);
        }
        self.all = crc32c::crc32c_append(self.all, &row.to_le_bytes());
    }
}

impl Decoder {
    /// The decoder itself, or a new one if no version of this crate can have stored it.
    fn checked(self) -> Decoder {
        let rows = |rows: &Rows| rows.head.len() <= MAX_HEAD && rows.head.len() as u64 <= rows.count;
        let form = |form: Form| !matches!(form, Form::Csv { delimiter } if !DELIMITERS.contains(&delimiter));
        let possible = self.form.is_none_or(form)
            && self.columns.len() <= MAX_COLUMNS
            && rows(&self.given)
            && self.again.as_ref().is_none_or(rows);
        if possible { self } else { Decoder::default() }
    }

    fn expect_known_rows(&mut self) {
        let given = std::mem::take(&mut self.given);
        let again = (given.count > 0).then(Rows::default);
        *self = Decoder { given, again, ..Decoder::default() };
    }

    /// Reads one line; `false` if the file turns out to be a new one and must be read from its
    /// beginning.
    fn read_line(&mut self, line: &[u8], parsers: &mut Parsers, counters: &mut Counters, batch: &mut Batch) -> bool {
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line).trim_ascii();
        if line.is_empty() {
            return true;
        }
        let form = *self.form.get_or_insert_with(|| match header(line) {
            Some(delimiter) if parsers.pattern.is_none() => Form::Csv { delimiter },
            _ => Form::Lines,
        });
        let facts = match form {
            Form::Lines => line::parse(line, parsers.pattern.as_mut(), counters),
            Form::Csv { delimiter } => match self.read_row(line, delimiter, &mut parsers.rows) {
                Some(facts) => facts,
                None => return true,
            },
        };
        if facts.values.is_empty() {
            return true;
        }
        let row = digest(&facts);
        if let Some(again) = &mut self.again {
            let known = usize::try_from(again.count).ok().and_then(|at| self.given.head.get(at));
            again.push(row);
            let agrees = known.is_none_or(|known| *known == row)
                && (again.count < self.given.count || again.all == self.given.all);
            if !agrees {
                return false;
            }
            if again.count >= self.given.count {
                self.again = None;
            }
            return true;
        }
        self.given.push(row);
        let progress = facts.own_progress();
        batch.progress = progress.or(batch.progress);
        facts.into_readings(progress.map(|p| p.step), progress.and_then(|p| p.total), counters, batch);
        true
    }

    /// A row of a CSV file; `None` if it is a header.
    fn read_row(&mut self, line: &[u8], delimiter: char, rows: &mut RowReader) -> Option<Facts> {
        let cells = rows.cells(line, delimiter);
        // A header may also come later: a program that appends to the file of its last run writes it
        // again. A name too long for a metric is not kept.
        if header(line).is_some() {
            let name = |c: &str| if c.len() <= MAX_NAME { c.replace(' ', "_") } else { String::new() };
            self.columns = cells.map(name).collect();
            return None;
        }
        let mut facts = Facts::default();
        for (name, cell) in self.columns.iter().zip(cells) {
            if let Some(value) = number::whole(cell) {
                facts.add_named(name, value, cell.bytes().all(|b| b.is_ascii_digit()));
            }
        }
        Some(facts)
    }
}

/// The delimiter, if the line is a row of names. An index column may have none.
fn header(line: &[u8]) -> Option<char> {
    let text = std::str::from_utf8(line).ok()?;
    let delimiter = DELIMITERS.into_iter().find(|d| text.contains(*d)).unwrap_or(',');
    let cells: Vec<&str> = text.split(delimiter).map(|c| c.trim().trim_matches('"')).collect();
    let is_name = |c: &str| {
        c.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && c.chars().all(|c| c.is_alphanumeric() || " _-/.@()%[]".contains(c))
            && number::whole(c).is_none()
    };
    let names = cells.iter().filter(|c| is_name(c)).count();
    let empty = cells.iter().filter(|c| c.is_empty()).count();
    // A single column must be one word, or any sentence would be a header.
    let sentence = cells.len() == 1 && cells[0].contains(' ');
    (names > 0 && names + empty == cells.len() && !sentence).then_some(delimiter)
}

/// A checksum of the values of a row. The order of columns does not matter.
fn digest(facts: &Facts) -> u32 {
    let mut parts: Vec<u32> = facts
        .values
        .iter()
        .map(|(name, value)| {
            let bits = match value {
                Number::Good(x) => x.to_bits(),
                Number::Bad => u64::MAX,
            };
            crc32c::crc32c_append(crc32c::crc32c(name.as_bytes()), &bits.to_le_bytes())
        })
        .collect();
    parts.sort_unstable();
    let place = [facts.step.map(|s| s.at), facts.epoch.map(|e| e.at)];
    let mut sum = 0;
    for n in place {
        sum = crc32c::crc32c_append(sum, &n.map_or(u64::MAX, |n| n).to_le_bytes());
    }
    parts.into_iter().fold(sum, |sum, part| crc32c::crc32c_append(sum, &part.to_le_bytes()))
}
