//! A modelled disk under the real SQLite: it loses power, tears writes, fills up, and dies at any operation.
//!
//! **How.** The disk is a virtual file system of SQLite ([`VFS_NAME`]). Each thread has a disk of its own. A file
//! has bytes that survive a power loss (`durable`) and writes that were not synced yet (`pending`). A power
//! loss keeps an arbitrary part of the pending writes, in whole sectors and in any order, as real disks do.
//! The death of the process alone keeps all of them, because the kernel still writes them.
//!
//! **Limits of the model.** Locks between connections of one thread are kept on the main file only. The index of
//! the write-ahead log is memory, and is lost with the last connection.

use gainshare_core::seeds::Dice;
use rusqlite::ffi::{self, sqlite3_file, sqlite3_int64, sqlite3_io_methods, sqlite3_vfs};
use std::cell::{RefCell, UnsafeCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Once;

pub(super) const VFS_NAME: &CStr = c"gainshare-faults";

/// A disk writes whole sectors or nothing of them.
const SECTOR: usize = 512;

thread_local! {
    static DISK: RefCell<Disk> = RefCell::new(Disk::new(0));
}

/// The disk of this thread.
pub(super) fn with_disk<T>(run: impl FnOnce(&mut Disk) -> T) -> T {
    DISK.with_borrow_mut(run)
}

enum Pending {
    Write { at: usize, bytes: Vec<u8> },
    Truncate(usize),
}

#[derive(Default)]
struct SimFile {
    /// The file was synced once, so its name survives a power loss.
    is_named: bool,
    durable: Vec<u8>,
    pending: Vec<Pending>,
    /// `durable` after all pending writes: what a reader gets.
    current: Vec<u8>,
    /// The level of lock that each handle holds.
    locks: BTreeMap<u64, c_int>,
    /// The index of the write-ahead log.
    shared: Vec<Box<[UnsafeCell<u64>]>>,
}

pub(super) struct Disk {
    files: BTreeMap<String, SimFile>,
    dice: Dice,
    handles: u64,
    /// The process dies at the operation that makes this 0.
    operations_left: Option<u32>,
    is_dead: bool,
    pub(super) is_full: bool,
    /// Turns off the promise of `fsync`: for the test that this is noticed.
    pub(super) ignores_sync: bool,
}

fn put(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if file.len() < at + bytes.len() {
        file.resize(at + bytes.len(), 0);
    }
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

impl Disk {
    pub(super) fn new(seed: u64) -> Disk {
        Disk {
            files: BTreeMap::new(),
            dice: Dice::new(seed, "disk"),
            handles: 0,
            operations_left: None,
            is_dead: false,
            is_full: false,
            ignores_sync: false,
        }
    }

    /// The process dies in the middle of the `count`th write or sync from now.
    pub(super) fn die_after(&mut self, count: u32) {
        self.operations_left = Some(count);
    }

    pub(super) fn is_dead(&self) -> bool {
        self.is_dead
    }

    /// The process is dead from now on: closing its files changes nothing.
    pub(super) fn kill(&mut self) {
        self.is_dead = true;
    }

    /// What the next process finds. All connections must be closed.
    pub(super) fn restart(&mut self, loses_power: bool) {
        (self.is_dead, self.is_full, self.operations_left) = (false, false, None);
        let dice = &mut self.dice;
        self.files.retain(|_, file| {
            file.locks.clear();
            file.shared.clear();
            if !loses_power {
                return true;
            }
            for pending in file.pending.drain(..) {
                match pending {
                    Pending::Truncate(size) if dice.percent(50) => file.durable.resize(size, 0),
                    Pending::Truncate(_) => {}
                    Pending::Write { at, bytes } => lose_sectors(dice, &mut file.durable, at, &bytes),
                }
            }
            file.current.clone_from(&file.durable);
            file.is_named || dice.percent(50)
        });
    }

    /// Counts one operation. False: the process dies in it.
    fn survives(&mut self) -> bool {
        if let Some(left) = &mut self.operations_left {
            *left = left.saturating_sub(1);
            self.is_dead |= *left == 0;
        }
        !self.is_dead
    }

    fn sync(&mut self, name: &str) {
        let Some(file) = self.files.get_mut(name).filter(|_| !self.ignores_sync) else { return };
        file.pending.clear();
        file.durable.clone_from(&file.current);
        file.is_named = true;
    }
}

/// Writes some of the sectors: all, none, the first ones, or any of them.
fn lose_sectors(dice: &mut Dice, file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let how = dice.below(4);
    let sectors = bytes.len() / SECTOR + 2;
    let prefix = dice.below(sectors);
    let (mut from, mut index) = (0, 0);
    while from < bytes.len() {
        let until = (((at + from) / SECTOR + 1) * SECTOR - at).min(bytes.len());
        let is_kept = match how {
            0 => true,
            1 => false,
            2 => index < prefix,
            _ => dice.percent(50),
        };
        if is_kept {
            put(file, at + from, &bytes[from..until]);
        }
        (from, index) = (until, index + 1);
    }
}

/// What SQLite keeps for an open file.
#[repr(C)]
struct Handle {
    base: sqlite3_file,
    id: u64,
    name: *mut String,
}

/// Runs on the disk with the handle's number and file name.
///
/// # Safety
/// `file` was opened by [`open`] and not closed yet.
unsafe fn on<T>(file: *mut sqlite3_file, run: impl FnOnce(&mut Disk, u64, &str) -> T) -> T {
    // SAFETY: by the contract, `file` is a whole `Handle`, and its name lives until it is closed.
    let (id, name) = unsafe {
        let handle = file.cast::<Handle>();
        ((*handle).id, (*(*handle).name).as_str())
    };
    with_disk(|disk| run(disk, id, name))
}

/// # Safety
/// As SQLite calls it: `name` is null or a C string, `file` has room for a [`Handle`].
unsafe extern "C" fn open(
    _: *mut sqlite3_vfs,
    name: *const c_char,
    file: *mut sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    // SAFETY: SQLite passes null for a temporary file, or a C string.
    let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
    let opened = with_disk(|disk| {
        disk.handles += 1;
        let name = name.unwrap_or_else(|| format!("temporary-{}", disk.handles));
        let is_there = disk.files.contains_key(&name);
        if disk.is_dead || (!is_there && flags & ffi::SQLITE_OPEN_CREATE == 0) {
            return None;
        }
        disk.files.entry(name.clone()).or_default();
        Some((disk.handles, name))
    });
    // SAFETY: SQLite passes a buffer of `szOsFile` bytes, which is the size of a `Handle`.
    unsafe {
        (*file).pMethods = std::ptr::null();
        let Some((id, name)) = opened else { return ffi::SQLITE_CANTOPEN };
        let handle =
            Handle { base: sqlite3_file { pMethods: &raw const METHODS }, id, name: Box::into_raw(Box::new(name)) };
        file.cast::<Handle>().write(handle);
        if !out_flags.is_null() {
            *out_flags = flags;
        }
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn close(file: *mut sqlite3_file) -> c_int {
    // SAFETY: SQLite closes a file that it has opened, once.
    unsafe {
        on(file, |disk, id, name| {
            if let Some(file) = disk.files.get_mut(name) {
                file.locks.remove(&id);
            }
        });
        drop(Box::from_raw((*file.cast::<Handle>()).name));
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn read(file: *mut sqlite3_file, to: *mut c_void, count: c_int, at: sqlite3_int64) -> c_int {
    // SAFETY: SQLite passes a buffer of `count` bytes.
    let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), count as usize) };
    // SAFETY: the file is open.
    unsafe {
        on(file, |disk, _, name| {
            let Some(file) = disk.files.get(name).filter(|_| !disk.is_dead) else { return ffi::SQLITE_IOERR_READ };
            let found = file.current.get(at as usize..).unwrap_or_default();
            let count = found.len().min(to.len());
            to[..count].copy_from_slice(&found[..count]);
            to[count..].fill(0);
            if count < to.len() { ffi::SQLITE_IOERR_SHORT_READ } else { ffi::SQLITE_OK }
        })
    }
}

unsafe extern "C" fn write(file: *mut sqlite3_file, from: *const c_void, count: c_int, at: sqlite3_int64) -> c_int {
    // SAFETY: SQLite passes a buffer of `count` bytes.
    let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), count as usize) };
    // SAFETY: the file is open.
    unsafe {
        on(file, |disk, _, name| {
            if disk.is_dead {
                return ffi::SQLITE_IOERR_WRITE;
            }
            let survives = disk.survives();
            let Some(file) = disk.files.get_mut(name) else { return ffi::SQLITE_IOERR_WRITE };
            let end = at as usize + bytes.len();
            if disk.is_full && end > file.current.len() {
                return ffi::SQLITE_FULL;
            }
            put(&mut file.current, at as usize, bytes);
            file.pending.push(Pending::Write { at: at as usize, bytes: bytes.to_vec() });
            if survives { ffi::SQLITE_OK } else { ffi::SQLITE_IOERR_WRITE }
        })
    }
}

unsafe extern "C" fn truncate(file: *mut sqlite3_file, size: sqlite3_int64) -> c_int {
    // SAFETY: the file is open.
    unsafe {
        on(file, |disk, _, name| {
            if disk.is_dead || !disk.survives() {
                return ffi::SQLITE_IOERR_TRUNCATE;
            }
            let Some(file) = disk.files.get_mut(name) else { return ffi::SQLITE_IOERR_TRUNCATE };
            file.current.resize(size as usize, 0);
            file.pending.push(Pending::Truncate(size as usize));
            ffi::SQLITE_OK
        })
    }
}

unsafe extern "C" fn sync(file: *mut sqlite3_file, _: c_int) -> c_int {
    // SAFETY: the file is open.
    unsafe {
        on(file, |disk, _, name| {
            if disk.is_dead || !disk.survives() {
                return ffi::SQLITE_IOERR_FSYNC;
            }
            disk.sync(name);
            ffi::SQLITE_OK
        })
    }
}

unsafe extern "C" fn size(file: *mut sqlite3_file, to: *mut sqlite3_int64) -> c_int {
    // SAFETY: the file is open, and `to` is SQLite's own variable.
    unsafe {
        *to = on(file, |disk, _, name| disk.files.get(name).map_or(0, |file| file.current.len())) as sqlite3_int64;
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn lock(file: *mut sqlite3_file, level: c_int) -> c_int {
    // SAFETY: the file is open.
    unsafe {
        on(file, |disk, id, name| {
            let Some(file) = disk.files.get_mut(name) else { return ffi::SQLITE_IOERR_LOCK };
            let others = file.locks.iter().filter(|(other, _)| **other != id).map(|(_, level)| *level).max();
            let most = if level == ffi::SQLITE_LOCK_EXCLUSIVE {
                ffi::SQLITE_LOCK_NONE
            } else if level == ffi::SQLITE_LOCK_SHARED {
                ffi::SQLITE_LOCK_RESERVED
            } else {
                ffi::SQLITE_LOCK_SHARED
            };
            if others.unwrap_or(ffi::SQLITE_LOCK_NONE) > most {
                return ffi::SQLITE_BUSY;
            }
            let held = file.locks.entry(id).or_insert(level);
            *held = level.max(*held);
            ffi::SQLITE_OK
        })
    }
}

unsafe extern "C" fn unlock(file: *mut sqlite3_file, level: c_int) -> c_int {
    // SAFETY: the file is open.
    unsafe {
        on(file, |disk, id, name| {
            if let Some(file) = disk.files.get_mut(name) {
                file.locks.insert(id, level);
            }
        });
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn check_reserved(file: *mut sqlite3_file, to: *mut c_int) -> c_int {
    // SAFETY: the file is open, and `to` is SQLite's own variable.
    unsafe {
        *to = on(file, |disk, _, name| {
            let reserved = |file: &SimFile| file.locks.values().any(|level| *level >= ffi::SQLITE_LOCK_RESERVED);
            c_int::from(disk.files.get(name).is_some_and(reserved))
        });
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn control(_: *mut sqlite3_file, _: c_int, _: *mut c_void) -> c_int {
    ffi::SQLITE_NOTFOUND
}

unsafe extern "C" fn sector_size(_: *mut sqlite3_file) -> c_int {
    SECTOR as c_int
}

unsafe extern "C" fn characteristics(_: *mut sqlite3_file) -> c_int {
    // As SQLite's own file system on Linux: a torn write damages no byte that it does not write.
    ffi::SQLITE_IOCAP_POWERSAFE_OVERWRITE
}

unsafe extern "C" fn shm_map(
    file: *mut sqlite3_file,
    region: c_int,
    bytes: c_int,
    extend: c_int,
    to: *mut *mut c_void,
) -> c_int {
    // SAFETY: the file is open, and `to` is SQLite's own variable. The region stays in place until the last
    // connection is closed, because a box does not move.
    unsafe {
        *to = on(file, |disk, _, name| {
            let Some(file) = disk.files.get_mut(name) else { return std::ptr::null_mut() };
            while file.shared.len() <= region as usize && extend != 0 {
                file.shared.push((0..bytes as usize / 8).map(|_| UnsafeCell::new(0)).collect());
            }
            file.shared.get(region as usize).map_or(std::ptr::null_mut(), |one| one[0].get().cast())
        });
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn shm_lock(_: *mut sqlite3_file, _: c_int, _: c_int, _: c_int) -> c_int {
    // The connections of one thread never run inside each other.
    ffi::SQLITE_OK
}

unsafe extern "C" fn shm_barrier(_: *mut sqlite3_file) {}

unsafe extern "C" fn shm_unmap(file: *mut sqlite3_file, delete: c_int) -> c_int {
    if delete != 0 {
        // SAFETY: the file is open, and SQLite uses the index no more.
        unsafe {
            on(file, |disk, _, name| {
                if let Some(file) = disk.files.get_mut(name) {
                    file.shared.clear();
                }
            });
        }
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn delete(_: *mut sqlite3_vfs, name: *const c_char, _: c_int) -> c_int {
    // SAFETY: SQLite passes a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    with_disk(|disk| {
        if disk.is_dead {
            return ffi::SQLITE_IOERR_DELETE;
        }
        disk.files.remove(&name);
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn access(_: *mut sqlite3_vfs, name: *const c_char, _: c_int, to: *mut c_int) -> c_int {
    // SAFETY: SQLite passes a C string and its own variable.
    unsafe {
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        *to = c_int::from(with_disk(|disk| disk.files.contains_key(&name)));
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn full_path(_: *mut sqlite3_vfs, name: *const c_char, room: c_int, to: *mut c_char) -> c_int {
    // SAFETY: SQLite passes a C string and a buffer of `room` bytes.
    unsafe {
        let bytes = CStr::from_ptr(name).to_bytes_with_nul();
        if bytes.len() > room as usize {
            return ffi::SQLITE_CANTOPEN;
        }
        std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len());
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn randomness(_: *mut sqlite3_vfs, count: c_int, to: *mut c_char) -> c_int {
    // SAFETY: SQLite passes a buffer of `count` bytes.
    let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), count as usize) };
    with_disk(|disk| to.iter_mut().for_each(|byte| *byte = disk.dice.number() as u8));
    count
}

unsafe extern "C" fn sleep(_: *mut sqlite3_vfs, us: c_int) -> c_int {
    us
}

unsafe extern "C" fn current_time(_: *mut sqlite3_vfs, to: *mut f64) -> c_int {
    // SAFETY: `to` is SQLite's own variable.
    unsafe { *to = 2_460_000.5 };
    ffi::SQLITE_OK
}

static METHODS: sqlite3_io_methods = sqlite3_io_methods {
    iVersion: 2,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(check_reserved),
    xFileControl: Some(control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(characteristics),
    xShmMap: Some(shm_map),
    xShmLock: Some(shm_lock),
    xShmBarrier: Some(shm_barrier),
    xShmUnmap: Some(shm_unmap),
    xFetch: None,
    xUnfetch: None,
};

/// Makes the file system known to SQLite, once for the process.
pub(super) fn register() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let vfs = sqlite3_vfs {
            iVersion: 1,
            szOsFile: size_of::<Handle>() as c_int,
            mxPathname: 512,
            pNext: std::ptr::null_mut(),
            zName: VFS_NAME.as_ptr(),
            pAppData: std::ptr::null_mut(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_path),
            xDlOpen: None,
            xDlError: None,
            xDlSym: None,
            xDlClose: None,
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: None,
            xCurrentTimeInt64: None,
            xSetSystemCall: None,
            xGetSystemCall: None,
            xNextSystemCall: None,
        };
        // SAFETY: the structure lives as long as the process.
        let code = unsafe { ffi::sqlite3_vfs_register(Box::into_raw(Box::new(vfs)), 0) };
        assert_eq!(code, ffi::SQLITE_OK);
    });
}
