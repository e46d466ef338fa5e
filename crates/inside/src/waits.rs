//! Waits for the GPU, the library's own and the program's, and how long they took.
//!
//! **Problem.** A job that prepares its launches more slowly than the GPU carries them out leaves the GPU idle. Other
//! jobs must not be paced for the sake of such a job. The daemon cannot see that from outside.
//!
//! **How.** A job that fills its GPU waits for it again and again. All its waits are counted in the report: those of
//! the program (for streams, events and the whole context), at the end of a quantum, and at the end of a segment
//! ([`crate::backlog`]). Only the outermost wait of all threads counts, so that no time is counted twice. A wait that
//! is under way is reported, too: a program that waits for a long kernel launches nothing, but has work.

use crate::attach::{count, monotonic_ns, report};
use crate::cuda::{NOT_FOUND, Pointer, Real, Result};
use gainshare_page::ReportWord;
use libc::c_int;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

/// By kind of default stream, as in [`crate::gpu`].
pub(crate) static SYNCHRONIZE: [Real; 2] = [Real::new(), Real::new()];
pub(crate) static IS_CAPTURING: [Real; 2] = [Real::new(), Real::new()];
/// `cuThreadExchangeStreamCaptureMode`.
pub(crate) static EXCHANGE: Real = Real::new();
static EVENT: Real = Real::new();
static CONTEXT: Real = Real::new();

/// Whether a thread's wait is being counted.
static IS_COUNTING: AtomicBool = AtomicBool::new(false);

/// Waits, and counts how long.
pub(crate) fn counted<T>(wait: impl FnOnce() -> T) -> T {
    if IS_COUNTING.swap(true, Relaxed) {
        return wait();
    }
    let began_ns = monotonic_ns();
    report(ReportWord::WaitBeganNs, began_ns);
    let result = wait();
    report(ReportWord::WaitBeganNs, 0);
    count(ReportWord::WaitedNs, monotonic_ns().saturating_sub(began_ns));
    IS_COUNTING.store(false, Relaxed);
    result
}

/// Our function for one of the driver's that wait, and where the real one is kept.
pub(crate) fn wrapper(base: &[u8], is_per_thread: bool) -> (&'static Real, usize) {
    let [legacy, per_thread] = &SYNCHRONIZE;
    match base {
        b"cuEventSynchronize" => (&EVENT, synchronize_event as *const () as usize),
        b"cuCtxSynchronize" => (&CONTEXT, synchronize_context as *const () as usize),
        _ if is_per_thread => (per_thread, synchronize_stream::<1> as *const () as usize),
        _ => (legacy, synchronize_stream::<0> as *const () as usize),
    }
}

unsafe extern "C" fn synchronize_stream<const KIND: usize>(stream: Pointer) -> Result {
    wait_for(SYNCHRONIZE.get(KIND), stream)
}

unsafe extern "C" fn synchronize_event(event: Pointer) -> Result {
    wait_for(Some(&EVENT), event)
}

/// Drivers since version 13 have an argument here; to those before it an unused register does no harm.
unsafe extern "C" fn synchronize_context(context: Pointer) -> Result {
    wait_for(Some(&CONTEXT), context)
}

fn wait_for(real: Option<&Real>, what: Pointer) -> Result {
    type Wait = unsafe extern "C" fn(Pointer) -> Result;
    let Some(address) = real.map(Real::address).filter(|address| *address != 0) else { return NOT_FOUND };
    // SAFETY: the address is that of the driver's function of this type; the argument is the caller's.
    counted(|| unsafe { std::mem::transmute::<usize, Wait>(address)(what) })
}

/// Waits for the work on a stream; whether that succeeded.
pub(crate) fn synchronize<const KIND: usize>(stream: Pointer) -> bool {
    beside_recordings(|| wait_for(SYNCHRONIZE.get(KIND), stream)) == 0
}

/// The mode in which a thread may wait for a stream while another stream records a graph.
const RELAXED: c_int = 2;

/// Waits so that no recording breaks. While any thread records a graph in the usual mode (`global`), the driver takes
/// every wait, also for another stream and on another thread, for a mistake and ends the recording.
pub(crate) fn beside_recordings<T>(wait: impl FnOnce() -> T) -> T {
    type Exchange = unsafe extern "C" fn(*mut c_int) -> Result;
    let (address, mut mode) = (EXCHANGE.address(), RELAXED);
    // SAFETY: an address other than 0 is that of the driver's function of this type, which only changes how the driver
    // checks the calls of this thread.
    let exchange = |mode: &mut c_int| unsafe {
        address != 0 && std::mem::transmute::<usize, Exchange>(address)(&raw mut *mode) == 0
    };
    let is_exchanged = exchange(&mut mode);
    let result = wait();
    if is_exchanged {
        exchange(&mut mode);
    }
    result
}

/// Whether a stream records a graph: waiting for it would break the recording. Unknown counts as yes.
pub(crate) fn is_capturing<const KIND: usize>(stream: Pointer) -> bool {
    type IsCapturing = unsafe extern "C" fn(Pointer, *mut c_int) -> Result;
    let real = IS_CAPTURING.get(KIND).map(Real::address);
    let Some(address) = real.filter(|address| *address != 0) else { return true };
    let mut status: c_int = 1;
    // SAFETY: the address is that of the driver's function of this type.
    let result = unsafe { std::mem::transmute::<usize, IsCapturing>(address)(stream, &raw mut status) };
    result != 0 || status != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inner_wait_is_not_counted_again() {
        let inner = counted(|| {
            assert!(IS_COUNTING.load(Relaxed));
            counted(|| IS_COUNTING.load(Relaxed))
        });
        assert!(inner, "the outer wait goes on");
        assert!(!IS_COUNTING.load(Relaxed));
    }
}
