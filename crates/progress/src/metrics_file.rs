//! Progress from a file that the job writes: CSV, one JSON object a line, or text.
//!
//! **How.** The first line tells the form: `{` is JSON, a row of names is CSV (with commas, semicolons or tabs), all else is text, read like
//! output, which covers Katib's `<timestamp> name=value`. Only lines that have their end are read; the position stays before a torn one.
//!
//! **Rewriting.** Lightning writes its CSV anew when a column appears, pandas writes all of it each time. So after a [`Change::Rewritten`] the
//! rows are compared with those given out before, by checksums of what they say (an empty new column says nothing): as long as they
//! agree, they are known and passed over; as soon as one differs, the file is a new one and is read from its beginning.
//!
//! **Properties.** No complete row is lost, none given twice, whether the file grows, is cut, rotated, replaced or rewritten, and whether the
//! daemon restarts in between.

use super::beneath::Root;
use super::line::{self, Facts, Pattern};
use super::number::{self, Number};
use super::tail::{Change, FileTail, Position, WINDOW};
use super::{Batch, Counters, Progress, Reading, Unit};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The first rows are each remembered by a checksum, the rest by one for all.
const MAX_HEAD: usize = 64;

/// Columns beyond this are not looked at.
const MAX_COLUMNS: usize = 512;

/// What must be kept of a file to go on with it.
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
    pattern: Option<Pattern>,
    counters: Counters,
}

impl MetricsFile {
    /// Follows `path`, relative to `root`; `state` is what an earlier one left, or the default.
    pub fn new(root: Arc<Root>, path: &Path, pattern: Option<Pattern>, state: FileState) -> MetricsFile {
        let tail = FileTail::new(root, path, state.position, true);
        MetricsFile { tail, decoder: state.decoder, pattern, counters: Counters::default() }
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

    /// Reads what is new, until `batch` holds `most` readings; the rest comes with the next call. At most four windows a call.
    pub fn poll(&mut self, most: usize, batch: &mut Batch) -> io::Result<()> {
        for _ in 0..4 {
            match self.tail.fill()? {
                Change::Same => return Ok(()),
                Change::More => {}
                Change::Rotated => {
                    self.counters.restarts += 1;
                    self.decoder = Decoder::default();
                }
                Change::Rewritten => {
                    self.counters.restarts += 1;
                    self.decoder.expect_known_rows();
                }
            }
            self.take_lines(most, batch);
            if batch.readings.len() >= most {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The job is over: a last line without its end counts too.
    pub fn finish(&mut self, batch: &mut Batch) -> io::Result<()> {
        loop {
            let before = self.tail.position();
            self.poll(usize::MAX, batch)?;
            if self.tail.position() == before {
                break;
            }
        }
        let rest = self.tail.data().to_vec();
        self.tail.consume(rest.len());
        self.decoder.line(&rest, self.pattern.as_ref(), &mut self.counters, batch);
        Ok(())
    }

    fn take_lines(&mut self, most: usize, batch: &mut Batch) {
        let mut done = 0;
        let data = self.tail.data();
        while let Some(len) = data[done..].iter().position(|&b| b == b'\n') {
            let line = &data[done..done + len];
            done += len + 1;
            if std::mem::take(&mut self.decoder.skipping) {
                continue;
            }
            if !self.decoder.line(line, self.pattern.as_ref(), &mut self.counters, batch) {
                self.decoder = Decoder::default();
                self.tail.rewind();
                return;
            }
            if batch.readings.len() >= most {
                break;
            }
        }
        // A line as long as the window is no row.
        if done == 0 && data.len() >= WINDOW {
            self.counters.long_lines += u64::from(!self.decoder.skipping);
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

/// Makes readings of lines and knows which rows were given out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Decoder {
    form: Option<Form>,
    columns: Vec<String>,
    /// In the middle of a line that is too long.
    skipping: bool,
    given: Rows,
    /// Rows read since the file was written anew, while they agree with those given.
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
        self.count += 1;
        if self.head.len() < MAX_HEAD {
            self.head.push(row);
        }
        self.all = crc32c::crc32c_append(self.all, &row.to_le_bytes());
    }
}

impl Decoder {
    fn expect_known_rows(&mut self) {
        let given = std::mem::take(&mut self.given);
        let again = (given.count > 0).then(Rows::default);
        *self = Decoder { given, again, ..Decoder::default() };
    }

    /// Reads one line; `false` if the file turns out to be a new one and must be read from its beginning.
    fn line(&mut self, line: &[u8], pattern: Option<&Pattern>, counters: &mut Counters, batch: &mut Batch) -> bool {
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line).trim_ascii();
        if line.is_empty() {
            return true;
        }
        let form = *self.form.get_or_insert_with(|| match header(line) {
            Some((delimiter, _)) if pattern.is_none() => Form::Csv { delimiter },
            _ => Form::Lines,
        });
        let facts = match form {
            Form::Lines => line::parse(line, pattern),
            Form::Csv { delimiter } => match self.row(line, delimiter) {
                Some(facts) => facts,
                None => return true,
            },
        };
        if facts.values.is_empty() {
            return true;
        }
        let row = digest(&facts);
        if let Some(again) = &mut self.again {
            again.push(row);
            let at = again.count as usize;
            let agrees = self.given.head.get(at - 1).is_none_or(|known| *known == row)
                && (again.count < self.given.count || again.all == self.given.all);
            if !agrees {
                return false;
            }
            if again.count == self.given.count {
                self.again = None;
            }
            return true;
        }
        self.given.push(row);
        give(facts, counters, batch);
        true
    }

    /// A row of a CSV file; `None` if it is a header.
    fn row(&mut self, line: &[u8], delimiter: char) -> Option<Facts> {
        let mut reader = csv::ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .delimiter(delimiter as u8)
            .buffer_capacity(line.len().max(1))
            .from_reader(line);
        let mut record = csv::ByteRecord::new();
        // Rows that are no text are rows without values.
        if !reader.read_byte_record(&mut record).unwrap_or(false) {
            return Some(Facts::default());
        }
        let cells = || record.iter().take(MAX_COLUMNS).map(|c| std::str::from_utf8(c).unwrap_or("").trim());
        // A header may also come later: a program that appends to the file of its last run writes it again.
        if header(line).is_some() {
            self.columns = cells().map(|c| c.replace(' ', "_")).collect();
            return None;
        }
        let mut facts = Facts::default();
        for (name, cell) in self.columns.iter().zip(cells()) {
            if let Some(value) = number::whole(cell) {
                facts.add_named(name, value, cell.bytes().all(|b| b.is_ascii_digit()));
            }
        }
        Some(facts)
    }
}

/// The delimiter and number of columns, if the line is a row of names. An index column may have none.
fn header(line: &[u8]) -> Option<(char, usize)> {
    let text = std::str::from_utf8(line).ok()?;
    let delimiter = [',', ';', '\t'].into_iter().find(|d| text.contains(*d)).unwrap_or(',');
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
    (names > 0 && names + empty == cells.len() && !sentence).then_some((delimiter, cells.len()))
}

/// What a row says, as one number. The order of columns does not matter.
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

fn give(facts: Facts, counters: &mut Counters, batch: &mut Batch) {
    let (step, total) = (facts.step.map(|s| s.at), facts.step.and_then(|s| s.total));
    let epoch = facts.epoch.map(|e| Progress { step: e.at, total: e.total, unit: Unit::Epoch });
    let own = step.map(|step| Progress { step, total, unit: Unit::Step }).or(epoch);
    batch.progress = own.or(batch.progress);
    counters.dropped_readings += facts.surplus;
    for (metric, value) in facts.values {
        match value {
            Number::Good(value) => {
                let (step, total) = (own.map(|p| p.step), own.and_then(|p| p.total));
                batch.readings.push(Reading { metric, value, step, total });
            }
            Number::Bad => counters.bad_values += 1,
        }
    }
}
