//! Signals as bytes in a pipe, so that one `poll` waits for them together with everything else.
//!
//! A handler may do almost nothing safely; ours writes the signal's number into a pipe that never
//! blocks. Handlers are installed without `SA_RESTART`, so that a blocking call returns and the
//! loop looks at the pipe. A signal that was ignored when the program started (`nohup`, a
//! background job of a shell without job control) stays ignored, for us and for the job.

use nix::fcntl::OFlag;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// The write end of the pipe; the process has one set of handlers, so it has one pipe.
static WRITE_END: AtomicI32 = AtomicI32::new(-1);

/// What the supervisor reacts to. USR1 and USR2 are only passed on: clusters use them to ask for a checkpoint.
const CAUGHT: [Signal; 10] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGCHLD,
    Signal::SIGCONT,
    Signal::SIGTSTP,
];

extern "C" fn note(signal: libc::c_int) {
    let byte = signal as u8;
    // SAFETY: `write` and `__errno_location` may be called in a handler; errno is put back for the interrupted code.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(WRITE_END.load(Ordering::Relaxed), (&raw const byte).cast(), 1);
        *errno = before;
    }
}

/// The caught signals of this process, in order of arrival.
pub struct Signals {
    read_end: OwnedFd,
}

impl Signals {
    /// Installs the handlers. To be called once in a process.
    pub fn install() -> io::Result<Signals> {
        let (read_end, write_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        WRITE_END.store(write_end.into_raw_fd(), Ordering::Relaxed);
        for signal in CAUGHT {
            let before = catch(signal)?;
            if matches!(before, SigHandler::SigIgn) && signal != Signal::SIGCHLD {
                set(signal, SigHandler::SigIgn)?;
            }
        }
        Ok(Signals { read_end })
    }

    /// The next caught signal, if one is waiting.
    pub fn next(&self) -> Option<Signal> {
        let mut byte = [0u8];
        match nix::unistd::read(&self.read_end, &mut byte) {
            Ok(1) => Signal::try_from(i32::from(byte[0])).ok(),
            _ => None,
        }
    }

    /// Returns when a signal is waiting; for code that waits for an answer at the same time.
    pub async fn arrived(&self) -> io::Result<()> {
        tokio::net::unix::pipe::Receiver::from_owned_fd(self.read_end.try_clone()?)?.readable().await
    }

    /// Stops this process and the rest of its group as Ctrl-Z does; returns when it goes on. Where
    /// no process could ever continue us (no shell with job control above), the kernel ignores the
    /// request and this returns at once.
    pub fn stop_own_group(&self) {
        // The handler must step aside: a caught SIGTSTP does not stop the process.
        if set(Signal::SIGTSTP, SigHandler::SigDfl).is_ok() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(0), Signal::SIGTSTP);
            let _ = catch(Signal::SIGTSTP);
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read_end.as_fd()
    }
}

fn catch(signal: Signal) -> io::Result<SigHandler> {
    set(signal, SigHandler::Handler(note))
}

fn set(signal: Signal, handler: SigHandler) -> io::Result<SigHandler> {
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler only does what is allowed in one, see `note`.
    Ok(unsafe { sigaction(signal, &action) }?.handler())
}
