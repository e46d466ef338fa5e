//! Signals as bytes in a pipe, so that one `poll` waits for them together with everything else.
//!
//! A handler may do almost nothing safely; ours writes the signal's number into a pipe that never
//! blocks. Handlers are installed without `SA_RESTART`, so that a blocking call returns and the
//! loop looks at the pipe. A signal that was ignored when the program started (`nohup`, a
//! background job of a shell without job control) stays ignored, for us and for the job.

use crate::system::{self, Reaction};
use nix::sys::signal::Signal;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

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

/// The caught signals of this process, in order of arrival.
pub struct Signals {
    read_end: OwnedFd,
}

impl Signals {
    /// Installs the handlers. To be called once in a process.
    pub fn install() -> io::Result<Signals> {
        let read_end = system::open_signal_pipe()?;
        for signal in CAUGHT {
            let was_ignored = system::react(signal, Reaction::Catch)?;
            if was_ignored && signal != Signal::SIGCHLD {
                system::react(signal, Reaction::Ignore)?;
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
        if system::react(Signal::SIGTSTP, Reaction::Default).is_ok() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(0), Signal::SIGTSTP);
            let _ = system::react(Signal::SIGTSTP, Reaction::Catch);
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read_end.as_fd()
    }
}
