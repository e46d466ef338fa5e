//! Paces the GPU work of a job: it launches for a quantum, waits for its own stream and pauses in proportion.
//!
//! **Problem.** A GPU has no weights: two jobs that fill it get equal slices of its time, whatever their shares.
//!
//! **How.** Most users of the GPU (the CUDA runtime, cuBLAS, cuDNN, JAX, Triton) find the functions of the driver
//! with `dlsym`, and further ones with the driver's own `cuGetProcAddress`. This library answers both: for
//! the functions that launch work it returns functions of its own, which pace and then call the real ones. Programs
//! that are linked with the driver call the same functions ([`crate::direct`]). The pace comes from the page, so that
//! a change has an effect at once, also during a pause.
//!
//! **GPU time.** While a job and its neighbours all have work, the driver gives each an equal slice. A quantum of
//! wall time is therefore worth a quantum divided by the number of jobs on the GPU, which the page contains.
//!
//! **Properties.** Off unless `GAINSHARE_INSIDE_GPU` is set. Jobs on several GPUs are not paced (`devices`). A
//! stream that records a graph is never waited for, and waits for other streams do not disturb it ([`waits`]). Without
//! orders, with a whole share and alone on its GPU a job does not wait. How long a program waits for the GPU is
//! reported: a job that does not wait does not fill its GPU. `pauses_fit_the_share`. A job that shares its GPU launches
//! only a little ahead ([`backlog`]), so that a smaller share is in force soon.

use crate::attach::{count, is_attached, monotonic_ns, orders, report_hook};
use crate::backlog;
use crate::cuda::{NOT_FOUND, Pointer, Real, Result, driver_symbol};
use crate::devices;
use crate::resolve::{is_own, keep};
use crate::rhythm;
use crate::waits::{self, IS_CAPTURING, SYNCHRONIZE, is_capturing, synchronize};
use gainshare_page::{Hook, Orders, ReportWord, WHOLE_GPU};
use libc::{c_int, c_uint};
use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// How long a job works before it pauses.
const QUANTUM_NS: u64 = 5_000_000;

/// No pause is longer, so that a job with a tiny share still makes progress every second.
const LONGEST_PAUSE_NS: u64 = 500_000_000;

/// How often a pause reads the page.
const NAP_NS: u64 = 5_000_000;

/// Whether the job may be paced at all.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// When the current quantum began; 0: none is running.
static QUANTUM_BEGAN_NS: AtomicU64 = AtomicU64::new(0);

/// Whether a thread pauses for the whole program.
static IS_PAUSING: AtomicBool = AtomicBool::new(false);

/// The functions of one kind of default stream: [0] the legacy one, [1] one for each thread.
static LAUNCH: [Real; 2] = [Real::new(), Real::new()];
static LAUNCH_EX: [Real; 2] = [Real::new(), Real::new()];
static LAUNCH_COOPERATIVE: [Real; 2] = [Real::new(), Real::new()];
static LAUNCH_GRAPH: [Real; 2] = [Real::new(), Real::new()];
static GET_ADDRESS: Real = Real::new();
static GET_ADDRESS_V2: Real = Real::new();

/// Asks for the functions of a default stream per thread, in `cuGetProcAddress`.
const PER_THREAD_FLAG: u64 = 2;

/// Read once, before the program's `main`.
pub(crate) fn read_switch() {
    IS_ON.store(devices::read_switch(), Relaxed);
}

/// Whether `dlsym` should answer for this name.
pub(crate) fn is_driver_function(name: &[u8]) -> bool {
    IS_ON.load(Relaxed) && is_attached() && name.starts_with(b"cu")
}

/// What `dlsym` answers for a function of the driver: ours if it launches work, else the real one.
pub(crate) fn answer(handle: Pointer, name: &CStr, real: usize) -> usize {
    if real == 0 || !is_driver_function(name.to_bytes()) {
        return real;
    }
    let Some((slot, ours)) = wrapper(name.to_bytes(), false) else { return real };
    find_functions(handle);
    slot.replace(real, ours)
}

/// The function that a program calls which is linked with the driver. A real function that is known is kept: it is the
/// driver's own.
pub(crate) fn catch(handle: Pointer, name: &CStr, real: usize) -> usize {
    let Some((slot, ours)) = wrapper(name.to_bytes(), false) else { return real };
    find_functions(handle);
    if slot.address() == 0 {
        slot.set(real);
    }
    ours
}

/// Finds what a pause needs, in the library that has the functions that launch.
fn find_functions(handle: Pointer) {
    for (which, suffix) in [(0, false), (1, true)] {
        let names = if suffix {
            [c"cuStreamSynchronize_ptsz", c"cuStreamIsCapturing_ptsz"]
        } else {
            [c"cuStreamSynchronize", c"cuStreamIsCapturing"]
        };
        for (table, name) in [&SYNCHRONIZE, &IS_CAPTURING].into_iter().zip(names) {
            if let (Some(slot), Some(address)) = (table.get(which), driver_symbol(handle, name)) {
                slot.set(address);
            }
        }
    }
    for (slot, name) in [
        (&devices::GET_ATTRIBUTE, c"cuDeviceGetAttribute"),
        (&devices::GET_CURRENT, c"cuCtxGetDevice"),
        (&waits::EXCHANGE, c"cuThreadExchangeStreamCaptureMode"),
    ] {
        if let Some(address) = driver_symbol(handle, name) {
            slot.set(address);
        }
    }
    backlog::find_functions(handle);
    report_hook(Hook::CudaDriver);
}

/// Our function for a driver's function that launches work; the real one for all others.
fn replacement(name: &[u8], real: usize, is_per_thread: bool) -> usize {
    match wrapper(name, is_per_thread) {
        Some((slot, ours)) => slot.replace(real, ours),
        None => real,
    }
}

/// Our function of this name, and where the real one is kept; `None`: the real one is to be called.
fn wrapper(name: &[u8], is_per_thread: bool) -> Option<(&'static Real, usize)> {
    let (base, is_per_thread) = match name.strip_suffix(b"_ptsz") {
        Some(base) => (base, true),
        None => (name, is_per_thread),
    };
    let (table, [legacy, per_thread]): (&'static [Real; 2], [usize; 2]) = match base {
        b"cuGetProcAddress" => return Some((&GET_ADDRESS, get_address as *const () as usize)),
        b"cuGetProcAddress_v2" => return Some((&GET_ADDRESS_V2, get_address_v2 as *const () as usize)),
        b"cuStreamSynchronize" | b"cuEventSynchronize" | b"cuCtxSynchronize" => {
            return Some(waits::wrapper(base, is_per_thread));
        }
        b"cuDevicePrimaryCtxRetain" => return Some((&devices::RETAIN, devices::retain as *const () as usize)),
        b"cuLaunchKernel" => (&LAUNCH, [launch::<0> as *const () as usize, launch::<1> as *const () as usize]),
        b"cuLaunchKernelEx" => {
            (&LAUNCH_EX, [launch_ex::<0> as *const () as usize, launch_ex::<1> as *const () as usize])
        }
        b"cuLaunchCooperativeKernel" => (
            &LAUNCH_COOPERATIVE,
            [launch_cooperative::<0> as *const () as usize, launch_cooperative::<1> as *const () as usize],
        ),
        b"cuGraphLaunch" => {
            (&LAUNCH_GRAPH, [launch_graph::<0> as *const () as usize, launch_graph::<1> as *const () as usize])
        }
        _ => return None,
    };
    let [legacy_slot, per_thread_slot] = table;
    Some(if is_per_thread { (per_thread_slot, per_thread) } else { (legacy_slot, legacy) })
}

type GetAddress = unsafe extern "C" fn(*const libc::c_char, *mut Pointer, c_int, u64) -> Result;
type GetAddressV2 = unsafe extern "C" fn(*const libc::c_char, *mut Pointer, c_int, u64, *mut c_int) -> Result;

unsafe extern "C" fn get_address(name: *const libc::c_char, found: *mut Pointer, version: c_int, flags: u64) -> Result {
    let address = GET_ADDRESS.address();
    if address == 0 {
        return NOT_FOUND;
    }
    // SAFETY: the address is that of the driver's function of this type; the arguments are the caller's.
    unsafe {
        let result = std::mem::transmute::<usize, GetAddress>(address)(name, found, version, flags);
        replace_found(result, name, found, version, flags);
        result
    }
}

unsafe extern "C" fn get_address_v2(
    name: *const libc::c_char,
    found: *mut Pointer,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> Result {
    let address = GET_ADDRESS_V2.address();
    if address == 0 {
        return NOT_FOUND;
    }
    // SAFETY: the address is that of the driver's function of this type; the arguments are the caller's.
    unsafe {
        let result = std::mem::transmute::<usize, GetAddressV2>(address)(name, found, version, flags, status);
        replace_found(result, name, found, version, flags);
        result
    }
}

/// The first version of the driver whose `cuGetProcAddress`, asked for by that name, has five arguments.
const FIVE_ARGUMENTS_SINCE: c_int = 12_000;

/// # Safety
/// `name` and `found` are what the driver was called with.
unsafe fn replace_found(result: Result, name: *const libc::c_char, found: *mut Pointer, version: c_int, flags: u64) {
    // SAFETY: after a success of the driver both pointers are valid, unless they are null.
    unsafe {
        if result != 0 || name.is_null() || found.is_null() || (*found).is_null() {
            return;
        }
        let (mut real, name) = (*found as usize, CStr::from_ptr(name));
        if is_own(real) {
            // The driver binds its own names like a program, so it found ours: its own one is needed.
            let driver = [&GET_ADDRESS_V2, &GET_ADDRESS].into_iter().map(Real::address).find(|known| *known != 0);
            let handle = driver.map_or(std::ptr::null_mut(), keep);
            match driver_symbol(handle, name) {
                Some(address) => real = address,
                None => return,
            }
        }
        let name = name.to_bytes();
        let ours = match name {
            b"cuGetProcAddress" if version >= FIVE_ARGUMENTS_SINCE => {
                GET_ADDRESS_V2.replace(real, get_address_v2 as *const () as usize)
            }
            b"cuGetProcAddress" => GET_ADDRESS.replace(real, get_address as *const () as usize),
            b"cuGetProcAddress_v2" => GET_ADDRESS_V2.replace(real, get_address_v2 as *const () as usize),
            name => replacement(name, real, flags & PER_THREAD_FLAG != 0),
        };
        *found = ours as Pointer;
    }
}

type Launch = unsafe extern "C" fn(
    Pointer,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    Pointer,
    Pointer,
    Pointer,
) -> Result;

/// `cuLaunchKernel`: function, grid, block, shared memory, stream, parameters, extra.
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn launch<const KIND: usize>(
    function: Pointer,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Pointer,
    parameters: Pointer,
    extra: Pointer,
) -> Result {
    pace::<KIND>(function, stream);
    let Some(address) = LAUNCH.get(KIND).map(Real::address).filter(|address| *address != 0) else { return NOT_FOUND };
    // SAFETY: the address is that of the driver's function of this type; the arguments are the caller's.
    unsafe {
        std::mem::transmute::<usize, Launch>(address)(
            function,
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            stream,
            parameters,
            extra,
        )
    }
}

type LaunchCooperative =
    unsafe extern "C" fn(Pointer, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Pointer, Pointer) -> Result;

/// `cuLaunchCooperativeKernel`: as `cuLaunchKernel`, without extra.
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn launch_cooperative<const KIND: usize>(
    function: Pointer,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Pointer,
    parameters: Pointer,
) -> Result {
    pace::<KIND>(function, stream);
    let real = LAUNCH_COOPERATIVE.get(KIND).map(Real::address);
    let Some(address) = real.filter(|address| *address != 0) else { return NOT_FOUND };
    // SAFETY: the address is that of the driver's function of this type; the arguments are the caller's.
    unsafe {
        std::mem::transmute::<usize, LaunchCooperative>(address)(
            function,
            grid_x,
            grid_y,
            grid_z,
            block_x,
            block_y,
            block_z,
            shared_bytes,
            stream,
            parameters,
        )
    }
}

/// The start of `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid_block_and_memory: [c_uint; 7],
    stream: Pointer,
}

type LaunchEx = unsafe extern "C" fn(*const LaunchConfig, Pointer, Pointer, Pointer) -> Result;

/// `cuLaunchKernelEx`: configuration, function, parameters, extra.
unsafe extern "C" fn launch_ex<const KIND: usize>(
    config: *const LaunchConfig,
    function: Pointer,
    parameters: Pointer,
    extra: Pointer,
) -> Result {
    // SAFETY: a configuration that is not null is valid, by the driver's own contract.
    if let Some(config) = unsafe { config.as_ref() } {
        pace::<KIND>(function, config.stream);
    }
    let real = LAUNCH_EX.get(KIND).map(Real::address);
    let Some(address) = real.filter(|address| *address != 0) else { return NOT_FOUND };
    // SAFETY: the address is that of the driver's function of this type; the arguments are the caller's.
    unsafe { std::mem::transmute::<usize, LaunchEx>(address)(config, function, parameters, extra) }
}

type LaunchGraph = unsafe extern "C" fn(Pointer, Pointer) -> Result;

/// `cuGraphLaunch`: graph, stream.
unsafe extern "C" fn launch_graph<const KIND: usize>(graph: Pointer, stream: Pointer) -> Result {
    pace::<KIND>(graph, stream);
    let real = LAUNCH_GRAPH.get(KIND).map(Real::address);
    let Some(address) = real.filter(|address| *address != 0) else { return NOT_FOUND };
    // SAFETY: the address is that of the driver's function of this type; the arguments are the caller's.
    unsafe { std::mem::transmute::<usize, LaunchGraph>(address)(graph, stream) }
}

/// The orders of a job that is to be paced.
fn paced_orders() -> Option<Orders> {
    orders().filter(|orders| is_paced(orders) && devices::may_pace())
}

fn is_paced(orders: &Orders) -> bool {
    (1..WHOLE_GPU).contains(&orders.gpu_share)
}

/// How long to pause after `busy_ns` of work beside the other jobs of the GPU.
fn pause_ns(busy_ns: u64, orders: &Orders) -> u64 {
    let gpu_ns = busy_ns / u64::from(orders.gpu_jobs.max(1));
    let cycle_ns = gpu_ns.saturating_mul(u64::from(WHOLE_GPU)) / u64::from(orders.gpu_share.max(1));
    cycle_ns.saturating_sub(busy_ns).min(LONGEST_PAUSE_NS)
}

/// Called before each launch of a kernel or a graph on a stream.
fn pace<const KIND: usize>(what: Pointer, stream: Pointer) {
    count(ReportWord::Launches, 1);
    rhythm::note(what as usize);
    devices::note_launch();
    let orders = orders().filter(|_| devices::may_pace());
    if !orders.as_ref().is_some_and(is_paced) {
        QUANTUM_BEGAN_NS.store(0, Relaxed);
        if orders.is_some_and(|orders| orders.gpu_jobs > 1) {
            backlog::bound::<KIND>(stream, || is_capturing::<KIND>(stream));
        }
        return;
    }
    // Another thread pauses for all: this one waits with it.
    while IS_PAUSING.load(Relaxed) && paced_orders().is_some() {
        nap(NAP_NS / 5);
    }
    let now_ns = monotonic_ns();
    let known_ns = QUANTUM_BEGAN_NS.load(Relaxed);
    // A job that was free until now has work in the queue and waits for it at once.
    let began_ns = if known_ns == 0 { now_ns } else { known_ns };
    if (known_ns != 0 && now_ns.saturating_sub(began_ns) < QUANTUM_NS) || is_capturing::<KIND>(stream) {
        return;
    }
    if IS_PAUSING.swap(true, Relaxed) {
        return;
    }
    if synchronize::<KIND>(stream) {
        let worked_ns = monotonic_ns();
        let busy_ns = worked_ns.saturating_sub(began_ns);
        let (mut now_ns, mut is_counted) = (worked_ns, false);
        while let Some(orders) = paced_orders() {
            let end_ns = worked_ns.saturating_add(pause_ns(busy_ns, &orders));
            if now_ns >= end_ns {
                break;
            }
            if !is_counted {
                count(ReportWord::Pauses, 1);
                is_counted = true;
            }
            nap(end_ns.saturating_sub(now_ns).min(NAP_NS));
            now_ns = monotonic_ns();
        }
        count(ReportWord::PausedNs, now_ns.saturating_sub(worked_ns));
    }
    QUANTUM_BEGAN_NS.store(monotonic_ns(), Relaxed);
    IS_PAUSING.store(false, Relaxed);
}

fn nap(ns: u64) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: ns.min(999_999_999) as libc::c_long };
    // SAFETY: the argument is a valid timespec; a signal may end the nap early, which is harmless.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_fit_the_share() {
        let orders = |gpu_share, gpu_jobs| Orders { gpu_share, gpu_jobs, ..Orders::default() };
        for (share, jobs, busy_ns, expected_ns) in [
            // Alone: a tenth is one part of work and nine of pause.
            (100_000, 1, 1_000, 9_000),
            // Beside one other job a quantum is worth half: a third is two parts of work and one of pause.
            (333_333, 2, 2_000, 1_000),
            (100_000, 2, 1_000, 4_000),
            (500_000, 2, 1_000, 0),
            (900_000, 2, 1_000, 0),
            (1, 1, 1_000_000, LONGEST_PAUSE_NS),
            (0, 0, u64::MAX, 0),
        ] {
            let pause = pause_ns(busy_ns, &orders(share, jobs));
            assert!(pause.abs_diff(expected_ns) <= 2, "{share} of {jobs} jobs, {busy_ns} ns: {pause}");
        }
    }

    /// One test, because the addresses of the real functions belong to the whole process: beside the second half,
    /// the first half would call an address without a function.
    #[test]
    fn without_a_driver_functions_fail_and_with_one_only_launches_are_replaced() {
        // SAFETY: no real function is known, so no argument is used.
        unsafe {
            assert_eq!(launch_graph::<1>(std::ptr::null_mut(), std::ptr::null_mut()), NOT_FOUND);
            assert_eq!(get_address(std::ptr::null(), std::ptr::null_mut(), 0, 0), NOT_FOUND);
        }
        assert!(is_capturing::<0>(std::ptr::null_mut()), "unknown counts as recording");
        assert!(!synchronize::<0>(std::ptr::null_mut()));

        let real = 4096;
        for name in [&b"cuMemAlloc_v2"[..], b"cuLaunch", b"cuLaunchKernelX", b"cuLaunchHostFunc", b"cu"] {
            assert_eq!(replacement(name, real, false), real, "{}", String::from_utf8_lossy(name));
        }
        for name in [&b"cuLaunchKernel"[..], b"cuLaunchKernelEx", b"cuGraphLaunch", b"cuLaunchCooperativeKernel"] {
            let [legacy, flagged] = [false, true].map(|is_per_thread| replacement(name, real, is_per_thread));
            assert!(legacy != real && flagged != real && legacy != flagged);
            assert_eq!(replacement(&[name, b"_ptsz"].concat(), real, false), flagged);
        }
        assert_eq!(LAUNCH[0].address(), real);
        assert_eq!(
            replacement(b"cuLaunchKernel", launch::<0> as *const () as usize, false),
            launch::<0> as *const () as usize
        );
        assert_eq!(LAUNCH[0].address(), real, "our own function never becomes the real one");
    }
}
