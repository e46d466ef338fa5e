//! The table of a job's rhythm: how often, and at which of the program's events, each of its places began work.
//!
//! **Problem.** A job that prints nothing shows its steps only from inside: every step of an optimizer opens the same
//! parallel regions and launches the same kernels. The library must note that at the cost of a few nanoseconds.
//!
//! **How.** A third file of 4,096 bytes lies beside the page and the report. It contains numbers of 32 bits in lines of
//! 64 bytes, which are the lines of a processor's cache. The first line has the name and the version of the format.
//! Each other line belongs to one *place* and has a count and the last [`STAMPS`] stamps. To note an event is to add
//! one to a count and to write one stamp.
//!
//! **Terms.** An *event* is the start of a parallel region or the launch of work on a GPU. A *place* is what begins it:
//! a call in the program, a kernel or a graph. Several places share a line if there are more of them than lines. A
//! *stamp* is the number of an event, counted over all places of one program.
//!
//! **Properties.** The job's owner can write to the file: every content is decoded, or refused
//! (`tables_of_other_formats_are_refused`). Counts and stamps wrap.

use crate::{PAGE_BYTES, bytes_of_format};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The path of the table is that of the page with this suffix.
pub const RHYTHM_SUFFIX: &str = ".rhythm";

/// The length of the table in numbers of 32 bits.
pub const RHYTHM_NUMBERS: usize = PAGE_BYTES / 4;

/// How many places the table has.
pub const PLACES: usize = RHYTHM_NUMBERS / LINE - 1;

/// How many stamps are kept of each place.
pub const STAMPS: usize = LINE - 1;

/// Numbers of one line.
const LINE: usize = 16;

const VERSION: u32 = 1;
const MAGIC: u64 = u64::from_le_bytes(*b"GAINRTHM");

/// The number of bytes that name the format.
const NAME_BYTES: usize = 16;

/// What is known of one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Place {
    /// How often it began work.
    pub count: u32,
    stamps: [u32; STAMPS],
}

impl Place {
    /// The last stamps, the oldest first.
    pub fn stamps(&self) -> Vec<u32> {
        let kept = (self.count as usize).min(STAMPS);
        let oldest = if kept < STAMPS { 0 } else { self.count as usize % STAMPS };
        self.stamps.iter().cycle().skip(oldest).take(kept).copied().collect()
    }

    /// Notes an event at this place, as [`note`] does in a mapped table.
    pub fn note(&mut self, event: u32) {
        self.stamps[self.count as usize % STAMPS] = event;
        self.count = self.count.wrapping_add(1);
    }
}

/// The bytes of a table that contains nothing yet.
pub fn empty_rhythm() -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    bytes[..NAME_BYTES].copy_from_slice(&bytes_of_format(MAGIC, VERSION));
    bytes
}

/// Whether a mapped file is a table that the library may write to.
pub fn is_rhythm(table: &[AtomicU32]) -> bool {
    let name = bytes_of_format(MAGIC, VERSION);
    let is_same = |(number, bytes): (&AtomicU32, &[u8; 4])| number.load(Relaxed).to_ne_bytes() == *bytes;
    table.len() >= RHYTHM_NUMBERS && table.iter().zip(name.as_chunks::<4>().0).all(is_same)
}

/// Notes an event of the place with this signature. Called before every parallel region and every launch: no lock, no
/// system call.
pub fn note(table: &[AtomicU32], signature: u64, event: u32) {
    let start = (place_of(signature) + 1) * LINE;
    let line = table.get(start..start + LINE).and_then(<[AtomicU32]>::split_first);
    let Some((count, stamps)) = line else { return };
    let earlier = count.fetch_add(1, Relaxed);
    if let Some(stamp) = stamps.get(earlier as usize % STAMPS) {
        stamp.store(event, Relaxed);
    }
}

/// The number of the place with this signature, below [`PLACES`].
fn place_of(signature: u64) -> usize {
    // Addresses have few random bits, and the lowest ones are often zero.
    let mixed = signature.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    ((mixed * PLACES as u64) >> 32) as usize
}

/// Decodes a table; `None` if the bytes are not a table.
pub fn decode_rhythm(bytes: &[u8]) -> Option<Vec<Place>> {
    if bytes.len() < PAGE_BYTES || bytes.get(..NAME_BYTES)? != bytes_of_format(MAGIC, VERSION) {
        return None;
    }
    let numbers: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|number| u32::from_ne_bytes(*number)).collect();
    let place = |line: &[u32; LINE]| {
        let [count, stamps @ ..] = *line;
        Place { count, stamps }
    };
    Some(numbers.as_chunks::<LINE>().0.iter().skip(1).take(PLACES).map(place).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(bytes: &[u8]) -> Vec<AtomicU32> {
        bytes.as_chunks::<4>().0.iter().map(|number| AtomicU32::new(u32::from_ne_bytes(*number))).collect()
    }

    fn bytes(table: &[AtomicU32]) -> Vec<u8> {
        table.iter().flat_map(|number| number.load(Relaxed).to_ne_bytes()).collect()
    }

    #[test]
    fn events_are_read_back_in_their_order() {
        let table = mapped(&empty_rhythm());
        assert!(is_rhythm(&table));
        let signatures = [0x7f00_1234_5670, 0x7f00_1234_5690];
        assert_ne!(place_of(signatures[0]), place_of(signatures[1]));
        let mut expected = Place::default();
        for event in 0..40 {
            note(&table, signatures[event as usize % 2], event);
            if event % 2 == 0 {
                expected.note(event);
            }
        }
        let places = decode_rhythm(&bytes(&table)).unwrap();
        assert_eq!(places.len(), PLACES);
        assert_eq!(places[place_of(signatures[0])], expected);
        assert_eq!(expected.count, 20);
        assert_eq!(expected.stamps(), (5..20).map(|i| 2 * i).collect::<Vec<u32>>());
        assert_eq!(places.iter().map(|place| place.count).sum::<u32>(), 40);
        let mut young = Place::default();
        young.note(7);
        young.note(9);
        assert_eq!(young.stamps(), [7, 9]);
    }

    #[test]
    fn signatures_spread_over_all_places() {
        let mut used = [false; PLACES];
        (0..2000_u64).for_each(|i| used[place_of(0x7f12_3400_0000 + 48 * i)] = true);
        assert!(used.iter().all(|used| *used));
        for signature in [0, 1, u64::MAX] {
            assert!(place_of(signature) < PLACES);
        }
    }

    #[test]
    fn tables_of_other_formats_are_refused() {
        for filler in [0, 1, 0x47, 0xff] {
            assert_eq!(decode_rhythm(&[filler; PAGE_BYTES]), None, "{filler}");
            assert!(!is_rhythm(&mapped(&[filler; PAGE_BYTES])), "{filler}");
        }
        for byte in [0, 8, 12] {
            let mut other = empty_rhythm();
            other[byte] += 1;
            assert_eq!(decode_rhythm(&other), None, "byte {byte}");
            assert!(!is_rhythm(&mapped(&other)), "byte {byte}");
        }
        for length in [0, 8, NAME_BYTES, PAGE_BYTES - 4] {
            assert_eq!(decode_rhythm(&empty_rhythm()[..length]), None, "{length} bytes");
            assert!(!is_rhythm(&mapped(&empty_rhythm()[..length])), "{length} bytes");
            note(&mapped(&empty_rhythm()[..length]), 1, 1);
        }
        for other in [crate::empty_report(), crate::encode(&crate::Orders::default(), 1)] {
            assert_eq!(decode_rhythm(&other), None);
        }
    }

    #[test]
    fn any_content_behind_the_name_is_decoded() {
        let mut garbage = empty_rhythm();
        garbage[NAME_BYTES..].fill(0xff);
        let places = decode_rhythm(&garbage).unwrap();
        assert!(places.iter().all(|place| place.count == u32::MAX && place.stamps() == [u32::MAX; STAMPS]));
        let table = mapped(&garbage);
        note(&table, 5, 5);
        assert_eq!(decode_rhythm(&bytes(&table)).unwrap()[place_of(5)].count, 0, "counts wrap");
    }
}
