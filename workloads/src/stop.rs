//! Being asked to stop.
//!
//! SIGTERM and SIGINT only set a flag; the training loop looks at it between two steps, saves and ends. A signal that the
//! parent had set to be ignored (a background job under `nohup` or a shell without job control) stays ignored.
//! A second SIGINT ends the process at once, for the impatient; a second SIGTERM does not, because supervisors send it twice.

use std::sync::atomic::{AtomicI32, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static ASKED: AtomicI32 = AtomicI32::new(0);

extern "C" fn remember(signal: nix::libc::c_int) {
    ASKED.store(signal, Ordering::Relaxed);
}

/// Starts listening. Signals that arrive before this have their usual effect.
pub(crate) fn listen() -> nix::Result<()> {
    for (signal, flags) in
        [(Signal::SIGTERM, SaFlags::SA_RESTART), (Signal::SIGINT, SaFlags::SA_RESTART | SaFlags::SA_RESETHAND)]
    {
        let action = SigAction::new(SigHandler::Handler(remember), flags, SigSet::empty());
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        let before = unsafe { sigaction(signal, &action) }?;
        if matches!(before.handler(), SigHandler::SigIgn) {
            // SAFETY: puts back the disposition that was there.
            unsafe { sigaction(signal, &before) }?;
        }
    }
    Ok(())
}

/// The signal that asked this process to stop, if any did.
pub(crate) fn asked() -> Option<Signal> {
    Signal::try_from(ASKED.load(Ordering::Relaxed)).ok()
}
