//! The daemon's end of the pipe to its keeper.
//!
//! Only changed lines are written, and a heartbeat where nothing changed. Writing never blocks: a keeper that
//! hangs must not hang the daemon.

use super::keeper::LEASE;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest time between two lines.
const BEAT: Duration = Duration::from_millis(800);

#[derive(Debug)]
pub(super) struct KeeperLink {
    child: Child,
    /// `None` only while the link is being dropped.
    input: Option<ChildStdin>,
    sent: BTreeMap<String, String>,
    last: Instant,
}

impl KeeperLink {
    pub(super) fn start(command: &[OsString]) -> io::Result<KeeperLink> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::NotFound)?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null());
        // Ctrl-C and a shutdown reach every process, and the keeper must exit last.
        let signals = &[Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT];
        crate::system::ignore_before_exec(&mut command, signals);
        let mut child = command.spawn()?;
        let input = child.stdin.take().expect("the input is a pipe");
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&input, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        Ok(KeeperLink { child, input: Some(input), sent: BTreeMap::new(), last: Instant::now() })
    }

    /// Sends the changed ones of `lines` (key and line), and frees jobs that are no longer among them.
    pub(super) fn send(&mut self, lines: &[(String, String)]) -> io::Result<()> {
        let mut text = String::new();
        if self.last.elapsed() >= LEASE / 2 {
            // The keeper may have taken the silence for the daemon's death and released all jobs.
            self.sent.clear();
        }
        let gone: Vec<String> = self.sent.keys().filter(|key| !lines.iter().any(|(k, _)| k == *key)).cloned().collect();
        for key in gone {
            text.push_str(&format!("free {key}\n"));
            self.sent.remove(&key);
        }
        for (key, line) in lines {
            if self.sent.get(key) != Some(line) {
                text.push_str(line);
                text.push('\n');
                self.sent.insert(key.clone(), line.clone());
            }
        }
        if text.is_empty() && self.last.elapsed() >= BEAT {
            text.push_str("beat\n");
        }
        self.write(&text)
    }

    pub(super) fn free(&mut self, key: &str) -> io::Result<()> {
        self.sent.remove(key);
        self.write(&format!("free {key}\n"))
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.last = Instant::now();
        self.input.as_mut().expect("open until drop").write_all(text.as_bytes())
    }
}

impl Drop for KeeperLink {
    fn drop(&mut self) {
        // At the end of its input the keeper releases every job; it must have done so before this returns. A
        // keeper that hangs is killed: the caller continues the jobs.
        drop(self.input.take());
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(3) {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
