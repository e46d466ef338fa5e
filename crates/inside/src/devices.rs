//! Which GPUs a program uses, and whether its launches may be paced.
//!
//! **Problem.** The daemon shares each GPU among its jobs, so it must know which GPU a job is on. A job on several
//! GPUs, or one of several ranks, waits for its slowest part: a pause in one part stops all others. Such jobs are not
//! paced unless the user asks for it.
//!
//! **How.** Every program retains the primary context of each GPU that it uses. The call is caught, and the GPU's
//! place on the PCI bus goes into the report: it is the same number in all programs, whatever
//! `CUDA_VISIBLE_DEVICES` says. A program with a context of its own kind is asked for its GPU at the first launch. The
//! number of ranks is read from the variables that launchers set.
//!
//! **Properties.** `the_first_gpu_is_reported_and_a_second_one_ends_pacing`.

use crate::attach::{report, report_once, variable};
use crate::cuda::{NOT_FOUND, Pointer, Real, Result};
use gainshare_page::{GPU_ALL, GPU_ON, GPU_VARIABLE, RANK_VARIABLES, ReportWord};
use libc::c_int;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Attributes of a device: its place on the PCI bus.
const PCI_BUS: c_int = 33;
const PCI_DEVICE: c_int = 34;
const PCI_DOMAIN: c_int = 50;

/// What the report contains in [`ReportWord::Gpus`] for a job on several GPUs or of several ranks.
const SEVERAL: u64 = 2;

pub(crate) static RETAIN: Real = Real::new();
pub(crate) static GET_ATTRIBUTE: Real = Real::new();
/// `cuCtxGetDevice`.
pub(crate) static GET_CURRENT: Real = Real::new();

/// Whether the job may be paced on several GPUs, too.
static MAY_PACE_ALL: AtomicBool = AtomicBool::new(false);

static IS_SEVERAL: AtomicBool = AtomicBool::new(false);

/// The first GPU that this program used; 0: none yet.
static FIRST: AtomicU64 = AtomicU64::new(0);

/// Whether the driver was asked for the GPU of the first launch.
static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// Reads the variables, before the program's `main`. Whether GPU work is to be caught at all.
pub(crate) fn read_switch() -> bool {
    let switch = variable(GPU_VARIABLE).unwrap_or_default();
    MAY_PACE_ALL.store(switch == GPU_ALL.as_bytes(), Relaxed);
    let has_ranks = RANK_VARIABLES.iter().filter_map(|name| variable(name)).any(is_more_than_one);
    IS_SEVERAL.store(has_ranks, Relaxed);
    switch == GPU_ON.as_bytes() || switch == GPU_ALL.as_bytes()
}

/// Whether a decimal number is larger than one.
fn is_more_than_one(text: &[u8]) -> bool {
    let digits = text.iter().skip_while(|byte| **byte == b'0');
    let mut digits = digits.take_while(|byte| byte.is_ascii_digit());
    match (digits.next(), digits.next()) {
        (Some(first), None) => *first > b'1',
        (first, _) => first.is_some(),
    }
}

pub(crate) fn may_pace() -> bool {
    !IS_SEVERAL.load(Relaxed) || MAY_PACE_ALL.load(Relaxed)
}

type Retain = unsafe extern "C" fn(*mut Pointer, c_int) -> Result;
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Result;

/// `cuDevicePrimaryCtxRetain`: context, device.
pub(crate) unsafe extern "C" fn retain(context: *mut Pointer, device: c_int) -> Result {
    let address = RETAIN.address();
    if address == 0 {
        return NOT_FOUND;
    }
    // SAFETY: the address is that of the driver's function of this type; the arguments are the caller's.
    let result = unsafe { std::mem::transmute::<usize, Retain>(address)(context, device) };
    if result == 0 {
        note(place_of(device));
    }
    result
}

/// The place of a device on the PCI bus, never 0; the device's own number where the driver does not answer.
fn place_of(device: c_int) -> u64 {
    let address = GET_ATTRIBUTE.address();
    let attribute = |which: c_int| {
        let mut value: c_int = 0;
        // SAFETY: an address other than 0 is that of the driver's function of this type.
        let is_found = address != 0
            && unsafe { std::mem::transmute::<usize, GetAttribute>(address)(&raw mut value, which, device) == 0 };
        is_found.then_some(u64::from(value as u32))
    };
    match (attribute(PCI_DOMAIN), attribute(PCI_BUS), attribute(PCI_DEVICE)) {
        (Some(domain), Some(bus), Some(place)) => 1 << 63 | domain << 32 | (bus & 0xffff) << 16 | (place & 0xffff),
        _ => u64::from(device as u32).wrapping_add(1),
    }
}

/// Called before each launch: a program that has retained no primary context is on the GPU of its current context.
pub(crate) fn note_launch() {
    type GetCurrent = unsafe extern "C" fn(*mut c_int) -> Result;
    if FIRST.load(Relaxed) != 0 || IS_ASKED.load(Relaxed) || IS_ASKED.swap(true, Relaxed) {
        return;
    }
    let (address, mut device) = (GET_CURRENT.address(), 0);
    // SAFETY: an address other than 0 is that of the driver's function of this type.
    if address != 0 && unsafe { std::mem::transmute::<usize, GetCurrent>(address)(&raw mut device) } == 0 {
        note(place_of(device));
    }
}

/// The program uses the GPU at this place.
fn note(place: u64) {
    let first = match FIRST.compare_exchange(0, place, Relaxed, Relaxed) {
        Ok(_) => place,
        Err(first) => first,
    };
    // Another program of the job may have reported another GPU.
    let of_job = report_once(ReportWord::Gpu, first);
    if place != first || place != of_job {
        IS_SEVERAL.store(true, Relaxed);
    }
    // A job that may be paced on several GPUs counts for the first of them.
    if may_pace() {
        report_once(ReportWord::Gpus, 1);
    } else {
        report(ReportWord::Gpus, SEVERAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_counted() {
        for (text, expected) in
            [("", false), ("0", false), ("1", false), ("01", false), ("2", true), ("12", true), ("x", false)]
        {
            assert_eq!(is_more_than_one(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn the_first_gpu_is_reported_and_a_second_one_ends_pacing() {
        assert_eq!(place_of(3), 4, "without a driver the device's own number counts");
        note(7);
        note(7);
        assert!(may_pace());
        note(9);
        assert!(!may_pace());
        MAY_PACE_ALL.store(true, Relaxed);
        assert!(may_pace(), "the user asked for it");
        MAY_PACE_ALL.store(false, Relaxed);
        IS_SEVERAL.store(false, Relaxed);
        FIRST.store(0, Relaxed);
    }
}
