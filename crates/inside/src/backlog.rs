//! Bounds how far a program launches ahead of a GPU that it shares.
//!
//! **Problem.** A program launches work much faster than the GPU does it: some hundred milliseconds may be queued. Work
//! that was launched cannot be taken back, so a smaller share would have no effect until the queue is empty.
//!
//! **How.** While other jobs use the GPU, the program records an event after each *segment* of its launches and then
//! waits for the event before. The segment between the two events is still queued, so the GPU does not run empty.
//!
//! **Properties.** At most two segments are queued. A stream that records a graph is left alone. After the first error
//! of the driver nothing is recorded any more.

use crate::attach::monotonic_ns;
use crate::cuda::{Pointer, Real, Result, driver_symbol};
use crate::waits::{beside_recordings, counted};
use libc::c_uint;
use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

/// How long a program launches before it records an event. The GPU often needs several times as long for it.
const SEGMENT_NS: u64 = 3_000_000;

/// Options of an event: a thread that waits for it sleeps, and no time is recorded.
const BLOCKING: c_uint = 1;
const NO_TIME: c_uint = 2;

static CREATE: Real = Real::new();
/// By kind of default stream, as in [`crate::gpu`].
static RECORD: [Real; 2] = [Real::new(), Real::new()];
static SYNCHRONIZE: Real = Real::new();

/// The two events, in turns; 0: not created yet.
static EVENTS: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

/// How many events were recorded.
static RECORDED: AtomicUsize = AtomicUsize::new(0);

static SEGMENT_BEGAN_NS: AtomicU64 = AtomicU64::new(0);

/// Whether a thread is at the end of a segment.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

static HAS_FAILED: AtomicBool = AtomicBool::new(false);

/// Finds the functions of the driver.
pub(crate) fn find_functions(handle: Pointer) {
    let [legacy, per_thread] = &RECORD;
    let functions: [(&Real, &CStr); 4] = [
        (&CREATE, c"cuEventCreate"),
        (legacy, c"cuEventRecord"),
        (per_thread, c"cuEventRecord_ptsz"),
        (&SYNCHRONIZE, c"cuEventSynchronize"),
    ];
    for (slot, name) in functions {
        if let Some(address) = driver_symbol(handle, name) {
            slot.set(address);
        }
    }
}

/// Called before a launch on a stream of a shared GPU. `is_capturing` is asked at the end of a segment.
pub(crate) fn bound<const KIND: usize>(stream: Pointer, is_capturing: impl FnOnce() -> bool) {
    let now_ns = monotonic_ns();
    if now_ns.saturating_sub(SEGMENT_BEGAN_NS.load(Relaxed)) < SEGMENT_NS || HAS_FAILED.load(Relaxed) {
        return;
    }
    if IS_TAKEN.swap(true, Relaxed) {
        return;
    }
    if !is_capturing() && beside_recordings(|| end_segment::<KIND>(stream)).is_none() {
        HAS_FAILED.store(true, Relaxed);
    }
    SEGMENT_BEGAN_NS.store(monotonic_ns(), Relaxed);
    IS_TAKEN.store(false, Relaxed);
}

/// Records an event and waits for the one before. `None`: the driver lacks a function or reported an error.
fn end_segment<const KIND: usize>(stream: Pointer) -> Option<()> {
    type Create = unsafe extern "C" fn(*mut Pointer, c_uint) -> Result;
    type Record = unsafe extern "C" fn(Pointer, Pointer) -> Result;
    type Synchronize = unsafe extern "C" fn(Pointer) -> Result;
    let known = |real: &Real| Some(real.address()).filter(|address| *address != 0);
    let (create, record, synchronize) = (known(&CREATE)?, known(RECORD.get(KIND)?)?, known(&SYNCHRONIZE)?);
    let recorded = RECORDED.load(Relaxed);
    let [newer, older] = [recorded % 2, recorded.wrapping_add(1) % 2].map(|place| EVENTS.get(place));
    let (newer, older) = (newer?, older?);
    let mut event = newer.load(Relaxed) as Pointer;
    // SAFETY: the addresses are those of the driver's functions of these types; the events are ours and are never
    // destroyed; only one thread at a time is here.
    unsafe {
        if event.is_null() {
            if std::mem::transmute::<usize, Create>(create)(&raw mut event, BLOCKING | NO_TIME) != 0 {
                return None;
            }
            newer.store(event as usize, Relaxed);
        }
        if std::mem::transmute::<usize, Record>(record)(event, stream) != 0 {
            return None;
        }
        RECORDED.store(recorded.wrapping_add(1), Relaxed);
        let before = older.load(Relaxed) as Pointer;
        let wait = || std::mem::transmute::<usize, Synchronize>(synchronize)(before);
        if !before.is_null() && counted(wait) != 0 {
            return None;
        }
    }
    Some(())
}
