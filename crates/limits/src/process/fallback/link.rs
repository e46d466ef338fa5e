//! The daemon's end of the line to its keeper.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// A word at least this often, even if there is nothing to say.
const BEAT: Duration = Duration::from_millis(800);

#[derive(Debug)]
pub(super) struct Link {
    child: Child,
    /// `None` only while we are being dropped.
    input: Option<ChildStdin>,
    told: BTreeMap<String, String>,
    last: Instant,
}

impl Link {
    pub(super) fn start(command: &[OsString]) -> io::Result<Link> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::NotFound)?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null());
        // SAFETY: system calls only. What is ignored stays ignored after exec: Ctrl-C and a shutdown reach everybody,
        // and the keeper must be the last to go.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_IGN);
                }
                Ok(())
            });
        }
        let mut child = command.spawn()?;
        let input = child.stdin.take().expect("the input is a pipe");
        // A keeper that hangs must not hang us.
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&input, nix::fcntl::FcntlArg::F_SETFL(flags))?;
        Ok(Link { child, input: Some(input), told: BTreeMap::new(), last: Instant::now() })
    }

    /// Tells what changed among `lines` (key and line), and frees what is no longer among them.
    pub(super) fn tell(&mut self, lines: &[(String, String)]) -> io::Result<()> {
        let mut text = String::new();
        let gone: Vec<String> = self.told.keys().filter(|key| !lines.iter().any(|(k, _)| k == *key)).cloned().collect();
        for key in gone {
            text.push_str(&format!("free {key}\n"));
            self.told.remove(&key);
        }
        for (key, line) in lines {
            if self.told.get(key) != Some(line) {
                text.push_str(line);
                text.push('\n');
                self.told.insert(key.clone(), line.clone());
            }
        }
        if text.is_empty() && self.last.elapsed() >= BEAT {
            text.push_str("beat\n");
        }
        self.write(&text)
    }

    pub(super) fn free(&mut self, key: &str) -> io::Result<()> {
        self.told.remove(key);
        self.write(&format!("free {key}\n"))
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.last = Instant::now();
        self.input.as_mut().expect("open while we live").write_all(text.as_bytes())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The end of its input is the keeper's sign to let go; it must have done so before we return. One that hangs
        // is taken away: the caller continues the jobs.
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
