//! Sets the size of thread teams before a parallel region is opened.
//!
//! **How.** [`follow`] compares the size that OpenMP would take with the size that the page wants, and sets the
//! latter if they differ and no region is open. The size that the program asked for (`OMP_NUM_THREADS`,
//! `omp_set_num_threads`) is an upper bound. A region with a size of its own is not changed. OpenBLAS and MKL are
//! set at the same moment, if they have threads of their own.
//!
//! **Properties.** `the_program_asks_for_the_most`: no team is larger than what the program asked for. Without
//! orders the program's own size is put back.

use crate::attach::{count, is_attached, orders, report, report_hook};
use crate::resolve::{
    FIRST_LLVM, Function, GET_MAX_THREADS, IN_PARALLEL, MKL_SET_LOCAL, MOST_RUNTIMES, Object, SET_NUM_THREADS,
    for_objects, symbol,
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

thread_local! {
    /// What the program asked for on this thread, by runtime; 0: not known yet. OpenMP keeps the same per thread.
    static ASKED: [Cell<u32>; MOST_RUNTIMES] = const { [const { Cell::new(0) }; MOST_RUNTIMES] };
}

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

/// Brings the team size of this thread up to date. `is_new`: this object or call site was not seen before.
pub(crate) fn follow(object: &Object, function: Function, is_new: bool) {
    if !is_attached() {
        return;
    }
    if function.0 < GET_MAX_THREADS.0 {
        count(ReportWord::Regions, 1);
    }
    if is_new {
        // A library that was loaded since may have brought OpenBLAS along.
        BLAS_TEAM.store(0, Relaxed);
        if function.0 < GET_MAX_THREADS.0 {
            report_hook(if function.0 < FIRST_LLVM { Hook::GnuOpenMp } else { Hook::LlvmOpenMp });
        }
    }
    let Some(now) = get_max_threads(object) else { return };
    let orders = orders();
    let asked = asked(object.runtime()).unwrap_or(now);
    let wanted = team(orders.map(|orders| orders.team), asked);
    if wanted != now && !is_in_parallel(object) {
        remember_asked(object.runtime(), asked);
        set_num_threads(object, wanted);
        count(ReportWord::Changes, 1);
        report(ReportWord::Team, wanted.into());
    }
    if let Some(orders) = orders
        && orders.team > 0
        && BLAS_TEAM.load(Relaxed) != orders.team
        && !is_in_parallel(object)
    {
        set_blas(&orders);
    }
}

/// The program calls `omp_set_num_threads`: the bound changes, and the team stays within what is wanted.
pub(crate) fn ask(object: &Object, threads: c_int) {
    // OpenMP takes no other numbers; what it makes of them is its own affair.
    let Some(asked) = u32::try_from(threads).ok().filter(|threads| *threads > 0 && is_attached()) else {
        return set_raw(object, threads);
    };
    if !is_in_parallel(object) {
        remember_asked(object.runtime(), asked);
    }
    set_num_threads(object, team(orders().map(|orders| orders.team), asked));
}

fn asked(runtime: usize) -> Option<u32> {
    ASKED.with(|asked| asked.get(runtime).map(Cell::get)).filter(|asked| *asked > 0)
}

fn remember_asked(runtime: usize, threads: u32) {
    ASKED.with(|asked| {
        if let Some(cell) = asked.get(runtime) {
            cell.set(threads);
        }
    });
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

fn set_num_threads(object: &Object, threads: u32) {
    set_raw(object, c_int::try_from(threads).unwrap_or(c_int::MAX));
    if let Some(address) = object.real(MKL_SET_LOCAL) {
        // SAFETY: the address is that of MKL's function of this type.
        let real = unsafe { std::mem::transmute::<usize, SetLocal>(address) };
        real(c_int::try_from(threads).unwrap_or(c_int::MAX));
        report_hook(Hook::Mkl);
    }
}

fn set_raw(object: &Object, threads: c_int) {
    if let Some(address) = object.real(SET_NUM_THREADS) {
        // SAFETY: the address is that of OpenMP's function of this type.
        let real = unsafe { std::mem::transmute::<usize, Set>(address) };
        real(threads);
    }
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
                set(c_int::try_from(wanted).unwrap_or(c_int::MAX));
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
    fn what_a_thread_asks_for_is_its_own() {
        remember_asked(1, 5);
        assert_eq!(asked(1), Some(5));
        assert_eq!(asked(0), None, "another runtime");
        assert_eq!(asked(MOST_RUNTIMES), None, "no such runtime");
        assert_eq!(std::thread::spawn(|| asked(1)).join().unwrap(), None, "another thread");
    }
}
