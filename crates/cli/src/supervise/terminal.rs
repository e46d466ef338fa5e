//! The job's own terminal (a pty) and the mode of the user's.
//!
//! **Problem.** A job that is started from a terminal should see one (progress bars, colours, line
//! buffering, Ctrl-C, a REPL), although its output passes through us.
//!
//! **How.** Each standard stream that is a terminal becomes the slave side of a new pty; the others
//! stay what they are. The user's terminal is put into raw mode, so that keys reach the pty
//! untouched and the pty's own line discipline makes signals of them. Raw mode is only taken while
//! we are in the terminal's foreground, and [`UserTerminal`] gives it back when dropped.

use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::signal::Signal;
use nix::sys::termios::{self, LocalFlags, OutputFlags, SetArg, SpecialCharacterIndices, Termios};
use nix::unistd::Pid;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Which of our standard streams are terminals.
#[derive(Debug, Clone, Copy)]
pub struct Standard {
    pub input: bool,
    pub output: bool,
    pub error: bool,
}

impl Standard {
    pub fn detect() -> Standard {
        Standard {
            input: io::stdin().is_terminal(),
            output: io::stdout().is_terminal(),
            error: io::stderr().is_terminal(),
        }
    }

    /// A pty is worth it if the job's output would be seen on a terminal.
    pub fn wants_pty(self) -> bool {
        self.output || self.error
    }
}

/// The terminal the user sits at, through whichever standard stream shows it.
pub struct UserTerminal {
    standard: Standard,
    /// The mode we found; `Some` while it is changed.
    original: Option<Termios>,
}

impl UserTerminal {
    pub fn new(standard: Standard) -> UserTerminal {
        UserTerminal { standard, original: None }
    }

    pub fn size(&self) -> Option<Winsize> {
        let rustix::termios::Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel } =
            rustix::termios::tcgetwinsize(self.screen()).ok()?;
        Some(Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel })
    }

    /// The stream through which something can be shown.
    pub fn screen(&self) -> BorrowedFd<'static> {
        if self.standard.output { rustix::stdio::stdout() } else { rustix::stdio::stderr() }
    }

    /// Whether keys typed now are meant for us.
    pub fn in_foreground(&self) -> bool {
        self.standard.input && nix::unistd::tcgetpgrp(io::stdin()).is_ok_and(|group| group == nix::unistd::getpgrp())
    }

    /// Whether there is a keyboard at all.
    pub fn has_keys(&self) -> bool {
        self.standard.input
    }

    pub fn is_raw(&self) -> bool {
        self.original.is_some()
    }

    /// Hands the keys to the job, if the terminal is ours to change.
    pub fn make_raw(&mut self) {
        if self.original.is_some() || !self.in_foreground() {
            return;
        }
        let Ok(found) = termios::tcgetattr(io::stdin()) else { return };
        let mut raw = found.clone();
        termios::cfmakeraw(&mut raw);
        if !self.standard.output {
            // Another program of the pipeline writes plain lines to this terminal (`gainshare run … | tee log`).
            raw.output_flags |= found.output_flags & (OutputFlags::OPOST | OutputFlags::ONLCR);
        }
        if termios::tcsetattr(io::stdin(), SetArg::TCSANOW, &raw).is_ok() {
            self.original = Some(found);
        }
    }

    /// Puts the mode back. In the background the shell has already done so, and writing it would stop us.
    pub fn restore(&mut self) {
        if let Some(original) = self.original.take()
            && self.in_foreground()
        {
            let _ = termios::tcsetattr(io::stdin(), SetArg::TCSADRAIN, &original);
        }
    }
}

impl Drop for UserTerminal {
    fn drop(&mut self) {
        self.restore();
    }
}

/// The job's terminal.
pub struct Pty {
    pub master: OwnedFd,
}

/// What a key means to the job's terminal at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    Interrupt,
    Suspend,
    Other,
}

impl Pty {
    /// Makes a pty that looks like the user's terminal; returns it and the side for the job.
    pub fn open(user: &UserTerminal) -> io::Result<(Pty, OwnedFd)> {
        // In the background the terminal is in the mode of a shell that waits for a command, which
        // is no mode for a job.
        let mode = if user.in_foreground() { termios::tcgetattr(user.screen()).ok() } else { None };
        let OpenptyResult { master, slave } = openpty(user.size().as_ref(), mode.as_ref())?;
        for fd in [&master, &slave] {
            nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
        }
        nix::fcntl::fcntl(&master, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
        Ok((Pty { master }, slave))
    }

    pub fn set_size(&self, size: Winsize) {
        let Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel } = size;
        let size = rustix::termios::Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel };
        let _ = rustix::termios::tcsetwinsize(&self.master, size);
    }

    /// A job that switched its terminal's signals off (an editor, a full-screen REPL) gets every key as a plain one.
    pub fn meaning(&self, byte: u8) -> Key {
        let Ok(mode) = termios::tcgetattr(&self.master) else { return Key::Other };
        if !mode.local_flags.contains(LocalFlags::ISIG) || byte == 0 {
            Key::Other
        } else if byte == mode.control_chars[SpecialCharacterIndices::VINTR as usize] {
            Key::Interrupt
        } else if byte == mode.control_chars[SpecialCharacterIndices::VSUSP as usize] {
            Key::Suspend
        } else {
            Key::Other
        }
    }

    /// Sends a signal to whatever is in the foreground of the job's terminal.
    pub fn signal_foreground(&self, signal: Signal) {
        if let Ok(group) = nix::unistd::tcgetpgrp(self.master.as_fd())
            && group.as_raw() > 1
        {
            let _ = nix::sys::signal::killpg(Pid::from_raw(group.as_raw()), signal);
        }
    }
}
