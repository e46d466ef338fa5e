//! What the library does between fork and exec, and system calls that `nix` does not have. All `unsafe` code of this
//! crate is here, but for that of `nvml`.
//!
//! A child between fork and exec has a single thread and copies of all locks of its parent. It may make system calls,
//! but must neither allocate nor wait for a lock. Each function here observes that by itself, whatever its caller does:
//! callers pass values that were prepared before, and no code.

#![allow(unsafe_code, reason = "the module for it")]

use nix::fcntl::OFlag;
use nix::sched::CpuSet;
#[cfg(feature = "fallback")]
use nix::sys::signal::SigHandler;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Makes the child start a session, join the control groups of these files and bind itself to `cpus`. It gets SIGCONT
/// when its parent dies.
pub(crate) fn enter_before_exec(command: &mut Command, procs_files: Vec<CString>, cpus: Option<CpuSet>) {
    let enter = move || {
        nix::unistd::setsid()?;
        procs_files.iter().try_for_each(|file| join(file))?;
        if let Some(cpus) = &cpus {
            nix::sched::sched_setaffinity(Pid::from_raw(0), cpus)?;
        }
        nix::sys::prctl::set_pdeathsig(Signal::SIGCONT)?;
        Ok(())
    };
    // SAFETY: the closure makes only system calls, and it owns all that they need.
    unsafe { command.pre_exec(enter) };
}

/// Joins a control group. Writing 0 means the writer itself, so that no number is formatted.
fn join(procs_file: &CStr) -> io::Result<()> {
    let file = nix::fcntl::open(procs_file, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    nix::unistd::write(&file, b"0")?;
    Ok(())
}

/// Makes the child start a session and ignore these signals, also after exec.
#[cfg(feature = "fallback")]
pub(crate) fn ignore_before_exec(command: &mut Command, signals: &'static [Signal]) {
    let ignore = move || {
        nix::unistd::setsid()?;
        for signal in signals {
            // SAFETY: no handler is installed.
            unsafe { nix::sys::signal::signal(*signal, SigHandler::SigIgn) }?;
        }
        Ok(())
    };
    // SAFETY: the closure makes only system calls and allocates nothing.
    unsafe { command.pre_exec(ignore) };
}

/// Reads an extended attribute of a file; the number of bytes that were read.
pub(crate) fn read_attribute(path: &Path, name: &CStr, value: &mut [u8]) -> io::Result<usize> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: both texts end with a zero, and the length is that of the buffer.
    let read = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// A descriptor of a process, which is readable once the process has ended. The number must belong to the wanted
/// process: the caller compares its identity afterwards.
pub(crate) fn open_process(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nothing else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
