//! Stopping on a signal.
//!
//! The handler of SIGTERM and SIGINT only sets a flag. The training loop reads the flag between two steps,
//! saves and ends. A signal that the parent process had set to be ignored stays ignored, as for a job under
//! `nohup` or in the background of a shell without job control. A second SIGINT ends the process at once, for
//! an impatient user; a second SIGTERM does not, because some supervisors send it twice.

use std::sync::atomic::{AtomicI32, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The number of the signal received last, or 0.
static RECEIVED: AtomicI32 = AtomicI32::new(0);

extern "C" fn store_signal(signal: nix::libc::c_int) {
    RECEIVED.store(signal, Ordering::Relaxed);
}

/// Installs the handlers. Signals that arrive earlier have their usual effect.
pub(crate) fn install_handlers() -> nix::Result<()> {
    for (signal, flags) in
        [(Signal::SIGTERM, SaFlags::SA_RESTART), (Signal::SIGINT, SaFlags::SA_RESTART | SaFlags::SA_RESETHAND)]
    {
        let action = SigAction::new(SigHandler::Handler(store_signal), flags, SigSet::empty());
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        let before = unsafe { sigaction(signal, &action) }?;
        if matches!(before.handler(), SigHandler::SigIgn) {
            // SAFETY: this restores the action that was there before.
            unsafe { sigaction(signal, &before) }?;
        }
    }
    Ok(())
}

/// The signal that asks this process to stop, if one was received.
pub(crate) fn received_signal() -> Option<Signal> {
    Signal::try_from(RECEIVED.load(Ordering::Relaxed)).ok()
}
