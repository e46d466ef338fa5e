//! Types of the CUDA driver's interface, and the addresses of its real functions.

use libc::{c_int, c_void};
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

    /// Keeps the real function and returns ours.
    pub(crate) fn replace(&self, real: usize, ours: usize) -> usize {
        if real != ours {
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
