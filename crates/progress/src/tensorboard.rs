//! TensorBoard's event files.
//!
//! **Format.** A file is a chain of records: length (8 bytes, little-endian), its masked CRC-32C (4), the data, its masked CRC-32C (4). The data is
//! a protocol buffer; of its messages only the fields that carry scalars are declared here. PyTorch writes a scalar as `simple_value`, Keras
//! and TensorFlow 2 as a tensor of one element.
//!
//! **Damage.** A record that is cut off at the end of the file is still being written: wait. Data with a wrong checksum is skipped, a length with a
//! wrong one makes us look for the next place where a length is right. Records larger than [`MAX_RECORD`] (images, graphs) are stepped
//! over unread. All but the first is counted.
//!
//! **Names.** Keras writes training and validation into two folders under the same tags; where a folder's name says which, it is put in
//! front: `validation/epoch_loss`.

use super::beneath::Root;
use super::number::{Number, vet};
use super::tail::{Change, FileTail, Position};
use super::{Batch, Counters, MAX_NAME, Reading};
use prost::Message;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest record that is decoded. A scalar has some 60 bytes; this leaves room for events of hundreds of them.
pub(super) const MAX_RECORD: u64 = 128 << 10;

/// A length beyond this is damage, even if its checksum is right.
const MAX_LENGTH: u64 = 4 << 30;

/// Event files of one job that are followed; a job writes two or three, a sweep in one process some more.
const MAX_FILES: usize = 64;

/// Calls without news after which a file is only looked at every [`IDLE_EVERY`] calls.
const IDLE_AFTER: u32 = 30;
const IDLE_EVERY: u32 = 10;

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
        // Element types by their number in TensorFlow: 1 float, 2 double, 3 int32, 9 int64, 14 bfloat16, 19 half.
        match (self.dtype, self.content.as_slice()) {
            (1, c) if c.len() == 4 => return Some(f32::from_le_bytes(c.try_into().ok()?).into()),
            (2, c) if c.len() == 8 => return Some(f64::from_le_bytes(c.try_into().ok()?)),
            (3, c) if c.len() == 4 => return Some(i32::from_le_bytes(c.try_into().ok()?).into()),
            (9, c) if c.len() == 8 => return Some(i64::from_le_bytes(c.try_into().ok()?) as f64),
            (14, c) if c.len() == 2 => return Some(bfloat16(u16::from_le_bytes(c.try_into().ok()?))),
            (19, c) if c.len() == 2 => return Some(half(u16::from_le_bytes(c.try_into().ok()?))),
            (_, []) => {}
            _ => return None,
        }
        match (&self.floats[..], &self.doubles[..], &self.ints[..], &self.longs[..], &self.halves[..]) {
            ([x], [], [], [], []) => Some((*x).into()),
            ([], [x], [], [], []) => Some(*x),
            ([], [], [x], [], []) => Some((*x).into()),
            ([], [], [], [x], []) => Some(*x as f64),
            ([], [], [], [], [x]) if self.dtype == 14 => Some(bfloat16(*x as u16)),
            ([], [], [], [], [x]) => Some(half(*x as u16)),
            _ => None,
        }
    }
}

fn bfloat16(bits: u16) -> f64 {
    f32::from_bits(u32::from(bits) << 16).into()
}

fn half(bits: u16) -> f64 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023) / 1024.0);
    sign * match exponent {
        0 => fraction * 2f64.powi(-14),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        e => (1.0 + fraction) * 2f64.powi(e - 15),
    }
}

/// TensorFlow stores checksums rotated and shifted, since a checksum of data that holds checksums is weak.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The length in a record's head, if its checksum is right.
fn head(bytes: &[u8]) -> Option<u64> {
    let length = bytes.first_chunk::<8>()?;
    let crc = u32::from_le_bytes(*bytes.get(8..12)?.first_chunk()?);
    let value = u64::from_le_bytes(*length);
    (masked_crc(length) == crc && value <= MAX_LENGTH).then_some(value)
}

/// What [`read_records`] did with its input.
#[derive(Debug, Default, PartialEq)]
struct Done {
    consumed: usize,
    /// Length of a large record that begins there and is to be stepped over.
    step_over: u64,
}

/// Hands every whole record to `take`, until it says stop.
fn read_records(data: &[u8], counters: &mut Counters, mut take: impl FnMut(&[u8]) -> bool) -> Done {
    let mut at = 0;
    while data.len() - at >= 12 {
        let rest = &data[at..];
        let Some(length) = head(rest) else {
            // Some file systems show zeros before the bytes arrive.
            if rest.iter().all(|&b| b == 0) {
                break;
            }
            counters.bad_records += 1;
            let next = (1..=rest.len() - 12).find(|&i| head(&rest[i..]).is_some());
            // The last bytes may be the beginning of a head.
            at += next.unwrap_or(rest.len() - 11);
            continue;
        };
        if length > MAX_RECORD {
            return Done { consumed: at, step_over: length + 16 };
        }
        let end = 12 + length as usize;
        let Some(crc) = rest.get(end..end + 4) else { break };
        let (body, crc) = (&rest[12..end], u32::from_le_bytes(*crc.first_chunk().unwrap_or(&[0; 4])));
        at += end + 4;
        if masked_crc(body) != crc {
            counters.bad_records += 1;
        } else if !take(body) {
            break;
        }
    }
    Done { consumed: at, step_over: 0 }
}

/// Follows one event file.
#[derive(Debug)]
struct EventFile {
    tail: FileTail,
    /// What stands in front of the tags.
    prefix: String,
    idle: u32,
}

impl EventFile {
    fn poll(&mut self, most: usize, counters: &mut Counters, batch: &mut Batch) -> io::Result<()> {
        for _ in 0..4 {
            match self.tail.fill()? {
                Change::Same => return Ok(()),
                Change::More => {}
                Change::Rotated | Change::Rewritten => counters.restarts += 1,
            }
            self.idle = 0;
            let mut found = Counters::default();
            let done = read_records(self.tail.data(), &mut found, |body| {
                read_event(body, &self.prefix, counters, batch);
                batch.readings.len() < most
            });
            *counters += found;
            self.tail.consume(done.consumed);
            if done.step_over > 0 && self.tail.skip(done.step_over) {
                counters.bad_records += 1;
            }
            if batch.readings.len() >= most {
                return Ok(());
            }
        }
        Ok(())
    }
}

fn read_event(body: &[u8], prefix: &str, counters: &mut Counters, batch: &mut Batch) {
    let Ok(event) = Event::decode(body) else {
        counters.bad_records += 1;
        return;
    };
    for value in event.summary.into_iter().flat_map(|s| s.value) {
        let Some(x) = value.simple_value.map(f64::from).or_else(|| value.tensor.as_ref()?.scalar()) else { continue };
        if value.tag.is_empty() || value.tag.len() + prefix.len() > MAX_NAME {
            counters.dropped_readings += 1;
            continue;
        }
        match vet(x) {
            Number::Good(x) => batch.readings.push(Reading {
                metric: format!("{prefix}{}", value.tag),
                value: x,
                step: u64::try_from(event.step).ok(),
                total: None,
            }),
            Number::Bad => counters.bad_values += 1,
        }
    }
}

/// Follows the event files of one job.
#[derive(Debug)]
pub struct EventFiles {
    root: Arc<Root>,
    files: BTreeMap<PathBuf, EventFile>,
    counters: Counters,
    calls: u32,
}

impl EventFiles {
    /// `positions` is what an earlier one left.
    pub fn new(root: Arc<Root>, positions: BTreeMap<PathBuf, Position>) -> EventFiles {
        let mut files = EventFiles { root, files: BTreeMap::new(), counters: Counters::default(), calls: 0 };
        for (path, position) in positions {
            files.add(&path, position);
        }
        files
    }

    /// Follows the file at `path`, relative to the root, from now on.
    pub fn found(&mut self, path: &Path) {
        if !self.files.contains_key(path) {
            self.add(path, Position::default());
        }
    }

    fn add(&mut self, path: &Path, position: Position) {
        if self.files.len() >= MAX_FILES {
            self.counters.failures += 1;
            return;
        }
        let tail = FileTail::new(self.root.clone(), path, position, false);
        self.files.insert(path.to_path_buf(), EventFile { tail, prefix: prefix(path), idle: 0 });
    }

    pub fn positions(&self) -> BTreeMap<PathBuf, Position> {
        self.files.iter().map(|(path, file)| (path.clone(), file.tail.position())).collect()
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Reads what is new in any file, until `batch` holds `most` readings; the rest comes with the next call.
    pub fn poll(&mut self, most: usize, batch: &mut Batch) {
        self.calls = self.calls.wrapping_add(1);
        for file in self.files.values_mut() {
            file.idle = file.idle.saturating_add(1);
            if file.idle > IDLE_AFTER && !self.calls.is_multiple_of(IDLE_EVERY) {
                continue;
            }
            if file.poll(most, &mut self.counters, batch).is_err() {
                self.counters.failures += 1;
            }
            if batch.readings.len() >= most {
                return;
            }
        }
    }
}

/// The name of the file's folder, if it tells training from validation.
fn prefix(path: &Path) -> String {
    let folder = path.parent().and_then(Path::file_name).and_then(|n| n.to_str()).unwrap_or("");
    let lower = folder.to_ascii_lowercase();
    let tells = ["train", "val", "eval", "test", "dev"]
        .iter()
        .any(|w| lower.split(['_', '-', '.', ' ']).any(|part| part.starts_with(w)));
    if tells && folder.len() <= 32 { format!("{folder}/") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(body: &[u8]) -> Vec<u8> {
        let length = (body.len() as u64).to_le_bytes();
        [&length[..], &masked_crc(&length).to_le_bytes(), body, &masked_crc(body).to_le_bytes()].concat()
    }

    fn bodies(data: &[u8]) -> (Vec<Vec<u8>>, Done, Counters) {
        let (mut out, mut counters) = (Vec::new(), Counters::default());
        let done = read_records(data, &mut counters, |body| {
            out.push(body.to_vec());
            true
        });
        (out, done, counters)
    }

    #[test]
    fn half_precision() {
        for (bits, value) in
            [(0x3c00, 1.0), (0xc000, -2.0), (0x3555, 0.333251953125), (0x0001, 5.960464477539063e-8), (0, 0.0)]
        {
            assert_eq!(half(bits), value);
        }
        assert!(half(0x7c00).is_infinite() && half(0x7e00).is_nan());
        assert_eq!(bfloat16(0x3fc0), 1.5);
    }

    #[test]
    fn damage_is_skipped_and_counted() {
        let (a, b, c) = (record(b"first"), record(b"second"), record(b"third"));
        let mut data = [a.clone(), b.clone(), c.clone()].concat();
        data[a.len() + 13] ^= 1;
        let (out, done, counters) = bodies(&data);
        assert_eq!(
            (out, done.consumed, counters.bad_records),
            (vec![b"first".to_vec(), b"third".to_vec()], data.len(), 1)
        );

        let mut data = [a.clone(), b, c].concat();
        data[a.len() + 2] ^= 1;
        let (out, done, counters) = bodies(&data);
        assert_eq!(
            (out, done.consumed, counters.bad_records),
            (vec![b"first".to_vec(), b"third".to_vec()], data.len(), 1)
        );

        let zeros = [a.clone(), vec![0; 100]].concat();
        assert_eq!(bodies(&zeros).1.consumed, a.len(), "zeros may still become a record");
    }

    #[test]
    fn record_bombs_cost_nothing() {
        let length = (MAX_RECORD + 1).to_le_bytes();
        let large = [&length[..], &masked_crc(&length).to_le_bytes(), b"xxxxxxxx"].concat();
        assert_eq!(bodies(&large).1, Done { consumed: 0, step_over: MAX_RECORD + 17 });
        let length = (1u64 << 60).to_le_bytes();
        let bomb = [&length[..], &masked_crc(&length).to_le_bytes(), &record(b"after")[..]].concat();
        assert_eq!(bodies(&bomb).0, [b"after".to_vec()]);
    }

    #[test]
    fn folders_that_tell_training_from_validation() {
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
            let (rest, second, _) = bodies(&data[first.consumed..]);
            out.extend(rest);
            prop_assert_eq!(out.len(), sizes.len());
            prop_assert_eq!(first.consumed + second.consumed, data.len());
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
            read_records(&chain, &mut Counters::default(), |body| {
                read_event(body, "", &mut Counters::default(), &mut batch);
                true
            });
            prop_assert!(batch.readings.iter().all(|r| r.value.is_finite()));
        }
    }
}
