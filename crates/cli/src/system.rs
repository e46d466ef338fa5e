//! What the program does between fork and exec, and in handlers of signals. All `unsafe` code of this crate is here.
//!
//! A child between fork and exec has a single thread and copies of all locks of its parent. It may make system calls,
//! but must neither allocate nor wait for a lock. The same holds for a handler of a signal. Each function here observes
//! that by itself, whatever its caller does: callers pass values that were prepared before, and no code.

#![allow(unsafe_code, reason = "the module for it")]

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sched::CpuSet;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{self, PipeWriter};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

/// Gives the child a session of its own, without a terminal.
pub fn detach(command: &mut Command) -> &mut Command {
    let start_session = || {
        nix::unistd::setsid()?;
        Ok(())
    };
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(start_session) }
}

/// Lets the kernel send `signal` to the child when this process ends, also if it is killed.
pub fn end_with_parent(command: &mut Command, signal: Signal) -> &mut Command {
    let parent = nix::unistd::getpid();
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(move || follow_parent(parent, signal)) }
}

fn follow_parent(parent: Pid, signal: Signal) -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(signal)?;
    // A parent that ended before the call above sends no signal any more.
    if nix::unistd::getppid() == parent { Ok(()) } else { Err(Errno::ESRCH.into()) }
}

/// Puts the child into the control groups that these files are the lists of. A group that refuses it is left out.
pub fn join_groups(command: &mut Command, lists: Vec<File>) -> &mut Command {
    let join = move || {
        for list in &lists {
            // "0" is the writer itself, whatever its number is in the file's namespace.
            let _ = nix::unistd::write(list, b"0");
        }
        Ok(())
    };
    // SAFETY: the closure makes one system call for each file, and it owns all that they need.
    unsafe { command.pre_exec(join) }
}

/// What a job's process needs before its program begins. Everything is opened before the fork.
pub struct JobEntry {
    /// The files by which a process joins its control groups, each with the number that names it in `troubles`.
    pub groups: Vec<(u8, File)>,
    pub cpus: Option<CpuSet>,
    /// The terminal of the job's session.
    pub terminal: Option<OwnedFd>,
    /// Takes two bytes for everything that could not be done: its number and the number of the error.
    pub troubles: PipeWriter,
}

/// Marks trouble with the CPUs rather than with a file.
pub const CPUS: u8 = u8::MAX;

/// Puts the child into a session of its own, into its control groups and on its CPUs.
pub fn enter_job(command: &mut Command, entry: JobEntry) -> &mut Command {
    let supervisor = nix::unistd::getpid();
    // SAFETY: `enter` makes only system calls, and the closure owns all that they need.
    unsafe { command.pre_exec(move || enter(&entry, supervisor)) }
}

/// Runs between fork and exec.
fn enter(entry: &JobEntry, supervisor: Pid) -> io::Result<()> {
    // Until exec the child dies with its supervisor: a job whose start was not recorded must not run unseen.
    follow_parent(supervisor, Signal::SIGKILL)?;
    nix::unistd::setsid()?;
    if let Some(terminal) = &entry.terminal {
        rustix::process::ioctl_tiocsctty(terminal)?;
    }
    let complain = |what: u8, errno: Errno| {
        let _ = nix::unistd::write(&entry.troubles, &[what, errno as i32 as u8]);
    };
    for (i, file) in &entry.groups {
        // "0" is the writer itself, whatever its number is in the file's namespace.
        if let Err(errno) = nix::unistd::write(file, b"0") {
            complain(*i, errno);
        }
    }
    if let Some(cpus) = &entry.cpus
        && let Err(errno) = nix::sched::sched_setaffinity(Pid::from_raw(0), cpus)
    {
        complain(CPUS, errno);
    }
    // Without cgroups a job is stopped and continued. Should daemon, keeper and supervisor be killed at once, the
    // kernel continues it.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGCONT);
    Ok(())
}

/// The write end of the pipe of caught signals; the process has one set of handlers, so it has one pipe.
static WRITE_END: AtomicI32 = AtomicI32::new(-1);

/// Makes the pipe to which caught signals are written, and returns its other end. To be called once in a process.
pub fn open_signal_pipe() -> io::Result<OwnedFd> {
    let (read_end, write_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    // It stays open as long as the process lives, because a handler may run at any time.
    WRITE_END.store(write_end.into_raw_fd(), Ordering::Relaxed);
    Ok(read_end)
}

/// What happens when a signal arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// The signal's number is written to the pipe.
    Catch,
    Ignore,
    Default,
}

/// Sets what happens when `signal` arrives; whether it was ignored before.
pub fn react(signal: Signal, reaction: Reaction) -> io::Result<bool> {
    let handler = match reaction {
        Reaction::Catch => SigHandler::Handler(note),
        Reaction::Ignore => SigHandler::SigIgn,
        Reaction::Default => SigHandler::SigDfl,
    };
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: the only handler is `note`, which does nothing but what is allowed in one.
    let before = unsafe { sigaction(signal, &action) }?;
    Ok(matches!(before.handler(), SigHandler::SigIgn))
}

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
