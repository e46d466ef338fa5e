//! Functions of the CUDA driver that a program calls by name, because it is linked with the driver.
//!
//! **Problem.** Not every user of the GPU asks `dlsym` for the driver's functions: PyTorch's `libcaffe2_nvrtc`, the
//! launcher that its compiler builds, and older versions of Triton are linked with `libcuda.so.1`. The dynamic linker
//! resolves their calls without `dlsym`.
//!
//! **How.** This library is loaded before all others, so that its functions of the same names ([`crate::entry`]) are
//! called instead. At the first call of each the real function is searched for. Where GPU work is caught the call goes
//! on to the function that `dlsym` would have answered with ([`crate::gpu`]), so a launch is paced once, whichever way
//! it came. Otherwise it goes on to the real function with all arguments in place.
//!
//! **Which one is real.** Where work is caught: the function in the driver itself, which never comes back to this
//! library. Otherwise: the function that the dynamic linker would have chosen without this library.
//!
//! **Properties.** `functions_that_a_program_is_linked_with_are_paced_once` in `tests/gpu_preload.rs`. Without a driver
//! the functions return an error of the driver, and `dlsym` finds none of them.

use crate::cuda::{NOT_FOUND, Result, loaded_symbol, real_symbol};
use crate::gpu;
use crate::resolve::keep;
use std::ffi::CStr;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// The names, in the order of the numbers in [`crate::entry`].
const NAMES: [&CStr; 15] = [
    c"cuLaunchKernel",
    c"cuLaunchKernel_ptsz",
    c"cuLaunchKernelEx",
    c"cuLaunchKernelEx_ptsz",
    c"cuLaunchCooperativeKernel",
    c"cuLaunchCooperativeKernel_ptsz",
    c"cuGraphLaunch",
    c"cuGraphLaunch_ptsz",
    c"cuStreamSynchronize",
    c"cuStreamSynchronize_ptsz",
    c"cuEventSynchronize",
    c"cuCtxSynchronize",
    c"cuDevicePrimaryCtxRetain",
    c"cuGetProcAddress",
    c"cuGetProcAddress_v2",
];

/// How many functions there are.
pub(crate) const COUNT: usize = NAMES.len();

/// Where the calls of each function go; 0: not known yet.
static TARGETS: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];

/// Whether this library defines a function of this name.
pub(crate) fn is_defined(name: &[u8]) -> bool {
    name.starts_with(b"cu") && NAMES.iter().any(|defined| defined.to_bytes() == name)
}

/// Where a call goes on: the address of a function of the same type.
pub(crate) extern "C" fn target(return_address: usize, number: usize) -> usize {
    let Some(slot) = TARGETS.get(number) else { return not_found as *const () as usize };
    let known = slot.load(Acquire);
    if known != 0 {
        return known;
    }
    let Some(target) = NAMES.get(number).and_then(|name| find(return_address, name)) else {
        return not_found as *const () as usize;
    };
    slot.store(target, Release);
    target
}

/// What is called in a process without a driver.
extern "C" fn not_found() -> Result {
    NOT_FOUND
}

fn find(return_address: usize, name: &CStr) -> Option<usize> {
    let is_caught = gpu::is_driver_function(name.to_bytes());
    let in_driver = || loaded_symbol(name);
    let by_linker = || {
        real_symbol(libc::RTLD_NEXT, name).or_else(|| {
            let caller = keep(return_address);
            if caller.is_null() { None } else { real_symbol(caller, name) }
        })
    };
    let found = if is_caught { in_driver().or_else(by_linker) } else { by_linker().or_else(in_driver) }?;
    // The address is kept, so its object must stay.
    let object = keep(found);
    Some(if is_caught { gpu::catch(object, name, found) } else { found })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver_symbol;

    #[test]
    fn all_launches_and_waits_are_defined() {
        for name in [&b"cuLaunchKernel"[..], b"cuLaunchKernelEx", b"cuLaunchCooperativeKernel", b"cuGraphLaunch"] {
            assert!(is_defined(name) && is_defined(&[name, b"_ptsz"].concat()));
        }
        assert!(!is_defined(b"cuLaunchHostFunc") && !is_defined(b"cu") && !is_defined(b""));
    }

    #[test]
    fn without_a_driver_calls_fail() {
        for number in [0, COUNT - 1, COUNT, usize::MAX] {
            assert_eq!(target(0, number), not_found as *const () as usize);
        }
        assert_eq!(not_found(), NOT_FOUND);
        assert_eq!(driver_symbol(libc::RTLD_DEFAULT, c"cuLaunchKernel"), None);
    }
}
