//! Types of the CUDA driver's interface, and the addresses of its real functions.
//!
//! This library defines some of these functions itself ([`crate::direct`]), so that every search must pass over them.

use crate::resolve::{find_in_objects, is_own, symbol};
use libc::{c_int, c_void};
use std::ffi::CStr;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

pub(crate) type Pointer = *mut c_void;
pub(crate) type Result = c_int;

/// `CUDA_ERROR_NOT_FOUND`.
pub(crate) const NOT_FOUND: Result = 500;

/// A real function of the driver.
pub(crate) struct Real(AtomicUsize);

impl Real {
    pub(crate) const fn new() -> Real {
        Real(AtomicUsize::new(0))
    }

    /// Keeps the real function and returns ours. None of ours is ever taken for a real one: it would call itself.
    pub(crate) fn replace(&self, real: usize, ours: usize) -> usize {
        if real != ours && !is_own(real) {
            self.0.store(real, Relaxed);
        }
        ours
    }

    pub(crate) fn set(&self, address: usize) {
        self.0.store(address, Relaxed);
    }

    pub(crate) fn address(&self) -> usize {
        self.0.load(Relaxed)
    }
}

/// The address of a function, as `dlsym` would find it; `None`: there is none, or it is one of this library.
pub(crate) fn real_symbol(handle: Pointer, name: &CStr) -> Option<usize> {
    symbol(handle, name).filter(|address| !is_own(*address))
}

/// The address of a function in the driver if it is loaded, or else in any object that has it.
pub(crate) fn loaded_symbol(name: &CStr) -> Option<usize> {
    // SAFETY: the name ends in NUL. Nothing is loaded.
    let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let in_driver = if driver.is_null() { None } else { real_symbol(driver, name) };
    in_driver.or_else(|| find_in_objects(|handle| real_symbol(handle, name)))
}

/// The address of a driver's function, as `dlsym` would find it if this library did not define it.
pub(crate) fn driver_symbol(handle: Pointer, name: &CStr) -> Option<usize> {
    let found = symbol(handle, name)?;
    if is_own(found) { real_symbol(libc::RTLD_NEXT, name).or_else(|| loaded_symbol(name)) } else { Some(found) }
}
