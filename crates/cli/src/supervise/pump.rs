//! Carries bytes between the job, the user and the log until the job ends; the only loop a supervisor has.
//!
//! **How.** One `poll` waits for signals, for the job's output, for room at the other side and for
//! keys. A stream is read only when what was read before has been passed on, so a slow reader slows
//! the job exactly as it would without us, and memory stays bounded. Bytes are passed on as they
//! come, never changed, never held back for more.
//!
//! **Endings.** The job ends when its main process ends. What it left in the pipes is still passed
//! on; background children that hold a pipe open are waited for only briefly ([`QUIET`],
//! [`LONGEST_LINGER`]).

use super::log::Log;
use super::record::ExitOutcome;
use super::signals::Signals;
use super::terminal::{Key, Pty, UserTerminal};
use crate::notice::{self, notice};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

const READ_BYTES: usize = 64 << 10;

/// A pipe that polls as writable takes this much without blocking (POSIX's PIPE_BUF on Linux).
const SAFE_WRITE_BYTES: usize = 4096;

/// After the main process ended: silence for this long means that nothing more will come.
const QUIET: Duration = Duration::from_millis(100);

/// After the main process ended, a background child may still write. Its output is read for no longer than this.
const LONGEST_LINGER: Duration = Duration::from_secs(2);

/// How soon we notice that the shell brought us to the foreground: it does not tell a program that was
/// running anyway.
const FOREGROUND_CHECK: Duration = Duration::from_millis(500);

/// In a job that is typed into (a REPL), Ctrl-C is a key like others; only presses closer together
/// than this mean "end!".
const IMPATIENCE: Duration = Duration::from_secs(1);

/// What repeated Ctrl-C asks for: first politely, then firmly, then at once.
#[derive(Debug, Default)]
struct Escalation {
    presses: u32,
    last: Option<Instant>,
    typed: bool,
}

impl Escalation {
    fn press(&mut self, now: Instant) -> Signal {
        if self.typed && self.last.is_none_or(|last| now.duration_since(last) > IMPATIENCE) {
            self.presses = 0;
        }
        self.last = Some(now);
        self.presses += 1;
        match self.presses {
            1 => Signal::SIGINT,
            2 => Signal::SIGTERM,
            _ => Signal::SIGKILL,
        }
    }
}

/// One direction: what was read and not yet written.
struct Stream {
    from: Option<OwnedFd>,
    to: Option<BorrowedFd<'static>>,
    /// The other end may be written in pieces of any size without blocking.
    to_is_file: bool,
    pending: Vec<u8>,
    written: usize,
}

impl Stream {
    fn new(from: OwnedFd, to: Option<BorrowedFd<'static>>) -> Stream {
        let to_is_file = to.is_some_and(|fd| {
            nix::sys::stat::fstat(fd).is_ok_and(|found| found.st_mode & libc::S_IFMT == libc::S_IFREG)
        });
        Stream { from: Some(from), to, to_is_file, pending: Vec::new(), written: 0 }
    }

    fn is_flushed(&self) -> bool {
        self.written == self.pending.len()
    }

    /// Takes what is there; the end of the stream closes our side.
    fn fill(&mut self, buffer: &mut [u8]) -> usize {
        let Some(from) = &self.from else { return 0 };
        match nix::unistd::read(from, buffer) {
            Ok(n) if n > 0 => {
                if self.to.is_some() {
                    self.pending.clear();
                    self.pending.extend_from_slice(&buffer[..n]);
                    self.written = 0;
                }
                n
            }
            Err(Errno::EINTR | Errno::EAGAIN) => 0,
            // A pty answers EIO when the last process that had it open is gone.
            _ => {
                self.from = None;
                0
            }
        }
    }

    /// Passes on what the other side takes now.
    fn drain(&mut self, is_pty: bool) {
        let Some(to) = self.to else { return };
        let left = &self.pending[self.written..];
        let piece = if self.to_is_file { left } else { &left[..left.len().min(SAFE_WRITE_BYTES)] };
        match nix::unistd::write(to, piece) {
            Ok(n) => self.written += n,
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(error) => {
                (self.to, self.written) = (None, self.pending.len());
                match error {
                    _ if is_pty => {}
                    // The reader of this stream is gone. The job is treated as without a
                    // supervisor: its next write gets SIGPIPE.
                    Errno::EPIPE => self.from = None,
                    // The disk is full, for example. The log may be on another one.
                    _ => notice!("cannot write the job's output: {}; the job and its log go on", error.desc()),
                }
            }
        }
    }
}

/// Everything the loop looks at.
pub struct Pump<'a> {
    pub signals: &'a Signals,
    pub pid: Pid,
    pub log: Option<Log>,
    streams: Vec<Stream>,
    /// The job's terminal and the user's; stream 0 then is the pty's.
    terminals: Option<(Pty, UserTerminal)>,
    keys: Vec<u8>,
    keys_closed: bool,
    escalation: Escalation,
    ended: Option<(ExitOutcome, Instant)>,
    hurry: bool,
}

impl<'a> Pump<'a> {
    pub fn new(signals: &'a Signals, pid: Pid, log: Option<Log>) -> Pump<'a> {
        Pump {
            signals,
            pid,
            log,
            streams: Vec::new(),
            terminals: None,
            keys: Vec::new(),
            keys_closed: false,
            escalation: Escalation::default(),
            ended: None,
            hurry: false,
        }
    }

    pub fn add_pty(&mut self, pty: Pty, mut user: UserTerminal) -> io::Result<()> {
        self.streams.insert(0, Stream::new(pty.master.try_clone()?, Some(user.screen())));
        user.make_raw();
        self.terminals = Some((pty, user));
        Ok(())
    }

    /// Adds output of the job; `to` is one of our standard streams, or nothing if only the log wants it.
    pub fn add_pipe(&mut self, from: OwnedFd, to: Option<i32>) {
        let to = to.map(|fd| if fd == 1 { rustix::stdio::stdout() } else { rustix::stdio::stderr() });
        self.streams.push(Stream::new(from, to));
    }

    pub fn run(mut self) -> io::Result<ExitOutcome> {
        let mut buffer = vec![0u8; READ_BYTES];
        self.reap();
        loop {
            if let Some((ending, at)) = self.ended {
                if at.elapsed() > LONGEST_LINGER {
                    self.streams.iter_mut().for_each(|s| s.from = None);
                }
                let flushed = self.streams.iter().all(Stream::is_flushed);
                if self.hurry || (flushed && self.streams.iter().all(|s| s.from.is_none())) {
                    return Ok(ending);
                }
            }
            let ready = self.wait()?;
            if ready.nothing && self.ended.is_some() && self.streams.iter().all(Stream::is_flushed) {
                self.streams.iter_mut().for_each(|s| s.from = None);
                continue;
            }
            while let Some(signal) = self.signals.next() {
                self.on_signal(signal);
            }
            for (i, (stream, ready)) in self.streams.iter_mut().zip(&ready.streams).enumerate() {
                if !ready {
                    continue;
                }
                if stream.is_flushed() {
                    let n = stream.fill(&mut buffer);
                    if let Some(log) = self.log.as_mut().filter(|_| n > 0) {
                        log.append(&buffer[..n]);
                    }
                } else {
                    stream.drain(i == 0 && self.terminals.is_some());
                }
            }
            if ready.keys_in {
                self.read_keys(&mut buffer[..SAFE_WRITE_BYTES]);
            }
            if ready.keys_out {
                self.write_keys();
            }
            if let Some((_, user)) = &mut self.terminals {
                user.make_raw();
            }
        }
    }

    fn wait(&self) -> io::Result<Ready> {
        let stdin = io::stdin();
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        let mut whose = Vec::new();
        for (i, stream) in self.streams.iter().enumerate() {
            let wanted = match (&stream.from, &stream.to) {
                (_, Some(to)) if !stream.is_flushed() => PollFd::new(*to, PollFlags::POLLOUT),
                (Some(from), _) => PollFd::new(from.as_fd(), PollFlags::POLLIN),
                _ => continue,
            };
            fds.push(wanted);
            whose.push(i);
        }
        let mut timeout = self.ended.map(|_| QUIET);
        let (mut keys_in, mut keys_out) = (None, None);
        if let Some((pty, user)) = &self.terminals {
            if !self.keys.is_empty() {
                keys_out = Some(fds.len());
                fds.push(PollFd::new(pty.master.as_fd(), PollFlags::POLLOUT));
            } else if !self.keys_closed && user.is_raw() {
                keys_in = Some(fds.len());
                fds.push(PollFd::new(stdin.as_fd(), PollFlags::POLLIN));
            } else if !self.keys_closed && user.has_keys() {
                timeout = timeout.or(Some(FOREGROUND_CHECK));
            }
        }
        let limit = timeout.map_or(PollTimeout::NONE, |t| PollTimeout::try_from(t).unwrap_or(PollTimeout::MAX));
        let count = match poll(&mut fds, limit) {
            Ok(count) => count,
            Err(Errno::EINTR) => return Ok(Ready::default().sized(self.streams.len())),
            Err(error) => return Err(error.into()),
        };
        let is_ready = |i: usize| fds[i].revents().is_some_and(|events| !events.is_empty());
        let mut ready = Ready::default().sized(self.streams.len());
        ready.nothing = count == 0;
        for (at, &i) in whose.iter().enumerate() {
            ready.streams[i] = is_ready(at + 1);
        }
        ready.keys_in = keys_in.is_some_and(is_ready);
        ready.keys_out = keys_out.is_some_and(is_ready);
        Ok(ready)
    }

    fn reap(&mut self) {
        if self.ended.is_none()
            && let Ok(status) = waitpid(self.pid, Some(WaitPidFlag::WNOHANG))
        {
            self.ended = ExitOutcome::from_wait(status).map(|ending| (ending, Instant::now()));
        }
    }

    fn on_signal(&mut self, signal: Signal) {
        if self.ended.is_some() && matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT)
        {
            // The job is over and only a reader that takes nothing keeps us: the user wants out.
            self.hurry = true;
            return;
        }
        match signal {
            Signal::SIGCHLD => self.reap(),
            Signal::SIGINT => {
                let wanted = self.escalation.press(Instant::now());
                self.escalate(wanted);
            }
            Signal::SIGWINCH => {
                if let Some((pty, user)) = &self.terminals
                    && let Some(size) = user.size()
                {
                    pty.set_size(size);
                }
            }
            Signal::SIGTSTP => self.suspend(),
            // `make_raw` follows in the loop, should the shell have changed the mode while we were stopped.
            Signal::SIGCONT => {}
            passed_on => self.send(passed_on),
        }
    }

    fn escalate(&mut self, wanted: Signal) {
        match wanted {
            Signal::SIGINT => match &self.terminals {
                Some((pty, _)) => pty.signal_foreground(Signal::SIGINT),
                None => self.send(Signal::SIGINT),
            },
            Signal::SIGTERM => {
                self.print_message("second Ctrl-C: asked the job to terminate (SIGTERM); once more kills it");
                self.send(Signal::SIGTERM);
            }
            _ => {
                self.print_message("third Ctrl-C: killed the job (SIGKILL)");
                self.send(Signal::SIGKILL);
            }
        }
    }

    fn send(&self, signal: Signal) {
        // Until it is reaped the number cannot belong to anyone else; afterwards nothing is sent.
        if self.ended.is_none() {
            let _ = killpg(self.pid, signal);
        }
    }

    fn print_message(&self, text: &str) {
        if std::io::IsTerminal::is_terminal(&io::stderr()) {
            let raw = self.terminals.as_ref().is_some_and(|(_, user)| user.is_raw());
            notice::print(&format!("\r\ngainshare: {text}{}", if raw { "\r\n" } else { "\n" }));
        }
    }

    fn suspend(&mut self) {
        self.send(Signal::SIGSTOP);
        if let Some((pty, user)) = &mut self.terminals {
            pty.signal_foreground(Signal::SIGSTOP);
            user.restore();
        }
        self.signals.stop_own_group();
        if let Some((pty, user)) = &mut self.terminals {
            user.make_raw();
            if let Some(size) = user.size() {
                pty.set_size(size);
            }
            pty.signal_foreground(Signal::SIGCONT);
        }
        self.send(Signal::SIGCONT);
    }

    fn read_keys(&mut self, buffer: &mut [u8]) {
        let n = match nix::unistd::read(io::stdin(), buffer) {
            Ok(0) | Err(Errno::EIO | Errno::EBADF) => {
                self.keys_closed = true;
                return;
            }
            Ok(n) => n,
            Err(_) => return,
        };
        for &byte in &buffer[..n] {
            let Some((pty, _)) = &self.terminals else { return };
            match pty.meaning(byte) {
                Key::Interrupt => match self.escalation.press(Instant::now()) {
                    Signal::SIGINT => self.keys.push(byte),
                    firmer => self.escalate(firmer),
                },
                Key::Suspend => self.suspend(),
                Key::Other => {
                    self.escalation.typed = true;
                    self.keys.push(byte);
                }
            }
        }
    }

    fn write_keys(&mut self) {
        let Some((pty, _)) = &self.terminals else { return };
        match nix::unistd::write(&pty.master, &self.keys) {
            Ok(n) => drop(self.keys.drain(..n)),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(_) => {
                self.keys.clear();
                self.keys_closed = true;
            }
        }
    }
}

#[derive(Default)]
struct Ready {
    nothing: bool,
    streams: Vec<bool>,
    keys_in: bool,
    keys_out: bool,
}

impl Ready {
    fn sized(mut self, streams: usize) -> Ready {
        self.streams.resize(streams, false);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_grows_firmer() {
        let mut e = Escalation::default();
        let start = Instant::now();
        assert_eq!(e.press(start), Signal::SIGINT);
        assert_eq!(e.press(start + Duration::from_secs(60)), Signal::SIGTERM);
        assert_eq!(e.press(start + Duration::from_secs(61)), Signal::SIGKILL);
        assert_eq!(e.press(start + Duration::from_secs(62)), Signal::SIGKILL);
    }

    #[test]
    fn in_a_job_that_is_typed_into_only_haste_escalates() {
        let mut e = Escalation { typed: true, ..Escalation::default() };
        let start = Instant::now();
        for i in 0..5 {
            assert_eq!(e.press(start + Duration::from_secs(5 * i)), Signal::SIGINT);
        }
        assert_eq!(e.press(start + Duration::from_millis(20_500)), Signal::SIGTERM);
        assert_eq!(e.press(start + Duration::from_millis(21_000)), Signal::SIGKILL);
    }
}
