//! Finds moments at which a Python program is between two operations.
//!
//! **Problem.** A library that runs on several threads asks for their number, allocates memory for each of them and
//! opens a parallel region later, or even several. If the number grows in between, threads write beyond that memory.
//! Only the program knows where an operation ends.
//!
//! **How.** The interpreter of Python runs *pending calls* on its main thread between two of its own instructions
//! (`Py_AddPendingCall`). At such a moment no operation of a library is under way on this thread, and a change there
//! is the same as a call of `torch.set_num_threads` in the program's own text.
//!
//! **Properties.** Nothing of Python is called but these two functions, only on the main thread, and only while the
//! interpreter runs. A program without the interpreter has no such moments.

use crate::attach::coarse_ns;
use crate::resolve::symbol;
use libc::{c_int, c_void};
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};

type PendingCall = extern "C" fn(*mut c_void) -> c_int;
type AddPendingCall = unsafe extern "C" fn(PendingCall, *mut c_void) -> c_int;
type IsInitialized = unsafe extern "C" fn() -> c_int;

/// A function of the interpreter; 0: not searched for yet, 1: there is none.
struct Symbol(AtomicUsize);

const ABSENT: usize = 1;

static ADD_PENDING_CALL: Symbol = Symbol(AtomicUsize::new(0));
static IS_INITIALIZED: Symbol = Symbol(AtomicUsize::new(0));

/// When the call was requested that has not run yet; 0: none.
static REQUESTED_NS: AtomicU64 = AtomicU64::new(0);

/// A request that was not carried out for this long is repeated: a forked child may have lost it.
const REPEAT_NS: u64 = 1_000_000_000;

impl Symbol {
    fn address(&self, name: &CStr) -> Option<usize> {
        let mut known = self.0.load(Relaxed);
        if known == 0 {
            known = symbol(libc::RTLD_DEFAULT, name).unwrap_or(ABSENT);
            self.0.store(known, Relaxed);
        }
        (known != ABSENT).then_some(known)
    }
}

thread_local! {
    /// Whether this is the main thread of a Python program; `None`: not known yet.
    static IS_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
}

/// Whether this thread is the main thread of a Python program.
pub(crate) fn is_main_thread() -> bool {
    if let Some(known) = IS_MAIN.get() {
        return known;
    }
    // SAFETY: both calls always succeed.
    let is_first = unsafe { libc::syscall(libc::SYS_gettid) == libc::c_long::from(libc::getpid()) };
    let is_main = is_first && ADD_PENDING_CALL.address(c"Py_AddPendingCall").is_some();
    IS_MAIN.set(Some(is_main));
    is_main
}

/// Lets the interpreter call `change` as soon as the current operation is over. Only on the main thread.
pub(crate) fn request_call(change: fn()) {
    let (now_ns, requested_ns) = (coarse_ns(), REQUESTED_NS.load(Relaxed));
    if requested_ns != 0 && now_ns.saturating_sub(requested_ns) < REPEAT_NS {
        return;
    }
    let functions = (ADD_PENDING_CALL.address(c"Py_AddPendingCall"), IS_INITIALIZED.address(c"Py_IsInitialized"));
    let (Some(add), Some(is_initialized)) = functions else { return };
    // SAFETY: the addresses are those of the interpreter's functions of these types. `Py_AddPendingCall` needs no lock,
    // and the main thread cannot end the interpreter while it is here. The library is never unloaded.
    unsafe {
        let is_initialized = std::mem::transmute::<usize, IsInitialized>(is_initialized);
        let add = std::mem::transmute::<usize, AddPendingCall>(add);
        if is_initialized() == 0 {
            return;
        }
        REQUESTED_NS.store(now_ns.max(1), Relaxed);
        if add(call, change as *mut c_void) != 0 {
            // The queue is full: the next operation requests again.
            REQUESTED_NS.store(0, Relaxed);
        }
    }
}

/// Runs between two instructions of the program.
extern "C" fn call(change: *mut c_void) -> c_int {
    REQUESTED_NS.store(0, Relaxed);
    if is_main_thread() {
        // SAFETY: `request_call` passes a function of this type.
        let change = unsafe { std::mem::transmute::<*mut c_void, fn()>(change) };
        change();
    }
    0
}
