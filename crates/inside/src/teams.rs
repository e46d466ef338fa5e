//! Decides how many threads the parallel regions of a program have.
//!
//! **How.** The size that a program sees is our answer to `omp_get_max_threads`, and a region without a size of its own
//! gets the same size. What the program asked for (`OMP_NUM_THREADS`, `omp_set_num_threads`) is an upper bound. A
//! region with a size of its own is not changed.
//!
//! The size changes only where no memory can have been allocated for another one:
//! - *Elastic* libraries (PyTorch, oneDNN, MKL), called by the main thread of a Python program, follow the page. The
//!   size in force changes between two operations ([`crate::interpreter`]), with that of MKL and OpenBLAS.
//! - On other threads they keep the size that the page had when the thread first asked.
//! - All other libraries and programs keep the size that the page had when the first of them asked. Many of them
//!   allocate memory for each thread once and use it until their end.
//!
//! **Echoes.** PyTorch asks MKL for its number and sets OpenMP to the answer, more than once. The answer may be the
//! size that we had set, or the number of CPUs that the job has now. Such an *echo* is no wish of the program, and the
//! bound stays. A wish (`torch.set_num_threads`) sets MKL, too, an echo does not: we take our own number away from MKL
//! at each request, and read between two operations whether it has a number again.
//!
//! **Properties.** `the_program_asks_for_the_most`: no team is larger than what the program asked for. Between two
//! changes every answer and every region has the same size. Without orders the program's own size is in force.
//! `an_echo_is_no_bound`.

use crate::attach::{count, is_attached, orders, report, report_hook, variable};
use crate::interpreter::{is_main_thread, request_call};
use crate::resolve::{
    FIRST_LLVM, Function, GET_MAX_THREADS, IN_PARALLEL, MKL_SET_LOCAL, MOST_RUNTIMES, Object, SET_NUM_THREADS,
    for_objects, objects, symbol,
};
use gainshare_page::{Hook, Orders, ReportWord};
use libc::c_int;
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

type Get = extern "C" fn() -> c_int;
type Set = extern "C" fn(c_int);
type SetLocal = extern "C" fn(c_int) -> c_int;

/// A number for each runtime; 0: not known.
type PerRuntime = [Cell<u32>; MOST_RUNTIMES];

thread_local! {
    /// What the program asked for on this thread. OpenMP keeps the same per thread.
    static ASKED: PerRuntime = const { [const { Cell::new(0) }; MOST_RUNTIMES] };

    /// The size in force for elastic libraries on this thread.
    static IN_FORCE: PerRuntime = const { [const { Cell::new(0) }; MOST_RUNTIMES] };

    /// Calls of this thread before the program called `omp_set_num_threads`.
    static CALLS: Cell<u32> = const { Cell::new(0) };

    /// The bound before the last request, by runtime, while it is open whether the request is an echo; 0: it is not.
    static BEFORE: PerRuntime = const { [const { Cell::new(0) }; MOST_RUNTIMES] };
}

/// The bound for libraries that are not elastic, by runtime, from the first call on; 0: not known.
static FIXED: [AtomicU32; MOST_RUNTIMES] = [const { AtomicU32::new(0) }; MOST_RUNTIMES];

/// How many calls of a thread pass before an object with MKL is followed that has asked for no size. PyTorch asks
/// MKL for its number first and then sets OpenMP to the answer: an answer that we had lowered would become the
/// program's own bound.
const CALLS_BEFORE_MKL: u32 = 200;

/// The size that OpenBLAS was given last; 0: it must be set at the next chance.
static BLAS_TEAM: AtomicU32 = AtomicU32::new(0);

/// The size that OpenBLAS had before it was set for the first time.
static BLAS_BEFORE: AtomicU32 = AtomicU32::new(0);

/// The size of a team: what is wanted, but never more than the program asked for.
fn team(wanted: Option<u32>, asked: u32) -> u32 {
    match wanted {
        Some(wanted) if wanted > 0 => wanted.min(asked),
        _ => asked,
    }
}

fn wanted_team() -> Option<u32> {
    orders().map(|orders| orders.team)
}

/// Called before a parallel region is opened. `is_new`: this object or call site was not seen before.
pub(crate) fn prepare_region(object: &Object, function: Function, is_new: bool) {
    if !is_attached() {
        return;
    }
    count(ReportWord::Regions, 1);
    if is_new {
        report_hook(if function.0 < FIRST_LLVM { Hook::GnuOpenMp } else { Hook::LlvmOpenMp });
    }
    let Some(size) = size_in_force(object, is_new) else { return };
    if get_max_threads(object).is_some_and(|now| now != size) && !is_in_parallel(object) {
        set_num_threads(object, to_c(size));
        report(ReportWord::Team, size.into());
    }
}

/// The answer to `omp_get_max_threads`; `None`: that of the real function.
pub(crate) fn max_threads(object: &Object, is_new: bool) -> Option<c_int> {
    if !is_attached() {
        return None;
    }
    size_in_force(object, is_new).map(to_c)
}

/// The size that this object sees on this thread. `None`: the real one, as inside of a parallel region.
fn size_in_force(object: &Object, is_new: bool) -> Option<u32> {
    let runtime = object.runtime();
    let asked = match get(&ASKED, runtime) {
        Some(asked) => asked,
        None if is_in_parallel(object) => return None,
        None => {
            let asked = get_max_threads(object)?;
            set(&ASKED, runtime, asked);
            asked
        }
    };
    if !object.is_elastic() {
        return Some(fixed_bound(runtime).min(asked));
    }
    let is_followed = is_main_thread();
    let size = get(&IN_FORCE, runtime).unwrap_or_else(|| {
        let size = if is_followed { asked } else { team(wanted_team(), asked) };
        set(&IN_FORCE, runtime, size);
        size
    });
    if is_followed {
        if is_new {
            // A library that was loaded since may have brought OpenBLAS along.
            BLAS_TEAM.store(0, Relaxed);
        }
        let orders = orders();
        let is_blas_due = || orders.is_some_and(|orders| orders.team > 0 && BLAS_TEAM.load(Relaxed) != orders.team);
        if !is_early(object) && (team(orders.map(|orders| orders.team), asked) != size || is_blas_due()) {
            request_call(change);
        }
    }
    Some(size)
}

/// The bound for libraries that are not elastic.
fn fixed_bound(runtime: usize) -> u32 {
    let Some(cell) = FIXED.get(runtime) else { return u32::MAX };
    let known = cell.load(Relaxed);
    if known != 0 {
        return known;
    }
    let orders = orders();
    let first = team(orders.map(|orders| orders.team), u32::MAX);
    match cell.compare_exchange(0, first, Relaxed, Relaxed) {
        Ok(_) => {
            // A program with an interpreter has better moments for it.
            if let Some(orders) = orders.filter(|orders| orders.team > 0 && !is_main_thread()) {
                set_blas(&orders);
            }
            first
        }
        Err(known) => known,
    }
}

/// Brings the sizes of this thread up to date, between two operations of the program.
fn change() {
    let orders = orders();
    for object in objects().filter(|object| object.is_elastic()) {
        let runtime = object.runtime();
        let (Some(mut asked), Some(before)) = (get(&ASKED, runtime), get(&IN_FORCE, runtime)) else { continue };
        if let Some(bound) = get(&BEFORE, runtime) {
            asked = bound_after(asked, bound, set_mkl(object, 0));
            set(&ASKED, runtime, asked);
            set(&BEFORE, runtime, 0);
        }
        let size = team(orders.map(|orders| orders.team), asked);
        if size != before {
            set(&IN_FORCE, runtime, size);
            count(ReportWord::Changes, 1);
        }
        if set_mkl(object, size).is_some() {
            report_hook(Hook::Mkl);
        }
    }
    if let Some(orders) = orders.filter(|orders| orders.team > 0) {
        set_blas(&orders);
    }
}

/// The program calls `omp_set_num_threads`: the bound changes, and the team stays within what is wanted.
pub(crate) fn ask(object: &Object, threads: c_int) {
    // OpenMP defines positive numbers only. Other numbers are passed on.
    let Some(asked) = u32::try_from(threads).ok().filter(|threads| *threads > 0 && is_attached()) else {
        return set_num_threads(object, threads);
    };
    if is_in_parallel(object) {
        return set_num_threads(object, threads);
    }
    let runtime = object.runtime();
    let is_followed = object.is_elastic() && is_main_thread();
    let before = get(&BEFORE, runtime).or_else(|| get(&ASKED, runtime)).or_else(|| get_max_threads(object));
    set(&BEFORE, runtime, 0);
    if let Some(before) = before.filter(|before| is_followed && *before > asked && !is_mkl_set_by_user())
        && set_mkl(object, 0).is_some()
    {
        set(&BEFORE, runtime, before);
    }
    set(&ASKED, runtime, asked);
    CALLS.set(CALLS_BEFORE_MKL);
    // The next call sets elastic libraries to what is wanted then.
    let size = if object.is_elastic() { team(wanted_team(), asked) } else { fixed_bound(runtime).min(asked) };
    set(&IN_FORCE, runtime, team(wanted_team(), asked));
    set_num_threads(object, to_c(size));
    if is_followed {
        // A program that means it sets MKL to the same number after this call.
        request_call(change);
    }
}

/// The bound after a request for fewer threads than `before`. `mkl`: the number that MKL was given since the request;
/// 0: none, so that the request was an echo.
fn bound_after(asked: u32, before: u32, mkl: Option<u32>) -> u32 {
    if mkl == Some(0) { before } else { asked }
}

/// Whether MKL's number is the user's own.
fn is_mkl_set_by_user() -> bool {
    ["MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS"].iter().any(|name| variable(name).is_some())
}

/// Whether a program with MKL may still be about to ask for a size.
fn is_early(object: &Object) -> bool {
    let calls = CALLS.get();
    if calls >= CALLS_BEFORE_MKL || object.real(MKL_SET_LOCAL).is_none() {
        return false;
    }
    CALLS.set(calls.wrapping_add(1));
    true
}

fn get(cells: &'static std::thread::LocalKey<PerRuntime>, runtime: usize) -> Option<u32> {
    cells.with(|cells| cells.get(runtime).map(Cell::get)).filter(|number| *number > 0)
}

fn set(cells: &'static std::thread::LocalKey<PerRuntime>, runtime: usize, number: u32) {
    cells.with(|cells| {
        if let Some(cell) = cells.get(runtime) {
            cell.set(number);
        }
    });
}

fn to_c(number: u32) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

fn get_max_threads(object: &Object) -> Option<u32> {
    let address = object.real(GET_MAX_THREADS)?;
    // SAFETY: the address is that of OpenMP's function of this type.
    let real = unsafe { std::mem::transmute::<usize, Get>(address) };
    u32::try_from(real()).ok().filter(|threads| *threads > 0)
}

fn is_in_parallel(object: &Object) -> bool {
    let Some(address) = object.real(IN_PARALLEL) else { return true };
    // SAFETY: the address is that of OpenMP's function of this type.
    let real = unsafe { std::mem::transmute::<usize, Get>(address) };
    real() != 0
}

fn set_num_threads(object: &Object, threads: c_int) {
    if let Some(address) = object.real(SET_NUM_THREADS) {
        // SAFETY: the address is that of OpenMP's function of this type.
        let real = unsafe { std::mem::transmute::<usize, Set>(address) };
        real(threads);
    }
}

/// Sets the threads of MKL for this thread, between two operations; 0: as many as MKL wants. Returns the number of
/// before; `None`: there is no MKL.
fn set_mkl(object: &Object, threads: u32) -> Option<u32> {
    let address = object.real(MKL_SET_LOCAL)?;
    // SAFETY: the address is that of MKL's function of this type.
    let real = unsafe { std::mem::transmute::<usize, SetLocal>(address) };
    u32::try_from(real(to_c(threads))).ok()
}

/// The names of OpenBLAS's functions to read and set the number of threads, and to ask what kind of threads it has.
/// Builds with long integers and those inside NumPy and SciPy have names of their own.
const BLAS_NAMES: [[&CStr; 3]; 4] = [
    [c"openblas_get_num_threads", c"openblas_set_num_threads", c"openblas_get_parallel"],
    [c"openblas_get_num_threads64_", c"openblas_set_num_threads64_", c"openblas_get_parallel64_"],
    [c"scipy_openblas_get_num_threads", c"scipy_openblas_set_num_threads", c"scipy_openblas_get_parallel"],
    [c"scipy_openblas_get_num_threads64_", c"scipy_openblas_set_num_threads64_", c"scipy_openblas_get_parallel64_"],
];

/// What `openblas_get_parallel` returns for a pool of OpenBLAS's own. The build on OpenMP follows OpenMP by itself.
const OWN_THREADS: c_int = 1;

fn set_blas(orders: &Orders) {
    BLAS_TEAM.store(orders.team, Relaxed);
    for_objects(b"openblas", |handle| {
        for [get, set, parallel] in BLAS_NAMES {
            let (Some(get), Some(set), Some(parallel)) =
                (symbol(handle, get), symbol(handle, set), symbol(handle, parallel))
            else {
                continue;
            };
            // SAFETY: the addresses are those of OpenBLAS's functions of these types.
            let (get, set, parallel) = unsafe {
                (
                    std::mem::transmute::<usize, Get>(get),
                    std::mem::transmute::<usize, Set>(set),
                    std::mem::transmute::<usize, Get>(parallel),
                )
            };
            if parallel() != OWN_THREADS {
                continue;
            }
            let now = u32::try_from(get()).unwrap_or(1);
            let _ = BLAS_BEFORE.compare_exchange(0, now, Relaxed, Relaxed);
            let most = if orders.blas_may_grow { u32::MAX } else { BLAS_BEFORE.load(Relaxed) };
            let wanted = team(Some(orders.team), most);
            if wanted != now {
                set(to_c(wanted));
            }
            report_hook(Hook::OpenBlas);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_asks_for_the_most() {
        for (wanted, asked, expected) in
            [(Some(2), 4, 2), (Some(8), 4, 4), (Some(4), 4, 4), (Some(0), 4, 4), (None, 3, 3), (Some(1), 1, 1)]
        {
            assert_eq!(team(wanted, asked), expected, "{wanted:?} wanted, {asked} asked for");
        }
    }

    #[test]
    fn an_echo_is_no_bound() {
        assert_eq!(bound_after(2, 16, Some(0)), 16, "MKL has no number of its own");
        assert_eq!(bound_after(2, 16, Some(2)), 2, "the program set MKL, too");
        assert_eq!(bound_after(2, 16, None), 2, "no MKL");
    }

    #[test]
    fn what_a_thread_asks_for_is_its_own() {
        set(&ASKED, 1, 5);
        assert_eq!(get(&ASKED, 1), Some(5));
        assert_eq!(get(&ASKED, 0), None, "another runtime");
        assert_eq!(get(&IN_FORCE, 1), None, "another number");
        assert_eq!(get(&ASKED, MOST_RUNTIMES), None, "no such runtime");
        assert_eq!(std::thread::spawn(|| get(&ASKED, 1)).join().unwrap(), None, "another thread");
    }
}
