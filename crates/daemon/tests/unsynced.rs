//! A power cut: writes that were not synced are lost, kept or torn, in any combination.
//!
//! A recording file system between SQLite and the disk keeps every write, truncation, deletion and sync of
//! the journal. A power cut is simulated after each of them: what was synced is there; of what was not, each
//! write is kept, dropped or cut at a sector, by a seeded choice for each. The journal is opened from the
//! result. Every batch that was acknowledged before the cut must be there (I3), batches are whole, and
//! replaying the journal gives the state (I5).

#[path = "common/batches.rs"]
mod batches;
mod common;

use batches::batch;
use common::state_and_replay;
use gainshare_core::invariants::Invariants;
use gainshare_core::model::{JobId, Time};
use gainshare_daemon::journal::Journal;
use gainshare_daemon::record::JobRecord;
use rusqlite::ffi;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

const SECTOR_BYTES: usize = 512;
const BATCHES: u64 = 10;
/// Choices of lost writes for each power cut.
const CHOICES: u64 = 4;

/// One operation on a file, by its name.
#[derive(Debug, Clone)]
enum Operation {
    Write {
        file: String,
        offset: usize,
        bytes: Vec<u8>,
    },
    Truncate {
        file: String,
        length: usize,
    },
    Delete {
        file: String,
    },
    Sync {
        file: String,
    },
    /// The batch with this number was acknowledged.
    Acknowledged(u64),
}

#[derive(Default)]
struct Recorder {
    is_on: bool,
    operations: Vec<Operation>,
    /// Names of open files, by the address that SQLite gave them.
    names: BTreeMap<usize, String>,
}

static RECORDER: Mutex<Recorder> =
    Mutex::new(Recorder { is_on: false, operations: Vec::new(), names: BTreeMap::new() });
static REAL: OnceLock<RealFunctions> = OnceLock::new();

/// The functions of the file system that is recorded.
struct RealFunctions {
    vfs: ffi::sqlite3_vfs,
    /// The first table of functions of an open file. Files with and without locks have different tables with
    /// the same functions to write, truncate and sync.
    methods: OnceLock<ffi::sqlite3_io_methods>,
    /// Our table in place of each original one, by the address of the original.
    replaced: Mutex<BTreeMap<usize, &'static ffi::sqlite3_io_methods>>,
}

// SAFETY: the tables of functions are never changed after they were made; their pointers lead to static data
// of SQLite.
unsafe impl Send for RealFunctions {}
// SAFETY: as above.
unsafe impl Sync for RealFunctions {}

fn record(file: *mut ffi::sqlite3_file, operation: impl FnOnce(String) -> Operation) {
    let mut recorder = RECORDER.lock().unwrap();
    if recorder.is_on
        && let Some(name) = recorder.names.get(&(file as usize)).cloned()
    {
        recorder.operations.push(operation(name));
    }
}

fn base_name(path: *const c_char) -> String {
    // SAFETY: SQLite passes a path that ends with a zero.
    let path = unsafe { CStr::from_ptr(path) }.to_str().unwrap();
    path.rsplit('/').next().unwrap().to_owned()
}

fn real() -> &'static RealFunctions {
    REAL.get().unwrap()
}

fn real_methods() -> &'static ffi::sqlite3_io_methods {
    real().methods.get().unwrap()
}

unsafe extern "C" fn open(
    vfs: *mut ffi::sqlite3_vfs,
    path: *const c_char,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out: *mut c_int,
) -> c_int {
    // SAFETY: the arguments are passed on as they came.
    let code = unsafe { real().vfs.xOpen.unwrap()(vfs, path, file, flags, out) };
    if code == ffi::SQLITE_OK && !path.is_null() {
        // SAFETY: a file that was opened has a table of functions.
        let (address, found) = unsafe { ((*file).pMethods as usize, *(*file).pMethods) };
        let first = real().methods.get_or_init(|| found);
        let addresses = |m: &ffi::sqlite3_io_methods| {
            (m.xWrite.map(|f| f as usize), m.xSync.map(|f| f as usize), m.xTruncate.map(|f| f as usize))
        };
        assert_eq!(addresses(first), addresses(&found), "all files have the same functions");
        let mut replaced = real().replaced.lock().unwrap();
        let ours = *replaced.entry(address).or_insert_with(|| {
            let mut ours = found;
            ours.xWrite = Some(write);
            ours.xTruncate = Some(truncate);
            ours.xSync = Some(sync);
            Box::leak(Box::new(ours))
        });
        // SAFETY: our table lives as long as the process.
        unsafe { (*file).pMethods = ours };
        RECORDER.lock().unwrap().names.insert(file as usize, base_name(path));
    }
    code
}

unsafe extern "C" fn delete(vfs: *mut ffi::sqlite3_vfs, path: *const c_char, sync_dir: c_int) -> c_int {
    let mut recorder = RECORDER.lock().unwrap();
    if recorder.is_on {
        recorder.operations.push(Operation::Delete { file: base_name(path) });
    }
    drop(recorder);
    // SAFETY: the arguments are passed on as they came.
    unsafe { real().vfs.xDelete.unwrap()(vfs, path, sync_dir) }
}

unsafe extern "C" fn write(file: *mut ffi::sqlite3_file, data: *const c_void, length: c_int, offset: i64) -> c_int {
    // SAFETY: SQLite passes `length` readable bytes.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length as usize) }.to_vec();
    record(file, |name| Operation::Write { file: name, offset: offset as usize, bytes });
    // SAFETY: the arguments are passed on as they came.
    unsafe { real_methods().xWrite.unwrap()(file, data, length, offset) }
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, length: i64) -> c_int {
    record(file, |name| Operation::Truncate { file: name, length: length as usize });
    // SAFETY: the arguments are passed on as they came.
    unsafe { real_methods().xTruncate.unwrap()(file, length) }
}

unsafe extern "C" fn sync(file: *mut ffi::sqlite3_file, flags: c_int) -> c_int {
    // SAFETY: the arguments are passed on as they came.
    let code = unsafe { real_methods().xSync.unwrap()(file, flags) };
    record(file, |name| Operation::Sync { file: name });
    code
}

/// Puts the recorder between SQLite and its usual file system, for the whole process.
fn install() {
    // SAFETY: the default file system lives as long as the process; the copy has the same functions but two.
    unsafe {
        assert_eq!(ffi::sqlite3_initialize(), ffi::SQLITE_OK);
        let found = *ffi::sqlite3_vfs_find(std::ptr::null());
        assert!(REAL.set(RealFunctions { vfs: found, methods: OnceLock::new(), replaced: Mutex::default() }).is_ok());
        let mut ours = found;
        ours.xOpen = Some(open);
        ours.xDelete = Some(delete);
        ours.zName = c"recorder".as_ptr();
        assert_eq!(ffi::sqlite3_vfs_register(Box::leak(Box::new(ours)), 1), ffi::SQLITE_OK);
    }
}

/// A small generator, so that a seed gives the same choices everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn apply(content: &mut Option<Vec<u8>>, operation: &Operation) {
    match operation {
        Operation::Write { offset, bytes, .. } => {
            let content = content.get_or_insert_default();
            content.resize(content.len().max(offset + bytes.len()), 0);
            content[*offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        Operation::Truncate { length, .. } => {
            let content = content.get_or_insert_default();
            content.resize(*length, 0);
        }
        Operation::Delete { .. } => *content = None,
        Operation::Sync { .. } | Operation::Acknowledged(_) => {}
    }
}

fn file_of(operation: &Operation) -> Option<&str> {
    match operation {
        Operation::Write { file, .. }
        | Operation::Truncate { file, .. }
        | Operation::Delete { file }
        | Operation::Sync { file } => Some(file),
        Operation::Acknowledged(_) => None,
    }
}

/// The files after a power cut: all that was synced, and of the rest what the dice leave.
fn after_power_cut(operations: &[Operation], dice: &mut Dice) -> BTreeMap<String, Vec<u8>> {
    let mut files: BTreeMap<&str, Option<Vec<u8>>> = BTreeMap::new();
    let mut unsynced: BTreeMap<&str, Vec<&Operation>> = BTreeMap::new();
    for operation in operations {
        let Some(file) = file_of(operation) else { continue };
        let (content, waiting) = (files.entry(file).or_default(), unsynced.entry(file).or_default());
        match operation {
            // A deleted file has no content that could come back into a new file of the same name.
            Operation::Sync { .. } | Operation::Delete { .. } => {
                waiting.drain(..).for_each(|operation| apply(content, operation));
                apply(content, operation);
            }
            _ => waiting.push(operation),
        }
    }
    for (file, waiting) in unsynced {
        let content = files.entry(file).or_default();
        for operation in waiting {
            match (dice.roll(3), operation) {
                (0, _) => {}
                (1, Operation::Write { file, offset, bytes }) => {
                    let sectors = bytes.len().div_ceil(SECTOR_BYTES) as u64;
                    let length = (dice.roll(sectors + 1) as usize * SECTOR_BYTES).min(bytes.len());
                    let torn =
                        Operation::Write { file: file.clone(), offset: *offset, bytes: bytes[..length].to_vec() };
                    apply(content, &torn);
                }
                _ => apply(content, operation),
            }
        }
    }
    files.into_iter().filter_map(|(name, content)| Some((name.to_owned(), content?))).collect()
}

/// What does not hold after a power cut, if anything.
fn violation(dir: &Path, acknowledged: u64) -> Option<String> {
    let journal = match Journal::open(&dir.join("journal.db")) {
        Ok(journal) => journal,
        Err(e) => return Some(e.to_string()),
    };
    let jobs: Vec<JobRecord> = journal.load().unwrap().jobs.into_iter().map(|(record, _)| record).collect();
    let mut invariants = Invariants::default();
    (1..=acknowledged).for_each(|id| invariants.acknowledge(&JobId(id).to_string()));
    if let Err(broken) = invariants.check_first(&state_and_replay(&jobs, &journal.entries().unwrap())) {
        return Some(broken.to_string());
    }
    if (jobs.len() as u64) > BATCHES {
        return Some(format!("{} jobs", jobs.len()));
    }
    let is_whole = |(job, id): (&JobRecord, u64)| {
        job.id == JobId(id) && journal.samples(job.id, Time::ZERO).unwrap().len() == batches::SAMPLES
    };
    (!jobs.iter().zip(1..).all(is_whole)).then(|| "a batch is not whole".to_owned())
}

#[test]
fn a_power_cut_at_any_write_loses_nothing_that_was_acknowledged() {
    install();
    let live = tempfile::tempdir().unwrap();
    let path = live.path().join("journal.db");
    RECORDER.lock().unwrap().is_on = true;
    for half in [1..=BATCHES / 2, BATCHES / 2 + 1..=BATCHES] {
        // The end of the first half also moves the log into the main file and deletes the log.
        let mut journal = Journal::open(&path).unwrap();
        for id in half {
            journal.commit(&batch(id)).unwrap();
            RECORDER.lock().unwrap().operations.push(Operation::Acknowledged(id));
        }
    }
    let operations = {
        let mut recorder = RECORDER.lock().unwrap();
        recorder.is_on = false;
        std::mem::take(&mut recorder.operations)
    };
    let syncs = operations.iter().filter(|o| matches!(o, Operation::Sync { .. })).count();
    assert!(operations.len() > 40 && syncs as u64 >= BATCHES, "{} operations, {syncs} syncs", operations.len());

    let (mut cuts, mut lost, mut longest_s) = (0, Vec::new(), 0.0_f64);
    for end in 0..=operations.len() {
        let before = &operations[..end];
        let acknowledged =
            before.iter().rev().find_map(|o| if let Operation::Acknowledged(n) = o { Some(*n) } else { None });
        for seed in 0..CHOICES {
            let mut dice = Dice(seed + 1000 * end as u64);
            let dir = tempfile::tempdir().unwrap();
            for (name, content) in after_power_cut(before, &mut dice) {
                std::fs::write(dir.path().join(name), content).unwrap();
            }
            let began = Instant::now();
            cuts += 1;
            if let Some(what) = violation(dir.path(), acknowledged.unwrap_or(0)) {
                lost.push(format!("cut {end} seed {seed}, {acknowledged:?} acknowledged: {what}"));
            }
            longest_s = longest_s.max(began.elapsed().as_secs_f64());
        }
    }
    println!("fault: injected={cuts} violations={} recovery_s={longest_s:.3}", lost.len());
    assert!(lost.is_empty(), "{}", lost.join("\n"));
}
