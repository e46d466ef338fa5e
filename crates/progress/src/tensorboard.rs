//! TensorBoard's event files.
//!
//! **Format.** A file is a chain of records: length (8 bytes, little-endian), its masked CRC-32C (4),
//! the data, its masked CRC-32C (4). The data is a protocol buffer; of its messages only the fields
//! that carry scalars are declared here. PyTorch writes a scalar as `simple_value`, Keras and
//! TensorFlow 2 as a tensor of one element.
//!
//! **Damage.** A record that is cut off at the end of the file is still being written: wait. Data with
//! a wrong checksum is skipped. After a length with a wrong checksum the next place with a right one
//! is searched, byte by byte. Records larger than [`MAX_RECORD`] (images, graphs) are skipped unread.
//! All but the first are counted.
//!
//! **Names.** Keras writes training and validation into two folders under the same tags. Where a
//! folder's name says which, it is put in front: `validation/epoch_loss`.
//!
//! **Properties.** One call reads at most [`ROUND_WINDOWS`] windows of all files together and searches
//! at most [`ROUND_SEARCH_BYTES`] of garbage. The next call begins with the file after the last one
//! read, so no file starves the others.

use crate::number::{Number, vet};
use crate::reading::{Batch, Counters, MAX_NAME, MetricReading};
use crate::root::Root;
use crate::tail::{Change, FileTail, Position};
use crate::words::SPLIT_FOLDERS;
use half::{bf16, f16};
use prost::Message;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest record that is decoded. A scalar has some 60 bytes; this leaves room for events of
/// hundreds of them.
const MAX_RECORD: u64 = 128 << 10;

/// A length beyond this is damage, even if its checksum is right.
const MAX_LENGTH: u64 = 4 << 30;

/// Length and its checksum.
const HEAD: usize = 12;

/// Event files of one job that are followed. A job writes two or three, a sweep in one process some
/// more.
const MAX_FILES: usize = 64;

/// Calls without news after which a file is checked only every [`IDLE_EVERY`] calls.
const IDLE_AFTER: u32 = 30;
const IDLE_EVERY: u32 = 10;

/// Windows (of 256 KiB) read in one call, of one file and of all files together.
const FILE_WINDOWS: usize = 4;
const ROUND_WINDOWS: usize = 16;

/// Bytes searched for the next record in one call. Each costs a checksum of eight bytes.
const ROUND_SEARCH_BYTES: usize = 256 << 10;

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
struct SummaryValue {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    tensor: Option<Tensor>,
}

#[derive(Clone, PartialEq, Message)]
struct Tensor {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(bytes = "vec", tag = "4")]
    content: Vec<u8>,
    #[prost(float, repeated, tag = "5")]
    floats: Vec<f32>,
    #[prost(double, repeated, tag = "6")]
    doubles: Vec<f64>,
    #[prost(int32, repeated, tag = "7")]
    ints: Vec<i32>,
    #[prost(int64, repeated, tag = "10")]
    longs: Vec<i64>,
    #[prost(int32, repeated, tag = "13")]
    halves: Vec<i32>,
}

impl Tensor {
    /// The value of a tensor with one element.
    fn scalar(&self) -> Option<f64> {
        // Element types by their number in TensorFlow: 1 float, 2 double, 3 int32, 9 int64,
        // 14 bfloat16, 19 half.
        match (self.dtype, self.content.as_slice()) {
            (1, c) if c.len() == 4 => return Some(f32::from_le_bytes(c.try_into().ok()?).into()),
            (2, c) if c.len() == 8 => return Some(f64::from_le_bytes(c.try_into().ok()?)),
            (3, c) if c.len() == 4 => return Some(i32::from_le_bytes(c.try_into().ok()?).into()),
            (9, c) if c.len() == 8 => return Some(i64::from_le_bytes(c.try_into().ok()?) as f64),
            (14, c) if c.len() == 2 => return Some(bf16::from_le_bytes(c.try_into().ok()?).to_f64()),
            (19, c) if c.len() == 2 => return Some(f16::from_le_bytes(c.try_into().ok()?).to_f64()),
            (_, []) => {}
            _ => return None,
        }
        match (&self.floats[..], &self.doubles[..], &self.ints[..], &self.longs[..], &self.halves[..]) {
            ([x], [], [], [], []) => Some((*x).into()),
            ([], [x], [], [], []) => Some(*x),
            ([], [], [x], [], []) => Some((*x).into()),
            ([], [], [], [x], []) => Some(*x as f64),
            ([], [], [], [], [x]) if self.dtype == 14 => Some(bf16::from_bits(*x as u16).to_f64()),
            ([], [], [], [], [x]) => Some(f16::from_bits(*x as u16).to_f64()),
            _ => None,
        }
    }
}

/// TensorFlow stores checksums rotated and shifted, since a checksum of data that holds checksums is
/// weak.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The length in a record's head, if its checksum is right.
fn head(bytes: &[u8]) -> Option<u64> {
    let length = bytes.first_chunk::<8>()?;
    let crc = u32::from_le_bytes(*bytes.get(8..HEAD)?.first_chunk()?);
    let value = u64::from_le_bytes(*length);
    (masked_crc(length) == crc && value <= MAX_LENGTH).then_some(value)
}

/// How far [`read_records`] came.
#[derive(Debug, Default, PartialEq)]
struct ReadPosition {
    bytes: usize,
    /// Length of a large record that begins there and is to be skipped.
    skip: u64,
}

/// Passes every whole record to `take` until it returns `false`. `search` is the number of bytes that
/// may still be searched for the next record after damage.
fn read_records(
    data: &[u8],
    search: &mut usize,
    counters: &mut Counters,
    mut take: impl FnMut(&[u8]) -> bool,
) -> ReadPosition {
    let mut at = 0;
    while data.len() - at >= HEAD {
        let rest = &data[at..];
        let Some(length) = head(rest) else {
            // Some file systems show zeros before the bytes arrive.
            if *search == 0 || rest.iter().all(|&b| b == 0) {
                break;
            }
            counters.bad_records = counters.bad_records.saturating_add(1);
            // The last bytes may be the beginning of a head.
            let end = (rest.len() - HEAD + 1).min(*search + 1);
            let next = (1..end).find(|&i| head(&rest[i..]).is_some()).unwrap_or(end);
            *search = search.saturating_sub(next);
            at += next;
            continue;
        };
        if length > MAX_RECORD {
            return ReadPosition { bytes: at, skip: length + 16 };
        }
        let end = HEAD + length as usize;
        let Some(crc) = rest.get(end..).and_then(|tail| tail.first_chunk()) else { break };
        let body = &rest[HEAD..end];
        at += end + 4;
        if masked_crc(body) != u32::from_le_bytes(*crc) {
            counters.bad_records = counters.bad_records.saturating_add(1);
        } else if !take(body) {
            break;
        }
    }
    ReadPosition { bytes: at, skip: 0 }
}

/// What one call may still do.
#[derive(Debug)]
struct Allowance {
    windows: usize,
    search: usize,
}

impl Allowance {
    fn is_used_up(&self) -> bool {
        self.windows == 0 || self.search == 0
    }
}

/// Follows one event file.
#[derive(Debug)]
struct EventFile {
    path: PathBuf,
    tail: FileTail,
    /// Put in front of the tags.
    prefix: String,
    idle: u32,
}

impl EventFile {
    fn poll(
        &mut self,
        max: usize,
        allowance: &mut Allowance,
        counters: &mut Counters,
        batch: &mut Batch,
    ) -> io::Result<()> {
        for _ in 0..FILE_WINDOWS {
            if allowance.is_used_up() {
                break;
            }
            match self.tail.fill()? {
                Change::Same => break,
                Change::More => {}
                Change::Rotated | Change::Rewritten => counters.restarts = counters.restarts.saturating_add(1),
            }
            self.idle = 0;
            allowance.windows -= 1;
            let mut found = Counters::default();
            let consumed = read_records(self.tail.data(), &mut allowance.search, &mut found, |body| {
                read_event(body, &self.prefix, counters, batch);
                batch.readings.len() < max
            });
            *counters += found;
            self.tail.consume(consumed.bytes);
            if consumed.skip > 0 && self.tail.skip(consumed.skip) {
                counters.bad_records = counters.bad_records.saturating_add(1);
            }
            if batch.readings.len() >= max {
                break;
            }
        }
        Ok(())
    }
}

fn read_event(body: &[u8], prefix: &str, counters: &mut Counters, batch: &mut Batch) {
    let Ok(event) = Event::decode(body) else {
        counters.bad_records = counters.bad_records.saturating_add(1);
        return;
    };
    for value in event.summary.into_iter().flat_map(|s| s.value) {
        let Some(x) = value.simple_value.map(f64::from).or_else(|| value.tensor.as_ref()?.scalar()) else { continue };
        if value.tag.is_empty() || value.tag.len() + prefix.len() > MAX_NAME {
            counters.dropped_readings = counters.dropped_readings.saturating_add(1);
            continue;
        }
        match vet(x) {
            Number::Good(x) => batch.readings.push(MetricReading {
                metric: format!("{prefix}{}", value.tag),
                value: x,
                step: u64::try_from(event.step).ok(),
                total: None,
            }),
            Number::Bad => counters.bad_values = counters.bad_values.saturating_add(1),
        }
    }
}

/// Follows the event files of one job.
#[derive(Debug)]
pub struct EventFiles {
    root: Arc<Root>,
    /// Sorted by path.
    files: Vec<EventFile>,
    /// Index of the file that the next call begins with.
    next: usize,
    counters: Counters,
    calls: u32,
}

impl EventFiles {
    /// `positions` are the stored ones.
    pub fn new(root: Arc<Root>, positions: BTreeMap<PathBuf, Position>) -> EventFiles {
        let mut files = EventFiles { root, files: Vec::new(), next: 0, counters: Counters::default(), calls: 0 };
        for (path, position) in positions {
            files.add(&path, position);
        }
        files
    }

    /// Follows the file at `path`, relative to the root, from now on. `true` if it is a new one.
    pub fn follow(&mut self, path: &Path) -> bool {
        self.add(path, Position::default())
    }

    fn add(&mut self, path: &Path, position: Position) -> bool {
        let Err(place) = self.files.binary_search_by(|file| file.path.as_path().cmp(path)) else { return false };
        if self.files.len() >= MAX_FILES {
            self.counters.failures = self.counters.failures.saturating_add(1);
            return false;
        }
        let tail = FileTail::new(self.root.clone(), path, position, false);
        let file = EventFile { path: path.to_path_buf(), tail, prefix: prefix(path), idle: 0 };
        self.files.insert(place, file);
        true
    }

    pub fn positions(&self) -> BTreeMap<PathBuf, Position> {
        self.files.iter().map(|file| (file.path.clone(), file.tail.position())).collect()
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Reads new records of all files until `batch` holds `max` readings or the call has used up its
    /// allowance. The rest comes with the next call.
    pub fn poll(&mut self, max: usize, batch: &mut Batch) {
        self.calls = self.calls.wrapping_add(1);
        let mut allowance = Allowance { windows: ROUND_WINDOWS, search: ROUND_SEARCH_BYTES };
        let (count, first) = (self.files.len(), self.next);
        self.next = 0;
        for i in (0..count).map(|i| (first + i) % count) {
            let file = &mut self.files[i];
            file.idle = file.idle.saturating_add(1);
            if file.idle > IDLE_AFTER && !self.calls.is_multiple_of(IDLE_EVERY) {
                continue;
            }
            if file.poll(max, &mut allowance, &mut self.counters, batch).is_err() {
                self.counters.failures = self.counters.failures.saturating_add(1);
            }
            if batch.readings.len() >= max || allowance.is_used_up() {
                self.next = (i + 1) % count;
                return;
            }
        }
    }
}

/// The name of the file's folder with a slash, if it separates training from validation.
fn prefix(path: &Path) -> String {
    let folder = path.parent().and_then(Path::file_name).and_then(|n| n.to_str()).unwrap_or("");
    let lower = folder.to_ascii_lowercase();
    let splits = SPLIT_FOLDERS.iter().any(|w| lower.split(['_', '-', '.', ' ']).any(|part| part.starts_with(w)));
    if splits && folder.len() <= 32 { format!("{folder}/") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(body: &[u8]) -> Vec<u8> {
        let length = (body.len() as u64).to_le_bytes();
        [&length[..], &masked_crc(&length).to_le_bytes(), body, &masked_crc(body).to_le_bytes()].concat()
    }

    fn bodies(data: &[u8]) -> (Vec<Vec<u8>>, ReadPosition, Counters) {
        let (mut out, mut counters) = (Vec::new(), Counters::default());
        let done = read_records(data, &mut (1 << 30), &mut counters, |body| {
            out.push(body.to_vec());
            true
        });
        (out, done, counters)
    }

    #[test]
    fn scalars_of_all_element_types() {
        let content = |dtype, content: &[u8]| Tensor { dtype, content: content.to_vec(), ..Tensor::default() }.scalar();
        assert_eq!(content(1, &1.5f32.to_le_bytes()), Some(1.5));
        assert_eq!(content(2, &(-2.5f64).to_le_bytes()), Some(-2.5));
        assert_eq!(content(3, &(-7i32).to_le_bytes()), Some(-7.0));
        assert_eq!(content(9, &7i64.to_le_bytes()), Some(7.0));
        assert_eq!(content(14, &0x3fc0u16.to_le_bytes()), Some(1.5));
        assert_eq!(content(19, &0x3555u16.to_le_bytes()), Some(0.333251953125));
        assert_eq!((content(19, &[0; 4]), content(77, &[0; 2])), (None, None));
        let halves = |dtype, bits| Tensor { dtype, halves: vec![bits], ..Tensor::default() }.scalar();
        assert_eq!((halves(14, 0x3fc0), halves(19, 0x3c00), halves(19, 0xc000)), (Some(1.5), Some(1.0), Some(-2.0)));
        assert_eq!(halves(19, 1), Some(5.960464477539063e-8));
        assert!(halves(19, 0x7c00).is_some_and(f64::is_infinite) && halves(19, 0x7e00).is_some_and(f64::is_nan));
    }

    #[test]
    fn damage_is_skipped_and_counted() {
        let (a, b, c) = (record(b"first"), record(b"second"), record(b"third"));
        let mut data = [a.clone(), b.clone(), c.clone()].concat();
        data[a.len() + 13] ^= 1;
        let (out, done, counters) = bodies(&data);
        assert_eq!(
            (out, done.bytes, counters.bad_records),
            (vec![b"first".to_vec(), b"third".to_vec()], data.len(), 1)
        );

        let mut data = [a.clone(), b, c].concat();
        data[a.len() + 2] ^= 1;
        let (out, done, counters) = bodies(&data);
        assert_eq!(
            (out, done.bytes, counters.bad_records),
            (vec![b"first".to_vec(), b"third".to_vec()], data.len(), 1)
        );

        let zeros = [a.clone(), vec![0; 100]].concat();
        assert_eq!(bodies(&zeros).1.bytes, a.len(), "zeros may still become a record");
    }

    #[test]
    fn record_bombs_cost_nothing() {
        let length = (MAX_RECORD + 1).to_le_bytes();
        let large = [&length[..], &masked_crc(&length).to_le_bytes(), b"xxxxxxxx"].concat();
        assert_eq!(bodies(&large).1, ReadPosition { bytes: 0, skip: MAX_RECORD + 17 });
        let length = (1u64 << 60).to_le_bytes();
        let bomb = [&length[..], &masked_crc(&length).to_le_bytes(), &record(b"after")[..]].concat();
        assert_eq!(bodies(&bomb).0, [b"after".to_vec()]);
    }

    #[test]
    fn garbage_costs_a_bounded_search_in_each_round() {
        let garbage = vec![0x5a; 3 * ROUND_SEARCH_BYTES];
        let mut search = 1000;
        let consumed = read_records(&garbage, &mut search, &mut Counters::default(), |_| true);
        assert_eq!((consumed.bytes, search), (1001, 0));
        let again = read_records(&garbage, &mut search, &mut Counters::default(), |_| true);
        assert_eq!(again.bytes, 0, "nothing is searched without an allowance");

        let temporary = tempfile::tempdir().unwrap();
        let mut files = EventFiles::new(Arc::new(Root::open(temporary.path()).unwrap()), BTreeMap::new());
        let offset = |files: &EventFiles, i: usize| {
            let position = serde_json::to_value(files.files[i].tail.position()).unwrap();
            position["offset"].as_u64().unwrap() as usize
        };
        for name in ["a.tfevents", "b.tfevents"] {
            std::fs::write(temporary.path().join(name), [&garbage[..], &record(b"x")].concat()).unwrap();
            assert!(files.follow(Path::new(name)) && !files.follow(Path::new(name)));
        }
        let mut before = 0;
        for round in 0..12 {
            files.poll(10, &mut Batch::default());
            let now = offset(&files, 0) + offset(&files, 1);
            assert!(now - before <= ROUND_SEARCH_BYTES + 64, "round {round}: {before} to {now}");
            before = now;
        }
        assert_eq!(before, 2 * (garbage.len() + record(b"x").len()), "both files are read to their end");
    }

    #[test]
    fn folders_that_separate_training_from_validation() {
        assert_eq!(prefix(Path::new("logs/validation/events.out.tfevents.1")), "validation/");
        assert_eq!(prefix(Path::new("runs/loss_train/events.out.tfevents.1")), "loss_train/");
        assert_eq!(prefix(Path::new("runs/Nov15_12-00-00_host/events.out.tfevents.1")), "");
        assert_eq!(prefix(Path::new("events.out.tfevents.1")), "");
    }

    proptest! {
        #[test]
        fn torn_records_wait(sizes in proptest::collection::vec(0usize..40, 1..6), cut in 0usize..400) {
            let records: Vec<_> = sizes.iter().map(|&n| record(&vec![b'x'; n])).collect();
            let data = records.concat();
            let cut = cut.min(data.len());
            let (mut out, first, counters) = bodies(&data[..cut]);
            prop_assert_eq!(counters, Counters::default());
            let (rest, second, _) = bodies(&data[first.bytes..]);
            out.extend(rest);
            prop_assert_eq!(out.len(), sizes.len());
            prop_assert_eq!(first.bytes + second.bytes, data.len());
        }

        #[test]
        fn any_bytes_are_survived(data in proptest::collection::vec(any::<u8>(), 0..300), flip in any::<prop::sample::Index>()) {
            bodies(&data);
            read_event(&data, "", &mut Counters::default(), &mut Batch::default());
            let event = Event {
                wall_time: 1.0,
                step: 3,
                summary: Some(Summary { value: vec![SummaryValue { tag: "loss".into(), simple_value: Some(f32::NAN), tensor: None }] }),
            };
            let mut chain = [record(&event.encode_to_vec()), record(&data)].concat();
            let i = flip.index(chain.len());
            chain[i] ^= 0x40;
            let mut batch = Batch::default();
            read_records(&chain, &mut 1000, &mut Counters::default(), |body| {
                read_event(body, "", &mut Counters::default(), &mut batch);
                true
            });
            prop_assert!(batch.readings.iter().all(|r| r.value.is_finite()));
        }
    }
}
